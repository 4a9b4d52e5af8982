"""EagerOps: emit ops event by event, for steps without a schedule, without prefetch, and with one reduction at a time.

Each buffer has memory of its own, which is freed with its last reference. The emitted ops form a schedule to print and verify.
The addresses in that schedule stand for these buffers.
"""

from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fsharp.errors import ScheduleError
from fsharp.stateful.runtime.bound_op import BoundOp, op_source_numbers
from fsharp.stateful.runtime.bound_schedule import BoundSchedule
from fsharp.stateful.runtime.boundary import UsesUnderWay
from fsharp.stateful.runtime.executor import Executor
from fsharp.stateful.schedule import ops
from fsharp.stateful.schedule.addresses import ArenaItem, peak_nbytes
from fsharp.stateful.schedule.ops import REST, OpSpec, Phase, buffer_nbytes
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program, UnitFacts
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule, buffer_lifetimes
from fsharp.stateful.schedule.unplaced import BufferKey, following_specs
from fsharp.stateful.units.full_unit import aligned
from fsharp.stateful.units.gradient_route import OutgoingBlock
from fsharp.stateful.units.unit_gradient import GradientPhase, UnitGradient
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.unsharded_buffer import UnshardedBuffer, buffers_stamp

Units = Collection[UnitState]


