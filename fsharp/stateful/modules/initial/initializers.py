"""Values of what is on the meta device, made by the modules themselves: a submodule at a time, from the key and its path."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from fsharp.errors import TreeError, problem
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.functional.materialize import seed_of
from fsharp.stateful.modules.initial.dtensors import local

Initialize = Callable[[nn.Module], None]
_MARK = 0x55  # an integer that nobody has written
_drawing = threading.Lock()  # ranks that are threads share the generator


class Initializers:
    """Parameters and buffers of a submodule at a time, as it initializes them.

    A submodule fills its own tensors, in memory on the CPU. One that has ``_reset_parameters()`` and no
    ``reset_parameters()``, such as ``nn.MultiheadAttention``, changes those of its submodules too, and is made with them, after
    they have filled theirs.

    Args:
        module: the root, which is not changed.
        layout: of its parameters.
        comm: the ranks. Values are drawn on the CPU, so they are the same everywhere.
        key: seed. What a submodule draws depends on the key and its path alone, and on the rank's coordinates along axes on
            which its parameters vary.
        initialize: called for a submodule instead of its own ``reset_parameters()``.

    Attributes:
        unfilled: paths of tensors that an initializer has left as they were, so far.
    """

    def __init__(self, module: nn.Module, layout: Layout, comm: Comm, key: int, initialize: Initialize | None) -> None:
        self._module, self._device, self._initialize = module, comm.device, initialize
        self._seed = lambda name, path: seed_of(key, name, layout.unit_around(path), comm.rank)
        self.unfilled: set[str] = set()
        self._roots: dict[str, str] = {}  # by path of a module, the outermost one that it is made together with
        for path, each in module.named_modules(remove_duplicate=False):  # a module comes before those in it
            above = self._roots.get(path.rpartition(".")[0])
            if above is not None or self._is_whole(each):
                self._roots[path] = path if above is None else above
        self._made: tuple[str | None, dict[str, torch.Tensor]] = None, {}
        self._buffers: dict[int, torch.Tensor] = {}  # by the meta tensor: modules may share one

    def orphans(self) -> list[str]:
        """Return paths of tensors on the meta device that no method is there for."""
        return [
            name
            for path, each in self._module.named_modules()
            if self._roots.get(path, path) == path and self._method(each) is None
            for name, *_ in _meta_tensors(path, each)
        ]

    def value(self, unit: UnitLayout, leaf: Leaf) -> torch.Tensor:
        """Return one leaf in full, made by the module's initializer."""
        path = unit.full_path(leaf)
        given = self._module.get_parameter(path)
        if not given.is_meta:
            return local(given.detach()).to(self._device)  # type: ignore[no-any-return]
        root = self._roots.get(parent := path.rpartition(".")[0], parent)
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
                        self._make(self._roots.get(path, path))
                    found.append((each._buffers, name, self._buffers[id(buffer)]))
        return found

    def _is_whole(self, module: nn.Module) -> bool:
        """Return whether a module is made together with all of its submodules."""
        public, private = (hasattr(module, name) for name in ("reset_parameters", "_reset_parameters"))
        return self._initialize is None and private and not public and any(_meta_tensors("", module))

    def _method(self, module: nn.Module) -> Callable[[], Any] | None:
        """Return a function that fills a module's own tensors; None if there is none."""
        if self._initialize is not None:
            return partial(self._initialize, module)
        return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)

    def _make(self, path: str) -> dict[str, torch.Tensor]:
        """Return parameters by path, and keep buffers, of a module and of those that are made with it."""
        root = self._module.get_submodule(path)
        members = dict(root.named_modules(prefix=path)) if self._is_whole(root) else {path: root}
        meta = {name: list(_meta_tensors(name, each)) for name, each in members.items()}
        made = {}
        with _rooms(members.values()) as rooms, _drawing, torch.random.fork_rng([]), torch.no_grad():
            for name, each in reversed(members.items()):  # submodules come first
                method = self._method(each)
                if method is not None and meta[name]:
                    torch.manual_seed(self._seed(name, meta[name][0][0]))
                    method()
            for tensor_path, places, key, old in chain.from_iterable(meta.values()):
                new, is_parameter = places.get(key), isinstance(old, nn.Parameter)
                if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise TreeError(
                        f"shard_module(): {tensor_path!r} is {_about(old)}, and its initializer has made it "
                        f"{'nothing' if new is None else _about(new)}. Fill it in place."
                    )
                if new is rooms[id(old)] and _is_unfilled(new, is_parameter=is_parameter):
                    self.unfilled.add(tensor_path)
                if is_parameter:
                    made[tensor_path] = new.detach().to(self._device)
                else:
                    self._buffers[id(old)] = new.detach().to(self._device)
        return made


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


def _meta_tensors(path: str, module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Yield path, dict, name there and tensor of what a module itself, and no child of it, has on the meta device."""
    for places in (module._parameters, module._buffers):
        for name, tensor in places.items():
            if tensor is not None and tensor.is_meta:
                yield f"{path}.{name}".lstrip("."), places, name, tensor


@contextmanager
def _rooms(modules: Collection[nn.Module]) -> Iterator[dict[int, torch.Tensor]]:
    """In this context these modules have tensors on the CPU, tied where theirs are. Yield them by the id of what they had."""
    every: list[dict[str, Any]] = [places for each in modules for places in (each._parameters, each._buffers)]
    before, rooms = [dict(places) for places in every], dict[int, torch.Tensor]()
    try:
        for places in every:
            for name, tensor in places.items():
                if tensor is not None:
                    if id(tensor) not in rooms:
                        room = _room(tensor)
                        rooms[id(tensor)] = (
                            nn.Parameter(room, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else room
                        )
                    places[name] = rooms[id(tensor)]
        yield rooms
    finally:
        for places, given in zip(every, before, strict=True):
            places.clear()
            places.update(given)


def _room(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor.detach().to("cpu", copy=True)
    mark = torch.nan if tensor.is_floating_point() or tensor.is_complex() else _MARK
    return torch.full(tensor.shape, mark, dtype=tensor.dtype, device="cpu")


def _is_unfilled(tensor: torch.Tensor, *, is_parameter: bool) -> bool:
    """Return whether nobody has written to a tensor; of parameters, to all of it. Versions do not see a write to ``.data``."""
    if tensor.is_floating_point() or tensor.is_complex():
        marked = (tensor.float() if tensor.is_floating_point() else tensor).isnan()
        if is_parameter:
            return bool(marked.any())
    else:
        marked = tensor == torch.tensor(_MARK, dtype=tensor.dtype)
    return tensor.numel() > 0 and tensor._version == 0 and bool(marked.all())


def _about(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
