"""compare: a table of predicted and measured times."""

import re

from fsharp.functional.layout.text import align_columns, nbytes_text, seconds_text
from fsharp.stateful.schedule.ops import OPS, Phase, kinds_where
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.timing.timeline import Timeline, kinds_with_collectives
from fsharp.type_checks import options_checked


@options_checked
def compare(predicted: Timeline, measured: Timeline) -> str:
    """Return a table of predicted and measured seconds: of the step, of each kind of op, and of each unit.

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
    units = [
        (
            f"{name} x{len(alike)} {what}" if len(alike) > 1 else f"{alike[0]} {what}",
            [sum(timeline.seconds(kind, unit=unit, phase=phase) for unit in alike) for timeline in both],
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


def units_by_repeated_name(schedule: Schedule) -> dict[str, list[str]]:
    """Return units in the order of their use, by name without numbers: ``layers.0`` is in the list of ``layers.*``."""
    result: dict[str, list[str]] = {}
    in_use = [op.unit for op in schedule.ops if op.spec.cost == "compute"]
    for unit in dict.fromkeys([*in_use, *(op.unit for op in schedule.ops if op.unit)]):
        result.setdefault(re.sub(r"\d+", "*", unit), []).append(unit)
    return result
