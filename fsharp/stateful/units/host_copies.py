"""Copy optimizer state and main copies between the device and host memory, where they rest between updates.

Fetched tensors are not in the arena, which is reserved for the whole step: torch's allocator reuses their memory after the
update. On a CPU, too, tensors that rest in host memory are :class:`HostStateBuffers`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fsharp.functional.layout.sharded import is_sharded, map_units, units_of
from fsharp.stateful.transport.streams import Lanes, OpKey
from fsharp.stateful.units.future_buffers import FillOnReadBuffers


class HostStateBuffers(FillOnReadBuffers):
    """Buffers in host memory, which the copies ``move`` fill. Each read of a buffer first waits for the copies."""

    def __init__(self, raw: list[Any], move: "HostDeviceCopies") -> None:
        super().__init__(raw, move.wait)
        self.lanes = move.lanes


class HostDeviceCopies:
    """Copies of one unit's state between host memory and the device, before an update or after it."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes, self.nbytes = lanes, 0  # nbytes: also of tensors that need no copy
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # target and source of each
        self._began: OpKey | None = None

    def add_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add a copy from ``source`` to ``target`` for :meth:`run_copies`, unless both are the same tensor."""
        self.nbytes += source.nbytes
        if target is not source:
            self.copies.append((target, source))

    def run_copies(self, lanes: Lanes, op: OpKey) -> None:
        """Begin the copies added since the last call, on the current lane, as a part of the op with the key ``op``."""
        for target, source in self.copies:
            target.copy_(source, non_blocking=True)
            for x in (target, source):
                lanes.record_stream(x)
        self.copies.clear()
        self.lanes, self._began = lanes, op

    def wait(self) -> None:
        """Block the host until the copies that :meth:`run_copies` has begun are over. If there are none, return at once."""
        if self._began is not None:
            self.lanes.synchronize_op(self._began)


class StateOffload:
    """Moves state to ``device`` before an update, and back to host memory after it, by one copy of each tensor on ``lanes``.

    Args:
        keys: dict from the name of a unit of the state to the unit's key.
        grads: gradients. State in their memory stays there: the next step's gradients need this memory, so a copy frees none.
        donate: whether host memory may be reused once its values are on the device.
    """

    def __init__(self, keys: Mapping[str, str], grads: Any, lanes: Lanes, device: torch.device, *, donate: bool) -> None:
        self._keys, self._grads, self._lanes, self._device, self._donate = keys, grads, lanes, device, donate
        self._spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}

    def move_state(self, tree: Any, params: Any, *, to_host: bool) -> tuple[Any, dict[str, HostDeviceCopies]]:
        """Return the state ``tree`` in memory of the device or host, and by unit key the copies that fill this memory.

        Tensors in memory of gradients or ``params``, the present parameters, stay there, as a copy would free no memory.
        """
        moves, moved = dict[str, HostDeviceCopies](), dict[int, torch.Tensor]()
        kept = [x for node in units_of((params, self._grads)) for x in node.raw_buffers if isinstance(x, torch.Tensor)]
        stays = {x.untyped_storage().data_ptr() for x in kept}

        def move_node(node: Any) -> Any:
            if not is_sharded(node) or node.name not in self._keys:
                return node
            is_offloaded = isinstance(node.lazy, HostStateBuffers)
            raw = node.raw_buffers if is_offloaded and node.lazy.lanes is self._lanes else node.buffers
            buffers = list(raw)
            for i, x in enumerate(raw):
                if not isinstance(x, torch.Tensor) or not x.numel() or x.untyped_storage().data_ptr() in stays:
                    continue
                move = moves.setdefault(self._keys[node.name], HostDeviceCopies(self._lanes))
                if id(x) not in moved:
                    moved[id(x)] = (
                        self._host_memory_for(x) if to_host else self._device_memory_for(x, is_offloaded=is_offloaded)
                    )
                    move.add_copy(moved[id(x)], x)
                buffers[i] = moved[id(x)]
            if all(x is y for x, y in zip(raw, buffers, strict=True)):
                return node
            held = HostStateBuffers(buffers, moves[self._keys[node.name]]) if to_host else buffers
            return node.with_buffers(held, reduction=node.reduction)

        return map_units(move_node, tree), moves

    def _device_memory_for(self, x: torch.Tensor, *, is_offloaded: bool) -> torch.Tensor:
        """Return memory on the device for a copy of ``x``; ``x`` itself if ``x`` is on the device already."""
        if is_offloaded and self._donate:
            self._spare.setdefault((x.shape, x.dtype), []).append(x)
        is_away = is_offloaded or x.device.type != self._device.type
        return torch.empty(x.shape, dtype=x.dtype, device=self._device) if is_away else x

    def _host_memory_for(self, x: torch.Tensor) -> torch.Tensor:
        """Return host memory for a copy of ``x``: memory whose values this update has copied to the device, or new memory."""
        spare = self._spare.get((x.shape, x.dtype))
        return spare.pop(0) if spare else torch.empty(x.shape, dtype=x.dtype, pin_memory=self._device.type != "cpu")
