"""Refusals of wrappers and parameters of other libraries that would silently compute wrong results with a sharded module."""

from functools import cache, partial

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from fsharp.errors import TreeError
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.formats.te import is_quantized

_WRAPPERS = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)


def check_shardable(module: nn.Module, sharded: type[nn.Parameter]) -> None:
    """Refuse a module whose parameters another library shards or replicates, or are not plain dense tensors."""
    for path, each in module.named_modules():
        if isinstance(each, (*_WRAPPERS, FSDPModule)):
            wrapped = isinstance(each, _WRAPPERS)
            remedy = "Pass the module that it wraps, model.module" if wrapped else "Leave out fully_shard()"
            raise TreeError(
                f"shard_module(): {path or 'the root'!r} is a {type(each).__name__}{', made by fully_shard()' * (not wrapped)}"
                f", which manages parameters by itself. {remedy}: strategy=fs.ddp(...) replicates, fs.zero3(...) shards."
            )
    for path, parameter in module.named_parameters(remove_duplicate=False):
        where = f"shard_module(): parameter {path!r}"
        if isinstance(parameter, sharded):
            raise TreeError(
                f"{where} belongs to a ShardedModule already. Shard the whole model once, and name the modules in it by units=."
            )
        if isinstance(parameter, UninitializedParameter):
            raise TreeError(f"{where} has no shape yet. Call the lazy module once before, with an input of the usual size.")
        if type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor) and not is_quantized(parameter):
            raise TreeError(
                f"{where} is a {type(parameter).__name__}, and would become a plain nn.Parameter. Make it an nn.Parameter, and "
                "do in the forward what the class does."
            )
        if parameter.layout is not nn.Parameter().layout:
            raise TreeError(f"{where} has the layout {parameter.layout}, expected torch.strided. Take parameter.to_dense().")
        if parameter.is_complex() and parameter.requires_grad:
            raise TreeError(
                f"{where} is {dtype_name(parameter.dtype)}, and only real parameters can be trained. Make it "
                "nn.Parameter(torch.view_as_real(w)), and call torch.view_as_complex() in the forward; or freeze it by "
                "requires_grad_(False)."
            )


@cache
def watch_wrappers(sharded: type[nn.Parameter]) -> None:
    """Have torch's wrappers refuse modules with sharded parameters, before the wrappers communicate."""
    register_module_module_registration_hook(partial(_refuse_wrapper, sharded))


def _refuse_wrapper(sharded: type[nn.Parameter], module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if not isinstance(module, _WRAPPERS) or submodule is None:
        return
    path = next((path for path, p in submodule.named_parameters() if isinstance(p, sharded)), None)
    if path is not None:
        raise TreeError(
            f"{type(module).__name__}(): parameter {path!r} belongs to a ShardedModule, which averages gradients over ranks. "
            "Use the model as it is: fs.shard_module(model, strategy=fs.ddp(...)) replicates it."
        )
