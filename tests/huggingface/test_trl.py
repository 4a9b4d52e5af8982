"""TRL's DPOTrainer with fsharp's Trainer: losses as under DDP; the reference is the model without its adapter."""

import os

import pytest
import torch

import fsharp as fs
from tests.huggingface.test_accelerator import as_torchrun
from tests.huggingface.test_peft import adapter
from tests.huggingface.test_trainer import ARGUMENTS, tiny_llama


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:60]
    whole = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(["<end>", *letters])}, merges=[]))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<end>", pad_token="<end>")


def preferences():
    from datasets import Dataset

    words = ["+1", "2-3", "(4)", "56", "789"]
    rows = [{"prompt": f"{i}*", "chosen": words[i % 5], "rejected": words[(i + 2) % 5] * 2} for i in range(16)]
    return Dataset.from_list(rows)


def train(kind, strategy, folder, *, lora=True, resume="", **options):
    """Train a Llama, with LoRA or beside a reference, and return numbers of all steps. ``strategy`` None means DDP."""
    import peft
    import trl

    args = trl.DPOConfig(folder, bf16=False, gradient_checkpointing=False, **ARGUMENTS | options)
    data, tokenizer = preferences(), byte_tokenizer()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
    reference = None if lora else tiny_llama()
    more = {"train_dataset": data, "eval_dataset": data, "processing_class": tokenizer, "peft_config": config}
    trainer = kind(tiny_llama(), reference, args=args, **more)
    for each in (trainer.model, reference) if strategy else ():
        if each is not None:
            fs.shard_module(each, strategy=strategy, units="**.layers.*")
    trainer.train(resume_from_checkpoint=resume or None)
    names = ("loss", "grad_norm", "rewards/margins", "logps/chosen")
    rows = [[row[name] for name in names] for row in trainer.state.log_history if "loss" in row]
    return {"rows": rows, "evaluated": trainer.evaluate()["eval_loss"]}, trainer


def on_two_ranks(folder, comm):
    as_torchrun(comm)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import trl

    from fsharp.huggingface.trainer import Trainer

    class DPOTrainer(Trainer, trl.DPOTrainer):
        pass

    found = {}
    for name, kind, strategy in (("DDP", trl.DPOTrainer, None), ("zero3", DPOTrainer, fs.zero3("dp"))):
        found[name], trainer = train(kind, strategy, f"{folder}/{name}", save_strategy="epoch")
        trainer.save_model(f"{folder}/{name}/adapter")
    found["resumed"], trainer = train(DPOTrainer, fs.zero2("dp"), f"{folder}/b", resume=f"{folder}/zero3/checkpoint-2")
    trainer.save_model(f"{folder}/resumed/adapter")
    found["whole, DDP"] = train(trl.DPOTrainer, None, f"{folder}/c", lora=False)[0]
    found["whole"] = train(DPOTrainer, fs.zero3("dp"), f"{folder}/d", lora=False)[0]
    return found


pytestmark = pytest.mark.deep


def close(first, second):
    torch.testing.assert_close(torch.tensor(first["rows"]), torch.tensor(second["rows"]), rtol=1e-4, atol=1e-5)
    assert first["evaluated"] == pytest.approx(second["evaluated"], rel=1e-4)


def test_dpo_trains_an_adapter_as_with_ddp(found, folder):
    losses = [row[0] for row in found[0]["DDP"]["rows"]]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    close(found[0]["zero3"], found[0]["DDP"])
    torch.testing.assert_close(adapter(folder / "zero3" / "adapter")[0], adapter(folder / "DDP" / "adapter")[0])


def test_dpo_is_resumed_under_another_strategy(found, folder):
    torch.testing.assert_close(found[0]["resumed"]["rows"][-2:], found[0]["zero3"]["rows"][2:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapter(folder / "resumed" / "adapter")[0], adapter(folder / "zero3" / "adapter")[0])


def test_dpo_trains_a_whole_model_beside_a_sharded_reference(found):
    close(found[0]["whole"], found[0]["whole, DDP"])
