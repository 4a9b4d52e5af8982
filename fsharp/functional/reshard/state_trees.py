"""State trees: the subtrees of a state that hold parameters, or one value for each parameter, such as a moment."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import optree
import torch

from fsharp.errors import LayoutError, TreeError, problem
from fsharp.functional.formats.format import dtype_name, tensor_text
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.sharded import Sharded, is_sharded, not_sharded_error
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.functional.state import TrainState

StatePlace = Literal["params", "optim"]
Path = tuple[str, ...]


class LeafPosition(NamedTuple):
    """The position of a leaf in a state tree: index of the node, index of the buffer in the node, and the leaf's old layout."""

    node: int
    buffer: int
    leaf: Leaf


@dataclass(frozen=True)
class StateTree:
    """A subtree of a state: the parameters, or one value for each element of some parameters, such as a moment.

    Attributes:
        path: path of the state tree in the state.
        name: the path with names of fields, for messages.
        kind: where the state tree rests in the new layout: ``"params"`` or ``"optim"``.
        nodes: the :class:`~fsharp.Sharded` nodes in the old layout, in tree order.
        is_cast: whether buffers are cast to the dtypes of the new layout: see :meth:`sent_dtype`.
    """

    path: Path
    name: str
    kind: StatePlace
    nodes: tuple[Sharded, ...]
    is_cast: bool

    @cached_property
    def position_by_path(self) -> dict[str, LeafPosition]:
        """The :class:`LeafPosition` of each leaf, by path of the leaf; tied leaves are left out."""
        return {
            node.unit.path_in_tree(leaf): LeafPosition(n, i, leaf)
            for n, node in enumerate(self.nodes)
            for i, group in enumerate(node.groups)
            for leaf in node.unit.leaves_of_group(group)
        }

    def groups_in(self, unit: UnitLayout) -> tuple[int, ...]:
        """Return the indices of the groups of ``unit`` that this state tree has. ``unit``: a unit of the new layout."""
        return tuple(g for g in unit.all_groups if unit.path_in_tree(unit.leaves_of_group(g)[0]) in self.position_by_path)

    def place_in(self, unit: UnitLayout) -> MeshPlacement:
        """Return the place in which buffers of this state tree will rest in the new layout. ``unit``: a unit of that layout."""
        return unit.strategy.params if self.kind == "params" else unit.strategy.optim

    def sent_dtype(self, unit: UnitLayout, group: int) -> torch.dtype:
        """Return the dtype in which elements travel to the buffer of group number ``group`` of ``unit``, in the new layout.

        This is the old buffer's dtype. If ``is_cast``, it is the new dtype ``compute``, or ``main`` for a group with a format.
        """
        if self.is_cast:
            dtypes = unit.groups[group].dtypes
            return dtypes.compute if dtypes.format is None else dtypes.main  # to encode from
        return self.source_dtype(unit.path_in_tree(unit.leaves_of_group(group)[0]))

    def source_dtype(self, path: str) -> torch.dtype:
        """Return the dtype of the old buffer that holds the leaf at ``path``."""
        position = self.position_by_path[path]
        return self.nodes[position.node].raw_buffers[position.buffer].dtype  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return self.name


def checked_state_trees(tree: Any, layout: Layout, default_kind: StatePlace, *, default_cast: bool) -> list[StateTree]:
    """Return the state trees in a user's tree, in tree order, after a check that they can move to ``layout``.

    In a TrainState, :attr:`StateTree.kind` is ``"params"`` for ``params`` and ``"optim"`` for all other fields, and
    :attr:`StateTree.is_cast` is False. Outside of a TrainState these are ``default_kind`` and ``default_cast``.

    The path of a node is the path of its state tree, followed by the path of its unit. Raises a TreeError if there is no node,
    a node is not at this path, or a state tree contains another leaf than its nodes. Raises the errors of
    :func:`_check_state_tree` as well.
    """
    found: dict[Path, tuple[str, StatePlace, list[Sharded], bool]] = {}
    roots: dict[Path, Path | None] = {}
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_sharded)
    for accessor, node in zip(accessors, leaves, strict=True):
        path = tuple(str(key.entry) for key in accessor)
        roots[path] = None
        if is_sharded(node):
            unit = tuple(node.name.split(".")) if node.name else ()
            root = roots[path] = path[: len(path) - len(unit)]
            if root + unit != path:
                raise _misplaced_error("a unit is not at its path in a tree of parameters.", path, node)
            above: list[Any] = [*accessor][: len(root)]
            name = ".".join(str(getattr(key, "field", None) or key.entry) for key in above) or "tree"
            rests, is_cast = default_kind, default_cast
            for key in above:
                if key.type is TrainState:
                    rests, is_cast = ("params" if key.field == "params" else "optim"), False
            found.setdefault(root, (name, rests, [], is_cast))[2].append(node)
    for path, own in roots.items():
        if any(path[:n] in found and path[:n] != own for n in range(len(path) + 1)):
            raise _misplaced_error("a tree of parameters has another leaf in it.", path)
    if not found:
        raise not_sharded_error("reshard()", tree)
    state_trees = [StateTree(root, name, kind, tuple(nodes), cast) for root, (name, kind, nodes, cast) in found.items()]
    for state_tree in state_trees:
        _check_state_tree(state_tree, layout)
    return state_trees


def _misplaced_error(what: str, path: Path, node: Sharded | None = None) -> TreeError:
    facts = [("found at", repr(".".join(path)))] + ([] if node is None else [("unit", node.unit.display_name)])
    return TreeError(problem("reshard()", what, facts, "Pass the whole tree that was planned, or a state of such trees."))


