"""Find the tensors in a module's result, and replace tensors in torch's pytrees and dataclasses."""

import copy
import dataclasses
import gc
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import is_
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from fsharp.errors import TreeError
from fsharp.functional.release import inner_tensors
from fsharp.tracebacks import api_boundary

_OPAQUE_TYPES: tuple[type, ...] = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Generator)
_OPAQUE_TYPES += (torch.autograd.graph.Node, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
_LAZY_TYPES = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, map, zip, filter)


@lru_cache(maxsize=1024)  # a search meets hundreds of objects of a few classes; a program may make classes without end
def _search_kind_of_class(cls: type) -> Literal["tensor", "lazy", "opaque", "open"]:
    """Return what objects of a class are to a search: a tensor, lazy (a generator), opaque (skipped), or open (searched)."""
    if issubclass(cls, torch.Tensor):
        return "tensor"
    if issubclass(cls, _LAZY_TYPES):
        return "lazy"
    return "opaque" if issubclass(cls, _OPAQUE_TYPES) else "open"


def tensors_in(value: Any, given_by: str | None = None) -> list[torch.Tensor]:
    """Return each tensor that can be reached from a value, but not through modules, functions, classes or autograd nodes.

    Generators, coroutines, ``map``, ``zip`` and ``filter`` are not searched either. With ``given_by``, the path of the module
    that returned the value, such an object raises a TreeError: the object would compute after parameters are released.
    """
    if isinstance(value, torch.Tensor):  # most modules return a tensor
        return [value]
    found: dict[int, torch.Tensor] = {}
    seen, rest = dict[int, Any](), [value]
    while rest:
        x = rest.pop()
        cls: Any = type(x)
        kind = _search_kind_of_class(cls)
        if kind == "opaque":
            continue
        if kind == "tensor":
            found[id(x)] = x
        elif kind == "lazy":
            if given_by is not None:
                raise TreeError(
                    f"module {given_by or 'the root'!r} returns a {type(x).__name__}, which would compute after its parameters "
                    "are released. Return its results, such as a list of tensors."
                )
        elif id(x) not in seen:
            seen[id(x)] = x
            rest += reversed(gc.get_referents(x))
    return list(found.values())


def map_tensors(
    value: Any, change: Callable[[Any], Any], error_start: str, *, refused_class: type = object, in_place: bool = False
) -> Any:
    """Return ``value`` with ``change(tensor)`` in place of each tensor in it; ``value`` itself if no tensor changes.

    Tensors are replaced in torch's pytrees and in dataclasses. With ``in_place``, lists, dicts and dataclasses are changed, not
    copied. Objects of other classes are returned as they are. But an object of ``refused_class`` in which ``change`` would
    replace a tensor raises a TreeError, whose text begins with ``error_start``.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    registered = torch_pytree.SUPPORTED_NODES.get(type(value))
    if registered is not None:  # tree_flatten() would leave a reference cycle that keeps the value alive
        old, context = registered.flatten_fn(value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        old = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        old = [getattr(value, name) for name in names]
    elif isinstance(value, refused_class) and any(change(x) is not x for x in tensors_in(value)):
        raise TreeError(
            f"{error_start} in a {type(value).__name__}. Use pytrees (tuples, lists, dicts) or dataclasses, or register the "
            "class by torch.utils._pytree.register_pytree_node()."
        )
    else:
        return value
    new = [map_tensors(x, change, error_start, refused_class=refused_class, in_place=in_place) for x in old]
    if all(map(is_, old, new)):
        return value
    if in_place and isinstance(value, list | dict) and len(value) == len(new):
        for key, x in zip(list(value) if isinstance(value, dict) else range(len(new)), new, strict=True):
            value[key] = x  # ModelOutput of transformers refuses update()
    elif registered is not None:
        value = registered.unflatten_fn(new, context)
    elif isinstance(value, tuple):
        value = type(value)(*new)
    else:
        value = value if in_place else copy.copy(value)
        for name, x in zip(names, new, strict=True):
            object.__setattr__(value, name, x)  # a dataclass may be frozen
    return value


def replace_tensors_in_place(value: Any, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], path: str) -> Any:
    """Return ``value`` with ``new[i]`` for ``old[i]``, by ``map_tensors(in_place=True)``. Errors name the module ``path``."""
    by_id = {id(a): b for a, b in zip(old, new, strict=True) if a is not b}
    what = f"module {path or 'the root'!r} returns or keeps a parameter, or a tensor that has to be replaced by another,"
    return map_tensors(value, lambda x: by_id.get(id(x), x), what, in_place=True) if by_id else value


def views_of_parameters(parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that share memory with ``parameters``. Under torch.func return none: there no memory is released."""
    if not tensors or torch._C._are_functorch_transforms_active():
        return []
    mine = set[int]().union(*map(_storage_addresses, parameters))
    return [x for x in tensors if not mine.isdisjoint(_storage_addresses(x))]


def _storage_addresses(x: torch.Tensor) -> list[int]:
    """Return the addresses of the storages of a tensor, or of a wrapper's inner tensors; none for empty and meta tensors."""
    found = []
    for each in (x,) if type(x) is torch.Tensor else inner_tensors(x):
        if each.numel() and not each.is_meta:
            found.append(each.untyped_storage().data_ptr())
    return found


def connect_to_inputs(tensors: Sequence[torch.Tensor], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return ``tensors``, linked to all ``inputs`` in autograd's graph, so that a backward also reaches unused inputs."""
    result, moved = list(tensors), [i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()]
    reached = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if moved and reached and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        for i, x in zip(moved, _ConnectToInputs.apply(len(moved), *(tensors[i] for i in moved), *reached), strict=True):
            result[i] = x
    return result


class _ConnectToInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, *grads, *[None] * (len(ctx.needs_input_grad) - 1 - len(grads)))
