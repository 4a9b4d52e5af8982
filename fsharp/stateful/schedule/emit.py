"""Emitter: walks the events of a program and writes the ops of a step, which do not know yet where in memory they are."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from fsharp.stateful.schedule.costs import GLOO, Bundling, bucket_limit, bundles
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.prefetch import first_wanted, residency
from fsharp.stateful.schedule.program import Event, Program, gradients_of
from fsharp.stateful.schedule.schedule import Op, OpKind, Phase, Stream, calls_of, channel


@dataclass(eq=False)
class UnplacedOp:
    """An op that knows which buffer it fills or frees, and not yet where that is."""

    kind: OpKind
    unit: str
    phase: Phase
    at: int
    use: int = -1
    stream: Stream = "compute"
    after: tuple["UnplacedOp", ...] = ()
    bucket: int = -1
    buffer: tuple[str, str] | None = None
    fills: bool = False
    frees: bool = False
    opens: tuple[str, str] | None = None
    reduction: "UnplacedOp | None" = None  # of an accumulate that opens: it may do so instead
    marks: "UnplacedOp | None" = None  # not an op: the point up to which what this one has freed is not to be used


class Buckets:
    """Which units move as one, by what moves: their parameters, gradients, sums of gradients, updated parameters."""

    def __init__(self, program: Program, policy: Policy) -> None:
        self.program, self.policy = program, policy
        used = [event.unit for event in program.events if event.kind in ("forward", "backward")]
        listed = [facts.name for facts in program.units]
        done = _in_order_of_gradients(program)
        self.gathers = self._bundles("gather", "forward", used, [u.name for u in program.units if u.gathered])
        self.reduces = self._bundles("reduce", "backward", done, listed)
        self.finishes = self._bundles("reduce", "finish", done, listed)
        self.update_gathers = self._bundles("gather", "update", [*(e.unit for e in program.events if e.unit), *listed], listed)

    def _bundles(self, kind: OpKind, phase: Phase, order: Iterable[str], units: Iterable[str]) -> Bundling:
        facts = {unit.name: unit for unit in self.program.units}
        op = Op(kind, "", phase, 0)
        wanted = dict.fromkeys(units)
        order = [unit for unit in dict.fromkeys([*order, *wanted]) if unit in wanted]
        sent = {unit: sum(call.nbytes for call in calls_of(op, facts[unit])) for unit in order}
        most = self.policy.bucket_nbytes
        if most is None:
            most = bucket_limit(sent.values(), self.policy.link or GLOO)
        groups = {unit: i for i, group in enumerate(self.policy.together) for unit in group}
        return bundles(order, sent, {unit: channel(op, facts[unit]) for unit in order}, most, groups)


class Emitter:
    """Walks the events and writes ops.

    Args:
        program: the step.
        policy: what is allowed.
        buckets: what moves as one.
        kept: uses whose parameters stay from their forward to the end of their backward.
    """

    def __init__(self, program: Program, policy: Policy, buckets: Buckets, kept: Collection[int] = ()) -> None:
        self.program, self.policy, self.buckets = program, policy, buckets
        self.facts = {unit.name: unit for unit in program.units}
        events = program.events
        self.carries = bool(events) and events[-1].kind == "update" and policy.gather_at_start
        first = first_wanted(program, policy, buckets.gathers) if self.carries else ()
        self.changes, self.carried = residency(program, policy, buckets.gathers, kept, first)
        self.casts = gradients_of(events)
        self.last_microbatches = last_microbatches(events)
        self.ops: list[UnplacedOp] = []
        self.numbers = count()
        # parameters
        self.gathers: dict[str, UnplacedOp] = {}  # by unit, of what is resident
        self.ready: set[str] = set()  # units that are waited for
        self.arriving: list[UnplacedOp] = []  # waits for what the step before has gathered
        self.updated: tuple[UnplacedOp, ...] = ()  # the last update of this step
        self.fetched: list[UnplacedOp] = []  # for the next update
        self.settled: set[str] = set()  # units whose updated parameters are waited for
        # gradients; of each bundle together
        self.fed: dict[str, UnplacedOp] = {}  # what has last put something where a unit's gradient rests
        self.last_cast: dict[str, UnplacedOp] = {}
        self.left = Counter[str]()  # by bundle, casts to come in this microbatch
        self.absent = Counter[str]()  # by bundle, units that are yet to have one
        self.begun: dict[str, None] = {}  # units that have had one
        self.delayed: list[str] = []
        self.under_way: list[list[UnplacedOp]] = []
        self.unfinished: dict[str, None] = {}
        self.unready = Counter[str]()  # by bundle, units whose gradient is not there yet to be finished
        self.opened: set[str] = set()  # units whose gradient has its memory at rest

    def emit(self, kind: OpKind, unit: str, phase: Phase, at: int, **fields: Any) -> UnplacedOp:
        """Write one more op at the end."""
        op = UnplacedOp(kind, unit, phase, at, **fields)
        self.ops.append(op)
        return op

    def run(self) -> list[UnplacedOp]:
        """All ops, in the order of issue."""
        events, microbatch = self.program.events, 0
        self._begin_microbatch(microbatch)
        for i, event in enumerate(events):
            if event.kind in ("forward", "backward"):
                phase: Phase = "forward" if event.kind == "forward" else "backward"
                self._move(i, phase)
                self._reduce_delayed(i)
                self._wait(event.unit, phase, i)
                self.emit("compute", event.unit, phase, i, use=event.use)
            elif event.kind == "backward_end":
                self._release(i, "backward")  # first, so that the gradient may go where the parameters were
                self._cast(event, i)
                self._gather(self.changes[i].enter, "backward", i, after=self.updated)
            elif event.kind == "microbatch_end":
                self._end_microbatch(i)
                self._move(i, "backward")
                microbatch += 1
                self._begin_microbatch(microbatch)
            elif event.kind == "update":
                self._update(i, is_last=i == len(events) - 1)
            else:
                self._move(i, "forward" if event.kind == "forward_end" else "backward")
                while event.kind == "reduce" and self.under_way:
                    self._land(i)
                if event.kind == "fetch":  # into memory that what was computed before may have had
                    before = next(((op,) for op in reversed(self.ops) if op.stream == "compute" and op.marks is None), ())
                    self.fetched.append(self.emit("fetch", event.unit, "update", i, stream="host", after=before))
        return self.ops

    def _number(self, units: Sequence[str]) -> int:
        """The number of a bucket; -1 for a unit alone."""
        return next(self.numbers) if len(units) > 1 else -1

    # ------------------------------------------------------------ parameters

    def _move(self, i: int, phase: Phase) -> None:
        self._release(i, phase)
        self._gather(self.changes[i].enter, phase, i, after=self.updated)

    def _release(self, i: int, phase: Phase) -> None:
        members = self.buckets.gathers.members
        for unit in (unit for name in self.changes[i].leave for unit in members[name]):
            gather = self.gathers.pop(unit, None)
            after = (gather,) if gather is not None and unit not in self.ready else ()  # nobody has waited for it
            self.emit("release", unit, phase, i, after=after, buffer=("params", unit), frees=True)
            self.ready.discard(unit)

    def _gather(self, names: Iterable[str], phase: Phase, i: int, after: tuple[UnplacedOp, ...] = ()) -> None:
        for units in (self.buckets.gathers.members[name] for name in names):
            number = self._number(units)
            for unit in units:
                self.gathers[unit] = self.emit(
                    "gather", unit, phase, i, stream="gather", after=after, bucket=number, buffer=("params", unit), fills=True
                )

    def _wait(self, unit: str, phase: Phase, i: int) -> None:
        facts = self.facts[unit]
        if facts.update_gather and self.carries and unit not in self.settled:
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

    def _update(self, i: int, *, is_last: bool) -> None:
        self._release(i, "update")
        reduced = next(((op,) for op in reversed(self.ops) if op.stream == "reduce" and op.marks is None), ())
        for unit in [u.name for u in self.program.units if u.update_gather and self.carries and u.name not in self.settled]:
            self._settle(unit, i)
        update = self.emit("update", "", "update", i, after=(*reduced, *self.fetched))
        self.updated = (update,)
        update_gather: list[UnplacedOp] = []
        for members in self.buckets.update_gathers.members.values():
            units = [unit for unit in members if self.facts[unit].update_gather]
            number = self._number(units)
            for unit in units:
                update_gather.append(self.emit("gather", unit, "update", i, stream="gather", after=(update,), bucket=number))
        for fetch in self.fetched:
            self.emit("offload", fetch.unit, "update", i, stream="host", after=(update,))
        self.fetched = []
        if not (is_last and self.policy.gather_at_start):
            for op in update_gather:
                self.emit("wait", op.unit, "update", i, after=(op,))
            return
        self._gather(self.carried, "forward", i, after=(update,))
        settled = {op.unit: op for op in update_gather}
        for wait in self.arriving:
            wait.after = (settled[wait.unit] if wait.phase == "update" else self.gathers[wait.unit],)

    # ------------------------------------------------------------ gradients

    def _begin_microbatch(self, number: int) -> None:
        self.left.clear()
        self.absent.clear()
        self.begun = {}
        for unit, casts in self.casts[number].items():
            self.left[self.buckets.reduces.of[unit]] += casts
            self.absent[self.buckets.reduces.of[unit]] += 1
        is_last = number in self.last_microbatches
        self.unfinished = dict.fromkeys(u.name for u in self.program.units if is_last and u.finish and u.trainable)
        self.unready = Counter(self.buckets.finishes.of[unit] for unit in self.unfinished)

    def _cast(self, event: Event, i: int) -> None:
        unit, facts = event.unit, self.facts[event.unit]
        if not event.has_gradient:
            return
        name = self.buckets.reduces.of[unit]
        is_first = unit not in self.begun
        buffer = ("outgoing", unit) if facts.outgoing else None
        if is_first:
            self.begun[unit] = None
            self.absent[name] -= 1
            if buffer and not self.absent[name]:  # till then the bundle before may be on its way
                self._make_room(i)
        fills = is_first and buffer is not None
        opens = None if facts.outgoing else self._open(unit)
        self.last_cast[unit] = self.emit("cast", unit, "backward", i, use=event.use, buffer=buffer, fills=fills, opens=opens)
        self.left[name] -= 1
        if self.left[name] == 0:
            if self.policy.reduce == "delayed":
                self.delayed.append(name)
            else:
                self._reduce(name, i)

    def _reduce_delayed(self, i: int) -> None:
        for name in self.delayed:
            self._reduce(name, i)
        self.delayed = []

    def _reduce(self, name: str, i: int) -> None:
        units = [unit for unit in self.buckets.reduces.members[name] if unit in self.begun]
        facts, cast = self.facts[units[0]], self.last_cast[units[0]]
        if facts.reduce:
            self._make_room(i)
            number = self._number(units)
            self._launch([self._start(unit, "backward", i, number, (self.last_cast[unit],)) for unit in units])
        elif facts.outgoing:
            [unit], opens = units, self._open(units[0])
            added = self.emit(
                "accumulate",
                unit,
                "backward",
                i,
                stream="reduce",
                after=(cast,),
                buffer=("outgoing", unit),
                frees=True,
                opens=opens,
            )
            self.fed[unit] = added
            self._finish(unit, i)
        else:
            self.fed[units[0]] = cast
            self._finish(units[0], i)

    def _start(self, unit: str, phase: Phase, i: int, number: int, after: tuple[UnplacedOp, ...]) -> UnplacedOp:
        kind = "finishing" if phase == "finish" else "outgoing"
        buffer = (kind, unit) if getattr(self.facts[unit], kind) else None
        fills = phase == "finish" and buffer is not None
        return self.emit("reduce", unit, phase, i, stream="reduce", after=after, bucket=number, buffer=buffer, fills=fills)

    def _finish(self, unit: str, i: int) -> None:
        """A unit's gradient is there to be finished; its bundle is on its way when all of it is."""
        if unit not in self.unfinished:
            return
        del self.unfinished[unit]
        name = self.buckets.finishes.of[unit]
        self.unready[name] -= 1
        if self.unready[name]:
            return
        units = [unit for unit in self.buckets.finishes.members[name] if self.facts[unit].finish and self.facts[unit].trainable]
        self._make_room(i, finish=True)
        number = self._number(units)
        fed = {unit: (self.fed[unit],) if unit in self.fed else () for unit in units}
        self._launch([self._start(unit, "finish", i, number, fed[unit]) for unit in units])

    def _open(self, unit: str) -> tuple[str, str] | None:
        """The buffer where a unit's gradient rests, for the first op that puts something there."""
        if not self.facts[unit].rest or unit in self.opened:
            return None
        self.opened.add(unit)
        return "rest", unit

    def _launch(self, ops: list[UnplacedOp]) -> None:
        """Reductions begin; with ``sum_late=False`` sums follow at once, and only their memory is spoken for longer."""
        if self.policy.sum_late is not False:
            self.under_way.append(ops)
            return
        sums = []
        for op in ops:
            if op.phase == "backward":
                op.opens = self._open(op.unit)
            added = self.emit("accumulate", op.unit, op.phase, op.at, stream="reduce", after=(op,), buffer=op.buffer)
            self.fed[op.unit] = added
            sums.append(added)
        self.under_way.append(sums)
        for op in sums:
            if op.phase == "backward":
                self._finish(op.unit, op.at)

    def _make_room(self, i: int, *, finish: bool = False) -> None:
        most = self.policy.finish_buffers if finish else self.policy.reduce_buffers
        while sum((ops[0].phase == "finish") is finish for ops in self.under_way) >= most:
            self._land(i)

    def _land(self, i: int) -> None:
        sums = []
        for op in self.under_way.pop(0):
            frees = op.buffer is not None
            if op.kind == "accumulate":
                self.emit("accumulate", op.unit, op.phase, i, buffer=op.buffer, frees=frees, marks=op)
                continue
            added = self.emit("accumulate", op.unit, op.phase, i, stream="reduce", after=(op,), buffer=op.buffer, frees=frees)
            if op.phase == "backward":
                added.opens, added.reduction = self._open(op.unit), op
            self.fed[op.unit] = added
            sums.append(added)
        for op in sums:
            if op.phase == "backward":
                self._finish(op.unit, i)

    def _end_microbatch(self, i: int) -> None:
        self._reduce_delayed(i)
        while any(ops[0].phase == "backward" for ops in self.under_way):
            self._land(i)
        for unit in list(self.unfinished):
            self._finish(unit, i)


def _in_order_of_gradients(program: Program) -> list[str]:
    """Units in the order in which their gradient of a microbatch is complete, in the first that they have one in."""
    here, result = dict[str, None](), dict[str, None]()
    for event in program.events:
        if event.kind == "microbatch_end":
            result.update(here)
            here = {}
        elif event.has_gradient:
            here.pop(event.unit, None)
            here[event.unit] = None
    return list(result | here)


def last_microbatches(events: Sequence[Event]) -> set[int]:
    """Microbatches at whose end gradients are wanted at the optimizer's place: the last before each ``reduce``."""
    number, result = 0, set()
    for event in events:
        if event.kind == "microbatch_end":
            number += 1
        elif event.kind == "reduce":
            result.add(number - 1)
    return result
