"""What :func:`~fsharp.stateful.schedule.verify.verify` checks op by op: parameters, gradients, memory."""

from bisect import bisect_left
from itertools import product

from fsharp.errors import ScheduleError, problem
from fsharp.stateful.schedule.byte_ranges import ByteRanges
from fsharp.stateful.schedule.happens_before import HappensBefore
from fsharp.stateful.schedule.program import UnitFacts
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule

UNDO = "Undo the edit, or compile the program again."


def refusal(i: int, op: Op, what: str, expected: str, remedy: str = UNDO) -> ScheduleError:
    """An error about one op."""
    return ScheduleError(problem(f"verify(): op {i}, {op}", what, [("unit", op.unit or "-"), ("expected", expected)], remedy))


class Check:
    """One pass over all ops; each sees what the ones before it have passed."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        self.order, self.policy, self.events = order, schedule.policy, schedule.program.events
        self.program = schedule.program
        self.facts = {unit.name: unit for unit in schedule.program.units}

    def see(self, i: int, op: Op) -> None:
        """Check the next op against what came before it."""
        raise NotImplementedError

    def end(self) -> None:
        """Check what has to hold after the last op."""

    def position(self, i: int) -> int:
        """Where an op is; those of the step before have negative numbers."""
        return i % len(self.order.ops)

    def unordered(self, i: int, op: Op, what: str, j: int) -> ScheduleError:
        """The refusal of an op that has to be behind op ``j``, and is not."""
        j = self.position(j)
        what = f"{what} op {j}, {self.order.ops[j]}: nothing orders it after that."
        return refusal(i, op, what, f"{j} among the ops it runs after", f"Add {j} to its `after`.")


class ParameterCheck(Check):
    """Full copies and updated parameters: there before they are used, of this step's values, gone after."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.ends = {first: last for _, first, last in schedule.program.spans()}
        self.open: dict[str, tuple[int, int]] = {}  # by unit, the (last, first) event of the entered use that ends last
        self.carried = order.carried()
        self.copies = dict(self.carried)  # by unit, the gather of the copy that is there
        steps = enumerate(order.ops, -len(order.ops))
        waits = {i: op.unit for i, op in steps if op.kind == "wait" and op.phase != "update"}
        self.waited = {unit for i, unit in waits.items() if i > self.carried.get(unit, 0)}
        for i in (i + len(order.ops) for i in self.carried.values()):
            if i < order.last_update:
                what = "is gathered and never released: a leak, and stale once the parameters are updated."
                raise refusal(i, order.ops[i], what, "a release after its last use")
        tail = order.tail()
        self.last_gather = tail[-1] if tail else None
        settled = {op.unit for op in order.ops[order.last_update :] if op.kind == "wait" and op.phase == "update"}
        update_gather = {order.ops[i].unit: i for i in tail if order.ops[i].phase == "update"}
        self.arriving = {
            unit: i for unit, i in update_gather.items() if unit not in settled
        }  # updated ones, not yet waited for
        self.stale: set[str] = set()  # updated, not gathered
        self.updated = -1

    def see(self, i: int, op: Op) -> None:
        """Follow which units' parameters are gathered, waited for and released."""
        if op.kind == "gather":
            self._gather(i, op)
        elif op.kind == "wait":
            self._wait(i, op)
        elif op.kind == "compute":
            self._compute(i, op)
        elif op.kind == "release":
            self._release(i, op)
        elif op.kind == "update":
            self._update(i, op)

    def _gather(self, i: int, op: Op) -> None:
        self.last_gather = i
        if self.updated >= 0 and not self.order.before(self.updated, i):
            raise self.unordered(i, op, "may read stale parameters, before", self.updated)
        if op.phase == "update":
            if op.unit not in self.stale:
                raise refusal(i, op, "brings updated parameters twice, or before an update.", "one after each update")
            self.stale.discard(op.unit)
            self.arriving[op.unit] = i
            return
        if op.unit in self.stale:
            raise refusal(i, op, "gathers stale parameters.", "the gather of phase update first")
        if op.unit in self.copies:
            what = f"is gathered again while its copy of op {self.position(self.copies[op.unit])} is there."
            raise refusal(i, op, what, "a release in between", "Release it first, or drop this gather.")
        self.copies[op.unit] = i

    def _wait(self, i: int, op: Op) -> None:
        gather = (self.arriving if op.phase == "update" else self.copies).get(op.unit)
        if gather is None and op.phase == "update" and self.facts[op.unit].update_gather:
            return
        if gather is None:
            raise refusal(i, op, "waits for a gather that was not made, or whose copy is released.", "a gather before it")
        if not self.order.before(gather, i):
            raise self.unordered(i, op, "does not wait for its gather,", gather)
        if op.phase == "update":
            self.arriving.pop(op.unit)
        else:
            self.waited.add(op.unit)

    def _compute(self, i: int, op: Op) -> None:
        self.open[op.unit] = max(self.open.get(op.unit, (-1, -1)), (self.ends[op.at], op.at))
        if op.unit in self.arriving or op.unit in self.stale:
            raise refusal(i, op, "uses parameters without a wait for those that the update has changed.", "a wait before it")
        if self.facts[op.unit].gathered and op.unit not in self.copies:
            raise refusal(i, op, "uses a unit that is not gathered.", "a gather and a wait after its last release")
        if self.facts[op.unit].gathered and op.unit not in self.waited:
            what = f"uses a unit before its gather, op {self.position(self.copies[op.unit])}, is waited for."
            raise refusal(i, op, what, "a wait between the two", "Add the wait.")

    def _release(self, i: int, op: Op) -> None:
        if op.unit not in self.copies:
            raise refusal(i, op, "releases a unit that is not gathered.", "one release for each gather")
        last, first = self.open.get(op.unit, (-1, -1))
        if op.at < last:
            what = f"is released while in use: its use from event {first} ends at event {last}."
            raise refusal(i, op, what, f"no release before event {last}", "Move the release behind the end of the use.")
        self.copies.pop(op.unit)
        self.waited.discard(op.unit)

    def _update(self, i: int, op: Op) -> None:
        for unit, gather in self.copies.items():
            what = f"the copy of {unit!r} made by op {self.position(gather)} survives the update, and is stale after it."
            raise refusal(i, op, what, f"a release of {unit!r} before the update, or its gather after")
        if self.last_gather is not None and not self.order.before(self.last_gather, i):
            raise self.unordered(i, op, "changes what may still be read by", self.last_gather)
        self._check_spread()
        self.updated = i
        self.stale = {unit.name for unit in self.facts.values() if unit.update_gather}

    def _check_spread(self) -> None:
        for unit in sorted(self.stale):
            what = f"the updated parameters of {unit!r} never come to where they rest."
            raise refusal(self.updated, self.order.ops[self.updated], what, "a gather of phase update after it")

    def end(self) -> None:
        """Check that updated parameters are where they rest, and that no op follows a gather for the next step."""
        self._check_spread()
        first = len(self.order.ops) + min(self.carried.values(), default=0)
        for i, op in enumerate(self.order.ops[first:], first):
            if op.kind != "gather" or op.phase == "update":
                what = f"comes after op {first}, a gather for the next step, which is issued when this step has ended."
                raise refusal(i, op, what, f"a position before {first}", "Move it before that, or to the next step.")


