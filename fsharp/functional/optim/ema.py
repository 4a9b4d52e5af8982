"""A moving average of the parameters, kept where the optimizer state rests."""

from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import LayoutError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.optim.base import Transform, _name, add_updates, apply_transform, as_transform


class EmaState(NamedTuple):
    """State of :func:`with_ema`.

    Attributes:
        ema: averaged parameters at the optimizer's place, in the main dtype: trainable groups only.
        inner: state of the wrapped transformation.
    """

    ema: Any
    inner: Any


def with_ema(tx: Any, *, decay: float) -> Transform:
    """``tx``, and an average of the parameters it makes: ``ema <- decay * ema + (1 - decay) * p``, from the first ones.

    Args:
        tx: any ``(init, update)`` pair.
        decay: in [0, 1).

    Returns:
        A transform with :class:`EmaState`; ``gather(state.opt.ema, comm=comm)`` makes the average whole.

    Raises:
        LayoutError: a decay outside [0, 1).
    """
    if not 0 <= decay < 1:
        raise LayoutError(f"with_ema(): decay is {decay!r}, expected a number in [0, 1).")
    inner = as_transform(tx)

    def init(params: Any, /, *, comm: Comm | None = None) -> EmaState:
        return EmaState(optree.tree_map(torch.clone, params), inner.init(params, comm=comm))

    def average(ema: Any, params: Any, donate: bool) -> Any:
        return optree.tree_map(lambda e, p: e.lerp_(p, 1 - decay) if donate else e.lerp(p, 1 - decay), ema, params)

    def update(grads: Any, state: EmaState, params: Any, *, comm: Comm, **extra: Any) -> tuple[Any, EmaState]:
        updates, new = inner.update(grads, state.inner, params, comm=comm, **extra)
        return updates, EmaState(average(state.ema, add_updates(params, updates), False), new)

    def apply(grads: Any, state: EmaState, params: Any, *, comm: Comm, donate: bool, **extra: Any) -> tuple[Any, EmaState]:
        params, new = apply_transform(inner, grads, state.inner, params, comm=comm, donate=donate, **extra)
        return params, EmaState(average(state.ema, params, donate), new)

    return Transform(init, update, {"with_ema": decay, "inner": dict(inner.config)}, apply, _name("with_ema", inner.name))
