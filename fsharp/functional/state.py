"""What is trained, from its beginning through each update: parameters, main copies, the state of an optimizer."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import TreeError, problem
from fsharp.functional.comm.agree import together
from fsharp.functional.comm.exact_text import exact_text
from fsharp.functional.comm.protocol import Comm, Engine, telling_format_errors
from fsharp.functional.comm.tree_names import name_as, name_trees, name_updated
from fsharp.functional.layout.sharded import (
    Sharded,
    check_kept,
    check_not_lent,
    donate_nodes,
    is_sharded,
    map_units,
    merge,
    register_leafless,
    trainable,
    units_of,
)
from fsharp.functional.layout.text import describe_units
from fsharp.functional.moves import check_comm, gather, on_device
from fsharp.functional.optim.base import Transform, apply_transform, as_transform, check_extra, check_gradients
from fsharp.functional.stored import add_differences, encode_differences, stored
from fsharp.torch_compile import uncompiled
from fsharp.type_checks import options_checked


class TrainState(NamedTuple):
    """Everything a step needs and makes; a pytree.

    Attributes:
        step: updates made, skipped ones included.
        params: a tree of :class:`~fsharp.Sharded` where parameters rest, in the compute dtype.
        main: the same tree with, at the optimizer's place, the groups that have a main copy.
        opt: state of the gradient transformation, at the optimizer's place.
        made_by: of which transformation, by name; a node without leaves.
    """

    step: int
    params: Any
    main: Any
    opt: Any
    made_by: Any = None


@dataclass(frozen=True, slots=True)
class MadeBy:
    """A transformation by name: a pytree node without leaves.

    Attributes:
        name: for example ``"chain(clip_by_global_norm, adamw)"``; empty if it has none.
    """

    name: str


register_leafless(MadeBy)


@options_checked
def init_state(tx: Any, sharded: Any, *, comm: Comm, donate: bool = False) -> TrainState:
    """A state to start training from.

    Args:
        tx: any ``(init, update)`` pair.
        sharded: parameters as :func:`~fsharp.shard` or :func:`~fsharp.init` made them: with ``place="optim"`` in the main
            dtype, or where parameters rest if they rest in that dtype.
        comm: the ranks.
        donate: allow the state to take over the buffers of ``sharded``; else they are copied.

    Raises:
        TreeError: not a tree of Sharded in one of these places, or parameters in the compute dtype alone where a main
            copy in another dtype is kept: its bits would be lost. A pair of another library that looks at more than each
            element alone, where that makes a difference: it is tried on small tensors.
        AgreementError: ranks with different layouts or transformations.

    Cost: from ``"optim"`` one gather to where parameters rest; else none. For a pair of another library about ten updates of as
    many small tensors as there are leaves.
    """
    tx = as_transform(tx)

    def check() -> list[Sharded]:
        check_comm("init_state()", sharded, comm)
        nodes = units_of(sharded)
        for node in nodes:
            _check_start(node)
        return nodes

    def fields(nodes: list[Sharded]) -> dict[str, str]:
        places = "\n".join(f"{node.name or '(root)'}: {node.place}" for node in nodes)
        return {**describe_units([node.unit for node in nodes]), "place": places, "tx": exact_text(tx.config)}

    together("init_state()", comm, check, fields)
    start = name_trees(sharded if donate else optree.tree_map(torch.clone, sharded), comm)
    resting = stored(start, comm)
    name_as(resting, start)
    params = gather(resting, comm=comm, to="params")
    name_as(params, start)
    main = trainable(gather(start, comm=comm, to="optim"))
    copies = map_units(lambda node: node.with_buffers(list(map(_apart, node.buffers))), _main_copies(main))
    state = TrainState(0, params, copies, tx.init(main, comm=comm), MadeBy(tx.name))
    if donate:
        donate_nodes(sharded)
    return state


def _check_start(node: Sharded) -> None:
    for group, buffer in zip(node.groups, node.buffers, strict=True):
        dtypes = node.unit.groups[group].dtypes
        if buffer.dtype != dtypes.main or node.place.partial:
            raise TreeError(
                problem(
                    "init_state()",
                    f"unit {node.name!r} has a {dtypes.main} main copy, which cannot be made from {buffer.dtype}.",
                    [("place", node.place)],
                    "Pass shard(params, layout, comm, place='optim'), or init_params(..., place='optim').",
                )
            )


@uncompiled
def update(tx: Any, grads: Any, state: TrainState, *, comm: Comm, donate: bool = False, **extra: Any) -> TrainState:
    """Run a gradient transformation where optimizer state rests, and bring parameters to where they rest.

    Args:
        tx: any ``(init, update)`` pair.
        grads: the gradients at the optimizer's place, from :func:`~fsharp.reduce_scatter`.
        state: the state before.
        comm: the ranks.
        donate: allow to overwrite ``state`` and everything that shares buffers with it.
        extra: more for transformations that use it, the same on all ranks: ``value``, the mean loss, for those of optax that
            look at it. ``value`` is passed to any transformation.

    Returns:
        The state after. Frozen groups are the same tensors.

    Raises:
        TreeError: gradients of another structure, layout, place or dtype than the state's parameters, or not divided yet; the
            state of another transformation, or one that was donated.
        OptionError: an extra argument that the transformation does not use; names the argument and those that it uses.

    Cost: one gather from the optimizer's place to the parameters' where the two differ.
    """
    tx = as_transform(tx)
    check_extra(tx, extra)
    nodes = check_comm("update()", grads, comm)
    kept = units_of((state.params, state.main, state.opt))
    check_kept("update()", kept)
    if donate:
        check_not_lent("update()", kept)
    _check_maker(tx, state)
    for node in nodes:
        if node.scale == "sum":
            raise TreeError(
                f"update(): the gradient of unit {node.name!r} is the sum that value_and_grad() returned. Divide it first: "
                "metrics, grads = average(loss, grads, comm=comm)."
            )
    with torch.no_grad():
        held = state.main, state.opt
        if isinstance(comm, Engine):
            held = comm.run_fetch(held, state.params, grads, donate=donate)
        main, opt = on_device(held, comm.device)
        resting = gather(trainable(state.params), comm=comm, to="optim")
        old = map_units(_with_main_copies, merge(resting, main), main)
        check_gradients("update()", grads, old)
        new, opt = apply_transform(tx, grads, opt, old, comm=comm, donate=donate, **extra)
        main = _main_copies(new)
        if donate:
            opt = map_units(lambda node: node.replace(node.lazy or node.raw_buffers) if is_sharded(node) else node, opt)
        with telling_format_errors(comm, "the encoding of differences"):
            differences = encode_differences(new, resting)
        sent = stored(differences, comm)
        name_updated(sent, state.params)
        if isinstance(comm, Engine):
            params, (main, opt) = comm.run_update_gather(sent, state.params, (main, opt), donate=donate)
        else:
            moved = gather(sent, comm=comm, to="params")
            with telling_format_errors(comm, "the decoding of differences"):
                params = merge(state.params, add_differences(state.params, moved))
        name_as(params, sent)
    if donate:
        donate_nodes((state.params, state.main, state.opt), params)
    return TrainState(state.step + 1, params, main, opt, MadeBy(tx.name))


def _check_maker(tx: Transform, state: TrainState) -> None:
    made_by = state.made_by.name if isinstance(state.made_by, MadeBy) else ""
    if made_by and tx.name and made_by != tx.name:
        facts = [("state of", made_by), ("update by", tx.name)]
        remedy = "Make a state for it: init_state(tx, params, comm=comm), or state._replace(opt=tx.init(...), made_by=None)."
        raise TreeError(problem("update()", "the optimizer state is that of another transformation.", facts, remedy))


def _main_copies(tree: Any) -> Any:
    """Of trained groups at the optimizer's place, those that have a main copy."""
    return map_units(lambda node: node.select(node.unit.with_main_copy), tree)


def _with_main_copies(node: Sharded, main: Sharded) -> Sharded:
    """Return values with copies of those whose main copies are missing, as in a state that was resharded from another layout.

    Without a copy, an update in place would change parameters from which a difference is still to be taken.
    """
    missing = [g for g in node.groups if g not in main.groups and node.unit.groups[g].dtypes.update is not None]
    if not missing:
        return node
    return node.replace([b.clone() if g in missing else b for g, b in zip(node.groups, node.buffers, strict=True)])


def _apart(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer in memory of its own, if it is a slice of a larger one."""
    return buffer.clone() if buffer.untyped_storage().nbytes() > buffer.nbytes else buffer
