"""Uses of units in a step: from entering a unit in the forward to the end of its backward."""

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.release import written_to
from fsharp.stateful.runtime.boundary import pack_saved
from fsharp.stateful.units.full import FullUnit
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.unsharded import Stamp, UnshardedBuffer, stamp


class UnitUse:
    """One use of a unit.

    Args:
        number: number of uses that have begun before in the step.
        parent: the use inside of which this one begins; None if there is none.
        copy: the buffer of the unit's full parameters; None if the unit rests in full.

    Attributes:
        leaves: the tensors that the function gets; None once the function has them.
        is_opaque: whether autograd has saved tensors that cannot be looked into.
    """

    def __init__(
        self, unit: UnitState, number: int, parent: "UnitUse | None", copy: UnshardedBuffer | None, full: FullUnit
    ) -> None:
        assert unit.node is not None
        self.unit, self.number, self.parent, self.copy = unit, number, parent, copy
        self.node: Sharded = unit.node
        self.seen: Stamp = (copy.filled_from if copy is not None else None) or stamp(unit.node)
        self.leaves: list[torch.Tensor] | None = full.leaves()
        self._full: FullUnit | None = full
        self._versions = full.versions()
        self.is_opaque = False

    def is_inside(self, other: "UnitUse") -> bool:
        """Whether this use began inside of the other, or is the other."""
        use: UnitUse | None = self
        while use is not None and use is not other:
            use = use.parent
        return use is not None

    def take_leaves(self) -> list[torch.Tensor]:
        """Return the leaves, and hold them no longer: they are the caller's alone."""
        leaves, self.leaves = self.leaves, None
        return leaves or []

    def check_unwritten(self) -> None:
        """Refuse a function that has written to a leaf: a backward would see the new values, or nobody would."""
        if self._full is not None and self._full.versions() != self._versions:
            raise written_to(self.unit.key)
        self._full = None

    def pack(self, out: Any, first: int, fill: Callable[[], UnshardedBuffer]) -> None:
        """Have autograd hold no memory of the parameters, if they have memory of their own; see :func:`pack_saved`."""
        if self.copy is not None and self.copy.where is None:
            self.is_opaque = not pack_saved(out, self.copy, first, fill)


class UsesUnderWay:
    """The uses of a step that have begun, and what is to come of them.

    Attributes:
        numbers: yields the number of the next use.
        forward: uses whose function is being called, the innermost last.
        backward: uses whose backward has begun, the innermost last.
        pending: by unit, number of uses in this microbatch whose gradient is yet to come.
        awaited: uses whose backward may come; autograd's graph keeps them alive.
        held: units whose parameters somebody holds beyond their use: a schedule would put something else in their memory.
        recomputed: units that a checkpoint has used again and somebody holds, with no backward of theirs since.
    """

    def __init__(self) -> None:
        self.numbers = count()
        self.forward: list[UnitUse] = []
        self.backward: list[UnitUse] = []
        self.pending: dict[str, int] = {}
        self.awaited: set[weakref.ref[UnitUse]] = set()
        self.held: dict[str, None] = {}
        self.recomputed: dict[str, None] = {}

    def are_in(self, copy: UnshardedBuffer) -> bool:
        """Whether a use that is under way has its parameters in this buffer."""
        return any(use.copy is copy for each in (self.forward, self.backward) for use in each)

    def end_recomputation(self) -> None:
        """Take units that a checkpoint has used again for held: no backward of theirs has come since."""
        self.held |= self.recomputed
        self.recomputed.clear()
