"""Encoding: turn values into parameters at rest: by a cast, by encoding in the group's format, or by encoded differences.

[Note: differences]
Where optimizer state is sharded over more axes than parameters, updates may travel as differences. All ranks hold the same
parameters ``p``, and the owner of a part has the main copy ``m`` of the part. Each update sends ``encode(m - p)``. Every rank,
the owner too, adds what it decodes to ``p``, in the dtype of ``m``. After the update ``p - m`` is the error of this one
encoding. Errors do not add up, as the next difference is taken from the exact main copy again. A ``p`` that is infinite or NaN
stays so. Source: SDP4Bit, arXiv 2410.15526.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fsharp.functional.comm.protocol import Comm, reporting_format_errors
from fsharp.functional.comm.tree_labels import new_tree_label_prefix
from fsharp.functional.formats.format import Format, LeafPart, first_few
from fsharp.functional.formats.stochastic import make_noise_fn
from fsharp.functional.layout.sharded import Sharded, is_sharded, map_units, merge, units_of
from fsharp.functional.layout.stored import encode_values, is_encoded, part_to_gather, scales_in, starts_and_leaf_parts
from fsharp.functional.layout.unit_layout import UnitLayout, leaf_spans_in_run, padding_in_run
from fsharp.functional.moves import gather


def encode_params_at_rest(tree: Any, comm: Comm) -> Any:
    """Return ``tree`` with values in the form in which parameters rest: in the format of their group, or the compute dtype.

    Units stay in their places, and encoded differences stay unchanged. If nothing has to change, the result is ``tree`` itself.
    All ranks call this function.
    """

    def cast(node: Sharded) -> Sharded:
        rows = [(node.unit.groups[g].dtypes, b) for g, b in zip(node.groups, node.buffers, strict=True)]
        # Main copies beside parameters of the same dtype have memory of their own. Encoded differences are bytes already.
        is_cast = [d.format is None and b.is_floating_point() for d, b in rows]
        pairs = zip(is_cast, rows, strict=True)
        return node.with_buffers([b.to(d.compute, copy=d.update is not None) if cast else b for cast, (d, b) in pairs])

    if all(map(_can_rest_unchanged, units_of(tree))):
        return tree
    tree = map_units(cast, tree)
    if not any(node.unit.has_stored_formats for node in units_of(tree)):
        return tree
    with reporting_format_errors(comm, "the encoding of updated parameters"):
        tree = encode_block_format_groups(tree)
    return encode_leaf_format_groups(tree, comm)


def _can_rest_unchanged(node: Sharded) -> bool:
    """Return whether values of a unit can rest unchanged: no cast, no encoding, and no main copy beside them."""
    unit = node.unit
    for g, x in zip(node.groups, node.raw_buffers, strict=True):
        if x.dtype != unit.groups[g].dtypes.compute or g in unit.groups_with_main_copy or unit.has_stored_formats:
            return False
    return True


def encode_differences(updated: Any, params: Any, *, step: int, rank: int) -> Any:
    """Return the values that an update sends: encoded differences in groups that send differences, else ``updated``.

    ``params`` and ``updated`` are the trained groups before and after the update, in the optimizer's place; ``updated`` in the
    main dtype. ``step`` is the number of the step, for formats that round stochastically. See [Note: differences].
    """

    def encode_node(node: Sharded, before: Sharded) -> Sharded:
        held, buffers = dict(zip(before.groups, before.buffers, strict=True)), []
        for g, value in zip(node.groups, node.buffers, strict=True):
            form, group = node.unit.update_format(g), node.unit.groups[g]
            if form is not None:
                start = node.unit.local_start(g, node.place, rank)
                noise_fn = make_noise_fn("update", step, 0, leaf_spans_in_run(node.unit, g, start, len(value), rank))
                value = form.store(value - held[g].to(value.dtype), group.capacity, partial(node.unit.error_facts, g), noise_fn)
            buffers.append(value)
        return node.with_buffers(buffers)

    return map_units(encode_node, updated, params)


def add_gathered_differences(params: Any, gathered: Any, *, rank: int) -> Any:
    """Return ``gathered`` with new parameters in place of encoded differences: ``params`` plus the decoded differences.

    ``params``: the parameters before the update. Both trees have the buffers in which parameters rest on ``rank``.
    """

    def add_to_node(node: Sharded, before: Sharded) -> Sharded:
        unit, held = node.unit, dict(zip(before.groups, before.buffers, strict=True))
        rows = [(g, x, unit.update_format(g)) for g, x in zip(node.groups, node.buffers, strict=True)]
        return node.with_buffers(
            [x if form is None else add_encoded_difference(unit, g, held[g], x, rank) for g, x, form in rows]
        )

    return map_units(add_to_node, gathered, params)


def add_encoded_difference(
    unit: UnitLayout, group: int, params: torch.Tensor, encoded: torch.Tensor, rank: int
) -> torch.Tensor:
    """Return ``params``, a buffer of ``rank`` at rest, plus the encoded difference of an update. Padding is unchanged."""
    form, main = unit.update_format(group), unit.groups[group].dtypes.main
    assert form is not None
    difference = form.load(encoded, unit.groups[group].capacity, main, partial(unit.error_facts, group))
    for gap in padding_in_run(unit, group, unit.local_start(group, unit.strategy.params, rank), len(params)):
        difference[gap] = 0
    return (params.to(main) + difference).to(params.dtype)


def encode_block_format_groups(tree: Any, encoded_in: Any = None) -> Any:
    """Encode the groups whose format encodes block by block, not whole leaves. All other groups are returned unchanged.

    ``encoded_in``: None, or a tree of the same structure. With a tree, only groups that are encoded there are encoded.
    """

    def encode_groups(node: Sharded, groups: Sequence[int]) -> Sharded:
        rows = zip(node.groups, node.buffers, strict=True)
        return node.with_buffers([encode_values(node.unit, g, b) if g in groups else b for g, b in rows])

    return _map_groups_to_encode(encode_groups, tree, encoded_in, leaf_formats=False)


def encode_leaf_format_groups(tree: Any, comm: Comm, encoded_in: Any = None) -> Any:
    """Encode the groups whose format encodes whole leaves; return all other groups unchanged. All ranks call this function.

    ``encoded_in``: None, or a tree of the same structure. With a tree, only groups that are encoded there are encoded. Values
    are encoded in the optimizer's place, and gathered back to their own place. Cost: this gather, and for each format an
    ``all_reduce`` of the maxima of leaves along each axis that shards optimizer state.
    """
    jobs: dict[tuple[Format, tuple[str, ...]], tuple[str, list[LeafPart], list[str]]] = {}

    def encoded(node: Sharded, groups: Sequence[int]) -> Sharded:
        unit, buffers = node.unit, []
        cut = gather(node.select_groups(groups), comm=comm, to="optim") if groups else node.select_groups(())
        axes = tuple([axis for axis in cut.place.sharded_axes if comm.mesh.axis_size(axis) > 1])
        for g, values in zip(cut.groups, cut.buffers, strict=True):
            dtypes = unit.groups[g].dtypes
            buffer = values.new_zeros(unit.stored_size(g, cut.place), dtype=torch.uint8)
            data, scales = part_to_gather(unit, g, buffer), scales_in(unit, g, buffer)
            parts = starts_and_leaf_parts(unit, g, cut.place, comm.rank, data, scales, values.to(dtypes.main))
            if (key := (dtypes.stored_format, axes)) not in jobs:
                jobs[key] = f"{new_tree_label_prefix(cut, comm)}scales of {dtypes.stored_format.name}", [], []
            jobs[key][1].extend([part for _, part in parts])
            jobs[key][2].append(repr(unit.name))
            buffers.append(buffer)
        return cut.with_buffers(buffers)

    if not any(node.unit.has_leaf_codecs for node in units_of(tree)):
        return tree
    work = _map_groups_to_encode(encoded, tree, encoded_in, leaf_formats=True)
    for (form, axes), (label, parts, units) in jobs.items():
        about = [("units", first_few(units)), ("axes", first_few(axes))]
        with reporting_format_errors(comm, label):
            form.encode_leaves(parts, partial(_max_over_axes_, comm, axes, label), partial(list, about))

    def merge_gathered(node: Any, done: Any) -> Any:
        return merge(node, gather(done, comm=comm, to=node.place)) if is_sharded(node) and done.groups else node

    return map_units(merge_gathered, tree, work)


def _map_groups_to_encode(fn: Any, tree: Any, encoded_in: Any, *, leaf_formats: bool) -> Any:
    """Return a tree with ``fn(node, groups)`` in place of each node. ``groups``: indices of the groups of the node to encode.

    With ``leaf_formats`` these are the groups whose format encodes whole leaves, else those whose format encodes blocks. With
    a tree ``encoded_in``, groups that are not encoded there are left out.
    """

    def map_node(node: Any, other: Any = None) -> Any:
        if not is_sharded(node):
            return node
        groups = []
        for i, g in enumerate(node.groups):
            form = node.unit.groups[g].dtypes.format
            if form is not None and (form.leaf_codec is not None) == leaf_formats:
                groups += [g] * (other is None or is_encoded(node.unit, g, other.raw_buffers[i]))
        return fn(node, groups)

    return map_units(map_node, tree) if encoded_in is None else map_units(map_node, tree, encoded_in)


def _max_over_axes_(comm: Comm, axes: Sequence[str], label: str, numbers: torch.Tensor) -> None:
    for axis in axes:
        numbers.copy_(comm.all_reduce(numbers, axis, op="max", label=label))
