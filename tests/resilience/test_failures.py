"""Real processes that fail, are killed, stopped or sent a signal: who says what, in which order, and how soon."""

import contextlib
import gc
import json
import os
import re
import signal
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import fsharp as fs
from fsharp.errors import AgreementError, CheckpointError, CommError
from fsharp.functional.comm.agree import agree, check_on_all_ranks, is_own_failure
from fsharp.resilience import EXIT_PREEMPTED, Run
from fsharp.resilience.failures import reported_failures
from fsharp.testing import processes, simulate
from tests.resilience.test_run import X, make_state, train_step

DP2, DP3 = fs.Mesh({"dp": 2}), fs.Mesh({"dp": 3})
NEVER_S = 3600.0  # a limit that no test reaches


def run_until(fault, folder, *, scheduled=True, limit_s=NEVER_S):
    """What each rank does: steps of a run, in one of which a fault comes. It writes to files what it says and how it ends."""

    def rank_fn(comm):
        os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        (folder / f"pid {comm.rank}").write_text(str(os.getpid()))
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error file {comm.rank}")
        comm.limit_s = comm.watch.limit_s = limit_s  # as of init_process_group(timeout=)
        step_fn = fs.Scheduler(comm)(train_step) if scheduled else lambda *args: train_step(*args, comm)
        ended = {"exit": 0}
        try:
            with Run(folder / "runs", comm=comm, total=20, save_every=4) as run:
                state = run.resume(make_state(comm))
                for step in run.steps():
                    fault(step, comm)
                    state, _ = step_fn(state, X[8 * comm.rank :][:8])
                    state = run.end_step(state)
        except SystemExit as error:
            ended = {"exit": error.code, "step": run.step}
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)  # what the interpreter does at its end
            ended = {"exit": 1, "error": f"{type(error).__name__}: {error}"}
        (folder / f"ended {comm.rank}").write_text(json.dumps(ended))
        for rank in range(comm.mesh.size):  # one that is stopped would never end
            if fault.__name__ == "stop" and rank != comm.rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int((folder / f"pid {rank}").read_text()), signal.SIGKILL)

    return rank_fn


def ended(folder, rank):
    return json.loads((folder / f"ended {rank}").read_text())


class SlowError(KeyError):
    """An error whose text takes as long as on a busy machine: the others hear of it before its rank has written its file."""

    def __str__(self):
        time.sleep(1.2)
        return super().__str__()


@pytest.mark.parametrize("scheduled", [True, pytest.param(False, marks=pytest.mark.deep)], ids=["scheduled", "blocking"])
def test_the_first_traceback_comes_last_and_is_labelled(tmp_path, scheduled):
    def fail(step, comm):
        if step == 6 and comm.rank == 1:
            raise SlowError("no such sample")

    processes(DP3, run_until(fail, tmp_path, scheduled=scheduled))
    said = (tmp_path / "said").read_text()
    last = said[said.rindex("Traceback (most recent call last)") :].rstrip()
    assert "SlowError: 'no such sample'" in last
    assert re.search(r"rank 1 of 3 failed first, in step 6; its last collective: (['\"]).+\1$", last), said
    assert said.count("Traceback (most recent call last)") == 1, said
    for rank in (0, 2):
        assert f"rank {rank} of 3 ends because of another rank: rank 1 of 3 failed first, in step 6" in said
        error = ended(tmp_path, rank)["error"]
        assert error.startswith("AgreementError: rank 1 of 3 failed in step 6")
        assert "no such sample" in error
    failures = [ProcessFailure(rank, 0, 1, str(tmp_path / f"error file {rank}")) for rank in range(3)]
    rank, failure = ChildFailedError("", dict(enumerate(failures))).get_first_failure()
    assert rank == 1
    assert failure.message["message"] == "SlowError: 'no such sample'"
    assert all("no such sample" in each.message["extraInfo"]["py_callstack"] for each in failures)


def test_a_rank_that_is_killed_ends_the_others_long_before_the_limit(tmp_path):
    def kill(step, comm):
        if step == 6 and comm.rank == 1:
            while fs.checkpoint.latest(tmp_path / "runs") is None:  # written in the background
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(CommError, match=r"ranks \[1\] failed"):
        processes(DP3, run_until(kill, tmp_path))
    for rank in (0, 2):
        found = ended(tmp_path, rank)
        assert re.search(r"rank 1 in ['\"]", found["error"]), found
    said = (tmp_path / "said").read_text()
    assert re.search(r"rank [02] of 3.*in step 6; its last collective: ['\"].+", said), said
    assert fs.checkpoint.latest(tmp_path / "runs").step == 4


def test_a_rank_that_is_stopped_is_named_within_the_limit(tmp_path):
    def stop(step, comm):
        if step == 6 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(CommError, match=r"ranks \[1\] failed"):
        processes(DP2, run_until(stop, tmp_path, limit_s=6.0))
    found = ended(tmp_path, 0)
    assert re.search(r"waited 6 s for rank 1 in .*; rank 1 did not come to it$", found["error"]), found
    said = (tmp_path / "said").read_text()
    assert "rank 0 of 2, in step 6; its last collective:" in said
    assert "rank 0 has waited" in said, "a warning before the limit"


def test_a_signal_to_one_process_saves_and_ends_all_of_them(tmp_path):
    def terminate(step, comm):
        if step == 6 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    processes(DP2, run_until(terminate, tmp_path))
    assert [ended(tmp_path, rank) for rank in range(2)] == [{"exit": EXIT_PREEMPTED, "step": 7}] * 2
    assert fs.checkpoint.latest(tmp_path / "runs").step == 7


