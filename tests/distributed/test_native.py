"""Collectives that run on a device: who hears of a failure, and what is left of communicators. Without a device."""

import threading
import weakref

import pytest
import torch
import torch.distributed as dist

import fsharp as fs
from fsharp.distributed.process_group import TransportGroups
from fsharp.distributed.watch import CommWatch, StatusExchange
from fsharp.errors import AgreementError
from fsharp.stateful.transport.base import Summand
from fsharp.stateful.transport.nccl import NcclTransport
from tests.distributed.test_watch import Table
from tests.virtual_device import accelerator as accelerator, over_nccl


class Group:
    """A communicator that notes what is asked of it."""

    def __init__(self, notes, name):
        self.notes, self.name = notes, name

    def _get_backend(self, device):
        return self

    def _group_start(self):
        self.notes.append("start")

    def _group_end(self):
        self.notes.append("end")

    def abort(self):
        self.notes.append(self.name)


def native(board, rank, notes):
    """A Comm of two ranks over communicators of NCCL, as far as failures go."""
    comm = object.__new__(fs.ProcessGroupComm)
    comm.mesh, comm.rank, comm.ranks, comm.is_nccl, comm._rank_order = fs.Mesh({"dp": 2}), rank, (0, 1), True, False
    comm._groups, comm._whole, comm.limit_s = {"dp": Group(notes, "dp")}, None, 60.0
    comm.watch = CommWatch("comm", StatusExchange(rank, 2, board), board, 60.0)
    comm.watch.aborts.append(weakref.WeakMethod(comm.abort))
    return comm


def test_a_rank_that_waits_for_its_device_hears_of_another_that_has_failed():
    board, notes, aborted = Table(), [[], []], threading.Event()
    ranks = [native(board, rank, notes[rank]) for rank in range(2)]

    class Heard:
        def abort(self):
            aborted.set()

    heard = Heard()
    ranks[1].watch.aborts.append(weakref.WeakMethod(heard.abort))
    ranks[1].watch.start_failure_monitor(0.001)
    ranks[0].watch.report_failure(ValueError("a batch of 0 tokens"), "train_step #3")
    assert aborted.wait(30), "nobody has told rank 1"
    assert notes == [["start", "dp", "end"]] * 2
    for comm in ranks:
        for collective in (comm.all_gather, comm.all_reduce):
            with pytest.raises(AgreementError, match=r"rank 0 of 2 failed in train_step #3(.|\n)*a batch of 0 tokens"):
                collective(torch.ones(2), "dp")
    transport = NcclTransport(ranks[1], TransportGroups(ranks[1], separate=False))
    with pytest.raises(AgreementError, match="a batch of 0 tokens"):
        transport.gather([torch.ones(1)], [torch.ones(2)], "dp", "")


def test_a_listener_ends_with_its_job_or_its_comm():
    board = Table()
    watches = [CommWatch(f"comm {i}", StatusExchange(0, 2, board), board, 60.0) for i in range(2)]
    before = set(threading.enumerate())
    for watch in watches:
        watch.start_failure_monitor(0.001)
    threads = set(threading.enumerate()) - before
    watches.pop().is_over.set()
    del watch
    watches.clear()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_after_an_abort_a_comm_makes_new_communicators(monkeypatch):
    notes, made = [], []
    comm = native(Table(), 0, notes)
    monkeypatch.setattr(comm, "new_group", lambda axis: made.append(axis) or f"new {axis}")
    assert comm.group("dp").name == "dp"
    comm.abort()
    comm.abort()
    assert notes == ["start", "dp", "end"]
    assert [comm.group("dp"), comm._group_of_all_ranks(), comm.group("dp")] == ["new dp"] * 3
    assert made == ["dp"]


def test_one_communicator_over_nccl_and_two_groups_over_gloo(accelerator, monkeypatch, tmp_path):
    with accelerator(), over_nccl(tmp_path) as comm:
        made = []
        monkeypatch.setattr(comm, "new_group", made.append)
        scheduler = fs.Scheduler(comm)
        assert scheduler.policy.separate_groups is False
        assert (
            scheduler.engine.steps.executor.transport.groups("gather", "dp")
            is scheduler.engine.steps.executor.transport.groups("reduce", "dp")
            is comm.group("dp")
        )
        assert not made
    assert fs.Scheduler(fs.SingleComm()).policy.separate_groups is True
    assert fs.SchedulePolicy().separate_groups is None


def test_an_all_reduce_needs_scratch_for_another_dtype_alone(monkeypatch):
    comm = native(Table(), 0, [])
    transport = NcclTransport(comm, TransportGroups(comm, separate=False))
    assert transport.scratch_nbytes("all_reduce", "dp", 100, 2) == 200
    assert transport.scratch_nbytes("all_reduce", "dp", 100, 4, sums_into_out=True) == 0
    assert transport.scratch_nbytes("reduce_scatter", "dp", 100, 4) == 0
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: x.mul_(2))
    for dtype in (torch.float32, torch.bfloat16):
        x, out = torch.ones(8, dtype=dtype), torch.empty(8)
        room = transport.scratch_nbytes("all_reduce", "dp", 8, dtype.itemsize, sums_into_out=dtype == out.dtype)
        transport.all_reduce([Summand(x, out, torch.empty(room, dtype=torch.uint8))], "dp", 2)
        assert out.tolist() == [2.0] * 8
