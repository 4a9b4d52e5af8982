"""OpProfiler: measure when the ops of a step run, by the host's clock, or by events of a GPU's streams."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsharp.distributed.worker_threads import CollectiveOutcome
from fsharp.stateful.runtime.bound_op import Action, BoundOp
from fsharp.stateful.schedule.ops import Stream
from fsharp.stateful.schedule.program import Event
from fsharp.stateful.timing.timeline import WAITING
from fsharp.stateful.timing.trace import Trace

TimeMark = Any  # a time in seconds, or an event of a stream


class OpProfiler:
    """Measures the ops of steps, for ``trace``. ``waited_s()``: seconds that the main thread has waited for collectives."""

    def __init__(self, device: torch.device, waited_s: Callable[[], float]) -> None:
        self.trace, self.device, self.has_streams, self._waited_s = Trace(), device, device.type != "cpu", waited_s
        self.outcomes: list[CollectiveOutcome] = []
        self.lane_marks: list[tuple[TimeMark, TimeMark]] = []
        self._base: TimeMark = self.mark_time()
        self._rows: list[tuple[BoundOp, bool, TimeMark, TimeMark, list[CollectiveOutcome], int]] = []
        self._open: dict[tuple[str, int], tuple[BoundOp, TimeMark]] = {}
        self._last: TimeMark = self._base
        self._waited_before = 0.0  # seconds waited until the mark ``_last``

    def mark_time(self) -> TimeMark:
        """Return a mark of the current time: the host's clock in seconds, or an event on the current stream."""
        if not self.has_streams:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def begin_step(self) -> None:
        """Begin to measure a step. Remove the measurements of an earlier step that has left its schedule."""
        self._open.clear()
        self._rows = [row for row in self._rows if row[-1] < len(self.trace.steps)]
        self._start = self._last = self.mark_time()
        self._waited_before = self._waited_s()
        self._step = len(self.trace.steps)

    def run_event(self, event: Event, ops: Sequence[tuple[BoundOp, Action]]) -> None:
        """Run the actions of an event's ops, and measure them."""
        here = self.mark_time()
        if event.kind.endswith("_end") and event.unit:
            compute, began = self._open.pop((event.kind.removesuffix("_end"), event.use_index))
            self._add_measurement(compute, began, here)
        for bound, action in ops:
            if bound.spec.cost == "update":
                began = self._last
                if not self.has_streams:  # in the update the host waits for gradients and losses
                    began += self._waited_s() - self._waited_before
                    self._rows.append((bound, True, self._last, began, [], self._step))
                self._add_measurement(bound, began, here)
            else:
                self.run_op(bound, action)
        self._last, self._waited_before = self.mark_time(), self._waited_s()

    def run_op(self, bound: BoundOp, action: Action) -> None:
        """Run the action of an op, and measure it."""
        self.outcomes, self.lane_marks = [], []
        start = self.mark_time()
        action()
        stop = self.mark_time()
        if bound.spec.cost == "compute":
            self._open[bound.op.phase, bound.op.use_index] = (bound, stop)
        elif bound.spec.stream != "compute" and not bound.spec.may_wait:
            if self.lane_marks:
                start, stop = self.lane_marks[0][0], self.lane_marks[-1][1]
            for each in bound.bucket_members:
                self._add_measurement(each, start, stop, self.outcomes)
        else:
            self._add_measurement(bound, start, stop)

    def _add_measurement(
        self, bound: BoundOp, start: TimeMark, stop: TimeMark, outcomes: Sequence[CollectiveOutcome] = ()
    ) -> None:
        self._rows.append((bound, bound.spec.may_wait, start, stop, list(outcomes), self._step))

    def end_step(self) -> None:
        """End a step, and add its measurements to the trace. If the device has streams, this waits until the device is idle.

        An op whose collective is still under way is added when a later step ends.
        """
        ended = self.mark_time()
        if self.has_streams:
            torch.accelerator.synchronize(self.device)
        self.trace.steps.append((self._seconds_at(self._start), self._seconds_at(ended)))
        waiting = []
        for row in self._rows:
            bound, is_wait, start, stop, outcomes, step = row
            landed = [outcome.done_at_s for outcome in outcomes]
            if None in landed:
                waiting.append(row)
                continue
            end = max([self._seconds_at(stop), *(at for at in landed if at is not None)])
            op, kind = bound.op, WAITING if is_wait else bound.op.kind
            is_here = is_wait or (bound.spec.cost != "send" and not self.has_streams)
            stream: Stream = "compute" if is_here else op.stream
            self.trace.rows.append((bound.key[1], kind, op.unit, op.phase, stream, self._seconds_at(start), end, step))
        self._rows = waiting

    def _seconds_at(self, mark: TimeMark) -> float:
        return float(self._base.elapsed_time(mark)) / 1e3 if self.has_streams else float(mark)
