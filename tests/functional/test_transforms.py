"""torch.func within the loss of value_and_grad and around forward, blocking and scheduled, against plain torch."""

from functools import partial

import optree
import pytest
import torch
from torch.func import grad, hessian, jacfwd, jvp, linearize, vjp, vmap

import fsharp as fs
from fsharp.errors import LossError, TreeError
from fsharp.layouts import map_units, merge
from fsharp.testing import simulate
from tests.functional.test_functions_doors import batch_of, linear, make_tree, plain_forward, plain_gradients
from tests.ranks import on_ranks
from tests.scheduling import every

DP = fs.Mesh({"dp": 2})


def net(forward, p, x):
    return forward(linear, p["b"], forward(linear, p["a"], x))


def energy(forward, p, x):
    return net(forward, p, x).square().sum()


def ones(tree):
    return optree.tree_map(torch.ones_like, tree)


# Each program is ``loss(forward, whole, params, x)``. ``whole`` gathers, so that inner gradients are of this rank's loss.


def vmapped(forward, whole, p, x):
    return vmap(partial(net, forward, p))(x).square().mean()


def vmapped_in_chunks(forward, whole, p, x):
    return vmap(partial(net, forward, p), chunk_size=3)(x).square().mean()


def vmapped_twice(forward, whole, p, x):
    return vmap(vmap(partial(net, forward, p)))(torch.stack([x, x + 1])).square().mean()


def vmapped_losses(forward, whole, p, x):
    """As in DP-SGD: weights for the losses of samples."""
    return (vmap(lambda row: energy(forward, p, row[None]))(x) * torch.arange(len(x))).mean()


def tangent_of_inputs(forward, whole, p, x):
    return jvp(partial(net, forward, p), (x,), (ones(x),))[1].square().mean()


def tangent_of_parameters(forward, whole, p, x):
    return jvp(lambda q: net(forward, q, x), (p,), (ones(p),))[1].square().mean()


def forward_over_reverse(forward, whole, p, x):
    return jvp(grad(partial(energy, forward, p)), (x,), (ones(x),))[1].square().mean()


def reverse_over_reverse(forward, whole, p, x):
    return vjp(grad(partial(energy, forward, p)), x)[1](ones(x))[0].square().mean()


def forward_over_reverse_of_parameters(forward, whole, p, x):
    q = whole(p)
    return square(jvp(grad(lambda q: energy(forward, q, x)), (q,), (ones(q),))[1])


def reverse_over_reverse_of_parameters(forward, whole, p, x):
    q = whole(p)
    return square(vjp(grad(lambda q: energy(forward, q, x)), q)[1](ones(q))[0])


def square(tree):
    return sum(leaf.square().sum() for leaf in optree.tree_leaves(tree)) / 100


def hessians(forward, whole, p, x):
    return vmap(hessian(lambda row: net(forward, p, row).sum()))(x).square().mean()


def jacobians(forward, whole, p, x):
    return vmap(jacfwd(partial(net, forward, p)))(x).square().mean()


def loop(forward, whole, p, x):
    """A carry through one unit, as ``scan`` has it."""
    total = x.new_zeros(())
    for _ in range(5):
        x = forward(linear, p["a"], x)
        total = total + x.square().mean()
    return total


def loop_of_vmaps(forward, whole, p, x):
    for _ in range(3):
        x = vmap(partial(net, forward, p))(x)
    return x.square().mean()


def vmap_of_loops(forward, whole, p, x):
    return vmap(partial(loop, forward, whole, p))(x).mean()


def tangent_of_a_loop(forward, whole, p, x):
    return jvp(partial(loop, forward, whole, p), (x,), (ones(x),))[1]


PROGRAMS = {
    f.__name__: f
    for f in (
        vmapped, vmapped_in_chunks, vmapped_twice, vmapped_losses, tangent_of_inputs, tangent_of_parameters,
        forward_over_reverse, reverse_over_reverse, forward_over_reverse_of_parameters, reverse_over_reverse_of_parameters,
        hessians, jacobians, loop, loop_of_vmaps, vmap_of_loops, tangent_of_a_loop,
    )
}  # fmt: skip
STRATEGIES = [fs.ddp, fs.zero3]
STORED = [fs.formats.mxint8, fs.formats.nvfp4]
each_program = every(2, name=PROGRAMS, strategy=STRATEGIES)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def expected_of(name, tree):
    return plain_gradients(lambda forward, p, x, rank: PROGRAMS[name](forward, lambda p: p, p, x), DP.size, tree)


