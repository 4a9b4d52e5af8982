"""Catalog: find checkpoints by names of folders and by manifests. There is no pointer file, which could be out of date."""

import math
import os
import re
import secrets
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import xxhash

from fsharp.checkpoint.formats import huggingface
from fsharp.checkpoint.manifest import MANIFEST_FIRST_BYTES, MANIFEST_NAME, FileRecord, Manifest
from fsharp.checkpoint.reading import NeededElements, Reader, check_file_size, describe_damaged_files
from fsharp.checkpoint.shard_file import header_json_prefix
from fsharp.checkpoint.storage import REMOVED_SUFFIX, Storage, absolute_path, raise_if_read_refused, read_index_file, storage_of
from fsharp.errors import CheckpointError, log as _log
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.text import nbytes_text, table_html
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

_FOLDER_PATTERN = re.compile(r"step-(\d{10,})-(?P<save_id>[0-9a-f]{8,})")
_STAGING_FOLDER_PATTERN = re.compile(r"\.(step-(\d{10,})-[0-9a-f]{8,})\.partial")
_LEFTOVER_FOLDER_PATTERN = re.compile(
    rf"\.step-\d{{10,}}-(?P<save_id>[0-9a-f]{{8,}})(\.partial|(\.partial)?{re.escape(REMOVED_SUFFIX)})"
)
_SHARD_FILE_PATTERN = re.compile(r"rank-\d{5,}\.safetensors")


class CheckpointSummary(NamedTuple):
    """The fields of a :class:`Manifest` that describe its checkpoint as a whole: step, time, metric, files, writer."""

    step: int
    created: float
    metric: float | None
    files: tuple[FileRecord, ...]
    is_by_saver: bool


_CONVERTED_BY = (".metadata", "fs.checkpoint.from_dcp"), ("_CHECKPOINT_METADATA", "fsharp.interop.orbax.from_orbax")
_latest_times: dict[str, float] = {}  # by root, of saves there and, if Replicas have this root, in memory of hosts
_summary_cache: dict[str, CheckpointSummary] = {}  # by digest of a manifest's bytes, as parsing many manifests takes long
_MAX_CACHED_SUMMARIES = 1000
_TIMED_ID_LENGTH = 32  # digits of an id that begins with the time of its save


def folder_name(step: int, save_id: str) -> str:
    """Return the name of a checkpoint's folder, which is unique: two saves of one step have two folders."""
    return f"step-{step:010d}-{save_id}"


def new_save_id(root: str) -> str:
    """Return an id for a save under ``root`` that begins now. The id's time is later than those of all saves in ``root``."""
    advance_save_clock(root, newest_save_time(root))
    return save_id_from_clock(root)


def save_id_from_clock(root: str) -> str:
    """Return an id for a save that begins now: 16 hexadecimal digits of its time, and 16 random ones.

    The time is now; or, if a clock was set back, just after the latest time that :func:`advance_save_clock` has recorded for
    ``root``. The new time is recorded too.
    """
    created = max(time.time(), math.nextafter(advance_save_clock(root), math.inf))
    advance_save_clock(root, created)
    return struct.pack(">d", created).hex() + secrets.token_hex(8)


def advance_save_clock(root: str, created: float = 0.0) -> float:
    """Record ``created``, the time of a save, for ``root``. Return the latest time that this process has recorded for ``root``.

    Without ``created`` nothing is recorded. :func:`save_id_from_clock` gives a new save a later time than all recorded times:
    so saves under ``root`` and saves in memory of hosts have one order.
    """
    latest = _latest_times[root] = max(_latest_times.get(root, 0.0), created)
    return latest


def newest_save_time(root: str) -> float:
    """Return the result of :func:`save_time_of` for the newest save in ``root``; 0 if there is none."""
    names = names_last_saved_first(root)
    return save_time_of(f"{root}/{names[0]}") if names else 0.0


def time_in_save_id(save_id: str) -> float | None:
    """Return the time in an id of :func:`save_id_from_clock`, in seconds since 1970; None if the id has none."""
    created = struct.unpack(">d", bytes.fromhex(save_id[:16]))[0] if len(save_id) == _TIMED_ID_LENGTH else math.nan
    return created if math.isfinite(created) else None


def save_time_of(path: str) -> float:
    """Return the time of the save at ``path``, in seconds since 1970: from the folder's name, else the manifest; else -inf."""
    created = time_in_save_id(path.rpartition("-")[2])
    try:
        return Checkpoint(path).summary.created if created is None else created
    except CheckpointError:
        return -math.inf


