"""A layout as JSON and back. Nothing is pickled: containers are named, and only known kinds are made."""

import collections
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from fsharp.errors import LayoutError
from fsharp.functional.formats.format import Format, dtype_name
from fsharp.functional.formats.registry import format_named
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.packing import Atom, ElementAtom, LeafAtom, RowsAtom
from fsharp.functional.layout.placement import AxisRule, Placement, Strategy
from fsharp.functional.layout.precision import FEEDBACK_NAME, Dtypes
from fsharp.functional.layout.unit_layout import Group, Leaf, UnitLayout

VERSION = 1


def layout_to_json(mesh: Mesh, units: Sequence[UnitLayout], spec: optree.PyTreeSpec) -> str:
    """Return a layout as JSON. LayoutError if the tree has containers of a class that JSON cannot name, or nests too deeply."""
    try:
        data = {"fsharp_layout": VERSION, "mesh": mesh.axes, "spec": _treespec_to_json(spec)}
        return json.dumps({**data, "units": list(map(unit_to_json, units))})
    except RecursionError as error:
        raise LayoutError(
            "Layout.to_json(): the tree nests too deeply for JSON, which needs some three calls a level. Raise "
            f"sys.setrecursionlimit(), which is {sys.getrecursionlimit()}, or make the tree flatter."
        ) from error


def layout_from_json(text: str) -> tuple[Mesh, tuple[UnitLayout, ...], optree.PyTreeSpec]:
    """Return the mesh, the units, and the structure above the units, of a layout in JSON; LayoutError for any other text."""
    try:
        data = json.loads(text)
        if data["fsharp_layout"] != VERSION:
            raise LayoutError(f"version {data['fsharp_layout']!r}, expected {VERSION}.")
        mesh = Mesh([(name, size) for name, size in data["mesh"]])
        units = tuple(unit_from_json(unit, mesh) for unit in data["units"])
        return mesh, units, optree.tree_structure(_example_tree(data["spec"]))
    except LayoutError as error:
        raise LayoutError(f"Layout.from_json(): {error}") from error
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ImportError, RecursionError) as error:
        raise LayoutError(f"Layout.from_json(): not a layout: {type(error).__name__} {error}.") from error


def unit_to_json(unit: UnitLayout) -> dict[str, Any]:
    """Return a unit as a dict that JSON can hold."""
    return {
        "name": unit.name,
        "strategy": {axis: [r.params.value, r.grads.value, r.optim.value] for axis, r in unit.strategy.rules},
        "spec": _treespec_to_json(unit.structure),
        "leaves": [
            [leaf.path, leaf.shape, dtype_name(leaf.dtype), _atom_to_json(leaf.atom), leaf.group, leaf.offset, leaf.tied_to]
            for leaf in unit.leaves
        ],
        "groups": [[g.dtypes.names, g.trainable, g.label, g.num_parts, g.capacity, g.used] for g in unit.groups],
    }


def unit_from_json(data: dict[str, Any], mesh: Mesh) -> UnitLayout:
    """Return the unit in a dict of :func:`unit_to_json`, on ``mesh``.

    Raises LayoutError if the number of parts contradicts the strategy, a leaf lies outside its buffer, or a dtype, format or
    class is unknown. Raises StrategyError if ``mesh`` has other axes than the strategy. For a dict of another form raises
    KeyError, TypeError, ValueError or another built-in error.
    """
    rules = {axis: AxisRule(*map(Placement, kinds)) for axis, kinds in data["strategy"].items()}
    leaves = tuple(
        Leaf(path, tuple(shape), dtype_named(dtype), _atom_from_json(atom), group, offset, tuple(tied) if tied else None)
        for path, shape, dtype, atom, group, offset, tied in data["leaves"]
    )
    groups = tuple(
        Group(_dtypes_from_json(dtypes), trainable, label, parts, capacity, used)
        for dtypes, trainable, label, parts, capacity, used in data["groups"]
    )
    spec = optree.tree_structure(_example_tree(data["spec"]))
    unit = UnitLayout(data["name"], mesh, Strategy(rules), leaves, groups, spec)
    _check_unit(unit)
    return unit


