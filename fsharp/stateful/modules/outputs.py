"""Outputs: the tensors in what a module returns, whatever it is, and others in their place."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from fsharp.functional.errors import TreeError
from fsharp.stateful.modules.dtensors import local


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a value, also in objects that are no pytrees: in what dataclasses, mappings and their like hold."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    todo = torch_pytree.tree_leaves(value)
    while todo:
        leaf = todo.pop(0)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        elif id(leaf) not in seen and not isinstance(leaf, nn.Module | type):
            seen.add(id(leaf))
            inside = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
            todo += torch_pytree.tree_leaves(list(inside.values()))
    return list(found.values())


def without(out: Any, parameters: Sequence[torch.Tensor], path: str) -> Any:
    """``out`` with copies of parameters that are in it: these are released, and the copies' gradients are theirs."""
    if torch._C._are_functorch_transforms_active():  # which keep what they need
        return out
    mine = {leaf.untyped_storage().data_ptr() for leaf in parameters if leaf.numel()}
    held = [x for x in tensors_in(out) if x.numel() and not x.is_meta and local(x).untyped_storage().data_ptr() in mine]
    return replaced(out, held, [x.clone() for x in held], path) if held else out


def replaced(out: Any, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], path: str) -> Any:
    """``out`` with tensors replaced.

    Raises:
        TreeError: they are in an object that is no pytree.
    """
    by_id = {id(a): b for a, b in zip(old, new, strict=True)}
    leaves, spec = torch_pytree.tree_flatten(out)
    if not set(by_id) <= {id(leaf) for leaf in leaves}:
        kinds = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)})
        raise TreeError(
            f"module {path or '(root)'!r} returns tensors inside of {', '.join(kinds)}, which cannot be taken apart. Register "
            "it with torch.utils._pytree, or return a tuple or a dict."
        )
    return torch_pytree.tree_unflatten([by_id.get(id(leaf), leaf) for leaf in leaves], spec)


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
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, *grads, *[None] * ctx.num_inputs)
