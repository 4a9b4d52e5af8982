"""ModuleCalls: the code of a module and of the modules in it, called with units gathered and full parameters in their slots."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import optree
import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from fsharp.errors import TreeError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.paths import innermost, prefixes
from fsharp.functional.layout.sharded import units_by_name
from fsharp.functional.release import cloned
from fsharp.stateful.modules.initial.dtensors import Spec, dressed, local
from fsharp.stateful.modules.parameter import ShardedParameter
from fsharp.stateful.modules.selection import owners
from fsharp.stateful.modules.values.outputs import reaching, replaced, tensors_in, views_of
from fsharp.stateful.modules.values.side_outputs import SideOutputs
from fsharp.torch_compile import compiled_by_caller, uncompiled

_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
"""Types of which torch's pytrees have no nodes."""


class ParameterSlots:
    """The places of one unit's parameters in a module, in the order of the unit's leaves.

    ``present`` has by place what was put there last, of all units of a module: several have a place that they share.
    """

    def __init__(self, module: nn.Module, paths: Iterable[str], present: dict[tuple[int, str], Any]) -> None:
        self._places: list[tuple[int, dict[str, Any], str]] = []
        self._paths, self._present = list(paths), present
        packed: dict[int, weakref.ref[nn.Module]] = {}
        known: set[tuple[int, str]] = set()
        for i, path in enumerate(self._paths):
            parent, _, name = path.rpartition(".")
            owner = module.get_submodule(parent)
            if (id(owner), name) not in known:  # a module may have several paths
                known.add((id(owner), name))
                self._places.append((i, owner._parameters, name))
            if hasattr(owner, "_flat_weights_names"):
                packed[id(owner)] = weakref.ref(owner)
        self._packed = list(packed.values())  # recurrent modules keep a list of their parameters besides

    def check(self) -> None:
        """Refuse to compute where somebody else has put other parameters: they would be ignored."""
        for i, places, name in self._places:
            if places.get(name) is not self._present[id(places), name]:
                raise TreeError(
                    f"parameter {self._paths[i]!r} is not there, or is not the one that shard_module() has put there, and a "
                    "forward computes with that one. Write values in `with model.unsharded(write=True):`; replace, tie and "
                    "parametrize before shard_module(); in place of torch.func.functional_call() take "
                    "`fn, params = model.functional()`."
                )

    @property
    def sitting(self) -> list[tuple[int, Any]]:
        """What sits there, with the position of its path."""
        return [(i, places[name]) for i, places, name in self._places]

    def swap(self, tensors: Sequence[Any]) -> list[Any]:
        """Seat these, one for each path; what sat there before."""
        before = list(tensors)
        for i, places, name in self._places:
            before[i] = places[name]
            places[name] = self._present[id(places), name] = tensors[i]
        for reference in self._packed:
            owner: Any = reference()
            owner.__dict__["_flat_weights"] = [getattr(owner, name, None) for name in owner._flat_weights_names]
        return before


