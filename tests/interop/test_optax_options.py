"""What ranks compare of an optax transformation, and which extra arguments of an update reach it."""

import inspect
import re
from functools import partial

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, TreeError
from fsharp.functional.optim.base import exact_texts
from fsharp.interop.optax import _ShardedTransformation
from fsharp.testing import simulate
from tests.ranks import on_ranks

TREE = {"w": torch.linspace(-1, 1, 12).view(3, 4), "b": torch.linspace(0, 1, 5)}
ONES = np.ones(3000, np.float32)


def begin(comm, tx, strategy=None, tree=TREE):
    layout = fs.plan(tree, comm.mesh, strategy or fs.zero3("dp"))
    state = fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)
    return state, fs.shard(tree, layout, comm, place="optim")


def changed(by):
    """A constant that differs in one element of many, by so little as float32 can."""
    constant = ONES.copy()
    constant[1500] = np.nextafter(np.float32(1), np.float32(1 + by))
    return constant


CONSTANTS = {
    "in the update": lambda c: optax.stateless(lambda g, _: jax.tree.map(lambda x: x * jnp.sum(jnp.asarray(c)), g)),
    "in a function within": lambda c: optax.stateless(
        lambda g, _: jax.tree.map(lambda x: x * jax.jit(lambda: jnp.sum(jnp.asarray(c)))(), g)
    ),
    "in the state": lambda c: optax.GradientTransformation(lambda params: jnp.asarray(c), lambda g, s, _=None: (g, s)),
    "few, in a branch": lambda c: optax.stateless(
        lambda g, _: jax.tree.map(
            lambda x: jax.lax.cond(x.sum() > 0, lambda: x * jnp.asarray(c[1499:1502]).sum(), lambda: x), g
        )
    ),
}


@pytest.mark.parametrize("name", CONSTANTS)
@on_ranks(fs.Mesh({"dp": 2}))
def test_ranks_with_another_element_of_a_long_constant_are_told(comm, name):
    with pytest.raises(AgreementError, match=r"from_optax\(\): ranks were given different values"):
        begin(comm, fs.optim.from_optax(CONSTANTS[name](changed(comm.rank))))
    assert begin(comm, fs.optim.from_optax(CONSTANTS[name](changed(1)))) is not None


@on_ranks(fs.Mesh({"dp": 2}))
def test_a_rank_whose_transformation_changes_between_updates_is_told(comm):
    factor = 1.0
    tx = fs.optim.from_optax(optax.stateless(lambda g, _: jax.tree.map(lambda x: x * factor, g)))
    state, grads = begin(comm, tx)
    factor = 1.0 + comm.rank
    again = fs.optim.from_optax(optax.stateless(lambda g, _: jax.tree.map(lambda x: x * factor, g)))
    for step in range(3):  # every other step
        if step % 2:
            with pytest.raises(AgreementError, match="transformation"):
                fs.update(again, grads, state, comm=comm)
        else:
            state = fs.update(tx, grads, state, comm=comm)


def test_every_bit_of_a_setting_counts():
    """Where a repr has four digits, or leaves out the middle."""
    same = [
        lambda x: x,
        lambda x: torch.tensor(x),
        lambda x: {"a": [torch.tensor(x), None]},
        lambda x: partial(min, torch.full((2000,), x)),
        lambda x: np.full(2000, x),
        lambda x: jnp.full(2000, x),
        lambda x: optax.TraceState(np.full(2000, x)),
    ]
    for make in same:
        assert exact_texts(x=make(0.1)) == exact_texts(x=make(0.1))
        assert exact_texts(x=make(0.1)) != exact_texts(x=make(0.100001))


@on_ranks(fs.Mesh({"dp": 2}))
def test_ranks_with_other_settings_of_our_own_are_told(comm):
    tx = fs.optim.Transform(lambda p: None, lambda g, s, p: (g, s), {"scale": torch.tensor(1.0 + 1e-6 * comm.rank)})
    with pytest.raises(AgreementError, match=r"rank 1: \{'scale': 1\.00000095"):
        begin(comm, tx)


@on_ranks(fs.Mesh({"dp": 2}))
def test_large_arrays_in_the_state_are_compared(comm):
    tx = fs.optim.from_optax(optax.GradientTransformation(lambda p: jnp.asarray(ONES), lambda g, s, _=None: (g, s * 2)))
    state, grads = begin(comm, tx)
    state = fs.update(tx, grads, state, comm=comm)
    assert state.opt.optax.tolist() == (2 * ONES).tolist()
    state.opt.optax[1500] += comm.rank
    with pytest.raises(AgreementError, match=r"state +rank 1: [0-9a-f]{16} float32\[3000\]"):
        fs.update(tx, grads, state, comm=comm)


