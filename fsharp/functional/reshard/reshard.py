"""reshard: a tree of shards, or a whole state, under another layout, without a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch

from fsharp.errors import LayoutError, MeshError, problem
from fsharp.functional.comm.agree import gather_bytes, together
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.tree_names import name_trees
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import Sharded, check_not_lent, decoded, units_of
from fsharp.functional.layout.text import describe_units
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.reshard.move import move_slot
from fsharp.functional.reshard.outline import on_meta, outline_from_bytes, outline_to_bytes
from fsharp.functional.reshard.pieces import Ranks, pieces
from fsharp.functional.reshard.slots import Kind, Slot, check_slot, find_slots, replace_slots
from fsharp.functional.stored import encode_blocks, encode_leaves
from fsharp.type_checks import options_explained

_LARGEST_ITEM = 16
"""Bytes of the largest element, a complex128."""


@options_explained
def reshard(
    tree: Any,
    layout: Layout,
    *,
    comm: Comm,
    ranks: Sequence[int] | None = None,
    place: Kind = "params",
    cast: bool = False,
    donate: bool = False,
    buffer_nbytes: int = 64 << 20,
) -> Any:
    """The same values under another strategy, in other units, or on other ranks, between two steps.

    >>> import fsharp as fs
    >>> comm, params = fs.SingleComm(), {"a": torch.ones(2), "b": torch.zeros(3)}
    >>> state = fs.shard(params, fs.plan(params, comm.mesh, fs.zero3("dp")), comm)
    >>> fs.reshard(state, fs.plan(params, comm.mesh, fs.ddp("dp"), units="*"), comm=comm)["b"]
    Sharded('b', dp:Replicate, float32[3] of 3)

    What a rank holds of a leaf is one run of its elements under any layout; each rank gets those runs of its new ones that it
    does not have, and nothing else.

    Args:
        tree: a :class:`~fsharp.TrainState`, or any pytree of whole trees of :class:`~fsharp.Sharded` and other leaves, which
            are kept. Ranks outside of the old mesh pass None; those that pass a tree are, in rising order, its ranks.
        layout: of the same tree by :func:`~fsharp.plan`, with another strategy, mesh or units. All ranks pass it.
        comm: all ranks of the old and of the new mesh; it may be on either of these meshes, or on another one.
        ranks: ranks of ``comm`` by rank in the new mesh, rising; None means the first ones.
        place: where nodes outside of a TrainState go: ``"params"`` or ``"optim"``. In a TrainState parameters go to the
            first, main copies and optimizer state to the second.
        cast: give trees that go to ``"params"`` the compute dtype of ``layout``; not those in a TrainState. Without it
            buffers keep their dtype, and a layout with another compute dtype is refused.
        donate: let go of old buffers unit by unit; ``tree`` is refused afterwards, and lost if an error comes while data move.
        buffer_nbytes: the most memory beside old and new shards that is in use at once, in bytes. A rank sends each other one
            at most ``buffer_nbytes // (2 * n - 1)`` bytes at a time, ``n`` being the number of ranks of ``comm``.

    Returns:
        The tree with a :class:`~fsharp.Sharded` for each unit of ``layout``; None on ranks outside of the new mesh. Padding is
        zero. Buffers are new.

    Raises:
        TreeError: not whole trees of Sharded, partial or gathered units, a buffer that has not one number for each element.
        LayoutError: leaves that the layout does not have, or has with another shape, dtype, tie, label or axis along which it
            varies; all are named. Options out of range.
        MeshError: ranks that do not fit the meshes.
        AgreementError: on all ranks, before any buffer is sent, if one failed or they differ.

    Cost: the bytes of :func:`reshard_nbytes`, besides some hundred bytes for each axis to agree, and 8 for each unit and tree
    of shards. Memory: old and new shards, with ``donate`` those of old units that are not over and new ones that have begun,
    and ``buffer_nbytes``. Time on the host grows with the number of leaves times ranks.
    """
    where = "reshard()"
    has_tree = [flag == b"\1" for flag in gather_bytes(b"\0" if tree is None else b"\1", comm)]
    given, tree = tree, together(where, comm, lambda: decoded(tree, comm.rank))
    if any(has_tree) and not all(has_tree):
        tree = _hand_out(tree, has_tree, comm)

    def check() -> tuple[list[Slot], Ranks]:
        slots, where_from = _check_all(tree, layout, place, cast, [r for r, has in enumerate(has_tree) if has], ranks, comm)
        if buffer_nbytes < (least := _LARGEST_ITEM * (2 * comm.mesh.size - 1)):
            raise LayoutError(
                f"reshard(): buffer_nbytes is {buffer_nbytes!r}, expected at least {least} for {comm.mesh.size} ranks."
            )
        if donate and given is not None:
            check_not_lent(where, units_of(given))
        whole = [unit.name for unit in layout.units if unit.has_leaf_formats and layout.mesh != comm.mesh]
        if whole and any(slot.kind == "params" for slot in slots):
            raise LayoutError(
                f"reshard(): unit {whole[0]!r} has a format that encodes whole leaves, on whose scales all ranks of the layout "
                f"agree. Pass a Comm on the layout's mesh, {layout.mesh}; to other ranks go by a checkpoint."
            )
        return slots, where_from

    def fields(found: tuple[list[Slot], Ranks]) -> Mapping[str, str]:
        slots, route = found
        layouts = {tuple(node.unit for node in slot.nodes): slot for slot in slots}
        old = {f"{name} of {slot}": text for units, slot in layouts.items() for name, text in describe_units(units).items()}
        options = {"ranks": str(route.new), "place": place, "cast": str(cast), "buffer_nbytes": str(buffer_nbytes)}
        return {**describe_units(layout.units), **old, "tree": "\n".join(map(_about, slots)), **options}

    slots, route = together(where, comm, check, fields)
    with torch.no_grad():
        buffers = [[list(node.buffers) if given is not None else [] for node in slot.nodes] for slot in slots]
        if donate and given is not None:
            slots = [replace(slot, nodes=tuple(map(on_meta, slot.nodes))) for slot in slots]
            for node in units_of(given):
                node.drop()
        limit = buffer_nbytes // (2 * comm.mesh.size - 1)
        new = {}
        for slot, held in zip(slots, buffers, strict=True):
            nodes = move_slot(slot, held, layout, route, comm, limit=limit, donate=donate)
            if slot.kind == "params":
                nodes = _resting(slot, nodes, layout, comm)
            new[slot.path] = optree.tree_unflatten(layout.spec, nodes)
    for tree_of_slot in new.values():
        name_trees(tree_of_slot, comm)
    return replace_slots(tree, new) if comm.rank in route.new else None


def _resting(slot: Slot, nodes: list[Sharded], layout: Layout, comm: Comm) -> list[Sharded]:
    """Parameters as they rest in their layout: in a format, or in the compute dtype if they have been in a format before."""

    def one(unit: UnitLayout, group: int, buffer: torch.Tensor) -> torch.Tensor:
        new = unit.groups[group]
        if new.dtypes.format is not None:
            return buffer
        held = slot.held[unit.full_path(unit.leaves_of(group)[0])]
        old = slot.nodes[held.node].unit.groups[held.leaf.group].dtypes
        return buffer if old.format is None else buffer.to(new.dtypes.compute)

    rows = [(node, zip(node.groups, node.buffers, strict=True)) for node in nodes]
    values = [node.with_buffers([one(node.unit, *row) for row in pairs]) for node, pairs in rows]
    if not any(unit.has_formats for unit in layout.units):
        return values
    encoded = together("reshard()", comm, lambda: encode_blocks(values))
    return encode_leaves(encoded, comm)  # type: ignore[no-any-return]


@options_explained
def reshard_nbytes(
    tree: Any,
    layout: Layout,
    rank: int,
    *,
    old_ranks: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    place: Kind = "params",
    cast: bool = False,
) -> int:
    """Bytes of shards that one rank sends to others in :func:`reshard`, exactly. Pure.

    Args:
        tree: that of any rank.
        layout: the new one.
        rank: whose bytes, a rank of the Comm.
        old_ranks: ranks of the Comm by rank in the old mesh; None means the first ones.
        ranks: as in :func:`reshard`.
        place: as in :func:`reshard`.
        cast: as in :func:`reshard`.

    Raises:
        TreeError: as :func:`reshard`.
        LayoutError: as :func:`reshard`.
    """
    slots = find_slots(tree, place, cast=cast)
    for slot in slots:
        check_slot(slot, layout)
    old_mesh = slots[0].nodes[0].unit.mesh
    route = Ranks(old_mesh, layout.mesh, tuple(old_ranks or range(old_mesh.size)), tuple(ranks or range(layout.mesh.size)))
    if rank not in route.old:
        return 0
    return sum(
        piece.nbytes
        for slot in slots
        for unit in layout.units
        for target, to in enumerate(route.new)
        if to != rank
        for piece in pieces(slot, unit, route, route.old.index(rank), target)
    )


def _check_all(
    tree: Any, layout: Layout, place: Kind, cast: bool, old: list[int], ranks: Sequence[int] | None, comm: Comm
) -> tuple[list[Slot], Ranks]:
    if not isinstance(layout, Layout):
        raise LayoutError(f"reshard(): layout is {layout!r:.60}, expected a Layout by plan().")
    if place not in ("params", "optim"):
        raise LayoutError(f"reshard(): place is {place!r}, expected 'params' or 'optim'.")
    if cast and place != "params":
        raise LayoutError("reshard(): cast=True is for place='params'; state keeps its dtypes.")
    slots = find_slots(tree, place, cast=cast)
    for slot in slots:
        check_slot(slot, layout)
    meshes = list(dict.fromkeys(node.unit.mesh for slot in slots for node in slot.nodes))
    new = tuple(range(layout.mesh.size)) if ranks is None else tuple(ranks)
    facts = [("ranks that passed a tree", old), ("its mesh", " and ".join(map(str, meshes))), ("comm", comm.mesh)]
    if len(meshes) > 1 or meshes[0].size != len(old):
        remedy = "Ranks of the old mesh pass their tree, all others None."
        raise MeshError(problem("reshard()", "the ranks that passed a tree are not those of its mesh.", facts, remedy))
    if len(new) != layout.mesh.size or list(new) != sorted({*new}) or not {*new} <= {*range(comm.mesh.size)}:
        facts = [("ranks", list(new)), ("new mesh", layout.mesh), ("comm", comm.mesh)]
        remedy = "Pass the ranks of comm that form the new mesh, in rising order."
        raise MeshError(problem("reshard()", "the ranks are not those of the new mesh.", facts, remedy))
    return slots, Ranks(meshes[0], layout.mesh, tuple(old), new)


def _about(slot: Slot) -> str:
    """What ranks compare of a slot besides its units."""
    return "\n".join(
        f"{slot} {node.name or '(root)'}: {node.place}; groups {node.groups}; {list(map(dtype_name, dtypes))}"
        for node in slot.nodes
        for dtypes in [[buffer.dtype for buffer in node.raw_buffers]]
    )


def _hand_out(tree: Any, has_tree: Sequence[bool], comm: Comm) -> Any:
    """On ranks without a tree that of the first rank that has one, its buffers on the meta device."""
    first = has_tree.index(True)
    data = together("reshard()", comm, lambda: outline_to_bytes(tree) if comm.rank == first else b"")
    sizes = [int.from_bytes(each, "little") for each in gather_bytes(len(data).to_bytes(8, "little"), comm)]
    send = [len(data) * (not has) for has in has_tree]
    receive = [size * (not has_tree[comm.rank]) for size in sizes]
    x = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    x = x.to(comm.device).repeat(has_tree.count(False))
    got = comm.all_to_all(x, send, receive, label="the tree for ranks that join")
    is_new = not has_tree[comm.rank]
    found = together("reshard()", comm, lambda: outline_from_bytes(bytes(got.cpu().numpy()), comm.device) if is_new else None)
    return found if is_new else tree
