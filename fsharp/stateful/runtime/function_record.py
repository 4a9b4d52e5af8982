"""FunctionRecord: the programs and schedules of one function's calls, a prediction of the next program, and how calls went."""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fsharp.functional.layout.sharded import Sharded, units_of
from fsharp.stateful.runtime.bound_schedule import BoundSchedule
from fsharp.stateful.runtime.op_profiler import OpProfiler
from fsharp.stateful.schedule.program import Program
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.timing.trace import Trace
from fsharp.stateful.units.unit_state import MemoryKey, memory_key

_MAX_SEEN_PROGRAMS = 256
"""Largest number of programs to remember without a schedule."""
_MAX_COMPILED_SCHEDULES = 16
"""Largest number of schedules to keep, each with views of the arena."""
_MAX_LEFT_CALLS = 3
"""Value of ``num_calls_off_schedule`` from which on a program is compiled only when it occurs again."""


class RecordedPrograms:
    """The recorded programs and schedules of one function.

    A new program is compiled. From ``num_calls_off_schedule == 3`` on a program is compiled only when it occurs again. The next
    program is predicted from the last two programs. If these two occurred before, the program that followed then is expected.
    If not, the last program is expected again, unless ``num_calls_off_schedule`` is 3 or more.

    Attributes:
        bound: schedules that are bound to the current arena, by id of the schedule.
        pinned: the schedule that the user has chosen by ``follow()``, until a call leaves this schedule.
        num_unscheduled_calls: number of calls with collectives that did not follow a schedule to the end.
        num_calls_off_schedule: number of calls that have left their schedule since a call last followed one to the end.
    """

    def __init__(self) -> None:
        self._schedules: dict[Program, Schedule] = {}
        self._seen: dict[Program, None] = {}
        self._after: dict[tuple[Program | None, Program | None], Program] = {}
        self._last_two: tuple[Program | None, Program | None] = (None, None)
        self._is_steady = False  # whether the last program is expected to follow itself
        self.pinned: Schedule | None = None
        self.bound: dict[int, BoundSchedule] = {}
        self.num_unscheduled_calls = self.num_calls_off_schedule = 0

    def __len__(self) -> int:
        return len(self._schedules)

    @property
    def schedules(self) -> list[Schedule]:
        """All compiled schedules, and the one that the user has chosen."""
        return [*self._schedules.values(), *([self.pinned] if self.pinned is not None else [])]

    @property
    def expected_schedule(self) -> Schedule | None:
        """The pinned schedule; else that of the program predicted for the next call; None without prediction or schedule."""
        if self.pinned is not None:
            return self.pinned
        last = self._last_two[1]
        if self._is_steady and last is not None:
            return self._schedules.get(last)
        following = self._after.get(self._last_two)
        if following is not None and following in self._schedules:
            return self._schedules[following]
        return self._schedules.get(last) if last is not None and self.num_calls_off_schedule < _MAX_LEFT_CALLS else None

    def pin_schedule(self, schedule: Schedule) -> None:
        """Follow ``schedule``, which the user has chosen, from the next call on, until a call leaves it."""
        self.pinned = schedule
        self.bound.clear()

    def record_scheduled_call(self, program: Program) -> None:
        """Record a call that has followed its schedule to the end."""
        self._record_program_transition(program)
        self.num_calls_off_schedule = 0

    def record_unscheduled_call(self, program: Program, compile_: Callable[[Program], Schedule | None], *, left: bool) -> None:
        """Record the program of a call that had no schedule, or has ``left`` its schedule, and release the pinned schedule."""
        self.pinned = None
        self.num_unscheduled_calls += 1
        self.num_calls_off_schedule = self.num_calls_off_schedule + 1 if left else self.num_calls_off_schedule
        if program not in self._schedules and (program in self._seen or self.num_calls_off_schedule < _MAX_LEFT_CALLS):
            while len(self._schedules) >= _MAX_COMPILED_SCHEDULES:
                old = self._schedules.pop(next(iter(self._schedules)))
                self.bound.pop(id(old), None)
            if (schedule := compile_(program)) is not None:
                self._schedules[program] = schedule
        elif program in self._schedules:
            self._schedules[program] = self._schedules.pop(program)  # now the newest: the oldest is removed first
        self._seen[program] = None
        while len(self._seen) > _MAX_SEEN_PROGRAMS:
            del self._seen[next(iter(self._seen))]
        self._record_program_transition(program)

    def _record_program_transition(self, program: Program) -> None:
        if program is self._last_two[1] and self._is_steady:
            return
        self._after[self._last_two] = program
        while len(self._after) > _MAX_SEEN_PROGRAMS:
            del self._after[next(iter(self._after))]
        self._last_two = self._last_two[1], program
        self._is_steady = self._after.get((program, program)) is program


