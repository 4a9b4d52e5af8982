"""On a CUDA device: the same step as on the CPU, one process, and the collectives of NCCL at world size 1."""

import optree
import pytest
import torch

import fsharp as fs
from tests.gpt_like import loss_fn, make_batches, make_params
from tests.virtual_device import accelerator as accelerator, comm as comm, gpu as gpu

MESH = fs.Mesh({"dp": 1})
TX = fs.optim.chain(
    fs.optim.clip_by_global_norm(0.5, deterministic=True),
    fs.optim.apply_if_finite(fs.optim.adamw(1e-2, weight_decay={"**": 0.1}), 5),
)


def train(device, steps=5, precision=fs.Precision()):
    given, moved = make_params(), {}
    params = optree.tree_map(lambda t: moved.setdefault(id(t), t.to(device)), given)  # a leaf that is tied stays tied
    comm = fs.SingleComm(MESH, device=device)
    layout = fs.plan(params, MESH, fs.zero3("dp"), units="layers.*", precision=precision)
    state = fs.init_state(TX, fs.shard(params, layout, comm, place="optim"), comm=comm)
    step = fs.train_step(loss_fn, TX, microbatches=2, donate=True)
    for batch in make_batches(steps, 32):
        state, metrics = step(state, {k: v.to(device) for k, v in batch.items()}, comm)
    return fs.full_tree(state.params, comm=comm), metrics


def test_a_step_on_cuda_agrees_with_the_cpu(gpu):
    (ours, metrics), (theirs, expected) = train("cuda"), train("cpu")
    assert metrics.loss.is_cuda
    torch.testing.assert_close(metrics.loss.cpu(), expected.loss, rtol=1e-5, atol=1e-6)
    optree.tree_map(lambda a, b: torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-4), ours, theirs)


def test_bfloat16_with_a_float32_main_copy_trains_on_cuda(gpu):
    precision = fs.Precision(compute=torch.bfloat16)
    params, metrics = train("cuda", steps=8, precision=precision)
    assert params["embed"].dtype == torch.bfloat16
    torch.testing.assert_close(metrics.loss.cpu(), train("cpu", 8, precision)[1].loss, rtol=0.02, atol=0.02)


def test_the_deterministic_norm_has_the_bits_of_the_cpu(gpu):
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    norms = []
    for device in ("cpu", "cuda"):
        tree = {"x": values.to(device)}
        comm = fs.SingleComm(MESH, device=device)
        shards = fs.shard(tree, fs.plan(tree, MESH, fs.zero3("dp")), comm)
        norms.append(fs.optim.global_norm(shards, comm=comm, deterministic=True).cpu())
    assert torch.equal(*norms)


def test_initial_values_are_those_of_the_cpu(gpu):
    layout = fs.plan(make_params(), MESH, fs.zero3("dp"))
    on_gpu = fs.init_params(fs.init.normal(1.0), layout, fs.SingleComm(MESH, device="cuda"), key=3)
    on_cpu = fs.init_params(fs.init.normal(1.0), layout, fs.SingleComm(MESH), key=3)
    assert on_gpu.buffers[0].is_cuda
    assert torch.equal(on_gpu.buffers[0].cpu(), on_cpu.buffers[0])


@pytest.mark.parametrize("rank_order", [False, True])
def test_nccl_collectives_at_world_size_one(comm, rank_order):
    comm._rank_order = rank_order
    x = torch.arange(6.0, device="cuda", dtype=torch.bfloat16).view(1, 6)
    assert torch.equal(comm.all_gather(x[0], "dp"), x)
    assert torch.equal(comm.reduce_scatter(x, "dp", dtype=torch.float32), x[0].float())
    for op in ("sum", "max", "min"):
        assert torch.equal(comm.all_reduce(x, "dp", op=op), x)
