"""Emit the ops that gather, wait for and release parameters, and the ops of updates."""

from collections.abc import Collection, Iterable

from fsharp.stateful.schedule.costs import Bundle, Bundles
from fsharp.stateful.schedule.ops import COMPUTE, FETCH, GATHER, OFFLOAD, RELEASE, SETTLE, SPREAD, UPDATE, WAIT, Phase
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program
from fsharp.stateful.schedule.residency import bundles_before_step, plan_residency
from fsharp.stateful.schedule.unplaced import OpList, UnplacedOp


class ParameterOps:
    """Emits the ops of parameters and of updates.

    ``gathers``: bundles of units that are gathered in one collective. ``spreads``: bundles for the gathers of updated
    parameters. ``kept``: uses whose parameters stay from their forward to the end of their backward.
    """

    def __init__(
        self, ops: OpList, program: Program, policy: SchedulePolicy, gathers: Bundles, spreads: Bundles, kept: Collection[int]
    ) -> None:
        events = program.events
        self._ops, self._spreads = ops, spreads
        self._carries = bool(events) and events[-1].kind == "update" and policy.gather_at_start
        first = bundles_before_step(program, policy, gathers) if self._carries else ()
        self._changes, self._carried = plan_residency(program, policy, gathers, kept, first)
        self._gathers: dict[str, UnplacedOp] = {}  # gathers of resident units, by unit
        self._ready: set[str] = set()  # resident units that compute has waited for
        self._arriving: list[UnplacedOp] = []  # waits for gathers of the previous step
        self._updated: tuple[UnplacedOp, ...] = ()  # the last update of this step
        self._fetched: list[UnplacedOp] = []  # fetches for the next update
        self._settled: set[str] = set()  # units whose updated parameters compute has waited for

    def emit_moves(self, i: int, phase: Phase) -> None:
        """Emit the releases and the gathers that are planned for event ``i``."""
        self.emit_releases(i, phase)
        self.emit_gathers(i, phase)

    def emit_releases(self, i: int, phase: Phase) -> None:
        """Emit the releases that are planned for event ``i``."""
        for unit in (unit for bundle in self._changes[i].released for unit in bundle):
            gather = self._gathers.pop(unit, None)
            after = (gather,) if gather is not None and unit not in self._ready else ()  # no wait has followed the gather
            self._ops.add_with_followers(RELEASE, unit, phase, i, after=after)
            self._ready.discard(unit)

    def emit_gathers(self, i: int, phase: Phase) -> None:
        """Emit the gathers that are planned for event ``i``."""
        self._gather(self._changes[i].gathered, phase, i, self._updated)

    def _gather(self, bundles: Iterable[Bundle], phase: Phase, i: int, after: tuple[UnplacedOp, ...]) -> None:
        for units in bundles:
            ops = self._ops.add_bucket(GATHER, units, phase, i, after=dict.fromkeys(units, after))
            self._gathers |= zip(units, ops, strict=True)

    def emit_use(self, event: Event, phase: Phase, i: int) -> None:
        """Emit the wait for the unit of an event, and the unit's compute op."""
        unit, facts = event.unit, self._ops.facts[event.unit]
        if SETTLE.has_ops_for(facts) and self._carries and unit not in self._settled:
            self._emit_settles(unit, i)
        if WAIT.has_ops_for(facts) and unit not in self._ready:
            self._ready.add(unit)
            op = self._ops.add_with_followers(WAIT, unit, phase, i)
            if unit in self._gathers:
                op.set_after(self._gathers[unit])
            else:
                self._arriving.append(op)
        self._ops.add_with_followers(COMPUTE, unit, phase, i, use=event.use)

    def _emit_settles(self, unit: str, i: int) -> None:
        """Emit the wait for the gather of a unit's parameters after the previous step's update."""
        self._settled.add(unit)
        self._arriving.append(self._ops.add_with_followers(SETTLE, unit, "update", i))

    def emit_fetch(self, unit: str, i: int) -> None:
        """Emit the copy of a unit's state to the device."""
        self._fetched.append(self._ops.add_with_followers(FETCH, unit, "update", i, after=self._ops.last_on_stream("compute")))

    def emit_update(self, i: int, *, is_last: bool) -> None:
        """Emit the update of event ``i``, and the gathers of updated parameters.

        After the step's last update (``is_last``) also emit the gathers of the next step's first units.
        """
        self.emit_releases(i, "update")
        reduced, facts = self._ops.last_on_stream("reduce"), self._ops.facts
        if self._carries:
            for unit in [name for name, each in facts.items() if SETTLE.has_ops_for(each) and name not in self._settled]:
                self._emit_settles(unit, i)
        update = self._ops.add_with_followers(UPDATE, "", "update", i, after=(*reduced, *self._fetched))
        self._updated = (update,)
        sent: dict[str, UnplacedOp] = {}
        for members in dict.fromkeys(self._spreads.values()):
            units = [unit for unit in members if SPREAD.has_ops_for(facts[unit])]
            ops = self._ops.add_bucket(SPREAD, units, "update", i, after=dict.fromkeys(units, (update,)))
            sent |= zip(units, ops, strict=True)
        for fetch in self._fetched:
            self._ops.add_with_followers(OFFLOAD, fetch.unit, "update", i, after=(update,))
        self._fetched = []
        if not (is_last and self._carries):
            for unit, op in sent.items():
                self._ops.add_with_followers(SETTLE, unit, "update", i, after=(op,))
            return
        self._gather(self._carried, "forward", i, (update,))
        for wait in self._arriving:
            wait.set_after((sent if wait.spec is SETTLE else self._gathers)[wait.unit])
