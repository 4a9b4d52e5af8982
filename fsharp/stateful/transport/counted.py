"""CountedTransport: a transport that counts what goes through it."""

from collections.abc import Sequence

import torch

from fsharp.functional.comm.protocol import CountingComm
from fsharp.stateful.transport.base import Transport, Work


class CountedTransport(Transport):
    """Passes on to ``inner`` and counts like a :class:`~fsharp.CountingComm`."""

    def __init__(self, inner: Transport, comm: CountingComm) -> None:
        self.inner, self.comm = inner, comm

    @property
    def innermost(self) -> Transport:
        """The transport at the bottom, which moves the bytes."""
        return self.inner.innermost

    def gather(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, label: str = "") -> Work:
        """Count a gather, and begin it on ``inner``."""
        return self.gather_coalesced([x], [out], axis, label=label)

    def gather_coalesced(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, *, label: str = "") -> Work:
        """Count one gather, and begin it on ``inner``."""
        self.comm.count("all_gather", axis, sum(x.nbytes for x in xs))
        return self.inner.gather_coalesced(xs, outs, axis, label=label)

    def reduce_scatter(
        self,
        x: torch.Tensor,
        axis: str,
        *,
        dtype: torch.dtype,
        scratch: torch.Tensor,
        out: torch.Tensor | None = None,
        label: str = "",
    ) -> Work:
        """Count a reduction, and begin it on ``inner``."""
        n = self.comm.mesh.axis_size(axis)
        return self.reduce_scatter_coalesced([x], axis, n, dtype=dtype, scratch=[scratch], outs=[out], label=label)[0]

    def reduce_scatter_coalesced(
        self,
        xs: Sequence[torch.Tensor],
        axis: str,
        n: int,
        *,
        dtype: torch.dtype,
        scratch: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor | None],
        label: str = "",
    ) -> list[Work]:
        """Count one reduction, and begin it on ``inner``."""
        self.comm.count("reduce_scatter", axis, sum(x.nbytes for x in xs) // n)
        return self.inner.reduce_scatter_coalesced(xs, axis, n, dtype=dtype, scratch=scratch, outs=outs, label=label)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, scratch: torch.Tensor, label: str = "") -> Work:
        """Count a reduction, and begin it on ``inner``."""
        n = self.comm.mesh.axis_size(axis)
        return self.all_reduce_coalesced([x], [out], axis, n, scratch=[scratch], label=label)[0]

    def all_reduce_coalesced(
        self,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        axis: str,
        n: int,
        *,
        scratch: Sequence[torch.Tensor],
        label: str = "",
    ) -> list[Work]:
        """Counted; with a wire of its own as the two collectives that it then is."""
        parts, wire, wide = sum(-(-len(x) // n) for x in xs), xs[0].dtype, outs[0].dtype
        if wire == wide:
            self.comm.count("all_reduce", axis, parts * wire.itemsize)
        else:
            self.comm.count("reduce_scatter", axis, parts * wire.itemsize)
            self.comm.count("all_gather", axis, parts * wide.itemsize)
        return self.inner.all_reduce_coalesced(xs, outs, axis, n, scratch=scratch, label=label)

    def exchange(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, label: str = "") -> Work:
        """Count an all_to_all along the axis, and begin it on ``inner``."""
        self.comm.count("all_to_all", axis, x.nbytes // self.comm.mesh.axis_size(axis))
        return self.inner.exchange(x, out, axis, label=label)

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """What ``inner`` needs to work in."""
        return self.inner.scratch_nbytes(op, axis, numel, itemsize, apart=apart)

    def make(self) -> None:
        """Have ``inner`` make its process groups."""
        self.inner.make()
