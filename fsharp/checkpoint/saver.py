"""Saver: save checkpoints in the background, and remove old ones."""

import atexit
import math
import os
import secrets
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from fsharp.checkpoint.catalog import folder_name, names_last_saved_first, open_if_complete, remove_incomplete, save_time_of
from fsharp.checkpoint.retention import Retention, remove_checkpoints
from fsharp.checkpoint.saving import Snapshot, agree_and_make_folder, run_converting_os_errors, shard_file_name, write_snapshot
from fsharp.checkpoint.shard_file import StoredTensor
from fsharp.checkpoint.storage import absolute_path, storage_of
from fsharp.distributed import generations
from fsharp.distributed.job import callbacks_before_leaving
from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.distributed.worker_threads import Outcome, Worker
from fsharp.errors import AgreementError, CheckpointError, CommError, log as _log
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.protocol import Comm, innermost_comm
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

_POLL_INTERVAL_S = 0.5
_ENDS_WITHIN_S = 10.0
"""Seconds for a save under way to end on this rank, once another rank has failed."""
_busy_savers: "set[BackgroundSaver]" = set()  # Savers with a save under way, kept alive so that their errors are reported
os.register_at_fork(after_in_child=_busy_savers.clear)  # a child has no threads of its parent


class BackgroundSaver:
    """Base class of Saver and Replicas, which copy values to host memory, and write the copies in a thread during training.

    The thread uses a Comm of its own, of the ranks of ``comm``, with all ranks along one axis if ``flat``. Values are written
    in the caller's thread if ``background`` is False, or if there are several ranks without process groups.
    """

    def __init__(self, comm: Comm, name: str, *, background: bool = True, flat: bool = False) -> None:
        inner = innermost_comm(comm)
        own = inner.new_host_comm(flat=flat) if isinstance(inner, ProcessGroupComm) else comm
        self._comm, self._own, self._name = comm, own, name
        self._worker = Worker(name) if background and (own is not comm or comm.mesh.size == 1) else None
        self._under_way: Outcome | None = None
        self._folder_under_way = ""
        self._staged: list[torch.Tensor] = []
        self._staged_as: list[StoredTensor] = []
        self._lock = threading.RLock()  # held by calls that several threads may make
        self._pid = os.getpid()
        restart_replay.record_replay_only_call(self._reset_after_rank_restart)

    def _reset_after_rank_restart(self) -> None:
        """Abandon the save under way, as a new generation of the job begins: a restarted rank cannot take part in the save."""
        self._release_save()

    def _copy_and_start_job(self, snapshot: Snapshot, job: Callable[[Snapshot], Any]) -> None:
        if self._worker is None:
            job(snapshot)
            return
        try:
            snapshot = replace(snapshot, values=self._copy_to_host(snapshot))
        except Exception as error:  # other ranks go on, and get the error in the job
            snapshot = replace(snapshot, values=(), failure=error)
        snapshot.contents.release()
        outcome = Outcome()
        self._worker.submit(lambda: self._run_job(job, snapshot), outcome)
        self._under_way, self._folder_under_way = outcome, snapshot.folder
        _busy_savers.add(self)

    def _run_job(self, job: Callable[[Snapshot], Any], snapshot: Snapshot) -> Any:
        with self._own.watch.flag_background_job() if isinstance(self._own, ProcessGroupComm) else nullcontext():
            return job(snapshot)

    @torch.inference_mode(False)  # tensors made in inference mode could not be written to outside of it
    def _copy_to_host(self, snapshot: Snapshot) -> list[torch.Tensor]:
        """Copy the values of ``snapshot`` to host memory. Return the copies, which the next call of this method overwrites."""
        values, devices = list(snapshot.values), {x.device for x in snapshot.values if x.device.type != "cpu"}
        if snapshot.tensors != self._staged_as:
            is_pinned = bool(devices)
            self._staged = [torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=is_pinned) for x in values]
            self._staged_as = snapshot.tensors
        if values:
            torch._foreach_copy_(self._staged, values, non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)
        return list(self._staged)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank. Ranks may end a save at different times."""
        return self._under_way is not None and not self._under_way.is_done()

    def failure(self, within_s: float) -> BaseException | None:
        """Wait at most ``within_s`` seconds for the end of the save under way.

        Return the save's error; None if the save has none, or has not ended.
        """
        return self._under_way.error if self._under_way is not None and self._under_way.is_done(within_s) else None

    @api_boundary
    def raise_if_failed(self) -> None:
        """Raise the error of the previous save, if it has failed. Cost: none.

        Ranks may see the error at different times. The next call that waits for a save raises the error again, on all ranks.
        """
        if self._under_way is not None and self._under_way.error is not None:
            raise self._save_error(self._under_way.error) from self._under_way.error

    @api_boundary
    def wait(self) -> None:
        """Wait until the save under way has ended. Raises CheckpointError if the save has failed, or in a forked process.

        If the disk of one rank hangs, all ranks raise a CheckpointError after the time limit of ``connect(timeout=)``. In a job
        of one rank the wait has no limit.
        """
        if self._under_way is not None:
            self._refuse_forked_process()
        with self._lock:
            self.wait_for_thread()
            try:
                if self._under_way is not None:
                    self._under_way.take_result()
            except Exception as error:
                self._release_save()
                raise self._save_error(error) from error
            self._release_save()  # an interrupted wait keeps it: the thread still reads this memory

    def wait_for_thread(self) -> None:
        """Wait until the thread has ended the save under way, well or not.

        Raises CheckpointError if another rank has failed, and the save does not end on this rank within ten seconds. The thread
        still reads the copies of values then, so no later save uses their memory.
        """
        outcome = self._under_way
        while outcome is not None and not outcome.is_done(_POLL_INTERVAL_S):
            try:
                if isinstance(self._own, ProcessGroupComm):
                    self._own.watch.raise_if_failed_on_any_rank()
            except (AgreementError, CommError) as error:
                if not outcome.is_done(_ENDS_WITHIN_S):
                    raise CheckpointError(
                        f"{self._folder_under_way} is not saved: this rank still writes its file, and the {self._name} has "
                        f"failed on another rank: {error}"
                    ) from error

    def _refuse_forked_process(self) -> None:
        if self._worker is not None and os.getpid() != self._pid:  # a fork copies no thread
            raise CheckpointError(
                f"the {self._name} belongs to process {self._pid}, whose thread writes it. Process {os.getpid()} was forked "
                "from it: save and wait in the first process."
            )

    def _save_error(self, error: BaseException) -> CheckpointError:
        return CheckpointError(f"the {self._name} that was under way has failed: {error}")

    def _release_save(self) -> None:
        self._under_way = None
        _busy_savers.discard(self)

    @api_boundary
    def close(self) -> None:
        """Wait for the save under way, if there is one. If the save has failed, raise its error."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    @api_boundary
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except CheckpointError:
            if not isinstance(error, Exception):  # no error, or an exit of the program, which would hide the failed save
                raise
            traceback.print_exc()  # the error of the ``with`` block is raised


