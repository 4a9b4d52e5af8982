"""A signal to one rank stops all of them, after the same step."""

import multiprocessing
import os
import signal
import time

import pytest

import fsharp as fs
from fsharp.errors import CommError, RunError
from fsharp.resilience import EXIT_PREEMPTED, Preemption
from fsharp.testing import simulate
from tests.ranks import on_ranks

MESHES = [fs.Mesh({"dp": 1}), fs.Mesh({"dp": 3}), fs.Mesh({"outer": 2, "inner": 2})]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("every", [1, 3])
@on_ranks(lambda mesh: mesh)
def test_all_ranks_stop_after_the_same_step(comm, mesh, every):
    counting = fs.collectives.CountingComm(comm)
    preemption = Preemption(counting, signals=(), every=every)
    for step in range(20):
        if step == 4 and comm.rank == mesh.size - 1:
            preemption.record_signal()
        if preemption.should_stop(step):
            break
    asked = len([s for s in range(step + 1) if s % every == 0])
    assert counting.num_calls == asked * sum(size > 1 for _, size in mesh.axes)
    assert step == 4 if every == 1 else 6


def test_ranks_that_ask_after_different_steps_hear_of_it():
    with pytest.raises(CommError, match="whether to stop after step 1"):
        simulate(MESHES[1], lambda comm: Preemption(comm, signals=()).should_stop(comm.rank))


@pytest.fixture
def heard():
    """What the handler before has got of SIGUSR1."""
    found = []
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append("before"))
    yield found
    signal.signal(signal.SIGUSR1, before)


def test_signals_are_noted_in_the_context_alone(heard):
    preemption = Preemption(fs.SingleComm(), signals=(signal.SIGUSR1,))
    with preemption:
        assert not preemption.should_stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)  # clusters say it more than once
        assert preemption.should_stop()
        assert preemption.received == signal.SIGUSR1
    assert heard == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == ["before"]


def test_a_signal_that_nobody_was_told_of_is_not_lost(heard):
    with Preemption(fs.SingleComm(), signals=(signal.SIGUSR1,)) as preemption:
        assert not preemption.should_stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == []
    assert heard == ["before"]


def test_a_notice_of_another_kind_that_came_too_late_ends_nothing(heard):
    with Preemption(fs.SingleComm(), signals=()) as preemption:
        preemption.record_signal(signal.SIGUSR1)
    assert heard == []


def test_forked_children_end_by_signals_as_ever():
    fork = multiprocessing.get_context("fork")
    started = fork.Event()
    with Preemption(fs.SingleComm()) as preemption:
        child = fork.Process(target=lambda: (started.set(), time.sleep(60)))
        child.start()
        assert started.wait(30)
        child.terminate()
        child.join(30)
        assert child.exitcode == -signal.SIGTERM
        assert preemption.received is None


def test_signals_are_for_the_main_thread():
    with pytest.raises(RunError, match=r"pass signals=\(\)"):
        simulate(MESHES[1], lambda comm: Preemption(comm).__enter__())


def test_the_exit_code_is_none_that_a_signal_or_an_error_has():
    assert EXIT_PREEMPTED == 75
    assert EXIT_PREEMPTED not in (0, 1, 2, 128 + signal.SIGTERM)


def test_every_is_a_number_of_steps():
    with pytest.raises(RunError, match="every is 0"):
        Preemption(fs.SingleComm(), every=0)


def test_signals_that_no_process_can_catch_are_refused_before_any_handler_is_set():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunError, match=r"no process catches SIGKILL. Leave it out of signals"):
        fs.resilience.Preemption(fs.SingleComm(), signals=(signal.SIGTERM, signal.SIGKILL))
    assert signal.getsignal(signal.SIGTERM) is before


def test_handlers_are_restored_after_a_signal_that_is_named_twice_and_a_context_that_is_entered_twice():
    before = signal.getsignal(signal.SIGUSR1)
    preemption = fs.resilience.Preemption(fs.SingleComm(), signals=(signal.SIGUSR1, signal.SIGUSR1))
    with preemption, preemption:
        assert signal.getsignal(signal.SIGUSR1) is not before
    assert signal.getsignal(signal.SIGUSR1) is before
