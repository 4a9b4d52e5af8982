"""The formats by name: layouts and checkpoints find a format by its name, and pickles find it by an import."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch

from fsharp.errors import LayoutError
from fsharp.functional.formats.format import Format, plain_format
from fsharp.type_checks import options_checked_on_failure

_format_by_name: dict[str, Format] = {}


@options_checked_on_failure
def register_format(format: Format) -> Format:
    """Register a format under its name, by which layouts and checkpoints find it when they are read. Return the format.

    Raises:
        LayoutError: a dtype, another format, or a format with other functions has this name already.
    """
    is_dtype = isinstance(getattr(torch, format.name, None), torch.dtype)
    found = plain_format(getattr(torch, format.name)) if is_dtype else _format_by_name.setdefault(format.name, format)
    if found != format or found.encode is not format.encode or found.decode is not format.decode:
        raise LayoutError(
            f"register_format(): there is another format {format.name!r} already, {found}, or one with other functions. "
            "Give this one another name."
        )
    return format


def made_by_import(name: str, module: str = "fsharp.formats") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return :attr:`Format.made_by` of a format that is the attribute ``name`` of a module."""
    return resolve_name, (f"{module}:{name}",)


def format_named(name: str) -> Format:
    """Return the plain format of the dtype ``name``, or the registered format ``name``. Raises LayoutError for other names."""
    if isinstance(dtype := getattr(torch, name, None), torch.dtype):
        return plain_format(dtype)
    if name not in _format_by_name:
        raise LayoutError(
            f"no format {name!r}: import the module that registers it first. There are {sorted(_format_by_name)}."
        )
    return _format_by_name[name]
