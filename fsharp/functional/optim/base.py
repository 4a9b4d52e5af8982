"""Transform: an ``(init, update)`` pair of functions that get the Comm; and chains of pairs.

:func:`~fsharp.update` takes any pair, so optimizers of other libraries work unchanged. Leaves of their trees are flat shards.
For a rule that treats each element by itself this makes no difference; other rules are refused when their state is made. A
:class:`Transform` also gets the Comm, to compute norms over all ranks, and may update parameters by a fused kernel.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple, cast

import optree
import torch
from torch._C import _functorch

from fsharp.errors import OptionError, TreeError, problem
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.equal_values import exact_text
from fsharp.functional.comm.protocol import Comm, SingleComm
from fsharp.functional.layout.sharded import Sharded, check_not_encoded, is_sharded, units_of
from fsharp.functional.optim.probe import trial_fingerprint
from fsharp.functional.tree.paths import value_by_path
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import short_repr


@api_boundary
@dataclass(frozen=True, slots=True)
class Transform:
    """A gradient transformation (an optimizer or a part of one) as pure functions that know the ranks.

    All trees contain only trainable groups, and rest in the place ``"optim"``. Gradients have the ``accumulate`` dtype,
    parameters the ``main`` dtype. Each function gets only the keywords that it has as arguments: a function without an argument
    ``comm`` is called without ``comm``.

    Leaves of the trees are flat shards of this rank. If a rule uses other elements than the one to update, as a norm does, it
    has to reduce over ranks with ``comm``. This is not checked for a Transform. A bare pair ``(init, update)`` is tried on
    small tensors.

    The attributes ``init`` and ``update`` wrap the given functions: tensors of the returned state in the memory of parameters
    are cloned. ``init`` raises a TreeError for encoded parameters; ``update`` and ``apply`` do if a function returns no pair.

    Attributes:
        init: function ``init(params, comm=...) -> state``.
        update: function ``update(grads, state, params, comm=..., **extra) -> (updates, state)``. Updates are added to
            parameters.
        config: dict from names to settings, which have to be equal on all ranks.
        apply: function ``apply(grads, state, params, comm=..., donate=..., **extra) -> (params, state)`` that returns new
            parameters, for optimizers with a fused kernel. With ``donate`` the function may overwrite its arguments. If
            ``apply`` is None, the updates that ``update`` returns are added to the parameters.
        name: name of the transformation. :func:`~fsharp.update` refuses state of another name; an empty name takes any state.
        extra_arg_names: names of extra arguments that ``update`` and ``apply`` use, such as ``value``, the loss. All names but
            these and ``value`` are refused. If None, the names are read from the signatures; a signature with ``**extra`` takes
            any name. A wrapper with ``**extra`` passes the ``extra_arg_names`` of its inner transformation.
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]
    config: Mapping[str, Any]
    apply: Callable[..., tuple[Any, Any]] | None = None
    name: str = ""
    extra_arg_names: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.extra_arg_names is None:
            object.__setattr__(self, "extra_arg_names", _extra_arguments_of(self.update, *filter(None, [self.apply])))
        for name in ("init", "update", "apply"):
            if (fn := getattr(self, name)) is not None:
                fn = fn if name == "init" else _checking_results(f"{name} of {self.name or 'a transformation'}", fn)
                object.__setattr__(self, name, _ignoring_unknown_keywords(fn))
        init, update = self.init, self.update

        @wraps(init)
        def checked_init(params: Any, *args: Any, **keywords: Any) -> Any:
            check_not_encoded("init()", units_of(params))
            return with_clones_of_parameters(init(params, *args, **keywords), params)

        @wraps(update)
        def cloning_update(grads: Any, state: Any, params: Any, **keywords: Any) -> tuple[Any, Any]:
            updates, new = update(grads, state, params, **keywords)
            return updates, with_clones_of_parameters(new, params)

        object.__setattr__(self, "init", checked_init)
        object.__setattr__(self, "update", cloning_update)

    def __iter__(self) -> Any:
        return iter((self.init, self.update))


