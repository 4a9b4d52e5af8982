"""train_step, a whole training step; and value_and_grad, which computes loss and gradients."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from fsharp.errors import LossError, TreeError
from fsharp.functional.comm.checked_units import check_not_main_copies, checked_units_of
from fsharp.functional.comm.protocol import Comm, LabelPrefixComm, engine_of
from fsharp.functional.comm.residuals import PerRank, ResidualViews, prepare_residuals
from fsharp.functional.comm.settings_digests import settings_digest
from fsharp.functional.comm.tree_labels import copy_tree_labels
from fsharp.functional.layout.sharded import Sharded, is_sharded, map_units, units_of
from fsharp.functional.loss import Loss, average, check_depends_on_parameters, loss_sum_and_weight, split_batch, type_text
from fsharp.functional.moves import reduce_scatter
from fsharp.functional.optim.base import as_transform, settings_text_to_compare
from fsharp.functional.release import is_plain_strided
from fsharp.functional.sinks import GradientSinks, take_gradient_buffers, with_sinks
from fsharp.functional.state import TrainState, update
from fsharp.functional.transforms import check_no_transform_active
from fsharp.torch_compile import call_compiled_like_caller, disable_compile
from fsharp.type_checks import options_checked

LossFn = Callable[[Any, Any, Comm], Any]
"""Type of ``loss_fn(params, batch, comm)``, which returns a scalar mean or a pair of scalars ``(sum, weight)``.

The weight is a number or an integer tensor. A floating-point weight is returned as ``fs.Loss(sum, weight)``. With
``has_aux=True`` the function returns ``(loss, aux)``."""


@disable_compile
@options_checked
def train_step(
    loss_fn: LossFn, tx: Any, *, microbatches: int = 1, has_aux: bool = False, donate: bool = False
) -> Callable[[TrainState, Any, Comm], tuple[TrainState, Any]]:
    """Return a pure training step ``step(state, batch, comm) -> (state, metrics)`` for a loss function and an optimizer.

    The step does what :func:`value_and_grad`, :func:`~fsharp.reduce_scatter`, :func:`~fsharp.average` and
    :func:`~fsharp.update` do one after another, with the same bits; ``metrics`` are :class:`~fsharp.Metrics`. You can write
    your own step from these functions. Only in this step may a scheduler sum gradients over ranks in place, which saves memory
    under ``ddp`` and ``hsdp``.

    Args:
        loss_fn: ``loss_fn(params, batch, comm)`` returns the mean loss of this rank, or ``(sum, weight)`` if ranks have
            different numbers of tokens.
        tx: the optimizer: an ``(init, update)`` pair such as :func:`~fsharp.optim.adamw` returns.
        microbatches: number of equal parts into which this rank's batch is split along dim 0.
        has_aux: ``loss_fn`` returns ``(loss, aux)``, and the step returns ``(state, (metrics, aux))``, with the ``aux`` of this
            rank, as :func:`value_and_grad` returns it.
        donate: allow the step to overwrite the memory of ``state``. The caller must not use ``state`` afterwards, nor tensors
            that share its memory.

    Raises the errors of ``value_and_grad``, ``reduce_scatter``, ``average`` and ``update``.
    """
    tx = as_transform(tx)
    settings = f"{tx.name or 'a transformation'} ({settings_digest(settings_text_to_compare(tx))})"
    grad_fn = _make_grad_fn(loss_fn, microbatches, has_aux=has_aux, final_sum_in_place=True)

    @disable_compile
    def step(state: TrainState, batch: Any, comm: Comm) -> tuple[TrainState, Any]:
        residuals, number = state.residuals, state.step
        value, grads, *new_residuals = grad_fn(state.params, batch, comm=comm, residuals=residuals, step=number, donate=donate)
        if not new_residuals:  # where gradients rest -> where the optimizer wants them
            grads = reduce_scatter(grads, comm=comm, step=number)
        else:  # encoding errors of earlier gradients are added
            grads, residuals = reduce_scatter(grads, comm=comm, residuals=new_residuals[0], step=number, donate=True)
            state = state._replace(residuals=residuals)
        loss, aux = value if has_aux else (value, None)
        # Ranks compare labels: they raise an error if steps or settings differ.
        named = LabelPrefixComm(comm, f"the loss of update {state.step} by {settings}: ")
        metrics, grads = average(loss, grads, comm=named, donate=True)  # one divisor for all microbatches and ranks
        state = update(tx, grads, state, comm=comm, donate=donate, value=metrics.loss)  # optimizer -> parameters
        return state, ((metrics, aux) if has_aux else metrics)

    return step


@disable_compile
@options_checked
def value_and_grad(loss_fn: LossFn, *, microbatches: int = 1, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function ``(params, batch, *, comm) -> (loss, grads)`` for the loss of this rank, summed over microbatches.

    As soon as the backward has a unit's gradient, the gradient is reduced to the place of gradients, in the ``accumulate``
    dtype. Loss and gradients are weighted sums; :func:`~fsharp.average` divides them once the sums of all ranks are added.

    With ``Precision(feedback=True)`` the function also takes ``residuals=state.residuals``, and returns ``(loss, grads,
    residuals)``. Pass these residuals to :func:`~fsharp.reduce_scatter`, which returns the residuals for the next step.
    ``donate=True`` overwrites ``state.residuals``. With a wire that rounds stochastically (:func:`~fsharp.formats.stochastic`)
    pass ``step=state.step``, here and to :func:`~fsharp.reduce_scatter`.

    Args:
        loss_fn: ``loss_fn(params, batch, comm)`` returns a mean, which counts with weight 1 for each microbatch, or
            ``(sum, weight)``. With ``(sum, weight)`` the result does not depend on how tokens are spread over microbatches and
            ranks. Weights are not differentiated.
        microbatches: number of equal parts into which every tensor of the batch is split along dim 0. Units in the batch, such
            as those of a teacher, and other leaves are passed whole with each part. Gradients of microbatches are added in
            order: before the reduction over ranks if gradients rest partial, as under ``ddp``; after it if they rest
            sharded.
        has_aux: ``loss_fn`` returns ``(loss, aux)``, where ``aux`` is any pytree, and the result is ``((loss, aux), grads)``,
            as in JAX. Tensors in ``aux`` are detached. With several microbatches ``aux`` is a list with one entry for each.

    Raises:
        LossError: the loss or its weight is wrong, or depends on no parameter.
        TreeError: ``params`` are main copies from :func:`~fsharp.shard`; pass ``params`` of :func:`~fsharp.init_state`.
        LossError: the batch cannot be split.
        LossError: the call is under a ``torch.func`` transform; ``loss_fn`` itself may use transforms.
        TreeError: ``residuals`` are missing for ``Precision(feedback=True)``, or are those of another layout.
        TreeError: ``step`` is missing for a format that rounds stochastically, or is no integer of at least 0.

    Cost: under ``zero3`` two gathers and one reduction for each unit and microbatch. Memory: one full unit beside the shards.
    As in ``Tensor.backward``, tensors with ``requires_grad`` that are not parameters get their gradient added to ``.grad``.
    There is no ``argnums``: for the gradient of a tensor of the batch, call its ``requires_grad_()``, and read its ``.grad``.
    """
    return _make_grad_fn(loss_fn, microbatches, has_aux=has_aux, final_sum_in_place=False)


