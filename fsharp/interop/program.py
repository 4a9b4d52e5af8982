"""Trace an optax transformation once on the whole leaves of a layout, and compile it once for each rank's part."""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optree
import torch
from jax.extend.core import ClosedJaxpr, Jaxpr

from fsharp.errors import TreeError, problem
from fsharp.functional.comm.equal_values import exact_text
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import Sharded, map_units, units_of
from fsharp.functional.layout.unit_layout import Leaf
from fsharp.interop.arrays import as_jax_array, as_torch_tensor, jax_dtype
from fsharp.interop.lift import PENDING, ArrayShard, CrossRankReduction, EquationKey, LeafRange, LocalJaxprRun


@dataclass(frozen=True, slots=True)
class LeafName:
    """The name of a leaf, in place of the leaf in a tree. To JAX it is a leaf, too."""

    unit: str
    path: str


class RankLeafRanges(NamedTuple):
    """One rank's part of each leaf in JAX's order, the dtypes of its parameter and gradient, and the sizes of flat buffers."""

    parts: tuple[LeafRange, ...]
    dtypes: tuple[tuple[Any, Any], ...]
    sizes: tuple[int, ...]


class TracedTransformation:
    """The jaxprs of an optax transformation ``tx``, for whole leaves. They do not depend on the rank, and ranks compare them.

    ``params``: the tree of parameters in the optimizer's place. ``extra``: shape and dtype of each extra argument of
    ``tx.update``, by name.

    Attributes:
        state: shape and dtype of each array of the state, in JAX's order.
        paths: path of each array of the state.
        positions: for each array of the state, where the array is stored: a pair ``(leaf, tree)``, or None. ``leaf`` is the
            index of the leaf for whose elements the array has values, as a moment has. ``tree`` is the index of the tree of
            buffers that stores these values. None: the array is stored as it is, such as a count.
        tree_names: name of each tree of buffers: the fields of optax's state that it stores, such as ``"0.mu"``. Fields of
            different leaves may share a tree: ``"0.mu+1.trace"``.
        tree_dtypes: dtype of each tree of buffers.
        unused: names of extra arguments that the update does not use.

    Raises:
        LayoutError: the transformation needs elements of a leaf that another rank holds.
        TreeError: optax refuses the tree or the extra arguments.
    """

    def __init__(self, tx: Any, params: Any, rank: int, extra: Mapping[str, Any]) -> None:
        self.names, self.structure = jax.tree.flatten(map_units(_leaf_names_or_masks, params))
        if any(not isinstance(name, LeafName) for name in self.names):
            strange = next(name for name in self.names if not isinstance(name, LeafName))
            raise TreeError(f"from_optax(): the tree has a {type(strange).__name__}, which is no JAX pytree node: register it.")
        leaf_ranges = self.leaf_ranges_of_rank(params, rank)
        rows = list(zip(leaf_ranges.parts, leaf_ranges.dtypes, strict=True))
        main, accumulate = (
            jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(part.shape, dtypes[i]) for part, dtypes in rows])
            for i in (0, 1)
        )
        named = {part.path: x for part, x in zip(leaf_ranges.parts, jax.tree.leaves(main), strict=True)}
        refused = partial(_leaves_refused_alone, tx, named)
        self.init, state = _trace_to_jaxpr("", refused, tx.init, main)
        with_paths, self.state_structure = jax.tree_util.tree_flatten_with_path(state)
        self.paths, self.state = [f"state{jax.tree_util.keystr(path)}" for path, _ in with_paths], [x for _, x in with_paths]
        self.extra = sorted(extra)

        def step(grads: Any, state: Any, params: Any, more: Sequence[Any]) -> Any:
            return tx.update(grads, state, params, **dict(zip(self.extra, more, strict=True)))

        self.step, (updates, after) = _trace_to_jaxpr(
            _EXTRA_ARGUMENTS_REMEDY, refused, step, accumulate, state, main, [extra[name] for name in self.extra]
        )
        for name, given, returned in (("updates", accumulate, updates), ("state", state, after)):
            if jax.tree.structure(returned) != jax.tree.structure(given):
                raise _other_structure_error(name, given, returned)
        for part, x in zip(leaf_ranges.parts, jax.tree.leaves(updates), strict=True):
            if not _is_broadcastable(x.shape, part.shape):
                what = f"the update of {part.path!r} has the shape {list(x.shape)}, and the parameter {list(part.shape)}."
                raise TreeError(problem("from_optax()", what, remedy="Return updates with the shapes of the parameters."))
        jaxpr = self.step.jaxpr
        used = {id(atom) for equation in jaxpr.eqns for atom in equation.invars} | {id(atom) for atom in jaxpr.outvars}
        inputs = jaxpr.invars[len(jaxpr.invars) - len(self.extra) :]
        self.unused = [name for name, var in zip(self.extra, inputs, strict=True) if id(var) not in used]
        leaf_paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(main)[0]]
        self._find_buffers_of_state(leaf_ranges, leaf_paths, [path for path, _ in with_paths])

    @cached_property
    def text(self) -> str:
        """The jaxprs of ``init`` and of the update, with every bit of their constants, as text for ranks to compare."""
        lines = [f"constant {i}: {text}" for i, text in enumerate([*_constant_texts(self.init), *_constant_texts(self.step)])]
        return "\n".join([re.sub(r" at 0x[0-9a-f]+", "", f"{self.init}\n{self.step}"), *lines])  # no addresses of functions

    @cached_property
    def digest(self) -> str:
        """A digest of :attr:`text`, 16 hexadecimal digits, for ranks and checkpoints to compare."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def leaf_ranges_of_rank(self, params: Any, rank: int) -> RankLeafRanges:
        """Return which elements of each leaf ``rank`` has, and where they are in the flat buffers of ``params``."""
        rows: dict[LeafName, tuple[Any, ...]] = {}
        sizes: list[int] = []
        for node in units_of(params):
            cut = tuple(axis for axis in node.place.sharded_axes if node.unit.mesh.axis_size(axis) > 1)
            for group in node.groups:
                spans = {span.leaf.path: span for span in node.unit.leaf_spans(group, node.place, rank)}
                stored = node.unit.groups[group].dtypes
                of_group = jax_dtype(stored.main), jax_dtype(stored.accumulate)
                for leaf in node.unit.leaves_of_group(group):
                    start, _, low, high = spans[leaf.path][1:] if leaf.path in spans else (0, 0, 0, 0)
                    axes = cut if leaf.numel else ()  # every rank has the whole of an empty leaf
                    path, is_varying = node.unit.path_in_tree(leaf), bool(node.place.varying_axes)
                    part = LeafRange(path, leaf.shape, low, high, axes, is_varying, len(sizes), start)
                    rows[LeafName(node.name, leaf.path)] = part, of_group
                sizes.append(node.unit.local_size(group, node.place))
        parts, dtypes = (tuple(rows[name][i] for name in self.names) for i in (0, 1))
        return RankLeafRanges(parts, dtypes, tuple(sizes))

    def _find_buffers_of_state(self, leaf_ranges: RankLeafRanges, leaf_paths: Sequence[Any], paths: Sequence[Any]) -> None:
        """Find by trials, on the leaves of one rank, where the arrays of the state are stored.

        Set ``self.positions``, and name and dtype of each tree of buffers. A tree stores at most one array of a leaf.
        ``leaf_paths`` and ``paths`` are the key paths of the leaves, and of the arrays of the state.
        """
        parts, count, behind = leaf_ranges.parts, len(self.names), len(self.names) + len(self.state)
        owners: list[int | None] = [None] * len(self.state)

        def part(leaf: int, x: Any) -> ArrayShard:
            return ArrayShard(leaf, jnp.reshape(x, (-1,))[parts[leaf].first : parts[leaf].last], x.shape)

        def owner(*values: Any) -> int | None:
            found = (value for value in values if isinstance(value, ArrayShard))
            return next((x.leaf for x in found if math.prod(x.shape) == math.prod(parts[x.leaf].shape)), None)

        def probe(arrays: Sequence[Any]) -> Any:
            lifted, params = LocalJaxprRun(parts, None), [part(i, x) for i, x in enumerate(arrays[behind : behind + count])]
            grads = [part(i, x) for i, x in enumerate(arrays[:count])]
            state = [x if leaf is None else part(leaf, x) for x, leaf in zip(arrays[count:behind], owners, strict=True)]
            out = lifted.run_jaxpr(self.step, [*grads, *state, *params, *arrays[behind + count :]])
            begun = lifted.run_jaxpr(self.init, params)
            found.append([a if a is not None else owner(*x) for a, *x in zip(owners, out[count:], begun, strict=True)])
            if found[-1] == owners:
                self.in_stored_form(lifted, out, owners)
                self.in_stored_form(lifted, begun, owners)
            return ()

        while True:
            found: list[list[int | None]] = []
            jax.eval_shape(partial(probe), self.step.in_avals)  # a new function each time, as JAX caches results by function
            if found[0] == owners:
                break
            owners = found[0]
        taken: dict[tuple[int, Any], int] = {}
        trees: dict[tuple[Any, int], int] = {}
        fields: list[dict[str, None]] = []
        self.positions: list[tuple[int, int] | None] = []
        for leaf, shape, path in zip(owners, self.state, paths, strict=True):
            if leaf is None:
                self.positions.append(None)
                continue
            nth = taken[leaf, shape.dtype] = taken.get((leaf, shape.dtype), -1) + 1
            tree = trees.setdefault((shape.dtype, nth), len(trees))
            self.positions.append((leaf, tree))
            fields += [{}] * (len(trees) - len(fields))
            fields[tree] = fields[tree] | {_field_name(path, leaf_paths[leaf]): None}
        self.tree_dtypes, self.tree_names = [dtype for dtype, _ in trees], list[str]()
        for i, (dtype, names) in enumerate(zip(self.tree_dtypes, fields, strict=True)):
            name = "+".join(names)
            unique = name, f"{name}.{dtype}", f"{name}.{dtype}.{i}"  # a field may have leaves of two dtypes
            self.tree_names.append(next(each for each in unique if each not in self.tree_names))

    def in_stored_form(self, lifted: LocalJaxprRun, out: Sequence[Any], owners: Sequence[int | None]) -> list[Any]:
        """Return the results ``out`` of the run ``lifted`` as this rank stores them: its part of an array, or a whole array.

        ``out`` has, in a run of ``update``, first the update of each leaf; then, in each run, the arrays of the state.
        ``owners`` has an item for each array of the state. The item is the index of a leaf if the array has a value for each
        element of this leaf: then a rank stores its part of the array. It is None if each rank stores the whole array.

        Raises a LayoutError if a result is made of elements of a leaf other than its owner, and ranks differ in these elements.
        """
        updates = range(len(out) - len(self.state))
        wanted: list[tuple[int | None, str]] = [(i, f"the update of {lifted.leaves[i].path!r}") for i in updates]
        wanted += zip(owners, self.paths, strict=True)
        return [lifted.in_stored_form(x, *each, (-1, i)) for i, (x, each) in enumerate(zip(out, wanted, strict=True))]


class _CompiledRound(NamedTuple):
    """A jaxpr, compiled for one rank's part of the leaves, up to the reductions over ranks that are still to be made.

    Attributes:
        run: returns all results; or, if ``pending`` is not empty, this rank's values for the reductions in ``pending``.
        run_common: returns the result of ``run``, with None for elements of leaves that are cut between ranks. All ranks have
            the same program ``run_common``. Programs ``run`` may differ between ranks, and round equal values differently.
            ``run_common`` is None if ``run`` suffices.
        pending: the reductions at which ``run`` stops. Their results are given to the next round.
    """

    run: Callable[..., Any]
    run_common: Callable[..., Any] | None
    pending: dict[EquationKey, CrossRankReduction]


class CompiledTransformation:
    """A traced transformation, compiled for a rank's part of the leaves. Simulated ranks with equal parts share one object."""

    def __init__(self, traced: TracedTransformation, leaf_ranges: RankLeafRanges) -> None:
        self.traced = traced
        self._parts, _, self._sizes = leaf_ranges
        cut = {part.buffer for part in self._parts if part.axes}
        self._is_common = [buffer not in cut for buffer in range(len(self._sizes))]
        self._compiled: dict[Any, _CompiledRound] = {}

    def init(self, params: Any, comm: Comm) -> tuple[list[Any], list[Any]]:
        """Return a new state as two lists: trees of Sharded like ``params`` (moments), and other arrays (counts).

        ``params``: the tree of parameters in the optimizer's place.
        """
        flats, plain = self._run_in_rounds("init", [_local_shards_as_arrays(params)], [], comm)
        return [_tensor_tree_like(params, each) for each in flats], plain

    def update(
        self, grads: Any, buffers: Sequence[Any], params: Any, plain: Sequence[Any], extra: Sequence[Any], comm: Comm
    ) -> tuple[Any, list[Any], list[Any]]:
        """Return ``(updates, trees, arrays)``: the updates, and the new state in the two lists of :meth:`init`.

        ``buffers`` and ``plain``: the two lists of the old state. ``extra``: the extra arguments, in the order of their names.
        """
        # A scheduler reuses the memory of gradients after the step, while JAX may still hold it.
        grads = map_units(lambda node: node.replace([buffer.clone() for buffer in node.buffers]), grads)
        flats = [_local_shards_as_arrays(grads), _local_shards_as_arrays(params), *map(_local_shards_as_arrays, buffers)]
        (updates, *after), new = self._run_in_rounds("update", flats, [*plain, *extra], comm)
        return _tensor_tree_like(grads, updates), [_tensor_tree_like(params, each) for each in after], new

    def _run_in_rounds(self, kind: str, flats: Sequence[Sequence[Any]], plain: Sequence[Any], comm: Comm) -> Any:
        """Return the results of the jaxpr of ``kind``, ``"init"`` or ``"update"``.

        A run stops at reductions whose results are not known yet. Ranks compute these reductions together, and the jaxpr runs
        again with the results, until all are known. ``flats``: for each tree of gradients, parameters or state, this rank's
        flat buffers as arrays. ``plain``: all other arguments, such as a count.
        """
        known: dict[EquationKey, Any] = {}
        device = next((x.device for arrays in flats for x in arrays if x.size), None)
        while True:
            keys = tuple(sorted(known))
            args = flats, plain, [known[key] for key in keys]
            with jax.default_device(device):  # for results that depend on no argument, such as the zeros of a new state
                if (kind, keys) not in self._compiled:
                    self._compiled[kind, keys] = self._compile_round(kind, keys, args)
                run, run_common, pending = self._compiled[kind, keys]
                result, common = run(*args), None if run_common is None else run_common(*args)
                jax.block_until_ready((result, common))  # both read memory of torch, which the caller may write to next
                if common is not None:
                    replace = lambda common, mine: mine if common is None else common  # noqa: E731
                    result = jax.tree.map(replace, common, result, is_leaf=lambda x: x is None)
            if not pending:
                return result
            known |= _reduce_pending(pending, result, comm)

    def _compile_round(self, kind: str, keys: Sequence[EquationKey], args: Any) -> _CompiledRound:
        pending: dict[EquationKey, CrossRankReduction] = {}
        run, run_common = (jax.jit(partial(self._run_until_reductions, kind, keys, pending, only)) for only in (False, True))
        run(*args)  # compiles, and fills ``pending``
        if all(self._is_common):  # then all ranks have the same program
            return _CompiledRound(run, None, pending)
        rounded = (jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(run_common.eval_shape(*args)))
        return _CompiledRound(run, run_common if any(rounded) else None, pending)

    def _run_until_reductions(
        self,
        kind: str,
        keys: Sequence[EquationKey],
        found_pending: dict[EquationKey, CrossRankReduction],
        is_common_only: bool,
        flats: Any,
        plain: Any,
        reduced: Any,
    ) -> Any:
        traced, lifted = self.traced, LocalJaxprRun(self._parts, dict(zip(keys, reduced, strict=True)))
        out = lifted.run_jaxpr(traced.init if kind == "init" else traced.step, self._jaxpr_args(kind, flats, plain))
        out = traced.in_stored_form(lifted, out, [position and position[0] for position in traced.positions])
        found_pending.update({key: reduction for key, (reduction, _) in lifted.pending.items()})
        if lifted.pending:
            return [None if is_common_only and reduction.axes else value for reduction, value in lifted.pending.values()]
        assert not any(value is PENDING for value in out)
        trees, others = self._split_updates_and_state(kind, out, lifted)
        if is_common_only:
            trees = [[x if common else None for x, common in zip(tree, self._is_common, strict=True)] for tree in trees]
        return trees, others

    def _jaxpr_args(self, kind: str, flats: Sequence[Sequence[Any]], plain: Sequence[Any]) -> list[Any]:
        def part(leaf: int, tree: Sequence[Any]) -> ArrayShard:
            mine = self._parts[leaf]
            elements = tree[mine.buffer][mine.start : mine.start + mine.last - mine.first]
            return ArrayShard(leaf, elements, mine.shape)

        everything = range(len(self._parts))
        if kind == "init":
            return [part(leaf, flats[0]) for leaf in everything]
        grads, params, *buffers = flats
        numbers, rows = iter(plain), zip(self.traced.positions, self.traced.state, strict=True)
        state = [next(numbers) if x is None else part(x[0], buffers[x[1]])._replace(shape=like.shape) for x, like in rows]
        return [*(part(leaf, grads) for leaf in everything), *state, *(part(leaf, params) for leaf in everything), *numbers]

    def _split_updates_and_state(self, kind: str, out: Sequence[Any], lifted: LocalJaxprRun) -> Any:
        updates = [] if kind == "init" else [dict(enumerate(out[: len(self._parts)]))]
        state = out[len(updates) and len(self._parts) :]
        trees: list[dict[int, Any]] = [{} for _ in self.traced.tree_dtypes]
        plain = []
        for value, position, shape in zip(state, self.traced.positions, self.traced.state, strict=True):
            if position is None:
                whole = jnp.full(value.shape, value.scalar) if hasattr(value, "scalar") else value
                plain.append(whole if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key) else whole.astype(shape.dtype))
            else:
                trees[position[1]][position[0]] = value
        dtypes = [None] * len(updates) + list(self.traced.tree_dtypes)
        return [self._flat_buffers(tree, dtype, lifted) for tree, dtype in zip([*updates, *trees], dtypes, strict=True)], plain

    def _flat_buffers(self, values: Mapping[int, Any], dtype: Any, lifted: LocalJaxprRun) -> list[Any]:
        """Return this rank's flat buffers: ``values`` by index of the leaf, and zeros elsewhere.

        ``dtype``: dtype of the buffers; None: for each buffer the dtype to which JAX promotes its values.
        """
        pieces: list[list[tuple[int, Any]]] = [[] for _ in self._sizes]
        for leaf, value in values.items():
            mine = self._parts[leaf]
            pieces[mine.buffer].append((mine.start, lifted.elements(value, leaf, mine.shape)))
        result = []
        for size, found in zip(self._sizes, pieces, strict=True):
            into = dtype or (jnp.result_type(*(elements.dtype for _, elements in found)) if found else jnp.float32)
            buffer = jnp.zeros(size, into)
            for start, elements in found:
                buffer = buffer.at[start : start + elements.size].set(elements.astype(into))
            result.append(buffer)
        return result


