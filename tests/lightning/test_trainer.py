"""fsharp.lightning.trainer.Strategy: the training of the Trainer's DDPStrategy, its checkpoints and its evaluations."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

import fsharp as fs
from fsharp.errors import OptionError, ScheduleError, TreeError
from tests.huggingface.test_accelerator import Net, as_torchrun, data


def made(strategy, **options):
    """Return a LightningModule, which shards its model by ``strategy``, or not if this is None."""
    import lightning.pytorch as pl

    class Task(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.found, self.stayed = None, [], []

        def configure_model(self):
            if self.model is None:
                self.model = Net()
                if strategy is not None:
                    self.model = fs.shard_module(self.model, strategy=strategy, units="layers.*")

        def configure_optimizers(self):
            kind = torch.optim.AdamW if strategy is None else partial(fs.ShardedOptimizer, optimizer=torch.optim.AdamW)
            optimizer = kind(self.model.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def training_step(self, batch, index):
            loss = self.model(**batch)
            self.found.append(float(self.trainer.strategy.reduce(loss.detach())))
            return loss

        def on_after_backward(self):
            try:
                next(self.model.parameters()).grad.norm()
            except ScheduleError as error:
                assert "inside of accumulate()" in str(error)  # noqa: PT017
                self.stayed.append(True)
            else:
                self.stayed.append(False)

        def validation_step(self, batch, index):
            self.log("validated", self.model(**batch), sync_dist=True)

    return Task()


def run(trainer_strategy, strategy, folder, *, resume=None, more=(), **options):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=trainer_strategy,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}"), *more],
        **options,
    )
    task = made(strategy)
    trainer.fit(task, DataLoader(data(), batch_size=4), DataLoader(data()[:8], batch_size=4), ckpt_path=resume)
    [numbers] = trainer.validate(task, DataLoader(data()[:8], batch_size=4), verbose=False)
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    return {"losses": task.found, "stayed": task.stayed, "validated": numbers["validated"]}, trainer


def stopped_and_begun_again(kind, strategy):
    """Return losses of a run that ends between two microbatches, and of the next run of the same module."""
    import lightning.pytorch as pl

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = True

    task = made(strategy)
    for callbacks in ([Stop()], []):
        options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        options |= {"max_epochs": 1, "accumulate_grad_batches": 2, "callbacks": callbacks}
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=kind(), **options)
        trainer.fit(task, DataLoader(data(), batch_size=4))
    return task.found


def state_of(folder):
    return dict(torch.load(f"{folder}/weights.ckpt", weights_only=True)["state_dict"])


def on_two_ranks(folder, comm):
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging, WeightAveraging

    from fsharp.lightning.trainer import Strategy

    as_torchrun(comm)
    found = {"ddp": run("ddp", None, f"{folder}/ddp")[0], "not sharded": run(Strategy(), None, f"{folder}/plain")[0]}
    for name in ("zero3", "zero2"):
        found[name] = run(Strategy(), getattr(fs, name)("dp"), f"{folder}/{name}")[0]
    first = f"{folder}/zero3/epoch=0.ckpt"
    found["resumed"] = run(Strategy(), fs.zero3("dp"), f"{folder}/resumed", resume=first)[0]
    found["resumed, zero1"] = run(Strategy(), fs.zero1("dp"), f"{folder}/zero1", resume=first)[0]
    found["resumed, ddp"] = run("ddp", None, f"{folder}/again", resume=first)[0]
    found["begun again, ddp"] = stopped_and_begun_again(lambda: "ddp", None)
    found["begun again"] = stopped_and_begun_again(Strategy, fs.zero3("dp"))
    with pytest.raises(OptionError) as error:
        run(Strategy(), fs.zero3("dp"), f"{folder}/refused", precision="bf16-mixed")
    found["refused"] = str(error.value)
    with pytest.raises(OptionError) as error:
        run(Strategy(), fs.zero3("dp"), f"{folder}/refused", more=[StochasticWeightAveraging(1e-2)])
    found["refused callback"] = str(error.value)
    with pytest.raises(OptionError) as error:
        run(Strategy(), fs.zero3("dp"), f"{folder}/refused", sync_batchnorm=True)
    found["refused batchnorm"] = str(error.value)
    for kind in (EMAWeightAveraging, WeightAveraging):
        with pytest.raises(TreeError) as error:
            run(Strategy(), fs.zero3("dp"), f"{folder}/refused", more=[kind()])
        found["refused copy", kind.__name__] = str(error.value)
    with pytest.raises(ValueError, match="expected a non-empty list"):  # an error of torch: the callback finds no parameters
        run(Strategy(), fs.zero3("dp"), f"{folder}/refused", more=[ModelPruning("l1_unstructured", amount=0.5)])
    return found


pytestmark = pytest.mark.deep


@pytest.mark.parametrize("name", ["zero3", "zero2", "not sharded"])
def test_the_same_training_as_with_ddp(name, found, folder):
    assert len(found[0]["ddp"]["losses"]) == 8
    assert found[0][name]["validated"] == pytest.approx(found[0]["ddp"]["validated"])
    torch.testing.assert_close(torch.tensor(found[0][name]["losses"]), torch.tensor(found[0]["ddp"]["losses"]))
    torch.testing.assert_close(state_of(folder / {"not sharded": "plain"}.get(name, name)), state_of(folder / "ddp"))


def test_a_checkpoint_is_resumed_to_the_bit_under_another_strategy_and_by_ddp(found, folder):
    assert found[0]["resumed"]["losses"] == found[0]["zero3"]["losses"][4:]
    whole = state_of(folder / "zero3")
    torch.testing.assert_close(state_of(folder / "resumed"), whole, rtol=0, atol=0)
    torch.testing.assert_close(state_of(folder / "zero1"), whole)
    torch.testing.assert_close(state_of(folder / "again"), whole)


def test_gradients_stay_on_the_rank_until_the_last_microbatch(found):
    assert found[0]["zero2"]["stayed"] == [True, False] * 4


def test_a_run_that_ended_between_microbatches_is_followed_by_another(found):
    """The Trainer's zero_grad() at the start of the second run was refused, as gradients had been added up."""
    assert len(found[0]["begun again"]) == 1 + 4
    torch.testing.assert_close(torch.tensor(found[0]["begun again"]), torch.tensor(found[0]["begun again, ddp"]))


def test_a_precision_of_the_trainer_is_refused(found):
    assert "precision is 'bf16-mixed', and the module is sharded" in found[0]["refused"]


def test_batchnorm_that_would_stay_unsynchronized_is_refused(found):
    """It was left as it is, without a word."""
    assert "sync_batchnorm=True would replace modules of a sharded module" in found[0]["refused batchnorm"]
    assert "SyncBatchNorm.convert_sync_batchnorm(model) before shard_module()" in found[0]["refused batchnorm"]


def test_averages_of_copies_are_refused(found):
    """StochasticWeightAveraging averaged nothing, without a word."""
    assert "StochasticWeightAveraging copies the module before it is sharded" in found[0]["refused callback"]
    for name in ("EMAWeightAveraging", "WeightAveraging"):
        assert "A sharded module, its modules, parameters and optimizer cannot be copied" in found[0]["refused copy", name]
