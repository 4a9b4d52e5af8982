"""Join a torch.distributed job, make process groups over its store, and query the store, whose host may not answer.

torch limits how long a query waits for a missing key, but not how long it waits for a store that does not answer. So a separate
thread sends queries, and callers wait for this thread with a limit.
"""

import hashlib
import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_group, _get_default_store, _world
from torch.distributed.rendezvous import rendezvous

from fsharp.distributed.generations import begin_membership, why_generation_ended
from fsharp.distributed.worker_threads import Outcome, Worker
from fsharp.errors import AgreementError, CommError, problem
from fsharp.functional.layout.mesh import Mesh

T = TypeVar("T")
# torch 2.13 gave this function a new name.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_STORE_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 0.02
_GIVE_UP_CHECK_INTERVAL_S = 0.5


def run_within(limit_s: float, job: Callable[[], T], *, why_give_up: Callable[[], str | None] = lambda: None) -> T:
    """Call ``job``, a function that queries the store, in a new thread. Return its result, or raise its error.

    ``job`` should end its own waits after ``limit_s`` seconds. Raises TimeoutError after ``limit_s + 2`` seconds: in the last
    two seconds the store may still answer. ``why_give_up()`` is called every half second. If it returns a text, a CommError
    with this text is raised. After a TimeoutError or a CommError the thread runs on until ``job`` ends.
    """
    worker, done, deadline = Worker("job"), Outcome(), time.monotonic() + limit_s + _STORE_TIMEOUT_S
    worker.submit(job, done)
    while not done.is_done(max(min(_GIVE_UP_CHECK_INTERVAL_S, deadline - time.monotonic()), 0.0)):
        if why := why_give_up():
            raise CommError(why)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the job's store has not answered within {limit_s + _STORE_TIMEOUT_S:g} s")
    return done.take_result()  # type: ignore[no-any-return]


class _StoreThread:
    """A thread that sends queries to the job's store. While a query has no answer, no further query is sent.

    Args:
        is_of_parent: whether a parent process, from which this process was forked, owns the connection to the store. If so, no
            query is sent, as the parent would read the answers.
    """

    def __init__(self, *, is_of_parent: bool = False) -> None:
        self._lock, self._worker, self._last = threading.Lock(), Worker("store"), Outcome()
        if not is_of_parent:
            self._last.wake_waiters()

    def query(self, ask: Callable[[], T], default: T) -> tuple[T, str]:
        """Return ``(ask(), "")``, where ``ask`` sends a query. Without an answer return ``(default, reason)``.

        While an earlier query has no answer, ``ask`` is not called. The reason is ``"does not answer"`` or ``"has ended"``.
        """
        with self._lock:
            if not self._last.is_done():
                return default, "does not answer"
            self._last = asked = Outcome()
            self._worker.submit(ask, asked)
            if not asked.is_done(_STORE_TIMEOUT_S):
                return default, "does not answer"
        try:
            return asked.take_result(), ""
        except dist.DistError:
            return default, "has ended"


def join_job_of_environment(backend: str, timeout: timedelta | None, is_abandoned: threading.Event) -> None:
    """Join the job that the environment variables describe, under keys in the job's store that no earlier attempt has used.

    After a failure torchrun makes another attempt with the same store. Under the same keys gloo would find the addresses of the
    ended processes. ``timeout`` is the argument of ``init_process_group``. Raises CommError if other processes have not joined
    within this time. Call this function through :func:`run_within`, as torch's own limit begins anew whenever torch tries to
    reach the store. If ``is_abandoned`` is set meanwhile, the call raises a CommError before it joins: otherwise this process
    might try again, and two attempts would use the store at the same time.
    """
    limit = timeout or dist.default_pg_timeout
    store, rank, world_size = next(rendezvous("env://", timeout=limit))
    if is_abandoned.is_set():
        raise CommError("connect() has ended before this attempt to join the job.")
    # The launcher's store has a connection of its own, which no other thread's wait for a key holds up.
    member = begin_membership(lambda: PrefixStore("fsharp/generations", next(rendezvous("env://", timeout=limit))[0]))
    if member is not None:
        member.join_and_wait_for_all_ranks(limit.total_seconds())
        name = f"generation {member.number}"
    else:
        name = choose_attempt_name(store, rank, world_size, limit.total_seconds(), is_abandoned)
    store = PrefixStore(f"fsharp/{name}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def join_job(mesh: Mesh, device_type: str, world_size: int, timeout: timedelta | None, limit_s: float) -> DeviceMesh:
    """Join the job, unless this process has joined the job before. Return a DeviceMesh of all ranks with the axes of ``mesh``.

    ``device_type``: such as ``"cuda"``. ``timeout``: time limit of collectives; None means torch's default. Raises a
    CommError if the job cannot be joined within ``limit_s`` seconds.
    """

    def mesh_of_all() -> DeviceMesh:
        if device_type == "cuda":  # each thread has a current device of its own
            torch.accelerator.set_device_index(device)
        if not dist.is_initialized():
            join_job_of_environment("nccl" if device_type == "cuda" else "gloo", timeout, is_abandoned)
        _check_same_mesh(mesh, device_type, world_size)
        return init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.names)

    device = torch.accelerator.current_device_index() if device_type == "cuda" else 0
    is_abandoned, was_member = threading.Event(), dist.is_initialized()
    who = f"connect(): rank {os.environ.get('RANK', '?')} of {world_size}"
    remedy = "Has another process ended before it joined the job, or has the process that hosts the job's store?"
    if was_member:
        remedy = "After an error in a collective call fs.destroy() on all ranks, then connect again."
    try:
        return run_within(limit_s, mesh_of_all)
    except TimeoutError as error:
        raise CommError(f"{who} has waited {limit_s:g} s for the others to join the job. {remedy}") from error
    except (CommError, AgreementError):
        raise
    except RuntimeError as error:  # of torch, or of a connection of gloo
        text = str(error).partition("\n")[0].rstrip(" .")
        what = "cannot use the process group of the job that it has joined" if was_member else "could not join the job"
        raise CommError(f"{who} {what}: {text}. {remedy}") from error
    finally:
        is_abandoned.set()


