"""UnitState: what a scheduler knows of one unit of one tree: where its full parameters are, and its gradient."""

import time
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.stateful.schedule.schedule import Memory
from fsharp.stateful.transport.base import Transport, Work
from fsharp.stateful.units.axis_chain import Move, gather_along
from fsharp.stateful.units.full import (
    FullUnit,
    aligned,
    carve,
    full_sizes,
    gather_axes,
    leaf_index,
    nested_parts,
    update_gather_axes,
)
from fsharp.stateful.units.gradient import GradientBuffer
from fsharp.stateful.units.resting import RestingGradient

Stamp = tuple[tuple[int, int], ...]

_RELEASED = 2**31
"""The version of leaves whose memory may hold something else."""
_VERSIONS_A_FILL = 1024
"""What is filled from other values, or in another step, has other versions; a write to a leaf adds one."""


def stamp(node: Sharded) -> Stamp:
    """Which tensors a node's buffers are, and how often they have been written to."""
    found = []
    for b in node.raw_buffers:
        found.append((b.data_ptr(), 0 if b.is_inference() else b._version))
    return tuple(found)


def full_nbytes(unit: UnitLayout) -> int:
    """Bytes of a unit's full parameters, each group on an aligned boundary."""
    return sum(aligned(numel * dtype.itemsize) for numel, dtype in full_sizes(unit))


