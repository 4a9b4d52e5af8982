"""TreeName: a name that says to which tree a unit's values belong. A tree made from another has a name made from its name."""

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class TreeName:
    """The name of the tree to which a unit's values belong, for labels of collectives.

    All names are equal and have one hash: a name is no part of a tree's structure, so that trees of different names can be
    mapped together.

    Attributes:
        tree: number of a tree that all ranks have made together; ``"1.2"`` is the second tree that updates have made of one
            state of tree 1. Empty if the values come from no such tree.
        updates: number of updates between that tree and these values.
        replaced: number of calls of :meth:`~fsharp.Sharded.replace` between that tree and these values.
        mapped: number of pytree mappings between that tree and these values.
        successors: number of trees that updates have made of these values.
        numbers: for each set of axes, the number of earlier values with the same text that were gathered along these axes.
    """

    tree: str = ""
    updates: int = 0
    replaced: int = 0
    mapped: int = 0
    successors: int = 0
    numbers: dict[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The name as text; empty if the values come from a tree without a name, which ranks may have made alone."""
        changes = [f", {what} {times}x" for what, times in (("replaced", self.replaced), ("mapped", self.mapped)) if times]
        return f"tree {self.tree} at update {self.updates}{''.join(changes)}" if self.tree else ""

    def after_update(self) -> "TreeName":
        """Return the name of the values that the next update makes from these values."""
        if not self.tree:
            return UNNAMED
        self.successors += 1
        tree = f"{self.tree}.{self.successors}" if self.successors > 1 else self.tree
        return TreeName(tree, self.updates + 1, self.replaced, self.mapped)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeName)

    def __hash__(self) -> int:
        return 0


UNNAMED = TreeName()
"""The name of values from no tree that ranks have made together, before they are numbered."""
