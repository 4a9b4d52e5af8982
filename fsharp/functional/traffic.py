"""The collectives of a step and their bytes, computed from a layout before anything runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch

from fsharp.functional.comm.protocol import Call, sent_nbytes
from fsharp.functional.formats.format import Format, plain_format
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.placement import Partial, Place, Replicate, Shard
from fsharp.functional.layout.precision import Dtypes
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.type_checks import options_checked


@options_checked
def step_traffic(
    layout: Layout,
    *,
    microbatches: int = 1,
    release: bool = True,
    uses: Mapping[str, int] = MappingProxyType({}),
) -> Counter[Call]:
    """Predict the collectives of one :func:`~fsharp.train_step` on one rank: each call, the bytes that it sends, and how often.

    A run makes exactly these calls, unless the optimizer has its own collectives.

    Args:
        layout: layout of the parameters.
        microbatches: number of microbatches of the step.
        release: argument ``release`` of :func:`~fsharp.forward`.
        uses: by name of a unit, how many calls of :func:`~fsharp.forward` in a microbatch use the unit, as their unit or as one
            of ``ties``. Units that are not named have one such call.

    Returns:
        A Counter of :class:`~fsharp.collectives.Call`.
    """
    calls: Counter[Call] = Counter()
    for unit in layout.units:
        strategy = unit.strategy
        is_gathered = any(unit.mesh.axis_size(axis) > 1 for axis in strategy.params.sharded_axes)
        gathers = 2 if release and is_gathered else 1
        times = microbatches * uses.get(unit.name, 1)
        for group in unit.all_groups:
            gathered = gather_calls(unit, group, strategy.params, strategy.full)
            calls.update({call: count * gathers * times for call, count in gathered.items()})
        for group in unit.trainable_groups:
            landed = reduce_calls(unit, group, strategy.full.dual, strategy.grads)
            calls.update({call: count * microbatches for call, count in landed.items()})
            calls.update(reduce_calls(unit, group, strategy.grads, strategy.optim))
            axes = [axis for axis in unit.update_axes if unit.mesh.axis_size(axis) > 1]
            calls.update(calls_to_gather_buffer(unit, unit.update_nbytes(group), axes))
    calls.update(_scale_agreement_calls(layout))
    for axis, n in layout.mesh.axes:  # the loss and its weight, two float64
        if n > 1:
            calls[Call("all_reduce", axis, sent_nbytes("all_reduce", -(-2 // n) * 8, n))] += 1
    return calls


def _scale_agreement_calls(layout: Layout) -> Iterator[Call]:
    """Yield the collectives in which an update agrees on scales of whole leaves."""
    numbers: Counter[tuple[str, tuple[str, ...], int, torch.dtype]] = Counter()
    for unit in layout.units:
        axes = tuple([axis for axis in unit.strategy.optim.sharded_axes if unit.mesh.axis_size(axis) > 1])
        for group in unit.trainable_groups if unit.has_leaf_formats else ():
            form = unit.groups[group].dtypes.stored_format
            if (codec := form.leaves) is not None:
                for leaf in unit.leaves_of_group(group):
                    for i, (count, dtype) in enumerate(codec.agreed(leaf.shape)):
                        numbers[form.name, axes, i, dtype] += count
    for (_, axes, _, dtype), count in numbers.items():
        for axis in axes:
            n = layout.mesh.axis_size(axis)
            yield Call("all_reduce", axis, sent_nbytes("all_reduce", -(-count // n) * dtype.itemsize, n))


def gather_calls(unit: UnitLayout, group: int, source: Place, target: Place) -> Counter[Call]:
    """Return the collectives in which :func:`~fsharp.gather` moves one group's buffer from ``source`` to ``target``."""
    sharded = [axis for axis in reversed(source.order) if source[axis] is Shard and target[axis] is Replicate]
    axes = [axis for axis in sharded if unit.mesh.axis_size(axis) > 1]
    return Counter(calls_to_gather_buffer(unit, unit.gathered_part_nbytes(group, source), axes))


def calls_to_gather_buffer(unit: UnitLayout, nbytes: int, axes: Iterable[str]) -> Iterator[Call]:
    """Yield the collectives that gather a buffer along one axis after another. ``nbytes``: bytes of a rank's part."""
    for axis in axes if nbytes else ():
        n = unit.mesh.axis_size(axis)
        yield Call("all_gather", axis, sent_nbytes("all_gather", nbytes, n))
        nbytes *= n


def reduce_calls(unit: UnitLayout, group: int, source: Place, target: Place) -> Counter[Call]:
    """Return the collectives in which :func:`~fsharp.reduce_scatter` moves one group from ``source`` to ``target``."""
    size, stages = unit.local_size(group, source), []
    partial = [axis for axis in source.order if source[axis] is Partial and unit.mesh.axis_size(axis) > 1]
    for axis in [axis for axis in partial if target[axis] is Shard]:
        n = unit.mesh.axis_size(axis)
        size //= n
        stages.append(("reduce_scatter", axis, n, size))
    stages += [("all_reduce", axis, unit.mesh.axis_size(axis), size) for axis in partial if target[axis] is Replicate]
    return Counter(calls_to_reduce_group(unit.groups[group].dtypes, stages))


def calls_to_reduce_group(dtypes: Dtypes, stages: Iterable[tuple[str, str, int, int]]) -> Iterator[Call]:
    """Yield the collectives of a reduction.

    ``stages``: of each collective ``(kind, axis, number of ranks, elements of the result)``. A sum in another dtype than the
    data travel in turns an ``all_reduce`` into two collectives.
    """
    for op, axis, n, out in stages:
        if not out:
            continue
        wire = dtypes.wire_format_along(axis)
        if op in ("reduce_scatter", "all_to_all"):
            yield _summing_call(wire, axis, out, n)
            continue
        part = wire.padded_part_size(out, n)
        if op == "all_reduce" and n > 1 and wire != plain_format(dtypes.accumulate):
            yield _summing_call(wire, axis, part, n)
            op = "all_gather"
        yield Call(op, axis, sent_nbytes(op, part * dtypes.accumulate.itemsize, n))


def _summing_call(wire: Format, axis: str, part: int, n: int) -> Call:
    """Return the collective that sums values over ``n`` ranks: each rank gets ``part`` sums. Values travel in ``wire``."""
    op = "reduce_scatter" if wire.is_plain else "all_to_all"
    return Call(op, axis, sent_nbytes(op, wire.size(part) * wire.dtype.itemsize, n))
