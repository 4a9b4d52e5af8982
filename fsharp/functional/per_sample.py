"""Norms of per-sample gradients, for clipping in differentially private training, without keeping the gradients."""

from collections.abc import Callable
from typing import Any, Literal

import optree
import torch
from torch._C import _functorch

from fsharp.errors import LayoutError, LossError, problem
from fsharp.functional.comm.agree import max_over_ranks
from fsharp.functional.comm.checked_units import check_not_main_copies, checked_units_of
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import is_sharded, units_of
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.loss import Loss, check_depends_on_parameters, loss_sum_and_weight
from fsharp.functional.sinks import GradientSinks, _MakeHandle, with_sinks
from fsharp.functional.train import LossFn
from fsharp.functional.transforms import check_no_transform_active
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

_WHERE = "per_sample_norms()"


@options_checked
def per_sample_norms(
    loss_fn: LossFn, *, chunk_size: int | None = None, randomness: Literal["error", "same", "different"] = "error"
) -> Callable[..., torch.Tensor]:
    """Return a function ``(params, batch, *, comm) -> norms``: the 2-norm of the gradient of each sample's loss.

    ``norms[i] = sqrt(sum_p |d loss_fn(params, batch[i : i + 1], comm) / d p|^2)`` over all trainable parameters ``p``.
    A tied leaf is one parameter. Gradients of all uses of a unit are added before they are squared. ``batch`` holds samples of
    this rank, and ranks may have different numbers of samples. If a chunk of a rank has no samples, ``loss_fn`` gets one sample
    of zeros, so that the rank takes part in the gathers.

    Args:
        loss_fn: ``loss_fn(params, batch, comm)`` returns a mean or ``(sum, weight)``. The function is called once for each
            chunk, under ``torch.vmap`` over the samples. In the call the batch has one sample: dim 0 of every tensor has size
            1. If the function returns ``(sum, weight)``, the gradient is that of ``sum``. The function has to use parameters
            only through ``forward`` or ``gather``.
        chunk_size: largest number of samples in one chunk; None means all. All ranks make equally many chunks: as many as the
            rank with the most samples needs. A rank with fewer samples makes smaller chunks.
        randomness: ``"error"`` refuses random operations, ``"same"`` and ``"different"`` draw equal or different numbers for
            the samples, as in ``torch.vmap``.

    Returns:
        A tensor ``[B]`` for a batch of ``B`` samples, on the device of ``comm``, in the widest ``accumulate`` dtype of units.

    Raises:
        LayoutError: a unit varies along an axis, so a sample's gradient is spread over several ranks.
        LossError: ``chunk_size`` is less than 1, or the batch or the loss is wrong.
        LossError: the loss uses parameters by other means than ``forward`` or ``gather``.
        LossError: the call is under a ``torch.func`` transform.
        TreeError: ``params`` has no unit, or has main copies from :func:`~fsharp.shard`.
        MeshError: ``comm`` is on another mesh than ``params``.

    Cost: for each chunk the gathers of ``fs.forward``, and no reduction. With ``chunk_size`` an ``all_reduce`` of 8 bytes for
    each axis. Memory: activations of all samples of a chunk, one full unit, and gradients of one unit for each sample. A
    :class:`~fsharp.Scheduler` does not overlap these gathers.
    Source: per-sample clipping of Abadi et al., Deep Learning with Differential Privacy (2016).
    """
    if chunk_size is not None and chunk_size < 1:
        raise LossError(f"{_WHERE}: chunk_size is {chunk_size!r}, expected None or an integer of at least 1.")

    @api_boundary
    def run(params: Any, batch: Any, *, comm: Comm) -> torch.Tensor:
        check_no_transform_active(_WHERE)
        nodes = checked_units_of(_WHERE, params, comm)
        check_not_main_copies(_WHERE, nodes)
        for unit in [node.unit for node in nodes if node.unit.varying_axes]:
            facts = [("unit", unit.display_name), ("varies", ", ".join(unit.varying_axes))]
            remedy = "Use a strategy without varying() for it."
            raise LayoutError(problem(_WHERE, "a sample's gradient is spread over ranks.", facts, remedy))
        leaves, spec = optree.tree_flatten(batch, is_leaf=is_sharded)
        count = _batch_size(leaves)
        if chunk_size is None:
            chunks = [leaves]
        else:
            own = torch.tensor(max(-(-count // chunk_size), 1), device=comm.device)
            most = int(max_over_ranks(own, comm, label="chunks of per_sample_norms"))
            parts = [x.tensor_split(most) if isinstance(x, torch.Tensor) else [x] * most for x in leaves]
            chunks = [list(row) for row in zip(*parts, strict=True)]
        dtypes = [node.unit.groups[g].dtypes.accumulate for node in nodes for g in node.unit.trainable_groups]
        found = torch.cat([_norms_of_chunk(loss_fn, params, chunk, spec, comm, randomness) for chunk in chunks])
        return found.to(max(dtypes, key=lambda dtype: dtype.itemsize))

    return run


def _norms_of_chunk(loss_fn: LossFn, params: Any, leaves: list[Any], spec: Any, comm: Comm, randomness: str) -> torch.Tensor:
    count = _batch_size(leaves)
    if count == 0:  # vmap over zero samples is not defined, but other ranks need this rank in their gathers
        leaves = [x.new_zeros(1, *x.shape[1:]) if isinstance(x, torch.Tensor) else x for x in leaves]
    grad_sinks = _SquaredGradSinks(torch.zeros(max(count, 1), dtype=torch.float64, device=comm.device))
    dims = [0 if isinstance(leaf, torch.Tensor) else None for leaf in leaves]

    def loss_of_sample(*sample: Any) -> torch.Tensor:
        grad_sinks.record_vmap_level()
        parts = [x.unsqueeze(0) if isinstance(x, torch.Tensor) else x for x in sample]
        return loss_sum_and_weight(loss_fn(probed, optree.tree_unflatten(spec, parts), comm), _WHERE).sum

    with torch.enable_grad():
        probed = with_sinks(params, grad_sinks)
        loss = torch.vmap(loss_of_sample, in_dims=tuple(dims), randomness=randomness)(*leaves).sum()
        held = units_of(probed)
        sinks = [sink for node in held for sink in node.sinks]
        check_depends_on_parameters(Loss(loss, loss), has_trainable=bool(sinks), where=_WHERE)
        buffers = [(node.name, x) for node in held for x in node.raw_buffers if x.requires_grad]
        # The sinks get no gradients, but this backward runs the handles.
        direct = torch.autograd.grad(loss, [*sinks, *(x for _, x in buffers)], allow_unused=True)[len(sinks) :]
    names = sorted({name for (name, _), grad in zip(buffers, direct, strict=True) if grad is not None})
    if names:
        raise LossError(
            f"{_WHERE}: parameters of units {names} were differentiated for all samples together. Use them by forward() or "
            "gather(), and not under torch.func.grad, vjp or jvp within the loss."
        )
    return grad_sinks.squares[:count].sqrt()


class _SquaredGradSinks(GradientSinks):
    """A GradientSinks that keeps no gradient: for each sample it adds up the squared elements of all gradients that arrive.

    A handle, at which the gradients of a buffer arrive, has the shape ``[samples, size of the full buffer]``. ``squares``: the
    sum for each sample so far, in float64. ``level``: level of the vmap over samples.
    """

    def __init__(self, squares: torch.Tensor) -> None:
        super().__init__()
        self.squares, self.level = squares, 0

    def record_vmap_level(self) -> None:
        """Record the level of the vmap over samples. Call this in the function that vmap maps, before it uses parameters."""
        self.level = _functorch.current_level()

    def _attach_handle(self, full: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
        each = super()._attach_handle(full.expand(len(self.squares), *full.shape), handle)
        return _functorch._add_batch_dim(each, 0, self.level)

    def _new_handle(self, sink: torch.Tensor, unit: UnitLayout, group: int, comm: Comm) -> torch.Tensor:
        squares = self.squares  # no reference to this grad_sinks, which holds the handle

        def add(gradient: torch.Tensor) -> None:
            squares.add_(torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float64).square())

        return _MakeHandle.apply(sink, (len(squares), unit.groups[group].size), add)  # type: ignore[no-any-return]


def _batch_size(leaves: list[Any]) -> int:
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise LossError(
            f"{_WHERE}: the batch has tensors of shapes {[list(shape) for shape in shapes]}, expected at least one tensor, and "
            "one size of dim 0, the number of samples."
        )
    return shapes[0][0]
