"""launch: a function in processes of its own, its results, and what is said of one that fails."""

import atexit
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsharp as fs
from fsharp.errors import CommError, MeshError, OptionError
from fsharp.resilience.restarting import Restarter
from fsharp.tracebacks import HINT
from tests.forked_python import forked, printed


def test_results_come_in_order_of_rank_closures_and_steps_travel_and_no_process_prints(capfd):
    """A step holds functions of this library that cloudpickle sends by value. The ranks are new interpreters."""
    torch.ones(300, 300, requires_grad=True).square().sum().backward()  # this process has used autograd and its threads
    factor, tx = 3.0, fs.optim.sgd(0.5)
    train_step = fs.train_step(lambda params, x, comm: fs.forward(lambda p, x: (p["w"] * x).sum(), params, x, comm=comm), tx)
    schedule = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(fs.optim.linear_schedule(0.0, 1.0, 10)))

    def rank_fn(offset):
        comm = fs.connect(fs.Mesh({"dp": 2}))
        w = torch.full((300, 300), comm.rank + offset, requires_grad=True)
        (w @ w).sum().backward()
        total = comm.all_reduce(torch.tensor([float(comm.rank + 1)]), "dp")
        tree = {"w": torch.ones(4)}
        params = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm, place="optim")
        state, _ = train_step(fs.init_state(tx, params, comm=comm), torch.ones(4) * comm.rank, comm)
        trained = fs.full_tree(state.params, comm=comm)["w"].tolist(), len(schedule.init(params))
        return comm.rank, factor * total.item(), w.grad[0, 0].item(), trained

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    trained = [0.75] * 4, 2  # the mean of gradients 0 and 1
    assert fs.launch(rank_fn, 2, 1.0) == [(0, 9.0, 600.0, trained), (1, 9.0, 1200.0, trained)]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "how", ["raises and ends last", *(pytest.param(how, marks=pytest.mark.deep) for how in ("raises", "exits"))]
)
@forked
def test_a_rank_that_fails_is_named_and_the_others_end(how):
    def rank_fn():
        comm = fs.connect(fs.Mesh({"dp": 2}))
        if comm.rank == 1:
            if how == "exits":
                os._exit(3)
            if how == "raises and ends last":
                atexit.register(time.sleep, 3)
            raise ValueError("no such thing")
        comm.all_reduce(torch.ones(1), "dp")

    ending = "exit status 3" if how == "exits" else "ValueError: no such thing.*in rank_fn"
    expected = f"(?s)rank 1 of 2 failed: {ending}"
    with pytest.raises(CommError, match=expected) as caught:
        fs.launch(rank_fn, 2)
    text = str(caught.value)
    assert text.count("in rank_fn") == text.count("Traceback") == (how != "exits"), text
    assert re.search(r"\nrank 0: [^\n]+$", text), text
    assert HINT not in text  # Python prints the note of this error
    if how == "raises and ends last":
        assert "\nrank 0: CommError: fsharp: rank 1 has left the job" in text
    assert printed() == ""


@forked
def test_a_result_that_cannot_be_pickled_and_an_error_without_a_text_are_named():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fail():
        raise Silent

    with pytest.raises(CommError, match=r"(?s)the result, of type generator, cannot be pickled.*Pass and return values"):
        fs.launch(lambda: (i for i in range(3)), 2)
    with pytest.raises(OptionError, match=r"the function or an argument cannot be pickled: TypeError: .*lock"):
        fs.launch(print, 2, threading.Lock())
    with pytest.raises(CommError, match=r"(?s)of 2 failed: Silent: .*in fail"):
        fs.launch(fail, 2)


@forked
def test_a_forked_child_that_leaves_the_function_is_no_rank():
    def rank_fn():
        comm = fs.connect(fs.Mesh({"dp": 2}))
        sums = []
        for leave in (lambda: sys.exit(0), lambda: None, lambda: 1 / 0):
            comm.all_reduce(torch.ones(1), "dp")
            if (child := os.fork()) == 0:
                return leave()
            os.waitpid(child, 0)
            sums.append(comm.all_reduce(torch.ones(1), "dp").item())
        return sums

    assert fs.launch(rank_fn, 2) == [[2.0, 2.0, 2.0]] * 2


@forked
def test_a_run_that_was_preempted_is_said_to_have_saved():
    with pytest.raises(CommError, match=r"exit status 75: after a signal.*a run has saved\. Start the program again"):
        fs.launch(lambda: sys.exit(fs.resilience.EXIT_PREEMPTED), 2)


@forked
def test_launches_of_several_threads_leave_logging_as_it_was(tmp_path):
    """The second begins during the first, and ends after it."""

    def wait_for(name):
        (tmp_path / f"{name} waits").touch()
        while not (tmp_path / name).exists():
            time.sleep(0.01)

    before = logging.root.manager.disable
    threads = [threading.Thread(target=fs.launch, args=(wait_for, 2, name)) for name in ("first", "second")]
    for thread, name in zip(threads, ("first", "second"), strict=True):
        thread.start()
        while not (tmp_path / f"{name} waits").exists():
            time.sleep(0.01)
    for thread, name in zip(threads, ("first", "second"), strict=True):
        (tmp_path / name).touch()
        thread.join()
    assert logging.root.manager.disable == before


