"""PEFT's LoRA under fsharp's Trainer and Accelerator: as with DistributedDataParallel, and adapters as PEFT writes them."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import fsharp as fs
from tests.huggingface.test_accelerator import as_torchrun
from tests.huggingface.test_trainer import data, tiny_llama, train


def with_lora(**options):
    from peft import LoraConfig, get_peft_model

    model = tiny_llama()
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    )


def with_prompts():
    from peft import PromptEncoderConfig, get_peft_model

    return get_peft_model(
        tiny_llama(), PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)
    )


def sharded(strategy, **options):
    return fs.shard_module(with_lora(**options), strategy=strategy, units="**.layers.*")


def adapter(folder):
    from safetensors.torch import load_file

    return load_file(f"{folder}/adapter_model.safetensors"), json.loads(Path(folder, "adapter_config.json").read_text())


def on_two_ranks(folder, comm):
    as_torchrun(comm)
    import accelerate
    import transformers

    from fsharp.huggingface.accelerator import Accelerator
    from fsharp.huggingface.trainer import Trainer

    epochs = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    found = {}
    for name, kind, model in (
        ("DDP", transformers.Trainer, with_lora()),
        ("zero3", Trainer, sharded(fs.zero3("dp"))),
        ("zero2", Trainer, sharded(fs.zero2("dp"))),
    ):
        found[name], trainer = train(kind, model, f"{folder}/{name}", **epochs)
        trainer.save_model(f"{folder}/{name}/adapter")
    for name, strategy in (("resumed", fs.zero3("dp")), ("resumed, ddp", fs.ddp("dp"))):
        model = sharded(strategy)
        found[name], trainer = train(Trainer, model, f"{folder}/{name}", resume=f"{folder}/zero3/checkpoint-3", **epochs)
        trainer.save_model(f"{folder}/{name}/adapter")
    found["disabled"] = without_adapter(model)
    for name, kind, model in (("DDP", accelerate.Accelerator, with_lora()), ("zero3", Accelerator, sharded(fs.zero3("dp")))):
        found["accelerator", name] = by_accelerator(kind(cpu=True), model, f"{folder}/accelerator/{name}")
    for name, kind, model in (
        ("DDP", transformers.Trainer, with_prompts()),
        ("zero3", Trainer, fs.shard_module(with_prompts(), units="**.layers.*")),
    ):
        found["prompts", name], trainer = train(kind, model, f"{folder}/prompts/{name}", **epochs)
        trainer.save_model(f"{folder}/prompts/{name}/adapter")
    return found


def by_accelerator(accelerator, model, folder):
    """Train in a loop of one's own, save state and adapter, train on, go back to the state, and return all losses."""
    params = model.parameters()
    is_sharded = isinstance(model, fs.ShardedModule)
    optimizer = fs.ShardedOptimizer(params, torch.optim.AdamW, lr=1e-2) if is_sharded else torch.optim.AdamW(params, lr=1e-2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=4))
    losses = []
    for epoch in range(3):
        for batch in loader:
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if epoch == 0:
            accelerator.save_state(f"{folder}/state")
            state = accelerator.get_state_dict(prepared)
            if accelerator.is_main_process:
                model.save_pretrained(folder, state_dict={name.removeprefix("module."): x for name, x in state.items()})
        if epoch == 1:
            accelerator.load_state(f"{folder}/state")
    return losses


def without_adapter(model):
    """Return the loss of a trained model without its adapter, and of the model that the adapter was made for."""
    batch = {name: row[None] for name, row in data()[0].items()}
    with torch.no_grad():
        with model.disable_adapter():
            loss = model(**batch).loss
        return [x.item() for x in (model(**batch).loss, loss, tiny_llama()(**batch).loss)]


pytestmark = pytest.mark.deep


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_the_same_training_as_with_ddp(strategy, found):
    assert len(found[0]["DDP"]["losses"]) == 6
    assert found[0]["DDP"]["losses"][-1] < found[0]["DDP"]["losses"][0]
    for name in ("losses", "norms", "evaluated"):
        torch.testing.assert_close(torch.tensor(found[0][strategy][name]), torch.tensor(found[0]["DDP"][name]))


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_an_adapter_is_written_as_by_peft(strategy, found, folder):
    values, config = adapter(folder / strategy / "adapter")
    expected, of_ddp = adapter(folder / "DDP" / "adapter")
    assert len(expected) == 2 * 2 * 3
    torch.testing.assert_close(values, expected)
    assert config == of_ddp


def test_prompts_are_trained_and_written_as_by_ddp(found, folder):
    """PEFT computes what it writes on rank 0 alone, which raised an error, and the other ranks waited."""
    for name in ("losses", "norms", "evaluated"):
        ours, theirs = (torch.tensor(found[0]["prompts", kind][name]) for kind in ("zero3", "DDP"))
        torch.testing.assert_close(ours, theirs)
    ours, theirs = (adapter(folder / "prompts" / name / "adapter")[0] for name in ("zero3", "DDP"))
    torch.testing.assert_close(ours, theirs)


def test_a_checkpoint_is_resumed_to_the_bit_and_under_another_strategy(found, folder):
    assert found[0]["resumed"]["losses"][-3:] == found[0]["zero3"]["losses"][3:]
    whole = adapter(folder / "zero3" / "adapter")[0]
    torch.testing.assert_close(adapter(folder / "resumed" / "adapter")[0], whole, rtol=0, atol=0)
    torch.testing.assert_close(adapter(folder / "resumed, ddp" / "adapter")[0], whole)


def test_a_loop_with_an_accelerator_trains_and_saves_as_with_ddp(found, folder):
    losses, expected = found[0]["accelerator", "zero3"], found[0]["accelerator", "DDP"]
    assert len(losses) == 3 * 3
    assert losses[3:6] == losses[6:]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    ours, theirs = (adapter(folder / "accelerator" / name)[0] for name in ("zero3", "DDP"))
    assert len(ours) == 12
    torch.testing.assert_close(ours, theirs)


def test_a_model_without_its_adapter_is_the_model_before(found):
    trained, disabled, base = found[0]["disabled"]
    assert disabled == pytest.approx(base, rel=1e-6)
    assert abs(trained - base) > 1e-3
