"""Collectives as differentiable primitives along one mesh axis. The transpose of each primitive is a primitive.

The gradient is that of the **sum of the scalars of all ranks**: see "What ranks differentiate" in
``docs/design_results.md``. Here a prime marks gradients:

    all_gather       y_r = (x_0, ..., x_{n-1})        x'_r = sum_s y'_s[r]        = reduce_scatter
    reduce_scatter   y_r = sum_s x_s[r]               x'_r = (y'_0, ..., y'_{n-1}) = all_gather
    all_reduce       y_r = sum_s x_s                  x'_r = sum_s y'_s            = all_reduce

All primitives but ``all_reduce`` and ``pcast`` work on the last dim, whatever the dims before it. Gathers and sums call no
collective along an axis of size 1, or for a last dim of size 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from fsharp.errors import TreeError
from fsharp.functional.comm.protocol import Comm, EqualParts
from fsharp.functional.formats.format import Format, MessageFacts, ResidualAndNoise
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import cache_signature


@dataclass(frozen=True, eq=False)
class _Collective:
    """A collective with its arguments, for :class:`_DifferentiableCollective`. Tensors ``[..., c]`` may have any dims.

    Attributes:
        call: the method of the Comm, such as ``Comm.all_gather``.
        primitive: the function of this module that makes this collective. Under vmap this function is called again, on a tensor
            with one more dim.
        transpose: the function of this module that is the transpose of ``primitive``, for the backward.
        to_argument: function from the tensor, ``[..., c]``, to the argument of ``call``.
        from_result: function from the result of ``call`` to the tensor that is returned; None if the two are the same.
        jvp: the function of this module for tangents; None means ``primitive``.
    """

    call: Callable[[torch.Tensor], torch.Tensor]
    primitive: Callable[[torch.Tensor], torch.Tensor]
    transpose: Callable[[torch.Tensor], torch.Tensor]
    to_argument: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
    from_result: Callable[[torch.Tensor], torch.Tensor] | None = None
    jvp: Callable[[torch.Tensor], torch.Tensor] | None = None


class _DifferentiableCollective(torch.autograd.Function):
    """An autograd function that runs a collective. Its backward calls a primitive, so torch.func can differentiate it again."""

    @staticmethod
    @cache_signature
    def forward(x: torch.Tensor, collective: _Collective) -> torch.Tensor:
        out = collective.call(collective.to_argument(x))
        return out if collective.from_result is None else collective.from_result(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.collective = inputs[1]

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.collective.transpose(cotangents[0]), None

    @staticmethod
    @api_boundary
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return (ctx.collective.jvp or ctx.collective.primitive)(tangents[0])  # type: ignore[no-any-return]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, collective: _Collective) -> tuple[torch.Tensor, int]:
        return collective.primitive(x.movedim(in_dims[0] or 0, 0)), 0


def _split_last_dim(x: torch.Tensor, n: int) -> torch.Tensor:
    """Return ``x`` of shape ``[..., n * c]`` as ``[n, ..., c]``."""
    return x.reshape(*x.shape[:-1], n, x.shape[-1] // n).movedim(-2, 0)


def all_gather_last(x: torch.Tensor, comm: Comm, axis: str, *, label: str = "") -> torch.Tensor:
    """All-gather along the last dim: concatenate ``x`` of all ranks, in order of coordinate.

    Args:
        x: ``[..., c]``.
        comm: the ranks.
        axis: the mesh axis along which to gather.
        label: what the call is for, as text for errors. Ranks with different labels get an error in place of wrong data.

    Returns:
        ``[..., n * c]`` for ``n`` ranks along ``axis``.

    Raises:
        TreeError: ``x`` has no dims.

    Gradient: :func:`reduce_scatter_last`. Cost: each rank sends ``(n - 1) * x.nbytes``.
    """
    _check_last_dim_divides("all_gather_last()", x, axis, 1)
    if _needs_no_collective(x, comm, axis):
        return x

    def joined(parts: torch.Tensor) -> torch.Tensor:
        return torch.flatten(parts.movedim(0, -2), -2)

    both = (all_gather_last, reduce_scatter_last)
    primitive, transpose = (partial(each, comm=comm, axis=axis, label=label) for each in both)
    found = _Collective(partial(comm.all_gather, axis=axis, label=label), primitive, transpose, from_result=joined)
    return _DifferentiableCollective.apply(x, found)  # type: ignore[no-any-return]


def reduce_scatter_last(
    x: torch.Tensor, comm: Comm, axis: str, *, dtype: torch.dtype | None = None, label: str = ""
) -> torch.Tensor:
    """Reduce-scatter along the last dim: sum ``x`` over ranks, and return this rank's part of the sum.

    Args:
        x: ``[..., n * c]`` for ``n`` ranks along ``axis``.
        comm: the ranks.
        axis: the mesh axis along which to sum.
        dtype: dtype of the sum and the result; None means the dtype of ``x``.
        label: what the call is for: see :func:`all_gather_last`.

    Returns:
        ``[..., c]``.

    Raises:
        TreeError: ``x`` has no dims, or ``n`` does not divide the last dim.

    Gradient: :func:`all_gather_last`, in the dtype of ``x``. Cost: each rank sends ``(n - 1) / n * x.nbytes``.
    """
    _check_last_dim_divides("reduce_scatter_last()", x, axis, comm.mesh.axis_size(axis))
    if _needs_no_collective(x, comm, axis):
        return x.to(dtype or x.dtype)
    n, sent = comm.mesh.axis_size(axis), x.dtype
    if dtype not in (None, sent):
        label = f"{label} in {dtype}".strip()  # ranks whose sums have other dtypes call different collectives

    def transpose(y: torch.Tensor) -> torch.Tensor:
        return all_gather_last(y.to(sent), comm, axis, label=label)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return _split_last_dim(x, n).contiguous()

    call = partial(comm.reduce_scatter, axis=axis, dtype=dtype or sent, label=label)
    primitive = partial(reduce_scatter_last, comm=comm, axis=axis, dtype=dtype or sent, label=label)
    found = _Collective(call, primitive, transpose, to_argument=rows)
    return _DifferentiableCollective.apply(x, found)  # type: ignore[no-any-return]


def reduce_scatter_encoded(
    x: torch.Tensor,
    comm: Comm,
    axis: str,
    wire: Format,
    facts: MessageFacts = tuple,
    residual_and_noise: ResidualAndNoise = ResidualAndNoise(),
    padding: Sequence[slice] = (),
    *,
    label: str = "",
) -> torch.Tensor:
    """Sum ``x``, ``[..., n * c]``, over the ``n`` ranks of an axis, and return this rank's part, ``[..., c]``.

    Summands travel encoded in ``wire``. Each rank adds decoded summands in the dtype of ``x``, in order of rank.

    Args:
        x: the summands; ``c`` is a multiple of ``wire.block``.
        comm: the ranks.
        axis: the mesh axis along which to sum.
        wire: the format in which summands travel.
        facts: function without arguments that returns pairs of name and text for the message of a FormatError.
        residual_and_noise: the residual (errors of earlier encodings), which is added to a 1-D ``x`` and then overwritten; and
            a function that returns random numbers for stochastic rounding.
        padding: slices of the last dim of the result that are set to zero.
        label: what the call is for.

    Along an axis of size 1 nothing is encoded, and ``x`` is returned. Raises TreeError if ``c`` is no multiple of a block.
    Gradient: :func:`all_gather_last`, as if nothing were rounded. Cost: each rank sends ``n - 1`` encoded parts.
    """
    _check_last_dim_divides("reduce_scatter_encoded()", x, axis, comm.mesh.axis_size(axis) * wire.block)
    if _needs_no_collective(x, comm, axis):
        return x
    n = comm.mesh.axis_size(axis)

    def call(x: torch.Tensor) -> torch.Tensor:
        rows = _split_last_dim(x, n)
        part = rows[0].numel()
        sizes = EqualParts([wire.size(part)] * n)
        stored = wire.store_summand(rows.reshape(-1), part, residual_and_noise.residual, facts, residual_and_noise.noise_fn)
        received = comm.all_to_all(stored, sizes, sizes, axis=axis, label=label)
        total = wire.sum(received, part, x.dtype, facts).view(rows.shape[1:])
        for run in padding:
            total[..., run] = 0
        return total

    def primitive(x: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_encoded(x, comm, axis, wire, facts, padding=padding, label=label)

    both = (all_gather_last, reduce_scatter_last)
    transpose, jvp = (partial(each, comm=comm, axis=axis, label=label) for each in both)
    return _DifferentiableCollective.apply(x, _Collective(call, primitive, transpose, jvp=jvp))  # type: ignore[no-any-return]


def all_reduce(x: torch.Tensor, comm: Comm, axis: str, *, label: str = "") -> torch.Tensor:
    """Return the sum of ``x`` over the ranks along ``axis``.

    Args:
        x: the summand of this rank, of any shape.
        comm: the ranks.
        axis: the mesh axis along which to sum.
        label: what the call is for: see :func:`all_gather_last`.

    Gradient: :func:`all_reduce`. Cost: each rank sends ``2 * (n - 1) / n * x.nbytes``.
    """
    if _needs_no_collective(x, comm, axis):
        return x
    call, primitive = partial(comm.all_reduce, axis=axis, label=label), partial(all_reduce, comm=comm, axis=axis, label=label)
    return _DifferentiableCollective.apply(x, _Collective(call, primitive, primitive))  # type: ignore[no-any-return]


def all_to_all_last(
    x: torch.Tensor, send: Sequence[int], receive: Sequence[int], comm: Comm, axis: str, *, label: str = ""
) -> torch.Tensor:
    """Send columns of ``x`` to the ranks along ``axis``, and return the columns that these ranks send to this rank.

    Tokens ``[n, d]`` reach the ranks of their experts by ``all_to_all_last(tokens.T, send, receive, comm, axis).T``.

    Args:
        x: ``[..., sum(send)]``: the columns for the first rank along ``axis``, then those for the second, and so on.
        send: number of columns for each rank.
        receive: number of columns from each rank: ``receive[r]`` is the entry for this rank in ``send`` of rank ``r``.
            ``all_to_all_last(torch.tensor(send), [1] * n, [1] * n, comm, axis).tolist()`` returns this list.
        comm: the ranks.
        axis: the mesh axis along which to exchange.
        label: what the call is for: see :func:`all_gather_last`.

    Returns:
        ``[..., sum(receive)]``, in order of coordinate.

    Gradient: :func:`all_to_all_last` with ``send`` and ``receive`` exchanged. All ranks take part in this exchange. So the loss
    of each rank has to depend on the result, even if the rank has received no column. Cost: each rank sends its columns for
    other ranks.

    Raises TreeError if the last dim of ``x`` is not ``sum(send)``.
    Before an exchange all ranks compare ``send`` with ``receive``, and raise an AgreementError if these numbers differ. Over
    NCCL ranks do not compare the numbers: then values may be undefined, or ranks wait until the time limit.
    """
    if not x.dim() or x.shape[-1] != sum(send):
        raise TreeError(f"all_to_all_last(): x is {list(x.shape)}, expected a last dim of {sum(send)}, the sum of send.")
    if comm.mesh.axis_size(axis) == 1:
        return x
    rows = x.shape[:-1].numel()

    def call(x: torch.Tensor) -> torch.Tensor:
        return comm.all_to_all(x.view(-1), [rows * n for n in send], [rows * n for n in receive], axis=axis, label=label)

    def columns(out: torch.Tensor) -> torch.Tensor:
        return out.view(-1, *x.shape[:-1]).movedim(0, -1)

    primitive = partial(all_to_all_last, send=send, receive=receive, comm=comm, axis=axis, label=label)
    transpose = partial(all_to_all_last, send=receive, receive=send, comm=comm, axis=axis, label=label)
    found = _Collective(call, primitive, transpose, lambda x: x.movedim(-1, 0).contiguous(), columns)
    return _DifferentiableCollective.apply(x, found)  # type: ignore[no-any-return]


CastKind = Literal["each", "sum", "share", "summand"]
_TRANSPOSE: dict[CastKind, CastKind] = {"each": "sum", "sum": "each", "share": "summand", "summand": "share"}


def pcast(x: torch.Tensor, comm: Comm, axis: str, kind: CastKind, *, label: str = "") -> torch.Tensor:
    """Convert ``x`` from a *shared* value to an *own* value of each rank along ``axis``, or back.

    A shared value is equal on all ranks, and so is its gradient. An own value belongs to one rank, and so does its gradient.
    The gradient of a shared value is the sum of the gradients of the own values that were made of the shared value: see [Note:
    resting and gathered] in ``fsharp.functional.moves``.

    Args:
        x: the value of this rank, of any shape.
        comm: the ranks.
        axis: the mesh axis along which the value is shared.
        kind: the name of a row of the table below, which says what is computed. In the backward the gradient is converted by
            the kind in the last column.
        label: what the sums are for: see :func:`all_gather_last`.

    =========  ===========  =================================================  ========
    kind       from, to     computes                                           backward
    =========  ===========  =================================================  ========
    each       shared, own  ``x``                                              sum
    sum        own, shared  the sum of ``x`` over ranks                        each
    share      own, shared  ``x``, which has to be equal on all ranks          summand
    summand    shared, own  ``x`` on the first rank, zeros on other ranks      share
    =========  ===========  =================================================  ========
    """

    def keep_or_zero(x: torch.Tensor) -> torch.Tensor:
        is_kept = kind != "summand" or comm.mesh.coord(axis, comm.rank) == 0
        return x.view_as(x) if is_kept else torch.zeros_like(x)

    call = partial(comm.all_reduce, axis=axis, label=label) if kind == "sum" else keep_or_zero
    kinds: tuple[CastKind, CastKind] = (kind, _TRANSPOSE[kind])
    primitive, transpose = (partial(pcast, comm=comm, axis=axis, kind=each, label=label) for each in kinds)
    return _DifferentiableCollective.apply(x, _Collective(call, primitive, transpose))  # type: ignore[no-any-return]


def local_slice_last(x: torch.Tensor, comm: Comm, axis: str) -> torch.Tensor:
    """Return this rank's part ``[..., c]`` of ``x``, ``[..., n * c]``, as a view, for ``n`` ranks along ``axis``.

    Raises TreeError if ``x`` has no dims, or ``n`` does not divide the last dim.
    Gradient: the cotangent, padded with zeros in place of other ranks' parts. Cost: none.
    """
    n = comm.mesh.axis_size(axis)
    _check_last_dim_divides("local_slice_last()", x, axis, n)
    part = x.shape[-1] // n
    return x.narrow(-1, comm.mesh.coord(axis, comm.rank) * part, part)


def _check_last_dim_divides(where: str, x: torch.Tensor, axis: str, n: int) -> None:
    if not x.dim():
        raise TreeError(f"{where}: x has no dims, expected at least one. Pass x.view(1).")
    if x.shape[-1] % n:
        raise TreeError(f"{where}: a last dim of {x.shape[-1]} does not divide into {n} parts along axis {axis!r}.")


def _needs_no_collective(x: torch.Tensor, comm: Comm, axis: str) -> bool:
    return comm.mesh.axis_size(axis) == 1 or x.shape[-1:] == (0,)
