"""Collectives as differentiable primitives along one mesh axis. Each one's transpose is another one.

[Note: what ranks differentiate]
All ranks together compute one function: of the tuple of their inputs, into the tuple of their outputs. What is
differentiated is the **sum over ranks of the scalars they differentiate**. A collective ``A`` is a linear map between
such tuples, and its backward is the transpose under the inner product ``sum_r <x_r, y_r>``:

    all_gather       y_r = (x_0, ..., x_{n-1})        x'_r = sum_s y'_s[r]        = reduce_scatter
    reduce_scatter   y_r = sum_s x_s[r]               x'_r = (y'_0, ..., y'_{n-1}) = all_gather
    all_reduce       y_r = sum_s x_s                  x'_r = sum_s y'_s            = all_reduce

- A **tangent** of a rank's tensor is a tangent of that rank's tensor: replicas that are equal need tangents that are
  equal. Collectives are linear, so tangents travel as values do.
- A **cotangent** of a replicated tensor is partial: the gradient is the sum of what ranks hold. A cotangent of a shard
  is a shard, already summed (:attr:`fsharp.Place.dual`).
- A **batch dimension** (``vmap``) has one size on all ranks, and index ``i`` means the same on all of them: a
  ``reduce_scatter`` under ``vmap`` sums over ranks for each ``i``. For per-sample gradients give all ranks the same
  samples, or let ranks that do not have sample ``i`` contribute zero.

All primitives work on the last dim; dims in front of it are carried along. Along an axis of size 1, and for empty
tensors, they do nothing.
"""

from typing import Any

import torch

from fsharp.errors import TreeError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import Format
from fsharp.tracebacks import api_boundary

# torch.func differentiates a backward too: each backward below calls a primitive, never a Comm.


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, comm: Comm, axis: str) -> torch.Tensor:
        parts = comm.all_gather(x.contiguous(), axis)
        return parts.movedim(0, -2).reshape(*x.shape[:-1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.comm, ctx.axis = inputs[1:]

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter_last(cotangents[0], ctx.comm, ctx.axis), None, None

    @staticmethod
    @api_boundary
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return all_gather_last(tangents[0], ctx.comm, ctx.axis)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, comm: Comm, axis: str) -> tuple[torch.Tensor, int]:
        return all_gather_last(x.movedim(in_dims[0] or 0, 0), comm, axis), 0


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, comm: Comm, axis: str, dtype: torch.dtype) -> torch.Tensor:
        n = comm.mesh.axis_size(axis)
        parts = x.reshape(*x.shape[:-1], n, -1).movedim(-2, 0)
        return comm.reduce_scatter(parts.contiguous(), axis, dtype=dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.comm, ctx.axis, ctx.dtype = inputs
        ctx.wire = x.dtype

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_gather_last(cotangents[0].to(ctx.wire), ctx.comm, ctx.axis), None, None, None

    @staticmethod
    @api_boundary
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_last(tangents[0], ctx.comm, ctx.axis, dtype=ctx.dtype)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, comm: Comm, axis: str, dtype: torch.dtype
    ) -> tuple[torch.Tensor, int]:
        return reduce_scatter_last(x.movedim(in_dims[0] or 0, 0), comm, axis, dtype=dtype), 0


class _ReduceScatterEncoded(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, comm: Comm, axis: str, wire: Format) -> torch.Tensor:
        n = comm.mesh.axis_size(axis)
        rows = x.reshape(*x.shape[:-1], n, -1).movedim(-2, 0)
        part = rows[0].numel()
        sizes = [wire.size(part)] * n
        received = comm.all_to_all(wire.store(rows.reshape(-1), part), sizes, sizes, axis=axis)
        return wire.sum(received, part, x.dtype).view(rows.shape[1:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.axis, _ = inputs

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_gather_last(cotangents[0], ctx.comm, ctx.axis), None, None, None

    @staticmethod
    @api_boundary
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_last(tangents[0], ctx.comm, ctx.axis)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, comm: Comm, axis: str, wire: Format
    ) -> tuple[torch.Tensor, int]:
        return reduce_scatter_encoded(x.movedim(in_dims[0] or 0, 0), comm, axis, wire), 0


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, comm: Comm, axis: str) -> torch.Tensor:
        return comm.all_reduce(x.contiguous(), axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.comm, ctx.axis = inputs[1:]

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_reduce(cotangents[0], ctx.comm, ctx.axis), None, None

    @staticmethod
    @api_boundary
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return all_reduce(tangents[0], ctx.comm, ctx.axis)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, comm: Comm, axis: str) -> tuple[torch.Tensor, int]:
        return all_reduce(x.movedim(in_dims[0] or 0, 0), comm, axis), 0


