"""The facts of a unit that a schedule needs, from the unit's layout."""

import math
from collections.abc import Iterable
from dataclasses import replace

from fsharp.functional.comm.protocol import Call
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.traffic import calls_gathering, calls_reducing
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import UnitFacts
from fsharp.stateful.units.axis_chain import AxisChain, CodedBytes
from fsharp.stateful.units.full import full_nbytes, stored_sizes
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
    differences = [layout.update_nbytes(g) for g in layout.trainable * updated if layout.update_format(g) is not None]
    facts = UnitFacts(
        unit.key,
        gathered,
        trainable=False,
        gather=tuple(gather),
        update_gather=tuple(update_gather),
        host=unit.host_nbytes,
        wire=_wire(layout),
        decoded=sum(numel * dtype.itemsize for numel, dtype in stored_sizes(layout)) if unit.axes else 0,
        update_coded=sum(differences) * math.prod(map(layout.mesh.axis_size, unit.update_axes)),
    )
    if not trained or unit.gradient is None:
        return facts
    route = unit.gradient.route
    reduced, finished = _coded(route.chains), _coded(route.finishes)
    return replace(
        facts,
        outgoing=route.outgoing_nbytes(several_uses=several_uses, several_microbatches=several_microbatches),
        finishing=route.finishing_nbytes(),
        rest=0 if policy.keep_gradients else unit.gradient.rest.nbytes,
        trainable=True,
        reduce=_calls(route.chains),
        finish=_calls(route.finishes),
        reduce_encoded=reduced.before,
        reduce_recoded=reduced.between,
        reduce_decoded=reduced.after,
        finish_encoded=finished.before,
        finish_recoded=finished.between,
        finish_decoded=finished.after,
    )


def _wire(unit: UnitLayout) -> str | None:
    """Return the dtypes on the wire that all groups of a unit share; None if they differ."""
    found = {group.dtypes for group in unit.groups}
    return " ".join(found.pop().names) if len(found) == 1 else None


def _coded(chains: Iterable[AxisChain]) -> CodedBytes:
    """The encoded bytes of all groups of a unit."""
    return CodedBytes(*map(sum, zip(*[chain.coded() for chain in chains], strict=True)))


def _calls(chains: Iterable[AxisChain]) -> tuple[Call, ...]:
    stages = [(chain.dtypes, zip(chain.stages, chain.sizes(), strict=True)) for chain in chains]
    return tuple(call for dtypes, each in stages for call in calls_reducing(dtypes, [(*stage, out) for stage, out in each]))
