"""The verifier passes what the compiler writes, and refuses each kind of fault that is planted in it."""

from dataclasses import replace

import pytest
from hypothesis import given

from fsharp.errors import ScheduleError
from fsharp.stateful.schedule import compile
from fsharp.stateful.schedule.addresses import ByteRanges
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program, UnitFacts
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule
from fsharp.stateful.verify.check import HappensBefore
from fsharp.stateful.verify.verify import verify
from tests.edited_schedules import chain, drop, edit, move, of, opening, twice
from tests.random_programs import FINAL_REDUCE, GATHER, REDUCE, UPDATE_GATHER, policies, programs


def also_spread_b(schedule):
    a, b = schedule.program.units
    return replace(schedule, program=replace(schedule.program, units=(a, replace(b, update_gather=(UPDATE_GATHER,)))))


# One schedule by hand, and every message once.


@pytest.fixture
def by_hand():
    """A unit that moves in every way and one inside of it that rests in full, written from the table of ops."""
    a = UnitFacts("a", 64, 128, 64, True, (GATHER,), (REDUCE,), (FINAL_REDUCE,), (UPDATE_GATHER,))
    b = UnitFacts("b", finish=(FINAL_REDUCE,))
    events = [Event("forward", "a", 0), Event("forward", "b", 1), Event("forward_end", "b", 1), Event("forward_end", "a", 0)]
    events += [Event("backward", "a", 0), Event("backward", "b", 1), Event("backward_end", "b", 1)]
    events += [Event("backward_end", "a", 0), Event("microbatch_end"), Event("reduce"), Event("update")]
    full, out = Memory(0, 64), Memory(64, 128)
    ops = [
        Op("wait", "a", "update", 0, after=(19,)),
        Op("wait", "a", "forward", 0, after=(20,)),
        Op("compute", "a", "forward", 0, 0),
        Op("compute", "b", "forward", 1, 1),
        Op("release", "a", "forward", 3, memory=full),
        Op("gather", "a", "backward", 3, stream="gather", memory=full, after=(4,)),
        Op("wait", "a", "backward", 4, after=(5,)),
        Op("compute", "a", "backward", 4, 0),
        Op("compute", "b", "backward", 5, 1),
        Op("cast", "b", "backward", 6, 1),
        Op("cast", "a", "backward", 7, 0, memory=out),
        Op("release", "a", "backward", 7, memory=full),
        Op("reduce", "a", "backward", 7, stream="reduce", memory=out, after=(10,)),
        Op("accumulate", "a", "backward", 8, stream="reduce", memory=out),
        Op("reduce", "b", "finish", 8, stream="reduce", after=(9,)),
        Op("reduce", "a", "finish", 8, stream="reduce", memory=full, after=(11,)),
        Op("accumulate", "b", "finish", 9, stream="reduce"),
        Op("accumulate", "a", "finish", 9, stream="reduce", memory=full),
        Op("update", "", "update", 10, after=(17,)),
        Op("gather", "a", "update", 10, stream="gather", after=(18,)),
        Op("gather", "a", "forward", 10, stream="gather", memory=full, after=(18,)),
    ]
    return Schedule(Program((a, b), tuple(events)), SchedulePolicy(), tuple(ops), 192, 192)


def test_a_schedule_written_by_hand_passes(by_hand):
    verify(by_hand)


