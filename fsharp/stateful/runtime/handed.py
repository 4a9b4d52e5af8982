"""Handed: the gradients that callers were given last, to be known again when they come back to be reduced."""

from collections.abc import Sequence
from functools import partial

import torch

from fsharp.functional.errors import LossError
from fsharp.functional.sharded import PlaceName, Sharded, resolve_place
from fsharp.stateful.runtime.copies import LiveUnit
from fsharp.stateful.runtime.gradients import Gradient
from fsharp.stateful.runtime.pending import pending


class Handed:
    """What one ``value_and_grad`` has handed out: each trained unit's buffers, and how often they had been written to."""

    def __init__(self) -> None:
        self._rows: list[tuple[LiveUnit, list[torch.Tensor], list[int]]] = []

    @property
    def units(self) -> list[LiveUnit]:
        """The units, in tree order."""
        return [unit for unit, _, _ in self._rows]

    def out(self, node: Sharded, unit: LiveUnit) -> Sharded:
        """The gradient of a unit, whose parameters ``node`` is, where it rests."""
        gradient = unit.gradient
        if gradient is None:
            return Sharded([], node.unit, node.unit.strategy.grads, ())
        gradient.settle()
        tensors = gradient.collected.hand_out()
        self._rows.append((unit, tensors, [t._version for t in tensors]))
        result = Sharded(tensors, node.unit, node.unit.strategy.grads, node.unit.trainable)
        if gradient.in_place:
            return pending(result, partial(_was_promised, node.name))
        return pending(result, gradient.join) if gradient.is_under_way else result

    def are(self, nodes: Sequence[Sharded], to: PlaceName) -> bool:
        """Whether these are all of them, as they were handed out, on their way to the optimizer's place."""
        filled = [node for node in nodes if node.unit.trainable]
        if len(filled) != len(self._rows) or not filled:
            return False
        for node, (unit, tensors, versions) in zip(filled, self._rows, strict=True):
            if node.unit != unit.layout or resolve_place(node.unit, to) != node.unit.strategy.optim:
                return False
            buffers = node.raw_buffers
            if [b.data_ptr() for b in buffers] != [t.data_ptr() for t in tensors]:
                return False
            is_begun = unit.gradient is not None and unit.gradient.is_finished_apart  # its reduction, without what was changed
            if is_begun and [b._version for b in buffers] != versions:
                return False
        return True


def reduced(node: Sharded, gradient: Gradient | None, to: PlaceName) -> Sharded:
    """A gradient that was handed out, at the optimizer's place."""
    if gradient is None or not gradient.is_finished_apart:
        same = node.replace(node.raw_buffers, resolve_place(node.unit, to))
        return pending(same, node.lazy.wait) if node.lazy is not None else same
    result = node.replace(gradient.final.hand_out(), resolve_place(node.unit, to))
    return pending(result, gradient.join) if gradient.is_under_way else result


def _was_promised(name: str) -> None:
    raise LossError(
        f"value_and_grad(averaged=True): this rank's part of the gradient of unit {name!r} was looked at, or was not what "
        "reduce_scatter() got, and it is summed over ranks where it is: nothing of it is left. Leave out averaged=True where "
        "gradients are used otherwise than by reduce_scatter(), whole and once."
    )
