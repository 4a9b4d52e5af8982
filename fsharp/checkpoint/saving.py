"""Saving: each rank writes its own file, and rank 0 then writes the manifest, which completes the checkpoint."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import optree
import torch
import xxhash

import fsharp
from fsharp.checkpoint.catalog import Checkpoint, folder_name, new_save_id, time_in_save_id
from fsharp.checkpoint.entries import (
    TensorEntry,
    TreeContents,
    contents_of,
    has_state_dict,
    is_node_saved_as_leaf,
    leaves_with_both_paths,
    too_deep_error,
    with_state_dicts,
)
from fsharp.checkpoint.manifest import MANIFEST_NAME, Chunk, FileRecord, Manifest, TensorRecord, json_round_trip, structure_of
from fsharp.checkpoint.reading import ShardFileReader
from fsharp.checkpoint.shard_file import (
    StoredTensor,
    check_brackets,
    check_tensor_names,
    encode_header,
    in_write_order,
    write_file,
)
from fsharp.checkpoint.storage import absolute_path, os_error_behind, storage_of
from fsharp.errors import CheckpointError, TreeError, log as _log, problem
from fsharp.functional.comm.agree import all_gather_fixed_size, check_on_all_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.host_memory import bytes_of
from fsharp.functional.layout.mesh import Mesh
from fsharp.type_checks import options_checked

T = TypeVar("T")
_SPARE_NBYTES = 1 << 20  # for the manifest and headers


@dataclass
class Snapshot:
    """The values of one save, and the folder to which they are written. All ranks have agreed on the save.

    Attributes:
        save_id: id of the save, which :func:`~fsharp.checkpoint.catalog.save_id_from_clock` has made on rank 0 for all ranks.
        folder: path of the checkpoint once it is complete.
        tensors: the tensors that this rank writes, in order.
        values: elements of ``tensors``, in memory that must not change before the write.
        failure: the error that kept this rank from copying its values after ranks had agreed, or None. It is raised, on all
            ranks, when the snapshot is written.
        is_by_saver: whether a Saver writes the checkpoint, which it may later remove.
    """

    contents: TreeContents
    step: int
    config: Any
    metric: float | None
    save_id: str
    folder: str
    tensors: list[StoredTensor]
    values: Iterable[torch.Tensor]
    failure: Exception | None = None
    is_by_saver: bool = False


@options_checked
def save(
    root: str | os.PathLike[str],
    tree: Any,
    *,
    step: int,
    comm: Comm,
    config: Any = None,
    metric: float | None = None,
    planes: bool = False,
) -> Checkpoint:
    """Write a checkpoint, which loads under any other strategy, mesh and number of ranks.

    >>> import tempfile, fsharp as fs
    >>> layout = fs.plan({"w": torch.arange(6.)}, fs.Mesh({"dp": 1}), fs.zero3("dp"))
    >>> params = fs.shard({"w": torch.arange(6.)}, layout, fs.SingleComm())
    >>> with tempfile.TemporaryDirectory() as root:
    ...     found = fs.checkpoint.save(root, {"params": params, "seen": 512}, step=7, comm=fs.SingleComm())
    ...     found.step, found.tensor_names, found.tensor("params.w"), found.manifest.values
    (7, ['params.w'], tensor([0., 1., 2., 3., 4., 5.]), {'seen': 512})

    Args:
        root: a folder that all ranks see, or a URL of fsspec. The checkpoint is a new folder in ``root``, which appears when
            the checkpoint is complete, and never changes.
        tree: a pytree of :class:`~fsharp.Sharded`, such as a :class:`~fsharp.TrainState`; tensors that are equal on all ranks;
            :class:`~fsharp.checkpoint.PerRank`; numbers, strings and None. An object with ``state_dict()`` and
            ``load_state_dict()``, such as a ShardedModule, a ShardedOptimizer or a learning rate scheduler, is saved as its
            ``state_dict()``.
        step: number of the step. Two saves of one step are two checkpoints.
        comm: the ranks; a Scheduler also works.
        config: a value that JSON can hold, kept in the manifest; equal on all ranks.
        metric: a score, such as a loss; equal on all ranks. :func:`~fsharp.checkpoint.prune` can keep the lowest scores.
        planes: True saves parameters that rest in a format (:class:`~fsharp.formats.Format`) as they are encoded, for
            inference: a leaf ``w`` as its codes ``w`` and its scales ``w_scale``, its planes. False decodes these parameters
            to the dtype ``Precision.main``. :func:`~fsharp.checkpoint.export_safetensors` keeps planes, and
            :func:`~fsharp.checkpoint.load` decodes planes.

    Returns:
        The checkpoint.

    Raises:
        TreeError: a leaf cannot be saved, or with ``planes`` the tree has no encoded parameter.
        AgreementError: ranks have different arguments, or another rank has failed. No file is left.
        CheckpointError: ``step`` is not an int from 0, JSON cannot hold ``config``, there is not enough room, or a file reads
            back differently. No file is left.
        CheckpointError: the checkpoint is written and can be loaded, but may not survive a power cut: ``root`` could not be
            synced.

    Cost: a rank writes its elements and reads them back; ranks with equal elements divide the writing. Along each axis there
    are three collectives of 40 bytes and two smaller ones. Memory: on a GPU one tensor at a time on the host. For
    parameters that rest in a format also their values in the dtype ``Precision.main``, or their planes, until the call returns.
    """
    how: Any = {"step": step, "comm": comm, "config": config, "metric": metric, "planes": planes}
    return write_snapshot(agree_and_make_folder(root, tree, **how), comm)


def agree_and_make_folder(
    root: str | os.PathLike[str], tree: Any, *, step: int, comm: Comm, config: Any, metric: float | None, planes: bool = False
) -> Snapshot:
    """Return the :class:`Snapshot` that :func:`save` writes, once ranks agree. Rank 0 makes the staging folder.

    After an error rank 0 removes the staging folder again.
    """
    where, folder = absolute_path(root), ""

    def stage(contents: TreeContents) -> str:
        nonlocal folder
        if comm.rank != 0:
            return ""
        check_free_space(where, sum(entry.numel * entry.dtype.itemsize for entry in contents.entries.values()))
        save_id = new_save_id(where)
        mine = f"{where}/{folder_name(step, save_id)}"
        run_converting_os_errors(mine, lambda: storage_of(where).make_staging_folder(mine))
        folder = mine
        return save_id

    try:
        how: Any = {"step": step, "comm": comm, "config": config, "metric": metric, "planes": planes}
        return agree_on_snapshot("save()", where, tree, begin=stage, **how)
    except BaseException:
        if folder:
            remove_staged(folder)
        raise


def agree_on_snapshot(
    where: str,
    root: str,
    tree: Any,
    *,
    step: int,
    comm: Comm,
    config: Any,
    metric: float | None = None,
    begin: Callable[[TreeContents], str],
    shared_root: bool = True,
    planes: bool = False,
) -> Snapshot:
    """Return the :class:`Snapshot` that a save will write, after a check that all ranks agree.

    ``where``: the calling function, for errors. ``begin(contents)`` is called before ranks compare contents, and returns on
    rank 0 the id of the save. ``shared_root``: whether ``root`` is one folder that all ranks see.
    """
    has_objects, drawn = False, ""
    with suppress(RecursionError):  # contents_of() refuses such a tree on all ranks
        has_objects = any(has_state_dict(leaf) for leaf in optree.tree_leaves(tree, is_leaf=is_node_saved_as_leaf))
    states = check_on_all_ranks(where, comm, lambda: with_state_dicts(tree)) if has_objects else tree

    def check() -> TreeContents:
        nonlocal config, drawn
        config = checked_config(where, step, config)
        if not isinstance(metric, float | int | None):
            raise CheckpointError(f"{where}: metric is {metric!r}, expected a number: float(x) of a tensor.")
        try:
            float(metric or 0)
        except OverflowError:
            raise CheckpointError(f"{where}: metric has {int(metric or 0).bit_length()} bits, which no float holds.") from None
        contents = contents_of(where, states, comm, planes=planes)
        if planes and not contents.encoded:
            facts = [("got", f"{len(contents.entries)} tensors, such as {', '.join([*contents.entries][:3])}")]
            remedy = "Pass state.params, or model.train_state.params of a module, of a layout with Precision(stored=...)."
            raise TreeError(problem(where, "planes=True, and the tree has no encoded parameters.", facts, remedy))
        if on_meta := [entry.name for entry in contents.entries.values() if entry.local.is_meta]:
            raise TreeError(
                f"{where}: {on_meta[0]!r} is on the meta device, without values ({len(on_meta)} tensors are). Make it first, "
                "as by init_params()."
            )
        contents.objects.update(_dcp_object_structures(states))
        check_tensor_names(where, contents.entries)
        drawn = begin(contents)
        return contents

    def texts_to_compare(contents: TreeContents) -> dict[str, str]:
        # The name keeps a copy on the host alive, which a view of its bytes does not.
        on_host = ((e.name, e.local.cpu()) for e in contents.entries.values() if e.is_replicated)
        same = [f"{name}: {xxhash.xxh3_64_hexdigest(bytes_of(local))}" for name, local in on_host]
        return {
            "step": str(step),
            **({"root": root} if shared_root else {}),
            "config": json.dumps(config, sort_keys=True),
            "metric": repr(metric),
            **contents.texts_to_compare(),
            "history of modules": "\n".join(contents.settings),
            "values": "\n".join(f"{name}: {value!r}" for name, value in contents.values.items()),
            "lists, tuples and None": "\n".join(f"{name}: {json.dumps(each)}" for name, each in contents.objects.items()),
            "values of tensors, which PerRank() and, for buffers, ModuleWithPerRankBuffers() allow to differ": "\n".join(same),
        }

    contents = check_on_all_ranks(where, comm, check, texts_to_compare)
    name = all_gather_fixed_size(bytes.fromhex(drawn) if comm.rank == 0 else bytes(16), comm)[0].hex()
    tensors, values = [], []
    for entry, tensor in tensors_written_by(contents, comm.rank):
        (first, last), mine = entry.range_written_by(comm.rank), entry.piece_of_rank(comm.rank)
        tensors.append(tensor)
        values.append(entry.local[first - mine.first : last - mine.first])
    folder, best_by = f"{root}/{folder_name(step, name)}", None if metric is None else float(metric)
    return Snapshot(contents, step, config, best_by, name, folder, tensors, values)


def checked_config(where: str, step: Any, config: Any) -> Any:
    """Return ``config`` as JSON reads it back.

    Raises CheckpointError if JSON cannot hold ``config``, or if ``step`` is not an int from 0 to ``2**62 - 1``.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 62:
        raise CheckpointError(f"{where}: step is {step!r}, expected a whole number from 0, below 2**62.")
    try:
        return json_round_trip(config)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: JSON cannot hold the config: {error}.") from error