class GradientCheck(Check):
    """Each gradient is cast, reduced, added and finished once, in this order."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.ends = [i for i, event in enumerate(self.events) if event.kind == "microbatch_end"]
        self.asked = [i for i, event in enumerate(self.events) if event.kind == "reduce"]
        self.due: dict[tuple[str, int], dict[int, int]] = {}  # by unit and microbatch, by event the use that has a gradient
        for i, event in enumerate(self.events):
            if event.has_gradient:
                self.due.setdefault((event.unit, bisect_left(self.ends, i)), {})[i] = event.use
        self.finishes = {bisect_left(self.asked, end) for end in self.ends} - {len(self.asked)}
        self.cast: dict[tuple[str, int], set[int]] = {}
        self.done: dict[tuple[str, str, str, int], int] = {}  # by kind, phase, unit and number of microbatch or `reduce`
        self.written: dict[str, int] = {}  # by unit, the op that last changed its gradient
        self.waiting: dict[str, int] = {}  # by unit, the cast whose gradient has yet to be accumulated
        self.last = -1  # op of the reduce stream

    def see(self, i: int, op: Op) -> None:
        """Follow each gradient from its casts to the optimizer's place."""
        if op.kind == "cast":
            self._cast(i, op)
        elif op.kind in ("reduce", "accumulate"):
            self._leave(i, op)
            self.last = i
        elif op.kind == "update" and self.last >= 0 and not self.order.before(self.last, i):
            raise self.unordered(i, op, "may run before the end of", self.last)

    def _key(self, op: Op) -> tuple[str, int]:
        return op.unit, bisect_left(self.asked if op.phase == "finish" else self.ends, op.at)

    def _cast(self, i: int, op: Op) -> None:
        key = self._key(op)
        due = self.due.get(key, {})
        if due.get(op.at) != op.use:
            there = [at for at, use in due.items() if use == op.use]
            if not there:
                what = f"casts a gradient that use {op.use} does not have in this microbatch."
                raise refusal(i, op, what, f"uses {sorted(due.values())}")
            what = f"is issued at event {op.at}, and its gradient is there at the end of the use's backward alone."
            raise refusal(i, op, what, f"event {there[0]}")
        if op.at in self.cast.setdefault(key, set()):
            raise refusal(i, op, f"casts the gradient of use {op.use} twice.", "one cast for each use", "Drop one of them.")
        self.cast[key].add(op.at)
        self._write(i, op)
        if self.facts[op.unit].outgoing or self.facts[op.unit].reduce:
            self.waiting[op.unit] = i

    def _write(self, i: int, op: Op) -> None:
        """Note a change of a unit's gradient, unless what it should have been part of has left already."""
        unit, number = self._key(op)
        later = [("reduce", "backward", unit, number), ("accumulate", "backward", unit, number)] if op.kind == "cast" else []
        for done in (*later, ("reduce", "finish", unit, bisect_left(self.asked, op.at))):
            if done in self.done:
                at = self.done[done]
                what = f"comes after op {at}, {self.order.ops[at]}, which it should be part of."
                raise refusal(i, op, what, f"a position before {at}", f"Move it before op {at}.")
        self.written[unit] = i

    def _leave(self, i: int, op: Op) -> None:
        key = self._key(op)
        mine = (op.kind, op.phase, *key)
        if mine in self.done:
            raise refusal(i, op, f"happens twice: op {self.done[mine]} has done it.", "one for each gradient", "Drop one.")
        if missing := self._missing(op, key):
            raise refusal(i, op, f"{missing}.", f"{op.kind} once, after what it needs")
        reduced = self.done.get(("reduce", op.phase, *key), -1) if op.kind == "accumulate" else -1
        source = reduced if reduced >= 0 else self.written.get(op.unit, -1)
        if source >= 0 and not self.order.before(source, i):
            raise self.unordered(i, op, "may start before the end of", source)
        self.done[mine] = i
        if mine[:2] == ("accumulate", "backward"):
            self._write(i, op)
            self.waiting.pop(op.unit, None)

    def _missing(self, op: Op, key: tuple[str, int]) -> str:
        """What an op that takes a gradient away lacks; empty if nothing."""
        facts, finish = self.facts[op.unit], op.phase == "finish"
        if not facts.trainable:
            return "is about a frozen unit, which has no gradient"
        if finish and not (facts.finish and key[1] in self.finishes):
            return "no `reduce` event asks for it"
        if op.kind == "accumulate" and (finish or facts.reduce) and ("reduce", op.phase, *key) not in self.done:
            return "adds a result without a reduction, in time, that makes it"
        if finish:
            return f"comes before op {self.waiting[op.unit]} is accumulated" if op.unit in self.waiting else ""
        if not facts.reduce and not (op.kind == "accumulate" and facts.outgoing):
            return "takes away a gradient that stays where it is"
        due = self.due.get(key, {})
        if not due:
            return "takes away a gradient that this microbatch does not have"
        missing = due.keys() - self.cast.get(key, set())
        return f"comes before the cast of use {due[min(missing)]}" if missing else ""

    def end(self) -> None:
        """All gradients have come to where they are wanted."""
        for (unit, number), due in self.due.items():
            facts = self.facts[unit]
            for at in sorted(due.keys() - self.cast.get((unit, number), set())):
                raise self._lost(at, unit, f"the gradient of use {due[at]} of {unit!r} is never cast.", "one cast of it")
            for kind, wants in (("reduce", facts.reduce), ("accumulate", facts.reduce or facts.outgoing)):
                if wants and (kind, "backward", unit, number) not in self.done:
                    what = f"the gradient of {unit!r} in microbatch {number} has no {kind}."
                    raise self._lost(max(due), unit, what, f"one {kind} before the microbatch ends")
        finished = [facts.name for facts in self.facts.values() if facts.trainable and facts.finish]
        for number, unit, kind in product(sorted(self.finishes), finished, ("reduce", "accumulate")):
            if (kind, "finish", unit, number) not in self.done:
                what = f"the gradient of {unit!r} has no {kind} of phase finish."
                raise self._lost(self.asked[number], unit, what, f"one {kind} of phase finish before this event")

    def _lost(self, at: int, unit: str, what: str, expected: str) -> ScheduleError:
        where = f"verify(): event {at}, {self.events[at]}"
        return ScheduleError(problem(where, what, [("unit", unit), ("expected", expected)], "Add it."))


