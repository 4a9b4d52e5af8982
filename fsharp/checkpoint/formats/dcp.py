"""Conversions to and from checkpoints of torch.distributed.checkpoint, by one process, a chunk at a time."""

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fsharp.checkpoint.catalog import Checkpoint, open_checkpoint
from fsharp.checkpoint.entries import TensorEntry, Value
from fsharp.checkpoint.formats.conversion import whole_entry, write_converted
from fsharp.checkpoint.formats.exporting import (
    old_name_by_new_name,
    refuse_planes,
    stored_name_by_new_name,
    write_folder_atomically,
)
from fsharp.checkpoint.formats.torch_archive import load_archive
from fsharp.checkpoint.manifest import checked_file_name, checked_shape, rebuild_from_structure, structure_of
from fsharp.checkpoint.reading import NeededElements
from fsharp.checkpoint.saving import checked_config
from fsharp.checkpoint.shard_file import StoredTensor
from fsharp.checkpoint.storage import Storage, read_index_file, storage_of
from fsharp.errors import CheckpointError
from fsharp.functional.formats.format import dtype_name, tensor_text
from fsharp.functional.tree.paths import as_patterns, named_leaves, select_paths
from fsharp.type_checks import options_checked

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner

_CHUNK_NBYTES = 64 << 20  # of a chunk: a rank of DCP reads each chunk of which it needs a part
_METADATA_FILE = ".metadata"
_ALLOWED_EXTRA_NBYTES = 1 << 20  # of metadata, beyond twice the size of the files: a pickled byte can take 200 in memory
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""Names of all classes in DCP's metadata, except dtypes."""


@options_checked
def to_dcp(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    subtree: str = "",
    rename: Callable[[str], str] | None = None,
) -> None:
    """Convert a checkpoint to the format of torch.distributed.checkpoint (DCP), for ``dcp.load()`` on any mesh.

    Call this function in one process only. No process group is needed. Tied leaves are written under each of their names.
    Numbers, strings, None, and lists and tuples of these are written as DCP's pickled objects.

    A checkpoint of ``{"model": model, "optim": optimizer}``, a module and its ShardedOptimizer, gets the keys that FSDP2
    expects. In a program with FSDP2, ``get_state_dict()``, ``dcp.load()`` and ``set_state_dict()`` load the folder into a
    module and its optimizer.

    Args:
        checkpoint: the checkpoint, or its path.
        folder: path of a folder that does not exist or is empty. Files are written into a temporary folder, which is renamed to
            this path at the end.
        subtree: path of the subtree to convert, such as ``"model"``; the whole checkpoint by default.
        rename: function from a leaf's name below ``subtree`` to its key in DCP, such as ``lambda name: f"model.{name}"``. By
            default the key is the name.

    Raises:
        CheckpointError: the folder has files, ``folder`` is a URL, or the checkpoint is damaged.
        CheckpointError: there is no tensor to write, two tensors get one name, or a tensor was saved with ``planes=True``. No
            file is left.

    Cost: reads each header and every tensor that is written, and checks their digests. Memory: a chunk of 64 MiB, or one row if
    a row is larger. The headers and digests of all files are 0.2 % of the checkpoint.
    Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    found = open_checkpoint(checkpoint)
    if "://" in os.fspath(folder):
        raise CheckpointError(f"to_dcp(): {folder} is a URL, expected a path.")
    names = stored_name_by_new_name("to_dcp()", found, subtree, rename, aliases=True)
    refuse_planes("to_dcp()", found, names.values())
    there, within = found.manifest.values, set[str]()

    def read_value(name: str) -> Value:
        within.add(name)
        return there[name]

    values: dict[str, Any] = {
        name: rebuild_from_structure(name, each, read_value) for name, each in found.manifest.objects.items()
    }
    values |= {name: value for name, value in there.items() if name not in within}
    values = {name: values[stored] for name, stored in old_name_by_new_name("to_dcp()", values, subtree, rename).items()}
    if twice := names.keys() & values.keys():
        raise CheckpointError(f"to_dcp(): a tensor and a value would both have the name {min(twice)!r}.")
    planner = _lazy_save_planner(found, names, values)
    with write_folder_atomically("to_dcp()", folder) as staged:
        writer = FileSystemWriter(staged)
        planner.set_up_planner({}, is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True)
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def _lazy_save_planner(found: Checkpoint, names: Mapping[str, str], values: Mapping[str, Any]) -> "SavePlanner":
    """Return a planner with which DCP writes tensors and values. The planner reads a chunk only when DCP writes the chunk.

    ``names``: dict from DCP's key of a tensor to the tensor's name in ``found``. ``values``: dict from DCP's key of a number,
    text or other object to this object.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    tensors = {name: found.manifest.tensors[found.manifest.aliases.get(stored, stored)] for name, stored in names.items()}

    def items() -> Iterator[WriteItem]:
        for name, record in tensors.items():
            for begin, end in _chunk_row_ranges(record.shape, record.dtype):
                offsets = torch.Size([begin, *(0 for _ in record.shape[1:])][: len(record.shape)])
                sizes = torch.Size([end - begin, *record.shape[1:]][: len(record.shape)])
                chunk = ChunkStorageMetadata(offsets, sizes)
                data = TensorWriteData(chunk, TensorProperties(record.dtype), torch.Size(record.shape))
                yield WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)
        for name in values:
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            self.plan = SavePlan(list(items()), planner_data={name: (name,) for name in (*tensors, *values)})
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            index, data = write_item.index, write_item.tensor_data
            if data is None:
                stream = io.BytesIO()
                torch.save(values[index.fqn], stream)
                return stream
            name = found.manifest.aliases.get(names[index.fqn], names[index.fqn])
            size = data.chunk.sizes.numel()
            row = torch.Size(data.size[1:]).numel()
            first = data.chunk.offsets[0] * row if data.size else 0
            target = torch.empty(data.chunk.sizes, dtype=data.properties.dtype, device="cpu")
            found.reader.read([NeededElements(name, first, first + size, target.view(-1))])
            return target

    return Planner()


