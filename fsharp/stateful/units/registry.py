"""UnitRegistry: which unit a node is. Within a run by the memory it has, over all runs by its name and layout."""

from collections.abc import Container
from itertools import count

import torch

from fsharp.functional.layout.sharded import Sharded
from fsharp.stateful.units.unit_state import UnitState

Signature = tuple[str | int, ...]
_address_of = torch.Tensor.data_ptr


class UnitRegistry:
    """The units of all trees that a scheduler has seen.

    Args:
        trivial: whether collectives along axes of size 1 run as well.

    Attributes:
        units: by key, which is the name, with a number if several trees have it.
    """

    def __init__(self, *, trivial: bool) -> None:
        self.trivial = trivial
        self.units: dict[str, UnitState] = {}
        self._table: dict[Signature, UnitState] = {}

    def begin(self) -> None:
        """A new run: addresses may be others' by now."""
        self._table = {}
        for unit in self.units.values():
            unit.begin()

    def forget(self) -> None:
        """Forget which memory belongs to which unit."""
        self._table = {}

    def release(self) -> None:
        """Hold on to nobody's nodes: what comes next is no part of a step, and has no part in a schedule's memory."""
        for unit in self.units.values():
            unit.node = unit.params = None

    def expect(self, key: str, node: Sharded) -> None:
        """This node is the unit with that key, if there is such a one and the node is not known yet."""
        known = self.units.get(key)
        if known is not None and node.unit == known.layout and self._table.setdefault(_signature(node), known) is known:
            known.node = node

    def enter(self, unit: UnitState, node: Sharded) -> None:
        """This node is that unit."""
        self._table[_signature(node)] = unit
        unit.node = node

    def leave(self, node: Sharded) -> None:
        """Who still has this node has another unit from here on."""
        self._table.pop(_signature(node), None)

    def find(self, node: Sharded) -> UnitState | None:
        """The unit that a node is in this run, if it is known."""
        return self._table.get(_signature(node))

    def add(self, node: Sharded) -> UnitState:
        """The unit that a node is from here on, of an earlier run or a new one."""
        name, taken = node.name or "(root)", {unit.key for unit in self._table.values()}
        keys = (f"{name}#{number}" if number else name for number in count())
        key = next(k for k in keys if k not in taken and (k not in self.units or self.units[k].layout == node.unit))
        if key not in self.units:
            self.units[key] = UnitState(key, node.unit, trivial=self.trivial)
        self.enter(self.units[key], node)
        return self.units[key]

    def sweep(self, used: Container[str]) -> None:
        """Units that are neither used nor of this run are gone."""
        now = {unit.key for unit in self._table.values()}
        self.units = {key: unit for key, unit in self.units.items() if key in used or key in now}


def _signature(node: Sharded) -> Signature:
    return node.unit.name, *map(_address_of, node.raw_buffers)
