"""ShardedTensor: this rank's part of a tensor. torch's functions of parts compute for the whole tensor, or raise an error."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NoReturn, Protocol, Self

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.utils.hooks import RemovableHandle

from fsharp.errors import LayoutError, TreeError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.slicing import boxes_covering_run
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.stateful.modules.parts.part_functions import (
    COPYING_FUNCTIONS,
    ELEMENTWISE_FUNCTIONS,
    PREDICATES,
    ReductionFns,
    foreach_argument_rows,
    is_in_place,
    reduction_of,
)
from fsharp.stateful.modules.torch_tools.dtensors import DTensorSpec
from fsharp.stateful.modules.torch_tools.refusals import running_torch_tool_and_remedy
from fsharp.stateful.runtime.boundary import in_backward
from fsharp.tracebacks import api_boundary

# Functions that neither compute nor copy: metadata, and functions that autograd and printing call.
_METADATA_FUNCTIONS = {"data_ptr", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point"}
_METADATA_FUNCTIONS |= {"is_inference", "is_pinned", "is_shared", "requires_grad_", "storage_offset", "untyped_storage"}
_METADATA_FUNCTIONS |= {"__dir__", "__hash__", "typename"}
_COMPUTED_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}  # attributes that are not metadata
_RESHAPING_FUNCTIONS = {"as_strided_", "resize_", "resize_as_", "share_memory_", "squeeze_", "swapaxes_", "swapdims_"}
_RESHAPING_FUNCTIONS |= {"t_", "transpose_", "unsqueeze_"}
_SHAPE_FUNCTIONS = {"shape", "ndim", "size", "dim", "numel", "nelement", "stride", "__len__"}  # of the whole tensor


class ShardedTensor(torch.Tensor):
    """A tensor that is sharded over ranks: it has the shape of the whole tensor, and this rank's elements.

    ``shape``, ``ndim`` and ``numel()`` are those of the whole tensor. :attr:`local` is a plain tensor with this rank's
    elements. Below, a sharded tensor is called a *part*. torch functions of parts work as follows:

    - Elementwise functions, in place or not, return a part. Other arguments are numbers, tensors without dims, parts that are
      cut alike, or a whole tensor on every rank. Each rank uses the elements of a whole tensor that match its part.
    - Sums, means, extremes and norms of all elements are those of the whole tensor. All ranks have to call these functions,
      which use a small collective for each axis that cuts the tensor. If ranks have different values, all of these count.
    - ``clone()`` and, except of parameters, ``copy.deepcopy`` return a part in new memory. ``to()`` and ``cpu()`` return a part
      in the same memory if dtype and device stay.
    - All other functions raise an error, unless every rank holds the whole tensor: then the part works like any tensor.
    - A function that would need a gradient of a parameter raises an error: call it under ``torch.no_grad()``.

    If every rank holds the same whole tensor, a part is pickled as a plain tensor. Pickling any other part is an error.

    Attributes:
        path: name of the parameter in its module.
        unit: layout of the unit that stores the tensor; ``unit.leaf_range_on_rank(leaf, place, rank)`` is a rank's range.
        leaf: leaf of that unit. If other axes shard a DTensor, ``leaf`` and :attr:`flat_range` are those of its local tensor.
        place: a placement for each mesh axis: where the tensor rests.
        rank: rank that holds this part.
        spec: spec of a DTensor; None for a plain tensor.
        owner: weak reference to the module's ModuleSession, as a :class:`ShardedTensorOwner`.
    """

    path: str
    unit: UnitLayout
    leaf: Leaf
    place: MeshPlacement
    rank: int
    spec: DTensorSpec | None
    owner: "weakref.ref[ShardedTensorOwner]"

    @classmethod
    def from_attributes(cls, data: torch.Tensor, attributes: Mapping[str, Any], *, requires_grad: bool = False) -> Self:
        """Return a part with the elements ``data``, a 1-D tensor that is not copied, and these :attr:`sharding_attributes`."""
        if _is_whole_on_every_rank(attributes["unit"], attributes["place"], attributes["spec"]):
            data = data.view(attributes["leaf"].shape)
        part: Self = torch.Tensor._make_subclass(cls, data, requires_grad)  # no view, which would keep its base alive
        part.__dict__.update(attributes)
        return part

    @staticmethod
    def from_local(data: torch.Tensor, like: "ShardedTensor") -> "ShardedTensor":
        """Return a part that is sharded as ``like`` is, with this rank's elements ``data``, a 1-D tensor that is not copied."""
        return ShardedTensor.from_attributes(data, like.sharding_attributes)

    @property
    def sharding_attributes(self) -> dict[str, Any]:
        """The annotated attributes of the class (``path``, ``unit`` and so on) as a dict, for :meth:`from_attributes`."""
        return {name: getattr(self, name) for name in ShardedTensor.__annotations__}

    @property
    def _original_dtensor_sharding(self) -> tuple[Any, ...] | None:
        """Mesh and placements of the sharded DTensor that the parameter was before; None for any other parameter."""
        return (self.spec.mesh, self.spec.placements) if self.spec is not None and self.spec.is_sharded else None

    @property
    def full_shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self.leaf.shape) if self.spec is None else self.spec.shape

    @property
    def is_whole_on_every_rank(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return _is_whole_on_every_rank(self.unit, self.place, self.spec)

    @property
    def is_split(self) -> bool:
        """Whether at least one rank holds only a part of the tensor's elements: more than none, but not all."""
        size, first, n = self.unit.local_size(self.leaf.group, self.place), self.leaf.offset, self.leaf.numel
        return self._original_dtensor_sharding is not None or (n > 0 and first // size != (first + n - 1) // size)

    @property
    def flat_range(self) -> tuple[int, int]:
        """Range ``(first, last)``: this rank holds ``whole.flatten()[first:last]``; ``(0, 0)`` without elements."""
        return self.unit.leaf_range_on_rank(self.leaf, self.place, self.rank)

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements as a plain tensor in the part's memory, 1-D if the part is cut. Waits for gathers under way."""
        if (owner := self.owner()) is not None:
            owner.wait_before_write()
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(torch.Tensor)

    def move_to_new_memory(self) -> None:
        """Copy this rank's elements to new memory. Earlier views of the part keep the old memory."""
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            torch.Tensor.data.__set__(self, self.clone())  # type: ignore[attr-defined]

    # Methods that torch.distributed.checkpoint calls.

    def __create_write_items__(self, name: str, part: "ShardedTensor") -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, items = TensorProperties.create_from_tensor(self.local), []
        for chunk in self.__create_chunk_list__():
            about = TensorWriteData(chunk, properties, self.full_shape)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=about))
        return items

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        shape, own = self.full_shape, [a for a in self._cut_or_varying_axes if a in self.place.varying_axes]
        if own or shape != self.leaf.shape:
            what = f"has different values on ranks along {own}" if own else "is sharded as a DTensor as well"
            raise TreeError(
                f"torch.distributed.checkpoint cannot describe {self.path!r}, which {what}. Save by fs.checkpoint.save()."
            )
        found = boxes_covering_run(shape, *self.flat_range) if shape.numel() else [((0,) * len(shape), tuple(shape))]
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in found]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        chunks, start = self.__create_chunk_list__(), 0
        for chunk in chunks:
            if chunk.offsets == index.offset:
                return self.local.reshape(-1)[start : start + chunk.sizes.numel()].view(chunk.sizes)
            start += chunk.sizes.numel()
        raise ValueError(f"no chunk at {list(index.offset)}; there are chunks at {[list(chunk.offsets) for chunk in chunks]}")

    @property
    @api_boundary
    def data(self) -> "ShardedTensor":
        """This part, detached, in the same memory. A write to either changes both, and the module notices the write."""
        return ShardedTensor.from_local(self.local, self)

    @data.setter
    @api_boundary
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, ShardedTensor) and value.dtype == self.dtype and value.local.data_ptr() == self.local.data_ptr():
            return  # the module is there already
        self._refuse_other_memory("its data cannot be replaced")

    @api_boundary
    def _use_count(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse ``set_``, and ``swap_tensors``, which calls ``_use_count``: the module would not notice the new memory."""
        self._refuse_other_memory("set_() and swap_tensors() cannot replace its data")

    set_ = _use_count

    def _refuse_other_memory(self, what: str) -> NoReturn:
        _, remedy = running_torch_tool_and_remedy(
            "Write a parameter in `with model.unsharded(write=True):`, and a gradient by `p.grad.copy_(...)`."
        )
        raise TreeError(f"{self.path!r} rests in memory of its ShardedModule, in a planned dtype and shape: {what}. {remedy}")

    @property
    def _cut_or_varying_axes(self) -> tuple[str, ...]:
        """The mesh axes along which ranks have different elements (Shard) or tensors (Varying), for reductions."""
        return tuple(a for a in self.place.sharded_axes + self.place.varying_axes if self.unit.mesh.axis_size(a) > 1)

    @property
    def _sharding_key(self) -> tuple[Any, ...]:
        """A key. If two tensors have equal keys, each rank holds the elements at the same positions of both tensors."""
        if self.is_whole_on_every_rank:
            return self.full_shape, None
        leaf, place, old = self.leaf, self.place, self._original_dtensor_sharding
        size = self.unit.local_size(leaf.group, place)
        return self.full_shape, self.unit.mesh, place.sharded_axes, leaf.shape, leaf.offset, size, old

    @classmethod
    @api_boundary
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "out" or value is not None}
        if not args and (first := next((key for key in ("condition", "self", "input") if key in kwargs), "")):
            args = (kwargs.pop(first),)
        if is_attribute := name == "__get__":
            name = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
        if len(args) + len(kwargs) == 1:  # where() returns indices, as nonzero() does, and type() a name, as in printing
            name = {"where": "nonzero", "type": "typename"}.get(name, name)
        if name in _SHAPE_FUNCTIONS and isinstance(args[0], ShardedTensor):
            return func(torch.empty(args[0].full_shape, device="meta"), *args[1:], **kwargs)
        is_harmless = name not in _COMPUTED_ATTRIBUTES if is_attribute else name in _METADATA_FUNCTIONS
        if name == "data_ptr":  # safetensors would read the shape of the whole tensor from there, beyond the part's memory
            is_harmless = running_torch_tool_and_remedy("")[0] != " of safetensors"
        if name in _RESHAPING_FUNCTIONS and isinstance(args[0], ShardedTensor):
            args[0]._refuse_other_memory(f"{name}() cannot change it")
        if in_backward() and (not is_harmless or name == "dtype"):  # a checkpoint has to see the dtype of its forward
            args, kwargs = _full_in_backward(args), {key: _full_in_backward(x) for key, x in kwargs.items()}
        if name == "_has_compatible_shallow_copy_type" and isinstance(args[0], ShardedTensor):
            return _check_unchanged_by_to(*args)
        if (name == "detach" and isinstance(args[0], ShardedTensor)) or (
            name in COPYING_FUNCTIONS and type(args[0]) is ShardedTensor
        ):
            copy = partial(getattr(args[0].local, name), *args[1:], **kwargs)
            return ShardedTensor.from_local(_call_naming_part(copy, name, args[0]), args[0])
        if is_harmless:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rows = foreach_argument_rows(name, args, kwargs)
        parts = [x for row in rows for x in row if isinstance(x, ShardedTensor)]
        cut = [part for part in parts if not part.is_whole_on_every_rank]
        if name == "_amp_foreach_non_finite_check_and_unscale_" and parts and (owner := parts[0].owner()) is not None:
            owner.check_can_unscale()  # torch's own GradScaler calls this function
        reduction = reduction_of(name, args, kwargs) if any(part._cut_or_varying_axes for part in parts) or cut else None
        if cut and reduction is None and (name not in ELEMENTWISE_FUNCTIONS or "out" in kwargs):
            kind = "" if isinstance(cut[0], nn.Parameter) else "a part or gradient of "
            by, remedy = _usage_and_remedy(
                cut[0],
                "Elementwise functions, and sums, extremes and norms of all elements, work with parts. For other functions "
                "parameters are whole inside of `with model.unsharded():` (write=True keeps changes).",
            )
            raise LayoutError(  # a TypeError would mean to Python that an operator is missing
                f"{kind}{cut[0].path!r} is sharded: this rank holds {_num_elements_text(cut[0])}, which {name}(){by} would "
                f"take for the whole tensor. {remedy}"
            )
        if torch.is_grad_enabled() and name not in PREDICATES:
            _check_no_autograd(name, rows, cut)
        if reduction is not None:
            found = _reduce_each_tensor(name, [row[0] for row in rows], reduction)
            return found if name.startswith("_foreach_") else found[0]
        if cut:
            result = _elementwise(func, name, args, kwargs, rows)
        else:
            for part in parts if is_in_place(name) else ():
                _ = part.local  # waits for gathers that read the part
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        for first, *others in rows if is_in_place(name) else ():
            if isinstance(first, ShardedTensor) and (owner := first.owner()) is not None:
                numbers = [x for x in others if isinstance(x, bool | int | float)]
                owner.add_write_to_comm_labels(first, f"{name} {numbers}")
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"{type(self).__name__}({self.path!r}, {self.numel()} elements of {list(self.full_shape)}, {self.dtype})"

    @api_boundary
    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = copied = ShardedTensor.from_local(self.local.clone(), self)
        return copied

    @api_boundary
    def __reduce_ex__(self, protocol: Any) -> Any:
        varying = [axis for axis in self._cut_or_varying_axes if axis in self.place.varying_axes]
        if self.is_whole_on_every_rank and not varying:
            return self.local.__reduce_ex__(protocol)
        own = f", and ranks along {varying} have values of their own" if varying else ""
        raise TreeError(
            f"{self.path!r} cannot be pickled: rank {self.rank} holds elements {list(self.flat_range)} of "
            f"{list(self.full_shape)}{own}, and a reader of the file would take this part for the whole tensor. Save by "
            "fs.checkpoint.save() or dcp.save(), or save whole tensors: torch.save(model.full_state_dict(), path), where every "
            "rank calls full_state_dict(); an optimizer has this method, too."
        )


class ShardedTensorOwner(Protocol):
    """Interface of the session of a sharded module: the attributes and methods that the module's ShardedTensors use."""

    @property
    def paused(self) -> set[str]:
        """Paths of trained parameters that now do not require a gradient."""

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the module is under way. The code of a unit then sees full parameters, not parts."""

    def settings_text_to_compare(self) -> str:
        """Return, as text, all settings so far that have to be equal on all ranks."""

    def comm_outside_steps(self) -> Comm:
        """Return the Comm for collectives between steps. All ranks call this method."""

    def wait_before_write(self) -> None:
        """Wait for collectives under way that read or write the module's parameters. On a device the current stream waits."""

    def add_write_to_comm_labels(self, part: ShardedTensor, what: str) -> None:
        """Let ranks compare ``what``, text about a write to ``part``, if ``part`` is a parameter or a gradient."""

    def full_parameter_in_backward(self, part: ShardedTensor) -> torch.Tensor | None:
        """Return the whole parameter while its unit's backward is under way; else None."""

    def add_gradient_ready_hook(self, path: str, hook: Callable[[Any], Any]) -> RemovableHandle:
        """Register ``hook(parameter)``, to call at the end of each backward that gives the parameter a reduced gradient."""

    def gradient_part(self, path: str) -> ShardedTensor | None:
        """Return this rank's part of a parameter's mean gradient; None if the parameter has no gradient."""

    def release_gradient(self, path: str) -> None:
        """Release the gradient of one parameter."""

    def check_can_unscale(self) -> None:
        """With ``Precision(feedback=True)`` set residuals, which have the loss scale, to zero, and raise a ScheduleError."""

    def differentiate(self, outputs: Any, inputs: Sequence[torch.Tensor], **options: Any) -> Sequence[torch.Tensor | None]:
        """Run ``torch.autograd.grad`` with respect to parameters of the module."""


def _is_whole_on_every_rank(unit: UnitLayout, place: MeshPlacement, spec: DTensorSpec | None) -> bool:
    """Return whether each rank holds whole tensors of a unit that rests at ``place``. ``spec``: of a DTensor, or None."""
    return (spec is None or not spec.is_sharded) and all(unit.mesh.axis_size(axis) == 1 for axis in place.sharded_axes)


def _check_unchanged_by_to(part: ShardedTensor, applied: torch.Tensor) -> bool:
    """Return True. Raise an error if ``applied``, the result of ``part.to(...)``, has another dtype or device than ``part``."""
    if (applied.dtype, applied.device) != (part.dtype, part.device):
        raise TreeError(
            f"a sharded module cannot be moved or cast: unit {part.unit.display_name}, {part.path!r} is {part.dtype} on "
            f"{part.device}, asked for {applied.dtype} on {applied.device}. Do so before shard_module(), or pass precision."
        )
    return True


def _usage_and_remedy(part: ShardedTensor, usual_remedy: str) -> tuple[str, str]:
    """Return two texts for an error: which code uses the part, such as ``" of FSDP"``, and the remedy."""
    if (owner := part.owner()) is None or not owner.is_in_forward:
        return running_torch_tool_and_remedy(usual_remedy)
    remedy = "Choose as a unit the module whose code uses it, in place of the module that holds it: fs.shard_module(units=...)."
    return f" in the code of another module than its unit {part.unit.display_name}", remedy


def _check_no_autograd(name: str, rows: Sequence[Sequence[Any]], cut: Sequence[ShardedTensor]) -> None:
    """Raise an error if a call of the torch function ``name`` would need a gradient through a part.

    No part among the arguments ``rows`` may require a gradient. ``cut``: the parts that not every rank holds whole. If there
    are such parts, no other tensor among the arguments may require a gradient either.
    """
    for x in (x for row in rows for x in row if isinstance(x, torch.Tensor) and x.requires_grad):
        if isinstance(x, ShardedTensor):
            by, remedy = _usage_and_remedy(
                x,
                "Compute a term of the loss in a forward, or in a method that fs.shard_module(methods=[...]) names. Read and "
                "write values under torch.no_grad(), or whole parameters in `with model.unsharded(write=True):`.",
            )
            is_inside = (owner := x.owner()) is not None and owner.is_in_forward
            where = "" if is_inside else " outside of the forward of its ShardedModule"
            raise LayoutError(f"parameter {x.path!r} is used by {name}(){by}{where}, where it would get no gradient. {remedy}")
        if cut:
            by, remedy = _usage_and_remedy(cut[0], "Use torch.no_grad(), or compute with whole parameters inside of a forward.")
            raise LayoutError(
                f"{name}(){by} of a tensor that requires a gradient and of the part {cut[0].path!r}, which autograd does not "
                f"know. {remedy}"
            )


def _full_in_backward(x: Any) -> Any:
    """Return ``x``, with full parameters in place of parts whose unit is in its backward. ``x`` may be a list or tuple.

    Activation checkpointing recomputes forwards in a backward. Raises LayoutError in compiled code that uses such a part.
    """
    if isinstance(x, ShardedTensor) and isinstance(x, nn.Parameter):
        whole = owner.full_parameter_in_backward(x) if (owner := x.owner()) is not None else None
        if whole is not None and torch.compiler.is_compiling():
            raise LayoutError(
                f"parameter {x.path!r} is used by a compiled part of a checkpoint within its unit. Compile what calls the "
                "checkpoint, torch.compile(checkpoint_wrapper(module)), or choose the compiled module as the unit."
            )
        return x if whole is None else whole
    return type(x)(map(_full_in_backward, x)) if type(x) in (list, tuple) else x


def _reduce_each_tensor(name: str, tensors: Sequence[torch.Tensor], reduction: ReductionFns) -> list[torch.Tensor]:
    """Return the result of the reduction ``name()`` for each tensor. Parts with the same axes share a collective per axis."""
    found: list[Any] = [None] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, ShardedTensor):
            alike.setdefault((x._cut_or_varying_axes, x._original_dtensor_sharding), []).append(i)
        else:
            found[i] = reduction.finish(reduction.local(x), x.numel())
    for (axes, is_dtensor), rows in alike.items():
        parts: list[Any] = [tensors[i] for i in rows]
        first = parts[0]
        value = torch.stack([reduction.local(part.local) for part in parts])
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        for axis in axes:
            if (owner := first.owner()) is None:
                raise LayoutError(f"{name}() of a part of {first.path!r}: its module was deleted. Keep a reference to it.")
            comm, label = owner.comm_outside_steps(), f"{name}() of {first.path!r}{more}"
            if reduction.op == "sum":
                value = comm.all_reduce(value, axis, label=label)
            else:  # a backend's maximum may lose a NaN
                rows_of_ranks = comm.all_gather(value, axis, label=label)
                value = rows_of_ranks.amax(0) if reduction.op == "max" else rows_of_ranks.amin(0)
        if is_dtensor:
            value = first.spec.reduce_over_ranks(value, reduction.op)
        for i, part, each in zip(rows, parts, value.unbind(), strict=True):
            copies = [part.unit.mesh.axis_size(axis) for axis in part.place.varying_axes]
            found[i] = reduction.finish(each, torch.Size([*part.full_shape, *copies]).numel()).to(part.device)
    return found


