"""ModuleSession: the state of a sharded module: its calls, its training state, and the parameters that the user sees.

During a call full tensors replace the module's parameters, so the module is a pure function of these. A call of the root, or
of a module that ``units`` selects, is a :func:`~fsharp.forward` of the module's units, under a scheduler.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial, wraps
from typing import Any, Literal

import torch
from torch import nn

from fsharp.errors import FsharpError, LayoutError, ScheduleError
from fsharp.functional.comm.protocol import Comm, LabelPrefixComm
from fsharp.functional.comm.tree_labels import label_new_tree
from fsharp.functional.forward import forward
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import trainable, units_by_name, units_of
from fsharp.functional.layout.stored import preserving_amax_histories
from fsharp.functional.state import TrainState
from fsharp.stateful.modules.calls import (
    ModuleCall,
    ParameterSource,
    SharedCallState,
    check_no_added_parameters,
    replacing_buffers_by_copies,
)
from fsharp.stateful.modules.mean_gradients import MeanGradients
from fsharp.stateful.modules.module_state import ModuleTrainState
from fsharp.stateful.modules.module_step import ModuleStep
from fsharp.stateful.modules.parameter import ShardedParameter, ShardedTensor, iter_leaves_and_parts
from fsharp.stateful.modules.parts.part import ShardedTensorOwner
from fsharp.stateful.modules.torch_tools.dtensors import DTensorSpec
from fsharp.stateful.modules.torch_tools.refusals import refuse_copy
from fsharp.stateful.modules.values.casts import CastDtypes, cast_tensors
from fsharp.stateful.modules.values.outputs import tensors_in
from fsharp.stateful.runtime.boundary import in_backward, register_output_prehooks
from fsharp.stateful.runtime.scheduler import ScheduledFunction, Scheduler
from fsharp.torch_compile import disable_compile, skip_frame
from fsharp.tracebacks import api_boundary, hide_frames

_GRAD_CALL = "torch.autograd.grad() with respect to parameters of a ShardedModule"


class ModuleSession:
    """The layout, state, step and scheduler of a sharded module, kept between its calls. A ModuleSession runs each call.

    Attributes:
        casts: casts of inputs and outputs, by path, for modules with casts.
        is_unsharded, is_averaged: whether other tensors, or values of averages, now replace the sharded parameters.
        parameters: by path, the parameters that the module shows outside of forwards.
        paused: paths of trained parameters that now do not require a gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        chosen: Sequence[str],
        state: TrainState,
        scheduler: Scheduler,
        casts: Mapping[str, CastDtypes],
        specs: Mapping[str, DTensorSpec],
    ) -> None:
        self.layout, self.scheduler, self.casts = layout, scheduler, casts
        scheduler.engine.keep_main_copies_on_device()  # the module shows main copies
        self.state = ModuleTrainState(state, scheduler)
        self.parameters: dict[str, ShardedParameter] = {}
        self.paused: set[str] = set()
        self.calls = SharedCallState(module, layout, chosen, specs, self.paused)
        means = MeanGradients(self.parameters, specs, scheduler)
        self.step = step = ModuleStep(self.state, means, scheduler, self.paused)
        # Functions that parts call: see ShardedTensorOwner.
        self.gradient_part, self.release_gradient = step.gradient_part, step.release_gradient
        self.check_can_unscale, self.add_gradient_ready_hook = step.check_can_unscale, means.add_gradient_ready_hook
        self.settings_text_to_compare = lambda: scheduler.engine.steps.history.text_to_compare
        self._trained = set[str]()  # paths of trained parameters
        self.is_unsharded = self.is_averaged = False
        self._evaluation = ScheduledFunction(scheduler, lambda run, tree, comm: run(ParameterSource(tree, comm)), "evaluation")

    @disable_compile
    def call_module(
        self, module: nn.Module, path: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``fn``, a method of the module at ``path``, with the module's units gathered, and cast inputs and outputs.

        Parameters come from the call around this call. Without such a call they come from the forward or step whose checkpoint
        computes again. Without a checkpoint they are those at rest if no parameter needs a gradient, and else the step's.
        """
        if self.is_unsharded:
            raise ScheduleError(
                "the model was called inside of unsharded(), where whole tensors replace its parameters. Call it outside."
            )
        dtypes = self.casts.get(path)
        if dtypes is not None:
            args, kwargs = cast_tensors((args, kwargs), dtypes.inputs)
        call = ModuleCall(self.calls, module, path, fn, args, kwargs)
        run = partial(self._run_call, call)
        source, step = self.calls.source, self.step
        buffers: AbstractContextManager[Any] = nullcontext()
        if source is None and in_backward():  # a checkpointed module computes again
            source = self.calls.source_of_running_node()
            if source is not None:
                buffers = replacing_buffers_by_copies(module)
            elif step.open_step is not None:
                source = ParameterSource(step.params, self.scheduler)
        if source is None and step.open_step is None:
            step.reopen_scheduler_after_error()
        if source is not None:
            with buffers:
                out = run(source)
        elif not torch.is_grad_enabled():
            step.propagate_main_writes()
            out = self._evaluation(run, self.state.train_state.params)
        elif step.open_step is None and self._trained <= self.paused:  # without gradients a later backward needs no step
            step.propagate_main_writes()
            out = run(ParameterSource(self.state.train_state.params, self.scheduler))
        else:
            self._check_can_train()
            with step.params_for_forward() as params:
                out = run(ParameterSource(params, self.scheduler))
                # Units inside may be in a reentrant checkpoint, whose backward is a nested pass: begin the outer pass here.
                register_output_prehooks(tensors_in(out), call.flat, step.on_backward)
        return out if dtypes is None else cast_tensors(out, dtypes.outputs)

    @property
    def is_in_forward(self) -> bool:
        """Whether the module's code is running: in a forward, or in the function that ``model.functional()`` returned."""
        return self.calls.source is not None

    def _check_can_train(self) -> None:
        if self.is_averaged:
            raise ScheduleError("the model was called inside of averaged(), without torch.no_grad(): averages do not train.")
        if torch._C._are_functorch_transforms_active():
            raise ScheduleError(
                "a sharded module was called inside of a transformation of torch.func, which its step does not support. Take "
                "`fn, params = model.functional()`, and transform fn(params, ..., comm=model.comm); or use torch.no_grad()."
            )

    def _run_call(self, call: ModuleCall, source: ParameterSource) -> Any:
        """Run a call with the units of its module gathered from ``source``."""
        gathered = call.gathered
        for entries in gathered.entries:
            entries.check_not_replaced()
        check_no_added_parameters(call.module, call.path)
        nodes, ties = list(map(source.nodes.__getitem__, gathered.units)), list(map(source.nodes.__getitem__, gathered.ties))
        if not nodes:
            call.compute(source, [])
            return call.out
        units = nodes[0] if len(nodes) == 1 else nodes
        engine = self.scheduler.engine
        if source.comm is self.scheduler and engine.handles_forward(units, ties):
            compute = partial(call.compute, source)
            return call.result_with_tensors(engine.run_forward(compute, nodes, ties, call.flat, {}, as_leaves=True))
        compute = partial(call.compute_with_param_trees, source)
        release = not gathered.has_inner_modules
        return call.result_with_tensors(forward(compute, nodes, *call.flat, comm=source.comm, ties=ties, release=release))

    def reset_history_if_both_loaded(self, kind: Literal["parameters", "optimizer"]) -> None:
        """Record that all ranks have loaded all ``"parameters"`` or all ``"optimizer"`` state.

        Once both are loaded, no value depends on earlier steps. Then the history of steps, which ranks compare, is reset: ranks
        whose steps differed before an error can continue together.
        """
        self.state.loaded.add(kind)
        if kind == "parameters":
            self.state.renew_residuals()
        if len(self.state.loaded) == 2:
            self.state.loaded.clear()
            self.scheduler.engine.steps.reset_label_history()
            label_new_tree((self.state.train_state.params, self.state.train_state.main), self.scheduler)

    def reopened_scheduler(self) -> Scheduler:
        """Return the scheduler. If an error has closed it, reopen it first: all ranks have to call this."""
        self.step.reopen_scheduler_after_error()
        return self.scheduler

    def comm_outside_steps(self) -> Comm:
        """Return the scheduler for collectives outside of steps, whose labels have a digest of all settings so far."""
        comm, steps = self.reopened_scheduler(), self.scheduler.engine.steps
        return comm if steps.now is not None else LabelPrefixComm(comm, f"after history {steps.history.digest or 'none'}: ")

    def wait_before_write(self) -> None:
        """Wait for gathers under way, before a write: they read parameters for the next step, or write updated parameters."""
        for node in (unfilled := self.state.unfilled):
            with suppress(FsharpError):  # a failed gather is over, and the next use of its parameters raises its error
                node.wait()
        unfilled.clear()
        self.scheduler.engine.steps.executor.lanes.stream_wait_lanes("gather")

    def add_write_to_comm_labels(self, part: ShardedTensor, what: str) -> None:
        """If ``part`` is a parameter or a gradient, add ``what``, text about a write to it, to labels of later collectives."""
        memory = part.untyped_storage().data_ptr()
        gradient, parameter = self.step.means.gradient_part(part.path), self.parameters[part.path]
        if gradient is not None and gradient.untyped_storage().data_ptr() == memory:
            self.step.means.edits.append(f"{what} {part.path}")
        elif parameter.untyped_storage().data_ptr() == memory:
            self.scheduler.engine.steps.add_settings(f"{what} {part.path}")

    def full_parameter_in_backward(self, part: ShardedTensor) -> torch.Tensor | None:
        """Return the whole parameter while its unit's backward is under way, for activation checkpointing; else None."""
        full = None if self.step.open_step is None else self.step.open_step.full_unit_in_backward(part.unit.name)
        if full is None:
            return None
        leaf = full.leaves()[full.leaf_table.position_by_path[part.leaf.path]]
        if part.requires_grad and torch.is_grad_enabled():
            leaf.requires_grad_().register_hook(partial(_refuse_reentrant_checkpoint, part.path))
        return leaf if part.spec is None else part.spec.as_dtensor(leaf)

    def differentiate(
        self,
        outputs: Any,
        inputs: Sequence[torch.Tensor],
        grad_outputs: Any = None,
        *,
        retain_graph: bool | None = None,
        allow_unused: bool | None = None,
        materialize_grads: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Run ``torch.autograd.grad``. The gradient of a parameter is the mean over ranks, sharded as the parameter is.

        Afterwards ``.grad`` is None, and backwards of other forwards still work. It is an error to pass ``create_graph=True``,
        ``is_grads_batched=True`` or parameters of several modules, with ``feedback=True``, or after a backward of this step.
        """
        if options.get("create_graph") or options.get("is_grads_batched"):
            raise ScheduleError(
                f"{_GRAD_CALL}: create_graph and is_grads_batched need a graph of the backward, which is not kept. Take "
                "`fn, params = model.functional()`: torch.func works on fn."
            )
        for x in inputs:
            if isinstance(x, ShardedParameter) and x.owner() is not self:
                raise ScheduleError(f"{_GRAD_CALL}: {x.path!r} is a parameter of another module. Call it once for each module.")
        step = self.step
        step.reopen_scheduler_after_error()
        if step.has_feedback:
            raise ScheduleError(
                f"{_GRAD_CALL}: its gradients would use up the encoding errors of earlier gradients, Precision(feedback=True). "
                "Take `fn, params = model.functional()`: fs.value_and_grad takes residuals of your own."
            )
        if step.is_accumulating or step.means.tree is not None or step.has_gradients:
            raise ScheduleError(
                f"{_GRAD_CALL}: this step has gradients of other backward passes, or is inside of accumulate(). Call it before "
                "the other passes, or after optimizer.step() or zero_grad()."
            )
        sinks = [sink for node in units_of(step.params) for sink in node.sinks] if step.open_step is not None else []
        leaves = [*sinks, *(x for x in inputs if not isinstance(x, ShardedParameter))]
        found: tuple[torch.Tensor | None, ...] = ()
        with step.releasing_gradients():
            if leaves:
                found = torch.autograd.grad(outputs, leaves, grad_outputs, retain_graph=retain_graph, allow_unused=True)
            rest = iter(found[len(sinks) :])
            grads = [step.means.gradient_part(x.path) if isinstance(x, ShardedParameter) else next(rest) for x in inputs]
        for i, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
            part = x if isinstance(x, ShardedTensor) else None
            if grad is None and materialize_grads:
                grads[i] = torch.zeros_like(x) if part is None else ShardedTensor.from_local(torch.zeros_like(part.local), part)
            elif grad is None and not allow_unused:
                name = str(i) if part is None else repr(part.path)
                raise RuntimeError(f"{_GRAD_CALL}: input {name} was not used. Set allow_unused=True if this is what you want.")
        return tuple(grads)

    @contextmanager
    def replacing_parameters(self, by_path: Mapping[str, Any]) -> Iterator[None]:
        """In this context the tensors ``by_path`` replace all parameters, and the module cannot be called."""
        entries, self.is_unsharded = list(self.calls.entries.values()), True
        try:
            with self.calls.reading_from(self.calls.source, entries, self._leaf_values_by_unit(by_path)):
                yield
        finally:
            self.is_unsharded = False

    @contextmanager
    def showing_averages(self, averages: Mapping[tuple[str, int], torch.Tensor]) -> Iterator[None]:
        """In this context parameters have the values of ``averages``, by (name of the unit, group). All ranks have to enter."""
        state, copies = self.state, units_of(self.state.main_parameters())
        shown = {(node.name, g): x for node in copies for g, x in zip(node.groups, node.buffers, strict=True)}
        nodes = units_of((trainable(state.train_state.params), state.train_state.main))
        targets = [buffer for node in nodes for buffer in node.buffers]
        own, self.is_averaged = [target.detach().clone() for target in targets], True
        try:
            state.copy_into_buffers([shown[key] for key in averages], list(averages.values()))
            with preserving_amax_histories(self.layout.units):
                state.gather_main_into_resting_parameters()
            yield
        finally:
            state.copy_into_buffers(targets, own)
            self.is_averaged = False

    def replace_state(self, state: TrainState) -> None:
        """Train ``state`` from now on. Raise an error for another layout, or while a step has gradients."""
        self.step.abandon_forwards("train_state")
        if self.is_averaged or self.is_unsharded:
            raise ScheduleError("train_state: set in averaged() or unsharded(), which restore earlier values. Set it later.")
        self.state.replace_state(state)
        self.install_sharded_parameters()

    def write_and_gather_parameters(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's elements, by path, into parameters, and update parameters at rest. A collective."""
        with torch.no_grad():
            for path, value in parts.items():
                self.parameters[path].local.view(-1).copy_(value.view(-1))
        self.state.gather_main_into_resting_parameters()

    def install_sharded_parameters(self) -> None:
        """Put this rank's parts, as ShardedParameters, in place of the module's parameters."""
        owner: weakref.ref[ShardedTensorOwner] = weakref.ref(self)
        rank, trained, specs = self.scheduler.rank, units_by_name(self.state.main_parameters()), self.calls.dtensor_specs
        for node in units_of(self.state.train_state.params):
            frozen = node.select_groups([g for g in node.groups if not node.unit.groups[g].trainable])
            for each in (trained[node.name], frozen):
                for path, leaf, data in iter_leaves_and_parts(each, rank):
                    about = {"path": path, "unit": node.unit, "leaf": leaf, "place": each.place, "rank": rank}
                    about |= {"spec": specs.get(path), "owner": owner, "is_trained": each is not frozen}
                    part = ShardedParameter.from_attributes(data.detach(), about, requires_grad=each is not frozen)
                    held = self.parameters.setdefault(path, part)
                    if held is not part:  # optimizers of torch.optim and lists of callers have it
                        torch._C._swap_tensor_impl(held, part)
        self._trained = {path for path, each in self.parameters.items() if each.is_trained}
        for entries, owned in zip(self.calls.entries.values(), self._leaf_values_by_unit(self.parameters), strict=True):
            entries.exchange_tensors(owned)

    def _leaf_values_by_unit(self, by_path: Mapping[str, Any]) -> list[list[Any]]:
        """Return for each unit the values of its leaves, from values by path. Tied leaves share a value."""
        return [[by_path[path] for path in entries.stored] for entries in self.calls.entries.values()]


@api_boundary
def _refuse_reentrant_checkpoint(path: str, grad: torch.Tensor) -> None:
    raise LayoutError(
        f"parameter {path!r} is used in a reentrant checkpoint of a part of its unit: its gradient would be lost. Call "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or checkpoint modules that are units."
    )


def install_gathering_subclass(
    module: nn.Module, session: ModuleSession, path: str, method_names: Sequence[str], mixins: tuple[type, ...]
) -> None:
    """Give a module a subclass whose calls, hooks, and methods ``method_names`` run with the module's units gathered."""
    entries = ("forward", *method_names)
    own = {name: module.__dict__.pop(name) for name in entries if name in module.__dict__}
    module.__dict__.update(_fsharp=(session, path), _fsharp_own=own, _fsharp_computes=False)
    module.__class__ = _gathering_subclass(type(module), ("__call__", *entries), mixins)  # type: ignore[arg-type]


def session_of_module(module: nn.Module) -> ModuleSession:
    """Return the session of a ShardedModule, or of a submodule that is gathered by itself."""
    return module.__dict__["_fsharp"][0]  # type: ignore[no-any-return]


@cache
def _gathering_subclass(base: type[nn.Module], method_names: tuple[str, ...], mixins: tuple[type, ...]) -> type[nn.Module]:
    about = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    entries = {name: _gathering_method(base, name) for name in method_names} | {"__reduce_ex__": refuse_copy}

    def extra_repr(self: Any) -> str:
        session, path = self.__dict__["_fsharp"]
        plans = dict.fromkeys(session.layout[name].strategy for name in session.calls.units_by_module_path[path].units)
        units = [f"unit(parameters {each.params}; optimizer {each.optim})" for each in plans]
        return ", ".join(filter(None, [base.extra_repr(self), *units]))

    return type(base.__name__, (*mixins, base), {**entries, "extra_repr": extra_repr, **about})


def _gathering_method(base: type[nn.Module], name: str) -> Any:
    function = getattr(base, name, None)  # None: the instance alone has the attribute

    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        # While the module computes, torch.compile traces this function, so a graph does not end here.
        own = self._fsharp_own.get(name)
        if self._fsharp_computes:
            return getattr(base, name)(self, *args, **kwargs) if own is None else own(*args, **kwargs)
        try:
            session, path = self.__dict__["_fsharp"]
            return session.call_module(self, path, own or partial(getattr(base, name), self), args, kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    skip_frame(entry)
    return entry if function is None else wraps(function)(entry)
