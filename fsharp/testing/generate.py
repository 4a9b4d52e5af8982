"""Hypothesis strategies for meshes, sharding strategies, trees and layouts, for property tests of sharding.

Importing this module imports hypothesis; nothing else in the library does.

Values are small integers in every dtype, so that sums over ranks are exact and can be compared bit for bit.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from hypothesis import strategies as st

from fsharp.errors import StrategyError
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.packing import Atom, ElementAtom, LeafAtom, RowsAtom
from fsharp.functional.layout.placement import AxisRule, Partial, Replicate, Shard, Strategy
from fsharp.functional.layout.plan import find_tie_owners, plan
from fsharp.functional.layout.precision import Precision
from fsharp.functional.tree.paths import flatten_with_paths, self_and_ancestors
from fsharp.type_checks import options_checked

V = TypeVar("V")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of leaves that are trained."""
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64)
"""Dtypes of leaves. Leaves of dtypes that are not in :data:`FLOATS` are frozen."""

_MAX_ABS_INTEGER = 4
_DIM_SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 11, 13)
_AXIS_RULES = (
    AxisRule(Shard, Shard, Shard),
    AxisRule(Replicate, Partial, Replicate),
    AxisRule(Replicate, Partial, Shard),
    AxisRule(Replicate, Shard, Shard),
    AxisRule(Shard, Partial, Shard),
)


class Case(NamedTuple):
    """A tree, and a layout that :func:`~fsharp.plan` made for it."""

    tree: Any
    layout: Layout


def meshes(*, max_ranks: int = 16) -> st.SearchStrategy[Mesh]:
    """Return a Hypothesis strategy for meshes of at most ``max_ranks`` ranks: axis ``dp``, or ``outer`` and ``inner``."""
    # Hypothesis favours the first choices: two axes, and more ranks than one.
    sizes = sorted(range(1, max_ranks + 1), key=lambda n: n == 1)
    grids = [Mesh({"outer": m, "inner": n}) for m, n in product(sizes, sizes) if m * n <= max_ranks]
    return st.one_of(st.sampled_from(grids), st.sampled_from([Mesh({"dp": n}) for n in sizes]))


@options_checked
def legal_strategies(mesh: Mesh) -> list[Strategy]:
    """Return all legal strategies on a mesh in which no placement is Varying: named ones, such as ZeRO-3, and all others."""
    result = []
    for rules in product(_AXIS_RULES, repeat=len(mesh.axes)):
        try:
            result.append(Strategy(dict(zip(mesh.names, rules, strict=True))))
        except StrategyError:  # the axes of parameters and gradients do not nest
            continue
    return result


@options_checked
def strategies(mesh: Mesh) -> st.SearchStrategy[Strategy]:
    """Return a Hypothesis strategy for the legal sharding strategies on ``mesh``."""
    return st.sampled_from(legal_strategies(mesh))


def sharding_atoms() -> st.SearchStrategy[Atom]:
    """Return a Hypothesis strategy for atoms: elements, blocks of one to three rows, and whole tensors."""
    return st.one_of(st.just(ElementAtom()), st.builds(RowsAtom, st.integers(1, 3)), st.just(LeafAtom()))


def precisions() -> st.SearchStrategy[Precision]:
    """Return a Hypothesis strategy for one of three precisions.

    Leaves keep their dtypes; or are bfloat16, with float32 main copies; or are float32, with gradients sent in bfloat16.
    """
    return st.sampled_from(
        [
            Precision(),
            Precision(compute=torch.bfloat16, main=torch.float32),
            Precision(compute=torch.float32, wire=torch.bfloat16, accumulate=torch.float32),
        ]
    )


@st.composite
def tensors(draw: st.DrawFn, *, dtypes: Sequence[torch.dtype] = DTYPES, max_dims: int = 3) -> torch.Tensor:
    """Return a Hypothesis strategy for tensors of small integers, with dims of size 0 to 13, in any memory layout."""
    shape = draw(st.lists(st.sampled_from(_DIM_SIZES), max_size=max_dims))
    while len(shape) > 1 and torch.Size(shape).numel() > 200:
        shape.pop()
    kind = draw(st.sampled_from(["contiguous", "transposed", "strided", "expanded"]))
    seed = draw(st.integers(0, 1 << 16))
    made = [*shape[:-1], 2 * shape[-1]] if kind == "strided" and shape else shape
    value = integers_on_cpu(torch.empty(made, dtype=draw(st.sampled_from(dtypes))), seed)
    if kind == "transposed":
        return value.mT.contiguous().mT if value.ndim > 1 else value
    if kind == "strided" and shape:
        return value[..., ::2]
    if kind == "expanded" and shape:
        return value[:1].expand(shape) if shape[0] else value
    return value


