"""compile_schedule: from the order in which a program uses units to when their data move, and in which memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count
from typing import Any

from fsharp.functional.errors import ScheduleError, problem
from fsharp.stateful.schedule.arena import Item, assign, lower_bound
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.prefetch import bundle, first_wanted, residency, returns
from fsharp.stateful.schedule.program import Event, Program
from fsharp.stateful.schedule.schedule import Memory, Op, OpKind, Phase, Schedule, Stream


def compile_schedule(program: Program, policy: Policy = Policy()) -> Schedule:
    """The schedule of a program under a policy.

    Raises:
        ScheduleError: a memory budget that not even the most frugal schedule keeps.

    Cost: no memory, no collective; milliseconds.
    """
    tried = policy
    while True:
        ops, arena, bound = _with_room(program, tried)
        if policy.memory_budget is None or arena <= policy.memory_budget:
            return Schedule(program, tried, tuple(ops), arena, bound)
        if tried.bucket_nbytes:
            tried = replace(tried, bucket_nbytes=0)
        elif tried.num_buffers > 1:
            tried = replace(tried, prefetch=max(tried.prefetch - 1, 0), buffers=None)
        elif tried.reduce_buffers > 1 or tried.finish_buffers > 1:
            tried = replace(tried, reduce_buffers=1, finish_buffers=1)
        else:
            facts = [("budget", f"{policy.memory_budget:,} bytes"), ("needed", f"{arena:,} bytes")]
            raise ScheduleError(
                problem(
                    "compile_schedule()",
                    "the memory budget is too small, even without prefetch and with one reduction at a time.",
                    facts,
                    "Raise it, or cut the model into smaller units.",
                )
            )


def _with_room(program: Program, policy: Policy) -> tuple[list[Op], int, int]:
    """Ops, arena and lower bound, with units kept for their backward as the policy says."""
    first, *later = returns(program, bundle(program, policy))

    def placed(kept: Iterable[int], within: int | None = None) -> tuple[list[Op], int, int] | None:
        return _place(_Emitter(program, policy, frozenset(kept)).run(), program, within=within)

    best = placed([*first, *chain(*later)] if policy.release == "backward" else ())
    assert best is not None, "there is room without a limit"
    # With more microbatches gradients are there already when the next one begins, and a unit has one address in all of them.
    low, high = 0, len(first) if policy.release == "room" and not any(later) else 0
    while low < high:
        middle = (low + high + 1) // 2
        found = placed(first[:middle], best[1])
        if found is not None:
            low, best = middle, found
        else:
            high = middle - 1
    return best


_SIZES = {"params": "gathered"}  # by kind of buffer, the facts that have its size, if they do not have its name


@dataclass(eq=False)
class _Draft:
    """An op that knows which buffer it fills or frees, and not yet where that is."""

    kind: OpKind
    unit: str
    phase: Phase
    at: int
    use: int = -1
    stream: Stream = "compute"
    after: tuple["_Draft", ...] = ()
    bucket: int = -1
    buffer: tuple[str, str] | None = None
    fills: bool = False
    frees: bool = False
    opens: tuple[str, str] | None = None
    reduction: "_Draft | None" = None  # of an accumulate that opens: it may do so instead
    marks: "_Draft | None" = None  # not an op: the point up to which what this one has freed is not to be used


class _Emitter:
    """Walks the events and writes ops."""

    def __init__(self, program: Program, policy: Policy, kept: frozenset[int] = frozenset()) -> None:
        self.program, self.policy = program, policy
        self.facts = {unit.name: unit for unit in program.units}
        self.bundles = bundle(program, policy)
        self.targets = residency(program, policy, self.bundles, kept)
        self.gradients = _gradients(program)
        self.casts = _casts(program, self.gradients)
        self.ops: list[_Draft] = []
        self.number = count()
        # parameters
        self.held: tuple[str, ...] = ()
        self.gathers: dict[str, _Draft] = {}  # by unit, of what is resident
        self.ready: set[str] = set()  # units that are waited for
        self.arriving: list[_Draft] = []  # waits for what the step before has gathered
        self.updated: tuple[_Draft, ...] = ()  # the last update of this step
        self.settled: set[str] = set()  # units whose updated parameters are waited for
        # gradients
        self.fed: dict[str, _Draft] = {}  # what has last put something where a unit's gradient rests
        self.last_cast: dict[str, _Draft] = {}
        self.left: dict[str, int] = {}  # casts to come in this microbatch
        self.begun: set[str] = set()  # units that have had one
        self.delayed: list[str] = []
        self.under_way: list[_Draft] = []
        self.unfinished: set[str] = set()
        self.opened: set[str] = set()  # units whose gradient has its memory at rest

    def emit(self, kind: OpKind, unit: str, phase: Phase, at: int, **fields: Any) -> _Draft:
        op = _Draft(kind, unit, phase, at, **fields)
        self.ops.append(op)
        return op

    def run(self) -> list[_Draft]:
        events = self.program.events
        carries = bool(events) and events[-1].kind == "update" and self.policy.gather_at_start
        first = first_wanted(self.program, self.policy, self.bundles) if carries else ()
        self.held = self.carried = tuple(b for b in first if b in self.targets[0])
        self.spreads = carries
        microbatch = 0
        self._begin_microbatch(microbatch)
        for i, event in enumerate(events):
            if event.kind in ("forward", "backward"):
                phase: Phase = "forward" if event.kind == "forward" else "backward"
                self._move(i, phase)
                self._reduce_delayed(i)
                self._wait(event.unit, phase, i)
                self.emit("compute", event.unit, phase, i, use=event.use)
            elif event.kind == "forward_end":
                self._move(i, "forward")
            elif event.kind == "backward_end":
                self._let_go(i, "backward")  # first, so that the gradient may go where the parameters were
                self._cast(event, i)
                self._move(i, "backward")
            elif event.kind == "microbatch_end":
                self._end_microbatch(i)
                self._move(i, "backward")
                microbatch += 1
                self._begin_microbatch(microbatch)
            elif event.kind == "reduce":
                while self.under_way:
                    self._land(i)
            elif event.kind == "update":
                self._update(i, is_last=i == len(events) - 1)
        return self.ops

    def _let_go(self, i: int, phase: Phase) -> None:
        target = self.targets[i]
        self._release([b for b in self.held if b not in target], phase, i)
        self.held = tuple(b for b in self.held if b in target)

    def _move(self, i: int, phase: Phase) -> None:
        self._let_go(i, phase)
        target = self.targets[i]
        for name in target:
            if name not in self.held:
                self._gather(name, phase, i, after=self.updated)
        self.held = target

    def _release(self, bundles: Iterable[str], phase: Phase, i: int) -> None:
        for unit in (unit for name in bundles for unit in self.bundles.members[name]):
            gather = self.gathers.pop(unit, None)
            after = (gather,) if gather is not None and unit not in self.ready else ()  # nobody has waited for it
            self.emit("release", unit, phase, i, after=after, buffer=("params", unit), frees=True)
            self.ready.discard(unit)

    def _gather(self, name: str, phase: Phase, i: int, after: tuple[_Draft, ...] = ()) -> None:
        units = self.bundles.members[name]
        number = next(self.number) if len(units) > 1 else -1
        for unit in units:
            self.gathers[unit] = self.emit(
                "gather", unit, phase, i, stream="gather", after=after, bucket=number, buffer=("params", unit), fills=True
            )

    def _wait(self, unit: str, phase: Phase, i: int) -> None:
        facts = self.facts[unit]
        if facts.spread and self.spreads and unit not in self.settled:
            self._settle(unit, i)
        if facts.gathered and unit not in self.ready:
            self.ready.add(unit)
            op = self.emit("wait", unit, phase, i)
            if unit in self.gathers:
                op.after = (self.gathers[unit],)
            else:
                self.arriving.append(op)

    def _settle(self, unit: str, i: int) -> None:
        """Wait for what the update of the step before has sent."""
        self.settled.add(unit)
        self.arriving.append(self.emit("wait", unit, "update", i))

    def _begin_microbatch(self, number: int) -> None:
        self.left, self.begun = dict(self.casts[number]), set()
        last = _reduced_microbatches(self.program.events)
        self.unfinished = {u.name for u in self.program.units if u.finish and u.trainable} if number in last else set()

    def _cast(self, event: Event, i: int) -> None:
        unit, facts = event.unit, self.facts[event.unit]
        if i not in self.gradients:
            return
        is_first = unit not in self.begun
        buffer = ("outgoing", unit) if facts.outgoing else None
        if is_first and buffer:
            self._make_room(i)
        fills = is_first and buffer is not None
        opens = None if facts.outgoing else self._open(unit)
        self.last_cast[unit] = self.emit("cast", unit, "backward", i, use=event.use, buffer=buffer, fills=fills, opens=opens)
        self.left[unit] -= 1
        self.begun.add(unit)
        if self.left[unit] == 0:
            if self.policy.reduce == "delayed":
                self.delayed.append(unit)
            else:
                self._reduce(unit, i)

    def _reduce_delayed(self, i: int) -> None:
        for unit in self.delayed:
            self._reduce(unit, i)
        self.delayed = []

    def _reduce(self, unit: str, i: int) -> None:
        facts, cast = self.facts[unit], self.last_cast[unit]
        buffer = ("outgoing", unit) if facts.outgoing else None
        if facts.reduce:
            self._make_room(i)
            self._launch(self.emit("reduce", unit, "backward", i, stream="reduce", after=(cast,), buffer=buffer))
        elif buffer:
            opens = self._open(unit)
            added = self.emit(
                "accumulate", unit, "backward", i, stream="reduce", after=(cast,), buffer=buffer, frees=True, opens=opens
            )
            self.fed[unit] = added
            self._finish(unit, i, (added,))
        else:
            self.fed[unit] = cast
            self._finish(unit, i, (cast,))

    def _finish(self, unit: str, i: int, after: tuple[_Draft, ...]) -> None:
        if unit not in self.unfinished:
            return
        self.unfinished.discard(unit)
        buffer = ("finishing", unit) if self.facts[unit].finishing else None
        self._make_room(i, finish=True)
        self._launch(
            self.emit("reduce", unit, "finish", i, stream="reduce", after=after, buffer=buffer, fills=buffer is not None)
        )

    def _open(self, unit: str) -> tuple[str, str] | None:
        """The buffer where a unit's gradient rests, for the first op that puts something there."""
        if not self.facts[unit].rest or unit in self.opened:
            return None
        self.opened.add(unit)
        return "rest", unit

    def _launch(self, op: _Draft) -> None:
        """A reduction begins; with ``sum_late=False`` its sum follows at once, and only its memory is spoken for longer."""
        if self.policy.sum_late is not False:
            self.under_way.append(op)
            return
        if op.phase == "backward":
            op.opens = self._open(op.unit)
        added = self.emit("accumulate", op.unit, op.phase, op.at, stream="reduce", after=(op,), buffer=op.buffer)
        self.under_way.append(added)
        self.fed[op.unit] = added
        if op.phase == "backward":
            self._finish(op.unit, op.at, (added,))

    def _make_room(self, i: int, *, finish: bool = False) -> None:
        most = self.policy.finish_buffers if finish else self.policy.reduce_buffers
        while sum((op.phase == "finish") is finish for op in self.under_way) >= most:
            self._land(i)

    def _land(self, i: int) -> None:
        op = self.under_way.pop(0)
        frees = op.buffer is not None
        if op.kind == "accumulate":
            self.emit("accumulate", op.unit, op.phase, i, buffer=op.buffer, frees=frees, marks=op)
            return
        added = self.emit("accumulate", op.unit, op.phase, i, stream="reduce", after=(op,), buffer=op.buffer, frees=frees)
        if op.phase == "backward":
            added.opens, added.reduction = self._open(op.unit), op
        self.fed[op.unit] = added
        if op.phase == "backward":
            self._finish(op.unit, i, (added,))

    def _end_microbatch(self, i: int) -> None:
        self._reduce_delayed(i)
        while any(op.phase == "backward" for op in self.under_way):
            self._land(i)
        for unit in [u.name for u in self.program.units if u.name in self.unfinished]:
            self._finish(unit, i, (self.fed[unit],) if unit in self.fed else ())

    def _update(self, i: int, *, is_last: bool) -> None:
        self._release(self.held, "update", i)
        self.held = ()
        reduced = [op for op in self.ops if op.stream == "reduce"][-1:]
        for unit in [u.name for u in self.program.units if u.spread and self.spreads and u.name not in self.settled]:
            self._settle(unit, i)
        update = self.emit("update", "", "update", i, after=tuple(reduced))
        self.updated = (update,)
        order = dict.fromkeys([e.unit for e in self.program.events if e.unit] + [u.name for u in self.program.units])
        spread = [
            self.emit("gather", unit, "update", i, stream="gather", after=(update,))
            for unit in order
            if self.facts[unit].spread
        ]
        if not (is_last and self.policy.gather_at_start):
            for op in spread:
                self.emit("wait", op.unit, "update", i, after=(op,))
            return
        for name in self.carried:
            self._gather(name, "forward", i, after=(update,))
        settled = {op.unit: op for op in spread}
        for wait in self.arriving:
            wait.after = (settled[wait.unit] if wait.phase == "update" else self.gathers[wait.unit],)


