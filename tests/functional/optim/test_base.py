"""partition and masked: labels of plan or by path, and leaves that are frozen, empty or scalars."""

import math
import re

import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import FsharpError, OptionError, TreeError
from tests.ranks import on_ranks

TREE = {"w": torch.linspace(-1, 1, 34).view(17, 2), "b": torch.ones(5), "scale": torch.tensor(2.0), "none": torch.ones(0, 3)}
TXS = {"w": fs.optim.adamw(0.1), "rest": fs.optim.sgd(0.1, 0.9)}
LABELS = {"**": "rest", "w": "w", "none": "w"}


def train(comm, tx, **options):
    layout = fs.plan(TREE, comm.mesh, fs.zero3("dp"), **options)
    state = fs.init_state(tx, fs.shard(TREE, layout, comm), comm=comm)
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        grads = optree.tree_map(lambda x: torch.randn(x.shape, generator=g), TREE)
        state = fs.update(tx, fs.trainable(fs.shard(grads, layout, comm, place="optim")), state, comm=comm)
    return fs.full_tree(state.params, comm=comm), state


@pytest.mark.parametrize("frozen", [(), ("b",), ("w",)])
@on_ranks(fs.Mesh({"dp": 3}))
def test_partition_by_labels_of_plan_patterns_and_functions_is_the_same(comm, frozen):
    plan_labels = {"w": "w", "none": "w", "b": "rest", "scale": "rest"}
    ways = [
        (fs.optim.partition(TXS), {"labels": plan_labels}),
        (fs.optim.partition(TXS, lambda path: plan_labels[path]), {}),
        (fs.optim.multi_transform(TXS, LABELS), {}) if not frozen else (fs.optim.multi_transform(TXS, plan_labels.get), {}),
    ]
    first, *others = [train(comm, tx, frozen=frozen, **options)[0] for tx, options in ways]
    for path in frozen:
        assert torch.equal(first[path], TREE[path])
    for other in others:
        torch.testing.assert_close(optree.tree_leaves(first), optree.tree_leaves(other), rtol=1e-6, atol=1e-7)


def test_partition_with_labels_of_plan_keeps_state_of_its_own_leaves_alone():
    labelled = train(fs.SingleComm(), fs.optim.partition(TXS), labels={"w": "w", "none": "w", "b": "rest", "scale": "rest"})[1]
    by_path = train(fs.SingleComm(), fs.optim.partition(TXS, LABELS))[1]
    numel = [
        sum(b.numel() for node in fs.layouts.units_of(state.opt.inner_states["w"].mu) for b in node.buffers)
        for state in (labelled, by_path)
    ]
    assert numel == [34, 34 + 5 + 1]


def test_a_masked_transformation_that_is_told_of_norms_sees_no_others():
    """A scalar, an empty leaf and one of them that is not selected."""
    tx = fs.optim.chain(fs.optim.masked(fs.optim.clip_by_global_norm(1e-3), {"**": True, "w": False}), fs.optim.scale(-1.0))
    found, state = train(fs.SingleComm(), tx)
    g = torch.Generator().manual_seed(2)
    last = optree.tree_map(lambda x: torch.randn(x.shape, generator=g), TREE)
    expected = torch.cat([last["b"], last["scale"].view(1)]).norm()
    torch.testing.assert_close(state.opt[0].inner_state.norm, expected)
    assert (found["b"] - TREE["b"]).norm() < 4e-3
    assert (found["w"] - TREE["w"]).norm() > 1.0


@pytest.mark.parametrize("mask", [None, [True], {"w"}, 1])
def test_a_mask_that_is_neither_patterns_nor_a_function_is_refused(mask):
    with pytest.raises(OptionError, match=re.escape(f"mask is {mask!r}, expected a str or a Sequence of str or a Mapping")):
        fs.optim.masked(fs.optim.sgd(0.1), mask)


