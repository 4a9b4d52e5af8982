"""DPO of TRL on a Llama under ZeRO-3; the reference is the model without its adapter. DistributedDataParallel beside it.

python examples/trl_dpo.py                                              two processes, on CPUs

It prints the losses of both runs, which are equal.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import launch_example
import peft
import torch
import transformers
import trl
from datasets import Dataset
from gpt.data import load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import fsharp as fs
from fsharp.huggingface.trainer import Trainer

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class DPOTrainer(Trainer, trl.DPOTrainer):
    """TRL's, for sharded modules."""


@dataclass
class Options:
    """Prefer lines of Python's standard library as they are to the same lines in sWAPPED cASE."""

    steps: int = 10
    out: Path = Path("runs/dpo")


def byte_tokenizer():
    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    whole = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<end>", pad_token="<end>")


def train(kind, strategy, options):
    lines = bytes(load().train[:400_000].tolist()).decode(errors="ignore").split("\n")
    rows = [{"prompt": x[:8], "chosen": x[8:], "rejected": x[8:].swapcase()} for x in lines if 40 < len(x) < 80]
    args = trl.DPOConfig(
        str(options.out), use_cpu=True, bf16=False, max_steps=options.steps, per_device_train_batch_size=4, learning_rate=1e-2,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, log_level="error",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=257, **SIZES))
    lora, data = peft.LoraConfig(task_type="CAUSAL_LM"), Dataset.from_list(rows[: 8 * options.steps])
    trainer = kind(model, args=args, train_dataset=data, processing_class=byte_tokenizer(), peft_config=lora)
    if strategy is not None:
        comm = fs.connect(fs.Mesh({"dp": int(os.environ["WORLD_SIZE"])}), device_type="cpu")
        fs.shard_module(trainer.model, mesh=comm, strategy=strategy, units="**.layers.*")  # in place, after TRL's adapter
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row])


def main(options):
    sharded = train(DPOTrainer, fs.zero3("dp"), options)
    launch_example.show(sharded, train(trl.DPOTrainer, None, options), "under DDP")


if __name__ == "__main__":
    launch_example.main(main, Options)
