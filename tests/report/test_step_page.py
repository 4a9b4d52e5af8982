"""The interactive picture of steps: as a page, in a notebook, and on the site of the documents."""

import re
from contextlib import chdir
from dataclasses import replace
from html.parser import HTMLParser
from itertools import groupby

import pytest
import torch

import fsharp as fs
from fsharp.functional.layout.text import nbytes_text, seconds_text
from fsharp.report.step import MAX_OPS
from fsharp.report.values import plain_timeline
from tests.report.pages import browser as browser, fire, html_of, opened
from tests.test_docs import ROOT, programs

HARDWARE = fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=1e7)


def schedules(num_layers=3):
    shapes = {"layers": [torch.empty(64, 64, device="meta") for _ in range(num_layers)]}
    mesh = fs.Mesh({"dp": 4})
    return {
        each.__name__: fs.schedules.plan_step(fs.plan(shapes, mesh, each("dp"), units="layers.*"))
        for each in (fs.zero3, fs.zero1)
    }


def test_the_peak_is_that_of_live_bytes_also_if_the_arena_is_larger():
    schedule = schedules()["zero3"]
    plain = plain_timeline(fs.inspect.predict(replace(schedule, arena=schedule.arena + 4096), HARDWARE))
    assert plain["peak_nbytes"] == max(nbytes for _, nbytes in plain["memory"]) < plain["arena"] == schedule.arena + 4096


def tips(context):
    """What the page says of each bar that it draws."""
    for i in range(html_of(context, "timeline").count('class="span"')):
        fire(context, "timeline", "pointermove", clientX=200, clientY=50, target={"dataset": {"i": i}})
        yield context.eval("element('tip').textContent").replace(",", "")  # engines write thousands in different ways


def said_of(timeline, name):
    """What the page has to say of each bar, from the timeline and its schedule. Spans that are one collective are a bar."""
    schedule = timeline.schedule
    facts = schedule.program.facts

    def bar(span):
        return span.kind, span.stream, round(span.start_s, 9), round(span.stop_s, 9)

    for (kind, stream, start, stop), group in groupby(sorted(timeline.spans, key=bar), key=bar):
        spans = sorted(group, key=lambda span: span.op)
        ops = [schedule.ops[span.op] for span in spans]
        sent = sum(call.nbytes for op in ops for call in op.spec.collectives(facts[op.unit]) if kind == op.kind)
        memory = "; ".join(f"{nbytes_text(op.memory.nbytes)} at {op.memory.start}" for op in ops if op.memory)
        if stop > start:
            yield "\n".join(
                [
                    f"{kind} {' '.join(op.unit for op in ops)}".strip(),
                    f"{name} {ops[0].phase} stream {stream} op {' '.join(str(span.op) for span in spans)}",
                    f"{seconds_text(stop - start)} from {seconds_text(start)} to {seconds_text(stop)}",
                    *([f"sends {nbytes_text(sent)}"] if sent else []),
                    *([f"memory: {memory}"] if memory else []),
                ]
            )


def test_each_bar_says_op_unit_bytes_time_and_memory():
    planned = schedules()
    text = fs.inspect.step_page(planned, hardware=HARDWARE, title="<two> strategies")
    context, tags = opened(text)
    assert "<title>&lt;two&gt; strategies</title>" in text
    assert not tags.loads
    assert not re.search(r"https?://|@import|url\(", text), "it needs nothing from elsewhere"
    timelines = {name: fs.inspect.predict(schedule, HARDWARE) for name, schedule in planned.items()}
    said = {each for name, timeline in timelines.items() for each in said_of(timeline, name)}
    assert len(said) > 30
    assert set(tips(context)) == said
    drawn = html_of(context, "timeline")
    for name, timeline in timelines.items():
        assert f"{name}: {seconds_text(timeline.step_s)} a step, compute waits {seconds_text(timeline.exposed_s)}" in drawn


def test_the_curve_of_memory_says_how_many_bytes_are_live():
    timeline = fs.inspect.predict(schedules()["zero3"], HARDWARE)
    context, _ = opened(fs.inspect.step_page({"a": timeline}))
    for second, nbytes in timeline.memory:
        second += 1e-9  # between two changes
        fire(
            context,
            "timeline",
            "pointermove",
            clientX=92 + 908 * second / timeline.step_s,
            clientY=50,
            target={"dataset": {"name": "a"}},
        )
        assert context.eval("element('tip').textContent").startswith(f"{nbytes_text(nbytes)} of the arena are live at")


def test_without_hardware_ops_are_in_order():
    schedule = schedules()["zero3"]
    context, _ = opened(fs.inspect.step_page(schedule))
    drawn = html_of(context, "timeline")
    sent = sum(call.nbytes * count for call, count in schedule.collective_counts().items())
    assert f">{len(schedule.ops)} ops in order, {nbytes_text(sent)} sent<" in drawn
    found = "\n".join(tips(context))
    assert not re.search(r"\d (s|ms|us|ns)\b", drawn + found), "there are no times"
    waits = {j: i for i, op in enumerate(schedule.ops) for j in op.after if schedule.ops[j].spec.cost == "send" and j < i}
    assert waits
    for issue, wait in waits.items():
        assert re.search(rf"op {issue}\nfrom {issue} to {wait}\b", found)


