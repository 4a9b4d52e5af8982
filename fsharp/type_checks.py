"""Compare values with type annotations, and say in words what an annotation expects."""

import difflib
import inspect
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from itertools import chain, repeat
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fsharp.errors import FsharpError, OptionError
from fsharp.tracebacks import hide_frames

F = TypeVar("F", bound=Callable[..., Any])
_MAX_REPR_CHARS = 80
"""Characters of a value that an error shows."""
_CALLABLE: Any = Callable
_TYPE_NAMES: dict[Any, str] = {int: "an int", float: "a number", bool: "True or False", str: "a str", NoneType: "None"}
_CALLS = {
    "Mesh": "fs.Mesh({'dp': 8})",
    "unshard": "fs.unshard([shards of rank 0, shards of rank 1, ...]); fs.full_tree(tree, comm=comm) gathers a rank's shards",
}
"""By name of a function whose signature says too little, an example of a call."""
_EXAMPLES = {
    "a Strategy": "fs.zero3('dp')",
    "a Precision": "fs.Precision(torch.bfloat16, torch.float32)",
    "a Mesh": "fs.Mesh({'dp': 8})",
    "a timedelta": "datetime.timedelta(minutes=5)",
    "a Comm": "fs.connect(mesh)",
    "a TrainState": "fs.init_state(tx, params, comm=comm)",
    "a Format": "fs.formats.mxfp8",
    "a Layout": "fs.plan(params, mesh, strategy)",
}
"""By what an error says that it expected, an expression that makes such a value."""


@cache
def predicate_of_annotation(hint: Any) -> Callable[[Any], bool]:
    """Return a function that returns whether a value fits a type annotation.

    A bool does not fit ``int`` or ``float``, and a str does not fit a sequence. Only items of tuples and Sequences are checked.
    A value fits a Protocol if it has every attribute that the Protocol declares as a ``@property``.
    """
    origin, args = get_origin(hint), get_args(hint)
    kind = hint if origin is None else origin
    if kind in (Union, UnionType):
        each = tuple(map(predicate_of_annotation, args))
        return lambda x: any(fit(x) for fit in each)
    if kind is Literal:
        return lambda x: any(type(x) is type(arg) and x == arg for arg in args)
    if kind is Any or not isinstance(kind, type):
        return lambda x: True
    if getattr(kind, "_is_protocol", False):
        properties = [name for name, value in vars(kind).items() if isinstance(value, property)]
        return lambda x: all(hasattr(x, name) for name in properties)
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return lambda x: type(x) is kind or (isinstance(x, number) and not isinstance(x, bool))
    if kind is _CALLABLE:
        return callable
    if (kind is tuple and args[1:] == (...,)) or (kind is Sequence and args):
        item = predicate_of_annotation(args[0])
        return lambda x: isinstance(x, kind) and not isinstance(x, str) and all(map(item, x))
    if kind is tuple and args:
        items = tuple(map(predicate_of_annotation, args))
        return lambda x: isinstance(x, tuple) and len(x) == len(items) and all(fit(y) for fit, y in zip(items, x, strict=True))
    if issubclass(kind, Iterable) and kind is not str:
        return lambda x: isinstance(x, kind) and not isinstance(x, str)
    return lambda x: isinstance(x, kind)


def annotation_in_words(hint: Any) -> str:
    """Return a type annotation in words, for an error: ``int | None`` as "an int or None"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(annotation_in_words(arg) for arg in sorted(args, key=lambda arg: arg is NoneType))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is type:
        return f"a class, a subclass of {args[0].__name__}"
    if (origin or hint) is _CALLABLE:
        return "a function"
    if origin is not None and args and (inner := _items_in_words(origin, args)):
        return f"{_with_article(origin.__name__)} {inner}"
    return _TYPE_NAMES.get(hint) or _with_article(str(getattr(hint, "__name__", hint)))


def _items_in_words(origin: Any, args: tuple[Any, ...]) -> str:
    """Return the items of a container in words: "of str", "of str to Precision", "(number, number)"; "" if each value fits."""

    def words(hint: Any) -> str:
        text = "any value" if hint is Any else re.sub(r"(^| or )an? ", r"\1", annotation_in_words(hint))
        return f"({text})" if get_origin(hint) in (Union, UnionType, Literal) and " or " in text else text

    inner = [words(arg) for arg in args if arg is not ...]
    if origin is tuple and ... not in args:
        return f"({', '.join(inner)})"
    return "" if set(args) <= {Any, ...} else f"of {' to '.join(inner)}"


def _with_article(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIOaeio" else f"a {name}"


@cache
def _predicates_and_hints(of: Any) -> dict[str, tuple[Callable[[Any], bool], Any]]:
    return {name: (predicate_of_annotation(hint), hint) for name, hint in get_type_hints(of).items() if name != "return"}


def describe_wrong_field(instance: Any) -> str:
    """Return a message about the first field of a dataclass or NamedTuple that does not fit its annotation; "" if all fit."""
    kind: Any = type(instance)
    for name, (fit, hint) in _predicates_and_hints(kind).items():
        if not fit(value := getattr(instance, name)):
            return _wrong_value_text(name, value, hint)
    return ""


def short_repr(value: Any) -> str:
    """Return the ``repr`` of a value for an error message. A long ``repr`` is cut off. A function is shown by its name."""
    text = f"the function {value.__qualname__}" if inspect.isfunction(value) else repr(value)
    return text if len(text) <= _MAX_REPR_CHARS else f"{text[:_MAX_REPR_CHARS]}..."


def _wrong_value_text(name: str, value: Any, hint: Any) -> str:
    words = annotation_in_words(hint)
    example = next((f", such as {text}" for kind, text in _EXAMPLES.items() if kind in words), "")
    return f"{name} is {short_repr(value)}, expected {words}{example}"


def check_arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise an error if an argument does not fit the annotation of its parameter.

    Raises:
        OptionError: names the first argument that does not fit, its value, and what was expected.
    """
    positional, rest, named = _parameters(fn)
    for name, value in (*zip(chain(positional, repeat(rest)), args, strict=False), *kwargs.items()):
        if name in named and not named[name][0](value):
            raise OptionError(f"{_name_in_errors(fn)}(): {_wrong_value_text(name, value, named[name][1])}.")


