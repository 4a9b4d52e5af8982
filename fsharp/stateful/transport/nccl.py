"""NcclTransport: the collectives of NCCL, or of another device backend, on CUDA streams, and memory registered with NCCL."""

from collections.abc import Sequence
from typing import Any, get_args
from weakref import WeakSet

import torch
import torch.distributed as dist

from fsharp.distributed.job import callbacks_before_leaving
from fsharp.distributed.process_group import GroupKind, ProcessGroupComm, TransportGroups
from fsharp.errors import ScheduleError, problem
from fsharp.stateful.transport.base import Summand, Transport, Work

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclTransport(Transport):
    """A Transport of a device backend's collectives, on the current stream. The backend adds in the dtype of its input."""

    comm: ProcessGroupComm
    groups: TransportGroups
    compares_labels = False
    _registered: "RegisteredMemory | None" = None

    def gather_unpacked(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Gather ``xs[0]`` into ``outs[0]`` by the backend; in place if ``xs[0]`` is part of ``outs[0]``."""
        _all_gather(outs[0].view(torch.uint8), xs[0].view(torch.uint8), group=self.groups("gather", axis))
        return Work()

    def reduce_scatter_unpacked(self, summands: Sequence[Summand], axis: str, out_dtype: torch.dtype, label: str) -> list[Work]:
        """Sum the only summand by the backend in the dtype of ``x``, and cast the sum to ``out_dtype``."""
        x, out = summands[0].x, summands[0].out
        n, mine = self._size_and_coord(axis)
        part = x.view(n, -1)[mine]
        target = out if out is not None and out.dtype == x.dtype else part
        _reduce_scatter(target, x, group=self.groups("reduce", axis))
        if out is None:
            return [Work(result=target.to(out_dtype))]
        return [Work(result=out if target is out else out.copy_(target))]

    def all_reduce_unpacked(self, summands: Sequence[Summand], axis: str, label: str) -> list[Work]:
        """Sum the only summand in the dtype of ``x``: in ``out``, or if ``out`` has another dtype in ``scratch``, then cast."""
        x, out = summands[0].x, summands[0].required_out
        target = out if out.dtype == x.dtype else summands[0].scratch.view(x.dtype)[: len(x)]
        dist.all_reduce(target.copy_(x), group=self.groups("reduce", axis))
        if target is not out:
            out.copy_(target)
        return [Work()]

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Exchange equal parts by the backend, viewed as bytes."""
        dist.all_to_all_single(out.view(torch.uint8), x.view(torch.uint8), group=self.groups("reduce", axis))
        return Work()

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, sums_into_out: bool = False) -> int:
        """Return ``numel * itemsize`` for an all_reduce without ``sums_into_out``: ``out`` cannot hold the sum. Else 0."""
        return numel * itemsize if op == "all_reduce" and not sums_into_out else 0

    def allocate_arena(self, nbytes: int, memory_kind: str) -> torch.Tensor:
        """Return ``uint8[nbytes]`` on the device: torch's memory, or memory registered with the communicators of all axes."""
        if memory_kind == "allocator":
            return super().allocate_arena(nbytes, memory_kind)
        if self._registered is None:
            groups = dict.fromkeys(self.groups(kind, axis) for axis, _ in self.comm.mesh.axes for kind in get_args(GroupKind))
            self._registered = RegisteredMemory(self.comm, list(groups), is_symmetric=memory_kind == "symmetric")
        return self._registered.allocate(nbytes)


class RegisteredMemory:
    """Device memory from NCCL's allocator, registered with the communicators of some groups, so that NCCL makes no copies.

    The memory is in a pool of torch's allocator: torch registers whole pools. Each group's communicator is made first, by an
    ``all_reduce`` of 4 bytes. For symmetric windows all ranks have to make the same calls of :meth:`allocate`.
    """

    def __init__(self, comm: ProcessGroupComm, groups: Sequence[dist.ProcessGroup], *, is_symmetric: bool) -> None:
        self.comm, self.device, self.is_symmetric = comm, comm.device, is_symmetric
        for group in groups:
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self._backends: list[Any] = [group._get_backend(self.device) for group in groups]
        self._pool: torch.cuda.MemPool | None = None
        _all_registered.add(self)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return new registered memory: ``uint8[nbytes]``. Earlier memory of this object is no longer registered.

        Raises:
            ScheduleError: torch or NCCL cannot allocate or register such memory.
        """
        self.deregister()
        try:
            pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
            with torch.cuda.use_mem_pool(pool):
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            for backend in self._backends:
                backend.register_mem_pool(pool, symm=True) if self.is_symmetric else backend.register_mem_pool(pool)
        except (AttributeError, RuntimeError, TypeError) as error:
            kind = "symmetric" if self.is_symmetric else "registered"
            facts = [("torch", torch.__version__), ("arena", f"{nbytes} bytes")]
            what = f"torch or NCCL cannot make {kind} memory on {self.device}: {error}"
            raise ScheduleError(problem("Scheduler", what, facts, "Pass arena_memory='allocator'.")) from error
        self._pool = pool
        return memory

    def deregister(self) -> None:
        """Wait for the device, then remove the memory from the communicators. The memory stays valid."""
        pool, self._pool = self._pool, None
        if pool is None or self.comm.watch.error is not None:  # an error has ended the communicators
            return
        torch.accelerator.synchronize(self.device)
        for backend in self._backends:
            backend.deregister_mem_pool(pool)


_all_registered: WeakSet[RegisteredMemory] = WeakSet()


def _deregister_all() -> None:
    for memory in list(_all_registered):
        memory.deregister()


callbacks_before_leaving.append(_deregister_all)  # NCCL fails to destroy a communicator that has windows
