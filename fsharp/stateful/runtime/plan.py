"""Plan: a schedule with memory: for each event of its program, what the host has to do."""

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

import torch

from fsharp.functional.errors import ScheduleError
from fsharp.stateful.runtime.copies import Copy, LiveUnit
from fsharp.stateful.runtime.gradients import Block, Grads
from fsharp.stateful.runtime.rest import Rest
from fsharp.stateful.schedule.program import Event, is_used_once
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule

if TYPE_CHECKING:
    from fsharp.stateful.runtime.run import Run

_numbers = count()
Action = Callable[["Run"], None]


class Plan:
    """A schedule bound to units and to an arena.

    Args:
        schedule: verified.
        units: by name.
        arena: at least ``schedule.arena`` bytes.
        rank: of this process.
    """

    def __init__(self, schedule: Schedule, units: dict[str, LiveUnit], arena: torch.Tensor, *, rank: int) -> None:
        self.schedule, self.arena, self.rank = schedule, arena, rank
        self._first = arena.data_ptr()
        self._last = self._first + len(arena)
        self.units = {facts.name: units[facts.name] for facts in schedule.program.units}
        self.number = next(_numbers)
        self.after = [tuple((self.number, j) for j in op.after if schedule.ops[j].stream != op.stream) for op in schedule.ops]
        self.expected: tuple[Event, ...] = schedule.program.events
        slots = schedule.slots
        self.copies = {name: Copy(units[name], self._bytes(memory), rank=rank, where=memory) for name, memory in slots.items()}
        self.blocks: dict[str, Block] = {}
        self.finishing: dict[str, list[list[torch.Tensor]]] = {}
        self._first_casts, self._several = _casts(schedule)
        self.rests = {op.unit: op.opens for op in schedule.ops if op.opens}
        self.places: dict[str, Rest] = {}
        for name, memory in self.rests.items():
            gradient = units[name].gradient
            assert gradient is not None
            self.places[name] = gradient.place(self._bytes(memory))
        self.in_place = {
            facts.name
            for facts in schedule.program.units
            if is_used_once(self.expected, facts.name)
            and not (facts.rest or facts.outgoing or schedule.policy.keep_gradients)
            and (gradient := units[facts.name].gradient) is not None
            and gradient.is_reduced_in_place
        }
        self.actions: list[list[Action]] = [[] for _ in self.expected]
        self._numbers: list[list[int]] = [[] for _ in self.expected]
        self.computes: dict[int, int] = {}
        for i, op in enumerate(schedule.ops):
            action = self._action(i, op)
            if action is None:
                self.computes[op.at] = i
            else:
                self.actions[op.at].append(action)
                self._numbers[op.at].append(i)
        last = len(self.expected) - 1
        self.carried = [
            op.unit for op in schedule.ops if op.kind == "gather" and op.at == last and op.phase == "forward" and op.memory
        ]

    def moved(self, arena: torch.Tensor) -> "Plan":
        """The same plan in another arena, with what the step before has gathered for the next one."""
        plan = Plan(self.schedule, self.units, arena, rank=self.rank)
        for key in self.carried:
            plan.copies[key].take(self.copies[key])
        return plan

    def numbered(self, event: int) -> "zip[tuple[int, Action]]":
        """The actions at an event, each with the position of its op."""
        return zip(self._numbers[event], self.actions[event], strict=True)

    def outside(self, grads: Grads) -> Grads:
        """Gradients of a use; if one is in the arena, because it is a parameter, copies: parameters are released first."""
        if all(grad is None or not self._first <= grad.data_ptr() < self._last for grad in grads):
            return grads
        return [None if grad is None else grad.clone() for grad in grads]

    def fits(self, units: dict[str, LiveUnit]) -> bool:
        """Whether these are still the units it was made for."""
        return all(units.get(name) is unit for name, unit in self.units.items())

    def _bytes(self, memory: Memory) -> torch.Tensor:
        return self.arena[memory.start : memory.stop]

    def _action(self, i: int, op: Op) -> Action | None:
        unit = self.units[op.unit] if op.unit else None
        memory = op.memory
        if op.kind == "compute":
            return None
        if op.kind == "update":
            return lambda run: run.do_update(i)
        assert unit is not None
        if op.phase == "update":
            return (lambda run: run.do_spread(i, unit)) if op.kind == "gather" else (lambda run: run.do_settle(i, unit))
        if op.kind in ("gather", "wait", "release"):
            if unit.key not in self.copies:
                raise ScheduleError(f"op {i}, {op}: the unit has no memory in this schedule.")
            copy = self.copies[unit.key]
            if op.kind == "gather":
                return lambda run: run.do_gather(i, copy)
            return (lambda run: run.do_wait(i, copy)) if op.kind == "wait" else (lambda run: run.do_release(i, copy))
        gradient = unit.gradient
        assert gradient is not None, f"{op.unit} has no gradient"
        if op.phase == "finish":
            if op.kind == "accumulate":
                return lambda run: run.do_land_finish(i, unit, memory)
            if unit.key not in self.finishing:
                empty = self.arena[:0]
                self.finishing[unit.key] = gradient.finishing_block(self._bytes(op.memory) if op.memory else empty)
            pieces = self.finishing[unit.key]
            return lambda run: run.do_finish(i, unit, pieces, memory)
        block = self._block(op, unit)
        if op.kind == "cast":
            first = i in self._first_casts
            return lambda run: run.do_cast(i, unit, block, first, memory, op.opens)
        if op.kind == "reduce":
            return lambda run: run.do_reduce(i, unit, block, op.opens)
        return lambda run: run.do_accumulate(i, unit, block, memory, op.opens)

    def _block(self, op: Op, unit: LiveUnit) -> Block | None:
        if op.memory is None:
            return None
        if unit.key not in self.blocks:
            assert unit.gradient is not None
            self.blocks[unit.key] = unit.gradient.block(self._bytes(op.memory), several_uses=unit.key in self._several)
        return self.blocks[unit.key]


def _casts(schedule: Schedule) -> tuple[set[int], set[str]]:
    """Casts that are the first of their unit in their microbatch, and units that have more than one in some."""
    begun: set[str] = set()
    first, several = set(), set()
    for i, op in enumerate(schedule.ops):
        if op.kind == "cast":
            (several.add(op.unit) if op.unit in begun else first.add(i)) if op.memory else first.add(i)
            begun.add(op.unit)
        elif op.phase == "backward" and op.kind in ("reduce", "accumulate"):
            begun.discard(op.unit)
    return first, several
