"""Copies of optimizer state and main copies between host memory, where they rest between updates, and the device.

The arena is reserved for the whole step, so fetched tensors are not in the arena. Torch's allocator has their memory, which
forwards and backwards can use after the update. On a CPU too, tensors that rest in host memory are :class:`HostBuffers`.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch

from fsharp.functional.layout.sharded import is_sharded, map_units, units_of
from fsharp.stateful.transport.streams import Key, Lanes
from fsharp.stateful.units.pending import PendingBuffers


class HostBuffers(PendingBuffers):
    """Tensors in host memory, there once ``move`` is over."""

    def __init__(self, raw: list[Any], move: "HostCopies") -> None:
        super().__init__(raw, move.wait)
        self.lanes = move.lanes


class HostCopies:
    """The copies of one unit between host memory and the device, before an update or after it.

    Attributes:
        copies: target and source of each tensor.
        nbytes: of all its tensors, those included that are there already.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes, self.nbytes = lanes, 0
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._began: Key | None = None

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Have a tensor copied, if it is not there already."""
        self.nbytes += source.nbytes
        if target is not source:
            self.copies.append((target, source))

    def run(self, lanes: Lanes, op: Key) -> int:
        """Copy; returns the number of bytes. The lane is the current one, and ``op`` what it runs."""
        nbytes = 0
        for target, source in self.copies:
            target.copy_(source, non_blocking=True)
            nbytes += source.nbytes
            for x in (target, source):
                lanes.keep(x)
        self.copies.clear()
        self.lanes, self._began = lanes, op
        return nbytes

    def wait(self) -> None:
        """The host waits until all is copied."""
        if self._began is not None:
            self.lanes.synchronize(self._began)


class Offload:
    """The state of one update: brought up before it, down after it. A tensor that occurs twice is copied once.

    Args:
        names: the units whose state this is.
        grads: what shares memory with gradients stays where it is, as they are another's in the next step.
        donate: whether host memory that was fetched from may be filled again.
    """

    def __init__(self, names: Container[str], grads: Any, lanes: Lanes, device: torch.device, *, donate: bool) -> None:
        self._names, self._lanes, self._device, self._donate = names, lanes, device, donate
        self._grads = grads
        self._spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}

    def move(self, tree: Any, params: Any, *, to_host: bool) -> tuple[Any, Mapping[str, HostCopies]]:
        """The state on the device, or in host memory; and by unit what has to run before it is there.

        What shares memory with ``params``, after an update the new ones, stays where it is: copying it would free nothing.
        """
        moves, moved, stays = dict[str, HostCopies](), dict[int, torch.Tensor](), _storages((params, self._grads))

        def one(node: Any) -> Any:
            if not is_sharded(node) or node.name not in self._names:
                return node
            is_ours = isinstance(node.lazy, HostBuffers)
            raw = node.raw_buffers if is_ours and node.lazy.lanes is self._lanes else node.buffers
            buffers = list(raw)
            for i, x in enumerate(raw):
                if not isinstance(x, torch.Tensor) or not x.numel() or x.untyped_storage().data_ptr() in stays:
                    continue
                move = moves.setdefault(node.name, HostCopies(self._lanes))
                if id(x) not in moved:
                    moved[id(x)] = self._on_host(x) if to_host else self._on_device(x, is_ours=is_ours)
                    move.add(moved[id(x)], x)
                buffers[i] = moved[id(x)]
            if all(x is y for x, y in zip(raw, buffers, strict=True)):
                return node
            held = HostBuffers(buffers, moves[node.name]) if to_host else buffers
            return node.with_buffers(held, scale=node.scale)

        return map_units(one, tree), moves

    def _on_device(self, x: torch.Tensor, *, is_ours: bool) -> torch.Tensor:
        if is_ours and self._donate:
            self._spare.setdefault((x.shape, x.dtype), []).append(x)
        is_away = is_ours or x.device.type != self._device.type
        return torch.empty(x.shape, dtype=x.dtype, device=self._device) if is_away else x

    def _on_host(self, x: torch.Tensor) -> torch.Tensor:
        spare = self._spare.get((x.shape, x.dtype))
        return spare.pop(0) if spare else torch.empty(x.shape, dtype=x.dtype, pin_memory=self._device.type != "cpu")


def _storages(tree: Any) -> set[int]:
    tensors = (x for node in units_of(tree) for x in node.raw_buffers if isinstance(x, torch.Tensor))
    return {x.untyped_storage().data_ptr() for x in tensors}
