"""Fitting: compute the speeds of a machine from a trace. See :meth:`~fsharp.inspect.Hardware.fit`."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch

from fsharp.errors import ScheduleError, problem
from fsharp.inspect.fitting_links import (
    CollectiveTimestamps,
    bytes_per_second,
    collective_timestamps,
    fit_links_and_casts,
    nonnegative_least_squares,
)
from fsharp.stateful.schedule.ops import OUTGOING, REST, Phase, buffer_nbytes, kinds_where
from fsharp.stateful.schedule.program import Program, UnitFacts
from fsharp.stateful.schedule.schedule import Op, Schedule, op_positions_by_bucket
from fsharp.stateful.timing.timeline import WAITING, Interval, TimeSpan, kinds_with_collectives, union_of_intervals
from fsharp.stateful.timing.trace import Trace, TraceRow, check_rows, median_times_by_unit, self_spans

_MOST_FACTOR = 8.0
_BISECTIONS = 24


def fit_speeds(
    trace: Trace, schedule: Schedule, *, host_speed: float, sending_speed: float, overlaps_latency: bool
) -> dict[str, Any]:
    """Return the fields of a :class:`~fsharp.inspect.Hardware` that a trace of a schedule determines, by name.

    ``host_speed``: fraction of its full speed that the host keeps while a collective is under way. ``sending_speed``: fraction
    that a collective keeps while the host computes. ``overlaps_latency``: whether the latency of a collective passes while
    earlier collectives are under way.
    """
    steps = trace.ended_steps()
    rows = [row for _, rows in steps for row in rows]
    check_rows("Hardware.fit()", schedule, rows)
    _check_kinds_measured(schedule, rows)
    flights = collective_timestamps(schedule, rows)
    in_flight = IntervalUnion((each.start_s, each.stop_s) for per_step in flights.values() for each in per_step)
    host = _host_seconds(schedule, steps, in_flight, host_speed)
    waits = IntervalUnion(host.waits)

    def seconds_if_alone(start: float, stop: float) -> float:
        return (stop - start) * sending_speed + waits.length_between(start, stop) * (1 - sending_speed)

    def queued_and_sending_s(each: CollectiveTimestamps) -> tuple[float, float]:
        queued_s = seconds_if_alone(each.issued_s, each.start_s) if overlaps_latency else 0.0
        return queued_s, seconds_if_alone(each.start_s, each.stop_s)

    taken_alone = {op: list(map(queued_and_sending_s, per_step)) for op, per_step in flights.items()}
    facts = schedule.program.facts
    cast_s = sum(median(each) for each in host.casts.values())
    cast_nbytes = sum(memory_traffic_nbytes([schedule.ops[op]], facts) for op in host.casts)
    memory_bandwidth = cast_nbytes / cast_s if cast_s and cast_nbytes else math.inf
    codec_bandwidth = _codec_bandwidth(schedule, rows, in_flight, host_speed)
    for run in op_positions_by_bucket(schedule.ops):
        coded = sum(schedule.ops[i].spec.nbytes_through_codec(facts[schedule.ops[i].unit]) for i in run)
        if coded and run[0] in taken_alone:  # the op also decodes and encodes between its two collectives
            own_s = coded / codec_bandwidth
            taken_alone[run[0]] = [(queued, max(after - own_s, 0.0)) for queued, after in taken_alone[run[0]]]
    links, cast_bandwidth = fit_links_and_casts(schedule, taken_alone)
    return {
        "compute_times": median_times_by_unit(host.compute),
        "latency": {link: latency for link, (latency, _) in links.items()} or 0.0,
        "bandwidth": {link: bandwidth for link, (_, bandwidth) in links.items()} or math.inf,
        "memory_bandwidth": memory_bandwidth,
        "codec_bandwidth": codec_bandwidth,
        "cast_bandwidth": cast_bandwidth,
        "host_bandwidth": _host_bandwidth(schedule, rows),
        "update_s": median(host.updates),
        **_fit_issue_cost(schedule, host.issuing, memory_bandwidth),
    }


class _HostSeconds(NamedTuple):
    """Seconds that the host spent on its work in the steps of a trace.

    While collectives are under way, the host works more slowly. Except for ``waits``, these are the seconds that the work would
    take at the host's full speed.

    Attributes:
        compute: seconds of each forward or backward of a unit in each step, by unit and phase.
        casts: seconds of an op that casts or adds gradients in each step, by position of the op.
        updates: seconds of all updates of each step.
        issuing: seconds, in each step, of a gap between ops in which the host issued collectives. The key of a gap is a tuple
            with the position of each collective's first op.
        waits: start and end of each wait of the host, in all steps.
    """

    compute: dict[tuple[str, Phase], list[float]]
    casts: dict[int, list[float]]
    updates: list[float]
    issuing: dict[tuple[int, ...], list[float]]
    waits: list[Interval]


def _host_seconds(
    schedule: Schedule, steps: Iterable[tuple[Interval, Sequence[TraceRow]]], in_flight: "IntervalUnion", host_speed: float
) -> _HostSeconds:
    found = _HostSeconds({}, {}, [], {}, [])
    first = {i: run[0] for run in op_positions_by_bucket(schedule.ops) for i in run}
    for step, rows in steps:
        spans = sorted((span for span in self_spans(rows) if span.stream == "compute"), key=lambda span: span.start_s)
        found.waits.extend((span.start_s, span.stop_s) for span in spans if span.kind == WAITING)
        issues = sorted({(row[5], first[row[0]]) for row in rows if schedule.ops[row[0]].spec.cost == "send"})
        starts = [span.start_s for span in spans]
        taken = [(span, in_flight.seconds_at_full_speed(span, host_speed)) for span in spans]
        for gap in _gaps_between_spans(spans, *step):
            gap_s = in_flight.seconds_at_full_speed(gap, host_speed)
            issued = issues[bisect_left(issues, (gap[0], -1)) : bisect_right(issues, (gap[1], len(schedule.ops)))]
            following = bisect_left(starts, gap[1])
            if issued:
                found.issuing.setdefault(tuple([op for _, op in issued]), []).append(gap_s)
            elif following < len(spans):  # the host's time before an op counts as time of the op
                taken.append((spans[following], gap_s))
        seconds: dict[int, float] = {}
        for span, span_s in taken:
            if span.kind == schedule.ops[span.op].kind:  # else the host waited for the op
                seconds[span.op] = seconds.get(span.op, 0.0) + span_s
        costs = {i: schedule.ops[i].spec.cost for i in seconds}
        found.updates.append(sum(op_s for i, op_s in seconds.items() if costs[i] == "update"))
        for i, op_s in seconds.items():
            op = schedule.ops[i]
            if costs[i] == "compute":
                found.compute.setdefault((op.unit, op.phase), []).append(op_s)
            elif costs[i] == "memory" and op.stream == "compute":
                found.casts.setdefault(i, []).append(op_s)
    return found


def host_issue_nbytes(op: Op, facts: UnitFacts) -> int:
    """Return the bytes that take the host ``nbytes / Hardware.issue_bandwidth`` seconds while it issues ``op``.

    These are the bytes that a gather or a reduction sends. To issue a gather, the host copies the rank's own part into the
    arena. To issue a reduction, the host posts messages. A gather of updated parameters counts as 0 bytes: it fills no memory
    of the arena, so the host copies nothing.
    """
    return sum(call.nbytes for call in op.spec.collectives(facts)) if op.spec.memory_buffer_kind else 0


def host_cast_nbytes(op: Op, facts: UnitFacts) -> int:
    """Return the bytes that a host casts while it issues the collective of ``op``; 0 unless ``op`` reads a gradient at rest."""
    return op.spec.nbytes_cast_in_sums(facts) if REST in op.spec.reads else 0


def _fit_issue_cost(
    schedule: Schedule, issuing: Mapping[tuple[int, ...], Sequence[float]], memory_bandwidth: float
) -> dict[str, float]:
    """Return the fields ``issue_s`` and ``issue_bandwidth`` of a Hardware.

    The host takes ``issue_s + nbytes / issue_bandwidth`` seconds to issue a collective; ``nbytes`` is
    :func:`host_issue_nbytes`. The host issues collectives in gaps between its other ops. ``issuing`` is a dict with an item
    for each gap. The key has the index of the first op of each collective that the host issues in the gap. The value has the
    lengths of the gap in seconds, one number for each step. The seconds of casts in a gap, at ``memory_bandwidth``, are
    subtracted. The fit minimizes squares of relative errors.
    """
    if not issuing:
        return {"issue_s": 0.0, "issue_bandwidth": math.inf}
    facts, runs = schedule.program.facts, {run[0]: run for run in op_positions_by_bucket(schedule.ops)}
    rows, target = [], []
    for issued, seconds in issuing.items():
        ops = [schedule.ops[i] for op in issued for i in runs[op]]
        nbytes = sum(host_issue_nbytes(op, facts[op.unit]) for op in ops)
        cast_s = sum(host_cast_nbytes(op, facts[op.unit]) for op in ops) / memory_bandwidth
        weight = math.sqrt(len(seconds)) / max(median(seconds), 1e-6)
        rows.append([weight * len(issued), weight * nbytes])
        target.append(weight * max(median(seconds) - cast_s, 0.0))
    matrix = torch.tensor(rows, dtype=torch.float64)
    scale = matrix.norm(dim=0).clamp_min(1e-300)
    issue_s, byte_s = (nonnegative_least_squares(matrix / scale, torch.tensor(target, dtype=torch.float64)) / scale).tolist()
    return {"issue_s": issue_s, "issue_bandwidth": bytes_per_second(byte_s)}


def fit_contended_host_speed(trace: Trace, schedule: Schedule, alone: Mapping[str, tuple[float, float]]) -> float:
    """Return the fraction, from 0 to 1, of its full speed that the host keeps while collectives are under way.

    ``alone``: seconds ``(forward, backward)`` of each unit in a run that sends nothing. Only ops count that run together with
    collectives for more than half of their time; without such ops the result is 1/2.
    """
    steps = trace.ended_steps()
    flights = collective_timestamps(schedule, [row for _, rows in steps for row in rows])
    in_flight = IntervalUnion((each.start_s, each.stop_s) for per_step in flights.values() for each in per_step)
    rates = []
    for _, rows in steps:
        taken: dict[int, tuple[float, float]] = {}
        for span in self_spans(rows):
            if span.op >= 0 and span.kind == schedule.ops[span.op].kind and schedule.ops[span.op].spec.cost == "compute":
                seconds, covered = taken.get(span.op, (0.0, 0.0))
                taken[span.op] = seconds + span.seconds, covered + in_flight.length_between(span.start_s, span.stop_s)
        for i, (seconds, covered) in taken.items():
            op = schedule.ops[i]
            own_s = alone.get(op.unit, (0.0, 0.0))[op.phase == "backward"]
            if own_s and covered > seconds / 2:
                rates.append((1 - (seconds - own_s) / covered, covered))
    if not rates:
        return 0.5
    rates.sort()
    until = list(accumulate(covered for _, covered in rates))
    rate, _ = rates[bisect_left(until, until[-1] / 2)]  # the median, weighted by seconds beside collectives
    return min(max(rate, 0.0), 1.0)


def memory_traffic_nbytes(ops: Sequence[Op], facts: Mapping[str, UnitFacts]) -> int:
    """Return the bytes of memory that ops read or write, as far as schedules know them.

    - An op that fills the outgoing gradient counts the unit's gradient, if its size is known.
    - An op that adds to the gradient at rest counts this gradient; if this is not in the arena, the bytes of the reduction.
    - Any other op counts its memory in the arena. An op without such memory counts its inputs; without inputs, its output.
    """
    total = 0
    for op in ops:
        mine = facts[op.unit]
        if op.spec.fills == OUTGOING and mine.gradient:
            total += mine.gradient
            continue
        if op.spec.fills == REST and (added := mine.rest or sum(call.nbytes for call in mine.reduce)):
            total += added
            continue
        read = sum(buffer_nbytes(buffer, mine) for buffer in op.spec.reads)
        filled = buffer_nbytes(op.spec.filled_buffer(mine), mine) if op.spec.filled_buffer(mine) else 0
        total += op.memory.nbytes if op.memory else read or filled
    return total


def noop_accumulates(ops: Sequence[Op]) -> set[int]:
    """Return the positions of ops that have nothing to add, as their reduction has written to the gradient at rest."""
    found, direct = set[int](), set[str]()
    for i, op in enumerate(ops):
        if op.spec.calls and op.spec.opens:
            (direct.discard if op.opens is None else direct.add)(op.unit)
        elif op.spec.fills == REST and op.unit in direct:
            direct.discard(op.unit)
            found.add(i)
    return found


def uses_made_by_recomputation(program: Program) -> set[int]:
    """Return the uses (``event.use_index``) whose forward recomputes, as it comes after a backward of the same microbatch."""
    found, is_backward = set[int](), False
    for event in program.events:
        if event.kind == "forward" and is_backward:
            found.add(event.use_index)
        is_backward = event.kind == "backward" or (is_backward and event.kind != "microbatch_end")
    return found


def _host_bandwidth(schedule: Schedule, rows: Iterable[TraceRow]) -> float:
    """Return the bytes per second of copies between host memory and the device, from the median over steps of their seconds."""
    copied: dict[int, float] = {}
    copies = kinds_where(lambda spec: spec.cost == "copy")
    for _, kind, _, _, _, start, stop, step in rows:
        if kind in copies:
            copied[step] = copied.get(step, 0.0) + stop - start
    seconds = median(copied.values()) if copied else 0.0
    return schedule.host_copy_nbytes / seconds if seconds else math.inf


def _codec_bandwidth(schedule: Schedule, rows: Iterable[TraceRow], in_flight: "IntervalUnion", host_speed: float) -> float:
    """Return the encoded bytes per second of ops that encode or decode. Ops that may wait are not measured.

    An op's seconds are the median over steps of the seconds at full speed. While collectives are under way (``in_flight``), the
    host runs at ``host_speed``, a fraction of full speed.
    """
    taken: dict[int, list[float]] = {}
    for i, kind, _, _, _, start, stop, _ in rows:
        op = schedule.ops[i]
        if kind == op.kind and op.spec.cost == "code" and not op.spec.may_wait:
            taken.setdefault(i, []).append(in_flight.seconds_at_full_speed((start, stop), host_speed))
    coded = sum(schedule.ops[i].spec.nbytes_through_codec(schedule.program.facts[schedule.ops[i].unit]) for i in taken)
    seconds = sum(map(median, taken.values()))
    return coded / seconds if seconds and coded else math.inf


class IntervalUnion:
    """A union of intervals of time, such as those of collectives, during which the host works more slowly."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self.parts = union_of_intervals(intervals)
        self.starts = [start for start, _ in self.parts]
        self.before = [0.0, *accumulate(stop - start for start, stop in self.parts)]

    def length_before(self, at: float) -> float:
        """Return the length of the union before ``at``."""
        i = bisect_right(self.starts, at)
        return self.before[i] - max(self.parts[i - 1][1] - at, 0.0) if i else 0.0

    def length_between(self, start: float, stop: float) -> float:
        """Return the length of the union between ``start`` and ``stop``."""
        return self.length_before(stop) - self.length_before(start)

    def seconds_at_full_speed(self, span: TimeSpan | Interval, speed: float) -> float:
        """Return the seconds of the work in ``span`` at full speed. In the union the work ran at the fraction ``speed``."""
        start, stop = (span.start_s, span.stop_s) if isinstance(span, TimeSpan) else span
        return stop - start - (1 - speed) * self.length_between(start, stop)


