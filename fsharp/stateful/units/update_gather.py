"""UpdateGather: gather updated parameters, or encoded differences, from the optimizer's shards to where parameters rest."""

import math

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fsharp.functional.encoding import add_encoded_difference
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.stored import part_to_gather, scales_in
from fsharp.stateful.transport.base import Work
from fsharp.stateful.units.axis_chain import GatherInput
from fsharp.stateful.units.full_unit import outputs_by_axis
from fsharp.stateful.units.unit_state import UnitState


class UpdateGather:
    """The gather of one unit's updated parameters, from the shards that ranks have updated to where parameters rest.

    Args:
        old: the parameters before the update.
        new: this rank's updated shards of trained groups; for a group with a format of updates, the encoded difference.
        donate: whether the gathers may fill the buffers of ``old``; if False, they fill new buffers.

    Attributes:
        gather_inputs: for each buffer that travels, this rank's part, and by axis the buffer that the axis's gather fills.
        works: the Works of the gathers that have begun, for which :meth:`wait` waits.
        differences: triples ``(group, parameters, encoded difference)``, which :meth:`wait` decodes and adds. If a wait is
            interrupted while it copies a sum to the parameters, ``(None, parameters, sum)`` is left for the next wait.
    """

    def __init__(self, unit: UnitState, old: Sharded, new: Sharded, *, rank: int, donate: bool) -> None:
        self.unit, self.rank = unit, rank
        self.axes = unit.update_gather_axes
        self.works: list[Work] = []
        self.gather_inputs: list[GatherInput] = []
        self.differences: list[tuple[int | None, torch.Tensor, torch.Tensor]] = []
        layout, held, buffers = old.unit, dict(zip(new.groups, new.buffers, strict=True)), []
        for group, before in zip(old.groups, old.raw_buffers, strict=True):
            part = held.get(group)
            if part is None or not self.axes:
                buffers.append(before if part is None else part)
                continue
            if layout.update_format(group) is not None:
                buffers.append(buffer := before if donate else before.clone())
                if part.numel():
                    encoded = part.new_empty(len(part) * math.prod(map(layout.mesh.axis_size, self.axes)))
                    self.gather_inputs.append((part, outputs_by_axis(encoded, layout, self.axes, rank)))
                    self.differences.append((group, buffer.detach(), encoded))
                continue
            buffer = before if donate else torch.empty_like(before)
            buffers.append(buffer)
            if layout.scales_nbytes[group]:
                scales_in(layout, group, buffer).copy_(scales_in(layout, group, part))
            room = part_to_gather(layout, group, buffer.detach())
            if room.numel():
                self.gather_inputs.append((part_to_gather(layout, group, part), outputs_by_axis(room, layout, self.axes, rank)))
        self.node = old.replace(buffers)

    def wait(self) -> None:
        """Block until all parts have been gathered, and add the differences to the parameters."""
        for work in self.works:
            work.wait()
        self.works.clear()
        self.gather_inputs.clear()
        while self.differences:
            group, params, encoded = self.differences[-1]  # kept to the end: after an error the next read tries again
            with torch.no_grad(), _unsafe_preserve_version_counter(params):  # gathers do not count their writes either
                if group is not None:
                    encoded = add_encoded_difference(self.unit.layout, group, params, encoded, self.rank)
                    self.differences[-1] = None, params, encoded
                params.copy_(encoded)  # may be repeated after Ctrl-C, which an addition may not
            self.differences.pop()
