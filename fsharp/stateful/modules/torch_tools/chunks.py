"""Chunks: a rank's part of a tensor as boxes of the whole tensor, the form that torch.distributed.checkpoint takes."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from fsharp.errors import TreeError
from fsharp.functional.layout.placement import Place
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout


class Box(NamedTuple):
    """A box of a tensor whose elements follow each other in the flattened tensor.

    Attributes:
        offsets: first index in each dim.
        sizes: length in each dim.
    """

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


class Chunks:
    """The chunks of one tensor that one rank holds.

    Args:
        path: name of the parameter, for messages.
        shape: of the whole tensor.
        local: this rank's elements.
        unit: layout of the unit that stores the tensor.
        leaf: leaf of that unit.
        place: where the tensor rests.
        rank: rank that holds ``local``.

    Raises:
        TreeError: chunks cannot describe the part, as ranks hold different tensors under this name, or parts of parts.
    """

    def __init__(
        self, path: str, shape: torch.Size, local: torch.Tensor, unit: UnitLayout, leaf: Leaf, place: Place, rank: int
    ) -> None:
        own = [axis for axis in place.varying if unit.mesh.axis_size(axis) > 1]
        if own or shape != leaf.shape:
            what = f"has different values on ranks along {own}" if own else "is sharded as a DTensor as well"
            raise TreeError(
                f"torch.distributed.checkpoint cannot describe {path!r}, which {what}. Save by fs.checkpoint.save()."
            )
        self._shape, self._local = shape, local.reshape(-1)
        run = unit.run_of(leaf, place, rank)
        self._boxes = list(boxes(shape, *run)) if shape.numel() else [Box((0,) * len(shape), tuple(shape))]

    def write_items(self, name: str) -> list[Any]:
        """Return what this rank has to write of the tensor; DCP lets one rank write what several hold.

        Args:
            name: of the tensor in the state dict.
        """
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self._shape),
            )
            for chunk in self.described()
        ]

    def described(self) -> list[Any]:
        """Return DCP's description of each chunk."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes]

    def at(self, offsets: Sequence[int]) -> torch.Tensor:
        """Return the elements of the chunk at these offsets, in this rank's memory."""
        start = 0
        for box in self._boxes:
            if box.offsets == tuple(offsets):
                return self._local[start : start + prod(box.sizes)].view(box.sizes)
            start += prod(box.sizes)
        raise ValueError(f"no chunk at {list(offsets)}; there are chunks at {[list(box.offsets) for box in self._boxes]}")
