"""State dicts of a sharded module: load parts or whole tensors, and gather whole tensors on one rank."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from fsharp.errors import ScheduleError, TreeError, problem
from fsharp.functional.comm.agree import all_gather_fixed_size, check_on_all_ranks
from fsharp.functional.comm.equal_values import broadcast_from_rank, bytes_digest, check_same_on_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import dtype_name, tensor_text
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.moves import gather
from fsharp.functional.tree.tree_label import TreeLabel
from fsharp.stateful.modules.calls import replacing_buffers_by_copies
from fsharp.stateful.modules.initial import check_rank
from fsharp.stateful.modules.parameter import ShardedTensor, iter_leaves_and_parts
from fsharp.stateful.modules.session import ModuleSession
from fsharp.stateful.modules.torch_tools.dtensors import is_dtensor

SAME_VALUES_REMEDY = "Load the same values on all ranks."


class _LoadPlaceholder(ShardedTensor):
    """Stands for a parameter while torch loads a state dict. ``given``: what torch copied into it, once for each tied name."""

    given: list[torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "copy_" and isinstance(args[0], _LoadPlaceholder):
            args[0].given.append(args[1])
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


def check_no_dtensor_shards(where: str, session: ModuleSession) -> None:
    """Raise an error if a parameter is a sharded DTensor: a rank may hold several separate runs of the whole tensor."""
    for path, spec in session.calls.dtensor_specs.items():
        if spec.is_sharded:
            raise TreeError(
                f"{where}: parameter {path!r} is a DTensor with the placements {list(spec.placements)}, and ranks "
                "hold parts of its local tensor. Save what model.named_full_parameters() yields; load it in `with "
                "model.unsharded(write=True):`."
            )


def load_state_dict_into_parts(session: ModuleSession, module: nn.Module, load: Callable[[], Any]) -> Any:
    """Load a state dict into a sharded module, by ``load``, a call of torch's ``load_state_dict``. Return its result."""
    where, comm = "load_state_dict()", session.scheduler
    session.step.abandon_forwards(where)
    given: dict[str, torch.Tensor] = {}  # values for parameters, by path
    parts: dict[str, ShardedTensor] = {}  # by path, this rank's part of the value
    written: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers, each with its new value
    assigned: list[tuple[dict[str, Any], str, Any]] = []  # buffers in place of which modules have put other tensors

    def read() -> Any:
        """Let torch read the state dict into placeholders. Return torch's result: missing and unexpected keys."""
        check_no_dtensor_shards(where, session)
        if session.is_averaged:
            raise ScheduleError(f"{where}: inside of averaged(), whose end restores the earlier parameters.")
        session.state.propagate_main_writes()
        awaiting: dict[str, _LoadPlaceholder] = {}
        for path, parameter in session.parameters.items():
            awaiting[path] = torch.empty(0, dtype=parameter.dtype).as_subclass(_LoadPlaceholder)
            awaiting[path].__dict__.update({**parameter.sharding_attributes, "given": []})
        with session.replacing_parameters(awaiting), replacing_buffers_by_copies(module) as buffers:
            try:
                result = load()
            except RuntimeError as error:  # torch lists all wrong names and shapes
                raise TreeError(f"{where}: {error}") from error
            for entries in session.calls.entries.values():
                entries.check_not_replaced(f"{where}: ")
            copies = {id(copy) for _, copy in buffers}
            rows = [(each._buffers, *row) for each in module.modules() for row in each._buffers.items()]
            assigned.extend([row for row in rows if id(row[2]) not in copies])
        for path, each in awaiting.items():
            if not each.given:
                continue
            if len({bytes_digest(x.local if isinstance(x, ShardedTensor) else x) for x in each.given[1:] and each.given}) > 1:
                raise TreeError(f"{where}: {path!r} is tied, and its names have different values. Give them the same value.")
            given[path], parameter = each.given[0], session.parameters[path]
            parts[path] = own_part(path, given[path], parameter, dtypes=(parameter.dtype, parameter.leaf.dtype))
        written.extend((buffer, copy) for buffer, copy in buffers if copy._version)
        return result

    def fields(_: Any) -> dict[str, str]:
        kinds = (f"{path}: {'part' if isinstance(x, ShardedTensor) else 'whole'}" for path, x in given.items())
        return {"parameters": "\n".join(kinds)}

    result = check_on_all_ranks(where, comm, read, fields)
    values, varying = {}, {}
    for path, value in given.items():
        is_part, place = isinstance(value, ShardedTensor), session.parameters[path].place
        values[path] = parts[path].local if is_part else value
        varying[path] = place.varying_axes + (place.sharded_axes if is_part else ())
    check_same_on_ranks(where, values, comm, remedy=SAME_VALUES_REMEDY, varying=varying)
    with torch.no_grad():
        for buffer, value in written:
            buffer.copy_(value)
    for owned, name, x in assigned:
        owned[name] = x
    session.write_and_gather_parameters({path: part.local for path, part in parts.items()})
    if all(path in given for path, parameter in session.parameters.items() if parameter.is_trained):
        session.reset_history_if_both_loaded("parameters")
    return result


