"""Trace: measured times of steps and their ops."""

import math
from collections.abc import Iterable, Mapping
from statistics import median, median_low

from fsharp.errors import ScheduleError, problem
from fsharp.stateful.schedule.ops import Phase, Stream, kinds_where
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.timing.timeline import WAITING, Timeline, TimeSpan
from fsharp.tracebacks import api_boundary

TraceRow = tuple[int, str, str, Phase, Stream, float, float, int]
"""A measured op: position in the schedule, kind, unit, phase, stream, start and stop in seconds, and number of its step.

The kind ``"wait"`` is time in which the compute stream, or the host, waited before the op.
"""


class Trace:
    """Measured times of steps and their ops, in seconds of one clock.

    A ``compute`` op is measured from the start of a unit's use to its end, with nested units; :meth:`compute_times` subtracts
    the time of nested units. A collective is measured from its issue to its completion, by events of its stream or by the host.

    Attributes:
        rows: the measured ops, in no particular order. Ops that only the next step waits for are added when that step ends.
        steps: start and stop of each step that has ended.
    """

    def __init__(self) -> None:
        self.rows: list[TraceRow] = []
        self.steps: list[tuple[float, float]] = []

    @api_boundary
    def timeline(self, schedule: Schedule, *, step: int | None = None) -> Timeline:
        """Return the timeline of one step.

        Args:
            schedule: the schedule that the step followed.
            step: index of the step among ended steps, from 0; -1 is the last. None: the step of median duration among the steps
                with the most measured ops: of the last step gathers may be under way, and so not measured yet.

        Raises:
            ScheduleError: nothing was recorded, no such step has ended, or the ops belong to another schedule.
        """
        steps = self.ended_steps()
        if step is None:
            most = max(len(rows) for _, rows in steps)  # the last step's last gathers may be under way
            durations = {i: stop - start for i, ((start, stop), rows) in enumerate(steps) if len(rows) == most}
            step = min(i for i, each in durations.items() if each == median_low(durations.values()))
        if not -len(steps) <= step < len(steps):
            raise ScheduleError(f"Trace.timeline(): step is {step}, and {len(steps)} steps have ended.")
        (start, stop), rows = steps[step]
        check_rows("Trace.timeline()", schedule, rows)
        spans = (span._replace(start_s=span.start_s - start, stop_s=span.stop_s - start) for span in self_spans(rows))
        return Timeline(schedule, tuple(sorted(spans, key=lambda span: (span.start_s, span.op))), stop - start)

    def compute_times(self) -> dict[str, tuple[float, float]]:
        """Return median seconds ``(forward, backward)`` by unit, without nested units, for ``Hardware(compute_times=)``."""
        times: dict[tuple[str, Phase], list[float]] = {}
        computing = kinds_where(lambda spec: spec.cost == "compute")
        for _, rows in self.ended_steps():
            own: dict[int, list[TimeSpan]] = {}
            for span in self_spans(rows):
                if span.kind in computing:
                    own.setdefault(span.op, []).append(span)
            for spans in own.values():
                times.setdefault((spans[0].unit, spans[0].phase), []).append(sum(span.seconds for span in spans))
        return median_times_by_unit(times)

    def update_time(self) -> float:
        """Return the median over steps of the seconds of the optimizer step, without waits, for ``Hardware(update_s=)``.

        A step without an update counts as 0 seconds. Raises ScheduleError if nothing was recorded.
        """
        updates = kinds_where(lambda spec: spec.cost == "update")
        return median(sum(span.seconds for span in self_spans(rows) if span.kind in updates) for _, rows in self.ended_steps())

    @api_boundary
    def ended_steps(self) -> list[tuple[tuple[float, float], list[TraceRow]]]:
        """Return ``((start, stop), rows)`` for each ended step, in order. Raises ScheduleError if nothing was recorded."""
        if not self.rows:
            raise ScheduleError("Trace: nothing was recorded.")
        rows: list[list[TraceRow]] = [[] for _ in self.steps]
        for row in self.rows:
            rows[row[7]].append(row)
        return list(zip(self.steps, rows, strict=True))


def median_times_by_unit(times: Mapping[tuple[str, Phase], list[float]]) -> dict[str, tuple[float, float]]:
    """Return the median seconds ``(forward, backward)`` by unit, 0 for a phase without times. Outer units come first.

    The keys can be used as patterns, of which the last match counts: an outer unit's pattern also matches its inner units,
    whose own patterns come later.
    """
    units = sorted(dict.fromkeys(unit for unit, _ in times), key=lambda unit: unit.count("."))
    return {unit: (median(times.get((unit, "forward"), [0.0])), median(times.get((unit, "backward"), [0.0]))) for unit in units}


def check_rows(where: str, schedule: Schedule, rows: Iterable[TraceRow]) -> None:
    """Raise a ScheduleError that begins with ``where`` if rows measure ops that are not in a schedule."""
    for index, kind, unit, phase, *_ in rows:
        op = schedule.ops[index] if 0 <= index < len(schedule.ops) else None
        if op is None or kind not in (op.kind, WAITING) or (unit, phase) != (op.unit, op.phase):
            facts = [("measured", f"op {index}: {kind} {unit or '-'} {phase}"), ("schedule", op or f"{len(schedule.ops)} ops")]
            raise ScheduleError(
                problem(where, "these are measurements of another schedule.", facts, "Pass the schedule that ran.")
            )


def self_spans(rows: Iterable[TraceRow]) -> list[TimeSpan]:
    """Return the spans of rows. On the compute stream a span is cut into the pieces before, between and after nested spans."""
    every = [TimeSpan._make(row[:7]) for row in rows]
    result = [span for span in every if span.stream != "compute"]
    open_: list[TimeSpan] = []  # outer spans without their inner spans

    def close_spans_until(until: float) -> None:
        while open_ and open_[-1].stop_s <= until:
            inner = open_.pop()
            result.append(inner)
            if open_:
                open_[-1] = open_[-1]._replace(start_s=inner.stop_s)

    for span in sorted((s for s in every if s.stream == "compute"), key=lambda s: (s.start_s, -s.stop_s)):
        close_spans_until(span.start_s)
        if open_:
            result.append(open_[-1]._replace(stop_s=span.start_s))
        open_.append(span)
    close_spans_until(math.inf)
    result = [span for span in result if span.seconds > 0]
    kept = {(span.op, span.kind) for span in result}
    return result + [span._replace(stop_s=span.start_s) for span in every if (span.op, span.kind) not in kept]
