"""Tables of JAX's primitives, by their effect on the elements of a leaf."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from fsharp.functional.comm.protocol import ReduceOp

ELEMENTWISE_PRIMITIVES = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
))  # fmt: skip
CALL_PRIMITIVES = frozenset(["jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"])
"""Primitives that run a jaxpr once, on their operands. Primitives that run one several times, as ``reduce``, are left out."""
RESHAPING_PRIMITIVES = frozenset(["broadcast_in_dim", "reshape", "squeeze", "expand_dims"])
SPLAT_PRIMITIVES = RESHAPING_PRIMITIVES | {"transpose", "slice", "rev"}
"""Primitives that turn an array of equal elements into an array of equal elements."""
REDUCTION_PRIMITIVES: dict[str, ReduceOp] = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "min",
    "reduce_or": "max",
}


def keeps_order(name: str, params: Mapping[str, Any]) -> bool:
    """Return whether a primitive of ``RESHAPING_PRIMITIVES`` keeps the order of elements."""
    dims = params["broadcast_dimensions"] if name == "broadcast_in_dim" else ()
    return list(dims) == sorted(dims) and not (name == "reshape" and params["dimensions"])


def reduces_all(shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Return whether a reduction along the dims ``axes`` reduces all elements."""
    return all(size == 1 or axis in axes for axis, size in enumerate(shape))


def is_combinable_over_ranks(name: str, dtype: Any) -> bool:
    """Return whether a collective can combine a reduction's results: not of bitwise ``and`` and ``or``, or complex numbers."""
    return bool(dtype == jnp.bool_ if name in ("reduce_and", "reduce_or") else not jnp.issubdtype(dtype, jnp.complexfloating))


def is_inner_product(values: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Return whether a dot_general contracts all dims of two operands of the same shape, in the same order."""
    (left, right), batch = params["dimension_numbers"]
    is_alike = values[0].shape == values[1].shape
    return is_alike and tuple(left) == tuple(right) and len(left) == len(values[0].shape) and not any(map(tuple, batch))


def dtype_limits(dtype: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest value of a dtype."""
    if dtype == jnp.bool_:
        return False, True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return -jnp.inf, jnp.inf
