"""BlockingTransport: collectives over any Comm. A collective is done when its call returns."""

from collections.abc import Sequence

import torch

from fsharp.functional.comm.protocol import EqualParts
from fsharp.stateful.transport.base import Summand, Transport, Work


class BlockingTransport(Transport):
    """A Transport over any Comm. When a method returns, its collective is done. The Comm counts and labels collectives.

    :class:`Transport` packs several buffers into one before it calls a method of this class. So each method gets one buffer.
    """

    def gather_unpacked(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Gather ``xs[0]`` into ``outs[0]`` by the Comm's all_gather."""
        outs[0].copy_(self.comm.all_gather(xs[0], axis, label=label).view(-1))
        return Work()

    def reduce_scatter_unpacked(self, summands: Sequence[Summand], axis: str, out_dtype: torch.dtype, label: str) -> list[Work]:
        """Sum this rank's part of the only summand over ranks, by the Comm's reduce_scatter."""
        x, out = summands[0].x, summands[0].out
        result = self.comm.reduce_scatter(x.view(self.comm.mesh.axis_size(axis), -1), axis, dtype=out_dtype, label=label)
        return [Work(result=result if out is None else out.copy_(result))]

    def all_reduce_unpacked(self, summands: Sequence[Summand], axis: str, label: str) -> list[Work]:
        """Sum the only buffer by an all_reduce; if ``out`` has another dtype, by a reduce_scatter and an all_gather."""
        [summand] = summands
        x, out = summand.x, summand.required_out
        if x.dtype == out.dtype:
            out.copy_(self.comm.all_reduce(x, axis, label=label))
            return [Work()]
        n = self.comm.mesh.axis_size(axis)
        padded = torch.nn.functional.pad(x, (0, -len(x) % n)).view(n, -1)
        summed = self.comm.reduce_scatter(padded, axis, dtype=out.dtype, label=label)
        out.copy_(self.comm.all_gather(summed, axis, label=label).view(-1)[: len(out)])
        return [Work()]

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Exchange equal parts of ``x``, one for each rank, by the Comm's all_to_all."""
        n = self.comm.mesh.axis_size(axis)
        sizes = EqualParts([len(x) // n] * n)
        out.copy_(self.comm.all_to_all(x, sizes, sizes, axis=axis, label=label))
        return Work()
