"""Accelerator: accelerate's Accelerator for modules of ``fs.shard_module``. Needs accelerate: ``pip install accelerate``."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.utils import DynamoBackend
from torch import nn

from fsharp.checkpoint import load, save
from fsharp.checkpoint.catalog import remove_incomplete
from fsharp.checkpoint.retention import Retention, remove_checkpoints
from fsharp.checkpoint.storage import REMOVED_SUFFIX, absolute_path
from fsharp.errors import CheckpointError, OptionError, problem
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.equal_values import broadcast_from_rank
from fsharp.functional.comm.protocol import Comm
from fsharp.stateful.modules.module import ShardedModule
from fsharp.stateful.modules.optim.optimizer import ShardedOptimizer, session_of_optimizer
from fsharp.stateful.modules.parameter import ShardedParameter
from fsharp.stateful.modules.session import session_of_module
from fsharp.stateful.modules.torch_tools.dtensors import local_tensor
from fsharp.tracebacks import api_boundary

SHARDED_FOLDER = "fsharp"
"""Folder, within the folder of ``save_state()``, that holds sharded modules and their optimizers."""


@api_boundary
def _refuse_local_sgd() -> NoReturn:
    what = "ranks share the parameters of a sharded module, so accelerate's LocalSGD cannot train them apart."
    remedy = "LocalSGD takes modules that are not sharded. To accumulate, write `with accelerator.accumulate(model):`."
    raise OptionError(problem("no_sync()", what, remedy=remedy))


def contains_sharded_module(model: nn.Module) -> bool:
    """Return whether ``model`` is or contains a sharded module. The result of ``torch.compile(sharded)`` contains one."""
    return any(isinstance(each, ShardedModule) for each in model.modules())


def broadcast_buffers_from_rank_0(model: ShardedModule) -> None:
    """Copy rank 0's buffers, such as statistics of BatchNorm, to all ranks, as DistributedDataParallel does in its forwards.

    Along an axis on which a unit is Varying, such as that of experts, each rank keeps its own buffers of the unit's modules.
    All ranks have to call this function.
    """
    for path, buffer in model.named_buffers():
        around, mine = model.layout.unit_around(path), local_tensor(buffer.detach())
        varying = () if around is None else around.strategy.full.varying_axes
        value = broadcast_from_rank(mine, 0, model.comm, varying=varying)
        if not torch.equal(mine, value):  # an expanded buffer is equal, and cannot be written to
            mine.copy_(value)


def save_and_remove_all_older(root: str, tree: Any, *, step: int, comm: Comm) -> None:
    """Save a tree under ``root``. Remove complete checkpoints saved there before, except linked ones. All ranks call this."""
    save(root, tree, step=step, comm=comm)

    def remove_older() -> None:
        if comm.rank == 0:
            folder = absolute_path(root)
            remove_incomplete(folder, REMOVED_SUFFIX)
            remove_checkpoints(Retention(keep=1).old_checkpoints(folder))  # save() has compared the newest with its digests

    check_on_all_ranks("removal of older checkpoints", comm, remove_older)


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator, which also takes modules of ``fs.shard_module`` and their ``ShardedOptimizer``.

    ::

        from fsharp.huggingface.accelerator import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = fs.shard_module(model, strategy=fs.zero3("dp"), units="model.layers.*")
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.save_state("runs/a")

    For sharded modules these methods differ from accelerate's:

    - ``prepare`` returns the module itself, without ``DistributedDataParallel``. ``dynamo_backend`` compiles it in place.
    - ``accumulate`` and ``no_sync`` add gradients up. Only the last microbatch reduces the sums for the optimizer.
    - ``clip_grad_norm_`` takes all parameters of one prepared module, and clips by the norm over all ranks.
    - ``get_state_dict`` returns whole tensors on rank 0, and an empty dict on other ranks. All ranks have to call it.
    - ``save_state`` and ``load_state`` use :func:`fsharp.checkpoint.save` and :func:`~fsharp.checkpoint.load`, so another
      number of ranks or another strategy can load. All ranks have to call both methods. A save copies rank 0's
      buffers to all ranks.

    Raises:
        OptionError: ``mixed_precision`` is set for a sharded module, which takes a :class:`~fsharp.Precision` instead.
        OptionError: a torch optimizer or ``LocalSGD`` gets sharded parameters, or a prepared module contains a sharded module.
        OptionError: ``clip_grad_norm_`` gets only some parameters of a module, or ``clip_grad_value_`` gets sharded parameters.
        OptionError: ``join_uneven_inputs`` gets a sharded module, on several ranks.
        OptionError: ``save_state`` or ``load_state`` has the optimizer of a module that was not prepared.
        CheckpointError: ``load_state`` finds sharded modules in the folder, and none was prepared.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Return a sharded module itself. Prepare any other module as accelerate does.

        If accelerate has a ``dynamo_backend``, the sharded module is compiled in place. Raises OptionError for another module
        that contains a sharded module, and for a sharded module if ``mixed_precision`` is set.
        """
        if not isinstance(model, ShardedModule):
            if contains_sharded_module(model):
                what = f"expected a module of fs.shard_module, got a {type(model).__name__} that contains one."
                remedy = "Pass the sharded module itself. In place of torch.compile(model) write model.compile()."
                raise OptionError(problem("Accelerator.prepare()", what, remedy=remedy))
            return super().prepare_model(model, device_placement, evaluation_mode)
        if self.state.mixed_precision != "no":
            what = f"mixed_precision is {self.state.mixed_precision!r}, and the module is sharded."
            remedy = "Pass precision=fs.Precision(compute=torch.bfloat16, main=torch.float32) to shard_module()."
            raise OptionError(problem("Accelerator.prepare()", what, remedy=remedy))
        if not any(each is model for each in self._models):
            self._models.append(model)
            model.__dict__["no_sync"] = _refuse_local_sgd  # LocalSGD of accelerate calls no_sync of the module
            if self.state.dynamo_plugin.backend != DynamoBackend.NO:
                model.compile(**self.state.dynamo_plugin.to_kwargs())  # in place, so that it stays a sharded module
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer as accelerate does. The state of a ShardedOptimizer is not moved to another device.

        Raises OptionError for a torch optimizer with sharded parameters.
        """
        inner = getattr(optimizer, "optimizer", optimizer)  # of one that was prepared before
        if not isinstance(inner, ShardedOptimizer) and any(
            isinstance(each, ShardedParameter) for group in inner.param_groups for each in group["params"]
        ):
            kind = type(inner).__name__
            what = f"expected a ShardedOptimizer for sharded parameters, got a {kind}, whose state could not be loaded again."
            remedy = f"Write fs.ShardedOptimizer(parameters, {kind}, ...)."
            raise OptionError(problem("Accelerator.prepare()", what, remedy=remedy))
        return super().prepare_optimizer(optimizer, False if isinstance(optimizer, ShardedOptimizer) else device_placement)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes add gradients up, and do not reduce them for the optimizer."""
        return model.accumulate() if isinstance(model, ShardedModule) else super().no_sync(model)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Return accelerate's context for plain modules. On several ranks, raise OptionError for sharded modules."""
        joined = list(joinables)
        if self.num_processes > 1 and any(isinstance(each, ShardedModule) for each in joined):
            what = "a rank without batches cannot leave a sharded module, as the other ranks need its parts of the parameters."
            remedy = (
                "Omit the call, and keep even_batches=True of DataLoaderConfiguration, so that ranks get equally many batches."
            )
            raise OptionError(problem("Accelerator.join_uneven_inputs()", what, remedy=remedy))
        return super().join_uneven_inputs(joined, even_batches)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients by their norm over all ranks, and return the norm.

        If a parameter is sharded, pass all trained parameters of one prepared module, and no parameters of other modules:
        anything else raises an OptionError.
        """
        parameters = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
        if not any(isinstance(each, ShardedParameter) for each in parameters):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        given = {id(each) for each in parameters}
        for model in self._models:
            trained = {id(each) for each in model.parameters() if each.requires_grad}
            if isinstance(model, ShardedModule) and trained <= given <= {id(each) for each in model.parameters()}:
                self.unscale_gradients()
                return model.clip_grad_norm_(max_norm, norm_type)
        what = f"expected all parameters of one prepared module, got {len(parameters)} other parameters."
        raise OptionError(problem("Accelerator.clip_grad_norm_()", what, remedy="Pass model.parameters() of one module."))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> Any:
        """Clip gradients of plain modules by value. Raises OptionError for sharded parameters."""
        parameters = list(parameters)
        if any(isinstance(each, ShardedParameter) for each in parameters):
            what = "sharded parameters can be clipped only by their norm."
            raise OptionError(problem("Accelerator.clip_grad_value_()", what, remedy="Use clip_grad_norm_()."))
        return super().clip_grad_value_(parameters, clip_value)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return whole tensors of a sharded module on rank 0, and an empty dict on other ranks. All ranks call this method.

        For any other module return what accelerate returns; only then ``unwrap`` is used.
        """
        return model.full_state_dict() if isinstance(model, ShardedModule) else super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Save as accelerate does, but put sharded modules and optimizers into the subfolder ``fsharp``. Return the folder.

        An earlier save in this folder is replaced. The modules' ``named_buffers()`` of rank 0 are copied to all ranks. All
        ranks call this method.
        """
        tree, comm = self._checkpoint_tree_and_comm()
        with self._hiding_sharded():
            folder = super().save_state(output_dir, safe_serialization, **options)
        if comm is not None:
            root = os.path.join(folder, SHARDED_FOLDER)
            for model in tree["models"]:
                broadcast_buffers_from_rank_0(model)
            save_and_remove_all_older(root, tree, step=self.step, comm=comm)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Load the folder ``input_dir`` of :meth:`save_state`, under any strategy and number of ranks. All ranks call this."""
        tree, comm = self._checkpoint_tree_and_comm()

        def load_sharded(_: Any, folder: str) -> None:
            root = os.path.join(folder, SHARDED_FOLDER)
            if comm is not None:
                load(root, tree, comm=comm)
            elif os.path.isdir(root):
                what = f"{folder!r} has the state of sharded modules, and none was prepared."
                remedy = 'Pass modules of fs.shard_module(model, strategy=fs.ddp("dp")) to prepare().'
                raise CheckpointError(problem("Accelerator.load_state()", what, remedy=remedy))

        with self._hiding_sharded():
            handle = self.register_load_state_pre_hook(load_sharded)  # accelerate chooses the folder
            try:
                super().load_state(input_dir, load_kwargs, **options)
            finally:
                handle.remove()

    def _checkpoint_tree_and_comm(self) -> tuple[dict[str, Any], Any]:
        """Return the sharded modules and optimizers as a tree, and the modules' Comm, which is None without such modules.

        Raises OptionError if an optimizer of a sharded module was prepared, and this module was not.
        """
        models = [each for each in self._models if isinstance(each, ShardedModule)]
        optimizers = [each.optimizer for each in self._optimizers if isinstance(each.optimizer, ShardedOptimizer)]
        if any(session_of_optimizer(each) not in map(session_of_module, models) for each in optimizers):
            what = "the optimizer of a sharded module was prepared, and the module was not."
            raise OptionError(problem("Accelerator", what, remedy="Pass both to prepare(), so that both are saved and loaded."))
        return {"models": models, "optimizers": optimizers}, models[0].comm if models else None

    @contextmanager
    def _hiding_sharded(self) -> Iterator[None]:
        """Return a context in which accelerate saves and loads no sharded modules and optimizers."""
        models, optimizers = self._models, self._optimizers
        self._models = [each for each in models if not isinstance(each, ShardedModule)]
        self._optimizers = [each for each in optimizers if not isinstance(each.optimizer, ShardedOptimizer)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
