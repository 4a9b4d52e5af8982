"""Storage of checkpoints: folders of a file system, or of an object store by fsspec."""

import fcntl
import glob
import os
import re
import shutil
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from fsharp.checkpoint.manifest import MANIFEST_NAME
from fsharp.errors import CheckpointError, log as _log

WriteFunction = Callable[[memoryview], object]
_read_observers: list[Callable[[int], object]] = []
_CLAIM_FILE = "claim"
REMOVED_SUFFIX = ".removed"
"""Ending of the name of a folder that is being removed."""
DAMAGED_SUFFIX = ".damaged"
"""Ending of the name of a folder or file that was set aside."""


@contextmanager
def observe_reads(observer: Callable[[int], object]) -> Iterator[None]:
    """Call ``observer`` with the number of bytes of each read from a file, in any thread, until the context ends."""
    _read_observers.append(observer)
    try:
        yield
    finally:
        _read_observers.remove(observer)


def _note_read(nbytes: int) -> None:
    for observer in _read_observers:
        observer(nbytes)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of ``path``. A URL is returned unchanged, except for slashes at its end.

    Raises CheckpointError for a URL that pathlib has made a path: ``Path("s3://a")`` is the local path ``s3:/a``.
    """
    given = os.fspath(path)
    if not isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]", given):
        url = given.replace(":/", "://", 1)
        raise CheckpointError(f"{given}: pathlib has removed a slash of this URL. Pass it as a text: {url!r}.")
    return given.rstrip("/") if "://" in given else os.path.abspath(given)


def storage_of(path: str) -> "Storage":
    """Return the :class:`Storage` for a path, or a URL such as ``s3://bucket/run``. CheckpointError for an unknown URL."""
    if "://" not in path:
        return LocalStorage()
    try:
        import fsspec

        return ObjectStore(fsspec.core.url_to_fs(path)[0])
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def os_error_behind(error: BaseException | None) -> OSError | None:
    """Return the OSError that is ``error`` or a cause of it, or None. An OSError does not prove that a file is damaged."""
    return error if error is None or isinstance(error, OSError) else os_error_behind(error.__cause__)


def raise_if_read_refused(error: CheckpointError) -> None:
    """Raise ``error`` if its cause is that the file system refused to read a file or folder. A missing file is not refused."""
    if not isinstance(os_error_behind(error), FileNotFoundError | None):
        raise error


def read_index_file(storage: "Storage", folder: str, name: str, allowed_extra_nbytes: int = 16 << 20) -> bytes:
    """Return the bytes of a file that describes the other files in its folder.

    Raises FileNotFoundError for a missing file. Raises CheckpointError if the file has more than ``allowed_extra_nbytes`` plus
    twice the bytes of the other files.
    """
    path = f"{folder}/{storage.relative_realpath(folder, name)}"
    size = storage.nbytes(path)
    most = size
    if size > allowed_extra_nbytes:
        most = allowed_extra_nbytes + 2 * (nbytes_of_names(storage, folder, storage.list_names(folder)) - size)
    if size > most:
        raise CheckpointError(
            f"{folder}/{name}: {size:,} bytes, expected at most {most:,}: twice the size of the files that it describes, and "
            f"{allowed_extra_nbytes:,}."
        )
    data = bytearray(size)
    storage.read(path, 0, memoryview(data))
    return bytes(data)


def nbytes_of_names(storage: "Storage", folder: str, names: Iterable[str]) -> int:
    """Return the bytes of the files in ``folder`` with these names. Files that cannot be read count as empty."""
    total = 0
    for name in names:
        with suppress(CheckpointError, FileNotFoundError):  # only plain files have a size
            total += storage.nbytes(f"{folder}/{storage.relative_realpath(folder, name)}")
    return total


