"""checked_units_of: the units of a tree, checked before a function with a Comm uses them."""

from collections.abc import Iterable
from typing import Any

import optree

from fsharp.errors import MeshError, TreeError, problem
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.sharded import Sharded, check_not_donated, not_sharded_error, units_of


def checked_units_of(where: str, tree: Any, comm: Comm) -> list[Sharded]:
    """Return the :class:`Sharded` nodes in ``tree``, in tree order. Errors name ``where``, the calling function.

    Raises a TreeError if the tree has no node, or a node was donated; a MeshError if a node is on another mesh than ``comm``.
    """
    nodes = units_of(tree)
    if not nodes:
        if not optree.tree_leaves(tree):
            raise TreeError(f"{where}: the tree is empty, {tree!r:.80}: expected at least one Sharded, of a tree with tensors.")
        raise not_sharded_error(where, tree)
    check_not_donated(where, nodes)
    mesh = comm.mesh
    for node in nodes:
        if node.unit.mesh is not mesh and node.unit.mesh != mesh:
            facts = [("unit", f"{node.unit.display_name} on {node.unit.mesh}"), ("comm", mesh)]
            remedy = "Pass the Comm with which the tree was made, or reshard() the tree."
            raise MeshError(problem(where, "the Comm is on another mesh than the layout.", facts, remedy))
    return nodes


def check_not_main_copies(where: str, nodes: Iterable[Sharded]) -> None:
    """Raise a TreeError if a node holds main copies, as :func:`~fsharp.shard` makes them: functions compute with parameters."""
    for node in nodes:
        if node.is_main_copy:
            dtypes = next(d for g in node.groups if (d := node.unit.groups[g].dtypes).has_main_copy)
            what = f"unit {node.unit.display_name} has main copies, of which init_state() makes parameters."
            facts = [("main copies", dtype_name(dtypes.main)), ("parameters", dtypes.stored_format.name)]
            remedy = (
                "Pass `params` of the state that init_state(tx, sharded, comm=comm) returns. Without an optimizer, make the "
                "shards with dtype='compute'."
            )
            raise TreeError(problem(where, what, facts, remedy))
