"""processes: run a function as every rank of a mesh, each in a process of its own, over gloo.

[Note: launcher] Importing torch takes seconds, and a property test makes hundreds of processes. So ranks are forked from the
launcher, a process that has imported torch, does nothing else and has one thread. The launcher starts with the first call, and
ends with this process.
"""

import atexit
import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from fsharp.distributed.job import connect, destroy
from fsharp.errors import CommError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.mesh import Mesh
from fsharp.type_checks import options_checked

R = TypeVar("R")
_MAX_LOG_CHARS = 4000
_GRACE_S = 10.0  # seconds for other ranks to end after one has failed: the first rank to end need not be the first to fail


@options_checked
def processes(mesh: Mesh, fn: Callable[[Comm], R], *, timeout: float = 90.0) -> list[R]:
    """Run ``fn(comm)`` on every rank of a mesh, in real processes over gloo, and return the results in order of rank.

    ``fn`` with its closure, and results, are sent by cloudpickle. Each process has the search path, working directory and
    environment of this process, but with ``OMP_NUM_THREADS=1``. Processes are forked from one launcher, which has imported
    torch and fsharp. So addresses of objects and the order of sets are the same on all ranks. Under torchrun they are not.

    Args:
        mesh: the ranks.
        fn: function that each rank calls.
        timeout: seconds after which all processes are killed. Once a process has failed, the other ones get at most 10 seconds.

    Raises:
        CommError: a process failed, ended before ``fn`` returned, or did not end in time. All processes have ended by then. The
            message has the end of the output of a process that failed or is late.

    Cost: a fork for each rank. The first call starts the launcher, which imports torch.
    """
    return _run_ranks(_launcher, mesh, fn, timeout)


def _run_ranks(launcher: "_Launcher", mesh: Mesh, fn: Callable[[Comm], R], timeout: float) -> list[R]:
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="fsharp-") as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(mesh.size)}
        state = pickle.dumps((environment, os.getcwd(), sys.path))
        Path(folder, "payload").write_bytes(state + cloudpickle.dumps((mesh, fn)))
        problem = launcher.run(folder, mesh.size, timeout)
        if problem:
            raise CommError(f"processes(): {problem}")
        results = [Path(folder, f"result-{rank}") for rank in range(mesh.size)]
        if ended := [rank for rank, result in enumerate(results) if not result.exists()]:
            raise CommError(f"processes(): ranks {ended} ended with exit code 0 before fn returned.")
        return [cloudpickle.loads(result.read_bytes()) for result in results]


class _Launcher:
    """The process from which ranks are forked; see [Note: launcher].

    ``first`` is Python code, such as imports, that this process runs first.
    """

    def __init__(self, first: str = "") -> None:
        self._first = first
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self.abandon_server)
        self.abandon_server()

    def abandon_server(self) -> None:
        """Abandon the launcher's process without ending it. A forked process does this, as its parent owns the launcher."""
        self._lock = threading.Lock()
        self._server: subprocess.Popen[str] | None = None

    def run(self, folder: str, size: int, timeout: float) -> str:
        """Run ``size`` ranks in processes that the launcher forks.

        Return text about failed ranks; empty if all have returned. ``folder`` has the pickled function, and gets the ranks'
        results and logs.
        """
        with self._lock:
            if self._server is None:
                imports = f"{self._first}\nfrom fsharp.testing.process_ranks import _serve_requests"
                paths = list(map(str, sys.path))
                program = f"import gc, sys; gc.disable(); sys.path[:] = {paths}\n{imports}\n_serve_requests()"
                command = [sys.executable, "-c", program]
                pipe, env = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
                self._server = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
            server, answer = self._server, ""
            try:
                with suppress(BrokenPipeError):
                    print(json.dumps((folder, size, timeout)), file=server.stdin, flush=True)
                    answer = server.stdout.readline() if server.stdout is not None else ""
            finally:
                if not answer:  # the call was interrupted, or the launcher has ended: end it and its ranks
                    self._server = None
                    with suppress(ProcessLookupError):
                        os.killpg(server.pid, signal.SIGKILL)
                    _end_launcher(server)
            return str(json.loads(answer)) if answer else "the process that starts the ranks has ended."

    def close(self) -> None:
        """End the launcher's process."""
        if self._server is not None:
            _end_launcher(self._server)


def _end_launcher(server: "subprocess.Popen[str]") -> None:
    with suppress(BrokenPipeError), server:
        pass


_launcher = _Launcher()


def _serve_requests() -> None:
    """Serve requests to run ranks, one in each line of standard input, until standard input ends."""
    gc.freeze()  # ranks share what is imported: else each collection in a rank would look at all of it, and copy its pages
    gc.enable()
    for line in sys.stdin:
        folder, size, timeout = json.loads(line)
        print(json.dumps(_fork_ranks(Path(folder), size, timeout)), flush=True)


def _fork_ranks(folder: Path, size: int, timeout: float) -> str:
    running: list[BaseProcess] = []
    try:
        for rank in range(size):
            running.append(multiprocessing.get_context("fork").Process(target=_run_rank, args=(folder, rank)))
            running[-1].start()
        return _wait_for_ranks(running, [folder / f"log-{rank}" for rank in range(size)], timeout)
    finally:
        for process in running:
            if process.pid is not None:
                process.kill()
                process.join()


def _wait_for_ranks(running: Sequence[BaseProcess], logs: list[Path], timeout: float) -> str:
    deadline, parent = time.monotonic() + timeout, os.getppid()
    while any(process.exitcode is None for process in running):
        if any(process.exitcode for process in running):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline or os.getppid() != parent:
            break
        time.sleep(0.005)
    if failed := [rank for rank, process in enumerate(running) if process.exitcode]:
        return f"ranks {failed} failed.\n" + _log_tails(failed, logs)
    if alive := [rank for rank, process in enumerate(running) if process.exitcode is None]:
        return f"ranks {alive} did not end within {timeout:g} s.\n" + _log_tails(alive, logs)
    return ""


def _log_tails(ranks: list[int], logs: list[Path]) -> str:
    shown = {rank: logs[rank].read_text(errors="replace")[-_MAX_LOG_CHARS:] if logs[rank].exists() else "" for rank in ranks}
    return "\n".join(f"--- rank {rank}\n{text}" for rank, text in shown.items())


def _run_rank(folder: Path, rank: int) -> None:
    import cloudpickle

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with (folder / "payload").open("rb") as payload:
        environment, cwd, sys.path[:] = pickle.load(payload)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment | {"RANK": str(rank)})
        mesh, fn = pickle.load(payload)
    if mesh.size > 1:
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=mesh.size)
    try:
        result: Any = fn(connect(mesh, device_type="cpu"))
        (folder / f"result-{rank}").write_bytes(cloudpickle.dumps(result))
    finally:
        destroy()
