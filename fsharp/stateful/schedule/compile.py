"""compile_schedule: decide when a step gathers and reduces the data of its units, and at which addresses of the arena."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from fsharp.errors import ScheduleError, problem
from fsharp.stateful.schedule.addresses import ArenaItem, ByteRanges, assign_addresses, live_nbytes_by_position, peak_nbytes
from fsharp.stateful.schedule.costs import BucketsByCollective
from fsharp.stateful.schedule.emit import emit_ops
from fsharp.stateful.schedule.ops import buffer_nbytes
from fsharp.stateful.schedule.policy import MAX_FINAL_REDUCTIONS, SchedulePolicy
from fsharp.stateful.schedule.program import Program
from fsharp.stateful.schedule.residency import backward_uses_by_microbatch
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule
from fsharp.stateful.schedule.unplaced import BufferKey, UnplacedOp
from fsharp.type_checks import options_checked


@options_checked
def compile_schedule(program: Program, policy: SchedulePolicy = SchedulePolicy(), *, has_streams: bool = False) -> Schedule:
    """Return the schedule of a program under a policy.

    Args:
        program: the order in which a step uses units.
        policy: what the schedule may do.
        has_streams: compile for a device with streams, such as a GPU; False compiles for a CPU.

    Raises:
        ScheduleError: even the schedule with the least memory exceeds ``policy.memory_budget``.

    Cost: no memory, no collective; about 2.5 ms for each unit and microbatch.
    """
    tried, max_final_reductions = policy, MAX_FINAL_REDUCTIONS
    sum_late = not has_streams if policy.sum_late is None else policy.sum_late
    while True:
        ops, arena, bound = _emit_and_place(program, tried, max_final_reductions, sum_late=sum_late)
        if policy.memory_budget is None or arena <= policy.memory_budget:
            return Schedule(program, tried, tuple(ops), arena, bound)
        if tried.bucket_nbytes != 0 or tried.together:
            tried = replace(tried, bucket_nbytes=0, together=())
        elif tried.prefetch:
            tried = replace(tried, prefetch=min(tried.prefetch, len(program.units)) - 1)  # more units cannot be ahead
        elif max_final_reductions > 1:
            max_final_reductions = 1
        else:
            facts = [("budget", f"{policy.memory_budget:,} bytes"), ("needed", f"{arena:,} bytes")]
            what = "the memory budget is too small, even without prefetch and with one reduction at a time."
            raise ScheduleError(problem("compile_schedule()", what, facts, "Raise the budget, or make smaller units."))


PlacedOps = tuple[list[Op], int, int]
"""Ops with addresses, bytes of the arena, and the largest number of bytes that are live at one op."""


def _emit_and_place(program: Program, policy: SchedulePolicy, max_final_reductions: int, *, sum_late: bool) -> PlacedOps:
    """Return the ops of a schedule, with addresses. ``policy.release`` decides which units are kept for the backward.

    ``max_final_reductions`` and ``sum_late`` are as for :class:`~fsharp.stateful.schedule.emit_gradients.GradientOps`.
    """
    buckets = BucketsByCollective(program, policy)
    first, *later = backward_uses_by_microbatch(program, buckets.gathers)
    kept_uses = [*first, *chain(*later)] if policy.release == "backward" else []
    emit = partial(emit_ops, program, policy, buckets, max_final_reductions=max_final_reductions, sum_late=sum_late)
    unplaced = emit(kept_uses)
    best = place_buffers(unplaced, program)
    assert best is not None, "there is room without a limit"
    if policy.release != "room" or any(later) or not first:
        # With several microbatches gradients already rest in the arena, and a unit has one address in all microbatches.
        return best
    # Uses nest: the use whose backward comes first had the last forward.
    numbers = range(0, len(first) + 1, 1 + len(first) // 64)  # of kept uses; in steps, as each emission of all ops takes long
    peak_live_nbytes = lambda n: peak_nbytes(_arena_items(emit(first[:n]), program).values())  # noqa: E731
    number = numbers[bisect_right(numbers, best[2], lo=1, key=peak_live_nbytes) - 1]
    fewer, limit, most = 1 + number // 32, best[1], max(best[1], best[2] + best[2] // 50)
    while number > 0:
        found = place_buffers(emit(first[:number]), program, max_nbytes=limit)
        if found is not None:
            return found
        if limit < most:
            limit = most
        else:
            number, fewer = number - fewer, 2 * fewer
    return best


def place_buffers(unplaced: Sequence[UnplacedOp], program: Program, *, max_nbytes: int | None = None) -> PlacedOps | None:
    """Return ``unplaced`` ops with addresses and with the ops that they wait for; None if no arena of ``max_nbytes`` fits."""
    position = {id(op): i for i, op in enumerate(op for op in unplaced if op.marked_op is None)}
    if _move_gradient_opens_earlier(unplaced, items := _arena_items(unplaced, program)):
        items = _arena_items(unplaced, program)
    starts = assign_addresses(tuple(items.values()), max_nbytes=max_nbytes)
    if starts is None:
        return None
    where = {buffer: Memory(start, item.nbytes) for (buffer, item), start in zip(items.items(), starts, strict=True)}
    freed = ByteRanges()  # by bytes, the last op that freed them
    ops = []
    for op in unplaced:
        if op.marked_op is None:
            memory, opens = (where[each] if each else None for each in (op.buffer, op.opens))
            after = {position[id(each)] for each in op.after}
            for filled in (memory if op.fills else None, opens):
                if filled:
                    # Ops on one stream end in order, so the last op of each stream that freed any of these bytes suffices.
                    after |= set(dict(sorted(freed.values_over(filled.start, filled.stop))).values())
            about = op.spec.kind, op.unit, op.phase, op.event_index, op.use_index, op.spec.stream
            ops.append(Op(*about, memory, tuple(sorted(after)), op.bucket, opens))
        if op.buffer and op.frees:
            last, memory = op.marked_op or op, where[op.buffer]
            freed.set_value(memory.start, memory.stop, (last.spec.stream, position[id(last)]))
    return ops, max((m.stop for m in where.values()), default=0), peak_nbytes(items.values())


def _move_gradient_opens_earlier(unplaced: Sequence[UnplacedOp], items: Mapping[BufferKey, ArenaItem]) -> bool:
    """Let reductions write directly to gradients at rest, if this needs no larger arena. Return whether one now does so."""
    live = live_nbytes_by_position(items.values())
    bound, position = max(live, default=0), {id(op): i for i, op in enumerate(unplaced)}
    found = False
    for i, op in enumerate(unplaced):
        if op.opens is None or op.reduction is None:
            continue
        start, nbytes = position[id(op.reduction)], items[op.opens].nbytes
        if max(live[start:i]) + nbytes <= bound:
            live[start:i] = [each + nbytes for each in live[start:i]]
            op.reduction.open_resting_gradient(op.opens)
            op.open_resting_gradient(None)
            found = True
    return found


def _arena_items(unplaced: Sequence[UnplacedOp], program: Program) -> dict[BufferKey, ArenaItem]:
    """Return the size and live spans of each buffer. A buffer that the next step uses is live at both ends of a step."""
    spans: dict[BufferKey, list[tuple[int, int]]] = {}
    since: dict[BufferKey, int] = {}
    for i, op in enumerate(unplaced):
        if op.buffer and op.fills:
            since[op.buffer] = i
        if op.opens:
            since[op.opens] = i
        if op.buffer and op.frees:
            spans.setdefault(op.buffer, []).append((since.pop(op.buffer, 0), i))
    for buffer, start in since.items():
        spans.setdefault(buffer, []).append((start, len(unplaced) - 1))
    facts = program.facts
    return {(name, unit): ArenaItem(buffer_nbytes(name, facts[unit]), tuple(each)) for (name, unit), each in spans.items()}