def _leaf_names_or_masks(node: Sharded) -> Any:
    def name(leaf: Leaf) -> Any:
        is_here = leaf.tied_to is None and leaf.group in node.groups
        return LeafName(node.name, leaf.path) if is_here else optax.MaskedNode()

    return optree.tree_unflatten(node.unit.structure, [name(leaf) for leaf in node.unit.leaves])


def _field_name(path: Sequence[Any], leaf_path: Sequence[Any]) -> str:
    """Return the name of a field of optax's state, such as ``"0.mu"``: ``path`` in the state, without the leaf's own path.

    The leaf's path may be followed by keys of a dict for each leaf. If ``path`` has the leaf's path twice, the last one counts.
    """
    field, count = tuple(path), len(leaf_path)
    starts = [i for i in range(len(field) - count + 1) if field[i : i + count] == tuple(leaf_path)]
    if starts:
        field = field[: starts[-1]] + field[starts[-1] + count :]
    return jax.tree_util.keystr(field, simple=True, separator=".") or "state"


def _trace_to_jaxpr(remedy: str, refused: Callable[[], str], fn: Any, *args: Any) -> Any:
    """Trace ``fn``, a function of optax, with ``args``. Return its jaxpr, and the shapes and dtypes of its results.

    If ``fn`` raises an error, raise a TreeError. After a TypeError or ValueError its message ends with the text ``remedy``.
    After any other error the message has the text of ``refused()``, which names the leaves for which ``fn`` fails.
    """
    try:
        return jax.make_jaxpr(fn, return_shape=True)(*args)
    except Exception as error:
        what = f"the transformation raises {type(error).__name__}: {error}"
        if isinstance(error, TypeError | ValueError):
            raise TreeError(problem("from_optax()", what, remedy=remedy)) from error
        remedy = "It fails without fsharp as well, under jax.jit. optax.partition() gives such leaves another transformation."
        raise TreeError(problem("from_optax()", what, [("for", refused())], remedy)) from error


