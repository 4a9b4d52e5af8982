"""Workers: the CPU's streams. A thread each, that does what it is handed in order."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from fsharp.functional.errors import AgreementError

Job = Callable[[], None]
_PATIENCE = 2.0
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
    deadline = time.monotonic() + _PATIENCE
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
    """What a worker will have done.

    Args:
        patience: called twice a second while somebody waits; raises if there is no use in waiting.

    Attributes:
        landed_s: when it was done, on the clock of ``time.perf_counter``; None until then.
    """

    __slots__ = ("_done", "_error", "_patience", "_result", "landed_s")

    def __init__(self, patience: Callable[[], None]) -> None:
        self._done, self._patience = threading.Event(), patience
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
            AgreementError: another rank has given up, and said why.
            Exception: what the worker met.
        """
        while not self._done.wait(0.5):
            self._patience()
        if self._error is None:
            return self._result
        try:
            self._patience()  # a rank that is gone may have said why
        except AgreementError:
            raise
        except RuntimeError as lost:  # with whom it could have been left
            raise self._error from lost
        raise self._error
