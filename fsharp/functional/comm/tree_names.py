"""Names of trees: what a collective's label says about whose values travel, so that ranks never mix two trees of equal shapes.

A name belongs to the memory of a tree's buffers. It stays with views of them, and a copy has none. Ranks make trees in the
same order, so the numbers in names are the same on all of them.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _functorch

from fsharp.functional.comm.protocol import Comm, innermost
from fsharp.functional.layout.placement import Place, Replicate, Shard
from fsharp.functional.layout.sharded import Sharded, units_of


@dataclass
class TreeName:
    """Which tree a unit's buffers are of.

    Attributes:
        tree: a number for the tree; ``"1.2"`` is the second state that updates have made of one state of tree 1.
        updates: that have led to these values.
        successors: states that updates have made of this one.
    """

    tree: str
    updates: int = 0
    successors: int = 0

    def __str__(self) -> str:
        return f"tree {self.tree} at update {self.updates}, "

    def updated(self) -> "TreeName":
        """The name of what the next update makes of these values."""
        self.successors += 1
        return TreeName(self.tree if self.successors == 1 else f"{self.tree}.{self.successors}", self.updates + 1)


@dataclass
class TreeCounts:
    """What a rank has counted of trees that ranks have made and gathered together, where labels are compared.

    Attributes:
        trees: that have a number.
        unnamed: trees without one that were gathered, by axes and unit.
    """

    trees: int = 0
    unnamed: Counter[tuple[tuple[str, ...], str]] = field(default_factory=Counter)


def counts_of(comm: Comm) -> TreeCounts | None:
    """The counts of this rank among the ranks of a Comm. None where nothing compares labels: one rank, or a foreign Comm."""
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
                counts.trees += 1
                numbers[occurrence] = str(counts.trees)
            _give(node, TreeName(numbers[occurrence]))
    return tree


def name_updated(new: Any, old: Any) -> None:
    """Name values that an update has made of a tree ``old`` of the same units."""
    for after, before in zip(units_of(new), units_of(old), strict=True):
        if (name := _name(before)) is not None:
            _give(after, name.updated())


def name_as(new: Any, old: Any) -> None:
    """Give the units of a tree the names that those of another have."""
    for after, before in zip(units_of(new), units_of(old), strict=True):
        if (name := _name(before)) is not None:
            _give(after, name)


def label_of(node: Sharded, comm: Comm, target: Place | None = None) -> str:
    """What the label of a collective for a unit begins with; empty where nothing compares labels.

    A tree without a name is numbered by what ranks do together: it is the k-th of which this unit is gathered along these
    axes. Where nothing travels it is not counted, as one rank alone may do that.

    Args:
        node: the unit.
        comm: the ranks.
        target: where its values are brought; None means to every rank.
    """
    counts = counts_of(comm)
    if counts is None:
        return ""
    if (name := _name(node)) is not None:
        return str(name)
    storage, place = _storage(node), node.place
    axes = tuple(
        axis
        for axis in place.order
        if place[axis] is Shard and comm.mesh.axis_size(axis) > 1 and (target is None or target[axis] is Replicate)
    )
    if storage is None or not axes:
        return ""
    numbers, key = vars(storage).setdefault(_NUMBERS, {}), (axes, node.name)
    if key not in numbers:
        counts.unnamed[key] += 1
        numbers[key] = counts.unnamed[key]
    return f"unnamed tree {numbers[key]}, "


_NAME, _NUMBERS = "_fsharp_name", "_fsharp_numbers"
"""Attributes of a storage, which torch keeps as long as the memory: of a named tree, and of one without a name."""


def _storage(node: Sharded) -> torch.UntypedStorage | None:
    """The memory of a trained group, which an update makes anew, else that of any."""
    chosen: torch.Tensor | None = None
    for group, x in zip(node.groups, node.raw_buffers, strict=True):
        is_trained = node.unit.groups[group].trainable
        if isinstance(x, torch.Tensor) and (is_trained or chosen is None):
            chosen = x
            if is_trained:
                break
    if chosen is None:
        return None
    while _functorch.is_functorch_wrapped_tensor(chosen):  # only the innermost tensor has memory
        chosen = _functorch.get_unwrapped(chosen)
    return chosen.untyped_storage()


def _name(node: Sharded) -> TreeName | None:
    storage = _storage(node)
    return None if storage is None else vars(storage).get(_NAME)


def _give(node: Sharded, name: TreeName) -> None:
    storage = _storage(node)
    if storage is not None:
        setattr(storage, _NAME, name)
