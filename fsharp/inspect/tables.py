"""table and compare: a schedule, and predicted beside measured times, as text for people."""

import re
from collections import Counter

from fsharp.functional.layout.text import align_columns, nbytes_text, seconds_text
from fsharp.stateful.schedule.ops import OPS, Phase, kinds_where
from fsharp.stateful.schedule.schedule import Schedule, op_positions_by_bucket
from fsharp.stateful.timing.timeline import Timeline, kinds_with_collectives
from fsharp.type_checks import options_checked

_COLUMN_NAMES = ("#", "event", "op", "unit", "phase", "stream", "memory", "sent", "coded", "after")


@options_checked
def table(schedule: Schedule) -> str:
    """Return a schedule as a table in text, with a row for each op, and totals.

    The column ``coded`` has the bytes that an op encodes or decodes; it is left out if all formats are plain. In the column
    ``after``, ``'`` marks ops of the previous step. ``+`` marks an op that shares the collective of the row above.
    """
    facts = schedule.program.facts
    rows, joined = list[tuple[str, ...]]([_COLUMN_NAMES]), {i for run in op_positions_by_bucket(schedule.ops) for i in run[1:]}
    for i, op in enumerate(schedule.ops):
        is_same_event = i > 0 and schedule.ops[i - 1].event_index == op.event_index
        calls = op.spec.collectives(facts[op.unit])
        rows.append(
            (
                str(i),
                "" if is_same_event else f"{op.event_index} {schedule.program.events[op.event_index]}",
                f"+ {op.kind}" if i in joined else op.kind,
                op.unit,
                op.phase,
                op.stream,
                ", ".join(f"{m.start:,} to {m.stop:,}" for m in (op.memory, op.opens) if m),
                nbytes_text(sum(call.nbytes for call in calls)) if calls else "",
                nbytes_text(coded) if (coded := op.spec.nbytes_through_codec(facts[op.unit])) else "",
                ", ".join(f"{j}'" if j >= i else str(j) for j in op.after),
            )
        )
    if not any(row[8] for row in rows[1:]):
        rows = [(*row[:8], *row[9:]) for row in rows]
    right = {0, 7, 8} if len(rows[0]) == len(_COLUMN_NAMES) else {0, 7}
    number = Counter(op.kind for op in schedule.ops)
    calls_sent = schedule.collective_counts()
    sent = sum(call.nbytes * count for call, count in calls_sent.items())
    lines = align_columns(rows, right, lines_above={1})
    lines.append(f"{len(schedule.ops)} ops: " + ", ".join(f"{number[kind]} {kind}" for kind in kinds_where() if number[kind]))
    lines.append(f"{calls_sent.total()} collectives, {nbytes_text(sent)} sent by each rank")
    if schedule.host_copy_nbytes:
        lines.append(f"{nbytes_text(schedule.host_copy_nbytes)} copied from host memory and to it")
    peak = nbytes_text(schedule.peak_nbytes)
    return "\n".join([*lines, f"arena {nbytes_text(schedule.arena)}, of which at most {peak} are live at once"])


@options_checked
def compare(predicted: Timeline, measured: Timeline) -> str:
    """Return a table that compares a predicted with a measured step.

    The first rows are seconds, overlap and the peak of the arena. Then follow the seconds of each kind of op, and of each unit.
    Units whose names differ only in a number share a row, with the sum of their seconds.
    """
    both = predicted, measured
    summary: list[tuple[str, str, str, str]] = [
        _comparison_row("step", predicted.step_s, measured.step_s),
        _comparison_row("exposed", predicted.exposed_s, measured.exposed_s),
        ("overlap", f"{predicted.overlap:.1%}", f"{measured.overlap:.1%}", ""),
        ("peak", nbytes_text(predicted.peak_nbytes), nbytes_text(measured.peak_nbytes), ""),
    ]
    rows = [(kind, [timeline.seconds(kind) for timeline in both]) for kind in kinds_where()]
    parts: list[tuple[str, str, Phase | None]] = [
        *((phase, spec.kind, phase) for (_, phase), spec in OPS.items() if spec.cost == "compute"),
        *((kind, kind, None) for kind in kinds_with_collectives()),
    ]
    by_unit = [_seconds_by_kind_unit_and_phase(timeline) for timeline in both]
    units = [
        (
            f"{name} x{len(alike)} {what}" if len(alike) > 1 else f"{alike[0]} {what}",
            [sum(seconds[kind, unit, phase] for unit in alike) for seconds in by_unit],
        )
        for name, alike in units_by_repeated_name(predicted.schedule).items()
        for what, kind, phase in parts
    ]
    head = ("", "predicted", "measured", "ratio")
    blocks = [[_comparison_row(name, *seconds) for name, seconds in each if any(seconds)] for each in (rows, units)]
    lines_above = {1, 5, 5 + len(blocks[0])}
    return "\n".join(align_columns([head, *summary, *blocks[0], *blocks[1]], right={1, 2, 3}, lines_above=lines_above))


def _comparison_row(name: str, predicted: float, measured: float) -> tuple[str, str, str, str]:
    return name, seconds_text(predicted), seconds_text(measured), f"{measured / predicted:.2f}" if predicted else ""


def _seconds_by_kind_unit_and_phase(timeline: Timeline) -> Counter[tuple[str, str, Phase | None]]:
    """Return the seconds of a unit's spans of one kind in each phase, and with the phase None in all phases."""
    seconds: Counter[tuple[str, str, Phase | None]] = Counter()
    for span in timeline.spans:
        for phase in (span.phase, None):
            seconds[span.kind, span.unit, phase] += span.seconds  # type: ignore[assignment]
    return seconds


def units_by_repeated_name(schedule: Schedule) -> dict[str, list[str]]:
    """Return units in the order of their use, by name without numbers: ``layers.0`` is in the list of ``layers.*``."""
    result: dict[str, list[str]] = {}
    in_use = [op.unit for op in schedule.ops if op.spec.cost == "compute"]
    for unit in dict.fromkeys([*in_use, *(op.unit for op in schedule.ops if op.unit)]):
        result.setdefault(re.sub(r"\d+", "*", unit), []).append(unit)
    return result
