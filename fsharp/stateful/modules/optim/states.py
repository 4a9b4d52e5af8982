"""Parameter groups, and the state of each parameter in a state dict, with equal names and kinds of state on all ranks."""

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import optree
import torch

from fsharp.errors import AgreementError, TreeError, problem
from fsharp.functional.comm.agree import all_gather_texts, check_on_all_ranks
from fsharp.functional.comm.equal_values import broadcast_from_rank, bytes_digest, exact_text
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import dtype_name, tensor_text
from fsharp.functional.layout.sharded import check_not_donated, is_sharded, units_of
from fsharp.stateful.modules.parameter import ShardedTensor
from fsharp.stateful.modules.state_dict import own_part

StatesByPath = dict[str, dict[str, Any]]
"""State by path of the parameter and name: a :class:`~fsharp.modules.ShardedTensor` if it has a value for each element."""


class StateByParameter(MutableMapping[ShardedTensor, Mapping[str, Any]]):
    """A read-only mapping from the parameters at ``paths`` to their states, which ``state_of(path)`` returns."""

    def __init__(self, state_of: Callable[[str], Any], paths: Container[str], parameters: Mapping[str, ShardedTensor]) -> None:
        self._state_of, self._paths, self._parameters = state_of, paths, parameters

    def _path_of(self, parameter: Any) -> str | None:
        """Return the path of a parameter of this module; None for another object, such as a parameter of another module."""
        known = self._parameters.get(path := getattr(parameter, "path", ""))
        return path if known is not None and known.owner == getattr(parameter, "owner", None) else None

    def __getitem__(self, parameter: ShardedTensor) -> Mapping[str, Any]:
        if (path := self._path_of(parameter)) is None:
            got = f"a {type(parameter).__name__} {list(parameter.shape)}" if hasattr(parameter, "shape") else repr(parameter)
            raise TreeError(f"optimizer.state: asked for {got}, expected one of model.parameters().")
        return _ReadOnlyState(self._state_of(path))

    def __setitem__(self, *_: Any, **__: Any) -> NoReturn:
        raise TreeError("optimizer.state is read-only. Write to its tensors in place, or replace all by load_state_dict().")

    __delitem__ = __setitem__

    def __contains__(self, parameter: object) -> bool:
        return self._path_of(parameter) in self._paths

    def __iter__(self) -> Iterator[ShardedTensor]:
        return (each for path, each in self._parameters.items() if path in self._paths)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _ReadOnlyState(dict[str, Any]):
    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = StateByParameter.__setitem__


def fill_in_missing_states(states: StatesByPath, parameters: Mapping[str, ShardedTensor], comm: Comm) -> StatesByPath:
    """Return ``states`` with the states that this rank lacks, so that all ranks have the same names of state in a state dict.

    All ranks call this. For a parameter without elements here, elementwise state is an empty ShardedTensor. All other state is
    copied from a rank that has the state. Ranks with different parameters, such as experts, keep their own states.
    Raises TreeError for a state that is no tensor, number, string or None; AgreementError if kinds differ between ranks.
    """

    def described() -> str:
        mine = [(path, states.get(path, {}).items()) for path in parameters]
        rows = [
            json.dumps([[key, _state_value_to_compare("state_dict()", path, key, x)] for key, x in items])
            for path, items in mine
        ]
        known = list(dict.fromkeys(rows))  # many parameters have equal rows
        return json.dumps([known, list(map(known.index, rows))])

    texts = all_gather_texts(check_on_all_ranks("state_dict()", comm, described), comm)
    everyone = [[json.loads(known[i]) for i in which] for known, which in map(json.loads, texts)]
    found: StatesByPath = {}
    for i, (path, like) in enumerate(parameters.items()):
        mine, kinds = states.get(path, {}), {rank: each[i] for rank, each in enumerate(everyone) if each[i]}
        mesh, axes = like.unit.mesh, like.place.varying_axes  # along these axes ranks have states of their own
        owners = [mesh.index_along(axes, rank) for rank in range(mesh.size)]
        first: dict[int, int] = {}
        for rank, kind in kinds.items():
            if kinds[one := first.setdefault(owners[rank], rank)] != kind:
                rows = [(f"rank {each}", kinds[each]) for each in (one, rank)]
                raise AgreementError(problem("state_dict()", f"ranks keep different states of {path!r}.", rows))
        if (source := first.get(owners[like.rank])) is not None:
            everywhere = all(rank in kinds for rank in range(mesh.size) if owners[rank] == owners[like.rank])
            found[path] = {
                key: mine[key] if everywhere else _own_or_from_rank(kind, mine.get(key), like, source, comm)
                for key, kind in kinds[source]
            }
    return found


def _state_value_to_compare(where: str, path: str, key: str, value: Any) -> list[Any]:
    if isinstance(value, ShardedTensor):
        return ["part", dtype_name(value.dtype)]
    if isinstance(value, torch.Tensor):
        single = value.item() if value.numel() == 1 else None
        return ["tensor", dtype_name(value.dtype), list(value.shape), value.device.type, single]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    raise TreeError(
        f"{where}: {key!r} of {path!r} is a {type(value).__name__}, expected a tensor, a number, a string or None, which "
        "another mesh can read. Take another optimizer."
    )


