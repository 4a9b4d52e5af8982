"""Tests for classes of torch without the import of their modules, which would take a third of fsharp's import time."""

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_instance(x: object, module: str, name: str) -> bool:
    """Return whether ``x`` is an instance of the class ``name`` of a Python module, without importing the module."""
    return isinstance(x, getattr(sys.modules.get(module), name, ()))  # no class has instances before its module is imported


def is_dtensor(x: object) -> "TypeGuard[DTensor]":
    """Return whether ``x`` is a DTensor, without importing torch.distributed.tensor."""
    return is_instance(x, "torch.distributed.tensor", "DTensor")
