"""Outputs: the tensors in what a module returns, whatever it is, and others in their place."""

import copyreg
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from fsharp.errors import TreeError
from fsharp.stateful.modules.initial.dtensors import local
from fsharp.tracebacks import api_boundary

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
_CLOSED = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator, torch.autograd.graph.Node)
_LATE = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, map, zip, filter)
_BUILT_IN = (list, dict, tuple, deque, OrderedDict, defaultdict)


def tensors_in(value: Any, path: str, *, late: Literal["refuse", "leave"] = "refuse") -> list[torch.Tensor]:
    """Return all tensors in a value that the module at ``path`` gives away, at any depth.

    It looks into pytrees, into lists, tuples, sets and mappings of any class, and into the attributes of other objects, in a
    dict or in slots: dataclasses and their like. Modules, classes and functions are closed to it.

    Args:
        value: any object.
        path: path of the module.
        late: whether to refuse or skip generators and other iterators, which may compute when parameters are released. A module
            may keep an iterator in an attribute, such as that of a loader, but not return one.

    Raises:
        TreeError: a generator or another iterator, if ``late`` is "refuse".
    """
    if isinstance(value, torch.Tensor):  # what most modules return
        return [value]
    found: dict[int, torch.Tensor] = {}
    _mapped(value, lambda x: found.setdefault(id(x), x), path, {}, refuses_late=late == "refuse")
    return list(found.values())


def replaced(value: Any, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], path: str) -> Any:
    """Return ``value`` with tensors replaced: in place where it can be changed, as whoever has it should see; else another one.

    Raises:
        TreeError: they are in an object that cannot be changed.
    """
    by_id = {id(a): b for a, b in zip(old, new, strict=True) if a is not b}
    return _mapped(value, lambda x: by_id.get(id(x), x), path, {}) if by_id else value


def without_parameters(out: Any, parameters: Sequence[torch.Tensor], path: str) -> Any:
    """``out`` with copies of parameters that are in it: these are released, and the copies' gradients are theirs."""
    held = views_of(parameters, tensors_in(out, path))
    return replaced(out, held, [x.clone() for x in held], path)


def views_of(parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that share memory with parameters; none under torch.func, whose transforms keep what they need."""
    if not tensors or torch._C._are_functorch_transforms_active():
        return []
    mine = {leaf.untyped_storage().data_ptr() for leaf in parameters if leaf.numel()}
    return [x for x in tensors if x.numel() and not x.is_meta and local(x).untyped_storage().data_ptr() in mine]


def parts(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return what is in a value, one level deep, and a function that puts other things in its place and returns the value."""
    registered = None if type(value) in _BUILT_IN else torch_pytree.SUPPORTED_NODES.get(type(value))
    if registered is not None:  # not by tree_flatten(), which leaves a circle of functions that has the value
        inside, context = registered.flatten_fn(value)
        return list(inside), lambda new: registered.unflatten_fn(new, context)
    if isinstance(value, _CLOSED):
        return [], lambda new: value
    is_mapping, is_sequence = isinstance(value, Mapping), isinstance(value, list | deque | tuple | AbstractSet)
    items = list(value.values()) if is_mapping else list(value) if is_sequence else []
    slots = [name for name in copyreg._slotnames(type(value)) if hasattr(value, name)]  # type: ignore[attr-defined]
    names = [*getattr(value, "__dict__", ()), *slots]

    def fill(new: list[Any]) -> Any:
        inside, result = new[: len(items)], value
        if isinstance(value, MutableMapping | list | deque):
            for key, item in zip(list(value) if is_mapping else range(len(items)), inside, strict=True):
                if value[key] is not item:
                    value[key] = item
        elif isinstance(value, set):
            value.clear()
            value.update(inside)
        elif items:
            result = type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
        for name, attribute in zip(names, new[len(items) :], strict=True):
            if getattr(result, name, None) is not attribute:
                object.__setattr__(result, name, attribute)  # of frozen dataclasses too
        return result

    return items + [getattr(value, name) for name in names], fill


def _mapped(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    path: str,
    seen: dict[int, Any],
    *,
    refuses_late: bool = False,
) -> Any:
    """Return a value with its tensors changed. ``seen`` has by id what was looked at, and what stands in its place."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, _PLAIN):
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    seen[id(value)] = value, value  # of a circle that leads through a tuple the old one
    if isinstance(value, _LATE):
        if refuses_late:
            raise TreeError(
                f"module {path or 'the root'!r} gives away a {type(value).__name__}, which computes when parameters are "
                "released. Return what it computes, such as a list of tensors."
            )
        return value
    old, fill = parts(value)
    new = [_mapped(each, change, path, seen, refuses_late=refuses_late) for each in old]
    if any(a is not b for a, b in zip(old, new, strict=True)):
        try:
            seen[id(value)] = value, fill(new)
        except Exception as error:
            raise TreeError(
                f"module {path or '(root)'!r} returns or keeps tensors inside of a {type(value).__name__}, which cannot be "
                f"changed: {error}. Register it with torch.utils._pytree, or use a tuple or a dict."
            ) from error
    return seen[id(value)][1]


def reaching(tensors: Sequence[torch.Tensor], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """These tensors, through which a backward reaches all inputs even if they depend on none; without a gradient for those."""
    moved = [i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()]
    reached = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if not moved or not reached or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return list(tensors)
    result = list(tensors)
    for i, x in zip(moved, _Reach.apply(len(moved), *(tensors[i] for i in moved), *reached), strict=True):
        result[i] = x
    return result


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.num_inputs = len(tensors) - count
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, *grads, *[None] * ctx.num_inputs)