def is_foreign_checkpoint(names: Collection[str]) -> bool:
    """Return whether a folder with these names is a Hugging Face checkpoint; False if one names a checkpoint's folder."""
    return huggingface.is_huggingface_folder(names) and not any(map(_FOLDER_PATTERN.fullmatch, names))


def step_in_folder_name(name: str) -> int:
    """Return the step in the name of a checkpoint's folder: 7 for ``step-0000000007-1a2b3c4d``. ``name`` has this form."""
    return int(name.split("-")[1])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint at ``path``: a folder with a manifest, and with the files that the manifest names.

    :func:`open_checkpoint` and :func:`list_checkpoints` return complete checkpoints: all files have the right sizes.
    ``Checkpoint(path)`` checks nothing.
    Files of other libraries, such as those of ``save_pretrained()``, are a checkpoint too: the manifest is made from headers.
    """

    path: str

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, read at the first access. CheckpointError if the manifest is missing or damaged."""
        storage, path = storage_of(self.path), self.path
        try:
            data = read_index_file(storage, path, MANIFEST_NAME)
        except FileNotFoundError as error:
            if is_foreign_checkpoint(storage.list_names(path)) or huggingface.is_file(storage, path):
                return huggingface.huggingface_manifest(storage, path)
            names = storage.list_names(path)
            hint = "".join(f" Pass one inside of it, such as {path}/{name}." for name in names_last_saved_first(path)[:1])
            hint += "".join(
                f" Its {name} is another library's: convert it by {by}()." for name, by in _CONVERTED_BY if name in names
            )
            if not names:
                hint = " The folder is empty or does not exist. fs.checkpoint.save(root, ...) writes root/step-..."
            raise CheckpointError(f"{path}: there is no checkpoint here.{hint}") from error
        return Manifest.from_json(f"{path}/{MANIFEST_NAME}", data)

    @cached_property
    def folder(self) -> str:
        """The folder with this checkpoint's files: ``path``, or its parent if ``path`` is a single file of another library."""
        is_foreign = any(file.digest is None for file in self.summary.files)
        is_file = is_foreign and huggingface.is_file(storage_of(self.path), self.path)
        return self.path.rpartition("/")[0] if is_file else self.path

    @cached_property
    def reader(self) -> Reader:
        """The :class:`Reader` of this checkpoint's files, which keeps their headers and digests."""
        return Reader(self.folder, self.manifest)

    @cached_property
    def summary(self) -> CheckpointSummary:
        """The :class:`CheckpointSummary`. A manifest that this process has parsed before is not parsed again."""
        storage = storage_of(self.path)
        try:
            key = xxhash.xxh3_128_hexdigest(read_index_file(storage, self.path, MANIFEST_NAME))
        except FileNotFoundError:
            key = ""  # a checkpoint of another library, or none
        found = _summary_cache.get(key)
        if found is None:
            read = self.manifest
            found = CheckpointSummary(read.step, read.created, read.metric, read.files, read.is_by_saver)
            if len(_summary_cache) >= _MAX_CACHED_SUMMARIES:  # a Saver looks at every new checkpoint
                _summary_cache.clear()
            if key:
                _summary_cache[key] = found
        return found

    @property
    def step(self) -> int:
        """Number of the saved step."""
        return self.summary.step

    @property
    def config(self) -> Any:
        """The config that the caller gave to ``save()``."""
        return self.manifest.config

    @property
    def tensor_names(self) -> list[str]:
        """Names of the saved tensors in alphabetical order. A tied tensor has several names."""
        return sorted([*self.manifest.tensors, *self.manifest.aliases])

    def _repr_html_(self) -> str:
        rows = [("tensor", "dtype", "shape")]
        for name in self.tensor_names:
            record = self.manifest.tensors[self.manifest.aliases.get(name, name)]
            rows.append((name, dtype_name(record.dtype), str(list(record.shape))))
        return table_html(f"{self.path}: step {self.step}, {nbytes_text(self.manifest.nbytes)}", rows)

    @api_boundary
    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor, on the CPU. The caller needs neither a process group nor a tree like the saved one.

        Args:
            name: one of :attr:`tensor_names`.

        Raises:
            CheckpointError: the checkpoint has no tensor of this name, or its bytes are damaged.
        """
        name = self.manifest.aliases.get(name, name)
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.path}: no tensor {name!r}; there are {self.tensor_names[:8]!r:.400} ...")
        record = self.manifest.tensors[name]
        whole = torch.empty(record.shape, dtype=record.dtype, device="cpu")
        self.reader.read([NeededElements(name, 0, record.numel, whole.view(-1))])
        return whole

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        try:
            return (
                f"Checkpoint({self.path!r}, step {self.step}, {len(self.tensor_names)} tensors, {self.manifest.nbytes:,} bytes)"
            )
        except CheckpointError:
            return f"Checkpoint({self.path!r}, which is not complete any more)"


@options_checked
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint in a folder, or a file or folder of another library (with step 0).

    Raises:
        CheckpointError: there is no checkpoint, its manifest is damaged, or a file is missing or has a wrong size.
    """
    folder = absolute_path(path)
    try:
        return _open_complete(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{complete_sibling_hint(folder)}") from error


def _open_complete(folder: str) -> Checkpoint:
    storage, found = storage_of(folder), Checkpoint(folder)
    for file in found.summary.files:
        check_file_size(storage, f"{found.folder}/{file.name}", file.nbytes)
    return found


def complete_sibling_hint(folder: str) -> str:
    """Return text for an error that names a complete checkpoint beside the incomplete ``folder``; empty if there is none."""
    root, _, name = folder.rpartition("/")
    for other in names_last_saved_first(root) if _FOLDER_PATTERN.fullmatch(name) else ():
        if other != name:
            try:
                return f" {_open_complete(f'{root}/{other}')!r} is complete."
            except CheckpointError:
                continue
    return ""


def names_last_saved_first(root: str) -> list[str]:
    """Return the names of the checkpoint folders in ``root``, complete or not, in order of their saves, the newest first."""
    found = [name for name in storage_of(root).list_names(root) if _FOLDER_PATTERN.fullmatch(name)]
    return sorted(found, key=lambda name: (save_time_of(f"{root}/{name}"), step_in_folder_name(name), name), reverse=True)


def is_checkpoint(path: str) -> bool:
    """Return whether ``path`` looks like a checkpoint, ours or another library's, maybe an incomplete one. Opens no file."""
    storage, path = storage_of(path), absolute_path(path)
    names = storage.list_names(path)
    is_own = MANIFEST_NAME in names or (bool(names) and _FOLDER_PATTERN.fullmatch(path.rpartition("/")[2]) is not None)
    return is_own or is_foreign_checkpoint(names) or huggingface.is_file(storage, path)


def has_checkpoints(root: str) -> bool:
    """Return whether a checkpoint folder under ``root`` has a manifest. The checkpoint may still be incomplete or damaged."""
    return any(_has_manifest(path) for path in _checkpoint_folders(root))


def opening_errors(root: str) -> list[str]:
    """Return an error message for each folder under ``root`` that cannot be read, or that has a manifest and is incomplete."""
    found = []
    for path in _checkpoint_folders(root):
        try:
            if _has_manifest(path):
                _open_complete(path)
        except CheckpointError as error:
            found.append(str(error))
    return found


def _has_manifest(folder: str) -> bool:
    return MANIFEST_NAME in storage_of(folder).list_names(folder)


def _checkpoint_folders(root: str) -> Iterator[str]:
    looked_at = set[str]()
    while names := [x for x in names_last_saved_first(root) if x not in looked_at]:  # another process may save meanwhile
        looked_at.update(names)
        yield from (f"{root}/{name}" for name in names)


@options_checked
def list_checkpoints(root: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return all complete checkpoints under ``root``, in order of their saves, the newest first.

    The order is not that of steps: a run that continues from an older checkpoint saves smaller steps again. A clock that was
    set back does not change the order. Incomplete checkpoints are left out, with a warning in the log.
    """
    return list(iter_complete_newest_first(absolute_path(root)))


def iter_complete_newest_first(folder: str, *, skips_os_errors: bool = True) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints in ``folder``, the newest first. Each checkpoint is opened when the caller asks for it.

    An incomplete checkpoint is skipped, with a warning in the log. So is a checkpoint that the file system refuses to read;
    with ``skips_os_errors=False`` this raises a CheckpointError instead. Another process may save and remove checkpoints
    meanwhile. So if no listed checkpoint is complete, ``folder`` is listed again, until a listing has no new name.
    """
    looked_at, is_one_complete = set[str](), False
    while not is_one_complete and (names := [x for x in names_last_saved_first(folder) if x not in looked_at]):
        looked_at.update(names)
        for name in names:
            if (found := open_if_complete(f"{folder}/{name}", skips_os_errors=skips_os_errors)) is not None:
                is_one_complete = True
                yield found


def open_if_complete(path: str, *, skips_os_errors: bool = True) -> Checkpoint | None:
    """Return the checkpoint at ``path``. If files are missing or the manifest is damaged, return None and log a warning.

    If the file system refuses to read the checkpoint, also return None and log a warning; with ``skips_os_errors=False``
    raise a CheckpointError instead.
    """
    try:
        return _open_complete(path)
    except CheckpointError as error:
        if not skips_os_errors:
            raise_if_read_refused(error)
        _log.warning("left out: %s", error)
        return None


@options_checked
def latest(root: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the newest complete checkpoint under ``root``; None if there is none.

    Checkpoints with missing files, wrong sizes or a damaged manifest are skipped, with a warning in the log. Interrupted saves
    are skipped too, and those of later steps than the result are logged. Tensors are not read: for damage inside of files see
    :func:`verify`.

    Raises:
        CheckpointError: the file system refuses to read the newest checkpoint, for example for lack of permission.
    """
    folder = absolute_path(root)
    newest = next(iter_complete_newest_first(folder, skips_os_errors=False), None)
    for name in storage_of(folder).list_names(folder):
        match = _STAGING_FOLDER_PATTERN.fullmatch(name)
        if match and (newest is None or int(match[2]) > newest.step):
            instead = "there is no other" if newest is None else f"using step {newest.step}"
            _log.warning("%s/%s is incomplete, %s", folder, match[1], instead)
    return newest


def newest_except(root: str, damaged: Collection[str]) -> Checkpoint | None:
    """Return the newest complete checkpoint under ``root`` whose path is not in ``damaged``; None if there is none."""
    if not damaged:
        return latest(root)
    found = iter_complete_newest_first(root, skips_os_errors=False)
    return next((each for each in found if each.path not in damaged), None)


@options_checked
def verify(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a whole checkpoint, compare it with its digests, and return it; needs neither a model nor a process group.

    Raises:
        CheckpointError: the checkpoint is incomplete, a byte is damaged, or there are no digests, as in files of other
            libraries. The message names damaged files and tensors; of many only the first ones.

    Memory: a few MiB.
    """
    found = open_checkpoint(path)
    if any(file.digest is None for file in found.manifest.files):
        raise CheckpointError(f"verify(): {found.path} has no digests to compare with: another library has written it.")
    problems = describe_damaged_files(found.path, found.manifest)
    if problems:
        raise CheckpointError("\n".join(problems[:20]) + complete_sibling_hint(found.path))
    return found


def remove_incomplete(root: str | os.PathLike[str], suffix: str = "") -> list[str]:
    """Remove the folders of interrupted saves and removals whose names end in ``suffix``, and return their paths.

    No other job may save under this root, unless ``suffix`` is ``REMOVED_SUFFIX``: then only removals are finished.

    A folder is removed only if each file in it belongs to the save that the folder is named after. A file that was cut off
    still belongs to this save. A folder with any other file stays, and a warning names the folder.
    """
    folder = absolute_path(root)
    storage, gone = storage_of(folder), []
    for name in (name for name in storage.list_names(folder) if name.endswith(suffix)):
        path, complete_name = f"{folder}/{name}", _FOLDER_PATTERN.fullmatch(name)
        found = _LEFTOVER_FOLDER_PATTERN.fullmatch(name) or complete_name
        if found is None or (complete_name and MANIFEST_NAME in storage.list_names(path)):
            continue
        # In a file system no interrupted save is under its final name: if the manifest is missing there, it was lost later.
        is_left = not complete_name or storage.staging_path(path) == path
        if is_left and _files_belong_to_save(storage, path, found["save_id"]):
            storage.remove(path)
            gone.append(path)
        else:
            _log.warning(
                "%s: left alone: this folder is neither a checkpoint nor the folder of an interrupted save. Remove it by hand.",
                path,
            )
    return gone


def _files_belong_to_save(storage: Storage, folder: str, save_id: str) -> bool:
    """Return whether each file in ``folder`` begins like a file of save ``save_id``, or was cut off within this beginning."""
    for name in storage.list_names(folder):
        if name == MANIFEST_NAME:
            skipped, start = 0, MANIFEST_FIRST_BYTES
        elif _SHARD_FILE_PATTERN.fullmatch(name):
            skipped, start = 8, header_json_prefix({"save_id": save_id})  # 8 bytes: the length of the header
        else:
            return False
        try:
            data = bytearray(min(storage.nbytes(f"{folder}/{name}"), skipped + len(start)))
            storage.read(f"{folder}/{name}", 0, memoryview(data))
        except FileNotFoundError:  # removed a moment ago
            continue
        except CheckpointError:
            return False
        if not start.startswith(data[skipped:]):
            return False
    return True
