"""make_functional: turn an nn.Module into a pure function of its parameters."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsharp.errors import TreeError
from fsharp.functional.formats.gather_hooks import has_hooks, plain_value
from fsharp.functional.formats.te import refuse_calls_with_delayed_scaling
from fsharp.functional.tree.paths import flatten_with_paths, nested_dicts
from fsharp.type_checks import options_checked


@options_checked
def make_functional(module: nn.Module) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a module as a pure function ``fn(params, *args, **kwargs)``, and its parameters as a tree ``params``.

    >>> fn, params = make_functional(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    >>> {path: list(p.shape) for path, p in zip(*flatten_with_paths(params)[:2])}
    {'0.bias': [3], '0.weight': [3, 2]}
    >>> fn(params, torch.ones(5, 2)).shape
    torch.Size([5, 3])

    Args:
        module: the module. The module is not changed; ``params`` shares the memory of its parameters.

    Returns:
        The pair ``(fn, params)``. ``fn`` calls the module with ``params`` in place of the module's parameters. ``params`` are
        nested dicts, with one more level for each dot in a parameter's name. A tied parameter is one tensor at several paths.
        Buffers are constants of ``fn``, with their values at the time of this call: writes to buffers in a forward are
        discarded. ``fn`` raises an OptionError if it calls a module of TransformerEngine under DelayedScaling.

    Raises:
        TreeError: the module has no parameters, or it has a parameter whose class has FSDP2 hooks.
    """
    for name, parameter in module.named_parameters():
        if has_hooks(parameter):
            raise TreeError(
                f"make_functional(): parameter {name!r} is a {type(parameter).__name__} with FSDP2 hooks, which functions "
                "do not call. Pass the module to shard_module()."
            )
    params = parameter_tree("make_functional()", module)
    shared = {id(b): b.detach().clone() for b in module.buffers()}
    buffers = {name: shared[id(b)] for name, b in module.named_buffers(remove_duplicate=False)}
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad) for p in module.parameters()
    }
    skeleton = copy.deepcopy(module, memo)
    refuse_calls_with_delayed_scaling(skeleton)
    idle = [copy.deepcopy(skeleton)]  # a call changes a module of its own, as other threads may call at the same time

    def fn(params: Any, *args: Any, **kwargs: Any) -> Any:
        paths, leaves, _ = flatten_with_paths(params)
        copies = {id(b): b.clone() for b in shared.values()}
        state = dict(zip(paths, leaves)) | {name: copies[id(b)] for name, b in buffers.items()}
        try:
            own = idle.pop()
        except IndexError:
            own = copy.deepcopy(skeleton)
        try:
            return torch.func.functional_call(own, state, args, kwargs, tie_weights=False, strict=True)
        finally:
            idle.append(own)

    return fn, params


def parameter_tree(where: str, module: nn.Module) -> dict[str, Any]:
    """Return a module's parameters, detached, as nested dicts with a level for each part of a name. TreeError if empty."""
    named = list(module.named_parameters(remove_duplicate=False))
    if not named:
        raise TreeError(f"{where}: {type(module).__name__} has no parameters.")
    values = {id(parameter): plain_value(parameter) for _, parameter in named}  # one for tied parameters
    return nested_dicts({tuple(name.split(".")): values[id(parameter)] for name, parameter in named})
