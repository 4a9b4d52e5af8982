"""Parameters of a tensor subclass with FSDP2's hooks ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, as torchao's.

After an update the first hook encodes this rank's rows of a main copy. The encoded rows rest, and are gathered. The second hook
makes the module's tensor from the gathered rows. Hooks see a mesh of one rank. A maximum that hooks take over the mesh is taken
over the ranks of the layout, in one reduction for all parameters.

[Note: rounds of maxima]
A hook may take a maximum at any line. To reduce for all parameters at once, all hooks are called with the maxima known so far,
until no hook asks for another one. So a hook that takes one maximum is called twice.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import gcd, lcm, prod
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsharp.errors import OptionError
from fsharp.functional.formats import te
from fsharp.functional.formats.format import (
    AgreeMax,
    EncodedTensorClass,
    Format,
    LeafCodec,
    LeafPart,
    Plane,
    Shape,
    align_nbytes,
    non_view_alias,
)
from fsharp.functional.formats.max_reduce_group import MaxReduceGroup
from fsharp.functional.formats.registry import register_format

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def has_hooks(tensor: Any) -> bool:
    """Return whether a tensor has FSDP2's hooks. TransformerEngine's tensors do not count, as they have another protocol."""
    return not te.is_quantized(tensor) and (hasattr(tensor, PRE) or hasattr(tensor, POST))


def plain_value(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's value, detached, as a plain tensor: without FSDP2's hooks or TransformerEngine's class."""
    if not has_hooks(parameter):
        return te.plain_value(parameter)
    value: torch.Tensor = getattr(parameter, _inner_attribute_name(parameter))
    return value.detach()


def hooked_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters with FSDP2's hooks, by path. Raises OptionError for hooks that fsharp does not support."""
    found: dict[str, torch.Tensor] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        inside = getattr(parameter, "_local_tensor", parameter)
        if not has_hooks(inside):
            continue
        name = f"parameter {path!r} is a {type(inside).__name__} with FSDP2 hooks"
        if inside is not parameter:
            raise OptionError(f"{name} in a {type(parameter).__name__}. Shard it over one mesh, or keep it a plain parameter.")
        if missing := next((hook for hook in (PRE, POST) if not hasattr(parameter, hook)), None):
            raise OptionError(f"{name}, of which {missing} is missing. Define both.")
        if not parameter.requires_grad:
            raise OptionError(
                f"{name} and requires no gradient: frozen parameters are not encoded. Call requires_grad_(False) after "
                "shard_module(), which keeps the hooks."
            )
        if not parameter.ndim:
            raise OptionError(f"{name} and has no dim to be cut along. Give it one.")
        _inner_attribute_name(parameter, f"{name}. Its class")
        found[path] = parameter
    return found


def format_of_hooked_parameter(
    parameter: torch.Tensor, compute: torch.dtype, main: torch.dtype, device: torch.device, policy: Any
) -> Format:
    """Return the format in which a parameter whose class has FSDP2's hooks is stored and gathered.

    ``compute``: dtype in which the model uses the parameter, the ``param_dtype`` of the second hook. ``main`` and ``device``:
    dtype and device of the main copy. ``policy``: FSDP2's MixedPrecisionPolicy, for a first hook that takes one. Raises
    OptionError if the hooks are not supported.

    Cost: a trial call of the hooks for the whole parameter and one for a row, and the memory of their results.
    """
    hooks = _GatherHooks(parameter, compute, main, device, policy)
    planes, block = hooks.planes_and_block(tuple(parameter.shape))
    hooks.check_post_hook(tuple(parameter.shape))
    about = re.sub(r" at 0x[0-9a-f]+", "", repr(hooks.settings))
    text = f"{hooks.cls.__module__}.{hooks.cls.__qualname__} {about} {planes} {block} {compute} {main}"
    label = f"fsdp_{hooks.cls.__name__}_{sha256(text.encode()).hexdigest()[:6]}"
    alike = _formats_by_label.setdefault(label, [])
    for other, form in alike:
        if other.device == device and other.cls is hooks.cls and bool(other.settings == hooks.settings):
            return form
    tensors = EncodedTensorClass(hooks.make_tensor, lambda _: None, lambda _: None)
    codec = LeafCodec(hooks.scales_nbytes, hooks.sizes_of_maxima, hooks.encode, hooks.decode, tensors)
    form = register_format(Format(f"{label}_{len(alike)}" if alike else label, planes, block=block, leaf_codec=codec))
    alike.append((hooks, form))
    return form


_formats_by_label: dict[str, list[tuple["_GatherHooks", Format]]] = {}
"""Registered formats by the text of their settings: equal settings give one format."""


