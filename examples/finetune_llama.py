"""Train a Llama of transformers under ZeRO-3, as the unsharded one is trained, and save it for from_pretrained().

python examples/finetune_llama.py                                       two processes
torchrun --nproc-per-node 4 examples/finetune_llama.py --reentrant      activation checkpoints of the older kind
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import launch
import torch
from gpt.data import even_starts, load, random_starts, windows
from safetensors.torch import save_file
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.utils.logging import disable_progress_bar

import fsharp as fs

MICROBATCHES, BATCH, LENGTH = 2, 8, 96  # microbatches, sequences in each of them (of all ranks), bytes
LR = 1e-3
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    use_cache=False,
)


@dataclass
class Options:
    """Train a Llama of 1.0M parameters on the source of Python's standard library, sharded and unsharded."""

    steps: int = 40
    """Steps of the optimizer."""
    reentrant: bool = False
    """How activations are checkpointed."""
    out: Path = Path("runs/llama")
    """Folder for the trained model."""


def build(options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    model.activation_checkpointing_enable({"use_reentrant": options.reentrant})
    return model


def train(model, optimizer, batches, *, accumulate, clip):
    """The same loop for a model of any kind; the loss and the norm of the gradient in each step."""
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    rows = []
    for microbatches in batches:
        loss = torch.zeros(())
        for i, tokens in enumerate(microbatches):
            with accumulate() if i < len(microbatches) - 1 else nullcontext():
                part = model(input_ids=tokens, labels=tokens).loss / len(microbatches)
                part.backward()
            loss += part.detach()
        rows.append(torch.stack([loss, clip(1.0)]))
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
    return torch.stack(rows)


def train_unsharded(options, batches):
    model = build(options)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR)
    return train(model, optimizer, batches, accumulate=nullcontext, clip=partial(clip_grad_norm_, parameters))


def save(model, folder):
    """A file for each parameter, and their index: no rank ever holds more than a unit of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, value in model.full_parameters():  # on every rank
        files[name] = f"{name}.safetensors"
        if model.comm.rank == 0:
            save_file({name: value}, folder / files[name], metadata={"format": "pt"})
    if model.comm.rank == 0:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        model.config.save_pretrained(folder)


@torch.no_grad()
def evaluate(model, tokens):
    return model.eval()(input_ids=tokens, labels=tokens).loss


def main(options):
    model = fs.shard_module(build(options), strategy=fs.zero3("dp"), units=[LlamaDecoderLayer])
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    rank, size = model.comm.rank, model.comm.mesh.size

    corpus = load()
    starts = [random_starts(corpus.train, MICROBATCHES * BATCH, LENGTH, seed=0, step=step) for step in range(options.steps)]
    batches = [windows(corpus.train, s, LENGTH)["inputs"].view(MICROBATCHES, BATCH, LENGTH) for s in starts]
    mine = [microbatches[:, rank::size] for microbatches in batches]

    sharded = train(model, optimizer, mine, accumulate=model.accumulate, clip=model.clip_grad_norm_)
    sharded = fs.comm.all_reduce(sharded, model.comm, "dp") / size  # the norm is the same on all ranks
    if rank == 0:
        unsharded = train_unsharded(options, batches)
        for step in sorted({0, options.steps // 3, 2 * options.steps // 3, options.steps - 1}):
            print(f"step {step:3d}  loss {sharded[step, 0]:.6f}  unsharded {unsharded[step, 0]:.6f}")
        loss, norm = (sharded - unsharded).abs().max(0).values
        print(f"largest difference of losses {loss:.1e}, of gradient norms {norm:.1e}")

    held_out = windows(corpus.held_out, even_starts(corpus.held_out, 4096, LENGTH), LENGTH)["inputs"]
    loss = evaluate(model, held_out)
    save(model, options.out)
    if rank == 0:
        disable_progress_bar()
        loaded = evaluate(LlamaForCausalLM.from_pretrained(options.out), held_out)
        print(f"held-out loss {loss:.6f}; loaded by from_pretrained(): {loaded:.6f}, difference {abs(loss - loaded):.1e}")


if __name__ == "__main__":
    launch.main(main, Options)