class UnshardedBuffer:
    """Full parameters of a unit, whether they are there at present or not: in the arena, or in memory of their own.

    In the arena, tensors that autograd has saved point at this memory. While something else may be in it, their version
    counters differ from what autograd has seen, so a backward that comes to them by a way that the scheduler does not know of
    is refused. Memory of its own is new with each gather, and lives for as long as somebody holds a view of it.

    Args:
        layout: of the unit.
        axes: to gather along.
        device: where memory of its own is made.
        rank: of this process.
        memory: a part of the arena; None for memory of its own.
        where: that part.

    Attributes:
        full: the parameters; only while they are gathered, if they have memory of their own.
        filled_from: the stamp of the node that it is filled from, or about to be; None while it is released.
        works: of the gathers that fill it.
        users: uses that are under way.
        is_held: whether somebody still had memory of its own when it was released.
    """

    __slots__ = (
        "_device",
        "_last_filled_from",
        "_layout",
        "_outs",
        "_rank",
        "_sources",
        "_version",
        "axes",
        "filled_from",
        "full",
        "is_held",
        "memory",
        "users",
        "where",
        "works",
    )

    def __init__(
        self,
        layout: UnitLayout,
        axes: tuple[str, ...],
        device: torch.device,
        *,
        rank: int,
        memory: torch.Tensor | None = None,
        where: Memory | None = None,
    ) -> None:
        self._layout, self._device, self._rank, self.axes, self.where = layout, device, rank, axes, where
        self.memory: torch.Tensor | None = None
        self.full: FullUnit | None = None
        self._outs: list[list[torch.Tensor]] = []
        if memory is not None:
            self._make(memory)
        self.filled_from: Stamp | None = None
        self.works: list[Work] = []
        self.users = 0
        self.is_held = False
        self._sources: list[StorageWeakRef] = []
        self._last_filled_from: Stamp | None = None
        self._version = 0  # of its leaves while it is filled

    def _make(self, memory: torch.Tensor) -> None:
        self.memory, self.full = memory, FullUnit(self._layout, carve(memory, full_sizes(self._layout)))
        self._outs = [nested_parts(flat, self._layout, self.axes, self._rank) for flat in self.full.flats]

    @property
    def is_filled(self) -> bool:
        """Whether the parameters are there, or on their way."""
        return self.filled_from is not None

    def begin(self) -> None:
        """A new step: a backward of an older one is refused."""
        self._version = (self._version + _VERSIONS_A_FILL) % _RELEASED
        self._set_version(self._version if self.is_filled else _RELEASED)
        self.users = 0

    def gather(self, node: Sharded, transport: Transport, label: str) -> None:
        """Begin to fill it from where the unit's parameters rest."""
        self.works += gather_along(self.axes, self.fill(node, transport), transport, label=label, as_one=False)

    def fill(self, node: Sharded, transport: Transport) -> list[Move]:
        """What has to be gathered to fill it from where the unit's parameters rest. It is about to be."""
        if transport.innermost.is_async:  # else this stream is behind it, and what it reads has to stay until compute is, too
            _ = node.buffers
        if self.where is None:
            with torch.inference_mode(False):
                self._make(torch.empty(full_nbytes(self._layout), dtype=torch.uint8, device=self._device))
        self.filled_from, self._sources, self.is_held = stamp(node), [], False
        if self.filled_from != self._last_filled_from:  # what was saved of other values is refused
            self._last_filled_from, self._version = self.filled_from, (self._version + _VERSIONS_A_FILL) % _RELEASED
        self._set_version(self._version)
        return [(x.detach(), outs) for x, outs in zip(node.raw_buffers, self._outs, strict=True) if x.numel()]

    def wait(self) -> None:
        """Block until it is filled with the unit's parameters."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def holds(self, seen: Stamp) -> bool:
        """Whether it has, or is about to have, the values of these tensors."""
        return self.filled_from == seen and not any(source.expired() for source in self._sources)

    @property
    def is_carried(self) -> bool:
        """Whether it was gathered in the step before."""
        return bool(self._sources)

    def remember(self, node: Sharded | None) -> None:
        """From here on nobody keeps the tensors that it is a copy of: others may get their addresses."""
        self._sources = [StorageWeakRef(x.untyped_storage()) for x in node.raw_buffers] if node else []

    def release(self, *, poison: bool) -> None:
        """Its memory is free; what it held must not be used any more."""
        self.wait()
        was_filled, self.filled_from = self.filled_from is not None, None
        if not was_filled:
            return
        self._set_version(_RELEASED)
        if self.where is None:
            assert self.memory is not None
            storage = StorageWeakRef(self.memory.untyped_storage())
            self.memory, self.full, self._outs = None, None, []
            self.is_held = not _expires(storage)
        elif poison and self.memory is not None:
            self.memory.fill_(0xFF)  # NaN in every floating dtype

    def drop(self) -> None:
        """What was to fill it may never come."""
        self.works.clear()
        self.filled_from = None
        self._set_version(_RELEASED)

    def _set_version(self, version: int) -> None:
        if self.full is not None and self.where is not None:
            self.full.set_version(version)


def _expires(storage: StorageWeakRef) -> bool:
    """Whether nobody holds a storage; a thread that has just made a collective may be about to let it go."""
    for _ in range(5):
        if storage.expired():
            return True
        time.sleep(0.001)
    return False


class UnitState:
    """One unit of one tree, as long as its scheduler lives.

    Attributes:
        key: its name in programs.
        layout: of the unit.
        index: where its leaves are in its flat buffers.
        axes: those to gather along before use; empty if it rests in full, or has no elements.
        update_axes: those to gather updated parameters along, to bring them to where they rest.
        node: where its parameters are in this step.
        params: where its full parameters are in this step, if it is gathered.
        gradient: made when the unit is first trained.
        pending: uses of this microbatch whose gradient is yet to come.
        host_nbytes: bytes of its state that the last update of this step has brought to host memory.
    """

    def __init__(self, key: str, layout: UnitLayout, *, trivial: bool) -> None:
        self.key, self.layout, self.trivial = key, layout, trivial
        self.index = leaf_index(layout)
        self.axes = gather_axes(layout, trivial=trivial) if full_nbytes(layout) else ()
        self.update_axes = update_gather_axes(layout, trivial=trivial)
        self.node: Sharded | None = None
        self.params: UnshardedBuffer | None = None
        self.gradient: GradientBuffer | None = None
        self.pending = self.host_nbytes = 0
        self._at_rest: tuple[Any, FullUnit] | None = None

    @torch.inference_mode(False)  # what is kept here will be trained as well
    def at_rest(self) -> FullUnit:
        """The parameters where they rest in full."""
        assert self.node is not None
        buffers = self.node.raw_buffers
        key = tuple(b.data_ptr() for b in buffers)
        if self._at_rest is None or self._at_rest[0] != key:
            self._at_rest = (key, FullUnit(self.layout, [b.detach() for b in buffers]))
        return self._at_rest[1]

    def begin(self) -> None:
        """A new step: nothing of the unit is under way."""
        self.node = self.params = None
        self.pending = self.host_nbytes = 0
        if self.gradient is not None:
            self.gradient.begin_step()

    def train(self, transport: Transport, place: RestingGradient | None) -> None:
        """A new gradient, if the unit has one.

        Args:
            transport: runs its collectives.
            place: where the schedule has room for it.
        """
        if not self.layout.trainable:
            return
        if self.gradient is None:
            device = self.node.raw_buffers[0].device if self.node else torch.device("cpu")
            self.gradient = GradientBuffer(self.layout, transport, device, trivial=self.trivial)
        self.gradient.renew(place)

    def forget(self) -> None:
        """Hold on to nobody's tensors."""
        self.node = self.params = self._at_rest = None
