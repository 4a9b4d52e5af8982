"""Which tree a collective is for, as its label says, so that ranks never mix the values of two trees of equal shapes.

Ranks make trees in one order, so the numbers in names of trees are the same on all ranks. See
:mod:`~fsharp.functional.layout.tree_name`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fsharp.functional.comm.protocol import Comm, innermost
from fsharp.functional.layout.placement import Place, Replicate, Shard
from fsharp.functional.layout.sharded import Sharded, units_of
from fsharp.functional.layout.tree_name import UNNAMED, TreeName


@dataclass
class TreeCounts:
    """What a rank has counted of trees that ranks have made and gathered together, where labels are compared.

    Attributes:
        trees: number of trees that ranks have made together.
        gathered: number of trees whose text says not which they are and that were gathered, by text, axes and unit.
    """

    trees: int = 0
    gathered: Counter[tuple[str, tuple[str, ...], str]] = field(default_factory=Counter)

    def add_tree(self) -> int:
        """Count a tree that ranks have made together. Return its number, from 1."""
        self.trees += 1
        return self.trees


def counts_of(comm: Comm) -> TreeCounts | None:
    """Return the counts of this rank for a Comm; None where labels are not compared: one rank, or a foreign Comm."""
    return getattr(innermost(comm), "tree_counts", None)


def name_trees(tree: Any, comm: Comm) -> Any:
    """Name what was made by all ranks together, and return it. Of units with one path in a tree each is a tree of its own."""
    counts = counts_of(comm)
    if counts is not None:
        numbers: dict[int, str] = {}
        seen: Counter[str] = Counter()
        for node in units_of(tree):
            occurrence = seen[node.name]
            seen[node.name] += 1
            if occurrence not in numbers:
                numbers[occurrence] = str(counts.add_tree())
            node.tree_name = TreeName(numbers[occurrence])
    return tree


def name_updated(new: Iterable[Sharded], old: Iterable[Sharded]) -> None:
    """Name values that an update has made of those of the same units in ``old``."""
    for after, before in zip(new, old, strict=True):
        after.tree_name = before.tree_name.updated()


def name_as(new: Iterable[Sharded], old: Iterable[Sharded]) -> None:
    """Give units the names that those of another tree have."""
    for after, before in zip(new, old, strict=True):
        after.tree_name = before.tree_name


def label_of(node: Sharded, comm: Comm, target: Place | None = None) -> str:
    """Return the beginning of a label for a collective of a unit: which tree it is. Empty where nothing compares labels.

    If a name does not say which tree it is, values are numbered by what ranks do together: they are the k-th of this text of
    which this unit is gathered along these axes. Where nothing travels they are not counted, as one rank alone may do that.
    """
    counts = counts_of(comm)
    if counts is None:
        return ""
    name, place = node.tree_name, node.place
    if name.tree and not name.replaced and not name.mapped:  # as most have: no other values have the same text
        return f"tree {name.tree} at update {name.updates}, "
    axes = tuple(
        axis
        for axis in place.order
        if place[axis] is Shard and comm.mesh.axis_size(axis) > 1 and (target is None or target[axis] is Replicate)
    )
    if not axes:
        return ""
    if name is UNNAMED:
        node.tree_name = name = TreeName()
    if axes not in name.numbers:
        key = (name.text, axes, node.name)
        counts.gathered[key] += 1
        name.numbers[axes] = counts.gathered[key]
    return f"{name.text or 'unnamed tree'} ({name.numbers[axes]}), "