def assert_close(got, expected):
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12), got, expected)


def check_within_the_loss(name, layout, params_of):
    """Blocking; and scheduled, with the same bits. ``params_of(comm)`` returns parameters."""

    def loss_fn(params, x, comm):
        return PROGRAMS[name](partial(fs.forward, comm=comm), partial(fs.gather, comm=comm), params, x)

    def step(params, x, comm):
        loss, grads = fs.value_and_grad(loss_fn)(params, x, comm=comm)
        metrics, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
        return metrics.loss, [b.clone() for node in fs.layouts.units_of(grads) for b in node.buffers], grads

    def rank_fn(comm):
        params, x = params_of(comm), batch_of(comm.rank)
        loss, buffers, grads = step(params, x, comm)
        run = fs.Scheduler(comm)(step)
        for _ in range(3):
            again, same, _ = run(params, x)
            assert torch.equal(again, loss)
            assert all(map(torch.equal, same, buffers))
        return (loss, fs.full_tree(grads, comm=comm)), fs.full_tree(params, comm=comm)

    for got, whole in simulate(layout.mesh, rank_fn):
        expected = expected_of(name, whole)
        assert any(g.abs().max() > 1e-3 for g in optree.tree_leaves(expected[1]))
        assert_close(got, expected)


@each_program
def test_within_the_loss(name, strategy):
    layout = fs.plan(make_tree(), DP, strategy("dp"), units="*")
    check_within_the_loss(name, layout, partial(fs.shard, make_tree(), layout))


@every(4, name=[name for name in PROGRAMS if name != "tangent_of_parameters"], strategy=STRATEGIES, stored=STORED)
def test_within_the_loss_of_parameters_in_a_format(name, strategy, stored):
    """Bytes have no gradients, and values that are decoded under a transform have."""
    layout = fs.plan(make_tree(), DP, strategy("dp"), units="*", precision=fs.Precision(stored=stored))

    def params_of(comm):
        return fs.init_state(fs.optim.sgd(1.0), fs.shard(make_tree(), layout, comm, place="optim"), comm=comm).params

    check_within_the_loss(name, layout, params_of)


OTHER_USES = {
    "a copy": lambda params, comm: optree.tree_map(torch.clone, params),
    "another place": partial(fs.gather, to="optim"),
    "its own place": partial(fs.gather, to="params"),
    "replaced copies": lambda params, comm: map_units(lambda node: node.replace([b.clone() for b in node.buffers]), params),
}


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("use", OTHER_USES)
@on_ranks(DP)
def test_where_parameters_in_a_format_would_get_no_gradient_they_are_refused(comm, use, scheduled):
    layout = fs.plan(make_tree(), DP, fs.zero1("dp"), units="*", precision=fs.Precision(stored=fs.formats.mxint8))
    params = fs.init_state(fs.optim.sgd(1.0), fs.shard(make_tree(), layout, comm, place="optim"), comm=comm).params

    def loss_fn(params, x, comm):
        other = OTHER_USES[use](params, comm=comm)
        return energy(partial(fs.forward, comm=comm), other, x) + energy(partial(fs.forward, comm=comm), params, x)

    def step(params, x, comm):
        return fs.value_and_grad(loss_fn)(params, x, comm=comm)

    run = fs.Scheduler(comm)(step) if scheduled else partial(step, comm=comm)
    with pytest.raises(TreeError, match=r"parameters of unit 'a' are stored as bytes, whose copies get no gradient"):
        run(params, batch_of(comm.rank))


