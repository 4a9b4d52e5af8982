"""Buckets: what is mostly latency moves together, as one collective; what is not stays alone."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from fsharp.functional.comm.protocol import Call
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.costs import bucket_and_unit_limits, group_into_buckets
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import UnitFacts
from fsharp.stateful.schedule.schedule import coalescing_key, group_ops_by_bucket
from fsharp.stateful.verify.verify import verify
from tests.edited_schedules import in_a_row
from tests.random_programs import policies, programs


def blocks(num, nbytes, *, microbatches=1, **fields):
    """Equal units that move in every way; each rank sends ``nbytes`` for each move of one."""
    facts = UnitFacts(
        "",
        *[2 * nbytes] * 3,
        gather=(Call("all_gather", "dp", nbytes),),
        reduce=(Call("reduce_scatter", "dp", nbytes),),
        finish=(Call("reduce_scatter", "outer", nbytes),),
        update_gather=(Call("all_gather", "outer", nbytes),),
        rest=nbytes,
        sent_dtypes="float32",
    )
    return in_a_row([replace(facts, name=f"u{i}", **fields) for i in range(num)], microbatches)


def issued(schedule, kind, *phases):
    """The units of each collective of a kind, in the order of issue."""
    groups = [ops for ops in group_ops_by_bucket(schedule.ops) if ops[0].kind == kind and ops[0].phase in phases]
    return [tuple(op.unit for op in ops) for ops in groups]


SMALL = 64 * 1024


@pytest.mark.parametrize("microbatches", [1, 2])
def test_small_units_move_a_quarter_at_a_time(microbatches):
    """In every move: parameters, gradients of a microbatch, sums, updated parameters."""
    schedule = compile_schedule(blocks(24, SMALL, microbatches=microbatches))
    verify(schedule)
    forward = [tuple(f"u{i}" for i in range(start, start + 6)) for start in range(0, 24, 6)]
    backward = [tuple(f"u{23 - i}" for i in range(start, start + 6)) for start in range(0, 24, 6)]
    assert set(issued(schedule, "gather", "forward", "backward")) == set(forward)
    assert issued(schedule, "reduce", "backward") == backward * microbatches
    assert issued(schedule, "reduce", "finish") == backward
    assert issued(schedule, "gather", "update") == forward


def test_a_bucket_is_one_call_along_each_axis_with_the_bytes_of_all():
    alone = compile_schedule(blocks(24, SMALL), SchedulePolicy(bucket_nbytes=0, release="backward")).collective_counts()
    joined = compile_schedule(blocks(24, SMALL), SchedulePolicy(release="backward")).collective_counts()
    assert {call.nbytes for call in alone} == {SMALL}
    assert {call.nbytes for call in joined} == {6 * SMALL}
    assert joined == Counter({call._replace(nbytes=6 * SMALL): count // 6 for call, count in alone.items()})


@pytest.mark.parametrize(("nbytes", "size"), [(64 * 1024, 6), (1_200_000, 4), (1_600_000, 3), (2_000_000, 2), (2_100_000, 1)])
def test_a_bucket_takes_five_latencies_to_send_at_most(nbytes, size):
    """Over gloo 5 MB, and no more than a quarter of what all units send."""
    schedule = compile_schedule(blocks(24, nbytes // 64 * 64))
    assert {len(units) for units in issued(schedule, "reduce", "backward")} == {size}
    assert size * nbytes <= 5_000_000


def test_a_number_of_bytes_is_taken_as_it_is():
    schedule = compile_schedule(blocks(24, SMALL), SchedulePolicy(bucket_nbytes=2 * SMALL))
    assert {len(units) for units in issued(schedule, "gather", "forward", "backward", "update")} == {2}


@pytest.mark.parametrize(
    "other",
    [{"sent_dtypes": "bfloat16"}, {"sent_dtypes": None}, {"reduce": (Call("all_reduce", "dp", SMALL),)}, {"reduce": ()}],
)
def test_units_that_cannot_share_a_collective_do_not(other):
    program = blocks(24, SMALL)
    units = [replace(unit, **other) if i % 2 else unit for i, unit in enumerate(program.units)]
    schedule = compile_schedule(replace(program, units=tuple(units)))
    verify(schedule)
    assert {len(units) for units in issued(schedule, "reduce", "backward")} == {1}


def test_what_sends_nothing_is_alone():
    """Axes of one rank: there is no latency to save, and a model in full is a model in full."""
    schedule = compile_schedule(blocks(24, 64, gather=(Call("all_gather", "dp", 0),), reduce=(), finish=(), update_gather=()))
    assert {op.bucket for op in schedule.ops} == {-1}


def test_the_reduction_of_a_bucket_begins_with_the_last_cast_of_it():
    """And the bucket before is added when the last unit of this one casts: it has run beneath all of this one's backward."""
    schedule = compile_schedule(blocks(24, SMALL, finish=(), finishing=0), SchedulePolicy())
    ops = schedule.ops
    for group in group_ops_by_bucket(ops):
        if group[0].kind == "reduce":
            at = {op.event_index for op in group}
            casts = [op.event_index for op in ops if op.kind == "cast" and op.unit in {each.unit for each in group}]
            assert at == {max(casts)}
    added = [op for op in ops if op.kind == "accumulate"]
    assert [op.event_index for op in added[:6]] == [
        next(op.event_index for op in ops if (op.kind, op.unit) == ("cast", "u12"))
    ] * 6


@given(programs(), policies())
def test_buckets_change_what_is_one_collective_and_no_byte(program, policy):
    """Whatever is joined: the same units are reduced and spread as often, and in all as many bytes are sent for them."""

    def sent(schedule, kind, phase):
        units = {facts.name: facts for facts in schedule.program.units}
        calls = Counter()
        for op in schedule.ops:
            if (op.kind, op.phase) == (kind, phase):
                calls[op.unit] += sum(call.nbytes for call in (units[op.unit].reduce if phase == "backward" else ()))
                calls[op.unit, "times"] += 1
        return calls

    joined, alone = (compile_schedule(program, replace(policy, bucket_nbytes=n)) for n in (8 * 64, 0))
    verify(joined)
    for kind, phase in (("reduce", "backward"), ("reduce", "finish"), ("gather", "update")):
        assert sent(joined, kind, phase) == sent(alone, kind, phase)
    facts = {unit.name: unit for unit in program.units}
    for group in group_ops_by_bucket(joined.ops):
        keys = [coalescing_key(op.spec.collectives(facts[op.unit]), facts[op.unit]) for op in group if len(group) > 1]
        assert len({(op.kind, op.phase, op.event_index, key) for op, key in zip(group, keys, strict=False)}) <= 1


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(0, 3000), st.integers(0, 1000))
def test_bundles_are_neighbours_no_larger_than_allowed(sizes, most, most_of_one):
    order = [f"u{i}" for i in range(len(sizes))]
    sent = dict(zip(order, sizes, strict=True))
    found = group_into_buckets(order, sent, dict.fromkeys(order, "one"), most, most_of_one)
    assert [unit for units in dict.fromkeys(found.values()) for unit in units] == order
    assert all(len(units) == 1 or sum(sent[unit] for unit in units) <= most for units in found.values())
    assert all(unit in units for unit, units in found.items())
    assert all(len(units) == 1 or sent[unit] <= most_of_one for unit, units in found.items())
    assert bucket_and_unit_limits(sizes)[0] <= sum(sizes) / 4
