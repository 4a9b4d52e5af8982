"""Gradients divided twice or never, states donated or of another optimizer: refused by name, before anything is sent."""

from functools import partial

import pytest
import torch

import fsharp as fs
from fsharp.errors import MeshError, TreeError
from fsharp.testing import simulate
from tests.gpt_like import loss_fn, make_batches, make_params
from tests.ranks import on_ranks

DP = fs.Mesh({"dp": 2})


def on_two_ranks(fn, strategy=fs.zero3, scheduled=False):
    """``fn(state, batch, comm)`` on two ranks, the counted comm of each."""

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        layout = fs.plan(make_params(), DP, strategy("dp"), units="layers.*")
        state = fs.init_state(fs.optim.adamw(1e-2), fs.shard(make_params(), layout, comm, place="optim"), comm=comm)
        batch = make_batches(1, 8, seed=comm.rank)[0]
        if scheduled:
            fs.Scheduler(counting)(lambda state, batch, comm: fn(state, batch, comm, counting))(state, batch)
        else:
            fn(state, batch, counting, counting)

    simulate(DP, rank_fn)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero1, fs.zero3])
def test_gradients_divided_twice_or_never(strategy, scheduled):
    def use(state, batch, comm, counting):
        loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
        sums = fs.reduce_scatter(grads, comm=comm)
        before = counting.num_calls
        with pytest.raises(TreeError, match="is the sum that value_and_grad"):
            fs.update(fs.optim.adamw(1e-2), sums, state, comm=comm)
        assert counting.num_calls == before
        _, means = fs.average(loss, sums, comm=comm)
        before = counting.num_calls
        with pytest.raises(TreeError, match="'embed' have been divided by average"):
            fs.average(loss, means, comm=comm)
        assert counting.num_calls == before
        fs.update(fs.optim.adamw(1e-2), means, state, comm=comm)

    on_two_ranks(use, strategy, scheduled)


def test_average_over_the_ranks_of_another_mesh_is_refused():
    """The loss would be divided by the weight of other ranks."""
    here, other = (fs.SingleComm(fs.Mesh({axis: 1})) for axis in ("dp", "tp"))
    params = fs.shard({"w": torch.ones(4)}, fs.plan({"w": torch.ones(4)}, here.mesh, fs.zero3("dp")), here)
    loss, grads = fs.value_and_grad(lambda p, x, comm: fs.forward(lambda p: p["w"].sum() * x, p, comm=comm))(
        params, torch.ones(()), comm=here
    )
    sums = fs.reduce_scatter(grads, comm=here)
    with pytest.raises(MeshError, match=r"(?s)average\(\): the Comm is on another mesh than the layout.*tp=1"):
        fs.average(loss, sums, comm=other)
    assert fs.average(loss, sums, comm=here)[0].loss == 4


def test_gradients_that_the_caller_has_divided_are_taken():
    import optree

    def use(state, batch, comm, counting):
        _, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
        mine = optree.tree_map(lambda g: g / 8, fs.reduce_scatter(grads, comm=comm))
        fs.update(fs.optim.adamw(1e-2), mine, state, comm=comm)

    on_two_ranks(use)


OTHERS = {
    "sgd": fs.optim.sgd(0.1, momentum=0.9),
    "chain(clip_by_global_norm, adamw)": fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-2)),
    "with_ema(adamw)": fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.9),
}


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_another_optimizer(name, scheduled):
    def use(state, batch, comm, counting):
        loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
        _, means = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
        before = counting.num_calls
        with pytest.raises(TreeError, match="another transformation") as caught:
            fs.update(OTHERS[name], means, state, comm=comm)
        assert counting.num_calls == before
        assert "state of   adamw" in str(caught.value)
        assert f"update by  {name}" in str(caught.value)
        new = fs.update(fs.optim.adamw(3e-2, weight_decay=0.1), means, state, comm=comm)  # other numbers are no other optimizer
        assert new.made_by == state.made_by

    on_two_ranks(use, scheduled=scheduled)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_an_error_of_an_update_says_whether_the_state_was_overwritten(donate, is_late):
    """One of two optimizers fails: before the other one has written to its parameters, or afterwards."""

    def fail(*trees):
        raise ValueError("too large")

    comm, tree = fs.SingleComm(), {"a": torch.ones(3), "b": torch.ones(3)}
    both = [("a", fs.optim.adamw(0.1)), ("b", fs.optim.Transform(lambda params: (), fail, {}))]
    tx = fs.optim.partition(dict(both if is_late else both[::-1]))
    params = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp"), labels={"a": "a", "b": "b"}), comm)
    state = fs.init_state(tx, params, comm=comm)
    with pytest.raises(ValueError, match="too large") as caught:
        fs.update(tx, params, state, comm=comm, donate=donate)
    notes = [note for note in getattr(caught.value, "__notes__", []) if "overwritten parts of the state" in note]
    assert bool(notes) == (donate and is_late)
    assert torch.equal(fs.full_tree(state.params, comm=comm)["a"], tree["a"]) != bool(notes)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero1, fs.zero3])