def _check_unit(unit: UnitLayout) -> None:
    unit.strategy.check_mesh(unit.mesh)
    parts = math.prod(unit.mesh.axis_size(axis) for axis in unit.strategy.optim.sharded_axes)
    if any(group.num_parts != parts or group.capacity < 0 for group in unit.groups):
        raise LayoutError(f"unit {unit.display_name} is not divided into {parts} parts, as its strategy says.")
    for leaf in unit.leaves:
        if leaf.tied_to is None and not 0 <= leaf.offset <= unit.groups[leaf.group].size - leaf.numel:
            raise LayoutError(f"{unit.path_in_tree(leaf)!r} lies outside its buffer.")


def _dtypes_from_json(names: list[str]) -> Dtypes:
    compute, main, accumulate = map(dtype_named, [*names[:2], names[3]])
    stored = format_named(names[4]) if any(names[4:5]) else None
    by_axis, update = list[tuple[str, Format]](), None
    for each in names[5:]:
        axis, is_wire, name = each.rpartition("=")  # no name of a format has "="
        if is_wire:
            by_axis.append((axis, format_named(name)))
        elif each != FEEDBACK_NAME:
            update = format_named(name.removeprefix("update:"))
    wire, feedback = format_named(names[2]), names[-1] == FEEDBACK_NAME
    return Dtypes(compute, main, wire, accumulate, stored, tuple(by_axis), update, feedback)


def dtype_named(name: str) -> torch.dtype:
    """Return a dtype by its name; LayoutError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"{name!r} is not a dtype.")
    return dtype


def name_of_class(kind: type) -> str:
    """Return the name under which :func:`class_in_loaded_module` finds a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def class_in_loaded_module(name: str, is_kind: Callable[[Any], bool] = lambda found: isinstance(found, type)) -> Any:
    """Return a class by its name; LayoutError if its module is not imported, or ``is_kind`` is False for the object.

    Raises AttributeError if the module has no object of this name.
    """
    module, _, path = name.partition(":")
    if module not in sys.modules:  # an import would run the module's code
        raise LayoutError(f"{name!r}: import the module {module!r} first.")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part)
    if not is_kind(found):
        raise LayoutError(f"{name!r} is not a class of the expected kind.")
    return found


def _atom_to_json(atom: Atom) -> Any:
    return atom.n if isinstance(atom, RowsAtom) else "element" if isinstance(atom, ElementAtom) else "whole"


def _atom_from_json(data: Any) -> Atom:
    named: dict[str, Atom] = {"element": ElementAtom(), "whole": LeafAtom()}
    return RowsAtom(data) if isinstance(data, int) else named[data]


def _treespec_to_json(spec: optree.PyTreeSpec) -> Any:
    if spec.is_leaf():
        return "*"
    kind: Any = spec.type
    children = [_treespec_to_json(child) for child in spec.children()]
    if kind is type(None):
        return None
    if kind in (dict, collections.OrderedDict):
        keys = [[type(key).__name__, key] for key in spec.entries()]
        if any(name not in ("str", "int") for name, _ in keys):
            raise LayoutError(f"Layout.to_json(): dict keys have to be strings or integers, got {spec.entries()}.")
        return {"kind": kind.__name__, "keys": [key for _, key in keys], "children": children}
    if kind in (list, tuple):
        return {"kind": kind.__name__, "children": children}
    if optree.is_namedtuple_class(kind):
        return {"kind": "namedtuple", "type": name_of_class(kind), "children": children}
    raise LayoutError(
        f"Layout.to_json(): {kind.__module__}.{kind.__qualname__} has no JSON form: use dict, list, tuple or namedtuple."
    )


def _example_tree(data: Any) -> Any:
    """Return a tree with the structure that :func:`_treespec_to_json` has written as ``data``. Its leaves are 0."""
    if data is None or data == "*":
        return None if data is None else 0
    children = [_example_tree(child) for child in data["children"]]
    kind = data["kind"]
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](children)
    if kind in ("dict", "OrderedDict"):
        pairs = zip(data["keys"], children, strict=True)
        return dict(pairs) if kind == "dict" else collections.OrderedDict(pairs)
    if kind != "namedtuple":
        raise LayoutError(f"{kind!r} is not a kind of container.")
    return class_in_loaded_module(data["type"], optree.is_namedtuple_class)(*children)
