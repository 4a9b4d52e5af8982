"""A step that optax updates, against the same step by fsharp's own kernel: zero3, one scheduler each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import optax
import torch.distributed as dist

import fsharp as fs
from benchmarks import contenders as c
from benchmarks import gpt
from benchmarks.alternating import Trained
from benchmarks.options import Options
from benchmarks.steps import compare_losses, interleaved, over_ranks, shape_of

OWN, OPTAX = "fsharp's adamw", "optax's adamw"


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``optax``."""
    shape = shape_of(options)
    b1, b2 = c.ADAMW["betas"]
    theirs = optax.adamw(c.ADAMW["lr"], b1, b2, c.ADAMW["eps"], weight_decay=c.ADAMW["weight_decay"])
    models = {OWN: Trained(shape, comm, c.adamw()), OPTAX: Trained(shape, comm, fs.optim.from_optax(theirs))}
    loss_fn = partial(gpt.loss, heads=shape.heads)
    rounds, losses = interleaved(
        {name: model.step(fs.Scheduler(comm), loss_fn) for name, model in models.items()},
        gpt.batches(shape, comm.rank),
        rounds=options.rounds,
        block=options.steps,
        warmup=options.warmup,
        settle={name: model.settle for name, model in models.items()},
        barrier=dist.barrier,
        say=say,
    )
    compare_losses({name: [float(loss) for loss in each] for name, each in losses.items()})
    return {"rounds": over_ranks(rounds)[1]}
