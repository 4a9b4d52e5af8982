"""Training with one format of parameters and gradients: what a step sends, and the loss that is reached.

This file imports little, as each rank of each run imports it again.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

import fsharp as fs
from examples.gpt import data, model
from examples.gpt.evaluate import bits_per_byte

HEADS = 4


class Codec(NamedTuple):
    """What travels how."""

    strategy: str
    precision: fs.Precision


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model, and how long it is trained."""

    steps: int = 200
    """Updates of a run."""
    dim: int = 64
    """Width of the model."""
    layers: int = 4
    """Number of blocks."""
    batch: int = 8
    """Windows of all ranks in a step."""
    context: int = 128
    """Bytes in a window."""
    eval_bytes: int = 1 << 16
    """Held-out bytes that the loss is measured on."""


def train(comm: fs.Comm, codec: Codec, seed: int, options: Training, until: int | None = None) -> dict[str, Any]:
    """Train one model. ``seed`` decides initial values and batches.

    Return ``bytes`` that the last step sends for one element of a parameter, over ``(n - 1) / n``; ``losses`` of all steps; and
    ``held_out``, the loss of held-out files in bits per byte, unless the run ends before, after ``until`` steps.
    """
    torch.set_num_threads(1)
    corpus, counting, rank, n = data.load(), fs.collectives.CountingComm(comm), comm.rank, comm.mesh.size
    shapes, strategy = model.shapes(options.dim, options.layers), getattr(fs, codec.strategy)("dp")
    layout = fs.plan(shapes, comm.mesh, strategy, units="layers.*", precision=codec.precision)
    rate = fs.optim.warmup_cosine_decay_schedule(1e-4, 3e-3, options.steps // 10, options.steps, end_value=3e-4)
    tx = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(rate, b2=0.99))
    params = fs.init_params(model.initializers(options.dim, options.layers), layout, comm, key=seed)
    state = fs.init_state(tx, params, comm=comm)
    loss_fn = partial(model.loss, heads=HEADS)
    step = fs.Scheduler(counting)(fs.train_step(loss_fn, tx, donate=True))
    losses = []
    for i in range(until or options.steps):
        counting.calls.clear()
        starts = data.random_starts(corpus.train, options.batch, options.context, seed=seed, step=i)
        state, metrics = step(state, data.windows(corpus.train, starts.chunk(n)[rank], options.context))
        losses.append(float(metrics.loss))
    sent = Counter({call: count for call, count in counting.calls.items() if call.op != "all_reduce"})  # those are of the loss
    elements = sum(group.used for unit in layout.units for group in unit.groups)
    found = {"bytes": sum(call.nbytes * count for call, count in sent.items()) * n / (n - 1) / elements, "losses": losses}
    if until is None:
        held_out = data.even_starts(corpus.held_out, options.eval_bytes, options.context)
        shared = {"context": options.context, "batch": 32, "comm": comm}
        found["held_out"] = bits_per_byte(loss_fn, state.params, corpus.held_out, held_out, **shared)
    return found