@forked
def test_with_restarts_a_rank_prints_its_own_error_alone():
    def rank_fn():
        comm = fs.connect(fs.Mesh({"dp": 2}))
        if comm.rank == 1:
            raise ValueError("no such thing")
        comm.all_reduce(torch.ones(1), "dp")

    with pytest.raises(CommError, match="ValueError: no such thing"):
        fs.launch(rank_fn, 2, restarts=1)
    assert printed().count("Traceback") == 1
    assert "launch(): rank 0 ends because of another rank: CommError: fsharp: rank 1 has left the job" in printed()


@forked
def test_with_restarts_processes_have_the_variables_of_torchrun_and_ranks_share_the_cores():
    def rank_fn():
        return dict(os.environ), dist.is_torchelastic_launched()

    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(4)
    (plain, is_torchs), (restarted, is_ours) = fs.launch(rank_fn, 2)[1], fs.launch(rank_fn, 2, restarts=1)[1]
    assert is_torchs
    assert is_ours
    assert plain["OMP_NUM_THREADS"] == restarted["OMP_NUM_THREADS"] == "2"
    of_agent = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    differ = {name for name in plain if plain[name] != restarted.get(name)} - of_agent
    assert differ == {"MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"}
    os.environ["OMP_NUM_THREADS"] = "3"
    assert [environment["OMP_NUM_THREADS"] for environment, _ in fs.launch(rank_fn, 2)] == ["3", "3"]


def test_a_spare_process_that_ends_at_once_is_not_started_again_and_again(tmp_path):
    program = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
with open(folder / "started", "a") as started:
    started.write("x")
if (folder / "started").stat().st_size > 2:
    sys.exit(1)
rank = json.loads(sys.stdin.read())["RANK"]
time.sleep(6)
(folder / f"result-{rank}").touch()
"""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        Restarter(tmp_path, program, 2, 1).run()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert 3 <= (tmp_path / "started").stat().st_size <= 5, "two ranks, and a spare process every two seconds"


def test_a_mesh_that_does_not_fit_a_rank_of_another_launcher_says_that_no_process_was_started(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(MeshError, match="1 process cannot form") as caught:
        fs.launch(lambda: fs.Mesh({"dp": 2}).check_world_size(1), 2)
    assert "launch() has started no processes" in caught.value.__notes__[0]


def test_one_process_is_this_one(monkeypatch):
    assert fs.launch(os.getpid, 1) == [os.getpid()]
    monkeypatch.setenv("RANK", "0")  # as under torchrun
    assert fs.launch(os.getpid, 8) == [os.getpid()]
    with pytest.raises(OptionError, match="nproc is 0, expected 1 or more"):
        fs.launch(os.getpid, 0)


_WAITING = """
import threading
import time
from pathlib import Path
import fsharp as fs

def wait(path):
    time.sleep(1)  # by then the launcher waits
    Path(path).touch()
    time.sleep(100)

try:
    fs.launch(wait, 2, {path!r}, restarts={restarts})
finally:
    assert threading.active_count() == 1, "a thread that waits in C++ as Python ends may abort the process"
"""

_WITH_INTERPRETERS = """
import subprocess
from tests.forked_python import exec_child
subprocess.Popen._execute_child = exec_child
"""


@pytest.mark.parametrize(
    ("number", "last", "status"),
    [(signal.SIGINT, "KeyboardInterrupt", -signal.SIGINT), (signal.SIGTERM, r".*SignalException: .*got signal: 15", 1)],
)
@forked
def test_ctrl_c_is_a_keyboard_interrupt_and_another_signal_an_error_of_torch(number, last, status, tmp_path):
    begun = tmp_path / "begun"
    command = [sys.executable, "-c", _WAITING.format(path=str(begun), restarts=0)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        while not begun.exists() and run.poll() is None:
            time.sleep(0.05)
        run.send_signal(number)
        _, said = run.communicate(timeout=60)
    assert re.fullmatch(last, said.splitlines()[-1]), said
    assert ("SignalException" in said) == (number == signal.SIGTERM)
    assert run.returncode == status


@pytest.mark.parametrize(
    ("moment", "restarts"), [("at once", 1), ("later", 0), ("later", 1), pytest.param("at once", 0, marks=pytest.mark.deep)]
)
@forked
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path, restarts, moment):
    """At once: the ranks are new interpreters, which have not imported the library yet. Nobody reads what ranks say."""
    begun = tmp_path / "begun"
    program = (_WITH_INTERPRETERS if moment == "at once" else "") + _WAITING.format(path=str(begun), restarts=restarts)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}) as run:
        wait_until(lambda: len(children_of(run.pid)) >= 2 and (moment == "at once" or begun.exists()))
        ranks = children_of(run.pid)
        run.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert list(tmp_path.glob("fsharp-*")) == []


def children_of(pid):
    return [int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]


def wait_until(condition):
    """Wait for a condition, for at most 90 seconds."""
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
