"""ScheduleCheckPass: a pass of :func:`~fsharp.schedules.verify` over all ops; HappensBefore: the order of ops in time."""

from collections.abc import Sequence

from fsharp.errors import ScheduleError, problem
from fsharp.stateful.schedule.ops import PARAMS, RESTING, STREAMS, OpSpec
from fsharp.stateful.schedule.schedule import Op, Schedule, op_positions_by_bucket

UNDO_REMEDY = "Undo the edit, or compile the program again."
_GATHER, _COMPUTE = STREAMS.index("gather"), STREAMS.index("compute")


class HappensBefore:
    """The happens-before relation of ops, by vector clocks. The previous step's ops have negative positions: -1 is the last.

    The ops of a bucket count as one op. It starts when all ops are over for which any op of the bucket waits (``after``).
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.last_update = max((i for i, op in enumerate(ops) if op.spec.changes == RESTING), default=len(ops))
        self._streams = [STREAMS.index(op.stream) for op in ops]
        runs = op_positions_by_bucket(ops)
        self._starts, self._ends = [run[0] for run in runs for _ in run], [run[-1] for run in runs for _ in run]
        clocks = zip(self._compute_clocks(-1), self._streams, strict=True)
        waited = max((over[_GATHER] for over, stream in clocks if stream == _COMPUTE), default=-1)  # the last gather waited for
        first_pending = next((i for i in self.previous_step_tail_gathers() if i + len(ops) > waited), 0)
        self._over = self._compute_clocks(first_pending - 1)

    def _compute_clocks(self, last_ended_gather: int) -> list[list[int]]:
        """Return, for each op, the last op on each stream that is over when the op ends.

        ``last_ended_gather``: last gather of the previous step that is over when this step starts.
        """
        num, over = len(self.ops), list[list[int]]()
        on = [[last_ended_gather if stream == _GATHER else -1 for stream in range(len(STREAMS))] for _ in STREAMS]
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
        return over

    def is_before(self, i: int, j: int) -> bool:
        """Return whether op ``i``, of this or the previous step, is over when op ``j`` starts."""
        return i < self._starts[j] and self._over[j][self._streams[i]] >= i

    def previous_step_tail_gathers(self) -> list[int]:
        """Return the negative positions of the previous step's gathers after its last update."""
        return [i - len(self.ops) for i in range(self.last_update, len(self.ops)) if self._streams[i] == _GATHER]

    def carried_gathers(self) -> dict[str, int]:
        """Return, by unit, the negative position of the previous step's gather whose full parameters this step uses."""
        found: dict[str, int] = {}
        for i, op in enumerate(self.ops, -len(self.ops)):
            if op.spec.fills == PARAMS:
                found[op.unit] = i
            elif op.spec.frees == PARAMS:
                found.pop(op.unit, None)
        return found


def op_error(i: int, op: Op, what: str, expected: str, remedy: str = UNDO_REMEDY) -> ScheduleError:
    """Return an error about op ``i``: what is wrong with the op, what would be right, and what the user should do."""
    return ScheduleError(problem(f"verify(): op {i}, {op}", what, [("unit", op.unit or "-"), ("expected", expected)], remedy))


class ScheduleCheckPass:
    """Base class of a pass over all ops: ``check_op`` for each, then ``check_end``. Earlier passes have found no error."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        self.order, self.policy = order, schedule.policy
        self.events, self.facts = schedule.program.events, schedule.program.facts

    def check_op(self, i: int, op: Op, spec: OpSpec) -> None:
        """Check ``op``, at position ``i`` and with the record ``spec`` of its kind, against all earlier ops."""
        raise NotImplementedError

    def check_end(self) -> None:
        """Check the conditions that hold after the last op."""

    def check_is_before(self, earlier: int | None, i: int, error_start: str) -> None:
        """Raise an error, which begins with ``error_start``, unless op ``i`` starts after op ``earlier``, if any, has ended."""
        if earlier is not None and not self.order.is_before(earlier, i):
            j = earlier % len(self.order.ops)
            what = f"{error_start} op {j}, {self.order.ops[j]}: nothing orders op {i} after op {j}."
            raise op_error(i, self.order.ops[i], what, f"{j} among the ops it runs after", f"Add {j} to its `after`.")
