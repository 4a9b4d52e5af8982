"""BoundSchedule: a schedule bound to units and to an arena, as the source of a step's ops. The other source is ``EagerOps``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fsharp.stateful.runtime.bound_op import BoundOp, op_source_numbers
from fsharp.stateful.runtime.executor import Executor, do_nothing
from fsharp.stateful.schedule.emit_gradients import units_reduced_after_microbatches
from fsharp.stateful.schedule.ops import FINISHING, OUTGOING, PARAMS
from fsharp.stateful.schedule.program import Event, UnitFacts, num_gradients_by_microbatch
from fsharp.stateful.schedule.schedule import Memory, Schedule, op_positions_by_bucket
from fsharp.stateful.units.gradient_route import Grads, OutgoingBlock
from fsharp.stateful.units.unit_gradient import UnitGradient
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.unsharded_buffer import UnshardedBuffer


class BoundSchedule:
    """A schedule bound to units and to an ``arena`` of at least ``schedule.arena`` bytes: its ops have their tensors.

    Attributes:
        reducing_microbatches: numbers of the microbatches at whose end gradients are reduced to the optimizer's shards.
        unsharded_by_unit: by unit, the buffer of its full parameters.
        resting_gradients: by unit, the memory of its gradient at rest; in use from the first op on that writes there.
        ops: by event, the first op of each bucket, without the ops in ``carried``.
        bound: by event, pairs of an op in ``ops`` and its action.
        actions: by event, the actions in ``bound`` that do something.
        carried: gathers at the end of a step for the next step, which the next step uses if it follows the same schedule.
        stranded: after a step has left this schedule, by unit, the arena memory of a gradient of which a caller holds a view.
        number: number of this object, in keys of ops.
    """

    def __init__(self, schedule: Schedule, units: dict[str, UnitState], arena: torch.Tensor, executor: Executor) -> None:
        self.schedule, self.arena = schedule, arena
        self.units = {facts.name: units[facts.name] for facts in schedule.program.units}
        self.events: tuple[Event, ...] = schedule.program.events
        self.reducing_microbatches = units_reduced_after_microbatches(schedule.program).keys()
        self._span = arena.data_ptr(), arena.data_ptr() + len(arena)
        self.number, self.stranded = next(op_source_numbers), dict[str, Memory]()
        comm, poison = executor.comm, schedule.policy.poison
        filled = {op.unit: op.memory for op in schedule.ops if op.memory and op.spec.fills == PARAMS}
        self.unsharded_by_unit = {
            name: UnshardedBuffer(units[name], comm, at, arena, poison=poison) for name, at in filled.items()
        }
        self._opens: dict[str, Memory] = {op.unit: op.opens for op in schedule.ops if op.opens}
        self.resting_gradients = {
            name: units[name].required_gradient.route.resting_gradient(self._arena_slice(memory))
            for name, memory in self._opens.items()
        }
        self.ops: list[list[BoundOp]] = [[] for _ in self.events]
        for bound in self._bind_buckets():
            self.ops[bound.op.event_index].append(bound)
        last = self.ops[-1] if self.ops else []
        self.carried = [bound for bound in last if bound.spec.fills == PARAMS]
        self.ops[-1:] = [[bound for bound in last if bound not in self.carried]]
        self.bind_ops(executor)

    def bind_ops(self, executor: Executor) -> None:
        """Make the actions that run the ops, with an executor and its current lanes (streams)."""
        self.bound = [[(bound, executor.action_of(bound)) for bound in each] for each in self.ops]
        self.actions = [[action for _, action in each if action is not do_nothing] for each in self.bound]

    def _bind_buckets(self) -> Iterator[BoundOp]:
        """Yield the first op of each bucket, bound together with the other ops of the bucket."""
        ops = self.schedule.ops
        runs = op_positions_by_bucket(ops)
        leader = [run[0] for run in runs for _ in run]
        blocks: dict[str, OutgoingBlock] = {}
        final_reduction_block: dict[str, list[list[torch.Tensor]]] = {}
        begun: set[str] = set()  # units whose gradient is collected
        late: list[tuple[Memory, UnitGradient]] = []  # memory that a reduction may still use when a later op fills it

        def bind(i: int, other_members: Sequence[BoundOp] = ()) -> BoundOp:
            op, spec, unit = ops[i], ops[i].spec, self.units.get(ops[i].unit)
            buffer, after = spec.memory_buffer_kind, [(self.number, leader[j]) for j in op.after if ops[j].stream != op.stream]
            fills = [op.opens, op.memory if spec.fills == buffer else None]
            joins = [gradient for memory, gradient in late for each in fills if each and memory.overlaps(each)]
            # At these events no later op needs the result soon.
            known: dict[str, Any] = {"may_run_late": self.events[op.event_index].kind in ("microbatch_end", "reduce")}
            if buffer in (OUTGOING, FINISHING):
                assert unit is not None
                route = unit.required_gradient.route
                if spec.frees and known["may_run_late"] and op.memory is not None:
                    late.append((op.memory, unit.required_gradient))
            if buffer == FINISHING:
                if op.unit not in final_reduction_block:
                    final_reduction_block[op.unit] = route.final_reduction_block(self._arena_slice(op.memory))
                known["final_reduction_block"] = final_reduction_block[op.unit]
            elif buffer == OUTGOING:
                if op.memory is not None and op.unit not in blocks:
                    several = op.memory.nbytes == route.outgoing_block_nbytes(several_uses=True, several_microbatches=True)
                    blocks[op.unit] = route.outgoing_block(self._arena_slice(op.memory), several_uses=several)
                known["block"] = blocks.get(op.unit)
                known["is_first"] = spec.fills == OUTGOING and op.unit not in begun
                (begun.add if spec.fills == OUTGOING else begun.discard)(op.unit)
            known["gradients_to_wait_for"], known["other_members"] = tuple(dict.fromkeys(joins)), other_members
            return BoundOp(op, (self.number, i), after, unit, self.unsharded_by_unit.get(op.unit), **known)

        for run in runs:
            yield bind(run[0], [bind(i) for i in run[1:]])

    def _arena_slice(self, memory: Memory | None) -> torch.Tensor:
        return self.arena[memory.start : memory.stop] if memory else self.arena[:0]

    def is_bound_to(self, units: dict[str, UnitState]) -> bool:
        """Return whether each unit of the schedule is bound to the same UnitState as in ``units``."""
        return self.units.items() <= units.items()

    def clone_gradients_in_arena(self, grads: Grads) -> Grads:
        """Return a use's gradients. If one is in the arena, return copies of all: arena memory is released before the cast."""
        first, last = self._span
        for grad in grads:
            if grad is not None and first <= grad.data_ptr() < last:
                return [None if grad is None else grad.clone() for grad in grads]
        return grads

    def release_params_move_grads(self, is_in_use: Callable[[UnshardedBuffer], bool]) -> None:
        """Release full parameters that are not in use. Move gradients out of the arena, unless callers hold views of them."""
        self.stranded = {}
        for unsharded in self.unsharded_by_unit.values():
            unsharded.wait()
            if not is_in_use(unsharded):
                unsharded.release()
        for unit in self.units.values():
            if unit.gradient is not None:
                unit.gradient.wait()
                if not unit.gradient.try_move_out_of_arena():
                    self.stranded[unit.key] = self._opens[unit.key]


