"""One process of one part; the launcher starts as many as there are ranks, and reads what rank 0 writes."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

import fsharp as fs
from benchmarks import alternating, calls, checkpoint, compile, host, interop, memory, prediction, small, steps, tuning
from benchmarks.options import Options, parse


def run(part: str, options: Options, comm: fs.Comm) -> dict[str, Any]:
    """Measure one part."""
    console = Console(quiet=comm.rank != 0, highlight=False, soft_wrap=True)
    name, _, rest = part.partition(":")

    def say(text: str) -> None:
        console.print(f"{name}: {text}", markup=False)

    if name == "rss":
        return memory.measure_rss(options, comm, rest)
    if name == "checkpoint_rss":
        return checkpoint.measure_rss(options, comm, rest)
    parts: dict[str, Any] = {"steps": steps, "small": small, "alternating": alternating, "optax": interop, "tune": tuning}
    parts |= {"prediction": prediction, "compile": compile, "host": host, "calls": calls}
    parts |= {"memory": memory, "checkpoint": checkpoint}
    return dict(parts[name].measure(options, comm, say))


@record  # tells the launcher what went wrong
def main() -> None:
    """Join the other processes, measure, write."""
    part, path, *argv = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")  # for the peers, which want a group even of one process
    size = dist.get_world_size()
    result = run(part, parse(argv), fs.connect(fs.Mesh({"dp": size}), device_type="cpu"))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(result))
    dist.barrier()
    fs.destroy()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        sys.exit(1)  # the launcher prints the error, once
