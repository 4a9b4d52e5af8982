"""What an optimizer of torch.optim looks at, found by running it: an element at a time, a whole parameter, or all of them."""

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as torch_pytree

from fsharp.errors import TreeError

_SHAPES = ((4, 6), (5,), (3, 2, 4), (6, 3))
_MATRICES = ((4, 6), (6, 3), (5, 5))
_STEPS = 8  # some optimizers do something else in every fifth step
_TOLERANCE = 1e-3  # of the largest update; rounding is a thousandth of that
_LR = 1e-2

Made = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class Scope(IntEnum):
    """What the update of one element depends on, besides that element's own value, gradient and state."""

    ELEMENT = 0
    """Nothing: buffers may be cut and joined anywhere."""
    PARAMETER = 1
    """Others of its parameter, or its shape."""
    EVERYTHING = 2
    """Other parameters."""


_found: "weakref.WeakKeyDictionary[type, dict[str, Scope]]" = weakref.WeakKeyDictionary()
_probing = threading.RLock()  # ranks that are threads share the generator


def scope_of(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any], device: torch.device
) -> Scope:
    """What an optimizer with these options looks at.

    It makes some steps on small random tensors: all of them together in their shapes, each of them in an optimizer of its own,
    and flat, cut across their bounds. Updates and states that are equal were made of what was there in both.

    Args:
        optimizer: the class.
        options: of one parameter group.
        defaults: of the optimizer.
        device: where to try it.

    Raises:
        TreeError: it does not run on dense tensors, or needs a closure that it calls as often as it likes.

    Cost: a few hundred steps of a few elements for each class and options, once in a process.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TreeError(
            f"ShardedOptimizer(): {optimizer.__name__} computes the loss several times in a step, by a closure, and gradients "
            "of a sharded module are there for one update. Use an optimizer whose step() needs no closure."
        )
    key = f"{device} {options} {defaults}"
    with _probing:
        known = _found.setdefault(optimizer, {})
        if key not in known:
            known[key] = _probe(optimizer, options, defaults, device)
        return known[key]


def fresh_state(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any], like: torch.Tensor
) -> dict[str, Any]:
    """What an optimizer keeps of a parameter, found by a step with a gradient of zero on a copy; ``"step"`` is zero.

    Args:
        optimizer: the class.
        options: of its parameter group.
        defaults: of the optimizer.
        like: the parameter's values.

    Memory: four times the parameter's, and the state.
    """
    own, shared = copy.deepcopy((dict(options), dict(defaults)))
    parameter = torch.nn.Parameter(like.detach().clone())
    parameter.grad = torch.zeros_like(parameter)
    with _apart(like.device):
        made = optimizer([{**own, "params": [parameter]}], **shared)
        made.step()
    state = dict(made.state.get(parameter, {}))
    if "step" in state:
        state["step"] = state["step"] * 0
    return state


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """What is drawn in this context disturbs nobody's numbers."""
    with _probing, torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        yield


def _probe(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any], device: torch.device
) -> Scope:
    def make(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
        own, shared = copy.deepcopy((dict(options), dict(defaults)))
        made = optimizer([{**own, "params": tensors}], **shared)
        for group in made.param_groups:  # updates that are scaled by nothing look the same everywhere
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                group["lr"] = torch.full_like(rate, _LR)
            elif isinstance(rate, int | float):
                group["lr"] = _LR
        return made

    with _apart(device):
        together = None
        for shapes in (_SHAPES, _MATRICES):  # some take matrices alone
            trial = _Trial.drawn(shapes, device)
            try:
                together = trial.run(make)
                break
            except Exception as raised:
                error = raised
        if together is None:
            make([torch.nn.Parameter(p) for p in trial.start])  # options that it refuses are the caller's affair, and its words
            raise TreeError(
                f"ShardedOptimizer(): {optimizer.__name__} was tried on small dense parameters, to find out whether it can "
                f"update parts of them, and raised {type(error).__name__}: {error}"
            ) from error
        if not _are_same(together, [trial.only(i).run(make)[0] for i in range(len(trial.start))]):
            return Scope.EVERYTHING
        try:
            pieces = [piece.run(make)[0] for piece in trial.cut()]
        except Exception:  # it takes no vectors
            return Scope.PARAMETER
        return Scope.ELEMENT if _are_same([_joined(together)], [_joined(pieces)]) else Scope.PARAMETER


Result = dict[str, torch.Tensor]
"""The update of one parameter, and what the optimizer keeps for each of its elements, by name; flat."""


class _Trial(NamedTuple):
    """Some steps.

    Attributes:
        start: the parameters.
        grads: for each step those of the parameters.
    """

    start: list[torch.Tensor]
    grads: list[list[torch.Tensor]]

    @staticmethod
    def drawn(shapes: Sequence[Sequence[int]], device: torch.device) -> "_Trial":
        """Gradients are small in some steps and large in others, as some optimizers clip them."""
        generator = torch.Generator().manual_seed(0)
        start = [torch.randn(*shape, generator=generator).to(device) for shape in shapes]
        scales = [10.0 ** (i % 3 - 1) for i in range(_STEPS)]
        grads = [[torch.randn(*shape, generator=generator).to(device) * scale for shape in shapes] for scale in scales]
        return _Trial(start, grads)

    def only(self, i: int) -> "_Trial":
        """The same trial of one parameter alone."""
        return _Trial([self.start[i]], [[step[i]] for step in self.grads])

    def cut(self) -> list["_Trial"]:
        """The same elements in vectors of other bounds."""
        flat = [torch.cat([x.flatten() for x in each]) for each in (self.start, *self.grads)]
        third = len(flat[0]) // 3
        rows = [x.split([third, 2, len(x) - third - 2]) for x in flat]
        return [_Trial([first], [[step] for step in steps]) for first, *steps in zip(*rows, strict=True)]

    @torch.no_grad()
    def run(self, make: Made) -> list[Result]:
        """What one optimizer makes of it."""
        parameters = [torch.nn.Parameter(p.clone()) for p in self.start]
        optimizer = make(list(parameters))
        for step in self.grads:
            for parameter, grad in zip(parameters, step, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
        pairs = zip(parameters, self.start, strict=True)
        return [{"": (p - start).flatten(), **_state(optimizer.state.get(p, {}), p)} for p, start in pairs]


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


def _are_same(a: Sequence[Result], b: Sequence[Result]) -> bool:
    return all(x.keys() == y.keys() and all(_is_close(x[name], y[name]) for name in x) for x, y in zip(a, b, strict=True))


def _is_close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=0.0, atol=_TOLERANCE * float(x.abs().max()), equal_nan=True)
