"""Calls of Python functions that a unit costs in a step, on the main thread. A count, so that other load does not matter.

The same model with some and with twice as many tiny blocks makes two steps of each kind; the difference of the counts, divided
by that of the blocks, is what one unit costs. The model's own calls are counted apart, from the model without a library.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import fsharp as fs
from benchmarks import contenders as c, gpt
from benchmarks.options import Options

_WARMUP = 4  # steps until a schedule is followed and caches are full


def everyone(shape: gpt.Shape, comm: fs.Comm) -> list[c.Contender]:
    """All contenders, two of them without a library."""
    return [
        c.ModuleContender("module", gpt.build(shape), synced=False),
        c.FunctionContender("functions", shape),
        c.fsdp2(shape),
        c.sharded("fsharp zero3", shape, comm, fs.zero3("dp")),
        c.wrapped("fsharp zero3, module", shape, comm, fs.zero3("dp")),
    ]


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``calls``: for each contender, calls a unit and step, the model's own included."""
    few = gpt.Shape(vocab=32, dim=16, layers=options.calls_layers, heads=2, time=8, batch=1)
    many = replace(few, layers=2 * few.layers)
    batches = gpt.batches(few, comm.rank, _WARMUP + 1)
    counts = [{each.name: counted(each, batches) for each in everyone(shape, comm)} for shape in (few, many)]
    found = {name: (counts[1][name] - counts[0][name]) / few.layers for name in counts[0]}
    for name, number in found.items():
        say(f"{name}: {number:,.0f} calls of Python functions a unit and step")
    return {"units": [few.layers, many.layers], "calls": found}


def counted(contender: c.Contender, batches: Sequence[c.Batch]) -> int:
    """Calls of Python functions in a step of the last of these batches, on the main thread; steps of all others come before."""
    for batch in batches[:-1]:
        contender.step(batch)
    contender.settle()
    number = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call"

    sys.setprofile(count)
    try:
        contender.step(batches[-1])
        contender.settle()
    finally:
        sys.setprofile(None)
    return number
