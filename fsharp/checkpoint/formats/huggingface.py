"""Files of other libraries, read as checkpoints: Hugging Face's folders, or one file, of safetensors or of ``torch.save``."""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import xxhash

from fsharp.checkpoint.formats import torch_archive
from fsharp.checkpoint.formats.planes import METADATA_KEY, EncodedLeaf, encoded_leaf_from_json
from fsharp.checkpoint.manifest import MANIFEST_NAME, Chunk, FileRecord, Manifest, TensorRecord, checked_file_name
from fsharp.checkpoint.shard_file import (
    DIGEST_TABLE_NAME,
    SAVABLE_DTYPES,
    TensorExtent,
    header_end,
    parse_header,
    parse_untrusted_json,
)
from fsharp.checkpoint.storage import Storage, read_index_file
from fsharp.errors import CheckpointError
from fsharp.functional.tree.paths import named_leaves

_FILE_PATTERNS = (re.compile(r".*\.safetensors"), re.compile(r"(.*_)?model(-\d+-of-\d+)?\.bin"))
_INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json")


class FileDescription(NamedTuple):
    """The tensors, values and encoded leaves that ``header`` describes. Offsets of tensors count from byte ``start``."""

    header: bytes
    start: int
    tensors: dict[str, TensorExtent]
    values: dict[str, bool | int | float | str]
    encoded: dict[str, EncodedLeaf]


def is_huggingface_folder(names: Collection[str]) -> bool:
    """Return whether a folder with files of these names is a checkpoint of Hugging Face."""
    return any(map(any, _index_and_file_names(names)))


def is_file(storage: Storage, path: str) -> bool:
    """Return whether there is a file, or a link to a file, at a path."""
    folder, _, name = path.rpartition("/")
    try:
        storage.nbytes(f"{folder}/{storage.relative_realpath(folder, name)}")
    except (FileNotFoundError, CheckpointError):
        return False
    return True


