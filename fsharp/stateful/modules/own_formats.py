"""The formats of parameters with a tensor class that defines its own gather, such as torchao's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsharp.errors import OptionError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.gather_hooks import format_of_hooked_parameter, hooked_parameters
from fsharp.functional.formats.te import formats_of_module
from fsharp.functional.layout.packing import Element, Rows
from fsharp.functional.layout.precision import Precision
from fsharp.functional.tree.paths import matches_or_contains


def add_tensor_class_formats(
    module: nn.Module, precisions: Mapping[str, Precision], atoms: Any, comm: Comm
) -> tuple[dict[str, Precision], Any]:
    """Return precisions and atoms by pattern, completed for parameters whose tensor class defines its own gather.

    Arguments are those of :func:`~fsharp.plan`; of patterns the last match counts. Refuse a parameter that cannot be gathered
    as its class says.
    """
    found = dict(precisions)
    for path, (form, dtype) in formats_of_module(module).items():
        own = _last_match(precisions, path, Precision())
        found[path] = replace(own, compute=own.compute or dtype, main=own.main or torch.float32, stored=own.stored or form)
    if hooked := hooked_parameters(module):
        atoms = dict(atoms) if isinstance(atoms, Mapping) else {} if atoms is None else {"**": atoms}
    for path, parameter in hooked.items():
        own = _last_match(precisions, path, Precision())
        if own.stored is not None:
            raise OptionError(
                f"parameter {path!r} is a {type(parameter).__name__} with hooks of FSDP2, which encode it, and has "
                f"stored={own.stored.name!r}. Leave stored out by another pattern, or make it a plain parameter."
            )
        if comm.mesh.size > 1 and not torch.distributed.is_initialized():
            raise OptionError(
                f"parameter {path!r} has hooks of FSDP2, which reduce over ranks only where torch.distributed is initialized: "
                "expected ranks that are processes."
            )
        compute, main = own.compute or parameter.dtype, own.main or parameter.dtype
        policy = MixedPrecisionPolicy(param_dtype=compute)
        found[path] = replace(
            own, compute=compute, main=main, stored=format_of_hooked_parameter(parameter, compute, main, comm.device, policy)
        )
        if _last_match(atoms, path, Element()) == Element():
            atoms[path] = Rows(1)
    return found, atoms


def _last_match(by_pattern: Mapping[str, Any], path: str, default: Any) -> Any:
    """Return the value of the last pattern that selects a path, or ``default``."""
    return next((each for pattern, each in reversed([*by_pattern.items()]) if matches_or_contains(pattern, path)), default)
