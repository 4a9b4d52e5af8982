"""partition and masked: apply transformations to some of the leaves."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fsharp.errors import OptionError, PatternError, problem
from fsharp.functional.comm.equal_values import exact_text
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import Sharded, map_units, merge, units_of
from fsharp.functional.optim.base import (
    InnerUpdate,
    Transform,
    as_transform,
    known_extra_arguments,
    leaf_paths,
    value_per_leaf,
    wrapper_name,
    wrapper_update_and_apply,
)
from fsharp.functional.tree.paths import Patterns, select_paths
from fsharp.type_checks import options_checked


class PartitionState(NamedTuple):
    """State of :func:`partition`: states of the transformations by label."""

    inner_states: dict[str, Any]


@options_checked
def partition(
    transforms: Mapping[str, Any], param_labels: str | Mapping[str, str] | Callable[[str], str] | None = None
) -> Transform:
    """Return a transformation that updates each leaf by the optimizer of the leaf's label.

    For example Muon updates matrices, and AdamW all other leaves. ``multi_transform`` is an alias.

    Args:
        transforms: an ``(init, update)`` pair for each label.
        param_labels: None uses the labels from :func:`~fsharp.plan`. A string is the label of all leaves. A dict has labels by
            path pattern; the last match counts. A function takes a leaf's path and returns the label. A function that optax
            would call with the whole tree does not work here.

    Returns:
        A transformation with :class:`PartitionState`.

    Raises:
        OptionError: in ``init``: a label has no transformation.
        PatternError: in ``init``: a pattern matches no leaf, no pattern matches a leaf, or a label is not a string.

    Cost: with labels from ``plan`` each transformation has state for its own leaves alone. With ``param_labels`` each has state
    for all leaves, and gets zeros as gradients of the other leaves: one more pass over the gradients. Each transformation also
    gets all parameters. So a transformation that adds weight decay, and then takes a norm, counts the decay of all leaves. In
    optax the norm counts only the leaves of the transformation.
    """
    txs = {label: as_transform(tx) for label, tx in transforms.items()}
    config = {label: dict(tx.config) for label, tx in txs.items()}
    kind = "partition" if param_labels is None else "partition by param_labels"  # the second has state for all leaves
    name = wrapper_name(kind, *(f"{label}={tx.name}" if tx.name else "" for label, tx in txs.items()))
    extra = known_extra_arguments(*txs.values())
    if param_labels is not None:
        init, update = _partition_by_masks(txs, param_labels)
        return Transform(init, update, {**config, "param_labels": exact_text(param_labels)}, name=name, extra_arg_names=extra)

    def groups_of_label(tree: Any, label: str) -> Any:
        return map_units(lambda s: s.select_groups([g for g in s.groups if s.unit.groups[g].label == label]), tree)

    def init_by_label(params: Any, /, *, comm: Comm | None = None) -> PartitionState:
        _check_labels({s.unit.groups[g].label for s in units_of(params) for g in s.groups}, txs)
        return PartitionState({label: tx.init(groups_of_label(params, label), comm=comm) for label, tx in txs.items()})

    def step(run: InnerUpdate, grads: Any, state: Any, params: Any, comm: Comm, donate: bool | None) -> Any:
        result, new = params, {}
        for label, tx in txs.items():
            out, new[label] = run(tx, groups_of_label(grads, label), state.inner_states[label], groups_of_label(params, label))
            result = merge(result, out)
        return result, PartitionState(new)

    update, apply = wrapper_update_and_apply(step)
    return Transform(init_by_label, update, config, apply, name, extra)


def _check_labels(labels: set[str], txs: Mapping[str, Transform]) -> None:
    if missing := sorted(labels - set(txs)):
        facts = [("labels", sorted(labels)), ("transformations", sorted(txs))]
        remedy = "Add a transformation for this label, or change the labels: plan(labels=...), or param_labels."
        raise OptionError(problem("partition()", f"no transformation for the label {missing[0]!r}.", facts, remedy))


def _partition_by_masks(txs: Mapping[str, Transform], param_labels: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def labels_of(params: Any) -> dict[str, str]:
        labels = value_per_leaf("partition(param_labels)", params, param_labels)
        for path, label in labels.items():
            if not isinstance(label, str):
                raise PatternError(f"partition(): param_labels gives {path!r} the label {label!r}, expected a string.")
        return labels

    def init(params: Any, /, *, comm: Comm | None = None) -> PartitionState:
        _check_labels(set(labels_of(params).values()), txs)
        return PartitionState({label: tx.init(params, comm=comm) for label, tx in txs.items()})

    def update(grads: Any, state: PartitionState, params: Any, *, comm: Comm, **extra: Any) -> tuple[Any, PartitionState]:
        labels, result, new = labels_of(params), grads, {}
        for label, tx in txs.items():
            flags = {path: own == label for path, own in labels.items()}
            seen = _selected_or_zero(flags, grads, None, comm.rank)
            out, new[label] = tx.update(seen, state.inner_states[label], params, comm=comm, **extra)
            result = _selected_or_zero(flags, out, result, comm.rank)
        return result, PartitionState(new)

    return init, update


class MaskedState(NamedTuple):
    """State of :func:`masked`: state of the wrapped transformation."""

    inner_state: Any


@options_checked
def masked(inner: Any, mask: Patterns) -> Transform:
    """Return a transformation that applies ``inner`` to the leaves in ``mask``, and leaves other gradients unchanged.

    At the end of a chain, these unchanged gradients are added to the parameters, as in optax.

    Args:
        inner: an ``(init, update)`` pair. The pair gets zeros as gradients of the other leaves, and all parameters. So if
            ``inner`` adds weight decay, and then takes a norm, the norm counts the decay of all leaves, unlike in optax.
        mask: patterns of leaf paths, a dict from pattern to bool, or a function from a path to bool. A function that optax
            would call with the whole tree does not work here.

    Returns:
        A transformation with :class:`MaskedState`.

    Raises:
        PatternError: in ``init``, a pattern matches no leaf.

    Cost: state for all leaves, and one more pass over the gradients. For state of the selected leaves alone give leaves labels,
    ``plan(labels=...)``, and use :func:`partition`.
    """
    tx = as_transform(inner)

    def flags_of(params: Any) -> dict[str, bool]:
        paths = leaf_paths(params)
        chosen = select_paths("masked()", mask, paths)
        return {path: path in chosen for path in paths}

    def init(params: Any, /, *, comm: Comm | None = None) -> MaskedState:
        flags_of(params)
        return MaskedState(tx.init(params, comm=comm))

    def update(grads: Any, state: MaskedState, params: Any, *, comm: Comm, **extra: Any) -> tuple[Any, MaskedState]:
        flags = flags_of(params)
        seen = _selected_or_zero(flags, grads, None, comm.rank)
        out, new = tx.update(seen, state.inner_state, params, comm=comm, **extra)
        return _selected_or_zero(flags, out, grads, comm.rank), MaskedState(new)

    config = {"masked": exact_text(mask), "inner": dict(tx.config)}
    return Transform(init, update, config, name=wrapper_name("masked", tx.name), extra_arg_names=tx.extra_arg_names)


def _selected_or_zero(flags: Mapping[str, bool], selected: Any, others: Any | None, rank: int) -> Any:
    """Return a tree with the leaves of ``selected`` whose flag is set. Other leaves come from ``others``, or are zeros."""

    def select_leaves(chosen_: Sharded, other: Sharded) -> Sharded:
        out = chosen_.replace([b.clone() for b in chosen_.buffers])
        rest = other.local_leaves(rank)
        for path, view in out.local_leaves(rank).items():
            if not flags[path]:
                view.zero_() if others is None else view.copy_(rest[path])
        return out

    return map_units(select_leaves, selected, selected if others is None else others)