def integers_on_cpu(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return random integers from -4 to 4 (from 0 if the dtype has no sign), in the shape and dtype of ``like``.

    Complex numbers have such integers as real and imaginary parts.
    """
    low, shape = -_MAX_ABS_INTEGER if like.dtype.is_signed else 0, (*like.shape, 2) if like.is_complex() else like.shape
    drawn = torch.randint(low, _MAX_ABS_INTEGER + 1, shape, generator=torch.Generator().manual_seed(seed))
    return torch.view_as_complex(drawn.to(like.real.dtype)) if like.is_complex() else drawn.to(like.dtype)


@st.composite
def trees(draw: st.DrawFn, *, dtypes: Sequence[torch.dtype] = DTYPES, max_leaves: int = 8, ties: bool = True) -> Any:
    """Return a Hypothesis strategy for nested dicts, lists and tuples, some empty, of tensors, tied tensors and None."""
    keys = st.sampled_from(["w", "b", "scale", "layers", "0", "10"])
    shapes: st.SearchStrategy[Any] = st.recursive(
        st.sampled_from([0, 0, 0, 0, None]),
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, max_size=4), st.lists(inner, max_size=4), st.lists(inner, max_size=3).map(tuple)
        ),
        max_leaves=max_leaves,
    )
    skeleton = draw(shapes.filter(lambda tree: len(optree.tree_leaves(tree)) > 0))
    leaves: list[torch.Tensor] = []
    for _ in optree.tree_leaves(skeleton):
        again = ties and leaves and draw(st.integers(0, 4)) == 4
        leaves.append(draw(st.sampled_from(leaves)) if again else draw(tensors(dtypes=dtypes)))
    return optree.tree_unflatten(optree.tree_structure(skeleton), leaves)


@st.composite
def unit_patterns(draw: st.DrawFn, tree: Any) -> str | list[str] | None:
    """Return a Hypothesis strategy for legal unit patterns of a tree: None, each key at the root, or disjoint subtrees."""
    paths, _, _ = flatten_with_paths(tree)
    if paths == ("",):
        return None
    prefixes = sorted({prefix for path in paths for prefix in self_and_ancestors(path) if prefix})
    picked: list[str] = []
    for prefix in draw(st.lists(st.sampled_from(prefixes), max_size=3, unique=True)):
        if not any(prefix in self_and_ancestors(other) or other in self_and_ancestors(prefix) for other in picked):
            picked.append(prefix)
    return draw(st.sampled_from([None, "*", picked or None]))


@st.composite
def layouts(
    draw: st.DrawFn,
    tree: Any,
    *,
    mesh: st.SearchStrategy[Mesh] | None = None,
    precision: st.SearchStrategy[Precision] | None = None,
) -> Layout:
    """Return a Hypothesis strategy for layouts of a tree: any mesh, strategy, units, atoms, labels and frozen leaves.

    ``mesh`` and ``precision`` are Hypothesis strategies. Without ``precision`` leaves keep their dtypes.
    """
    ranks = draw(meshes() if mesh is None else mesh)
    paths, leaves, _ = flatten_with_paths(tree)
    owners = find_tie_owners(paths, leaves)

    def by_path(values: st.SearchStrategy[V]) -> dict[str, V]:
        drawn = {path: draw(values) for path in paths if path not in owners}
        return {path or "**": drawn[owners.get(path, path)] for path in paths}

    frozen = by_path(st.sampled_from([False, False, False, True]))
    return plan(
        tree,
        ranks,
        draw(strategies(ranks)),
        units=draw(unit_patterns(tree)),
        frozen=[path for path, is_frozen in frozen.items() if is_frozen],
        atoms=by_path(sharding_atoms()),
        labels=by_path(st.sampled_from(["default", "default", "matrix"])),
        precision=draw(precision) if precision is not None else Precision(),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    max_ranks: int = 16,
    precision: st.SearchStrategy[Precision] | None = None,
) -> Case:
    """Return a Hypothesis strategy for a :class:`Case`: a tree, and a layout of this tree."""
    tree = draw(trees(dtypes=dtypes))
    return Case(tree, draw(layouts(tree, mesh=meshes(max_ranks=max_ranks), precision=precision)))