def _own_or_from_rank(kind: list[Any], value: Any, like: ShardedTensor, source: int, comm: Comm) -> Any:
    """Return ``value``, this rank's state. If it is None, return an empty part for elementwise state, else ``source``'s state.

    ``kind``: result of :func:`_state_value_to_compare` on rank ``source``. All ranks call this function.
    """
    what, *rest = kind
    if what == "value":
        return rest[0]
    dtype = getattr(torch, rest[0])
    if what == "part":
        return ShardedTensor.from_local(torch.empty(0, dtype=dtype, device=comm.device), like) if value is None else value
    shape, device, single = rest[1:]
    device = comm.device if device == comm.device.type else torch.device(device)
    if single is not None:
        return torch.full(shape, single, dtype=dtype, device=device) if value is None else value
    mine = torch.empty(shape, dtype=dtype, device="meta") if value is None else value
    sent = broadcast_from_rank(mine, source, comm, varying=like.place.varying_axes)
    return sent.to(device) if value is None else value


class GroupWithoutOptions(dict[str, Any]):
    """The parameter group of an optimizer that is an ``(init, update)`` pair. Reading an option raises a TreeError."""

    def __missing__(self, key: str) -> Any:
        raise option_access_error(key)


def option_access_error(key: str) -> TreeError:
    """Return the error for reading or setting an option, such as ``lr``, in the group of an ``(init, update)`` pair."""
    return TreeError(
        f"ShardedOptimizer: param_groups[0][{key!r}]: an (init, update) pair has no options there. Pass a schedule, such as "
        f"fs.optim.adamw(fs.optim.cosine_decay_schedule(3e-4, 1000)), or set numbers of fs.optim.inject_hyperparams."
    )


def options_text_to_compare(options: Mapping[str, Any]) -> str:
    """Return options as text for comparison between ranks."""
    return "\n".join(f"{name}={exact_text(value)}" for name, value in options.items())


def group_texts_to_compare(groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return ``{"group 0": text, ...}``: all items of each group as text, also ``"params"``, for ranks to compare."""
    return {f"group {i}": options_text_to_compare(group) for i, group in enumerate(groups)}


def check_param_groups(
    state_dict: Any, own: list[dict[str, Any]], *, options: Iterable[str], trained: Container[str] | None
) -> None:
    """Raise an error if the parameter groups of a state dict differ from ``own``, the optimizer's.

    ``options``: names of options that each group needs. ``trained``: names of parameters that may have a state; None if the
    keys of the state are not names of parameters.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise TreeError("load_state_dict(): expected a dict with 'state' and 'param_groups', as state_dict() gives it.")
    groups = state_dict["param_groups"]
    got, expected = ([list(group["params"]) for group in each] for each in (groups, own))
    if got != expected:
        facts = [("got", _group_sizes_text(got)), ("expected", _group_sizes_text(expected))]
        remedy = "Make the same groups in the same order, by names of parameters; torch's own optimizers number parameters."
        raise TreeError(problem("load_state_dict()", "the parameter groups are not those of this optimizer.", facts, remedy))
    for i, (group, mine) in enumerate(zip(groups, own, strict=True)):
        if missing := sorted(set(options) - group.keys()):
            facts = [("got", ", ".join(sorted(group))), ("expected", f"{missing[0]!r}, such as {mine[missing[0]]!r}")]
            what = f"group {i} belongs to another optimizer."
            raise TreeError(problem("load_state_dict()", what, facts, "Load the state of the same class."))
    if trained is not None and (unknown := sorted(str(name) for name in state_dict["state"] if name not in trained)):
        raise TreeError(
            f"load_state_dict(): the state dict has state of parameter {unknown[0]!r}, which this optimizer does not train. "
            "Make the optimizer with the same parameters."
        )


def _group_sizes_text(groups: list[list[Any]]) -> str:
    return ", ".join(f"{len(each)} parameters" + f" from {each[0]!r} on" * bool(each) for each in groups)


ComparedTensors = dict[str, tuple[torch.Tensor, tuple[str, ...]]]
"""Tensors that ranks compare, such as digests, by name, each with the axes along which it may differ."""


def states_from_state_dict(
    given: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, ShardedTensor], fresh: Callable[[str], Mapping[str, Any]]
) -> tuple[StatesByPath, ComparedTensors]:
    """Return the states ``given``, with this rank's parts in place of whole tensors; and digests for ranks to compare.

    Raise an error if a state lacks a name of ``fresh(path)``, with which an optimizer begins, or has other dtypes or shapes.
    """
    states: StatesByPath = {}
    compared: ComparedTensors = {}
    for path, like in parameters.items():
        state = given.get(path) or {}
        states[path] = _checked_state(path, state, fresh(path), like) if state else {}
        # Two entries for each parameter on every rank, as ranks with parameters of their own may keep different states.
        parts = [bytes_digest(value.local) for value in state.values() if isinstance(value, ShardedTensor)]
        rest = [bytes_digest(x) for x in state.values() if isinstance(x, torch.Tensor) and not isinstance(x, ShardedTensor)]
        kinds = repr(
            [(key, _state_value_to_compare("load_state_dict()", path, key, value)) for key, value in state.items()]
        ).encode()
        compared[path] = _sha256_tensor(kinds, *rest), like.place.varying_axes
        compared[f"{path}, its part"] = _sha256_tensor(*parts), like.place.varying_axes + like.place.sharded_axes
    return {path: state for path, state in states.items() if state}, compared


