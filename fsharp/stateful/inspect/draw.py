"""draw: a schedule, a prediction or a measurement as a picture. Needs matplotlib, which the ``train`` extra brings."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from os import PathLike
from statistics import median
from typing import Any, NamedTuple

from fsharp.annotated import options_checked
from fsharp.errors import ScheduleError, problem
from fsharp.functional.layout.text import nbytes_text
from fsharp.stateful.inspect.estimate import Hardware, predict
from fsharp.stateful.inspect.timeline import WAITING, Timeline, TimeSpan, repeated_units, seconds_text, union, unnumbered
from fsharp.stateful.schedule.ops import OPS, STREAMS, Look, Stream, kinds
from fsharp.stateful.schedule.schedule import Schedule

Colour = tuple[float, float, float]

_WIDTH_IN, _DPI = 15.0, 150
_MARGIN_IN = 0.85, 1.15  # left and right of the axes
_FONTS = 8.5, 7.0, 6.0
_LANES: dict[Stream, float] = {"compute": 1.0, "gather": 0.75, "reduce": 0.75, "host": 0.75}
_INK, _GREY, _FAINT, _UPDATE = "#222222", "#777777", "#c8c8c8", "#555555"
_WAIT, _WAIT_LINES = "#f7d4d4", "#d62728"
_MEMORY = ("#4c78a8", "#d9730d")  # of the first timeline and of the second
_BYTES = (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes")
_SECONDS = (1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"), (1e-9, "nanoseconds")
_RAMPS = "viridis", "plasma", "cividis"
_SINGLES = "#e07b39", "#c2528b", "#8c6d4f", "#4f8fc0", "#7f9a3c", "#9467bd"


@options_checked
def draw(
    what: Schedule | Timeline,
    path: str | PathLike[str],
    *,
    hardware: Hardware | None = None,
    measured: Timeline | None = None,
) -> None:
    """Draw lanes for compute, gathers, reductions and host memory, and beneath them the bytes of the arena that are live.

    Every unit has a colour, paler in the forward. Red is time in which compute stands still. A gather that the step before
    has issued appears at the left.

    Args:
        what: a timeline, or a schedule. Without hardware a schedule is drawn in the order of its ops, each a unit of time
            wide; a collective reaches from its issue to the op that waits for it: the window in which it can hide.
        path: the picture; its suffix says the format, such as ``.png`` or ``.svg``.
        hardware: what to simulate the schedule on.
        measured: a timeline to draw beneath the other, on the same axis.

    Raises:
        ScheduleError: matplotlib is missing; hardware is given with a timeline, or ``measured`` with a mere order of ops.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ScheduleError("draw(): matplotlib is missing: pip install 'fsharp[train]', or matplotlib alone.") from error
    if isinstance(what, Timeline) and hardware:
        raise ScheduleError("draw(): hardware is for a schedule; this is a timeline, which has its times.")
    timeline = what if isinstance(what, Timeline) else predict(what, hardware) if hardware else in_order(what)
    has_times = isinstance(what, Timeline) or hardware is not None
    if measured and not has_times:
        facts = [("drawn", "ops in their order"), ("measured", f"a step of {seconds_text(measured.step_s)}")]
        raise ScheduleError(problem("draw()", "an order has no seconds to compare.", facts, "Pass hardware=."))
    timelines = [timeline, measured] if measured else [timeline]
    names = ["predicted", "measured"] if measured else [""]
    lanes = [stream for stream in STREAMS if any(span.stream == stream for t in timelines for span in t.spans)]
    heights = [0.9 * (0.4 + sum(_LANES[lane] + 0.08 for lane in lanes))] * len(timelines) + [1.35]
    height_in = sum(heights) + 0.42 * len(timelines) + 1.15
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, facecolor="white")
    grid = figure.add_gridspec(
        len(heights),
        1,
        height_ratios=heights,
        hspace=0.42 * len(heights) / sum(heights),
        left=_MARGIN_IN[0] / _WIDTH_IN,
        right=1 - _MARGIN_IN[1] / _WIDTH_IN,
        top=1 - 0.45 / height_in,
        bottom=0.85 / height_in,
    )
    longest = max(each.step_s for each in timelines) or 1.0
    style = _Style(_colours(timeline.schedule), longest, longest / (_WIDTH_IN - sum(_MARGIN_IN)), has_times)
    for i, (each, name) in enumerate(zip(timelines, names)):
        axes = figure.add_subplot(grid[i])
        axes.set_title(_title(each, name, has_times), loc="left", fontsize=10, fontweight="bold", color=_INK)
        _draw_lanes(axes, each, lanes, style)
    axes = figure.add_subplot(grid[-1])
    _draw_memory(axes, timelines, style)
    _legend(figure, axes, has_times, names)
    figure.savefig(path)


