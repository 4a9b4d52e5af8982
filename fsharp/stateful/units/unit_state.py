"""UnitState: the state of one unit of one tree in a scheduler. UnitRegistry: the units of all trees, found by their nodes."""

import math
from itertools import chain, count
from typing import Any

import torch

from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.tree_labels import new_tree_label_prefix
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.stored import use_gather_inputs
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.traffic import calls_to_gather_buffer, use_gather_calls
from fsharp.stateful.schedule.program import UnitFacts
from fsharp.stateful.transport.base import Transport
from fsharp.stateful.units.axis_chain import facts_of_reduction
from fsharp.stateful.units.full_unit import FullUnit, full_nbytes, full_sizes, full_sizes_of_encoded_groups, leaf_table
from fsharp.stateful.units.gradient_buffers import GradientBuffers
from fsharp.stateful.units.unit_gradient import UnitGradient

MemoryKey = tuple[str | int, ...]
_address_of, _size_of = torch.Tensor.data_ptr, torch.Tensor.numel


class UnitState:
    """The state of one unit of one tree, for the lifetime of the scheduler.

    Attributes:
        key: name of the unit in programs.
        leaf_table: table of the unit's leaves.
        axes: axes along which the unit is gathered before a use; empty if the unit rests in full, or has no elements.
        update_gather_axes: axes along which updated parameters are gathered to where they rest.
        node: the unit's parameters in this step; None before their first use.
        tree_label: name of the tree of ``node``, with which labels of gathers begin; None before the first gather.
        host_copy_nbytes: bytes of the unit's state that the last update of this step has copied to host memory.
    """

    def __init__(self, key: str, layout: UnitLayout, *, trivial: bool) -> None:
        self.key, self.layout, self.trivial = key, layout, trivial
        self.leaf_table = leaf_table(layout)
        params, optim, full = layout.strategy.params, layout.strategy.optim, layout.strategy.full
        self.axes = layout.gather_axes(params, full, trivial=trivial) if full_nbytes(layout) else ()
        self.update_gather_axes = layout.gather_axes(optim, params, trivial=trivial)
        self.node: Sharded | None = None
        self.gradient: UnitGradient | None = None
        self.host_copy_nbytes = 0
        self.tree_label: str | None = None
        self._at_rest: tuple[Any, FullUnit] | None = None

    def facts(
        self, *, trained: bool, updated: bool, several_uses: bool, several_microbatches: bool, keep_gradients: bool = False
    ) -> UnitFacts:
        """Return the bytes of the unit's full parameters and gradient in a schedule, and the collectives of each move.

        ``trained``: whether the step has a gradient of the unit; a second tree of the layout may be evaluated without
        gradients. ``several_uses``: whether some microbatch has several uses with gradients. ``several_microbatches``: whether
        gradients of microbatches are added. ``keep_gradients``: whether gradients rest beside the arena, in their own memory.
        """
        layout, dtypes = self.layout, {group.dtypes for group in self.layout.groups}
        sent = layout.trainable_groups if updated else ()
        updates = [calls_to_gather_buffer(layout, layout.update_gather_input_nbytes(g), self.update_gather_axes) for g in sent]
        differences = [layout.update_gather_input_nbytes(g) for g in sent if layout.update_format(g) is not None]
        of_gradient: dict[str, Any] = {"trainable": trained and self.gradient is not None}
        if trained and self.gradient is not None:
            route = self.gradient.route
            outgoing = route.outgoing_block_nbytes(several_uses=several_uses, several_microbatches=several_microbatches)
            of_gradient |= {"outgoing": outgoing, "finishing": route.final_reduction_block_nbytes()}
            of_gradient["rest"] = 0 if keep_gradients else self.gradient.rest.nbytes
            of_gradient["gradient"] = sum(each.size * each.first.itemsize for each in route.chains)
            of_gradient |= facts_of_reduction("reduce", route.chains) | facts_of_reduction("finish", route.final_chains)
        return UnitFacts(
            self.key,
            gathered=full_nbytes(layout) if self.axes else 0,
            gather=tuple(use_gather_calls(layout, self.axes)),
            update_gather=tuple(chain(*updates)),
            host=self.host_copy_nbytes,
            sent_dtypes=" ".join(dtypes.pop().names) if len(dtypes) == 1 else None,
            decoded=sum(numel * dtype.itemsize for numel, dtype in full_sizes_of_encoded_groups(layout)) if self.axes else 0,
            update_coded=sum(differences) * math.prod(map(layout.mesh.axis_size, self.update_gather_axes)),
            **of_gradient,
        )

    def bind_node(self, node: Sharded | None) -> None:
        """Make ``node`` the unit's parameters from now on. None unbinds the unit."""
        self.node, self.tree_label = node, None

    def find_tree_label(self, comm: Comm) -> str:
        """Return the name of the tree of ``node``, with which labels of collectives begin. No collective."""
        if self.tree_label is None:
            self.tree_label = "" if self.node is None else new_tree_label_prefix(self.node, comm)
        return self.tree_label

    @torch.inference_mode(False)  # the result is kept, and may be trained later
    def full_unit_at_rest(self) -> FullUnit:
        """Return the full parameters of a unit that rests in full, which needs no gather. Wait until its buffers are filled."""
        assert self.node is not None
        buffers = self.node.buffers
        if self.layout.tensor_classes:
            stored = [b.detach() for b in buffers]
            rows = zip(self.layout.groups, full_sizes(self.layout), stored, strict=True)
            flats = [b if g.dtypes.format is None else torch.empty(n, dtype=t, device=b.device) for g, (n, t), b in rows]
            planes = {g: use_gather_inputs(self.layout, g, stored[g]) for g in self.layout.tensor_classes}
            full = FullUnit(self.layout, flats, stored, planes)
            full.decode(0)
            return full
        if self.layout.has_stored_formats:
            return FullUnit(self.layout, [b.detach() for b in self.node.decoded_buffers()])
        key = tuple(b.data_ptr() for b in buffers)
        if self._at_rest is None or self._at_rest[0] != key:
            self._at_rest = (key, FullUnit(self.layout, [b.detach() for b in buffers]))
        return self._at_rest[1]

    @property
    def required_gradient(self) -> UnitGradient:
        """The gradient of a trained unit. An assertion fails for a frozen unit."""
        assert self.gradient is not None
        return self.gradient

    def begin_step(self) -> None:
        """Begin a step: without a node, without bytes on the host, and with the gradient outside of the arena."""
        self.bind_node(None)
        self.host_copy_nbytes = 0
        if self.gradient is not None:
            self.gradient.forbid_arena_memory()

    def begin_gradient(self, transport: Transport, arena_rest: GradientBuffers | None, *, final_sum_in_place: bool) -> None:
        """Begin a new gradient, if the unit is trained: see :meth:`UnitGradient.begin`."""
        if not self.layout.trainable_groups:
            return
        if self.gradient is None:
            device = self.node.raw_buffers[0].device if self.node else torch.device("cpu")
            self.gradient = UnitGradient(self.layout, transport, device, trivial=self.trivial)
        self.gradient.begin(arena_rest, final_sum_in_place=final_sum_in_place)

    def set_offloaded_nbytes(self, nbytes: int) -> None:
        """Set how many bytes of the unit's state an update copies to host memory."""
        self.host_copy_nbytes = nbytes

    def release_parameter_references(self) -> None:
        """Release the references to the node, and to tensors of parameters at rest."""
        self.bind_node(None)
        self._at_rest = None


