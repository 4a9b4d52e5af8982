"""torchtitan's Llama: fs.shard_module in place of parallelize_llama, whose FSDP2 trains the same beside it.

python examples/torchtitan_llama.py                                     two processes, on CPUs

It prints the losses of both runs. They differ by rounding only, about 2e-6.
"""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import launch_example
import torch
from gpt.data import load, random_starts, windows
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import fsharp as fs

if find_spec("triton") is None:  # torchtitan's kernels for experts are for GPUs, and imported with every model
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[kernels] = type("NoKernels", (type(sys),), {"__getattr__": lambda module, name: None})(kernels)

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

BATCH = 8  # sequences of all ranks in a step


@dataclass
class Options:
    """Train torchtitan's debug model on the source of Python's standard library."""

    steps: int = 10


def build():
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"](attn_backend="varlen")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # runs on CPUs
    (model := config.build()).init_states()
    return model


def by_fsdp2(size):
    parallel_dims.device_type = "cpu"  # torchtitan takes CUDA for granted
    ones, backend = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep"), 1), {"spmd_backend": "partial_dtensor"}
    model = parallelize_llama(
        build(), parallel_dims=ParallelDims(**ones, dp_shard=size, world_size=size, **backend), ac_config=None, dump_folder="",
        parallelism=ParallelismConfig(**backend), training=TrainingConfig(mixed_precision_param="float32"),
        compile_config=CompileConfig(),
    )  # fmt: skip
    for each in [each for each in model.modules() if isinstance(each, FSDPModule)]:
        each.set_gradient_divide_factor(size)  # torchtitan sums gradients, and divides the loss instead
    return model


def train(model, optimizer, comm, steps):
    corpus, losses = load().train, []
    for step in range(steps):
        batch = windows(corpus, random_starts(corpus, BATCH, 64, seed=0, step=step)[comm.rank :: comm.mesh.size], 64)
        loss = cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fs.collectives.all_reduce(loss.detach(), comm, "dp") / comm.mesh.size)
    return torch.stack(losses)


def main(options):
    comm = fs.connect(fs.Mesh({"dp": int(os.environ["WORLD_SIZE"])}), device_type="cpu")
    model = fs.shard_module(build(), mesh=comm, strategy=fs.zero3("dp"), units="layers.*")
    sharded = train(model, fs.ShardedOptimizer(model.parameters(), AdamW, lr=1e-3), comm, options.steps)
    fsdp2 = train(other := by_fsdp2(comm.mesh.size), AdamW(other.parameters(), lr=1e-3), comm, options.steps)
    launch_example.show(sharded, fsdp2, "under FSDP2")


if __name__ == "__main__":
    launch_example.main(main, Options, batch=BATCH)
