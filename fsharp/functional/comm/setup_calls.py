"""SetupCalls: a record of the calls of a program's setup in which all ranks take part.

A restarted rank runs its program from the beginning. The other ranks do not run their programs again. So that the restarted
rank gets its answers, they make the recorded calls again, in the same order: they join the job, make process groups, compare
settings, and send what they sent. Afterwards all ranks have made the same calls in the new generation of the job, so numbers
and labels of collectives are equal.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_MOST_CALLS, _MOST_NBYTES = 10_000, 256 << 20


class SetupCalls:
    """A record of calls, from :meth:`start_recording` to :meth:`end_recording`.

    Attributes:
        is_recording: whether the setup is under way.
        obstacle: what cannot be made again, for which the record was given up; empty if it was not.
    """

    def __init__(self) -> None:
        self.is_recording, self.obstacle = False, ""
        self._calls: list[Callable[[], Any]] = []
        self._depth, self._nbytes, self._thread = 0, 0, 0

    @property
    def is_next_call_recorded(self) -> bool:
        """Whether a call made now would be recorded: the setup is under way, and no recorded call is."""
        return self.is_recording and not self._depth

    def start_recording(self) -> None:
        """Begin to record the calls of this thread, unless the record has begun or has ended before."""
        if not self._thread:
            self.is_recording, self._thread = True, threading.get_ident()

    def end_recording(self) -> None:
        """End the record: the setup is over."""
        self.is_recording = False

    def discard_record(self, obstacle: str) -> None:
        """Discard the record, if the setup is under way. ``obstacle`` says what cannot be made again."""
        if self.is_recording:
            self.is_recording, self.obstacle = False, obstacle
            self._calls.clear()

    def run_and_record(self, call: Callable[[], T], repeat: Callable[[], Any] | None = None, *, nbytes: int = 0) -> T:
        """Make a call, and record it, unless it is part of a recorded call. Return its result.

        :meth:`repeat_calls` makes the call again; or ``repeat`` in place of it, which keeps ``nbytes`` bytes.
        """
        if not self.is_recording:
            return call()
        if threading.get_ident() != self._thread:
            self.discard_record("a collective of a thread, such as that of a save in the background,")
            return call()
        if self._depth:
            return call()
        self._nbytes += nbytes
        if self._nbytes > _MOST_NBYTES or len(self._calls) >= _MOST_CALLS:  # a program that never begins an elastic run
            self.discard_record(f"more than {_MOST_CALLS:,} calls, or {_MOST_NBYTES >> 20} MiB,")
            return call()
        self._calls.append(repeat or call)
        self._depth += 1
        try:
            return call()
        finally:
            self._depth -= 1

    def record_for_repeat(self, call: Callable[[], Any]) -> None:
        """Record a call that is not made now: :meth:`repeat_calls` makes it, at this point of the setup."""
        self.run_and_record(lambda: None, repeat=call)

    def record_obstacle(self, obstacle: str) -> None:
        """Discard the record, as ``obstacle`` cannot be made again, unless it is part of a recorded call."""
        if not self._depth:
            self.discard_record(obstacle)

    def repeat_calls(self) -> None:
        """Make all recorded calls again, in order."""
        for call in self._calls:
            call()


setup_calls = SetupCalls()
"""The calls of this process, recorded if a launcher would restart single ranks."""
