"""One process on one GPU, over NCCL, in bfloat16: ``python -m benchmarks.gpu --help``.

Collectives along an axis of size 1 send nothing, yet everything around them happens: ``DebugPolicy(trivial_axes=True)`` has
fsharp run them, FSDP2 copies instead. What is measured is therefore the host and the device of one rank, not a network.
"""

import gc
import gzip
import json
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import contenders as c, gpu_tests, llama
from benchmarks.gpu_contenders import OURS, WARMUP, Row, Trains, Unavailable, rows
from benchmarks.gpu_page import compare, summary, tables
from benchmarks.overlap import GATHER, REDUCE, overlap
from benchmarks.report import commit, on_terminal
from benchmarks.stats import turn

R = TypeVar("R")


class Model(NamedTuple):
    """What is trained.

    Attributes:
        shape: its sizes.
        together: whether all contenders are in memory at a time, and take turns. Otherwise each has its rounds by itself.
        seconds: its share of the time, in parts.
    """

    shape: llama.Shape
    together: bool
    seconds: float


MODELS = {"large": Model(llama.LARGE, False, 2), "small": Model(llama.SMALL, True, 1)}
LEAST = 2
"""Rounds that a contender has though the time is over."""
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12}
"""FLOP/s of dense products in bfloat16, by what the device's name contains; from NVIDIA's data sheets."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure training steps on one GPU."""

    models: tuple[Literal["large", "small"], ...] = ("large", "small")
    """``large`` keeps the device busy; ``small`` is bound by the host."""
    rounds: int = 6
    """Times that each contender has its turn."""
    steps: int = 3
    """Steps in a turn."""
    warmup: int = 4
    """Steps that each contender makes before."""
    seconds: float = 170.0
    """When these are over, contenders that have not begun are left out, and all rounds but two. What is left out is named."""
    tests_seconds: float = 300.0
    """How long the tests of TransformerEngine's kernels may take, after everything else. 0 leaves them out."""
    trace: bool = False
    """Write the trace of each step that is profiled next to the result, ``gpu-<date>-<model>-<contender>.trace.json.gz``."""
    out: Path = Path("benchmarks/results")
    """Folder of the result, ``gpu-<date>.json``."""


# ---------------------------------------------------------------- measuring


