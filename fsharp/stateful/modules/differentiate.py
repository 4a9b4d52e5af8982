"""torch.autograd.grad with respect to parameters of a sharded module."""

from collections.abc import Sequence
from typing import Any

import torch

from fsharp.errors import ScheduleError
from fsharp.stateful.modules.module_step import ModuleStep
from fsharp.stateful.modules.parameter import ShardedParameter
from fsharp.stateful.modules.parts.part import Part

_WHERE = "torch.autograd.grad() with respect to parameters of a ShardedModule"


def differentiate(
    owner: Any,
    step: ModuleStep,
    outputs: Any,
    inputs: Sequence[torch.Tensor],
    *,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return of parameters the mean gradients over ranks, as parts; of other inputs what ``torch.autograd.grad`` does.

    It is a step of its own: ``.grad`` stays None, the optimizer has nothing to do, and other forwards keep their backward.
    Refused are options that need a graph of the backward, parameters of several modules, and a step in which others have left
    gradients.
    """
    if create_graph or is_grads_batched:
        raise ScheduleError(
            f"{_WHERE}: create_graph and is_grads_batched need a graph of the backward, which is not kept. Take "
            "`fn, params = model.functional()`: torch.func works on that."
        )
    for x in inputs:
        if isinstance(x, ShardedParameter) and x.owner() is not owner:
            raise ScheduleError(f"{_WHERE}: {x.path!r} is one of another module. Call it for each of the modules.")
    step.clear_up()
    if step.is_accumulating or step.means.tree is not None or step.is_fed:
        raise ScheduleError(
            f"{_WHERE}: other backward passes have left gradients in this step, or were told to. Call it before them, or "
            "after optimizer.step() or zero_grad()."
        )
    sinks, others = step.sinks, [x for x in inputs if not isinstance(x, ShardedParameter)]
    found: tuple[torch.Tensor | None, ...] = ()
    with step.apart():
        if sinks or others:
            found = torch.autograd.grad(outputs, [*sinks, *others], grad_outputs, retain_graph=retain_graph, allow_unused=True)
        rest = iter(found[len(sinks) :])
        result = [step.means.part(x.path) if isinstance(x, ShardedParameter) else next(rest) for x in inputs]
    for i, (x, grad) in enumerate(zip(inputs, result, strict=True)):
        if grad is None and materialize_grads:
            result[i] = Part.of(torch.zeros_like(x.local), x) if isinstance(x, Part) else torch.zeros_like(x)
        elif grad is None and not allow_unused:
            name = repr(x.path) if isinstance(x, Part) else str(i)
            raise RuntimeError(f"{_WHERE}: input {name} was not used. Set allow_unused=True if this is what you want.")
    return tuple(result)
