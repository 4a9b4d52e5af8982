"""RegisteredMemory: device memory that NCCL's communicators know, so that NCCL makes no copies for collectives."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from fsharp.errors import ScheduleError, problem
from fsharp.functional.comm.process_group import ProcessGroupComm, callbacks_before_leaving


class RegisteredMemory:
    """Device memory from NCCL's allocator, registered with the communicators of some process groups.

    The memory is in a pool of torch's allocator, as torch registers whole pools.

    Args:
        comm: the ranks.
        groups: process groups of these ranks over NCCL. Each communicator is made first, by an ``all_reduce`` of 4 bytes.
        is_symmetric: register symmetric windows. All ranks then allocate equally often, and equally many bytes.
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
