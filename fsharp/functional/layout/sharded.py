"""Sharded: the pytree node in place of a unit's subtree, and trees of such nodes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import optree
import torch
from torch.utils import _pytree as torch_pytree

from fsharp.errors import LayoutError, TreeError, problem
from fsharp.functional.formats.format import tensor_text
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.stored import decoded_buffer, is_encoded
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.tree.tree_label import UNLABELED_TREE, TreeLabel
from fsharp.tracebacks import api_boundary

PlaceName = str | MeshPlacement
"""``"params"``, ``"grads"``, ``"optim"``, ``"full"``, or a :class:`MeshPlacement` of the unit's strategy."""

_USE_REMEDY = (
    "Compute with it in a function: fs.forward(fn, unit, ..., comm=comm) calls fn with the unit's whole tensors. Outside of a "
    "step fs.full_tree(tree, comm=comm) returns them. Of a gathered unit unit.tree() returns them."
)


class ShardedContext(NamedTuple):
    """The static, hashable part of a :class:`Sharded`.

    Contexts that differ only in ``grad_sinks`` and ``tree_label`` are equal: a pytree map over two trees refuses contexts
    that are not equal. In a loss one tree may be parameters, and the other one earlier parameters.
    """

    unit: UnitLayout
    place: MeshPlacement
    groups: tuple[int, ...]
    is_gathered: bool = False
    grad_sinks: Any = None
    tree_label: TreeLabel = UNLABELED_TREE

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedContext) and self[:4] == other[:4]

    def __ne__(self, other: object) -> bool:  # optree calls this one; that of a tuple would compare all fields
        return not isinstance(other, ShardedContext) or self[:4] != other[:4]

    def __hash__(self) -> int:
        return hash(self[:4])


class LazyBuffers:
    """Base class of buffers that an engine may not have filled yet. A read of such buffers waits until they are filled."""

    raw: tuple[Any, ...]
    """The tensors, possibly not filled yet: to compare identities, not to read values."""

    def wait(self) -> tuple[Any, ...]:
        """Return the tensors once they are filled. A fill on a GPU may only be queued: then the current stream waits for it."""
        raise NotImplementedError

    def for_aliases(self, buffers: Sequence[Any]) -> "LazyBuffers":
        """Return lazy buffers of ``buffers``, new tensors in the memory of these buffers, which the same fill fills."""
        raise NotImplementedError