def in_order(schedule: Schedule) -> Timeline:
    """The ops one after the other, each a unit of time wide, and collectives until something waits for them."""
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


class _Style(NamedTuple):
    """What all parts of a picture share: colours of units, the end of the axis, its units per inch, and if it has times."""

    colours: dict[str, Colour]
    longest: float
    per_inch: float
    has_times: bool


class _Box(NamedTuple):
    start: float
    stop: float
    span: TimeSpan


def _draw_lanes(axes: Any, timeline: Timeline, lanes: Sequence[Stream], style: _Style) -> None:
    top, ticks = 0.4, []
    for start, stop, text, colour in _phases(timeline):
        axes.broken_barh([(start, stop - start)], (0, 0.28), facecolors=colour, edgecolors="white", linewidth=0.8)
        if _width_in(text, _FONTS[0]) <= (stop - start) / style.per_inch:
            _write(axes, (start + stop) / 2, 0.14, text, colour, _FONTS[0])
        axes.axvline(stop, color=_FAINT, linewidth=0.6, zorder=0)
    boxes = list(_boxes(timeline))
    for lane in lanes:
        mine = [box for box in boxes if box.span.stream == lane]
        rows = _rows(mine)
        height = _LANES[lane] / max(len(rows), 1)
        for i, row in enumerate(rows):
            _draw_row(axes, row, (top + i * height, height * 0.94), style)
        middle = top + _LANES[lane] / 2
        ticks.append(middle)
        if style.has_times and timeline.step_s:
            busy = sum(b - a for a, b in union((box.start, box.stop) for box in mine if box.span.kind != WAITING))
            text = f"busy {busy / timeline.step_s:.0%}"
            axes.annotate(
                text, (timeline.step_s, middle), (5, 0), textcoords="offset points", fontsize=8, va="center", color=_GREY
            )
        top += _LANES[lane] + 0.08
    axes.set(xlim=(0, style.longest), ylim=(top, 0))
    axes.set_yticks(ticks, lanes)
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=_INK)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    axes.spines[:].set_visible(False)


def _draw_row(axes: Any, row: Sequence[_Box], where: tuple[float, float], style: _Style) -> None:
    """Boxes side by side, with the names that fit."""
    if not style.has_times and style.per_inch > 40:  # they would be hairs, and hide the rest
        row = [box for box in row if _look(box.span) not in ("hatched", "faint")]
    waits = [box for box in row if _look(box.span) == "hatched"]
    others = [box for box in row if _look(box.span) != "hatched"]
    if waits:
        face, lines = (_WAIT, _WAIT_LINES) if style.has_times else ("white", _FAINT)
        places = [(box.start, box.stop - box.start) for box in waits]
        axes.broken_barh(places, where, facecolors=face, edgecolors=lines, linewidth=0, hatch="//////")
    faces = {box: _face(box.span, style.colours) for box in others}
    axes.broken_barh(
        [(box.start, box.stop - box.start) for box in others],
        where,
        facecolors=list(faces.values()),
        edgecolors=["white" if box.stop - box.start > 0.06 * style.per_inch else "none" for box in others],
        linewidth=0.6,
    )
    alike: dict[tuple[str, ...], list[_Box]] = {}
    for box in others:
        if _look(box.span) != "faint":
            alike.setdefault((unnumbered(box.span.unit), box.span.kind, box.span.phase), []).append(box)
    for boxes in alike.values():
        names = [box.span.unit or box.span.kind for box in boxes]
        _label_alike(axes, boxes, names, [faces[box] for box in boxes], where[0] + where[1] / 2, style)


