"""Formats of parameters and gradients: bytes a step, the loss that is reached, steps over a limited network: make bench-wire.

Each codec trains the byte-level GPT of ``examples/gpt`` on the standard library's source, with the same seeds and batches,
under ZeRO-3 (parameters are gathered twice a step, unless the policy keeps them) or ZeRO-2 (updated parameters are gathered
once). Bytes are those that a rank sends in the last step, over the number of elements and ``(n - 1) / n``. Of FSDP2 the bytes
of its collectives are counted as they are dispatched, for a model of the same blocks with bfloat16 parameters and reductions.
:mod:`benchmarks.limited` times steps of a wider model over a limited network.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import optree
import torch
import tyro
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fsharp as fs
from benchmarks import gpt, limited, wire_page
from benchmarks.codecs import CODECS, EXACT, Codec
from benchmarks.report import machine
from examples.gpt import data, model
from examples.gpt.evaluate import bits_per_byte
from fsharp.testing import processes

HEADS = 4
GOOD = 1.005
"""The largest loss of a codec, of float32's, whose bytes and steps are figures of the last line."""
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with formats of parameters and gradients, and time their steps over a limited network."""

    nproc: tuple[int, ...] = (2, 4)
    """Numbers of processes to train with."""
    seeds: int = 3
    """Runs of each codec; the loss is their mean."""
    steps: tuple[int, ...] = (300, 150)
    """Updates of a run, for each number of processes."""
    dim: int = 64
    """Width of the model."""
    layers: int = 4
    """Number of blocks."""
    batch: int = 16
    """Windows of all ranks in a step."""
    context: int = 128
    """Bytes in a window."""
    eval_bytes: int = 1 << 18
    """Held-out bytes that the loss is measured on."""
    only: tuple[str, ...] = tuple(CODECS)
    """Codecs; float32's has to be one."""
    network: limited.Options = field(default_factory=limited.Options)
    """Steps over a limited network."""
    out: Path | None = ROOT / "benchmarks/results/wire.json"
    """Everything measured."""
    docs: Path | None = ROOT / "docs/benchmarks.md"
    """The page whose tables are renewed, beside whose picture; None leaves both alone."""

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.nproc) or min(self.nproc, default=0) < 2:
            raise ValueError(
                f"--steps {self.steps} and --nproc {self.nproc}: expected as many of each, and 2 processes or more."
            )
        if unknown := set(self.only) - set(CODECS):
            raise ValueError(f"--only: there is no codec {sorted(unknown)}; there are {list(CODECS)}.")
        if EXACT not in self.only:
            raise ValueError(f"--only: {EXACT!r} has to be among the codecs, as losses are compared with its.")