def test_a_donated_state_used_again(strategy, scheduled):
    tx = fs.optim.apply_if_finite(fs.optim.adamw(1e-2), 5)

    def rank_fn(comm):
        layout = fs.plan(make_params(), DP, strategy("dp"), units="layers.*")
        start = fs.shard(make_params(), layout, comm, place="optim")
        state = fs.init_state(tx, start, comm=comm, donate=True)
        with pytest.raises(TreeError, match=r"init_state\(\): unit 'embed' belongs to a donated state"):
            fs.init_state(tx, start, comm=comm)
        batch = make_batches(1, 8, seed=comm.rank)[0]
        step = fs.train_step(loss_fn, tx, donate=True)
        run = fs.Scheduler(comm)(step) if scheduled else lambda *args: step(*args, comm)
        new, _ = run(state, batch)
        new, _ = run(new, batch)
        uses = {
            "value_and_grad": lambda: run(state, batch),
            "forward": lambda: fs.forward(torch.sum, state.params["embed"], comm=comm),
            "full_tree": lambda: fs.full_tree(state.params, comm=comm),
            "update": lambda: fs.update(tx, fs.trainable(new.params), new._replace(opt=state.opt), comm=comm),
        }
        for where, use in uses.items():
            with pytest.raises(TreeError, match=rf"{where}\(\): unit 'embed' belongs to a donated state"):
                use()
        return fs.full_tree(new.params, comm=comm)["embed"]

    first, second = simulate(DP, rank_fn)
    assert torch.equal(first, second)


@pytest.mark.parametrize("release", [True, False])
@on_ranks(DP)
def test_parameters_changed_between_forward_and_backward(comm, release):
    tree = {"w": torch.ones(4, 4)}
    params = fs.shard(tree, fs.plan(tree, DP, fs.zero3("dp")), comm)

    def loss(p, x, comm):
        out = fs.forward(lambda q, x: x @ q["w"], p, x, comm=comm, release=release).square().sum()
        params.buffers[0].add_(1)
        return out

    x = torch.ones(2, 4, requires_grad=True)
    if release:
        with pytest.raises(TreeError, match=r"unit \(root\) were changed in place between its forward and its backward"):
            fs.value_and_grad(loss)(params, x, comm=comm)
    else:
        fs.value_and_grad(loss)(params, x, comm=comm)  # what was gathered is another tensor


@pytest.mark.parametrize("under_no_grad", [False, True])
@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero3])
def test_a_function_that_writes_to_one_of_several_parameters(strategy, under_no_grad):
    """torch refuses the write to a view of a buffer, as other parameters are views of it: the error names the unit."""

    def writes(p, x):
        x = torch.tanh(x @ p["first"])
        with torch.set_grad_enabled(not under_no_grad):
            p["second"].mul_(2.0)
        return x @ p["second"]

    def use(comm):
        tree = {"layer": {"first": torch.eye(4), "second": torch.eye(4)}}
        params = fs.shard(tree, fs.plan(tree, DP, strategy("dp"), units="layer"), comm)

        def loss(fn, params, x, comm):
            return fs.forward(fn, params["layer"], x, comm=comm).sum()

        with pytest.raises(TreeError, match=r"modified inplace. Parameters of unit 'layer' are such views, and the func"):
            fs.value_and_grad(partial(loss, writes))(params, torch.ones(2, 4), comm=comm)
        with pytest.raises(RuntimeError, match="shapes"):
            fs.value_and_grad(partial(loss, lambda p, x: x @ p["first"]))(params, torch.ones(2, 3), comm=comm)

    simulate(DP, use)
