"""Queries about torch.func: which transforms are active, and which tensors are beneath the levels of vmap."""

import torch
from torch._C import _functorch

from fsharp.errors import LossError, TreeError


def is_transform_active() -> bool:
    """Return whether a torch.func transform is active."""
    return bool(torch._C._are_functorch_transforms_active())


def is_non_vmap_transform_active() -> bool:
    """Return whether a transform other than vmap is active. Under such a transform, autograd saves wrapped tensors."""
    if not is_transform_active():
        return False
    stack = _functorch.get_interpreter_stack() or ()
    return any(level.key() != _functorch.TransformType.Vmap for level in stack)


def check_no_transform_active(where: str) -> None:
    """Raise a LossError if a torch.func transform is active, for functions that run a backward of their own."""
    if is_transform_active():
        raise LossError(
            f"{where}: called under a torch.func transform, which cannot differentiate the backward that runs here. Transform "
            "the loss: torch.func.grad(lambda params: loss_fn(params, batch, comm)), and jvp, vjp or vmap of that."
        )


def refuse_proxy_tracing(where: str) -> None:
    """Raise a TreeError under ``make_fx`` or ``torch.func.linearize``, whose traces would keep gathered values as constants."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise TreeError(
            f"{where}: called under torch.func.linearize or make_fx, whose trace would hold parameters as constants. For a "
            "linear map use torch.func.jvp: lambda t: jvp(f, (x,), (t,))[1]."
        )


def unwrap_vmap(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor beneath all vmap levels: vmap's dims become ordinary dims."""
    while _functorch.is_batchedtensor(x):
        x = _functorch.get_unwrapped(x)
    return x
