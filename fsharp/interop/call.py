"""as_torch: turn a JAX function into a function of tensors, with all its derivatives."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optree
import torch
from torch.overrides import handle_torch_function, has_torch_function

from fsharp.errors import TreeError
from fsharp.functional.transforms import is_transform_active, refuse_proxy_tracing
from fsharp.interop.arrays import as_jax_array, as_torch_tensor, check_not_forked_after_jax
from fsharp.torch_compile import disable_compile
from fsharp.tracebacks import api_boundary


@api_boundary
def as_torch(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a JAX function as a function of tensors, compiled by XLA, with gradients of ``jax.vjp`` in torch's convention.

    >>> import jax.numpy as jnp
    >>> sine = as_torch(jnp.sin)
    >>> x = torch.zeros(2, requires_grad=True)
    >>> sine(x).sum().backward()
    >>> x.grad
    tensor([1., 1.])

    Args:
        fn: a pure function of pytrees of arrays. Other arguments (numbers, strings, None) are constants for XLA, which compiles
            the function again for each new value. So pass a number that changes as a tensor.

    Returns:
        A function of the same pytrees of tensors, which returns the pytree of ``fn``, in new memory. The function can be that
        of a unit: ``fs.forward(as_torch(block), params, x, comm=comm)``. It can be pickled if ``fn`` can be pickled. The
        process that loads the pickle compiles the function again.

    Raises:
        TreeError: when called: JAX would change a dtype, or cannot take an argument or a result.
        TreeError: the process was forked from one that had used JAX: XLA would wait without end.

    Cost: one copy of each argument whose address is not a multiple of 64 bytes. Most leaves of a unit are such views of a
    buffer. The host waits for XLA. JAX keeps residuals for the backward in memory of its own, fewer with ``jax.checkpoint`` in
    ``fn``. Autograd saves the arguments as for a torch function. So a unit's parameters among them are released after the
    forward, and gathered again for the backward. Higher derivatives compute the function again.
    """
    return _JaxFunctionOfTensors(fn)


