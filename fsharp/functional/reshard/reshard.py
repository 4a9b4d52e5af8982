"""reshard: move a tree of shards, or a whole state, to another layout, without a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import optree
import torch

from fsharp.errors import LayoutError, MeshError, problem
from fsharp.functional.comm.agree import all_gather_fixed_size, check_on_all_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.residuals import zero_residuals
from fsharp.functional.comm.tree_labels import label_new_tree
from fsharp.functional.encoding import encode_block_format_groups, encode_leaf_format_groups
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.formats.host_memory import bytes_of
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.lent_memory import check_not_lent_to_jax
from fsharp.functional.layout.sharded import Sharded, decode_tree, is_sharded, map_units, units_of
from fsharp.functional.layout.stored import is_encoded
from fsharp.functional.layout.text import unit_texts_by_property
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.reshard.move import MeshChange, move_state_tree, pieces_between_ranks
from fsharp.functional.reshard.outline import on_meta, outline_from_bytes, outline_to_bytes
from fsharp.functional.reshard.state_trees import StatePlace, StateTree, checked_state_trees, replace_state_trees
from fsharp.functional.state import TrainState
from fsharp.type_checks import options_checked_on_failure

_LARGEST_ITEMSIZE = 16
"""Bytes of the largest element, a complex128."""


@options_checked_on_failure
def reshard(
    tree: Any,
    layout: Layout,
    *,
    comm: Comm,
    ranks: Sequence[int] | None = None,
    place: StatePlace = "params",
    cast: bool = False,
    donate: bool = False,
    buffer_nbytes: int = 64 << 20,
) -> Any:
    """Move a tree of shards, or a training state, to another layout: other strategy, units, mesh or ranks.

    Call this function between two steps. No checkpoint is written.

    >>> import fsharp as fs
    >>> comm, params = fs.SingleComm(), {"a": torch.ones(2), "b": torch.zeros(3)}
    >>> state = fs.shard(params, fs.plan(params, comm.mesh, fs.zero3("dp")), comm)
    >>> fs.reshard(state, fs.plan(params, comm.mesh, fs.ddp("dp"), units="*"), comm=comm)["b"]
    Sharded('b', dp:Replicate, float32[3] of 3)

    Each rank receives only the elements that the rank needs under the new layout and does not have.

    Args:
        tree: a :class:`~fsharp.TrainState`; a tree of :class:`~fsharp.Sharded`, such as sharded parameters; or a pytree with
            several of these. Tensors outside of Sharded are copied, and leaves that are no tensors are kept. The ranks of
            ``comm`` that pass a tree form the old mesh, ordered by rank. All other ranks pass None, and get such tensors and
            leaves from the first rank with a tree.
        layout: the new layout, the same on all ranks. :func:`~fsharp.plan` makes it for leaves of the same paths, shapes and
            dtypes.
        comm: a Comm with all ranks of the old and the new mesh. Its own mesh may be the old, the new, or any other one.
        ranks: the ranks of ``comm`` that form the new mesh, in rising order. None means the first ranks of ``comm``.
        place: ``"params"`` or ``"optim"``: where trees outside of a TrainState rest afterwards. In a TrainState parameters rest
            as ``"params"``, main copies and optimizer state as ``"optim"``. Its ``residuals``, the encoding errors of earlier
            gradients, become zeros.
        cast: with ``place="params"``, cast trees outside of a TrainState to the ``compute`` dtype of ``layout``. If False,
            buffers keep their dtype, and a layout with another ``compute`` dtype is an error.
        donate: release old buffers unit by unit. ``tree`` cannot be used afterwards, and is lost if an error occurs while data
            move.
        buffer_nbytes: upper bound of the memory for messages, which is in use beside old and new shards. If ``comm`` has ``n``
            ranks, a message has at most ``buffer_nbytes // (2 * n - 1)`` bytes, which has to be at least 16.

    Returns:
        The tree with a :class:`~fsharp.Sharded` for each unit of ``layout``; None on ranks outside of the new mesh. Buffers are
        new tensors; padding is zero.

    Raises:
        TreeError: the tree has no Sharded, or a tree of Sharded has other leaves in it.
        TreeError: a Sharded was donated, is gathered or partial, or has a buffer without one number for each element.
        LayoutError: leaves differ between tree and layout, or an option is out of range.
        LayoutError: parameters get a format that encodes whole leaves, and ``comm`` is not on the mesh of ``layout``.
        MeshError: the ranks do not fit the meshes.
        AgreementError: ranks have different arguments, or another rank failed. This error comes before a shard is sent, or
            after all shards of a tree of parameters were sent, if a rank cannot encode these parameters.

    Cost: the bytes of :func:`reshard_sent_nbytes`, some hundred bytes for each axis to compare arguments, and 8 bytes for each
    unit and tree. Memory: old and new shards, and ``buffer_nbytes``; with ``donate`` an old unit is released once it has moved.
    Time on the host grows with the number of leaves times ranks.
    """
    where = "reshard()"
    has_tree = [flag == b"\1" for flag in all_gather_fixed_size(b"\0" if tree is None else b"\1", comm)]
    rank_of_old = sum(has_tree[: comm.rank])  # the ranks with a tree form the old mesh, in rising order
    given, tree = tree, check_on_all_ranks(where, comm, lambda: decode_tree(_replace_residuals(tree, None), rank_of_old))
    if any(has_tree) and not all(has_tree):
        tree = _share_outline(tree, has_tree, comm)

    def check() -> tuple[list[StateTree], MeshChange]:
        state_trees, where_from = _checked_arguments(
            tree, layout, place, cast, [r for r, has in enumerate(has_tree) if has], ranks, comm
        )
        if buffer_nbytes < (least := _LARGEST_ITEMSIZE * (2 * comm.mesh.size - 1)):
            raise LayoutError(
                f"reshard(): buffer_nbytes is {buffer_nbytes!r}, expected at least {least} for {comm.mesh.size} ranks."
            )
        if donate and given is not None:
            check_not_lent_to_jax(where, units_of(given))
        whole = [unit.name for unit in layout.units if unit.has_leaf_codecs and layout.mesh != comm.mesh]
        if whole and any(state_tree.kind == "params" for state_tree in state_trees):
            raise LayoutError(
                f"reshard(): unit {whole[0]!r} has a format that encodes whole leaves, on whose scales all ranks of the layout "
                f"agree. Pass a Comm on the layout's mesh, {layout.mesh}; to other ranks go by a checkpoint."
            )
        return state_trees, where_from

    def fields(found: tuple[list[StateTree], MeshChange]) -> Mapping[str, str]:
        state_trees, route = found
        layouts = {tuple(node.unit for node in state_tree.nodes): state_tree for state_tree in state_trees}
        old: dict[str, str] = {}
        for units, state_tree in layouts.items():
            old |= {f"{name} of {state_tree}": text for name, text in unit_texts_by_property(units).items()}
        options = {"ranks": str(route.new_ranks), "place": place, "cast": str(cast), "buffer_nbytes": str(buffer_nbytes)}
        lines = [
            f"{state_tree} {node.name or '(root)'}: {node.place}; groups {node.groups}; "
            f"{[dtype_name(buffer.dtype) for buffer in node.raw_buffers]}"
            for state_tree in state_trees
            for node in state_tree.nodes
        ]
        return {**unit_texts_by_property(layout.units), **old, "tree": "\n".join(lines), **options}

    state_trees, route = check_on_all_ranks(where, comm, check, fields)
    with torch.no_grad():
        buffers = [[list(node.buffers) if given is not None else [] for node in state_tree.nodes] for state_tree in state_trees]
        if donate and given is not None:
            state_trees = [replace(state_tree, nodes=tuple(map(on_meta, state_tree.nodes))) for state_tree in state_trees]
            for node in units_of(given):
                node.donate()
        max_nbytes = buffer_nbytes // (2 * comm.mesh.size - 1)
        new = {}
        for state_tree, held in zip(state_trees, buffers, strict=True):
            nodes = move_state_tree(state_tree, held, layout, route, comm, max_nbytes=max_nbytes, donate=donate)
            if state_tree.kind == "params":
                nodes = _in_resting_format(state_tree, nodes, layout, comm)
            new[state_tree.path] = optree.tree_unflatten(layout.structure, nodes)
    for new_tree in new.values():
        label_new_tree(new_tree, comm)
    zeros = zero_residuals(layout.units, comm.device)
    return _replace_residuals(replace_state_trees(tree, new), zeros) if comm.rank in route.new_ranks else None


def _replace_residuals(tree: Any, residuals: Any) -> Any:
    """Return ``tree`` with ``residuals``, the encoding errors of earlier gradients, in each TrainState; None removes them."""

    def set_residuals(node: Any) -> Any:
        return node._replace(residuals=residuals) if isinstance(node, TrainState) else node

    return optree.tree_map(set_residuals, tree, is_leaf=lambda node: is_sharded(node) or isinstance(node, TrainState))


def _in_resting_format(state_tree: StateTree, nodes: list[Sharded], layout: Layout, comm: Comm) -> list[Sharded]:
    """Return ``nodes``, moved parameters as decoded values, in the formats in which ``layout`` stores parameters.

    A group with a format is encoded. A group without a format that had one in the old layout is cast to the compute dtype.
    """

    def cast_if_plain(unit: UnitLayout, group: int, buffer: torch.Tensor) -> torch.Tensor:
        new = unit.groups[group]
        if new.dtypes.format is not None:
            return buffer
        position = state_tree.position_by_path[unit.path_in_tree(unit.leaves_of_group(group)[0])]
        old = state_tree.nodes[position.node].unit.groups[position.leaf.group].dtypes
        return buffer if old.format is None else buffer.to(new.dtypes.compute)

    rows = [(node, zip(node.groups, node.buffers, strict=True)) for node in nodes]
    values = [node.with_buffers([cast_if_plain(node.unit, *row) for row in pairs]) for node, pairs in rows]
    if not any(unit.has_stored_formats for unit in layout.units):
        return values
    encoded = check_on_all_ranks("reshard()", comm, lambda: encode_block_format_groups(values))
    return encode_leaf_format_groups(encoded, comm)  # type: ignore[no-any-return]


@options_checked_on_failure
def reshard_sent_nbytes(
    tree: Any,
    layout: Layout,
    rank: int,
    *,
    old_ranks: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    place: StatePlace = "params",
    cast: bool = False,
) -> int:
    """Compute, without a collective, the exact bytes of elements that one rank sends to other ranks in :func:`reshard`.

    Other bytes, such as those to compare arguments, are not included.

    Args:
        tree: the tree of any rank.
        layout: the new layout.
        rank: the rank of the Comm that sends.
        old_ranks: the ranks of the Comm that form the old mesh, in rising order; None means the first ones.
        ranks: as in :func:`reshard`.
        place: as in :func:`reshard`.
        cast: as in :func:`reshard`.

    Raises:
        TreeError: as in :func:`reshard`.
        LayoutError: as in :func:`reshard`.
    """

    def decode_on_meta(node: Any) -> Any:
        if not (is_sharded(node) and node.is_encoded):
            return node
        unit, rows = node.unit, zip(node.groups, node.raw_buffers, strict=True)
        return node.with_buffers(
            [
                torch.empty(unit.local_size(g, node.place), dtype=unit.groups[g].dtypes.main, device="meta")
                if is_encoded(unit, g, x)
                else x
                for g, x in rows
            ]
        )

    tree = map_units(decode_on_meta, _replace_residuals(tree, None))
    state_trees = checked_state_trees(tree, layout, place, default_cast=cast)
    old_mesh = state_trees[0].nodes[0].unit.mesh
    route = MeshChange(old_mesh, layout.mesh, tuple(old_ranks or range(old_mesh.size)), tuple(ranks or range(layout.mesh.size)))
    others = [target for target in route.new_ranks if target != rank]
    moves = product(state_trees, layout.units, others)
    return sum(piece.nbytes for tree, unit, to in moves for piece in pieces_between_ranks(tree, unit, route, rank, to))


def _checked_arguments(
    tree: Any, layout: Layout, place: StatePlace, cast: bool, old: list[int], ranks: Sequence[int] | None, comm: Comm
) -> tuple[list[StateTree], MeshChange]:
    if not isinstance(layout, Layout):
        raise LayoutError(f"reshard(): layout is {layout!r:.60}, expected a Layout by plan().")
    if place not in ("params", "optim"):
        raise LayoutError(f"reshard(): place is {place!r}, expected 'params' or 'optim'.")
    if cast and place != "params":
        raise LayoutError("reshard(): cast=True is for place='params'; state keeps its dtypes.")
    state_trees = checked_state_trees(tree, layout, place, default_cast=cast)
    meshes = list(dict.fromkeys(node.unit.mesh for state_tree in state_trees for node in state_tree.nodes))
    new = tuple(range(layout.mesh.size)) if ranks is None else tuple(ranks)
    facts = [("ranks that passed a tree", old), ("its mesh", " and ".join(map(str, meshes))), ("comm", comm.mesh)]
    if len(meshes) > 1 or meshes[0].size != len(old):
        remedy = "Ranks of the old mesh pass their tree, all others None."
        raise MeshError(problem("reshard()", "the ranks that passed a tree are not those of its mesh.", facts, remedy))
    if len(new) != layout.mesh.size or list(new) != sorted({*new}) or not {*new} <= {*range(comm.mesh.size)}:
        facts = [("ranks", list(new)), ("new mesh", layout.mesh), ("comm", comm.mesh)]
        remedy = "Pass the ranks of comm that form the new mesh, in rising order."
        raise MeshError(problem("reshard()", "the ranks are not those of the new mesh.", facts, remedy))
    return state_trees, MeshChange(meshes[0], layout.mesh, tuple(old), new)


def _share_outline(tree: Any, has_tree: Sequence[bool], comm: Comm) -> Any:
    """Return ``tree``. A rank without a tree gets the outline of a tree, from the first rank that has a tree.

    ``has_tree``: for each rank, whether the rank has a tree. See :func:`outline_from_bytes`.
    """
    first = has_tree.index(True)
    data = check_on_all_ranks("reshard()", comm, lambda: outline_to_bytes(tree) if comm.rank == first else b"")
    sizes = [int.from_bytes(each, "little") for each in all_gather_fixed_size(len(data).to_bytes(8, "little"), comm)]
    send = [len(data) * (not has) for has in has_tree]
    receive = [size * (not has_tree[comm.rank]) for size in sizes]
    x = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    x = x.to(comm.device).repeat(has_tree.count(False))
    got = comm.all_to_all(x, send, receive, label="the tree for ranks that join").cpu()
    is_new = not has_tree[comm.rank]
    return check_on_all_ranks(
        "reshard()", comm, lambda: outline_from_bytes(bytes(bytes_of(got)), comm.device) if is_new else tree
    )
