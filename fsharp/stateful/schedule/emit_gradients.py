"""When gradients are collected, reduced, added up, and sent to the optimizer's place."""

from collections import Counter
from collections.abc import Sequence

from fsharp.stateful.schedule.costs import Bundling
from fsharp.stateful.schedule.ops import ACCUMULATE, CAST, FINISH, LAND, REDUCE, REST, OpSpec
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.program import Event, Program, gradients_of
from fsharp.stateful.schedule.unplaced import BufferKey, OpList, UnplacedOp


class GradientOps:
    """Writes the ops of gradients. Units of a bundle are reduced as one, once all of those that have a gradient have it.

    Args:
        ops: gets them.
        program: the step.
        policy: what is allowed.
        reduces: units whose gradients of a microbatch are reduced as one.
        finishes: units whose gradients go to the optimizer's place as one.
    """

    def __init__(self, ops: OpList, program: Program, policy: Policy, reduces: Bundling, finishes: Bundling) -> None:
        self._ops, self._policy, self._reduces = ops, policy, reduces
        self._casts = gradients_of(program.events)
        self._last_microbatches = last_microbatches(program.events)
        self._collecting = _Collecting(reduces, Counter())
        self._finishing = _Finishing(finishes, [])
        self._fed: dict[str, UnplacedOp] = {}  # by unit, what has last put something where its gradient rests
        self._delayed: list[str] = []  # bundles
        self._under_way: list[list[UnplacedOp]] = []
        self._opened: set[str] = set()  # units whose gradient has its memory at rest

    def begin_microbatch(self, number: int) -> None:
        """Begin to collect gradients: ``number`` says which microbatch of the step it is."""
        facts = self._ops.facts
        is_last = number in self._last_microbatches
        wanted = [unit for unit, each in facts.items() if is_last and FINISH.is_for(each) and each.trainable]
        self._collecting = _Collecting(self._reduces, self._casts[number])
        self._finishing = _Finishing(self._finishing.bundles, wanted)

    def cast(self, event: Event, i: int) -> None:
        """Collect the gradient of a use whose backward ends, and reduce what is complete with it."""
        if not event.has_gradient:
            return
        unit, has_memory = event.unit, CAST.nbytes(self._ops.facts[event.unit]) > 0
        is_first, is_bundle_begun = self._collecting.begin(unit)
        if is_first and has_memory and is_bundle_begun:  # till then the bundle before may be on its way
            self._make_room(i, REDUCE)
        opens = None if has_memory else self._open(unit)
        op = self._ops.add(CAST, unit, "backward", i, use=event.use, is_first=is_first, opens=opens)
        if (name := self._collecting.add(unit, op)) is not None:
            if self._policy.reduce == "delayed":
                self._delayed.append(name)
            else:
                self._reduce(name, i)

    def reduce_delayed(self, i: int) -> None:
        """Reduce what has waited for the next backward to begin."""
        for name in self._delayed:
            self._reduce(name, i)
        self._delayed = []

    def end_microbatch(self, i: int) -> None:
        """Have all gradients of the microbatch reduced, and at rest or on their way to the optimizer's place."""
        self.reduce_delayed(i)
        while any(ops[0].phase == "backward" for ops in self._under_way):
            self._land(i)
        for unit in self._finishing.waiting:
            self._finish(unit, i)

    def end(self, i: int) -> None:
        """Have all gradients at the optimizer's place."""
        while self._under_way:
            self._land(i)

    def _reduce(self, name: str, i: int) -> None:
        casts = self._collecting.casts
        units = [unit for unit in self._reduces.members[name] if unit in casts]
        facts = self._ops.facts[units[0]]
        if REDUCE.is_for(facts):
            self._make_room(i, REDUCE)
            after = {unit: (casts[unit],) for unit in units}
            self._launch(self._ops.add_as_one(REDUCE, units, "backward", i, after=after))
            return
        [unit] = units
        self._fed[unit] = casts[unit]
        if ACCUMULATE.is_for(facts):
            opens = self._open(unit)
            self._fed[unit] = self._ops.add(ACCUMULATE, unit, "backward", i, after=(casts[unit],), opens=opens)
        self._finish(unit, i)

    def _finish(self, unit: str, i: int) -> None:
        """A unit's gradient is there to be finished; its bundle is on its way when all of it is."""
        units = self._finishing.add(unit)
        if not units:
            return
        self._make_room(i, FINISH)
        after = {unit: (self._fed[unit],) for unit in units if unit in self._fed}
        self._launch(self._ops.add_as_one(FINISH, units, "finish", i, after=after))

    def _open(self, unit: str) -> BufferKey | None:
        """The buffer where a unit's gradient rests, for the first op that puts something there."""
        if not self._ops.facts[unit].rest or unit in self._opened:
            return None
        self._opened.add(unit)
        return REST, unit

    def _launch(self, ops: list[UnplacedOp]) -> None:
        """Reductions begin; with ``sum_late=False`` sums follow at once, and only their memory is spoken for longer."""
        if self._policy.sum_late is not False:
            self._under_way.append(ops)
            return
        for op in ops:
            if op.spec is REDUCE:
                op.open(self._open(op.unit))
        sums = self._add_up(ops, ops[0].at, is_last=False)
        self._under_way.append(sums)
        self._finish_sums(sums)

    def _make_room(self, i: int, spec: OpSpec) -> None:
        most = self._policy.finish_buffers if spec is FINISH else self._policy.reduce_buffers
        while sum(ops[0].phase in spec.phases for ops in self._under_way) >= most:
            self._land(i)

    def _land(self, i: int) -> None:
        """Be done with the reductions that began first: their results are added up, and their memory is free."""
        ops = self._under_way.pop(0)
        if ops[0].spec in (ACCUMULATE, LAND):
            for op in ops:
                self._ops.mark(op, i)
        else:
            self._finish_sums(self._add_up(ops, i, is_last=True))

    def _add_up(self, ops: Sequence[UnplacedOp], i: int, *, is_last: bool) -> list[UnplacedOp]:
        """Add the results of reductions where they are wanted. ``is_last``: their memory is free after that."""
        sums = []
        for op in ops:
            spec = ACCUMULATE if op.spec is REDUCE else LAND
            added = self._ops.add(spec, op.unit, op.phase, i, after=(op,), is_last=is_last)
            if spec is ACCUMULATE and is_last:
                added.open(self._open(op.unit), reduction=op)
            self._fed[op.unit] = added
            sums.append(added)
        return sums

    def _finish_sums(self, sums: Sequence[UnplacedOp]) -> None:
        for op in sums:
            if op.spec is ACCUMULATE:
                self._finish(op.unit, op.at)


