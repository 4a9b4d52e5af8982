"""Interop where tensors are on a GPU that JAX has too."""

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import fsharp as fs
from fsharp.interop.jax import as_torch, from_jax, to_jax, unflatten
from tests import gpt_like

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or jax.default_backend() != "gpu", reason="torch or JAX has no GPU"),
]


def trained(device):
    comm = fs.SingleComm(device=device)
    params = gpt_like.make_params()
    layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="layers.*")
    tx = fs.optim.from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
    state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)
    step = fs.Scheduler(comm)(fs.train_step(gpt_like.loss_fn, tx))
    for batch in gpt_like.make_batches(5, 16):
        state, _ = step(state, {name: x.to(device) for name, x in batch.items()})
    return layout, state, fs.full_tree(state.params, comm=comm)


def test_from_optax_on_a_gpu():
    _, _, on_cpu = trained("cpu")
    _, _, on_gpu = trained("cuda")
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-5, check_device=False)


def test_as_torch_on_a_gpu():
    w, x = torch.randn(64, 64, device="cuda", requires_grad=True), torch.randn(8, 64, device="cuda", requires_grad=True)
    exact = as_torch(lambda w, x: jnp.tanh(jnp.matmul(x, w, precision="highest")))  # by default JAX multiplies in TF32
    got = torch.autograd.grad(exact(w, x).square().sum(), (w, x))
    want = torch.autograd.grad(torch.tanh(x @ w).square().sum(), (w, x))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_to_jax_on_a_gpu_has_the_memory_of_the_shards():
    layout, state, whole = trained("cuda")
    arrays = to_jax(state.params, layout)
    buffers = [x for node in fs.layouts.units_of(state.params) for x in node.buffers]
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(arrays)] == [x.data_ptr() for x in buffers]
    torch.testing.assert_close(torch.from_dlpack(jax.jit(unflatten)(arrays)["embed"]), whole["embed"])
    back = from_jax(arrays, layout)
    assert all(map(torch.equal, [x for node in fs.layouts.units_of(back) for x in node.buffers], buffers))
