"""Select modules and methods by the user's options: units, groups of units, and methods that gather."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fsharp.errors import OptionError, PatternError
from fsharp.functional.layout.layout import Layout
from fsharp.functional.tree.paths import innermost_prefix, matches
from fsharp.type_checks import can_bind_partial, check_computes_when_called, short_repr

ModuleRule = str | type[nn.Module] | Callable[[str, nn.Module], bool]
"""A pattern of module paths, a class of modules, or a predicate on path and module."""
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
Units = ModuleRule | tuple[ModuleRule, ...] | list[ModuleRule]
"""A rule; or a tuple or list of rules, whose modules share one gather."""


def chosen_modules(module: nn.Module, units: Units | Sequence[Units]) -> dict[str, nn.Module]:
    """Return the modules that ``units`` selects, by path, without the root. Raise an error if a rule selects none."""
    every = {path: each for path, each in module.named_modules() if path}
    found: set[str] = set()
    for rule in [rule for each in _as_list(units) for rule in _as_list(each)]:
        if isinstance(rule, nn.Module) or not (isinstance(rule, str | type) or can_bind_partial(rule, "", module)):
            raise OptionError(
                f"shard_module(): units has {short_repr(rule)}, expected a class of modules, a pattern of paths, a predicate "
                "(path, module) -> bool, or a tuple or list of these."
            )
        if isinstance(rule, str):
            hits = {rule} if rule in every else {path for path in every if matches(rule, path)}
        else:
            hits = {p for p, each in every.items() if (isinstance(each, rule) if isinstance(rule, type) else rule(p, each))}
        if not hits:
            kinds = ", ".join(sorted({type(each).__name__ for each in every.values()})[:12]) or "none"
            raise PatternError(
                f"shard_module(units=...): {getattr(rule, '__name__', repr(rule))} matches no module of "
                f"{type(module).__name__}. Classes of modules in it: {kinds}; paths: {', '.join(list(every)[:8]) or 'none'}."
            )
        found |= hits
    chosen = {path: each for path, each in every.items() if path in found}
    for path, each in chosen.items():
        own = [name for name, _ in each.named_parameters(path) if innermost_prefix(name, chosen) == path]
        if next(each.parameters(), None) is None or (own and type(each) in _NEVER_CALLED):
            why = f"is never called, which would gather {own[0]!r}" if own else "has no parameters to gather"
            raise PatternError(f"shard_module(units=): module {path!r}, a {type(each).__name__}, {why}. Choose another.")
    return chosen


def modules_sharing_gather(module: nn.Module, units: Units | Sequence[Units]) -> list[list[str]]:
    """Return the paths of the modules that each tuple or list in ``units`` selects, to share a gather.

    Raises a PatternError if a module is in two of these groups, or inside of another module of its group.
    """
    groups = [chosen_modules(module, each) for each in _as_list(units) if isinstance(each, tuple | list)]
    seen: set[str] = set()
    for group in groups:
        for path in group:
            inside = innermost_prefix(path.rpartition(".")[0], group)
            if path in seen or inside is not None:
                why = "is in two groups" if path in seen else f"is inside of {inside!r}, which is in the same group"
                raise PatternError(
                    f"shard_module(units=...): module {path!r} {why}. Modules of a group share one gather, and run one after "
                    "another: put each module into one group, and not into the group of a module that contains it."
                )
        seen |= set(group)
    return [list(group) for group in groups]


def _as_list(units: Any) -> list[Any]:
    return list(units) if isinstance(units, Sequence) and not isinstance(units, str) else [units]


def gathered_units_by_module(layout: Layout, chosen: Iterable[str]) -> Mapping[str, list[str]]:
    """Return for each module path the units that are gathered when the module is called; ``""`` is the root.

    Each unit belongs to the innermost chosen module around it. So a chosen module may have no unit of its own.
    """
    every: dict[str, list[str]] = {"": [], **{path: [] for path in chosen}}
    for unit in layout.units:
        every[innermost_prefix(unit.name, every) or ""].append(unit.name)
    return every


def methods_by_module(
    module: nn.Module, chosen: Mapping[str, nn.Module], names: str | Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return by path which of ``names`` the root and each chosen module have as methods. Error for a name that none has."""
    modules = {"": module, **chosen}
    found: dict[str, tuple[str, ...]] = dict.fromkeys(modules, ())
    for name in dict.fromkeys([names] if isinstance(names, str) else names):
        if name == "forward":
            continue
        owners = [path for path, each in modules.items() if hasattr(each, name)]
        if hasattr(nn.Module, name):
            raise PatternError(f"shard_module(methods=...): {name!r} is a method of every nn.Module, and not an entry point.")
        if not owners:
            elsewhere = next((path for path, each in module.named_modules() if hasattr(each, name)), None)
            hint = f" {elsewhere!r} has it: choose that module as one of the units." if elsewhere is not None else ""
            raise PatternError(f"shard_module(methods=...): {type(module).__name__} and units have no method {name!r}.{hint}")
        for path in owners:
            _check_is_method(modules[path], path, name)
            found[path] += (name,)
    return found


def _check_is_method(module: nn.Module, path: str, name: str) -> None:
    value = inspect.getattr_static(module, name, None) or getattr(module, name)
    where = f"shard_module(methods=...): {name!r} of {path or 'the root'}, a {type(module).__name__},"
    if isinstance(value, nn.Module) or not callable(value) or isinstance(value, staticmethod | classmethod | type):
        raise PatternError(f"{where} is a {type(value).__name__}, expected a method of its own.")
    check_computes_when_called(where, value, PatternError)
