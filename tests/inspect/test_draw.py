"""Pictures, traces and tables of schedules: everything is in them, and they open."""

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import fsharp as fs
from fsharp.errors import OptionError, ScheduleError
from fsharp.functional.layout.text import nbytes_text
from fsharp.inspect.drawing import (
    _boxes_to_draw,
    _draw_memory,
    _DrawingStyle,
    _fill_colour,
    _pack_into_rows,
    _phase_spans,
    _write_first_that_fits,
    draw,
    timeline_in_order,
)
from fsharp.inspect.files import write_file
from fsharp.inspect.hardware import predict
from fsharp.inspect.tables import table
from fsharp.inspect.trace_events import perfetto
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.timing.timeline import WAITING
from tests.inspect.test_simulate_schedule import BY_HAND, HARDWARE, sequential, unit

UNITS = [unit("embed", gathered=400), *(unit(f"layers.{i}") for i in range(2)), unit("head")]
SCHEDULE = compile_schedule(sequential(UNITS, 2), SchedulePolicy(prefetch=2, bucket_nbytes=200))
SLOW = replace(HARDWARE, bandwidth=30.0)


def colours(path):
    """How many pixels there are of each colour, as 0xRRGGBB."""
    from matplotlib.image import imread

    pixels = np.rint(imread(path)[..., :3] * 255).astype(np.int64) @ (1 << 16, 1 << 8, 1)
    return dict(zip(*(each.tolist() for each in np.unique(pixels, return_counts=True))))


@pytest.mark.parametrize(
    ("what", "options"),
    [
        (SCHEDULE, {}),
        (SCHEDULE, {"hardware": HARDWARE}),
        (SCHEDULE, {"hardware": HARDWARE, "measured": predict(SCHEDULE, SLOW)}),
        (predict(SCHEDULE, SLOW), {}),
        (BY_HAND.replace_ops(BY_HAND.ops[:1]), {}),
        (replace(BY_HAND, arena=0, peak_nbytes=0).replace_ops(()), {"hardware": HARDWARE}),
    ],
)
def test_pictures_are_not_blank(tmp_path, what, options):
    draw(what, tmp_path / "step.png", **options)
    found = colours(tmp_path / "step.png")
    has_ops = bool(getattr(what, "schedule", what).ops)
    assert len(found) > (20 if has_ops else 5)
    assert 0.1 < found[0xFFFFFF] / sum(found.values()) < (0.95 if has_ops else 1)


def test_waiting_is_red_and_there_is_less_of_it_on_a_fast_link(tmp_path):
    red = {}
    for name, hardware in (("slow", SLOW), ("fast", replace(HARDWARE, bandwidth=1e9, memory_bandwidth=1e9))):
        draw(SCHEDULE, tmp_path / f"{name}.png", hardware=hardware)
        red[name] = colours(tmp_path / f"{name}.png")[0xF7D4D4]
    assert red["slow"] > 50 * red["fast"]  # in the legend alone


def test_svg_has_title_lanes_and_unit_names(tmp_path):
    timeline = predict(SCHEDULE, HARDWARE)
    draw(timeline, tmp_path / "step.svg", measured=predict(SCHEDULE, SLOW))
    text = (tmp_path / "step.svg").read_text()
    busy = timeline.seconds(*{span.kind for span in timeline.spans if span.stream == "compute"} - {WAITING}) / timeline.step_s
    assert f"<!-- busy {busy:.0%} -->" in text
    assert ET.fromstring(text).tag.endswith("svg")
    written = {line.strip()[5:-4] for line in text.splitlines() if line.strip().startswith("<!-- ")}
    assert {"compute", "gather", "reduce", "embed", "head", "forward 2", "backward 1", "seconds"} <= written
    assert any(line.startswith(f"predicted    step {timeline.step_s:.2f} s    exposed") for line in written)
    assert any(line.startswith("measured    step") for line in written)


