"""Wrappers that choose the steps in which a transformation updates, and the leaves that it updates."""

from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import OptionError
from fsharp.functional.comm.agree import agree, check_on_all_ranks, max_over_ranks
from fsharp.functional.comm.equal_values import exact_text
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import Sharded, map_units, units_of
from fsharp.functional.layout.unit_layout import padding_in_run
from fsharp.functional.optim.base import (
    InnerUpdate,
    Transform,
    apply_transform,
    as_transform,
    wrapper_name,
    wrapper_update_and_apply,
)
from fsharp.type_checks import options_checked


class ApplyIfFiniteState(NamedTuple):
    """State of :func:`apply_if_finite`.

    Attributes:
        notfinite_count: number of consecutive updates with an infinity or NaN, up to the last update.
        last_finite: whether the last update had neither infinity nor NaN.
        total_notfinite: number of all updates with an infinity or NaN.
        inner_state: state of the wrapped transformation.
    """

    notfinite_count: int
    last_finite: bool
    total_notfinite: int
    inner_state: Any


@options_checked
def apply_if_finite(inner: Any, max_consecutive_errors: int) -> Transform:
    """Wrap an optimizer so that all ranks skip an update if gradients hold an infinity or NaN on any rank.

    A skipped update changes neither parameters nor the state of ``inner``. After ``max_consecutive_errors`` skipped updates in
    a row further updates are not skipped, as in optax, so parameters may become infinite or NaN.

    Args:
        inner: an ``(init, update)`` pair. Wrap a whole chain, so that no part of it gets such gradients.
        max_consecutive_errors: largest number of updates to skip in a row; 0 skips none.

    Returns:
        A transformation with :class:`ApplyIfFiniteState`.

    Raises:
        OptionError: ``max_consecutive_errors`` is negative.
        AgreementError: in ``update``, on all ranks: ranks have counted different numbers of skipped updates.

    Cost: one pass over the gradients, and one ``all_reduce`` of 4 bytes for each axis, for which the host waits. If a gradient
    is infinite or NaN, ranks also compare their counts: 40 bytes for each axis.
    """
    if max_consecutive_errors < 0:
        raise OptionError(
            f"apply_if_finite(): max_consecutive_errors is {max_consecutive_errors!r}, expected a whole number from 0."
        )
    tx = as_transform(inner)

    def init(params: Any, /, *, comm: Comm | None = None) -> ApplyIfFiniteState:
        return ApplyIfFiniteState(0, True, 0, tx.init(params, comm=comm))

    def step(grads: Any, state: ApplyIfFiniteState, run: "_RunUpdate", skip: "_SkipUpdate", comm: Comm, donate: bool) -> Any:
        if all_finite(grads, comm=comm):
            out, new = run(grads, state.inner_state)
            return out, ApplyIfFiniteState(0, True, state.total_notfinite, new)
        agree("apply_if_finite()", {"notfinite_count": str(state.notfinite_count)}, comm)  # the count decides whether to skip
        count = state.notfinite_count + 1
        out, new = run(grads, state.inner_state) if count > max_consecutive_errors else skip(state.inner_state)
        return out, ApplyIfFiniteState(count, False, state.total_notfinite + 1, new)

    config = {"apply_if_finite": max_consecutive_errors, "inner": dict(tx.config)}
    return _conditional_transform("apply_if_finite", tx, init, step, config)


def all_finite(tree: Any, *, comm: Comm) -> bool:
    """Return whether every element on every rank is finite, without padding; the same answer on all ranks."""
    held = [x for node in units_of(tree) for x in _buffers_without_padding(node, comm.rank) if x.numel()]
    buffers = [torch.view_as_real(x) if x.is_complex() else x for x in held]
    # The smallest and the largest element are as fast as a sum, and do not overflow. The host waits once, for all buffers.
    extremes = [torch.stack(torch.aminmax(b)).to(comm.device, torch.float64) for b in buffers]
    finite = torch.cat([torch.zeros(1, dtype=torch.float64, device=comm.device), *extremes]).isfinite().all()
    return not max_over_ranks((~finite).float().view(1), comm, label="apply_if_finite()").item()


def _buffers_without_padding(node: Sharded, rank: int) -> Iterator[torch.Tensor]:
    """Yield views of a node's buffers without padding. A loss that uses the buffers may make padding's gradient infinite."""
    for g, x in zip(node.groups, node.buffers, strict=True):
        begin = 0
        for gap in padding_in_run(node.unit, g, node.unit.local_start(g, node.place, rank), len(x)):
            yield x[begin : gap.start]
            begin = gap.stop
        yield x[begin:]


class MultiStepsState(NamedTuple):
    """State of :func:`MultiSteps`.

    Attributes:
        mini_step: number of gradients that were accumulated since the last update.
        gradient_step: number of updates.
        inner_opt_state: state of the wrapped transformation.
        acc_grads: mean or sum of accumulated gradients: a tree like the parameters, in the ``accumulate`` dtype.
    """

    mini_step: int
    gradient_step: int
    inner_opt_state: Any
    acc_grads: Any