class _JaxFunctionOfTensors:
    """A JAX function of tensors, with its compiled programs. A pickle holds only the function, or its name in its module."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        update_wrapper(self, fn)
        self._fn = fn
        self._programs: dict[Any, _CompiledFunction] = {}

    def __reduce__(self) -> Any:
        module, name = self.__module__, getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        # A decorated function is found under its name in its module: pickle the name.
        return name if found is self and module != "__main__" else (_JaxFunctionOfTensors, (self._fn,))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    @disable_compile  # torch.compile cannot trace JAX
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        given: Any = (args, keywords)
        leaves, spec = optree.tree_flatten(given)
        constants = tuple(_TENSOR_PLACEHOLDER if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        # Programs of 1, 1.0 and True differ, and those of 0.0 and -0.0. NaN is not equal to itself, and has one program.
        key = spec, *((type(x), repr(x) if isinstance(x, float | complex | np.generic) else x) for x in constants)
        try:
            program = self._programs.get(key)
        except TypeError:  # a constant cannot be hashed
            program = None
        if program is None:
            _check_constants(args, keywords)
            program = self._programs[key] = _CompiledFunction(partial(_unflatten_and_call, self._fn, spec, constants))
        return program(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))


_TENSOR_PLACEHOLDER = object()  # in place of each tensor among the leaves of arguments


def _check_constants(args: Sequence[Any], keywords: dict[str, Any]) -> None:
    tree: Any = {**dict(enumerate(args)), **keywords}
    for accessor, leaf in zip(optree.tree_accessors(tree), optree.tree_leaves(tree), strict=True):
        is_tensor = isinstance(leaf, torch.Tensor)
        if not is_tensor and (not _is_hashable(leaf) or any(isinstance(x, torch.Tensor) for x in jax.tree.leaves(leaf))):
            raise TreeError(
                f"as_torch(): argument {accessor.codify('')} is a {type(leaf).__name__}, expected pytrees of tensors, numbers, "
                "strings. Pass an array as a tensor, of a random key its jax.random.key_data(); register a class of your own "
                "by optree.register_pytree_node()."
            )


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _result_as_array(path: Any, x: Any) -> Any:
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex)
    if not is_array or jax.dtypes.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        raise TreeError(
            f"as_torch(): the function returned a {type(x).__name__} at {jax.tree_util.keystr(path) or 'its result'}, expected "
            "arrays and numbers. Of a random key return jax.random.key_data()."
        )
    return jnp.asarray(x)


def _unflatten_and_call(fn: Callable[..., Any], spec: optree.PyTreeSpec, constants: Sequence[Any], *arrays: Any) -> Any:
    rest = iter(arrays)
    args, keywords = optree.tree_unflatten(spec, [next(rest) if leaf is _TENSOR_PLACEHOLDER else leaf for leaf in constants])
    return jax.tree_util.tree_map_with_path(_result_as_array, fn(*args, **keywords))


class _CallRecord:
    """Record of one call of a :class:`_CompiledFunction`, which the results and the backward of this call use.

    Attributes:
        wanted: for each argument, whether autograd needs its gradient; None if no gradient is recorded.
        structure: tree structure of the results.
        residuals: arrays that the backward needs besides the arguments; None if no gradient is recorded.
    """

    def __init__(self, wanted: tuple[bool, ...] | None) -> None:
        self.wanted = wanted
        self.structure: Any = None
        self.residuals: _VjpResiduals | None = None

    def keep_structure_and_residuals(self, out: Any, residuals: "_VjpResiduals | None") -> list[Any]:
        """Keep the structure of the results, and the residuals. Return the leaves of the results."""
        leaves, self.structure = jax.tree.flatten(out)
        self.residuals = residuals
        return list(leaves)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["vjp_structure", "argument_indices"])
@dataclass(frozen=True)
class _VjpResiduals:
    """The arrays that the function ``vjp`` from ``jax.vjp`` keeps for the backward: leaves of a pytree.

    Attributes:
        arrays: the leaves that are no arguments of the call. Once autograd keeps a leaf as a tensor, None is in its place; only
            random keys stay here.
        vjp_structure: the tree structure of ``vjp``.
        argument_indices: for each leaf the index of the argument that the leaf is; None if the leaf is not an argument.
    """

    arrays: list[Any]
    vjp_structure: Any
    argument_indices: tuple[int | None, ...]


def _in_torch_convention(vjp: Any, cotangents: Any) -> Any:
    """Return ``vjp(cotangents)`` in torch's convention, where complex gradients are the conjugates of JAX's."""
    return jax.tree.map(jnp.conj, vjp(jax.tree.map(jnp.conj, cotangents)))


class _CompiledFunction:
    """A compiled function from arrays to a pytree of arrays, and its compiled derivatives."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._run = jax.jit(fn)
        self._run_and_keep = jax.jit(self._run_with_residuals, static_argnums=0)
        self._pull_back = jax.jit(_in_torch_convention)
        self._derived: dict[Any, _CompiledFunction] = {}

    __name__ = "as_torch"

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if has_torch_function(tensors):  # parameters of a ShardedModule refuse outside of its forward
            return handle_torch_function(self, tensors, *tensors)
        is_recorded = torch.is_grad_enabled() and not is_transform_active()
        wanted = tuple(x.requires_grad for x in tensors)
        record = _CallRecord(wanted if is_recorded and any(wanted) else None)
        out = _CallCompiled.apply(self, record, *tensors)
        return jax.tree.unflatten(record.structure, out)

    def run(self, record: _CallRecord, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the program on ``tensors``. Return the results' leaves in new memory; ``record`` gets what the backward needs."""
        refuse_proxy_tracing("as_torch()")
        check_not_forked_after_jax("as_torch()")
        arrays = [as_jax_array(x) for x in tensors]
        if record.wanted is None:
            out, residuals = self._run(*arrays), None
        else:
            out, residuals = self._run_and_keep(record.wanted, *arrays)
        jax.block_until_ready((out, residuals))  # XLA reads the arguments, which may be freed after the call
        leaves = record.keep_structure_and_residuals(out, residuals)
        taken = {x.data_ptr() for x in tensors}
        result = []
        for x in map(as_torch_tensor, leaves):
            result.append(x.clone() if x.data_ptr() in taken else x)
            taken.add(x.data_ptr())
        return tuple(result)

    def pull_back(
        self, residuals: _VjpResiduals, arguments: Sequence[Any], arrays: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Return the gradients of the arguments that required a gradient in the forward, by the ``vjp`` of this forward.

        ``arrays``: ``residuals.arrays`` as autograd has saved them: tensors, or None for an array that is still in
        ``residuals``. ``cotangents``: the gradients of the results that are floating-point or complex.
        """
        rest = iter([x if y is None else as_jax_array(y) for x, y in zip(residuals.arrays, arrays, strict=True)])
        given = [as_jax_array(x) for x in arguments]
        leaves = [next(rest) if number is None else given[number] for number in residuals.argument_indices]
        vjp = jax.tree.unflatten(residuals.vjp_structure, leaves)
        return [as_torch_tensor(x) for x in jax.block_until_ready(self._pull_back(vjp, [as_jax_array(x) for x in cotangents]))]

    def vjp_function(self, wanted: tuple[bool, ...]) -> "_CompiledFunction":
        """Return the compiled VJP: from arguments and cotangents to gradients of the arguments with a True in ``wanted``."""

        def fn(*arrays: Any) -> Any:
            of_wanted, chosen = self._function_of_chosen(wanted, arrays)
            _, vjp, _ = jax.vjp(of_wanted, *chosen, has_aux=True)
            return list(_in_torch_convention(vjp, list(arrays[len(wanted) :])))

        return self._derived_function("gradients", wanted, fn)

    def jvp_function(self, moved: tuple[bool, ...]) -> "_CompiledFunction":
        """Return the compiled JVP, from all arguments and the tangents of those in ``moved`` to tangents of the results."""

        def fn(*arrays: Any) -> Any:
            of_moved, chosen = self._function_of_chosen(moved, arrays)
            return jax.jvp(of_moved, chosen, list(arrays[len(moved) :]), has_aux=True)[1]

        return self._derived_function("tangents", moved, fn)

    def vmap_function(self, dims: tuple[int | None, ...]) -> "_CompiledFunction":
        """Return this program under ``jax.vmap``. ``dims[i]``: batch dim of argument ``i``, or None; 0 for results."""
        return self._derived_function("batched", dims, jax.vmap(self._fn, in_axes=dims))

    def _derived_function(self, kind: str, key: Any, fn: Callable[..., Any]) -> "_CompiledFunction":
        if (kind, key) not in self._derived:
            self._derived[kind, key] = _CompiledFunction(fn)
        return self._derived[kind, key]

    def _run_with_residuals(self, wanted: tuple[bool, ...], *arrays: Any) -> tuple[Any, _VjpResiduals]:
        of_wanted, chosen = self._function_of_chosen(wanted, arrays)
        _, vjp, out = jax.vjp(of_wanted, *chosen, has_aux=True)
        leaves, structure = jax.tree.flatten(vjp)
        numbers = tuple(next((i for i, array in enumerate(arrays) if array is leaf), None) for leaf in leaves)
        own = [leaf for leaf, number in zip(leaves, numbers, strict=True) if number is None]
        return out, _VjpResiduals(own, structure, numbers)

    def _function_of_chosen(self, which: tuple[bool, ...], arrays: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """Return ``(function, arguments)``: the arguments that ``which`` flags, and the program as a function of them.

        The other arguments keep their values. The function is for ``jax.vjp(..., has_aux=True)``: it returns the program's
        differentiable results, and all of its results.
        """

        def fn(*chosen: Any) -> Any:
            rest = iter(chosen)
            out = self._fn(*(next(rest) if is_in else x for is_in, x in zip(which, arrays, strict=False)))
            return [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)], out

        return fn, [x for x, is_in in zip(arrays, which, strict=False) if is_in]


class _CallCompiled(torch.autograd.Function):
    """The torch.autograd.Function that calls a :class:`_CompiledFunction`, for autograd and torch.func."""

    @staticmethod
    def forward(program: _CompiledFunction, record: _CallRecord, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return program.run(record, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.program, ctx.record, *tensors = inputs
        arrays = [] if ctx.record.residuals is None else ctx.record.residuals.arrays
        # Autograd frees tensors once a backward has used them. Random keys cannot be tensors, and are kept here.
        kept = [None if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else as_torch_tensor(x) for x in arrays]
        arrays[:] = [x if y is None else None for x, y in zip(arrays, kept, strict=True)]
        ctx.are_inexact = [_is_inexact(x) for x in output]
        ctx.mark_non_differentiable(*(x for x in output if not _is_inexact(x)))
        ctx.save_for_backward(*tensors, *kept)
        ctx.save_for_forward(*tensors)

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        arguments, kept = saved[: len(wanted)], saved[len(wanted) :]
        cotangents = tuple(x for x, is_inexact in zip(cotangents, ctx.are_inexact, strict=True) if is_inexact)
        # A tensor of a torch.func transform that has ended hides from the call that it requires a gradient.
        if ctx.record.wanted != wanted or torch.is_grad_enabled():
            found = ctx.program.vjp_function(wanted)(*arguments, *cotangents)
        else:
            found = ctx.program.pull_back(ctx.record.residuals, arguments, kept, cotangents)
        rest = iter(found)
        return None, None, *(next(rest) if is_wanted else None for is_wanted in wanted)

    @staticmethod
    @api_boundary
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        moved = tuple(x is not None for x in tangents[2:])
        arguments = ctx.saved_tensors[: len(moved)]
        rest = iter(ctx.program.jvp_function(moved)(*arguments, *(x for x in tangents[2:] if x is not None)))
        return tuple(next(rest) if is_inexact else None for is_inexact in ctx.are_inexact)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], program: _CompiledFunction, record: _CallRecord, *tensors: torch.Tensor
    ) -> tuple[Any, Any]:
        out = _CallCompiled.apply(program.vmap_function(in_dims[2:]), record, *tensors)
        return out, (0,) * len(out)


def _is_inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
