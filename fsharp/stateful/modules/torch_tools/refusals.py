"""What is said to those who compute with a part of a parameter: which one, how much is here, who asked, and what to write."""

import sys
import types
from typing import NamedTuple

from fsharp.stateful.runtime.boundary import in_backward


class Cause(NamedTuple):
    """Who computes with a part.

    Attributes:
        module: the name of a Python module, or the beginning of one and a dot, whose code asks.
        who: what a user has called.
        remedy: what to write instead.
    """

    module: str
    who: str
    remedy: str


NO_COPIES = (
    "A sharded module, or a module or parameter of it, cannot be copied or pickled. For a second one, such as a teacher, shard "
    "one that is made anew: `teacher = fs.shard_module(make_model(), ...)`, `teacher.load_state_dict(model.state_dict())`. "
    "For a file save model.full_state_dict()."
)
_CAUSES = [
    Cause(
        "torch.optim.", "an optimizer of torch.optim", "Make a fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, ...)."
    ),
    Cause("torch.amp.grad_scaler", "torch's GradScaler", "Take fs.GradScaler."),
    Cause(
        "torch.distributed.fsdp.",
        "FSDP",
        "The module is sharded already: name the modules to gather by themselves in fs.shard_module(model, units=...).",
    ),
    Cause(
        "torch.distributed.checkpoint.",
        "torch.distributed.checkpoint",
        "Save by dcp.save({'model': model.state_dict()}), fs.checkpoint.save(), or whole tensors from model.full_state_dict().",
    ),
    Cause("safetensors.", "safetensors", "Save whole tensors: model.full_state_dict()."),
    Cause(
        "torch.nn.modules.",
        "a module in the model that is called by itself",
        "Call the model, choose that module as one of the units, or name the method that calls it: "
        "fs.shard_module(methods=[...]).",
    ),
]
"""The first that matches a function under way counts, from the innermost function outwards."""
_CHECKPOINTED = Cause(
    "",
    "a checkpoint that computes again",
    "The backward of its unit is not under way: what a checkpoint computes again in a backward has to be a unit or inside of "
    "one, and of model.functional() a unit.",
)


def remedy_or(usual: str) -> str:
    """Return what to write instead where somebody known computes with a part, and ``usual`` elsewhere."""
    cause = _cause()
    return usual if cause is None else cause.remedy


def not_whole(held: str, name: str) -> str:
    """Return the text for a function that would take a part for all of a tensor.

    Args:
        held: which tensor it is, and how much of the tensor this rank holds.
        name: of the function.
    """
    rest = "Functions of each element, and sums, extremes and norms of all, work; for others parameters are whole inside of "
    rest += "`with model.unsharded():` (write=True keeps what is written)."
    return f"{held}, which {name}(){_asked_by()} would take for all of it. {remedy_or(rest)}"


def unseen(path: str, name: str) -> str:
    """Return the text for a function of a trained parameter where autograd is on, and does not reach the parameter.

    Args:
        path: name of the parameter.
        name: of the function.
    """
    remedy = "A term of the loss belongs into a forward, or into a method that fs.shard_module(methods=[...]) names; look at "
    remedy += "values under torch.no_grad()."
    return (
        f"parameter {path!r} is used by {name}(){_asked_by()} outside of the forward of its ShardedModule, where its "
        f"gradient would not be seen. {remedy_or(remedy)}"
    )


def _asked_by() -> str:
    cause = _cause()
    return "" if cause is None else f" of {cause.who}"


def _cause() -> Cause | None:
    """Return who computes at present, as the functions under way tell, if it is somebody known."""
    if in_backward():
        return _CHECKPOINTED
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module = f"{frame.f_globals.get('__name__', '')}."
        found = next((cause for cause in _CAUSES if module.startswith(cause.module)), None)
        if found is not None:
            return found
        frame = frame.f_back
    return None
