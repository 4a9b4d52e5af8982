"""from_optax: a gradient transformation of optax on shards, by running its jaxpr on the elements that each rank has."""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optree
import torch

from fsharp.errors import TreeError
from fsharp.functional.comm.agree import agree
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import Sharded, map_units, register_leafless, units_of
from fsharp.functional.layout.unit_layout import Leaf
from fsharp.functional.optim.base import Transform
from fsharp.interop.arrays import as_array, as_tensor, dtype_of, number_as_array, number_as_tensor
from fsharp.interop.lift import UNKNOWN, Key, LeafPart, Lifted, Part, Question


class OptaxState(NamedTuple):
    """State of :func:`from_optax`.

    Attributes:
        optax: the state as optax has it: its numbers are tensors, and where it has an array like a parameter there is an
            :class:`InBuffers`.
        buffers: trees like the parameters, at the optimizer's place, with what those arrays have of each of them.
    """

    optax: Any
    buffers: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class InBuffers:
    """In the place of an array of optax: it is in one of the trees of buffers. A pytree node without leaves.

    Attributes:
        number: of the tree.
    """

    number: int


register_leafless(InBuffers)


def from_optax(tx: Any) -> Transform:
    """An ``optax.GradientTransformation`` as a transformation of shards.

    >>> import optax, fsharp as fs
    >>> tx = fs.from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))

    optax sees the user's tree with whole leaves, so masks, labels and whatever looks at ranks and sizes mean what they mean
    there. What it does to each element is done where the element is; sums over whole leaves, such as norms, are taken over the
    ranks, those of all leaves in one collective. See [Note: lifting].

    Args:
        tx: any transformation, or an ``optax.MultiSteps``. ``fs.update(..., value=loss)`` passes extra arguments on to those
            that take some; ranks compare them.

    Returns:
        A transformation with :class:`OptaxState`. Its state is sharded as the optimizer's place says.

    Raises:
        LayoutError: in ``init_state`` or ``update``: rows, columns or neighbours of a leaf that is cut are looked at, as Muon
            and factored statistics do.
        TreeError: not a transformation, or dtypes that JAX would change.
        AgreementError: transformations, extra arguments, or numbers in the state that differ between ranks.

    Cost: one ``all_reduce`` of 8 bytes a leaf for norms, one collective of 40 bytes for each axis to compare numbers, and
    nothing else is sent; compiled by XLA once for each layout. Gradients are copied; other tensors go to JAX and come back over
    DLPack without a copy, where they begin on 64 bytes.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TreeError(f"from_optax(): expected an optax.GradientTransformation, got {type(tx).__name__}.")
    knows_extra = isinstance(tx, optax.GradientTransformationExtraArgs)
    tx = optax.with_extra_args_support(tx)
    made: dict[Any, _Program] = {}
    lock = threading.RLock()  # simulated ranks are threads

    def program(params: Any, comm: Comm, extra: Mapping[str, Any]) -> "_Program":
        nodes = units_of(params)
        sizes = tuple((name, jnp.shape(x), str(jnp.result_type(x))) for name, x in sorted(extra.items()))
        key = (tuple((node.unit, node.place, node.groups) for node in nodes), comm.rank, sizes)
        with lock:
            if key not in made:
                made[key] = _Program(tx, params, comm.rank, extra)
            found = made[key]
        if not found.is_agreed:
            agree("from_optax()", {"transformation": found.text}, comm)
            found.is_agreed = True
        return found

    def init(params: Any, /, *, comm: Comm | None = None) -> OptaxState:
        if comm is None:
            raise TreeError("from_optax(): init() has to know which rank it is on: init(params, comm=comm).")
        return program(params, comm, {"value": jnp.zeros(())} if knows_extra else {}).init(params, comm)

    def update(grads: Any, state: OptaxState, params: Any, *, comm: Comm, **extra: Any) -> tuple[Any, OptaxState]:
        given = {name: jnp.asarray(x.item() if isinstance(x, torch.Tensor) else x) for name, x in extra.items() if knows_extra}
        numbers = {f"state{jax.tree_util.keystr(path)}": x for path, x in _numbers(state) if not isinstance(x, InBuffers)}
        if given or numbers:
            agree("update()", {name: repr(x.tolist()) for name, x in (given | numbers).items()}, comm)
        return program(params, comm, given).update(grads, state, params, given, comm)

    return Transform(init, update, {"from_optax": type(tx).__name__}, name="from_optax")


class _Leaf(NamedTuple):
    """A leaf as it is stored: the number of its flat buffer, and where this rank's elements are in that."""

    buffer: int
    start: int
    stop: int