def test_an_empty_schedule_has_a_page():
    context, _ = opened(fs.inspect.step_page(schedules()["zero3"].replace_ops([])))
    assert "0 ops in order, 0 B sent" in html_of(context, "timeline")


@pytest.mark.parametrize(
    ("steps", "hardware", "words"),
    [
        ("no step", None, "steps is 'no step', expected"),
        ({}, None, "steps is empty"),
        ({"a": 3}, None, r"steps\['a'\] is 3, expected a name and a Schedule or Timeline"),
        ({7: "zero3"}, None, r"steps\[7\] is Schedule"),
        ({"a": "predicted"}, HARDWARE, "hardware is for schedules"),
        (
            {"a": "predicted", "b": "zero3"},
            None,
            "have no times to compare.\n  without times  b\n  with times     a\nPass hardware=",
        ),
    ],
)
def test_errors_say_what_is_expected(steps, hardware, words):
    known = schedules()
    known["predicted"] = fs.inspect.predict(known["zero3"], HARDWARE)
    if isinstance(steps, dict):
        steps = {name: known.get(each, each) for name, each in steps.items()}
    with pytest.raises(fs.errors.FsharpError, match=words):
        fs.inspect.step_page(steps, hardware=hardware)


class Frame(HTMLParser):
    """The text around a frame, and the frame's attributes."""

    def __init__(self, text):
        super().__init__()
        self.text, self.attributes = "", {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "iframe":
            self.attributes = dict(attrs)

    def handle_data(self, data):
        self.text += data


def test_notebooks_show_schedules_and_timelines():
    schedule = schedules()["zero3"]
    timeline = fs.inspect.predict(schedule, HARDWARE)
    table = fs.inspect.table(schedule)
    for value, words in ((schedule, "A schedule: "), (timeline, f"A timeline: {seconds_text(timeline.step_s)} a step")):
        shown = value._repr_html_()
        frame = Frame(shown)
        assert frame.text.startswith(words), "where frames are taken away, as in a notebook on GitHub, the text stays"
        assert frame.attributes["sandbox"] == "allow-scripts", "the picture's code cannot reach the notebook"
        context, tags = opened(frame.attributes["srcdoc"])
        assert not tags.loads
        assert html_of(context, "timeline").count('class="span"') > 10
        assert "<p>A lane" not in html_of(context, "step"), "it is small"
        assert len(shown) < 40_000
        assert "html" not in repr(value), "the text is that of a dataclass"
    numbers = re.findall(r"[\d.]+ (?:ops|collectives|sent|B|KiB)", Frame(schedule._repr_html_()).text)
    assert len(numbers) == 4
    assert all(each in table for each in numbers)


def test_a_notebook_does_not_draw_thousands_of_ops():
    schedule = schedules(num_layers=2)["zero3"]
    many = schedule.replace_ops(schedule.ops * (MAX_OPS // len(schedule.ops) + 1))
    shown = many._repr_html_()
    assert f"A schedule: {len(many.ops)} ops" in shown
    assert "fs.inspect.step_page()" in shown
    assert len(shown) < 1000


POINT = """<script>
const bar = document.querySelector("rect.span");
bar.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 300, clientY: 100}));
</script>"""


@pytest.fixture
def framed(tmp_path):
    """The pages that the program of docs/overlap.md has written, and that its page frames."""
    page = ROOT / "docs" / "overlap.md"
    with chdir(tmp_path):
        exec(compile("\n".join(programs(page)), page.name, "exec"), {})
    names = re.findall(r'<iframe [^>]*src="([^"]+)"', page.read_text())
    assert names
    return [tmp_path / name for name in names]


def bars_of(shown):
    return re.findall(r'<rect class="span" data-i="\d+"', shown)


def test_the_program_of_a_page_draws_the_pictures_that_the_page_frames(framed):
    for path in framed:
        context, _ = opened(path.read_text())
        assert len(bars_of(html_of(context, "timeline"))) > 50


def test_a_browser_draws_and_explains_the_pictures_of_a_page(framed, browser, tmp_path):
    for path in framed:
        context, _ = opened(path.read_text())
        pointed = tmp_path / "pointed.html"
        pointed.write_text(path.read_text().replace("</body>", f"{POINT}</body>"))
        shown = browser(pointed, "--dump-dom")
        assert bars_of(shown) == bars_of(html_of(context, "timeline"))
        tip = re.search(r'id="tip"[^>]*>([^<]*)<', shown)[1]
        assert "stream" in tip
        assert " from " in tip
