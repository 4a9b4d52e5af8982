"""OpList: the ops of a step in the order of issue, without addresses."""

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
    """An op whose buffer has no address yet; or a mark, up to which the buffer of an earlier op stays reserved.

    Attributes that are not described here are as in :class:`~fsharp.stateful.schedule.schedule.Op`.

    Attributes:
        fills: whether the op is the first to use its buffer.
        frees: whether the op, or mark, is the last to use its buffer.
        opens: the buffer of a gradient at rest, if this op is the first to write there; else None.
        reduction: for an op with ``opens`` that adds a reduction's result, the op of this reduction. If memory allows,
            ``opens`` moves to the reduction, which then writes to the gradient at rest directly.
        marked_op: for a mark, the op whose buffer stays reserved; None for an op.
    """

    spec: OpSpec
    unit: str
    phase: Phase
    event_index: int
    buffer: BufferKey | None = None
    fills: bool = False
    frees: bool = False
    use_index: int = -1
    after: tuple["UnplacedOp", ...] = ()
    bucket: int = -1
    opens: BufferKey | None = None
    reduction: "UnplacedOp | None" = None
    marked_op: "UnplacedOp | None" = None

    def replace_after(self, *ops: "UnplacedOp") -> None:
        """Replace the ops for which this op waits."""
        self.after = ops

    def open_resting_gradient(self, buffer: BufferKey | None, *, reduction: "UnplacedOp | None" = None) -> None:
        """Set ``opens`` to ``buffer``: a gradient at rest to which this op writes first, or None. Set ``reduction`` as well."""
        self.opens, self.reduction = buffer, reduction


class OpList:
    """The ops emitted so far, in the order of issue. ``event_index``: the event of the program at which ops are issued."""

    def __init__(self, program: Program) -> None:
        self.facts, self.event_index = program.facts, 0
        self.ops: list[UnplacedOp] = []
        self._numbers, self._following_specs = count(), cache(following_specs)
        self._readers: dict[BufferKey, list[UnplacedOp]] = {}  # ops that have read a buffer since its last change

    def begin_event(self, event_index: int) -> None:
        """Set the event, by number in ``program.events``, at which the host issues the ops that are added from now on."""
        self.event_index = event_index

    def add_with_following_ops(self, spec: OpSpec, unit: str, phase: Phase, **fields: Any) -> UnplacedOp:
        """Add an op of the kind ``spec``, then ops that follow this op, such as a decode after a wait. Return the first op."""
        op = self._append_op(spec, unit, phase, **fields)
        self._add_following_ops(op)
        return op

    def add_bucket(
        self, spec: OpSpec, units: Sequence[str], phase: Phase, after: Mapping[str, tuple[UnplacedOp, ...]]
    ) -> list[UnplacedOp]:
        """Add a bucket: an op for each unit, which waits for the ops ``after[unit]``. Add following ops. Return the bucket."""
        bucket = next(self._numbers) if len(units) > 1 else -1
        ops = [self._append_op(spec, unit, phase, after=after.get(unit, ()), bucket=bucket) for unit in units]
        for op in ops:
            self._add_following_ops(op)
        return ops

    def _append_op(
        self, spec: OpSpec, unit: str, phase: Phase, *, is_first_user: bool = True, is_last_user: bool = True, **fields: Any
    ) -> UnplacedOp:
        """Append an op: by default the first user of the buffer that its kind fills, and the last user if its kind frees it."""
        facts = self.facts[unit]
        if spec.nbytes(facts):
            readers = self._readers.pop((spec.memory_buffer_kind, unit), ())
            fields["after"] = (*fields.get("after", ()), *[each for each in readers if each.spec.stream != spec.stream])
            fields["buffer"] = spec.memory_buffer_kind, unit
            fields["fills"] = is_first_user and spec.fills == spec.memory_buffer_kind
            fields["frees"] = is_last_user and spec.frees == spec.memory_buffer_kind
        elif spec.filled_buffer(facts) == REST:
            fields["after"] = (*fields.get("after", ()), *self._readers.pop((REST, unit), ()))
        op = UnplacedOp(spec, unit, phase, self.event_index, **fields)
        for buffer in spec.reads:
            self._readers.setdefault((buffer, unit), []).append(op)
        self.ops.append(op)
        return op

    def _add_following_ops(self, op: UnplacedOp) -> None:
        for spec in self._following_specs(op.spec, op.phase):
            if spec.has_ops_for(self.facts[op.unit]):
                self.add_with_following_ops(
                    spec, op.unit, op.phase, use_index=op.use_index, after=() if spec.stream == op.spec.stream else (op,)
                )

    def extend_buffer_lifetime(self, op: UnplacedOp) -> None:
        """Add a mark to ``ops``, an entry that is no op. Up to the mark the buffer of ``op`` stays reserved, though unused."""
        self.ops.append(
            UnplacedOp(op.spec, op.unit, op.phase, self.event_index, op.buffer, frees=op.buffer is not None, marked_op=op)
        )

    def last_on_stream(self, stream: Stream) -> tuple[UnplacedOp, ...]:
        """Return a tuple with the last op on a stream, or ``()``."""
        return next(((op,) for op in reversed(self.ops) if op.spec.stream == stream and op.marked_op is None), ())


def following_specs(spec: OpSpec, phase: Phase) -> list[OpSpec]:
    """Return the records of the ops that follow each op of ``spec`` in a phase: see :attr:`OpSpec.follows`."""
    return [each for (_, when), each in OPS.items() if when == phase and each.follows == spec.kind]
