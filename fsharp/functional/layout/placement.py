r"""Placements of tensors on mesh axes. A strategy has a placement of parameters, of gradients and of optimizer state.

The whole library reads these tables; nothing in it asks for a strategy by name.

====================  =====  ======================  =====================  ======================
strategy              axis   parameters              gradients              optimizer state
====================  =====  ======================  =====================  ======================
``ddp``               dp     replicated              partial                replicated
``zero1``             dp     replicated              partial                sharded
``zero2``             dp     replicated              sharded                sharded
``zero3``             dp     sharded                 sharded                sharded
``hsdp``              outer  replicated              partial                replicated
\                     inner  sharded                 sharded                sharded
``hfsdp``             outer  replicated              partial                sharded
\                     inner  sharded                 sharded                sharded
====================  =====  ======================  =====================  ======================

Gradients rest between microbatches as the table says. The update takes gradients in the place of the optimizer state.

Along an axis on which ranks have parameters of their own, such as experts, parameters and gradients are never moved:
    ``zero3("dp").varying("ep")``.

A partition spec, ``P("dp")``, is a short form of a strategy whose three kinds of state rest alike.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from fsharp.errors import LayoutError, StrategyError, problem
from fsharp.functional.layout.mesh import Mesh
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked, options_checked_on_failure


class Placement(Enum):
    """How the ranks along one mesh axis hold one tensor."""

    REPLICATE = "replicate"
    """Every rank holds the whole value."""
    SHARD = "shard"
    """Each rank holds one contiguous part; the parts, in order of coordinate, are the value."""
    PARTIAL = "partial"
    """Each rank holds a summand with the shape of the value; the sum of all summands is the value."""
    VARYING = "vary"
    """Each rank holds a different value; all values have equal shapes, and no collective runs along this axis."""

    def __repr__(self) -> str:
        return self.name.capitalize()


Replicate, Shard, Partial, Varying = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL, Placement.VARYING


@options_checked
@dataclass(frozen=True, slots=True)
class AxisRule:
    """Placements of parameters, gradients and optimizer state along one mesh axis. Either all three are ``Varying``, or none.

    Nothing is checked here: :class:`Strategy` refuses illegal placements.

    Args:
        params: ``Replicate`` or ``Shard``.
        grads: ``Partial`` or ``Shard``: how gradients rest between microbatches.
        optim: ``Replicate`` or ``Shard``: also the placement of main copies of parameters.
    """

    params: Placement
    grads: Placement
    optim: Placement


def _why_illegal(rule: AxisRule) -> str | None:
    """Return why the placements along an axis are illegal; None if they are legal."""
    params, grads, optim = rule.params, rule.grads, rule.optim
    if 0 < (params, grads, optim).count(Varying) < 3:
        return (
            "if one of the three is Varying, all three have to be: a rank with its own parameters has its own gradients and "
            "state"
        )
    if params is Partial or optim is Partial:
        return "only gradients can be partial sums: parameters and optimizer state are values that ranks read"
    if grads is Replicate:
        return "replicated gradients cost an all_reduce in every microbatch and take as much memory as partial ones"
    for name, kind in (("parameters", params), ("gradients", grads)):
        if kind is Shard and optim is Replicate:
            return f"a rank that keeps a part of the {name} can update no more than that part"
    return None


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """The placement of one kind of tensor on each mesh axis.

    A flat buffer is cut along the axes with ``Shard``, one axis after another, in ``axis_order``. All places of a strategy have
    the same ``axis_order``, and of two places one shards all axes that the other shards. So the elements that a rank holds in a
    place are also on this rank in each place of the strategy with fewer sharded axes. A move between two places takes at most
    one collective for each axis, and keeps the order of the elements.

    Args:
        axis_order: all axes of the mesh. The first axis that shards cuts the buffer into the largest parts.
        placements: the placement along each axis, in the order of ``axis_order``.
    """

    axis_order: tuple[str, ...]
    placements: tuple[Placement, ...]

    def __getitem__(self, axis: str) -> Placement:
        return self.placements[self.axis_order.index(axis)]

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """Axes that shard, in the order in which they cut."""
        return self._axes_with(Shard)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes along which each rank holds a summand."""
        return self._axes_with(Partial)

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Axes along which every rank holds the same value."""
        return self._axes_with(Replicate)

    @property
    def varying_axes(self) -> tuple[str, ...]:
        """Axes along which every rank holds a different value."""
        return self._axes_with(Varying)

    @property
    def cotangent_place(self) -> "MeshPlacement":
        """The place of the cotangent of a tensor in this place: ``Replicate`` and ``Partial`` are swapped.

        All ranks use a replicated value, so each rank holds a summand of the value's gradient. The summands of a partial value
        make one sum, and all ranks share the gradient of this sum.
        """
        swap = {Replicate: Partial, Partial: Replicate, Shard: Shard, Varying: Varying}
        return MeshPlacement(self.axis_order, tuple(swap[p] for p in self.placements))

    def _axes_with(self, placement: Placement) -> tuple[str, ...]:
        if placement not in self.placements:
            return ()
        return tuple([axis for axis, p in zip(self.axis_order, self.placements, strict=True) if p is placement])

    def __str__(self) -> str:
        return ", ".join(f"{axis}:{p!r}" for axis, p in zip(self.axis_order, self.placements, strict=True)) or "whole"

    def __repr__(self) -> str:
        return f"MeshPlacement({self})"


@dataclass(frozen=True, slots=True, init=False)
class Strategy:
    """The placements of parameters, gradients and optimizer state: an :class:`~fsharp.layouts.AxisRule` for each mesh axis.

    >>> Strategy({"a": AxisRule(params=Replicate, grads=Partial, optim=Shard),
    ...           "b": AxisRule(params=Replicate, grads=Shard, optim=Shard)}).grads
    MeshPlacement(b:Shard, a:Partial)

    Raises:
        StrategyError: there is no axis, or placements are illegal on an axis.
        StrategyError: one axis shards parameters but not gradients, while another axis shards gradients but not parameters.
    """

    rules: tuple[tuple[str, AxisRule], ...]
    axis_order: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Axes in the order in which they cut a flat buffer: axes that shard more kinds of state come first."""
    params: MeshPlacement = field(init=False, repr=False, compare=False)
    """Where parameters rest."""
    grads: MeshPlacement = field(init=False, repr=False, compare=False)
    """Where gradients rest between microbatches."""
    optim: MeshPlacement = field(init=False, repr=False, compare=False)
    """Where optimizer state, main copies and finished gradients rest."""
    full: MeshPlacement = field(init=False, repr=False, compare=False)
    """The place in which functions use parameters: ``Replicate`` on every axis, except on axes with ``Varying``."""

    @options_checked_on_failure
    def __init__(self, rules: Mapping[str, AxisRule]) -> None:
        if not rules:
            raise StrategyError("Strategy(): no axis; name at least one, for example zero3('dp').")
        for axis, rule in rules.items():
            if not isinstance(rule, AxisRule):
                raise StrategyError(f"Strategy(): axis {axis!r} has {rule!r:.80}, expected an AxisRule.")
            if (reason := _why_illegal(rule)) is not None:
                facts = [("params", repr(rule.params)), ("grads", repr(rule.grads)), ("optim", repr(rule.optim))]
                raise StrategyError(problem("Strategy()", f"illegal placement on axis {axis!r}: {reason}.", facts))
        object.__setattr__(self, "rules", tuple(rules.items()))
        count = {axis: [r.params, r.grads, r.optim].count(Shard) for axis, r in rules.items()}
        order = tuple(sorted(count, key=lambda axis: -count[axis]))
        object.__setattr__(self, "axis_order", order)
        places = dict[MeshPlacement, MeshPlacement]()
        for kind in ("params", "grads", "optim"):
            place = MeshPlacement(order, tuple(getattr(rules[axis], kind) for axis in order))
            object.__setattr__(self, kind, places.setdefault(place, place))  # equal places are one object: cheap to compare
        full = tuple(Varying if rules[axis].params is Varying else Replicate for axis in order)
        object.__setattr__(self, "full", MeshPlacement(order, full))
        kinds = {kind: {a for a, r in rules.items() if getattr(r, kind) is Shard} for kind in ("params", "grads")}
        if not (kinds["params"] <= kinds["grads"] or kinds["grads"] <= kinds["params"]):
            facts = [(kind, f"sharded on {sorted(axes)}") for kind, axes in kinds.items()]
            remedy = "Shard the gradients on every axis that shards the parameters, or the reverse."
            what = "sharded axes of parameters and gradients do not nest: one rank's parts would not be contiguous."
            raise StrategyError(problem("Strategy()", what, facts, remedy))

    @options_checked_on_failure
    def varying(self, *axes: str) -> "Strategy":
        """Return this strategy for parameters that differ from rank to rank along ``axes``, such as experts.

        >>> zero3("dp").varying("ep").params
        MeshPlacement(dp:Shard, ep:Varying)

        Gradients are summed over ranks that hold the same parameters, and over no other ranks. An expert gets gradients of
        other ranks' losses through the backward of an exchange of tokens, :func:`~fsharp.collectives.all_to_all_last`.

        Raises:
            StrategyError: the strategy has a rule for one of ``axes`` already, or ``axes`` is empty.
        """
        taken = {axis for axis, _ in self.rules} & set(axes)
        if not axes or taken:
            raise StrategyError(f"varying(): expected axes other than those of the strategy ({self}), got {list(axes)}.")
        return Strategy({**dict(self.rules), **dict.fromkeys(axes, AxisRule(Varying, Varying, Varying))})

    @api_boundary
    def check_mesh(self, mesh: Mesh) -> None:
        """Raise a StrategyError if the axes of a mesh differ from the axes of this strategy."""
        named = {axis for axis, _ in self.rules}
        for axis in sorted(named - set(mesh.names)):
            raise StrategyError(
                f"Strategy names the unknown axis {axis!r}: {mesh} has {list(mesh.names)}. Name these axes in the strategy, or "
                f"{axis!r} in the mesh."
            )
        for axis in sorted(set(mesh.names) - named):
            raise StrategyError(
                f"Strategy has no rule for axis {axis!r} of {mesh}: its axes are {sorted(named)}. Name all axes of the mesh."
            )

    def __str__(self) -> str:
        short = {Replicate: "R", Shard: "S", Partial: "P", Varying: "V"}
        return ", ".join(f"{a}: {short[r.params]}{short[r.grads]}{short[r.optim]}" for a, r in self.rules)


