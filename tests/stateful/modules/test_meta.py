"""Modules on the meta device: what is made is the same on any mesh, and what nothing makes is named."""

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, TreeError
from fsharp.testing import simulate
from tests.modules import values
from tests.ranks import on_ranks
from tests.scheduling import assert_same, every

DIM = 8


class Positions(nn.Module):
    """Buffers and no parameters: one of them that is not saved, one of integers, two that are the same."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.empty(DIM), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("also", self.angles, persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.angles.copy_(torch.rand(DIM))
        self.count.fill_(3)

    def forward(self, x):
        return x + self.angles + self.also


class Mixed(nn.Module):
    """Attention, norms with buffers, an embedding with a row of zeros."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(5, DIM, padding_idx=0), Positions()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(DIM, 2, 12, batch_first=True) for _ in range(2))
        self.norms = nn.Sequential(nn.BatchNorm1d(DIM), nn.BatchNorm1d(DIM, affine=False))
        self.cross, self.last = nn.MultiheadAttention(DIM, 2, kdim=4, vdim=4, add_bias_kv=True), nn.LSTM(DIM, 3)

    def forward(self, x):
        x = self.positions(self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return self.last(self.norms(x.flatten(0, 1)))[0]


UNITS = {
    "none": None,
    "layers": "layers.*",
    "inside of attention": [nn.Linear, nn.MultiheadAttention],
    "all": lambda path, module: any(True for _ in module.parameters(recurse=False)),
}


class Noise(nn.Module):
    """A parameter, and random numbers that two modules share."""

    def __init__(self, table):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, DIM))
        self.register_buffer("table", table)

    def reset_parameters(self):
        self.weight.normal_()
        self.table.normal_()


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        table = torch.empty(DIM)
        self.first, self.second = Noise(table), Noise(table)


