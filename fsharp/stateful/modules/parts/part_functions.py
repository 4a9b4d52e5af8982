"""Tables of torch's functions that may be called with parts: elementwise functions, and reductions of all elements."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fsharp.functional.comm.protocol import ReduceOp

_ELEMENTWISE_NAMES = """
    abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copy copysign div
    divide eq erf exp expm1 fill float_power floor floor_divide fmod frac ge gt isfinite isinf isnan le lerp log log10 log1p
    log2 logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative
    positive pow reciprocal relu remainder round rsqrt sgn sigmoid sign sqrt square sub subtract tanh true_divide trunc where
    xlogy zero
"""
_ELEMENTWISE_OPERATORS = """
    __and__ __eq__ __floordiv__ __iand__ __ifloordiv__ __invert__ __ior__ __ipow__ __ixor__ __mod__ __or__ __rand__ __rdiv__
    __rfloordiv__ __rmod__ __ror__ __rpow__ __rsub__ __rtruediv__ __rxor__ __xor__
"""
COPYING_FUNCTIONS = frozenset(("bfloat16", "clone", "contiguous", "cpu", "cuda", "double", "float", "half", "to"))
"""Functions that return the same elements as a part: copied, on another device, or in another dtype."""

ELEMENTWISE_FUNCTIONS = frozenset(
    [form for name in _ELEMENTWISE_NAMES.split() for form in (name, f"{name}_", f"_foreach_{name}", f"_foreach_{name}_")]
    + [*_ELEMENTWISE_OPERATORS.split(), *COPYING_FUNCTIONS, "empty_like", "full_like", "ones_like", "zeros_like"]
)
"""Functions of which each element of the result depends only on the same element of the operands."""

PREDICATES = {"__eq__", "all", "any", "count_nonzero", "eq", "ge", "gt", "isfinite", "isinf", "isnan", "le", "lt", "ne"}
"""Functions whose results have no gradient."""


def is_in_place(name: str) -> bool:
    """Return whether a function of this name changes its first argument."""
    is_operator = name in ("__iand__", "__ifloordiv__", "__ior__", "__ipow__", "__ixor__")
    return is_operator or (name.endswith("_") and not name.endswith("__"))


class ReductionFns(NamedTuple):
    """A reduction of all elements of a sharded tensor to one number.

    ``local`` returns a scalar from this rank's elements, of which there may be none. ``op`` combines the scalars of ranks.
    ``finish`` returns the result from the combined scalar and the number of all elements.
    """

    local: Callable[[torch.Tensor], torch.Tensor]
    op: ReduceOp
    finish: Callable[[torch.Tensor, int], torch.Tensor]


def _widest_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64


def _sum_reduction(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> ReductionFns:
    of = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    return ReductionFns(lambda x: x.to(of).sum(dtype=_widest_dtype(of)), "sum", lambda total, _: total.to(of))


def _mean_reduction(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> ReductionFns:
    of = dtype or x.dtype
    if not of.is_floating_point:
        raise TypeError(f"mean(): of {of}")
    return ReductionFns(lambda x: x.sum(dtype=torch.float64), "sum", lambda total, count: (total / count).to(of))


def _max_or_min_reduction(of: torch.dtype, op: ReduceOp) -> ReductionFns:
    wide = _widest_dtype(of)
    info = torch.finfo(wide) if wide.is_floating_point else torch.iinfo(wide)
    none = {"max": -math.inf, "min": math.inf}[op] if wide.is_floating_point else {"max": info.min, "min": info.max}[op]

    def local(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return torch.full((), none, dtype=wide, device=x.device)
        return (x.amax() if op == "max" else x.amin()).to(wide)

    return ReductionFns(local, op, lambda value, _: value.to(of))


def _norm_reduction(
    x: torch.Tensor, ord: float = 2, dim: None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> ReductionFns:
    of = dtype or x.dtype.to_real()
    is_exact = not all(each.is_floating_point or each.is_complex for each in (x.dtype, of))
    if dim is not None or keepdim or not isinstance(ord, int | float) or is_exact:
        raise TypeError("of all elements, which are not integers, alone")
    if math.isinf(ord):
        found = _max_or_min_reduction(of, "max" if ord > 0 else "min")
        return ReductionFns(lambda x: found.local(x.abs()).clamp(min=0), found.op, found.finish)  # the norm of no elements is 0

    def local(x: torch.Tensor) -> torch.Tensor:
        if ord == 2:
            wide = torch.complex128 if x.is_complex() else torch.float64
            return torch.square(torch.linalg.vector_norm(x, dtype=wide))
        return torch.pow(x.abs().double(), ord).sum() if ord else x.ne(0).sum(dtype=torch.float64)

    def finish(total: torch.Tensor, _: int) -> torch.Tensor:
        return total.to(of) if ord == 0 else torch.pow(total, 1 / ord).to(of)

    return ReductionFns(local, "sum", finish)


REDUCTIONS: dict[str, Callable[..., ReductionFns]] = {
    "sum": _sum_reduction,
    "mean": _mean_reduction,
    **dict.fromkeys(("max", "amax", "_foreach_max"), lambda x: _max_or_min_reduction(x.dtype, "max")),
    **dict.fromkeys(("min", "amin"), lambda x: _max_or_min_reduction(x.dtype, "min")),
    "any": lambda _: ReductionFns(lambda x: x.any().to(torch.uint8), "max", lambda value, _: value.bool()),
    "all": lambda _: ReductionFns(lambda x: x.all().to(torch.uint8), "min", lambda value, _: value.bool()),
    "count_nonzero": lambda _: ReductionFns(lambda x: x.count_nonzero(), "sum", lambda value, _: value),
    "norm": lambda x, p="fro", dim=None, keepdim=False, *, dtype=None: _norm_reduction(
        x, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype
    ),
    "linalg_vector_norm": _norm_reduction,
    "linalg_norm": lambda x, *, dtype=None: _norm_reduction(x, dtype=dtype),
    "_foreach_norm": lambda x, ord=2, dtype=None: _norm_reduction(x, ord, dtype=dtype),
}
"""Functions by name of a torch function: with its arguments they return the ReductionFns, or raise a TypeError."""


def reduction_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ReductionFns | None:
    """Return the reduction that a call computes; None if the call does not reduce all elements."""
    try:
        return REDUCTIONS[name](args[0][0] if name.startswith("_foreach_") else args[0], *args[1:], **kwargs)
    except (KeyError, TypeError):
        return None


def foreach_argument_rows(name: str, args: Any, kwargs: Any) -> list[list[Any]]:
    """Return one row with all arguments of a call; for a ``_foreach`` function a row for each tensor in its lists."""
    given = [*args, *kwargs.values()]
    lists = [x for x in given if isinstance(x, list | tuple)]
    rest = [x for x in given if not isinstance(x, list | tuple)]
    if name.startswith("_foreach_") and lists:
        return [[*row, *rest] for row in zip(*lists, strict=True)]
    return [[each for x in given for each in (x if isinstance(x, list | tuple) else (x,))]]
