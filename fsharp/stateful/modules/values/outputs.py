"""Outputs: the tensors in what a module returns, whatever it is, and others in their place."""

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

Parts = tuple[list[Any], Callable[[list[Any]], Any]]
"""What is in a value, and a function that puts other things in its place and returns the value, or another one."""


def tensors_in(value: Any, path: str, *, late: Literal["refuse", "leave"] = "refuse") -> list[torch.Tensor]:
    """All tensors in a value that the module at ``path`` gives away, at any depth.

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
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        each = todo.pop(0)
        if isinstance(each, torch.Tensor):
            found[id(each)] = each
        elif not isinstance(each, _PLAIN) and id(each) not in seen:
            seen[id(each)] = each
            if isinstance(each, _LATE):
                if late == "leave":
                    continue
                raise TreeError(
                    f"module {path or 'the root'!r} gives away a {type(each).__name__}, which computes when parameters are "
                    "released. Return what it computes, such as a list of tensors."
                )
            todo += parts(each)[0]
    return list(found.values())


def replaced(value: Any, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], path: str) -> Any:
    """``value`` with tensors replaced: in place where it can be changed, as whoever has it should see; else another one.

    Raises:
        TreeError: they are in an object that cannot be changed.
    """
    by_id = {id(a): b for a, b in zip(old, new, strict=True) if a is not b}
    return _filled(value, by_id, {}, path) if by_id else value


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


def parts(value: Any) -> Parts:
    """Return what is in a value, one level deep, and a function that puts other things in its place."""
    registered = None if type(value) in _BUILT_IN else torch_pytree.SUPPORTED_NODES.get(type(value))
    if registered is not None:  # not by tree_flatten(), which leaves a circle of functions that has the value
        inside, context = registered.flatten_fn(value)
        return list(inside), lambda new: registered.unflatten_fn(new, context)
    if isinstance(value, _CLOSED):
        return [], lambda new: value
    items: list[Any] = []
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list | deque | tuple | AbstractSet):
        items = list(value)
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    names = [*getattr(value, "__dict__", ()), *slots]

    def fill(new: list[Any]) -> Any:
        result = value
        if isinstance(value, MutableMapping):
            _set_items(value, list(value), new)
        elif isinstance(value, list | deque):
            _set_items(value, range(len(items)), new)
        elif isinstance(value, set):
            value.clear()
            value.update(new[: len(items)])
        elif items:
            inside = new[: len(items)]
            result = type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
        for name, attribute in zip(names, new[len(items) :], strict=True):
            if getattr(result, name, None) is not attribute:
                object.__setattr__(result, name, attribute)  # of frozen dataclasses too
        return result

    return items + [getattr(value, name) for name in names], fill


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    private = f"_{cls.__name__.lstrip('_')}"
    names = [private + name if name.startswith("__") and not name.endswith("__") else name for name in names]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _set_items(value: Any, keys: Sequence[Any], new: Sequence[Any]) -> Any:
    for key, item in zip(keys, new, strict=False):
        if value[key] is not item:
            value[key] = item
    return value


def _filled(value: Any, by_id: Mapping[int, torch.Tensor], seen: dict[int, Any], path: str) -> Any:
    if isinstance(value, torch.Tensor):
        return by_id.get(id(value), value)
    if isinstance(value, _PLAIN):
        return value
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value  # of a circle that leads through a tuple the old one
    old, fill = parts(value)
    new = [_filled(each, by_id, seen, path) for each in old]
    if any(a is not b for a, b in zip(old, new, strict=True)):
        try:
            seen[id(value)] = fill(new)
        except Exception as error:
            raise TreeError(
                f"module {path or '(root)'!r} returns or keeps tensors inside of a {type(value).__name__}, which cannot be "
                f"changed: {error}. Register it with torch.utils._pytree, or use a tuple or a dict."
            ) from error
    return seen[id(value)]


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
