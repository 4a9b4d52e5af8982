"""Tests that every rank of a mesh runs, simulated: each takes the rank's Comm as its first argument."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import fsharp as fs
from fsharp.testing import simulate


def on_ranks(mesh: fs.Mesh | Callable[..., fs.Mesh]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run ``test(comm, ...)`` on every rank of a mesh, or of ``mesh(...)``, which takes arguments of the test by name."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            names = () if isinstance(mesh, fs.Mesh) else inspect.signature(mesh).parameters
            chosen = mesh if isinstance(mesh, fs.Mesh) else mesh(**{name: arguments[name] for name in names})
            assert set(simulate(chosen, lambda comm: test(comm, **arguments))) == {None}, "a test returns nothing"

        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]  # for pytest, which gives it these
        return run

    return decorate
