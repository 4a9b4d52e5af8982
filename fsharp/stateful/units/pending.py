"""Buffers of a Sharded that are on their way: who looks at them waits, whichever thread it is."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from fsharp.functional.layout.sharded import LazyBuffers, Sharded


class PendingBuffers(LazyBuffers):
    """Tensors that are there once ``arrive`` has returned, which is called once, before anybody sees them."""

    def __init__(self, raw: Sequence[Any], arrive: Callable[[], Any]) -> None:
        self.raw, self._lock = tuple(raw), threading.RLock()
        self._arrive: Callable[[], Any] | None = arrive

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
        return self.raw

    def aliased(self, buffers: Sequence[Any]) -> "PendingBuffers":
        """Other tensors with the same memory."""
        return PendingBuffers(buffers, self.wait)


def pending(node: Sharded, arrive: Callable[[], Any]) -> Sharded:
    """The node, whose buffers are there once ``arrive`` has returned. To pytrees it is a Sharded like any other."""
    return Sharded(PendingBuffers(node.raw_buffers, arrive), node.unit, node.place, node.groups, scale=node.scale)


def is_pending(node: Sharded) -> bool:
    """Whether a node's buffers may still be on their way."""
    return isinstance(node.lazy, PendingBuffers) and node.lazy.is_pending
