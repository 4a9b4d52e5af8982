"""fsharp.huggingface.trainer: transformers' Trainer trains, evaluates, saves and resumes a sharded Llama."""

import os
import re
import shutil
from functools import partial
from pickle import UnpicklingError

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, CheckpointError
from fsharp.testing import processes
from tests.huggingface.test_accelerator import as_torchrun

IMPORTS = (
    "import fsharp.huggingface.trainer; from transformers import Seq2SeqTrainer, LlamaForCausalLM, T5ForConditionalGeneration"
)
ARGUMENTS = {"use_cpu": True, "num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
ARGUMENTS |= {"learning_rate": 1e-2, "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no"}
ARGUMENTS |= {"report_to": [], "disable_tqdm": True}


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def data():
    made = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (24, 8), generator=made)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(kind, model, folder, *, resume="", **options):
    from transformers import TrainingArguments

    args = TrainingArguments(folder, **ARGUMENTS | options)
    trainer = kind(model=model, args=args, train_dataset=data(), eval_dataset=data()[:8])
    trainer.train(resume_from_checkpoint=resume or None)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return {"losses": losses, "norms": norms, "evaluated": trainer.evaluate()["eval_loss"]}, trainer


def sharded(strategy, folder, **options):
    from fsharp.huggingface.trainer import Trainer

    model = fs.shard_module(tiny_llama(), strategy=strategy, units="model.layers.*")
    numbers, trainer = train(Trainer, model, folder, **options)
    return numbers | {"state": model.full_state_dict()}, trainer


