"""Backward passes of a module: several, in odd orders, through odd outputs, and ones that fail."""

import copy

import pytest
import torch

import fsharp as fs
from fsharp.errors import LossError, ScheduleError
from fsharp.testing import DebugPolicy, simulate
from tests import modules
from tests.modules import Block, close, refused, train, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, STRATEGIES, assert_same, every


class Fails(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("bad luck")


def in_a_forward(model, optimizer, x, y):
    with pytest.raises(IndexError):
        model(x + modules.VOCAB, y)


def in_a_backward(model, optimizer, x, y):
    hook = model.layers[1].register_forward_pre_hook(lambda module, args: Fails.apply(args[0]))
    with pytest.raises(ZeroDivisionError):
        model(x, y)["loss"].backward()
    hook.remove()
    with pytest.raises(LossError, match="were lost because of an earlier error"):
        optimizer.step()


def in_a_hook(model, optimizer, x, y):
    handle = model.head.weight.register_post_accumulate_grad_hook(lambda p: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x, y)["loss"].backward()
    handle.remove()


@every(2, error=[in_a_forward, in_a_backward, in_a_hook], strategy=["ddp", "zero3"])
@on_ranks(DP)
def test_after_an_error_all_is_as_if_nothing_had_been(comm, strategy, error):
    """With the next zero_grad(), in a first step and in one that follows a schedule."""
    (model, optimizer), (expected, other) = wrap(comm, strategy), wrap(comm, strategy)
    for i, (x, y) in enumerate(modules.batches(comm, 4)):
        if i % 2 == 0:
            optimizer.zero_grad()
            error(model, optimizer, x, y)
        train(model, optimizer, [(x, y)])
        train(expected, other, [(x, y)])
    assert all(isinstance(p, fs.modules.ShardedParameter) for p in model.parameters())
    assert_same(values(model), values(expected))


@on_ranks(fs.Mesh({"dp": 1}))
def test_an_error_that_costs_gradients_is_not_passed_over(comm):
    model, optimizer, x, y = refused(comm)
    with model.accumulate():
        model(x, y)["loss"].backward()
    pending = model(x, y)["loss"]
    with pytest.raises(IndexError):
        model(x + modules.VOCAB, y)
    with pytest.raises(ScheduleError, match="after the step that used it was over"):
        pending.backward()
    model(x, y)["loss"].backward()
    with pytest.raises(LossError, match="were lost because of an earlier error"):
        optimizer.step()
    train(model, optimizer, [(x, y)])


@on_ranks(DP)
def test_an_error_after_zero_grad_costs_no_gradients(comm):
    """Another forward waited for its backward then, so the step stayed open."""
    model, optimizer = wrap(comm, "zero3")
    for x, y in modules.batches(comm, 2):
        pending = model(x, y)["loss"]
        model(x, y)["loss"].backward()
        optimizer.zero_grad()
        with pytest.raises(IndexError):
            model(x + modules.VOCAB, y)
        del pending
        model(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def test_frozen_modules_pass_gradients_on():
    def rank_fn(comm):
        net = modules.make().requires_grad_(False)
        model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"), units=[Block], policy=DebugPolicy(poison=True))
        x = torch.linspace(0, 1, 12).view(2, 6).requires_grad_()
        model.layers[1](model.layers[0](x)).sum().backward()
        return x.grad

    net, x = modules.make(), torch.linspace(0, 1, 12).view(2, 6).requires_grad_()
    net.layers[1](net.layers[0](x)).sum().backward()
    for grad in simulate(DP, rank_fn):
        close(grad, x.grad)


class TwoUses(torch.nn.Module):
    """A unit that is used twice. The first use has a gradient in a ``late`` call alone, after the unit's last one otherwise."""

    def __init__(self):
        super().__init__()
        self.cell = torch.nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x, late):
        first = self.cell(x).tanh()
        return self.cell(x + (first if late else first.detach())).square().mean()


@every(2, strategy=["ddp", "hsdp", "zero1", "zero3"], sum_late=[True, False])
def test_a_gradient_that_comes_after_the_sum_of_its_unit_counts_once(strategy, sum_late):
    mesh, rule = STRATEGIES[strategy]
    torch.manual_seed(0)
    plain, data = TwoUses(), torch.arange(128.0, dtype=torch.float64).sin().view(4, 4, 2, 4)

    def rank_fn(comm):
        policy = DebugPolicy(sum_late=sum_late)
        model = fs.shard_module(copy.deepcopy(plain), mesh=comm, strategy=rule, units=[torch.nn.Linear], policy=policy)
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
        for i, x in enumerate(data):
            modules.descend(model(x[comm.rank], i > 1), optimizer)
        return values(model)

    found = simulate(mesh, rank_fn)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for i, x in enumerate(data):
        modules.descend(sum(plain(part, i > 1) for part in x[: mesh.size]) / mesh.size, optimizer)
    for each in found:
        for name, p in plain.named_parameters():
            close(each[name], p.detach())
