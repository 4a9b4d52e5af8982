"""Weights of torchao that have FSDP2's hooks: Float8Linear's, and those computed with in MXFP8. The bits are FSDP2's."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsharp as fs
from fsharp.testing.process_ranks import _Launcher, _run_ranks

RATE, RANKS, STEPS = 0.1, 2, 3
MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32, wire=torch.float32)


def make_mxfp8():
    """A model whose weights make matrix products in MXFP8; gathers send them in bfloat16."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
    from torchao.quantization.quantize_.common import KernelPreference

    model, config = layers(bias=False), MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(MXFP8TrainingWeightWrapperTensor(layer.weight.data, config))
    return model


def layers(*, bias=True):
    torch.manual_seed(0)
    last = nn.Linear(64, 32, bias=bias)
    return nn.Sequential(nn.Linear(64, 96, bias=bias), nn.Sequential(nn.GELU(), nn.Linear(96, 64, bias=False)), last)


def make(*, gathers_float8):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = layers()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_float8, emulate=True)
    return convert_to_float8_training(model, config=config)


def batch(step, rank):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_()


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


def train_sharded(comm, model, **options):
    model = fs.shard_module(model, mesh=comm, units=["0", "1", "2"], **options)
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
    found, traffic = [], fs.inspect.step_traffic(model.layout)
    for step in range(STEPS):
        found.append(run(model, step, comm.rank))
        optimizer.step()
        optimizer.zero_grad()
    nbytes = max(call.nbytes for call in traffic if call.op == "all_gather")
    return found, nbytes, model.scheduled_step.last_call_status()


def train_fsdp2(comm, model, **options):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    class Bytes(DefaultAllGather):
        """Gathers bytes: gloo has no float8."""

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            return super().__call__(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group, async_op)

    for each in (*model, model):
        fully_shard(each, mesh=init_device_mesh("cpu", (RANKS,)), **options)
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


def train_both(comm):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    float8 = train_sharded(comm, make(gathers_float8=True)), train_fsdp2(comm, make(gathers_float8=True))
    return *float8, train_sharded(comm, make_mxfp8(), precision=MIXED), train_fsdp2(comm, make_mxfp8(), mp_policy=mixed)


def test_weights_with_hooks_have_the_bits_of_the_whole_model_and_of_fsdp2():
    launcher = _Launcher(first="import torchao.float8, torchao.prototype.moe_training.tensor")  # once, and not by each rank
    ranks = _run_ranks(launcher, fs.Mesh({"dp": RANKS}), train_both, 90.0)
    whole = train_whole()
    assert_equal([found for (found, *_), *_ in ranks], whole)
    assert_equal([found for _, found, *_ in ranks], whole)
    for rank, (_, _, (found, *_), expected) in enumerate(ranks):
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert mine[0].dtype is torch.bfloat16
            assert all(map(torch.equal, mine, theirs)), f"mxfp8, rank {rank}, step {step}"
    float8, mxfp8 = ([each[i][1:] for each in ranks] for i in (0, 2))
    assert [(nbytes, status.kind) for nbytes, status in float8] == [(64 * 96 // RANKS, "planned")] * RANKS  # a byte a value
    for nbytes, status in mxfp8:
        assert nbytes == 2 * 64 * 96 // RANKS
        assert status.kind == "recorded"
        assert "a caller holds parameters of units" in status.why
