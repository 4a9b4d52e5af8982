"""Missing: parameters that no backward of a step has come to, on any rank. Optimizers of torch leave those alone."""

from collections.abc import Sequence

import torch

from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.unit_layout import Leaf
from fsharp.stateful.units.unit_state import UnitState


class Missing:
    """What ranks agree on about it.

    They compare after each step that has followed no plan. In one that follows a plan they do so only if the last comparison
    has found something missing: a plan fixes which units have gradients, and what is missing within a unit seldom changes. Of
    units that vary along an axis, such as experts, which may get no tokens, they always do.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._is_complete: dict[tuple[str, ...], bool] = {}  # by the axes along which units vary: ranks agree along the others

    def among(self, units: Sequence[UnitState], *, is_planned: bool) -> set[str]:
        """Paths of the trained parameters of these units that have no gradient.

        Args:
            units: after the last backward of a step.
            is_planned: whether the step has followed its plan so far; the same on all ranks.

        Cost: an ``all_reduce`` of one byte for each parameter and axis, if ranks compare.
        """
        missing: set[str] = set()
        for varying in dict.fromkeys(unit.layout.strategy.full.varying for unit in units):
            mine = [unit for unit in units if unit.gradient is not None and unit.layout.strategy.full.varying == varying]
            if not mine or (is_planned and not varying and self._is_complete.get(varying, False)):
                continue
            found = [(unit.layout.full_path(leaf), has) for unit in mine for leaf, has in _found(unit)]
            flags = torch.tensor([has for _, has in found], dtype=torch.uint8, device=self._comm.device)
            for axis, size in self._comm.mesh.axes:
                if size > 1 and axis not in varying:
                    flags = self._comm.all_reduce(flags, axis, op="max")
            missing |= {path for (path, _), has in zip(found, flags.tolist(), strict=True) if not has}
            self._is_complete[varying] = bool(flags.all())
        return missing


def _found(unit: UnitState) -> list[tuple[Leaf, bool]]:
    assert unit.gradient is not None
    return [(leaf, bool(unit.gradient.found >> i & 1)) for i, leaf in enumerate(unit.gradient.route.leaves)]