def _chunk_row_ranges(shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return ``(first row, row after the last)`` of each chunk of a tensor."""
    if not shape or not shape[0]:
        return [(0, 0 if shape else 1)]
    row_nbytes = torch.Size(shape[1:]).numel() * dtype.itemsize
    step = max(1, _CHUNK_NBYTES // max(1, row_nbytes))
    return [(begin, min(begin + step, shape[0])) for begin in range(0, shape[0], step)]


@options_checked
def from_dcp(
    folder: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    step: int = 0,
    ignore: str | Sequence[str] = (),
    config: Any = None,
) -> Checkpoint:
    """Convert a checkpoint of torch.distributed.checkpoint (DCP) to a new checkpoint under ``root``.

    Names are the keys of DCP, such as ``model.layers.0.weight``. Numbers, texts and booleans become values. A value in a list,
    tuple or dict gets the name of the container, a dot, and its index or key. Call this function in one process; it needs no
    process group.

    Pickles are read by unpicklers that know only the classes of DCP and of plain tensors, so no code in the folder runs. No
    tensor larger than the folder's files is allocated. Tensors and values are compared with the CRC-32 that torch writes beside
    them. There is no checksum of DCP's ``.metadata``, which has names and shapes. A folder that was written after
    ``torch.serialization.set_crc32_options(False)`` has no checksums at all.

    Args:
        folder: folder of DCP: a path, or a URL of fsspec.
        root: folder of checkpoints, in which the new checkpoint gets a folder.
        step: number of the step, for the checkpoint's name.
        ignore: patterns of keys to leave out. Each pattern has to match a key.
        config: config of the new checkpoint, a value that JSON can hold.

    Raises:
        CheckpointError: the folder is damaged, not of DCP, or has an unknown object.
        PatternError: a pattern matches no key.

    Cost: reads the whole folder, and writes as much as :func:`~fsharp.checkpoint.save` does. Memory: one tensor, and a chunk of
    this tensor as DCP has stored it.
    """
    source = os.fspath(folder).rstrip("/")
    storage = storage_of(source)
    config = checked_config("from_dcp()", step, config)
    metadata = _read_metadata(storage, source)
    listed = metadata.state_dict_metadata
    left = select_paths("from_dcp(ignore=)", as_patterns(ignore), list(listed))
    entries, values, objects = {}, dict[str, Value](), dict[str, Any]()
    for name, each in listed.items():
        if name not in left and hasattr(each, "chunks"):
            entries[name] = _entry_from_metadata(source, name, each)
        elif name not in left:
            value = _load_item_or_chunk(storage, source, metadata, name, None)
            _add_values(values, name, value)
            if name not in values:
                objects[name] = structure_of(value)
    _check_total_size_fits_files(storage, source, metadata, entries)

    def read(tensors: list[StoredTensor]) -> Iterator[torch.Tensor]:
        return (_assemble_tensor(storage, source, metadata, tensor) for tensor in tensors)

    return write_converted("from_dcp()", root, entries, values, read, step=step, config=config, objects=objects)


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows the classes of DCP's metadata, and no other classes."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.removesuffix("._local")  # Python 3.13 pickles a path as pathlib._local.PosixPath
        found = super().find_class(module, name) if name in _METADATA_CLASSES.get(module, ()) else None
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise CheckpointError(f"its metadata asks for {module}.{name}, which is not of DCP")
        return found


def _read_metadata(storage: Storage, folder: str) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    where = f"{folder}/{_METADATA_FILE}"
    try:
        data = read_index_file(storage, folder, _METADATA_FILE, _ALLOWED_EXTRA_NBYTES)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: no folder, or no checkpoint of torch.distributed.checkpoint, which has a file {_METADATA_FILE}."
        ) from error
    try:
        found = _MetadataUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # of any kind: bytes of a pickle may say anything
        raise CheckpointError(f"{where}: cannot be read: {type(error).__name__} {error}.") from error
    if not isinstance(found, Metadata) or not isinstance(getattr(found, "state_dict_metadata", None), dict):
        raise CheckpointError(f"{where}: {type(found).__name__}, expected DCP's Metadata.")
    return found


def _entry_from_metadata(folder: str, name: str, metadata: Any) -> TensorEntry:
    try:
        shape, dtype = checked_shape(metadata.size), metadata.properties.dtype
        return whole_entry(name, dtype, shape)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {name!r:.200} is not a tensor: {type(error).__name__} {error!s:.200}.") from error


def _check_total_size_fits_files(storage: Storage, folder: str, metadata: Any, entries: Mapping[str, TensorEntry]) -> None:
    """Raise a CheckpointError, before memory is allocated, if tensors are larger than the files that hold them."""
    declared, held = sum(entry.numel * entry.dtype.itemsize for entry in entries.values()), 0
    try:
        infos = [info for index, info in (metadata.storage_data or {}).items() if index.fqn in entries]
        for name in {checked_file_name(info.relative_path) for info in infos}:
            held += storage.nbytes(f"{folder}/{name}")
    except (TypeError, ValueError, AttributeError, FileNotFoundError) as error:
        raise CheckpointError(f"{folder}: its metadata names missing or impossible files: {error!s:.200}.") from error
    if declared > held:
        raise CheckpointError(f"{folder}: its metadata declares tensors of {declared:,} bytes, and their files have {held:,}.")


def _load_item_or_chunk(storage: Storage, folder: str, metadata: Any, name: str, offsets: torch.Size | None) -> Any:
    """Return the object under DCP's key ``name``; with ``offsets`` the chunk of a tensor that begins at these indices."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    info = (metadata.storage_data or {}).get(MetadataIndex(name, offsets))
    if info is None:
        raise CheckpointError(f"{folder}: its metadata does not say where {name!r}{list(offsets or ())} is.")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{folder}: {name!r} was written with {info.transform_descriptors}, expected no transforms.")
    try:
        path = f"{folder}/{checked_file_name(info.relative_path)}"
        data = bytearray(min(info.length, storage.nbytes(path)))
        storage.read(path, info.offset, memoryview(data))
        return load_archive(data)
    except CheckpointError:
        raise
    except Exception as error:  # of any kind: bytes of an archive may say anything
        what = f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}"
        raise CheckpointError(f"{folder}: {name!r} cannot be read: {what}. ignore= leaves it out.") from error


