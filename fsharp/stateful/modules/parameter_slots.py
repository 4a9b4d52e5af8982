"""The places of parameters in a module, by unit: full parameters are put there while it computes, and new ones are found."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsharp.annotated import shown
from fsharp.errors import OptionError, PatternError, TreeError
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.paths import as_patterns, innermost, matches
from fsharp.stateful.modules.parameter import ShardedParameter

Rule = str | type[nn.Module] | Callable[[str, nn.Module], bool]
"""A pattern of module paths, a class of modules, or a predicate on path and module."""
Units = Rule | tuple[Rule, ...] | list[Rule]
"""A rule; or a tuple or list of rules, whose modules share one gather."""


class ParameterSlots:
    """The parameters of one unit in its module.

    Args:
        module: the root.
        paths: names of the parameters in it, in the order of the unit's leaves.
        present: of all units of a module, by place, what was put there last; several of them have a place that they share.
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
        """Refuse to compute where somebody else has put other parameters: they would be ignored.

        Raises:
            TreeError: others are there, or none.
        """
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


def chosen_modules(module: nn.Module, units: Units | Sequence[Units]) -> dict[str, nn.Module]:
    """The modules that are gathered by themselves, by path, in order; the root is not among them.

    Raises:
        OptionError: a value that is no rule.
        PatternError: a rule that selects none, or one that selects a module without parameters.
    """
    rules = [rule for each in _listed(units) for rule in _listed(each)]
    for rule in rules:
        if not isinstance(rule, str) and (isinstance(rule, nn.Module) or not callable(rule)):
            raise OptionError(
                f"shard_module(): units has {shown(rule)}, expected a class of modules, a pattern of paths, a predicate on "
                "path and module, or a tuple or list of these."
            )
    every = {path: each for path, each in module.named_modules() if path}
    found: set[str] = set()
    for rule in rules:
        hits = {path for path, each in every.items() if _selects(rule, path, each)}
        if not hits:
            kinds = ", ".join(sorted({type(each).__name__ for each in every.values()})[:12])
            name = rule.__name__ if hasattr(rule, "__name__") else repr(rule)
            raise PatternError(
                f"shard_module(units=...): {name} matches no module of {type(module).__name__}. Classes of modules in it: "
                f"{kinds}; paths: {', '.join(list(every)[:8])}."
            )
        found |= hits
    chosen = {path: each for path, each in every.items() if path in found}
    for path, each in chosen.items():
        if next(each.parameters(), None) is None:
            raise PatternError(
                f"shard_module(units=...): module {path!r}, a {type(each).__name__}, has no parameters to gather."
            )
    return chosen


def grouped(module: nn.Module, units: Units | Sequence[Units]) -> list[list[str]]:
    """Return for each group of rules the paths of its modules.

    Raises:
        PatternError: a module in two groups, or inside of another module of its group.
    """
    groups = [chosen_modules(module, each) for each in _listed(units) if isinstance(each, tuple | list)]
    seen: set[str] = set()
    for group in groups:
        for path in group:
            inside = innermost(path.rpartition(".")[0], group)
            if path in seen or inside is not None:
                why = "is in two groups" if path in seen else f"is inside of {inside!r}, which is in the same group"
                raise PatternError(
                    f"shard_module(units=...): module {path!r} {why}. Modules of a group share one gather, and run one after "
                    "another: put each module into one group, and not into the group of a module that contains it."
                )
        seen |= set(group)
    return [list(group) for group in groups]


def _listed(units: Any) -> list[Any]:
    return list(units) if isinstance(units, Sequence) and not isinstance(units, str) else [units]


def _selects(rule: Rule, path: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        return any(matches(pattern, path) for pattern in as_patterns(rule))
    return isinstance(module, rule) if isinstance(rule, type) else bool(rule(path, module))


def owners(layout: Layout, chosen: Iterable[str]) -> Mapping[str, list[str]]:
    """By module path, the units that are gathered when that module is called; ``""`` is the root.

    Each unit belongs to the innermost chosen module that it is in. A chosen module may have none: units in it have all.
    """
    every: dict[str, list[str]] = {"": [], **{path: [] for path in chosen}}
    for unit in layout.units:
        every[innermost(unit.name, every) or ""].append(unit.name)
    return every


def refuse_added(module: nn.Module, path: str) -> None:
    """Refuse parameters that require a gradient and were put into a gathered module after it was sharded.

    Frozen parameters may be added, and a wrapper may replace the submodule that it wraps. Modules that are gathered by
    themselves are left out.

    Args:
        module: the root, or a module that is gathered by itself.
        path: its path.

    Raises:
        TreeError: names the parameter.
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