class Saver(BackgroundSaver):
    """Save checkpoints in the background while training continues, and remove old ones.

    ::

        with fs.checkpoint.Saver("runs/a", comm, keep=3) as saver:
            for step, batch in enumerate(data, 1):
                state, metrics = train_step(state, batch)
                if step % 100 == 0:
                    saver.save(state, step=step)  # returns once values are copied to host memory
                saver.raise_if_failed()  # raises the error of a failed save

    :meth:`save` copies this rank's elements to host memory, which the next save uses again. A thread writes the copies, with
    collectives in its own process groups. If a save fails, the next :meth:`save` or :meth:`close` raises the error on all
    ranks. Before that, :meth:`raise_if_failed` raises the error on each rank that has learned of the failure. If neither
    :meth:`save` nor :meth:`close` follows, the process prints the error at its end, and exits with status 1.

    Args:
        root: folder of the checkpoints, for this Saver alone: a save by another Saver is an error. Folders of interrupted
            saves are removed. A folder with files of another origin stays, and a warning names it. Complete checkpoints are
            removed only if a Saver has written them, in this program or an earlier one. So those of :func:`save` stay.
        comm: the ranks. All ranks have to make the Saver.
        keep: number of newest checkpoints in ``root`` to keep. The log names the removed checkpoints, at the level INFO. For
            ``best``, ``keep_steps`` and ``keep_hours`` see :func:`~fsharp.checkpoint.prune`.
        config: config of the run; see :func:`save`.
        background: False means that :meth:`save` returns once the checkpoint is written. This is always so for several ranks
            without process groups (simulated ranks).

    Attributes:
        saved: step of the newest complete checkpoint that this Saver has written; -1 if there is none.

    Raises:
        CheckpointError: ``keep`` and the other arguments keep nothing, the folder cannot be written, or another Saver of this
            process is writing into it. All ranks raise.
    """

    @options_checked
    def __init__(
        self,
        root: str | os.PathLike[str],
        comm: Comm,
        *,
        keep: int = 3,
        best: int = 0,
        keep_steps: int | None = None,
        keep_hours: float | None = None,
        config: Any = None,
        background: bool = True,
    ) -> None:
        self._root, self._config = absolute_path(root), config
        self._retention = Retention(keep, best, keep_steps, keep_hours)

        def check() -> None:
            self._retention.check_options("Saver()")
            if any(isinstance(each, Saver) and each.is_busy and each._root == self._root for each in _busy_savers):
                raise CheckpointError(f"Saver(): another Saver is still writing into {self._root}: close() that one first.")
            _clean_root_and_try_write(self._root, comm)

        check_on_all_ranks("Saver()", comm, check, lambda _: {"root": self._root, "keep": repr(self._retention)})
        self.saved, self._saved_at = -1, math.inf
        super().__init__(comm, "save", background=background)

    def _reset_after_rank_restart(self) -> None:
        super()._reset_after_rank_restart()
        self._saved_at = math.inf  # the save that was under way may be complete all the same
        _clean_root_and_try_write(self._root, self._comm)

    @api_boundary
    def save(self, tree: Any, *, step: int, metric: float | None = None) -> None:
        """Save a tree, as :func:`save` does, once the previous save has been written.

        The caller may change or donate the tree as soon as this call returns.

        Raises:
            CheckpointError: the previous save has failed, or there is no room. This call saves nothing. All ranks raise.
            CheckpointError: this process was forked from the process that has made the Saver.
            TreeError: a leaf cannot be saved.
            AgreementError: ranks have different trees or values.

        Cost: a copy of this rank's elements, and for each axis a collective of 40 bytes and one of 16; with a module or an
        optimizer in the tree another one of 40. Then, in the background, the cost of :func:`save`. Memory: the copy, kept
        between saves.
        """
        self._refuse_forked_process()
        with self._lock:
            self.wait()
            snapshot = agree_and_make_folder(self._root, tree, step=step, comm=self._comm, config=self._config, metric=metric)
            self._copy_and_start_job(replace(snapshot, is_by_saver=True), self._write_and_remove_old)

    def _write_and_remove_old(self, snapshot: Snapshot) -> None:
        made, since = write_snapshot(snapshot, self._own), self._saved_at
        self.saved = made.step

        def remove_old() -> None:
            if self._own.rank != 0:
                return
            self._saved_at = save_time_of(made.path)
            for path in (f"{self._root}/{name}" for name in names_last_saved_first(self._root)):
                if save_time_of(path) <= since:
                    break
                found = open_if_complete(path) if path != made.path else None
                if found is not None and found.summary.is_by_saver:
                    raise CheckpointError(
                        f"{self._root}: {path} was saved after the last save of this Saver, by another Saver: nothing is "
                        "removed. Give each its own root."
                    )
            if old := self._retention.old_checkpoints(self._root, only_by_saver=True):
                _log.info("%s of the Saver does not keep these checkpoints, so it removes them: %s", self._retention, old)
            remove_checkpoints(old)  # the newest checkpoint was compared when it was written

        check_on_all_ranks("Saver", self._own, remove_old)


