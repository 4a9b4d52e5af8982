"""Models of TransformerEngine trained whole and sharded, and what differs.

TransformerEngine computes on a GPU where it can, else on a CPU by the stand-in of tests/te_cpu.
"""

import copy
import importlib
import math
import os
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.testing import DebugPolicy
from tests import te_cpu
from tests.te_cpu.ranks import processes as forked

IS_ON_GPU = not te_cpu.is_needed()
DEVICE = "cuda" if IS_ON_GPU else "cpu"
if IS_ON_GPU:
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")  # elementwise functions run as they are: to compile them takes minutes
with warnings.catch_warnings(action="ignore"):
    te = importlib.import_module("transformer_engine.pytorch") if IS_ON_GPU else te_cpu.load()
from transformer_engine.common import recipe as recipes  # noqa: E402
from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: E402
from transformer_engine.pytorch.tensor import utils as tensor_utils  # noqa: E402, F401

RECIPES = {
    "current": ((9, 0), recipes.Float8CurrentScaling()),
    "block": ((9, 0), recipes.Float8BlockScaling()),
    "current on 10.0": ((10, 0), recipes.Float8CurrentScaling()),
    "mxfp8": ((10, 0), recipes.MXFP8BlockScaling()),
    "nvfp4": ((10, 0), recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)),
}
DELAYED = {
    "delayed": ((9, 0), recipes.DelayedScaling(amax_history_len=4)),
    "delayed, each rank by itself": (
        (9, 0),
        recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", reduce_amax=False),
    ),
}
FEW = ("current", "mxfp8")
WIDTH, TOKENS, STEPS, RATE = 128, 32, 3, 0.5
ABOUT = {"params_dtype": torch.bfloat16, "device": DEVICE}


class Stack(nn.Module):
    """Layers one after another.

    Args:
        layers: modules.
        how: "torch" or "te": each layer is in a checkpoint of that library; "twice": each layer is used twice.
    """

    def __init__(self, *layers, how=""):
        super().__init__()
        self.layers, self.how, self.second = nn.ModuleList(layers), how, []

    def forward(self, x):
        for layer in self.layers:
            if self.how == "torch":
                recipe = FP8GlobalStateManager.get_fp8_recipe()
                contexts = lambda recipe=recipe: (nullcontext(), te.autocast(enabled=True, recipe=recipe))  # noqa: E731
                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            elif self.how == "te":
                x = te.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
                x = layer(x) if self.how == "twice" else x
                if isinstance(x, tuple):
                    x, self.second[:] = x[0], x[1:]
        return x


