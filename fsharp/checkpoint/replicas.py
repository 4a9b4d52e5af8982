"""Replicas: copies of each rank's part of the training state in memory of several hosts, to survive the loss of a host."""

import json
import math
import os
import secrets
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import optree
import torch

from fsharp.checkpoint.catalog import (
    Checkpoint,
    advance_save_clock,
    names_last_saved_first,
    newest_except,
    newest_save_time,
    opening_errors,
    remove_incomplete,
    save_id_from_clock,
    time_in_save_id,
)
from fsharp.checkpoint.entries import TreeContents, contents_of, is_node_saved_as_leaf, with_state_dicts
from fsharp.checkpoint.loading import (
    load_checkpoint_at,
    load_or_collect_damage,
    load_with_reader,
    rename_damaged_on_rank_0,
    set_aside_and_describe,
)
from fsharp.checkpoint.manifest import MANIFEST_NAME, FileRecord
from fsharp.checkpoint.peers import (
    MESSAGE_NBYTES,
    CopyKey,
    DamagedCopy,
    FirstErrorKeeper,
    InMemorySave,
    fetch_manifest,
    held_saves,
    read_from_hosts,
    saves_on_this_host,
    shift_over_ranks,
)
from fsharp.checkpoint.reading import NeededElements
from fsharp.checkpoint.saver import BackgroundSaver
from fsharp.checkpoint.saving import (
    Snapshot,
    agree_on_snapshot,
    check_free_space,
    header_metadata,
    manifest_of_snapshot,
    remove_staged,
    run_converting_os_errors,
    tensors_written_by,
    verify_written_file,
    write_manifest_and_publish,
    write_shard_files,
)
from fsharp.checkpoint.shard_file import file_nbytes
from fsharp.checkpoint.storage import FolderClaim, LocalStorage, absolute_path
from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.errors import AgreementError, CheckpointError, FsharpError, log as _log, problem
from fsharp.functional.comm.agree import all_gather_fixed_size, all_gather_texts, check_on_all_ranks
from fsharp.functional.comm.protocol import Comm, innermost_comm
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.functional.formats.host_memory import bytes_of
from fsharp.functional.layout.sharded import mark_donated, units_of
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

_local_storage = LocalStorage()
_TOKEN_NBYTES = 8


class RefreshNbytes(NamedTuple):
    """Predicted bytes of a refresh.

    Attributes:
        sent: bytes of files that this rank sends to other hosts; comparing arguments takes about 100 more.
        held: bytes of files in this host's folder after the refresh, without the manifest. During the refresh the files of the
            previous save are there as well.
        copied: bytes of values that this rank copies into memory of its process, and keeps.
    """

    sent: int
    held: int
    copied: int


class _DiskCheckpoint(NamedTuple):
    path: str
    step: int
    created: float


