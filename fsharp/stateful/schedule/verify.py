"""verify: refuse a schedule that would read too early, overwrite, leak, lose a gradient or count it twice.

It knows what ops mean (see :mod:`.schedule`) and nothing of how schedules are made. So a schedule that a
person edited, or that a compiler with a bug wrote, is refused before it touches data.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import product

from fsharp.functional.errors import ScheduleError, problem
from fsharp.stateful.schedule.happens_before import HappensBefore
from fsharp.stateful.schedule.program import UnitFacts
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule, Stream, calls_of

_RUNS_ON: dict[str, Stream] = {"gather": "gather", "reduce": "reduce", "accumulate": "reduce"}  # all others: compute
_UNDO = "Undo the edit, or compile the program again."


def verify(schedule: Schedule) -> None:
    """Check that who runs these ops, step after step, computes what the program says, in the memory that it has.

    An op happens before another if it comes earlier on the same stream, or if a chain of ``after`` says so; the order of
    issue alone means nothing. When a step starts, the step before is over, except for gathers that follow its last update
    and that it did not wait for.

    Raises:
        ScheduleError: a use before its data are there, memory filled while in use, a leak, a gradient that is missing or
            counted twice, a limit of the policy exceeded: with the op, what was expected, and the remedy.

    Cost: linear in the number of ops, times the number of different places in the arena.
    """
    _check_form(schedule)
    order = HappensBefore(schedule.ops)
    for kind in (_Parameters, _Gradients, _Places, _Limits):
        check: _Check = kind(schedule, order)
        for i, op in enumerate(schedule.ops):
            check.see(i, op)
        check.end()


def verify_ranks(schedules: Sequence[Schedule]) -> None:
    """Check that all ranks issue the same collectives in the same order, queue by queue: else they wait for ever.

    Gathers and reductions are two queues if the policy gives them a stream and a process group of their own, else one.

    Raises:
        ScheduleError: ranks that differ, with the first difference and both orders around it.
    """
    apart = all(schedule.policy.separate_groups and not schedule.policy.one_stream for schedule in schedules)
    for kinds in (("gather",), ("reduce",)) if apart else (("gather", "reduce"),):
        queues = [_collectives(schedule, kinds) for schedule in schedules]
        for rank, queue in enumerate(queues):
            if queue == queues[0]:
                continue
            at = next((i for i, (a, b) in enumerate(zip(queues[0], queue)) if a != b), min(len(queue), len(queues[0])))
            around = slice(max(at - 2, 0), at + 3)
            rows = [(f"rank {r}", "; ".join(queues[r][around]) or "no more") for r in (0, rank)]
            what = f"collective {at} on the {' and '.join(kinds)} stream differs between ranks 0 and {rank}."
            remedy = "Every rank has to enter the same units in the same order, and to compile with the same policy."
            raise ScheduleError(problem("verify_ranks()", what, rows, remedy))


def _collectives(schedule: Schedule, kinds: Sequence[str]) -> list[str]:
    facts = {unit.name: unit for unit in schedule.program.units}
    queue: list[str] = []
    bucket = (-1, "")
    for op in schedule.ops:
        calls = calls_of(op, facts[op.unit]) if op.kind in kinds else ()
        if calls:
            text = f"{op.kind} {op.unit} {op.phase} ({', '.join(f'{c.op} {c.axis} {c.nbytes}' for c in calls)})"
            if op.bucket != -1 and (op.bucket, op.kind) == bucket:
                queue[-1] += f" + {text}"
            else:
                queue.append(text)
            bucket = (op.bucket, op.kind)
    return queue


def _refusal(i: int, op: Op, what: str, expected: str, remedy: str = _UNDO) -> ScheduleError:
    return ScheduleError(problem(f"verify(): op {i}, {op}", what, [("unit", op.unit or "-"), ("expected", expected)], remedy))


def _unordered(i: int, op: Op, what: str, j: int, ops: Sequence[Op]) -> ScheduleError:
    j %= len(ops)
    what = f"{what} op {j}, {ops[j]}: nothing orders it after that."
    return _refusal(i, op, what, f"{j} among the ops it runs after", f"Add {j} to its `after`.")


def _check_form(schedule: Schedule) -> None:
    """Units, streams, positions and sizes, whatever the order."""
    arena, budget = schedule.arena, schedule.policy.memory_budget
    facts, events = {unit.name: unit for unit in schedule.program.units}, schedule.program.events
    what = "larger than the memory budget" if budget is not None and arena > budget else ""
    if what := "smaller than what is live at once" if arena < schedule.bound else what:
        rows = [("arena", f"{arena:,} bytes"), ("live at once", f"{schedule.bound:,} bytes"), ("memory budget", budget)]
        remedy = "Raise Policy.memory_budget, or lower prefetch and buffers."
        raise ScheduleError(problem("verify()", f"the arena is {what}.", rows, remedy))
    at, buckets = 0, dict[tuple[str, int], int]()
    for i, op in enumerate(schedule.ops):
        if op.unit not in facts and (op.unit or op.kind != "update"):
            raise _refusal(i, op, "the program has no such unit.", f"one of {sorted(facts)}")
        if op.stream != _RUNS_ON.get(op.kind, "compute"):
            raise _refusal(i, op, "runs on the wrong stream.", f"stream {_RUNS_ON.get(op.kind, 'compute')}")
        if not at <= op.at < len(events):
            raise _refusal(i, op, f"is issued at event {op.at}.", f"an event from {at} to {len(events) - 1}")
        if any(not 0 <= j < len(schedule.ops) or j == i for j in op.after):
            raise _refusal(i, op, f"runs after ops {op.after}.", f"other positions, from 0 to {len(schedule.ops) - 1}")
        if op.bucket != -1 and buckets.setdefault((op.kind, op.bucket), i - 1) != i - 1:
            raise _refusal(i, op, f"is apart from the others of bucket {op.bucket}.", "ops of one bucket next to each other")
        at, buckets[op.kind, op.bucket] = op.at, i
        _check_size(i, op, facts.get(op.unit, UnitFacts("")), arena)
    for kind, kinds in (("compute", ("forward", "backward")), ("update", ("update",))):
        want = [(i, event.unit, event.kind, event.use) for i, event in enumerate(events) if event.kind in kinds]
        have = [(op.at, op.unit, op.phase, op.use) for op in schedule.ops if op.kind == kind]
        if have != want:
            k = next((k for k, (a, b) in enumerate(zip(have, want)) if a != b), min(len(have), len(want)))
            rows = [("op", str(have[k : k + 1])), ("expected", str(want[k : k + 1]))]
            what = f"the ops of kind {kind} do not follow the program, from the one with number {k} on."
            raise ScheduleError(problem("verify()", what, rows, _UNDO))


def _check_size(i: int, op: Op, facts: UnitFacts, arena: int) -> None:
    nbytes = 0
    if op.kind == "release" or (op.kind == "gather" and op.phase != "update"):
        nbytes = facts.gathered
        if not nbytes:
            raise _refusal(i, op, "there is nothing to gather or release.", "gathers of units that do not rest in full")
    elif op.kind in ("cast", "reduce", "accumulate"):
        nbytes = facts.finishing if op.phase == "finish" else facts.outgoing
    if (op.memory.nbytes if op.memory else 0) != nbytes:
        raise _refusal(i, op, "its memory is of the wrong size.", f"{nbytes:,} bytes")
    may_open = op.kind in ("cast", "reduce", "accumulate") and op.phase == "backward"
    if op.opens and not (may_open and op.opens.nbytes == facts.rest):
        expected = f"{facts.rest:,} bytes, in an op that puts a gradient to rest"
        raise _refusal(i, op, "what it opens is of the wrong size, or not its business.", expected)
    for memory in (op.memory, op.opens):
        if memory and not 0 <= memory.start <= memory.stop <= arena:
            raise _refusal(i, op, "its memory is outside of the arena.", f"bytes 0 to {arena:,}")


class _Check:
    """One pass over all ops; each sees what the ones before it have passed."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        self.order, self.policy, self.events = order, schedule.policy, schedule.program.events
        self.facts = {unit.name: unit for unit in schedule.program.units}

    def see(self, i: int, op: Op) -> None:
        raise NotImplementedError

    def end(self) -> None:
        pass