@options_checked
def MultiSteps(opt: Any, every_k_schedule: int | Callable[[int], int], use_grad_mean: bool = True) -> Transform:
    """Wrap an optimizer so that it accumulates the gradients of ``k`` steps, and updates parameters in every ``k``-th step.

    Each step reduces its gradients over ranks, and has equal weight, whatever the number of its tokens. ``value_and_grad(...,
    microbatches=k)`` accumulates within one step, reduces once, and weighs uneven batches by their tokens.

    Args:
        opt: the optimizer: an ``(init, update)`` pair.
        every_k_schedule: ``k``, a positive whole number; or a function from the number of updates so far to ``k``.
        use_grad_mean: take the mean of the gradients; False takes their sum.

    Returns:
        A transformation with :class:`MultiStepsState`, where optax returns an object with methods. The last step made an update
        if ``state.mini_step == 0``. For optax's ``should_skip_update_fn`` wrap the result in :func:`apply_if_finite`.

    Raises:
        OptionError: ``k`` is not a positive whole number.
        AgreementError: in ``update``, on all ranks: ranks have a different ``k``, or have accumulated different numbers of
            gradients.

    Cost: one value of state for each parameter, and one pass over these values in each step. In each step ranks compare ``k``
    and their counts: 40 bytes for each axis, for which the host waits.
    """
    tx = as_transform(opt)

    def steps(gradient_step: int) -> int:
        k = every_k_schedule(gradient_step) if callable(every_k_schedule) else every_k_schedule
        if not hasattr(k, "__int__") or k % 1 != 0 or k < 1:
            raise OptionError(f"MultiSteps(): every_k_schedule is {k!r}, expected a positive whole number.")
        return int(k)

    steps(0)

    def init(params: Any, /, *, comm: Comm | None = None) -> MultiStepsState:
        def zeros(node: Sharded) -> Sharded:
            dtypes = [node.unit.groups[group].dtypes.accumulate for group in node.groups]
            return node.replace([torch.zeros_like(b, dtype=dtype) for b, dtype in zip(node.buffers, dtypes, strict=True)])

        return MultiStepsState(0, 0, tx.init(params, comm=comm), map_units(zeros, params))

    def step(grads: Any, state: MultiStepsState, run: "_RunUpdate", skip: "_SkipUpdate", comm: Comm, donate: bool) -> Any:
        def add(acc: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            more = (grad.to(acc.dtype) - acc) / (state.mini_step + 1) if use_grad_mean else grad.to(acc.dtype)
            return acc.add_(more) if donate else acc + more

        def fields(k: int) -> dict[str, str]:
            return {"k": str(k), "mini_step": str(state.mini_step), "gradient_step": str(state.gradient_step)}

        k = check_on_all_ranks("MultiSteps()", comm, lambda: steps(state.gradient_step), fields)
        is_last = state.mini_step + 1 >= k
        acc = optree.tree_map(add, state.acc_grads, grads)
        if not is_last:
            out, new = skip(state.inner_opt_state)
            return out, MultiStepsState(state.mini_step + 1, state.gradient_step, new, acc)
        out, new = run(optree.tree_map(lambda a, g: a.to(g.dtype), acc, grads), state.inner_opt_state)
        return out, MultiStepsState(0, state.gradient_step + 1, new, optree.tree_map(torch.zeros_like, acc))

    config = {"MultiSteps": [exact_text(every_k_schedule), use_grad_mean], "inner": dict(tx.config)}
    return _conditional_transform("MultiSteps", tx, init, step, config)


# The first result is updates in Transform.update, and new parameters in Transform.apply.
_RunUpdate = Callable[[Any, Any], tuple[Any, Any]]  # (gradients, inner state) -> inner update, new inner state
_SkipUpdate = Callable[[Any], tuple[Any, Any]]  # (inner state) -> update that changes nothing, same state


def _conditional_transform(
    name: str, inner: Transform, init: Any, step: Callable[..., Any], config: dict[str, Any]
) -> Transform:
    """Return a wrapper of ``inner`` that updates by ``inner``, or skips the update, as the function ``step`` decides.

    ``step(grads, state, run, skip, comm, donate)`` calls ``run(gradients, inner state)`` or ``skip(inner state)``. Both return
    ``(updates or new parameters, new inner state)``. ``step`` returns the first item unchanged, and the wrapper's new state.
    """

    def step_or_skip(run: InnerUpdate, grads: Any, state: Any, params: Any, comm: Comm, donate: bool | None) -> Any:
        def skip(same: Any) -> Any:
            if donate is None:
                return optree.tree_map(torch.zeros_like, params), same
            if donate:
                return params, same
            # A new state shares no memory with the old state, which may be donated later.
            both: Any = (params, same)
            return optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, both)

        return step(grads, state, lambda seen, own: run(inner, seen, own, params), skip, comm, bool(donate))

    update, apply = wrapper_update_and_apply(step_or_skip)
    return Transform(init, update, config, apply, wrapper_name(name, inner.name), inner.extra_arg_names)


def with_unchanged_paths(tx: Transform, paths: Container[str]) -> Transform:
    """Return ``tx`` with an ``apply(grads, state, params)`` that changes no element at ``paths`` of parameters or state."""

    def fixed_leaves(node: Sharded, comm: Comm) -> dict[str, Any]:
        return {path: here for path, here in node.local_leaves(comm.rank).items() if path in paths}

    def apply(grads: Any, state: Any, params: Any, *, comm: Comm, donate: bool, **extra: Any) -> tuple[Any, Any]:
        before = [{path: x.clone() for path, x in fixed_leaves(node, comm).items()} for node in units_of((params, state))]
        params, state = apply_transform(tx, grads, state, params, comm=comm, donate=donate, **extra)
        for node, old in zip(units_of((params, state)), before, strict=True):
            for path, x in fixed_leaves(node, comm).items():
                x.copy_(old[path])
        return params, state

    return replace(tx, apply=apply)
