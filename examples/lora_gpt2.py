"""Train a GPT-2 of transformers under ZeRO-2, then adapt it with LoRA; each beside the unsharded model.

python examples/lora_gpt2.py                                            two processes
torchrun --nproc-per-node 4 examples/lora_gpt2.py --strategy hsdp       2 x 2

It prints the losses of both runs. They differ by rounding only, about 1e-6.
"""

import os
from dataclasses import dataclass
from typing import Literal

import launch_example
import torch
import torch.nn.functional as F
from gpt.data import load, random_starts, windows
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.pytorch_utils import Conv1D

import fsharp as fs

BATCH, LENGTH = 16, 64
CONFIG = GPT2Config(
    vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False
)
CONFIG.resid_pdrop = CONFIG.embd_pdrop = CONFIG.attn_pdrop = 0.0  # ranks draw other masks than one process does


@dataclass
class Options:
    """Train GPT-2 (0.8M parameters) on the source of Python's standard library; with LoRA, on the same in sWAPPED cASE."""

    steps: int = 40
    """Steps of the optimizer, in each of the two parts."""
    strategy: Literal["zero2", "zero3", "hsdp"] = "zero2"
    """Where state rests. hsdp arranges the processes as outer=2 x inner=nproc/2."""
    rank: int = 4
    """Of the matrices of LoRA."""
    dtype: Literal["float32", "float64"] = "float32"
    """In float64 it is easy to see that sharded and unsharded runs differ by rounding alone."""


class LoRA(nn.Module):
    """``base(x) + x A B``; B starts as zero."""

    def __init__(self, base, rank):
        super().__init__()
        self.base, dtype = base, base.weight.dtype
        self.a, self.b = nn.Linear(base.nx, rank, bias=False, dtype=dtype), nn.Linear(rank, base.nf, bias=False, dtype=dtype)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def with_lora(model, rank):
    """All of the model frozen, and a trained LoRA beside each of its matrices."""
    torch.manual_seed(1)
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            model.set_submodule(name, LoRA(module, rank))
    return model


def train(model, optimizer, batches, clip):
    """The same loop for a model of any kind; the loss and the norm of the gradient in each step."""
    rows = []
    for batch in batches:
        logits = model(input_ids=batch["inputs"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        rows.append(torch.stack([loss.detach(), clip(1.0)]))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(rows)


def train_both(what, build, batches, mesh, strategy, *, lr):
    """Train the model sharded, and unsharded on rank 0. Compare. Return the trained weights of the sharded one."""
    comm = fs.connect(mesh)
    model = fs.shard_module(build().to(comm.device), mesh=comm, strategy=strategy, units=[GPT2Block])
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=lr)
    say = print if comm.rank == 0 else lambda *_: None
    batches = [{name: x.to(comm.device) for name, x in batch.items()} for batch in batches]
    mine = [{name: x[comm.rank :: comm.mesh.size] for name, x in batch.items()} for batch in batches]
    sharded = train(model, optimizer, mine, model.clip_grad_norm_)
    for axis in comm.mesh.names:
        sharded = fs.collectives.all_reduce(sharded, comm, axis)
    sharded /= comm.mesh.size

    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    kept = sum(x.nbytes for state in optimizer.state_dict()["state"].values() for x in state.values() if x.dim())
    moved = sum(call.nbytes * n for call, n in model.scheduled_step.schedule.collective_counts().items() if "reduce" in call.op)
    say(f"{what}: {trained:,} of {total:,} parameters are trained")
    say(f"  a rank keeps {kept:,} bytes of optimizer state, and sends {moved:,} bytes of gradients in a step")
    if comm.rank == 0:
        alone = build().to(comm.device)
        parameters = [p for p in alone.parameters() if p.requires_grad]
        adamw = torch.optim.AdamW(parameters, lr=lr)
        unsharded = train(alone, adamw, batches, lambda norm: nn.utils.clip_grad_norm_(parameters, norm))
        launch_example.show_losses(sharded[:, 0], unsharded[:, 0], "unsharded")
        loss, norm = (sharded - unsharded).abs().max(0).values
        say(f"  largest difference between losses: {loss:.1e}, between gradient norms: {norm:.1e}")
    return dict(model.named_full_parameters(trained=True))


def main(options):
    size = int(os.environ["WORLD_SIZE"])
    mesh = fs.Mesh({"outer": 2, "inner": size // 2} if options.strategy == "hsdp" else {"dp": size})
    strategy = getattr(fs, options.strategy)(*mesh.names)
    corpus = load().train
    swapped = torch.frombuffer(bytearray(corpus.numpy().tobytes().swapcase()), dtype=torch.uint8)

    def batches(stream, seed):
        starts = [random_starts(stream, BATCH, LENGTH, seed=seed, step=step) for step in range(options.steps)]
        return [windows(stream, s, LENGTH) for s in starts]

    def base():
        torch.manual_seed(0)
        return GPT2LMHeadModel(CONFIG).to(getattr(torch, options.dtype))

    def adapted():
        model = base()
        model.load_state_dict(weights)
        return with_lora(model, options.rank)

    weights = train_both("all", base, batches(corpus, 0), mesh, strategy, lr=1e-3)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]  # tied, and so listed once
    adapters = train_both("LoRA", adapted, batches(swapped, 1), mesh, strategy, lr=1e-2)
    if os.environ["RANK"] == "0":
        print(f"a checkpoint of LoRA has {len(adapters)} tensors, {sum(x.nbytes for x in adapters.values()):,} bytes")


if __name__ == "__main__":
    launch_example.main(main, Options, batch=BATCH)