def _make_grad_fn(loss_fn: LossFn, microbatches: int, *, has_aux: bool, final_sum_in_place: bool) -> Callable[..., Any]:
    """Return the function of :func:`value_and_grad`.

    With ``final_sum_in_place`` a scheduler may write sums over ranks to the gradients, before :func:`reduce_scatter`.
    """
    if microbatches < 1:
        raise LossError(f"value_and_grad(): microbatches is {microbatches!r}, expected an integer of at least 1.")
    _check_loss_fn_signature(loss_fn)

    @disable_compile
    def grad_fn(
        params: Any, batch: Any, *, comm: Comm, residuals: PerRank | None = None, step: int | None = None, donate: bool = False
    ) -> Any:
        check_no_transform_active("value_and_grad()")
        if type(params) is TrainState:
            raise TreeError("value_and_grad(): got a TrainState, expected its parameters: pass state.params.")
        nodes = checked_units_of("value_and_grad()", params, comm)
        check_not_main_copies("value_and_grad()", nodes)
        units = [node.unit for node in nodes]
        if comm.device.type != "meta":
            for node in nodes:
                if node.raw_buffers and getattr(node.raw_buffers[0], "is_meta", False):
                    what = f"value_and_grad(): unit {node.unit.display_name} is on the meta device, and has no values."
                    raise TreeError(f"{what} Draw them by fs.init_params(initializers, layout, comm, key=0).")
        own, views = prepare_residuals("value_and_grad()", residuals, units, donate=donate, step=step, rank=comm.rank)
        parts = split_batch(batch, microbatches)
        aux: list[Any] = []
        fn = _keeping_aux(loss_fn, aux, params) if has_aux else loss_fn
        if (engine := engine_of(comm)) is not None:
            total, grads = engine.run_value_and_grad(fn, params, parts, comm, views, final_sum_in_place=final_sum_in_place)
        else:
            total, grads, is_reached = _value_and_grad_of_microbatch(fn, params, parts[0], comm, views)
            for part in parts[1:]:
                loss, new, is_reached_too = _value_and_grad_of_microbatch(fn, params, part, comm, views)
                total = Loss(total.sum + loss.sum, total.weight + loss.weight)
                grads, is_reached = optree.tree_map(torch.Tensor.add_, grads, new), is_reached or is_reached_too
            if not is_reached:
                raise LossError(
                    "value_and_grad(): the loss has no gradient, as it depends on no parameter. Were parameters detached?"
                )
            grads = map_units(lambda x: x.with_buffers(x.buffers, reduction="sum") if is_sharded(x) else x, grads)
            copy_tree_labels(units_of(grads), units_of(params))  # ranks compare the number of the update
        value = (total, aux if microbatches > 1 else aux[0]) if has_aux else total
        return (value, grads) if own is None else (value, grads, own)

    return grad_fn