def _dcp_object_structures(tree: Any) -> dict[str, Any]:
    """Return, by name, the result of :func:`structure_of` for each leaf that torch.distributed.checkpoint stores as an object.

    Such a leaf is None, or a list or tuple with only numbers, strings, booleans and None at any depth.
    """

    def is_value(x: Any) -> bool:
        return all(map(is_value, x)) if type(x) in (list, tuple) else isinstance(x, bool | int | float | str | None)

    found = leaves_with_both_paths(
        tree, lambda x: is_node_saved_as_leaf(x) or (type(x) in (list, tuple) and is_value(x)), none_is_leaf=True
    )
    try:
        return {".".join(path): structure_of(x) for path, _, x in found if x is None or type(x) in (list, tuple)}
    except RecursionError as error:
        raise too_deep_error() from error


def tensors_written_by(contents: TreeContents, rank: int) -> list[tuple[TensorEntry, StoredTensor]]:
    """Return the tensors that ``rank`` writes, in the order of its file, each with its entry."""
    found = []
    for entry in contents.entries.values():
        first, last = entry.range_written_by(rank)
        if first < last:
            shape = entry.shape if last - first == entry.numel else (last - first,)
            found.append(StoredTensor(entry.name, entry.dtype, shape))
    return [(contents.entries[tensor.name], tensor) for tensor in in_write_order(found)]


