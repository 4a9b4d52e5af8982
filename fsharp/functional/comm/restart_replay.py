"""SetupCallRecord: a record of the collective calls that a program makes before its first step.

A restarted rank runs its program from the beginning. The other ranks do not run their programs again. But the restarted rank
needs their messages. So the other ranks make the recorded calls again, in the same order. They join the job, make process
groups, compare settings, and send the recorded data. Afterwards all ranks have made the same calls in the new generation of the
job, so numbers and labels of collectives are equal.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_MOST_CALLS, _MOST_NBYTES = 10_000, 256 << 20


class SetupCallRecord:
    """A record of the collective calls that this rank makes in the setup, before the first step of training.

    A restarted rank runs its program from the beginning. Meanwhile each other rank makes its recorded calls again, by
    :meth:`repeat_recorded_calls`. An abandoned record has no calls.

    Attributes:
        is_recording: whether calls are being recorded: in the setup, unless the record was abandoned.
        obstacle: text that names the call because of which the record was abandoned; empty if it was not abandoned.
    """

    def __init__(self) -> None:
        self.is_recording, self.obstacle = False, ""
        self._calls: list[Callable[[], Any]] = []
        self._depth, self._nbytes, self._thread = 0, 0, 0

    @property
    def would_record(self) -> bool:
        """Whether :meth:`record_and_call` would record a call now: ``is_recording``, and not inside of a recorded call."""
        return self.is_recording and not self._depth

    def start_recording(self) -> None:
        """Begin to record this thread's calls in which all ranks take part. A second call of this method does nothing."""
        if not self._thread:
            self.is_recording, self._thread = True, threading.get_ident()

    def end_recording(self) -> None:
        """Record no more calls, as the setup is over and steps begin. The record is kept for replays."""
        self.is_recording = False

    def _abandon_recording(self, obstacle: str) -> None:
        """Abandon the record of calls, if calls are being recorded. ``obstacle`` names the call that cannot be repeated."""
        if self.is_recording:
            self.is_recording, self.obstacle = False, obstacle
            self._calls.clear()

    def record_and_call(self, call: Callable[[], T], replay: Callable[[], Any] | None = None, *, nbytes: int = 0) -> T:
        """Return ``call()``, and record ``call`` for :meth:`repeat_recorded_calls`, unless this is inside of a recorded call.

        ``replay``: function that a replay calls in place of ``call``. ``nbytes``: bytes that ``replay`` keeps in memory. A call
        in another thread abandons the record, and so does a call beyond 10,000 calls or 256 MiB. Then nothing can be replayed.
        """
        if threading.get_ident() != self._thread:
            self._abandon_recording("a collective of a thread, such as that of a save in the background,")
        if not self.would_record:
            return call()
        self._nbytes += nbytes
        if self._nbytes > _MOST_NBYTES or len(self._calls) >= _MOST_CALLS:  # a program that never begins an elastic run
            self._abandon_recording(f"more than {_MOST_CALLS:,} calls, or {_MOST_NBYTES >> 20} MiB,")
            return call()
        self._calls.append(replay or call)
        self._depth += 1
        try:
            return call()
        finally:
            self._depth -= 1

    def record_replay_only_call(self, call: Callable[[], Any]) -> None:
        """Record ``call``, and do not call it now: :meth:`repeat_recorded_calls` calls it at this point of the setup."""
        self.record_and_call(lambda: None, replay=call)

    def abandon(self, obstacle: str) -> None:
        """Abandon the record of calls, as the call ``obstacle`` cannot be repeated. Does nothing inside of a recorded call."""
        if not self._depth:
            self._abandon_recording(obstacle)

    def repeat_recorded_calls(self) -> None:
        """Make all recorded calls again, in order; none if the record was abandoned."""
        for call in self._calls:
            call()


restart_replay = SetupCallRecord()
"""The calls of this process, recorded if a launcher would restart single ranks."""
