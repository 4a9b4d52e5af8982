"""Initial values of a module's parameters on this rank: cut from those it has, or made where it has none yet."""

import hashlib
import threading
from functools import partial
from typing import Any

import optree
import torch
from torch import nn

from fsharp.functional.agree import together
from fsharp.functional.comm import Comm
from fsharp.functional.describe import describe_units
from fsharp.functional.errors import TreeError, problem
from fsharp.functional.layout import Layout, Leaf, UnitLayout
from fsharp.functional.materialize import shard
from fsharp.functional.sharded import build, resolve_place

_drawing = threading.Lock()  # ranks that are threads share the generator


def initial_values(module: nn.Module, tree: Any, layout: Layout, comm: Comm, *, key: int) -> Any:
    """Shards at the optimizer's place.

    Args:
        module: its submodules initialize what is on the meta device.
        tree: the parameters of the module.
        layout: of that tree.
        comm: the ranks.
        key: seed. What a submodule draws depends on the key and its path alone.

    Raises:
        TreeError: parameters on the meta device of a module without ``reset_parameters()``.
        AgreementError: ranks that differ.

    Cost: memory of the shards, and of one submodule's own parameters in full.
    """
    leaves: list[torch.Tensor] = optree.tree_leaves(tree)
    if not any(leaf.is_meta for leaf in leaves):
        return shard(tree, layout, comm, place="optim")
    together("ShardedModule()", comm, lambda: _check(module), lambda _: {**describe_units(layout.units), "key": repr(key)})
    makers = _Makers(module, comm.device, key)
    nodes = [build(u, resolve_place(u, "optim"), comm.rank, partial(makers.value, u), main=True) for u in layout.units]
    for path, buffer in module.named_buffers():
        if buffer.is_meta:
            raise TreeError(
                f"ShardedModule(): buffer {path!r} is on the meta device; give it a value before, buffers are not sharded."
            )
    return optree.tree_unflatten(layout.spec, nodes)


def _check(module: nn.Module) -> None:
    orphans = [
        (path or "(root)", type(each).__name__)
        for path, each in module.named_modules()
        if any(p.is_meta for p in each.parameters(recurse=False)) and not callable(getattr(each, "reset_parameters", None))
    ]
    if orphans:
        raise TreeError(
            problem(
                "ShardedModule()",
                "parameters on the meta device that nothing initializes.",
                orphans[:8],
                "Give these classes a reset_parameters() that fills their own parameters, or make the module on a real device.",
            )
        )


class _Makers:
    """Parameters of a submodule at a time, as its ``reset_parameters()`` makes them."""

    def __init__(self, module: nn.Module, device: torch.device, key: int) -> None:
        self.module, self.device, self.key = module, device, key
        self._path: str | None = None
        self._values: dict[str, torch.Tensor] = {}

    def value(self, unit: UnitLayout, leaf: Leaf) -> torch.Tensor:
        """One leaf in full."""
        parent, _, name = unit.full_path(leaf).rpartition(".")
        given: torch.Tensor = self.module.get_submodule(parent)._parameters[name]  # type: ignore[assignment]
        if not given.is_meta:
            return given.detach().to(self.device)
        if parent != self._path:
            self._path, self._values = parent, self._make(parent)
        return self._values[name]

    def _make(self, path: str) -> dict[str, torch.Tensor]:
        owner = self.module.get_submodule(path)
        before = dict(owner._parameters)
        seed = int.from_bytes(hashlib.sha256(f"{self.key}:{path}".encode()).digest()[:8], "little") >> 1
        try:
            for name, parameter in before.items():
                if parameter is not None:  # values are drawn on the CPU, so they are the same everywhere
                    room = torch.empty_like(parameter, device="cpu") if parameter.is_meta else parameter.detach().clone()
                    owner._parameters[name] = nn.Parameter(room, parameter.requires_grad)
            with _drawing, torch.random.fork_rng([]), torch.no_grad():
                torch.manual_seed(seed)
                owner.reset_parameters()  # type: ignore[operator]
            return {name: p.detach().to(self.device) for name, p in owner._parameters.items() if p is not None}
        finally:
            owner._parameters.update(before)
