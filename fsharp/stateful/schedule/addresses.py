"""Assign addresses in one arena to the buffers of a whole step.

A buffer keeps one address for all of its live spans, as tensors saved in the forward point into the buffer. The smallest arena
is hard to find in general (dynamic storage allocation). Buffers are placed one after another, each in a gap that is free during
all of its spans. The result depends on the order of the buffers, so several orders are tried, first in an arena without a
limit. Then a depth-first search tries arenas as large as the bytes live at once, or a little larger.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product

from fsharp.stateful.schedule.ops import Stream

_ARENA_SLACKS = (0.0, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25)
"""Sizes of arenas in which addresses are searched, as the fraction by which a size exceeds the lower bound."""
_MAX_COMPARISONS = 2_000_000
"""Comparisons of two buffers for one arena, about a fifth of a second. One order is tried even if it takes more."""
_MAX_SPARE_PLACEMENTS = 300
"""Placements in one search, besides 1.5 for each buffer."""

AddressScore = Callable[[int, int, int], int]
"""The score of an address for a buffer, from the bytes below it, left in its gap, and above it. The least score is best."""
_ADDRESS_SCORES: tuple[AddressScore, ...] = (
    lambda at, spare, above: spare,
    lambda at, spare, above: min(at, above),
    lambda at, spare, above: at,
)


@dataclass(frozen=True, slots=True)
class ArenaItem:
    """A buffer that keeps one address in the arena. It is live in ``spans``: disjoint ``(first, last)``, both inclusive."""

    nbytes: int
    spans: tuple[tuple[int, int], ...]


def live_nbytes_by_position(items: Iterable[ArenaItem]) -> list[int]:
    """Return the bytes that are live at each position, from 0 to the last position of any span."""
    spans = [(first, last, item.nbytes) for item in items for first, last in item.spans]
    change = [0] * (max((last for _, last, _ in spans), default=-1) + 2)
    for first, last, nbytes in spans:
        change[first] += nbytes
        change[last + 1] -= nbytes
    return list(accumulate(change))[:-1]


def peak_nbytes(items: Iterable[ArenaItem]) -> int:
    """Return the largest number of bytes that are live at one position: no arena can be smaller."""
    return max(live_nbytes_by_position(items), default=0)


@lru_cache(maxsize=64)  # simulated ranks compile the same program, and candidates of tune often do
def assign_addresses(items: tuple[ArenaItem, ...], *, max_nbytes: int | None = None) -> tuple[int, ...] | None:
    """Return the first byte of each item, such that items that are live at one position share no byte.

    Starts are multiples of the greatest common divisor of all sizes. Equal ``items`` give equal results.

    Args:
        items: the buffers to place.
        max_nbytes: limit of the arena. The result is None if the search ends before it finds addresses within the limit.

    Cost: about ``_MAX_COMPARISONS`` comparisons of two buffers. One order, quadratic in the number of items, is always tried.
    """
    least, grain = peak_nbytes(items), math.gcd(*(item.nbytes for item in items)) or 1
    if not items or (max_nbytes is not None and least > max_nbytes):
        return None if items else ()
    search, orders = _AddressSearch(items), list[list[int]]()
    if max_nbytes is not None:
        target = max_nbytes // grain * grain
        found = (search.find_addresses(order, score, target) for order in search.orders() for score in _ADDRESS_SCORES)
        return next(filter(None, found), None)
    best: tuple[int, ...] = ()
    arena = total = sum(item.nbytes for item in items)
    for order in search.orders():
        starts = search.find_addresses(order, _ADDRESS_SCORES[0], total)
        if starts is None:
            break
        nbytes = max(start + item.nbytes for start, item in zip(starts, items, strict=True))
        if not best or nbytes < arena:
            best, arena = starts, nbytes
        orders.append(order)
    targets = sorted({least + int(slack * least) // grain * grain for slack in _ARENA_SLACKS})
    for target, order, score in product(targets, orders, _ADDRESS_SCORES):
        if target >= arena:
            break
        starts = search.find_addresses(order, score, target)
        if starts is not None:
            return starts
    return best


class _AddressSearch:
    """Searches addresses for all items, depth first, until ``_MAX_COMPARISONS`` comparisons have been made.

    Attributes:
        lifetimes: a bit mask for each item. Masks have a common bit if the items are live at one position.
    """

    def __init__(self, items: Sequence[ArenaItem]) -> None:
        self.items = items
        begins = sorted({first for item in items for first, _ in item.spans})
        # Two spans overlap if both contain the last begin up to one of their ends.
        meets = sorted({begins[bisect_right(begins, last) - 1] for item in items for _, last in item.spans})
        bits = [[(bisect_left(meets, a), bisect_right(meets, b)) for a, b in item.spans] for item in items]
        self.lifetimes = [sum((1 << stop) - (1 << start) for start, stop in each) for each in bits]
        self.num_compared = 0

    def find_addresses(self, order: Sequence[int], score: AddressScore, arena_nbytes: int) -> tuple[int, ...] | None:
        """Return an address for each item in an arena of ``arena_nbytes``; None if the search fails or takes too long.

        Items are placed in ``order``, each where ``score`` is least. If an item does not fit, earlier items are moved.
        """
        if self.num_compared > _MAX_COMPARISONS:
            return None
        placed: list[tuple[int, int, int]] = []  # starts, stops and lifetimes, in order of addresses
        path: list[tuple[int, int, int]] = []  # the same, in order of placement
        untried: list[list[int]] = []  # addresses that are left to try: for each item in ``path``, and for the next item
        for _ in range(_MAX_SPARE_PLACEMENTS + 3 * len(order) // 2):
            untried.append(self._free_addresses_best_last(order[len(path)], placed, score, arena_nbytes))
            while not untried[-1]:
                untried.pop()
                if not path:
                    return None
                placed.remove(path.pop())
            i, start = order[len(path)], untried[-1].pop()
            path.append((start, start + self.items[i].nbytes, self.lifetimes[i]))
            insort(placed, path[-1])
            if len(path) == len(order):
                starts = dict(zip(order, [start for start, _, _ in path], strict=True))
                return tuple(starts[i] for i in range(len(order)))
        return None

    def _free_addresses_best_last(
        self, i: int, placed: Sequence[tuple[int, int, int]], score: AddressScore, limit: int
    ) -> list[int]:
        """Return addresses for item ``i``, at both ends of each gap that holds the item. The address of least score is last."""
        size, lifetime, top, found = self.items[i].nbytes, self.lifetimes[i], 0, set[tuple[int, int]]()
        self.num_compared += len(placed)
        for start, stop, other in (*placed, (limit, limit + 1, lifetime)):
            if stop > top and other & lifetime:
                spare = start - top - size
                if spare >= 0:
                    found |= {(score(at, spare, limit - at - size), at) for at in (top, top + spare)}
                top = stop
        return [at for _, at in sorted(found, reverse=True)]

    def orders(self) -> Iterator[list[int]]:
        """Yield orders in which to place the items: by beginning, by duration, by end, and by bytes that are live with them."""
        items, every = self.items, range(len(self.items))
        first, last = ([item.spans[k][k] if item.spans else 0 for item in items] for k in (0, -1))
        duration = [sum(stop - start for start, stop in item.spans) for item in items]
        yield sorted(every, key=lambda i: (first[i], -duration[i]))
        yield sorted(every, key=lambda i: -duration[i])
        yield sorted(every, key=lambda i: (-last[i], -duration[i]))
        for seed in dict.fromkeys((max(every, key=lambda i: items[i].nbytes), 0, max(every, key=first.__getitem__))):
            if self.num_compared <= _MAX_COMPARISONS:
                yield self._overlap_order_from_item(seed)

    def _overlap_order_from_item(self, first: int) -> list[int]:
        """Return an order that begins with item ``first``. Next is always the item live beside most bytes of earlier items."""
        lifetimes, met, order = self.lifetimes, dict.fromkeys(range(len(self.items)), 0), list[int]()
        self.num_compared += len(self.items) ** 2 // 2
        while met:
            i = max(met, key=met.__getitem__) if order else first
            del met[i]
            order.append(i)
            for j in met:
                if lifetimes[j] & lifetimes[i]:
                    met[j] += self.items[i].nbytes
        return order


class ByteRanges:
    """A map from disjoint runs of bytes to an op's stream and position. A call takes time for the runs that overlap it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._values: list[tuple[Stream, int]] = []

    def values_over(self, start: int, stop: int) -> Iterator[tuple[Stream, int]]:
        """Yield the values of the runs that overlap the bytes ``start`` to ``stop``."""
        yield from self._values[self._overlapping_slice(start, stop)]

    def _overlapping_slice(self, start: int, stop: int) -> slice:
        return slice(bisect_right(self._stops, start), bisect_left(self._starts, stop) if start < stop else 0)

    def set_value(self, start: int, stop: int, value: tuple[Stream, int]) -> None:
        """Set the value of bytes ``start`` to ``stop``."""
        if start >= stop:
            return
        where, runs = self._overlapping_slice(start, stop), [(start, stop, value)]
        if where.start < where.stop:
            first, last = where.start, where.stop - 1
            if self._starts[first] < start:
                runs = [(self._starts[first], start, self._values[first]), *runs]
            if self._stops[last] > stop:
                runs = [*runs, (stop, self._stops[last], self._values[last])]
        self._starts[where] = [run[0] for run in runs]
        self._stops[where] = [run[1] for run in runs]
        self._values[where] = [run[2] for run in runs]
