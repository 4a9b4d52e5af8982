"""Strategy: a strategy of Lightning's Fabric for sharded modules. Needs lightning: ``pip install lightning``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer

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
    """Fabric's ``DDPStrategy``, which also takes modules of ``fs.shard_module`` and their ``ShardedOptimizer``.

    ::

        from fsharp.lightning.fabric import Strategy

        fabric = Fabric(strategy=Strategy(), devices=8)
        fabric.launch()
        model = fs.shard_module(model, strategy=fs.zero3("dp"), units=[Block])
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
        model, optimizer = fabric.setup(model, optimizer)
        for batch in fabric.setup_dataloaders(loader):
            fabric.backward(model(batch))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer})

    Arguments are those of ``DDPStrategy``. ``setup`` returns the sharded module without ``DistributedDataParallel``.
    ``no_backward_sync`` adds gradients up without reducing them for the optimizer. All ranks call ``save``: tensors are
    gathered to rank 0, which writes one file with whole tensors. All ranks call ``load``, and each rank reads the file, under
    any strategy and number of ranks. A module that is not sharded is trained as by ``DDPStrategy``.

    Raises:
        OptionError: ``precision=`` of Fabric with a sharded module, a trained parameter outside of sharded modules, or a torch
            optimizer with sharded parameters.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self._backward_sync_control is not None
        self._backward_sync_control = _Accumulation(self._backward_sync_control)

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to the device. A module with sharded modules stays where it is."""
        if not sharded_modules_in(module):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> Any:
        """Return a module that contains sharded modules unchanged. Wrap any other module in ``DistributedDataParallel``.

        All ranks call this method. Raises the errors of :func:`~fsharp.lightning.sharded.check_sharded_submodules`.
        """
        if not sharded_modules_in(module):
            return super().setup_module(module)
        check_sharded_submodules("Fabric.setup()", module, self.precision.precision)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer. Raises OptionError for a torch optimizer with sharded parameters."""
        check_optimizers("Fabric.setup()", [optimizer])
        return optimizer

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole state dict on rank 0; elsewhere the dict without sharded parameters. All ranks call this method."""
        return full_state_dict(module) if sharded_modules_in(module) else super().get_module_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole tensors, equal on all ranks, into the module. Each rank keeps its part of each tensor."""
        if sharded_modules_in(module):
            load_state_dict(module, state_dict, strict=strict)
        else:
            super().load_module_state_dict(module, state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return a ShardedOptimizer's whole tensors on rank 0, and an empty dict elsewhere. All ranks call this method."""
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.full_state_dict()
        return super().get_optimizer_state(optimizer)


class _Accumulation(_BackwardSyncControl):
    """Makes sharded modules accumulate gradients, by ``model.accumulate()``. ``other``: the control for all other modules."""

    def __init__(self, other: _BackwardSyncControl) -> None:
        self._other = other

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Return a context: if ``enabled``, backward passes add gradients up, and do not reduce them for the optimizer."""
        if not sharded_modules_in(module):
            return self._other.no_backward_sync(module, enabled)
        return accumulating(module) if enabled else nullcontext()
