"""CountedTransport: a transport that counts what goes through it."""

from collections.abc import Sequence

import torch

from fsharp.functional.comm.protocol import CountingComm
from fsharp.stateful.transport.base import Summand, Transport, Work


class CountedTransport(Transport):
    """Passes on to ``inner`` and counts like a :class:`~fsharp.CountingComm`."""

    def __init__(self, inner: Transport, comm: CountingComm) -> None:
        self.inner, self.comm = inner, comm

    @property
    def innermost(self) -> Transport:
        """The transport at the bottom, which moves the bytes."""
        return self.inner.innermost

    def gather(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, *, label: str = "") -> Work:
        """Count one gather, and begin it on ``inner``."""
        self.comm.count("all_gather", axis, sum(x.nbytes for x in xs))
        return self.inner.gather(xs, outs, axis, label=label)

    def reduce_scatter(
        self, summands: Sequence[Summand], axis: str, n: int, dtype: torch.dtype, *, label: str = ""
    ) -> list[Work]:
        """Count one reduction, and begin it on ``inner``."""
        self.comm.count("reduce_scatter", axis, sum(each.x.nbytes for each in summands) // n)
        return self.inner.reduce_scatter(summands, axis, n, dtype, label=label)

    def all_reduce(self, summands: Sequence[Summand], axis: str, n: int, *, label: str = "") -> list[Work]:
        """Counted; with a wire of its own as the two collectives that it then is."""
        parts = sum(-(-len(each.x) // n) for each in summands)
        wire, wide = summands[0].x.dtype, summands[0].place.dtype
        if wire == wide:
            self.comm.count("all_reduce", axis, parts * wire.itemsize)
        else:
            self.comm.count("reduce_scatter", axis, parts * wire.itemsize)
            self.comm.count("all_gather", axis, parts * wide.itemsize)
        return self.inner.all_reduce(summands, axis, n, label=label)

    def exchange(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Count an all_to_all along the axis, and begin it on ``inner``."""
        self.comm.count("all_to_all", axis, x.nbytes // self.comm.mesh.axis_size(axis))
        return self.inner.exchange(x, out, axis, label)

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """What ``inner`` needs to work in."""
        return self.inner.scratch_nbytes(op, axis, numel, itemsize, apart=apart)

    def make(self) -> None:
        """Have ``inner`` make its process groups."""
        self.inner.make()
