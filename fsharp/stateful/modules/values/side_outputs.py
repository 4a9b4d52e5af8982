"""SideOutputFinder: tensors that a module stores outside of its result: in attributes, or in lists among its arguments."""

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsharp.errors import TreeError
from fsharp.functional.release import inner_tensors, unaliased_clone
from fsharp.stateful.modules.values.outputs import replace_tensors_in_place, tensors_in, views_of_parameters

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_flat_weights", "_fsharp", "_fsharp_own", "_fsharp_computes"}
_WITHOUT_SIDE_OUTPUTS = ("torch.nn.", "transformer_engine.")
"""Packages whose modules store no tensors of a call for the backward."""
_CONTAINERS = frozenset({list, dict, set, tuple, deque, OrderedDict, defaultdict})


class SideOutputFinder:
    """Finds the tensors that modules store during a call, besides their results. A backward may begin at such a tensor.

    Modules store such tensors in their attributes and buffers, and in lists, dicts, sets and tuples among the arguments.
    Modules of torch.nn and TransformerEngine are skipped: they store no tensors for the backward. Attributes of other objects,
    and variables of hooks, are not searched.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [weakref.ref(each) for each in modules if not type(each).__module__.startswith(_WITHOUT_SIDE_OUTPUTS)]

    def stored_tensors_by_id(self, arguments: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return, by ``id()``, the tensors that the modules, and containers among ``arguments``, hold now."""
        values = [value for value in arguments if type(value) in _CONTAINERS and value]
        for places, name in self._dict_entries_with_tensors():
            values.append(places[name])
        return {id(x): x for x in tensors_in(values)} if values else {}

    def new_side_outputs(
        self, before: dict[int, torch.Tensor], arguments: Sequence[Any], parameters: Sequence[torch.Tensor], path: str
    ) -> list[torch.Tensor]:
        """Return the tensors with a ``grad_fn`` that a call of the module at ``path`` has stored in modules or ``arguments``.

        ``before``: result of :meth:`stored_tensors_by_id` before the call. Stored views of ``parameters`` are first replaced by
        copies, as the parameters' memory is released. ``arguments``: those of the call.
        """
        new = [x for i, x in self.stored_tensors_by_id(arguments).items() if i not in before]
        if views := views_of_parameters(parameters, new):
            self.replace_stored(arguments, views, [unaliased_clone(x) for x in views], path)
            new = [x for i, x in self.stored_tensors_by_id(arguments).items() if i not in before]
        return [x for x in new if x.grad_fn is not None]

    def replace_stored(
        self, arguments: Sequence[Any], old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], path: str
    ) -> None:
        """Replace ``old[i]`` by ``new[i]`` in modules, and in containers among ``arguments``. Errors name module ``path``."""
        for value in arguments:
            if type(value) in _CONTAINERS:
                replace_tensors_in_place(value, old, new, path)
        for places, name in self._dict_entries_with_tensors():
            places[name] = replace_tensors_in_place(places[name], old, new, path)

    def _dict_entries_with_tensors(self) -> list[tuple[dict[str, Any], str]]:
        """Return ``(dict, key)`` for each attribute and buffer of the modules that is a tensor or a nonempty container."""
        found = []
        for reference in self._modules:
            if (module := reference()) is not None:
                found += _own_entries_with_tensors(module, _MODULE_ATTRIBUTES)
        return found


def _own_entries_with_tensors(module: nn.Module, without: Collection[str | None]) -> list[tuple[dict[str, Any], str]]:
    found = []
    for places in (module.__dict__, module._buffers):
        for name, x in places.items():
            if name not in without and ((type(x) in _CONTAINERS and x) or isinstance(x, torch.Tensor)):
                found.append((places, name))
    return found


def check_parameters_replaceable(module: nn.Module) -> None:
    """Raise a TreeError if a parameter has hooks, or a buffer or unregistered attribute holds a parameter or a view of one."""
    extents = [(name, extent) for name, p in module.named_parameters() for extent in _byte_ranges(p)]
    for path, each in module.named_modules():
        # weight_norm, spectral_norm and prune have hooks that compute these attributes anew in each forward.
        computed = {getattr(hook, key, None) for hook in each._forward_pre_hooks.values() for key in ("name", "_tensor_name")}
        for places, attribute in _own_entries_with_tensors(each, _MODULE_ATTRIBUTES | computed):
            spans = [extent for x in tensors_in([places[attribute]]) for extent in _byte_ranges(x)]
            held = next((name for name, (a, b) in extents for start, stop in spans if a < stop and start < b), None)
            if held is not None:
                raise TreeError(
                    f"shard_module(): {f'{path}.{attribute}'.lstrip('.')} holds parameter {held!r} or a view of it, which "
                    "shard_module() replaces. Replace a list by an nn.ParameterList, and a dict by an nn.ParameterDict; hold "
                    "the parameter's name; or make the view in forward()."
                )
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise TreeError(
                f"shard_module(): parameter {path!r} has hooks, and shard_module() replaces the parameter. Remove the hooks, "
                "and call model.get_parameter(name).register_post_accumulate_grad_hook(hook) after shard_module(): there "
                "p.grad is this rank's part of the mean over ranks."
            )


def _byte_ranges(x: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` addresses of a tensor's bytes; for a wrapper subclass, one pair for each inner tensor."""
    for each in inner_tensors(x.detach()):
        if each.numel() and not each.is_meta:
            last = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            yield each.data_ptr(), each.data_ptr() + (last + 1) * each.element_size()
