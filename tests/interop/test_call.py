"""as_torch: JAX functions as functions of tensors, beside the same function in torch."""

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import LayoutError, TreeError
from fsharp.interop.jax import as_torch
from fsharp.testing import assert_equivalent, processes, simulate
from tests import gpt_like
from tests.interop.test_optax import trained as updated_by_optax
from tests.ranks import on_ranks


def jax_fn(p, x, n, scale=1.0):
    h = jnp.tanh(x @ p["w"] + p["b"])
    return {"y": h**n * scale, "best": jnp.argmax(h, -1)}, p["w"], h


def torch_fn(p, x, n, scale=1.0):
    h = torch.tanh(x @ p["w"] + p["b"])
    return {"y": h**n * scale, "best": h.argmax(-1)}, p["w"], h


def arguments():
    g = torch.Generator().manual_seed(0)
    return {"w": torch.randn(16, 16, generator=g) / 8, "b": torch.randn(16, generator=g)}, torch.randn(3, 16, generator=g)


def loss(fn):
    def of(p, x):
        out, w, h = fn(p, x, 2, scale=3.0)
        return out["y"].square().sum() + w.sum() + (h[0] * h[1]).sum()

    return of


f = torch.func
TRANSFORMS = {
    "value": lambda fn, p, x: loss(fn)(p, x),
    "grad": lambda fn, p, x: f.grad(loss(fn), argnums=(0, 1))(p, x),
    "vjp": lambda fn, p, x: f.vjp(lambda x: fn(p, x, 2)[2], x)[1](torch.ones(3, 16)),
    "jvp": lambda fn, p, x: f.jvp(lambda x: fn(p, x, 2)[2], (x,), (torch.ones(3, 16),)),
    "vmap": lambda fn, p, x: f.vmap(lambda x: fn(p, x[None], 2)[2])(x),
    "vmap of integers": lambda fn, p, x: f.vmap(lambda x: fn(p, x[None], 2)[0]["best"])(x),
    "grad of each sample": lambda fn, p, x: f.vmap(lambda x: f.grad(loss2(fn))(p, x[None]))(x),
    "hessian": lambda fn, p, x: f.hessian(lambda b: loss(fn)(p | {"b": b}, x))(p["b"]),
    "forward over reverse": lambda fn, p, x: f.jvp(f.grad(lambda x: loss(fn)(p, x)), (x,), (torch.ones(3, 16),))[1],
    "reverse over reverse": lambda fn, p, x: f.grad(lambda x: f.grad(lambda x: loss(fn)(p, x))(x).square().sum())(x),
    "jacrev": lambda fn, p, x: f.jacrev(lambda x: fn(p, x, 2)[2])(x),
    "jacfwd": lambda fn, p, x: f.jacfwd(lambda x: fn(p, x, 2)[2])(x),
    "backward": lambda fn, p, x: by_backward(fn, p, x),
    "double backward": lambda fn, p, x: by_double_backward(fn, p, x),
    "backward of a vjp that has ended": lambda fn, p, x: by_backward_of_vjp(fn, p, x),
    "dual numbers": lambda fn, p, x: by_dual(fn, p, x),
}


def loss2(fn):
    return lambda p, x: fn(p, x, 2)[0]["y"].square().sum()


def by_backward(fn, p, x):
    leaves = [p["w"].requires_grad_(), p["b"].requires_grad_(), x.requires_grad_()]
    out = loss(fn)(p, x)
    out.backward(retain_graph=True)
    out.backward()
    return [leaf.grad for leaf in leaves]


def by_double_backward(fn, p, x):
    leaves = [p["w"].requires_grad_(), p["b"].requires_grad_(), x.requires_grad_()]
    grads = torch.autograd.grad(loss(fn)(p, x), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)


def by_backward_of_vjp(fn, p, x):
    """The pullback is called outside of its transform, where saved tensors of the transform hide that they want gradients."""
    leaves = [p["w"].requires_grad_(), p["b"].requires_grad_()]
    out, pullback = f.vjp(lambda x: fn(p, x, 2)[2], x)
    return torch.autograd.grad(pullback(out.sin())[0].sum(), leaves)


def by_dual(fn, p, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(p, forward_ad.make_dual(x, torch.ones(3, 16)), 2)[2]).tangent


@pytest.mark.parametrize("name", TRANSFORMS)
def test_as_torch_under_a_transform(name):
    p, x = arguments()
    got = TRANSFORMS[name](as_torch(jax_fn), p, x)
    p, x = arguments()
    want = TRANSFORMS[name](torch_fn, p, x)
    for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


