"""Who is compared on one GPU. All train the same Llama.

Unless a name says otherwise they compute in bfloat16, reduce in float32, and keep float32 copies for the optimizer. Rows named
FP8 have the products of blocks in 8 bits, by TransformerEngine.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsharp as fs
from benchmarks import contenders as c, llama
from benchmarks.gpu_page import BASE, COMPILED, COMPILED_BASE, FP8, FP8_BASE, GRAPH, MODULE, OURS
from benchmarks.memory import SEPARATE
from fsharp.testing import DebugPolicy

SKIPPED, FP8_ALONE = "fsharp zero3, axis skipped", "FP8, not sharded"
NEWER, MEGATRON = "FSDP2, newer setters", "megatron-fsdp"
SETTERS = ("set_separate_reduce_scatter_group", "set_reduce_scatter_max_input_buffers")
"""What torch 2.13 has added to FSDP2."""
WARMUP = 3
"""Steps that :class:`GraphContender` makes before its capture, all on one batch; so all contenders begin."""
PRECISION = fs.Precision(compute=torch.bfloat16, main=torch.float32, wire=torch.float32)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
FORCED = DebugPolicy(trivial_axes=True)


class Unavailable(Exception):
    """A contender that cannot run here, and why."""


class Trains(Protocol):
    """What is asked of a contender here."""

    name: str

    def step(self, batch: c.Batch) -> torch.Tensor:
        """One training step; the loss."""


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        name: in tables.
        build: makes the contender.
        peer: the name of the row whose step, host time, memory and losses are the measure.
        is_profiled: whether the overlap of its collectives is looked at.
        phase: when it is measured. A compiler takes a time that nobody knows, and a capture that fails may leave the device
            unusable: these come after everything else.
    """

    name: str
    build: Callable[[], Trains]
    peer: str = BASE
    is_profiled: bool = False
    phase: Literal["rounds", "compiled", "graph"] = "rounds"


def rows(shape: llama.Shape, mesh: DeviceMesh, batch: c.Batch) -> list[Row]:
    """Return all, in the order of the tables. ``batch`` is the one on which all warm up."""
    kind, half = mesh.device_type, torch.bfloat16
    build = partial(llama.build, shape, device=kind)
    ours = partial(_ours, shape, mesh)
    return [
        Row("bfloat16 throughout", lambda: c.ModuleContender("bfloat16 throughout", build(dtype=half))),
        Row("autocast", lambda: c.ModuleContender("autocast", Autocast(build(), kind))),
        Row(BASE, lambda: _fsdp2(BASE, build(), mesh), is_profiled=True),
        Row(NEWER, lambda: _newer(_fsdp2(NEWER, build(), mesh)), is_profiled=True),
        Row(OURS, lambda: ours(OURS), is_profiled=True),
        Row(SKIPPED, lambda: ours(SKIPPED, policy=fs.SchedulePolicy())),
        Row(SEPARATE, lambda: ours(SEPARATE, policy=DebugPolicy(trivial_axes=True, keep_gradients=True))),
        Row(MODULE, lambda: _sharded(MODULE, build(), mesh, [llama.Block]), is_profiled=True),
        Row(MEGATRON, lambda: _megatron(build(dtype=half))),
        Row(FP8_ALONE, lambda: QuantizedContender(FP8_ALONE, _quantized(shape, kind)), FP8_ALONE),
        Row(FP8_BASE, lambda: _fp8_fsdp2(_quantized(shape, kind), mesh), FP8_ALONE, is_profiled=True),
        Row(FP8, lambda: _sharded(FP8, _quantized(shape, kind), mesh, [QuantizedBlock]), FP8_ALONE, is_profiled=True),
        Row(COMPILED_BASE, lambda: _fsdp2(COMPILED_BASE, _compiled(build()), mesh), COMPILED_BASE, phase="compiled"),
        Row(COMPILED, lambda: ours(COMPILED, function=_compiled_block()), COMPILED_BASE, phase="compiled"),
        Row(GRAPH, lambda: GraphContender(GRAPH, *_functions(shape, mesh), batch), phase="graph"),
    ]


class Autocast(torch.nn.Module):
    """Plain PyTorch: float32 parameters, cast where they are used."""

    def __init__(self, module: torch.nn.Module, kind: str) -> None:
        super().__init__()
        self.module, self.kind = module, kind

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        with torch.autocast(self.kind, torch.bfloat16):
            return self.module(inputs, targets)


def _fsdp2(name: str, module: llama.Llama, mesh: DeviceMesh) -> c.ModuleContender:
    for part in (module.embed, *module.layers):
        fully_shard(part, mesh=mesh, mp_policy=MIXED)
    fully_shard(module.head, mesh=mesh, mp_policy=MIXED, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, mp_policy=MIXED)
    return c.ModuleContender(name, module)


def _newer(contender: c.ModuleContender) -> c.ModuleContender:
    """A process group of its own for reductions, two of their inputs under way, and gathers issued a block ahead."""
    module: Any = contender.module
    if missing := [name for name in SETTERS if not hasattr(module, name)]:
        raise Unavailable(f"torch {torch.__version__} has no {' and no '.join(missing)}")
    for before, after in pairwise(module.layers):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    module.set_separate_reduce_scatter_group(True)
    module.set_reduce_scatter_max_input_buffers(2)
    return contender


def _megatron(module: llama.Llama) -> c.ModuleContender:
    import megatron_fsdp as mf

    sharded = mf.fully_shard_model(
        module=module,
        fsdp_unit_modules=[llama.Embed, llama.Block, llama.Head],
        mixed_precision_policy=mf.MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32),
    )
    contender = c.ModuleContender(MEGATRON, sharded)
    mf.fully_shard_optimizer(contender.optimizer)  # in place
    return contender


