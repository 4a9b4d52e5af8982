"""JAX modules as units of a torch program, sharded and scheduled as any other, and their weights brought back.

python examples/jax_unit.py                                 two processes
torchrun --nproc-per-node 4 examples/jax_unit.py

All processes are on CPUs, also if there are GPUs: JAX's wheel for CPUs is enough.

It prints the losses of both runs. They differ by rounding only, about 4e-6.
"""

import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import launch_example
import numpy as np
import optax
import torch
import torch.nn.functional as F
from flax import nnx
from gpt.data import load, random_starts, windows

import fsharp as fs
from fsharp.interop.jax import make_functional, to_arrays

DIM, HEADS, LAYERS = 64, 4, 3
BATCH, LENGTH, RATE = 8, 64, 0.03  # sequences in a step (of all ranks), bytes, learning rate of SGD


@dataclass
class Options:
    """Train a transformer with Flax blocks, torch embedding and torch head, under ZeRO-3; and the same model in JAX alone."""

    steps: int = 30
    """Steps of the optimizer."""


class Block(nnx.Module):
    """Causal attention and a two-layer network."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.norm1, self.norm2 = (nnx.RMSNorm(DIM, rngs=rngs) for _ in range(2))
        self.qkv, self.out = nnx.Linear(DIM, 3 * DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in jnp.split(self.qkv(self.norm1(x)), 3, -1))
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


def make_table():
    return torch.randn(256, DIM, generator=torch.Generator().manual_seed(0)) * 0.1


# ---------------------------------------------------------------- a torch program on shards


def embed(table, tokens):
    return F.embedding(tokens, table)


def head_loss(table, x, targets):
    return F.cross_entropy((x @ table.T).flatten(0, 1), targets.flatten())


def train_sharded(options, batches):
    mesh = fs.Mesh({"dp": int(os.environ["WORLD_SIZE"])})
    comm = fs.connect(mesh, device_type="cpu")
    fns, trees = zip(*(make_functional(Block(seed)) for seed in range(LAYERS)), strict=True)
    params = {"embed": make_table(), "blocks": list(trees), "head": make_table()}
    layout = fs.plan(params, mesh, fs.zero3("dp"), units="blocks.*")
    tx = fs.optim.sgd(RATE)
    state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)

    def loss_fn(params, batch, comm):
        x = fs.forward(embed, params["embed"], batch["inputs"], comm=comm)
        for fn, block in zip(fns, params["blocks"], strict=True):
            x = fs.forward(fn, block, x, comm=comm)  # gathered, run by XLA, released; gathered again in the backward
        return fs.forward(head_loss, params["head"], x, batch["targets"], comm=comm)

    step, losses = fs.Scheduler(comm)(fs.train_step(loss_fn, tx)), []
    for batch in batches:
        state, metrics = step(state, {name: x[comm.rank :: mesh.size] for name, x in batch.items()})
        losses.append(float(metrics.loss))
    return comm, losses, fs.full_tree(state.params, comm=comm)


# ---------------------------------------------------------------- the same in JAX alone


def train_in_jax(options, batches):
    graphs, states = zip(*(nnx.split(Block(seed)) for seed in range(LAYERS)), strict=True)
    table = jnp.array(make_table().numpy())
    params = {"embed": table, "blocks": states, "head": table}

    @jax.jit
    def step(params, inputs, targets):
        def loss(params):
            x = params["embed"][inputs]
            for graph, block in zip(graphs, params["blocks"], strict=True):
                x = nnx.merge(graph, block)(x)
            return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"].T, targets).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    losses = []
    for batch in batches:
        params, loss = step(params, *(jnp.array(batch[name].numpy()) for name in ("inputs", "targets")))
        losses.append(float(loss))
    return losses, [nnx.merge(graph, block) for graph, block in zip(graphs, params["blocks"], strict=True)]


def main(options):
    corpus = load().train
    starts = [random_starts(corpus, BATCH, LENGTH, seed=0, step=step) for step in range(options.steps)]
    batches = [windows(corpus, s, LENGTH) for s in starts]
    comm, sharded, params = train_sharded(options, batches)
    if comm.rank == 0:
        alone, blocks = train_in_jax(options, batches)
        launch_example.show_losses(sharded, alone, "unsharded")
        print(f"largest difference between losses: {max(abs(a - b) for a, b in zip(sharded, alone, strict=True)):.1e}")
        apart = 0.0
        for trained, tree, seed in zip(blocks, params["blocks"], range(LAYERS), strict=True):
            block = Block(seed)
            nnx.update(block, to_arrays(tree, like=nnx.state(block, nnx.Param)))
            x = np.random.default_rng(0).standard_normal((2, LENGTH, DIM), dtype=np.float32)
            apart = max(apart, float(jnp.abs(block(x) - trained(x)).max()))
        print(f"largest difference between outputs of the Flax modules with the trained weights: {apart:.1e}")


if __name__ == "__main__":
    launch_example.main(main, Options, batch=BATCH)
