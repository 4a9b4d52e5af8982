"""From a module to functions and back, at any time, without a copy."""

from functools import partial

import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import ScheduleError, TreeError
from fsharp.testing import DebugPolicy, simulate
from tests import modules
from tests.modules import Block, train, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, FLAT, STRATEGIES, assert_same, every

MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32)


def pair(comm, strategy, precision=fs.Precision()):
    tx = fs.optim.adamw(1e-2, weight_decay=0.1)
    model = fs.shard_module(
        modules.make("tied"), mesh=comm, strategy=STRATEGIES[strategy][1], units=[Block], precision=precision,
        policy=DebugPolicy(poison=True),
    )  # fmt: skip
    return model, fs.ShardedOptimizer(model.parameters(), tx), tx


def pointers(tree):
    return {leaf.data_ptr() for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel()}


@every(8, strategy=FLAT, precision=(fs.Precision(), MIXED), scheduled=(False, True), parts=(1, 2))
@on_ranks(DP)
def test_there_and_back_is_the_same_training(comm, strategy, precision, scheduled, parts):
    """Two steps as a module, two as functions, two as a module: the bits of six steps, of some microbatches each."""

    straight, its_optimizer, _ = pair(comm, strategy, precision)
    model, optimizer, tx = pair(comm, strategy, precision)
    data = modules.batches(comm, 6)
    train(straight, its_optimizer, data, parts=parts)
    train(model, optimizer, data[:2], parts=parts)
    fn, params = model.functional()
    state = model.train_state
    assert pointers(params) == pointers(state.params)
    loss = lambda params, batch, comm: fn(params, *batch, comm=comm)["loss"]  # noqa: E731
    step = fs.train_step(loss, tx, microbatches=parts, donate=True)
    run = fs.Scheduler(comm)(step) if scheduled else lambda state, batch: step(state, batch, comm)
    for batch in data[2:4]:
        state, _ = run(state, batch)
    model.train_state = state
    assert pointers(model.train_state) == pointers(state), "nothing is copied"
    assert state.step == 4
    train(model, optimizer, data[4:], parts=parts)
    assert model.train_state.step == 6
    assert_same(values(model), values(straight))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_an_optimizer_of_torch_goes_on_in_other_memory(comm, strategy):
    data, found = modules.batches(comm, 4), []
    for crosses in (True, False):
        model, optimizer = wrap(comm, strategy)
        train(model, optimizer, data[:2])
        if crosses:
            model.train_state = optree.tree_map(
                lambda x: x.clone() if isinstance(x, torch.Tensor) else x, model.train_state, none_is_leaf=True
            )
        train(model, optimizer, data[2:])
        found.append((values(model), {p.path: p.local.clone() for p in model.parameters()}))
    assert_same(*found)


@every(2, strategy=["ddp", "zero1", "zero3"], precision=(fs.Precision(), MIXED), crosses=("a clone", "itself"))
@on_ranks(DP)
def test_parameters_that_callers_hold_go_on_in_other_memory(comm, strategy, precision, crosses):
    """As in plain torch: an optimizer of torch.optim and a list have the objects that the module has."""
    found, data = [], modules.batches(comm, 4)
    for assigns in (True, False):
        model, _ = wrap(comm, strategy, precision=precision)
        held, optimizer = list(model.parameters()), torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, data[:2])
        optimizer.zero_grad()
        if assigns:
            copy = (lambda x: x.clone()) if crosses == "a clone" else lambda x: x
            model.train_state = optree.tree_map(
                lambda x: copy(x) if isinstance(x, torch.Tensor) else x, model.train_state, none_is_leaf=True
            )
        train(model, optimizer, data[2:])
        with torch.no_grad():
            held[0].mul_(2)
            losses = model(*data[0])["loss"]
        assert all(mine is now for mine, now in zip(held, model.parameters(), strict=True))
        found.append(values(model) | {"loss": losses})
    assert_same(*found)


@on_ranks(DP)
def test_states_of_something_else_are_refused(comm):
    model, _, _ = pair(comm, "zero3")
    other, _, _ = pair(comm, "zero1")
    before = values(model)
    with pytest.raises(TreeError, match=r"train_state: params are not those of this module. Got unit .*'embed'"):
        model.train_state = other.train_state
    mixed, _, _ = pair(comm, "zero3", MIXED)
    with pytest.raises(TreeError, match=r"params are not those"):
        model.train_state = mixed.train_state
    less = model.train_state.params
    with pytest.raises(TreeError, match=r"Got unit none, expected"):
        model.train_state = model.train_state._replace(params={"embed": less["embed"]})
    x, y = modules.batches(comm, 1)[0]
    model(x, y)["loss"].backward()
    with pytest.raises(ScheduleError, match=r"train_state: a step is under way"):
        model.train_state = model.train_state
    model.zero_grad()
    assert_same(values(model), before)


@pytest.mark.parametrize("grad", [True, False])
@on_ranks(DP)
def test_a_state_that_was_donated_and_not_given_back_is_refused(comm, grad):
    model, _, tx = pair(comm, "zero3")
    fn, _ = model.functional()
    (batch,) = modules.batches(comm, 1)
    step = fs.train_step(lambda params, batch, comm: fn(params, *batch, comm=comm)["loss"], tx, donate=True)
    state, _ = step(model.train_state, batch, comm)
    with pytest.raises(TreeError, match=r"unit 'embed' belongs to a donated state"), torch.set_grad_enabled(grad):
        model.layers[0](torch.zeros(2, 4))
    model.train_state = state
    model(*batch)


@every(2, strategy=["ddp", "zero2", "zero3", "hsdp"], scheduled=[False, True])
def test_sharpness_aware_minimization_is_that_of_plain_torch(strategy, scheduled):
    """Two gradients a step, the second where the first leads to: a module's step has one, its function as many as one likes."""
    mesh, place = STRATEGIES[strategy]
    radius, lr = 0.05, 0.1

    def rank_fn(comm):
        model = fs.shard_module(modules.make(), mesh=comm, strategy=place, units=[Block])
        fn, params = model.functional()
        tx = fs.optim.sgd(lr)
        grad = fs.value_and_grad(lambda params, batch, comm: fn(params, *batch, comm=comm)["loss"])

        def sam_step(state, batch, comm):
            loss, grads = grad(state.params, batch, comm=comm)
            _, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
            scale = radius / fs.optim.global_norm(grads, comm=comm)
            uphill = fs.gather(grads, comm=comm, to="params")
            near = optree.tree_map(lambda p, g: p + scale * g, state.params, uphill)
            loss, grads = grad(near, batch, comm=comm)
            metrics, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
            return fs.update(tx, grads, state, comm=comm), metrics

        step = fs.Scheduler(comm)(sam_step) if scheduled else partial(sam_step, comm=comm)
        state = fs.init_state(tx, params, comm=comm)
        for batch in modules.batches(comm, 3, size=8 // comm.mesh.size):
            state, _ = step(state, batch)
        return fs.full_tree(state.params, comm=comm)

    plain = modules.make()
    for x, y in modules.batches(None, 3):
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        plain(x, y)["loss"].backward()
        norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
        with torch.no_grad():
            for p in plain.parameters():
                p.add_(p.grad, alpha=float(radius / norm))
        plain.zero_grad()
        plain(x, y)["loss"].backward()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(before[name] - lr * p.grad)
        plain.zero_grad()
    for tree in simulate(mesh, rank_fn):
        mine = {".".join(map(str, path)): leaf for path, leaf in zip(optree.tree_paths(tree), optree.tree_leaves(tree))}
        modules.close(mine, modules.detached(plain))