FAULTS = {
    "wait for spread": (lambda s: drop(s, 0), r"op 1, compute a forward .*: uses parameters without a wait for their update"),
    "carried wait": (lambda s: drop(s, 1), r"op 1, compute a forward .*: uses a unit before its gather, op 19, is waited for"),
    "wait": (lambda s: drop(s, 6), r"op 6, compute a backward .*: uses a unit before its gather, op 5, is waited for"),
    "wait for nothing": (lambda s: edit(s, 6, after=()), r"op 6, wait a backward .*: does not wait for its gather, op 5,"),
    "wait and gather": (lambda s: drop(s, 5, 6), r"op 5, compute a backward .*: uses a unit that is not gathered"),
    "gather": (lambda s: drop(s, 5), r"op 5, wait a backward .*: waits for a gather that was not made"),
    "release": (lambda s: drop(s, 4), r"op 4, gather a backward .*: is gathered again while its copy of op 19 is there"),
    "release at last": (lambda s: drop(s, 11, 20, 1), r"op 4, gather a backward .*: is gathered and never released: .* stale"),
    "release twice": (lambda s: twice(s, 11), r"op 12, release a .*: releases a unit that is not gathered"),
    "release early": (
        lambda s: edit(s, 3, 4, event_index=1),
        r"op 4, release a .*: is released while in use: .* ends at event 3",
    ),
    "release late": (
        lambda s: move(edit(s, 11, event_index=10), 11, 18),
        r"op 17, update .*: the copy of 'a' made by op 5 survives",
    ),
    "gather for nothing": (
        lambda s: move(edit(twice(twice(s, 11), 5), 6, event_index=7), 6, 12),
        r"op 20, update .*: changes what may still be read by op 12, gather a",
    ),
    "spread": (lambda s: drop(s, 19), r"op 19, gather a forward .*: gathers stale parameters"),
    "spread of b": (also_spread_b, r"op 18, update .*: the updated parameters of 'b' never come to where they rest"),
    "spread first": (lambda s: move(s, 19, 18), r"op 18, gather a update .*: brings updated parameters twice, or before an"),
    "spread early": (lambda s: edit(s, 19, after=()), r"op 19, gather a update .*: may read stale parameters, before op 18"),
    "spread last": (lambda s: move(s, 19, 20), r"op 19, gather a forward .*: gathers stale parameters"),
    "carried early": (lambda s: move(s, 20, 18), r"op 18, gather a forward .*: is gathered and never released: .* stale"),
    "carried against the policy": (
        lambda s: replace(s, policy=SchedulePolicy(gather_at_start=False)),
        r"op 20, gather a forward .*: is for the next step, and the policy says gather_at_start=False",
    ),
    "cast": (lambda s: drop(s, 9), r"event 6, backward_end b: the gradient of use 1 of 'b' is never cast"),
    "cast to send": (lambda s: drop(s, 10), r"op 11, reduce a backward .*: comes before the cast of use 0"),
    "cast twice": (lambda s: twice(s, 9), r"op 10, cast b .*: casts the gradient of use 1 twice"),
    "cast early": (
        lambda s: edit(s, 9, event_index=5),
        r"op 9, cast b .*: is issued at event 5, and its gradient exists only at the end",
    ),
    "cast late": (
        lambda s: move(edit(s, 9, event_index=8), 9, 14),
        r"op 14, cast b .*: is issued at event 8, and its(?s:.*)event 6",
    ),
    "cast behind": (lambda s: move(edit(s, 14, event_index=6), 14, 9), r"op 10, cast b .*: comes after op 9, reduce b finish"),
    "cast phase": (
        lambda s: edit(s, 9, phase="finish"),
        r"op 9, cast b finish .*: has phase 'finish'(?s:.*)expected  'backward'",
    ),
    "gather phase": (lambda s: edit(s, 5, phase="finish"), r"op 5, gather a finish .*: has phase 'finish'"),
    "cast of another": (lambda s: edit(s, 9, use_index=7), r"op 9, cast b .*: casts a gradient that use 7 does not have"),
    "reduce": (lambda s: drop(s, 12), r"op 12, accumulate a .*: adds a result without a reduction"),
    "reduce early": (lambda s: edit(s, 12, after=()), r"op 12, reduce a .*: may start before the end of op 10, cast a"),
    "reduce twice": (lambda s: twice(s, 12), r"op 13, reduce a .*: happens twice: op 12"),
    "reduce of b": (lambda s: edit(s, 12, unit="b", memory=None), r"op 12, reduce b .*: takes away a gradient that stays"),
    "accumulate": (lambda s: drop(s, 13), r"op 14, reduce a finish .*: comes before op 10 is accumulated"),
    "no accumulate": (lambda s: drop(edit(s, 18, after=(16,)), 13, 15, 17), r"event 7, backward_end a: .* 0 has no accumulate"),
    "accumulate late": (
        lambda s: edit(s, *range(13, 18), event_index=9),
        r"op 13, accumulate a .*: adds a result without a reduction",
    ),
    "finish": (lambda s: drop(s, 14, 16), r"event 9, reduce: the gradient of 'b' has no reduce of phase finish"),
    "finish late": (lambda s: edit(s, 16, 17, event_index=10), r"op 16, accumulate b finish .*: no `reduce` event asks for it"),
    "finished half": (lambda s: drop(s, 16), r"event 9, reduce: the gradient of 'b' has no accumulate of phase finish"),
    "update early": (lambda s: edit(s, 18, after=()), r"op 18, update .*: may run before the end of op 17, accumulate a"),
    "overwritten": (lambda s: edit(s, 15, after=()), r"op 15, reduce a finish .*: may fill memory still in use by op 11"),
    "refilled": (lambda s: edit(s, 5, after=()), r"op 5, gather a .*: may fill memory still in use by op 4, release a"),
    "shared": (lambda s: edit(s, 10, 12, 13, memory=Memory(0, 128)), r"op 10, cast a .*: fills memory in which the param"),
    "other address": (lambda s: elsewhere(s, 5, 11), r"op 20, gather a .*: the unit's copy changes its address"),
    "two addresses": (lambda s: elsewhere(s, 11), r"op 11, release a .*: its memory is not the memory that op 5 has filled"),
    "outside": (lambda s: edit(s, 10, memory=Memory(128, 128)), r"op 10, cast a .*: its memory is outside of the arena"),
    "size": (lambda s: edit(s, 10, memory=Memory(64, 64)), r"op 10, cast a .*: its memory is of the wrong size(?s:.*)128 b"),
    "no such unit": (lambda s: edit(s, 3, unit="c"), r"op 3, compute c .*: the program has no such unit"),
    "stream": (lambda s: edit(s, 5, stream="compute"), r"op 5, gather a .*: runs on the wrong stream"),
    "at": (lambda s: edit(s, 5, event_index=2), r"op 5, gather a .*: is issued at event 2"),
    "after": (lambda s: edit(s, 5, after=(5,)), r"op 5, gather a .*: runs after ops \(5,\)"),
    "bucket": (lambda s: edit(s, 5, 20, bucket=3), r"op 20, gather a .*: is not next to the other ops of bucket 3"),
    "bucket of computes": (lambda s: edit(s, 3, bucket=3), r"op 3, compute b .*: cannot be in bucket 3"),
    "needless gather": (lambda s: edit(s, 5, unit="b", memory=None), r"op 5, gather b .*: there is nothing to gather"),
    "compute": (lambda s: drop(s, 3), r"kind compute do not follow the program, from their number 1 on"),
    "update": (lambda s: drop(s, 18), r"kind update do not follow the program, from their number 0 on"),
    "budget": (
        lambda s: replace(s, policy=SchedulePolicy(memory_budget=191)),
        r"larger than the memory budget(?s:.*)budget +191",
    ),
    "arena": (lambda s: replace(s, arena=191), r"smaller than the buffers that are live at once(?s:.*)191 bytes"),
}