class Bench:
    """Measurements of one model, on a mesh of one rank.

    Attributes:
        found: figures by contender. ``rounds`` has for each round and name ``step``: seconds a step, of several between two
            synchronizations; and ``host``: seconds until the host has issued a step, of one that starts on an idle device.
            ``absent`` has the reason of each contender that has failed, or was left out.
    """

    def __init__(self, model: Model, options: Options, mesh: DeviceMesh, say: Callable[[str], None]) -> None:
        self.model, self.options, self.say = model, options, say
        self.batches = llama.batches(model.shape, device="cuda")
        self.rows = rows(model.shape, mesh, self.batches[0])
        self.live: dict[str, Trains] = {}
        self.losses: dict[str, list[float | None]] = {}
        with torch.device("meta"):
            num_params = sum(p.numel() for p in llama.Llama(model.shape).parameters())
        self.found: dict[str, Any] = {
            "num_params": num_params,
            "tokens": model.shape.batch * model.shape.time,
            "flops": llama.step_flops(model.shape),
            "peers": {row.name: row.peer for row in self.rows},
            "rounds": [],
            **{kind: {} for kind in ("memory", "absent", "losses", "overlap")},
        }

    def measure(self, *, phase: str, until: float, save: Callable[[], None]) -> None:
        """Memory and times of the contenders of a phase; ``save`` is called when there is more to save."""
        todo = [row for row in self.rows if row.phase == phase]
        groups = [todo] if self.model.together else [[row] for row in todo]
        for i, group in enumerate(groups):
            share = _now() + (until - _now()) / (len(groups) - i)
            for row in group:
                if not self._is_late(row.name, until):
                    self._try(row.name, partial(self._begin, row))
            self._rounds(until=share)
            self.live.clear()
            save()

    def profile(self, *, until: float, trace: Callable[[str], Path | None], save: Callable[[], None]) -> None:
        """Overlap of contenders' collectives, each built again: a profiler, once used, may slow down what comes after it.

        ``trace`` says where the trace of a contender goes.
        """
        todo = [row for row in self.rows if row.is_profiled and row.name in self.found["memory"]]
        for row in sorted(todo, key=lambda row: row.name != OURS):
            if self._is_late(f"{row.name}, profiled", until):
                continue
            found = self._try(f"{row.name}, profiled", lambda row=row: self._profile(row, trace(row.name)))
            if found is not None:
                self.found["overlap"][row.name] = found
            save()

    def _is_late(self, name: str, until: float) -> bool:
        if is_late := _now() > until:
            self.found["absent"][name] = f"left out: the time of --seconds {self.options.seconds:g} was over"
        return is_late

    def _try(self, name: str, do: Callable[[], R]) -> R | None:
        """Return what ``do`` returns, or None if it fails. Nothing here asks the device, which may have become unusable."""
        try:
            return do()
        except Exception as error:
            reason = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
            if not isinstance(error, Unavailable):
                traceback.print_exc()
        self.found["absent"][name] = " ".join(reason.split())[:300]
        self.live.pop(name, None)
        return None

    def _begin(self, row: Row) -> None:
        """First steps, and the bytes that are allocated at most over these, and after them."""
        _empty()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        contender = row.build()
        done = getattr(contender, "done", 0)
        self.losses[row.name] = [None] * done
        _empty()
        if not done:
            torch.cuda.reset_peak_memory_stats()
        self.live[row.name] = contender
        self._steps(row.name, max(self.options.warmup - done, 1))
        peak, rest = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        self.found["memory"][row.name] = {"peak": peak - before, "rest": rest - before}
        self.say(row.name)

    def _steps(self, name: str, count: int) -> tuple[float, float]:
        """Seconds until issued, and until done."""
        losses, contender = self.losses[name], self.live[name]
        numbers = range(len(losses), len(losses) + count)
        todo = [self.batches[0 if i < WARMUP else i % len(self.batches)] for i in numbers]
        torch.cuda.synchronize()
        began = _now()
        new = [contender.step(batch) for batch in todo]
        issued = _now() - began
        torch.cuda.synchronize()
        done = _now() - began
        losses += [float(x) for x in new]
        return issued, done

    def _rounds(self, until: float) -> None:
        gc.collect()
        gc.freeze()  # what is alive now stays: no need to look at it each time
        try:
            for i in range(self.options.rounds):
                if not self.live or (i >= LEAST and _now() > until):
                    break
                for name in turn(list(self.live), i):
                    figures = self._try(name, partial(self._turn, name))
                    if figures is not None:
                        if i == len(self.found["rounds"]):
                            self.found["rounds"].append({})
                        self.found["rounds"][i][name] = figures
        finally:
            gc.unfreeze()
        for name in self.live:
            self.found["losses"][name] = self.losses[name]
            self.say(f"{name}: {sum(name in row for row in self.found['rounds'])} rounds")
        self.found |= compare(self.found["losses"], self.found["peers"])

    def _turn(self, name: str) -> dict[str, float]:
        gc.collect()
        if len(self.live) > 1:
            self._steps(name, 1)  # what the one before has left in caches is gone
        issued, _ = self._steps(name, 1)
        return {"step": self._steps(name, self.options.steps)[1] / self.options.steps, "host": issued}

    def _profile(self, row: Row, trace: Path | None) -> dict[str, Any]:
        _empty()
        return profile(row.build(), self.batches[:3], trace)


def _now() -> float:
    return time.perf_counter()


def _empty() -> None:
    gc.collect()
    torch.cuda.empty_cache()


# ---------------------------------------------------------------- profile


def mark(transport: Any) -> None:
    """Have a profile show what a transport issues."""
    for name, label in {"gather_unpacked": GATHER, "reduce_scatter_unpacked": REDUCE, "all_reduce_unpacked": REDUCE}.items():
        setattr(transport, name, torch.profiler.record_function(label)(getattr(transport, name)))


