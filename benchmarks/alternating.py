"""Two programs in turns on one scheduler, against the two run each for itself, on a scheduler and a state of its own.

``two models``: a step of one model, then one of another, as when a generator and a discriminator are trained. ``two losses``:
one function of one state that computes another loss every second time, with an additional use of the head.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fsharp as fs
from benchmarks import contenders as c, gpt
from benchmarks.options import Options
from benchmarks.steps import interleaved, over_ranks, shape_of

TOGETHER, FIRST, SECOND = "in turns", "the first alone", "the second alone"


class Trained:
    """A model under zero3 that steps of one or more programs train in turns."""

    def __init__(self, shape: gpt.Shape, comm: fs.Comm) -> None:
        params = gpt.tree_of(gpt.build(shape))
        layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="layers.*")
        self.tx = c.adamw()
        self.state = fs.init_state(self.tx, fs.shard(params, layout, comm, place="optim"), comm=comm, donate=True)

    def step(self, scheduler: fs.Scheduler, loss_fn: Any) -> Callable[[c.Batch], torch.Tensor]:
        """A step that this scheduler runs."""
        scheduled = scheduler(fs.train_step(loss_fn, self.tx, donate=True))

        def run(batch: Any) -> torch.Tensor:
            self.state, metrics = scheduled(self.state, batch)
            return metrics.loss

        return run

    def settle(self) -> None:
        for node in fs.layouts.units_of(self.state.params):
            _ = node.buffers


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


def two_models(shape: gpt.Shape, comm: fs.Comm) -> tuple[dict[str, Any], dict[str, list[Trained]]]:
    """Steps by name, each of a pair, and the models that they train."""
    loss_fn = partial(gpt.loss, heads=shape.heads)
    shapes = shape, replace(shape, layers=max(shape.layers // 2, 1))
    models = [Trained(each, comm) for each in (*shapes, *shapes)]
    one = fs.Scheduler(comm)
    first, second = (model.step(one, loss_fn) for model in models[:2])
    alone = [model.step(fs.Scheduler(comm), loss_fn) for model in models[2:]]
    return _pairs(first, second, alone), {TOGETHER: models[:2], FIRST: models[2:3], SECOND: models[3:]}


def two_losses(shape: gpt.Shape, comm: fs.Comm) -> tuple[dict[str, Any], dict[str, list[Trained]]]:
    """As :func:`two_models`, of one model and two losses."""
    losses = [partial(fn, heads=shape.heads) for fn in (gpt.loss, supervised)]
    both, *others = (Trained(shape, comm) for _ in range(3))
    which = 0

    def in_turns(params: Any, batch: Any, comm: fs.Comm) -> torch.Tensor:
        return losses[which](params, batch, comm)

    step = both.step(fs.Scheduler(comm), in_turns)

    def choose(i: int, batch: c.Batch) -> torch.Tensor:
        nonlocal which
        which = i
        return step(batch)

    alone = [model.step(fs.Scheduler(comm), loss) for model, loss in zip(others, losses, strict=True)]
    pairs = _pairs(partial(choose, 0), partial(choose, 1), alone)
    return pairs, {TOGETHER: [both], FIRST: others[:1], SECOND: others[1:]}


def _pairs(first: Any, second: Any, alone: list[Any]) -> dict[str, Any]:
    def in_turns(batch: c.Batch) -> torch.Tensor:
        first(batch)
        return second(batch)

    return {TOGETHER: in_turns, FIRST: alone[0], SECOND: alone[1]}


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``alternating``."""
    shape = replace(shape_of(options), batch=max(options.batch // 2, 1))
    result = {}
    for name, build in {"two models": two_models, "two losses": two_losses}.items():
        steps, models = build(shape, comm)

        def settle(trained: list[Trained]) -> None:
            for model in trained:
                model.settle()

        rounds, _ = interleaved(
            steps,
            gpt.batches(shape, comm.rank),
            rounds=options.rounds,
            block=options.steps,
            warmup=options.warmup,
            settle={key: partial(settle, trained) for key, trained in models.items()},
            barrier=dist.barrier,
            say=lambda text, n=name: say(f"{n}, {text}"),
        )
        result[name] = {"rounds": over_ranks(rounds)[1]}
    return result
