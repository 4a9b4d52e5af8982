"""Hardware: what a person says of a machine; and simulate: how long a schedule would take on it.

[Note: what the simulation knows]
Streams run in order. An op starts when the op before it on its stream and those in ``after`` have finished. The host runs
ahead of the device, as it does with CUDA; a synchronous one does all but collectives itself, one after the other, and a
collective begins no sooner than it is issued. Steps follow each other: one begins when the one before has finished, save
for what it hands on, as gathers at its end, and the result is the step that comes out again and again.

It does not know that collectives of two streams share a link: each has the whole bandwidth. A unit's own time is spent
when it is entered, in front of the units nested in it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsharp.functional.comm import Call
from fsharp.functional.errors import ScheduleError, problem
from fsharp.functional.paths import assign
from fsharp.stateful.inspect.timeline import COLLECTIVES, Span, Timeline, is_joined
from fsharp.stateful.schedule.schedule import Op, Schedule, Stream, calls_of

_MAX_STEPS = 16

PerAxis = float | Mapping[str, float]
"""One number, or one for each mesh axis."""
ComputeTimes = tuple[float, float] | Mapping[str, tuple[float, float]] | Callable[[str], tuple[float, float]]
"""Seconds of a unit's forward and of its backward: for all units, by key-path pattern, or as a function of the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine, as far as a schedule can tell.

    Args:
        compute: seconds of ``(forward, backward)`` of each unit, without units nested in it, such as
            ``{"**": (1e-3, 2e-3), "head": (4e-3, 8e-3)}``, the last pattern that selects a unit winning. Measured ones
            come from :meth:`~fsharp.stateful.trace.Trace.compute_times`; an estimate for a unit of ``n`` parameters
            that meets ``t`` tokens on a device of ``f`` FLOP/s is ``(2 * n * t / f, 4 * n * t / f)``.
        bandwidth: bytes per second that a rank sends along an axis.
        latency: seconds that each collective along an axis takes beside sending.
        memory_bandwidth: bytes of gradients per second that are cast, or added to those at rest; also of gathers that
            only copy.
        update_s: seconds of the optimizer step.
        synchronous_host: the host does the work itself, as on CPUs, instead of queueing it on streams.

    Raises:
        ScheduleError: a number out of range.
    """

    compute: ComputeTimes
    bandwidth: PerAxis
    latency: PerAxis = 0.0
    memory_bandwidth: float = math.inf
    update_s: float = 0.0
    synchronous_host: bool = False

    def __post_init__(self) -> None:
        for name in ("bandwidth", "latency", "memory_bandwidth", "update_s"):
            value = getattr(self, name)
            is_rate = name.endswith("bandwidth")
            for number in value.values() if isinstance(value, Mapping) else (value,):
                if not (number > 0 if is_rate else 0 <= number < math.inf):
                    expected = "more than 0" if is_rate else "at least 0 and finite"
                    raise ScheduleError(f"Hardware(): {name} is {value!r}, expected {expected}.")

    def collective_s(self, calls: Iterable[Call]) -> float:
        """Seconds that collectives take one after the other; those of one kind along one axis are sent as one.

        >>> calls = [Call("all_gather", "dp", 50), Call("all_gather", "dp", 50), Call("reduce_scatter", "dp", 50)]
        >>> Hardware(compute=(1.0, 2.0), bandwidth=100.0, latency=0.25).collective_s(calls)
        2.0
        """
        sent: dict[tuple[str, str], int] = {}
        for call in calls:
            sent[call.op, call.axis] = sent.get((call.op, call.axis), 0) + call.nbytes
        rates = {axis: (_of(self.latency, axis, "latency"), _of(self.bandwidth, axis, "bandwidth")) for _, axis in sent}
        return sum(rates[axis][0] + nbytes / rates[axis][1] for (_, axis), nbytes in sent.items())


def _of(value: PerAxis, axis: str, name: str) -> float:
    if not isinstance(value, Mapping):
        return value
    if axis not in value:
        raise ScheduleError(
            problem(
                "simulate()",
                f"the hardware has no {name} for axis {axis!r}.",
                [("given for", ", ".join(value) or "no axis")],
                f"Add it, or pass one {name} for all axes.",
            )
        )
    return value[axis]


def simulate(schedule: Schedule, hardware: Hardware) -> Timeline:
    """When each op would run on a machine, in the step that repeats. See [Note: what the simulation knows].

    Raises:
        ScheduleError: an op waits for one that does not exist, or an axis has no bandwidth.
        PatternError: a pattern of ``hardware.compute`` selects no unit, or a unit has no times.

    Cost: a few passes over the ops; nothing is sent.
    """
    for i, op in enumerate(schedule.ops):
        if any(not 0 <= j < len(schedule.ops) for j in op.after):
            raise ScheduleError(f"simulate(): op {i}, {op}, waits for {op.after}, and there are {len(schedule.ops)} ops.")
    simulation = _Simulation(schedule, hardware)
    carried: dict[int, float] = {}
    for _ in range(_MAX_STEPS):
        timeline, handed_on = simulation.step(carried)
        if all(math.isclose(handed_on[j], carried.get(j, 0.0), abs_tol=1e-12 * timeline.step_s) for j in handed_on):
            break
        carried = handed_on
    return timeline


class _Simulation:
    """Ops are in an order in which each comes after what it waits for, so one pass over them is a step."""

    def __init__(self, schedule: Schedule, hardware: Hardware) -> None:
        self.ops, self.schedule = schedule.ops, schedule
        self.is_synchronous = hardware.synchronous_host
        entered = list(dict.fromkeys(op.unit for op in self.ops if op.kind == "compute"))
        times = assign("Hardware.compute", hardware.compute, entered) if entered else {}
        self.issues = [(run, _seconds(run, schedule, hardware, times)) for run in _issues(self.ops)]
        self.handed_on = sorted({j for i, op in enumerate(self.ops) for j in op.after if j >= i})

    def queue(self, op: Op) -> str:
        """The name of what runs it in order."""
        if op.stream == "compute" or (self.is_synchronous and op.kind not in COLLECTIVES):
            return "compute"
        return "gather" if self.schedule.policy.one_stream else op.stream

    def step(self, carried: Mapping[int, float]) -> tuple[Timeline, dict[int, float]]:
        """One step, and when what it hands on is finished, counted from its end.

        Args:
            carried: the latter, of the step before.
        """
        free = dict.fromkeys(("compute", "gather", "reduce"), 0.0)
        sent = 0.0  # when the last collective has ended
        for j, stop in carried.items():
            free[self.queue(self.ops[j])] = max(free[self.queue(self.ops[j])], stop)
            sent = max(sent, stop)
        stops: dict[int, float] = {}
        spans: list[Span] = []
        for run, seconds in self.issues:
            queue, sends = self.queue(self.ops[run[0]]), self.ops[run[0]].kind in COLLECTIVES
            idle = start = free[queue]
            for i in run:
                start = max(start, *(stops[j] if j < i else carried.get(j, 0.0) for j in self.ops[i].after), 0.0)
            if sends and self.is_synchronous:
                start = max(start, free["compute"])
            if sends and not self.schedule.policy.separate_groups:
                start = max(start, sent)
            free[queue] = stop = start + seconds
            sent = max(sent, stop) if sends else sent
            for i in run:
                op, stops[i] = self.ops[i], stop
                if queue == "compute" and (op.kind == "wait" or start > idle):
                    spans.append(Span(i, "wait", op.unit, op.phase, "compute", idle, start))
                if op.kind != "wait":
                    spans.append(Span(i, op.kind, op.unit, op.phase, _lane(op, queue), start, stop))
        end = max([free["compute"], *(stop for i, stop in stops.items() if i not in self.handed_on)])
        if end > free["compute"]:
            last = max((i for i in stops if i not in self.handed_on), key=stops.__getitem__)
            op = self.ops[last]
            spans.append(Span(last, "wait", op.unit, op.phase, "compute", free["compute"], end))
        spans.sort(key=lambda span: (span.start_s, span.op))
        return Timeline(self.schedule, tuple(spans), end), {j: max(stops[j] - end, 0.0) for j in self.handed_on}


def _lane(op: Op, queue: str) -> Stream:
    return "compute" if queue == "compute" else op.stream


def _issues(ops: Sequence[Op]) -> list[list[int]]:
    """Positions of ops, those that are issued as one together."""
    result: list[list[int]] = []
    for i in range(len(ops)):
        if is_joined(ops, i):
            result[-1].append(i)
        else:
            result.append([i])
    return result


def _seconds(run: Sequence[int], schedule: Schedule, hardware: Hardware, times: Mapping[str, tuple[float, float]]) -> float:
    """How long ops that are issued as one take."""
    ops = [schedule.ops[i] for i in run]
    kind, phase, unit = ops[0].kind, ops[0].phase, ops[0].unit
    if kind == "compute":
        return times[unit][phase == "backward"]
    if kind == "update":
        return hardware.update_s
    if kind in ("wait", "release"):
        return 0.0
    calls = [call for op in ops for call in calls_of(op, schedule.facts(op.unit))]
    if calls:
        return hardware.collective_s(calls)
    return sum(op.memory.nbytes for op in ops if op.memory) / hardware.memory_bandwidth