def _check_loss_fn_signature(loss_fn: LossFn) -> None:
    try:  # the function's own signature: a decorator may take other arguments than the function in it
        signature = inspect.signature(loss_fn, follow_wrapped=False)
    except (TypeError, ValueError):  # a callable without a signature
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        name, takes = getattr(loss_fn, "__name__", "loss_fn"), signature.replace(return_annotation=signature.empty)
        raise LossError(f"value_and_grad(): {name} is called as {name}(params, batch, comm), and takes {takes}.") from error


def _keeping_aux(loss_fn: LossFn, kept: list[Any], params: Any) -> LossFn:
    """Return a loss function that returns the loss alone, and appends ``aux`` to ``kept``.

    Tensors in ``aux`` are detached. Tensors that share memory with ``params`` are copied.
    """
    places = {b.untyped_storage().data_ptr() for node in units_of(params) for b in node.raw_buffers if b.numel()}

    def detach(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        is_parameter = is_plain_strided(x) and x.numel() and x.untyped_storage().data_ptr() in places
        return x.detach().clone() if is_parameter else x.detach()

    def fn(params: Any, batch: Any, comm: Comm) -> Any:
        value = loss_fn(params, batch, comm)
        if not isinstance(value, tuple) or len(value) != 2:
            raise LossError(
                f"value_and_grad(has_aux=True): the loss function returned {type_text(value)}, expected (loss, aux)."
            )
        loss, aux = value
        kept.append(optree.tree_map(detach, aux))
        return loss

    return fn


def _value_and_grad_of_microbatch(
    loss_fn: LossFn, params: Any, batch: Any, comm: Comm, residuals: ResidualViews
) -> tuple[Loss, Any, bool]:
    """Return loss, gradients, and whether a gradient has reached a parameter. Parameters not reached have zero gradients."""
    with torch.enable_grad():
        probed = with_sinks(params, GradientSinks(residuals))
        nodes = units_of(probed)
        sinks = [sink for node in nodes for sink in node.sinks]
        loss = loss_sum_and_weight(call_compiled_like_caller(loss_fn, probed, batch, comm))
        check_depends_on_parameters(loss, has_trainable=bool(sinks))
        torch.autograd.backward(loss.sum)  # grad() would not reach what reentrant checkpoints hide
    found = [grad for node in nodes for grad in take_gradient_buffers(node, comm)]
    flat = iter(_copy_shared_gradients(sinks, found))

    def gradient_of(node: Sharded) -> Sharded:
        groups = node.unit.trainable_groups
        return Sharded([next(flat) for _ in groups], node.unit, node.unit.strategy.grads, groups)

    grads = map_units(gradient_of, params)
    return Loss(loss.sum.detach().double(), loss.weight.detach().double()), grads, any(g is not None for g in found)


def _copy_shared_gradients(sinks: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return ``gradients`` in memory of their own, for additions in place. Replace None by zeros in the shape of the sink.

    Gradients from autograd may be expanded, or share memory.
    """
    result: list[torch.Tensor] = []
    seen: set[int] = set()
    for sink, grad in zip(sinks, gradients, strict=True):
        if grad is None:
            result.append(torch.zeros_like(sink, memory_format=torch.contiguous_format))
            continue
        storage = grad.untyped_storage()
        is_own = storage.data_ptr() not in seen and storage.nbytes() == grad.numel() * grad.element_size()
        seen.add(storage.data_ptr())
        result.append(grad if is_own and grad.is_contiguous() else grad.clone(memory_format=torch.contiguous_format))
    return result