def _check_same_mesh(mesh: Mesh, device_type: str, world_size: int) -> None:
    """Raise an error, with equal text on all ranks, if the mesh has the wrong size or differs between ranks."""
    text = json.dumps(mesh.axes).encode()[:512]
    mine = torch.zeros(512, dtype=torch.uint8)
    mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    everyone = torch.empty(world_size * 512, dtype=torch.uint8, device=device_type)
    all_gather_into(everyone, mine.to(device_type))
    texts = [bytes(row).rstrip(b"\0").decode() for row in everyone.view(world_size, 512).cpu().tolist()]
    if len(set(texts)) > 1:
        rows = [(f"rank {rank}", axes) for rank, axes in enumerate(texts)]
        raise AgreementError(problem("connect()", "ranks ask for different meshes.", rows))
    mesh.check_world_size(world_size)


def choose_attempt_name(store: Store, rank: int, world_size: int, limit_s: float, is_abandoned: threading.Event) -> str:
    """Return a name for this attempt to run the job: the same on all ranks, and another one after a restart.

    The environment has no such name, as each node counts its own restarts. So each rank writes a random mark to the store. Rank
    0 writes the list of all marks again and again, until each rank has found its own mark there. The name is rank 0's mark.
    Raises CommError after ``limit_s`` seconds, or once ``is_abandoned`` is set.
    """
    mark, deadline = uuid.uuid4().hex, time.monotonic() + limit_s
    store.set(f"fsharp/mark/{rank}", mark)
    while time.monotonic() < deadline and not is_abandoned.is_set():
        if rank == 0:
            keys = [f"fsharp/mark/{other}" for other in range(world_size)]
            marks = [store.get(key).decode() if store.check([key]) else "" for key in keys]
            store.set("fsharp/marks", json.dumps(marks))
            if store.add(f"fsharp/found/{mark}", 0) == world_size - 1:
                return mark
        elif store.check(["fsharp/marks"]):
            marks = json.loads(store.get("fsharp/marks"))
            if marks[rank : rank + 1] == [mark]:
                store.add(f"fsharp/found/{marks[0]}", 1)
                return str(marks[0])
        time.sleep(_POLL_INTERVAL_S)
    raise CommError(f"connect(): rank {rank} of {world_size} has waited {limit_s:g} s for the others to join the job.")


_MAX_STORED_CHARACTERS = 1 << 20


class StoreStatusBoard:
    """A :class:`~fsharp.distributed.watch.StatusBoard` in the job's store. Its keys in the store begin with ``name``."""

    def __init__(self, name: str) -> None:
        self._store, self.why_no_answer = PrefixStore(f"fsharp/watch/{name}", _get_default_store()), ""

    def write(self, key: str, text: str) -> None:
        """Replace the text of a key."""
        self._query(lambda: self._store.set(key, _storable_text(text)), None)

    def read(self, key: str) -> str | None:
        """Return the text of a key; None if the key has no text."""
        return self._query(lambda: self._store.get(key).decode() if self._store.check([key]) else None, None)

    def write_if_absent(self, key: str, text: str) -> str:
        """Write ``text`` if the key has no text. Return the key's text afterwards: ``text``, or that of an earlier write."""
        return self._query(lambda: bytes(self._store.compare_set(key, "", _storable_text(text))).decode(), text)

    def _query(self, query: Callable[[], T], default: T) -> T:
        answer, why = _store_thread.query(query, default)
        self.why_no_answer = why and f"the job's store, which rank 0 of the job hosts unless torchrun does, {why}"
        return answer


