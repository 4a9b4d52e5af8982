"""One process on one GPU, over NCCL, in bfloat16: ``python -m benchmarks.gpu --help``.

Collectives along an axis of size 1 send nothing, yet everything around them happens: ``DebugPolicy(trivial_axes=True)`` has
fsharp run them, FSDP2 copies instead. What is measured is therefore the host and the device of one rank, not a network.
"""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsharp as fs
from benchmarks import contenders as c
from benchmarks import llama
from benchmarks.overlap import GATHER, REDUCE, overlap
from benchmarks.report import Table, commit, on_terminal, ranged
from benchmarks.stats import ratio, times, turn
from benchmarks.steps import LossMismatch
from fsharp.testing import DebugPolicy

SHAPES = {"large": llama.LARGE, "small": llama.SMALL}
BASE = "FSDP2"
OURS = "fsharp zero3"
SKIPPED = "fsharp zero3, axis skipped"
MEGATRON = "megatron-fsdp"
FIRST, LOOSE = 6, 2e-2
"""Over how many steps losses are compared, and their largest relative difference: contenders round in different places."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure training steps on one GPU."""

    models: tuple[Literal["large", "small"], ...] = ("large", "small")
    """``large`` keeps the device busy; ``small`` is bound by the host."""
    rounds: int = 20
    """Times that each contender has its turn."""
    steps: int = 5
    """Steps in a turn."""
    warmup: int = 5
    """Steps that each contender makes before."""
    out: Path = Path("benchmarks/results")
    """Folder of the result, ``gpu-<date>.json``."""


class Unavailable(Exception):
    """A contender that cannot run here, and why."""


class Device:
    """What is asked of a CUDA device; a test puts another one in its place."""

    kind = "cuda"

    def wait(self) -> None:
        torch.cuda.synchronize()

    def empty(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


Builder = Callable[[], c.Contender]


def builders(shape: llama.Shape, mesh: DeviceMesh) -> dict[str, Builder]:
    """What makes each contender.

    All but "bfloat16 throughout" keep float32 parameters for the optimizer, compute in bfloat16 and reduce in float32.
    """
    kind = mesh.device_type
    ours = partial(_ours, shape, mesh)
    half = torch.bfloat16
    return {
        "bfloat16 throughout": lambda: c.ModuleContender("bfloat16 throughout", llama.build(shape, device=kind, dtype=half)),
        "autocast": lambda: c.ModuleContender("autocast", Autocast(llama.build(shape, device=kind), kind)),
        BASE: lambda: _fsdp2(shape, mesh),
        MEGATRON: lambda: _megatron(shape),
        OURS: lambda: ours(OURS, DebugPolicy(trivial_axes=True)),
        SKIPPED: lambda: ours(SKIPPED, fs.Policy()),
    }


class Autocast(torch.nn.Module):
    """Plain PyTorch: float32 parameters, cast where they are used."""

    def __init__(self, module: torch.nn.Module, kind: str) -> None:
        super().__init__()
        self.module, self.kind = module, kind

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        with torch.autocast(self.kind, torch.bfloat16):
            return self.module(inputs, targets)


def _fsdp2(shape: llama.Shape, mesh: DeviceMesh) -> c.Contender:
    module = llama.build(shape, device=mesh.device_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module.embed, mesh=mesh, mp_policy=policy)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module.head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return c.ModuleContender(BASE, module)


def _megatron(shape: llama.Shape) -> c.Contender:
    try:
        import megatron_fsdp as mf
    except ImportError as error:
        raise Unavailable(f"not installed: {error}") from None
    precision = mf.MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    module = mf.fully_shard_model(
        module=llama.build(shape, device="cuda", dtype=torch.bfloat16),
        fsdp_unit_modules=[llama.Embed, llama.Block, llama.Head],
        mixed_precision_policy=precision,
    )
    contender = c.ModuleContender(MEGATRON, module)
    mf.fully_shard_optimizer(contender.optimizer)  # in place
    return contender


def _ours(shape: llama.Shape, mesh: DeviceMesh, name: str, policy: fs.Policy) -> c.FsharpContender:
    params = llama.tree_of(llama.build(shape, device=mesh.device_type))
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32, wire=torch.float32)
    loss_fn, comm = partial(llama.loss, heads=shape.heads), fs.ProcessGroupComm(mesh)
    return c.FsharpContender(name, params, loss_fn, comm, fs.zero3("dp"), policy=policy, precision=precision)


