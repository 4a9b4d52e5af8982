"""What an optimizer of torch.optim looks at, found by running it: an element at a time, a whole parameter, or all of them."""

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from fsharp.errors import TreeError
from fsharp.functional.optim.probe import are_close

_SHAPES = ((4, 6), (5,), (3, 2, 4), (6, 3))
_MATRICES = ((4, 6), (6, 3), (5, 5))
_STEPS = 8  # some optimizers do something else in every fifth step
_LR = 1e-2
_drawing = threading.RLock()  # ranks that are threads share the generator

Result = dict[str, torch.Tensor]
"""The update of one parameter, and what the optimizer keeps for each of its elements, by name; flat."""


class Scope(IntEnum):
    """What the update of one element depends on, besides that element's own value, gradient and state."""

    ELEMENT = 0
    """Nothing: buffers may be cut and joined anywhere."""
    PARAMETER = 1
    """Others of its parameter, or its shape."""
    EVERYTHING = 2
    """Other parameters."""


def scope_of(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any], device: torch.device
) -> Scope:
    """Return what an optimizer with these options of a parameter group looks at. Refuse one that cannot be tried.

    It makes some 60 steps on small random tensors: all of them together in their shapes, each of them in an optimizer of its
    own, and flat, cut across their bounds. Updates and states that are equal were made of what was there in both.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TreeError(
            f"ShardedOptimizer(): {optimizer.__name__} computes the loss several times in a step, by a closure, and gradients "
            "of a sharded module are there for one update. Use an optimizer whose step() needs no closure."
        )
    make = partial(_made, optimizer, options, defaults)
    with _apart(device):
        for shapes in (_SHAPES, _MATRICES):  # some take matrices alone
            trial = _drawn(shapes, device)
            try:
                together = _run(make, trial)
                break
            except Exception as raised:
                error = raised
        else:
            make([x[0] for x in trial])  # options that it refuses raise its own words
            raise TreeError(
                f"ShardedOptimizer(): {optimizer.__name__} was tried on small dense parameters, to find out whether it can "
                f"update parts of them, and raised {type(error).__name__}: {error}"
            ) from error
        alone = [_run(make, [each])[0] for each in trial]
        if not all(map(_are_same, together, alone)):
            return Scope.EVERYTHING
        elements = torch.cat([each.flatten(1) for each in trial], 1)
        third = elements.shape[1] // 3
        try:
            pieces = [_run(make, [x])[0] for x in elements.tensor_split([third, third + 2], 1)]
        except Exception:  # it takes no vectors
            return Scope.PARAMETER
        return Scope.ELEMENT if _are_same(_joined(together), _joined(pieces)) else Scope.PARAMETER


def fresh_state(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any], like: torch.Tensor
) -> dict[str, Any]:
    """Return what an optimizer keeps of a parameter, found by a step with a gradient of zero on a copy; ``"step"`` is zero.

    Memory: four times the parameter's, and the state.
    """
    parameter = torch.nn.Parameter(like.detach().clone())
    parameter.grad = torch.zeros_like(parameter)
    with _apart(like.device):
        made = _made(optimizer, options, defaults, [parameter])
        made.step()
    state = dict(made.state.get(parameter, {}))
    if "step" in state:
        state["step"] = state["step"] * 0
    return state


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """What is drawn in this context disturbs nobody's numbers."""
    with _drawing, torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        yield


def _made(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    parameters: list[torch.Tensor],
) -> torch.optim.Optimizer:
    """Return an optimizer of parameters, with copies of the options."""
    own, shared = copy.deepcopy((dict(options), dict(defaults)))
    return optimizer([{**own, "params": parameters}], **shared)


def _drawn(shapes: Iterable[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Return for each shape a parameter and its gradients, stacked; small ones in some steps and large in others."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1.0, *(10.0 ** (i % 3 - 1) for i in range(_STEPS))])  # some optimizers clip large ones
    drawn = [torch.randn(1 + _STEPS, *shape, generator=generator) for shape in shapes]
    return [(x * scales.view(-1, *(1 for _ in x.shape[1:]))).to(device) for x in drawn]


@torch.no_grad()
def _run(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], trial: Sequence[torch.Tensor]) -> list[Result]:
    """Return what one optimizer makes of parameters and their gradients."""
    parameters = [torch.nn.Parameter(x[0].clone()) for x in trial]
    made = make(list(parameters))
    for group in made.param_groups:  # updates that are scaled by nothing look the same everywhere
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            group["lr"] = torch.full_like(rate, _LR)
        elif rate is not None:
            group["lr"] = _LR
    for step in range(1, 1 + _STEPS):
        for parameter, x in zip(parameters, trial, strict=True):
            parameter.grad = x[step].clone()
        made.step()
    return [{"": (p - x[0]).flatten(), **_state(made.state.get(p, {}), p)} for p, x in zip(parameters, trial, strict=True)]


def _state(state: Mapping[str, Any], like: torch.Tensor) -> Result:
    """The tensors in it that are no single numbers; those that are not of the parameter's shape have theirs in the name."""
    found = {}
    for path, value in torch_pytree.tree_flatten_with_path(dict(state))[0]:
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            name = torch_pytree.keystr(path)
            found[name if value.shape == like.shape else f"{name} {list(value.shape)}"] = value.flatten().float()
    return found


def _joined(results: Sequence[Result]) -> Result:
    names = dict.fromkeys(name for each in results for name in each)
    return {name: torch.cat([each[name] for each in results if name in each]) for name in names}


def _are_same(x: Result, y: Result) -> bool:
    return x.keys() == y.keys() and all(
        x[name].shape == y[name].shape and bool(are_close(x[name], y[name]).all()) for name in x
    )