class _Program:
    """A transformation of trees of one layout, on one rank.

    Attributes:
        text: what ranks have to have in common.
        is_agreed: whether they have compared it.
    """

    def __init__(self, tx: Any, params: Any, rank: int, extra: Mapping[str, Any]) -> None:
        self.is_agreed = False
        self._sizes: list[int] = []  # of this rank's buffers
        leaves: dict[tuple[str, str], tuple[LeafPart, _Leaf, Any, Any]] = {}

        def tree_of(node: Sharded) -> Any:
            cut = tuple(axis for axis in node.place.sharded if node.unit.mesh.axis_size(axis) > 1)
            for group in node.groups:
                spans = {span.leaf.path: span for span in node.unit.spans(group, node.place, rank)}
                number = len(self._sizes)
                dtypes = node.unit.groups[group].dtypes
                for leaf in node.unit.leaves_of(group):
                    start, stop, low, high = spans[leaf.path][1:] if leaf.path in spans else (0, 0, 0, 0)
                    axes = cut if leaf.numel else ()  # nothing is everywhere
                    part = LeafPart(node.unit.full_path(leaf), leaf.shape, low, high, axes, bool(node.place.varying))
                    leaves[node.name, leaf.path] = (
                        part, _Leaf(number, start, stop), dtype_of(dtypes.main), dtype_of(dtypes.accumulate)
                    )  # fmt: skip
                self._sizes.append(node.unit.local_size(group, node.place))
            return optree.tree_unflatten(node.unit.spec, [self._placeholder(node, leaf) for leaf in node.unit.leaves])

        names, self._structure = jax.tree.flatten(map_units(tree_of, params))
        if any(not isinstance(name, _Name) for name in names):
            strange = next(name for name in names if not isinstance(name, _Name))
            raise TreeError(
                f"from_optax(): the tree has a {type(strange).__name__}, which is no pytree node for JAX: register it."
            )
        rows = [leaves[name.unit, name.path] for name in names]
        self._parts, self._places = [row[0] for row in rows], [row[1] for row in rows]

        def shapes(dtypes: Sequence[Any]) -> Any:
            arrays = [jax.ShapeDtypeStruct(part.shape, dtype) for part, dtype in zip(self._parts, dtypes, strict=True)]
            return jax.tree.unflatten(self._structure, arrays)

        main, accumulate = shapes([row[2] for row in rows]), shapes([row[3] for row in rows])
        self._init, state = jax.make_jaxpr(tx.init, return_shape=True)(main)
        self._state_shapes, self._state_structure = jax.tree.flatten(state)
        self._extra = sorted(extra)

        def step(grads: Any, state: Any, params: Any, more: Sequence[Any]) -> Any:
            return tx.update(grads, state, params, **dict(zip(self._extra, more, strict=True)))

        given = [jax.ShapeDtypeStruct(jnp.shape(extra[name]), jnp.result_type(extra[name])) for name in self._extra]
        self._step, (updates, after) = jax.make_jaxpr(step, return_shape=True)(accumulate, state, main, given)
        if jax.tree.structure(after) != self._state_structure or jax.tree.structure(updates) != self._structure:
            raise TreeError(
                "from_optax(): the transformation returns updates or a state of another structure than it was given."
            )
        text = f"{self._init}\n{self._step}\n{[*self._init.consts, *self._step.consts]}"
        self.text = re.sub(r" at 0x[0-9a-f]+", "", text)  # of functions, in which processes differ
        self._families = self._assign()
        self._compiled: dict[Any, tuple[Any, dict[Key, Question]]] = {}

    @staticmethod
    def _placeholder(node: Sharded, leaf: Leaf) -> Any:
        is_here = leaf.tied_to is None and leaf.group in node.groups
        return _Name(node.name, leaf.path) if is_here else optax.MaskedNode()

    # ------------------------------------------------------------ state

    def _assign(self) -> list[tuple[int, int] | None]:
        """For each array of the state: of which leaf it has the elements, and in which tree of buffers; None for others."""
        owners: list[int | None] = [None] * len(self._state_shapes)

        def kinds(values: Sequence[Any]) -> list[int | None]:
            return [value.leaf if isinstance(value, Part) else None for value in values]

        def probe(arrays: Sequence[Any]) -> Any:
            def parts(of: Sequence[Any]) -> list[Any]:
                return [Part(leaf, self._flat(x, leaf), x.shape) for leaf, x in enumerate(of)]

            count, behind = len(self._parts), len(self._parts) + len(owners)
            state = [
                x if leaf is None else Part(leaf, self._flat(x, leaf), x.shape)
                for x, leaf in zip(arrays[count:behind], owners, strict=True)
            ]
            params, more = parts(arrays[behind : behind + count]), arrays[behind + count :]
            after = Lifted(self._parts, _AnyAnswer()).run(self._step, [*parts(arrays[:count]), *state, *params, *more])[count:]
            begun = Lifted(self._parts, _AnyAnswer()).run(self._init, params)
            found.append([a if a is not None else b for a, b in zip(kinds(after), kinds(begun), strict=True)])
            return ()

        while True:
            found: list[list[int | None]] = []
            jax.eval_shape(partial(probe), self._step.in_avals)  # a new object: known ones are not run again
            new = [a if a is not None else b for a, b in zip(owners, found[0], strict=True)]
            if new == owners:
                break
            owners = new
        taken: dict[tuple[int, Any], int] = {}
        families: dict[tuple[Any, int], int] = {}
        result: list[tuple[int, int] | None] = []
        for leaf, shape in zip(owners, self._state_shapes, strict=True):
            if leaf is None:
                result.append(None)
                continue
            nth = taken[leaf, shape.dtype] = taken.get((leaf, shape.dtype), -1) + 1
            result.append((leaf, families.setdefault((shape.dtype, nth), len(families))))
        self._family_dtypes = [dtype for dtype, _ in families]
        return result

    def _flat(self, array: Any, leaf: int) -> Any:
        part = self._parts[leaf]
        return jnp.reshape(array, (-1,))[part.first : part.last]

    # ------------------------------------------------------------ running

    def init(self, params: Any, comm: Comm) -> OptaxState:
        """The state of a transformation for these parameters."""
        [*flats], plain = self._run("init", [_arrays(params)], [], comm)
        return self._state(params, flats, plain)

    def update(
        self, grads: Any, state: OptaxState, params: Any, extra: Mapping[str, Any], comm: Comm
    ) -> tuple[Any, OptaxState]:
        """Updates and the new state."""
        shapes = [shape for shape, owned in zip(self._state_shapes, self._families, strict=True) if owned is None]
        own = [x for _, x in _numbers(state) if not isinstance(x, InBuffers)]
        plain = [number_as_array(x, shape) for x, shape in zip(own, shapes, strict=True)]
        # A scheduler wants the memory of gradients back after the step, and JAX may let go of it a little later.
        grads = map_units(lambda node: node.replace([buffer.clone() for buffer in node.buffers]), grads)
        flats = [_arrays(grads), _arrays(params), *map(_arrays, state.buffers)]
        (updates, *buffers), after = self._run("update", flats, [*plain, *(extra[name] for name in self._extra)], comm)
        return _like(grads, updates), self._state(params, buffers, after)

    def _state(self, params: Any, buffers: Sequence[Sequence[Any]], plain: Sequence[Any]) -> OptaxState:
        numbers = iter(plain)
        leaves = [number_as_tensor(next(numbers)) if owned is None else InBuffers(owned[1]) for owned in self._families]
        return OptaxState(jax.tree.unflatten(self._state_structure, leaves), tuple(_like(params, each) for each in buffers))

    def _run(self, kind: str, flats: Sequence[Sequence[Any]], plain: Sequence[Any], comm: Comm) -> Any:
        known: dict[Key, Any] = {}
        while True:
            fn, asked = self._phase(kind, tuple(sorted(known)))
            result = jax.block_until_ready(fn(flats, plain, [known[key] for key in sorted(known)]))
            if not asked:
                return result
            known |= _over_ranks(asked, result, comm)

    def _phase(self, kind: str, keys: tuple[Key, ...]) -> tuple[Any, dict[Key, Question]]:
        """What runs up to the next question, given answers to those before; and that question."""
        if (kind, keys) not in self._compiled:
            asked: dict[Key, Question] = {}

            def run(flats: Sequence[Sequence[Any]], plain: Sequence[Any], answers: Sequence[Any]) -> Any:
                lifted = Lifted(self._parts, dict(zip(keys, answers, strict=True)))
                out = lifted.run(self._init if kind == "init" else self._step, self._args(kind, flats, plain))
                asked.update({key: question for key, (question, _) in lifted.asked.items()})
                if lifted.asked:
                    return [value for _, value in lifted.asked.values()]
                assert not any(value is UNKNOWN for value in out)
                return self._results(kind, out, lifted)

            self._compiled[kind, keys] = jax.jit(run), asked
        return self._compiled[kind, keys]

    def _args(self, kind: str, flats: Sequence[Sequence[Any]], plain: Sequence[Any]) -> list[Any]:
        def part(leaf: int, tree: Sequence[Any]) -> Part:
            place = self._places[leaf]
            return Part(leaf, tree[place.buffer][place.start : place.stop], self._parts[leaf].shape)

        everything = range(len(self._parts))
        if kind == "init":
            return [part(leaf, flats[0]) for leaf in everything]
        grads, params, *buffers = flats
        numbers = iter(plain)
        state = [next(numbers) if owned is None else part(owned[0], buffers[owned[1]]) for owned in self._families]
        return [*(part(leaf, grads) for leaf in everything), *state, *(part(leaf, params) for leaf in everything), *numbers]

    def _results(self, kind: str, out: Sequence[Any], lifted: Lifted) -> Any:
        updates = [] if kind == "init" else [dict(enumerate(out[: len(self._parts)]))]
        state = out if kind == "init" else out[len(self._parts) :]
        trees: list[dict[int, Any]] = [{} for _ in self._family_dtypes]
        plain = []
        for value, owned, shape in zip(state, self._families, self._state_shapes, strict=True):
            if owned is None:
                whole = jnp.full(value.shape, value.scalar) if hasattr(value, "scalar") else value
                plain.append(whole if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key) else whole.astype(shape.dtype))
            else:
                trees[owned[1]][owned[0]] = value
        dtypes = [None] * len(updates) + list(self._family_dtypes)
        return [self._flats(tree, dtype, lifted) for tree, dtype in zip([*updates, *trees], dtypes, strict=True)], plain

    def _flats(self, values: Mapping[int, Any], dtype: Any, lifted: Lifted) -> list[Any]:
        """Flat buffers of what there is of each leaf; zero where there is nothing."""
        pieces: list[list[tuple[int, Any]]] = [[] for _ in self._sizes]
        for leaf, value in values.items():
            pieces[self._places[leaf].buffer].append(
                (self._places[leaf].start, lifted.elements(value, leaf, self._parts[leaf].shape))
            )
        result = []
        for size, found in zip(self._sizes, pieces, strict=True):
            into = dtype or (found[0][1].dtype if found else jnp.float32)
            row, end = [], 0
            for start, elements in sorted(found, key=lambda piece: piece[0]):
                if elements.size:
                    row += [jnp.zeros(start - end, into)] * (start > end) + [elements.astype(into)]
                    end = start + elements.size
            row += [jnp.zeros(size - end, into)] * (size > end)
            result.append(jnp.concatenate(row) if row else jnp.zeros(0, into))
        return result


