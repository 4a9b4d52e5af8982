"""Find out by a trial whether an optimizer's update depends on single elements, whole parameters, or all parameters."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from fsharp.errors import TreeError
from fsharp.functional.optim.probe import isclose

_TRIAL_SHAPES = ((4, 6), (5,), (3, 2, 4), (6, 3))
_TRIAL_MATRICES = ((4, 6), (6, 3), (5, 5))
_NUM_TRIAL_STEPS = 8  # some optimizers update differently in every fifth step
_TRIAL_LR = 1e-2


class UpdateScope(IntEnum):
    """The elements on which the update of one element depends: this element, its whole parameter, or all parameters."""

    ELEMENT = 0
    """The element alone: buffers may be cut and joined anywhere."""
    PARAMETER = 1
    """Other elements of its parameter, or the parameter's shape."""
    EVERYTHING = 2
    """Other parameters."""


def probe_update_scope(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    device: torch.device,
    choices: Sequence[Sequence[Sequence[int]]] = (_TRIAL_SHAPES, _TRIAL_MATRICES),  # some take matrices alone
    num_steps: int = _NUM_TRIAL_STEPS,
) -> UpdateScope:
    """Return the :class:`UpdateScope` of a class with ``defaults``, and with ``options`` of a group, found by trials.

    The trials make ``num_steps`` steps on random tensors, with the first list of shapes in ``choices`` that the optimizer
    accepts. The trials update all tensors together, each tensor alone, and flat pieces that cross the bounds of tensors. If
    updates together and alone differ, the scope is ``EVERYTHING``. Else, if the updates of pieces differ, or fail, it is
    ``PARAMETER``. It also is ``PARAMETER`` if a state tensor of several elements has another shape than its parameter, such as
    row statistics. Else it is ``ELEMENT``.

    Raises TreeError if no list of shapes is accepted, ``step()`` needs a closure, or a key of ``optimizer.state`` is no
    parameter. Raises TreeError if a new instance that gets state and options makes a different step.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TreeError(
            f"ShardedOptimizer(): {optimizer.__name__} computes the loss several times in a step, by a closure, and gradients "
            "of a sharded module serve one update. Use an optimizer whose step() needs no closure."
        )
    make = partial(_new_optimizer, optimizer, options, defaults)
    with _preserving_generator_state(device):
        for shapes in choices:
            trial = _random_param_grad_stacks(shapes, num_steps, device)
            try:
                together, has_other_shapes = _updates_in_trial(make, trial)
                break
            except TreeError:
                raise
            except Exception as raised:
                error = raised
        else:
            make([x[0] for x in trial])  # wrong options raise the optimizer's own error here
            raise TreeError(
                f"ShardedOptimizer(): {optimizer.__name__} was tried on small dense parameters, to find out whether it can "
                f"update parts of them, and raised {type(error).__name__}: {error}"
            ) from error
        alone = [_updates_in_trial(make, [each])[0][0] for each in trial]
        if not all(isclose(x, y).all() for x, y in zip(together, alone, strict=True)):
            return UpdateScope.EVERYTHING
        _check_state_is_complete(optimizer, make, trial, together)
        elements = torch.cat([each.reshape(len(each), -1) for each in trial], 1)
        third = elements.shape[1] // 3
        try:
            pieces = [_updates_in_trial(make, [x])[0][0] for x in elements.tensor_split([third, third + 2], 1)]
        except Exception:  # the optimizer takes no vectors
            return UpdateScope.PARAMETER
        is_same = bool(isclose(torch.cat(together), torch.cat(pieces)).all())
        return UpdateScope.ELEMENT if is_same and not has_other_shapes else UpdateScope.PARAMETER


def _check_state_is_complete(
    optimizer: type[torch.optim.Optimizer],
    make: Callable[[list[Any]], torch.optim.Optimizer],
    trial: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
) -> None:
    """Raise TreeError if updates of ``optimizer`` depend on values that are neither in its state nor in its options.

    A new instance makes each step of ``trial``, with state and options of the last. ``expected``: updates by one instance.
    """
    try:
        resumed, _ = _updates_in_trial(make, trial, resumes=True)
        if all(isclose(x, y).all() for x, y in zip(resumed, expected, strict=True)):
            return
        found = "made another step"
    except Exception as error:
        found = f"raised {type(error).__name__}"
    raise TreeError(
        f"ShardedOptimizer(): a new {optimizer.__name__} with the state and the param_groups of one that had made steps "
        f"{found}, so the class keeps values elsewhere, which would not be saved. Use a class, or options of it, that keep all "
        "in param_groups, or in the state of each parameter."
    )


def make_first_step(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any], like: torch.Tensor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a step with zero gradient on a copy of ``like``. Return its state, and the options of its parameter group.

    ``options``: those of the group; ``defaults``: those of the class. A ``"step"`` in the state or the options is set back to
    0. Memory: four times the parameter's, and the state.
    """
    parameter = torch.nn.Parameter(like.detach().clone())
    parameter.grad = torch.zeros_like(parameter)
    with _preserving_generator_state(like.device):
        made = _new_optimizer(optimizer, options, defaults, [parameter])
        made.step()
    found = dict(made.state.get(parameter, {})), _options_of_group(made.param_groups[0])
    for each in found:
        if "step" in each:
            each["step"] = each["step"] * 0
    return found


