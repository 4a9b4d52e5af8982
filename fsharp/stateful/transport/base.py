"""Transport: asynchronous collectives along one axis, into memory that the caller owns.

[Note: packing]
A *coalesced* collective moves several buffers at once. The parts for one rank are copied next to each other, travel as one
message, and are copied to their places in the wait. So each element is summed over the same ranks in the same order as in a
collective of its own, over any transport. The copies take a few microseconds for each buffer, a collective some hundreds.
Packed memory lives until the wait: as many bytes as a gather fills, or twice the bytes that a reduction sends, and scratch. A
transport of messages need not pack: it sends a message for each buffer.
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
from fsharp.functional.formats.format import Carried, Facts, Format

Kind = Literal["gather", "reduce"]
_KINDS: tuple[Kind, ...] = get_args(Kind)


class Work:
    """A collective under way.

    Args:
        then: function that waits for the collective and completes it; its result is the result of the Work.
        result: the result of a collective that is done already.
    """

    __slots__ = ("_result", "_then")

    def __init__(self, then: Callable[[], Any] | None = None, result: Any = None) -> None:
        self._then, self._result = then, result

    def wait(self) -> Any:
        """Block until the collective is done, and return its result. A failed collective raises its error again."""
        if self._then is not None:
            self._result = self._then()
            self._then = None
        return self._result


class SharedWork(Work):
    """A Work for which several threads may wait: the first one completes it, all others wait for the first.

    Args:
        first: the collective under way.
        then: function that completes the collective, given its result.
    """

    __slots__ = ("_lock",)

    def __init__(self, first: Work, then: Callable[[Any], Any]) -> None:
        super().__init__(lambda: then(first.wait()))
        self._lock = Lock()

    def wait(self) -> Any:
        """Block until the collective is done and completed."""
        with self._lock:
            return super().wait()

    def each(self, num: int) -> list[Work]:
        """Return ``count`` Works, one for each item of the result, which is a list."""
        return [Work(lambda i=i: self.wait()[i]) for i in range(num)]  # type: ignore[misc]


class Summand(NamedTuple):
    """A buffer of this rank that is summed over ranks.

    Attributes:
        x: the buffer. A reduce_scatter along an axis of ``n`` ranks cuts ``x`` into ``n`` equal parts.
        out: memory for the sum. None, for a reduce_scatter only, leaves the sum in the memory in which the transport computes
            it.
        scratch: memory of :meth:`Transport.scratch_nbytes` bytes.
    """

    x: torch.Tensor
    out: torch.Tensor | None
    scratch: torch.Tensor

    @property
    def place(self) -> torch.Tensor:
        """``out``, which an all_reduce requires."""
        assert self.out is not None, "an all_reduce needs a place for its result"
        return self.out


class Transport(ABC):
    """Asynchronous collectives along an axis. Results have the bits of the :class:`~fsharp.Comm` from which it is made.

    Several buffers of one dtype in one call are one collective: packed, unless :meth:`packs` returns False.
    """

    is_async = False
    """Whether a wait for a Work may block the host."""
    counters: Sequence[CountingComm] = ()
    """Counter of the collectives."""
    groups: "ProcessGroups | None" = None

    def gather(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Gather every rank's ``xs[i]`` of ``c[i]`` elements into ``outs[i]`` of ``n * c[i]``, in one all_gather."""
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
        """Sum this rank's part of each buffer over the ``n`` ranks along an axis, in ``dtype``, in one reduce_scatter.

        Returns:
            A Work for each summand. Its result is the sum: ``out``, or a tensor that is valid until a write to ``x`` or
            ``scratch``.
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
        """Sum buffers of one dtype over the ``n`` ranks along an axis, into ``out``, in one all_reduce.

        Packed buffers are padded to a multiple of ``n`` elements, so as many bytes are sent as by a collective for each buffer.

        Returns:
            A Work for each summand. Once it is done, ``x`` and ``scratch`` are free; its result is a second Work, which
            completes ``out``.
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
        """Return whether several buffers, each sent in ``n`` parts, are packed; the same answer on all ranks."""
        return True

    @abstractmethod
    def gather_each(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Run :meth:`gather` without packing. Each of ``xs`` may be this rank's part of its ``out``."""

    @abstractmethod
    def reduce_scatter_each(self, summands: Sequence[Summand], axis: str, dtype: torch.dtype, label: str) -> list[Work]:
        """Run :meth:`reduce_scatter` without packing. Without ``out`` the buffer may be overwritten."""

    @abstractmethod
    def all_reduce_each(self, summands: Sequence[Summand], axis: str, label: str) -> list[Work]:
        """Run :meth:`all_reduce` without packing. ``out`` shares no memory with ``x``."""

    @abstractmethod
    def exchange(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Send part ``i`` of ``x`` to the rank at coordinate ``i``, and receive that rank's part into part ``i`` of ``out``."""

    def reduce_scatter_encoded(
        self,
        summands: Sequence[Summand],
        stored: Sequence[torch.Tensor],
        axis: str,
        n: int,
        wire: Format,
        facts: Sequence[Facts],
        *,
        label: str = "",
    ) -> list[Work]:
        """Run :meth:`reduce_scatter` as one exchange of encoded parts. The first wait decodes and adds the parts that arrive.

        ``stored`` are the buffers from :func:`encoded_parts`. ``out`` has a full part; without ``out`` the sum replaces the
        first part of ``x``. Errors of the format have the buffer's facts.
        """
        xs = [each.x for each in summands]
        parts = [wire.padded(len(x), n) for x in xs]
        sent = torch.cat(list(stored), 1)
        received = torch.empty_like(sent)
        outs = [each.x[:part] if each.out is None else each.out for each, part in zip(summands, parts, strict=True)]
        self._count("all_to_all", axis, sent.nbytes // n)

        def add(_: Any) -> list[torch.Tensor]:
            rows = received.split([each.shape[1] for each in stored], 1)
            each = zip(rows, parts, xs, facts, strict=True)
            _copy(outs, [wire.sum(row, part, x.dtype, about) for row, part, x, about in each])
            return outs

        return SharedWork(self.exchange(sent.view(-1), received.view(-1), axis, label), add).each(len(xs))

    def gather_padded(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, n: int, label: str) -> Work:
        """Gather every rank's ``xs[i]`` into ``outs[i]``, in one all_gather.

        Padding beyond the end of ``outs[i]`` is dropped.
        """
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
        """Return the bytes of scratch for a ``"reduce_scatter"`` or ``"all_reduce"`` of ``x``.

        ``apart``: ``out`` has its dtype.
        """
        return 0

    def make(self) -> None:
        """Make the process groups. All ranks have to call this method together."""
        if self.groups is not None:
            self.groups.make()

    def tell(self, on_flight: Callable[[InFlight], None] | None) -> None:
        """Call ``on_flight`` with each later collective that runs in a thread of its own; None ends that."""


def encoded_parts(x: torch.Tensor, n: int, wire: Format, carried: Carried, facts: Facts) -> torch.Tensor:
    """Return a buffer encoded in ``n`` rows, one for each receiver, in whole blocks of ``wire``. The last ones are padded.

    Args:
        x: the buffer, 1-D.
        n: the number of receivers.
        wire: the format.
        carried: what the format has lost of earlier buffers, which is added to this one, and random numbers.
        facts: what is encoded, for errors of the format.
    """
    part = wire.padded(len(x), n)
    padded = torch.nn.functional.pad(x, (0, n * part - len(x)))
    return wire.store_summand(padded, part, carried.residual, facts, carried.noise).view(n, -1)


def _copy(outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> None:
    """Copy into memory as a message would: without a change of version counters."""
    if outs:
        with _unsafe_preserve_version_counter(tuple([out for out in outs if not out.is_inference()])):
            torch._foreach_copy_(list(outs), list(xs))


class ProcessGroups:
    """The process groups of one scheduler, so that its gathers and its reductions do not wait for each other.

    With ``separate=False`` these are the groups of the Comm.
    """

    def __init__(self, comm: ProcessGroupComm, *, separate: bool) -> None:
        self.comm, self.separate = comm, separate
        self._made: dict[tuple[Kind, str], dist.ProcessGroup] = {}

    def make(self) -> None:
        """Make the groups along all axes. All ranks have to call this; a rank that is alone waits up to the limit."""
        if self.separate:
            self.comm.watch.aborts.append(WeakMethod(self.abort))
            for axis, size in self.comm.mesh.axes:
                for kind in _KINDS if size > 1 else ():
                    self(kind, axis)

    def __call__(self, kind: Kind, axis: str) -> dist.ProcessGroup:
        """Return the group along an axis for one kind of collective.

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
        """End all collectives under way in these groups with an error."""
        abort(list(self._made.values()), is_native=self.comm.is_native)
