"""Residuals: encoding errors of gradients, which are added to the next gradients (error feedback).

In each step a rank has a gradient ``g`` and a residual ``e``. The rank sends ``q = encode(g + e)``, and keeps ``g + e -
decode(q)``. So the sum of all sent values and the last residual is the sum of all gradients. If all elements of ``g`` are zero,
as in a step that leaves out the unit, the rank sends zeros and keeps ``e``. If values are encoded along several axes, each of
these axes has residuals of its own.

Gradients and residuals are sums over a batch here; :func:`~fsharp.average` divides later. So a residual is divided by the
weight of the next batch, to whose sum it is added, and not by that of its own batch.

Sources: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., arXiv 1901.09847.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fsharp.errors import TreeError, problem
from fsharp.functional.formats.format import ResidualAndNoise, dtype_name
from fsharp.functional.formats.stochastic import make_noise_fn
from fsharp.functional.layout.stages import encoded_stages, has_stochastic_wire, residual_sizes
from fsharp.functional.layout.unit_layout import UnitLayout, leaf_spans_in_run


class PerRank(NamedTuple):
    """A wrapper of a tensor, or tree of tensors, whose values differ between ranks, such as the state of a random generator.

    Shapes are equal on all ranks. Checkpoints save the values of all ranks.
    """

    value: Any


ResidualsByAxis = Mapping[str, ResidualAndNoise]
"""For each axis, the inputs of the encoding of one group's gradient: a view of its residual, and random numbers."""
ResidualViews = Mapping[str, Mapping[int, ResidualsByAxis]]
"""A :data:`ResidualsByAxis` by name of the unit and index of the group."""


def zero_residuals(units: Iterable[UnitLayout], device: torch.device) -> PerRank | None:
    """Return residuals of zeros for units whose gradients are encoded with error feedback; None if there is no such unit."""
    found = {
        _residuals_key(unit): tuple([torch.zeros(n, dtype=dtype, device=device) for _, n, dtype in _tensor_specs(unit)])
        for unit in units
        if residual_sizes(unit)
    }
    return PerRank(found) if found else None


def prepare_residuals(
    where: str, residuals: Any, units: Iterable[UnitLayout], *, donate: bool, step: int | None, rank: int
) -> tuple[PerRank | None, ResidualViews]:
    """Return the residuals of ``units``, which encodings overwrite, and for each unit the arguments of its encodings.

    The residuals are copies of ``residuals``, or with ``donate`` the same tensors; None if ``residuals`` is None. The arguments
    are, for each axis, a view of the returned residuals, and random numbers for stochastic rounding.

    Raises TreeError for missing residuals, or residuals of other units. Also raises TreeError for a wrong or missing ``step``,
    on which random numbers depend.
    """
    units = [unit for unit in units if unit.has_any_format and (residual_sizes(unit) or has_stochastic_wire(unit))]
    if step is not None and (type(step) is not int or step < 0):
        raise TreeError(f"{where}: step is {step!r:.80}, expected an integer of at least 0, such as state.step.")
    stochastic = [unit for unit in units if has_stochastic_wire(unit)]
    if stochastic and step is None:
        raise TreeError(
            f"{where}: gradients of unit {stochastic[0].display_name} are rounded stochastically, and no step says with which "
            "random numbers. Pass step=state.step."
        )
    own = _donated_or_cloned_residuals(where, residuals, [unit for unit in units if residual_sizes(unit)], donate=donate)
    held = {} if own is None else own.value
    return own, {unit.name: _residual_views(unit, held.get(_residuals_key(unit), ()), step, rank) for unit in units}


def _donated_or_cloned_residuals(where: str, residuals: Any, units: Sequence[UnitLayout], *, donate: bool) -> PerRank | None:
    if residuals is None:
        if units:
            raise TreeError(
                f"{where}: gradients of unit {units[0].display_name} travel with feedback, Precision(feedback=True), and there "
                "are no residuals. Pass residuals=state.residuals, and keep those that are returned in the next state."
            )
        return None
    held = residuals.value if isinstance(residuals, PerRank) else None
    if not isinstance(held, Mapping):
        raise TreeError(f"{where}: residuals are {type(residuals).__name__}, expected those of a TrainState.")
    for unit in units:
        expected = [(dtype_name(dtype), (size,)) for _, size, dtype in _tensor_specs(unit)]
        mine = held.get(_residuals_key(unit), ())
        found = [(dtype_name(x.dtype), tuple(x.shape)) for x in mine]
        if found != expected:
            facts = [("unit", unit.display_name), ("got", found or "none"), ("expected", expected)]
            remedy = "Pass the residuals of a state of this layout; init_state() and reshard() make those to start from."
            raise TreeError(problem(where, "residuals of another layout.", facts, remedy))
    return PerRank(held if donate else {key: tuple(map(torch.clone, tensors)) for key, tensors in held.items()})


def _residual_views(
    unit: UnitLayout, tensors: Iterable[torch.Tensor], step: int | None, rank: int
) -> dict[int, ResidualsByAxis]:
    found: dict[int, dict[str, ResidualAndNoise]] = {}
    for (g, _, _), x in zip(_tensor_specs(unit), tensors, strict=True):
        sizes = residual_sizes(unit)[g]
        found[g] = {
            axis: ResidualAndNoise(part) for axis, part in zip(sizes, x.detach().split(list(sizes.values())), strict=True)
        }
    if step is None or not has_stochastic_wire(unit):
        return found  # type: ignore[return-value]
    for g in unit.trainable_groups:
        by_axis = found.setdefault(g, {})
        for number, stage in enumerate(encoded_stages(unit, g)):
            run = unit.local_start(g, stage.place, rank), stage.size
            noise_fn = make_noise_fn("gradient", step, number, leaf_spans_in_run(unit, g, *run, rank))
            by_axis[stage.axis] = by_axis.get(stage.axis, ResidualAndNoise())._replace(noise_fn=noise_fn)
    return found  # type: ignore[return-value]


def _tensor_specs(unit: UnitLayout) -> list[tuple[int, int, torch.dtype]]:
    """Return ``(group, number of elements, dtype)`` of each tensor of a unit's residuals (encoding errors of gradients)."""
    return [(g, sum(sizes.values()), unit.groups[g].dtypes.accumulate) for g, sizes in residual_sizes(unit).items()]


@lru_cache(maxsize=1 << 12)
def _residuals_key(unit: UnitLayout) -> str:
    """Return the key of a unit's residuals: the unit's name, and a digest of its leaves, sizes and mesh."""
    leaves = [(leaf.path, leaf.shape, leaf.group, leaf.offset) for leaf in unit.leaves]
    about = leaves, [residual_sizes(unit).get(g, {}) for g in unit.trainable_groups], unit.mesh.axes
    return f"{unit.name or '(root)'}@{hashlib.sha256(repr(about).encode()).hexdigest()[:8]}"