class _Parameters(_Check):
    """Full copies and updated parameters: there before they are used, of this step's values, gone after."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.spans: dict[str, list[tuple[int, int]]] = {}
        for unit, first, last in schedule.program.spans():
            self.spans.setdefault(unit, []).append((first, last))
        self.carried = order.carried()
        self.copies = dict(self.carried)  # by unit, the gather of the copy that is there
        steps = enumerate(order.ops, -len(order.ops))
        waits = {i: op.unit for i, op in steps if op.kind == "wait" and op.phase != "update"}
        self.waited = {unit for i, unit in waits.items() if i > self.carried.get(unit, 0)}
        self.entered: set[int] = set()  # events whose compute was seen
        for i in (i + len(order.ops) for i in self.carried.values()):
            if i < order.last_update:
                what = "is gathered and never released: a leak, and stale once the parameters are updated."
                raise _refusal(i, order.ops[i], what, "a release after its last use")
        tail = order.tail()
        self.last_gather = tail[-1] if tail else None
        settled = {op.unit for op in order.ops[order.last_update :] if op.kind == "wait" and op.phase == "update"}
        spread = {order.ops[i].unit: i for i in tail if order.ops[i].phase == "update"}
        self.arriving = {unit: i for unit, i in spread.items() if unit not in settled}  # updated ones, not yet waited for
        self.stale: set[str] = set()  # updated, not spread
        self.updated = -1

    def see(self, i: int, op: Op) -> None:
        steps = {"gather": self._gather, "wait": self._wait, "compute": self._compute, "release": self._release}
        if step := {**steps, "update": self._update}.get(op.kind):
            step(i, op)

    def _gather(self, i: int, op: Op) -> None:
        self.last_gather = i
        if self.updated >= 0 and not self.order.before(self.updated, i):
            raise _unordered(i, op, "may read stale parameters, before", self.updated, self.order.ops)
        if op.phase == "update":
            if op.unit not in self.stale:
                raise _refusal(i, op, "brings updated parameters twice, or before an update.", "one after each update")
            self.stale.discard(op.unit)
            self.arriving[op.unit] = i
            return
        if op.unit in self.stale:
            raise _refusal(i, op, "gathers stale parameters.", "the gather of phase update first")
        if op.unit in self.copies:
            what = f"is gathered again while its copy of op {self.copies[op.unit] % len(self.order.ops)} is there."
            raise _refusal(i, op, what, "a release in between", "Release it first, or drop this gather.")
        self.copies[op.unit] = i

    def _wait(self, i: int, op: Op) -> None:
        gather = (self.arriving if op.phase == "update" else self.copies).get(op.unit)
        if gather is None and op.phase == "update" and self.facts[op.unit].spread:
            return
        if gather is None:
            raise _refusal(i, op, "waits for a gather that was not made, or whose copy is released.", "a gather before it")
        if not self.order.before(gather, i):
            raise _unordered(i, op, "does not wait for its gather,", gather, self.order.ops)
        if op.phase == "update":
            self.arriving.pop(op.unit)
        else:
            self.waited.add(op.unit)

    def _compute(self, i: int, op: Op) -> None:
        self.entered.add(op.at)
        if op.unit in self.arriving or op.unit in self.stale:
            raise _refusal(i, op, "uses parameters without a wait for those that the update has changed.", "a wait before it")
        if self.facts[op.unit].gathered and op.unit not in self.copies:
            raise _refusal(i, op, "uses a unit that is not gathered.", "a gather and a wait after its last release")
        if self.facts[op.unit].gathered and op.unit not in self.waited:
            what = f"uses a unit before its gather, op {self.copies[op.unit] % len(self.order.ops)}, is waited for."
            raise _refusal(i, op, what, "a wait between the two", "Add the wait.")

    def _release(self, i: int, op: Op) -> None:
        if op.unit not in self.copies:
            raise _refusal(i, op, "releases a unit that is not gathered.", "one release for each gather")
        for first, last in self.spans.get(op.unit, ()):
            if first <= op.at < last and first in self.entered:
                what = f"is released while in use: its use from event {first} ends at event {last}."
                raise _refusal(i, op, what, f"no release before event {last}", "Move the release behind the end of the use.")
        self.copies.pop(op.unit)
        self.waited.discard(op.unit)

    def _update(self, i: int, op: Op) -> None:
        for unit, gather in self.copies.items():
            what = f"the copy of {unit!r} made by op {gather % len(self.order.ops)} survives the update, and is stale after it."
            raise _refusal(i, op, what, f"a release of {unit!r} before the update, or its gather after")
        if self.last_gather is not None and not self.order.before(self.last_gather, i):
            raise _unordered(i, op, "changes what may still be read by", self.last_gather, self.order.ops)
        self._check_spread()
        self.updated = i
        self.stale = {unit.name for unit in self.facts.values() if unit.spread}

    def _check_spread(self) -> None:
        for unit in sorted(self.stale):
            what = f"the updated parameters of {unit!r} never come to where they rest."
            raise _refusal(self.updated, self.order.ops[self.updated], what, "a gather of phase update after it")

    def end(self) -> None:
        self._check_spread()


class _Gradients(_Check):
    """Each gradient is cast, reduced, added and finished once, in this order."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.ends = [i for i, event in enumerate(self.events) if event.kind == "microbatch_end"]
        self.asked = [i for i, event in enumerate(self.events) if event.kind == "reduce"]
        self.due: dict[tuple[str, int], dict[int, int]] = {}  # by unit and microbatch: where each use's gradient is there
        for i, event in enumerate(self.events):
            if event.kind == "backward_end" and self.facts[event.unit].trainable and not event.bare:
                self.due.setdefault((event.unit, bisect_left(self.ends, i)), {})[event.use] = i
        self.finishes = {bisect_left(self.asked, end) for end in self.ends} - {len(self.asked)}
        self.cast: dict[tuple[str, int], set[int]] = {}
        self.done: dict[tuple[str, str, str, int], int] = {}  # by kind, phase, unit and number of microbatch or `reduce`
        self.written: dict[str, int] = {}  # by unit, the op that last changed its gradient
        self.waiting: dict[str, int] = {}  # by unit, the cast whose gradient has yet to be accumulated
        self.last = -1  # op of the reduce stream

    def see(self, i: int, op: Op) -> None:
        if op.kind == "cast":
            self._cast(i, op)
        elif op.kind in ("reduce", "accumulate"):
            self._leave(i, op)
            self.last = i
        elif op.kind == "update" and self.last >= 0 and not self.order.before(self.last, i):
            raise _unordered(i, op, "may run before the end of", self.last, self.order.ops)

    def _key(self, op: Op) -> tuple[str, int]:
        return op.unit, bisect_left(self.asked if op.phase == "finish" else self.ends, op.at)

    def _cast(self, i: int, op: Op) -> None:
        key = self._key(op)
        there = self.due.get(key, {}).get(op.use)
        if there is None:
            what = f"casts a gradient that use {op.use} does not have in this microbatch."
            raise _refusal(i, op, what, f"uses {sorted(self.due.get(key, ()))}")
        if op.at < there:
            raise _refusal(i, op, f"is issued at event {op.at}, before the gradient is there.", f"event {there} or later")
        if op.use in self.cast.setdefault(key, set()):
            raise _refusal(i, op, f"casts the gradient of use {op.use} twice.", "one cast for each use", "Drop one of them.")
        self.cast[key].add(op.use)
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
                raise _refusal(i, op, what, f"a position before {at}", f"Move it before op {at}.")
        self.written[unit] = i

    def _leave(self, i: int, op: Op) -> None:
        key = self._key(op)
        mine = (op.kind, op.phase, *key)
        if mine in self.done:
            raise _refusal(i, op, f"happens twice: op {self.done[mine]} has done it.", "one for each gradient", "Drop one.")
        if missing := self._missing(op, key):
            raise _refusal(i, op, f"{missing}.", f"{op.kind} once, after what it needs")
        reduced = self.done.get(("reduce", op.phase, *key), -1) if op.kind == "accumulate" else -1
        source = reduced if reduced >= 0 else self.written.get(op.unit, -1)
        if source >= 0 and not self.order.before(source, i):
            raise _unordered(i, op, "may start before the end of", source, self.order.ops)
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
        if not self.due.get(key):
            return "takes away a gradient that this microbatch does not have"
        uses = set(self.due[key]) - self.cast.get(key, set())
        return f"comes before the cast of use {min(uses)}" if uses else ""

    def end(self) -> None:
        for (unit, number), uses in self.due.items():
            facts = self.facts[unit]
            for use in sorted(set(uses) - self.cast.get((unit, number), set())):
                raise self._lost(uses[use], unit, f"the gradient of use {use} of {unit!r} is never cast.", "one cast of it")
            for kind, wants in (("reduce", facts.reduce), ("accumulate", facts.reduce or facts.outgoing)):
                if wants and (kind, "backward", unit, number) not in self.done:
                    what = f"the gradient of {unit!r} in microbatch {number} has no {kind}."
                    raise self._lost(max(uses.values()), unit, what, f"one {kind} before the microbatch ends")
        finished = [facts.name for facts in self.facts.values() if facts.trainable and facts.finish]
        for number, unit, kind in product(sorted(self.finishes), finished, ("reduce", "accumulate")):
            if (kind, "finish", unit, number) not in self.done:
                what = f"the gradient of {unit!r} has no {kind} of phase finish."
                raise self._lost(self.asked[number], unit, what, f"one {kind} of phase finish before this event")

    def _lost(self, at: int, unit: str, what: str, expected: str) -> ScheduleError:
        where = f"verify(): event {at}, {self.events[at]}"
        return ScheduleError(problem(where, what, [("unit", unit), ("expected", expected)], "Add it."))