def _functions(shape: llama.Shape, mesh: DeviceMesh, **options: Any) -> tuple[Any, Callable[..., Any], fs.Comm]:
    """Parameters, the loss over them, and the ranks."""
    params = llama.tree_of(llama.build(shape, device=mesh.device_type))
    return params, partial(llama.loss, heads=shape.heads, **options), fs.ProcessGroupComm(mesh)


def _ours(
    shape: llama.Shape, mesh: DeviceMesh, name: str, policy: fs.SchedulePolicy = FORCED, **options: Any
) -> c.FsharpContender:
    params, loss_fn, comm = _functions(shape, mesh, **options)
    return c.FsharpContender(name, params, loss_fn, comm, fs.zero3("dp"), policy=policy, precision=PRECISION)


def _sharded(name: str, module: torch.nn.Module, mesh: DeviceMesh, units: Any) -> c.ShardedContender:
    comm, strategy = fs.ProcessGroupComm(mesh), fs.zero3("dp")
    return c.ShardedContender(name, module, comm, strategy, units, precision=PRECISION, policy=FORCED)


class GraphContender:
    """fsharp's whole step as one CUDA graph. ``done``: steps that it has made before it is a graph."""

    done = WARMUP

    def __init__(self, name: str, params: Any, loss_fn: Callable[..., Any], comm: fs.Comm, batch: c.Batch) -> None:
        self.name = name
        layout, tx = fs.plan(params, comm.mesh, fs.zero3("dp"), units="layers.*", precision=PRECISION), c.adamw(capturable=True)
        state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm, donate=True)
        scheduler = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True, gather_at_start=False))
        step: Any = scheduler(fs.train_step(loss_fn, tx, donate=True))
        self.captured = fs.schedules.CapturedStep(step, state, batch, warmup=WARMUP)

    def step(self, batch: c.Batch) -> torch.Tensor:
        loss: torch.Tensor = self.captured(batch).loss
        return loss.clone()  # the next replay writes to it


# ---------------------------------------------------------------- compiled


def _compiled_block() -> Any:
    """The function that all blocks of all contenders call, compiled. What is between blocks stays as it is."""
    return torch.compile(llama.block, fullgraph=True, dynamic=False)


def _compiled(module: llama.Llama) -> llama.Llama:
    function = _compiled_block()
    for layer in module.layers:
        layer.function = function
    return module


# ---------------------------------------------------------------- TransformerEngine


class QuantizedBlock(torch.nn.Module):
    """:func:`llama.block` of TransformerEngine's modules."""

    def __init__(self, te: Any, shape: llama.Shape) -> None:
        super().__init__()
        about = {"bias": False, "params_dtype": torch.bfloat16}
        self.qkv = te.LayerNormLinear(shape.dim, 3 * shape.dim, normalization="RMSNorm", **about)
        self.out = te.Linear(shape.dim, shape.dim, **about)
        self.mlp = te.LayerNormMLP(shape.dim, shape.hidden, normalization="RMSNorm", activation="swiglu", **about)
        self.heads = shape.heads

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.out(llama.attend(self.qkv(x), (cos, sin), self.heads))
        return x + self.mlp(x)


class QuantizedLlama(llama.Llama):
    """The model with blocks in FP8: their weights rest in 8 bits, and their products take 8 bits."""

    def __init__(self, te: Any, recipe: Any, shape: llama.Shape) -> None:
        super().__init__(shape, partial(QuantizedBlock, te))
        self.autocast = partial(te.autocast, enabled=True, recipe=recipe)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            return super().forward(inputs, targets)


def _quantized(shape: llama.Shape, kind: str) -> QuantizedLlama:
    te: Any = importlib.import_module("transformer_engine.pytorch")
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8CurrentScaling()
    torch.manual_seed(0)
    with torch.device(kind), te.quantized_model_init(enabled=True, recipe=recipe):
        module = QuantizedLlama(te, recipe, shape).to(torch.bfloat16)
    for part in (module.embed, module.head):
        llama.initialize(part, kind)
    return module


def _fp8_fsdp2(module: QuantizedLlama, mesh: DeviceMesh) -> Trains:
    """FSDP2 drives TransformerEngine's hooks, which gather bytes."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in (module.embed, *module.layers, module.head, module):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return QuantizedContender(FP8_BASE, module)


class QuantizedContender:
    """A module with quantized weights, and float32 copies that AdamW updates, from which weights are quantized again."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name, self.module = name, module
        self.main = [_dequantized(c.local(p.detach())) for p in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.main, fused=True, **c.ADAMW)

    def step(self, batch: c.Batch) -> torch.Tensor:
        loss: torch.Tensor = self.module(batch["inputs"], batch["targets"])
        loss.backward()
        with torch.no_grad():
            for p, main in self._pairs():
                main.grad, p.grad = c.local(p.grad).float(), None
            self.optimizer.step()
            for p, main in self._pairs():
                part, main.grad = c.local(p), None
                if hasattr(part, "quantize_"):
                    part.quantize_(main.to(torch.bfloat16))
                else:
                    part.copy_(main)
        return loss.detach()

    def _pairs(self) -> Iterable[tuple[Any, torch.Tensor]]:
        return zip(self.module.parameters(), self.main, strict=True)


def _dequantized(x: Any) -> torch.Tensor:
    whole: torch.Tensor = x.dequantize() if hasattr(x, "quantize_") else x
    return whole.float().clone()
