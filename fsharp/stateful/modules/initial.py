"""This rank's part of a module's initial values: cut from the module's or one rank's values, or made by initializers."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import optree
import torch
from torch import nn

from fsharp.errors import MeshError, TreeError, problem
from fsharp.functional.comm.agree import all_gather_texts, check_on_all_ranks
from fsharp.functional.comm.equal_values import broadcast_from_rank, check_same_on_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import tensor_text
from fsharp.functional.formats.gather_hooks import plain_value
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.slicing import build_shard, shard_for
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.functional.materialize import mesh_independent_seed
from fsharp.functional.tree.paths import self_and_ancestors
from fsharp.stateful.modules.torch_tools.dtensors import local_tensor

_SAME_SEED_REMEDY = (
    "Seed all ranks alike before the module is made, load the same checkpoint, or pass sync_from=0, to take rank 0's values."
)
Initializer = Callable[[nn.Module], None]
_UNWRITTEN_BYTE = 0x55  # the value of integers that were not written


def initializer_settings_texts(
    module: nn.Module, comm: Comm, *, key: int, initialize: Initializer | None, sync_from: int | None
) -> dict[str, str]:
    """Return the settings of a module's initial values, as texts by name, for ranks to compare.

    Raise an error if ``sync_from`` is not a rank of ``comm``, or if this rank is ``sync_from`` and a tensor is on meta.
    """
    tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    meta = [path for path, tensor in tensors if tensor.is_meta]
    buffers = [f"{path}: {b.dtype}{list(b.shape)}" for path, b in module.named_buffers(remove_duplicate=False)]
    if sync_from is not None:
        check_rank("shard_module(sync_from=...)", sync_from, comm)
        if comm.rank == sync_from and meta:
            raise TreeError(
                f"shard_module(sync_from={sync_from}): {meta[0]!r} of rank {sync_from} is on the meta device. Make the module "
                "on a real device there, or leave sync_from out on all ranks: submodules then initialize themselves, alike on "
                "all ranks."
            )
    return {
        "key": repr(key),
        "initialize": getattr(initialize, "__qualname__", type(initialize).__qualname__),
        "sync_from": repr(sync_from),
        **({"on the meta device": "\n".join(meta)} if sync_from is None else {"buffers": "\n".join(buffers)}),
    }


def initial_parameters(
    module: nn.Module, tree: Any, layout: Layout, comm: Comm, *, key: int, initialize: Initializer | None, sync_from: int | None
) -> Any:
    """Return this rank's part of a module's initial parameters, sharded for the optimizer. A collective.

    Also fill meta buffers, or by ``sync_from`` all buffers. Memory: this rank's parts, and one submodule or unit in full.
    """
    if sync_from is not None:
        return _sync_buffers_and_shard(module, layout, comm, sync_from)
    leaves = [(unit, leaf) for unit in layout.units for leaf in unit.leaves if not leaf.tied_to]
    own = {unit.path_in_tree(leaf): _parameter_value(module, unit, leaf) for unit, leaf in leaves}
    varying = {unit.path_in_tree(leaf): unit.strategy.full.varying_axes for unit, leaf in leaves}
    present = {path: tensor for path, tensor in own.items() if not tensor.is_meta}
    check_same_on_ranks("shard_module()", present, comm, remedy=_SAME_SEED_REMEDY, varying=varying)
    if not any(x.is_meta for x in chain(module.parameters(), module.buffers())):
        return shard_for(tree, layout, comm.rank, place="optim")
    makers = Initializers(module, layout, comm, key, initialize)

    def make() -> Any:
        nodes = []
        for unit in layout.units:
            value = lambda leaf, unit=unit: makers.value(unit.path_in_tree(leaf))  # noqa: E731
            nodes.append(build_shard(unit, "optim", comm.rank, value, dtype="main"))
        buffers = module.named_buffers(remove_duplicate=False)
        return nodes, {path: makers.value(path) for path, buffer in buffers if buffer.is_meta}

    nodes, made = check_on_all_ranks("shard_module()", comm, make)
    unfilled = {path for text in all_gather_texts("\n".join(makers.unfilled), comm) for path in text.split("\n") if path}
    if unfilled:
        raise _unfilled_error(module, sorted(unfilled))
    for path, value in made.items():
        _replace_buffer(module, path, value)
    return optree.tree_unflatten(layout.structure, nodes)


def check_rank(where: str, rank: Any, comm: Comm) -> None:
    """Raise a MeshError that begins with ``where`` if ``rank`` is not a rank of ``comm``."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < comm.mesh.size:
        raise MeshError(f"{where}: rank is {rank!r}, expected a rank of {comm.mesh}, 0 to {comm.mesh.size - 1}.")


