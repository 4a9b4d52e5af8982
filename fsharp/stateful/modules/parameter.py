"""What a module's parameters and gradients are outside of its forward: this rank's part, and no more than that.

A part that is all of a parameter may be used like any other tensor. Any other one says it has the shape of the whole, for those
who count parameters or sort them by their dims, and refuses to take part in computing, which would give wrong numbers.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from fsharp.errors import LayoutError, TreeError
from fsharp.functional.layout.placement import Place
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.stateful.runtime.boundary import in_backward


class GradientSource(Protocol):
    """Knows the gradients of a module's parameters."""

    def gradient(self, path: str) -> "Part | None":
        """Of one parameter; None if there is none."""

    def drop_gradient(self, path: str) -> None:
        """Somebody has set it to None."""

    def differentiate(self, outputs: Any, inputs: Sequence[torch.Tensor], **options: Any) -> tuple[torch.Tensor | None, ...]:
        """What ``torch.autograd.grad`` is asked for."""


# What neither computes nor copies: metadata, and what autograd and printing ask for.
_HARMLESS = {
    "element_size",
    "data_ptr",
    "storage_offset",
    "untyped_storage",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
}
_HARMLESS |= {"is_shared", "is_pinned", "is_inference", "get_device", "requires_grad_", "__hash__", "__dir__"}
_COMPUTING = {"T", "mT", "H", "mH", "real", "imag"}  # attributes that are not metadata
_COPIES = {"clone", "to", "cpu", "cuda"}  # of a part they are a part, in other memory
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_SHAPES: dict[str, Callable[..., Any]] = {
    "shape": lambda whole: whole.shape,
    "ndim": lambda whole: whole.ndim,
    "size": lambda whole, *dim, **named: whole.size(*dim, **named),
    "dim": lambda whole: whole.dim(),
    "numel": lambda whole: whole.numel(),
    "nelement": lambda whole: whole.numel(),
    "stride": lambda whole, *dim, **named: whole.stride(*dim, **named),
    "__len__": len,
}
"""What is answered for the whole tensor."""


