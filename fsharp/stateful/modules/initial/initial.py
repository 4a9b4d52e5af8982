"""Initial values of a module's parameters on this rank: cut from those it has or one rank has, or made where there are none."""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import optree
import torch
from torch import nn

from fsharp.errors import MeshError, TreeError
from fsharp.functional.comm.agree import exchange, together
from fsharp.functional.comm.equal_values import check_same, taken
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.te import plain_value
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import resolve_place
from fsharp.functional.layout.slicing import build, shard_for
from fsharp.functional.layout.text import describe_units
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.stateful.modules.initial.dtensors import local
from fsharp.stateful.modules.initial.initializers import Initialize, Initializers, nothing_initializes

SEED_ALIKE = (
    "Seed all ranks alike before the module is made, load the same checkpoint, or pass sync_from=0, to take rank 0's values."
)


def initial_values(
    module: nn.Module,
    tree: Any,
    layout: Layout,
    comm: Comm,
    *,
    key: int,
    initialize: Initialize | None = None,
    sync_from: int | None = None,
    settings: Mapping[str, str] = {},
) -> Any:
    """Return shards at the optimizer's place. Buffers on the meta device are given values.

    Arguments are those of :func:`~fsharp.shard_module`; ``settings``: more that ranks compare, text by name.

    Cost: memory of the shards, and of what is made or taken at once in full: one submodule's own parameters, or a unit.
    """
    tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    meta = [path for path, tensor in tensors if tensor.is_meta]
    buffers = [f"{path}: {b.dtype}{list(b.shape)}" for path, b in module.named_buffers(remove_duplicate=False)]
    how = {
        "key": repr(key),
        "initialize": getattr(initialize, "__qualname__", type(initialize).__qualname__),
        "sync_from": repr(sync_from),
        **settings,
        **({"on the meta device": "\n".join(meta)} if sync_from is None else {"buffers": "\n".join(buffers)}),
    }
    together(
        "shard_module()", comm, lambda: _check_source(sync_from, comm, meta), lambda _: {**describe_units(layout.units), **how}
    )
    if sync_from is not None:
        return _synced(module, layout, comm, sync_from)
    leaves = [(unit, leaf) for unit in layout.units for leaf in unit.leaves if not leaf.tied_to]
    own = {unit.full_path(leaf): _parameter(module, unit, leaf) for unit, leaf in leaves}
    varying = {unit.full_path(leaf): unit.strategy.full.varying for unit, leaf in leaves}
    present = {path: tensor for path, tensor in own.items() if not tensor.is_meta}
    check_same("shard_module()", present, comm, remedy=SEED_ALIKE, varying=varying)
    if not meta:
        return shard_for(tree, layout, comm.rank, place="optim")
    makers = Initializers(module, layout, comm, key, initialize)

    def make() -> Any:
        nodes = [build(u, resolve_place(u, "optim"), comm.rank, partial(makers.value, u), main=True) for u in layout.units]
        return nodes, makers.buffers()

    nodes, made = together("shard_module()", comm, make)
    unfilled = {path for text in exchange("\n".join(makers.unfilled), comm) for path in text.split("\n") if path}
    if unfilled:
        raise nothing_initializes(module, sorted(unfilled))
    for places, name, value in made:
        places[name] = value
    return optree.tree_unflatten(layout.spec, nodes)


def _check_source(source: int | None, comm: Comm, meta: list[str]) -> None:
    if source is None:
        return
    if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < comm.mesh.size:
        raise MeshError(
            f"shard_module(sync_from=...): got {source!r}, expected a rank of {comm.mesh}, 0 to {comm.mesh.size - 1}."
        )
    if comm.rank == source and meta:
        raise TreeError(
            f"shard_module(sync_from={source}): {meta[0]!r} of rank {source} is on the meta device. Make the module on a real "
            "device there, or leave sync_from out on all ranks: submodules initialize themselves, alike on all ranks."
        )


def _synced(module: nn.Module, layout: Layout, comm: Comm, source: int) -> Any:
    """From what one rank has, a unit at a time; its buffers become everybody's, those of what varies along an axis apart."""
    nodes = []
    for unit in layout.units:
        own, varying = [leaf for leaf in unit.leaves if not leaf.tied_to], unit.strategy.full.varying
        whole = {leaf: taken(_parameter(module, unit, leaf), source, comm, varying=varying) for leaf in own}
        nodes.append(build(unit, resolve_place(unit, "optim"), comm.rank, whole.__getitem__, main=True))
    new: dict[int, torch.Tensor] = {}
    for path, buffer in module.named_buffers(remove_duplicate=False):
        around, mine = layout.unit_around(path), local(buffer.detach())
        value = taken(mine, source, comm, varying=() if around is None else around.strategy.full.varying)
        parent, _, name = path.rpartition(".")
        if mine.is_meta or 0 in mine.stride():  # one that several modules share stays one; an expanded one cannot be written to
            module.get_submodule(parent)._buffers[name] = new.setdefault(id(buffer), value)
        else:
            mine.copy_(value)
    return optree.tree_unflatten(layout.spec, nodes)


def _parameter(module: nn.Module, unit: UnitLayout, leaf: Leaf) -> torch.Tensor:
    return local(plain_value(module.get_parameter(unit.full_path(leaf))))  # type: ignore[no-any-return]