def _sync_buffers_and_shard(module: nn.Module, layout: Layout, comm: Comm, source: int) -> Any:
    """Return this rank's shards of the parameters of rank ``source``, and copy that rank's values to the module's buffers."""
    nodes = []
    for unit in layout.units:
        own, varying = [leaf for leaf in unit.leaves if not leaf.tied_to], unit.strategy.full.varying_axes
        whole = {leaf: broadcast_from_rank(_parameter_value(module, unit, leaf), source, comm, varying=varying) for leaf in own}
        nodes.append(build_shard(unit, "optim", comm.rank, whole.__getitem__, dtype="main"))
    new: dict[int, torch.Tensor] = {}
    for path, buffer in module.named_buffers(remove_duplicate=False):
        around, mine = layout.unit_around(path), local_tensor(buffer.detach())
        value = broadcast_from_rank(mine, source, comm, varying=() if around is None else around.strategy.full.varying_axes)
        if mine.is_meta or 0 in mine.stride():  # an expanded buffer cannot be written to; modules may share a buffer
            _replace_buffer(module, path, new.setdefault(id(buffer), value))
        else:
            mine.copy_(value)
    return optree.tree_unflatten(layout.structure, nodes)


def _replace_buffer(module: nn.Module, path: str, value: torch.Tensor) -> None:
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent)._buffers[name] = value


def _parameter_value(module: nn.Module, unit: UnitLayout, leaf: Leaf) -> torch.Tensor:
    return local_tensor(plain_value(module.get_parameter(unit.path_in_tree(leaf))))  # type: ignore[no-any-return]


