"""Formats of parameters and gradients: bytes a step, the loss that is reached, steps over a limited network: make bench-wire.

Each codec trains the byte-level GPT of ``examples/gpt`` on the standard library's source, with the same seeds and batches,
under ZeRO-3 (parameters are gathered twice a step, unless the policy keeps them) or ZeRO-2 (updated parameters are gathered
once). Bytes are those that a rank sends in the last step, over the number of elements and ``(n - 1) / n``. Of FSDP2 the bytes
of its collectives are counted as they are dispatched, for a model of the same blocks with bfloat16 parameters and reductions.
:mod:`benchmarks.limited` times steps of a wider model over a limited network.

ZeRO-2 and ZeRO-3 cut a unit alike, so a format rounds the same blocks, and losses agree to the bit. A format is therefore
trained under the first of its strategies; under the others :data:`SHARED` steps count bytes, and their losses have to be equal.
Sums of 4 ranks are rounded otherwise than those of 2: each number of processes has runs of its own.

Each run is a line of a file under ``runs/``. At the same commit, a benchmark that was interrupted goes on where it ended.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
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
from benchmarks.codecs import CODECS, EXACT, FSDP2
from benchmarks.record import Record
from benchmarks.report import around, machine, on_terminal
from benchmarks.steps import LossMismatch
from benchmarks.training import HEADS, Training, train
from fsharp.testing import processes

GOOD = 1.005
"""The largest loss of a codec, of float32's, whose bytes and steps are figures of the last line."""
SHARED = 8
"""Steps whose losses have to be equal under two strategies; the last one follows a schedule that has settled."""
RUN_S = 3600.0
"""Seconds until the ranks of a run are killed."""
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with formats of parameters and gradients, and time their steps over a limited network."""

    nproc: tuple[int, ...] = (2, 4)
    """Numbers of processes to train with."""
    seeds: tuple[int, ...] = (3, 3)
    """Runs of each codec, for each number of processes; the loss is their mean."""
    training: Training = field(default_factory=Training)
    """Sizes of the model and of a run."""
    only: tuple[str, ...] = tuple(CODECS)
    """Codecs to train with; float32's has to be one."""
    network: limited.Options = field(default_factory=limited.Options)
    """Steps over a limited network."""
    network_alone: bool = False
    """Time steps over the limited network, keep them for the next call, and end."""
    train: bool = True
    """Train where the record lacks a run. Without it, a codec has those seeds that the record has."""
    record: Path | None = None
    """Each run, as soon as it ends. The default is a file of the commit; of another file, runs at other commits count too."""
    out: Path | None = ROOT / "benchmarks/results"
    """Folder of a file of this day with everything measured."""
    docs: Path | None = ROOT / "docs/benchmarks.md"
    """The page whose tables are renewed, beside whose picture; None leaves both alone."""

    def __post_init__(self) -> None:
        if len(self.seeds) != len(self.nproc) or min(self.nproc, default=0) < 2:
            raise ValueError(f"--seeds {self.seeds} and --nproc {self.nproc}: expected equally many, and 2 or more processes.")
        for flag, names in (("--only", self.only), ("--network.codecs", self.network.codecs)):
            if unknown := set(names) - set(CODECS):
                raise ValueError(f"{flag}: there is no codec {sorted(unknown)}; there are {list(CODECS)}.")
            if EXACT not in names:
                raise ValueError(f"{flag}: {EXACT!r} has to be among the codecs, as the others are compared with it.")


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


def fsdp2_nbytes(comm: fs.Comm, options: Training) -> float:
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


