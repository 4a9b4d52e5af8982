"""Lanes: the streams beside compute: for gathers, for reductions, and to and from the host; on a CPU, none."""

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

Key = tuple[int, int]
"""An op: the number of its plan, its position."""
_HERE = nullcontext()


class LaneRecorder(Protocol):
    """Who wants to know when an op ran on a lane."""

    lane_marks: list[tuple[Any, Any]]

    def mark(self) -> Any:
        """Now, on the current stream."""


class Lanes:
    """A host without streams: collectives are asynchronous by themselves, and what the host waits for is ordered by that."""

    _recorder: "LaneRecorder | None" = None
    has_streams = False

    def tell(self, recorder: "LaneRecorder | None") -> None:
        """Tell a recorder when ops run on lanes, from here on; None: nobody."""
        self._recorder = recorder

    def current(self) -> Hashable:
        """The stream that the caller is on."""
        return None

    def on(self, name: str, op: Key | None = None, after: Sequence[Key] = (), *, begins: bool = True) -> AbstractContextManager:
        """Run an op on the lane ``"gather"``, ``"reduce"`` or ``"host"``, after other ops.

        It ``begins`` with what compute has made until now, or reads nothing of that.
        """
        return _HERE

    def join(self, after: Sequence[Key]) -> None:
        """Compute waits for ops on other lanes."""

    def join_all(self, *names: str) -> None:
        """Compute waits for all that the lanes of these names have been given."""

    def synchronize(self, op: Key) -> None:
        """The host waits for an op."""

    def keep(self, x: torch.Tensor) -> None:
        """Nobody gets the memory of a tensor that is freed, before what this lane has been given so far is over."""

    def follow(self, plan: Any, number: int) -> None:
        """Keep the events of a plan's ops, whose keys begin with ``number``, as long as the plan lives."""

    def forget(self) -> None:
        """Wait from here on for nothing that lanes have been given so far: it is over, or belongs to a captured graph."""


class DeviceLanes(Lanes):
    """Streams of one scheduler on an accelerator, which all its units share. Ordered by events: the host waits for none.

    Most memory on a lane is the scheduler's own and outlives the lane's work. Of memory that a user may free while a lane works
    on it, as that of a state, :meth:`keep` tells the allocator.

    Args:
        device: of the streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: dict[str, torch.Stream] = {}
        self._events: dict[int, dict[int, torch.Event]] = {}  # by plan and op
        self._given: set[str] = set()  # lanes that have had something to do

    has_streams = True

    def current(self) -> Hashable:
        """The device's current stream."""
        return torch.accelerator.current_stream(self.device)

    def _wait_for(self, stream: torch.Stream, ops: Sequence[Key]) -> None:
        for number, i in ops:
            event = self._events.get(number, {}).get(i)
            if event is not None:
                stream.wait_event(event)

    @contextmanager
    def on(self, name: str, op: Key | None = None, after: Sequence[Key] = (), *, begins: bool = True) -> Iterator[Any]:
        """On the lane's stream, after what compute has been given so far if it reads that, and after the given ops."""
        if name not in self.streams:
            # What ranks wait for goes first: the kernel of a collective is small, and would queue behind those of compute.
            self.streams[name] = torch.Stream(self.device, priority=0 if name == "host" else -1)
        stream = self.streams[name]
        if begins:
            stream.wait_stream(torch.accelerator.current_stream(self.device))
        self._wait_for(stream, after)
        self._given.add(name)
        with stream:
            start = self._recorder.mark() if self._recorder is not None else None
            yield
            if self._recorder is not None:
                self._recorder.lane_marks.append((start, self._recorder.mark()))
            if op is not None:
                self._events.setdefault(op[0], {})[op[1]] = stream.record_event()

    def join(self, after: Sequence[Key]) -> None:
        """The current stream waits for the events of these ops."""
        if after:
            self._wait_for(torch.accelerator.current_stream(self.device), after)

    def join_all(self, *names: str) -> None:
        """The current stream waits for those that have been given something: no other may be a part of a capture."""
        for lane in names:
            if lane in self._given:
                torch.accelerator.current_stream(self.device).wait_stream(self.streams[lane])

    def synchronize(self, op: Key) -> None:
        """Wait for the event of an op. If its plan is gone, wait for everything that lanes were given."""
        event = self._events.get(op[0], {}).get(op[1])
        for each in self.streams.values() if event is None else [event]:
            each.synchronize()

    def follow(self, plan: Any, number: int) -> None:
        """Drop its events with it: an eager step has a plan of its own."""
        weakref.finalize(plan, self._events.pop, number, None).atexit = False

    def forget(self) -> None:
        """Drop all events, and what was noted of lanes."""
        self._events.clear()
        self._given.clear()

    def keep(self, x: torch.Tensor) -> None:
        """Of device memory the allocator is told; pinned memory's own looks at what copies it."""
        if x.device.type != "cpu":
            x.record_stream(torch.accelerator.current_stream(self.device))


def lanes_for(device: torch.device) -> Lanes:
    """Return streams where the device of the buffers has them; on a CPU, a host without."""
    return Lanes() if device.type == "cpu" else DeviceLanes(device)