def _elementwise(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any], rows: Sequence[Sequence[Any]]
) -> Any:
    """Call an elementwise function on this rank's elements. Return parts, or the first argument of an in-place function.

    ``rows``: the arguments of each result; foreach functions have several. Raises LayoutError if a row is cut in two ways.
    """
    likes = [next((x for x in row if isinstance(x, ShardedTensor) and not x.is_whole_on_every_rank), None) for row in rows]
    for row, like in zip(rows, likes, strict=True):
        if like is None:
            continue
        if is_in_place(name) and not isinstance(row[0], ShardedTensor):
            raise LayoutError(_mismatch_message(like, row[0], name))
        for x in (x for x in row if x is not like and isinstance(x, torch.Tensor)):
            is_plain_whole = x.dim() == 0 or (x.shape == like.full_shape and like._original_dtensor_sharding is None)
            if x._sharding_key != like._sharding_key if isinstance(x, ShardedTensor) else is_wrapped(x) or not is_plain_whole:
                raise LayoutError(_mismatch_message(like, x, name))
    call = partial(func, *[_own_elements(x, likes) for x in args], **{k: _own_elements(x, likes) for k, x in kwargs.items()})
    out = _call_naming_part(call, name, next(like for like in likes if like is not None))
    if is_in_place(name) or out is NotImplemented:
        return out if out is None or out is NotImplemented else args[0]
    if isinstance(out, torch.Tensor):
        return out if likes[0] is None else ShardedTensor.from_local(out, likes[0])
    return type(out)(x if like is None else ShardedTensor.from_local(x, like) for x, like in zip(out, likes, strict=True))


