"""Global norms of sharded trees, and gradient clipping."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import OptionError, TreeError
from fsharp.functional.comm.agree import max_over_ranks
from fsharp.functional.comm.checked_units import checked_units_of
from fsharp.functional.comm.collectives import all_reduce
from fsharp.functional.comm.protocol import Comm, reporting_format_errors
from fsharp.functional.layout.sharded import Sharded, units_of
from fsharp.functional.layout.unit_layout import padding_in_run
from fsharp.functional.optim.base import Transform
from fsharp.type_checks import options_checked

_LIMBS, _BITS, _CHUNK = 3, 22, 1 << 20


@options_checked
def global_norm(tree: Any, *, comm: Comm, deterministic: bool = False) -> torch.Tensor:
    """Return the 2-norm of all elements of a sharded tree, over all ranks; each element counts once.

    Args:
        tree: a tree of :class:`~fsharp.Sharded` with gradients or parameters. Tied leaves and replicated elements count once.
            Leaves that vary along an axis count once for each rank along the axis.
        comm: the ranks.
        deterministic: add squares as integers (22-bit limbs relative to the largest element, 66 bits in all). The bits of the
            result then do not depend on mesh, strategy or layout.

    Returns:
        A scalar with equal bits on every rank: float64 if a buffer is float64 or complex128, else float32. The scalar is
        infinite or NaN if an element is. Without ``deterministic`` it is also infinite if squares overflow in float64, so for
        elements beyond 1e154.

    Raises:
        TreeError: the tree has no Sharded, a unit is a partial sum, or the memory of a unit was donated.
        MeshError: ``comm`` is on another mesh than the tree.

    Padding does not count, and encoded parameters are decoded.
    Cost: one ``all_reduce`` of 8 bytes for each axis along which units are sharded or vary; more if units rest in different
    places. With ``deterministic`` 24 bytes, one more ``all_reduce`` of 16 bytes for each axis of the mesh, and about six passes
    over the elements in place of one. Not differentiable.
    """
    checked_units_of("global_norm()", tree, comm)
    return _float64_norm(tree, comm, deterministic, "global_norm()").to(_norm_dtype(tree))


def _norm_dtype(tree: Any) -> torch.dtype:
    is_double = any(x.dtype in (torch.float64, torch.complex128) for node in units_of(tree) for x in node.buffers)
    return torch.float64 if is_double else torch.float32


def _float64_norm(tree: Any, comm: Comm, deterministic: bool, label: str) -> torch.Tensor:
    by_axes: dict[tuple[str, ...], list[_Values]] = {}
    with reporting_format_errors(comm, "global_norm()"):
        for node in units_of(tree):
            if node.place.partial_axes:
                raise TreeError(
                    f"global_norm(): unit {node.unit.display_name} rests partial ({node.place}): sum it by reduce_scatter() "
                    "first."
                )
            rows = zip(node.groups, node.decoded_buffers(comm.rank), strict=True)
            held = [_Values(buffer, node, group, comm.rank) for group, buffer in rows]
            by_axes.setdefault(node.place.sharded_axes + node.place.varying_axes, []).extend(held)
    with torch.no_grad():
        if deterministic:
            return _exact_norm(by_axes, comm, label)
        total = torch.zeros((), dtype=torch.float64, device=comm.device)
        for axes, buffers in by_axes.items():
            part = torch.zeros_like(total)
            for buffer in buffers:
                for chunk in buffer.chunks():  # squares of float32 neither overflow nor vanish in float64
                    part += chunk.square_().sum().to(part.device)
            total += _sum_over_axes(part.view(1), axes, comm, label)[0]
        return total.sqrt()


class _Values(NamedTuple):
    """The elements of a node's buffer on a rank; ``group`` is the buffer's group."""

    buffer: torch.Tensor
    node: Sharded
    group: int
    rank: int

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yield the elements as new float64 tensors, a chunk at a time: complex elements as pairs, and padding as zeros.

        Padding may have any value: decoding and updates write to it.
        """
        unit, flat = self.node.unit, self.buffer.detach().resolve_conj().reshape(-1)
        start = unit.local_start(self.group, self.node.place, self.rank)
        for piece in flat.split(_CHUNK) if len(flat) else ():
            chunk = piece.to(torch.complex128 if piece.is_complex() else torch.float64, copy=True)
            for gap in padding_in_run(unit, self.group, start, len(chunk)):
                chunk[gap] = 0
            start += len(chunk)
            yield torch.view_as_real(chunk).view(-1) if chunk.is_complex() else chunk