SAME_BUFFERS = {
    "trainable": lambda params: params | {"b": fs.trainable(params["b"])},
    "merged": lambda params: merge(params, fs.trainable(params)),
    "replaced": partial(map_units, lambda node: node.replace(node.buffers)),
    "selected": partial(map_units, lambda node: node.select_groups(node.groups)),
}


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("change", SAME_BUFFERS)
@on_ranks(DP)
def test_nodes_with_the_buffers_of_parameters_in_a_format_get_their_gradients(comm, change, scheduled):
    layout = fs.plan(make_tree(), DP, fs.zero3("dp"), units="*", frozen="a.b", precision=fs.Precision(stored=fs.formats.mxint8))
    params = fs.shard(make_tree(), layout, comm, dtype="compute")
    found = []
    for fn in (lambda params: params, SAME_BUFFERS[change]):

        def step(params, x, comm, fn=fn):
            loss_fn = lambda params, x, comm: energy(partial(fs.forward, comm=comm), fn(params), x)  # noqa: E731
            return fs.value_and_grad(loss_fn)(params, x, comm=comm)

        found.append((fs.Scheduler(comm)(step) if scheduled else partial(step, comm=comm))(params, batch_of(comm.rank))[1])
    assert all(map(torch.equal, *map(optree.tree_leaves, found)))
    assert all(grad.any() or comm.rank for grad in optree.tree_leaves([found[1]["a"], found[1]["b"]]))


@each_strategy
@on_ranks(DP)
def test_a_penalty_on_the_distance_from_earlier_parameters(comm, strategy):
    """A map over the parameters of a loss and over a tree from outside of the loss."""
    layout = fs.plan(make_tree(), DP, strategy("dp"), units="*")
    params = fs.shard(make_tree(), layout, comm)
    earlier = optree.tree_map(lambda x: 0.5 * x, params)

    def loss_fn(params, x, comm):
        near = optree.tree_map(lambda new, old: (new - old).square().sum(), params, earlier)
        far = optree.tree_map(lambda old, new: (new - old).square().sum(), earlier, params)
        return sum(optree.tree_leaves([near, far]), energy(partial(fs.forward, comm=comm), params, x))

    _, grads = fs.value_and_grad(loss_fn)(params, batch_of(comm.rank), comm=comm)
    leaves = optree.tree_map(lambda x: x.clone().requires_grad_(), make_tree())
    penalty = sum((x - 0.5 * x.detach()).square().sum() * 2 for x in optree.tree_leaves(leaves))
    (penalty + sum(energy(plain_forward, leaves, batch_of(rank)) for rank in range(2))).backward()
    expected = optree.tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, leaves)
    assert_close(fs.full_tree(fs.reduce_scatter(grads, comm=comm), comm=comm), expected)


@pytest.mark.parametrize("wire", [None, fs.formats.mxint4], ids=["plain", "mxint4"])
@each_strategy
@on_ranks(DP)
def test_vmap_over_zero_samples(comm, strategy, wire):
    layout = fs.plan(make_tree(), DP, strategy("dp"), units="*", precision=fs.Precision(wire=wire))
    params = fs.shard(make_tree(), layout, comm)
    few, none = torch.ones(1, 4, 5, dtype=torch.float64), torch.ones(0, 4, 5, dtype=torch.float64)

    def per_sample(x):
        loss = partial(energy, partial(fs.forward, comm=comm))
        grads = vmap(grad(loss), in_dims=(None, 0))(params, x)
        tangents = vmap(lambda x: jvp(lambda params: loss(params, x), (params,), (params,))[1])(x)
        return optree.tree_leaves([grads, fs.reduce_scatter(grads, comm=comm), tangents])

    assert [x.shape for x in per_sample(none)] == [(0, *x.shape[1:]) for x in per_sample(few)]


@each_program
@on_ranks(DP)
def test_around_the_loss(comm, name, strategy):
    """torch.func.grad of the same losses."""
    layout = fs.plan(make_tree(), DP, strategy("dp"), units="*")

    def loss(params):
        forward, whole = partial(fs.forward, comm=comm), partial(fs.gather, comm=comm)
        return PROGRAMS[name](forward, whole, params, batch_of(comm.rank)) / DP.size

    assert_close(fs.full_tree(grad(loss)(fs.shard(make_tree(), layout, comm)), comm=comm), expected_of(name, make_tree())[1])


@each_strategy
def test_vmap_over_parameters(strategy):
    """An ensemble: each rank holds a part of each member. What is gathered under vmap is kept until the backward."""
    layout = fs.plan(make_tree(), DP, strategy("dp"), units="*")
    batches = [batch_of(rank) for rank in range(DP.size)]
    factors = torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64)

    def members(tree):
        return optree.tree_map(lambda b: (factors.view(-1, *[1] * b.ndim) * b).requires_grad_(), tree)

    def rank_fn(comm):
        params = members(fs.shard(make_tree(), layout, comm))
        losses = vmap(lambda p: energy(partial(fs.forward, comm=comm), p, batches[comm.rank]))(params)
        losses.sum().backward()
        return fs.full_tree(optree.tree_map(lambda b: b.grad if b.grad is not None else torch.zeros_like(b), params), comm=comm)

    def plain(tree):
        return sum(energy(plain_forward, tree, x) for x in batches)

    expected = vmap(grad(plain))(optree.tree_map(torch.Tensor.detach, members(make_tree())))
    for got in simulate(DP, rank_fn):
        assert_close(got, expected)


