"""What is trained and how: the layout, the optimizer, the step, the batches."""

from collections.abc import Callable
from typing import Any

import torch

import fsharp as fs
from examples.gpt import data, model
from examples.gpt.options import Options


def layout_of(options: Options, mesh: fs.Mesh, strategy: fs.Strategy) -> fs.Layout:
    """Where the state rests: every block is a unit, and so are what comes before and after the blocks."""
    return fs.plan(
        model.shapes(options.dim, options.layers),
        mesh,
        strategy,
        units="layers.*",
        precision=fs.Precision(compute=getattr(torch, options.dtype), main=torch.float32),
    )


def learning_rate(options: Options, total: int) -> Callable[[int], float]:
    """Learning rate by updates made. Up to the end of the warm-up it does not depend on ``total``."""
    total = max(total, options.warmup + 1)  # a run may end within its warm-up
    first = options.lr / max(1, options.warmup)
    return fs.optim.warmup_cosine_decay_schedule(first, options.lr, options.warmup, total, end_value=options.lr / 10)


def optimizer(options: Options, total: int) -> fs.optim.Transform:
    """Clipping, then AdamW."""
    decay = model.weight_decay(options.weight_decay)
    return fs.optim.chain(
        fs.optim.clip_by_global_norm(options.clip, deterministic=options.exact_clip),
        fs.optim.adamw(learning_rate(options, total), b2=0.99, weight_decay=decay),
    )


def build_step(options: Options, loss_fn: Callable[..., Any], total: int) -> Callable[..., Any]:
    """A training step whose learning rate ends at ``total``. It leaves out updates that are not finite, and says so."""
    tx = optimizer(options, total)

    def step(state: fs.TrainState, batch: Any, comm: fs.Comm) -> tuple[fs.TrainState, fs.Metrics, Any]:
        loss, grads = fs.value_and_grad(loss_fn, microbatches=options.microbatches)(state.params, batch, comm=comm)
        grads = fs.reduce_scatter(grads, comm=comm)
        bad = fs.resilience.find_nonfinite(loss, grads, comm=comm)
        metrics, grads = fs.average(loss, grads, comm=comm)
        if bad is None:
            state = fs.update(tx, grads, state, comm=comm, donate=True)
        return state, metrics, bad

    return step


def batch_of(corpus: data.Corpus, options: Options, step: int, comm: fs.Comm) -> dict[str, torch.Tensor]:
    """This rank's share of a step's batch."""
    starts = data.random_starts(corpus.train, options.batch, options.context, seed=options.seed, step=step)
    mine = data.windows(corpus.train, starts.chunk(comm.mesh.size)[comm.rank], options.context)
    return {name: x.to(comm.device) for name, x in mine.items()}


def predicted_bytes(layout: fs.Layout) -> int:
    """Bytes at rest on a rank: parameters, main copies, and the two buffers that AdamW keeps."""
    return sum(map(layout.nbytes, ("params", "main", "optim", "optim")))
