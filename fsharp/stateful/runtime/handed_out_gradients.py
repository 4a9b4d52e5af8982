"""HandedOutGradients: the gradients that a step has returned to its function, which may pass them on to a reduction."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

import torch

from fsharp.errors import ScheduleError
from fsharp.functional.layout.sharded import PlaceName, Sharded, resolve_place
from fsharp.functional.layout.stages import residual_sizes
from fsharp.stateful.units.future_buffers import with_lazy_buffers
from fsharp.stateful.units.unit_gradient import GradientPhase
from fsharp.stateful.units.unit_state import UnitState

_address_of, _version_of = torch.Tensor.data_ptr, attrgetter("_version")


class HandedOutGradients:
    """A record of the gradients that the last ``value_and_grad`` has returned. ``reduce_scatter`` reads the record."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Clear the record, and release its references to gradients."""
        self._rows: list[tuple[UnitState, list[torch.Tensor], list[int]]] = []

    def take_units(self) -> list[UnitState]:
        """Return the units, in tree order, and clear the record."""
        units = [unit for unit, _, _ in self._rows]
        self.clear()
        return units

    def hand_out_gradient(self, node: Sharded, unit: UnitState, reduction: Literal["sum"] | None) -> Sharded:
        """Return the gradient at rest of ``unit``, whose parameters are ``node``, and record the gradient as handed out."""
        gradient = unit.gradient
        if gradient is None:
            return Sharded([], node.unit, node.unit.strategy.grads, (), reduction=reduction)
        if gradient.phase is GradientPhase.NONE:
            gradient.zero_if_missing()
        tensors = gradient.rest.hand_out()
        self._rows.append((unit, tensors, list(map(_version_of, tensors))))
        result = Sharded(tensors, node.unit, node.unit.strategy.grads, node.unit.trainable_groups, reduction=reduction)
        return with_lazy_buffers(result, gradient.wait) if gradient.is_under_way else result

    def check_none_reduced_with_feedback(self, nodes: Sequence[Sharded]) -> None:
        """Raise an error if a gradient in ``nodes`` was reduced with feedback: another reduction would read new residuals."""
        layouts = {node.unit for node in nodes}
        for unit in [unit for unit, _, _ in self._rows if unit.layout in layouts and residual_sizes(unit.layout)]:
            if unit.gradient is not None and unit.gradient.phase >= GradientPhase.FINISHING:
                raise ScheduleError(
                    f"reduce_scatter(): the gradient of unit {unit.key!r} was changed after the schedule had sent it with "
                    "feedback. Make the same changes in each step, from the first step on."
                )

    def is_scheduled_reduction(self, nodes: Sequence[Sharded], to: PlaceName) -> bool:
        """Return whether ``nodes`` are all gradients handed out, unchanged since sent, and ``to`` is the optimizer's place."""
        filled = [node for node in nodes if node.unit.trainable_groups]
        if len(filled) != len(self._rows) or not filled:
            return False
        for node, (unit, tensors, versions) in zip(filled, self._rows, strict=True):
            if node.unit is not unit.layout and node.unit != unit.layout:
                return False
            if to != "optim" and resolve_place(node.unit, to) != node.unit.strategy.optim:
                return False
            buffers = node.raw_buffers
            if list(map(_address_of, buffers)) != list(map(_address_of, tensors)):
                return False
            is_sent = unit.gradient is not None and unit.gradient.route.has_final_reduction  # a later change would not be sent
            if is_sent and list(map(_version_of, buffers)) != versions:
                return False
        return True
