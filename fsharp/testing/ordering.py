"""Detection of data races between streams: vector clocks of the lanes, and the last accesses of every byte.

[Note: vector clocks] A lane is a stream. Each lane has a clock. The clock counts, for every lane, the ops that are sure to be
finished before this lane's next op begins. Ops of the lane itself count as soon as they are issued; ops of other lanes count
once the lane waits for them. Take two accesses to one byte, at least one of them a write. They are a race if the lane of the
later access has not counted the earlier access before.

Memory belongs to the lane that allocated it, as in torch's caching allocators. Once memory is freed, the next allocation of the
same lane may reuse it. The allocator orders this allocation only after ops of the lane itself, so the lane's clock has to have
counted the accesses of other lanes.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

Clock = dict[str, int]


class ByteSpan(NamedTuple):
    """A run of bytes of one storage, at the addresses ``[start, stop)``. ``base``: the address of the storage."""

    start: int
    stop: int
    base: int


@dataclass(frozen=True, slots=True, eq=False)  # two accesses of equal content are different accesses
class Access:
    """The bytes that one torch op reads and writes.

    ``during``: the work in which the op ran, in words for errors. ``allocates``: storages that the op allocated; earlier
    accesses to their addresses do not count.
    """

    lane: str
    op: str
    during: object
    reads: tuple[ByteSpan, ...] = ()
    writes: tuple[ByteSpan, ...] = ()
    allocates: tuple[ByteSpan, ...] = ()

    def __str__(self) -> str:
        return f"{self.op} on {self.lane}, {self.during}"


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """The record of an event on a lane, under the key by which a :class:`Wait` names it."""

    lane: str
    key: object


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of a lane for all earlier ops of the lane ``of``, or for the event with the key ``of``. ``why``: the reason."""

    lane: str
    of: object
    why: str

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True, slots=True)
class Free:
    """The release of a storage's memory. ``lane``: the lane that allocated it; None if the allocation was not logged."""

    lane: str | None
    span: ByteSpan


@dataclass(frozen=True, slots=True)
class RecordStreamCall:
    """A call of ``record_stream``: the storage at ``base`` is not reused before all ops so far on ``lane`` are finished."""

    lane: str
    base: int


LogEntry = Access | RecordEvent | Wait | Free | RecordStreamCall
Log = Sequence[LogEntry]


class Race(NamedTuple):
    """Two accesses to the same bytes that nothing orders; or an access that may still be under way when its memory is reused.

    Attributes:
        first: the access that came first in the log.
        second: the access that does not wait for ``first``; None if the memory was freed.
        span: the bytes.
        owner: if the memory was freed, name of the lane that allocated the memory and may reuse it.
    """

    first: Access
    second: Access | None
    span: ByteSpan
    owner: str = ""


class _NumberedAccess(NamedTuple):
    """An access, and its number among the accesses of its lane."""

    access: Access
    tick: int


class _LastAccesses(NamedTuple):
    """The last write to a run of bytes, and each lane's last read since this write."""

    write: _NumberedAccess | None
    reads: tuple[_NumberedAccess, ...]  # the last read of each lane since the write


