"""Hugging Face's folders of safetensors, read as checkpoints: what is in them, and in which bytes of which file."""

from collections.abc import Collection

import xxhash

from fsharp.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord, plain_file_name
from fsharp.checkpoint.shard_file import TABLE, Extent, header_nbytes, parse_header, parse_json
from fsharp.checkpoint.storage import Storage, read_description
from fsharp.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_FILE, _ANY_INDEX = ".safetensors", ".safetensors.index.json"


def is_folder(names: Collection[str]) -> bool:
    """Whether a folder with files of these names has safetensors in it."""
    return any(name.endswith((_FILE, _ANY_INDEX)) for name in names)


def manifest_of(storage: Storage, folder: str) -> Manifest:
    """What is in a folder of safetensors, with or without an index.

    Links, of which the cache of the Hub is made, are followed. There are no digests, so that damage is not seen.

    Args:
        storage: where it is.
        folder: its path.

    Raises:
        CheckpointError: a file or a tensor of the index that is missing, a tensor that two files have, a damaged header.

    Cost: reads the header of each file.
    """
    names = storage.names(folder)
    indices = [name for name in names if name.endswith(_ANY_INDEX)]
    if len(indices) > 1:
        raise CheckpointError(f"{folder}: {len(indices)} indices, expected one: {', '.join(indices)}.")
    index = _index(storage, folder, indices[0]) if indices else None
    used = sorted(set(index.values())) if index is not None else [name for name in names if name.endswith(_FILE)]
    files, tensors, seen = [], dict[str, TensorRecord](), xxhash.xxh3_64()
    for number, name in enumerate(used):
        file, header, found = _opened(storage, folder, name)
        files.append(file)
        seen.update(header)
        for tensor, extent in found.items():
            if index is not None and index.get(tensor) != name:
                continue
            if tensor in tensors:
                raise CheckpointError(f"{folder}: {tensor!r} is in {name} and in {used[tensors[tensor].chunks[0].file]}.")
            numel = (extent.end - extent.begin) // extent.dtype.itemsize
            tensors[tensor] = TensorRecord(extent.dtype, extent.shape, (Chunk(number, 0, numel),) if numel else ())
    missing = [name for name in index or () if name not in tensors]
    if missing and index is not None:
        raise CheckpointError(f"{folder}: {missing[0]!r} is not in {index[missing[0]]}, where {indices[0]} has it.")
    return Manifest(
        save_id=seen.hexdigest(), step=0, created=0.0, mesh={}, versions={}, config=None, metric=None,
        files=tuple(files), tensors=tensors, aliases={}, values={},
    )  # fmt: skip


def _index(storage: Storage, folder: str, name: str) -> dict[str, str]:
    """Names of tensors, and of the files that have them."""
    data = read_description(storage, folder, name)
    try:
        return {str(tensor): plain_file_name(file) for tensor, file in parse_json(data)["weight_map"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}/{name}: the index is damaged: {type(error).__name__} {error}.") from error


def _opened(storage: Storage, folder: str, name: str) -> tuple[FileRecord, bytes, dict[str, Extent]]:
    """A file, its header, and where each of its tensors is."""
    path = storage.behind_links(folder, name)
    where = f"{folder}/{path}"
    try:
        size = storage.nbytes(where)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}/{name}: missing.") from error
    head = bytearray(min(8, size))
    storage.read(where, 0, memoryview(head))
    header = bytearray(header_nbytes(where, bytes(head), size))
    storage.read(where, 0, memoryview(header))
    found, _ = parse_header(where, bytes(header), size)
    if TABLE in found:
        raise CheckpointError(f"{folder}: this checkpoint is incomplete: it has no manifest.")
    return FileRecord(path, size, None), bytes(header), found
