"""ModuleStep: the training step of a module, composed of the user's calls."""

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from fsharp.errors import FsharpError, LossError, ScheduleError
from fsharp.functional.comm.residuals import ResidualViews, prepare_residuals
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.functional.layout.sharded import units_of
from fsharp.functional.sinks import GradientSinks, with_sinks
from fsharp.stateful.modules.mean_gradients import MeanGradients, parameters_without_gradient
from fsharp.stateful.modules.module_state import ModuleTrainState
from fsharp.stateful.modules.parameter import ShardedTensor
from fsharp.stateful.runtime.scheduler import ScheduleHandle, Scheduler
from fsharp.stateful.runtime.step import Step
from fsharp.stateful.units.unit_state import UnitState
from fsharp.tracebacks import api_boundary


class ModuleStep:
    """One training step of a module, composed of the user's calls: forwards, backwards, an optimizer's step.

    The first forward that may have a backward opens a step, each backward pass ends a microbatch, and an update ends the step.

    Attributes:
        scheduled: the training steps under the scheduler, with their schedule and trace.
        is_accumulating: whether a backward only adds its gradients to earlier ones, without the reduction to the optimizer.
        has_feedback: whether reductions add the encoding errors of earlier gradients, the residuals of ``state.train_state``.
        updated_by: ``id`` of the optimizer that has made a step since the last forward; None if none has.
        used_gradients: paths of parameters whose gradient an optimizer has used, and the user has not set to None since then.
        params: the parameters that forwards of this step differentiate; None outside of a step.
        open_step: the step under way; None outside of a step.
        on_backward: function to call when a backward reaches a forward of this step.
    """

    def __init__(self, state: ModuleTrainState, means: MeanGradients, scheduler: Scheduler, paused: Collection[str]) -> None:
        self.state, self.means, self.scheduler, self._paused = state, means, scheduler, paused
        self._engine, self._steps = scheduler.engine, scheduler.engine.steps
        self.scheduled = ScheduleHandle(scheduler, "training step")
        self.has_feedback = state.train_state.residuals is not None
        self.on_backward = partial(_begin_backward_of, weakref.ref(self))
        self._reset_after_rank_restart()
        restart_replay.record_replay_only_call(self._reset_after_rank_restart)

    def _reset_after_rank_restart(self) -> None:
        """Release the step and all gradients: in the constructor, and in a new generation, before all ranks load a state."""
        self.is_accumulating = self._is_releasing = False
        self.updated_by: int | None = None
        self.used_gradients: set[str] = set()
        self.params: Any = None
        self.open_step: Step | None = None
        self._units: list[UnitState] = []
        self._residuals: ResidualViews = {}  # residuals and random numbers for the formats of this step's gradients
        self._backward_id = -1  # id of the backward pass that is under way
        self._gradients_were_lost = False  # by an error that was not reported yet
        self.means.release_gradients()
        self.state.reset_after_rank_restart()

    @contextmanager
    def params_for_forward(self) -> Iterator[Any]:
        """Make forwards in this context part of the step under way, or of a new step. Yield the step's parameters."""
        self.reopen_scheduler_after_error()
        self.propagate_main_writes()
        if self.open_step is None:
            self.state.report_parameter_writes(self._steps.add_settings)
            self.means.release_gradients()
            self.updated_by = None
            self.open_step = self._steps.open_step(self.scheduled.record, self.state.train_state.params)
            self.open_step.set_on_backward(self.on_backward)
            with self._abandoning_on_error():
                self._begin_gradients()
                self.params = with_sinks(self.state.train_state.params, GradientSinks(self._residuals))
        with self._abandoning_on_error():
            yield self.params

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """In this context backwards only add their gradients to earlier ones."""
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before

    def _begin_gradients(self) -> None:
        """Begin the gradients of a step. Their reductions use and overwrite the residuals in the train state."""
        state, self._first_microbatch = self.state.train_state, self.open_step.num_microbatches if self.open_step else 0
        units = [node.unit for node in units_of(state.params)]
        rank = self.scheduler.rank
        _, self._residuals = prepare_residuals("backward()", state.residuals, units, donate=True, step=state.step, rank=rank)
        self._units = self._engine.begin_gradients_of_tree(state.params, {}, final_sum_in_place=True)

    def propagate_main_writes(self) -> None:
        """Gather main parameters into parameters at rest, if the user wrote to them. A step under way leaves its schedule."""
        if self.state.propagate_main_writes() and self.open_step is not None:
            self.open_step.abandon_schedule()  # a schedule would use parameters that it has gathered before the write

    def reopen_scheduler_after_error(self) -> None:
        """Make the scheduler usable again after an error. All ranks do this.

        A step whose backward pass or collective failed is abandoned first: this module may not have been told of the failure.
        """
        if self.open_step is not None:
            with suppress(FsharpError), self._abandoning_on_error():
                if self._backward_id not in (-1, torch._C._current_graph_task_id()):
                    raise ScheduleError("a backward pass of a module ended in an error")
                self._steps.check_scheduler_open()
        if self.open_step is None:
            self._steps.reopen_after_error()

    @contextmanager
    def _abandoning_on_error(self) -> Iterator[None]:
        """If an error leaves this context, abandon the step; the scheduler is closed until it is reopened after the error."""
        step = self.open_step
        assert step is not None
        try:
            with self._steps.closing_scheduler_on_error(step):
                yield
        except BaseException:
            if self.open_step is step:
                self._gradients_were_lost |= self._backward_id != -1 or step.num_microbatches > self._first_microbatch
                self.open_step, self.params, self._backward_id = None, None, -1
                self.means.release_gradients()
            raise

    def _close_step(self) -> None:
        assert self.open_step is not None
        with self._abandoning_on_error():
            self._steps.close_step(self.open_step)
            self.open_step.set_on_backward(lambda: None)  # a late backward may not begin that of a later step
        self.open_step = self.params = None

    def _begin_backward(self) -> None:
        """Begin a backward pass that has reached a module. Raise an error if gradients were used or changed."""
        if self._backward_id != -1 or self.open_step is None:
            return
        self._backward_id, step = torch._C._current_graph_task_id(), self.open_step
        with self._abandoning_on_error():
            if self.used_gradients:
                raise self._used_gradients_error("backward()", "add to", "or before the backward")
            if self.means.tree is not None:
                if self.has_feedback:
                    raise ScheduleError(
                        "a backward came after gradients had been reduced with feedback, Precision(feedback=True), which "
                        "rounds them. Run all backwards of a step but the last one inside of `with model.accumulate():`."
                    )
                if self.means.are_changed:
                    raise ScheduleError(
                        "a backward came after gradients had been changed, as by clip_grad_norm_(), and cannot be added to "
                        "changed gradients. Change them after the last backward of a step."
                    )
                self.means.return_to_sums(self._units)
            for unit in self._units:
                if unit.gradient is not None:
                    unit.gradient.ignore_leaves(self._paused)
                    unit.gradient.set_residuals(self._residuals.get(unit.layout.name, {}))
            step.begin_backward_pass(is_last=not self.is_accumulating)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    @api_boundary
    def _end_backward(self) -> None:
        """End a backward's microbatch. Outside of ``accumulate()`` reduce gradients to means over ranks, and call hooks."""
        step, self._backward_id = self.open_step, -1
        if step is None or step.uses.forward:  # a forward has called this backward, so the microbatch is not over
            return
        with self._abandoning_on_error():
            self._engine.end_microbatch(self._units, self.params, self.scheduler)
            if self.is_accumulating or not self.has_gradients:
                return
            missing = parameters_without_gradient(self._units, self.scheduler, self._paused)
            grads = self._engine.hand_out_gradients(self._units, self.state.train_state.params)
            self.means.set_to_mean_over_ranks(self._engine.run_reduce_scatter(grads, "optim", {}), missing)
            if not self._is_releasing:
                self.means.call_hooks()

    @property
    def has_gradients(self) -> bool:
        """Whether backward passes of this step have left gradients."""
        return any(unit.gradient is not None and unit.gradient.has_step_gradient for unit in self._units)

    def update(self, tx: Any, settings: str, *, optimizer_id: int) -> None:
        """Update by ``tx``, and end the step; without gradients do nothing. ``settings``: a text that ranks compare."""
        if self.checked_gradients_or_none("step()") is None:
            return
        self.state.notice_main_writes()
        self.state.report_parameter_writes(self._steps.add_settings)
        self._steps.add_settings(f"{settings}\n{self.means.changes_text()}")
        with self._abandoning_on_error():
            self.state.update(tx, self.means.tree)
            self.used_gradients = set(self.means.paths_with_gradient)
            self.means.release_gradients()
        self._close_step()
        self.updated_by = optimizer_id
        self.state.loaded.clear()

    def checked_gradients_or_none(self, where: str) -> Any:
        """Return the mean gradients; None if there are none. Errors name ``where``.

        Raise a LossError if an earlier error has released the gradients, or all backward passes were inside of
        ``accumulate()``. Raise a ScheduleError if a step of an optimizer has used the gradients.
        """
        self.reopen_scheduler_after_error()
        if self._gradients_were_lost:
            raise LossError(
                f"{where}: the gradients of this step were lost because of an earlier error. Call zero_grad(), and "
                "compute them again."
            )
        if self.means.tree is None and self.open_step is not None and self.has_gradients:
            raise LossError(
                f"{where}: all backward passes so far were inside of accumulate(). Run the last one outside of "
                "`with model.accumulate():`."
            )
        if self.used_gradients:
            raise self._used_gradients_error(where, "use", f"and then a backward before {where}")
        return self.means.tree

    def check_can_unscale(self) -> None:
        """If the module has feedback, raise an error, after setting residuals to zero, as these have the loss scale too."""
        if self.has_feedback and (residuals := self.state.train_state.residuals) is not None:
            for tensors in residuals.value.values():
                torch._foreach_zero_(tensors)
            raise ScheduleError(
                "unscale_(): the module has Precision(feedback=True), which adds encoding errors of earlier gradients to later "
                "gradients, which have another scale. Leave out feedback, or train in bfloat16, which needs no GradScaler."
            )

    def _used_gradients_error(self, where: str, torch_verb: str, remedy: str) -> ScheduleError:
        return ScheduleError(
            f"{where}: optimizer.step() has used up the gradients of the previous step, such as the gradient of "
            f"{min(self.used_gradients)!r}. Plain torch would {torch_verb} these gradients, and a sharded module does not keep "
            f"them. Call optimizer.zero_grad() after optimizer.step(), {remedy}."
        )

    def release_gradients(self, *, set_to_none: bool = True) -> None:
        """Release the gradients; during a backward this is an error. A forward whose backward has not run yet stays valid."""
        if not set_to_none:
            raise ScheduleError(
                "zero_grad(set_to_none=False): gradients have no memory between steps, so the gradient of a parameter that the "
                "next step does not use is None, and not zero. Leave out the argument."
            )
        self.reopen_scheduler_after_error()
        if self._backward_id != -1:
            raise ScheduleError("zero_grad(): a backward is under way. Call zero_grad() before the backward, or after it.")
        self.means.release_gradients()
        self.used_gradients = set()
        step, self._gradients_were_lost = self.open_step, False
        if step is None or not self.has_gradients:
            return
        if not step.uses.awaited:
            self._close_step()
            return
        with self._abandoning_on_error():
            self._begin_gradients()

    @contextmanager
    def releasing_gradients(self) -> Iterator[None]:
        """Release gradients at the end of this context. Backward passes inside of the context call no gradient hooks."""
        used, self.used_gradients, self._is_releasing = self.used_gradients, set(), True
        try:
            yield
            self.release_gradients()
        finally:
            self.used_gradients, self._is_releasing = used, False

    def release_gradients_and_mark_used(self) -> None:
        """Release the gradients and record them as used, as a step of an optimizer does."""
        used = set(self.means.paths_with_gradient)
        self.release_gradients()
        self.used_gradients = used

    def gradient_part(self, path: str) -> ShardedTensor | None:
        """Return this rank's part of a mean gradient, or None. ScheduleError if gradients are only accumulated so far."""
        if self.means.tree is None and self.open_step is not None and self._backward_id == -1 and self.has_gradients:
            raise ScheduleError(
                f"grad of parameter {path!r}: all backward passes so far were inside of accumulate(), and their "
                "gradients are not summed over ranks yet. Leave out `with model.accumulate():` where p.grad is read between "
                "backward passes. To release all gradients, call zero_grad() of the model or the optimizer."
            )
        return self.means.gradient_part(path)

    def release_gradient(self, path: str) -> None:
        """Release the gradient of one parameter. When all are released, the step has no gradients."""
        self.used_gradients.discard(path)
        if self.gradient_part(path) is not None:
            self.means.release_part(path)
            if self.means.trained <= self.means.missing:
                self.release_gradients()

    def abandon_forwards(self, where: str) -> None:
        """End the step if only forwards were run; their backwards then raise. ScheduleError with ``where`` after backwards."""
        self.reopen_scheduler_after_error()
        step = self.open_step
        if step is None:
            return
        if self.has_gradients or self._backward_id != -1:
            raise ScheduleError(
                f"{where}: a step is under way, in which backward passes have left gradients. Call it after optimizer.step() "
                "or zero_grad(), or before the first backward."
            )
        self._close_step()
        step.set_on_backward(partial(_raise_forward_abandoned, where))


def _raise_forward_abandoned(where: str) -> None:
    raise ScheduleError(
        f"backward() was called for a forward that {where} had abandoned, as its backward had not run. Call backward() before "
        f"{where}, or call the model again after {where}."
    )


def _begin_backward_of(step: "weakref.ref[ModuleStep]", grads: object = None) -> None:
    if (alive := step()) is not None:
        alive._begin_backward()
