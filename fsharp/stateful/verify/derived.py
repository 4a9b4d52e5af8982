"""Checks of buffers that are made of other buffers, such as encoded gradients: a part of ``verify()``."""

from fsharp.stateful.schedule.ops import BUFFERS, OPS, OpSpec
from fsharp.stateful.schedule.schedule import Op, Schedule
from fsharp.stateful.schedule.unplaced import BufferKey
from fsharp.stateful.verify.check import HappensBefore, ScheduleCheck, op_error


class DerivedBufferCheck(ScheduleCheck):
    """Check that buffers with a source (``BufferKind.source``) are filled before each read, and again after a change of it."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.sources = {name: spec.source for name, spec in BUFFERS.items() if spec.source}
        self.makers = {name: [spec for spec in OPS.values() if spec.fills == name] for name in self.sources}
        self.filled: dict[BufferKey, int] = {}  # the op that has filled a buffer

    def check_op(self, i: int, op: Op, spec: OpSpec) -> None:
        """Record which of these buffers are filled. Raise an error if an op reads one that is empty or out of date."""
        facts = self.facts[op.unit]
        for buffer in [each for each in spec.reads if each in self.sources]:
            if any(maker.has_ops_for(facts) for maker in self.makers[buffer]):
                self._check_read(i, op, buffer)
        if spec.fills in self.sources:
            if not spec.has_ops_for(facts):
                raise op_error(i, op, "is of a unit with a plain format.", f"{op.kind} of units whose format is not plain")
            if (spec.fills, op.unit) in self.filled:
                at = self.filled[spec.fills, op.unit]
                raise op_error(i, op, f"happens twice: op {at} has done it.", f"one {op.kind}", "Drop one of them.")
            self.filled[spec.fills, op.unit] = i
        gone = {spec.changes, spec.frees, spec.fills, spec.filled_buffer(facts)} - {""}
        for buffer in [name for name, source in self.sources.items() if source in gone]:
            self.filled.pop((buffer, op.unit), None)

    def _check_read(self, i: int, op: Op, buffer: str) -> None:
        description, maker, is_consumed = BUFFERS[buffer].description, self.makers[buffer][0].kind, BUFFERS[buffer].is_consumed
        if (buffer, op.unit) not in self.filled:
            raise op_error(i, op, f"nothing has filled the {description} that it reads.", f"{maker} {op.unit} before it")
        at = self.filled.pop((buffer, op.unit)) if is_consumed else self.filled[buffer, op.unit]
        self.check_is_before(at, i, f"may read the {description} before the end of")
        if is_consumed and self.order.ops[at].at != op.at:
            what = f"reads the {description}, which op {at} fills at another event."
            raise op_error(
                i, op, what, f"event {self.order.ops[at].at}", f"Issue both at one event: no event later has the {description}."
            )
