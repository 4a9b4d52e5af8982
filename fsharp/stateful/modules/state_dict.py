"""State dicts of a module whose parameters are parts: what is taken from one, and what is refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsharp.errors import ScheduleError, TreeError, problem
from fsharp.functional.comm.agree import together
from fsharp.functional.comm.equal_values import check_same, digest
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.precision import dtype_name
from fsharp.stateful.modules.parameter import Part
from fsharp.stateful.modules.parameter_slots import own_buffers
from fsharp.stateful.modules.session import Session


class _Awaiting(Part):
    """Stands for a parameter while torch loads a state dict, and keeps what it would have copied into that."""

    given: list[torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "copy_" and isinstance(args[0], _Awaiting):
            args[0].given.append(args[1])
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class _Read(NamedTuple):
    """What a state dict has for a module.

    Attributes:
        result: what torch returns.
        given: by path, the values for parameters.
        parts: by path, this rank's parts of them.
        buffers: each buffer, and a tensor with its new values.
    """

    result: Any
    given: dict[str, torch.Tensor]
    parts: dict[str, Part]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]


def refuse_dtensors(where: str, session: Session) -> None:
    """Refuse a module with parameters that are parts on axes of their own: elements of a part's part have no run in the whole.

    Raises:
        TreeError: names the first of them.
    """
    for path, spec in session.calls.specs.items():
        if spec.is_sharded:
            raise TreeError(
                f"{where}: parameter {path!r} is a DTensor with the placements {list(spec.placements)}, and what ranks "
                "hold are parts of its parts. Save what model.full_parameters() yields; load it in `with "
                "model.unsharded(write=True):`."
            )


def load_parts(session: Session, module: nn.Module, load: Callable[[], Any]) -> Any:
    """See :meth:`ShardedModule.load_state_dict`. ``load`` is torch's way to do so."""
    where, comm = "load_state_dict()", session.scheduler
    session.step.give_up(where)

    def about(read: _Read) -> dict[str, str]:
        return {"parameters": "\n".join(f"{path}: {_kind(value)}" for path, value in read.given.items())}

    read = together(where, comm, lambda: _read(where, session, module, load), about)
    places = {path: session.parameters[path].place for path in read.given}
    check_replicas(
        where,
        {
            path: (value.local, places[path].varying + places[path].sharded)
            if isinstance(value, Part)
            else (value, places[path].varying)
            for path, value in read.given.items()
        },
        comm,
    )
    with torch.no_grad():
        for path, part in read.parts.items():
            session.parameters[path].local.copy_(part.local)
        for buffer, value in read.buffers:
            buffer.copy_(value)
    session.kept.spread()
    return read.result


def _read(where: str, session: Session, module: nn.Module, load: Callable[[], Any]) -> _Read:
    refuse_dtensors(where, session)
    if session.is_averaged:
        raise ScheduleError(f"{where}: in averaged(), which puts the parameters back afterwards.")
    session.kept.take_writes()
    awaiting: dict[str, _Awaiting] = {}
    for path, parameter in session.parameters.items():
        awaiting[path] = torch.empty(0, dtype=parameter.dtype).as_subclass(_Awaiting)
        awaiting[path].__dict__.update({name: getattr(parameter, name) for name in Part.__annotations__})
        awaiting[path].is_whole, awaiting[path].given = False, []
    names = [unit.name for unit in session.layout.units]
    with session.calls.swapped_in(names, session.seated(awaiting)), own_buffers(module) as buffers:
        try:
            result = load()
        except RuntimeError as error:  # of names and shapes; torch has looked at all of them
            raise TreeError(f"{where}: {error}") from error
    given, parts = {}, {}
    for path, each in awaiting.items():
        if not each.given:
            continue
        if len({digest(x.local if isinstance(x, Part) else x) for x in each.given[1:] and each.given}) > 1:
            raise TreeError(f"{where}: {path!r} is tied, and its names have different values. Give all of them the same one.")
        given[path], parameter = each.given[0], session.parameters[path]
        parts[path] = own_part(where, path, given[path], parameter, dtypes=(parameter.dtype, parameter.leaf.dtype))
    return _Read(result, given, parts, [(buffer, copy) for buffer, copy in buffers if copy._version])  # else not written to


