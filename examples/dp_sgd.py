"""DP-SGD under ZeRO-3: clip the gradient of each sample, add noise once, on shards.

python examples/dp_sgd.py                                               two processes
torchrun --nproc-per-node 4 examples/dp_sgd.py --strategy hfsdp         2 x 2

Two passes: the first takes the norms of the samples' gradients, and keeps no gradient. The second takes an ordinary gradient,
that of a weighted sum of losses. The weights are such that no sample's gradient is longer than ``clip``.

How much privacy a run has spent, epsilon and delta for ``noise``, ``rate`` and ``steps``, is left to an accountant: Opacus or
dp-accounting. For privacy, draw the key with ``secrets``, and pass the same key to all ranks. Anyone who knows the key can
subtract the noise, and knows which samples are in each step. Torch's generators are not made for cryptography: the CPU's takes
32 bits of a key, which can be tried out. Against such an attack take the noise from another source.

It prints the largest difference between the parameters of both runs, which is rounding only, about 1e-7.
"""

import os
from dataclasses import dataclass
from typing import Literal

import launch_example
import optree
import torch
import torch.nn.functional as F

import fsharp as fs

SAMPLES, DIM, CLASSES, LAYERS = 1024, 32, 8, 2


@dataclass
class Options:
    """Train a classifier by DP-SGD, sharded and unsharded."""

    steps: int = 30
    """Steps of the optimizer."""
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"] = "zero3"
    """Where state rests. The hybrids arrange the processes as outer=2 x inner=nproc/2."""
    rate: float = 1 / 8
    """Probability that a sample is in a step."""
    clip: float = 1.0
    """Largest norm of the gradient of a sample."""
    noise: float = 1.0
    """Standard deviation of the noise, in multiples of ``clip``."""
    lr: float = 0.5
    """Step size."""
    key: int = 0
    """Seed of parameters, noise and samples."""
    dtype: Literal["float32", "float64"] = "float32"
    """In float64 it is easy to see that sharded and unsharded runs differ by rounding alone."""

    def __post_init__(self):
        if not (0 < self.rate <= 1 and self.clip > 0 and self.noise >= 0):
            got = f"--rate {self.rate}, --clip {self.clip} and --noise {self.noise}"
            raise SystemExit(f"error: got {got}, expected a rate above 0 and at most 1, clip above 0, and noise of at least 0")


def shapes():
    with torch.device("meta"):
        layers = [{"w": torch.empty(DIM, DIM), "b": torch.empty(DIM)} for _ in range(LAYERS)]
        return {"layers": layers, "head": {"w": torch.empty(DIM, CLASSES), "b": torch.empty(CLASSES)}}


def layer(p, x):
    return x + torch.tanh(x @ p["w"] + p["b"])


def head(p, x):
    return x @ p["w"] + p["b"]


def logits(forward, params, x):
    for each in params["layers"]:
        x = forward(layer, each, x)
    return forward(head, params["head"], x)


def loss_fn(params, batch, comm):
    """Return the weighted sum of the losses of samples; without weights, the sum."""

    def forward(fn, unit, x):
        return fs.forward(fn, unit, x, comm=comm)

    losses = F.cross_entropy(logits(forward, params, batch["x"]), batch["y"], reduction="none")
    return (losses * batch["weight"]).sum() if "weight" in batch else losses.sum()


def noisy(sums, options, layout, comm, step):
    """Return the mean gradient of a step with noise. Noise depends on key, step and path, and not on the mesh."""
    key = fs.resilience.fold_in(options.key, step, 0)
    normal = fs.init.normal(options.noise * options.clip)
    noise = fs.trainable(fs.init_params(normal, layout, comm, key=key, place="optim"))
    return optree.tree_map(lambda g, n: (g + n) / (SAMPLES * options.rate), sums, noise)


def train_step(state, batch, comm, tx, layout, options):
    norms = fs.per_sample_norms(loss_fn, chunk_size=32)(state.params, batch, comm=comm)
    weight = (options.clip / norms).clamp(max=1)
    loss, grads = fs.value_and_grad(loss_fn)(state.params, {**batch, "weight": weight}, comm=comm)
    sums = fs.reduce_scatter(grads, comm=comm)  # over the samples of all ranks
    return fs.update(tx, noisy(sums, options, layout, comm, state.step), state, comm=comm), loss


