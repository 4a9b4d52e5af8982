"""kill -9 at every call of a save that changes the file system, at random moments, and in a load."""

import os
import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsharp as fs
from fsharp.errors import CommError
from fsharp.testing import processes
from tests.faults.registry import Outcome, row
from tests.faults.trees import ONE, latest_step, left_behind, new_root, refusal, save, step_in, tree_of

CHANGES = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")
TWO = fs.Mesh({"dp": 2})
SAVED = "saved"
"""File in a root: a byte for each save that has returned."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesAt:
    """Counts calls of ``os`` functions of this process, and kills it in place of the n-th; a write is cut in half before.

    Args:
        at: number of the call; -1 lets it live.
        names: of the functions.
    """

    def __init__(self, at: int, names: tuple[str, ...] = CHANGES) -> None:
        self.at, self.count = at, 0
        for name in names:
            setattr(os, name, partial(self._call, name, getattr(os, name)))

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.count == self.at:
            if name == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            die()
        self.count += 1
        return call(*args, **options)


def killed_in_a_save(root: Path, step: int, *, mesh: fs.Mesh, victim: int, at: int) -> int:
    """Save in real processes, one of which kills itself at a call; the number of calls if it lives."""

    def run(comm: Any) -> int:
        calls = DiesAt(at if comm.rank == victim else -1)
        save(root, step, comm)
        return calls.count

    if at < 0:
        return processes(mesh, run)[victim]
    refusal(lambda: processes(mesh, run), "failed", error=CommError)
    return -1


def calls_of_a_save(folder: Path, mesh: fs.Mesh, victim: int) -> int:
    return killed_in_a_save(new_root(folder), 1, mesh=mesh, victim=victim, at=-1)


def clean(root: Path) -> None:
    """What the next job does first, which leaves nothing that is not complete."""
    fs.checkpoint.Saver(root, ONE, background=False).close()
    assert [path for path in left_behind(root) if not path.endswith(SAVED)] == []


@row(2, "kill -9 in a save, fresh folder")
def in_a_fresh_folder(folder: Path, short: bool) -> Outcome:
    calls, kills = calls_of_a_save(folder, fs.Mesh({"dp": 1}), 0), 0
    for at in range(0, calls, 5 if short else 1):
        root = new_root(folder)
        assert killed_in_a_save(root, 1, mesh=fs.Mesh({"dp": 1}), victim=0, at=at) == -1
        kills += 1
        if latest_step(root) is None:
            refusal(lambda root=root: fs.checkpoint.load(root, tree_of(0, ONE), comm=ONE), "there is no checkpoint here")
        clean(root)
    return Outcome(f"nothing or all of it is there after {kills} kills", kills=kills)


@row(3, "kill -9 in a save over an older one")
def over_an_older_one(folder: Path, short: bool) -> Outcome:
    root, step, kills, lost = new_root(folder), 1, 0, 0
    save(root, step)
    for victim in range(TWO.size):
        calls = calls_of_a_save(folder, TWO, victim)
        for at in range(victim, calls, 14 if short else 1):
            assert killed_in_a_save(root, step + 1, mesh=TWO, victim=victim, at=at) == -1
            found = latest_step(root)  # asserts that its bytes are right and of one save
            lost += found not in (step, step + 1)
            step, kills = found or step, kills + 1
    clean(root)
    for seed in range(2 if short else 150):
        more = killed_at_random(new_root(folder), seed)
        lost, kills = lost + more, kills + 1
    return Outcome(f"{kills} kills, {lost} lost, none mixed", kills=kills, lost=lost)


def save_until_killed(comm: Any, root: Path, seed: int) -> None:
    """Save step after step, by both ways; this rank, the other one or both are killed at a moment that a seed decides."""
    draw = random.Random(seed)
    delay, victims = draw.expovariate(1 / 0.15), draw.choice([(0,), (1,), (0, 1)])
    saver = fs.checkpoint.Saver(root, comm, keep=2, background=True) if draw.random() < 0.5 else None
    if comm.rank in victims:
        threading.Timer(delay, die).start()
    saved = os.open(root / SAVED, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(2, 10_000):
        if saver is None:
            save(root, step, comm)
        else:
            saver.save(tree_of(step, comm), step=step)
            saver.wait()
        if comm.rank == 0:
            os.write(saved, b".")


def killed_at_random(root: Path, seed: int) -> int:
    """How many saves that had returned were lost, 0 or 1."""
    save(root, 1)
    (root / SAVED).write_bytes(b"")
    refusal(lambda: processes(TWO, partial(save_until_killed, root=root, seed=seed)), "failed", error=CommError)
    returned = 1 + len((root / SAVED).read_bytes())
    found = latest_step(root)
    for each in fs.checkpoint.list_checkpoints(root):
        step_in(each)
    clean(root)
    return int(found is None or found < returned)


@row(4, "kill -9 in a load")
def in_a_load(folder: Path, short: bool) -> Outcome:
    root = new_root(folder)
    processes(TWO, partial(save, root, 1))

    def load(comm: Any, at: int) -> int:
        calls = DiesAt(at if comm.rank == 1 else -1, ("preadv",))
        got = fs.checkpoint.load(root, tree_of(0, comm), comm=comm)
        assert got["plain"].unique().tolist() == [1]
        return calls.count

    kills = range(0, processes(TWO, partial(load, at=-1))[1], 4 if short else 1)
    for at in kills:
        refusal(lambda at=at: processes(TWO, partial(load, at=at)), "could not exchange data with rank 1", error=CommError)
        assert latest_step(root) == 1
    processes(TWO, partial(load, at=-1))
    return Outcome(f"the other rank names it, {len(kills)} times; the checkpoint is as before", kills=len(kills))
