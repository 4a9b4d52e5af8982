"""Training steps timed in turns: all contenders live in the same processes, and each round steps all of them."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

import fsharp as fs
from benchmarks import contenders as c, gpt
from benchmarks.options import Options
from benchmarks.stats import turn

Step = Callable[[c.Batch], torch.Tensor]
FIRST = 4
"""Steps after which rounding has not yet grown: Adam divides by the root of the second moment, which starts at zero."""
TIGHT, LOOSE = 2e-5, 2e-2
"""Largest relative difference of losses: over the first steps, and to the end."""


class LossMismatch(Exception):
    """Contenders that do not compute the same."""


def everyone(options: Options, shape: gpt.Shape, comm: fs.Comm) -> list[c.Contender]:
    """All contenders, in the order of the table."""
    result: list[c.Contender] = [
        c.ModuleContender("no communication", gpt.build(shape), synced=False),
        c.ddp(shape),
        c.fsdp2(shape),
        c.fsdp2(shape, name="FSDP2, asynchronous", eager=True),
        c.fsdp2(shape, name="FSDP2, asynchronous, own group", eager=True, reduce_buffers=3),
        c.sharded("fsharp ddp", shape, comm, fs.ddp("dp")),
        c.sharded("fsharp zero1", shape, comm, fs.zero1("dp")),
        c.sharded("fsharp zero2", shape, comm, fs.zero2("dp")),
        c.sharded("fsharp zero3", shape, comm, fs.zero3("dp")),
        c.sharded("fsharp zero3, blocking", shape, comm, fs.zero3("dp"), None),
        c.wrapped("fsharp zero3, module", shape, comm, fs.zero3("dp")),
    ]
    if options.peers == "all":
        from benchmarks.zero import ZeroContender

        result += [ZeroContender(shape, stage) for stage in (1, 2, 3)]
    return result


def interleaved(
    steps: Mapping[str, Step],
    batches: Sequence[c.Batch],
    *,
    rounds: int,
    block: int,
    warmup: int,
    settle: Mapping[str, Callable[[], None]] | None = None,
    barrier: Callable[[], Any] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, float]], dict[str, list[torch.Tensor]]]:
    """Time blocks of steps of each contender in turn, A B C, then in another order.

    Args:
        steps: by name, what makes a step.
        batches: taken one after the other, by each contender.
        rounds: turns of each.
        block: steps in a turn, over which time is averaged.
        warmup: steps of each before.
        settle: by name, what waits for whatever a step has left under way; its time counts.
        barrier: ranks meet before each block.
        say: is told how far this is.

    Returns:
        For each round, seconds a step by name; and every loss that each has had, in order.
    """
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in steps}

    def run(name: str, count: int) -> float:
        wait = (settle or {}).get(name, lambda: None)
        mine = losses[name]
        todo = [batches[(len(mine) + i) % len(batches)] for i in range(count)]
        step = steps[name]
        gc.collect()  # nobody pays for the garbage of the one before
        barrier()
        began = time.perf_counter()
        found = [step(batch) for batch in todo]
        wait()
        seconds = time.perf_counter() - began
        mine += found
        return seconds / count

    gc.collect()
    gc.freeze()  # what is alive now stays: no need to look at it each time
    try:
        for name in steps:
            run(name, warmup)
        result = []
        for i in range(rounds):
            row = {name: run(name, block) for name in turn(list(steps), i)}
            result.append({name: row[name] for name in steps})
            if (i + 1) % max(1, rounds // 6) == 0:
                say(f"round {i + 1}/{rounds}")
    finally:
        gc.unfreeze()
    return result, losses


def in_turns(
    found: Mapping[str, c.Contender], shape: gpt.Shape, options: Any, say: Callable[[str], None]
) -> tuple[list[dict[str, float]], dict[str, list[torch.Tensor]]]:
    """Time contenders of one shape as :func:`interleaved` does; ``options`` has ``rounds``, ``steps`` and ``warmup``."""
    return interleaved(
        {name: each.step for name, each in found.items()},
        gpt.batches(shape, dist.get_rank()),
        rounds=options.rounds,
        block=options.steps,
        warmup=options.warmup,
        settle={name: each.settle for name, each in found.items()},
        barrier=dist.barrier,
        say=say,
    )


def compare_losses(losses: Mapping[str, Sequence[float]], *, alone: Sequence[str] = ()) -> dict[str, float]:
    """Return the largest relative difference of losses to those of the first, over the first steps, and over all.

    ``losses``: means over ranks, by name. ``alone``: those whose ranks do not train together, and so agree before the first
    update only. Raises LossMismatch, which names everybody who is off: rounding may differ, results not.
    """
    reference, *others = [name for name in losses if name not in alone]
    expected = losses[reference]
    early = {name: _worst(losses[name][:FIRST], expected) for name in others}
    early |= {name: _worst(losses[name][:1], expected) for name in alone}
    late = {name: _worst(losses[name], expected) for name in others}
    off = [f"{name}: {x:.1e} over the first {FIRST} steps" for name, x in early.items() if not x <= TIGHT]
    off += [f"{name}: {x:.1e} over all steps" for name, x in late.items() if not x <= LOOSE]
    if off:
        raise LossMismatch(f"losses differ from those of {reference} (allowed: {TIGHT:g}, later {LOOSE:g}):\n" + "\n".join(off))
    return {"first_steps": max(early.values(), default=0.0), "all_steps": max(late.values(), default=0.0)}


def _worst(mine: Sequence[float], expected: Sequence[float]) -> float:
    differences = [abs(a - b) / abs(b) for a, b in zip(mine, expected)]
    return max(differences) if all(x == x for x in differences) else float("nan")


def shape_of(options: Options) -> gpt.Shape:
    """The model that was asked for."""
    return gpt.Shape(**{name: getattr(options, name) for name in ("dim", "layers", "heads", "time", "batch")})


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``steps``."""
    shape = shape_of(options)
    return race(everyone(options, shape, comm), shape, options, say)


