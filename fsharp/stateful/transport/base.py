"""Transport: asynchronous collectives along one axis, into memory that the caller owns.

[Note: packing]
A *coalesced* collective moves several buffers at once. The parts for one rank are copied next to each other, travel as one
message, and are copied to their places in the wait. So each element is summed over the same ranks in the same order as in a
collective of its own, over any transport. The copies take a few microseconds for each buffer, and a collective some hundreds.
Packed memory lives until the wait: as many bytes as a gather fills, or twice the bytes that a reduction sends, and scratch. A
transport that sends a message for each buffer need not pack.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fsharp.distributed.process_group import TransportGroups
from fsharp.distributed.worker_threads import CollectiveOutcome
from fsharp.functional.comm.protocol import Comm, CountingComm


class Work:
    """A collective under way, or one that is done if ``finish`` is None. Several threads may wait for the collective.

    The first thread that waits calls ``finish()``, which waits for the collective, completes it, and may return its result.
    """

    __slots__ = ("_finish", "_lock", "_result")

    def __init__(self, finish: Callable[[], Any] | None = None, result: Any = None) -> None:
        self._finish, self._result, self._lock = finish, result, Lock()

    def wait(self) -> Any:
        """Block until the collective is done. Return ``result``, or what ``finish()`` returned. If it fails, all calls fail."""
        if self._finish is not None:
            with self._lock:
                if self._finish is not None:
                    found = self._finish()
                    self._result = found if self._result is None else self._result
                    self._finish = None
        return self._result


class Summand(NamedTuple):
    """A buffer of this rank that is summed over ranks.

    Attributes:
        x: the buffer. A reduce_scatter along an axis of ``n`` ranks cuts ``x`` into ``n`` equal parts.
        out: memory for the sum. In a reduce_scatter None leaves the sum where the transport computes it.
        scratch: memory of :meth:`Transport.scratch_nbytes` bytes.
    """

    x: torch.Tensor
    out: torch.Tensor | None
    scratch: torch.Tensor

    @property
    def required_out(self) -> torch.Tensor:
        """``out``, for an all_reduce: there ``out`` is never None, and may be the same tensor as ``x``."""
        assert self.out is not None, "an all_reduce needs a place for its result"
        return self.out


class Transport(ABC):
    """Asynchronous collectives along one axis of a :class:`~fsharp.Comm`. Results have the same bits as those of the Comm.

    Several buffers of one dtype in one call are one collective. They are packed into one buffer, unless :meth:`should_pack`
    returns False: then each is a message of its own. A ``label`` says what a call is for, as in :class:`~fsharp.Comm`.
    """

    waits_on_host = False
    """Whether a wait for a Work may block the host."""
    compares_labels = True
    """Whether ranks compare labels. If not, the executor makes none: a label takes 5 microseconds of the host."""

    def __init__(self, comm: Comm, groups: TransportGroups | None = None, counters: Sequence[CountingComm] = ()) -> None:
        self.comm, self.groups, self.counters = comm, groups, counters

    def gather(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Begin to gather every rank's ``xs[i]`` of ``c[i]`` elements into ``outs[i]`` of ``n * c[i]``, in one all_gather."""
        self._count_call("all_gather", axis, sum([x.nbytes for x in xs]))
        if len(xs) == 1 or not self.should_pack(xs, 1):
            return self.gather_unpacked(xs, outs, axis, label)
        sizes = [x.numel() for x in xs]
        n = outs[0].numel() // sizes[0]
        packed = xs[0].new_empty(n * sum(sizes))
        rows, parts = [out.view(n, -1) for out in outs], packed.view(n, -1).split(sizes, 1)
        return self._copy_after(self.gather_unpacked([torch.cat(list(xs))], [packed], axis, label), rows, parts)

    def reduce_scatter(
        self, summands: Sequence[Summand], axis: str, n: int, out_dtype: torch.dtype, *, label: str = ""
    ) -> list[Work]:
        """Begin to sum this rank's part of each buffer over the ``n`` ranks along an axis, in one reduce_scatter.

        NCCL and other backends of devices add in the dtype of ``x``, and cast the sum to ``out_dtype``; gloo adds in
        ``out_dtype``. ``x`` may be overwritten if its ``out`` is None or has another dtype. The result of a summand's Work is
        the sum: ``out``, or memory valid until a write to ``x`` or ``scratch``.
        """
        xs = [each.x for each in summands]
        if self.counters:
            self._count_call("reduce_scatter", axis, sum([x.nbytes for x in xs]) // n)
        if len(xs) == 1 or not self.should_pack(xs, n):
            return self.reduce_scatter_unpacked(summands, axis, out_dtype, label)
        packed = torch.cat([x.view(n, -1) for x in xs], 1).view(-1)
        summed = packed.new_empty(len(packed) // n, dtype=out_dtype)
        parts = summed.split([x.numel() // n for x in xs])
        outs = [part if each.out is None else each.out for each, part in zip(summands, parts, strict=True)]
        summand = self._make_summand("reduce_scatter", axis, packed, summed)
        [work] = self.reduce_scatter_unpacked([summand], axis, out_dtype, label)
        unpacked = self._copy_after(work, outs, parts)
        return [Work(unpacked.wait, out) for out in outs]

    def all_reduce(self, summands: Sequence[Summand], axis: str, n: int, *, label: str = "") -> list[Work]:
        """Begin to sum buffers of one dtype over the ``n`` ranks along an axis, into ``out``, in one all_reduce.

        Packed buffers are padded to a multiple of ``n`` elements, so as many bytes are sent as by a collective for each buffer.
        A summand's Work completes ``out``.
        """
        xs, outs = [each.x for each in summands], [each.required_out for each in summands]
        sizes = [-(-x.numel() // n) * n for x in xs]
        in_dtype, out_dtype = xs[0].dtype, outs[0].dtype
        # If the data travel in another dtype, an all_reduce is two collectives.
        halves = [("reduce_scatter", in_dtype), ("all_gather", out_dtype)]
        for op, dtype in [("all_reduce", in_dtype)] if in_dtype == out_dtype else halves:
            self._count_call(op, axis, sum(sizes) // n * dtype.itemsize)
        if len(xs) == 1 or not self.should_pack(xs, n):
            return self.all_reduce_unpacked(summands, axis, label)
        packed = xs[0].new_zeros(sum(sizes))
        summed = packed if in_dtype == out_dtype else outs[0].new_empty(len(packed))
        here, there = ([part[: len(x)] for x, part in zip(xs, each.split(sizes), strict=True)] for each in (packed, summed))
        _copy_all(here, xs)
        [work] = self.all_reduce_unpacked([self._make_summand("all_reduce", axis, packed, summed)], axis, label)
        return [self._copy_after(work, outs, there)] * len(xs)

    def should_pack(self, xs: Sequence[torch.Tensor], n: int) -> bool:
        """Return whether to pack ``xs``. A rank gets one of ``n`` parts of each buffer. Sizes alone decide, so ranks agree."""
        return True

    @abstractmethod
    def gather_unpacked(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Run :meth:`gather` without packing. A buffer in ``xs`` may be this rank's part of its buffer in ``outs``."""

    @abstractmethod
    def reduce_scatter_unpacked(self, summands: Sequence[Summand], axis: str, out_dtype: torch.dtype, label: str) -> list[Work]:
        """Run :meth:`reduce_scatter` without packing. ``x`` may be overwritten if ``out`` is None or has another dtype."""

    @abstractmethod
    def all_reduce_unpacked(self, summands: Sequence[Summand], axis: str, label: str) -> list[Work]:
        """Run :meth:`all_reduce` without packing. Return a Work for each summand."""

    @abstractmethod
    def all_to_all(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Begin to send ``x`` and receive ``out`` in equal flat parts: part ``i`` to and from the rank at coordinate ``i``."""

    def reduce_scatter_encoded(
        self,
        encoded: Sequence[torch.Tensor],
        decode_sums: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        outs: Sequence[torch.Tensor],
        axis: str,
        label: str,
    ) -> list[Work]:
        """Begin to sum encoded buffers over the ranks along an axis, by one all_to_all. Return a Work for each of ``outs``.

        ``encoded`` has a row for each receiver. A function in ``decode_sums`` decodes the rows that this rank receives, and
        returns their sum. The first wait for any result decodes and adds all rows.
        """
        sent = torch.cat(list(encoded), 1)
        received = torch.empty_like(sent)
        self._count_call("all_to_all", axis, sent.nbytes // len(sent))
        work = self.all_to_all(sent.view(-1), received.view(-1), axis, label)

        def add() -> None:
            work.wait()
            rows = received.split([each.shape[1] for each in encoded], 1)
            _copy_all(outs, [decode_sum(each) for decode_sum, each in zip(decode_sums, rows, strict=True)])

        added = Work(add)
        return [Work(added.wait, out) for out in outs]

    def gather_without_padding(
        self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, n: int, label: str
    ) -> Work:
        """Begin to gather every rank's ``xs[i]`` into ``outs[i]``, in one all_gather. Cut off padding beyond ``outs[i]``."""
        rooms = [out if len(out) == n * len(x) else out.new_empty(n * len(x)) for x, out in zip(xs, outs, strict=True)]
        parts = [room if room is out else room[: len(out)] for out, room in zip(outs, rooms, strict=True)]
        return self._copy_after(self.gather(xs, rooms, axis, label), outs, parts)

    def _size_and_coord(self, axis: str) -> tuple[int, int]:
        return self.comm.mesh.axis_size(axis), self.comm.mesh.coord(axis, self.comm.rank)

    def _count_call(self, op: str, axis: str, nbytes: int) -> None:
        for each in self.counters:
            each.count_call(op, axis, nbytes)

    def _make_summand(self, op: str, axis: str, packed: torch.Tensor, summed: torch.Tensor) -> Summand:
        nbytes = self.scratch_nbytes(op, axis, len(packed), packed.dtype.itemsize, sums_into_out=summed.dtype == packed.dtype)
        return Summand(packed, summed, packed.new_empty(nbytes, dtype=torch.uint8))

    def _copy_after(self, first: Work, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> Work:
        """Return a Work that waits for ``first``, and then copies each ``xs[i]`` into ``outs[i]``."""

        def copy() -> None:
            first.wait()
            _copy_all(outs, xs)

        work = Work(copy)
        if not self.waits_on_host:  # on a device the stream of the collective also unpacks
            work.wait()
        return work

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, sums_into_out: bool = False) -> int:
        """Return the bytes of scratch for a sum of ``numel`` elements. ``sums_into_out``: ``out`` is given, in their dtype."""
        return 0

    def observe_collectives(self, on_collective: Callable[[CollectiveOutcome], None] | None) -> None:
        """Call ``on_collective`` for each later collective that a thread of the transport runs. None ends these calls."""

    def allocate_arena(self, nbytes: int, memory_kind: str) -> torch.Tensor:
        """Return ``uint8[nbytes]`` on the device for an arena. ``memory_kind``: see ``SchedulePolicy.arena_memory``."""
        assert memory_kind == "allocator", f"{type(self).__name__} has no {memory_kind} memory"
        return torch.empty(nbytes, dtype=torch.uint8, device=self.comm.device)


def _copy_all(outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> None:
    """Copy each ``xs[i]`` into ``outs[i]``. Version counters of ``outs`` do not change."""
    pairs = [(out, x) for out, x in zip(outs, xs, strict=True) if out is not x]
    if pairs:
        with _unsafe_preserve_version_counter(tuple([out for out, _ in pairs if not out.is_inference()])):
            torch._foreach_copy_([out for out, _ in pairs], [x for _, x in pairs])