@dataclass(frozen=True, slots=True)
class _Name:
    """A leaf, in place of it: to JAX a leaf as well."""

    unit: str
    path: str


class _AnyAnswer(dict[Key, Any]):
    """Has an answer to every question: to see what becomes of it."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: Key) -> Any:
        return jnp.zeros(())


def _numbers(state: OptaxState) -> list[tuple[Any, Any]]:
    """The leaves of a state of optax, with their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        state.optax, is_leaf=lambda x: isinstance(x, torch.Tensor | InBuffers | int | float)
    )
    return [(path, x if isinstance(x, torch.Tensor | InBuffers) else torch.from_numpy(np.array(x))) for path, x in leaves]


def _arrays(tree: Any) -> list[Any]:
    return [as_array(buffer) for node in units_of(tree) for buffer in node.buffers]


def _like(tree: Any, arrays: Sequence[Any]) -> Any:
    rest = iter(arrays)
    return map_units(lambda node: node.replace([as_tensor(next(rest)) for _ in node.groups]), tree)


def _over_ranks(asked: Mapping[Key, Question], values: Sequence[Any], comm: Comm) -> dict[Key, Any]:
    """The answers: one collective for all questions along the same axes."""
    by_question: dict[Question, list[tuple[Key, Any]]] = {}
    for (key, question), value in zip(asked.items(), values, strict=True):
        by_question.setdefault(question, []).append((key, value))
    result: dict[Key, Any] = {}
    for question, rows in by_question.items():
        numbers = torch.tensor([float(value) for _, value in rows], dtype=torch.float64, device=comm.device)
        for axis in question.axes:
            numbers = comm.all_reduce(numbers, axis, op=question.op, label="a norm of from_optax()")
        result |= {key: jnp.asarray(number) for (key, _), number in zip(rows, numbers.tolist(), strict=True)}
    return result
