"""A step that optax updates, against the same step by fsharp's own kernel: zero3, one scheduler each."""

from collections.abc import Callable
from typing import Any

import optax

import fsharp as fs
from benchmarks import contenders as c
from benchmarks.options import Options
from benchmarks.steps import compare_losses, in_turns, over_ranks, shape_of

OWN, OPTAX = "fsharp's adamw", "optax's adamw"


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``optax``."""
    shape = shape_of(options)
    b1, b2 = c.ADAMW["betas"]
    theirs = optax.adamw(c.ADAMW["lr"], b1, b2, c.ADAMW["eps"], weight_decay=c.ADAMW["weight_decay"])
    found = {
        name: c.sharded(name, shape, comm, fs.zero3("dp"), tx=tx)
        for name, tx in {OWN: c.adamw(), OPTAX: fs.optim.from_optax(theirs)}.items()
    }
    rounds, losses = in_turns(found, shape, options, say)
    compare_losses({name: [float(loss) for loss in each] for name, each in losses.items()})
    return {"rounds": over_ranks(rounds)[1]}
