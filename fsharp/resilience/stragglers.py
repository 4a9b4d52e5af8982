"""StragglerDetector: which rank keeps the others waiting."""

import logging
import math
import statistics
import struct
import time
from collections import deque
from typing import NamedTuple

from fsharp.errors import CommError, RunError
from fsharp.functional.comm.agree import gather_bytes
from fsharp.functional.comm.process_group import ProcessGroupComm
from fsharp.functional.comm.protocol import Comm, Labelled, innermost
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

_log = logging.getLogger("fsharp")
_KEPT = 1000
_MEDIAN_ERROR = 1.2533 * 1.4826  # standard error of a median to the median deviation over the root of the number, if normal


class StepTimes(NamedTuple):
    """The times of all ranks, which they have exchanged at a step.

    Attributes:
        own_s: by rank, the median over these steps of the seconds that the rank did not wait for others.
        error_s: by rank, the standard error of that, by how much its steps differ.
    """

    step: int
    own_s: tuple[float, ...]
    error_s: tuple[float, ...]


@options_checked
class StragglerDetector:
    """Compares each rank's own time in a step with that of the others.

    Ranks wait for each other in every step, so a step takes as long on all of them. A rank's *own* time is what is left of it
    without the time for which collectives kept its main thread: compute, loading of data, Python. Every few steps ranks
    exchange the median of theirs. One whose own time is more than ``ratio`` times the median of all, and by more than its
    steps differ anyway (two standard errors), twice in succession, is a straggler: rank 0 logs a warning. Simulated ranks take
    turns, and their own times are not told apart.

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

    Cost: every ``every`` steps one ``all_gather`` of 16 bytes for each axis.
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
        """Begin the first step now: what was before is not measured."""
        self._since = self._own_clock()
        self._own_s.clear()

    @api_boundary
    def end_step(self, step: int) -> None:
        """End a step, whose number is the same on all ranks, and begin the next one. Every rank has to call it."""
        now = self._own_clock()
        self._own_s.append(now - self._since)
        if len(self._own_s) == self.every:
            named = Labelled(self.comm, f"how long steps up to {step} took: ")
            own = statistics.median(self._own_s)
            error = _MEDIAN_ERROR * statistics.median(abs(x - own) for x in self._own_s) / math.sqrt(self.every)
            own_s, error_s = zip(*(struct.unpack("<dd", x) for x in gather_bytes(struct.pack("<dd", own, error), named)))
            self._compare(StepTimes(step, own_s, error_s))
            self._own_s.clear()
        self._since = self._own_clock()

    def _compare(self, times: StepTimes) -> None:
        usual = statistics.median_low(times.own_s)  # of two ranks the faster one: their mean would hide the other
        usual_error = times.error_s[times.own_s.index(usual)]
        slow = {
            rank: own / usual
            for rank, (own, error) in enumerate(zip(times.own_s, times.error_s, strict=True))
            if own > self.ratio * usual > 0 and own - usual > 2 * math.hypot(error, usual_error)
        }
        before, self._suspects = self._suspects, set(slow)
        known, self.stragglers = self.stragglers, {rank: times for rank, times in slow.items() if rank in before}
        self.times.append(times)
        for rank in sorted(self.stragglers.keys() - known.keys()) if self.comm.rank == 0 else ():
            _log.warning(
                "rank %d is a straggler: up to step %d a step takes it %.3g s of its own, %.2f times the median of all ranks",
                *(rank, times.step, times.own_s[rank], self.stragglers[rank]),
            )

    def _own_clock(self) -> float:
        """Return seconds that this rank has not waited."""
        return time.perf_counter() - (self._ranks.waited_s if self._ranks is not None else 0.0)
