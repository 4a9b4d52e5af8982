"""Saving: each rank writes its own file, and rank 0 the manifest, which makes a checkpoint of them."""

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import xxhash

from fsharp.checkpoint.catalog import Checkpoint, checkpoints, folder_name
from fsharp.checkpoint.entries import Contents, contents_of, expanded
from fsharp.checkpoint.manifest import NAME, Chunk, FileRecord, Manifest, TensorRecord, as_json
from fsharp.checkpoint.reading import ShardFile
from fsharp.checkpoint.shard_file import METADATA, TABLE, Tensor, bytes_of, header_of, in_order, write_file
from fsharp.checkpoint.storage import full_path, storage_of
from fsharp.errors import CheckpointError
from fsharp.functional.comm.agree import gather_bytes, together
from fsharp.functional.comm.protocol import Comm

_log = logging.getLogger("fsharp")
T = TypeVar("T")
_SPARE_NBYTES = 1 << 20
"""Room for the manifest and headers."""


@dataclass
class Snapshot:
    """What all ranks have agreed to save.

    Attributes:
        contents: of the tree.
        step: that it is of.
        config: of the run.
        metric: how good it is.
        save_id: 16 hexadecimal digits, drawn by rank 0.
        folder: of the checkpoint, once it is complete.
        tensors: what this rank writes, in the order in which it does.
        values: their elements, in memory that must not change until they are written.
    """

    contents: Contents
    step: int
    config: Any
    metric: float | None
    save_id: str
    folder: str
    tensors: list[Tensor]
    values: Iterable[torch.Tensor]


def save(
    root: str | os.PathLike[str], tree: Any, *, step: int, comm: Comm, config: Any = None, metric: float | None = None
) -> Checkpoint:
    """Write a checkpoint, which loads into any other strategy, mesh and number of ranks.

    >>> import tempfile, fsharp as fs
    >>> layout = fs.plan({"w": torch.arange(6.)}, fs.Mesh({"dp": 1}), fs.zero3("dp"))
    >>> params = fs.shard({"w": torch.arange(6.)}, layout, fs.SingleComm())
    >>> with tempfile.TemporaryDirectory() as root:
    ...     found = fs.checkpoint.save(root, {"params": params, "seen": 512}, step=7, comm=fs.SingleComm())
    ...     found.step, found.names, found.tensor("params.w"), found.manifest.values
    (7, ['params.w'], tensor([0., 1., 2., 3., 4., 5.]), {'seen': 512})

    Args:
        root: folder that all ranks see, or a URL of fsspec. Each checkpoint gets a folder of its own in it, which is complete
            or is not there, and is not written to again.
        tree: a pytree of :class:`~fsharp.Sharded` (a :class:`~fsharp.TrainState` is one), tensors that are equal on all ranks,
            :class:`PerRank`, numbers, strings and None. Objects with ``state_dict()`` and ``load_state_dict()``, such as a
            ShardedModule, a ShardedOptimizer or a scheduler of learning rates, stand for what the former returns.
        step: a number to know it by. One may be saved twice; neither replaces the other.
        comm: the ranks; a Scheduler is one as well.
        config: anything JSON can say, kept in the manifest; ranks have to give the same.
        metric: how good it is, lower being better: :func:`prune` keeps the best.

    Returns:
        The checkpoint.

    Raises:
        TreeError: a leaf that cannot be saved.
        AgreementError: ranks with other trees, values, configurations or paths, or of which one has failed. Nothing is left.
        CheckpointError: not enough room, or a file that does not read back as it was written. Nothing is left.

    Cost: a rank writes its share, replicas dividing theirs, and reads it back; three collectives of 40 bytes and two of less
    for each axis. Nothing is planned together: who writes what follows from the layout. Memory: of tensors on a device one at
    a time.
    """
    return write_snapshot(agreed_snapshot(root, tree, step=step, comm=comm, config=config, metric=metric), comm)


def agreed_snapshot(
    root: str | os.PathLike[str], tree: Any, *, step: int, comm: Comm, config: Any, metric: float | None
) -> Snapshot:
    """What to save, once all ranks want to save the same and there is room for it. See :func:`save`."""
    where, draw, folder = full_path(root), secrets.token_bytes(8), ""

    states = expanded(tree)  # may be an agreement of its own

    def check() -> Contents:
        nonlocal folder, config
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"save(): step is {step!r}, expected a whole number from 0.")
        try:
            config = as_json(config)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"save(): config is nothing that JSON can say: {error}.") from error
        if not isinstance(metric, float | int | None):
            raise CheckpointError(f"save(): metric is {metric!r}, expected a number: float(x) of a tensor.")
        contents = contents_of("save()", states, comm)
        for name in (TABLE, METADATA):
            if name in contents.entries:
                raise CheckpointError(f"save(): the name {name!r} is taken.")
        if comm.rank == 0:
            _check_room(where, contents)
            mine = f"{where}/{folder_name(step, draw.hex())}"
            told(mine, lambda: storage_of(where).stage(mine))
            folder = mine
        return contents

    def fields(contents: Contents) -> dict[str, str]:
        text = json.dumps(config, sort_keys=True)
        return {"step": str(step), "root": where, "config": text, "metric": repr(metric), **_fields(contents)}

    try:
        contents = together("save()", comm, check, fields)
        save_id = gather_bytes(draw, comm)[0].hex()
    except BaseException:
        if folder:
            _abandon(folder)
        raise
    tensors, values = [], []
    for entry in contents.entries.values():
        (first, last), mine = entry.written_by(comm.rank), entry.piece(comm.rank)
        if first < last:
            shape = entry.shape if last - first == entry.numel else (last - first,)
            tensors.append(Tensor(entry.name, entry.dtype, shape))
            values.append(entry.local[first - mine.first : last - mine.first])
    order = in_order(tensors)
    return Snapshot(
        contents,
        step,
        config,
        None if metric is None else float(metric),
        save_id,
        f"{where}/{folder_name(step, save_id)}",
        [tensors[i] for i in order],
        [values[i] for i in order],
    )


