"""ShardedParameter: a module's parameter outside of its forward, with this rank's part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import nn

from fsharp.errors import LayoutError, TreeError
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.unit_layout import Leaf
from fsharp.stateful.modules.parts.part import ShardedTensor as ShardedTensor
from fsharp.stateful.modules.parts.part_functions import is_in_place
from fsharp.stateful.modules.torch_tools.refusals import NO_COPIES_MESSAGE
from fsharp.stateful.runtime.boundary import in_backward
from fsharp.tracebacks import api_boundary


class ShardedParameter(ShardedTensor, nn.Parameter):
    """This rank's part of a module's parameter. A trained parameter is sharded for the optimizer, in the optimizer's dtype.

    Attributes:
        is_trained: whether the parameter required a gradient when its module was sharded: it has gradients and optimizer state.
    """

    is_trained: bool

    @classmethod
    @api_boundary
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.grad:
            return _differentiate(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "backward":
            raise LayoutError(
                "backward(inputs=...): parameters of a ShardedModule cannot be inputs of a backward. Use torch.autograd.grad()."
            )
        if in_backward():
            writes = (is_in_place(name) and name != "requires_grad_") or name == "__setitem__"
            written: Any = (kwargs or {}).get("out"), (args[:1] or [*(kwargs or {}).values()][:1]) if writes else ()
            for x in optree.tree_leaves(written):
                if isinstance(x, ShardedParameter) and (owner := x.owner()) and owner.full_parameter_in_backward(x) is not None:
                    raise TreeError(
                        f"{name}(): parameter {x.path!r} is written to in the backward of its unit, where gathered parameters "
                        "stand for it, so the write would be lost. Write to parameters after the backward."
                    )
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def requires_grad(self) -> bool:
        """Whether backward passes give the parameter a gradient: it is trained, and not paused by :meth:`requires_grad_`."""
        owner = self.owner()
        return self.is_trained and (owner is None or self.path not in owner.paused)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @api_boundary
    def requires_grad_(self, requires_grad: bool = True) -> "ShardedParameter":
        """Pause the training of this parameter (False), or resume it (True). All ranks have to call this method.

        A paused parameter gets no gradient in a backward, and an optimizer does not update it. A parameter that was frozen when
        its module was sharded cannot be trained: True is an error.
        """
        if requires_grad and not self.is_trained:
            raise LayoutError(
                f"parameter {self.path!r} was frozen when its module was sharded: it has no room for gradients and optimizer "
                "state. Call shard_module() while it requires a gradient, and requires_grad_(False) afterwards."
            )
        if (owner := self.owner()) is not None and self.is_trained:
            (owner.paused.discard if requires_grad else owner.paused.add)(self.path)
        return self

    @api_boundary
    def register_post_accumulate_grad_hook(self, hook: Callable[["ShardedParameter"], Any]) -> Any:
        """Call ``hook(parameter)`` at the end of each backward that gives the parameter a gradient.

        Return a handle, whose ``remove()`` removes the hook. Hooks run under ``torch.no_grad()``, after all parameters have
        their ``.grad``, in the same order on all ranks. A backward inside of ``accumulate()`` calls no hooks. All ranks have to
        register equal hooks. A parameter that does not require a gradient is an error.
        """
        owner = self.owner()
        if owner is None or not self.requires_grad:
            raise LayoutError(
                f"register_post_accumulate_grad_hook(): parameter {self.path!r} does not require a gradient. Call "
                "requires_grad_(True) before."
            )
        return owner.add_gradient_ready_hook(self.path, hook)

    @api_boundary
    def register_hook(self, hook: Any) -> Any:
        """Raise an error: autograd does not see parts. Use :meth:`register_post_accumulate_grad_hook`."""
        raise LayoutError(
            f"register_hook(): parameter {self.path!r} is a part, which autograd does not reach. Its mean gradient over ranks "
            "is p.grad at the end of a backward. Write p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(...))."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise TreeError(f"parameter {self.path!r} is a part of a ShardedModule. {NO_COPIES_MESSAGE}")

    @property
    @api_boundary
    def grad(self) -> ShardedTensor | None:
        """This rank's part of the mean gradient over ranks, or None. Reading is an error while gradients only accumulate."""
        return owner.gradient_part(self.path) if (owner := self.owner()) is not None and self.is_trained else None

    @grad.setter
    @api_boundary
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and value is not self.grad:  # `p.grad *= 2` sets what it has written to
            raise TreeError(
                f"parameter {self.path!r}: the module stores the gradient: write `p.grad.copy_(...)`, or set p.grad to None."
            )
        if value is None and (owner := self.owner()) is not None and self.is_trained:
            owner.release_gradient(self.path)


def iter_leaves_and_parts(node: Sharded, rank: int) -> Iterator[tuple[str, Leaf, torch.Tensor]]:
    """Yield ``(path, leaf, elements)`` for each leaf: the elements on this ``rank``, maybe none, as a 1-D view, or decoded."""
    here = node.local_leaves(rank)
    for group, buffer in zip(node.groups, node.buffers, strict=True):
        for leaf in node.unit.leaves_of_group(group):
            path = node.unit.path_in_tree(leaf)
            yield path, leaf, here.get(path, buffer[:0])


def _differentiate(outputs: Any, inputs: Sequence[torch.Tensor], **options: Any) -> Any:
    owner = next((x.owner() for x in inputs if isinstance(x, ShardedParameter)), None)
    if owner is None:
        raise LayoutError("torch.autograd.grad(): sharded parameters are leaves, and cannot be outputs.")
    return owner.differentiate(outputs, inputs, **options)
