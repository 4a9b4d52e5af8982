"""apply_if_finite and MultiSteps: which updates are made, what the state says of it, and what is kept."""

import math

import jax
import jax.numpy as jnp
import optax
import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError
from fsharp.testing import simulate
from tests.ranks import on_ranks

TREE = {"w": torch.linspace(-1, 1, 33), "b": torch.linspace(1, 2, 5), "scale": torch.tensor(3.0)}


def start(comm, tx, strategy=fs.zero3, **options):
    layout = fs.plan(TREE, comm.mesh, strategy(*comm.mesh.names), **options)
    return layout, fs.init_state(tx, fs.shard(TREE, layout, comm, place="optim"), comm=comm)


def grads_at(step):
    g = torch.Generator().manual_seed(step)
    return {name: torch.randn(x.shape, generator=g) for name, x in TREE.items()}


def arrays(tree):
    return {name: jnp.asarray(x.numpy()) for name, x in tree.items()}


BAD = [False, True, True, False, True, True, True, True, False, True]


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero3])
@pytest.mark.parametrize("limit", [0, 2])
def test_apply_if_finite_counts_as_optax_does_and_gives_up(strategy, limit):
    def given(step):
        return grads_at(step) | ({"scale": torch.tensor(math.inf)} if BAD[step] else {})

    def rank_fn(comm):
        tx, rows = fs.optim.apply_if_finite(fs.optim.trace(0.9), limit), []
        layout, state = start(comm, tx, strategy)
        for step in range(len(BAD)):
            state = fs.update(tx, fs.shard(given(step), layout, comm, place="optim"), state, comm=comm)
            opt = state.opt
            is_finite = bool(fs.full_tree(state.params, comm=comm)["scale"].isfinite())
            rows.append((opt.notfinite_count, opt.last_finite, opt.total_notfinite, is_finite))
        return rows

    tx, params, expected = optax.apply_if_finite(optax.trace(0.9), limit), arrays(TREE), []
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(len(BAD)):
        updates, state = update(arrays(given(step)), state, params)
        params = optax.apply_updates(params, updates)
        counts = (int(state.notfinite_count), bool(state.last_finite), int(state.total_notfinite))
        expected.append((*counts, bool(jnp.isfinite(params["scale"]))))
    assert not expected[-1][3]
    for rows in simulate(fs.Mesh({"dp": 3}), rank_fn):
        assert rows == expected


@on_ranks(fs.Mesh({"dp": 3}))
def test_apply_if_finite_takes_large_values_for_finite(comm):
    tx = fs.optim.apply_if_finite(fs.optim.trace(0.9), 2)
    layout, state = start(comm, tx)
    large = {name: torch.full_like(x, 3e38) for name, x in TREE.items()}  # their sum is infinite
    assert fs.update(tx, fs.shard(large, layout, comm, place="optim"), state, comm=comm).opt.total_notfinite == 0


@on_ranks(fs.Mesh({"dp": 3}))
def test_apply_if_finite_gives_up_on_all_ranks_or_none(comm):
    tx = fs.optim.apply_if_finite(fs.optim.sgd(1.0), 2)
    layout, state = start(comm, tx)
    state = state._replace(opt=state.opt._replace(notfinite_count=2 * (comm.rank == 1)))
    grads = fs.shard(grads_at(0) | {"scale": torch.tensor(math.inf)}, layout, comm, place="optim")
    with pytest.raises(AgreementError, match=r"apply_if_finite\(\).*\n  notfinite_count  rank.*: 0\n.*rank 1: 2"):
        fs.update(tx, grads, state, comm=comm)


@pytest.mark.parametrize("k", [1, 3])
def test_multi_steps_states_are_those_of_optax(k):
    def rank_fn(comm):
        tx, rows = fs.optim.MultiSteps(fs.optim.trace(0.9), k), []
        layout, state = start(comm, tx)
        for step in range(7):
            state = fs.update(tx, fs.shard(grads_at(step), layout, comm, place="optim"), state, comm=comm)
            opt = state.opt
            rows.append((opt.mini_step, opt.gradient_step, fs.full_tree((opt.acc_grads, opt.inner_opt_state.trace), comm=comm)))
        return rows

    tx, params = optax.MultiSteps(optax.trace(0.9), k), arrays(TREE)
    state, update = tx.init(params), jax.jit(tx.update)
    rows = simulate(fs.Mesh({"dp": 3}), rank_fn)[2]
    for step in range(7):
        _, state = update(arrays(grads_at(step)), state, params)
        mini_step, gradient_step, trees = rows[step]
        assert (mini_step, gradient_step) == (int(state.mini_step), int(state.gradient_step))
        for mine, theirs in zip(trees, (state.acc_grads, state.inner_opt_state.trace), strict=True):
            for name, x in theirs.items():
                torch.testing.assert_close(mine[name], torch.tensor(x.tolist()), rtol=1e-5, atol=1e-6)