# ---------------------------------------------------------------- measuring


def measure(
    options: Options, shape: llama.Shape, mesh: DeviceMesh, say: Callable[[str], None], device: Device = Device()
) -> dict[str, Any]:
    """Memory of each contender alone, then times of all in turn, then a profile of fsharp's step."""
    batches = llama.batches(shape, device=device.kind)
    memory: dict[str, dict[str, int]] = {}
    absent: dict[str, str] = {}
    made = builders(shape, mesh)
    for name, build in made.items():
        try:
            memory[name] = peak_memory(build, batches, device)
        except Exception as error:
            if name != MEGATRON:
                raise  # of that one, another version's interface or one that refuses a single rank is no reason to stop
            absent[name] = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"[:200]
        say(f"memory: {name}")
    found = [build() for name, build in made.items() if name in memory]
    rounds, losses = interleaved(found, batches, options, say, device)
    difference = compare(losses)
    del found
    device.empty()
    with torch.device("meta"):
        num_params = sum(p.numel() for p in llama.Llama(shape).parameters())
    return {
        "num_params": num_params,
        "rounds": rounds,
        "memory": memory,
        "absent": absent,
        "losses": losses,
        "largest_relative_difference_of_first_losses": difference,
        "overlap": profile(_ours(shape, mesh, OURS, DebugPolicy(trivial_axes=True)), batches, device),
    }


def peak_memory(build: Builder, batches: Sequence[c.Batch], device: Device) -> dict[str, int]:
    """Bytes allocated at most over some steps, with nothing else alive; and after them."""
    device.empty()
    before = device.allocated()
    contender = build()
    device.empty()
    device.reset_peak()
    for i in range(4):
        contender.step(batches[i % len(batches)])
    device.wait()
    result = {"peak": device.peak() - before, "rest": device.allocated() - before}
    del contender
    device.empty()
    return result


def interleaved(
    found: Sequence[c.Contender],
    batches: Sequence[c.Batch],
    options: Options,
    say: Callable[[str], None],
    device: Device,
) -> tuple[list[dict[str, dict[str, float]]], dict[str, list[float]]]:
    """All contenders in turn.

    Returns:
        For each round and name, ``step``: seconds a step, of several between two synchronizations; and ``host``: seconds
        until the host has issued a step, of one that starts on an idle device. And the losses.
    """
    losses: dict[str, list[torch.Tensor]] = {each.name: [] for each in found}
    by_name = {each.name: each for each in found}

    def steps(name: str, count: int) -> tuple[float, float]:
        """Seconds until issued, and until done."""
        mine, contender = losses[name], by_name[name]
        todo = [batches[(len(mine) + i) % len(batches)] for i in range(count)]
        device.wait()
        began = time.perf_counter()
        for batch in todo:
            mine.append(contender.step(batch))
        issued = time.perf_counter() - began
        device.wait()
        return issued, time.perf_counter() - began

    gc.collect()
    gc.freeze()  # what is alive now stays: no need to look at it each time
    rounds = []
    try:
        for name in by_name:
            steps(name, options.warmup)
        for i in range(options.rounds):
            row = {}
            for name in turn(list(by_name), i):
                gc.collect()
                steps(name, 1)  # what the one before has left in caches is gone
                issued, _ = steps(name, 1)
                row[name] = {"step": steps(name, options.steps)[1] / options.steps, "host": issued}
            rounds.append({name: row[name] for name in by_name})
            say(f"round {i + 1}/{options.rounds}")
    finally:
        gc.unfreeze()
    return rounds, {name: torch.stack([x.double() for x in mine]).tolist() for name, mine in losses.items()}


def compare(losses: dict[str, list[float]]) -> float:
    """The largest relative difference from FSDP2's first losses.

    Raises:
        LossMismatch: one that rounding does not explain.
    """
    expected = losses[BASE][:FIRST]
    worst = {name: max(abs(a - b) / abs(b) for a, b in zip(mine, expected)) for name, mine in losses.items()}
    off = {name: x for name, x in worst.items() if not x <= LOOSE}
    if off:
        raise LossMismatch(f"losses differ from those of {BASE} by more than {LOOSE:g}: {off}")
    return max(worst.values())