def _check_room(root: str, contents: Contents) -> None:
    free = storage_of(root).free_nbytes(root)
    need = sum(entry.numel * entry.dtype.itemsize for entry in contents.entries.values()) + _SPARE_NBYTES
    if free is not None and need > free:
        raise CheckpointError(f"{root}: {free:,} bytes are free, and this checkpoint takes {need:,}. Nothing was written.")


def _fields(contents: Contents) -> dict[str, str]:
    entries = contents.entries.values()
    same = [f"{e.name}: {xxhash.xxh3_64_hexdigest(bytes_of(e.local.cpu()))}" for e in entries if e.is_replicated]
    return {
        **contents.fields(),
        "values": "\n".join(f"{name}: {value!r}" for name, value in contents.values.items()),
        "values of tensors, which PerRank() allows to differ": "\n".join(same),
    }


def told(path: str, write: Callable[[], T]) -> T:
    """What ``write`` returns; what the file system says against it is said of ``path``."""
    try:
        return write()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror}. Either it was removed, or this rank does not see the folder that "
            "rank 0 has made: root has to be in a file system that all ranks share."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}.") from error


def write_snapshot(shot: Snapshot, comm: Comm) -> Checkpoint:
    """Write it: see :func:`save`."""
    storage, staged = storage_of(shot.folder), storage_of(shot.folder).staging_path(shot.folder)
    path = f"{staged}/{_file_name(comm.rank)}"

    def write() -> FileRecord:
        header = header_of(shot.tensors, {"save_id": shot.save_id, "rank": str(comm.rank)})
        with storage.writing(path) as out:
            digest = write_file(out, header, (value.cpu() for value in shot.values))
        record = FileRecord(_file_name(comm.rank), storage.nbytes(path), digest)
        if wrong := ShardFile(storage, staged, record, comm.rank, shot.save_id).damaged_blocks():
            raise CheckpointError(f"{path}: {len(wrong)} blocks do not read back as they were written.")
        return record

    is_published = False

    def commit(records: list[FileRecord]) -> None:
        nonlocal is_published
        for record in records:
            found = storage.nbytes(f"{staged}/{record.name}")
            if found != record.nbytes:
                raise CheckpointError(f"{staged}/{record.name}: rank 0 sees {found:,} bytes of {record.nbytes:,}.")
        with storage.writing(f"{staged}/{NAME}") as out:
            out(memoryview(_manifest(shot, records, comm).to_json()))
        if Checkpoint(staged).manifest.save_id != shot.save_id:
            raise CheckpointError(f"{staged}/{NAME}: does not read back as it was written.")
        storage.publish(staged, shot.folder)
        is_published = True

    try:
        mine = together("save()", comm, lambda: told(path, write))
        sent = gather_bytes(mine.nbytes.to_bytes(8, "big") + bytes.fromhex(mine.digest or ""), comm)
        records = [
            FileRecord(_file_name(rank), int.from_bytes(data[:8], "big"), data[8:].hex()) for rank, data in enumerate(sent)
        ]
        together("save()", comm, lambda: told(shot.folder, lambda: commit(records)) if comm.rank == 0 else None)
    except BaseException:
        if comm.rank == 0 and not is_published:
            _abandon(shot.folder)
        raise
    return Checkpoint(shot.folder)


def _abandon(folder: str) -> None:
    """Remove what was staged; that this fails as well is not the error to raise."""
    storage = storage_of(folder)
    try:
        storage.remove(storage.staging_path(folder))
    except CheckpointError as error:
        _log.warning("%s", error)


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _manifest(shot: Snapshot, records: list[FileRecord], comm: Comm) -> Manifest:
    """The whole of it: which rank wrote what follows from the layouts."""
    tensors, before = {}, max((each.manifest.created for each in checkpoints(os.path.dirname(shot.folder))), default=0.0)
    for entry in shot.contents.entries.values():
        chunks = (Chunk(rank, *entry.written_by(rank)) for rank in range(comm.mesh.size))
        in_place = sorted((chunk for chunk in chunks if chunk.first < chunk.last), key=lambda chunk: chunk.first)
        tensors[entry.name] = TensorRecord(entry.dtype, entry.shape, tuple(in_place))
    return Manifest(
        save_id=shot.save_id,
        step=shot.step,
        created=max(time.time(), math.nextafter(before, math.inf)),
        mesh=dict(comm.mesh.axes),
        versions={"fsharp": version("fsharp"), "torch": torch.__version__},
        config=shot.config,
        metric=shot.metric,
        files=tuple(records),
        tensors=tensors,
        aliases=shot.contents.aliases,
        values=shot.contents.values,
    )
