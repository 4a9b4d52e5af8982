"""Strategy: a strategy of Lightning's Trainer for sharded modules. Needs lightning: ``pip install lightning``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from fsharp.errors import OptionError, problem
from fsharp.lightning.sharded import (
    accumulating,
    check_optimizers,
    check_sharded_submodules,
    full_state_dict,
    load_state_dict,
    sharded_modules_in,
)
from fsharp.stateful.modules.optim.optimizer import ShardedOptimizer


class Strategy(DDPStrategy):
    """The ``DDPStrategy`` of Lightning's Trainer, which also trains modules of ``fs.shard_module``.

    ::

        from fsharp.lightning.trainer import Strategy

        class Task(LightningModule):
            def __init__(self):
                super().__init__()
                self.model = None

            def configure_model(self):
                if self.model is None:
                    self.model = fs.shard_module(build(), strategy=fs.zero3("dp"), units=[Block])

            def configure_optimizers(self):
                return fs.ShardedOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-4)

            def training_step(self, batch, index):
                return self.model(batch)

        Trainer(strategy=Strategy(), devices=8, gradient_clip_val=1.0).fit(Task(), loader, ckpt_path="last")

    Arguments are those of ``DDPStrategy``. A checkpoint is one file with whole tensors, as with ``DDPStrategy``. Rank 0 gathers
    the tensors and writes the file. Every rank reads the file, under any strategy and number of ranks. A LightningModule
    without sharded modules is trained as by ``DDPStrategy``.

    Raises:
        OptionError: ``sync_batchnorm=True``, ``StochasticWeightAveraging``, or a ``precision`` other than ``"32-true"``, with a
            sharded module.
        OptionError: a trained parameter is outside of sharded modules, or a sharded parameter is in a torch optimizer.
    """

    @property
    def _pl_module(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module

    def setup(self, trainer: "pl.Trainer") -> None:
        """Set up the accelerator and optimizers. Sharded modules are not wrapped. Gradients of an earlier run are released."""
        if not sharded_modules_in(self._pl_module):
            super().setup(trainer)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        check_sharded_submodules("Trainer", self._pl_module, self.precision_plugin.precision)
        for each in sharded_modules_in(self._pl_module).values():
            each.zero_grad()  # of a run that ended between microbatches; the Trainer's own call reads p.grad, which is refused
        if any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):  # type: ignore[attr-defined]
            what = "StochasticWeightAveraging copies the module before it is sharded, and would average nothing."
            remedy = "Train by fs.optim.with_ema(...), and evaluate within optimizer.averaged()."
            raise OptionError(problem("Trainer", what, remedy=remedy))
        if trainer.state.fn == TrainerFn.FITTING:
            if self._layer_sync:
                what = "sync_batchnorm=True would replace modules of a sharded module."
                remedy = "Write torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before shard_module()."
                raise OptionError(problem("Trainer", what, remedy=remedy))
            self.setup_optimizers(trainer)
            check_optimizers("Trainer", self.optimizers)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which backward passes add gradients up, as by ``accumulate()`` of each sharded module."""
        with accumulating(self._pl_module) if sharded_modules_in(self._pl_module) else super().block_backward_sync():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state dict on rank 0; elsewhere the dict without sharded parameters. All ranks call this method."""
        module = self._pl_module
        return full_state_dict(module) if sharded_modules_in(module) else super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a checkpoint's whole tensors into the module. Each rank keeps its part of each tensor."""
        if sharded_modules_in(self._pl_module):
            load_state_dict(self._pl_module, checkpoint["state_dict"], strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return a ShardedOptimizer's whole tensors on rank 0, and an empty dict elsewhere. All ranks call this method."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return inner.full_state_dict() if isinstance(inner, ShardedOptimizer) else super().optimizer_state(inner)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load a checkpoint's whole tensors into the optimizers. Each rank keeps its part of each tensor."""
        if not sharded_modules_in(self._pl_module):
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """End the run. Unlike ``DDPStrategy``, move no tensors to the CPU if the LightningModule has sharded modules."""
        if self.lightning_module is None or not sharded_modules_in(self._pl_module):
            super().teardown()
            return
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
