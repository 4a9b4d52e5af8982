"""Ranks that are killed in their first second: before ``connect``, at each stage of it, or right after it."""

import json
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import fsharp as fs
from fsharp.distributed import job_store
from tests.faults.registry import Outcome, row
from tests.forked_python import forked

SIZE = 3
LIMIT_S = 5.0
_processes = multiprocessing.get_context("fork")  # from a row that is forked, whose process has imported torch
STAGES = {
    "it has the store": (job_store, "choose_attempt_name"),
    "it has a name": (dist, "init_process_group"),
    "it has joined": (job_store, "_check_same_mesh"),
    "it has compared meshes": (job_store, "init_device_mesh"),
}
"""When a rank is killed: in the place of which function."""
MOMENTS = ("at once", *STAGES, "it is connected")


class Heard(NamedTuple):
    """What came of a rank that lives.

    Attributes:
        text: class and text of the error it raised.
        raised_s: seconds from its start to the error.
        left_s: seconds that ``destroy()`` took then.
    """

    text: str
    raised_s: float
    left_s: float


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_rank(folder: Path, rank: int, port: int, moment: str) -> None:
    """Connect and take part in one collective; a rank with a moment is killed then, or stays and does nothing."""
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    since, text = time.monotonic(), "nothing"
    with ExitStack() as stack:
        if moment == "at once":
            die()
        if moment in STAGES:
            stack.enter_context(mock.patch.object(*STAGES[moment], die))
        try:
            comm = fs.connect(fs.Mesh({"dp": SIZE}), device_type="cpu", timeout=timedelta(seconds=LIMIT_S))
            if moment == "it is connected":
                die()
            if moment == "never":
                threading.Event().wait()
            if moment != "leaves":
                comm.all_gather(torch.ones(3), "dp")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    raised = time.monotonic()
    fs.destroy()
    (folder / f"heard-{rank}").write_text(json.dumps([text, raised - since, time.monotonic() - raised]))


@contextmanager
def jobs(folder: Path, moments: dict[str, dict[int, str]]) -> Iterator[dict[str, list[Any]]]:
    """Several jobs beside each other: by name, the moments of some of their ranks; the processes of each."""
    started: dict[str, list[Any]] = {}
    try:
        for name, of_ranks in moments.items():
            (folder / name).mkdir()
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                port = found.getsockname()[1]
            args = [(folder / name, rank, port, of_ranks.get(rank, "")) for rank in range(SIZE)]
            started[name] = [_processes.Process(target=_run_rank, args=each) for each in args]
            for process in started[name]:
                process.start()
        yield started
    finally:
        for process in (process for job in started.values() for process in job):
            process.kill()
            process.join()


def heard(folder: Path, job: list[Any], rank: int) -> Heard:
    """What a rank has heard; it has to end within the limit and some seconds for a machine that is busy."""
    job[rank].join(4 * LIMIT_S + 20)
    path = folder / f"heard-{rank}"
    assert path.exists(), (folder / f"log-{rank}").read_text()[-3000:]
    return Heard(*json.loads(path.read_text()))


def assert_heard_in_time(found: Heard, more_s: float) -> None:
    assert found.text.startswith(("CommError: ", "AgreementError: ")), found
    assert found.raised_s < LIMIT_S + more_s, found
    assert found.left_s < LIMIT_S + more_s, found


def beyond_the_limit_s(short: bool) -> float:
    """Return seconds that a rank may need beside the limit; the short table may run on a machine with other work."""
    return 20.0 if short else 3.0


@row(26, "kill -9 in the first second, before and in connect")
@forked
def killed_early(folder: Path, short: bool) -> Outcome:
    chosen = [(0, "at once"), (0, "it has a name"), (1, "it has the store")]
    chosen = chosen if short else [(victim, moment) for victim in (0, 1) for moment in MOMENTS]
    for first in range(0, len(chosen), 3):  # more jobs at once are so slow that ranks reach the time limit before their moment
        moments = {f"{victim} when {moment}": {victim: moment} for victim, moment in chosen[first : first + 3]}
        with jobs(folder, moments) as started:
            for name, job in started.items():
                for rank in range(SIZE):
                    if rank not in moments[name]:
                        assert_heard_in_time(heard(folder / name, job, rank), beyond_the_limit_s(short))
                    else:
                        job[rank].join(LIMIT_S)
                        assert job[rank].exitcode == -signal.SIGKILL, (name, job[rank].exitcode)
    kills = len(chosen)
    for seed in range(0 if short else 20):
        draw = random.Random(seed)
        victim = draw.randrange(SIZE)
        with jobs(folder, {f"seed {seed}": {}}) as started:
            [job] = started.values()
            time.sleep(draw.random() * 0.5)
            job[victim].kill()
            for rank in {0, 1, 2} - {victim}:
                found = heard(folder / f"seed {seed}", job, rank)
                assert found.text == "nothing" or assert_heard_in_time(found, 3.0) is None  # it may have had all it needs
        kills += 1
    return Outcome(f"{kills} kills, each heard of within the limit and 3 s", kills=kills)


@row(27, "a rank that never leaves the job")
@forked
def never_leaves(folder: Path, short: bool) -> Outcome:
    with jobs(folder, {"stays": {0: "leaves", 1: "never", 2: "leaves"}}) as started:
        found = heard(folder / "stays", started["stays"], 0)
    assert found.text == "nothing", found
    assert LIMIT_S - 0.5 < found.left_s < LIMIT_S + beyond_the_limit_s(short), found
    return Outcome(f"rank 0 waits for it for the limit of {LIMIT_S:g} s, not longer")