def test_boxes_of_a_lane_show_the_time_of_each_op_once_in_rows_without_overlaps():
    timeline = predict(SCHEDULE, SLOW)
    boxes = list(_boxes_to_draw(timeline))
    shared = {(span.stream, span.start_s, span.stop_s): span.seconds for span in timeline.spans}
    assert len(shared) < sum(span.seconds > 0 for span in timeline.spans)  # units that share a collective
    assert sum(box.seconds for box in boxes) == pytest.approx(sum(shared.values()))
    for lane in ("compute", "gather", "reduce"):
        mine = [box for box in boxes if box.stream == lane]
        rows = _pack_into_rows([*mine, *mine])
        assert len(rows) == 2
        assert all(a.stop_s <= b.start_s + 1e-6 for row in rows for a, b in pairwise(row))


def test_phases_begin_and_end_with_their_ops():
    timeline = predict(SCHEDULE, HARDWARE)
    names, edges = [], [0.0]
    for start, stop, text, _ in _phase_spans(timeline):
        assert start == edges[-1]
        names.append(text)
        edges.append(stop)
        phase = text.split()[0]
        inside = [span for span in timeline.spans if span.kind == "compute" and start <= span.start_s < stop]
        assert {span.phase for span in inside} == ({phase} if phase != "update" else set())
    assert names == ["forward 1", "backward 1", "forward 2", "backward 2", "update"]
    assert edges[-1] == timeline.step_s


def test_the_curve_of_memory_reaches_from_begin_to_end_in_the_unit_of_its_axis():
    from matplotlib.figure import Figure

    layout = fs.plan([torch.empty(64, 64, device="meta")] * 3, fs.Mesh({"dp": 4}), fs.zero3("dp"), units="*")
    timeline = predict(fs.schedules.plan_step(layout), HARDWARE)
    axes = Figure().subplots()
    _draw_memory(axes, [timeline], [""], _DrawingStyle({}, timeline.step_s, 1.0, True, []))
    seconds, values = axes.lines[0].get_data()
    assert axes.get_ylabel() == "arena, KiB"
    assert [*zip(seconds, values)] == [*((s, n / 1024) for s, n in timeline.memory), (timeline.step_s, values[-1])]


@pytest.mark.parametrize(("inches", "shown"), [(0.9, ["layers.10"]), (0.3, ["10"]), (0.1, [])])
def test_a_box_has_the_first_name_that_fits(inches, shown):
    from matplotlib.figure import Figure

    axes, style = Figure().subplots(), _DrawingStyle({}, 1.0, 0.5, True, [])
    _write_first_that_fits(axes, ["layers.10", "10"], 0.0, 0.5 * inches, 0.0, "white", style)
    assert [text.get_text() for text in axes.texts] == shown


def test_a_unit_is_paler_in_the_forward():
    colours = {"embed": (0.2, 0.4, 0.6)}
    spans = {s.phase: s for s in predict(SCHEDULE, HARDWARE).spans if (s.unit, s.kind) == ("embed", "compute")}
    assert _fill_colour(spans["forward"], colours) == (0.2, 0.4, 0.6, 0.65)
    assert _fill_colour(spans["backward"], colours) == (0.2, 0.4, 0.6)


def test_op_order_shows_the_window_in_which_a_collective_can_hide():
    ops = (*BY_HAND.ops[:-1], replace(BY_HAND.ops[-1], after=(1, 15)))
    spans = {span.op: span for span in timeline_in_order(BY_HAND.replace_ops(ops)).spans}
    assert (spans[1].start_s, spans[1].stop_s) == (1, 4)  # issued as op 1, waited for by op 4 and again by op 16
    assert (spans[3].start_s, spans[3].stop_s) == (3, 4)
    assert (spans[8].start_s, spans[8].stop_s) == (8, 14)


def test_drawing_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r"pip install 'fsharp\[train\]'"):
        draw(BY_HAND, tmp_path / "step.png")


