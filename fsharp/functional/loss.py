"""Losses as pairs of sum and weight, which are added over microbatches and ranks; gradients are divided once, at the end."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import LossError, TreeError
from fsharp.functional.comm.checked_units import checked_units_of
from fsharp.functional.comm.collectives import all_reduce
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.lent_memory import check_not_lent_to_jax
from fsharp.functional.layout.placement import Partial
from fsharp.functional.layout.sharded import Sharded, check_not_encoded, is_sharded, map_units, not_sharded_error
from fsharp.functional.optim.base import check_reduced
from fsharp.functional.transforms import is_transform_active
from fsharp.functional.tree.paths import REGISTER
from fsharp.torch_compile import disable_compile


class Loss(NamedTuple):
    """A loss as a weighted sum and its weight, which steps add over microbatches and ranks.

    To add two losses, write ``Loss(a.sum + b.sum, a.weight + b.weight)``: ``a + b`` joins the tuples.

    Attributes:
        sum: weighted sum of the losses of all samples or tokens; a scalar tensor.
        weight: sum of the weights, such as the number of tokens; a scalar tensor. A loss function may also return a number.
    """

    sum: torch.Tensor
    weight: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """``sum / weight``; ``sum`` if the weight is 0."""
        return self.sum / _safe_divisor(self.weight)


class Metrics(NamedTuple):
    """The loss of a step, equal on all ranks.

    Attributes:
        loss: mean loss over all microbatches and ranks; a float64 scalar.
        weight: total weight of the loss, such as the number of tokens; a float64 scalar.
    """

    loss: torch.Tensor
    weight: torch.Tensor


def loss_sum_and_weight(value: Any, where: str = "value_and_grad()") -> Loss:
    """Return the result of a loss function as a sum and a weight.

    The result is a mean, which gets weight 1, or a pair of a weighted sum and its weight. Mean and sum are floating-point
    scalars. The weight is a number or a scalar tensor without gradient. A weight in a plain pair must not be a floating-point
    tensor, which could be a metric; in a :class:`Loss` it may be one.

    Raises LossError for any other result, and for a weight that is negative, infinite or NaN. The value of a weight is checked
    only if the weight is a number; or if weight and loss are on a CPU, outside of transforms of torch.func.
    """
    is_pair = isinstance(value, tuple) and len(value) == 2
    total, weight = value if is_pair else (value, 1.0)
    if not (isinstance(total, torch.Tensor) and total.numel() == 1 and total.is_floating_point()):
        expected = "a floating-point scalar tensor, the mean, or a pair of scalars (sum, weight)"
        raise LossError(f"{where}: the loss is {type_text(total)}, expected {expected}.")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number and not (isinstance(weight, torch.Tensor) and weight.numel() == 1 and not weight.requires_grad):
        raise LossError(
            f"{where}: the weight of the loss is {type_text(weight)}, expected a number or a scalar tensor without "
            f"gradient: {_PAIR_HINT}"
        )
    if isinstance(weight, torch.Tensor) and not isinstance(value, Loss) and weight.dtype.is_floating_point:
        raise LossError(
            f"{where}: the loss function returned a pair with {type_text(weight)}: a weight, or a metric? A weight is "
            f"a number, an integer tensor, or comes as fs.Loss(sum, weight): {_PAIR_HINT}"
        )
    # The host must not wait for a device, and tensors of vmap have no number.
    is_on_host = type(weight) is torch.Tensor and weight.device == total.device == _CPU and not is_transform_active()
    if (is_number or is_on_host) and not 0 <= (
        number := weight.item() if isinstance(weight, torch.Tensor) else weight
    ) < math.inf:
        raise LossError(f"{where}: the weight of the loss is {number}, expected a finite number of at least 0.")
    if isinstance(weight, torch.Tensor):
        return Loss(total.reshape(()), weight.to(total.device, non_blocking=True).reshape(()))
    number = torch.full((), weight, dtype=torch.float64, device=total.device)  # a copy to the device would make the host wait
    return Loss(total.reshape(()), number)


_CPU = torch.device("cpu")
_PAIR_HINT = (
    "a pair is read as (sum, weight). For a loss and something else pass has_aux=True to value_and_grad() or train_step()."
)


def type_text(x: Any) -> str:
    """Return a value in words, for error messages: a tensor by dtype and shape, any other value by its type."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return f"{x.dtype}{list(x.shape)}" + (" with a gradient" if x.requires_grad else "")


def check_depends_on_parameters(loss: Loss, *, has_trainable: bool, where: str = "value_and_grad()") -> None:
    """Raise a LossError if a loss requires no gradient, or if no parameter is trainable (``has_trainable`` is False)."""
    if not has_trainable or not loss.sum.requires_grad:
        why = "no parameter reaches it. Use parameters by fs.forward() or fs.gather() in the loss function"
        why = why if has_trainable else "every parameter is frozen. Leave some of them out of plan(frozen=...)"
        raise LossError(f"{where}: the loss has no gradient, as {why}.")


