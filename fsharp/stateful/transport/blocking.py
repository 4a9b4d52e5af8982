"""Transports whose collectives are done when the call returns: over any Comm, and over none."""

import torch

from fsharp.functional.comm.protocol import Comm
from fsharp.stateful.transport.base import PackingTransport, Summand, Work


class BlockingTransport(PackingTransport):
    """Any Comm: each collective is done when the call returns."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def gather_one(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Gather over the Comm; it is over when the call returns."""
        out.copy_(self.comm.all_gather(x, axis, label=label).view(-1))
        return Work()

    def reduce_scatter_one(self, one: Summand, axis: str, dtype: torch.dtype, label: str) -> Work:
        """Sum over the Comm; it is over when the call returns."""
        n = self.comm.mesh.axis_size(axis)
        result = self.comm.reduce_scatter(one.x.view(n, -1), axis, dtype=dtype, label=label)
        return Work(result=result if one.out is None else one.out.copy_(result))

    def all_reduce_one(self, one: Summand, axis: str, label: str) -> Work:
        """Sum over the Comm; it is over when the call returns."""
        x, out = one.x, one.place
        if x.dtype == out.dtype:
            out.copy_(self.comm.all_reduce(x, axis, label=label))
            return Work(result=Work())
        n = self.comm.mesh.axis_size(axis)
        padded = torch.nn.functional.pad(x, (0, -len(x) % n)).view(n, -1)
        summed = self.comm.reduce_scatter(padded, axis, dtype=out.dtype, label=label)
        out.copy_(self.comm.all_gather(summed, axis, label=label).view(-1)[: len(out)])
        return Work(result=Work())

    def exchange(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Exchange parts over the Comm; it is over when the call returns."""
        n = self.comm.mesh.axis_size(axis)
        sizes = [len(x) // n] * n
        out.copy_(self.comm.all_to_all(x, sizes, sizes, axis=axis, label=label))
        return Work()


class LocalTransport(PackingTransport):
    """Axes of size 1, where collectives are copies: what a :class:`~fsharp.SingleComm` has."""

    def gather_one(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Copy this rank's part, the only one."""
        out.copy_(x)
        return Work()

    def reduce_scatter_one(self, one: Summand, axis: str, dtype: torch.dtype, label: str) -> Work:
        """Cast the only summand to ``dtype``."""
        return Work(result=one.x.to(dtype) if one.out is None else one.out.copy_(one.x))

    def all_reduce_one(self, one: Summand, axis: str, label: str) -> Work:
        """Copy the only summand."""
        one.place.copy_(one.x)
        return Work(result=Work())

    def exchange(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Copy the only part."""
        out.copy_(x)
        return Work()
