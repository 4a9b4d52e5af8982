"""The places of parameters in a module, by unit: full parameters are put there while it computes, and new ones are found."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsharp.errors import TreeError
from fsharp.stateful.modules.parameter import ShardedParameter


class ParameterSlots:
    """The places of one unit's parameters in a module, in the order of the unit's leaves.

    ``present`` has by place what was put there last, of all units of a module: several have a place that they share.
    """

    def __init__(self, module: nn.Module, paths: Iterable[str], present: dict[tuple[int, str], Any]) -> None:
        self._places: list[tuple[int, dict[str, Any], str]] = []
        self._paths, self._present = list(paths), present
        packed: dict[int, weakref.ref[nn.Module]] = {}
        known: set[tuple[int, str]] = set()
        for i, path in enumerate(self._paths):
            parent, _, name = path.rpartition(".")
            owner = module.get_submodule(parent)
            if (id(owner), name) not in known:  # a module may have several paths
                known.add((id(owner), name))
                self._places.append((i, owner._parameters, name))
            if hasattr(owner, "_flat_weights_names"):
                packed[id(owner)] = weakref.ref(owner)
        self._packed = list(packed.values())  # recurrent modules keep a list of their parameters besides

    def check(self) -> None:
        """Refuse to compute where somebody else has put other parameters: they would be ignored."""
        for i, places, name in self._places:
            if places.get(name) is not self._present[id(places), name]:
                raise TreeError(
                    f"parameter {self._paths[i]!r} is not there, or is not the one that shard_module() has put there, and a "
                    "forward computes with that one. Write values in `with model.unsharded(write=True):`; replace, tie and "
                    "parametrize before shard_module(); in place of torch.func.functional_call() take "
                    "`fn, params = model.functional()`."
                )

    @property
    def sitting(self) -> list[tuple[int, Any]]:
        """What sits there, with the position of its path."""
        return [(i, places[name]) for i, places, name in self._places]

    def swap(self, tensors: Sequence[Any]) -> list[Any]:
        """Seat these, one for each path; what sat there before."""
        before = list(tensors)
        for i, places, name in self._places:
            before[i] = places[name]
            places[name] = self._present[id(places), name] = tensors[i]
        for reference in self._packed:
            owner: Any = reference()
            owner.__dict__["_flat_weights"] = [getattr(owner, name, None) for name in owner._flat_weights_names]
        return before


@contextmanager
def own_buffers(root: nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """In this context all buffers are copies; what each is a copy of, and the copy. One that modules share stays one."""
    before = [(module, dict(module._buffers)) for module in root.modules() if module._buffers]
    copies = {id(b): (b, b.clone()) for _, buffers in before for b in buffers.values() if b is not None}
    try:
        for module, buffers in before:
            module._buffers.update({name: b if b is None else copies[id(b)][1] for name, b in buffers.items()})
        yield list(copies.values())
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


def refuse_added(module: nn.Module, path: str) -> None:
    """Refuse parameters that require a gradient and came into a gathered module after it was sharded.

    Frozen parameters may be added, and a wrapper may replace the submodule that it wraps. Modules in it that are gathered by
    themselves are left out.
    """
    modules = [module]
    for each in modules:
        for parameter in each._parameters.values():
            if parameter is None or isinstance(parameter, ShardedParameter):
                continue
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad:  # full ones within calls are plain tensors
                name = next(name for name, found in module.named_parameters(path) if found is parameter)
                raise TreeError(
                    f"parameter {name!r} came into the module after shard_module(), and has no gradient and no optimizer "
                    "state: it would not be trained. Add the parameter before shard_module(); or freeze it by "
                    "requires_grad_(False), and each rank uses its own values."
                )
        for child in each._modules.values():
            if child is not None and "_fsharp_own" not in child.__dict__:  # else the child is gathered by itself
                modules.append(child)