def _index_and_file_names(names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return ``(indices, files)``: the names of index and tensor files of safetensors; if there are none, of ``torch.save``."""
    for file, index in zip(_FILE_PATTERNS, _INDEX_SUFFIXES, strict=True):
        found = [name for name in names if name.endswith(index)], [name for name in names if file.fullmatch(name)]
        if any(found):
            return found
    return [], []


def huggingface_manifest(storage: Storage, path: str) -> Manifest:
    """Return a manifest of a Hugging Face folder, or of one file of safetensors or of ``torch.save``.

    Links are followed, as the cache of the Hub is made of links. There are no digests. Raises CheckpointError if a file or a
    tensor of the index is missing, there are two indices, or without an index two files have one tensor. A damaged header, and
    objects other than tensors, numbers and texts raise CheckpointError too. Cost: reads the header of each file.
    """
    folder, _, name = path.rpartition("/")
    indices, used = list[str](), [name]
    if not is_file(storage, path):
        folder, (indices, used) = path, _index_and_file_names(storage.list_names(path))
    if len(indices) > 1:
        raise CheckpointError(f"{folder}: {len(indices)} indices, expected one: {', '.join(indices)}.")
    index = _read_index(storage, folder, indices[0]) if indices else None
    used = sorted(set(index.values())) if index is not None else used
    files, tensors, values, seen = list[FileRecord](), dict[str, TensorRecord](), dict[str, Any](), xxhash.xxh3_64()
    encoded, file_of = dict[str, EncodedLeaf](), dict[str, str]()
    for number, name in enumerate(used):
        file, found = _record_and_description(storage, folder, name)
        files.append(file)
        seen.update(found.header)
        for tensor, extent in found.tensors.items():
            if index is not None and index.get(tensor) != name:
                continue
            if tensor in tensors:
                raise CheckpointError(f"{folder}: {tensor!r} is in {name} and in {file_of[tensor]}.")
            file_of[tensor] = name
            numel = (extent.end - extent.begin) // extent.dtype.itemsize
            tensors[tensor] = TensorRecord(extent.dtype, extent.shape, (Chunk(number, 0, numel),) if numel else ())
        values |= found.values
        encoded |= {leaf: each for leaf, each in found.encoded.items() if each.planes[0] in found.tensors}
    missing = [name for name in index or () if name not in tensors]
    if missing and index is not None:
        raise CheckpointError(f"{folder}: {missing[0]!r} is not in {index[missing[0]]}, where {indices[0]} has it.")
    return Manifest(
        save_id=seen.hexdigest(), step=0, created=0.0, mesh={}, versions={}, config=None, metric=None,
        files=tuple(files), tensors=tensors, aliases={}, values=values, encoded=encoded,
    )  # fmt: skip


def _read_index(storage: Storage, folder: str, name: str) -> dict[str, str]:
    """Return, for each tensor in an index, the name of the file that holds the tensor."""
    data = read_index_file(storage, folder, name)
    try:
        return {str(tensor): checked_file_name(file) for tensor, file in parse_untrusted_json(data)["weight_map"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}/{name}: the index is damaged: {type(error).__name__} {error}.") from error


def _record_and_description(storage: Storage, folder: str, name: str) -> tuple[FileRecord, FileDescription]:
    path = storage.relative_realpath(folder, name)
    try:
        size = storage.nbytes(f"{folder}/{path}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}/{name}: missing.") from error
    found = describe_file(storage, f"{folder}/{path}")
    if DIGEST_TABLE_NAME in found.tensors and MANIFEST_NAME in storage.list_names(folder):
        raise CheckpointError(f"{folder}/{name}: this is one of the files of a checkpoint. Pass its folder: {folder}.")
    if DIGEST_TABLE_NAME in found.tensors:
        raise CheckpointError(f"{folder}: this checkpoint is incomplete: it has no manifest.")
    return FileRecord(path, size, None), found


def describe_file(storage: Storage, path: str) -> FileDescription:
    """Recognize a file of safetensors or ``torch.save`` by its first bytes, and describe its tensors and values.

    The elements of tensors are not read. Raises CheckpointError if the file is neither, is damaged, or has other objects than
    tensors, numbers and texts.
    """
    size = storage.nbytes(path)
    head = bytearray(min(16, size))
    storage.read(path, 0, memoryview(head))
    if head.startswith(torch_archive.ZIP_FIRST_BYTES):
        return _torch_archive_contents(storage, path)
    if head[8:9] != b"{":
        raise CheckpointError(
            f"{path}: this is not a safetensors file, and none of torch.save: it begins with {bytes(head)!r}. Expected one of "
            "these, or the folder of a checkpoint. If torch before 1.6 saved the file, save it again: "
            "torch.save(torch.load(path, weights_only=True), path)."
        )
    header = bytearray(header_end(path, bytes(head[:8]), size))
    storage.read(path, 0, memoryview(header))
    found, metadata = parse_header(path, bytes(header), size)
    try:
        described = parse_untrusted_json(metadata.get(METADATA_KEY, "{}").encode())
        encoded = {str(name): encoded_leaf_from_json(each) for name, each in described.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__} {error!s:.200}"
        raise CheckpointError(f"{path}: {METADATA_KEY!r} in the metadata is damaged: {what}.") from error
    return FileDescription(bytes(header), len(header), found, {}, encoded)


def _torch_archive_contents(storage: Storage, path: str) -> FileDescription:
    """Return the contents of a file of ``torch.save``. A tensor's name is its dict keys, joined by dots."""
    remedy = "Save tensors, numbers and texts alone, as by torch.save(model.state_dict(), path)."
    try:
        data, tree = torch_archive.load_archive_on_meta(storage, path)
        leaves = [(name, leaf) for name, leaf in named_leaves(tree) if leaf is not None]
    except Exception as error:  # of any kind: bytes of a pickle may say anything
        what = f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}"
        raise CheckpointError(f"{path}: cannot be read: {what:.300}. {remedy}") from error
    found = FileDescription(data, 0, {}, {}, {})
    for name, leaf in leaves:
        if name in found.tensors or name in found.values:
            raise CheckpointError(f"{path}: two keys are both {name!r:.200} when they are joined by dots: rename one.")
        if isinstance(leaf, bool | int | float | str):
            found.values[name] = leaf
        elif not isinstance(leaf, torch.Tensor) or leaf.dtype not in SAVABLE_DTYPES:
            what = str(leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise CheckpointError(f"{path}: {name!r:.200} is {what}. {remedy}")
        elif not leaf.is_contiguous():
            raise CheckpointError(
                f"{path}: {name!r:.200} has strides {leaf.stride()}, expected contiguous elements: save "
                "x.contiguous() of each x."
            )
        else:
            begin = int(leaf.storage_offset()) * leaf.itemsize
            found.tensors[name] = TensorExtent(leaf.dtype, begin, begin + leaf.nbytes, tuple(leaf.shape))
    return found
