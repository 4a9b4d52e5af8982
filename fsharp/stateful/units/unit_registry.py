"""UnitRegistry: find the unit of a node: in a step by the node's memory, in later steps by name and layout."""

from collections.abc import Container
from itertools import count

import torch

from fsharp.functional.layout.sharded import Sharded
from fsharp.stateful.units.unit_state import UnitState

MemoryKey = tuple[str | int, ...]
_address_of, _size_of = torch.Tensor.data_ptr, torch.Tensor.numel


class UnitRegistry:
    """The units of all trees that a scheduler has seen. A node is one tree's :class:`~fsharp.Sharded`; it is bound to its unit.

    Attributes:
        units: units by key. A key is the unit's path, with a number if several trees have a unit of this path.
    """

    def __init__(self, *, trivial: bool) -> None:
        self.trivial = trivial
        self.units: dict[str, UnitState] = {}
        self._by_memory: dict[MemoryKey, UnitState] = {}

    def begin_step(self) -> None:
        """Begin a step: drop the nodes and addresses of the previous step, as addresses may be reused."""
        self._by_memory.clear()
        for unit in self.units.values():
            unit.begin_step()

    def unbind_nodes(self) -> None:
        """Unbind all units from their nodes, before calls outside of a step, which use no memory of a schedule."""
        self._by_memory.clear()
        for unit in self.units.values():
            unit.bind_node(None)

    def bind_unbound_node(self, key: str, node: Sharded) -> None:
        """Bind ``node`` to the unit ``key``, if there is such a unit with this layout, and the node is not bound yet."""
        known = self.units.get(key)
        if known is None or (node.unit is not known.layout and node.unit != known.layout):
            return
        if self._by_memory.setdefault(memory_key(node), known) is known:
            known.bind_node(node)

    def bind_node(self, unit: UnitState, node: Sharded, *, replaced: Sharded | None = None) -> None:
        """Bind ``node`` to ``unit``. The node ``replaced`` is unbound, and gets another unit if it is used again."""
        if replaced is not None:
            self._by_memory.pop(memory_key(replaced), None)
        self._by_memory[memory_key(node)] = unit
        unit.bind_node(node)

    def find_unit(self, node: Sharded) -> UnitState | None:
        """Return the unit to which ``node`` is bound in this step; None if it is not bound. ``memory_key()`` is inlined."""
        return self._by_memory.get((node.unit.name, *map(_address_of, node.raw_buffers), *map(_size_of, node.raw_buffers)))

    def bind_or_make_unit(self, node: Sharded) -> UnitState:
        """Bind ``node`` to a unit of its path and layout that is free in this step, or to a new unit. Return the unit."""
        name, taken = node.name or "(root)", {unit.key for unit in self._by_memory.values()}
        keys = (f"{name}#{number}" if number else name for number in count())
        key = next(k for k in keys if k not in taken and (k not in self.units or self.units[k].layout == node.unit))
        if key not in self.units:
            self.units[key] = UnitState(key, node.unit, trivial=self.trivial)
        self.bind_node(self.units[key], node)
        return self.units[key]

    def remove_unused(self, used: Container[str]) -> None:
        """Remove units whose key is not in ``used``, unless a node of this step is bound to them."""
        now = {unit.key for unit in self._by_memory.values()}
        self.units = {key: unit for key, unit in self.units.items() if key in used or key in now}


def memory_key(node: Sharded) -> MemoryKey:
    """Return a node's unit, addresses and sizes. One rank's part may begin where the whole buffer does, another's may not."""
    return node.unit.name, *map(_address_of, node.raw_buffers), *map(_size_of, node.raw_buffers)