def _call_naming_part(call: Callable[[], Any], name: str, part: ShardedTensor) -> Any:
    """Return ``call()``, torch function ``name`` of a rank's elements. A RuntimeError for a cut part becomes a LayoutError."""
    try:
        return call()
    except RuntimeError as error:
        if part.is_whole_on_every_rank or type(error) is not RuntimeError:  # such as torch.OutOfMemoryError
            raise
        text = f"{name}() of {part.path!r}, of which this rank holds {_num_elements_text(part)} as one dimension: {error}"
        raise LayoutError(f"{text.rstrip('.')}. Parameters are whole inside of `with model.unsharded():`.") from error


def _own_elements(x: Any, likes: Sequence[ShardedTensor | None]) -> Any:
    """Return the elements of an argument ``x`` that this rank combines with its part ``likes[0]``.

    For a part these are its local elements, for a whole tensor the elements at the places of ``likes[0]``. Other values, and
    whole tensors if ``likes[0]`` is None, are returned unchanged. Item ``i`` of a list ``x`` belongs to ``likes[i]``.
    """
    like = likes[0]
    if isinstance(x, list | tuple):
        return type(x)(_own_elements(each, [like]) for each, like in zip(x, cycle(likes), strict=False))
    if isinstance(x, ShardedTensor):
        return x.local
    return x.reshape(-1)[slice(*like.flat_range)] if like is not None and isinstance(x, torch.Tensor) and x.dim() else x


def _num_elements_text(part: ShardedTensor) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        return f"{part.numel():,} of the {part.full_shape.numel():,} elements of {list(part.full_shape)}"


def _mismatch_message(part: ShardedTensor, other: Any, name: str) -> str:
    kind = "tensor of a torch.func transformation," if isinstance(other, torch.Tensor) and is_wrapped(other) else "tensor"
    what = f"a {kind} of shape {list(getattr(other, 'shape', ()))}, which is not cut"
    remedy = "Of a tensor `whole` that every rank has, take `whole.flatten()[slice(*part.flat_range)]`, and compute with "
    remedy += "`part.local`. Copies of parts, `part.detach().clone()`, are cut alike."
    if isinstance(other, ShardedTensor):
        what = f"{other.path!r}, of which this rank holds {_num_elements_text(other)}: the two are cut differently"
        remedy = "Shard both modules alike, with the same strategy, units, precision and trained parameters; freeze a teacher "
        remedy += "by requires_grad_(False) after shard_module(), not before."
    return f"{name}(): {part.path!r}, of which this rank holds {_num_elements_text(part)}, and {what}. {remedy}"
