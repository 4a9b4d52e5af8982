"""Casts of whole tensors: one function for each of TransformerEngine's quantizers."""

import torch
import torch.distributed as dist

from .enums import DType
from .registry import check, modelled, refuse
from .rounding import (
    block_amax,
    copy_padded,
    e8m0_of_amax,
    fp4_block_scale,
    fp4_global_scale,
    from_fp8,
    inverse_power_of_two,
    matrix,
    scale_of_amax,
    scaled_to_fp4,
    spread,
    to_fp8,
)
from .storage import create_empty_quantized_tensor, is_quantized, match_usages, scheme, side_names


@modelled
def quantize(tensor, quantizer, output=None, noop=None):
    """Return a tensor in the format of a quantizer, in new buffers or in those of ``output``."""
    if output is not None and noop is not None and noop.numel() and noop.item() == 1.0:
        return output
    source = (tensor.dequantize() if is_quantized(tensor) else tensor).detach().contiguous()
    if output is None:
        output = create_empty_quantized_tensor(quantizer, source.shape, source.dtype, source.device)
    else:
        match_usages(quantizer, output)
    write = WRITERS.get(scheme(quantizer))
    if write is None:
        refuse(f"transformer_engine_torch.quantize() by a {type(quantizer).__name__}")
    if source.numel():  # as on a GPU, a rank without elements takes no part in a reduction of amax: the others wait for it
        write(source, output, quantizer)
    return output


def reduce_amax(amax, quantizer):
    """Take the largest amax of the quantizer's group of ranks, if the quantizer has one."""
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, dist.ReduceOp.MAX, quantizer._canonicalized_amax_reduction_group())


def whole_amax(source):
    return source.float().abs().max().reshape(1)


def write_delayed(source, output, quantizer):
    """Cast with the scale that the quantizer has, and add the tensor's amax to the quantizer's."""
    write_one_scale(source, output, quantizer.scale, quantizer.dtype)
    if quantizer.amax.numel():
        quantizer.amax.copy_(torch.maximum(quantizer.amax, whole_amax(source).reshape(quantizer.amax.shape)))


def write_current(source, output, quantizer):
    """Cast with the scale of the tensor's own amax."""
    amax = whole_amax(source)
    reduce_amax(amax, quantizer)
    scale = scale_of_amax(amax, quantizer.dtype, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    write_one_scale(source, output, scale, quantizer.dtype)


def write_one_scale(source, output, scale, dtype):
    data = to_fp8(source.float() * scale.float(), dtype)
    if output._data is not None:
        output._data.copy_(data.reshape(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(matrix(data).t().reshape(output._transpose.shape))
        output._transpose_invalid = False
    output._scale_inv.copy_(torch.reciprocal(scale.float()).reshape(output._scale_inv.shape))


def write_blocks(source, output, quantizer):
    """Cast in blocks of 128 x 128 (weights) or 1 x 128; by columns, the blocks are those of the transpose."""
    rows = 128 if quantizer.block_scaling_dim == 2 else 1
    infinite = torch.finfo(source.dtype).max
    for columnwise in (False, True):
        data, scale_inv, _ = side_names(columnwise)
        if getattr(output, data) is not None:
            part = matrix(source).float().t() if columnwise else matrix(source).float()
            amax = block_amax(part, rows, 128)
            scale = scale_of_amax(amax, quantizer.dtype, quantizer.force_pow_2_scales, quantizer.amax_epsilon, infinite)
            written = to_fp8(part * spread(scale, rows, 128, part.shape), quantizer.dtype)
            getattr(output, data).copy_(written.reshape(getattr(output, data).shape))
            inverse = torch.reciprocal(scale)
            copy_padded(inverse if rows == 128 else inverse.t(), getattr(output, scale_inv))


def write_mxfp8(source, output, quantizer):
    """Cast in blocks of 32 along rows, and of 32 along columns."""
    whole = matrix(source).float()
    for columnwise in (False, True):
        data, scale_inv, _ = side_names(columnwise)
        if getattr(output, data) is not None:
            block = (32, 1) if columnwise else (1, 32)
            if quantizer.with_2d_quantization:
                amax = block_amax(whole, 32, 32).repeat_interleave(32 // block[0], 0).repeat_interleave(32 // block[1], 1)
            else:
                amax = block_amax(whole, *block)
            exponents = e8m0_of_amax(amax, quantizer.dtype)
            written = to_fp8(whole * spread(inverse_power_of_two(exponents), *block, whole.shape), quantizer.dtype)
            getattr(output, data).copy_(written.reshape(getattr(output, data).shape))
            copy_padded(exponents, getattr(output, scale_inv))


def write_nvfp4(source, output, quantizer):
    """Cast in blocks of 1 x 16, or 16 x 16 (weights); by columns, of the transpose, Hadamard-transformed if so asked."""
    if quantizer.stochastic_rounding:
        refuse("stochastic rounding", "NVFP4BlockScaling(disable_stochastic_rounding=True) does without")
    if quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6:
        refuse("NVFP4 with one amax a row, or with four over six")
    check(not quantizer.with_rht or source.dtype == torch.bfloat16, "RHT is only supported for bfloat16 input")
    rows = 16 if quantizer.with_2d_quantization else 1
    for columnwise in (False, True):
        data, scale_inv, amax_name = side_names(columnwise)
        if getattr(output, data) is not None:
            part = matrix(source).t().contiguous() if columnwise else matrix(source)
            if columnwise and quantizer.with_rht:
                part = (part.reshape(-1, 16) @ quantizer.rht_matrix).reshape(part.shape)
            amax = whole_amax(part)
            reduce_amax(amax, quantizer)
            getattr(output, amax_name).copy_(amax)
            global_scale = fp4_global_scale(amax)
            block_scale = to_fp8(fp4_block_scale(block_amax(part.float(), rows, 16), global_scale), DType.kFloat8E4M3)
            block_scale = block_scale.repeat_interleave(rows, 0)[: part.shape[0]]
            spread_scale = spread(from_fp8(block_scale, DType.kFloat8E4M3), 1, 16, part.shape)
            written = scaled_to_fp4(part.float(), spread_scale, global_scale)
            getattr(output, data).copy_(written.reshape(getattr(output, data).shape))
            copy_padded(block_scale, getattr(output, scale_inv))


WRITERS = {
    "Float8": write_delayed,
    "Float8CurrentScaling": write_current,
    "Float8Block": write_blocks,
    "MXFP8": write_mxfp8,
    "NVFP4": write_nvfp4,
}


def in_format_of(quantizer, tensor, output=None):
    """Return a result as a quantizer wants it: as it is without a quantizer, in ``output`` if that is there."""
    if quantizer is not None:
        return quantize(tensor, quantizer, output)
    return tensor if output is None else output.copy_(tensor)


@modelled
def multi_tensor_quantize(tensor_list, quantizer_list):
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list)]


@modelled
def split_quantize(tensor, split_sections, quantizer_list, disable_bulk_allocation=False):
    return multi_tensor_quantize(tensor.split(list(split_sections)), quantizer_list)


@modelled
def bgrad_quantize(input, quantizer):
    """Return the gradient of a bias, and the quantized gradient of the output."""
    return [matrix(input.detach()).float().sum(0).to(input.dtype), in_format_of(quantizer, input.detach())]


@modelled
def compute_amax(input, amax):
    if input.numel():
        amax.copy_(whole_amax(input.detach()).reshape(amax.shape))
