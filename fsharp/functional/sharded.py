"""Sharded: the pytree node that stands where a unit's subtree stood, and the pure slicing that makes and unmakes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch.utils import _pytree as torch_pytree

from fsharp.functional.errors import LayoutError, TreeError, problem
from fsharp.functional.layout import Layout
from fsharp.functional.paths import flatten
from fsharp.functional.placement import Place
from fsharp.functional.plan import find_ties
from fsharp.functional.precision import dtype_name
from fsharp.functional.unit_layout import Leaf, UnitLayout
from fsharp.functional.units import cut_at

PlaceName = str | Place
"""``"params"``, ``"grads"``, ``"optim"``, ``"full"``, or a :class:`Place` of the unit's strategy."""


class Context(NamedTuple):
    """What a Sharded is besides its buffers: static and hashable.

    Attributes:
        unit: the layout of the unit.
        place: where the buffers rest.
        groups: which of the unit's groups they are.
        is_gathered: whether they are what each rank computes with by itself.
        ledger: that of the microbatch; compared by identity.
    """

    unit: UnitLayout
    place: Place
    groups: tuple[int, ...]
    is_gathered: bool = False
    ledger: Any = None


class LazyBuffers(ABC):
    """Buffers that are on their way, as an engine hands them out: whoever looks at them waits."""

    raw: tuple[Any, ...]
    """The tensors themselves: to know which they are, not what is in them."""

    @abstractmethod
    def wait(self) -> tuple[Any, ...]:
        """The tensors, filled."""

    @abstractmethod
    def aliased(self, buffers: Sequence[Any]) -> "LazyBuffers":
        """Other tensors with the same memory, which are there when these are."""


