"""TrainState, value_and_grad, update and train_step: what the other functions are for."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch.utils import _pytree as torch_pytree

from fsharp.errors import LossError, TreeError, problem
from fsharp.functional.comm.agree import together
from fsharp.functional.comm.collectives import all_reduce
from fsharp.functional.comm.protocol import Comm, Engine, Labelled
from fsharp.functional.layout.describe import describe_units
from fsharp.functional.layout.sharded import (
    Sharded,
    check_kept,
    donate_nodes,
    is_sharded,
    map_units,
    merge,
    trainable,
    units_of,
)
from fsharp.functional.moves import check_comm, gather, on_device, reduce_scatter
from fsharp.functional.optim.base import Transform, apply_transform, as_transform, check_gradients, check_shared
from fsharp.functional.sinks import with_sinks as with_sinks

LossFn = Callable[[Any, Any, Comm], Any]
"""``loss_fn(params, batch, comm)``: a scalar mean, or a pair of scalars ``(sum, weight)``; with an aux, ``(loss, aux)``."""


class TrainState(NamedTuple):
    """Everything a step needs and makes; a pytree.

    Attributes:
        step: updates made, skipped ones included.
        params: a tree of :class:`~fsharp.Sharded` where parameters rest, in the compute dtype.
        main: the same tree with, at the optimizer's place, the groups that have a main copy in another dtype.
        opt: state of the gradient transformation, at the optimizer's place.
        made_by: of which transformation, by name; a node without leaves.
    """

    step: int
    params: Any
    main: Any
    opt: Any
    made_by: Any = None


@dataclass(frozen=True, slots=True)
class MadeBy:
    """A transformation by name: a pytree node without leaves.

    Attributes:
        name: for example ``"chain(clip_by_global_norm, adamw)"``; empty if it has none.
    """

    name: str


def _register() -> None:
    def no_leaves(node: Any) -> Any:
        return (), node.name

    def made_by(name: Any, _: Any) -> Any:
        return MadeBy(name)

    everywhere: Any = vars(optree.registry)["__GLOBAL_NAMESPACE"]
    optree.register_pytree_node(MadeBy, no_leaves, made_by, namespace=everywhere)  # type: ignore[arg-type]
    torch_pytree.register_pytree_node(MadeBy, lambda node: ([], node.name), lambda _, name: MadeBy(name))


_register()


class Loss(NamedTuple):
    """A loss that adds up rightly over microbatches and ranks.

    Attributes:
        sum: weighted sum over what was seen; scalar.
        weight: its weight; scalar.
    """

    sum: torch.Tensor
    weight: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """``sum / weight``, and 0 if there was no weight."""
        return self.sum / _nonzero(self.weight)


class Metrics(NamedTuple):
    """What a step reports; the same on all ranks.

    Attributes:
        loss: mean over all microbatches and ranks, float64 scalar.
        weight: total weight of the loss, float64 scalar.
    """

    loss: torch.Tensor
    weight: torch.Tensor


def train_step(
    loss_fn: LossFn, tx: Any, *, microbatches: int = 1, has_aux: bool = False, donate: bool = False
) -> Callable[[TrainState, Any, Comm], tuple[TrainState, Any]]:
    """A pure training step: ``step(state, batch, comm) -> (state, metrics)``. Write your own from the same functions.

    Args:
        loss_fn: ``loss_fn(params, batch, comm)`` gives this rank's mean, or ``(sum, weight)`` where tokens are uneven.
        tx: any ``(init, update)`` pair.
        microbatches: equal parts along dim 0 into which this rank's batch is split.
        has_aux: ``loss_fn`` returns ``(loss, aux)``, and the step ``(state, (metrics, aux))``; aux is this rank's, as
            :func:`value_and_grad` returns it.
        donate: allow the step to overwrite the state it is given. That state, and everything that shares buffers with
            it, is then no longer to be used.
    """
    tx = as_transform(tx)
    settings = f"{tx.name or 'a transformation'} ({zlib.crc32(repr(tx.config).encode()):08x})"

    def step(state: TrainState, batch: Any, comm: Comm) -> tuple[TrainState, Any]:
        value, grads = value_and_grad(loss_fn, microbatches=microbatches, has_aux=has_aux)(state.params, batch, comm=comm)
        loss, aux = value if has_aux else (value, None)
        grads = reduce_scatter(grads, comm=comm)  # where gradients rest -> where the optimizer wants them
        named = Labelled(comm, f"the loss of update {state.step} by {settings}: ")  # the same on all ranks, or all hear of it
        metrics, grads = average(loss, grads, comm=named, donate=True)  # one divisor for all microbatches and ranks
        state = update(tx, grads, state, comm=comm, donate=donate)  # optimizer -> parameters
        return state, ((metrics, aux) if has_aux else metrics)

    return step


def init_state(tx: Any, sharded: Any, *, comm: Comm, donate: bool = False) -> TrainState:
    """A state to start training from.

    Args:
        tx: any ``(init, update)`` pair.
        sharded: parameters as :func:`~fsharp.shard` or :func:`~fsharp.init` made them: with ``place="optim"`` in the main
            dtype, or where parameters rest if no main copy is kept.
        comm: the ranks.
        donate: allow the state to take over the buffers of ``sharded``; else they are copied.

    Raises:
        TreeError: not a tree of Sharded in one of these places, or parameters in the compute dtype alone where a main
            copy in another dtype is kept: its bits would be lost.
        AgreementError: ranks with different layouts or transformations.

    Cost: from ``"optim"`` one gather to where parameters rest; else none.
    """
    tx = as_transform(tx)

    def check() -> list[Sharded]:
        check_comm("init_state()", sharded, comm)
        nodes = units_of(sharded)
        for node in nodes:
            _check_start(node)
        return nodes

    def fields(nodes: list[Sharded]) -> dict[str, str]:
        places = "\n".join(f"{node.name or '(root)'}: {node.place}" for node in nodes)
        return {**describe_units([node.unit for node in nodes]), "place": places, "tx": repr(tx.config)}

    together("init_state()", comm, check, fields)
    start = sharded if donate else optree.tree_map(torch.clone, sharded)
    params = gather(_cast(start, "compute"), comm=comm, to="params")
    main = trainable(gather(start, comm=comm, to="optim"))
    state = TrainState(0, params, _main_copies(main), tx.init(main), MadeBy(tx.name))
    if donate:
        donate_nodes(sharded)
    return state


def _check_start(node: Sharded) -> None:
    for group, buffer in zip(node.groups, node.buffers, strict=True):
        dtypes = node.unit.groups[group].dtypes
        if buffer.dtype != dtypes.main or node.place.partial:
            raise TreeError(
                problem(
                    "init_state()",
                    f"unit {node.name!r} has a {dtypes.main} main copy, which cannot be made from {buffer.dtype}.",
                    [("place", node.place)],
                    "Pass shard(params, layout, comm, place='optim'), or init_params(..., place='optim').",
                )
            )


def value_and_grad(loss_fn: LossFn, *, microbatches: int = 1, has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """A function ``(params, batch, *, comm) -> (loss, grads)`` of what this rank saw, summed over microbatches.

    Each unit's gradient goes to where gradients rest, in the accumulation dtype, as soon as the backward has it. Neither
    loss nor gradients are divided by the weight yet: :func:`average` does, once all ranks' sums are added.

    Args:
        loss_fn: ``loss_fn(params, batch, comm)``. A mean counts as weight 1 a microbatch; ``(sum, weight)`` makes the
            result independent of how tokens are spread over microbatches and ranks. Weights are not differentiated.
        microbatches: equal parts along dim 0 of every tensor in the batch. Their gradients are added in order: in full
            where gradients rest partial, after the reduction where they rest sharded.
        has_aux: ``loss_fn`` returns ``(loss, aux)``, aux being any pytree. The result is ``((loss, aux), grads)``, as in
            JAX, its tensors detached; of several microbatches aux is a list, with what each of them returned, in order.

    Raises:
        LossError: a loss of another kind, a batch that does not divide, or a loss that no parameter reaches.

    Cost: with zero3 two gathers and one reduction a unit and microbatch; memory of one unit in full beside the shards. As
    with ``Tensor.backward``, leaves of autograd other than the parameters have their ``.grad`` added to.
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        raise LossError(f"value_and_grad(): microbatches is {microbatches!r}, expected an integer of at least 1.")

    def run(params: Any, batch: Any, *, comm: Comm) -> tuple[Any, Any]:
        check_comm("value_and_grad()", params, comm)
        parts = split_batch(batch, microbatches)
        aux: list[Any] = []
        fn = _keeping_aux(loss_fn, aux, params) if has_aux else loss_fn
        if isinstance(comm, Engine):
            total, grads = comm.run_value_and_grad(fn, params, parts)
        else:
            total, grads = _one_microbatch(fn, params, parts[0], comm)
            for part in parts[1:]:
                loss, new = _one_microbatch(fn, params, part, comm)
                total = Loss(total.sum + loss.sum, total.weight + loss.weight)
                grads = optree.tree_map(torch.Tensor.add_, grads, new)
        for node in units_of(grads):
            node.scale = "sum"
        if has_aux:
            return (total, aux if microbatches > 1 else aux[0]), grads
        return total, grads

    return run