def _is_broadcastable(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return whether an array of ``shape`` can be broadcast to the shape ``to``."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _other_structure_error(name: str, given: Any, returned: Any) -> TreeError:
    before, after = (
        {f"{name}{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (given, returned)
    )
    what = f"update() of the transformation returns {name} of another structure than it takes."
    changes = [("added", sorted(after - before)), ("missing", sorted(before - after))]
    facts = [(change, ", ".join(paths[:4])) for change, paths in changes if paths]
    remedy = "Use a transformation that keeps the structure: of a measurement, optax.snapshot in place of optax.monitor."
    return TreeError(problem("from_optax()", what, facts, remedy))


def _leaves_refused_alone(tx: Any, named: Mapping[str, Any]) -> str:
    """Try ``tx`` on each leaf alone, as if the leaf were the whole tree. Return, as text, the leaves for which ``tx`` fails.

    ``named``: dict from the name of a leaf to its shape and dtype. The text names at most four leaves; it is ``"unknown"`` if
    ``tx`` takes each leaf alone.
    """
    found = []
    for name, x in named.items():
        try:
            jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), x)
        except Exception:
            found.append(f"{name!r:.80}: {x.dtype}{list(x.shape)}")
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "") or "unknown"


_EXTRA_ARGUMENTS_REMEDY = (
    "fs.update(..., name=number) passes extra arguments on, and fs.train_step passes value, the mean loss. A function of whole "
    "parameters (value_fn, grad_fn, obj_fn) cannot be called on shards: use options that do not call one, as "
    "optax.lbfgs(linesearch=None) and optax.contrib.sam(opaque_mode=False) do."
)


