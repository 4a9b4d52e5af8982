"""State dicts of a module whose parameters are parts: how they are loaded, refused, and made whole on one rank."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as torch_pytree

from fsharp.errors import MeshError, ScheduleError, TreeError, problem
from fsharp.functional.comm.agree import gather_bytes, together
from fsharp.functional.comm.equal_values import check_same, digest, taken
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.moves import gather
from fsharp.stateful.modules.calls import own_buffers
from fsharp.stateful.modules.initial.dtensors import Spec
from fsharp.stateful.modules.parameter import Part
from fsharp.stateful.modules.session import Session

SAME_VALUES = "Load the same values on all ranks."


class _Awaiting(Part):
    """Stands for a parameter while torch loads a state dict, and keeps what it would have copied into that."""

    given: list[torch.Tensor]
    is_whole = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "copy_" and isinstance(args[0], _Awaiting):
            args[0].given.append(args[1])
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


Read = tuple[Any, dict[str, torch.Tensor], dict[str, Part], list[tuple[torch.Tensor, torch.Tensor]]]
"""What torch returns; by path the values for parameters, and this rank's parts of them; buffers, with their new values."""


def refuse_dtensors(where: str, session: Session) -> None:
    """Refuse a module with DTensors sharded on other axes: elements of a part's part have no run in the whole."""
    for path, spec in session.calls.specs.items():
        if spec.is_sharded:
            raise TreeError(
                f"{where}: parameter {path!r} is a DTensor with the placements {list(spec.placements)}, and what ranks "
                "hold are parts of its parts. Save what model.full_parameters() yields; load it in `with "
                "model.unsharded(write=True):`."
            )


def load_parts(session: Session, module: nn.Module, load: Callable[[], Any]) -> Any:
    """See :meth:`~fsharp.ShardedModule.load_state_dict`. ``load`` is torch's way to do so."""
    where, comm = "load_state_dict()", session.scheduler
    session.step.give_up(where)

    def about(read: Read) -> dict[str, str]:
        kinds = (f"{path}: {'part' if isinstance(value, Part) else 'whole'}" for path, value in read[1].items())
        return {"parameters": "\n".join(kinds)}

    result, given, parts, buffers = together(where, comm, lambda: _read(where, session, module, load), about)
    varying = {}
    for path, value in given.items():
        place = session.parameters[path].place
        varying[path] = place.varying + (place.sharded if isinstance(value, Part) else ())
    values = {path: value.local if isinstance(value, Part) else value for path, value in given.items()}
    check_same(where, values, comm, remedy=SAME_VALUES, varying=varying)
    with torch.no_grad():
        for path, part in parts.items():
            session.parameters[path].local.copy_(part.local)
        for buffer, value in buffers:
            buffer.copy_(value)
    session.kept.spread()
    if all(path in given for path, parameter in session.parameters.items() if parameter.is_trained):
        session.note_load("parameters")
    return result


def _read(where: str, session: Session, module: nn.Module, load: Callable[[], Any]) -> Read:
    refuse_dtensors(where, session)
    if session.is_averaged:
        raise ScheduleError(f"{where}: in averaged(), which puts the parameters back afterwards.")
    session.kept.take_writes()
    awaiting: dict[str, _Awaiting] = {}
    for path, parameter in session.parameters.items():
        awaiting[path] = torch.empty(0, dtype=parameter.dtype).as_subclass(_Awaiting)
        about = {name: getattr(parameter, name) for name in Part.__annotations__}
        awaiting[path].__dict__.update({**about, "given": []})
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
    return result, given, parts, [(buffer, copy) for buffer, copy in buffers if copy._version]  # else not written to


