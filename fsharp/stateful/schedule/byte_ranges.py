"""ByteRanges: a value for each byte of an arena, kept as runs, so that what overlaps a run is found by bisection."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteRanges(Generic[T]):
    """Disjoint runs of bytes, each with a value.

    Cost: a call is logarithmic in the number of runs, and linear in how many of them it overlaps.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._values: list[T] = []

    def over(self, start: int, stop: int) -> Iterator[T]:
        """The values of the runs that share a byte with ``start`` to ``stop``."""
        yield from self._values[self._slice(start, stop)]

    def put(self, start: int, stop: int, value: T) -> None:
        """These bytes have this value, and no other."""
        self._replace(start, stop, [(start, stop, value)])

    def clear(self, start: int, stop: int) -> None:
        """These bytes have no value."""
        self._replace(start, stop, [])

    def _slice(self, start: int, stop: int) -> slice:
        return slice(bisect_right(self._stops, start), bisect_left(self._starts, stop) if start < stop else 0)

    def _replace(self, start: int, stop: int, runs: list[tuple[int, int, T]]) -> None:
        if start >= stop:
            return
        where = self._slice(start, stop)
        if where.start < where.stop:
            first, last = where.start, where.stop - 1
            if self._starts[first] < start:
                runs = [(self._starts[first], start, self._values[first]), *runs]
            if self._stops[last] > stop:
                runs = [*runs, (stop, self._stops[last], self._values[last])]
        self._starts[where] = [run[0] for run in runs]
        self._stops[where] = [run[1] for run in runs]
        self._values[where] = [run[2] for run in runs]
