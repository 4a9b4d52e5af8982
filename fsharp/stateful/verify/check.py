"""Check: one pass of :func:`~fsharp.stateful.verify.verify.verify` over all ops; and which of them are over before which."""

from collections.abc import Sequence

from fsharp.errors import ScheduleError, problem
from fsharp.stateful.schedule.ops import PARAMS, RESTING, STREAMS, OpSpec
from fsharp.stateful.schedule.schedule import Op, Schedule, issue_positions

UNDO = "Undo the edit, or compile the program again."
_GATHER, _COMPUTE = STREAMS.index("gather"), STREAMS.index("compute")


class HappensBefore:
    """Which ops are over when another one starts, by vector clocks. Positions of the step before are negative.

    Ops of one bucket are one: nothing of it starts before all that any of them waits for is over, and whoever waits for one
    of them waits for all.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.last_update = max((i for i, op in enumerate(ops) if op.spec.changes == RESTING), default=len(ops))
        self._streams = [STREAMS.index(op.stream) for op in ops]
        runs = issue_positions(ops)
        self._starts, self._ends = [run[0] for run in runs for _ in run], [run[-1] for run in runs for _ in run]
        _, waited = self._run(-1)
        self._over, _ = self._run(next((i for i in self.tail() if i + len(ops) > waited), 0) - 1)

    def _run(self, landed: int) -> tuple[list[list[int]], int]:
        """Return for each op the last op of each stream that is over when it ends; and the last gather that compute knows of.

        ``landed`` is the last gather of the step before that is over when this step starts.
        """
        num, over = len(self.ops), list[list[int]]()
        on = [[landed if stream == _GATHER else -1 for stream in range(len(STREAMS))] for _ in STREAMS]
        on[_GATHER][_GATHER] = -1
        for i in range(num):
            mine = self._streams[i]
            if self._starts[i] != i:
                over.append(over[-1])
                continue
            clock = list(on[mine])
            for k in range(i, self._ends[i] + 1):
                for j in self.ops[k].after:
                    end = self._ends[j]
                    if end < i:
                        clock = list(map(max, clock, over[end]))
                    stream = self._streams[j]
                    clock[stream] = max(clock[stream], end if j <= k else end - num)
            clock[mine] = self._ends[i]
            over.append(clock)
            on[mine] = clock
        return over, on[_COMPUTE][_GATHER]

    def before(self, i: int, j: int) -> bool:
        """Return whether op ``i``, of this step or the one before, is over when op ``j`` starts."""
        return i < self._starts[j] and self._over[j][self._streams[i]] >= i

    def tail(self) -> list[int]:
        """Return gathers of the step before that follow its last update, as positions before 0."""
        return [i - len(self.ops) for i in range(self.last_update, len(self.ops)) if self._streams[i] == _GATHER]

    def carried(self) -> dict[str, int]:
        """Return the gather of the step before whose copy this step finds, by unit."""
        found: dict[str, int] = {}
        for i, op in enumerate(self.ops, -len(self.ops)):
            if op.spec.fills == PARAMS:
                found[op.unit] = i
            elif op.spec.frees == PARAMS:
                found.pop(op.unit, None)
        return found


def refusal(i: int, op: Op, what: str, expected: str, remedy: str = UNDO) -> ScheduleError:
    """Return an error about one op."""
    return ScheduleError(problem(f"verify(): op {i}, {op}", what, [("unit", op.unit or "-"), ("expected", expected)], remedy))


class Check:
    """One pass over all ops; each sees what the ones before it have passed."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        self.order, self.policy, self.events = order, schedule.policy, schedule.program.events
        self.program = schedule.program
        self.facts = schedule.program.facts

    def see(self, i: int, op: Op, spec: OpSpec) -> None:
        """Check the next op, whose record is ``spec``, against what came before it."""
        raise NotImplementedError

    def end(self) -> None:
        """Check what has to hold after the last op."""

    def position(self, i: int) -> int:
        """Return the position of an op in the schedule; ops of the step before have negative numbers."""
        return i % len(self.order.ops)

    def unordered(self, i: int, op: Op, what: str, j: int) -> ScheduleError:
        """Return the refusal of an op that has to be behind op ``j``, and is not."""
        j = self.position(j)
        what = f"{what} op {j}, {self.order.ops[j]}: nothing orders it after that."
        return refusal(i, op, what, f"{j} among the ops it runs after", f"Add {j} to its `after`.")
