"""Boundaries of torch.compile: the user's functions are compiled, the functions of this library are not.

A graph must not contain a collective, or memory that this library releases. So a graph ends where a function of this library is
called. Another graph may begin where this library calls a function of the user.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame

from fsharp.tracebacks import hide_frames
from fsharp.type_checks import check_failed_call

F = TypeVar("F", bound=Callable[..., Any])

_compiler: ContextVar[Any] = ContextVar("compiler", default=None)
"""torch.compile's callback at the innermost call of a function of :func:`disable_compile`; None if it was off."""

_REASON = (
    "fsharp gathers and releases parameters between graphs. Leave out fullgraph=True, or compile what computes within a unit: "
    "`unit.compile(fullgraph=True)`, and the function that fs.forward() calls"
)


def skip_frame(function: Callable[..., Any]) -> None:
    """Change ``function`` so that ``torch.compile`` runs it as plain Python, but still compiles the functions that it calls."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


# Functions, as cloudpickle sends what :func:`disable_compile` returns by value, and cannot send a ContextVar.
def _set_caller_compiler(compiler: Any) -> Token[Any]:
    return _compiler.set(compiler)


def _reset_caller_compiler(token: Token[Any]) -> None:
    _compiler.reset(token)


def disable_compile(function: F) -> F:
    """Wrap ``function`` so that torch.compile does not compile it: a graph ends before each call, and another begins after it.

    Tracebacks of the function's errors leave out the library's frames. If the function fails because an argument has the wrong
    type, an OptionError names the argument.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)
        token = None if compiler is None else _set_caller_compiler(compiler)
        try:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                check_failed_call(error, function, args, kwargs)
                raise
        except Exception as error:
            hide_frames(error)
            raise
        finally:
            if token is not None:
                _reset_caller_compiler(token)
                set_eval_frame(compiler)

    skip_frame(call)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def call_compiled_like_caller(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, the result of a user's function.

    If the user's compiled code has called this library, ``torch.compile`` also compiles ``function``.
    """
    compiler = _compiler.get()
    if compiler is None:
        return function(*args, **kwargs)
    token = _compiler.set(None)
    set_eval_frame(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        set_eval_frame(None)
        _compiler.reset(token)


skip_frame(call_compiled_like_caller)


@contextmanager
def without_compiling_user_functions() -> Iterator[None]:
    """Return a context in which :func:`call_compiled_like_caller` compiles no function of the user.

    A forward that is recomputed in the backward runs in this context. The recomputation is not compiled, and has to save the
    same tensors as the forward.
    """
    token = _compiler.set(None)
    try:
        yield
    finally:
        _compiler.reset(token)
