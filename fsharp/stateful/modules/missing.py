"""Missing: parameters that no backward of a step has come to, on any rank. Optimizers of torch leave those alone."""

from collections.abc import Sequence

import torch

from fsharp.functional.comm.protocol import Comm
from fsharp.stateful.units.unit_state import UnitState


def missing_in(units: Sequence[UnitState], comm: Comm) -> set[str]:
    """Paths of the trained parameters of these units that have no gradient on any rank.

    Args:
        units: after the last backward of a step.
        comm: the ranks; they agree along the axes on which a unit does not vary.

    Cost: an ``all_reduce`` of one byte for each parameter and axis. The host waits for it, as it decides what an optimizer
    leaves alone.
    """
    missing: set[str] = set()
    for varying in dict.fromkeys(unit.layout.strategy.full.varying for unit in units):
        found = [
            (unit.layout.full_path(leaf), bool(unit.gradient.found >> i & 1))
            for unit in units
            if unit.gradient is not None and unit.layout.strategy.full.varying == varying
            for i, leaf in enumerate(unit.gradient.route.leaves)
        ]
        flags = torch.tensor([has for _, has in found], dtype=torch.uint8, device=comm.device)
        for axis, size in comm.mesh.axes:
            if found and size > 1 and axis not in varying:
                flags = comm.all_reduce(flags, axis, op="max")
        missing |= {path for (path, _), has in zip(found, flags.tolist(), strict=True) if not has}
    return missing
