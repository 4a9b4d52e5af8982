"""Step: one call of a function under a scheduler, as a sequence of events such as the forward of a unit.

A source of ops turns each event into ops, which the executor runs. The source is a schedule, or ``EagerOps`` once an event is
not in the schedule.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from fsharp.errors import ScheduleError
from fsharp.functional.layout.sharded import Sharded
from fsharp.stateful.runtime.bound_op import BoundOp
from fsharp.stateful.runtime.bound_schedule import BoundSchedule
from fsharp.stateful.runtime.boundary import UnitUse, UsesUnderWay, create_graph_error, in_backward, make_leaves_differentiable
from fsharp.stateful.runtime.eager_ops import EagerOps
from fsharp.stateful.runtime.executor import Executor
from fsharp.stateful.runtime.op_profiler import OpProfiler
from fsharp.stateful.schedule.program import Event, EventKind
from fsharp.stateful.units.full_unit import FullUnit
from fsharp.stateful.units.gradient_route import Grads
from fsharp.stateful.units.host_copies import HostDeviceCopies
from fsharp.stateful.units.unit_gradient import GradientPhase
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.unsharded_buffer import UnshardedBuffer, buffers_stamp
from fsharp.stateful.units.update_gather import UpdateGather


class Step:
    """One step: a call of a scheduled function.

    Attributes:
        eager: the source of ops without a schedule; None while a schedule is followed.
        trained: units that have a gradient in this step.
        updated: units whose parameters this step has updated.
        num_microbatches: number of backward passes that are over.
        is_over: whether the step has ended, so that no backward can come.
    """

    def __init__(
        self,
        executor: Executor,
        schedule: BoundSchedule | None,
        units: dict[str, UnitState],
        profiler: OpProfiler | None = None,
    ) -> None:
        self.executor, self.schedule, self.units, self.profiler = executor, schedule, units, profiler
        self._on_backward: Callable[[], None] | None = None
        self.events: list[Event] = []
        self.uses = UsesUnderWay()
        self.eager: EagerOps | None = EagerOps(executor, self.uses) if schedule is None else None
        self.trained, self.updated = dict[str, None](), dict[str, None]()
        self.num_microbatches, self.is_over = 0, False

    @property
    def used_no_collectives(self) -> bool:
        """Whether this step has used no collective: it has only forwards of units that rest in full."""
        kinds = {event.kind for event in self.events}
        return kinds <= {"forward", "forward_end"} and not any(self.units[event.unit].axes for event in self.events)

    def _run_event(
        self,
        kind: EventKind,
        unit: UnitState | None = None,
        number: int = -1,
        *,
        no_gradient: bool = False,
        unsharded: UnshardedBuffer | None = None,
        units: Collection[UnitState] = (),
        names: tuple[str, ...] | None = None,
    ) -> None:
        at, found = len(self.events), (kind, unit.key if unit is not None else "", number, no_gradient, names)
        if self.eager is None:
            schedule = self.schedule
            assert schedule is not None
            if at < len(schedule.events) and schedule.events[at] == found:
                self.events.append(schedule.events[at])
                if self.profiler is not None:
                    self.profiler.run_event(schedule.events[at], schedule.bound[at])
                    return
                for action in schedule.actions[at]:
                    action()
                return
        event = Event(*found)
        self.events.append(event)
        eager = self.abandon_schedule(event)
        self._run_ops(eager.ops_at_event(at, event, unit, unsharded, units))

    def _run_ops(self, bound_ops: Iterable[BoundOp]) -> None:
        """Run ops as ``EagerOps`` emits them, and their following ops: each op runs before the next is emitted."""
        assert self.eager is not None
        for bound in self.eager.with_following_ops(bound_ops):
            self.executor.action_of(bound)()
            del bound  # releases memory for the next op

    def abandon_schedule(self, event: Event | None = None) -> EagerOps:
        """Abandon the schedule, if the step follows one, and finish the work under way. Return the source of all later ops."""
        if self.eager is not None:
            return self.eager
        assert self.schedule is not None
        after = f"the end after {self.events[-1]}" if self.events else "an end"
        self.executor.end_all_reductions()
        self.schedule.release_params_move_grads(self.uses.is_buffer_in_use)
        left_at = after if event is None else str(event)
        self.eager = EagerOps(self.executor, self.uses, self.schedule, left_at)
        return self.eager

    def begin_use(self, node: Sharded, unit: UnitState) -> UnitUse:
        """Begin a use of a unit, gather the unit, and return the use with its leaves."""
        uses = self.uses
        if uses.backward and not in_backward():
            self._end_passed_backwards(None)
        parent = uses.forward[-1] if uses.forward else uses.backward[-1] if uses.backward else None
        number = next(uses.numbers)
        self._run_event("forward", unit, number)
        source = self.eager or self.schedule
        assert source is not None
        unsharded = source.unsharded_by_unit[unit.key] if unit.axes else None
        full = unsharded.full if unsharded is not None else unit.full_unit_at_rest()
        assert full is not None
        use = UnitUse(unit, number, parent, unsharded, full)
        uses.forward.append(use)
        sinks = node.sinks
        if sinks and torch.is_grad_enabled():
            leaves, chosen = use.leaves, full.leaf_table.trainable
            assert leaves is not None
            uses.pending[unit.key] = uses.pending.get(unit.key, 0) + 1
            uses.awaited.add(weakref.ref(use, uses.awaited.discard))
            graph = make_leaves_differentiable(use, self._receive_use_gradients, [leaves[i] for i in chosen], *sinks)
            for i, leaf in zip(chosen, graph, strict=True):
                leaves[i] = leaf
        return use

    def full_unit_in_backward(self, unit: str) -> FullUnit | None:
        """Return the full parameters of a unit while its backward is under way, else None."""
        use = next((use for use in reversed(self.uses.backward) if use.unit.layout.name == unit), None)
        if use is None:
            return None
        return use.unsharded.full if use.unsharded is not None else use.unit.full_unit_at_rest()

    def buffer_for_backward(self, use: UnitUse) -> UnshardedBuffer:
        """Return the buffer of a use for its backward, gathered again if it was released. ScheduleError if the step is over."""
        assert use.unsharded is not None
        if self.is_over or use.unsharded.filled_from is None:  # the backward did not pass through the function's result
            self._run_backward_hook([use.unit.key])
            self._begin_use_backward(use)
        return use.unsharded

    def end_forward(self, use: UnitUse) -> None:
        """End the forward of a use, after its function has returned."""
        uses = self.uses
        while uses.backward and uses.backward[-1].is_same_or_inside(use):  # the function itself has called a backward
            self._end_use_backward(uses.backward[-1], None)
        popped = uses.forward.pop()
        assert popped is use
        if use.leaves is not None:  # the function was not called
            use.take_leaves()
        self._run_event("forward_end", use.unit, use.number, unsharded=use.unsharded)
        if use.unsharded is not None and use.unsharded.was_held and not use.is_opaque:
            # In a backward a checkpoint that recomputes may hold the parameters, until the unit's own backward.
            (uses.held_in_backward if in_backward() else uses.held)[use.unit.key] = None

    def begin_use_backwards(self, uses: Sequence[UnitUse], grads: object = None) -> None:
        """Begin the backward of each of ``uses``: autograd has reached the results of their function."""
        gathered = [x.unit.key for x in uses if x.unsharded is not None] if self.is_over or torch.is_grad_enabled() else []
        if gathered and torch.is_grad_enabled():
            raise create_graph_error()
        if self.is_over and not gathered:
            return
        if self.is_over or self._on_backward is not None:
            self._run_backward_hook(gathered)
        for use in uses:
            self._begin_use_backward(use)

    def _run_backward_hook(self, gathered: Sequence[str]) -> None:
        """Call the hook of :meth:`set_on_backward`. Raise an error if the step is over: the units ``gathered`` are released."""
        if self._on_backward is not None:
            self._on_backward()
        if self.is_over:
            raise ScheduleError(
                f"a backward came to unit {gathered[0]!r} after the step that used it was over. With a ShardedModule call "
                "backward before optimizer.step() and zero_grad(), and call the model again for another backward. Call the "
                "backward of a scheduled function inside of it; or pass comm=scheduler to the function instead of wrapping it."
            )

    def _begin_use_backward(self, use: UnitUse) -> None:
        uses = self.uses
        if use in uses.backward:
            return
        if use.parent is not None and use.parent not in uses.forward:
            self._begin_use_backward(use.parent)  # if both have the same output, the backward reaches the inner use first
        if uses.backward:
            self._end_passed_backwards(use)
        uses.held_in_backward.pop(use.unit.key, None)
        if use.unit.node is None:
            use.unit.bind_node(use.node)
        if use.unit.node is not None and buffers_stamp(use.unit.node) != use.stamp:
            raise ScheduleError(
                f"the parameters of unit {use.unit.key!r} were changed or replaced between a forward and its backward. Change "
                "them after the backward; or, in functions, pass comm=scheduler.comm."
            )
        self._run_event("backward", use.unit, use.number, unsharded=use.unsharded)
        uses.backward.append(use)

    def _end_passed_backwards(self, next_use: UnitUse | None) -> None:
        """End the backwards of uses that autograd has passed on its way to ``next_use``; all of them for None."""
        backward = self.uses.backward
        while backward and (next_use is None or not next_use.is_same_or_inside(backward[-1])):
            self._end_use_backward(backward[-1], None)

    def _receive_use_gradients(self, use: UnitUse, grads: Grads) -> None:
        """End the backward of a use: autograd has computed ``grads``, the gradients of its leaves."""
        if self.is_over or self._on_backward is not None:
            self._run_backward_hook([use.unit.key])
        uses = self.uses
        if use not in uses.backward:
            self._begin_use_backward(use)
        while uses.backward[-1] is not use:
            self._end_use_backward(uses.backward[-1], None)
        uses.pending[use.unit.key] = uses.pending.get(use.unit.key, 0) - 1
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            uses.awaited.discard(weakref.ref(use, None))
        self._end_use_backward(use, grads)

    def _end_use_backward(self, use: UnitUse, grads: Grads | None) -> None:
        self.uses.backward.pop()
        if grads is not None and self.eager is None and self.schedule is not None:
            grads = self.schedule.clone_gradients_in_arena(grads)
        self.executor.set_backward_gradients(grads)
        self._run_event("backward_end", use.unit, use.number, no_gradient=grads is None, unsharded=use.unsharded)
        self.executor.set_backward_gradients(None)

    def begin_backward_pass(self, *, is_last: bool) -> None:
        """Begin a backward pass. ``is_last``: whether gradients are reduced to the optimizer's shards after this pass."""
        number = self.num_microbatches
        if not is_last and self.schedule is not None and number in self.schedule.reducing_microbatches:
            self.abandon_schedule()  # the schedule would reduce gradients for the optimizer in this pass
        self.executor.set_label_names(microbatch=f"microbatch {number}, the last" if is_last else f"microbatch {number}")

    def end_microbatch(self, flat_grads: Sequence[tuple[UnitState, Grads]]) -> None:
        """End a microbatch. ``flat_grads``: gradients at rest of parameters that the loss gathered itself, by ``gather()``."""
        self._end_passed_backwards(None)
        self.uses.move_held_in_backward_to_held()
        found = [(unit, grads) for unit, grads in flat_grads if [grad for grad in grads if grad is not None]]
        if found:
            self.abandon_schedule()
        self._run_event("microbatch_end", units=self.units.values())
        for unit, grads in found:
            if unit.gradient is not None:
                unit.gradient.add_flat_gradients(grads)
        self.num_microbatches += 1
        self.executor.set_label_names(microbatch=f"microbatch {self.num_microbatches}")
        self.uses.pending.clear()

    def begin_new_gradients(self, units: Sequence[UnitState], *, final_sum_in_place: bool) -> None:
        """Begin new gradients of ``units``, in the schedule's memory.

        ``final_sum_in_place``: whether sums over ranks may overwrite the new gradients, which nobody will read. If old
        gradients of ``units`` are still being reduced, the schedule is abandoned, and the reductions end.
        """
        if {unit.key for unit in units} & {key for key, _ in self.executor.reducing}:
            self.abandon_schedule()
        in_arena = self.schedule.resting_gradients if self.schedule is not None and self.eager is None else {}
        for unit in units:
            unit.begin_gradient(self.executor.transport, in_arena.get(unit.key), final_sum_in_place=final_sum_in_place)
        self.trained.update(dict.fromkeys([unit.key for unit in units if unit.gradient is not None]))

    def begin_unscheduled_reduction(self) -> None:
        """Record a reduction outside of the schedule as an event. All ranks make this reduction now."""
        self._end_passed_backwards(None)
        self._run_event("move")

    def reduce_to_optimizer(self, units: Sequence[UnitState], *, wait: bool) -> None:
        """Reduce gradients to the optimizer's shards. Without ``wait`` a later read of a gradient waits for its reduction."""
        self._end_passed_backwards(None)
        final = [unit for unit in units if unit.gradient is not None and unit.gradient.route.has_final_reduction]
        unfinished = [unit for unit in final if unit.required_gradient.phase < GradientPhase.FINISHING]
        self._run_event("reduce", units=unfinished, names=tuple(sorted([unit.key for unit in final])))
        unfinished = [unit for unit in unfinished if unit.required_gradient.phase < GradientPhase.FINISHING]
        if unfinished:
            self._run_ops(self.abandon_schedule().ops_of_final_reduction(unfinished))
        for unit in units:
            if wait and unit.gradient is not None:
                unit.gradient.wait()
        self.executor.lanes.stream_wait_lanes("reduce")

    def fetch_state(self, host_copies: Mapping[str, HostDeviceCopies]) -> None:
        """Begin ``host_copies`` of state of units to the device, and make compute wait for these copies."""
        self._end_passed_backwards(None)
        self.executor.set_host_copies(host_copies)
        for key in host_copies:
            self._run_event("fetch", self.units[key])
        self.executor.lanes.stream_wait_ops(self.executor.fetched[-1:])  # the last op of the lane ends after all others

    def gather_and_offload(self, update_gathers: Sequence[UpdateGather], host_copies: Mapping[str, HostDeviceCopies]) -> None:
        """Gather updated parameters to where they rest, and copy offloaded optimizer state to host memory."""
        self._end_passed_backwards(None)
        for unit in self.units.values():
            if unit.gradient is not None and unit.gradient.is_under_way:
                unit.gradient.wait()  # the next step reuses the memory that the reduction reads
        nbytes = dict.fromkeys(self.executor.copied_units, 0) | {key: each.nbytes for key, each in host_copies.items()}
        self.executor.set_host_copies(host_copies, {each.unit.key: each for each in update_gathers if each.gather_inputs})
        for key in nbytes:
            self.units[key].set_offloaded_nbytes(nbytes[key])
        if self.eager is None and self.schedule is not None:
            expected = {facts.name: facts.host for facts in self.schedule.schedule.program.units}
            if any(nbytes[key] != expected.get(key) for key in nbytes):  # the state has changed since the recorded step
                self.abandon_schedule()
        units = [update_gather.unit for update_gather in update_gathers]
        self.updated.update(dict.fromkeys([unit.key for unit in units]))
        self._run_event("update", units=units, names=tuple(sorted([unit.key for unit in units])))
        if self.executor.update_gathers or self.executor.host_copies:  # of units that are not in the schedule
            self._run_ops(self.abandon_schedule().ops_after_update(units))

    def end_step(self) -> None:
        """End the step after its function has returned, and wait for reductions under way."""
        self._end_passed_backwards(None)
        self.uses.move_held_in_backward_to_held()
        for unit in self.units.values():
            if unit.gradient is not None and unit.gradient.is_under_way:
                unit.gradient.wait()
        if self.schedule is not None and len(self.events) < len(self.schedule.events):
            self.abandon_schedule()
        self.is_over = True

    def end_without_waiting(self) -> None:
        """End the step after an error, without waiting for work under way. A later backward of this step raises an error."""
        self.is_over = True

    def set_on_backward(self, hook: Callable[[], None]) -> None:
        """Let each backward that reaches a use of this step first call ``hook``, which may raise an error."""
        self._on_backward = hook
