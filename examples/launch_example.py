"""Run an example in several processes, which torchrun has started, or this file starts like torchrun."""

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import tyro

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.modules.setdefault("torchao", None)  # transformers imports it if it is there, which takes seconds and prints warnings
if not torch.cuda.is_available():
    sys.modules.setdefault("transformer_engine", None)  # PEFT imports it if it is there, and fails without its compiled modules


def main(run: Callable[[Any], Any], options: type, *, nproc: int = 2, batch: int = 0) -> None:
    """``run`` with options from the command line, on each rank; in ``nproc`` processes if torchrun has started none.

    ``batch``: number of sequences in a step, of which each process has to get equally many. A mean of unequal parts would
    differ from the loss of the unsharded run.
    """
    chosen = parse(options)  # by the launcher too, so that nothing is started on a bad option
    size = int(os.environ.get("WORLD_SIZE", nproc))
    if batch % size:
        sys.exit(f"error: a step has {batch} sequences, which do not divide into equal parts for {size} processes")
    if "RANK" not in os.environ:
        sys.exit(start(nproc, os.path.abspath(sys.argv[0]), *sys.argv[1:]))
    from torch.distributed.elastic.multiprocessing.errors import record

    import fsharp as fs

    try:
        record(run)(chosen)
    except Exception as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            leave(error)
        raise
    fs.destroy()


def parse(options: type) -> Any:
    """Return the options of the command line; exit with a message if a count is too small for any example."""
    chosen = tyro.cli(options)
    for name, least in {"steps": 1, "nproc": 1, "kills": 0}.items():
        if (count := getattr(chosen, name, least)) < least:
            sys.exit(f"error: --{name} is {count}, expected at least {least}")
    return chosen


def show_losses(sharded: Any, other: Any, name: str, *, first_step: int = 0) -> None:
    """Print losses of four steps of two runs. Each run is a tensor, array or list with the losses of all steps."""
    for i in sorted({0, len(sharded) // 3, 2 * len(sharded) // 3, len(sharded) - 1}):
        print(f"step {first_step + i:3d}  loss {sharded[i]:.6f}  {name} {other[i]:.6f}")


def show(sharded: Any, other: Any, name: str, *, first_step: int = 0) -> None:
    """Print losses of two runs, each a tensor with a loss for each step, and the largest difference; on rank 0 alone."""
    if os.environ["RANK"] == "0":
        show_losses(sharded, other, name, first_step=first_step)
        print(f"largest difference between losses: {(sharded - other).abs().max():.1e}")


def leave(error: Exception) -> NoReturn:
    """End this process. The launcher prints the error of the process that ends first.

    A rank that only heard of another rank's error waits, so that the failed rank ends first.
    """
    from fsharp.errors import AgreementError, CommError

    if isinstance(error, AgreementError | CommError):
        time.sleep(2.0)
    sys.exit(1)


def start(nproc: int, *command: str, max_restarts: int = 0) -> int:
    """A Python program in ``nproc`` processes on this machine; the exit status of the first that failed, else 0.

    If one of them fails all are ended, and started again as often as ``max_restarts`` says.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the agent's account of a failure; ours is below
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
    )
    try:
        elastic_launch(config, sys.executable)("-u", *command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message  # of a signal, or a hint to use @record, or what @record wrote
        if isinstance(message, dict):
            print(message["extraInfo"]["py_callstack"].rstrip(), file=sys.stderr)
            message = message["message"]
        elif failure.exitcode > 0:
            message = f"exit status {failure.exitcode}"
        print(f"error: rank {rank} of {nproc} failed: {message}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        return 128 + error.sigval
    return 0
