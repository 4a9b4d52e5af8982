"""Runs of elements in a group's buffer: their leaves, their padding, and the runs of a gradient that a rank encodes."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from fsharp.functional.layout.placement import Partial, Place, Shard
from fsharp.functional.layout.unit_layout import UnitLayout


class EncodedRun(NamedTuple):
    """Elements ``[start, start + size)`` of a gradient that a rank encodes along an axis, after ``number`` other encodings."""

    axis: str
    number: int
    start: int
    size: int


def encoded_runs(unit: UnitLayout, group: int, rank: int, places: tuple[Place, Place] | None = None) -> Iterator[EncodedRun]:
    """Yield the run of a group's gradient that a rank encodes, for each axis with a format, in order of the reductions.

    ``places``: where the gradient is before the reduction, and afterwards. None: ranks' summands, and the optimizer's place.
    """
    (source, target), number = places or (unit.strategy.full.dual, unit.strategy.optim), 0
    dtypes = unit.groups[group].dtypes
    start, size = unit.local_start(group, source, rank), unit.local_size(group, source)
    axes = [axis for axis in source.order if source[axis] is not Shard and unit.mesh.axis_size(axis) > 1]
    for axis in sorted(axes, key=lambda axis: target[axis] is not Shard):  # as reduce_partial_sums() has them
        if source[axis] is Partial and size and not dtypes.wire_format_along(axis).is_plain:
            yield EncodedRun(axis, number, start, size)
            number += 1
        if target[axis] is Shard:
            size //= unit.mesh.axis_size(axis)
            start += unit.mesh.coord(axis, rank) * size


@lru_cache(maxsize=1 << 12)
def residual_sizes(unit: UnitLayout) -> Mapping[int, Mapping[str, int]]:
    """Return the number of values that a rank encodes with feedback, by group with feedback and axis in reduction order."""
    found = {}
    for g in unit.trainable_groups:
        runs = encoded_runs(unit, g, 0)
        if sizes := {run.axis: run.size for run in runs if unit.groups[g].dtypes.has_feedback(run.axis)}:
            found[g] = sizes
    return found


@lru_cache(maxsize=1 << 12)
def has_stochastic_wire(unit: UnitLayout) -> bool:
    """Return whether gradients of some group are rounded stochastically."""
    rows = [(unit.groups[g].dtypes, run.axis) for g in unit.trainable_groups for run in encoded_runs(unit, g, 0)]
    return any(dtypes.wire_format_along(axis).seed is not None for dtypes, axis in rows)


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
