"""Updates that are handed on, masks that say no, and norms of what is large, small or infinite."""

import math

import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import MeshError, PatternError, TreeError
from fsharp.testing import simulate
from tests.functional.optim.test_transforms import draw

ONE = fs.SingleComm()


def adamw(p, g, state, count, lr, wd):
    """As in optax: the update in float64."""
    m, v = state
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return -lr * (m / (1 - 0.9**count) / ((v / (1 - 0.99**count)).sqrt() + 1e-8) + wd * p), (m, v)


def sgd(p, g, state, count, lr, wd):
    m = 0.9 * state[0] + g + wd * p
    return -lr * (g + wd * p + 0.9 * m), (m, m)


def lion(p, g, state, count, lr, wd):
    m = state[0]
    return -lr * ((0.9 * m + 0.1 * g).sign() + wd * p), (0.99 * m + 0.01 * g, m)


RULES = {
    "adamw": (adamw, lambda lr, wd: fs.optim.adamw(lr, b2=0.99, weight_decay=wd)),
    "sgd": (sgd, lambda lr, wd: fs.optim.sgd(lr, momentum=0.9, nesterov=True, weight_decay=wd)),
    "lion": (lion, lambda lr, wd: fs.optim.lion(lr, weight_decay=wd)),
}
NO_BIAS = {"**": 0.1, "**.b": 0.0}


@pytest.mark.parametrize("decay", [0.0, 0.1, NO_BIAS])
@pytest.mark.parametrize("lr", [1e-2, 1e-7])
@pytest.mark.parametrize("name", RULES)
def test_an_update_that_is_handed_on_has_all_its_digits(name, lr, decay):
    """Of parameters a million times as large: what is behind it in a chain, or asked for alone."""
    rule, make = RULES[name]
    mesh, params = fs.Mesh({"dp": 3}), optree.tree_map(lambda x: 10 * x, draw(0))
    layout = fs.plan(params, mesh, fs.zero3("dp"), units="*")

    def rank_fn(comm):
        tx, own = make(lr, decay), fs.shard(params, layout, comm)
        state, found = tx.init(own), []
        for i in range(3):
            updates, state = tx.update(fs.shard_for(draw(100 + i), layout, comm.rank), state, own, comm=comm)
            found.append(fs.full_tree(updates, comm=comm))
        return found

    got = simulate(mesh, rank_fn)[0]
    paths, leaves, _ = optree.tree_flatten_with_path(params)
    for k, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        p = leaf.double()
        state = (torch.zeros_like(p), torch.zeros_like(p))
        wd = decay if isinstance(decay, float) else decay["**.b" if path[-1] == "b" else "**"]
        for i in range(3):
            update, state = rule(p, optree.tree_leaves(draw(100 + i))[k].double(), state, i + 1, lr, wd)
            torch.testing.assert_close(optree.tree_leaves(got[i])[k].double(), update, rtol=1e-6, atol=1e-6 * lr)


def test_what_is_chained_behind_an_optimizer_gets_its_update():
    tx = fs.optim.chain(fs.optim.adamw(1e-7, weight_decay=0.0), fs.optim.clip_by_global_norm(1e-9), fs.optim.sgd(-1.0))
    params = fs.shard_for({"w": torch.full((50,), 10.0)}, fs.plan({"w": torch.ones(50)}, ONE.mesh, fs.ddp("dp")), 0)
    grads = optree.tree_map(torch.ones_like, params)
    updates, state = tx.update(grads, tx.init(params), params, comm=ONE)
    assert float(state[1].norm) == pytest.approx(1e-7 * math.sqrt(50), rel=1e-6)
    torch.testing.assert_close(updates.buffers[0], torch.full((50,), -1e-9 / math.sqrt(50)), rtol=1e-6, atol=0)


