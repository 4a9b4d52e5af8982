"""Transport: collectives along one axis into memory that the caller owns, which may still run when the call returns.

:class:`Blocking` runs over any :class:`~fsharp.Comm`, :class:`Native` over a backend's own collectives on whatever CUDA stream
is current, :class:`Local` has nobody to talk to; :mod:`fsharp.stateful.exchange` has the one over gloo, and
:mod:`fsharp.stateful.nearby` the one within a machine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from fsharp.functional.comm import Comm, CountingComm
from fsharp.functional.process_group import ProcessGroupComm

Kind = Literal["gather", "reduce"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
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

    is_async = False
    """Whether a ticket that the host waits for may have something to wait for."""

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
    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """Bytes of scratch for a ``"reduce_scatter"`` or ``"all_reduce"`` of ``numel`` elements.

        Args:
            op: which of them.
            axis: the axis to sum along.
            numel: of ``x``.
            itemsize: of ``x``.
            apart: ``out`` will be given, in the dtype of ``x``.
        """

    def reduces_in_place(self, axis: str, dtype: torch.dtype) -> bool:
        """Whether ``x`` and ``out`` of an ``all_reduce`` may be one, and it is cheaper then."""
        return False

    @property
    def innermost(self) -> "Transport":
        """Without what is wrapped around it."""
        return self

    def make(self, comm: Comm) -> None:
        """Make ready what all ranks have to make together.

        Args:
            comm: to agree through. Nothing is under way in it.
        """

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

    def reduces_in_place(self, axis: str, dtype: torch.dtype) -> bool:
        """It does."""
        return True

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """None."""
        return 0


class Groups:
    """Process groups of a scheduler's own, so that its gathers and its reductions do not wait for each other.

    With ``separate=False`` they are the groups of the Comm.
    """

    def __init__(self, comm: ProcessGroupComm, *, separate: bool) -> None:
        self.comm, self.separate = comm, separate
        self._made: dict[tuple[Kind, str], dist.ProcessGroup] = {}

    def make(self, *, but: Collection[str] = ()) -> None:
        """Make those along all axes ``but`` these. Every rank has to, at one point; a rank that comes alone waits for ever."""
        if self.separate:
            for axis, size in self.comm.mesh.axes:
                for kind in _KINDS if size > 1 and axis not in but else ():
                    self(kind, axis)

    def __call__(self, kind: Kind, axis: str) -> dist.ProcessGroup:
        """The group along an axis for one kind of collective."""
        if not self.separate:
            return self.comm.group(axis)
        if (kind, axis) not in self._made:
            self._made[kind, axis] = self.comm.new_group(axis)
        return self._made[kind, axis]

    def close(self) -> None:
        """Use them no more: what is under way in them may never end."""
        self._made.clear()


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

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """What an all_reduce in a dtype of its own needs."""
        return numel * itemsize if op == "all_reduce" else 0

    def make(self, comm: Comm) -> None:
        """The groups."""
        self.groups.make()

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

    def gather(self, x: torch.Tensor, out: torch.Tensor, axis: str) -> Ticket:
        """Counted."""
        self.comm.count("all_gather", axis, x.numel() * x.dtype.itemsize)
        return self.inner.gather(x, out, axis)

    def reduce_scatter(
        self, x: torch.Tensor, axis: str, *, dtype: torch.dtype, scratch: torch.Tensor, out: torch.Tensor | None = None
    ) -> Ticket:
        """Counted."""
        self.comm.count("reduce_scatter", axis, x.numel() // self.comm.mesh.axis_size(axis) * x.dtype.itemsize)
        return self.inner.reduce_scatter(x, axis, dtype=dtype, scratch=scratch, out=out)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, scratch: torch.Tensor) -> Ticket:
        """Counted; with a wire of its own as the two collectives that it then is."""
        part = -(-x.numel() // self.comm.mesh.axis_size(axis))
        if x.dtype == out.dtype:
            self.comm.count("all_reduce", axis, part * x.dtype.itemsize)
        else:
            self.comm.count("reduce_scatter", axis, part * x.dtype.itemsize)
            self.comm.count("all_gather", axis, part * out.dtype.itemsize)
        return self.inner.all_reduce(x, out, axis, scratch=scratch)

    def reduces_in_place(self, axis: str, dtype: torch.dtype) -> bool:
        """As ``inner``."""
        return self.inner.reduces_in_place(axis, dtype)

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """As ``inner``."""
        return self.inner.scratch_nbytes(op, axis, numel, itemsize, apart=apart)

    def make(self, comm: Comm) -> None:
        """As ``inner``."""
        self.inner.make(comm)

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

    def reduces_in_place(self, axis: str, dtype: torch.dtype) -> bool:
        """It does."""
        return True

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """None."""
        return 0