@pytest.mark.parametrize("value", [torch.ones(3), "fast", None])
@on_ranks(fs.Mesh({"dp": 2}))
def test_numbers_of_the_state_that_are_none_are_refused_on_all_ranks(comm, value):
    tx = fs.optim.from_optax(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    state, grads = begin(comm, tx)
    if comm.rank == 1:
        state.opt.optax.hyperparams["learning_rate"] = value
    with pytest.raises(AgreementError, match=r"state\.hyperparams\['learning_rate'\]"):
        fs.update(tx, grads, state, comm=comm)


@pytest.mark.parametrize(
    ("first", "then", "error"),
    [
        (1, 0.5, "the state has int32 there. Begin with a number of the dtype float32"),
        (0.1, 0.1 + 0.1j, "the state has float32 there. Begin with a number of the dtype complex64"),
        (jnp.asarray(1, jnp.int8), 300, "the state has int8 there. Begin with a number of the dtype int32"),
        (0.1, 1 << 40, "an integer needs 64 bits"),
        (0.1, torch.tensor(1 << 40), "an integer needs 64 bits"),
    ],
)
@on_ranks(fs.Mesh({"dp": 2}))
def test_a_number_that_the_dtype_of_the_state_would_change_is_refused(comm, first, then, error):
    """A learning rate of 0.5 became 0, without a word."""
    tx = fs.optim.from_optax(optax.inject_hyperparams(optax.sgd)(learning_rate=first))
    state, grads = begin(comm, tx)
    state.opt.optax.hyperparams["learning_rate"] = then
    with pytest.raises(TreeError, match=re.escape(error)):
        fs.update(tx, grads, state, comm=comm)
    for same in (2, 2.0, torch.tensor(2.0, dtype=torch.float64), np.int64(2)):
        state.opt.optax.hyperparams["learning_rate"] = same
        new = fs.full_tree(fs.update(tx, grads, state, comm=comm).params, comm=comm)
        torch.testing.assert_close(new["w"], -TREE["w"])


def sam(**options):
    return optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2, **options)


WITHOUT_VALUE = {
    "sam": (sam, lambda tx: optax.chain(tx, optax.identity()), fs.zero3("dp")),
    "lbfgs": (lambda: optax.lbfgs(0.1, memory_size=2, linesearch=None), lambda tx: tx, fs.ddp("dp")),  # where nothing is cut
}


@pytest.mark.parametrize("name", WITHOUT_VALUE)
def test_value_is_kept_from_what_takes_none(name):
    """As fs.train_step passes it always."""
    make, around, strategy = WITHOUT_VALUE[name]
    plain = grads = {key: jnp.asarray(x.numpy()) for key, x in TREE.items()}
    kept, update = make().init(plain), jax.jit(make().update)
    for _ in range(3):
        updates, kept = update(grads, kept, plain)
        plain = optax.apply_updates(plain, updates)

    def rank_fn(comm):
        tx = fs.optim.from_optax(around(make()))
        state, grads = begin(comm, tx, strategy)
        for _ in range(3):
            state = fs.update(tx, grads, state, comm=comm, value=1.0)
        return fs.full_tree(state.params, comm=comm)

    for found in simulate(fs.Mesh({"dp": 2}), rank_fn):
        for key, x in plain.items():
            np.testing.assert_allclose(found[key].numpy(), x, rtol=1e-4, atol=1e-6)


def scaled_by(name):
    def update(grads, state, params=None, **extra):
        return jax.tree.map(lambda x: x * extra[name], grads), state

    def named(grads, state, params=None, *, temperature, **extra):
        return jax.tree.map(lambda x: x * temperature, grads), state

    return optax.GradientTransformationExtraArgs(lambda params: (), named if name == "temperature" else update)


@on_ranks(fs.Mesh({"dp": 2}))
def test_options_that_a_chain_wants_reach_it_and_others_are_named(comm):
    tx = fs.optim.from_optax(optax.chain(optax.clip(10.0), scaled_by("temperature"), optax.scale(1.0)))
    state, grads = begin(comm, tx)
    new = fs.update(tx, grads, state, comm=comm, value=1.0, temperature=torch.tensor(2.0))
    torch.testing.assert_close(fs.full_tree(new.params, comm=comm)["w"], 3 * TREE["w"])
    with pytest.raises(TreeError, match=r"got temprature=\.\.\., which the transformation does not use"):
        fs.update(tx, grads, state, comm=comm, temperature=2.0, temprature=3.0)
    with pytest.raises(TreeError, match=r"needs temperature: fs\.update\(\.\.\., temperature=\.\.\.\)"):
        fs.update(tx, grads, state, comm=comm, value=1.0)
    with pytest.raises(AgreementError, match=r"temperature  rank 1: 3\.0"):
        fs.update(tx, grads, state, comm=comm, temperature=2.0 + comm.rank)
    for wide in (1 << 40, np.int64(1 << 40), torch.full((4,), 1 << 40)):
        with pytest.raises(TreeError, match=r"temperature=.*: an integer needs 64 bits"):
            fs.update(tx, grads, state, comm=comm, temperature=wide)
    for wide in (torch.full((4,), 0.1, dtype=torch.float64), np.full((3, 4), 0.1)):
        with pytest.raises(TreeError, match=r"(?s)temperature=.*: JAX would make float64 narrower\. Call jax\.config"):
            fs.update(tx, grads, state, comm=comm, temperature=wide)
    for number in (torch.tensor(2.0, dtype=torch.float64), np.float64(2.0), 2.0):  # as JAX takes a number of Python
        fs.update(tx, grads, state, comm=comm, temperature=number)
    with pytest.raises(AgreementError, match=r"got foo=\.\.\."):
        fs.update(tx, grads, state, comm=comm, temperature=2.0, **({"foo": 1} if comm.rank else {}))


