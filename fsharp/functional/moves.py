"""gather and reduce_scatter: from one resting place to another, each the transpose of the other.

Places of a unit nest (:class:`~fsharp.Place`), so a move is a collective along one axis after another:

==============  ==========  ===============================
from            to          along that axis
==============  ==========  ===============================
shard           replicate   ``all_gather``
replicate       shard       a local slice
partial         shard       ``reduce_scatter``
partial         replicate   ``all_reduce``
==============  ==========  ===============================

Finer axes are gathered first and reduced last, which makes the bytes sent those of one collective over all ranks.
"""

from typing import Any, TypeVar

import torch

from fsharp.functional.collectives import all_gather_last, all_reduce, local_slice, reduce_scatter_last
from fsharp.functional.comm import Comm, Engine
from fsharp.functional.errors import MeshError, TreeError, problem
from fsharp.functional.layout import UnitLayout
from fsharp.functional.placement import Partial, Place, Replicate, Shard
from fsharp.functional.sharded import PlaceName, Sharded, is_sharded, map_units, resolve_place, units_of

Tree = TypeVar("Tree")


def gather(tree: Tree, *, comm: Comm, to: PlaceName = "full") -> Tree:
    """Move values between places that replicate and shard; by default to every rank.

    Args:
        tree: a :class:`Sharded`, or any pytree with some in it.
        comm: the ranks.
        to: the place, by name or as a :class:`~fsharp.Place`.

    Returns:
        The same tree with its units in that place; ``Sharded.tree()`` of a full one is the user's subtree.

    Raises:
        TreeError: a unit that rests partial, or no unit in the tree.
        MeshError: ``comm`` is on another mesh.

    Cost: along an axis of ``n`` ranks that is gathered, ``(n - 1)`` times the bytes of the part. Slices cost nothing.
    Gradient: :func:`reduce_scatter` back to where it came from.
    """
    check_comm("gather()", tree, comm)

    def one(sharded: Sharded) -> Sharded:
        target = resolve_place(sharded.unit, to)
        if sharded.place.partial or target.partial:
            raise _wrong_place("gather()", sharded, target, "Partial sums are moved by reduce_scatter().")
        moved = [move_values(x, sharded.place, target, comm) for x in sharded.buffers]
        if sharded.sinks:
            if target != sharded.unit.strategy.full:
                raise _wrong_place("gather()", sharded, target, "Inside value_and_grad() parameters are gathered in full.")
            handles = dict(zip(sharded.unit.trainable, with_handles(sharded, comm).sinks, strict=True))
            moved = [_Attach.apply(x, handles[g]) if g in handles else x for g, x in zip(sharded.groups, moved, strict=True)]
        return sharded.replace(moved, target)

    return map_units(lambda node: one(node) if is_sharded(node) else node, tree)  # type: ignore[no-any-return]


def reduce_scatter(tree: Tree, *, comm: Comm, to: PlaceName = "optim") -> Tree:
    """Move sums between places: partial ones are summed over ranks and end up sharded or replicated as ``to`` says.

    Args:
        tree: a :class:`Sharded` of gradients, or any pytree with some in it.
        comm: the ranks.
        to: the place, by name or as a :class:`~fsharp.Place`.

    Returns:
        The same tree with its units in that place, in the accumulation dtype.

    Raises:
        TreeError: a move that would need a gather, or would turn values into partial sums; no unit in the tree.
        MeshError: ``comm`` is on another mesh.

    Cost: along an axis of ``n`` ranks ``(n - 1) / n`` times the bytes of the buffer in the wire dtype, twice that for an
    ``all_reduce``. Sums are in order of rank where the Comm adds itself.
    Gradient: :func:`gather`.
    """
    check_comm("reduce_scatter()", tree, comm)
    if isinstance(comm, Engine):
        return comm.run_reduce_scatter(tree, to)  # type: ignore[no-any-return]

    def one(sharded: Sharded) -> Sharded:
        target = resolve_place(sharded.unit, to)
        for axis in sharded.place.order:
            source = sharded.place[axis]
            if target[axis] is not source and (source is Shard or target[axis] is Partial):
                raise _wrong_place("reduce_scatter()", sharded, target, "Shards are moved by gather().")
        moved = [
            move_sums(x, sharded.unit, g, sharded.place, target, comm)
            for g, x in zip(sharded.groups, sharded.buffers, strict=True)
        ]
        return sharded.replace(moved, target)

    return map_units(lambda node: one(node) if is_sharded(node) else node, tree)  # type: ignore[no-any-return]


def move_values(x: torch.Tensor, source: Place, target: Place, comm: Comm) -> torch.Tensor:
    """One buffer between places that replicate and shard."""
    for axis in reversed(source.order):
        if source[axis] is Shard and target[axis] is Replicate:
            x = all_gather_last(x, comm, axis)
    for axis in source.order:
        if source[axis] is Replicate and target[axis] is Shard:
            x = local_slice(x, comm, axis)
    return x


