"""assert_equivalent: the same training step under every strategy and world size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from fsharp.errors import problem
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.placement import Partial, Strategy
from fsharp.functional.layout.plan import plan
from fsharp.functional.loss import split_batch
from fsharp.functional.materialize import full_tree, shard
from fsharp.functional.state import TrainState, init_state
from fsharp.functional.train import train_step
from fsharp.testing.simulated_ranks import simulate
from fsharp.type_checks import options_checked


@options_checked
@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest difference of parameters that cannot be bitwise equal: ``rtol`` times the larger magnitude, and ``atol``."""

    rtol: float = 1e-4
    atol: float = 1e-5


@options_checked
def assert_equivalent(
    loss_fn: Callable[[Any, Any, Comm], Any],
    tx: Any,
    params: Any,
    batches: Sequence[Any],
    *,
    runs: Mapping[str, tuple[Mesh, Strategy]],
    units: str | Sequence[str] | None = None,
    microbatches: int = 1,
    tolerance: Tolerance = Tolerance(),
    run: Callable[[Mesh, Callable[[Comm], Any]], Sequence[Any]] = simulate,
    **plan_options: Any,
) -> dict[str, Any]:
    """Train the same steps under several strategies and compare the parameters with those of one unsharded process.

    All runs have to agree with the unsharded one within ``tolerance``. Two runs on the same mesh have to be **bitwise**
    equal if they add in the same order: always without accumulation on a mesh of one axis; with it, or on several axes,
    if their gradients rest in the same way.

    Args:
        loss_fn: as for :func:`~fsharp.train_step`. Its result must not depend on how the batch is divided: a mean over
            equal parts, or ``(sum, weight)``.
        tx: any ``(init, update)`` pair. Use ``clip_by_global_norm(..., deterministic=True)`` if it clips.
        params: the full tree to start from.
        batches: one global batch for each step: a pytree of tensors that is split along dim 0 over the ranks.
        runs: name to mesh and strategy.
        units: as for :func:`~fsharp.plan`.
        microbatches: as for :func:`~fsharp.train_step`.
        tolerance: for runs that add in another order.
        run: runs a function as every rank of a mesh; :func:`simulate`, or one that starts processes.
        plan_options: passed to :func:`~fsharp.plan`.

    Returns:
        The full parameters of each run after the last step, by name.

    Raises:
        AssertionError: the two runs, the first leaf that differs, and by how much.
    """
    step = train_step(loss_fn, tx, microbatches=microbatches)

    def train(mesh: Mesh, strategy: Strategy) -> Any:
        def rank_fn(comm: Comm) -> Any:
            layout: Layout = plan(params, mesh, strategy, units=units, **plan_options)
            state: TrainState = init_state(tx, shard(params, layout, comm, place="optim"), comm=comm)
            for batch in batches:
                state, _ = step(state, split_batch(batch, mesh.size)[comm.rank], comm)
            return full_tree(state.params, comm=comm)

        results = run(mesh, rank_fn)
        for rank, other in enumerate(results):
            _compare(f"rank 0 of {mesh}", results[0], f"rank {rank}", other, None)
        return results[0]

    one = next(iter(runs.values()))[1]
    single = train(Mesh([(axis, 1) for axis, _ in one.rules]), one)
    results = {name: train(mesh, strategy) for name, (mesh, strategy) in runs.items()}
    first: dict[Any, str] = {}
    for name, (mesh, strategy) in runs.items():
        _compare("unsharded", single, name, results[name], tolerance)
        other = first.setdefault((mesh.axes, _order_of_sums(mesh, strategy, microbatches)), name)
        _compare(other, results[other], name, results[name], None)
    return results


def _order_of_sums(mesh: Mesh, strategy: Strategy, microbatches: int) -> Any:
    """Return a key that is equal for strategies that add gradients in the same order."""
    if microbatches == 1 and len(mesh.axes) == 1:
        return None
    if microbatches == 1:
        return strategy.order, strategy.optim.sharded
    return strategy.order, strategy.optim.sharded, tuple(strategy.grads[axis] is Partial for axis in strategy.order)


def _compare(name_a: str, a: Any, name_b: str, b: Any, tolerance: Tolerance | None) -> None:
    paths, ours, _ = optree.tree_flatten_with_path(a)
    for path, x, y in zip(paths, ours, optree.tree_leaves(b), strict=True):
        if tolerance is None:
            same = torch.equal(x, y)
        else:
            same = torch.allclose(x, y, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
        if not same:
            gap = (x.double() - y.double()).abs()
            raise AssertionError(
                problem(
                    "assert_equivalent()",
                    f"{name_a} and {name_b} differ in {'.'.join(map(str, path))!r}.",
                    [
                        ("expected", "the same bits" if tolerance is None else f"|a - b| <= {tolerance}"),
                        ("largest gap", f"{gap.max().item():.3g} at flat index {int(gap.argmax())}"),
                        ("elements", f"{int((x != y).sum())} of {x.numel()} differ"),
                    ],
                )
            )
