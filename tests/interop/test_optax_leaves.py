"""Transformations of optax whose result for one leaf reads another leaf: as unsharded, or refused by name."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optree
import pytest
import torch
from hypothesis import given, settings, strategies as st
from jax import lax

import fsharp as fs
from fsharp.errors import LayoutError
from fsharp.testing import simulate
from tests.ranks import on_ranks

TREE = {"a": torch.linspace(-1, 1, 12).view(3, 4), "b": torch.linspace(2, 3, 12).view(4, 3), "s": torch.tensor(0.5)}
TREE |= {"c": torch.linspace(-3, 1, 12).view(3, 4), "t": torch.tensor([[-2.0]])}


def run_sharded(tx, world, strategy, tree=TREE, steps=2):
    """Parameters of rank 0 after updates whose gradients are the parameters at the beginning."""

    ours = fs.optim.from_optax(tx)

    def rank_fn(comm):
        layout = fs.plan(tree, comm.mesh, strategy)
        state = fs.init_state(ours, fs.shard(tree, layout, comm, place="optim"), comm=comm)
        for _ in range(steps):
            state = fs.update(ours, fs.shard(tree, layout, comm, place="optim"), state, comm=comm)
        return fs.full_tree(state.params, comm=comm)

    return simulate(fs.Mesh({"dp": world}), rank_fn)


def run_plain(tx, tree=TREE, steps=2):
    params = grads = {name: jnp.asarray(x.numpy()) for name, x in tree.items()}
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def check_same_on_ranks(found, expected):
    for each in found:
        for name, x in expected.items():
            np.testing.assert_allclose(each[name].numpy(), x, rtol=1e-5, atol=1e-6)


def of_grads(fn):
    return optax.stateless(lambda grads, params: {**grads, **fn(grads)})


def kept_from_other():
    """State at the place of ``a`` that has the elements of ``c``, and is given to ``a``."""
    return optax.GradientTransformation(
        lambda params: {name: jnp.zeros_like(x) for name, x in params.items()},
        lambda grads, state, params=None: (state, {**grads, "a": grads["c"], "c": grads["a"]}),
    )


def begun_from_other():
    return optax.GradientTransformation(
        lambda params: {"a": params["c"]}, lambda grads, state, params=None: (grads, {"a": grads["a"]})
    )


REFUSED = {
    "swapped": (of_grads(lambda g: {"a": g["c"], "c": g["a"]}), r"the update of 'a' is made of elements of 'c', which are on"),
    "reshaped": (of_grads(lambda g: {"a": g["b"].reshape(3, 4)}), r"the update of 'a' is made of elements of 'b'"),
    "added": (of_grads(lambda g: {"a": g["a"] + g["c"]}), r"combines elements of 'a' and 'c' \(add\)"),
    "chosen": (of_grads(lambda g: {"a": jnp.where(g["c"] > 0, g["a"], 0)}), r"combines elements of '[ac]' and '[ac]' \(select"),
    "by a condition": (
        of_grads(
            lambda g: dict(zip("ac", lax.cond(g["s"] > 0, lambda: (g["c"], g["a"]), lambda: (g["a"], g["c"])), strict=True))
        ),
        r"combines elements of 'a' and 'c' \(cond\)",
    ),
    "kept": (kept_from_other(), r"the update of 'a' is made of elements of 'c'"),
    "begun": (begun_from_other(), r"state\['a'\] is made of elements of 'c'"),
    "a jaxpr that reduces": (
        of_grads(lambda g: {"s": lax.reduce(g["a"], np.float32(1), lambda x, y: x * y + x, (0, 1))}),
        r"rows, columns or neighbours of 'a'(.|\n)*operation  reduce\n",
    ),
    "bits of integers": (
        of_grads(lambda g: {"s": lax.reduce_or(g["a"].astype(jnp.int32), (0, 1)).astype(jnp.float32)}),
        r"rows, columns or neighbours of 'a'(.|\n)*operation  reduce_or\n",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_elements_of_another_leaf_are_refused_by_name_where_leaves_are_cut(name):
    tx, message = REFUSED[name]
    with pytest.raises(LayoutError, match=message):
        run_sharded(tx, 2, fs.zero3("dp"))


@pytest.mark.parametrize("name", REFUSED)
def test_elements_of_another_leaf_are_taken_where_all_of_them_are_here(name):
    tx, _ = REFUSED[name]
    check_same_on_ranks(run_sharded(tx, 2, fs.ddp("dp")), run_plain(tx))


TAKEN = {
    "scalars swapped": of_grads(lambda g: {"s": g["t"].reshape(()), "t": g["s"].reshape(1, 1)}),
    "scaled by a leaf": of_grads(lambda g: {"a": g["a"] * g["s"], "b": g["b"] * g["t"] + g["s"], "s": g["s"] * g["t"][0, 0]}),
    "a condition on a leaf": of_grads(lambda g: {"a": lax.cond(g["t"][0, 0] > 0, lambda: g["a"], lambda: 2 * g["a"])}),
    "a branch of each": of_grads(lambda g: {"a": lax.switch(g["s"].astype(int), [lambda: g["a"], lambda: g["a"] - 1])}),
    "a choice by a leaf": of_grads(lambda g: {"a": jnp.where(g["s"] > 0, -g["a"], g["a"])}),
    "scalars chosen": of_grads(lambda g: {"s": lax.cond(g["s"] > 0, lambda: g["t"][0, 0], lambda: g["s"])}),
    "a loop over a leaf": of_grads(lambda g: {"s": lax.fori_loop(0, 3, lambda _, x: x * 0.5, g["s"])}),
    "a row of a scalar": of_grads(lambda g: {"c": g["c"] * jnp.cumsum(g["t"], 0)}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_leaves_of_one_element_are_numbers(name):
    check_same_on_ranks(run_sharded(TAKEN[name], 2, fs.zero3("dp")), run_plain(TAKEN[name]))


def test_every_kind_of_reduction_of_a_cut_leaf_is_of_the_whole_leaf():
    """The least and the largest element of ``b`` are on different ranks, and so are those for which a condition holds."""

    def reduced(g):
        b = g["b"]
        where = {"a": (b > 2.9).any(), "c": (b > 2.5).all()}
        signs = {name: jnp.where(condition, -g[name], g[name]) for name, condition in where.items()}
        return {**signs, "b": b * b.min() + (-b).max(), "s": b.sum(), "t": jnp.full((3, 1, 1), b.max()).sum(0)}

    tx = of_grads(reduced)
    check_same_on_ranks(run_sharded(tx, 2, fs.zero3("dp"), steps=1), run_plain(tx, steps=1))


def test_the_sign_of_a_zero_in_a_leaf_of_one_element_is_kept():
    tree = {"w": torch.arange(6.0), "zero": torch.tensor([-0.0])}
    tx = fs.optim.from_optax(optax.stateless(lambda g, p: jax.tree.map(lambda x: jnp.copysign(x, p["zero"][0]), g)))

    def rank_fn(comm):
        layout = fs.plan(tree, comm.mesh, fs.zero3("dp"))
        state = fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)
        ones = fs.shard(optree.tree_map(torch.ones_like, tree), layout, comm, place="optim")
        return fs.full_tree(fs.update(tx, ones, state, comm=comm).params, comm=comm)["w"]

    for found in simulate(fs.Mesh({"dp": 3}), rank_fn):
        assert torch.equal(found, tree["w"] - 1)


def test_counts_that_float32_does_not_hold_are_exact():
    tree = {"x": torch.arange(5.0), "s": torch.tensor(1.0)}

    def update(grads, params):
        count = ((grads["x"] * 0).astype(jnp.int32) + 4_000_001).sum()
        return {"x": grads["x"], "s": (count - 20_000_000).astype(jnp.float32)}

    tx = optax.stateless(update)
    check_same_on_ranks(run_sharded(tx, 2, fs.zero3("dp"), tree, steps=1), run_plain(tx, tree, steps=1))


@pytest.mark.parametrize("narrow", ["a", "c"])
def test_an_update_in_a_narrow_dtype_leaves_other_updates_in_theirs(narrow):
    tx = optax.stateless(lambda g, _: {**g, narrow: g[narrow].astype(jnp.bfloat16)})
    check_same_on_ranks(run_sharded(tx, 2, fs.zero3("dp"), steps=1), run_plain(tx, steps=1))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_random_keys_of_every_kind_are_kept_in_the_state(impl):
    tx = optax.add_noise(0.1, 0.55, jax.random.key(3, impl=impl))
    tree = {name: TREE[name] for name in "as"}
    check_same_on_ranks(run_sharded(tx, 2, fs.zero3("dp"), tree), run_plain(tx, tree))


@on_ranks(fs.Mesh({"dp": 2}))
def test_whole_leaves_are_read_by_leaves_that_are_cut(comm):
    tree = {"cut": {"a": TREE["a"]}, "whole": {"c": TREE["c"]}}
    tx = optax.stateless(lambda g, _: {"cut": {"a": g["cut"]["a"] + g["whole"]["c"]}, "whole": g["whole"]})
    tx = optax.chain(tx, optax.stateless(lambda g, _: {"cut": {"a": g["whole"]["c"]}, "whole": g["whole"]}), tx)
    specs = {"cut": fs.P("dp"), "whole": fs.P()}
    ours = fs.optim.from_optax(tx)
    layout = fs.plan(tree, comm.mesh, specs, units=["cut", "whole"])
    state = fs.init_state(ours, fs.shard(tree, layout, comm, place="optim"), comm=comm)
    new = fs.update(ours, fs.shard(tree, layout, comm, place="optim"), state, comm=comm)
    torch.testing.assert_close(fs.full_tree(new.params, comm=comm)["cut"]["a"], TREE["a"] + 2 * TREE["c"])


def own_rows(grads, params):
    return {"e": grads["e"] - grads["e"].cumsum(0), "w": grads["w"]}


VARYING = {
    "its rows": (optax.stateless(own_rows), None),
    "another leaf": (
        optax.stateless(lambda g, _: {**g, "w": g["w"] + g["e"].cumsum(0)}),
        r"the update of 'w' is made of elements of 'e', of which ranks have",
    ),
    "a number": (optax.stateless(lambda g, _: {**g, "w": g["w"] * g["e"].cumprod()[-1]}), r"ranks have leaves of their own"),
    "a condition": (
        optax.stateless(lambda g, _: {**g, "w": lax.cond(g["e"][0, 0] > 0, lambda: g["w"], lambda: -g["w"])}),
        r"a condition looks at 'e', of which ranks have leaves of their own",
    ),
    "state": (
        optax.GradientTransformation(lambda p: p["e"][0], lambda g, s, _=None: (g, s)),
        r"state is made of elements of 'e', of which ranks have leaves of their own",
    ),
}


@pytest.mark.parametrize("name", VARYING)
def test_what_is_computed_from_leaves_of_one_rank_stays_with_them(name):
    tx, message = VARYING[name]

    def rank_fn(comm):
        tree = {"e": torch.ones(2, 3) * (comm.rank + 1), "w": torch.ones(2, 3)}
        layout = fs.plan(tree, comm.mesh, {"e": fs.ddp("dp").varying("ep"), "w": fs.ddp("dp", "ep")}, units=["e", "w"])
        ours = fs.optim.from_optax(tx)
        state = fs.init_state(ours, fs.shard(tree, layout, comm, place="optim"), comm=comm)
        return fs.full_tree(fs.update(ours, fs.shard(tree, layout, comm, place="optim"), state, comm=comm).params, comm=comm)

    mesh = fs.Mesh({"dp": 1, "ep": 2})
    if message is not None:
        with pytest.raises(LayoutError, match=message):
            simulate(mesh, rank_fn)
        return
    for rank, found in enumerate(simulate(mesh, rank_fn)):
        assert found["e"].tolist() == [[rank + 1] * 3, [0] * 3]


def random_update(seed):
    """An update of each leaf that is put together at random from all leaves."""
    draw = random.Random(seed)
    names = list(TREE)

    def number(depth):
        name = draw.choice(names)
        reduce = draw.choice([jnp.sum, jnp.max, jnp.min, jnp.linalg.norm, lambda x: jnp.vdot(x, x), lambda x: x.reshape(-1)[0]])
        if draw.random() < 0.3:
            name = draw.choice("st")
            return lambda g: g[name].reshape(())
        return lambda g: reduce(g[name]) if depth or reduce is not jnp.vdot else 0.0

    def array(name, depth):
        shape, kind = TREE[name].shape, draw.randrange(8 if depth else 3)
        if kind == 0:
            return lambda g: g[name]
        if kind == 1:
            value = number(depth)
            return lambda g: jnp.full(shape, value(g))
        if kind == 2:
            other = draw.choice(
                [each for each in names if TREE[each].numel() == TREE[name].numel()] if draw.random() < 0.2 else [name]
            )
            return lambda g: g[other].reshape(shape)
        a, b, value = array(name, depth - 1), array(name, depth - 1), number(depth)
        return [
            lambda g: a(g) * 0.5 - b(g),
            lambda g: jnp.where(a(g) > value(g), a(g), b(g)),
            lambda g: lax.cond(value(g) > 0, lambda: a(g), lambda: b(g) * 2),
            lambda g: jnp.tanh(a(g)) * value(g),
            lambda g: a(g) + jnp.arange(b(g).size, dtype=jnp.float32).reshape(shape),
        ][kind - 3]

    fns = {name: array(name, 2) for name in names}
    return of_grads(lambda g: {name: jnp.clip(fn(g), -10, 10) for name, fn in fns.items()})


def check_random(seed):
    tx = random_update(seed)
    expected = run_plain(tx)
    check_same_on_ranks(run_sharded(tx, 2, fs.ddp("dp")), expected)
    try:
        found = run_sharded(tx, 2, fs.zero3("dp"))
    except LayoutError:
        return False
    check_same_on_ranks(found, expected)
    return True


def test_random_updates_are_as_unsharded_or_refused():
    were_taken = [check_random(seed) for seed in range(2)]
    assert any(were_taken)


@pytest.mark.deep
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_many_random_updates(seed):
    check_random(seed)


def test_a_dict_for_each_leaf_has_the_names_of_its_keys():
    """Not a name for each leaf, also where the leaf's path, an index, is that of a transformation in the chain too."""

    def init(params):
        return jax.tree.map(lambda p: {"m": jnp.zeros_like(p), "v": jnp.zeros_like(p)}, params)

    def update(updates, state, params=None):
        state = jax.tree.map(lambda g, s: {"m": s["m"] + g, "v": s["v"] + 2 * g}, updates, state)
        return jax.tree.map(lambda g, s: s["m"] * s["v"], updates, state), state

    tx = fs.optim.from_optax(optax.chain(optax.GradientTransformation(init, update), optax.trace(0.9)))
    comm = fs.SingleComm()
    for tree in ({"w": torch.ones(3), "b": torch.ones(2)}, [torch.ones(3), torch.ones(2)]):
        params = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm, place="optim")
        state = fs.init_state(tx, params, comm=comm)
        assert [*state.opt.buffers] == ["0.m", "0.v", "1.trace"]
        state = fs.update(tx, params, state, comm=comm)
        found = [fs.full_tree(state.opt.buffers[name], comm=comm) for name in ("0.m", "0.v")]
        for tree_of_values, value in zip(found, (1.0, 2.0), strict=True):
            assert all((x == value).all() for x in optree.tree_leaves(tree_of_values))
