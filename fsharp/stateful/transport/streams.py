"""Lanes: the streams beside compute, for gathers, reductions and host copies. On a CPU, lanes do nothing."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fsharp.distributed.worker_threads import call_when_freed

OpKey = tuple[int, int]
"""A key of an op: the number of its BoundSchedule or EagerOps, and its position there."""
_NO_CONTEXT = nullcontext()


class Lanes:
    """The lanes of one scheduler. On a CPU they do nothing: ops run in the caller's thread, or in threads of the transport.

    Most memory on a lane belongs to the scheduler and outlives the lane's work. A user may free other memory, such as optimizer
    state, while a lane uses it. :meth:`record_stream` makes the allocator wait for the lane before such memory is reused.
    """

    has_streams = False
    _profiler: Any = None  # an ``OpProfiler`` of fsharp.stateful.runtime, which imports this file

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        self.device = device
        self.streams: dict[str, torch.Stream] = {}
        self._events: dict[int, dict[int, torch.Event]] = {}  # by the two numbers of a key
        self._given: set[str] = set()  # lanes that have had work

    def set_profiler(self, profiler: Any) -> None:
        """Let ``profiler`` measure when later ops run on lanes; None ends the measurement."""
        self._profiler = profiler

    def current_stream(self) -> Hashable:
        """Return the current stream of the caller; None on a CPU."""
        return None

    def on_lane(
        self, name: str, op: OpKey | None = None, after: Sequence[OpKey] = (), *, after_compute: bool = True
    ) -> AbstractContextManager:
        """Return a context whose work runs on the lane ``"gather"``, ``"reduce"`` or ``"host"``, after the ops ``after``.

        With ``after_compute`` also after all work of compute so far. ``op``: key by which later ops wait for this work.
        """
        return _NO_CONTEXT

    def stream_wait_ops(self, after: Sequence[OpKey]) -> None:
        """Make the current stream wait for the ops ``after``, except ops without an event: not run on a lane, or released."""
        for number, i in after:
            event = self._events.get(number, {}).get(i)
            if event is not None:
                torch.accelerator.current_stream(self.device).wait_event(event)

    def stream_wait_lanes(self, *names: str) -> None:
        """Make the current stream wait for these lanes, except unused ones: a wait would add an unused lane to a CUDA graph."""
        for lane in names:
            if lane in self._given:
                torch.accelerator.current_stream(self.device).wait_stream(self.streams[lane])

    def synchronize_op(self, op: OpKey) -> None:
        """Block the host until an op is over; until all lanes are idle, if the op's event was released."""
        event = self._events.get(op[0], {}).get(op[1])
        for each in self.streams.values() if event is None else [event]:
            each.synchronize()

    def record_stream(self, x: torch.Tensor) -> None:
        """If ``x`` is freed, let its memory be reused only when the work so far on the current lane is over."""
        if x.device.type != "cpu":  # the allocator of pinned memory tracks copies itself
            x.record_stream(torch.accelerator.current_stream(self.device))

    def release_events_on_gc(self, owner: Any, number: int) -> None:
        """Release the events of ops whose keys begin with ``number`` once ``owner``, their issuer, has been collected."""
        call_when_freed(owner, self._events.pop, number, None)

    def release_all_events(self) -> None:
        """Release all events, so that nothing waits for their ops. The ops have to be over, or in a captured CUDA graph."""
        self._events.clear()
        self._given.clear()


class DeviceLanes(Lanes):
    """The lanes of one scheduler on an accelerator: streams, ordered by events. The host waits only in ``synchronize_op``."""

    has_streams = True

    def current_stream(self) -> Hashable:
        """Return the device's current stream."""
        return torch.accelerator.current_stream(self.device)

    @contextmanager
    def on_lane(
        self, name: str, op: OpKey | None = None, after: Sequence[OpKey] = (), *, after_compute: bool = True
    ) -> Iterator[Any]:
        """Run a context's work on the lane's stream, after the ops ``after``: see :meth:`Lanes.on_lane`."""
        if name not in self.streams:
            # Collectives have priority, as their small kernels would queue behind kernels of compute.
            self.streams[name] = torch.Stream(self.device, priority=0 if name == "host" else -1)
        stream = self.streams[name]
        if after_compute:
            stream.wait_stream(torch.accelerator.current_stream(self.device))
        self._given.add(name)
        with stream:
            self.stream_wait_ops(after)
            start = self._profiler.mark_time() if self._profiler is not None else None
            yield
            if self._profiler is not None:
                self._profiler.lane_marks.append((start, self._profiler.mark_time()))
            if op is not None:
                self._events.setdefault(op[0], {})[op[1]] = stream.record_event()


def new_lanes(device: torch.device) -> Lanes:
    """Return the lanes of a device: streams, or on a CPU lanes that do nothing."""
    return Lanes() if device.type == "cpu" else DeviceLanes(device)
