"""The page about a run, opened by an engine of JavaScript, and by a browser."""

import html
import json
import os
import re
from itertools import combinations
from pathlib import Path

import pytest
import torch

import fsharp as fs
from fsharp.cli import main
from fsharp.errors import OptionError
from fsharp.report.page import MAX_EVENTS, MAX_MARKS, MAX_POINTS, log_page, page_data, predicted_vs_measured_rows
from fsharp.report.reading import read_log
from fsharp.report.values import SPAN_FIELDS, plain_timeline
from tests.report.pages import browser as browser, fire, html_of, opened


def timelines():
    shapes = {"layers": [torch.empty(64, 64) for _ in range(3)]}
    layout = fs.plan(shapes, fs.Mesh({"dp": 4}), fs.zero3("dp"), units="layers.*")
    schedule = fs.schedules.plan_step(layout)

    def at(bandwidth):
        return fs.inspect.predict(schedule, fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=bandwidth))

    return layout, {"predicted": at(1e7), "measured": at(1e6)}


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run that was killed in its step 7 and started again after step 4."""
    logger = fs.resilience.JsonlLogger(tmp_path / "log.jsonl")
    about = {"total": 10, "mesh": "Mesh(dp=4)", "device": "cpu", "config": {"data": "</script><b>bold</b>"}}
    logger.log(0, {"start": about})
    layout, both = timelines()
    for step in range(7):
        logger.log(step, {"loss": 10.0 - step, "own_s": [1.0, 2.0]})
    logger.log(5, {"saved": 4})
    logger.log(4, {"event": "rank 1 is a <i>straggler</i>"})
    with logger.path.open("ab") as file:
        file.write(b'{"step": 7, "los')
    logger.log(4, {"start": about | {"total": 12}})
    for step in range(4, 6):
        logger.log(step, {"loss": 1.0 + step, "norms": {"head": 3}})
    logger.log(6, {"layout": layout, **both})
    return tmp_path


def test_steps_that_are_made_again_count_once(run_dir):
    log = read_log(run_dir)
    assert log.series["loss"] == {0: 10.0, 1: 9.0, 2: 8.0, 3: 7.0, 4: 5.0, 5: 6.0}
    assert log.series["norms/head"] == {4: 3.0, 5: 3.0}
    assert (log.num_unreadable, log.saved, len(log.starts), sorted(log.own_s)) == (1, [4], 2, [0, 1, 2, 3])
    assert sorted(log.timelines) == ["measured", "predicted"]
    assert [text for _, text, _ in page_data(log, "")["marks"]] == ["started again at step 4", "rank 1 is a <i>straggler</i>"]


def test_ops_that_share_a_collective_count_once_in_what_is_compared():
    layout, _ = timelines()
    schedule = fs.schedules.plan_step(layout, fs.SchedulePolicy(bucket_nbytes=10**6))
    timeline = fs.inspect.predict(schedule, fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=1e7))
    rows = predicted_vs_measured_rows(dict.fromkeys(("predicted", "measured"), plain_timeline(timeline)))
    assert {kind: seconds for kind, *seconds in rows[2:]} == {
        kind: pytest.approx([timeline.seconds(kind)] * 2) for kind in {span.kind for span in timeline.spans if span.seconds}
    }


def test_curves_of_losses_come_first_and_then_those_of_throughput(tmp_path):
    context = page_of_rows(tmp_path, [{"step": i, "time": 9 * i, "a": 1, "a_per_s": 1, "loss": 1} for i in range(3)])
    assert json.loads(context.eval("JSON.stringify(Object.keys(data.series))")) == ["loss", "a_per_s", "a"]
    assert json.loads(context.eval("JSON.stringify(data.last)")) == [2, 18]


@pytest.mark.parametrize(
    "spans", [3, None, {"0": 1}, [1], ["ten letters"], [[0] * 9], [[0, "", "", "", "", "now", 1, 0, 0, 0]]]
)
def test_a_timeline_whose_spans_are_none_leaves_the_page_whole(run_dir, spans):
    timeline = read_log(run_dir).timelines["measured"]
    with (run_dir / "log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 8, "time": 1.0, "measured": timeline | {"spans": spans}}) + "\n")
    assert read_log(run_dir).timelines["measured"] == timeline
    fs.inspect.report(run_dir)


def test_the_page_does_not_overwrite_the_log(run_dir):
    log = (run_dir / "log.jsonl").read_bytes()
    with pytest.raises(OptionError, match=r"path is '.*log.jsonl', expected a path that ends in .html"):
        fs.inspect.report(run_dir, run_dir / "log.jsonl")
    assert (run_dir / "log.jsonl").read_bytes() == log


def test_the_page_shows_a_run(run_dir):
    path = fs.inspect.report(run_dir)
    assert path == str(run_dir / "report.html")
    text = Path(path).read_text()
    context, tags = opened(text)
    assert not tags.loads
    assert not re.search(r"https?://|@import|url\(", text), "it needs nothing from elsewhere"
    summary = context.eval("element('summary').textContent")
    assert summary.startswith("6 of 12 steps")
    assert "started 2 times" in summary
    assert "newest checkpoint after 4 steps" in summary
    assert "1 line of the log could not be read" in summary
    assert html_of(context, "values").count('class="box"') == 2
    assert "loss<span>last: 6" in html_of(context, "value-0")
    events = html_of(context, "events")
    assert "rank 1 is a &#60;i&#62;straggler" in events
    assert "started again, to go on at step 4" in events
    assert "&#60;/script&#62;&#60;b&#62;bold" in html_of(context, "environment")
    assert "<b>bold" not in html_of(context, "environment")
    assert re.search("12,?288 parameters on Mesh", html_of(context, "layout"))
    assert html_of(context, "own").count('class="curve"') == 2
    _, both = timelines()
    assert f">{both['measured'].step_s / both['predicted'].step_s:.2f}<" in html_of(context, "compared")


def test_the_timeline_has_every_span_and_zooms(run_dir):
    context, _ = opened(log_page(read_log(run_dir), title="a run"))
    _, both = timelines()
    shown = html_of(context, "timeline").count('class="span"')
    bars = {(name, s.kind, s.stream, s.start_s) for name, each in both.items() for s in each.spans if s.seconds > 2e-9}
    assert len(bars) > 20
    assert shown >= len(bars), "a span that reaches into the next step has two bars"
    fire(context, "timeline", "pointermove", clientX=200, clientY=50, target={"dataset": {"i": 0}})
    tip = context.eval("element('tip').textContent")
    assert "predicted" in tip
    assert "stream" in tip
    gathers = [text for i in range(shown) if (text := context.eval(f"view.spans[{i}]")).startswith("gather layers.")]
    assert all("sends 12.00 KiB" in text and "memory: 16.00 KiB at " in text for text in gathers)
    assert gathers
    for _ in range(3):
        fire(context, "in", "click")
    assert html_of(context, "timeline").count('class="span"') < shown
    assert context.eval("view.to - view.from") == pytest.approx(context.eval("view.length") / 8)
    fire(context, "timeline", "keydown", key="0")
    assert html_of(context, "timeline").count('class="span"') == shown


def test_charts_show_the_nearest_step(run_dir):
    context, _ = opened(log_page(read_log(run_dir), title="a run"))
    fire(context, "value-0", "mousemove", clientX=990, clientY=10)
    assert context.eval("element('tip').textContent") == "step 5\nloss: 6"


def test_a_run_that_logged_nothing_has_a_page(tmp_path):
    fs.resilience.JsonlLogger(tmp_path / "checkpoints" / "log.jsonl").log(0, {"start": {"total": 3}})
    context, _ = opened(log_page(read_log(tmp_path), title="@DATA@ <x>"))
    assert "has logged no numbers" in html_of(context, "values")
    assert "has logged no timeline" in html_of(context, "step")
    assert "undefined" not in context.eval("element('summary').textContent")


def page_of_rows(tmp_path, rows):
    """The opened page of a log with these lines: dicts, or texts as they are."""
    rows = [row if isinstance(row, str) else json.dumps({"time": 0} | row) for row in rows]
    (tmp_path / "log.jsonl").write_text("\n".join(rows) + "\n")
    return opened(log_page(read_log(tmp_path), title="a run"))[0]


def test_long_runs_are_thinned_and_keep_spikes(tmp_path):
    values = dict.fromkeys(range(3 * MAX_POINTS + 1), 1.0) | {5001: 1000.0, 5003: -7.0}
    context = page_of_rows(tmp_path, [{"step": i, "loss": x, "own_s": [x, 0.0]} for i, x in values.items()])
    for rows, spike in (("data.series.loss.points", [5001, 1000.0]), ("data.own_s", [5001, [1000.0, 0.0]])):
        kept = json.loads(context.eval(f"JSON.stringify({rows})"))
        assert MAX_POINTS / 4 < len(kept) <= MAX_POINTS + 1
        assert spike in kept
        assert kept == sorted(kept)
        assert kept[-1][0] == 3 * MAX_POINTS
    assert [5003, -7.0] in json.loads(context.eval("JSON.stringify(data.series.loss.points)"))
    assert "of each 7 values the least and the greatest" in html_of(context, "value-0")


@pytest.mark.parametrize("values", [(0.3, 3 * 0.1), (2**60, 2**60 + 256), (-0.3, -3 * 0.1)])
def test_values_that_differ_in_their_last_bits_have_a_chart(values, tmp_path):
    context = page_of_rows(tmp_path, [{"step": i, "lr": x} for i, x in enumerate(values)])
    assert 2 <= html_of(context, "value-0").count('text-anchor="end"') <= 9
    assert "NaN" not in html_of(context, "value-0")


def test_a_log_of_negative_steps_alone_counts_no_steps(tmp_path):
    """As of a validation before the training."""
    context = page_of_rows(tmp_path, [{"step": -5, "loss": 1.0}])
    assert context.eval('element("summary").textContent').startswith("0 steps, the last at ")


@pytest.mark.parametrize("values", [(-1e308, 1e308), (0.0, 1.7e308), (1.7976931348623157e308,) * 2, (1e-300, 0.0)])
def test_values_as_large_or_small_as_numbers_can_be_have_a_chart(values, tmp_path):
    context = page_of_rows(tmp_path, [{"step": i, "loss": x} for i, x in enumerate(values)])
    chart = html_of(context, "value-0")
    assert not re.search("NaN|Infinity", chart)
    assert chart.count('text-anchor="end"') >= 2
    [curve] = re.findall(r'class="curve" d="M[0-9.]+ ([0-9.]+)L[0-9.]+ ([0-9.]+)"', chart)
    heights = [float(y) for y in curve]
    assert (heights[0] > heights[1]) == (values[0] < values[1])
    assert (heights[0] < heights[1]) == (values[0] > values[1])


@pytest.mark.parametrize("nan", ['"nan"', "NaN", "Infinity", "-1e999", "1" + 400 * "0"])
def test_values_that_are_not_finite_are_marked(nan, tmp_path):
    line = f'{{"step": 3, "time": 0, "loss": {nan}, "n": {{"a": {nan}}}}}'
    context = page_of_rows(tmp_path, [*({"step": i, "loss": 1.0} for i in range(3)), line])
    assert "1 value of loss is not finite" in context.eval("element('summary').textContent")
    for name, title in (("value-0", "loss"), ("value-1", "n/a")):
        assert re.search(rf"{title}<span>last: (nan|-?inf) · 1 not finite", html_of(context, name))
        assert html_of(context, name).count('class="mark bad"') == 1
        assert not re.search("NaN|Infinity", html_of(context, name))


@pytest.mark.parametrize(
    "line",
    [
        '"step": 1e999, "time": 0',
        '"step": NaN, "time": 0',
        '"step": 1, "time": NaN',
        '"step": 1, "time": -1',
        '"step": 1, "time": 1e13',  # later than the dates of a browser
        '"step": 1' + 400 * "0",
    ],
)
def test_a_line_without_a_step_and_a_time_counts_as_cut(line, tmp_path):
    context = page_of_rows(tmp_path, [{"step": 0, "loss": 1.0}, *[f'{{{line}, "loss": 2.0}}'] * 2])
    assert "2 lines of the log could not be read" in context.eval("element('summary').textContent")
    assert "last: 1" in html_of(context, "value-0")


@pytest.mark.parametrize("ranks", [(2, 4), (4, 2), (2, 20), (20, 2)])
def test_a_run_that_changes_its_number_of_ranks_shows_all_of_them(ranks, tmp_path):
    context = page_of_rows(tmp_path, [{"step": i, "own_s": [0.1] * n} for i, n in enumerate(ranks)] + [{"step": 0, "loss": 1}])
    assert html_of(context, "own").count('class="curve"') == min(max(ranks), 16 if max(ranks) <= 16 else 3)
    assert "NaN" not in html_of(context, "own")
    assert "undefined" not in html_of(context, "own")


@pytest.mark.parametrize("value", [{"layout": "zero3", "lr": 0.5}, {"timeline": "x"}, 0.5, None, True, [{}], "text"])
@pytest.mark.parametrize("name", ["start", "own_s", "saved", "config"])
def test_values_of_other_programs_leave_the_page_whole(name, value, tmp_path):
    start = {"step": 0, "start": {"total": 9, "mesh": "m", "device": "cpu"}}
    context = page_of_rows(tmp_path, [start, {"step": 0, "loss": 1.5}, {"step": 1, "loss": 2.5, name: value}])
    assert "last: 2.5" in html_of(context, "value-0")
    assert "newest checkpoint" not in context.eval("element('summary').textContent")
    assert not any(
        "could not be drawn" in html_of(context, each) for each in ("values", "ranks", "layout", "step", "environment")
    )


def test_a_timeline_of_another_program_whose_kinds_are_no_names_has_a_page(tmp_path):
    spans = [[0, ["gather"], "u", "forward", "compute", 0.0, 1.0, 0, None, 0]]
    numbers = {"step_s": 1.0, "exposed_s": 0.0, "overlap": 0.0, "peak_nbytes": 0, "arena": 0, "memory": []}
    timeline = {"timeline": SPAN_FIELDS, "spans": spans, **numbers}
    context = page_of_rows(tmp_path, [{"step": 0, "loss": 1.5, "predicted": timeline, "measured": timeline}])
    assert "last: 1.5" in html_of(context, "value-0")
    assert "has logged no timeline" in html_of(context, "step")


def test_a_section_that_cannot_be_drawn_leaves_the_others(run_dir):
    log = read_log(run_dir)
    log.layout["rows"] = "<b>none"
    log.layout["num_params"] = "<img>"
    context, _ = opened(log_page(log, title="a run"))
    assert 'The section "layout" could not be drawn' in html_of(context, "layout")
    assert "straggler" in html_of(context, "events")
    log.layout["rows"] = []
    assert "<img>" not in html_of(opened(log_page(log, title="a run"))[0], "layout")


def test_of_many_events_the_newest_are_listed(tmp_path):
    count = 3 * MAX_EVENTS
    context = page_of_rows(tmp_path, [{"step": i, "loss": 1.0, "event": f"event {i}."} for i in range(count)])
    assert html_of(context, "value-0").count('class="mark bad"') == MAX_MARKS
    marked = json.loads(context.eval("JSON.stringify(data.marks.map(row => row[0]))"))
    assert (marked[0], marked[-1], len(set(marked))) == (0, count - 1, MAX_MARKS)
    events = html_of(context, "events")
    assert events.count("<tr>") == MAX_EVENTS + 1
    assert f"event {count - 1}." in events
    assert f"The newest {MAX_EVENTS} of {count} events are listed. Charts mark {MAX_MARKS} of {count}" in events


def test_a_browser_draws_what_the_engine_without_a_browser_draws(run_dir, browser):
    path = fs.inspect.report(run_dir)
    context, _ = opened(Path(path).read_text())
    drawn = re.findall(r'<rect class="span" data-i="\d+"', html_of(context, "timeline"))
    assert len(drawn) > 20
    page = browser(path, "--dump-dom")
    assert re.findall(r'<rect class="span" data-i="\d+"', page) == drawn
    assert "6 of 12 steps" in page
    assert "rank 1 is a &lt;i&gt;straggler" in page


MEASURE = """<script>
const rows = [...document.querySelectorAll("main > section, main > div, h2, .box, svg text, th")].map((each) => {
  const frame = each.getBoundingClientRect();
  return [each.tagName, each.textContent, frame.left, frame.top, frame.right, frame.bottom];
});
document.body.dataset.frames = JSON.stringify([document.documentElement.scrollWidth, rows]);
</script>"""


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_in_a_browser_has_no_blank_and_no_cut_parts(run_dir, browser, width):
    """Each box has pixels that are not background; no text of a picture covers another or leaves the page."""
    from matplotlib.image import imread

    page, picture = run_dir / "measured.html", run_dir / "picture.png"
    page.write_text(Path(fs.inspect.report(run_dir)).read_text().replace("</body>", f"{MEASURE}</body>"))
    size = f"--window-size={width},3200"
    shown = browser(page, size, "--dump-dom", f"--screenshot={picture}")
    text = html.unescape(re.search(r'data-frames="([^"]*)"', shown)[1])
    page_width, frames = json.loads(text)
    assert page_width <= width
    pixels = torch.from_numpy(imread(picture)[:, :, :3].copy())
    boxes = [frame for tag, _, *frame in frames if tag == "DIV"]
    assert len(boxes) == 8
    for left, top, right, bottom in boxes:
        box = pixels[int(top) + 8 : int(bottom) - 8, int(left) + 8 : int(right) - 8]
        ink = (box - box[0, 0]).abs().amax(2) > 0.1
        assert ink.float().mean() > 0.005
        assert ink.any(0).float().mean() > 0.4, "it is drawn over the width"
    texts = [(text, frame) for tag, text, *frame in frames if tag == "text"]
    assert len(texts) > 30
    assert all(frame[0] >= 0 and frame[2] <= width - 24 for _, frame in texts)
    for (one, a), (two, b) in combinations(texts, 2):
        assert min(a[2], b[2]) <= max(a[0], b[0]) or min(a[3], b[3]) - max(a[1], b[1]) <= 4, f"{one!r} covers {two!r}"


def test_a_log_with_a_layout_alone_has_a_page(tmp_path):
    """Its line was called one that cannot be read."""
    layout, _ = timelines()
    fs.resilience.JsonlLogger(tmp_path / "log.jsonl").log(0, {"layout": layout})
    context, _ = opened(Path(fs.inspect.report(tmp_path)).read_text())
    assert re.search("12,?288 parameters on Mesh", html_of(context, "layout"))


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "expected the folder of a run, with a file log.jsonl"), ("[1]\n{}\n", "has no line that can be read")],
)
def test_the_command_says_what_it_expected(content, words, tmp_path, capsys):
    if content is not None:
        (tmp_path / "log.jsonl").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_the_command_writes_the_page(run_dir, tmp_path, capsys):
    assert main(["report", str(run_dir), "--out", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'a.html'}\n"
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


def test_a_folder_whose_name_is_no_text_has_a_page(run_dir):
    """The page that was there was emptied, and then a UnicodeEncodeError was raised."""
    folder = run_dir / os.fsdecode(b"run-\xff")
    folder.mkdir()
    (run_dir / "log.jsonl").rename(folder / "log.jsonl")
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert r"run-\udcff</h1>" in page
    opened(page)
