"""Where in one arena each buffer goes, planned over a whole step.

A buffer keeps one address over all the times that it is live: tensors that were saved in the forward point at it.
Finding the smallest arena is hard (dynamic storage allocation), yet most plans are easy: greedy placement in a few
orders meets the lower bound, and the search stops where one does.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_EFFORT = 1_500_000  # pairs of buffers that the search may look at: some tenths of a second


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


def assign(items: Sequence[Item]) -> list[int]:
    """The first byte of each item: items that are live at once share no byte. The same items, the same answer."""
    bound = lower_bound(items)
    neighbours = _neighbours(items)
    effort = _EFFORT
    cost = len(items) + sum(map(len, neighbours))
    best: list[int] = [0] * len(items)
    least = -1
    for order in _orders(items, neighbours):
        for tight in (False, True):
            starts = _fit(items, neighbours, order, tight=tight)
            effort -= cost
            peak = _peak(items, starts)
            if least < 0 or peak < least:
                best, least, best_order, best_tight = starts, peak, order, tight
            if least == bound:
                return best
    rng = random.Random(0)
    order = best_order
    cur = least
    starts = best
    while effort > 0:
        trial = order[:]
        top = [i for i in order if starts[i] + items[i].nbytes == cur]
        i = rng.choice(top) if rng.random() < 0.7 else rng.choice(order)
        trial.remove(i)
        trial.insert(rng.randrange(len(trial)+1) if rng.random() < .5 else 0, i)
        ts = _fit(items, neighbours, trial, tight=best_tight)
        effort -= cost
        peak = _peak(items, ts)
        if peak <= cur * 1.0:
            order, cur, starts = trial, peak, ts
        if peak < least:
            best, least = ts, peak
        if least == bound:
            break
    return best


def _peak(items, starts):
    return max((a + i.nbytes for a, i in zip(starts, items)), default=0)


def _neighbours(items: Sequence[Item]) -> list[list[int]]:
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


def _orders(items: Sequence[Item], neighbours) -> Iterator[list[int]]:
    every = range(len(items))
    size = [item.nbytes for item in items]
    time = [sum(b - a + 1 for a, b in item.spans) for item in items]
    first = [min((a for a, _ in item.spans), default=0) for item in items]
    load = [size[i] + sum(size[j] for j in neighbours[i]) for i in every]
    keys = (
        lambda i: (-size[i], first[i]),
        lambda i: (-size[i], -time[i], first[i]),
        lambda i: (-size[i] * time[i], first[i]),
        lambda i: (first[i], -size[i]),
        lambda i: (-time[i], -size[i], first[i]),
        lambda i: (-load[i], first[i]),
        lambda i: (-len(neighbours[i]), -size[i], first[i]),
    )
    for key in keys:
        yield sorted(every, key=key)


def _fit(items, neighbours, order, *, tight) -> list[int]:
    starts = [-1] * len(items)
    for i in order:
        taken = sorted((starts[j], starts[j] + items[j].nbytes) for j in neighbours[i] if starts[j] >= 0)
        at, least, nbytes = -1, -1, items[i].nbytes
        top = 0
        for start, stop in taken:
            gap = start - top
            if gap >= nbytes and (at < 0 or gap < least):
                at, least = top, gap
                if not tight:
                    break
            top = max(top, stop)
        starts[i] = at if at >= 0 else top
    return starts
