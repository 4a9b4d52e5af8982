"""Float8Linear of torchao, whose weights have FSDP2's hooks: the bits of the whole model, and of FSDP2."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsharp as fs
from fsharp.testing.process_ranks import _Launcher, _run_ranks

pytest.importorskip("torchao")
RATE, RANKS, STEPS = 0.1, 2, 3


def make(*, gathers_float8):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Sequential(nn.GELU(), nn.Linear(96, 64, bias=False)), nn.Linear(64, 32))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_float8, emulate=True)
    return convert_to_float8_training(model, config=config)


def batch(step, rank):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_()


def run(model, step, rank):
    x = batch(step, rank)
    y = model(x)
    y.square().mean().backward()
    return y.detach(), x.grad


def train_whole():
    model, found = make(gathers_float8=False), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        found.append([run(model, step, rank) for rank in range(RANKS)])
        for p in model.parameters():
            p.grad /= RANKS
        optimizer.step()
        optimizer.zero_grad()
    return found


def train_sharded(comm):
    model = fs.shard_module(make(gathers_float8=True), mesh=comm, units=["0", "1", "2"])
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
    found, traffic = [], fs.inspect.step_traffic(model.layout)
    for step in range(STEPS):
        found.append(run(model, step, comm.rank))
        optimizer.step()
        optimizer.zero_grad()
    assert model.scheduled_step.num_unscheduled_calls == 1, model.scheduled_step.last_call_status()
    return found, max(call.nbytes for call in traffic if call.op == "all_gather")


def train_fsdp2(comm):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    class Bytes(DefaultAllGather):
        """Gathers bytes: gloo has no float8."""

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            return super().__call__(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group, async_op)

    model = make(gathers_float8=True)
    for each in (*model, model):
        fully_shard(each, mesh=init_device_mesh("cpu", (RANKS,)))
        each.set_custom_all_gather(Bytes())
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        found.append(run(model, step, comm.rank))
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_equal(ranks, whole):
    for rank, found in enumerate(ranks):
        for step, (mine, expected) in enumerate(zip(found, whole, strict=True)):
            assert all(map(torch.equal, mine, expected[rank])), f"rank {rank}, step {step}"


def test_float8_linear_has_the_bits_of_the_whole_model_and_of_fsdp2():
    launcher = _Launcher(first="import torchao.float8")  # once, and not by each rank
    found = _run_ranks(launcher, fs.Mesh({"dp": RANKS}), lambda comm: (train_sharded(comm), train_fsdp2(comm)), 90.0)
    whole = train_whole()
    assert_equal([sharded for (sharded, _), _ in found], whole)
    assert_equal([fsdp2 for _, fsdp2 in found], whole)
    assert [nbytes for (_, nbytes), _ in found] == [64 * 96 // RANKS] * RANKS, "a value is one byte in a gather"