def _name_in_errors(fn: Callable[..., Any]) -> str:
    return fn.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]


def can_bind_partial(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether ``fn`` accepts these arguments, perhaps with further ones. True if ``fn`` has no signature."""
    try:
        inspect.signature(fn, follow_wrapped=False).bind_partial(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # some functions of C
        return True
    return True


def check_computes_when_called(what: str, fn: Callable[..., Any], error_type: type[FsharpError]) -> None:
    """Raise an ``error_type`` if ``fn`` is a generator or coroutine. ``what``: name of ``fn``, for the message."""
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise error_type(f"{what} is a generator or coroutine, which computes after it has returned: return a value instead.")


def check_call_fits_signature(error: Exception, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise an OptionError if the arguments of a failed call do not fit ``fn``.

    The call was ``fn(*args, **kwargs)``, and raised ``error``. If its arguments fit, return: the caller raises ``error`` again.

    Raises:
        OptionError: the arguments do not fit. For an unknown keyword the message has the most similar argument of ``fn``. If no
            argument is similar, or the call is wrong for another reason, the message shows how ``fn`` is called.
    """
    if type(error) is not TypeError:
        return
    signature, name = inspect.signature(fn), _name_in_errors(fn)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as reason:
        parameters = list(signature.parameters.values())
        usage = f"It is called as {_CALLS.get(name) or f'{name}({_arguments_text(parameters)})'}."
        unknown = [each for each in kwargs if each not in signature.parameters]
        if unknown and all(each.kind is not each.VAR_KEYWORD for each in parameters):
            near = difflib.get_close_matches(unknown[0], signature.parameters, n=1)
            usage = f"Closest: {near[0]}." if near else usage
            raise OptionError(f"{name}() has no argument {unknown[0]!r}. {usage}") from None
        raise OptionError(f"{name}(): {reason}. {usage}") from None


def _arguments_text(parameters: Sequence[inspect.Parameter]) -> str:
    """Return a function's parameters as the arguments of a call, with the names of keyword-only ones: ``tree, comm=comm``."""
    texts = []
    for each in parameters:
        by_name = each.kind is each.KEYWORD_ONLY
        texts.append(f"{each.name}={each.name}" if by_name else str(each.replace(annotation=each.empty, default=each.empty)))
    return ", ".join(texts[1:] if texts[:1] in (["self"], ["cls"]) else texts)


@cache
def _parameters(fn: Callable[..., Any]) -> tuple[list[str], str, dict[str, tuple[Callable[[Any], bool], Any]]]:
    parameters, hints = inspect.signature(fn).parameters.values(), _predicates_and_hints(fn)
    positional = [each.name for each in parameters if each.kind in _POSITIONAL_KINDS]
    rest = next((each.name for each in parameters if each.kind is each.VAR_POSITIONAL), "")
    named = {each.name: hints[each.name] for each in parameters if each.name in hints and each.kind is not each.VAR_KEYWORD}
    return positional, rest, named


_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def cache_signature(function: F) -> F:
    """Store the signature of ``function`` where ``inspect.signature`` finds it, and return ``function``.

    ``torch.autograd.Function.apply`` asks for the signature of ``forward`` in each call. Without this function, making the
    signature takes half of the time of the call.
    """
    function.__dict__["__signature__"] = inspect.signature(function)
    return function


def options_checked(target: F) -> F:
    """Wrap a function or a class: each call first compares its arguments with the annotations.

    Raises:
        OptionError: in a call, an argument does not fit its annotation, or the arguments do not fit the signature.
    """
    return _wrap_call_or_init(target, before=check_arguments)


def signature_checked(target: F) -> F:
    """Wrap a function or a class: a call whose arguments do not fit the signature raises an OptionError."""
    return _wrap_call_or_init(target)


def options_checked_on_failure(target: F) -> F:
    """Wrap a function or a class: a call that fails because an argument has the wrong type raises an OptionError.

    The types are checked after a failure, and not before the call (:func:`check_failed_call`). Functions that compare arguments
    between ranks need this: a check before the call could raise on one rank alone.
    """
    return _wrap_call_or_init(target, after=check_failed_call)


def check_failed_call(error: Exception, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise an OptionError if the call ``fn(*args, **kwargs)``, which raised ``error``, has a wrong argument.

    Do nothing if all arguments fit, or if ``error`` is an error of this library other than an OptionError. For functions that a
    step calls often: arguments are checked only after a failure.

    Raises:
        OptionError: as :func:`check_arguments` and :func:`check_call_fits_signature`.
    """
    if isinstance(error, OptionError) or not isinstance(error, FsharpError):
        check_arguments(fn, args, kwargs)
    check_call_fits_signature(error, fn, args, kwargs)


def _wrap_call_or_init(target: F, *, before: Callable[..., None] | None = None, after: Any = check_call_fits_signature) -> F:
    fn: Any = target
    if isinstance(target, type):
        fn.__init__ = _wrap_call_or_init(fn.__init__, before=before, after=after)
        return target

    @wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if before is not None:
                before(fn, args, kwargs)
            try:
                return fn(*args, **kwargs)
            except Exception as error:
                after(error, fn, args, kwargs)
                raise
        except Exception as error:
            hide_frames(error)
            raise

    return call  # type: ignore[return-value]
