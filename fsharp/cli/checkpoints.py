"""Subcommands of ``fsharp ckpt``: each function returns the text that the command prints."""

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal

import torch

from fsharp.checkpoint import (
    Checkpoint,
    export_safetensors,
    export_torch,
    from_dcp,
    from_huggingface,
    list_checkpoints,
    open_checkpoint,
    prune,
    to_dcp,
    verify,
)
from fsharp.checkpoint.catalog import has_checkpoints, is_checkpoint, names_last_saved_first, opening_errors
from fsharp.checkpoint.manifest import MANIFEST_NAME
from fsharp.checkpoint.storage import absolute_path, storage_of
from fsharp.cli.models import parse_dtype
from fsharp.cli.numbers import check_number
from fsharp.cli.progress import files_nbytes, reading_bar
from fsharp.errors import CheckpointError, OptionError
from fsharp.functional.formats.format import as_bytes, dtype_name
from fsharp.functional.layout.text import align_columns, nbytes_text

_DCP_METADATA_FILE = ".metadata"
_FOREIGN_FOLDERS = {
    "dcp": f"a folder of torch.distributed.checkpoint, which has a file {_DCP_METADATA_FILE}",
    "orbax": "a folder that Orbax has written",
    "safetensors": "a file of safetensors, or a folder with model.safetensors",
    "torch": "a file of torch.save, or a folder with pytorch_model.bin",
}
_NO_STACKS: Mapping[str, int] = MappingProxyType({})


