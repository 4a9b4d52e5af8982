"""Weights of TransformerEngine's modules: stored and gathered as their recipe's bytes, encoded from main copies.

TransformerEngine's ``quantize_master_weights`` makes the bytes: it gets this rank's part of each main copy, and ranks agree on
scales in one reduction for all units. Modules get TransformerEngine's own tensors, in gathered memory.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from math import gcd, prod
from typing import Any

import torch

from fsharp.errors import OptionError
from fsharp.functional.formats.format import (
    AgreeMax,
    EncodedTensorClass,
    Format,
    LeafCodec,
    LeafPart,
    Plane,
    Shape,
    align_nbytes,
    aligned_views,
    as_bytes,
    non_view_alias,
)
from fsharp.functional.formats.max_reduce_group import MaxReduceGroup
from fsharp.functional.formats.microscaling import decode_e2m1, unpack_codes
from fsharp.functional.formats.registry import register_format
from fsharp.functional.formats.te_delayed import NUMBERS_PER_WEIGHT, ModuleFormat, ModuleScales, copy_of_quantizer
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import short_repr

_PART_ALIGNMENT = 32
"""The number of values in each part of a buffer is a multiple of this number, so that parts follow without gaps."""
_BLOCK_ROWS = 128
"""Number of rows of a block, in block scaling."""
_MAX_ROW_VALUES = 128
"""Most values in a row that is cast with one scale."""


@dataclass(eq=False)
class QuantizerKind:
    """Description of one class of TransformerEngine's quantizers.

    Attributes:
        name: part of the names of formats, such as ``"mxfp8"``.
        planes: names of the attributes of TransformerEngine's tensor that hold encoded values. Their bytes are gathered.
        derived: names of the attributes that TransformerEngine computes from the attributes in ``planes``, such as a transpose.
        agreed_maxima: function ``(shape of a leaf, shapes of its scales by attribute)`` that returns a pair ``(count, dtype)``
            for each maximum over ranks, as ``agreed_maxima`` of a :class:`LeafCodec` does.
        scale_tensors: function from the shape of a leaf to ``{suffix of the name: (shape, dtype)}``: the scales of the leaf in
            a checkpoint that was saved with ``planes=True``.
        scales_for_readers: function ``(shape of a leaf, TransformerEngine's scales by attribute)`` that returns the tensors of
            ``scale_tensors``, by suffix: the scales without TransformerEngine's padding.
        decode: function ``(part, scales by suffix)`` that returns the values of the part, 1-D, float32.
        values_per_byte: number of values in a byte of a plane.
        for_readers: the format of a leaf in a checkpoint that was saved with ``planes=True``: one plane, and the scales of
            ``scale_tensors``. The format can decode, and cannot encode.
    """

    name: str
    planes: tuple[str, ...]
    derived: tuple[str, ...]
    agreed_maxima: Callable[[Shape, dict[str, Shape]], Sequence[tuple[int, torch.dtype]]]
    scale_tensors: Callable[[Shape], dict[str, tuple[Shape, torch.dtype]]]
    scales_for_readers: Callable[[Shape, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    decode: Callable[[LeafPart, dict[str, torch.Tensor]], torch.Tensor]
    values_per_byte: int = 1
    for_readers: Format = field(init=False)

    def __post_init__(self) -> None:
        def decode(part: LeafPart) -> torch.Tensor:
            return self.decode(part, codec.scales_by_suffix(part.shape, part.scales))

        codec = LeafCodec(
            lambda shape: sum(align_nbytes(prod(size) * dtype.itemsize) for size, dtype in self.scale_tensors(shape).values()),
            lambda shape: [],
            _raise_encode_unsupported,
            decode,
            scale_tensors=self.scale_tensors,
        )
        plane = Plane(torch.float8_e4m3fn if self.values_per_byte == 1 else torch.uint8)
        name = f"te_{self.name}"
        self.for_readers = register_format(Format(name, (plane,), block=self.values_per_byte, leaf_codec=codec))

    def part_for_readers(self, part: LeafPart, scales: dict[str, torch.Tensor]) -> tuple[Format, LeafPart]:
        """Return :attr:`for_readers`, and ``part`` in this format. ``scales``: TransformerEngine's scales, by attribute."""
        made = [as_bytes(each) for each in self.scales_for_readers(part.shape, scales).values()]
        padded = torch.cat([torch.nn.functional.pad(x, (0, align_nbytes(len(x)) - len(x))) for x in made])
        plane = part.planes[0].view(self.for_readers.planes[0].dtype)
        return self.for_readers, replace(part, planes=(plane,), scales=padded)


def _raise_encode_unsupported(parts: Sequence[LeafPart], agree: AgreeMax) -> None:
    raise OptionError("TransformerEngine: this format reads planes of a checkpoint. fs.te.weight_format(recipe) encodes.")


@api_boundary
def weight_format(recipe: Any) -> Format:
    """Return the format in which TransformerEngine stores the weights of modules under a recipe.

    >>> fs.te.weight_format(Float8CurrentScaling())    # doctest: +SKIP
    Format(name='te_float8_current_e4m3', ...)

    Pass the format as ``Precision(compute=torch.bfloat16, main=torch.float32, stored=...)``, with a pattern that selects weight
    matrices alone. Run forwards under ``te.autocast(enabled=True, recipe=recipe)``, by a :class:`~fsharp.Scheduler` or in a
    :class:`~fsharp.ShardedModule`.

    Args:
        recipe: Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling or NVFP4BlockScaling.

    Raises:
        OptionError: TransformerEngine is not installed.
        OptionError: the recipe is another one, such as DelayedScaling, which ``shard_module`` takes.

    Source: ``transformer_engine/pytorch/tensor/utils.py`` of TransformerEngine 2.20.
    """
    return format_of_quantizer(_quantizer_of_recipe(recipe))


def is_quantized(tensor: Any) -> bool:
    """Return whether a tensor has a quantized TransformerEngine class, as after ``te.quantized_model_init()``."""
    return any(
        cls.__name__ == "QuantizedTensor" and cls.__module__.startswith("transformer_engine.") for cls in type(tensor).__mro__
    )


def plain_value(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's value, detached, as a plain tensor without a class of TransformerEngine.

    For a quantized parameter this is the value before quantization, if ``preserve_high_precision_init_val=True`` has kept it;
    else the value that its bytes encode.
    """
    if not is_quantized(parameter):
        return parameter.detach()
    quantized: Any = parameter
    kept = quantized.get_high_precision_init_val() if hasattr(quantized, "get_high_precision_init_val") else None
    value: torch.Tensor = quantized.detach().dequantize() if kept is None else kept.to(quantized.device)
    return value.detach()


def formats_of_module(module: torch.nn.Module) -> dict[str, tuple[Format, torch.dtype]]:
    """Return, by path, the format and the ``dtype`` of each parameter of a module that TransformerEngine has quantized.

    Raises OptionError if there is no format for such a parameter.
    """
    found, scales = {}, ModuleScales()
    for path, parameter in module.named_parameters(remove_duplicate=False):
        if is_quantized(parameter):
            quantized: Any = parameter
            try:
                if type(quantized._quantizer).__name__ == "Float8Quantizer":
                    form = _add_delayed_scaling_weight(module, path, parameter, scales)
                else:
                    form = format_of_quantizer(quantized._quantizer)
            except OptionError as error:
                raise OptionError(f"parameter {path!r}: {error}") from error
            found[path] = form, parameter.dtype
    return found


def refuse_calls_with_delayed_scaling(module: torch.nn.Module) -> None:
    """Make TransformerEngine modules within ``module`` raise an OptionError if they are called under DelayedScaling.

    Such modules would change their own scales and histories: a function of these modules would depend on its earlier calls.
    """
    for path, each in module.named_modules():
        if any(cls.__module__.startswith("transformer_engine.") for cls in type(each).__mro__):
            each.register_forward_pre_hook(partial(_check_recipe_is_stateless, path))


def _check_recipe_is_stateless(path: str, module: torch.nn.Module, _: Any) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    if Manager.is_fp8_enabled() and Manager.get_fp8_recipe().delayed():
        raise OptionError(
            f"make_functional(): {type(module).__name__} {path or '(root)'!r} is called under DelayedScaling, by which its "
            "scales depend on earlier calls, expected a recipe without a history, such as Float8CurrentScaling(): a pure "
            "function keeps none. Or train the module by fs.shard_module(), which takes DelayedScaling."
        )


def _add_delayed_scaling_weight(module: torch.nn.Module, path: str, parameter: Any, scales: ModuleScales) -> Format:
    """Return the format of a module's weight at ``path`` under delayed scaling, and add the weight to ``scales``."""
    if not parameter.requires_grad:
        raise OptionError(
            "it is frozen under DelayedScaling, and its bytes have the scale of the time of their cast. Make its module under "
            "quantized_model_init(enabled=False): it rests in bfloat16, and each forward casts it with the present scale."
        )
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    parent, _, name = path.rpartition(".")
    scales.add(path, module.get_submodule(parent), name)
    alike = Float8CurrentScalingQuantizer(parameter._quantizer.dtype, parameter.device, columnwise=False)  # of the same class
    tensors = _QuantizerCodec(_DELAYED_SCALING, alike, scales)
    return _format_of_kind(_DELAYED_SCALING, str(alike.dtype), tensors, partial(ModuleFormat, scales=scales))


def format_of_quantizer(quantizer: Any) -> Format:
    """Return the format of the tensors that a quantizer makes. Raise an OptionError for an unsupported class of quantizers."""
    kind = KIND_BY_QUANTIZER_CLASS.get(type(quantizer).__name__)
    if kind is None:
        raise OptionError(
            f"TransformerEngine: weights of a {type(quantizer).__name__} are not supported as a format, expected one of "
            f"{', '.join(KIND_BY_QUANTIZER_CLASS)}. Keep parameters in bfloat16, which the recipe then casts in each forward."
        )
    quantizer = copy_of_quantizer(quantizer, columnwise=len(kind.planes) > 1)
    found = {name: getattr(quantizer, name, None) for name in _QUANTIZER_SETTINGS}
    settings = repr(sorted((name, str(value)) for name, value in found.items() if value is not None))
    if (kind.name, settings) not in _format_by_settings:
        form = register_format(_format_of_kind(kind, settings, _QuantizerCodec(kind, quantizer)))
        _format_by_settings[kind.name, settings] = form
    return _format_by_settings[kind.name, settings]


_format_by_settings: dict[tuple[str, str], Format] = {}
"""Formats by name of the kind and settings of the quantizer."""
_QUANTIZER_SETTINGS = ["dtype", "force_pow_2_scales", "amax_epsilon", "block_scaling_dim"]
_QUANTIZER_SETTINGS += ["with_2d_quantization", "with_rht", "stochastic_rounding"]


def _format_of_kind(
    kind: QuantizerKind, settings: str, tensors: "_QuantizerCodec", make: Callable[..., Format] = Format
) -> Format:
    codec = LeafCodec(
        tensors.scales_nbytes,
        lambda shape: kind.agreed_maxima(shape, {name: size for name, (size, _) in tensors.scale_specs(shape).items()}),
        tensors.encode,
        lambda part: kind.decode(part, kind.scales_for_readers(part.shape, tensors.scales_in(part))),
        EncodedTensorClass(tensors.make_tensor, tensors.derive_if_in_backward, tensors.release_derived),
        for_inference=lambda part: kind.part_for_readers(part, tensors.scales_in(part)),
    )
    name = f"te_{kind.name}_{sha256(settings.encode()).hexdigest()[:6]}"
    plane = Plane(torch.uint8, _PART_ALIGNMENT // kind.values_per_byte)
    return make(name, (plane,) * len(kind.planes), block=_PART_ALIGNMENT, leaf_codec=codec)


class _QuantizerCodec:
    """Encodes and decodes leaves by one quantizer, for a :class:`LeafCodec`. ``scales`` is None without delayed scaling."""

    def __init__(self, kind: QuantizerKind, quantizer: Any, scales: ModuleScales | None = None) -> None:
        self._kind, self._quantizer, self._scales = kind, quantizer, scales
        self._known: dict[Shape, dict[str, tuple[Shape, torch.dtype]]] = {}

    def scale_specs(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return, by attribute of TransformerEngine's tensor, ``(shape, dtype)`` of each tensor of a leaf's scales.

        Raises OptionError if TransformerEngine cannot quantize a weight of this shape.
        """
        if shape not in self._known:
            try:
                specs = self._quantizer.inner_tensor_specs(shape)
            except Exception as error:
                raise OptionError(f"TransformerEngine: a weight of shape {list(shape)} cannot be quantized: {error}") from error
            if self._kind.name == "nvfp4" and shape[-1] % 64:  # the kernel writes scales without the padding of their rows
                raise OptionError(
                    f"TransformerEngine: a weight of shape {list(shape)} cannot be encoded in NVFP4 from a main copy, whose "
                    "cast wants rows of a multiple of 64 elements. Keep the weight in bfloat16."
                )
            self._known[shape] = {name: spec for name, spec in specs.items() if name not in self._kind.planes}
        return self._known[shape]

    def scales_nbytes(self, shape: Shape) -> int:
        return sum(align_nbytes(prod(size) * dtype.itemsize) for size, dtype in self.scale_specs(shape).values())

    def scales_in(self, part: LeafPart) -> dict[str, torch.Tensor]:
        """Return, by attribute of TransformerEngine's tensor, the tensors of a leaf's scales, as views of ``part.scales``."""
        return aligned_views(part.scales, self.scale_specs(part.shape))

    def make_tensor(self, part: LeafPart) -> torch.Tensor:
        """Return TransformerEngine's tensor of a whole leaf, with inner tensors in the leaf's memory."""
        size = self._plane_shape(part.shape)
        inner = {name: plane.view(size) for name, plane in zip(self._kind.planes, part.planes, strict=True)}
        inner |= self.scales_in(part)
        tensor: torch.Tensor = self._tensor_of(part, {name: non_view_alias(x) for name, x in inner.items()})
        self.derive_if_in_backward(tensor)
        return tensor

    def _tensor_with_scales_only(self, part: LeafPart) -> Any:
        """Return TransformerEngine's tensor of a whole leaf with its scales alone; no memory is allocated for values."""
        none = torch.zeros((), dtype=torch.uint8, device=part.scales.device).expand(self._plane_shape(part.shape))
        return self._tensor_of(part, dict.fromkeys(self._kind.planes, none) | self.scales_in(part))

    def _tensor_of(self, part: LeafPart, inner: dict[str, torch.Tensor]) -> Any:
        """Return TransformerEngine's tensor of ``part``, a whole leaf. ``inner``: the tensor's inner tensors, by attribute."""
        about = self._quantizer.create_metadata(part.shape, dtype=part.dtype)
        if self._scales is not None:
            about["nontensor_kwargs"]["quantizer"] = self._scales.quantizer(part.path)
        return about["cls"].__tensor_unflatten__(inner, about, part.shape, None)

    def _plane_shape(self, shape: Shape) -> Shape:
        """Return the shape of the plane that stores a leaf of ``shape``."""
        return (*shape[:-1], shape[-1] // self._kind.values_per_byte)

    def derive_if_in_backward(self, tensor: Any) -> None:
        """If a backward is running, compute the derived attributes of a tensor that the backward reads, such as a transpose."""
        if torch._C._current_graph_task_id() != -1:
            from transformer_engine.pytorch.tensor.utils import post_all_gather_processing

            post_all_gather_processing(tensor)

    def release_derived(self, tensor: Any) -> None:
        """Free all attributes that are derived from a tensor's bytes."""
        for name in self._kind.derived:
            setattr(tensor, name, None)
        if hasattr(tensor, "_transpose_invalid"):
            tensor._transpose_invalid = True

    def encode(self, parts: Sequence[LeafPart], agree: AgreeMax) -> None:
        from transformer_engine.pytorch.tensor.utils import quantize_master_weights

        weights: list[Any] = [self._tensor_with_scales_only(part) for part in parts]
        for weight in weights if self._scales is not None else ():
            weight._quantizer.amax.zero_()  # a cast takes the maximum with the old entry, which belongs to other values
        has_values = [part.first < part.last for part in parts]
        rooms = [self._memory_to_encode_into(part) for part in parts]
        mains = [self._as_rows_to_cast(part.values) if own else None for part, own in zip(parts, has_values, strict=True)]
        starts = [part.first if own else None for part, own in zip(parts, has_values, strict=True)]
        bytes_of = [
            self._cast_output(part, room) if own else None for part, room, own in zip(parts, rooms, has_values, strict=True)
        ]
        paths = [part.path for part in parts]
        with (
            nullcontext(agree) if self._scales is None else self._scales.comparing_scales_across_ranks(paths, agree) as agree_on
        ):
            group = MaxReduceGroup(agree_on)
            quantize_master_weights(weights, mains, starts, group, bytes_of, manual_post_all_gather_processing=True)
        for part, room in zip(parts, rooms, strict=True):
            for plane, made in zip(part.planes, room, strict=True):
                if made is not plane:
                    plane.copy_(made)

    def _as_rows_to_cast(self, x: Any) -> torch.Tensor:
        """For current scaling return ``x`` as rows, as the kernel also transposes tiles. For other recipes return ``x``."""
        rows: torch.Tensor = x.view(-1, gcd(len(x), _MAX_ROW_VALUES)) if self._kind.name == "float8_current" else x
        return rows

    def _cast_output(self, part: LeafPart, memory: Sequence[torch.Tensor]) -> Any:
        """Return the argument ``out`` for TransformerEngine's cast of a part. ``memory``: a tensor to fill for each plane."""
        if self._kind.name == "float8_current":
            return self._quantizer.create_tensor_from_data(self._as_rows_to_cast(memory[0]), part.dtype)
        return memory if len(memory) > 1 else memory[0]

    def _memory_to_encode_into(self, part: LeafPart) -> Sequence[torch.Tensor]:
        """Return the tensors into which the kernel encodes a part, one for each plane: usually the planes themselves.

        A kernel that writes whole blocks of rows gets new memory with all blocks of the part. The result is a view of the part
        in this memory, which the caller copies to the plane.
        """
        if self._kind.name != "float8_block" or part.first == part.last:
            return part.planes
        blocks = _BLOCK_ROWS * part.shape[-1]
        start, stop = part.first // blocks * blocks, min(-(-part.last // blocks) * blocks, prod(part.shape))
        around = torch.empty(stop - start, dtype=torch.uint8, device=part.scales.device)
        return [around[part.first - start : part.last - start]]


def _quantizer_of_recipe(recipe: Any) -> Any:
    try:
        from transformer_engine.pytorch.quantization import RecipeState
    except ImportError as error:
        raise OptionError(
            "fs.te needs TransformerEngine: pip install 'fsharp[te]', on a machine with a GPU of NVIDIA."
        ) from error
    from transformer_engine.common.recipe import Recipe

    expected = "expected Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling() or NVFP4BlockScaling()"
    if not isinstance(recipe, Recipe):
        raise OptionError(f"weight_format(): recipe is {short_repr(recipe)}, {expected}.")
    if recipe.delayed():
        raise OptionError(
            f"weight_format(): recipe is DelayedScaling, whose bytes depend on a history that modules keep, {expected}. Or "
            "train a module by fs.shard_module(), which takes DelayedScaling."
        )
    return RecipeState.create(recipe, mode="forward", num_quantizers=3).make_quantizers()[1]


def _unscaled_float8_values(part: LeafPart) -> torch.Tensor:
    return part.planes[0].view(torch.float8_e4m3fn).float()


def _row_and_column_indices(part: LeafPart) -> tuple[torch.Tensor, torch.Tensor]:
    where = torch.arange(part.first, part.last, device=part.scales.device)
    return where // part.shape[-1], where % part.shape[-1]


def _decode_with_tile_scales(part: LeafPart, scales: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, columns = _row_and_column_indices(part)
    return _unscaled_float8_values(part) * scales["_scale"][rows // 128, columns // 128]


def _decode_mxfp8(part: LeafPart, scales: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, columns = _row_and_column_indices(part)
    exponents = scales["_scale"][rows, columns // 32].int() - 127
    return torch.ldexp(_unscaled_float8_values(part), exponents)


def _decode_nvfp4(part: LeafPart, scales: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, columns = _row_and_column_indices(part)
    of_block = scales["_scale"].float()[rows, columns // 16]
    codes = unpack_codes(part.planes[0])[: part.last - part.first]  # the last byte may also hold the next value
    return decode_e2m1(codes) * of_block * scales["_scale_2"]


def _rows_scaled_by(dtype: torch.dtype, height: int, width: int) -> Callable[[Shape], dict[str, tuple[Shape, torch.dtype]]]:
    """Return :attr:`QuantizerKind.scale_tensors` for scales of tiles of ``height`` rows and ``width`` columns."""
    return lambda shape: {"_scale": ((-(-prod(shape[:-1]) // height), -(-shape[-1] // width)), dtype)}


def _without_padding(
    dtype: torch.dtype, height: int, width: int
) -> Callable[[Shape, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return :attr:`QuantizerKind.scales_for_readers` for the scales of :func:`_rows_scaled_by`."""
    spec = _rows_scaled_by(dtype, height, width)

    def scales_for_readers(shape: Shape, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows, columns = spec(shape)["_scale"][0]
        return {"_scale": scales["_rowwise_scale_inv"].view(dtype)[:rows, :columns]}

    return scales_for_readers


def _nvfp4_unpadded_scales(shape: Shape, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    of_blocks = _without_padding(torch.float8_e4m3fn, 1, 16)(shape, scales)
    return of_blocks | {"_scale_2": (scales["_amax_rowwise"] / (448.0 * 6.0)).view(())}


_CURRENT_SCALING = QuantizerKind(
    "float8_current",
    ("_data",),
    ("_transpose",),
    lambda shape, scales: [(1, torch.float32)],
    lambda shape: {"_scale": ((1,), torch.float32)},
    lambda shape, scales: {"_scale": scales["_scale_inv"].view(1)},
    lambda part, scales: _unscaled_float8_values(part) * scales["_scale"],
)
_DELAYED_SCALING = replace(
    _CURRENT_SCALING, name="float8_delayed", agreed_maxima=lambda shape, scales: [(NUMBERS_PER_WEIGHT, torch.float32)]
)
KIND_BY_QUANTIZER_CLASS = {
    "Float8CurrentScalingQuantizer": _CURRENT_SCALING,
    "Float8BlockQuantizer": QuantizerKind(
        "float8_block",
        ("_rowwise_data",),
        ("_columnwise_data", "_columnwise_scale_inv"),
        lambda shape, scales: [(prod(scales["_rowwise_scale_inv"]), torch.float32)],
        _rows_scaled_by(torch.float32, 128, 128),
        _without_padding(torch.float32, 128, 128),
        _decode_with_tile_scales,
    ),
    "MXFP8Quantizer": QuantizerKind(
        "mxfp8",
        ("_rowwise_data", "_columnwise_data"),
        (),
        lambda shape, scales: [(sum(prod(size) for size in scales.values()), torch.bfloat16)],
        _rows_scaled_by(torch.uint8, 1, 32),
        _without_padding(torch.uint8, 1, 32),
        _decode_mxfp8,
    ),
    "NVFP4Quantizer": QuantizerKind(
        "nvfp4",
        ("_rowwise_data",),
        ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"),
        lambda shape, scales: [(-(-shape[0] // 16) * -(-shape[-1] // 16), torch.float32), (1, torch.float32)],  # tiles of 16
        lambda shape: _rows_scaled_by(torch.float8_e4m3fn, 1, 16)(shape) | {"_scale_2": ((), torch.float32)},
        _nvfp4_unpadded_scales,
        _decode_nvfp4,
        values_per_byte=2,
    ),
}
"""The kinds by name of the quantizer's class."""
