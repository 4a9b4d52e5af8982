"""The facts of a unit that a schedule has to know, from its layout."""

from collections.abc import Iterator

from fsharp.functional.comm import Call, sent_nbytes
from fsharp.functional.layout import UnitLayout
from fsharp.functional.placement import Replicate, Shard
from fsharp.stateful.runtime.chain import Chain
from fsharp.stateful.runtime.copies import LiveUnit, full_nbytes
from fsharp.stateful.runtime.full import moving_axes
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.program import UnitFacts


def spread_axes(unit: UnitLayout, *, trivial: bool) -> tuple[str, ...]:
    """Axes to gather updated parameters along, in order of the gathers, to bring them to where they rest."""
    strategy = unit.strategy
    axes = [a for a in reversed(strategy.order) if strategy.optim[a] is Shard and strategy.params[a] is Replicate]
    return moving_axes(unit, axes, trivial=trivial)


def facts_of(unit: LiveUnit, policy: Policy, *, several_microbatches: bool, in_place: bool = False) -> UnitFacts:
    """What this unit takes: bytes of its copy and of its gradient's way, and the collectives of each move.

    Args:
        unit: of a run that has been recorded.
        policy: of the schedule.
        several_microbatches: whether gradients of more than one are added.
        in_place: whether its gradient need not rest anywhere but where the optimizer has it, if that can be.
    """
    trivial = policy.trivial_axes
    layout, gradient = unit.layout, unit.gradient
    params, optim = layout.strategy.params, layout.strategy.optim
    gather = [c for g in layout.all_groups for c in _gathers(layout, g, layout.local_size(g, params), unit.axes)]
    dtypes = {group.dtypes for group in layout.groups}  # in one collective all is of one kind
    wire = str(next(iter(dtypes))) if len(dtypes) == 1 else None
    if gradient is None:
        return UnitFacts(unit.key, full_nbytes(layout) if unit.axes else 0, trainable=False, gather=tuple(gather), wire=wire)
    axes = spread_axes(layout, trivial=trivial)
    spread = [c for g in layout.trainable for c in _gathers(layout, g, layout.local_size(g, optim), axes)]
    several = unit.uses > 1
    return UnitFacts(
        unit.key,
        gathered=full_nbytes(layout) if unit.axes else 0,
        outgoing=gradient.outgoing_nbytes(several_uses=several, several_microbatches=several_microbatches),
        finishing=gradient.finishing_nbytes(),
        rest=0 if policy.keep_gradients or (in_place and gradient.is_reduced_in_place) else gradient.rest.nbytes,
        trainable=True,
        gather=tuple(gather),
        reduce=tuple(c for chain in gradient.chains for c in _reductions(chain)),
        finish=tuple(c for chain in gradient.finishes for c in _reductions(chain)),
        spread=tuple(spread),
        wire=wire,
    )


def _gathers(unit: UnitLayout, group: int, size: int, axes: tuple[str, ...]) -> Iterator[Call]:
    itemsize = unit.groups[group].dtypes.compute.itemsize
    for axis in axes if size else ():
        n = unit.mesh.axis_size(axis)
        yield Call("all_gather", axis, sent_nbytes("all_gather", size * itemsize, n))
        size *= n


def _reductions(chain: Chain) -> Iterator[Call]:
    wire, accumulate = chain.dtypes.wire.itemsize, chain.dtypes.accumulate.itemsize
    size = chain.size
    for (op, axis, n), out in zip(chain.stages, chain.sizes(), strict=True) if size else ():
        if op == "reduce_scatter":
            yield Call(op, axis, sent_nbytes(op, out * wire, n))
        elif not chain.differ:
            yield Call(op, axis, sent_nbytes(op, -(-out // n) * wire, n))
        else:
            part = -(-out // n)
            yield Call("reduce_scatter", axis, sent_nbytes("reduce_scatter", part * wire, n))
            yield Call("all_gather", axis, sent_nbytes("all_gather", part * accumulate, n))