def checkpoint_list_text(root: str, /) -> str:
    """List the complete checkpoints in a folder, the last saved first, and the problems of all other checkpoints.

    Args:
        root: folder of the checkpoints.
    """
    _check_folder_of_checkpoints("ckpt list", root)
    rows = [("step", "saved, UTC", "ranks", "tensors", "bytes", "metric", "path")]
    for each in list_checkpoints(root):
        try:
            made = each.manifest
        except CheckpointError:  # another process has removed it since
            continue
        when = datetime.fromtimestamp(made.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
        metric = "" if made.metric is None else f"{made.metric:g}"
        sizes = str(len(made.files)), str(len(each.tensor_names)), nbytes_text(made.nbytes)
        rows.append((str(made.step), when, *sizes, metric, each.path))
    errors = opening_errors(absolute_path(root))
    if len(rows) > 1:
        return "\n".join([*align_columns(rows, right={0, 2, 3, 4, 5}), *errors])
    folder = absolute_path(root)
    inside = [f"{folder}/{name}" for name in storage_of(folder).list_names(folder)]
    others = []
    for path in [] if errors else inside:
        with suppress(CheckpointError):  # a folder that may not be read
            others += [f"There are checkpoints in {path}"] * has_checkpoints(path)
    return "\n".join(["no complete checkpoint", *errors, *others[:8]])


def _check_folder_of_checkpoints(command: str, root: str) -> None:
    if "://" not in root and not os.path.isdir(root):
        raise OptionError(f"{command}: {root!r} is not a folder. Pass the folder of the checkpoints.")
    if MANIFEST_NAME in storage_of(root).list_names(root):
        raise OptionError(f"{command}: {root!r} is a checkpoint. Pass the folder that holds the checkpoints.")


def _check_is_checkpoint(command: str, path: str) -> None:
    """Raise an OptionError if there is no checkpoint at ``path``. A damaged checkpoint raises nothing here."""
    if not is_checkpoint(path):
        inside = [f", such as {path}/{name}" for name in names_last_saved_first(absolute_path(path))[:1]]
        raise OptionError(f"{command}: {path!r} is not a checkpoint. Pass the path of one{''.join(inside)}.")


def show(path: str, /) -> str:
    """Show dtype and shape of each tensor of a checkpoint, its other values, step, mesh and config, and versions of packages.

    Args:
        path: a checkpoint: a folder, or a file or folder of another library.
    """
    _check_is_checkpoint("ckpt show", path)
    found = open_checkpoint(path)
    made = found.manifest
    about = [("step", made.step), ("ranks", len(made.files)), ("mesh", dict(made.mesh)), ("versions", dict(made.versions))]
    about += [("bytes", nbytes_text(made.nbytes)), ("metric", made.metric), ("config", made.config)]
    rows = [("tensor", "dtype", "shape")]
    for name in found.tensor_names:
        stored = made.aliases.get(name, name)
        record = made.tensors[stored]
        rows.append((name, dtype_name(record.dtype), str(list(record.shape)) + (f" = {stored}" if stored != name else "")))
    values = [("value", "")] + [(name, repr(value)) for name, value in sorted(made.values.items())]
    known = [(name, str(value)) for name, value in about if value is not None]
    return "\n\n".join("\n".join(align_columns(part)) for part in (known, rows, values) if len(part) > 1)


def verify_checkpoints(paths: tuple[str, ...], /) -> str:
    """Read every byte of checkpoints, and compare the bytes with their digests. Name the intact ones, and damaged files.

    The exit status is 1 if a checkpoint is damaged.

    Args:
        paths: the checkpoints.
    """
    if not paths:
        raise OptionError("ckpt verify: got no checkpoint. Pass the path of one or more.")
    for path in paths:
        _check_is_checkpoint("ckpt verify", path)
    intact, damaged = [], []
    with reading_bar("ckpt verify", files_nbytes(*paths)):
        for path in paths:
            try:
                x = verify(path)
                intact.append(f"{x.path} is intact: step {x.step}, {len(x.tensor_names)} tensors, {x.manifest.nbytes:,} bytes")
            except CheckpointError as error:
                damaged.append(str(error))
    if damaged:
        raise CheckpointError("\n".join([*damaged, *intact]))
    return "\n".join(intact)


def diff(first: str, second: str, /, *, values: bool = True) -> str:
    """List the differences between two checkpoints: missing tensors and values (-), new ones (+), and changed ones (~).

    Args:
        first: a checkpoint.
        second: the checkpoint to compare with the first one.
        values: compare the values of tensors. Each tensor is read whole.
    """
    for path in (first, second):
        _check_is_checkpoint("ckpt diff", path)
    with reading_bar("ckpt diff", files_nbytes(first, second)):
        return _differences(open_checkpoint(first), open_checkpoint(second), values=values)


def _differences(one: Checkpoint, other: Checkpoint, *, values: bool) -> str:
    lines = [f"- {name}" for name in one.tensor_names if name not in other.tensor_names]
    lines += [f"+ {name}" for name in other.tensor_names if name not in one.tensor_names]
    for name in one.tensor_names:
        if name not in other.tensor_names:
            continue
        a, b = (each.manifest.tensors[each.manifest.aliases.get(name, name)] for each in (one, other))
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            shapes = (f"{dtype_name(x.dtype)}{list(x.shape)}" for x in (a, b))
            lines.append(f"~ {name}: {' -> '.join(shapes)}")
        elif values and not torch.equal(as_bytes(x := one.tensor(name)), as_bytes(y := other.tensor(name))):
            lines.append(f"~ {name}: {_difference_text(x, y)}")
    # Texts are compared, as a NaN differs from itself, and True equals 1.
    was, now = ({name: repr(value) for name, value in each.manifest.values.items()} for each in (one, other))
    lines += [f"- {name}" for name in sorted(was.keys() - now.keys())]
    lines += [f"+ {name}" for name in sorted(now.keys() - was.keys())]
    lines += [f"~ {name}: {was[name]} -> {now[name]}" for name in sorted(was.keys() & now.keys()) if was[name] != now[name]]
    return "\n".join(lines or ["no difference"])


def _difference_text(x: torch.Tensor, y: torch.Tensor) -> str:
    if x.dtype == torch.float4_e2m1fn_x2:  # torch casts no float4
        differ = as_bytes(x) != as_bytes(y)
        return f"{differ.sum():,} of {differ.numel():,} bytes differ, with two numbers in each"
    return f"the largest difference is {_largest_difference(x, y):.3g}"


def _largest_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest difference of two elements at the same position.

    Equal infinities differ by 0, and so do two NaNs. A NaN and a number differ by NaN.
    """
    if x.dtype == torch.int64:  # in two halves, as float64 has 53 bits
        high, low = (x >> 32) - (y >> 32), (x & 0xFFFFFFFF) - (y & 0xFFFFFFFF)
        return (high.double() * 2**32 + low.double()).abs().max().item()
    dtype = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(dtype), y.to(dtype)
    is_same = (x == y) | (x.isnan() & y.isnan())
    return (x - y).abs().masked_fill(is_same, 0.0).max().item()


def prune_checkpoints(
    root: str, /, *, keep: int, best: int = 0, keep_steps: int | None = None, keep_hours: float | None = None
) -> str:
    """Remove complete checkpoints of a folder that neither options nor links keep. If all kept ones are damaged, remove none.

    Args:
        root: folder of the checkpoints.
        keep: number of newest checkpoints to keep.
        best: number of checkpoints to keep because their metric, a number that was saved with them, is the lowest.
        keep_steps: length of an interval in steps. The last checkpoint of each interval is kept as well.
        keep_hours: length of an interval in hours, counted from 1970. The last checkpoint of each interval is kept as well.
    """
    _check_folder_of_checkpoints("ckpt prune", root)
    check_number("ckpt prune: keep", keep, 1)
    check_number("ckpt prune: best", best, 0)
    check_number("ckpt prune: keep_steps", 1 if keep_steps is None else keep_steps, 1)
    check_number("ckpt prune: keep_hours", 1 if keep_hours is None else keep_hours, 0.001)
    removed = prune(root, keep=keep, best=best, keep_steps=keep_steps, keep_hours=keep_hours)
    return "\n".join(f"removed {path}" for path in removed) or "nothing to remove"


def export(
    path: str,
    folder: str,
    /,
    *,
    to: Literal["safetensors", "torch", "dcp", "orbax"] = "safetensors",
    subtree: str = "",
    dtype: str = "",
    stack: Mapping[str, int] = _NO_STACKS,
) -> str:
    """Write a checkpoint for other libraries, into a new folder.

    Args:
        path: the checkpoint.
        folder: path of the new folder.
        to: safetensors is for Hugging Face's from_pretrained; torch makes pytorch_model.bin, for older programs; dcp is for
            torch.distributed.checkpoint, orbax for JAX.
        subtree: part of the checkpoint to export, such as params; all by default.
        dtype: dtype to which floating-point tensors are rounded, such as bfloat16; for safetensors and torch.
        stack: for orbax alone: --stack layers 0 stacks the layers in the list "layers" along dim 0, as lax.scan takes them.
    """
    if stack and to != "orbax":
        raise OptionError(f"ckpt export: stack is {dict(stack)!r}, which is for orbax alone.")
    if dtype and to in ("dcp", "orbax"):
        raise OptionError(f"ckpt export: dtype is {dtype!r}, which is for safetensors and torch.")
    rounded = parse_dtype("ckpt export: dtype", dtype) if dtype else None
    _check_is_checkpoint("ckpt export", path)
    if storage_of(folder).list_names(folder):
        raise OptionError(f"ckpt export: {folder!r} is not empty. Pass the path of a new folder.")
    found = open_checkpoint(path)
    names = found.tensor_names
    if subtree and not any(name.startswith(f"{subtree}.") for name in names):
        raise OptionError(f"ckpt export: subtree is {subtree!r}, expected the beginning of names such as {names[:8]}.")
    records = [each for name, each in found.manifest.tensors.items() if name.startswith(f"{subtree}." if subtree else "")]
    with reading_bar("ckpt export", sum(each.numel * each.dtype.itemsize for each in records)):
        if to == "safetensors":
            export_safetensors(found, folder, subtree=subtree, dtype=rounded)
        elif to == "torch":
            export_torch(found, folder, subtree=subtree, dtype=rounded)
        elif to == "dcp":
            to_dcp(found, folder, subtree=subtree)
        else:
            from fsharp.interop.orbax import to_orbax

            to_orbax(found, folder, subtree=subtree, stack=stack)
    return f"wrote {folder}"


def convert(
    folder: str,
    root: str,
    /,
    *,
    of: Literal["dcp", "orbax", "safetensors", "torch"] = "dcp",
    step: int = 0,
    unstack: Mapping[str, int] = _NO_STACKS,
) -> str:
    """Convert a checkpoint of another library to an fsharp checkpoint, which has digests. No code in the files runs.

    fsharp also loads files of safetensors and of torch.save directly. Tensors of dcp are compared with the checksums that torch
    writes beside them, unless torch was told to write none. Names and shapes have no checksums.

    Args:
        folder: folder of the other library's checkpoint, or one file of safetensors or of torch.save.
        root: folder of checkpoints, in which the new one is made.
        of: dcp is torch.distributed.checkpoint, orbax is of JAX, safetensors and torch are files as Hugging Face writes them:
            model.safetensors or pytorch_model.bin, or several files with an index.
        step: number of the step, for the name of the new checkpoint.
        unstack: for orbax alone: --unstack params.layers 0 cuts each leaf of the subtree "params.layers" along dim 0 into one
            tensor for each layer. Such leaves hold all layers, as lax.scan takes them.
    """
    if unstack and of != "orbax":
        raise OptionError(f"ckpt convert: unstack is {dict(unstack)!r}, which is for orbax alone.")
    check_number("ckpt convert: step", step, 0, 2**62 - 1)
    names = storage_of(folder).list_names(folder)
    has_folder = _DCP_METADATA_FILE in names if of == "dcp" else bool(names) if of == "orbax" else is_checkpoint(folder)
    if not has_folder:
        raise OptionError(f"ckpt convert: {folder!r} is not {_FOREIGN_FOLDERS[of]}.")
    # What is written is read back. Orbax reads files by itself.
    with reading_bar("ckpt convert", None if of == "orbax" else 2 * files_nbytes(folder)):
        if of == "dcp":
            made = from_dcp(folder, root, step=step)
        elif of == "orbax":
            from fsharp.interop.orbax import from_orbax

            made = from_orbax(folder, root, step=step, unstack=unstack)
        else:
            made = from_huggingface(folder, root, step=step)
    return f"wrote {made.path}"
