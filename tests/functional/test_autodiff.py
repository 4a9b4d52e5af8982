"""Laws of the differentiable primitives: transposes under <Ax, y> = <x, A'y>, tangents, batches, second order."""

from functools import partial

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

import fsharp as fs
from fsharp.functional.comm.protocol import LabelPrefixComm
from fsharp.testing import simulate
from tests.gpt_like import logits, make_batches, make_params, plain_logits
from tests.ranks import on_ranks

MESH = fs.Mesh({"outer": 2, "inner": 3})
C = 4
SENT = [[0, 1, 3], [2, 2, 0], [2, 1, 1]]  # by sender and receiver along "inner"
RECEIVED = list(zip(*SENT, strict=True))


def draw(comm, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + comm.rank), dtype=torch.float64)


LAST = (fs.collectives.all_gather_last, fs.collectives.reduce_scatter_last, fs.collectives.local_slice_last)
gather, scatter, cut, add = (partial(op, axis="inner") for op in (*LAST, fs.collectives.all_reduce))


def exchange(x, comm, sent=SENT, received=RECEIVED):
    rank = comm.rank % 3
    return fs.collectives.all_to_all_last(x, sent[rank], received[rank], comm, "inner")


# name: map, transpose, elements in, elements out; along the axis "inner" of size 3
OPERATIONS = {
    "all_gather": (gather, scatter, C, 3 * C),
    "reduce_scatter": (scatter, gather, 3 * C, C),
    "all_reduce": (add, add, C, C),
    "all_to_all": (exchange, partial(exchange, sent=RECEIVED, received=SENT), C, C),
    "local_slice_last": (
        cut,
        lambda y, comm: torch.nn.functional.pad(y, (C * (comm.rank % 3), C * (2 - comm.rank % 3))),
        3 * C,
        C,
    ),
    "gather after reduce_scatter": (lambda x, comm: gather(scatter(x, comm), comm), add, 3 * C, 3 * C),
    "two axes": (
        lambda x, comm: gather(gather(x, comm, axis="outer"), comm),
        lambda y, comm: scatter(scatter(y, comm), comm, axis="outer"),
        C,
        6 * C,
    ),
}
operations = pytest.mark.parametrize("name", OPERATIONS)


@operations
def test_transpose_identity_and_inputs_untouched(name):
    op, transpose, n_in, n_out = OPERATIONS[name]

    def rank_fn(comm):
        x, y = draw(comm, n_in), draw(comm, n_out, seed=1)
        before = x.clone(), y.clone()
        pair = op(x, comm) @ y, x @ transpose(y, comm)
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])
        return pair

    sides = torch.tensor(simulate(MESH, rank_fn)).sum(0)
    torch.testing.assert_close(sides[0], sides[1])
    assert abs(sides[0]) > 1e-3


@on_ranks(MESH)
def test_round_trips(comm):
    """Gather and slice are inverses; a sum of equal parts is a multiple; an all_reduce is its two halves, bit for bit."""
    x, full = draw(comm, 2, C), torch.arange(3.0 * C)
    parts = draw(comm, 3 * C, seed=2)
    assert torch.equal(cut(gather(x, comm), comm), x)
    assert torch.equal(gather(cut(full, comm), comm), full)
    assert torch.equal(scatter(torch.cat([full] * 3), comm), 3 * full)
    assert torch.equal(gather(scatter(parts, comm), comm), add(parts, comm))


@operations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept(name, dtype):
    op, _, n_in, n_out = OPERATIONS[name]
    out = simulate(MESH, lambda comm: op(draw(comm, n_in).to(dtype), comm))
    assert {(x.dtype, tuple(x.shape)) for x in out} == {(dtype, (n_out,))}


@operations
@on_ranks(MESH)
def test_autograd_and_func_give_the_transpose(comm, name):
    op, transpose, n_in, n_out = OPERATIONS[name]
    x, y = draw(comm, n_in).requires_grad_(), draw(comm, n_out, seed=1)
    (by_autograd,) = torch.autograd.grad(op(x, comm), x, y)
    _, pullback = vjp(lambda x: op(x, comm), x.detach())
    (by_func,) = pullback(y)
    expected = transpose(y, comm)
    torch.testing.assert_close(by_autograd, expected)
    torch.testing.assert_close(by_func, expected)


LABELED = {
    "all_gather": fs.collectives.all_gather_last,
    "reduce_scatter": fs.collectives.reduce_scatter_last,
    "all_reduce": fs.collectives.all_reduce,
    "all_to_all": lambda x, comm, axis, label: fs.collectives.all_to_all_last(x, [C] * 3, [C] * 3, comm, axis, label=label),
}


@pytest.mark.parametrize("name", LABELED)
@on_ranks(MESH)
def test_a_label_is_that_of_gradients_and_tangents_as_well(comm, name):
    seen = []

    class Seen(LabelPrefixComm):
        def _comm_and_label(self, label, *call):
            seen.append(label)
            return super()._comm_and_label(label, *call)

    def op(x):
        return LABELED[name](x, Seen(comm, "step 3: "), "inner", label="tokens")

    out, pullback = vjp(op, draw(comm, 3 * C))
    pullback(out)
    jvp(op, (draw(comm, 3 * C),), (draw(comm, 3 * C),))
    assert seen == ["tokens"] * 4


@operations
@on_ranks(MESH)
def test_tangents_travel_as_values_do(comm, name):
    op, _, n_in, _ = OPERATIONS[name]
    x, t = draw(comm, n_in), draw(comm, n_in, seed=1)
    _, tangent = jvp(lambda x: op(x, comm), (x,), (t,))
    torch.testing.assert_close(tangent, op(t, comm), rtol=0, atol=0)


