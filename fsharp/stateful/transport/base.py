"""Transport: collectives along one axis into memory that the caller owns, which may still run when the call returns.

[Note: packing]
A *coalesced* collective is one of several buffers at once, each as if it had gone alone. The parts that go to one rank are
copied next to each other, travel as one message, and are copied to where they belong when they are waited for. So every
element is summed over the same ranks in the same order as alone, and any transport will do. The copies take a few microseconds
a buffer, a collective some hundreds. What is packed lives until it is waited for: a gather takes what it fills once more, a
reduction twice what it sends and scratch. A transport of messages need not pack: it sends one for each buffer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any, Literal, get_args
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fsharp.functional.comm.process_group import ProcessGroupComm, abort
from fsharp.functional.comm.worker_threads import InFlight
from fsharp.functional.layout.precision import Format

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


class SharedWork(Work):
    """A Work that several have, perhaps in several threads: who comes second waits until the first has finished it.

    Args:
        first: what is under way.
        then: finishes it, given its result.
    """

    __slots__ = ("_finish", "_first", "_lock")

    def __init__(self, first: Work, then: Callable[[Any], Any]) -> None:
        self._first: Work | None = first
        self._finish, self._result, self._lock = then, None, Lock()

    def wait(self) -> Any:
        """Block until all of it is done."""
        with self._lock:
            if self._first is not None:
                self._result = self._finish(self._first.wait())
                self._first, self._finish = None, _same
            return self._result

    def each(self, num: int) -> list[Work]:
        """A Work for each, of a result that is a list."""
        return [Work(then=partial(self._one, i)) for i in range(num)]

    def _one(self, i: int) -> Any:
        return self.wait()[i]


def _same(result: Any) -> Any:
    return result


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
        """The sum over ranks of ``x`` into ``out``, which is other memory, of another dtype or the same.

        The result of the Work is one more Work, for what is left to do once ``scratch`` and ``x`` are free.
        """

    @abstractmethod
    def exchange(self, x: torch.Tensor, out: torch.Tensor, axis: str, *, label: str = "") -> Work:
        """What each rank has for this rank in its ``x`` into ``out``; both have ``n`` equal parts, in order of coordinate."""

    def gather_coalesced(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, *, label: str = "") -> Work:
        """Every rank's ``xs[i]`` of ``c[i]`` elements into ``outs[i]`` of ``n * c[i]``, all of one dtype, in one all_gather."""
        if len(xs) == 1:
            return self.gather(xs[0], outs[0], axis, label=label)
        x, out, unpack = packed_gather(xs, outs)
        return self._shared(self.gather(x, out, axis, label=label), unpack)

    def reduce_scatter_coalesced(
        self,
        xs: Sequence[torch.Tensor],
        axis: str,
        n: int,
        *,
        dtype: torch.dtype,
        scratch: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor | None],
        label: str = "",
    ) -> list[Work]:
        """The sum over ranks of this rank's part of each ``xs[i]``, all of one dtype, in one reduce_scatter.

        Args:
            xs: ``n * c[i]`` elements each; may be overwritten where ``outs[i]`` is None.
            axis: the axis to sum along.
            n: its size.
            dtype: of the sums.
            scratch: for each, what it needs alone.
            outs: for each, ``c[i]`` elements for the result; None: the Work's result is a tensor, valid until ``xs[i]`` or
                ``scratch[i]`` is written to.
            label: what it is for.

        Returns:
            A Work for each, as :meth:`reduce_scatter` does.
        """
        if len(xs) == 1:
            return [self.reduce_scatter(xs[0], axis, dtype=dtype, scratch=scratch[0], out=outs[0], label=label)]
        packed = torch.cat([x.view(n, -1) for x in xs], 1).view(-1)
        summed = packed.new_empty(len(packed) // n, dtype=dtype)
        room = self._scratch("reduce_scatter", axis, packed, summed)
        sizes = [x.numel() // n for x in xs]

        def unpack(_: Any) -> list[torch.Tensor]:
            parts = summed.split(sizes)
            there = [(out, part) for out, part in zip(outs, parts, strict=True) if out is not None]
            _copy([out for out, _ in there], [part for _, part in there])
            return [part if out is None else out for out, part in zip(outs, parts, strict=True)]

        work = self.reduce_scatter(packed, axis, dtype=dtype, scratch=room, out=summed, label=label)
        return self._shared(work, unpack).each(len(xs))

    def all_reduce_coalesced(
        self,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        axis: str,
        n: int,
        *,
        scratch: Sequence[torch.Tensor],
        label: str = "",
    ) -> list[Work]:
        """The sums over ranks of ``xs``, all of one dtype, into ``outs``, of one dtype, in one all_reduce.

        Packed, each takes a multiple of ``n`` elements of what travels, so as many bytes are sent as by each alone.

        Args:
            xs: what is summed.
            outs: where the sums go.
            axis: the axis to sum along.
            n: its size.
            scratch: for each, what it needs alone.
            label: what it is for.

        Returns:
            A Work for each, as :meth:`all_reduce` does.
        """
        if len(xs) == 1:
            return [self.all_reduce(xs[0], outs[0], axis, scratch=scratch[0], label=label)]
        sizes = [-(-x.numel() // n) * n for x in xs]
        packed = xs[0].new_zeros(sum(sizes))
        _copy([part[: len(x)] for x, part in zip(xs, packed.split(sizes), strict=True)], xs)
        summed = outs[0].new_empty(len(packed))
        room = self._scratch("all_reduce", axis, packed, summed)

        def unpack(_: Any) -> None:
            _copy(outs, [part[: len(out)] for out, part in zip(outs, summed.split(sizes), strict=True)])

        work = self.all_reduce(packed, summed, axis, scratch=room, label=label)
        return [self._shared(work, lambda tail: self._shared(tail, unpack))] * len(xs)

    def reduce_scatter_encoded(
        self,
        xs: Sequence[torch.Tensor],
        axis: str,
        n: int,
        *,
        wire: Format,
        outs: Sequence[torch.Tensor | None],
        label: str = "",
    ) -> list[Work]:
        """The sum over ranks of this rank's part of each ``xs[i]``, in one exchange of encoded parts, decoded and added here.

        Args:
            xs: cut into ``n`` parts in whole blocks of ``wire``, the last ones shorter if it does not divide.
            axis: the axis to sum along.
            n: its size.
            wire: the format in which parts travel.
            outs: for each, a whole part for the result; None: the Work's result is where the first part of ``xs[i]`` was.
            label: what it is for.

        Returns:
            A Work for each, as :meth:`reduce_scatter` does.
        """
        parts = [wire.padded(len(x), n) for x in xs]
        padded = [torch.nn.functional.pad(x, (0, n * part - len(x))) for x, part in zip(xs, parts, strict=True)]
        stored = [wire.store(x, part).view(n, -1) for x, part in zip(padded, parts, strict=True)]
        sent = torch.cat(stored, 1)
        received = torch.empty_like(sent)
        targets = [x[:part] if out is None else out for x, out, part in zip(xs, outs, parts, strict=True)]

        def add(_: Any) -> list[torch.Tensor]:
            rows = received.split([each.shape[1] for each in stored], 1)
            _copy(targets, [wire.sum(each, part, x.dtype) for x, part, each in zip(xs, parts, rows, strict=True)])
            return targets

        return self._shared(self.exchange(sent.view(-1), received.view(-1), axis, label=label), add).each(len(xs))

    def gather_padded(
        self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, n: int, *, label: str = ""
    ) -> list[Work]:
        """Every rank's ``xs[i]`` into ``outs[i]``, in one all_gather; what does not fit into ``outs[i]`` is padding.

        Returns:
            A Work for each.
        """
        rooms = [out if len(out) == n * len(x) else out.new_empty(n * len(x)) for x, out in zip(xs, outs, strict=True)]
        cut = [(out, room[: len(out)]) for out, room in zip(outs, rooms, strict=True) if room is not out]
        work = self.gather_coalesced(xs, rooms, axis, label=label)
        return [self._shared(work, lambda _: _copy([out for out, _ in cut], [part for _, part in cut]))] * len(xs)

    def _shared(self, first: Work, then: Callable[[Any], Any]) -> SharedWork:
        shared = SharedWork(first, then)
        if not self.innermost.is_async:  # on a stream: unpacking is part of what runs there
            shared.wait()
        return shared

    def _scratch(self, op: str, axis: str, packed: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
        nbytes = self.scratch_nbytes(op, axis, len(packed), packed.dtype.itemsize, apart=summed.dtype == packed.dtype)
        return packed.new_empty(nbytes, dtype=torch.uint8)

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

    def tell(self, on_flight: Callable[[InFlight], None] | None) -> None:
        """Call ``on_flight`` with each collective that begins in a thread of its own, from here on; None: nobody."""


def packed_gather(
    xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Callable[[Any], None]]:
    """Return three things for a gather of ``xs`` in one message: the message, memory for all ranks' messages, and a function.

    The function copies the gathered messages to ``outs``. It is called with the result of the gather, which it ignores.
    """
    sizes = [x.numel() for x in xs]
    n = outs[0].numel() // sizes[0]
    packed = xs[0].new_empty(n * sum(sizes))

    def unpack(_: Any) -> None:
        _copy([out.view(n, -1) for out in outs], packed.view(n, -1).split(sizes, 1))

    return torch.cat(list(xs)), packed, unpack


def _copy(outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> None:
    """Fill what a message would: no version counter says that somebody has written there."""
    if outs:
        with _unsafe_preserve_version_counter(tuple([out for out in outs if not out.is_inference()])):
            torch._foreach_copy_(list(outs), list(xs))


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
        """The group along an axis for one kind of collective.

        Raises:
            AgreementError: another rank has failed.
        """
        self.comm.watch.check()
        if not self.separate:
            return self.comm.group(axis)
        if (kind, axis) not in self._made:
            self._made[kind, axis] = self.comm.new_group(axis)
        return self._made[kind, axis]

    def abort(self) -> None:
        """Have whatever is under way in them end in an error."""
        abort(list(self._made.values()), is_native=self.comm.is_native)