def own_part(name: str, value: torch.Tensor, like: ShardedTensor, *, dtypes: Sequence[torch.dtype]) -> ShardedTensor:
    """Return this rank's part of ``value``: a parameter, or optimizer state with the parameter's shape.

    ``value`` is a part of this rank and layout, or a whole tensor, in one of ``dtypes``. Any other value is a TreeError that
    names ``name``. ``like``: this rank's part of the parameter.
    """
    first, last = like.flat_range
    what, got = "", tensor_text(value)
    if isinstance(value, ShardedTensor):
        is_same = (value.unit, value.leaf, value.place, value.local.numel()) == (like.unit, like.leaf, like.place, last - first)
        if not is_same or not like.unit.are_replicas(like.place, value.rank, like.rank):
            what = "is a part of another rank or layout"
        got = f"elements {list(value.flat_range)} of {got}"
        got += f" in unit {value.unit.display_name}, {value.place}, as rank {value.rank} of {value.unit.mesh} holds them"
    elif is_dtensor(value) or value.is_meta or value.layout is not torch.strided:
        kind = "DTensor" if is_dtensor(value) else f"tensor on the {value.device} device, {value.layout}"
        what, got = "is not a plain tensor with values", f"a {kind}"
    elif value.shape != like.full_shape:
        what = "has another shape"
    if not what and value.dtype not in dtypes:
        what = "has another dtype"
    if what:
        expected = f"{' or '.join(dict.fromkeys(map(dtype_name, dtypes)))}{list(like.full_shape)}, or its elements "
        expected += f"{[first, last]} in the layout of this module"
        facts = [("got", got), ("expected", expected), ("rank", f"{like.rank} of {like.unit.mesh}")]
        remedy = "Load what state_dict() gave on the same mesh, strategy and units, or whole tensors, such as those of an "
        remedy += "unsharded module; fs.checkpoint.load() reads what any mesh has saved."
        raise TreeError(problem("load_state_dict()", f"{name!r} {what}.", facts, remedy))
    return value if isinstance(value, ShardedTensor) else ShardedTensor.from_local(value.detach().reshape(-1)[first:last], like)


def make_parts_whole_(
    where: str, dicts: Iterable[dict[str, Any]], rank: int | None, comm: Comm, *, kind_of: Callable[[str], str] = lambda key: ""
) -> bool:
    """Replace the parts in dicts by whole tensors in host memory, on ``rank``, or on all ranks if ``rank`` is None.

    These ranks copy all other tensors to host memory; dicts of other ranks do not change. Return whether this is such a rank.
    All ranks have to call this function, with equal keys. Raises TreeError if a part varies along an axis of several ranks.
    ``kind_of`` returns the kind of a key, such as ``"exp_avg"``, by which parts of one parameter are told apart.
    """
    dicts = list(dicts)
    parts = {(kind_of(key), x.path): x for each in dicts for key, x in each.items() if isinstance(x, ShardedTensor)}

    def check() -> None:
        if rank is not None:
            check_rank(where, rank, comm)
        for (_, path), part in parts.items():
            if own := [axis for axis in part.place.varying_axes if comm.mesh.axis_size(axis) > 1]:
                raise TreeError(
                    f"{where}: {path!r} has different values on ranks along {own}, and the result would have the values of one "
                    "rank alone. Save by fs.checkpoint.save()."
                )

    names = "\n".join(f"{kind} {path}" for kind, path in parts)
    check_on_all_ranks(where, comm, check, lambda _: {"rank": repr(rank), "parts": names})
    is_kept = rank is None or comm.rank == rank
    whole: dict[tuple[str, str], torch.Tensor] = {}
    for kind in dict.fromkeys(kind for kind, _ in parts):
        for part, value in gather_whole_tensors([part for (each, _), part in parts.items() if each == kind], comm):
            full = value if part.spec is None else part.spec.as_dtensor(value).full_tensor()
            if is_kept:
                whole[kind, part.path] = full.to("cpu", copy=True)
            del value, full  # releases the unit's memory before the next unit is gathered
    if is_kept:
        for each in dicts:
            for key, value in each.items():
                if isinstance(value, ShardedTensor):
                    each[key] = whole[kind_of(key), value.path]
                elif isinstance(value, torch.Tensor):
                    each[key] = value.detach().to("cpu", copy=True)
    return is_kept


