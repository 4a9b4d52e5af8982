"""verify: find schedules that would read too early, overwrite, leak, lose a gradient or count it twice.

The verifier reads the effects of ops on buffers from :mod:`fsharp.stateful.schedule.ops`, and shares no algorithm with the
compiler. So a wrong schedule, edited by a person or written by a compiler with a bug, is refused before it touches data.
"""

from collections.abc import Mapping, Sequence

from fsharp.errors import ScheduleError, problem
from fsharp.stateful.schedule.ops import OPS, PARAMS, OpSpec, expected_phases_text
from fsharp.stateful.schedule.program import UnitFacts
from fsharp.stateful.schedule.schedule import VECTOR_NBYTES, Op, Schedule, coalescing_key
from fsharp.stateful.verify.check import UNDO_REMEDY, HappensBefore, ScheduleCheckPass, op_error
from fsharp.stateful.verify.gradients import GradientCheck
from fsharp.stateful.verify.memory import ArenaOverlapCheck, DerivedBufferCheck, OffloadedStateCheck, PolicyLimitsCheck
from fsharp.stateful.verify.parameters import ParameterCheck
from fsharp.type_checks import options_checked


@options_checked
def verify(schedule: Schedule) -> None:
    """Check that a schedule does all that its program (``schedule.program``) asks, and never overwrites memory in use.

    An op happens before a later op on the same stream, and before an op that a chain of ``after`` orders after it. The order of
    issue does not count. At the start of a step the previous step is over, except for the gathers after its last update.

    Raises:
        ScheduleError: data or memory are used at a wrong time, or a gradient is wrong.
        ScheduleError: a limit of the policy is exceeded.

    Cost: linear in the number of ops, times the logarithm of how many buffers there are; 0.3 s for 1,000 units.
    """
    _check_each_op(schedule)
    order, specs = HappensBefore(schedule.ops), [op.spec for op in schedule.ops]
    for kind in (ParameterCheck, GradientCheck, DerivedBufferCheck, OffloadedStateCheck, ArenaOverlapCheck, PolicyLimitsCheck):
        check: ScheduleCheckPass = kind(schedule, order)
        for i, (op, spec) in enumerate(zip(schedule.ops, specs, strict=True)):
            check.check_op(i, op, spec)
        check.check_end()


def _check_each_op(schedule: Schedule) -> None:
    """Check the arena's size, and each op's fields. Kinds with ``OpSpec.events`` need exactly one op at each such event."""
    arena, budget = schedule.arena, schedule.policy.memory_budget
    facts, events = schedule.program.facts, schedule.program.events
    what = "larger than the memory budget" if budget is not None and arena > budget else ""
    if what := "smaller than the buffers that are live at once" if arena < schedule.peak_nbytes else what:
        rows = [("arena", f"{arena:,} bytes"), ("live at once", f"{schedule.peak_nbytes:,} bytes"), ("memory budget", budget)]
        remedy = "Raise SchedulePolicy.memory_budget, or lower prefetch."
        raise ScheduleError(problem("verify()", f"the arena is {what}.", rows, remedy))
    at, seen = 0, set[int]()
    for i, op in enumerate(schedule.ops):
        spec = OPS.get((op.kind, op.phase))
        if spec is None:
            raise op_error(i, op, f"has phase {op.phase!r}.", expected_phases_text(op.kind))
        if spec.has_unit and not op.unit:
            raise op_error(i, op, "has no unit.", f"one of {sorted(facts)[1:]}")
        if op.stream != spec.stream:
            raise op_error(i, op, "runs on the wrong stream.", f"stream {spec.stream}")
        if op.event_index < at:
            raise op_error(i, op, f"is issued at event {op.event_index}.", f"an event from {at} to {len(events) - 1}")
        if i in op.after:
            raise op_error(i, op, f"runs after ops {op.after}.", "no op that runs after itself")
        if op.bucket != -1:
            _check_op_in_bucket(i, schedule.ops, facts, is_first=op.bucket not in seen)
            seen.add(op.bucket)
        at = op.event_index
        _check_size(i, op, spec, facts[op.unit], arena)
    for spec in [each for each in dict.fromkeys(OPS.values()) if each.events]:
        want = [(i, event.unit, event.kind, event.use_index) for i, event in enumerate(events) if event.kind in spec.events]
        have = [(op.event_index, op.unit, op.phase, op.use_index) for op in schedule.ops if op.spec is spec]
        if have != want:
            k = next((k for k, (a, b) in enumerate(zip(have, want)) if a != b), min(len(have), len(want)))
            rows = [("op", str(have[k : k + 1])), ("expected", str(want[k : k + 1]))]
            what = f"the ops of kind {spec.kind} do not follow the program, from their number {k} on."
            raise ScheduleError(problem("verify()", what, rows, UNDO_REMEDY))


def _check_op_in_bucket(i: int, ops: Sequence[Op], facts: Mapping[str, UnitFacts], *, is_first: bool) -> None:
    """Check that op ``i`` can be in its bucket: it can share collectives, and directly follows the bucket's earlier ops.

    All ops of a bucket have equal kinds, phases, events and coalescing keys, and do not wait for each other. ``is_first``:
    ``i`` is first.
    """
    op, before = ops[i], ops[i - 1] if i else None
    mine = coalescing_key(op.spec.collectives(facts[op.unit]), facts[op.unit])
    if mine is None:
        raise op_error(i, op, f"cannot be in bucket {op.bucket}: it can share its collectives with no other op.", "bucket -1")
    if is_first:
        return
    if before is None or before.bucket != op.bucket:
        raise op_error(i, op, f"is not next to the other ops of bucket {op.bucket}.", "ops of one bucket next to each other")
    theirs = coalescing_key(before.spec.collectives(facts[before.unit]), facts[before.unit])
    what = (before.kind, before.phase, before.event_index, theirs)
    if what != (op.kind, op.phase, op.event_index, mine):
        raise op_error(i, op, f"differs from the other ops of bucket {op.bucket}.", f"{what}")
    start = next(k for k in reversed(range(i)) if k == 0 or ops[k - 1].bucket != op.bucket)
    if any(start <= j < i for j in op.after):
        raise op_error(i, op, f"waits for others of bucket {op.bucket}, which begin with it.", f"other ops than {op.after}")


def _check_size(i: int, op: Op, spec: OpSpec, facts: UnitFacts, arena: int) -> None:
    nbytes = spec.nbytes(facts)
    if spec.memory_buffer_kind == PARAMS and not nbytes:
        raise op_error(i, op, "there is nothing to gather or release.", "gathers of units that do not rest in full")
    if (op.memory.nbytes if op.memory is not None else None) != (nbytes or None):
        raise op_error(i, op, "its memory is of the wrong size.", f"{nbytes:,} bytes" if nbytes else "None")
    if op.opens is not None and not (spec.opens and op.opens.nbytes == facts.rest > 0):
        expected = f"{facts.rest:,} bytes, in an op that puts a gradient to rest"
        raise op_error(i, op, "its `opens` has a wrong size, or belongs to no op of this kind.", expected)
    for memory in (op.memory, op.opens):
        if memory and not 0 <= memory.start <= memory.stop <= arena:
            raise op_error(i, op, "its memory is outside of the arena.", f"bytes 0 to {arena:,}")
        if memory and memory.start % VECTOR_NBYTES:
            raise op_error(i, op, f"its memory begins at byte {memory.start}.", f"a multiple of {VECTOR_NBYTES}")
