"""Buffers that are live together never overlap, and the arena is as small as what is live at once."""

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsharp.stateful.compile import compile_schedule
from fsharp.stateful.memory import Item, assign, lower_bound
from fsharp.stateful.policy import Policy
from fsharp.stateful.program import Event, Program, UnitFacts
from tests.random_programs import GATHER, REDUCE, policies, programs


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
    return peak(items, starts) / max(lower_bound(items), 1)


@st.composite
def item_lists(draw, max_size=24):
    def item():
        ends = sorted(draw(st.lists(st.integers(0, 30), min_size=2, max_size=6, unique=True)))
        return Item(64 * draw(st.integers(0, 9)), tuple(zip(ends[::2], ends[1::2])))

    return [item() for _ in range(draw(st.integers(0, max_size)))]


@given(item_lists())
def test_the_bound_is_what_is_live_at_once(items):
    assert lower_bound(items) == max((sum(items[i].nbytes for i in live_at(items, k)) for k in range(31)), default=0)


@given(item_lists())
def test_no_two_buffers_overlap(items):
    starts = assign(items)
    check(items, starts)
    assert starts == assign(list(items))
    assert lower_bound(items) <= peak(items, starts) <= sum(item.nbytes for item in items)


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
    assert peak(items, assign(items)) == smallest(items)


def test_one_address_may_need_more_than_is_live_at_once():
    """Each two of three meet, though never all of them: with one address each they stand side by side."""
    items = [Item(64, ((0, 1), (4, 5))), Item(64, ((0, 1), (2, 3))), Item(64, ((2, 3), (4, 5)))]
    assert lower_bound(items) == 128
    assert peak(items, assign(items)) == 192


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
        items.append(Item(sizes[unit] if kind == "full" else outgoing[unit], tuple(zip(starts, stops, strict=True))))
    return items


@pytest.mark.parametrize("num_blocks", [6, 32, 128])
@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("held", [2, 3])
def test_transformers_fit_into_what_is_live_at_once(num_blocks, prefetch, held):
    sides = [(0.01, 8), (0.1, 1.5), (1, 0.3), (1.5, 1.5), (1.5, 0.01), (3.3, 0.9), (8, 5)]
    for k, (embed, head) in enumerate(sides):
        sizes = [int(embed * 100) * 64, *[6400] * num_blocks, int(head * 100) * 64]
        wider = (1, 1.25, 1.5)[k % 3]
        items = transformer(sizes, [int(size * wider) // 64 * 64 for size in sizes], prefetch, held)
        assert check(items, assign(items)) == 1, (embed, head, wider)


@given(st.lists(st.integers(50, 150), min_size=4, max_size=24), st.data())
def test_units_of_any_size_nearly_do(sizes, data):
    outgoing = [size * data.draw(st.integers(100, 150)) // 100 for size in sizes]
    prefetch, held = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 3))
    items = transformer([64 * size for size in sizes], [64 * size for size in outgoing], prefetch, held, num_microbatches=2)
    assert check(items, assign(items)) <= 1.05


@given(programs(), policies())
def test_a_compiled_arena_holds_what_is_live_at_once(program, policy):
    schedule = compile_schedule(program, policy)
    assert schedule.bound <= schedule.arena
    assert schedule.arena == max((op.memory.stop for op in schedule.ops if op.memory), default=0)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [6, 48])
def test_a_compiled_transformer_needs_no_more_than_is_live_at_once(num_blocks, prefetch):
    sizes = [64 * 30, *[64 * 100] * num_blocks, 64 * 150]
    units = [UnitFacts(f"u{i}", n, n * 5 // 4, gather=(GATHER,), reduce=(REDUCE,)) for i, n in enumerate(sizes)]
    events = [Event(kind, unit.name, i) for i, unit in enumerate(units) for kind in ("forward", "forward_end")]
    back = [Event(kind, unit.name, i) for i, unit in enumerate(units) for kind in ("backward_end", "backward")]
    program = Program(tuple(units), (*events, *reversed(back), Event("microbatch_end"), Event("reduce"), Event("update")))
    schedule = compile_schedule(program, Policy(prefetch=prefetch))
    assert schedule.arena == schedule.bound
