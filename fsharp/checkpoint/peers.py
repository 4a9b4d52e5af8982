"""Peers: find out which host holds which files of a save, and fetch bytes from other hosts."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from fsharp.checkpoint.catalog import Checkpoint, names_last_saved_first
from fsharp.checkpoint.manifest import MANIFEST_NAME, Manifest, checked_file_name
from fsharp.checkpoint.reading import (
    NeededElements,
    ShardFileReader,
    check_file_size,
    digest_table_nbytes,
    needed_elements_by_file,
)
from fsharp.checkpoint.saving import shard_file_name
from fsharp.checkpoint.shard_file import batches_by_nbytes, header_end
from fsharp.checkpoint.storage import LocalStorage, os_error_behind, raise_if_read_refused
from fsharp.errors import CheckpointError, log as _log
from fsharp.functional.comm.agree import all_gather_texts, check_on_all_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.host_memory import bytes_of

RANKS_AXIS = "ranks"  # the one axis of the Comms in this file
MESSAGE_NBYTES = 4 << 20  # bytes sent at once
_local_storage = LocalStorage()


class DamagedCopy(CheckpointError):
    """A file of a save, which hosts hold in memory, is damaged on one host.

    Attributes:
        rank: a rank on this host.
        file: name of the file.
    """

    def __init__(self, text: str, rank: int, file: str) -> None:
        super().__init__(text)
        self.rank, self.file = rank, file


@contextmanager
def _blaming_damage_on(rank: int, file: str) -> Iterator[None]:
    """Turn a CheckpointError of damage, raised in this context, into a :class:`DamagedCopy` of ``file`` on ``rank``'s host."""
    try:
        yield
    except CheckpointError as error:
        if os_error_behind(error) is not None:
            raise
        raise DamagedCopy(str(error), rank, file) from error


