"""Residuals: encoding errors of gradients, which are added to the next gradients (error feedback).

In each step a rank has a gradient ``g`` and a residual ``e``. It sends ``q = encode(g + e)``, and keeps ``g + e - decode(q)``.
So the sum of all sent values and the last residual is the sum of all gradients. Each axis whose wire is a format has residuals
of its own, for the values that a rank encodes along this axis.

Gradients and residuals are sums over a batch here; :func:`~fsharp.average` divides later. If the weight of batches differs from
step to step, a residual counts in the next step as part of the sum over that step's batch.

Sources: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., arXiv 1901.09847.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fsharp.errors import TreeError, problem
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.unit_layout import UnitLayout


class PerRank(NamedTuple):
    """A wrapper of a tensor, or a tree of tensors, with different values on each rank, such as the state of a random generator.

    Shapes are equal on all ranks. The values of all ranks are saved.
    """

    value: Any


ByAxis = Mapping[str, torch.Tensor]
"""Views of the residual of one group, by axis."""
Views = Mapping[str, Mapping[int, ByAxis]]
"""Residuals by name of the unit and index of the group."""


def zero_residuals(units: Iterable[UnitLayout], device: torch.device) -> PerRank | None:
    """Return residuals of zeros: for each unit a tensor for each group whose gradients are encoded with feedback.

    None if there are no such groups.
    """
    found = {}
    for unit in units:
        if unit.has_feedback:
            found[_key(unit)] = tuple([torch.zeros(n, dtype=dtype, device=device) for _, n, dtype in _expected(unit)])
    return PerRank(found) if found else None


def own_residuals(where: str, residuals: Any, units: Iterable[UnitLayout], *, donate: bool) -> tuple[PerRank | None, Views]:
    """Return residuals that may be overwritten, and views of them.

    Args:
        where: name of the calling function, for errors.
        residuals: the residuals of a state; None if the caller passes none.
        units: the units whose gradients are about to be reduced.
        donate: whether ``residuals`` may be overwritten; else they are copied.

    Raises:
        TreeError: residuals are missing, or belong to other units.
    """
    units = [unit for unit in units if unit.has_feedback]
    if residuals is None:
        if units:
            raise TreeError(
                f"{where}: gradients of unit {units[0].shown} travel with feedback, Precision(feedback=True), and there are "
                "no residuals. Pass residuals=state.residuals, and keep those that are returned in the next state."
            )
        return None, {}
    held = residuals.value if isinstance(residuals, PerRank) else None
    if not isinstance(held, Mapping):
        raise TreeError(f"{where}: residuals are {type(residuals).__name__}, expected those of a TrainState.")
    for unit in units:
        expected = [(dtype_name(dtype), (size,)) for _, size, dtype in _expected(unit)]
        mine = held.get(_key(unit), ())
        found = [(dtype_name(x.dtype), tuple(x.shape)) for x in mine]
        if found != expected:
            facts = [("unit", unit.shown), ("got", found or "none"), ("expected", expected)]
            remedy = "Pass the residuals of a state of this layout; init_state() and reshard() make those to start from."
            raise TreeError(problem(where, "residuals of another layout.", facts, remedy))
    own = held if donate else {key: tuple(map(torch.clone, tensors)) for key, tensors in held.items()}
    return PerRank(own), {unit.name: _views(unit, own[_key(unit)]) for unit in units}


def _views(unit: UnitLayout, tensors: Iterable[torch.Tensor]) -> dict[int, ByAxis]:
    found: dict[int, ByAxis] = {}
    for (g, _, _), x in zip(_expected(unit), tensors, strict=True):
        sizes = unit.residual_sizes(g)
        found[g] = dict(zip(sizes, x.detach().split(list(sizes.values())), strict=True))
    return found


def _expected(unit: UnitLayout) -> list[tuple[int, int, torch.dtype]]:
    """Return group, number of elements and dtype of each tensor of a unit's residuals."""
    groups = [g for g in unit.trainable if unit.residual_sizes(g)]
    return [(g, sum(unit.residual_sizes(g).values()), unit.groups[g].dtypes.accumulate) for g in groups]


@lru_cache(maxsize=1 << 12)
def _key(unit: UnitLayout) -> str:
    """Return the key of a unit's residuals: its name and a digest of leaves, sizes and mesh. Other leaves have another key."""
    leaves = [(leaf.path, leaf.shape, leaf.group, leaf.offset) for leaf in unit.leaves]
    about = leaves, [unit.residual_sizes(g) for g in unit.trainable], unit.mesh.axes
    return f"{unit.name or '(root)'}@{hashlib.sha256(repr(about).encode()).hexdigest()[:8]}"
