"""Functions whose parameters and activations go unusual ways, on the blocking path: what plain torch gives, the same bits."""

from functools import partial

import optree
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.testing import simulate
from tests.ranks import on_ranks
from tests.scheduling import every

STRATEGIES = {"ddp": fs.ddp, "zero1": fs.zero1, "zero2": fs.zero2, "zero3": fs.zero3}
DIM, PER_RANK = 5, 4


def make_tree():
    g = torch.Generator().manual_seed(0)

    def unit():
        return {
            "w": torch.randn(DIM, DIM, generator=g, dtype=torch.float64) * 0.5,
            "b": torch.randn(DIM, generator=g, dtype=torch.float64),
        }

    return {"a": unit(), "b": unit(), "c": unit()}


def batch_of(rank):
    g = torch.Generator().manual_seed(100 + rank)
    return torch.randn(PER_RANK, DIM, generator=g, dtype=torch.float64)


def linear(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def plain_forward(fn, p, *args, ties=(), comm=None, **kwargs):
    """fs.forward on the user's own tree."""
    return fn(p, *args, **kwargs)


# Each program is ``loss(forward, params, x, rank)``: written once, run by fs.forward on shards and by plain calls on the tree.


def target_first(forward, p, x, rank):
    """Uses under no_grad come before those that train."""
    with torch.no_grad():
        target = forward(linear, p["b"], forward(linear, p["a"], x))
    return (forward(linear, p["b"], forward(linear, p["a"], x)) - 0.5 * target).square().mean()


def inference_first(forward, p, x, rank):
    with torch.inference_mode():
        scale = float(forward(linear, p["a"], x).abs().mean())
    return forward(linear, p["a"], x).square().mean() * scale


def reentrant(forward, p, x, rank):
    """Checkpoints that run the backward of a part within the backward."""
    h = forward(linear, p["a"], x)
    for name in ("b", "c"):
        h = checkpoint(lambda h, name=name: forward(linear, p[name], h), h, use_reentrant=True)
    return h.square().mean()


def reentrant_twice(forward, p, x, rank):
    """A unit that is used both inside of checkpoints and outside."""
    h = forward(linear, p["a"], x)
    for _ in range(2):
        h = checkpoint(lambda h: forward(linear, p["b"], h), h, use_reentrant=True)
    return forward(linear, p["b"], h).square().mean()


def checkpointed(forward, p, x, rank):
    h = forward(linear, p["a"], x)
    for name in ("b", "c"):
        h = checkpoint(lambda h, name=name: forward(linear, p[name], h), h, use_reentrant=False)
    return h.square().mean()


def checkpoint_inside(forward, p, x, rank, *, use_reentrant):
    """Checkpoints inside of the function, which close over parameters."""

    def fn(q, x):
        return checkpoint(lambda h: torch.tanh(h @ q["w"]) @ q["w"], x + q["b"], use_reentrant=use_reentrant)

    return forward(fn, p["b"], forward(linear, p["a"], x)).square().mean()


def generator_in_a_closure(forward, p, x, rank):
    g = torch.Generator().manual_seed(rank)

    def dropped(q, h):
        return linear(q, h) * (torch.rand(h.shape, generator=g, dtype=h.dtype) < 0.5)

    return forward(dropped, p["b"], forward(dropped, p["a"], x)).square().mean()


class Noise:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def layer(self, q, h):
        return linear(q, h) * torch.rand(h.shape, generator=self.g, dtype=h.dtype)


def generator_of_self(forward, p, x, rank):
    noise = Noise(rank)
    return forward(noise.layer, p["b"], forward(partial(noise.layer), p["a"], x)).square().mean()


def gradient_penalty_inside(forward, p, x, rank):
    """torch.autograd.grad with respect to parameters and inputs, inside of the function."""

    def fn(q, h):
        h = h if h.requires_grad else h.detach().requires_grad_()
        out = linear(q, h)
        found = torch.autograd.grad(out.square().mean(), [q["w"], q["b"], h], create_graph=True)
        return out, sum(g.square().sum() for g in found)

    h = forward(linear, p["a"], x)
    out, penalty = forward(fn, p["b"], h)
    return out.square().mean() + 0.1 * penalty


def gradient_penalty_outside(forward, p, x, rank):
    x = x.clone().requires_grad_()
    out = forward(linear, p["b"], forward(linear, p["a"], x))
    (g,) = torch.autograd.grad(out.square().mean(), x, create_graph=True)
    return out.square().mean() + g.square().sum()


def side_door(forward, p, x, rank):
    """Parameters and activations that leave through a list, views of them included."""
    kept = []

    def fn(q, h):
        kept.extend([q["w"], q["w"].T[1], h @ q["w"], q["b"].detach()])
        return linear(q, h)

    h = forward(fn, p["a"], x)
    w, row, product, bias = kept
    return forward(linear, p["b"], h).square().mean() + w.square().sum() + (row * bias).sum() + product.mean()


def parameters_returned(forward, p, x, rank):
    w, b = forward(lambda q: (q["w"], q["b"][1:]), p["a"])
    return (x @ w).square().mean() + b.sum()


def closes_over_activations(forward, p, x, rank):
    h = forward(linear, p["a"], x)
    return forward(lambda q: ((h @ q["w"]) * h).sum(), p["b"]) + h.mean()


def changes_its_argument(forward, p, x, rank):
    def fn(q, h):
        h += q["b"]
        return (h @ q["w"]).square()

    return forward(fn, p["a"], x * 1.0).mean()


def in_place_on_the_result(forward, p, x, rank):
    h = forward(lambda q, h: h @ q["w"], p["a"], x)
    h += 1
    h.mul_(2)
    return forward(linear, p["b"], h).square().mean()


def nested(forward, p, x, rank):
    """An activation of the outer unit that feeds a nested one and a residual; one unit is used three times."""

    def inner(q, h):
        return h + torch.tanh((h * q["b"]) @ q["w"]) * h

    def outer(q, h):
        h = torch.tanh(h @ q["w"])
        return h + forward(inner, p["b"], h) + q["b"] * h

    h = forward(outer, p["a"], x)
    return (forward(outer, p["c"], h) * forward(inner, p["b"], h) + h).square().mean()


def vmapped(forward, p, x, rank):
    each = torch.func.vmap(lambda row: forward(linear, p["b"], forward(linear, p["a"], row)))(x)
    return each.square().mean() + forward(linear, p["a"], x).mean()


def jacobians(forward, p, x, rank):
    """Inside of the loss: jvp, grad and jacrev of functions that use units."""

    def f(h):
        return forward(linear, p["b"], forward(linear, p["a"], h))

    out, tangent = torch.func.jvp(f, (x,), (torch.ones_like(x),))
    inner = torch.func.grad(lambda h: f(h).square().sum())(x)
    rows = torch.func.vmap(torch.func.jacrev(f))(x)
    return out.mean() + tangent.square().mean() + inner.square().mean() + rows.square().sum()


def transforms_inside(forward, p, x, rank):
    def fn(q, h):
        per_row = torch.func.vmap(torch.func.grad(lambda w, row: torch.tanh(row @ w).sum()), (None, 0))(q["w"], h)
        return linear(q, h) + per_row.sum((1, 2))[:, None]

    return forward(fn, p["a"], x).square().mean()


PROGRAMS = {
    f.__name__: f
    for f in (
        target_first, inference_first, reentrant, reentrant_twice, checkpointed, generator_in_a_closure, generator_of_self,
        gradient_penalty_inside, gradient_penalty_outside, side_door, parameters_returned, closes_over_activations,
        changes_its_argument, in_place_on_the_result, nested, vmapped, jacobians, transforms_inside,
    )
} | {
    "checkpoint inside": partial(checkpoint_inside, use_reentrant=False),
    "reentrant inside": partial(checkpoint_inside, use_reentrant=True),
}  # fmt: skip

REDUCED_OFTEN = ("reentrant_twice",)
"""Programs whose uses of a unit are reduced one by one: as with microbatches, some strategies add before that, some after."""


def sharded_gradients(program, strategy, n, tree):
    """Loss and gradients of the mean over ranks, and those of all ranks in full."""
    mesh = fs.Mesh({"dp": n})
    layout = fs.plan(tree, mesh, STRATEGIES[strategy]("dp"), units="*")

    def rank_fn(comm):
        forward = partial(fs.forward, comm=comm)

        def loss_fn(p, x, comm):
            return program(forward, p, x, comm.rank)

        loss, grads = fs.value_and_grad(loss_fn)(fs.shard(tree, layout, comm), batch_of(comm.rank), comm=comm)
        metrics, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
        return metrics.loss, fs.full_tree(grads, comm=comm)

    return simulate(mesh, rank_fn)[0]


def plain_gradients(program, n, tree):
    leaves = optree.tree_map(lambda t: t.clone().requires_grad_(), tree)
    losses = [program(plain_forward, leaves, batch_of(rank), rank) for rank in range(n)]
    loss = sum(losses) / n
    loss.backward()
    return loss.detach(), optree.tree_map(lambda t: torch.zeros_like(t) if t.grad is None else t.grad, leaves)


@every(3, name=PROGRAMS, n=[2, 3, 1])
def test_gradients_are_those_of_plain_torch_and_the_same_bits_under_every_strategy(name, n):
    tree = make_tree()
    expected = plain_gradients(PROGRAMS[name], n, tree)
    assert any(g.abs().max() > 1e-3 for g in optree.tree_leaves(expected[1]))
    alike = {}
    for strategy in STRATEGIES:
        got = sharded_gradients(PROGRAMS[name], strategy, n, tree)
        optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12), got, expected)
        first = alike.setdefault(name in REDUCED_OFTEN and strategy in ("zero2", "zero3"), got)
        for path, a, b in zip(optree.tree_paths(got), optree.tree_leaves(got), optree.tree_leaves(first), strict=True):
            assert torch.equal(a, b), (strategy, path)


