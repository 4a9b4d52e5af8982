"""UnitState: what a scheduler knows of one unit of one tree: where its full parameters are, and its gradient."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fsharp.functional.layout import UnitLayout
from fsharp.functional.sharded import Sharded
from fsharp.stateful.runtime.full import FullUnit, aligned, carve, full_sizes, gather_axes, nested_parts
from fsharp.stateful.runtime.gradient import GradientBuffer
from fsharp.stateful.runtime.resting import Resting
from fsharp.stateful.schedule.schedule import Memory
from fsharp.stateful.transport.base import Ticket, Transport

Stamp = tuple[tuple[int, int], ...]


def stamp(node: Sharded) -> Stamp:
    """Which tensors a node's buffers are, and how often they have been written to."""
    return tuple((b.data_ptr(), 0 if b.is_inference() else b._version) for b in node.raw_buffers)


def full_nbytes(unit: UnitLayout) -> int:
    """Bytes of a unit's full parameters, each group on an aligned boundary."""
    return sum(aligned(numel * dtype.itemsize) for numel, dtype in full_sizes(unit))


class UnshardedBuffer:
    """Full parameters of a unit in memory that stays the same storage, whether they are there at present or not.

    Tensors that autograd has saved point at this memory. While something else may be in it, their version counters differ from
    what autograd has seen, so a backward that comes to them by a way that the scheduler does not know of is refused.

    Args:
        layout: of the unit.
        axes: to gather along.
        memory: bytes for it: a part of the arena, or a storage of its own.
        rank: of this process.
        where: the part of the arena; None for a storage of its own, which is empty while the parameters are not there.

    Attributes:
        seen: the stamp of the node that it is filled from, or about to be; None while it is released.
        users: uses that are under way.
    """

    __slots__ = ("_epoch", "_issued", "_outs", "_sources", "axes", "full", "memory", "seen", "tickets", "users", "where")

    def __init__(
        self, layout: UnitLayout, axes: tuple[str, ...], memory: torch.Tensor, *, rank: int, where: Memory | None = None
    ) -> None:
        self.axes, self.memory, self.where = axes, memory, where
        self.full = FullUnit(layout, carve(memory, full_sizes(layout)))
        self._outs = [nested_parts(flat, layout, axes, rank) for flat in self.full.flats]
        self.seen: Stamp | None = None
        self.tickets: list[Ticket] = []
        self.users = 0
        self._sources: list[StorageWeakRef] = []
        self._issued: dict[int, tuple[torch.Tensor, ...]] = {}  # by use: tensors with the version counters of its leaves
        self._epoch = 0

    @property
    def is_filled(self) -> bool:
        """Whether the parameters are there, or on their way."""
        return self.seen is not None

    def issue(self, use: int) -> list[torch.Tensor]:
        """Leaves for a use: new aliases each time."""
        leaves = self.full.leaves()
        if torch.is_grad_enabled():
            self._issued[use] = tuple(leaf.detach() for leaf in leaves)
        return leaves

    def retire(self, use: int) -> None:
        """The backward of a use is over."""
        self._issued.pop(use, None)

    def begin(self) -> None:
        """A new step: no backward of an older one comes to it."""
        self._issued.clear()
        self.users = 0

    def gather(self, node: Sharded, transport: Transport, label: str) -> None:
        """Begin to fill it from where the unit's parameters rest."""
        if transport.innermost.is_async:  # else this stream is behind it, and what it reads has to stay until compute is, too
            _ = node.buffers
        if self.where is None and not self.memory.untyped_storage().nbytes():
            self.memory.untyped_storage().resize_(len(self.memory))
        self.seen, self._sources = stamp(node), []
        self._set_versions(0)
        for group, (x, outs) in enumerate(zip(node.raw_buffers, self._outs, strict=True)):
            if not len(x):
                continue
            x = x.detach()
            for i, (axis, out) in enumerate(zip(self.axes, outs, strict=True)):
                ticket = transport.gather(x, out, axis, label=f"{label} group {group}")
                if i == len(outs) - 1:
                    self.tickets.append(ticket)
                else:
                    ticket.wait()
                x = out

    def wait(self) -> None:
        """Until it is filled."""
        for ticket in self.tickets:
            ticket.wait()
        self.tickets.clear()

    def holds(self, seen: Stamp) -> bool:
        """Whether it has, or is about to have, the values of these tensors."""
        return self.seen == seen and not any(source.expired() for source in self._sources)

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
        was_filled, self.seen = self.seen is not None, None
        if not was_filled:
            return
        self._epoch += 1
        self._set_versions(self._epoch)
        if self.where is None:
            self.memory.untyped_storage().resize_(0)
        elif poison:
            self.memory.fill_(0xFF)  # NaN in every floating dtype

    def drop(self) -> None:
        """What was to fill it may never come."""
        self.tickets.clear()
        self.seen = None

    def _set_versions(self, version: int) -> None:
        for issued in self._issued.values():
            torch._C._autograd._unsafe_set_version_counter(issued, (version,) * len(issued))


class UnitState:
    """One unit of one tree, as long as its scheduler lives.

    Attributes:
        key: its name in programs.
        layout: of the unit.
        axes: those to gather along before use; empty if it rests in full, or has no elements.
        node: where its parameters are in this step.
        params: where its full parameters are in this step, if it is gathered.
        gradient: made when the unit is first trained.
        pending: uses of this microbatch whose gradient is yet to come.
        most_uses: most uses with a gradient in one microbatch, so far in this step.
    """

    def __init__(self, key: str, layout: UnitLayout, *, trivial: bool) -> None:
        self.key, self.layout, self.trivial = key, layout, trivial
        self.axes = gather_axes(layout, trivial=trivial) if full_nbytes(layout) else ()
        self.node: Sharded | None = None
        self.params: UnshardedBuffer | None = None
        self.gradient: GradientBuffer | None = None
        self.pending = self.most_uses = 0
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
        """A new step."""
        self.node = self.params = None
        self.pending = self.most_uses = 0

    def train(self, transport: Transport, place: Resting | None) -> None:
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
        self.gradient.begin(place)

    def forget(self) -> None:
        """Hold on to nobody's tensors."""
        self.node = self.params = self._at_rest = None