class EagerOps:
    """The source of ops for one step without a schedule, or for the rest of a step that has left its schedule.

    Args:
        uses: the uses of units under way in the step, with the buffers of their parameters.
        left_schedule: the schedule that the step has left, if it followed a schedule.
        left_at: text about the event that the schedule did not contain.

    Attributes:
        unsharded_by_unit: by unit, the newest memory of its full parameters.
    """

    def __init__(
        self, executor: Executor, uses: UsesUnderWay, left_schedule: BoundSchedule | None = None, left_at: str = ""
    ) -> None:
        self._executor, self._device, self._left_schedule, self.left_at = executor, executor.comm.device, left_schedule, left_at
        self._uses = uses
        self.unsharded_by_unit: dict[str, UnshardedBuffer] = {}
        self._number = next(op_source_numbers)
        executor.lanes.release_events_on_gc(self, self._number)
        self._event_index = 0
        self.ops: list[Op] = []
        self._last: dict[str, int] = {}  # by stream, its last op
        self._addresses: dict[BufferKey, Memory | None] = {}
        self._arena_nbytes = 0
        self._joined: set[int] = set()  # ops that compute has waited for since its last op, for ``after`` of its next op
        self._readers: dict[BufferKey, list[int]] = {}  # ops that have read a buffer since its last change
        self._reducing: BoundOp | None = None  # the reduction under way
        for unit in left_schedule.units.values() if left_schedule is not None else ():  # the arena may overlap the block
            gradient = unit.gradient
            if gradient is not None and gradient.phase is GradientPhase.COLLECTING and gradient.block is not None:
                gradient.collect_in(self._allocate_outgoing_block(gradient))

    def ops_at_event(
        self, event_index: int, event: Event, unit: UnitState | None, forward_buffer: UnshardedBuffer | None, units: Units
    ) -> Iterator[BoundOp]:
        """Yield the ops at an event, except ops that :meth:`with_following_ops` adds. The caller runs each op before the next.

        ``forward_buffer``: the buffer into which the forward of this use has gathered; None where this forward begins.
        """
        self._event_index = event_index
        phase: Phase = "backward" if event.kind.startswith("backward") else "forward"
        match event.kind, unit:
            case "forward" | "backward", UnitState():
                if unit.axes:
                    yield from self._gather_unit(unit, phase, forward_buffer)
                yield self._append_bound_op(ops.COMPUTE, unit, phase, use_index=event.use_index)
            case "forward_end", UnitState():
                yield from self._release_unit(unit, phase, forward_buffer)
            case "backward_end", UnitState():
                if self._executor.incoming is not None:
                    yield from self._collect_gradient(unit, event.use_index)
                yield from self._release_unit(unit, phase, forward_buffer)
                if self._executor.incoming is not None and self._uses.pending.get(unit.key, 0) <= 0:
                    yield from self._begin_reduction(unit)
            case "fetch", UnitState():
                fetch = self._append_bound_op(ops.FETCH, unit, "update")
                self._joined.add(fetch.key[1])
                yield fetch
            case "microbatch_end", _:
                for each in units:
                    if each.gradient is not None and each.gradient.block is not None:
                        yield from self._begin_reduction(each)
                yield from self._end_reduction()
            case "reduce", _:
                yield from self.ops_of_final_reduction(units)
            case "update", _:
                yield self._append_bound_op(ops.UPDATE, None, "update", after=self._last.get("reduce"))
                yield from self.ops_after_update(units)

    def with_following_ops(self, bound_ops: Iterable[BoundOp]) -> Iterator[BoundOp]:
        """Yield each op, then the ops that follow it (:func:`following_specs`). The caller runs each op before the next one."""
        for bound in bound_ops:
            op, number, unit = bound.op, bound.key[1], bound.unit
            yield bound
            del bound  # the last reference to memory that the op has freed
            for spec in following_specs(op.spec, op.phase):
                if spec.has_ops_for(self._assumed_facts(unit) if unit is not None else UnitFacts("")):
                    after = None if spec.stream == op.stream else number
                    yield from self.with_following_ops(
                        [self._append_bound_op(spec, unit, op.phase, use_index=op.use_index, after=after)]
                    )

    def _gather_unit(self, unit: UnitState, phase: Phase, forward_buffer: UnshardedBuffer | None) -> Iterator[BoundOp]:
        """Yield the ops that gather a unit's parameters: in a backward into ``forward_buffer``, else outside of the arena."""
        assert unit.node is not None
        seen = buffers_stamp(unit.node)
        unsharded = forward_buffer or self.unsharded_by_unit.get(unit.key)
        is_taken = unsharded is not None and (unsharded.where is not None or self._uses.is_buffer_in_use(unsharded))
        if unsharded is None or (forward_buffer is None and is_taken and not unsharded.is_filled_from(seen)):
            unsharded = UnshardedBuffer(unit, self._executor.comm)
        self.unsharded_by_unit[unit.key] = unsharded
        is_filled = unsharded.is_filled_from(seen)
        if not is_filled:
            if unsharded.filled_from is not None:
                yield self._append_bound_op(ops.RELEASE, unit, phase, unsharded=unsharded)
            yield from self._release_overlaps_in_arena_of_left_schedule(unsharded, unit)
            yield self._append_bound_op(ops.GATHER, unit, phase, unsharded=unsharded)
        if unsharded.works or unsharded.is_encoded or not is_filled:
            yield self._append_bound_op(ops.WAIT, unit, phase, unsharded=unsharded, after=self._last.get("gather"))

    def _release_overlaps_in_arena_of_left_schedule(self, unsharded: UnshardedBuffer, unit: UnitState) -> Iterator[BoundOp]:
        """Yield ops that release other buffers at bytes of ``unsharded``, in the arena of the schedule that the step has left.

        Raises ScheduleError if a buffer is in use, or callers have views of a gradient there.
        """
        if unsharded.where is None or self._left_schedule is None:
            return
        for name, memory in self._left_schedule.stranded.items():
            if memory.overlaps(unsharded.where):
                raise ScheduleError(
                    f"the backward of unit {unit.key!r} needs memory that now holds the gradient of {name!r}, of which there "
                    f"are views. Run the backward of {unit.key!r} earlier, or take policy=SchedulePolicy(keep_gradients=True)."
                )
        for name, other in self._left_schedule.unsharded_by_unit.items():
            shares_bytes = other.where is not None and other.where.overlaps(unsharded.where)
            if other is unsharded or other.filled_from is None or not shares_bytes:
                continue
            if self._uses.is_buffer_in_use(other):
                raise ScheduleError(
                    f"the backward of unit {unit.key!r} came while the backward of {name!r} was under way, and they share "
                    "memory: uses have to nest in the backward as they did in the forward."
                )
            yield self._append_bound_op(ops.RELEASE, self._left_schedule.units[name], "backward", unsharded=other)

    def _release_unit(self, unit: UnitState, phase: Phase, unsharded: UnshardedBuffer | None) -> Iterator[BoundOp]:
        if unsharded is not None and unsharded.filled_from is not None and not self._uses.is_buffer_in_use(unsharded):
            yield self._append_bound_op(ops.RELEASE, unit, phase, unsharded=unsharded)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _allocate_outgoing_block(self, gradient: UnitGradient) -> OutgoingBlock:
        nbytes = gradient.route.outgoing_block_nbytes(several_uses=True, several_microbatches=True)
        return gradient.route.outgoing_block(self._allocate(nbytes), several_uses=True)

    def _collect_gradient(self, unit: UnitState, use: int) -> Iterator[BoundOp]:
        yield from self._end_reduction()
        gradient = unit.required_gradient
        is_first = gradient.block is None
        if is_first:
            gradient.collect_in(self._allocate_outgoing_block(gradient))
        yield self._append_bound_op(ops.CAST, unit, "backward", use_index=use, block=gradient.block, is_first=is_first)

    def _begin_reduction(self, unit: UnitState) -> Iterator[BoundOp]:
        yield from self._end_reduction()
        gradient = unit.required_gradient
        if not gradient.route.has_reduction:
            yield from self._accumulate_reduced(ops.ACCUMULATE, unit, block=gradient.block)
            return
        if ops.ENCODE.has_ops_for(self._assumed_facts(unit)):
            yield self._append_bound_op(ops.ENCODE, unit, "backward")
        self._reducing = self._append_bound_op(ops.REDUCE, unit, "backward", block=gradient.block)
        yield self._reducing

    def _end_reduction(self) -> Iterator[BoundOp]:
        """Yield the ops that wait for the reduction under way, and add its result to the gradient at rest."""
        began, self._reducing = self._reducing, None
        if began is not None and began.unit is not None:
            yield from self._accumulate_reduced(ops.ACCUMULATE, began.unit, after=began.key[1], block=began.block)

    def _accumulate_reduced(
        self, spec: OpSpec, unit: UnitState, *, after: int | None = None, block: OutgoingBlock | None = None
    ) -> Iterator[BoundOp]:
        """Yield the op ``spec`` that adds a reduction's result to the gradient. ``after``: number of the reduction's op.

        If ranks send encoded parts, first yield an op that decodes and sums them. ``block``: the memory of the reduction.
        """
        decode = ops.DECODE_SUM if spec is ops.ACCUMULATE else ops.FINAL_DECODE_SUM
        [phase] = spec.phases
        if decode.has_ops_for(self._assumed_facts(unit)):
            decoding = self._append_bound_op(decode, unit, phase, after=after)
            after = decoding.key[1]
            yield decoding
        opens = self._assign_address(REST, unit) if spec.opens and not unit.required_gradient.num_added else None
        yield self._append_bound_op(spec, unit, phase, after=after, opens=opens, block=block)
        last = self._last["reduce"]
        self._executor.lanes.stream_wait_ops([(self._number, last)])  # before the memory of the reduction is released
        self._joined.add(last)

    def ops_of_final_reduction(self, units: Units) -> Iterator[BoundOp]:
        """Yield the ops that reduce gradients to the optimizer's shards, which the update reads."""
        for unit in units:
            route = unit.required_gradient.route
            pieces = route.final_reduction_block(self._allocate(route.final_reduction_block_nbytes()))
            if ops.FINAL_ENCODE.has_ops_for(self._assumed_facts(unit)):
                yield self._append_bound_op(ops.FINAL_ENCODE, unit, "finish")
            reduce = self._append_bound_op(ops.FINAL_REDUCE, unit, "finish", final_reduction_block=pieces)
            yield reduce
            yield from self._accumulate_reduced(ops.FINAL_ACCUMULATE, unit, after=reduce.key[1])

    def ops_after_update(self, units: Units) -> Iterator[BoundOp]:
        """Yield the ops that gather updated parameters, and copy the state of updated units to host memory."""
        for unit in [each for each in units if each.key in self._executor.update_gathers]:
            gather = self._append_bound_op(ops.UPDATE_GATHER, unit, "update")
            yield gather
            yield self._append_bound_op(ops.UPDATE_WAIT, unit, "update", after=gather.key[1])
        for unit in [each for each in units if each.key in self._executor.host_copies]:
            yield self._append_bound_op(ops.OFFLOAD, unit, "update")

    def _append_bound_op(
        self, spec: OpSpec, unit: UnitState | None, phase: Phase, *, use_index: int = -1, after: int | None = None, **bound: Any
    ) -> BoundOp:
        """Append an op to ``ops``, and return it bound. Its memory is that of ``unsharded``, else of the unit's buffer.

        On another stream than compute, the op waits for op ``after``; if ``after`` is None, for all work of compute so far.
        ``bound``: fields of :class:`BoundOp`, such as ``unsharded``, and ``opens``, a field of :class:`Op`.
        """
        stream, opens = spec.stream, bound.pop("opens", None)
        memory = bound["unsharded"].where if "unsharded" in bound else None
        if memory is None and spec.memory_buffer_kind and unit is not None:
            memory = self._assign_address(spec.memory_buffer_kind, unit)
        after = self._last.get("compute") if after is None and stream != "compute" else after
        waits_for = {after, *self._joined} if stream == "compute" else {after}
        number, key = len(self.ops), unit.key if unit is not None else ""
        if spec.memory_buffer_kind:
            waits_for |= {i for i in self._readers.pop((spec.memory_buffer_kind, key), ()) if self.ops[i].stream != stream}
        for buffer in spec.reads:
            self._readers.setdefault((buffer, key), []).append(number)
        waits = tuple(sorted(i for i in waits_for if i is not None))
        op = Op(spec.kind, key, phase, self._event_index, use_index, stream, memory, waits, opens=opens)
        self.ops.append(op)
        self._last[stream] = number
        to_come = [(self._number, j) for j in op.after if self.ops[j].stream != stream and j not in self._joined]
        if stream == "compute":
            self._joined = set()
        return BoundOp(op, (self._number, number), to_come, unit, **{"unsharded": self.unsharded_by_unit.get(key), **bound})

    def _assign_address(self, buffer: str, unit: UnitState) -> Memory | None:
        """Return the address of a unit's buffer in the schedule that this step emits, never shared; None for 0 bytes."""
        if (buffer, unit.key) not in self._addresses:
            nbytes = buffer_nbytes(buffer, self._assumed_facts(unit))
            self._addresses[buffer, unit.key] = Memory(self._arena_nbytes, nbytes) if nbytes else None
            self._arena_nbytes += aligned(nbytes)
        return self._addresses[buffer, unit.key]

    def _assumed_facts(self, unit: UnitState, *, trained: bool = True, updated: bool = True) -> UnitFacts:
        """Return a unit's facts for several uses and several microbatches: these numbers are known only after the step."""
        return unit.facts(trained=trained, updated=updated, several_uses=True, several_microbatches=True)

    def as_schedule(
        self,
        units: dict[str, UnitState],
        events: tuple[Event, ...],
        policy: SchedulePolicy,
        *,
        trained: Container[str],
        updated: Container[str],
    ) -> Schedule:
        """Return the schedule of the ops emitted in a whole step. ``trained`` and ``updated`` are keys of units."""
        order = dict.fromkeys(unit for unit in (*(e.unit for e in events), *(op.unit for op in self.ops)) if unit)
        facts = (self._assumed_facts(units[k], trained=k in trained, updated=k in updated) for k in order)
        eager = replace(policy, prefetch=0, bucket_nbytes=0, gather_at_start=False, memory_budget=None)
        last = len(self.ops) - 1
        spans = [ArenaItem(n, ((fill or 0, last if free is None else free),)) for fill, free, n in buffer_lifetimes(self.ops)]
        return Schedule(Program(tuple(facts), events), eager, tuple(self.ops), self._arena_nbytes, peak_nbytes(spans))