def test_as_torch_refuses_to_be_traced():
    fn, x = as_torch(jnp.sin), torch.ones(3)
    with pytest.raises(TreeError, match=r"as_torch\(\): called under torch.func.linearize"):
        f.linearize(fn, x)
    with pytest.raises(TreeError, match="a FakeTensor"), FakeTensorMode() as mode:
        fn(mode.from_tensor(x))


# Dynamo hides this warning of its own by not showing it, which does nothing where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("what", ["function", "loss"])
def test_as_torch_within_what_torch_compiles(what):
    """The JAX function is not traced: graphs end there."""
    torch._dynamo.reset()
    fn, comm = as_torch(lambda w, x: jnp.tanh(x @ w)), fs.SingleComm()
    w, x = torch.eye(4) / 2, torch.arange(8.0).view(2, 4)

    def gradient(change):
        if what == "function":
            return f.grad(change(lambda w: (fn(w * 2, x + 1) * 2).sum()))(w)
        params = fs.shard(w, fs.plan(w, comm.mesh, fs.zero3("dp")), comm)
        loss = change(lambda params, x, comm: fs.forward(fn, params, x, comm=comm).square().sum() * 2)
        return fs.full_tree(fs.value_and_grad(loss)(params, x, comm=comm)[1], comm=comm)

    assert torch.equal(gradient(lambda fn: torch.compile(fn, backend="aot_eager")), gradient(lambda fn: fn))


def test_as_torch_gives_gradients_to_those_that_want_them():
    p, x = arguments()
    fn = as_torch(jax_fn)
    p["b"].requires_grad_()
    out, _, _ = fn(p, x, 2)
    assert out["y"].requires_grad
    assert not out["best"].requires_grad
    out["y"].sum().backward()
    assert p["w"].grad is None
    with torch.no_grad():
        assert not fn(p, x, 2)[2].requires_grad


def test_as_torch_compiles_for_each_constant_and_not_for_each_call():
    traced = []

    def power(x, n):
        traced.append(n)
        return x**n

    fn = as_torch(power)
    x = torch.full((4,), 3.0)
    assert [fn(x, n)[0].item() for n in (2, 3, 2, 3, 2.0, True)] == [9, 27, 9, 27, 9, 3]
    assert traced == [2, 3, 2.0, True]
    sign = as_torch(jnp.copysign)
    assert [sign(torch.ones(1), zero).item() for zero in (0.0, -0.0, 0.0)] == [1, -1, 1]
    assert [sign(torch.ones(1), np.float32(zero)).item() for zero in (0.0, -0.0, 0.0)] == [1, -1, 1]
    assert [fn(torch.full((1,), 2.0), float("nan")).isnan().item() for _ in range(3)] == [True] * 3
    assert len(traced) == 5


def test_as_torch_returns_memory_of_its_own():
    fn = as_torch(lambda x: (x, x, x * 1))
    x = torch.ones(1024)
    for out in fn(x):
        out.zero_()
    a, b, _ = fn(x)
    a.zero_()
    assert x.sum() == b.sum() == 1024


def deep(x):
    for _ in range(5):
        x = jnp.sin(x)
    return x


def num_arrays_of_jax(shape):
    gc.collect()
    jnp.zeros(1).block_until_ready()  # what torch has let go of, JAX frees at its next call
    return sum(x.shape == shape for x in jax.live_arrays())


def until(is_true):
    for _ in range(100):
        if is_true():
            return
        time.sleep(0.05)
    assert is_true()


def test_as_torch_frees_what_jax_kept_once_it_is_used():
    x = torch.randn(1013, requires_grad=True)
    fn = as_torch(deep)
    out = fn(x)
    kept = num_arrays_of_jax((1013,))
    assert kept >= 5
    out.sum().backward()
    x.grad = None
    until(lambda: num_arrays_of_jax((1013,)) <= kept - 4)  # a computation that is under way keeps its inputs
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_as_torch_keeps_nothing_that_hooks_and_checkpoints_take_away():
    x = torch.randn(1019, requires_grad=True)
    fn = as_torch(deep)
    out = checkpoint(fn, x, use_reentrant=False)
    until(lambda: num_arrays_of_jax((1019,)) <= 1)
    (want,) = torch.autograd.grad(fn(x.clone()).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], want)
    del out
    want = want.clone()  # in memory of torch
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = fn(x)
    until(lambda: num_arrays_of_jax((1019,)) <= 1)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], want)


def test_as_torch_keeps_arguments_as_autograd_does_and_not_again():
    w, x = torch.randn(512, 512, requires_grad=True), torch.randn(4, 512)
    out = as_torch(lambda w, x: jnp.tanh(x @ w))(w, x)
    sizes = sorted(t.numel() for t in out.grad_fn.saved_tensors)
    assert sizes[-1] == w.numel()
    assert sizes[-2] <= x.numel()


