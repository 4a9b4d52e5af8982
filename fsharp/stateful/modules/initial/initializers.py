"""Values of what is on the meta device, made by the modules themselves: a submodule at a time, from the key and its path."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fsharp.errors import TreeError, problem
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.paths import ancestors
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.functional.materialize import seed_of
from fsharp.stateful.modules.initial.dtensors import local

Initialize = Callable[[nn.Module], None]
_MARK = 0x55  # an integer that nobody has written
_drawing = threading.Lock()  # ranks that are threads share the generator


class Initializers:
    """Parameters and buffers of a submodule at a time, which the submodule fills itself, in memory on the CPU.

    One with ``_reset_parameters()`` and no ``reset_parameters()``, such as ``nn.MultiheadAttention``, changes those of its
    submodules too, and is made with them, after they have filled theirs. What is drawn depends on the key, a submodule's path,
    and the rank's coordinates along axes on which its parameters vary.

    Attributes:
        unfilled: paths of tensors that were left as they were, so far.
    """

    def __init__(self, module: nn.Module, layout: Layout, comm: Comm, key: int, initialize: Initialize | None) -> None:
        self._module, self._layout, self._comm, self._key, self._initialize = module, layout, comm, key, initialize
        self.unfilled: set[str] = set()
        self._made: tuple[str | None, dict[str, torch.Tensor]] = None, {}
        self._buffers: dict[int, torch.Tensor] = {}  # by the meta tensor: modules may share one

    def value(self, unit: UnitLayout, leaf: Leaf) -> torch.Tensor:
        """Return one leaf in full, made by the module's initializer."""
        path = unit.full_path(leaf)
        given = self._module.get_parameter(path)
        if not given.is_meta:
            return local(given.detach()).to(self._comm.device)  # type: ignore[no-any-return]
        root = self._root(path.rpartition(".")[0])
        if root != self._made[0]:
            self._made = root, self._make(root)
        return self._made[1][path]

    def buffers(self) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """Return for each buffer on the meta device where it sits, its name there, and its value."""
        found = []
        for path, each in self._module.named_modules():
            for name, buffer in each._buffers.items():
                if buffer is not None and buffer.is_meta:
                    if id(buffer) not in self._buffers:
                        self._make(self._root(path))
                    found.append((each._buffers, name, self._buffers[id(buffer)]))
        return found

    def _root(self, path: str) -> str:
        """Return the path of the outermost module that the one at ``path`` is made with."""
        return next((above for above in reversed(list(ancestors(path))) if self._is_whole(above)), path)

    def _is_whole(self, path: str) -> bool:
        """Return whether a module is made together with all of its submodules."""
        module = self._module.get_submodule(path)
        public, private = (hasattr(module, name) for name in ("reset_parameters", "_reset_parameters"))
        own = [*module._parameters.values(), *module._buffers.values()]
        return self._initialize is None and private and not public and any(x is not None and x.is_meta for x in own)

    def _make(self, path: str) -> dict[str, torch.Tensor]:
        """Return parameters by path, and keep buffers, of a module and of those that are made with it."""
        root = self._module.get_submodule(path)
        members = dict(root.named_modules(prefix=path)) if self._is_whole(path) else {path: root}
        before: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            (name, places, dict(places)) for name, each in members.items() for places in (each._parameters, each._buffers)
        ]
        rows = [(f"{n}.{k}".lstrip("."), n, x, k, old) for n, x, given in before for k, old in given.items() if old is not None]
        rooms, made = {id(old): _room(old) for *_, old in rows}, dict[str, torch.Tensor]()
        try:
            for *_, places, key, old in rows:
                places[key] = rooms[id(old)]
            with _drawing, torch.random.fork_rng([]), torch.no_grad():
                for name, each in reversed(members.items()):  # submodules come first
                    mine = [full for full, owner, *_, old in rows if owner == name and old.is_meta]
                    if mine:
                        torch.manual_seed(seed_of(self._key, name, self._layout.unit_around(mine[0]), self._comm.rank))
                        self._fill(each)
            for full, _, places, key, old in rows:
                if old.is_meta:
                    value = self._taken(full, old, rooms[id(old)], places.get(key))
                    if isinstance(old, nn.Parameter):
                        made[full] = value
                    else:
                        self._buffers[id(old)] = value
        finally:
            for _, places, given in before:
                places.clear()
                places.update(given)
        return made

    def _fill(self, module: nn.Module) -> None:
        if self._initialize is not None:
            self._initialize(module)
        elif method := getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None):
            method()

    def _taken(self, path: str, old: torch.Tensor, room: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
        """Return what an initializer has made of a tensor on the meta device, for which it got ``room``."""
        if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
            raise TreeError(
                f"shard_module(): {path!r} is {_about(old)}, and its initializer has made it "
                f"{'nothing' if new is None else _about(new)}. Fill it in place."
            )
        if new is room and _is_unfilled(new):
            self.unfilled.add(path)
        return new.detach().to(self._comm.device)


def nothing_initializes(module: nn.Module, paths: Iterable[str]) -> TreeError:
    """Return an error that names tensors, by the modules that have them."""
    owners: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        owners.setdefault(parent, []).append(name)
    rows = [(path or "(root)", f"{type(module.get_submodule(path)).__name__}: {', '.join(n)}") for path, n in owners.items()]
    return TreeError(
        problem(
            "shard_module()",
            "parameters or buffers on the meta device that nothing initializes.",
            rows,
            "Give these classes a reset_parameters() that fills their own parameters and buffers, pass initialize=, a function "
            "that does so for a submodule, or make the module on a real device.",
        )
    )


def _room(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory on the CPU for a tensor: marked if the tensor is on the meta device, and otherwise a copy of it."""
    mark = torch.nan if tensor.is_floating_point() or tensor.is_complex() else _MARK
    if tensor.is_meta:
        room = torch.full(tensor.shape, mark, dtype=tensor.dtype, device="cpu")
    else:
        room = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(room, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else room


def _is_unfilled(x: torch.Tensor) -> bool:
    """Return whether nobody has written to a tensor, or to a part of one of floating-point numbers."""
    if x.is_floating_point() or x.is_complex():
        return bool((x.float() if x.is_floating_point() else x).isnan().any())
    marked = x == torch.tensor(_MARK, dtype=x.dtype)
    return x.numel() > 0 and x._version == 0 and bool(marked.all())  # versions do not see a write to .data


def _about(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
