"""Train a Llama of transformers under ZeRO-3 by a chain of optax, as JAX alone trains the unsharded one.

python examples/train_with_optax.py                                 two processes
torchrun --nproc-per-node 4 examples/train_with_optax.py

All processes are on CPUs, also if there are GPUs: JAX's wheel for CPUs is enough.

It prints the losses of both runs. They differ by rounding only, about 1e-5.
"""

import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import launch_example
import optax
import torch
from gpt.data import load, random_starts, windows
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fsharp as fs

BATCH, LENGTH = 8, 64  # sequences in a step (of all ranks), bytes
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    use_cache=False,
)  # fmt: skip


@dataclass
class Options:
    """Train a Llama of 0.8M parameters on the source of Python's standard library, by torch under ZeRO-3 and by JAX alone."""

    steps: int = 40
    """Steps of the optimizer."""


def make_tx(steps):
    """Matrices decay, vectors do not: the mask needs the shapes of whole leaves, and no rank holds one under ZeRO-3."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 4, steps)
    mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1, mask=mask))


def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


# ---------------------------------------------------------------- torch, ZeRO-3, the optimizer is optax's


def train_sharded(options, batches):
    comm = fs.connect(fs.Mesh({"dp": int(os.environ["WORLD_SIZE"])}), device_type="cpu")
    model = fs.shard_module(build(), mesh=comm, strategy=fs.zero3("dp"), units=[LlamaDecoderLayer])
    call, params = model.functional()
    tx = fs.optim.from_optax(make_tx(options.steps))
    state = fs.init_state(tx, params, comm=comm)

    def loss_fn(params, tokens, comm):
        return call(params, input_ids=tokens, labels=tokens, comm=comm).loss

    step, losses = fs.Scheduler(comm)(fs.train_step(loss_fn, tx)), []
    for tokens in batches:
        state, metrics = step(state, tokens[comm.rank :: comm.mesh.size])
        losses.append(float(metrics.loss))
    return comm, losses, state


# ---------------------------------------------------------------- the same in JAX alone


def rms_norm(x, weight):
    return weight * x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps)


def rotate(x):
    """Positions as rotations, of ``[batch, time, heads, dim]``."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * CONFIG.rope_parameters["rope_theta"] ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def llama_loss(params, tokens):
    def linear(name, x):
        return x @ params[f"{name}.weight"].T

    x = params["model.embed_tokens.weight"][tokens]
    for i in range(CONFIG.num_hidden_layers):
        name = f"model.layers.{i}"
        y = rms_norm(x, params[f"{name}.input_layernorm.weight"])
        q, k, v = (linear(f"{name}.self_attn.{part}_proj", y) for part in "qkv")
        q, k, v = (z.reshape(*z.shape[:2], -1, CONFIG.head_dim) for z in (q, k, v))
        attended = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + linear(f"{name}.self_attn.o_proj", attended.reshape(x.shape))
        y = rms_norm(x, params[f"{name}.post_attention_layernorm.weight"])
        x = x + linear(
            f"{name}.mlp.down_proj", jax.nn.silu(linear(f"{name}.mlp.gate_proj", y)) * linear(f"{name}.mlp.up_proj", y)
        )
    logits = linear("lm_head", rms_norm(x, params["model.norm.weight"]))
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def train_in_jax(options, batches):
    params = {name: jnp.array(p.detach().numpy()) for name, p in build().named_parameters()}
    tx = make_tx(options.steps)
    opt = tx.init(params)

    @jax.jit
    def step(params, opt, tokens):
        loss, grads = jax.value_and_grad(llama_loss)(params, tokens)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    losses = []
    for tokens in batches:
        params, opt, loss = step(params, opt, jnp.array(tokens.numpy()))
        losses.append(float(loss))
    return losses


def main(options):
    corpus = load().train
    starts = [random_starts(corpus, BATCH, LENGTH, seed=0, step=step) for step in range(options.steps)]
    batches = [windows(corpus, s, LENGTH)["inputs"] for s in starts]
    comm, sharded, state = train_sharded(options, batches)
    if comm.rank == 0:
        alone = train_in_jax(options, batches)
        launch_example.show_losses(sharded, alone, "unsharded")
        print(f"largest difference between losses: {max(abs(a - b) for a, b in zip(sharded, alone, strict=True)):.1e}")
        moments = sum(node.nbytes for node in fs.layouts.units_of(state.opt))
        params = fs.inspect.tree_nbytes(state.params)
        print(f"rank 0 holds {params:,} bytes of parameters and {moments:,} bytes of optax's moments")


if __name__ == "__main__":
    launch_example.main(main, Options, batch=BATCH)
