"""JAX: convert shards to global arrays under a NamedSharding and back, and JAX functions to functions of tensors.

::

    from fsharp.interop.jax import as_torch, from_jax, to_jax

    arrays = to_jax(state.params, layout)  # the tree, with jax.Arrays of all ranks in it
    loss = jax.jit(lambda tree, batch: loss_fn(unflatten(tree), batch))(arrays, batch)
    params = from_jax(arrays, layout)  # this rank's part
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optree
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsharp.errors import LayoutError, TreeError, problem
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.lent_memory import mark_read_only
from fsharp.functional.layout.sharded import (
    PlaceName,
    Sharded,
    build_subtree,
    flatten_node,
    is_sharded,
    map_units,
    resolve_place,
    unflatten_node,
    units_of,
)
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.interop.arrays import as_jax_array_and_lifetime, as_torch_tensor, check_not_forked_after_jax
from fsharp.interop.call import as_torch as as_torch
from fsharp.interop.modules import (
    make_functional as make_functional,
    stack as stack,
    to_arrays as to_arrays,
    to_tensors as to_tensors,
    unstack as unstack,
)
from fsharp.tracebacks import api_boundary

jax.tree_util.register_pytree_node(Sharded, flatten_node, unflatten_node)


@api_boundary
def to_jax(tree: Any, layout: Layout, *, devices: Sequence[Any] | None = None) -> Any:
    """Return the tree with global arrays in place of flat buffers. Each rank's part keeps its memory, without a copy.

    Args:
        tree: this rank's pytree of :class:`~fsharp.Sharded`: parameters, gradients, or optimizer state. If this process has the
            devices of several ranks, a sequence of their trees, in order of rank.
        layout: the layout of the tree.
        devices: the device of each rank; by default ``jax.devices()`` in order. With one process for each rank call
            ``jax.distributed.initialize()`` first, with the rank for ``process_id``.

    Returns:
        The tree with arrays: for each group of a unit an array under the ``NamedSharding`` that :func:`shardings` returns. The
        shape is ``[size]``, with a leading dim for each axis along which ranks have values of their own. A Sharded is a JAX
        pytree node too, and :func:`unflatten` returns the leaves in their shapes. Leaves that are not a Sharded, such as step
        counts, are unchanged; of several trees, those of the first.

    Raises:
        TreeError: trees do not fit ranks or layout, or JAX would copy a buffer.
        LayoutError: there are fewer devices than ranks, or no device of this process.

    Cost: none. JAX assumes that the memory is constant: while JAX has the arrays you must not write to the tensors, and
    :func:`~fsharp.update` refuses ``donate=True``. ``donate_argnums`` of ``jax.jit`` deletes the arrays, and on a CPU leaves
    the tensors unchanged.
    """
    check_not_forked_after_jax("to_jax()")
    mesh, here = _jax_mesh_and_local_devices(layout, devices)
    trees = [tree] if len(here) == 1 else list(tree) if isinstance(tree, list | tuple) else []
    if len(trees) != len(here):
        raise TreeError(
            f"to_jax(): this process has the devices of {len(here)} ranks, expected a list of {len(here)} trees, got "
            f"{len(trees) or type(tree).__name__}."
        )

    def to_global_arrays(*nodes: Any) -> Any:
        if not is_sharded(nodes[0]):
            return nodes[0]
        return nodes[0].replace([_global_buffer(nodes, i, mesh, here) for i in range(len(nodes[0].groups))])

    for each in trees:
        _check_unit_buffer_types("to_jax()", each, layout, torch.Tensor)
    return map_units(to_global_arrays, *trees)


def _global_buffer(nodes: Sequence[Sharded], i: int, mesh: Mesh, devices: Sequence[Any]) -> Any:
    node, parts = nodes[0], []
    shape, sharding = _global_shape_and_sharding(node, i, mesh)
    for each, device in zip(nodes, devices, strict=True):
        buffer = each.buffers[i]
        if each.is_encoded:
            raise TreeError(
                f"to_jax(): parameters of unit {node.unit.display_name} are stored in a format that JAX does not know. "
                'Convert main copies, or gather() parameters to "full" first.'
            )
        array, holder = as_jax_array_and_lifetime(buffer.view(sharding.shard_shape(shape)), device)
        if buffer.numel():
            if array.unsafe_buffer_pointer() != buffer.data_ptr():
                raise TreeError(
                    f"to_jax(): the address of a buffer of unit {node.unit.display_name} is not a multiple of 64 bytes, so JAX "
                    "would copy it. Convert an aligned copy: optree.tree_map(torch.clone, tree)."
                )
            mark_read_only(buffer.data_ptr(), holder)
        parts.append(array)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


@api_boundary
def from_jax(tree: Any, layout: Layout, *, devices: Sequence[Any] | None = None, donate: bool = False) -> Any:
    """Return this rank's tensors of a tree of global arrays: the inverse of :func:`to_jax`.

    Args:
        tree: any pytree of :class:`~fsharp.Sharded` with arrays, from :func:`to_jax` or from a JAX function.
        layout: the layout of the tree.
        devices: the device of each rank; by default ``jax.devices()`` in order.
        donate: take the memory of the arrays, and delete the arrays. False copies the memory, as JAX may still read it when
            torch writes to it.

    Returns:
        The tree with this rank's tensors; a list of trees if this process has the devices of several ranks. A scalar array
        outside of a Sharded becomes a number, as ``jax.jit`` turns numbers into arrays. All other leaves outside of a Sharded
        are unchanged.

    Raises:
        TreeError: an array is deleted, or is not sharded as :func:`shardings` says: pass ``out_shardings=shardings(...)`` to
            ``jax.jit``.
        LayoutError: there are fewer devices than ranks, or no device of this process.

    Cost: a copy of this rank's part; none with ``donate``.
    """
    check_not_forked_after_jax("from_jax()")
    mesh, here = _jax_mesh_and_local_devices(layout, devices)
    _check_unit_buffer_types("from_jax()", tree, layout, jax.Array)

    def to_local_tensors(device: Any, node: Any) -> Any:
        if not is_sharded(node):
            return node.item() if isinstance(node, jax.Array) and node.ndim == 0 else node
        parts = [_local_buffer(node, i, mesh, device) for i in range(len(node.groups))]
        return node.replace(parts if donate else list(map(torch.clone, parts)))

    if not donate:
        jax.block_until_ready(tree)
    trees = [map_units(partial(to_local_tensors, device), tree) for device in here]
    if donate:
        for node in units_of(tree):
            for array in node.buffers:
                array.delete()
    return trees if len(here) > 1 else trees[0]


def _local_buffer(node: Sharded, i: int, mesh: Mesh, device: Any) -> torch.Tensor:
    array = node.buffers[i]
    shape, sharding = _global_shape_and_sharding(node, i, mesh)
    if array.shape != shape or not array.sharding.is_equivalent_to(sharding, len(shape)):
        raise TreeError(
            f"from_jax(): an array of unit {node.unit.display_name} is {array.shape} under {array.sharding}, expected {shape} "
            f"under {sharding}. Move it there: jax.device_put(tree, shardings(layout)), or jax.jit(..., out_shardings=...)."
        )
    return as_torch_tensor(next(shard.data for shard in array.addressable_shards if shard.device == device)).view(-1)


@api_boundary
def shardings(layout: Layout, place: PlaceName = "params", *, devices: Sequence[Any] | None = None) -> Any:
    """Return the tree of a layout with a ``NamedSharding`` for each buffer: for ``jax.device_put`` and ``out_shardings``.

    Args:
        layout: made by :func:`~fsharp.plan`.
        place: ``"params"``, ``"grads"``, ``"optim"``, ``"full"``, or a :class:`~fsharp.layouts.MeshPlacement`.
        devices: the device of each rank; by default ``jax.devices()`` in order.

    Raises:
        LayoutError: there are fewer devices than ranks, or no device of this process; or ``place`` is not of the strategy.
        TreeError: in ``place`` a unit is a partial sum, which JAX does not know.
    """
    mesh, _ = _jax_mesh_and_local_devices(layout, devices)

    def shardings_of_unit(unit: UnitLayout) -> Sharded:
        node = Sharded([None] * len(unit.groups), unit, resolve_place(unit, place))
        return node.replace([_global_shape_and_sharding(node, i, mesh)[1] for i in range(len(unit.groups))])

    return optree.tree_unflatten(layout.structure, [shardings_of_unit(unit) for unit in layout.units])


@api_boundary
def unflatten(tree: Any) -> Any:
    """Return the user's tree, with leaves sliced out of global flat arrays. For use in ``jax.jit``; differentiable.

    ``tree`` is a pytree of :class:`~fsharp.Sharded`, each with all leaves of its unit. XLA moves the data that a computation
    needs.

    Raises:
        TreeError: a leaf is tied to a leaf of a unit that is not in ``tree``.
        TreeError: a Sharded lacks leaves of its unit. Gradients lack frozen leaves: pass ``fs.layouts.merge(params, grads)``.
    """
    for node in units_of(tree):
        if node.groups != node.unit.all_groups:
            facts = [("groups", f"{node.groups} of {node.unit.all_groups}")]
            remedy = "Pass parameters, or gradients merged into the parameters by fs.layouts.merge()."
            what = f"the tree lacks leaves of unit {node.unit.display_name}, as gradients lack frozen ones."
            raise TreeError(problem("unflatten()", what, facts, remedy))
    views = {
        node.name: {
            leaf.path: x[..., leaf.offset : leaf.offset + leaf.numel].reshape(*x.shape[:-1], *leaf.shape)
            for group, x in zip(node.groups, node.buffers, strict=True)
            for leaf in node.unit.leaves_of_group(group)
        }
        for node in units_of(tree)
    }
    return map_units(lambda node: build_subtree(node.unit, "unflatten()", views), tree)


def _jax_mesh_and_local_devices(layout: Layout, devices: Sequence[Any] | None) -> tuple[Mesh, list[Any]]:
    """Return JAX's mesh, and the devices of this process in it, in order of rank."""
    found, size = list(jax.devices() if devices is None else devices)[: layout.mesh.size], layout.mesh.size
    here = [device for device in found if device.process_index == jax.process_index()]
    if len(found) < size or not here:
        raise LayoutError(
            f"{layout.mesh} has {size} ranks, and JAX {len(found)} devices, {len(here)} of them in this process. Expected one "
            "device for each rank: call jax.distributed.initialize() in each process, or set jax_num_cpu_devices in one."
        )
    return Mesh(np.array(found, dtype=object).reshape(layout.mesh.shape), layout.mesh.names), here


