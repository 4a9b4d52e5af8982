"""NcclTransport: the collectives of NCCL, or of another device backend, on CUDA streams."""

from collections.abc import Sequence
from typing import get_args

import torch
import torch.distributed as dist

from fsharp.functional.comm.process_group import ProcessGroupComm
from fsharp.stateful.transport.base import GroupKind, ProcessGroups, Summand, Transport, Work
from fsharp.stateful.transport.registered import RegisteredMemory

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclTransport(Transport):
    """A Transport of a device backend's collectives, on the current stream. The backend sums in the dtype of its input."""

    comm: ProcessGroupComm
    groups: ProcessGroups
    _registered: RegisteredMemory | None = None

    def gather_each(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Gather, in place if ``x`` is part of ``out``."""
        _all_gather(outs[0].view(torch.uint8), xs[0].view(torch.uint8), group=self.groups("gather", axis))
        return Work()

    def reduce_scatter_each(self, summands: Sequence[Summand], axis: str, dtype: torch.dtype, label: str) -> list[Work]:
        """Sum by the backend, and cast sums to ``dtype``."""
        x, out = summands[0].x, summands[0].out
        n, mine = self._size_and_coord(axis)
        part = x.view(n, -1)[mine]
        target = out if out is not None and out.dtype == x.dtype else part
        _reduce_scatter(target, x, group=self.groups("reduce", axis))
        if out is None:
            return [Work(result=target.to(dtype))]
        return [Work(result=out if target is out else out.copy_(target))]

    def all_reduce_each(self, summands: Sequence[Summand], axis: str, label: str) -> list[Work]:
        """Sum by the backend, and cast sums to the dtype of ``out``."""
        x, out = summands[0].x, summands[0].required_out
        target = out if out.dtype == x.dtype else summands[0].scratch.view(x.dtype)[: len(x)]
        dist.all_reduce(target.copy_(x), group=self.groups("reduce", axis))
        if target is not out:
            out.copy_(target)
        return [Work()]

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Exchange equal parts, viewed as bytes, by an all_to_all."""
        dist.all_to_all_single(out.view(torch.uint8), x.view(torch.uint8), group=self.groups("reduce", axis))
        return Work()

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, sums_into_out: bool = False) -> int:
        """Return the bytes of scratch for an all_reduce: 0 if ``out`` has the dtype of the input."""
        return numel * itemsize if op == "all_reduce" and not sums_into_out else 0

    def allocate_arena(self, nbytes: int, memory_kind: str) -> torch.Tensor:
        """Return memory on the device. Registered memory is known to the communicators of all axes."""
        if memory_kind == "allocator":
            return super().allocate_arena(nbytes, memory_kind)
        if self._registered is None:
            groups = dict.fromkeys(self.groups(kind, axis) for axis, _ in self.comm.mesh.axes for kind in get_args(GroupKind))
            self._registered = RegisteredMemory(self.comm, list(groups), is_symmetric=memory_kind == "symmetric")
        return self._registered.allocate(nbytes)