def race(found: Sequence[c.Contender], shape: gpt.Shape, options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Time contenders of one shape in turns. LossMismatch if they do not compute the same."""
    rounds, losses = in_turns({each.name: each for each in found}, shape, options, say)
    means = {each.name: _over_ranks(losses[each.name], each.is_global) for each in found}
    alone = [each.name for each in found if isinstance(each, c.ModuleContender) and not each.synced]
    difference = compare_losses(means, alone=alone)
    everyones, slowest = over_ranks(rounds)
    return {
        "num_params": sum(p.numel() for p in gpt.build(shape).parameters()),
        "rounds_by_rank": everyones,
        "rounds": slowest,
        "losses": means,
        "largest_relative_difference_of_losses": difference,
    }


def gathered(mine: Any) -> list[Any]:
    """What each rank has, in order of rank."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def over_ranks(rounds: Sequence[dict[str, float]]) -> tuple[list[Any], list[dict[str, float]]]:
    """The rounds of every rank; and of the slowest, as a round is over when the last rank is."""
    everyones = gathered(list(rounds))
    return everyones, [{name: max(rank[i][name] for rank in everyones) for name in row} for i, row in enumerate(rounds)]


def pooled(launches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part ``steps`` of several launches as one: all their rounds, the losses of the first, the largest differences."""
    key = "largest_relative_difference_of_losses"
    return {
        **launches[0],
        "rounds_by_rank": [list(chain(*ranks)) for ranks in zip(*(each["rounds_by_rank"] for each in launches), strict=True)],
        "rounds": [row for each in launches for row in each["rounds"]],
        key: {name: max(each[key][name] for each in launches) for name in launches[0][key]},
    }


def _over_ranks(losses: Sequence[torch.Tensor], is_global: bool) -> list[float]:
    values = torch.stack([x.double() for x in losses])
    if not is_global:
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values.tolist()