@operations
@pytest.mark.parametrize("in_dim", [0, 1])
@on_ranks(MESH)
def test_a_batch_is_a_loop(comm, name, in_dim):
    op, _, n_in, _ = OPERATIONS[name]
    x = draw(comm, 5, n_in)
    batched = vmap(lambda x: op(x, comm), in_dims=in_dim)(x.T.contiguous() if in_dim else x)
    torch.testing.assert_close(batched, torch.stack([op(row, comm) for row in x]), rtol=0, atol=0)


@operations
@on_ranks(MESH)
def test_batched_gradients_and_batched_batches(comm, name):
    """vmap(grad), vmap(vmap(grad)) and grad of a sum over vmap."""
    op, _, n_in, _ = OPERATIONS[name]
    x = draw(comm, 2, 5, n_in)
    f = grad(lambda x: (op(x, comm) ** 2).sum())
    loop = torch.stack([torch.stack([f(v) for v in row]) for row in x])
    once = torch.stack([vmap(f)(row) for row in x])
    outer = grad(lambda x: (vmap(lambda v: op(v, comm))(x) ** 2).sum())(x[0])
    torch.testing.assert_close(once, loop)
    torch.testing.assert_close(vmap(vmap(f))(x), loop)
    torch.testing.assert_close(outer, loop[0])


@operations
@on_ranks(MESH)
def test_second_order(comm, name):
    """Hessian-vector products of sum_r |A x|^4: by double backward, forward over reverse, and reverse over reverse."""
    op, transpose, n_in, _ = OPERATIONS[name]
    x, v = draw(comm, n_in), draw(comm, n_in, seed=1)

    def f(x):
        return (op(x, comm) ** 4).sum()

    expected = transpose(12 * op(x, comm) ** 2 * op(v, comm), comm)
    forward_over_reverse = jvp(grad(f), (x,), (v,))[1]
    reverse_over_reverse = vjp(grad(f), x)[1](v)[0]
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    (double_backward,) = torch.autograd.grad(g, leaf, v)
    for way in (forward_over_reverse, reverse_over_reverse, double_backward):
        torch.testing.assert_close(way, expected)


# A whole model under ZeRO-3, against the same model on the user's own tree.

DP = fs.Mesh({"dp": 3})


def on_shards(fn):
    """Run ``fn(params, comm)`` on double-precision parameters, sharded by ZeRO-3 over three ranks."""
    params = make_params(dtype=torch.float64)
    layout = fs.plan(params, DP, fs.zero3("dp"), units="layers.*")
    return params, simulate(DP, lambda comm: fn(fs.shard(params, layout, comm), comm))


def test_per_sample_gradients_through_zero3():
    """All ranks see the same samples: the sum over ranks is three times the gradient, exactly as the note says."""
    batch = make_batches(1, 4)[0]

    def sample_loss(out, y):
        return torch.nn.functional.cross_entropy(out, y[None])

    def per_sample(params, comm):
        def one(params, x, y):
            return sample_loss(logits(params, x[None], comm), y) / DP.size

        return vmap(grad(one), in_dims=(None, 0, 0))(params, batch["x"], batch["y"])

    params, results = on_shards(per_sample)
    expected = vmap(grad(lambda p, x, y: sample_loss(plain_logits(p, x[None]), y)), in_dims=(None, 0, 0))(
        params, batch["x"], batch["y"]
    )
    got = fs.unshard(results)
    assert got["layers"][0]["w"].shape == (4, 6, 7)
    for layer in (0, 1):
        for name in ("w", "v", "b", "gain"):
            torch.testing.assert_close(got["layers"][layer][name], expected["layers"][layer][name])
        tied = expected["layers"][layer]
        torch.testing.assert_close(got["layers"][layer]["s"], tied["s"] + tied["t"])
    torch.testing.assert_close(got["embed"], expected["embed"])


def rms(out):
    return (out**2).mean().sqrt()


@pytest.mark.parametrize("how", ["jvp(grad)", "vjp(grad)", "double backward", "double backward, released"])
def test_hessian_vector_products_through_zero3(how):
    import optree

    tokens = torch.arange(8) % 11
    direction = make_params(seed=9, dtype=torch.float64)
    layout = fs.plan(direction, DP, fs.zero3("dp"), units="layers.*")

    def hvp(params, comm):
        v = fs.shard_for(direction, layout, comm.rank)

        def f(p, release=False):
            return rms(logits(p, tokens, comm, release=release)) / DP.size

        if how == "jvp(grad)":
            return jvp(grad(f), (params,), (v,))[1]
        if how == "vjp(grad)":
            return vjp(grad(f), params)[1](v)[0]
        params = optree.tree_map(lambda t: t.clone().requires_grad_(), params)
        leaves, spec = optree.tree_flatten(params)
        first = torch.autograd.grad(f(params, "released" in how), leaves, create_graph=True)
        return optree.tree_unflatten(spec, torch.autograd.grad(first, leaves, optree.tree_leaves(v)))

    params, results = on_shards(hvp)

    def plain(p):
        tied = {**p, "layers": [{**layer, "t": layer["s"]} for layer in p["layers"]]}
        return rms(plain_logits(tied, tokens))

    expected = jvp(grad(plain), (params,), (direction,))[1]
    got = fs.unshard(results)
    for layer in (0, 1):
        for name in ("w", "v", "b", "gain", "s"):
            torch.testing.assert_close(got["layers"][layer][name], expected["layers"][layer][name], rtol=1e-6, atol=1e-9)
