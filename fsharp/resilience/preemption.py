"""Preemption: all ranks hear, between two steps, of a signal to one process."""

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from fsharp.errors import RunError
from fsharp.functional.comm.agree import largest
from fsharp.functional.comm.protocol import Comm, Labelled
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

EXIT_PREEMPTED = os.EX_TEMPFAIL
"""75, "try again later" in ``sysexits.h``; not 143, with which a process that has saved nothing ends by SIGTERM."""


@options_checked
class Preemption:
    """Notes signals such as SIGTERM, by which a cluster says that it will end the job, and tells all ranks of them.

    ::

    with fs.resilience.Preemption(comm) as preemption:
        for step in range(total):
            state, metrics = train_step(state, batch(step), comm)
            if preemption.agreed(step):
                fs.checkpoint.save(root, state, step=step + 1, comm=comm)
                sys.exit(fs.resilience.EXIT_PREEMPTED)

    Within the context these signals are noted and do nothing else; after it they do what they did before, as does one that came
    too late for :meth:`agreed` to tell of it. torchrun gives its processes 30 seconds after SIGTERM, Slurm as many as
    ``KillWait`` says. torchrun itself exits with 1, whatever its processes have exited with; where only some of these get the
    signal, and it has restarts left, it starts all of them again at once. Forked processes end by these signals as ever. Where
    a cluster signals whole process groups, have the workers of a ``DataLoader`` ignore them, by ``worker_init_fn``: a step that
    has lost its worker raises an error before anything is saved.

    Args:
        comm: the ranks.
        signals: which to note. A context that notes some can only be entered in the main thread.
        every: how many steps lie between two exchanges, from 1; the same on all ranks.

    Attributes:
        received: the signal that this process has got, if it has.

    Raises:
        RunError: another ``every``; the context is entered in another thread than the main one.
    """

    def __init__(self, comm: Comm, *, signals: Sequence[signal.Signals] = (signal.SIGTERM,), every: int = 1) -> None:
        if type(every) is not int or every < 1:
            raise RunError(f"Preemption(): every is {every!r}, expected an integer of at least 1.")
        self.comm, self.signals, self.every = comm, tuple(signals), every
        self.received: signal.Signals | None = None
        self._is_told = False
        self._before: dict[signal.Signals, Any] = {}

    @api_boundary
    def agreed(self, step: int = 0) -> bool:
        """Return whether any rank has got a signal; the same answer on all ranks, which all have to ask.

        Ranks exchange what they know in steps that ``every`` divides; in others the answer is False. Ranks that ask in
        different steps raise an AgreementError. Cost: one ``all_reduce`` of 4 bytes for each axis, and a wait for its result.
        """
        if step % self.every:
            return False
        self._is_told = self.received is not None
        flag = torch.tensor([float(self._is_told)], device=self.comm.device)
        return bool(largest(flag, Labelled(self.comm, f"whether to stop after step {step}: ")).item())

    def notice(self, number: int = signal.SIGTERM) -> None:
        """Note a signal that came by other means, such as a cloud's metadata server."""
        self.received = signal.Signals(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.notice(number)
            return
        signal.signal(number, self._before.get(signal.Signals(number)) or signal.SIG_DFL)  # a forked child is no rank
        signal.raise_signal(number)

    @api_boundary
    def __enter__(self) -> Self:
        """Begin to note signals."""
        if self.signals and threading.current_thread() is not threading.main_thread():
            raise RunError(
                "Preemption: signals are noted in the main thread alone, and this is another one, as simulated ranks have: "
                "pass signals=(), also to Run()."
            )
        self._pid = os.getpid()
        for each in self.signals:
            self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Restore what signals did before."""
        while self._before:
            each, before = self._before.popitem()
            signal.signal(each, before)
        if error is None and not self._is_told and self.received in self.signals:
            signal.raise_signal(self.received)