def _gradients(program: Program) -> set[int]:
    """The events at which a gradient of a unit's parameters is there."""
    trainable = {unit.name for unit in program.units if unit.trainable}
    return {i for i, e in enumerate(program.events) if e.kind == "backward_end" and e.unit in trainable and not e.bare}


def _casts(program: Program, gradients: set[int]) -> list[dict[str, int]]:
    """For each microbatch, how many gradients of each unit come in it."""
    result: list[dict[str, int]] = [{}]
    for i, event in enumerate(program.events):
        if event.kind == "microbatch_end":
            result.append({})
        elif i in gradients:
            result[-1][event.unit] = result[-1].get(event.unit, 0) + 1
    return result


def _reduced_microbatches(events: Sequence[Event]) -> set[int]:
    """Microbatches at whose end gradients are wanted at the optimizer's place: the last before each ``reduce``."""
    number, result = 0, set()
    for event in events:
        if event.kind == "microbatch_end":
            number += 1
        elif event.kind == "reduce":
            result.add(number - 1)
    return result


def _place(drafts: Sequence[_Draft], program: Program, *, within: int | None = None) -> tuple[list[Op], int, int] | None:
    """Give every buffer an address, and every op the ops that have to come before it; None if not ``within`` as many bytes."""
    position = {id(op): i for i, op in enumerate(op for op in drafts if op.marks is None)}
    facts = {unit.name: unit for unit in program.units}

    def make_items() -> dict[tuple[str, str], Item]:
        lives = _liveness(drafts).items()
        return {(kind, unit): Item(getattr(facts[unit], _SIZES.get(kind, kind)), spans) for (kind, unit), spans in lives}

    if _open_early(drafts, items := make_items()):
        items = make_items()
    starts = assign(list(items.values()), within=within)
    if starts is None:
        return None
    where = {buffer: Memory(start, item.nbytes) for (buffer, item), start in zip(items.items(), starts, strict=True)}
    freed: dict[tuple[str, str], tuple[Stream, int]] = {}
    ops = []
    for op in drafts:
        if op.buffer and op.frees:
            last = op.marks or op
            freed[op.buffer] = (last.stream, position[id(last)])
        if op.marks:
            continue
        memory, opens = (where[each] if each else None for each in (op.buffer, op.opens))
        after = {position[id(each)] for each in op.after}
        for filled in (memory if op.fills else None, opens):
            if filled:
                # Ops on one stream end in order: the last that freed any of these bytes stands for all of them.
                after |= set(dict(sorted(last for other, last in freed.items() if where[other].overlaps(filled))).values())
        ops.append(Op(op.kind, op.unit, op.phase, op.at, op.use, op.stream, memory, tuple(sorted(after)), op.bucket, opens))
    return ops, max((m.stop for m in where.values()), default=0), lower_bound(list(items.values()))