def _sum_over_axes(x: torch.Tensor, axes: Iterable[str], comm: Comm, label: str) -> torch.Tensor:
    for axis in axes:
        x = all_reduce(x, comm, axis, label=label)
    return x


def _exact_norm(by_axes: dict[tuple[str, ...], list[_Values]], comm: Comm, label: str) -> torch.Tensor:
    """Return the 2-norm of all elements over all ranks, a float64 scalar.

    Squares are rounded down to integers and summed as integers, so the bits of the norm do not depend on the order of
    summation. ``by_axes``: dict from mesh axes to this rank's buffers whose sums of squares are added over these axes.
    """
    most = torch.zeros(1, dtype=torch.float64, device=comm.device)
    for buffers in by_axes.values():
        for buffer in buffers:
            for chunk in buffer.chunks():
                most = torch.maximum(most, chunk.abs_().max().to(most.device))  # propagates NaN
    both = torch.cat([most.nan_to_num(posinf=math.inf), most.isnan().to(most)])  # a maximum over ranks may lose a NaN
    most, is_nan = max_over_ranks(both, comm, label=label).unbind()
    if is_nan:
        return torch.full_like(most, math.nan)
    if not torch.isfinite(most) or most == 0:
        return most
    exponent = max(math.frexp(float(most))[1], -1000)  # beyond that 2.0**-exponent would overflow
    total = torch.zeros(_LIMBS, dtype=torch.int64, device=comm.device)
    for axes, buffers in by_axes.items():
        part = torch.zeros_like(total)
        for buffer in buffers:
            for chunk in buffer.chunks():
                rest = chunk.mul_(2.0**-exponent).square_()  # exact for float32: 2 * 24 bits fit in 53
                for limb in range(_LIMBS):
                    whole = rest.mul_(2.0**_BITS).floor()
                    part[limb] += whole.long().sum().to(part.device)
                    rest.sub_(whole)
        total += _sum_over_axes(part, axes, comm, label)
    value = sum(int(limb) << (_BITS * (_LIMBS - 1 - k)) for k, limb in enumerate(total.tolist()))
    norm = math.ldexp(math.sqrt(value), exponent - _BITS * _LIMBS // 2)
    return torch.tensor(norm, dtype=torch.float64, device=comm.device)


class ClipState(NamedTuple):
    """State of :func:`clip_by_global_norm`: the global norm of the last gradients before clipping; 0 before any update."""

    norm: torch.Tensor


@options_checked
def clip_by_global_norm(max_norm: float, *, deterministic: bool = False) -> Transform:
    """Return a transformation that scales gradients so that their global norm is at most ``max_norm``.

    ``g <- g * min(1, max_norm / |g|)``.

    Args:
        max_norm: a positive number.
        deterministic: compute a norm whose bits do not depend on the layout; see :func:`global_norm`.

    Returns:
        A transformation with :class:`ClipState`. As in torch and optax, an infinite gradient makes infinite elements NaN and
        all others zero; a NaN makes all elements NaN. To skip such steps, wrap the whole chain in
        :func:`~fsharp.optim.apply_if_finite`.

    Raises:
        OptionError: ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise OptionError(f"clip_by_global_norm(): max_norm is {max_norm!r}, expected a positive number.")

    def init(params: Any, /) -> ClipState:
        return ClipState(torch.zeros((), dtype=_norm_dtype(params)))

    def update(grads: Any, state: ClipState, params: Any, *, comm: Comm) -> tuple[Any, ClipState]:
        # float64: the norm of finite gradients is finite
        norm = _float64_norm(grads, comm, deterministic, "clip_by_global_norm()")
        factor = torch.clamp(max_norm / norm, max=1.0)  # stays float64: in half precision it might be zero
        return optree.tree_map(lambda g: g * factor, grads), ClipState(norm.to(state.norm.dtype))

    return Transform(init, update, {"clip_by_global_norm": [max_norm, deterministic]}, name="clip_by_global_norm")
