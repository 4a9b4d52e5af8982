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
from threading import Lock
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fsharp.functional.comm.process_group import ProcessGroupComm, abort
from fsharp.functional.comm.protocol import CountingComm
from fsharp.functional.comm.worker_threads import InFlight
from fsharp.functional.formats.format import Facts, Format

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
    """A Work that several threads may wait for: who comes second waits until the first has finished it.

    Args:
        first: what is under way.
        then: finishes it, given its result.
    """

    __slots__ = ("_lock",)

    def __init__(self, first: Work, then: Callable[[Any], Any]) -> None:
        super().__init__(lambda: then(first.wait()))
        self._lock = Lock()

    def wait(self) -> Any:
        """Block until all of it is done."""
        with self._lock:
            return super().wait()

    def each(self, num: int) -> list[Work]:
        """A Work for each, of a result that is a list."""
        return [Work(lambda i=i: self.wait()[i]) for i in range(num)]  # type: ignore[misc]


class Summand(NamedTuple):
    """One buffer of this rank's that is summed over ranks.

    Attributes:
        x: the buffer. A reduce_scatter along an axis of ``n`` ranks cuts ``x`` into ``n`` equal parts.
        out: where the sum goes. None, for a reduce_scatter alone, leaves the sum where the transport has computed it.
        scratch: as many bytes as :meth:`Transport.scratch_nbytes` says.
        residual: what a format has lost of earlier summands, which is added to this one; overwritten. None: nothing is added.
    """

    x: torch.Tensor
    out: torch.Tensor | None
    scratch: torch.Tensor
    residual: torch.Tensor | None = None

    @property
    def place(self) -> torch.Tensor:
        """``out``, which an all_reduce has to have."""
        assert self.out is not None, "an all_reduce needs a place for its result"
        return self.out


