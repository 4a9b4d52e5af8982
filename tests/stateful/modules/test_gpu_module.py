"""ShardedModule on a CUDA device, over NCCL at world size 1: as the module alone."""

import torch

import fsharp as fs
from fsharp.testing import DebugPolicy
from tests import modules
from tests.modules import Block, descend
from tests.scheduling import every
from tests.virtual_device import accelerator as accelerator, comm as comm

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def batches(count):
    return [(x.cuda(), y.cuda()) for x, y in modules.batches(None, count)]


def train(model, optimizer, data):
    for x, y in data:
        descend(model(x, y)["loss"], optimizer)


@every(10, strategy=(fs.zero3, fs.zero1, fs.zero2, fs.ddp), kind=modules.KINDS)
def test_as_the_module_alone(comm, strategy, kind):
    alone = modules.make(kind).cuda()
    train(alone, torch.optim.AdamW(alone.parameters(), **ADAMW), batches(5))
    policy = DebugPolicy(trivial_axes=True, poison=True)
    model = fs.shard_module(modules.make(kind).cuda(), mesh=comm, strategy=strategy("dp"), units=[Block], policy=policy)
    train(model, fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW), batches(5))
    found = dict(model.named_full_parameters())
    for name, p in alone.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-3, atol=1e-4)


def fill(module):
    for p in module.parameters(recurse=False):
        p.data.normal_()
    for b in module.buffers(recurse=False):
        b.zero_()


def test_made_from_the_meta_device(comm):
    def made(comm):
        model = fs.shard_module(modules.Net().to("meta"), mesh=comm, units=[Block], key=3, initialize=fill)
        return dict(model.named_full_parameters())

    expected = made(fs.SingleComm())
    for name, value in made(comm).items():
        assert value.device.type == comm.device.type
        assert torch.equal(value.cpu(), expected[name])


def test_loss_scaling(comm):
    model = fs.shard_module(
        modules.make().cuda(), mesh=comm, units=[Block], precision=fs.Precision(compute=torch.float16, main=torch.float32)
    )
    optimizer, scaler = (
        fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW),
        fs.GradScaler("cuda", init_scale=2.0**30),
    )
    losses = []
    for x, y in batches(40):
        loss = model(x, y)["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.get_scale() < 2.0**30, "the first steps overflow, and are left out"
    assert losses[-1] < losses[0]
