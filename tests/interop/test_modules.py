"""make_functional: modules of Equinox and Flax, planned, sharded and trained, beside the same training in JAX alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from flax import linen, nnx

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.interop.jax import make_functional, stack, to_arrays, to_tensors, unstack
from fsharp.testing import simulate
from tests.functional.test_per_sample import Watched

DIM, RATE, STEPS = 6, 0.1, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.inner = nnx.Linear(DIM, 2 * DIM, rngs=rngs)
        self.outer = nnx.Linear(2 * DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(nnx.gelu(self.inner(self.norm(x))))


def nnx_blocks():
    return [Block(nnx.Rngs(seed)) for seed in range(2)]


def equinox_blocks():
    return [eqx.nn.MLP(DIM, DIM, 7, 1, key=jax.random.key(seed)) for seed in range(2)]


def batches():
    g = np.random.default_rng(0)
    return [g.standard_normal((6, DIM), dtype=np.float32) for _ in range(STEPS)]


def nnx_call(block, x):
    return block(x)


def equinox_call(block, x):
    return jax.vmap(block)(x)


CASES = {"flax.nnx": (nnx_blocks, nnx_call), "equinox": (equinox_blocks, equinox_call)}


def trained_by_jax(make, call):
    """The blocks after some steps of SGD, in JAX alone."""
    blocks = make()
    parts = [eqx.partition(block, eqx.is_inexact_array) if isinstance(block, eqx.Module) else None for block in blocks]
    states = [part[0] if part else nnx.state(block) for part, block in zip(parts, blocks, strict=True)]
    graphs = [nnx.graphdef(block) if part is None else None for part, block in zip(parts, blocks, strict=True)]

    @jax.jit
    def grads(states, x):
        def loss(states):
            y = x
            for state, part, graph in zip(states, parts, graphs, strict=True):
                y = call(eqx.combine(state, part[1]) if part else nnx.merge(graph, state), y)
            return jnp.square(y).sum() / x.shape[0]

        return jax.grad(loss)(states)

    for x in batches():
        states = jax.tree.map(lambda p, g: p - RATE * g, states, grads(states, x))
    return [to_tensors(state) for state in states]


def train(comm, functional, call, strategy):
    fns, trees = zip(*functional, strict=True)
    if call is equinox_call:
        fns = [fs_vmapped(fn) for fn in fns]
    params = {"blocks": list(trees)}
    layout = fs.plan(params, comm.mesh, strategy, units="blocks.*")
    tx = fs.optim.sgd(RATE)
    state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)

    def loss_fn(params, x, comm):
        size = len(x)
        for fn, unit in zip(fns, params["blocks"], strict=True):
            x = fs.forward(fn, unit, x, comm=comm)
        return x.square().sum(), size

    step = fs.train_step(loss_fn, tx)
    for x in batches():
        state, _ = step(state, torch.from_numpy(x).chunk(comm.mesh.size)[comm.rank], comm)
    return fs.full_tree(state.params, comm=comm)["blocks"]


def fs_vmapped(fn):
    return lambda tree, x: torch.vmap(fn, in_dims=(None, 0))(tree, x)


@pytest.mark.parametrize("name", CASES)
def test_modules_train_as_in_jax_alone(name):
    make, call = CASES[name]
    functional = [make_functional(block) for block in make()]  # of all ranks, so that JAX compiles it once
    results = simulate(fs.Mesh({"dp": 2}), lambda comm: train(comm, functional, call, fs.zero3("dp")))
    torch.testing.assert_close(results[0], trained_by_jax(make, call), rtol=1e-5, atol=1e-6)


def test_functionalize_gives_a_module_of_nnx_its_weights_back():
    model = Block(nnx.Rngs(0))
    _, params = make_functional(model)
    assert sorted(optree.tree_paths(params)) == [
        ("inner", "bias"), ("inner", "kernel"), ("norm", "bias"), ("norm", "scale"), ("outer", "kernel"),
    ]  # fmt: skip
    assert params["inner"]["kernel"].shape == (DIM, 2 * DIM)
    doubled = optree.tree_map(lambda x: 2 * x, params)
    before = model.inner.kernel[...]
    nnx.update(model, to_arrays(doubled, like=nnx.state(model, nnx.Param)))
    assert np.array_equal(model.inner.kernel[...], 2 * before)


def test_functionalize_gives_a_module_of_equinox_its_weights_back():
    model = eqx.nn.MLP(DIM, DIM, 7, 1, key=jax.random.key(0))
    _, params = make_functional(model)
    back = to_arrays(optree.tree_map(lambda x: 2 * x, params), like=model)
    assert np.array_equal(back.layers[0].weight, 2 * model.layers[0].weight)
    assert back.activation is model.activation
    assert np.array_equal(back(jnp.ones(DIM)), to_arrays(to_tensors(back), model)(jnp.ones(DIM)))


def test_functionalize_refuses_a_module_that_changes_its_variables():
    class Normed(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(DIM, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(x)

    model = Normed()
    fn, params = make_functional(model)
    with pytest.raises(TreeError, match=r"changes its variable 'norm.mean'.*use_running_average=True"):
        fn(params, torch.ones(4, DIM))
    model.eval()
    fn, params = make_functional(model)
    assert fn(params, torch.ones(4, DIM)).shape == (4, DIM)


def test_functionalize_tells_variables_that_a_call_adds_from_those_that_it_changes():
    class Odd(nnx.Module):
        def __init__(self, *, is_frozen):
            self.linear = nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))
            self.noise = nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(1))
            self.is_frozen = is_frozen

        def __call__(self, x):
            y = self.noise(self.linear(x))
            self.activations = nnx.Intermediate(y)
            if not self.is_frozen:
                self.linear.kernel[...] = 2 * self.linear.kernel[...]
            return y

    model = Odd(is_frozen=True)
    fn, params = make_functional(model)
    x = batches()[0]
    assert np.allclose(fn(params, torch.from_numpy(x)), model(jnp.array(x)), atol=1e-6)
    fn, params = make_functional(Odd(is_frozen=False))
    with pytest.raises(TreeError, match=r"changes its variable 'linear.kernel'"):
        fn(params, torch.from_numpy(x))


def test_functionalize_keeps_the_variables_that_a_module_has_at_the_call():
    class Scaled(nnx.Module):
        def __init__(self):
            self.linear, self.scale = nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0)), nnx.Variable(jnp.ones(()))

        def __call__(self, x):
            return self.linear(x) * self.scale

    model = Scaled()
    fn, params = make_functional(model)
    before = fn(params, torch.ones(2, DIM))
    model.scale[...] = 3 * model.scale[...]
    assert torch.equal(fn(params, torch.ones(2, DIM)), before)
    torch.testing.assert_close(fn(params, torch.ones(4, DIM))[:2], before)  # compiled after the change


class Valued(eqx.Module):
    value: jax.Array
    inner: eqx.nn.Linear

    def __call__(self, x):
        return self.value * self.inner(x)


def test_a_field_named_value_is_no_box_beside_other_leaves():
    model = Valued(jnp.arange(3.0), eqx.nn.Linear(3, 3, key=jax.random.key(0)))
    fn, params = make_functional(model)
    for found in (params, to_tensors([model])[0]):
        assert optree.tree_map(lambda x: list(x.shape), found) == {"value": [3], "inner": {"weight": [3, 3], "bias": [3]}}
    np.testing.assert_allclose(fn(params, torch.ones(3)).numpy(), model(jnp.ones(3)), rtol=1e-5)


@jax.tree_util.register_pytree_with_keys_class
class Pair:
    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten_with_keys(self):
        return [((1, "first"), self.parts[0]), ((2, "second"), self.parts[1])], None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


def test_keys_of_a_class_may_be_of_any_type():
    pair = Pair(jnp.ones(2), jnp.zeros(3))
    found = to_tensors(pair)
    assert list(found) == [(1, "first"), (2, "second")]
    assert np.array_equal(to_arrays(found, like=pair).parts[1], np.zeros(3))


def test_parameters_that_jax_or_torch_would_change_are_refused_by_name():
    with pytest.raises(TreeError, match=r"'a.w' is float64, which JAX would narrow. Pass float32, or .*jax_enable_x64"):
        to_tensors({"a": {"w": np.array([1 + 1e-12])}})
    with pytest.raises(TreeError, match=r"'w' is float8_e4m3b11fnuz, which torch does not have"):
        to_tensors({"w": jnp.ones(2, jnp.float8_e4m3b11fnuz)})


def test_functionalize_refuses_what_is_no_module():
    with pytest.raises(TreeError, match=r"got \{'a': Array.*expected a module of Equinox or Flax that can be called"):
        make_functional({"a": jnp.ones(3)})
    with pytest.raises(TreeError, match=r"got .*sin.*expected a module of Equinox or Flax that can be called"):
        make_functional(jnp.sin)


def test_to_tensors_of_a_checkpoint_tree_and_back():
    tree = {
        "params": {
            "dense_0": {"kernel": np.ones((3, 2), np.float32)},
            "step": np.int32(7),
            "scales": [jnp.zeros(2), jnp.ones(1)],
        }
    }
    found = to_tensors(tree)
    assert optree.tree_map(lambda x: list(x.shape), found) == {
        "params": {"dense_0": {"kernel": [3, 2]}, "scales": {0: [2], 1: [1]}}
    }
    found["params"]["dense_0"]["kernel"].zero_()
    found["params"]["scales"][1].zero_()
    assert (tree["params"]["dense_0"]["kernel"].sum(), tree["params"]["scales"][1].sum()) == (6, 1)  # memory of its own
    back = to_arrays(found, like=tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert back["params"]["step"] == 7
    assert back["params"]["dense_0"]["kernel"].sum() == 0
    found["params"]["dense_0"]["kernel"].fill_(5)
    assert back["params"]["dense_0"]["kernel"].sum() == 0


def test_to_arrays_names_what_does_not_fit():
    tree = {"a": {"kernel": jnp.ones((3, 2))}, "b": jnp.ones(2)}
    found = to_tensors(tree)
    with pytest.raises(TreeError, match=r"'a.kernel' has shape \(2,\), expected \(3, 2\)"):
        to_arrays(found | {"a": {"kernel": torch.ones(2)}}, like=tree)
    with pytest.raises(TreeError, match=r"'b' is missing, expected \(2,\)"):
        to_arrays({"a": found["a"]}, like=tree)
    with pytest.raises(TreeError, match=r"'b' has shape \(\), expected \(2,\). Pass whole leaves .*fs.full_tree"):
        to_arrays(found | {"b": 1.0}, like=tree)
    with pytest.raises(TreeError, match="'c' is not in the dict"):
        to_arrays(found | {"c": torch.ones(1)}, like=tree)
    with pytest.raises(TreeError, match="a list without arrays of floating dtype"):
        to_tensors([1, 2])


class Noisy(linen.Module):
    """A module of Linen with statistics and random numbers."""

    @linen.compact
    def __call__(self, x, train):
        # The fast variance, E[x^2] - E[x]^2, of three samples loses digits, and other ones on every processor.
        norm = linen.BatchNorm(use_running_average=not train, momentum=0.9, use_fast_variance=False)
        x = norm(linen.Dense(DIM)(x))
        return linen.Dropout(0.5, deterministic=not train)(x)


def linen_start():
    model = Noisy()
    return model, model.init(jax.random.key(1), jnp.zeros((3, DIM)), train=False)


def linen_step(out):
    return (out * out).sum() / out.shape[0]


def test_a_module_of_linen_trains_with_its_statistics_and_random_keys():
    model, variables = linen_start()
    want, stats = variables["params"], [variables["batch_stats"]] * 2

    def jax_loss(params, stats, x, seed):
        keys = {"dropout": jax.random.key(seed)}
        out, new = model.apply({"params": params, "batch_stats": stats}, x, True, rngs=keys, mutable=["batch_stats"])
        return linen_step(out), new["batch_stats"]

    grads_of = jax.jit(jax.grad(jax_loss, has_aux=True))
    for number, x in enumerate(batches()):
        halves = [grads_of(want, stats[r], x[3 * r :][:3], 10 * number + r) for r in range(2)]
        want = jax.tree.map(lambda p, a, b: p - RATE * (a + b) / 2, want, *(grads for grads, _ in halves))
        stats = [new for _, new in halves]

    def train(comm):
        fn, tree = make_functional(*linen_start())
        stats = tree["batch_stats"]
        layout = fs.plan(tree["params"], comm.mesh, fs.zero3("dp"))
        tx = fs.optim.sgd(RATE)
        state = fs.init_state(tx, fs.shard(tree["params"], layout, comm, place="optim"), comm=comm)

        def unit(params, stats, x, seed):
            return fn({"params": params, "batch_stats": stats}, x, True, rngs={"dropout": seed}, mutable=["batch_stats"])

        def loss_fn(params, batch, comm):
            out, new = fs.forward(unit, params, *batch, comm=comm)
            return linen_step(out), new["batch_stats"]

        step = fs.Scheduler(comm)(fs.train_step(loss_fn, tx, has_aux=True))
        for number, x in enumerate(batches()):
            seed = torch.tensor(10 * number + comm.rank)
            state, (_, new) = step(state, (stats, torch.tensor(x)[3 * comm.rank :][:3], seed))
            stats = optree.tree_map(torch.clone, new)
        return fs.full_tree(state.params, comm=comm), stats

    for rank, (params, mine) in enumerate(simulate(fs.Mesh({"dp": 2}), train)):
        for found, expected in ((params, to_tensors(want)), (mine, to_tensors(stats[rank]))):
            optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5), found, expected)


class Counting(linen.Module):
    @linen.compact
    def __call__(self, x):
        count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        count.value += 1
        return linen.Dense(DIM)(x) * count.value


def test_integers_that_a_module_of_linen_returns_can_be_passed_to_its_next_call():
    model, x = Counting(), jnp.ones((3, DIM))
    variables = model.init(jax.random.key(1), x)
    fn, tree = make_functional(model, variables)
    for _ in range(3):
        want, new = model.apply(variables, x, mutable=["counts"])
        found, mine = fn(tree, torch.ones(3, DIM), mutable=["counts"])
        np.testing.assert_allclose(found.numpy(), np.asarray(want), rtol=1e-5)
        variables, tree = {**variables, **new}, {**tree, **mine}
    assert tree["counts"]["calls"].item() == variables["counts"]["calls"].item() == 4


def test_linen_without_variables_and_variables_without_linen_are_refused():
    with pytest.raises(TreeError, match=r"Linen such as Noisy does not have its variables: pass the result of init\(\)"):
        make_functional(Noisy())
    with pytest.raises(TreeError, match="variables are for Flax Linen, and a Block holds its own"):
        make_functional(nnx_blocks()[0], {})


def test_layers_of_a_scan_are_units_gathered_one_slice_at_a_time():
    """Losses and gradients are those of ``lax.scan`` over the stacked leaves."""
    keys, x = jax.random.split(jax.random.key(0), 2), torch.linspace(-1, 1, 4 * DIM).view(4, DIM)
    stacked = {"w": jax.random.normal(keys[0], (4, DIM, DIM)), "b": jax.random.normal(keys[1], (4, DIM))}

    def loss_in_jax(stacked, x):
        return jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None), x, stacked)[0].sum()

    def loss_fn(params, x, comm):
        for layer in params["layers"]:
            x = fs.forward(lambda p, x: torch.tanh(x @ p["w"] + p["b"]), layer, x, comm=comm)
        return x.sum()

    def rank_fn(comm):
        watched, shards = Watched(comm), fs.shard(params, layout, comm)
        loss, grads = fs.value_and_grad(loss_fn)(shards, x[2 * comm.rank :][:2], comm=watched)
        return fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm), watched.counts

    params = {"layers": unstack(to_tensors(stacked))}
    layout = fs.plan(params, fs.Mesh({"dp": 2}), fs.zero3("dp"), units="layers.*")
    assert len(layout.units) == 4
    results, counts = zip(*simulate(layout.mesh, rank_fn), strict=True)
    assert counts == ([0] * 8,) * 2, "forward and backward gather four slices, each with no other one whole"
    whole = to_arrays(stack(fs.unshard([grads for _, grads in results])["layers"]), like=stacked)
    value, expected = jax.value_and_grad(loss_in_jax)(stacked, jnp.array(x.numpy()))
    np.testing.assert_allclose(results[0][0].loss, value / 2, rtol=1e-5)
    for name, gradient in expected.items():
        np.testing.assert_allclose(whole[name], gradient / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1])
def test_layers_are_slices_without_a_copy_and_are_stacked_again(dim):
    stacked = {"w": torch.randn(3, 3, 5), "b": torch.randn(3, 3)}
    layers = unstack(stacked, dim=dim)
    assert layers[1]["w"].equal(stacked["w"].select(dim, 1))
    assert layers[1]["w"].untyped_storage().data_ptr() == stacked["w"].untyped_storage().data_ptr()
    again = stack(layers, dim=dim)
    assert all(again[name].equal(x) for name, x in stacked.items())


def test_leaves_that_do_not_hold_equally_many_layers_are_refused():
    wrong = r"unstack\(dim=0\): expected tensors of equally many layers along this dim, got "
    for tree, found in (
        ({"w": torch.ones(3, 2), "b": torch.ones(2)}, r"\[\[2\], \[3, 2\]\]"),
        ({"w": torch.ones(())}, r"\[\[\]\]"),
        ({"w": torch.ones(2), "n": 2}, r"\['int', \[2\]\]"),
        ({}, r"\[\]"),
    ):
        with pytest.raises(TreeError, match=wrong + found):
            unstack(tree)
    with pytest.raises(TreeError, match=r"layer 1 is .*\(3,\).*expected the shapes and dtypes of layer 0, .*\(2,\)"):
        stack([{"w": torch.ones(2)}, {"w": torch.ones(3)}])
    with pytest.raises(TreeError, match=r"layer 1 is .*float16.*expected the shapes and dtypes of layer 0, .*float32"):
        stack([{"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.float16)}])
    with pytest.raises(TreeError, match="expected at least one layer, got none"):
        stack([])