class Sharded:
    """One unit's flat local buffers, in place of its subtree.

    The children of this node are the buffers, so ``tree_map``, ``torch.func`` and elementwise optimizers see a handful
    of large 1-D tensors; leading dims, as ``vmap`` makes them, are allowed.

    Args:
        buffers: one 1-D tensor for each group in ``groups``, ``unit.local_size(group, place)`` elements long; or an engine's.
        unit: the layout of the unit.
        place: where the buffers rest.
        groups: indices of the groups they belong to; gradients and optimizer state have trainable ones only.
        is_gathered: set by ``gather`` to ``"full"``: copies that each rank computes with by itself. A gradient with respect
            to them is this rank's summand.
        ledger: set by :func:`~fsharp.value_and_grad`, which knows through it where gradients go.
        scale: of gradients as ``value_and_grad`` and ``average`` return them: ``"sum"`` or ``"mean"``. What is made of them by
            other functions has none.

    Attributes:
        is_donated: whether its memory has been given away; such a node is refused.
    """

    __slots__ = (
        "_buffers",
        "groups",
        "is_donated",
        "is_gathered",
        "ledger",
        "place",
        "scale",
        "unit",
    )

    def __init__(
        self,
        buffers: Sequence[Any] | LazyBuffers,
        unit: UnitLayout,
        place: Place,
        groups: tuple[int, ...] | None = None,
        *,
        is_gathered: bool = False,
        ledger: Any = None,
        scale: Literal["sum", "mean"] | None = None,
    ) -> None:
        self._buffers = buffers if isinstance(buffers, LazyBuffers) else tuple(buffers)
        self.unit, self.place, self.is_gathered, self.ledger = unit, place, is_gathered, ledger
        self.groups = unit.all_groups if groups is None else groups
        self.scale, self.is_donated = scale, False

    def __getstate__(self) -> Any:
        return None, {name: getattr(self, name) for name in self.__slots__} | {"_buffers": self.buffers}

    @property
    def buffers(self) -> tuple[Any, ...]:
        """One tensor for each group in :attr:`groups`. Waits for them if they are still on their way."""
        return self._buffers if isinstance(self._buffers, tuple) else self._buffers.wait()

    @property
    def raw_buffers(self) -> tuple[Any, ...]:
        """The buffers without waiting: to know which they are, not what is in them."""
        return self._buffers if isinstance(self._buffers, tuple) else self._buffers.raw

    @property
    def lazy(self) -> LazyBuffers | None:
        """The buffers as an engine has handed them out, if it has."""
        return None if isinstance(self._buffers, tuple) else self._buffers

    def aliased(self, buffers: Sequence[Any], ledger: Any) -> "Sharded":
        """A node with a ledger, of tensors that have the memory of this one's: who looks at them waits for these."""
        held = buffers if self.lazy is None else self.lazy.aliased(buffers)
        return Sharded(held, self.unit, self.place, self.groups, is_gathered=self.is_gathered, ledger=ledger)

    @property
    def sinks(self) -> tuple[torch.Tensor, ...]:
        """Where the gradients of these buffers go, for each trainable group; none outside of a loss, or of other buffers."""
        return () if self.ledger is None else self.ledger.sinks(self.raw_buffers)

    @property
    def name(self) -> str:
        """The path of the unit."""
        return self.unit.name

    def replace(self, buffers: Sequence[Any], place: Place | None = None) -> "Sharded":
        """The same groups with other buffers, perhaps in another place."""
        return Sharded(buffers, self.unit, place or self.place, self.groups, is_gathered=self.is_gathered and place is None)

    def select(self, groups: Sequence[int]) -> "Sharded":
        """Only the given groups, which have to be among this node's."""
        held = dict(zip(self.groups, self.buffers, strict=True))
        return Sharded([held[g] for g in groups], self.unit, self.place, tuple(groups), is_gathered=self.is_gathered)

    def tree(self, ties: Sequence["Sharded"] = ()) -> Any:
        """The unit's subtree, its leaves views of the buffers. Differentiable.

        Args:
            ties: full units that hold leaves to which leaves of this one are tied.

        Raises:
            TreeError: the buffers are not full, or a tied leaf's unit is missing.
        """
        owners = {each.name: each for each in ties} | {self.name: self}
        views = {self.name: self._views()}
        leaves = []
        for leaf in self.unit.leaves:
            unit, path = leaf.tied_to or (self.name, leaf.path)
            if unit not in owners:
                raise TreeError(
                    problem(
                        "Sharded.tree()",
                        f"{self.unit.full_path(leaf)!r} is tied to a leaf of another unit, which is not here.",
                        [("tied to", f"{path!r} of unit {unit!r}")],
                        f"Pass that unit along: forward(fn, params[{self.name!r}], ..., ties=[params[{unit!r}]]).",
                    )
                )
            if unit not in views:
                views[unit] = owners[unit]._views()
            leaves.append(views[unit][path])
        return optree.tree_unflatten(self.unit.spec, leaves)

    def _views(self) -> dict[str, torch.Tensor]:
        if self.place.sharded or self.place.partial or self.groups != self.unit.all_groups:
            raise TreeError(
                problem(
                    "Sharded.tree()",
                    f"unit {self.name!r} is not whole.",
                    [("place", self.place), ("groups", f"{self.groups} of {self.unit.all_groups}")],
                    "gather() it first.",
                )
            )
        views = {}
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            leaves = self.unit.leaves_of(group)
            # One split with the gaps in it: its backward is one concatenation, where narrow() would make a buffer a leaf.
            sizes, end = [], 0
            for leaf in leaves:
                sizes += [leaf.offset - end, leaf.numel]
                end = leaf.offset + leaf.numel
            pieces = torch.split(buffer, [*sizes, buffer.shape[-1] - end], dim=-1)
            for leaf, piece in zip(leaves, pieces[1::2], strict=False):
                views[leaf.path] = piece.reshape((*buffer.shape[:-1], *leaf.shape))
        return views

    def local_leaves(self, rank: int) -> dict[str, torch.Tensor]:
        """The elements of each leaf that ``rank`` holds, as 1-D views of this rank's buffers, by path in the user's tree.

        Leaves that it holds nothing of are absent. Cost: none.
        """
        result = {}
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            for span in self.unit.spans(group, self.place, rank):
                result[self.unit.full_path(span.leaf)] = buffer[..., span.start : span.stop]
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def __repr__(self) -> str:
        shown = []
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            if isinstance(buffer, torch.Tensor):
                shape = ", ".join(map(str, buffer.shape))
                shown.append(f"{dtype_name(buffer.dtype)}[{shape}] of {self.unit.groups[group].size}")
            else:
                shown.append(repr(buffer))
        return f"Sharded({self.name!r}, {self.place}, {'; '.join(shown) or 'empty'})"