def test_a_dictionary_of_patterns_says_yes_and_no():
    tree = {"a": {"w": torch.ones(3), "b": torch.ones(2)}, "c": {"w": torch.ones(2)}}

    def frozen(rule):
        layout = fs.plan(tree, ONE.mesh, fs.ddp("dp"), frozen=rule)
        unit = layout.units[0]
        return {unit.path_in_tree(leaf) for leaf in unit.leaves if not unit.groups[leaf.group].trainable}

    assert frozen({"**": True, "**.b": False}) == {"a.w", "c.w"}
    assert frozen({"a": False}) == set()
    with pytest.raises(PatternError, match="'a' stands for 1, expected True or False"):
        frozen({"a": 1})
    with pytest.raises(PatternError, match="'x' matches nothing"):
        frozen({"x": False})
    layout = fs.plan(tree, ONE.mesh, fs.ddp("dp"))
    params = fs.shard_for(tree, layout, 0)
    tx = fs.optim.masked(fs.optim.sgd(0.5), {"**": True, "**.b": False})
    updates, _ = tx.update(params, tx.init(params), params, comm=ONE)
    new = fs.full_tree(updates, comm=ONE)
    assert (new["a"]["w"].tolist(), new["a"]["b"].tolist()) == ([-0.5] * 3, [1.0] * 2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_norm_of_float64_is_float64(deterministic):
    tree = {"w": torch.tensor([1e-200, 2e-200], dtype=torch.float64), "v": torch.ones(2)}
    layout = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"))
    alone = fs.plan({"w": tree["w"]}, fs.Mesh({"dp": 2}), fs.zero3("dp"))

    def rank_fn(comm):
        both = fs.optim.global_norm(fs.shard(tree, layout, comm), comm=comm, deterministic=deterministic)
        big = optree.tree_map(lambda x: x * 1e200 + 1e-9, fs.shard({"w": tree["w"]}, alone, comm))
        return both, fs.optim.global_norm(big, comm=comm, deterministic=deterministic)

    for both, big in simulate(layout.mesh, rank_fn):
        assert both.dtype == big.dtype == torch.float64
        assert float(both) == pytest.approx(math.sqrt(2), rel=1e-15)
        assert float(big) == pytest.approx(math.hypot(1 + 1e-9, 2 + 1e-9), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_what_is_infinite_is_that_of_torch(dtype):
    values = torch.tensor([1.0, math.inf, -2.0, 0.0], dtype=dtype)
    tree = {"w": torch.zeros(4, dtype=dtype), "v": torch.zeros(2, dtype=dtype)}
    params = fs.shard_for(tree, fs.plan(tree, ONE.mesh, fs.ddp("dp")), 0)
    for bad in (values, values.nan_to_num(posinf=math.nan)):
        grads = fs.shard_for({"w": bad, "v": torch.ones(2, dtype=dtype)}, fs.plan(tree, ONE.mesh, fs.ddp("dp")), 0)
        tx = fs.optim.clip_by_global_norm(1.0)
        clipped, state = tx.update(grads, tx.init(params), params, comm=ONE)
        theirs = {"w": torch.zeros(4, dtype=dtype), "v": torch.zeros(2, dtype=dtype)}
        theirs["w"].grad, theirs["v"].grad = bad.clone(), torch.ones(2, dtype=dtype)
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), 1.0)
        for name, got in fs.full_tree(clipped, comm=ONE).items():
            assert torch.equal(got.isnan(), theirs[name].grad.isnan())
            assert torch.equal(got.nan_to_num(), theirs[name].grad.nan_to_num())
        assert not math.isfinite(float(state.norm))
        tx = fs.optim.apply_if_finite(fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(1.0)), 5)
        new = fs.update(tx, grads, fs.init_state(tx, params, comm=ONE), comm=ONE)
        assert new.opt.total_notfinite == 1
        assert all(map(torch.equal, new.params.buffers, params.buffers))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("strategy", [fs.zero3, fs.ddp])
def test_the_norm_of_complex_elements_has_their_imaginary_parts(strategy, deterministic):
    tree = {"w": torch.tensor([3 + 4j, 0, 12j])}
    layout = fs.plan(tree, fs.Mesh({"dp": 2}), strategy("dp"))

    def rank_fn(comm):
        return fs.optim.global_norm(fs.shard(tree, layout, comm), comm=comm, deterministic=deterministic)

    for norm in simulate(layout.mesh, rank_fn):
        assert (norm.dtype, float(norm)) == (torch.float32, 13.0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.int8, torch.float8_e4m3fn])