def test_times_and_orders_do_not_mix(tmp_path):
    timeline = predict(BY_HAND, HARDWARE)
    with pytest.raises(ScheduleError, match=r"(?s)no times to compare.*a step of 16.50 s.*hardware="):
        draw(BY_HAND, tmp_path / "step.png", measured=timeline)
    with pytest.raises(ScheduleError, match="hardware is for a schedule"):
        draw(timeline, tmp_path / "step.png", hardware=HARDWARE)


def test_a_measured_step_of_another_schedule_is_refused(tmp_path):
    other = compile_schedule(sequential([unit("x"), unit("y")]), SchedulePolicy())
    with pytest.raises(ScheduleError, match=r"(?s)measured is a step of another schedule.*drawn +\d+ ops.*measured +\d+ ops"):
        draw(SCHEDULE, tmp_path / "a.png", hardware=HARDWARE, measured=predict(other, HARDWARE))


def test_two_writers_of_one_file_disturb_neither(tmp_path, monkeypatch):
    """The second writes while the first has written its temporary file, and has not renamed it yet."""
    path, replace_file = tmp_path / "a.png", Path.replace

    def write_another_first(partial, target):
        monkeypatch.setattr(Path, "replace", replace_file)
        write_file(path, b"second")
        return replace_file(partial, target)

    monkeypatch.setattr(Path, "replace", write_another_first)
    write_file(path, b"first")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_perfetto_has_every_op_and_the_memory(tmp_path):
    timeline, measured = predict(SCHEDULE, HARDWARE), predict(SCHEDULE, SLOW)
    perfetto(timeline, tmp_path / "step.json", measured=measured)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")}
    lanes = {"compute", "gather", "reduce"}
    assert names == {(pid, name) for pid, process in ((1, "predicted"), (2, "measured")) for name in {process} | lanes}
    for pid, shown in ((1, timeline), (2, measured)):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert {e["args"]["op"] for e in spans} == set(range(len(SCHEDULE.ops)))
        assert sum(e["dur"] for e in spans if e["cat"] == "compute") == pytest.approx(1e6 * shown.seconds("compute"))
        sent = sum(e["args"].get("sent", 0) for e in spans)
        assert sent == sum(call.nbytes * count for call, count in SCHEDULE.collective_counts().items())
        assert max(e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == pid) == shown.peak_nbytes
        for lane in range(3):
            mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == lane)
            assert all(a == b or a[1] <= b[0] + 1e-3 for a, b in pairwise(mine)), "spans of a lane overlap"


def test_table_has_every_op_and_what_they_come_to():
    lines = table(SCHEDULE).splitlines()
    rows = lines[2:-3]
    assert [int(row.split()[0]) for row in rows] == list(range(len(SCHEDULE.ops)))
    for row, op in zip(rows, SCHEDULE.ops, strict=True):
        assert f"{op.kind} {op.unit} {op.phase}" in " ".join(row.split()) or not op.unit, row
        if op.memory:
            assert f"{op.memory.start:,} to {op.memory.stop:,}" in row
    carried = next(op for i, op in enumerate(SCHEDULE.ops) if any(j >= i for j in op.after))
    assert rows[SCHEDULE.ops.index(carried)].endswith(f"{carried.after[0]}'")
    joined = sum(op.bucket >= 0 for op in SCHEDULE.ops)
    assert sum("+ gather" in row or "+ reduce" in row for row in rows) == joined - len(
        {op.bucket for op in SCHEDULE.ops} - {-1}
    )
    assert lines[-3].startswith(f"{len(SCHEDULE.ops)} ops: ")
    assert lines[-2].startswith(f"{SCHEDULE.collective_counts().total()} collectives")
    assert lines[-1].startswith(f"arena {nbytes_text(SCHEDULE.arena)}, of which at most {nbytes_text(SCHEDULE.peak_nbytes)}")
