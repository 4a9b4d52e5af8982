"""StragglerDetector: which rank keeps the others waiting."""

import logging
import statistics
import struct
import time
from collections import deque
from typing import NamedTuple

from fsharp.errors import CommError, RunError
from fsharp.functional.comm.agree import gather_bytes
from fsharp.functional.comm.process_group import ProcessGroupComm
from fsharp.functional.comm.protocol import Comm, Labelled, innermost

_log = logging.getLogger("fsharp")
_KEPT = 1000


class StepTimes(NamedTuple):
    """What ranks have told each other.

    Attributes:
        step: the last one of those measured.
        own_s: by rank, the median over these steps of the seconds that the rank did not wait for others.
    """

    step: int
    own_s: tuple[float, ...]


class StragglerDetector:
    """Compares each rank's own time in a step with that of the others.

    Ranks wait for each other in every step, so a step takes as long on all of them. A rank's *own* time is what is left of it
    without the time for which collectives kept its main thread: compute, loading of data, Python. Every few steps ranks
    exchange the median of theirs. One whose own time is more than ``ratio`` times the median of all, twice in succession, is
    a straggler: rank 0 logs a warning. Simulated ranks take turns, and their own times are not told apart.

    Args:
        comm: the ranks.
        every: steps between two exchanges; the same on all ranks.
        ratio: how much slower than the median.

    Attributes:
        times: the last 1,000 exchanges.
        stragglers: those of the last one: by rank, how many times the median its own time is.

    Raises:
        RunError: ``every`` is not a positive integer, or ``ratio`` not above 1.
        CommError: over NCCL, where it is the device that waits, and not the process.

    Cost: every ``every`` steps one ``all_gather`` of 8 bytes for each axis.
    """

    def __init__(self, comm: Comm, *, every: int = 10, ratio: float = 1.25) -> None:
        if type(every) is not int or every < 1:
            raise RunError(f"StragglerDetector(): every is {every!r}, expected an integer of at least 1.")
        if not ratio > 1:
            raise RunError(f"StragglerDetector(): ratio is {ratio!r}, expected a number above 1.")
        found = innermost(comm)
        if isinstance(found, ProcessGroupComm) and found.is_native:
            raise CommError("StragglerDetector(): over NCCL processes do not wait for each other, devices do: it needs gloo.")
        self._ranks = found.watch.ranks if isinstance(found, ProcessGroupComm) else None
        self.comm, self.every, self.ratio = comm, every, ratio
        self.times: deque[StepTimes] = deque(maxlen=_KEPT)
        self.stragglers: dict[int, float] = {}
        self._suspects: set[int] = set()
        self._own_s: list[float] = []
        self.start()

    def start(self) -> None:
        """The first step begins now: what was before it is not measured."""
        self._since = self._own_clock()
        self._own_s.clear()

    def end_step(self, step: int) -> None:
        """A step has ended, and the next one begins. Every rank has to call it.

        Args:
            step: its number, the same on all ranks.
        """
        now = self._own_clock()
        self._own_s.append(now - self._since)
        if len(self._own_s) == self.every:
            named = Labelled(self.comm, f"how long steps up to {step} took: ")
            told = gather_bytes(struct.pack("<d", statistics.median(self._own_s)), named)
            self._compare(StepTimes(step, tuple(struct.unpack("<d", each)[0] for each in told)))
            self._own_s.clear()
        self._since = self._own_clock()

    def _compare(self, times: StepTimes) -> None:
        usual = statistics.median_low(times.own_s)  # of two ranks the faster one: their mean would hide the other
        slow = {rank: own / usual for rank, own in enumerate(times.own_s) if own > self.ratio * usual > 0}
        before, self._suspects = self._suspects, set(slow)
        known, self.stragglers = self.stragglers, {rank: times for rank, times in slow.items() if rank in before}
        self.times.append(times)
        for rank in sorted(self.stragglers.keys() - known.keys()) if self.comm.rank == 0 else ():
            _log.warning(
                "rank %d is a straggler: up to step %d a step takes it %.3g s of its own, %.2f times the median of all ranks",
                *(rank, times.step, times.own_s[rank], self.stragglers[rank]),
            )

    def _own_clock(self) -> float:
        """Seconds that this rank has not waited."""
        return time.perf_counter() - (self._ranks.waited_s if self._ranks is not None else 0.0)
