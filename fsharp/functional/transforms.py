"""What torch.func has put on top of tensors: which transforms are active, and what is beneath those of vmap."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def is_transformed() -> bool:
    """Whether a torch.func transform is active."""
    return bool(torch._C._are_functorch_transforms_active())


def is_differentiated() -> bool:
    """Whether a torch.func transform other than vmap is active, whose level owns what is saved.

    vmap alone has no level of autograd: the graph beneath it is that of plain tensors.
    """
    if not is_transformed():
        return False
    stack = _functorch.get_interpreter_stack() or ()
    return any(level.key() != _functorch.TransformType.Vmap for level in stack)


def beneath_vmap() -> AbstractContextManager[Any]:
    """Within this context no transform is active: tensors of which none has a dim are computed with as outside of it."""
    return temporarily_clear_interpreter_stack()


def is_batched(x: torch.Tensor) -> bool:
    """Whether vmap has a dim of this tensor."""
    return _functorch.is_batchedtensor(x)


def beneath(x: torch.Tensor) -> torch.Tensor:
    """The tensor without vmap's levels, whose dims it shows."""
    while _functorch.is_batchedtensor(x):
        x = _functorch.get_unwrapped(x)
    return x