def all_gather_last(x: torch.Tensor, comm: Comm, axis: str) -> torch.Tensor:
    """Concatenate every rank's ``x`` of shape ``[..., c]`` into ``[..., n * c]``, in order of coordinate.

    Gradient: :func:`reduce_scatter_last`. Cost: ``(n - 1) * x.nbytes`` sent by each rank.
    """
    if _is_free(x, comm, axis):
        return x
    out: torch.Tensor = _AllGather.apply(x, comm, axis)
    return out


def reduce_scatter_last(x: torch.Tensor, comm: Comm, axis: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Sum over ranks and keep the own part.

    Args:
        x: ``[..., n * c]``.
        comm: the ranks.
        axis: the axis to sum along.
        dtype: of the sum and the result; None means that of ``x``.

    Returns:
        ``[..., c]``.

    Gradient: :func:`all_gather_last`. Cost: ``(n - 1) / n * x.nbytes`` sent by each rank.
    """
    _check_divides("reduce_scatter_last()", x, axis, comm.mesh.axis_size(axis))
    if _is_free(x, comm, axis):
        return x.to(dtype or x.dtype)
    out: torch.Tensor = _ReduceScatter.apply(x, comm, axis, dtype or x.dtype)
    return out


def reduce_scatter_encoded(x: torch.Tensor, comm: Comm, axis: str, wire: Format) -> torch.Tensor:
    """Sum ``x`` over ranks and return this rank's part. Each rank encodes its summands, then decodes and adds received ones.

    Args:
        x: ``[..., n * c]``, where ``c`` is a multiple of ``wire.block``.
        comm: the ranks.
        axis: the axis to sum along.
        wire: the format in which summands travel.

    Returns:
        ``[..., c]`` in the dtype of ``x``; the sum is taken in it, in order of rank.

    Gradient: :func:`all_gather_last`, as if nothing were rounded. Cost: each rank sends ``n - 1`` encoded parts.
    """
    _check_divides("reduce_scatter_encoded()", x, axis, comm.mesh.axis_size(axis) * wire.block)
    if _is_free(x, comm, axis):
        return x
    out: torch.Tensor = _ReduceScatterEncoded.apply(x, comm, axis, wire)
    return out


def all_reduce(x: torch.Tensor, comm: Comm, axis: str) -> torch.Tensor:
    """Sum ``x`` over ranks.

    Gradient: itself. Cost: ``2 * (n - 1) / n * x.nbytes`` sent by each rank.
    """
    if _is_free(x, comm, axis):
        return x
    out: torch.Tensor = _AllReduce.apply(x, comm, axis)
    return out


def local_slice(x: torch.Tensor, comm: Comm, axis: str) -> torch.Tensor:
    """The own part ``[..., c]`` of ``x`` of shape ``[..., n * c]``, a view.

    Gradient: the cotangent, with zeros for the parts of others. Cost: none.
    """
    n = comm.mesh.axis_size(axis)
    _check_divides("local_slice()", x, axis, n)
    part = x.shape[-1] // n
    return x.narrow(-1, comm.mesh.coord(axis, comm.rank) * part, part)


def _check_divides(where: str, x: torch.Tensor, axis: str, n: int) -> None:
    if x.shape[-1] % n:
        raise TreeError(f"{where}: a last dim of {x.shape[-1]} does not divide into {n} parts along axis {axis!r}.")


def _is_free(x: torch.Tensor, comm: Comm, axis: str) -> bool:
    return comm.mesh.axis_size(axis) == 1 or x.numel() == 0
