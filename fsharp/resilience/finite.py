"""Find an infinity or NaN in a loss or a tree before an update, and say on which rank and in which leaf."""

import cmath
import json
from collections.abc import Iterable, Iterator
from numbers import Integral, Number
from typing import Any, NamedTuple

import torch

from fsharp.checkpoint.entries import PerRank, leaves_with_both_paths, with_state_dicts
from fsharp.errors import NonFiniteError, TreeError
from fsharp.functional.comm.agree import all_gather_texts, max_over_ranks, ranks_text
from fsharp.functional.comm.protocol import Comm, LabelPrefixComm, reporting_format_errors
from fsharp.functional.layout.sharded import Sharded, is_sharded
from fsharp.functional.state import MadeBy
from fsharp.functional.tree.paths import join_path
from fsharp.stateful.modules.parameter import ShardedTensor
from fsharp.type_checks import options_checked


class NonFinite(NamedTuple):
    """The ranks and the leaf in which an infinity or NaN was found; equal on all ranks.

    Attributes:
        loss_ranks: ranks whose loss is not finite.
        leaf: path of the first leaf that is not finite, in order of the tree; None if all leaves are finite.
        leaf_ranks: ranks that hold infinite or NaN elements of this leaf. For gradients, which are sums over ranks, see
            ``loss_ranks`` for the rank that caused the NaN.
    """

    loss_ranks: tuple[int, ...]
    leaf: str | None
    leaf_ranks: tuple[int, ...]

    def __str__(self) -> str:
        found = [f"the loss of {ranks_text(self.loss_ranks)} is not finite"] if self.loss_ranks else []
        if self.leaf is not None:
            found.append(
                f"{self.leaf or 'the leaf'!r} is the first leaf that is not finite, held by {ranks_text(self.leaf_ranks)}"
            )
        return ", and ".join(found)


class SkippedSteps:
    """The steps that a run leaves out because of an infinity or NaN, and their limit ``most``.

    With the policy ``"skip"`` the limit is for consecutive left-out steps; with ``"roll back"`` for all left-out steps of the
    run. With ``"raise"`` no step may be left out.

    Attributes:
        steps: numbers of the steps that a run leaves out after it has rolled back. With ``"skip"`` there are none, because no
            step is repeated.
    """

    def __init__(self, policy: str, most: int) -> None:
        self.policy, self.most = policy, most
        self.steps = list[int]()
        self._in_row = 0

    def record_finite_step(self) -> None:
        """Record that a step had a finite loss and finite gradients. The count of consecutive left-out steps becomes 0."""
        self._in_row = 0

    def restore(self, steps: Iterable[int]) -> None:
        """Set the numbers of left-out steps to ``steps``, those in the checkpoint from which the run continues."""
        self.steps[:], self._in_row = steps, 0

    def record_nonfinite_step(self, description: str) -> None:
        """Count a step that was not finite. Raise NonFiniteError, with ``description``, unless the policy continues the run."""
        self._in_row += 1
        if self.policy == "raise":
            raise NonFiniteError(f'{description}. To leave the step out, pass Run(on_nonfinite="skip") or "roll back".')
        count = self._in_row if self.policy == "skip" else len(self.steps) + 1
        if count > self.most:
            kind = "in a row" if self.policy == "skip" else "of this run"
            raise NonFiniteError(f"{description}. This is non-finite step {count} {kind}, and max_nonfinite is {self.most}.")

    def next_kept_step(self, step: int) -> int:
        """Return the first step from ``step`` on that is not left out."""
        while step in self.steps:
            step += 1
        return step


