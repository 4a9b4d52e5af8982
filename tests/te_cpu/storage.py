"""Quantized TransformerEngine tensors: their buffers are allocated here, and read as the GPU would read them.

A tensor may hold its values twice: by rows, and by columns for matrix products along its other dimension. The columns are a
copy, which goes stale if the rows alone are written. So each reader says which of the two it reads.
"""

import math

import torch

from . import cuda
from .registry import check, modelled, refuse
from .rounding import FP4_LARGEST, TORCH_DTYPE, from_fp4, from_fp8, matrix, power_of_two, spread


def transposes_are_kept():
    """Return whether FP8 tensors with one scale hold a transpose: before 10.0 and on 12.x the GPU multiplies rows alone."""
    capability = cuda.get_device_capability()
    return not ((10, 0) <= capability < (12, 0) or capability >= (13, 0))


def is_quantized(tensor):
    """Return whether a tensor is one of TransformerEngine's quantized ones."""
    return hasattr(tensor, "_quantizer")


def scheme(tensor_or_quantizer):
    """Return the first word of TransformerEngine's class: Float8, Float8CurrentScaling, Float8Block, MXFP8 or NVFP4."""
    name = type(tensor_or_quantizer).__name__
    return name.removesuffix("Storage").removesuffix("QTensor").removesuffix("Tensor").removesuffix("Quantizer")


def side_names(columnwise):
    """Return the attributes of a tensor by rows or by columns: data, scales and amax."""
    side = "columnwise" if columnwise else "rowwise"
    return f"_{side}_data", f"_{side}_scale_inv", f"_amax_{side}"


@modelled
def create_empty_quantized_tensor(quantizer, shape, dtype, device, pin_memory=False):
    """Return a tensor whose buffers have the shapes and dtypes that TransformerEngine states; scales with padding are zero."""
    shape, described = tuple(shape), quantizer
    if scheme(quantizer) == "MXFP8":
        check(
            shape[-1] % 32 == 0 and math.prod(shape[:-1]) % 32 == 0,
            f"MXFP8 requires tensor dims that are divisible by 32 (got shape={shape})",
        )
    if scheme(quantizer) == "Float8":  # delayed scaling: states nothing in Python, and has the buffers of current scaling
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

        described = Float8CurrentScalingQuantizer(
            quantizer.dtype, device, rowwise=quantizer.rowwise_usage, columnwise=quantizer.columnwise_usage
        )
        described.internal = quantizer.internal
    context = described.create_metadata(shape, dtype=dtype)
    context["nontensor_kwargs"]["quantizer"] = quantizer
    buffers = described.alloc_tensors(shape, device=device)
    for name, buffer in buffers.items():
        if "scale_inv" in name:
            buffer.zero_()
    strides = torch.empty(shape, device="meta").stride()
    return context["cls"].__tensor_unflatten__(buffers, context, shape, strides)


def match_usages(quantizer, tensor):
    """Allocate the buffers of a tensor that its quantizer is to write and drop those that it is not to write."""
    wanted = create_empty_quantized_tensor(quantizer, tensor.size(), tensor._dtype, tensor.device)
    for name, _ in type(tensor)._INNER_TENSORS:
        if (getattr(tensor, name) is None) != (getattr(wanted, name) is None):
            setattr(tensor, name, getattr(wanted, name))
    for name in ("_transpose_invalid", "_fp8_dtype", "_with_gemm_swizzled_scales"):
        if hasattr(tensor, name):
            setattr(tensor, name, getattr(wanted, name))


def as_read(buffer):
    """Return a buffer as kernels read it: by its address and shape, row after row, whatever its strides are."""
    return buffer.as_strided(buffer.shape, torch.empty(buffer.shape, device="meta").stride(), buffer.storage_offset())


def values(tensor, columnwise=False):
    """Return a tensor as a float32 matrix, read from the buffers by rows or by columns; raise if these are not there."""
    if not is_quantized(tensor):
        return matrix(tensor.detach()).float()
    kind = scheme(tensor)
    if kind == "Float8":
        return _values_of_one_scale(tensor, columnwise)
    data, scale, amax = (getattr(tensor, name, None) for name in side_names(columnwise))
    check(data is not None and scale is not None, f"{type(tensor).__name__} has no {side_names(columnwise)[0]} to be read")
    data, scale = as_read(data), as_read(scale)
    if kind == "MXFP8":
        stored = matrix(from_fp8(data, tensor._fp8_dtype))
        return stored * spread(power_of_two(scale), *((32, 1) if columnwise else (1, 32)), stored.shape)
    data = data.reshape(data.shape[0], -1) if columnwise else matrix(data)
    if kind == "Float8Blockwise":
        stored = from_fp8(data, tensor._fp8_dtype)
        stored = stored * (
            spread(scale, 128, 128, stored.shape) if tensor._is_2D_scaled else spread(scale.t(), 1, 128, stored.shape)
        )
    elif kind == "NVFP4":
        stored = from_fp4(data)
        block_scale = scale.view(torch.float8_e4m3fn).float()[: stored.shape[0], : stored.shape[1] // 16]
        stored = stored * spread(block_scale, 1, 16, stored.shape) * (amax / (448.0 * FP4_LARGEST))
    else:
        refuse(f"reading a {type(tensor).__name__}")
    return stored.t() if columnwise else stored


def _values_of_one_scale(tensor, columnwise):
    if columnwise and transposes_are_kept():
        check(
            tensor._transpose is not None and not tensor._transpose_invalid,
            "an FP8 product on this architecture reads the transpose, which is missing or stale",
        )
        return matrix(from_fp8(as_read(tensor._transpose), tensor._fp8_dtype).movedim(0, -1)) * tensor._scale_inv
    check(tensor._data is not None, f"{type(tensor).__name__} has no _data to be read")
    return matrix(from_fp8(as_read(tensor._data), tensor._fp8_dtype)) * tensor._scale_inv


@modelled
def dequantize(input, otype):
    """Return the values of a quantized tensor, by rows if these are held."""
    check(not getattr(input, "_with_gemm_swizzled_scales", False), "cannot dequantize swizzled scales")
    by_rows = getattr(input, "_data" if scheme(input) == "Float8" else "_rowwise_data") is not None
    return values(input, not by_rows).reshape(input.size()).to(TORCH_DTYPE[otype])


@modelled
def fp8_transpose(input, dtype, *, out=None):
    """Return bytes with the last dimension first."""
    transposed = matrix(input).t().contiguous().reshape(input.shape[-1], *input.shape[:-1])
    return transposed if out is None else out.copy_(transposed)


@modelled
def swap_first_dims(tensor, *, out=None):
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


@modelled
def swizzle_scales_for_gemm_(tensor):
    """Mark scales as reordered for the GPU; the stand-in keeps their order, and :func:`values` reads them as they are."""
    if hasattr(tensor, "_with_gemm_swizzled_scales"):
        tensor._with_gemm_swizzled_scales = True
