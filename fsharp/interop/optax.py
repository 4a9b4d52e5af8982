"""from_optax: run the jaxpr of an optax transformation on each rank's elements."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch

from fsharp.errors import TreeError, problem
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.equal_values import exact_text
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import register_static, units_of
from fsharp.functional.optim.base import Transform
from fsharp.interop.arrays import as_jax_array_with_dtype_of, check_not_forked_after_jax, copy_as_tensor, number_as_jax_array
from fsharp.interop.program import CompiledTransformation, TracedTransformation, key_data_or_array
from fsharp.tracebacks import api_boundary


class OptaxState(NamedTuple):
    """State of :func:`from_optax`.

    Attributes:
        optax: the optax state, with tensors in place of numbers. A :class:`BufferPlaceholder` stands for each array with a
            value for each element of a parameter.
        buffers: by name, trees like the parameters, in the optimizer's place, with the elements of the arrays that have
            placeholders. A name is that of a field of the optax state, such as ``"0.mu"``. So a checkpoint loads only into the
            state of a transformation with the same fields.
    """

    optax: Any
    buffers: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BufferPlaceholder:
    """A placeholder in optax's state for an array whose elements are in the tree of buffers ``name``. A node without leaves."""

    name: str


register_static(BufferPlaceholder)


@api_boundary
def from_optax(tx: Any) -> Transform:
    """Return an ``optax.GradientTransformation`` as a transformation of shards.

    >>> import optax, fsharp as fs
    >>> tx = fs.optim.from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))

    optax sees the user's tree with whole leaves, so masks, labels, and conditions on shapes work as in optax. Elementwise
    operations run on the rank that holds the element. Sums over whole leaves, such as norms, are taken over ranks, for all
    leaves in one collective. A leaf of one element is a number on which any leaf may depend.

    Args:
        tx: any transformation, or an ``optax.MultiSteps``. ``fs.update(..., value=loss)`` passes on extra arguments, numbers or
            arrays, which ranks compare. ``fs.train_step`` passes ``value`` to transformations that take it.

    Returns:
        A transformation with an :class:`OptaxState`, which is sharded at the optimizer's place.

    Raises:
        LayoutError: in ``init_state`` or ``update``: the update of an element depends on more elements of a leaf that is cut
            between ranks. A sum, a largest or a smallest value over the whole leaf is allowed.
        TreeError: ``tx`` is no transformation, JAX would change a dtype, or extra arguments are wrong.
        AgreementError: transformations, extra arguments, or numbers in the state differ between ranks.

    Cost: for norms one ``all_reduce`` with 8 bytes for each leaf; one collective of 40 bytes for each axis, to compare
    transformations and numbers. State without a value for each element of a parameter is whole on each rank, and hashed in each
    update. XLA compiles once for a rank's part of the leaves; simulated ranks with the same part share a compilation. Gradients
    are copied; other tensors go to JAX and back without a copy, if their address is a multiple of 64 bytes.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TreeError(f"from_optax(): expected an optax.GradientTransformation, got {type(tx).__name__}.")
    shards = _ShardedTransformation(tx)
    return Transform(shards.init, shards.update, {"from_optax": type(tx).__name__}, name="from_optax")


class _ShardedTransformation:
    """An optax transformation on shards, with its compiled programs. A pickle holds only the transformation."""

    def __init__(self, tx: Any) -> None:
        self._given, self._tx = tx, optax.with_extra_args_support(tx)
        self._knows_extra = isinstance(tx, optax.GradientTransformationExtraArgs)
        self._traced: dict[Any, TracedTransformation] = {}
        self._programs: dict[Any, CompiledTransformation] = {}  # by rank
        self._shared: dict[Any, CompiledTransformation] = {}  # by layout and a rank's part of the leaves

    def __reduce__(self) -> Any:
        return _ShardedTransformation, (self._given,)

    def init(self, params: Any, /, *, comm: Comm | None = None) -> OptaxState:
        if comm is None:
            raise TreeError("from_optax(): init() needs the ranks: init(params, comm=comm).")

        def check() -> CompiledTransformation:
            check_not_forked_after_jax("from_optax()")
            extra = {"value": jnp.zeros(())} if self._knows_extra else {}
            return self._compiled_for(params, comm.rank, extra, is_first=True)

        program = check_on_all_ranks("from_optax()", comm, check, lambda found: {"transformation": found.traced.text})
        return _optax_state(program.traced, *program.init(params, comm))

    def update(self, grads: Any, state: OptaxState, params: Any, /, *, comm: Comm, **extra: Any) -> tuple[Any, OptaxState]:
        def check() -> tuple[CompiledTransformation, list[Any], dict[str, Any]]:
            check_not_forked_after_jax("from_optax()")
            given = self._extra_as_arrays(extra)
            program = self._compiled_for(params, comm.rank, given)
            if unknown := [name for name in program.traced.unused if name != "value"]:  # train_step always passes value
                raise _unknown_argument_error(unknown[0])
            if missing := [name for name in program.traced.extra if name not in given]:
                raise TreeError(f"update(): the optax transformation needs {missing[0]}: fs.update(..., {missing[0]}=...).")
            return program, _arrays_outside_buffers(program.traced, state), {name: given[name] for name in program.traced.extra}

        def fields(found: tuple[CompiledTransformation, list[Any], dict[str, Any]]) -> dict[str, str]:
            program, plain, given = found
            paths = (
                path for path, position in zip(program.traced.paths, program.traced.positions, strict=True) if position is None
            )
            values = {name: exact_text(key_data_or_array(x)) for name, x in [*given.items(), *zip(paths, plain, strict=True)]}
            return {"transformation": program.traced.digest, **values}

        program, plain, given = check_on_all_ranks("update()", comm, check, fields)
        trees = [state.buffers[name] for name in program.traced.tree_names]
        updates, buffers, new = program.update(grads, trees, params, plain, list(given.values()), comm)
        return updates, _optax_state(program.traced, buffers, new)

    def _extra_as_arrays(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return the extra arguments, numbers or arrays, as JAX arrays. Skip each None. TreeError for any other value."""
        found = {}
        for name, x in extra.items():
            if not self._knows_extra:
                if name != "value":
                    raise _unknown_argument_error(name)
                continue
            if x is None:
                continue
            try:
                given = _as_number_or_array(x)
                found[name] = number_as_jax_array(given)
                array, dtype = found[name], getattr(given, "dtype", found[name].dtype)
                if array.ndim and jnp.issubdtype(array.dtype, jnp.inexact) and dtype != array.dtype:
                    raise OverflowError(f"JAX would make {dtype} narrower. Call jax.config.update('jax_enable_x64', True).")
            except OverflowError as error:
                raise TreeError(f"update(): {name}={x!r:.60}: {error}") from error
            except (TypeError, ValueError) as error:
                what = f"{name}={x!r:.60} is passed to an optax transformation, which is run on shards."
                facts = [("expected", "a number or an array"), ("got", type(x).__name__)]
                remedy = "A function of whole parameters cannot be called on shards: use options that do not call one, as "
                remedy += "optax.lbfgs(linesearch=None) and optax.contrib.sam(opaque_mode=False) do."
                raise TreeError(problem("update()", what, facts, remedy)) from error
        return found

    def _compiled_for(
        self, params: Any, rank: int, extra: Mapping[str, Any], *, is_first: bool = False
    ) -> CompiledTransformation:
        nodes = units_of(params)
        sizes = tuple((name, jnp.shape(x), str(jnp.result_type(x))) for name, x in sorted(extra.items()))
        key = tuple((node.unit, node.place, node.groups) for node in nodes), sizes
        if key not in self._traced:
            self._traced[key] = self._trace_transformation(params, rank, extra, is_first=is_first)
        if (key, rank) not in self._programs:
            local = self._traced[key].leaf_ranges_of_rank(params, rank)
            shared = self._shared.setdefault((key, local), CompiledTransformation(self._traced[key], local))
            self._programs[key, rank] = shared
        return self._programs[key, rank]

    def _trace_transformation(
        self, params: Any, rank: int, extra: Mapping[str, Any], *, is_first: bool
    ) -> TracedTransformation:
        """Trace the transformation for the part of ``params`` on ``rank``.

        ``value``, the loss, is passed only if the transformation's ``update()`` takes it. If ``is_first``, the extra arguments
        of ``update()`` are not known yet, and zeros take the place of those that it requires.
        """
        try:
            return TracedTransformation(self._tx, params, rank, extra)
        except TreeError as error:
            text = str(error)
            if "value" in extra and "unexpected keyword argument 'value'" in text:
                rest = {name: x for name, x in extra.items() if name != "value"}
                return self._trace_transformation(params, rank, rest, is_first=is_first)
            if unknown := re.search(r"unexpected keyword argument '(\w+)'", text):
                raise _unknown_argument_error(unknown[1]) from error
            missing = re.search(r"missing \d+ required keyword-only arguments?: (.*)", text)
            names = re.findall(r"'(\w+)'", missing[1]) if missing and is_first else []
            if not names or any(name.endswith("_fn") for name in names):
                raise
            return self._trace_transformation(params, rank, {**extra, **dict.fromkeys(names, jnp.zeros(()))}, is_first=is_first)