def _keeping_aux(loss_fn: LossFn, kept: list[Any], params: Any) -> LossFn:
    """The loss alone; what comes with it is kept, detached. Parameters, which an update may write to, are copied."""
    places = {b.untyped_storage().data_ptr() for node in units_of(params) for b in node.raw_buffers if b.numel()}

    def keep(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        is_parameter = x.layout is torch.strided and x.numel() and x.untyped_storage().data_ptr() in places
        return x.detach().clone() if is_parameter else x.detach()

    def fn(params: Any, batch: Any, comm: Comm) -> Any:
        value = loss_fn(params, batch, comm)
        if not isinstance(value, tuple) or len(value) != 2:
            raise LossError(f"value_and_grad(has_aux=True): the loss function returned {_kind(value)}, expected (loss, aux).")
        loss, aux = value
        kept.append(optree.tree_map(keep, aux))
        return loss

    return fn


def _one_microbatch(loss_fn: LossFn, params: Any, batch: Any, comm: Comm) -> tuple[Loss, Any]:
    with torch.enable_grad():
        probed = with_sinks(params, comm)
        sinks = [sink for node in units_of(probed) for sink in node.sinks]
        loss = as_loss(loss_fn(probed, batch, comm))
        check_loss(loss, has_sinks=bool(sinks))
        torch.autograd.backward(loss.sum)  # grad() would not reach what reentrant checkpoints hide
    found = [sink.grad for sink in sinks]
    if all(g is None for g in found):
        raise LossError("value_and_grad(): the loss has no gradient, no parameter reaches it: were they detached on the way?")
    flat = iter(_own_memory(sinks, found))
    grads = map_units(
        lambda node: Sharded(
            [next(flat) for _ in node.unit.trainable], node.unit, node.unit.strategy.grads, node.unit.trainable
        ),
        params,
    )
    return Loss(loss.sum.detach().double(), loss.weight.detach().double()), grads


def _own_memory(sinks: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Gradients that may be added to in place: autograd hands out one tensor for several inputs, and expanded ones."""
    result: list[torch.Tensor] = []
    seen: set[int] = set()
    for sink, grad in zip(sinks, found, strict=True):
        if grad is None:
            result.append(torch.zeros_like(sink, memory_format=torch.contiguous_format))
            continue
        storage = grad.untyped_storage()
        is_own = storage.data_ptr() not in seen and storage.nbytes() == grad.numel() * grad.element_size()
        seen.add(storage.data_ptr())
        result.append(grad if is_own and grad.is_contiguous() else grad.clone(memory_format=torch.contiguous_format))
    return result


def as_loss(value: Any) -> Loss:
    """What a loss function returned, as a sum and a weight.

    Raises:
        LossError: neither a scalar mean nor a pair of a scalar and its weight.
    """
    is_pair = isinstance(value, tuple) and len(value) == 2
    total, weight = value if is_pair else (value, 1.0)
    if not _is_scalar(total):
        raise LossError(
            f"value_and_grad(): the loss is {_kind(total)}, expected a scalar mean or a pair of scalars (sum, weight)."
        )
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number and not (isinstance(weight, torch.Tensor) and weight.numel() == 1 and not weight.requires_grad):
        raise LossError(
            f"value_and_grad(): the weight of the loss is {_kind(weight)}, expected a number or a scalar tensor without "
            "gradient: a pair is read as (sum, weight). If it is a loss and something else, pass has_aux=True."
        )
    return Loss(total.reshape(()), torch.as_tensor(weight, device=total.device).reshape(()))


def _is_scalar(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point()


def _kind(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return f"{x.dtype}{list(x.shape)}" + (" with a gradient" if x.requires_grad else "")


def check_loss(loss: Loss, *, has_sinks: bool) -> None:
    """Refuse a loss whose backward would come to no parameter.

    Raises:
        LossError: it would.
    """
    if not has_sinks or not loss.sum.requires_grad:
        why = "no parameter reaches it: use forward() or gather() in it" if has_sinks else "every parameter is frozen"
        raise LossError(f"value_and_grad(): the loss has no gradient, {why}.")


def split_batch(batch: Any, count: int) -> list[Any]:
    """``count`` equal parts of a pytree of tensors along dim 0; leaves that are not tensors are repeated.

    Raises:
        LossError: a tensor whose dim 0 does not divide.
    """
    if count == 1:
        return [batch]
    leaves, spec = optree.tree_flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.ndim == 0 or leaf.shape[0] % count):
            raise LossError(f"a batch with a tensor of shape {list(leaf.shape)} does not split into {count} microbatches.")
    parts = [leaf.chunk(count) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in leaves]
    return [optree.tree_unflatten(spec, list(row)) for row in zip(*parts, strict=True)]


def average(loss: Loss, grads: Any, *, comm: Comm, donate: bool = False) -> tuple[Metrics, Any]:
    """Divide summed gradients by the weight of all microbatches and ranks.

    Args:
        loss: this rank's, from :func:`value_and_grad`.
        grads: already reduced over ranks.
        comm: the ranks.
        donate: allow to overwrite ``grads``.

    Returns:
        The mean loss over all ranks, and the gradients of it.

    Raises:
        TreeError: gradients that are still partial: dividing those would round differently for every strategy; or divided
            already.

    Cost: one ``all_reduce`` of 16 bytes for each axis.
    """
    for node in units_of(grads):
        if node.place.partial:
            raise TreeError(f"average(): gradients of unit {node.name!r} rest partial ({node.place}); reduce_scatter() first.")
        check_shared("average()", node)
        if node.scale == "mean":
            raise TreeError(f"average(): gradients of unit {node.name!r} have been divided by average() already.")
    total = Loss(*totals(sums_of(loss, comm), comm))
    divisor = _nonzero(total.weight)  # stays float64: in half precision 257 would become 256, and 100,000 infinite
    return Metrics(total.mean, total.weight), map_units(partial(_divide, divisor=divisor, donate=donate), grads)


def sums_of(loss: Loss, comm: Comm) -> torch.Tensor:
    """A loss as two float64 numbers where the ranks' tensors are."""
    return torch.stack([loss.sum, loss.weight]).to(comm.device)


def totals(sums: torch.Tensor, comm: Comm) -> torch.Tensor:
    """The same over all ranks. Cost: one ``all_reduce`` of 16 bytes for each axis."""
    for axis, _ in comm.mesh.axes:
        sums = all_reduce(sums, comm, axis)
    return sums


def _divide(node: Sharded, *, divisor: torch.Tensor, donate: bool) -> Sharded:
    buffers = [torch.div(x, divisor, out=x if donate else torch.empty_like(x)) for x in node.buffers]
    return Sharded(buffers, node.unit, node.place, node.groups, scale="mean")


def _nonzero(weight: torch.Tensor) -> torch.Tensor:
    return torch.where(weight == 0, torch.ones_like(weight), weight)


def update(tx: Any, grads: Any, state: TrainState, *, comm: Comm, donate: bool = False) -> TrainState:
    """Run a gradient transformation where optimizer state rests, and bring parameters to where they rest.

    Args:
        tx: any ``(init, update)`` pair.
        grads: the gradients at the optimizer's place, from :func:`~fsharp.reduce_scatter`.
        state: the state before.
        comm: the ranks.
        donate: allow to overwrite ``state`` and everything that shares buffers with it.

    Returns:
        The state after. Frozen groups are the same tensors.

    Raises:
        TreeError: gradients of another structure, layout, place or dtype than the state's parameters, or not divided yet; the
            state of another transformation, or one that was donated.

    Cost: one gather from the optimizer's place to the parameters' where the two differ.
    """
    tx = as_transform(tx)
    nodes = check_comm("update()", grads, comm)
    check_kept("update()", units_of((state.params, state.main, state.opt)))
    _check_maker(tx, state)
    for node in nodes:
        if node.scale == "sum":
            raise TreeError(
                f"update(): the gradient of unit {node.name!r} is the sum that value_and_grad() returned. Divide it first: "
                "metrics, grads = average(loss, grads, comm=comm)."
            )
    with torch.no_grad():
        held = state.main, state.opt
        if isinstance(comm, Engine):
            held = comm.run_fetch(held, state.params, grads, donate=donate)
        main, opt = on_device(held, comm.device)
        old = merge(gather(trainable(state.params), comm=comm, to="optim"), main)
        check_gradients("update()", grads, old)
        new, opt = apply_transform(tx, grads, opt, old, comm=comm, donate=donate)
        main = _main_copies(new)
        if donate:
            opt = map_units(lambda node: node.replace(node.buffers) if is_sharded(node) else node, opt)
        if isinstance(comm, Engine):
            params, (main, opt) = comm.run_spread(_cast(new, "compute"), state.params, (main, opt), donate=donate)
        else:
            params = merge(state.params, gather(_cast(new, "compute"), comm=comm, to="params"))
    if donate:
        donate_nodes((state.params, state.main, state.opt))
    return TrainState(state.step + 1, params, main, opt, MadeBy(tx.name))


def _check_maker(tx: Transform, state: TrainState) -> None:
    made_by = state.made_by.name if isinstance(state.made_by, MadeBy) else ""
    if made_by and tx.name and made_by != tx.name:
        facts = [("state of", made_by), ("update by", tx.name)]
        remedy = "Make a state for it: init_state(tx, params, comm=comm), or state._replace(opt=tx.init(...), made_by=None)."
        raise TreeError(problem("update()", "the optimizer state is that of another transformation.", facts, remedy))


def _main_copies(tree: Any) -> Any:
    return map_units(lambda s: s.select([g for g in s.groups if s.unit.groups[g].dtypes.has_main_copy]), tree)


def _cast(tree: Any, kind: str) -> Any:
    def one(node: Sharded) -> Sharded:
        dtypes = [getattr(node.unit.groups[g].dtypes, kind) for g in node.groups]
        return node.replace([b.to(dtype) for b, dtype in zip(node.buffers, dtypes, strict=True)])

    return map_units(one, tree)
