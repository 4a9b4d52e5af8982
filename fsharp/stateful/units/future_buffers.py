"""FillOnReadBuffers: buffers of a Sharded that are not filled yet. Any thread that reads them waits."""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from fsharp.functional.layout.sharded import LazyBuffers, Sharded
from fsharp.stateful.transport.streams import Lanes


class FillOnReadBuffers(LazyBuffers):
    """Tensors that are filled when ``fill`` returns. The first reader calls ``fill``; the next one if this call failed.

    If gathers on ``lanes`` fill the tensors, each stream that reads the tensors waits for these gathers.
    """

    def __init__(self, raw: Sequence[Any], fill: Callable[[], Any], lanes: Lanes | None = None) -> None:
        self.raw, self._lock = tuple(raw), threading.RLock()
        self._fill: Callable[[], Any] | None = fill
        self._gathered_on = lanes if lanes is not None and lanes.has_streams else None
        self._joined: set[Hashable] = set()  # streams that have waited for the gathers

    def wait(self) -> tuple[Any, ...]:
        """Block until the tensors are filled, and return them."""
        if self._fill is not None:
            with self._lock:  # other readers wait
                if self._fill is not None:
                    self._fill()
                    self._fill = None
        if self._gathered_on is not None and (stream := self._gathered_on.current_stream()) not in self._joined:
            self._gathered_on.stream_wait_lanes("gather")
            self._joined.add(stream)
        return self.raw

    def for_aliases(self, buffers: Sequence[Any]) -> "FillOnReadBuffers":
        """Return FillOnReadBuffers of ``buffers``, other tensors in the same memory. Their readers wait for the same fill."""
        return FillOnReadBuffers(buffers, self.wait, self._gathered_on)


def with_lazy_buffers(node: Sharded, fill: Callable[[], Any], lanes: Lanes | None = None) -> Sharded:
    """Return ``node`` with buffers that ``fill`` fills. The first reader of a buffer calls ``fill``."""
    return node.with_buffers(FillOnReadBuffers(node.raw_buffers, fill, lanes), reduction=node.reduction)


def is_pending(node: Sharded) -> bool:
    """Return whether a node's buffers may not be filled yet."""
    return isinstance(node.lazy, FillOnReadBuffers) and node.lazy._fill is not None