def test_an_option_may_be_a_tensor_of_bfloat16():
    def update(grads, state, params=None, *, factors):
        return jax.tree.map(lambda x: x * factors.sum(), grads), state

    tx = fs.optim.from_optax(optax.GradientTransformationExtraArgs(lambda params: (), update))
    comm = fs.SingleComm(fs.Mesh({"dp": 1}))
    state, grads = begin(comm, tx)
    new = fs.update(tx, grads, state, comm=comm, factors=torch.tensor([0.5, 1.5], dtype=torch.bfloat16))
    torch.testing.assert_close(fs.full_tree(new.params, comm=comm)["w"], 3 * TREE["w"])


def test_an_update_of_another_shape_is_refused():
    """A transposed update was added in the wrong order, without a word."""
    tx, comm = fs.optim.from_optax(optax.stateless(lambda g, _: g | {"w": g["w"].T})), fs.SingleComm(fs.Mesh({"dp": 1}))
    with pytest.raises(TreeError, match=r"the update of 'w' has the shape \[4, 3\], and the parameter \[3, 4\]"):
        begin(comm, tx)
    tx = fs.optim.from_optax(optax.stateless(lambda g, _: g | {"w": g["w"][:1]}))
    state, grads = begin(comm, tx)
    new = fs.full_tree(fs.update(tx, grads, state, comm=comm).params, comm=comm)
    torch.testing.assert_close(new["w"], TREE["w"] + TREE["w"][:1])


def test_an_option_for_what_takes_none_is_named():
    tx, comm = fs.optim.from_optax(optax.scale(-0.1)), fs.SingleComm(fs.Mesh({"dp": 1}))
    state, grads = begin(comm, tx)
    fs.update(tx, grads, state, comm=comm, value=1.0)
    with pytest.raises(TreeError, match=r"got tokens=\.\.\., which"):
        fs.update(tx, grads, state, comm=comm, tokens=1.0)


FUNCTIONS = {
    "sam": (lambda: sam(opaque_mode=True), r"grad_fn must be provided(.|\n)*sam\(opaque_mode=False\)"),
    "lbfgs": (lambda: optax.lbfgs(1e-2), r"'grad' and 'value_fn'(.|\n)*lbfgs\(linesearch=None\)"),
    "sophia": (lambda: optax.contrib.sophia(1e-2), r"obj_fn must be provided(.|\n)*obj_fn\) cannot be called on shards"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@on_ranks(fs.Mesh({"dp": 2}))
def test_what_calls_functions_of_whole_parameters_is_refused_with_the_remedy(comm, name):
    make, message = FUNCTIONS[name]
    with pytest.raises(TreeError, match=message):
        begin(comm, fs.optim.from_optax(make()), fs.ddp("dp"))
    tx = fs.optim.from_optax(sam())
    state, grads = begin(comm, tx)
    with pytest.raises(TreeError, match=r"update\(\): grad_fn=<function(.|\n)*expected  a number or an array"):
        fs.update(tx, grads, state, comm=comm, grad_fn=lambda params, i: params)


def test_simulated_ranks_that_have_the_same_share_a_compilation(monkeypatch):
    traced = []
    monkeypatch.setattr(jax, "make_jaxpr", lambda *args, f=jax.make_jaxpr, **options: traced.append(0) or f(*args, **options))
    tx = fs.optim.from_optax(optax.adam(1e-2))
    shards = inspect.unwrap(tx.init).__self__
    assert isinstance(shards, _ShardedTransformation)

    def rank_fn(comm):
        state, grads = begin(comm, tx, strategy)
        return [fs.full_tree(fs.update(tx, grads, state, comm=comm).params, comm=comm)["w"]]

    strategy = fs.ddp("dp")
    found = simulate(fs.Mesh({"dp": 3}), rank_fn)
    assert len(traced) == 4  # init and update, once with the value that init does not know and once without
    assert {len(program._compiled) for program in shards._shared.values()} == {1}
    assert len(shards._shared) == 2
    assert len(set(map(id, shards._programs.values()))) == 2
    assert all(torch.equal(x, found[0][0]) for (x,) in found)


def test_a_transformation_travels():
    tx, comm = fs.optim.from_optax(optax.adam(1e-2)), fs.SingleComm(fs.Mesh({"dp": 1}))
    state, grads = begin(comm, tx)
    new = fs.update(tx, grads, state, comm=comm)
    again = cloudpickle.loads(cloudpickle.dumps(tx))
    assert torch.equal(
        fs.full_tree(fs.update(again, grads, state, comm=comm).params, comm=comm)["w"], fs.full_tree(new.params, comm=comm)["w"]
    )
