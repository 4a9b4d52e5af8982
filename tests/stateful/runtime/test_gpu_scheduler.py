"""The scheduler on a CUDA device: streams, events, and NCCL at world size 1, by DebugPolicy(trivial_axes=True)."""

import gc

import optree
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fsharp as fs
from fsharp.testing import DebugPolicy
from tests import virtual_device
from tests.gpt_like import loss_fn, make_batches, make_params
from tests.scheduling import every
from tests.virtual_device import accelerator as accelerator, comm as comm

MESH = fs.Mesh({"dp": 1})
CAPTURABLE = fs.optim.adamw(1e-2, capturable=True)


def start(comm, strategy, tx, precision=fs.Precision(), dim=6):
    params = optree.tree_map(lambda t: t.cuda(), make_params(layers=4, dim=dim))
    layout = fs.plan(params, MESH, strategy("dp"), units="layers.*", precision=precision)
    return fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)


def batches(count):
    return [{k: v.cuda() for k, v in batch.items()} for batch in make_batches(count, 32)]


@every(
    8,
    strategy=(fs.zero3, fs.zero1, fs.zero2, fs.ddp),
    options=({}, {"prefetch": 2}, {"bucket_nbytes": 0}, {"keep_gradients": True}),
)
def test_scheduled_steps_have_the_bits_of_blocking_ones(comm, strategy, options):
    tx = fs.optim.adamw(1e-2)
    step = fs.train_step(loss_fn, tx, microbatches=2, donate=True)
    scheduled = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True, poison=True, **options))(step)
    ours, theirs = start(comm, strategy, tx), start(comm, strategy, tx)
    for batch in batches(4):
        ours, metrics = scheduled(ours, batch)
        theirs, expected = step(theirs, batch, comm)
        assert torch.equal(metrics.loss, expected.loss)
    assert scheduled.num_unscheduled_calls == 1
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), ours.params, theirs.params)


def mean_loss(params, batch, comm):
    return loss_fn(params, batch, comm).sum / 32


@every(
    12,
    strategy=(fs.zero3, fs.zero2, fs.ddp),
    loss=(mean_loss, loss_fn),
    apart=(True, False),
    compute=(None, torch.bfloat16),
    keep=(False, True),
)
def test_a_captured_step_replays_with_the_losses_of_an_eager_one(comm, strategy, loss, apart, compute, keep):
    """``apart``: without a process group, and so without any collective. ``compute``: parameters are cast from main copies."""
    comm = fs.SingleComm(MESH, device="cuda:0") if apart else comm
    tx = fs.optim.adamw(fs.optim.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20), capturable=True)
    precision = fs.Precision(compute=compute, main=compute and torch.float32)
    step = fs.train_step(loss, tx, donate=True)
    data = batches(4)
    policy = DebugPolicy(trivial_axes=not apart, gather_at_start=False, keep_gradients=keep)
    scheduled = fs.Scheduler(comm, policy=policy)(step)
    captured = fs.schedules.CapturedStep(scheduled, start(comm, strategy, tx, precision), data[0], warmup=3)
    state = start(comm, strategy, tx, precision)
    for _ in range(3):
        state, _ = step(state, data[0], comm)
    for batch in data[1:]:
        state, expected = step(state, batch, comm)
        assert torch.equal(captured(batch).loss, expected.loss)
    assert captured.state.step == state.step


def captured_step(comm, tx=CAPTURABLE, dim=6, scheduler=None):
    scheduler = scheduler or fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True, gather_at_start=False))
    scheduled = scheduler(fs.train_step(loss_fn, tx, donate=True))
    return fs.schedules.CapturedStep(scheduled, start(comm, fs.zero3, tx, dim=dim), batches(1)[0], warmup=2)


def test_a_graph_keeps_its_memory_if_another_schedule_needs_more(comm):
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True, gather_at_start=False))
    small = captured_step(comm, scheduler=scheduler)
    memory = StorageWeakRef(scheduler.engine.steps.arena.memory.untyped_storage())
    large = captured_step(comm, scheduler=scheduler, dim=24)
    del small._graph  # a CUDA graph keeps no tensors; a virtual one does
    assert not memory.expired()
    del small
    gc.collect()
    assert memory.expired()
    assert len(scheduler.engine.steps.arena.memory) == large._scheduled.schedule.arena


