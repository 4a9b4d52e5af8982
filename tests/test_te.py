"""Modules of TransformerEngine with its quantized weights: outputs and gradients have the bits of the whole model."""

from functools import partial
from itertools import chain

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.testing import processes
from tests import te_cpu
from tests.te_cpu.conftest import hopper as hopper

te = te_cpu.load()
from transformer_engine.common import recipe as recipes  # noqa: E402

RECIPES = {
    "current": ((9, 0), recipes.Float8CurrentScaling()),
    "block": ((9, 0), recipes.Float8BlockScaling()),
    "current on 10.0": ((10, 0), recipes.Float8CurrentScaling()),
    "mxfp8": ((10, 0), recipes.MXFP8BlockScaling()),
    "nvfp4": ((10, 0), recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)),
}
WIDTH, TOKENS, STEPS, RATE = 128, 32, 3, 0.5


def make_model(recipe):
    torch.manual_seed(0)
    about = {"params_dtype": torch.bfloat16, "device": "cpu"}
    with te.quantized_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True):
        return nn.Sequential(te.Linear(WIDTH, 2 * WIDTH, **about), nn.GELU(), te.Linear(2 * WIDTH, WIDTH, bias=False, **about))


def make_batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator).to(torch.bfloat16).requires_grad_()


def loss_of(y):
    return y.float().square().mean()


def train_whole(recipe, groups):
    """For each step the outputs and input gradients of all ranks, then the mean gradients, of a model that is not sharded.

    Gradients are added over the ranks of each group, then over groups.
    """
    model = make_model(recipe)
    is_quantized = {name: hasattr(p, "get_high_precision_init_val") for name, p in model.named_parameters()}
    main = {
        name: (p.get_high_precision_init_val() if is_quantized[name] else p.detach()).float()
        for name, p in model.named_parameters()
    }
    found = []
    for step in range(STEPS):
        outputs, grads = {}, {}
        for rank in sorted(chain.from_iterable(groups)):
            x = make_batch(step, rank)
            with te.autocast(enabled=True, recipe=recipe):
                y = model(x)
            loss_of(y).backward()
            outputs[rank] = y.detach(), x.grad
            for name, p in model.named_parameters():
                grads[rank, name], p.grad = p.grad.float(), None
        means = {name: sum(sum(grads[rank, name] for rank in group) for group in groups) / len(outputs) for name in main}
        found.append((outputs, means))
        for name, p in model.named_parameters():
            main[name] = main[name] - RATE * means[name]
            with torch.no_grad():
                if is_quantized[name]:
                    p.quantize_(main[name].to(torch.bfloat16))
                else:
                    p.copy_(main[name])
    return found


def train_sharded(recipe, comm, strategy, **options):
    model = fs.shard_module(
        make_model(recipe),
        mesh=comm,
        strategy=strategy,
        units=[te.Linear],
        precision=fs.Precision(compute=torch.bfloat16, main=torch.float32, wire=torch.float32),  # sums of sums are not rounded
        **options,
    )
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
    found = []
    for step in range(STEPS):
        x = make_batch(step, comm.rank)
        with te.autocast(enabled=True, recipe=recipe):
            y = model(x)
        loss_of(y).backward()
        found.append((y.detach(), x.grad, {name: own_part(p) for name, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return found


def own_part(parameter):
    """Which elements of a flattened gradient this rank has, and these."""
    return parameter.unit.run_of(parameter.leaf, parameter.place, parameter.rank), parameter.grad.local.flatten().clone()


def on_ranks(comm, architecture):
    """Train under each recipe and strategy, and compare with the whole model. Return what differs."""
    differences = []
    with te_cpu.architecture(*architecture):
        for name, (needed, recipe) in RECIPES.items():
            if needed != architecture:
                continue
            for strategy, groups in strategies_on(comm.mesh):
                whole = train_whole(recipe, groups)
                for step, (found, expected) in enumerate(zip(train_sharded(recipe, comm, strategy), whole, strict=True)):
                    differences += [f"{name} {strategy} step {step}: {what}" for what in compare(found, expected, comm.rank)]
    return differences


def strategies_on(mesh):
    """Strategies, and the groups of ranks over which each adds gradients first."""
    if len(mesh.names) == 1:
        return [(make("dp"), [[*range(mesh.size)]]) for make in (fs.ddp, fs.zero1, fs.zero2, fs.zero3)]
    inner, outer = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    return [(fs.hsdp("outer", "inner"), inner), (fs.hfsdp("outer", "inner"), inner), (fs.zero3("outer", "inner"), outer)]


def compare(found, expected, rank):
    (y, dx, grads), (outputs, means) = found, expected
    pairs = {"y": (y, outputs[rank][0]), "dx": (dx, outputs[rank][1])}
    pairs |= {name: (own, means[name].flatten()[first:last]) for name, ((first, last), own) in grads.items()}
    return [what for what, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)]


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 1},
        {"dp": 2},
        pytest.param({"dp": 3}, marks=pytest.mark.deep),
        pytest.param({"outer": 2, "inner": 2}, marks=pytest.mark.deep),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", [(9, 0), (10, 0)], ids=str)
def test_training_has_the_bits_of_the_whole_model(architecture, sizes):
    mesh = fs.Mesh(sizes)
    if mesh.size == 1:
        assert on_ranks(fs.SingleComm(mesh), architecture) == []
    else:
        assert processes(mesh, partial(on_ranks, architecture=architecture)) == [[]] * mesh.size


def test_a_comm_that_blocks_is_refused(hopper):
    recipe, comm = recipes.Float8CurrentScaling(), fs.SingleComm()
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32, stored=fs.te.weights_of(recipe))
    layout = fs.plan({"w": torch.zeros(32, 32)}, comm.mesh, fs.zero3("dp"), precision=precision)
    params = fs.init_state(
        fs.optim.sgd(0.1), fs.shard({"w": torch.ones(32, 32)}, layout, comm, place="optim"), comm=comm
    ).params
    with pytest.raises(fs.errors.TreeError, match="which a scheduler alone hands out"):
        fs.forward(lambda tree: tree["w"].float(), params, comm=comm)


def test_what_would_go_wrong_is_refused_by_name(hopper):
    recipe, comm = recipes.Float8CurrentScaling(), fs.SingleComm()
    model = fs.shard_module(make_model(recipe), mesh=comm, strategy=fs.zero3("dp"))
    with pytest.raises(fs.errors.LayoutError, match=r"'0\.weight' is used as a tensor of a class of its own.*cannot be paused"):
        model.get_parameter("0.weight").requires_grad_(False)
    model.get_parameter("0.bias").requires_grad_(False)
    fused = te.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu", fuse_wgrad_accumulation=True)
    with pytest.raises(fs.errors.OptionError, match="module '0' has fuse_wgrad_accumulation=True"):
        fs.shard_module(nn.Sequential(fused), mesh=comm, strategy=fs.zero3("dp"))
    with pytest.raises(fs.errors.OptionError, match="weights of a Float8Quantizer are not supported as a format"):
        fs.te.weights_of(recipes.DelayedScaling())
