"""Buffers of a Sharded that are on their way: who looks at them waits, whichever thread it is."""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from fsharp.functional.layout.sharded import LazyBuffers, Sharded
from fsharp.stateful.transport.streams import Lanes


class PendingBuffers(LazyBuffers):
    """Tensors that are there once ``arrive`` has returned, which is called once, before anybody sees them.

    Args:
        raw: the tensors.
        arrive: has the host wait as far as it has to.
        lanes: whose gathers fill the tensors, if streams do: each stream that looks waits for the gathers, and not the first
            one alone.
    """

    def __init__(self, raw: Sequence[Any], arrive: Callable[[], Any], lanes: Lanes | None = None) -> None:
        self.raw, self._lock = tuple(raw), threading.RLock()
        self._arrive: Callable[[], Any] | None = arrive
        self._gathered_on = lanes if lanes is not None and lanes.has_streams else None
        self._joined: set[Hashable] = set()  # streams

    @property
    def is_pending(self) -> bool:
        """Whether they may still be on their way."""
        return self._arrive is not None

    def wait(self) -> tuple[Any, ...]:
        """Block until the tensors are filled, and return them."""
        if self._arrive is not None:
            with self._lock:  # others who look wait as well
                if self._arrive is not None:
                    self._arrive()
                    self._arrive = None
        if self._gathered_on is not None and (stream := self._gathered_on.current()) not in self._joined:
            self._gathered_on.join_all("gather")
            self._joined.add(stream)
        return self.raw

    def aliased(self, buffers: Sequence[Any]) -> "PendingBuffers":
        """Other tensors with the same memory."""
        return PendingBuffers(buffers, self.wait, self._gathered_on)


def pending(node: Sharded, arrive: Callable[[], Any], lanes: Lanes | None = None) -> Sharded:
    """The node with :class:`PendingBuffers`. To pytrees it is a Sharded like any other."""
    return node.with_buffers(PendingBuffers(node.raw_buffers, arrive, lanes), scale=node.scale)


def is_pending(node: Sharded) -> bool:
    """Whether a node's buffers may still be on their way."""
    return isinstance(node.lazy, PendingBuffers) and node.lazy.is_pending