class Part(torch.Tensor):
    """This rank's part of a tensor. ``shape``, ``ndim`` and ``numel()`` are those of the whole; :attr:`local` is what is here.

    ``unit.run_of(leaf, place, rank)`` is what any rank holds. ``clone()``, ``to()``, ``cpu()`` and ``copy.deepcopy`` give the
    same part in other memory. A part that is whole is pickled as a plain tensor, and any other one is refused.

    Attributes:
        path: name of the parameter in its module.
        full_shape: of the whole tensor.
        is_whole: whether every rank holds all of it.
        unit: layout of the unit that stores it.
        leaf: which leaf of that unit it is. Of a DTensor that other axes shard, leaf and run are those of the local tensor.
        place: where it rests.
        rank: the one that holds it.
    """

    path: str
    full_shape: torch.Size
    is_whole: bool
    unit: UnitLayout
    leaf: Leaf
    place: Place
    rank: int

    @staticmethod
    def of(data: torch.Tensor, like: "Part") -> "Part":
        """The same part of another tensor, of which ``data`` is the elements that this rank holds."""
        data = data.view(like.full_shape) if like.is_whole else data
        part: Part = _labelled(data.as_subclass(Part), {name: getattr(like, name) for name in Part.__annotations__})
        return part

    @property
    def run(self) -> tuple[int, int]:
        """The elements ``[first, last)`` of the flattened whole that are here; ``(0, 0)`` if there are none."""
        return self.unit.run_of(self.leaf, self.place, self.rank)

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements, as a plain tensor in the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.grad:
            return _differentiate(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        is_attribute = name == "__get__"
        if is_attribute:
            name = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
        if name in _SHAPES and isinstance(args[0], Part):
            return _SHAPES[name](torch.empty(args[0].full_shape, device="meta"), *args[1:], **(kwargs or {}))
        if name == "detach" and isinstance(args[0], Part):
            return Part.of(args[0].local, args[0])
        if name in _COPIES and type(args[0]) is Part:
            return Part.of(getattr(args[0].local, name)(*args[1:], **(kwargs or {})), args[0])
        if name == "backward":
            raise LayoutError(
                "backward(inputs=...): parameters of a ShardedModule are no inputs of it. Use torch.autograd.grad()."
            )
        if name in _COMPUTING if is_attribute else name not in _HARMLESS:
            for each in (*args, *(kwargs or {}).values()):
                for x in each if isinstance(each, list | tuple) else (each,):
                    if isinstance(x, Part) and not x.is_whole:
                        raise LayoutError(_refusal(x, name))  # a TypeError would be taken for an operator that is not there
                    if isinstance(x, ShardedParameter) and x.is_trained and (torch.is_grad_enabled() or name in _HOOKS):
                        raise LayoutError(_unseen(x, name))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"{type(self).__name__}({self.path!r}, {self.numel()} elements of {list(self.full_shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = copied = Part.of(self.local.clone(), self)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        varying = [axis for axis in self.place.varying if self.unit.mesh.axis_size(axis) > 1]
        if self.is_whole and not varying:
            return self.local.__reduce_ex__(protocol)
        own = f", and ranks along {varying} have values of their own" if varying else ""
        raise TreeError(
            f"{self.path!r} cannot be pickled: rank {self.rank} holds elements {list(self.run)} of {list(self.full_shape)}{own}"
            ", and whoever reads the file would take them for all. Save by fs.checkpoint.save(), or whole parameters: "
            "dict(model.full_parameters()), or model.state_dict() in `with model.unsharded():`."
        )


class ShardedParameter(Part, nn.Parameter):
    """This rank's part of a parameter, as the optimizer has it.

    Attributes:
        is_trained: whether it has gradients and optimizer state; as it was when the module was sharded.
    """

    is_trained: bool
    _gradients: "weakref.ref[GradientSource]"

    @staticmethod
    def over(
        data: torch.Tensor, gradients: GradientSource, unit: UnitLayout, leaf: Leaf, *, place: Place, rank: int, **labels: Any
    ) -> "ShardedParameter":
        """A parameter in this memory, 1-D. ``labels`` are ``full_shape`` and ``is_whole``."""
        data, trains = data.view(labels["full_shape"]) if labels["is_whole"] else data, unit.groups[leaf.group].trainable
        new: ShardedParameter = torch.Tensor._make_subclass(ShardedParameter, data, trains)
        new._gradients, new.is_trained = weakref.ref(gradients), trains  # the former has this one
        labels |= {"path": unit.full_path(leaf), "unit": unit, "leaf": leaf, "place": place, "rank": rank}
        return _labelled(new, labels)  # type: ignore[no-any-return]

    @property
    def data(self) -> Part:
        """The same part, which autograd knows nothing of: who writes to it is noticed."""
        return Part.of(self.local, self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise TreeError(
            f"parameter {self.path!r} rests in memory of its ShardedModule, in a dtype and shape that are planned: it cannot "
            "be given other data. Write to it in `with model.unsharded(write=True):`."
        )

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained, which stays so."""
        return self.is_trained

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardedParameter":
        """Nothing, if that is how it is.

        Raises:
            LayoutError: it is not.
        """
        if bool(requires_grad) != self.is_trained:
            raise LayoutError(
                f"parameter {self.path!r} was {'trained' if self.is_trained else 'frozen'} when its module was sharded, and "
                "layouts and optimizer state are made for that. Freeze and unfreeze before shard_module()."
            )
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        raise TreeError(
            f"parameter {self.path!r} is a part of a ShardedModule, which cannot be copied; functional() gives its values."
        )

    @property
    def grad(self) -> Part | None:
        """The mean gradient over ranks, of this part, once a backward has ended that was not told to accumulate."""
        gradients = self._gradients()
        return None if gradients is None else gradients.gradient(self.path)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise TreeError(f"parameter {self.path!r}: its gradient is the module's; write to `grad.local`, or set it to None.")
        gradients = self._gradients()
        if gradients is not None:
            gradients.drop_gradient(self.path)


def _differentiate(outputs: Any, inputs: Sequence[torch.Tensor], **options: Any) -> tuple[torch.Tensor | None, ...]:
    first = next((x for x in inputs if isinstance(x, ShardedParameter)), None)
    gradients = None if first is None else first._gradients()
    if gradients is None:
        raise LayoutError("torch.autograd.grad(): sharded parameters are leaves, and cannot be outputs.")
    return gradients.differentiate(outputs, inputs, **options)


def _labelled(part: Any, labels: Mapping[str, Any]) -> Any:
    part.__dict__.update(labels)
    return part


_CHECKPOINTED = " What is checkpointed has to be one of the units, to be gathered when it computes again."


def _unseen(part: Part, name: str) -> str:
    return (
        f"parameter {part.path!r} is used by {name}() outside of the forward of its ShardedModule, where its gradient "
        "would not be seen. Do so inside of a forward, or of a method that shard_module(methods=[...]) names, or under "
        "torch.no_grad()."
    ) + _CHECKPOINTED * in_backward()


def _refusal(part: Part, name: str) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        held = part.numel()
    kind = "" if isinstance(part, nn.Parameter) else "a part or gradient of "
    return (
        f"{kind}{part.path!r} is sharded: this rank holds {held:,} of the {part.full_shape.numel():,} elements of "
        f"{list(part.full_shape)}, which {name}() would take for all of it. Parameters are whole inside of the forward of the "
        "module that they are gathered with, inside of methods that shard_module(methods=[...]) names, and in `with "
        "model.unsharded():`. Optimizers go into a ShardedOptimizer, norms are clipped by model.clip_grad_norm_(), losses are "
        "scaled by fs.GradScaler; `.local` is this rank's part."
    ) + _CHECKPOINTED * in_backward()
