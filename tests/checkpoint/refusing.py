"""A file system that refuses to read: nothing is proven against the bytes."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def refusing(code: int, part: str) -> Iterator[None]:
    """In this process whatever has ``part`` in its path cannot be read: the error is ``code``."""

    def refuse(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **options: Any) -> Any:
            if part in os.fspath(path):
                raise OSError(code, os.strerror(code), path)
            return real(path, *rest, **options)

        return call

    with ExitStack() as stack:
        for name in ("open", "lstat", "listdir"):
            stack.enter_context(mock.patch.object(os, name, refuse(getattr(os, name))))
        yield
