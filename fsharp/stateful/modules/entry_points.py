"""Entries: the methods of a module in which its parameters are gathered; forward, and those that the user names."""

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fsharp.compiling import skip_frame
from fsharp.errors import PatternError, TreeError
from fsharp.stateful.modules.torch_tools.refusals import NO_COPIES
from fsharp.tracebacks import api_boundary, hide_frames

_SHOWN = 12
_subclasses: dict[tuple[Any, ...], type[nn.Module]] = {}


def entries_of(module: nn.Module, chosen: Mapping[str, nn.Module], names: str | Iterable[str]) -> dict[str, tuple[str, ...]]:
    """By path of the root and of chosen modules, those of these names that are methods of it.

    Raises:
        PatternError: a name that none of them has, one of nn.Module's own, or one of something else than a plain method.
    """
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
            raise PatternError(
                f"shard_module(methods=...): neither {type(module).__name__} nor a module that is chosen by units has a "
                f"method {name!r}.{hint} Methods of {type(module).__name__}: {', '.join(_methods(module)[:_SHOWN]) or 'none'}."
            )
        for path in owners:
            _check(modules[path], path, name)
            found[path] += (name,)
    return found


def _check(module: nn.Module, path: str, name: str) -> None:
    value = inspect.getattr_static(module, name, None) or getattr(module, name)
    where = f"shard_module(methods=...): {name!r} of {path or 'the root'}, a {type(module).__name__},"
    if isinstance(value, nn.Module) or not callable(value) or isinstance(value, staticmethod | classmethod | type):
        raise PatternError(f"{where} is a {type(value).__name__}, expected a method of its own.")
    if inspect.isgeneratorfunction(value) or inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
        raise PatternError(f"{where} is a generator or coroutine, which computes after it has returned: return a list instead.")


def _methods(module: nn.Module) -> list[str]:
    return [
        name
        for name, value in inspect.getmembers(type(module), inspect.isfunction)
        if not name.startswith("_") and not hasattr(nn.Module, name) and value.__name__ != "forward"
    ]


def enter_by(module: nn.Module, names: Sequence[str], *mixins: type) -> None:
    """Have calls of a module, of its forward, and of its methods in ``names`` run with the module's units gathered.

    Its class becomes a subclass. Hooks of the module run with its units gathered, too.
    """
    entries = ("forward", *names)
    own = {name: module.__dict__.pop(name) for name in entries if name in module.__dict__}
    module.__dict__.update(_fsharp_own=own, _fsharp_computes=False)
    module.__class__ = _subclass(type(module), ("__call__", *entries), mixins)


def _subclass(base: type[nn.Module], names: tuple[str, ...], mixins: tuple[type, ...]) -> type[nn.Module]:
    if (base, names, mixins) not in _subclasses:
        about = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        entries = {name: _entry(base, name) for name in names} | {"__reduce_ex__": _refuse_copy}
        _subclasses[base, names, mixins] = type(base.__name__, (*mixins, base), {**entries, **about})
    return _subclasses[base, names, mixins]


@api_boundary
def _refuse_copy(self: nn.Module, protocol: Any) -> Any:
    raise TreeError(f"{type(self).__name__}: {NO_COPIES}")


def _entry(base: type[nn.Module], name: str) -> Any:
    function = getattr(base, name, None)  # else it is an attribute of the module alone

    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        # While the module computes, torch.compile traces this function, so that a graph goes on within the units' gather.
        own = self._fsharp_own.get(name)
        if self._fsharp_computes:
            return getattr(base, name)(self, *args, **kwargs) if own is None else own(*args, **kwargs)
        try:
            session, path = self.__dict__["_fsharp"]
            return session.call(self, path, own or functools.partial(getattr(base, name), self), args, kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    skip_frame(entry)
    return entry if function is None else functools.wraps(function)(entry)
