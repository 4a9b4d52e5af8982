"""Checkpoints of units in calls of a module as a pure function: the backward computes with the parameters of the call."""

import threading
from functools import partial

import optree
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import ScheduleError, TreeError
from tests.ranks import on_ranks
from tests.scheduling import DP, FLAT, assert_same, every


class Block(nn.Module):
    """A layer whose forwards change statistics."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(torch.tanh(self.inner(x)).exp())


class Net(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.first, self.layers, self.keep = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(2)), keep

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.keep is None else self.keep(layer, x)
        return x.square().mean()


KEEPS = {"again": partial(checkpoint, use_reentrant=False), "reentrant": partial(checkpoint, use_reentrant=True)}


def make(comm, strategy, keep):
    torch.manual_seed(3)
    return fs.shard_module(Net(keep), mesh=comm, strategy=FLAT[strategy][1], units=[Block, nn.Linear])


def inputs(comm, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + comm.rank))


def leaves(tree, comm):
    return [leaf.clone() for leaf in optree.tree_leaves(fs.full_tree(tree, comm=comm))]


@every(2, strategy=["ddp", "zero3"], keep=KEEPS, is_scheduled=[False, True])
@on_ranks(DP)
def test_training_has_the_bits_of_calls_without_checkpoints(comm, strategy, keep, is_scheduled):
    """Also after the first update, when the module's own parameters are others."""

    def trained(comm, keep):
        model, tx = make(comm, strategy, keep), fs.optim.sgd(0.5)
        fs.ShardedOptimizer(model.parameters(), tx)
        (fn, _), state, before = model.functional(), model.train_state, [b.clone() for b in model.buffers()]
        step = fs.train_step(lambda params, x, comm: fn(params, x, comm=comm), tx, microbatches=1)
        call = fs.Scheduler(comm)(step) if is_scheduled else partial(step, comm=comm)
        for i in range(4):
            state, _ = call(state, inputs(comm, i))
        assert_same(list(model.buffers()), before)
        return leaves(state.params, comm)

    assert_same(trained(comm, KEEPS[keep]), trained(comm, None))


@pytest.mark.parametrize("keep", KEEPS)
@on_ranks(DP)
def test_several_calls_and_a_step_of_the_module_wait_for_their_backward(comm, keep):
    """Each computes again with its own parameters, in whatever order backwards run."""

    def gradients(comm, keep):
        model = make(comm, "zero3", keep)
        fn, params = model.functional()
        other = fs.layouts.map_units(lambda node: node.replace([b * 0.5 for b in node.buffers]), params)
        of_module = model(inputs(comm, 0))

        def loss(trees, batch, comm):
            return fn(trees[0], inputs(comm, 1), comm=comm) + 2 * fn(trees[1], inputs(comm, 2), comm=comm)

        _, grads = fs.value_and_grad(loss)((params, other), torch.zeros(()), comm=comm)
        of_module.backward()
        return leaves(fs.reduce_scatter(grads, comm=comm), comm), [p.grad.local.clone() for p in model.parameters()]

    assert_same(gradients(comm, KEEPS[keep]), gradients(comm, None))


@on_ranks(DP)
def test_a_call_keeps_its_parameters_only_as_long_as_its_graph(comm):
    model = make(comm, "zero3", KEEPS["again"])
    fn, params = model.functional()
    calls = model._fsharp[0].calls
    for i in range(3):
        loss = fn(params, inputs(comm, i).requires_grad_(), comm=comm)
        assert [source() is not None for _, source in calls._functional_calls] == [True]
        del loss
    assert [source() for _, source in calls._functional_calls] == [None]


def test_calls_of_two_threads_that_have_the_same_numbers_are_refused():
    model = make(fs.SingleComm(fs.Mesh({"dp": 1})), "zero3", KEEPS["again"])
    fn, params = model.functional()
    losses = []
    for _ in range(2):
        call = partial(fn, params, torch.ones(5, 6, requires_grad=True), comm=model.comm)
        thread = threading.Thread(target=lambda call=call: losses.append(call()))
        thread.start()
        thread.join()
    with pytest.raises(ScheduleError, match="several threads have called"):
        losses[0].backward()


def test_a_state_without_an_optimizer_is_refused_by_name():
    model, tx = make(fs.SingleComm(fs.Mesh({"dp": 1})), "zero3", None), fs.optim.adamw(1e-2)
    fn, _ = model.functional()
    step = fs.train_step(lambda params, x, comm: fn(params, x, comm=comm), tx)
    with pytest.raises(TreeError, match=r"no optimizer state.*\n.*adamw(.|\n)*fs.ShardedOptimizer\(model.parameters\(\), tx\)"):
        step(model.train_state, inputs(model.comm, 0), model.comm)
    fs.ShardedOptimizer(model.parameters(), tx)
    step(model.train_state, inputs(model.comm, 0), model.comm)
