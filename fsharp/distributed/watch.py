"""CommWatch: detect that ranks are in different collectives, or that a rank has failed, stopped or died.

Each collective has a *label*, which says its purpose, and a number, which all ranks count alike. Both are in the tag of its
messages, so ranks with different labels receive no message from each other. A rank that has waited for half a second writes its
last labels on a board, and reads the labels of other ranks there. If a label differs, all ranks raise an error with both orders
of labels. If a rank has left the job, all other ranks raise an error. If ranks are late, the rank waits on, up to a limit.
"""

import json
import os
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakMethod, WeakValueDictionary

from fsharp.distributed import generations
from fsharp.errors import AgreementError, CommError, log as _log, problem
from fsharp.functional.comm.agree import ranks_text
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.functional.comm.settings_digests import differing_settings_rows, settings_texts_by_digest
from fsharp.tracebacks import traceback_text

_MAX_KEPT_LABELS = 64
_MAX_KEPT_WATCHES = 100
_MAX_LABELS_WITH_SETTINGS = 8
_NUM_LABELS_AROUND = 2
"""Number of labels that an error shows before and after a difference."""
_MAX_STATUSES_READ_AT_ONCE = 16
_MAX_STATUS_CHARACTERS = 1 << 20
"""Most statuses that a waiting rank reads at once; of a large mesh it reads other statuses each time."""
_STATUS_EXPIRES_AFTER_S = 2.0
_WARN_AFTER_S = 10.0
_MAX_TRACEBACK_CHARACTERS = 4000
"""Most characters of a traceback in an error."""
_HOW_TO_GO_ON = (
    "This Comm makes no collectives after this error. To go on, call fs.destroy() on all ranks and connect again, or restart "
    "the job."
)
_FAILED_KEY = "failed"
"""The key, on a Comm's board, of the error after which this Comm cannot be used."""
_ALL_FAILED_KEY = "all failed"
"""The key of an error after which no Comm of some ranks can be used."""


class StatusBoard(Protocol):
    """A store of texts by key that all ranks read and write. A method never fails, and waits for at most some seconds."""

    why_no_answer: str
    """Why the last query has no answer; empty if there is an answer."""

    def write(self, key: str, text: str) -> None:
        """Replace the text of a key."""

    def read(self, key: str) -> str | None:
        """Return the text of a key; None if the key has no text."""

    def write_if_absent(self, key: str, text: str) -> str:
        """Write ``text`` if the key has no text. Return the key's text afterwards: ``text``, or that of an earlier write."""


