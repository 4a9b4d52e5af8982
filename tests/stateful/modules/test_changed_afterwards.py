"""Hooks that read parameters, and submodules that are put into a module after it was sharded."""

import optree
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.testing import simulate
from tests.as_torch import DIM, Block, Part, make, same_as_torch
from tests.ranks import on_ranks
from tests.scheduling import DP, every


def old_weight_norm(module):
    nn.utils.weight_norm(module)


def old_spectral_norm(module):
    nn.utils.spectral_norm(module)


def pruned(module):
    prune.l1_unstructured(module, "weight", amount=0.3)


COMPUTED = {
    "weight_norm": old_weight_norm,
    "spectral_norm": old_spectral_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "pruned": pruned,
}
ignored = pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*:FutureWarning")


@ignored
@every(2, kind=COMPUTED, units=["within a unit", "a unit"])
def test_weights_that_are_computed(kind, units):
    """By a pre-hook or a parametrization, of a module within a unit and of a unit itself."""

    def change(model):
        COMPUTED[kind](model.head)
        for layer in model.layers:
            COMPUTED[kind](layer.mlp.up)

    chosen = [Block, "head"] if units == "within a unit" else ["layers.*.mlp.up", "layers.*.mlp.down", "head"]
    # torch.mv, of a weight that begins elsewhere in memory, and solvers of matrices may round differently.
    same_as_torch("zero3", change, units=chosen, exact="spectral" not in kind and kind != "orthogonal")


def scaled(module, args):
    return (args[0] * module.gain.abs(),)


def shifted(module, args, out):
    return out + module.norm.bias * module.mlp.up.weight.mean()


def watched(module, grad_input, grad_output):
    with torch.no_grad():
        return tuple(g if g is None else g * (1 + module.gain.detach() ** 2) for g in grad_input)


def hooks(model):
    for layer in model.layers:
        layer.register_forward_pre_hook(scaled)
        layer.register_forward_hook(shifted)


def backward_hooks(model):
    for layer in model.layers:
        layer.register_full_backward_hook(watched)


@every(4, strategy=["ddp", "zero2", "zero3"], when=["before", "after"], register=[hooks, backward_hooks])
def test_hooks_of_units_read_parameters(register, when, strategy):
    nothing = lambda model: None  # noqa: E731
    same_as_torch(strategy, *((register, nothing) if when == "before" else (nothing, register)))


def head(model):
    model.head = nn.Linear(DIM, 11)


def appended(model):
    model.layers.append(Block())


def exchanged(model):
    model.layers[0] = Block()


def in_a_unit(model):
    model.layers[1].mlp = Part()


def parameter(model):
    model.layers[1].mlp.up.scale = nn.Parameter(torch.ones(()))


def of_the_root(model):
    model.register_parameter("shift", nn.Parameter(torch.ones(())))


def wrapped(model):
    model.layers[2] = nn.Sequential(model.layers[2], nn.Linear(DIM, DIM))


def unfrozen(model):
    model.head.extra = nn.Linear(2, 2).requires_grad_(False)
    with torch.no_grad():
        model(torch.arange(4))
    model.head.extra.weight.requires_grad_(True)


PUT = {
    "a head": (head, r"head\.weight"),
    "a layer more": (appended, r"layers\.3\.gain"),
    "another layer": (exchanged, r"layers\.0\.gain"),
    "a part of a unit": (in_a_unit, r"layers\.1\.mlp\.up\.weight"),
    "a parameter": (parameter, r"layers\.1\.mlp\.up\.scale"),
    "a parameter of the root": (of_the_root, "shift"),
    "a wrapper that has more": (wrapped, r"layers\.2\.1\.weight"),
    "unfrozen later": (unfrozen, r"head\.extra\.weight"),
}


@every(2, strategy=["ddp", "zero3"], put=PUT)
@on_ranks(DP)
def test_what_would_not_be_trained_is_refused(comm, put, strategy):
    change, path = PUT[put]
    model = fs.shard_module(make(), mesh=comm, strategy=getattr(fs, strategy)("dp"), units=[Block])
    model(torch.arange(4)).sum().backward()
    model.zero_grad()
    change(model)
    for _ in range(2):
        with pytest.raises(TreeError, match=rf"parameter '{path}' came into the module after shard_module\(\).*before"):
            model(torch.arange(4))


def test_others_hear_of_what_one_rank_puts_in():
    def rank_fn(comm):
        model = fs.shard_module(make(), mesh=comm, units=[Block])
        if comm.rank == 1:
            model.layers[1].mlp = Part()
        model(torch.arange(4)).sum().backward()

    outcomes = simulate(DP, rank_fn, outcomes=True)
    assert all("layers.1.mlp.up.weight" in str(each) for each in outcomes), outcomes


class Shift(nn.Module):
    """A frozen parameter and a module without any."""

    def __init__(self, inner):
        super().__init__()
        self.by, self.act, self.inner = nn.Parameter(torch.ones(()), requires_grad=False), nn.Tanh(), inner

    def forward(self, x):
        return self.inner(self.act(x) + self.by)


def shift(model):
    model.layers[1] = Shift(model.layers[1])
    model.layers[2].mlp = Shift(model.layers[2].mlp)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_what_has_nothing_to_train_may_come(comm, strategy):
    whole, model = make(), fs.shard_module(make(), mesh=comm, strategy=getattr(fs, strategy)("dp"), units=[Block])
    shift(whole)
    shift(model)
    out = model(torch.arange(4))
    out.sum().backward()
    assert torch.equal(out, whole(torch.arange(4)))


class Calls(nn.Module):
    """Call another function once, within the forward."""

    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(4, 4), None

    def forward(self, x):
        other, self.other = self.other, None
        out = self.inner(x)
        return out if other is None else (out, other(x), self.inner(x))


def test_a_module_that_calls_itself_as_a_function_is_refused_and_goes_on():
    def rank_fn(comm):
        with torch.no_grad():
            model = Calls()
            for p in model.parameters():
                p.fill_(1.0)
            model = fs.shard_module(model, mesh=comm, units=["inner"])
            fn, params = model.functional()
            doubled = optree.tree_map(lambda p: p * 2, params)
            model.other = lambda x: fn(doubled, x, comm=comm)
            with pytest.raises(fs.errors.ScheduleError, match="inside of a forward of its own module"):
                model(torch.ones(2, 4))
            return float(fn(doubled, torch.ones(2, 4), comm=comm)[0, 0]), float(model(torch.ones(2, 4))[0, 0])

    assert simulate(DP, rank_fn) == [(10.0, 5.0)] * 2