# Meta-learning: an inner torch.func.grad, differentiated by value_and_grad or by another torch.func.grad.


def inner_loss(forward, p, x):
    return forward(linear, p["b"], forward(linear, p["a"], x)).square().mean()


def adapted(forward, p, x, share):
    """One step of gradient descent on the loss of all ranks, of which this is one of ``1 / share``."""
    grads = torch.func.grad(lambda q: inner_loss(forward, q, x) * share)(p)
    return optree.tree_map(lambda a, g: a - 0.3 * g, p, grads)


def maml_of_plain_torch(n, tree):
    def outer(p):
        def joint(q):
            return sum(inner_loss(plain_forward, q, batch_of(rank)) for rank in range(n)) / n

        fast = optree.tree_map(lambda a, g: a - 0.3 * g, p, torch.func.grad(joint)(p))
        return sum(inner_loss(plain_forward, fast, 1 + batch_of(rank)) for rank in range(n)) / n

    return torch.func.grad(outer)(tree)


@every(2, strategy=STRATEGIES, n=[1, 2, 3], outer=["value_and_grad", "torch.func.grad"])
def test_joint_maml_is_that_of_plain_torch_on_the_joint_batch(strategy, n, outer):
    tree, mesh = make_tree(), fs.Mesh({"dp": n})
    layout = fs.plan(tree, mesh, STRATEGIES[strategy]("dp"), units="*")

    def rank_fn(comm):
        forward, x = partial(fs.forward, comm=comm), batch_of(comm.rank)
        params = fs.shard(tree, layout, comm)

        def loss_fn(p, x, comm):
            return inner_loss(forward, adapted(forward, p, x, 1 / n), 1 + x)

        if outer == "value_and_grad":
            loss, grads = fs.value_and_grad(loss_fn)(params, x, comm=comm)
            _, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
        else:
            grads = torch.func.grad(lambda p: loss_fn(p, x, comm) / n)(params)
        return fs.full_tree(grads, comm=comm)

    results = simulate(mesh, rank_fn)
    expected = maml_of_plain_torch(n, tree)
    for got in results:
        optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12), got, expected)
        optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), got, results[0])


