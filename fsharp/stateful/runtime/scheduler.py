"""Scheduler: a Comm that runs pure functions by a schedule, with the same bits as any other Comm."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.errors import OptionError, ScheduleError
from fsharp.functional.comm.protocol import Comm, DelegatingComm, innermost_comm
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.functional.comm.tree_labels import TreeLabelCounters, tree_label_counters_of
from fsharp.stateful.runtime.engine import ScheduledEngine
from fsharp.stateful.runtime.function_record import CallStatus
from fsharp.stateful.runtime.step_lifecycle import StepLifecycle
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.timing.trace import Trace
from fsharp.stateful.verify.verify import verify
from fsharp.torch_compile import disable_compile
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import can_bind_partial, check_computes_when_called, options_checked, short_repr


@options_checked
class Scheduler(DelegatingComm):
    """A Comm that runs training steps by a schedule: collectives overlap compute, and results have the same bits.

    ``scheduler(step)`` wraps a function that has an argument ``comm``. The first call of the wrapped function records the order
    in which the function uses units. From this order a schedule is compiled and verified. Later calls follow the schedule.

    >>> import fsharp as fs
    >>> scheduler = fs.Scheduler(fs.SingleComm(), prefetch=1)
    >>> scheduler(lambda x, comm: x + comm.mesh.size)(1)
    2

    An error in a wrapped function closes the scheduler, and all other ranks raise an error too. Then make a new Scheduler.

    Args:
        comm: the ranks. Collectives run in threads over gloo, on streams over NCCL, and block over any other Comm.
        policy: what the schedule may do, such as how far ahead it gathers; see :class:`SchedulePolicy`.
        options: fields of a :class:`SchedulePolicy`, in place of ``policy``.

    Attributes:
        comm: the Comm of the constructor; pass it to code whose collectives are not part of a step.
        policy: the policy.
        engine: runs the pure functions that get this scheduler as their Comm.

    Raises:
        ScheduleError: both ``policy`` and ``options`` are given, or a value is out of range.
    """

    def __init__(self, comm: Comm, *, policy: SchedulePolicy | None = None, **options: Any) -> None:
        if policy is not None and options:
            raise ScheduleError(f"Scheduler(): got a policy and {sorted(options)}: pass one or the other.")
        self.comm, self.mesh, self.rank, self.device = comm, comm.mesh, comm.rank, comm.device
        self.policy = policy or SchedulePolicy(**options)
        if self.policy.separate_groups is None:
            self.policy = replace(self.policy, separate_groups=comm.device.type == "cpu")
        inner = innermost_comm(comm)
        if self.policy.arena_memory != "allocator" and not (isinstance(inner, ProcessGroupComm) and inner.is_nccl):
            raise ScheduleError(
                f"Scheduler(): arena_memory is {self.policy.arena_memory!r}, which needs ranks over NCCL, got "
                f"{type(inner).__name__} on {comm.device}. Pass arena_memory='allocator'."
            )
        self.engine = ScheduledEngine(StepLifecycle(comm, self.policy))

    def __call__(self, fn: Callable[..., Any]) -> "ScheduledFunction":
        """Return a function that calls ``fn`` with this scheduler as ``comm``. OptionError if ``fn`` takes no ``comm``."""
        if not can_bind_partial(fn, comm=self):
            raise OptionError(f"Scheduler(): {short_repr(fn)} has no argument comm, expected def step(state, batch, comm).")
        check_computes_when_called(f"Scheduler(): {short_repr(fn)}", fn, OptionError)
        return ScheduledFunction(self, fn, getattr(fn, "__qualname__", type(fn).__name__).replace(".<locals>", ""))

    @property
    def tree_label_counters(self) -> TreeLabelCounters | None:
        """The wrapped Comm's counters, from which trees get their names in labels; None for a Comm without labels."""
        return tree_label_counters_of(self.comm)

    all_gather, reduce_scatter = api_boundary(DelegatingComm.all_gather), api_boundary(DelegatingComm.reduce_scatter)
    all_reduce, all_to_all = api_boundary(DelegatingComm.all_reduce), api_boundary(DelegatingComm.all_to_all)

    def _comm_and_label(self, label: str, *call: Any) -> tuple[Comm, str]:
        """Return the Comm for a user's own collective, and ``label`` with the step. Raises if the scheduler is closed."""
        steps = self.engine.steps
        steps.check_scheduler_open()
        steps.executor.make_process_groups()
        return steps.own, steps.executor.with_step_prefix(label or "a call of the Comm")


class ScheduleHandle:
    """The calls of one function under a scheduler, or the training steps of one module: their schedules, and how calls went.

    Attributes:
        record: programs, schedules and status of the calls.
    """

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler, self.record = scheduler, scheduler.engine.steps.records.add_function(name)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule for the next call, chosen by :meth:`follow` or predicted; None if there is none."""
        return self.record.programs.expected_schedule

    @property
    def num_unscheduled_calls(self) -> int:
        """Number of calls with collectives that did not follow a schedule to the end."""
        return self.record.programs.num_unscheduled_calls

    def last_call_status(self) -> CallStatus:
        """Return whether the last call was recorded, or followed or left its schedule, and the reason."""
        return self.record.status

    @api_boundary
    def last_unscheduled_ops(self) -> Schedule:
        """Return the ops of the last call with collectives, to print. ScheduleError if it had a schedule, or is missing."""
        if self.record.emitted is None:
            raise ScheduleError("there is no call, or the last call had a schedule: read `schedule` instead.")
        return self.record.emitted()

    @api_boundary
    def follow(self, schedule: Schedule) -> None:
        """Follow ``schedule``, such as an edited :attr:`schedule`, until a call leaves it. All ranks pass equal schedules.

        Raises:
            ScheduleError: ``schedule`` uses memory or gradients wrongly. If it does not fit the units, the next call raises.
        """
        verify(schedule)
        restart_replay.record_and_call(lambda: self.record.programs.pin_schedule(schedule))

    def start_trace(self) -> Trace:
        """Begin to measure steps that follow a schedule, and return the trace of them. An earlier trace gets no more steps.

        The trace grows with each step, until :meth:`stop_trace`. On a GPU each of these steps waits for the device at its end.
        """
        return self.record.start_trace(self.scheduler.device, self.scheduler.engine.steps.executor.total_collective_wait_s)

    def stop_trace(self) -> None:
        """Stop to measure steps. The trace that :meth:`start_trace` has returned stays as it is."""
        self.record.stop_trace()


class ScheduledFunction(ScheduleHandle):
    """The function that ``scheduler(fn)`` returns: ``fn`` without its argument ``comm``. Its calls follow schedules."""

    def __init__(self, scheduler: Scheduler, fn: Callable[..., Any], name: str) -> None:
        super().__init__(scheduler, name)
        self._fn = fn

    @disable_compile
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. The first call records the order of its units; later calls follow a schedule.

        A call inside of another scheduled function of this scheduler is part of that step. Passing ``comm`` is an error.
        """
        if "comm" in kwargs or (args and (args[-1] is self.scheduler or args[-1] is self.scheduler.comm)):
            raise OptionError("the scheduler passes comm by itself: leave comm out of the call, as in step(state, batch).")
        steps = self.scheduler.engine.steps
        if steps.now is not None:
            steps.now.check_thread()
            return self._fn(*args, comm=self.scheduler, **kwargs)
        step = steps.open_step(self.record, (args, kwargs))
        with steps.closing_scheduler_on_error(step):
            result = self._fn(*args, comm=self.scheduler, **kwargs)
            steps.close_step(step)
        return result