def gather_whole_tensors(parts: Iterable[ShardedTensor], comm: Comm) -> Iterator[tuple[ShardedTensor, torch.Tensor]]:
    """Yield ``(part, whole)`` for each part. Of a DTensor parameter fsharp shards the local tensor: this is then ``whole``.

    All ranks have to iterate to the end. Memory: one unit, of which yielded tensors are views.
    """
    by_unit: dict[tuple[UnitLayout, MeshPlacement, torch.dtype], dict[str, ShardedTensor]] = {}
    for part in parts:
        by_unit.setdefault((part.unit, part.place, part.dtype), {})[part.path] = part
    for (unit, place, dtype), mine in by_unit.items():
        groups = tuple(dict.fromkeys(part.leaf.group for part in mine.values()))
        buffers = [torch.zeros(unit.local_size(g, place), dtype=dtype, device=comm.device) for g in groups]
        # A name without a number: ranks would count such trees, and after an error of one rank their counts differ.
        node = Sharded(buffers, unit, place, groups, tree_label=TreeLabel("of parts"))
        for path, _, room in iter_leaves_and_parts(node, comm.rank):
            if path in mine:
                room.copy_(mine[path].local.reshape(-1))
        with torch.no_grad():
            whole = {path: x.view(leaf.shape) for path, leaf, x in iter_leaves_and_parts(gather(node, comm=comm), comm.rank)}
        for path, part in mine.items():
            yield part, whole[path]
        del buffers, node, room, whole  # before the next unit is gathered


def scatter_from_rank(where: str, given: Any, rank: int, comm: Comm, like: Mapping[Any, ShardedTensor]) -> Any:
    """Return on all ranks the state dict ``given`` of rank ``rank``, with each rank's own parts in place of whole tensors.

    ``like``: this rank's parts, by tuples of the first one or two keys of a tensor in ``given``. The tensor is cut like the
    part. A tensor whose keys are not in ``like`` stays whole on each rank.
    """

    def check() -> bytes:
        check_rank(where, rank, comm)
        if comm.rank == rank and not isinstance(given, Mapping):
            raise TreeError(f"{where}: rank {rank} has a {type(given).__name__}, expected a state dict. Load it on this rank.")
        if comm.rank != rank and given:
            raise TreeError(f"{where}: rank {comm.rank} passes a state dict too, expected one on rank {rank} alone. Pass None.")
        return _state_dict_outline_to_bytes(where, given) if comm.rank == rank else b""

    data = check_on_all_ranks(where, comm, check, lambda _: {"rank": repr(rank)})
    nbytes = int.from_bytes(all_gather_fixed_size(len(data).to_bytes(8, "little"), comm)[rank], "little")
    empty = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else empty
    packed = io.BytesIO(bytes(broadcast_from_rank(mine, rank, comm).tolist()))
    outline, metadata = torch.load(packed, weights_only=True)

    def fill(path: Any, x: Any, own: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        value, keys = broadcast_from_rank(own, rank, comm), tuple(each.key for each in path if hasattr(each, "key"))
        part = like.get(keys[:2])
        if part is None or value.shape != part.full_shape:  # load_state_dict() refuses a wrong shape
            return value
        return ShardedTensor.from_local(value.reshape(-1)[slice(*part.flat_range)].clone(), part)

    found = torch_pytree.tree_map_with_path(fill, outline, dict(given) if comm.rank == rank else outline)
    if metadata is not None:
        found = type("StateDict", (dict,), {"_metadata": metadata})(found)
    return found


def _state_dict_outline_to_bytes(where: str, given: Mapping[str, Any]) -> bytes:
    """Return as bytes ``given`` with its tensors on meta, and torch's metadata. TreeError for objects torch cannot load."""

    def outline(path: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, ShardedTensor) or is_dtensor(value) or value.is_meta or value.layout is not torch.strided:
            name = ".".join(str(getattr(each, "key", getattr(each, "idx", ""))) for each in path)
            raise TreeError(
                f"{where}: {name!r} is a {type(value).__name__} {tensor_text(value)} on {value.device}, expected a whole "
                "tensor with values, such as full_state_dict() gives."
            )
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    stream = io.BytesIO()
    torch.save((torch_pytree.tree_map_with_path(outline, dict(given)), getattr(given, "_metadata", None)), stream)
    try:
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:  # of any class, so that all ranks raise
        raise TreeError(
            f"{where}: the state dict has objects other than tensors, numbers, texts, lists and dicts: {error}"
        ) from error
    return stream.getvalue()
