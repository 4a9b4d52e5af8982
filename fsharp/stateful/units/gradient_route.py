"""GradientRoute: the collectives of a unit's gradient from a backward to the optimizer's shards, and their buffers."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.stateful.transport.base import Transport
from fsharp.stateful.units.axis_chain import ReductionChain
from fsharp.stateful.units.full_unit import FlatSizes, carve_tensors, leaf_table, sizes_nbytes
from fsharp.stateful.units.gradient_buffers import GradientBuffers

Grads = Sequence[torch.Tensor | None]


class OutgoingBlock(NamedTuple):
    """The buffers in which a unit's gradient is collected, and from which it is sent to be reduced, in one run of memory.

    Attributes:
        leaves: aliases of the trained leaves in the memory.
        padding: padding between leaves.
        collected: for each group, the flat buffer of the leaves.
        sent: for each group, the buffer that travels; often the buffer in ``collected``.
        scratch: for each group, scratch of its reduction.
        received: for each group, memory for the sum before it is added; None leaves the sum where the reduction computes it.
    """

    leaves: list[torch.Tensor]
    padding: list[torch.Tensor]
    collected: list[torch.Tensor]
    sent: list[torch.Tensor]
    scratch: list[list[torch.Tensor]]
    received: list[torch.Tensor | None]


class GradientRoute:
    """The collectives of a unit's gradient from a backward to the optimizer's shards, and the sizes of their buffers.

    In methods ``several_uses`` is whether some microbatch has several uses of the unit with gradients.

    Args:
        trivial: whether collectives run along axes of one rank too.

    Attributes:
        leaves: leaves with a gradient, in tree order.
        has_reduction: whether the gradient is reduced after each microbatch.
        has_final_reduction: whether the gradient is reduced once a step, from the place of gradients to the optimizer's shards.
        can_sum_in_place: whether the final reduction can write sums to the memory of their summands, as both have equal sizes.
    """

    def __init__(self, unit: UnitLayout, transport: Transport, device: torch.device, *, trivial: bool = False) -> None:
        self.unit, self.device = unit, device
        self.leaf_table = leaf_table(unit)
        self.leaves = [self.leaf_table.stored[i] for i in self.leaf_table.trainable]
        whole, rest, end = unit.strategy.full.cotangent_place, unit.strategy.grads, unit.strategy.optim
        chain = partial(ReductionChain, transport, unit, trivial=trivial)
        self.chains = [chain(g, (whole, rest)) for g in unit.trainable_groups]
        self.final_chains = [chain(g, (rest, end), always_has_out=True) for g in unit.trainable_groups]
        self.has_reduction = any(each.stages for each in self.chains)
        self.has_final_reduction = any(each.stages for each in self.final_chains)
        self.can_sum_in_place = self.gradient_sizes(rest) == self.gradient_sizes(end)

    def gradient_sizes(self, place: MeshPlacement) -> FlatSizes:
        """Return ``(number of elements, dtype)`` of each group's gradient in ``place``."""
        unit = self.unit
        return [(unit.local_size(g, place), unit.groups[g].dtypes.accumulate) for g in unit.trainable_groups]

    def resting_gradient(self, arena_bytes: torch.Tensor | None = None) -> GradientBuffers:
        """Return the buffers of the gradient at rest: in the arena's bytes ``arena_bytes``; for None in their own memory."""
        return GradientBuffers(self.gradient_sizes(self.unit.strategy.grads), self.device, arena_bytes)

    def outgoing_block_nbytes(self, *, several_uses: bool, several_microbatches: bool) -> int:
        """Return the bytes of an :class:`OutgoingBlock`; 0 if gradients are added directly to the gradient at rest."""
        if not self.has_reduction and not (several_uses and several_microbatches):
            return 0
        return sum(sizes_nbytes(self._outgoing_sizes(chain, several_uses)) for chain in self.chains)

    def _outgoing_sizes(self, chain: ReductionChain, several_uses: bool) -> FlatSizes:
        """Return ``(number of elements, dtype)`` of one group's tensors in a block: collected, sent, scratch, received."""
        if not self.has_reduction:
            return [(chain.size, chain.dtypes.accumulate)]
        collected: FlatSizes = [(chain.size, chain.dtypes.accumulate)] if _sends_copy(chain, several_uses) else []
        received: FlatSizes = [(chain.stages[-1].out, chain.dtypes.accumulate)] if chain.casts_last else []
        return [*collected, (chain.size, chain.first), *chain.scratch_sizes(), *received]

    def final_reduction_block_nbytes(self) -> int:
        """Return the bytes of :meth:`final_reduction_block`, for the reduction to the optimizer's shards."""
        return sum(map(sizes_nbytes, self._final_reduction_block_sizes()))

    def _final_reduction_block_sizes(self) -> list[FlatSizes]:
        """Return, for each group, ``(number of elements, dtype)`` of the buffer to send and of the scratch of its reduction."""
        if not self.has_final_reduction:
            return [[] for _ in self.final_chains]
        return [[(chain.size if chain.casts_first else 0, chain.first), *chain.scratch_sizes()] for chain in self.final_chains]

    def outgoing_block(self, memory: torch.Tensor, *, several_uses: bool) -> OutgoingBlock:
        """Cut ``memory``, as large as :meth:`outgoing_block_nbytes` says for ``several_uses``, into the buffers of a block."""
        collected: list[torch.Tensor] = []
        sent: list[torch.Tensor] = []
        received: list[torch.Tensor | None] = []
        rows = _carve_rows(memory, [self._outgoing_sizes(chain, several_uses) for chain in self.chains])
        for chain, row in zip(self.chains, rows, strict=True):
            collected.append(row.pop(0))
            sent.append(row.pop(0) if self.has_reduction and _sends_copy(chain, several_uses) else collected[-1])
            received.append(row.pop() if self.has_reduction and chain.casts_last else None)
        leaves, padding = self.leaf_table.trained_leaves(dict(zip(self.unit.trainable_groups, collected, strict=True)))
        return OutgoingBlock(leaves, padding, collected, sent, rows, received)

    def final_reduction_block(self, memory: torch.Tensor) -> list[list[torch.Tensor]]:
        """Cut ``memory``, of :meth:`final_reduction_block_nbytes` bytes, into each group's buffer to send and its scratch."""
        return _carve_rows(memory, self._final_reduction_block_sizes())


def _sends_copy(chain: ReductionChain, several_uses: bool) -> bool:
    """Return whether gradients are collected in the accumulation dtype, and sent from other memory, in another dtype."""
    return chain.casts_first and (several_uses or chain.rounds_gradients)


def _carve_rows(memory: torch.Tensor, rows: Sequence[FlatSizes]) -> list[list[torch.Tensor]]:
    """Cut ``memory`` by :func:`carve_tensors` into tensors of the sizes in ``rows``, in order. Return each row's tensors."""
    tensors = iter(carve_tensors(memory, [piece for row in rows for piece in row]))
    return [[next(tensors) for _ in row] for row in rows]
