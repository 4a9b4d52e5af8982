"""Check: one pass of :func:`~fsharp.stateful.verify.verify.verify` over all ops, which follows some buffers through a step."""

from fsharp.errors import ScheduleError, problem
from fsharp.stateful.schedule.ops import OpSpec
from fsharp.stateful.schedule.schedule import Op, Schedule
from fsharp.stateful.verify.happens_before import HappensBefore

UNDO = "Undo the edit, or compile the program again."


def refusal(i: int, op: Op, what: str, expected: str, remedy: str = UNDO) -> ScheduleError:
    """An error about one op."""
    return ScheduleError(problem(f"verify(): op {i}, {op}", what, [("unit", op.unit or "-"), ("expected", expected)], remedy))


class Check:
    """One pass over all ops; each sees what the ones before it have passed."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        self.order, self.policy, self.events = order, schedule.policy, schedule.program.events
        self.program = schedule.program
        self.facts = {unit.name: unit for unit in schedule.program.units}

    def see(self, i: int, op: Op, spec: OpSpec) -> None:
        """Check the next op, whose record is ``spec``, against what came before it."""
        raise NotImplementedError

    def end(self) -> None:
        """Check what has to hold after the last op."""

    def position(self, i: int) -> int:
        """Where an op is; those of the step before have negative numbers."""
        return i % len(self.order.ops)

    def unordered(self, i: int, op: Op, what: str, j: int) -> ScheduleError:
        """The refusal of an op that has to be behind op ``j``, and is not."""
        j = self.position(j)
        what = f"{what} op {j}, {self.order.ops[j]}: nothing orders it after that."
        return refusal(i, op, what, f"{j} among the ops it runs after", f"Add {j} to its `after`.")