@options_checked
class Replicas(BackgroundSaver):
    """Keep the training state in memory of hosts, with copies of each rank's part on other hosts.

    ::

        with fs.checkpoint.Replicas("/dev/shm/run-a", comm, copies=1, root="runs/a") as replicas:
            if replicas.latest() is not None:
                state = replicas.restore(state)  # from hosts' memory, or from disk if that is newer
            for step in range(state.step, 1000):
                state, metrics = train_step(state, batches[step])
                if step % 10 == 9:
                    replicas.refresh(state, step=state.step)  # returns once values are copied

    >>> import tempfile, fsharp as fs
    >>> params = {"w": torch.arange(3.)}
    >>> with tempfile.TemporaryDirectory() as folder:  # a folder of /dev/shm
    ...     with fs.checkpoint.Replicas(folder, fs.SingleComm(), copies=0) as replicas:
    ...         replicas.refresh(params, step=7)
    ...     with fs.checkpoint.Replicas(folder, fs.SingleComm(), copies=0) as replicas:  # the program, started again
    ...         replicas.latest(), replicas.restore({"w": torch.zeros(3)})
    (7, {'w': tensor([0., 1., 2.])})

    A folder in memory, such as /dev/shm, outlives processes. Each rank writes a file into the folder of its host. Each rank
    also sends its file to one rank on each of the next ``copies`` hosts. So the state survives if at most ``copies`` hosts lose
    their memory. The next refresh makes the lost copies again. The previous save is removed once all hosts hold the new one.
    Errors in the background are raised as in :class:`~fsharp.checkpoint.Saver`.

    Args:
        folder: folder on this rank's host, equal for all ranks of a host. Only this run, and its restarts, may use it.
        comm: the ranks, from :func:`~fsharp.connect`. All ranks have to make the Replicas.
        copies: number of other hosts that hold a rank's file. With 0 a save survives the end of processes, but not the loss of
            a host.
        domain_size: number of consecutive ranks on a host; None means ``LOCAL_WORLD_SIZE``, or 1.
        root: folder of checkpoints on disk, from which :meth:`restore` loads if one is newer.

    Raises:
        CheckpointError: ``copies`` is not below the number of hosts, or ``domain_size`` does not divide the number of ranks.
        CheckpointError: the folder is in use, ranks of a host see different folders, or ``root`` cannot be listed.
        AgreementError: ranks have different arguments, or only some ranks have one of these errors. All ranks raise.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        comm: Comm,
        *,
        copies: int = 1,
        domain_size: int | None = None,
        root: str | os.PathLike[str] | None = None,
    ) -> None:
        self._folder, self._copies, self._root = os.path.abspath(folder), copies, None if root is None else absolute_path(root)
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if domain_size is None else domain_size
        self._domain_size, self._claim = size, None
        self._ordered_with = self._root or self._folder  # the root whose saves have one order with those in memory
        token = secrets.token_bytes(_TOKEN_NBYTES)

        def exchange_tokens() -> list[bytes]:
            latest = struct.pack("<d", advance_save_clock(self._ordered_with))
            found = all_gather_fixed_size(token + latest, comm)
            advance_save_clock(self._ordered_with, max(struct.unpack_from("<d", each, _TOKEN_NBYTES)[0] for each in found))
            return [each[:_TOKEN_NBYTES] for each in found]

        def check() -> None:
            if not isinstance(innermost_comm(comm), ProcessGroupComm) and comm.mesh.size > 1:
                raise CheckpointError(f"Replicas(): comm is {type(comm).__name__}, expected a Comm from connect().")
            if "://" in os.fspath(folder):
                raise CheckpointError(f"Replicas(): {os.fspath(folder)!r} is a URL, expected a folder in this host's memory.")
            n = comm.mesh.size
            if size < 1 or n % size:
                raise CheckpointError(f"Replicas(): domain_size is {size}, and {n} ranks are not whole hosts of as many.")
            if not 0 <= copies < n // size:
                raise CheckpointError(
                    f"Replicas(): copies is {copies}, expected at least 0 and less than the {n // size} hosts that {n} ranks "
                    f"form with domain_size={size}: each copy is on another host."
                )
            if comm.rank % size == 0:
                self._claim = run_converting_os_errors(self._folder, lambda: FolderClaim(self._folder, token))
                remove_incomplete(self._folder)
                for _, _, created, *_ in saves_on_this_host(self._folder):
                    advance_save_clock(self._ordered_with, created)
            if comm.rank == 0 and self._root is not None:
                advance_save_clock(self._root, newest_save_time(self._root))

        def check_reduced() -> None:
            first = comm.rank // size * size
            if self._claim is None and FolderClaim.read_token(self._folder, _TOKEN_NBYTES) != tokens[first]:
                raise CheckpointError(
                    f"Replicas(): rank {comm.rank} does not see {self._folder} of rank {first}: they are on different hosts, "
                    f"were given different folders, or the folder was removed while rank {first} runs. domain_size is {size}."
                )

        try:
            arguments = {"copies, domain_size": f"{copies}, {size}", "root": repr(self._root)}
            check_on_all_ranks("Replicas()", comm, check, lambda _: arguments)
            tokens = restart_replay.record_and_call(exchange_tokens)
            check_on_all_ranks("Replicas()", comm, lambda: run_converting_os_errors(self._folder, check_reduced))
            super().__init__(comm, "refresh", flat=True)
        except BaseException:
            if self._claim is not None:
                self._claim.close()
            raise

    def _reset_after_rank_restart(self) -> None:
        super()._reset_after_rank_restart()
        if self._claim is not None:
            remove_incomplete(self._folder)

    @api_boundary
    def refresh_nbytes(self, tree: Any) -> RefreshNbytes:
        """Return the exact bytes that this rank would send and keep in :meth:`refresh` of ``tree``. Needs no other rank.

        Memory: for a ShardedOptimizer that was made from a class of torch.optim, its state once more until the call returns.
        """

        def like_state_dict(leaf: Any) -> Any:
            if not hasattr(leaf, "state_template"):
                return with_state_dicts(leaf)
            return leaf.state_template(lambda name: any(name == f"state.{each.path}" for each in leaf.state))

        like = optree.tree_map(like_state_dict, tree, is_leaf=is_node_saved_as_leaf)
        return self._refresh_nbytes_of(contents_of("refresh_nbytes()", like, self._comm))

    def _refresh_nbytes_of(self, contents: TreeContents) -> RefreshNbytes:
        rank = self._comm.rank
        written = {of: [each for _, each in tensors_written_by(contents, of)] for of in {rank, *self._ranks_with_files_here}}
        sizes = {of: file_nbytes(tensors, header_metadata("0" * 32, of)) for of, tensors in written.items()}
        copied = sum(tensor.nbytes for tensor in written[rank])
        return RefreshNbytes(self._copies * sizes[rank], sum(sizes[of] for of in self._ranks_with_files_here), copied)

    @property
    def _ranks_with_files_here(self) -> list[int]:
        """The ranks whose files this host keeps: the ranks of this host, and ranks whose copies this host holds."""
        first, n = self._comm.rank // self._domain_size * self._domain_size, self._comm.mesh.size
        own = range(first, first + self._domain_size)
        return [(rank - j * self._domain_size) % n for j in range(self._copies + 1) for rank in own]

    @property
    def root(self) -> str | None:
        """Folder of the checkpoints on disk; None if none was given."""
        return self._root

    @api_boundary
    def refresh(self, tree: Any, *, step: int, config: Any = None) -> None:
        """Copy ``tree``, and begin to store the copy in the memory of hosts. All ranks call this method.

        The call first blocks until the previous refresh has ended. Then the call copies the tree, and a thread stores the copy.
        The caller may change ``tree``, or donate it to a step, as soon as the call returns. Hosts keep the previous tree until
        the new one is complete.

        Args:
            tree: the tree, as for :func:`~fsharp.checkpoint.save`.
            step: number of the step.
            config: config of the run, a JSON-serializable value; equal on all ranks.

        Raises:
            CheckpointError: the previous refresh has failed: this call stores nothing. All ranks raise.
            CheckpointError: this process was forked from the process that has made the Replicas.
            TreeError: a leaf cannot be saved.
            AgreementError: ranks have trees of different structure, or different ``step`` or ``config``.

        Cost: see :meth:`refresh_nbytes`. The call itself makes the copy, and two collectives for each axis, of 40 and 16 bytes.
        The thread sends pieces of 4 MiB, in process groups that it alone uses.
        """

        def begin(contents: TreeContents) -> str:
            if self._claim is not None and self._claim.is_closed:
                raise CheckpointError("refresh(): these Replicas are closed. Make new ones.")
            return save_id_from_clock(self._ordered_with) if self._comm.rank == 0 else ""

        self._refuse_forked_process()
        with self._lock:
            self.wait()
            snapshot = agree_on_snapshot(
                "refresh()", self._folder, tree, step=step, comm=self._comm, config=config, begin=begin, shared_root=False
            )
            advance_save_clock(self._ordered_with, time_in_save_id(snapshot.save_id) or 0.0)
            self._copy_and_start_job(snapshot, self._replace_save_on_hosts)

    def _replace_save_on_hosts(self, snapshot: Snapshot) -> None:
        """Write files on all hosts, then manifests, and remove the previous save last, so that one save is always whole."""
        staged, own = _local_storage.staging_path(snapshot.folder), self._own

        def make_folder() -> None:
            if self._claim is not None:
                check_free_space(self._folder, self._refresh_nbytes_of(snapshot.contents).held)
                run_converting_os_errors(snapshot.folder, lambda: _local_storage.make_staging_folder(snapshot.folder))

        def commit() -> None:
            if self._claim is not None:
                here = [records[rank] for rank in self._ranks_with_files_here]
                manifest = manifest_of_snapshot(snapshot, records, self._comm.mesh)
                run_converting_os_errors(
                    snapshot.folder, lambda: write_manifest_and_publish(snapshot, staged, here, manifest, rank=own.rank)
                )

        def remove_others() -> None:
            for name in names_last_saved_first(self._folder) if self._claim is not None else ():
                path = f"{self._folder}/{name}"
                # A published save has a manifest.
                if path != snapshot.folder and MANIFEST_NAME in _local_storage.list_names(path):
                    _local_storage.remove(path)

        try:
            check_on_all_ranks("refresh()", own, make_folder)
            records = write_shard_files(snapshot, staged, own, "refresh()")
            self._exchange_copies(snapshot, staged, records)
            check_on_all_ranks("refresh()", own, commit)
            check_on_all_ranks("refresh()", own, remove_others)
        except BaseException:
            if self._claim is not None:
                remove_staged(snapshot.folder)  # does nothing to a published folder, which has another name
            raise

    def _exchange_copies(self, snapshot: Snapshot, staged: str, records: Sequence[FileRecord]) -> None:
        own, keeper = self._own, FirstErrorKeeper()
        for j in range(1, self._copies + 1):
            shift = j * self._domain_size
            source = (own.rank - shift) % own.mesh.size
            mine, theirs = records[own.rank], records[source]
            outgoing = torch.empty(MESSAGE_NBYTES, dtype=torch.uint8, device="cpu")
            with ExitStack() as stack:
                out = keeper.run(stack.enter_context, _local_storage.append_to_new_file(f"{staged}/{theirs.name}"))
                for start in range(0, max(record.nbytes for record in records), MESSAGE_NBYTES):
                    send, due = outgoing[: max(mine.nbytes - start, 0)], max(min(theirs.nbytes - start, MESSAGE_NBYTES), 0)
                    keeper.run(_local_storage.read, f"{staged}/{mine.name}", start, bytes_of(send))
                    receive = shift_over_ranks(send, due, shift, own, label=f"refresh() of step {snapshot.step}")
                    keeper.run(out, bytes_of(receive))
                keeper.run(stack.close)
            keeper.run(verify_written_file, staged, theirs, source, snapshot.save_id)
        check_on_all_ranks("refresh()", own, lambda: run_converting_os_errors(staged, keeper.raise_if_failed))

    @api_boundary
    def latest(self) -> int | None:
        """Return the step that :meth:`restore` will load if no file is damaged; None if nothing was saved. All ranks call this.

        The call first waits until the refresh under way has ended.

        Raises:
            CheckpointError: the refresh under way has failed, or the file system refuses to read a save.
            CheckpointError: every save in memory of hosts has lost files or is damaged, and there is no checkpoint on disk that
                can be opened.
        """
        found = self._find_newest({}, {})
        return None if found is None else found.step

    @api_boundary
    def restore(self, like: Any, *, subtree: str = "", cast: bool = False, donate: bool = False) -> Any:
        """Return a tree like ``like`` with the values of the newest complete save, under any strategy and number of ranks.

        All ranks have to call this method, which first waits for the refresh under way. A save is in the memory of hosts, or is
        a checkpoint under ``root``. The newest save is the one that began last, also if hosts' clocks differ or were set back.
        A save in memory is incomplete if more than ``copies`` hosts have lost their memory. A warning names the incomplete
        saves that are newer than the save that is loaded.

        If a copy of a file is damaged, the copy of another host is read. If all copies are damaged, the next older save is
        loaded. Damaged files and checkpoints are renamed to end in ``.damaged``, with a warning for each.

        Args:
            like: a tree with names, shapes, dtypes and places, as for :func:`~fsharp.checkpoint.load`.
            subtree: load this part alone.
            cast: convert values whose dtype differs.
            donate: read into the tensors of ``like``.

        Raises:
            CheckpointError: the refresh under way has failed, or no save is whole.
            CheckpointError: a host cannot read a file. Then remove the file.
            TreeError: names, shapes or dtypes differ.
            AgreementError: ranks have different arguments, or another rank has failed.

        Cost: hosts exchange lists of their files. A rank reads elements from its host, and receives those that its host lacks,
        in blocks that are compared with digests, as in :func:`~fsharp.checkpoint.load`. Memory: two pieces of 4 MiB.
        """
        return self.restore_checkpoint_and_tree(like, subtree=subtree, cast=cast, donate=donate)[1]

    @api_boundary
    def restore_checkpoint_and_tree(self, like: Any, **options: Any) -> tuple[Checkpoint, Any]:
        """Restore as :meth:`restore` does, and return the checkpoint, with its step and config, and the tree.

        The path of the checkpoint is below ``root`` if values came from disk, and otherwise below the folder of the hosts.
        ``options``: arguments of :meth:`restore` by name; ``donate`` has to be among them.
        """
        on_disk, copies, has_tried = dict[str, str](), dict[CopyKey, str](), False
        while True:
            found, damage = self._find_newest(on_disk, copies), list[Any]()
            if found is None:
                nothing = f"restore(): no host holds anything in {self._folder}; root is {self._root!r}."
                raise CheckpointError("\n".join([nothing, *on_disk.values()]))
            if options["donate"] and has_tried:  # this save is read into the same memory
                mark_donated(units_of(like), new=units_of(like))
            has_tried = True
            load_it, path = partial(self._load_save, found, like, damage, **options), getattr(found, "path", None)
            loaded, said = load_or_collect_damage(load_it, damage, self._comm, path)
            if loaded is not None:
                where = "on hosts" if isinstance(found, InMemorySave) else "on disk"
                self._set_aside(on_disk, copies, f"what was saved of step {found.step} {where}")
                return loaded
            if isinstance(found, InMemorySave):
                copies |= {(found.name, rank // self._domain_size * self._domain_size, file): text for text, rank, file in said}
            elif said:
                on_disk[found.path] = said[0]

    def _load_save(
        self, found: "InMemorySave | _DiskCheckpoint", like: Any, damage: list[Any], **options: Any
    ) -> tuple[Checkpoint, Any]:
        """Load the save ``found``. If the save is damaged, append what this rank sees to ``damage``, and raise on all ranks."""
        if not isinstance(found, InMemorySave):
            return load_checkpoint_at(found.path, like, damage, comm=self._comm, where=found.path, **options)
        folder, own = f"{self._folder}/{found.name}", self._own
        held = Checkpoint(folder)

        def read(held: Checkpoint, needs: list[NeededElements]) -> None:
            read_from_hosts(folder, found, held.manifest, needs, own, self._domain_size)

        try:
            vars(held)["manifest"] = fetch_manifest(folder, found, own, self._domain_size)  # this host may have no such folder
            return load_with_reader(read, lambda: held, like, comm=self._comm, where=found.name, **options)
        except FsharpError as error:
            own_error = error.__cause__ if isinstance(error, AgreementError) else error
            if isinstance(own_error, DamagedCopy):
                damage.append([str(own_error), own_error.rank, own_error.file])
            raise

    def _set_aside(self, on_disk: Mapping[str, str], copies: Mapping[CopyKey, str], used_instead: str) -> None:
        rename_damaged_on_rank_0(on_disk, used_instead, self._comm)
        for (save, first, file), text in copies.items():
            if first == self._comm.rank:
                path = f"{self._folder}/{save}/{file}"
                what = set_aside_and_describe(path)
                _log.warning(
                    "%s on the host of rank %d is damaged, %s: %s Used instead: %s.", path, first, what, text, used_instead
                )

    def _find_newest(self, on_disk: Mapping[str, str], copies: Mapping[CopyKey, str]) -> InMemorySave | _DiskCheckpoint | None:
        """Return the newest complete save, equal on all ranks; None if there is none.

        Damaged saves do not count: ``on_disk`` has the errors of damaged checkpoints, ``copies`` those of damaged copies.
        """
        self.wait()
        saves = held_saves(self._folder, self._own, self._domain_size, copies)
        held = sorted(saves, key=lambda save: save.created, reverse=True)
        whole, disk = next((save for save in held if not save.lost_file_numbers), None), self._newest_on_disk(on_disk)
        found = disk if whole is None or (disk is not None and disk.created > whole.created) else whole
        since = -math.inf if found is None else found.created
        lost = [
            (f"step {save.step}", f"files of ranks {save.lost_file_numbers[:8]} of {save.num_files} are on no host")
            for save in held
            if save.lost_file_numbers and save.created > since
        ]
        if lost and found is None:
            lost += [("damaged", text) for text in copies.values()]
            rest = "Give root= of checkpoints on disk." if self._root is None else f"There is no checkpoint under {self._root}."
            why = f"More than {self._copies} hosts lost their memory, copies are damaged, or the first refresh did not end."
            remedy = f"{why} {rest} To begin anew, remove {self._folder} on all hosts."
            raise CheckpointError(problem("restore()", "no newer save in memory of hosts is complete.", lost, remedy))
        if found is None:
            self._check_may_begin_anew(on_disk)
        if lost and self._comm.rank == 0:
            _log.warning(problem("restore()", f"using step {found and found.step}: newer saves are incomplete.", lost))
        return found

    def _check_may_begin_anew(self, damaged_on_disk: Mapping[str, str]) -> None:
        """Raise a CheckpointError on all ranks if there are saves, in memory of hosts or on disk, but none can be opened."""

        def unreadable_here() -> list[str]:
            in_memory = opening_errors(self._folder) if self._claim is not None else []
            return in_memory + (opening_errors(self._root) if self._root is not None and self._comm.rank == 0 else [])

        mine = check_on_all_ranks("restore()", self._comm, unreadable_here)
        unreadable = [text for texts in all_gather_texts(json.dumps(mine), self._comm) for text in json.loads(texts)]
        if unreadable:
            texts = "\n".join([*unreadable[:8], *damaged_on_disk.values()])
            raise CheckpointError(f"restore(): no save can be read. To begin anew, remove these folders.\n{texts}")

    def _newest_on_disk(self, damaged: Collection[str]) -> "_DiskCheckpoint | None":
        """Return the newest checkpoint under ``root`` that is not in ``damaged``, as rank 0 sees it; None if there is none."""
        if self._root is None:
            return None
        root, comm = self._root, self._comm
        found = check_on_all_ranks("restore()", comm, lambda: newest_except(root, damaged) if comm.rank == 0 else None)
        facts = [] if found is None else [found.path, found.step, found.summary.created]
        said = json.loads(all_gather_texts(json.dumps(facts), comm)[0])
        return _DiskCheckpoint(*said) if said else None

    @api_boundary
    def close(self) -> None:
        """Wait for the refresh under way, if there is one, and unlock the folder. If the refresh has failed, raise its error.

        Files in the folder stay.
        """
        try:
            super().close()
        finally:
            if self._claim is not None:
                self._claim.close()
