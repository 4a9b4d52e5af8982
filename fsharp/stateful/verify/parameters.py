"""The checks of :func:`~fsharp.stateful.verify.verify.verify` that concern parameters."""

from fsharp.stateful.schedule.ops import PARAMS, RESTING, OpSpec
from fsharp.stateful.schedule.schedule import Op, Schedule
from fsharp.stateful.verify.check import HappensBefore, ScheduleCheckPass, op_error


class ParameterCheck(ScheduleCheckPass):
    """Check that full parameters are gathered before their use, have this step's values, and are released afterwards."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.ends = {first: last for _, first, last in schedule.program.forward_backward_ranges()}
        self.open: dict[str, tuple[int, int]] = {}  # by unit, the (last, first) event of the begun use that ends last
        self.carried = order.carried_gathers()
        self.copies = dict(self.carried)  # by resident unit, its gather
        joins = {i: op.unit for i, op in enumerate(order.ops, -len(order.ops)) if op.spec.joins == PARAMS}
        self.joined = {unit for i, unit in joins.items() if i > self.carried.get(unit, 0)}
        for i in (i + len(order.ops) for i in self.carried.values()):
            if i < order.last_update:
                what = "is gathered and never released: a leak, and stale once the parameters are updated."
                raise op_error(i, order.ops[i], what, "a release after its last use")
            if not self.policy.gather_at_start:
                what = "is for the next step, and the policy says gather_at_start=False."
                raise op_error(i, order.ops[i], what, "a gather in the step that uses the unit")
        tail = order.previous_step_tail_gathers()
        self.readers = {order.ops[i].stream: i for i in tail}  # by stream, the last op that reads or fills parameters at rest
        settled = {op.unit for op in order.ops[order.last_update :] if op.spec.joins == RESTING}
        spread = {order.ops[i].unit: i for i in tail if order.ops[i].spec.fills == RESTING}
        self.arriving = {unit: i for unit, i in spread.items() if unit not in settled}  # gathers after an update without a wait
        self.stale: dict[str, int] = {}  # by unit whose updated parameters are not gathered to their place yet, its update
        self.updated: int | None = None

    def check_op(self, i: int, op: Op, spec: OpSpec) -> None:
        """Record gathers, waits, uses and releases of units. Raise an error for a use of missing or stale parameters."""
        if RESTING in (*spec.reads, spec.fills):
            self.readers[op.stream] = i
        if spec.fills in (PARAMS, RESTING):
            self._check_gather(i, op, spec)
        if spec.joins:
            self._check_wait(i, op, spec)
        if PARAMS in spec.reads:
            self._check_use(i, op, spec)
        if spec.frees == PARAMS:
            self._check_release(i, op)
        if spec.changes == RESTING:
            self._check_update(i, op)

    def _check_gather(self, i: int, op: Op, spec: OpSpec) -> None:
        self.check_is_before(self.updated, i, "may read stale parameters, before")
        if spec.fills == RESTING:
            if op.unit not in self.stale:
                raise op_error(i, op, "brings updated parameters twice, or before an update.", "one after each update")
            del self.stale[op.unit]
            self.arriving[op.unit] = i
            return
        if op.unit in self.stale:
            raise op_error(i, op, "gathers stale parameters.", "the gather of phase update first")
        if op.unit in self.copies:
            what = f"is gathered again while its copy of op {self.copies[op.unit] % len(self.order.ops)} is there."
            raise op_error(i, op, what, "a release in between", "Release it first, or drop this gather.")
        self.copies[op.unit] = i

    def _check_wait(self, i: int, op: Op, spec: OpSpec) -> None:
        is_updated = spec.joins == RESTING
        gather = (self.arriving if is_updated else self.copies).get(op.unit)
        if gather is None and is_updated and spec.has_ops_for(self.facts[op.unit]):
            return
        if gather is None:
            raise op_error(i, op, "waits for a gather that was not made, or whose copy is released.", "a gather before it")
        self.check_is_before(gather, i, "does not wait for its gather,")
        if is_updated:
            self.arriving.pop(op.unit)
        else:
            self.joined.add(op.unit)

    def _check_use(self, i: int, op: Op, spec: OpSpec) -> None:
        if spec.events:
            self.open[op.unit] = max(self.open.get(op.unit, (-1, -1)), (self.ends[op.event_index], op.event_index))
        if op.unit in self.arriving or op.unit in self.stale:
            raise op_error(i, op, "uses parameters without a wait for their update's gather.", "a wait before it")
        if not self.facts[op.unit].gathered:
            return
        if op.unit not in self.copies:
            raise op_error(i, op, "uses a unit that is not gathered.", "a gather and a wait after its last release")
        gather = self.copies[op.unit]
        if op.unit not in self.joined:
            what = f"uses a unit before its gather, op {gather % len(self.order.ops)}, is waited for."
            raise op_error(i, op, what, "a wait between the two", "Add the wait.")
        self.check_is_before(gather, i, "uses a unit before the end of")

    def _check_release(self, i: int, op: Op) -> None:
        if op.unit not in self.copies:
            raise op_error(i, op, "releases a unit that is not gathered.", "one release for each gather")
        last, first = self.open.get(op.unit, (-1, -1))
        if op.event_index < last:
            what = f"is released while in use: its use from event {first} ends at event {last}."
            raise op_error(i, op, what, f"no release before event {last}", "Move the release behind the end of the use.")
        self.copies.pop(op.unit)
        self.joined.discard(op.unit)

    def _check_update(self, i: int, op: Op) -> None:
        for unit, gather in self.copies.items():
            what = f"the copy of {unit!r} made by op {gather % len(self.order.ops)} survives the update, and is stale after it."
            raise op_error(i, op, what, f"a release of {unit!r} before the update, or its gather after")
        for j in self.readers.values():
            self.check_is_before(j, i, "changes what may still be read by")
        self._check_updates_gathered()
        self.updated = i
        updated = self.events[op.event_index]
        self.stale = {unit.name: i for unit in self.facts.values() if unit.update_gather and updated.is_about(unit.name)}

    def _check_updates_gathered(self) -> None:
        for unit, update in sorted(self.stale.items()):
            what = f"the updated parameters of {unit!r} never come to where they rest."
            raise op_error(update, self.order.ops[update], what, "a gather of phase update after it")

    def check_end(self) -> None:
        """Check that updated parameters are where they rest.

        Check that after a gather for the next step there are only gathers.
        """
        self._check_updates_gathered()
        first = len(self.order.ops) + min(self.carried.values(), default=0)
        for i, op in enumerate(self.order.ops[first:], first):
            if op.spec.fills != PARAMS:
                what = f"comes after op {first}, a gather for the next step, which is issued when this step has ended."
                raise op_error(i, op, what, f"a position before {first}", "Move it before that, or to the next step.")
