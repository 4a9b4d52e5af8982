"""BoundOp: an op of a step with the units, memory and keys on which it works."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from fsharp.stateful.schedule.ops import OpSpec
from fsharp.stateful.schedule.schedule import Op
from fsharp.stateful.transport.streams import OpKey
from fsharp.stateful.units.gradient_route import OutgoingBlock
from fsharp.stateful.units.unit_gradient import UnitGradient
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.unsharded_buffer import UnshardedBuffer

Action = Callable[[], None]
"""A function without arguments that runs one op, or one bucket of ops."""
op_source_numbers = count()
"""Yields the numbers in keys of ops: one for each BoundSchedule and EagerOps."""


@dataclass(eq=False, slots=True)
class BoundOp:
    """An op with the objects on which it works.

    Attributes:
        key: key under which lanes record the end of the op.
        after: keys of the ops on other lanes for which this op waits. The first op of a bucket also waits for the ops in
            ``after`` of the other members.
        unsharded: the buffer of the unit's full parameters.
        block: the memory in which the unit's gradient is collected, and from which the gradient is sent.
        final_reduction_block: memory for the reduction to the optimizer's shards.
        is_first: whether this op is the unit's first cast in its microbatch.
        may_run_late: whether a host without streams runs this decode_sum or accumulate late: when its result is read.
        gradients_to_wait_for: gradients whose late ops may use the memory that this op fills. This op waits for these late ops.
        other_members: if this op is the first op of a bucket, the other ops, which run together with this op.
    """

    op: Op
    key: OpKey
    after: Sequence[OpKey]
    unit: UnitState | None
    unsharded: UnshardedBuffer | None = None
    block: OutgoingBlock | None = None
    final_reduction_block: list[list[torch.Tensor]] = field(default_factory=list)
    is_first: bool = False
    may_run_late: bool = False
    gradients_to_wait_for: Sequence[UnitGradient] = ()
    other_members: "Sequence[BoundOp]" = ()
    spec: OpSpec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = self.op.spec
        self.after = tuple(dict.fromkeys([*self.after, *(key for each in self.other_members for key in each.after)]))

    @property
    def bucket_members(self) -> "tuple[BoundOp, ...]":
        """The ops of the bucket that begins with this op; only this op if it is not the first op of a bucket."""
        return self, *self.other_members

    @property
    def gradient(self) -> UnitGradient:
        """The gradient of the op's unit."""
        assert self.unit is not None
        return self.unit.required_gradient


def bucket_label(bound_ops: Sequence[BoundOp]) -> str:
    """Return text for a label: the kind, units and phase of the ops of a bucket."""
    first, last = bound_ops[0].op, bound_ops[-1].op
    which = first.unit if first is last else f"{first.unit}..{last.unit}, {len(bound_ops)} units"
    return f"{first.kind} {which} ({first.phase})"
