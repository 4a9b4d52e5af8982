"""UnitState: the state of one unit of one tree in a scheduler, and the owner of the unit's memory."""

from collections.abc import Iterable
from typing import Any

import torch

from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.tree_names import label_of
from fsharp.functional.layout.placement import Shard
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.stateful.transport.base import Transport
from fsharp.stateful.units.full import (
    FullUnit,
    decode_unit,
    full_nbytes,
    full_sizes,
    full_unit,
    leaf_index,
)
from fsharp.stateful.units.gradient import GradientBuffer
from fsharp.stateful.units.resting import RestingGradient


class UnitState:
    """One unit of one tree, for the lifetime of the scheduler.

    Attributes:
        key: name of the unit in programs.
        index: positions of the unit's leaves in its flat buffers.
        axes: axes along which the unit is gathered before a use; empty if it rests in full, or has no elements.
        update_axes: axes along which updated parameters are gathered to their place.
        node: the unit's parameters in this step.
        tree_label: beginning of the label of a gather of its parameters; None before the first gather.
        host_nbytes: bytes of its state that the last update of this step has copied to host memory.
    """

    def __init__(self, key: str, layout: UnitLayout, *, trivial: bool) -> None:
        self.key, self.layout, self.trivial = key, layout, trivial
        self.index = leaf_index(layout)
        sharded = [axis for axis in reversed(layout.strategy.order) if layout.strategy.params[axis] is Shard]
        self.axes = self._moving(sharded) if full_nbytes(layout) else ()
        self.update_axes = self._moving(layout.update_axes)
        self.node: Sharded | None = None
        self.gradient: GradientBuffer | None = None
        self.host_nbytes = 0
        self.tree_label: str | None = None
        self._at_rest: tuple[Any, FullUnit] | None = None

    def _moving(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes along which a collective is needed: those of more than one rank, or all if trivial ones count."""
        return tuple(axis for axis in axes if self.trivial or self.layout.mesh.axis_size(axis) > 1)

    def bind(self, node: Sharded) -> None:
        """Make a node the unit's parameters from now on."""
        self.node, self.tree_label = node, None

    def label(self, comm: Comm) -> str:
        """Return the name of the tree of the unit's parameters, with which labels of their gathers begin."""
        if self.tree_label is None:
            self.tree_label = "" if self.node is None else label_of(self.node, comm)
        return self.tree_label

    @torch.inference_mode(False)  # kept leaves will be trained, too
    def at_rest(self) -> FullUnit:
        """Return the parameters of a unit that rests in full."""
        assert self.node is not None
        buffers = self.node.raw_buffers
        if self.layout.leaf_classes:
            stored = [b.detach() for b in self.node.buffers]
            flats = [torch.empty(numel, dtype=dtype, device=stored[0].device) for numel, dtype in full_sizes(self.layout)]
            flats = [
                flat if g.dtypes.format is not None else b for g, flat, b in zip(self.layout.groups, flats, stored, strict=True)
            ]
            full = full_unit(self.layout, flats, stored)
            decode_unit(self.layout, full, stored, 0)
            return full
        if self.layout.has_formats:
            return FullUnit(self.layout, [b.detach() for b in self.node.values()])
        key = tuple(b.data_ptr() for b in buffers)
        if self._at_rest is None or self._at_rest[0] != key:
            self._at_rest = (key, FullUnit(self.layout, [b.detach() for b in buffers]))
        return self._at_rest[1]

    def begin_step(self) -> None:
        """Begin a step, in which nothing of the unit is under way yet."""
        self.node, self.tree_label, self.host_nbytes = None, None, 0
        if self.gradient is not None:
            self.gradient.begin_step()

    def train(self, transport: Transport, place: RestingGradient | None) -> None:
        """Begin a new gradient, if the unit is trained."""
        if not self.layout.trainable:
            return
        if self.gradient is None:
            device = self.node.raw_buffers[0].device if self.node else torch.device("cpu")
            self.gradient = GradientBuffer(self.layout, transport, device, trivial=self.trivial)
        self.gradient.renew(place)

    def offload(self, nbytes: int) -> None:
        """Note how many bytes of its state an update copies to host memory."""
        self.host_nbytes = nbytes

    def unbind(self) -> None:
        """Drop the reference to the node."""
        self.node = self.tree_label = None

    def release(self) -> None:
        """Drop the references to the node, and to tensors of parameters at rest."""
        self.node = self.tree_label = self._at_rest = None
