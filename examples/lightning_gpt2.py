"""A GPT-2 of transformers under ZeRO-3 in Lightning's Trainer, which saves and resumes; DistributedDataParallel beside it.

python examples/lightning_gpt2.py                                       two processes, on CPUs

It prints the losses of both runs. They differ by rounding only, about 1e-4.
"""

import os

import launch_example
import lightning.pytorch as pl
import small_models
import torch

import fsharp as fs
from fsharp.lightning.trainer import Strategy

BATCH = 16  # sequences of all ranks in a step


class Task(pl.LightningModule):
    def __init__(self, strategy=None):
        super().__init__()
        self.model, self.strategy, self.losses = None, strategy, []

    def configure_model(self):
        self.model = small_models.gpt2()
        if self.strategy is not None:
            fs.shard_module(self.model, strategy=self.strategy, units="transformer.h.*")

    def configure_optimizers(self):
        params, adamw = self.model.parameters(), torch.optim.AdamW
        return adamw(params, 3e-3) if self.strategy is None else fs.ShardedOptimizer(params, adamw, lr=3e-3)

    def training_step(self, rows, index):
        loss = self.model(input_ids=rows, labels=rows).loss
        self.losses.append(self.trainer.strategy.reduce(loss.detach()))
        return loss


def train(task, strategy, options, epochs, resume=None):
    rows = small_models.rows(BATCH * options.steps // 2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=epochs, gradient_clip_val=1.0, **quiet)
    trainer.fit(task, torch.utils.data.DataLoader(rows, batch_size=BATCH // ranks), ckpt_path=resume)
    trainer.save_checkpoint(options.out / ("ddp.ckpt" if strategy == "ddp" else "last.ckpt"))
    return torch.stack(task.losses)


def main(options):
    """Train an epoch of half of the steps, then another."""
    first = train(Task(fs.zero3("dp")), Strategy(), options, 1)
    second = train(Task(fs.zero1("dp")), Strategy(), options, 2, resume=options.out / "last.ckpt")
    launch_example.show(torch.cat([first, second]), train(Task(), "ddp", options, 2), "under DDP")


if __name__ == "__main__":
    launch_example.main(main, small_models.TwoEpochs, batch=BATCH)
