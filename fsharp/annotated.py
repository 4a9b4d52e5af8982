"""Checks of values against type annotations, and the words in which an error says what was expected."""

import inspect
import numbers
from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from fsharp.errors import OptionError

P = ParamSpec("P")
R = TypeVar("R")
_MOST_SHOWN = 80
"""Characters of a value that an error shows."""
_FUNCTION: Any = Callable
_WORDS: dict[Any, str] = {int: "an int", float: "a number", bool: "True or False", str: "a str", NoneType: "None"}


@cache
def fits(hint: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether a value fits a type annotation.

    A bool does not fit a number, and a str does not fit a sequence. Items of mappings are not checked. Every value fits a
    protocol.
    """
    origin, args = get_origin(hint), get_args(hint)
    kind = hint if origin is None else origin
    if kind in (Union, UnionType):
        each = tuple(map(fits, args))
        return lambda x: any(fit(x) for fit in each)
    if kind is Literal:
        return lambda x: any(type(x) is type(arg) and x == arg for arg in args)
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return lambda x: True
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return lambda x: type(x) is kind or (isinstance(x, number) and not isinstance(x, bool))
    if kind is _FUNCTION:
        return callable
    if kind is tuple and args[1:] == (...,):
        item = fits(args[0])
        return lambda x: isinstance(x, tuple) and all(map(item, x))
    if issubclass(kind, Iterable) and kind is not str:
        return lambda x: isinstance(x, kind) and not isinstance(x, str)
    return lambda x: isinstance(x, kind)


def in_words(hint: Any) -> str:
    """Return a type annotation in words, for an error: ``int | None`` as "an int or None"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(in_words(arg) for arg in sorted(args, key=lambda arg: arg is NoneType))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is type:
        return f"a class, a subclass of {args[0].__name__}"
    if (origin or hint) is _FUNCTION:
        return "a function"
    if origin is not None and args:
        inner = [in_words(arg) for arg in args if arg not in (..., Any)]
        return f"a {origin.__name__}" + (f" of {' to '.join(inner)}" if inner else "")
    return _WORDS.get(hint) or f"a {getattr(hint, '__name__', hint)}"


@cache
def _hints(of: Any) -> dict[str, tuple[Callable[[Any], bool], Any]]:
    return {name: (fits(hint), hint) for name, hint in get_type_hints(of).items() if name != "return"}


def wrong_field(row: Any) -> str:
    """Return a text about the first field of a dataclass or NamedTuple that does not fit its annotation; empty if all fit."""
    kind: Any = type(row)
    for name, (fit, hint) in _hints(kind).items():
        if not fit(value := getattr(row, name)):
            return _wrong(name, value, hint)
    return ""


def check_fields(row: Any) -> None:
    """Refuse a dataclass with a field that does not fit its annotation.

    Raises:
        OptionError: the first such field, its value, and what was expected.
    """
    if why := wrong_field(row):
        raise OptionError(f"{type(row).__name__}(): {why}.")


def _wrong(name: str, value: Any, hint: Any) -> str:
    text = repr(value)
    text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return f"{name} is {text}, expected {in_words(hint)}"


def options_checked(fn: Callable[P, R]) -> Callable[P, R]:
    """Return a function that refuses arguments that do not fit its annotations, and calls ``fn``.

    Raises:
        OptionError: the first such argument, its value, and what was expected.
    """
    parameters = inspect.signature(fn).parameters.values()
    several = {each.name for each in parameters if each.kind in _SEVERAL}
    positional = [each.name for each in parameters if each.kind in _POSITIONAL]
    where = fn.__qualname__.removesuffix(".__init__")

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = _hints(fn)
        for name, value in (*zip(positional, args, strict=False), *kwargs.items()):
            fit, hint = hints.get(name, _ANYTHING)
            if not fit(value) and name not in several:
                raise OptionError(f"{where}(): {_wrong(name, value, hint)}.")
        return fn(*args, **kwargs)

    call.has_checked_options = True  # type: ignore[attr-defined]
    return call


_ANYTHING = (lambda x: True, Any)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
