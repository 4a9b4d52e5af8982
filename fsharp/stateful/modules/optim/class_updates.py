"""ClassUpdates: updates of a module's parameters by an optimizer class, which works on slices of this rank's flat buffers.

An elementwise optimizer works on *runs*: ranges of a flat buffer whose leaves are in one parameter group, often a whole buffer.
As in torch, leaves without a gradient are not updated. If only some leaves of a run have a gradient, the run is cut for good,
as states differ from then on. Any other optimizer gets whole leaves in their shapes.
"""

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from fsharp.errors import ScheduleError, TreeError
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.equal_values import exact_text
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.sharded import Sharded, units_by_name, units_of
from fsharp.functional.optim.base import Transform
from fsharp.stateful.modules.optim.probe import UpdateScope, make_first_step, probe_update_scope
from fsharp.stateful.modules.optim.states import (
    StatesByPath,
    fill_in_missing_states,
    group_texts_to_compare,
    options_text_to_compare,
)
from fsharp.stateful.modules.parameter import ShardedTensor
from fsharp.stateful.modules.session import ModuleSession

OptimizerClass = type[torch.optim.Optimizer]
ParamGroups = Sequence[dict[str, Any]]
"""Parameter groups of a ShardedOptimizer: dicts of options, with the module's parameters as ``"params"``."""


class FlatSlice(NamedTuple):
    """A range of this rank's flat buffer, from ``start`` to ``stop``, that a torch optimizer updates as one parameter.

    ``leaves``: a row ``(path, first, end)`` for each leaf in the range; ``first`` and ``end`` are counted from ``start``.
    ``shape``: the shape of the only leaf, for an optimizer that updates whole leaves; else None.
    """

    unit: str
    group: int
    start: int
    stop: int
    leaves: tuple[tuple[str, int, int], ...]
    shape: tuple[int, ...] | None = None

    def view_in(self, nodes: Mapping[str, Sharded]) -> torch.Tensor:
        """Return the slice as a view of its buffer in ``nodes``, a mapping from unit names to nodes."""
        node = nodes[self.unit]
        buffer: torch.Tensor = node.buffers[node.groups.index(self.group)]
        found = buffer.detach()[self.start : self.stop]
        return found if self.shape is None else found.view(self.shape)


def cut_by_labels(tree: Any, labels: Mapping[str, Hashable], *, rank: int, by_leaf: bool) -> Iterator[FlatSlice]:
    """Cut the flat buffers of ``rank`` into slices, one for each run of neighbouring leaves with equal labels. Yield them.

    ``labels``: dict from a leaf's path to its label; a leaf without a label is in no slice. With ``by_leaf`` each leaf gets a
    slice of its own, in the leaf's shape. Then no leaf may be cut between ranks.
    """
    for node in units_of(tree):
        for group in node.groups:
            spans = [(node.unit.path_in_tree(s.leaf), s) for s in node.unit.leaf_spans(group, node.place, rank)]
            for (label, _), each in groupby(spans, lambda row: (labels.get(row[0]), row[0] if by_leaf else "")):
                run = list(each)
                start, stop = run[0][1].start, run[-1][1].stop
                leaves = tuple((path, s.start - start, s.stop - start) for path, s in run)
                if label is not None:
                    yield FlatSlice(node.name, group, start, stop, leaves, run[0][1].leaf.shape if by_leaf else None)


def state_of_leaf(state: Mapping[str, Any], run: torch.Tensor, first: int, last: int, like: ShardedTensor) -> dict[str, Any]:
    """Return the state of this rank's part of a leaf, ``run.flatten()[first:last]``, from ``state``, the state of ``run``.

    State with a value for each element becomes a ShardedTensor, cut like the leaf's parameter ``like``, in the same memory.
    """

    def cut(value: Any) -> Any:
        is_elementwise = isinstance(value, torch.Tensor) and value.shape == run.shape
        return ShardedTensor.from_local(value.detach().reshape(-1)[first:last], like) if is_elementwise else value

    return {key: cut(value) for key, value in state.items()}


