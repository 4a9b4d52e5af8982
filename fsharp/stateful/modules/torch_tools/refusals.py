"""Error messages about functions of parts: the parameter, this rank's share, the library that called, and what to write."""

import sys
import types
from typing import cast

from fsharp.stateful.runtime.boundary import in_backward

NO_COPIES = (
    "A sharded module, or a module or parameter of it, cannot be copied or pickled. For a second one, such as a teacher, shard "
    "a new module: `teacher = fs.shard_module(make_model(), ...)`, `teacher.load_state_dict(model.state_dict())`. For a file, "
    "save model.full_state_dict()."
)
Cause = tuple[str, str, str]
"""A known caller of functions of parts: how its Python module's name begins, the caller in a user's words, what to write."""

_CAUSES: list[Cause] = [
    ("torch.optim.", "an optimizer of torch.optim", "Make a fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, ...)."),
    ("torch.amp.grad_scaler", "torch's GradScaler", "Take fs.GradScaler."),
    (
        "torch.distributed.fsdp.",
        "FSDP",
        "The module is sharded already: name the modules to gather by themselves in fs.shard_module(model, units=...).",
    ),
    (
        "torch.distributed.checkpoint.",
        "torch.distributed.checkpoint",
        "Save by dcp.save({'model': model.state_dict()}), fs.checkpoint.save(), or whole tensors from model.full_state_dict().",
    ),
    ("safetensors.", "safetensors", "Save whole tensors: model.full_state_dict()."),
    (
        "torch.nn.modules.",
        "a module in the model that is called by itself",
        "Call the model, choose that module as one of the units, or name the method that calls it: "
        "fs.shard_module(methods=[...]).",
    ),
]
"""From the innermost function under way outwards, the first match counts."""
_CHECKPOINTED: Cause = (
    "torch.utils.checkpoint.",
    "a checkpoint that recomputes",
    "The backward of its unit is not under way: the module that a checkpoint recomputes has to be a unit or inside of one, and "
    "of model.functional() a unit.",
)


def remedy_or(usual: str) -> str:
    """Return the remedy for the known caller under way, or ``usual`` if there is none."""
    cause = _cause()
    return usual if cause is None else cause[2]


def not_whole(held: str, name: str) -> str:
    """Return the error message for a function that would take ``held``, a part, for the whole tensor."""
    rest = "Elementwise functions, and sums, extremes and norms of all elements, work with parts. For other functions "
    rest += "parameters are whole inside of `with model.unsharded():` (write=True keeps changes)."
    return f"{held}, which {name}(){_asked_by()} would take for the whole tensor. {remedy_or(rest)}"


def unseen(path: str, name: str) -> str:
    """Return the error message for a function of a trained parameter with gradients on, as autograd does not reach parts."""
    remedy = "Compute a term of the loss in a forward, or in a method that fs.shard_module(methods=[...]) names. Read values "
    remedy += "under torch.no_grad()."
    return (
        f"parameter {path!r} is used by {name}(){_asked_by()} outside of the forward of its ShardedModule, where it would get "
        f"no gradient. {remedy_or(remedy)}"
    )


def _asked_by() -> str:
    cause = _cause()
    return "" if cause is None else f" of {cause[1]}"


def _cause() -> Cause | None:
    """Return the known caller among the functions under way; None if there is none."""
    modules, frame = list[str](), cast(types.FrameType | None, sys._getframe(1))
    while frame is not None:
        modules.append(f"{frame.f_globals.get('__name__', '')}.")
        frame = frame.f_back
    if in_backward() and any(module.startswith(_CHECKPOINTED[0]) for module in modules):
        return _CHECKPOINTED
    return next((cause for module in modules for cause in _CAUSES if module.startswith(cause[0])), None)
