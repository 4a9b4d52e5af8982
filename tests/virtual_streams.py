"""Streams, events and graphs of a device that is not there: they refuse what a CUDA device refuses in a capture."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_numbers = count(1)


class Illegal(RuntimeError):
    """What a CUDA device does not take."""


class Streams:
    """The streams of one device.

    Attributes:
        current: the stream that the host issues to.
        num_events: events that have been made.
        host_waits: called with a word whenever the host waits for a stream, an event or the device.
    """

    def __init__(self, host_waits: Callable[[str], None]) -> None:
        self.host_waits, self.num_events = host_waits, 0
        self.default = self.current = VirtualStream(self)


class VirtualStream:
    """A stream that knows what of the others has to be over by now: for each, how many of its events."""

    def __init__(self, streams: Streams, priority: int = 0) -> None:
        self.streams, self.priority, self.stream_id = streams, priority, next(_numbers)
        self.known: dict[VirtualStream, int] = {self: 0}
        self.is_captured = False
        self._before: list[VirtualStream] = []

    def record_event(self, event: "VirtualEvent | None" = None) -> "VirtualEvent":
        event = event or VirtualEvent(self.streams)
        event.record(self)
        return event

    def wait_event(self, event: "VirtualEvent") -> None:
        if self.is_captured and not event.is_captured:
            raise Illegal("cudaErrorStreamCaptureIsolation: a captured stream waits for what is outside of the capture")
        self.is_captured = self.is_captured or event.is_captured
        for stream, number in event.known.items():
            self.known[stream] = max(number, self.known.get(stream, 0))

    def wait_stream(self, other: "VirtualStream") -> None:
        self.wait_event(other.record_event())

    def is_capturing(self) -> bool:
        return self.is_captured

    def synchronize(self) -> None:
        self.streams.host_waits("stream.synchronize")

    def __enter__(self) -> "VirtualStream":
        self._before.append(self.streams.current)
        self.known[self] += 1  # something is about to be issued, of which no event tells yet
        self.streams.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        self.streams.current = self._before.pop()


class VirtualEvent:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        streams.num_events += 1
        self.known: dict[VirtualStream, int] = {}
        self.is_captured = False

    def record(self, stream: VirtualStream | None = None) -> None:
        stream, self.at = stream or self.streams.current, time.perf_counter()
        self.known, self.is_captured = dict(stream.known), stream.is_captured

    def wait(self, stream: VirtualStream | None = None) -> None:
        (stream or self.streams.current).wait_event(self)

    def synchronize(self) -> None:
        self.streams.host_waits("event.synchronize")

    def elapsed_time(self, other: "VirtualEvent") -> float:
        return (other.at - self.at) * 1e3


class _Tape(TorchDispatchMode):
    """Notes the ops of a capture, and puts back what they have written: a capture computes nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it torch imports it, for seconds

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_in_place = False
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                is_in_place = True
                for x in tensors_of(value):
                    at = x.untyped_storage()._cdata
                    if at not in self.made and at not in self.before:
                        whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                        self.before[at] = (whole, whole.clone())
        result = func(*args, **kwargs)
        made = [x for x in tensors_of(result) if not func.is_view]
        if not is_in_place:  # a result of set_() has memory from before the capture
            self.made |= {x.untyped_storage()._cdata for x in made} - set(self.before)
        held = torch.utils._pytree.tree_map_only(torch.Tensor, _without_holder, (args, kwargs, made))
        self.ops.append((func, *held))
        return result


def _without_holder(x: torch.Tensor) -> torch.Tensor:
    """The same bytes, and no hold on a storage that counts who holds it."""
    memory = getattr(x.untyped_storage(), "over", None)
    if memory is None:
        return x
    whole = memory.untyped_storage()
    offset = (x.data_ptr() - whole.data_ptr()) // x.element_size()
    return torch.empty(0, dtype=x.dtype).set_(whole, offset, x.size(), x.stride())


class VirtualGraph:
    def __init__(self) -> None:
        self._tape = _Tape()

    @contextmanager
    def capture(self, streams: Streams) -> Any:
        origin = VirtualStream(streams)
        origin.wait_stream(streams.current)
        origin.is_captured = True
        with origin, self._tape:
            yield
        joined = [stream for stream in origin.known if stream.is_captured]
        unjoined = [stream for stream in joined if origin.known[stream] < stream.known[stream] and stream is not origin]
        for stream in joined:
            stream.is_captured = False
        if unjoined:
            raise Illegal("cudaErrorStreamCaptureUnjoined: the capture ends while other streams of it are still at work")
        for whole, before in self._tape.before.values():
            whole.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self._tape.ops:
            for held, new in zip(made, tensors_of(func(*args, **kwargs)), strict=False):
                if held is not new and held.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    held.copy_(new)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results of an op."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (list, tuple)):
        for each in value:
            if isinstance(each, torch.Tensor):
                found.append(each)
            elif isinstance(each, (list, tuple)):
                found += tensors_of(each)
    return found
