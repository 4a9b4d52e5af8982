"""Initial values of a module's parameters on this rank: cut from those it has, or made where it has none yet."""

from functools import partial
from typing import Any

import optree
import torch
from torch import nn

from fsharp.functional.agree import exchange, together
from fsharp.functional.comm import Comm
from fsharp.functional.describe import describe_units
from fsharp.functional.layout import Layout
from fsharp.functional.materialize import shard
from fsharp.functional.sharded import build, resolve_place
from fsharp.stateful.makers import Initialize, Makers, nothing_initializes


def initial_values(
    module: nn.Module, tree: Any, layout: Layout, comm: Comm, *, key: int, initialize: Initialize | None = None
) -> Any:
    """Shards at the optimizer's place. Buffers on the meta device are given values.

    Args:
        module: its submodules initialize what is on the meta device.
        tree: the parameters of the module.
        layout: of that tree.
        comm: the ranks.
        key: seed. What a submodule draws depends on the key and its path alone.
        initialize: called for a submodule instead of its own ``reset_parameters()``.

    Raises:
        TreeError: tensors on the meta device that nothing initializes: on all ranks, by their paths.
        AgreementError: ranks that differ.

    Cost: memory of the shards, and of what is made at once in full: one submodule's own parameters.
    """
    leaves: list[torch.Tensor] = optree.tree_leaves(tree)
    if not any(tensor.is_meta for tensor in (*leaves, *module.buffers())):
        return shard(tree, layout, comm, place="optim")
    makers = Makers(module, layout, comm, key, initialize)

    def check() -> None:
        if orphans := makers.orphans():
            raise nothing_initializes(module, orphans)

    how = {"key": repr(key), "initialize": getattr(initialize, "__qualname__", type(initialize).__qualname__)}
    together("ShardedModule()", comm, check, lambda _: {**describe_units(layout.units), **how})

    def make() -> Any:
        nodes = [build(u, resolve_place(u, "optim"), comm.rank, partial(makers.value, u), main=True) for u in layout.units]
        return nodes, makers.buffers()

    nodes, buffers = together("ShardedModule()", comm, make)
    unfilled = {path for text in exchange("\n".join(makers.unfilled), comm) for path in text.split("\n") if path}
    if unfilled:
        raise nothing_initializes(module, sorted(unfilled))
    for places, name, value in buffers:
        places[name] = value
    return optree.tree_unflatten(layout.spec, nodes)
