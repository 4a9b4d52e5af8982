"""The facts of a unit that a schedule has to know, from its layout."""

from collections.abc import Iterator
from dataclasses import replace

from fsharp.functional.comm.protocol import Call, sent_nbytes
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.traffic import summing_call
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.program import UnitFacts
from fsharp.stateful.units.axis_chain import AxisChain
from fsharp.stateful.units.full import full_nbytes
from fsharp.stateful.units.unit_state import UnitState


def facts_of(
    unit: UnitState, policy: Policy, *, trained: bool, updated: bool, several_uses: bool, several_microbatches: bool
) -> UnitFacts:
    """What this unit takes: bytes of its copy and of its gradient's way, and the collectives of each move.

    Args:
        unit: of a step that has been recorded.
        policy: of the schedule.
        trained: whether the unit has a gradient in this step. Of two trees of one layout one may be evaluated alone.
        updated: whether the step updates its parameters.
        several_uses: whether it is used more than once in some microbatch, with a gradient.
        several_microbatches: whether gradients of more than one are added.
    """
    layout = unit.layout
    params, optim = layout.strategy.params, layout.strategy.optim
    gather = [c for g in layout.all_groups for c in _gathers(layout, layout.stored_nbytes(g, params), unit.axes)]
    gathered = full_nbytes(layout) if unit.axes else 0
    update_gather = [
        c for g in layout.trainable * updated for c in _gathers(layout, layout.stored_nbytes(g, optim), unit.update_axes)
    ]
    facts = UnitFacts(
        unit.key,
        gathered,
        trainable=False,
        gather=tuple(gather),
        update_gather=tuple(update_gather),
        host=unit.host_nbytes,
        wire=_wire(layout),
    )
    if not trained or unit.gradient is None:
        return facts
    route = unit.gradient.route
    return replace(
        facts,
        outgoing=route.outgoing_nbytes(several_uses=several_uses, several_microbatches=several_microbatches),
        finishing=route.finishing_nbytes(),
        rest=0 if policy.keep_gradients else unit.gradient.rest.nbytes,
        trainable=True,
        reduce=tuple(c for chain in route.chains for c in _reductions(chain)),
        finish=tuple(c for chain in route.finishes for c in _reductions(chain)),
    )


def _wire(unit: UnitLayout) -> str | None:
    """The dtypes that all groups of a unit have in common; None if they differ."""
    found = {group.dtypes for group in unit.groups}
    if len(found) != 1:
        return None
    [dtypes] = found
    return " ".join(dtypes.names)


def _gathers(unit: UnitLayout, nbytes: int, axes: tuple[str, ...]) -> Iterator[Call]:
    for axis in axes if nbytes else ():
        n = unit.mesh.axis_size(axis)
        yield Call("all_gather", axis, sent_nbytes("all_gather", nbytes, n))
        nbytes *= n


def _reductions(chain: AxisChain) -> Iterator[Call]:
    wire, itemsize = chain.dtypes.wire, chain.dtypes.accumulate.itemsize
    for (op, axis, n), out in zip(chain.stages, chain.sizes(), strict=True) if chain.size else ():
        if op in ("reduce_scatter", "all_to_all"):
            yield summing_call(wire, axis, out, n)
            continue
        part = wire.padded(out, n)
        if op == "all_reduce" and chain.differ:  # of another dtype than the sums
            yield summing_call(wire, axis, part, n)
            op = "all_gather"
        yield Call(op, axis, sent_nbytes(op, part * itemsize, n))
