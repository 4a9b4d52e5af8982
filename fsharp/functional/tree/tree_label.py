"""TreeLabel: the name of the tree to which a unit's values belong, for labels of collectives."""

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class TreeLabel:
    """The name of the tree to which a unit's values belong, for labels of collectives.

    Ranks compare labels, so an error says if ranks gather different trees, such as parameters before and after an update. The
    name ``tree 1 at update 3, replaced 1x, mapped 2x`` says which tree came first, and how this tree was made from it.

    Attributes:
        tree: number of the first tree, as text, such as ``"1"``; empty if one rank alone may have made it, as by ``shard_for``.
            If a tree is updated twice, the second result is on a branch, and has the number ``"1.2"``.
        num_updates, num_replaced, num_mapped: numbers of updates, of calls of :meth:`~fsharp.Sharded.replace`, and of pytree
            mappings between the first tree and this one.
        num_successors: number of updates of this very tree; a second one begins a branch.
        number_by_axes: for each tuple of axes along which this tree's unit was gathered, a number that the label gets too. This
            number tells trees with one name apart: the first one that is gathered along the axes has 1, the second one has 2.
    """

    tree: str = ""
    num_updates: int = 0
    num_replaced: int = 0
    num_mapped: int = 0
    num_successors: int = 0
    number_by_axes: dict[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The name as text, such as ``tree 1 at update 3, mapped 2x``; empty if ``tree`` is empty."""
        changes = f", replaced {self.num_replaced}x" * bool(self.num_replaced) + f", mapped {self.num_mapped}x" * bool(
            self.num_mapped
        )
        return f"tree {self.tree} at update {self.num_updates}{changes}" if self.tree else ""

    def after_update(self) -> "TreeLabel":
        """Return a name for the result of an update of this tree, and count the update in ``num_successors``.

        A second update of this tree gets a name on a branch, such as ``"1.2"``. If this name has no ``tree``, the result is
        :data:`UNLABELED_TREE`.
        """
        if not self.tree:
            return UNLABELED_TREE
        self.num_successors += 1
        tree = f"{self.tree}.{self.num_successors}" if self.num_successors > 1 else self.tree
        return TreeLabel(tree, self.num_updates + 1, self.num_replaced, self.num_mapped)


UNLABELED_TREE = TreeLabel()
"""The name of each tree that one rank alone may have made. At its first gather the tree gets a TreeLabel of its own."""
