"""Write a checkpoint as a folder of safetensors, or of files of ``torch.save``, like ``save_pretrained()`` of Hugging Face."""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fsharp.checkpoint.catalog import Checkpoint, open_checkpoint
from fsharp.checkpoint.entries import apply_rename
from fsharp.checkpoint.formats.planes import METADATA_KEY, EncodedLeaf
from fsharp.checkpoint.shard_file import (
    SAFETENSORS_DTYPES,
    SAVABLE_DTYPES,
    StoredTensor,
    batches_by_nbytes,
    check_tensor_names,
    encode_header,
    in_write_order,
)
from fsharp.checkpoint.storage import WriteFunction, absolute_path, storage_of
from fsharp.errors import CheckpointError, problem
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.formats.host_memory import bytes_of
from fsharp.type_checks import options_checked


@options_checked
def export_safetensors(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    subtree: str = "",
    rename: Callable[[str], str] | None = None,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5_000_000_000,
) -> None:
    """Export tensors of a checkpoint to ``model.safetensors``, or to several files and ``model.safetensors.index.json``.

    If you put a ``config.json`` beside the files, ``from_pretrained()`` loads the folder. Call this function in one process; it
    needs no process group.

    Args:
        checkpoint: the checkpoint, or its path.
        folder: path of a new or empty folder, which appears once all files are complete. Or a URL of fsspec: there the files
            appear one by one.
        subtree: part of the checkpoint to export, such as ``"params"`` of a TrainState. As ``save_pretrained()`` does, the
            function leaves out numbers and texts, and writes a tied tensor under only one of its names.
        rename: function from a name below ``subtree`` to the name in the files.
        dtype: dtype to which floating-point tensors are rounded, such as ``torch.bfloat16``; None keeps their dtypes. Planes
            of a checkpoint that was saved with ``planes=True`` are not rounded.
        max_file_nbytes: the largest number of bytes of tensors in a file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: the folder is not empty, there is nothing to write, or the checkpoint is damaged.
        CheckpointError: safetensors cannot hold a dtype or name, two tensors get one name, or a value is too large for
            ``dtype``. No file is left.

    Cost: reads each header and every tensor that is written, and checks their digests. Memory: one tensor and its rounded
    copy; and the headers and digests of all files, which are 0.2 % of the files.
    Source: https://huggingface.co/docs/safetensors
    """
    _export("export_safetensors()", checkpoint, folder, _SAFETENSORS, subtree, rename, dtype, max_file_nbytes)


@options_checked
def export_torch(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    subtree: str = "",
    rename: Callable[[str], str] | None = None,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5_000_000_000,
) -> None:
    """Export tensors of a checkpoint to ``pytorch_model.bin``, or to several files and ``pytorch_model.bin.index.json``.

    Each file is a dict of tensors, which ``torch.save`` has written, and ``torch.load(weights_only=True)`` loads. For programs
    that read other formats too, :func:`export_safetensors` is better: it takes less memory, and its files hold no pickle.

    Args:
        checkpoint: the checkpoint, or its path.
        folder: path of a new or empty folder, which appears once all files are complete. Or a URL of fsspec: there the files
            appear one by one.
        subtree: part of the checkpoint to export, such as ``"params"`` of a TrainState. Numbers and texts are left out, and a
            tied tensor is written under only one of its names.
        rename: function from a name below ``subtree`` to the name in the files.
        dtype: dtype to which floating-point tensors are rounded, such as ``torch.bfloat16``; None keeps their dtypes.
        max_file_nbytes: the largest number of bytes of tensors in a file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: the folder is not empty, there is nothing to write, or the checkpoint is damaged.
        CheckpointError: two tensors get one name, a value is too large for ``dtype``, or a tensor was saved by
            ``fsharp.checkpoint.save(planes=True)``. No file is left.

    Cost: reads each header and every tensor that is written, and checks their digests. Memory: the tensors of one file, which
    are ``max_file_nbytes`` bytes or one larger tensor.
    """
    _export("export_torch()", checkpoint, folder, _TORCH, subtree, rename, dtype, max_file_nbytes)


_BUFFER_NBYTES = 1 << 20


class _FileConvention(NamedTuple):
    """How tensors are written to files of one kind.

    Attributes:
        stem: beginning of the names of files.
        suffix: end of the names of files.
        dtypes: dtypes that a file can hold.
        write: function ``(out, tensors, read, encoded)`` that writes ``tensors`` to one file. ``out`` appends bytes to the
            file, ``read`` returns a tensor's values, and ``encoded`` has the encoded leaves of all files, by name.
    """

    stem: str
    suffix: str
    dtypes: frozenset[torch.dtype]
    write: Callable[
        [WriteFunction, list[StoredTensor], Callable[[StoredTensor], torch.Tensor], Mapping[str, EncodedLeaf]], None
    ]


