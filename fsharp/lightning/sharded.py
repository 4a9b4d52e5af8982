"""Sharded modules within a Lightning module, and their state as whole tensors."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fsharp.errors import OptionError, problem
from fsharp.functional.comm.equal_values import check_same_on_ranks
from fsharp.stateful.modules.module import ShardedModule
from fsharp.stateful.modules.optim.optimizer import ShardedOptimizer
from fsharp.stateful.modules.parameter import ShardedParameter, ShardedTensor
from fsharp.stateful.modules.session import session_of_module


def sharded_modules_in(module: nn.Module) -> dict[str, ShardedModule]:
    """Return the sharded modules in ``module`` by path; the path of ``module`` itself is ``""``."""
    return {path: each for path, each in module.named_modules() if isinstance(each, ShardedModule)}


def check_sharded_submodules(where: str, module: nn.Module, precision: str) -> None:
    """Check a module that contains sharded modules. All ranks have to call this function.

    ``where``: name of the calling function, for errors. ``precision``: the setting of Lightning.

    Raises:
        OptionError: ``precision`` is not ``"32-true"``, or a trained parameter is outside of sharded modules.
        OptionError: ``module`` contains a sharded parameter, but not the sharded module from which the parameter comes.
        AgreementError: a frozen parameter outside of sharded modules differs between ranks.
    """
    if precision != "32-true":
        what = f"precision is {precision!r}, and the module is sharded."
        remedy = "Pass precision=fs.Precision(compute=torch.bfloat16, main=torch.float32) to shard_module()."
        raise OptionError(problem(where, what, remedy=remedy))
    sharded, outside = list(sharded_modules_in(module).values()), dict[str, Any]()
    sessions = {session_of_module(each) for each in sharded}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ShardedParameter) and parameter.owner() not in sessions:
            what = f"parameter {name!r} belongs to a sharded module that is not a submodule, so its values would not be saved."
            raise OptionError(problem(where, what, remedy="Make the module of shard_module() an attribute, too."))
        if parameter.requires_grad and not isinstance(parameter, ShardedParameter):
            what = f"parameter {name!r} is trained and belongs to no sharded module, so its gradient would not be reduced."
            raise OptionError(problem(where, what, remedy="Pass a module with all trained parameters to shard_module()."))
        if not isinstance(parameter, ShardedParameter):
            outside[name] = parameter
    check_same_on_ranks(where, outside, sharded[0].comm, remedy="Seed all ranks alike before the module is made.")


def check_optimizers(where: str, optimizers: Iterable[Optimizer]) -> None:
    """Raise an OptionError if a torch optimizer has sharded parameters."""
    for optimizer in optimizers:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if not isinstance(optimizer, ShardedOptimizer) and any(isinstance(each, ShardedParameter) for each in parameters):
            kind = type(optimizer).__name__
            what = f"expected a ShardedOptimizer for sharded parameters, got a {kind}."
            raise OptionError(problem(where, what, remedy=f"Write fs.ShardedOptimizer(parameters, {kind}, ...)."))


@contextmanager
def accumulating(module: nn.Module) -> Iterator[None]:
    """Return a context in which sharded modules in ``module`` add gradients up, as by ``accumulate()`` of each.

    Along axes on which gradients rest sharded, as under ``zero2`` and ``zero3``, each backward still reduces gradients.
    """
    with ExitStack() as stack:
        for each in sharded_modules_in(module).values():
            stack.enter_context(each.accumulate())
        yield


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the whole state dict on rank 0; elsewhere the dict without sharded parameters. All ranks have to call this.

    In ``module`` a parameter of a sharded module may have several names. The dict has the whole tensor under each name.
    """
    found, whole = dict(module.state_dict()), dict[Any, Any]()
    for path, each in sharded_modules_in(module).items():
        full = each.full_state_dict()
        parts = {name: part for name, part in each.state_dict().items() if isinstance(part, ShardedTensor)}
        whole |= {(part.owner, part.path): full[name] for name, part in parts.items() if name in full}
        found |= {f"{path}.{name}" if path else name: value for name, value in full.items()}
    found = {name: whole.get((x.owner, x.path), x) if isinstance(x, ShardedTensor) else x for name, x in found.items()}
    return {name: value for name, value in found.items() if not isinstance(value, ShardedTensor)}


def load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Load a state dict of whole tensors, equal on all ranks.

    Raises an error if ``strict`` and keys are missing or unexpected: TreeError for keys of a sharded module, RuntimeError for
    other keys. Before the RuntimeError all known keys are loaded.
    """
    sharded = sharded_modules_in(module)
    if "" in sharded:
        module.load_state_dict(state_dict, strict=strict)
        return
    for path, each in sharded.items():
        inside = {name: value for name, value in state_dict.items() if name.startswith(f"{path}.")}
        each.load_state_dict({name.removeprefix(f"{path}."): value for name, value in inside.items()}, strict=strict)
    parameters = module.named_parameters(remove_duplicate=False)
    loaded = tuple(f"{path}." for path in sharded), {name for name, x in parameters if isinstance(x, ShardedParameter)}

    def is_loaded(name: str) -> bool:
        return name.startswith(loaded[0]) or name in loaded[1]

    rest = {name: value for name, value in state_dict.items() if not is_loaded(name)}
    missing, unexpected = module.load_state_dict(rest, strict=False)
    wrong = [*(name for name in missing if not is_loaded(name)), *unexpected]
    if strict and wrong:
        raise RuntimeError(f"load_state_dict(): keys are missing or unexpected: {', '.join(wrong)}.")