def _flatten(node: Sharded) -> tuple[tuple[Any, ...], Context]:
    return node.buffers, Context(node.unit, node.place, node.groups, node.is_gathered, node.ledger)


def _unflatten(context: Context, children: Any) -> Sharded:
    unit, place, groups, is_gathered, ledger = context
    return Sharded(tuple(children), unit, place, groups, is_gathered=is_gathered, ledger=ledger)


def _register() -> None:
    # optree's global namespace, so that libraries which know nothing of this one (TorchOpt) see through the node.
    everywhere: Any = vars(optree.registry)["__GLOBAL_NAMESPACE"]
    optree.register_pytree_node(Sharded, _flatten, _unflatten, namespace=everywhere)  # type: ignore[arg-type]
    torch_pytree.register_pytree_node(
        Sharded,
        lambda node: (list(_flatten(node)[0]), _flatten(node)[1]),
        lambda children, context: _unflatten(context, children),
        serialized_type_name="fsharp.Sharded",
        flatten_with_keys_fn=lambda node: (
            [(torch_pytree.SequenceKey(i), child) for i, child in enumerate(_flatten(node)[0])],
            _flatten(node)[1],
        ),
    )


_register()


def tree_nbytes(tree: Any) -> int:
    """Bytes of all tensors in a tree, for example of a :class:`~fsharp.TrainState`: what this rank holds at rest."""
    leaves = optree.tree_leaves(tree)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


is_sharded: Callable[[Any], bool] = Sharded.__instancecheck__
"""Whether a node of a tree is a :class:`Sharded`: as ``isinstance``, and asked of every node of every tree, without a frame."""


def units_of(tree: Any) -> list[Sharded]:
    """All :class:`Sharded` in a tree, in tree order."""
    return [leaf for leaf in optree.tree_leaves(tree, is_leaf=is_sharded) if is_sharded(leaf)]


def check_kept(where: str, nodes: Iterable[Sharded]) -> None:
    """Refuse nodes whose memory has been given away.

    Raises:
        TreeError: names the unit.
    """
    for node in nodes:
        if node.is_donated:
            raise TreeError(
                f"{where}: unit {node.name!r} is of a state that was donated (donate=True), whose memory the next one has. Use "
                "the state that was returned, or leave out donate=True."
            )


def donate_nodes(tree: Any) -> None:
    """From here on these nodes are refused; others may have their buffers."""
    for node in units_of(tree):
        node.is_donated = True


