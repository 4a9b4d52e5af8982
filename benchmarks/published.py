"""Predictions held to published runs: ``python -m benchmarks.published`` prints the table of docs/tune.md. Nothing is measured.

Sources, both in the repository pytorch/torchtitan:

- T: ``benchmarks/llama3_h100_202412_torchtitan.md`` (commit 31a17bf): tables 1, 3, 4 and 5. Hosts of 8 H100 (96 GB, 2.4 TB/s,
  500 W) with NVLink, and 400 Gb/s of network for each GPU. Sequences are those of torchtitan's configurations: 8,192 tokens.
- W: ``benchmarks/llama3_8b_h200_2025-06_torchtitan.md`` (commit bcdeaa3): hosts of 8 H200, 400 Gb/s for each GPU.

What part of its peak a GPU reaches cannot be predicted: it comes from the first run of a group, and the other runs of the group
have the same. In float8 it is counted against the peak of bfloat16. Tensor parallelism and pipelines are in a prediction as
far as they cut the model: it has no time for activations that travel, and no bubbles.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import fsharp as fs
from fsharp.inspect.presets import GPUS

SEQUENCE, VOCABULARY = 8192, 128_256


class Llama(NamedTuple):
    """Sizes of a Llama 3.1; ``kv`` is the width of keys and of values."""

    dim: int
    hidden: int
    layers: int
    kv: int = 1024


MODELS = {"8B": Llama(4096, 14336, 32), "70B": Llama(8192, 28672, 80), "405B": Llama(16384, 53248, 126)}


class Run(NamedTuple):
    """A published run. ``tensor`` and ``pipeline`` are the ranks that share the model besides those of FSDP."""

    source: str
    group: str
    model: str
    gpu: str
    fsdp: int
    batch: int
    tokens_per_s: float
    what: str = "FSDP"
    tensor: int = 1
    pipeline: int = 1
    recompute: bool = False

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""
        return self.fsdp * self.tensor * self.pipeline


RUNS = (
    Run("T1", "bfloat16", "8B", "H100", 8, 2, 5762),
    Run("T3", "bfloat16", "8B", "H100", 128, 2, 5605),
    Run("T1", "compiled", "8B", "H100", 8, 2, 6667),
    Run("T3", "compiled", "8B", "H100", 128, 2, 6514),
    Run("T1", "compiled, float8", "8B", "H100", 8, 2, 8532),
    Run("T3", "compiled, float8", "8B", "H100", 128, 2, 8380),
    Run("T4", "compiled, float8", "70B", "H100", 32, 16, 829, "FSDP 32, TP 8", 8, recompute=True),
    Run("T5", "compiled, float8", "405B", "H100", 8, 32, 128, "FSDP 8, TP 8, PP 8, interleaved", 8, 8, recompute=True),
    Run("T5", "compiled, float8", "405B", "H100", 8, 32, 100, "FSDP 8, TP 8, PP 8, 1F1B", 8, 8, recompute=True),
    Run("W", "compiled, float8, H200", "8B", "H200", 32, 2, 10938),
    Run("W", "compiled, float8, H200", "8B", "H200", 64, 2, 10753),
)


def shapes(run: Run) -> dict[str, Any]:
    """Return the part of the model that one GPU trains together with the other ranks of FSDP."""
    dim, hidden, layers, kv = MODELS[run.model]
    sizes = {"qo": 2 * dim, "kv": 2 * kv, "mlp": 3 * hidden}

    def empty(rows: int) -> torch.Tensor:
        return torch.empty(rows // run.tensor, dim, device="meta")

    blocks = [{name: empty(rows) for name, rows in sizes.items()} for _ in range(layers // run.pipeline)]
    return {"embed": {"weight": empty(VOCABULARY)}, "layers": blocks, "head": {"weight": empty(VOCABULARY)}}


def layout_of(run: Run) -> fs.Layout:
    """Return the layout: ZeRO-3, gathers in bfloat16, gradients in float32, as torchtitan has by default."""
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32, wire=torch.float32)
    return fs.plan(shapes(run), fs.Mesh({"dp": run.fsdp}), fs.zero3("dp"), units="layers.*", precision=precision)


def schedule_of(layout: fs.Layout) -> fs.schedules.Schedule:
    """Return the schedule of a step, with parameters released after the forward, as torchtitan has by default."""
    policy, order = fs.SchedulePolicy(release="forward"), ("embed", "layers.*", "head")
    return fs.schedules.plan_step(layout, policy, order=order, backend="nccl")


def predicted(run: Run, layout: fs.Layout, schedule: fs.schedules.Schedule, efficiency: float) -> float:
    """Return predicted tokens a second and GPU, if a GPU reaches this part of its peak in bfloat16."""
    alone = run.tensor == 1
    axes = {"within": (), "across": (), "spanning": ()} | {
        "within" if alone and run.fsdp <= 8 else "spanning" if alone else "across": ("dp",)
    }
    tokens = run.batch * SEQUENCE
    hardware = fs.inspect.Hardware.preset(run.gpu, layout, tokens=tokens, efficiency=1.0, recompute=run.recompute, **axes)
    dim = MODELS[run.model].dim
    attention_s = 4 * dim * SEQUENCE * tokens / run.tensor / GPUS[run.gpu].flops
    assert isinstance(hardware.compute_times, dict)
    compute = {}
    for unit, (forward, _) in hardware.compute_times.items():
        own = 0.0 if unit == "embed" else forward + (attention_s if unit.startswith("layers") else 0.0)
        compute[unit] = own / efficiency, (3 if run.recompute else 2) * own / efficiency
    share = 1 / run.fsdp
    step_s = fs.inspect.predict(schedule, replace(hardware, compute_times=compute, update_s=share * hardware.update_s)).step_s
    return tokens / step_s / run.tensor / run.pipeline


def fitted(run: Run, layout: fs.Layout, schedule: fs.schedules.Schedule) -> float:
    """Return the efficiency with which the predicted tokens are the published ones."""
    least, most = 0.01, 4.0
    for _ in range(20):
        middle = (least + most) / 2
        least, most = (middle, most) if predicted(run, layout, schedule, middle) < run.tokens_per_s else (least, middle)
    return (least + most) / 2


def table() -> Iterator[str]:
    """Yield the lines of the table, in markdown."""
    yield "| source | run | GPUs | tokens/s of a GPU, published | predicted | error |"
    yield "|---|---|---|---|---|---|"
    efficiencies: dict[str, float] = {}
    for run in RUNS:
        layout = layout_of(run)
        schedule = schedule_of(layout)
        is_first = run.group not in efficiencies
        if is_first:
            efficiencies[run.group] = fitted(run, layout, schedule)
        found = predicted(run, layout, schedule, efficiencies[run.group])
        what = f"{run.model}, {run.group}, {run.what}"
        shown = (
            f"efficiency {efficiencies[run.group]:.2f} from here | "
            if is_first
            else f"{found:,.0f} | {found / run.tokens_per_s - 1:+.0%}"
        )
        yield f"| {run.source} | {what} | {run.gpus} {run.gpu} | {run.tokens_per_s:,.0f} | {shown} |"


if __name__ == "__main__":
    print("\n".join(table()))
