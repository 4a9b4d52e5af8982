"""What :func:`~fsharp.stateful.verify.verify.verify` checks of a policy: how much is resident, or under way, at once."""

from collections import Counter

from fsharp.stateful.schedule.ops import FINISHING, OUTGOING, PARAMS, OpSpec
from fsharp.stateful.schedule.schedule import Op, Schedule
from fsharp.stateful.verify.check import Check, refusal
from fsharp.stateful.verify.happens_before import HappensBefore


class Limits(Check):
    """What the policy allows: units that are resident, and reductions under way. A bucket counts as one."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.group_of = {unit: _group(order.ops[i]) for unit, i in order.carried().items()}  # of resident units
        self.in_use, self.pinned = Counter[str](), Counter[str]()  # by unit, uses; and uses or backwards to come
        self.changes = self._changes()
        self.seen = 0  # events so far
        self.under_way: dict[str, dict[str, set[str]]] = {OUTGOING: {}, FINISHING: {}}  # by group, units

    def _changes(self) -> list[list[tuple[str, bool, int]]]:
        """For each event the units of which a use begins or ends, or begins to stay for its backward, or does no more."""
        result: list[list[tuple[str, bool, int]]] = [[] for _ in self.events]
        for unit, first, last in self.program.spans():
            result[first].append((unit, True, 1))
            result[last].append((unit, True, -1))
        if self.policy.release != "forward":
            begun = {event.use: i for i, event in enumerate(self.events) if event.kind == "forward"}
            ends = {event.use: i for i, event in enumerate(self.events) if event.kind == "backward_end"}
            for use, last in ends.items():
                result[begun[use]].append((self.events[last].unit, False, 1))
                result[last].append((self.events[last].unit, False, -1))
        return result

    def _advance(self, at: int) -> None:
        for changes in self.changes[self.seen : at + 1]:
            for unit, is_use, by in changes:
                self.pinned[unit] += by
                self.in_use[unit] += by if is_use else 0
        self.seen = max(self.seen, at + 1)

    def see(self, i: int, op: Op, spec: OpSpec) -> None:
        """Count the buffers that are in use after an op."""
        if spec.fills == PARAMS:
            self._advance(op.at)
            self.group_of[op.unit] = _group(op)
            kept = {group for unit, group in self.group_of.items() if self.pinned[unit]}
            ahead = set(self.group_of.values()) - kept
            used = {group for unit, group in self.group_of.items() if self.in_use[unit]}
            if ahead and bool(used) + len(ahead) > self.policy.num_buffers:  # only the innermost use counts
                what = f"is the unit too many: {sorted(used)} are in use, and {sorted(ahead)} resident beside them."
                raise refusal(i, op, what, f"at most {self.policy.num_buffers}, or those in use alone", "Gather it later.")
        elif spec.frees == PARAMS:
            self.group_of.pop(op.unit, None)
        elif spec.calls and spec.memory in self.under_way:
            here = self.under_way[spec.memory]
            here.setdefault(_group(op), set()).add(op.unit)
            most = self.policy.finish_buffers if spec.memory == FINISHING else self.policy.reduce_buffers
            if len(here) > most:
                what = f"is the reduction too many: those of {sorted(here)} are under way."
                raise refusal(i, op, what, f"at most {most}", "Accumulate another first.")
        elif spec.frees in self.under_way:
            here = self.under_way[spec.frees]
            for group in [group for group, units in here.items() if op.unit in units]:
                here[group].discard(op.unit)
                if not here[group]:
                    del here[group]


def _group(op: Op) -> str:
    return op.unit if op.bucket == -1 else f"bucket {op.bucket}"
