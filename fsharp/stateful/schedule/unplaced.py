"""OpList: the ops of a step as they are written one after another, which do not know yet where in memory they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

from fsharp.stateful.schedule.ops import OPS, REST, OpSpec, Phase, Stream
from fsharp.stateful.schedule.program import Program

BufferKey = tuple[str, str]
"""A key of ``BUFFERS``, and the name of a unit."""


@dataclass(eq=False)
class UnplacedOp:
    """An op that knows which buffer it uses, and not yet where that is.

    Attributes:
        at: position of its event.
        fills: whether it is the first to use its buffer.
        frees: whether it is the last to use its buffer.
        use: the use of its unit that it is about, -1 if it is about none.
        after: ops that have to be over before it starts.
        bucket: number that the ops of one collective share, -1 if it is in none.
        opens: the buffer where a gradient rests, if it is the first to put something there.
        reduction: of one that opens, and adds the result of a reduction: that, which may open instead.
        marks: None for an op. Else this is no op: up to here nothing may use the buffer that op ``marks`` has used.
    """

    spec: OpSpec
    unit: str
    phase: Phase
    at: int
    buffer: BufferKey | None = None
    fills: bool = False
    frees: bool = False
    use: int = -1
    after: tuple["UnplacedOp", ...] = ()
    bucket: int = -1
    opens: BufferKey | None = None
    reduction: "UnplacedOp | None" = None
    marks: "UnplacedOp | None" = None

    def run_after(self, *ops: "UnplacedOp") -> None:
        """Have it start after these ops alone."""
        self.after = ops

    def open(self, buffer: BufferKey | None, *, reduction: "UnplacedOp | None" = None) -> None:
        """Have it be the first to put a gradient where the gradient rests; with ``buffer`` None have another op be that."""
        self.opens, self.reduction = buffer, reduction


class OpList:
    """The ops so far, in the order of issue, and how one more is written."""

    def __init__(self, program: Program) -> None:
        self.facts = program.facts
        self.ops: list[UnplacedOp] = []
        self._numbers, self._behind = count(), cache(behind)
        self._readers: dict[BufferKey, list[UnplacedOp]] = {}  # since the buffer's last change

    def add(
        self, spec: OpSpec, unit: str, phase: Phase, at: int, *, is_first: bool = True, is_last: bool = True, **fields: Any
    ) -> UnplacedOp:
        """Write one more op, and what its kind has behind it.

        If such ops fill a buffer, it may be the first to use the buffer; if they free one, the last.
        """
        op = self._write(spec, unit, phase, at, is_first=is_first, is_last=is_last, **fields)
        self._write_behind(op)
        return op

    def add_as_one(
        self, spec: OpSpec, units: Sequence[str], phase: Phase, at: int, after: Mapping[str, tuple[UnplacedOp, ...]] = {}
    ) -> list[UnplacedOp]:
        """Write an op for each unit, all of them one collective, and what their kind has behind it."""
        bucket = next(self._numbers) if len(units) > 1 else -1
        ops = [self._write(spec, unit, phase, at, after=after.get(unit, ()), bucket=bucket) for unit in units]
        for op in ops:
            self._write_behind(op)
        return ops

    def _write(
        self, spec: OpSpec, unit: str, phase: Phase, at: int, *, is_first: bool = True, is_last: bool = True, **fields: Any
    ) -> UnplacedOp:
        facts = self.facts[unit]
        if spec.nbytes(facts):
            readers = self._readers.pop((spec.memory, unit), ())
            fields["after"] = (*fields.get("after", ()), *[each for each in readers if each.spec.stream != spec.stream])
            fields["buffer"] = spec.memory, unit
            fields["fills"] = is_first and spec.fills == spec.memory
            fields["frees"] = is_last and spec.frees == spec.memory
        elif spec.puts_into(facts) == REST:
            fields["after"] = (*fields.get("after", ()), *self._readers.pop((REST, unit), ()))
        op = UnplacedOp(spec, unit, phase, at, **fields)
        for buffer in spec.reads:
            self._readers.setdefault((buffer, unit), []).append(op)
        self.ops.append(op)
        return op

    def _write_behind(self, op: UnplacedOp) -> None:
        for spec in self._behind(op.spec, op.phase):
            if spec.is_for(self.facts[op.unit]):
                self.add(spec, op.unit, op.phase, op.at, use=op.use, after=() if spec.stream == op.spec.stream else (op,))

    def mark(self, op: UnplacedOp, at: int) -> None:
        """Have nothing use the buffer of an op before here, though the op is the last to use it."""
        self.ops.append(UnplacedOp(op.spec, op.unit, op.phase, at, op.buffer, frees=op.buffer is not None, marks=op))

    def last(self, stream: Stream) -> tuple[UnplacedOp, ...]:
        """Return the last op on a stream, if there is one."""
        return next(((op,) for op in reversed(self.ops) if op.spec.stream == stream and op.marks is None), ())


def behind(spec: OpSpec, phase: Phase) -> list[OpSpec]:
    """Return the kinds of ops that are written behind each op of a kind in a phase, for the units that have such ops."""
    return [each for (_, when), each in OPS.items() if when == phase and each.behind == spec.kind]
