"""lift: run a JAX function of whole leaves on this rank's elements of the leaves.

[Note: lifting]
The function is traced with the shapes of whole leaves. So if it decides by number of dims, size or name, it decides as without
sharding. Then the jaxpr is run. Each leaf is replaced by this rank's elements of the leaf, flat:

==================  =====================================================================================================
elementwise         runs on this rank's elements
over a whole leaf   sums, inner products, largest, smallest, any, all: of this rank's elements, then over ranks
conditions          both branches run, then each element is chosen, so all ranks take part in the same collectives
random numbers      are drawn for the whole leaf, alike on every rank; each rank takes those of its elements
one element         a leaf of one element is a number, which ranks exchange if another array depends on it
everything else     is refused by name: rows, columns, neighbours and elements of another leaf are on other ranks
==================  =====================================================================================================

A leaf that this rank holds whole is used as it is. If such a leaf differs between ranks, values computed from its elements may
be stored only with this leaf. Sums over ranks are taken for all leaves at once. The function runs until it needs sums; ranks
reduce these sums, and the function runs again with the results, until all sums are known. Each of these runs is compiled by
itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jax.extend.core import ClosedJaxpr, Literal

from fsharp.errors import LayoutError, problem
from fsharp.functional.comm.protocol import ReduceOp

_ELEMENTWISE_PRIMITIVES = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
))  # fmt: skip
_CALL_PRIMITIVES = frozenset(["jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"])
"""Primitives that run a jaxpr once, on their operands. Primitives that run one several times, as ``reduce``, are left out."""
_RESHAPING_PRIMITIVES = frozenset(["broadcast_in_dim", "reshape", "squeeze", "expand_dims"])
_SPLAT_PRIMITIVES = _RESHAPING_PRIMITIVES | {"transpose", "slice", "rev"}
"""Primitives that turn an array of equal elements into an array of equal elements."""
_ONE_ELEMENT = "one element"
"""In place of the name of a primitive: all ranks take the element of one rank, as a sum with -0.0, which keeps all bits."""
_REDUCTION_PRIMITIVES: dict[str, ReduceOp] = {
    _ONE_ELEMENT: "sum",
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "min",
    "reduce_or": "max",
}


class LeafRange(NamedTuple):
    """Elements ``[first, last)`` of a leaf, on one rank.

    ``path``, ``shape``: of the whole leaf. ``axes``: mesh axes along which the leaf is cut; empty if the rank has the whole
    leaf. ``is_varying``: whether the leaf differs between ranks along some axis. The elements rest in the flat buffer with the
    index ``buffer``, from its element ``start`` on.
    """

    path: str
    shape: tuple[int, ...]
    first: int
    last: int
    axes: tuple[str, ...]
    is_varying: bool
    buffer: int
    start: int


class ArrayShard(NamedTuple):
    """This rank's part of an array that is computed from a leaf.

    If the leaf is cut between ranks, the array has as many elements as the leaf, and is cut like the leaf. If this rank has the
    whole leaf, it has the whole array, which may have any shape.

    Attributes:
        leaf: index of the leaf.
        elements: the elements that this rank has, 1-D.
        shape: shape of the whole array.
    """

    leaf: int
    elements: Any
    shape: tuple[int, ...]


class Splat(NamedTuple):
    """An array whose elements are all the same scalar."""

    scalar: Any
    shape: tuple[int, ...]


PENDING = object()
"""A value that depends on the result of a pending reduction."""

EquationKey = tuple[int, ...]
"""Position of an equation: the numbers of the equations whose jaxprs contain it, then its own number."""


@dataclass(frozen=True)
class CrossRankReduction:
    """A reduction of a scalar over ranks along mesh axes."""

    op: ReduceOp
    axes: tuple[str, ...]


class LocalJaxprRun:
    """One run of a jaxpr on this rank's elements of the leaves.

    Attributes:
        known: results of finished reductions over ranks, by position of the reduction's equation. None: each result is zero,
            for a trial.
        pending: unfinished reductions that this run needs, each with this rank's summand.
    """

    def __init__(self, leaves: Sequence[LeafRange], known: Mapping[EquationKey, Any] | None) -> None:
        self.leaves, self.known = leaves, known
        self.pending: dict[EquationKey, tuple[CrossRankReduction, Any]] = {}

    def run_jaxpr(self, closed: ClosedJaxpr, args: Sequence[Any], at: EquationKey = ()) -> list[Any]:
        """Return the results of the jaxpr ``closed`` for ``args``. LayoutError if it needs elements that other ranks hold.

        ``at``: position of the equation whose jaxpr this is; empty for the whole function.
        """
        values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(closed.jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]

        for number, equation in enumerate(closed.jaxpr.eqns):
            results = self._apply_equation(equation, [read(atom) for atom in equation.invars], (*at, number))
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in closed.jaxpr.outvars]

    def elements(self, value: Any, leaf: int, shape: Sequence[int]) -> Any:
        """Return the elements of ``value`` at the positions where this rank has elements of a leaf, as a 1-D array.

        ``leaf``: index of the leaf. ``shape``: the shape to which ``value`` is broadcast, with as many elements as the leaf.
        """
        part, size = self.leaves[leaf], math.prod(shape)
        first, last = (part.first, part.last) if part.axes else (0, size)
        if isinstance(value, ArrayShard) and math.prod(value.shape) == size:
            return value.elements
        array = _as_dense_array(value) if isinstance(value, ArrayShard) else _scalar_if_splat(value)
        if jnp.ndim(array) == 0:
            return jnp.broadcast_to(array, (last - first,))
        return jnp.reshape(array if jnp.size(array) == size else jnp.broadcast_to(array, shape), (-1,))[first:last]

    def in_stored_form(self, value: Any, leaf: int | None, what: str, at: EquationKey) -> Any:
        """Return ``value``, a result, as it is stored: this rank's elements of ``leaf``, or an array if ``leaf`` is None.

        ``what`` is the result in words. ``at`` is the key of the exchange between ranks that the result may need. Raises
        LayoutError if the result is made of elements of another leaf, and ranks differ in these elements.
        """
        if not isinstance(value, ArrayShard):
            return value
        if value.leaf == leaf and math.prod(value.shape) == math.prod(self.leaves[leaf].shape):
            return value
        known = self._replicate_if_possible(value, at)
        if isinstance(known, ArrayShard):
            part = self.leaves[known.leaf]
            raise self._other_ranks_error(f"{what} is made of elements of {part.path!r}", part)
        return known

    def _apply_equation(self, equation: Any, values: list[Any], at: EquationKey) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "cond":
            return self._run_cond(equation, values, at)
        if name in _CALL_PRIMITIVES:
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            return self.run_jaxpr(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()), values, at)
        if name == "optimization_barrier":
            return values
        if len({value.leaf for value in values if isinstance(value, ArrayShard)}) > 1:
            values = [self._replicate_if_possible(value, (*at, -1 - i)) for i, value in enumerate(values)]
        if any(value is PENDING for value in values):
            return [PENDING] * len(equation.outvars)
        leaf = self._leaf_of(name, values)
        if leaf is None:
            return self._apply_without_leaves(equation, values)
        part, shapes = self.leaves[leaf], [var.aval.shape for var in equation.outvars]
        size = math.prod(shapes[0]) if shapes else None
        if name in _ELEMENTWISE_PRIMITIVES and size == math.prod(part.shape):  # else a result is broadcast
            result = _bind_equation(equation, [self.elements(value, leaf, shapes[0]) for value in values])
            return [ArrayShard(leaf, each, shape) for each, shape in zip(result, shapes, strict=True)]
        if name in _RESHAPING_PRIMITIVES and size == math.prod(values[0].shape) and _keeps_order(name, params):
            return [ArrayShard(leaf, values[0].elements, shapes[0])]
        if (
            name in _REDUCTION_PRIMITIVES
            and _reduces_all(values[0].shape, params["axes"])
            and _is_combinable_over_ranks(name, values[0].elements.dtype)
        ):
            return [self._reduce_over_ranks(name, leaf, values[0].elements, equation.outvars[0].aval, at)]
        if (
            name == "dot_general"
            and _is_inner_product(values, params)
            and _is_combinable_over_ranks(name, equation.outvars[0].aval.dtype)
        ):
            out = equation.outvars[0].aval
            left, right = (self.elements(value, leaf, value.shape).astype(out.dtype) for value in values)
            return [self._reduce_over_ranks("reduce_sum", leaf, left * right, out, at)]
        if not part.axes:  # all of it is here
            found = _bind_equation(equation, [_as_dense_array(value) for value in values])
            return [ArrayShard(leaf, jnp.reshape(x, (-1,)), x.shape) for x in found] if part.is_varying else found
        known = [self._replicate_if_possible(value, (*at, -1 - i)) for i, value in enumerate(values)]
        if not any(isinstance(value, ArrayShard) for value in known):
            is_unknown = any(value is PENDING for value in known)
            return [PENDING] * len(shapes) if is_unknown else self._apply_without_leaves(equation, known)
        raise self._cut_leaf_error(name, leaf)

    def _replicate_if_possible(self, value: Any, at: EquationKey) -> Any:
        """Return ``value`` as an array that all ranks have, where this is possible; else return ``value``.

        This is possible if the leaf does not differ between ranks, and either no axis cuts it or ``value`` has one element.
        ``at``: key of the reduction over ranks that a value of one element needs. Until its result is known, return PENDING.
        """
        if not isinstance(value, ArrayShard) or self.leaves[value.leaf].is_varying:
            return value
        if not self.leaves[value.leaf].axes:
            return _as_dense_array(value)
        if math.prod(value.shape) != 1 or not _is_combinable_over_ranks(_ONE_ELEMENT, value.elements.dtype):
            return value
        out = ShapeDtypeStruct(value.shape, value.elements.dtype)
        return self._reduce_over_ranks(_ONE_ELEMENT, value.leaf, value.elements, out, at)

    def _leaf_of(self, name: str, values: Sequence[Any]) -> int | None:
        """Return the index of the leaf from which ``values``, the operands of a primitive, are computed; None without a leaf.

        ``name``: name of the primitive, for the error. Raises a LayoutError if two operands are computed from different leaves.
        """
        found = {value.leaf for value in values if isinstance(value, ArrayShard)}
        if len(found) > 1:
            first, second = (self.leaves[leaf] for leaf in sorted(found)[:2])
            what = f"the transformation combines elements of {first.path!r} and {second.path!r} ({name})"
            raise self._other_ranks_error(what, second if second.axes or second.is_varying else first)
        return next(iter(found), None)

    def _other_ranks_error(self, what: str, part: LeafRange) -> LayoutError:
        """Return the error for a computation that needs elements of a leaf which this rank does not have.

        ``what``: the computation in words. ``part``: this rank's part of the leaf. The text says that the leaf's elements are
        on different ranks; or, with ``part.is_varying``, that each rank has a leaf of its own.
        """
        why, remedy = "of which ranks have leaves of their own", "Use a transformation that looks at each leaf by itself"
        if not part.is_varying:
            why = "which are on different ranks"
            remedy += ", or let these leaves rest whole on each rank: fs.ddp, or fs.P() for their units"
        facts = [("shape", list(part.shape)), ("cut along", ", ".join(part.axes) or "nothing")]
        return LayoutError(problem("from_optax()", f"{what}, {why}.", facts, f"{remedy}."))

    def _apply_without_leaves(self, equation: Any, values: list[Any]) -> list[Any]:
        name, uniform = equation.primitive.name, any(isinstance(value, Splat) for value in values)
        shapes = [var.aval.shape for var in equation.outvars]
        if name == "broadcast_in_dim" and jnp.ndim(_scalar_if_splat(values[0])) == 0:
            return [Splat(_scalar_if_splat(values[0]), shapes[0])]
        if uniform and name in _SPLAT_PRIMITIVES:
            return [Splat(values[0].scalar, shapes[0])]
        if uniform and name in _REDUCTION_PRIMITIVES:
            scalar, count = values[0].scalar, math.prod(values[0].shape[axis] for axis in equation.params["axes"])
            result = (scalar * count).astype(scalar.dtype) if name == "reduce_sum" else scalar
            return [Splat(result, shapes[0]) if shapes[0] else result]
        if uniform and name in _ELEMENTWISE_PRIMITIVES and all(jnp.ndim(_scalar_if_splat(value)) == 0 for value in values):
            return [
                Splat(each, shape)
                for each, shape in zip(_bind_equation(equation, map(_scalar_if_splat, values)), shapes, strict=True)
            ]
        return _bind_equation(equation, [_as_dense_array(value) for value in values])

    def _reduce_over_ranks(self, name: str, leaf: int, elements: Any, out: Any, at: EquationKey) -> Any:
        """Return the reduction ``name``, such as ``"reduce_sum"``, of ``elements`` over ranks, in shape and dtype of ``out``.

        If ``self.known`` has no result for the equation ``at``, add the reduction to ``self.pending``, and return PENDING.
        """
        part, op = self.leaves[leaf], _REDUCTION_PRIMITIVES[name]
        if part.is_varying:
            raise LayoutError(
                f"from_optax(): the transformation reduces all elements of {part.path!r} ({name}), whose values "
                "differ between ranks. Use a transformation that updates each element by itself."
            )
        if self.known is not None and at not in self.known:
            if name == _ONE_ELEMENT:
                here = elements[0] if elements.size else jnp.asarray(-0.0, out.dtype)
            elif op == "sum":
                here = jnp.sum(elements, dtype=out.dtype)
            else:
                least, most = _dtype_limits(elements.dtype)
                here = jnp.max(elements, initial=least) if op == "max" else jnp.min(elements, initial=most)
            self.pending[at] = CrossRankReduction(op, part.axes), here
            return PENDING
        known = jnp.zeros((), out.dtype) if self.known is None else self.known[at].astype(out.dtype)
        return Splat(known, out.shape) if out.shape else known

    def _run_cond(self, equation: Any, values: list[Any], at: EquationKey) -> list[Any]:
        index, *operands = values
        index, branches = _scalar_if_splat(self._replicate_if_possible(index, (*at, -1))), equation.params["branches"]
        if isinstance(index, ArrayShard):
            raise self._other_ranks_error(f"a condition looks at {self.leaves[index.leaf].path!r}", self.leaves[index.leaf])
        if not any(value is PENDING or isinstance(value, ArrayShard | Splat) for value in (index, *operands)):
            return _bind_equation(equation, [index, *operands])
        found = [self.run_jaxpr(branch, operands, (*at, k)) for k, branch in enumerate(branches)]
        return [self._select_branch_result(index, list(each), (*at, -2 - i)) for i, each in enumerate(zip(*found, strict=True))]

    def _select_branch_result(self, index: Any, cases: list[Any], at: EquationKey) -> Any:
        if len({case.leaf for case in cases if isinstance(case, ArrayShard)}) > 1:
            cases = [self._replicate_if_possible(case, (*at, k)) for k, case in enumerate(cases)]
        if index is PENDING or any(case is PENDING for case in cases):
            return PENDING
        leaf = self._leaf_of("cond", cases)
        shape = next((case.shape for case in cases if isinstance(case, ArrayShard | Splat)), None)
        if leaf is not None:
            assert shape is not None
            cases = [self.elements(case, leaf, shape) for case in cases]
        elif all(jnp.ndim(_scalar_if_splat(case)) == 0 for case in cases):
            cases = [_scalar_if_splat(case) for case in cases]
        else:
            cases, shape = [_as_dense_array(case) for case in cases], None
        result = cases[-1]
        for k in reversed(range(len(cases) - 1)):
            result = jnp.where(index <= k, cases[k], result)
        if shape is None:
            return result
        return Splat(result, shape) if leaf is None else ArrayShard(leaf, result, shape)

    def _cut_leaf_error(self, name: str, leaf: int) -> LayoutError:
        part = self.leaves[leaf]
        what = f"the transformation looks at rows, columns or neighbours of {part.path!r}, or loops over it, and not all ranks "
        what += "have all of it."
        facts = [("operation", name), ("shape", list(part.shape)), ("cut along", ", ".join(part.axes))]
        remedy = "For matrices there is fs.optim.muon; factored statistics can be left out (optax.adafactor(factored=False)); "
        return LayoutError(problem("from_optax()", what, facts, remedy + "under ddp nothing is cut."))


def _bind_equation(equation: Any, values: Any) -> list[Any]:
    result = equation.primitive.bind(*values, **equation.params)
    return list(result) if equation.primitive.multiple_results else [result]


def _scalar_if_splat(value: Any) -> Any:
    return value.scalar if isinstance(value, Splat) else value


def _as_dense_array(value: Any) -> Any:
    """Return ``value``, whose elements are all on this rank, as an array of its whole shape."""
    if isinstance(value, ArrayShard):
        return jnp.reshape(value.elements, value.shape)
    return jnp.full(value.shape, value.scalar) if isinstance(value, Splat) else value


def _keeps_order(name: str, params: Mapping[str, Any]) -> bool:
    """Return whether a primitive of ``_RESHAPING_PRIMITIVES`` keeps the order of elements."""
    dims = params["broadcast_dimensions"] if name == "broadcast_in_dim" else ()
    return list(dims) == sorted(dims) and not (name == "reshape" and params["dimensions"])


def _reduces_all(shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Return whether a reduction along the dims ``axes`` reduces all elements."""
    return all(size == 1 or axis in axes for axis, size in enumerate(shape))


def _is_combinable_over_ranks(name: str, dtype: Any) -> bool:
    """Return whether collectives can combine results of a reduction: not of complex numbers, nor AND or OR of integers."""
    return bool(dtype == jnp.bool_ if name in ("reduce_and", "reduce_or") else not jnp.issubdtype(dtype, jnp.complexfloating))


def _is_inner_product(values: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Return whether a dot_general contracts all dims of two operands of the same shape, in the same order."""
    (left, right), batch = params["dimension_numbers"]
    is_alike = values[0].shape == values[1].shape
    return is_alike and tuple(left) == tuple(right) and len(left) == len(values[0].shape) and not any(map(tuple, batch))


def _dtype_limits(dtype: Any) -> tuple[Any, Any]:
    """Return the least and the greatest value of a dtype: ``-inf`` and ``inf`` for a floating-point dtype."""
    if dtype == jnp.bool_:
        return False, True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return -jnp.inf, jnp.inf