def check_free_space(root: str, nbytes: int) -> None:
    """Raise a CheckpointError if a checkpoint of ``nbytes`` bytes does not fit the free space under ``root``."""
    free, need = storage_of(root).free_nbytes(root), nbytes + _SPARE_NBYTES
    if free is not None and need > free:
        raise CheckpointError(f"{root}: {free:,} bytes are free, and this checkpoint takes {need:,}. Nothing was written.")


def run_converting_os_errors(path: str, write: Callable[[], T]) -> T:
    """Return ``write()``. An error of the file system becomes a CheckpointError that names ``path``."""
    try:
        return write()
    except (OSError, CheckpointError) as error:
        cause = os_error_behind(error)
        if isinstance(cause, FileNotFoundError):
            raise CheckpointError(
                f"{path}: cannot be written: {cause.strerror}. Either it was removed, as by another job that saves there, or "
                "this rank does not see the folder that rank 0 has made: root has to be in a file system that all ranks share."
            ) from error
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}.") from error


def write_snapshot(snapshot: Snapshot, comm: Comm) -> Checkpoint:
    """Write a snapshot as a checkpoint, and return the checkpoint. All ranks call this function; see :func:`save`."""
    staged = storage_of(snapshot.folder).staging_path(snapshot.folder)
    is_published = False

    def commit() -> None:
        nonlocal is_published
        if comm.rank == 0:
            write_manifest_and_publish(snapshot, staged, records, manifest_of_snapshot(snapshot, records, comm.mesh), rank=0)
            is_published = True

    try:
        records = write_shard_files(snapshot, staged, comm)
        check_on_all_ranks("save()", comm, lambda: run_converting_os_errors(snapshot.folder, commit))
    except BaseException:
        if comm.rank == 0 and not is_published:
            remove_staged(snapshot.folder)
        raise
    return Checkpoint(snapshot.folder)