def _same_rule_on_axes(name: str, axes: tuple[str, ...], rule: AxisRule) -> Strategy:
    if not axes or len(set(axes)) != len(axes) or not all(isinstance(axis, str) for axis in axes):
        raise StrategyError(f"{name}(): expected one or more different axis names, got {list(axes)}.")
    return Strategy(dict.fromkeys(axes, rule))


@options_checked_on_failure
def ddp(*axes: str) -> Strategy:
    """Return the strategy of DDP: all state is replicated, and gradients are all-reduced once a step.

    ``axes``: names of all axes of the mesh. StrategyError if there is no name, or a name repeats.
    Source: PyTorch DDP, arXiv 2006.15704.
    """
    return _same_rule_on_axes("ddp", axes, AxisRule(Replicate, Partial, Replicate))


@options_checked_on_failure
def zero1(*axes: str) -> Strategy:
    """Return the strategy of ZeRO-1: optimizer state is sharded, parameters and gradients are not.

    ``axes``: names of all axes of the mesh. StrategyError if there is no name, or a name repeats.
    Source: ZeRO, arXiv 1910.02054, stage 1.
    """
    return _same_rule_on_axes("zero1", axes, AxisRule(Replicate, Partial, Shard))


@options_checked_on_failure
def zero2(*axes: str) -> Strategy:
    """Return the strategy of ZeRO-2: optimizer state and gradients are sharded, parameters are replicated.

    ``axes``: names of all axes of the mesh. StrategyError if there is no name, or a name repeats.
    Source: ZeRO, arXiv 1910.02054, stage 2.
    """
    return _same_rule_on_axes("zero2", axes, AxisRule(Replicate, Shard, Shard))