def _write_safetensors(
    out: WriteFunction,
    tensors: list[StoredTensor],
    read: Callable[[StoredTensor], torch.Tensor],
    encoded: Mapping[str, EncodedLeaf],
) -> None:
    here = {tensor.name for tensor in tensors}
    own = {name: leaf for name, leaf in encoded.items() if leaf.planes[0] in here}
    metadata = {"format": "pt"} | ({METADATA_KEY: json.dumps(own, separators=(",", ":"))} if own else {})
    out(memoryview(encode_header(tensors, metadata, with_digests=False)))
    for tensor in tensors:
        value = read(tensor)  # lives until its bytes are written
        out(bytes_of(value))


class _AppendingFile(io.RawIOBase):
    """A file object for ``torch.save``: a write passes its bytes to ``out``, a function that appends bytes to a new file."""

    def __init__(self, out: WriteFunction) -> None:
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._out(view)
        return len(view)


def _write_torch(
    out: WriteFunction,
    tensors: list[StoredTensor],
    read: Callable[[StoredTensor], torch.Tensor],
    encoded: Mapping[str, EncodedLeaf],
) -> None:
    with io.BufferedWriter(_AppendingFile(out), _BUFFER_NBYTES) as file:
        torch.save({tensor.name: read(tensor) for tensor in tensors}, file)


_SAFETENSORS = _FileConvention("model", ".safetensors", SAFETENSORS_DTYPES, _write_safetensors)
_TORCH = _FileConvention("pytorch_model", ".bin", SAVABLE_DTYPES, _write_torch)


def _export(
    where: str,
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    kind: _FileConvention,
    subtree: str,
    rename: Callable[[str], str] | None,
    dtype: torch.dtype | None,
    max_file_nbytes: int,
) -> None:
    found = open_checkpoint(checkpoint)
    names = stored_name_by_new_name(where, found, subtree, rename, aliases=False)
    if kind is _TORCH:
        refuse_planes(where, found, names.values())
    check_tensor_names(where, names)
    if dtype is not None and not dtype.is_floating_point:
        raise CheckpointError(f"{where}: dtype is {dtype_name(dtype)}, expected one of floating point, or None.")
    described, owners = [], found.manifest.aliases
    new_names = {owners.get(stored, stored): name for name, stored in names.items()}
    encoded = {
        new_names[owner]: leaf.renamed(new_names)
        for owner, leaf in found.manifest.encoded.items()
        if leaf.planes[0] in new_names
    }
    of_planes = {name for leaf in encoded.values() for name in (*leaf.planes, *leaf.scales)}
    for name, stored in names.items():
        record = found.manifest.tensors[owners.get(stored, stored)]
        written = dtype if dtype and record.dtype.is_floating_point and name not in of_planes else record.dtype
        if written not in kind.dtypes:
            raise CheckpointError(f"{where}: {stored!r} is {dtype_name(written)}, which {kind.suffix} files cannot hold.")
        described.append(StoredTensor(name, written, record.shape))
    parts = batches_by_nbytes(described, max_file_nbytes)
    numbered = [f"{kind.stem}-{i:05d}-of-{len(parts):05d}{kind.suffix}" for i in range(1, len(parts) + 1)]
    file_names = numbered if len(parts) > 1 else [f"{kind.stem}{kind.suffix}"]
    files = {file: in_write_order(part) for file, part in zip(file_names, parts, strict=True)}

    def read(tensor: StoredTensor) -> torch.Tensor:
        value = found.tensor(names[tensor.name])
        rounded = value.to(tensor.dtype)
        if rounded is not value and _has_overflowed(value, rounded):
            what = f"{names[tensor.name]!r} has values that are too large for {dtype_name(tensor.dtype)}."
            raise CheckpointError(problem(where, what, remedy="Choose a wider dtype, such as bfloat16."))
        return rounded

    with write_folder_atomically(where, folder) as staged:
        storage = storage_of(staged)
        for file, tensors in files.items():
            with storage.append_to_new_file(f"{staged}/{file}") as out:
                kind.write(out, tensors, read, encoded)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(tensor.nbytes for tensor in described)},
                "weight_map": {tensor.name: file for file, tensors in files.items() for tensor in tensors},
            }
            with storage.append_to_new_file(f"{staged}/{kind.stem}{kind.suffix}.index.json") as out:
                out(memoryview(json.dumps(index, indent=2, sort_keys=True).encode()))