def describe_first_mismatch(schedule: Schedule, units: dict[str, UnitState]) -> str:
    """Return text about the first fact in a schedule that does not hold for ``units``; empty if the units can follow it.

    No mismatch: memory of gradients before their reduction that is larger than necessary, or gradients at rest outside of the
    arena. Bytes in host memory are known later: :meth:`~fsharp.stateful.runtime.step.Step.gather_and_offload` compares them.
    """
    gradients = num_gradients_by_microbatch(schedule.program.events)
    for facts in schedule.program.units:
        unit = units.get(facts.name)
        if unit is None:
            return f"it has unit {facts.name!r}, which this scheduler has not seen; the scheduler knows {sorted(units)}"
        if facts.trainable and unit.gradient is None:
            return f"it reduces a gradient of unit {facts.name!r}, which has no gradient here"
        known = {"trained": facts.trainable, "updated": bool(facts.update_gather)}
        several = {"several_uses": any(each[facts.name] > 1 for each in gradients), "several_microbatches": len(gradients) > 2}
        found = [unit.facts(**known, **each, keep_gradients=not facts.rest) for each in (several, dict.fromkeys(several, True))]
        for name in UnitFacts.__slots__:
            expected = [getattr(each, name) for each in found]
            if name != "host" and getattr(facts, name) not in expected:
                return f"{name} of unit {facts.name!r} is {getattr(facts, name)}, and here {expected[0]}"
    return ""