@contextmanager
def own_buffers(root: nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """In this context all buffers are copies; what each is a copy of, and the copy. One that modules share stays one."""
    before = [(module, dict(module._buffers)) for module in root.modules() if module._buffers]
    copies = {id(b): (b, b.clone()) for _, buffers in before for b in buffers.values() if b is not None}
    try:
        for module, buffers in before:
            module._buffers.update({name: b if b is None else copies[id(b)][1] for name, b in buffers.items()})
        yield list(copies.values())
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


def refuse_added(module: nn.Module, path: str) -> None:
    """Refuse parameters that require a gradient and came into a gathered module after it was sharded.

    Frozen parameters may be added, and a wrapper may replace the submodule that it wraps. Modules in it that are gathered by
    themselves are left out.
    """
    modules = [module]
    for each in modules:
        for parameter in each._parameters.values():
            if parameter is None or isinstance(parameter, ShardedParameter):
                continue
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad:  # full ones within calls are plain tensors
                name = next(name for name, found in module.named_parameters(path) if found is parameter)
                raise TreeError(
                    f"parameter {name!r} came into the module after shard_module(), and has no gradient and no optimizer "
                    "state: it would not be trained. Add the parameter before shard_module(); or freeze it by "
                    "requires_grad_(False), and each rank uses its own values."
                )
        for child in each._modules.values():
            if child is not None and "_fsharp_own" not in child.__dict__:  # else the child is gathered by itself
                modules.append(child)


class ParameterSource:
    """The source of parameters for modules that compute: nodes of a tree, by unit, and the Comm.

    ``computing``: modules whose forward is under way, with their units gathered.
    """

    __slots__ = ("comm", "computing", "nodes")

    def __init__(self, tree: Any, comm: Comm) -> None:
        self.nodes, self.comm = units_by_name(tree), comm
        self.computing: list[nn.Module] = []


class GatheredModule(NamedTuple):
    """The root, or a module that is gathered by itself.

    ``ties``: other units, which store leaves that leaves of its units are tied to. ``has_inner``: whether modules inside of it
    are gathered by themselves. ``varies``: whether a unit varies along an axis. A rank there may have nothing to compute, as
    where an expert gets no tokens. The rank has a backward all the same, so that other ranks do not wait.
    """

    units: Sequence[str]
    ties: Sequence[str]
    side_outputs: SideOutputs
    has_inner: bool
    varies: bool


class ModuleCalls:
    """The state of calls of a module's code: slots and specs of parameters, gathered modules by path, the present source.

    Each forward reads the set ``paused``, paths of parameters that forwards do not differentiate.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, chosen: Sequence[str], specs: Mapping[str, Spec], paused: Collection[str]
    ) -> None:
        self._layout, self.specs, self._paused = layout, specs, paused
        present: dict[tuple[int, str], Any] = {}
        self.slots = {
            unit.name: ParameterSlots(module, [unit.full_path(leaf) for leaf in unit.leaves], present) for unit in layout.units
        }
        by_path = owners(layout, chosen)
        members: dict[str, list[nn.Module]] = {path: [] for path in by_path}
        for path, each in module.named_modules():
            members[innermost(path, by_path) or ""].append(each)
        has_inner = set(prefixes(by_path).values())
        self.owners = {
            path: GatheredModule(
                units=names,
                ties=sorted({tied for name in names for tied in layout[name].tied_units} - set(names)),
                side_outputs=SideOutputs(members[path]),
                has_inner=path in has_inner,
                varies=any(layout[name].strategy.full.varying for name in names),
            )
            for path, names in by_path.items()
        }
        self.source: ParameterSource | None = None

    @contextmanager
    def reading(self, source: ParameterSource, module: nn.Module | None = None) -> Iterator[None]:
        """Have modules that are called in this context read ``source``.

        ``module`` has its parameters: its own methods run directly.
        """
        before, self.source = self.source, source
        others = before.computing if before is not None and before is not source else []
        for each in others:
            each.__dict__["_fsharp_computes"] = False
        if module is not None:
            source.computing.append(module)
            module.__dict__["_fsharp_computes"] = True
        try:
            yield
        finally:
            self.source = before
            if module is not None:
                module.__dict__["_fsharp_computes"] = False
                source.computing.pop()
            for each in others:
                each.__dict__["_fsharp_computes"] = True

    @contextmanager
    def swapped_in(self, names: Sequence[str], parameters: Sequence[Sequence[Any]]) -> Iterator[None]:
        """In this context the module has these for parameters, in the order of each unit's leaves."""
        slots = [self.slots[name] for name in names]
        before = [slot.swap(each) for slot, each in zip(slots, parameters, strict=True)]
        try:
            yield
        finally:
            for slot, each in zip(reversed(slots), reversed(before), strict=True):
                slot.swap(each)

    def shown(self, names: Sequence[str], leaves: Sequence[Sequence[torch.Tensor]]) -> Sequence[Sequence[Any]]:
        """Units' leaves as the module's code has them."""
        if not self.specs:
            return leaves
        rows = zip([self._layout[name] for name in names], leaves, strict=True)
        return [dressed(map(unit.full_path, unit.leaves), each, self.specs) for unit, each in rows]

    def differentiated(self, names: Sequence[str], leaves: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Units' leaves, with paused ones detached."""
        if not self._paused:
            return leaves
        rows = zip([self._layout[name] for name in names], leaves, strict=True)
        return [
            [x.detach() if unit.stored_path(leaf) in self._paused else x for leaf, x in zip(unit.leaves, each, strict=True)]
            for unit, each in rows
        ]

    def take_over(self, name: str, leaves: Sequence[torch.Tensor]) -> None:
        """Copy what sits in the slots of a unit into these leaves, as far as it is something else. Refuse another shape."""
        unit = self._layout[name]
        for i, sitting in self.slots[name].sitting:
            mine = local(sitting)
            if not isinstance(mine, torch.Tensor) or mine.shape != leaves[i].shape:
                raise TreeError(f"unsharded(): {unit.full_path(unit.leaves[i])!r} was replaced by something of another shape.")
            if mine.data_ptr() != leaves[i].data_ptr():
                leaves[i].copy_(mine)


@dataclass(eq=False)
class ModuleCall:
    """One call of ``fn``, code of the module at ``path``, whose units are gathered around it; ``out``: what it has returned."""

    calls: ModuleCalls
    source: ParameterSource
    module: nn.Module
    path: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self.flat = flat_arguments(self.args, self.kwargs)
        self.out: Any = None
        self._given_away: list[torch.Tensor] = []
        self._passed = [*self.args, *self.kwargs.values()]

    @uncompiled
    def compute(self, trees: list[Any], *_: Any) -> list[torch.Tensor]:
        """Call the code with these trees of full parameters; return the tensors that it gives away."""
        calls, path = self.calls, self.path
        owner = calls.owners[path]
        passed = self._passed
        before = owner.side_outputs.look(passed, path)
        leaves = calls.differentiated(owner.units, list(map(optree.tree_leaves, trees)))
        with calls.reading(self.source, self.module), calls.swapped_in(owner.units, calls.shown(owner.units, leaves)):
            out = compiled_by_caller(self.fn, *self.args, **self.kwargs)
        full = list(chain.from_iterable(leaves))
        found = tensors_in(out, path)
        if views := views_of(full, found):  # these are released: the copies' gradients are theirs
            out = replaced(out, views, [cloned(x) for x in views], path)
            found = tensors_in(out, path)
        self.out = out
        for x in owner.side_outputs.since(before, passed, full, path):
            if not any(x is y for y in found):
                found.append(x)
        self._given_away = found
        return reaching(found, [*self.flat, *full]) if owner.varies else found

    def returning(self, found: Sequence[torch.Tensor]) -> Any:
        """Return what the code has returned. Tensors in ``found`` stand in place of those that the code gave away."""
        if all(map(is_, found, self._given_away)):
            return self.out
        self.calls.owners[self.path].side_outputs.replace(self._passed, self._given_away, found, self.path)
        return replaced(self.out, self._given_away, found, self.path)


def flat_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the leaves of the arguments of a call, as torch's pytrees count them."""
    flat = [*args, *kwargs.values()]
    for x in flat:
        if not isinstance(x, torch.Tensor) and type(x) not in _LEAVES:
            return torch_pytree.tree_leaves((args, kwargs))
    return flat
