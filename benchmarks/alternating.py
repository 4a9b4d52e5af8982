"""Two programs in turns on one scheduler, against the two run each for itself, on a scheduler and a state of its own.

``two models``: a step of one model, then one of another, as when a generator and a discriminator are trained. ``two losses``:
one function of one state that computes another loss every second time, with an additional use of the head.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

import fsharp as fs
from benchmarks import contenders as c, gpt
from benchmarks.options import Options
from benchmarks.steps import in_turns, over_ranks, shape_of

TOGETHER, FIRST, SECOND = "in turns", "the first alone", "the second alone"


def contender(shape: gpt.Shape, loss_fn: Any, comm: fs.Comm, scheduler: fs.Scheduler | None = None) -> c.FsharpContender:
    """A model under zero3, on a scheduler of its own unless one is given."""
    params, strategy, policy = gpt.tree_of(gpt.build(shape)), fs.zero3("dp"), fs.SchedulePolicy()
    return c.FsharpContender("", params, loss_fn, comm, strategy, policy=policy, scheduler=scheduler)


def supervised(params: Any, batch: Any, comm: fs.Comm, *, heads: int) -> torch.Tensor:
    """The loss of the last block and of the one in the middle: the head is used twice."""
    one_block = partial(gpt.block, heads=heads)
    x = fs.forward(gpt.embed, params["embed"], batch["inputs"], comm=comm)
    half = len(params["layers"]) // 2
    for layer in params["layers"][:half]:
        x = fs.forward(one_block, layer, x, comm=comm)
    early = fs.forward(gpt.head, params["head"], x, batch["targets"], comm=comm)
    for layer in params["layers"][half:]:
        x = fs.forward(one_block, layer, x, comm=comm)
    return early + fs.forward(gpt.head, params["head"], x, batch["targets"], comm=comm)


class InTurns(NamedTuple):
    """A contender whose step is a step of each of two programs, which train ``models``."""

    first: Callable[[c.Batch], torch.Tensor]
    second: Callable[[c.Batch], torch.Tensor]
    models: Sequence[c.FsharpContender]

    def step(self, batch: c.Batch) -> torch.Tensor:
        self.first(batch)
        return self.second(batch)

    def settle(self) -> None:
        for model in self.models:
            model.settle()


def two_models(shape: gpt.Shape, comm: fs.Comm) -> dict[str, Any]:
    """Contenders by name: both programs in turns, and each alone."""
    loss_fn, one = partial(gpt.loss, heads=shape.heads), fs.Scheduler(comm)
    shapes = shape, replace(shape, layers=max(shape.layers // 2, 1))
    both = [contender(each, loss_fn, comm, one) for each in shapes]
    first, second = (contender(each, loss_fn, comm) for each in shapes)
    return {TOGETHER: InTurns(both[0].step, both[1].step, both), FIRST: first, SECOND: second}


def two_losses(shape: gpt.Shape, comm: fs.Comm) -> dict[str, Any]:
    """As :func:`two_models`, of one model and two losses."""
    losses = [partial(fn, heads=shape.heads) for fn in (gpt.loss, supervised)]
    which = 0

    def chosen_loss(params: Any, batch: Any, comm: fs.Comm) -> torch.Tensor:
        return losses[which](params, batch, comm)

    both = contender(shape, chosen_loss, comm)
    first, second = (contender(shape, loss_fn, comm) for loss_fn in losses)

    def choose(i: int, batch: c.Batch) -> torch.Tensor:
        nonlocal which
        which = i
        return both.step(batch)

    return {TOGETHER: InTurns(partial(choose, 0), partial(choose, 1), [both]), FIRST: first, SECOND: second}


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``alternating``."""
    shape = replace(shape_of(options), batch=max(options.batch // 2, 1))
    result = {}
    for name, build in {"two models": two_models, "two losses": two_losses}.items():
        rounds, _ = in_turns(build(shape, comm), shape, options, lambda text, n=name: say(f"{n}, {text}"))
        result[name] = {"rounds": over_ranks(rounds)[1]}
    return result
