"""Scales and histories of TransformerEngine's delayed scaling in state dicts, as text.

TransformerEngine's own extra state is a pickle. A pickle of equal values has other bytes on other ranks, and loading one
runs code.
"""

import json
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fsharp.errors import TreeError
from fsharp.functional.formats.te_delayed import ModuleFormat
from fsharp.functional.layout.layout import Layout

_TEXT_FORMAT = "delayed scaling, 1"
_SCALING_TENSORS = {f"{name}_{way}": (f"scaling_{way}", name) for way in ("fwd", "bwd") for name in ("scale", "amax_history")}
_FP8_META_NUMBERS = ("num_gemms", "fp8_max_fwd", "fp8_max_bwd")


def use_text_extra_state(module: nn.Module) -> None:
    """Make modules of TransformerEngine return their extra state as text, and accept such text as well as pickles."""
    for each in module.modules():
        if any(cls.__name__ == "TransformerEngineBaseModule" for cls in type(each).__mro__):
            ref = weakref.ref(each)
            each.__dict__["get_extra_state"] = lambda ref=ref: _extra_state_as_text(ref())
            each.__dict__["set_extra_state"] = lambda state, ref=ref: _set_extra_state_from_text(ref(), state)


@contextmanager
def preserving_amax_histories(layout: Layout) -> Iterator[None]:
    """Preserve the amax histories of delayed scaling when a layout's weights are cast in this context."""
    formats = [group.dtypes.stored_format for unit in layout.units for group in unit.groups]
    with ExitStack() as stack:
        for scales in dict.fromkeys(form.scales for form in formats if isinstance(form, ModuleFormat)):
            stack.enter_context(scales.restoring_maxima())
        yield


def _extra_state_as_text(module: Any) -> torch.Tensor:
    meta = module.fp8_meta
    own: torch.Tensor = type(module).get_extra_state(module)
    if not own.numel() or not all(hasattr(meta.get(key), name) for key, name in _SCALING_TENSORS.values()):
        return own
    found: dict[str, Any] = {"format": _TEXT_FORMAT, **{name: meta[name] for name in _FP8_META_NUMBERS if name in meta}}
    for name, (key, attribute) in _SCALING_TENSORS.items():
        tensor = getattr(meta[key], attribute).detach().cpu()
        found[name] = [list(tensor.shape), tensor.contiguous().view(torch.int32).flatten().tolist()]
    return torch.frombuffer(bytearray(json.dumps(found).encode()), dtype=torch.uint8).clone()


def _set_extra_state_from_text(module: Any, state: Any) -> None:
    data = state.detach().cpu().numpy().tobytes() if isinstance(state, torch.Tensor) else b""
    if not data.startswith(b"{"):
        type(module).set_extra_state(module, state)
        return
    found = json.loads(data)
    if found.get("format") != _TEXT_FORMAT:
        raise TreeError(
            f"extra state of a {type(module).__name__} has the format {found.get('format')!r}, expected {_TEXT_FORMAT!r}."
        )
    from transformer_engine.common.recipe import DelayedScaling

    meta = module.fp8_meta
    meta.update({name: found[name] for name in _FP8_META_NUMBERS if name in found}, fp8_checkpoint=True)
    meta["recipe"] = DelayedScaling(amax_history_len=found["amax_history_fwd"][0][0])
    meta.pop("global_fp8_buffer_pos_fwd_recompute", None)
    module.init_fp8_meta_tensors(meta["recipe"])
    with torch.no_grad():
        for name, (key, attribute) in _SCALING_TENSORS.items():
            shape, bits = found[name]
            getattr(meta[key], attribute).copy_(torch.tensor(bits, dtype=torch.int32).view(torch.float32).view(shape))
