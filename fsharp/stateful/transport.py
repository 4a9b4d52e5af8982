"""Transport: collectives along one axis into memory that the caller owns, which may still run when the call returns.

Three of them: :class:`Blocking` over any :class:`~fsharp.Comm`, :class:`Exchange` over gloo's asynchronous sends and
receives, and :class:`Native` over a backend's own collectives, on whatever CUDA stream is current.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from fsharp.functional.comm import Call, Comm, CountingComm, sent_nbytes
from fsharp.functional.process_group import ProcessGroupComm
from fsharp.stateful.workers import Flight, Worker

Kind = Literal["gather", "reduce"]
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ticket:
    """A collective under way.

    Args:
        works: what has to complete.
        then: what is left to do after that; its result is the ticket's.
    """

    __slots__ = ("_result", "_then", "_works")

    def __init__(self, works: Sequence[Any] = (), then: Callable[[], Any] | None = None, result: Any = None) -> None:
        self._works, self._then, self._result = works, then, result

    def wait(self) -> Any:
        """Block until it is done, and finish it. Only the first call does something."""
        for work in self._works:
            work.wait()
        self._works = ()
        if self._then is not None:
            then, self._then = self._then, None
            self._result = then()
        return self._result


class Transport(ABC):
    """Collectives along an axis. Results are bit for bit those of the :class:`~fsharp.Comm` it is made from."""

    @abstractmethod
    def gather(self, x: torch.Tensor, out: torch.Tensor, axis: str) -> Ticket:
        """Every rank's ``x`` of ``c`` elements into ``out`` of ``n * c``; ``x`` may be this rank's part of ``out``."""

    @abstractmethod
    def reduce_scatter(
        self, x: torch.Tensor, axis: str, *, dtype: torch.dtype, scratch: torch.Tensor, out: torch.Tensor | None = None
    ) -> Ticket:
        """The sum over ranks of this rank's part of ``x``.

        Args:
            x: ``n * c`` elements; may be overwritten if ``out`` is None.
            axis: the axis to sum along.
            dtype: of the sum.
            scratch: as many bytes as :meth:`scratch_nbytes` says.
            out: ``c`` elements for the result. None: the ticket's result is a tensor that is valid until ``x`` or
                ``scratch`` is written to.
        """

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, scratch: torch.Tensor) -> Ticket:
        """The sum over ranks of ``x`` into ``out``, of another dtype or the same.

        The result of the ticket is one more ticket, for what is left to do once ``scratch`` and ``x`` are free.
        """

    @abstractmethod
    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int) -> int:
        """Bytes of scratch for a ``"reduce_scatter"`` or ``"all_reduce"`` of ``numel`` elements."""

    @property
    def innermost(self) -> "Transport":
        """Without what is wrapped around it."""
        return self

    def close(self) -> None:
        """Give up whatever is under way."""


class Blocking(Transport):
    """Any Comm: each collective is done when the call returns."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def gather(self, x: torch.Tensor, out: torch.Tensor, axis: str) -> Ticket:
        """Blocks."""
        out.copy_(self.comm.all_gather(x, axis).view(-1))
        return Ticket()

    def reduce_scatter(
        self, x: torch.Tensor, axis: str, *, dtype: torch.dtype, scratch: torch.Tensor, out: torch.Tensor | None = None
    ) -> Ticket:
        """Blocks."""
        n = self.comm.mesh.axis_size(axis)
        result = self.comm.reduce_scatter(x.view(n, -1), axis, dtype=dtype)
        return Ticket(result=result if out is None else out.copy_(result))

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, scratch: torch.Tensor) -> Ticket:
        """Blocks."""
        if x.dtype == out.dtype:
            out.copy_(self.comm.all_reduce(x, axis))
            return Ticket(result=Ticket())
        n = self.comm.mesh.axis_size(axis)
        padded = torch.nn.functional.pad(x, (0, -len(x) % n)).view(n, -1)
        summed = self.comm.reduce_scatter(padded, axis, dtype=out.dtype)
        out.copy_(self.comm.all_gather(summed, axis).view(-1)[: len(out)])
        return Ticket(result=Ticket())

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int) -> int:
        """None."""
        return 0


class Groups:
    """Process groups of a scheduler's own, so that its gathers and its reductions do not wait for each other.

    Made at first use, which every rank has to reach; with ``separate=False`` the groups of the Comm.
    """

    def __init__(self, comm: ProcessGroupComm, *, separate: bool) -> None:
        self.comm, self.separate = comm, separate
        self._made: dict[tuple[Kind, str], dist.ProcessGroup] = {}

    def __call__(self, kind: Kind, axis: str) -> dist.ProcessGroup:
        """The group along an axis for one kind of collective."""
        if not self.separate:
            return self.comm.group(axis)
        if (kind, axis) not in self._made:
            mesh = self.comm.mesh
            lists = sorted({mesh.group(axis, rank) for rank in range(mesh.size)})
            made, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists])
            self._made[kind, axis] = made
        return self._made[kind, axis]

    def close(self) -> None:
        """Use them no more: what is under way in them may never end. Those made next have to be made by all ranks."""
        self._made.clear()


