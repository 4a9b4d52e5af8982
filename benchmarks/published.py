"""Predictions held to published runs: ``python -m benchmarks.published`` prints tables of docs/tune.md. Nothing is measured.

Sources:

- T: pytorch/torchtitan, ``benchmarks/llama3_h100_202412_torchtitan.md`` (commit 31a17bf): tables 1, 3, 4 and 5. Hosts of 8 H100
  (96 GB, 2.4 TB/s, 500 W) with NVLink, and 400 Gb/s of network for each GPU. Sequences are those of torchtitan's
  configurations: 8,192 tokens. The memory is what torch's allocator reserved.
- W: pytorch/torchtitan, ``benchmarks/llama3_8b_h200_2025-06_torchtitan.md`` (commit bcdeaa3): hosts of 8 H200, 400 Gb/s each.
- X: NVIDIA/JAX-Toolbox, ``docs/frameworks/maxtext/README.md`` (commit 67b7949): MaxText on DGX H100, 22.19 sequences a second.
- B: NVIDIA-NeMo/Megatron-Bridge, ``docs/performance-summary-archive.md`` (commit 0a25f91), DGX-H100: 25.11 for Llama, and 25.09
  for DeepSeek-V3. Its 338 TFLOP/s are those of 1,297 tokens/s with one layer of multi-token prediction. Its TP counts as DP.
- P: "The Llama 3 Herd of Models", arXiv 2407.21783, table 4: 430 and 400 TFLOP/s of a GPU, in bfloat16, for 16M tokens a step.
  How many operations a token has is not said. :func:`tokens_per_s` counts them as B does.
- D: "DeepSeek-V3 Technical Report", arXiv 2412.19437, table 1 and sections 3.2 and 4.2: 2,664,000 GPU hours on 2,048 H800 for
  14.8T tokens; 15,360 sequences of 4,096 tokens a step, after a rise from 3,072. An H800 computes as an H100; NVLink is slower.

What part of its peak a GPU reaches cannot be predicted: it comes from the first run of a group, and the other runs of the group
have the same. In float8 it is counted against the peak of bfloat16. Tensor, pipeline and expert parallelism are in a prediction
as far as they cut the model: it has no time for activations that travel, and no bubbles. A pipeline is as fast as its slowest
stage, where embedding and head count as one layer each. Experts have equally many tokens.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import fsharp as fs
from fsharp.inspect.presets import GPUS
from fsharp.planning.choice import StepArguments
from fsharp.planning.costs import estimated_costs

ORDER = ("embed", "layers.*", "head")


class Model(NamedTuple):
    """Sizes of a model.

    Attributes:
        matrices: rows and columns of each matrix of a layer.
        attention: width of queries and keys, and of values, of all heads together: their mean.
        experts: elements of the routed experts of a layer, and the part of them that computes a token.
    """

    dim: int
    layers: int
    vocabulary: int
    matrices: dict[str, tuple[int, int]]
    attention: int
    experts: tuple[int, float] = (0, 0.0)


def llama(dim: int, hidden: int, layers: int, kv: int = 1024, vocabulary: int = 128_256) -> Model:
    """Return the sizes of a Llama; ``kv`` is the width of keys and of values."""
    attention = {"q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim)}
    mlp = {"gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}
    return Model(dim, layers, vocabulary, attention | mlp, dim)


def deepseek_v3() -> Model:
    """Return the sizes of DeepSeek-V3, with its layer of multi-token prediction. A dense layer counts as one with experts."""
    dim, heads, hidden = 7168, 128, 2048
    queries = {"q_a": (1536, dim), "q_b": (heads * 192, 1536)}
    keys = {"kv_a": (576, dim), "kv_b": (heads * 256, 512), "o": (dim, heads * 128)}
    shared = {"router": (256, dim), "gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}
    return Model(dim, 62, 129_280, queries | keys | shared, heads * (192 + 128) // 2, (256 * 3 * hidden * dim, 8 / 256))


MODELS = {
    "Llama 2 7B": llama(4096, 11008, 32, kv=4096, vocabulary=32_000),
    "8B": llama(4096, 14336, 32),
    "70B": llama(8192, 28672, 80),
    "405B": llama(16384, 53248, 126),
    "DeepSeek-V3": deepseek_v3(),
}


class Run(NamedTuple):
    """A published run.

    Attributes:
        fsdp: number of ranks among which a strategy shards.
        batch: sequences of each of these ranks in a step.
        tensor, pipeline, expert: ranks that share the model besides those of ``fsdp``. Expert ranks have tokens of their own.
        memory: peak memory in GiB, if it is published.
    """

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
    expert: int = 1
    recompute: bool = False
    sequence: int = 8192
    strategy: str = "zero3"
    memory: float = 0.0

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""
        return self.fsdp * self.tensor * self.pipeline * self.expert

    @property
    def preset(self) -> str:
        """The GPU whose data sheet is taken: an H800 computes as an H100."""
        return {"H800": "H100"}.get(self.gpu, self.gpu)

    @property
    def tokens(self) -> int:
        """Tokens of a step of each rank of ``fsdp``."""
        return self.batch * self.sequence


def tokens_per_s(tflops: float, model: str, sequence: int = 8192) -> float:
    """Return the tokens a second at which a GPU has these TFLOP/s: 6 operations for each parameter, and causal attention."""
    sizes = MODELS[model]
    elements = sizes.layers * sum(a * b for a, b in sizes.matrices.values()) + sizes.vocabulary * sizes.dim
    return tflops * 1e12 / (6 * elements + 6 * sizes.layers * sizes.attention * sequence)


DEEPSEEK_PER_S = 14.8e12 / 2_664_000 / 3600
CUT = {"tensor": 8, "pipeline": 8}
PAPER = {"tensor": 8, "pipeline": 16, "strategy": "zero2"}
EXPERTS = {"expert": 64, "sequence": 4096, "strategy": "zero1"}
RUNS = (
    Run("T1", "bfloat16", "8B", "H100", 8, 2, 5762, memory=82.4),
    Run("T3", "bfloat16", "8B", "H100", 128, 2, 5605, memory=67.0),
    Run("T1", "compiled", "8B", "H100", 8, 2, 6667, memory=77.0),
    Run("T3", "compiled", "8B", "H100", 128, 2, 6514, memory=62.0),
    Run("T1", "compiled, float8", "8B", "H100", 8, 2, 8532, memory=76.8),
    Run("T3", "compiled, float8", "8B", "H100", 128, 2, 8380, memory=61.8),
    Run("T4", "compiled, float8", "70B", "H100", 32, 16, 829, "FSDP 32, TP 8", 8, recompute=True, memory=71.9),
    Run("T5", "compiled, float8", "405B", "H100", 8, 32, 128, "FSDP 8, TP 8, PP 8, interleaved", **CUT, recompute=True),
    Run("T5", "compiled, float8", "405B", "H100", 8, 32, 100, "FSDP 8, TP 8, PP 8, 1F1B", **CUT, recompute=True),
    Run("W", "compiled, float8, H200", "8B", "H200", 32, 2, 10938),
    Run("W", "compiled, float8, H200", "8B", "H200", 64, 2, 10753),
    Run("X", "bfloat16, 700 W", "Llama 2 7B", "H100", 8, 2, 22.19 * 4096 / 8, sequence=4096),
    Run("P", "bfloat16, 700 W", "405B", "H100", 64, 32, tokens_per_s(430, "405B"), "FSDP 64, TP 8, PP 16", **PAPER),
    Run("P", "bfloat16, 700 W", "405B", "H100", 128, 16, tokens_per_s(400, "405B"), "FSDP 128, TP 8, PP 16", **PAPER),
    Run("B", "float8, 700 W", "8B", "H100", 8, 16, 14451),
    Run("B", "float8, 700 W", "70B", "H100", 2, 64, 1602, "DP 2, TP 4, PP 8", 4, 8, strategy="zero1"),
    Run("B", "float8, 700 W", "405B", "H100", 16, 32, 292, "DP 8, CP 2, TP 8, PP 8", **CUT, strategy="zero1"),
    Run("B", "float8, experts", "DeepSeek-V3", "H100", 2, 64, 1297, "EP 64, TP 2, PP 8", pipeline=8, **EXPERTS),
    Run("D", "float8, experts", "DeepSeek-V3", "H800", 2, 120, DEEPSEEK_PER_S, "DP 2, EP 64, PP 16", pipeline=16, **EXPERTS),
)


def shapes(run: Run) -> dict[str, Any]:
    """Return the part of the model that one GPU trains together with the other ranks of FSDP."""
    model = MODELS[run.model]

    def empty(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows // run.tensor, columns, device="meta")

    def layer() -> dict[str, torch.Tensor]:
        experts = {"experts": torch.empty(model.experts[0] // run.expert, device="meta")} if model.experts[0] else {}
        return {name: empty(*shape) for name, shape in model.matrices.items()} | experts

    if run.pipeline > 1:
        return {"layers": [layer() for _ in range(-(-(model.layers + 2) // run.pipeline))]}
    embed, head = ({"weight": empty(model.vocabulary, model.dim)} for _ in range(2))
    return {"embed": embed, "layers": [layer() for _ in range(model.layers)], "head": head}


def layout_of(run: Run) -> fs.Layout:
    """Return the layout: gathers in bfloat16, gradients in float32."""
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32, wire=torch.float32)
    strategy = getattr(fs, run.strategy)("dp")
    return fs.plan(shapes(run), fs.Mesh({"dp": run.fsdp}), strategy, units="layers.*", precision=precision)


def order_of(layout: fs.Layout) -> tuple[str, ...]:
    """Return the units in the order in which a step uses them."""
    return ORDER if any(unit.name == "head" for unit in layout.units) else ("layers.*",)


POLICY = fs.SchedulePolicy(release="forward")
"""Parameters are released after the forward, as torchtitan does by default."""


def schedule_of(layout: fs.Layout) -> fs.schedules.Schedule:
    """Return the schedule of a step."""
    return fs.schedules.plan_step(layout, POLICY, order=order_of(layout), backend="nccl")


def predicted(run: Run, layout: fs.Layout, schedule: fs.schedules.Schedule, efficiency: float) -> float:
    """Return predicted tokens a second and GPU, if a GPU reaches this part of its peak in bfloat16."""
    alone, model = run.gpus == run.fsdp, MODELS[run.model]
    hardware = fs.inspect.Hardware.preset(  # beside ranks that share the model, each rank of FSDP has one network link
        run.preset, layout, tokens=run.tokens, efficiency=1.0, recompute=run.recompute, ranks_of_a_host=8 if alone else 1
    )
    experts, used = model.experts
    more = 4 * model.attention * run.sequence / run.tensor + 2 * experts * (used - 1 / run.expert)  # operations of a token
    assert isinstance(hardware.compute_times, dict)
    compute = {}
    for unit, (forward, _) in hardware.compute_times.items():
        own = 0.0 if unit == "embed" else forward + unit.startswith("layers") * more * run.tokens / GPUS[run.preset].flops
        compute[unit] = own / efficiency, (3 if run.recompute else 2) * own / efficiency
    share = 1 / run.fsdp
    step_s = fs.inspect.predict(schedule, replace(hardware, compute_times=compute, update_s=share * hardware.update_s)).step_s
    return run.tokens / step_s / run.tensor / run.pipeline


def predicted_memory(run: Run, layout: fs.Layout, schedule: fs.schedules.Schedule) -> float:
    """Return predicted GiB: all inputs of matrices, or those of layers if they are recomputed, and logits in float32 twice."""
    costs = estimated_costs(layout, order_of(layout), run.tokens)
    names = tuple(unit.name for unit in layout.units if unit.name.startswith("layers")) if run.recompute else ()
    logits = 2 * 4 * run.tokens * MODELS[run.model].vocabulary
    unused = fs.inspect.Hardware(compute_times=(0.0, 0.0), bandwidth=1.0, memory_bandwidth=1.0)
    kept = int(costs.activation_nbytes(names) + logits) // run.tensor
    step = StepArguments(costs.uses, names, unused, 1, 2, "nccl", kept)
    return step.memory_and_peak(layout, POLICY, arena_nbytes=schedule.arena)[1] / 2**30


def fitted(run: Run, layout: fs.Layout, schedule: fs.schedules.Schedule) -> float:
    """Return the efficiency with which the predicted tokens are the published ones."""
    least, most = 0.01, 4.0
    for _ in range(20):
        middle = (least + most) / 2
        least, most = (middle, most) if predicted(run, layout, schedule, middle) < run.tokens_per_s else (least, middle)
    return (least + most) / 2


def table() -> Iterator[str]:
    """Yield the lines of the table of speeds, an empty line, and the lines of the table of memory, in markdown."""
    yield "| source | run | GPUs | tokens/s of a GPU, published | predicted | error |"
    yield "|---|---|---|---|---|---|"
    efficiencies: dict[str, float] = {}
    rows = ["", "| source | run | GPUs | GiB of a GPU, published | predicted | error |", "|---|---|---|---|---|---|"]
    for run in RUNS:
        layout = layout_of(run)
        schedule = schedule_of(layout)
        is_first = run.group not in efficiencies
        if is_first:
            efficiencies[run.group] = fitted(run, layout, schedule)
        found = predicted(run, layout, schedule, efficiencies[run.group])
        head = f"| {run.source} | {run.model}, {run.group}, {run.what} | {run.gpus:,} {run.gpu}"
        shown = f"{found:,.0f} | {found / run.tokens_per_s - 1:+.0%}"
        if is_first:
            shown = f"efficiency {efficiencies[run.group]:.2f} from here | "
        yield f"{head} | {run.tokens_per_s:,.0f} | {shown} |"
        if run.memory:
            memory = predicted_memory(run, layout, schedule)
            rows.append(f"{head} | {run.memory:.1f} | {memory:.1f} | {memory / run.memory - 1:+.0%} |")
    yield from rows


if __name__ == "__main__":
    print("\n".join(table()))
