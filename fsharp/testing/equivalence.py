"""assert_equivalent: the same training step under every strategy and world size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from fsharp.errors import OptionError, problem
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import as_bytes
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.placement import Partial, Strategy
from fsharp.functional.layout.plan import plan
from fsharp.functional.loss import split_batch
from fsharp.functional.materialize import full_tree, shard
from fsharp.functional.state import TrainState, init_state
from fsharp.functional.train import train_step
from fsharp.testing.simulated_ranks import simulate
from fsharp.type_checks import options_checked, predicate_of_annotation, short_repr


@options_checked
@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest allowed difference from a number of the unsharded run: ``rtol`` times its magnitude, plus ``atol``."""

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
    """Train the same steps under several strategies, and assert that they give the parameters of an unsharded run.

    All runs have to agree with the unsharded run within ``tolerance``. In a run all ranks have to end with bitwise equal
    parameters. Two runs on one mesh have to be **bitwise** equal if they add gradients in the same order. On a mesh of one
    axis, with one microbatch, all runs add in the same order. On several axes, two strategies add in the same order if they
    have the same order of axes, and shard optimizer state along the same axes. With several microbatches, gradients also have
    to rest unreduced (``Partial``) along the same axes.

    Args:
        loss_fn: the loss, as for :func:`~fsharp.train_step`. Its result must not depend on how the batch is divided: a mean
            over equal parts, or ``(sum, weight)``.
        tx: the optimizer: an ``(init, update)`` pair. To clip use ``clip_by_global_norm(..., deterministic=True)``.
        params: the initial parameters, a whole tree.
        batches: one global batch for each step: a pytree of tensors, which is split along dim 0 over the ranks.
        runs: pairs of a mesh and a strategy, by names of your choice.
        units: units, as for :func:`~fsharp.plan`.
        microbatches: number of microbatches, as for :func:`~fsharp.train_step`.
        tolerance: allowed difference for runs that add in another order.
        run: function that runs a function on every rank of a mesh: :func:`simulate` or :func:`~fsharp.testing.processes`.
        plan_options: more arguments for :func:`~fsharp.plan`.

    Returns:
        A dict from the name of each run to its whole parameters after the last step.

    Raises:
        AssertionError: two runs differ. The message has the first leaf that differs.
        OptionError: ``runs`` or ``batches`` is empty or wrong, or a batch does not divide.
    """
    for name, given in {"runs": runs, "batches": batches}.items():
        if not given:
            raise OptionError(f"assert_equivalent(): {name} is empty, expected at least one.")
    for name, pair in runs.items():
        if not predicate_of_annotation(tuple[Mesh, Strategy])(pair):
            raise OptionError(f"assert_equivalent(): runs[{name!r}] is {short_repr(pair)}, expected a pair (mesh, strategy).")
        parts = pair[0].size * microbatches
        for i, batch in enumerate(batches):
            for x in filter(torch.is_tensor, optree.tree_leaves(batch)):
                if x.ndim == 0 or len(x) % parts:
                    what = f"batches[{i}] has a tensor of shape {list(x.shape)}, and runs[{name!r}] needs {parts} equal parts."
                    facts = [("parts", f"{pair[0].size} ranks x {microbatches} microbatches, along dim 0")]
                    raise OptionError(problem("assert_equivalent()", what, facts))
    step = train_step(loss_fn, tx, microbatches=microbatches)

    def train(mesh: Mesh, strategy: Strategy) -> Any:
        def rank_fn(comm: Comm) -> Any:
            layout: Layout = plan(params, mesh, strategy, units=units, **plan_options)
            state: TrainState = init_state(tx, shard(params, layout, comm), comm=comm)
            for batch in batches:
                state, _ = step(state, split_batch(batch, mesh.size)[comm.rank], comm)
            return full_tree(state.params, comm=comm)

        results = run(mesh, rank_fn)
        for rank, other in enumerate(results):
            _assert_equal_leaves(f"rank 0 of {mesh}", results[0], f"rank {rank}", other, None)
        return results[0]

    one = next(iter(runs.values()))[1]
    single = train(Mesh([(axis, 1) for axis, _ in one.rules]), one)
    results = {name: train(mesh, strategy) for name, (mesh, strategy) in runs.items()}
    first: dict[Any, str] = {}
    for name, (mesh, strategy) in runs.items():
        _assert_equal_leaves("unsharded", single, name, results[name], tolerance)
        other = first.setdefault((mesh.axes, _summation_order_on_mesh(mesh, strategy, microbatches)), name)
        _assert_equal_leaves(other, results[other], name, results[name], None)
    return results


def _summation_order_on_mesh(mesh: Mesh, strategy: Strategy, microbatches: int) -> Any:
    """Return a key that two strategies share if, on ``mesh``, they add gradients in the same order."""
    if microbatches == 1 and len(mesh.axes) == 1:
        return None
    order = strategy.axis_order
    if microbatches == 1:
        return order, strategy.optim.sharded_axes
    return order, strategy.optim.sharded_axes, tuple(strategy.grads[axis] is Partial for axis in order)


def _assert_equal_leaves(name_a: str, a: Any, name_b: str, b: Any, tolerance: Tolerance | None) -> None:
    paths, ours, _ = optree.tree_flatten_with_path(a)
    for path, x, y in zip(paths, ours, optree.tree_leaves(b), strict=True):
        wide_x, wide_y = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (x, y))
        if tolerance is None:
            same = torch.equal(as_bytes(x), as_bytes(y))
        else:
            same = torch.allclose(wide_y, wide_x, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
        if not same:
            gap = (wide_x - wide_y).abs()
            facts = [
                ("expected", "the same bits" if tolerance is None else f"|a - b| <= {tolerance}"),
                ("largest gap", f"{gap.max().item():.3g} at flat index {int(gap.argmax())}"),
                ("elements", f"{int((wide_x != wide_y).sum())} of {x.numel()} differ"),
            ]
            what = f"{name_a} and {name_b} differ in {'.'.join(map(str, path))!r}."
            raise AssertionError(problem("assert_equivalent()", what, facts))
