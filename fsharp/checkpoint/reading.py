"""Reading: read the needed bytes alone, compare each block with its digest, and use a bounded buffer."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fsharp.checkpoint.formats.huggingface import describe_file
from fsharp.checkpoint.manifest import Chunk, FileRecord, Manifest
from fsharp.checkpoint.shard_file import (
    BLOCK_NBYTES,
    DIGEST_TABLE_NAME,
    SAFETENSORS_DTYPES,
    TensorExtent,
    block_digests,
    file_digest,
    header_end,
    parse_header,
)
from fsharp.checkpoint.storage import Storage, storage_of
from fsharp.errors import CheckpointError, TreeError
from fsharp.functional.formats.host_memory import bytes_of

BUFFER_NBYTES = 4 << 20  # small enough for the processor's cache, in which bytes are compared and copied


class NeededElements(NamedTuple):
    """The elements ``[first, last)`` of tensor ``name`` that a rank needs, in ``target``: 1-D, of any device and dtype."""

    name: str
    first: int
    last: int
    target: torch.Tensor


class FileRange(NamedTuple):
    """Bytes ``begin`` to ``end`` after a file's header: elements of tensor ``name`` in ``dtype``, to read into ``target``."""

    begin: int
    end: int
    dtype: torch.dtype
    target: torch.Tensor
    name: str


class CoalescedRead(NamedTuple):
    """One read of a file, which serves several ranges: ``nbytes`` bytes, from byte ``start`` of the file on.

    ``parts``: a triple ``(begin, end, range)`` for each range that the read serves in full or in part. ``begin`` and ``end``
    are the limits of the served bytes, in bytes after the header, as in ``range``.
    """

    start: int
    nbytes: int
    parts: list[tuple[int, int, FileRange]]


