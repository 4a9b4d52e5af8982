"""Moving averages, kept where the optimizer state rests: of updates, and of parameters."""

from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import LayoutError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.optim.base import Inner, Transform, add_updates, around, as_transform, config_of, named
from fsharp.type_checks import options_checked


class EmaState(NamedTuple):
    """State of :func:`ema`: updates made, and the average of updates."""

    count: int  # type: ignore[assignment]  # tuple.count, which nobody calls on a state
    ema: Any


@options_checked
def ema(decay: float, debias: bool = True) -> Transform:
    """Average updates: ``e <- decay * e + (1 - decay) * u``, from zero. For an average of parameters see :func:`with_ema`.

    Args:
        decay: in [0, 1); else a LayoutError.
        debias: hand on ``e / (1 - decay^t)`` in update ``t``; else ``e``.

    Its state is :class:`EmaState`, one buffer at the optimizer's place, in the dtype of the parameters. ``accumulator_dtype``
    of optax is not here: ``fs.optim.from_optax(optax.ema(...))`` has it.
    """
    _check_decay("ema()", decay)

    def update(updates: Any, state: EmaState, params: Any) -> tuple[Any, EmaState]:
        new, count = optree.tree_map(lambda e, u: e * decay + u.to(e.dtype) * (1 - decay), state.ema, updates), state.count + 1
        return optree.tree_map(lambda e: e / (1 - decay**count), new) if debias else new, EmaState(count, new)

    config = {"ema": config_of(decay=decay, debias=debias)}
    return Transform(lambda params: EmaState(0, optree.tree_map(torch.zeros_like, params)), update, config, name="ema")


class WithEmaState(NamedTuple):
    """State of :func:`with_ema`: averaged parameters of trainable groups in the main dtype, and the inner state."""

    ema: Any
    inner_state: Any


@options_checked
def with_ema(tx: Any, *, decay: float) -> Transform:
    """Wrap ``tx``, and average the parameters it makes: ``ema <- decay * ema + (1 - decay) * p``, from the first ones.

    Args:
        tx: any ``(init, update)`` pair.
        decay: in [0, 1); else a LayoutError.

    Returns:
        A transform with :class:`WithEmaState`; ``gather(state.opt.ema, comm=comm)`` makes the average whole.
    """
    _check_decay("with_ema()", decay)
    inner = as_transform(tx)

    def init(params: Any, /, *, comm: Comm | None = None) -> WithEmaState:
        return WithEmaState(optree.tree_map(torch.clone, params), inner.init(params, comm=comm))

    def step(run: Inner, grads: Any, state: WithEmaState, params: Any, comm: Comm, donate: bool | None) -> Any:
        out, new = run(inner, grads, state.inner_state, params)
        made, move = add_updates(params, out) if donate is None else out, torch.Tensor.lerp_ if donate else torch.Tensor.lerp
        return out, WithEmaState(optree.tree_map(lambda e, p: move(e, p, 1 - decay), state.ema, made), new)

    update, apply = around(step)
    config = {"with_ema": decay, "inner": dict(inner.config)}
    return Transform(init, update, config, apply, named("with_ema", inner.name), inner.extra)


def _check_decay(where: str, decay: float) -> None:
    if not 0 <= decay < 1:
        raise LayoutError(f"{where}: decay is {decay!r}, expected a number in [0, 1).")