def join_state(flat_slice: FlatSlice, states: Mapping[str, Mapping[str, Any]], like: torch.Tensor) -> dict[str, Any]:
    """Return the optimizer state of a slice, in new memory, from ``states`` by leaf path. ``like``: the slice's parameter."""
    parts = [states.get(path, {}) for path, _, _ in flat_slice.leaves]
    joined: dict[str, Any] = {}
    for key, value in parts[0].items():
        if not isinstance(value, ShardedTensor):
            joined[key] = copy.deepcopy(value)
            continue
        joined[key] = torch.zeros(like.shape, dtype=value.dtype, device=like.device)
        for part, (_, first, last) in zip(parts, flat_slice.leaves, strict=True):
            joined[key].view(-1)[first:last] = part[key].local.view(-1)
    return joined


def state_join_key(state: Mapping[str, Any]) -> Hashable:
    """Return a key of a leaf's state. The states of leaves with equal keys can become one state of a :class:`FlatSlice`."""
    rows = sorted(state.items())
    return tuple((key, dtype_name(x.dtype) if isinstance(x, ShardedTensor) else exact_text(x)) for key, x in rows)


class ClassUpdates:
    """The updates of the parameters of ``session`` by the class ``optimizer``, and the state that the class keeps.

    All ranks construct the object. Raises AgreementError if class, groups or options differ, and what ShardedOptimizer raises.

    Args:
        groups: the parameter groups. Options that the class adds are added to these dicts.
        defaults: options of the class.
        check_steps: steps of a trial at the parameters' shapes, after the trial at small shapes; 0 for no such trial.

    Attributes:
        inner: the instance of the class; its parameters are slices of flat buffers.
        paths_with_state: paths of parameters that have had a gradient or loaded state, the same on all ranks.
    """

    def __init__(
        self, session: ModuleSession, optimizer: OptimizerClass, groups: ParamGroups, defaults: dict[str, Any], check_steps: int
    ) -> None:
        if session.scheduler.policy.offload:
            raise ScheduleError(
                f"ShardedOptimizer(): {optimizer.__name__} keeps its state on the device; SchedulePolicy(offload=True) is for "
                "(init, update) pairs alone. Pass a pair such as fs.optim.adamw(...), or leave out offload=True."
            )
        self._session, self._defaults = session, defaults
        self.paths_with_state = set[str]()
        self._labels: Sequence[Mapping[str, Hashable]] = [{p.path: 0 for p in g["params"] if p.is_trained} for g in groups]
        fields = {"class": optimizer.__qualname__, "defaults": options_text_to_compare(defaults)}
        fields |= group_texts_to_compare([{**group, "params": sorted(p.path for p in group["params"])} for group in groups])
        check = partial(self._probe_update_scopes, optimizer, groups, check_steps)
        self._scopes = check_on_all_ranks("ShardedOptimizer()", session.reopened_scheduler(), check, lambda _: fields)
        rows = zip(groups, self._cut_groups_into_slices(), strict=True)
        self.inner = optimizer([{**group, "params": parameters} for group, parameters in rows], **defaults)
        self._copy_options(self.inner.param_groups, groups)

    @staticmethod
    def _copy_options(source: ParamGroups, target: ParamGroups) -> None:
        for theirs, mine in zip(source, target, strict=True):
            mine.update({name: value for name, value in theirs.items() if name != "params"})

    def _probe_update_scopes(self, optimizer: OptimizerClass, groups: ParamGroups, check_steps: int) -> list[UpdateScope]:
        """Return, for each group, on what an update depends, found by trials. TreeError if on elements of other ranks."""
        trained = [[p for p in group["params"] if p.is_trained] for group in groups]
        found = []
        for group, mine in zip(groups, trained, strict=True):
            try_at = partial(probe_update_scope, optimizer, group, self._defaults, self._session.scheduler.device)
            shapes = list(dict.fromkeys(p.leaf.shape for p in mine if p.leaf.numel))
            found.append(max(try_at(), try_at([shapes], check_steps)) if check_steps and shapes else try_at())
        scopes = []
        for scope, mine in zip(found, trained, strict=True):
            parts, what = [p for p in mine if p.is_split], "whole parameters or their shapes, and ranks hold parts of"
            if UpdateScope.EVERYTHING in found:
                scope = UpdateScope.EVERYTHING
                parts = [p for p in mine if not p.is_whole_on_every_rank or p.place.varying_axes]
                what = "several parameters at once, or draws random numbers, and other ranks hold parts of"
            elif scope is UpdateScope.ELEMENT and not parts and not optimizer.__module__.startswith("torch."):
                scope = UpdateScope.PARAMETER  # the class may look at more than one element, at sizes that were not tried
            scopes.append(scope)
            if scope is not UpdateScope.ELEMENT and parts:
                more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
                whole = "" if scope is UpdateScope.EVERYTHING else "atoms=fs.layouts.LeafAtom() or "
                raise TreeError(
                    f"ShardedOptimizer(): {optimizer.__name__} looks at {what} {parts[0].path!r}{more}. Pass shard_module() "
                    f"{whole}strategy=fs.ddp(...) for the units that have them, take an elementwise optimizer such as AdamW, "
                    "or fs.optim.muon() and other (init, update) pairs, which gather what they need."
                )
        return scopes

    def _cut_groups_into_slices(self) -> list[list[nn.Parameter]]:
        """Return, for each parameter group, the slices of flat buffers that hold the group's leaves, as new parameters."""
        tree, self._generation = self._session.state.main_parameters(), self._session.state.num_replacements
        nodes, rank, groups = units_by_name(tree), self._session.scheduler.rank, []
        self._slices: dict[nn.Parameter, FlatSlice] = {}
        for scope, labels in zip(self._scopes, self._labels, strict=True):
            found = cut_by_labels(tree, labels, rank=rank, by_leaf=scope is not UpdateScope.ELEMENT)
            groups.append({nn.Parameter(flat_slice.view_in(nodes)): flat_slice for flat_slice in found})
            self._slices |= groups[-1]
        self._places = {path: (p, first, last) for p, each in self._slices.items() for path, first, last in each.leaves}
        return list(map(list, groups))

    def _recut_by_labels(self, labels: Sequence[Mapping[str, Hashable]], states: Mapping[str, Mapping[str, Any]]) -> None:
        """Cut this rank's buffers anew, into slices of neighbouring leaves with equal labels, and join the leaves' states.

        ``labels``: for each group, the label of each leaf by path. ``states``: the optimizer state of each leaf by path.
        """
        known: dict[Hashable, int] = {}
        self._labels = [{path: known.setdefault(new, len(known)) for path, new in each.items()} for each in labels]
        for group, parameters in zip(self.inner.param_groups, self._cut_groups_into_slices(), strict=True):
            group["params"] = parameters
        self.inner.state.clear()
        for parameter, flat_slice in self._slices.items():
            if joined := join_state(flat_slice, states, parameter):
                self.inner.state[parameter] = joined

    def make_in_place_transform(self, groups: ParamGroups) -> Transform:
        """Return a Transform whose ``apply`` updates the module's buffers in place, by a step of the torch optimizer ``inner``.

        Each call of ``apply`` reads the options in ``groups``, and writes back the options that the step has changed.
        """
        apply = partial(self._apply, groups)
        return Transform(init=lambda params: None, update=apply, config={}, apply=apply)  # `update` never runs

    def _apply(self, groups: ParamGroups, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if self._generation != self._session.state.num_replacements:
            self._recut_by_labels(self._labels, self._states_by_path())
        missing = self._session.step.means.missing
        self.paths_with_state |= {path for labels in self._labels for path in labels} - missing
        if missing and any(len({path in missing for path, _, _ in each.leaves}) > 1 for each in self._slices.values()):
            labels = [{path: (old, path in missing) for path, old in each.items()} for each in self._labels]
            self._recut_by_labels(labels, self._states_by_path())
        self._copy_options(groups, self.inner.param_groups)
        nodes = units_by_name(grads)
        for parameter, flat_slice in self._slices.items():
            parameter.grad = None if flat_slice.leaves[0][0] in missing else flat_slice.view_in(nodes).to(parameter.dtype)
        self.inner.step()
        self._copy_options(self.inner.param_groups, groups)  # some classes count steps there
        self.inner.zero_grad()
        return params, state

    def state_of(self, path: str) -> dict[str, Any]:
        """Return the state of the parameter at ``path``, such as ``{"exp_avg": ShardedTensor, ...}``; empty without a state."""
        like = self._session.parameters[path]
        if path in self._places:
            parameter, first, last = self._places[path]
            return state_of_leaf(self.inner.state.get(parameter, {}), parameter, first, last, like)
        if path not in self.paths_with_state:
            return {}
        labels = next(each for each in self._labels if path in each)
        for parameter, flat_slice in self._slices.items():  # leaves with one label have had the same steps
            if flat_slice.shape is None and labels.get(flat_slice.leaves[0][0]) == labels[path]:
                return state_of_leaf(self.inner.state[parameter], parameter, 0, 0, like)
        fresh = self.fresh_state(path, self.inner.param_groups)
        return {key: value for key, value in fresh.items() if isinstance(value, ShardedTensor)}

    def trained_parameters_by_path(self) -> dict[str, ShardedTensor]:
        """Return, by path, the parameters that may have state: trained ones whose full shape has at least one element."""
        mine = {path for labels in self._labels for path in labels}
        return {path: p for path, p in self._session.parameters.items() if path in mine and p.leaf.numel}

    def fresh_state(self, path: str, groups: ParamGroups) -> dict[str, Any]:
        """Return the state with which the class begins for the parameter at ``path``. ``groups``: groups with options."""
        index = next(i for i, labels in enumerate(self._labels) if path in labels)
        parameter = self._session.parameters[path]
        mine = parameter.local
        held = mine.numel()
        shape = (held or 1,) if self._scopes[index] is UpdateScope.ELEMENT else parameter.leaf.shape
        values = mine.view(shape) if held else mine.new_zeros(shape)
        state, _ = make_first_step(type(self.inner), groups[index], self._defaults, values)
        return state_of_leaf(state, values, 0, held, parameter)

    def options_added_by_first_step(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options that the class adds to ``group`` in its first step, such as ``"step"``, which is 0."""
        one = torch.zeros(1, 1, dtype=torch.float32, device=self._session.scheduler.device)
        options = make_first_step(type(self.inner), group, self._defaults, one)[1]
        return {name: value for name, value in options.items() if name not in group}

    def _states_by_path(self) -> StatesByPath:
        return {path: self.state_of(path) for path in self._places}

    def complete_states(self) -> StatesByPath:
        """Return this rank's states, completed by :func:`fill_in_missing_states`. Values that leaves may share are copied."""
        # Leaves of a slice share the tensor "step", which torch would increment once for each leaf.
        own = self._states_by_path()
        mine = {p: {k: x if isinstance(x, ShardedTensor) else copy.deepcopy(x) for k, x in own[p].items()} for p in own}
        return fill_in_missing_states(mine, self.trained_parameters_by_path(), self._session.reopened_scheduler())

    def replace_states(self, states: StatesByPath) -> None:
        """Replace all states. A parameter that is not in ``states`` has no state afterwards."""
        self.paths_with_state = set(states)
        labels = [{path: state_join_key(states.get(path, {})) for path in each} for each in self._labels]
        self._recut_by_labels(labels, states)
