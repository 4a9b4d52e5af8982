"""LoRA of PEFT on a Llama under ZeRO-3, by transformers' Trainer; the same training under DistributedDataParallel beside it.

python examples/peft_lora.py                                            two processes, on CPUs

It prints the losses of both runs, which are equal.
"""

import os

import launch_example
import small_models
import torch
import transformers
from peft import LoraConfig, get_peft_model

import fsharp as fs
from fsharp.huggingface.trainer import Trainer


def build():
    return get_peft_model(small_models.llama(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def train(kind, model, options):
    rows = small_models.rows(16 * options.steps)
    args = transformers.TrainingArguments(
        str(options.out), use_cpu=True, max_steps=options.steps, per_device_train_batch_size=8, learning_rate=1e-2,
        max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, log_level="error",
    )  # fmt: skip
    trainer = kind(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.save_model(str(options.out / kind.__module__))  # the adapter, as PEFT writes it
    return torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row])


def main(options):
    comm = fs.connect(fs.Mesh({"dp": int(os.environ["WORLD_SIZE"])}), device_type="cpu")
    model = fs.shard_module(build(), mesh=comm, strategy=fs.zero3("dp"), units="**.layers.*")
    sharded = train(Trainer, model, options)
    launch_example.show(sharded, train(transformers.Trainer, build(), options), "under DDP")


if __name__ == "__main__":
    launch_example.main(main, small_models.Options)
