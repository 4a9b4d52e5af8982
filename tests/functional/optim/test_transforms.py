"""Update rules against torch's own, and their independence of how the tree is cut."""

import math
import re

import optree
import pytest
import torch
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.testing import simulate
from tests.gpt_like import make_params
from tests.scheduling import every

ONE = fs.SingleComm()
SHAPES = {"a": {"w": (13, 7), "b": (7,)}, "c": {"w": (65, 3), "b": ()}}


def draw(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return optree.tree_map(lambda s: torch.randn(s, generator=g).to(dtype), SHAPES, is_leaf=lambda x: type(x) is tuple)


def run(
    tx, *, n=1, strategy=fs.zero3, steps=5, atoms=fs.layouts.ElementAtom(), labels="default", donate=False, dtype=torch.float32
):
    """Full parameters and full optimizer state after some steps on random gradients, on a simulated mesh."""
    mesh = fs.Mesh({"dp": n})
    params = draw(0, dtype)
    layout = fs.plan(params, mesh, strategy("dp"), units="*", atoms=atoms, labels=labels)

    def rank_fn(comm):
        state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)
        for i in range(steps):
            grads = fs.trainable(fs.shard_for(draw(100 + i, dtype), layout, comm.rank, place="optim"))
            state = fs.update(tx, grads, state, comm=comm, donate=donate)
        return fs.full_tree((state.params, state.opt), comm=comm)

    return simulate(mesh, rank_fn)[0]


def run_torch(make_optimizer):
    params = optree.tree_map(lambda t: t.requires_grad_(), draw(0))
    optimizer = make_optimizer(params)
    for i in range(5):
        for p, g in zip(optree.tree_leaves(params), optree.tree_leaves(draw(100 + i)), strict=True):
            p.grad = g
        optimizer.step()
    return optree.tree_map(torch.Tensor.detach, params)


def groups(params, **by_name):
    """torch.optim parameter groups by the last key of the path."""
    paths, leaves, _ = optree.tree_flatten_with_path(params)
    return [{"params": [p for path, p in zip(paths, leaves) if path[-1] == name], **kw} for name, kw in by_name.items()]


