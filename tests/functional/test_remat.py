"""forward(remat=): fewer activations, the same bits, and no more gathers than with release."""

from functools import partial
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

import fsharp as fs
from fsharp.errors import ScheduleError, TreeError
from fsharp.testing import checking_remat, simulate
from tests.gpt_like import block, embed, head, make_batches, make_params
from tests.ranks import on_ranks
from tests.scheduling import every

DP = fs.Mesh({"dp": 2})
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def save_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


REMATS = {"everything": True, "policy": save_matmuls, "list": MATMULS}


def dropped(p, x, *, options):
    """Random numbers of the global generator, and of one that is an argument."""
    kept = torch.rand(x.shape, generator=options["generator"]) < 0.8
    return block(p, F.dropout(x, 0.1) * kept)


def loss_fn(params, batch, comm, *, generator=None, **options):
    forward = partial(fs.forward, comm=comm, **options)
    x = forward(embed, params["embed"], batch["x"])
    for layer in (*params["layers"], params["layers"][0]):
        x = forward(block, layer, x) if generator is None else forward(dropped, layer, x, options={"generator": generator})
    return F.cross_entropy(forward(head, params["head"], x), batch["y"])


def gradients(comm, strategy, step, *, scheduled=False):
    """Of three calls of ``step(params, batch, comm)``: loss, buffers of the gradients, and the collectives of the last."""
    counting, params = fs.collectives.CountingComm(comm), make_params()
    params = fs.shard(params, fs.plan(params, comm.mesh, strategy("dp"), units="layers.*"), comm)
    batch = make_batches(1, 8, seed=comm.rank)[0]
    run = fs.Scheduler(counting)(step) if scheduled else partial(step, comm=counting)
    for _ in range(3):
        counting.calls.clear()
        loss, grads = run(params, batch)
    return [loss.sum, *(x.clone() for node in fs.layouts.units_of(grads) for x in node.buffers)], dict(counting.calls)


def value_and_grad(params, batch, comm, **options):
    return fs.value_and_grad(partial(loss_fn, **options))(params, batch, comm=comm)


@every(3, remat=REMATS, strategy=[fs.ddp, fs.zero2, fs.zero3], scheduled=[False, True])
@on_ranks(DP)
def test_the_same_bits_and_no_more_collectives(comm, remat, strategy, scheduled):
    plain, calls = gradients(comm, strategy, value_and_grad)
    found, counted = gradients(comm, strategy, partial(value_and_grad, remat=REMATS[remat]), scheduled=scheduled)
    assert all(map(torch.equal, found, plain))
    assert set(counted) <= set(calls)
    assert all(counted[call] <= calls[call] for call in counted) if scheduled else counted == calls


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("remat", [True, save_matmuls])
def test_random_numbers_are_those_of_the_forward(remat, scheduled):
    """And generators are left as without recomputation. One rank: those of one process share the global generator."""
    left = []

    def step(params, batch, comm, **options):
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(8)
        result = value_and_grad(params, batch, comm, generator=generator, **options)
        left.append((generator.get_state(), torch.get_rng_state()))
        return result

    with torch.random.fork_rng():
        plain, _ = gradients(fs.SingleComm(), fs.zero3, step)
        found, _ = gradients(fs.SingleComm(), fs.zero3, partial(step, remat=remat), scheduled=scheduled)
    assert all(map(torch.equal, found, plain))
    assert len(left) == 6
    assert all(torch.equal(a, b) for states in left for a, b in zip(states, left[0], strict=True))


class Matmuls(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in MATMULS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("remat", "count"), [(False, 5), (True, 7), (MATMULS, 5), (save_matmuls, 5)])
def test_what_is_recomputed(remat, count):
    """Two products in the forward, three in the backward, as ``x`` has no gradient."""
    tree = {"w": torch.ones(4, 4)}
    params = fs.shard(tree, fs.plan(tree, fs.Mesh({"dp": 1}), fs.zero3("dp")), fs.SingleComm())

    def fn(p, x):
        calls.append(x)
        return torch.tanh(torch.tanh(x @ p["w"]) @ p["w"])

    def loss(params, x, comm):
        return fs.forward(fn, params, x, comm=comm, remat=remat).sum()

    calls = []
    with Matmuls() as matmuls:
        fs.value_and_grad(loss)(params, torch.ones(2, 4), comm=fs.SingleComm())
    assert len(calls) == (1 if remat is False else 2)
    assert matmuls.count == count