NO_NUMBERS = {
    "a schedule": (lambda: fs.optim.adamw(lambda count: None), "learning_rate(0) is None, expected a number"),
    "a schedule, capturable": (
        lambda: fs.optim.adamw(lambda count: "high", capturable=True),
        "learning_rate(tensor(0.)) is 'high', expected a number",
    ),
    "joined": (
        lambda: fs.optim.sgd(fs.optim.join_schedules([lambda count: None, fs.optim.constant_schedule(1.0)], [2])),
        "learning_rate(0) is None, expected a number",
    ),
    "in a chain": (
        lambda: fs.optim.chain(fs.optim.scale_by_adam(), fs.optim.scale_by_learning_rate(lambda count: None)),
        "learning_rate(0) is None, expected a number",
    ),
    "of scale_by_schedule": (
        lambda: fs.optim.scale_by_schedule(lambda count: None),
        "step_size_fn(0) is None, expected a number",
    ),
    "injected": (
        lambda: fs.optim.inject_hyperparams(fs.optim.sgd)(learning_rate=lambda count: None),
        "learning_rate(0) is None, expected a number",
    ),
    "per path": (
        lambda: fs.optim.sgd(0.1, weight_decay=lambda path: None),
        "weight_decay('none') is None, expected a number",
    ),
    "NaN": (lambda: fs.optim.sgd(lambda count: math.nan), "learning_rate(0) is nan, expected a finite number"),
    "infinite": (
        lambda: fs.optim.adamw(0.1, weight_decay=lambda path: math.inf),
        "weight_decay('none') is inf, expected a finite number",
    ),
    "MultiSteps": (
        lambda: fs.optim.MultiSteps(fs.optim.sgd(0.1), lambda count: None),
        "every_k_schedule is None, expected a positive whole number",
    ),
    "no pair": (
        lambda: fs.optim.chain(fs.optim.Transform(lambda p: (), lambda g, s, p: None, {}, name="mine"), fs.optim.sgd(0.1)),
        "update of mine returned None, expected a pair",
    ),
    "no updates": (
        lambda: fs.optim.Transform(lambda p: (), lambda g, s, p: (None, s), {}, name="mine"),
        "update of mine returned (None, ()), expected a pair",
    ),
}


@pytest.mark.parametrize("case", NO_NUMBERS)
@on_ranks(fs.Mesh({"dp": 2}))
def test_functions_that_return_no_number_are_refused_on_all_ranks(comm, case):
    make, text = NO_NUMBERS[case]
    with pytest.raises(FsharpError, match=re.escape(text)):
        train(comm, make())


@on_ranks(fs.Mesh({"dp": 2}))
def test_a_label_without_a_transformation_is_refused_on_all_ranks(comm):
    with pytest.raises(
        OptionError, match=r"no transformation for the label 'other'.\n  labels           \['other', 'rest', 'w'\]"
    ):
        train(comm, fs.optim.partition(TXS, {**LABELS, "b": "other"}))


@pytest.mark.parametrize(("made", "used"), [(None, LABELS), (LABELS, None)], ids=["labels of plan first", "patterns first"])
def test_a_state_by_other_labels_is_refused(made, used):
    """Each transformation has state for its own leaves with labels of plan, and for all leaves with others."""
    comm, (first, second) = fs.SingleComm(), (fs.optim.partition(TXS, labels) for labels in (made, used))
    layout = fs.plan(TREE, comm.mesh, fs.zero3("dp"), labels=LABELS)
    state = fs.init_state(first, fs.shard(TREE, layout, comm), comm=comm)
    grads = fs.shard(TREE, layout, comm, place="optim")
    with pytest.raises(TreeError, match=r"another transformation(?s:.*)partition by param_labels\(w=adamw, rest=sgd with mom"):
        fs.update(second, grads, state, comm=comm)


def _pull(grads, kept, params):
    return optree.tree_map(lambda g, k, p: -0.1 * g + 0.5 * (p - k), grads, kept, params)


