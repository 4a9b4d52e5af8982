"""Disks that are full or read-only, and saves that fail for reasons of one rank or one thread."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fsharp as fs
from fsharp.checkpoint import saving
from fsharp.checkpoint.shard_file import write_file
from fsharp.errors import AgreementError
from fsharp.testing import processes, simulate
from tests.faults.registry import NotTried, Outcome, row
from tests.faults.trees import ONE, latest_step, left_behind, new_root, refusal, save, tree_of

TWO = fs.Mesh({"dp": 2})
ROWS = 40_000
"""Of 280 bytes: more than fits."""


def can_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


mounts = pytest.mark.skipif(not can_mount(), reason="mounts file systems, which only root can")


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory of its own."""
    root = new_root(folder)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", root], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)


def without_looking(*_: Any) -> None:
    """In the place of the look at what is free: the room is gone a moment later."""


@row(11, "disk full")
def full_disk(folder: Path, short: bool) -> Outcome:
    if not can_mount():
        raise NotTried("only root can mount a disk that is full")
    for options in ("size=8m", "size=64m,nr_inodes=11"):
        with mounted(folder, options) as root:
            simulate(TWO, lambda comm, root=root: save(root, 1, comm))
            simulate(TWO, lambda comm, root=root: save(root, 2, comm))
            if options == "size=8m":
                simulate(TWO, lambda comm, root=root: save_large(root, comm, "bytes are free"))
            with mock.patch.object(saving, "check_free_space", without_looking):
                simulate(TWO, lambda comm, root=root: save_large(root, comm, "No space left on device"))
                large = tree_of(3, ONE, rows=ROWS)
                for background in (False, True):
                    with fs.checkpoint.Saver(root, ONE, background=background) as saver:
                        refusal(lambda s=saver: (s.save(large, step=3), s.wait()), "No space left")
            assert latest_step(root) == 2
            assert left_behind(root) == []
    return Outcome("said on every rank; the one before stays, and nothing else")


def save_large(root: Path, comm: Any, *words: str) -> str:
    def act() -> Any:
        return fs.checkpoint.save(root, tree_of(3, comm, rows=ROWS), step=3, comm=comm)

    return refusal(act, *words, error=fs.errors.FsharpError)


UNAWAITED = """
import sys
import fsharp as fs
from tests.faults.trees import tree_of
root, how = sys.argv[1:]
def train():
    saver = fs.checkpoint.Saver(root, fs.SingleComm())
    saver.save(tree_of(1, fs.SingleComm()), step=1)
    saver.wait()
    fs.checkpoint.storage.LocalStorage.append_to_new_file = None  # no file can be opened any more
    saver.save(tree_of(2, fs.SingleComm()), step=2)
    if how == "check":
        while saver.is_busy:
            pass
        saver.raise_if_failed()
    if how == "next":
        saver.save(tree_of(3, fs.SingleComm()), step=3)
    return saver if how == "held" else None
kept = train()
print("trained")
"""


@row(12, "a failure in a background save that nobody awaits")
def unawaited(folder: Path, short: bool) -> Outcome:
    for how in ("dropped",) if short else ("dropped", "held", "check", "next"):
        root = new_root(folder)
        done = subprocess.run([sys.executable, "-c", UNAWAITED, str(root), how], capture_output=True, text=True, timeout=100)
        assert done.returncode == 1, (how, done)
        assert "CheckpointError: the save that was under way has failed" in done.stderr, (how, done.stderr)
        assert ("trained" in done.stdout) == (how in ("dropped", "held")), how
        assert latest_step(root) == 1
    return Outcome("raised by the next call, or at exit: status 1, and stderr says it")


@row(5, "exception in one rank's save")
def failing_rank(folder: Path, short: bool) -> Outcome:
    root = new_root(folder)
    processes(TWO, lambda comm: save(root, 1, comm))
    for victim in range(TWO.size):

        def run(comm: Any, victim: int = victim) -> str:
            def fail(*_: Any) -> str:
                raise ValueError("the disk of this rank is odd")

            with mock.patch.object(saving, "write_file", fail if comm.rank == victim else write_file):
                try:
                    save(root, 2, comm)
                except (ValueError, AgreementError) as error:
                    return str(error)
            return "saved"

        said = processes(TWO, run)
        assert "the disk of this rank is odd" in said[victim]
        assert f"failed on rank {victim}" in said[1 - victim]
        assert latest_step(root) == 1
        assert left_behind(root) == []
    return Outcome("raised on every rank, the rank is named, its folder is gone")


@row(6, "exception in a writer thread, or one that writes wrongly")
def failing_thread(folder: Path, short: bool) -> Outcome:
    root = new_root(folder)
    save(root, 1)

    def fail(*_: Any) -> str:
        raise OSError(5, "Input/output error")

    def wrong(write: Callable[[memoryview], None], *rest: Any) -> str:
        def flipped(data: memoryview) -> None:
            write(memoryview(bytes([data[0] ^ 1]) + bytes(data[1:])) if len(data) > 1000 else data)

        return write_file(flipped, *rest)

    for broken, words in ((fail, "Input/output error"), (wrong, "do not read back")):
        with mock.patch.object(saving, "write_file", broken):
            saver = fs.checkpoint.Saver(root, fs.SingleComm())
            saver.save(tree_of(2, fs.SingleComm()), step=2)
            refusal(saver.close, words)
        assert latest_step(root) == 1
        assert left_behind(root) == []
    return Outcome("the save fails, by what was written being read back; nothing of it is left")
