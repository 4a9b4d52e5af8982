"""StragglerDetector: find ranks that are slower than the others."""

import math
import statistics
import struct
import time
from collections import deque
from typing import NamedTuple

from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.errors import CommError, RunError, log as _log
from fsharp.functional.comm.agree import all_gather_fixed_size
from fsharp.functional.comm.protocol import Comm, LabelPrefixComm, innermost_comm
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

_MAX_STEPS_KEPT = 1000
_MEDIAN_ERROR = 1.2533 * 1.4826  # of n normal samples: the median's standard error, over (median deviation / sqrt(n))


class TimesByRank(NamedTuple):
    """Times of all ranks, from one exchange.

    Attributes:
        step: the number of finished steps, which ranks passed to :meth:`StragglerDetector.end_step`.
        own_s: for each rank, the median over the last steps of the seconds in which the rank did not wait.
        error_s: for each rank, the standard error of this median.
    """

    step: int
    own_s: tuple[float, ...]
    error_s: tuple[float, ...]


@options_checked
class StragglerDetector:
    """Find ranks that are slower than the others, by each rank's own time in a step.

    Ranks wait for each other in every step, so a step takes equally long on all ranks. The *own* time of a rank is the time of
    a step without waits for collectives: compute, data loading, Python. Every few steps ranks exchange the medians of their own
    times. A rank is slow if its median is more than ``ratio`` times the lower median of all ranks. The difference also has to
    be more than two of its standard errors. A rank that is slow in two exchanges in a row is a straggler, and rank 0 logs a
    warning. Waits of simulated ranks are not measured: the own time of such a rank is its whole step time.

    Args:
        comm: the ranks.
        every: number of steps between two exchanges; equal on all ranks.
        ratio: a rank is slow if its own time is more than ``ratio`` times the lower median; a number above 1.

    Attributes:
        times: the last 1,000 exchanges.
        stragglers: stragglers of the last exchange: a dict from rank to its own time, in multiples of the lower median.

    Raises:
        RunError: ``every`` is not a positive integer, or ``ratio`` is not above 1.
        CommError: the Comm is over NCCL, where the device waits, and not the process.

    Cost: every ``every`` steps one ``all_gather`` of 16 bytes for each axis.
    """

    def __init__(self, comm: Comm, *, every: int = 10, ratio: float = 1.25) -> None:
        if type(every) is not int or every < 1:
            raise RunError(f"StragglerDetector(): every is {every!r}, expected an integer of at least 1.")
        if not ratio > 1:
            raise RunError(f"StragglerDetector(): ratio is {ratio!r}, expected a number above 1.")
        found = innermost_comm(comm)
        if isinstance(found, ProcessGroupComm) and found.is_nccl:
            raise CommError("StragglerDetector(): over NCCL devices wait for other ranks, and processes do not. Expected gloo.")
        self._waits_of = found if isinstance(found, ProcessGroupComm) else None
        self.comm, self.every, self.ratio = comm, every, ratio
        self.times: deque[TimesByRank] = deque(maxlen=_MAX_STEPS_KEPT)
        self.stragglers: dict[int, float] = {}
        self._suspects: set[int] = set()
        self._own_s: list[float] = []
        self.start()

    def start(self) -> None:
        """Begin to measure a step now. Steps since the last exchange no longer count."""
        self._since = self._clock_without_waits()
        self._own_s.clear()

    @api_boundary
    def end_step(self, step: int) -> None:
        """End a step, and begin the next one. All ranks have to call this method. ``step``: the number of finished steps."""
        now = self._clock_without_waits()
        self._own_s.append(now - self._since)
        if len(self._own_s) == self.every:
            named = LabelPrefixComm(self.comm, f"how long steps up to {step} took: ")
            own = statistics.median(self._own_s)
            error = _MEDIAN_ERROR * statistics.median(abs(x - own) for x in self._own_s) / math.sqrt(self.every)
            sent = all_gather_fixed_size(struct.pack("<dd", own, error), named)
            own_s, error_s = zip(*(struct.unpack("<dd", x) for x in sent))
            self._update_stragglers(TimesByRank(step, own_s, error_s))
            self._own_s.clear()
        self._since = self._clock_without_waits()

    def _update_stragglers(self, times: TimesByRank) -> None:
        usual = statistics.median_low(times.own_s)  # of two ranks the faster one, as a mean of both would hide the slow one
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
                "rank %d is a straggler: up to step %d a step takes it %.3g s of its own, %.2f times the lower median of ranks",
                *(rank, times.step, times.own_s[rank], self.stragglers[rank]),
            )

    def _clock_without_waits(self) -> float:
        return time.perf_counter() - (self._waits_of.watch.statuses.waited_s if self._waits_of is not None else 0.0)