_Errand = Literal["gather", "reduce", "share"]
# What is under way in one group at a time is told apart by tags, so that the order of posts counts within each kind only.
_TAGS: dict[str, int] = {"gather": 1, "reduce": 2, "share": 3}


class Exchange(Transport):
    """gloo: each rank sends every other its part, straight from and to memory, and adds what arrives in order of rank.

    Workers stand where a GPU has streams: one posts sends and receives, which may take as long as gloo is busy with earlier
    ones; one for each kind of collective waits for them, and takes the sums.
    """

    def __init__(self, comm: ProcessGroupComm, groups: Groups) -> None:
        self.comm, self.groups = comm, groups
        self.patience: Callable[[], None] = lambda: None
        self.watch: Callable[[Flight], None] | None = None  # told of each flight that takes off
        self._start()

    def _start(self) -> None:
        self._post = Worker("posts")
        self._waits: dict[str, Worker] = {kind: Worker(kind) for kind in ("gather", "reduce", "share")}

    def gather(self, x: torch.Tensor, out: torch.Tensor, axis: str) -> Ticket:
        """Asynchronous; the parts land in ``out``."""
        parts = out.view(self.comm.mesh.axis_size(axis), -1)
        mine = self.comm.mesh.coord(axis, self.comm.rank)
        if x.data_ptr() != parts[mine].data_ptr():
            parts[mine].copy_(x)
        return self._fly("gather", [parts[mine]] * len(parts), list(parts), axis, lambda: None)

    def reduce_scatter(
        self, x: torch.Tensor, axis: str, *, dtype: torch.dtype, scratch: torch.Tensor, out: torch.Tensor | None = None
    ) -> Ticket:
        """Asynchronous."""
        parts = list(x.view(self.comm.mesh.axis_size(axis), -1))
        received = self._received(parts, len(parts[0]), axis, scratch)
        return self._fly("reduce", parts, received, axis, lambda: _sum(received, dtype, out))

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, scratch: torch.Tensor) -> Ticket:
        """Reduces each rank's part, then gathers the parts; asynchronous."""
        n, mine = self.comm.mesh.axis_size(axis), self.comm.mesh.coord(axis, self.comm.rank)
        size = -(-len(x) // n)
        parts, results = ([each[size * r : size * (r + 1)] for r in range(n)] for each in (x, out))
        received = self._received(parts, len(parts[mine]), axis, scratch)

        def share() -> Ticket:
            _sum(received, out.dtype, results[mine])
            return self._fly("share", [results[mine]] * n, results, axis, lambda: None)

        return self._fly("reduce", parts, received, axis, share)

    def _received(self, parts: list[torch.Tensor], size: int, axis: str, scratch: torch.Tensor) -> list[torch.Tensor]:
        """Where each rank's summand of this rank's part will be: its own where it is, the others' in scratch."""
        n, mine = len(parts), self.comm.mesh.coord(axis, self.comm.rank)
        room = scratch.view(parts[mine].dtype)[: (n - 1) * size].view(n - 1, size)
        return [*room[:mine], parts[mine], *room[mine:]]

    def _fly(
        self, kind: _Errand, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], axis: str, then: Callable[[], Any]
    ) -> Ticket:
        """Exchange ``send[r]`` for ``receive[r]`` with each rank ``r`` of the axis, then do what is left to do."""
        group = self.groups("gather" if kind == "gather" else "reduce", axis)
        mine, waits, tag = self.comm.mesh.coord(axis, self.comm.rank), self._waits[kind], _TAGS[kind]
        flight = Flight(self.patience)
        if self.watch is not None:
            self.watch(flight)

        def post() -> None:
            try:
                works = _post(group, send, receive, mine, tag)
            except Exception as error:
                flight.land(error=error)
                return
            waits.submit(partial(_complete, works, then, flight))

        self._post.submit(post)
        return Ticket([flight], flight.wait)

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int) -> int:
        """The parts of the others."""
        n = self.comm.mesh.axis_size(axis)
        return -(-numel // n) * (n - 1) * itemsize

    def close(self) -> None:
        """Leave groups and workers to what is under way in them."""
        self.groups.close()
        self._start()


def _post(
    group: dist.ProcessGroup, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], mine: int, tag: int
) -> list[Any]:
    works = []
    for shift in range(1, len(send)):
        to, source = (mine + shift) % len(send), (mine - shift) % len(send)
        if receive[source].numel():
            works.append(group.recv([receive[source]], source, tag))
        if send[to].numel():
            works.append(group.send([send[to]], to, tag))
    return works


def _complete(works: Sequence[Any], then: Callable[[], Any], flight: Flight) -> None:
    try:
        for work in works:
            work.wait()
        flight.land(then())
    except Exception as error:
        flight.land(error=error)


