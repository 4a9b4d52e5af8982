"""Buffers that are live together never overlap, and the arena is as small as what is live at once."""

import math
from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings, strategies as st

import fsharp as fs
from benchmarks import gpt
from benchmarks.compile import program_of, sizes_of
from fsharp.stateful.schedule import addresses as arena
from fsharp.stateful.schedule.addresses import ArenaItem, assign_addresses, peak_nbytes
from fsharp.stateful.schedule.compile import compile_schedule, place_buffers
from fsharp.stateful.schedule.emit import BucketsByCollective, emit_ops
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import UnitFacts
from tests.edited_schedules import in_a_row
from tests.random_programs import GATHER, REDUCE, policies, programs
from tests.scheduling import every


def live_at(items, position):
    return [i for i, item in enumerate(items) if any(first <= position <= last for first, last in item.spans)]


def clash(one, other):
    return any(a <= d and c <= b for a, b in one.spans for c, d in other.spans) and one.nbytes > 0 and other.nbytes > 0


def peak(items, starts):
    return max((start + item.nbytes for item, start in zip(items, starts, strict=True)), default=0)


def check(items, starts):
    """No two that clash share a byte; what all sizes are multiples of, starts are too. Returns the arena over the bound."""
    assert len(starts) == len(items)
    assert all(start >= 0 for start in starts)
    grain = math.gcd(*(item.nbytes for item in items)) or 1
    assert not any(start % grain for start in starts)
    placed = sorted(zip(starts, items, strict=True), key=lambda pair: pair[0])
    for k, (start, item) in enumerate(placed):
        for later, other in placed[k + 1 :]:
            if later >= start + item.nbytes:
                break
            assert not clash(item, other), (start, item, later, other)
    return peak(items, starts) / max(peak_nbytes(items), 1)


@st.composite
def item_lists(draw, max_size=24):
    def item():
        ends = sorted(draw(st.lists(st.integers(0, 30), min_size=2, max_size=6, unique=True)))
        return ArenaItem(64 * draw(st.integers(0, 9)), tuple(zip(ends[::2], ends[1::2])))

    return tuple(item() for _ in range(draw(st.integers(0, max_size))))


@given(item_lists())
def test_the_bound_is_what_is_live_at_once(items):
    assert peak_nbytes(items) == max((sum(items[i].nbytes for i in live_at(items, k)) for k in range(31)), default=0)


