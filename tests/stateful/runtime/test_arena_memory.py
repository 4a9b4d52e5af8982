"""Where the arena's memory comes from: NCCL's allocator, known to its communicators. On a virtual device, and on a real one."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import fsharp as fs
from fsharp.errors import OptionError, ScheduleError
from fsharp.testing import DebugPolicy
from tests.gpt_like import loss_fn
from tests.stateful.runtime.test_gpu_scheduler import batches, start
from tests.virtual_device import accelerator as accelerator, comm as comm, over_nccl


def losses(comm, memory, count=4, **options):
    """The losses of some steps, and the scheduler."""
    tx = fs.optim.adamw(1e-2)
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True, arena_memory=memory, **options))
    step, state, found = scheduler(fs.train_step(loss_fn, tx, donate=True)), start(comm, fs.zero3, tx), []
    for batch in batches(count):
        state, metrics = step(state, batch)
        found.append(metrics.loss.item())
    assert step.last_call_status().kind == "planned"
    return found, scheduler


class Backend:
    """A backend of NCCL that notes which pools are registered."""

    mem_allocator = "NCCL's allocator"

    def __init__(self, notes, *, knows_symmetric=True):
        self.notes, self.knows_symmetric = notes, knows_symmetric

    def register_mem_pool(self, pool, **options):
        if options and not self.knows_symmetric:
            raise TypeError("register_mem_pool(): incompatible function arguments")
        assert pool.nbytes, "a pool is registered as a whole, and had nothing in it"
        self.notes.append(("register", pool, options.get("symm", False)))

    def deregister_mem_pool(self, pool):
        self.notes.append(("deregister", pool))


class Pool:
    def __init__(self, allocator):
        assert allocator == Backend.mem_allocator
        self.nbytes = 0


@pytest.fixture
def backend(monkeypatch):
    """NCCL's own memory on a virtual device. Returns its notes."""
    notes = []
    made = Backend(notes)
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: made)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    real = torch.empty

    @contextmanager
    def use_mem_pool(pool):
        def empty(nbytes, **options):
            pool.nbytes += nbytes
            return real(nbytes, **options)

        with monkeypatch.context() as inside:
            inside.setattr(torch, "empty", empty)
            yield

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    return made


def nccl_can_allocate(comm):
    """Whether torch has NCCL's allocator for this GPU: virtual machines may lack it."""
    dist.all_reduce(torch.zeros(1, device=comm.device))  # makes the communicator
    try:
        return dist.group.WORLD._get_backend(comm.device).mem_allocator is not None
    except RuntimeError:
        return False


@pytest.mark.parametrize("memory", ["registered", "symmetric"])
def test_steps_in_registered_memory_have_the_same_bits(comm, memory, request):
    if request.node.callspec.params["comm"] == "virtual":
        request.getfixturevalue("backend")
    elif not nccl_can_allocate(comm):
        with pytest.raises(ScheduleError, match=r"cannot make \w+ memory on cuda:0(.|\n)*Pass arena_memory='allocator'"):
            losses(comm, memory)
        return
    expected, _ = losses(comm, "allocator")
    found, scheduler = losses(comm, memory)
    assert found == expected
    scheduler.engine.steps.executor.transport._registered.deregister()


def test_all_communicators_know_the_arena_once(backend, accelerator, monkeypatch, tmp_path):
    with accelerator() as device, over_nccl(tmp_path) as comm:
        _, scheduler = losses(comm, "symmetric")
        ((what, pool, is_symmetric),) = backend.notes
        assert (what, is_symmetric) == ("register", True)
        assert pool.nbytes == len(scheduler.engine.steps.arena.memory) > 0
        backend.notes.clear()
        device.syncs.clear()
        scheduler.engine.steps.executor.transport.allocate_arena(64, "symmetric")
        assert [each[0] for each in backend.notes] == ["deregister", "register"], "the new arena takes the old one's place"
        assert backend.notes[0][1] is pool
        assert [each.what for each in device.syncs] == ["synchronize"], "the device may still use the old memory"
        backend.notes.clear()
        fs.destroy()
        assert [each[0] for each in backend.notes] == ["deregister"], "before its communicators are gone"
        fs.destroy()
        assert len(backend.notes) == 1


def test_after_an_error_nothing_is_asked_of_communicators_that_are_gone(backend, accelerator, monkeypatch, tmp_path):
    with accelerator(), over_nccl(tmp_path) as comm:
        _, scheduler = losses(comm, "registered")
        backend.notes.clear()
        scheduler.engine.steps.own.watch.report_failure(ValueError("a batch of 0 tokens"), "a test")
        fs.destroy()
        assert not backend.notes


def test_what_the_libraries_lack_is_an_error_with_a_remedy(backend, accelerator, monkeypatch, tmp_path):
    backend.knows_symmetric = False
    with accelerator(), over_nccl(tmp_path) as comm:
        match = r"cannot make symmetric memory on cuda:0: register_mem_pool(.|\n)*Pass arena_memory='allocator'"
        with pytest.raises(ScheduleError, match=match):
            losses(comm, "symmetric")


def test_other_backends_refuse_at_once():
    with pytest.raises(ScheduleError, match=r"needs ranks over NCCL, got SingleComm on cpu. Pass arena_memory='allocator'"):
        fs.Scheduler(fs.SingleComm(), arena_memory="registered")
    with pytest.raises(OptionError, match="arena_memory"):
        fs.SchedulePolicy(arena_memory="fast")
