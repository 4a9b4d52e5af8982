"""The command ``fsharp``. Each subcommand is a function that returns the text to print.

The command needs no process group, and of other packages tyro: ``pip install 'fsharp[cli]'``.
"""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Union

import torch

import fsharp
from fsharp.checkpoint import checkpoints, open_checkpoint, prune, verify
from fsharp.checkpoint.catalog import problems_of
from fsharp.errors import FsharpError
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.text import columns, nbytes_text

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
"""Packages that parts of fsharp work with."""


def list_checkpoints(root: str, /) -> str:
    """List the complete checkpoints in a folder, the newest first, and the problems of all other checkpoints.

    Args:
        root: folder of the checkpoints.
    """
    rows = [("step", "saved, UTC", "ranks", "tensors", "bytes", "metric", "path")]
    for each in checkpoints(root):
        made = each.manifest
        when = datetime.fromtimestamp(made.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
        metric = "" if made.metric is None else f"{made.metric:g}"
        rows.append(
            (str(made.step), when, str(len(made.files)), str(len(each.names)), nbytes_text(made.nbytes), metric, each.path)
        )
    found = columns(rows, right={0, 2, 3, 4, 5}) if len(rows) > 1 else ["no complete checkpoint"]
    return "\n".join([*found, *problems_of(os.path.abspath(root))])


def show(path: str, /) -> str:
    """Show the tensors and values of a checkpoint, and where it comes from.

    Args:
        path: a checkpoint: a folder, or a file or folder of another library.
    """
    found = open_checkpoint(path)
    made = found.manifest
    about = [("step", made.step), ("ranks", len(made.files)), ("mesh", dict(made.mesh)), ("versions", dict(made.versions))]
    about += [("bytes", nbytes_text(made.nbytes)), ("metric", made.metric), ("config", made.config)]
    rows = [("tensor", "dtype", "shape")]
    for name in found.names:
        stored = made.aliases.get(name, name)
        record = made.tensors[stored]
        rows.append((name, dtype_name(record.dtype), str(list(record.shape)) + (f" = {stored}" if stored != name else "")))
    values = [("value", "")] + [(name, repr(value)) for name, value in sorted(made.values.items())]
    parts = [columns([(name, str(value)) for name, value in about if value is not None]), columns(rows), columns(values)]
    return "\n\n".join("\n".join(part) for part in parts if len(part) > 1)


def verify_checkpoints(paths: tuple[str, ...], /) -> str:
    """Compare checkpoints with their digests: every byte is read.

    Args:
        paths: the checkpoints.
    """
    return "\n".join(f"{verify(path)!r} is intact" for path in paths)


def diff(first: str, second: str, /, *, values: bool = True) -> str:
    """List the differences between two checkpoints: missing tensors (-), new ones (+), and changed ones (~).

    Args:
        first: a checkpoint.
        second: another one.
        values: compare the values of tensors; each is read whole.
    """
    one, other = open_checkpoint(first), open_checkpoint(second)
    lines = [f"- {name}" for name in one.names if name not in other.names]
    lines += [f"+ {name}" for name in other.names if name not in one.names]
    for name in one.names:
        if name not in other.names:
            continue
        a, b = (each.manifest.tensors[each.manifest.aliases.get(name, name)] for each in (one, other))
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            shapes = (f"{dtype_name(x.dtype)}{list(x.shape)}" for x in (a, b))
            lines.append(f"~ {name}: {' -> '.join(shapes)}")
        elif values and not _is_same(x := one.tensor(name), y := other.tensor(name)):
            furthest = (x.double() - y.double()).abs().max().item() if not x.is_complex() else (x - y).abs().max().item()
            lines.append(f"~ {name}: the largest difference is {furthest:.3g}")
    told = one.manifest.values, other.manifest.values
    changed = sorted(name for name in told[0].keys() | told[1].keys() if told[0].get(name) != told[1].get(name))
    lines += [f"~ {name}: {told[0].get(name)!r} -> {told[1].get(name)!r}" for name in changed]
    return "\n".join(lines or ["no difference"])


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have equal bytes."""
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (x, y)))


def prune_checkpoints(root: str, /, *, keep: int, best: int = 0, keep_steps: int | None = None) -> str:
    """Remove old checkpoints.

    Args:
        root: folder of the checkpoints.
        keep: number of newest checkpoints to keep.
        best: number of checkpoints with the lowest metric to keep as well.
        keep_steps: keep the last checkpoint of each interval of so many steps as well.
    """
    removed = prune(root, keep=keep, best=best, keep_steps=keep_steps)
    return "\n".join(f"removed {path}" for path in removed) or "nothing to remove"


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
    return "\n".join(columns(rows))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


_ABOUT = "Look at checkpoints of fsharp, and at this machine. No process group is needed."
CHECKPOINTS: dict[str, Callable[..., str]] = {
    "list": list_checkpoints,
    "show": show,
    "verify": verify_checkpoints,
    "diff": diff,
    "prune": prune_checkpoints,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 for an error, and 2 for a bad command line."""
    try:
        import tyro
    except ImportError:
        print("error: the command needs tyro: pip install 'fsharp[cli]'", file=sys.stderr)
        return 1
    conf: Any = tyro.conf

    def choice(functions: dict[str, Callable[..., str]]) -> Any:
        return Union[tuple(Annotated[Any, conf.subcommand(name, constructor=fn)] for name, fn in functions.items())]  # noqa: UP007

    def ckpt(command: Any) -> str:
        """Look at checkpoints, compare them with their digests or with each other, and remove old ones."""
        return str(command)

    ckpt.__annotations__["command"] = conf.OmitSubcommandPrefixes[choice(CHECKPOINTS)]
    try:
        print(tyro.cli(choice({"ckpt": ckpt, "doctor": doctor}), prog="fsharp", description=_ABOUT, args=argv))
    except (FsharpError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
