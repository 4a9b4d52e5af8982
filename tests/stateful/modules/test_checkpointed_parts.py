"""Activation checkpoints within a unit compute with whole parameters in the backward: the bits of plain torch."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import checkpoint as composed_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import LayoutError
from fsharp.testing import DebugPolicy, simulate
from tests.as_torch import Block, Part, keep, make, same_as_torch
from tests.modules import descend
from tests.ranks import on_ranks
from tests.scheduling import DP, every


def linear(self, h):
    return keep(lambda x: self.mlp.down(F.gelu(F.linear(x, self.mlp.up.weight, bias=self.mlp.up.bias))), h)


def transposed(self, h):
    return keep(lambda x: self.mlp.down(F.gelu(x @ self.mlp.up.weight.T + self.mlp.up.bias.detach())), h)


def within(self, h):
    return keep(lambda x: keep(self.mlp.down, F.gelu(self.mlp.up(x))), h)


def twice(self, h):
    return keep(self.mlp, keep(self.mlp, h))


PARTS = {
    "a module": lambda self, h: keep(self.mlp, h),
    "a function": linear,
    "views and copies": transposed,
    "one in another": within,
    "twice": twice,
    "two halves": lambda self, h: keep(self.mlp.down, F.gelu(keep(self.mlp.up, h))),
}


@every(4, strategy=["ddp", "zero1", "zero2", "zero3"], part=PARTS)
def test_a_part_of_a_unit(part, strategy):
    for step in same_as_torch(strategy, options={"checkpointed": PARTS[part]}):
        assert step.num_unscheduled_calls == 1
        assert step.last_call_status().kind == "planned"


@pytest.mark.parametrize("units", [None, [Part]])
def test_a_part_with_the_root_and_a_unit_in_a_part(units):
    same_as_torch("zero3", units=units, options={"checkpointed": lambda self, h: keep(lambda x: self.mlp(self.norm(x)), h)})


def frozen(model):
    for layer in model.layers:
        layer.mlp.up.requires_grad_(False)


def test_frozen_parameters_in_a_part():
    same_as_torch("zero3", frozen, options={"checkpointed": PARTS["a module"]})


def wrapped(model, kind=Block):
    check = lambda each: isinstance(each, kind)  # noqa: E731
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=check)


def composed(model):
    for layer in model.layers:
        composed_checkpoint(layer)


def composed_parts(model):
    for layer in model.layers:
        composed_checkpoint(layer.mlp)


WRAPPED = [
    (wrapped, lambda model: None, "layers.*"),
    (wrapped, lambda model: None, [Block]),
    (lambda model: wrapped(model, Part), lambda model: None, [Block]),
    (lambda model: None, lambda model: wrapped(model, Part), [Block]),
    (composed, lambda model: None, [Block]),
    (composed_parts, lambda model: None, [Block]),
    (lambda model: None, composed, [Block]),
]


@every(2, case=WRAPPED, strategy=["ddp", "zero3"])
def test_wrappers(case, strategy):
    before, after, units = case
    same_as_torch(strategy, before, after, units=units)


@on_ranks(DP)
def test_a_reentrant_checkpoint_of_a_part_is_refused(comm):
    checkpointed = lambda self, h: checkpoint(self.mlp, h, use_reentrant=True)  # noqa: E731
    model = fs.shard_module(make(checkpointed=checkpointed), mesh=comm, units=[Block])
    loss = model(torch.arange(4)).sum()
    with pytest.raises(LayoutError, match=r"'layers\.2\.mlp\..*' is used in a reentrant checkpoint.*use_reentrant=False"):
        loss.backward()
    model.zero_grad()


class Streams(nn.Module):
    """Keeps the iterator of a loader, and may leave another one."""

    def __init__(self, way):
        super().__init__()
        self.inner, self.way = nn.Linear(4, 4), way
        self.source = (torch.full((4,), float(i)) for i in range(8))

    def forward(self):
        if self.way == "returned":
            return (self.inner(x) for x in self.source)
        if self.way == "left":
            self.later, self.mapped = {"rows": iter([1, 2])}, [map(abs, [1])]
        return self.inner(next(self.source)).sum()


@pytest.mark.parametrize("way", ["kept", "left"])
@on_ranks(DP)
def test_an_attribute_that_is_a_generator(comm, way):
    def run(model, optimizer):
        for _ in range(3):
            descend(model(), optimizer)

    def made():
        model = Streams(way)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        return model

    whole, model = made(), fs.shard_module(made(), mesh=comm)
    run(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    run(model, fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    mine = dict(model.named_full_parameters())
    assert all(torch.equal(mine[name], p) for name, p in whole.named_parameters())


class _Pair(nn.Module):
    """A norm, and two linear maps in one checkpoint; each is a unit."""

    def __init__(self):
        super().__init__()
        self.scale, self.norm, self.up, self.down = (
            nn.Parameter(torch.ones(4)),
            nn.LayerNorm(4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )

    def forward(self, x):
        between = lambda x: self.down(self.up(x).tanh())  # noqa: E731
        return checkpoint(between, self.norm(x * self.scale), use_reentrant=False).square().sum()


def test_a_checkpoint_of_a_step_that_left_its_schedule_keeps_no_views_of_the_arena():
    """The backward of the first forward fills the arena; the second's checkpoint recomputes where its own backward reads."""

    def run(model, optimizer, accumulating):
        x = torch.arange(8.0).view(2, 4)
        model(x).backward()  # records a schedule, which has one forward
        optimizer.step()
        optimizer.zero_grad()
        first, second = model(x), model(x + 1)
        with accumulating():
            first.backward(retain_graph=True)
            first.backward()
        second.backward()
        optimizer.step()
        return model

    def rank_fn(comm):
        policy = DebugPolicy(poison=True)
        model = fs.shard_module(copy.deepcopy(whole), mesh=comm, units=[nn.Linear, nn.LayerNorm], policy=policy)
        run(model, fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1), model.accumulate)
        return dict(model.named_full_parameters())

    whole = _Pair()
    found = simulate(fs.Mesh({"dp": 2}), rank_fn)
    expected = dict(run(whole, torch.optim.SGD(whole.parameters(), lr=0.1), nullcontext).named_parameters())
    for mine in found:
        torch.testing.assert_close(mine, {name: p.detach() for name, p in expected.items()})