def move_sums(x: torch.Tensor, unit: UnitLayout, group: int, source: Place, target: Place, comm: Comm) -> torch.Tensor:
    """One buffer of gradients from partial sums to where ``target`` wants them."""
    dtypes = unit.groups[group].dtypes
    for axis in source.order:
        if target[axis] is Shard and source[axis] is Partial:
            x = reduce_scatter_last(x.to(dtypes.wire), comm, axis, dtype=dtypes.accumulate)
        elif target[axis] is Shard and source[axis] is Replicate:
            x = local_slice(x, comm, axis)
    for axis in source.order:
        if target[axis] is Replicate and source[axis] is Partial:
            x = _all_reduce(x.to(dtypes.wire), comm, axis, dtypes.accumulate)
    return x.to(dtypes.accumulate)


def _all_reduce(x: torch.Tensor, comm: Comm, axis: str, dtype: torch.dtype) -> torch.Tensor:
    n = comm.mesh.axis_size(axis)
    if n == 1 or x.dtype == dtype:
        return all_reduce(x, comm, axis).to(dtype)
    # A wire narrower than the sum: only the summands travel in it, so that every strategy gets the same bits.
    size = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -size % n))
    return all_gather_last(reduce_scatter_last(padded, comm, axis, dtype=dtype), comm, axis)[..., :size]


class Ledger:
    """The handles of one microbatch: through them all uses of a unit share one reduction.

    A handle is a tensor without memory in the shape of the full buffer and the accumulation dtype. Autograd adds into it
    what each use contributes, and then reduces the sum into the sink, once.
    """

    def __init__(self) -> None:
        self._handles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.is_used = False

    def handle(self, sink: torch.Tensor, unit: UnitLayout, group: int, comm: Comm) -> torch.Tensor:
        """The handle of a sink. Made at the first use: the engine runs what was made last first, so it does not lie idle."""
        self.is_used = True
        if torch._C._are_functorch_transforms_active():  # a tensor made at their level does not outlive it
            return _Deliver.apply(sink, unit, group, comm)  # type: ignore[no-any-return]
        if id(sink) not in self._handles:
            self._handles[id(sink)] = (sink, _Deliver.apply(sink, unit, group, comm))
        return self._handles[id(sink)][1]


def with_handles(node: Sharded, comm: Comm) -> Sharded:
    """The node with the handles of its sinks in their place."""
    if node.ledger is None:
        return node
    handles = [node.ledger.handle(x, node.unit, g, comm) for g, x in zip(node.unit.trainable, node.sinks, strict=True)]
    return Sharded(node.buffers, node.unit, node.place, node.groups, handles)


class _Deliver(torch.autograd.Function):
    """A sink's handle. What arrives at it is reduced to where gradients rest, in the dtype they rest in.

    Without it a gradient would have the dtype and place of the parameter: a bfloat16 parameter's gradient could not be
    summed in float32, and ZeRO-2's full gradients would all exist before the first of them is reduced.
    """

    @staticmethod
    def forward(sink: torch.Tensor, unit: UnitLayout, group: int, comm: Comm) -> torch.Tensor:
        return sink.new_zeros(()).expand(unit.groups[group].size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.unit, ctx.group, ctx.comm = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if cotangents[0] is None:  # used, and no gradient came of it
            return None, None, None, None
        strategy = ctx.unit.strategy
        moved = move_sums(cotangents[0], ctx.unit, ctx.group, strategy.full.dual, strategy.grads, ctx.comm)
        return moved, None, None, None


class _Attach(torch.autograd.Function):
    """A full buffer whose gradient goes to a handle."""

    @staticmethod
    def forward(full: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
        return full.view_as(full)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, cotangents[0].to(ctx.dtype)


def check_comm(where: str, tree: Any, comm: Comm) -> None:
    """Refuse a tree without units, and a Comm on another mesh than theirs.

    Raises:
        TreeError: no :class:`Sharded` in the tree.
        MeshError: the meshes differ.
    """
    nodes = units_of(tree)
    if not nodes:
        raise TreeError(f"{where}: expected a tree of Sharded, got {type(tree).__name__}: shard() it first.")
    for node in nodes:
        if node.unit.mesh != comm.mesh:
            facts = [("unit", f"{node.name!r} on {node.unit.mesh}"), ("comm", comm.mesh)]
            raise MeshError(problem(where, "the Comm is on another mesh than the layout.", facts))


def _wrong_place(where: str, sharded: Sharded, target: Place, remedy: str) -> TreeError:
    facts = [("unit", repr(sharded.name)), ("rests", sharded.place), ("asked for", target)]
    return TreeError(problem(where, "no such move.", facts, remedy))