def generated(folder, comm):
    """Return what each rank generates by itself, and what a Seq2SeqTrainer predicts, whose ranks end at different tokens."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from fsharp.huggingface.trainer import Trainer

    class SequenceTrainer(Trainer, Seq2SeqTrainer):
        pass

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, pad_token_id=0, **sizes)).eval()
    model.generation_config.eos_token_id = [each for each in range(1, 64) if each % 3]
    rows = [row["input_ids"] for row in data()[:4]]
    whole = [model.generate(row[None], max_new_tokens=12)[0].tolist() for row in rows]
    fs.shard_module(model, units=["encoder.block.*", "decoder.block.*"], methods=["generate"])
    options = {"use_cpu": True, "report_to": [], "per_device_eval_batch_size": 1, "predict_with_generate": True}
    trainer = SequenceTrainer(model, Seq2SeqTrainingArguments(f"{folder}/sequences", **options))
    batches = [{"input_ids": row, "labels": row} for row in rows]
    predicted = trainer.predict(batches, max_new_tokens=12).predictions.tolist()
    return whole, predicted


def rates_of_two_trials(folder):
    """Return learning rates of a Trainer that makes a new model in each call of train(), as a hyperparameter search does."""
    from transformers import TrainingArguments

    from fsharp.huggingface.trainer import Trainer

    def model():
        return fs.shard_module(tiny_llama(), strategy=fs.zero3("dp"), units="model.layers.*")

    options = {"use_cpu": True, "max_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(folder, lr_scheduler_type="constant", **options)
    trainer, rates = Trainer(model_init=model, args=args, train_dataset=data()), []
    for args.learning_rate in (1e-2, 5e-3):
        trainer.train()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    return rates


def on_two_ranks(folder, comm):
    import transformers

    from fsharp.huggingface.trainer import Trainer

    as_torchrun(comm)
    found = {"DDP": train(transformers.Trainer, tiny_llama(), f"{folder}/plain", save_strategy="epoch")[0]}
    found["zero3"], trainer = sharded(fs.zero3("dp"), f"{folder}/a", save_strategy="epoch")
    trainer.save_model(f"{folder}/whole")
    first = f"{folder}/a/checkpoint-3"
    found["resumed"] = sharded(fs.zero3("dp"), f"{folder}/b", resume=first)[0]
    found["resumed, zero1"] = sharded(fs.zero1("dp"), f"{folder}/c", resume=first)[0]
    with pytest.raises(CheckpointError) as error:
        sharded(fs.zero3("dp"), f"{folder}/e", resume=f"{folder}/plain/checkpoint-3")
    found["not sharded"] = str(error.value)
    if comm.rank == 0:
        os.makedirs(f"{folder}/of_deepspeed")
        shutil.copy(f"{folder}/plain/checkpoint-3/scheduler.pt", f"{folder}/of_deepspeed")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as error:
        trainer._load_optimizer_and_scheduler(f"{folder}/of_deepspeed")
    found["no optimizer.pt"] = str(error.value)
    if comm.rank == 0:
        shutil.copytree(first, f"{folder}/incomplete")
        os.remove(f"{folder}/incomplete/scheduler.pt")
    torch.distributed.barrier()
    before = trainer.model.full_state_dict()
    with pytest.raises(CheckpointError) as error:
        trainer._load_optimizer_and_scheduler(f"{folder}/incomplete")
    found["no scheduler.pt"] = str(error.value)
    torch.testing.assert_close(trainer.model.full_state_dict(), before, rtol=0, atol=0)  # and not of step 3
    os.makedirs(f"{folder}/empty", exist_ok=True)
    with pytest.raises(AgreementError) as error:
        trainer._load_optimizer_and_scheduler(f"{folder}/empty" if comm.rank else first)
    found["not on rank 1"] = str(error.value)
    for kind in (Trainer, transformers.Trainer):
        with pytest.raises((CheckpointError, UnpicklingError)) as error:
            train(kind, tiny_llama(), f"{folder}/f", resume=first)
        found["sharded", kind.__module__] = str(error.value)
    found["generated"] = generated(folder, comm)
    found["rates"] = rates_of_two_trials(f"{folder}/trials")
    return found


def test_the_same_training_as_with_ddp(found):
    assert len(found[0]["zero3"]["losses"]) == 6
    for name in ("losses", "norms", "evaluated"):
        torch.testing.assert_close(torch.tensor(found[0]["zero3"][name]), torch.tensor(found[0]["DDP"][name]))


def test_ranks_generate_until_the_last_one_has_ended(found):
    """Ranks whose sequences had ended raised an error, as the others went on."""
    whole, predicted = found[0]["generated"]
    lengths = [len(row) for row in whole]
    assert lengths[0] != lengths[1] or lengths[2] != lengths[3]
    for row, expected in zip(predicted, whole, strict=True):
        assert row[: len(expected)] == expected
        assert {0, -100} >= set(row[len(expected) :])


def test_each_trial_of_a_search_has_its_own_options(found):
    """The optimizer of the second trial had the learning rate of the first."""
    assert found[0]["rates"] == [1e-2, 5e-3]


def test_a_checkpoint_is_resumed_to_the_bit_and_under_another_strategy(found):
    assert found[0]["resumed"]["losses"][-3:] == found[0]["zero3"]["losses"][3:]
    torch.testing.assert_close(found[0]["resumed"]["state"], found[0]["zero3"]["state"], rtol=0, atol=0)
    torch.testing.assert_close(found[0]["resumed, zero1"]["state"], found[0]["zero3"]["state"])


def test_an_optimizer_that_was_not_sharded_is_refused(found):
    """Not begun anew without a word."""
    assert "it has the optimizer of a module that was not sharded by fsharp" in found[0]["not sharded"]
    assert "remove optimizer.pt and scheduler.pt" in found[0]["not sharded"]
    assert "remove scheduler.pt from" in found[0]["no optimizer.pt"]


def test_a_missing_schedule_is_refused_before_anything_is_loaded(found):
    """A FileNotFoundError was raised, after module and optimizer had been loaded."""
    for each in found:
        assert "has no scheduler.pt, so the optimizer in 'fsharp' would have no schedule" in each["no scheduler.pt"]
        assert "remove 'fsharp' and optimizer.pt from this folder" in each["no scheduler.pt"]


def test_ranks_that_see_different_folders_raise_one_error(found):
    """The rank without the folder went on, with a new optimizer and schedule."""
    for each in found:
        assert re.search(r"(?s)folder 'fsharp' +rank 0: is there.*rank 1: is missing", each["not on rank 1"])


def test_a_sharded_optimizer_is_refused_by_a_trainer_of_modules_that_are_not(found):
    ours, theirs = (found[0]["sharded", name] for name in ("fsharp.huggingface.trainer", "transformers.trainer"))
    assert "has the optimizer of a sharded module, and the model is not sharded" in ours
    assert "fsharp.huggingface.trainer.ResumeWithThisTrainer" in theirs


def test_a_saved_model_is_loaded_by_from_pretrained(found, folder):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "whole")
    torch.testing.assert_close(dict(model.state_dict()), found[0]["zero3"]["state"], rtol=0, atol=0)


def on_one_rank(folder, comm):
    as_torchrun(comm)
    return sharded(fs.ddp("dp"), f"{folder}/d", resume=f"{folder}/a/checkpoint-6")[0]["state"]


@pytest.mark.deep
def test_another_number_of_ranks_resumes(found, folder):
    [state] = processes(fs.Mesh({"dp": 1}), partial(on_one_rank, str(folder)))
    assert os.path.isdir(folder / "a" / "checkpoint-6" / "fsharp")
    assert {name: x.shape for name, x in state.items()} == {name: x.shape for name, x in found[0]["zero3"]["state"].items()}
