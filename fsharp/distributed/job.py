"""Joining a job before a process's first collective, and leaving the job after its last collective."""

import atexit
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from fsharp.distributed import generations, job_store
from fsharp.distributed.process_group import (
    abort_groups,
    comm_counters,
    make_comm_for_all_generations,
    statuses_by_ranks,
    tree_label_counters,
)
from fsharp.distributed.worker_threads import wait_ignoring_comm_errors
from fsharp.errors import CommError, MeshError, OptionError
from fsharp.functional.comm.protocol import Comm, SingleComm
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.functional.layout.mesh import Mesh
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

_LEAVES_WITHIN_S, _END_WITHIN_S = 30.0, 2.0
"""Most seconds that rank 0, which may host the job's store, waits for other ranks to leave: normally, and after an error."""
callbacks_before_leaving: list[Callable[[], None]] = []
"""Functions that :func:`destroy` calls first."""


@options_checked
def connect(mesh: Mesh, *, device_type: Literal["cuda", "cpu"] | None = None, timeout: timedelta | None = None) -> Comm:
    """Join the job's other processes, which all call this function, and return this process's Comm on ``mesh``.

    If no process group exists yet, the function calls ``init_process_group`` with the environment that torchrun sets. The Comm
    is a :class:`~fsharp.SingleComm` for a mesh with one rank, and a :class:`~fsharp.ProcessGroupComm` otherwise.

    Args:
        mesh: the mesh that all processes form.
        device_type: ``"cuda"`` (NCCL) or ``"cpu"`` (gloo); None means CUDA if there is a device for each process.
        timeout: the longest time that a rank waits for other ranks, before an error that names these ranks: the ``timeout`` of
            ``init_process_group``. None means torch's default, 30 minutes over gloo.

    Raises:
        MeshError: the mesh has another number of processes; or ``timeout`` is given, and the existing process group has
            another.
        OptionError: ``device_type`` is ``"cuda"``, and there is no GPU.
        CommError: a process has ended or is late, or this process was forked from a rank. Also after an earlier error, until
            :func:`destroy` is called.
        AgreementError: processes pass different meshes. All ranks raise, before any group is made.

    Cost: one small collective, and one process group for each axis.
    """
    for statuses in statuses_by_ranks.values():
        if statuses.error is not None and statuses.process != os.getpid():
            raise statuses.error
    if timeout is not None and dist.is_initialized() and timeout.total_seconds() != job_store.pg_timeout_s():
        raise MeshError(
            f"connect(): timeout is {timeout}, but there is a process group already, with a timeout of "
            f"{timedelta(seconds=job_store.pg_timeout_s())}. Pass yours to init_process_group(), or call fs.destroy() first."
        )
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    found = torch.accelerator.current_accelerator(check_available=True)
    has_cuda = found is not None and found.type == "cuda" and torch.accelerator.device_count() >= local
    kind = device_type or ("cuda" if has_cuda else "cpu")
    if kind == "cuda" and (found is None or found.type != "cuda"):
        raise OptionError("connect(): device_type is 'cuda', and this machine has no GPU. Pass 'cpu' or None.")
    if kind == "cuda" and "LOCAL_RANK" in os.environ:  # a launcher without this variable has chosen the device itself
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if world_size == 1:
        mesh.check_world_size(1)
        return SingleComm(mesh, device=torch.device(kind, torch.accelerator.current_device_index()) if kind == "cuda" else kind)
    limit_s = job_store.pg_timeout_s() if dist.is_initialized() else (timeout or dist.default_pg_timeout).total_seconds()
    if generations.GENERATION_VARIABLE in os.environ:
        restart_replay.start_recording()
    return make_comm_for_all_generations(lambda: job_store.join_job(mesh, kind, world_size, timeout, limit_s))


@api_boundary
def destroy() -> None:
    """Leave the job and destroy its process groups, after checkpoint saves in the background are done.

    Without a job the call only waits for these saves. Another rank that waits for this rank, now or later, raises a
    :class:`CommError`. The error names the last collective of this rank, with a traceback if this rank leaves because of an
    error. An exit of this process has the same effect on other ranks.

    Cost: unless an error is being handled, this rank first waits for the end of its own collectives, whose messages other ranks
    need.
    Rank 0, which hosts the job's store unless torchrun does, waits for the other ranks to leave. Rank 0 waits for at most 30
    seconds, or 2 seconds after an error, and never longer than the job's time limit.
    """
    for finish in callbacks_before_leaving:
        finish()
    _announce_departure(sys.exception())
    if dist.is_initialized():
        _destroy_groups()
        tree_label_counters.clear()


def _destroy_groups() -> None:
    dist.destroy_process_group()
    comm_counters.clear()
    job_store.reset_for_next_generation()


def tear_down_generation(why: str) -> None:
    """Leave the job's present generation: end collectives with the error ``why``, wait for saves, and destroy process groups.

    Afterwards :meth:`~fsharp.functional.comm.restart_replay.SetupCallRecord.repeat_recorded_calls` joins the next
    generation, in which the Comms of the setup have new groups.
    """
    error = CommError(why)
    for statuses in list(statuses_by_ranks.values()):
        for watch in list(statuses.watches.values()):
            watch.abort_and_refuse_calls(error)
    for finish in callbacks_before_leaving:
        finish()
    statuses_by_ranks.clear()
    if dist.is_initialized():
        _destroy_groups()


def _announce_departure(error: BaseException | None) -> None:
    """Tell other ranks that this rank leaves the job, with ``error`` or normally, and takes part in no further collective."""
    exchanges = [each for each in statuses_by_ranks.values() if each.process == os.getpid()]  # not of a forked process's parent
    if error is None and dist.is_initialized():
        for watch in [watch for each in exchanges for watch in list(each.watches.values()) if watch.error is None]:
            wait_ignoring_comm_errors(watch)  # other ranks need messages of collectives for which this rank has not waited
    statuses_by_ranks.clear()
    if not exchanges or not dist.is_initialized():
        return
    for statuses in exchanges:
        for watch in list(statuses.watches.values()):
            watch.is_over.set()
        statuses.write_last_status(error)
    failed = error is not None or any(watch.error is not None for each in exchanges for watch in list(each.watches.values()))
    job_store.record_end_of_rank(within_s=min(_END_WITHIN_S if failed else _LEAVES_WITHIN_S, job_store.pg_timeout_s()))
    if failed:  # a thread that waits in gloo when the interpreter ends would abort the process
        abort_groups([g for g in dist.distributed_c10d._world.pg_map if dist.get_backend(g) == "gloo"], is_nccl=False)


@atexit.register  # registered after the handler of worker_threads, so called before it: threads still run
def _announce_departure_at_exit() -> None:
    _announce_departure(getattr(sys, "last_value", None))
