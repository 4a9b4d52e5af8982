"""Where in one arena each buffer goes, planned over a whole step.

A buffer keeps one address over all the times that it is live: tensors saved in the forward point at it. The smallest
arena is hard to find in general (dynamic storage allocation), yet easy where buffers meet only those of units near by, as
they do here. So they are placed in an order in which each meets those placed just before it; then a dead end is near its
cause, and a search that takes back the last choice first soon finds the arena of the lower bound, or one close to it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import tee

_SLACKS = (0.0, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25)  # arenas to try, by how much they are larger than the bound
_PLACED = 20_000  # buffers that searches may place, and place again, before the next larger arena is tried

# Of the places that a buffer fits in, which to try first: by bytes below it, bytes it leaves of its gap, bytes above it.
Fit = Callable[[int, int, int], int]
_FITS: tuple[Fit, ...] = (lambda at, spare, above: min(at, above), lambda at, spare, above: spare, lambda at, spare, above: at)


@dataclass(frozen=True, slots=True)
class Item:
    """A buffer that keeps one address.

    Attributes:
        nbytes: its size, a multiple of the alignment.
        spans: ``(first, last)`` positions, both inclusive, between which it is live; they do not overlap.
    """

    nbytes: int
    spans: tuple[tuple[int, int], ...]


def lower_bound(items: Sequence[Item]) -> int:
    """Bytes that are live at once at most."""
    changes = sorted(change for item in items for a, b in item.spans for change in ((a, item.nbytes), (b + 1, -item.nbytes)))
    most = live = 0
    for _, nbytes in changes:  # at one position what ends sorts before what begins
        live += nbytes
        most = max(most, live)
    return most


def assign(items: Sequence[Item], *, within: int | None = None) -> list[int] | None:
    """The first byte of each item, such that items that are live at once share no byte.

    Starts are multiples of what all sizes are multiples of. The same items get the same answer.

    Args:
        items: what to place.
        within: bytes that may be taken; None if there is no place within them, or none is found soon.
    """
    if not items:
        return []
    if within is not None and lower_bound(items) > within:
        return None
    neighbours = _neighbours(items)
    least, grain = max(lower_bound(items), _clique(items, neighbours)), math.gcd(*(item.nbytes for item in items)) or 1
    orders = _orders(items, neighbours)  # made as they are needed: mostly the first will do
    if within is not None:
        found = (_search(items, neighbours, order, _FITS[0], target=within, limit=2 * len(items))[0] for order in orders)
        return next(filter(None, found), None)
    for slack in _SLACKS:
        target, budget = least + int(least * slack) // grain * grain, _PLACED
        for fit in _FITS:
            orders, again = tee(orders)
            for order in again:
                limit = min(2 * len(items) + 1000, budget)
                starts, placed = _search(items, neighbours, order, fit, target=target, limit=limit)
                budget -= placed
                if starts:
                    return starts
    ample = sum(item.nbytes for item in items)
    fits = [_search(items, neighbours, order, _FITS[-1], target=ample, limit=len(items))[0] for order in orders]
    return min(fits, key=lambda starts: max(start + item.nbytes for start, item in zip(starts, items, strict=True)))


def _clique(items: Sequence[Item], neighbours: Sequence[Sequence[int]]) -> int:
    """Bytes of buffers that are live together two by two, if not all at one time: with one address each, it is the same."""
    near = [set(each) for each in neighbours]
    load = [item.nbytes + sum(items[j].nbytes for j in near[i]) for i, item in enumerate(items)]
    most = 0
    for seed in sorted(range(len(items)), key=lambda i: -load[i])[:16]:
        members = [seed]
        for i in sorted(near[seed], key=lambda i: -items[i].nbytes):
            if near[i].issuperset(members):
                members.append(i)
        most = max(most, sum(items[i].nbytes for i in members))
    return most


def _neighbours(items: Sequence[Item]) -> list[list[int]]:
    """For each item, those that are live at a time when it is."""
    spans = sorted((a, b, i) for i, item in enumerate(items) if item.nbytes for a, b in item.spans)
    result: list[set[int]] = [set() for _ in items]
    live: list[tuple[int, int]] = []
    for a, b, i in spans:
        live = [(end, j) for end, j in live if end >= a]
        for _, j in live:
            result[i].add(j)
            result[j].add(i)
        live.append((b, i))
    return [sorted(each) for each in result]


def _orders(items: Sequence[Item], neighbours: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    every = range(len(items))
    size = [item.nbytes for item in items]
    load = [size[i] + sum(size[j] for j in neighbours[i]) for i in every]
    first = [min((a for a, _ in item.spans), default=0) for item in items]
    last = [max((a for a, _ in item.spans), default=0) for item in items]
    seeds = (max(every, key=load.__getitem__), max(every, key=size.__getitem__), 0, max(every, key=first.__getitem__))
    for seed in dict.fromkeys(seeds):
        yield _spreading(seed, size, neighbours)
    yield sorted(every, key=lambda i: -last[i])
    yield sorted(every, key=lambda i: first[i])


def _spreading(seed: int, size: Sequence[int], neighbours: Sequence[Sequence[int]]) -> list[int]:
    """From ``seed`` on, always the item that meets the most bytes of those before it (maximum cardinality search)."""
    met = [0] * len(size)
    order: dict[int, None] = {}
    heap = [(1, 0, i) for i in range(len(size))]
    heappush(heap, (-1, 0, seed))
    while heap:
        i = heappop(heap)[2]
        if i in order:
            continue
        order[i] = None
        for j in set(neighbours[i]).difference(order):
            met[j] += size[i]
            heappush(heap, (-met[j], -size[j], j))
    return list(order)


def _search(
    items: Sequence[Item], neighbours: Sequence[Sequence[int]], order: Sequence[int], fit: Fit, *, target: int, limit: int
) -> tuple[list[int], int]:
    """Places of all items below ``target``, or none, and how many items were placed to find out.

    At a dead end the latest choice is taken back first.
    """
    rank = {i: k for k, i in enumerate(order)}
    before = [[j for j in neighbours[i] if rank[j] < rank[i]] for i in range(len(items))]
    starts = [0] * len(items)

    def places(i: int) -> list[int]:
        """Either end of each gap that is large enough, the one to try first at the end."""
        nbytes, top, found = items[i].nbytes, 0, set()
        for start, stop in [*sorted((starts[j], starts[j] + items[j].nbytes) for j in before[i]), (target, target)]:
            spare = start - top - nbytes
            if spare >= 0:
                found |= {(fit(at, spare, target - at - nbytes), at) for at in (top, start - nbytes)}
            top = max(top, stop)
        return [at for _, at in sorted(found, reverse=True)]

    open_ = [places(order[0])]
    for placed in range(limit):
        while open_ and not open_[-1]:
            open_.pop()
        if not open_:
            return [], placed
        starts[order[len(open_) - 1]] = open_[-1].pop()
        if len(open_) == len(items):
            return starts, placed
        open_.append(places(order[len(open_)]))
    return [], limit
