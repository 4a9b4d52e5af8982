"""A GPT-2 of transformers under ZeRO-3 in Lightning's Trainer, which saves and resumes; DistributedDataParallel beside it.

python examples/lightning_gpt2.py                                       two processes, on CPUs

It prints the losses of both runs. They differ by rounding only, about 1e-4.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import launch_example
import lightning.pytorch as pl
import torch
from gpt.data import load, random_starts, windows
from transformers import GPT2Config, GPT2LMHeadModel

import fsharp as fs
from fsharp.lightning.trainer import Strategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@dataclass
class Options:
    """Train GPT-2 on the source of Python's standard library."""

    steps: int = 20
    out: Path = Path("runs/lightning")


class Task(pl.LightningModule):
    def __init__(self, strategy=None):
        super().__init__()
        self.model, self.strategy, self.losses = None, strategy, []

    def configure_model(self):
        torch.manual_seed(0)
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, **sizes))
        if self.strategy is not None:
            comm = fs.connect(fs.Mesh({"dp": int(os.environ["WORLD_SIZE"])}), device_type="cpu")
            fs.shard_module(self.model, mesh=comm, strategy=self.strategy, units="transformer.h.*")

    def configure_optimizers(self):
        kind = torch.optim.AdamW
        return (
            kind(self.model.parameters(), 3e-3)
            if self.strategy is None
            else fs.ShardedOptimizer(self.model.parameters(), kind, lr=3e-3)
        )

    def training_step(self, rows, index):
        loss = self.model(input_ids=rows, labels=rows).loss
        self.losses.append(self.trainer.strategy.reduce(loss.detach()))
        return loss


def train(task, strategy, options, epochs, resume=None):
    starts = random_starts(corpus := load().train, 8 * options.steps, 64, seed=0, step=0)
    rows = windows(corpus, starts, 64)["inputs"]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=epochs, gradient_clip_val=1.0, **quiet)
    trainer.fit(task, torch.utils.data.DataLoader(rows, batch_size=16 // ranks), ckpt_path=resume)
    trainer.save_checkpoint(options.out / ("ddp.ckpt" if strategy == "ddp" else "last.ckpt"))
    return torch.stack(task.losses)


def main(options):
    """Train an epoch of half of the steps, then another."""
    first = train(Task(fs.zero3("dp")), Strategy(), options, 1)
    second = train(Task(fs.zero1("dp")), Strategy(), options, 2, resume=options.out / "last.ckpt")
    launch_example.show(torch.cat([first, second]), train(Task(), "ddp", options, 2), "under DDP")


if __name__ == "__main__":
    launch_example.main(main, Options)