def _sha256_tensor(*data: bytes) -> torch.Tensor:
    return torch.tensor(list(hashlib.sha256(b"".join(data)).digest()), dtype=torch.uint8)


def _checked_state(path: str, given: Mapping[str, Any], wanted: Mapping[str, Any], like: ShardedTensor) -> dict[str, Any]:
    if wanted.keys() - given.keys():
        raise TreeError(
            f"load_state_dict(): the state of {path!r} has {sorted(given)}, and this optimizer keeps {sorted(wanted)}. Load "
            "the state of the same class with the same options, or leave the parameter's state out."
        )
    found: dict[str, Any] = {}
    for key, value in given.items():
        name, want = f"{key} of {path}", wanted.get(key)
        is_tensor = isinstance(value, torch.Tensor)
        if key in wanted and isinstance(want, torch.Tensor) != is_tensor:
            raise TreeError(f"load_state_dict(): {name!r} is a {type(value).__name__}, expected a {type(want).__name__}.")
        is_elementwise = isinstance(want, ShardedTensor) or (
            key not in wanted and is_tensor and like.leaf.shape and value.shape == like.leaf.shape
        )  # fresh state may lack a name that a later step adds
        if is_elementwise:
            found[key] = own_part(name, value, like, dtypes=[value.dtype if want is None else want.dtype])
        elif isinstance(want, torch.Tensor):
            if (value.dtype, value.shape) != (want.dtype, want.shape) or isinstance(value, ShardedTensor) or value.is_meta:
                got, expected = (f"{type(x).__name__} {tensor_text(x)} on {x.device}" for x in (value, want))
                raise TreeError(f"load_state_dict(): {name!r} is a {got}, expected a {expected}.")
            found[key] = value.to(want.device)
        else:
            found[key] = value
    return found


def checked_transform_state(given: Any, own: Any, rank: int) -> tuple[Any, ComparedTensors]:
    """Return a copy of ``given``, the state of an ``(init, update)`` pair; and the tensors in it, for ranks to compare.

    Raise a TreeError if ``given`` was donated, or was saved by a rank that holds other elements than ``rank``. Raise one
    if structure, layout, shapes or dtypes differ from those of the state ``own``.
    """
    check_not_donated("load_state_dict()", units_of(given))
    remedy = "Load what state_dict() gave on the same mesh, strategy and units, with the same transformation."
    paths, new, spec = optree.tree_flatten_with_path(given, is_leaf=is_sharded)
    old, own_spec = optree.tree_flatten(own, is_leaf=is_sharded)
    if spec != own_spec:
        what = "the state is of another transformation."
        raise TreeError(problem("load_state_dict()", what, [("got", spec), ("expected", own_spec)], remedy))
    for path, x, y in zip(paths, new, old, strict=True):
        if _layout_or_shape(x) != _layout_or_shape(y):
            got, expected = (each if is_sharded(each) else _layout_or_shape(each) for each in (x, y))
            facts = [("at", ".".join(map(str, path))), ("got", got), ("expected", expected)]
            raise TreeError(problem("load_state_dict()", "the state has another layout, shape or dtype.", facts, remedy))
        if is_sharded(x) and x.rank is not None and not x.unit.are_replicas(x.place, x.rank, rank):
            what = f"the state is of rank {x.rank} of {x.unit.mesh}, and this is rank {rank}, which has another part."
            raise TreeError(problem("load_state_dict()", what, [("unit", repr(x.name))], "Load what this rank has saved."))
    compared: ComparedTensors = {}
    for i, node in enumerate(new):
        if is_sharded(node):
            axes = node.place.sharded_axes + node.place.varying_axes
            for g, buffer in zip(node.groups, node.buffers, strict=True):
                compared[f"state {i}, unit {node.unit.display_name}, group {g}"] = buffer, axes
        else:
            compared[f"state {i}"] = (node if isinstance(node, torch.Tensor) else _sha256_tensor(exact_text(node).encode())), ()
    copied = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, given)
    return copied, compared


def _layout_or_shape(x: Any) -> Any:
    if is_sharded(x):
        return x.unit, x.place, x.groups, list(map(_layout_or_shape, x.buffers))
    return tensor_text(x) if isinstance(x, torch.Tensor) else type(x)
