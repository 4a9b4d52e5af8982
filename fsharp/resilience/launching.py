"""launch: run a function in several processes of this machine, from a script or a notebook."""

import gc
import json
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import torch

from fsharp.distributed.job import destroy
from fsharp.errors import CommError, MeshError, OptionError
from fsharp.functional.comm.agree import is_own_failure, ranks_text
from fsharp.resilience.preemption import EXIT_PREEMPTED
from fsharp.resilience.restarting import Restarter
from fsharp.tracebacks import api_boundary, hide_frames, traceback_text
from fsharp.type_checks import options_checked

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

R = TypeVar("R")


def _program_source(function: str, nproc: int) -> str:
    """Return a program that imports this module, and calls a function of it with the program's two arguments.

    In each of ``nproc`` processes torch has an equal share of this process's threads, unless ``OMP_NUM_THREADS`` is set.

    Imports make no garbage, and imported objects live as long as the process. So garbage collection waits for the end of the
    imports, and then leaves their objects out. Otherwise garbage collection takes 0.6 of the 1.8 seconds of processor time of a
    process that does nothing else. With ``-m`` Python would warn: the package has imported this file before the file is run.
    """
    threads = max(1, torch.get_num_threads() // nproc)
    return (
        f"import gc, os, sys; gc.disable(); os.environ.setdefault('OMP_NUM_THREADS', '{threads}'); "
        f"from {__name__} import {function}; gc.freeze(); gc.enable(); "
        f"{function}(sys.argv[1], int(sys.argv[2]))"
    )


@options_checked
def launch(fn: Callable[..., R], nproc: int, *args: Any, restarts: int = 0) -> list[R]:
    """Run ``fn(*args)`` in ``nproc`` processes of this machine, and return the results in order of rank.

    Each process has the variables of torchrun with which :func:`~fsharp.connect` finds the other ranks. Torch has in each
    process an equal share of the caller's threads, unless ``OMP_NUM_THREADS`` is set. With ``nproc=1`` and no restarts the
    calling process runs ``fn``. If the calling process ends or is killed, the processes that it has started end soon
    afterwards. In a process that torchrun or another ``launch`` has started, ``launch`` starts no processes and ignores
    ``nproc``. This process runs ``fn``, and the list has only its result.

    With ``restarts`` a process that is killed, fails or hangs is restarted. The other processes keep running if they are in
    :meth:`Run.train <fsharp.resilience.Run.train>` of a ``Run(elastic=True)``. The run then continues from its newest save.
    Otherwise the other processes are restarted as well.

    >>> import fsharp as fs
    >>> fs.launch(lambda: fs.connect(fs.Mesh({"dp": 1})).rank, 1)
    [0]

    Args:
        fn: a function that cloudpickle can send, such as a function in a notebook.
        nproc: number of processes.
        args: arguments of the function.
        restarts: how often the launcher may restart processes. A process that fails before the first step of a run is not
            restarted. Once a process has returned from ``fn``, no process is restarted.

    Raises:
        OptionError: ``nproc`` or ``restarts`` is too small, or ``restarts`` is set under another launcher.
        OptionError: the function or an argument cannot be pickled.
        CommError: a process failed, and the other processes were ended. The message has the first traceback.

    Cost: some seconds, as each process imports torch. With ``restarts`` one more process, with torch, waits as a spare.
    """
    if nproc < 1:
        raise OptionError(f"launch(): nproc is {nproc}, expected 1 or more.")
    if restarts < 0:
        raise OptionError(f"launch(): restarts is {restarts}, expected 0 or more.")
    if "RANK" in os.environ and restarts:
        raise OptionError(f"launch(): restarts is {restarts}, but another launcher such as torchrun has started this process.")
    if (nproc == 1 and not restarts) or "RANK" in os.environ:
        try:
            return [fn(*args)]
        except MeshError as error:
            if nproc > 1:
                error.add_note("launch() has started no processes, as another launcher has set RANK. If none has, unset RANK.")
            raise
    with tempfile.TemporaryDirectory(prefix="fsharp-") as name:
        folder = Path(name)
        call = pickle.dumps(sys.path) + _pickled("the function or an argument", (fn, args))
        (folder / "call").write_bytes(call)
        with _restored_signal_handlers():
            if restarts:
                Restarter(folder, _program_source("_run_spare_rank", nproc), nproc, restarts).run()
            else:
                _run_without_restarts(folder, nproc)
        results = [folder / f"result-{rank}" for rank in range(nproc)]
        if missing := [rank for rank, path in enumerate(results) if not path.exists()]:
            raise CommError(f"launch(): {ranks_text(missing)} ended with exit status 0, but not by a return from the function.")
        return [pickle.loads(path.read_bytes()) for path in results]


def _run_without_restarts(folder: Path, nproc: int) -> None:
    """Run the call in ``folder`` in ``nproc`` processes of torch's agent. If one fails, end all, and raise a CommError."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    signalled = None
    with _logging_disabled:
        try:
            command = elastic_launch(local_launch_config(nproc), sys.executable)
            command("-u", "-c", _program_source("run_rank", nproc), str(folder), str(os.getpid()))
        except ChildFailedError as error:
            (rank, account), *others = _failures_likely_cause_first(folder, error.failures)
            lines = "".join(f"\nrank {other}: {text.splitlines()[0]}" for other, text in others)
            raise CommError(f"launch(): rank {rank} of {nproc} failed: {account}{lines}") from None
        except SignalException as error:
            is_ctrl_c = error.sigval == signal.SIGINT
            signalled = KeyboardInterrupt() if is_ctrl_c else SignalException(str(error), error.sigval)
        if signalled is not None:  # without the frames of torch's error, which keep its rendezvous alive
            gc.collect()  # ends the thread of the rendezvous: one that is alive at the end of Python may abort the process
            raise signalled


class _LoggingDisabled:
    """A context without log messages, for several threads at a time. The last thread that leaves restores the level."""

    def __init__(self) -> None:
        self._lock, self._num_inside, self._before = threading.Lock(), 0, 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._before = logging.root.manager.disable
                logging.disable(logging.CRITICAL)
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                logging.disable(self._before)


_logging_disabled = _LoggingDisabled()


def local_launch_config(nproc: int) -> "LaunchConfig":
    """Return torch's configuration of a job of ``nproc`` processes on this machine, without restarts."""
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )


@contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """Restore this process's signal handlers at the end of this context. Torch's agent and a Restarter replace some of them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failures_likely_cause_first(folder: Path, failures: Mapping[int, Any]) -> list[tuple[int, str]]:
    """Return each failed rank with its traceback or exit status, the likely cause first.

    First come errors that began on the rank itself. Then follow processes that ended without an error, errors about other
    ranks, and processes that torch's agent has ended. Errors of one kind are ordered by the times of their files in ``folder``.
    ``failures``: what torch's agent reports, by rank. The agent's times are whole seconds, too coarse for an order.
    """

    def notes_by_time(pattern: str) -> list[tuple[int, str]]:
        notes = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
        return [(int(path.name.rpartition("-")[2]), path.read_text("utf-8")) for path in notes]

    own, heard = notes_by_time("own-error-*"), notes_by_time("heard-error-*")
    endings = {rank: f"exit status {e.exitcode}" if e.exitcode > 0 else str(e.message) for rank, e in failures.items()}
    for rank in (rank for rank, e in failures.items() if e.exitcode == EXIT_PREEMPTED):
        endings[rank] += ": after a signal, such as SIGTERM, a run has saved. Start the program again to continue."
    silent = [(rank, ending) for rank, ending in endings.items() if rank not in dict(own + heard)]
    by_agent = [each for each in silent if failures[each[0]].exitcode == -signal.SIGTERM]
    return [*own, *(each for each in silent if each not in by_agent), *heard, *by_agent]


def run_rank(folder: str, launcher_pid: int, *, prints_error: bool = False) -> None:
    """Call the function that :func:`launch` has stored in a folder, and store its result or error in the folder.

    ``launcher_pid``: id of the process that called :func:`launch`. This process ends soon after the launcher. ``prints_error``:
    print the traceback of this rank's own error, or one line for an error of another rank. If False, only the error that the
    launcher raises has these texts.
    """
    threading.Thread(target=_exit_after_launcher, args=(folder, launcher_pid), daemon=True).start()
    rank, process = os.environ["RANK"], os.getpid()
    try:
        with Path(folder, "call").open("rb") as call:
            sys.path[:] = pickle.load(call)
            fn, args = pickle.load(call)
        result = fn(*args)
        if os.getpid() == process:
            Path(folder, f"result-{rank}").write_bytes(_pickled(f"the result, of type {type(result).__name__},", result))
    except Exception as error:
        if os.getpid() != process:
            raise
        hide_frames(error)
        whose = "own" if is_own_failure(error) else "heard"
        shown = traceback.TracebackException(type(error), error, None)  # whose text exists also if __str__ raises an error
        head, text = f"{type(error).__name__}: {shown}".splitlines()[0], traceback_text(error).rstrip()
        text = text if text.startswith(head) else f"{head}\n{text}"  # without a frame of the user's the text is the error alone
        Path(folder, f"{whose}-error-{rank}").write_text(text, "utf-8", "backslashreplace")  # before destroy() tells others
        if prints_error and whose == "own":
            raise
        if prints_error:
            print(f"launch(): rank {rank} ends because of another rank: {text.splitlines()[0]}", file=sys.stderr, flush=True)
        destroy()  # tells other ranks of this error, and not of the SystemExit
        sys.exit(1)
    finally:
        if os.getpid() == process:  # a forked child that leaves the function is not a rank: its groups have no threads
            destroy()


def _pickled(what: str, value: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise OptionError(
            f"launch(): {what} cannot be pickled: {type(error).__name__}: {error}\n"
            "Pass and return values that can be pickled, such as numbers, strings, lists or CPU tensors."
        ) from error


@api_boundary
def _run_spare_rank(folder: str, launcher_pid: int) -> None:
    """Wait for a rank's environment variables, as JSON on standard input, then call :func:`run_rank` with these arguments."""
    if environment := sys.stdin.read():
        os.environ.update(json.loads(environment))
        run_rank(folder, launcher_pid, prints_error=True)  # the launcher goes on


def _exit_after_launcher(folder: str, launcher_pid: int) -> None:
    """End this process soon after the launcher has ended, and remove the launcher's ``folder``.

    Otherwise, if the user starts the program again, this process and the new ones would write checkpoints at the same time.
    ``launcher_pid``: process id, which the launcher itself has passed. The launcher may have ended before this process asks for
    its parent.
    """
    while os.getppid() == launcher_pid:
        time.sleep(1.0)
    with suppress(OSError):  # whoever read this process's output may have ended as well
        print("launch(): the process that started the ranks has ended, so this rank ends as well.", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
