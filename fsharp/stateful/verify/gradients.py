"""The checks of :func:`~fsharp.stateful.verify.verify.verify` that concern gradients."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import product

from fsharp.errors import ScheduleError, problem
from fsharp.stateful.schedule.ops import FINAL, FINISHING, OPS, OUTGOING, REST, OpSpec
from fsharp.stateful.schedule.schedule import Op, Schedule
from fsharp.stateful.verify.check import HappensBefore, ScheduleCheckPass, op_error


class GradientCheck(ScheduleCheckPass):
    """Check that each gradient is collected, reduced, added and sent to the optimizer's shards once, in this order."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.ends = [i for i, event in enumerate(self.events) if event.kind == "microbatch_end"]
        self.asked = [i for i, event in enumerate(self.events) if event.kind == "reduce"]
        self.due: dict[tuple[str, int], dict[int, int]] = {}  # by unit and microbatch, by event the use that has a gradient
        for i, event in enumerate(self.events):
            if event.has_gradient:
                self.due.setdefault((event.unit, bisect_left(self.ends, i)), {})[i] = event.use_index
        finished = [facts.name for facts in self.facts.values() if facts.trainable and facts.finish]
        self.finishes: dict[int, list[str]] = {}  # by number of a `reduce` after a microbatch, the units that it reduces
        for number in sorted({bisect_left(self.asked, end) for end in self.ends} - {len(self.asked)}):
            event = self.events[self.asked[number]]
            self.finishes[number] = [name for name in finished if event.is_about(name)]
        # The ops that take a gradient out of a buffer: first the op that reduces it, then the op that frees the buffer.
        self.takers: dict[str, list[OpSpec]] = {OUTGOING: [], FINISHING: []}
        for spec, (buffer, takers) in product(dict.fromkeys(OPS.values()), self.takers.items()):
            if buffer in (spec.changes, spec.frees) or (spec.fills == buffer and spec.calls):
                takers.append(spec)
        self.cast: dict[tuple[str, int], set[int]] = {}
        self.done: dict[tuple[OpSpec, str, int], int] = {}  # by record, unit and number of microbatch or `reduce`
        self.written: dict[str, int] = {}  # by unit, the op that last changed its gradient
        self.read: dict[str, int] = {}  # by unit, the op that last read where its gradient rests
        self.waiting: dict[str, int] = {}  # by unit, the cast whose gradient is not accumulated yet
        self.last: int | None = None  # the last op that took a gradient out of a buffer

    def check_op(self, i: int, op: Op, spec: OpSpec) -> None:
        """Record which ops each gradient has passed. Raise an error if the op is out of order."""
        if spec.fills == OUTGOING:
            self._check_cast(i, op)
        elif any(spec in takers for takers in self.takers.values()):
            self._check_take_from_buffer(i, op, spec)
            self.last = i
        elif REST in spec.reads:
            self.check_is_before(self.written.get(op.unit), i, "may start before the end of")
            self.read[op.unit] = i
        elif FINAL in spec.reads:
            self.check_is_before(self.last, i, "may run before the end of")

    def _gradient_key(self, op: Op) -> tuple[str, int]:
        return op.unit, bisect_left(self.asked if op.phase == "finish" else self.ends, op.event_index)

    def _check_cast(self, i: int, op: Op) -> None:
        key = self._gradient_key(op)
        due = self.due.get(key, {})
        if due.get(op.event_index) != op.use_index:
            there = [at for at, use in due.items() if use == op.use_index]
            if not there:
                what = f"casts a gradient that use {op.use_index} does not have in this microbatch."
                raise op_error(i, op, what, f"uses {sorted(due.values())}")
            what = f"is issued at event {op.event_index}, and its gradient exists only at the end of the use's backward."
            raise op_error(i, op, what, f"event {there[0]}")
        if op.event_index in self.cast.setdefault(key, set()):
            what = f"casts the gradient of use {op.use_index} twice."
            raise op_error(i, op, what, "one cast for each use", "Drop one of them.")
        self.cast[key].add(op.event_index)
        self._check_gradient_change(i, op, [(spec, *key) for spec in self.takers[OUTGOING]])
        if any(spec.has_ops_for(self.facts[op.unit]) for spec in self.takers[OUTGOING]):
            self.waiting[op.unit] = i

    def _check_gradient_change(self, i: int, op: Op, later_senders: Sequence[tuple[OpSpec, str, int]]) -> None:
        """Record that op ``i`` changes its unit's gradient. Raise an error if an earlier op has sent this gradient.

        ``later_senders``: keys, as in ``self.done``, of the ops that send the unreduced gradient, which have to come after op
        ``i``.
        """
        sent = [
            (spec, op.unit, bisect_left(self.asked, op.event_index)) for spec in self.takers[FINISHING] if REST in spec.reads
        ]
        for done in (*later_senders, *sent):
            if done in self.done:
                at = self.done[done]
                what = f"comes after op {at}, {self.order.ops[at]}, which has sent the gradient without it."
                raise op_error(i, op, what, f"a position before {at}", f"Move it before op {at}.")
        if op.spec.filled_buffer(self.facts[op.unit]) == REST:
            self.check_is_before(self.read.get(op.unit), i, "changes what may still be read by")
        self.written[op.unit] = i

    def _check_take_from_buffer(self, i: int, op: Op, spec: OpSpec) -> None:
        key = self._gradient_key(op)
        mine = (spec, *key)
        if mine in self.done:
            raise op_error(i, op, f"happens twice: op {self.done[mine]} has done it.", "one for each gradient", "Drop one.")
        if missing := self._why_incomplete(op, spec, key):
            raise op_error(i, op, f"{missing}.", f"{op.kind} once, after what it needs")
        reduced = [self.done[each, *key] for each in self._reductions_before(spec) if (each, *key) in self.done]
        self.check_is_before(reduced[0] if reduced else self.written.get(op.unit), i, "may start before the end of")
        self.done[mine] = i
        if REST in spec.reads:
            self.read[op.unit] = i
        if spec.fills == REST:
            self._check_gradient_change(i, op, [])
            self.waiting.pop(op.unit, None)

    def _reductions_before(self, spec: OpSpec) -> list[OpSpec]:
        """Return the kinds of reductions that come before an op of kind ``spec``: they reduce the buffer that it frees."""
        return [each for each in self.takers.get(spec.frees, ()) if each.calls]

    def _why_incomplete(self, op: Op, spec: OpSpec, key: tuple[str, int]) -> str:
        """Return why ``op`` must not take its gradient yet, else ``""``.

        ``key``: unit, number of microbatch or ``reduce`` event.
        """
        facts, finish = self.facts[op.unit], spec in self.takers[FINISHING]
        if not facts.trainable:
            return "is about a frozen unit, which has no gradient"
        if finish and not (spec.has_ops_for(facts) and op.unit in self.finishes.get(key[1], ())):
            return "no `reduce` event asks for it"
        if any(each.has_ops_for(facts) and (each, *key) not in self.done for each in self._reductions_before(spec)):
            return "adds a result without a reduction before it"
        if finish:
            return f"comes before op {self.waiting[op.unit]} is accumulated" if op.unit in self.waiting else ""
        if not spec.has_ops_for(facts):
            return "takes away a gradient that stays where it is"
        due = self.due.get(key, {})
        if not due:
            return "takes away a gradient that this microbatch does not have"
        missing = due.keys() - self.cast.get(key, set())
        return f"comes before the cast of use {due[min(missing)]}" if missing else ""

    def check_end(self) -> None:
        """Check that each gradient was cast, reduced and, where a ``reduce`` event asks, sent to the optimizer's shards."""
        for (unit, number), due in self.due.items():
            for at in sorted(due.keys() - self.cast.get((unit, number), set())):
                what = f"the gradient of use {due[at]} of {unit!r} is never cast."
                raise self._missing_gradient_error(at, unit, what, "one cast of it")
            for spec in self.takers[OUTGOING]:
                if spec.has_ops_for(self.facts[unit]) and (spec, unit, number) not in self.done:
                    what = f"the gradient of {unit!r} in microbatch {number} has no {spec.kind}."
                    raise self._missing_gradient_error(max(due), unit, what, f"one {spec.kind} before the microbatch ends")
        for number, units in self.finishes.items():
            for unit, spec in product(units, self.takers[FINISHING]):
                if (spec, unit, number) not in self.done:
                    what = f"the gradient of {unit!r} has no {spec.kind} of phase finish."
                    expected = f"one {spec.kind} of phase finish before this event"
                    raise self._missing_gradient_error(self.asked[number], unit, what, expected)

    def _missing_gradient_error(self, at: int, unit: str, what: str, expected: str) -> ScheduleError:
        where = f"verify(): event {at}, {self.events[at]}"
        return ScheduleError(problem(where, what, [("unit", unit), ("expected", expected)], "Add it."))
