"""Transport: collectives along one axis into memory that the caller owns, which may still run when the call returns."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, get_args
from weakref import WeakMethod

import torch
import torch.distributed as dist

from fsharp.functional.comm.process_group import ProcessGroupComm, abort

Kind = Literal["gather", "reduce"]
_KINDS: tuple[Kind, ...] = get_args(Kind)


class Work:
    """A collective under way.

    Args:
        then: waits for it, and does what is left to do; its result is the Work's.
        result: that of a collective that is done.
    """

    __slots__ = ("_result", "_then")

    def __init__(self, then: Callable[[], Any] | None = None, result: Any = None) -> None:
        self._then, self._result = then, result

    def wait(self) -> Any:
        """Block until it is done, and finish it. Nothing to do after that; one that has failed fails again."""
        if self._then is not None:
            self._result = self._then()
            self._then = None
        return self._result


class Transport(ABC):
    """Collectives along an axis. Results are bit for bit those of the :class:`~fsharp.Comm` it is made from."""

    is_async = False
    """Whether a Work that the host waits for may have something to wait for."""

    @abstractmethod
    def gather(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, label: str = "") -> Work:
        """Every rank's ``x`` of ``c`` elements into ``out`` of ``n * c``; ``x`` may be this rank's part of ``out``."""

    @abstractmethod
    def reduce_scatter(
        self,
        x: torch.Tensor,
        axis: str,
        *,
        dtype: torch.dtype,
        scratch: torch.Tensor,
        out: torch.Tensor | None = None,
        label: str = "",
    ) -> Work:
        """The sum over ranks of this rank's part of ``x``.

        Args:
            x: ``n * c`` elements; may be overwritten if ``out`` is None.
            axis: the axis to sum along.
            dtype: of the sum.
            scratch: as many bytes as :meth:`scratch_nbytes` says.
            label: what it is for; ranks compare it.
            out: ``c`` elements for the result. None: the Work's result is a tensor that is valid until ``x`` or
                ``scratch`` is written to.
        """

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, scratch: torch.Tensor, label: str = "") -> Work:
        """The sum over ranks of ``x`` into ``out``, of another dtype or the same.

        The result of the Work is one more Work, for what is left to do once ``scratch`` and ``x`` are free.
        """

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """Bytes of scratch for a ``"reduce_scatter"`` or ``"all_reduce"`` of ``numel`` elements.

        Args:
            op: which of them.
            axis: the axis to sum along.
            numel: of ``x``.
            itemsize: of ``x``.
            apart: ``out`` will be given, in the dtype of ``x``.
        """
        return 0

    @property
    def innermost(self) -> "Transport":
        """Without what is wrapped around it."""
        return self

    def make(self) -> None:
        """Make ready what all ranks have to make together."""


class ProcessGroups:
    """Process groups of a scheduler's own, so that its gathers and its reductions do not wait for each other.

    With ``separate=False`` they are the groups of the Comm.
    """

    def __init__(self, comm: ProcessGroupComm, *, separate: bool) -> None:
        self.comm, self.separate = comm, separate
        self._made: dict[tuple[Kind, str], dist.ProcessGroup] = {}

    def make(self) -> None:
        """Make those along all axes. Every rank has to, at one point; a rank that comes alone waits up to the limit."""
        if self.separate:
            self.comm.watch.aborts.append(WeakMethod(self.abort))
            for axis, size in self.comm.mesh.axes:
                for kind in _KINDS if size > 1 else ():
                    self(kind, axis)

    def __call__(self, kind: Kind, axis: str) -> dist.ProcessGroup:
        """The group along an axis for one kind of collective."""
        if not self.separate:
            return self.comm.group(axis)
        if (kind, axis) not in self._made:
            self._made[kind, axis] = self.comm.new_group(axis)
        return self._made[kind, axis]

    def abort(self) -> None:
        """Have whatever is under way in them end in an error."""
        for group in self._made.values():
            abort(group)
