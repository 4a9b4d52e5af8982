"""Conversion of another library's checkpoint: one process writes its named tensors and values in this library's format."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from fsharp.checkpoint.catalog import Checkpoint, folder_name, new_save_id, open_checkpoint
from fsharp.checkpoint.entries import Piece, TensorEntry, TreeContents, Value
from fsharp.checkpoint.formats.planes import EncodedLeaf
from fsharp.checkpoint.saving import Snapshot, checked_config, run_converting_os_errors, write_snapshot
from fsharp.checkpoint.shard_file import StoredTensor, check_tensor_names, in_write_order
from fsharp.checkpoint.storage import absolute_path, storage_of
from fsharp.errors import CheckpointError
from fsharp.functional.comm.protocol import SingleComm
from fsharp.type_checks import options_checked


@options_checked
def from_huggingface(
    folder: str | os.PathLike[str], root: str | os.PathLike[str], *, step: int = 0, config: Any = None
) -> Checkpoint:
    """Convert files of safetensors or of ``torch.save`` to a new checkpoint under ``root``, with digests.

    :func:`fsharp.checkpoint.load` also loads such files as they are. Call this function in one process; it needs no process
    group. No code in the files runs.

    Args:
        folder: a folder as ``save_pretrained()`` writes it, with an index if there are several files; or one file.
        root: folder of checkpoints, in which the new checkpoint gets a folder.
        step: number of the step, for the checkpoint's name.
        config: config of the new checkpoint, a value that JSON can hold.

    Raises:
        CheckpointError: files are missing or damaged, or have other objects than tensors, numbers, booleans and texts.
        CheckpointError: JSON cannot hold ``config``, or ``step`` is negative or too large.
        OptionError: an argument has a wrong type.

    Cost: reads the files once, and writes as much as :func:`~fsharp.checkpoint.save` does. Memory: one tensor.
    """
    config = checked_config("from_huggingface()", step, config)
    found = open_checkpoint(folder)
    entries = {name: whole_entry(name, each.dtype, each.shape) for name, each in found.manifest.tensors.items()}

    def read(tensors: list[StoredTensor]) -> Iterator[torch.Tensor]:
        return (found.tensor(tensor.name) for tensor in tensors)

    how: Any = {"step": step, "config": config, "encoded": found.manifest.encoded}
    return write_converted("from_huggingface()", root, entries, dict(found.manifest.values), read, **how)


def whole_entry(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorEntry:
    """Return the entry of a tensor that one process writes as a whole. The elements are read later: ``local`` is empty."""
    n = torch.Size(shape).numel()
    return TensorEntry(name, dtype, shape, lambda rank: Piece(0, n), torch.empty(0, dtype=dtype, device="cpu"))


def write_converted(
    where: str,
    root: str | os.PathLike[str],
    entries: Mapping[str, TensorEntry],
    values: dict[str, Value],
    read: Callable[[list[StoredTensor]], Iterable[torch.Tensor]],
    *,
    step: int,
    config: Any,
    objects: Mapping[str, Any] | None = None,
    encoded: Mapping[str, EncodedLeaf] | None = None,
) -> Checkpoint:
    """Write a new checkpoint under ``root`` from tensors and values of another library's checkpoint. Return the new one.

    ``read`` yields the elements of the given tensors, one tensor after another. ``config`` is a result of ``checked_config()``.
    ``objects``, ``encoded``: attributes of the new :class:`~fsharp.checkpoint.manifest.Manifest`.

    Before a folder is made, raises CheckpointError if a tensor and a value have the same name, or files cannot hold a name.
    ``where`` begins the message.
    """
    if twice := entries.keys() & values.keys():
        raise CheckpointError(f"{where}: a tensor and a value would both have the name {min(twice)!r}.")
    check_tensor_names(where, entries)
    tensors = in_write_order(StoredTensor(each.name, each.dtype, each.shape) for each in entries.values() if each.numel)
    into = absolute_path(root)
    save_id = new_save_id(into)
    made = f"{into}/{folder_name(step, save_id)}"
    contents = TreeContents(dict(entries), values, {}, [], dict(objects or {}), encoded=dict(encoded or {}))
    shot = Snapshot(contents, step, config, None, save_id, made, tensors, read(tensors))
    run_converting_os_errors(made, lambda: storage_of(made).make_staging_folder(made))
    return write_snapshot(shot, SingleComm())
