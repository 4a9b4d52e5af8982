"""launch: run a function in several processes of this machine, from a script or a notebook."""

import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from fsharp.errors import CommError, OptionError
from fsharp.functional.comm.process_group import destroy
from fsharp.type_checks import options_checked

R = TypeVar("R")

_PROCESS = f"from {__name__} import _main; _main()"
"""The program of each process. With ``-m`` Python would warn: the package has imported this file before the file is run."""


@options_checked
def launch(fn: Callable[..., R], nproc: int, *args: Any) -> list[R]:
    """Run ``fn(*args)`` in ``nproc`` processes of this machine, as torchrun starts them. Return the results in order of rank.

    In these processes :func:`~fsharp.connect` finds the other ranks. A process that torchrun has started runs ``fn`` itself,
    so a script that calls ``launch`` works under torchrun, too. With ``nproc=1`` this process runs ``fn``.

    >>> import fsharp as fs
    >>> fs.launch(lambda: fs.connect(fs.Mesh({"dp": 1})).rank, 1)
    [0]

    Args:
        fn: any function that cloudpickle can send, such as one defined in a notebook.
        nproc: number of processes.
        args: arguments of the function.

    Raises:
        OptionError: fewer than one process.
        CommError: a process failed; the others are ended. The text names the rank of the first, and has its traceback.

    Cost: a new process for each rank, which imports torch: some seconds.
    """
    if nproc < 1:
        raise OptionError(f"launch(): nproc is {nproc}, expected 1 or more.")
    if nproc == 1 or "RANK" in os.environ:
        return [fn(*args)]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the agent's account of a failure, which the error below has
    with tempfile.TemporaryDirectory(prefix="fsharp-") as folder, _own_signals():
        Path(folder, "call").write_bytes(pickle.dumps(sys.path) + cloudpickle.dumps((fn, args)))
        try:
            elastic_launch(on_this_machine(nproc), sys.executable)("-u", "-c", _PROCESS, folder)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise CommError(f"launch(): rank {rank} of {nproc} failed: {_account(failure)}") from None
        finally:
            logging.disable(disabled)
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(nproc)]


def on_this_machine(nproc: int) -> Any:
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
def _own_signals() -> Iterator[None]:
    """Restore this process's handlers of signals at the end: torch's agent leaves its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _account(failure: Any) -> str:
    """Return the traceback of a process that failed, or its exit status."""
    message = failure.message
    if isinstance(message, dict):
        return f"{message['message']}\n{message['extraInfo']['py_callstack'].rstrip()}"
    return f"exit status {failure.exitcode}" if failure.exitcode > 0 else str(message)


def _run_rank(folder: str) -> None:
    """Call the function that :func:`launch` has left in a folder, and leave the result there."""
    with Path(folder, "call").open("rb") as call:
        sys.path[:] = pickle.load(call)
        fn, args = pickle.load(call)
    try:
        result = fn(*args)
        Path(folder, f"result-{os.environ['RANK']}").write_bytes(cloudpickle.dumps(result))
    finally:
        destroy()


def _main() -> None:
    """Run a rank in a process that torch's agent has started: an error goes to the file that the agent reads."""
    from torch.distributed.elastic.multiprocessing.errors import record

    record(_run_rank)(sys.argv[1])
