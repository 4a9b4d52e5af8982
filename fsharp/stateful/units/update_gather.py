"""UpdateGather: updated parameters on their way from the optimizer's place to where they rest."""

from collections.abc import Sequence

import torch

from fsharp.functional.layout.sharded import Sharded
from fsharp.stateful.transport.base import Work
from fsharp.stateful.units.axis_chain import Move
from fsharp.stateful.units.full import nested_parts
from fsharp.stateful.units.unit_state import UnitState


class UpdateGather:
    """One unit's updated parameters: in memory already as far as this rank has them.

    Args:
        unit: whose.
        old: where its parameters rested before.
        new: trained groups at the optimizer's place, in the dtype they rest in.
        rank: of this process.
        donate: whether the buffers of ``old`` may be filled.

    Attributes:
        axes: to gather along.
        moves: parts that travel, and what each gather of theirs fills.
        works: of the gathers that have begun.
    """

    def __init__(self, unit: UnitState, old: Sharded, new: Sharded, *, rank: int, donate: bool) -> None:
        self.unit = unit
        self.axes = unit.update_axes
        self.works: list[Work] = []
        self.moves: list[Move] = []
        held = dict(zip(new.groups, new.buffers, strict=True))
        buffers = []
        for group, before in zip(old.groups, old.raw_buffers, strict=True):
            part = held.get(group)
            if part is None or not self.axes:
                buffers.append(before if part is None else part)
                continue
            buffer = before if donate else torch.empty_like(before)
            buffers.append(buffer)
            if old.unit.scales_size(group):
                old.unit.scales(group, buffer).copy_(old.unit.scales(group, part))
            room = old.unit.travelling(group, buffer.detach())
            if room.numel():
                self.moves.append((old.unit.travelling(group, part), nested_parts(room, old.unit, self.axes, rank)))
        self.node = old.replace(buffers)

    def expect(self, works: Sequence[Work]) -> None:
        """Be over once these gathers are."""
        self.works += works

    def wait(self) -> None:
        """Block until all parts have been gathered."""
        for work in self.works:
            work.wait()
        self.works.clear()
        self.moves.clear()
