"""Chain: the collectives, one axis after another, that take a flat gradient from one resting place to the next."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fsharp.functional.precision import Dtypes
from fsharp.stateful.runtime.full import aligned
from fsharp.stateful.transport.base import Ticket, Transport

Pieces = list[tuple[int, torch.dtype]]


class Stage(NamedTuple):
    """One collective: ``"reduce_scatter"`` or ``"all_reduce"``, the axis, and its size."""

    op: str
    axis: str
    n: int


class Chain:
    """The stages that a buffer of ``size`` elements goes through.

    What travels is in the wire dtype, what comes out in the accumulation dtype. All stages but the last block on a host
    without streams; the last one's ticket is handed out.

    Args:
        transport: runs them.
        dtypes: of the group.
        size: elements of the buffer.
        stages: in order.
        has_target: whether the result always goes to a place of its own.
    """

    def __init__(
        self, transport: Transport, dtypes: Dtypes, size: int, stages: tuple[Stage, ...], *, has_target: bool = False
    ) -> None:
        self.transport, self.dtypes, self.size, self.stages, self.has_target = transport, dtypes, size, stages, has_target
        self.differ = dtypes.wire != dtypes.accumulate

    def sizes(self) -> list[int]:
        """Elements that come out of each stage."""
        result, size = [], self.size
        for stage in self.stages:
            size = size // stage.n if stage.op == "reduce_scatter" else size
            result.append(size)
        return result

    def pieces(self) -> Pieces:
        """The memory it works in: scratch of each stage, and what lies between two of them."""
        result: Pieces = []
        size = self.size
        for i, (stage, out) in enumerate(zip(self.stages, self.sizes(), strict=True)):
            is_last = i == len(self.stages) - 1
            apart = not self.differ and (self.has_target or not is_last)
            nbytes = self.transport.scratch_nbytes(stage.op, stage.axis, size, self.dtypes.wire.itemsize, apart=apart)
            result.append((nbytes, torch.uint8))
            if not is_last:
                result.append((out, self.dtypes.accumulate))
                result.append((out if self.differ else 0, self.dtypes.wire))
            size = out
        return result

    def start(self, x: torch.Tensor, out: torch.Tensor | None, memory: Iterator[torch.Tensor], *, label: str) -> Ticket:
        """Begin with ``x`` in the wire dtype.

        Args:
            x: the buffer.
            out: where the result goes; None leaves it in the memory of the last stage.
            memory: tensors for :meth:`pieces`.
            label: of the collectives.

        Returns:
            The last stage's ticket.
        """
        if not self.size:
            return Ticket(result=x if out is None else out)
        ticket = Ticket(result=x)
        for i, (op, axis, _) in enumerate(self.stages):
            scratch = next(memory)
            is_last = i == len(self.stages) - 1
            between, narrow = (None, None) if is_last else (next(memory), next(memory))
            target = out if is_last else between
            if op == "reduce_scatter":
                ticket = self.transport.reduce_scatter(
                    x, axis, dtype=self.dtypes.accumulate, scratch=scratch, out=target, label=label
                )
            else:
                assert target is not None, "an all_reduce needs a place for its result"
                ticket = self.transport.all_reduce(x, target, axis, scratch=scratch, label=label)
            if between is not None and narrow is not None:
                rest = ticket.wait()
                if isinstance(rest, Ticket):
                    rest.wait()
                x = narrow.copy_(between) if self.differ else between
        return ticket


def gather_along(
    axes: Sequence[str], x: torch.Tensor, outs: Sequence[torch.Tensor], transport: Transport, *, label: str
) -> Ticket:
    """Gather along one axis after another, each into its own of ``outs``. All but the last block on a host without streams."""
    ticket = Ticket()
    for axis, out in zip(axes, outs, strict=True):
        ticket.wait()
        ticket = transport.gather(x, out, axis, label=label)
        x = out
    return ticket


def nbytes_of(pieces: Pieces) -> int:
    """Bytes of a run of memory that holds the pieces, each on an aligned boundary."""
    return sum(aligned(numel * dtype.itemsize) for numel, dtype in pieces)
