"""Modules and their optimizers, saved as they are and loaded on another mesh."""

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.testing import processes, simulate
from tests.modules import descend
from tests.scheduling import every

WORLDS = {
    "zero3 on 3": (fs.Mesh({"dp": 3}), fs.zero3("dp")),
    "zero1 on 2": (fs.Mesh({"dp": 2}), fs.zero1("dp")),
    "ddp on 2": (fs.Mesh({"dp": 2}), fs.ddp("dp")),
    "hsdp on 2 x 2": (fs.Mesh({"outer": 2, "inner": 2}), fs.hsdp("outer", "inner")),
}
OPTIMIZERS = {
    "AdamW": lambda p: fs.ShardedOptimizer(p, torch.optim.AdamW, lr=1e-2),
    "SGD": lambda p: fs.ShardedOptimizer(p, torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adamw with averages": lambda p: fs.ShardedOptimizer(p, fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.9)),
}


class Net(nn.Module):
    """With a tie, a frozen layer, a buffer, and a layer that has no gradient."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(7))

    def forward(self, x):
        h = self.embed(x) * self.scale
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(self.norm(self.frozen(h)))


def made(world, comm, kind, seed):
    _, strategy = WORLDS[world]
    model = fs.shard_module(Net(seed), mesh=comm, strategy=strategy, units=[nn.Linear])
    return model, OPTIMIZERS[kind](model.parameters())


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(step))
        descend(nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()), optimizer)


def whole(model):
    return {name: value.clone() for name, value in model.named_full_parameters()} | dict(model.named_buffers())


def equal(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@every(12, old=WORLDS, new=WORLDS, kind=OPTIMIZERS)
def test_a_module_and_its_optimizer_go_on_elsewhere(tmp_path, old, new, kind):
    """A fresh one on another mesh, before its first step, has all that the old one had: as one that was given whole tensors."""

    def save(comm):
        model, optimizer = made(old, comm, kind, 0)
        train(model, optimizer, range(2))
        fs.checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=2, comm=model.comm)
        return whole(model)

    def load(comm):
        model, optimizer = made(new, comm, kind, 1)
        fs.checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer}, comm=model.comm)
        loaded = whole(model)
        fs.checkpoint.save(tmp_path / "again", {"model": model, "optimizer": optimizer}, step=2, comm=model.comm)
        train(model, optimizer, [2])
        return loaded, whole(model)

    saved = simulate(WORLDS[old][0], save)[0]
    for loaded, after in simulate(WORLDS[new][0], load):
        assert equal(saved, loaded)
        assert not equal(saved, after)
    first, again = fs.checkpoint.latest(tmp_path), fs.checkpoint.latest(tmp_path / "again")
    assert first.tensor_names == again.tensor_names
    assert first.manifest.values == again.manifest.values
    assert all(torch.equal(first.tensor(name), again.tensor(name)) for name in first.tensor_names)


def test_a_module_trains_on_to_the_bit_after_a_restart(tmp_path):
    """Also with a Saver under way while the next step runs, and in place."""
    root = str(tmp_path)

    def run(comm):
        model, optimizer = made("zero1 on 2", comm, "AdamW", 0)
        with fs.checkpoint.Saver(root, model.comm) as saver:
            for step in range(4):
                train(model, optimizer, [step])
                if step == 1:
                    saver.save({"model": model, "optimizer": optimizer}, step=step)
        alone = whole(model)
        model, optimizer = made("zero1 on 2", comm, "AdamW", 1)
        train(model, optimizer, [7])  # another past
        fs.checkpoint.load(root, {"model": model, "optimizer": optimizer}, comm=model.comm, donate=True)
        train(model, optimizer, [2, 3])
        return equal(alone, whole(model))

    assert processes(fs.Mesh({"dp": 2}), run) == [True, True]


def test_weights_alone_for_a_function_or_a_plain_module(tmp_path):
    def save(comm):
        model, optimizer = made("zero3 on 3", comm, "AdamW", 0)
        train(model, optimizer, range(2))
        fs.checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=2, comm=model.comm)
        return whole(model)

    saved = simulate(fs.Mesh({"dp": 3}), save)[0]
    plain = Net(5)
    fs.checkpoint.load(tmp_path, plain, comm=fs.SingleComm(), subtree="model")
    assert equal(saved, {name: value.detach() for name, value in plain.named_parameters()} | dict(plain.named_buffers()))


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.seen = b""

    def get_extra_state(self):
        return torch.tensor([*self.seen], dtype=torch.uint8)

    def set_extra_state(self, state):
        self.seen = bytes(state.tolist())


def test_extra_state_that_has_grown_loads_into_a_new_module_with_buffers_of_each_rank(tmp_path):
    model, other = Growing(), Growing()
    model.seen = b"1234567"
    fs.checkpoint.save(tmp_path, fs.checkpoint.ModuleWithPerRankBuffers(model), step=1, comm=fs.SingleComm())
    fs.checkpoint.load(tmp_path, fs.checkpoint.ModuleWithPerRankBuffers(other), comm=fs.SingleComm())
    assert other.seen == b"1234567"


def test_another_model_is_refused_before_anything_changes(tmp_path):
    comm = fs.SingleComm()
    model, optimizer = fs.shard_module(Net(), strategy=fs.zero3("dp"), mesh=comm), None
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, [0])
    fs.checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=1, comm=comm)
    other = Net()
    other.layers.append(nn.Linear(7, 7))
    other = fs.shard_module(other, strategy=fs.zero3("dp"), mesh=comm)
    before = whole(other)
    with pytest.raises(fs.errors.TreeError, match=r"'layers.2.bias' +not in the checkpoint; expected"):
        fs.checkpoint.load(tmp_path, other, comm=comm, subtree="model")
    assert equal(before, whole(other))