class _ShadowMemory:
    """A map from bytes to their last write and the reads since then, as disjoint runs in order of address."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, _LastAccesses]] = []

    def take_entries(self, start: int, stop: int) -> list[tuple[int, int, _LastAccesses]]:
        """Remove the entries of the bytes ``[start, stop)``, and return them. The rest of an entry stays."""
        runs, i = self._runs, bisect_right(self._runs, start, key=itemgetter(0)) - 1
        if i < 0 or runs[i][1] <= start:
            i += 1
        j = i
        taken: list[tuple[int, int, _LastAccesses]] = []
        rest: list[tuple[int, int, _LastAccesses]] = []
        while j < len(runs) and runs[j][0] < stop:
            a, b, cell = runs[j]
            if a < start:
                rest.append((a, start, cell))
            if b > stop:
                rest.append((stop, b, cell))
            taken.append((max(a, start), min(b, stop), cell))
            j += 1
        runs[i:j] = rest
        return taken

    def fill_gap(self, runs: Sequence[tuple[int, int, _LastAccesses]]) -> None:
        """Insert entries, in order of address, for neighbouring runs of bytes that have no entry."""
        if runs:
            i = bisect_right(self._runs, runs[0][0], key=itemgetter(0))
            self._runs[i:i] = runs


class _RaceDetector:
    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {}
        self.marks: dict[object, Clock] = {}
        self.bytes = _ShadowMemory()
        # By storage and lane, the number of the last op for which the allocator waits, because of record_stream().
        self.recorded_streams: dict[tuple[int, str], int] = {}
        # By owner, accesses of other lanes to freed memory that the owner's clock had not counted.
        self.freed: dict[str, list[tuple[_NumberedAccess, ByteSpan]]] = {}
        self.races: dict[tuple[Access, Access | None], Race] = {}

    def clock(self, lane: str) -> Clock:
        return self.clocks.setdefault(lane, {})

    def wait(self, wait: Wait) -> bool:
        """Update the clock of the waiting lane. Return whether the wait orders work that was not ordered before."""
        other = self.clock(wait.of) if isinstance(wait.of, str) else self.marks.get(wait.of, {})
        mine, learned = self.clock(wait.lane), False
        for lane, tick in other.items():
            if lane != wait.lane and tick > mine.get(lane, 0):
                mine[lane], learned = tick, True
        return learned

    def access(self, access: Access) -> None:
        clock = self.clock(access.lane)
        clock[access.lane] = clock.get(access.lane, 0) + 1
        seen = _NumberedAccess(access, clock[access.lane])
        for span in access.allocates:
            self.bytes.take_entries(span.start, span.stop)
            self.recorded_streams = {key: tick for key, tick in self.recorded_streams.items() if key[0] != span.base}
        if access.allocates and self.freed.get(access.lane):
            self.record_reuse_races(access.lane)
        for span in access.reads:
            self.read(span, seen, clock)
        for span in access.writes:
            self.write(span, seen, clock)

    def read(self, span: ByteSpan, seen: _NumberedAccess, clock: Clock) -> None:
        runs: list[tuple[int, int, _LastAccesses]] = []
        at = span.start
        for a, b, (write, reads) in self.bytes.take_entries(span.start, span.stop):
            if write is not None:
                self.check_order(write, seen, clock, ByteSpan(a, b, span.base))
            if at < a:
                runs.append((at, a, _LastAccesses(None, (seen,))))
            others = tuple(each for each in reads if each.access.lane != seen.access.lane)
            runs.append((a, b, _LastAccesses(write, (*others, seen))))
            at = b
        if at < span.stop:
            runs.append((at, span.stop, _LastAccesses(None, (seen,))))
        self.bytes.fill_gap(runs)

    def write(self, span: ByteSpan, seen: _NumberedAccess, clock: Clock) -> None:
        for a, b, (write, reads) in self.bytes.take_entries(span.start, span.stop):
            for each in (*reads, *([write] if write is not None else ())):
                self.check_order(each, seen, clock, ByteSpan(a, b, span.base))
        self.bytes.fill_gap([(span.start, span.stop, _LastAccesses(seen, ()))])

    def check_order(self, earlier: _NumberedAccess, later: _NumberedAccess, clock: Clock, span: ByteSpan) -> None:
        if clock.get(earlier.access.lane, 0) < earlier.tick:
            self.record_race(Race(earlier.access, later.access, span))

    def record_race(self, race: Race) -> None:
        known = self.races.setdefault((race.first, race.second), race)
        if known is not race and known.span.base == race.span.base:
            span = ByteSpan(min(known.span.start, race.span.start), max(known.span.stop, race.span.stop), race.span.base)
            self.races[race.first, race.second] = race._replace(span=span)

    def free(self, free: Free) -> None:
        gone = self.bytes.take_entries(free.span.start, free.span.stop)
        if free.lane is None:
            return
        clock = self.clock(free.lane)
        for a, b, (write, reads) in gone:
            for each in (*reads, *([write] if write is not None else ())):
                known = max(clock.get(each.access.lane, 0), self.recorded_streams.get((free.span.base, each.access.lane), 0))
                if each.access.lane != free.lane and known < each.tick:
                    self.freed.setdefault(free.lane, []).append((each, ByteSpan(a, b, free.span.base)))

    def record_reuse_races(self, reusing_lane: str) -> None:
        """Record the races of an allocation on ``reusing_lane``, which may reuse memory that the lane has freed.

        Each access of another lane to such memory is a race, if the access may still be under way.
        """
        clock = self.clock(reusing_lane)
        for seen, span in self.freed.pop(reusing_lane, ()):
            if clock.get(seen.access.lane, 0) < seen.tick:
                self.record_race(Race(seen.access, None, span, reusing_lane))


class ReplayResult(NamedTuple):
    """The result of :func:`replay`.

    Attributes:
        races: the races, each pair of accesses once. In a pair at least one access is a write.
        useful_waits: indices, in the log, of the waits that added an order. The other waits added nothing in this replay.
    """

    races: list[Race]
    useful_waits: set[int]


def replay(log: Log, *, without: Collection[int] = ()) -> ReplayResult:
    """Replay ``log`` without the entries at the positions ``without``. Return races, and waits that added an order."""
    state, learned = _RaceDetector(), set()
    for i, entry in enumerate(log):
        if i in without:
            continue
        if isinstance(entry, Access):
            state.access(entry)
        elif isinstance(entry, Wait):
            if state.wait(entry):
                learned.add(i)
        elif isinstance(entry, RecordEvent):
            state.marks[entry.key] = dict(state.clock(entry.lane))
        elif isinstance(entry, RecordStreamCall):
            state.recorded_streams[entry.base, entry.lane] = state.clock(entry.lane).get(entry.lane, 0)
        else:
            state.free(entry)
    return ReplayResult(list(state.races.values()), learned)