def test_the_norm_counts_frozen_leaves_of_any_dtype(dtype, deterministic):
    tree = {"w": torch.full((4,), 2.0), "frozen": torch.tensor([1, 0, 1]).to(dtype)}
    params = fs.shard(tree, fs.plan(tree, ONE.mesh, fs.zero3("dp"), frozen="frozen"), ONE)
    assert float(fs.optim.global_norm(params, comm=ONE, deterministic=deterministic)) == pytest.approx(math.sqrt(18))


@pytest.mark.parametrize("deterministic", [False, True])
def test_padding_counts_in_no_norm(deterministic):
    tree = {"w": torch.arange(1.0, 6.0)}
    layout = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"))

    def rank_fn(comm):
        for value in (math.nan, 7.0):
            params = fs.shard(tree, layout, comm)
            if comm.rank == 1:
                params.buffers[0][2] = value
            yield float(fs.optim.global_norm(params, comm=comm, deterministic=deterministic))

    for norms in simulate(layout.mesh, lambda comm: list(rank_fn(comm))):
        assert norms == [pytest.approx(math.sqrt(55))] * 2


def test_updates_of_padding_that_are_nan_do_not_reach_parameters():
    tree = {"w": torch.arange(1.0, 6.0)}
    tx = fs.optim.chain(fs.optim.scale_by_adam(eps=0.0), fs.optim.clip_by_global_norm(1.0), fs.optim.scale(-0.1))

    def rank_fn(comm):
        params = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm)
        state = fs.update(tx, params, fs.init_state(tx, params, comm=comm), comm=comm)
        return fs.full_tree(state.params, comm=comm)["w"]

    (one,), many = simulate(fs.Mesh({"dp": 1}), rank_fn), simulate(fs.Mesh({"dp": 2}), rank_fn)
    assert one.isfinite().all()
    assert all(torch.equal(w, one) for w in many)


@pytest.mark.parametrize("main", [torch.float32, torch.float64])
def test_the_norm_that_clipping_keeps_has_the_dtype_of_a_new_state(main):
    tree, other = {"w": torch.ones(4, dtype=main)}, torch.float64 if main == torch.float32 else torch.float32
    params = fs.shard(tree, fs.plan(tree, ONE.mesh, fs.zero3("dp"), precision=fs.Precision(accumulate=other)), ONE)
    tx = fs.optim.clip_by_global_norm(1.0)
    state = tx.init(params)
    _, new = tx.update(optree.tree_map(lambda x: x.to(other), params), state, params, comm=ONE)
    assert new.norm.dtype == state.norm.dtype


def test_the_norm_of_what_this_comm_does_not_hold_is_refused():
    """Their norms were numbers without a meaning: 0 of plain tensors, and of a donated state that of the newer one."""
    comm, tree, tx = fs.SingleComm(), {"w": torch.ones(4)}, fs.optim.sgd(0.1)
    layout = fs.plan(tree, comm.mesh, fs.zero3("dp"))
    state = fs.init_state(tx, fs.shard(tree, layout, comm), comm=comm)
    fs.update(tx, fs.shard(tree, layout, comm, place="optim"), state, comm=comm, donate=True)
    with pytest.raises(TreeError, match=r"global_norm\(\): unit \(root\) belongs to a donated state"):
        fs.optim.global_norm(state.params, comm=comm)
    with pytest.raises(TreeError, match=r"unshard\(\): unit \(root\) belongs to a donated state"):
        fs.unshard([state.params])
    with pytest.raises(TreeError, match=r"global_norm\(\): expected a tree of Sharded, got dict"):
        fs.optim.global_norm(tree, comm=comm)
    on_three = fs.shard_for(tree, fs.plan(tree, fs.Mesh({"dp": 3}), fs.zero3("dp")), 0)
    with pytest.raises(MeshError, match=r"global_norm\(\): the Comm is on another mesh than the layout"):
        fs.optim.global_norm(on_three, comm=comm)
