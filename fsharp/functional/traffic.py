"""The collectives of a step and their bytes, computed from a layout before anything runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from fsharp.errors import OptionError
from fsharp.functional.comm.protocol import Call, sent_nbytes
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.stages import ReductionStage, reduction_stages
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.type_checks import options_checked

_ONE_USE: Mapping[str, int] = MappingProxyType({})


@options_checked
def step_traffic(
    layout: Layout,
    *,
    microbatches: int = 1,
    release: bool = True,
    uses: Mapping[str, int] = _ONE_USE,
) -> Counter[Call]:
    """Predict the collectives of one :func:`~fsharp.train_step` on one rank: each call, the bytes that it sends, and how often.

    A run makes exactly these calls, unless the optimizer has its own collectives. A unit with only frozen leaves is counted as
    if a backward reached it. If no backward does, as for an embedding of tokens, a run does not gather the unit a second time.

    Args:
        layout: layout of the parameters.
        microbatches: number of microbatches of the step.
        release: argument ``release`` of :func:`~fsharp.forward`.
        uses: dict from the name of a unit to the number of calls of :func:`~fsharp.forward` that use the unit in a microbatch.
            Calls with the unit in ``ties`` count. For a unit that is not in the dict the number is 1. Names of no unit are
            ignored.

    Returns:
        A Counter of :class:`~fsharp.collectives.Call`.

    Raises:
        OptionError: ``microbatches`` is below 1, or a number in ``uses`` is negative.
    """
    if microbatches < 1 or any(number < 0 for number in uses.values()):
        raise OptionError(
            f"step_traffic(): microbatches is {microbatches} and uses is {dict(uses)}, expected at least one microbatch, and "
            "no negative number of uses."
        )
    calls = traffic_of_units(layout, microbatches=microbatches, release=release, uses=uses)
    calls.update(_scale_agreement_calls(layout))
    for axis, n in layout.mesh.axes:  # the loss and its weight, two float64
        if n > 1:
            calls[Call("all_reduce", axis, sent_nbytes("all_reduce", -(-2 // n) * 8, n))] += 1
    return calls


def traffic_of_units(layout: Layout, *, microbatches: int, release: bool, uses: Mapping[str, int] = _ONE_USE) -> Counter[Call]:
    """Return the collectives that move parameters and gradients in a step. For the arguments see :func:`step_traffic`."""
    calls: Counter[Call] = Counter()
    for unit in layout.units:
        strategy = unit.strategy
        gathers = 2 if release and unit.gather_axes(strategy.params, strategy.full) else 1
        times = microbatches * uses.get(unit.name, 1)
        for call in use_gather_calls(unit, unit.gather_axes(strategy.params, strategy.full)):
            calls[call] += gathers * times
        for group in unit.trainable_groups:
            landed = reduce_calls(unit, group, strategy.full.cotangent_place, strategy.grads)
            calls.update({call: count * microbatches for call, count in landed.items()})
            calls.update(reduce_calls(unit, group, strategy.grads, strategy.optim))
            axes = unit.gather_axes(strategy.optim, strategy.params)
            calls.update(calls_to_gather_buffer(unit, unit.update_gather_input_nbytes(group), axes))
    return calls


def _scale_agreement_calls(layout: Layout) -> Iterator[Call]:
    """Yield the collectives of an update in which ranks agree on the scales of formats that encode whole leaves."""
    numbers: Counter[tuple[str, tuple[str, ...], int, torch.dtype]] = Counter()
    for unit in layout.units:
        axes = tuple([axis for axis in unit.strategy.optim.sharded_axes if unit.mesh.axis_size(axis) > 1])
        for group in unit.trainable_groups if unit.has_leaf_codecs else ():
            form = unit.groups[group].dtypes.stored_format
            if (codec := form.leaf_codec) is not None:
                for leaf in unit.leaves_of_group(group):
                    for i, (count, dtype) in enumerate(codec.agreed_maxima(leaf.shape)):
                        numbers[form.name, axes, i, dtype] += count
    for (_, axes, _, dtype), count in numbers.items():
        for axis in axes:
            n = layout.mesh.axis_size(axis)
            yield Call("all_reduce", axis, sent_nbytes("all_reduce", -(-count // n) * dtype.itemsize, n))


def use_gather_calls(unit: UnitLayout, axes: Sequence[str]) -> Iterator[Call]:
    """Yield the collectives that gather a unit's parameters along ``axes``, for one use by a function."""
    for group in unit.all_groups:
        for nbytes in unit.use_gather_input_nbytes(group, unit.strategy.params):
            yield from calls_to_gather_buffer(unit, nbytes, axes)


def calls_to_gather_buffer(unit: UnitLayout, nbytes: int, axes: Iterable[str]) -> Iterator[Call]:
    """Yield the collectives that gather a buffer along one axis after another. ``nbytes``: bytes of a rank's part."""
    for axis in axes if nbytes else ():
        n = unit.mesh.axis_size(axis)
        yield Call("all_gather", axis, sent_nbytes("all_gather", nbytes, n))
        nbytes *= n


def reduce_calls(unit: UnitLayout, group: int, source: MeshPlacement, target: MeshPlacement) -> Counter[Call]:
    """Return the collectives in which :func:`~fsharp.reduce_scatter` moves one group from ``source`` to ``target``."""
    stages = reduction_stages(unit, group, source, target)
    return Counter(calls_of_stages(stages, unit.groups[group].dtypes.accumulate))


def calls_of_stages(stages: Iterable[ReductionStage], accumulate: torch.dtype) -> Iterator[Call]:
    """Yield the collectives of a reduction in ``stages``. ``accumulate``: dtype of the sums.

    An ``all_reduce`` whose input has a dtype other than ``accumulate`` runs as two collectives, and both are yielded: a
    ``reduce_scatter`` in the input's dtype, and an ``all_gather`` in the dtype ``accumulate``.
    """
    for op, axis, n, size, out, dtype, wire, _ in stages:
        part = -(-size // n)
        if op == "all_to_all":
            yield Call(op, axis, sent_nbytes(op, wire.size(out) * wire.buffer_dtype.itemsize, n))
        elif op == "all_reduce" and dtype != accumulate:
            yield Call("reduce_scatter", axis, sent_nbytes("reduce_scatter", part * dtype.itemsize, n))
            yield Call("all_gather", axis, sent_nbytes("all_gather", part * accumulate.itemsize, n))
        elif op != "slice":
            yield Call(op, axis, sent_nbytes(op, (size if op == "all_gather" else part) * dtype.itemsize, n))
