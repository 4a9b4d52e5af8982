"""Moving averages, kept where the optimizer state rests: of updates, and of parameters."""

from typing import Any, NamedTuple

import optree
import torch

from fsharp.functional.comm.protocol import Comm
from fsharp.functional.optim.base import (
    InnerUpdate,
    Transform,
    apply_updates,
    as_transform,
    exact_texts,
    wrapper_name,
    wrapper_update_and_apply,
)
from fsharp.functional.optim.elementwise import check_decays
from fsharp.type_checks import options_checked


class EmaState(NamedTuple):
    """State of :func:`ema`: number of updates, and the average of updates."""

    count: int  # type: ignore[assignment]  # tuple.count, which nobody calls on a state
    ema: Any


@options_checked
def ema(decay: float, debias: bool = True) -> Transform:
    """Return a transformation that replaces updates by their moving average ``e <- decay * e + (1 - decay) * u``, from zero.

    For a moving average of parameters see :func:`with_ema`.

    Args:
        decay: a number in [0, 1).
        debias: return ``e / (1 - decay^t)`` in update ``t``, in place of ``e``.

    Raises:
        OptionError: ``decay`` is outside of [0, 1).

    The state is :class:`EmaState`: one value for each parameter, in the dtype of parameters. For ``accumulator_dtype`` of optax
    use ``fs.optim.from_optax(optax.ema(...))``.
    """
    check_decays("ema()", decay=decay)

    def update(updates: Any, state: EmaState, params: Any) -> tuple[Any, EmaState]:
        new, count = optree.tree_map(lambda e, u: e * decay + u.to(e.dtype) * (1 - decay), state.ema, updates), state.count + 1
        return optree.tree_map(lambda e: e / (1 - decay**count), new) if debias else new, EmaState(count, new)

    config = {"ema": exact_texts(decay=decay, debias=debias)}
    return Transform(lambda params: EmaState(0, optree.tree_map(torch.zeros_like, params)), update, config, name="ema")


class WithEmaState(NamedTuple):
    """State of :func:`with_ema`: averages of trainable parameters in the ``main`` dtype, and the inner state."""

    ema: Any
    inner_state: Any


@options_checked
def with_ema(tx: Any, *, decay: float) -> Transform:
    """Wrap an optimizer, and keep a moving average of parameters: ``ema <- decay * ema + (1 - decay) * p``.

    ``p`` are the parameters after the update. The average begins with the initial parameters.

    Args:
        tx: the optimizer: an ``(init, update)`` pair.
        decay: a number in [0, 1).

    Returns:
        A transformation with :class:`WithEmaState`; ``gather(state.opt.ema, comm=comm)`` returns the whole average. Memory:
        one value of state for each parameter, beside the state of ``tx``.

    Raises:
        OptionError: ``decay`` is outside of [0, 1).
    """
    check_decays("with_ema()", decay=decay)
    inner = as_transform(tx)

    def init(params: Any, /, *, comm: Comm | None = None) -> WithEmaState:
        return WithEmaState(optree.tree_map(torch.clone, params), inner.init(params, comm=comm))

    def step(run: InnerUpdate, grads: Any, state: WithEmaState, params: Any, comm: Comm, donate: bool | None) -> Any:
        out, new = run(inner, grads, state.inner_state, params)
        made, move = apply_updates(params, out) if donate is None else out, torch.Tensor.lerp_ if donate else torch.Tensor.lerp
        return out, WithEmaState(optree.tree_map(lambda e, p: move(e, p, 1 - decay), state.ema, made), new)

    update, apply = wrapper_update_and_apply(step)
    config = {"with_ema": decay, "inner": dict(inner.config)}
    return Transform(init, update, config, apply, wrapper_name("with_ema", inner.name), inner.extra_arg_names)
