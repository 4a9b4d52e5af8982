"""The JSON of a choice's parts: arguments of plan() and uses of units."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import optree
import torch

from fsharp.functional.formats.format import Format, dtype_name
from fsharp.functional.formats.registry import format_named
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.placement import AxisRule, P, Placement, Strategy
from fsharp.functional.layout.plan import flatten_rule_tree
from fsharp.functional.layout.precision import Precision
from fsharp.functional.tree.paths import literal_pattern
from fsharp.planning.plan_step import Use


def plan_arguments_to_json(made_by: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return ``made_by``, arguments of :func:`~fsharp.plan` that make ``layout``, as JSON can hold them.

    A strategy has the placements of each axis, a precision the names of dtypes and formats. A list of pairs is a mapping by
    pattern. A predicate of frozen leaves becomes the paths of these leaves.
    """
    if not made_by:
        return {}
    frozen = made_by["frozen"]
    return {
        "mesh": dict(made_by["mesh"].axes),
        "strategy": _by_pattern(flatten_rule_tree(made_by["strategy"]), _rule_to_json),
        "units": made_by["units"],
        "precision": _by_pattern(made_by["precision"], _precision_to_json),
        "frozen": frozen_paths(layout) if callable(frozen) else frozen,
    }


def plan_arguments_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of :func:`~fsharp.plan` in a result of :func:`plan_arguments_to_json`."""
    if not data:
        return {}
    strategy, precision = _of_pairs(data["strategy"], _rule_from_json), _of_pairs(data["precision"], _precision_from_json)
    return {**data, "mesh": Mesh(data["mesh"]), "strategy": strategy, "precision": precision}


def frozen_paths(layout: Layout) -> list[str]:
    """Return a pattern for each leaf of a layout that is not trained."""
    owners = {
        (unit.name, leaf.path): unit.groups[leaf.group] for unit in layout.units for leaf in unit.leaves if not leaf.tied_to
    }
    return [
        literal_pattern(unit.path_in_tree(leaf))
        for unit in layout.units
        for leaf in unit.leaves
        if not owners[leaf.tied_to or (unit.name, leaf.path)].trainable
    ]


def meta_tree(layout: Layout) -> Any:
    """Return the tree of a layout, in which each leaf is a tensor on the meta device. Tied leaves are one tensor."""
    stored = {
        (unit.name, leaf.path): torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        for unit in layout.units
        for leaf in unit.leaves
        if leaf.tied_to is None
    }
    nodes = [
        optree.tree_unflatten(unit.structure, [stored[leaf.tied_to or (unit.name, leaf.path)] for leaf in unit.leaves])
        for unit in layout.units
    ]
    return optree.tree_unflatten(layout.structure, nodes)


def use_from_json(row: Mapping[str, Any]) -> Use:
    """Return the :class:`Use` with the fields in ``row``, the JSON of ``dataclasses.asdict(use)``."""
    inner = tuple(map(use_from_json, row["inner"]))
    return Use(tuple(row["units"]), inner, row.get("has_backward", True), tuple(row.get("ties", ())))


def _by_pattern(value: Any, to_json: Callable[[Any], Any]) -> Any:
    return [[pattern, to_json(each)] for pattern, each in value.items()] if isinstance(value, Mapping) else to_json(value)


def _of_pairs(data: Any, from_json: Callable[[Any], Any]) -> Any:
    return {pattern: from_json(each) for pattern, each in data} if isinstance(data, list) else from_json(data)


def _rule_to_json(rule: Any) -> dict[str, Any]:
    if not isinstance(rule, Strategy):
        return {"partitions": list(rule)}
    return {
        axis: {each.name: getattr(axis_rule, each.name).value for each in fields(axis_rule)} for axis, axis_rule in rule.rules
    }


def _rule_from_json(data: Mapping[str, Any]) -> Strategy | P:
    if isinstance(entries := data.get("partitions"), list):
        return P(*(tuple(each) if isinstance(each, list) else each for each in entries))
    return Strategy(
        {axis: AxisRule(**{kind: Placement(value) for kind, value in kinds.items()}) for axis, kinds in data.items()}
    )


def _precision_to_json(precision: Precision) -> dict[str, Any]:
    def text(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {axis: text(each) for axis, each in value.items()}
        return dtype_name(value) if isinstance(value, torch.dtype) else value.name if isinstance(value, Format) else value

    return {each.name: text(getattr(precision, each.name)) for each in fields(precision)}


def _precision_from_json(data: Mapping[str, Any]) -> Precision:
    def named(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {axis: named(each) for axis, each in value.items()}
        if not isinstance(value, str):
            return value
        dtype = getattr(torch, value, None)
        return dtype if isinstance(dtype, torch.dtype) else format_named(value)

    return Precision(**{name: named(value) for name, value in data.items()})