MESHES = {
    "ddp": (fs.Mesh({"dp": 3}), fs.ddp("dp")),
    "zero1": (fs.Mesh({"dp": 3}), fs.zero1("dp")),
    "zero3": (fs.Mesh({"dp": 3}), fs.zero3("dp")),
    "hsdp": (fs.Mesh({"outer": 2, "inner": 2}), fs.hsdp("outer", "inner")),
    "hfsdp": (fs.Mesh({"outer": 2, "inner": 2}), fs.hfsdp("outer", "inner")),
}


@pytest.mark.parametrize("how", ["at rest", "gathered", "autograd"])
@pytest.mark.parametrize("strategy", MESHES)
def test_a_gradient_with_respect_to_parameters_at_rest_is_that_of_all_ranks(strategy, how):
    """So an update with it keeps replicas equal. With respect to gathered ones it is this rank's, and refused there."""
    mesh, rule = MESHES[strategy]
    tree, n = make_tree(), mesh.size
    layout = fs.plan(tree, mesh, rule, units="*")

    def rank_fn(comm):
        forward, x = partial(fs.forward, comm=comm), batch_of(comm.rank)
        state = fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, layout, comm), comm=comm)

        def loss(p):
            return target_first(forward, p, x, 0) / n

        if how == "at rest":
            grads = torch.func.grad(loss)(state.params)
        elif how == "autograd":
            params = optree.tree_map(lambda t: t.clone().requires_grad_(), state.params)
            leaves, spec = optree.tree_flatten(params)
            found = torch.autograd.grad(loss(params), leaves, allow_unused=True)
            found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
            grads = optree.tree_unflatten(spec, found)
        else:
            grads = torch.func.grad(loss)(fs.gather(state.params, comm=comm))
            with pytest.raises(TreeError, match="this rank's summand"):
                fs.update(fs.optim.sgd(0.1), grads, state, comm=comm)
            with pytest.raises(TreeError, match="this rank's summand"):
                fs.average(fs.Loss(torch.ones(()), torch.ones(())), grads, comm=comm)
        new = fs.update(fs.optim.sgd(0.1), fs.reduce_scatter(grads, comm=comm), state, comm=comm)
        return fs.full_tree(new.params, comm=comm)

    _, expected = plain_gradients(target_first, n, tree)
    results = simulate(mesh, rank_fn)
    for got in results:
        optree.tree_map(lambda a, p, g: torch.testing.assert_close(a, p - 0.1 * g, rtol=1e-9, atol=1e-12), got, tree, expected)
        optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), got, results[0])