@each_strategy
def test_a_unit_that_one_rank_skips_for_each_sample(strategy):
    layout = fs.plan(make_tree(), DP, strategy("dp"), units="*")

    def loss_fn(params, x, comm):
        forward = partial(fs.forward, comm=comm)

        def one(row):
            h = forward(linear, params["a"], row)
            return forward(linear, params["b"], h) if comm.rank == 0 else fs.dummy_forward(params["b"], h, comm=comm)

        return vmap(one)(x).square().mean()

    def rank_fn(comm):
        params = fs.shard(make_tree(), layout, comm)
        loss, grads = fs.value_and_grad(loss_fn)(params, batch_of(comm.rank), comm=comm)
        metrics, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
        return metrics.loss, fs.full_tree(grads, comm=comm)

    def program(forward, p, x, rank):
        h = forward(linear, p["a"], x)
        return (forward(linear, p["b"], h) if rank == 0 else h).square().mean()

    expected = plain_gradients(program, DP.size, make_tree())
    for got in simulate(DP, rank_fn):
        assert_close(got, expected)


def one_rank():
    tree = make_tree()
    return fs.shard(tree, fs.plan(tree, fs.Mesh({"dp": 1}), fs.zero3("dp"), units="*"), fs.SingleComm())


def energy_of(params, x, comm):
    return energy(partial(fs.forward, comm=comm), params, x)


@pytest.mark.parametrize("comm", [fs.SingleComm, lambda: fs.Scheduler(fs.SingleComm())], ids=["blocking", "scheduled"])
@pytest.mark.parametrize("through", ["forward", "gather"])
def test_linearize_is_refused(through, comm):
    comm, params, x = comm(), one_rank(), batch_of(0)

    def f(x):
        return energy_of(params if through == "forward" else fs.gather(params, comm=comm), x, comm)

    def g(x):
        return fs.gather(params, comm=comm)["a"].tree()["w"].sum() * x

    with pytest.raises(TreeError, match=rf"{through}\(\): called under torch.func.linearize"):
        linearize(f if through == "forward" else g, x)


AROUND = {
    "jvp": lambda f, p, x: jvp(partial(f, batch=x), (p,), (p,)),
    "vjp": lambda f, p, x: vjp(partial(f, batch=x), p),
    "vmap": lambda f, p, x: vmap(lambda x: f(p, x))(x[:, None]),
}


@pytest.mark.parametrize("comm", [fs.SingleComm, lambda: fs.Scheduler(fs.SingleComm())], ids=["blocking", "scheduled"])
@pytest.mark.parametrize("function", [fs.value_and_grad, fs.per_sample_norms])
@pytest.mark.parametrize("transform", AROUND)
def test_what_runs_a_backward_of_its_own_is_not_transformed(transform, function, comm):
    def f(params, batch):
        return function(energy_of)(params, batch, comm=comm())

    with pytest.raises(LossError, match=rf"{function.__name__}\(\): called under a torch.func transform"):
        AROUND[transform](f, one_rank(), batch_of(0))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("scheduled", [False, True])
@each_strategy
@on_ranks(DP)
def test_the_gradient_of_a_batch_that_asks_for_it(comm, strategy, scheduled, microbatches):
    layout = fs.plan(make_tree(), DP, strategy("dp"), units="*")
    step = fs.value_and_grad(energy_of, microbatches=microbatches)
    params = fs.shard(make_tree(), layout, comm)
    run = fs.Scheduler(comm)(step) if scheduled else partial(step, comm=comm)
    for _ in range(3 if scheduled else 1):
        x = batch_of(comm.rank).requires_grad_()
        run(params, x)
    torch.testing.assert_close(x.grad, grad(partial(energy, plain_forward, make_tree()))(batch_of(comm.rank)))