class _Sent(TorchDispatchMode):
    """Counts the bytes that gathers and reductions of torch's process groups send."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.nbytes = n, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, tensors = func.name(), [x for x in optree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            self.nbytes += (self.n - 1) * min(x.nbytes for x in tensors)
        return func(*args, **kwargs or {})


def fsdp2_nbytes(comm: fs.Comm, options: Options) -> float:
    """Return the bytes that FSDP2 sends in a step for one element of a parameter, over ``(n - 1) / n``."""
    n = comm.mesh.size
    module = gpt.build(gpt.Shape(dim=options.dim, layers=options.layers, heads=HEADS, time=options.context, batch=2))
    elements = sum(p.numel() for p in module.parameters())
    mesh, policy = init_device_mesh("cpu", (n,)), MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    tokens = torch.zeros(2, options.context, dtype=torch.long)
    with _Sent(n) as sent:
        module(tokens, tokens).backward()
    return sent.nbytes * n / (n - 1) / elements


def train(comm: fs.Comm, codec: Codec, seed: int, steps: int, options: Options) -> tuple[float, float]:
    """Train one model; return the held-out loss in bits per byte, and the bytes a step sends for one element of a parameter."""
    torch.set_num_threads(1)
    corpus, counting = data.load(), fs.collectives.CountingComm(comm)
    layout = fs.plan(
        model.shapes(options.dim, options.layers),
        comm.mesh,
        getattr(fs, codec.strategy)("dp"),
        units="layers.*",
        precision=codec.precision,
    )
    rate = fs.optim.warmup_cosine_decay_schedule(1e-4, 3e-3, steps // 10, steps, end_value=3e-4)
    tx = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(rate, b2=0.99))
    params = fs.init_params(model.initializers(options.dim, options.layers), layout, comm, key=seed, place="optim")
    state = fs.init_state(tx, params, comm=comm)
    loss_fn = partial(model.loss, heads=HEADS)
    step = fs.Scheduler(counting)(fs.train_step(loss_fn, tx, donate=True))
    for i in range(steps):
        if i == steps - 1:
            counting.calls.clear()
        starts = data.random_starts(corpus.train, options.batch, options.context, seed=seed, step=i)
        state, _ = step(state, data.windows(corpus.train, starts.chunk(comm.mesh.size)[comm.rank], options.context))
    sent = Counter({call: count for call, count in counting.calls.items() if call.op != "all_reduce"})  # those are of the loss
    elements = sum(group.used for unit in layout.units for group in unit.groups)
    nbytes = sum(call.nbytes * count for call, count in sent.items()) * comm.mesh.size / (comm.mesh.size - 1) / elements
    held_out = data.even_starts(corpus.held_out, options.eval_bytes, options.context)
    shared = {"context": options.context, "batch": 32, "comm": comm}
    return bits_per_byte(loss_fn, state.params, corpus.held_out, held_out, **shared), nbytes


def losses_of(nproc: int, steps: int, options: Options, console: Console) -> dict[str, Any]:
    """Train with each codec and each seed on so many processes; return bytes and losses."""
    mesh = fs.Mesh({"dp": nproc})
    fsdp2 = processes(mesh, partial(fsdp2_nbytes, options=options))[0]
    losses: dict[str, list[float]] = {name: [] for name in options.only}
    nbytes = {}
    for seed in range(options.seeds):
        for name in options.only:
            run = partial(train, codec=CODECS[name], seed=seed, steps=steps, options=options)
            loss, nbytes[name] = processes(mesh, run, timeout=600)[0]
            losses[name].append(loss)
            text = f"{nproc} processes, seed {seed}, {name}: {loss:.4f} bits per byte, {nbytes[name]:.3f} bytes an element"
            console.print(text, soft_wrap=True)
    exact = losses[EXACT]
    rows = {
        name: {
            "bytes": nbytes[name],
            "bytes_ratio": nbytes[name] / fsdp2,
            "loss": mean(found),
            "losses": found,
            "loss_ratio": mean(found) / mean(exact),
            "loss_ratios": [loss / base for loss, base in zip(found, exact, strict=True)],
        }
        for name, found in losses.items()
    }
    return {"steps": steps, "fsdp2_bytes": fsdp2, "codecs": rows}


def over_limited(options: Options, console: Console) -> dict[str, Any]:
    """Time steps over a limited network; return why not if there is none."""
    reason = "it was left out by --network.rate-mbit 0"
    if options.network.rate_mbit:
        try:
            return limited.measure(options.network, options.only)
        except limited.NoLink as error:
            reason = str(error)
    console.print(f"no steps over a limited network: {reason}", soft_wrap=True)
    return {"left_out": reason}


def figures(trained: Mapping[str, Any], network: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the last line: of codecs with a good loss on every number of processes, the fewest bytes and the fastest step."""

    def worst(name: str, what: str) -> float:
        return max(part["codecs"][name][what] for part in trained.values())

    names = list(next(iter(trained.values()))["codecs"])
    good = [name for name in names if worst(name, "loss_ratio") <= GOOD]
    best = min(good, key=lambda name: worst(name, "bytes_ratio"))
    ratios = limited.ratios(network["rounds"]) if "rounds" in network else {}
    fastest = min((ratios[name]["median"] for name in good if name in ratios), default=None)
    found = {"best_bytes_ratio": worst(best, "bytes_ratio"), "loss_ratio": worst(best, "loss_ratio")}
    return {
        **{name: round(x, 4) for name, x in found.items()},
        "limited_step_ratio_vs_fsdp2_bf16": None if fastest is None else round(fastest, 4),
    }


def main(options: Options) -> dict[str, float | None]:
    """Measure, print tables, write file, page and picture; return the figures of the last line."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=140)
    if options.docs:
        wire_page.check(options.docs)  # raises now, and not at the end
    network = over_limited(options, console)
    trained = {
        str(nproc): losses_of(nproc, steps, options, console) for nproc, steps in zip(options.nproc, options.steps, strict=True)
    }
    found = figures(trained, network)
    results = {"summary": found, **machine(options), "trained": trained, "limited": network}
    for table in wire_page.tables(results):
        console.print(wire_page.on_terminal(table))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if options.docs:
        wire_page.write(options.docs, results)
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(main(tyro.cli(Options, prog="python -m benchmarks.wire"))))
    except (ValueError, limited.RanksFailed) as error:
        sys.exit(f"error: {error}")