@pytest.mark.parametrize("units", [None, "*"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_buffer_that_modules_share_has_one_value_on_all_ranks(size, units):
    expected = made(make=Shares)
    assert expected["first.table"].std() > 0
    assert_same(expected["first.table"], expected["second.table"])
    for found in simulate(fs.Mesh({"dp": size}), lambda comm: everything(comm, fs.zero3("dp"), units, make=Shares)):
        assert_same(found, expected)


def everything(comm, strategy, units, key=3, make=Mixed, **options):
    """Parameters and buffers of a module that is made on the meta device, whole."""
    with torch.device("meta"):
        net = make()
    model = fs.shard_module(net, mesh=comm, strategy=strategy, units=units, key=key, **options)
    assert not any(b.is_meta for b in model.buffers())
    assert make is not Mixed or model.positions.also is model.positions.angles
    return values(model) | {name: b.clone() for name, b in model.named_buffers(remove_duplicate=False)}


def made(**options):
    """The same by one rank that gathers nothing."""
    [found] = simulate(fs.Mesh({"dp": 1}), lambda comm: everything(comm, fs.ddp("dp"), None, **options))
    return found


@every(4, units=UNITS, mesh=[(2, "zero1"), (2, "zero3"), (4, "zero3"), (3, "ddp")])
def test_the_same_values_on_any_mesh(mesh, units):
    size, strategy = mesh
    expected = made()
    for mine in simulate(fs.Mesh({"dp": size}), lambda comm: everything(comm, getattr(fs, strategy)("dp"), UNITS[units])):
        assert_same(mine, expected)


def test_values_are_those_that_modules_give_themselves():
    mine, other = made(), made(key=4)
    torch.manual_seed(0)
    alone = Mixed()
    assert list(mine) == [
        *(n for n, _ in alone.named_parameters()),
        *(n for n, _ in alone.named_buffers(remove_duplicate=False)),
    ]
    theirs = {**dict(alone.named_parameters()), **dict(alone.named_buffers(remove_duplicate=False))}
    constant = {name for name, each in theirs.items() if torch.equal(each, each.flatten()[0].expand(each.shape))}
    for name, each in theirs.items():
        if name in constant:
            assert_same(mine[name], each.detach())
        else:
            assert 0.2 < mine[name].std() / each.std() < 5, name
            assert not torch.equal(mine[name], other[name])
    assert {"layers.0.self_attn.out_proj.bias", "norms.0.running_var", "positions.count"} <= constant
    assert not mine["embed.weight"][0].any()
    assert_same(mine["positions.also"], mine["positions.angles"])


class Bare(nn.Module):
    """Parameters and buffers that it does not initialize; a tied one."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.empty(4, 3)), nn.Parameter(torch.empty(()))
        self.first, self.tied = nn.Linear(3, 4), nn.Linear(3, 4, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("mask", torch.empty(3, dtype=torch.int32))
        self.register_buffer("flag", torch.empty(2, dtype=torch.bool))


def by_class(module):
    """As models of transformers do, through ``.data``."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0, 0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    if isinstance(module, Bare):
        module.weight = nn.Parameter(torch.randn(4, 3))
        nn.init.ones_(module.scale)
        module.mask.data.copy_(torch.arange(3))
        module.flag.fill_(True)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_initialize(size):
    def rank_fn(comm):
        return everything(comm, fs.zero3("dp"), nn.Linear if size > 1 else None, make=Bare, initialize=by_class)

    expected = made(make=Bare, initialize=by_class)
    for mine in simulate(fs.Mesh({"dp": size}), rank_fn):
        assert_same(mine, expected)
    assert 0 < expected["first.weight"].std() < 0.05
    assert expected["scale"] == 1
    assert expected["mask"].tolist() == [0, 1, 2]
    assert expected["flag"].all()


class Attention(nn.Module):
    """No tensors of its own. It changes one of its submodule's, and reads no values."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM)

    def reset_parameters(self):
        for each in (self.query, self.key):
            each.weight.normal_(3.0, 0.1)


def two_attentions():
    return nn.Sequential(Attention(), Attention())


def as_gpt2(module):
    """As models of transformers do, for a submodule and for modules around it."""
    by_class(module)
    if isinstance(module, Attention):
        module.reset_parameters()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("initialize", [None, as_gpt2])
def test_a_module_may_change_values_of_its_submodules(initialize, size):
    def rank_fn(comm):
        return everything(comm, fs.zero3("dp"), nn.Linear, make=two_attentions, initialize=initialize)

    for found in simulate(fs.Mesh({"dp": size}), rank_fn):
        weights = {name: x for name, x in found.items() if name.endswith("weight")}
        assert all(2.9 < x.mean() < 3.1 and 0.05 < x.std() < 0.2 for x in weights.values())
        assert len({float(x.sum()) for x in weights.values()}) == 4
        assert (initialize is None) == bool(found["0.key.bias"].any())


def test_a_transformer_has_the_values_that_it_gives_its_submodules():
    def make():
        return nn.Transformer(32, 2, 1, 1, 512, batch_first=True)

    found, whole = made(make=make), make()
    for name, mine in found.items():
        assert mine.dim() == 1 or torch.isclose(mine.std(), whole.get_parameter(name).std(), rtol=0.1), name


@on_ranks(fs.Mesh({"dp": 2}))
def test_a_module_around_does_not_change_values_that_are_there(comm):
    with torch.device("meta"):
        net = Attention()
    net.query.weight = nn.Parameter(torch.full((DIM, DIM), 5.0))
    mine = values(fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp")))
    assert_same(mine["query.weight"], torch.full((DIM, DIM), 5.0))
    assert mine["key.weight"].abs().max() < 1


def half(module):
    """Fills one row."""
    by_class(module)
    if isinstance(module, nn.Linear):
        module.weight.data.fill_(torch.nan)
        module.weight.data[0] = 0


def no_buffers(module):
    """Parameters alone."""
    if isinstance(module, nn.Linear):
        by_class(module)
    if isinstance(module, Bare):
        nn.init.ones_(module.weight)


def misshapen(module):
    """Other parameters than there were."""
    module.weight = nn.Parameter(torch.zeros(2))


REFUSED = {
    "nothing": (
        None,
        r"that nothing initializes\.\n  \(root\)  Bare: flag, mask, scale, weight\nGive these classes .* pass initialize=",
    ),
    "a part": (half, r"that nothing initializes\.\n  first  Linear: weight\n"),
    "no buffers": (no_buffers, r"that nothing initializes\.\n  \(root\)  Bare: flag, mask, scale\n"),
    "another shape": (misshapen, r"weight' is float32\[4, 3\], and its initializer has replaced it by float32\[2\]"),
    "an error": (lambda module: 1 / 0, "division by zero"),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
@on_ranks(lambda size: fs.Mesh({"dp": size}))
def test_refused_on_all_ranks(comm, name, size):
    initialize, match = REFUSED[name]
    with torch.device("meta"):
        net = Bare()
    with pytest.raises((TreeError, ZeroDivisionError, AgreementError), match=match):
        fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"), initialize=initialize)
    assert all(p.is_meta and type(p) is nn.Parameter for p in net.parameters())
    assert all(b.is_meta for b in net.buffers())


@on_ranks(fs.Mesh({"dp": 2}))
def test_what_is_there_already_stays(comm):
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    net[0].weight = nn.Parameter(torch.empty(4, device="meta"))
    net[0].running_mean.fill_(7.0)
    net[1].weight.data.fill_(5.0)
    net[1].bias = nn.Parameter(torch.empty(4, device="meta"))
    model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"))
    mine = values(model)
    assert_same(model[0].running_mean, torch.full((4,), 7.0))
    assert_same(mine["1.weight"], torch.full((4, 4), 5.0))
    assert_same(mine["0.weight"], torch.ones(4))
    assert mine["1.bias"].std() > 0
