"""What a step costs on the wire, computed from the layout before anything runs."""

from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from fsharp.annotated import options_checked
from fsharp.functional.comm.protocol import Call, sent_nbytes
from fsharp.functional.formats.format import Format, plain
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.placement import Partial, Place, Replicate, Shard
from fsharp.functional.layout.unit_layout import UnitLayout


@options_checked
def step_traffic(
    layout: Layout,
    *,
    microbatches: int = 1,
    release: bool = True,
    forward_only: Collection[str] = (),
    uses: Mapping[str, int] = MappingProxyType({}),
) -> Counter[Call]:
    """Every collective call that one :func:`~fsharp.train_step` makes on one rank, and the bytes this rank sends for it.

    A run makes exactly these calls if the transformation has no collectives of its own.

    Args:
        layout: of the parameters.
        microbatches: as given to the step.
        release: as given to ``forward``.
        forward_only: frozen units that no gradient passes through, as those in front of the first trainable one.
        uses: how often ``loss_fn`` passes a unit to :func:`~fsharp.forward`, among ``ties`` included, where not once.
    """
    calls: Counter[Call] = Counter()
    for unit in layout.units:
        strategy = unit.strategy
        is_gathered = any(unit.mesh.axis_size(axis) > 1 for axis in strategy.params.sharded)
        gathers = 2 if release and is_gathered and unit.name not in forward_only else 1
        times = microbatches * uses.get(unit.name, 1)
        for group in unit.all_groups:
            gathered = gather_calls(unit, group, strategy.params, strategy.full)
            calls.update({call: count * gathers * times for call, count in gathered.items()})
        for group in unit.trainable:
            landed = reduce_calls(unit, group, strategy.full.dual, strategy.grads)
            calls.update({call: count * microbatches for call, count in landed.items()})
            calls.update(reduce_calls(unit, group, strategy.grads, strategy.optim))
            calls.update(gather_calls(unit, group, strategy.optim, strategy.params))
    for axis, n in layout.mesh.axes:  # the loss and its weight, two float64
        if n > 1:
            calls[Call("all_reduce", axis, sent_nbytes("all_reduce", -(-2 // n) * 8, n))] += 1
    return calls


def gather_calls(unit: UnitLayout, group: int, source: Place, target: Place) -> Counter[Call]:
    """The collectives that :func:`~fsharp.gather` makes for one group between two places."""
    calls: Counter[Call] = Counter()
    nbytes = unit.stored_nbytes(group, source)
    for axis in reversed(source.order):
        n = unit.mesh.axis_size(axis)
        if source[axis] is Shard and target[axis] is Replicate and n > 1 and nbytes:
            calls[Call("all_gather", axis, sent_nbytes("all_gather", nbytes, n))] += 1
            nbytes *= n
    return calls


def reduce_calls(unit: UnitLayout, group: int, source: Place, target: Place) -> Counter[Call]:
    """The collectives that :func:`~fsharp.reduce_scatter` makes for one group between two places."""
    calls: Counter[Call] = Counter()
    size = unit.local_size(group, source)
    dtypes = unit.groups[group].dtypes
    for axis in source.order:
        n = unit.mesh.axis_size(axis)
        if source[axis] is Partial and target[axis] is Shard and n > 1 and size:
            size //= n
            calls[summing_call(dtypes.wire, axis, size, n)] += 1
    for axis in source.order:
        n = unit.mesh.axis_size(axis)
        if source[axis] is Partial and target[axis] is Replicate and n > 1 and size:
            part = dtypes.wire.padded(size, n)
            nbytes = part * dtypes.accumulate.itemsize
            if dtypes.wire == plain(dtypes.accumulate):
                calls[Call("all_reduce", axis, sent_nbytes("all_reduce", nbytes, n))] += 1
            else:
                calls[summing_call(dtypes.wire, axis, part, n)] += 1
                calls[Call("all_gather", axis, sent_nbytes("all_gather", nbytes, n))] += 1
    return calls


def summing_call(wire: Format, axis: str, part: int, n: int) -> Call:
    """The collective after which each of ``n`` ranks along an axis has the sum of a part, whose summands travel in ``wire``."""
    op = "reduce_scatter" if wire.is_plain else "all_to_all"
    return Call(op, axis, sent_nbytes(op, wire.size(part) * wire.dtype.itemsize, n))
