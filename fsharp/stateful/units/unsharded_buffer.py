"""UnshardedBuffer: memory for the full parameters of a unit, filled or released."""

import time
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.stored import part_to_gather, scales_in, use_gather_inputs
from fsharp.stateful.schedule.schedule import Memory
from fsharp.stateful.transport.base import Work
from fsharp.stateful.units.axis_chain import GatherInput
from fsharp.stateful.units.full_unit import (
    RELEASED_VERSION,
    FullUnit,
    HandedOutLeaf,
    carve_tensors,
    full_nbytes,
    full_sizes,
    full_sizes_of_encoded_groups,
    outputs_by_axis,
)
from fsharp.stateful.units.unit_state import UnitState

Stamp = list[tuple[int, int]]

_VERSIONS_PER_FILL = 1024
"""Distance of version counters between fills with different values or in different steps. A write to a leaf adds 1."""


def buffers_stamp(node: Sharded) -> Stamp:
    """Return the addresses and version counters of a node's buffers. Writes change the stamp, except to inference tensors."""
    found = []
    for b in node.raw_buffers:  # faster than a comprehension
        found.append((b.data_ptr(), 0 if b.is_inference() else b._version))
    return found


class UnshardedBuffer:
    """Memory for the full parameters of a unit, filled or released: a part of the arena, or memory of its own.

    Tensors that autograd has saved may point into the arena. While the memory may hold other data, the tensors' version
    counters differ from the counters that autograd has saved. So autograd refuses a backward that the scheduler has not seen.
    Memory of its own is new for each gather, and lives as long as the memory's views.

    Args:
        where: a part of the ``arena``; None for memory of its own.
        poison: fill memory with NaN when it is released.

    Attributes:
        full: the parameters; in memory of its own, None while the buffer is released.
        filled_from: the stamp of the node from which gathers fill, or have filled, the buffer; None after a release.
        works: the Works of the gathers that fill the buffer, for which :meth:`wait` waits.
        was_held: whether a caller still held the buffer's own memory at the release.
        is_carried: whether the buffer was gathered in the previous step.
        is_encoded: whether gathered parameters have still to be decoded.
    """

    def __init__(
        self, unit: UnitState, comm: Comm, where: Memory | None = None, arena: torch.Tensor | None = None, poison: bool = False
    ) -> None:
        self._layout, self.axes, self._comm, self.where, self._poison = unit.layout, unit.axes, comm, where, poison
        self.memory: torch.Tensor | None = None
        self.full: FullUnit | None = None
        self._outs: list[list[list[torch.Tensor]]] = []  # by group and input of use_gather_inputs()
        if where is not None and arena is not None:
            self._carve_memory(arena[where.start : where.stop])
        self.filled_from: Stamp | None = None
        self.works: list[Work] = []
        self.was_held = self.is_carried = self.is_encoded = False
        self._sources: list[StorageWeakRef] = []
        self._last_filled_from: Stamp | None = None
        self._version = 0  # version counter of the leaves while the buffer is filled
        self._leaves_without_memory: list[HandedOutLeaf] = []  # leaves whose memory was taken at the last release
        self._step = 0  # number of the step in which the buffer was filled last

    def _carve_memory(self, memory: torch.Tensor) -> None:
        layout, sizes = self._layout, full_sizes(self._layout)
        flats = carve_tensors(memory, [*sizes, *full_sizes_of_encoded_groups(layout)])
        encoded, stored, planes = iter(flats[len(sizes) :]), list[torch.Tensor](), dict[int, list[torch.Tensor]]()
        for i, (group, flat) in enumerate(zip(layout.groups, flats[: len(sizes)], strict=True)):
            stored.append(flat if group.dtypes.format is None else next(encoded))
            if i in layout.tensor_classes:
                planes[i] = [next(encoded) for _ in group.dtypes.stored_format.planes]
        self.memory, self.full = memory, FullUnit(layout, flats[: len(sizes)], stored, planes)
        rows = [planes.get(group) or [part_to_gather(layout, group, flat)] for group, flat in enumerate(stored)]
        self._outs = [[outputs_by_axis(part, layout, self.axes, self._comm.rank) for part in row] for row in rows]

    def decode(self) -> None:
        """Decode the gathered buffers whose format is not plain, once for each fill. All gathers have to be over."""
        if self.is_encoded and self.full is not None:
            self.is_encoded = False
            self.full.decode(self._comm.rank)

    def renew_version(self, step: int) -> None:
        """Set the version counters of step number ``step``, so that autograd refuses backwards of earlier steps."""
        self._leaves_without_memory = []
        self._step, self._version = step, (self._version + _VERSIONS_PER_FILL) % RELEASED_VERSION
        if self.full is not None and self.where is not None:
            self.full.set_version(self._version)

    def begin_fill(self, node: Sharded, step: int) -> list[GatherInput]:
        """Begin to fill the buffer from ``node`` in step number ``step``. Return the inputs of ``gather_along()``."""
        if self.where is None:
            with torch.inference_mode(False):
                self._carve_memory(torch.empty(full_nbytes(self._layout), dtype=torch.uint8, device=self._comm.device))
        full, self.filled_from = self.full, buffers_stamp(node)
        assert full is not None
        self._sources, self.is_carried, self.was_held = [], False, False
        if self.filled_from != self._last_filled_from or step != self._step:  # tensors saved for other values are refused
            self._last_filled_from = self.filled_from
            self.renew_version(step)
        elif self.where is not None:
            full.set_version(self._version)
        if self.where is None:
            full.restore_released_leaves(self._leaves_without_memory)
        self.is_encoded = self._layout.has_stored_formats
        gather_inputs: list[GatherInput] = []
        for group, (x, outs) in enumerate(zip(node.raw_buffers, self._outs, strict=True)):
            parts: Sequence[torch.Tensor] = (x.detach(),)
            if group in self._layout.tensor_classes or self._layout.scales_nbytes[group]:
                scales_in(self._layout, group, full.gathered[group]).copy_(scales_in(self._layout, group, x.detach()))
                parts = use_gather_inputs(self._layout, group, x.detach())
            gather_inputs += [(part, out) for part, out in zip(parts, outs, strict=True) if part.numel()]
        return gather_inputs

    def wait(self) -> None:
        """Block until the buffer is filled with the unit's parameters."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def is_filled_from(self, stamp: Stamp) -> bool:
        """Return whether the buffer holds, or gathers fill it with, the values of the node with the stamp ``stamp``."""
        return self.filled_from == stamp and not (self.is_carried and any(map(StorageWeakRef.expired, self._sources)))

    def carry_to_next_step(self, node: Sharded | None) -> None:
        """Keep the buffer for the next step, valid while the buffers of ``node`` live. Without ``node`` nothing happens."""
        if node is not None:
            self._sources, self.is_carried = [StorageWeakRef(x.untyped_storage()) for x in node.raw_buffers], True

    def release(self) -> None:
        """Wait for gathers under way, and release the memory, whose tensors must no longer be used. No effect if not filled."""
        if self.works:
            self.wait()
        was_filled, self.filled_from = self.filled_from is not None, None
        if not was_filled:
            return
        assert self.memory is not None
        assert self.full is not None
        if self.where is None:
            self._leaves_without_memory = self.full.take_memory_from_leaves()
            storage = StorageWeakRef(self.memory.untyped_storage())
            self.memory, self.full, self._outs = None, None, []
            self.was_held = not _wait_until_freed(storage)
        else:
            self.full.set_version(RELEASED_VERSION)
            if self._poison:
                self.memory.fill_(0xFF)  # NaN in every floating dtype

    def abandon_gathers(self) -> None:
        """Abandon gathers into the buffer that are under way, as they may never end. The buffer counts as released."""
        self.works.clear()
        self.filled_from = None
        if self.full is not None and self.where is not None:
            self.full.set_version(RELEASED_VERSION)


def _wait_until_freed(storage: StorageWeakRef) -> bool:
    """Return whether no reference to a storage is left. A thread that ends a collective has 5 ms to drop its reference."""
    for _ in range(5):
        if storage.expired():
            return True
        time.sleep(0.001)
    return False
