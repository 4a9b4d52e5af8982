"""Tracebacks without this library's frames: an error that leaves a function of this library shows the user's code alone.

A *boundary* is a function of this library that the user or torch calls. An error that leaves a boundary loses the frames of
this library, and the frames of torch, optree and the standard library below them. Frames of the user's functions stay. As in
JAX, each public function is a boundary. A hook becomes a boundary by :func:`call_hiding_frames`.
``FSHARP_TRACEBACK=full`` in the environment keeps all frames.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, suppress
from functools import wraps
from inspect import isgeneratorfunction
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")

HINT = "fsharp's own frames are left out of this traceback. Set FSHARP_TRACEBACK=full to see them."
"""The note of an error from whose traceback frames were removed."""
_HIDDEN_PACKAGES = sys.stdlib_module_names | {"optree", "torch"}
"""Packages whose frames are left out of tracebacks below a frame of this library."""
_SHOWN_MODULES = ("torch.nn.", "torch.optim.")
"""Beginnings of names of torch's modules with layers and optimizers, which users choose: frames in these modules stay."""
_HIDDEN_MODULES = ("torch.nn.modules.module", "torch.optim.optimizer")
"""Modules in ``torch.nn`` and ``torch.optim`` that call layers and optimizers: frames in these modules are left out."""


def api_boundary(target: F) -> F:
    """Return ``target``, wrapped so that tracebacks of its errors have no frames of this library (:func:`hide_frames`).

    ``target`` is a function or a generator function. If ``target`` is a class, its ``__init__`` is wrapped, and the class
    itself is returned.
    """
    function: Any = target
    if isinstance(target, type):
        function.__init__ = api_boundary(function.__init__)
        return target

    @wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    @wraps(target)
    def generate(*args: Any, **kwargs: Any) -> Any:
        try:
            return (yield from function(*args, **kwargs))
        except Exception as error:
            hide_frames(error)
            raise

    return generate if isgeneratorfunction(target) else call  # type: ignore[return-value]


def api_context(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Return a function that makes context managers, as ``contextmanager(function)`` does.

    If entering or leaving the context raises an error, its traceback has no frames of this library, as in
    :func:`api_boundary`. An error of the ``with`` block keeps its frames.
    """
    make = contextmanager(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> _BoundaryContext[T]:
        return _BoundaryContext(make(*args, **kwargs))

    return call


class _BoundaryContext(AbstractContextManager[T], ContextDecorator, Generic[T]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def _recreate_cm(self) -> "_BoundaryContext[T]":
        return _BoundaryContext(self.inner._recreate_cm())

    @api_boundary
    def __enter__(self) -> T:
        return self.inner.__enter__()  # type: ignore[no-any-return]

    @api_boundary
    def __exit__(self, *raised: Any) -> bool | None:
        return self.inner.__exit__(*raised)  # type: ignore[no-any-return]


def call_hiding_frames(hook: Callable[..., T], *args: Any) -> T:
    """Return ``hook(*args)``. Tracebacks of the hook's errors have no frames of this library, as in :func:`api_boundary`.

    Register ``partial(call_hiding_frames, hook)``, which costs less to make than ``api_boundary(hook)``.
    """
    try:
        return hook(*args)
    except Exception as error:
        hide_frames(error)
        raise


def hide_frames(error: Exception) -> None:
    """Remove frames of this library from the traceback of an error and of its causes. A note says how to see all frames.

    Call this function in an ``except`` block that raises the error again. If several boundaries are nested, the traceback is
    the same as with the outermost boundary alone.
    """
    if _remove_library_frames(error) and HINT not in getattr(error, "__notes__", ()):
        with suppress(Exception):  # some errors cannot be written to
            error.add_note(HINT)


def traceback_text(error: BaseException) -> str:
    """Return the text of an error and its traceback, to send to other ranks.

    Frames of this library are removed from the error's traceback first, as by :func:`hide_frames`. The text lacks
    :data:`HINT`, the line about hidden frames: the other rank adds this line when it raises an error with the text.
    """
    if isinstance(error, Exception):
        _remove_library_frames(error)
    return "".join(traceback.format_exception(error)).replace(f"{HINT}\n", "")


def _remove_library_frames(error: Exception) -> bool:
    """Remove frames of this library from tracebacks of an error and its causes; return whether a frame was removed."""
    if os.environ.get("FSHARP_TRACEBACK") == "full":
        return False
    found, all_errors = False, _with_causes(error)
    for each in all_errors:
        shown = _without_library_frames(each.__traceback__)
        found |= shown is not each.__traceback__
        each.with_traceback(shown)
        if each is not error and HINT in getattr(each, "__notes__", ()):
            each.__notes__.remove(HINT)
    for each in all_errors:
        if each.__context__ is not None and each.__context__.__traceback__ is None:  # the user has no part in it
            with suppress(Exception):
                each.__suppress_context__ = True
    return found


def _with_causes(error: BaseException) -> list[BaseException]:
    found: dict[int, BaseException] = {}  # causes may go in a circle
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            todo += [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
    return list(found.values())


def _without_library_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` without frames of this library, and of torch and Python's library below them.

    Without such frames return ``trace``.
    """
    kept, num_all, is_inside, each = list[TracebackType](), 0, False, trace
    while each is not None:
        module = str(each.tb_frame.f_globals.get("__name__"))
        is_inside = module.partition(".")[0] == "fsharp" or (is_inside and _is_hidden_module(module))
        if not is_inside:
            kept.append(each)
        num_all, each = num_all + 1, each.tb_next
    if len(kept) == num_all:
        return trace
    result = None
    for each in reversed(kept):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


def _is_hidden_module(module: str) -> bool:
    return module.partition(".")[0] in _HIDDEN_PACKAGES and (not module.startswith(_SHOWN_MODULES) or module in _HIDDEN_MODULES)
