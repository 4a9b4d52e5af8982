"""Small transformations to chain, with the names of optax.

Each operation here rounds once, so an element's bits depend on the element alone. For kernels that may round differently at the
end of a tensor see [Note: whole vectors] in ``elementwise``.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import torch

from fsharp.functional.comm.protocol import Comm
from fsharp.functional.optim.base import Transform, exact_texts
from fsharp.functional.optim.elementwise import PerPath, ScalarOrSchedule, adam, add_scaled_parameters_, schedule_value
from fsharp.functional.optim.partition import masked
from fsharp.functional.tree.paths import Patterns
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked


@api_boundary
def identity() -> Transform:
    """Return a transformation that leaves updates unchanged."""
    return Transform(lambda params: (), lambda updates, state, params: (updates, ()), {"identity": {}}, name="identity")


@options_checked
def scale(step_size: float) -> Transform:
    """Return a transformation that multiplies updates by ``step_size``."""

    def update(updates: Any, state: tuple[()], params: Any) -> tuple[Any, tuple[()]]:
        return optree.tree_map(lambda u: u * step_size, updates), ()

    return Transform(lambda params: (), update, {"scale": exact_texts(step_size=step_size)}, name="scale")


class ScaleByScheduleState(NamedTuple):
    """State of :func:`scale_by_schedule`: number of updates."""

    count: int  # type: ignore[assignment]  # tuple.count, which nobody calls on a state


@options_checked
def scale_by_schedule(step_size_fn: Callable[[int], float]) -> Transform:
    """Return a transformation that multiplies updates by a function of the number of updates so far.

    The state is :class:`ScaleByScheduleState`.
    """

    def update(updates: Any, state: ScaleByScheduleState, params: Any) -> tuple[Any, ScaleByScheduleState]:
        factor = schedule_value(step_size_fn, state.count, "step_size_fn")
        return optree.tree_map(lambda u: u * factor, updates), ScaleByScheduleState(state.count + 1)

    config = {"scale_by_schedule": exact_texts(step_size_fn=step_size_fn)}
    return Transform(lambda params: ScaleByScheduleState(0), update, config, name="scale_by_schedule")


@options_checked
def scale_by_learning_rate(learning_rate: ScalarOrSchedule) -> Transform:
    """Return a transformation that multiplies updates by ``-learning_rate``, a number or a schedule."""
    if not callable(learning_rate):
        return scale(-learning_rate)
    tx = scale_by_schedule(lambda count: -schedule_value(learning_rate, count))
    config = {"scale_by_learning_rate": exact_texts(learning_rate=learning_rate)}
    return replace(tx, config=config)


@options_checked
def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transform:
    """Return a transformation that replaces gradients by ``m' / (sqrt(v') + eps)``: Adam's update before ``-learning_rate``.

    Kernel and state are those of :func:`~fsharp.optim.adamw`. Raises OptionError if ``b1`` or ``b2`` is outside of [0, 1). For
    ``eps_root``, ``mu_dtype`` and ``nesterov`` of optax use ``fs.optim.from_optax(optax.scale_by_adam(...))``.
    """
    tx = adam(-1.0, b1, b2, eps)
    return replace(tx, config={"scale_by_adam": exact_texts(b1=b1, b2=b2, eps=eps)}, name="scale_by_adam")


@options_checked
def add_decayed_weights(weight_decay: PerPath = 0.0, mask: Patterns | None = None) -> Transform:
    """Return a transformation that adds ``weight_decay`` times the parameters to updates.

    Args:
        weight_decay: a number, or a rule per path as for :func:`~fsharp.optim.adamw`. optax would call a function with the
            number of updates.
        mask: the leaves that decay, as for :func:`masked`; None means all.

    Cost: no state; one pass over the parameters.
    """

    def update(updates: Any, state: tuple[()], params: Any, *, comm: Comm) -> tuple[Any, tuple[()]]:
        result = optree.tree_map(lambda u, p: u.to(p.dtype, copy=True), updates, params)
        return add_scaled_parameters_(result, params, 1.0, comm.rank, 1.0, weight_decay), ()

    config = {"add_decayed_weights": exact_texts(weight_decay=weight_decay)}
    tx = Transform(lambda params: (), update, config, name="add_decayed_weights")
    return tx if mask is None else masked(tx, mask)


class TraceState(NamedTuple):
    """State of :func:`trace`: a tree like the parameters."""

    trace: Any


@options_checked
def trace(decay: float, nesterov: bool = False) -> Transform:
    """Return a transformation that replaces each update ``u`` by the momentum ``t <- u + decay * t``.

    With ``nesterov`` the result is ``u + decay * t``, with the new ``t``. The state is :class:`TraceState`: one value for each
    parameter, in the dtype of parameters. ``optax.trace`` also takes an ``accumulator_dtype``: for that use
    ``fs.optim.from_optax(optax.trace(...))``.
    """

    def add(updates: Any, held: Any) -> Any:
        return optree.tree_map(lambda u, t: u.to(t.dtype) + t * decay, updates, held)

    def update(updates: Any, state: TraceState, params: Any) -> tuple[Any, TraceState]:
        new = add(updates, state.trace)
        return add(updates, new) if nesterov else new, TraceState(new)

    config = {"trace": exact_texts(decay=decay, nesterov=nesterov)}
    return Transform(lambda params: TraceState(optree.tree_map(torch.zeros_like, params)), update, config, name="trace")