def elsewhere(schedule, *positions):
    """Ops of 64 bytes that use bytes which nothing else does."""
    return edit(replace(schedule, arena=schedule.arena + 64), *positions, memory=Memory(schedule.arena, 64))


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_message(by_hand, name):
    fault, match = FAULTS[name]
    with pytest.raises(ScheduleError, match=match):
        verify(fault(by_hand))


def test_a_message_says_what_was_expected_and_what_to_do(by_hand):
    with pytest.raises(ScheduleError) as caught:
        verify(edit(by_hand, 5, after=()))
    assert str(caught.value).splitlines() == [
        "verify(): op 5, gather a backward [gather] @0+64: may fill memory still in use by op 4, release a forward [compute] "
        "@0+64: nothing orders op 5 after op 4.",
        "  unit      a",
        "  expected  4 among the ops it runs after",
        "Add 4 to its `after`.",
    ]


def test_refuses_more_units_or_reductions_than_are_allowed(monkeypatch):
    schedule = compile_schedule(chain(5), SchedulePolicy(prefetch=2))
    verify(schedule)
    with pytest.raises(ScheduleError, match=r"gather u2 .*: is a unit too many: \['u0'\] are .* \['u1', 'u2'\](?s:.*)most 2"):
        verify(replace(schedule, policy=SchedulePolicy(prefetch=1)))
    monkeypatch.setattr("fsharp.stateful.schedule.emit_gradients.MAX_REDUCTIONS", 2)
    with pytest.raises(ScheduleError, match=r"reduce u3 .*: is a reduction too many: .*'u3', 'u4'\](?s:.*)at most 1"):
        verify(compile_schedule(chain(5)))


