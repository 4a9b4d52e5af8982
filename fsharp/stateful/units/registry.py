"""UnitRegistry: which unit a node is. Within a step by the memory it has, over all steps by its name and layout."""

from collections.abc import Container
from itertools import count

import torch

from fsharp.functional.layout.sharded import Sharded
from fsharp.stateful.units.unit_state import UnitState

Signature = tuple[str | int, ...]
_address_of = torch.Tensor.data_ptr


class UnitRegistry:
    """The units of all trees that a scheduler has seen.

    Attributes:
        units: by key, which is the name, with a number if several trees have it.
    """

    def __init__(self, *, trivial: bool) -> None:
        self.trivial = trivial
        self.units: dict[str, UnitState] = {}
        self._by_memory: dict[Signature, UnitState] = {}

    def begin_step(self) -> None:
        """A new step: addresses may be others' by now."""
        self._by_memory.clear()
        for unit in self.units.values():
            unit.begin_step()

    def unbind(self) -> None:
        """Have units hold nobody's nodes: what comes next is no part of a step, and has no part in a schedule's memory."""
        self._by_memory.clear()
        for unit in self.units.values():
            unit.unbind()

    def expect(self, key: str, node: Sharded) -> None:
        """This node is the unit with that key, if there is such a one and the node is not known yet."""
        known = self.units.get(key)
        if known is None or (node.unit is not known.layout and node.unit != known.layout):
            return
        if self._by_memory.setdefault(_signature(node), known) is known:
            known.bind(node)

    def enter(self, unit: UnitState, node: Sharded, *, instead: Sharded | None = None) -> None:
        """This node is that unit; who still has the node ``instead`` has another unit from here on."""
        if instead is not None:
            self._by_memory.pop(_signature(instead), None)
        self._by_memory[_signature(node)] = unit
        unit.bind(node)

    def find(self, node: Sharded) -> UnitState | None:
        """The unit that a node is in this step, if it is known."""
        return self._by_memory.get((node.unit.name, *map(_address_of, node.raw_buffers)))  # as _signature, without a call

    def add(self, node: Sharded) -> UnitState:
        """The unit that a node is from here on, of an earlier step or a new one."""
        name, taken = node.name or "(root)", {unit.key for unit in self._by_memory.values()}
        keys = (f"{name}#{number}" if number else name for number in count())
        key = next(k for k in keys if k not in taken and (k not in self.units or self.units[k].layout == node.unit))
        if key not in self.units:
            self.units[key] = UnitState(key, node.unit, trivial=self.trivial)
        self.enter(self.units[key], node)
        return self.units[key]

    def prune(self, used: Container[str]) -> None:
        """Remove units that are neither used nor of this step."""
        now = {unit.key for unit in self._by_memory.values()}
        self.units = {key: unit for key, unit in self.units.items() if key in used or key in now}


def _signature(node: Sharded) -> Signature:
    return node.unit.name, *map(_address_of, node.raw_buffers)