def _storable_text(text: str) -> str:
    """Return ``text`` as the store accepts it: cut to the longest allowed, with ``?`` for characters that cannot be encoded."""
    return text[:_MAX_STORED_CHARACTERS].encode(errors="replace").decode()


def record_end_of_rank(*, within_s: float) -> None:
    """Record in the store that this rank ends. If rank 0's process hosts the store, rank 0 waits for all ranks.

    The wait ends after ``within_s`` seconds at the latest.
    """
    store, size = PrefixStore("fsharp/left", _get_default_store()), dist.get_world_size()
    count, _ = _store_thread.query(lambda: store.add("count", 1), size)
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # a process of torchrun hosts the store
    is_host = dist.get_rank() == 0 and not is_agents and isinstance(_innermost_store(store), dist.TCPStore)  # type: ignore[attr-defined]
    deadline = time.monotonic() + within_s
    while is_host and count < size and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        count, _ = _store_thread.query(lambda: store.add("count", 0), size)


def _innermost_store(store: Any) -> Any:
    return _innermost_store(store.underlying_store) if isinstance(store, PrefixStore) else store


def group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds that a collective of ``group`` may take on ``device``: the group's ``timeout``."""
    options = getattr(group._get_backend(device), "options", None)
    return float(options._timeout.total_seconds()) if options is not None else dist.default_pg_timeout.total_seconds()


def pg_timeout_s() -> float:
    """Return the seconds that a collective of the job may take: the ``timeout`` of ``init_process_group``."""
    group = _get_default_group()
    return min(group_timeout_s(group, device) for device in group._device_types)


def new_group_of(ranks: Sequence[int], limit_s: float, device: torch.device, *, is_nccl: bool) -> dist.ProcessGroup:
    """Return a new process group of some ranks of the job. These ranks alone call this function.

    Over gloo the group closes its connections when it is freed; torch would keep the connections for the rest of the job.
    Raises CommError if the ranks do not meet within ``limit_s`` seconds, which is also the limit of the group's collectives.
    """
    limit = timedelta(seconds=limit_s)
    number = _num_groups_made[tuple(ranks)] = _num_groups_made[tuple(ranks)] + 1
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    store, mine = PrefixStore(f"fsharp/groups/{name}/{number}", _get_default_store()), dist.get_rank()

    def agree_on_group_count() -> int:
        store.set(str(mine), str(len(_world.pg_names)))
        if mine == ranks[0]:  # one rank reads all entries, so that every other rank queries the store once
            store.wait([str(rank) for rank in ranks], limit)
            store.set("most", str(max(int(store.get(str(rank))) for rank in ranks)))
        store.wait(["most"], limit)
        return int(store.get("most"))

    def make_group() -> tuple[int, dist.ProcessGroupGloo | None]:
        most = agree_on_group_count()
        return most, None if is_nccl else dist.ProcessGroupGloo(store, ranks.index(mine), len(ranks), limit)

    try:
        most, gloo = run_within(limit_s, make_group, why_give_up=why_generation_ended)
    except dist.DistNetworkError as error:
        raise CommError(
            f"rank {mine} of the job cannot reach the job's store to make process groups. Has the process that hosts it ended?"
        ) from error
    except (RuntimeError, TimeoutError) as error:  # a store of files raises no DistError
        if isinstance(error, CommError):
            raise
        missing, _ = _store_thread.query(lambda: [rank for rank in ranks if not store.check([str(rank)])], list[int]())
        what = f"process group number {number} of ranks {list(ranks)}"
        if not missing:
            raise CommError(f"rank {mine} of the job cannot make {what}: {error}") from error
        raise CommError(
            f"rank {mine} of the job waited {limit_s:g} s for ranks {missing} to make {what}. "
            "Does each of them make the same Comms, schedulers and modules, in the same order?"
        ) from error
    if gloo is None:  # torch names a group by its ranks and by the number of groups of this rank
        while len(_world.pg_names) < most:
            dist.new_group([mine], use_local_synchronization=True)
        return dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)  # type: ignore[no-any-return]
    group = dist.ProcessGroup(store, ranks.index(mine), len(ranks))
    for kind in dict.fromkeys(("cpu", device.type)):
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def reset_for_next_generation() -> None:
    """Prepare to join the next generation: make a new thread for queries, and number process groups from 0.

    The old thread may hang.
    """
    global _store_thread
    _store_thread = _StoreThread()
    _num_groups_made.clear()


def _renew_store_thread_in_child() -> None:
    global _store_thread
    _store_thread = _StoreThread(is_of_parent=dist.is_initialized())


os.register_at_fork(after_in_child=_renew_store_thread_in_child)
_store_thread = _StoreThread()
_num_groups_made: Counter[tuple[int, ...]] = Counter()
"""Number of groups that were made of these ranks."""