def test_a_penalty_on_the_buffers_themselves_is_differentiated():
    """Buffers at rest are one value that ranks share: computed with as such, they have one gradient."""
    tree = make_tree()
    found = {}
    for strategy, make in STRATEGIES.items():
        mesh = fs.Mesh({"dp": 2})
        layout = fs.plan(tree, mesh, make("dp"), units="*")

        def rank_fn(comm, layout=layout):
            def loss(p, x, comm):
                decayed = optree.tree_map(lambda b: 0.5 * b * b, p)
                return inner_loss(partial(fs.forward, comm=comm), decayed, x)

            value, grads = fs.value_and_grad(loss)(fs.shard(tree, layout, comm), batch_of(comm.rank), comm=comm)
            return fs.full_tree(fs.average(value, fs.reduce_scatter(grads, comm=comm), comm=comm)[1], comm=comm)

        found[strategy] = simulate(mesh, rank_fn)[0]

    def program(forward, p, x, rank):
        return inner_loss(forward, optree.tree_map(lambda b: 0.5 * b * b, p), x)

    _, expected = plain_gradients(program, 2, tree)
    for got in found.values():
        optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12), got, expected)


# Units of two trees


def two_trees(comm, strategy, *, tied=False):
    mesh = comm.mesh
    trees = [{"a": {"w": torch.full((4, 4), float(i + 1))}, "c": {"w": torch.full((4, 4), 9.0)}} for i in range(2)]
    for tree in trees if tied else ():
        tree["c"]["w"] = tree["a"]["w"]
    layout = fs.plan(trees[0], mesh, strategy("dp"), units="*")
    return [fs.shard(tree, layout, comm) for tree in trees]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero3])
@on_ranks(fs.Mesh({"dp": 2}))
def test_units_of_one_name_from_two_trees_in_one_call_are_each_their_own(comm, strategy, order):
    trees = two_trees(comm, strategy)

    def loss(params, x, comm):
        both = [(params, trees[1])[i]["a"] for i in order]
        return fs.forward(lambda q, x: (x @ (q[0]["w"] - 3 * q[1]["w"])).square().mean(), both, x, comm=comm)

    step = fs.value_and_grad(loss)
    x = torch.eye(4)
    expected, grads = step(trees[0], x, comm=comm)
    scheduled = fs.Scheduler(comm)(step)
    for _ in range(3):
        found, same = scheduled(trees[0], x)
        assert torch.equal(found.sum, expected.sum)
        for a, b in zip(fs.layouts.units_of(grads), fs.layouts.units_of(same), strict=True):
            assert all(map(torch.equal, a.buffers, b.buffers))
    first, second = (i + 1.0 for i in order)
    assert expected.mean.item() == (first - 3 * second) ** 2


@pytest.mark.parametrize("scheduled", [False, True])
@on_ranks(fs.Mesh({"dp": 2}))
def test_ties_to_one_name_in_two_trees_are_refused(comm, scheduled):
    first, second = two_trees(comm, fs.zero3, tied=True)

    def call(units, ties, comm):
        return fs.forward(lambda q: q[0]["w"] - q[1]["w"], units, comm=comm, ties=ties)

    run = fs.Scheduler(comm)(call) if scheduled else partial(call, comm=comm)
    with pytest.raises(TreeError, match=r"tied to unit 'a', and two units of that name"):
        run((first["c"], second["c"]), [first["a"], second["a"]])
