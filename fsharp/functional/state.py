"""TrainState: parameters, main copies and optimizer state of a run; init_state makes a state, update changes it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import TreeError, problem
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.checked_units import checked_units_of
from fsharp.functional.comm.equal_values import exact_text
from fsharp.functional.comm.protocol import Comm, engine_of, reporting_format_errors
from fsharp.functional.comm.residuals import zero_residuals
from fsharp.functional.comm.tree_labels import copy_tree_labels, label_new_tree
from fsharp.functional.encoding import add_gathered_differences, encode_differences, encode_params_at_rest
from fsharp.functional.layout.lent_memory import check_not_lent_to_jax
from fsharp.functional.layout.sharded import (
    Sharded,
    check_not_donated,
    is_sharded,
    map_units,
    mark_donated,
    merge,
    register_static,
    trainable,
    units_of,
)
from fsharp.functional.layout.text import unit_texts_by_property
from fsharp.functional.moves import gather, host_buffers_to_device
from fsharp.functional.optim.base import (
    Transform,
    apply_transform,
    as_transform,
    check_extra_arguments,
    check_gradients,
    storage_ids_of_tree,
    with_clones_of_parameters,
)
from fsharp.torch_compile import disable_compile
from fsharp.type_checks import options_checked


class TrainState(NamedTuple):
    """The state of a training run between two steps: parameters, main copies and optimizer state. A pytree.

    Attributes:
        step: number of updates, skipped ones included.
        params: parameters in the ``compute`` dtype, or encoded in their format: a tree of :class:`~fsharp.Sharded`, in the
            strategy's place for parameters.
        main: main copies (master weights): a tree of :class:`~fsharp.Sharded`, in the strategy's place for optimizer state.
            Groups without a main copy are left out.
        opt: state of the gradient transformation, in the same place as ``main``.
        made_by: name of the gradient transformation; a pytree node without leaves.
        residuals: encoding errors of earlier gradients, with ``Precision(feedback=True)``: a
            :class:`~fsharp.checkpoint.PerRank` of this rank's tensors by unit; None without feedback.
    """

    step: int
    params: Any
    main: Any
    opt: Any
    made_by: Any = None
    residuals: Any = None


@dataclass(frozen=True, slots=True)
class MadeBy:
    """The name of a transformation, such as ``"adamw"``, or an empty text: a pytree node without leaves."""

    name: str


register_static(MadeBy)


@options_checked
def init_state(tx: Any, sharded: Any, *, comm: Comm, donate: bool = False) -> TrainState:
    """Return the state of a new training run: parameters, main copies, and fresh optimizer state.

    Args:
        tx: the optimizer: an ``(init, update)`` pair such as :func:`~fsharp.optim.adamw` returns.
        sharded: parameters from :func:`~fsharp.shard` or :func:`~fsharp.init_params`, called without ``dtype="compute"``.
        comm: the ranks.
        donate: use the memory of ``sharded`` for the state; a later use of ``sharded`` raises an error. If False, buffers are
            copied.

    Raises:
        TreeError: ``sharded`` is no tree of Sharded, is a partial sum, or is not in the ``main`` dtype.
        TreeError: ``tx`` is another library's pair, and a trial shows that it does not treat each element by itself.
        AgreementError: ranks have different layouts or optimizers.

    Cost: one collective of 40 bytes for each axis. Where main copies are sharded and parameters are not, one gather; for
        formats that encode whole leaves a collective for their scales. For another library's pair a trial: about ten updates of
        a tree of small tensors.
    """
    tx = as_transform(tx)

    def check() -> list[Sharded]:
        if type(sharded) is TrainState:
            raise TreeError("init_state(): got a TrainState, expected parameters. For fresh optimizer state pass state.params.")
        nodes = checked_units_of("init_state()", sharded, comm)
        for node in nodes:
            _check_initial_parameters(node)
        return nodes

    def fields(nodes: list[Sharded]) -> dict[str, str]:
        places = "\n".join(f"{node.name or '(root)'}: {node.place}" for node in nodes)
        return {**unit_texts_by_property([node.unit for node in nodes]), "place": places, "tx": exact_text(tx.config)}

    check_on_all_ranks("init_state()", comm, check, fields)
    start = label_new_tree(sharded if donate else optree.tree_map(torch.clone, sharded), comm)
    resting = encode_params_at_rest(start, comm)
    copy_tree_labels(units_of(resting), units_of(start))
    params = gather(resting, comm=comm, to="params")
    copy_tree_labels(units_of(params), units_of(start))
    main = trainable(gather(start, comm=comm, to="optim"))

    def unsliced(node: Sharded) -> Sharded:  # a slice of larger memory is copied, so that this memory can be freed
        return node.with_buffers([b.clone() if b.untyped_storage().nbytes() > b.nbytes else b for b in node.buffers])

    copies = map_units(unsliced, _select_groups_with_main_copy(main))
    residuals = zero_residuals([node.unit for node in units_of(params)], comm.device)
    state = TrainState(0, params, copies, tx.init(main, comm=comm), MadeBy(tx.name), residuals)
    if donate:
        mark_donated(units_of(sharded))
    return state


def _check_initial_parameters(node: Sharded) -> None:
    for group, buffer in zip(node.groups, node.buffers, strict=True):
        dtypes = node.unit.groups[group].dtypes
        if node.place.partial_axes:
            raise TreeError(
                f"init_state(): unit {node.unit.display_name} rests partial ({node.place}), expected parameters. Pass what "
                "shard() or init_params() returned."
            )
        if buffer.dtype != dtypes.main:
            facts = [("place", node.place)]
            remedy = "Pass what shard(params, layout, comm) or init_params() returns, without dtype='compute'."
            what = f"unit {node.unit.display_name} has a {dtypes.main} main copy, which cannot be made from {buffer.dtype}."
            raise TreeError(problem("init_state()", what, facts, remedy))


@disable_compile
def update(tx: Any, grads: Any, state: TrainState, *, comm: Comm, donate: bool = False, **extra: Any) -> TrainState:
    """Update parameters and optimizer state by a gradient transformation, and return the new state.

    The update runs on shards, in the place of optimizer state. Then updated parameters are gathered to their own place.

    Args:
        tx: the optimizer: an ``(init, update)`` pair such as :func:`~fsharp.optim.adamw` returns.
        grads: mean gradients in the place of optimizer state, from :func:`~fsharp.reduce_scatter` and :func:`~fsharp.average`.
        state: the state before the update.
        comm: the ranks.
        donate: allow the function to overwrite ``state`` and all tensors that share its memory. A later use of ``state`` raises
            an error. If an error comes after a part was overwritten, a note on the error says so: then load a checkpoint.
        extra: more arguments for the transformation, equal on all ranks, such as ``value``, the mean loss. Any transformation
            takes ``value``.

    Returns:
        The state after the update. Frozen groups keep their tensors.

    Raises:
        TreeError: gradients do not fit the parameters, or are still sums.
        TreeError: the state belongs to another transformation, or was donated.
        TreeError: with ``donate``, another library reads the memory of the state.
        MeshError: ``comm`` is on another mesh than ``grads``.
        OptionError: the transformation does not use an extra argument.

    Cost: if the places of parameters and optimizer state differ, one gather.
    """
    tx = as_transform(tx)
    check_extra_arguments(tx, extra)
    nodes = checked_units_of("update()", grads, comm)
    before, mains, states = map(units_of, (state.params, state.main, state.opt))
    kept = [*before, *mains, *states]
    check_not_donated("update()", kept)
    if donate:
        check_not_lent_to_jax("update()", kept)
    _check_same_transform(tx, state)
    for node in nodes:
        if node.reduction == "sum":
            raise TreeError(
                f"update(): the gradient of unit {node.unit.display_name} is the sum that value_and_grad() returned. Divide it "
                "first: metrics, grads = average(loss, grads, comm=comm)."
            )
    noting = _noting_overwritten_state(kept if donate else [])
    with noting, reporting_format_errors(comm, "update()"), torch.no_grad():
        main_and_opt, engine = (state.main, state.opt), engine_of(comm)
        if engine is not None:
            main_and_opt = engine.begin_state_fetch(main_and_opt, state.params, grads, donate=donate)
        main, opt = host_buffers_to_device(main_and_opt, comm.device)
        resting = gather(trainable(state.params), comm=comm, to="optim")
        has_copies = any(node.unit.groups_with_main_copy for node in nodes) or any(node.groups for node in mains)
        old = map_units(_clone_groups_missing_main, merge(resting, main), main) if has_copies else resting
        check_gradients("update()", grads, old)
        if donate and not storage_ids_of_tree(old).isdisjoint(storage_ids_of_tree(opt)):  # tx.apply has kept parameters
            opt = with_clones_of_parameters(opt, old)
        new, opt = apply_transform(tx, grads, opt, old, comm=comm, donate=donate, **extra)
        if donate:
            opt = map_units(lambda node: node.replace(node.lazy or node.raw_buffers) if is_sharded(node) else node, opt)
        if has_copies:
            main = _select_groups_with_main_copy(new)
            new = encode_differences(new, resting, step=state.step, rank=comm.rank)
        sent = encode_params_at_rest(new, comm)
        fresh = units_of(sent)
        copy_tree_labels(fresh, before, is_update=True)
        if engine is not None:
            params, (main, opt) = engine.gather_updated_params(sent, state.params, (main, opt), donate=donate)
        else:
            moved = gather(sent, comm=comm, to="params")
            params = merge(state.params, add_gathered_differences(state.params, moved, rank=comm.rank))
        moved_nodes = units_of(params)
        copy_tree_labels(moved_nodes, fresh)
    if donate:
        mark_donated(kept, [*moved_nodes, *units_of(main)])
    return TrainState(state.step + 1, params, main, opt, MadeBy(tx.name), state.residuals)


@contextmanager
def _noting_overwritten_state(nodes: Sequence[Sharded]) -> Iterator[None]:
    """Return a context that adds a note to an error in it, if buffers of ``nodes`` have been written to in the context."""

    def versions() -> list[int]:
        return [0 if x.is_inference() else x._version for node in nodes for x in node.raw_buffers]

    before = versions()
    try:
        yield
    except BaseException as error:
        if versions() != before:
            error.add_note("update(donate=True) had overwritten parts of the state before this error. Load a checkpoint.")
        raise


def _check_same_transform(tx: Transform, state: TrainState) -> None:
    made_by = state.made_by.name if isinstance(state.made_by, MadeBy) else ""
    if state.opt is None and tx.name and isinstance(state.made_by, MadeBy) and not made_by:
        remedy = (
            "fs.ShardedOptimizer(model.parameters(), tx) makes that of a module's train_state; init_state(tx, ...) any other."
        )
        raise TreeError(problem("update()", "the state has no optimizer state.", [("update by", tx.name)], remedy))
    if made_by and tx.name and made_by != tx.name:
        facts = [("state of", made_by), ("update by", tx.name)]
        remedy = "Make a new state: init_state(tx, params, comm=comm), or state._replace(opt=tx.init(...), made_by=None)."
        raise TreeError(problem("update()", "the optimizer state is that of another transformation.", facts, remedy))


def _select_groups_with_main_copy(tree: Any) -> Any:
    return map_units(lambda node: node.select_groups(node.unit.groups_with_main_copy), tree)


def _clone_groups_missing_main(node: Sharded, main_copies: Sharded) -> Sharded:
    """Return ``node`` with cloned buffers in groups that send differences, but have no main copies yet.

    The state was resharded from a layout without main copies. An update in place would lose the old parameters, from which the
    difference is taken.
    """
    missing = [g for g in node.groups if g not in main_copies.groups and node.unit.groups[g].dtypes.update is not None]
    if not missing:
        return node
    return node.replace([b.clone() if g in missing else b for g, b in zip(node.groups, node.buffers, strict=True)])
