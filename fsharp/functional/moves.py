"""gather and reduce_scatter: move units from one resting place to another. Each is the transpose of the other.

Places of a unit nest (:class:`~fsharp.layouts.MeshPlacement`), so a move is a collective along one axis after another:

==============  ==========  ===============================
from            to          along that axis
==============  ==========  ===============================
shard           replicate   ``all_gather``
replicate       shard       a local slice
partial         shard       ``reduce_scatter``
partial         replicate   ``all_reduce``
==============  ==========  ===============================

The axis along which a buffer was cut last, into the smallest parts, is gathered first and reduced last. So as many bytes are
sent as by one collective over all ranks. The axes and their order come from :meth:`UnitLayout.gather_axes` and
:func:`~fsharp.functional.layout.stages.reduction_stages`.

[Note: resting and gathered]
There are two kinds of copies of a value, which differ only in their gradients. Copies at **rest** are one value that all ranks
share (JAX: invariant). Its gradient is the sum over ranks, which all ranks share too. **Gathered** copies, which functions get,
belong to each rank (JAX: varying): each rank has its own summand of the gradient. So the transpose of a ``gather`` to
``"full"`` is a ``reduce_scatter`` along axes that shard, and an ``all_reduce`` along axes that replicate. ``torch.func.grad``
gives the same gradients of parameters at rest under every strategy.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import optree
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fsharp.errors import TreeError, problem
from fsharp.functional.comm.checked_units import checked_units_of
from fsharp.functional.comm.collectives import (
    all_gather_last,
    all_reduce,
    local_slice_last,
    pcast,
    reduce_scatter_encoded,
    reduce_scatter_last,
)
from fsharp.functional.comm.protocol import Comm, LabelPrefixComm, engine_of, reporting_format_errors
from fsharp.functional.comm.residuals import PerRank, ResidualsByAxis, ResidualViews, prepare_residuals
from fsharp.functional.comm.tree_labels import new_tree_label_prefix
from fsharp.functional.formats.format import ResidualAndNoise
from fsharp.functional.layout.placement import MeshPlacement, Partial, Replicate, Shard
from fsharp.functional.layout.sharded import PlaceName, Sharded, check_not_encoded, is_sharded, map_units, resolve_place
from fsharp.functional.layout.stages import padding_in_decoded_sum, reduction_stages
from fsharp.functional.layout.stored import decode_stored, is_encoded, part_to_gather, scales_in
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.transforms import is_non_vmap_transform_active, is_transform_active, refuse_proxy_tracing
from fsharp.torch_compile import disable_compile

Tree = TypeVar("Tree")


@disable_compile
def gather(tree: Tree, *, comm: Comm, to: PlaceName = "full") -> Tree:
    """All-gather the units of a tree; or move them to another place, by all-gathers and local slices.

    Args:
        tree: a :class:`Sharded`, or a pytree that contains some.
        comm: the ranks.
        to: the target place: ``"params"``, ``"grads"``, ``"optim"``, ``"full"``, or a :class:`~fsharp.layouts.MeshPlacement` of
            the unit's strategy. ``"full"`` gathers all to every rank.

    Returns:
        The tree with its units in the target place. ``Sharded.tree()`` of a full unit returns the user's subtree. A buffer that
        need not move is the buffer of ``tree``, not a copy.

    Raises:
        TreeError: the tree has no unit, or a unit or ``to`` is a partial sum.
        TreeError: the call is under ``torch.func.linearize``.
        TreeError: in a loss, encoded parameters would get no gradient. There they can be gathered only to ``"full"``, and only
            if the loss function was given them as parameters.
        LayoutError: ``to`` is not a place of a unit's strategy.
        MeshError: ``comm`` is on another mesh than the tree.

    Cost: for each gathered axis of ``n`` ranks a rank sends ``(n - 1)`` times the bytes that it holds before this axis is
    gathered. Slices cost nothing.
    Buffers in host memory are copied to the device first.
    Gradient: the gradient with respect to ``tree`` is summed over ranks, and rests in the place of ``tree``: see "What ranks
    differentiate" in ``docs/design_results.md``.
    """
    refuse_proxy_tracing("gather()")
    checked_units_of("gather()", tree, comm)
    return gather_unchecked(tree, comm, to)


def gather_unchecked(tree: Tree, comm: Comm, to: PlaceName = "full") -> Tree:
    """Run :func:`gather` without the checks of the tree and of its mesh."""

    def gather_node(sharded: Sharded) -> Sharded:
        if not is_sharded(sharded):
            return sharded
        target, whole = resolve_place(sharded.unit, to), to == "full"
        if Partial in sharded.place.placements or Partial in target.placements:
            raise _wrong_place_error("gather()", sharded, target, "Use reduce_scatter() for partial sums.")
        if loses_gradient(sharded, whole=whole):
            what = (
                f"gather(): parameters of unit {sharded.unit.display_name} are stored as bytes, whose copies get no gradient."
            )
            raise TreeError(f'{what} In a loss gather the parameters that it was given, to "full", and use the result.')
        if target.placements == sharded.place.placements and not whole and not sharded.is_gathered:
            return Sharded(sharded.buffers, sharded.unit, sharded.place, sharded.groups, tree_label=sharded.tree_label)
        tree_label = new_tree_label_prefix(sharded, comm, target)
        label = f"{tree_label}gather {sharded.name or '(root)'}"
        can_use_sinks = sharded.is_encoded or not is_non_vmap_transform_active()  # bytes get gradients in no other way
        to_sinks = whole and torch.is_grad_enabled() and sharded.sinks and can_use_sinks
        with temporarily_clear_interpreter_stack() if to_sinks else nullcontext():  # no transform has wrapped the buffers
            moved = []
            for x in _buffers_without_scales(sharded):
                x = x.detach() if to_sinks else x
                moved.append(gather_or_slice_buffer(x, sharded, target, comm, is_gathered=whole, label=label))
            moved = _add_scales_or_decode(sharded, moved, target, comm, whole=whole)
            if to_sinks:
                moved = sharded.grad_sinks.attach_to_graph(sharded, moved, LabelPrefixComm(comm, tree_label))
        return Sharded(moved, sharded.unit, target, sharded.groups, is_gathered=whole)

    with reporting_format_errors(comm, "gather()"):
        return optree.tree_map(gather_node, host_buffers_to_device(tree, comm.device), is_leaf=is_sharded)  # type: ignore[return-value]


def loses_gradient(node: Sharded, *, whole: bool = True) -> bool:
    """Return whether a use of ``node`` in a loss would give its encoded parameters no gradient, as bytes have no gradient.

    Only parameters that the loss function was given have sinks for gradients. Outside of a loss the result is False. ``whole``:
    whether the use gathers to ``"full"``; only then do encoded parameters get a gradient.
    """
    if node.grad_sinks is None or not (node.is_encoded and torch.is_grad_enabled()):
        return False
    return bool(node.unit.trainable_groups) and not (whole and node.sinks)


def _buffers_without_scales(node: Sharded) -> Sequence[torch.Tensor]:
    """Return a node's buffers without the scales at their ends. Scales are equal on all ranks, and need not travel."""
    unit, rows = node.unit, zip(node.groups, node.buffers, strict=True)
    if not unit.has_leaf_codecs:
        return node.buffers
    return [part_to_gather(unit, g, x) if is_encoded(unit, g, x) else x for g, x in rows]