def _label_alike(axes: Any, boxes: Sequence[_Box], names: Sequence[str], faces: Sequence[Any], y: float, style: _Style) -> None:
    """Names, or what is left of them from a number on, or their last keys, in one size, where most have room for them.

    Args:
        axes: what to write on.
        boxes: of units that are alike.
        names: theirs.
        faces: their colours.
        y: middle of the row.
        style: of the picture.
    """
    room = median(box.stop - box.start for box in boxes)
    from_number = [re.sub(r"^[^.\d]+\.(?=\d)", "", name) for name in names]
    for texts in (names, from_number, [name.rsplit(".", 1)[-1] for name in names]):
        for font in _FONTS:
            if _width_in(max(texts, key=len), font) <= room / style.per_inch:
                for box, text, face in zip(boxes, texts, faces):
                    if _width_in(text, font) <= (box.stop - box.start) / style.per_inch:
                        _write(axes, (box.start + box.stop) / 2, y, text, face, font)
                return


def _width_in(text: str, font: float) -> float:
    return sum(1.0 if letter in "mwMW" else 0.64 for letter in text) * font / 72 + 0.03


def _write(axes: Any, x: float, y: float, text: str, face: Any, font: float) -> None:
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(face)
    colour = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.6 else _INK
    axes.text(x, y, text, ha="center", va="center", fontsize=font, color=colour)


def _draw_memory(axes: Any, timelines: Sequence[Timeline], style: _Style) -> None:
    schedule = timelines[0].schedule
    most = max([schedule.arena, *(timeline.peak_nbytes for timeline in timelines), 1])
    scale, unit = next((scale, unit) for scale, unit in _BYTES if most >= scale)
    for timeline, colour in zip(timelines, _MEMORY):
        curve = timeline.memory
        x = [second for second, _ in curve] + [timeline.step_s]
        y = [nbytes / scale for _, nbytes in curve] + [curve[-1][1] / scale]
        if timeline is timelines[0]:
            axes.fill_between(x, y, step="post", color=colour, alpha=0.25, linewidth=0)
        axes.plot(x, y, drawstyle="steps-post", color=colour, linewidth=1.1)
    lines = [("arena", schedule.arena, "-"), ("bound", schedule.bound, "--")]
    if schedule.arena == schedule.bound:
        lines = [("arena = bound", schedule.arena, "-")]
    are_close = schedule.arena - schedule.bound < 0.16 * most
    for (name, nbytes, dashes), align in zip(
        lines, ("bottom", "top") if len(lines) == 2 and are_close else ("center", "center")
    ):
        axes.axhline(nbytes / scale, color=_INK, linewidth=0.9, linestyle=dashes)
        text, where = (
            f"{name}\n{nbytes_text(nbytes)}" if len(lines) == 1 else f"{name} {nbytes_text(nbytes)}",
            (1, nbytes / scale),
        )
        axes.annotate(
            text,
            where,
            (5, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            fontsize=8,
            va=align,
            color=_INK,
        )
    axes.set(xlim=(0, style.longest), ylim=(0, 1.12 * most / scale))
    axes.set_ylabel(f"arena, {unit}", fontsize=9, color=_INK)
    label = "position of the op"
    if style.has_times:
        seconds, label = next((s, text) for s, text in _SECONDS if style.longest >= 2 * s or s == _SECONDS[-1][0])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / seconds:g}")
    axes.set_xlabel(label, fontsize=9, color=_INK)
    axes.tick_params(labelsize=8, labelcolor=_INK)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, axes: Any, has_times: bool, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ramp = "#21918c"
    handles: list[Any] = [
        Patch(facecolor=_blend(ramp, 0.35, 1.0), label="forward"),
        Patch(facecolor=ramp, label="backward"),
        Patch(facecolor=_blend(ramp, 0.3, 0.0), label=_kinds_that_look("dark")),
        Patch(facecolor=_UPDATE, label=_kinds_that_look("grey")),
    ]
    if has_times:
        handles.append(Patch(facecolor=_WAIT, edgecolor=_WAIT_LINES, hatch="//////", linewidth=0, label="compute waits"))
    else:
        handles.append(
            Patch(facecolor="white", edgecolor=_FAINT, hatch="//////", linewidth=0, label=_kinds_that_look("hatched"))
        )
        handles.append(Patch(facecolor=_FAINT, label=_kinds_that_look("faint")))
    if len(names) > 1:
        handles += [Line2D([], [], color=colour, label=f"arena, {name}") for name, colour in zip(names, _MEMORY)]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(axes.get_position().x0, 0.06 / figure.get_figheight()),
        borderpad=0,
        borderaxespad=0,
        frameon=False,
        fontsize=8,
        ncols=len(handles),
        handlelength=1.6,
    )