def _open_early(drafts: Sequence[_Draft], items: Mapping[tuple[str, str], Item]) -> bool:
    """Let reductions leave their results where they rest, which saves a copy, wherever that takes no more memory."""
    change = [0] * (len(drafts) + 1)
    for item in items.values():
        for first, last in item.spans:
            change[first] += item.nbytes
            change[last + 1] -= item.nbytes
    live = list(accumulate(change))
    bound, position = max(live), {id(op): i for i, op in enumerate(drafts)}
    found = False
    for i, op in enumerate(drafts):
        if op.opens is None or op.reduction is None:
            continue
        start, nbytes = position[id(op.reduction)], items[op.opens].nbytes
        if max(live[start:i]) + nbytes <= bound:
            live[start:i] = [each + nbytes for each in live[start:i]]
            op.reduction.opens, op.opens, found = op.opens, None, True
    return found


def _liveness(drafts: Sequence[_Draft]) -> dict[tuple[str, str], tuple[tuple[int, int], ...]]:
    """The spans of positions between which each buffer is live; one that a step hands to the next is so at both ends."""
    spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
    since: dict[tuple[str, str], int] = {}
    for i, op in enumerate(drafts):
        if op.buffer and op.fills:
            since[op.buffer] = i
        if op.opens:
            since[op.opens] = i
        if op.buffer and op.frees:
            spans.setdefault(op.buffer, []).append((since.pop(op.buffer, 0), i))
    for buffer, start in since.items():
        spans.setdefault(buffer, []).append((start, len(drafts) - 1))
    return {buffer: tuple(each) for buffer, each in spans.items()}