@settings(max_examples=settings().max_examples // 2)
@given(item_lists())
def test_no_two_buffers_overlap(items):
    starts = assign_addresses(items)
    check(items, starts)
    assert starts == assign_addresses.__wrapped__(items)  # not from its cache
    assert peak_nbytes(items) <= peak(items, starts) <= sum(item.nbytes for item in items)


def smallest(items):
    """The smallest arena there is: buffers on top of one another in any order."""
    best = sum(item.nbytes for item in items)
    for order in permutations(range(len(items))):
        tops = {}
        for i in order:
            tops[i] = items[i].nbytes + max((tops[j] for j in tops if clash(items[i], items[j])), default=0)
        best = min(best, max(tops.values(), default=0))
    return best


@given(item_lists(max_size=6))
def test_the_arena_is_the_smallest_there_is_where_that_can_be_searched(items):
    assert peak(items, assign_addresses(items)) == smallest(items)


def test_one_address_may_need_more_than_is_live_at_once():
    """Each two of three meet, though never all of them: with one address each they stand side by side."""
    items = (ArenaItem(64, ((0, 1), (4, 5))), ArenaItem(64, ((0, 1), (2, 3))), ArenaItem(64, ((2, 3), (4, 5))))
    assert peak_nbytes(items) == 128
    assert peak(items, assign_addresses(items)) == 192


def transformer(sizes, outgoing, prefetch, held, num_microbatches=1):
    """Each unit is live while one of its neighbours in the order is used, its gradient through ``held`` backwards."""
    num = len(sizes)
    spans = {}
    for first in range(0, num_microbatches * 2 * num, 2 * num):
        for step in range(2 * num):
            ahead = range(step, min(step + prefetch + 1, 2 * num))
            for unit in {min(k, 2 * num - 1 - k) for k in ahead}:
                spans.setdefault(("full", unit), set()).add(first + step)
            for k in range(max(step - held + 1, num), step + 1):
                spans.setdefault(("gradient", 2 * num - 1 - k), set()).add(first + step)
    items = []
    for (kind, unit), positions in spans.items():
        starts = sorted(p for p in positions if p - 1 not in positions)
        stops = sorted(p for p in positions if p + 1 not in positions)
        items.append(ArenaItem(sizes[unit] if kind == "full" else outgoing[unit], tuple(zip(starts, stops, strict=True))))
    return tuple(items)


@every(2, num_blocks=[6, 32, 128], prefetch=[1, 2, 3], held=[2, 3])
def test_transformers_fit_into_what_is_live_at_once(num_blocks, prefetch, held):
    sides = [(0.01, 8), (0.1, 1.5), (1, 0.3), (1.5, 1.5), (1.5, 0.01), (3.3, 0.9), (8, 5)]
    for k, (embed, head) in enumerate(sides):
        sizes = [int(embed * 100) * 64, *[6400] * num_blocks, int(head * 100) * 64]
        wider = (1, 1.25, 1.5)[k % 3]
        items = transformer(sizes, [int(size * wider) // 64 * 64 for size in sizes], prefetch, held)
        assert check(items, assign_addresses(items)) == 1, (embed, head, wider)


@given(st.lists(st.integers(50, 150), min_size=4, max_size=24), st.data())
def test_units_of_any_size_nearly_do(sizes, data):
    outgoing = [size * data.draw(st.integers(100, 150)) // 100 for size in sizes]
    prefetch, held = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 3))
    items = transformer([64 * size for size in sizes], [64 * size for size in outgoing], prefetch, held, num_microbatches=2)
    assert check(items, assign_addresses(items)) <= 1.05


@given(programs(), policies())
def test_a_compiled_arena_holds_what_is_live_at_once(program, policy):
    schedule = compile_schedule(program, policy)
    assert schedule.peak_nbytes <= schedule.arena
    used = [memory for op in schedule.ops for memory in (op.memory, op.opens) if memory]
    assert schedule.arena == max((memory.stop for memory in used), default=0)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [6, 48])
def test_a_compiled_transformer_needs_little_more_than_is_live_at_once(num_blocks, prefetch):
    sizes = [64 * 30, *[64 * 100] * num_blocks, 64 * 150]
    units = [UnitFacts(f"u{i}", n, n * 5 // 4, gather=(GATHER,), reduce=(REDUCE,)) for i, n in enumerate(sizes)]
    forward = compile_schedule(in_a_row(units), SchedulePolicy(prefetch=prefetch, release="forward"))
    assert forward.arena <= 1.01 * forward.peak_nbytes
    schedule = compile_schedule(in_a_row(units), SchedulePolicy(prefetch=prefetch))
    assert schedule.peak_nbytes <= schedule.arena <= 1.02 * schedule.peak_nbytes


@every(2, prefetch=[1, 3], shape=[(48, 16), (100, 64)])
def test_the_arena_of_small_blocks_in_buckets_is_near_the_bound(shape, prefetch):
    """Units of a bucket are gathered together, and released one by one: their lives overlap, and do not nest."""
    layers, dim = shape
    tree = gpt.tree_of(gpt.build(gpt.Shape(vocab=32, dim=dim, layers=layers, heads=2, time=8, batch=1)))
    layout = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"), units=["embed", "layers.*", "head"])
    order = ["embed", "layers.*", "head"]
    schedule = fs.schedules.plan_step(layout, SchedulePolicy(prefetch=prefetch), order=order, backend="gloo")
    assert any(op.bucket >= 0 for op in schedule.ops)
    assert schedule.arena <= 1.03 * schedule.peak_nbytes


# What stays until its backward because there is room for it


def num_gathers(schedule):
    return sum(op.kind == "gather" for op in schedule.ops)


@given(programs(), policies(release="room"))
def test_what_there_is_room_for_takes_no_more_memory_and_no_more_gathers(program, policy):
    room, forward = compile_schedule(program, policy), compile_schedule(program, replace(policy, release="forward"))
    assert room.arena <= max(forward.arena, 1.02 * forward.peak_nbytes)
    assert room.arena <= forward.arena or num_gathers(room) < num_gathers(forward), "what grows buys a gather less"
    assert num_gathers(room) <= num_gathers(forward)


def blocks(count, num_microbatches=1):
    """``count`` equal units, used one after another; a gradient at rest takes half of what its unit takes."""
    facts = UnitFacts("", 128, 128, trainable=True, gather=(GATHER,), reduce=(REDUCE,), rest=64)
    return in_a_row([replace(facts, name=f"u{i}") for i in range(count)], num_microbatches)


@pytest.mark.parametrize(("count", "step"), [(6, 1), (12, 1), (48, 1), (200, 4)])
def test_as_many_stay_as_gradients_will_take_the_memory_of(count, step):
    """At the end of the backward there are all gradients, the last unit and what leaves of it: room for half as many more."""
    program = blocks(count)
    room, forward = (
        compile_schedule(program, SchedulePolicy(release=release, bucket_nbytes=0)) for release in ("room", "forward")
    )
    assert room.arena == forward.arena == room.peak_nbytes
    in_full = count // 2 + 1
    saved = num_gathers(forward) - num_gathers(room)
    assert in_full - 2 - step < saved <= in_full - 2, "of which two would have stayed anyway; of many, less than a step fewer"
    again = compile_schedule(program, SchedulePolicy(release="backward", bucket_nbytes=0))
    assert again.arena > room.arena
    assert num_gathers(again) < num_gathers(room)


def test_with_several_microbatches_nothing_more_stays():
    """Gradients are there already when the second one begins."""
    assert compile_schedule(blocks(8, 3)).ops == compile_schedule(blocks(8, 3), SchedulePolicy(release="forward")).ops


def test_what_stays_is_released_at_the_end_of_its_backward():
    """A schedule whose gathers say which units were gathered once: the last ones of the forward."""
    program = blocks(8)
    schedule = compile_schedule(program, SchedulePolicy(bucket_nbytes=0))
    again = [op.unit for op in schedule.ops if op.kind == "gather" and op.phase == "backward"]
    assert again == ["u2", "u1", "u0"]
    ends = {e.unit: i for i, e in enumerate(program.events) if e.kind == "backward_end"}
    last = {op.unit: op.event_index for op in schedule.ops if op.kind == "release" and op.event_index < len(program.events) - 1}
    assert all(last[f"u{i}"] == ends[f"u{i}"] for i in range(3, 8))


# Where gradients rest: from when the sum is there, or from when its reduction begins, if there is room


def placed(program, policy, *, early):
    """The ops, the bytes of the arena and those live at once, with gradients opened early where that is free, or never."""
    with pytest.MonkeyPatch.context() as patch:
        if not early:
            patch.setattr("fsharp.stateful.schedule.compile._move_gradient_opens_earlier", lambda unplaced, items: False)
        return place_buffers(emit_ops(program, policy, BucketsByCollective(program, policy), sum_late=True), program)


@given(programs(), policies(sum_late=None))
def test_opening_early_takes_no_more_memory(program, policy):
    """And is done wherever it does not: one more that is opened at its reduction would."""
    early, _, bound = placed(program, policy, early=True)
    late, _, least = placed(program, policy, early=False)
    assert bound == least
    assert [replace(op, opens=None, memory=None, after=()) for op in early] == [
        replace(op, opens=None, memory=None, after=()) for op in late
    ]
    assert [i for i, op in enumerate(late) if op.opens and op.phase == "backward" and op.kind == "reduce"] == []
    for i, op in enumerate(early):
        if op.opens and op.kind == "accumulate" and schedule_reduces(early, i):
            assert bound_with(early, i) > bound


def schedule_reduces(ops, i):
    """Whether op ``i`` adds the result of a reduction of its own."""
    return any((op.kind, op.unit, op.phase) == ("reduce", ops[i].unit, ops[i].phase) for op in ops[:i])


def bound_with(ops, i):
    """Bytes live at once if what op ``i`` opens were opened at its reduction: from the ops alone, position by position."""
    start = max(k for k in range(i) if (ops[k].kind, ops[k].unit) == ("reduce", ops[i].unit))
    live = {}
    for op in ops * 2:  # the second time with what a step finds when it starts
        key = ("params" if op.kind in ("gather", "release") else op.phase), op.unit
        if op.memory and op.kind not in ("release", "accumulate"):
            live[key] = op.memory.nbytes
        elif op.memory:
            live.pop(key, None)
    carried = {key: nbytes for key, nbytes in live.items() if key[0] == "params"}
    most, live, resting = 0, dict(carried), 0
    for k, op in enumerate(ops):
        key = ("params" if op.kind in ("gather", "release") else op.phase), op.unit
        if op.memory:
            live[key] = op.memory.nbytes
        if op.opens and k != i:
            resting += op.opens.nbytes
        if k == start:
            resting += ops[i].opens.nbytes
        most = max(most, resting + sum(live.values()))
        if op.memory and op.kind in ("release", "accumulate"):
            live.pop(key, None)
    return most


def layers_at_rest(num, peak):
    """A chain of equal units, and at its end one that is larger: its copy is live before any gradient is."""
    units = [UnitFacts(f"u{i}", 640, 640, gather=(GATHER,), reduce=(REDUCE,), rest=320) for i in range(num)]
    units.append(UnitFacts("last", peak, 64, gather=(GATHER,), reduce=(REDUCE,), rest=64))
    return in_a_row(units)


def test_gradients_rest_where_their_reduction_leaves_them_if_another_peak_is_higher():
    schedule = compile_schedule(layers_at_rest(6, 64_000), SchedulePolicy())
    assert [op.kind for op in schedule.ops if op.opens] == ["reduce"] * 7


def test_gradients_rest_when_they_are_added_if_the_peak_is_before_that():
    """One of the last: while it is reduced two units are there in full, and beside it nearly all others rest."""
    schedule = compile_schedule(layers_at_rest(40, 640), SchedulePolicy(gather_at_start=False, bucket_nbytes=0))
    assert Counter(op.kind for op in schedule.ops if op.opens) == {"reduce": 40, "accumulate": 1}
    at_once = compile_schedule(
        layers_at_rest(40, 640), SchedulePolicy(gather_at_start=False, bucket_nbytes=0), has_streams=True
    )
    assert {op.kind for op in at_once.ops if op.opens} == {"reduce"}
    assert at_once.peak_nbytes > schedule.peak_nbytes


def test_a_window_ends_with_the_step_and_not_before():
    """What the next step needs first, on its way at the end of this one, is beside all gradients at rest."""
    schedule = compile_schedule(layers_at_rest(4, 640), SchedulePolicy(prefetch=2))
    last = max(op.event_index for op in schedule.ops)
    carried = [op.memory for op in schedule.ops if op.kind == "gather" and op.event_index == last]
    windows = [op.opens for op in schedule.ops if op.opens]
    assert len(carried) == 2
    assert len(windows) == 5
    assert not any(a.overlaps(b) for a in (*carried, *windows) for b in windows if a is not b)


@every(2, kind=["equal", "random"], microbatches=[4, 1])
def test_comparisons_of_one_arena_are_limited(kind, microbatches, monkeypatch):
    """A search begins within the limit, and is over after 1.5 placements for each buffer and some."""
    arena.assign_addresses.cache_clear()
    monkeypatch.setattr(arena, "_MAX_COMPARISONS", 40_000)  # a limit that a step of few units reaches
    monkeypatch.setattr(arena, "_MAX_SPARE_PLACEMENTS", 40)
    finders, find = [], arena._AddressSearch.find_addresses

    def watched(search, *args):
        finders.append(search)
        return find(search, *args)

    monkeypatch.setattr(arena._AddressSearch, "find_addresses", watched)
    for number in (10, 30, 60):
        compile_schedule(program_of(sizes_of(number, kind), microbatches), SchedulePolicy(bucket_nbytes=0))
    most = max(len(each.items) for each in finders)
    assert most == 180
    for each in finders:
        last = (arena._MAX_SPARE_PLACEMENTS + 2 * len(each.items)) * len(each.items)
        assert 0 < each.num_compared <= arena._MAX_COMPARISONS + last