def _title(timeline: Timeline, name: str, has_times: bool) -> str:
    schedule = timeline.schedule
    memory = f"peak {nbytes_text(timeline.peak_nbytes)} of {nbytes_text(schedule.arena)}"
    if not has_times:
        calls = schedule.calls()
        sent = nbytes_text(sum(call.nbytes * count for call, count in calls.items()))
        return f"{len(schedule.ops)} ops in order    {calls.total()} collectives, {sent} sent    {memory}"
    exposed = f"exposed {seconds_text(timeline.exposed_s)} ({timeline.exposed_s / (timeline.step_s or 1):.1%})"
    facts = f"step {seconds_text(timeline.step_s)}    {exposed}    overlap {timeline.overlap:.0%}    {memory}"
    return f"{name}    {facts}" if name else facts


def _phases(timeline: Timeline) -> Iterator[tuple[float, float, str, str]]:
    """Stretches of forwards, of backwards, and of what comes after: start, stop, text and colour."""
    chosen = kinds(lambda spec: spec.cost in ("compute", "update"))
    spans = [span for span in timeline.spans if span.kind in chosen]
    runs = [(phase, list(run)) for phase, run in groupby(spans, key=lambda span: span.phase)]
    times = len([phase for phase, _ in runs if phase == "forward"])
    edges = [0.0, *(run[0].start_s for _, run in runs[1:]), timeline.step_s]
    number = 0
    for (phase, _), start, stop in zip(runs, edges, edges[1:]):
        number += phase == "forward"
        text = f"{phase} {number}" if times > 1 and phase != "update" else phase
        yield start, stop, text, {"forward": "#e3e3e3", "backward": "#bfbfbf"}.get(phase, _UPDATE)


def _boxes(timeline: Timeline) -> Iterator[_Box]:
    """What to draw of each span; units that are one collective share its time."""
    shown = [span for span in timeline.spans if span.seconds > 0]
    same: dict[tuple[Stream, float, float], list[TimeSpan]] = {}
    for span in shown:
        same.setdefault((span.stream, span.start_s, span.stop_s), []).append(span)
    for group in same.values():
        for start, stop in timeline.pieces(group[0]):
            width = (stop - start) / len(group)
            for i, span in enumerate(group):
                yield _Box(start + i * width, start + (i + 1) * width, span)


def _rows(boxes: list[_Box]) -> list[list[_Box]]:
    """As few rows as it takes for no two boxes of one to overlap."""
    rows: list[list[_Box]] = []
    for box in sorted(boxes, key=lambda box: (box.start, box.stop)):
        slack = 1e-6 * (box.stop - box.start)
        row = next((row for row in rows if row[-1].stop <= box.start + slack), None)
        if row is None:
            rows.append(row := [])
        row.append(box)
    return rows


def _colours(schedule: Schedule) -> dict[str, Colour]:
    """Units that differ in a number along a ramp, others in colours of their own."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    result: dict[str, Colour] = {}
    ramps = singles = 0
    for units in repeated_units(schedule).values():
        if len(units) == 1:
            result[units[0]] = to_rgb(_SINGLES[singles % len(_SINGLES)])
            singles += 1
            continue
        ramp = colormaps[_RAMPS[ramps % len(_RAMPS)]]
        ramps += 1
        for i, unit in enumerate(units):
            result[unit] = ramp(0.12 + 0.76 * i / (len(units) - 1))[:3]
    return result


def _face(span: TimeSpan, colours: dict[str, Colour]) -> Any:
    look = _look(span)
    if look in ("grey", "faint") or not span.unit:
        return _FAINT if look == "faint" else _UPDATE
    colour = colours[span.unit]
    if span.phase == "forward":
        return _blend(colour, 0.35, 1.0)
    return _blend(colour, 0.3, 0.0) if look == "dark" else colour


def _look(span: TimeSpan) -> Look:
    """How a span is drawn: one in which compute stands still is hatched, whatever its op."""
    return "hatched" if span.kind == WAITING else OPS[span.kind, span.phase].look


def _kinds_that_look(look: Look) -> str:
    return ", ".join(kinds(lambda spec: spec.look == look))


def _blend(colour: Any, part: float, other: float) -> Colour:
    """The colour with a part of black, 0, or of white, 1."""
    from matplotlib.colors import to_rgb

    red, green, blue = ((1 - part) * channel + part * other for channel in to_rgb(colour))
    return red, green, blue