def _clean_root_and_try_write(root: str, comm: Comm) -> None:
    """On rank 0 remove interrupted saves, and write and remove a file under ``root``: an error shows before the first save."""

    def clean() -> None:
        remove_incomplete(root)
        storage, trial = storage_of(root), f"{root}/{folder_name(0, secrets.token_hex(8))}"
        storage.make_staging_folder(trial)  # makes nothing in an object store
        with storage.append_to_new_file(f"{storage.staging_path(trial)}/{shard_file_name(0)}") as out:
            out(memoryview(b"trial"))  # fewer bytes than a header has: a file that was cut off, if this process is killed now
        storage.remove(storage.staging_path(trial))

    if comm.rank == 0:
        run_converting_os_errors(root, clean)


def _wait_for_all_saves() -> None:
    """Wait for the saves of all Savers. An error is kept for the next call of its Saver."""
    is_rejoining = generations.why_generation_ended() is not None
    for each in list(_busy_savers):
        if is_rejoining:
            # The launcher ends a process that hangs, and the next generation uses the thread.
            each.failure(threading.TIMEOUT_MAX)
            continue
        with suppress(CheckpointError):
            each.wait_for_thread()


callbacks_before_leaving.append(_wait_for_all_saves)


@atexit.register
def _exit_if_save_failed() -> None:
    """Wait for saves in the background. For an error that no ``wait()`` has raised, print the error and exit with status 1."""
    failed = False
    for each in list(_busy_savers):
        try:
            each.close()
        except BaseException:
            traceback.print_exc()
            failed = True
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception would change no exit status here
