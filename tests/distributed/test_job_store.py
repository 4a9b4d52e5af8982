"""Joining a job: a name for each attempt, whatever attempts before have left in the store."""

import _thread
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fsharp as fs
from fsharp.distributed.job_store import choose_attempt_name, new_group_of
from fsharp.errors import CommError, MeshError
from fsharp.testing import processes


def joined(store, size, *, late=None, dead=(), limit_s=60.0):
    """The names that ranks of an attempt come to; a dead one has ended before it could join."""

    def rank_fn(rank):
        time.sleep(0.1 if rank == late else 0)
        try:
            return choose_attempt_name(store, rank, size, limit_s, threading.Event())
        except CommError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_fn, [rank for rank in range(size) if rank not in dead]))


@pytest.mark.parametrize("late", [None, 0, 2])
def test_ranks_of_an_attempt_come_to_one_name_that_is_new(late):
    store = dist.HashStore()
    names = [joined(store, 3, late=late) for _ in range(4)]
    assert [len(set(each)) for each in names] == [1] * 4
    assert len({each[0] for each in names}) == 4


def test_an_attempt_that_has_failed_on_the_way_is_in_nobodys_way():
    store = dist.HashStore()
    for dead in ((1,), (0,), (0, 2)):
        found = joined(store, 3, dead=dead, limit_s=1.0)
        assert "has waited 1 s for the others to join the job" in found[0]
        assert dead == (1,) or len(found) == 3 - len(dead) == sum("has waited" in each for each in found)
    assert len(set(joined(store, 3))) == 1
    assert len(set(joined(store, 2))) == 1  # fewer ranks than before
    assert len(set(joined(store, 4))) == 1


def test_one_rank_that_comes_later_than_the_marks_of_an_oldattempt():
    store, names = dist.HashStore(), []
    joined(store, 2)
    first = threading.Thread(target=lambda: names.append(choose_attempt_name(store, 1, 2, 60.0, threading.Event())))
    first.start()
    time.sleep(0.1)
    assert names == []  # the marks that are there are those of the old attempt
    names.append(choose_attempt_name(store, 0, 2, 60.0, threading.Event()))
    first.join()
    assert names[0] == names[1]


def test_a_timeout_is_for_who_joins_the_job(tmp_path):
    def rank_fn(comm):
        with pytest.raises(MeshError, match="timeout is 0:00:50, but there is a process group already"):
            fs.connect(comm.mesh, timeout=timedelta(seconds=50))
        fs.destroy()
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        again = fs.connect(comm.mesh, device_type="cpu", timeout=timedelta(seconds=50))
        assert fs.connect(comm.mesh, device_type="cpu", timeout=timedelta(seconds=50)).limit_s == 50.0  # the same call again
        return again.limit_s

    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
    port = server.port
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        assert processes(fs.Mesh({"dp": 2}), rank_fn) == [50.0, 50.0]
    finally:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]


@pytest.fixture
def join_again():
    """Return a function that leaves the job, and prepares to join a job of which rank 0 hosts the store."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = str(found.getsockname()[1])

    def leave():
        fs.destroy()
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}

    return leave


def test_a_rank_that_was_interrupted_in_connect_connects_again(join_again, tmp_path):
    def rank_fn(comm):
        join_again()
        if comm.rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore this signal
            threading.Timer(1.0, _thread.interrupt_main).start()
            with pytest.raises(KeyboardInterrupt):
                fs.connect(comm.mesh, timeout=timedelta(seconds=20))
            (tmp_path / "interrupted").touch()
        while not (tmp_path / "interrupted").exists():
            time.sleep(0.05)
        again = fs.connect(comm.mesh, timeout=timedelta(seconds=20))
        return again.all_reduce(torch.ones(1), "dp").item()

    assert processes(fs.Mesh({"dp": 2}), rank_fn) == [2.0, 2.0]


def test_after_an_error_connect_says_to_leave_the_job_and_join_it_again(join_again):
    def rank_fn(comm):
        mesh, limit = comm.mesh, timedelta(seconds=2)
        join_again()
        comm = fs.connect(mesh, timeout=limit)
        if comm.rank == 0:
            with pytest.raises(CommError, match="waited 2 s for rank 1"):
                comm.all_reduce(torch.ones(1), "dp")
        else:
            time.sleep(4)
        with pytest.raises(CommError, match=r"cannot use the process group of the job (.|\n)*fs\.destroy\(\) on all ranks"):
            fs.connect(mesh, timeout=limit)
        fs.destroy()
        comm = fs.connect(mesh, timeout=timedelta(seconds=20))
        return comm.all_reduce(torch.ones(1), "dp").item()

    assert processes(fs.Mesh({"dp": 2}), rank_fn) == [2.0, 2.0]


@pytest.mark.parametrize("absent", [True, False])
def test_a_process_group_that_cannot_be_made_names_the_ranks_that_are_missing_or_the_error(absent):
    def rank_fn(comm):
        if comm.rank == 1 and absent:
            return ""
        if comm.rank == 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "none0"  # this rank reaches the store, and has no address for the others
        with pytest.raises((CommError, RuntimeError)) as error:
            new_group_of((0, 1), 1.0, torch.device("cpu"), is_nccl=False)
        return str(error.value)

    first, second = processes(fs.Mesh({"dp": 2}), rank_fn)
    what = "process group number 1 of ranks [0, 1]"
    if absent:
        assert f"rank 0 of the job waited 1 s for ranks [1] to make {what}. Does each of them make" in first
    else:
        assert f"rank 0 of the job cannot make {what}: " in first
        assert "none0" in second
