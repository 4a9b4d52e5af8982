"""Gradients that modules of TransformerEngine write by themselves, with ``fuse_wgrad_accumulation=True``.

In a backward such a module asks the weight for memory, writes the gradient there, and returns no gradient to autograd. The
memory is new for each use, and is taken as the gradient where the backward of the weight's unit ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsharp.errors import OptionError, TreeError
from fsharp.stateful.runtime.boundary import find_unit_use


def check_te_gradients(module: nn.Module) -> None:
    """Raise an error that names a submodule if its gradients of weights cannot be taken."""
    for path, each in module.named_modules():
        store = getattr(each, "wgrad_store", None)
        if store is not None and store.delay_wgrad_compute():
            raise OptionError(
                f"module {path!r} has delay_wgrad_compute=True: it would compute gradients of weights after the backward in "
                "which they are reduced. Make it with False."
            )
        if getattr(each, "fuse_wgrad_accumulation", False):
            places = [
                about.fp8_meta_index for about in _te_parameter_records(each).values() if about.fp8_meta_index is not None
            ]
            if not places or len(places) > len(set(places)):
                raise OptionError(
                    f"module {path!r} has fuse_wgrad_accumulation=True, and no weight of its own, or a weight made of several "
                    "parameters, of which none gets the gradient. Make it with False, or without parameters_split."
                )


def has_fused_gradient(module: nn.Module, name: str) -> bool:
    """Return whether a module writes the gradient of its parameter ``name`` by itself."""
    about = _te_parameter_records(module).get(name) if getattr(module, "fuse_wgrad_accumulation", False) else None
    return about is not None and about.fp8_meta_index is not None


def _te_parameter_records(module: Any) -> dict[str, Any]:
    """Return TransformerEngine's records of a module's parameters, by name. The record of a weight has its scale's index."""
    found: dict[str, Any] = getattr(module, "param_init_meta", {})
    return found


@contextmanager
def lending_gradient_memory(weights: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Give ``weights``, pairs of path and weight, the attributes by which TransformerEngine finds memory, in this context.

    ``grad_added_to_main_grad`` is left out: with it TransformerEngine would also return a gradient that was never written.
    """
    for path, weight in weights:
        given: Any = weight
        given.__fsdp_param__ = True
        if weight.requires_grad:
            use = find_unit_use(weight)
            if use is None:
                raise TreeError(
                    f"parameter {path!r} belongs to a module with fuse_wgrad_accumulation=True, which needs a scheduler. Call "
                    "the sharded module itself, or pass comm=scheduler; or make the module with False."
                )
            given.get_main_grad, given.overwrite_main_grad = use.make_gradient_allocator(weight), True
    try:
        yield
    finally:
        for _, weight in weights:
            weight.__dict__.pop("get_main_grad", None)  # it refers to the weight: a cycle
