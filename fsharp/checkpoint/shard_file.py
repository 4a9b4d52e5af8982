"""A rank's file: the safetensors format with a digest of each block, so that a reader of a part can check the part.

The safetensors package is not used, as it writes from memory that holds a whole file, and does not find damage. Any reader of
the format can read these files, and sees the table of digests as one more tensor.
"""

import gc
import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash

from fsharp.errors import CheckpointError
from fsharp.functional.formats.host_memory import bytes_of

BLOCK_NBYTES = 1 << 12  # under one digest: a reader of a part of a tensor reads at most two blocks more
DIGEST_TABLE_NAME = "fsharp.block_digests"
METADATA_NAME = "__metadata__"
_DIGEST_NBYTES = 8
_DIGEST_STEP_NBYTES = 1 << 20
_MAX_HEADER_NBYTES = 100 << 20
_SURROGATE_PATTERN = re.compile("[\ud800-\udfff]")
_DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32", torch.float64: "F64",
    torch.int64: "I64", torch.uint64: "U64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPE_BY_NAME = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
SAFETENSORS_DTYPES = frozenset(_DTYPE_NAMES)  # tensors of other dtypes are written as U8
SAVABLE_DTYPES = SAFETENSORS_DTYPES | {
    torch.complex32, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
}  # fmt: skip
"""Dtypes that can be saved. Quantized ones have scales besides; torch cannot copy integers narrower than a byte."""


class StoredTensor(NamedTuple):
    """Name, dtype and shape of elements that a file holds. ``shape``: the whole tensor's, or 1-D for a run of its elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


S = TypeVar("S", bound=Any)


def batches_by_nbytes(items: Iterable[S], max_nbytes: int) -> list[list[S]]:
    """Cut ``items`` into batches of at most ``max_nbytes``, in order, by their ``nbytes``. A larger item is alone."""
    found: list[list[S]] = []
    size = 0
    for item in items:
        if not found or size + item.nbytes > max_nbytes:
            found.append([])
            size = 0
        found[-1].append(item)
        size += item.nbytes
    return found


class TensorExtent(NamedTuple):
    """A tensor in a file: its dtype and shape, and its first byte and its end, counted from the end of the header."""

    dtype: torch.dtype
    begin: int
    end: int
    shape: tuple[int, ...]


def check_tensor_names(where: str, names: Collection[str]) -> None:
    """Raise a CheckpointError if a tensor has a name that the file format reserves or cannot hold."""
    if taken := {METADATA_NAME, DIGEST_TABLE_NAME}.intersection(names):
        raise CheckpointError(f"{where}: the name {min(taken)!r} is reserved in the file format: choose another.")
    if halves := [name for name in names if _SURROGATE_PATTERN.search(name)]:
        raise CheckpointError(f"{where}: {halves[0]!r} has half of a surrogate pair, which UTF-8 cannot hold: rename the key.")


def encode_header(tensors: Sequence[StoredTensor], metadata: Mapping[str, str], *, with_digests: bool = True) -> bytes:
    """Return a file's length field and header.

    The header lists ``tensors`` in order, and with ``with_digests`` also a table of digests.
    """
    described: dict[str, Any] = {METADATA_NAME: dict(metadata)}
    end = 0
    for tensor in tensors:
        name = _DTYPE_NAMES.get(tensor.dtype, "U8")
        shape = list(tensor.shape) if tensor.dtype in _DTYPE_NAMES else [tensor.nbytes]
        described[tensor.name] = {"dtype": name, "shape": shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    if with_digests:
        table = -(-end // BLOCK_NBYTES) * _DIGEST_NBYTES
        described[DIGEST_TABLE_NAME] = {"dtype": "U8", "shape": [table], "data_offsets": [end, end + table]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # elements start at multiples of 64 bytes
    return struct.pack("<Q", len(text)) + text


def header_json_prefix(metadata: Mapping[str, str]) -> bytes:
    """Return the bytes with which a header's JSON begins, if the header's metadata begin with the items of ``metadata``.

    >>> header_json_prefix({"save_id": "1a"})
    b'{"__metadata__":{"save_id":"1a"'
    """
    return json.dumps({METADATA_NAME: dict(metadata)}, separators=(",", ":"))[:-2].encode()


def file_nbytes(tensors: Sequence[StoredTensor], metadata: Mapping[str, str]) -> int:
    """Return the size of a file that holds these tensors, with this metadata in its header."""
    elements = sum(tensor.nbytes for tensor in tensors)
    return len(encode_header(tensors, metadata)) + elements + -(-elements // BLOCK_NBYTES) * _DIGEST_NBYTES


def in_write_order(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Return ``tensors`` in the order of a file: wide elements first, so that each element is aligned to its size."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def write_file(write: Callable[[memoryview], object], header: bytes, data: Iterator[torch.Tensor]) -> str:
    """Write a header, the tensors ``data``, in the header's order, and digests. Return the file's digest.

    One tensor of ``data`` is in memory at a time.
    """
    table, rest = bytearray(), bytearray()  # digests, and the bytes of the block that is not complete yet
    write(memoryview(header))
    for tensor in data:
        view = bytes_of(tensor)
        for start in range(0, len(view), _DIGEST_STEP_NBYTES):
            part = view[start : start + _DIGEST_STEP_NBYTES]
            begin = min(-len(rest) % BLOCK_NBYTES, len(part))
            rest += part[:begin]
            if len(rest) == BLOCK_NBYTES:
                table += block_digests(rest)
                rest.clear()
            end = begin + (len(part) - begin) // BLOCK_NBYTES * BLOCK_NBYTES
            table += block_digests(part[begin:end])
            rest += part[end:]
            write(part)
    table += block_digests(rest)
    write(memoryview(table))
    return file_digest(header, bytes(table))


def file_digest(header: bytes, table: bytes) -> str:
    """Return the XXH3-128 of a file's header and of its table of digests, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(header + table)