@options_checked
def find_nonfinite(loss: float | complex | torch.Tensor | tuple[Any, ...] | None, tree: Any, *, comm: Comm) -> NonFinite | None:
    """Return where a loss or a tree holds an infinity or NaN, on any rank; None if all values are finite.

    All ranks have to call this function, and get the same result.

    ::

        loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
        grads = fs.reduce_scatter(grads, comm=comm)
        bad = fs.resilience.find_nonfinite(loss, grads, comm=comm)
        metrics, grads = fs.average(loss, grads, comm=comm)
        if bad is None:
            state = fs.update(tx, grads, state, comm=comm)

    Args:
        loss: this rank's own loss, as it is before :func:`~fsharp.average`: a :class:`~fsharp.Loss` or another tuple, a tensor,
            or a number; or None.
        tree: gradients, parameters, or another pytree of ``Sharded``, tensors, numbers and texts; other leaves are a TreeError.
            For a module pass ``{name: p.grad for name, p in model.named_parameters()}``. If an object has
            ``state_dict()``, the state dict is searched. Padding is not searched.
        comm: the ranks.

    Cost: one pass over the tree, and one ``all_reduce`` of 4 bytes for each axis, for which the host waits. The cost is higher
    if a value is not finite. ``fs.optim.apply_if_finite`` costs the same, and also skips the update.
    """
    losses = [x for x in (loss if isinstance(loss, tuple) else (loss,)) if x is not None]
    with reporting_format_errors(comm, "find_nonfinite()"):
        pieces = list(_paths_and_leaves(tree))
        # A sum is far quicker than a test of each element. If finite elements have an infinite sum, the search finds nothing.
        sums = [
            _in_computable_dtype(x).sum() if isinstance(x, torch.Tensor) else x
            for _, held in pieces
            for x in (held.decoded_buffers(comm.rank) if isinstance(held, Sharded) else (held,))
        ]
        bad = [torch.tensor(False, device="cpu"), *[_is_nonfinite(x) for x in [*losses, *sums]]]
        flag = torch.stack([x.to(comm.device) for x in bad]).any().float().view(1)
        named = LabelPrefixComm(comm, "whether all is finite: ")
        if not max_over_ranks(flag, named).item():
            return None
        firsts = (
            (i, *found) for i, (path, held) in enumerate(pieces) if (found := _first_nonfinite_leaf(path, held, comm.rank))
        )
        mine: list[Any] = [any(bool(_is_nonfinite(x)) for x in losses), next(firsts, None)]
        everyone = [json.loads(text) for text in all_gather_texts(json.dumps(mine), named)] if comm.mesh.size > 1 else [mine]
        losses_of = tuple(rank for rank, (is_bad, _) in enumerate(everyone) if is_bad)
        leaves = {rank: tuple(leaf) for rank, (_, leaf) in enumerate(everyone) if leaf is not None}
        if not leaves:
            return NonFinite(losses_of, None, ()) if losses_of else None  # None: padding, or a sum that overflows
        first = min(leaves.values())
        return NonFinite(losses_of, first[2], tuple(rank for rank, leaf in leaves.items() if leaf == first))


def _is_nonfinite(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return ~torch.isfinite(_in_computable_dtype(x)).all()
    return torch.tensor(not isinstance(x, Integral) and not cmath.isfinite(x), device="cpu")


def _in_computable_dtype(x: torch.Tensor) -> torch.Tensor:
    """Return elements of ``x`` (values if sparse); float8 as float32, complex32 as complex64, and float4 as bytes."""
    if x.layout is not torch.strided:
        x = x._values() if x.layout is torch.sparse_coo else x.values()
    if x.dtype is torch.float4_e2m1fn_x2:
        return x.view(torch.uint8)
    if x.dtype is torch.complex32:
        return x.to(torch.complex64)
    return x.float() if x.is_floating_point() and x.itemsize == 1 else x


def _paths_and_leaves(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield pairs of a path in ``tree`` and a leaf: a Sharded, a tensor, or a number that may be infinite."""
    for path, _, leaf in leaves_with_both_paths(with_state_dicts(tree)):
        for under, _, held in leaves_with_both_paths(leaf.value) if isinstance(leaf, PerRank) else [((), (), leaf)]:
            if is_sharded(held) or isinstance(held, Number | torch.Tensor):
                yield (*path, *under), held.local if isinstance(held, ShardedTensor) else held
            elif not isinstance(held, MadeBy | str):
                raise TreeError(
                    f"find_nonfinite(): {join_path((*path, *under))!r} is a {type(held).__name__}, expected a tensor, a number "
                    "or text."
                )


def _first_nonfinite_leaf(path: tuple[str, ...], held: Any, rank: int) -> tuple[int, str] | None:
    """Return index and path of the first leaf of ``held``, at ``path``, with an infinity or NaN on this rank; else None."""
    if not isinstance(held, Sharded):
        return (0, join_path(path)) if bool(_is_nonfinite(held)) else None
    local = held.local_leaves(rank)
    for i, leaf in enumerate(held.unit.leaves):
        x = local.get(held.unit.path_in_tree(leaf))
        if x is not None and bool(_is_nonfinite(x)):
            return i, join_path((*path, leaf.path) if leaf.path else path)
    return None
