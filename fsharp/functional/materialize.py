"""shard and init_params make a rank's shards from whole values or initializers; full_tree makes whole values from shards."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import optree
import torch

from fsharp.errors import MeshError, TreeError, problem
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.checked_units import checked_units_of
from fsharp.functional.comm.equal_values import check_same_on_ranks, exact_text
from fsharp.functional.comm.protocol import Comm, reporting_format_errors
from fsharp.functional.comm.tree_labels import label_new_tree
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import PlaceName, is_sharded, map_units
from fsharp.functional.layout.slicing import ShardDtype, as_user_tree, build_shard, check_tree, shard_for
from fsharp.functional.layout.text import unit_texts_by_property
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.functional.moves import gather
from fsharp.functional.state import TrainState
from fsharp.functional.tree.paths import flatten_with_paths, value_by_path
from fsharp.type_checks import options_checked

Initializer = Callable[[torch.Tensor, torch.Generator], Any]
"""Fills a tensor from a generator, or returns the values: ``lambda t, g: torch.nn.init.xavier_uniform_(t, generator=g)``."""


@options_checked
def shard(
    params: Any,
    layout: Layout,
    comm: Comm,
    *,
    place: PlaceName | None = None,
    dtype: ShardDtype = "main",
    check_values: bool = True,
) -> Any:
    """Return this rank's shards of a tree that every rank holds whole: the tree, with a Sharded in place of each unit.

    Before, ranks compare layouts and values. :func:`~fsharp.shard_for` does the slicing.

    Args:
        params: a tree of tensors with the paths, shapes, dtypes and ties of the tree that was planned. Not changed.
        layout: the layout of the tree.
        comm: the ranks.
        place: where shards rest: ``"params"``, ``"grads"``, ``"optim"``, ``"full"``, or a
            :class:`~fsharp.layouts.MeshPlacement` of the strategy. None means ``"optim"`` for main copies, and otherwise
            ``"params"``.
        dtype: ``"main"`` for what :func:`~fsharp.init_state` needs: values in the ``main`` dtype of ``Precision``.
            ``"compute"`` for parameters without an optimizer: in the ``compute`` dtype, or encoded in the ``stored`` format.
        check_values: whether ranks compare the bits of their trees, except for leaves that vary along an axis. Pass False, on
            all ranks, for trees that are known to be equal.

    Raises:
        MeshError: ``comm`` is on another mesh than the layout.
        TreeError: the tree differs from the tree that was planned.
        AgreementError: ranks differ in layout or values, or another rank failed. All ranks raise.

    Cost: one collective of 40 bytes for each axis. To compare values: one pass over the tree, and a collective of 8 bytes for
    each axis. Memory: the shards.
    """

    def check() -> None:
        _check_mesh("shard()", layout, comm)
        check_tree(params, layout)

    check_on_all_ranks(
        "shard()", comm, check, lambda _: {**unit_texts_by_property(layout.units), "check_values": repr(check_values)}
    )
    if check_values:
        paths, leaves, _ = flatten_with_paths(params)
        varying = {unit.path_in_tree(leaf): unit.strategy.full.varying_axes for unit in layout.units for leaf in unit.leaves}
        remedy = (
            "Draw them from the same seed on all ranks or load the same file. If each rank is to have its own, say so in the "
            'strategy: zero3("dp").varying("ep").'
        )
        check_same_on_ranks("shard()", dict(zip(paths, leaves, strict=True)), comm, remedy=remedy, varying=varying)
    with reporting_format_errors(comm, "shard()"):
        return label_new_tree(shard_for(params, layout, comm.rank, place=place, dtype=dtype), comm)


@options_checked
def full_tree(tree: Any, *, comm: Comm) -> Any:
    """Gather a whole tree to every rank, and return it with the structure and shapes that it had before sharding.

    Args:
        tree: a pytree of :class:`~fsharp.Sharded`, for example ``state.params``.
        comm: the ranks.

    Returns:
        The tree of whole tensors, in the dtypes of the shards; encoded leaves are decoded to the ``compute`` dtype. These
        tensors share no memory with ``tree``. If a leaf varies along an axis, each rank gets the tensor for its own coordinate
        along this axis.

    Raises:
        TreeError: ``tree`` has no unit, a unit is a partial sum, or ``tree`` is a TrainState that lacks groups of a unit.
        MeshError: ``comm`` is on another mesh than the tree.

    Cost: an all-gather of all units. Memory: the whole tree.
    """

    def without_shared_buffers(node: Any, whole: Any) -> Any:
        if not is_sharded(node):
            return node
        return whole.replace([new.clone() if new is old else new for old, new in zip(node.buffers, whole.buffers)])

    nodes = checked_units_of("full_tree()", tree, comm)
    if isinstance(tree, TrainState) and any(len(node.groups) < len(node.unit.groups) for node in nodes):
        raise TreeError(
            "full_tree(): got a TrainState, whose `main` or `opt` does not have all parameters, expected one of its trees. "
            "Pass state.params."
        )
    return as_user_tree(map_units(without_shared_buffers, tree, gather(tree, comm=comm)))


@options_checked
def init_params(
    initializers: Initializer | Mapping[str, Initializer],
    layout: Layout,
    comm: Comm,
    *,
    key: int,
    place: PlaceName | None = None,
    dtype: ShardDtype = "main",
    device: torch.device | str | None = None,
) -> Any:
    """Draw initial parameters shard by shard: beside its shards a rank holds at most one whole leaf.

    >>> import fsharp as fs
    >>> shapes = {"w": torch.empty(4, 4, device="meta"), "b": torch.empty(4, device="meta")}
    >>> layout = fs.plan(shapes, fs.Mesh({"dp": 1}), fs.zero3("dp"))
    >>> params = fs.init_params({"**": fs.init.normal(0.02), "b": fs.init.zeros}, layout, fs.SingleComm(), key=0)
    >>> params
    Sharded('', dp:Shard, float32[20] of 20)

    Args:
        initializers: an initializer for all leaves, or initializers by pattern; the last pattern that matches a leaf counts. An
            initializer is a function ``fn(tensor, generator)`` that fills the tensor, or returns the values.
        layout: the layout of the parameters.
        comm: the ranks.
        key: seed. Values of a leaf depend on the key and the leaf's path, and not on mesh, strategy or units. If a leaf varies
            along an axis, values also depend on the rank's coordinate along that axis.
        place: where shards rest: ``"params"``, ``"grads"``, ``"optim"``, ``"full"``, or a
            :class:`~fsharp.layouts.MeshPlacement` of the strategy. None means ``"optim"`` for main copies, and otherwise
            ``"params"``.
        dtype: ``"main"`` for what :func:`~fsharp.init_state` needs: values in the ``main`` dtype of ``Precision``.
            ``"compute"`` for parameters without an optimizer: in the ``compute`` dtype, or encoded in the ``stored`` format.
        device: device of the shards; None means the device of ``comm``. Values are drawn on the CPU, so that all devices get
            equal values.

    Returns:
        A tree of :class:`~fsharp.Sharded`.

    Raises:
        PatternError: a pattern matches no leaf, or no pattern matches a leaf.
        MeshError: ``comm`` is on another mesh than the layout.
        AgreementError: ranks have different layouts, keys or initializers. Initializers of leaves that vary along an axis are
            not compared, and functions of your own only by name.

    Cost: a rank draws all elements of each leaf of which it holds a part. One collective of 40 bytes for each axis.
    """

    def check() -> dict[str, Initializer]:
        _check_mesh("init_params()", layout, comm)
        paths = [unit.path_in_tree(leaf) for unit in layout.units for leaf in unit.leaves if leaf.tied_to is None]
        # A plain function is one initializer for all leaves, not a function of the path.
        rules = initializers if isinstance(initializers, Mapping) else {"**": initializers}
        return value_by_path("init_params()", rules, paths)

    def fields(chosen: Mapping[str, Initializer]) -> dict[str, str]:
        shared = [unit.path_in_tree(leaf) for unit in layout.units if not unit.varying_axes for leaf in unit.leaves]
        rules = "\n".join(f"{path}: {exact_text(chosen[path])}" for path in shared if path in chosen)  # tied leaves have none
        return {**unit_texts_by_property(layout.units), "key": repr(key), "initializers": rules}

    chosen = check_on_all_ranks("init_params()", comm, check, fields)
    target = torch.device(device) if device is not None else comm.device
    nodes = []
    for unit in layout.units:

        def draw(leaf: Leaf, unit: Any = unit) -> torch.Tensor:
            path = unit.path_in_tree(leaf)
            generator = torch.Generator().manual_seed(mesh_independent_seed(key, path, unit, comm.rank))
            value = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
            with torch.no_grad():
                try:
                    made = chosen[path](value, generator)
                except Exception as error:
                    error.add_note(f"init_params(): the initializer failed on {path!r}. It is called as fn(tensor, generator).")
                    raise
                if isinstance(made, torch.Tensor) and made is not value:
                    value.copy_(made)  # an initializer that returns its values instead of filling
            return value.to(target)

        with reporting_format_errors(comm, "init_params()"):
            nodes.append(build_shard(unit, place, comm.rank, draw, dtype=dtype))
    return label_new_tree(optree.tree_unflatten(layout.structure, nodes), comm)


def mesh_independent_seed(key: int, path: str, unit: UnitLayout | None, rank: int) -> int:
    """Return a seed for the leaf at ``path``, which depends on ``key`` and ``path``: the same on every mesh.

    If the leaf's ``unit`` varies along axes, the seed also depends on the coordinates of ``rank`` along these axes. ``unit`` is
    None for a leaf that does not vary.
    """
    own = "" if unit is None else "".join(f":{axis}={unit.mesh.coord(axis, rank)}" for axis in unit.varying_axes)
    return int.from_bytes(hashlib.sha256(f"{key}:{path}{own}".encode()).digest()[:8], "little") >> 1


def _check_mesh(where: str, layout: Layout, comm: Comm) -> None:
    if layout.mesh != comm.mesh:
        facts = [("layout", layout.mesh), ("comm", comm.mesh)]
        raise MeshError(problem(where, "the Comm is on another mesh than the layout.", facts, "Plan for the mesh of the Comm."))


@options_checked
def normal(std: float = 1.0, mean: float = 0.0) -> Initializer:
    """Return an initializer that fills a leaf with normally distributed values."""
    return partial(_fill_normal, std=std, mean=mean)  # ranks compare the numbers of a partial


@options_checked
def uniform(low: float = 0.0, high: float = 1.0) -> Initializer:
    """Return an initializer that fills a leaf with uniformly distributed values in [low, high)."""
    return partial(_fill_uniform, low=low, high=high)


@options_checked
def zeros(t: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Fill ``t`` with zeros in place, and return ``t``. This function is itself an initializer; it does not use ``g``."""
    return t.zero_()


@options_checked
def ones(t: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Fill ``t`` with ones in place, and return ``t``. This function is itself an initializer; it does not use ``g``."""
    return t.fill_(1)


def _fill_normal(t: torch.Tensor, g: torch.Generator, *, std: float, mean: float) -> torch.Tensor:
    return t.normal_(mean, std, generator=g)


def _fill_uniform(t: torch.Tensor, g: torch.Generator, *, low: float, high: float) -> torch.Tensor:
    return t.uniform_(low, high, generator=g)