def block_digests(view: memoryview | bytearray) -> bytes:
    """Return the digests of the blocks in ``view``, joined; the last block may be short."""
    digest = xxhash.xxh3_64_digest
    return b"".join([digest(view[start : start + BLOCK_NBYTES]) for start in range(0, len(view), BLOCK_NBYTES)])


def parse_header(where: str, header: bytes, nbytes: int) -> tuple[dict[str, TensorExtent], dict[str, str]]:
    """Return tensors and metadata in the ``header`` of a file of ``nbytes`` bytes. Unknown dtypes are read as uint8, 1-D.

    Raises CheckpointError if the header is damaged, tensors have gaps or overlaps, or the file has another size than the header
    says.
    """
    try:
        described = parse_untrusted_json(header[8:])
        metadata = {str(k): str(v) for k, v in (described.pop(METADATA_NAME, None) or {}).items()}
        found = {}
        for name, each in described.items():
            (begin, end), shape = each["data_offsets"], [*each["shape"]]
            if any(type(x) is not int or x < 0 for x in (begin, end, *shape)):
                raise ValueError(f"{name!r:.80} has an offset or size that is not a count")
            dtype = _DTYPE_BY_NAME.get(each["dtype"])
            if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(f"{name!r:.80} takes {end - begin} bytes, which is not what {each['dtype']}{shape} takes")
            shape = shape if dtype else [end - begin]  # as bytes
            found[str(name)] = TensorExtent(dtype or torch.uint8, begin, end, tuple(shape))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: the header is damaged: {type(error).__name__} {error!s:.200}.") from error
    end = 0
    for name, extent in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if extent.begin != end or extent.end < extent.begin:
            raise CheckpointError(f"{where}: the header is damaged: {name!r:.80} begins at {extent.begin}, expected {end}.")
        end = extent.end
    if len(header) + end != nbytes:
        raise CheckpointError(f"{where}: {nbytes:,} bytes, expected {len(header) + end:,}.")
    return found, metadata


_BRACKETS_PER_BYTE = 6
_FREE_BRACKETS = 1 << 14


def parse_untrusted_json(data: bytes) -> Any:
    """Parse a JSON text from an untrusted source, and return its value.

    Raises ValueError if the text is not JSON, or has a name twice in an object. Also raises ValueError for too many brackets
    (:func:`check_brackets`), as an empty list takes 40 times its bytes in memory. Raises RecursionError if the value nests too
    deeply.
    """
    check_brackets(data)
    is_enabled = gc.isenabled()
    gc.disable()  # parsing makes no garbage, and collections would take five times as long as the parsing
    try:
        return json.loads(data, object_pairs_hook=refuse_repeated_names)
    finally:
        if is_enabled:
            gc.enable()


def check_brackets(data: bytes) -> None:
    """Raise ValueError if a JSON text has more opening brackets than a sixth of its bytes plus 16,384."""
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > _FREE_BRACKETS + len(data) // _BRACKETS_PER_BYTE:
        raise ValueError(f"{brackets:,} brackets in {len(data):,} bytes")


def refuse_repeated_names(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs, for ``json.loads``. Raises ValueError if a name has two values."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} appears twice")
        found[name] = value
    return found


def header_end(where: str, head: bytes, nbytes: int) -> int:
    """Return the size of length field and header of a file of ``nbytes`` bytes. ``head``: the first 8 bytes of the file.

    Raises CheckpointError if there is no room for a header of this size.
    """
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
    if not 2 <= length <= min(_MAX_HEADER_NBYTES, nbytes - 8):
        raise CheckpointError(f"{where}: this is not a safetensors file: its header would have {length:,} bytes.")
    return 8 + int(length)
