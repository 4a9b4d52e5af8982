"""The launcher: starts the processes of each part as torchrun does, then puts the results together."""

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import PARTS, Options, parse

RSS = ("DDP", "FSDP2", "fsharp ddp", "fsharp zero3")
"""Who has processes of its own for the operating system's view of memory."""
CHECKPOINT_RSS = ("fsharp", "DCP")
"""The same, of checkpoints."""


class PartFailed(Exception):
    """A part whose processes failed."""


def launch(part: str, nproc: int, argv: list[str]) -> dict[str, Any]:
    """Run a part and return what rank 0 wrote. PartFailed has what the first process that failed said."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from fsharp.resilience.launching import local_launch_config

    with tempfile.TemporaryDirectory(prefix="fsharp-bench-") as folder:
        path = Path(folder, "result.json")
        try:
            elastic_launch(local_launch_config(nproc), sys.executable)("-u", "-m", "benchmarks.worker", part, str(path), *argv)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            message = failure.message
            if isinstance(message, dict):
                print(message["extraInfo"]["py_callstack"].rstrip(), file=sys.stderr)
                message = message["message"]
            raise PartFailed(f"{part}: rank {rank} of {nproc} failed: {message}") from None
        return dict(json.loads(path.read_text()))


def measure(options: Options, argv: list[str]) -> dict[str, Any]:
    """All parts that were asked for."""
    parts: dict[str, Any] = {}
    for name in PARTS:
        if name not in options.only:
            continue
        if name == "rss":
            parts[name] = rss("rss", RSS, options, argv)
        elif name in ("steps", "small"):
            from benchmarks.steps import pooled

            found = [launch(name, options.nproc, argv) for _ in range(options.launches)]
            parts[name] = pooled(found) if name == "steps" else {key: pooled([each[key] for each in found]) for key in found[0]}
        elif name == "tune":
            from benchmarks.tuning import merged

            parts[name] = merged([launch(name, options.nproc * i, argv) for i in (1, 2)])
        elif name == "checkpoint":
            parts[name] = launch(name, options.nproc, argv)
            parts[name]["rss"] = rss("checkpoint_rss", CHECKPOINT_RSS, options, argv)
        else:
            parts[name] = launch(name, 1 if name in ("host", "compile") else options.nproc, argv)
    return parts


def rss(part: str, contenders: Sequence[str], options: Options, argv: list[str]) -> dict[str, Any]:
    """Each contender in fresh processes, in which what is freed goes back to the operating system at once."""
    if not Path("/proc/self/clear_refs").exists():
        return {}
    tuning = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    os.environ.update(tuning)
    try:
        found = [launch(f"{part}:{name}", options.nproc, argv) for name in contenders]
    finally:
        for name in tuning:
            del os.environ[name]
    return {name: row for each in found for name, row in each.items()}


def main(argv: list[str]) -> int:
    """Measure and report; the exit status."""
    options = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.CRITICAL)  # the agent's account of a failure; ours is below
    from benchmarks import report

    if options.docs and options.runs_all:
        report.around(options.docs)  # raises now, and not at the end
    began = time.monotonic()
    try:
        parts = measure(options, argv)
    except PartFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.report(options, parts, seconds=time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
