"""Emit the ops that collect, reduce and add gradients, and send them to the optimizer's shards."""

from collections import Counter
from collections.abc import Collection, Sequence

from fsharp.stateful.schedule.costs import BucketsByCollective
from fsharp.stateful.schedule.ops import (
    ACCUMULATE,
    CAST,
    DECODE_SUM,
    ENCODE,
    FINAL_ACCUMULATE,
    FINAL_DECODE_SUM,
    FINAL_ENCODE,
    FINAL_REDUCE,
    REDUCE,
    REST,
    OpSpec,
)
from fsharp.stateful.schedule.policy import MAX_REDUCTIONS
from fsharp.stateful.schedule.program import Event, Program, split_by_microbatch
from fsharp.stateful.schedule.unplaced import BufferKey, OpList, UnplacedOp

UnplacedOps = tuple[UnplacedOp, ...]


class GradientOps:
    """Emits the ops of gradients. Complete gradients of a bucket share one collective.

    Args:
        max_final_reductions: limit of reductions to the optimizer's shards that are under way at once.
        sum_late: add a reduction's result only when there are too many reductions under way, or at the end of the microbatch.
            If False, emit the addition at once, and keep the result's memory reserved as long as with True.
    """

    def __init__(self, ops: OpList, buckets: BucketsByCollective, max_final_reductions: int, *, sum_late: bool) -> None:
        self._ops, self._buckets, self._sum_late = ops, buckets, sum_late
        self._most = {REDUCE: MAX_REDUCTIONS, FINAL_REDUCE: max_final_reductions}
        self._missing_casts = Counter[str]()  # by unit with a gradient in this microbatch, casts that are still to come
        self._casts: dict[str, UnplacedOp] = {}  # by unit, the last cast in this microbatch so far
        self._is_incomplete: dict[str, bool] = {}  # by unit with a final reduction: whether its gradient is incomplete
        self._last_write: dict[str, UnplacedOp] = {}  # by unit, the last op that has written to its gradient at rest
        self._under_way: list[list[UnplacedOp]] = []
        self._opened: set[str] = set()  # units whose gradient has its memory at rest

    def begin_microbatch(self, casts: Counter[str], reduced: Collection[str]) -> None:
        """Begin a microbatch. ``casts``: by unit, the number of uses with a gradient. ``reduced``: units to reduce finally."""
        self._missing_casts, self._casts = Counter(casts), {}
        facts = ((unit, self._ops.facts[unit]) for unit in reduced)
        self._is_incomplete = {unit: True for unit, each in facts if FINAL_REDUCE.has_ops_for(each) and each.trainable}

    def emit_cast_and_reduction(self, event: Event) -> None:
        """Emit the cast of a gradient at ``event``, the end of a backward. After a bucket's last cast, emit the reduction."""
        if not event.has_gradient:
            return
        unit, has_memory, is_first = event.unit, CAST.nbytes(self._ops.facts[event.unit]) > 0, event.unit not in self._casts
        bucket = [each for each in self._buckets.reduces[unit] if each in self._missing_casts]
        if is_first and has_memory and all(each == unit or each in self._casts for each in bucket):
            # With this op each unit of the bucket has begun its casts: make room for the bucket's reduction.
            self._limit_reductions(REDUCE)
        opens = None if has_memory else self._resting_gradient_to_open(unit)
        self._casts[unit] = self._ops.add_with_following_ops(
            CAST, unit, "backward", use_index=event.use_index, is_first_user=is_first, opens=opens
        )
        self._missing_casts[unit] -= 1
        if not any(self._missing_casts[each] for each in bucket):
            self._emit_reduction(bucket)

    def end_microbatch(self) -> None:
        """Add the results of the microbatch's reductions. If a ``reduce`` event follows, begin the missing final reductions."""
        while any(ops[0].phase == "backward" for ops in self._under_way):
            self._end_oldest_reductions()
        for unit in self._is_incomplete:
            self._complete_gradient(unit)

    def end_all_reductions(self) -> None:
        """End all reductions under way, the oldest first: see :meth:`_end_oldest_reductions`."""
        while self._under_way:
            self._end_oldest_reductions()

    def _emit_reduction(self, units: list[str]) -> None:
        casts = self._casts
        facts = self._ops.facts[units[0]]
        if REDUCE.has_ops_for(facts):
            self._limit_reductions(REDUCE)
            after = self._emit_encodes(ENCODE, units, {unit: (casts[unit],) for unit in units})
            self._track_begun_reductions(self._ops.add_bucket(REDUCE, units, "backward", after))
            return
        [unit] = units
        self._last_write[unit] = casts[unit]
        if ACCUMULATE.has_ops_for(facts):
            opens = self._resting_gradient_to_open(unit)
            self._last_write[unit] = self._ops.add_with_following_ops(
                ACCUMULATE, unit, "backward", after=(casts[unit],), opens=opens
            )
        self._complete_gradient(unit)

    def _complete_gradient(self, unit: str) -> None:
        """Record that a unit's gradient is complete. If its bucket is complete, emit the final reduction of the bucket."""
        if not self._is_incomplete.get(unit):
            return
        self._is_incomplete[unit] = False
        units = [each for each in self._buckets.final_reduces[unit] if each in self._is_incomplete]
        if any(self._is_incomplete[each] for each in units):
            return
        self._limit_reductions(FINAL_REDUCE)
        after = self._emit_encodes(
            FINAL_ENCODE, units, {unit: (self._last_write[unit],) for unit in units if unit in self._last_write}
        )
        self._track_begun_reductions(self._ops.add_bucket(FINAL_REDUCE, units, "finish", after))

    def _emit_encodes(self, spec: OpSpec, units: Sequence[str], after: dict[str, UnplacedOps]) -> dict[str, UnplacedOps]:
        """Emit an op of the kind ``spec``, which encodes a gradient, for each of ``units`` whose gradient travels encoded.

        ``after``: by unit, the ops for which the encode waits. In ``after`` the encode replaces these ops. Return ``after``,
        which now has the ops for which the reduction waits.
        """
        [phase] = spec.phases
        for unit in units:
            if spec.has_ops_for(self._ops.facts[unit]):
                after |= {unit: (self._ops.add_with_following_ops(spec, unit, phase, after=after.get(unit, ())),)}
        return after

    def _resting_gradient_to_open(self, unit: str) -> BufferKey | None:
        """Return the buffer of a unit's gradient at rest, on the first call in a step; None later, or for 0 bytes."""
        if not self._ops.facts[unit].rest or unit in self._opened:
            return None
        self._opened.add(unit)
        return REST, unit

    def _track_begun_reductions(self, ops: list[UnplacedOp]) -> None:
        """Count the reductions ``ops`` of a bucket as under way. Unless sums are late, emit the ops that add the results."""
        if self._sum_late:
            self._under_way.append(ops)
            return
        for op in ops:
            if op.spec is REDUCE:
                op.open_resting_gradient(self._resting_gradient_to_open(op.unit))
        sums = self._emit_sums(ops, is_last=False)
        self._under_way.append(sums)
        self._emit_ready_final_reductions(sums)

    def _limit_reductions(self, spec: OpSpec) -> None:
        """End the oldest reductions, of any kind, until one more of the kind ``spec`` may be under way."""
        while sum(ops[0].phase in spec.phases for ops in self._under_way) >= self._most[spec]:
            self._end_oldest_reductions()

    def _end_oldest_reductions(self) -> None:
        """End the oldest bucket of reductions: emit the ops that add results, if not emitted yet; free the results' memory."""
        ops = self._under_way.pop(0)
        if ops[0].spec in (ACCUMULATE, FINAL_ACCUMULATE):
            for op in ops:
                self._ops.extend_buffer_lifetime(op)
        else:
            self._emit_ready_final_reductions(self._emit_sums(ops, is_last=True))

    def _emit_sums(self, ops: Sequence[UnplacedOp], *, is_last: bool) -> list[UnplacedOp]:
        """Emit the ops that add the results of reductions (``ops``) to gradients, and with ``is_last`` free the results."""
        sums = []
        for op in ops:
            decode, spec = (DECODE_SUM, ACCUMULATE) if op.spec is REDUCE else (FINAL_DECODE_SUM, FINAL_ACCUMULATE)
            arrived = op
            if decode.has_ops_for(self._ops.facts[op.unit]):
                arrived = self._ops.add_with_following_ops(decode, op.unit, op.phase, after=(op,))
            added = self._ops.add_with_following_ops(spec, op.unit, op.phase, after=(arrived,), is_last_user=is_last)
            if spec is ACCUMULATE and is_last:
                added.open_resting_gradient(self._resting_gradient_to_open(op.unit), reduction=op)
            self._last_write[op.unit] = added
            sums.append(added)
        return sums

    def _emit_ready_final_reductions(self, sums: Sequence[UnplacedOp]) -> None:
        for op in sums:
            if op.spec is ACCUMULATE:
                self._complete_gradient(op.unit)


def units_reduced_after_microbatches(program: Program) -> dict[int, Collection[str]]:
    """Return the units that the first ``reduce`` event after a microbatch reduces, by number of the microbatch."""
    result = dict[int, Collection[str]]()
    for number, events in enumerate(split_by_microbatch(program.events), -1):
        for event in [event for event in events if event.kind == "reduce"][:1]:
            result[number] = [unit.name for unit in program.units if event.is_about(unit.name)]
    return result
