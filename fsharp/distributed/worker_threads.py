"""Workers: threads that run jobs in order. A wait for a job's outcome has a limit."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from fsharp.distributed.watch import CommWatch, WatchedCall
from fsharp.errors import AgreementError, CommError

Job = Callable[[], Any]
_POLL_INTERVAL_S = 0.5
_END_WITHIN_S = 2.0
"""Seconds for jobs under way to end when the interpreter ends."""
_queue_by_thread: "weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[tuple[Job, Outcome] | None]]" = (
    weakref.WeakKeyDictionary()
)


def call_when_freed(owner: Any, fn: Callable[..., Any], *args: Any) -> "weakref.finalize[..., Any]":
    """Call ``fn(*args)`` when ``owner`` is freed, but not at the end of the interpreter, when threads and devices are gone."""
    found = weakref.finalize(owner, fn, *args)
    found.atexit = False
    return found


class Worker:
    """A thread that runs one job after another. The thread starts with the first job, and ends when this object is freed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[tuple[Job, Outcome] | None] | None = None

    def submit(self, job: Job, outcome: "Outcome") -> None:
        """Run ``job`` in the thread after all earlier jobs.

        Callers that wait for ``outcome`` wake once ``job`` has run, and the thread has dropped its reference to ``job``.
        """
        self.start_thread().put((job, outcome))

    def start_thread(self) -> "SimpleQueue[tuple[Job, Outcome] | None]":
        """Start the thread if it does not run yet. Return the queue from which it takes jobs."""
        if self._queue is None:
            queue: SimpleQueue[tuple[Job, Outcome] | None] = SimpleQueue()
            thread = threading.Thread(target=_run_jobs, args=(queue,), name=f"fsharp {self.name}", daemon=True)
            thread.start()  # may fail
            self._queue = _queue_by_thread[thread] = queue
            call_when_freed(self, queue.put, None)
        return self._queue


@atexit.register
def _stop_all_threads() -> None:
    """Stop all threads before the interpreter ends, in the order of their start: threads submit jobs to later threads."""
    deadline = time.monotonic() + _END_WITHIN_S
    for thread, queue in list(_queue_by_thread.items()):
        queue.put(None)
        thread.join(max(deadline - time.monotonic(), 0))


def _run_jobs(queue: "SimpleQueue[tuple[Job, Outcome] | None]") -> None:
    while True:
        item = queue.get()
        if item is None:
            return
        job, outcome = item
        del item
        outcome.run(job)
        del job
        outcome.wake_waiters()
        del outcome


class Outcome:
    """The result or error of a job that a :class:`Worker` runs. One caller can take the result; every caller gets the error."""

    __slots__ = ("__weakref__", "_error", "_has_landed", "_result", "_under_way")

    def __init__(self) -> None:
        self._under_way = threading.Lock()  # held until the job is done: an Event takes eight times as long
        self._under_way.acquire()
        self._has_landed = False
        self._error: BaseException | None = None
        self._result: Any = None

    def run(self, job: Job) -> None:
        """Run ``job``, and keep its result or error. The worker then calls :meth:`wake_waiters`."""
        try:
            self._result = job()
        except BaseException as error:  # sys.exit() as well: it would end the thread, and waiting callers would wait on
            self._error = error

    def wake_waiters(self) -> None:
        """Mark the job as done, and wake the callers that wait for it."""
        self._has_landed = True  # set first: Ctrl-C may interrupt a waiting caller, and leave the lock in any state
        self._under_way.release()

    def is_done(self, within_s: float = 0.0) -> bool:
        """Wait for at most ``within_s`` seconds, and return whether the job is done; -1 waits without a limit."""
        if not self._has_landed and self._under_way.acquire(timeout=within_s):
            self._under_way.release()  # for further callers that wait for the job
        return self._has_landed

    @property
    def error(self) -> BaseException | None:
        """The error of the job, once the job has failed; else None."""
        return self._error if self.is_done() else None

    def take_result(self) -> Any:
        """Block until the job is done. The first caller gets the job's result, and later callers get None.

        If the job has failed, every caller gets its error.
        """
        self.is_done(-1)
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None
        return result


class CollectiveOutcome(Outcome):
    """The outcome of a collective that a worker runs, or of one half of it.

    An all_reduce in order of rank has two halves: a reduce_scatter, and a gather of the sums.

    Attributes:
        call: the collective.
        second: the outcome of the second half, if this is the outcome of a first half; else None.
        landed_s: time at which the collective, or its half, ended, by ``time.perf_counter``; None until then.
    """

    __slots__ = ("call", "landed_s", "second")

    def __init__(self, call: WatchedCall, second: "CollectiveOutcome | None" = None) -> None:
        super().__init__()
        self.call, self.second = call, second
        self.landed_s: float | None = None

    @property
    def done_at_s(self) -> float | None:
        """Time at which the collective, with both of its halves, ended, by ``time.perf_counter``; None until then."""
        return self.landed_s if self.second is None else self.second.done_at_s

    def wake_waiters(self) -> None:
        """Record the time as the collective's end, mark the collective as done, and wake the callers that wait for it."""
        self.landed_s = time.perf_counter()
        super().wake_waiters()

    def wait(self) -> Any:
        """Block until the collective is done. The first caller gets the collective's result, and later callers get None.

        If the collective has failed, every caller gets an error.
        """
        since = time.perf_counter()
        while not self.is_done(_POLL_INTERVAL_S):
            self.call.check_failure_or_timeout()
        if threading.current_thread() is threading.main_thread():  # ranks compute while a message waits
            self.call.add_to_total_waited_s(time.perf_counter() - since)
        if self._error is not None:
            raise self.call.report_connection_error(self._error) from self._error
        return self.take_result()


def wait_ignoring_comm_errors(watch: CommWatch) -> None:
    """Block until no collective of a watch is under way in a worker. Return early if the Comm has failed or ranks are late."""
    with suppress(AgreementError, CommError):
        while under_way := [each for ref in list(watch.last_outcomes.values()) if (each := ref()) and not each.is_done()]:
            while not under_way[0].is_done(_POLL_INTERVAL_S):
                under_way[0].call.check_failure_or_timeout()
