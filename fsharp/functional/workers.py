"""Workers: threads that do what they are handed in order, and whoever waits for them does not wait without a limit."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from fsharp.functional.watch import Call

Job = Callable[[], None]
_LOOK_EVERY_S = 0.5
_END_WITHIN_S = 2.0
"""Seconds that what is under way is given to end when the interpreter does."""
_running: "weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Job | None]]" = weakref.WeakKeyDictionary()


class Worker:
    """A thread that does one job after another. It starts with the first one and ends with its owner.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[Job | None] | None = None

    def submit(self, job: Job) -> None:
        """Have a job done after those before it. It must not raise."""
        if self._queue is None:
            self._queue = SimpleQueue()
            thread = threading.Thread(target=_work, args=(self._queue,), name=f"fsharp {self.name}", daemon=True)
            thread.start()
            _running[thread] = self._queue
            weakref.finalize(self, self._queue.put, None).atexit = False
        self._queue.put(job)


@atexit.register
def _stop_all() -> None:
    """A thread must not be in the middle of something when the interpreter ends under it."""
    deadline = time.monotonic() + _END_WITHIN_S
    for queue in list(_running.values()):
        queue.put(None)
    for thread in list(_running):
        thread.join(max(deadline - time.monotonic(), 0))


def _work(queue: "SimpleQueue[Job | None]") -> None:
    while True:
        job = queue.get()
        if job is None:
            return
        job()
        del job  # what it holds may be the last of its owner


class Flight:
    """A collective that a worker will have done.

    Args:
        call: what it is, and who else takes part.

    Attributes:
        landed_s: when it was done, on the clock of ``time.perf_counter``; None until then.
    """

    __slots__ = ("_done", "_error", "_result", "call", "landed_s")

    def __init__(self, call: Call) -> None:
        self._done, self.call = threading.Event(), call
        self._error: BaseException | None = None
        self._result: Any = None
        self.landed_s: float | None = None

    def land(self, result: Any = None, error: BaseException | None = None) -> None:
        """It is done, or has failed."""
        self._result, self._error, self.landed_s = result, error, time.perf_counter()
        self._done.set()

    def wait(self) -> Any:
        """Block until it is done.

        Raises:
            AgreementError: another rank has failed, or takes part in something else.
            CommError: a rank has ended, or the limit has passed.
        """
        while not self._done.wait(_LOOK_EVERY_S):
            self.call.check()
        if self._error is not None:
            raise self.call.lost(self._error) from self._error
        return self._result
