"""Workers: whoever waits hears of the end, and what is handed on is done before the interpreter ends."""

import subprocess
import sys

import pytest

from fsharp.distributed.worker_threads import Outcome, Worker
from tests.forked_python import run_forked

HANDS_ON = """
import time
from fsharp.distributed.worker_threads import Outcome, Worker

first, second = Worker("first"), Worker("second")
first.start_thread(), second.start_thread()
first.submit(lambda: (time.sleep(0.3), second.submit(lambda: print("done", flush=True), Outcome())), Outcome())
"""


def test_what_is_handed_on_when_the_interpreter_ends_is_done():
    command = [sys.executable, "-c", HANDS_ON]
    found = run_forked(lambda: subprocess.run(command, capture_output=True, text=True, timeout=200, check=True))
    assert found.stdout == "done\n"


def test_one_who_was_interrupted_while_it_waited_keeps_nobody_waiting():
    outcome = Outcome()
    assert not outcome.is_done()
    assert not outcome.is_done(0.01)
    outcome.wake_waiters()
    assert outcome._under_way.acquire(timeout=0)  # as Ctrl-C leaves it, between taking it and giving it back
    assert outcome.is_done()
    assert outcome.is_done(-1)
    assert outcome.take_result() is None


def test_a_job_that_leaves_its_thread_ends_neither_the_thread_nor_the_wait():
    worker, outcomes = Worker("jobs"), [Outcome(), Outcome()]
    worker.submit(lambda: sys.exit(3), outcomes[0])
    worker.submit(lambda: "the next one", outcomes[1])
    assert outcomes[0].is_done(30)
    with pytest.raises(SystemExit, match="3"):
        outcomes[0].take_result()
    assert outcomes[1].take_result() == "the next one"
