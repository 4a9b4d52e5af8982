"""Assign addresses in one arena to the buffers of a whole step.

A buffer keeps one address for all of its live spans, as tensors saved in the forward point into the buffer. The smallest arena
is hard to find in general (dynamic storage allocation), and easy for buffers of a step.

Many buffers are live for a long time, and their spans nest. Gradients rest up to the end of the step. Parameters that stay for
their backward are released in reverse order. These buffers form two stacks without gaps. Buffers that are live at the end of
the step are stacked from the first byte of the arena, the others from the last byte. Any buffer outside of the stacks is live
together only with buffers of nearby units, and with the stacks. Such a buffer is placed soon after the buffers with which it is
live. So a dead end is near its cause, and a depth-first search soon finds an arena of the lower bound, or close to it.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, tee
from operator import add
from typing import Generic, NamedTuple, TypeVar

_MIN_SPANS_OF_STACKED = 48  # a buffer goes to a stack if more spans than this begin while the buffer is live
# Sizes of arenas to try, as the part by which they exceed the lower bound.
_ARENA_SLACKS = (0.0, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0)
_MAX_PLACEMENTS = 12_000  # for one size of the arena, the number of placements in all searches,
_MAX_PLACEMENTS_PER_ITEM = 6  # or this number for each buffer, if that is more
_MAX_PLACEMENTS_PER_SEARCH = 300  # number of placements in one search, besides 1.5 for each buffer

# A rank of the places that a buffer fits in: from bytes below the buffer, bytes left in the gap, bytes above the buffer.
FitRank = Callable[[int, int, int], int]
_FIT_RANKS: tuple[FitRank, ...] = (
    lambda at, spare, above: min(at, above),
    lambda at, spare, above: spare,
    lambda at, spare, above: at,
)


@dataclass(frozen=True, slots=True)
class ArenaItem:
    """A buffer that keeps one address.

    Attributes:
        nbytes: size of the buffer, a multiple of the alignment.
        spans: pairs ``(first, last)`` of positions, both inclusive, between which the buffer is live. Spans do not overlap.
    """

    nbytes: int
    spans: tuple[tuple[int, int], ...]


def lower_bound(items: Sequence[ArenaItem]) -> int:
    """Return the largest number of bytes that are live at one position."""
    changes = sorted(change for item in items for a, b in item.spans for change in ((a, item.nbytes), (b + 1, -item.nbytes)))
    most = live = 0
    for _, nbytes in changes:  # at one position ends sort before starts
        live += nbytes
        most = max(most, live)
    return most


def assign_addresses(items: Sequence[ArenaItem], *, max_nbytes: int | None = None) -> list[int] | None:
    """Return the first byte of each item, such that items that are live at one position share no byte.

    Starts are multiples of the greatest common divisor of all sizes. Equal lists of items get equal addresses.

    Args:
        items: the buffers to place.
        max_nbytes: limit of the arena. The result is None if no placement within the limit is found soon.

    Cost: ``n log n`` in the number of spans. For each item in a stack also a pass over all positions.
    """
    if not items:
        return []
    least = lower_bound(items)
    return None if max_nbytes is not None and least > max_nbytes else _ArenaPacking(items).place_items(least, max_nbytes)


class _SearchResult(NamedTuple):
    """The first byte of each item, or an empty list; and the number of placements that the search has made."""

    addresses: list[int]
    num_placed: int


class _ArenaPacking:
    """Places items: long-lived items in two stacks, and all other items between the stacks, by a search.

    Attributes:
        stacked: for each item in a stack, its distance from the arena's first byte, or from its last byte.
        low: at each position, bytes of the stack at the arena's first byte.
        high: at each position, bytes of the stack at the arena's last byte.
    """

    def __init__(self, items: Sequence[ArenaItem]) -> None:
        self.items = items
        begins = sorted(first for item in items for first, _ in item.spans)
        last = max((stop for item in items for _, stop in item.spans), default=0)

        def meets(item: ArenaItem) -> int:
            return max((bisect_right(begins, b) - bisect_left(begins, a) for a, b in item.spans), default=0)

        every = [i for i, item in enumerate(items) if item.nbytes]
        many = {i for i in every if meets(items[i]) > _MIN_SPANS_OF_STACKED}
        self.short = [i for i in range(len(items)) if i not in many]
        self.low, self.high = [0] * (last + 1), [0] * (last + 1)
        self.stacked: dict[int, int] = {}
        self.is_low: set[int] = set()
        for i in sorted(many, key=lambda i: (-sum(b - a for a, b in items[i].spans), i)):
            spans = items[i].spans
            stays = any(stop == last for _, stop in spans)
            stack = self.low if stays else self.high
            self.stacked[i] = at = _stack_height_during(stack, items[i])
            for first, stop in spans:
                stack[first : stop + 1] = [at + items[i].nbytes] * (stop + 1 - first)
            if stays:
                self.is_low.add(i)
        self.floors = {i: _stack_height_during(self.low, items[i]) if many else 0 for i in self.short}
        self.ceilings = {i: _stack_height_during(self.high, items[i]) if many else 0 for i in self.short}
        self.neighbours = _neighbours(items, self.short)
        self.grain = math.gcd(*(item.nbytes for item in items)) or 1

    def place_items(self, least: int, max_nbytes: int | None) -> list[int] | None:
        """Return the first byte of each item, in an arena of ``least`` to ``max_nbytes`` bytes; None if the search fails."""
        stacks = max(map(add, self.low, self.high))
        least = max(least, stacks, _clique_lower_bound(self.items, self.short, self.neighbours))
        orders = _search_orders(self.items, self.short, self.neighbours)  # lazy, as mostly the first order succeeds
        if max_nbytes is not None:
            if least > max_nbytes:
                return None
            target, limit = max_nbytes // self.grain * self.grain, _MAX_PLACEMENTS_PER_SEARCH + 3 * len(self.short) // 2
            found = (self._search_addresses(order, _FIT_RANKS[0], target=target, limit=limit).addresses for order in orders)
            return next(filter(None, found), None)
        total = max(sum(item.nbytes for item in self.items), least)
        for slack in _ARENA_SLACKS:
            target = min(least + int(slack * least) // self.grain * self.grain, total)
            budget = max(_MAX_PLACEMENTS // (1 + len(self.items) // 32), _MAX_PLACEMENTS_PER_ITEM * len(self.items))
            for fit in _FIT_RANKS:
                orders, again = tee(orders)
                for order in again:
                    if budget <= 0:
                        break
                    limit = min(_MAX_PLACEMENTS_PER_SEARCH + 3 * len(self.short) // 2, budget)
                    starts, placed = self._search_addresses(order, fit, target=target, limit=limit)
                    budget -= placed
                    if starts:
                        return starts
        return [0, *accumulate(item.nbytes for item in self.items[:-1])]  # one after another

    def _search_addresses(self, order: Sequence[int], fit: FitRank, *, target: int, limit: int) -> "_SearchResult":
        """Search depth first for places of all items in an arena of ``target`` bytes, with at most ``limit`` placements."""
        items = self.items
        rank = {i: k for k, i in enumerate(order)}
        before = {i: [j for j in self.neighbours[i] if rank[j] < rank[i]] for i in order}
        sizes, starts = [item.nbytes for item in items], [0] * len(items)
        for i, at in self.stacked.items():
            starts[i] = at if i in self.is_low else target - at - items[i].nbytes
        if not order:
            return _SearchResult(starts, 0)

        def candidates(i: int) -> list[int]:
            """Return both ends of each gap that is large enough, the best end last."""
            nbytes, top, stop, found = sizes[i], self.floors[i], target - self.ceilings[i], set()
            taken = [(starts[j], starts[j] + sizes[j]) for j in before[i]]
            taken.sort()
            for start, end in (*taken, (stop, stop)):
                spare = (start if start < stop else stop) - top - nbytes
                if spare >= 0:
                    found |= {(fit(at, spare, target - at - nbytes), at) for at in (top, top + spare)}
                if end > top:
                    top = end
            return [at for _, at in sorted(found, reverse=True)]

        open_ = [candidates(order[0])]
        for placed in range(limit):
            while open_ and not open_[-1]:
                open_.pop()
            if not open_:
                return _SearchResult([], placed)
            starts[order[len(open_) - 1]] = open_[-1].pop()
            if len(open_) == len(order):
                return _SearchResult(starts, placed)
            open_.append(candidates(order[len(open_)]))
        return _SearchResult([], limit)


def _stack_height_during(stack: Sequence[int], item: ArenaItem) -> int:
    """Return the largest height of a stack, in bytes, while an item is live."""
    return max((max(stack[first : last + 1]) for first, last in item.spans), default=0)


def _clique_lower_bound(items: Sequence[ArenaItem], indices: Sequence[int], neighbours: dict[int, list[int]]) -> int:
    """Return a lower bound of the arena: the bytes of buffers of which any two are live together at some position."""
    near = {i: set(neighbours[i]) for i in indices}
    load = {i: items[i].nbytes + sum(items[j].nbytes for j in near[i]) for i in indices}
    most = 0
    for seed in sorted(indices, key=lambda i: -load[i])[:16]:
        members = [seed]
        for i in sorted(near[seed], key=lambda i: -items[i].nbytes):
            if near[i].issuperset(members):
                members.append(i)
        most = max(most, sum(items[i].nbytes for i in members))
    return most


def _neighbours(items: Sequence[ArenaItem], indices: Sequence[int]) -> dict[int, list[int]]:
    """Return for each item the items that are live together with the item at some position."""
    spans = sorted((a, b, i) for i in indices if items[i].nbytes for a, b in items[i].spans)
    result: dict[int, set[int]] = {i: set() for i in indices}
    live: list[tuple[int, int]] = []
    for a, b, i in spans:
        live = [(end, j) for end, j in live if end >= a]
        for _, j in live:
            result[i].add(j)
            result[j].add(i)
        live.append((b, i))
    return {i: sorted(each) for i, each in result.items()}


def _search_orders(items: Sequence[ArenaItem], indices: Sequence[int], neighbours: dict[int, list[int]]) -> Iterator[list[int]]:
    if not indices:
        yield []
        return
    load = {i: items[i].nbytes + sum(items[j].nbytes for j in neighbours[i]) for i in indices}
    first = {i: min((a for a, _ in items[i].spans), default=0) for i in indices}
    last = {i: max((a for a, _ in items[i].spans), default=0) for i in indices}
    seeds = (
        max(indices, key=load.__getitem__),
        max(indices, key=lambda i: items[i].nbytes),
        indices[0],
        max(indices, key=first.__getitem__),
    )
    for seed in dict.fromkeys(seeds):
        yield _overlap_order(seed, items, indices, neighbours)
    yield sorted(indices, key=lambda i: -last[i])
    yield sorted(indices, key=lambda i: first[i])


def _overlap_order(
    seed: int, items: Sequence[ArenaItem], indices: Sequence[int], neighbours: dict[int, list[int]]
) -> list[int]:
    """Return an order from ``seed`` on. Next comes the item that is live with the most bytes so far (maximum cardinality)."""
    met = dict.fromkeys(indices, 0)
    order: dict[int, None] = {}
    heap = [(1, 0, i) for i in indices]
    heappush(heap, (-1, 0, seed))
    while heap:
        i = heappop(heap)[2]
        if i in order:
            continue
        order[i] = None
        for j in set(neighbours[i]).difference(order):
            met[j] += items[i].nbytes
            heappush(heap, (-met[j], -items[j].nbytes, j))
    return list(order)


T = TypeVar("T")


class ByteRanges(Generic[T]):
    """A map from disjoint runs of bytes to values. A call is logarithmic in the runs, and linear in overlapping runs."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._values: list[T] = []

    def values_over(self, start: int, stop: int) -> Iterator[T]:
        """Yield the values of the runs that overlap the bytes ``start`` to ``stop``."""
        yield from self._values[self._overlapping_slice(start, stop)]

    def _overlapping_slice(self, start: int, stop: int) -> slice:
        return slice(bisect_right(self._stops, start), bisect_left(self._starts, stop) if start < stop else 0)

    def set_value(self, start: int, stop: int, value: T | None) -> None:
        """Set the value of bytes ``start`` to ``stop``. None removes their values."""
        if start >= stop:
            return
        where, runs = self._overlapping_slice(start, stop), [] if value is None else [(start, stop, value)]
        if where.start < where.stop:
            first, last = where.start, where.stop - 1
            if self._starts[first] < start:
                runs = [(self._starts[first], start, self._values[first]), *runs]
            if self._stops[last] > stop:
                runs = [*runs, (stop, self._stops[last], self._values[last])]
        self._starts[where] = [run[0] for run in runs]
        self._stops[where] = [run[1] for run in runs]
        self._values[where] = [run[2] for run in runs]
