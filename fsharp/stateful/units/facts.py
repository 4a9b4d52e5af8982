"""The facts of a unit that a schedule needs, from the unit's layout."""

from collections.abc import Iterable
from dataclasses import replace

from fsharp.functional.comm.protocol import Call
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.traffic import calls_gathering, calls_reducing
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import UnitFacts
from fsharp.stateful.units.axis_chain import AxisChain
from fsharp.stateful.units.full import full_nbytes
from fsharp.stateful.units.unit_state import UnitState


def facts_of(
    unit: UnitState, policy: SchedulePolicy, *, trained: bool, updated: bool, several_uses: bool, several_microbatches: bool
) -> UnitFacts:
    """Return the bytes of a unit's full parameters and gradient in a schedule, and the collectives of each move.

    ``trained``: whether the step has a gradient of the unit; a second tree of the layout may be evaluated without gradients.
    ``several_uses``: whether some microbatch has several uses with gradients. ``several_microbatches``: whether gradients of
    microbatches are added.
    """
    layout = unit.layout
    params = layout.strategy.params
    gather = [c for g in layout.all_groups for c in calls_gathering(layout, layout.travelling_nbytes(g, params), unit.axes)]
    gathered = full_nbytes(layout) if unit.axes else 0
    updates = [(layout.update_nbytes(g), unit.update_axes) for g in layout.trainable * updated]
    update_gather = [call for nbytes, axes in updates for call in calls_gathering(layout, nbytes, axes)]
    key, wire, sent, spread = unit.key, _wire(layout), tuple(gather), tuple(update_gather)
    facts = UnitFacts(key, gathered, trainable=False, gather=sent, update_gather=spread, host=unit.host_nbytes, wire=wire)
    if not trained or unit.gradient is None:
        return facts
    route = unit.gradient.route
    return replace(
        facts,
        outgoing=route.outgoing_nbytes(several_uses=several_uses, several_microbatches=several_microbatches),
        finishing=route.finishing_nbytes(),
        rest=0 if policy.keep_gradients else unit.gradient.rest.nbytes,
        trainable=True,
        reduce=_calls(route.chains),
        finish=_calls(route.finishes),
    )


def _wire(unit: UnitLayout) -> str | None:
    """Return the dtypes on the wire that all groups of a unit share; None if they differ."""
    found = {group.dtypes for group in unit.groups}
    return " ".join(found.pop().names) if len(found) == 1 else None


def _calls(chains: Iterable[AxisChain]) -> tuple[Call, ...]:
    stages = [(chain.dtypes, zip(chain.stages, chain.sizes(), strict=True)) for chain in chains]
    return tuple(call for dtypes, each in stages for call in calls_reducing(dtypes, [(*stage, out) for stage, out in each]))
