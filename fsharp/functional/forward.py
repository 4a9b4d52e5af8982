"""forward: gather a unit, call a pure function on it, and release it; in the backward gather again, and reduce."""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from fsharp.errors import TreeError
from fsharp.functional.comm.checked_units import check_not_main_copies, checked_units_of
from fsharp.functional.comm.protocol import Comm, engine_of
from fsharp.functional.layout.sharded import Sharded, check_not_donated, is_sharded, map_units, units_of
from fsharp.functional.moves import gather_unchecked
from fsharp.functional.release import in_place_change_check, in_place_write_error, release_saved, version_of
from fsharp.functional.remat import Remat, check_remat_argument, run_with_recomputation
from fsharp.functional.transforms import is_non_vmap_transform_active, is_transform_active, refuse_proxy_tracing
from fsharp.torch_compile import call_compiled_like_caller, disable_compile, without_compiling_user_functions
from fsharp.tracebacks import api_boundary


@disable_compile
def forward(
    fn: Callable[..., Any],
    sharded: Any,
    *args: Any,
    comm: Comm,
    ties: Sequence[Sharded] = (),
    release: bool = True,
    remat: Remat = False,
    **kwargs: Any,
) -> Any:
    """Gather a unit's parameters, call ``fn(parameters, *args, **kwargs)``, release the parameters, and return the result.

    Args:
        fn: a pure function of the unit's subtree and other arguments.
        sharded: the unit as a :class:`Sharded`, or a pytree of units. ``fn`` gets this pytree with the user's subtrees in place
            of units.
        args: more arguments for ``fn``: pytrees; tensors in them are differentiated.
        comm: the ranks.
        ties: the other units that store the values of tied leaves of this unit.
        release: release gathered parameters when ``fn`` returns, and gather them again in the backward. False keeps the
            parameters until the backward, which saves one gather, and takes the memory of a full unit. ``release`` has no
            effect if nothing is gathered, with ``remat``, and under ``torch.func`` transforms other than ``vmap``.
        remat: recompute activations in the backward, as ``jax.checkpoint`` does. ``fn`` is called twice, with equal random
            numbers from the global generator and from generators in ``args``. True recomputes all activations. A policy
            ``(ctx, op, *args, **kwargs) -> CheckpointPolicy``, or a list of ops whose results are kept, chooses activations, as
            in ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. With a policy or a list, the backward of a call
            can run only once. Without effect under ``torch.func`` transforms.
        kwargs: more arguments for ``fn``.

    Returns:
        The result of ``fn``: any pytree.

    Raises:
        TreeError: no unit was passed, or the unit of a tied leaf was not passed exactly once.
        TreeError: parameters were changed in place, in ``fn`` or before the backward.
        TreeError: ``remat`` has a wrong value, or the call is under ``torch.func.linearize``.
        TreeError: a unit was donated.
        TreeError: a unit has a tensor class, such as TransformerEngine's, and ``comm`` is not a scheduler.
        TreeError: a unit has main copies from :func:`~fsharp.shard`; pass ``params`` of :func:`~fsharp.init_state`.
        MeshError: ``comm`` is on another mesh than the unit.

    Cost: one gather; with ``release`` or ``remat`` a second gather in the backward. The backward reduces gradients: under
    ``value_and_grad`` once for all calls with this unit in a microbatch, otherwise once for each call.
    """
    units = (sharded, ties := tuple(ties))
    if not isinstance(sharded, Sharded) or ties:
        nodes = [*ties, *checked_units_of("forward()", sharded, comm)]
        _check_tie_owners_unambiguous(nodes)
        check_not_main_copies("forward()", nodes)
    elif sharded.is_donated or sharded.is_main_copy:
        check_not_donated("forward()", [sharded])
        check_not_main_copies("forward()", [sharded])
    if remat is not False:
        refuse_proxy_tracing("forward()")
        check_remat_argument(remat)
        if torch.is_grad_enabled() and not is_transform_active():
            return _forward_with_remat(fn, units, args, kwargs, comm, remat)
    if (engine := engine_of(comm)) is not None and engine.handles_forward(sharded, ties):
        return engine.run_forward(fn, sharded, ties, args, kwargs)
    refuse_proxy_tracing("forward()")
    checked_units_of("forward()", units, comm)
    _check_no_tensor_classes(units)
    first = torch._C._autograd._get_sequence_nr()
    gathered, owners = whole = gather_unchecked(units, comm)
    full_nodes = (*owners, *units_of(gathered))
    before = _buffer_versions(full_nodes)
    trees = map_units(lambda node: node.tree(full_nodes) if is_sharded(node) else node, gathered)
    try:
        out = call_compiled_like_caller(fn, trees, *args, **kwargs)
    except RuntimeError as error:
        if " is a view and " not in str(error):
            raise
        names = " and ".join(repr(node.name) for node in units_of(gathered))
        raise TreeError(
            f"forward(): {str(error).partition('. ')[0]}. Parameters of unit {names} are such views, and the function must not "
            "write to them. Return new values, or write to a clone. nn.Embedding(max_norm=) writes, too."
        ) from error
    for node, old, new in zip(full_nodes, before, _buffer_versions(full_nodes), strict=False):  # no versions under transforms
        if old != new:
            raise in_place_write_error(node.name)
    if release and torch.is_grad_enabled() and not is_non_vmap_transform_active():
        release_saved(out, units, whole, first, comm)
    return out


