"""with_elementwise_check: compare updates of shards with updates of whole leaves, for pairs of other libraries."""

from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import OptionError, TreeError, problem
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import Sharded, map_units, units_of
from fsharp.functional.optim.base import Transform, as_transform, wrapper_name
from fsharp.functional.optim.probe import isclose
from fsharp.type_checks import options_checked


class CheckedState(NamedTuple):
    """State of :func:`with_elementwise_check`.

    Attributes:
        num_checked: number of updates so far in which the updates of shards were compared with those of whole leaves.
        inner_state: state of the wrapped pair.
    """

    num_checked: int
    inner_state: Any


@options_checked
def with_elementwise_check(inner: Any, *, steps: int = 1) -> Transform:
    """Wrap an ``(init, update)`` pair, and compare its first updates of shards with its updates of whole leaves.

    ``init_state`` tries a pair of another library on small tensors. This does not tell how the pair treats large tensors. So in
    the first ``steps`` updates the wrapper gathers whole parameters, gradients and state, and compares the two updates.

    >>> import torch, fsharp as fs
    >>> def init(params):
    ...     return ()
    >>> def update(grads, state, params):
    ...     return fs.layouts.map_units(lambda g: g.replace([-0.1 * x for x in g.buffers]), grads), state
    >>> tx = fs.optim.with_elementwise_check((init, update), steps=2)

    Args:
        inner: the pair; not a :class:`Transform`, which knows the ranks already.
        steps: number of updates to compare.

    Raises:
        OptionError: ``inner`` is a Transform, or ``steps`` is not an int.
        TreeError: in an update, on all ranks: the two updates or states differ. The message names the leaf.

    Cost: in the first ``steps`` updates each rank gathers and holds whole gradients, parameters and state. Later updates cost
    nothing extra.
    """
    if isinstance(inner, Transform):
        raise OptionError(
            "with_elementwise_check(): inner is a Transform, which gets the Comm: pass (init, update) pairs alone."
        )
    tx, where = as_transform(inner), "with_elementwise_check()"

    def init(params: Any, /, *, comm: Comm | None = None) -> CheckedState:
        return CheckedState(0, tx.init(params, comm=comm))

    def update(grads: Any, state: CheckedState, params: Any, *, comm: Comm, **extra: Any) -> tuple[Any, CheckedState]:
        if state.num_checked >= steps:
            updates, new = tx.update(grads, state.inner_state, params, comm=comm, **extra)
            return updates, CheckedState(state.num_checked, new)
        expected = tx.update(*(_tree_of_whole_trainable_leaves(x, comm) for x in (grads, state.inner_state, params)), **extra)
        updates, new = tx.update(grads, state.inner_state, params, comm=comm, **extra)
        found = _tree_of_whole_trainable_leaves(updates, comm), _tree_of_whole_trainable_leaves(new, comm)
        check_on_all_ranks(where, comm, lambda: _check_same_updates(where, expected, found))
        return updates, CheckedState(state.num_checked + 1, new)

    name = wrapper_name("check_elementwise", tx.name)  # checkpoints have this name
    return Transform(init, update, {"steps": steps, **tx.config}, name=name, extra_arg_names=tx.extra_arg_names)


def _check_same_updates(where: str, expected: Any, found: Any) -> None:
    paths, wanted, spec = optree.tree_flatten_with_path(expected)
    got, other = optree.tree_flatten(found)
    if spec != other:
        raise TreeError(f"{where}: the state of whole leaves is {spec}, and that of shards {other}.")
    for path, x, y in zip(paths, wanted, got, strict=True):
        if isinstance(x, torch.Tensor) and not (x.shape == y.shape and bool(isclose(x, y.to(x.dtype)).all())):
            off = f"{float((x - y).abs().max()):.3g}" if x.shape == y.shape else f"shapes {list(x.shape)} and {list(y.shape)}"
            facts = [("leaf", "/".join(map(str, path[1:]))), ("largest difference", off)]
            what = "the update" if path[0] == 0 else "the state"
            remedy = (
                "The optimizer looks at more than each element alone. Keep its leaves whole (fs.ddp, or "
                "atoms=fs.layouts.LeafAtom()), or take an elementwise one such as fs.optim.adamw()."
            )
            raise TreeError(problem(where, f"{what} of whole leaves is not that of shards.", facts, remedy))


def _tree_of_whole_trainable_leaves(tree: Any, comm: Comm) -> Any:
    """Gather shards to a tree of whole leaves, without frozen and tied ones.

    In a group whose buffer is 0-D, one number for the whole group, each leaf is a copy of this number.
    """

    def subtree(node: Sharded) -> Any:
        found, axes = {}, node.unit.gather_axes(node.place, node.unit.strategy.full)
        for group, buffer in zip(node.groups, node.buffers, strict=True):
            for axis in axes if buffer.dim() else ():
                buffer = comm.all_gather(buffer, axis, label=f"{node.name} to compare updates").flatten()
            for leaf in node.unit.leaves_of_group(group):
                cut = buffer[leaf.offset : leaf.offset + leaf.numel].view(leaf.shape) if buffer.dim() else buffer
                found[leaf.path] = cut.clone()
        return optree.tree_unflatten(node.unit.structure, [found.get(leaf.path, ()) for leaf in node.unit.leaves])

    return map_units(subtree, tree) if units_of(tree) else tree