@dataclass(frozen=True)
class InMemorySave:
    """A save that hosts of the job hold in memory. Each host holds some of the save's files.

    Attributes:
        name: name of the save's folder on every host.
        num_files: number of the save's files.
        manifest_nbytes: size of the save's manifest, which every host with a file of the save has.
        hosts: for each host (the key is its first rank) a dict of its files, from the file's number to the size of its header.
    """

    name: str
    step: int
    created: float
    num_files: int
    manifest_nbytes: int
    hosts: dict[int, dict[int, int]]

    @property
    def lost_file_numbers(self) -> list[int]:
        """Numbers of the files that no host holds."""
        return sorted(set(range(self.num_files)).difference(*self.hosts.values()))

    def rank_to_fetch_from(self, file: int | None, rank: int, domain_size: int) -> int:
        """Return the rank from which ``rank`` fetches file number ``file``, or for None the manifest.

        Hosts with the file share the work. ``domain_size``: number of ranks on a host.
        """
        firsts = [first for first, heads in self.hosts.items() if file is None or file in heads]
        return firsts[rank // domain_size % len(firsts)] + rank % domain_size


CopyKey = tuple[str, int, str]
"""A file of a save on a host: name of the save, first rank of the host, name of the file."""


def held_saves(folder: str, comm: Comm, domain_size: int, damaged: Collection[CopyKey] = ()) -> list[InMemorySave]:
    """Return the saves that hosts hold in memory, even if some of their files are lost. All ranks call this.

    ``folder``: the folder of saves on each host. ``domain_size``: number of ranks on a host, which are consecutive. Copies in
    ``damaged`` do not count. Files and manifests of the wrong size do not count either, and are logged.
    """
    mine = check_on_all_ranks("restore()", comm, lambda: saves_on_this_host(folder) if comm.rank % domain_size == 0 else [])
    found: dict[str, InMemorySave] = {}
    for first, text in enumerate(all_gather_texts(json.dumps(mine), comm)):
        for name, step, created, num_files, manifest_nbytes, heads in json.loads(text):
            save = found.setdefault(name, InMemorySave(name, step, created, num_files, manifest_nbytes, {}))
            if (name, first, MANIFEST_NAME) not in damaged:
                save.hosts[first] = {no: size for no, size in heads if (name, first, shard_file_name(no)) not in damaged}
    return list(found.values())


def saves_on_this_host(folder: str) -> list[list[Any]]:
    """Return rows about the saves in ``folder``: name, step, time, number of files, size of the manifest, and headers.

    Headers are pairs ``(number of a file, size of its header)``.
    """
    saves = []
    for name in names_last_saved_first(folder):
        path = f"{folder}/{name}"
        try:
            manifest, manifest_nbytes = Checkpoint(path).manifest, _local_storage.nbytes(f"{path}/{MANIFEST_NAME}")
        except CheckpointError as error:
            raise_if_read_refused(error)
            _log.warning("left out: %s", error)
            continue
        heads, there = list[tuple[int, int]](), set(_local_storage.list_names(path))
        for number, record in enumerate(manifest.files):
            if record.name in there:
                file, first = f"{path}/{record.name}", bytearray(8)
                try:
                    check_file_size(_local_storage, file, record.nbytes)
                    _local_storage.read(file, 0, memoryview(first))
                    heads.append((number, header_end(file, bytes(first), record.nbytes)))
                except CheckpointError as error:
                    raise_if_read_refused(error)
                    _log.warning("left out: %s", error)
        saves.append([name, manifest.step, manifest.created, len(manifest.files), manifest_nbytes, heads])
    return saves


class FirstErrorKeeper:
    """Keeps the first error of this rank until the end of an exchange.

    Until then this rank takes part in the exchange, so that no other rank waits for this rank forever.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    def run(self, do: Callable[..., Any], *args: Any) -> Any:
        """Return ``do(*args)``. If ``do`` fails, keep the error, and return None. Later calls do nothing, and return None."""
        if self._error is None:
            try:
                return do(*args)
            except Exception as error:
                self._error = error
        return None

    def raise_if_failed(self) -> None:
        """Raise the error that :meth:`run` has kept, if there is one."""
        if self._error is not None:
            raise self._error


def shift_over_ranks(send: torch.Tensor, nbytes: int, shift: int, comm: Comm, *, label: str) -> torch.Tensor:
    """Send the bytes ``send`` to the rank ``shift`` further on, modulo the number of ranks. All ranks call this function.

    Return the ``nbytes`` bytes that this rank receives.
    """
    n = comm.mesh.size
    to, source = [0] * n, [0] * n
    to[(comm.rank + shift) % n], source[(comm.rank - shift) % n] = len(send), nbytes
    return comm.all_to_all(send, to, source, label=label)


class ReadRequest(NamedTuple):
    """A request to rank ``holder`` for ``nbytes`` bytes of a file. ``on_received`` is called with the bytes."""

    holder: int
    file: str
    start: int
    nbytes: int
    on_received: Callable[[torch.Tensor], None]


def _requests_to_fill(holder: int, file: str, start: int, into: bytearray) -> list[ReadRequest]:
    """Return requests to rank ``holder`` that fill ``into`` with the bytes of ``file`` from byte ``start`` on."""

    def fill(part: memoryview, data: torch.Tensor) -> None:
        part[:] = bytes_of(data)

    firsts = range(0, len(into), MESSAGE_NBYTES)
    parts = [(start + first, memoryview(into)[first : first + MESSAGE_NBYTES]) for first in firsts]
    return [ReadRequest(holder, file, at, len(part), partial(fill, part)) for at, part in parts]


def exchange_requested_bytes(folder: str, wanted: Sequence[ReadRequest], comm: Comm, keeper: FirstErrorKeeper) -> None:
    """Make the requests ``wanted``, and answer the requests of other ranks. All ranks call this function.

    Each request in ``wanted`` is to another rank, and for at most 4 MiB. ``folder`` is the folder of the save on this host.
    ``keeper`` keeps the first error; the rank still takes part to the end.

    Cost: one ``all_reduce``, and one round for each distance ``holder - rank``, modulo the number of ranks, that occurs in a
    request of any rank. A round sends the sizes of requests, the requests, and then the requested bytes, in pieces of 4 MiB.
    Memory: two pieces.
    """
    n = comm.mesh.size
    if n == 1:
        return
    asked = [
        batches_by_nbytes([each for each in wanted if each.holder == (comm.rank - shift) % n], MESSAGE_NBYTES)
        for shift in range(n)
    ]
    rounds = comm.all_reduce(torch.tensor([*map(len, asked)], device="cpu"), RANKS_AXIS, op="max", label="restore() rounds")
    outgoing = torch.empty(MESSAGE_NBYTES, dtype=torch.uint8, device="cpu")
    for shift in (shift for shift in range(1, n) if rounds[shift]):
        mine = [[each.file, each.start, each.nbytes] for batch in asked[shift] for each in batch]
        requests = json.loads(_shift_text_over_ranks(json.dumps(mine), comm, -shift))
        wanted_here = [ReadRequest(comm.rank, file, start, nbytes, lambda data: None) for file, start, nbytes in requests]
        theirs = batches_by_nbytes(wanted_here, MESSAGE_NBYTES)
        for i in range(int(rounds[shift])):
            send, end = outgoing[:0], 0
            for each in theirs[i] if i < len(theirs) else ():
                part = outgoing[end : end + each.nbytes]
                answer = FirstErrorKeeper()  # of its own: a rank that has failed before still answers other ranks
                answer.run(_serve_read_request, comm.rank, folder, each, bytes_of(part))
                keeper.run(answer.raise_if_failed)
                end += each.nbytes
                send = outgoing[:end]
            batch = asked[shift][i] if i < len(asked[shift]) else []
            receive = shift_over_ranks(send, sum(each.nbytes for each in batch), shift, comm, label="restore()")
            end = 0
            for each in batch:
                keeper.run(each.on_received, receive[end : end + each.nbytes])
                end += each.nbytes


def _serve_read_request(rank: int, folder: str, asked: ReadRequest, into: memoryview) -> None:
    """Read requested bytes into ``into``. ValueError for a file outside of ``folder``, DamagedCopy if the file lacks bytes."""
    with _blaming_damage_on(rank, checked_file_name(asked.file)):
        _local_storage.read(f"{folder}/{asked.file}", asked.start, into)


def _shift_text_over_ranks(text: str, comm: Comm, shift: int) -> str:
    body = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    head = torch.frombuffer(bytearray(len(body).to_bytes(8, "little")), dtype=torch.uint8)
    size = shift_over_ranks(head, 8, shift, comm, label="restore() sizes of requests")
    theirs = shift_over_ranks(body, int.from_bytes(bytes_of(size), "little"), shift, comm, label="restore() requests")
    return bytes(bytes_of(theirs)).decode()


def fetch_manifest(folder: str, save: InMemorySave, comm: Comm, domain_size: int) -> Manifest:
    """Return the manifest of a save in the memory of hosts. A host without the manifest gets it from another host.

    All ranks call this function. ``folder``: folder of the save on this host, with ``domain_size`` consecutive ranks.
    """
    has_it = comm.rank - comm.rank % domain_size in save.hosts
    keeper, data = FirstErrorKeeper(), bytearray(0 if has_it else save.manifest_nbytes)
    holder = save.rank_to_fetch_from(None, comm.rank, domain_size)
    exchange_requested_bytes(folder, _requests_to_fill(holder, MANIFEST_NAME, 0, data), comm, keeper)

    def read_manifest() -> Manifest:
        keeper.raise_if_failed()
        with _blaming_damage_on(comm.rank if has_it else holder, MANIFEST_NAME):
            return Checkpoint(folder).manifest if has_it else Manifest.from_json(f"{save.name}/{MANIFEST_NAME}", bytes(data))

    return check_on_all_ranks("restore()", comm, read_manifest)


@torch.no_grad()
def read_from_hosts(
    folder: str, save: InMemorySave, manifest: Manifest, needs: Sequence[NeededElements], comm: Comm, domain_size: int
) -> None:
    """Read the elements ``needs`` of ``save`` into their targets, from files on this host or on other hosts.

    All ranks call this function. ``folder`` is the folder of the save on this host, which has ``domain_size`` ranks. Raises
    DamagedCopy, on this rank alone, for missing or damaged bytes. Cost: each rank receives the needed blocks that its host does
    not hold, and the headers and digests of the files with these blocks.
    """
    here = save.hosts.get(comm.rank - comm.rank % domain_size, {})
    parts, keeper = needed_elements_by_file(manifest, needs), FirstErrorKeeper()
    away = {number: save.rank_to_fetch_from(number, comm.rank, domain_size) for number in parts if number not in here}
    fetched = dict[int, tuple[bytearray, bytearray]]()  # header and table of digests by number of the file

    def ask_heads() -> list[ReadRequest]:
        asked = []
        for number, holder in away.items():
            record, length = manifest.files[number], save.hosts[holder - holder % domain_size][number]
            head, table = bytearray(length), bytearray(digest_table_nbytes(record.nbytes - length))
            fetched[number] = head, table
            asked += _requests_to_fill(holder, record.name, 0, head)
            asked += _requests_to_fill(holder, record.name, record.nbytes - len(table), table)
        return asked

    def ask_elements() -> list[ReadRequest]:
        asked = []
        for number, holder in away.items():
            record = manifest.files[number]
            with _blaming_damage_on(holder, record.name):
                head, table = map(bytes, fetched[number])
                where = f"on the host of rank {holder}: {folder}"
                file = ShardFileReader(_local_storage, where, record, number, manifest.save_id, fetched=(head, table))
                reads = file.coalesced_reads(file.element_byte_ranges(manifest, parts[number]), MESSAGE_NBYTES)
            for read in reads:
                on_received = _blaming_damage_on(holder, record.name)(partial(file.fill_targets, read))
                asked.append(ReadRequest(holder, record.name, read.start, read.nbytes, on_received))
        return asked

    exchange_requested_bytes(folder, keeper.run(ask_heads) or [], comm, keeper)
    exchange_requested_bytes(folder, keeper.run(ask_elements) or [], comm, keeper)
    keeper.raise_if_failed()
    for number in parts.keys() & here.keys():
        with _blaming_damage_on(comm.rank, manifest.files[number].name):
            file = ShardFileReader(_local_storage, folder, manifest.files[number], number, manifest.save_id)
            file.read(file.element_byte_ranges(manifest, parts[number]), MESSAGE_NBYTES)