def _global_shape_and_sharding(node: Sharded, i: int, mesh: Mesh) -> tuple[tuple[int, ...], NamedSharding]:
    if node.place.partial_axes:
        raise TreeError(f"unit {node.unit.display_name} rests partial ({node.place}), unknown to JAX: reduce_scatter() it.")
    own = node.place.varying_axes
    shape = (*(node.unit.mesh.axis_size(axis) for axis in own), node.unit.groups[node.groups[i]].size)
    return shape, NamedSharding(mesh, PartitionSpec(*own, node.place.sharded_axes or None))


def _check_unit_buffer_types(where: str, tree: Any, layout: Layout, kind: type) -> None:
    nodes = units_of(tree)
    if not nodes:
        raise TreeError(f"{where}: no Sharded in the tree. to_arrays() and to_tensors() convert trees of leaves.")
    for node in nodes:
        if layout[node.name] != node.unit:
            raise TreeError(f"{where}: unit {node.unit.display_name} is not of the layout that was passed.")
        for buffer in node.buffers:
            is_deleted = isinstance(buffer, jax.Array) and buffer.is_deleted()
            if is_deleted or not isinstance(buffer, kind):
                found = "a deleted array: it was donated" if is_deleted else f"a {type(buffer).__name__}"
                expected = "tensors" if kind is torch.Tensor else "JAX arrays, as to_jax() makes them"
                raise TreeError(f"{where}: unit {node.unit.display_name} has {found}, expected {expected}.")
