"""Bits per byte on held-out files: of the model, over all ranks, and of a bigram model to compare it with."""

import math
from collections.abc import Callable
from typing import Any

import torch

import fsharp as fs
from examples.gpt.data import windows
from examples.gpt.model import IGNORE, VOCAB


def bits_per_byte(
    loss_fn: Callable[..., Any],
    params: Any,
    stream: torch.Tensor,
    starts: torch.Tensor,
    *,
    context: int,
    batch: int,
    comm: fs.Comm,
) -> float:
    """Mean cross-entropy over the windows at ``starts``, in bits; the same on every rank.

    Ranks take turns with windows and make equally many calls, so that gathers meet; what is too many does not count.
    """
    size = comm.mesh.size
    mine = torch.arange(comm.rank, -(-len(starts) // size) * size, size)
    total = fs.Loss(*torch.zeros(2, dtype=torch.float64, device=comm.device))
    with torch.no_grad():
        for part in mine.split(batch):
            data = windows(stream, starts[part.clamp(max=len(starts) - 1)], context)
            data["targets"][part >= len(starts)] = IGNORE
            loss, weight = loss_fn(params, {name: x.to(comm.device) for name, x in data.items()}, comm)
            total = fs.Loss(total.sum + loss, total.weight + weight)
    metrics, _ = fs.average(total, comm=comm)  # over the windows of all ranks
    return float(metrics.loss) / math.log(2)


def bigram_bits_per_byte(train: torch.Tensor, held_out: torch.Tensor, starts: torch.Tensor, *, context: int) -> float:
    """A table of which byte follows which, counted on the training bytes, on the windows that the model is scored on.

    ``p(b | a) = (count(a, b) + p(b)) / (count(a) + 1)``: a byte that never followed falls back on how common it is.
    """
    pairs = train[:-1].int() * VOCAB + train[1:]
    counts = torch.bincount(pairs, minlength=VOCAB * VOCAB).view(VOCAB, VOCAB).double()
    common = (counts.sum(0) + 1) / (counts.sum() + VOCAB)
    bits = -torch.log2((counts + common) / (counts.sum(1, keepdim=True) + 1))
    data = windows(held_out, starts, context)
    return float(bits[data["inputs"], data["targets"]].mean())