def test_where_a_gradient_rests_has_to_be_free():
    """Another's gradient has left from there, on a stream of its own: the cast that opens it has to run after that."""
    units = (UnitFacts("a", 0, 128, reduce=(REDUCE,)), UnitFacts("b", reduce=(REDUCE,)), UnitFacts("c", rest=128))
    events = [Event(kind, unit.name, i) for i, unit in enumerate(units) for kind in ("forward", "forward_end")]
    events += [Event(kind, unit.name, i) for i, unit in enumerate(units) for kind in ("backward", "backward_end")]
    schedule = compile_schedule(Program(units, (*events, Event("microbatch_end"), Event("reduce"), Event("update"))))
    verify(schedule)
    [i], [free] = opening(schedule), [j for j in of(schedule, "accumulate") if schedule.ops[j].unit == "a"]
    assert (schedule.ops[i].kind, schedule.ops[i].unit, schedule.ops[i].after) == ("cast", "c", (free,))
    with pytest.raises(ScheduleError) as caught:
        verify(edit(schedule, i, after=()))
    first, *_, last = str(caught.value).splitlines()
    assert first.startswith(f"verify(): op {i}, cast c backward [compute] opens @")
    assert f"may fill memory still in use by op {free}, accumulate a backward" in first
    assert last == f"Add {free} to its `after`."


@given(programs(), policies())
def test_every_compiled_schedule_passes(program, policy):
    verify(compile_schedule(program, policy))


@given(programs(), policies())
def test_gradients_at_rest_are_opened_once_by_the_first_op_that_feeds_them(program, policy):
    """Or by the reduction of that, so that it leaves its result there; what is not fed is not opened."""
    schedule = compile_schedule(program, policy)
    for facts in program.units:
        here = [(i, op.kind) for i, op in enumerate(schedule.ops) if (op.unit, op.phase) == (facts.name, "backward")]
        opens = [i for i in opening(schedule) if schedule.ops[i].unit == facts.name]
        puts = [i for i, kind in here if kind == "accumulate" or (kind == "cast" and not facts.outgoing)]
        assert len(opens) == (1 if puts and facts.rest else 0)
        for i in opens:
            assert schedule.ops[i].opens.nbytes == facts.rest
            assert i == puts[0] or schedule.ops[i].kind == "reduce"
            assert not [k for k, kind in here if i < k < puts[0] and kind in ("reduce", "accumulate")]