def replace_state_trees(tree: Any, new: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return ``tree`` with ``new[p]`` in place of the state tree at each path ``p``, and with copies of all other tensors.

    ``path``: path of ``tree`` itself.
    """
    if path in new:
        return new[path]
    if optree.tree_is_leaf(tree):
        is_tensor = isinstance(tree, torch.Tensor)
        return tree.detach().clone().requires_grad_(tree.requires_grad) if is_tensor else tree
    children, metadata, entries, unflatten = optree.tree_flatten_one_level(tree)
    return unflatten(
        metadata, [replace_state_trees(child, new, (*path, str(entry))) for child, entry in zip(children, entries, strict=True)]
    )


def _check_state_tree(state_tree: StateTree, layout: Layout) -> None:
    """Raise an error if a state tree cannot move to ``layout``.

    Raises a TreeError if a unit is donated, partial or gathered, or a buffer has not one number for each element. Raises a
    LayoutError if ``layout`` has other leaves, or other facts of a leaf (see :func:`_leaf_facts_to_compare`). The same
    error is raised if leaves of one new group have several dtypes in the state tree, or only some of them are in it.
    """
    for node in state_tree.nodes:
        _check_at_rest(state_tree, node)
    old = {path: facts for node in state_tree.nodes for path, facts in _leaf_facts_to_compare(state_tree, node.unit)}
    new = {path: facts for unit in layout.units for path, facts in _leaf_facts_to_compare(state_tree, unit)}
    rows = [(repr(path), "not in the new layout") for path in old.keys() - new.keys()]
    rows += [(repr(path), "not in the tree") for path in new.keys() - old.keys()]
    for path in old.keys() & new.keys():
        rows += [
            (repr(path), f"{name} {before}, in the new layout {new[path][name]}")
            for name, before in old[path].items()
            if name in new[path] and before != new[path][name]
        ]
    for unit in layout.units if not rows else ():
        for group in unit.all_groups:
            paths = [unit.path_in_tree(leaf) for leaf in unit.leaves_of_group(group)]
            kinds = {state_tree.source_dtype(path) if path in state_tree.position_by_path else None: path for path in paths}
            if len(kinds) > 1:
                rows += [(repr(path), f"has {'no buffer' if d is None else dtype_name(d)}") for d, path in kinds.items()]
    if rows:
        more = f"and {len(rows) - 8} more. " if len(rows) > 8 else ""
        remedy = f"{more}Plan the new layout with the same tree, ties, frozen leaves, labels and dtypes"
        if state_tree.kind == "params":
            remedy += "; parameters by themselves take another compute dtype or format with cast=True"
        raise LayoutError(problem("reshard()", f"{state_tree} does not fit the new layout.", sorted(rows)[:8], f"{remedy}."))


def _check_at_rest(state_tree: StateTree, node: Sharded) -> None:
    facts = [("in", state_tree), ("unit", node.unit.display_name), ("place", node.place)]
    if node.is_donated:
        raise TreeError(problem("reshard()", "a unit was donated (donate=True).", facts, "Use the returned state."))
    if node.place.partial_axes or node.is_gathered or node.grad_sinks is not None:
        what = "a unit does not rest: each rank has values of its own."
        remedy = "Call reshard() between two steps; reduce_scatter() partial sums of gradients first."
        raise TreeError(problem("reshard()", what, facts, remedy))
    for group, buffer in zip(node.groups, node.raw_buffers, strict=True):
        size = node.unit.local_size(group, node.place)
        if not isinstance(buffer, torch.Tensor) or buffer.shape != (size,):
            got = tensor_text(buffer) if isinstance(buffer, torch.Tensor) else repr(buffer)[:60]
            leaves = ", ".join(node.unit.path_in_tree(leaf) for leaf in node.unit.leaves_of_group(group)[:4])
            facts += [("leaves", leaves), ("got", got), ("expected", f"[{size}], one number for each element")]
            remedy = "Keep values that are not elementwise outside of Sharded nodes: reshard() leaves them unchanged."
            raise TreeError(problem("reshard()", "a buffer has not one number for each element.", facts, remedy))


def _leaf_facts_to_compare(state_tree: StateTree, unit: UnitLayout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(path, facts)`` for each leaf of ``unit``: a dict of what has to be equal in the old and the new layout.

    Compute dtype and format are facts unless ``state_tree.is_cast``. If ``state_tree.kind`` is ``"optim"``, further facts are
    the label, the dtypes ``main`` and ``accumulate``, and whether the leaf is trained.
    """
    for leaf in unit.leaves:
        facts: dict[str, Any] = {"shape": list(leaf.shape), "dtype": dtype_name(leaf.dtype)}
        facts["tied to"] = repr(".".join(filter(None, leaf.tied_to))) if leaf.tied_to else "nothing"
        facts["varies along"] = {axis: unit.mesh.axis_size(axis) for axis in sorted(unit.strategy.full.varying_axes)}
        if leaf.tied_to is None:
            group = unit.groups[leaf.group]
            if not state_tree.is_cast:
                facts["compute dtype"] = dtype_name(group.dtypes.compute)
                facts["format"] = group.dtypes.stored_format.name  # a format that is not plain has a main copy
            if state_tree.kind == "optim":
                facts |= {"trained": group.trainable, "label": group.label}
                facts |= {"main dtype": dtype_name(group.dtypes.main), "sum's dtype": dtype_name(group.dtypes.accumulate)}
        yield unit.path_in_tree(leaf), facts