class _Places(_Check):
    """No byte of the arena has two owners at a time. That each is filled, and freed, once was seen before."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.live: dict[tuple[str, str], tuple[int, Memory | None]] = {  # by role and unit, the op that filled it, and where
            ("parameters", unit): (i, order.ops[i].memory) for unit, i in order.carried().items()
        }
        self.touched: dict[tuple[Memory, Stream], int] = {}  # the last op on each stream that touched memory now free
        self.slots: dict[str, Memory] = {}

    def see(self, i: int, op: Op) -> None:
        self._see_memory(i, op)
        self._see_rest(i, op)

    def _see_rest(self, i: int, op: Op) -> None:
        """Where gradients rest: opened once, by the first op that puts something there at the latest, up to the end."""
        facts, key = self.facts.get(op.unit, UnitFacts("")), ("gradient at rest", op.unit)
        if op.opens:
            if key in self.live:
                at = self.live[key][0]
                raise _refusal(i, op, f"opens what op {at}, {self.order.ops[at]}, has opened.", "one op that opens it")
            self._fill(i, op, op.opens)
            self.live[key] = i, op.opens
            return
        puts = op.phase == "backward" and (op.kind == "accumulate" or (op.kind == "cast" and not facts.outgoing))
        if puts and facts.rest and key not in self.live:
            what = "puts a gradient where nothing is open for it."
            raise _refusal(i, op, what, "memory in its `opens`, or in that of an op before it")

    def _see_memory(self, i: int, op: Op) -> None:
        if op.memory is None:
            return
        gradient = "finishing gradient" if op.phase == "finish" else "outgoing gradient"
        role = "parameters" if op.kind in ("gather", "release") else gradient
        if op.kind == "gather" and self.slots.setdefault(op.unit, op.memory) != op.memory:
            what = "the unit's copy changes its address within a step, and saved tensors point at the old one."
            raise _refusal(i, op, what, f"{self.slots[op.unit]}")
        key = role, op.unit
        if key not in self.live and (op.kind in ("gather", "cast") or (op.kind, op.phase) == ("reduce", "finish")):
            self._fill(i, op, op.memory)
            self.live[key] = i, op.memory
        elif self.live[key][1] != op.memory:
            what = f"its memory is not that which op {self.live[key][0] % len(self.order.ops)} has filled."
            raise _refusal(i, op, what, f"{self.live[key][1]}")
        if op.kind in ("release", "accumulate"):
            for j in (i, self.live.pop(key)[0]):
                at = op.memory, self.order.ops[j].stream
                self.touched[at] = max(j, self.touched.get(at, j))

    def _fill(self, i: int, op: Op, memory: Memory) -> None:
        for (role, unit), (j, other) in self.live.items():
            if other and other.overlaps(memory):
                what = f"fills memory in which the {role} of {unit!r} is live, since op {j % len(self.order.ops)}."
                raise _refusal(i, op, what, f"no byte of {other}", "Move it, or release that first.")
        for (other, _), j in self.touched.items():
            if other.overlaps(memory) and not self.order.before(j, i):
                raise _unordered(i, op, "may fill memory still in use by", j, self.order.ops)


def _group(op: Op) -> str:
    return op.unit if op.bucket == -1 else f"bucket {op.bucket}"


class _Limits(_Check):
    """What the policy allows: units that are resident, and reductions under way."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.resident = {unit: _group(order.ops[i]) for unit, i in order.carried().items()}
        self.under_way: dict[tuple[str, str], int] = {}
        self.in_use: list[set[str]] = [set() for _ in self.events]
        self.kept: list[set[str]] = [set() for _ in self.events]  # from a forward to the end of its backward
        for unit, first, last in schedule.program.spans():
            for units in self.in_use[first:last]:
                units.add(unit)
        begun = {event.use: i for i, event in enumerate(self.events) if event.kind == "forward"}
        for i, event in enumerate(self.events):
            if event.kind == "backward_end" and self.policy.release != "forward":
                for units in self.kept[begun[event.use] : i]:
                    units.add(event.unit)

    def see(self, i: int, op: Op) -> None:
        if op.kind == "gather" and op.phase != "update":
            self.resident[op.unit] = _group(op)
            used = {self.resident[unit] for unit in self.in_use[op.at] if unit in self.resident}
            kept = {self.resident[unit] for unit in self.kept[op.at] if unit in self.resident}
            ahead = set(self.resident.values()) - used - kept
            if ahead and min(len(used), 1) + len(ahead) > self.policy.num_buffers:  # only the innermost use counts
                what = f"is the unit too many: {sorted(used)} are in use, and {sorted(ahead)} resident beside them."
                raise _refusal(i, op, what, f"at most {self.policy.num_buffers}, or those in use alone", "Gather it later.")
        elif op.kind == "release":
            self.resident.pop(op.unit, None)
        elif op.kind == "reduce":
            self.under_way[op.unit, op.phase] = i
            most = self.policy.finish_buffers if op.phase == "finish" else self.policy.reduce_buffers
            same = [at for (_, phase), at in self.under_way.items() if (phase == "finish") is (op.phase == "finish")]
            if len(same) > most:
                what = f"is the reduction too many: ops {sorted(same)} are under way."
                raise _refusal(i, op, what, f"at most {most}", "Accumulate another first.")
        elif op.kind == "accumulate":
            self.under_way.pop((op.unit, op.phase), None)
