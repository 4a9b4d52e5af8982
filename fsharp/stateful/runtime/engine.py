"""ScheduledEngine: the Engine that turns calls of pure functions and of autograd into events of a step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any, Literal

import optree
import torch

from fsharp.errors import LossError, ScheduleError
from fsharp.functional import moves
from fsharp.functional.comm.protocol import Comm, Engine
from fsharp.functional.comm.residuals import ResidualViews
from fsharp.functional.layout.sharded import PlaceName, Sharded, is_sharded, map_units, resolve_place, units_of
from fsharp.functional.loss import Loss, check_depends_on_parameters, loss_sum_and_weight
from fsharp.functional.release import inner_tensors, unaliased_clone
from fsharp.functional.sinks import GradientSinks, take_gradient_buffers, with_sinks
from fsharp.stateful.runtime.boundary import UnitUse, register_output_prehooks
from fsharp.stateful.runtime.step_lifecycle import StepLifecycle
from fsharp.stateful.units.future_buffers import with_lazy_buffers
from fsharp.stateful.units.host_copies import HostDeviceCopies, StateOffload
from fsharp.stateful.units.unit_gradient import UnitGradient
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.update_gather import UpdateGather
from fsharp.torch_compile import call_compiled_like_caller


class ScheduledEngine(Engine):
    """The Engine of all pure functions under a scheduler.

    Attributes:
        steps: opens and closes the steps in which functions run.
        offloads_main: whether ``offload`` takes main copies too, and not only optimizer state.
    """

    offloads_main = True
    _offload: StateOffload | None = None

    def __init__(self, steps: StepLifecycle) -> None:
        self.steps = steps

    def report_failure(self, error: Exception, where: str) -> None:
        """Tell other ranks that this rank has failed. All later collectives of the scheduler then raise an error."""
        self.steps.executor.report_failure(error, where)

    def keep_main_copies_on_device(self) -> None:
        """Keep main copies on the device from now on, even with ``offload``."""
        self.offloads_main = False

    def handles_forward(self, sharded: Any, ties: Sequence[Sharded]) -> bool:
        """Return whether the engine can run a forward of units, with the units of their tied leaves.

        The result is False under ``torch.func`` and ``make_fx``, and for nodes that are donated, or rest elsewhere than
        parameters. Also False if a buffer requires a gradient, or if encoded parameters that need a gradient could get none.
        """
        if torch._C._are_functorch_transforms_active() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
            return False
        nodes = [sharded] if isinstance(sharded, Sharded) else units_of(sharded)
        for node in (*nodes, *ties):
            may_run = node.sinks or not (moves.loses_gradient(node) or [b for b in node.raw_buffers if b.requires_grad])
            rests = node.place is node.unit.strategy.params or node.place == node.unit.strategy.params
            if node.is_donated or not may_run or not rests:
                return False
        return True

    def run_forward(
        self, fn: Callable[..., Any], sharded: Any, ties: Sequence[Sharded], args: Any, kwargs: Any, *, as_leaves: bool = False
    ) -> Any:
        """Gather the units, call the function, release the units, and return the function's result.

        With ``as_leaves`` ``sharded`` is a list, and the function gets the leaves of each unit's subtree.
        """
        nodes = sharded if as_leaves else [sharded] if isinstance(sharded, Sharded) else units_of(sharded)
        step, first = self.steps.step_or_eager(), torch._C._autograd._get_sequence_nr()
        uses: list[UnitUse] = []
        try:
            for node in (*ties, *nodes):
                uses.append(step.begin_use(node, self.steps.find_or_bind_unit(node)))
            out = call_compiled_like_caller(
                fn, _build_full_tree(sharded, uses, len(ties), as_leaves=as_leaves), *args, **kwargs
            )  # not referenced here, so only the function keeps the leaves alive
            for use in uses:
                use.check_leaves_unwritten()
            out = _clone_parameter_views(out, uses)
            if step.eager is not None and torch.is_grad_enabled():
                for use in uses:
                    use.pack_saved_parameters(out, first, partial(step.buffer_for_backward, use))
        finally:
            for use in reversed(uses):
                step.end_forward(use)
        if torch.is_grad_enabled():
            register_output_prehooks(
                _leaves_of(out), _leaves_of(*args, *kwargs.values()), partial(step.begin_use_backwards, uses)
            )
        return out

    def run_value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        microbatches: list[Any],
        comm: Comm,
        residuals: ResidualViews,
        *,
        final_sum_in_place: bool,
    ) -> tuple[Loss, Any]:
        """Run forward and backward of each microbatch. Return the summed loss, and the gradients at rest."""
        units = self.begin_gradients_of_tree(params, residuals, final_sum_in_place=final_sum_in_place)
        total: Loss | None = None
        keys = {unit.key for unit in units}
        self.steps.differentiated.update(keys)
        try:
            for number, part in enumerate(microbatches, 1):
                pending = dict(self.steps.step_or_eager().uses.pending)  # of the loss inside of which this function is called
                with torch.enable_grad():
                    params_with_sinks = with_sinks(params, GradientSinks(residuals))
                    loss = loss_sum_and_weight(call_compiled_like_caller(loss_fn, params_with_sinks, part, comm))
                    check_depends_on_parameters(loss, has_trainable=any(unit.layout.trainable_groups for unit in units))
                    new = Loss(loss.sum.detach().double(), loss.weight.detach().double())
                    total = new if total is None else Loss(total.sum + new.sum, total.weight + new.weight)
                    self.steps.step_or_eager().begin_backward_pass(is_last=number == len(microbatches))
                    torch.autograd.backward(loss.sum)
                self.end_microbatch(units, params_with_sinks, comm)
                self.steps.step_or_eager().uses.pending.update(pending)
        finally:
            self.steps.differentiated.difference_update(keys)
        assert total is not None
        return total, self.hand_out_gradients(units, params, reduction="sum")

    def begin_gradients_of_tree(self, params: Any, residuals: ResidualViews, *, final_sum_in_place: bool) -> list[UnitState]:
        """Begin new gradients of the units of ``params``, in place of their previous gradients, and return these units.

        Gradients of other units are kept. ``residuals``: encoding errors of earlier gradients, which reductions overwrite.
        ``final_sum_in_place``: whether sums over ranks may overwrite the new gradients, which nobody will read. Raises
        ScheduleError inside of :meth:`run_value_and_grad` of one of the units.
        """
        step = self.steps.step_or_eager()
        self.steps.handed_out.clear()
        units = [self.steps.find_or_bind_unit(node) for node in units_of(params)]
        if twice := sorted([unit.key for unit in units if unit.key in self.steps.differentiated]):
            raise ScheduleError(
                f"value_and_grad(): it is called inside of the loss of another value_and_grad() of unit {twice[0]!r}, and the "
                "scheduler has one gradient of a unit. Pass comm=scheduler.comm to the inner value_and_grad() and forward()."
            )
        step.begin_new_gradients(units, final_sum_in_place=final_sum_in_place)
        if residuals:
            _pass_residuals(units, residuals)
        return units

    def end_microbatch(self, units: Sequence[UnitState], params_with_sinks: Any, comm: Comm) -> None:
        """End a microbatch after its backward. ``params_with_sinks``: parameters, with sinks that hold the gradients."""
        found = zip(units, units_of(params_with_sinks), strict=True)
        self.steps.step_or_eager().end_microbatch([(unit, take_gradient_buffers(node, comm)) for unit, node in found])

    def hand_out_gradients(self, units: Sequence[UnitState], params: Any, *, reduction: Literal["sum"] | None = None) -> Any:
        """Return gradients at rest of ``units`` as a tree like ``params``, and record them. LossError if there are none."""
        self.steps.executor.lanes.stream_wait_lanes("reduce")
        if not any(unit.gradient is not None and unit.gradient.has_step_gradient for unit in units):
            raise LossError(
                "value_and_grad(): the loss has no gradient, as it depends on no parameter. Were parameters detached?"
            )
        handed_out, position = self.steps.handed_out, iter(units)
        handed_out.clear()
        return map_units(lambda node: handed_out.hand_out_gradient(node, next(position), reduction), params)

    def run_reduce_scatter(self, tree: Any, to: PlaceName, donated_residuals: ResidualViews) -> Any:
        """Reduce gradients to the place ``to``: by scheduled ops if the engine made them, else by blocking collectives."""
        step, handed_out = self.steps.step_or_eager(), self.steps.handed_out
        if not handed_out.is_scheduled_reduction(units_of(tree), to):
            if donated_residuals:
                handed_out.check_none_reduced_with_feedback(units_of(tree))
            step.begin_unscheduled_reduction()
            return moves.reduce_scatter_unchecked(tree, to, self.steps.own, donated_residuals)
        units = handed_out.take_units()
        if donated_residuals:
            _pass_residuals(units, donated_residuals)
        step.reduce_to_optimizer(units, wait=not self.steps.executor.transport.waits_on_host)
        if donated_residuals:
            _pass_residuals(units, {})
        position = iter(units)
        return map_units(
            lambda node: _reduced_or_given_gradient(node, next(position).gradient if node.unit.trainable_groups else None, to),
            tree,
        )

    def begin_state_fetch(self, state: Any, params: Any, grads: Any, *, donate: bool) -> Any:
        """Return ``state``, a pair ``(main, opt)``, on the device. With ``offload`` begin to copy it from host memory."""
        self._offload = None
        if not self.steps.policy.offload:
            return state
        keys = {node.name: self.steps.find_or_bind_unit(node).key for node in reversed(units_of(params))}
        self._offload = StateOffload(keys, grads, self.steps.executor.lanes, self.steps.comm.device, donate=donate)
        (main, opt), host_copies = self._offload.move_state(
            state, params if self.offloads_main else (params, state[0]), to_host=False
        )
        self.steps.step_or_eager().fetch_state(host_copies)
        return main, opt

    def gather_updated_params(self, new: Any, params: Any, state: Any, *, donate: bool) -> tuple[Any, Any]:
        """Begin to gather updated parameters, and to copy state to the host. Reads of the returned trees wait."""
        step, lanes, rank = self.steps.step_or_eager(), self.steps.executor.lanes, self.steps.comm.rank
        update_gathers: list[UpdateGather] = []

        def begin(old: Sharded, fresh: Sharded) -> Sharded:
            unit = self.steps.find_or_bind_unit(old)
            update_gather = UpdateGather(unit, old, fresh, rank=rank, donate=donate)
            node = update_gather.node
            if update_gather.gather_inputs:  # in a new node: update_gather.node would make a cycle that keeps its memory
                node = with_lazy_buffers(
                    node, partial(self.steps.executor.run_reporting_format_error, update_gather.wait), lanes
                )
            self.steps.registry.bind_node(unit, node, replaced=old)
            update_gathers.append(update_gather)
            return node

        resting = map_units(begin, params, new)
        host_copies: Mapping[str, HostDeviceCopies] = {}
        if self._offload is not None:
            staying = resting if self.offloads_main else (resting, state[0])
            state, host_copies = self._offload.move_state(state, staying, to_host=True)
            self._offload = None
        step.gather_and_offload(update_gathers, host_copies)
        self.steps.count_update()
        return resting, state


def _pass_residuals(units: Sequence[UnitState], residuals: ResidualViews) -> None:
    """Pass residuals to the reductions of ``units``, which add residuals to gradients and overwrite them."""
    for unit in units:
        if unit.gradient is not None:
            unit.gradient.set_residuals(residuals.get(unit.layout.name, {}))


def _leaves_of(*values: Any) -> Sequence[Any]:
    """Return the leaves of pytrees, with a fast path for tensors."""
    return values if all(map(isinstance, values, repeat(torch.Tensor))) else optree.tree_leaves(values)  # type: ignore[arg-type]


def _build_full_tree(sharded: Any, uses: Sequence[UnitUse], num_ties: int, *, as_leaves: bool) -> Any:
    """Return ``sharded`` with full parameters in place of each unit's node; with ``as_leaves`` a list of leaves by unit.

    The first ``num_ties`` of ``uses`` are of units that own tied leaves. All other uses are of the units in ``sharded``.
    """
    rows, leaves = [], {}
    for use in uses:
        table, own = use.unit.leaf_table, use.take_leaves()
        rows.append((table, own))
        leaves[table.unit.name] = table, own
    found = []
    for table, own in rows[num_ties:]:
        found.append(table.subtree_leaves(own, leaves) if as_leaves else table.build_subtree(own, leaves))
    if as_leaves or isinstance(sharded, Sharded):
        return found if as_leaves else found[0]
    trees = iter(found)
    return map_units(lambda node: next(trees) if is_sharded(node) else node, sharded)


def _reduced_or_given_gradient(node: Sharded, gradient: UnitGradient | None, to: PlaceName) -> Sharded:
    """Return the reduced gradient of a unit in the place ``to``. ``node``: the gradient as the caller of the engine has it."""
    place = resolve_place(node.unit, to)
    buffers = node.raw_buffers if gradient is None or gradient.final is None else gradient.final.hand_out()
    result = Sharded(buffers, node.unit, place, node.groups, reduction=node.reduction)
    return with_lazy_buffers(result, gradient.wait) if gradient is not None and gradient.is_under_way else result


def _clone_parameter_views(out: Any, uses: Sequence[UnitUse]) -> Any:
    """Return ``out`` with copies in place of views of parameters of ``uses``: these parameters are released next."""
    bounds: list[tuple[int, int]] = []
    for use in uses:
        if use.unsharded is not None and use.unsharded.memory is not None:
            start = use.unsharded.memory.data_ptr()
            bounds.append((start, start + use.unsharded.memory.numel()))
    if not bounds:
        return out

    def outside(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        for each in (x,) if type(x) is torch.Tensor else inner_tensors(x):
            if each.layout is not torch.strided or each.is_meta or not each.numel():
                continue
            try:
                at = each.data_ptr()
            except RuntimeError:  # a tensor without memory
                continue
            for first, last in bounds:
                if first <= at < last:
                    return unaliased_clone(x)
        return x

    if isinstance(out, torch.Tensor):
        return outside(out)
    leaves, spec = optree.tree_flatten(out, none_is_leaf=True)
    found = [outside(leaf) for leaf in leaves]
    return out if all(map(is_, found, leaves)) else optree.tree_unflatten(spec, found)