@given(programs(), policies())
def test_a_schedule_is_read_as_it_was_written(program, policy):
    schedule = compile_schedule(program, policy)
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_a_fault_in_the_map_with_which_the_compiler_orders_ops_is_found(monkeypatch):
    """The verifier has a map of its own: with the compiler's it would forget the same order, and find nothing."""
    uses = [(f"u{i}", i) for i in range(6)]
    units = tuple(UnitFacts(name, 256, 256, 128, gather=(GATHER,), reduce=(REDUCE,)) for name, _ in uses)
    events = [Event(kind, *use) for use in uses for kind in ("forward", "forward_end")]
    events += [Event(kind, *use) for use in reversed(uses) for kind in ("backward", "backward_end")]
    program = Program(units, (*events, Event("microbatch_end"), Event("reduce"), Event("update")))
    verify(compile_schedule(program, SchedulePolicy()))
    monkeypatch.setattr(ByteRanges, "values_over", lambda *bytes: ())
    with pytest.raises(ScheduleError, match="may fill memory still in use by"):
        verify(compile_schedule(program, SchedulePolicy()))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"unit": "c"}, r"Schedule\(\): op 3, compute c .*: the program has no such unit; it has \['a', 'b'\]"),
        ({"event_index": 11}, r"Schedule\(\): op 3, compute b .*: is issued at event 11 of 11"),
        ({"after": (2, 21)}, r"Schedule\(\): op 3, compute b .*: runs after op 21, and there are 21 ops"),
    ],
)
def test_an_op_outside_of_the_program_is_refused_when_a_schedule_is_made(by_hand, change, match):
    with pytest.raises(ScheduleError, match=match):
        edit(by_hand, 3, **change)


def test_a_backward_of_another_unit_than_its_forward_is_refused():
    a, b = UnitFacts("a"), UnitFacts("b")
    events = [Event("forward", "a", 0), Event("forward_end", "a", 0), Event("backward", "b", 0), Event("backward_end", "b", 0)]
    with pytest.raises(ScheduleError, match=r"event 2, backward b: use 0 of this unit has had no forward"):
        Program((a, b), tuple(events))


def test_a_budget_lowers_a_prefetch_of_more_units_than_there_are_at_once(monkeypatch):
    tried, emitted = [], compile.emit_ops

    def emit_ops(program, policy, *args, **options):
        tried.append(policy.prefetch)
        return emitted(program, policy, *args, **options)

    monkeypatch.setattr(compile, "emit_ops", emit_ops)
    room = compile_schedule(chain(6), SchedulePolicy(prefetch=5, bucket_nbytes=0)).arena
    few, many = (
        compile_schedule(chain(6), SchedulePolicy(prefetch=prefetch, bucket_nbytes=0, memory_budget=room - 1))
        for prefetch in (6, 400)
    )
    assert few.ops == many.ops
    assert few.policy == many.policy
    assert set(tried) <= {0, 1, 2, 3, 4, 5, 6, 400}


def test_buckets_are_over_as_one():
    """A wait for one gather of a bucket is one for the others, and so for reductions; each without a bucket is not."""
    schedule = compile_schedule(chain(4), SchedulePolicy(bucket_nbytes=128, gather_at_start=False))
    for kind, waits in (("gather", "wait"), ("reduce", "accumulate")):
        first, second = of(schedule, kind)[:2]
        [i] = [k for k in of(schedule, waits) if second in schedule.ops[k].after]
        edited = edit(schedule, i, after=tuple(first if j == second else j for j in schedule.ops[i].after))
        verify(edited)
        if kind == "gather":
            with pytest.raises(ScheduleError, match=rf"does not wait for its gather, op {second}"):
                verify(edit(edited, *of(edited, kind), bucket=-1))