def own_part(where: str, name: str, value: torch.Tensor, like: Part, *, dtypes: Sequence[torch.dtype]) -> Part:
    """This rank's part of a value for a parameter, or of something that an optimizer keeps for each of its elements.

    Args:
        where: the function that asks, for the message.
        name: of the value in a state dict.
        value: such a part, or a whole tensor.
        like: the parameter.
        dtypes: those it may have.

    Raises:
        TreeError: a part of another rank or layout, or a tensor of another shape, dtype or kind.
    """
    first, last = like.run
    expected = f"{_shown(dtypes, like.full_shape)}, or its elements {[first, last]} in the layout of this module"
    if isinstance(value, Part):
        is_same = (value.unit, value.leaf, value.place) == (like.unit, like.leaf, like.place)
        if not is_same or not like.unit.is_same_part(like.place, value.rank, like.rank) or value.local.numel() != last - first:
            got = f"elements {list(value.run)} of {_shown([value.dtype], value.full_shape)}"
            got += f" in unit {value.unit.name!r}, {value.place}, as rank {value.rank} of {value.unit.mesh} holds them"
            raise _unfit(where, f"{name!r} is a part of another rank or layout.", like, got, expected)
        found = value
    elif isinstance(value, DTensor) or value.is_meta or value.layout is not torch.strided:
        kind = "DTensor" if isinstance(value, DTensor) else f"tensor on the {value.device} device, {value.layout}"
        raise _unfit(where, f"{name!r} is no plain tensor with values.", like, f"a {kind}", expected)
    elif value.shape != like.full_shape:
        raise _unfit(where, f"{name!r} has another shape.", like, _shown([value.dtype], value.shape), expected)
    else:
        found = Part.of(value.detach().reshape(-1)[first:last], like)
    if value.dtype not in dtypes:
        raise _unfit(where, f"{name!r} has another dtype.", like, _shown([value.dtype], value.shape), expected)
    return found


def check_replicas(where: str, tensors: Mapping[str, tuple[torch.Tensor, tuple[str, ...]]], comm: Comm) -> None:
    """Refuse values that ranks have to have in common, and have not.

    Args:
        where: the function that asks, for the message.
        tensors: by name, in the same order on all ranks, with the axes along which ranks have values of their own.
        comm: the ranks.

    Raises:
        AgreementError: on all ranks alike: names what differs, and the ranks.

    Cost: a pass over what several ranks hold, and a collective of 8 bytes for each axis; of 8 bytes a tensor where some of
    them are parts.
    """
    shared = {
        name: (tensor, axes)
        for name, (tensor, axes) in tensors.items()
        if any(size > 1 and axis not in axes for axis, size in comm.mesh.axes)
    }
    values = {name: tensor for name, (tensor, _) in shared.items()}
    varying = {name: axes for name, (_, axes) in shared.items()}
    check_same(where, values, comm, remedy="Load the same values on all ranks.", varying=varying)


def _unfit(where: str, what: str, like: Part, got: str, expected: str) -> TreeError:
    remedy = (
        "Load what state_dict() gave on the same mesh, strategy and units, or whole tensors, such as those of an unsharded "
        "module; fs.checkpoint.load() reads what any mesh has saved."
    )
    rank = f"{like.rank} of {like.unit.mesh}"
    return TreeError(problem(where, what, [("got", got), ("expected", expected), ("rank", rank)], remedy))


def _shown(dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> str:
    return f"{' or '.join(dict.fromkeys(map(dtype_name, dtypes)))}{list(shape)}"


def _kind(value: Any) -> str:
    return "part" if isinstance(value, Part) else "whole"
