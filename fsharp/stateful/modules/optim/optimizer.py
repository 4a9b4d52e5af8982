"""ShardedOptimizer: an optimizer of torch.optim for the parts of a sharded module."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import optree
import torch

from fsharp.errors import OptionError, ScheduleError, TreeError
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.equal_values import check_same_on_ranks
from fsharp.functional.layout.sharded import units_of
from fsharp.functional.optim.base import as_transform
from fsharp.functional.optim.ema import WithEmaState
from fsharp.functional.optim.wrappers import with_unchanged_paths
from fsharp.functional.state import MadeBy
from fsharp.stateful.modules.optim.class_updates import ClassUpdates
from fsharp.stateful.modules.optim.states import (
    GroupWithoutOptions,
    StateByParameter,
    check_param_groups,
    checked_transform_state,
    group_texts_to_compare,
    option_access_error,
    options_text_to_compare,
    states_from_state_dict,
)
from fsharp.stateful.modules.parameter import ShardedParameter, ShardedTensor
from fsharp.stateful.modules.session import ModuleSession
from fsharp.stateful.modules.state_dict import SAME_VALUES_REMEDY, check_no_dtensor_shards, make_parts_whole_, scatter_from_rank
from fsharp.stateful.modules.torch_tools.refusals import refuse_copy
from fsharp.torch_compile import disable_compile
from fsharp.tracebacks import api_boundary, api_context
from fsharp.type_checks import options_checked


@options_checked
class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of a ShardedModule's parameters, with state that is sharded by the module's strategy.

    Learning rate schedulers and trainers can use it as a ``torch.optim.Optimizer``: ``param_groups`` hold the module's
    parameters, and options set there take effect. With an ``(init, update)`` pair, options there raise a TreeError.

    An optimizer class is tried on small random tensors first, to find out which inputs an update depends on:

    - A class that updates each element by itself, such as AdamW, gets flat buffers, which may be cut anywhere.
    - A class that uses a parameter's shape or norm, such as Adafactor, Muon or LAMB, gets whole parameters in their shapes.
      Each parameter has to be whole on the ranks that hold it: by a strategy that replicates optimizer state (``ddp``), or by
      the atom :class:`~fsharp.layouts.LeafAtom`.
    - A class that uses all parameters together needs all of them on every rank.
    - If ranks hold all parameters of a group whole, a class that is not torch's own gets whole parameters in any case.

    The trial makes 8 steps on each of 8 small sets of tensors, and repeats one set. Other sizes and later steps are not tried.
    ``check_steps=1`` adds a trial of one step at the sizes of the parameters.

    Args:
        params: ``model.parameters()``, or groups of parameters with their own options, as in torch.optim.
        optimizer: an optimizer class of torch.optim or like it; or an ``(init, update)`` pair such as
            :func:`~fsharp.optim.adamw` returns.
        check_steps: number of steps of a second trial of a class, on random tensors with the parameters' shapes. A pair is
            checked by :func:`~fsharp.optim.with_elementwise_check`.
        defaults: options of the class; a pair has its own.

    Raises:
        TreeError: the parameters are not of one ShardedModule; or a pair gets options, groups, or only some parameters.
        TreeError: parameters are cut, and the class is not elementwise, or cannot be tried.
        TreeError: the class keeps values that its updates need in attributes, which would not be saved.
        ScheduleError: the optimizer is a class, and the module's policy has ``offload=True``.
        OptionError: ``check_steps`` was passed with a pair.

    Cost: for a class, the trial: about 72 steps, each on at most 71 elements, for each group of parameters (20 ms).
    """

    __reduce_ex__ = refuse_copy

    def __init__(
        self, params: Any, optimizer: type[torch.optim.Optimizer] | Any, *, check_steps: int = 0, **defaults: Any
    ) -> None:
        self._is_made = False
        is_iterable = isinstance(params, Iterable) and not isinstance(params, torch.nn.Module | torch.Tensor)
        if not is_iterable or not (given := list(params)):
            raise TreeError("ShardedOptimizer(): got a module, a tensor or no parameters. Pass model.parameters().")
        super().__init__([dict(each) if isinstance(each, Mapping) else each for each in given], {})
        self._session = _session_of_parameters([p for group in self.param_groups for p in group["params"]])
        self._updates: ClassUpdates | None = None  # for an optimizer class; else there is `_tx`
        self._tx: Any = None
        if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
            self._updates = ClassUpdates(self._session, optimizer, self.param_groups, defaults, check_steps)
            self.defaults = self._updates.inner.defaults
        else:
            if check_steps:
                hint = f"To compare updates of a pair pass fs.optim.with_elementwise_check(pair, steps={check_steps})."
                raise OptionError(f"ShardedOptimizer(): check_steps is {check_steps}, for a class of torch.optim alone. {hint}")
            self._tx = as_transform(optimizer)
            if defaults or len(self.param_groups) > 1:
                raise TreeError(
                    "ShardedOptimizer(): an (init, update) pair takes neither options nor groups here. Give options "
                    "to the pair, and labels=... to shard_module()."
                )
            everything = {path for path, each in self._session.parameters.items() if each.is_trained}
            if {p.path for p in self.param_groups[0]["params"] if p.is_trained} != everything:
                raise TreeError(
                    "ShardedOptimizer(): an (init, update) pair needs all trained parameters of the module. Freeze some before "
                    "shard_module(), or use labels and fs.optim.partition()."
                )
            self.param_groups = [GroupWithoutOptions(group) for group in self.param_groups]
            state = self._tx.init(self._session.state.main_parameters(), comm=self._session.reopened_scheduler())
            self._session.state.set_opt_state(state, MadeBy(self._tx.name), self)  # `made_by` as in later states
        self._parameter_ids = [list(map(id, group["params"])) for group in self.param_groups]
        self._is_made = True

    @disable_compile
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their gradients, and release the gradients: ``p.grad`` is None afterwards.

        Call :meth:`zero_grad` between two steps. If no backward has come since :meth:`zero_grad`, nothing changes. ``closure``
        computes the loss and its backward; it is called once, and its result is returned.

        Raises:
            LossError: all backward passes were inside of ``accumulate()``, or an error discarded the gradients.
            ScheduleError: an earlier step has used the gradients, and :meth:`zero_grad` was not called since.
            ScheduleError: another optimizer has used the gradients.
            ScheduleError: parameters were changed in a way that the module does not allow.
            TreeError: ``param_groups`` has other groups or parameters than before, or options were set for a pair.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if [list(map(id, group["params"])) for group in self.param_groups] != self._parameter_ids:
            raise TreeError("step(): param_groups cannot change: pass all groups to ShardedOptimizer(), with all parameters.")
        if self._updates is not None:
            tx = self._updates.make_in_place_transform(self.param_groups)
        else:
            self._session.state.use_opt("step()", self)
            if unread := sorted(self.param_groups[0].keys() - {"params", "param_names"}):
                raise option_access_error(unread[0])
            paused = self._session.paused & self._session.step.means.missing
            tx = with_unchanged_paths(self._tx, paused) if paused else self._tx
        if self._session.step.updated_by not in (None, id(self)):
            raise ScheduleError(
                "step(): another optimizer of this module has made the step, and has used up the gradients. Put all parameters "
                "into one ShardedOptimizer, in groups."
            )
        hosted = {  # without tensors on a device, for which the host would wait
            f"group {i}: {key}": group[key]
            for i, group in enumerate(self.param_groups)
            for key in sorted(group.keys() - {"params", "param_names"})
            if all(t.device.type == "cpu" for t in optree.tree_leaves(group[key]) if isinstance(t, torch.Tensor))
        }
        self._session.step.update(tx, options_text_to_compare(hosted), optimizer_id=id(self))
        return loss

    @api_boundary
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the constructor runs. Later calls raise a TreeError: pass all groups to ``ShardedOptimizer()``."""
        if self._is_made:
            raise TreeError("add_param_group(): groups cannot be added later: pass all groups to ShardedOptimizer().")
        super().add_param_group(param_group)

    @disable_compile
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Release all gradients. A forward whose backward is to come stays valid.

        Raises a ScheduleError during a backward, and for ``set_to_none=False``.
        """
        self._session.step.release_gradients(set_to_none=set_to_none)

    @api_context
    def averaged(self) -> Iterator[None]:
        """Replace the model's parameters by their moving averages in this context, to evaluate or export the model.

        ::

            optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.with_ema(fs.optim.adamw(3e-4), decay=0.999))
            with optimizer.averaged(), torch.no_grad():
                loss = model(**batch).loss

        All ranks have to enter the context. Forwards in the context use the averages that :func:`~fsharp.optim.with_ema` keeps;
        so do ``named_full_parameters()``, ``unsharded()`` and ``functional()``. Parameters without an average keep their
        values. At the end all parameters have their own values again, to the bit.

        Raises:
            TreeError: the optimizer keeps no averages, or several averages of one parameter.
            ScheduleError: gradients wait for ``step()`` or ``zero_grad()``, or the call is inside of another ``averaged()``.
            ScheduleError: in the context a forward is not under ``torch.no_grad()``, or ``unsharded(write=True)`` is called.

        Cost: a copy of this rank's parts, and one gather of parameters.
        """
        session, state = self._session, self._session.state
        averages = _average_buffers(None if self._updates is not None else state.use_opt("averaged()", self))
        if session.is_averaged:
            raise ScheduleError("averaged(): the call is inside of another averaged().")
        session.step.abandon_forwards("averaged()")
        state.propagate_main_writes()
        with session.showing_averages(averages):
            yield

    @property  # type: ignore[override]
    @api_boundary
    def state(self) -> Mapping[ShardedTensor, Mapping[str, Any]]:
        """A read-only mapping from a parameter to the optimizer's state for it: ``optimizer.state[p]["exp_avg"]``.

        State with a value for each element is a :class:`~fsharp.modules.ShardedTensor` that shares the optimizer's memory: a
        write to the tensor changes the state. All other state, such as ``"step"``, is the optimizer's own object, and may be
        missing on a rank without elements of the parameter. A parameter that has had no gradient has an empty mapping. After a
        step read ``state`` again: its tensors may be new. For an ``(init, update)`` pair ``state`` raises a TreeError.
        """
        updates = self._require_class_updates("optimizer.state")
        return StateByParameter(updates.state_of, updates.paths_with_state, self._session.parameters)

    @state.setter
    @api_boundary
    def state(self, value: Any) -> None:
        if self._is_made:  # torch's constructor sets an empty dict
            raise TreeError("optimizer.state cannot be replaced: load_state_dict() loads the result of state_dict().")

    @api_boundary
    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": {name: {...}}, "param_groups": [...]}`` by names of parameters. All ranks call this method.

        State with a value for each element is a :class:`~fsharp.modules.ShardedTensor` in the optimizer's memory: the next step
        overwrites the tensor, unless you copy the dict by ``copy.deepcopy``. All other state, such as ``"step"``, is a copy. A
        parameter without a gradient so far has no state. For an ``(init, update)`` pair ``"state"`` is its own tree of Sharded.

        Raises:
            TreeError: a parameter was a sharded DTensor before shard_module(); a state is not a tensor, number, string or None.

        Cost: for an optimizer class, for each axis two collectives of a few bytes for each parameter. State without a value for
        each element, such as row statistics, is copied to all ranks.
        """
        check_no_dtensor_shards("state_dict()", self._session)
        if self._updates is not None:
            states: Any = self._updates.complete_states()
        else:
            states = self._session.state.train_state.opt
            for node in units_of(states):
                node.rank = self._session.scheduler.rank
        return {"state": states, "param_groups": self._groups_with_paths()}

    @api_boundary
    def state_template(self, is_saved: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
        """Return a state dict with fresh state for trained parameters, into which a checkpoint can be loaded.

        Call this method before the first step, when :meth:`state_dict` is still empty. The optimizer does not change: its class
        makes a step with zero gradients on copies of parameters. ``"step"`` is 0. Parameters get a state if ``is_saved(path)``
        is True for their path, such as ``"state.layers.0.weight"``. A class may add options to a group in its first step.
        The result has such an option if ``is_saved`` is True for its path, such as ``"param_groups.0.step"``. For an
        ``(init, update)`` pair the result is :meth:`state_dict`.

        Cost: no collective. Memory: the state, and four times one parameter.
        """
        check_no_dtensor_shards("state_template()", self._session)
        if self._updates is None:
            return self.state_dict()
        chosen = [path for path in self._updates.trained_parameters_by_path() if is_saved(f"state.{path}")]
        states = {path: self._updates.fresh_state(path, self.param_groups) for path in chosen}
        groups = self._groups_with_paths()
        for i, (group, own) in enumerate(zip(groups, self.param_groups, strict=True)):
            added = self._updates.options_added_by_first_step(own)
            group.update({name: value for name, value in added.items() if is_saved(f"param_groups.{i}.{name}")})
        return {"state": states, "param_groups": groups}

    @api_boundary
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict from :meth:`state_dict`. All ranks have to call this method.

        Values are copied. A whole tensor may stand in place of a ShardedTensor: each rank takes its part. A parameter without
        an entry in ``state_dict["state"]`` has no state afterwards. Options, such as learning rates, come from the dict. If a
        rank finds an error, all ranks raise, and nothing has changed.

        Raises:
            TreeError: the dict has other groups of parameters, class, layout, shapes or dtypes than the optimizer.
            AgreementError: ranks pass different options, or different values for elements that they share.

        Cost: the memory of the state, and a pass over elements that several ranks hold. A class of torch.optim also makes one
        step on copies of parameters, to learn which state the dict has to contain.
        """
        where, comm = "load_state_dict()", self._session.reopened_scheduler()

        def check() -> tuple[Any, Any]:
            check_no_dtensor_shards(where, self._session)
            trained = None if self._tx is not None else {p.path for g in self.param_groups for p in g["params"] if p.is_trained}
            check_param_groups(state_dict, self._groups_with_paths(), options=self.defaults, trained=trained)
            if self._updates is None:
                return checked_transform_state(state_dict["state"], self._session.state.use_opt(where, self), comm.rank)
            fresh = partial(self._updates.fresh_state, groups=state_dict["param_groups"])
            return states_from_state_dict(state_dict["state"], self._updates.trained_parameters_by_path(), fresh)

        states, compared = check_on_all_ranks(where, comm, check, lambda _: group_texts_to_compare(state_dict["param_groups"]))
        values, varying = ({name: each[i] for name, each in compared.items()} for i in (0, 1))
        check_same_on_ranks(where, values, comm, remedy=SAME_VALUES_REMEDY, varying=varying)
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: copy.deepcopy(value) for name, value in loaded.items() if name != "params"})
        if self._updates is None:
            self._session.state.set_opt_state(states, self._session.state.train_state.made_by, self)
        else:
            self._updates.replace_states(states)
        self._session.reset_history_if_both_loaded("optimizer")

    @api_boundary
    def full_state_dict(self, *, rank: int | None = 0) -> dict[str, Any]:
        """Return :meth:`state_dict` with whole tensors in host memory on rank ``rank``, and an empty dict on other ranks.

        All ranks have to call this method. With ``rank=None`` all ranks get the dict. Errors are those of :meth:`state_dict`
        and ``model.full_state_dict()``. For an ``(init, update)`` pair this method raises a TreeError.

        Cost: a gather of all state. Memory: one full unit of one kind of state.
        """
        where, comm = "full_state_dict()", self._session.comm_outside_steps()
        self._require_class_updates(where)
        found = self.state_dict()
        return found if make_parts_whole_(where, found["state"].values(), rank, comm, kind_of=lambda key: key) else {}

    @api_boundary
    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None, *, rank: int = 0) -> None:
        """Load the result of :meth:`full_state_dict` on ``rank`` into the optimizers of all ranks. Other ranks pass None.

        Errors: as of :meth:`load_state_dict` and ``model.load_full_state_dict()``; an ``(init, update)`` pair is a TreeError.

        Cost: two ``all_reduce`` of each tensor's bytes along each axis. Memory: this rank's state twice, and one whole tensor.
        """
        where = "load_full_state_dict()"
        updates = self._require_class_updates(where)
        # Every rank keeps a tensor without dims whole.
        like = {("state", path): part for path, part in updates.trained_parameters_by_path().items() if part.full_shape}
        self.load_state_dict(scatter_from_rank(where, state_dict, rank, self._session.reopened_scheduler(), like))

    def _groups_with_paths(self) -> list[dict[str, Any]]:
        options = [{key: x for key, x in group.items() if key != "param_names"} for group in self.param_groups]
        return [{**each, "params": [p.path for p in each["params"]]} for each in options]

    def _require_class_updates(self, where: str) -> ClassUpdates:
        """Return the updates by an optimizer class. For an ``(init, update)`` pair raise a TreeError that names ``where``."""
        if self._updates is None:
            raise TreeError(
                f"{where}: the state of an (init, update) pair is a tree, model.train_state.opt, without names of parameters. "
                "Save by fs.checkpoint.save() and load by fs.checkpoint.load(), on any mesh; or take the whole tree on all "
                "ranks, fs.full_tree(optimizer.state_dict()['state'], comm=model.comm)."
            )
        return self._updates


