"""Arena: the memory of a scheduler's schedules. One schedule at a time owns it."""

from collections.abc import Iterable

import torch

from fsharp.errors import ScheduleError
from fsharp.stateful.runtime.bound_schedule import BoundSchedule, describe_first_mismatch
from fsharp.stateful.runtime.executor import Executor
from fsharp.stateful.runtime.function_record import FunctionRecord
from fsharp.stateful.runtime.op_profiler import OpProfiler
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.units.unit_state import UnitRegistry
from fsharp.stateful.units.unsharded_buffer import buffers_stamp


class Arena:
    """The memory that all schedules of a scheduler share. ``schedule``: the schedule that owns the memory now, or None."""

    def __init__(self, executor: Executor, registry: UnitRegistry, policy: SchedulePolicy) -> None:
        self._executor, self._registry, self._policy = executor, registry, policy
        self.memory = torch.empty(0, dtype=torch.uint8, device=executor.comm.device)
        self.schedule: BoundSchedule | None = None

    @torch.inference_mode(False)  # the memory outlives an evaluation
    def bind_next_schedule(self, record: FunctionRecord, records: Iterable[FunctionRecord]) -> BoundSchedule | None:
        """Give the arena to the schedule of a function's next step. Return this schedule; None if no schedule fits.

        ``records``: the records of all functions that use the arena. If the arena grows, their schedules are unbound. Raises
        ScheduleError if the schedule that the user has passed to ``follow()`` does not fit the units.
        """
        units, schedule = self._registry.units, record.programs.expected_schedule
        bound = record.programs.bound.get(id(schedule))
        if schedule is not None and (bound is None or not bound.is_bound_to(units)):
            bound = None
            why = describe_first_mismatch(schedule, units)
            if why and record.programs.pinned is not None:
                raise ScheduleError(
                    f"follow(): the schedule does not fit: {why}. Call the function once before, and follow a schedule of the "
                    "same trees, strategy and policy."
                )
            schedule = None if why else schedule
        if schedule is None:
            self._release_schedule()
            return None
        if len(self.memory) < schedule.arena:
            self._release_schedule()
            self.memory = self._executor.transport.allocate_arena(schedule.arena, self._policy.arena_memory)
            for each in records:
                each.programs.bound.clear()
            for unit in units.values():
                if unit.gradient is not None:
                    unit.gradient.release_arena_memory()
        if bound is None or bound.arena is not self.memory:
            bound = BoundSchedule(schedule, units, self.memory, self._executor)
            record.programs.bound[id(schedule)] = bound
            self._executor.lanes.release_events_on_gc(bound, bound.number)
        if self.schedule is not bound:
            self._release_schedule()
            self.schedule = bound
        return bound

    def _release_schedule(self) -> None:
        """Release the parameters in the arena, so that another schedule can own the arena."""
        if self.schedule is not None:
            self._executor.lanes.stream_wait_lanes("gather", "reduce")
            for unsharded in self.schedule.unsharded_by_unit.values():
                unsharded.release()
        self.schedule = None

    def abandon_gathers(self) -> None:
        """Abandon the gathers under way into the arena: after an error they may never end."""
        if self.schedule is not None:
            for unsharded in self.schedule.unsharded_by_unit.values():
                unsharded.abandon_gathers()

    def use_or_redo_carried_gathers(self, schedule: BoundSchedule) -> None:
        """At the start of a step, use units that the previous step has gathered for this step. Gather the missing units."""
        for bound in schedule.carried:
            units = [each.unit for each in bound.bucket_members if each.unit is not None]
            found = [(schedule.unsharded_by_unit[unit.key], unit.node) for unit in units]
            if all(node is None or unsharded.is_filled_from(buffers_stamp(node)) for unsharded, node in found):
                for unsharded, _ in found:
                    unsharded.renew_version(self._executor.number)
            else:
                for unsharded, _ in found:
                    unsharded.release()
                self._executor.action_of(bound)()

    def gather_for_next_step(self, record: FunctionRecord, profiler: OpProfiler | None) -> None:
        """At the end of a step, begin to gather the first units of the function's next step, if a schedule is expected."""
        bound = record.programs.bound.get(id(record.programs.expected_schedule))
        if bound is None or not bound.carried or not bound.is_bound_to(self._registry.units):
            return
        if bound is not self.schedule:
            self._release_schedule()
            self.schedule, profiler = bound, None
        units = [each.unit for op in bound.carried for each in op.bucket_members if each.unit is not None]
        for op in bound.carried:
            action = self._executor.action_of(op)
            if profiler is not None:
                profiler.run_op(op, action)
            else:
                action()
        for unit in units:
            bound.unsharded_by_unit[unit.key].carry_to_next_step(unit.node)
        if self._executor.lanes.has_streams:
            with self._executor.lanes.on_lane("gather", after_compute=False):
                for x in [x for unit in units if unit.node is not None for x in unit.node.raw_buffers]:
                    self._executor.lanes.record_stream(x)  # the state may be replaced before these gathers have ended
