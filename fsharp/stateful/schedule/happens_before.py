"""Happens-before: which ops of a schedule are over when another one starts, by vector clocks of the streams."""

from collections.abc import Sequence

from fsharp.stateful.schedule.schedule import STREAMS, Op, Stream


class HappensBefore:
    """Which ops happen before which; an op of the step before has its position minus the number of ops."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.last_update = max((i for i, op in enumerate(ops) if op.kind == "update"), default=len(ops))
        last_of = {(op.kind, op.bucket): i for i, op in enumerate(ops) if op.bucket != -1}
        self.ends = [last_of.get((op.kind, op.bucket), i) for i, op in enumerate(ops)]  # a bucket is over as one
        _, waited = self._run(-1)
        self.over, _ = self._run(next((i for i in self.tail() if i + len(ops) > waited), 0) - 1)

    def _run(self, landed: int) -> tuple[list[dict[Stream, int]], int]:
        """For each op, the last op of each stream that is over when it ends; and the last gather that ``compute`` knows of.

        ``landed`` is the last gather of the step before that is over when this step starts.
        """
        over: list[dict[Stream, int]] = []
        on = {stream: {**dict.fromkeys(STREAMS, -1), "gather": landed} for stream in STREAMS}
        on["gather"]["gather"] = -1
        for i, op in enumerate(self.ops):
            clock = dict(on[op.stream])
            for j in op.after:
                known = over[j] if j < i else {}
                for stream, last in (*known.items(), (self.ops[j].stream, self.ends[j] - (j > i) * len(self.ops))):
                    clock[stream] = max(clock[stream], last)
            clock[op.stream] = i
            over.append(clock)
            on[op.stream] = clock
        return over, on["compute"]["gather"]

    def before(self, i: int, j: int) -> bool:
        """Whether op ``i``, of this step or the one before, is over when op ``j`` starts."""
        return i < j and self.over[j][self.ops[i].stream] >= i

    def tail(self) -> list[int]:
        """Gathers of the step before that follow its last update, as positions before 0."""
        return [i - len(self.ops) for i in range(self.last_update, len(self.ops)) if self.ops[i].kind == "gather"]

    def carried(self) -> dict[str, int]:
        """By unit, the gather of the step before whose copy this one finds."""
        found: dict[str, int] = {}
        for i, op in enumerate(self.ops, -len(self.ops)):
            if op.kind == "gather" and op.phase != "update":
                found[op.unit] = i
            elif op.kind == "release":
                found.pop(op.unit, None)
        return found
