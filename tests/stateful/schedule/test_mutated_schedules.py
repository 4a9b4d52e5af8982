"""Schedules with one op changed, dropped, doubled or moved: what the oracle calls wrong, the verifier refuses."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from fsharp.errors import ScheduleError
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.schedule import Memory
from fsharp.stateful.verify.verify import verify
from tests.edited_schedules import chain, drop, move, passes, twice
from tests.random_programs import policies, programs
from tests.schedule_oracle import find_wrong

KINDS = ("gather", "wait", "decode", "compute", "release", "cast", "encode", "reduce", "decode_sum", "accumulate")
KINDS += ("fetch", "update", "offload")
STREAMS = ("compute", "gather", "reduce", "host")
PHASES = ("forward", "backward", "finish", "update")
FIELDS = ("kind", "unit", "phase", "event_index", "use_index", "stream", "memory", "after", "bucket", "opens")


def moved(memory, rng, arena):
    """Other bytes: of another start or length, none, or some where there were none."""
    if memory is None:
        return Memory(64 * rng.randrange(max(arena // 64, 1)), 64 * rng.randint(1, 4))
    change = rng.choice(["start", "nbytes", "none"])
    if change == "none":
        return None
    step = 64 * rng.choice([-4, -2, -1, 1, 2, 4])
    return replace(memory, **{change: max(getattr(memory, change) + step, 0)})


def changed(schedule, rng):
    """A schedule that differs in one op, and what was done to it."""
    ops, i = schedule.ops, rng.randrange(len(schedule.ops))
    op = ops[i]
    what = rng.choice(["drop", "twice", "swap", "move", *FIELDS, *FIELDS])
    if what == "drop":
        return drop(schedule, i), what
    if what == "twice":
        return twice(schedule, i), what
    if what == "move":
        return move(schedule, i, rng.randrange(len(ops))), what
    if what == "swap":
        j = rng.randrange(len(ops))
        both = list(ops)
        both[i], both[j] = replace(ops[j], event_index=op.event_index), replace(op, event_index=ops[j].event_index)
        return schedule.replace_ops(both), what
    units = [facts.name for facts in schedule.program.units]
    number = len(schedule.program.events)
    if what == "after":
        j = rng.randrange(len(ops))
        value = tuple(k for k in op.after if k != j) if rng.random() < 0.5 or j == i else (*op.after, j)
        value = op.after[1:] if op.after and rng.random() < 0.5 else value
    else:
        value = {
            "kind": lambda: rng.choice(KINDS),
            "unit": lambda: rng.choice([*units, ""]),
            "phase": lambda: rng.choice(PHASES),
            "event_index": lambda: min(max(op.event_index + rng.choice([-3, -2, -1, 1, 1, 2, 3]), 0), number - 1),
            "use_index": lambda: op.use_index + rng.choice([-1, 1, 2]),
            "stream": lambda: rng.choice(STREAMS),
            "memory": lambda: moved(op.memory, rng, schedule.arena),
            "opens": lambda: moved(op.opens, rng, schedule.arena),
            "bucket": lambda: rng.choice([-1, ops[i - 1].bucket, 999]),
        }[what]()
    mutated = [*ops[:i], replace(op, **{what: value}), *ops[i + 1 :]]
    if what == "event_index":  # later ops of the same host may have to follow
        mutated.sort(key=lambda each: each.event_index)
        if mutated[i].unit != op.unit or mutated[i].kind != op.kind:
            mutated = [*ops[:i], replace(op, event_index=value), *ops[i + 1 :]]
    return schedule.replace_ops(mutated), what


@settings(max_examples=max(40, settings().max_examples))
@given(programs(), policies(), st.integers(0, 2**32))
def test_no_mutant_that_the_oracle_calls_wrong_passes(program, policy, seed):
    schedule, rng = compile_schedule(program, policy), random.Random(seed)
    assert find_wrong(schedule) is None
    for _ in range(25):
        mutant, what = changed(schedule, rng)
        if mutant.ops != schedule.ops and passes(mutant):
            wrong = find_wrong(mutant)
            assert wrong is None, f"{what}: {wrong}\n{schedule.diff(mutant)}"


@settings(max_examples=20)
@given(programs(), policies())
def test_a_cast_is_issued_where_its_gradient_is_and_nowhere_else(program, policy):
    """Later events, and other phases, of every cast."""
    schedule = compile_schedule(program, policy)
    for i, op in enumerate(schedule.ops):
        if op.kind != "cast":
            continue
        ats = {each.event_index for each in schedule.ops[i + 1 : i + 2]} - {op.event_index}
        for fields in (*({"event_index": at} for at in ats), *({"phase": phase} for phase in PHASES if phase != "backward")):
            with pytest.raises(ScheduleError, match=r"is issued at event|has phase|does not have in this microbatch"):
                verify(schedule.replace_ops([*schedule.ops[:i], replace(op, **fields), *schedule.ops[i + 1 :]]))


def test_the_oracle_sees_what_it_is_there_for():
    """Of each kind of change to an ordinary step it calls some wrong: else the test above would say nothing."""
    schedule, rng = compile_schedule(chain(4, rest=64), SchedulePolicy(prefetch=1, release="forward")), random.Random(0)
    assert find_wrong(schedule) is None
    expected, seen = {"drop", "twice", "swap", "move", *FIELDS} - {"bucket"}, Counter()
    for _ in range(1000):
        mutant, what = changed(schedule, rng)
        if seen[what] < 5:
            seen[what] += find_wrong(mutant) is not None
        if all(seen[what] == 5 for what in expected):
            return
    raise AssertionError(seen)
