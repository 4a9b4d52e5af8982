"""From whole values to a rank's shards: shard and init, checked on all ranks; and back, with full."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch

from fsharp.errors import MeshError, problem
from fsharp.functional.comm.agree import together
from fsharp.functional.comm.equal_values import check_same
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.tree_names import name_trees
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.paths import assign, flatten
from fsharp.functional.layout.sharded import PlaceName, is_sharded, map_units, resolve_place
from fsharp.functional.layout.slicing import as_tree, build, check_tree, shard_for
from fsharp.functional.layout.text import describe_units
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.functional.moves import gather
from fsharp.type_checks import options_checked

Initializer = Callable[[torch.Tensor, torch.Generator], Any]
"""Fills a tensor from a generator, or returns the values: ``lambda t, g: torch.nn.init.xavier_uniform_(t, generator=g)``."""


@options_checked
def shard(params: Any, layout: Layout, comm: Comm, *, place: PlaceName = "params", check_values: bool = True) -> Any:
    """This rank's part of a tree that every rank holds: :func:`~fsharp.shard_for`, once all ranks agree on layout and values.

    Args:
        params: a tree like the one that was planned; not changed.
        layout: where it rests.
        comm: the ranks.
        place: ``"params"``, or ``"optim"`` for what :func:`~fsharp.init_state` needs when a main copy is kept.
        check_values: whether ranks compare the bits of their trees, but for leaves that vary along an axis. Pass False on all
            ranks where they are known to be equal.

    Raises:
        MeshError: ``comm`` is on another mesh.
        TreeError: a tree that is not the planned one.
        AgreementError: on all ranks, if one of them failed or they differ; the text names the field or the leaf, and the ranks.

    Cost: one collective of 40 bytes for each axis. To compare values: one pass over the tree, and a collective of 8 bytes for
    each axis. Memory: the shards.
    """

    def check() -> None:
        _check_mesh("shard()", layout, comm)
        check_tree("shard()", params, layout)

    together("shard()", comm, check, lambda _: {**describe_units(layout.units), "check_values": repr(check_values)})
    if check_values:
        paths, leaves, _ = flatten(params)
        varying = {unit.full_path(leaf): unit.strategy.full.varying for unit in layout.units for leaf in unit.leaves}
        remedy = (
            "Draw them from the same seed on all ranks or load the same file. If each rank is to have its own, say so in the "
            'strategy: zero3("dp").varying("ep").'
        )
        check_same("shard()", dict(zip(paths, leaves, strict=True)), comm, remedy=remedy, varying=varying)
    return name_trees(shard_for(params, layout, comm.rank, place=place), comm)


@options_checked
def full(tree: Any, *, comm: Comm) -> Any:
    """The user's tree, every leaf whole on every rank.

    Args:
        tree: a pytree of :class:`~fsharp.Sharded`, for example ``state.params``.
        comm: the ranks.

    Returns:
        The tree that was sharded, in the dtype that rests; leaves share no memory with ``tree``. What varies from rank
        to rank is this rank's.

    Raises:
        TreeError: a unit that rests partial.
        MeshError: ``comm`` is on another mesh.

    Cost: a gather of everything, and the memory for it.
    """

    def fresh(node: Any, whole: Any) -> Any:
        if not is_sharded(node):
            return node
        return whole.replace([new.clone() if new is old else new for old, new in zip(node.buffers, whole.buffers)])

    return as_tree(map_units(fresh, tree, gather(tree, comm=comm)))


@options_checked
def init_params(
    initializers: Initializer | Mapping[str, Initializer],
    layout: Layout,
    comm: Comm,
    *,
    key: int,
    place: PlaceName = "params",
    device: torch.device | str | None = None,
) -> Any:
    """Make parameters shard by shard: no rank ever holds more than one leaf beyond its shards.

    >>> import fsharp as fs
    >>> shapes = {"w": torch.empty(4, 4, device="meta"), "b": torch.empty(4, device="meta")}
    >>> layout = fs.plan(shapes, fs.Mesh({"dp": 1}), fs.zero3("dp"))
    >>> params = fs.init_params({"**": fs.init.normal(0.02), "b": fs.init.zeros}, layout, fs.SingleComm(), key=0)
    >>> params
    Sharded('', dp:Shard, float32[20] of 20)

    Args:
        initializers: one for all leaves or by pattern, the last that selects a leaf counting.
        layout: what to make.
        comm: the ranks.
        key: seed. The values of a leaf depend on the key and its path alone, never on mesh, strategy or units; and on
            the rank's coordinates along axes on which it varies.
        place: ``"params"``, or ``"optim"`` for what :func:`~fsharp.init_state` needs when a main copy is kept.
        device: of the shards; None means ``comm``'s. Values are drawn on the CPU, so they are the same everywhere.

    Raises:
        PatternError: a pattern that selects nothing, or a leaf that none selects.
        MeshError: ``comm`` is on another mesh.
        AgreementError: ranks with different layouts or keys.

    Cost: a rank draws each leaf that it holds a part of. One collective of 40 bytes for each axis.
    """

    def check() -> dict[str, Initializer]:
        _check_mesh("init_params()", layout, comm)
        paths = [unit.full_path(leaf) for unit in layout.units for leaf in unit.leaves if leaf.tied_to is None]
        # A plain function is one initializer for all leaves, not a function of the path.
        rules = initializers if isinstance(initializers, Mapping) else {"**": initializers}
        return assign("init_params()", rules, paths)

    fields = {**describe_units(layout.units), "key": repr(key)}
    chosen = together("init_params()", comm, check, lambda _: fields)
    target = torch.device(device) if device is not None else comm.device
    nodes = []
    for unit in layout.units:

        def draw(leaf: Leaf, unit: Any = unit) -> torch.Tensor:
            path = unit.full_path(leaf)
            generator = torch.Generator().manual_seed(seed_of(key, path, unit, comm.rank))
            value = torch.empty(leaf.shape, dtype=leaf.dtype)
            with torch.no_grad():
                made = chosen[path](value, generator)
                if isinstance(made, torch.Tensor) and made is not value:
                    value.copy_(made)  # an initializer that returns its values instead of filling
            return value.to(target)

        nodes.append(build(unit, resolve_place(unit, place), comm.rank, draw, main=place == "optim"))
    return name_trees(optree.tree_unflatten(layout.spec, nodes), comm)


def seed_of(key: int, path: str, unit: UnitLayout | None, rank: int) -> int:
    """What to draw values at ``path`` in ``unit`` from: the same on every mesh, and on all ranks that share them."""
    own = "".join(f":{axis}={unit.mesh.coord(axis, rank)}" for axis in unit.strategy.full.varying) if unit is not None else ""
    return int.from_bytes(hashlib.sha256(f"{key}:{path}{own}".encode()).digest()[:8], "little") >> 1


def _check_mesh(where: str, layout: Layout, comm: Comm) -> None:
    if layout.mesh != comm.mesh:
        facts = [("layout", layout.mesh), ("comm", comm.mesh)]
        raise MeshError(problem(where, "the Comm is on another mesh than the layout.", facts))


@options_checked
def normal(std: float = 1.0, mean: float = 0.0) -> Initializer:
    """An initializer: normally distributed values."""
    return lambda t, g: t.normal_(mean, std, generator=g)


@options_checked
def uniform(low: float = 0.0, high: float = 1.0) -> Initializer:
    """An initializer: uniformly distributed values in [low, high)."""
    return lambda t, g: t.uniform_(low, high, generator=g)


@options_checked
def zeros(t: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """An initializer that fills a leaf with zeros."""
    return t.zero_()


@options_checked
def ones(t: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """An initializer that fills a leaf with ones."""
    return t.fill_(1)
