"""Session: the steps of a module, put together from what its user calls: forward, backward, an optimizer's step.

A module is a pure function of its parameters once those are swapped for others while it computes. So each chosen module calls
``forward()`` with its units, under a scheduler, and the rest is as in a functional step. What a function would do between
``value_and_grad`` and ``update`` is spread over the user's calls here: a run is opened by the first forward that may have a
backward, a microbatch ends with a backward pass, and an optimizer's step closes the run.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from fsharp.errors import LossError, ScheduleError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import Sharded, units_of
from fsharp.functional.moves import reduce_scatter
from fsharp.functional.sinks import with_sinks
from fsharp.functional.state import TrainState, update
from fsharp.stateful.modules.calls import ModuleCalls, ParameterSource
from fsharp.stateful.modules.differentiate import differentiate
from fsharp.stateful.modules.initial.dtensors import Spec
from fsharp.stateful.modules.mean_gradients import MeanGradients, unused_parameters
from fsharp.stateful.modules.module_state import ModuleState
from fsharp.stateful.modules.outputs import tensors_in
from fsharp.stateful.modules.parameter import Part, ShardedParameter
from fsharp.stateful.runtime.boundary import before_backward, in_backward
from fsharp.stateful.runtime.scheduled import Scheduled
from fsharp.stateful.runtime.scheduler import Scheduler
from fsharp.stateful.runtime.step import Step
from fsharp.stateful.units.unit_state import UnitState


class Session:
    """A module's training state, and the step that is under way.

    Args:
        module: the root.
        layout: of its parameters.
        chosen: paths of the modules that are gathered by themselves.
        state: parameters and main copies; no optimizer state.
        scheduler: runs everything.
        input_dtype: of floating-point tensors that the root is called with; None leaves them.
        specs: of the parameters that are DTensors, by path.

    Attributes:
        calls: its code, with parameters gathered.
        kept: what is trained.
        is_unsharded: whether its parameters are whole, and not its own, at present.
        is_averaged: whether averages are in their place at present.
        updated_by: the optimizer that has made the last step, if no forward has come since.
        is_accumulating: whether a backward leaves its gradients where they rest, unreduced over some axes.
        parameters: by path, what the module shows of them.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        chosen: Sequence[str],
        state: TrainState,
        scheduler: Scheduler,
        *,
        input_dtype: torch.dtype | None = None,
        specs: Mapping[str, Spec] = {},
    ) -> None:
        self.layout, self.scheduler, self.input_dtype = layout, scheduler, input_dtype
        scheduler.main_stays = True  # the module shows them
        self.kept = ModuleState(layout, state, scheduler)  # which hears of others' errors while it waits
        self.calls = ModuleCalls(module, layout, chosen, specs)
        self.is_accumulating = False
        self.parameters: dict[str, ShardedParameter] = {}
        self.means = MeanGradients(self.parameters, specs, scheduler)
        self.is_unsharded = self.is_averaged = False
        self._training, self._evaluation = scheduler(_not_called), scheduler(_evaluate)
        self._training.name, self._evaluation.name = "training step", "evaluation"
        self._run: Step | None = None
        self._units: list[UnitState] = []
        self._probed: Any = None
        self._pass = -1  # the backward pass that is under way
        self.updated_by: int | None = None
        self._lost = False  # whether gradients have been given up because of an error, and nobody has asked for that

    # ------------------------------------------------------------ computing

    def call(self, path: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``fn(*args, **kwargs)``, the code of the module at ``path``, with its units gathered."""
        if self.is_unsharded:
            raise ScheduleError(
                "the model was called inside of unsharded(), where its parameters are not its own. Call it outside."
            )
        source = self.calls.source
        if source is not None and path in source.computing:  # forward calls another method, or the reverse
            return fn(*args, **kwargs)
        if not path and self.input_dtype is not None:
            args, kwargs = torch_pytree.tree_map(self._cast, (args, kwargs))
        if source is None and in_backward() and self._probed is not None:  # a checkpointed module computes again
            source = ParameterSource(self._probed, self.scheduler)
        if source is not None:
            return self.calls.enter(source, path, fn, args, kwargs)
        if self._run is None:
            self.clear_up()
        if not torch.is_grad_enabled():
            return self._evaluation(lambda source: self.calls.enter(source, path, fn, args, kwargs), self.kept.state.params)
        if not trains(self.layout):  # a backward may pass through it, whenever it comes
            return self.calls.enter(ParameterSource(self.kept.state.params, self.scheduler), path, fn, args, kwargs)
        run = self._open()
        with self._forgetting(run), self.scheduler.guard(run):
            out = self.calls.enter(ParameterSource(self._probed, self.scheduler), path, fn, args, kwargs)
            # Here, too: what is inside may be in a reentrant checkpoint, whose backward is a pass within the pass.
            before_backward(tensors_in(out, path), torch_pytree.tree_leaves((args, kwargs)), partial(_begin, weakref.ref(self)))
            return out

    def _cast(self, x: Any) -> Any:
        return x.to(self.input_dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    # ------------------------------------------------------------ a step

    def _open(self) -> Step:
        """The run of the step that is under way, or of a new one."""
        self.clear_up()
        if self.is_averaged:
            raise ScheduleError(
                "the model was called inside of averaged(), and not under torch.no_grad(): averages are not trained."
            )
        if self._run is None:
            self.kept.check_untouched()
            self.means.clear()
            self.updated_by = None
            run = self._run = self.scheduler.open(self._training, (self.kept.state.params,), {})
            with self._forgetting(run), self.scheduler.guard(run):
                self._units = self.scheduler.start_gradients(self.kept.state.params)
                self._probed = with_sinks(self.kept.state.params, self.scheduler)
            this = weakref.ref(self)
            run.on_backward = lambda: _begin(this)
        return self._run

    def clear_up(self) -> None:
        """After an error begin anew, as all ranks do. A backward that has ended in one gives its step up: autograd does not."""
        if self._pass not in (-1, torch._C._current_graph_task_id()) and self._run is not None:
            run = self._run
            try:
                with self._forgetting(run), self.scheduler.guard(run):
                    raise ScheduleError("a backward pass of a module ended in an error")
            except ScheduleError:
                self._pass = -1
        if self._run is None:
            self.scheduler.reopen()

    @contextmanager
    def _forgetting(self, run: Step) -> Iterator[None]:
        """If an error leaves this context, there is no step any more."""
        try:
            yield
        except BaseException:
            if self._run is run:
                self._lost = self._lost or self._pass != -1 or run.num_microbatches > 0
                self._run, self._probed, self._pass = None, None, -1
                self.means.clear()
            raise

    def _begin_backward(self) -> None:
        """A backward pass has come to one of the modules."""
        if self._pass != -1 or self._run is None:
            return
        self._pass = torch._C._current_graph_task_id()
        if self.means.tree is not None:
            if self.means.are_changed:
                raise ScheduleError(
                    "a backward came after gradients had been changed, as by clip_grad_norm_(); what it adds to is their sum "
                    "over ranks. Change them after the last backward of a step."
                )
            self.means.take_back(self._units)
        self._run.begin_backward(is_last=not self.is_accumulating)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """All gradients of the pass are there."""
        run, self._pass = self._run, -1
        if run is None or run.is_in_forward:  # a backward that a forward has called: the microbatch goes on
            return
        with self._forgetting(run), self.scheduler.guard(run):
            self.scheduler.end_microbatch(self._units, self._probed)
            if self.is_accumulating or not self.is_fed:
                return
            missing = unused_parameters(self._units, self.scheduler)
            sums = reduce_scatter(self.scheduler.issue(self._units, self.kept.state.params), comm=self.scheduler)
            self.means.set(sums, missing)

    @property
    def is_fed(self) -> bool:
        """Whether backward passes of this step have left gradients."""
        return any(unit.gradient is not None and unit.gradient.is_fed for unit in self._units)

    def update(self, tx: Any, settings: str) -> bool:
        """New parameters by a transformation of the gradients, if there are any; whether there were.

        Args:
            tx: the transformation.
            settings: what ranks have to have in common, such as learning rates.

        Raises:
            LossError: gradients that wait for more microbatches.
        """
        if self.finished("step()") is None:
            return False
        run = self._run
        assert run is not None
        self.kept.check_untouched()
        self.scheduler.account(f"{settings} {self.means.changes()}")
        with self._forgetting(run), self.scheduler.guard(run):
            self.kept.state = update(tx, self.means.tree, self.kept.state, comm=self.scheduler, donate=True)
            self.means.clear()
            self.scheduler.close(run)
        self._run = self._probed = None
        self.kept.stamp()
        return True

    def finished(self, where: str) -> Any:
        """The gradients, if there are any, for ``where``, which is about to use them.

        Raises:
            LossError: they wait for more microbatches, or an error has cost them.
        """
        self.clear_up()
        if self._lost:
            raise LossError(f"{where}: an error has cost the gradients of this step. Call zero_grad(), and compute them again.")
        if self.means.tree is None and self._run is not None and self.is_fed:
            raise LossError(
                f"{where}: all backward passes so far were told to accumulate. Leave `with model.accumulate():` before the "
                "last one."
            )
        return self.means.tree

    def discard(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients there are; a forward whose backward is to come stays."""
        if not set_to_none:
            raise ScheduleError(
                "zero_grad(set_to_none=False): gradients have no memory between steps, so that a parameter that is not used in "
                "the next one has none, and not zero. Leave out the argument."
            )
        self.clear_up()
        self.means.clear()
        run, self._lost = self._run, False
        if run is None or not self.is_fed:
            return
        if self.is_pending:
            raise ScheduleError(
                "zero_grad(): between a forward and its backward, when other backward passes have left gradients. "
                "Call it before the forward."
            )
        with self._forgetting(run), self.scheduler.guard(run):
            self.scheduler.close(run)
        self._run, self._probed = None, None

    # ------------------------------------------------------------ gradients

    def gradient(self, path: str) -> Part | None:
        """This rank's part of the mean gradient of a parameter."""
        return self.means.part(path)

    def drop_gradient(self, path: str) -> None:
        """A gradient has been set to None; once all are, none has been."""
        if self.means.tree is not None:
            self.means.drop(path)
            if self.means.are_dropped:
                self.discard()

    def differentiate(self, outputs: Any, inputs: Sequence[torch.Tensor], **options: Any) -> tuple[torch.Tensor | None, ...]:
        """``torch.autograd.grad``: see :func:`~fsharp.stateful.modules.differentiate.differentiate`."""
        return differentiate(self, outputs, inputs, **options)

    @property
    def sinks(self) -> list[torch.Tensor]:
        """What a backward of the step that is under way goes to."""
        return [sink for node in units_of(self._probed) for sink in node.sinks] if self._run is not None else []

    @property
    def is_pending(self) -> bool:
        """Whether there are forwards in this step whose backward is to come."""
        return any(unit.pending > 0 for unit in self._units)

    # ------------------------------------------------------------ whole parameters

    @contextmanager
    def swapped_in(self, names: Sequence[str], tensors: Sequence[Sequence[torch.Tensor]]) -> Iterator[None]:
        """The module has these tensors for parameters."""
        self.check_idle("unsharded()")
        self.is_unsharded = True
        try:
            with self.calls.swapped_in(names, tensors):
                yield
        finally:
            self.is_unsharded = False

    def adopt(self, state: TrainState) -> None:
        """Train this state, of the same layout, from here on.

        Raises:
            ScheduleError: a step is under way.
            TreeError: a state of another layout, place or dtype.
        """
        self.check_idle("train_state")
        if self.is_averaged:
            raise ScheduleError("train_state: set inside of averaged(), which puts the parameters back afterwards.")
        self.kept.adopt(state)
        self.show()

    def write(self, nodes: Sequence[Sharded]) -> None:
        """Train these values from here on, one full node for each unit."""
        self.kept.write(nodes)
        self.show()

    def show(self) -> None:
        """Let the module's parameters be this rank's parts of what is trained."""
        self.parameters.clear()
        rank, mesh = self.scheduler.rank, self.scheduler.mesh
        trained = {node.name: node for node in units_of(self.kept.visible())}
        for node in units_of(self.kept.state.params):
            unit = node.unit
            frozen = node.select([g for g in node.groups if not unit.groups[g].trainable])
            parts = trained[node.name].local_leaves(rank) | frozen.local_leaves(rank)
            for leaf in unit.leaves:
                if leaf.tied_to is not None:
                    continue
                group, path = unit.groups[leaf.group], unit.full_path(leaf)
                place = unit.strategy.optim if group.trainable else unit.strategy.params
                spec = self.calls.specs.get(path)
                shape = leaf.shape if spec is None else spec.shape
                whole = all(mesh.axis_size(axis) == 1 for axis in place.sharded) and not (spec is not None and spec.is_sharded)
                dtype = group.dtypes.main if group.trainable else group.dtypes.compute
                data = parts.get(path, torch.empty(0, dtype=dtype, device=self.scheduler.device))
                self.parameters[path] = ShardedParameter.over(
                    data.detach(), path, shape, self, is_whole=whole, trains=group.trainable
                )
        for unit in self.layout.units:
            owned = []
            for leaf in unit.leaves:
                path = unit.full_path(leaf) if leaf.tied_to is None else ".".join(part for part in leaf.tied_to if part)
                owned.append(self.parameters[path])
            self.calls.slots[unit.name].swap(owned)

    def check_idle(self, where: str) -> None:
        """Refuse ``where`` if a step has gradients. One that has none, forwards alone, is given up, on all ranks alike.

        Raises:
            ScheduleError: backward passes have left gradients, or one is under way.
        """
        self.clear_up()
        run = self._run
        if run is None:
            return
        if self.is_fed or self._pass != -1:
            raise ScheduleError(
                f"{where}: a step is under way, in which backward passes have left gradients. Call it after optimizer.step() "
                "or zero_grad(), or before the first backward."
            )
        with self._forgetting(run), self.scheduler.guard(run):
            self.scheduler.close(run)
        self._run = self._probed = None
        run.on_backward = partial(_refuse_backward, where)

    @property
    def schedule(self) -> Scheduled:
        """The training step: its schedule, its trace."""
        return self._training


def _refuse_backward(where: str) -> None:
    raise ScheduleError(
        f"a backward came to a forward that {where} has given up, as no backward had come before. Call the backward before "
        f"{where}, or call the model again after it."
    )


def trains(layout: Layout) -> bool:
    """Whether any unit of a layout has leaves that are trained."""
    return any(unit.trainable for unit in layout.units)


def _not_called(*args: Any, comm: Comm) -> None:
    raise AssertionError("a step of a session is not one function")


def _evaluate(thunk: Callable[[ParameterSource], Any], params: Any, comm: Comm) -> Any:
    return thunk(ParameterSource(params, comm))


def _begin(session: "weakref.ref[Session]") -> None:
    alive = session()
    if alive is not None:
        alive._begin_backward()
