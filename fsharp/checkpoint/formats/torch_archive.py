"""A reader of archives of ``torch.save`` with plain values and tensors.

The reader runs no code of the archive, and allocates no tensor that is larger than the archive. ``torch.load`` with
``weights_only=True`` runs no code either, but allocates whatever size an archive declares, such as a terabyte.
"""

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import IO, Any

import torch

from fsharp.checkpoint.storage import Storage

ZIP_FIRST_BYTES = b"PK\x03\x04"  # of every archive
_SPARE_NBYTES = 1 << 20
_LOCAL_HEADER_NBYTES = 30
_ITEMS_PER_BYTE = 16  # an item takes a byte at least; a tuple that many dicts share, such as betas, takes two bytes in each


def load_archive(data: bytes | bytearray) -> Any:
    """Return the object in an archive of ``torch.save``: values and tensors in dicts, lists and tuples.

    ``data`` is all bytes of the archive. Raises ValueError for an object of another class, compressed or overlapping records,
    and bytes that differ from their checksum. Raises ValueError for a tensor longer than its bytes, and more than 16 items for
    each byte of the pickle. A damaged pickle may raise any error. Memory: twice the size of ``data``.
    """

    def bytes_in(begin: int, record: zipfile.ZipInfo) -> torch.Tensor:
        part = bytearray(data[begin : begin + record.file_size])
        _check_crc(record, part)
        return torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8, device="cpu")

    return _unpickle_archive(io.BytesIO(data), len(data), bytes_in)[1]


def load_archive_on_meta(storage: Storage, path: str) -> tuple[bytes, Any]:
    """Return the bytes of an archive's pickle, and the object in the archive, with tensors on the meta device.

    Each tensor's storage is as large as the file: byte ``i`` of the storage stands for byte ``i`` of the file. So a tensor's
    first element is at byte ``storage_offset() * itemsize`` of the file. Raises the errors of :func:`load_archive`. The pickle
    is compared with its checksum; elements are not read.

    Cost: reads the list of records, the pickle, and the header of each tensor's record; a header has 30 bytes.
    """
    size = storage.nbytes(path)
    whole = torch.empty(size, dtype=torch.uint8, device="meta")
    return _unpickle_archive(
        io.BufferedReader(_ArchiveFileIO(storage, path, size)), size, lambda begin, x: whole[begin : begin + x.file_size]
    )


def _check_crc(record: zipfile.ZipInfo, data: bytes | bytearray) -> None:
    """Raise a ValueError if ``data`` differs from the checksum of ``record``; 0 means that torch was told to compute none."""
    if record.CRC and zlib.crc32(data) != record.CRC:
        raise ValueError(f"record {record.filename!r:.80} is damaged: its bytes differ from their checksum")


def _unpickle_archive(
    file: IO[bytes], size: int, bytes_in: Callable[[int, zipfile.ZipInfo], torch.Tensor]
) -> tuple[bytes, Any]:
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("its records are compressed, which torch.save does not do")
        nbytes = sum(record.file_size for record in records)
        if nbytes > size:
            raise ValueError("its records overlap")
        (found,) = [record for record in records if record.filename.endswith("/data.pkl")]
        if found.file_size > nbytes - found.file_size + _SPARE_NBYTES:
            raise ValueError(f"its pickle of {found.file_size:,} bytes is larger than all that it describes")

        def begin_of(record: zipfile.ZipInfo) -> int:
            file.seek(record.header_offset)
            sizes = struct.unpack_from("<HH", file.read(_LOCAL_HEADER_NBYTES), 26)  # of name and padding
            begin: int = record.header_offset + _LOCAL_HEADER_NBYTES + sum(sizes)
            if begin + record.file_size > size:
                raise ValueError(f"record {record.filename!r:.80} ends behind the end of the file")
            return begin

        def read(record: zipfile.ZipInfo) -> bytes:
            file.seek(begin_of(record))
            data = file.read(record.file_size)
            _check_crc(record, data)
            return data

        def elements(key: str) -> torch.Tensor:
            record = archive.getinfo(f"{folder}data/{key}")
            return bytes_in(begin_of(record), record)

        folder, data = found.filename.removesuffix("data.pkl"), read(found)
        if f"{folder}byteorder" in archive.namelist() and read(archive.getinfo(f"{folder}byteorder")) != b"little":
            raise ValueError("its elements have the other byte order")
        tree = _ArchiveUnpickler(data, elements).load()
        _check_num_items(tree, _ITEMS_PER_BYTE * len(data))
        return data, tree


def _check_num_items(tree: Any, most: int) -> None:
    """Raise a ValueError if dicts, lists and tuples have more than ``most`` items. An object at two places counts twice."""
    todo, left = [tree], most
    while todo:
        each = todo.pop()
        items = each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else ()
        left -= len(items)
        if left < 0:
            raise ValueError(f"its pickle repeats lists or dicts: it has more than {most:,} items, {_ITEMS_PER_BYTE} a byte")
        todo.extend(items)


class _ArchiveFileIO(io.RawIOBase):
    """A file object for ``zipfile`` over a file on a disk or in an object store."""

    def __init__(self, storage: Storage, path: str, size: int) -> None:
        self._storage, self._path, self._size, self._at = storage, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")[: max(0, self._size - self._at)]
        self._storage.read(self._path, self._at, view)
        self._at += len(view)
        return len(view)


class _ArchiveUnpickler(pickle.Unpickler):
    """An unpickler of only dtypes, ``_KNOWN_GLOBALS``, and tensors. ``elements(key)`` returns the bytes of a record."""

    def __init__(self, data: bytes, elements: Callable[[str], torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._elements = elements
        self._read: dict[str, torch.Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN_GLOBALS.get((module, name))
        if found is None and module in ("torch", "torch.storage") and name.endswith("Storage"):
            # torch warns of the property dtype, and not of the attribute behind it
            found = torch.uint8 if name == "UntypedStorage" else getattr(getattr(torch, name, None), "_dtype", None)
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise ValueError(f"it asks for {module}.{name}, expected tensors, numbers, texts and booleans")
        return found

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Return all elements of the record that ``pid`` names, as a 1-D tensor of the dtype in ``pid``."""
        _, dtype, key, _, _ = pid
        if key not in self._read:
            self._read[key] = self._elements(key)
        return self._read[key].view(dtype)


def _rebuild_tensor(
    elements: torch.Tensor, first: int, shape: Sequence[int], strides: Sequence[int], *rest: Any
) -> torch.Tensor:
    """Return the tensor for which a pickle calls torch's ``_rebuild_tensor_v2`` or ``_rebuild_tensor_v3``.

    ``elements``: the whole storage, 1-D. ``first``: the storage offset. ``rest``: ``requires_grad`` and hooks, which are
    ignored. Then a dtype may follow, in which ``elements`` are viewed, and then metadata. Raises ValueError if the metadata is
    not empty, or if the tensor is longer than its storage.
    """
    _, _, *more = rest  # requires_grad and hooks
    dtype, *metadata = more if more and isinstance(more[0], torch.dtype) else (None, *more)
    if any(metadata):
        raise ValueError(f"a tensor with {metadata[0]!r:.80}, expected plain elements")
    elements = elements if dtype is None else elements.view(dtype)
    last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    numel: int = math.prod(shape)
    if min(first, *shape, *strides, 0) < 0 or (numel and last >= elements.numel()):
        raise ValueError(f"a tensor of shape {list(shape)!r:.80} is longer than its bytes")
    if not numel:
        return elements.new_empty(tuple(shape))
    return elements.as_strided(tuple(shape), tuple(strides), elements.storage_offset() + first)


_KNOWN_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
}