def _extra_arguments_of(*functions: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the extra arguments that ``functions`` take; None if a function takes any name."""
    names = set[str]()
    for fn in functions:
        parameters = inspect.signature(fn).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return None
        names |= {each.name for i, each in enumerate(parameters) if i > 2 or each.kind is each.KEYWORD_ONLY}
    return frozenset(names - {"comm", "donate", "params", "inplace"})


def known_extra_arguments(*transforms: Transform) -> frozenset[str] | None:
    """Return the names of the extra arguments that any of ``transforms`` uses; None if a transformation takes any name."""
    known = [tx.extra_arg_names for tx in transforms if tx.extra_arg_names is not None]
    return frozenset[str]().union(*known) if len(known) == len(transforms) else None


def check_extra_arguments(tx: Transform, extra: Mapping[str, Any]) -> None:
    """Raise an OptionError for an extra argument other than ``value`` that the transformation does not use."""
    known = frozenset(extra) if tx.extra_arg_names is None else tx.extra_arg_names | {"value"}
    if unknown := sorted(extra.keys() - known):
        facts = [("got", f"{unknown[0]}={extra[unknown[0]]!r:.60}"), ("expected", " or ".join(sorted(known)))]
        what = f"{tx.name or 'the transformation'} does not use {unknown[0]}."
        raise OptionError(problem("update()", what, facts, f"Check the spelling, or leave {unknown[0]} out."))


def _checking_results(what: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn``, wrapped so that a call raises a TreeError if it does not return a pair with a tree."""

    @wraps(fn)
    def call(*args: Any, **keywords: Any) -> Any:
        result = fn(*args, **keywords)
        if not isinstance(result, tuple | list) or len(result) != 2 or result[0] is None:
            raise TreeError(f"{what} returned {result!r:.80}, expected a pair (tree, state).")
        return result

    return call


def _ignoring_unknown_keywords(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn``, wrapped so that a call ignores keywords that are not parameters of ``fn``."""
    kinds = {name: parameter.kind for name, parameter in inspect.signature(fn).parameters.items()}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return fn

    @wraps(fn)
    def call(*args: Any, **keywords: Any) -> Any:
        return fn(*args, **{name: value for name, value in keywords.items() if name in kinds})

    return call


def with_clones_of_parameters(state: Any, params: Any) -> Any:
    """Return a new tree like ``state``, with clones of the tensors that share memory with ``params``.

    An update of ``params`` in place would change these tensors. All nodes of the new tree are new objects. ``state``
    may have nodes of an older state, and a donation of the older state marks these as donated.
    """
    own = storage_ids_of_tree(params)
    return optree.tree_map(lambda x: x if own.isdisjoint(storage_ids_of_tree(x)) else x.clone(), state)


def storage_ids_of_tree(tree: Any) -> set[int]:
    """Return a number for each storage of a tree. Two trees share memory if they have a number in common.

    For objects that are no plain tensors, and for tensors inside of ``torch.func``, the number is the id of the object.
    """
    found = set[int]()
    for leaf in optree.tree_leaves(tree, is_leaf=is_sharded):
        for x in leaf.raw_buffers if is_sharded(leaf) else (leaf,):
            is_tensor = isinstance(x, torch.Tensor) and x.layout is torch.strided
            has_storage = is_tensor and not _functorch.is_functorch_wrapped_tensor(x)
            found.add(x.untyped_storage()._cdata if has_storage else id(x))
    return found


def as_transform(tx: Any) -> Transform:
    """Return ``tx`` if it is a Transform, else a Transform made from the ``(init, update)`` pair ``tx``.

    Before its ``init`` makes state, this Transform tests on small tensors whether the pair treats each element by itself. If
    not, shards would get wrong updates, and ``init`` raises a TreeError.

    Raises TreeError if ``tx`` is no pair, or is a transformation of optax.
    """
    if isinstance(tx, Transform):
        return tx
    if type(tx).__module__.startswith("optax."):
        raise TreeError(f"got optax's {type(tx).__name__}, which takes only arrays of JAX. Pass fs.optim.from_optax(tx).")
    init, update = (getattr(tx, name, None) for name in ("init", "update"))
    if init is None and isinstance(tx, tuple) and len(tx) == 2:
        init, update = tx
    if not (callable(init) and callable(update)):
        raise TreeError(_not_a_pair_text(tx))
    keywords = {p.name for p in inspect.signature(update).parameters.values() if p.kind is p.KEYWORD_ONLY}
    pure = {"inplace": False} if "inplace" in keywords else {}
    known = _ignoring_unknown_keywords(update)

    def call_update(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        if "params" in keywords:
            return cast(tuple[Any, Any], known(grads, state, params=params, **pure, **extra))
        return cast(tuple[Any, Any], known(grads, state, params, **pure, **extra))

    def init_after_trial(params: Any, /, *, comm: Comm | None = None) -> Any:
        named = update if hasattr(update, "__qualname__") else type(update)  # its repr would have an address
        where = f"pair {named.__module__}.{named.__qualname__}".replace(".<locals>", "")
        trial = partial(trial_fingerprint, where, init, call_update, params)
        check_on_all_ranks(where, comm or SingleComm(), trial, lambda size: {"updates of small tensors": size})
        return _wrap_lists_as_param_trees(init(params), params)

    def update_with_lists(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        def is_list(node: Any) -> bool:
            return isinstance(node, StateListAsParamTree)

        flat = optree.tree_map(lambda node: optree.tree_leaves(node.leaves) if is_list(node) else node, state, is_leaf=is_list)
        updates, new = call_update(grads, flat, params, **extra)
        return updates, _wrap_lists_as_param_trees(new, params)

    kind, extra = type(tx).__qualname__, _extra_arguments_of(update)
    name = "" if type(tx) is tuple else kind
    return Transform(init_after_trial, update_with_lists, {"pair": kind}, name=name, extra_arg_names=extra)


def _not_a_pair_text(tx: Any) -> str:
    expected = "expected an (init, update) pair such as fs.optim.adamw(1e-3), got"
    kind = tx if isinstance(tx, type) else type(tx)
    if issubclass(kind, torch.optim.Optimizer):
        call = f"fs.ShardedOptimizer(model.parameters(), torch.optim.{kind.__name__}, lr=...)"
        return f"{expected} the torch optimizer {kind.__name__}. For a module pass its class and options: {call}."
    if isinstance(tx, list | tuple) and not hasattr(tx, "_fields"):  # a TrainState is a NamedTuple of trees of Sharded
        return f"{expected} a {kind.__name__}. For several pass one after another: fs.optim.chain(a, b)."
    if units_of(tx):
        return f"{expected} a tree of Sharded. The pair is the first argument: init_state(tx, params, comm=comm)."
    return f"{expected} {short_repr(tx)}. A ShardedOptimizer also takes a class, such as torch.optim.AdamW."


class StateListAsParamTree(NamedTuple):
    """A node in the state of an ``(init, update)`` pair, in place of a list of tensors. ``leaves``: a tree like the parameters.

    :func:`as_transform` replaces each list that has one tensor for each buffer of the parameters. Each tensor has the shape of
    its buffer, or is a scalar. As a tree like the parameters, the tensors are saved and resharded like the parameters.
    """

    leaves: Any


def _wrap_lists_as_param_trees(state: Any, params: Any) -> Any:
    leaves, structure = optree.tree_flatten(params)

    def is_one(node: Any) -> bool:
        return (
            type(node) is list
            and len(node) == len(leaves)
            and all(isinstance(x, torch.Tensor) and x.shape in ((), leaf.shape) for x, leaf in zip(node, leaves, strict=True))
        )

    def wrap_node(node: Any) -> Any:
        return StateListAsParamTree(optree.tree_unflatten(structure, node)) if is_one(node) else node

    return optree.tree_map(wrap_node, state, is_leaf=is_one)


def apply_transform(
    tx: Transform, grads: Any, state: Any, params: Any, *, comm: Comm, donate: bool = False, **extra: Any
) -> tuple[Any, Any]:
    """Return new parameters and state: by ``tx.apply`` if there is one, else by ``tx.update`` and addition of the updates."""
    if tx.apply is not None:
        return tx.apply(grads, state, params, comm=comm, donate=donate, **extra)
    updates, state = tx.update(grads, state, params, comm=comm, **extra)
    return apply_updates(params, updates, donate=donate), state


InnerUpdate = Callable[[Transform, Any, Any, Any], tuple[Any, Any]]
"""A function from a transformation, gradients, state and parameters to updates (or new parameters) and state."""


def wrapper_update_and_apply(
    step: Callable[[InnerUpdate, Any, Any, Any, Comm, bool | None], Any],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions ``update`` and ``apply`` of a wrapper of transformations. Both call the function ``step``.

    ``step(inner, grads, state, params, comm, donate)`` returns ``(updates, state)`` if ``donate`` is None, as in a call of
    ``update``. Otherwise ``step`` returns ``(new parameters, state)``. To run a wrapped transformation ``tx``, ``step`` calls
    its argument ``inner(tx, grads, state, params)``, which returns the same kind of pair for ``tx``.
    """

    def update(grads: Any, state: Any, params: Any, *, comm: Comm, **extra: Any) -> Any:
        return step(lambda tx, g, s, p: tx.update(g, s, p, comm=comm, **extra), grads, state, params, comm, None)

    def apply(grads: Any, state: Any, params: Any, *, comm: Comm, donate: bool, **extra: Any) -> Any:
        def inner(tx: Transform, g: Any, s: Any, p: Any) -> tuple[Any, Any]:
            return apply_transform(tx, g, s, p, comm=comm, donate=donate, **extra)

        return step(inner, grads, state, params, comm, donate)

    return update, apply


def apply_updates(params: Any, updates: Any, *, donate: bool = False) -> Any:
    """Return ``params + updates``, in the dtype of the parameters; with ``donate`` in their memory."""
    return optree.tree_map(lambda p, u: (p.add_(u) if donate else p + u).to(p.dtype), params, updates)


@api_boundary
def chain(*transforms: Any) -> Transform:
    """Return a transformation that runs ``transforms`` in order: each gets the updates of the previous one as gradients.

    >>> import fsharp as fs
    >>> tx = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3))

    Raises OptionError if there is no transformation.
    """
    txs = tuple(map(as_transform, transforms))
    if not txs:
        raise OptionError("chain(): got no transformation, expected at least one.")

    def init(params: Any, /, *, comm: Comm | None = None) -> Any:
        return tuple(tx.init(params, comm=comm) for tx in txs)

    def update(grads: Any, state: Any, params: Any, **how: Any) -> tuple[Any, Any]:
        new = []
        for tx, old in zip(txs, state, strict=False):  # all, or all but the last
            grads, s = tx.update(grads, old, params, **how)
            new.append(s)
        return grads, tuple(new)

    def apply(grads: Any, state: Any, params: Any, *, comm: Comm, donate: bool, **extra: Any) -> tuple[Any, Any]:
        grads, new = update(grads, state[:-1], params, comm=comm, **extra)
        params, last = apply_transform(txs[-1], grads, state[-1], params, comm=comm, donate=donate, **extra)
        return params, (*new, last)

    config = {f"{i}": dict(tx.config) for i, tx in enumerate(txs)}
    return Transform(init, update, config, apply, wrapper_name("chain", *(tx.name for tx in txs)), known_extra_arguments(*txs))


def wrapper_name(outer: str, *inner: str) -> str:
    """Return the name of a wrapper ``outer`` of the transformations ``inner``; empty if an inner one has no name."""
    return f"{outer}({', '.join(inner)})" if all(inner) else ""


def settings_text_to_compare(tx: Transform) -> str:
    """Return the settings of a transformation that have to be equal on all ranks, as text with a line for each field."""

    def lines(config: Mapping[str, Any], within: str) -> Iterator[str]:
        for name, value in config.items():
            if isinstance(value, Mapping):
                yield from lines(value, f"{within}{name}.")
            else:
                yield f"{within}{name}={value if isinstance(value, str) else exact_text(value)}"

    return "\n".join(lines(tx.config, ""))


def exact_texts(**values: Any) -> dict[str, str]:
    """Return settings by name, each as the text that ranks compare."""
    return {name: exact_text(value) for name, value in values.items()}


def leaf_paths(params: Any) -> list[str]:
    """Return the paths of the leaves in the buffers of ``params``, in order of unit, group and offset.

    Tied leaves are left out, as they have no elements in a buffer of their own. Frozen leaves are left out if ``params`` has
    only trained groups, as in an optimizer.
    """
    return [s.unit.path_in_tree(leaf) for s in units_of(params) for g in s.groups for leaf in s.unit.leaves_of_group(g)]


def value_per_leaf(where: str, params: Any, rules: Any) -> dict[str, Any]:
    """Return, by path, the value that ``rules`` give to each leaf of ``params``: see :func:`value_by_path`."""
    return value_by_path(where, rules, leaf_paths(params))


def check_gradients(where: str, grads: Any, params: Any) -> None:
    """Raise a TreeError, about the first unit that differs, unless the gradients fit the parameters.

    Gradients have to be summed over ranks, with the structure, places, groups and sizes of parameters, in the ``accumulate``
    dtype.
    """
    (ours, structure), (theirs, expected) = (optree.tree_flatten(tree, is_leaf=is_sharded) for tree in (grads, params))
    remedy = "Pass the gradients that value_and_grad() returned for these parameters, through reduce_scatter() and average()."
    if structure != expected:
        raise TreeError(f"{where}: gradients and parameters are trees of different structure. {remedy}")
    for g, p in zip(filter(is_sharded, ours), filter(is_sharded, theirs), strict=True):
        check_reduced(where, g)
        for what, got, expected in _mismatched_properties(g, p):
            facts = [("differs", what), ("got", got), ("expected", expected)]
            raise TreeError(problem(where, f"gradients of unit {g.name!r} do not fit its parameters.", facts, remedy))


def _mismatched_properties(grads: Sharded, params: Sharded) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(property, value, expected value)`` where a unit's gradients do not fit its parameters."""
    if grads.unit is not params.unit and grads.unit != params.unit:
        expected = f"{params.name!r} under {params.unit.strategy}, from another plan()"
        yield "layout of unit", f"{grads.name!r} under {grads.unit.strategy}", expected
    if grads.place is not params.place and grads.place != params.place:
        yield "place", grads.place, params.place
    if grads.groups != params.groups:
        yield "groups", grads.groups, params.groups
    for i, x, y in zip(grads.groups, grads.raw_buffers, params.raw_buffers, strict=True):
        want = params.unit.groups[i].dtypes.accumulate
        if not isinstance(x, torch.Tensor):
            yield f"group {i}", type(x).__name__, "a tensor"
        elif (x.shape, x.dtype) != (y.shape, want):
            yield f"group {i}", f"{x.dtype}{list(x.shape)}", f"{want}{list(y.shape)}"


def check_reduced(where: str, grads: Sharded) -> None:
    """Raise a TreeError if ``grads`` are gradients of gathered parameters: such gradients are not summed over ranks."""
    if grads.is_gathered:
        raise TreeError(
            f"{where}: the gradient of unit {grads.unit.display_name} is this rank's summand, as it is with respect to "
            "gathered parameters. Sum it by reduce_scatter(), or differentiate with respect to parameters at rest."
        )