def _forward_with_remat(fn: Any, units: Any, args: Any, kwargs: Any, comm: Comm, remat: Remat) -> Any:
    sharded, ties = units
    # An engine checks for changes by itself, and its buffers may not be filled yet.
    check = in_place_change_check(units_of(units)) if engine_of(comm) is None else lambda: None

    def run(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        check()
        return forward(fn, sharded, *args, comm=comm, ties=ties, release=False, **kwargs)

    # torch compares the tensors that this run saves with those of the recomputation in the backward, which is not compiled.
    with without_compiling_user_functions():
        return run_with_recomputation(run, fn, args, kwargs, remat)


def _check_tie_owners_unambiguous(nodes: Sequence[Sharded]) -> None:
    for name in {name for node in nodes for name in node.unit.tie_owner_unit_names}:
        if len({tuple(map(id, node.raw_buffers)) for node in nodes if node.name == name}) > 1:
            raise TreeError(
                f"forward(): leaves are tied to unit {name!r}, and two units of that name were passed: which one is meant? "
                "Call forward() for each of the trees, or tie no leaves."
            )


def _check_no_tensor_classes(units: Any) -> None:
    for node in units_of(units):
        if node.unit.tensor_classes:
            raise TreeError(
                f"forward(): weights of unit {node.unit.display_name} have a tensor class such as TransformerEngine's, and "
                "only a scheduler passes such tensors to functions. Pass comm=fs.Scheduler(comm), outside of torch.func "
                "transforms."
            )


def _buffer_versions(nodes: Sequence[Sharded]) -> list[list[int]]:
    return [] if is_non_vmap_transform_active() else [[version_of(x) for x in node.buffers] for node in nodes]


@disable_compile
def dummy_forward(sharded: Any, x: torch.Tensor, *, comm: Comm, ties: Sequence[Sharded] = ()) -> torch.Tensor:
    """Take part in the collectives of :func:`forward` on a unit without calling a function, and return ``x`` unchanged.

    Call this function on a rank that has nothing to compute in a unit that other ranks use, such as an expert without tokens.
    Otherwise the other ranks would wait in the unit's gather, and in the reduction of its gradients.

    Args:
        sharded: the unit as a :class:`Sharded`, or a pytree of units.
        x: a floating-point tensor. The loss has to depend on the tensor that this function returns for ``x``: the backward of
            this tensor takes part in the reduction.
        comm: the ranks.
        ties: the other units that store the values of tied leaves of this unit.

    Cost: the collectives of :func:`forward`. Gradient: ``x`` gets its gradient unchanged; the unit gets zeros.
    """
    return forward(_identity_with_zero_gradients, sharded, x, comm=comm, ties=ties)  # type: ignore[no-any-return]


def _identity_with_zero_gradients(tree: Any, x: torch.Tensor) -> torch.Tensor:
    leaves = [leaf for leaf in optree.tree_leaves(tree) if leaf.requires_grad]
    return _ZeroGradients.apply(x, *leaves)  # type: ignore[no-any-return]


class _ZeroGradients(torch.autograd.Function):
    """An autograd function that returns its first argument. Gradients of all other arguments are zeros, and not None."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @api_boundary
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return cotangents[0], *(torch.zeros_like(leaf) for leaf in ctx.saved_tensors)
