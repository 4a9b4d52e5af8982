"""Checkpoints in the background: what is saved is what was there, a failure is heard of, and the last ones stay."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy
import optree
import pytest
import torch

import fsharp as fs
from fsharp.checkpoint import saver as saver_module, saving
from fsharp.errors import AgreementError, CheckpointError
from fsharp.testing import processes, simulate
from tests.forked_python import run_forked

TREE = {"w": torch.arange(4000.0).view(80, 50), "b": torch.arange(7.0)}


def sharded(comm, tree=TREE):
    return fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp"), units="*"), comm)


@pytest.fixture
def slow_writes(monkeypatch):
    """Background writes begin when the test says so."""
    begin, write = threading.Event(), saver_module.write_snapshot

    def waiting(shot, comm):
        assert begin.wait(60)
        return write(shot, comm)

    monkeypatch.setattr(saver_module, "write_snapshot", waiting)
    yield begin
    begin.set()


@pytest.fixture
def full_disk(monkeypatch):
    def fail(shot, comm):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver_module, "write_snapshot", fail)


def test_what_changes_after_save_is_not_saved(tmp_path, slow_writes):
    comm = fs.SingleComm()
    params = sharded(comm)
    state = {"params": params, "x": torch.ones(3), "rng": fs.checkpoint.PerRank(torch.ones(2))}
    with fs.checkpoint.Saver(tmp_path, comm) as saver:
        saver.save(state, step=1)
        for x in optree.tree_leaves(state):
            x.fill_(-1)
        assert saver.is_busy
        assert fs.checkpoint.latest(tmp_path) is None
        slow_writes.set()
    found = fs.checkpoint.latest(tmp_path)
    assert found.step == 1
    assert torch.equal(found.tensor("params.w"), TREE["w"])
    assert torch.equal(found.tensor("x"), torch.ones(3))


def test_memory_of_what_is_saved_can_be_freed_while_it_is_written(tmp_path, slow_writes):
    array = numpy.ones(5)
    memory, state = weakref.ref(array), {"x": torch.from_numpy(array)}
    with fs.checkpoint.Saver(tmp_path, fs.SingleComm()) as saver:
        saver.save(state, step=1)
        del array, state
        assert memory() is None
        slow_writes.set()
    assert torch.equal(fs.checkpoint.latest(tmp_path).tensor("x"), torch.ones(5, dtype=torch.float64))


def test_memory_of_copies_is_used_again(tmp_path):
    comm = fs.SingleComm()
    params = sharded(comm)
    with fs.checkpoint.Saver(tmp_path, comm, keep=9) as saver:
        saver.save(params, step=0)
        first = [x.data_ptr() for x in saver._staged]
        for step in range(1, 4):
            optree.tree_map(lambda x: x.add_(1), params)
            saver.save(params, step=step)
        assert [x.data_ptr() for x in saver._staged] == first
    for found in fs.checkpoint.list_checkpoints(tmp_path):
        assert torch.equal(found.tensor("w"), TREE["w"] + found.step)
        fs.checkpoint.verify(found.path)


def test_the_last_ones_stay_and_the_best(tmp_path):
    with fs.checkpoint.Saver(tmp_path, fs.SingleComm(), keep=2, best=1) as saver:
        for step, metric in enumerate([3.0, 1.0, 2.0, float("nan"), 2.5]):
            saver.save({"x": step}, step=step, metric=metric)
    assert [(c.step, c.manifest.metric) for c in fs.checkpoint.list_checkpoints(tmp_path)][::2] == [(4, 2.5), (1, 1.0)]
    assert len(list(tmp_path.iterdir())) == 3
    assert fs.checkpoint.prune(tmp_path, keep=1, best=0)
    assert [c.step for c in fs.checkpoint.list_checkpoints(tmp_path)] == [4]
    with pytest.raises(CheckpointError, match="keep is 0"):
        fs.checkpoint.prune(tmp_path, keep=0)


@pytest.mark.parametrize("call", ["check", "save", "wait", "close"])
def test_a_failure_is_raised_by_whatever_comes_next(tmp_path, full_disk, call):
    saver = fs.checkpoint.Saver(tmp_path, fs.SingleComm())
    saver.save({"x": 1}, step=0)
    while saver.is_busy:
        pass
    calls = {
        "check": saver.raise_if_failed,
        "wait": saver.wait,
        "close": saver.close,
        "save": lambda: saver.save({"x": 1}, step=1),
    }
    with pytest.raises(CheckpointError, match="No space left"):
        calls[call]()
    if call == "check":  # ranks may see it in different steps, and hear of it together in a call that waits
        with pytest.raises(CheckpointError, match="No space left"):
            saver.close()
    saver.raise_if_failed()
    saver.close()


def test_a_program_that_exits_after_a_failure_does_not_exit_well(tmp_path, full_disk):

    def program():
        with fs.checkpoint.Saver(tmp_path, fs.SingleComm()) as saver:
            saver.save({"x": 1}, step=0)
            sys.exit(0)

    with pytest.raises(CheckpointError, match="No space left"):
        program()


def test_a_thread_that_cannot_start_is_an_error_and_nobody_waits_for_it(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with fs.checkpoint.Saver(tmp_path, fs.SingleComm()) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                saver.save({"x": 1}, step=0)
        saver.close()
        saver.save({"x": 2}, step=1)
    assert fs.checkpoint.latest(tmp_path).manifest.values == {"x": 2}


def test_threads_take_turns(tmp_path):
    with fs.checkpoint.Saver(tmp_path, fs.SingleComm(), keep=99) as saver:

        def save(first):
            for step in range(first, first + 5):
                saver.save({"x": torch.full((300_000,), float(step))}, step=step)

        threads = [threading.Thread(target=save, args=(100 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = fs.checkpoint.list_checkpoints(tmp_path)
    assert len(found) == 20
    assert all((each.tensor("x") == each.step).all() for each in found)


def test_two_that_save_into_one_folder_hear_of_it_and_remove_nothing(tmp_path):
    first, second = (fs.checkpoint.Saver(tmp_path, fs.SingleComm(), keep=1) for _ in range(2))
    for step, saver in enumerate((first, second)):
        saver.save({"x": step}, step=step)
        saver.wait()
    kept = fs.checkpoint.latest(tmp_path)
    first.save({"x": 2}, step=2)
    with pytest.raises(CheckpointError, match=rf"{kept.path} was saved after the last save of this Saver"):
        first.wait()
    assert [c.step for c in fs.checkpoint.list_checkpoints(tmp_path)] == [2, 1]


def test_a_checkpoint_of_save_between_two_of_a_saver_stays(tmp_path):
    saver = fs.checkpoint.Saver(tmp_path, fs.SingleComm(), keep=1)
    saver.save({"x": 0}, step=0)
    saver.wait()
    fs.checkpoint.save(tmp_path, {"x": 1}, step=1, comm=fs.SingleComm())
    for step in (2, 3):
        saver.save({"x": step}, step=step)
        saver.wait()
    assert [c.step for c in fs.checkpoint.list_checkpoints(tmp_path)] == [3, 1]


@pytest.mark.parametrize("before", ["write_file", "encode_header", "verify_written_file", "manifest_of_snapshot", "Checkpoint"])
def test_a_save_whose_folder_another_job_removes_says_what_may_have_happened(tmp_path, monkeypatch, before):
    real = getattr(saving, before)

    def remove_and_go_on(*args):
        fs.checkpoint.catalog.remove_incomplete(tmp_path)  # as another job's Saver does when it begins
        return real(*args)

    monkeypatch.setattr(saving, before, remove_and_go_on)
    with pytest.raises(
        CheckpointError, match=r"(?s)step-0000000001-.*No such file.*removed, as by another job that saves there"
    ):
        fs.checkpoint.save(tmp_path, TREE, step=1, comm=fs.SingleComm())
    monkeypatch.undo()
    assert fs.checkpoint.list_checkpoints(tmp_path) == []


def test_one_that_is_done_stands_in_nobodys_way(tmp_path):
    saver = fs.checkpoint.Saver(tmp_path, fs.SingleComm())
    saver.save({"x": 1}, step=0)
    while saver.is_busy:
        pass
    fs.checkpoint.Saver(tmp_path, fs.SingleComm()).close()
    saver.close()


FORKS = """
import os, sys, threading
import fsharp as fs
from fsharp.checkpoint import saver
write, begin = saver.write_snapshot, threading.Event()
saver.write_snapshot = lambda *args: begin.wait(60) and write(*args)
made = fs.checkpoint.Saver({root!r}, fs.SingleComm())
made.save({{"x": 1}}, step=0)
if (child := os.fork()) == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
begin.set()
made.close()
"""


def is_refused_in_a_forked_child(*calls):
    """Return whether each call raises, in a child of this process, that what it uses belongs to the parent."""
    if (child := os.fork()) == 0:
        signal.alarm(20)  # ends a child that waits for a thread of its parent
        for call in calls:
            try:
                call()
            except CheckpointError as error:
                if f"belongs to process {os.getppid()}" not in str(error):
                    os._exit(1)
            else:
                os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_cannot_save_or_wait(tmp_path):
    def run(comm):
        saver = fs.checkpoint.Saver(tmp_path, comm)
        saver.save({"w": torch.ones(4)}, step=1)
        assert is_refused_in_a_forked_child(saver.wait, saver.close, lambda: saver.save({"w": torch.ones(4)}, step=2))
        saver.close()
        return [each.step for each in fs.checkpoint.list_checkpoints(tmp_path)]

    assert processes(fs.Mesh({"dp": 1}), run) == [[1]]


def test_a_forked_child_cannot_refresh_even_if_nothing_is_under_way(tmp_path):
    def run(comm):
        replicas = fs.checkpoint.Replicas(tmp_path, comm, copies=0)
        replicas.refresh({"w": torch.ones(4)}, step=1)
        replicas.wait()
        assert is_refused_in_a_forked_child(lambda: replicas.refresh({"w": torch.ones(4)}, step=2))
        replicas.refresh({"w": torch.ones(4)}, step=3)
        replicas.wait()
        return replicas.latest()

    assert processes(fs.Mesh({"dp": 1}), run) == [3]


def test_a_forked_child_waits_for_nothing(tmp_path):
    command = [sys.executable, "-c", FORKS.format(root=str(tmp_path))]
    done = run_forked(lambda: subprocess.run(command, capture_output=True, text=True, timeout=200))
    assert done.returncode == 0, done.stderr
    assert fs.checkpoint.latest(tmp_path).step == 0


def test_a_rank_that_has_no_memory_for_a_copy_fails_the_save_on_all_ranks(tmp_path):
    root = str(tmp_path)

    def run(comm):
        def refuse(shot):
            raise MemoryError("no memory for a copy")

        made, said = fs.checkpoint.Saver(root, comm), []
        if comm.rank == 1:
            made._copy_to_host = refuse
        made.save(sharded(comm), step=0)
        vars(made).pop("_copy_to_host", None)
        for step in (1, 2):
            try:
                made.save(sharded(comm), step=step)
                said.append("begun")
            except CheckpointError as error:
                said.append(str(error))
        fs.destroy()  # waits for what is under way
        return said

    for first, second in processes(fs.Mesh({"dp": 2}), run):
        assert "no memory for a copy" in first
        assert second == "begun"
    assert [c.step for c in fs.checkpoint.list_checkpoints(root)] == [2]


def test_an_error_of_the_program_comes_first(tmp_path, full_disk, capsys):

    def program():
        with fs.checkpoint.Saver(tmp_path, fs.SingleComm()) as saver:
            saver.save({"x": 1}, step=0)
            raise ZeroDivisionError("of the program")

    with pytest.raises(ZeroDivisionError, match="of the program"):
        program()
    assert "No space left" in capsys.readouterr().err


def test_ranks_save_in_groups_of_their_own_while_they_go_on(tmp_path):
    root = str(tmp_path)

    def run(comm):
        params = sharded(comm)
        with fs.checkpoint.Saver(root, comm, keep=2) as saver:
            for step in range(4):
                saver.save(params, step=step, metric=float(step))
                for _ in range(20):  # collectives of the step, at the same time
                    total = comm.all_reduce(torch.ones(3) * comm.rank, "dp")
                params = fs.layouts.map_units(lambda node: node.replace([b + 1 for b in node.buffers]), params)
        return total.tolist(), len(saver._staged)

    assert [total for total, _ in processes(fs.Mesh({"dp": 2}), run)] == [[1.0] * 3] * 2
    assert [c.step for c in fs.checkpoint.list_checkpoints(root)] == [3, 2]
    assert torch.equal(fs.checkpoint.latest(root).tensor("w"), TREE["w"] + 3)


def test_a_slow_disk_of_one_rank_and_a_slow_step_of_another_are_waited_for(tmp_path):
    """Rank 0's saver waits for that of rank 1, and rank 1's step for that of rank 0."""

    def run(comm):
        write = saver_module.write_snapshot

        def write_slowly(snapshot, own):
            time.sleep(3 * comm.rank)
            return write(snapshot, own)

        saver_module.write_snapshot = write_slowly
        with fs.checkpoint.Saver(tmp_path, comm) as saver:
            saver.save(sharded(comm), step=1)
            time.sleep(3 * (1 - comm.rank))
            return comm.all_reduce(torch.ones(1), "dp").item()

    assert processes(fs.Mesh({"dp": 2}), run) == [2.0] * 2
    assert fs.checkpoint.latest(tmp_path).step == 1


def test_a_disk_that_hangs_on_one_rank_is_an_error_on_all_ranks(tmp_path):
    """Rank 1 waited for its own disk, without a limit, also when it left the job."""

    def run(comm):
        saver = fs.checkpoint.Saver(tmp_path, comm)
        saver._own.watch.limit_s = 2.0
        saver_module._ENDS_WITHIN_S = 1.0
        if comm.rank == 1:
            saver_module.write_snapshot = lambda *_: time.sleep(300)
        saver.save(sharded(comm), step=7)
        with pytest.raises(CheckpointError) as caught:
            saver.wait()
        if comm.rank == 1:
            with pytest.raises(CheckpointError, match="is not saved"):
                saver.wait()
        fs.destroy()
        saver._release_save()  # or this process exits with status 1
        return str(caught.value)

    zero, one = processes(fs.Mesh({"dp": 2}), run)
    assert "rank 1 did not come to" in zero
    assert re.search(r"step-0000000007-\w+ is not saved: this rank still writes its file.*rank 1 did not come to", one)


def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing(tmp_path):
    root = str(tmp_path)

    def run(comm):
        from fsharp.checkpoint import storage

        params, fsync = sharded(comm), storage.os.fsync
        saver = fs.checkpoint.Saver(root, comm)
        saver.save(params, step=0)
        saver.wait()

        def fail(file):
            raise OSError(5, "Input/output error")

        if comm.rank == 1:
            storage.os.fsync = fail
        saver.save(params, step=1)
        try:
            saver.wait()
        except CheckpointError as error:
            storage.os.fsync = fsync
            saver.save(params, step=2)  # a new one may go well
            saver.close()
            return str(error)
        return "nothing was raised"

    for said in processes(fs.Mesh({"dp": 2}), run):
        assert "Input/output error" in said
        assert "rank-00001.safetensors: cannot be written" in said
    assert sorted(c.step for c in fs.checkpoint.list_checkpoints(root)) == [0, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_old_checkpoints_that_cannot_be_removed_are_an_error_on_all_ranks(tmp_path):
    root = str(tmp_path)

    def run(comm):
        from fsharp.checkpoint import saver

        def fail(paths):
            raise CheckpointError("cannot be removed")

        saver.remove_checkpoints = fail
        made = saver.Saver(root, comm)
        made.save(sharded(comm), step=0)
        try:
            made.close()
        except CheckpointError as error:
            return str(error)
        return "nothing was raised"

    assert all("cannot be removed" in said for said in processes(fs.Mesh({"dp": 2}), run))
    assert fs.checkpoint.latest(root).step == 0


def test_simulated_ranks_save_before_they_go_on(tmp_path):
    def run(comm):
        with fs.checkpoint.Saver(tmp_path, comm) as saver:
            saver.save(sharded(comm), step=0)
            assert not saver.is_busy
        with pytest.raises(AgreementError, match="keep"):
            fs.checkpoint.Saver(tmp_path, comm, keep=comm.rank + 1)

    simulate(fs.Mesh({"dp": 3}), run)
    assert torch.equal(fs.checkpoint.latest(tmp_path).tensor("w"), TREE["w"])
