"""Values of what is on the meta device, made by the modules themselves: a submodule at a time, from the key and its path."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fsharp.errors import TreeError, problem
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.functional.materialize import seed_of
from fsharp.stateful.modules.initial.dtensors import local

Initialize = Callable[[nn.Module], None]
_NAMES = ("reset_parameters", "_reset_parameters")
_MARK = 0x55  # an integer that nobody has written
_drawing = threading.Lock()  # ranks that are threads share the generator


class _Slot(NamedTuple):
    """Where a parameter or buffer sits."""

    owner: str
    places: dict[str, Any]
    name: str
    tensor: torch.Tensor
    is_parameter: bool

    @property
    def path(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


def _slots(owner: str, module: nn.Module) -> list[_Slot]:
    """The parameters and buffers that a module holds itself, not those of its children."""
    kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    found = [(places, name, tensor) for places in kinds for name, tensor in places.items() if tensor is not None]
    return [_Slot(owner, *each, is_parameter=each[0] is kinds[0]) for each in found]


class Initializers:
    """Parameters and buffers of a submodule at a time, as it initializes them.

    A submodule fills its own tensors. One that has ``_reset_parameters()`` and no ``reset_parameters()``, such as
    ``nn.MultiheadAttention``, changes those of its submodules too, and is made with them, after they have filled theirs.

    Args:
        module: the root; as it was before, whatever happens.
        layout: of its parameters.
        comm: the ranks. Values are drawn on the CPU, so they are the same everywhere.
        key: seed. What a submodule draws depends on the key and its path alone, and on the rank's coordinates along axes on
            which its parameters vary.
        initialize: called for a submodule instead of its own ``reset_parameters()``.

    Attributes:
        unfilled: paths of tensors that an initializer has left as they were, so far.
    """

    def __init__(self, module: nn.Module, layout: Layout, comm: Comm, key: int, initialize: Initialize | None) -> None:
        self.module, self.device, self.initialize = module, comm.device, initialize
        self._seed = lambda name, path: seed_of(key, name, layout.unit_around(path), comm.rank)
        self.unfilled: set[str] = set()
        self._roots = _roots(module) if initialize is None else {}
        self._path: str | None = None
        self._values: dict[str, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}  # by the meta tensor: modules may share one

    def orphans(self) -> list[str]:
        """Paths of tensors on the meta device that no method is there for."""
        found = []
        for path, each in self.module.named_modules():
            if self.initialize is None and not _whole(each) and self._root(path) == path and _method(each) is None:
                found += [slot.path for slot in _slots(path, each) if slot.tensor.is_meta]
        return found

    def value(self, unit: UnitLayout, leaf: Leaf) -> torch.Tensor:
        """One leaf in full, made by the module's initializer."""
        path = unit.full_path(leaf)
        parent, _, name = path.rpartition(".")
        given: torch.Tensor = self.module.get_submodule(parent)._parameters[name]  # type: ignore[assignment]
        if not given.is_meta:
            return local(given.detach()).to(self.device)  # type: ignore[no-any-return]
        root = self._root(parent)
        if root != self._path:
            self._path, self._values = root, self._make(root)
        return self._values[path]

    def buffers(self) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """For each buffer on the meta device where it sits, its name there, and its value."""
        found = []
        for path, each in self.module.named_modules():
            for slot in _slots(path, each):
                if slot.tensor.is_meta and not slot.is_parameter:
                    if id(slot.tensor) not in self._buffers:
                        self._make(self._root(path))
                    found.append((slot.places, slot.name, self._buffers[id(slot.tensor)]))
        return found

    def _root(self, path: str) -> str:
        """The module that a submodule is made with."""
        return self._roots.get(path, path)

    def _make(self, path: str) -> dict[str, torch.Tensor]:
        root = self.module.get_submodule(path)
        members = dict(root.named_modules(prefix=path)) if self.initialize is None and _whole(root) else {path: root}
        slots = [slot for name, member in members.items() for slot in _slots(name, member)]
        meta = [slot for slot in slots if slot.tensor.is_meta]
        with _rooms(slots), _drawing, torch.random.fork_rng([]), torch.no_grad():
            stamps = [(slot.places[slot.name], slot.places[slot.name]._version) for slot in meta]
            for name, member in reversed(members.items()):  # submodules come first
                act = self._act(member)
                mine = [slot.path for slot in meta if slot.owner == name]
                if act is not None and mine:
                    torch.manual_seed(self._seed(name, mine[0]))
                    act()
            return self._collected(meta, stamps)

    def _act(self, member: nn.Module) -> Callable[[], Any] | None:
        if self.initialize is not None:
            initialize = self.initialize
            return lambda: initialize(member)
        return _method(member)

    def _collected(self, slots: Sequence[_Slot], stamps: Sequence[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        made = {}
        for slot, (room, version) in zip(slots, stamps, strict=True):
            old, new = slot.tensor, slot.places.get(slot.name)
            if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                raise TreeError(
                    f"shard_module(): {slot.path!r} is {_about(old)}, and its initializer has made it "
                    f"{'nothing' if new is None else _about(new)}. Fill it in place."
                )
            if new is room and _is_unfilled(new, version, is_parameter=slot.is_parameter):
                self.unfilled.add(slot.path)
            value = new.detach().to(self.device)
            if slot.is_parameter:
                made[slot.path] = value
            else:
                self._buffers[id(old)] = value
        return made


def nothing_initializes(module: nn.Module, paths: Iterable[str]) -> TreeError:
    """An error that names tensors, by the modules that have them."""
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


@contextmanager
def _rooms(slots: Sequence[_Slot]) -> Iterator[None]:
    """Within this context there are tensors on the CPU in these slots, tied where theirs are."""
    before = [(places, dict(places)) for places in {id(slot.places): slot.places for slot in slots}.values()]
    rooms: dict[int, torch.Tensor] = {}
    try:
        for slot in slots:
            if id(slot.tensor) not in rooms:
                room = _room(slot.tensor)
                rooms[id(slot.tensor)] = nn.Parameter(room, slot.tensor.requires_grad) if slot.is_parameter else room
            slot.places[slot.name] = rooms[id(slot.tensor)]
        yield
    finally:
        for places, given in before:
            places.clear()
            places.update(given)


def _room(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor.detach().to("cpu", copy=True)
    room = torch.empty_like(tensor, device="cpu", requires_grad=False).detach()
    return room.fill_(torch.nan if room.is_floating_point() or room.is_complex() else _MARK)


def _is_unfilled(tensor: torch.Tensor, version: int, *, is_parameter: bool) -> bool:
    """Whether nobody has written to it; of parameters, to all of it. ``.data`` is written to unnoticed by its version."""
    if not tensor.numel():
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor._version == version and bool((tensor == torch.tensor(_MARK, dtype=tensor.dtype)).all())
    marked = (tensor.float() if tensor.is_floating_point() else tensor).isnan()
    return bool(marked.any()) if is_parameter else tensor._version == version and bool(marked.all())


def _own_meta(module: nn.Module) -> list[str]:
    return [slot.name for slot in _slots("", module) if slot.tensor.is_meta]


def _method(module: nn.Module) -> Callable[[], Any] | None:
    """What fills a module's own tensors."""
    names = (*_NAMES, *(() if any(p is not None for p in module._parameters.values()) else ("reset_running_stats",)))
    return next((getattr(module, name) for name in names if callable(getattr(module, name, None))), None)


def _whole(module: nn.Module) -> bool:
    """Whether it is made together with all of its submodules."""
    public, private = (callable(getattr(module, name, None)) for name in _NAMES)
    return private and not public and bool(_own_meta(module))


def _roots(module: nn.Module) -> dict[str, str]:
    """Return the outermost module that is made whole, by path of each module that is made with it."""
    roots: dict[str, str] = {}
    for path, each in module.named_modules(remove_duplicate=False):  # a module comes before those in it
        above = roots.get(path.rpartition(".")[0])
        if above is not None or _whole(each):
            roots[path] = path if above is None else above
    return roots


def _about(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
