"""Copies of full parameters: in a slot of the arena, in room made on demand, or where parameters rest in full anyway."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fsharp.functional.layout import UnitLayout
from fsharp.functional.sharded import Sharded
from fsharp.stateful.runtime.full import FullUnit, aligned, carve, full_sizes, gather_axes, nested_parts
from fsharp.stateful.runtime.gradients import Gradient
from fsharp.stateful.runtime.rest import Rest
from fsharp.stateful.schedule.schedule import Memory
from fsharp.stateful.transport.base import Ticket, Transport

Stamp = tuple[tuple[int, int], ...]


def stamp(node: Sharded) -> Stamp:
    """Which tensors a node's buffers are, and how often they have been written to."""
    return tuple((b.data_ptr(), 0 if b.is_inference() else b._version) for b in node.raw_buffers)


def full_nbytes(unit: UnitLayout) -> int:
    """Bytes of a unit's full parameters, each group on an aligned boundary."""
    return sum(aligned(numel * dtype.itemsize) for numel, dtype in full_sizes(unit))


class LiveUnit:
    """One unit of one tree, as long as its scheduler lives.

    Attributes:
        key: its name in programs.
        layout: of the unit.
        axes: those to gather along before use; empty if it rests in full, or has no elements.
        node: where its parameters are in this step.
        gradient: made when the unit is first trained.
        pending: uses of this microbatch whose gradient is yet to come.
        uses: most uses with a gradient in one microbatch, so far in this step.
    """

    def __init__(self, key: str, layout: UnitLayout, *, trivial: bool) -> None:
        self.key, self.layout, self.trivial = key, layout, trivial
        self.axes = gather_axes(layout, trivial=trivial) if full_nbytes(layout) else ()
        self.node: Sharded | None = None
        self.gradient: Gradient | None = None
        self.pending = self.uses = 0
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
        self.node = None
        self.pending = self.uses = 0

    def train(self, transport: Transport, place: Rest | None, *, in_place: bool) -> None:
        """A new gradient, if the unit has one.

        Args:
            transport: runs its collectives.
            place: where the plan has room for it.
            in_place: as :meth:`Gradient.begin` takes it.
        """
        if not self.layout.trainable:
            return
        if self.gradient is None:
            device = self.node.raw_buffers[0].device if self.node else torch.device("cpu")
            self.gradient = Gradient(self.layout, transport, device, trivial=self.trivial)
        self.gradient.begin(place, in_place=in_place)

    def forget(self) -> None:
        """Hold on to nobody's tensors."""
        self.node = self._at_rest = None


class Room:
    """Memory for one copy at a time, outside of the plan."""

    __slots__ = ("copy", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.copy: Copy | None = None


class Copy:
    """Full parameters of a unit at one address, whether they are there at present or not.

    Args:
        unit: whose.
        memory: bytes for it.
        where: the run of the arena, if it is in there.
        room: else the room that it shares.
    """

    __slots__ = ("_outs", "_sources", "full", "memory", "room", "seen", "tickets", "unit", "users", "where")

    def __init__(
        self, unit: LiveUnit, memory: torch.Tensor, *, rank: int, where: Memory | None = None, room: Room | None = None
    ) -> None:
        self.unit, self.memory, self.where, self.room = unit, memory, where, room
        self.full = FullUnit(unit.layout, carve(memory, full_sizes(unit.layout)))
        self._outs = [nested_parts(flat, unit.layout, unit.axes, rank) for flat in self.full.flats]
        self.seen: Stamp | None = None  # what is in it, or will be when the tickets are done
        self.tickets: list[Ticket] = []
        self.users = 0
        self._sources: list[StorageWeakRef] = []

    def gather(self, transport: Transport) -> None:
        """Begin to fill it from where the unit's parameters rest."""
        node = self.unit.node
        assert node is not None, f"{self.unit.key} has no source"
        buffers = node.buffers
        self.seen, self._sources = stamp(node), []
        for x, outs in zip(buffers, self._outs, strict=True):
            if not len(x):
                continue
            x = x.detach()
            for i, (axis, out) in enumerate(zip(self.unit.axes, outs, strict=True)):
                ticket = transport.gather(x, out, axis)
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

    def remember(self) -> None:
        """From here on nobody keeps the tensors that it is a copy of: others may get their addresses."""
        node = self.unit.node
        self._sources = [StorageWeakRef(x.untyped_storage()) for x in node.raw_buffers] if node else []

    def take(self, other: "Copy") -> None:
        """Be what the other is, which is another's then."""
        other.wait()
        self.memory.copy_(other.memory)
        self.seen, self._sources = other.seen, other._sources
        other.seen = None

    def release(self, *, poison: bool) -> None:
        """Its memory is free; what it held must not be used any more."""
        self.wait()
        was_seen, self.seen = self.seen is not None, None
        if poison and was_seen:
            self.memory.fill_(0xFF)  # NaN in every floating dtype
