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
        self.group_of: dict[str, str] = {}  # of resident units
        self.members: dict[str, set[str]] = {}  # by group, those of them
        self.ahead: set[str] = set()  # groups of which none is in use, or kept for its backward
        self.in_use, self.pinned = Counter[str](), Counter[str]()  # by unit, uses; and uses or backwards to come
        self.used = 0  # resident units that are in use
        self.changes = self._changes()
        self.seen = 0  # events so far
        self.under_way: dict[str, dict[str, set[str]]] = {OUTGOING: {}, FINISHING: {}}  # by group, units
        for unit, i in order.carried().items():
            self._enter(unit, order.ops[i])

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

    def _enter(self, unit: str, op: Op) -> None:
        group = self.group_of[unit] = _group(op)
        self.members.setdefault(group, set()).add(unit)
        self.used += self.in_use[unit] > 0
        self._sort(group)

    def _leave(self, unit: str) -> None:
        group = self.group_of.pop(unit, None)
        if group is not None:
            self.members[group].discard(unit)
            self.used -= self.in_use[unit] > 0
            self._sort(group)

    def _sort(self, group: str) -> None:
        """Whether a group is one of those ahead."""
        here = self.members[group]
        if here and not any(self.pinned[unit] for unit in here):
            self.ahead.add(group)
        else:
            self.ahead.discard(group)

    def _advance(self, at: int) -> None:
        for changes in self.changes[self.seen : at + 1]:
            for unit, is_use, by in changes:
                group = self.group_of.get(unit)
                self.pinned[unit] += by
                if is_use:
                    before = self.in_use[unit] > 0
                    self.in_use[unit] += by
                    self.used += ((self.in_use[unit] > 0) - before) if group is not None else 0
                if group is not None:
                    self._sort(group)
        self.seen = max(self.seen, at + 1)

    def see(self, i: int, op: Op, spec: OpSpec) -> None:
        """Count the buffers that are in use after an op."""
        if spec.fills == PARAMS:
            self._advance(op.at)
            self._leave(op.unit)
            self._enter(op.unit, op)
            if self.ahead and (self.used > 0) + len(self.ahead) > self.policy.num_buffers:  # only the innermost use counts
                used = {group for unit, group in self.group_of.items() if self.in_use[unit]}
                what = f"is the unit too many: {sorted(used)} are in use, and {sorted(self.ahead)} resident beside them."
                raise refusal(i, op, what, f"at most {self.policy.num_buffers}, or those in use alone", "Gather it later.")
        elif spec.frees == PARAMS:
            self._leave(op.unit)
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