def profile(contender: Any, batches: Sequence[c.Batch], trace: Path | None = None) -> dict[str, Any]:
    """Trace one step, and count the gathers and reductions that overlap compute. The trace is written to ``trace``."""
    if hasattr(contender, "scheduler"):
        mark(contender.scheduler.engine.steps.executor.transport)
    for batch in batches:
        contender.step(batch)
    torch.cuda.synchronize()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as found:
        contender.step(batches[0])
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="fsharp-bench-") as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        if trace is not None:
            with path.open("rb") as whole, gzip.open(trace, "wb") as packed:
                shutil.copyfileobj(whole, packed)
        return overlap(json.loads(path.read_text())["traceEvents"])


# ---------------------------------------------------------------- the run


def run(options: Options, mesh: DeviceMesh, where: dict[str, Any], path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all models, and write what has been measured after each contender.

    First what all want to know, of all models; then profiles, and what :class:`Row` has for later phases.
    """
    began, benches = _now(), dict[str, Bench]()
    results: dict[str, Any] = {**where, "options": {"rounds": options.rounds, "steps": options.steps}, "models": {}}

    def save() -> None:
        results["seconds"] = round(_now() - began, 1)
        _write(results, path)

    shares = {"rounds": 38.0, "profile": 12.0, "compiled": 12.0, "graph": 4.0}
    parts = [(phase, name) for phase in shares for name in options.models]
    for i, (phase, name) in enumerate(parts):
        if name not in benches:
            benches[name] = Bench(MODELS[name], options, mesh, lambda text, name=name: say(f"{name}: {text}"))
            results["models"][name] = benches[name].found
        left = [shares[later] * MODELS[other].seconds for later, other in parts[i:]]
        until = _now() + (began + options.seconds - _now()) * left[0] / sum(left)
        if phase == "profile":
            benches[name].profile(until=until, trace=partial(_trace, options, path.with_suffix(""), name), save=save)
        else:
            benches[name].measure(phase=phase, until=until, save=save)
        say(f"{name}: {phase} done, {_now() - began:.0f} s in all")
    save()
    return results


def _write(results: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n")


def _trace(options: Options, result: Path, model: str, contender: str) -> Path | None:
    words = contender.replace(",", "").replace(" ", "-")
    return result.with_name(f"{result.name}-{model}-{words}.trace.json.gz") if options.trace else None


def environment() -> dict[str, Any]:
    """What figures depend on."""
    gpu = torch.cuda.get_device_name()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "gpu": gpu,
        "peak_flops": next((peak for name, peak in PEAKS.items() if name in gpu), None),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; the exit status, which is 1 where losses differ or tests fail."""
    options = tyro.cli(Options, args=argv, prog="python -m benchmarks.gpu")
    if not torch.cuda.is_available():
        print("error: this needs a CUDA device", file=sys.stderr)
        return 2
    console = Console(highlight=False, soft_wrap=True)
    torch.cuda.set_device(0)
    where = environment()
    path = options.out / f"gpu-{where['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fsharp-bench-") as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
            results = run(options, mesh, where, path, partial(console.print, markup=False))
        finally:
            dist.destroy_process_group()
    if options.tests_seconds:
        _empty()  # the tests have the device to themselves
        results["tests"] = gpu_tests.measure(options.tests_seconds)
        _write(results, path)
    return report(results, path)


def report(results: dict[str, Any], path: Path) -> int:
    """Print tables, the losses that differ, and a last line of JSON; the exit status."""
    for table in tables(results):
        Console(highlight=False, width=200).print(on_terminal(table))
    print(f"written: {path}")
    off = {name: part["mismatch"] for name, part in results["models"].items() if part.get("mismatch")}
    for name, found in off.items():
        print(f"error: {name}: losses differ from those of the peer: {found}", file=sys.stderr)
    if failed := [test for test, result, _ in results.get("tests", ()) if result == "failed"]:
        print(f"error: {len(failed)} tests failed: {', '.join(failed)}", file=sys.stderr)
    print(json.dumps(summary(results)), flush=True)
    return 1 if off or failed else 0


if __name__ == "__main__":
    sys.exit(main())
