"""Modules for tests of the wrapper: blocks, a tied head, buffers, LoRA, hooks, checkpoints; and how they train unsharded."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.testing import DebugPolicy, simulate
from tests.scheduling import STRATEGIES

VOCAB, DIM = 11, 6
each_strategy = pytest.mark.parametrize(
    "strategy", ["zero1", "zero3", *(pytest.param(name, marks=pytest.mark.deep) for name in ("ddp", "zero2"))]
)
"""``test_module.test_as_the_module_alone`` has the others with every kind of model."""

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
_seeds = threading.RLock()  # simulated ranks share the global generator


class Block(nn.Module):
    """Uneven sizes, biases, a scalar."""

    def __init__(self, dim=DIM, hidden=7):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, layers=3, *, tied=False, checkpointed=None, twice=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=not tied)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.checkpointed, self.twice = checkpointed, twice
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, x):
        for layer in self.layers:
            for _ in range(2 if self.twice else 1):
                x = layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed)
        return x

    def forward(self, x, y=None):
        self.calls += 1
        out = self.head(self.hidden(self.embed(x)))
        return out if y is None else {"loss": F.cross_entropy(out, y), "logits": out}


class Adapter(nn.Module):
    """A frozen linear map and a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.a, self.b = base.requires_grad_(False), nn.Linear(DIM, 2, bias=False), nn.Linear(2, VOCAB, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def frozen(net):
    net.embed.requires_grad_(False)
    net.layers[1].requires_grad_(False)
    net.layers[2].up.bias.requires_grad_(False)


def adapted(net):
    net.requires_grad_(False)
    net.head = Adapter(net.head)


KINDS: dict[str, tuple[dict, Callable[[Net], None]]] = {
    "plain": ({}, lambda net: None),
    "tied": ({"tied": True}, lambda net: None),
    "frozen": ({}, frozen),
    "adapted": ({}, adapted),
    "checkpointed": ({"checkpointed": False}, lambda net: None),
    "checkpointed, reentrant": ({"checkpointed": True}, lambda net: None),
    "twice": ({"twice": True}, lambda net: None),
}


def make(kind="plain", seed=0) -> Net:
    """A model of one of the kinds; the same whenever it is made."""
    options, change = KINDS[kind]
    with _seeds:
        torch.manual_seed(seed)
        net = Net(**options)
        change(net)
        return net


class RankOf(NamedTuple):
    """What :func:`batches` asks of a Comm."""

    mesh: fs.Mesh
    rank: int


def batches(comm: fs.Comm | RankOf | None, count: int, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's inputs and targets, ``size`` of them a step; without a Comm those of all of two ranks."""
    g = torch.Generator().manual_seed(1)
    ranks, rank = (comm.mesh.size, comm.rank) if comm is not None else (2, None)
    drawn = [torch.randint(0, VOCAB, (ranks * size,), generator=g) for _ in range(count)]
    part = slice(None) if rank is None else slice(rank * size, (rank + 1) * size)
    return [(x[part], (x * 3 % VOCAB)[part]) for x in drawn]


def wrap(comm, strategy, kind="plain", *, units=(Block,), optimizer=torch.optim.AdamW, **options):
    """A sharded model and its optimizer."""
    strategy = STRATEGIES[strategy][1] if isinstance(strategy, str) else strategy
    model = fs.shard_module(
        make(kind), mesh=comm, strategy=strategy, units=units and list(units), policy=DebugPolicy(poison=True), **options
    )
    return model, fs.ShardedOptimizer(model.parameters(), optimizer, **ADAMW)


def values(model):
    """All parameters in full, by name."""
    whole = dict(model.named_full_parameters())
    return {name: whole[name] for name, _ in model.named_parameters()}


def detached(module):
    """The parameters of a module that is not sharded, by name."""
    return {name: p.detach() for name, p in module.named_parameters()}


def train(model, optimizer, data, *, parts=1):
    """Losses of some steps in the usual loop, each of some microbatches."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        for i, (xs, ys) in enumerate(zip(x.chunk(parts), y.chunk(parts))):
            if i < parts - 1:
                with model.accumulate():
                    (model(xs, ys)["loss"] / parts).backward()
                continue
            loss = model(xs, ys)["loss"] / parts
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def descend(loss, optimizer):
    """A backward and a step, whose gradients go."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def alone(kind, steps, **options):
    """The module trained by itself, on the batches of both ranks."""
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, **options})
    losses = []
    for x, y in batches(None, steps):
        loss = model(x, y)["loss"]
        descend(loss, optimizer)
        losses.append(loss.detach())
    return losses, detached(model)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def seeded(make):
    """``make()`` with the same random numbers whenever it is called, on whichever rank."""
    with _seeds:
        torch.manual_seed(0)
        return make()


def assert_trains_as_alone(strategy, steps, made=make, *, optimizer=torch.optim.AdamW, settings=ADAMW, count=4, **options):
    """``steps(model, optimizer, data)`` on ranks, and on the module alone with the data of all: the same to rounding.

    Returns the module's steps, of all ranks.
    """
    mesh, how = STRATEGIES[strategy]

    def rank_fn(comm):
        model = fs.shard_module(seeded(made), mesh=comm, strategy=how, policy=DebugPolicy(poison=True), **options)
        own = fs.ShardedOptimizer(model.parameters(), optimizer, **settings)
        steps(model, own, batches(comm, count, size=8 // comm.mesh.size))
        return values(model), model.scheduled_step

    whole = seeded(made)
    steps(whole, optimizer(whole.parameters(), **settings), batches(None, count))
    found = simulate(mesh, rank_fn)
    for mine, _ in found:
        close(mine, detached(whole))
    return [step for _, step in found]


def refused(comm, strategy="zero3"):
    model, optimizer = wrap(comm, strategy)
    [(x, y)] = batches(comm, 1)
    return model, optimizer, x, y
