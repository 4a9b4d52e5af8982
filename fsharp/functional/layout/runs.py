"""The stages of a reduction; and runs of elements in a buffer: leaves, padding, and what a rank encodes of a gradient."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from fsharp.functional.layout.placement import Place, Replicate, Shard
from fsharp.functional.layout.unit_layout import UnitLayout


class ReductionStage(NamedTuple):
    """A step of a reduction along an axis of ``n`` ranks.

    Attributes:
        op: the collective; or ``"slice"``, which sends nothing: each rank takes its part of a replicated value.
        size: number of elements of the input.
        out: number of elements of the output.
        dtype: dtype of the input of a collective.
    """

    op: str
    axis: str
    n: int
    size: int
    out: int
    dtype: torch.dtype


def reduction_stages(
    unit: UnitLayout, group: int, source: Place, target: Place, *, trivial: bool = False
) -> Iterator[ReductionStage]:
    """Yield the stages that reduce a group's gradient from ``source`` to ``target``; none for a group without elements.

    Data travel in the wire's format; results have the accumulation dtype. If parts travel encoded, an ``all_to_all`` takes the
    place of a ``reduce_scatter``: each rank decodes and adds the parts that it receives. An ``all_to_all`` and an
    ``all_gather`` of the sums take the place of an ``all_reduce``.

    ``trivial``: whether collectives run along axes of one rank too. There nothing is cast or encoded.
    """
    dtypes, size = unit.groups[group].dtypes, unit.local_size(group, source)
    moved = [axis for axis in source.order if size and source[axis] is not target[axis]]
    axes = [axis for axis in moved if trivial or unit.mesh.axis_size(axis) > 1]
    for axis in sorted(axes, key=lambda axis: target[axis] is not Shard):  # an all_reduce of a part sends less
        n, wire, is_cut = unit.mesh.axis_size(axis), dtypes.wire_format_along(axis), target[axis] is Shard
        if source[axis] is Replicate:
            steps = [("slice", size // n)]
        elif wire.is_plain or n == 1:
            steps = [("reduce_scatter", size // n) if is_cut else ("all_reduce", size)]
        else:
            steps = [("all_to_all", wire.padded_part_size(size, n)), *([] if is_cut else [("all_gather", size)])]
        for op, out in steps:
            yield ReductionStage(
                op, axis, n, size, out, dtypes.reduction_input_dtype_along(axis) if n > 1 else dtypes.accumulate
            )
            size = out


class EncodedRun(NamedTuple):
    """Elements ``[start, start + size)`` of a group's buffer, whose gradient a rank encodes for a collective along ``axis``.

    ``number``: number of earlier encodings of this gradient in the same reduction, along other axes.
    """

    axis: str
    number: int
    start: int
    size: int


def encoded_runs(unit: UnitLayout, group: int, rank: int, places: tuple[Place, Place] | None = None) -> Iterator[EncodedRun]:
    """Yield the run of a group's gradient that a rank encodes, for each axis with a format, in order of the reductions.

    ``places``: the gradient's places before and after the reduction. By default these are the place of gradients that are not
    summed over any axis yet, and the optimizer's place.
    """
    source, target = places or (unit.strategy.full.dual, unit.strategy.optim)
    start, number = unit.local_start(group, source, rank), 0
    for stage in reduction_stages(unit, group, source, target):
        if stage.op == "all_to_all":
            yield EncodedRun(stage.axis, number, start, stage.size)
            number += 1
        if target[stage.axis] is Shard:
            start += unit.mesh.coord(stage.axis, rank) * stage.out


@lru_cache(maxsize=1 << 12)
def residual_sizes(unit: UnitLayout) -> Mapping[int, Mapping[str, int]]:
    """Return how many values a rank encodes with feedback: by index of the group, and then by axis.

    Groups and axes without feedback are left out. Axes are in the order of the reduction.
    """
    found = {}
    for g in unit.trainable_groups:
        sizes = {run.axis: run.size for run in encoded_runs(unit, g, 0)}
        if sizes and unit.groups[g].dtypes.feedback:
            found[g] = sizes
    return found


@lru_cache(maxsize=1 << 12)
def has_stochastic_wire(unit: UnitLayout) -> bool:
    """Return whether gradients of some group are rounded stochastically."""
    rows = [(unit.groups[g].dtypes, run.axis) for g in unit.trainable_groups for run in encoded_runs(unit, g, 0)]
    return any(dtypes.wire_format_along(axis).seed is not None for dtypes, axis in rows)


def has_stochastic_updates(unit: UnitLayout) -> bool:
    """Return whether updates of some group are rounded stochastically."""
    forms = [unit.update_format(g) for g in unit.trainable_groups]
    return any(form is not None and form.seed is not None for form in forms)


def padding_in_decoded_sums(unit: UnitLayout, group: int, axis: str, rank: int, places: tuple[Place, Place]) -> list[slice]:
    """Return the padding in a rank's result of the op decode_sum, which decodes and adds the parts exchanged along ``axis``.

    ``places``: where the gradient is before the reduction, and afterwards.
    """
    _, _, start, size = next(run for run in encoded_runs(unit, group, rank, places) if run.axis == axis)
    part = unit.groups[group].dtypes.wire_format_along(axis).padded_part_size(size, unit.mesh.axis_size(axis))
    return padding_in_run(unit, group, start + unit.mesh.coord(axis, rank) * part, part)


def padding_in_run(unit: UnitLayout, group: int, start: int, size: int) -> list[slice]:
    """Return the padding in a run of a group's buffer, as slices of the run.

    Callers set decoded padding to zero, as norms count it: a format that mixes the values of a block, such as
    :func:`~fsharp.formats.hadamard`, decodes zeros of padding as other numbers.
    """
    found, end = [], 0
    for leaf in unit.leaves_of_group(group):
        begin = min(leaf.offset - start, size)
        if begin > end:
            found.append(slice(end, begin))
        end = max(end, leaf.offset + leaf.numel - start)
    return [*found, slice(end, size)] if end < size else found


def leaves_in_run(unit: UnitLayout, group: int, start: int, size: int, rank: int) -> Iterator[tuple[int, int, str, int]]:
    """Yield, for each leaf in a run of a group's buffer: begin and end in the run, path, and index of its first element.

    If the unit varies along axes, a checkpoint holds the leaves of all ranks one after another, as one tensor. The index is
    then the index in that tensor.
    """
    before = unit.mesh.index_along(unit.varying_axes, rank)
    for leaf in unit.leaves_of_group(group):
        low, high = max(start, leaf.offset), min(start + size, leaf.offset + leaf.numel)
        if low < high:
            yield low - start, high - start, unit.path_in_tree(leaf), before * leaf.numel + low - leaf.offset
