"""The launcher: checks the options, then starts the processes as torchrun does."""

import logging
import os
import sys
import uuid

from examples.gpt.options import Options, parse


def launch(options: Options, argv: list[str]) -> int:
    """Run the worker in every process; the exit status of the first that failed, else 0."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the agent's account of a failure; ours is below
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "examples.gpt.worker", *argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message  # of a signal, or a hint to use @record, or what @record wrote
        if isinstance(message, dict):
            print(message["extraInfo"]["py_callstack"].rstrip(), file=sys.stderr)
            message = message["message"]
        elif failure.exitcode > 0:
            message = f"exit status {failure.exitcode}"
        _show_cursor()
        print(f"error: rank {rank} of {options.nproc} failed: {message}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        _show_cursor()
        return 128 + error.sigval
    return 0


def _show_cursor() -> None:
    """A worker that was killed could not."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)


if __name__ == "__main__":
    argv = sys.argv[1:]
    sys.exit(launch(parse(argv), argv))
