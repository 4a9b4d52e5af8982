"""A run that keeps its tree in memory of hosts as well."""

import logging
import os
import re
import shutil
import signal
import threading

import pytest
import torch

import fsharp as fs
from fsharp.checkpoint import Replicas, catalog
from fsharp.errors import CheckpointError, NonFiniteError, RunError
from fsharp.resilience import NonFinite, Run
from fsharp.testing import processes
from tests.resilience.test_run import DP2, train, values

COMM = fs.SingleComm()


def go(tmp_path, *, until=None, total=9, bad_at=(), act=lambda step, x: x + 1, **options):
    """Run until a step fails; where it began, its steps, and the tree."""
    options = {"save_every": 4, "refresh_every": 1, "config": {"lr": 1}, **options}
    with (
        Replicas(tmp_path / "memory", COMM, copies=0, root=tmp_path / "disk") as replicas,
        Run(tmp_path / "disk", comm=COMM, total=total, replicas=replicas, signals=(), **options) as run,
    ):
        tree, done = run.resume({"x": torch.zeros(2), "n": 0}), []
        start = run.step
        for step in run.steps():
            if step == until:
                break
            bad = NonFinite((0,), None, ()) if step in bad_at else None
            done.append(step)
            tree = run.end_step({"x": tree["x"] if bad else act(step, tree["x"]), "n": step}, nonfinite=bad)
    return start, done, tree["x"].tolist()


def steps_on_disk(tmp_path):
    return [found.step for found in fs.checkpoint.list_checkpoints(tmp_path / "disk")]


def test_a_run_goes_on_with_what_is_newer(tmp_path, caplog):
    assert go(tmp_path, until=7) == (0, list(range(7)), [7, 7])
    assert steps_on_disk(tmp_path) == [4]
    with caplog.at_level(logging.WARNING, "fsharp"):
        assert go(tmp_path, until=8, config={"lr": 2}) == (7, [7], [8, 8])
    assert "after step 7 with another config: lr was 1 and is 2" in caplog.text


def test_what_a_lost_host_leaves_is_on_disk(tmp_path):
    go(tmp_path, until=7)
    shutil.rmtree(tmp_path / "memory")
    assert go(tmp_path, until=6, refresh_every=100) == (4, [4, 5], [6, 6])
    fs.checkpoint.save(tmp_path / "disk", {"run": {"skipped": "[]"}, "tree": {"x": torch.ones(2), "n": 0}}, step=2, comm=COMM)
    assert go(tmp_path, until=3) == (2, [2], [2, 2])  # the newest, not the largest step


def test_before_the_first_checkpoint_and_after_the_last_step(tmp_path):
    go(tmp_path, until=2)
    assert steps_on_disk(tmp_path) == []
    assert go(tmp_path, until=3) == (2, [2], [3, 3])
    assert go(tmp_path, total=3) == (3, [], [3, 3])
    assert steps_on_disk(tmp_path) == [3]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_run_does_not_begin_anew_because_what_it_has_saved_cannot_be_opened(tmp_path, where):
    go(tmp_path, until=5)
    shutil.rmtree(tmp_path / ("disk" if where == "memory" else "memory"))
    [manifest] = (tmp_path / where).glob("step-*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-9])
    expected = rf"(?s)no save can be read\. To begin anew, remove.*{where}/step-.*manifest\.json"
    with pytest.raises(CheckpointError, match=expected):
        go(tmp_path)
    shutil.rmtree(tmp_path / where)
    assert go(tmp_path, until=1) == (0, [0], [1, 1])


def test_a_step_is_rolled_back_to_memory(tmp_path):
    assert go(tmp_path, total=8, bad_at=(6,), on_nonfinite="roll back") == (0, [0, 1, 2, 3, 4, 5, 6, 7], [7, 7])


def test_what_is_not_finite_is_not_refreshed(tmp_path):
    with pytest.raises(NonFiniteError, match=r"after 2 steps is not saved: 'x' .*the newest checkpoint is of step 1"):
        go(tmp_path, act=lambda step, x: x / (1 - step))


@pytest.mark.parametrize("ahead_s", [0, 60, 3600])
def test_a_preempted_run_goes_on_with_its_last_save_whatever_is_sent_late_and_clocks_do(tmp_path, monkeypatch, ahead_s):
    """A signal comes in step 12. The clock was ahead in step 10, whose copy is sent after the save on disk."""
    begun, send, real = threading.Event(), Replicas._exchange_copies, catalog.time.time
    begin_save = fs.checkpoint.Saver.save
    monkeypatch.setattr(Replicas, "_exchange_copies", lambda *args: (begun.wait(60), send(*args)))
    monkeypatch.setattr(fs.checkpoint.Saver, "save", lambda *args, **options: (begin_save(*args, **options), begun.set()))

    def start():
        with (
            Replicas(tmp_path / "memory", COMM, copies=0, root=tmp_path / "disk") as hosts,
            Run(
                tmp_path / "disk",
                comm=COMM,
                total=20,
                save_every=100,
                refresh_every=10,
                replicas=hosts,
                signals=(signal.SIGUSR1,),
            ) as run,
        ):
            tree, first = run.resume({"x": torch.zeros(())}), run.step
            for step in run.steps():
                if step == 9:
                    monkeypatch.setattr(catalog.time, "time", lambda: real() + ahead_s)
                if step == 10:
                    monkeypatch.setattr(catalog.time, "time", real)
                if step == 12:
                    os.kill(os.getpid(), signal.SIGUSR1)
                tree = run.end_step({"x": tree["x"] + 1})
        return first, tree["x"].item()

    with pytest.raises(SystemExit, match="75"):
        start()
    monkeypatch.setattr(catalog, "_latest_times", {}, raising=False)
    assert start() == (13, 20)
    assert start() == (20, 20), "the save after the last step is newer than the copy of step 20"


def test_what_is_refused(tmp_path):
    with (
        Replicas(tmp_path / "memory", COMM, copies=0) as replicas,
        pytest.raises(RunError, match=re.escape(f"root=None, expected that of the run: root='{tmp_path}/disk'")),
    ):
        Run(tmp_path / "disk", comm=COMM, total=1, save_every=1, replicas=replicas)
    with pytest.raises(RunError, match="refresh_every is 0, expected an integer of at least 1"):
        Run(tmp_path / "disk", comm=COMM, total=1, save_every=1, refresh_every=0)


def test_two_hosts_of_which_one_is_lost_have_the_bits_of_a_run_that_nothing_ends(tmp_path):
    def part(comm, name, until=None):
        root = tmp_path / name
        with Replicas(root / f"host-{comm.rank}", comm, copies=1, root=root / "disk") as replicas:
            _, state, done = train(comm, root / "disk", until=until, replicas=replicas, refresh_every=1)
        return values(state), done

    def run(comm):
        expected, _ = part(comm, "whole")
        part(comm, "parts", until=7)
        if comm.rank == 0:
            shutil.rmtree(tmp_path / "parts" / "host-0")
        got, done = part(comm, "parts")
        return done, all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))

    assert processes(DP2, run) == [([7, 8], True)] * 2