def _constant_texts(closed: ClosedJaxpr) -> Iterator[str]:
    """Yield the exact text of each constant of a jaxpr and of its inner jaxprs. The jaxpr's own text shortens constants."""

    def texts_within(value: Any) -> Iterator[str]:
        if isinstance(value, ClosedJaxpr):
            yield from texts_within(list(value.consts))
        if isinstance(value, ClosedJaxpr | Jaxpr):  # from JAX 0.11 on a jaxpr is both
            for equation in value.eqns:
                for each in equation.params.values():
                    yield from texts_within(each)
        elif isinstance(value, list | tuple):
            for each in value:
                yield from texts_within(each)
        elif hasattr(value, "tobytes") or isinstance(value, jax.Array):
            yield exact_text(key_data_or_array(value))

    yield from texts_within(closed)


def key_data_or_array(x: Any) -> Any:
    """Return an array with readable bytes: the data of a random key, or the array itself."""
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _local_shards_as_arrays(tree: Any) -> list[Any]:
    return [as_jax_array(buffer) for node in units_of(tree) for buffer in node.buffers]


def _tensor_tree_like(tree: Any, arrays: Sequence[Any]) -> Any:
    rest = iter(arrays)
    return map_units(lambda node: node.replace([as_torch_tensor(next(rest)).to(b.device) for b in node.buffers]), tree)


def _reduce_pending(
    pending: Mapping[EquationKey, CrossRankReduction], values: Sequence[Any], comm: Comm
) -> dict[EquationKey, Any]:
    """Reduce ``values``, this rank's summands of ``pending``, over ranks. Return the results by key.

    Reductions by the same operation along the same axes share a collective.
    """
    by_reduction: dict[CrossRankReduction, list[tuple[EquationKey, Any]]] = {}
    for (key, reduction), value in zip(pending.items(), values, strict=True):
        by_reduction.setdefault(reduction, []).append((key, value))
    result: dict[EquationKey, Any] = {}
    for reduction, rows in by_reduction.items():
        numbers = torch.tensor([float(value) for _, value in rows], dtype=torch.float64, device=comm.device)
        for axis in reduction.axes:
            numbers = comm.all_reduce(numbers, axis, op=reduction.op, label="a norm of from_optax()")
        for (key, value), number in zip(rows, numbers.tolist(), strict=True):  # float32 could not hold integers of 32 bits
            exact = int(number) if jnp.issubdtype(value.dtype, jnp.integer) else number
            result[key] = jnp.asarray(np.asarray(exact).astype(value.dtype))
    return result