def _options_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _preserving_generator_state(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _new_optimizer(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    parameters: list[torch.Tensor],
) -> torch.optim.Optimizer:
    own, shared = copy.deepcopy((_options_of_group(options), dict(defaults)))
    return optimizer([{**own, "params": parameters}], **shared)


def _random_param_grad_stacks(shapes: Iterable[Sequence[int]], num_steps: int, device: torch.device) -> list[torch.Tensor]:
    """Return, for each shape, a random parameter and its gradients, stacked: ``[1 + num_steps, *shape]``."""
    generator = torch.Generator().manual_seed(0)
    scales = [1.0, *(10.0 ** (i % 3 - 1) for i in range(num_steps))]  # some optimizers clip large gradients
    drawn = [torch.randn(1 + num_steps, *shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]
    return [torch.stack([x * scale for x, scale in zip(each, scales, strict=True)]).to(device) for each in drawn]


@torch.no_grad()
def _updates_in_trial(
    make_optimizer: Callable[[list[Any]], torch.optim.Optimizer], trial: Sequence[torch.Tensor], *, resumes: bool = False
) -> tuple[list[torch.Tensor], bool]:
    """Run an optimizer on ``trial``, a result of :func:`_random_param_grad_stacks`. Return the flat update of each parameter.

    Also return whether some state differs in shape from its parameter. If ``resumes``, a new instance makes each step.
    """
    parameters = [torch.nn.Parameter(x[0].clone()) for x in trial]
    made = make_optimizer(list(parameters))
    for group in made.param_groups:  # with a learning rate of zero all updates would be equal
        rate = group.get("lr")
        if rate is not None:
            group["lr"] = torch.full_like(rate, _TRIAL_LR) if isinstance(rate, torch.Tensor) else _TRIAL_LR
    for grads in zip(*(x[1:] for x in trial), strict=True):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        if resumes:
            before, made = made, make_optimizer(list(parameters))
            made.state.update(before.state)
            for group, theirs in zip(made.param_groups, before.param_groups, strict=True):
                group.update(_options_of_group(theirs))
        made.step()
    if others := [key for key in made.state if not isinstance(key, torch.Tensor)]:
        raise TreeError(
            f"ShardedOptimizer(): {type(made).__name__} keeps state[{others[0]!r}], which belongs to no parameter, so it would "
            "not be saved. Use a class that keeps such a value in param_groups, or in the state of each parameter."
        )
    kept = [(x, p.shape) for p in parameters for x in torch_pytree.tree_leaves(dict(made.state.get(p, {})))]
    has_other_shapes = any(isinstance(x, torch.Tensor) and x.numel() > 1 and x.shape != shape for x, shape in kept)
    return [(p - x[0]).flatten() for p, x in zip(parameters, trial, strict=True)], has_other_shapes
