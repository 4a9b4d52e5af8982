"""lift: a JAX function of whole leaves, run on the elements of them that this rank has.

[Note: lifting]
The function is traced with the shapes of whole leaves, so whatever it decides by rank, size or name it decides as it would
without sharding. The jaxpr is then run with this rank's elements of each leaf, flat, in place of the leaf:

==================  =====================================================================================================
elementwise         on the elements that are here
over a whole leaf   sums, products of two leaves, largest, smallest, any, all: of the elements here, then over the ranks
conditions          both branches, then a choice by element: no rank takes part in fewer collectives than another
random numbers      of the whole leaf, on every rank alike; this rank's elements are taken
everything else     refused by name: rows, columns and neighbours are not here
==================  =====================================================================================================

Where a leaf is on this rank as a whole, nothing is lifted. What is summed over ranks is summed for all leaves at once: the
function is run until it asks for something that is not known, ranks exchange that, and it is run again with it; each run is
compiled, and computes what it is run for alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fsharp.errors import LayoutError, problem
from fsharp.functional.comm.protocol import ReduceOp


class LeafPart(NamedTuple):
    """What a rank has of one leaf.

    Attributes:
        path: of the leaf.
        shape: of all of it.
        first: the first of its elements that are here.
        last: behind the last of them.
        axes: mesh axes along which it is cut; empty if all of it is here.
        is_varying: whether each rank along some axis has a leaf of its own.
    """

    path: str
    shape: tuple[int, ...]
    first: int
    last: int
    axes: tuple[str, ...]
    is_varying: bool


class Part(NamedTuple):
    """An array of which this rank has the elements that it has of a leaf.

    Attributes:
        leaf: the number of that leaf.
        elements: 1-D.
        shape: of the whole array.
    """

    leaf: int
    elements: Any
    shape: tuple[int, ...]


class Splat(NamedTuple):
    """An array whose elements are all the same scalar."""

    scalar: Any
    shape: tuple[int, ...]


class _Unknown:
    """A value that depends on what ranks have yet to exchange."""


UNKNOWN = _Unknown()

Key = tuple[int, ...]
"""Which equation of which jaxpr within which."""


@dataclass(frozen=True)
class Question:
    """What ranks have to exchange.

    Attributes:
        op: ``"sum"``, ``"max"`` or ``"min"``.
        axes: over the ranks along which.
    """

    op: ReduceOp
    axes: tuple[str, ...]


_ELEMENTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "ceil",
        "clamp",
        "conj",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "igamma",
        "igammac",
        "imag",
        "integer_pow",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "pow",
        "real",
        "reduce_precision",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
    ]
)
_RESHAPING = frozenset(["broadcast_in_dim", "reshape", "squeeze", "expand_dims"])
_UNIFORM = _RESHAPING | {"transpose", "slice", "rev"}
"""What leaves an array with equal elements one."""
_REDUCTIONS: dict[str, ReduceOp] = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "min",
    "reduce_or": "max",
}


class Lifted:
    """One run of a jaxpr on this rank's elements.

    Args:
        leaves: what a :class:`Part` may be of.
        known: the answers there are so far.

    Attributes:
        asked: what was not known, and what this rank has of it.
    """

    def __init__(self, leaves: Sequence[LeafPart], known: Mapping[Key, Any]) -> None:
        self.leaves, self.known = leaves, known
        self.asked: dict[Key, tuple[Question, Any]] = {}

    def run(self, closed: ClosedJaxpr, args: Sequence[Any], at: Key = ()) -> list[Any]:
        """The results of a jaxpr, each a :class:`Part`, a :class:`Splat`, or an array.

        Raises:
            LayoutError: it does something with a leaf that needs elements of other ranks.
        """
        values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(closed.jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]

        for number, equation in enumerate(closed.jaxpr.eqns):
            results = self._apply(equation, [read(atom) for atom in equation.invars], (*at, number))
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in closed.jaxpr.outvars]

    def elements(self, value: Any, leaf: int, shape: Sequence[int]) -> Any:
        """This rank's elements of an array of a leaf's size, or of one that is broadcast to it."""
        part = self.leaves[leaf]
        if isinstance(value, Part):
            return value.elements
        if isinstance(value, Splat) or jnp.ndim(value) == 0:
            return jnp.broadcast_to(value.scalar if isinstance(value, Splat) else value, (part.last - part.first,))
        return jnp.reshape(jnp.broadcast_to(value, shape), (-1,))[part.first : part.last]

    def _apply(self, equation: Any, values: list[Any], at: Key) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "cond":
            return self._choose(equation, values, at)
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if isinstance(inner, Jaxpr):  # of jax.checkpoint
            inner = ClosedJaxpr(inner, ())
        if isinstance(inner, ClosedJaxpr) and name not in ("while", "scan"):
            return self.run(inner, values, at)
        if any(value is UNKNOWN for value in values):
            return [UNKNOWN] * len(equation.outvars)
        if name == "optimization_barrier":
            return values
        parts = {value.leaf: self.leaves[value.leaf] for value in values if isinstance(value, Part)}
        if len(parts) > 1 and not any(part.axes or part.is_varying for part in parts.values()):  # all of them are here
            return _bind(equation, [_whole(value) for value in values])
        leaf = self._leaf_of(equation, values)
        if leaf is None:
            return self._without_leaves(equation, values)
        shape = equation.outvars[0].aval.shape
        if name in _ELEMENTWISE and math.prod(shape) == math.prod(self.leaves[leaf].shape):  # else it is broadcast
            result = _bind(equation, [self.elements(value, leaf, shape) for value in values])
            return [Part(leaf, each, var.aval.shape) for each, var in zip(result, equation.outvars, strict=True)]
        out = equation.outvars[0]
        if name in _RESHAPING and math.prod(out.aval.shape) == math.prod(values[0].shape) and _keeps_order(name, params):
            return [Part(leaf, values[0].elements, out.aval.shape)]
        if name in _REDUCTIONS and _is_whole(values[0].shape, params["axes"]):
            return [self._over_ranks(name, leaf, values[0].elements, out, at)]
        if name == "dot_general" and _is_inner(values, params):
            left, right = (self.elements(value, leaf, value.shape).astype(out.aval.dtype) for value in values)
            return [self._over_ranks("reduce_sum", leaf, left * right, out, at)]
        if not self.leaves[leaf].axes:  # all of it is here
            return _bind(equation, [_whole(value) for value in values])
        raise self._refused(name, leaf)

    def _leaf_of(self, equation: Any, values: Sequence[Any]) -> int | None:
        """The one leaf that the values are parts of."""
        found = {value.leaf for value in values if isinstance(value, Part)}
        if len(found) > 1:
            first, second = sorted(found)[:2]
            raise LayoutError(
                f"from_optax(): the transformation combines elements of {self.leaves[first].path!r} and "
                f"{self.leaves[second].path!r} ({equation.primitive.name}), which are on different ranks."
            )
        return next(iter(found), None)

    def _without_leaves(self, equation: Any, values: list[Any]) -> list[Any]:
        name, uniform = equation.primitive.name, any(isinstance(value, Splat) for value in values)
        shapes = [var.aval.shape for var in equation.outvars]
        if name == "broadcast_in_dim" and jnp.ndim(_scalar(values[0])) == 0:
            return [Splat(_scalar(values[0]), shapes[0])]
        if uniform and name in _UNIFORM:
            return [Splat(values[0].scalar, shapes[0])]
        if uniform and name in _REDUCTIONS:
            scalar, count = values[0].scalar, math.prod(values[0].shape[axis] for axis in equation.params["axes"])
            result = (scalar * count).astype(scalar.dtype) if name == "reduce_sum" else scalar
            return [Splat(result, shapes[0]) if shapes[0] else result]
        if uniform and name in _ELEMENTWISE and all(jnp.ndim(_scalar(value)) == 0 for value in values):
            return [Splat(each, shape) for each, shape in zip(_bind(equation, map(_scalar, values)), shapes, strict=True)]
        return _bind(equation, [_whole(value) for value in values])

    def _over_ranks(self, name: str, leaf: int, elements: Any, out: Any, at: Key) -> Any:
        """A number that all elements of a leaf have a part in."""
        part, op = self.leaves[leaf], _REDUCTIONS[name]
        if part.is_varying:
            raise LayoutError(
                f"from_optax(): the transformation reduces all elements of {part.path!r} ({name}), of which ranks have leaves "
                "of their own. Use a transformation that looks at each element alone."
            )
        if at not in self.known:
            if op == "sum":
                here = jnp.sum(elements, dtype=out.aval.dtype)
            else:
                least, most = _limits(elements.dtype)
                here = jnp.max(elements, initial=least) if op == "max" else jnp.min(elements, initial=most)
            self.asked[at] = Question(op, part.axes), here
            return UNKNOWN
        known = self.known[at].astype(out.aval.dtype)
        return Splat(known, out.aval.shape) if out.aval.shape else known

    def _choose(self, equation: Any, values: list[Any], at: Key) -> list[Any]:
        index, *operands = values
        branches = equation.params["branches"]
        if not any(isinstance(value, Part | Splat | _Unknown) for value in values):
            return _bind(equation, values)
        found = [self.run(branch, operands, (*at, k)) for k, branch in enumerate(branches)]
        return [self._chosen(equation, index, list(each)) for each in zip(*found, strict=True)]

    def _chosen(self, equation: Any, index: Any, cases: list[Any]) -> Any:
        if index is UNKNOWN or any(case is UNKNOWN for case in cases):
            return UNKNOWN
        leaf = self._leaf_of(equation, cases)
        shape = next((case.shape for case in cases if isinstance(case, Part | Splat)), None)
        if leaf is not None:
            assert shape is not None
            cases = [self.elements(case, leaf, shape) for case in cases]
        elif all(jnp.ndim(_scalar(case)) == 0 for case in cases):
            cases = [_scalar(case) for case in cases]
        else:
            cases, shape = [_whole(case) for case in cases], None
        result = cases[-1]
        for k in reversed(range(len(cases) - 1)):
            result = jnp.where(index <= k, cases[k], result)
        if shape is None:
            return result
        return Splat(result, shape) if leaf is None else Part(leaf, result, shape)

    def _refused(self, name: str, leaf: int) -> LayoutError:
        part = self.leaves[leaf]
        return LayoutError(
            problem(
                "from_optax()",
                f"the transformation looks at rows, columns or neighbours of {part.path!r}, or loops over it, and not all "
                "ranks have all of it.",
                [("operation", name), ("shape", list(part.shape)), ("cut along", ", ".join(part.axes))],
                "For matrices there is fs.optim.muon; factored statistics can be left out (optax.adafactor(factored=False)); "
                "under ddp nothing is cut.",
            )
        )


def _bind(equation: Any, values: Any) -> list[Any]:
    result = equation.primitive.bind(*values, **equation.params)
    return list(result) if equation.primitive.multiple_results else [result]


def _scalar(value: Any) -> Any:
    return value.scalar if isinstance(value, Splat) else value


def _whole(value: Any) -> Any:
    """The array itself, if all of it is here."""
    if isinstance(value, Part):
        return jnp.reshape(value.elements, value.shape)
    return jnp.full(value.shape, value.scalar) if isinstance(value, Splat) else value


def _keeps_order(name: str, params: Mapping[str, Any]) -> bool:
    dims = params["broadcast_dimensions"] if name == "broadcast_in_dim" else ()
    return list(dims) == sorted(dims) and not (name == "reshape" and params["dimensions"])


def _is_whole(shape: Sequence[int], axes: Sequence[int]) -> bool:
    return all(size == 1 or axis in axes for axis, size in enumerate(shape))


def _is_inner(values: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Whether a dot_general is the inner product of a part of a leaf and something of its shape."""
    (left, right), batch = params["dimension_numbers"]
    is_alike = values[0].shape == values[1].shape
    return is_alike and tuple(left) == tuple(right) and len(left) == len(values[0].shape) and not any(map(tuple, batch))


def _limits(dtype: Any) -> tuple[Any, Any]:
    if dtype == jnp.bool_:
        return False, True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return -jnp.inf, jnp.inf