class Reader:
    """Reads elements of one checkpoint. Keeps the header and digests of each file that was read: 0.2 % of the file's size."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self._folder, self._manifest, self._storage = folder, manifest, storage_of(folder)
        self._files: dict[int, ShardFileReader] = {}

    @torch.no_grad()
    def read(self, needs: Iterable[NeededElements], *, buffer_nbytes: int = BUFFER_NBYTES) -> None:
        """Read ``needs`` into their targets, through a buffer of at least one block. CheckpointError names a damaged file."""
        for number, parts in needed_elements_by_file(self._manifest, needs).items():
            file = self._files.get(number)
            if file is None:
                record = self._manifest.files[number]
                file = ShardFileReader(self._storage, self._folder, record, number, self._manifest.save_id)
                self._files[number] = file
            file.read(file.element_byte_ranges(self._manifest, parts), buffer_nbytes)


def needed_elements_by_file(
    manifest: Manifest, needs: Iterable[NeededElements]
) -> dict[int, list[tuple[Chunk, NeededElements]]]:
    """Return, by file number, pairs of a chunk and the needed elements of the chunk."""
    found: dict[int, list[tuple[Chunk, NeededElements]]] = {}
    for need in needs:
        for chunk in manifest.tensors[need.name].chunks:
            first, last = max(chunk.first, need.first), min(chunk.last, need.last)
            if first < last:
                part = NeededElements(need.name, first, last, need.target[first - need.first : last - need.first])
                found.setdefault(chunk.file, []).append((chunk, part))
    return dict(sorted(found.items()))


def check_file_size(storage: Storage, path: str, nbytes: int) -> None:
    """Raise a CheckpointError if a file is missing or does not have ``nbytes`` bytes."""
    try:
        size = storage.nbytes(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; it had {nbytes:,} bytes.") from error
    if size != nbytes:
        raise CheckpointError(f"{path}: {size:,} bytes, expected {nbytes:,}.")


class ShardFileReader:
    """Reads parts of a checkpoint's file number ``number``. CheckpointError if size or digest differ from ``record``.

    ``fetched``: header and digest table, if the file is on another host: then the caller also fetches the elements.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        record: FileRecord,
        number: int,
        save_id: str,
        fetched: tuple[bytes, bytes] | None = None,
    ) -> None:
        self.path, self._storage, self._number = f"{folder}/{record.name}", storage, number
        size = record.nbytes
        if fetched is None:
            check_file_size(storage, self.path, size)
        if record.digest is None:
            described = describe_file(storage, self.path)
            self._data, self._table, self._extents = described.start, b"", described.tensors
            self._end = size - described.start
            return
        # Nothing in the header or the table, which is last in the file, is used before their digest is compared.
        if fetched is None:
            length = header_end(self.path, self._read_bytes(0, min(8, size)), size)
            table_nbytes = digest_table_nbytes(size - length)
            fetched = self._read_bytes(0, length), self._read_bytes(size - table_nbytes, table_nbytes)
        header, table = fetched
        length, end = len(header), size - len(table)
        if file_digest(header, table) != record.digest:
            raise CheckpointError(f"{self.path}, written by rank {number}: the header or the table of digests is damaged.")
        found, metadata = parse_header(self.path, header, size)
        if metadata.get("save_id") != save_id:
            raise CheckpointError(f"{self.path}: it belongs to save {metadata.get('save_id')!r:.80}, expected {save_id!r}.")
        if found.get(DIGEST_TABLE_NAME) != TensorExtent(torch.uint8, end - length, size - length, (size - end,)):
            raise CheckpointError(f"{self.path}: its table of digests is not where it should be.")
        self._data, self._table, self._extents = length, table, found
        self._end = size - length - len(table)

    def offset_past_header(self, name: str, dtype: torch.dtype, chunk: Chunk) -> int:
        """Return where a chunk of a tensor begins, in bytes after the header. CheckpointError if the file lacks the tensor."""
        found = self._extents.get(name)
        expected = dtype if dtype in SAFETENSORS_DTYPES or not self._table else torch.uint8
        if found is not None and self._table and found.begin % dtype.itemsize:
            raise CheckpointError(f"{self.path}: {name!r:.80} begins at byte {found.begin}, within an element.")
        if found is None or found.dtype != expected or found.end - found.begin != (chunk.last - chunk.first) * dtype.itemsize:
            size = f"{chunk.last - chunk.first:,} elements of {dtype}"
            raise CheckpointError(f"{self.path}: it has {found or 'nothing'} of {name!r:.200}, expected {size}.")
        return found.begin

    def element_byte_ranges(self, manifest: Manifest, parts: Iterable[tuple[Chunk, NeededElements]]) -> list[FileRange]:
        """Return where in the file each of ``parts`` is, in order of the first byte. Raises as :meth:`offset_past_header` does.

        ``parts``: pairs of a chunk in this file and the elements of the chunk that are needed.
        """
        found = []
        for chunk, part in parts:
            dtype = manifest.tensors[part.name].dtype
            begin = self.offset_past_header(part.name, dtype, chunk) + (part.first - chunk.first) * dtype.itemsize
            found.append(FileRange(begin, begin + (part.last - part.first) * dtype.itemsize, dtype, part.target, part.name))
        return sorted(found, key=lambda file_range: file_range.begin)

    def _read_bytes(self, start: int, size: int) -> bytes:
        data = bytearray(size)
        self._storage.read(self.path, start, memoryview(data))
        return bytes(data)

    def read(self, ranges: Sequence[FileRange], buffer_nbytes: int) -> None:
        """Read ``ranges``, in order of the first byte and without overlaps, into their targets, ``buffer_nbytes`` at a time."""
        reads = self.coalesced_reads(ranges, buffer_nbytes)
        whole = torch.empty(max((each.nbytes for each in reads), default=0), dtype=torch.uint8, device="cpu")
        for each in reads:
            buffer = whole[: each.nbytes]
            self._storage.read(self.path, each.start, bytes_of(buffer))
            self.fill_targets(each, buffer)

    def coalesced_reads(self, ranges: Sequence[FileRange], buffer_nbytes: int) -> list[CoalescedRead]:
        """Return reads that cover ``ranges`` in order, each at most ``buffer_nbytes`` or a block. Digests need whole blocks."""
        block, most = BLOCK_NBYTES if self._table else 1, max(BLOCK_NBYTES, buffer_nbytes // BLOCK_NBYTES * BLOCK_NBYTES)
        found, start, stop = list[CoalescedRead](), 0, 0
        for file_range in ranges:
            begin = file_range.begin
            while begin < file_range.end:
                low = begin // block * block
                if not found or block == 1 or not start <= low <= stop or begin >= start + most:
                    start = stop = low
                    found.append(CoalescedRead(self._data + start, 0, []))
                last = min(file_range.end, start + most)
                found[-1].parts.append((begin, last, file_range))
                stop, begin = max(stop, -(-last // block) * block), last
                found[-1] = found[-1]._replace(nbytes=min(stop, self._end) - start)
        return found

    def fill_targets(self, read: CoalescedRead, buffer: torch.Tensor) -> None:
        """Fill the targets of ``read`` from ``buffer``, which has the bytes that were read.

        Raises CheckpointError if a digest differs, and TreeError if a finite value is infinite in the dtype of its target.
        """
        start = read.start - self._data
        if self._table and (wrong := self._damaged_block_starts(start, bytes_of(buffer))):
            raise CheckpointError(self.damage_text(wrong))
        for begin, stop, file_range in read.parts:
            data = buffer[begin - start : stop - start]
            if data.storage_offset() % file_range.dtype.itemsize:
                data = data.clone()  # in a file of another library elements may begin at any byte
            first, last = ((x - file_range.begin) // file_range.dtype.itemsize for x in (begin, stop))
            target, values = file_range.target, data.view(file_range.dtype)
            if target.dtype != values.dtype:
                values = cast_without_overflow(values, target.dtype, file_range.name)
            target[first:last].copy_(values)

    def _damaged_block_starts(self, start: int, view: memoryview) -> list[int]:
        """Return the first byte of each block in ``view`` that differs from its digest. ``start``: first byte of ``view``.

        All bytes are counted from the end of the header.
        """
        found, first = block_digests(view), start // BLOCK_NBYTES * 8
        expected = self._table[first : first + len(found)]  # not the rest of the table, which each read would copy
        if expected == found:
            return []
        return [start + i * BLOCK_NBYTES // 8 for i in range(0, len(found), 8) if found[i : i + 8] != expected[i : i + 8]]

    def damage_text(self, blocks: Sequence[int]) -> str:
        """Return the text of an error that names up to four tensors in damaged blocks.

        ``blocks``: first byte of each damaged block, counted from the end of the header, in order.
        """

        def is_damaged(extent: TensorExtent) -> bool:
            first = bisect_right(blocks, extent.begin - BLOCK_NBYTES)
            return first < len(blocks) and blocks[first] < extent.end

        names = [name for name, extent in self._extents.items() if name != DIGEST_TABLE_NAME and is_damaged(extent)]
        shown = ", ".join(f"{name!r:.200}" for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"{self.path}, written by rank {self._number}: {len(blocks)} blocks of {BLOCK_NBYTES:,} bytes are damaged, the "
            f"first at byte {self._data + blocks[0]:,}, in {shown}: they are not what was written."
        )

    def find_damaged_block_starts(self) -> list[int]:
        """Read the whole file, and return the first byte after the header of each block whose digest differs from the table."""
        wrong = []
        buffer = bytearray(1 << 20)
        for start in range(0, self._end, len(buffer)):
            view = memoryview(buffer)[: min(len(buffer), self._end - start)]
            self._storage.read(self.path, self._data + start, view)
            wrong += self._damaged_block_starts(start, view)
        return wrong


def cast_without_overflow(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return ``values`` of tensor ``name`` in another dtype. Raises TreeError if a finite value becomes infinite."""
    result = values.to(dtype)
    if (lost := result.isinf()).any():
        lost &= ~values.to(torch.complex128 if values.is_complex() else torch.float64).isinf()
        if lost.any():
            raise TreeError(
                f"load(): {name!r:.200} has {values[lost][0].item()!r} as {values.dtype}, which is infinite as {dtype}. "
                "Load the tensor in a dtype with a larger range."
            )
    return result


def digest_table_nbytes(nbytes_after_header: int) -> int:
    """Return the bytes of a file's table of digests, from the bytes of elements and table together."""
    blocks = nbytes_after_header // (BLOCK_NBYTES + 8)
    return 8 * (blocks + (nbytes_after_header - blocks * (BLOCK_NBYTES + 8) > 0))


def describe_damaged_files(folder: str, manifest: Manifest) -> list[str]:
    """Read all files of a checkpoint, and return an error message for each damaged file."""
    storage, problems, no_target = storage_of(folder), [], torch.empty(0, device="cpu")
    needs = (NeededElements(name, 0, tensor.numel, no_target) for name, tensor in manifest.tensors.items())
    parts = needed_elements_by_file(manifest, needs)
    for number, record in enumerate(manifest.files):
        try:
            file = ShardFileReader(storage, folder, record, number, manifest.save_id)
            file.element_byte_ranges(manifest, parts.get(number, ()))
            if wrong := file.find_damaged_block_starts():
                problems.append(file.damage_text(wrong))
        except CheckpointError as error:
            problems.append(str(error))
    return problems
