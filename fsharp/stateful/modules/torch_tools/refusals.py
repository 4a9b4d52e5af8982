"""Errors for torch's own tools, by tool: functions that are called with parts, wrappers, and kinds of parameters."""

import sys
from functools import cache, partial
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsharp.errors import TreeError
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.formats.gather_hooks import has_hooks
from fsharp.functional.formats.te import is_quantized
from fsharp.stateful.modules.torch_tools.dtensors import is_dtensor, is_instance
from fsharp.stateful.runtime.boundary import in_backward
from fsharp.tracebacks import api_boundary

NO_COPIES_MESSAGE = (
    "A sharded module, its modules, parameters and optimizer cannot be copied or pickled. For a second one, such as a teacher, "
    "shard a new module: `teacher = fs.shard_module(make_model(), ...)`, `teacher.load_state_dict(model.state_dict())`. For a "
    "file, save model.full_state_dict() and optimizer.full_state_dict()."
)
TorchTool = tuple[str, str, str]
"""A known caller of functions of parts: the beginning of its dotted name in Python, a user's name for the caller, a remedy."""

_TORCH_TOOLS: list[TorchTool] = [
    ("torch.optim.", "an optimizer of torch.optim", "Make a fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, ...)."),
    ("torch.amp.grad_scaler", "torch's GradScaler", "Take fs.GradScaler."),
    ("torch.distributed.fsdp.", "FSDP", "The module is sharded already: name the modules to gather by themselves in units=."),
    (
        "torch.distributed.checkpoint.",
        "torch.distributed.checkpoint",
        "Save by dcp.save({'model': model.state_dict()}), fs.checkpoint.save(), or whole tensors from model.full_state_dict().",
    ),
    ("safetensors.", "safetensors", "Save whole tensors: model.full_state_dict(), as state_dict= of save_pretrained()."),
    ("torch.export.", "torch.export", "Export a plain module that has loaded model.full_state_dict()."),
    ("torch.nn.init.", "torch.nn.init", "Fill parameters before shard_module(), or in `with model.unsharded(write=True):`."),
    ("torch.nn.utils.", "torch.nn.utils", "Parametrize before shard_module(). Write in `with model.unsharded(write=True):`."),
    ("torch.nn.modules.module.Module._apply", "a move of a module", "Move modules before shard_module(), or pass precision."),
    (
        "torch.nn.modules.module.Module._call_impl",
        "a module in the model that is called by itself",
        "Call the model, choose that module as a unit, or name the method that calls it: fs.shard_module(methods=[...]).",
    ),
]
_CHECKPOINT_TOOL: TorchTool = (
    "torch.utils.checkpoint.",
    "a checkpoint that recomputes",
    "The backward of its unit is not under way: the module that a checkpoint recomputes has to be a unit or inside of one, and "
    "of model.functional() a unit.",
)


def running_torch_tool_and_remedy(usual_remedy: str) -> tuple[str, str]:
    """Return two texts for an error: the tool of torch that is running, such as ``" of FSDP"``, and the remedy for this tool.

    The tool is found on the stack, by the innermost function of a known tool. Without a tool: ``""`` and ``usual_remedy``.
    """
    callers = [f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}" for frame, _ in walk_stack(sys._getframe(1))]
    is_recomputing = in_backward() and any(caller.startswith(_CHECKPOINT_TOOL[0]) for caller in callers)
    known = [("", *_CHECKPOINT_TOOL[1:])] if is_recomputing else _TORCH_TOOLS
    found = next((each for caller in callers for each in known if caller.startswith(each[0])), None)
    return ("", usual_remedy) if found is None else (f" of {found[1]}", found[2])


@api_boundary
def refuse_copy(x: Any, protocol: Any) -> Any:
    """Raise an error. Classes whose objects cannot be copied or pickled use this function as ``__reduce_ex__``."""
    raise TreeError(f"{type(x).__name__}: {NO_COPIES_MESSAGE}")


def _is_data_parallel_wrapper(x: object) -> bool:
    """Return whether ``x`` is a wrapper of a module: DataParallel, DistributedDataParallel or FullyShardedDataParallel."""
    fsdp = is_instance(x, "torch.distributed.fsdp", "FullyShardedDataParallel")
    return fsdp or isinstance(x, DataParallel | DistributedDataParallel)


def check_shardable(module: nn.Module, sharded: type[nn.Parameter]) -> None:
    """Raise a TreeError if DDP or FSDP manages parameters, or a parameter is lazy, of class ``sharded``, or otherwise unfit."""
    for path, each in module.named_modules():
        if (wrapped := _is_data_parallel_wrapper(each)) or is_instance(each, "torch.distributed.fsdp", "FSDPModule"):
            remedy = "Pass the module that it wraps, model.module" if wrapped else "Leave out fully_shard()"
            raise TreeError(
                f"shard_module(): {path or 'the root'!r} is a {type(each).__name__}{', made by fully_shard()' * (not wrapped)}"
                f", which manages parameters by itself. {remedy}: strategy=fs.ddp(...) replicates, fs.zero3(...) shards."
            )
    for path, parameter in module.named_parameters(remove_duplicate=False):
        why, is_known = "", is_dtensor(parameter) or is_quantized(parameter) or has_hooks(parameter)
        if isinstance(parameter, sharded):
            why = "belongs to a ShardedModule already. Shard the whole model once, and name the modules in it by units=."
        elif isinstance(parameter, UninitializedParameter):
            why = "has no shape yet. Call the lazy module once before, with an input of the usual size."
        elif type(parameter) is not nn.Parameter and not is_known:
            why = f"is a {type(parameter).__name__}, and would become a plain nn.Parameter. Move its work to a module."
        elif parameter.layout is not torch.strided:
            why = f"has the layout {parameter.layout}, expected torch.strided. Take parameter.to_dense()."
        elif parameter.is_complex() and parameter.requires_grad:
            why = f"is {dtype_name(parameter.dtype)}, and only real parameters can be trained. Make it "
            why += "nn.Parameter(torch.view_as_real(w)), and call torch.view_as_complex() in the forward; or freeze it by "
            why += "requires_grad_(False)."
        if why:
            raise TreeError(f"shard_module(): parameter {path!r} {why}")


@cache
def register_wrapper_checks(sharded: type[nn.Parameter]) -> None:
    """Once, register hooks against DDP or FSDP around a sharded module, and against optimizers made before sharding."""
    register_module_module_registration_hook(partial(_check_wraps_no_sharded, sharded))
    register_optimizer_step_pre_hook(_check_optimizer_is_current)


@api_boundary
def _check_optimizer_is_current(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if any("_fsharp_replaced" in parameter.__dict__ for group in optimizer.param_groups for parameter in group["params"]):
        name = type(optimizer).__name__
        raise TreeError(
            f"step(): this {name} was made before shard_module(), and holds parameters that the module no longer uses. Make "
            f"the optimizer after shard_module(): fs.ShardedOptimizer(model.parameters(), {name}, ...)."
        )


def _check_wraps_no_sharded(sharded: type[nn.Parameter], module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    parameters = submodule.named_parameters() if submodule is not None and _is_data_parallel_wrapper(module) else ()
    if (path := next((path for path, p in parameters if isinstance(p, sharded)), None)) is not None:
        raise TreeError(
            f"{type(module).__name__}(): parameter {path!r} belongs to a ShardedModule, which averages gradients over ranks. "
            "Use the model as it is: fs.shard_module(model, strategy=fs.ddp(...)) replicates it."
        )
