"""LoRA of PEFT on a Llama under ZeRO-3, by transformers' Trainer; the same training under DistributedDataParallel beside it.

python examples/peft_lora.py                                            two processes, on CPUs

It prints the losses of both runs, which are equal.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import launch_example
import torch
import transformers
from gpt.data import load, random_starts, windows
from peft import LoraConfig, get_peft_model

import fsharp as fs
from fsharp.huggingface.trainer import Trainer

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass
class Options:
    """Train LoRA on the source of Python's standard library."""

    steps: int = 20
    out: Path = Path("runs/peft")


def build():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **SIZES))
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def train(kind, model, options):
    rows = windows(corpus := load().train, random_starts(corpus, 16 * options.steps, 64, seed=0, step=0), 64)["inputs"]
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
    launch_example.main(main, Options)
