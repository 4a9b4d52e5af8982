"""Fine-tune a Llama of transformers under ZeRO-3, from a folder of save_pretrained() to one for from_pretrained().

python examples/finetune_llama.py                                       two processes
torchrun --nproc-per-node 4 examples/finetune_llama.py --reentrant      activation checkpoints of the older kind

It prints the losses of both runs. They differ by rounding only, about 1e-6. So do the held-out losses before and after the
export.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree

import launch_example
import torch
from gpt.data import even_starts, load, random_starts, windows
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
    """Folder for the model, before and after, and for checkpoints."""


def build(options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    model.activation_checkpointing_enable({"use_reentrant": options.reentrant})
    return model


def train(model, optimizer, batches, *, accumulate, clip):
    """Train a sharded or unsharded model. Return loss and gradient norm of each step."""
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    rows = []
    for microbatches in batches:
        loss = torch.zeros((), device=microbatches.device)
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
    model = build(options).to(batches[0].device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR)
    return train(model, optimizer, batches, accumulate=nullcontext, clip=partial(clip_grad_norm_, parameters))


def start(options):
    """Return a model, made and sharded on the meta device, with weights from a folder. A rank reads its own part alone."""
    folder = options.out / "pretrained"
    with torch.device("meta"):
        model = build(options)
    model = fs.shard_module(model, strategy=fs.zero3("dp"), units=[LlamaDecoderLayer], initialize=model._init_weights)
    if model.comm.rank == 0:
        build(options).save_pretrained(folder)  # in place of a download
    return fs.checkpoint.load(folder, model, comm=model.comm)


def export(model, optimizer, options):
    """Save a checkpoint, and export it to a folder for from_pretrained()."""
    found = fs.checkpoint.save(options.out, {"model": model, "optimizer": optimizer}, step=options.steps, comm=model.comm)
    folder = options.out / "trained"
    if model.comm.rank == 0:
        rmtree(folder, ignore_errors=True)  # of the run before
        fs.checkpoint.export_safetensors(found, folder, subtree="model")
        model.config.save_pretrained(folder)
    return folder


@torch.no_grad()
def evaluate(model, tokens):
    return model.eval()(input_ids=tokens, labels=tokens).loss


def main(options):
    disable_progress_bar()
    model = start(options)
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    rank, size = model.comm.rank, model.comm.mesh.size

    corpus = load()
    starts = [random_starts(corpus.train, MICROBATCHES * BATCH, LENGTH, seed=0, step=step) for step in range(options.steps)]
    batches = [windows(corpus.train, s, LENGTH)["inputs"].to(model.comm.device) for s in starts]
    batches = [tokens.view(MICROBATCHES, BATCH, LENGTH) for tokens in batches]
    mine = [microbatches[:, rank::size] for microbatches in batches]

    sharded = train(model, optimizer, mine, accumulate=model.accumulate, clip=model.clip_grad_norm_)
    sharded = fs.collectives.all_reduce(sharded, model.comm, "dp") / size  # the norm is the same on all ranks
    if rank == 0:
        unsharded = train_unsharded(options, batches)
        launch_example.show_losses(sharded[:, 0], unsharded[:, 0], "unsharded")
        loss, norm = (sharded - unsharded).abs().max(0).values
        print(f"largest difference between losses: {loss:.1e}, between gradient norms: {norm:.1e}")

    held_out = windows(corpus.held_out, even_starts(corpus.held_out, 4096, LENGTH), LENGTH)["inputs"]
    held_out = held_out.to(model.comm.device)
    loss = evaluate(model, held_out)
    folder = export(model, optimizer, options)
    if rank == 0:
        loaded = evaluate(LlamaForCausalLM.from_pretrained(folder).to(held_out.device), held_out)
        print(f"held-out loss: {loss:.6f}; after from_pretrained(): {loaded:.6f}; difference: {abs(loss - loaded):.1e}")


if __name__ == "__main__":
    launch_example.main(main, Options, batch=BATCH)
