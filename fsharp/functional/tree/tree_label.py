"""TreeLabel: the name of the tree to which a unit's values belong, for labels of collectives."""

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class TreeLabel:
    """The name of the tree to which a unit's values belong, for labels of collectives.

    Ranks compare labels, so an error says that ranks gather different trees, such as parameters before and after an update. A
    name says from which tree this tree was made, and how: ``tree 1 at update 3, replaced 1x, mapped 2x``.

    Attributes:
        tree: number of the first tree, as text; empty if not all ranks have made the first tree together. A second update of
            one tree ``"1"`` begins a branch with the number ``"1.2"``.
        num_updates, num_replaced, num_mapped: numbers of updates, of calls of :meth:`~fsharp.Sharded.replace`, and of pytree
            mappings between the first tree and this one.
        num_successors: number of updates that were made from this tree.
        number_by_axes: dict from the axes of a gather to a number. Of all trees with this text, the first that is gathered
            along these axes has the number 1, and the second has 2.
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
        """Return the name of the tree that an update of this tree makes, and count the update in ``num_successors``.

        A second update of this tree makes another name. For a tree without a name return :data:`UNLABELED_TREE`.
        """
        if not self.tree:
            return UNLABELED_TREE
        self.num_successors += 1
        tree = f"{self.tree}.{self.num_successors}" if self.num_successors > 1 else self.tree
        return TreeLabel(tree, self.num_updates + 1, self.num_replaced, self.num_mapped)


UNLABELED_TREE = TreeLabel()
"""The name of values from a tree that not all ranks have made together, before the values get a number."""