TORCH = {
    "adamw": (
        fs.optim.adamw(1e-2, b2=0.99, weight_decay=0.1),
        lambda p: torch.optim.AdamW(optree.tree_leaves(p), 1e-2, (0.9, 0.99), weight_decay=0.1),
    ),
    "adamw, per path": (
        fs.optim.adamw(1e-2, weight_decay={"**": 0.1, "**.b": 0.0}, lr_scale={"**": 1.0, "c": 1.0, "**.b": 0.5}),
        lambda p: torch.optim.AdamW(groups(p, w={"weight_decay": 0.1}, b={"weight_decay": 0.0, "lr": 5e-3}), 1e-2),
    ),
    "sgd": (fs.optim.sgd(0.1, weight_decay=0.1), lambda p: torch.optim.SGD(optree.tree_leaves(p), 0.1, weight_decay=0.1)),
    "sgd, momentum": (fs.optim.sgd(0.1, momentum=0.9), lambda p: torch.optim.SGD(optree.tree_leaves(p), 0.1, 0.9)),
    "sgd, nesterov": (
        fs.optim.sgd(0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(optree.tree_leaves(p), 0.1, 0.9, nesterov=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "sgd, momentum"])
@pytest.mark.parametrize("other", [{"w": torch.ones(7)}, {"w": torch.ones(70), "more": {"w": torch.ones(70)}}])
def test_a_state_of_other_parameters_is_refused(name, other):
    """Fused kernels do not look at the sizes of what they are given."""
    comm, tx = fs.SingleComm(), TORCH[name][0]

    def start(tree):
        layout = fs.plan(tree, comm.mesh, fs.zero3("dp"), units="*")
        return layout, fs.init_state(tx, fs.shard(tree, layout, comm), comm=comm)

    tree = {"w": torch.ones(70)}
    layout, state = start(tree)
    wrong = state._replace(opt=start(other)[1].opt)
    grads = fs.shard(tree, layout, comm, place="optim")
    with pytest.raises(TreeError, match="the optimizer state is that of other parameters, another layout"):
        fs.update(tx, grads, wrong, comm=comm)


def test_a_state_without_momentum_is_told_from_one_with():
    comm, ways = fs.SingleComm(), (fs.optim.sgd(0.1), fs.optim.sgd(0.1, momentum=0.9))
    layout = fs.plan({"w": torch.ones(3)}, comm.mesh, fs.zero3("dp"))
    shards = fs.shard({"w": torch.ones(3)}, layout, comm)
    for made, used in (ways, ways[::-1]):
        with pytest.raises(TreeError, match=r"another transformation(?s:.*)sgd with momentum"):
            fs.update(used, shards, fs.init_state(made, shards, comm=comm), comm=comm)


def test_orthogonalized_singular_values_are_near_one():
    from fsharp.functional.optim.muon import orthogonalize

    for shape in ((30, 10), (10, 30), (8, 8)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
        assert 0.5 < values.min() <= values.max() < 1.4, values


RULES = {
    "adamw": fs.optim.adamw(1e-2, weight_decay={"**": 0.1, "**.b": 0.0}),
    "sgd": fs.optim.sgd(1e-2, momentum=0.9, weight_decay=0.1),
    "lion": fs.optim.lion(1e-2, weight_decay=0.1),
    "clipped": fs.optim.chain(fs.optim.clip_by_global_norm(0.3, deterministic=True), fs.optim.adamw(1e-2)),
    "masked": fs.optim.chain(
        fs.optim.masked(fs.optim.clip_by_global_norm(0.3, deterministic=True), "**.b"), fs.optim.sgd(1e-1)
    ),
    "with_ema": fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.9),
    "primitives": fs.optim.chain(
        fs.optim.trace(0.9, nesterov=True),
        fs.optim.ema(0.9),
        fs.optim.scale_by_adam(),
        fs.optim.add_decayed_weights(0.1, "**.w"),
        fs.optim.scale_by_schedule(lambda count: -0.1 / (count + 1)),
    ),
    "partition": fs.optim.partition(
        {"w": fs.optim.adamw(1e-2), "b": fs.optim.sgd(0.1, momentum=0.9)}, {"**.w": "w", "**.b": "b"}
    ),
    "MultiSteps": fs.optim.MultiSteps(fs.optim.adamw(1e-2), 2),
    "finite": fs.optim.apply_if_finite(fs.optim.adamw(1e-2), 2),
}


@every(3, name=RULES, dtype=[torch.float32, torch.float64, torch.bfloat16])
def test_no_bit_depends_on_the_cut(name, dtype):
    expected = run(RULES[name], n=1, strategy=fs.ddp, dtype=dtype)
    for n, strategy, donate in ((2, fs.zero1, True), (3, fs.zero3, False), (7, fs.zero2, True)):
        got = run(RULES[name], n=n, strategy=strategy, donate=donate, dtype=dtype)
        for path, a, b in zip(optree.tree_paths(got), optree.tree_leaves(got), optree.tree_leaves(expected)):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), (n, strategy.__name__, donate, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TORCH)
def test_rules_are_those_of_torch(name, dtype):
    """Five steps, each of which rounds parameters up to 4 and a momentum; torch's kernel for SGD in 16 bits moves none."""
    tx, make_optimizer = TORCH[name]
    ours, _ = run(tx, n=3, dtype=dtype, donate=dtype is torch.float32)
    theirs = run_torch(make_optimizer)
    bound = 10 * 4 * torch.finfo(dtype).eps
    optree.tree_map(lambda a, b: torch.testing.assert_close(a.float(), b, rtol=0, atol=bound), ours, theirs)
    assert (ours["a"]["w"].float() - draw(0)["a"]["w"]).norm() > 0.5 * (theirs["a"]["w"] - draw(0)["a"]["w"]).norm()


@given(st.data())
def test_adamw_of_an_element_depends_on_the_element_alone(data):
    """Whatever the length of the buffer and the place in it: the tail of a SIMD loop must not show."""
    n, start = data.draw(st.integers(1, 200)), data.draw(st.integers(0, 199))
    tx, values = fs.optim.adamw(1e-2, weight_decay=0.1), draw_rows(200)
    stop = min(200, start + n)

    def go(rows):
        layout = fs.plan({"p": rows[0]}, ONE.mesh, fs.zero3("dp"))
        state = fs.init_state(tx, fs.shard({"p": rows[0].clone()}, layout, ONE), comm=ONE)
        for g in rows[1:]:
            state = fs.update(tx, fs.shard_for({"p": g}, layout, 0, place="optim"), state, comm=ONE)
        return state.params.buffers[0]

    assert torch.equal(go(values)[start:stop], go([v[start:stop] for v in values]))


def draw_rows(size):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=g) for _ in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_are_untouched_unless_donated(dtype):
    params = draw(0, dtype)
    layout = fs.plan(params, ONE.mesh, fs.zero3("dp"))
    norms = {f"norm, deterministic={d}": fs.optim.clip_by_global_norm(1.0, deterministic=d) for d in (False, True)}
    for name, tx in (RULES | norms).items():
        state = fs.init_state(tx, fs.shard(params, layout, ONE), comm=ONE)
        before = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
        grads = fs.shard_for(draw(1, dtype), layout, 0, place="optim")
        new = fs.update(tx, grads, state, comm=ONE)
        for a, b in zip(optree.tree_leaves(state), optree.tree_leaves(before), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name
        assert torch.equal(grads.buffers[0], fs.shard_for(draw(1, dtype), layout, 0).buffers[0]), name
        assert new.params.buffers[0].data_ptr() != state.params.buffers[0].data_ptr()


def sharded(tree, comm, strategy=None, **options):
    layout = fs.plan(tree, comm.mesh, strategy or fs.zero3(*comm.mesh.names), units="*", **options)
    return fs.trainable(fs.shard_for(tree, layout, comm.rank, place="optim"))


ALONE = {
    "clip_by_global_norm()": fs.optim.clip_by_global_norm(1.0),
    "apply_if_finite()": fs.optim.apply_if_finite(fs.optim.sgd(0.1), 3),
}


@pytest.mark.parametrize("name", ALONE)
def test_an_error_names_what_one_rank_alone_does(name):
    tx = ALONE[name]
    layout = fs.plan(draw(0), fs.Mesh({"dp": 2}), fs.zero3("dp"))

    def rank_fn(comm):
        grads = fs.shard(draw(0), layout, comm)
        state = tx.init(grads)
        if comm.rank:
            tx.update(grads, state, grads, comm=comm)
        fs.full_tree(grads, comm=comm)

    for error in simulate(layout.mesh, rank_fn, outcomes=True):
        assert re.search(rf"(?s)ranks called different collectives.*rank 1 .*for '{re.escape(name)}'", str(error)), error


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("axes", "strategy"),
    [
        ({"dp": 1}, fs.zero3("dp")),
        ({"dp": 5}, fs.ddp("dp")),
        ({"dp": 5}, fs.zero3("dp")),
        ({"o": 2, "i": 3}, fs.hsdp("o", "i")),
        ({"o": 2, "i": 3}, fs.hfsdp("o", "i")),
    ],
)
def test_the_global_norm_counts_each_element_once(axes, strategy, deterministic):
    params = make_params(3)  # ties within each layer
    params["frozen"] = torch.full((5,), 1e6)
    once = [params["embed"], params["head"]["w"], params["head"]["b"]]
    once += [layer[k] for layer in params["layers"] for k in ("w", "v", "b", "gain", "s")]
    expected = math.sqrt(sum(float(t.double().square().sum()) for t in once))

    def rank_fn(comm):
        return fs.optim.global_norm(sharded(params, comm, strategy, frozen="frozen"), comm=comm, deterministic=deterministic)

    norms = simulate(fs.Mesh(axes), rank_fn)
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    torch.testing.assert_close(norms[0].item(), expected, rtol=1e-6, atol=0)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40), st.integers(1, 5))
def test_the_deterministic_norm_has_one_value_however_the_tree_is_cut(values, n):
    tree = {"x": torch.tensor(values, dtype=torch.float32)}
    one = fs.optim.global_norm(sharded(tree, ONE), comm=ONE, deterministic=True)
    flipped = fs.optim.global_norm(sharded({"x": tree["x"].flip(0)}, ONE), comm=ONE, deterministic=True)
    many = simulate(fs.Mesh({"dp": n}), lambda c: fs.optim.global_norm(sharded(tree, c), comm=c, deterministic=True))
    assert all(torch.equal(one, other) for other in [*many, flipped])
    largest = max(map(abs, values))
    if largest > 0:
        scaled = math.sqrt(sum((v / largest) ** 2 for v in values)) * largest
        limit = torch.finfo(torch.float32).max
        if abs(scaled / limit - 1) > 1e-6:  # there, rounding decides whether float32 can hold it
            assert float(one) == pytest.approx(scaled if scaled < limit else math.inf, rel=1e-6, abs=1e-44)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_is_not_finite_if_an_element_is_not(bad, deterministic):
    tree = {"x": torch.ones(7)}
    tree["x"][4] = bad
    norms = simulate(fs.Mesh({"dp": 3}), lambda c: fs.optim.global_norm(sharded(tree, c), comm=c, deterministic=deterministic))
    assert not any(torch.isfinite(norm) for norm in norms)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clipping_by_a_norm_that_is_not_finite_hides_no_nan(bad, deterministic):
    """As in torch and optax: a NaN makes all elements NaN; an infinity itself alone, and all others zero."""
    tree, tx = {"x": torch.ones(7), "y": torch.ones(3)}, fs.optim.clip_by_global_norm(1.0, deterministic=deterministic)
    tree["x"][6] = bad  # on the last rank

    def rank_fn(comm):
        grads = sharded(tree, comm)
        return fs.full_tree(tx.update(grads, tx.init(grads), grads, comm=comm)[0], comm=comm)

    for clipped in simulate(fs.Mesh({"dp": 3}), rank_fn):
        others = torch.cat([clipped["x"][:6], clipped["y"]])
        assert clipped["x"][6].isnan()
        assert others.isnan().all() if math.isnan(bad) else not others.any()


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_a_nan_in_a_gradient_makes_its_parameter_nan_and_no_other(name):
    """As in optax. torch's sign of a NaN is 0: with Lion a parameter stayed as it was, and its momentum was NaN forever."""
    tx, params = getattr(fs.optim, name)(0.1), sharded({"x": torch.ones(7)}, ONE)
    bad = torch.arange(7) == 4
    grads = sharded({"x": torch.ones(7).masked_fill(bad, math.nan)}, ONE)
    state = fs.update(tx, grads, fs.init_state(tx, params, comm=ONE), comm=ONE)
    assert torch.equal(fs.full_tree(state.params, comm=ONE)["x"].isnan(), bad)


