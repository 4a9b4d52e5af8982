"""Compiled: a schedule bound to units and to an arena. One source of ops; the other one is :mod:`.eager`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import torch

from fsharp.errors import ScheduleError
from fsharp.stateful.runtime.executor import BoundOp
from fsharp.stateful.schedule.emit_gradients import last_microbatches
from fsharp.stateful.schedule.ops import FINISHING, OUTGOING, PARAMS
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.program import Event, UnitFacts, gradients_of
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule, issue_groups
from fsharp.stateful.units.facts import facts_of
from fsharp.stateful.units.resting import RestingGradient
from fsharp.stateful.units.route import Grads, OutgoingBlock
from fsharp.stateful.units.unit_state import UnitState, UnshardedBuffer

_numbers = count()


class Compiled:
    """A schedule with memory.

    Args:
        schedule: verified.
        units: by name.
        arena: at least ``schedule.arena`` bytes.
        rank: of this process.

    Attributes:
        last_microbatches: numbers of those whose gradients are reduced for the optimizer as soon as they are there.
        slots: by unit, where its full parameters are while they are gathered.
        places: by unit, where its gradient rests from the op on that opens it.
        ops: by event, without those that are carried.
        carried: the gathers at the end of a step of what the next one begins with, if that follows the same schedule.
        stranded: of a step that has left it, gradients that stay in the arena, as somebody has views of them.
        number: names it in keys of ops.
    """

    def __init__(self, schedule: Schedule, units: dict[str, UnitState], arena: torch.Tensor, *, rank: int) -> None:
        self.schedule, self.arena = schedule, arena
        self._first, self._last = arena.data_ptr(), arena.data_ptr() + len(arena)
        self.units = {facts.name: units[facts.name] for facts in schedule.program.units}
        self.events: tuple[Event, ...] = schedule.program.events
        self.last_microbatches = last_microbatches(self.events)
        self.slots = {
            name: UnshardedBuffer(
                units[name].layout, units[name].axes, arena.device, rank=rank, memory=self._bytes(memory), where=memory
            )
            for name, memory in schedule.slots.items()
        }
        self._opens = {op.unit: op.opens for op in schedule.ops if op.opens}
        self.stranded: dict[str, Memory] = {}
        self.places: dict[str, RestingGradient] = {}
        for name, memory in self._opens.items():
            gradient = units[name].gradient
            assert gradient is not None
            self.places[name] = gradient.route.resting(self._bytes(memory))
        self._blocks: dict[str, OutgoingBlock] = {}
        self._pieces: dict[str, list[list[torch.Tensor]]] = {}
        self.ops: list[list[BoundOp]] = [[] for _ in self.events]
        self.number, begun, leaders = next(_numbers), set[str](), _leaders(schedule.ops)
        for i, op in enumerate(schedule.ops):
            after = [(self.number, leaders[j]) for j in op.after if schedule.ops[j].stream != op.stream]
            bound = BoundOp(op, (self.number, i), after, self.units.get(op.unit))
            self._bind(i, bound, begun)
            if leaders[i] == i:
                self.ops[op.at].append(bound)
            else:
                first = self.ops[op.at][-1]
                first.others, first.after = (*first.others, bound), tuple(dict.fromkeys(first.after + bound.after))
        last = self.ops.pop() if self.ops else []
        self.carried = [bound for bound in last if bound.spec.fills == PARAMS]
        self.ops.append([bound for bound in last if bound not in self.carried])

    def _bind(self, i: int, bound: BoundOp, begun: set[str]) -> None:
        op, spec = bound.op, bound.spec
        if PARAMS in (spec.fills, spec.joins, spec.frees):
            if op.unit not in self.slots:
                raise ScheduleError(f"op {i}, {op}: the unit has no memory in this schedule.")
            bound.params = self.slots[op.unit]
        elif spec.memory in (OUTGOING, FINISHING):
            bound.may_wait = self.events[op.at].kind in ("microbatch_end", "reduce")
            if spec.memory == FINISHING:
                bound.pieces = self._finishing(op, bound)
                return
            bound.block = self._block(op, bound)
            if spec.fills == OUTGOING:
                bound.is_first = op.unit not in begun
                begun.add(op.unit)
            else:
                begun.discard(op.unit)
            bound.is_reduced_to_rest = op.opens is not None

    def _finishing(self, op: Op, bound: BoundOp) -> list[list[torch.Tensor]]:
        if op.unit not in self._pieces:
            memory = self._bytes(op.memory) if op.memory else self.arena[:0]
            self._pieces[op.unit] = bound.gradient.route.finishing_block(memory)
        return self._pieces[op.unit]

    def _block(self, op: Op, bound: BoundOp) -> OutgoingBlock | None:
        if op.memory is None:
            return None
        if op.unit not in self._blocks:
            route = bound.gradient.route
            several = op.memory.nbytes == route.outgoing_nbytes(several_uses=True, several_microbatches=True)
            self._blocks[op.unit] = route.block(self._bytes(op.memory), several_uses=several)
        return self._blocks[op.unit]

    def _bytes(self, memory: Memory) -> torch.Tensor:
        return self.arena[memory.start : memory.stop]

    def fits(self, units: dict[str, UnitState]) -> bool:
        """Whether these are still the units it was made for."""
        return all(units.get(name) is unit for name, unit in self.units.items())

    def outside(self, grads: Grads) -> Grads:
        """Gradients of a use; if one is in the arena, because it is a parameter, copies: parameters are released first."""
        for grad in grads:
            if grad is not None and self._first <= grad.data_ptr() < self._last:
                return [None if grad is None else grad.clone() for grad in grads]
        return grads

    def leave(self) -> None:
        """The step goes on without this schedule: backwards where their forwards were, new uses in memory of their own."""
        self.stranded = {}
        for name, slot in self.slots.items():
            slot.wait()
            if not slot.users:
                slot.release(poison=False)
            self.units[name].params = None
        for unit in self.units.values():
            if unit.gradient is not None:
                unit.gradient.join()
                if not unit.gradient.leave_arena():
                    self.stranded[unit.key] = self._opens[unit.key]


def mismatch(schedule: Schedule, units: dict[str, UnitState], policy: Policy) -> str:
    """Return why units cannot follow a schedule: the first fact of the schedule that is wrong. Empty if units can follow it.

    :meth:`Step.update` compares bytes in host memory, which are known only then. A block may be larger than necessary, as in
    steps without a schedule; and gradients may rest in the arena, or not, whatever the policy says.
    """
    gradients = gradients_of(schedule.program.events)
    for facts in schedule.program.units:
        unit = units.get(facts.name)
        if unit is None:
            return f"it has unit {facts.name!r}, which this scheduler has not seen; it knows {sorted(units)}"
        if facts.trainable and unit.gradient is None:
            return f"it reduces a gradient of unit {facts.name!r}, which has had none"
        found = [
            facts_of(
                unit,
                replace(policy, keep_gradients=not facts.rest),
                trained=facts.trainable,
                updated=bool(facts.update_gather),
                several_uses=is_general or any(each[facts.name] > 1 for each in gradients),
                several_microbatches=is_general or len(gradients) > 2,
            )
            for is_general in (False, True)
        ]
        for name in UnitFacts.__slots__:
            expected = [getattr(each, name) for each in found]
            if name != "host" and getattr(facts, name) not in expected:
                return f"{name} of unit {facts.name!r} is {getattr(facts, name)}, and here {expected[0]}"
    return ""


def _leaders(ops: Sequence[Op]) -> list[int]:
    """For each op the position of the first one that is issued as one with it."""
    result: list[int] = []
    for issued in issue_groups(ops):
        result += [len(result)] * len(issued)
    return result
