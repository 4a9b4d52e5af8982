"""draw: draw a schedule, a prediction or a measurement. Needs matplotlib, of the extra ``train``."""

import re
from collections.abc import Iterator, Sequence
from itertools import cycle, groupby, pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from fsharp.errors import OptionError, ScheduleError, problem
from fsharp.functional.layout.text import nbytes_text, seconds_text
from fsharp.inspect.files import write_figure
from fsharp.inspect.hardware import Hardware, predict
from fsharp.inspect.tables import units_by_repeated_name
from fsharp.stateful.schedule.ops import OPS, STREAMS, Look, Stream, kinds_where
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.timing.timeline import WAITING, Timeline, TimeSpan, total_length, union_of_intervals
from fsharp.type_checks import options_checked

Colour = tuple[float, float, float]

_WIDTH_IN, _DPI = 15.0, 150
_MARGIN_IN = 1.0  # that labels of lanes take
_FONT_SIZE = 7.0
_LANE_HEIGHTS: dict[Stream, float] = {"compute": 1.0, "gather": 0.75, "reduce": 0.75, "host": 0.75}
_INK, _FAINT, _UPDATE, _CODED = "#222222", "#c8c8c8", "#555555", "#1b9e77"
_FORWARD_OPACITY = 0.65
_WAIT, _WAIT_LINES = "#f7d4d4", "#d62728"
_MEMORY_COLOURS = ("#4c78a8", "#d9730d")  # of the first timeline and of the second
_BYTE_UNITS = (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes")
_TIME_UNITS = (1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"), (1e-9, "nanoseconds")
_COLOUR_RAMPS = "viridis", "plasma", "cividis"
_SINGLE_COLOURS = "#e07b39", "#c2528b", "#8c6d4f", "#4f8fc0", "#7f9a3c", "#9467bd"


@options_checked
def draw(
    what: Schedule | Timeline, path: str | PathLike[str], *, hardware: Hardware | None = None, measured: Timeline | None = None
) -> None:
    """Draw a step: lanes for compute, gathers, reductions and host memory, and beneath them the live bytes of the arena.

    Each unit has a colour, which is paler in the forward. Red is time in which compute waits. Ops that encode or decode are
    green; a collective that does either has a green edge. Gathers from the end of the previous step are at the left.

    Args:
        what: a timeline, or a schedule. A schedule without ``hardware`` is drawn in the order of its ops, with equal widths; a
            collective then reaches from its issue to the op that waits for it.
        path: path of the picture; the suffix chooses the format, such as ``.png`` or ``.svg``.
        hardware: machine on which to simulate a schedule.
        measured: a second timeline, drawn beneath the first one on a common axis.

    Raises:
        ScheduleError: ``hardware`` is given for a timeline, or ``measured`` for a schedule without ``hardware``.
        ScheduleError: ``measured`` has other ops than the first timeline.
        OptionError: matplotlib is missing, or does not know the suffix of ``path``.
    """
    check_picture("draw()", path)
    from matplotlib.figure import Figure

    if isinstance(what, Timeline) and hardware:
        raise ScheduleError("draw(): hardware is for a schedule; this is a timeline, which has its times.")
    timeline = as_timeline(what, hardware)
    has_times = isinstance(what, Timeline) or hardware is not None
    if measured and not has_times:
        facts = [("drawn", "ops in their order"), ("measured", f"a step of {seconds_text(measured.step_s)}")]
        raise ScheduleError(problem("draw()", "a schedule without hardware has no times to compare.", facts, "Pass hardware=."))
    if measured and measured.schedule.ops != timeline.schedule.ops:
        facts = [("drawn", f"{len(timeline.schedule.ops)} ops"), ("measured", f"{len(measured.schedule.ops)} ops")]
        raise ScheduleError(problem("draw()", "measured is a step of another schedule.", facts, "Draw two pictures."))
    timelines = [timeline, measured] if measured else [timeline]
    names = ["predicted", "measured"] if measured else [""]
    lanes = [stream for stream in STREAMS if any(span.stream == stream for t in timelines for span in t.spans)]
    heights = [0.9 * (0.4 + sum(_LANE_HEIGHTS[lane] + 0.08 for lane in lanes))] * len(timelines) + [1.35]
    figure = Figure((_WIDTH_IN, sum(heights) + 0.42 * len(timelines) + 1.15), _DPI, facecolor="white", layout="constrained")
    all_axes = figure.subplots(len(heights), height_ratios=heights)
    longest = max(each.step_s for each in timelines) or 1.0
    units = timeline.schedule.program.facts
    coded = [op.spec.nbytes_through_codec(units[op.unit]) for op in timeline.schedule.ops]
    style = _DrawingStyle(_unit_colours(timeline.schedule), longest, longest / (_WIDTH_IN - _MARGIN_IN), has_times, coded)
    for axes, each, name in zip(all_axes, timelines, names):
        axes.set_title(_title_text(each, name, has_times), loc="left", fontsize=10, fontweight="bold", color=_INK)
        _draw_lanes(axes, each, lanes, style)
    _draw_memory(all_axes[-1], timelines, names, style)
    _draw_legend(figure, all_axes[-1], has_times, has_codes=any(coded))
    write_figure(figure, path)


def check_picture(where: str, path: str | PathLike[str]) -> None:
    """Raise an OptionError if matplotlib is missing, or does not know the suffix of ``path``."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
        from matplotlib.figure import Figure  # noqa: F401
    except ImportError as error:
        raise OptionError(f"{where}: matplotlib is missing: pip install 'fsharp[train]', or matplotlib alone.") from error
    suffix, known = Path(path).suffix[1:].lower(), FigureCanvasBase.get_supported_filetypes()
    if suffix and suffix not in known:
        what = f"Format {suffix!r} is not supported (supported formats: {', '.join(sorted(known))})"
        raise OptionError(f"{where}: path is {str(path)!r}: {what}.")


def as_timeline(step: Schedule | Timeline, hardware: Hardware | None) -> Timeline:
    """Return a timeline, predicted on ``hardware`` if ``step`` is a schedule; without hardware :func:`timeline_in_order`."""
    return step if isinstance(step, Timeline) else predict(step, hardware) if hardware else timeline_in_order(step)


def timeline_in_order(schedule: Schedule) -> Timeline:
    """Return a timeline for a schedule without times: op ``i`` starts at second ``i``.

    An op of compute lasts until the next one on its stream, and a collective until the op that waits for it. Any other op lasts
    one second.
    """
    ops, spans = schedule.ops, []
    until: dict[int, int] = {}
    for i, op in [*enumerate(ops), *((len(ops) + i, op) for i, op in enumerate(ops))]:
        for j in op.after:
            if j < i < j + len(ops):
                until.setdefault(j, i)
    in_stream = [i for i, op in enumerate(ops) if op.stream == "compute"] + [len(ops)]
    following = dict(pairwise(in_stream))
    for i, op in enumerate(ops):
        cost = op.spec.cost
        stop = until.get(i, i + 1) if cost == "send" else following[i] if cost == "compute" else i + 1
        spans.append(TimeSpan(i, op.kind, op.unit, op.phase, op.stream, float(i), float(stop)))
    return Timeline(schedule, tuple(spans), float(len(ops)))


class _DrawingStyle(NamedTuple):
    colours: dict[str, Colour]  # of units
    longest: float  # the last value on the x axis: seconds, or a number of ops
    per_inch: float  # seconds or ops on an inch of the x axis
    has_times: bool  # whether the x axis has seconds
    coded_bytes_by_op: Sequence[int]  # bytes that each op encodes or decodes


def _draw_lanes(axes: Any, timeline: Timeline, lanes: Sequence[Stream], style: _DrawingStyle) -> None:
    top, labels = 0.4, dict[float, str]()
    for start, stop, text, colour in _phase_spans(timeline):
        axes.broken_barh([(start, stop - start)], (0, 0.28), facecolors=colour, edgecolors="white", linewidth=0.8)
        _write_first_that_fits(axes, [text], start, stop, 0.14, colour, style)
        axes.axvline(stop, color=_FAINT, linewidth=0.6, zorder=0)
    boxes = list(_boxes_to_draw(timeline))
    for lane in lanes:
        mine = [box for box in boxes if box.stream == lane]
        rows = _pack_into_rows(mine)
        height = _LANE_HEIGHTS[lane] / max(len(rows), 1)
        for i, row in enumerate(rows):
            _draw_row(axes, row, (top + i * height, height * 0.94), style)
        text = str(lane)
        if style.has_times and timeline.step_s:
            busy = total_length(union_of_intervals((box.start_s, box.stop_s) for box in mine if box.kind != WAITING))
            text = f"{lane}\nbusy {busy / timeline.step_s:.0%}"
        labels[top + _LANE_HEIGHTS[lane] / 2] = text
        top += _LANE_HEIGHTS[lane] + 0.08
    axes.set(xlim=(0, style.longest), ylim=(top, 0))
    axes.set_yticks(list(labels), list(labels.values()))
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=_INK)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    axes.spines[:].set_visible(False)


def _draw_row(axes: Any, row: Sequence[TimeSpan], band: tuple[float, float], style: _DrawingStyle) -> None:
    waits = [(box.start_s, box.seconds) for box in row if _look_of(box) == "hatched"]
    if waits:
        face, lines = (_WAIT, _WAIT_LINES) if style.has_times else ("white", _FAINT)
        axes.broken_barh(waits, band, facecolors=face, edgecolors=lines, linewidth=0, hatch="//////")
    others = [box for box in row if _look_of(box) != "hatched"]
    faces = [_fill_colour(box, style.colours) for box in others]
    edges = ["white" if box.seconds > 0.06 * style.per_inch else "none" for box in others]
    places = [(box.start_s, box.seconds) for box in others]
    axes.broken_barh(places, band, facecolors=faces, edgecolors=edges, linewidth=0.6)
    coded = [place for box, place in zip(others, places) if _look_of(box) != "coded" and style.coded_bytes_by_op[box.op]]
    axes.broken_barh(coded, (band[0] + 0.85 * band[1], 0.15 * band[1]), facecolors=_CODED)
    for box, face in zip(others, faces):
        if _look_of(box) != "faint":
            name = box.unit or box.kind
            from_number = re.sub(r"^[^.\d]+\.(?=\d)", "", name)
            texts = [name, from_number, name.rsplit(".", 1)[-1]]
            _write_first_that_fits(axes, texts, box.start_s, box.stop_s, band[0] + band[1] / 2, face, style)


def _write_first_that_fits(
    axes: Any, texts: Sequence[str], start: float, stop: float, y: float, face: Any, style: _DrawingStyle
) -> None:
    from matplotlib.colors import to_rgba

    text = next((text for text in texts if 0.7 * _FONT_SIZE / 72 * len(text) <= (stop - start) / style.per_inch), "")
    if text:
        red, green, blue, alpha = to_rgba(face)
        colour = "white" if alpha * (1 - 0.3 * red - 0.59 * green - 0.11 * blue) > 0.4 else _INK
        axes.text((start + stop) / 2, y, text, ha="center", va="center", fontsize=_FONT_SIZE, color=colour)


def _draw_memory(axes: Any, timelines: Sequence[Timeline], names: Sequence[str], style: _DrawingStyle) -> None:
    schedule = timelines[0].schedule
    most = max([schedule.arena, *(timeline.peak_nbytes for timeline in timelines), 1])
    scale, unit = next((scale, unit) for scale, unit in _BYTE_UNITS if most >= scale)
    for timeline, name, colour in zip(timelines, names, _MEMORY_COLOURS):
        curve = [*timeline.memory, (timeline.step_s, timeline.memory[-1][1])]
        x, y = [second for second, _ in curve], [nbytes / scale for _, nbytes in curve]
        if timeline is timelines[0]:
            axes.fill_between(x, y, step="post", color=colour, alpha=0.25, linewidth=0)
        axes.plot(x, y, drawstyle="steps-post", color=colour, linewidth=1.1, label=f"live, {name}" if name else "live")
    for name, nbytes, dashes in (("arena", schedule.arena, "-"), ("live at most", schedule.peak_nbytes, "--")):
        axes.axhline(nbytes / scale, color=_INK, linewidth=0.9, linestyle=dashes, label=f"{name} {nbytes_text(nbytes)}")
    axes.set(xlim=(0, style.longest), ylim=(0, 1.12 * most / scale))
    axes.set_ylabel(f"arena, {unit}", fontsize=9, color=_INK)
    label = "position of the op"
    if style.has_times:
        seconds, label = next((s, text) for s, text in _TIME_UNITS if style.longest >= 2 * s or s == _TIME_UNITS[-1][0])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / seconds:g}")
    axes.set_xlabel(label, fontsize=9, color=_INK)
    axes.tick_params(labelsize=8, labelcolor=_INK)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_legend(figure: Any, axes: Any, has_times: bool, *, has_codes: bool) -> None:
    from matplotlib.patches import Patch

    ramp = (0.13, 0.57, 0.55)
    waits: dict[str, Any] = {"facecolor": _WAIT, "edgecolor": _WAIT_LINES, "label": "compute waits"}
    if not has_times:
        waits = {"facecolor": "white", "edgecolor": _FAINT, "label": _kinds_with_look("hatched")}
    handles = [
        Patch(facecolor=(*ramp, _FORWARD_OPACITY), label="forward"),
        Patch(facecolor=ramp, label="backward"),
        Patch(facecolor=_darker(ramp), label=_kinds_with_look("dark")),
        *([Patch(facecolor=_CODED, label=_kinds_with_look("coded"))] if has_codes else []),
        Patch(facecolor=_UPDATE, label=_kinds_with_look("grey")),
        Patch(**waits, hatch="//////", linewidth=0),
        *([] if has_times else [Patch(facecolor=_FAINT, label=_kinds_with_look("faint"))]),
        *axes.get_legend_handles_labels()[0],
    ]
    figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=8, ncols=len(handles))


def _title_text(timeline: Timeline, name: str, has_times: bool) -> str:
    schedule = timeline.schedule
    memory = f"peak {nbytes_text(timeline.peak_nbytes)} of {nbytes_text(schedule.arena)}"
    if not has_times:
        calls = schedule.collective_counts()
        sent = nbytes_text(sum(call.nbytes * count for call, count in calls.items()))
        return f"{len(schedule.ops)} ops in order    {calls.total()} collectives, {sent} sent    {memory}"
    exposed = f"exposed {seconds_text(timeline.exposed_s)} ({timeline.exposed_s / (timeline.step_s or 1):.1%})"
    facts = f"step {seconds_text(timeline.step_s)}    {exposed}    overlap {timeline.overlap:.0%}    {memory}"
    return f"{name}    {facts}" if name else facts


def _phase_spans(timeline: Timeline) -> Iterator[tuple[float, float, str, str]]:
    """Yield start, stop, text and colour of the forward and the backward of each microbatch, and of the update."""
    chosen = kinds_where(lambda spec: spec.cost in ("compute", "update"))
    spans = [span for span in timeline.spans if span.kind in chosen]
    runs = [(phase, list(run)) for phase, run in groupby(spans, key=lambda span: span.phase)]
    times = len([phase for phase, _ in runs if phase == "forward"])
    edges = [0.0, *(run[0].start_s for _, run in runs[1:]), timeline.step_s]
    number = 0
    for (phase, _), start, stop in zip(runs, edges, edges[1:]):
        number += phase == "forward"
        text = f"{phase} {number}" if times > 1 and phase != "update" else phase
        yield start, stop, text, {"forward": "#e3e3e3", "backward": "#bfbfbf"}.get(phase, _UPDATE)


def _boxes_to_draw(timeline: Timeline) -> Iterator[TimeSpan]:
    """Yield the spans to draw, wrapped into the step. A collective that units share becomes equal parts, one for each unit."""
    same: dict[tuple[Stream, float, float], list[TimeSpan]] = {}
    for span in timeline.spans:
        if span.seconds > 0:
            same.setdefault((span.stream, span.start_s, span.stop_s), []).append(span)
    for group in same.values():
        for start, stop in timeline.wrap_span_into_step(group[0]):
            width = (stop - start) / len(group)
            for i, span in enumerate(group):
                yield span._replace(start_s=start + i * width, stop_s=start + (i + 1) * width)


def _pack_into_rows(boxes: list[TimeSpan]) -> list[list[TimeSpan]]:
    """Distribute boxes over as few rows as possible, so that no two boxes of a row overlap."""
    rows: list[list[TimeSpan]] = []
    for box in sorted(boxes, key=lambda box: (box.start_s, box.stop_s)):
        row = next((row for row in rows if row[-1].stop_s <= box.start_s + 1e-6 * box.seconds), None)
        if row is None:
            rows.append(row := [])
        row.append(box)
    return rows


def _unit_colours(schedule: Schedule) -> dict[str, Colour]:
    """Return the colours of units. Units whose names differ only in a number get shades of one colour map, in order."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    result: dict[str, Colour] = {}
    ramps, singles = cycle(_COLOUR_RAMPS), cycle(_SINGLE_COLOURS)
    for units in units_by_repeated_name(schedule).values():
        if len(units) == 1:
            result[units[0]] = to_rgb(next(singles))
            continue
        ramp = colormaps[next(ramps)]
        for i, unit in enumerate(units):
            result[unit] = ramp(0.12 + 0.76 * i / (len(units) - 1))[:3]
    return result


def _fill_colour(span: TimeSpan, colours: dict[str, Colour]) -> Any:
    look = _look_of(span)
    if look == "coded":
        return _CODED
    if look in ("grey", "faint") or not span.unit:
        return _FAINT if look == "faint" else _UPDATE
    colour = colours[span.unit]
    if span.phase == "forward":
        return (*colour, _FORWARD_OPACITY)
    return _darker(colour) if look == "dark" else colour


def _darker(colour: Colour) -> Colour:
    red, green, blue = colour
    return 0.7 * red, 0.7 * green, 0.7 * blue


def _look_of(span: TimeSpan) -> Look:
    """Return how a span is drawn: hatched if compute waits; else as its kind of op is drawn."""
    return "hatched" if span.kind == WAITING else OPS[span.kind, span.phase].look


def _kinds_with_look(look: Look) -> str:
    return ", ".join(kinds_where(lambda spec: spec.look == look))
