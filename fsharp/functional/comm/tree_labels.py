"""Names of trees in labels of collectives, so that ranks never mix values of two trees of equal shapes.

Ranks make trees in one order, so the numbers in names of trees are the same on all ranks. See
:mod:`~fsharp.functional.tree.tree_label`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fsharp.functional.comm.protocol import Comm, innermost_comm
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.sharded import Sharded, units_of
from fsharp.functional.tree.tree_label import TreeLabel

_MAX_COUNTED = 4096
"""Number of names, for each tuple of axes, that a TreeLabelCounters counts."""


@dataclass
class TreeLabelCounters:
    """Counters of trees, for the names of trees in labels of collectives. All ranks count the same trees.

    Attributes:
        num_trees: number of trees that all ranks have made together so far. The first tree gets the number 1.
        gathered: ``gathered[axes][tree, unit]`` is the number of trees named ``tree`` whose unit ``unit`` was gathered along
            ``axes``. Several trees can have one name. Each ``gathered[axes]`` keeps the newest 4096 pairs.
    """

    num_trees: int = 0
    gathered: dict[tuple[str, ...], Counter[tuple[str, str]]] = field(default_factory=dict)

    def next_tree_number(self) -> str:
        """Count a new tree, and return its number as text."""
        self.num_trees += 1
        return str(self.num_trees)

    def copy(self) -> "TreeLabelCounters":
        """Return a copy. Later counts of the copy do not change this object."""
        return TreeLabelCounters(self.num_trees, {axes: Counter(counts) for axes, counts in self.gathered.items()})

    def set_from(self, other: "TreeLabelCounters") -> None:
        """Set the counters to the counts of ``other``, such as an earlier copy after a failed step."""
        self.num_trees, self.gathered = other.num_trees, other.copy().gathered

    def count_gathered(self, text: str, axes: tuple[str, ...], unit: str) -> int:
        """Count a tree with the name ``text`` whose unit is gathered along ``axes``. Return the number of such trees so far."""
        counts = self.gathered.setdefault(axes, Counter())
        counts[text, unit] += 1
        if len(counts) > _MAX_COUNTED:
            del counts[next(iter(counts))]
        return counts[text, unit]


def tree_label_counters_of(comm: Comm) -> TreeLabelCounters | None:
    """Return the counters of a Comm; None if the Comm compares no labels (one rank, or a class of another library)."""
    return getattr(innermost_comm(comm), "tree_label_counters", None)


def label_new_tree(tree: Any, comm: Comm) -> Any:
    """Name the nodes of ``tree``, which all ranks have made together, as a new tree, and return ``tree``.

    In a state a unit may have several nodes, such as its parameters and its moments. Then each kind gets a name of its own: the
    first node of every unit belongs to one tree, the second node of every unit to another tree, and so on. Nothing is named if
    the Comm compares no labels.
    """
    counts = tree_label_counters_of(comm)
    if counts is not None:
        numbers = defaultdict[int, str](counts.next_tree_number)
        seen: Counter[str] = Counter()
        for node in units_of(tree):
            seen[node.name] += 1
            node.tree_label = TreeLabel(numbers[seen[node.name]])
    return tree


def copy_tree_labels(new: Iterable[Sharded], old: Iterable[Sharded], *, is_update: bool = False) -> None:
    """Give each node of ``new`` the tree name of the node of ``old`` at the same position.

    ``is_update``: an update has made ``new`` of ``old``, and the names say so.
    """
    for after, before in zip(new, old, strict=True):
        after.tree_label = before.tree_label.after_update() if is_update else before.tree_label


def new_tree_label_prefix(node: Sharded, comm: Comm, target: MeshPlacement | None = None) -> str:
    """Return the name of a node's tree as the beginning of a label; empty if the Comm compares no labels.

    ``target``: the place to which the node moves, by default the full one. If several trees can have the name, a number of the
    tree follows. For a move without a collective the result is empty: one rank alone may make such a move.
    """
    counts = tree_label_counters_of(comm)
    if counts is None:
        return ""
    name = node.tree_label
    if name.tree and not name.num_replaced and not name.num_mapped:  # the usual case: the text identifies the tree
        return f"tree {name.tree} at update {name.num_updates}, "
    axes = node.unit.gather_axes(node.place, target or node.unit.strategy.full)
    if not axes:
        return ""
    name = node.own_tree_label()
    if axes not in name.number_by_axes:
        name.number_by_axes[axes] = counts.count_gathered(name.text, axes, node.name)
    return f"{name.text or 'unnamed tree'} ({name.number_by_axes[axes]}), "