def _add_scales_or_decode(
    node: Sharded, moved: list[torch.Tensor], target: MeshPlacement, comm: Comm, *, whole: bool
) -> list[torch.Tensor]:
    """Return moved buffers with the scales of ``node`` at their ends; if ``whole``, return decoded buffers instead."""
    unit = node.unit
    if not unit.has_stored_formats:
        return moved
    found = []
    for g, old, new in zip(node.groups, node.buffers, moved, strict=True):
        if not is_encoded(unit, g, old):
            found.append(new)
        elif whole:
            found.append(decode_stored(unit, g, new, scales_in(unit, g, old), target, comm.rank, unit.groups[g].dtypes.compute))
        else:
            found.append(torch.cat([new, scales_in(unit, g, old)]) if unit.scales_nbytes[g] else new)
    return found


@disable_compile
def reduce_scatter(
    tree: Any,
    *,
    comm: Comm,
    to: PlaceName = "optim",
    residuals: PerRank | None = None,
    step: int | None = None,
    donate: bool = False,
) -> Any:
    """Sum partial gradients over ranks, and shard or replicate the sums as the place ``to`` says.

    Args:
        tree: a :class:`Sharded` of gradients, or a pytree that contains some. Gradients with respect to gathered parameters
            count as partial sums.
        comm: the ranks.
        to: the target place, by name or as a :class:`~fsharp.layouts.MeshPlacement`. ``"optim"`` is the place of optimizer
            state, in which an update takes gradients.
        residuals: residuals as :func:`~fsharp.value_and_grad` has returned them, with ``Precision(feedback=True)``.
        step: number of the step, ``state.step``, for formats that round stochastically.
        donate: overwrite ``residuals``, and return the same tensors. If False, residuals are copied.

    Returns:
        The tree with its units in the target place, in the ``accumulate`` dtype. With residuals a pair: the tree, and the
        residuals for the next step.

    Raises:
        TreeError: the tree has no unit, or has an encoded unit.
        TreeError: the move would have to gather, or to make partial sums.
        TreeError: ``residuals`` are missing for ``Precision(feedback=True)``, or are those of another layout.
        TreeError: ``step`` is missing for a format that rounds stochastically, or is no integer of at least 0.
        TreeError: residuals are passed under a ``torch.func`` transform.
        MeshError: ``comm`` is on another mesh than the tree.

    Cost: along an axis of ``n`` ranks a rank sends ``(n - 1) / n`` of the bytes of each buffer in the ``wire`` dtype. If ``to``
    is replicated along the axis, the rank also sends this fraction of the bytes of the sums in the ``accumulate`` dtype. Except
    for NCCL's own reductions, sums are taken in order of rank. Gradient: the gradient with respect to ``tree`` is the gradient
    with respect to the result, moved by :func:`gather`.
    """
    nodes = checked_units_of("reduce_scatter()", tree, comm)
    check_not_encoded("reduce_scatter()", nodes)
    if residuals is not None and is_transform_active():
        raise TreeError("reduce_scatter(): residuals under a torch.func transform: encoding errors are not differentiated.")
    units = [node.unit for node in nodes]
    own, views = prepare_residuals("reduce_scatter()", residuals, units, donate=donate, step=step, rank=comm.rank)
    moved = reduce_scatter_unchecked(tree, to, comm, views)
    return moved if own is None else (moved, own)


