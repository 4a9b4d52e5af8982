"""CapturedStep: a whole training step as one CUDA graph."""

from typing import Any

import optree
import torch

from fsharp.errors import ScheduleError, problem
from fsharp.functional.formats.format import tensor_text
from fsharp.functional.layout.sharded import units_of
from fsharp.functional.layout.stages import has_stochastic_updates, has_stochastic_wire
from fsharp.functional.loss import Metrics
from fsharp.functional.state import TrainState
from fsharp.stateful.runtime.scheduler import ScheduledFunction
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked


@options_checked
class CapturedStep:
    """A scheduled training step (forward, backward, reductions, update): a torch.cuda.CUDAGraph, captured once and replayed.

    A graph needs fixed addresses. So the step has to update its state in place (``donate=True``), and the scheduler must leave
    no collective in flight between steps (``gather_at_start=False``). All ranks have to make the object together.

    Args:
        scheduled: the step: ``scheduler(train_step(loss_fn, tx, donate=True))``.
        state: the first state. The captured step takes over the memory of ``state``: do not use ``state`` afterwards.
        batch: a batch to train on. Later batches need equal structure, shapes, dtypes, and values other than tensors.
        warmup: number of training steps on ``batch`` before the capture, at least 2. The first of them records the schedule.

    Attributes:
        state: the state after the warmup and all replays. The next replay overwrites its tensors.

    Raises:
        ScheduleError: the device is not a CUDA device, or the policy has ``gather_at_start`` or ``offload``.
        ScheduleError: the optimizer state has a Python number, or a format rounds randomly: a graph would repeat both.
        ScheduleError: ``warmup`` is below 2, or the step does not update its state in place.
    """

    def __init__(self, scheduled: ScheduledFunction, state: TrainState, batch: Any, *, warmup: int = 3) -> None:
        scheduler, lanes = scheduled.scheduler, scheduled.scheduler.engine.steps.executor.lanes
        _check_capturable(scheduler.device, scheduler.policy, state, warmup)
        self._scheduled = scheduled
        self._batch = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, batch)
        aside = torch.cuda.Stream(scheduler.device)
        aside.wait_stream(torch.cuda.current_stream(scheduler.device))
        with torch.cuda.stream(aside):
            for _ in range(warmup):
                state, _ = scheduled(state, self._batch)
        torch.cuda.synchronize(scheduler.device)
        held, opt, before = optree.tree_leaves(state.params), optree.tree_leaves(state.opt), _tensor_addresses(state)
        self._graph = torch.cuda.CUDAGraph()
        lanes.release_all_events()  # a capture may not wait for events outside, nor work outside for events of a capture
        try:
            with torch.cuda.graph(self._graph):
                state, metrics = scheduled(state, self._batch)
                state = state._replace(opt=copy_into_held(state.opt, opt))
                if optree.tree_leaves(state.main):
                    state = state._replace(params=copy_into_held(state.params, held))
        finally:
            lanes.release_all_events()
        self._metrics: Metrics = metrics
        if before != _tensor_addresses(state):
            raise ScheduleError(
                "CapturedStep(): the step makes a new state instead of updating it in place: pass train_step(..., donate=True)."
            )
        self.state, self._arena = state._replace(step=state.step - 1), scheduler.engine.steps.arena.memory  # both as captured

    @api_boundary
    def __call__(self, batch: Any) -> Metrics:
        """Run one step on ``batch``, and return its metrics. The next call overwrites the returned tensors.

        For tensors of ``batch`` in host memory the host waits until the last step is over. Tensors on the device need no wait.

        Raises:
            ScheduleError: the scheduler is closed; or the batch differs from the captured one, and the scheduler is closed now.
            AgreementError: another rank has failed.
        """
        self._scheduled.scheduler.engine.steps.check_scheduler_open()
        try:
            pairs = pairs_to_copy(self._batch, batch)
        except ScheduleError as error:
            self._scheduled.scheduler.engine.steps.close_scheduler_after_error(error)  # other ranks may have replayed the step
            raise
        for held, new in pairs:
            held.copy_(new, non_blocking=new.device.type != "cpu")  # the caller may refill pinned memory
        self._graph.replay()
        self.state = self.state._replace(step=self.state.step + 1)
        return self._metrics


def pairs_to_copy(captured: Any, batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of a captured tensor and its new value. Raise a ScheduleError if ``batch`` differs in anything else."""
    paths, leaves, spec = optree.tree_flatten_with_path(captured)
    new, new_spec = optree.tree_flatten(batch)
    if spec != new_spec:
        raise ScheduleError(f"CapturedStep: the batch has the structure {new_spec}, captured with {spec}.")
    for path, held, given in zip(paths, leaves, new, strict=True):
        texts = [tensor_text(x) if isinstance(x, torch.Tensor) else repr(x) for x in (given, held)]
        if not (held is given or (isinstance(given, torch.Tensor | bool | int | float | str) and texts[0] == texts[1])):
            what = f"leaf {'.'.join(map(str, path))!r} of the batch is {texts[0]:.200}, captured as {texts[1]:.200}."
            raise ScheduleError(problem("CapturedStep", what, remedy="A graph repeats it: pass what changes as a tensor."))
    return [pair for pair in zip(leaves, new, strict=True) if isinstance(pair[0], torch.Tensor)]


def copy_into_held(made: Any, held: list[Any]) -> Any:
    """Copy the tensors of ``made`` into the tensors ``held``, unless they are there already. Return a tree of ``held``."""
    leaves, spec = optree.tree_flatten(made)
    pairs = [(x, y) for x, y in zip(held, leaves, strict=True) if torch.is_tensor(x) and x.data_ptr() != y.data_ptr()]
    at = {x.data_ptr() for x, _ in pairs}  # a new tensor there would be overwritten before it is copied
    with torch.no_grad():
        for x, new in [(x, y.clone() if y.data_ptr() in at else y) for x, y in pairs]:
            x.detach().copy_(new)
    return optree.tree_unflatten(spec, held)


def _tensor_addresses(state: TrainState) -> list[int]:
    tree: Any = state.params, state.main, state.residuals
    return [x.data_ptr() for x in optree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _check_capturable(device: torch.device, policy: SchedulePolicy, state: TrainState, warmup: int) -> None:
    if device.type != "cuda":
        raise ScheduleError(f"CapturedStep(): the scheduler is on {device}; CUDA graphs need a CUDA device.")
    if policy.offload:
        raise ScheduleError("CapturedStep(): a graph needs optimizer state at fixed device addresses: leave out offload=True.")
    if policy.gather_at_start:
        raise ScheduleError("CapturedStep(): the policy leaves gathers under way between steps: pass gather_at_start=False.")
    units = [node.unit for node in units_of(state.params)]
    if seeded := [unit.display_name for unit in units if has_stochastic_wire(unit) or has_stochastic_updates(unit)]:
        raise ScheduleError(
            f"CapturedStep(): unit {seeded[0]} has a format that rounds stochastically, and a graph would draw the same random "
            "numbers in each step. Use the format without stochastic rounding."
        )
    if warmup < 2:
        raise ScheduleError(
            f"CapturedStep(): warmup is {warmup}, expected at least 2: one step to record, one to follow the schedule."
        )
    if counts := [x for x in optree.tree_leaves(state.opt) if isinstance(x, int | float)]:
        raise ScheduleError(
            f"CapturedStep(): the optimizer state has the Python number {counts[0]}: use adamw(..., capturable=True)."
        )