class Transport(ABC):
    """Collectives along an axis. Results are bit for bit those of the :class:`~fsharp.Comm` it is made from.

    Several buffers that are given together, all of one dtype, are one collective: packed, unless :meth:`packs` says otherwise.
    """

    is_async = False
    """Whether a Work that the host waits for may have something to wait for."""
    counters: Sequence[CountingComm] = ()
    """What counts the collectives."""
    groups: "ProcessGroups | None" = None

    def gather(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Every rank's ``xs[i]`` of ``c[i]`` elements into ``outs[i]`` of ``n * c[i]``, in one all_gather."""
        self._count("all_gather", axis, sum([x.nbytes for x in xs]))
        if len(xs) == 1 or not self.packs("all_gather", xs, 1):
            return self.gather_each(xs, outs, axis, label)
        sizes = [x.numel() for x in xs]
        n = outs[0].numel() // sizes[0]
        packed = xs[0].new_empty(n * sum(sizes))

        def unpack(_: Any) -> None:
            _copy([out.view(n, -1) for out in outs], packed.view(n, -1).split(sizes, 1))

        return self._shared(self.gather_each([torch.cat(list(xs))], [packed], axis, label), unpack)

    def reduce_scatter(
        self, summands: Sequence[Summand], axis: str, n: int, dtype: torch.dtype, *, label: str = ""
    ) -> list[Work]:
        """The sums over ranks of this rank's parts in ``dtype``, along an axis of ``n`` ranks, in one reduce_scatter.

        Returns:
            A Work for each. Its result is the sum: ``out``, or a tensor that is valid until ``x`` or ``scratch`` is written to.
        """
        xs = [each.x for each in summands]
        if self.counters:
            self._count("reduce_scatter", axis, sum([x.nbytes for x in xs]) // n)
        if len(xs) == 1 or not self.packs("reduce_scatter", xs, n):
            return self.reduce_scatter_each(summands, axis, dtype, label)
        outs = [each.out for each in summands]
        packed = torch.cat([x.view(n, -1) for x in xs], 1).view(-1)
        summed = packed.new_empty(len(packed) // n, dtype=dtype)
        sizes = [x.numel() // n for x in xs]

        def unpack(_: Any) -> list[torch.Tensor]:
            parts = summed.split(sizes)
            there = [(out, part) for out, part in zip(outs, parts, strict=True) if out is not None]
            _copy([out for out, _ in there], [part for _, part in there])
            return [part if out is None else out for out, part in zip(outs, parts, strict=True)]

        [work] = self.reduce_scatter_each([self._packed("reduce_scatter", axis, packed, summed)], axis, dtype, label)
        return self._shared(work, unpack).each(len(xs))

    def all_reduce(self, summands: Sequence[Summand], axis: str, n: int, *, label: str = "") -> list[Work]:
        """The sums over ranks along an axis of ``n`` into ``out``, all of one dtype, in one all_reduce.

        Packed, each takes a multiple of ``n`` elements of what travels, so as many bytes are sent as by each alone.

        Returns:
            A Work for each, whose result is one more Work, for what is left to do once ``x`` and ``scratch`` are free.
        """
        xs, outs = [each.x for each in summands], [each.place for each in summands]
        sizes = [-(-x.numel() // n) * n for x in xs]
        wire, wide = xs[0].dtype, outs[0].dtype
        # With a wire of its own it is two collectives.
        for op, dtype in [("all_reduce", wire)] if wire == wide else [("reduce_scatter", wire), ("all_gather", wide)]:
            self._count(op, axis, sum(sizes) // n * dtype.itemsize)
        if len(xs) == 1 or not self.packs("all_reduce", xs, n):
            return self.all_reduce_each(summands, axis, label)
        packed = xs[0].new_zeros(sum(sizes))
        _copy([part[: len(x)] for x, part in zip(xs, packed.split(sizes), strict=True)], xs)
        summed = outs[0].new_empty(len(packed))

        def unpack(_: Any) -> None:
            _copy(outs, [part[: len(out)] for out, part in zip(outs, summed.split(sizes), strict=True)])

        [work] = self.all_reduce_each([self._packed("all_reduce", axis, packed, summed)], axis, label)
        return [self._shared(work, lambda tail: self._shared(tail, unpack))] * len(xs)

    def packs(self, op: str, xs: Sequence[torch.Tensor], n: int) -> bool:
        """Whether several buffers, of which ``n`` parts are sent, are packed: alike on all ranks."""
        return True

    @abstractmethod
    def gather_each(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Do :meth:`gather` without packing buffers. Each of ``xs`` may be this rank's part of its ``out``."""

    @abstractmethod
    def reduce_scatter_each(self, summands: Sequence[Summand], axis: str, dtype: torch.dtype, label: str) -> list[Work]:
        """Do :meth:`reduce_scatter` without packing buffers. Without ``out`` the buffer may be overwritten."""

    @abstractmethod
    def all_reduce_each(self, summands: Sequence[Summand], axis: str, label: str) -> list[Work]:
        """Do :meth:`all_reduce` without packing buffers. ``out`` is other memory."""

    @abstractmethod
    def exchange(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Send part ``i`` of ``x`` to the rank at coordinate ``i``, and receive that rank's part into part ``i`` of ``out``."""

    def reduce_scatter_encoded(
        self, summands: Sequence[Summand], axis: str, n: int, wire: Format, facts: Sequence[Facts], *, label: str = ""
    ) -> list[Work]:
        """Do :meth:`reduce_scatter` in one exchange of encoded parts. This rank decodes and adds the parts that it receives.

        Buffers are cut into ``n`` parts in whole blocks of ``wire``. The last parts are shorter if the split is uneven. ``out``
        has a full part; without ``out`` the sum replaces the first part of ``x``. Errors of the format have the buffer's facts.
        """
        xs = [each.x for each in summands]
        parts = [wire.padded(len(x), n) for x in xs]
        padded = [torch.nn.functional.pad(x, (0, n * part - len(x))) for x, part in zip(xs, parts, strict=True)]
        rows = zip(padded, parts, summands, facts, strict=True)
        stored = [wire.store_summand(x, part, each.residual, about).view(n, -1) for x, part, each, about in rows]
        sent = torch.cat(stored, 1)
        received = torch.empty_like(sent)
        outs = [each.x[:part] if each.out is None else each.out for each, part in zip(summands, parts, strict=True)]
        self._count("all_to_all", axis, sent.nbytes // n)

        def add(_: Any) -> list[torch.Tensor]:
            rows = received.split([each.shape[1] for each in stored], 1)
            each = zip(rows, parts, xs, facts, strict=True)
            _copy(outs, [wire.sum(row, part, x.dtype, about) for row, part, x, about in each])
            return outs

        return self._shared(self.exchange(sent.view(-1), received.view(-1), axis, label), add).each(len(xs))

    def gather_padded(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, n: int, label: str) -> Work:
        """Gather every rank's ``xs[i]`` into ``outs[i]``, in one all_gather. What ``outs[i]`` is too short for is padding."""
        rooms = [out if len(out) == n * len(x) else out.new_empty(n * len(x)) for x, out in zip(xs, outs, strict=True)]
        cut = [(out, room[: len(out)]) for out, room in zip(outs, rooms, strict=True) if room is not out]
        work = self.gather(xs, rooms, axis, label)
        return self._shared(work, lambda _: _copy([out for out, _ in cut], [part for _, part in cut]))

    def _count(self, op: str, axis: str, nbytes: int) -> None:
        for each in self.counters:
            each.count(op, axis, nbytes)

    def _packed(self, op: str, axis: str, packed: torch.Tensor, summed: torch.Tensor) -> Summand:
        nbytes = self.scratch_nbytes(op, axis, len(packed), packed.dtype.itemsize, apart=summed.dtype == packed.dtype)
        return Summand(packed, summed, packed.new_empty(nbytes, dtype=torch.uint8))

    def _shared(self, first: Work, then: Callable[[Any], Any]) -> SharedWork:
        shared = SharedWork(first, then)
        if not self.is_async:  # on a stream: unpacking is part of what runs there
            shared.wait()
        return shared

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """Bytes of scratch for a ``"reduce_scatter"`` or ``"all_reduce"`` of ``x``; ``apart``: ``out`` will have its dtype."""
        return 0

    def make(self) -> None:
        """Make the process groups, which all ranks do together."""
        if self.groups is not None:
            self.groups.make()

    def tell(self, on_flight: Callable[[InFlight], None] | None) -> None:
        """Call ``on_flight`` with each collective that begins in a thread of its own, from here on; None: nobody."""


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