class CallStatus(NamedTuple):
    """How the last call of a scheduled function went.

    Attributes:
        kind: ``"new"``: there was no call yet. ``"recorded"``: the call had no schedule, and was recorded. ``"planned"``: the
            call followed its schedule to the end. ``"left"``: an event of the call was not in its schedule.
            ``"local"``: the call used no collective, so there is nothing to schedule.
        why: the reason, in words.
        num_programs: number of different programs for which the function has schedules.
        num_calls_off_schedule: number of consecutive calls that have left their schedule.
    """

    kind: str
    why: str
    num_programs: int
    num_calls_off_schedule: int


class FunctionRecord:
    """The record of a scheduled function's calls, or of a module's training steps.

    Attributes:
        emitted: returns the ops of the last call with collectives; None if this call had a schedule, or there was no call.
        profiler: measures steps for a trace; None without a trace.
        next_called: returns the record of the function that was called after this function's last call; None if none was.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.profiler: OpProfiler | None = None
        self.reset_after_rank_restart()

    def reset_after_rank_restart(self) -> None:
        """Reset the record to that of a new function, without programs, schedules and calls."""
        self.programs, self.num_calls = RecordedPrograms(), 0
        self.next_called: Callable[[], FunctionRecord | None] = lambda: None
        self.emitted: Callable[[], Schedule] | None = None
        self._positions: dict[str, int] = {}
        self.nodes: list[Sharded] = []
        self._index_by_memory: dict[MemoryKey, int] = {}  # of the first node in `nodes` with this memory
        self.status = CallStatus("new", "it has not been called", 0, 0)

    def new_call_name(self) -> str:
        """Count a call, and return its name for labels."""
        self.num_calls += 1
        return f"{self.name} #{self.num_calls - 1}"

    def record_call_status(self, kind: str, why: str, emitted: Callable[[], Schedule] | None = None) -> None:
        """Record how a call went; a ``"local"`` call is not counted. ``emitted``: returns the ops if there was no schedule."""
        if kind == "local":  # one rank alone may have made the call
            self.num_calls -= 1
        else:
            self.emitted = emitted
        self.status = CallStatus(kind, why, len(self.programs), self.status.num_calls_off_schedule + 1 if kind == "left" else 0)

    def start_trace(self, device: torch.device, total_collective_wait_s: Callable[[], float]) -> Trace:
        """Measure later calls that follow a schedule. ``total_collective_wait_s``: as for :class:`OpProfiler`."""
        self.profiler = OpProfiler(device, total_collective_wait_s)
        return self.profiler.trace

    def stop_trace(self) -> None:
        """Measure no more calls."""
        self.profiler = None

    def record_next_called(self, following: "FunctionRecord") -> None:
        """Record which function was called next. If another function is next, a step gathers nothing for the next step."""
        self.next_called = weakref.ref(following)

    def restart_label_numbering(self) -> None:
        """Restart the count of calls in labels from 0."""
        self.num_calls = 0

    def nodes_at_recorded_positions(self, args: Any) -> dict[str, Sharded]:
        """Return, by unit, the nodes (``Sharded``) at the positions among the arguments that earlier calls have recorded."""
        self.nodes, self._index_by_memory = units_of(args), {}
        return {key: self.nodes[i] for key, i in self._positions.items() if i < len(self.nodes)}

    def record_argument_position(self, key: str, node: Sharded) -> None:
        """Record the position of a unit's node among the arguments of the call under way, if it is an argument."""
        if not self._index_by_memory:
            self._index_by_memory = {memory_key(each): i for i, each in reversed([*enumerate(self.nodes)])}
        if (i := self._index_by_memory.get(memory_key(node))) is not None:
            self._positions[key] = i


class FunctionRecords:
    """The records of all functions of one scheduler, by weak references."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[FunctionRecord] = weakref.WeakSet()
        self._names: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()  # by name, calls of all functions of this name
        self._last: Callable[[], FunctionRecord | None] = lambda: None

    def __iter__(self) -> Iterator[FunctionRecord]:
        return iter(self._alive)

    def add_function(self, name: str) -> FunctionRecord:
        """Return the record of a new function, with a unique name. All ranks have to wrap their functions in the same order."""
        self._names[name] += 1
        number = self._names[name]
        if number == 4 and self._calls[name] == 3:  # so no call could follow a schedule
            text = "and each was called once: if a loop wraps a function in each step, wrap it once, before the loop."
            warnings.warn(f"the scheduler got {number} functions with the name {name!r}, {text}", stacklevel=5)
        record = FunctionRecord(f"{name} ({number})" if number > 1 else name)
        self._alive.add(record)
        return record

    def record_last_called(self, record: FunctionRecord) -> None:
        """Record a call of the function of ``record``, also as the next call in the record of the function called before."""
        self._calls[record.name.partition(" (")[0]] += 1
        if (last := self._last()) is not None:
            last.record_next_called(record)
        self._last = weakref.ref(record)

    def reset_after_rank_restart(self) -> None:
        """Reset all records to the state of new records, for a new generation of the job (after restarts of ranks)."""
        self._last = lambda: None
        for record in self._alive:
            record.reset_after_rank_restart()

    def unbind_all_schedules(self) -> None:
        """Unbind all schedules, and remove the recorded order of calls."""
        self._last = lambda: None
        for record in self._alive:
            record.programs.bound.clear()