def losses_of(
    nproc: int, seeds: int, options: Options, record: Record, about: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Return bytes and losses of each codec on so many processes; train where the record lacks a run, if options say so.

    LossMismatch if the same formats have other losses under another strategy.
    """
    mesh, of = fs.Mesh({"dp": nproc}), {**about, "nproc": nproc, "training": asdict(options.training)}
    fsdp2 = record.once({**of, "bytes of": FSDP2}, lambda: processes(mesh, partial(fsdp2_nbytes, options=options.training))[0])
    until = min(SHARED, options.training.steps)
    first = {name: next(x for x in options.only if CODECS[x].precision == CODECS[name].precision) for name in options.only}
    found: dict[str, dict[int, Any]] = {name: {} for name in options.only}
    for seed, name in product(range(seeds), options.only):
        shared = first[name] != name
        key = {**of, "codec": name, "seed": seed, **({"until": until} if shared else {})}
        if (shared and (seed or not found[first[name]])) or (key not in record and not options.train):
            continue
        fn = partial(train, codec=CODECS[name], seed=seed, options=options.training, until=until if shared else None)
        began, known = time.monotonic(), key in record
        found[name][seed] = run = record.once(key, lambda fn=fn: processes(mesh, fn, timeout=RUN_S)[0])
        if shared and run["losses"] != (same := found[first[name]][0]["losses"][:until]):
            what = f"losses are {run['losses']}, expected those of {first[name]}, {same}."
            raise LossMismatch(f"{name}, {nproc} processes: {what}")
        loss = f"losses of {first[name]}" if shared else f"{run['held_out']:.4f} bits per byte"
        took = "known" if known else f"{time.monotonic() - began:.0f} s"
        say(f"{nproc} processes, seed {seed}, {name}: {loss}, {run['bytes']:.3f} bytes an element ({took})")
    rows = {}
    for name in options.only:
        losses = {seed: run["held_out"] for seed, run in found[first[name]].items()}
        if found[name]:
            exact = [found[EXACT][seed]["held_out"] for seed in losses]
            nbytes = next(iter(found[name].values()))["bytes"]
            rows[name] = {
                "bytes": nbytes,
                "bytes_ratio": nbytes / fsdp2,
                "loss": mean(losses.values()),
                "losses": losses,
                "loss_ratio": mean(losses.values()) / mean(exact),
                "loss_ratios": [loss / base for loss, base in zip(losses.values(), exact, strict=True)],
            }
    return {"fsdp2_bytes": fsdp2, "codecs": rows}


def over_limited(options: Options, record: Record, about: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Time steps over a limited network, unless the record has them; return why not if there is none."""
    reason = "it was left out by --network.rate-mbit 0"
    if options.network.rate_mbit:
        of = {**about, "network": asdict(options.network)}
        try:
            return dict(record.once(of, lambda: limited.measure(options.network)))
        except limited.NoLink as error:
            reason = str(error)
    say(f"no steps over a limited network: {reason}")
    return {"left_out": reason}


def figures(trained: Mapping[str, Any], network: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the last line: of codecs with a good loss on every number of processes, the fewest bytes and the fastest step."""

    def worst(name: str, what: str) -> float:
        return max(part["codecs"][name][what] for part in trained.values())

    names = [name for name in CODECS if all(name in part["codecs"] for part in trained.values())]
    good = [name for name in names if worst(name, "loss_ratio") <= GOOD]
    best = min(good, key=lambda name: worst(name, "bytes_ratio"))
    ratios = limited.ratios(network["rounds"]) if "rounds" in network else {}
    fastest = min((ratios[name].median for name in good if name in ratios), default=None)
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
    say = partial(console.print, soft_wrap=True, markup=False)
    if options.docs:
        around(options.docs, wire_page.MARKS)  # raises now, and not at the end
    here = machine(options)
    about = {name: here[name] for name in ("cpu", "versions")}
    path = ROOT / f"runs/bench-wire-{here['commit']}.jsonl"
    if path.stem.endswith("-dirty"):
        path.unlink(missing_ok=True)  # other changes may have been measured
    record = Record(options.record or path, here["commit"])
    network = over_limited(options, record, about, say)
    if options.network_alone:
        return {name: each.median for name, each in limited.ratios(network["rounds"]).items()} if "rounds" in network else {}
    trained = {
        str(nproc): losses_of(nproc, seeds, options, record, about, say)
        for nproc, seeds in zip(options.nproc, options.seeds, strict=True)
    }
    found = figures(trained, network)
    results = {"summary": found, **here, "commit": ", ".join(sorted(record.commits)), "trained": trained, "limited": network}
    for table in wire_page.tables(results):
        console.print(on_terminal(table))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"wire-{here['date'][:10]}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
    if options.docs:
        wire_page.write(options.docs, results)
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(main(tyro.cli(Options, prog="python -m benchmarks.wire"))))
    except (ValueError, LossMismatch, limited.RanksFailed) as error:
        sys.exit(f"error: {error}")