class WatchedCall:
    """One collective of a :class:`CommWatch`, in which this rank takes part.

    Attributes:
        label: what the collective is for.
        number: position of the collective among those of the watch, from 0; equal on all ranks.
        tag: tag of the collective's messages, 31 bits.
        peer: the rank whose message this rank waits for; None if this rank waits for no message.
        blocked: statuses of ranks that may be in a deadlock with this rank. Such a rank waits for this rank in a collective of
            another Comm, while this rank waits for it here. Keys: pairs of its rank and the name of the other Comm's watch.
    """

    __slots__ = ("_since", "_warned", "_watch", "blocked", "label", "number", "peer", "tag")

    def __init__(self, watch: "CommWatch", label: str, number: int) -> None:
        self._watch, self.label, self.number = watch, label, number
        self.tag = zlib.crc32(f"{watch.name} {number} {label}".encode()) & 0x7FFFFFFF or 1
        self.peer: int | None = None
        self.blocked: dict[tuple[int, str], RankStatus] = {}
        self._since: float | None = None
        self._warned = False

    def set_awaited_rank(self, rank: int) -> None:
        """Record that this rank waits for a message of rank ``rank``."""
        self.peer = rank

    def check_failure_or_timeout(self) -> None:
        """Raise the error of :meth:`CommWatch.raise_or_describe_late_ranks`, or a CommError after the time limit.

        After half of the limit, and after ten seconds at the latest, log a warning once.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        waited_s = now - self._since
        late = self._watch.raise_or_describe_late_ranks(self)
        if waited_s > self._watch.limit_s:
            peer = "" if self.peer is None else f" for rank {self.peer}"
            who = self._watch.statuses.who
            text = f"{who} waited {self._watch.limit_s:g} s{peer} in {self.label!r}; {late}"
            raise self._watch.refuse_calls_on_all_ranks(CommError, text)
        if not self._warned and waited_s > min(_WARN_AFTER_S, self._watch.limit_s / 2):
            self._warned = True
            _log.warning("rank %d has waited %.0f s in %r; %s", self._watch.statuses.rank, waited_s, self.label, late)

    def add_to_total_waited_s(self, seconds: float) -> None:
        """Add seconds for which the main thread has waited for the collective."""
        self._watch.statuses.add_to_total_waited_s(seconds)

    def report_connection_error(self, error: BaseException) -> Exception:
        """Return the error that the caller raises after ``error`` has ended the collective, as when a connection breaks.

        For up to a second, read the statuses of other ranks. If a status explains the failure, the result is an error with
        this explanation; else a CommError with the text of ``error``. Afterwards the Comm refuses collectives, on all ranks.
        """
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            try:
                late = self._watch.raise_or_describe_late_ranks(self, is_connection_lost=True)
            except (AgreementError, CommError) as known:
                return known
            time.sleep(0.05)
        what = f"could not exchange data with rank {self.peer} in {self.label!r}: {error}; {late}"
        text = f"{self._watch.statuses.who} {what}. Has a process ended or stopped, or is a host out of reach?"
        return self._watch.refuse_calls_on_all_ranks(CommError, text)


class StatusExchange:
    """The statuses (:class:`RankStatus`) that ranks write for each other on ``board``. All Comms of these ranks share one.

    Attributes:
        waited_s: seconds for which this process's main thread has waited for collectives.
        last: the label of the last collective that this rank's main thread has begun.
        who: this rank in words for an error: ``rank 0 of 4``.
        error: the error after which no Comm of these ranks can be used; None if this rank has reported none.
        process: id of the process that is this rank. A process that is forked from it has another id.
    """

    def __init__(self, rank: int, size: int, board: StatusBoard) -> None:
        self.rank, self.size, self.board = rank, size, board
        self.who = f"rank {rank} of {size}"
        self.watches: WeakValueDictionary[str, CommWatch] = WeakValueDictionary()
        self.seen: dict[int, RankStatus] = {}
        self.last, self.waited_s = "", 0.0
        self.error: Exception | None = None
        self.process = os.getpid()
        self._num_written = 0
        self._heard_s: dict[int, float] = {}  # time of the newest status of a rank
        self._begun: dict[str, int] = {}  # by name of a watch, a closed one included: other ranks may still wait

    def write_status_and_read_others(self, status: "RankStatus", peer: int | None) -> list[int]:
        """Write ``status`` of this rank, and read the statuses of ``peer`` and of up to 16 other ranks into ``self.seen``.

        Return the ranks whose statuses were read. Each call reads the next ranks, so that all ranks have their turn.
        """
        self._write_status(status)
        others = [rank for rank in range(self.size) if rank != self.rank]
        chosen = {
            others[(self._num_written * _MAX_STATUSES_READ_AT_ONCE + i) % len(others)]
            for i in range(min(_MAX_STATUSES_READ_AT_ONCE, len(others)))
        }
        chosen |= set() if peer is None else {peer}
        found = {rank: text for rank in chosen if (text := self.board.read(f"rank {rank}")) is not None}
        for rank, text in found.items():
            status, before = RankStatus(*json.loads(text)), self.seen.get(rank)
            if before is None or before.num_written != status.num_written:
                self._heard_s[rank] = time.monotonic()
            self.seen[rank] = status
        return list(found)

    def is_waiting(self, rank: int) -> bool:
        """Return whether a rank waits in a collective: its last status is less than two seconds old."""
        return time.monotonic() - self._heard_s.get(rank, -_STATUS_EXPIRES_AFTER_S) < _STATUS_EXPIRES_AFTER_S

    def write_last_status(self, error: BaseException | None) -> None:
        """Write the last status of this rank, which leaves the job with ``error`` or normally. Ranks that wait read it."""
        why = f"its last collective was {self.last!r}" if self.last else "after no collective yet"
        if error is not None:
            why += f", and it left with the error below.\n{traceback_text(error)[-_MAX_TRACEBACK_CHARACTERS:]}"
        self._write_status(RankStatus(0, "", 0, [], self.num_begun_calls_by_watch(), why))

    def report_failure(self, error: BaseException, where: str) -> None:
        """Tell other ranks that ``error`` was raised here, in ``where``. All Comms of these ranks then refuse collectives."""
        if self.error is None:
            text = self.own_failure_text(error, where, self.last)
            self.error = AgreementError(self.board.write_if_absent(_ALL_FAILED_KEY, text))
        for watch in list(self.watches.values()):
            watch.report_failure(error, where)

    def refuse_calls_of_child(self) -> None:
        """Let all Comms of these ranks refuse collectives in this process, which was forked from a rank."""
        self.error = CommError(
            f"process {os.getpid()} was forked from process {self.process}, {self.who}, and is no rank: it cannot call "
            "collectives, whose connections and threads belong to the rank. Call them in the rank's own process."
        )
        for watch in list(self.watches.values()):
            watch.refuse_calls(self.error)

    def add_to_total_waited_s(self, seconds: float) -> None:
        """Add seconds for which the main thread has waited for a collective."""
        self.waited_s += seconds

    def own_failure_text(self, error: BaseException, where: str, last: str) -> str:
        """Return the error for other ranks: this rank failed in ``where``, after the collective ``last``, with a traceback."""
        trace = traceback_text(error)[-_MAX_TRACEBACK_CHARACTERS:]
        return f"{self.who} failed in {where}, after {last or 'no collective yet'!r}; it says:\n{trace}"

    def watch_names_of_other_threads(self, waiting: "CommWatch") -> list[str]:
        """Return the names of the watches whose collectives other threads of this rank will call, while this thread waits.

        ``waiting``: the watch in which this thread waits. If this thread runs a background job, such as a save, only other
        threads with such jobs count.
        """
        here, watches = threading.current_thread(), list(self.watches.items())
        return [
            name
            for name, watch in watches
            if watch.has_job or (not waiting.has_job and watch.thread not in (None, here) and watch.thread.is_alive())
        ]

    def num_begun_calls_by_watch(self) -> dict[str, int]:
        """Return the number of collectives that this rank has begun, by name of their watch."""
        return self._begun | {name: watch.count for name, watch in list(self.watches.items())}

    def record_last_begun_call(self, name: str, count: int, label: str, thread: threading.Thread) -> None:
        """Record that the watch ``name`` has begun ``count`` collectives.

        ``thread`` has begun the last one, with the label ``label``.
        """
        if thread is threading.main_thread():  # not a save in the background
            self.last = label
        self._begun.pop(name, None)
        self._begun[name] = count
        if len(self._begun) > _MAX_KEPT_WATCHES:
            self._begun.pop(next(iter(list(self._begun))), None)

    def _write_status(self, status: "RankStatus") -> None:
        self._num_written += 1
        text, short = (
            json.dumps(each._replace(num_written=self._num_written)) for each in (status, status._replace(settings=None))
        )
        self.board.write(f"rank {self.rank}", text if len(text) <= _MAX_STATUS_CHARACTERS else short)  # the store would cut it


class RankStatus(NamedTuple):
    """A rank's status for other ranks: the collective in which the rank waits, or how it has left the job.

    Attributes:
        num_written: number of statuses that the rank has written; grows while the rank waits.
        watch: name of the :class:`CommWatch` of the collective in which the rank waits.
        number: number of this collective.
        labels: labels of the last collectives that the rank has begun in this watch.
        counts: number of collectives that the rank has begun, by name of a watch.
        departure: how the rank has left the job, such as after which collective; empty while the rank is in the job.
        settings: by digest, the text of the settings whose digests are in ``labels``; None without any, or if too long.
        elsewhere: names of watches whose collectives other threads of the rank will call.
    """

    num_written: int
    watch: str
    number: int
    labels: list[str]
    counts: dict[str, int]
    departure: str = ""
    settings: dict[str, str] | None = None
    elsewhere: Sequence[str] = ()


class CommWatch:
    """Watches the collectives of one Comm, for this rank. ``name`` is the same on all ranks.

    Attributes:
        board: the :class:`StatusBoard` on which ranks write and read the error of the Comm.
        limit_s: seconds that a rank waits for other ranks.
        error: the error that all further collectives raise; None until a collective has failed.
        aborts: methods that end all collectives under way.
        is_over: set when this rank leaves the job.
        last_outcomes: dict from the name of a worker to a weak reference to the outcome of the worker's last collective. A
            worker runs collectives in order, and keeps their outcomes alive.
        has_job: whether a separate thread runs a background job, such as a save, with this Comm. The thread will call the job's
            collectives even while the rank's main thread waits for other ranks.
        thread: the thread that has begun the last collective; None after the end of a background job, and if a thread of
            autograd has begun the collective.
    """

    def __init__(self, name: str, statuses: StatusExchange, board: StatusBoard, limit_s: float) -> None:
        self.name, self.statuses, self.board, self.limit_s = name, statuses, board, limit_s
        self.error = statuses.error
        self.aborts: list[WeakMethod[Callable[[], None]]] = []
        self.count = 0
        self.is_over = threading.Event()
        self.last_outcomes: dict[str, weakref.ref[Any]] = {}
        self.has_job = False
        self.thread: threading.Thread | None = None
        self._labels: deque[str] = deque(maxlen=_MAX_KEPT_LABELS)
        statuses.watches[name] = self

    @contextmanager
    def flag_background_job(self) -> Iterator[None]:
        """While the context is open, ``has_job`` is True."""
        self.has_job = True
        try:
            yield
        finally:
            self.has_job, self.thread = False, None

    def raise_if_failed(self) -> None:
        """Raise the Comm's error, if a collective has failed. The error then has a note that says how to go on."""
        if self.error is not None:
            if self.statuses.process == os.getpid() and _HOW_TO_GO_ON not in getattr(self.error, "__notes__", ()):
                self.error.add_note(_HOW_TO_GO_ON)
            raise self.error.with_traceback(None)  # without the frames of an earlier raise

    def raise_if_failed_on_any_rank(self) -> None:
        """Raise the Comm's error, if a collective has failed on this rank, or another rank has reported a failure."""
        if self.error is None and (failed := self._failure_text()) is not None:
            self._set_error_and_abort(AgreementError(failed))
        self.raise_if_failed()

    def refuse_calls(self, error: Exception) -> None:
        """Let all further collectives of the Comm raise ``error``."""
        self.error = error

    def abort_and_refuse_calls(self, error: Exception) -> None:
        """End all collectives under way on this rank with ``error``, and let all further collectives raise ``error``."""
        self.is_over.set()
        self._set_error_and_abort(error)

    def _failure_text(self) -> str | None:
        """Return why collectives cannot go on: the failure of another rank, or the end of the job's generation; else None."""
        for board, key in ((self.board, _FAILED_KEY), (self.statuses.board, _ALL_FAILED_KEY)):
            if (text := board.read(key)) is not None:
                return text
        return generations.why_generation_ended()

    def start_failure_monitor(self, every_s: float) -> None:
        """Start a thread that looks every ``every_s`` seconds whether another rank has failed, and ends collectives if so."""
        arguments = weakref.ref(self), self.is_over, every_s
        threading.Thread(target=_monitor_failures, args=arguments, name="fsharp failure monitor", daemon=True).start()

    def begin_call(self, label: str) -> WatchedCall:
        """Count a collective that this rank begins, and return its :class:`WatchedCall`."""
        self.raise_if_failed()
        if restart_replay.is_recording:
            restart_replay.abandon(f"the collective {label!r} of a step")
        call = WatchedCall(self, label, self.count)
        self.count += 1
        thread = threading.current_thread()
        self.thread = None if isinstance(thread, threading._DummyThread) else thread
        self.statuses.record_last_begun_call(self.name, self.count, label, thread)
        self._labels.append(label)
        return call

    def raise_or_describe_late_ranks(self, call: WatchedCall, *, is_connection_lost: bool = False) -> str:
        """Exchange statuses with other ranks. Return in words which ranks are late: which have not begun the call ``call``.

        Such a text is ``"rank 2 did not come to it"``, or ``"all ranks have come to it"``.

        Raises an AgreementError if another rank has failed, or takes part in another collective. Raises a CommError if a rank
        has left the job before it began ``call``; with ``is_connection_lost`` also if rank ``call.peer`` has left after it.
        """
        if self.error is not None:
            raise self.error
        failed = self._failure_text()
        if failed is not None:
            raise self._set_error_and_abort(AgreementError(failed))
        labels, counts = list(self._labels), self.statuses.num_begun_calls_by_watch()
        settings = settings_texts_by_digest(labels[-_MAX_LABELS_WITH_SETTINGS:])
        elsewhere = self.statuses.watch_names_of_other_threads(self)
        mine = RankStatus(0, self.name, call.number, labels, counts, settings=settings, elsewhere=elsewhere)
        read = self.statuses.write_status_and_read_others(mine, call.peer)
        for rank, status in list(self.statuses.seen.items()):  # other threads add ranks
            if status.departure and (not self._has_begun(call, rank) or (is_connection_lost and rank == call.peer)):
                raise self.refuse_calls_on_all_ranks(CommError, _departure_text(call, rank, status))
            if rank in read and not status.departure:
                self._check_same_collective(call, rank, status)
        late = [r for r in range(self.statuses.size) if r != self.statuses.rank and not self._has_begun(call, r)]
        if self.board.why_no_answer:
            return self.board.why_no_answer
        if not late:
            return "all ranks have come to it"
        waiting = [r for r in late if self.statuses.is_waiting(r)]
        known = [f"rank {r} waits in {self.statuses.seen[r].labels[-1]!r}" for r in waiting[:4]]
        silent = [r for r in late if r not in waiting] or late
        return f"{ranks_text(silent)} did not come to it" + (f", while {'; '.join(known)}" if known else "")

    def _has_begun(self, call: WatchedCall, rank: int) -> bool:
        status = self.statuses.seen.get(rank)
        return status is not None and status.counts.get(self.name, 0) > call.number

    def _check_same_collective(self, call: WatchedCall, rank: int, status: RankStatus) -> None:
        mine = _labels_by_number(self.count, list(self._labels))
        if status.watch == self.name:
            theirs = _labels_by_number(status.counts[self.name], status.labels)
            for number in sorted(mine.keys() & theirs.keys()):
                if mine[number] != theirs[number]:
                    known = settings_texts_by_digest([mine[number]]) | (status.settings or {})
                    text = _label_difference_text(number, {self.statuses.rank: mine, rank: theirs}, known)
                    raise self.refuse_calls_on_all_ranks(AgreementError, text)
            return
        waits_for_me = self.statuses.num_begun_calls_by_watch().get(status.watch, 0) <= status.number
        will_begin = status.watch in self.statuses.watch_names_of_other_threads(self) or self.name in status.elsewhere
        if not waits_for_me or self._has_begun(call, rank) or will_begin:
            call.blocked.pop((rank, status.watch), None)
            return
        before = call.blocked.setdefault((rank, status.watch), status)
        if before.number == status.number and before.num_written < status.num_written:  # still waits
            theirs = _labels_by_number(status.counts[status.watch], status.labels)
            text = _label_difference_text(None, {self.statuses.rank: mine, rank: theirs})
            if (there := self.statuses.watches.get(status.watch)) is not None:
                there.refuse_calls_on_all_ranks(AgreementError, text)  # the other rank waits in this watch
            raise self.refuse_calls_on_all_ranks(AgreementError, text)
        call.blocked[rank, status.watch] = status

    def refuse_calls_on_all_ranks(self, error_type: type[Exception], text: str) -> Exception:
        """Make this Comm refuse further collectives, on all ranks, and return the error for this rank to raise.

        If several ranks call this method, all ranks raise an error with the text of the first call.
        """
        first = self.board.write_if_absent(_FAILED_KEY, text)
        return self._set_error_and_abort(error_type(text) if first == text else AgreementError(first))

    def _set_error_and_abort(self, error: Exception) -> Exception:
        is_first, self.error = self.error is None, error
        for reference in self.aborts if is_first else ():
            if (abort := reference()) is not None:
                abort()
        return error

    def report_failure(self, error: BaseException, where: str) -> None:
        """Tell other ranks of ``error``, raised in ``where``, and refuse later collectives.

        Do nothing if ``error`` is the error with which this watch already refuses collectives.
        """
        if error is self.error:
            return
        known = self.error
        text = self.statuses.own_failure_text(error, where, self._labels[-1] if self._labels else "")
        self.refuse_calls_on_all_ranks(AgreementError, text)
        self.error = known or self.error  # calls that are refused already keep their error


