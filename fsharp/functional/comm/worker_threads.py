"""Workers: threads that do what they are handed in order, and whoever waits for them does not wait without a limit."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from fsharp.functional.comm.watch import WatchedCall

Job = Callable[[], Any]
_LOOK_EVERY_S = 0.5
_END_WITHIN_S = 2.0
"""Seconds that what is under way is given to end when the interpreter does."""
_running: "weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[tuple[Job, Outcome] | None]]" = weakref.WeakKeyDictionary()


class Worker:
    """A thread that does one job after another. It starts with the first one and ends with its owner."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[tuple[Job, Outcome] | None] | None = None

    def submit(self, job: Job, outcome: "Outcome") -> None:
        """Have a job done after those before it. What it holds is let go of before its outcome is there."""
        self.start().put((job, outcome))

    def start(self) -> "SimpleQueue[tuple[Job, Outcome] | None]":
        """Start the thread, if it does not run; what it takes its jobs from."""
        if self._queue is None:
            queue: SimpleQueue[tuple[Job, Outcome] | None] = SimpleQueue()
            thread = threading.Thread(target=_work, args=(queue,), name=f"fsharp {self.name}", daemon=True)
            thread.start()  # may fail
            self._queue = _running[thread] = queue
            weakref.finalize(self, queue.put, None).atexit = False
        return self._queue


@atexit.register
def _stop_all() -> None:
    """A thread must not be in the middle of something when the interpreter ends under it. Who hands on jobs started first."""
    deadline = time.monotonic() + _END_WITHIN_S
    for thread, queue in list(_running.items()):
        queue.put(None)
        thread.join(max(deadline - time.monotonic(), 0))


def _work(queue: "SimpleQueue[tuple[Job, Outcome] | None]") -> None:
    while True:
        item = queue.get()
        if item is None:
            return
        job, outcome = item
        del item
        outcome.run(job)
        del job
        outcome.land()
        del outcome


class Outcome:
    """What the job of a worker comes to: a result, which one may take, or an error."""

    __slots__ = ("_error", "_has_landed", "_result", "_under_way")

    def __init__(self) -> None:
        self._under_way = threading.Lock()  # held until it is done: an Event takes eight times as long
        self._under_way.acquire()
        self._has_landed = False
        self._error: BaseException | None = None
        self._result: Any = None

    def run(self, job: Job) -> None:
        """Do the job; nobody hears of it yet."""
        try:
            self._result = job()
        except Exception as error:
            self._error = error

    def land(self) -> None:
        """It is done, or has failed."""
        self._has_landed = True  # whatever becomes of the lock, if Ctrl-C comes to who waits for it
        self._under_way.release()

    def is_done(self, within_s: float = 0.0) -> bool:
        """Whether it is done after at most so many seconds; -1 waits without a limit."""
        if not self._has_landed and self._under_way.acquire(timeout=within_s):
            self._under_way.release()  # for others who wait
        return self._has_landed

    @property
    def error(self) -> BaseException | None:
        """What it has failed with, once it is done."""
        return self._error if self.is_done() else None

    def take(self) -> Any:
        """Block until it is done; the result, which only the first one gets."""
        self.is_done(-1)
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None
        return result


class InFlight(Outcome):
    """A collective that a worker will have done.

    Args:
        call: what it is, and who else takes part.

    Attributes:
        landed_s: when it was done, on the clock of ``time.perf_counter``; None until then.
    """

    __slots__ = ("call", "landed_s")

    def __init__(self, call: WatchedCall) -> None:
        super().__init__()
        self.call = call
        self.landed_s: float | None = None

    def land(self) -> None:
        """It is done, or has failed."""
        self.landed_s = time.perf_counter()
        super().land()

    def wait(self) -> Any:
        """Block until it is done; the result, which only the first one gets.

        Raises:
            AgreementError: another rank has failed, or takes part in something else.
            CommError: a rank has ended, or the limit has passed.
        """
        since = time.perf_counter()
        while not self.is_done(_LOOK_EVERY_S):
            self.call.check()
        if threading.current_thread() is threading.main_thread():  # others wait while it computes
            self.call.waited(time.perf_counter() - since)
        if self._error is not None:
            raise self.call.lost(self._error) from self._error
        return self.take()