class _PreHookResult(NamedTuple):
    """The result of ``fsdp_pre_all_gather``, the first hook, for one rank's rows of a parameter.

    Attributes:
        inputs: tensors that are gathered.
        tensors: tensors in the metadata: the scales.
        other_metadata: the metadata without its tensors.
        unknown_maximum: the tensor whose maximum over ranks the hook asks for; None if all maxima are known.
        known_maxima: shape and dtype of each maximum that the hook was given.
    """

    inputs: tuple[torch.Tensor, ...]
    tensors: list[torch.Tensor]
    other_metadata: tuple[Any, ...]
    unknown_maximum: torch.Tensor | None
    known_maxima: list[tuple[torch.Size, torch.dtype]]


class _GatherHooks:
    """FSDP2's hooks of a tensor class, as functions of a LeafCodec, for all parameters of the class with the same settings.

    ``like`` is one of these parameters. The other arguments are those of :func:`format_of_hooked_parameter`.
    """

    def __init__(self, like: Any, compute: torch.dtype, main: torch.dtype, device: torch.device, policy: Any) -> None:
        self.cls, self.device, self._compute, self._main, self._policy = type(like), device, compute, main, policy
        self._inner, self.settings = _inner_attribute_name(like), like.__tensor_flatten__()[1]
        self._result_by_shape: dict[Shape, _PreHookResult] = {}

    def _as_hooked_parameter(self, values: torch.Tensor) -> Any:
        cls: Any = self.cls
        return cls.__tensor_unflatten__({self._inner: values}, self.settings, values.shape, values.stride())

    def _hook_name(self, hook: str) -> str:
        return f"{self.cls.__name__}.{hook}"

    @torch.no_grad()
    def _call_pre_hook(self, values: torch.Tensor, known: Sequence[torch.Tensor]) -> _PreHookResult:
        """Call the first hook for ``values``, rows of a main copy. ``known``: results of the hook's first maxima over ranks."""
        wrapped, given, unknown = self._as_hooked_parameter(values), iter(known), list[torch.Tensor]()

        def take_maximum(numbers: torch.Tensor) -> None:
            found = next(given, None)
            if found is None:
                unknown.append(numbers.detach().clone())
            else:
                numbers.copy_(found)

        hook = getattr(wrapped, PRE)
        with MaxReduceGroup(take_maximum) as group:
            mesh = _RestrictedHookArgument(self._hook_name(PRE), "mesh", {"get_group": lambda *_: group, "size": lambda *_: 1})
            number = len(inspect.signature(hook).parameters)
            if number not in (1, 5):
                raise OptionError(
                    f"{self._hook_name(PRE)} takes {number} arguments, expected (mesh) or (mesh, outer_size, outer_stride, "
                    "module, mp_policy)."
                )
            module = _RestrictedHookArgument(self._hook_name(PRE), "module", {})
            more = () if number == 1 else (values.shape, values.stride(), module, self._policy)
            found = hook(mesh, *more)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], tuple) and found[0]):
            raise OptionError(f"{self._hook_name(PRE)} returned {found!r:.80}, expected (a tuple of tensors, metadata).")
        inputs, metadata = found
        leaves, spec = _pytree.tree_flatten(metadata)
        is_tensor = [isinstance(x, torch.Tensor) for x in leaves]
        tensors = [_wait_for_collective(x) for x in leaves if isinstance(x, torch.Tensor)]
        for x in (*inputs, *tensors):
            if type(x) is not torch.Tensor:
                raise OptionError(f"{self._hook_name(PRE)} returned a {type(x).__name__}, expected torch.Tensor.")
        rest = (spec, tuple(is_tensor), tuple([x for x in leaves if not isinstance(x, torch.Tensor)]))
        return _PreHookResult(inputs, tensors, rest, unknown[0] if unknown else None, [(x.shape, x.dtype) for x in known])

    def _trial_result(self, shape: Shape) -> _PreHookResult:
        """Return the result of the first hook, ``fsdp_pre_all_gather``, for a tensor of ones, from which sizes are read.

        The tensors that would be gathered are on the meta device.
        """
        if shape not in self._result_by_shape:
            values, known = torch.ones(shape, dtype=self._main, device=self.device), list[torch.Tensor]()
            made = self._call_pre_hook(values, known)
            while made.unknown_maximum is not None:
                if len(known) > _MAX_MAXIMA:
                    raise OptionError(
                        f"{self._hook_name(PRE)} takes more than {_MAX_MAXIMA} maxima over ranks, one after another."
                    )
                known.append(made.unknown_maximum)
                made = self._call_pre_hook(values, known)
            self._result_by_shape[shape] = made._replace(
                inputs=tuple([torch.empty_like(x, device="meta") for x in made.inputs])
            )
        return self._result_by_shape[shape]

    def planes_and_block(self, shape: Shape) -> tuple[tuple[Plane, ...], int]:
        """Return the planes, one for each tensor that is gathered, and the block of the format for a parameter of this shape.

        Raises OptionError if sizes are not proportional to the number of rows, or if maxima or metadata depend on this number.
        """
        whole, row = self._trial_result(shape), self._trial_result((1, *shape[1:]))
        rows, size = max(shape[0], 1), max(prod(shape[1:]), 1)
        counts = [x.numel() for x in row.inputs]
        is_even = [(x.dtype, x.numel()) for x in whole.inputs] == [(x.dtype, n * rows) for x, n in zip(row.inputs, counts)]
        same = [(x.shape, x.dtype) for x in whole.tensors] == [(x.shape, x.dtype) for x in row.tensors]
        if not (is_even and same and whole.known_maxima == row.known_maxima and all(counts)):
            shown = [[list(x.shape) for x in each.inputs + tuple(each.tensors)] for each in (whole, row)]
            raise OptionError(
                f"{self._hook_name(PRE)} makes tensors of {shown[0]} of a tensor of {list(shape)}, and of {shown[1]} of its "
                "first row. Expected numbers for each row that are gathered, tensors as metadata that do not depend on the "
                "rows, and maxima of as many numbers for any rows."
            )
        block = lcm(*[size // gcd(size, n) for n in counts])
        return tuple([Plane(x.dtype, n * block // size) for x, n in zip(row.inputs, counts)]), block

    def scales_nbytes(self, shape: Shape) -> int:
        """Return the bytes of a whole leaf's scales, with padding. Scales are the tensors in the first hook's metadata."""
        return sum(align_nbytes(x.nbytes) for x in self._trial_result(shape).tensors)

    def sizes_of_maxima(self, shape: Shape) -> list[tuple[int, torch.dtype]]:
        """Return ``(number of elements, dtype)`` of each maximum over ranks that the first hook takes for a leaf."""
        return [(size.numel(), dtype) for size, dtype in self._trial_result(shape).known_maxima]

    def encode(self, parts: Sequence[LeafPart], agree: AgreeMax) -> None:
        """Encode this rank's rows of each leaf by ``fsdp_pre_all_gather``; a rank without rows encodes a row of zeros.

        ``agree`` replaces numbers, such as the largest element, by their maximum over ranks.
        """
        rows = [self._rows_of_part(part) for part in parts]
        known: list[list[torch.Tensor]] = [[] for _ in parts]
        while True:
            made = [self._call_pre_hook(values, numbers) for values, numbers in zip(rows, known, strict=True)]
            unknown = [(i, each.unknown_maximum) for i, each in enumerate(made) if each.unknown_maximum is not None]
            if not unknown:
                break
            for dtype in dict.fromkeys(numbers.dtype for _, numbers in unknown):
                alike = [(i, numbers) for i, numbers in unknown if numbers.dtype == dtype]
                together = torch.cat([numbers.view(-1) for _, numbers in alike])
                agree(together)
                for (i, numbers), new in zip(alike, together.split([x.numel() for _, x in alike]), strict=True):
                    known[i].append(new.view(numbers.shape))
        for part, values, each in zip(parts, rows, made, strict=True):
            self._check_metadata(part, self._trial_result(tuple(values.shape)), each)
            for memory, tensor in zip(self._scales_in(part), each.tensors, strict=True):
                memory.copy_(tensor)
            for plane, numbers in zip(part.planes, each.inputs, strict=True):
                if part.first < part.last:
                    plane.copy_(numbers.reshape(-1))

    def _rows_of_part(self, part: LeafPart) -> torch.Tensor:
        if part.first == part.last:
            return torch.zeros((1, *part.shape[1:]), dtype=self._main, device=part.scales.device)
        assert part.values is not None
        return part.values.view(-1, *part.shape[1:])

    def _check_metadata(self, part: LeafPart, expected: _PreHookResult, found: _PreHookResult) -> None:
        """Raise an OptionError if ``found`` differs from ``expected``, the result for a tensor of ones, in more than values.

        Equal are the sizes and dtypes of all tensors, and metadata that are not tensors: these must not depend on values.
        """
        try:
            is_same = bool(expected.other_metadata == found.other_metadata)
        except Exception:  # of any kind: the objects' own comparison
            is_same = False
        sizes = [[(x.shape, x.dtype) for x in (*each.inputs, *each.tensors)] for each in (expected, found)]
        if not is_same or sizes[0] != sizes[1]:
            raise OptionError(
                f"{part.path!r}: {self._hook_name(PRE)} returns metadata {found.other_metadata[2]!r:.120} beside tensors, "
                "which depends on values. Return such metadata as tensors, of sizes that do not depend on values."
            )

    def _scales_in(self, part: LeafPart) -> list[torch.Tensor]:
        found, start = [], 0
        for like in self._trial_result(part.shape).tensors:
            found.append(non_view_alias(part.scales[start : start + like.nbytes].view(like.dtype).view(like.shape)))
            start += align_nbytes(like.nbytes)
        return found

    def make_tensor(self, part: LeafPart) -> torch.Tensor:
        """Return the tensor that the module computes with: the result of the second hook for a whole leaf."""
        found = self._call_post_hook(part, part.shape)
        places = [plane.untyped_storage().data_ptr() for plane in part.planes]
        if type(found) is torch.Tensor and found.untyped_storage().data_ptr() in places:
            return found.clone()  # autograd may save the result, and the leaf's memory is released
        return found

    def _call_post_hook(self, part: LeafPart, shape: Shape) -> torch.Tensor:
        made, scales = self._trial_result(shape), iter(self._scales_in(part))
        outputs = [non_view_alias(plane.view(-1, *x.shape[1:])) for plane, x in zip(part.planes, made.inputs, strict=True)]
        spec, is_tensor, rest = made.other_metadata
        others = iter(rest)
        metadata = _pytree.tree_unflatten([next(scales if each else others) for each in is_tensor], spec)
        absent = torch.empty(shape, dtype=self._main, device="meta")
        found = getattr(self._as_hooked_parameter(absent), POST)(tuple(outputs), metadata, self._compute)
        tensor = found[0] if isinstance(found, tuple) and len(found) == 2 else found
        if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype) != (shape, self._compute):
            got = f"{tensor.dtype}{list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"{found!r:.80}"
            raise OptionError(f"{self._hook_name(POST)} returned {got}, expected a tensor of {self._compute}{list(shape)}.")
        return tensor

    def check_post_hook(self, shape: Shape) -> None:
        """Call the second hook once, on zeros, so that its errors are raised before the first gather."""
        planes = tuple([torch.zeros(x.numel(), dtype=x.dtype, device=self.device) for x in self._trial_result(shape).inputs])
        scales = torch.zeros(self.scales_nbytes(shape), dtype=torch.uint8, device=self.device)
        self.make_tensor(LeafPart("", shape, self._compute, 0, prod(shape), planes, scales))

    def decode(self, part: LeafPart) -> torch.Tensor:
        """Return the values of a part, 1-D, from the tensor that the second hook makes of the part's rows.

        Raises OptionError if this tensor is of another class, without a method that returns its values.
        """
        if part.first == part.last:
            return torch.empty(0, dtype=self._compute, device=part.scales.device)
        tensor: Any = self._call_post_hook(part, ((part.last - part.first) // max(prod(part.shape[1:]), 1), *part.shape[1:]))
        if type(tensor) is not torch.Tensor:
            if type(tensor) is self.cls:
                tensor = getattr(tensor, self._inner)
            elif hasattr(tensor, "to_original_precision"):
                tensor = tensor.to_original_precision()
            else:
                try:
                    tensor = tensor.dequantize()
                except Exception as error:
                    raise OptionError(
                        f"{part.path!r} is a {type(tensor).__name__}, which has neither to_original_precision() nor "
                        f"dequantize(): {error}"
                    ) from error
        return tensor.reshape(-1).clone()  # type: ignore[no-any-return]


_MAX_MAXIMA = 8
"""Most maxima over ranks that a hook may take one after another."""


class _RestrictedHookArgument:
    """An object to pass to a hook, with the methods in ``methods``, by name. Reading another attribute is an OptionError."""

    def __init__(self, hook: str, argument: str, methods: Mapping[str, Any]) -> None:
        self.__dict__.update(_hook=hook, _argument=argument, **methods)

    def __getattr__(self, name: str) -> Any:
        raise OptionError(f"{self._hook} asks for {self._argument}.{name}, which is not supported.")


def _inner_attribute_name(parameter: Any, who: str = "a parameter") -> str:
    """Return the name of the attribute with a parameter's values. Without such an attribute, an OptionError names ``who``."""
    inner = list(parameter.__tensor_flatten__()[0]) if is_traceable_wrapper_subclass(parameter) else []
    value = getattr(parameter, inner[0]) if len(inner) == 1 else None
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.is_floating_point():
        raise OptionError(
            f"{who} keeps {', '.join(inner) or 'nothing'} by __tensor_flatten__(), expected one floating-point tensor of "
            "its shape, from which a main copy is made. Parameters that are quantized at rest are not supported."
        )
    return str(inner[0])


def _wait_for_collective(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or its value after a wait, if ``x`` is the AsyncCollectiveTensor of a functional collective."""
    wait = getattr(x, "wait", None)
    return wait() if wait is not None and type(x).__name__ == "AsyncCollectiveTensor" else x
