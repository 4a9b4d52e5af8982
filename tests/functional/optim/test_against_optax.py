"""Each transformation of fs.optim against the one of optax with its name: arguments, state, and 20 steps under any cut."""

import inspect
import re
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optree
import pytest
import torch

import fsharp as fs
from fsharp.testing import simulate
from tests.scheduling import every

STEPS = 20
SHAPES = {"a": {"w": (7, 5), "b": (5,)}, "c": {"w": (3, 11), "scale": ()}, "empty": {"w": (0, 2)}}
WORLDS = {f"{strategy.__name__} on {n}": (n, strategy) for n in (1, 3, 5) for strategy in (fs.ddp, fs.zero3)}
NOT_FINITE = (3, 4, 9)
"""The steps that apply_if_finite has to leave out."""


@lru_cache
def draw(seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return optree.tree_map(lambda s: torch.randn(s, generator=g) * scale, SHAPES, is_leaf=lambda x: type(x) is tuple)


def gradients(step, name):
    grads = draw(100 + step, 3.0 if step % 3 == 0 else 0.1)  # some are clipped
    if name == "apply_if_finite" and step in NOT_FINITE:
        return {**grads, "a": {**grads["a"], "b": grads["a"]["b"] / 0}}
    return grads


def by_matrix(yes, no):
    """For optax: a tree of what there is for matrices and for the rest. For fsharp: patterns."""
    return lambda params: jax.tree.map(lambda x: yes if x.ndim == 2 else no, params)


def falling(count):
    return -0.1 / (count + 1)


MATRIX = {fs.optim: "**.w", optax: by_matrix(True, False)}
PARTS = {fs.optim: {"**": "rest", "**.w": "matrix"}, optax: by_matrix("matrix", "rest")}
RISING = (0.0, 1e-1, 5, STEPS, 1e-2)


def set_rate(step, state):
    """Between steps, as users do."""
    if step == 10:
        state.hyperparams["learning_rate"] = 3e-2


def nothing(step, state):
    pass


BETWEEN = {"inject_hyperparams": set_rate}
COMPILER = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiling takes most of the time, and the compiled updates run for microseconds."""


def both(make):
    """What the same calls make in fs.optim and in optax."""
    return partial(make, fs.optim), partial(make, optax)


# Name: (ours, optax's). Where they differ by intention the name says how, and optax's is what does the same there.
TABLE = {
    "adam": both(lambda o: o.adam(1e-1)),
    "adamw": both(lambda o: o.adamw(1e-1, 0.8, 0.99, 1e-6)),
    "adamw, decay per path in place of a mask": (
        lambda: fs.optim.adamw(1e-1, weight_decay={"**": 0.0, "**.w": 0.3}),
        lambda: optax.adamw(1e-1, weight_decay=0.3, mask=by_matrix(True, False)),
    ),
    "adamw, capturable, warmup_cosine_decay_schedule": (
        lambda: fs.optim.adamw(fs.optim.warmup_cosine_decay_schedule(*RISING), capturable=True),
        lambda: optax.adamw(optax.warmup_cosine_decay_schedule(*RISING)),
    ),
    "adamw, a schedule of optax": both(lambda o: o.adamw(optax.exponential_decay(1e-1, 5, 0.5))),
    "sgd": both(lambda o: o.sgd(1e-1)),
    "sgd, momentum": both(lambda o: o.sgd(1e-1, 0.9)),
    "sgd, nesterov": both(lambda o: o.sgd(1e-1, 0.9, True)),
    "sgd, weight_decay, which optax chains": (
        lambda: fs.optim.sgd(1e-1, 0.9, weight_decay=0.1),
        lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-1, 0.9)),
    ),
    "lion": both(lambda o: o.lion(1e-2)),
    "muon of matrices [out, in], others by partition": (
        lambda: fs.optim.partition({"matrix": fs.optim.muon(2e-2), "rest": fs.optim.adam(2e-2)}),
        lambda: optax.partition(
            {"matrix": optax.contrib.muon(2e-2), "rest": optax.adam(2e-2)}, by_matrix("matrix", "rest")
        ),
    ),
    "muon, consistent_rms, not nesterov": (
        lambda: fs.optim.partition(
            {
                "matrix": fs.optim.muon(2e-2, ns_steps=3, beta=0.9, weight_decay=0.1, nesterov=False, consistent_rms=0.2),
                "rest": fs.optim.adamw(2e-2, weight_decay=0.2),
            }
        ),
        lambda: optax.contrib.muon(
            2e-2, ns_steps=3, beta=0.9, weight_decay=0.1, nesterov=False, consistent_rms=0.2, adam_weight_decay=0.2
        ),
    ),
    "clip_by_global_norm": both(lambda o: o.chain(o.clip_by_global_norm(1.0), o.sgd(1e-1))),
    "ema": both(lambda o: o.chain(o.ema(0.9), o.sgd(1e-1))),
    "ema, not debiased": both(lambda o: o.chain(o.ema(0.9, debias=False), o.sgd(1e-1))),
    "masked": both(lambda o: o.chain(o.masked(o.chain(o.clip_by_global_norm(1.0), o.trace(0.9)), MATRIX[o]), o.scale(-0.1))),
    "partition, labels of plan": (
        lambda: fs.optim.partition({"matrix": fs.optim.adamw(1e-1), "rest": fs.optim.sgd(1e-1, 0.9)}),
        lambda: optax.partition({"matrix": optax.adamw(1e-1), "rest": optax.sgd(1e-1, 0.9)}, by_matrix("matrix", "rest")),
    ),
    "multi_transform, patterns": both(
        lambda o: o.multi_transform(
            {"matrix": o.chain(o.clip_by_global_norm(1.0), o.adamw(1e-1)), "rest": o.sgd(1e-1, 0.9)}, PARTS[o]
        )
    ),
    "partition, a function of the path": (
        lambda: fs.optim.partition(
            {"matrix": fs.optim.lion(1e-2), "rest": fs.optim.adam(1e-1)}, lambda p: "matrix" if p.endswith("w") else "rest"
        ),
        lambda: optax.partition({"matrix": optax.lion(1e-2), "rest": optax.adam(1e-1)}, by_matrix("matrix", "rest")),
    ),
    "apply_if_finite": both(lambda o: o.apply_if_finite(o.adamw(1e-1), 2)),
    "inject_hyperparams": both(lambda o: o.inject_hyperparams(o.adamw)(1e-1, b1=o.linear_schedule(0.5, 0.9, 10))),
    "MultiSteps": both(lambda o: o.MultiSteps(o.chain(o.clip_by_global_norm(1.0), o.adamw(1e-1)), 3)),
    "MultiSteps, sums, more and more of them": both(
        lambda o: o.MultiSteps(o.adamw(1e-1), lambda updates: 1 + updates // 2, use_grad_mean=False)
    ),
    "scale_by_adam, add_decayed_weights, scale_by_schedule": both(
        lambda o: o.chain(
            o.scale_by_adam(0.8, 0.99, 1e-6),
            o.add_decayed_weights(0.3, MATRIX[o]),
            o.scale_by_schedule(o.join_schedules([o.constant_schedule(-0.1), falling], [8])),
        )
    ),
    "trace, scale_by_learning_rate, identity": both(
        lambda o: o.chain(
            o.trace(0.9, nesterov=True), o.scale_by_learning_rate(o.cosine_decay_schedule(0.1, 15, 0.1)), o.identity()
        )
    ),
}  # fmt: skip


@lru_cache
def unsharded(name):
    """Parameters by optax, whose matrices are ``[in, out]``: transposed there and back."""

    def arrays(tree):
        return optree.tree_map(lambda x: jnp.asarray((x.mT if x.ndim == 2 else x).numpy()), tree)

    tx, params = TABLE[name][1](), arrays(draw(0))
    state = tx.init(params)
    update = jax.jit(tx.update, compiler_options=COMPILER)
    for step in range(STEPS):
        BETWEEN.get(name, nothing)(step, state)
        updates, state = update(arrays(gradients(step, name)), state, params)
        params = optax.apply_updates(params, updates)
    tensors = optree.tree_map(lambda x: torch.from_numpy(np.array(x)), params)
    return optree.tree_map(lambda x: x.mT if x.ndim == 2 else x, tensors)


def sharded(comm, name, strategy, donate):
    tx = TABLE[name][0]()
    layout = fs.plan(
        draw(0), comm.mesh, strategy("dp"), units=["a", "c"],
        labels={**dict.fromkeys(["a.b", "c.scale"], "rest"), "**.w": "matrix"},
        atoms={"**.w": fs.layouts.LeafAtom()} if "muon" in name else fs.layouts.ElementAtom(),
    )  # fmt: skip
    state = fs.init_state(tx, fs.shard(draw(0), layout, comm), comm=comm)
    for step in range(STEPS):
        BETWEEN.get(name, nothing)(step, state.opt)
        grads = fs.shard_for(gradients(step, name), layout, comm.rank, place="optim")
        state = fs.update(tx, grads, state, comm=comm, donate=donate)
    return fs.full_tree(state.params, comm=comm)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")
@every(12, name=TABLE, world=WORLDS)
def test_the_same_as_optax(name, world):
    n, strategy = WORLDS[world]
    expected = unsharded(name)
    assert all(leaf.isfinite().all() for leaf in optree.tree_leaves(expected))
    for found in simulate(fs.Mesh({"dp": n}), lambda comm: sharded(comm, name, strategy, donate=n > 1)):
        for path, a, b in zip(
            optree.tree_paths(expected), optree.tree_leaves(found), optree.tree_leaves(expected), strict=True
        ):
            assert a.shape == b.shape
            if a.numel():
                worst = float((a - b).abs().max() / b.abs().max())
                print(f"{name}, {world}, {path}: {worst:.1e}")
                assert worst < 1e-5, path


OF_OPTAX = sorted(
    {name for name in vars(fs.optim) if not name.startswith("_")}
    - {"Transform", "from_optax", "global_norm", "with_elementwise_check", "with_ema"}
)
DIFFERENCES = Path("docs/jax.md").read_text().partition("\n## Where `fs.optim` differs from optax\n")[2].partition("\n## ")[0]
OTHER_DEFAULTS = {
    "multi_transform": ["param_labels"],
    "partition": ["param_labels"],
    "scale_by_learning_rate": ["learning_rate"],
}


@pytest.mark.parametrize("name", OF_OPTAX)
def test_arguments_have_the_names_order_and_defaults_of_optax(name):
    ours, theirs = (
        {each.name: each for each in inspect.signature(function).parameters.values() if each.kind != each.VAR_POSITIONAL}
        for function in (getattr(fs.optim, name), getattr(optax, name, None) or getattr(optax.contrib, name))
    )
    for each in ours.keys() ^ theirs.keys():
        assert re.search(rf"\b{each}\b", DIFFERENCES), f"{each} is not in the table of differences of docs/jax.md"
    by_position = [each.name for each in ours.values() if each.kind == each.POSITIONAL_OR_KEYWORD]
    assert by_position == [*theirs][: len(by_position)]
    others = [each for each in ours if each in theirs and ours[each].default != theirs[each].default]
    assert others == OTHER_DEFAULTS.get(name, [])


STATES = {
    "adam": lambda o: o.adam(0.1),
    "adamw": lambda o: o.adamw(0.1),
    "lion": lambda o: o.lion(0.1),
    "scale_by_adam": lambda o: o.scale_by_adam(),
    "ema": lambda o: o.ema(0.9),
    "trace": lambda o: o.trace(0.9),
    "scale_by_schedule": lambda o: o.scale_by_schedule(falling),
    "masked": lambda o: o.masked(o.trace(0.9), MATRIX[o]),
    "partition": lambda o: o.partition({"matrix": o.trace(0.9), "rest": o.identity()}, PARTS[o]),
    "apply_if_finite": lambda o: o.apply_if_finite(o.sgd(0.1), 2),
    "inject_hyperparams": lambda o: o.inject_hyperparams(o.sgd)(0.1),
    "MultiSteps": lambda o: o.MultiSteps(o.sgd(0.1), 2),
}


@pytest.mark.parametrize("name", STATES)
def test_states_have_the_fields_of_optax(name):
    ours, theirs = map(STATES[name], (fs.optim, optax))
    found = ours.init(fs.shard_for(draw(0), fs.plan(draw(0), fs.Mesh({"dp": 1}), fs.ddp("dp")), 0))
    expected = theirs.init(optree.tree_map(lambda x: jnp.asarray(x.numpy()), draw(0)))
    if name in ("adam", "adamw", "lion"):  # a state for each part; see the page
        expected = expected[0]
    assert found._fields == tuple(each for each in expected._fields if each not in ("hyperparams_states", "skip_state"))
