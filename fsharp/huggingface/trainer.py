"""Trainer: transformers' Trainer for modules of ``fs.shard_module``. Needs transformers and accelerate."""

import os
from typing import Any

import torch
import transformers

from fsharp.checkpoint import load
from fsharp.errors import CheckpointError, problem
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.huggingface.accelerator import (
    SHARDED_FOLDER,
    Accelerator,
    broadcast_buffers_from_rank_0,
    contains_sharded_module,
    save_and_remove_all_older,
)
from fsharp.stateful.modules.module import ShardedModule
from fsharp.stateful.modules.optim.optimizer import ShardedOptimizer

_SCHEDULER_FILE = "scheduler.pt"
"""File in which transformers keeps the learning rate schedule."""
_OPTIMIZER_FILE = "optimizer.pt"
"""File in which transformers keeps an optimizer. For a sharded optimizer it holds a ResumeWithThisTrainer."""


class ResumeWithThisTrainer:
    """The content of ``optimizer.pt`` for a sharded optimizer. The optimizer's state is in the folder ``fsharp`` instead.

    transformers' own Trainer loads the file by ``torch.load(weights_only=True)``, which raises an error that names this class.
    Without the file, transformers' Trainer would silently begin with a new optimizer.
    """


class Trainer(transformers.Trainer):
    """transformers' Trainer, which also trains a module of ``fs.shard_module``.

    ::

        from fsharp.huggingface.trainer import Trainer

        args = transformers.TrainingArguments("runs/a", max_grad_norm=1.0, save_steps=100)
        model = fs.shard_module(LlamaForCausalLM(config), strategy=fs.zero3("dp"), units="model.layers.*")
        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.train(resume_from_checkpoint=False)

    The optimizer of ``args.optim`` becomes a ShardedOptimizer. A checkpoint of the Trainer has the folder ``fsharp``, with
    module and optimizer in the format of :func:`fsharp.checkpoint.save`. So a run can resume on another number of ranks or
    under another strategy. ``save_model`` writes whole tensors, as for ``from_pretrained``; all ranks have to call it. A module
    that is not sharded is trained as by transformers. transformers' own Trainer cannot resume from a checkpoint of a sharded
    module: it raises an error.

    For a Seq2SeqTrainer: ``class MyTrainer(Trainer, Seq2SeqTrainer)``, and ``shard_module(..., methods=["generate"])``.
    ``save_model`` of a ``PeftModel`` writes the adapter, as PEFT does. For a Trainer of TRL:
    ``class DPOTrainer(Trainer, trl.DPOTrainer)``.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's accelerator: an :class:`Accelerator` of this library, which accepts sharded modules."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # a subclass without attributes of its own

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if not contains_sharded_module(model):
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the optimizer passed to the Trainer, else one of ``args.optim``: for a sharded module a ShardedOptimizer."""
        trained, given = self.model if model is None else model, self.optimizer_cls_and_kwargs
        if self.optimizer is None and isinstance(trained, ShardedModule):
            kind, options = given or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer_cls_and_kwargs = _OptimizerWithoutEmptyGroups, {"kind": kind, **options}
        try:
            return super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given  # the next optimizer, such as that of another trial, reads args again

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **generation: Any
    ) -> Any:
        """Evaluate a batch, as transformers' Trainer does.

        A Seq2SeqTrainer may generate sequences. Each forward gathers parameters from all ranks. So a rank whose sequences have
        ended runs forwards until the sequences of all ranks have ended.
        """
        if isinstance(model, ShardedModule) and getattr(self.args, "predict_with_generate", False):
            generation = {"synced_gpus": True, **(generation or getattr(self, "_gen_kwargs", {}))}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **generation)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write whole tensors of the module on rank 0, or ``state_dict`` if it is given. All ranks take part in the gathers."""
        if state_dict is not None or not isinstance(self.model, ShardedModule):
            super()._save(output_dir, state_dict)
        elif any(each.is_prompt_learning for each in getattr(self.model, "peft_config", {}).values()):
            with self.model.unsharded():  # PEFT computes what it writes of prompts, on rank 0 alone
                super()._save(output_dir, self.model.state_dict())
        else:
            super()._save(output_dir, self.model.full_state_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the module and its optimizer as a checkpoint of fsharp, and the learning rate schedule."""
        if not isinstance(self.model, ShardedModule):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        root = os.path.join(output_dir, SHARDED_FOLDER)
        broadcast_buffers_from_rank_0(self.model)
        save_and_remove_all_older(root, self._model_and_optimizer(), step=self.state.global_step, comm=self.model.comm)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER_FILE))
            torch.save(ResumeWithThisTrainer(), os.path.join(output_dir, _OPTIMIZER_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load module, optimizer and learning rate schedule from the Trainer's folder ``checkpoint``, if the folder has them.

        Raises CheckpointError if the folder was written for a sharded module and the model is not sharded, or the reverse, or
        if the learning rate schedule of a sharded module is missing. Raises AgreementError if ranks see different files.
        """
        if not isinstance(self.model, ShardedModule):
            if checkpoint is not None and os.path.isdir(os.path.join(checkpoint, SHARDED_FOLDER)):
                what = f"{checkpoint!r} has the optimizer of a sharded module, and the model is not sharded."
                remedy = 'Pass the model through fs.shard_module(model, strategy=fs.ddp("dp")).'
                raise CheckpointError(problem("Trainer.train()", what, remedy=remedy))
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            schedule = check_on_all_ranks(
                "Trainer.train()",
                self.model.comm,
                lambda: _saved_schedule(checkpoint),
                lambda found: {f"folder {SHARDED_FOLDER!r}": "is missing" if found is None else "is there"},
            )
            if schedule is not None:
                load(os.path.join(checkpoint, SHARDED_FOLDER), self._model_and_optimizer(), comm=self.model.comm)
                self.lr_scheduler.load_state_dict(schedule)

    def _model_and_optimizer(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer.optimizer}


def _saved_schedule(checkpoint: str) -> Any:
    """Return the state of the learning rate schedule, or None if the folder ``checkpoint`` has no optimizer and no schedule.

    Raises CheckpointError if the folder has only one of the two, or the optimizer of a module that was not sharded.
    """
    if not os.path.isdir(os.path.join(checkpoint, SHARDED_FOLDER)):
        names = (_OPTIMIZER_FILE, _SCHEDULER_FILE)  # DeepSpeed and FSDP write the second of them and other folders
        if found := [name for name in names if os.path.isfile(os.path.join(checkpoint, name))]:
            what = (
                f"{checkpoint!r} has no folder {SHARDED_FOLDER!r}. Either it is incomplete, or it has the optimizer of a "
                "module that was not sharded by fsharp, which cannot be loaded."
            )
            remedy = f"To begin with a new optimizer and schedule, remove {' and '.join(found)} from this folder."
            raise CheckpointError(problem("Trainer.train()", what, remedy=remedy))
        return None
    path = os.path.join(checkpoint, _SCHEDULER_FILE)
    if not os.path.isfile(path):
        what = f"{checkpoint!r} has no {_SCHEDULER_FILE}, so the optimizer in {SHARDED_FOLDER!r} would have no schedule."
        remedy = f"Resume from another checkpoint. To begin with a new optimizer and schedule, remove {SHARDED_FOLDER!r} and "
        raise CheckpointError(problem("Trainer.train()", what, remedy=f"{remedy}{_OPTIMIZER_FILE} from this folder."))
    return torch.load(path, weights_only=True)


class _OptimizerWithoutEmptyGroups(ShardedOptimizer):
    """A ShardedOptimizer of a Trainer's groups of parameters, without the empty groups."""

    def __init__(self, params: Any, *, kind: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__([group for group in params if group["params"]], kind, **options)
