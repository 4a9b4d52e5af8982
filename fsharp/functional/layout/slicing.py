"""Slicing: cut a tree into the shards of ranks, and put shards together again, without a collective."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import optree
import torch

from fsharp.errors import OptionError, TreeError, problem
from fsharp.functional.formats.format import as_bytes, tensor_text
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.plan import find_tie_owners
from fsharp.functional.layout.sharded import (
    PlaceName,
    Sharded,
    check_not_donated,
    flatten_node,
    is_sharded,
    map_units,
    resolve_place,
    units_of,
)
from fsharp.functional.layout.stored import encode_values, is_encoded, part_to_gather, scales_in
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.functional.tree.paths import flatten_with_paths
from fsharp.functional.tree.units import cut_into_units
from fsharp.type_checks import options_checked, short_repr

ShardDtype = Literal["main", "compute"]
"""A field of Precision: ``"main"``, the dtype of the optimizer, or ``"compute"``, the dtype or format of parameters at rest."""


@options_checked
def shard_for(params: Any, layout: Layout, rank: int, *, place: PlaceName | None = None, dtype: ShardDtype = "main") -> Any:
    """Return the shards of ``rank``, sliced out of a whole tree. No collective.

    >>> import fsharp as fs
    >>> tree = {"w": torch.arange(6.).view(2, 3), "b": torch.ones(1)}
    >>> layout = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"))
    >>> parts = [fs.shard_for(tree, layout, rank) for rank in range(2)]
    >>> parts[1]
    Sharded('', dp:Shard, float32[4] of 8)
    >>> fs.unshard(parts)["w"]
    tensor([[0., 1., 2.],
            [3., 4., 5.]])

    Args:
        params: a tree of tensors with the paths, shapes, dtypes and ties of the tree that was planned.
        layout: the layout of the tree.
        rank: the rank whose shards to return.
        place: where shards rest: ``"params"``, ``"grads"``, ``"optim"``, ``"full"``, or a
            :class:`~fsharp.layouts.MeshPlacement` of the strategy. None means ``"optim"`` for main copies, and otherwise
            ``"params"``.
        dtype: ``"main"`` returns what :func:`~fsharp.init_state` needs: values in the ``main`` dtype of ``Precision``, not
            encoded. These are main copies in units for which the optimizer keeps main copies. ``"compute"`` returns parameters
            as functions use them: in the ``compute`` dtype, or encoded in the ``stored`` format.

    Returns:
        The tree with a :class:`Sharded` in place of each unit. Buffers are new tensors; padding is zero.

    Raises:
        TreeError: the tree differs from the tree that was planned; the message lists the differences.
        TreeError: a unit has a format that encodes whole leaves, and ``dtype`` is ``"compute"``.
    """
    check_tree(params, layout)
    sections = cut_into_units(params, frozenset(unit.name for unit in layout.units))
    nodes = []
    for unit, subtree in zip(layout.units, sections.subtrees, strict=True):
        tensors = dict(zip(unit.leaves, optree.tree_leaves(subtree), strict=True))
        nodes.append(build_shard(unit, place, rank, tensors.__getitem__, dtype=dtype))
    return optree.tree_unflatten(layout.structure, nodes)


def build_shard(
    unit: UnitLayout,
    place: PlaceName | None,
    rank: int,
    leaf_value: Callable[[Leaf], torch.Tensor],
    *,
    dtype: ShardDtype,
) -> Sharded:
    """Return the shard of a unit for one rank. Reads one leaf at a time, and only leaves of which the rank holds a part.

    If the rank holds nothing of a group, one leaf is read for its device. ``leaf_value``: function from a leaf to its whole
    tensor. ``place``: None means ``"optim"`` for main copies, and otherwise ``"params"``. ``dtype``: the field of Precision
    with the dtype of the shard. Raises TreeError if leaves are on several devices, or if a format encodes whole leaves and
    ``dtype`` is ``"compute"``.
    """
    are_main_copies = dtype == "main" and any(group.dtypes.has_main_copy for group in unit.groups)
    where = resolve_place(unit, place or ("optim" if are_main_copies else "params"))
    if unit.has_leaf_codecs and dtype == "compute":
        raise TreeError(
            f"shard(): unit {unit.display_name} has a format that encodes whole leaves, on whose scales ranks agree. Leave "
            "out dtype='compute', and make a state with init_state(), which encodes the parameters."
        )
    buffers = []
    for i, group in enumerate(unit.groups):
        use_main = dtype == "main" or group.dtypes.format is not None
        buffer_dtype = group.dtypes.main if use_main else group.dtypes.compute
        buffer: torch.Tensor | None = None
        for span in unit.leaf_spans(i, where, rank):
            value = leaf_value(span.leaf)
            if buffer is None:
                buffer = torch.zeros(unit.local_size(i, where), dtype=buffer_dtype, device=value.device)
            if value.device != buffer.device:
                raise TreeError(
                    f"shard(): {unit.path_in_tree(span.leaf)!r} is on {value.device}, other leaves of unit {unit.display_name} "
                    f"on {buffer.device}: move them to one device."
                )
            buffer[span.start : span.stop] = value.detach().reshape(-1)[span.first : span.last]
            del value  # before the next one is made
        if buffer is None:
            some = next((leaf_value(leaf) for leaf in unit.leaves_of_group(i)), torch.empty(0))
            buffer = torch.zeros(unit.local_size(i, where), dtype=buffer_dtype, device=some.device)
        buffers.append(buffer if dtype == "main" else encode_values(unit, i, buffer))
    return Sharded(buffers, unit, where, is_main_copy=are_main_copies)


@options_checked
def unshard(shards: Any, *, rank: int = 0) -> Any:
    """Return the whole tree, put together from the shards of all ranks: the inverse of :func:`shard_for`. No collective.

    If each rank has its own shards, as from :func:`~fsharp.shard`, ``fs.full_tree(tree, comm=comm)`` gathers the tree.

    Args:
        shards: a sequence of the trees of :class:`Sharded` of all ranks, in order of rank.
        rank: the rank whose tree to return, if units vary along an axis; otherwise all ranks have the same tree.

    Raises:
        OptionError: ``shards`` is not a sequence.
        TreeError: there is not one tree for each rank, trees have different layouts, or a unit is a partial sum or was donated.
    """
    if not isinstance(shards, Sequence) or isinstance(shards, str):
        raise OptionError(
            f"unshard(): shards is {short_repr(shards)}, expected a sequence with the shards of all ranks. To gather a tree of "
            "which each rank has its own shards call fs.full_tree(tree, comm=comm)."
        )
    trees = list(shards)
    if not trees:
        raise TreeError("unshard(): no trees; pass one for each rank.")
    per_rank = [units_of(tree) for tree in trees]
    for r, nodes in enumerate(per_rank):
        check_not_donated("unshard()", nodes)
        if [flatten_node(node)[1] for node in nodes] != [flatten_node(node)[1] for node in per_rank[0]]:
            raise TreeError(
                f"unshard(): the tree of rank {r} has another layout or place than the tree of rank 0. Pass what "
                "shard_for() returned for all ranks, with one layout and one place."
            )
    whole = []
    for parts in zip(*per_rank, strict=True):
        unit, place, mesh = parts[0].unit, parts[0].place, parts[0].unit.mesh
        if len(trees) != mesh.size:
            raise TreeError(f"unshard(): {len(trees)} trees, expected one for each of the {mesh.size} ranks of {mesh}.")
        if place.partial_axes:
            raise TreeError(f"unshard(): unit {unit.display_name} rests partial ({place}): sum it by reduce_scatter() first.")
        own = mesh.index_along(place.varying_axes, rank)
        alike = [r for r in range(mesh.size) if mesh.index_along(place.varying_axes, r) == own]
        holders = {mesh.index_along(place.sharded_axes, r): parts[r] for r in reversed(alike)}
        in_order = [holders[key].buffers for key in sorted(holders)]
        joined = [_join(unit, group, column) for group, *column in zip(parts[0].groups, *in_order, strict=True)]
        whole.append(Sharded(joined, unit, unit.strategy.full, parts[0].groups))
    position = iter(whole)
    gathered = map_units(lambda node: next(position) if is_sharded(node) else node, trees[0])
    return as_user_tree(gathered)


def _join(unit: UnitLayout, group: int, buffers: list[torch.Tensor]) -> torch.Tensor:
    """Return the full buffer of a group, joined from ``buffers``, those of the ranks in order.

    Encoded buffers may end with scales of whole leaves, equal on all ranks. Then the full buffer ends with these scales once.
    """
    if not unit.scales_nbytes[group] or not is_encoded(unit, group, buffers[0]):
        return torch.cat(buffers, dim=-1)
    return torch.cat([*(part_to_gather(unit, group, b) for b in buffers), scales_in(unit, group, buffers[0])])


def as_user_tree(full: Any) -> Any:
    """Return the user's tree of whole tensors, from a tree of :class:`Sharded` that are gathered in full.

    A leaf that is tied to a leaf of another unit becomes the same tensor.
    """
    nodes = units_of(full)
    return map_units(lambda node: node.tree(ties=nodes) if is_sharded(node) else node, full)


def check_tree(params: Any, layout: Layout) -> None:
    """Raise a TreeError, which names up to eight differences, if a tree is not the tree for which ``layout`` was planned.

    Paths, shapes, dtypes, ties and containers are compared. Raises a TreeError also for leaves on several devices.
    """
    if isinstance(params, torch.nn.Module):
        remedy = "Pass the parameters that fs.make_functional(module) returns, or call fs.shard_module(module)."
        raise TreeError(f"shard(): got a module, {type(params).__name__}, expected a tree of tensors. {remedy}")
    paths, leaves, _ = flatten_with_paths(params)
    planned = {unit.path_in_tree(leaf): leaf for unit in layout.units for leaf in unit.leaves}
    rows = [(repr(path), "missing from the tree") for path in planned.keys() - set(paths)]
    for path, leaf in zip(paths, leaves):
        want = planned.get(path)
        if want is None:
            rows.append((repr(path), "not in the layout"))
        elif not isinstance(leaf, torch.Tensor):
            rows.append((repr(path), f"got {type(leaf).__name__}, expected a tensor"))
        elif (tuple(leaf.shape), leaf.dtype) != (want.shape, want.dtype):
            rows.append((repr(path), f"got {tensor_text(leaf)}, expected {tensor_text(want)}"))
    if not rows:
        rows = list(_tie_problems(paths, leaves, layout))
        devices = {str(leaf.device): path for path, leaf in zip(paths, leaves)}
        if len(devices) > 1:
            rows += [(repr(path), f"on {device}, expected all leaves on one device") for device, path in devices.items()]
    if rows:
        more = f"and {len(rows) - 8} more. " if len(rows) > 8 else ""
        what, remedy = "the tree is not the one that was planned.", f"{more}Call plan() with this tree."
        raise TreeError(problem("shard()", what, sorted(rows)[:8], remedy))
    structure = optree.tree_unflatten(
        layout.structure, [optree.tree_unflatten(u.structure, [0] * len(u.leaves)) for u in layout.units]
    )
    if optree.tree_structure(structure) != optree.tree_structure(params):
        raise TreeError(
            f"shard(): the tree has other containers than the planned tree: got {optree.tree_structure(params)}, expected "
            f"{optree.tree_structure(structure)}."
        )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_meta or b.is_meta:
        return a.is_meta and b.is_meta
    return torch.equal(as_bytes(a.detach()).cpu(), as_bytes(b.detach()).cpu())


def _tie_problems(paths: Sequence[str], leaves: Sequence[torch.Tensor], layout: Layout) -> Iterator[tuple[str, str]]:
    by_path = dict(zip(paths, leaves))
    found = find_tie_owners(paths, leaves)
    for unit in layout.units:
        for leaf in unit.leaves:
            path = unit.path_in_tree(leaf)
            owner = unit.path_of_tie_owner(leaf) if leaf.tied_to else None
            if owner is None and path in found and by_path[path].numel():
                yield repr(path), f"tied to {found[path]!r}, but laid out on its own"
            elif owner and found.get(path) != owner and not _same_bits(by_path[path], by_path[owner]):
                yield repr(path), f"laid out as tied to {owner!r}, but has values of its own"


def boxes_covering_run(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of boxes that tile elements ``[first, last)`` of a flattened tensor, in order.

    >>> list(boxes_covering_run((4, 3), 2, 10))
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while first < last:
        start, within = divmod(first, row)
        if within == 0 and last - first >= row:  # whole rows
            stop = last // row
            yield (start, *(0 for _ in shape[1:])), (stop - start, *shape[1:])
            first = stop * row
        else:
            end = min(row, last - start * row)
            for offsets, sizes in boxes_covering_run(shape[1:], within, end):
                yield (start, *offsets), (1, *sizes)
            first = start * row + end
