"""The subcommand ``doctor``: what this machine has, and which parts of fsharp work on it."""

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

import fsharp
from fsharp.functional.layout.text import align_columns, nbytes_text

EXTRAS = {
    "optax and JAX": ("jax", ("jax", "optax")),
    "Orbax checkpoints": ("orbax", ("orbax-checkpoint",)),
    "TorchOpt optimizers": ("torchopt", ("torchopt",)),
    "accelerate and transformers' Trainer": ("huggingface", ("accelerate", "transformers")),
    "Lightning": ("lightning", ("lightning",)),
    "pictures": ("train", ("matplotlib",)),
}
"""For each feature that needs optional packages: the name of the extra, and the packages."""
PACKAGES = ("optree", "numpy", "flax", "equinox", "transformer_engine", "torchao")
"""Further packages whose versions are shown."""
TESTED = (2, 11), (2, 15)
"""The oldest and the newest torch that the tests pass with."""

Row = tuple[str, str]


def doctor() -> str:
    """Show versions, processors, GPUs, links and limits of this machine, and which parts of fsharp work on it."""
    sections = {"versions": _versions(), "hardware": _hardware(), "limits": _limits(), "what works here": _features()}
    lines: list[str] = []
    for title, rows in sections.items():
        lines += ["", title, *(f"  {line}" for line in align_columns(list(rows)))]
    return "\n".join(lines[1:])


def _versions() -> Iterator[Row]:
    yield "fsharp", fsharp.__version__
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    yield "CUDA", torch.version.cuda or "torch was built without it"
    yield "NCCL", ".".join(map(str, _nccl_version())) or "torch was built without it"
    for name in dict.fromkeys([*PACKAGES, *(name for _, names in EXTRAS.values() for name in names)]):
        yield name, _version_or_empty(name) or "not installed"


def _hardware() -> Iterator[Row]:
    yield "processors", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    yield "memory", nbytes_text(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    cuda: Any = torch.get_device_module("cuda")
    gpus = _gpu_capabilities()
    if not gpus:
        yield "GPUs", "none"
    for i, gpu in enumerate(gpus):
        if isinstance(gpu, str):
            yield f"GPU {i}", f"does not work: {gpu}"
            continue
        memory = nbytes_text(cuda.get_device_properties(i).total_memory)
        yield f"GPU {i}", f"{cuda.get_device_name(i)}, {memory}, compute capability {gpu[0]}.{gpu[1]}"
    pairs = list(permutations([i for i, gpu in enumerate(gpus) if not isinstance(gpu, str)], 2))
    if pairs:
        near = sum(cuda.can_device_access_peer(i, j) for i, j in pairs)
        yield "links of GPUs", f"{near} of {len(pairs)} pairs read each other's memory"
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        yield f"InfiniBand {port.parts[-3]}", f"{_kernel_file_text(port / 'rate')}, {_kernel_file_text(port / 'state')}"
    for interface in sorted(Path("/sys/class/net").glob("*")):
        if _kernel_file_text(interface / "operstate") == "up":
            speed = _kernel_file_text(interface / "speed")
            yield f"network {interface.name}", f"{speed} Mbit/s" if speed.isdecimal() else "up, of unknown speed"


def _limits() -> Iterator[Row]:
    yield "open files", _soft_limit(resource.RLIMIT_NOFILE)
    locked = _soft_limit(resource.RLIMIT_MEMLOCK)
    yield "locked memory", f"{nbytes_text(int(locked))} (InfiniBand needs unlimited)" if locked.isdecimal() else locked
    yield "processes", _soft_limit(resource.RLIMIT_NPROC)
    yield "threads", _kernel_file_text(Path("/proc/sys/kernel/threads-max")) or "unknown"
    if Path("/dev/shm").exists():
        yield "shared memory", f"{nbytes_text(shutil.disk_usage('/dev/shm').free)} free in /dev/shm"


def _features() -> Iterator[Row]:
    """Yield a row for each feature of fsharp: its name, and ``yes`` or what is missing, such as ``no: needs a GPU``."""
    capability = max((gpu for gpu in _gpu_capabilities() if not isinstance(gpu, str)), default=(0, 0))
    no_gpu, nccl = "" if capability[0] else "a GPU", _nccl_version()
    no_nccl = no_gpu or ("" if nccl else "a torch with NCCL")
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    low, high = (".".join(map(str, each)) for each in TESTED)
    no_te = no_gpu or ("" if _version_or_empty("transformer_engine") else "pip install 'fsharp[te]'")
    needs = {
        f"this torch is one of {low} to {high}, which are tested": "" if TESTED[0] <= release <= TESTED[1] else "another torch",
        "ranks on CPUs, over gloo": "" if torch.distributed.is_gloo_available() else "a torch with gloo",
        "ranks on GPUs, over NCCL": no_nccl,
        "streams, CUDA graphs, pinned memory": no_gpu,
        'arena_memory="registered"': no_nccl or ("" if nccl >= (2, 19) else "NCCL 2.19"),
        'arena_memory="symmetric"': no_nccl or ("" if nccl >= (2, 27) else "NCCL 2.27"),
        "FP8 of TransformerEngine": no_te or ("" if capability >= (8, 9) else "compute capability 8.9"),
        "MXFP8 and NVFP4 of TransformerEngine": no_te or ("" if capability >= (10, 0) else "compute capability 10.0"),
    }
    for feature, (extra, packages) in EXTRAS.items():
        needs[feature] = "" if all(map(_version_or_empty, packages)) else f"pip install 'fsharp[{extra}]'"
    yield from ((feature, f"no: needs {need}" if need else "yes") for feature, need in needs.items())


def _gpu_capabilities() -> list[tuple[int, int] | str]:
    """Return the compute capability of each GPU, or the error of its driver for a GPU that does not work."""
    cuda: Any = torch.get_device_module("cuda")
    found: list[tuple[int, int] | str] = []
    for i in range(cuda.device_count()):
        try:
            major, minor = cuda.get_device_capability(i)
            found.append((major, minor))
        except RuntimeError as error:
            found.append(str(error).partition("\n")[0])
    return found


def _nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL that torch was built with; empty without NCCL."""
    cuda: Any = torch.get_device_module("cuda")
    return tuple(cuda.nccl.version()) if torch.distributed.is_nccl_available() else ()


def _version_or_empty(package: str) -> str:
    """Return the version of an installed package; empty if the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _soft_limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def _kernel_file_text(path: Path) -> str:
    """Return the text of a file in ``/proc`` or ``/sys``; empty if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
