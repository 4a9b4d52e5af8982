"""The subcommands ``doctor`` and ``report``."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import fsharp
from fsharp.functional.layout.text import align_columns
from fsharp.report.page import report as write_report

PACKAGES = (
    "optree",
    "numpy",
    "jax",
    "optax",
    "flax",
    "equinox",
    "orbax-checkpoint",
    "torchopt",
    "transformer_engine",
    "torchao",
)
"""Optional packages of fsharp."""


def doctor() -> str:
    """Show the versions, processors, GPUs and backends that fsharp finds on this machine."""
    rows = [("fsharp", fsharp.__version__), ("python", platform.python_version()), ("torch", torch.__version__)]
    rows += [(name, _version(name)) for name in PACKAGES]
    rows.append(("processors", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"))
    cuda = torch.get_device_module("cuda")
    gpus = [cuda.get_device_name(i) for i in range(cuda.device_count())]
    rows.append(("GPUs", ", ".join(gpus) or "none: streams, CUDA graphs and TransformerEngine's kernels need one"))
    backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    rows.append(("backends", ", ".join(name for name, is_there in backends.items() if is_there)))
    limit = Path("/proc/sys/kernel/threads-max")
    rows.append(("threads at most", limit.read_text().strip() if limit.exists() else "unknown"))
    return "\n".join(align_columns(rows))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def report(run_dir: str, /, *, out: str = "") -> str:
    """Write one HTML file about a run: loss, throughput, a step's timeline and memory, layout, slow ranks, faults and versions.

    The file needs no network and no other file.

    Args:
        run_dir: folder with the run's checkpoints and log.jsonl.
        out: path of the file; report.html in the folder by default.
    """
    return f"wrote {write_report(run_dir, out or None)}"