class Sharded:
    """A pytree node that takes the place of a unit's subtree, and holds one rank's part of the unit as flat buffers.

    The buffers are the node's children. So ``tree_map``, ``torch.func`` and elementwise optimizers see a few large 1-D tensors.
    Buffers may have leading dims, such as a batch dim of ``vmap``.

    Args:
        buffers: one 1-D tensor for each group in ``groups``, of ``unit.local_size(group, place)`` elements; of
            ``unit.stored_size(group, place)`` numbers if encoded. Or a :class:`LazyBuffers`, which a Scheduler fills later.
        unit: the layout of the unit.
        place: where the buffers rest.
        groups: indices of the groups in ``buffers``; None means all. Gradients and optimizer state have trainable groups only.
        is_gathered: whether :func:`~fsharp.gather` to ``"full"`` made the buffers. A gradient with respect to such buffers is
            partial: this rank's summand, not yet added to the summands of other ranks.
        grad_sinks: the record of :func:`~fsharp.value_and_grad` that collects gradients of the buffers; None outside of a loss.
        reduction: ``"sum"`` for gradients from ``value_and_grad``, ``"mean"`` for gradients from ``average``, else None.
        tree_label: name of the tree to which the buffers belong, for labels of collectives.
        is_main_copy: whether :func:`~fsharp.shard` has just made the buffers as main copies, of which
            :func:`~fsharp.init_state` makes parameters. Functions that compute refuse such a node.

    Attributes:
        raw_buffers: the buffers, possibly not filled yet: to compare identities, not to read values.
        lazy: the :class:`LazyBuffers` from which the node was made; None for plain tensors.
        is_donated: whether the memory was donated; functions refuse a donated node.
        rank: rank that holds the buffers, for a node in a state dict; None elsewhere.
    """

    __slots__ = (
        "grad_sinks", "groups", "is_donated", "is_gathered", "is_main_copy", "lazy", "place", "rank", "raw_buffers",
        "reduction", "tree_label", "unit",
    )  # fmt: skip

    def __init__(
        self,
        buffers: Sequence[Any] | LazyBuffers,
        unit: UnitLayout,
        place: MeshPlacement,
        groups: tuple[int, ...] | None = None,
        *,
        is_gathered: bool = False,
        grad_sinks: Any = None,
        reduction: Literal["sum", "mean"] | None = None,
        tree_label: TreeLabel = UNLABELED_TREE,
        is_main_copy: bool = False,
    ) -> None:
        self.lazy = buffers if isinstance(buffers, LazyBuffers) else None
        self.raw_buffers: tuple[Any, ...] = tuple(buffers) if self.lazy is None else self.lazy.raw  # type: ignore[arg-type]
        self.unit, self.place, self.is_gathered, self.grad_sinks = unit, place, is_gathered, grad_sinks
        self.groups = unit.all_groups if groups is None else groups
        self.reduction, self.is_donated, self.is_main_copy = reduction, False, is_main_copy
        self.tree_label = tree_label
        self.rank: int | None = None

    def __getstate__(self) -> Any:
        return None, {name: getattr(self, name) for name in self.__slots__} | {
            "raw_buffers": self.buffers,
            "lazy": None,
            "tree_label": UNLABELED_TREE,  # the numbers of names count within one process
        }

    @property
    def buffers(self) -> tuple[Any, ...]:
        """One tensor for each group in :attr:`groups`. Reading this attribute waits until the tensors are filled."""
        return self.raw_buffers if self.lazy is None else self.lazy.wait()

    def wait(self) -> None:
        """Wait until the buffers are filled: see :meth:`LazyBuffers.wait`."""
        if self.lazy is not None:
            self.lazy.wait()

    def decoded_buffers(self, rank: int = 0, *, in_main_dtype: bool = False) -> tuple[Any, ...]:
        """Return the buffers with one number for each element: parameters that a format has encoded are decoded.

        Args:
            rank: rank that holds the buffers; any rank for full parameters.
            in_main_dtype: decode to the dtype of main copies, so that encoding the values again gives the same bytes.
        """
        unit, rows = self.unit, zip(self.groups, self.buffers, strict=True)
        if not unit.has_stored_formats:
            return self.buffers
        return tuple([decoded_buffer(unit, g, b, self.place, rank, in_main_dtype=in_main_dtype) for g, b in rows])

    @property
    def is_encoded(self) -> bool:
        """Whether some buffers hold parameters that a format has encoded."""
        rows = zip(self.groups, self.raw_buffers, strict=True)
        return self.unit.has_stored_formats and any(is_encoded(self.unit, g, b) for g, b in rows)

    @property
    def sinks(self) -> tuple[torch.Tensor, ...]:
        """Tensors that collect gradients of the buffers, one for each trainable group; empty outside of a loss."""
        return () if self.grad_sinks is None else self.grad_sinks.sinks_of_node_buffers(self.raw_buffers)

    @property
    def name(self) -> str:
        """Path of the unit."""
        return self.unit.name

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse_use_outside_forward(f"[{key!r}]")

    def _refuse_arithmetic(self, other: object) -> NoReturn:
        self._refuse_use_outside_forward("a sum or a product")

    __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = _refuse_arithmetic

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse, by a TreeError, a call of a function of torch that has a node among its arguments."""
        name = getattr(function, "__name__", "a function of torch")
        units_of((args, kwargs))[0]._refuse_use_outside_forward(name)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"'Sharded' object has no attribute {name!r}. {_USE_REMEDY}")

    def _refuse_use_outside_forward(self, what: str) -> NoReturn:
        paths = [leaf.path for leaf in self.unit.leaves]
        facts = [("leaves", ", ".join(paths[:8]) + ", ..." * bool(paths[8:]))] if any(paths) else []
        part = "all of its elements in flat buffers" if self.is_gathered else "this rank's part"
        held = f"used in {what}, but outside of fs.forward() it is one node, a Sharded with {part}."
        raise TreeError(problem(f"unit {self.unit.display_name}", held, facts, _USE_REMEDY))

    def with_buffers(
        self,
        buffers: Sequence[Any] | LazyBuffers,
        *,
        groups: tuple[int, ...] | None = None,
        grad_sinks: Any = None,
        reduction: Literal["sum", "mean"] | None = None,
    ) -> "Sharded":
        """Return a node with ``buffers`` that hold the same values as this node's: the name of the tree stays.

        ``groups``, one for each buffer, and ``grad_sinks`` are by default those of this node. ``reduction`` is not copied.
        """
        return Sharded(
            buffers,
            self.unit,
            self.place,
            self.groups if groups is None else groups,
            is_gathered=self.is_gathered,
            grad_sinks=self.grad_sinks if grad_sinks is None else grad_sinks,
            reduction=reduction,
            tree_label=self.tree_label,
        )

    def replace(self, buffers: Sequence[Any] | LazyBuffers, place: MeshPlacement | None = None) -> "Sharded":
        """Return a node of the same groups with buffers of new values, in ``place`` or in this node's place.

        ``reduction`` is not copied. With ``place`` the buffers do not count as gathered.
        """
        name, is_gathered = self.tree_label, self.is_gathered and place is None
        new = TreeLabel(name.tree, name.num_updates, name.num_replaced + 1, name.num_mapped) if name.tree else UNLABELED_TREE
        where = place or self.place
        return Sharded(
            buffers, self.unit, where, self.groups, is_gathered=is_gathered, grad_sinks=self.grad_sinks, tree_label=new
        )

    def own_tree_label(self) -> TreeLabel:
        """Return the name of the node's tree. A node without a name first gets a TreeLabel of its own, to count its gathers."""
        if self.tree_label is UNLABELED_TREE:
            self.tree_label = TreeLabel()
        return self.tree_label

    def donate(self) -> None:
        """Release the buffers and mark the node as donated: functions refuse it from now on."""
        self.raw_buffers, self.lazy, self.groups, self.is_donated = (), None, (), True

    def select_groups(self, groups: Sequence[int]) -> "Sharded":
        """Return a node with only ``groups``: indices of groups that this node has. ``reduction`` is not copied."""
        chosen = tuple(groups)
        if chosen == self.groups and self.reduction is None:
            return self
        held = dict(zip(self.groups, self.buffers, strict=True)) if chosen else {}
        return self.with_buffers(list(map(held.__getitem__, chosen)), groups=chosen)

    @api_boundary
    def tree(self, ties: Sequence["Sharded"] = ()) -> Any:
        """Return the unit's subtree; leaves are views of the buffers, or decoded into new memory. Differentiable.

        Args:
            ties: full units that store leaves to which leaves of this unit are tied.

        Raises:
            TreeError: the buffers are not full, groups are missing, or ``ties`` lacks the unit of a tied leaf.
        """
        owners = {each.name: each for each in ties} | {self.name: self}
        names = dict.fromkeys([self.name, *(leaf.tied_to[0] for leaf in self.unit.leaves if leaf.tied_to is not None)])
        views = {name: owners[name]._full_leaves_by_path() for name in names if name in owners}  # in one order on all ranks
        return build_subtree(self.unit, "Sharded.tree()", views)

    def _full_leaves_by_path(self) -> dict[str, torch.Tensor]:
        if self.place.sharded_axes or self.place.partial_axes or self.groups != self.unit.all_groups:
            facts = [("place", self.place), ("groups", f"{self.groups} of {self.unit.all_groups}")]
            remedy = "Call gather() first." if self.groups == self.unit.all_groups else "Add the other groups by merge() first."
            raise TreeError(
                problem("Sharded.tree()", f"this rank does not hold all of unit {self.unit.display_name}.", facts, remedy)
            )
        views = {}
        for group, buffer in zip(self.groups, self.decoded_buffers(), strict=True):
            leaves = self.unit.leaves_of_group(group)
            # One split, padding included: its backward is one concatenation. narrow() would make a full buffer for each leaf.
            sizes, end = [], 0
            for leaf in leaves:
                sizes += [leaf.offset - end, leaf.numel]
                end = leaf.offset + leaf.numel
            pieces = torch.split(buffer, [*sizes, buffer.shape[-1] - end], dim=-1)
            for leaf, piece in zip(leaves, pieces[1::2], strict=False):
                views[leaf.path] = piece.reshape((*buffer.shape[:-1], *leaf.shape))
        return views

    def local_leaves(self, rank: int) -> dict[str, torch.Tensor]:
        """Return a dict from the path of each leaf to the elements that ``rank`` holds, as 1-D views of the buffers.

        Leaves without elements on ``rank`` are left out. Encoded parameters are decoded into new memory. Cost: none otherwise.
        """
        result = {}
        for group, buffer in zip(self.groups, self.decoded_buffers(rank), strict=True):
            for span in self.unit.leaf_spans(group, self.place, rank):
                result[self.unit.path_in_tree(span.leaf)] = buffer[..., span.start : span.stop]
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of the node's buffers on this rank, with padding."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def __repr__(self) -> str:
        shown = []
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            is_tensor = isinstance(buffer, torch.Tensor)
            shown.append(f"{tensor_text(buffer)} of {self.unit.groups[group].size}" if is_tensor else repr(buffer))
        return f"Sharded({self.name!r}, {self.place}, {'; '.join(shown) or 'empty'})"


