"""What a library adds on the host: many tiny blocks in one process, against the same model without the library.

At one rank nothing is sent, by nobody: FSDP2 copies each parameter where it would gather, and each gradient where it would
reduce. ``fsharp`` would skip all of that along an axis of size 1; ``DebugPolicy(trivial_axes=True)`` makes it copy too.
What is timed is a whole training step, fused AdamW included, and once more forward, backward and reduction without the
optimizer.
"""

from collections.abc import Callable
from typing import Any

import fsharp as fs
from benchmarks import contenders as c, gpt
from benchmarks.options import Options
from benchmarks.steps import compare_losses, interleaved
from fsharp.testing import DebugPolicy

BASE = {
    "FSDP2": "module",
    "fsharp zero3": "functions",
    "fsharp zero3, axis skipped": "functions",
    "fsharp zero3, blocking": "functions",
}
"""What each is held against: a module costs some host time of its own, which pure functions do not."""


def everyone(shape: gpt.Shape, comm: fs.Comm) -> list[c.Contender]:
    """All contenders, two of them without a library."""
    zero3 = fs.zero3("dp")
    return [
        c.ModuleContender("module", gpt.build(shape)),
        c.FunctionContender("functions", shape),
        c.fsdp2(shape),
        c.sharded("fsharp zero3", shape, comm, zero3, DebugPolicy(trivial_axes=True)),
        c.sharded("fsharp zero3, axis skipped", shape, comm, zero3),
        c.sharded("fsharp zero3, blocking", shape, comm, zero3, None),
    ]


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``host``."""
    shape = gpt.Shape(vocab=32, dim=16, layers=options.host_layers, heads=2, time=8, batch=1)
    found = everyone(shape, comm)
    batches = gpt.batches(shape, 0)
    settle = {each.name: each.settle for each in found}

    def turns(steps: dict[str, Any]) -> Any:
        return interleaved(steps, batches, rounds=options.host_rounds, block=3, warmup=4, settle=settle, say=say)

    rounds, losses = turns({each.name: each.step for each in found})
    difference = compare_losses({name: [float(x) for x in values] for name, values in losses.items()})
    without, _ = turns({each.name: each.gradients for each in found})
    return {
        "units": shape.layers,
        "base": BASE,
        "step": {"rounds": rounds, "added": added(rounds, shape.layers)},
        "without_optimizer": {"rounds": without, "added": added(without, shape.layers)},
        "largest_relative_difference_of_losses": difference,
    }


def added(rounds: list[dict[str, float]], units: int) -> list[dict[str, float]]:
    """For each round, seconds a unit that each library adds to what it is held against."""
    return [{name: (row[name] - row[base]) / units for name, base in BASE.items()} for row in rounds]
