"""What torch.func has put on top of tensors: which transforms are active, and what is beneath those of vmap."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fsharp.errors import LossError, TreeError


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


def check_untransformed(where: str) -> None:
    """Refuse torch.func transforms around what runs a backward of its own.

    Raises:
        LossError: one is active.
    """
    if is_transformed():
        raise LossError(
            f"{where}: called under a torch.func transform, which does not reach through a backward of its own. Transform the "
            "loss: torch.func.grad(lambda params: loss_fn(params, batch, comm)), and jvp, vjp or vmap of that."
        )


def check_untraced(where: str) -> None:
    """Refuse ``make_fx`` and ``torch.func.linearize``, which uses it: in what they trace, collectives would be constants.

    Raises:
        TreeError: such a trace is under way.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise TreeError(
            f"{where}: called under torch.func.linearize or make_fx, whose trace would hold parameters as constants. For a "
            "linear map use torch.func.jvp: lambda t: jvp(f, (x,), (t,))[1]."
        )


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
