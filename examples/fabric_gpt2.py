"""A GPT-2 of transformers under ZeRO-3 in a loop of Lightning's Fabric, which saves and resumes; DDPStrategy beside it.

python examples/fabric_gpt2.py                                          two processes, on CPUs

It prints the losses of both runs. They differ by rounding only, about 1e-6.
"""

import os

import launch_example
import small_models
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader

import fsharp as fs
from fsharp.lightning.fabric import Strategy


def sharded(strategy):
    model = fs.shard_module(small_models.gpt2(), strategy=strategy, units="transformer.h.*")
    return model, fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)


def train(kind, build, options, *, resume=False):
    """Train an epoch of half of the steps, each with two microbatches."""
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=kind())
    fabric.launch()  # before shard_module
    file = options.out / f"{kind.__module__}.ckpt"
    loader = DataLoader(small_models.rows(8 * options.steps), batch_size=8 // fabric.world_size)
    (model, optimizer), loader = fabric.setup(*build()), fabric.setup_dataloaders(loader)
    state, losses = {"model": model, "optimizer": optimizer}, []
    if resume:
        fabric.load(file, state)
    for index, batch in enumerate(loader, 1):
        updates = index % 2 == 0 or index == len(loader)
        with fabric.no_backward_sync(model, enabled=not updates):
            loss = model(input_ids=batch, labels=batch).loss
            fabric.backward(loss / 2)
        losses.append(fabric.all_reduce(loss.detach()))
        if updates:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(file, state)
    return torch.stack(losses).view(-1, 2).mean(1)  # of each step


def main(options):
    first = train(Strategy, lambda: sharded(fs.zero3("dp")), options)
    second = train(Strategy, lambda: sharded(fs.zero1("dp")), options, resume=True)
    ddp = [train(DDPStrategy, small_models.gpt2_and_adamw, options, resume=again) for again in (False, True)]
    launch_example.show(torch.cat([first, second]), torch.cat(ddp), "under DDP")


if __name__ == "__main__":
    launch_example.main(main, small_models.TwoEpochs, batch=8)