def map_units(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """``fn`` of every :class:`Sharded` in ``tree``, with those in the same position of ``rest``."""
    return optree.tree_map(fn, tree, *rest, is_leaf=is_sharded)


def resolve_place(unit: UnitLayout, place: PlaceName) -> Place:
    """A place of the unit's strategy by name, or the place itself if it is one of this unit's.

    Raises:
        LayoutError: an unknown name, or a place that cuts in an order other than the strategy's.
    """
    if isinstance(place, str):
        if place not in ("params", "grads", "optim", "full"):
            raise LayoutError(f"unknown place {place!r}: expected 'params', 'grads', 'optim', 'full' or a Place.")
        return getattr(unit.strategy, place)  # type: ignore[no-any-return]
    order, full = unit.strategy.order, unit.strategy.full
    if place.order != order or place.sharded != order[: len(place.sharded)] or place.varying != full.varying:
        raise LayoutError(
            problem("place", f"{place!r} is not one of unit {unit.name!r}.", [("order of axes", ", ".join(order))])
        )
    if not set(place.sharded) <= set(unit.strategy.optim.sharded):
        raise LayoutError(
            f"{place!r} cuts unit {unit.name!r} finer than its layout, which divides it over "
            f"{list(unit.strategy.optim.sharded)}."
        )
    return place


def trainable(tree: Any) -> Any:
    """Every unit's trainable groups: the part of the parameters that has gradients and optimizer state."""
    return map_units(lambda s: s.select([g for g in s.groups if s.unit.groups[g].trainable]), tree)


def merge(tree: Any, part: Any) -> Any:
    """``tree`` with the groups that ``part`` holds replaced by those: the inverse of :func:`trainable`."""

    def one(whole: Sharded, new: Sharded) -> Sharded:
        held = dict(zip(new.groups, new.buffers, strict=True))
        return whole.replace([held.get(g, old) for g, old in zip(whole.groups, whole.buffers, strict=True)])

    return map_units(one, tree, part)


def shard_for(params: Any, layout: Layout, rank: int, *, place: PlaceName = "params") -> Any:
    """What ``rank`` holds of a tree: pure slicing, no other rank needed.

    >>> import fsharp as fs
    >>> tree = {"w": torch.arange(6.).view(2, 3), "b": torch.ones(1)}
    >>> layout = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"))
    >>> parts = [fs.shard_for(tree, layout, rank) for rank in range(2)]
    >>> parts[1]
    Sharded('', dp:Shard, float32[4] of 8)
    >>> fs.unshard(parts)["w"]
    tensor([[0., 1., 2.],
            [3., 4., 5.]])

    Args:
        params: a tree like the one that was planned: same paths, shapes, dtypes and ties.
        layout: where it rests.
        rank: whose part.
        place: ``"params"`` gives parameters in their compute dtype; ``"optim"`` the main copy in its own dtype, of
            trainable groups and frozen ones alike.

    Returns:
        The tree with a :class:`Sharded` for each unit. Buffers are new; padding is zero.

    Raises:
        TreeError: a tree that is not the planned one; every difference is named.
    """
    check_tree("shard()", params, layout)
    sections = cut_at(params, frozenset(unit.name for unit in layout.units))
    nodes = []
    for unit, subtree in zip(layout.units, sections.subtrees, strict=True):
        tensors = dict(zip((leaf.path for leaf in unit.leaves), optree.tree_leaves(subtree), strict=True))
        where = resolve_place(unit, place)
        nodes.append(build(unit, where, rank, partial(_by_path, tensors), main=place == "optim"))
    return optree.tree_unflatten(layout.spec, nodes)


def _by_path(tensors: dict[str, torch.Tensor], leaf: Leaf) -> torch.Tensor:
    return tensors[leaf.path]


def build(
    unit: UnitLayout, place: Place, rank: int, leaf_value: Callable[[Leaf], torch.Tensor], *, main: bool = False
) -> Sharded:
    """A unit's buffers on one rank from its leaves, one leaf at a time, and only leaves that this rank holds a part of."""
    buffers = []
    for i, group in enumerate(unit.groups):
        dtype = group.dtypes.main if main else group.dtypes.compute
        buffer: torch.Tensor | None = None
        for span in unit.spans(i, place, rank):
            value = leaf_value(span.leaf)
            if buffer is None:
                buffer = torch.zeros(unit.local_size(i, place), dtype=dtype, device=value.device)
            if value.device != buffer.device:
                raise TreeError(
                    f"shard(): {unit.full_path(span.leaf)!r} is on {value.device}, other leaves of unit {unit.name!r} "
                    f"on {buffer.device}: move them to one device."
                )
            buffer[span.start : span.stop] = value.detach().reshape(-1)[span.first : span.last]
            del value  # before the next one is made
        if buffer is None:
            some = next((leaf_value(leaf) for leaf in unit.leaves_of(i)), torch.empty(0))
            buffer = torch.zeros(unit.local_size(i, place), dtype=dtype, device=some.device)
        buffers.append(buffer)
    return Sharded(buffers, unit, place)


def unshard(shards: Sequence[Any], *, rank: int = 0) -> Any:
    """The user's tree from all ranks' trees of :class:`Sharded`, in order of rank. Pure: the inverse of :func:`shard_for`.

    Args:
        shards: one tree for each rank.
        rank: whose tree; the same for all but where units vary along an axis.

    Raises:
        TreeError: trees of another number of ranks, of different layouts, or that rest partial.
    """
    trees = list(shards)
    if not trees:
        raise TreeError("unshard(): no trees; pass one for each rank.")
    per_rank = [units_of(tree) for tree in trees]
    for r, nodes in enumerate(per_rank):
        if [_flatten(node)[1] for node in nodes] != [_flatten(node)[1] for node in per_rank[0]]:
            raise TreeError(f"unshard(): the tree of rank {r} has another layout or place than that of rank 0.")
    whole = []
    for parts in zip(*per_rank, strict=True):
        unit, place, mesh = parts[0].unit, parts[0].place, parts[0].unit.mesh
        if len(trees) != mesh.size:
            raise TreeError(f"unshard(): {len(trees)} trees, expected one for each of the {mesh.size} ranks of {mesh}.")
        if place.partial:
            raise TreeError(f"unshard(): unit {unit.name!r} rests partial ({place}); reduce_scatter() it first.")
        alike = [r for r in range(mesh.size) if all(mesh.coord(a, r) == mesh.coord(a, rank) for a in place.varying)]
        holders = {tuple(mesh.coord(axis, r) for axis in place.sharded): parts[r] for r in reversed(alike)}
        in_order = [holders[key].buffers for key in sorted(holders)]
        whole.append(
            Sharded([torch.cat(column, dim=-1) for column in zip(*in_order)], unit, unit.strategy.full, parts[0].groups)
        )
    position = iter(whole)
    gathered = map_units(lambda node: next(position) if is_sharded(node) else node, trees[0])
    return as_tree(gathered)


def as_tree(full: Any) -> Any:
    """A tree of full :class:`Sharded` as the user's tree, ties between units resolved."""
    nodes = units_of(full)
    return map_units(lambda node: node.tree(ties=nodes) if is_sharded(node) else node, full)


def check_tree(where: str, params: Any, layout: Layout) -> None:
    """Refuse a tree that is not the one ``layout`` was planned for.

    Raises:
        TreeError: paths, shapes, dtypes or ties that differ; up to eight of them are named.
    """
    paths, leaves, _ = flatten(params)
    planned = {unit.full_path(leaf): leaf for unit in layout.units for leaf in unit.leaves}
    rows: list[tuple[str, str]] = []
    for path in planned.keys() - set(paths):
        rows.append((repr(path), "missing from the tree"))
    for path, leaf in zip(paths, leaves):
        want = planned.get(path)
        if want is None:
            rows.append((repr(path), "not in the layout"))
        elif not isinstance(leaf, torch.Tensor):
            rows.append((repr(path), f"got {type(leaf).__name__}, expected a tensor"))
        elif (tuple(leaf.shape), leaf.dtype) != (want.shape, want.dtype):
            got, expected = ((dtype_name(d), list(s)) for d, s in ((leaf.dtype, leaf.shape), (want.dtype, want.shape)))
            rows.append((repr(path), f"got {got[0]}{got[1]}, expected {expected[0]}{expected[1]}"))
    if not rows:
        rows = list(_tie_problems(paths, leaves, layout))
        devices = {str(leaf.device): path for path, leaf in zip(paths, leaves)}
        if len(devices) > 1:
            rows += [(repr(path), f"on {device}, expected all leaves on one device") for device, path in devices.items()]
    if rows:
        more = f"and {len(rows) - 8} more. " if len(rows) > 8 else ""
        raise TreeError(
            problem(where, "the tree is not the one that was planned.", sorted(rows)[:8], f"{more}Call plan() with this tree.")
        )
    structure = optree.tree_unflatten(layout.spec, [optree.tree_unflatten(u.spec, [0] * len(u.leaves)) for u in layout.units])
    if optree.tree_structure(structure) != optree.tree_structure(params):
        raise TreeError(f"{where}: the tree's containers are not those planned: {optree.tree_structure(params)}.")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_meta or b.is_meta:
        return a.is_meta and b.is_meta
    return torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8).cpu() for x in (a, b)))


def _tie_problems(paths: Sequence[str], leaves: Sequence[torch.Tensor], layout: Layout) -> Iterator[tuple[str, str]]:
    by_path = dict(zip(paths, leaves))
    found = find_ties(paths, leaves)
    for unit in layout.units:
        for leaf in unit.leaves:
            path = unit.full_path(leaf)
            owner = None
            if leaf.tied_to:
                owner = ".".join(part for part in leaf.tied_to if part)
            if owner is None and path in found:
                yield repr(path), f"tied to {found[path]!r}, but laid out on its own"
            elif owner and found.get(path) != owner and not _same_bits(by_path[path], by_path[owner]):
                yield repr(path), f"laid out as tied to {owner!r}, but has values of its own"
