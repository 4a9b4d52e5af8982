"""Restarter: start the processes of a job, and restart processes that end early.

The Restarter hosts the job's store, in which it announces generations: see :mod:`fsharp.distributed.generations`.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fsharp.distributed.generations import (
    GENERATION_VARIABLE,
    announce_generation,
    announce_process_ended,
    can_rejoin_in_process,
    end_restarts,
    limit_s_by_joining_rank,
    shorten_error,
    stop_kinds_and_limits,
    why_restarts_ended,
)
from fsharp.errors import CommError
from fsharp.functional.comm.agree import ranks_text
from fsharp.resilience.preemption import EXIT_PREEMPTED

_SIGNAL_MESSAGE = "A signal has come: no process is restarted. Start the program again to continue."
_LOOK_EVERY_S, _ASK_EVERY_S = 0.02, 0.5
"""Seconds between two looks at the processes, and between two looks at what ranks have written to the store."""
_END_TIMEOUT_S = 10.0
"""Seconds in which processes may end by themselves once no process is restarted any more."""
_JOIN_SHARE = 0.8
"""Share of the time limit after which a process that does not join a generation is killed: other ranks wait for the limit."""
_SPARE_DELAY_S = 2.0
"""Seconds from a restart, or from the end of a spare process, to the next one: ranks that recover need the processors first."""


class Restarter:
    """Runs the call in ``folder`` in ``nproc`` processes, and replaces processes that end early, at most ``restarts`` times.

    A process ends early if it ends before the call has returned. Processes leave results and errors in the folder.

    ``program`` is the Python code of each process. Its arguments are the folder and the id of the process with the Restarter.
    The program reads the environment of a rank, in JSON, from standard input, and then runs the rank. A spare process, which
    has imported this library already, replaces a process that ended early.
    """

    def __init__(self, folder: Path, program: str, nproc: int, restarts: int) -> None:
        self._command = [sys.executable, "-u", "-c", program, str(folder), str(os.getpid())]
        self._folder, self._nproc, self._restarts = folder, nproc, restarts
        server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._port, self._store = server.port, PrefixStore("fsharp/generations", server)
        self._number, self._started_at = 0, time.monotonic()
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._done: list[int] = []
        self._preempted: list[int] = []
        self._spare: subprocess.Popen[str] | None = None
        self._late_since = dict[int, float]()
        self._hung: set[int] = set()
        self._is_signalled = False

    def run(self) -> None:
        """Run until all processes have ended. Raise a CommError if one is lost and not restarted, or exits after a signal.

        In the main thread this method sets a handler that passes SIGTERM to all processes, whose runs then save and exit. The
        caller has to restore the earlier handler.
        """
        announce_generation(self._store, 0, "")
        deadline, asked_at = float("inf"), time.monotonic()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._pass_signal_on)
        try:
            for rank in range(self._nproc):
                self._start_process(rank)
            while self._running and time.monotonic() < deadline:
                self._handle_ended_processes()
                if time.monotonic() > asked_at + _ASK_EVERY_S:
                    asked_at = time.monotonic()
                    self._kill_hung_ranks()
                    if deadline == float("inf") and why_restarts_ended(self._store):
                        deadline = asked_at + _END_TIMEOUT_S
                time.sleep(_LOOK_EVERY_S)
        finally:
            for process in [*self._running.values(), *([self._spare] if self._spare is not None else [])]:
                _kill(process)
        if why := why_restarts_ended(self._store):
            raise CommError(f"launch(): {why}")

    def _handle_ended_processes(self) -> None:
        """Begin a new generation with new processes for lost ranks. Replace a missing spare process after a delay.

        If no restart is possible, or if no process is left and some were preempted, record in the store that restarts ended.
        """
        codes = {rank: process.poll() for rank, process in self._running.items()}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        for rank in ended:
            _kill(self._running.pop(rank))  # closes its pipe
        done = [rank for rank, code in ended.items() if code == 0 and (self._folder / f"result-{rank}").exists()]
        self._done += done
        self._preempted += [rank for rank, code in ended.items() if code == EXIT_PREEMPTED]
        lost = {rank: code for rank, code in ended.items() if rank not in done and code != EXIT_PREEMPTED}
        if self._preempted and not self._running:  # not earlier: other ranks may still save
            how = f"{ranks_text(self._preempted)} ended with exit status {EXIT_PREEMPTED}."
            end_restarts(self._store, f"{how} {_SIGNAL_MESSAGE}")
        if lost and not why_restarts_ended(self._store):
            self._restart_lost_ranks(lost)
        if self._spare is not None and self._spare.poll() is not None:
            _kill(self._spare)  # closes its pipe: it has ended by itself
            self._spare, self._started_at = None, time.monotonic()
        if self._spare is None and time.monotonic() > self._started_at + _SPARE_DELAY_S:
            self._spare = self._start_idle_process()

    def _restart_lost_ranks(self, lost: Mapping[int, int]) -> None:
        """Begin a new generation with new processes for the ``lost`` ranks, given with their exit codes."""
        why = "; ".join(self._how_ended(rank, code) for rank, code in lost.items())
        if remedy := self._why_no_restart(lost):
            end_restarts(self._store, f"{why}\n{remedy}")
            return
        ranks = [*lost, *(rank for rank in self._running if not can_rejoin_in_process(self._store, rank))]
        for rank in ranks:
            if rank in self._running:
                _kill(self._running.pop(rank))
            announce_process_ended(self._store, rank)
        self._number, self._late_since, self._hung = self._number + 1, {}, set()
        begins = f"Generation {self._number} of the job begins with new {ranks_text(ranks)}."
        announce_generation(self._store, self._number, f"{why}. {begins}")
        for rank in ranks:
            self._start_process(rank)

    def _why_no_restart(self, lost: Mapping[int, int]) -> str:
        if self._is_signalled or self._preempted:
            return _SIGNAL_MESSAGE
        if self._done:
            return f"No process is restarted, as {ranks_text(self._done)} had returned. Start the program again to continue."
        if self._number >= self._restarts:
            return f"No restart is left: launch(restarts={self._restarts})."
        failed = [rank for rank, code in lost.items() if code >= 0 and not can_rejoin_in_process(self._store, rank)]
        if failed and len(failed) == len(lost):
            return "The failure came outside of the steps of a Run(elastic=True), so a new process would fail again."
        return ""

    def _how_ended(self, rank: int, code: int) -> str:
        if rank in self._hung:
            return f"rank {rank} did not stop in time after the failure of another rank, and was killed"
        if code < 0:
            names = {each.value: each.name for each in signal.Signals}  # real-time signals have no names
            return f"rank {rank} was ended by {names.get(-code, f'signal {-code}')}"
        texts = [path.read_text("utf-8") for path in self._folder.glob(f"*-error-{rank}")]
        if texts:
            return f"rank {rank} failed: {shorten_error(texts[0])}"
        return f"rank {rank} ended with exit status {code}, without a result"

    def _kill_hung_ranks(self) -> None:
        """Kill each process that has been late for longer than the time limit of collectives.

        A process is late if another process has stopped, and this process has not. A process of an earlier generation is also
        late if another process waits for it in this generation. The late process is killed before the waiting process gives up.
        """
        stopped = stop_kinds_and_limits(self._store, self._number, self._nproc)
        joining = limit_s_by_joining_rank(self._store, self._number, self._nproc)
        limits_s, now = dict[int, float](), time.monotonic()
        for rank in self._running:
            if stopped and stopped.get(rank, ("own", 0.0))[0] == "own":
                limits_s[rank] = max(limit_s for _, limit_s in stopped.values())
            elif joining and rank not in joining and can_rejoin_in_process(self._store, rank):
                limits_s[rank] = _JOIN_SHARE * max(joining.values())
        self._late_since = {rank: self._late_since.get(rank, now) for rank in limits_s}
        for rank in (rank for rank, since in self._late_since.items() if now - since > limits_s[rank]):
            self._hung.add(rank)
            self._running[rank].kill()

    def _start_process(self, rank: int) -> None:
        """Give a rank of this generation its process: the spare process, if there is one, else a new one."""
        for name in (f"own-error-{rank}", f"heard-error-{rank}"):
            (self._folder / name).unlink(missing_ok=True)
        process, self._spare = self._spare or self._start_idle_process(), None
        environment = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(self._nproc))
        environment |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default_role"}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self._port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": str(self._restarts)}
        environment |= {"TORCHELASTIC_RUN_ID": self._folder.name, GENERATION_VARIABLE: str(self._number)}
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # a process that has ended is found by the next look
            process.stdin.write(json.dumps(environment))
        self._running[rank], self._started_at = process, time.monotonic()

    def _start_idle_process(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, text=True)

    def _pass_signal_on(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True
        for process in self._running.values():
            process.send_signal(number)


def _kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with suppress(BrokenPipeError), process:  # closes its pipe, and waits for its end
        pass
