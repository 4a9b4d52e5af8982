"""Emit the ops that gather, wait for and release parameters, and the ops of updates."""

from collections.abc import Collection, Iterable

from fsharp.stateful.schedule.costs import Bucket, BucketsByCollective
from fsharp.stateful.schedule.ops import (
    COMPUTE,
    FETCH,
    GATHER,
    OFFLOAD,
    RELEASE,
    UPDATE,
    UPDATE_GATHER,
    UPDATE_WAIT,
    WAIT,
    Phase,
)
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program
from fsharp.stateful.schedule.residency import ResidencyChange, plan_residency
from fsharp.stateful.schedule.unplaced import OpList, UnplacedOp


class ParameterOps:
    """Emits the ops that gather, wait for and release parameters, and the ops of updates.

    ``kept_uses``: numbers of uses whose parameters stay until the use's backward has ended.
    """

    def __init__(
        self, ops: OpList, program: Program, policy: SchedulePolicy, buckets: BucketsByCollective, kept_uses: Collection[int]
    ) -> None:
        events = program.events
        self._ops, self._update_gathers = ops, buckets.update_gathers
        self._carries = bool(events) and events[-1].kind == "update" and policy.gather_at_start
        self._changes = plan_residency(program, policy, buckets.gathers, kept_uses)
        self._arriving_updates = {unit for unit in ops.facts if self._carries and events[-1].is_about(unit)}
        self._carried: tuple[Bucket, ...] = ()  # buckets that the previous step gathers: the first ones of the first event
        if self._carries:
            (released, gathered), num_carried = self._changes[0], max(policy.prefetch, 1)
            self._carried = gathered[:num_carried]
            self._changes[0] = ResidencyChange(released, gathered[num_carried:])
        self._gathers: dict[str, UnplacedOp] = {}  # gathers of resident units, by unit
        self._ready: set[str] = set()  # resident units that compute has waited for
        self._arriving: list[UnplacedOp] = []  # waits for gathers of the previous step
        self._updated: tuple[UnplacedOp, ...] = ()  # the last update of this step
        self._fetched: list[UnplacedOp] = []  # fetches for the next update

    def emit_releases_of_event(self, phase: Phase) -> None:
        """Emit the releases that are planned for the event number ``OpList.event_index``."""
        for unit in (unit for bucket in self._changes[self._ops.event_index].released for unit in bucket):
            gather = self._gathers.pop(unit, None)
            after = (gather,) if gather is not None and unit not in self._ready else ()  # no wait has followed the gather
            self._ops.add_with_following_ops(RELEASE, unit, phase, after=after)
            self._ready.discard(unit)

    def emit_gathers_of_event(self, phase: Phase) -> None:
        """Emit the gathers that are planned for the event number ``OpList.event_index``."""
        self._emit_gathers_of_buckets(self._changes[self._ops.event_index].gathered, phase, self._updated)

    def _emit_gathers_of_buckets(self, buckets: Iterable[Bucket], phase: Phase, after: tuple[UnplacedOp, ...]) -> None:
        for units in buckets:
            ops = self._ops.add_bucket(GATHER, units, phase, after=dict.fromkeys(units, after))
            self._gathers |= zip(units, ops, strict=True)

    def emit_wait_and_compute(self, event: Event, phase: Phase) -> None:
        """Emit the wait for the unit of an event, and the unit's compute op."""
        unit, facts = event.unit, self._ops.facts[event.unit]
        self._emit_wait_for_updated_gather(unit)
        if WAIT.has_ops_for(facts) and unit not in self._ready:
            self._ready.add(unit)
            op = self._ops.add_with_following_ops(WAIT, unit, phase)
            if unit in self._gathers:
                op.replace_after(self._gathers[unit])
            else:
                self._arriving.append(op)
        self._ops.add_with_following_ops(COMPUTE, unit, phase, use_index=event.use_index)

    def _emit_wait_for_updated_gather(self, unit: str) -> None:
        """Emit the wait for the gather of a unit's updated parameters, which the previous step has begun; once in a step."""
        if unit in self._arriving_updates and UPDATE_WAIT.has_ops_for(self._ops.facts[unit]):
            self._arriving_updates.remove(unit)
            self._arriving.append(self._ops.add_with_following_ops(UPDATE_WAIT, unit, "update"))

    def emit_state_fetch(self, unit: str) -> None:
        """Emit the copy of a unit's optimizer state from host memory to the device."""
        self._fetched.append(self._ops.add_with_following_ops(FETCH, unit, "update", after=self._ops.last_on_stream("compute")))

    def emit_update(self, event: Event, *, is_last: bool) -> None:
        """Emit the releases and the update of ``event``, gathers of updated parameters, and copies of state to the host.

        After the step's last update (``is_last``) also emit the gathers of the next step's first units.
        """
        self.emit_releases_of_event("update")
        reduced, facts = self._ops.last_on_stream("reduce"), self._ops.facts
        for unit in facts:
            self._emit_wait_for_updated_gather(unit)
        update = self._ops.add_with_following_ops(UPDATE, "", "update", after=(*reduced, *self._fetched))
        self._updated = (update,)
        sent: dict[str, UnplacedOp] = {}
        for members in dict.fromkeys(self._update_gathers.values()):
            units = [unit for unit in members if UPDATE_GATHER.has_ops_for(facts[unit]) and event.is_about(unit)]
            ops = self._ops.add_bucket(UPDATE_GATHER, units, "update", after=dict.fromkeys(units, (update,)))
            sent |= zip(units, ops, strict=True)
        for fetch in self._fetched:
            self._ops.add_with_following_ops(OFFLOAD, fetch.unit, "update", after=(update,))
        self._fetched = []
        if not (is_last and self._carries):
            for unit, op in sent.items():
                self._ops.add_with_following_ops(UPDATE_WAIT, unit, "update", after=(op,))
            return
        self._emit_gathers_of_buckets(self._carried, "forward", (update,))
        for wait in self._arriving:
            wait.replace_after((sent if wait.spec is UPDATE_WAIT else self._gathers)[wait.unit])
