"""A GPT-2 of transformers under ZeRO-3 in a loop of accelerate, which saves and resumes; DistributedDataParallel beside it.

python examples/accelerate_gpt2.py                                      two processes, on CPUs

It prints the losses of both runs. They differ by rounding only, about 1e-6.
"""

import accelerate
import launch_example
import small_models
import torch
from torch.utils.data import DataLoader

import fsharp as fs
from fsharp.huggingface.accelerator import Accelerator


def sharded(strategy):
    model = fs.shard_module(small_models.gpt2(), strategy=strategy, units="transformer.h.*")
    return model, fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)


def train(kind, build, options, *, resume=False):
    """Train an epoch of half of the steps, each with two microbatches."""
    accelerator, folder = kind(cpu=True, gradient_accumulation_steps=2), options.out / kind.__module__
    loader = DataLoader(small_models.rows(8 * options.steps), batch_size=8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(*build(), loader)
    if resume:
        accelerator.load_state(folder)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    accelerator.save_state(folder)
    return torch.stack(losses).view(-1, 2).mean(1)  # of each step


def main(options):
    first = train(Accelerator, lambda: sharded(fs.zero3("dp")), options)
    second = train(Accelerator, lambda: sharded(fs.zero1("dp")), options, resume=True)
    ddp = [train(accelerate.Accelerator, small_models.gpt2_and_adamw, options, resume=again) for again in (False, True)]
    launch_example.show(torch.cat([first, second]), torch.cat(ddp), "under DDP")


if __name__ == "__main__":
    launch_example.main(main, small_models.TwoEpochs, batch=8)
