"""Offload on a CUDA device: pinned memory, a stream of its own, the same bits, and the bytes that were predicted."""

import optree
import torch

import fsharp as fs
from fsharp.functional.layout.sharded import tree_nbytes
from fsharp.testing import DebugPolicy
from tests.gpt_like import loss_fn
from tests.scheduling import counting_host_copies, every
from tests.stateful.runtime.test_gpu_scheduler import batches, start
from tests.virtual_device import accelerator as accelerator, comm as comm

BF16 = fs.Precision(compute=torch.bfloat16, main=torch.float32)
BLOCK = 512  # bytes, of which torch's allocator makes what it hands out


def held(state):
    return [b for node in fs.layouts.units_of((state.main, state.opt)) for b in node.buffers if b.numel()]


@every(16, strategy=(fs.zero3, fs.zero1, fs.zero2, fs.ddp), precision=(BF16, fs.Precision()), donate=(True, False))
def test_the_same_bits_from_pinned_memory(comm, strategy, precision, donate):
    tx = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-2))
    step = fs.train_step(loss_fn, tx, microbatches=2, donate=donate)
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True, poison=True, offload=True))
    scheduled, copied_nbytes = scheduler(step), counting_host_copies(scheduler)
    ours, theirs = (start(comm, strategy, tx, precision) for _ in range(2))
    for batch in batches(6):
        ours, metrics = scheduled(ours, batch)
        theirs, expected = step(theirs, batch, comm)
        assert torch.equal(metrics.loss, expected.loss)
    assert scheduled.num_unscheduled_calls == 1
    assert all(b.device.type == "cpu" and b.is_pinned() for b in held(ours))
    assert "host" in scheduler.engine.steps.executor.lanes.streams
    assert copied_nbytes() == scheduled.schedule.host_copy_nbytes == 2 * tree_nbytes(held(ours))
    for a, b in zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True):
        assert a == b if isinstance(a, int) else torch.equal(a.cpu(), b.cpu())
    full = fs.gather(ours.main, comm=comm)
    assert all(b.device.type == "cuda" for node in fs.layouts.units_of(full) for b in node.buffers)
    ours, _ = step(ours, batch, comm)
    assert all(b.device.type == "cuda" for b in held(ours)), "the blocking path brings it back"


def test_a_module_has_the_same_bits(comm):
    from tests import modules

    def train(offload):
        policy = DebugPolicy(trivial_axes=True, offload=offload)
        options = {"strategy": fs.zero3("dp"), "units": [modules.Block], "precision": BF16, "policy": policy}
        model = fs.shard_module(modules.make().cuda(), mesh=comm, **options)
        optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.5))
        for x, y in modules.batches(None, 5):
            modules.descend(model(x.cuda(), y.cuda())["loss"], optimizer)
        with optimizer.averaged(), torch.no_grad():
            averages = dict(model.named_full_parameters())
        return dict(model.named_full_parameters()), averages

    for ours, theirs in zip(train(True), train(False), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_forward_and_backward_have_the_bytes_that_are_on_the_host(comm):
    tx = fs.optim.adamw(1e-2)

    def peak(offload):
        """Most bytes allocated between the beginning of a planned step and its update."""
        peaks = []

        def step(state, batch, comm):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
            _, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm, donate=True)
            return fs.update(tx, grads, state, comm=comm, donate=True)

        scheduled = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True, offload=offload))(step)
        before = torch.cuda.memory_allocated()
        state = start(comm, fs.zero3, tx, BF16, dim=512)
        for batch in batches(5):
            state = scheduled(state, batch)
        assert scheduled.num_unscheduled_calls == 1
        return peaks[-1] - before, held(state), scheduled.schedule.host_copy_nbytes // 2

    plain, on_device, _ = peak(offload=False)
    num = len(on_device)
    del on_device
    less, _, nbytes = peak(offload=True)
    assert abs(plain - less - nbytes) <= 2 * BLOCK * num
