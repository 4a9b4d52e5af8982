"""inject_hyperparams: numbers in the state, which all ranks set alike or hear that they did not."""

import optax
import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, OptionError, TreeError
from fsharp.testing import simulate
from tests.gpt_like import loss_fn
from tests.ranks import on_ranks
from tests.scheduling import assert_same, every, make_state, my_batches

TREE = {"w": torch.linspace(-1, 1, 33), "b": torch.linspace(1, 2, 5)}
DP = fs.Mesh({"dp": 3})
INJECTED = fs.optim.inject_hyperparams(fs.optim.adamw)


def start(comm, tx, strategy=fs.zero3, **options):
    layout = fs.plan(TREE, comm.mesh, strategy(*comm.mesh.names), **options)
    return layout, fs.init_state(tx, fs.shard(TREE, layout, comm), comm=comm)


def grads_at(step, layout, comm):
    g = torch.Generator().manual_seed(step)
    return fs.shard({name: torch.randn(x.shape, generator=g) for name, x in TREE.items()}, layout, comm, place="optim")


def train(comm, tx, between=lambda step, state: None, *, donate=False, steps=4, **options):
    layout, state = start(comm, tx, **options)
    for step in range(steps):
        between(step, state.opt)
        state = fs.update(tx, grads_at(step, layout, comm), state, comm=comm, donate=donate)
    return fs.full_tree(state.params, comm=comm), state


def set_in(find):
    """Between steps: another learning rate from the third on."""

    def between(step, opt):
        if step == 2:
            find(opt).hyperparams["learning_rate"] = 3e-3

    return between


def rate(count):
    return 1e-2 if count < 2 else 3e-3


NESTED = {
    "alone": (lambda tx: tx, lambda opt: opt),
    "chain": (lambda tx: fs.optim.chain(fs.optim.clip_by_global_norm(1.0), tx), lambda opt: opt[1]),
    "masked": (lambda tx: fs.optim.masked(tx, "w"), lambda opt: opt.inner_state),
    "partition": (lambda tx: fs.optim.partition({"w": tx, "b": fs.optim.sgd(0.1)}), lambda opt: opt.inner_states["w"]),
    "partition, patterns": (
        lambda tx: fs.optim.partition({"w": tx, "b": fs.optim.sgd(0.1)}, {"w": "w", "b": "b"}),
        lambda opt: opt.inner_states["w"],
    ),
    "apply_if_finite": (lambda tx: fs.optim.apply_if_finite(tx, 2), lambda opt: opt.inner_state),
}


@every(2, name=NESTED, strategy=[fs.ddp, fs.zero3], donate=[False, True])
@on_ranks(DP)
def test_a_number_that_is_set_is_used_from_then_on(comm, name, strategy, donate):
    around, find = NESTED[name]
    labels = {"w": "w", "b": "b"}
    tx = around(INJECTED(1e-2, weight_decay=0.1))
    found, state = train(comm, tx, set_in(find), donate=donate, strategy=strategy, labels=labels)
    expected, _ = train(comm, around(fs.optim.adamw(rate, weight_decay=0.1)), strategy=strategy, labels=labels)
    assert find(state.opt).hyperparams == {"learning_rate": 3e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8} | {
        "weight_decay": 0.1,
        "lr_scale": 1.0,
    }
    assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(expected)))


def falling_on(rank):
    """Ranks compare a function by name, and the numbers that it gives."""

    def falling(count):
        return 3e-3 if count > 1 and rank == 1 else 1e-2

    return falling


def nothing(step, opt):
    """Between steps."""


ALONE = {
    "sets a number": (lambda _: 1e-2, set_in(lambda opt: opt), r"(?s)inject_hyperparams\(\).*learning_rate  rank.*: 0.003"),
    "has a schedule": (falling_on, nothing, r"(?s)learning_rate  rank.*: 0.003"),
    "sets an unknown one": (
        lambda _: 1e-2, lambda step, opt: opt.hyperparams.update(lr=1.0),
        r"(?s)failed on rank 1.*missing or unknown.*'learning_rate', 'lr'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero3])
@pytest.mark.parametrize("what", ALONE)
def test_what_one_rank_alone_does_is_an_error_on_all(what, strategy):
    rate_of, between, text = ALONE[what]

    def rank_fn(comm):
        with pytest.raises(AgreementError, match=text) as error:
            train(comm, INJECTED(rate_of(comm.rank)), between if comm.rank == 1 else nothing, strategy=strategy)
        return str(error.value)

    assert len(set(simulate(DP, rank_fn))) == 1


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"lr": 1.0}, TreeError, "hyper-parameters are missing or unknown"),
        ({"learning_rate": "fast"}, TreeError, r"hyperparams\['learning_rate'\] is 'fast', expected a number"),
        ({"learning_rate": True}, TreeError, r"hyperparams\['learning_rate'\] is True, expected a number"),
    ],
)
def test_what_is_no_hyper_parameter_is_refused(wrong, error, text):
    with pytest.raises(error, match=text):
        train(fs.SingleComm(), INJECTED(1e-2), lambda step, opt: opt.hyperparams.update(wrong))


