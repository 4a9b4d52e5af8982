"""Scheduled: a function that a scheduler runs, and the schedule that it has recorded for it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsharp.functional.sharded import Sharded, units_of
from fsharp.stateful.inspect.trace import Trace
from fsharp.stateful.runtime.facts import facts_of
from fsharp.stateful.runtime.plan import Plan
from fsharp.stateful.runtime.recorder import Recorder
from fsharp.stateful.runtime.run import Run
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.program import Program, is_used_once
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.schedule.verify import verify

if TYPE_CHECKING:
    from fsharp.stateful.runtime.scheduler import Scheduler


class Scheduled:
    """What ``scheduler(fn)`` returns: ``fn`` without its ``comm`` argument.

    Args:
        scheduler: runs it.
        fn: takes the scheduler as its argument ``comm``.
    """

    def __init__(self, scheduler: "Scheduler", fn: Callable[..., Any]) -> None:
        self.scheduler, self.fn = scheduler, fn
        self.schedule: Schedule | None = None
        self.plan: Plan | None = None
        self.num_recordings = 0
        self.recorder: Recorder | None = None
        self._positions: dict[str, int] = {}
        self._nodes: list[Sharded] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. The first time its order is recorded; later on it is followed."""
        return self.scheduler.run(self, args, kwargs)

    def follow(self, schedule: Schedule) -> None:
        """Run by this schedule from now on, perhaps an edited one. Pass the same one on every rank.

        Raises:
            ScheduleError: it would use memory or gradients wrongly, or speaks of units that have not been seen.
        """
        verify(schedule)
        self.schedule, self.plan = schedule, None

    def trace(self) -> Trace:
        """Measure every step that follows the schedule from now on; the trace fills as they run."""
        trace = Trace()
        self.recorder = Recorder(trace, self.scheduler.device)
        return trace

    def sources(self, args: Any) -> dict[str, Sharded]:
        """The nodes among the arguments that the units of the schedule are, as far as they are among them."""
        self._nodes = units_of(args)
        return {key: self._nodes[i] for key, i in self._positions.items() if i < len(self._nodes)}

    def locate(self, key: str, node: Sharded) -> None:
        """Remember which of the arguments a unit is."""
        mine = [b.data_ptr() for b in node.raw_buffers]
        for i, each in enumerate(self._nodes):
            if each.name == node.name and [b.data_ptr() for b in each.raw_buffers] == mine:
                self._positions[key] = i
                return

    def forget(self) -> None:
        """Hold on to nobody's tensors."""
        self._nodes = []

    def record(self, run: Run) -> None:
        """Compile what a run has recorded."""
        scheduler = self.scheduler
        order = dict.fromkeys([e.unit for e in run.events if e.unit])
        order |= run.trained
        several = run.num_microbatches > 1
        once = {key for key in run.promised if is_used_once(run.events, key)}
        units = [
            facts_of(scheduler.units[key], scheduler.policy, several_microbatches=several, in_place=key in once)
            for key in order
        ]
        program = Program(tuple(units), tuple(run.events))
        self.num_recordings += 1
        if self.schedule is not None and self.schedule.program == program:
            return
        self.schedule, self.plan = compile_schedule(program, scheduler.policy), None
        verify(self.schedule)
