"""Joint collectives: of several flat buffers at once, each as if it had gone alone.

[Note: packing]
The parts that go to one rank are copied next to each other, travel as one message, and are copied to where they belong when
they are waited for. So every element is summed over the same ranks in the same order as alone, and any transport will do. The
copies take a few microseconds a buffer, a collective some hundreds. What is packed lives until it is waited for: a gather takes
what it fills once more, a reduction twice what it sends and scratch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fsharp.stateful.transport.base import Transport, Work


class _Shared(Work):
    """A Work that several have, perhaps in several threads: who comes second waits until the first has unpacked."""

    __slots__ = ("_lock",)

    def __init__(self, first: Work, then: Callable[[Any], Any], *, is_async: bool) -> None:
        super().__init__(then=lambda: then(first.wait()))
        self._lock = Lock()
        if not is_async:  # on a stream: unpacking is part of what runs there
            self.wait()

    def wait(self) -> Any:
        """Block until all of it is done."""
        with self._lock:
            return super().wait()

    def each(self, num: int) -> list[Work]:
        """A Work for each, of a result that is a list."""
        return [Work(then=partial(self._one, i)) for i in range(num)]

    def _one(self, i: int) -> Any:
        return self.wait()[i]


def gather(
    transport: Transport, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, *, label: str = ""
) -> Work:
    """Every rank's ``xs[i]`` of ``c[i]`` elements into ``outs[i]`` of ``n * c[i]``, all of one dtype, in one all_gather.

    Args:
        transport: runs it.
        xs: what this rank has.
        outs: where all of it goes.
        axis: to gather along.
        label: what it is for.
    """
    if len(xs) == 1:
        return transport.gather(xs[0], outs[0], axis, label=label)
    sizes = [len(x) for x in xs]
    n = len(outs[0]) // sizes[0]
    packed = xs[0].new_empty(n * sum(sizes))
    work = transport.gather(torch.cat(list(xs)), packed, axis, label=label)

    def unpack(_: Any) -> None:
        _copy([out.view(n, -1) for out in outs], packed.view(n, -1).split(sizes, 1))

    return _Shared(work, unpack, is_async=transport.innermost.is_async)


def reduce_scatter(
    transport: Transport,
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
        transport: runs it.
        xs: ``n * c[i]`` elements each; may be overwritten.
        axis: the axis to sum along.
        n: its size.
        dtype: of the sums.
        scratch: for each, what it needs alone.
        outs: for each, ``c[i]`` elements for the result; None: the Work's result is a tensor, valid until ``xs[i]`` or
            ``scratch[i]`` is written to.
        label: what it is for.

    Returns:
        A Work for each, as :meth:`Transport.reduce_scatter` does.
    """
    if len(xs) == 1:
        return [transport.reduce_scatter(xs[0], axis, dtype=dtype, scratch=scratch[0], out=outs[0], label=label)]
    packed = torch.cat([x.view(n, -1) for x in xs], 1).view(-1)
    summed = packed.new_empty(len(packed) // n, dtype=dtype)
    room = _scratch(transport, "reduce_scatter", axis, packed, summed)
    work = transport.reduce_scatter(packed, axis, dtype=dtype, scratch=room, out=summed, label=label)
    sizes = [len(x) // n for x in xs]

    def unpack(_: Any) -> list[torch.Tensor]:
        parts = summed.split(sizes)
        there = [(out, part) for out, part in zip(outs, parts, strict=True) if out is not None]
        _copy([out for out, _ in there], [part for _, part in there])
        return [part if out is None else out for out, part in zip(outs, parts, strict=True)]

    return _Shared(work, unpack, is_async=transport.innermost.is_async).each(len(xs))


def all_reduce(
    transport: Transport,
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    axis: str,
    n: int,
    *,
    scratch: Sequence[torch.Tensor],
    label: str = "",
) -> list[Work]:
    """The sums over ranks of ``xs``, all of one dtype, into ``outs``, of one dtype, in one all_reduce.

    Each takes a multiple of ``n`` elements of what travels, so as many bytes are sent as by each alone.

    Args:
        transport: runs it.
        xs: what is summed.
        outs: where the sums go.
        axis: the axis to sum along.
        n: its size.
        scratch: for each, what it needs alone.
        label: what it is for.

    Returns:
        A Work for each, as :meth:`Transport.all_reduce` does.
    """
    if len(xs) == 1:
        return [transport.all_reduce(xs[0], outs[0], axis, scratch=scratch[0], label=label)]
    sizes = [-(-len(x) // n) * n for x in xs]
    packed = xs[0].new_zeros(sum(sizes))
    _copy([part[: len(x)] for x, part in zip(xs, packed.split(sizes), strict=True)], xs)
    summed = outs[0].new_empty(len(packed))
    room = _scratch(transport, "all_reduce", axis, packed, summed)
    is_async = transport.innermost.is_async

    def unpack(_: Any) -> None:
        _copy(outs, [part[: len(out)] for out, part in zip(outs, summed.split(sizes), strict=True)])

    work = transport.all_reduce(packed, summed, axis, scratch=room, label=label)
    shared = _Shared(work, lambda tail: _Shared(tail, unpack, is_async=is_async), is_async=is_async)
    return [shared] * len(xs)


def _scratch(transport: Transport, op: str, axis: str, packed: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
    apart = summed.dtype == packed.dtype
    nbytes = transport.scratch_nbytes(op, axis, len(packed), packed.dtype.itemsize, apart=apart)
    return packed.new_empty(nbytes, dtype=torch.uint8)


def _copy(outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> None:
    """Fill what a message would: no version counter says that somebody has written there."""
    if outs:
        with _unsafe_preserve_version_counter(tuple(out for out in outs if not out.is_inference())):
            torch._foreach_copy_(list(outs), list(xs))
