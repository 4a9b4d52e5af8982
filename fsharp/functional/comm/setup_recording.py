"""SetupRecording: a record of the calls of a program's setup in which all ranks take part.

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


class SetupRecording:
    """A record of calls, from :meth:`start` to :meth:`end`.

    Attributes:
        is_recording: whether the setup is under way.
        obstacle: what cannot be made again, for which the record was given up; empty if it was not.
    """

    def __init__(self) -> None:
        self.is_recording, self.obstacle = False, ""
        self._calls: list[Callable[[], Any]] = []
        self._depth, self._nbytes, self._thread = 0, 0, 0

    @property
    def would_record(self) -> bool:
        """Whether a call made now would be recorded: the setup is under way, and no recorded call is."""
        return self.is_recording and not self._depth

    def start(self) -> None:
        """Begin to record the calls of this thread, unless the record has begun or has ended before."""
        if not self._thread:
            self.is_recording, self._thread = True, threading.get_ident()

    def end(self) -> None:
        """End the record: the setup is over."""
        self.is_recording = False

    def _discard(self, obstacle: str) -> None:
        """Discard the record, if the setup is under way. ``obstacle`` says what cannot be made again."""
        if self.is_recording:
            self.is_recording, self.obstacle = False, obstacle
            self._calls.clear()

    def run_and_record(self, call: Callable[[], T], replay: Callable[[], Any] | None = None, *, nbytes: int = 0) -> T:
        """Make a call, and record it, unless it is part of a recorded call. Return its result.

        :meth:`replay` makes the call again; or ``replay`` in place of it, which keeps ``nbytes`` bytes.
        """
        if not self.is_recording:
            return call()
        if threading.get_ident() != self._thread:
            self._discard("a collective of a thread, such as that of a save in the background,")
            return call()
        if self._depth:
            return call()
        self._nbytes += nbytes
        if self._nbytes > _MOST_NBYTES or len(self._calls) >= _MOST_CALLS:  # a program that never begins an elastic run
            self._discard(f"more than {_MOST_CALLS:,} calls, or {_MOST_NBYTES >> 20} MiB,")
            return call()
        self._calls.append(replay or call)
        self._depth += 1
        try:
            return call()
        finally:
            self._depth -= 1

    def record_for_replay(self, call: Callable[[], Any]) -> None:
        """Record a call that is not made now: :meth:`replay` makes it, at this point of the setup."""
        self.run_and_record(lambda: None, replay=call)

    def give_up(self, obstacle: str) -> None:
        """Discard the record, as ``obstacle`` cannot be made again, unless it is part of a recorded call."""
        if not self._depth:
            self._discard(obstacle)

    def replay(self) -> None:
        """Make all recorded calls again, in order."""
        for call in self._calls:
            call()


setup_recording = SetupRecording()
"""The calls of this process, recorded if a launcher would restart single ranks."""