class _Collecting:
    """The gradients of a microbatch, as they come.

    Args:
        bundles: units that are reduced as one.
        casts: how many gradients each unit will have.

    Attributes:
        casts: by unit, the last cast so far.
    """

    def __init__(self, bundles: Bundling, casts: Counter[str]) -> None:
        self.casts: dict[str, UnplacedOp] = {}
        self._bundles, self._begun = bundles, set[str]()
        self._left, self._absent = Counter[str](), Counter[str]()  # by bundle: casts to come, units that are yet to have one
        for unit, number in casts.items():
            self._left[bundles.of[unit]] += number
            self._absent[bundles.of[unit]] += 1

    def begin(self, unit: str) -> tuple[bool, bool]:
        """Whether a gradient of a unit is its first one, and whether each unit of its bundle has one then."""
        name, is_first = self._bundles.of[unit], unit not in self._begun
        self._begun.add(unit)
        self._absent[name] -= is_first
        return is_first, not self._absent[name]

    def add(self, unit: str, op: UnplacedOp) -> str | None:
        """Note a cast. Return the bundle of its unit if it was the last one of the bundle."""
        self.casts[unit] = op
        name = self._bundles.of[unit]
        self._left[name] -= 1
        return None if self._left[name] else name


class _Finishing:
    """The gradients that go to the optimizer's place after a microbatch.

    Args:
        bundles: units that go as one.
        units: those whose gradients do.
    """

    def __init__(self, bundles: Bundling, units: Sequence[str]) -> None:
        self.bundles, self._units, self._waiting = bundles, units, dict.fromkeys(units)
        self._unready = Counter(bundles.of[unit] for unit in units)

    @property
    def waiting(self) -> list[str]:
        """Units that are not there yet."""
        return list(self._waiting)

    def add(self, unit: str) -> list[str]:
        """Note that a unit's gradient is there. Return the units of its bundle, if all of them are."""
        if unit not in self._waiting:
            return []
        del self._waiting[unit]
        name = self.bundles.of[unit]
        self._unready[name] -= 1
        return [] if self._unready[name] else [each for each in self.bundles.members[name] if each in self._units]


def last_microbatches(events: Sequence[Event]) -> set[int]:
    """Microbatches at whose end gradients are wanted at the optimizer's place: the last before each ``reduce``."""
    number, result = 0, set()
    for event in events:
        if event.kind == "microbatch_end":
            number += 1
        elif event.kind == "reduce":
            result.add(number - 1)
    return result