@options_checked_on_failure
def zero3(*axes: str) -> Strategy:
    """Return the strategy of ZeRO-3 and FSDP: parameters, gradients and optimizer state are sharded. The usual choice.

    ``axes``: names of all axes of the mesh. StrategyError if there is no name, or a name repeats.
    Source: ZeRO, arXiv 1910.02054, stage 3.
    """
    return _same_rule_on_axes("zero3", axes, AxisRule(Shard, Shard, Shard))


def _hybrid_strategy(name: str, outer: str, inner: str, outer_rule: AxisRule) -> Strategy:
    if outer == inner:
        raise StrategyError(f"{name}(): outer and inner are the same axis {outer!r}; a hybrid needs two.")
    return Strategy({outer: outer_rule, inner: AxisRule(Shard, Shard, Shard)})


@options_checked_on_failure
def hsdp(outer: str, inner: str) -> Strategy:
    """Return the strategy of HSDP: ZeRO-3 along the axis ``inner``, replicas along the axis ``outer``.

    Source: PyTorch FSDP, arXiv 2304.11277, section 3.2.2.
    """
    return _hybrid_strategy("hsdp", outer, inner, AxisRule(Replicate, Partial, Replicate))


@options_checked_on_failure
def hfsdp(outer: str, inner: str) -> Strategy:
    """Return the strategy of HFSDP: ZeRO-3 along the axis ``inner``, ZeRO-1 along the axis ``outer``.

    Optimizer state is sharded over both axes, parameters over ``inner`` alone. Source: Megatron-FSDP.
    """
    return _hybrid_strategy("hfsdp", outer, inner, AxisRule(Replicate, Partial, Shard))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class P:
    """A partition spec: the mesh axes that cut each dim of a leaf, as in ``jax.sharding.PartitionSpec``.

    :func:`~fsharp.plan` takes a spec in place of a strategy. Along the axes in the spec, parameters, gradients and optimizer
    state are sharded, and no row (index of dim 0) is cut. Along the other axes, parameters and optimizer state are replicated.

    ==========================  ================================================
    ``P()``                     ``ddp`` over all axes of the mesh
    ``P("dp")``                 ``zero3("dp")`` with ``atoms=RowsAtom(1)``
    ``P("inner")``              ``hsdp("outer", "inner")`` with ``atoms=RowsAtom(1)``
    ``P(("outer", "inner"))``   ``zero3("outer", "inner")`` with ``atoms=RowsAtom(1)``
    ==========================  ================================================

    The leaves of a unit share flat buffers, which are cut into equal parts. So a leaf has equally many rows on every rank
    only if the leaf is a unit of its own and its rows divide evenly. :func:`fsharp.inspect.sharding` shows the rows of each
    rank. If parameters and optimizer state are to rest in different places, pass a strategy: ``zero1``, ``zero2`` or ``hfsdp``.

    >>> P("dp", None), P(("outer", "inner")), P()
    (P('dp', None), P(('outer', 'inner')), P())

    Args:
        partitions: one entry for each dim, from dim 0 on: the name of an axis, a tuple of names whose first axis cuts first, or
            None. Dims without an entry are not cut.

    Raises:
        StrategyError: an entry has another type, or an axis occurs twice.
    """

    partitions: tuple[str | tuple[str, ...] | None, ...]

    @api_boundary
    def __init__(self, *partitions: str | tuple[str, ...] | None) -> None:
        for dim, entry in enumerate(partitions):
            if not isinstance(entry, str | tuple | None) or not all(isinstance(a, str) and a for a in _axes_of_entry(entry)):
                raise StrategyError(f"P(): dim {dim} is {entry!r}, expected the name of an axis, a tuple of names, or None.")
        cuts = [_axes_of_entry(entry) for entry in partitions]
        entries = tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in cuts)
        object.__setattr__(self, "partitions", entries)
        named = [axis for axes in cuts for axis in axes]
        for axis in named:
            if named.count(axis) > 1:
                raise StrategyError(f"P(): axis {axis!r} is named twice in {self!r}; an axis cuts one dim, and once.")

    def __iter__(self) -> Iterator[str | tuple[str, ...] | None]:
        return iter(self.partitions)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.partitions))})"

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that cut dim 0; the first axis cuts first."""
        return _axes_of_entry(self.partitions[0]) if self.partitions else ()

    @api_boundary
    def strategy(self, mesh: Mesh, *, path: str, shape: tuple[int, ...]) -> Strategy:
        """Return the strategy that shards a leaf on ``mesh`` as this spec says: parameter, gradient and optimizer state alike.

        Args:
            mesh: the ranks.
            path: path of the leaf, for error messages.
            shape: shape of the leaf.

        Raises:
            StrategyError: the mesh lacks an axis of the spec.
            LayoutError: the spec has more dims than the leaf, or cuts a dim other than dim 0.
        """
        facts = [("leaf", f"params[{path!r}] of shape {list(shape)}"), ("spec", repr(self)), ("mesh", str(mesh))]
        unknown = [axis for entry in self.partitions for axis in _axes_of_entry(entry) if axis not in mesh.names]
        if unknown:
            what = f"a partition spec names the unknown axis {unknown[0]!r}."
            raise StrategyError(problem("plan()", what, facts, f"Name axes of the mesh: {list(mesh.names)}."))
        if len(self.partitions) > len(shape):
            what = f"a partition spec of {len(self.partitions)} dims is given to a leaf of {len(shape)}."
            remedy = "Leave out the last dims where they are None, as in P('dp'). A scalar takes P(), in a unit of its own."
            raise LayoutError(problem("plan()", what, facts, remedy))
        if any(self.partitions[1:]):
            what = "a partition spec cuts another dim than dim 0: leaves share a flat buffer, of which a rank holds a run."
            remedy = "Cut dim 0, or store the leaf with that dim first and transpose it in the function."
            raise LayoutError(problem("plan()", what, facts, remedy))
        others = dict.fromkeys((a for a in mesh.names if a not in self.axes), AxisRule(Replicate, Partial, Replicate))
        return Strategy({**others, **dict.fromkeys(self.axes, AxisRule(Shard, Shard, Shard))})


def _axes_of_entry(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