def test_multi_steps_nest():
    """Twice three: parameters change with every sixth gradient, by the mean of six."""
    comm, tx = fs.SingleComm(), fs.optim.MultiSteps(fs.optim.MultiSteps(fs.optim.sgd(1.0), 3), 2)
    layout, state = start(comm, tx)
    for step in range(6):
        assert torch.equal(state.params.buffers[0], fs.shard(TREE, layout, comm).buffers[0])
        state = fs.update(tx, fs.shard(grads_at(step), layout, comm, place="optim"), state, comm=comm)
    mean = torch.stack([grads_at(step)["w"] for step in range(6)]).mean(0)
    torch.testing.assert_close(fs.full_tree(state.params, comm=comm)["w"], TREE["w"] - mean)


def test_multi_steps_accumulate_in_the_accumulation_dtype():
    """256 + 1 is 256 in bfloat16."""
    comm = fs.SingleComm()
    tree = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    precision = fs.Precision(compute=torch.bfloat16, main=torch.bfloat16, accumulate=torch.float32)
    layout = fs.plan(tree, comm.mesh, fs.zero3("dp"), precision=precision)
    tx = fs.optim.MultiSteps(fs.optim.sgd(1.0), 3, use_grad_mean=False)
    state = fs.init_state(tx, fs.shard(tree, layout, comm), comm=comm)
    like = state.opt.acc_grads
    for value in (256.0, 1.0, -256.0):
        state = fs.update(tx, optree.tree_map(lambda x, v=value: torch.full_like(x, v), like), state, comm=comm)
    assert fs.full_tree(state.params, comm=comm)["w"].tolist() == [-1.0] * 3


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero3])
@pytest.mark.parametrize(
    ("every_k", "ahead", "text"),
    [
        (lambda rank: lambda updates: 2 + updates * (rank == 1), 0, r"(?s)MultiSteps\(\).*\n  k  rank.*: 2.*: 3"),
        (lambda rank: 3, 1, r"(?s)MultiSteps\(\).*\n  mini_step  rank.*: 0.*: 1"),
        (lambda rank: lambda updates: 1 - updates * (rank == 1), 0, r"(?s)on rank 1.*every_k_schedule is 0, expected"),
    ],
    ids=["another k later", "one step ahead", "no k later"],
)
def test_multi_steps_of_one_rank_alone_are_an_error_on_all(every_k, ahead, text, strategy):
    def rank_fn(comm):
        tx = fs.optim.MultiSteps(fs.optim.sgd(1.0), every_k(comm.rank))
        layout, state = start(comm, tx, strategy)
        state = state._replace(opt=state.opt._replace(mini_step=ahead * (comm.rank == 1)))

        def train():
            grads, last = fs.shard(grads_at(0), layout, comm, place="optim"), state
            for _ in range(3):
                last = fs.update(tx, grads, last, comm=comm)

        with pytest.raises(AgreementError, match=text) as error:
            train()
        return str(error.value)

    assert len(set(simulate(fs.Mesh({"dp": 3}), rank_fn))) == 1


@pytest.mark.parametrize("name", ["apply_if_finite", "MultiSteps"])
def test_an_update_that_is_left_out_leaves_the_old_state_its_memory(name):
    """What comes of it may be donated, and the old state is used again."""
    inner = fs.optim.adamw(0.1)
    tx = {"apply_if_finite": fs.optim.apply_if_finite(inner, 5), "MultiSteps": fs.optim.MultiSteps(inner, 2)}[name]
    comm = fs.SingleComm()
    layout, state = start(comm, tx)
    before = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    first = grads_at(0) | ({"scale": torch.tensor(math.nan)} if name == "apply_if_finite" else {})
    later = fs.update(tx, fs.shard(first, layout, comm, place="optim"), state, comm=comm)
    fs.update(tx, fs.shard(grads_at(1), layout, comm, place="optim"), later, comm=comm, donate=True)
    for a, b in zip(optree.tree_leaves(state), optree.tree_leaves(before), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@on_ranks(fs.Mesh({"dp": 2}))
def test_apply_if_finite_takes_no_padding_for_gradients(comm):
    """The roots of zeros in padding have infinite gradients."""
    layout = fs.plan({"w": torch.ones(3)}, comm.mesh, fs.zero3("dp"))
    tx = fs.optim.apply_if_finite(fs.optim.sgd(0.5), 1)
    state = fs.init_state(tx, fs.shard({"w": torch.ones(3)}, layout, comm), comm=comm)

    def loss_fn(params, batch, comm):
        return sum(x.sqrt().sum() for x in params.buffers)

    state, _ = fs.train_step(loss_fn, tx)(state, None, comm)
    assert state.opt.total_notfinite == 0
    assert fs.full_tree(state.params, comm=comm)["w"].tolist() == [0.875] * 3