def reduce_scatter_unchecked(tree: Any, to: PlaceName, comm: Comm, donated_residuals: ResidualViews) -> Any:
    """Run :func:`reduce_scatter` without its checks. Return the tree alone: new residuals overwrite ``donated_residuals``."""
    if (engine := engine_of(comm)) is not None:
        return engine.run_reduce_scatter(tree, to, donated_residuals)

    def reduce_node(sharded: Sharded) -> Sharded:
        target, place = resolve_place(sharded.unit, to), sharded.place.cotangent_place if sharded.is_gathered else sharded.place
        for axis in place.axis_order:
            source = place[axis]
            if target[axis] is not source and (source is Shard or target[axis] is Partial):
                raise _wrong_place_error(
                    "reduce_scatter()", sharded, target, "Use gather() for values that are not partial sums."
                )
        named = LabelPrefixComm(comm, new_tree_label_prefix(sharded, comm, target))
        pairs, residuals = zip(sharded.groups, sharded.buffers, strict=True), donated_residuals.get(sharded.name, {})
        moved = [reduce_partial_sums(x, sharded.unit, g, place, target, named, residuals.get(g, {})) for g, x in pairs]
        return Sharded(moved, sharded.unit, target, sharded.groups, reduction=sharded.reduction)

    return map_units(lambda node: reduce_node(node) if is_sharded(node) else node, tree)


