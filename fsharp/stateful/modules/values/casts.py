"""Casts of a module's inputs and outputs."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch

from fsharp.errors import LayoutError, problem
from fsharp.functional.layout.precision import Precision
from fsharp.functional.tree.paths import matches_self_or_ancestor, value_by_path
from fsharp.stateful.modules.values.outputs import map_tensors

T = TypeVar("T")


class CastDtypes(NamedTuple):
    """The dtypes to which a module casts its floating-point inputs and outputs; None means no cast."""

    inputs: torch.dtype | None
    outputs: torch.dtype | None


def casts_by_module(rules: Mapping[str, Precision], chosen: Iterable[str], leaves: Collection[str]) -> dict[str, CastDtypes]:
    """Return, by path, the casts of the root and of each module in ``chosen`` whose precision asks for casts.

    The precision of a module is the last rule whose pattern selects its path, else ``Precision()``. Raises LayoutError if no
    parameter inside of a module in ``chosen`` has this precision. ``leaves``: paths of all parameters.
    """
    of_leaf = value_by_path("shard_module(precision=...)", rules, leaves := list(leaves), default=Precision())
    casts = {}
    for path in ["", *chosen]:
        inside = [leaf for leaf in leaves if leaf.startswith(f"{path}.")]
        mine = [Precision(), *(rule for pattern, rule in rules.items() if matches_self_or_ancestor(pattern, path))][-1]
        if path and all(of_leaf[leaf] != mine for leaf in inside):
            what = f"the module {path!r} has a precision for its inputs, and none of its parameters has the same precision."
            facts = [(repr(path), mine), (repr(inside[0]), of_leaf[inside[0]])]
            remedy = f"Name the module: a pattern {path!r} selects it and all of its parameters."
            raise LayoutError(problem("shard_module(precision=...)", what, facts, remedy))
        found = CastDtypes(mine.compute if mine.cast_inputs else None, mine.output)
        if found != (None, None):
            casts[path] = found
    return casts


def cast_tensors(value: T, dtype: torch.dtype | None) -> T:
    """Return ``value`` with its floating-point tensors cast to ``dtype``. If ``dtype`` is None, return ``value`` itself.

    Tensors are found in torch's pytrees and in dataclasses, which are copied if a tensor in them is cast. Objects of other
    classes are returned as they are, not copied. But a set or another collection with a tensor to cast raises a TreeError.
    """
    if dtype is None:
        return value
    what = f"a module with precision= has to cast tensors to {dtype}"
    found: T = map_tensors(value, lambda x: x.to(dtype) if x.is_floating_point() else x, what, refused_class=Collection)
    return found
