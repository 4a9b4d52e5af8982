"""StepLifecycle: opens, records and closes the steps of one scheduler, and owns what outlives a step."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from fsharp.distributed.process_group import ProcessGroupComm, TransportGroups, with_own_numbering
from fsharp.errors import CommError, ScheduleError
from fsharp.functional.comm.agree import agree, all_gather_fixed_size
from fsharp.functional.comm.protocol import Comm, CountingComm, innermost_comm
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.functional.comm.settings_digests import SettingsHistory
from fsharp.functional.layout.sharded import Sharded
from fsharp.stateful.runtime.arena import Arena
from fsharp.stateful.runtime.boundary import in_backward
from fsharp.stateful.runtime.executor import Executor
from fsharp.stateful.runtime.function_record import FunctionRecord, FunctionRecords
from fsharp.stateful.runtime.handed_out_gradients import HandedOutGradients
from fsharp.stateful.runtime.step import Step
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Program, num_gradients_by_microbatch
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.transport.base import Transport
from fsharp.stateful.transport.blocking import BlockingTransport
from fsharp.stateful.transport.gloo import GlooTransport
from fsharp.stateful.transport.nccl import NcclTransport
from fsharp.stateful.transport.streams import Lanes, new_lanes
from fsharp.stateful.units.future_buffers import is_pending
from fsharp.stateful.units.unit_state import UnitRegistry, UnitState
from fsharp.stateful.verify.verify import verify


class StepUnderWay(NamedTuple):
    """The step under way, with its function and thread. ``title``: its name in labels, without the digest of settings."""

    step: Step
    record: FunctionRecord
    title: str
    thread: int

    def check_thread(self) -> None:
        """Raise a ScheduleError if this thread neither began the step nor runs a backward."""
        if threading.get_ident() != self.thread and not in_backward():
            raise ScheduleError(
                "Scheduler: a step is under way in another thread. Call all functions of a scheduler in one thread, or give "
                "each thread a scheduler of its own."
            )


class StepLifecycle:
    """Opens, records and closes the steps of one scheduler, and owns what outlives a step: executor, units, memory, history.

    Attributes:
        own: a Comm of the ranks with its own numbering of collectives.
        history: all settings so far, which ranks have to share.
        handed_out: the gradients that the last ``value_and_grad`` of the step has returned.
        now: the step under way; None between steps.
        differentiated: keys of units whose value_and_grad() is under way.
    """

    def __init__(self, comm: Comm, policy: SchedulePolicy) -> None:
        self.comm, self.policy = comm, policy
        self.records, self.history = FunctionRecords(), SettingsHistory()
        self._closed: str | None = None
        restart_replay.record_replay_only_call(lambda: self.close_scheduler_after_error(CommError("a rank was restarted")))
        self._renew_executor_and_units(new_lanes(comm.device))
        restart_replay.record_replay_only_call(partial(self._reset_after_rank_restart, self.own, self.executor))

    def _reset_after_rank_restart(self, own: Comm, executor: Executor) -> None:
        """Return to the state of a new object, for a new generation of the job. ``own``, ``executor``: its first ones."""
        self._closed, self.history = None, SettingsHistory()
        self.own, self.executor = own, executor
        executor.reset_after_rank_restart()
        self.records.reset_after_rank_restart()
        self._renew_units_and_arena()

    def _renew_executor_and_units(self, lanes: Lanes) -> None:
        self.own = with_own_numbering(self.comm)
        separate_groups = bool(self.policy.separate_groups)
        transport = _transport_over(self.own, separate_groups=separate_groups)
        self.executor = Executor(transport, lanes, self.comm, separate_groups=separate_groups)
        self._renew_units_and_arena()

    def _renew_units_and_arena(self) -> None:
        self.registry = UnitRegistry(trivial=self.policy.trivial_axes)
        self.arena = Arena(self.executor, self.registry, self.policy)
        self.now: StepUnderWay | None = None
        self._step_outside_functions: Callable[[], Step | None] = lambda: None  # a weak reference
        self.num_updates, self.differentiated = 0, set[str]()
        self.handed_out = HandedOutGradients()

    def reopen_after_error(self) -> None:
        """If an error has closed the scheduler, open it with new process groups and the same schedules. All ranks call this."""
        if self._closed is not None:
            self._closed = None
            self._renew_executor_and_units(self.executor.lanes)
            self.records.unbind_all_schedules()

    def set_lanes(self, lanes: Lanes) -> None:
        """Run all later ops on ``lanes``, also the ops of schedules that are already bound to units and memory."""
        self.executor.set_lanes(lanes)
        for record in self.records:
            for compiled in record.programs.bound.values():
                compiled.bind_ops(self.executor)

    def add_settings(self, text: str) -> None:
        """Add settings that have to be equal on all ranks, a field in each line.

        Labels of later collectives have a digest of all settings. So a collective raises an error that names differences.
        """
        self.history.add_settings(text)
        if self.now is not None:
            self.executor.set_label_names(step=f"{self.now.title}{self.history.label_suffix}")

    def reset_label_history(self) -> None:
        """Make labels independent of earlier steps and settings, once all ranks have loaded the same values."""
        self.history, self.num_updates = SettingsHistory(), 0
        for record in self.records:
            record.restart_label_numbering()

    def open_step(self, record: FunctionRecord, inputs: Any) -> Step:
        """Begin a step of a scheduled function. All calls until :meth:`close_step` are part of the step."""
        with self.closing_scheduler_on_error():
            self._check_scheduler_open_locally()
            self.history.begin_step()
            title = f"{record.new_call_name()} after {self.num_updates} updates"
            self.executor.begin_step(f"{title}{self.history.label_suffix}")
            self.registry.begin_step()
            for key, node in record.nodes_at_recorded_positions(inputs).items():
                self.registry.bind_unbound_node(key, node)
            schedule = self.arena.bind_next_schedule(record, self.records)
            profiler = record.profiler if schedule is not None else None
            step = Step(self.executor, schedule, self.registry.units, profiler)
            self.now = StepUnderWay(step, record, title, threading.get_ident())
            self.executor.lanes.set_profiler(profiler)
            observer = None if profiler is None else lambda outcome: profiler.outcomes.append(outcome)  # the list is replaced
            self.executor.transport.observe_collectives(observer)
            if profiler is not None:
                profiler.begin_step()
            if schedule is not None:
                self.arena.use_or_redo_carried_gathers(schedule)
        return step

    def close_step(self, step: Step) -> None:
        """End the step, and record its program. After a scheduled step, gather the first units of the next step."""
        step.end_step()
        self._record_and_prepare_next_step(step)
        if step.profiler is not None and step.eager is None:
            step.profiler.end_step()
        self._clear_step()

    @contextmanager
    def closing_scheduler_on_error(self, step: Step | None = None) -> Iterator[None]:
        """Close the scheduler on all ranks if an error leaves this context, and ``step`` is None or under way."""
        try:
            yield
        except BaseException as error:
            if step is None or (self.now is not None and self.now.step is step):
                self.close_scheduler_after_error(error)
            raise

    def close_scheduler_after_error(self, error: BaseException) -> None:
        """Close the scheduler after an error: abandon the step under way, and tell other ranks of the error."""
        if self._closed is not None:
            return
        self._closed = f"{type(error).__name__}: {error}"
        self.executor.report_failure(error, "a call outside of any step")
        if self.now is not None:
            self.now.step.end_without_waiting()
        for unit in self.registry.units.values():
            unit.release_parameter_references()
            if unit.gradient is not None:
                unit.gradient.abandon(self._check_scheduler_open_locally)
        self.arena.abandon_gathers()
        self._clear_step()

    def check_scheduler_open(self) -> None:
        """Raise a ScheduleError if an error has closed this scheduler, or an AgreementError if another rank has failed."""
        self._check_scheduler_open_locally()
        if isinstance(comm := innermost_comm(self.own), ProcessGroupComm):
            comm.watch.raise_if_failed()

    def _check_scheduler_open_locally(self) -> None:
        if self._closed is not None:
            why = f"this scheduler was closed by an earlier error: {self._closed}"
            raise ScheduleError(f"{why}\nMake a new scheduler: fs.Scheduler(comm) of the same Comm works.")

    def _clear_step(self) -> None:
        """Release the references to the step under way and to its tensors."""
        self.now = None
        self.handed_out.clear()
        self.registry.unbind_nodes()
        self.executor.set_label_names(step="")
        for record in self.records:
            record.nodes.clear()

    def _record_and_prepare_next_step(self, step: Step) -> None:
        """If the step has followed a schedule, gather the next step's first units. If not, record and compile its program."""
        assert self.now is not None
        record = self.now.record
        for unit in self.registry.units.values():
            if unit.gradient is not None:
                unit.gradient.copy_out_held_tensors()
        if step.used_no_collectives:  # one rank alone may run a local step, so no later label may depend on the step
            self.history.undo_begin_step()
            record.record_call_status("local", "nothing was gathered, reduced or updated, so there is nothing to schedule")
            return
        self.records.record_last_called(record)
        if step.eager is None and step.schedule is not None:
            record.programs.record_scheduled_call(step.schedule.schedule.program)
            record.record_call_status("planned", "it has followed its schedule to the end")
            if record.next_called() in (None, record):  # the next step of other functions may begin with any unit
                self.arena.gather_for_next_step(record, step.profiler if self.arena.schedule is step.schedule else None)
        else:
            self._record_and_compile_step(record, step)

    def _record_and_compile_step(self, record: FunctionRecord, step: Step) -> None:
        """Record the program of a step that did not follow a schedule to the end."""
        trained, updated = step.trained, step.updated
        order = dict.fromkeys([e.unit for e in step.events if e.unit]) | trained | updated
        gradients = num_gradients_by_microbatch(step.events)
        units, several = [], step.num_microbatches > 1
        for k in order:
            known = {"trained": k in trained, "updated": k in updated, "several_uses": any(each[k] > 1 for each in gradients)}
            own = self.registry.units[k].facts(**known, several_microbatches=several, keep_gradients=self.policy.keep_gradients)
            units.append(own)
        program = Program(tuple(units), tuple(step.events))
        was_planned, held = step.schedule is not None, list(step.uses.held)
        record.programs.record_unscheduled_call(
            program, partial(self._compile_on_all_ranks, has_held_parameters=bool(held)), left=was_planned
        )
        emitted: Callable[[], Schedule] | None = None
        assert step.eager is not None
        if not was_planned:
            emitted = partial(
                step.eager.as_schedule, dict(self.registry.units), program.events, self.policy, trained=trained, updated=updated
            )
        why = f"its schedule did not have {step.eager.left_at} next" if was_planned else "no schedule was expected to fit"
        if held:
            why = f"a caller holds parameters of units {held} after their use, and a schedule would reuse their memory"
        record.record_call_status("left" if was_planned else "recorded", why, emitted)
        used = {facts.name for each in self.records for schedule in each.programs.schedules for facts in schedule.program.units}
        self.registry.remove_unused(used | self.differentiated)

    def _compile_on_all_ranks(self, program: Program, *, has_held_parameters: bool) -> Schedule | None:
        """Return the schedule of a program, equal on all ranks; None if on any rank parameters are held after their use."""
        self.executor.make_process_groups()
        if b"1" in all_gather_fixed_size(b"1" if has_held_parameters else b"0", self.own):
            return None
        schedule = compile_schedule(program, self.policy, has_streams=self.comm.device.type != "cpu")
        verify(schedule)
        policy = "\n".join(f"{name}={value}" for name, value in asdict(self.policy).items())
        fields = {"events": "\n".join(map(str, program.events)), "policy": policy, "schedule": "\n".join(schedule.lines())}
        agree("Scheduler: the schedule of a step", fields, self.own)
        return schedule

    def count_update(self) -> None:
        """Count an update of parameters, for the names of later steps in labels."""
        self.num_updates += 1

    def find_or_bind_unit(self, node: Sharded) -> UnitState:
        """Return the unit to which ``node`` is bound in this step; bind the node first if it is new."""
        unit = self.registry.find_unit(node)
        if unit is None:
            unit = self.registry.bind_or_make_unit(node)
            if self.now is not None:
                self.now.record.record_argument_position(unit.key, node)
        if unit.node is None or (node.lazy is not None and is_pending(node)):
            unit.bind_node(node)
        return unit

    def step_or_eager(self) -> Step:
        """Return the step under way; outside of scheduled functions, a step that has no schedule and is not recorded."""
        if (now := self.now) is not None:
            if threading.get_ident() != now.thread:
                now.check_thread()
            return now.step
        step = self._step_outside_functions()
        if step is None:
            self._check_scheduler_open_locally()
            self.registry.unbind_nodes()
            step = Step(self.executor, None, self.registry.units)
            self._step_outside_functions = weakref.ref(step)
        return step


def _transport_over(comm: Comm, *, separate_groups: bool) -> Transport:
    """Return the transport for a Comm. Gathers and reductions may have separate process groups."""
    inner, counters = comm, list[CountingComm]()
    while isinstance(inner, CountingComm):
        counters.append(inner)
        inner = inner.inner
    if not isinstance(inner, ProcessGroupComm):
        return BlockingTransport(comm)
    kind = NcclTransport if inner.is_nccl else GlooTransport
    return kind(inner, TransportGroups(inner, separate=separate_groups), counters)
