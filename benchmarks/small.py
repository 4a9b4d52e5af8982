"""Models of many small units, where a collective takes longer to begin than to send: against DDP, which has buckets."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fsharp as fs
from benchmarks import contenders as c, gpt
from benchmarks.options import Options
from benchmarks.steps import race, shape_of

WIDTHS = {"narrow": (160, 5), "tiny": (52, 4)}
"""Width and heads: blocks of 308 and of 33 thousand parameters."""


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``small``: for each width what the part ``steps`` has for its shape."""
    result = {}
    for name, (dim, heads) in WIDTHS.items():
        shape = replace(shape_of(options), dim=dim, heads=heads, layers=options.small_layers)
        found: list[c.Contender] = [c.ddp(shape), c.sharded("fsharp zero3", shape, comm, fs.zero3("dp"))]
        block = sum(p.numel() for p in gpt.Block(shape).parameters())
        result[name] = race(found, shape, options, lambda text, n=name: say(f"{n}, {text}")) | {"block_params": block}
    return result