def _has_overflowed(value: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Return whether rounding has changed a value that is larger than any finite number of the dtype of ``rounded``."""
    wide = value if value.dtype == torch.float64 else value.float()  # whose dtype holds the limit
    return bool(((wide.abs() > torch.finfo(rounded.dtype).max) & (rounded.to(wide.dtype) != wide)).any())


def stored_name_by_new_name(
    where: str, found: Checkpoint, subtree: str, rename: Callable[[str], str] | None, *, aliases: bool
) -> dict[str, str]:
    """Return a dict with an item for each tensor of ``found`` below a subtree: from the new name to the name in ``found``.

    ``rename``: function from a name below the subtree to the new name; None keeps the name. ``aliases``: whether a tied tensor
    gets an item for each of its names; if False, it gets one item. Raises CheckpointError if there is no tensor, or if two
    tensors get the same new name.
    """
    owners = found.manifest.aliases
    names = [name for name in (*found.manifest.tensors, *owners) if name.startswith(f"{subtree}." if subtree else "")]
    first: dict[str, str] = {}  # by name of the tensor's owner, its first name below the subtree
    for name in names:
        first.setdefault(owners.get(name, name), name)
    result = old_name_by_new_name(where, names if aliases else first.values(), subtree, rename)
    if not result:
        others = list(dict.fromkeys(name.partition(".")[0] for name in found.tensor_names))[:20]
        raise CheckpointError(f"{where}: {found.path} has no tensors below {subtree!r}; there are tensors below {others}.")
    return result


def refuse_planes(where: str, found: Checkpoint, stored_names: Iterable[str]) -> None:
    """Raise a CheckpointError if a tensor in ``stored_names`` is a plane or a scale, which a reader would take for values."""
    chosen = {found.manifest.aliases.get(name, name) for name in stored_names}
    for owner, leaf in found.manifest.encoded.items():
        if not chosen.isdisjoint((*leaf.planes, *leaf.scales)):
            what = f"{owner!r} was saved with planes=True, and these files cannot say that its bytes are {leaf.format}."
            remedy = "Use export_safetensors(), or load the values, and save them without planes."
            raise CheckpointError(problem(where, what, remedy=remedy))


def old_name_by_new_name(where: str, names: Iterable[str], subtree: str, rename: Callable[[str], str] | None) -> dict[str, str]:
    """Return a dict from the new name to the old name, for each of ``names`` below a subtree.

    ``rename``: function from a name below the subtree to the new name; None keeps the name. Raises CheckpointError if two names
    get the same new name.
    """
    prefix = f"{subtree}." if subtree else ""
    result: dict[str, str] = {}
    for stored in names:
        if stored.startswith(prefix):
            name = apply_rename(where, stored[len(prefix) :], rename)
            if name in result:
                raise CheckpointError(f"{where}: {result[name]!r} and {stored!r} would both have the name {name!r}.")
            result[name] = stored
    return result


@contextmanager
def write_folder_atomically(where: str, path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a temporary folder, which is renamed to ``path`` at the end; after an error it is removed.

    An object store cannot rename: there the folder is ``path`` itself. ``where``: the public function to name in errors, such
    as ``"to_dcp()"``. Raises CheckpointError if ``path`` is a folder with files, or if a folder cannot be written.
    """
    folder = absolute_path(path)
    storage = storage_of(folder)
    if storage.list_names(folder):
        raise CheckpointError(f"{where}: {folder} is not empty: choose another folder, or remove it.")
    staged = storage.staging_path(folder)
    try:
        storage.make_staging_folder(folder)
    except OSError as error:
        is_left = isinstance(error, FileExistsError) and error.filename == staged
        remedy = f" An interrupted export has left {staged}, or one is under way: remove that folder." if is_left else ""
        raise CheckpointError(f"{where}: {folder} cannot be written: {error.strerror or error}.{remedy}") from error
    try:
        yield staged
        storage.publish(staged, folder)
    except BaseException as error:
        storage.remove(staged)
        # torch.save raises an error of its own after an OSError.
        reason = error.__context__ if type(error) is RuntimeError else error
        if isinstance(reason, OSError):
            raise CheckpointError(f"{where}: {folder} cannot be written: {reason.strerror or reason}.") from error
        raise