def _assemble_tensor(storage: Storage, folder: str, metadata: Any, tensor: StoredTensor) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    missing = torch.ones(tensor.shape, dtype=torch.bool, device="cpu")
    for chunk in metadata.state_dict_metadata[tensor.name].chunks:
        try:
            offsets, sizes = checked_shape(chunk.offsets), checked_shape(chunk.sizes)
            where = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            part = missing[where]
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{folder}: {tensor.name!r:.200} has an impossible chunk: {error!s:.200}.") from error
        if part.shape != torch.Size(sizes) or not part.all():
            raise CheckpointError(
                f"{folder}: chunks of {tensor.name!r} do not tile it: {sizes} at {offsets} of {tensor.shape} overlaps another "
                "chunk or the end."
            )
        value = _load_item_or_chunk(storage, folder, metadata, tensor.name, chunk.offsets)
        if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != (tensor.dtype, torch.Size(sizes)):
            got = tensor_text(value) if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointError(
                f"{folder}: a chunk of {tensor.name!r} is {got}, expected {dtype_name(tensor.dtype)}{list(sizes)}."
            )
        whole[where] = value
        missing[where] = False
    if missing.any():
        raise CheckpointError(f"{folder}: chunks of {tensor.name!r} leave {int(missing.sum())} of its elements out.")
    return whole


def _add_values(values: dict[str, Value], name: str, value: Any) -> None:
    """Add the numbers, texts and booleans in ``value`` to ``values``. Items of lists and dicts have dotted names.

    Each None in ``value`` is skipped. Raises CheckpointError for any other object, or for a name that ``values`` has already.
    """
    for own, leaf in named_leaves(value, keys=(name,)):
        if leaf is None:
            continue
        if not isinstance(leaf, bool | int | float | str):
            raise CheckpointError(
                f"from_dcp(): {own!r} is {type(leaf).__name__} {leaf!r:.60}, expected a tensor, number, text or boolean. "
                f"ignore={name!r} leaves it out."
            )
        if own in values:
            raise CheckpointError(f"from_dcp(): two values would both have the name {own!r}. ignore={name!r} leaves one out.")
        values[own] = leaf
