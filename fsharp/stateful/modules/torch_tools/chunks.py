"""Chunks: a rank's part of a tensor as boxes of the whole tensor, the form that torch.distributed.checkpoint takes."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor whose elements follow each other in the flattened tensor: first index and length in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[Box]:
    """Yield boxes that tile the elements ``[first, last)`` of a flattened tensor, in order; at most two a dim, less one.

    >>> [tuple(box) for box in boxes((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    while first < last:
        start, within = divmod(first, row)
        if within == 0 and last - first >= row:  # whole rows
            stop = last // row
            yield Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
            first = stop * row
        else:
            end = min(row, last - start * row)
            for box in boxes(shape[1:], within, end):
                yield Box((start, *box.offsets), (1, *box.sizes))
            first = start * row + end
