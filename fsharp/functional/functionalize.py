"""functionalize: an nn.Module as a pure function of its parameters."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsharp.errors import TreeError
from fsharp.functional.formats.gather_hooks import has_hooks, plain_value
from fsharp.functional.layout.paths import flatten
from fsharp.type_checks import options_checked


@options_checked
def functionalize(module: nn.Module) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Split a module into ``fn(params, *args, **kwargs)`` and ``params``.

    >>> fn, params = functionalize(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    >>> {path: list(p.shape) for path, p in zip(*flatten(params)[:2])}
    {'0.bias': [3], '0.weight': [3, 2]}
    >>> fn(params, torch.ones(5, 2)).shape
    torch.Size([5, 3])

    Args:
        module: not changed and not kept; its parameters' tensors are.

    Returns:
        ``fn``, which calls the module with the tree it is given in place of its parameters, and ``params``, nested
        dicts along the dots of the parameters' names. Tied parameters are one tensor at several paths. Buffers are
        constants of ``fn``: what a forward writes to them is discarded.

    Raises:
        TreeError: a module without parameters, or with one whose class has hooks of FSDP2.
    """
    for name, parameter in module.named_parameters():
        if has_hooks(parameter):
            raise TreeError(
                f"functionalize(): parameter {name!r} is a {type(parameter).__name__} with hooks of FSDP2, which functions "
                "do not call. Pass the module to shard_module()."
            )
    params = parameter_tree("functionalize()", module)
    buffers = {name: b.detach().clone() for name, b in module.named_buffers(remove_duplicate=False)}
    memo: dict[int, Any] = {id(p): p.to("meta") for p in module.parameters()}
    memo |= {id(p): nn.Parameter(t, p.requires_grad) for p in module.parameters() for t in [memo[id(p)].detach()]}
    skeleton = copy.deepcopy(module, memo)

    def fn(params: Any, *args: Any, **kwargs: Any) -> Any:
        paths, leaves, _ = flatten(params)
        state = dict(zip(paths, leaves)) | {name: b.clone() for name, b in buffers.items()}
        return torch.func.functional_call(skeleton, state, args, kwargs, tie_weights=False, strict=True)

    return fn, params


def parameter_tree(where: str, module: nn.Module) -> dict[str, Any]:
    """A module's parameters, detached, as nested dicts along the dots of their names.

    Raises:
        TreeError: there are none; ``where`` is who asks.
    """
    tree: dict[str, Any] = {}
    values: dict[int, torch.Tensor] = {}  # tied parameters have one
    for name, parameter in module.named_parameters(remove_duplicate=False):
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = values.setdefault(id(parameter), plain_value(parameter))
    if not tree:
        raise TreeError(f"{where}: {type(module).__name__} has no parameters.")
    return tree