@api_boundary
def build_subtree(unit: UnitLayout, where: str, leaves: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the unit's subtree, made of ``leaves``: by name of the unit, dicts from a leaf's path in the unit to the leaf.

    Raises TreeError if a leaf is tied to a leaf of another unit, and ``leaves`` lacks this unit.
    """
    found = []
    for leaf in unit.leaves:
        owner, path = leaf.tied_to or (unit.name, leaf.path)
        if owner not in leaves:
            facts = [("tied to", f"{path!r} of unit {owner!r}")]
            call = f"forward(fn, params[{unit.name!r}], ..., ties=[params[{owner!r}]])"
            remedy = f"Pass that unit along: {call}; of JAX's arrays pass one tree with both units to unflatten()."
            what = f"{unit.path_in_tree(leaf)!r} is tied to a leaf of a unit that this call was not given."
            raise TreeError(problem(where, what, facts, remedy))
        found.append(leaves[owner][path])
    return optree.tree_unflatten(unit.structure, found)


def flatten_node(node: Sharded) -> tuple[tuple[Any, ...], ShardedContext]:
    """Return the children of a node, and its context."""
    return node.buffers, ShardedContext(node.unit, node.place, node.groups, node.is_gathered, node.grad_sinks, node.tree_label)


def unflatten_node(context: ShardedContext, children: Any) -> Sharded:
    """Return a node with this context and these children. The name of its tree counts one more mapping.

    ``reduction`` is not in the context: the new node has None.
    """
    unit, place, groups, is_gathered, grad_sinks, name = context
    mapped = TreeLabel(name.tree, name.num_updates, name.num_replaced, name.num_mapped + 1) if name.tree else UNLABELED_TREE
    return Sharded(tuple(children), unit, place, groups, is_gathered=is_gathered, grad_sinks=grad_sinks, tree_label=mapped)


_GLOBAL_NAMESPACE: Any = vars(optree.registry)["__GLOBAL_NAMESPACE"]
"""optree's global namespace, so that other libraries, such as TorchOpt, flatten the nodes."""
STATIC_CLASSES: set[type] = set()
"""Frozen dataclasses of plain values that are pytree nodes without leaves."""


def register_static(kind: type) -> None:
    """Register a frozen dataclass as a pytree node without leaves, with optree and with torch."""
    STATIC_CLASSES.add(kind)
    optree.register_pytree_node(kind, lambda node: ((), node), lambda node, _: node, namespace=_GLOBAL_NAMESPACE)  # type: ignore[arg-type, return-value]
    torch_pytree.register_pytree_node(kind, lambda node: ([], node), lambda _, node: node)


optree.register_pytree_node(Sharded, flatten_node, unflatten_node, namespace=_GLOBAL_NAMESPACE)  # type: ignore[arg-type]
torch_pytree.register_pytree_node(
    Sharded,
    lambda node: (list(flatten_node(node)[0]), flatten_node(node)[1]),
    lambda children, context: unflatten_node(context, children),
    serialized_type_name="fsharp.Sharded",
    flatten_with_keys_fn=lambda node: (
        [(torch_pytree.SequenceKey(i), child) for i, child in enumerate(flatten_node(node)[0])],
        flatten_node(node)[1],
    ),
)


def decode_tree(tree: Any, rank: int) -> Any:
    """Return the tree of ``rank`` with encoded parameters decoded into new tensors of the main dtype."""

    def decode(node: Any) -> Any:
        is_decoded = not (is_sharded(node) and node.is_encoded)
        return node if is_decoded else node.with_buffers(node.decoded_buffers(rank, in_main_dtype=True))

    return map_units(decode, tree)


def check_not_encoded(where: str, nodes: Sequence[Sharded]) -> None:
    """Raise a TreeError if parameters are stored in a format, for callers that compute with plain values."""
    for node in nodes:
        if node.unit.has_stored_formats and node.is_encoded:
            raise TreeError(
                f"{where}: parameters of unit {node.unit.display_name} are stored in a format, and not as values. Pass main "
                'copies (state.main), or the result of gather() to "full".'
            )


@api_boundary
def tree_nbytes(tree: Any) -> int:
    """Return the bytes of all tensors in a tree on this rank; the tree may be a :class:`~fsharp.TrainState`."""
    leaves = optree.tree_leaves(tree)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


is_sharded: Callable[[Any], bool] = Sharded.__instancecheck__
"""Return whether a node of a tree is a :class:`Sharded`. As fast as ``isinstance``, as it is called for every node."""


@api_boundary
def units_of(tree: Any) -> list[Sharded]:
    """Return a list of all :class:`Sharded` nodes in a tree, in tree order."""
    return list(filter(is_sharded, optree.tree_leaves(tree, is_leaf=is_sharded)))


def units_by_name(tree: Any) -> dict[str, Sharded]:
    """Return all :class:`Sharded` in a tree, by the path of their unit; of several nodes of one unit the last."""
    return {node.unit.name: node for node in units_of(tree)}


def check_not_donated(where: str, nodes: Iterable[Sharded]) -> None:
    """Raise a TreeError, which names the unit, if a node was donated."""
    for node in nodes:
        if node.is_donated:
            raise TreeError(
                f"{where}: unit {node.unit.display_name} belongs to a donated state (donate=True), whose memory the new state "
                "uses. Use the state that was returned, or leave out donate=True."
            )


def mark_donated(nodes: Iterable[Sharded], new: Iterable[Sharded] = ()) -> None:
    """Mark nodes as donated, except for nodes that are also in ``new``."""
    kept = set(map(id, new))
    for node in nodes:
        node.is_donated = id(node) not in kept


@api_boundary
def map_units(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return ``tree`` with each leaf replaced by ``fn(leaf, *others)``. A :class:`Sharded` counts as a leaf.

    ``others`` are what the trees in ``rest`` have at the same path. Leaves that are no Sharded are passed to ``fn`` as well.
    """
    return optree.tree_map(fn, tree, *rest, is_leaf=is_sharded)


def resolve_place(unit: UnitLayout, place: PlaceName) -> MeshPlacement:
    """Return the place that ``place`` names in the strategy of ``unit``. A MeshPlacement of this strategy is returned itself.

    Raises LayoutError for an unknown name, or a MeshPlacement that does not belong to the strategy.
    """
    if isinstance(place, str):
        if place not in ("params", "grads", "optim", "full"):
            raise LayoutError(f"unknown place {place!r}: expected 'params', 'grads', 'optim', 'full' or a MeshPlacement.")
        return getattr(unit.strategy, place)  # type: ignore[no-any-return]
    order, cuts = unit.strategy.axis_order, place.sharded_axes
    if place.axis_order != order or cuts != order[: len(cuts)] or place.varying_axes != unit.varying_axes:
        places = f"{unit.strategy.params!r}, {unit.strategy.optim!r}"
        facts = [("axes of the strategy", ", ".join(order)), ("its places", places)]
        what = f"{place!r} does not belong to the strategy of unit {unit.display_name}: other axes, another order, or a gap."
        raise LayoutError(problem("place", what, facts, "Shard along the first axes of the strategy, in its order."))
    if not set(cuts) <= set(unit.strategy.optim.sharded_axes):
        raise LayoutError(
            f"{place!r} shards unit {unit.display_name} along {list(cuts)}, and its layout along "
            f"{list(unit.strategy.optim.sharded_axes)} alone. Take a strategy that shards optimizer state along all these axes."
        )
    return place


def not_sharded_error(where: str, leaf: Any) -> TreeError:
    """Return the error for a tree without a :class:`Sharded`, or for a leaf that is not one."""
    remedy = "Pass fs.shard(tree, layout, comm), with layout = fs.plan(tree, comm.mesh, strategy)."
    return TreeError(f"{where}: expected a tree of Sharded, got {type(leaf).__name__}, which is not sharded. {remedy}")


@api_boundary
def trainable(tree: Any) -> Any:
    """Return a tree of parameters without frozen groups: the groups with gradients and optimizer state.

    Raises:
        TreeError: a leaf is not a :class:`Sharded`.
    """

    def select_trainable(node: Sharded) -> Sharded:
        if not is_sharded(node):
            raise not_sharded_error("trainable()", node)
        chosen = node.unit.trainable_groups
        return node.select_groups(chosen if set(chosen) <= set(node.groups) else [g for g in chosen if g in node.groups])

    return map_units(select_trainable, tree)


@api_boundary
def merge(tree: Any, part: Any) -> Any:
    """Return ``tree`` with the groups of ``part`` in place of its own groups: the inverse of :func:`trainable`.

    Raises:
        TreeError: a leaf of one of the trees is not a :class:`Sharded`, or ``part`` and ``tree`` rest in different places.
    """

    def merge_node(whole: Sharded, new: Sharded) -> Sharded:
        for leaf in (whole, new):
            if not is_sharded(leaf):
                raise not_sharded_error("merge()", leaf)
        if new.groups and new.place != whole.place:
            what = f"unit {whole.unit.display_name} of the tree rests {whole.place}, and its part {new.place}"
            raise TreeError(f"merge(): {what}. Bring both to one place, as by gather(part, to=...).")
        if not new.groups and whole.reduction is None:
            return whole
        held = dict(zip(new.groups, new.buffers, strict=True))
        return whole.replace([held.get(g, old) for g, old in zip(whole.groups, whole.buffers, strict=True)])

    return map_units(merge_node, tree, part)
