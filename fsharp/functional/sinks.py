"""Sinks: tensors that collect gradients in the place and dtype in which gradients rest."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch

from fsharp.functional.comm.collectives import local_slice_last
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.residuals import ResidualsByAxis, ResidualViews
from fsharp.functional.layout.placement import MeshPlacement, Partial, Replicate, Shard
from fsharp.functional.layout.sharded import Sharded, map_units
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.moves import reduce_partial_sums
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import cache_signature


class GradientSinks:
    """The sinks of the parameters that ``value_and_grad`` passes to the loss, for one microbatch.

    A *sink* is a tensor without memory in the shape, dtype and place of a gradient at rest. A *handle* is a tensor without
    memory in the shape of the full buffer. Autograd adds the gradients of all uses of a unit at its handle. The sum is reduced
    once over ranks, to the gradient of the sink. ``residuals`` has encoding errors of earlier gradients, which reductions
    overwrite.
    """

    def __init__(self, residuals: ResidualViews = MappingProxyType({})) -> None:
        self._residuals = residuals
        self._sinks: dict[tuple[int, ...], tuple[Sequence[torch.Tensor], tuple[torch.Tensor, ...]]] = {}
        self._handles: dict[int, torch.Tensor] = {}

    def register_sinks(self, buffers: Sequence[torch.Tensor], sinks: tuple[torch.Tensor, ...]) -> None:
        """Record that the gradients of a node's ``buffers`` go to ``sinks``, one for each trainable group of the node."""
        self._sinks[tuple(map(id, buffers))] = (buffers, sinks)

    def sinks_of_node_buffers(self, buffers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the sinks of these very tensors; an empty tuple for other tensors, such as results computed from buffers."""
        return self._sinks.get(tuple(map(id, buffers)), ((), ()))[1]

    def residuals(self, unit: UnitLayout, group: int) -> ResidualsByAxis:
        """Return, by axis, the residual and the random numbers with which a group's gradient is encoded; empty without any."""
        return self._residuals.get(unit.name, {}).get(group, {})

    def attach_to_graph(self, node: Sharded, full: Sequence[torch.Tensor], comm: Comm) -> list[torch.Tensor]:
        """Return the gathered buffers ``full`` attached to autograd's graph: gradients of trainable groups go to handles."""
        handles = {}
        for g, sink in zip(node.unit.trainable_groups, node.sinks, strict=True):
            # Made at the first use: autograd runs newer nodes first, so the reduction does not wait for older ones.
            if id(sink) not in self._handles:
                self._handles[id(sink)] = self._new_handle(sink, node.unit, g, comm)
            handles[g] = self._handles[id(sink)]
        pairs = zip(node.groups, full, strict=True)
        return [self._attach_handle(x.detach(), handles[g]) if g in handles else x for g, x in pairs]

    def _attach_handle(self, full: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
        return _AttachHandle.apply(full, handle)  # type: ignore[no-any-return]

    def _new_handle(self, sink: torch.Tensor, unit: UnitLayout, group: int, comm: Comm) -> torch.Tensor:
        source, target, residuals = unit.strategy.full.cotangent_place, unit.strategy.grads, self.residuals(unit, group)
        reduce = partial(
            reduce_partial_sums, unit=unit, group=group, source=source, target=target, comm=comm, residuals=residuals
        )
        return _MakeHandle.apply(sink, (unit.groups[group].size,), reduce)  # type: ignore[no-any-return]


def with_sinks(params: Any, grad_sinks: GradientSinks) -> Any:
    """Return ``params`` with the same values, detached from earlier graphs, and with a new sink for each trainable group.

    The sinks are recorded in ``grad_sinks``. The gradients of one microbatch then arrive at the sinks.
    """
    zero = cache(lambda dtype, device: torch.zeros((), dtype=dtype, device=device))

    def add_sinks(node: Sharded) -> Sharded:
        unit, buffers = node.unit, node.raw_buffers
        device = buffers[0].device if buffers else torch.device("cpu")
        zeros = [zero(unit.groups[g].dtypes.accumulate, device) for g in unit.trainable_groups]
        pairs = zip(zeros, unit.resting_gradient_sizes, strict=True)
        sinks = tuple([x.expand(size).requires_grad_() for x, size in pairs])
        own = []
        for g, x in zip(node.groups, buffers, strict=True):
            own.append(x.detach().requires_grad_(g in unit.trainable_groups and x.is_floating_point()))
        grad_sinks.register_sinks(own, sinks)
        return node.with_buffers(own if node.lazy is None else node.lazy.for_aliases(own), grad_sinks=grad_sinks)

    return map_units(add_sinks, params)


def take_gradient_buffers(node: Sharded, comm: Comm) -> list[torch.Tensor | None]:
    """Return the gradient at rest of each trainable group of a node, or None, and remove the gradients from the node.

    Backward passes leave gradients of gathered buffers at the node's sinks. If the loss has used the node's own buffers, their
    gradients are in ``buffer.grad``. This function moves these gradients to the place of gradients, and adds them to those at
    the sinks.
    """
    held = dict(zip(node.groups, node.raw_buffers, strict=True))
    result = []
    for group, sink in zip(node.unit.trainable_groups, node.sinks, strict=True):
        grad, sink.grad = sink.grad, None
        if group in held and (direct := held[group].grad) is not None:
            held[group].grad = None
            moved = _gradient_at_rest(direct, node, group, comm)
            grad = moved if grad is None else grad + moved
        result.append(grad)
    return result


def _gradient_at_rest(x: torch.Tensor, node: Sharded, group: int, comm: Comm) -> torch.Tensor:
    """Return ``x``, the gradient of a buffer of ``node``, in the place and dtype in which gradients rest."""
    source, target = node.place.cotangent_place if node.is_gathered else node.place, node.unit.strategy.grads
    x = _as_summands(x, source, target, comm)
    if source.partial_axes:
        x = reduce_partial_sums(x, node.unit, group, source, target, comm, node.grad_sinks.residuals(node.unit, group))
    return x.to(node.unit.groups[group].dtypes.accumulate)


class _MakeHandle(torch.autograd.Function):
    """An autograd function that returns a handle (see :class:`GradientSinks`). Its backward calls ``deliver``.

    ``deliver`` reduces the gradient of the handle over ranks, and returns the gradient of the sink. Without handles autograd
    would sum full gradients, in the dtype of parameters.
    """

    @staticmethod
    @cache_signature
    def forward(sink: torch.Tensor, shape: Sequence[int], deliver: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        return sink.new_zeros(()).expand(shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.deliver = inputs[2]
        ctx.set_materialize_grads(False)

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        arrived = cotangents[0]  # None if no gradient has reached the handle
        return None if arrived is None else ctx.deliver(arrived), None, None


class _AttachHandle(torch.autograd.Function):
    """An autograd function that returns the gathered buffer ``full``. The gradient goes to ``handle``: see GradientSinks."""

    @staticmethod
    @cache_signature
    def forward(full: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
        return full.view_as(full)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, cotangents[0].to(ctx.dtype)


def _as_summands(x: torch.Tensor, source: MeshPlacement, target: MeshPlacement, comm: Comm) -> torch.Tensor:
    """Return this rank's summand of a gradient ``x``, so that the sum over ranks has each element once.

    ``source``: the place of ``x``. Along axes on which ``target`` is partial, a replicated ``x`` becomes zeros on all ranks but
    the first of the axis; a sharded ``x`` is padded with zeros to the whole buffer. Along axes on which ``target`` is sharded,
    a replicated ``x`` is cut to this rank's part.
    """
    for axis in reversed(source.axis_order):
        n, at = comm.mesh.axis_size(axis), comm.mesh.coord(axis, comm.rank)
        if source[axis] is Replicate and target[axis] is Partial and at:
            x = torch.zeros_like(x)
        elif source[axis] is Shard and target[axis] is Partial:
            x = torch.nn.functional.pad(x, (at * x.shape[-1], (n - 1 - at) * x.shape[-1]))
    for axis in source.axis_order:
        if source[axis] is Replicate and target[axis] is Shard:
            x = local_slice_last(x, comm, axis)
    return x
