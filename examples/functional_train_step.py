"""A training step composed from pure functions: gather, forward, reduce_scatter, update.

python examples/functional_train_step.py                                        one process
torchrun --nproc-per-node 4 examples/functional_train_step.py                   ZeRO-3
torchrun --nproc-per-node 4 examples/functional_train_step.py hfsdp             hybrid, 2 x 2

It prints the loss, which falls from 4.7 to 1.4 on one process, and to 0.7 on four, which take four times as many samples.
"""

import os
import sys

import torch
import torch.nn.functional as F

import fsharp as fs

VOCAB, DIM, LAYERS, LENGTH = 64, 48, 4, 32
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")


def shapes():
    """Return the parameters as a pytree of meta tensors: shapes and dtypes without memory."""
    with torch.device("meta"):
        block = {"mix": torch.empty(LENGTH, LENGTH), "up": torch.empty(DIM, 4 * DIM), "down": torch.empty(4 * DIM, DIM)}
        layers = [{name: torch.empty_like(w) for name, w in block.items()} for _ in range(LAYERS)]
        return {"embed": torch.empty(VOCAB, DIM), "layers": layers, "head": torch.empty(DIM, VOCAB)}


# The model: pure functions of a subtree and activations. Nothing in them knows of ranks.


def embed(table, tokens):
    return F.embedding(tokens, table)


def block(p, x):
    x = x + torch.einsum("ts,bsd->btd", p["mix"].tril() / LENGTH**0.5, x)
    return x + F.gelu(F.rms_norm(x, (DIM,)) @ p["up"]) @ p["down"]


def head_loss(w, x, targets):
    return F.cross_entropy((F.rms_norm(x, (DIM,)) @ w).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def loss_fn(params, batch, comm):
    """Return the loss. Each unit is gathered, used and released; the backward gathers it again, and reduces its gradient."""
    x = fs.forward(embed, params["embed"], batch["tokens"], comm=comm)
    for layer in params["layers"]:
        x = fs.forward(block, layer, x, comm=comm)
    return fs.forward(head_loss, params["head"], x, batch["targets"], comm=comm)


learning_rate = fs.optim.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=10, decay_steps=100)
tx = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(learning_rate))


def train_step(state, batch, comm):
    """Do what the step of ``fs.train_step(loss_fn, tx)`` does."""
    loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
    grads = fs.reduce_scatter(grads, comm=comm)  # from where gradients rest to where the optimizer wants them
    metrics, grads = fs.average(loss, grads, comm=comm)  # one divisor for the tokens of all ranks
    return fs.update(tx, grads, state, comm=comm), metrics  # optimizer to parameters


def make_batch(step, rank):
    """Return sequences that count by a stride, which the model has to learn."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    start, stride = (torch.randint(1, 9, (16, 1), generator=g) for _ in range(2))
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def main(name="zero3"):
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if name not in STRATEGIES or (name.startswith("h") and size % 2):
        remedy = f"one of {', '.join(STRATEGIES)}; hsdp and hfsdp need an even number of processes"
        sys.exit(f"error: got {name!r} on {size} process{'es' * (size > 1)}, expected {remedy}")
    mesh = fs.Mesh({"outer": 2, "inner": size // 2} if name.startswith("h") else {"dp": size})
    comm = fs.connect(mesh)
    layout = fs.plan(shapes(), mesh, getattr(fs, name)(*mesh.names), units="layers.*")
    state = fs.init_state(tx, fs.init_params(fs.init.normal(DIM**-0.5), layout, comm, key=0), comm=comm)
    step_fn = fs.Scheduler(comm)(train_step)  # gathers ahead, and reduces beside compute
    say = print if comm.rank == 0 else lambda *_: None
    say(layout)
    for step in range(100):
        batch = {name: x.to(comm.device) for name, x in make_batch(step, comm.rank).items()}
        state, metrics = step_fn(state, batch)
        if step % 20 == 0 or step == 99:
            say(f"step {step:3d}  loss {metrics.loss:.3f}")
    say(f"parameters on rank 0: {fs.inspect.tree_nbytes(state.params):,} bytes")
    fs.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:2])