def write_shard_files(snapshot: Snapshot, staged: str, comm: Comm, where: str = "save()") -> list[FileRecord]:
    """Write this rank's file into the folder ``staged``, and read it back. Return the records of all ranks' files, in order."""
    path = f"{staged}/{shard_file_name(comm.rank)}"

    def write() -> FileRecord:
        if snapshot.failure is not None:
            raise snapshot.failure
        header = encode_header(snapshot.tensors, header_metadata(snapshot.save_id, comm.rank))
        with storage_of(path).append_to_new_file(path) as out:
            digest = write_file(out, header, (value.cpu() for value in snapshot.values))
        record = FileRecord(shard_file_name(comm.rank), storage_of(path).nbytes(path), digest)
        verify_written_file(staged, record, comm.rank, snapshot.save_id)
        return record

    mine = check_on_all_ranks(where, comm, lambda: run_converting_os_errors(path, write))
    sent = all_gather_fixed_size(mine.nbytes.to_bytes(8, "big") + bytes.fromhex(mine.digest or ""), comm)
    return [
        FileRecord(shard_file_name(rank), int.from_bytes(data[:8], "big"), data[8:].hex()) for rank, data in enumerate(sent)
    ]


def verify_written_file(staged: str, record: FileRecord, rank: int, save_id: str) -> None:
    """Read back the file that ``rank`` has written for save ``save_id`` to the folder ``staged``, as ``record`` describes it.

    Raises CheckpointError if a block differs from its digest.
    """
    if wrong := ShardFileReader(storage_of(staged), staged, record, rank, save_id).find_damaged_block_starts():
        raise CheckpointError(f"{staged}/{record.name}: {len(wrong)} blocks do not read back as they were written.")


def write_manifest_and_publish(
    snapshot: Snapshot, staged: str, records: Sequence[FileRecord], manifest: Manifest, *, rank: int
) -> None:
    """Write the manifest into ``staged``, and publish the folder.

    Raises CheckpointError, and does not publish, if this rank sees a file in ``records`` with another size, or reads back
    another manifest. ``rank``: this rank.
    """
    storage = storage_of(snapshot.folder)
    for record in records:
        found = storage.nbytes(f"{staged}/{record.name}")
        if found != record.nbytes:
            raise CheckpointError(f"{staged}/{record.name}: rank {rank} sees {found:,} bytes of {record.nbytes:,}.")
    data = manifest.to_json()
    try:
        check_brackets(data)
    except ValueError as error:
        what = f"the manifest would have {error}, more than a sixth, which load() refuses as it takes much memory"
        raise CheckpointError(f"save(): {what}. Put the numbers of many short lists into a tensor or a text.") from error
    with storage.append_to_new_file(f"{staged}/{MANIFEST_NAME}") as out:
        out(memoryview(data))
    if Checkpoint(staged).manifest.save_id != snapshot.save_id:
        raise CheckpointError(f"{staged}/{MANIFEST_NAME}: does not read back as it was written.")
    storage.publish(staged, snapshot.folder)


def remove_staged(folder: str) -> None:
    """Remove the staging folder of ``folder`` after a failed save. Only log an error, as the caller raises that of the save."""
    storage = storage_of(folder)
    try:
        storage.remove(storage.staging_path(folder))
    except Exception as error:  # an object store raises errors of its own
        _log.warning("%s: could not be removed (%s)", storage.staging_path(folder), error)


def shard_file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def header_metadata(save_id: str, rank: int) -> dict[str, str]:
    """Return the metadata for the header of the file that ``rank`` writes."""
    return {"save_id": save_id, "rank": str(rank)}


def manifest_of_snapshot(snapshot: Snapshot, records: Sequence[FileRecord], mesh: Mesh) -> Manifest:
    """Return the manifest of a snapshot. The tensors of other ranks follow from the layouts. ``records``: all ranks' files."""
    tensors, created = {}, time_in_save_id(snapshot.save_id)
    assert created is not None
    for entry in snapshot.contents.entries.values():
        chunks = (Chunk(rank, *entry.range_written_by(rank)) for rank in range(mesh.size))
        in_place = sorted((chunk for chunk in chunks if chunk.first < chunk.last), key=lambda chunk: chunk.first)
        tensors[entry.name] = TensorRecord(entry.dtype, entry.shape, tuple(in_place))
    return Manifest(
        save_id=snapshot.save_id,
        step=snapshot.step,
        created=created,
        mesh=dict(mesh.axes),
        versions={"fsharp": fsharp.__version__, "torch": torch.__version__},
        config=snapshot.config,
        metric=snapshot.metric,
        files=tuple(records),
        tensors=tensors,
        aliases=snapshot.contents.aliases,
        values=snapshot.contents.values,
        objects=snapshot.contents.objects,
        encoded=snapshot.contents.encoded,
        is_by_saver=snapshot.is_by_saver,
    )
