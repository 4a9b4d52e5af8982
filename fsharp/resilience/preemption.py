"""Preemption: tell all ranks, between two steps, of a signal to one process."""

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from fsharp.errors import RunError
from fsharp.functional.comm.agree import max_over_ranks
from fsharp.functional.comm.protocol import Comm, LabelPrefixComm
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

EXIT_PREEMPTED = os.EX_TEMPFAIL
"""Exit code 75, "try again later" in ``sysexits.h``. 143 would mean that SIGTERM ended the process before it saved."""


@options_checked
class Preemption:
    """Catch signals such as SIGTERM, with which a cluster announces the end of a job, and tell all ranks.

    ::

        with fs.resilience.Preemption(comm) as preemption:
            for step in range(total):
                state, metrics = train_step(state, batch(step), comm)
                if preemption.should_stop(step):
                    fs.checkpoint.save(root, state, step=step + 1, comm=comm)
                    sys.exit(fs.resilience.EXIT_PREEMPTED)

    In the context these signals are only recorded. The end of the context restores the earlier handlers. If the context ends
    without an error, and :meth:`should_stop` has not reported the received signal, the signal is raised again in this process.
    After SIGTERM torchrun waits 30 seconds for its processes, and Slurm waits for ``KillWait``. torchrun itself exits with 1,
    whatever the exit codes of its processes. If only some processes get the signal, and restarts are left, torchrun starts all
    processes again at once. In a forked process these signals have the effect that they had before the context. If a cluster
    signals all processes of a job, let the workers of a ``DataLoader`` ignore signals, by ``worker_init_fn``. Otherwise the
    workers end, and the next batch raises an error before anything is saved.

    Args:
        comm: the ranks.
        signals: the signals to catch. A context with signals can be entered in the main thread only.
        every: number of steps between two exchanges, at least 1; equal on all ranks.

    Attributes:
        received: the signal that this process has received, or None.

    Raises:
        RunError: ``every`` is less than 1, ``signals`` has SIGKILL or SIGSTOP, or the context is entered outside of the main
            thread.
    """

    def __init__(self, comm: Comm, *, signals: Sequence[signal.Signals] = (signal.SIGTERM,), every: int = 1) -> None:
        if type(every) is not int or every < 1:
            raise RunError(f"Preemption(): every is {every!r}, expected an integer of at least 1.")
        if uncatchable := {signal.SIGKILL, signal.SIGSTOP}.intersection(signals):
            raise RunError(f"Preemption(): no process catches {min(uncatchable).name}. Leave it out of signals, also of Run().")
        self.comm, self.signals, self.every = comm, tuple(dict.fromkeys(signals)), every
        self.received: signal.Signals | None = None
        self._is_told = False
        self._before: dict[signal.Signals, Any] = {}

    @api_boundary
    def should_stop(self, step: int = 0) -> bool:
        """Return whether any rank has received a signal. All ranks have to call this method, and get the same result.

        Ranks exchange their signals if ``every`` divides ``step``. For any other step the result is False, without cost. If
        ranks pass different steps, their collectives have different labels; over gloo they get an error. Cost of an exchange:
        one ``all_reduce`` of 4 bytes for each axis, for which the host waits.
        """
        if step % self.every:
            return False
        self._is_told = self.received is not None
        flag = torch.tensor([float(self._is_told)], device=self.comm.device)
        return bool(max_over_ranks(flag, LabelPrefixComm(self.comm, f"whether to stop after step {step}: ")).item())

    def record_signal(self, number: int = signal.SIGTERM) -> None:
        """Record signal ``number`` as received, for a source other than a signal, such as a cloud's metadata server."""
        self.received = signal.Signals(number)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.record_signal(number)
            return
        signal.signal(number, self._before.get(signal.Signals(number)) or signal.SIG_DFL)  # a forked child is not a rank
        signal.raise_signal(number)

    @api_boundary
    def __enter__(self) -> Self:
        """Begin to record signals."""
        if self.signals and threading.current_thread() is not threading.main_thread():
            raise RunError(
                "Preemption: signals can be caught only in the main thread, and simulated ranks run in other threads: "
                "pass signals=(), also to Run()."
            )
        self._pid = os.getpid()
        for each in self.signals:
            self._before.setdefault(each, signal.signal(each, self._handle_signal))  # the context may be entered again
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Restore the earlier handlers. Raise the received signal again if :meth:`should_stop` has not reported it."""
        while self._before:
            each, before = self._before.popitem()
            signal.signal(each, before)
        if error is None and not self._is_told and self.received in self.signals:
            signal.raise_signal(self.received)
