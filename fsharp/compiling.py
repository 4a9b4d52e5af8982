"""Where torch.compile meets this library: functions of the user are compiled, and what is done around them is not.

A graph must hold no collective and no memory that is released behind its back. So a graph ends where a function of this
library is called, and another one may begin where that calls a function of the user.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame

F = TypeVar("F", bound=Callable[..., Any])

_compiler: ContextVar[Any] = ContextVar("compiler", default=None)
"""What compiles the functions that are called by the innermost one of :func:`uncompiled`."""

_REASON = (
    "fsharp gathers and releases parameters between graphs. Leave out fullgraph=True, or compile what computes within a unit: "
    "`unit.compile(fullgraph=True)`, and the function that fs.forward() calls"
)


def skip_frame(function: Callable[..., Any]) -> None:
    """Have ``torch.compile`` make no graph of a call of this function; of what the function calls it does."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def uncompiled(function: F) -> F:
    """``function``, run as it is by code that ``torch.compile`` compiles: a graph ends before it, and one begins behind it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)
        if compiler is None:
            return function(*args, **kwargs)
        token = _compiler.set(compiler)
        try:
            return function(*args, **kwargs)
        finally:
            _compiler.reset(token)
            set_eval_frame(compiler)

    skip_frame(call)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def compiled_by_caller(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, compiled if the innermost function of :func:`uncompiled` was called by compiled code."""
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


skip_frame(compiled_by_caller)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """In this context :func:`compiled_by_caller` compiles nothing."""
    token = _compiler.set(None)
    try:
        yield
    finally:
        _compiler.reset(token)
