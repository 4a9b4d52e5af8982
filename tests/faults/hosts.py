"""Two hosts on one machine: network namespaces joined by a link that can be cut, and ranks that run in them as processes.

A link that is cut drops whatever is sent, both ways, and nobody is told: as if the other host had lost its power.
"""

import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fsharp as fs

_processes = multiprocessing.get_context("fork")  # from a test that is forked, whose process has imported torch
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>


class Hosts:
    """Two namespaces, whose addresses are 10.0.0.1 and 10.0.0.2 on the interface ``veth0``.

    Attributes:
        names: of the namespaces.
    """

    def __init__(self) -> None:
        self.names = tuple(f"fsharp-{os.getpid()}-{i}" for i in range(2))
        self._is_cut = False

    def make(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        a, b = self.names
        _ip("link", "add", "veth0", "netns", a, "type", "veth", "peer", "name", "veth0", "netns", b)
        for i, name in enumerate(self.names):
            _ip("-n", name, "address", "add", f"10.0.0.{i + 1}/24", "dev", "veth0")
            for interface in ("lo", "veth0"):
                _ip("-n", name, "link", "set", interface, "up")

    def cut(self) -> None:
        self._is_cut = True
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "blackhole")

    def restore(self) -> None:
        if self._is_cut:
            self._is_cut = False
            for name in self.names:
                _run("tc", "-n", name, "qdisc", "delete", "dev", "veth0", "root")

    def remove(self) -> None:
        made = _run("ip", "netns", "list")
        for name in self.names:
            if name in made:
                _ip("netns", "delete", name)

    def sockets(self) -> list[str]:
        """TCP connections and listeners that a process has, of both; the kernel keeps others for a while."""
        found = []
        for name in self.names:
            rows = _run("ip", "netns", "exec", name, "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
            found += [row for row in rows if "address" not in row and row.split()[9] != "0"]  # the inode
        return found


def _ip(*args: str) -> str:
    return _run("ip", *args)


def _run(*command: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if found.returncode:
        raise OSError(f"{' '.join(command)}: {found.stderr.strip()}")
    return found.stdout


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two of them; skips the test where this process may not make any."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces take root, and ip and tc of iproute2")
    hosts = Hosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


class End(NamedTuple):
    """How a rank has ended.

    Attributes:
        exitcode: of its process; negative, the signal that killed it.
        result: what its program returned, or None.
        error: name of the class of the error it raised, or "".
        text: of that error.
        ended_s: seconds from the fault to the end of the process.
    """

    exitcode: int
    result: Any
    error: str
    text: str
    ended_s: float


class Job:
    """Ranks of one job, each a process.

    Args:
        folder: for what they leave.
        size: number of ranks.
        program: ``program(comm, step_done, **options)``, a function of a module; it calls ``step_done()`` after each step.
        hosts: where they run, the first half of them in the first one; None: all on this machine.
        limit_s: the ``timeout`` of ``init_process_group``.
        options: of the program.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        program: Callable[..., Any],
        *,
        hosts: Hosts | None = None,
        limit_s: float,
        **options: Any,
    ) -> None:
        self.folder, self._since = folder, time.monotonic()
        (folder / "temporary").mkdir(parents=True)
        here = {"MASTER_ADDR": "10.0.0.1" if hosts else "127.0.0.1", "MASTER_PORT": "29400" if hosts else str(_free_port())}
        self.ranks = []
        for rank in range(size):
            namespace = hosts.names[rank * 2 // size] if hosts else None
            args = (folder, rank, size, program, namespace, here, limit_s, options)
            self.ranks.append(_processes.Process(target=_run_rank, args=args))
            self.ranks[-1].start()

    def wait_for_step(self, number: int) -> None:
        """Block until each rank has made as many steps."""
        deadline = time.monotonic() + 60
        while min(self.num_steps(rank) for rank in range(len(self.ranks))) < number:
            assert time.monotonic() < deadline, self.logs()
            assert all(rank.is_alive() for rank in self.ranks), self.logs()
            time.sleep(0.002)

    def num_steps(self, rank: int) -> int:
        """How many a rank has made."""
        path = self.folder / f"steps-{rank}"
        return path.stat().st_size if path.exists() else 0

    def fault(self) -> None:
        """Times are taken from here."""
        self._since = time.monotonic()

    def send(self, rank: int, sign: signal.Signals) -> None:
        """Send a signal to a rank."""
        self.fault()
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, sign)

    def ends(self, ranks: list[int] | None = None, *, within_s: float) -> list[End]:
        """How ranks have ended; fails if one has not after as many seconds from the fault."""
        found: dict[int, float] = {}
        awaited = range(len(self.ranks)) if ranks is None else ranks
        while len(found) < len(awaited):
            now = time.monotonic() - self._since
            for rank in awaited:
                if rank not in found and not self.ranks[rank].is_alive():
                    found[rank] = now
            assert now < within_s, f"ranks {sorted(set(awaited) - found.keys())} run on after {now:.1f} s:\n{self.logs()}"
            time.sleep(0.005)
        return [self._end(rank, found[rank]) for rank in awaited]

    def _end(self, rank: int, ended_s: float) -> End:
        path = self.folder / f"end-{rank}"
        result, error, text = json.loads(path.read_text()) if path.exists() else (None, "", "")
        code = self.ranks[rank].exitcode
        assert code is not None
        return End(code, result, error, text, ended_s)

    def logs(self) -> str:
        """What ranks have printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.folder.glob("log-*")))

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _run_rank(
    folder: Path,
    rank: int,
    size: int,
    program: Callable[..., Any],
    namespace: str | None,
    here: dict[str, str],
    limit_s: float,
    options: dict[str, Any],
) -> None:
    import atexit
    from datetime import timedelta

    import torch.distributed as dist

    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    interface = "lo"
    if namespace is not None:
        interface = "veth0"
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    os.environ.update(here | {"RANK": str(rank), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": interface})
    os.environ["TMPDIR"] = str(folder / "temporary")
    end: tuple[Any, str, str] = (None, "", "")
    with (folder / f"steps-{rank}").open("ab", buffering=0) as steps:
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
            comm = fs.connect(fs.Mesh({"dp": size}), device_type="cpu")
            try:
                end = (program(comm, lambda: steps.write(b"."), **options), "", "")
            except Exception as error:
                end = (None, type(error).__name__, str(error))
                raise
            finally:
                (folder / f"end-{rank}").write_text(json.dumps(end))
                fs.destroy()
        except Exception:
            traceback.print_exc()
    atexit._run_exitfuncs()  # a process of multiprocessing ends without