def test_a_second_failure_is_not_taken_for_the_first(tmp_path, monkeypatch):
    def rank_fn(comm):
        os.dup2(os.open(tmp_path / f"said {comm.rank}", os.O_WRONLY | os.O_CREAT), 2)
        for failing in (0, 1):
            fs.destroy()
            comm = fs.connect(comm.mesh, device_type="cpu")
            try:
                with fs.resilience.reported_failures(comm, lambda failing=failing: f"round {failing}"):
                    if comm.rank == failing:
                        raise KeyError(f"of round {failing}")
                    comm.all_reduce(torch.ones(1), "dp")
            except Exception as error:
                caught = error
        sys.excepthook(type(caught), caught, caught.__traceback__)

    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
    agent = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in agent.items():
        monkeypatch.setenv(name, value)
    processes(DP2, rank_fn)
    assert "KeyError: 'of round 1'" in (tmp_path / "said 1").read_text()
    assert "rank 1 of 2 failed first, in round 1" in (tmp_path / "said 0").read_text()


def test_an_error_that_is_handled_is_printed_by_nobody(tmp_path):
    def rank_fn(comm):
        before = sys.excepthook
        with fs.resilience.reported_failures(comm, lambda: "here"):
            comm.all_reduce(torch.ones(1), "dp")
        return sys.excepthook is before

    assert processes(DP2, rank_fn) == [True, True]
    with pytest.raises(ZeroDivisionError, match="division by zero"), fs.resilience.reported_failures(fs.SingleComm(), str):
        _ = 1 / 0


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def circle():
    first, second = ValueError("first"), OSError("second")
    first.__cause__, second.__cause__ = second, first
    return first


@pytest.mark.parametrize(
    "make",
    [circle, Unprintable, lambda: ValueError("x" * 20_000_000), lambda: ValueError("\udcff")],
    ids=["circle of causes", "unprintable", "long", "surrogate"],
)
def test_errors_of_any_kind_are_heard_of(tmp_path, make):
    def rank_fn(comm):
        os.dup2(os.open(tmp_path / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.environ["TORCHELASTIC_ERROR_FILE"] = "/dev/full" if comm.rank else str(tmp_path / "error file")
        try:
            with fs.resilience.reported_failures(comm, lambda: "step 3"):
                if comm.rank == 0:
                    raise make()
                comm.all_reduce(torch.ones(1), "dp")
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            return type(error).__name__

    assert processes(DP2, rank_fn) == [type(make()).__name__, "AgreementError"]
    assert "rank 0 of 2 failed first, in step 3" in (tmp_path / "said").read_text(errors="replace")
    assert type(make()).__name__ in json.loads((tmp_path / "error file").read_text())["message"]["message"]


def test_threads_that_start_in_a_run_keep_neither_its_comm_nor_the_values_of_a_handled_error():
    """Threads keep sys.excepthook: a process that released its groups with its last thread aborted at exit."""

    class Value:
        pass

    def rank_fn(comm):
        end, kept = threading.Event(), []
        before = sys.excepthook
        comms = [fs.connect(DP2, device_type="cpu") for _ in range(4)]  # first: after an error the ranks cannot join again

        def fail():
            value = Value()
            kept.append(weakref.ref(value))
            raise ValueError("handled")

        for fails in (False, True, True, False):
            own = comms.pop()
            kept.append(weakref.ref(own))
            with contextlib.suppress(ValueError), reported_failures(own, lambda: "a test"):
                threads.append(threading.Thread(target=end.wait, args=(60,), daemon=True))
                threads[-1].start()
                if fails:
                    fail()
            del own
        gc.collect()
        assert [each() for each in kept] == [None] * 6
        assert sys.excepthook is before
        end.set()

    threads = []
    processes(DP2, rank_fn)


def test_an_error_that_all_ranks_raise_is_own_on_the_rank_that_caused_it():
    """Also under another error, such as that of the next save. What all ranks find, or hear of, is nobody's own."""

    def rank_fn(comm):
        def check():
            if comm.rank == 1:
                raise OSError("no room on this host")

        with pytest.raises(AgreementError, match="failed on rank 1; rank 1 says:\nno room on this host") as caught:
            check_on_all_ranks("save()", comm, check)
        later = CheckpointError("the save that was under way has failed")
        later.__cause__ = caught.value
        with pytest.raises(AgreementError, match="different values") as differing:
            agree("Run()", {"total": str(comm.rank)}, comm)
        return [is_own_failure(each) for each in (caught.value, later, differing.value, CommError("lost"), ValueError("own"))]

    assert simulate(DP2, rank_fn) == [[False, False, False, False, True], [True, True, False, False, True]]


def test_an_error_heard_in_a_check_is_not_own():
    """The check of a tree asks modules for state dicts, which call collectives. The comparison afterwards fails as well."""

    def run(comm):
        def check(error):
            if comm.rank == 1:
                raise error

        found = []
        for error in (AgreementError("rank 2 was ended by SIGKILL"), CommError("lost"), OSError("no room")):
            with pytest.raises(AgreementError) as caught:
                check_on_all_ranks("f()", comm, partial(check, error))
            found.append(is_own_failure(caught.value))
        return found

    assert simulate(fs.Mesh({"dp": 2}), run) == [[False] * 3, [False, False, True]]
