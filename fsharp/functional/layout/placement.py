r"""Where tensors rest: one placement for each mesh axis, and a strategy that says so for each of three kinds of state.

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

Gradients rest between microbatches as the table says; the update wants them where the optimizer state rests.

Along an axis where ranks have parameters of their own, as experts do along an expert-parallel one, nothing of theirs is ever
moved: ``zero3("dp").varying("ep")``.

A partition spec, ``P("dp")``, is another way to write those of the strategies whose three kinds of state rest alike.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from fsharp.errors import LayoutError, StrategyError, problem
from fsharp.functional.layout.mesh import Mesh
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_explained


class Placement(Enum):
    """How one tensor relates to the ranks along one mesh axis."""

    REPLICATE = "replicate"
    """Every rank holds the whole value."""
    SHARD = "shard"
    """Each rank holds one contiguous part; in order of coordinate they make the value."""
    PARTIAL = "partial"
    """Each rank holds a summand of the same shape; their sum is the value."""
    VARY = "vary"
    """Each rank holds a value of its own, of the same shape; no collective runs along this axis."""

    def __repr__(self) -> str:
        return self.name.capitalize()


Replicate, Shard, Partial, Vary = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL, Placement.VARY


@options_explained
@dataclass(frozen=True, slots=True)
class AxisRule:
    """What one mesh axis does to each kind of state; Vary for all three, or for none.

    Args:
        params: Replicate or Shard.
        grads: Partial or Shard; the place between microbatches.
        optim: Replicate or Shard; also the place of a main copy of the parameters.
    """

    params: Placement
    grads: Placement
    optim: Placement


_REASONS = (
    (
        lambda r: 0 < (r.params, r.grads, r.optim).count(Vary) < 3,
        "parameters that vary have gradients and optimizer state that do, and no others",
    ),
    (
        lambda r: r.params is Partial or r.optim is Partial,
        "only gradients can be partial sums: parameters and optimizer state are values that ranks read",
    ),
    (
        lambda r: r.grads is Replicate,
        "replicated gradients cost an all_reduce in every microbatch and take as much memory as partial ones",
    ),
    (
        lambda r: r.params is Shard and r.optim is Replicate,
        "a rank that keeps a part of the parameters can update no more than that part",
    ),
    (
        lambda r: r.grads is Shard and r.optim is Replicate,
        "a rank that keeps a part of the gradients can update no more than that part",
    ),
)


@dataclass(frozen=True, slots=True)
class Place:
    """One placement for each mesh axis: where one kind of tensor rests.

    Sharded axes cut the flat buffer one after another in ``order``, so the parts that a rank holds under any two places
    of a strategy nest, and every change of place is a collective along one axis at a time, without a transpose.

    Args:
        order: every axis of the mesh. The first axis that shards cuts the buffer into the largest parts.
        placements: the placement of each axis, in that order.
    """

    order: tuple[str, ...]
    placements: tuple[Placement, ...]

    def __getitem__(self, axis: str) -> Placement:
        return self.placements[self.order.index(axis)]

    @property
    def sharded(self) -> tuple[str, ...]:
        """Axes that shard, in the order in which they cut."""
        return self._axes(Shard)

    @property
    def partial(self) -> tuple[str, ...]:
        """Axes along which this is a partial sum."""
        return self._axes(Partial)

    @property
    def replicated(self) -> tuple[str, ...]:
        """Axes along which every rank holds the same."""
        return self._axes(Replicate)

    @property
    def varying(self) -> tuple[str, ...]:
        """Axes along which every rank holds a value of its own."""
        return self._axes(Vary)

    @property
    def dual(self) -> "Place":
        """Where the cotangent of a tensor in this place rests: shards stay shards, copies and summands change places.

        A value that ranks share is used by each of them, so each holds a summand of its gradient; a summand goes into
        one sum, whose gradient ranks share.
        """
        swap = {Replicate: Partial, Partial: Replicate, Shard: Shard, Vary: Vary}
        return Place(self.order, tuple(swap[p] for p in self.placements))

    def _axes(self, kind: Placement) -> tuple[str, ...]:
        if kind not in self.placements:
            return ()
        return tuple([axis for axis, p in zip(self.order, self.placements, strict=True) if p is kind])

    def __str__(self) -> str:
        return ", ".join(f"{axis}:{p!r}" for axis, p in zip(self.order, self.placements, strict=True)) or "whole"

    def __repr__(self) -> str:
        return f"Place({self})"


@dataclass(frozen=True, slots=True, init=False)
class Strategy:
    """For each mesh axis, where parameters, gradients and optimizer state rest.

    >>> Strategy({"a": AxisRule(params=Replicate, grads=Partial, optim=Shard),
    ...           "b": AxisRule(params=Replicate, grads=Shard, optim=Shard)}).grads
    Place(b:Shard, a:Partial)

    Raises:
        StrategyError: placements that are illegal on an axis, or that do not nest across axes; the text says why.
    """

    rules: tuple[tuple[str, AxisRule], ...]
    order: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Axes in the order in which they cut a flat buffer: those that shard most kinds of state lead."""
    params: Place = field(init=False, repr=False, compare=False)
    """Where parameters rest."""
    grads: Place = field(init=False, repr=False, compare=False)
    """Where gradients rest between microbatches."""
    optim: Place = field(init=False, repr=False, compare=False)
    """Where optimizer state, main copies and finished gradients rest."""
    full: Place = field(init=False, repr=False, compare=False)
    """Replicated on every axis along which it does not vary: the place in which functions use parameters."""

    @options_explained
    def __init__(self, rules: Mapping[str, AxisRule]) -> None:
        if not rules:
            raise StrategyError("Strategy(): no axis; name at least one, for example zero3('dp').")
        for axis, rule in rules.items():
            if not isinstance(rule, AxisRule):
                raise StrategyError(f"Strategy(): axis {axis!r} has {rule!r:.80}, expected an AxisRule.")
            for is_bad, reason in _REASONS:
                if is_bad(rule):
                    raise StrategyError(
                        problem(
                            "Strategy()",
                            f"illegal placement on axis {axis!r}: {reason}.",
                            [("params", repr(rule.params)), ("grads", repr(rule.grads)), ("optim", repr(rule.optim))],
                        )
                    )
        object.__setattr__(self, "rules", tuple(rules.items()))
        count = {axis: [r.params, r.grads, r.optim].count(Shard) for axis, r in rules.items()}
        order = tuple(sorted(count, key=lambda axis: -count[axis]))
        object.__setattr__(self, "order", order)
        for kind in ("params", "grads", "optim"):
            object.__setattr__(self, kind, Place(order, tuple(getattr(rules[axis], kind) for axis in order)))
        full = tuple(Vary if rules[axis].params is Vary else Replicate for axis in order)
        object.__setattr__(self, "full", Place(order, full))
        kinds = {kind: {a for a, r in rules.items() if getattr(r, kind) is Shard} for kind in ("params", "grads")}
        if not (kinds["params"] <= kinds["grads"] or kinds["grads"] <= kinds["params"]):
            raise StrategyError(
                problem(
                    "Strategy()",
                    "sharded axes of parameters and gradients do not nest: one rank's parts would not be contiguous.",
                    [(kind, f"sharded on {sorted(axes)}") for kind, axes in kinds.items()],
                    "Shard the gradients on every axis that shards the parameters, or the reverse.",
                )
            )

    @api_boundary
    def varying(self, *axes: str) -> "Strategy":
        """Return this strategy for parameters of which every rank along ``axes`` has its own, such as experts.

        >>> zero3("dp").varying("ep").params
        Place(dp:Shard, ep:Vary)

        Gradients are summed over the ranks that have the same parameters, and no others: what an expert has done for
        other ranks' losses comes to it through the exchange of tokens.

        Raises:
            StrategyError: an axis that the strategy names already.
        """
        taken = {axis for axis, _ in self.rules} & set(axes)
        if not axes or taken:
            raise StrategyError(f"varying(): expected axes other than those of the strategy ({self}), got {list(axes)}.")
        return Strategy({**dict(self.rules), **dict.fromkeys(axes, AxisRule(Vary, Vary, Vary))})

    @api_boundary
    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh whose axes are not the ones this strategy names.

        Raises:
            StrategyError: an axis that only one of the two has.
        """
        named = {axis for axis, _ in self.rules}
        for axis in sorted(named - set(mesh.names)):
            raise StrategyError(f"Strategy names the unknown axis {axis!r}: {mesh} has {list(mesh.names)}.")
        for axis in sorted(set(mesh.names) - named):
            raise StrategyError(f"Strategy says nothing of axis {axis!r} of {mesh}; it names {sorted(named)}.")

    def __str__(self) -> str:
        short = {Replicate: "R", Shard: "S", Partial: "P", Vary: "V"}
        return ", ".join(f"{a}: {short[r.params]}{short[r.grads]}{short[r.optim]}" for a, r in self.rules)


def _uniform(name: str, axes: tuple[str, ...], rule: AxisRule) -> Strategy:
    if not axes or len(set(axes)) != len(axes) or not all(isinstance(axis, str) for axis in axes):
        raise StrategyError(f"{name}(): expected one or more different axis names, got {list(axes)}.")
    return Strategy(dict.fromkeys(axes, rule))


@options_explained
def ddp(*axes: str) -> Strategy:
    """Everything replicated, gradients all-reduced once a step. Source: PyTorch DDP, arXiv 2006.15704."""
    return _uniform("ddp", axes, AxisRule(Replicate, Partial, Replicate))


@options_explained
def zero1(*axes: str) -> Strategy:
    """Optimizer state sharded. Source: ZeRO, arXiv 1910.02054, stage 1."""
    return _uniform("zero1", axes, AxisRule(Replicate, Partial, Shard))


@options_explained
def zero2(*axes: str) -> Strategy:
    """Optimizer state and gradients sharded. Source: ZeRO, arXiv 1910.02054, stage 2."""
    return _uniform("zero2", axes, AxisRule(Replicate, Shard, Shard))


@options_explained
def zero3(*axes: str) -> Strategy:
    """Optimizer state, gradients and parameters sharded: the default choice. Source: ZeRO stage 3, arXiv 1910.02054."""
    return _uniform("zero3", axes, AxisRule(Shard, Shard, Shard))


def _hybrid(name: str, outer: str, inner: str, outer_rule: AxisRule) -> Strategy:
    if outer == inner:
        raise StrategyError(f"{name}(): outer and inner are the same axis {outer!r}; a hybrid needs two.")
    return Strategy({outer: outer_rule, inner: AxisRule(Shard, Shard, Shard)})


@options_explained
def hsdp(outer: str, inner: str) -> Strategy:
    """ZeRO-3 inside ``inner``, plain replicas across ``outer``. Source: PyTorch FSDP, arXiv 2304.11277, section 3.2.2."""
    return _hybrid("hsdp", outer, inner, AxisRule(Replicate, Partial, Replicate))


@options_explained
def hfsdp(outer: str, inner: str) -> Strategy:
    """ZeRO-3 inside ``inner``, ZeRO-1 across ``outer``: optimizer state is sharded over both. Source: Megatron-FSDP."""
    return _hybrid("hfsdp", outer, inner, AxisRule(Replicate, Partial, Shard))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class P:
    """Which mesh axes cut each dim of a leaf, in the words of ``jax.sharding.PartitionSpec``.

    :func:`~fsharp.plan` takes it in place of a strategy. Along the axes that it names, parameters, gradients and optimizer
    state are sharded, and rows (indices of dim 0) are never cut. Along the others, parameters and optimizer state are
    replicated.

    ==========================  ================================================
    ``P()``                     ``ddp`` over all axes of the mesh
    ``P("dp")``                 ``zero3("dp")`` with ``atoms=Rows(1)``
    ``P("inner")``              ``hsdp("outer", "inner")`` with ``atoms=Rows(1)``
    ``P(("outer", "inner"))``   ``zero3("outer", "inner")`` with ``atoms=Rows(1)``
    ==========================  ================================================

    A unit rests as one buffer that ranks cut into equal parts. So a leaf has the same number of rows on every rank if it is a
    unit of its own and its rows divide evenly; otherwise ranks hold different numbers of its rows.
    :func:`fsharp.inspect.sharding` shows which. Where optimizer state rests elsewhere than parameters, name a strategy:
    ``zero1``, ``zero2``, ``hfsdp``.

    >>> P("dp", None), P(("outer", "inner")), P()
    (P('dp', None), P(('outer', 'inner')), P())

    Args:
        partitions: for each dim, from dim 0 on: the name of an axis, a tuple of names of which the first cuts first, or
            None. Dims that are left out are not cut.

    Raises:
        StrategyError: an entry of another type, or an axis that is named twice.
    """

    partitions: tuple[str | tuple[str, ...] | None, ...]

    @api_boundary
    def __init__(self, *partitions: str | tuple[str, ...] | None) -> None:
        for dim, entry in enumerate(partitions):
            if not isinstance(entry, str | tuple | None) or not all(isinstance(a, str) and a for a in _axes(entry)):
                raise StrategyError(f"P(): dim {dim} is {entry!r}, expected the name of an axis, a tuple of names, or None.")
        cuts = [_axes(entry) for entry in partitions]
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
        """The axes that cut dim 0, in the order in which they cut."""
        return _axes(self.partitions[0]) if self.partitions else ()

    @api_boundary
    def strategy(self, mesh: Mesh, *, path: str, shape: tuple[int, ...]) -> Strategy:
        """Return the strategy on ``mesh`` under which a leaf rests as this spec says.

        Args:
            mesh: the ranks.
            path: of the leaf, for the texts of errors.
            shape: of the leaf.

        Raises:
            StrategyError: an axis that the mesh does not have.
            LayoutError: more dims than the leaf has, or a dim other than the first one is cut.
        """
        facts = [("leaf", f"params[{path!r}] of shape {list(shape)}"), ("spec", repr(self)), ("mesh", str(mesh))]
        unknown = [axis for entry in self.partitions for axis in _axes(entry) if axis not in mesh.names]
        if unknown:
            what = f"a partition spec names the unknown axis {unknown[0]!r}."
            raise StrategyError(problem("plan()", what, facts, f"Name axes of the mesh: {list(mesh.names)}."))
        if len(self.partitions) > len(shape):
            what = f"a partition spec of {len(self.partitions)} dims is given to a leaf of {len(shape)}."
            remedy = "Leave out the last dims where they are None, as in P('dp'). A scalar takes P(), in a unit of its own."
            raise LayoutError(problem("plan()", what, facts, remedy))
        if any(self.partitions[1:]):
            what = "a partition spec cuts another dim than dim 0: a unit is one flat buffer, of which a rank holds a run."
            remedy = "Cut dim 0, or store the leaf with that dim first and transpose it in the function."
            raise LayoutError(problem("plan()", what, facts, remedy))
        others = dict.fromkeys((a for a in mesh.names if a not in self.axes), AxisRule(Replicate, Partial, Replicate))
        return Strategy({**others, **dict.fromkeys(self.axes, AxisRule(Shard, Shard, Shard))})


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