def test_as_torch_keeps_less_under_a_checkpoint_of_jax():
    x = torch.randn(4, 64, requires_grad=True)
    plain, remat = (as_torch(fn)(x) for fn in (deep, jax.checkpoint(deep)))
    assert len(plain.grad_fn.saved_tensors) > len(remat.grad_fn.saved_tensors) == 1
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x)[0] for out in (plain, remat)))


def test_as_torch_reads_no_memory_after_the_call():
    x = torch.randn(1 << 20)
    fn = as_torch(lambda x: jnp.cumsum(x)[-1])
    want = x.double().sum()
    for _ in range(3):
        y = x.clone()
        out = fn(y)
        y.zero_()
        assert abs(out.double() - want) < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_as_torch_of_other_dtypes(dtype):
    x = torch.arange(1, 9).to(dtype).requires_grad_()
    as_torch(lambda x: x * x)(x).abs().sum().backward()
    want = x.detach().clone().requires_grad_()
    (want * want).abs().sum().backward()
    assert x.grad.dtype is dtype
    torch.testing.assert_close(x.grad, want.grad)


COMPLEX = {
    "holomorphic": lambda x: x * x * x,
    "not holomorphic": lambda x: x * abs(x),
    "to real": lambda x: (x * (1 + 2j)).imag + abs(x),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_as_torch_gives_gradients_of_complex_numbers_as_torch_does(name):
    z = torch.tensor([1 + 2j, -0.5 + 0.25j, 3j], dtype=torch.complex64)
    found = []
    for fn in (as_torch(COMPLEX[name]), COMPLEX[name]):
        x = z.clone().requires_grad_()
        (grad,) = torch.autograd.grad((fn(x) * (2 - 1j)).abs().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((grad * (1 + 3j)).real.sum(), x)
        found.append((grad, second, f.jvp(fn, (z,), (torch.full_like(z, 1 - 2j),))[1]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_as_torch_of_views_that_are_conjugated_or_negated():
    z = torch.tensor([1 + 2j], dtype=torch.complex64)
    fn = as_torch(lambda x: x * 1)
    assert fn(z.conj()).item() == 1 - 2j
    assert fn(z.conj().imag).item() == -2
    assert fn(torch._efficientzerotensor(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7)])
def test_as_torch_of_other_shapes(shape):
    x = torch.ones(shape, requires_grad=True)
    out = as_torch(lambda x: 3 * x)(x)
    out.sum().backward()
    assert out.shape == shape
    assert torch.equal(x.grad, torch.full(shape, 3.0))


def test_as_torch_of_strided_and_unaligned_tensors():
    x = torch.arange(64.0)
    fn = as_torch(lambda x: x + 1)
    for view in (x[1:9], x.view(8, 8).T, x[::2], x.flip(0)):
        assert torch.equal(fn(view), view + 1)


def test_as_torch_refuses_what_jax_would_change():
    fn = as_torch(lambda x: x)
    with pytest.raises(TreeError, match="float64 narrower"):
        fn(torch.ones(3, dtype=torch.float64))
    with pytest.raises(TreeError, match="64 bits, and JAX has 32"):
        fn(torch.tensor([1 << 40]))
    assert fn(torch.tensor([1 << 20])).item() == 1 << 20
    with pytest.raises(TreeError, match=r"no dtype for torch\.bits8"):
        fn(torch.empty(3, dtype=torch.bits8))


class Holder:
    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_node(Holder, lambda h: ((h.x,), None), lambda _, children: Holder(*children))


def test_as_torch_names_the_argument_that_it_cannot_pass():
    fn, x = as_torch(lambda p, mask=None: p["x"]), torch.ones(3)
    with pytest.raises(TreeError, match=r"argument \[0\]\['x'\] is a ndarray, expected pytrees of tensors"):
        fn({"x": x.numpy()})
    with pytest.raises(TreeError, match=r"argument \['mask'\] is a PRNGKeyArray.*jax.random.key_data"):
        fn({"x": x}, mask=jax.random.key(0))
    with pytest.raises(TreeError, match=r"argument \['mask'\] is a Holder.*register_pytree_node"):
        fn({"x": x}, mask=Holder(x))


def test_as_torch_returns_numbers_as_tensors_and_refuses_the_rest():
    x = torch.ones(3, requires_grad=True)
    for each in (x, x.detach()):
        out = as_torch(lambda x: (2 * x, 3, 2.5, None))(each)
        assert [y.item() for y in out[1:3]] == [3, 2.5]
        assert out[3] is None
    with pytest.raises(TreeError, match=r"returned a str at \[1\], expected arrays"):
        as_torch(lambda x: (x, "name"))(x)
    with pytest.raises(TreeError, match=r"Of a random key return jax.random.key_data"):
        as_torch(lambda x: jax.random.key(0))(x)


@pytest.mark.parametrize(
    "x", [TwoTensor(torch.ones(4), torch.ones(4)), torch.ones(4, device="meta"), torch.eye(2).to_sparse()], ids=repr
)
def test_as_torch_refuses_what_has_no_memory(x):
    with pytest.raises(TreeError, match=f"a {type(x).__name__} of layout {x.layout} on device {x.device} has no"):
        as_torch(lambda x: x * 2)(x)


@pytest.mark.parametrize("strategy", [fs.ddp("dp"), fs.zero3("dp")], ids=["ddp", "zero3"])
@on_ranks(fs.Mesh({"dp": 2}))
def test_as_torch_refuses_parameters_of_a_sharded_module_outside_of_it(comm, strategy):
    model = fs.shard_module(torch.nn.Linear(4, 4), mesh=comm, strategy=strategy, sync_from=0)
    with pytest.raises(LayoutError, match=r"as_torch\(\)"):
        as_torch(lambda w: w.sum())(model.weight)
    with torch.no_grad(), model.unsharded():
        assert as_torch(lambda w: w + 0)(model.weight).shape == (4, 4)


jax_block = as_torch(lambda p, x: x + p["gain"] * (jnp.tanh((x * p["s"]) @ p["w"]) @ p["v"] + p["b"]) * p["t"])


def losses(block, params, batch, comm):
    x = fs.forward(gpt_like.embed, params["embed"], batch["x"], comm=comm)
    for layer in params["layers"]:
        x = fs.forward(block, layer, x, comm=comm)
    out = fs.forward(gpt_like.head, params["head"], x, comm=comm)
    each = torch.nn.functional.cross_entropy(out, batch["y"], reduction="none")
    return fs.Loss((each * batch["w"]).sum(), batch["w"].sum())


def loss_fn(params, batch, comm):
    return losses(jax_block, params, batch, comm)


def runs():
    one, two = fs.Mesh({"dp": 3}), fs.Mesh({"outer": 2, "inner": 2})
    return {
        "ddp": (one, fs.ddp("dp")),
        "zero1": (one, fs.zero1("dp")),
        "zero3": (one, fs.zero3("dp")),
        "hfsdp": (two, fs.hfsdp("outer", "inner")),
    }


def test_a_unit_of_jax_under_every_strategy():
    params, batches, tx = gpt_like.make_params(layers=1), gpt_like.make_batches(2, 24), fs.optim.sgd(0.1)
    results = assert_equivalent(loss_fn, tx, params, batches, units="layers.*", runs=runs())
    reference = assert_equivalent(gpt_like.loss_fn, tx, params, batches, units="layers.*", runs=runs())
    torch.testing.assert_close(results["ddp"], reference["ddp"], rtol=1e-5, atol=1e-6)


def steps(comm, block, is_scheduled):
    params = gpt_like.make_params(layers=1)
    layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="layers.*")
    tx = fs.optim.sgd(0.1)
    counting = fs.collectives.CountingComm(comm)
    state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)

    def step(state, batch, comm):
        loss, grads = fs.value_and_grad(lambda p, b, c: losses(block, p, b, c), microbatches=2)(state.params, batch, comm=comm)
        metrics, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
        return fs.update(tx, grads, state, comm=comm), metrics

    run = fs.Scheduler(counting)(step) if is_scheduled else lambda state, batch: step(state, batch, counting)
    for batch in gpt_like.make_batches(3, 24):
        state, _ = run(state, {name: x.chunk(comm.mesh.size)[comm.rank] for name, x in batch.items()})
    return fs.full_tree(state.params, comm=comm), dict(counting.calls)


def check_scheduled(comm):
    blocking, calls = steps(comm, jax_block, False)
    scheduled, _ = steps(comm, jax_block, True)
    _, calls_of_torch = steps(comm, gpt_like.block, False)
    assert calls == calls_of_torch  # let go of after the forward, and gathered again
    torch.testing.assert_close(scheduled, blocking, rtol=0, atol=0)
    return blocking


def test_a_unit_of_jax_scheduled_has_the_bits_of_the_blocking_path_and_updates_of_optax_those_of_simulated_ranks():
    def rank_fn(comm):
        return check_scheduled(comm), updated_by_optax(comm, "zero3")[0]

    mesh = fs.Mesh({"dp": 2})
    found, expected = processes(mesh, rank_fn), simulate(mesh, rank_fn)
    torch.testing.assert_close(found[0][0], expected[0][0], rtol=1e-6, atol=1e-6)
    assert [losses for _, losses in found] == [losses for _, losses in expected]
