"""Scheduled: a function that a scheduler runs, and the programs that it has recorded of it."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fsharp.compiling import uncompiled
from fsharp.errors import ScheduleError
from fsharp.functional.layout.sharded import Sharded, units_of
from fsharp.stateful.inspect.trace import Trace
from fsharp.stateful.runtime.programs import Programs
from fsharp.stateful.runtime.recorder import Recorder
from fsharp.stateful.runtime.tracer import Tracer
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.verify.verify import verify
from fsharp.tracebacks import api_boundary


class Status(NamedTuple):
    """How the last call of a scheduled function went.

    Attributes:
        kind: ``"new"`` before the first call. ``"recorded"``: the call followed no schedule, and was recorded. ``"planned"``:
            the call followed a schedule to the end. ``"left"``: the call left its schedule at an event that the schedule does
            not have. ``"local"``: the call used whole units alone, and had nothing to schedule.
        why: the reason for the kind, in words.
        num_programs: number of different programs that calls have had.
        num_left: number of calls in a row that have left their schedule.
    """

    kind: str
    why: str
    num_programs: int
    num_left: int


class Scheduled:
    """What ``scheduler(fn)`` returns: ``fn`` without its ``comm`` argument.

    Args:
        scheduler: runs it.
        fn: takes the scheduler as its argument ``comm``.
        name: names the function in labels of collectives.

    Attributes:
        programs: the programs that were recorded of it.
        num_calls: calls that labels count.
        recorder: measures its steps; None if nobody wants to know.
        followed_by: returns the function of the same scheduler that was called after this one the last time.
    """

    def __init__(self, scheduler: Tracer, fn: Callable[..., Any], name: str) -> None:
        self.scheduler, self.fn, self.name = scheduler, fn, name
        self.programs = Programs()
        self.num_calls = 0
        self.recorder: Recorder | None = None
        self._emitted: Callable[[], Schedule] | None = None
        self._positions: dict[str, int] = {}
        self._nodes: list[Sharded] = []
        self._status = Status("new", "it has not been called", 0, 0)
        self.followed_by: Callable[[], Scheduled | None] = lambda: None

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. The first time its order is recorded; later on it is followed."""
        return self.scheduler.run(self, args, kwargs)

    @property
    def schedule(self) -> Schedule | None:
        """What the next call follows."""
        return self.programs.expected

    @property
    def num_recordings(self) -> int:
        """Calls that have followed no schedule to their end."""
        return self.programs.num_recordings

    def status(self) -> Status:
        """How the last call went, and why."""
        return self._status

    @api_boundary
    def emitted(self) -> Schedule:
        """What the last call has done, if it has followed no schedule from its beginning: to be printed, drawn and verified.

        Raises:
            ScheduleError: the last call has followed a schedule, or there was none.
        """
        if self._emitted is None:
            raise ScheduleError("emitted(): the last call has followed a schedule: look at `schedule`.")
        return self._emitted()

    def begin_call(self) -> str:
        """Count a call. Return what labels say of it."""
        self.num_calls += 1
        return f"{self.name} #{self.num_calls - 1}"

    def end_local_call(self, why: str) -> None:
        """Keep why the call had nothing to schedule, and count the call no longer: one rank alone may have made it."""
        self.num_calls -= 1
        self._note("local", why)

    def end_call(self, kind: str, why: str, emitted: Callable[[], Schedule] | None = None) -> None:
        """Keep how a call went, for :meth:`status`, and what it has emitted, if it has followed no schedule."""
        self._note(kind, why)
        self._emitted = emitted

    def _note(self, kind: str, why: str) -> None:
        self._status = Status(kind, why, len(self.programs), self._status.num_left + 1 if kind == "left" else 0)

    def note_next(self, following: "Scheduled") -> None:
        """Keep which function of the scheduler was called after this one."""
        self.followed_by = weakref.ref(following)

    def recount(self) -> None:
        """Have labels count calls from 0."""
        self.num_calls = 0

    @api_boundary
    def follow(self, schedule: Schedule) -> None:
        """Run by this schedule from now on, perhaps an edited one. Pass the same one on every rank.

        Raises:
            ScheduleError: it would use memory or gradients wrongly. One that speaks of units that have not been seen is
                refused by the next call.
        """
        verify(schedule)
        self.programs.pin(schedule)

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


class Functions:
    """The functions of one scheduler. Each stays as long as somebody has it."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Scheduled] = weakref.WeakSet()
        self._names: Counter[str] = Counter()
        self._last: Callable[[], Scheduled | None] = lambda: None

    def __iter__(self) -> Iterator[Scheduled]:
        return iter(self._alive)

    def add(self, scheduler: Tracer, fn: Callable[..., Any], name: str) -> Scheduled:
        """Return a function for a scheduler to run, with a name of its own: ranks wrap in the same order."""
        self._names[name] += 1
        number = self._names[name]
        scheduled = Scheduled(scheduler, fn, f"{name} ({number})" if number > 1 else name)
        self._alive.add(scheduled)
        return scheduled

    def end_call(self, scheduled: Scheduled) -> None:
        """Keep which function was called last, and for the function before it which one came next."""
        if (last := self._last()) is not None:
            last.note_next(scheduled)
        self._last = weakref.ref(scheduled)

    def restart(self) -> None:
        """Begin anew after an error: no schedule has memory, and no function was called last."""
        self._last = lambda: None
        for scheduled in self._alive:
            scheduled.programs.bound.clear()