def test_clipping_scales_to_the_norm_and_leaves_small_gradients_alone():
    grads = sharded({"x": torch.tensor([3.0, 4.0])}, ONE)
    for limit, expected in ((1.0, [0.6, 0.8]), (10.0, [3.0, 4.0])):
        tx = fs.optim.clip_by_global_norm(limit)
        out, state = tx.update(grads, tx.init(grads), grads, comm=ONE)
        torch.testing.assert_close(fs.layouts.units_of(out)[0].buffers[0], torch.tensor(expected))
        assert state.norm == 5.0


def test_ema_follows_the_parameters():
    _, state = run(fs.optim.with_ema(fs.optim.sgd(0.1), decay=0.5), steps=3)
    p = ema = draw(0)["a"]["w"]
    for i in range(3):
        p = p - 0.1 * draw(100 + i)["a"]["w"]
        ema = 0.5 * ema + 0.5 * p
    torch.testing.assert_close(state.ema["a"]["w"], ema)


def test_the_update_is_what_apply_adds():
    """A transform in the middle of a chain is asked for updates, at its end for parameters."""
    grads, params = sharded(draw(1), ONE), sharded(draw(0), ONE)
    for tx in (
        fs.optim.adamw(1e-2),
        fs.optim.sgd(0.1, momentum=0.9),
        fs.optim.lion(1e-2),
        fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.9),
    ):
        updates, _ = tx.update(grads, tx.init(params), params, comm=ONE)
        new, _ = tx.apply(grads, tx.init(params), params, comm=ONE, donate=False)
        moved = optree.tree_map(torch.add, params, updates)
        torch.testing.assert_close(optree.tree_leaves(moved), optree.tree_leaves(new), rtol=1e-6, atol=1e-7)
