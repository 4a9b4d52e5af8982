"""ShardedParameter: this rank's part of a parameter, which the module shows outside of its forward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsharp.errors import LayoutError, TreeError
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.unit_layout import Leaf
from fsharp.stateful.modules.parts.part import Part
from fsharp.stateful.modules.torch_tools.refusals import NO_COPIES
from fsharp.tracebacks import api_boundary

__all__ = ["Part", "ShardedParameter", "held_leaves"]


class ShardedParameter(Part, nn.Parameter):
    """This rank's part of a parameter, as the optimizer has it.

    ``is_trained``: whether it has gradients and optimizer state, as it was when the module was sharded.
    """

    is_trained: bool

    @classmethod
    @api_boundary
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.grad:
            return _differentiate(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "backward":
            raise LayoutError(
                "backward(inputs=...): parameters of a ShardedModule cannot be inputs of a backward. Use torch.autograd.grad()."
            )
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def requires_grad(self) -> bool:
        """Whether forwards differentiate with respect to this parameter: it is trained, and not paused at present."""
        owner = self.owner()
        return self.is_trained and (owner is None or self.path not in owner.paused)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @api_boundary
    def requires_grad_(self, requires_grad: bool = True) -> "ShardedParameter":
        """Pause a trained parameter, or resume it.

        All ranks do the same. One that was frozen when its module was sharded is refused.

        A paused parameter gets no gradient from a backward, and an optimizer does not update it.
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
        """Have ``hook(parameter)`` called at the end of each backward that gives the parameter a gradient.

        Return a handle, whose ``remove()`` removes the hook. Hooks run without gradients, once ``.grad`` of all parameters is
        there, in an order that ranks share. A backward within ``accumulate()`` calls no hooks. All ranks register the same
        hooks. A parameter that does not require a gradient is refused.
        """
        owner = self.owner()
        if owner is None or not self.requires_grad:
            raise LayoutError(
                f"register_post_accumulate_grad_hook(): parameter {self.path!r} does not require a gradient. Call "
                "requires_grad_(True) before."
            )
        return owner.step.means.add_hook(self.path, hook)

    @api_boundary
    def register_hook(self, hook: Any) -> Any:
        """Refuse a hook: autograd never reaches a part."""
        raise LayoutError(
            f"register_hook(): parameter {self.path!r} is a part, which autograd does not reach. Its mean gradient over ranks "
            "is p.grad at the end of a backward. Write p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(...))."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise TreeError(f"parameter {self.path!r} is a part of a ShardedModule. {NO_COPIES}")

    @property
    @api_boundary
    def grad(self) -> Part | None:
        """The mean gradient over ranks, of this part, once a backward has ended that was not told to accumulate."""
        owner = self.owner()
        return owner.step.gradient(self.path) if owner is not None and self.is_trained else None

    @grad.setter
    @api_boundary
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise TreeError(
                f"parameter {self.path!r}: the module stores the gradient: write `p.grad.copy_(...)`, or set p.grad to None."
            )
        if (owner := self.owner()) is not None and self.is_trained:
            owner.step.drop_gradient(self.path)


def held_leaves(node: Sharded, rank: int) -> Iterator[tuple[str, Leaf, torch.Tensor]]:
    """Yield path, leaf and this rank's elements of each leaf of a node, which are views of its buffers.

    Of a leaf of which the rank holds nothing, yield an empty view: it has the buffer's memory and version, as the others.
    """
    here = node.local_leaves(rank)
    for group, buffer in zip(node.groups, node.buffers, strict=True):
        for leaf in node.unit.leaves_of(group):
            path = node.unit.full_path(leaf)
            yield path, leaf, here.get(path, buffer[:0])


def _differentiate(outputs: Any, inputs: Sequence[torch.Tensor], **options: Any) -> Any:
    first = next((x for x in inputs if isinstance(x, ShardedParameter)), None)
    owner = None if first is None else first.owner()
    if owner is None:
        raise LayoutError("torch.autograd.grad(): sharded parameters are leaves, and cannot be outputs.")
    return owner.differentiate(outputs, inputs, **options)
