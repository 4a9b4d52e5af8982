"""Backward passes of a module: several, in odd orders, through odd outputs, and ones that fail."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsharp as fs
from fsharp.errors import LossError, ScheduleError
from fsharp.testing import DebugPolicy, simulate
from tests import modules
from tests.modules import Block, close, descend, each_strategy, refused, train, values, wrap
from tests.scheduling import DP, assert_same

# What its users do besides


def two_losses(model, x, y):
    first, second = model(x, y)["loss"], model(x, y.flip(0) * 0)["loss"]
    first.backward()
    second.backward()


def one_graph_twice(model, x, y):
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()


def of_inputs_first(model, x, y):
    hidden = F.one_hot(x, modules.DIM * 2)[:, : modules.DIM].float().requires_grad_()
    (slope,) = torch.autograd.grad(model.layers[0](hidden).sum(), hidden)
    assert slope.abs().sum() > 0
    model(x, y)["loss"].backward()


USES = [two_losses, one_graph_twice, of_inputs_first]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@each_strategy
def test_backward_passes(use, strategy):
    def steps(model, optimizer, data):
        for x, y in data:
            use(model, x, y)
            optimizer.step()
            optimizer.zero_grad()

    modules.assert_trains_as_alone(strategy, steps, count=2, units=[Block])


class Carrier:
    """No pytree."""

    def __init__(self, hidden):
        self.hidden = hidden


class Deep(nn.Linear):
    """Returns an object, its weight, or nothing of its result."""

    way = ""

    def forward(self, x, found):
        out = super().forward(x)
        if self.way == "object":
            return Carrier(out)
        if self.way == "weight":
            return out, self.weight
        if self.way == "list":
            found.append(out.square().mean())
        if self.way == "attribute":
            self.aux = out.square().mean()
        return out


class Wide(nn.Module):
    """A root around :class:`Deep`."""

    def __init__(self, way):
        super().__init__()
        self.deep, self.last = Deep(4, 4), nn.Linear(4, 4)
        self.deep.way = way

    def forward(self, x):
        found = []
        out = self.deep(x, found)
        if self.deep.way == "object":
            return Carrier(self.last(out.hidden))
        if self.deep.way == "weight":
            return self.last(out[0]).mean() + out[1].square().sum()
        if self.deep.way == "attribute":
            self.last(out)
            return None
        return self.last(out).mean() + sum(found)


@pytest.mark.parametrize("way", ["object", "weight", "list", "attribute"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_modules_return_and_fill(way, strategy):
    def steps(model, optimizer, data):
        for i in range(3):
            out = model(torch.linspace(0, 1, 12).view(3, 4) + i)
            loss = {"object": lambda: out.hidden.square().sum(), "attribute": lambda: model.deep.aux}.get(way, lambda: out)()
            descend(loss, optimizer)

    made = lambda: Wide(way)  # noqa: E731
    modules.assert_trains_as_alone(strategy, steps, made, optimizer=torch.optim.SGD, settings={"lr": 0.1}, units=[Deep])


class Fails(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("bad luck")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_an_error_in_a_backward(strategy):
    """Until zero_grad there is no step; then all is as if nothing had been."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        expected, other = wrap(comm, strategy)
        for i, (x, y) in enumerate(modules.batches(comm, 4)):
            if i == 2:
                optimizer.zero_grad()
                hook = model.layers[1].register_forward_pre_hook(lambda module, args: Fails.apply(args[0]))
                with pytest.raises(ZeroDivisionError):
                    model(x, y)["loss"].backward()
                hook.remove()
                with pytest.raises(LossError, match="were lost because of an earlier error"):
                    optimizer.step()
            train(model, optimizer, [(x, y)])
            train(expected, other, [(x, y)])
        return values(model), values(expected)

    for mine, expected in simulate(DP, rank_fn):
        assert_same(mine, expected)


def test_an_error_that_costs_gradients_is_not_passed_over():
    def rank_fn(comm):
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

    simulate(fs.Mesh({"dp": 1}), rank_fn)


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
