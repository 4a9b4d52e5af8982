"""exact_text: the text of a setting, for ranks to compare, which depends on every bit of an array."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from fsharp.functional.comm.equal_values import tensor_digest

_MAX_WRITTEN_ELEMENTS = 8


def exact_text(value: Any) -> str:
    """Return the text of a setting. Texts are equal if and only if settings are equal in every bit.

    An array of at most 8 elements is written out, a larger one by its digest, and any other object by its repr, without
    addresses of functions, as these differ between processes. Arrays are found in dictionaries, sequences, sets, dataclasses
    and ``functools.partial``.
    """
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.is_meta:
            return f"on meta {kind}"
        return f"{value.tolist() if value.numel() <= _MAX_WRITTEN_ELEMENTS else tensor_digest(value).hex()} {kind}"
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and hasattr(value, "shape"):
        found = value.tolist() if value.size <= _MAX_WRITTEN_ELEMENTS else hashlib.sha256(value.tobytes()).hexdigest()[:16]
        return f"{found} {value.dtype}{list(value.shape)}"
    if isinstance(value, partial):
        return f"partial({exact_text(value.func)}, {exact_text(value.args)}, {exact_text(value.keywords)})"
    if is_dataclass(value) and not isinstance(value, type):
        own = ", ".join(f"{field.name}={exact_text(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__qualname__}({own})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{exact_text(key)}: {exact_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(exact_text, value))) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(exact_text, value))
        return f"[{inner}]" if type(value) is list else f"{type(value).__name__}({inner})"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