def _gaps_between_spans(spans: Iterable[TimeSpan], start: float, stop: float) -> list[Interval]:
    result, at = [], start
    for began, ended in union_of_intervals((span.start_s, span.stop_s) for span in spans):
        if began > at:
            result.append((at, min(began, stop)))
        at = max(at, ended)
    return [*result, (at, stop)] if at < stop else result


def _check_kinds_measured(schedule: Schedule, rows: Iterable[TraceRow]) -> None:
    measured = {row[1] for row in rows}
    facts = schedule.program.facts
    wanted = {op.kind for op in schedule.ops if op.spec.cost != "send" or op.spec.collectives(facts[op.unit])}
    needed = [*kinds_where(lambda spec: spec.cost in ("compute", "update")), *kinds_with_collectives()]
    missing = [kind for kind in needed if kind in wanted - measured]
    if missing:
        there = [("measured", ", ".join(kind for kind in kinds_where() if kind in measured) or "nothing")]
        what = f"the trace has no measurement of {' or '.join(missing)}, and the schedule has some."
        raise ScheduleError(problem("Hardware.fit()", what, there, "Trace steps that follow the schedule, each to its end."))


def compute_times_including_gaps(alone: Trace) -> dict[str, tuple[float, float]]:
    """Return ``(forward, backward)`` seconds by unit of ``alone``, a trace of one rank, scaled to fill the gaps between ops."""
    rates = []
    for (start, stop), rows in alone.ended_steps():
        worked_s = sum(span.seconds for span in self_spans(rows) if span.stream == "compute" and span.kind != WAITING)
        rates.append((stop - start) / worked_s if worked_s else 1.0)
    rate = median(rates)
    return {unit: (rate * forward_s, rate * backward_s) for unit, (forward_s, backward_s) in alone.compute_times().items()}


def find_link_factor(step_s: Callable[[float], float], trace: Trace) -> float:
    """Return the factor, from 1/8 to 8, with which the predicted step ``step_s(factor)`` is as long as the traced steps."""
    taken_s = median(stop - start for (start, stop), _ in trace.ended_steps())
    low, high = 1 / _MOST_FACTOR, _MOST_FACTOR
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if step_s(middle) < taken_s else (low, middle)
    return math.sqrt(low * high)
