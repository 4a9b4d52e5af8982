"""Optimizers of torch.optim that were made before a module was sharded: what they have is its parameters no more."""

import weakref
from collections.abc import Iterable
from functools import cache

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fsharp.errors import TreeError

_replaced = WeakTensorKeyDictionary()
"""Parameters that somebody still has."""


def refuse_stale_optimizers(old: Iterable["weakref.ref[nn.Parameter]"]) -> None:
    """Have optimizers that have any of these parameters refuse to step.

    Cost: nothing if nobody has them any more, else a look at the parameters of every optimizer of torch with each step.
    """
    for reference in old:
        if (parameter := reference()) is not None:
            _replaced[parameter] = None
            _watch_all()


@cache
def _watch_all() -> None:
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if not _replaced or not any(p in _replaced for group in optimizer.param_groups for p in group["params"]):
        return
    name = type(optimizer).__name__
    raise TreeError(
        f"step(): this {name} was made before shard_module(), which has put other parameters in the place of those that it "
        f"has: it would train nothing. Make it afterwards: fs.ShardedOptimizer(model.parameters(), {name}, ...)."
    )