def test_a_bucket_begins_when_all_that_its_ops_wait_for_is_there():
    """Memory that an op of it waits for is free for the others too."""
    schedule = compile_schedule(chain(4), SchedulePolicy(bucket_nbytes=128, gather_at_start=False))
    first, second = of(schedule, "reduce")[:2]
    order = HappensBefore(schedule.ops)
    [cast] = [j for j in schedule.ops[second].after if schedule.ops[j].kind == "cast"]
    assert order.is_before(cast, first)
    assert not order.is_before(first, second)
    apart = HappensBefore(edit(schedule, first, second, bucket=-1).ops)
    assert not apart.is_before(cast, first)


BUCKET_FAULTS = {
    "kind of collective": (lambda s, i: facts(s, i, reduce=(FINAL_REDUCE,)), "differs from the other ops of bucket"),
    "wire": (lambda s, i: facts(s, i, sent_dtypes="bfloat16"), "differs from the other ops of bucket"),
    "alone": (
        lambda s, i: facts(s, i, sent_dtypes=None),
        "cannot be in bucket .*: it can share its collectives with no other op",
    ),
    "nothing sent": (lambda s, i: edit(s, i, unit=s.ops[i - 1].unit, kind="release"), "runs on the wrong stream|cannot be in"),
    "apart": (lambda s, i: edit(s, i + 1, i + 2, bucket=s.ops[i].bucket), "cannot be in bucket|differs from the|is not next"),
    "waits for itself": (lambda s, i: edit(s, i, after=(*s.ops[i].after, i - 1)), "waits for others of bucket"),
}


def facts(schedule, i, **fields):
    units = [replace(u, **fields) if u.name == schedule.ops[i].unit else u for u in schedule.program.units]
    return replace(schedule, program=replace(schedule.program, units=tuple(units)))


@pytest.mark.parametrize("name", BUCKET_FAULTS)
def test_what_is_one_collective_has_to_be_able_to_be_one(name):
    fault, match = BUCKET_FAULTS[name]
    schedule = compile_schedule(chain(4), SchedulePolicy(bucket_nbytes=128))
    i = of(schedule, "reduce")[1]
    assert schedule.ops[i].bucket == schedule.ops[i - 1].bucket != -1
    with pytest.raises(ScheduleError, match=match):
        verify(fault(schedule, i))


def test_a_use_for_its_inputs_alone_has_no_gradient():
    unit = UnitFacts("a", 64, 128, 0, True, (GATHER,), (REDUCE,))
    kinds = ["forward", "forward_end", "backward", "backward_end"]
    given = [Event(kind, "a", 0) for kind in kinds] + [Event("microbatch_end")]
    late = [Event(kind, "a", 1, kind == "backward_end") for kind in kinds]
    schedule = compile_schedule(Program((unit,), (*given, *late, Event("reduce"), Event("update"))))
    verify(schedule)
    [i] = [i for i, op in enumerate(schedule.ops) if op.kind == "cast"]
    assert schedule.ops[i].use_index == 0
    with pytest.raises(ScheduleError, match=r"casts a gradient that use 1 does not have"):
        verify(edit(schedule, i, use_index=1))


def test_a_reduction_of_some_units_is_not_one_of_the_others():
    units = [UnitFacts(name, 64, 128, 128, True, (GATHER,), (), (FINAL_REDUCE,)) for name in "ab"]
    events = []
    for use, name in enumerate("ab"):
        events += [Event(kind, name, use) for kind in ("forward", "forward_end", "backward", "backward_end")]
        events += [Event("microbatch_end"), Event("reduce", units=(name,)), Event("update")]
    schedule = compile_schedule(Program(tuple(units), tuple(events)))
    verify(schedule)
    first, second = of(schedule, "reduce")
    assert [schedule.ops[i].unit for i in (first, second)] == ["a", "b"]
    with pytest.raises(ScheduleError, match="no `reduce` event asks for it"):
        verify(edit(schedule, first, unit="b"))
    with pytest.raises(ScheduleError, match=r"is about unit 'c'; there are \['a', 'b'\]"):
        Program(tuple(units), (*events[:-2], Event("reduce", units=("c",)), Event("update")))
