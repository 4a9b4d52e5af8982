"""Space: the layouts of a model under each strategy, mesh, choice of units and format."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from fsharp.errors import LayoutError, ScheduleError, problem
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.placement import Strategy, ddp, hfsdp, hsdp, zero1, zero2, zero3
from fsharp.functional.layout.plan import plan
from fsharp.functional.layout.precision import Precision, Precisions
from fsharp.functional.make_functional import parameter_tree
from fsharp.functional.tree.paths import (
    Patterns,
    flatten_with_paths,
    innermost_prefix,
    literal_pattern,
    matches,
    named_leaves,
    parents_of_all_prefixes,
)
from fsharp.inspect.presets import RANKS_OF_A_HOST

Strategies = Mapping[str, Strategy | Callable[..., Strategy]]
"""Strategies by name; or functions that return the strategy for the axes of a mesh, such as :func:`~fsharp.zero3`."""
FLAT_STRATEGIES: Mapping[str, Callable[..., Strategy]] = {"ddp": ddp, "zero1": zero1, "zero2": zero2, "zero3": zero3}
"""Strategies that treat all axes of a mesh alike."""
HYBRID_STRATEGIES: Mapping[str, Callable[..., Strategy]] = {"hsdp": hsdp, "hfsdp": hfsdp}
"""Strategies of an outer and an inner axis."""
UnitPatterns = str | Sequence[str] | None
CostKey = tuple[str, str]
"""The name of a choice of units, and the name of a format: layouts with equal names have equal costs of units."""
MOST_UNITS = 200
"""Largest number of parts of repeated layers that are tried as units."""


@dataclass(frozen=True, eq=False)
class LayoutOption:
    """A layout, and the arguments that make it.

    Attributes:
        name: name in tables.
        layout: the layout.
        cost_key: key of the layout's costs: names of the choices of units and of precision.
        made_by: arguments of :func:`~fsharp.plan`, without the tree; empty for a layout that was passed.
    """

    name: str
    layout: Layout
    cost_key: CostKey
    made_by: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Model:
    """A model: a tree of shapes and the patterns of frozen leaves. ``module``: the module, if the model is one."""

    tree: Any
    frozen: Patterns = ()
    module: nn.Module | None = None


def model_of(model: Any, frozen: Patterns) -> Model:
    """Return the Model of a tree, with ``frozen`` leaves; or of a module: parameters without ``requires_grad`` are frozen."""
    if not isinstance(model, nn.Module):
        return Model(model, frozen)
    trained = {name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    return Model(parameter_tree("tune()", model), lambda path: path not in trained, model)


def meshes_to_try(mesh: int | Mesh | Sequence[Mesh]) -> tuple[Mesh, ...]:
    """Return the meshes to try. One mesh, or several meshes of one size, are returned as they are.

    A number of ranks gives a mesh of one axis ``dp``, and each mesh of axes ``outer`` and ``inner`` that fits hosts of 8 ranks.
    There the inner size divides 8, or is a multiple of 8. Raises a ScheduleError for meshes of different sizes.

    >>> [str(mesh) for mesh in meshes_to_try(16)]
    ['Mesh(dp=16)', 'Mesh(outer=8, inner=2)', 'Mesh(outer=4, inner=4)', 'Mesh(outer=2, inner=8)']
    """
    if isinstance(mesh, Mesh):
        return (mesh,)
    if not isinstance(mesh, int):
        meshes = tuple(mesh)
        if len({each.size for each in meshes}) != 1:
            found = ", ".join(map(str, meshes)) or "no mesh"
            raise ScheduleError(problem("tune()", f"expected meshes with one number of ranks, got {found}."))
        return meshes
    if mesh < 1:
        raise ScheduleError(f"tune(): mesh is {mesh!r}, expected a number of ranks of at least 1.")
    inner = [n for n in range(2, mesh) if mesh % n == 0 and (n % RANKS_OF_A_HOST == 0 or RANKS_OF_A_HOST % n == 0)]
    return (Mesh({"dp": mesh}), *(Mesh({"outer": mesh // n, "inner": n}) for n in inner))


def repeated_unit_patterns(paths: Sequence[str]) -> list[str]:
    """Return a pattern of units, such as ``layers.*``, for each outermost list with at least two subtrees."""
    found: dict[str, set[str]] = {}
    for path in paths:
        keys = path.split(".")
        number = next((i for i, key in enumerate(keys[:-1]) if key.isdigit()), None)
        if number is not None:
            found.setdefault(".".join([*map(literal_pattern, keys[:number]), "*"]), set()).add(keys[number])
    return [pattern for pattern, numbers in found.items() if len(numbers) > 1]


def unit_patterns_to_try(model: Model, *, has_loss_fn: bool) -> dict[str, UnitPatterns]:
    """Return ways to cut a model into units, by name: repeated layers; parts of these layers; the whole model as one unit.

    ``has_loss_fn``: whether the user's loss function decides which subtrees it gathers. Then the whole model as one unit is
    tried only if there are no repeated layers.
    """
    paths, _, _ = flatten_with_paths(model.tree)
    layers = repeated_unit_patterns(paths)
    found: dict[str, UnitPatterns] = {}
    if layers:
        around = [path for path in parents_of_all_prefixes(paths) if path]
        # Select modules by path, as a pattern may match modules without parameters, or one module twice.
        if model.module is not None:
            modules = {path for path, _ in model.module.named_modules()}
            around = [path for path in around if path in modules or path in paths]
        whole = [path for path in around if any(matches(pattern, path) for pattern in layers)]
        if model.module is None or set(whole).isdisjoint(paths):  # a parameter is not a module
            found[", ".join(layers)] = layers if model.module is None else whole
        parts = [path for path in around if any(matches(f"{pattern}.*", path) for pattern in layers)]
        if 0 < len(parts) <= MOST_UNITS and (model.module is None or set(parts).isdisjoint(paths)):
            found[", ".join(f"{pattern}.*" for pattern in layers)] = parts
    if not has_loss_fn or not found:
        found["one unit"] = None
    return found


def layout_options(
    model: Model,
    meshes: Sequence[Mesh],
    strategies: Strategies | None,
    units: Mapping[str, UnitPatterns],
    formats: Mapping[str, Precisions],
) -> tuple[list[LayoutOption], dict[str, str]]:
    """Return a layout of the model for each combination of mesh, strategy, units and format; and the combinations without one.

    The second result is a dict from the names of combinations without a layout to reasons: the strategy does not fit the
    format. Raises the LayoutError if a format fits no strategy.
    """
    several = len(meshes) > 1, len(units) > 1, len(formats) > 1
    result: list[LayoutOption] = []
    refused: dict[str, str] = {}
    errors: dict[CostKey, LayoutError] = {}
    for mesh in meshes:
        is_split = len(mesh.names) == 2 and any(len(each.names) == 1 for each in meshes)  # flat strategies use the other mesh
        default = {**({} if is_split else FLAT_STRATEGIES), **(HYBRID_STRATEGIES if len(mesh.names) == 2 else {})}
        for (strategy, make), (choice, patterns), (form, precision) in product(
            (default if strategies is None else strategies).items(), units.items(), formats.items()
        ):
            if callable(make) and not _takes_axes(make, mesh) and any(_takes_axes(make, each) for each in meshes):
                continue  # such as hsdp on a mesh of one axis, beside meshes of two
            chosen = make(*mesh.names) if callable(make) else make
            shape = ",".join(f"{axis}={size}" for axis, size in mesh.axes)
            name = ", ".join([strategy, *(text for text, shown in zip((shape, choice, form), several, strict=True) if shown)])
            made_by: dict[str, Any] = {"mesh": mesh, "strategy": chosen, "units": patterns, "precision": precision}
            made_by["frozen"] = model.frozen
            try:
                result.append(LayoutOption(name, plan(model.tree, **made_by), (choice, form), made_by))
            except LayoutError as error:
                refused[name] = refusal_text(str(error))
                errors.setdefault((choice, form), error)
    made = {option.cost_key for option in result}
    if missing := [each for cost_key, each in errors.items() if cost_key not in made]:
        raise missing[0]
    return result, refused


def refusal_text(error: str) -> str:
    """Return an error's message as a reason for a row of a table: its first line and its facts, without function and remedy.

    >>> refusal_text(problem("plan()", "it does not fit.", [("needed", 8), ("found", 4)], "Make it smaller."))
    'it does not fit, needed 8, found 4'
    """
    first, *others = error.splitlines()
    facts = [" ".join(line.split()) for line in others if line.startswith("  ")]
    return ", ".join([first.partition("(): ")[2].rstrip("."), *facts])


def _takes_axes(make: Callable[..., Strategy], mesh: Mesh) -> bool:
    """Return whether a function of axes can be called with as many axes as a mesh has."""
    try:
        inspect.signature(make).bind(*mesh.names)
    except TypeError:
        return False
    return True


def unsharded_trial_layout(model: Model, mesh: Mesh, units: UnitPatterns, precision: Precisions) -> Layout:
    """Return the layout of a trial: for one rank, with only the dtypes of compute."""
    alone = Mesh(dict.fromkeys(mesh.names, 1))
    rules = {"**": precision} if isinstance(precision, Precision) else precision
    computed = {pattern: Precision(compute=each.compute) for pattern, each in rules.items()}
    return plan(model.tree, alone, ddp(*mesh.names), units=units, precision=computed, frozen=model.frozen)


def updated_share(layout: Layout) -> float:
    """Return the fraction of all trained elements, from 0 to 1, that one rank updates."""
    everything = sum(group.used for unit in layout.units for group in unit.groups if group.trainable)
    return layout.nbytes("optim", torch.uint8) / everything if everything else 0.0


def units_in_dict_order(tree: Any, layout: Layout) -> list[str]:
    """Return the names of the units in the order of the tree's dicts, which is usually the order of use."""
    names = [unit.name for unit in layout.units if unit.groups or unit.tie_owner_unit_names]
    around = set(names)
    found = [innermost_prefix(path, around) for path, _ in named_leaves(tree)]
    return list(dict.fromkeys([*(name for name in found if name is not None), *names]))
