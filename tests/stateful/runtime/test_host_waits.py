"""In a step that follows its schedule the host waits for its device for nothing but what the user reads."""

import optree
import torch

import fsharp as fs
from fsharp.testing import DebugPolicy, simulate
from tests import modules
from tests.gpt_like import loss_fn, make_batches, make_params
from tests.scheduling import STRATEGIES, every
from tests.virtual_device import CUDA, accelerator as accelerator

RATE = fs.optim.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)
ADAMW = fs.optim.adamw(RATE, weight_decay={"**": 0.1, "**.b": 0.0})
CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), ADAMW)
LABELS = {"layers.**": "blocks", "**": "rest"}


def mean_loss(params, batch, comm):
    loss = loss_fn(params, batch, comm)
    return loss.sum / 8


def waits(accelerator, name, tx, *, loss=loss_fn, microbatches=2, donate=True, **policy):
    """What the hosts of all ranks wait for in a step, and what they wait for when one reads the loss."""
    mesh, strategy = STRATEGIES[name] if name in STRATEGIES else (fs.Mesh({"dp": 1}), getattr(fs, name[:-1])("dp"))

    def rank_fn(comm):
        with accelerator() as device:
            comm.device = CUDA
            params = optree.tree_map(lambda x: x.cuda(), make_params())
            rules = {"atoms": {"layers.*.w": fs.layouts.LeafAtom()}, "labels": {"**": "rest", "layers.*.w": "w"}}
            layout = fs.plan(params, mesh, strategy, units="layers.*", **rules)
            state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
            data = [optree.tree_map(lambda x: x.cuda(), batch) for batch in make_batches(4, 16)]
            step = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True, **policy))(
                fs.train_step(loss, tx, microbatches=microbatches, donate=donate)
            )
            for batch in data[:3]:
                state, _ = step(state, batch)
            device.syncs.clear()
            state, metrics = step(state, data[3])
            found = list(device.syncs)
            device.syncs.clear()
            assert step.num_unscheduled_calls == 1
            assert metrics.loss.device == CUDA
            assert metrics.loss.item() > 0
            return found, [sync.what for sync in device.syncs]

    found = simulate(mesh, rank_fn)
    assert all(read == ["_local_scalar_dense"] for _, read in found)
    return [syncs for syncs, _ in found]


@every(6, name=("zero3", "zero1", "ddp", "zero2", "hsdp", "hfsdp"), loss=(mean_loss, loss_fn))
def test_nothing_is_waited_for_in_a_step(accelerator, name, loss):
    assert not any(waits(accelerator, name, CLIPPED, loss=loss))


OPTIMIZERS = {
    "sgd": fs.optim.sgd(RATE, momentum=0.9),
    "lion": fs.optim.lion(RATE),
    "muon": fs.optim.partition({"w": fs.optim.muon(RATE), "rest": fs.optim.sgd(RATE)}),
    "adamw of a graph": fs.optim.adamw(RATE, capturable=True),
    "with_ema": fs.optim.with_ema(CLIPPED, decay=0.9),
    "partition": fs.optim.partition({"blocks": fs.optim.adamw(RATE), "rest": fs.optim.sgd(RATE)}, LABELS),
    "MultiSteps": fs.optim.MultiSteps(CLIPPED, 2),
    "inject_hyperparams": fs.optim.inject_hyperparams(fs.optim.adamw)(learning_rate=RATE),
}
COUNTED = {"MultiSteps": 2, "inject_hyperparams": 2}  # what ranks compare in each update, which is documented


@every(4, name=("zero3", "zero31"), tx=OPTIMIZERS)
def test_optimizers_wait_for_nothing(accelerator, name, tx):
    for syncs in waits(accelerator, name, OPTIMIZERS[tx]):
        assert len(syncs) == (COUNTED.get(tx, 0) if name == "zero3" else 0), syncs


@every(2, name=("zero3", "ddp"))
def test_whether_gradients_are_finite_is_read_once(accelerator, name):
    for syncs in waits(accelerator, name, fs.optim.apply_if_finite(CLIPPED, 3)):
        assert [(sync.what, "all_finite" in sync.where) for sync in syncs] == [("_local_scalar_dense", True)]


@every(
    4, policy=({"offload": True}, {"prefetch": 2}, {"bucket_nbytes": 0}, {"gather_at_start": False}, {"keep_gradients": True})
)
def test_under_any_policy(accelerator, policy):
    assert not any(waits(accelerator, "zero3", CLIPPED, donate=False, **policy))


def module_waits(accelerator, name, *, scaler=False, parts=1, optimizer=None, tensors=False):
    mesh, strategy = STRATEGIES[name]

    def rank_fn(comm):
        with accelerator() as device:
            comm.device = CUDA
            model = fs.shard_module(modules.make().cuda(), mesh=comm, strategy=strategy, units=[modules.Block])
            if optimizer is None:
                options = {"lr": torch.tensor(1e-2, device=CUDA), "capturable": True} if tensors else {"lr": 1e-2}
                opt = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)
            else:
                opt = fs.ShardedOptimizer(model.parameters(), optimizer)
            rates = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step) if optimizer is None else None
            scale = fs.GradScaler("cuda", enabled=scaler, init_scale=4.0)
            found = []
            for x, y in modules.batches(comm, 4):
                x, y = x.cuda(), y.cuda()
                device.syncs.clear()
                pieces = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
                with model.accumulate():
                    for xs, ys in pieces[:-1]:
                        scale.scale(model(xs, ys)["loss"]).backward()
                scale.scale(model(*pieces[-1])["loss"]).backward()
                if scaler:
                    scale.unscale_(opt)
                model.clip_grad_norm_(1.0)
                scale.step(opt)
                scale.update()
                opt.zero_grad()
                if rates is not None:
                    rates.step()
                found = list(device.syncs)
            assert model.scheduled_step.num_unscheduled_calls == 1
            return found

    return simulate(mesh, rank_fn)


@every(8, name=("zero3", "zero1", "ddp", "hfsdp"), parts=(2, 1))
def test_a_module_waits_for_nothing(accelerator, name, parts):
    assert not any(module_waits(accelerator, name, parts=parts, optimizer=fs.optim.adamw(RATE)))


def test_nor_with_a_learning_rate_on_the_device(accelerator):
    assert not any(module_waits(accelerator, "zero3", tensors=True))


@every(2, name=("zero3", "ddp"))
def test_a_scaler_reads_once_whether_gradients_are_finite(accelerator, name):
    for syncs in module_waits(accelerator, name, scaler=True):
        assert [sync.what for sync in syncs] == ["_local_scalar_dense"]