def _sum(parts: Sequence[torch.Tensor], dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """The sum in order of rank, into ``out``, or where the first part is if that has the dtype."""
    first = parts[0]
    if out is None:
        result = first if first.dtype == dtype else first.to(dtype)
        for part in parts[1:]:
            result += part
        return result
    if len(parts) > 1 and first.dtype == dtype == out.dtype:
        torch.add(first, parts[1], out=out)
        parts = parts[1:]
    else:
        out.copy_(first)
    for part in parts[1:]:
        out += part
    return out


class Native(Transport):
    """A backend's own collectives, issued on the current CUDA stream: a ticket is done as far as the host is concerned."""

    def __init__(self, comm: ProcessGroupComm, groups: Groups) -> None:
        self.comm, self.groups = comm, groups

    def gather(self, x: torch.Tensor, out: torch.Tensor, axis: str) -> Ticket:
        """In place if ``x`` is part of ``out``."""
        _all_gather(out.view(torch.uint8), x.view(torch.uint8), group=self.groups("gather", axis))
        return Ticket()

    def reduce_scatter(
        self, x: torch.Tensor, axis: str, *, dtype: torch.dtype, scratch: torch.Tensor, out: torch.Tensor | None = None
    ) -> Ticket:
        """Summed by the backend in the dtype of ``x``."""
        n, mine = self.comm.mesh.axis_size(axis), self.comm.mesh.coord(axis, self.comm.rank)
        part = x.view(n, -1)[mine]
        target = out if out is not None and out.dtype == x.dtype else part
        _reduce_scatter(target, x, group=self.groups("reduce", axis))
        if out is None:
            return Ticket(result=target.to(dtype))
        return Ticket(result=out if target is out else out.copy_(target))

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, scratch: torch.Tensor) -> Ticket:
        """Summed by the backend in the dtype of ``x``."""
        target = out if out.dtype == x.dtype else scratch.view(x.dtype)[: len(x)]
        dist.all_reduce(target.copy_(x), group=self.groups("reduce", axis))
        if target is not out:
            out.copy_(target)
        return Ticket(result=Ticket())

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int) -> int:
        """What an all_reduce in a dtype of its own needs."""
        return numel * itemsize if op == "all_reduce" else 0

    def close(self) -> None:
        """Abort the groups."""
        self.groups.close()


class Counted(Transport):
    """Passes on to ``inner`` and counts like a :class:`~fsharp.CountingComm`."""

    def __init__(self, inner: Transport, comm: CountingComm) -> None:
        self.inner, self.comm = inner, comm

    @property
    def innermost(self) -> Transport:
        """That of ``inner``."""
        return self.inner.innermost

    def _count(self, op: str, axis: str, nbytes: int) -> None:
        self.comm.calls[Call(op, axis, sent_nbytes(op, nbytes, self.comm.mesh.axis_size(axis)))] += 1

    def gather(self, x: torch.Tensor, out: torch.Tensor, axis: str) -> Ticket:
        """Counted."""
        self._count("all_gather", axis, x.numel() * x.dtype.itemsize)
        return self.inner.gather(x, out, axis)

    def reduce_scatter(
        self, x: torch.Tensor, axis: str, *, dtype: torch.dtype, scratch: torch.Tensor, out: torch.Tensor | None = None
    ) -> Ticket:
        """Counted."""
        self._count("reduce_scatter", axis, x.numel() // self.comm.mesh.axis_size(axis) * x.dtype.itemsize)
        return self.inner.reduce_scatter(x, axis, dtype=dtype, scratch=scratch, out=out)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, scratch: torch.Tensor) -> Ticket:
        """Counted; with a wire of its own as the two collectives that it then is."""
        part = -(-x.numel() // self.comm.mesh.axis_size(axis))
        if x.dtype == out.dtype:
            self._count("all_reduce", axis, part * x.dtype.itemsize)
        else:
            self._count("reduce_scatter", axis, part * x.dtype.itemsize)
            self._count("all_gather", axis, part * out.dtype.itemsize)
        return self.inner.all_reduce(x, out, axis, scratch=scratch)

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int) -> int:
        """As ``inner``."""
        return self.inner.scratch_nbytes(op, axis, numel, itemsize)

    def close(self) -> None:
        """As ``inner``."""
        self.inner.close()


class Local(Transport):
    """Axes of size 1, where collectives are copies: what a :class:`~fsharp.SingleComm` has."""

    def gather(self, x: torch.Tensor, out: torch.Tensor, axis: str) -> Ticket:
        """A copy."""
        out.copy_(x)
        return Ticket()

    def reduce_scatter(
        self, x: torch.Tensor, axis: str, *, dtype: torch.dtype, scratch: torch.Tensor, out: torch.Tensor | None = None
    ) -> Ticket:
        """A cast."""
        return Ticket(result=x.to(dtype) if out is None else out.copy_(x))

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, scratch: torch.Tensor) -> Ticket:
        """A copy."""
        out.copy_(x)
        return Ticket(result=Ticket())

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int) -> int:
        """None."""
        return 0
