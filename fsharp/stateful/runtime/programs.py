"""Programs: the orders of events that a function has shown, by what they are, and which of them is expected next."""

from collections.abc import Callable

from fsharp.stateful.runtime.compiled import Compiled
from fsharp.stateful.schedule.program import Program
from fsharp.stateful.schedule.schedule import Schedule

_MOST_SEEN = 256
"""Programs that are remembered without a schedule."""
_MOST_COMPILED = 16
"""Schedules that are kept, each with views of the arena."""
_GIVE_UP_AFTER = 3
"""Calls in a row that have left their schedule; the next ones follow none, until an order comes again."""


class Programs:
    """What is known of one function.

    A program that is new is compiled, but after several calls in a row that have left their schedule only when it comes again:
    a function that is different each time is not compiled each time. The next call is expected to be what followed the last two
    programs when they came the last time, or the last one again.

    Attributes:
        bound: schedules with memory, of the arena that there is.
        num_recordings: calls that have followed no schedule to their end.
        num_failed: calls in a row that have left their schedule.
    """

    def __init__(self) -> None:
        self._schedules: dict[Program, Schedule] = {}
        self._seen: dict[Program, None] = {}
        self._after: dict[tuple[Program | None, Program | None], Program] = {}
        self._last_two: tuple[Program | None, Program | None] = (None, None)
        self._is_steady = False  # whether the last program is expected to follow itself
        self._pinned: Schedule | None = None
        self.bound: dict[int, Compiled] = {}
        self.num_recordings = self.num_failed = 0

    def __len__(self) -> int:
        return len(self._schedules)

    @property
    def schedules(self) -> list[Schedule]:
        """All that have been compiled."""
        return [*self._schedules.values(), *([self._pinned] if self._pinned is not None else [])]

    @property
    def expected(self) -> Schedule | None:
        """What the next call is expected to be; None if there is no telling."""
        if self._pinned is not None:
            return self._pinned
        last = self._last_two[1]
        if self._is_steady and last is not None:
            return self._schedules.get(last)
        following = self._after.get(self._last_two)
        if following is not None and following in self._schedules:
            return self._schedules[following]
        return self._schedules.get(last) if last is not None and self.num_failed < _GIVE_UP_AFTER else None

    @property
    def is_pinned(self) -> bool:
        """Whether somebody has said what to follow."""
        return self._pinned is not None

    def pin(self, schedule: Schedule) -> None:
        """Follow this one from here on, up to a call that leaves it."""
        self._pinned = schedule
        self.bound.clear()

    def went(self, program: Program) -> None:
        """A call has followed its schedule to the end."""
        self._note(program)
        self.num_failed = 0

    def recorded(self, program: Program, compile_: Callable[[Program], Schedule | None], *, left: bool) -> None:
        """A call has not.

        Args:
            program: of the call.
            compile_: makes its schedule; None if there is none.
            left: it has begun with a schedule.
        """
        self._pinned = None
        self.num_recordings += 1
        self.num_failed = self.num_failed + 1 if left else self.num_failed
        if program not in self._schedules and (program in self._seen or self.num_failed < _GIVE_UP_AFTER):
            while len(self._schedules) >= _MOST_COMPILED:
                old = self._schedules.pop(next(iter(self._schedules)))
                self.bound.pop(id(old), None)
            if (schedule := compile_(program)) is not None:
                self._schedules[program] = schedule
        elif program in self._schedules:
            self._schedules[program] = self._schedules.pop(program)  # the latest
        self._seen[program] = None
        while len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        self._note(program)

    def _note(self, program: Program) -> None:
        if program is self._last_two[1] and self._is_steady:
            return
        self._after[self._last_two] = program
        while len(self._after) > _MOST_SEEN:
            del self._after[next(iter(self._after))]
        self._last_two = self._last_two[1], program
        self._is_steady = self._after.get((program, program)) is program