def _monitor_failures(reference: "weakref.ref[CommWatch]", is_over: threading.Event, every_s: float) -> None:
    while not is_over.wait(every_s):
        watch = reference()
        if watch is None or watch.error is not None:
            return
        if (failed := watch._failure_text()) is not None:
            watch._set_error_and_abort(AgreementError(failed))
        del watch


def _departure_text(call: WatchedCall, rank: int, status: RankStatus) -> str:
    why, _, trace = status.departure.partition("\n")
    text = problem(
        "fsharp",
        f"rank {rank} has left the job, and others go on.",
        [(f"rank {rank}", why), ("another rank", f"waits for it in {call.label!r}")],
        "Every rank has to make the same number of steps, and none may leave before the last one.",
    )
    return f"{text}\n{trace}" if trace else text


def _labels_by_number(count: int, labels: Sequence[str]) -> dict[int, str]:
    return dict(enumerate(labels, count - len(labels)))


def _label_difference_text(
    first: int | None, labels_by_rank: Mapping[int, Mapping[int, str]], settings: Mapping[str, str] | None = None
) -> str:
    """Return the text of the error that ranks are in collectives with different labels.

    ``labels_by_rank``: for each rank its labels, by the number of the collective. ``first``: the first number at which labels
    differ; None if ranks are in collectives of two Comms. ``settings``: by digest, the text of the settings whose digests are
    in labels.
    """
    places = {rank: max(labels) if first is None else first for rank, labels in sorted(labels_by_rank.items())}
    here = {rank: labels_by_rank[rank][place] for rank, place in places.items()}
    rows = [(f"rank {rank}", label) for rank, label in here.items()]
    rows += [] if first is None else differing_settings_rows(here, settings or {})
    around = [
        (f"rank {rank}, number {number}", labels_by_rank[rank][number])
        for rank, place in places.items()
        for number in range(place - _NUM_LABELS_AROUND, place + _NUM_LABELS_AROUND + 1)
        if number in labels_by_rank[rank]
    ]
    what = "each waits in another Comm" if first is None else f"the first difference is number {first}"
    text = problem(
        "fsharp",
        f"ranks take part in different collectives; {what}.",
        rows,
        "Every rank has to make the same calls in the same order: the same functions, steps, microbatches, units and policies. "
        "A rank that has nothing to compute in a unit takes part all the same: in a ShardedModule by calling that module with "
        "a dummy input, in functions by dummy_forward(params, x, comm=comm).",
    )
    return f"{text}\n{problem('labels', 'the collectives around these, in the order of each rank.', around)}"