class Experts(nn.Module):
    """Three experts in one module, of which the last but one gets no tokens."""

    def __init__(self):
        super().__init__()
        self.inner = te.GroupedLinear(3, WIDTH, WIDTH, **ABOUT)

    def forward(self, x):
        return self.inner(x, [len(x) // 2, 0, len(x) // 2])


class Door(nn.Module):
    """A layer whose weight leaves it by another door than its output."""

    def __init__(self, door):
        super().__init__()
        self.inner, self.door, self.kept_in_list = linear(bias=False), door, []

    def forward(self, x):
        y, weight = self.inner(x), self.inner.weight
        if self.door == "returned":
            y = y, weight
        elif self.door == "alias returned":
            y = y, weight.view_as(weight)
        elif self.door == "attribute":
            self.__dict__["kept"] = weight  # which registers no parameter
        elif self.door == "list":
            self.kept_in_list[:] = [weight]
        elif self.door == "computed":
            self.__dict__["kept"] = torch.sin(weight.float())
        elif self.door == "unseen":
            OUTSIDE[:] = [weight]
        elif self.door == "unseen, computed":
            OUTSIDE[:] = [torch.sin(weight.float())]
        elif self.door == "written":
            weight.quantize_(torch.zeros(weight.shape, dtype=torch.bfloat16))
        return y


OUTSIDE = []


def loss_with_weight(model, y):
    """A loss of the weight that has left a :class:`Door` as well."""
    door = model.layers[1]
    is_outside = door.door.startswith("unseen")  # OUTSIDE may hold the weight of another test that failed on purpose
    [kept] = [OUTSIDE.pop()] if is_outside else door.kept_in_list or model.second or [door.kept]
    return loss_of(y) + kept.float().square().mean()


def linear(out=WIDTH, **options):
    return te.Linear(WIDTH, out, **ABOUT, **options)


def layer(**options):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True} | ABOUT | options
    return te.TransformerLayer(WIDTH, 2 * WIDTH, 4, **options)


def norm_linear():
    return te.LayerNormLinear(WIDTH, WIDTH, **ABOUT)


def norm_mlp():
    return te.LayerNormMLP(WIDTH, 2 * WIDTH, **ABOUT)


@dataclass
class Case:
    """What is trained, and how.

    Attributes:
        make: makes the layers of a model.
        units: what is gathered by itself.
        how: of :class:`Stack`.
        shape: of an input.
        microbatches: of a step.
        prepare: called with the model before it is sharded.
        change: called with the model after it is sharded, or with the whole model.
        before_step: called with the model and the number of the step.
        quantized: whether weights are quantized, or bfloat16.
        preserved: whether weights keep their values of before they were quantized.
        options: of ``shard_module``.
        loss: maps the model and its output to a scalar.
        optimizer: makes the class, or pair, and the settings of the optimizer.
    """

    make: object
    units: tuple = (te.Linear,)
    how: str = ""
    shape: tuple = (TOKENS, WIDTH)
    microbatches: int = 1
    prepare: object = lambda model: None
    change: object = lambda model: None
    before_step: object = lambda model, step: None
    quantized: bool = True
    preserved: bool = True
    options: dict = None
    loss: object = lambda model, y: loss_of(y)
    optimizer: object = lambda: (torch.optim.SGD, {"lr": RATE})

    def model(self, recipe):
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=self.quantized, recipe=recipe, preserve_high_precision_init_val=self.preserved):
            model = Stack(*self.make(), how=self.how)
        self.prepare(model)
        return model

    def batch(self, step, number, rank):
        generator = torch.Generator().manual_seed(10_000 * step + 100 * number + rank)
        return torch.randn(self.shape, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()


def loss_of(y):
    return y.float().square().mean()


def train_whole(case, recipe, groups, *, reduces_first, comm=None):
    """For each step the outputs and input gradients of all ranks, then the mean gradients, of a model that is not sharded.

    Gradients are added over microbatches, then over ranks; with several groups over the ranks of each group, then over
    microbatches, then over groups; or microbatches come last. With ``comm``
    each rank has such a model, and computes with its own batches: in delayed scaling ranks agree on scales as they compute.
    """
    FP8GlobalStateManager.reset()  # delayed scaling would update the scales of other models as well
    model = case.model(recipe)
    if case.how == "twice":  # autograd would add the gradients of both uses in bfloat16
        model = Stack(*chain.from_iterable((each, copy.deepcopy(each)) for each in model.layers))
    first_of = {name: _first_of(name) if case.how == "twice" else name for name, _ in model.named_parameters()}
    main = {first_of[name]: _value(p).to(p.device, torch.float32) for name, p in model.named_parameters() if p.requires_grad}
    case.change(model)
    ranks, numbers = sorted(chain.from_iterable(groups)), range(case.microbatches)
    found = []
    for step in range(STEPS):
        case.before_step(model, step)
        outputs, grads = {}, {}
        for rank in ranks if comm is None else [comm.rank]:
            for number in numbers:
                x = case.batch(step, number, rank)
                with te.autocast(enabled=True, recipe=recipe):
                    y = model(x)
                case.loss(model, y).backward()
                outputs[rank, number] = y.detach(), x.grad
                for name, p in model.named_parameters():
                    if p.requires_grad:
                        key = rank, number, first_of[name]
                        grads[key], p.grad = grads.get(key, 0) + p.grad.float(), None

        if comm is not None and comm.mesh.size > 1:
            everyone = [None] * comm.mesh.size
            torch.distributed.all_gather_object(everyone, (outputs, grads))
            outputs, grads = (
                dict(chain.from_iterable(each.items() for each in found)) for found in zip(*everyone, strict=True)
            )

        def over_ranks(name, numbers, grads=grads):
            if len(groups) > 1:  # the ranks of a group are reduced in each microbatch
                return sum(sum(sum(grads[rank, number, name] for rank in group) for number in numbers) for group in groups)
            return sum(sum(grads[rank, number, name] for number in numbers) for rank in groups[0])

        trained = {first_of[name]: None for name, p in model.named_parameters() if p.requires_grad}
        totals = {
            name: sum(over_ranks(name, [n]) for n in numbers) if reduces_first else over_ranks(name, numbers)
            for name in trained
        }
        means = {name: total / len(ranks) for name, total in totals.items()}
        found.append((outputs, means))
        for name, p in model.named_parameters():
            if first_of[name] in means:
                new = main[first_of[name]] - RATE * means[first_of[name]]
                with torch.no_grad():
                    if hasattr(p, "quantize_"):
                        p.quantize_(new.to(torch.bfloat16))
                    else:
                        p.copy_(new)
        main = {name: value - RATE * means[name] if name in means else value for name, value in main.items()}
    return found


def _first_of(name):
    """The parameter of which another layer has a copy, as every second one."""
    layers, number, rest = name.split(".", 2)
    return f"{layers}.{int(number) // 2}.{rest}"


def _value(p):
    if hasattr(p, "get_high_precision_init_val"):
        return p.get_high_precision_init_val()
    return p.detach().dequantize() if hasattr(p, "quantize_") else p.detach()


PRECISION = fs.Precision(compute=torch.bfloat16, main=torch.float32, wire=torch.float32)  # sums of sums are not rounded


def shard(case, recipe, comm, strategy, **options):
    options = {"units": list(case.units), "precision": PRECISION} | (case.options or {}) | options
    model = fs.shard_module(case.model(recipe), mesh=comm, strategy=strategy, **options)
    case.change(model)
    return model


def train_sharded(case, recipe, comm, strategy, *, model=None, optimizer=None, steps=range(STEPS), **options):
    if model is None:
        FP8GlobalStateManager.reset()
        model = shard(case, recipe, comm, strategy, **options)
    cls, settings = case.optimizer()
    optimizer = optimizer or fs.ShardedOptimizer(model.parameters(), cls, **settings)
    found = []
    for step in steps:
        case.before_step(model, step)
        outputs = {}
        for number in range(case.microbatches):
            x = case.batch(step, number, comm.rank)
            with model.accumulate() if number < case.microbatches - 1 else nullcontext():
                with te.autocast(enabled=True, recipe=recipe):
                    y = model(x)
                case.loss(model, y).backward()
            outputs[comm.rank, number] = y.detach(), x.grad
        found.append((outputs, {name: own_part(p) for name, p in model.named_parameters() if p.grad is not None}))
        optimizer.step()
        optimizer.zero_grad()
    return found, model


def train_alone(case, kind, **options):
    """Train by a kind of `RECIPES` on one rank, with gathers as on several, in memory overwritten at its release."""
    (architecture, recipe), policy = kind, DebugPolicy(trivial_axes=True, poison=True)
    with te_cpu.architecture(*architecture):
        return train_sharded(case, recipe, fs.SingleComm(fs.Mesh({"dp": 1})), fs.zero3("dp"), policy=policy, **options)


def own_part(parameter):
    """Which elements of a flattened gradient this rank has, and these."""
    return parameter.unit.leaf_range_on_rank(
        parameter.leaf, parameter.place, parameter.rank
    ), parameter.grad.local.flatten().clone()


def distances(found, expected):
    """How far outputs, gradients of inputs and of parameters are from what is expected: 0 for the same bits, else relative."""
    (outputs, grads), (all_outputs, means) = found, expected
    pairs = {}
    for key, (y, dx) in outputs.items():
        pairs |= {f"y {key[1]}": (y, all_outputs[key][0]), f"dx {key[1]}": (dx, all_outputs[key][1])}
    pairs |= {name: (own, means[name].flatten()[first:last]) for name, ((first, last), own) in grads.items() if name in means}
    alone = {f"{name} has a gradient on one side alone": math.nan for name in {*grads} ^ {*means}}
    return {what: _distance(*pair) for what, pair in pairs.items()} | alone


def _distance(found, expected):
    if torch.equal(found, expected):
        return 0.0
    return float((found.float() - expected.float()).norm() / expected.float().norm()) or math.nan


def compare(found, expected):
    """Name what differs: outputs and gradients of inputs by microbatch, gradients by parameter."""
    return [what for what, distance in distances(found, expected).items() if distance != 0]


def spread(case, recipe, whole, **options):
    """The largest distance of another run of the whole model from this one: kernels may add in another order each time."""
    again = train_whole(case, recipe, **options)
    runs = [(outputs, {name: ((0, mean.numel()), mean.flatten()) for name, mean in means.items()}) for outputs, means in again]
    return max(max(distances(run, expected).values()) for run, expected in zip(runs, whole, strict=True))


def strategies_on(mesh):
    """Strategies, the groups of ranks over which each adds gradients first, and whether it reduces each microbatch."""
    if len(mesh.names) == 1:
        whole = [[*range(mesh.size)]]
        return [
            (fs.ddp("dp"), whole, False),
            (fs.zero1("dp"), whole, False),
            (fs.zero2("dp"), whole, True),
            (fs.zero3("dp"), whole, True),
        ]
    inner, outer = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    return [
        (fs.hsdp("outer", "inner"), inner, False),
        (fs.hfsdp("outer", "inner"), inner, False),
        (fs.zero3("outer", "inner"), outer, True),
    ]


def shared(comm, makers):
    """What these functions return, each called on one rank."""
    size, mine = comm.mesh.size, {i: make() for i, make in enumerate(makers) if i % comm.mesh.size == comm.rank}
    found = [mine] * size
    if size > 1:
        torch.distributed.all_gather_object(found, mine)
    return [found[i % size][i] for i in range(len(makers))]


def on(architecture):
    """A context in which TransformerEngine sees this architecture. A GPU has its own."""
    return nullcontext() if IS_ON_GPU else te_cpu.architecture(*architecture)


def differences(comm, cases, names=RECIPES, strategies=None, as_sharded=lambda case: case, **shard_options):
    """Train each case under each recipe and strategy, and compare with the whole model. Return what differs.

    ``as_sharded`` returns the case of the model that is sharded, from that of the whole one.
    On a GPU what differs by no more than twice the distance between two runs of the whole model is the same.
    """
    found = []
    for name in names:
        architecture, recipe = (RECIPES | DELAYED)[name]
        with on(architecture):
            for strategy, groups, reduces_first in strategies_on(comm.mesh):
                if strategies is not None and strategy not in strategies:
                    continue
                options = {"recipe": recipe, "groups": groups, "reduces_first": reduces_first}
                if recipe.delayed():
                    wholes = [train_whole(case, comm=comm, **options) for case in cases.values()]
                else:
                    wholes = shared(comm, [partial(train_whole, case, **options) for case in cases.values()])
                for (about, case), whole in zip(cases.items(), wholes, strict=True):
                    sharded, model = train_sharded(as_sharded(case), recipe, comm, strategy, **shard_options)
                    label = f"{about}, {name}, {strategy}"
                    far = {
                        f"{label}, step {step}: {what}": distance
                        for step, (mine, expected) in enumerate(zip(sharded, whole, strict=True))
                        for what, distance in distances(mine, expected).items()
                        if distance != 0
                    }
                    if far and IS_ON_GPU:
                        allowed = 2 * spread(case, whole=whole, **options)
                        print(f"{label}: {len(far)} differ, by up to {max(far.values()):.1e}; allowed are {allowed:.1e}")
                        far = {what: distance for what, distance in far.items() if not distance <= allowed}
                    found += [f"{what}, by {distance:.1e}" for what, distance in far.items()]
                    step = model.scheduled_step
                    if step.num_unscheduled_calls != 1:
                        found.append(f"{label}: recorded {step.num_unscheduled_calls} times, {step.last_call_status()}")
    return found


def on_ranks(sizes, fn, **kwargs):
    """Call ``fn(comm, ...)`` on each rank of a mesh, in processes of their own. Return all results.

    Processes with the stand-in are forked from one that has loaded it.
    """
    mesh = fs.Mesh(sizes)
    if mesh.size == 1:
        return [fn(fs.SingleComm(mesh), **kwargs)]
    start = fs.testing.processes if IS_ON_GPU else forked
    return start(mesh, partial(fn, **kwargs), timeout=250)