@on_ranks(DP)
def test_a_number_that_the_factory_refuses_is_refused_on_all_ranks(comm):
    tx = fs.optim.inject_hyperparams(fs.optim.clip_by_global_norm)(1.0)
    with pytest.raises(OptionError, match=r"max_norm is 0.0, expected a positive number"):
        train(comm, tx, lambda step, opt: opt.hyperparams.update(max_norm=0.0))


def test_one_number_in_several_types_is_one_number():
    values = [1, 1.0, torch.tensor(1.0)]

    def rank_fn(comm):
        return train(comm, INJECTED(1e-2), lambda step, opt: opt.hyperparams.update(learning_rate=values[comm.rank]))[0]

    first, *others = simulate(DP, rank_fn)
    for other in others:
        assert all(map(torch.equal, optree.tree_leaves(other), optree.tree_leaves(first)))


def test_the_state_that_is_given_keeps_its_numbers():
    comm, tx = fs.SingleComm(), INJECTED(lambda count: 0.1 * count)
    layout, state = start(comm, tx)
    later = fs.update(tx, grads_at(0, layout, comm), fs.update(tx, grads_at(0, layout, comm), state, comm=comm), comm=comm)
    assert (state.opt.hyperparams["learning_rate"], later.opt.hyperparams["learning_rate"]) == (0.0, 0.1)
    assert (state.opt.count, later.opt.count) == (0, 2)


def test_ranks_compare_40_bytes_an_update():
    def rank_fn(comm):
        tx = INJECTED(1e-2)
        layout, state = start(comm, tx)
        counting = fs.collectives.CountingComm(comm)
        fs.update(tx, grads_at(0, layout, comm), state, comm=counting)
        return dict(counting.calls)

    assert simulate(DP, rank_fn)[1] == {fs.collectives.Call("all_gather", "dp", 2 * 40): 1}


def test_static_args_are_passed_on():
    tx = fs.optim.inject_hyperparams(fs.optim.adamw, static_args=["weight_decay", "b1"])(
        1e-2, weight_decay=lambda path: 0.5 if path == "w" else 0.0
    )
    found, state = train(fs.SingleComm(), tx)
    expected, _ = train(fs.SingleComm(), fs.optim.adamw(1e-2, weight_decay={"**": 0.0, "w": 0.5}))
    assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(expected)))
    assert set(state.opt.hyperparams) == {"learning_rate", "b2", "eps", "lr_scale"}


def test_momentum_that_passes_through_zero_is_that_of_optax():
    """The kernel keeps no momentum at zero."""
    values = [0.9, 0.0, 0.0, 0.9, 0.5]

    def between(step, opt):
        opt.hyperparams["momentum"] = values[step]

    found, _ = train(fs.SingleComm(), fs.optim.inject_hyperparams(fs.optim.sgd)(0.1, 0.9, nesterov=True), between, steps=5)
    comm = fs.SingleComm()
    layout, _ = start(comm, fs.optim.sgd(0.1))
    tx, theirs = optax.inject_hyperparams(optax.sgd)(0.1, 0.9, nesterov=True), {k: x.numpy() for k, x in TREE.items()}
    state = tx.init(theirs)
    for step in range(5):
        between(step, state)
        grads = {k: x.numpy() for k, x in fs.full_tree(grads_at(step, layout, comm), comm=comm).items()}
        updates, state = tx.update(grads, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    for name, x in theirs.items():
        torch.testing.assert_close(found[name], torch.tensor(x.tolist()), rtol=1e-5, atol=1e-6)


@on_ranks(fs.Mesh({"dp": 2}))
def test_under_a_scheduler_it_is_the_same(comm):
    results = []
    for scheduled in (False, True):
        tx = INJECTED(1e-2)
        step = fs.train_step(loss_fn, tx, donate=True)
        run = fs.Scheduler(comm)(step) if scheduled else lambda s, b, step=step: step(s, b, comm)
        state = make_state(comm, "zero3", tx=tx)
        for i, batch in enumerate(my_batches(comm, 4)):
            set_in(lambda opt: opt)(i, state.opt)
            state, _ = run(state, batch)
        results.append(fs.full_tree(state.params, comm=comm))
    assert_same(*results)
