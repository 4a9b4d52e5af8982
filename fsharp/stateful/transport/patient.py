"""Patient: a Comm whose callers do not wait in vain."""

import copy
from collections.abc import Callable

import torch

from fsharp.functional.comm import Comm, CountingComm, ReduceOp
from fsharp.functional.mesh import Mesh
from fsharp.functional.process_group import ProcessGroupComm
from fsharp.stateful.transport.workers import Flight, Worker


class Patient:
    """Passes every call on to ``inner`` in a thread, and asks now and then whether there is any use in waiting.

    Args:
        inner: a Comm whose calls block the host.
        patience: gives, for each call, what is called twice a second while it takes, and raises to end the wait.
    """

    def __init__(self, inner: Comm, patience: Callable[[], Callable[[], None]]) -> None:
        self.inner, self._patience, self._worker = inner, patience, Worker("calls")
        self._has_old_groups = True  # the caller's, who may have others call in them than we do

    @property
    def mesh(self) -> Mesh:
        """Of ``inner``."""
        return self.inner.mesh

    @property
    def rank(self) -> int:
        """Of ``inner``."""
        return self.inner.rank

    @property
    def device(self) -> torch.device:
        """Of ``inner``."""
        return self.inner.device

    def all_gather(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """As ``inner``."""
        return self._wait(lambda comm: comm.all_gather(x, axis))

    def reduce_scatter(self, x: torch.Tensor, axis: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As ``inner``."""
        return self._wait(lambda comm: comm.reduce_scatter(x, axis, dtype=dtype))

    def all_reduce(self, x: torch.Tensor, axis: str, *, op: ReduceOp = "sum") -> torch.Tensor:
        """As ``inner``."""
        return self._wait(lambda comm: comm.all_reduce(x, axis, op=op))

    def begin(self, call: Callable[[Comm], torch.Tensor]) -> Flight:
        """Have the thread make this call, after those before it; whoever waits for the flight gets the result."""
        flight, inner = Flight(self._patience()), self.inner

        def job() -> None:
            try:
                flight.land(call(inner))
            except Exception as error:
                flight.land(error=error)

        self._worker.submit(job)
        return flight

    def _wait(self, call: Callable[[Comm], torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = self.begin(call).wait()
        return result

    def close(self) -> None:
        """Leave the thread, and the groups, to what it waits for."""
        self._worker = Worker("calls")
        self._has_old_groups = True

    def make(self) -> None:
        """Other groups, if something may be under way in these; every rank has to. The caller's Comm keeps its own."""
        if self._has_old_groups:
            self.inner, self._has_old_groups = _over_new_groups(self.inner), False


def _over_new_groups(comm: Comm) -> Comm:
    if isinstance(comm, CountingComm):
        other = copy.copy(comm)  # which counts into the same counter
        other.inner = _over_new_groups(comm.inner)
        return other
    assert isinstance(comm, ProcessGroupComm)
    return comm.over({axis: comm.new_group(axis) for axis, size in comm.mesh.axes if size > 1})
