"""NcclTransport: a backend's own collectives, on CUDA streams."""

import torch
import torch.distributed as dist

from fsharp.functional.comm.process_group import ProcessGroupComm
from fsharp.stateful.transport.base import PackingTransport, ProcessGroups, Summand, Work

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclTransport(PackingTransport):
    """A backend's own collectives, issued on the current CUDA stream: a Work is done as far as the host is concerned."""

    def __init__(self, comm: ProcessGroupComm, groups: ProcessGroups) -> None:
        self.comm, self.groups = comm, groups

    def gather_one(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """In place if ``x`` is part of ``out``."""
        _all_gather(out.view(torch.uint8), x.view(torch.uint8), group=self.groups("gather", axis))
        return Work()

    def reduce_scatter_one(self, one: Summand, axis: str, dtype: torch.dtype, label: str) -> Work:
        """Summed by the backend in the dtype of ``x``."""
        x, out = one.x, one.out
        part = x.view(self.comm.mesh.axis_size(axis), -1)[self.comm.mesh.coord(axis, self.comm.rank)]
        target = out if out is not None and out.dtype == x.dtype else part
        _reduce_scatter(target, x, group=self.groups("reduce", axis))
        if out is None:
            return Work(result=target.to(dtype))
        return Work(result=out if target is out else out.copy_(target))

    def all_reduce_one(self, one: Summand, axis: str, label: str) -> Work:
        """Summed by the backend in the dtype of ``x``."""
        x, out = one.x, one.place
        target = out if out.dtype == x.dtype else one.scratch.view(x.dtype)[: len(x)]
        dist.all_reduce(target.copy_(x), group=self.groups("reduce", axis))
        if target is not out:
            out.copy_(target)
        return Work(result=Work())

    def exchange(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Exchange equal parts as bytes."""
        dist.all_to_all_single(out.view(torch.uint8), x.view(torch.uint8), group=self.groups("reduce", axis))
        return Work()

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """Return the bytes of scratch that an all_reduce needs: none where ``out`` is given in the dtype of its input."""
        return numel * itemsize if op == "all_reduce" and not apart else 0

    def make(self) -> None:
        """Make the process groups, which all ranks do together."""
        self.groups.make()
