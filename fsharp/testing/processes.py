"""processes: run a function as every rank of a mesh, each in a process of its own that talks over gloo."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from fsharp.functional.comm import Comm
from fsharp.functional.errors import CommError
from fsharp.functional.mesh import Mesh
from fsharp.functional.process_group import connect, destroy

R = TypeVar("R")
_SHOWN = 4000
_GRACE = 3.0  # seconds for the other ranks to fail too, once one has: the first to end need not be the first to fail


def processes(mesh: Mesh, fn: Callable[[Comm], R], *, timeout: float = 90.0) -> list[R]:
    """``[fn(comm) for every rank of mesh]``, like :func:`simulate`, but in real processes over gloo on this machine.

    Needs cloudpickle, with which ``fn`` and what it closes over travel; results travel by pickle.

    Args:
        mesh: the ranks.
        fn: what each rank does.
        timeout: seconds until all of them are killed.

    Returns:
        Results in order of rank.

    Raises:
        CommError: a process that failed, with the end of what it printed, or that did not end in time. The others are
            killed.
    """
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="fsharp-") as folder:
        payload = Path(folder, "payload")
        payload.write_bytes(cloudpickle.dumps((sys.path, mesh, fn)))
        command = [sys.executable, "-c", "from fsharp.testing.processes import _main; _main()", folder]
        env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(mesh.size)}
        logs = [Path(folder, f"log-{rank}") for rank in range(mesh.size)]
        running = []
        for rank, log in enumerate(logs):
            with log.open("wb") as out:
                running.append(subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=out, stderr=subprocess.STDOUT))
        try:
            _wait(running, logs, time.monotonic() + timeout, timeout)
        finally:
            for process in running:
                process.kill()
                process.wait()
        return [cloudpickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(mesh.size)]


def _wait(running: list["subprocess.Popen[bytes]"], logs: list[Path], deadline: float, timeout: float) -> None:
    while any(process.poll() is None for process in running):
        failed = [rank for rank, process in enumerate(running) if process.poll()]
        if failed:
            break
        if time.monotonic() > deadline:
            alive = [rank for rank, process in enumerate(running) if process.poll() is None]
            raise CommError(f"processes(): ranks {alive} did not end within {timeout:g} s.\n" + _tails(alive, logs))
        time.sleep(0.02)
    if any(process.poll() for process in running):
        deadline = time.monotonic() + _GRACE
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(0.02)
    failed = [rank for rank, process in enumerate(running) if process.poll()]
    if failed:
        raise CommError(f"processes(): ranks {failed} failed.\n" + _tails(failed, logs))


def _tails(ranks: list[int], logs: list[Path]) -> str:
    return "\n".join(f"--- rank {rank}\n{logs[rank].read_text(errors='replace')[-_SHOWN:]}" for rank in ranks)


def _main() -> None:
    import cloudpickle

    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    path, mesh, fn = cloudpickle.loads((folder / "payload").read_bytes())
    sys.path[:] = path
    if mesh.size > 1:
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=mesh.size)
    try:
        result: Any = fn(connect(mesh, device_type="cpu"))
        (folder / f"result-{rank}").write_bytes(cloudpickle.dumps(result))
    finally:
        destroy()