def host_buffers_to_device(tree: Any, device: torch.device) -> Any:
    """Return the tree with buffers in host memory copied to the device. If the device is a CPU, return the tree itself."""
    if device.type == "cpu":
        return tree

    def move_node(node: Any) -> Any:
        if not is_sharded(node) or all(getattr(x, "device", device).type == device.type for x in node.raw_buffers):
            return node
        buffers = [x.to(device) if isinstance(x, torch.Tensor) else x for x in node.buffers]
        return node.with_buffers(buffers, reduction=node.reduction)

    return map_units(move_node, tree)


def gather_or_slice_buffer(
    x: torch.Tensor, node: Sharded, target: MeshPlacement, comm: Comm, *, is_gathered: bool, label: str
) -> torch.Tensor:
    """Move one buffer of ``node`` from the node's place to ``target``. Neither place holds partial sums.

    ``is_gathered``: whether the result is a gathered copy. This changes only the gradients: see [Note: resting and gathered].
    ``label``: label of the collectives.
    """
    source, was_gathered = node.place, node.is_gathered
    followed = x.numel() > 0 and (x.requires_grad or (is_transform_active() and x.is_floating_point()))
    for axis in reversed(source.replicated_axes) if followed else ():
        if comm.mesh.axis_size(axis) == 1:
            continue
        if not was_gathered and (is_gathered or target[axis] is Shard):
            x = pcast(x, comm, axis, "each", label=label)
        elif was_gathered and not is_gathered and target[axis] is Replicate:
            x = pcast(x, comm, axis, "share", label=label)
    for axis in node.unit.gather_axes(source, target):
        x = all_gather_last(x, comm, axis, label=label)
        x = x if is_gathered or not followed else pcast(x, comm, axis, "share", label=label)
    for axis in source.replicated_axes:
        if target[axis] is Shard:
            x = local_slice_last(x, comm, axis)
    return x


def reduce_partial_sums(
    x: torch.Tensor,
    unit: UnitLayout,
    group: int,
    source: MeshPlacement,
    target: MeshPlacement,
    comm: Comm,
    residuals: ResidualsByAxis = MappingProxyType({}),
) -> torch.Tensor:
    """Sum one buffer of partial gradients over ranks, and return this rank's part in ``target``, in the accumulate dtype.

    ``source``: the place of ``x``. ``residuals``: encoding errors of earlier gradients, overwritten by the new errors.
    """
    dtypes, accumulate = unit.groups[group].dtypes, unit.groups[group].dtypes.accumulate
    label = f"reduce {unit.name or '(root)'}"
    with reporting_format_errors(comm, label):
        for stage in reduction_stages(unit, group, source, target):
            op, axis, n, size, out, dtype, wire, _ = stage
            if op == "slice":
                x = local_slice_last(x, comm, axis)
            elif op == "all_gather":
                x = all_gather_last(x, comm, axis, label=label)[..., :out]
            elif op == "reduce_scatter":
                x = reduce_scatter_last(x.to(dtype), comm, axis, dtype=accumulate, label=label)
            elif op == "all_to_all":
                assert axis in residuals or not dtypes.feedback, "gradients with feedback are reduced with residuals"
                padded = torch.nn.functional.pad(x.to(dtype), (0, n * out - size))
                facts, padding = partial(unit.error_facts, group, axis), padding_in_decoded_sum(unit, group, stage, comm.rank)
                added = residuals.get(axis, ResidualAndNoise())
                x = reduce_scatter_encoded(padded, comm, axis, wire, facts, added, padding, label=label)
            elif dtype == accumulate:
                x = all_reduce(x.to(dtype), comm, axis, label=label)
            else:  # only the summands travel in another dtype, so that every strategy gets the same bits
                padded = torch.nn.functional.pad(x.to(dtype), (0, -size % n))
                x = reduce_scatter_last(padded, comm, axis, dtype=accumulate, label=label)
                x = all_gather_last(x, comm, axis, label=label)[..., :size]
    return x.to(accumulate)


def _wrong_place_error(where: str, sharded: Sharded, target: MeshPlacement, remedy: str) -> TreeError:
    facts = [("unit", sharded.unit.display_name), ("from", sharded.place), ("to", target)]
    return TreeError(problem(where, "cannot move a unit between these places.", facts, remedy))
