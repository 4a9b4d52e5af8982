"""Compiled: a schedule bound to units and to an arena. One source of ops; the other one is :mod:`.eager`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from fsharp.stateful.runtime.executor import BoundOp, Executor, nothing
from fsharp.stateful.schedule.emit_gradients import last_microbatches
from fsharp.stateful.schedule.ops import FINISHING, OUTGOING, PARAMS
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.program import Event, UnitFacts, gradients_of
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule, issue_positions
from fsharp.stateful.units.facts import facts_of
from fsharp.stateful.units.gradient import GradientBuffer
from fsharp.stateful.units.resting import RestingGradient
from fsharp.stateful.units.route import Grads, OutgoingBlock
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.unsharded import UnshardedBuffer

_numbers = count()


class Compiled:
    """A schedule with memory.

    Args:
        schedule: verified.
        units: by name.
        arena: at least ``schedule.arena`` bytes.
        executor: will run its ops.

    Attributes:
        events: of the schedule.
        last_microbatches: numbers of those whose gradients are reduced for the optimizer as soon as they are there.
        slots: by unit, where its full parameters are while they are gathered.
        places: by unit, where its gradient rests from the op on that opens it.
        ops: by event, the first op of each bucket, without those that are carried.
        bound: by event, these ops, each with what to call.
        actions: by event, what to call that does something.
        carried: the gathers at the end of a step of what the next one begins with, if that follows the same schedule.
        stranded: of a step that has left it, gradients that stay in the arena, as somebody has views of them.
        number: names it in keys of ops.
    """

    def __init__(self, schedule: Schedule, units: dict[str, UnitState], arena: torch.Tensor, executor: Executor) -> None:
        self.schedule, self.arena = schedule, arena
        self.units = {facts.name: units[facts.name] for facts in schedule.program.units}
        self.events: tuple[Event, ...] = schedule.program.events
        self.last_microbatches = last_microbatches(self.events)
        self._span = arena.data_ptr(), arena.data_ptr() + len(arena)
        self.number, self.stranded = next(_numbers), dict[str, Memory]()
        self.slots = {
            name: UnshardedBuffer(
                units[name].layout,
                units[name].axes,
                arena.device,
                rank=executor.comm.rank,
                poison=schedule.policy.poison,
                memory=self._bytes(memory),
                where=memory,
            )
            for name, memory in schedule.slots.items()
        }
        self._opens = {op.unit: op.opens for op in schedule.ops if op.opens}
        self.places: dict[str, RestingGradient] = {}
        for name, memory in self._opens.items():
            gradient = units[name].gradient
            assert gradient is not None
            self.places[name] = gradient.route.resting(self._bytes(memory))
        self.ops: list[list[BoundOp]] = [[] for _ in self.events]
        for bound in _Binder(self, self._bytes).bind():
            self.ops[bound.op.at].append(bound)
        last = self.ops[-1] if self.ops else []
        self.carried = [bound for bound in last if bound.spec.fills == PARAMS]
        self.ops[-1:] = [[bound for bound in last if bound not in self.carried]]
        self.bind(executor)

    def bind(self, executor: Executor) -> None:
        """Have an executor run its ops from here on, on the lanes that the executor has now."""
        self.bound = [[(bound, executor.bind(bound)) for bound in each] for each in self.ops]
        self.actions = [[action for _, action in each if action is not nothing] for each in self.bound]

    def _bytes(self, memory: Memory | None) -> torch.Tensor:
        return self.arena[memory.start : memory.stop] if memory else self.arena[:0]

    def fits(self, units: dict[str, UnitState]) -> bool:
        """Whether these are still the units it was made for."""
        return self.units.items() <= units.items()

    def outside(self, grads: Grads) -> Grads:
        """Gradients of a use; if one is in the arena, because it is a parameter, copies: parameters are released first."""
        first, last = self._span
        for grad in grads:
            if grad is not None and first <= grad.data_ptr() < last:
                return [None if grad is None else grad.clone() for grad in grads]
        return grads

    def leave(self, is_in_use: Callable[[UnshardedBuffer], bool]) -> None:
        """The step goes on without this schedule: backwards where their forwards were, new uses in memory of their own.

        Args:
            is_in_use: whether a use that is under way has its parameters in a buffer.
        """
        self.stranded = {}
        for slot in self.slots.values():
            slot.wait()
            if not is_in_use(slot):
                slot.release()
        for unit in self.units.values():
            if unit.gradient is not None:
                unit.gradient.join()
                if not unit.gradient.leave_arena():
                    memory = self._opens[unit.key]
                    assert memory is not None
                    self.stranded[unit.key] = memory


class _Binder:
    """Binds the ops of a schedule to memory, one after the other."""

    def __init__(self, compiled: Compiled, memory_of: Callable[[Memory | None], torch.Tensor]) -> None:
        self._compiled, self._memory_of = compiled, memory_of
        self._blocks: dict[str, OutgoingBlock | None] = {}
        self._pieces: dict[str, list[list[torch.Tensor]]] = {}
        self._begun: set[str] = set()  # units whose gradient is collected
        self._late: list[tuple[Memory, GradientBuffer]] = []  # memory that gradients may leave late
        self._leader: list[int] = []  # for each op the first one of its bucket

    def bind(self) -> Iterator[BoundOp]:
        """The first op of each bucket, bound with the others."""
        runs = issue_positions(self._compiled.schedule.ops)
        self._leader = [run[0] for run in runs for _ in run]
        for run in runs:
            yield self._op(run[0], [self._op(i) for i in run[1:]])

    def _op(self, i: int, others: Sequence[BoundOp] = ()) -> BoundOp:
        compiled, ops = self._compiled, self._compiled.schedule.ops
        op, spec = ops[i], ops[i].spec
        number, unit = compiled.number, compiled.units.get(op.unit)
        bind = partial(
            BoundOp,
            op,
            (number, i),
            [(number, self._leader[j]) for j in op.after if ops[j].stream != op.stream],
            unit,
            copy=compiled.slots.get(op.unit),
            joins=self._joins(op),
            others=others,
        )
        if spec.memory not in (OUTGOING, FINISHING):
            return bind()
        assert unit is not None
        assert unit.gradient is not None
        is_last = compiled.events[op.at].kind in ("microbatch_end", "reduce")  # nothing of the schedule follows it at once
        if spec.frees and is_last and op.memory is not None:
            self._late.append((op.memory, unit.gradient))
        if spec.memory == FINISHING:
            if op.unit not in self._pieces:
                self._pieces[op.unit] = unit.gradient.route.finishing_block(self._memory_of(op.memory))
            return bind(pieces=self._pieces[op.unit], may_wait=is_last)
        is_first = spec.fills == OUTGOING and op.unit not in self._begun
        if spec.fills == OUTGOING:
            self._begun.add(op.unit)
        else:
            self._begun.discard(op.unit)
        return bind(block=self._block(op, unit.gradient), is_first=is_first, may_wait=is_last)

    def _block(self, op: Op, gradient: GradientBuffer) -> OutgoingBlock | None:
        if op.memory is None:
            return None
        block = self._blocks.get(op.unit)
        if block is None:
            several = op.memory.nbytes == gradient.route.outgoing_nbytes(several_uses=True, several_microbatches=True)
            block = self._blocks[op.unit] = gradient.route.block(self._memory_of(op.memory), several_uses=several)
        return block

    def _joins(self, op: Op) -> list[GradientBuffer]:
        """Gradients that may still be in memory that an op begins to use."""
        spec = op.spec
        begun = [op.opens, op.memory if spec.fills == spec.memory else None]
        late = [gradient for memory, gradient in self._late for each in begun if each and memory.overlaps(each)]
        return list(dict.fromkeys(late))


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
