"""Optimizers of torch.optim that were made before a module was sharded: what they have is its parameters no more."""

import gc
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from fsharp.functional.errors import TreeError


def refuse_stale_optimizers(old: Iterable["weakref.ref[nn.Parameter]"]) -> None:
    """Have optimizers that have any of these parameters refuse to step.

    Cost: nothing if nobody has them any more, else a pass over all Python objects.
    """
    held = {id(parameter) for parameter in (reference() for reference in old) if parameter is not None}
    if not held:
        return
    for each in gc.get_objects():
        if not issubclass(type(each), torch.optim.Optimizer):  # one that another thread is about to make has no groups yet
            continue
        if any(id(p) in held for group in getattr(each, "param_groups", ()) for p in group["params"]):
            each.register_step_pre_hook(_refuse)


def _refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
    name = type(optimizer).__name__
    raise TreeError(
        f"step(): this {name} was made before ShardedModule(), which has put other parameters in the place of those that it "
        f"has: it would train nothing. Make it afterwards: fs.ShardedOptimizer(model.parameters(), {name}, ...)."
    )
