"""Simulation: when the ops of a schedule run on a machine. See :func:`~fsharp.inspect.predict`.

[Note: what the simulation knows]
Each stream runs its ops in order. An op starts when the previous op of its stream and the ops in ``after`` have finished. The
host runs ahead of the device, as with CUDA. A synchronous host runs all ops but collectives itself, one after the other. A
collective begins no sooner than the host issues it. A step begins when the previous step has finished. Only ops for which the
next step waits, such as gathers at the end, may still run. Steps are simulated until two of them are alike; the result is the
last one.

On a synchronous host the threads of collectives may need the cores that compute (``contention``). While both work, both are
slower; while the host waits, collectives have the cores alone. A thread posts a collective when it is issued, so its latency
passes while earlier collectives are under way. On a stream a collective begins when the previous one has ended.

If collectives of two streams share a link, the simulation gives the whole bandwidth to each of them. The time of a unit with
nested units is spent before the nested units begin.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from fsharp.stateful.schedule.ops import STATE, STREAMS, Stream
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.timing.timeline import WAITING, Interval, Timeline, TimeSpan

_MAX_STEPS = 16
_OVER_AT_START = 0.0, 0.0
"""Start and end of an op of the previous step that was not handed on: both are over when the step begins."""


class OpsCost(NamedTuple):
    """Seconds that the ops of one bucket, or one op outside of buckets, take on a machine.

    Attributes:
        positions: positions of the ops.
        seconds: seconds of the ops on their stream, if no other stream works.
        latency_s: the part of ``seconds`` that may pass before earlier collectives have ended.
        issue_s: seconds that the host takes to issue the collective, not in ``seconds``. Without effect for other ops.
    """

    positions: Sequence[int]
    seconds: float
    latency_s: float
    issue_s: float


class Simulation:
    """A simulation of steps. In a schedule an op follows the ops for which it waits, so one pass over the ops is a step.

    Args:
        schedule: the schedule.
        costs: costs of all its ops, in order.
        computes_on_host: as in :class:`~fsharp.inspect.Hardware`.
        speeds: the fractions of full speed that the host and the collectives keep while both work.
    """

    def __init__(
        self, schedule: Schedule, costs: Sequence[OpsCost], *, computes_on_host: bool, speeds: tuple[float, float]
    ) -> None:
        self.ops, self.schedule, self.costs = schedule.ops, schedule, costs
        self.is_synchronous = computes_on_host
        self.host_speed, self.sending_speed = speeds
        on_host = [computes_on_host and op.spec.cost != "send" for op in self.ops]
        self.queues: list[Stream] = ["compute" if here else op.stream for op, here in zip(self.ops, on_host, strict=True)]
        waited_for = {j for i, op in enumerate(self.ops) for j in op.after if j >= i}
        self.handed_on = sorted(waited_for | {i for i, op in enumerate(self.ops) if op.spec.frees == STATE})

    def steady_step(self) -> Timeline:
        """Simulate steps until a step is like the previous one, at most 16 steps. Return the timeline of the last step."""
        carried: dict[int, Interval] = {}
        for _ in range(_MAX_STEPS):
            self._begin_step(carried)
            for cost in self.costs:
                self._run_ops_of_cost(cost)
            timeline, handed_on = self._end_step()
            before = {j: carried.get(j, _OVER_AT_START) for j in handed_on}
            if all(math.isclose(handed_on[j][1], before[j][1], abs_tol=1e-12 * timeline.step_s) for j in handed_on):
                break
            carried = handed_on
        return timeline

    def _begin_step(self, carried: Mapping[int, Interval]) -> None:
        """Begin a step. ``carried``: start and end of each op that the previous step handed on, by position of the op."""
        self.free, self.sent_s = dict.fromkeys(STREAMS, 0.0), 0.0  # when the last op of each stream, and collective, ends
        for j, (_, stop) in carried.items():
            queue = self.queues[j]
            self.free[queue] = max(self.free[queue], stop)
            self.sent_s = max(self.sent_s, stop) if self.ops[j].spec.cost == "send" else self.sent_s
        self.carried, self.times = dict(carried), dict[int, Interval]()
        self.in_flight = list[int]()  # ops beside the host, which the host may slow down
        self.spans = list[TimeSpan]()  # waits of the compute stream so far

    def _run_ops_of_cost(self, cost: OpsCost) -> None:
        """Run the ops of ``cost``, those of a bucket or a single op, as the next work of their stream."""
        run, seconds, latency_s, issue_s = cost
        free, queue, sends = self.free, self.queues[run[0]], self.ops[run[0]].spec.cost == "send"
        idle = start = free[queue] - latency_s
        for i in run:  # an op that comes after i has ended in the previous step
            ends = [(self.times[j] if j < i else self.carried.get(j, _OVER_AT_START))[1] for j in self.ops[i].after]
            start = max([start, 0.0, *ends])
        if sends and self.is_synchronous:
            start = max(start, free["compute"])
        if sends and self.schedule.policy.separate_groups is False:
            start = max(start, self.sent_s - latency_s)
        if queue != "compute":
            free[queue] = stop = start + seconds
            self.sent_s = max(self.sent_s, stop) if sends else self.sent_s
            self.times |= dict.fromkeys(run, (start, stop))
            self.in_flight += run
            if sends:
                issued = free["compute"]
                free["compute"] = issued + self._delay_by_contention(issued, issue_s)
            return
        free[queue] = start + self._delay_by_contention(start, seconds)
        self.times |= dict.fromkeys(run, (start, free[queue]))
        for i in run:
            op = self.ops[i]
            if op.spec.joins or start > idle:
                self.spans.append(TimeSpan(i, WAITING, op.unit, op.phase, "compute", idle, start))

    def _delay_by_contention(self, since: float, works_s: float) -> float:
        """Return how long the host takes for ``works_s`` seconds of work from ``since`` on, beside collectives.

        Delay these collectives, as the host slows them down.
        """
        host_speed, sending_speed = self.host_speed, self.sending_speed
        busy = max(self.free["gather"], self.free["reduce"], since) - since  # seconds of collectives if the host waited
        if not (works_s and busy) or (host_speed, sending_speed) == (1.0, 1.0):
            return works_s
        both_s = busy / sending_speed if sending_speed else math.inf  # seconds if the host worked throughout
        works_s = works_s / host_speed if works_s <= both_s * host_speed else works_s + both_s * (1 - host_speed)
        later = partial(_event_time_under_slowdown, since, works_s, sending_speed)
        self.carried = {j: (later(began), later(ended)) for j, (began, ended) in self.carried.items()}
        self.in_flight = [i for i in self.in_flight if self.times[i][1] > since]
        self.times |= {i: (later(self.times[i][0]), later(self.times[i][1])) for i in self.in_flight}
        self.free |= {name: later(stop) for name, stop in self.free.items()}
        self.sent_s = later(self.sent_s)
        return works_s

    def _end_step(self) -> tuple[Timeline, dict[int, Interval]]:
        """Return the timeline of the step, and the start and end of each op that the step hands on, by position of the op.

        Both are seconds after the end of the step. A start before the step's end is negative; an end before it counts as 0.
        """
        ops, handed_on, times = self.ops, self.handed_on, self.times
        own = {i: stop for i, (_, stop) in times.items() if i not in handed_on}
        end = max([self.free["compute"], *own.values()])
        if end > self.free["compute"]:
            last = max(own, key=own.__getitem__)
            op = ops[last]
            self.spans.append(TimeSpan(last, WAITING, op.unit, op.phase, "compute", self.free["compute"], end))
        result = {j: (times[j][0] - end, max(times[j][1] - end, 0.0)) for j in handed_on}
        for j, (began, ended) in self.carried.items():  # in a step that repeats, this step hands the same op on
            start, stop = times[j]
            times[j] = end + began if start > end else start, end + ended if stop > end else stop
        for i, op in enumerate(ops):
            if not op.spec.joins:  # an op that joins takes no time beside its wait
                self.spans.append(TimeSpan(i, op.kind, op.unit, op.phase, self.queues[i], *times[i]))
        self.spans.sort(key=lambda span: (span.start_s, span.op))
        return Timeline(self.schedule, tuple(self.spans), end), result


def _event_time_under_slowdown(start: float, seconds: float, speed: float, at: float) -> float:
    """Return when an event happens if work is slowed down. At full speed the event would happen at ``at``.

    From ``start`` on, for ``seconds`` seconds of the clock, work runs at the fraction ``speed`` of full speed.
    """
    ahead = at - start
    if ahead <= 0:
        return at
    return start + ahead / speed if ahead <= speed * seconds else at + (1 - speed) * seconds
