"""Nearby: collectives among ranks of one machine through memory that they share; along all other axes, an Exchange.

One worker does them one after another, in the order in which they begin, which is the same on all ranks. Gathers and reductions
have one link: on cores that compute meanwhile, what is done by turns takes as long.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fsharp.functional.comm import Comm, CountingComm
from fsharp.functional.errors import CommError
from fsharp.functional.process_group import ProcessGroupComm
from fsharp.stateful.exchange import Exchange, add
from fsharp.stateful.linking import link
from fsharp.stateful.links import Links
from fsharp.stateful.policy import Policy
from fsharp.stateful.transport import Blocking, Counted, Groups, Local, Native, Ticket, Transport
from fsharp.stateful.workers import Flight, Worker


class Nearby(Exchange):
    """Which axes stay within a machine is found out the first time that all ranks meet, and holds from then on.

    Args:
        comm: the ranks.
        groups: for the other axes.
        is_wanted: False makes all axes other ones, on all ranks.
    """

    def __init__(self, comm: ProcessGroupComm, groups: Groups, *, is_wanted: bool = True) -> None:
        super().__init__(comm, groups)
        self._is_wanted = is_wanted
        self._links: dict[str, Links] = {}
        self._agreed: frozenset[str] | None = None

    def _start(self) -> None:
        super()._start()
        self._crew["near"] = Worker("near")

    def gather(self, x: torch.Tensor, out: torch.Tensor, axis: str) -> Ticket:
        """Asynchronous; the parts land in ``out``."""
        links = self._links.get(axis)
        if links is None:
            return super().gather(x, out, axis)
        parts = self._parts_around(x, out, axis)
        return self._do(lambda: links.share(parts))

    def reduce_scatter(
        self, x: torch.Tensor, axis: str, *, dtype: torch.dtype, scratch: torch.Tensor, out: torch.Tensor | None = None
    ) -> Ticket:
        """Asynchronous. Without ``out`` the result is where this rank's part was, if that has the dtype."""
        links = self._links.get(axis)
        if links is None:
            return super().reduce_scatter(x, axis, dtype=dtype, scratch=scratch, out=out)
        parts, result = self._parts_to(x, axis, dtype, out)
        ticket = self._do(lambda: links.reduce(parts, result, add))
        return Ticket([ticket], lambda: result)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, scratch: torch.Tensor) -> Ticket:
        """Reduces each rank's part, then gathers the parts; asynchronous. In ``out`` alone if that has the dtype of ``x``."""
        links = self._links.get(axis)
        if links is None:
            return super().all_reduce(x, out, axis, scratch=scratch)
        is_alike = x.dtype == out.dtype
        if is_alike and x.data_ptr() != out.data_ptr():
            out.copy_(x)
        mine, parts, results = self._parts_of_both(out if is_alike else x, out, axis)
        reduced = self._do(lambda: links.reduce(parts, results[mine], add), lambda: links.share(results))
        return Ticket(result=Ticket(then=lambda: reduced.wait().wait())) if is_alike else reduced

    def _do(self, *jobs: Callable[[], None]) -> Ticket:
        """Have the worker do jobs one after another. The result of each one's ticket is the next one's."""
        flights = [self._take_off() for _ in jobs]
        self._crew["near"].submit(partial(_work, jobs, flights))
        return _chained(flights)

    def reduces_in_place(self, axis: str, dtype: torch.dtype) -> bool:
        """Wherever memory is shared."""
        return axis in self._links or super().reduces_in_place(axis, dtype)

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """None where memory is shared: summands are added where they have arrived."""
        if axis in self._links:
            return 0
        return super().scratch_nbytes(op, axis, numel, itemsize, apart=apart)

    def make(self, comm: Comm) -> None:
        """The links, and groups for all other axes.

        Raises:
            CommError: memory that could be shared before an error cannot be shared any more.
        """
        if not self._links and self._agreed != frozenset():
            self._links = link(comm, is_wanted=self._is_wanted)
            axes = frozenset(self._links)
            if self._agreed not in (None, axes):
                raise CommError(
                    f"Scheduler: memory was shared along {sorted(self._agreed or ())} before an error, and cannot be any more. "
                    "Make another Scheduler."
                )
            self._agreed = axes
        self.groups.make(but=self._agreed or ())

    def close(self) -> None:
        """Leave links, groups and workers to what is under way in them; whoever waits at a link finds out."""
        for links in self._links.values():
            links.close()
        self._links = {}
        super().close()


def _work(jobs: Sequence[Callable[[], None]], flights: list[Flight]) -> None:
    error: Exception | None = None
    for job, flight in zip(jobs, flights, strict=True):
        try:
            if error is None:
                job()
        except Exception as raised:
            error = raised
        flight.land(error=error)
    del flights, flight, error  # an error has this frame


def _chained(flights: list[Flight]) -> Ticket:
    first, *rest = flights
    return Ticket([first], (lambda: _chained(rest)) if rest else None)


def transport_over(comm: Comm, policy: Policy) -> Transport:
    """The transport that a Comm allows for."""
    if isinstance(comm, CountingComm):
        return Counted(transport_over(comm.inner, policy), comm)
    if not isinstance(comm, ProcessGroupComm):
        return Local() if comm.mesh.size == 1 else Blocking(comm)
    groups = Groups(comm, separate=policy.separate_groups)
    if comm.is_native:
        return Native(comm, groups)
    return Nearby(comm, groups, is_wanted=policy.shared_memory)