def single(**options):
    """A step on one unit, ``tanh(x @ w)``, whose gradients are with respect to parameters and ``x``."""
    tree = {"w": torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)}
    params = fs.shard(tree, fs.plan(tree, fs.Mesh({"dp": 1}), fs.zero3("dp")), fs.SingleComm())
    x = torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
    return params, x, partial(fs.forward, comm=fs.SingleComm(), **options)


@pytest.mark.parametrize("how", ["create_graph", "jvp", "vmap"])
def test_higher_derivatives_and_transforms(how):
    """Under torch.func nothing is recomputed, and values are the same."""

    def found(**options):
        params, x, forward = single(**options)

        def f(x):
            return forward(lambda p, x: torch.tanh(x @ p["w"]), params, x)

        if how == "create_graph":
            (g,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
            return torch.autograd.grad(g.square().sum(), x)[0]
        return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1] if how == "jvp" else torch.func.vmap(f)(x)

    torch.testing.assert_close(found(remat=True), found(), rtol=0, atol=0)


@pytest.mark.parametrize("nested", [False, True])
def test_an_argument_that_is_written_to_before_the_backward_is_an_error(nested):
    params, x, forward = single(remat=True)
    y = x * 2
    if nested:
        out = forward(lambda p, b: torch.tanh(b["y"] @ p["w"]), params, {"y": y})
    else:
        out = forward(lambda p, y: torch.tanh(y @ p["w"]), params, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("scheduled", [False, True])
@on_ranks(DP)
def test_parameters_that_are_changed_before_the_backward_are_an_error(comm, scheduled):
    tree = {"w": torch.ones(4, 4)}
    params = fs.shard(tree, fs.plan(tree, DP, fs.zero3("dp")), comm)

    def loss(p, x, comm):
        out = fs.forward(lambda q, x: torch.tanh(x @ q["w"]), p, x, comm=comm, remat=True).sum()
        params.buffers[0].add_(1)
        return out

    step = fs.value_and_grad(loss)
    run = fs.Scheduler(comm)(step) if scheduled else partial(step, comm=comm)
    with pytest.raises((TreeError, ScheduleError), match=r"changed.* between (its|a) forward and its backward"):
        run(params, torch.ones(2, 4))


@pytest.mark.parametrize("remat", ["everything", 1, None])
def test_what_says_nothing_is_refused(remat):
    params, x, forward = single(remat=remat)
    with pytest.raises(TreeError, match=f"remat is {remat!r}, expected True"):
        forward(lambda p, x: x, params, x)


@pytest.mark.parametrize("remat", [True, save_matmuls])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_generator_in_a_closure_is_found(remat, scheduled):
    """Its numbers are others when the backward computes the function again; one that is an argument gives the same."""
    generator = torch.Generator().manual_seed(8)

    def hidden(p, x):
        return dropped(p, x, options={"generator": generator})

    def hidden_loss(params, batch, comm):
        x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
        x = fs.forward(hidden, params["layers"][0], x, comm=comm, remat=remat)
        return F.cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch["y"])

    def step(params, batch, comm):
        return fs.value_and_grad(hidden_loss)(params, batch, comm=comm)

    with checking_remat(), pytest.raises(TreeError, match=r"(?s)computed twice.*float32\[.*Pass generators as arguments"):
        gradients(fs.SingleComm(), fs.zero3, step, scheduled=scheduled)


def test_simulated_ranks_check_too():
    numbers = count()

    def rank_fn(comm):
        params = {"w": torch.ones(2)}
        params = fs.shard(params, fs.plan(params, comm.mesh, fs.zero3("dp")), comm)
        fs.forward(lambda p: p["w"] * next(numbers), params, comm=comm, remat=True)

    with checking_remat(), pytest.raises(TreeError, match="computed twice"):
        simulate(DP, rank_fn)


def test_checking_changes_no_bits():
    def step(params, batch, comm):
        torch.manual_seed(7)
        return value_and_grad(params, batch, comm, generator=torch.Generator().manual_seed(8), remat=True)

    plain, _ = gradients(fs.SingleComm(), fs.zero3, step)
    with checking_remat():
        found, _ = gradients(fs.SingleComm(), fs.zero3, step)
    assert all(map(torch.equal, found, plain))