def own_part(where: str, name: str, value: torch.Tensor, like: Part, *, dtypes: Sequence[torch.dtype]) -> Part:
    """Return this rank's part of a value for a parameter, or of something that an optimizer keeps for each of its elements.

    ``value`` is such a part of this rank and layout, or a whole tensor; of one of ``dtypes``. Anything else is refused by
    ``name``.
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


def _unfit(where: str, what: str, like: Part, got: str, expected: str) -> TreeError:
    remedy = (
        "Load what state_dict() gave on the same mesh, strategy and units, or whole tensors, such as those of an unsharded "
        "module; fs.checkpoint.load() reads what any mesh has saved."
    )
    rank = f"{like.rank} of {like.unit.mesh}"
    return TreeError(problem(where, what, [("got", got), ("expected", expected), ("rank", rank)], remedy))


def _shown(dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> str:
    return f"{' or '.join(dict.fromkeys(map(dtype_name, dtypes)))}{list(shape)}"


# ------------------------------------------------------------ whole tensors on one rank


def gather_to_rank(
    where: str,
    dicts: Iterable[dict[str, Any]],
    rank: int | None,
    comm: Comm,
    *,
    specs: Mapping[str, Spec] = {},
    kind_of: Callable[[str], str] = lambda key: "",
) -> bool:
    """Replace the parts in dicts by whole tensors in host memory, on one rank, or on all. Return whether this rank has them.

    All ranks have the same keys. Other tensors become copies in host memory. ``kind_of`` returns the kind of a value by its
    key, if dicts have several values of one parameter. Cost: a gather of all parts. Memory: the tensors of one unit and kind,
    and the result.
    """
    dicts = list(dicts)
    parts: dict[tuple[Any, ...], dict[str, Part]] = {}
    for each in dicts:
        for key, value in each.items():
            if isinstance(value, Part):
                parts.setdefault((kind_of(key), value.unit.name, value.place), {})[value.path] = value

    def check() -> None:
        if rank is not None:
            _check_rank(where, rank, comm)
        for path, part in (item for unit in parts.values() for item in unit.items()):
            if own := [axis for axis in part.place.varying if comm.mesh.axis_size(axis) > 1]:
                raise TreeError(
                    f"{where}: {path!r} has different values on ranks along {own}, and the result would have those of one rank "
                    "alone. Save by fs.checkpoint.save()."
                )

    names = "\n".join(f"{kind} {path}" for (kind, *_), unit in parts.items() for path in unit)
    together(where, comm, check, lambda _: {"rank": repr(rank), "parts": names})
    is_kept = rank is None or comm.rank == rank
    whole: dict[tuple[str, str], torch.Tensor] = {}
    for (kind, *_), unit in parts.items():
        for path, value in _gathered(unit, comm).items():
            if path in specs:
                value = specs[path].whole(value).full_tensor()
            if is_kept:
                whole[kind, path] = value.to("cpu", copy=True)
            del value  # releases the unit's memory before the next unit is gathered
    if is_kept:
        for each in dicts:
            for key, value in each.items():
                if isinstance(value, Part):
                    each[key] = whole[kind_of(key), value.path]
                elif isinstance(value, torch.Tensor):
                    each[key] = value.detach().to("cpu", copy=True)
    return is_kept


def _gathered(parts: Mapping[str, Part], comm: Comm) -> dict[str, torch.Tensor]:
    """Return whole tensors of the parts of one unit at one place, by path: views of a few buffers. A collective."""
    first = next(iter(parts.values()))
    unit, place = first.unit, first.place
    leaves = {path: part.leaf for path, part in parts.items()}
    groups = sorted({leaf.group for leaf in leaves.values()})
    buffers = []
    for group in groups:
        dtype = next(part.dtype for part in parts.values() if part.leaf.group == group)
        buffer = torch.zeros(unit.local_size(group, place), dtype=dtype, device=comm.device)
        for span in unit.spans(group, place, comm.rank):
            part = parts.get(unit.full_path(span.leaf))
            if part is not None:
                buffer[span.start : span.stop] = part.local.reshape(-1)
        buffers.append(buffer)
    with torch.no_grad():
        full = dict(zip(groups, gather(Sharded(buffers, unit, place, tuple(groups)), comm=comm).buffers, strict=True))
    return {path: full[x.group][x.offset : x.offset + x.numel].view(x.shape) for path, x in leaves.items()}


def scatter_from_rank(where: str, given: Any, rank: int, comm: Comm, like: Callable[[tuple[str, ...]], Part | None]) -> Any:
    """Return one rank's state dict on all ranks, with this rank's parts in place of whole tensors.

    ``like`` returns by the keys of a tensor a part that is cut as the tensor is to be; None if each rank takes it whole. Cost:
    two ``all_reduce`` of each tensor's bytes along each axis. Memory: this rank's parts, and one whole tensor.
    """

    def check() -> bytes:
        _check_rank(where, rank, comm)
        if comm.rank != rank:
            if given:
                raise TreeError(
                    f"{where}: rank {comm.rank} passes a state dict too, and that of rank {rank} is to be loaded. Pass None."
                )
            return b""
        if not isinstance(given, Mapping):
            raise TreeError(f"{where}: rank {rank} has a {type(given).__name__}, expected a state dict. Load the file there.")
        return _packed(where, given)

    data = together(where, comm, check, lambda _: {"rank": repr(rank)})
    nbytes = int.from_bytes(gather_bytes(len(data).to_bytes(8, "little"), comm)[rank], "little")
    mine = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(nbytes, dtype=torch.uint8, device="meta")
    )
    outline, metadata = _unpacked(bytes(taken(mine, rank, comm).cpu().numpy()))

    def fill(path: Any, x: Any, own: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        value, part = taken(own, rank, comm), like(tuple(each.key for each in path if hasattr(each, "key")))
        if part is None or value.shape != part.full_shape:  # load_state_dict() refuses a wrong shape
            return value
        return Part.of(value.reshape(-1)[slice(*part.run)].clone(), part)

    found = torch_pytree.tree_map_with_path(fill, outline, dict(given) if comm.rank == rank else outline)
    if metadata is not None:
        found = type("StateDict", (dict,), {"_metadata": metadata})(found)
    return found


def _check_rank(where: str, rank: Any, comm: Comm) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < comm.mesh.size:
        raise MeshError(f"{where}: rank is {rank!r}, expected a rank of {comm.mesh}, 0 to {comm.mesh.size - 1}.")


def _packed(where: str, given: Mapping[str, Any]) -> bytes:
    """Return as bytes a state dict without the values of its tensors, and torch's metadata on versions of modules."""

    def outline(path: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, Part | DTensor) or value.is_meta or value.layout is not torch.strided:
            name = ".".join(str(getattr(each, "key", getattr(each, "idx", ""))) for each in path)
            raise TreeError(
                f"{where}: {name!r} is a {type(value).__name__} {dtype_name(value.dtype)}{list(value.shape)} on "
                f"{value.device}, expected a whole tensor with values, such as full_state_dict() gives."
            )
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    stream = io.BytesIO()
    torch.save((torch_pytree.tree_map_with_path(outline, dict(given)), getattr(given, "_metadata", None)), stream)
    try:
        _unpacked(stream.getvalue())
    except Exception as error:  # any kind: the other ranks have to be told
        raise TreeError(
            f"{where}: the state dict has objects other than tensors, numbers, texts, lists and dicts: {error}"
        ) from error
    return stream.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
