"""Packing leaves into a flat buffer that ``n`` ranks cut into equal parts, so that no atom is cut. Integers only.

A leaf is one contiguous run of the buffer, so that a gathered leaf is a view. An atom is a run of elements that stays on one
rank: one element, one or more rows, or the whole leaf. The buffer has ``n`` equal parts of ``capacity`` elements, so that one
``all_gather`` makes it whole without a copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fsharp.errors import LayoutError
from fsharp.tracebacks import api_boundary

_NUM_EXHAUSTIVE_TRIES = 2048
"""Capacities tried one by one before larger strides take over."""


@dataclass(frozen=True, slots=True)
class ElementAtom:
    """An atom of one element: a rank boundary may cut a leaf anywhere.

    If no format has blocks, the padding of a buffer has fewer elements than there are parts.
    """

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements in one atom of a leaf of this shape: 1."""
        return 1

    def __str__(self) -> str:
        return "element"


@api_boundary
@dataclass(frozen=True, slots=True)
class RowsAtom:
    """An atom of ``n`` rows: a leaf is cut only between blocks of ``n`` indices of dim 0. The last block may be shorter.

    Args:
        n: number of rows in a block, at least 1.

    Raises:
        LayoutError: ``n`` is not an integer of at least 1.
    """

    n: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 1:
            raise LayoutError(f"RowsAtom(): n is {self.n!r}, expected an integer of at least 1.")

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements in one atom of a leaf of this shape: in ``n`` rows, or in all if the leaf has fewer."""
        return min(self.n, shape[0] or 1) * math.prod(shape[1:]) if shape else 1

    def __str__(self) -> str:
        return "row" if self.n == 1 else f"{self.n} rows"


@dataclass(frozen=True, slots=True)
class LeafAtom:
    """An atom of the whole leaf: one rank holds all elements, for an optimizer that needs whole matrices, such as Muon."""

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements in one atom of a leaf of this shape: all its elements."""
        return math.prod(shape)

    def __str__(self) -> str:
        return "whole tensor"


Atom = ElementAtom | RowsAtom | LeafAtom


@dataclass(frozen=True, slots=True)
class Packing:
    """The result of :func:`pack`: the offset of each leaf in the flat buffer, and the number of elements in each part."""

    offsets: tuple[int, ...]
    capacity: int


@lru_cache(maxsize=4096)
def pack(sizes: tuple[int, ...], atoms: tuple[int, ...], num_parts: int, block: int = 1) -> Packing:
    """Lay out leaves of ``sizes`` elements over ``num_parts`` parts of equal capacity, and make the capacity small.

    The end of a part may cut leaf ``i`` only at a multiple of ``atoms[i]`` elements from the leaf's start. The capacity is a
    multiple of ``block`` elements, and of the greatest common divisor of all atoms and sizes.

    Leaves with larger atoms are placed first, and leaves with equal atoms in their order. Each leaf gets the first free offset
    at which no atom is cut. If all atoms are one element, the capacity is ``ceil(total / num_parts)``, in whole blocks.
    Otherwise the capacity is the least such multiple with which this placement succeeds. But after 2,048 failures a bisection
    finds a larger capacity, which need not be the least. The cost grows with the number of leaves, not with ``num_parts``.

    >>> pack((10, 6), (1, 1), 4)
    Packing(offsets=(0, 10), capacity=4)
    >>> pack((10, 6), (5, 6), 3)                      # rows of 5, and one whole leaf of 6; element 6 stays free
    Packing(offsets=(7, 0), capacity=6)
    """
    items = [(atom, size, i) for i, (size, atom) in enumerate(zip(sizes, atoms, strict=True)) if size]
    total = sum(size for _, size, _ in items)
    step = math.gcd(*(math.gcd(atom, size) for atom, size, _ in items)) if items else 1
    step = math.lcm(step, block)
    largest = max((atom for atom, _, _ in items), default=0)
    order = sorted(items, key=lambda item: (-item[0], item[2]))

    capacity = max(-(-total // num_parts), largest)
    capacity = -(-capacity // step) * step
    for _ in range(_NUM_EXHAUSTIVE_TRIES):
        capacity = _next_possible_capacity(capacity, items, step)
        if (offsets := _first_fit_offsets(order, capacity, num_parts)) is not None:
            break
        capacity += step
    else:
        offsets, capacity = _search_capacity(order, capacity, step, num_parts, total)
    return Packing(tuple(offsets.get(i, 0) for i in range(len(sizes))), capacity)


def _next_possible_capacity(capacity: int, items: Sequence[tuple[int, int, int]], step: int) -> int:
    """Return the least number of elements of a part, from ``capacity`` on, with which :func:`pack` may succeed.

    The result is a multiple of ``step``. A leaf longer than two parts contains a whole part, wherever the leaf begins. Both
    ends of this part cut the leaf between atoms. So the result is also a multiple of the atom of each such leaf.
    ``items``: for each leaf ``(elements of an atom, elements of the leaf, index)``.
    """
    while True:
        long = [(atom, size) for atom, size, _ in items if size > 2 * capacity]
        unit = math.lcm(step, *(atom for atom, _ in long))
        target = -(-capacity // unit) * unit
        shorter = min((-(-size // 2) for _, size in long), default=target)
        if target <= max(shorter, capacity):
            return target
        capacity = -(-shorter // step) * step


def _search_capacity(
    order: Sequence[tuple[int, int, int]], capacity: int, step: int, num_parts: int, total: int
) -> tuple[dict[int, int], int]:
    """Return offsets of leaves, and a capacity of ``capacity`` or more, a multiple of ``step``, into which the leaves fit.

    The search raises the capacity, to ``total`` at most, and then bisects. ``order``: for each leaf ``(elements of an atom,
    elements of the leaf, index)``, in the order of placement.
    """
    tried = capacity - step
    while (offsets := _first_fit_offsets(order, capacity, num_parts)) is None:
        tried = capacity
        capacity = min(-(-(capacity + capacity // 256) // step) * step + step, -(-total // step) * step)
    while capacity - tried > step:
        middle = (tried + capacity) // 2 // step * step
        if (found := _first_fit_offsets(order, middle, num_parts)) is None:
            tried = middle
        else:
            capacity, offsets = middle, found
    return offsets, capacity


def _first_fit_offsets(order: Sequence[tuple[int, int, int]], capacity: int, num_parts: int) -> dict[int, int] | None:
    """Return offsets of leaves, by index, in a buffer of ``num_parts`` parts with ``capacity`` elements each.

    A leaf gets the first free offset at which no boundary of parts cuts an atom. If a leaf finds none, the result is None.
    ``order``: for each leaf ``(elements of an atom, elements of the leaf, index)``, in the order of placement.
    """
    free = [(0, capacity * num_parts)]
    offsets = {}
    for atom, size, index in order:
        for k, (start, end) in enumerate(free):
            offset = _first_legal_offset(start, size, atom, capacity)
            if offset is not None and offset + size <= end:
                gaps = [(start, offset), (offset + size, end)]
                free[k : k + 1] = [gap for gap in gaps if gap[0] < gap[1]]
                offsets[index] = offset
                break
        else:
            return None
    return offsets


def _first_legal_offset(start: int, size: int, atom: int, capacity: int) -> int | None:
    """Return the first offset from ``start`` on at which each part boundary in the leaf lies between two atoms; else None."""
    for _ in range(3):
        boundary = (start // capacity + 1) * capacity
        if start + size <= boundary:
            return start
        if capacity % atom == 0:
            return -(-start // atom) * atom
        head = (boundary - start) // atom * atom
        if head and size - head <= capacity:
            return boundary - head
        start = boundary
    return None