class OffloadCheck(Check):
    """What rests in host memory: on the device for the update that its event is of, and back once after that."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.fetched: dict[str, int] = {}  # by unit, its fetch, for the update to come
        self.due: dict[str, int] = {}  # by unit, its fetch, until it is offloaded
        self.updated = -1
        self.seen = 0  # events up to the last update
        self.computed = -1  # the last op of compute

    def see(self, i: int, op: Op) -> None:
        """Follow the way up and down."""
        if op.stream == "compute":
            self.computed = i
        if op.kind == "fetch":
            event = self.events[op.at]
            if (event.kind, event.unit) != ("fetch", op.unit) or op.unit in self.fetched:
                raise refusal(i, op, "is not asked for here, or has happened.", "one for each event that says so")
            if self.computed >= 0 and not self.order.before(self.computed, i):
                raise self.unordered(i, op, "may fill memory still in use by", self.computed)
            self.fetched[op.unit] = i
        elif op.kind == "update":
            self._check_over()
            asked = {event.unit for event in self.events[self.seen : op.at] if event.kind == "fetch"}
            for unit in sorted(asked - set(self.fetched)):
                raise refusal(i, op, f"updates {unit!r}, whose state is in host memory.", f"a fetch of {unit!r} before it")
            for j in self.fetched.values():
                if not self.order.before(j, i):
                    raise self.unordered(i, op, "may read state before the end of", j)
            self.updated, self.seen = i, op.at
            self.due, self.fetched = self.fetched, {}
        elif op.kind == "offload":
            if op.unit not in self.due or op.at != self.seen:
                raise refusal(i, op, "copies what was not fetched, or has left already.", "one for each fetch, at the update")
            if not self.order.before(self.updated, i):
                raise self.unordered(i, op, "may copy state before the end of", self.updated)
            del self.due[op.unit]

    def _check_over(self) -> None:
        for unit, j in self.due.items():
            what = f"the state of {unit!r} stays on the device."
            raise refusal(j, self.order.ops[j], what, f"an offload of {unit!r} after the update")

    def end(self) -> None:
        """All of it is back."""
        self._check_over()
        for unit, j in self.fetched.items():
            what = f"no update follows for which {unit!r} is fetched."
            raise refusal(j, self.order.ops[j], what, "an update after it")


class MemoryCheck(Check):
    """No byte of the arena has two owners at a time. That each is filled, and freed, once was seen before."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.live: dict[tuple[str, str], tuple[int, Memory | None]] = {}  # by role and unit, the op that filled it, and where
        self.owners = ByteRanges[tuple[str, str, int]]()  # of live bytes: role, unit, the op that filled them
        self.freed = ByteRanges[tuple[int, int]]()  # of bytes that were freed: the ops that filled and freed them last
        self.slots: dict[str, Memory] = {}
        for unit, i in order.carried().items():
            self._own(i, ("parameters", unit), order.ops[i].memory)

    def see(self, i: int, op: Op) -> None:
        """Follow which op owns which bytes of the arena."""
        self._see_memory(i, op)
        self._see_rest(i, op)

    def _own(self, i: int, key: tuple[str, str], memory: Memory | None) -> None:
        self.live[key] = i, memory
        if memory:
            self.owners.put(memory.start, memory.stop, (*key, i))

    def _see_rest(self, i: int, op: Op) -> None:
        """Where gradients rest: opened once, by the first op that puts something there at the latest, up to the end."""
        facts, key = self.facts.get(op.unit, UnitFacts("")), ("gradient at rest", op.unit)
        if op.opens:
            if key in self.live:
                at = self.live[key][0]
                raise refusal(i, op, f"opens what op {at}, {self.order.ops[at]}, has opened.", "one op that opens it")
            self._fill(i, op, op.opens)
            self._own(i, key, op.opens)
            return
        puts = op.phase == "backward" and (op.kind == "accumulate" or (op.kind == "cast" and not facts.outgoing))
        if puts and facts.rest and key not in self.live:
            what = "puts a gradient where nothing is open for it."
            raise refusal(i, op, what, "memory in its `opens`, or in that of an op before it")

    def _see_memory(self, i: int, op: Op) -> None:
        if op.memory is None:
            return
        gradient = "finishing gradient" if op.phase == "finish" else "outgoing gradient"
        role = "parameters" if op.kind in ("gather", "release") else gradient
        if op.kind == "gather" and self.slots.setdefault(op.unit, op.memory) != op.memory:
            what = "the unit's copy changes its address within a step, and saved tensors point at the old one."
            raise refusal(i, op, what, f"{self.slots[op.unit]}")
        key = role, op.unit
        if key not in self.live and (op.kind in ("gather", "cast") or (op.kind, op.phase) == ("reduce", "finish")):
            self._fill(i, op, op.memory)
            self._own(i, key, op.memory)
        elif self.live[key][1] != op.memory:
            what = f"its memory is not that which op {self.position(self.live[key][0])} has filled."
            raise refusal(i, op, what, f"{self.live[key][1]}")
        if op.kind in ("release", "accumulate"):
            filled, _ = self.live.pop(key)
            self.owners.clear(op.memory.start, op.memory.stop)
            self.freed.put(op.memory.start, op.memory.stop, (filled, i))  # who filled them waited for those before

    def _fill(self, i: int, op: Op, memory: Memory) -> None:
        for role, unit, j in self.owners.over(memory.start, memory.stop):
            what = f"fills memory in which the {role} of {unit!r} is live, since op {self.position(j)}."
            raise refusal(i, op, what, f"no byte of {self.live[role, unit][1]}", "Move it, or release that first.")
        for filled, freed in self.freed.over(memory.start, memory.stop):
            for j in (freed, filled):
                if not self.order.before(j, i):
                    raise self.unordered(i, op, "may fill memory still in use by", j)
