"""Train a small Llama of TransformerEngine's modules in FP8 under ZeRO-3, on GPUs, or on a CPU by a stand-in for its kernels.

python examples/te_llama.py                                             two processes; without two GPUs, on the CPU
torchrun --nproc-per-node 1 examples/te_llama.py                        on a GPU
torchrun --nproc-per-node 4 examples/te_llama.py --recipe mxfp8         blocks of 32 values, as on Blackwell

Each process has a GPU of its own, or all of them are on the CPU.

It prints the losses of both runs. They differ by up to about 0.03, as each rank scales activations by those of its own samples.
"""

import importlib
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import launch_example
import torch
from gpt.data import load, random_starts, windows
from torch import nn
from torch.nn import functional as F

import fsharp as fs

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 128, 4, 3, 64, 8  # BATCH: sequences of all ranks in a step
LR = 2e-3
RECIPES = {
    "current": ("Float8CurrentScaling", (9, 0)),
    "block": ("Float8BlockScaling", (9, 0)),
    "mxfp8": ("MXFP8BlockScaling", (10, 0)),
    "nvfp4": ("NVFP4BlockScaling", (10, 0)),
}


@dataclass
class Options:
    """Train a Llama of 0.8M parameters in FP8 on the source of Python's standard library, sharded and unsharded."""

    steps: int = 30
    """Steps of the optimizer."""
    recipe: Literal["current", "block", "mxfp8", "nvfp4"] = "current"
    """How TransformerEngine scales. Hopper has the first two; without a GPU the architecture is one that has the recipe."""


def transformer_engine(recipe, device):
    """TransformerEngine, a recipe of it, and a context for the architecture that a stand-in is to have."""
    if device.type == "cuda":
        te, architecture = importlib.import_module("transformer_engine.pytorch"), nullcontext()
    else:
        sys.path.append(str(Path(__file__).parents[1]))
        te_cpu = importlib.import_module("tests.te_cpu")
        te, architecture = te_cpu.load(), te_cpu.architecture(*RECIPES[recipe][1])
    options = {"disable_stochastic_rounding": True} if recipe == "nvfp4" else {}
    return te, getattr(importlib.import_module("transformer_engine.common.recipe"), RECIPES[recipe][0])(**options), architecture


def rotated(x, rotation):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


class Block(nn.Module):
    def __init__(self, te):
        super().__init__()
        about = {"bias": False, "params_dtype": torch.bfloat16}
        self.qkv = te.LayerNormLinear(WIDTH, 3 * WIDTH, normalization="RMSNorm", **about)
        self.out = te.Linear(WIDTH, WIDTH, **about)
        self.mlp = te.LayerNormMLP(WIDTH, 2 * WIDTH, normalization="RMSNorm", activation="swiglu", **about)

    def forward(self, x, rotation):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q, rotation), rotated(k, rotation), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Llama(nn.Module):
    def __init__(self, te):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(256, WIDTH), nn.ModuleList(Block(te) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        angles = torch.arange(tokens.shape[1])[:, None] / 10_000 ** torch.arange(0, 1, 2 * HEADS / WIDTH)
        rotation, x = torch.polar(torch.ones_like(angles), angles).to(tokens.device), self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def build(te, recipe, device):
    torch.manual_seed(0)
    with torch.device(device), te.quantized_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True):
        return Llama(te).to(torch.bfloat16)  # the main copies of what is not quantized begin in bfloat16, too


def train(te, recipe, model, update, batches):
    losses = []
    for batch in batches:
        with te.autocast(enabled=True, recipe=recipe):
            logits = model(batch["inputs"])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        update()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_unsharded(te, recipe, device, batches):
    model = build(te, recipe, device)
    start = {p: p.get_high_precision_init_val() if hasattr(p, "quantize_") else p.detach() for p in model.parameters()}
    main = {p: value.to(device, torch.float32) for p, value in start.items()}
    optimizer = torch.optim.AdamW(main.values(), lr=LR)

    @torch.no_grad()
    def update():
        for p, copy in main.items():
            copy.grad, p.grad = p.grad.float(), None
        optimizer.step()
        for p, copy in main.items():
            p.quantize_(copy.to(torch.bfloat16)) if hasattr(p, "quantize_") else p.copy_(copy)

    return train(te, recipe, model, update, batches)


def main(options):
    comm = fs.connect(fs.Mesh({"dp": int(os.environ["WORLD_SIZE"])}))  # over NCCL, if there is a GPU for each process
    te, recipe, architecture = transformer_engine(options.recipe, comm.device)
    with architecture:
        precision = fs.Precision(compute=torch.bfloat16, main=torch.float32)
        model = build(te, recipe, comm.device)
        model = fs.shard_module(model, mesh=comm, strategy=fs.zero3("dp"), units=[Block], precision=precision)
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)

        def update():
            optimizer.step()
            optimizer.zero_grad()

        text, rank, size = load().train, comm.rank, comm.mesh.size
        starts = [random_starts(text, BATCH, LENGTH, seed=0, step=step) for step in range(options.steps)]
        batches = [{key: value.to(comm.device) for key, value in windows(text, each, LENGTH).items()} for each in starts]
        mine = [{key: value[rank::size] for key, value in batch.items()} for batch in batches]
        losses = fs.collectives.all_reduce(train(te, recipe, model, update, mine), comm, "dp") / size
        if rank == 0:
            unsharded = train_unsharded(te, recipe, comm.device, batches)
            launch_example.show(losses, unsharded, "unsharded")
            at_rest, plain = model.layout.nbytes("params"), model.layout.nbytes_unsharded
            print(f"bytes of parameters on a rank: {at_rest}; of the whole model in bfloat16: {plain}")


if __name__ == "__main__":
    launch_example.main(main, Options, batch=BATCH)
