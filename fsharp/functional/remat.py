"""Rematerialization: release a function's activations after the forward, and recompute them in the backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import optree
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsharp.errors import TreeError
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.sharded import is_sharded
from fsharp.functional.transforms import unwrap_vmap
from fsharp.tracebacks import api_context, call_hiding_frames

Remat = bool | Callable[..., Any] | Sequence[Any]
"""False; True; a policy ``(ctx, op, *args, **kwargs) -> CheckpointPolicy``; or a list of ops whose results are kept."""


def check_remat_argument(remat: Remat) -> None:
    """Raise a TreeError if the argument ``remat`` is neither a bool, a policy nor a list of ops."""
    if not isinstance(remat, bool | list) and not callable(remat):
        raise TreeError(
            f"forward(): remat is {remat!r}, expected True, False, a policy (ctx, op, *args, **kwargs) -> CheckpointPolicy, "
            "or a list of ops, as torch.utils.checkpoint.create_selective_checkpoint_contexts takes them."
        )


def run_with_recomputation(run: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any, remat: Remat) -> Any:
    """Return ``run(fn, args, kwargs)``. A backward that needs activations calls ``run`` again, with the same random numbers.

    ``run`` gathers units and calls ``fn``. The gathers of the second call may run torch ops other than those of the first. If a
    tensor in ``args`` or ``kwargs`` is written to before the backward, autograd raises an error. ``remat``: True, a policy, or
    a list of ops whose results are kept.
    """
    whole: Any = (args, kwargs)
    leaves, spec = optree.tree_flatten(whole, is_leaf=is_sharded)
    generators = [x for x in leaves if isinstance(x, torch.Generator)]
    states = [g.get_state() for g in generators]
    # Contexts of a policy count operations, so they enclose the function alone: a second gather may have other operations.
    first, again = (nullcontext(), nullcontext()) if remat is True else create_selective_checkpoint_contexts(remat)
    context: Any = first

    def call_in_context(*args: Any, **kwargs: Any) -> Any:
        trial = _trial_run(fn, args, kwargs, generators) if _is_checking_remat.get() and context is first else None
        with context:
            result = fn(*args, **kwargs)
        if trial is not None:
            _check_same_results(trial, result)
        return result

    def call(*leaves: Any) -> Any:
        nonlocal context
        now = [g.get_state() for g in generators]
        _set_generator_states(generators, states)
        try:
            return run(call_in_context, *optree.tree_unflatten(spec, leaves))
        finally:
            if context is again:
                _set_generator_states(generators, now)
            context = again

    return checkpoint(partial(call_hiding_frames, call), *leaves, use_reentrant=False)


def _set_generator_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


_is_checking_remat: ContextVar[bool] = ContextVar("checks", default=False)


@api_context
def checking_remat() -> Iterator[None]:
    """Check in this context that functions of ``forward(remat=)`` give the same bits when they are recomputed. For debugging.

    ``forward(remat=)`` then calls each function twice, and compares the results. The backward repeats random numbers of torch's
    global generators and of generators that are arguments. A generator in a closure, a counter or a clock would give other
    values in the backward, and wrong gradients. Shapes and dtypes are compared even without this context.

    Raises:
        TreeError: in ``forward()``: the two results of a function differ.

    Cost: one more forward of each function, without gradients.
    """
    token = _is_checking_remat.set(True)
    try:
        yield
    finally:
        _is_checking_remat.reset(token)


def _trial_run(fn: Callable[..., Any], args: Any, kwargs: Any, generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """Return the tensors in the result of ``fn(*args, **kwargs)``, detached. Restore the states of random generators."""
    states = [g.get_state() for g in generators]
    call: Any = args, kwargs
    gpus = {x.get_device() for x in optree.tree_leaves(call) if isinstance(x, torch.Tensor) and x.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(gpus):
        result = fn(*args, **kwargs)
    _set_generator_states(generators, states)
    return _detached_tensors(result)


def _check_same_results(trial: Sequence[torch.Tensor], result: Any) -> None:
    for i, (x, y) in enumerate(zip(trial, _detached_tensors(result), strict=True)):
        if not torch.equal(x, y):
            raise TreeError(
                f"forward(remat=): computed twice, the function gives two values of its output {i}, {dtype_name(y.dtype)}"
                f"{list(y.shape)}: the backward would compute other activations. Pass generators as arguments, not in a "
                "closure."
            )


def _detached_tensors(tree: Any) -> list[torch.Tensor]:
    return [unwrap_vmap(x).detach() for x in optree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
