"""Skyline: how high buffers stand on one another, at each position of a step."""

from collections.abc import Iterable

Spans = Iterable[tuple[int, int]]


class Skyline:
    """A height for each of some positions, that only grows.

    A tree over the positions: a node has the height that all below it have at least, and the largest of any below it.
    Cost: a call is logarithmic in the number of positions, for each span.
    """

    def __init__(self, positions: int) -> None:
        self._size = 1 << max(positions - 1, 0).bit_length()
        self._all = [0] * (2 * self._size)
        self._most = [0] * (2 * self._size)
        self._positions = positions

    def _cover(self, first: int, last: int) -> list[int]:
        """The nodes that together are the positions from ``first`` to ``last``."""
        nodes, low, high = [], first + self._size, last + self._size + 1
        while low < high:
            if low & 1:
                nodes.append(low)
                low += 1
            if high & 1:
                high -= 1
                nodes.append(high)
            low, high = low >> 1, high >> 1
        return nodes

    def top(self, spans: Spans) -> int:
        """The largest height within spans of positions, ends included."""
        most = 0
        for first, last in spans:
            for node in self._cover(first, last):
                most = max(most, self._most[node])
                while node := node >> 1:
                    most = max(most, self._all[node])
        return most

    def put(self, spans: Spans, height: int) -> None:
        """Have at least a height within spans of positions, ends included."""
        for first, last in spans:
            for node in self._cover(first, last):
                self._all[node] = max(self._all[node], height)
                while node and self._most[node] < height:
                    self._most[node] = height
                    node >>= 1

    def values(self) -> list[int]:
        """The height at each position."""
        here = list(self._all)
        for node in range(2, 2 * self._size):
            here[node] = max(here[node], here[node >> 1])
        return here[self._size : self._size + self._positions]
