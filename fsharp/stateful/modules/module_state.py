"""ModuleTrainState: the state that a module trains, and a record of the user's writes to it."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from fsharp.errors import ScheduleError, TreeError
from fsharp.functional.comm.protocol import Comm, LabelPrefixComm
from fsharp.functional.comm.residuals import prepare_residuals, zero_residuals
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.functional.encoding import encode_params_at_rest
from fsharp.functional.layout.sharded import Sharded, merge, trainable, units_of
from fsharp.functional.moves import gather, host_buffers_to_device
from fsharp.functional.state import TrainState, update


class ModuleTrainState:
    """The parameters and states that a module trains, between two steps.

    Attributes:
        train_state: parameters, main copies, the state of an ``(init, update)`` pair; replaced by each step.
        num_replacements: number of times that the user has replaced the state.
        is_written: whether the user has written to parameters since the last :meth:`report_parameter_writes`.
        opt_user: ``id`` of the one optimizer that may use ``train_state.opt``; None before the first use.
        loaded: which of "parameters" and "optimizer" were loaded since the last step.
        unfilled: units whose parameters at rest a gather may not have filled yet.
    """

    def __init__(self, state: TrainState, comm: Comm) -> None:
        self.train_state, self._comm, self.num_replacements = state, comm, 0
        self.opt_user: int | None = None
        self._first_step = state.step  # the step with which a process begins that runs this program from the beginning
        self.reset_after_rank_restart()

    def reset_after_rank_restart(self) -> None:
        """Ignore earlier writes and loads, as all ranks now load the whole state: a new generation of the job begins.

        The earlier writes may be those of an update that an error has ended on this rank alone.
        """
        self.is_written, self.loaded = False, set[str]()
        self.train_state = self.train_state._replace(step=self._first_step)  # a load of state dicts does not set the step
        self.record_version_counters()

    def record_version_counters(self) -> None:
        """Record the version counters of all buffers of parameters, to notice later writes, and which units are unfilled."""
        trees = ("params", self.train_state.params), ("main", self.train_state.main)
        nodes = [(kind, node) for kind, tree in trees for node in units_of(tree)]
        self._buffers = [(kind, n.name, g, b) for kind, n in nodes for g, b in zip(n.groups, n.raw_buffers, strict=True)]
        self._recorded = self._version_counters()
        self.unfilled = [node for kind, node in nodes if kind == "params" and node.lazy is not None]

    def copy_into_buffers(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Copy ``values`` into ``targets``, buffers of this state. :meth:`notice_main_writes` does not notice these writes."""
        with torch.no_grad():
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)
        self.record_version_counters()

    def main_parameters(self) -> Any:
        """Return the trained parameters, sharded for the optimizer: main copies, and parameters that have no main copy."""
        with torch.no_grad():
            return merge(gather(trainable(self.train_state.params), comm=self._comm, to="optim"), self.train_state.main)

    def gather_main_into_resting_parameters(self) -> None:
        """Set parameters at rest to the values of main parameters, a unit at a time. A collective."""
        comm = LabelPrefixComm(self._comm, "parameters that were written in place: ")
        with torch.no_grad():
            for held, kept in zip(units_of(self.main_parameters()), units_of(trainable(self.train_state.params)), strict=True):
                new = gather(encode_params_at_rest(held, comm), comm=comm, to="params")
                for buffer, value in zip(kept.buffers, new.buffers, strict=True):
                    if buffer is not value:
                        buffer.copy_(value)
        self.record_version_counters()

    def set_opt_state(self, opt: Any, made_by: Any, user: object) -> None:
        """Set ``opt``, the first or a loaded state of the optimizer ``user``, in place of any other optimizer's state."""
        self.train_state, self.opt_user = self.train_state._replace(opt=opt, made_by=made_by), self.opt_user and id(user)

    def use_opt(self, where: str, user: object) -> Any:
        """Record ``user`` as the optimizer of ``train_state.opt``, and return ``opt``. ScheduleError if it has another one."""
        if self.opt_user not in (None, id(user)):
            raise ScheduleError(
                f"{where}: another optimizer of this module uses the state of an (init, update) pair, of which a module keeps "
                "one. Use one optimizer of a pair, or several of classes of torch.optim, which keep a state each."
            )
        self.opt_user = id(user)
        return self.train_state.opt

    def update(self, tx: Any, grads: Any) -> None:
        """Update parameters and states in their memory by ``tx``, an ``(init, update)`` pair. ``grads``: mean gradients."""
        self.train_state = update(tx, grads, self.train_state, comm=self._comm, donate=True)
        self.record_version_counters()

    def renew_residuals(self) -> None:
        """Replace the residuals by new zeros, after a load. A loaded tree may hold the old tensors, which do not change."""
        if self.train_state.residuals is not None:
            units = [node.unit for node in units_of(self.train_state.params)]
            self.train_state = self.train_state._replace(residuals=zero_residuals(units, self._comm.device))

    def report_parameter_writes(self, add_settings: Callable[[str], None]) -> None:
        """If the user has written to parameters since the last report, pass ``add_settings`` a text that says so."""
        if self.is_written:
            add_settings("parameters written in place=True")
            self.is_written = False

    def replace_state(self, state: TrainState) -> None:
        """Make ``state`` the module's own. TreeError if its layout, places or dtypes differ, or residuals are missing."""
        state = state._replace(main=host_buffers_to_device(state.main, self._comm.device))
        pairs = ("params", state.params, self.train_state.params), ("main", state.main, self.train_state.main)
        for kind, tree, mine in pairs:
            for new, old in zip_longest(units_of(tree), units_of(mine)):
                if _layout_key(new) != _layout_key(old):
                    names = [repr(node.name) if node is not None else "none" for node in (new, old)]
                    raise TreeError(
                        f"train_state: {kind} are not those of this module. Got unit {names[0]}, expected {names[1]} with the "
                        "layout, place and dtypes of model.train_state: begin with model.train_state, and change its values."
                    )
        if state.residuals is None and self.train_state.residuals is not None:
            raise TreeError(
                "train_state: gradients of this module travel with feedback, Precision(feedback=True), and the state has no "
                "residuals. Assign state._replace(residuals=model.train_state.residuals), which keeps the module's residuals."
            )
        units = [node.unit for node in units_of(state.params)]
        prepare_residuals("train_state", state.residuals, units, donate=True, step=state.step, rank=self._comm.rank)
        has_own = self.train_state.opt is not None  # else a torch.optim class keeps the optimizer's state
        self.train_state = state if has_own else state._replace(opt=None)
        if restart_replay.is_recording:
            self._first_step = state.step
        self.num_replacements += 1
        self.record_version_counters()

    def propagate_main_writes(self) -> bool:
        """Copy writes to main parameters into parameters at rest, by a collective. Return whether there were writes."""
        if is_written := self.notice_main_writes():
            self.gather_main_into_resting_parameters()
        return is_written

    def notice_main_writes(self) -> bool:
        """Record a write to main parameters since the last :meth:`record_version_counters`. Return whether there was one.

        Raise a ScheduleError if the user wrote to parameters at rest that are copies of main parameters.
        """
        if (now := self._version_counters()) == self._recorded:
            return False
        mains = {(unit, group) for kind, unit, group, _ in self._buffers if kind == "main"}
        for (kind, unit, group, _), before, (address, version) in zip(self._buffers, self._recorded, now, strict=True):
            is_copy = kind == "params" and (unit, group) in mains
            if address != before[0] or (is_copy and version != before[1]):
                raise ScheduleError(
                    f"the parameters with which unit {unit!r} computes were changed in place since the last step. They are a "
                    "copy of the optimizer's parameters in another dtype. Write to the module's parameters, or in "
                    "`with model.unsharded(write=True):`."
                )
        self.record_write()
        return True

    def record_write(self) -> None:
        """Record that the user has written to parameters."""
        self.is_written = True
        self.record_version_counters()

    def _version_counters(self) -> list[tuple[int, int]]:
        return [(buffer.data_ptr(), buffer._version) for *_, buffer in self._buffers]


def _layout_key(node: Sharded | None) -> Any:
    return node and (node.unit, node.place, node.groups, [(b.dtype, b.device, b.shape) for b in node.raw_buffers])