# ---------------------------------------------------------------- profile


def mark(transport: Any) -> None:
    """Have a profile show what a transport issues."""
    for name, label in {"gather_each": GATHER, "reduce_scatter_each": REDUCE, "all_reduce_each": REDUCE}.items():
        setattr(transport, name, torch.profiler.record_function(label)(getattr(transport, name)))


def profile(contender: c.FsharpContender, batches: Sequence[c.Batch], device: Device) -> dict[str, Any]:
    """Trace one step and count the gathers that overlap compute."""
    assert contender.scheduler is not None
    mark(contender.scheduler.transport)
    for batch in batches:
        contender.step(batch)
    device.wait()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.kind == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as found:
        contender.step(batches[0])
        device.wait()
    with tempfile.TemporaryDirectory(prefix="fsharp-bench-") as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        return overlap(json.loads(path.read_text())["traceEvents"])


# ---------------------------------------------------------------- report


def tables(models: dict[str, Any]) -> list[Table]:
    """One for each model, and one of the overlap."""
    result = []
    for name, part in models.items():
        kinds = {kind: [{n: x[kind] for n, x in row.items()} for row in part["rounds"]] for kind in ("step", "host")}
        rows = []
        for who, nbytes in part["memory"].items():
            row = [who]
            for kind in ("step", "host"):
                row += [ranged(times(kinds[kind], who), 1e3, "{:.2f}"), f"{ratio(kinds[kind], who, BASE).median:.3f}"]
            peak = nbytes["peak"]
            rows.append((*row, f"{peak / 1e6:,.0f}", f"{peak / part['memory'][BASE]['peak']:.3f}"))
        rows += [(who, why, *[""] * 5) for who, why in part["absent"].items()]
        header = ("", "ms a step", "of FSDP2's", "ms until issued", "of FSDP2's", "peak, MB", "of FSDP2's")
        result.append(Table(f"{name}: {part['num_params']:,} parameters", header, rows))
    rows = []
    for name, part in models.items():
        for phase, x in part["overlap"].items():
            hidden = f"{x['hidden_us'] / x['gather_us']:.0%}" if x["gather_us"] else ""
            rows.append((f"{name}, {phase}", str(x["num_gathers"]), str(x["num_overlapping"]), hidden))
    result.append(Table(f"Gathers of {OURS} beside compute", ("", "gathers", "overlapping", "of their time"), rows))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; the exit status."""
    options = tyro.cli(Options, args=argv, prog="python -m benchmarks.gpu")
    if not torch.cuda.is_available():
        print("error: this needs a CUDA device", file=sys.stderr)
        return 2
    console = Console(highlight=False, soft_wrap=True)
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory(prefix="fsharp-bench-") as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
            models = {}
            for name in options.models:
                models[name] = measure(options, SHAPES[name], mesh, partial(_say, console, name))
        finally:
            dist.destroy_process_group()
    now = datetime.now(UTC)
    where = {
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    path = options.out / f"gpu-{now:%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**where, "models": models}, indent=1) + "\n")
    for table in tables(models):
        Console(highlight=False, width=140).print(on_terminal(table))
    console.print(f"written: {path}", markup=False)
    print(json.dumps(summary(models)), flush=True)
    return 0


def summary(models: dict[str, Any]) -> dict[str, float]:
    """Ratios of fsharp's zero3 to FSDP2, for the last line."""
    result = {}
    for name, part in models.items():
        for kind in ("step", "host"):
            rounds = [{n: x[kind] for n, x in row.items()} for row in part["rounds"]]
            result[f"{name}_{kind}_ratio_vs_fsdp2"] = round(ratio(rounds, OURS, BASE).median, 4)
        result[f"{name}_peak_ratio_vs_fsdp2"] = round(part["memory"][OURS]["peak"] / part["memory"][BASE]["peak"], 4)
    return result


def _say(console: Console, model: str, text: str) -> None:
    console.print(f"{model}: {text}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