def _unknown_argument_error(name: str) -> TreeError:
    return TreeError(f"update(): got {name}=..., which the transformation does not use. Check the spelling, or leave it out.")


def _as_number_or_array(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.item() if x.numel() == 1 else (x.float() if x.dtype is torch.bfloat16 else x).detach().cpu().numpy()
    return x


def _arrays_outside_buffers(traced: TracedTransformation, state: OptaxState) -> list[Any]:
    """Return the arrays of ``state`` outside of buffers, in optax's dtypes. TreeError if ``state`` does not fit ``traced``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.optax, is_leaf=lambda x: isinstance(x, BufferPlaceholder))
    found = {f"state{jax.tree_util.keystr(path)}": x for path, x in leaves}
    result = []
    for path, position, like in zip(traced.paths, traced.positions, traced.state, strict=True):
        x = found.pop(path, None)
        in_buffers = None if position is None else BufferPlaceholder(traced.tree_names[position[1]])
        if (x if isinstance(x, BufferPlaceholder) else None) != in_buffers or x is None:
            raise TreeError(
                f"update(): {path} is {'missing' if x is None else x!r:.60}, expected {in_buffers or 'a number or an array'}. "
                "Pass the state that init_state() or update() returned; only the values of its numbers may be changed."
            )
        if in_buffers is None:
            try:
                array = as_jax_array_with_dtype_of(x, like)
            except (TypeError, ValueError, OverflowError) as error:
                raise TreeError(f"update(): {path} is {x!r:.60}, expected a number or an array: {error}") from error
            if array.shape != like.shape:
                raise TreeError(f"update(): {path} has shape {list(array.shape)}, expected {list(like.shape)}.")
            result.append(array)
    if found:
        raise TreeError(f"update(): {next(iter(found))} is not in the state of this transformation.")
    return result


def _optax_state(traced: TracedTransformation, buffers: Sequence[Any], plain: Sequence[Any]) -> OptaxState:
    numbers = iter(plain)
    leaves = [
        copy_as_tensor(next(numbers)) if position is None else BufferPlaceholder(traced.tree_names[position[1]])
        for position in traced.positions
    ]
    return OptaxState(jax.tree.unflatten(traced.state_structure, leaves), dict(zip(traced.tree_names, buffers, strict=True)))
