"""Timeline: when each op of a step ran, predicted or measured; exposed communication, overlap and memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from fsharp.functional.layout.text import NOTEBOOK_HTML_BY_CLASS
from fsharp.stateful.schedule.ops import STREAMS, Phase, Stream, kinds_where
from fsharp.stateful.schedule.schedule import Schedule, buffer_lifetimes

WAITING, *_ = kinds_where(lambda spec: bool(spec.joins))
"""The kind of a span in which the compute stream waits, whatever the kind of its op."""


class TimeSpan(NamedTuple):
    """A span of time in which an op ran, or in which the compute stream waited for it. An op may have several spans.

    Attributes:
        op: position of the op in the schedule.
        kind: kind of the op; or :data:`WAITING`, if the compute stream waited for the op.
        unit: unit of the op.
        phase: phase of the op.
        stream: stream of the span; ``compute`` for a wait. On a synchronous host all ops but collectives run on ``compute``.
        start_s: start, in seconds from the beginning of the step.
        stop_s: end, in seconds from the beginning of the step. An op for which the next step waits may end after ``step_s``.
    """

    op: int
    kind: str
    unit: str
    phase: Phase
    stream: Stream
    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """Length of the span in seconds."""
        return self.stop_s - self.start_s


Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times at which the ops of a step ran, measured or predicted. All steps are taken to have the same times.

    Attributes:
        schedule: the schedule that the step follows.
        spans: when each op ran, in order of the starts.
        step_s: seconds from the beginning of a step to the beginning of the next step.
    """

    schedule: Schedule
    spans: tuple[TimeSpan, ...]
    step_s: float

    @property
    def exposed_s(self) -> float:
        """Seconds in which the compute stream waits, for collectives or for copies of host memory."""
        return sum((span.seconds for span in self.spans if span.kind == WAITING), 0.0)

    @property
    def overlap(self) -> float:
        """Fraction of the collectives' time, added over streams, in which the compute stream works; 1 without collectives."""
        computing = [span for span in self.spans if span.stream == "compute" and span.kind != WAITING]
        working = union_of_intervals(piece for span in computing for piece in self.wrap_span_into_step(span))
        total, hidden, kinds_that_send = 0.0, 0.0, kinds_with_collectives()
        for stream in STREAMS:
            sent = [s for s in self.spans if s.stream == stream and s.kind in kinds_that_send]
            sending = union_of_intervals(piece for span in sent for piece in self.wrap_span_into_step(span))
            total += total_length(sending)
            hidden += total_length(sending) + total_length(working) - total_length(union_of_intervals([*sending, *working]))
        return min(max(hidden / total, 0.0), 1.0) if total else 1.0

    @property
    def memory(self) -> tuple[tuple[float, int], ...]:
        """Pairs ``(second, live bytes of the arena from this second on)``, from 0 to the end of the step."""
        starts, stops = self._op_starts_and_stops()
        changes: list[tuple[float, int]] = [(0.0, 0)]
        for fill, free, nbytes in buffer_lifetimes(self.schedule.ops):
            since = starts[fill] if fill is not None else 0.0
            if since < self.step_s:
                changes.append((since, nbytes))
                if free is not None:
                    changes.append((min(stops[free], self.step_s), -nbytes))
        curve, live = [], 0
        for second, now in groupby(sorted(changes), key=lambda change: change[0]):
            live += sum(nbytes for _, nbytes in now)
            curve.append((second, live))
        return tuple(curve)

    @property
    def peak_nbytes(self) -> int:
        """The largest number of bytes of the arena that are in use at one time."""
        return max(nbytes for _, nbytes in self.memory)

    def seconds(self, *kinds: str, unit: str | None = None, phase: Phase | None = None) -> float:
        """Return the seconds of all spans of ``kinds``, in ``unit`` and ``phase`` if given.

        The collective of a bucket counts once.
        """
        chosen = [s for s in self.spans if s.kind in kinds and unit in (None, s.unit) and phase in (None, s.phase)]
        if unit is not None:
            return sum((span.seconds for span in chosen), 0.0)
        return sum(stop - start for _, start, stop in {(s.stream, s.start_s, s.stop_s) for s in chosen})

    def wrap_span_into_step(self, span: TimeSpan) -> Iterator[Interval]:
        """Yield the intervals of a span within a step. Of a span 8 to 12 in steps of 10 seconds: ``(8, 10)`` and ``(0, 2)``."""
        start, stop = span.start_s, span.stop_s
        if stop <= self.step_s or self.step_s <= 0:
            yield start, stop
            return
        while stop > 0:
            if start < self.step_s:
                yield max(start, 0.0), min(stop, self.step_s)
            start, stop = start - self.step_s, stop - self.step_s

    def _repr_html_(self) -> str:
        return NOTEBOOK_HTML_BY_CLASS[Timeline](self)

    def _op_starts_and_stops(self) -> tuple[list[float], list[float]]:
        """Return each op's first start, and its last stop. Without spans both are the stop of the op before on its stream."""
        own: dict[int, list[TimeSpan]] = {}
        for span in self.spans:
            if span.op >= 0 and (span.kind != WAITING or self.schedule.ops[span.op].spec.joins):
                own.setdefault(span.op, []).append(span)
        starts, stops = [], []
        last: dict[Stream, float] = dict.fromkeys(STREAMS, 0.0)
        for i, op in enumerate(self.schedule.ops):
            if i in own:
                starts.append(min(span.start_s for span in own[i]))
                last[op.stream] = max(span.stop_s for span in own[i])
            else:
                starts.append(last[op.stream])
            stops.append(last[op.stream])
        return starts, stops


def kinds_with_collectives() -> tuple[str, ...]:
    """Return the kinds of ops that call collectives."""
    return kinds_where(lambda spec: spec.cost == "send")


def union_of_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals, in order."""
    result: list[Interval] = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        else:
            result.append((start, stop))
    return result


def total_length(disjoint: Iterable[Interval]) -> float:
    """Return the sum of the lengths of disjoint intervals."""
    return sum(stop - start for start, stop in disjoint)
