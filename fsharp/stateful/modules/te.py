"""TransformerEngine modules: gradients that they write into memory themselves, and scales that they keep as state.

With ``fuse_wgrad_accumulation=True`` a module asks the weight for memory in a backward, writes the gradient there, and returns
no gradient to autograd. Each use gets new memory. When the backward of the weight's unit ends, this memory is the gradient.

Scales and histories of delayed scaling are text in state dicts. TransformerEngine's own extra state is a pickle. A pickle of
equal values has other bytes on other ranks, and a load of a pickle runs code.
"""

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsharp.errors import OptionError, TreeError
from fsharp.stateful.modules.parameter import ShardedParameter
from fsharp.stateful.runtime.boundary import find_unit_use

_TEXT_FORMAT = "delayed scaling, 1"
_SCALING_TENSORS = {f"{name}_{way}": (f"scaling_{way}", name) for way in ("fwd", "bwd") for name in ("scale", "amax_history")}
_FP8_META_NUMBERS = ("num_gemms", "fp8_max_fwd", "fp8_max_bwd")


def check_te_gradients(module: nn.Module) -> None:
    """Raise an OptionError if fsharp cannot use the gradients of weights that a module of TransformerEngine makes.

    Such a module has ``delay_wgrad_compute``; or ``fuse_wgrad_accumulation`` and no weight that is one parameter of its own.
    """
    for path, each in module.named_modules():
        store = getattr(each, "wgrad_store", None)
        if store is not None and store.delay_wgrad_compute():
            raise OptionError(
                f"module {path!r} has delay_wgrad_compute=True: it would compute gradients of weights after the backward in "
                "which they are reduced. Make it with False."
            )
        if getattr(each, "fuse_wgrad_accumulation", False):
            scales = scale_indices_of_fused_wgrads(each)
            if not scales or len(scales) > len(set(scales.values())):
                raise OptionError(
                    f"module {path!r} has fuse_wgrad_accumulation=True, and no weight of its own, or a weight made of several "
                    "parameters, of which none gets the gradient. Make it with False, or without parameters_split."
                )


def scale_indices_of_fused_wgrads(module: Any) -> dict[str, int]:
    """Return, by name of each weight whose gradient TransformerEngine writes itself, the index of the weight's FP8 scale."""
    records = module.param_init_meta if getattr(module, "fuse_wgrad_accumulation", False) else {}
    return {name: record.fp8_meta_index for name, record in records.items() if record.fp8_meta_index is not None}


@contextmanager
def lending_gradient_memory(weights: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Let TransformerEngine write gradients of ``weights``, pairs of path and weight, to memory of the scheduler.

    TreeError outside of a scheduler. ``grad_added_to_main_grad`` stays unset: if set, the module would also return a gradient.
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
            weight.__dict__.pop("get_main_grad", None)  # a reference cycle with the weight


def register_te_call_checks(module: nn.Module) -> None:
    """Make TransformerEngine modules raise an error if they are called while their parameters are parts.

    Activation checkpointing of a piece of a unit calls such modules in the backward, to recompute. TransformerEngine would take
    a part for a whole weight that is not quantized. TransformerEngine's own checkpoint would give the backward wrong tensors.
    """
    for each in module.modules():
        if any(cls.__module__.startswith("transformer_engine.") for cls in type(each).__mro__):
            each.register_forward_pre_hook(_check_no_parts)


def _check_no_parts(module: nn.Module, _: Any) -> None:
    for name, parameter in module._parameters.items():
        if isinstance(parameter, ShardedParameter):
            kind = type(module).__name__
            raise TreeError(
                f"{kind}: parameter {parameter.path!r} is a part here, and TransformerEngine needs the whole {name}. A "
                f"checkpoint has to be of units, or of modules that contain units: make {kind}, or the module in the "
                "checkpoint, one of the units. Elsewhere call the sharded module itself."
            )


def use_text_extra_state(module: nn.Module) -> None:
    """Let TransformerEngine modules return the state of delayed scaling as text, and accept this text as well as pickles."""
    for each in module.modules():
        if any(cls.__name__ == "TransformerEngineBaseModule" for cls in type(each).__mro__):
            ref = weakref.ref(each)
            each.__dict__["get_extra_state"] = lambda ref=ref: _extra_state_as_text(ref())
            each.__dict__["set_extra_state"] = lambda state, ref=ref: _set_extra_state_from_text(ref(), state)


def _extra_state_as_text(module: Any) -> torch.Tensor:
    meta = module.fp8_meta
    own: torch.Tensor = type(module).get_extra_state(module)
    if not own.numel() or not all(hasattr(meta.get(key), name) for key, name in _SCALING_TENSORS.values()):
        return own
    found: dict[str, Any] = {"format": _TEXT_FORMAT, "fp8_format": meta["recipe"].fp8_format.name}
    found |= {name: meta[name] for name in _FP8_META_NUMBERS if name in meta}
    for name, (key, attribute) in _SCALING_TENSORS.items():
        tensor = getattr(meta[key], attribute).detach().cpu()
        found[name] = [list(tensor.shape), tensor.contiguous().view(torch.int32).flatten().tolist()]
    return torch.frombuffer(bytearray(json.dumps(found).encode()), dtype=torch.uint8).clone()


def _set_extra_state_from_text(module: Any, state: Any) -> None:
    data = bytes(state.tolist()) if getattr(state, "dtype", None) is torch.uint8 and state.dim() == 1 else b""
    if not data.startswith(b"{"):
        type(module).set_extra_state(module, state)
        return
    found = json.loads(data)
    if found.get("format") != _TEXT_FORMAT:
        raise TreeError(f"extra state of a {type(module).__name__} is {found.get('format')!r}, expected {_TEXT_FORMAT!r}.")
    from transformer_engine.common.recipe import DelayedScaling, Format

    meta = module.fp8_meta
    meta.update({name: found[name] for name in _FP8_META_NUMBERS if name in found}, fp8_checkpoint=True)
    fp8_format = Format[found.get("fp8_format", "HYBRID")]
    meta["recipe"] = DelayedScaling(fp8_format=fp8_format, amax_history_len=found["amax_history_fwd"][0][0])
    meta.pop("global_fp8_buffer_pos_fwd_recompute", None)
    module.init_fp8_meta_tensors(meta["recipe"])
    with torch.no_grad():
        for name, (key, attribute) in _SCALING_TENSORS.items():
            shape, bits = found[name]
            getattr(meta[key], attribute).copy_(torch.tensor(bits, dtype=torch.int32).view(torch.float32).view(shape))