class LocalStorage:
    """The file system: files of a save are collected in a staging folder, which is published by a rename.

    A folder is *published* once it has all of its files. No file in a published folder changes.
    """

    def list_names(self, folder: str) -> list[str]:
        """Return the sorted names in ``folder``; none without such a folder. CheckpointError for an unreadable folder."""
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be read: {error.strerror}.") from error

    def staging_path(self, folder: str) -> str:
        """Return the path of the staging folder, in which the files of ``folder`` are collected."""
        parent, name = os.path.split(folder)
        return os.path.join(parent, f".{name}.partial")

    def make_staging_folder(self, folder: str) -> None:
        """Make the folder ``staging_path(folder)``, which must not exist, and missing parents."""
        _make_folders(os.path.dirname(folder))
        os.mkdir(self.staging_path(folder))

    @contextmanager
    def append_to_new_file(self, path: str) -> Iterator[WriteFunction]:
        """Make the file ``path``, and yield a function that appends bytes. FileExistsError if the path exists.

        The file is synced at the end of the context. If an error ends the context, the file stays unsynced and incomplete.
        """
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:

            def write(data: memoryview) -> None:
                while data:
                    data = data[os.write(file, data) :]

            yield write
            os.fsync(file)
        finally:
            os.close(file)

    def publish(self, staged: str, folder: str) -> None:
        """Rename the staging folder ``staged`` to ``folder``, its final path.

        CheckpointError if it was renamed, and the sync failed.
        """
        _sync_folder(staged)
        os.rename(staged, folder)
        try:
            _sync_folder(os.path.dirname(folder))
        except OSError as error:
            raise CheckpointError(
                f"{folder}: the checkpoint is written and can be loaded, but {os.path.dirname(folder)}, which has the folder's "
                f"name, could not be synced: {error.strerror}. It may not survive a power cut: save again."
            ) from error

    def nbytes(self, path: str) -> int:
        """Return the size of a file. Raises FileNotFoundError, or CheckpointError if it is not a plain and accessible file."""
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(error.errno, error.strerror, path) from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path}: not a plain file; links are not followed.")
        return found.st_size

    def relative_realpath(self, folder: str, name: str) -> str:
        """Follow links from the file ``name`` in ``folder``, and return the path of the final file relative to ``folder``.

        If the file is not a link, return ``name``.
        """
        return os.path.relpath(os.path.realpath(os.path.join(folder, name)), os.path.realpath(folder))

    def read(self, path: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a file from byte ``start`` on. Raises CheckpointError if a byte cannot be read."""
        _note_read(len(into))
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
            try:
                while into:
                    count = os.preadv(file, [into], start)
                    if not count:
                        raise CheckpointError(f"{path}: {len(into):,} bytes are missing from byte {start:,} on.")
                    into, start = into[count:], start + count
            finally:
                os.close(file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error

    def remove(self, folder: str) -> None:
        """Remove ``folder``, or a link, if it exists. No reader ever finds a checkpoint with only some of its files.

        Raises CheckpointError if ``folder`` cannot be renamed. Files that cannot be removed after that are logged.
        """
        parent, name = os.path.split(folder)
        gone = folder if name.endswith(REMOVED_SUFFIX) else os.path.join(parent, f".{name.lstrip('.')}{REMOVED_SUFFIX}")
        try:
            # After the rename a save under way cannot publish the folder, and an interrupted removal leaves no checkpoint.
            os.rename(folder, gone)
            _sync_folder(parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be removed: {error.strerror}.") from error
        try:
            os.unlink(gone) if os.path.islink(gone) else shutil.rmtree(gone)  # removes a link, and not its target
        except OSError as error:
            _log.warning("%s: left behind: %s", gone, error)

    def set_aside_damaged(self, path: str) -> str:
        """Rename a damaged checkpoint or file, so that no reader finds it; return the new path."""
        os.rename(path, path + DAMAGED_SUFFIX)
        _sync_folder(os.path.dirname(path))
        return path + DAMAGED_SUFFIX

    def free_nbytes(self, folder: str) -> int | None:
        """Return the number of bytes that fit into a folder; None if it is unknown."""
        while not os.path.isdir(folder):
            folder = os.path.dirname(os.path.abspath(folder))
        return shutil.disk_usage(folder).free


def _make_folders(folder: str) -> None:
    """Make a folder and its missing parents, and sync each folder in which a new folder was made."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folders(parent)
    try:
        os.mkdir(folder)
    except FileExistsError as error:
        if not os.path.isdir(folder):  # if it is one, another process has made it a moment ago
            raise CheckpointError(f"{folder}: is a file, expected a folder, or a path at which to make one.") from error
    with suppress(PermissionError):  # some shared file systems let a process write to a folder that it may not read
        _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class FolderClaim:
    """An exclusive claim of a folder by this process, until the process ends or closes the claim.

    Makes the folder if there is none. Writes ``token`` into a file in the folder, so that other processes can tell who has the
    claim. Raises CheckpointError if the folder is claimed already.
    """

    _claimed: ClassVar[set[str]] = set()

    def __init__(self, folder: str, token: bytes) -> None:
        _make_folders(folder)
        in_use = CheckpointError(f"{folder}: in use. Each run, and each host of it, needs a folder of its own.")
        if folder in self._claimed:  # a lock does not keep a process from itself
            raise in_use
        file = os.open(f"{folder}/{_CLAIM_FILE}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by this process alone, not by children that outlive it
        except (BlockingIOError, PermissionError) as error:
            os.close(file)
            raise in_use from error
        os.pwrite(file, token, 0)
        self._claimed.add(folder)
        self._end = weakref.finalize(self, self._release_lock, folder, file)

    @classmethod
    def _release_lock(cls, folder: str, file: int) -> None:
        cls._claimed.discard(folder)
        os.close(file)

    @staticmethod
    def read_token(folder: str, size: int) -> bytes:
        """Return the first ``size`` bytes of the token that the newest claim of ``folder`` has written; zeros if there is none.

        The process that has the claim must not call this method: the call closes the file, which would release the claim.
        """
        data = bytearray(size)
        with suppress(CheckpointError):  # without the folder, or without a claim of it, the result is zeros
            LocalStorage().read(f"{folder}/{_CLAIM_FILE}", 0, memoryview(data))
        return bytes(data)

    @property
    def is_closed(self) -> bool:
        """Whether the claim is released, so that another process may claim the folder."""
        return not self._end.alive

    def close(self) -> None:
        """Release the claim of the folder."""
        self._end()


class ObjectStore:
    """An object store of fsspec, which cannot rename. A folder is published once its last file, the manifest, is there.

    ``rm`` and ``mv`` of fsspec read a path as a pattern, so the path is escaped for them.
    """

    def __init__(self, files: Any) -> None:
        self._files = files

    def list_names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            return sorted(each["name"].rstrip("/").rsplit("/", 1)[-1] for each in self._files.ls(folder, detail=True))
        except FileNotFoundError:
            return []

    def staging_path(self, folder: str) -> str:
        return folder

    def make_staging_folder(self, folder: str) -> None:
        self._files.makedirs(folder, exist_ok=True)

    @contextmanager
    def append_to_new_file(self, path: str) -> Iterator[WriteFunction]:
        with self._files.open(path, "wb") as file:
            yield lambda data: file.write(bytes(data))

    def publish(self, staged: str, folder: str) -> None:
        """Do nothing, as files are written under their final path, and the manifest last."""

    def nbytes(self, path: str) -> int:
        self._files.invalidate_cache()
        try:
            found = self._files.info(path)
        except NotADirectoryError as error:
            raise FileNotFoundError(error.errno, error.strerror, path) from error
        if found["type"] != "file":
            raise CheckpointError(f"{path}: not a file.")
        return int(found["size"])

    def relative_realpath(self, folder: str, name: str) -> str:
        return name

    def read(self, path: str, start: int, into: memoryview) -> None:
        if not into:
            return  # S3 would answer with the whole file
        _note_read(len(into))
        data = self._files.cat_file(path, start, start + len(into))
        if len(data) != len(into):
            raise CheckpointError(f"{path}: {len(into) - len(data):,} bytes are missing from byte {start + len(data):,} on.")
        into[:] = data

    def remove(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{folder}/{MANIFEST_NAME}")
        with suppress(FileNotFoundError):
            self._files.rm(glob.escape(folder), recursive=True)

    def set_aside_damaged(self, path: str) -> str:
        self._files.mv(glob.escape(path), path + DAMAGED_SUFFIX, recursive=True)
        return path + DAMAGED_SUFFIX

    def free_nbytes(self, folder: str) -> int | None:
        return None


Storage = LocalStorage | ObjectStore