NOT_IN_PLACE = {
    "trace": fs.optim.chain(fs.optim.trace(0.9), fs.optim.scale(-0.1)),
    "clip": fs.optim.chain(fs.optim.clip_by_global_norm(1.0), CAPTURABLE),
}


@pytest.mark.parametrize("tx", NOT_IN_PLACE)
def test_a_graph_updates_an_optimizer_state_that_is_made_anew(comm, tx):
    tx = NOT_IN_PLACE[tx]
    captured, state = captured_step(comm, tx), start(comm, fs.zero3, tx)
    step, expected = fs.train_step(loss_fn, tx, donate=True), []
    for batch in [*batches(1) * 2, *batches(4)]:
        state, metrics = step(state, batch, comm)
        expected.append(metrics.loss.item())
    assert [captured(batch).loss.item() for batch in batches(4)] == expected[2:]


def test_a_batch_in_pinned_memory_may_be_overwritten_after_the_call(comm):
    captured, state, data = captured_step(comm), start(comm, fs.zero3, CAPTURABLE), make_batches(4, 32)
    step, expected, found = fs.train_step(loss_fn, CAPTURABLE, donate=True), [], []
    for batch in [*batches(1) * 2, *batches(4)]:
        state, metrics = step(state, batch, comm)
        expected.append(metrics.loss.item())
    pinned = {name: torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for name, x in data[0].items()}
    device = getattr(virtual_device._here, "device", None)
    for batch in data:
        for name, x in batch.items():
            pinned[name].copy_(x)
        if device is None:
            torch.cuda._sleep(10**8)  # so that the batch is copied late
        else:
            device.syncs.clear()
        found.append(captured(pinned).loss.clone())
        assert device is None or len(device.syncs) == len(pinned), "the host waits for each copy"
    assert [loss.item() for loss in found] == expected[2:]


def test_deleting_the_scheduler_frees_its_memory(comm):
    tx = fs.optim.adamw(1e-2)
    state = start(comm, fs.zero3, tx)
    gc.collect()
    before = torch.cuda.memory_allocated()
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True))
    scheduled = scheduler(fs.train_step(loss_fn, tx, donate=True))
    for batch in batches(3):
        state, metrics = scheduled(state, batch)
    assert len(scheduler.engine.steps.arena.memory) == scheduled.schedule.arena > 0
    torch.cuda.synchronize()
    del metrics, batch
    gc.disable()
    try:
        del scheduler, scheduled
        assert torch.cuda.memory_allocated() <= before + 4096, "scalars and workspaces aside nothing is left"
    finally:
        gc.enable()


def test_gathers_run_on_a_stream_of_their_own(comm):
    tx = fs.optim.adamw(1e-2)
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True))
    scheduled = scheduler(fs.train_step(loss_fn, tx, donate=True))
    state = start(comm, fs.zero3, tx)
    for batch in batches(3):
        state, _ = scheduled(state, batch)
    streams = scheduler.engine.steps.executor.lanes.streams
    assert set(streams) == {"gather", "reduce"}
    assert len({s.stream_id for s in streams.values()} | {torch.accelerator.current_stream().stream_id}) == 3


def test_the_trace_of_a_gpu_is_by_its_events(comm):
    tx = fs.optim.adamw(1e-2)
    scheduled = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True))(fs.train_step(loss_fn, tx, donate=True))
    state = start(comm, fs.zero3, tx)
    data = batches(6)
    for batch in data[:3]:
        state, _ = scheduled(state, batch)
    trace = scheduled.start_trace()
    for batch in data[3:]:
        state, _ = scheduled(state, batch)
    timeline = trace.timeline(scheduled.schedule)
    assert timeline.step_s > 0
    assert {span.kind for span in timeline.spans} >= {"gather", "compute", "reduce", "update"}
