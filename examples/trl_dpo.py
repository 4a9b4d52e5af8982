"""DPO of TRL on a Llama under ZeRO-3; the reference is the model without its adapter. DistributedDataParallel beside it.

python examples/trl_dpo.py                                              two processes, on CPUs

It prints the losses of both runs, which are equal.
"""

import os

import launch_example
import peft
import small_models
import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars

import fsharp as fs
from fsharp.huggingface.trainer import Trainer

disable_progress_bars()


class DPOTrainer(Trainer, trl.DPOTrainer):
    """TRL's, for sharded modules."""


def train(kind, strategy, options):
    """Prefer lines as they are to the same lines in sWAPPED cASE."""
    lines = small_models.lines(8 * options.steps)
    rows = [{"prompt": x[:8], "chosen": x[8:], "rejected": x[8:].swapcase()} for x in lines]
    args = trl.DPOConfig(
        str(options.out), use_cpu=True, bf16=False, max_steps=options.steps, per_device_train_batch_size=4, learning_rate=1e-2,
        activation_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, log_level="error",
    )  # fmt: skip
    lora, tokenizer = peft.LoraConfig(task_type="CAUSAL_LM"), small_models.byte_tokenizer()
    model = small_models.llama(len(tokenizer), bos_token_id=None, eos_token_id=0, pad_token_id=0)
    trainer = kind(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=lora)
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
    launch_example.main(main, small_models.Options)