def split_batch(batch: Any, count: int) -> list[Any]:
    """Return ``count`` batches: each has an equal part, along dim 0, of each tensor in ``batch``. The parts are views.

    Each batch has all other leaves whole, and each Sharded, such as the parameters of a teacher. With ``count`` 1 nothing is
    checked. Raises LossError if a tensor has no dims, or a size of dim 0 that is not a multiple of ``count``. Raises LossError
    if a leaf that is no tensor, such as a dataclass, holds arrays or tensors.
    """
    if count == 1:
        return [batch]
    leaves, spec = optree.tree_flatten(batch, is_leaf=is_sharded)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor | Sharded) and _holds_tensors_or_arrays(leaf):
            raise LossError(
                f"value_and_grad(): the batch has a {type(leaf).__name__}, which {count} microbatches cannot split: each would "
                "get all of it. Only tensors in pytrees are split. Convert arrays to tensors. Pass tensors of a class in a "
                f"dict, or {REGISTER}"
            )
        if isinstance(leaf, torch.Tensor) and (leaf.ndim == 0 or leaf.shape[0] % count):
            name = optree.tree_accessors(batch, is_leaf=is_sharded)[i].codify("batch")
            raise LossError(
                f"value_and_grad(): {name} has shape {list(leaf.shape)}, which {count} microbatches cannot split into equal "
                "parts along dim 0."
            )
    parts = [leaf.chunk(count) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in leaves]
    return [optree.tree_unflatten(spec, [part[i] for part in parts]) for i in range(count)]


def _holds_tensors_or_arrays(leaf: Any) -> bool:
    """Return whether a leaf that is no tensor is an array with dims, or a dataclass or mapping with tensors or arrays in it."""
    values: Any
    if isinstance(leaf, Mapping):
        values = list(leaf.values())
    elif is_dataclass(leaf) and not isinstance(leaf, type):
        values = [getattr(leaf, field.name, None) for field in fields(leaf)]
    else:
        return hasattr(leaf, "dtype") and len(getattr(leaf, "shape", ())) > 0
    return any(isinstance(value, torch.Tensor) or _holds_tensors_or_arrays(value) for value in optree.tree_leaves(values))


@disable_compile
def average(loss: Any, grads: Any = (), *, comm: Comm, donate: bool = False) -> tuple[Metrics, Any]:
    """Return the mean loss over all ranks, and the gradients of this mean: sums divided by the total weight.

    If the total weight is 0, sums are divided by 1.
    To evaluate a model, call this function without gradients: ``fs.average(loss_fn(params, batch, comm), comm=comm)[0]``.

    Args:
        loss: loss of this rank: from :func:`~fsharp.value_and_grad`, or what a loss function returns, a mean or ``(sum,
            weight)``.
        grads: gradients that are summed over ranks already, from :func:`~fsharp.reduce_scatter`; ``()`` for none.
        comm: the ranks.
        donate: allow the function to overwrite ``grads``.

    Returns:
        The mean loss over all ranks as :class:`Metrics`, and the gradients of this mean.

    Raises:
        LossError: the loss or its weight is wrong.
        TreeError: gradients are not summed over ranks yet, or are divided already; with ``donate``, another library reads the
            memory of the gradients.
        MeshError: ``comm`` is on another mesh than ``grads``.

    Cost: one ``all_reduce`` of 16 bytes for each axis.
    """
    nodes: list[Sharded] = optree.tree_leaves(grads, is_leaf=is_sharded)
    for node in nodes:
        if not is_sharded(node):
            raise not_sharded_error("average()", node)
        if Partial in node.place.placements:
            raise TreeError(
                f"average(): gradients of unit {node.unit.display_name} rest partial ({node.place}): reduce_scatter() them "
                "first."
            )
        check_reduced("average()", node)
        if node.reduction == "mean":
            raise TreeError(f"average(): gradients of unit {node.unit.display_name} have been divided by average() already.")
    if nodes:
        checked_units_of("average()", grads, comm)
    check_not_encoded("average()", nodes)
    if donate:
        check_not_lent_to_jax("average()", nodes)
    sums = torch.stack([x.detach().double() for x in loss_sum_and_weight(loss, "average()")]).to(comm.device)
    for axis, _ in comm.mesh.axes:
        sums = all_reduce(sums, comm, axis)
    total = Loss(*sums)
    divisor = _safe_divisor(total.weight)  # stays float64: in half precision 257 would become 256, and 100,000 infinite

    def divide_node(node: Sharded) -> Sharded:
        buffers = [torch.div(x, divisor, out=x if donate else torch.empty_like(x)) for x in node.buffers]
        return Sharded(buffers, node.unit, node.place, node.groups, reduction="mean")

    return Metrics(total.mean, total.weight), map_units(divide_node, grads)


def _safe_divisor(weight: torch.Tensor) -> torch.Tensor:
    return torch.where(weight == 0, torch.ones_like(weight), weight)