PAIRS_THAT_KEEP_PARAMETERS = {
    "the first ones": (lambda params: params, lambda grads, kept, params: (_pull(grads, kept, params), kept)),
    "the first ones, detached": (
        lambda params: optree.tree_map(torch.Tensor.detach, params),
        lambda grads, kept, params: (_pull(grads, kept, params), kept),
    ),
    "the last ones": (
        lambda params: optree.tree_map(torch.clone, params),
        lambda grads, kept, params: (_pull(grads, kept, params), params),
    ),
}


@pytest.mark.parametrize("kind", ["pair", "Transform", "chain"])
@pytest.mark.parametrize("name", PAIRS_THAT_KEEP_PARAMETERS)
def test_a_state_that_holds_the_parameters_themselves_is_right_with_updates_in_place(name, kind):
    pair = PAIRS_THAT_KEEP_PARAMETERS[name]
    own = fs.optim.Transform(*pair, {}, name="pull")

    def trained(donate):
        comm, tx = fs.SingleComm(), {"pair": pair, "Transform": own, "chain": fs.optim.chain(own, fs.optim.sgd(-1.0))}[kind]
        shapes = {"w": torch.arange(6.0)}
        params = fs.shard(shapes, fs.plan(shapes, comm.mesh, fs.zero3("dp")), comm)
        state = fs.init_state(tx, params, comm=comm)
        step = fs.train_step(lambda p, x, comm: fs.forward(lambda p, x: (p["w"] * x).sum(), p, x, comm=comm), tx, donate=donate)
        for i in range(3):
            state, _ = step(state, torch.full((6,), float(i + 1)), comm)
        return fs.full_tree(state.params, comm=comm)["w"]

    assert torch.equal(trained(donate=True), trained(donate=False))


def _lookahead(inner, every):
    """Return a transformation whose ``apply`` returns the slow parameters of its state as the new parameters."""

    def apply(grads, state, params, *, comm, donate):
        count, slow, held = state
        params, held = inner.apply(grads, held, params, comm=comm, donate=donate)
        if (count + 1) % every == 0:
            params = slow = optree.tree_map(lambda a, b: a + 0.5 * (b - a), slow, params)
        return params, (count + 1, slow, held)

    return fs.optim.Transform(lambda params: (0, params, inner.init(params)), inner.update, {}, apply)


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: fs.optim.chain(fs.optim.identity(), tx)], ids=["alone", "chain"])
def test_parameters_in_the_state_that_apply_returns_are_right_with_updates_in_place(wrap):
    def trained(*donations):
        comm, tree, tx = fs.SingleComm(), {"w": torch.arange(6.0)}, wrap(_lookahead(fs.optim.adamw(0.1), every=3))
        params = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm)
        state = fs.init_state(tx, params, comm=comm)
        for i in range(7):
            state = fs.update(tx, params, state, comm=comm, donate=donations[i % len(donations)])
        return fs.full_tree(state.params, comm=comm)["w"]

    assert torch.equal(trained(True), trained(False))
    assert torch.equal(trained(False, True), trained(False))


def test_a_state_stays_whole_when_an_older_state_is_donated():
    """An update that is skipped inside of a chain returns the state it got: its nodes were those of the older state."""
    comm, tree = fs.SingleComm(), {"w": torch.arange(6.0)}
    tx = fs.optim.chain(
        fs.optim.MultiSteps(fs.optim.inject_hyperparams(fs.optim.scale_by_adam)(b1=0.9), 2), fs.optim.scale(-0.1)
    )
    params = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm)
    start = fs.init_state(tx, params, comm=comm)
    state = fs.update(tx, params, start, comm=comm)
    state.opt[0].inner_opt_state.hyperparams["b1"] = 0.5
    assert start.opt[0].inner_opt_state.hyperparams == {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
    fs.update(tx, params, start, comm=comm, donate=True)
    assert fs.update(tx, params, state, comm=comm).step == 2
