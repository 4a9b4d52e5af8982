"""The stages in which a gradient is summed over ranks: one definition, for running and for predicting reductions.

The blocking path (``functional/moves.py``) runs stages by differentiable collectives of a Comm, and a schedule
(``stateful/units/axis_chain.py``) by collectives of a Transport. ``functional/traffic.py`` predicts their calls and bytes.
Residuals and random numbers belong to the stages that encode.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from fsharp.functional.formats.format import Format
from fsharp.functional.layout.placement import MeshPlacement, Replicate, Shard
from fsharp.functional.layout.unit_layout import UnitLayout, padding_in_run


class ReductionStage(NamedTuple):
    """A step of a reduction of one buffer over ranks.

    Attributes:
        op: the collective; or ``"slice"``, which sends nothing: each rank takes its part of a replicated value.
        axis, n: the mesh axis of the collective, and the number of ranks along it.
        size: number of elements of the input.
        out: number of elements of the output.
        dtype: dtype of the input of a collective.
        wire: format of the parts that an ``all_to_all`` sends.
        place: the gradient's place before the stages along this axis.
    """

    op: str
    axis: str
    n: int
    size: int
    out: int
    dtype: torch.dtype
    wire: Format
    place: MeshPlacement


def reduction_stages(
    unit: UnitLayout, group: int, source: MeshPlacement, target: MeshPlacement, *, trivial: bool = False
) -> Iterator[ReductionStage]:
    """Yield the stages that reduce a group's gradient from ``source`` to ``target``; none for a group without elements.

    If parts travel encoded, an ``all_to_all``, whose receivers decode and add, takes the place of a ``reduce_scatter``. For an
    ``all_reduce`` an ``all_gather`` follows.

    ``trivial``: whether collectives run along axes of one rank too. There nothing is cast or encoded.
    """
    dtypes, place, size = unit.groups[group].dtypes, source, unit.local_size(group, source)
    moved = [axis for axis in source.axis_order if size and source[axis] is not target[axis]]
    axes = [axis for axis in moved if trivial or unit.mesh.axis_size(axis) > 1]
    for axis in sorted(axes, key=lambda axis: target[axis] is not Shard):  # an all_reduce of a part sends less
        n, wire, is_cut = unit.mesh.axis_size(axis), dtypes.gradient_format_along(axis), target[axis] is Shard
        dtype = wire.buffer_dtype if wire.is_plain and n > 1 else dtypes.accumulate  # from which a format encodes
        if source[axis] is Replicate:
            steps = [("slice", size // n)]
        elif wire.is_plain or n == 1:
            steps = [("reduce_scatter", size // n) if is_cut else ("all_reduce", size)]
        else:
            steps = [("all_to_all", wire.padded_part_size(size, n)), *([] if is_cut else [("all_gather", size)])]
        for op, out in steps:
            yield ReductionStage(op, axis, n, size, out, dtype, wire, place)
            size = out
        place = MeshPlacement(source.axis_order, tuple([target[a] if a == axis else place[a] for a in source.axis_order]))


def encoded_stages(unit: UnitLayout, group: int) -> list[ReductionStage]:
    """Return the stages that encode a group's gradient, on its whole way from partial sums to the optimizer's place.

    A rank encodes all elements that it holds in ``stage.place``.
    """
    stages = reduction_stages(unit, group, unit.strategy.full.cotangent_place, unit.strategy.optim)
    return [stage for stage in stages if stage.op == "all_to_all"]


@lru_cache(maxsize=1 << 12)
def residual_sizes(unit: UnitLayout) -> Mapping[int, Mapping[str, int]]:
    """Return how many values a rank encodes with feedback: by index of the group, and then by axis.

    Groups and axes without feedback are left out. Axes are in the order of the reduction.
    """
    found = {}
    for g in unit.trainable_groups:
        sizes = {stage.axis: stage.size for stage in encoded_stages(unit, g)}
        if sizes and unit.groups[g].dtypes.feedback:
            found[g] = sizes
    return found


@lru_cache(maxsize=1 << 12)
def has_stochastic_wire(unit: UnitLayout) -> bool:
    """Return whether gradients of some group are rounded stochastically."""
    stages = [stage for g in unit.trainable_groups for stage in encoded_stages(unit, g)]
    return any(stage.wire.seed is not None for stage in stages)


def has_stochastic_updates(unit: UnitLayout) -> bool:
    """Return whether updates of some group are rounded stochastically."""
    forms = [unit.update_format(g) for g in unit.trainable_groups]
    return any(form is not None and form.seed is not None for form in forms)


def padding_in_decoded_sum(unit: UnitLayout, group: int, stage: ReductionStage, rank: int) -> list[slice]:
    """Return the padding in a rank's result of an ``all_to_all``: the sum of the parts that the rank has received."""
    start = unit.local_start(group, stage.place, rank) + unit.mesh.coord(stage.axis, rank) * stage.out
    return padding_in_run(unit, group, start, stage.out)
