"""Tests for classes of torch whose modules take long to import: a third of the time that fsharp's import would take."""

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_instance(x: object, module: str, *names: str) -> bool:
    """Return whether ``x`` is an instance of one of these classes of a Python module, without importing the module."""
    imported = sys.modules.get(module)  # a class has no instances before its module is imported
    return isinstance(x, tuple(getattr(imported, name) for name in names if hasattr(imported, name)))


def is_dtensor(x: object) -> "TypeGuard[DTensor]":
    """Return whether ``x`` is a DTensor, without importing torch.distributed.tensor."""
    return is_instance(x, "torch.distributed.tensor", "DTensor")