def session_of_optimizer(optimizer: ShardedOptimizer) -> ModuleSession:
    """Return the :class:`ModuleSession` of the module whose parameters the optimizer updates."""
    return optimizer._session


def _average_buffers(opt_state: Any) -> dict[tuple[str, int], torch.Tensor]:
    is_average = lambda x: isinstance(x, WithEmaState)  # noqa: E731
    states = [x for x in optree.tree_leaves(opt_state, is_leaf=is_average) if is_average(x)]
    if not states:
        raise TreeError(
            "averaged(): the optimizer keeps no average. Make it of fs.optim.with_ema(fs.optim.adamw(...), decay=...). With a "
            "class of torch.optim, average `params` of `fn, params = model.functional()`, and call fn with the averages."
        )
    found = dict[tuple[str, int], torch.Tensor]()
    for state in states:
        for node in units_of(state.ema):
            for group, buffer in zip(node.groups, node.buffers, strict=True):
                if (node.name, group) in found:
                    path = node.unit.path_in_tree(node.unit.leaves_of_group(group)[0])
                    raise TreeError(f"averaged(): the optimizer keeps several averages of {path!r}, expected one.")
                found[node.name, group] = buffer
    return found


def _session_of_parameters(params: list[Any]) -> ModuleSession:
    for i, parameter in enumerate(params):
        if not isinstance(parameter, ShardedParameter):
            raise TreeError(
                f"ShardedOptimizer(): parameter {i} is a {type(parameter).__name__} of shape "
                f"{list(getattr(parameter, 'shape', ()))}, expected a parameter of a ShardedModule. Pass model.parameters() "
                "after shard_module(model, ...)."
            )
    first, *others = {parameter.owner() for parameter in params}
    if first is None and not others:
        raise TreeError("ShardedOptimizer(): the ShardedModule of these parameters was deleted. Keep a reference to it.")
    if others or not isinstance(first, ModuleSession):
        raise TreeError("ShardedOptimizer(): got parameters of several modules. Make one optimizer for each module.")
    return first