def data():
    """Return samples around one center for each class."""
    g = torch.Generator().manual_seed(1)
    y = torch.randint(CLASSES, (SAMPLES,), generator=g)
    return {"x": torch.randn(CLASSES, DIM, generator=g)[y] + 2 * torch.randn(SAMPLES, DIM, generator=g), "y": y}


def drawn(step, options):
    """Return the samples of a step. Each sample is drawn independently: Poisson sampling, as accountants assume."""
    g = torch.Generator().manual_seed(fs.resilience.fold_in(options.key, step, 1))
    return (torch.rand(SAMPLES, generator=g) < options.rate).nonzero().flatten()


def main(options):
    torch.set_default_dtype(getattr(torch, options.dtype))
    size = int(os.environ["WORLD_SIZE"])
    mesh = fs.Mesh({"outer": 2, "inner": size // 2} if options.strategy in ("hsdp", "hfsdp") else {"dp": size})
    comm = fs.connect(mesh)
    layout = fs.plan(shapes(), mesh, getattr(fs, options.strategy)(*mesh.names), units="layers.*")
    tx = fs.optim.sgd(options.lr, momentum=0.5)
    params = fs.init_params(fs.init.normal(DIM**-0.5), layout, comm, key=options.key)
    state = fs.init_state(tx, params, comm=comm)

    samples = {name: x.to(comm.device) for name, x in data().items()}
    for step in range(options.steps):
        indices = drawn(step, options)
        own = indices[indices % size == comm.rank]  # as many as there are, perhaps none
        batch = {name: x[own] for name, x in samples.items()}
        state, _ = train_step(state, batch, comm, tx, layout, options)
    found = fs.full_tree(state.params, comm=comm)
    if comm.rank == 0:
        expected = unsharded(samples, options)
        apart = optree.tree_map(lambda a, b: (a - b).abs().max(), found, expected)
        print(f"largest difference between parameters after {options.steps} steps: {max(optree.tree_leaves(apart)):.1e}")
        print(f"accuracy {accuracy(found, samples):.4f}  unsharded {accuracy(expected, samples):.4f}")


def unsharded(samples, options):
    """Train in plain torch, sample by sample."""
    comm = fs.SingleComm(device=samples["x"].device)
    layout = fs.plan(shapes(), comm.mesh, fs.ddp("dp"))
    params = fs.full_tree(fs.init_params(fs.init.normal(DIM**-0.5), layout, comm, key=options.key), comm=comm)
    leaves, spec = optree.tree_flatten(params)
    optimizer = torch.optim.SGD(leaves, lr=options.lr, momentum=0.5)
    clipped = []
    for step in range(options.steps):
        sums = [torch.zeros_like(x) for x in leaves]
        indices = drawn(step, options)
        for i in indices:
            live = [x.requires_grad_() for x in leaves]
            out = logits(lambda fn, p, x: fn(p, x), optree.tree_unflatten(spec, live), samples["x"][i, None])
            grads = torch.autograd.grad(F.cross_entropy(out, samples["y"][i, None]), live)
            norm = torch.cat([g.flatten() for g in grads]).norm()
            clipped.append(norm > options.clip)
            for total, g in zip(sums, grads):
                total += g * (options.clip / norm).clamp(max=1)
        sharded = fs.shard(optree.tree_unflatten(spec, sums), layout, comm)
        for x, g in zip(leaves, optree.tree_leaves(fs.full_tree(noisy(sharded, options, layout, comm, step), comm=comm))):
            x.grad = g
        optimizer.step()
    print(f"{len(clipped)} samples in {options.steps} steps; {sum(clipped) / max(1, len(clipped)):.0%} of them were clipped")
    return optree.tree_unflatten(spec, [x.detach() for x in leaves])


@torch.no_grad()
def accuracy(params, samples):
    out = logits(lambda fn, p, x: fn(p, x), params, samples["x"])
    return (out.argmax(1) == samples["y"]).double().mean()


if __name__ == "__main__":
    launch_example.main(main, Options)