class Initializers:
    """Runs initializers of modules, which fill the meta parameters and buffers of one module at a time, on the CPU.

    The initializer of a module runs first, and then the initializers of the modules around it. Outer initializers may change
    the module's tensors, as ``nn.MultiheadAttention`` does with its inner module. An outer module that has values, in a tensor
    of its own or further inside, is not initialized. Random numbers depend on the random ``key``, the path of the filled
    module, and the rank's coordinates along axes on which the module's parameters vary.
    """

    def __init__(self, module: nn.Module, layout: Layout, comm: Comm, key: int, initialize: Initializer | None) -> None:
        self._module, self._layout, self._comm, self._key, self._initialize = module, layout, comm, key, initialize
        self.unfilled: set[str] = set()  # paths of tensors that no initializer has filled so far
        self._last_owner: str | None = None
        self._parameters: dict[int, torch.Tensor] = {}  # by id of the meta tensor, of the last module that was filled
        self._buffers: dict[int, torch.Tensor] = {}  # by id of the meta tensor, of all modules
        self._first_path: dict[int, str] = {}  # by id of a buffer, its first path: the module there initializes it
        for path, buffer in module.named_buffers(remove_duplicate=False):
            self._first_path.setdefault(id(buffer), path)
        tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        self._with_values = {around for path, x in tensors if not x.is_meta for around in self_and_ancestors(path)}

    def value(self, path: str) -> torch.Tensor:
        """Return the value of a parameter or buffer: for a meta tensor the value from initializers, else the tensor itself."""
        owner, _, name = path.rpartition(".")
        given: torch.Tensor = getattr(self._module.get_submodule(owner), name)
        if not given.is_meta:
            return local_tensor(plain_value(given)).to(self._comm.device)  # type: ignore[no-any-return]
        owner = self._first_path.get(id(given), path).rpartition(".")[0]
        if owner != self._last_owner and id(given) not in self._buffers:
            self._last_owner, self._parameters = owner, {}
            self._run_initializers_at(owner)
        return (self._parameters if isinstance(given, nn.Parameter) else self._buffers)[id(given)]

    def _run_initializers_at(self, path: str) -> None:
        """Run the initializers of the module at ``path`` and of the modules around it, and keep this module's tensors.

        Meanwhile these tensors have memory, other meta tensors have none, and copies replace the module's tensors with values.
        """
        owner = self._module.get_submodule(path)
        devices = [self._comm.device] if self._comm.device.type == "cuda" else []
        around = [self._module.get_submodule(each) for each in self_and_ancestors(path) if each not in self._with_values]
        modules = dict.fromkeys([*owner.modules(), *around])
        before: list[tuple[Any, Any]] = [(at, dict(at)) for each in modules for at in (each._parameters, each._buffers)]
        mine = {f"{path}.{k}".lstrip("."): (x, at) for at, given in before[:2] for k, x in given.items() if x is not None}
        values = (x for x in chain(owner.parameters(), owner.buffers()) if not x.is_meta)
        rooms = {id(x): _cpu_copy_or_nan_filled(x) for x in chain((x for x, _ in mine.values()), values)}
        try:
            for places, given in before:
                places.update({name: rooms[id(x)] for name, x in given.items() if id(x) in rooms})
            with torch.random.fork_rng(devices), torch.no_grad():
                unit = self._layout.unit_around(next(full for full, (x, _) in mine.items() if x.is_meta))
                torch.manual_seed(mesh_independent_seed(self._key, path, unit, self._comm.rank))
                for each in dict.fromkeys([owner, *around]):
                    if self._initialize is not None:
                        self._initialize(each)
                    elif fill := getattr(each, "reset_parameters", None) or getattr(each, "_reset_parameters", None):
                        fill()
            for full, (old, places) in mine.items():
                if old.is_meta and self._first_path.get(id(old), full) == full:
                    kept = self._parameters if isinstance(old, nn.Parameter) else self._buffers
                    new = places.get(full.rpartition(".")[2])
                    kept[id(old)] = self._value_after_initializer(full, old, rooms[id(old)], new)
        finally:
            for places, given in before:
                places.clear()
                places.update(given)

    def _value_after_initializer(
        self, path: str, meta: torch.Tensor, filled: torch.Tensor, new: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the value that an initializer has given to ``meta``, a meta tensor of its module. Record ``path`` if unfilled.

        ``filled``: the tensor that stood in for ``meta`` while the initializer ran. ``new``: the tensor that the module has
        afterwards: ``filled``, or another one. TreeError if ``new`` is None, or has another shape or dtype than ``meta``.
        """
        if new is None or (new.shape, new.dtype) != (meta.shape, meta.dtype):
            raise TreeError(
                f"shard_module(): {path!r} is {tensor_text(meta)}, and its initializer has replaced it by "
                f"{'None' if new is None else tensor_text(new)}. Fill it in place."
            )
        if new is filled and _still_has_unfilled_mark(new):
            self.unfilled.add(path)
        return new.detach().to(self._comm.device)


def _unfilled_error(module: nn.Module, paths: Iterable[str]) -> TreeError:
    owners: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        owners.setdefault(parent, []).append(name)
    rows = [(path or "(root)", f"{type(module.get_submodule(path)).__name__}: {', '.join(n)}") for path, n in owners.items()]
    what = "parameters or buffers on the meta device that nothing initializes."
    remedy = "Give these classes a reset_parameters() that fills their own parameters and buffers, pass initialize=, a "
    remedy += "function that does so for a submodule, or make the module on a real device."
    return TreeError(problem("shard_module()", what, rows, remedy))


def _cpu_copy_or_nan_filled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor for an initializer to fill: a copy, or for a meta tensor NaN or integers 0x55 as an unfilled mark."""
    mark = torch.nan if tensor.is_floating_point() or tensor.is_complex() else _UNWRITTEN_BYTE
    if tensor.is_meta:
        room = torch.full(tensor.shape, mark, dtype=tensor.dtype, device="cpu")
    else:
        room = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(room, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else room


def _still_has_unfilled_mark(x: torch.Tensor) -> bool:
    """Return whether ``x`` is unfilled: some element is NaN, or all integers are 0x55 and torch has counted no write."""
    if x.is_floating_point() or x.is_complex():
        return bool((x.float() if x.is_floating_point() else x).isnan().any())
    marked = x == torch.tensor(_UNWRITTEN_BYTE, dtype=x.dtype)
    return x.numel() > 0 and x._version == 0 and bool(marked.all())  # a write to .data does not change _version
