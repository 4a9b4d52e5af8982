"""Rematerialization: what a function computes in the forward is let go of, and computed again in the backward."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsharp.errors import TreeError
from fsharp.functional.layout.sharded import is_sharded

Remat = bool | Callable[..., Any] | Sequence[Any]
"""False; True; a policy ``(ctx, op, *args, **kwargs) -> CheckpointPolicy``; or a list of ops whose results are kept."""


def check_remat(remat: Remat) -> None:
    """Refuse what says nothing about what to recompute.

    Raises:
        TreeError: it does not.
    """
    if not isinstance(remat, bool | list) and not callable(remat):
        raise TreeError(
            f"forward(): remat is {remat!r}, expected True, False, a policy (ctx, op, *args, **kwargs) -> CheckpointPolicy, "
            "or a list of ops, as torch.utils.checkpoint.create_selective_checkpoint_contexts takes them."
        )


def recomputed(run: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any, remat: Remat) -> Any:
    """``run(fn, args, kwargs)``, made again by a backward that needs its activations, with the same random numbers.

    Args:
        run: calls ``fn``. It may do other things around that, such as gathers, which need not be the same both times.
        fn: the function.
        args: a pytree; its tensors must not be written to until the backward, which is an error of autograd.
        kwargs: another one.
        remat: what to recompute: True for everything.
    """
    whole: Any = (args, kwargs)
    leaves, spec = optree.tree_flatten(whole, is_leaf=is_sharded)
    generators = [x for x in leaves if isinstance(x, torch.Generator)]
    states = [g.get_state() for g in generators]
    # Around the function alone: a policy's contexts count operations, and gathers may have others the second time.
    first, again = (nullcontext(), nullcontext()) if remat is True else create_selective_checkpoint_contexts(remat)
    context: Any = first

    def called(*args: Any, **kwargs: Any) -> Any:
        with context:
            return fn(*args, **kwargs)

    def call(*leaves: Any) -> Any:
        nonlocal context
        now = [g.get_state() for g in generators]
        _set_states(generators, states)
        try:
            return run(called, *optree.tree_unflatten(spec, leaves))
        finally:
            if context is again:
                _set_states(generators, now)
            context = again

    return checkpoint(call, *leaves, use_reentrant=False)


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