class UnitRegistry:
    """The units of all trees that a scheduler has seen. A node is one tree's :class:`~fsharp.Sharded`; it is bound to its unit.

    Attributes:
        units: units by key. A key is the unit's path, with a number if several trees have a unit of this path.
    """

    def __init__(self, *, trivial: bool) -> None:
        self.trivial = trivial
        self.units: dict[str, UnitState] = {}
        self._by_memory: dict[MemoryKey, UnitState] = {}

    def begin_step(self) -> None:
        """Begin a step: remove the nodes and addresses of the previous step, as addresses may be reused."""
        self._by_memory.clear()
        for unit in self.units.values():
            unit.begin_step()

    def unbind_nodes(self) -> None:
        """Unbind all units from their nodes, and release tensors of units that were not bound: their tree may be gone."""
        self._by_memory.clear()
        for unit in self.units.values():
            if unit.node is None:
                unit.release_parameter_references()
            unit.bind_node(None)

    def bind_unbound_node(self, key: str, node: Sharded) -> None:
        """Bind ``node`` to the unit ``key``, if there is such a unit with this layout, and the node is not bound yet."""
        known = self.units.get(key)
        if known is None or (node.unit is not known.layout and node.unit != known.layout):
            return
        if self._by_memory.setdefault(memory_key(node), known) is known:
            known.bind_node(node)

    def bind_node(self, unit: UnitState, node: Sharded, *, replaced: Sharded | None = None) -> None:
        """Bind ``node`` to ``unit``. The node ``replaced`` is unbound, and gets another unit if it is used again."""
        key = memory_key(node)
        if replaced is not None and (old := memory_key(replaced)) != key:
            self._by_memory.pop(old, None)
            unit.release_parameter_references()
        self._by_memory[key] = unit
        unit.bind_node(node)

    def find_unit(self, node: Sharded) -> UnitState | None:
        """Return the unit to which ``node`` is bound in this step; None if it is not bound. ``memory_key()`` is inlined."""
        return self._by_memory.get((node.unit.name, *map(_address_of, node.raw_buffers), *map(_size_of, node.raw_buffers)))

    def bind_or_make_unit(self, node: Sharded) -> UnitState:
        """Bind ``node`` to a unit of its path and layout that is free in this step, or to a new unit. Return the unit."""
        name, units = node.name or "(root)", self.units
        keys = (f"{name}#{number}" if number else name for number in count())
        key = next(k for k in keys if k not in units or (units[k].node is None and units[k].layout == node.unit))
        if key not in self.units:
            self.units[key] = UnitState(key, node.unit, trivial=self.trivial)
        self.bind_node(self.units[key], node)
        return self.units[key]

    def remove_unused(self, used: set[str]) -> None:
        """Remove the units whose keys are not in ``used``, except units to which a node of this step is bound."""
        for key in self.units.keys() - used - {unit.key for unit in self._by_memory.values()}:
            del self.units[key]  # in place: a step outside of functions has the same dict


def memory_key(node: Sharded) -> MemoryKey:
    """Return a node's unit, buffer addresses and sizes: a part and the whole buffer may begin at one address."""
    return node.unit.name, *map(_address_of, node.raw_buffers), *map(_size_of, node.raw_buffers)
