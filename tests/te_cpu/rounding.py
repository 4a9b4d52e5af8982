"""Arithmetic of casts: scales from the largest magnitude ("amax") of a tensor or block, and values to FP8 and FP4 and back.

Each function rounds where the TransformerEngine kernels round. Values are float32 matrices unless a line says otherwise.
"""

import torch
import torch.nn.functional as F

from .enums import DType

FP8_LARGEST = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
FP4_LARGEST = 6.0
FLOAT32_LARGEST = torch.finfo(torch.float32).max
TORCH_DTYPE = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def matrix(tensor):
    """Return a tensor as a matrix: all dimensions but the last are one."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def quotient(number, tensor):
    """Return ``number / tensor`` rounded once; torch itself multiplies a number by the rounded reciprocal."""
    return torch.full_like(tensor, number) / tensor


def to_fp8(values, dtype):
    """Return the FP8 bytes of values; those that are too large become the largest."""
    largest = FP8_LARGEST[dtype]
    return values.clamp(-largest, largest).to(TORCH_DTYPE[dtype]).view(torch.uint8)


def from_fp8(data, dtype):
    """Return the values of FP8 bytes."""
    return data.contiguous().view(TORCH_DTYPE[dtype]).float()


def to_fp4(values):
    """Return FP4 values packed two to a byte, the first in the lower half; halfway cases go to the even mantissa."""
    size, half = values.abs(), torch.tensor([0.25, 1.25, 2.5, 5.0])
    code = torch.bucketize(size, half)  # a tie at 0.25, 1.25, 2.5 or 5 goes down
    code = code + torch.bucketize(size, torch.tensor([0.75, 1.75, 3.5]), right=True)  # one at 0.75, 1.75 or 3.5 goes up
    code = (code + 8 * (values < 0)).to(torch.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4


def unpack_fp4(data):
    """Return the codes of packed FP4 values, one to a byte, twice as many columns."""
    return torch.stack((data & 15, data >> 4), -1).reshape(data.shape[0], -1)


def from_fp4(data):
    """Return the values of packed FP4 bytes."""
    return FP4_VALUES[unpack_fp4(data).long()]


def block_amax(values, rows, columns):
    """Return the largest magnitude of each block of ``rows x columns``; the last blocks may be smaller."""
    padded = F.pad(values.abs(), (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns).amax((1, 3))


def spread(blocks, rows, columns, shape):
    """Return a matrix of ``shape`` that has the number of a block in each place of the block."""
    return blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def copy_padded(source, target):
    """Copy a matrix into the corner of a larger one, and set the rest to zero."""
    target.zero_()
    target[: source.shape[0], : source.shape[1]] = source


def scale_of_amax(amax, dtype, power_of_two, epsilon, infinite=FLOAT32_LARGEST):
    """Return the scale of a tensor or block: the largest FP8 value over amax (``compute_scale_from_amax``).

    Args:
        infinite: takes the place of a scale that is infinite.
    """
    amax = amax.float().clamp(min=epsilon)
    scale = quotient(FP8_LARGEST[dtype], amax)
    scale = torch.where(torch.isinf(scale), infinite, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)  # without its mantissa
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def e8m0_of_amax(amax, dtype):
    """Return the exponents of MXFP8's scales, rounded up, as bytes (``float_to_e8m0``)."""
    ratio = amax.float() * (torch.tensor(1.0) / FP8_LARGEST[dtype])
    bits = ratio.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    exponent = exponent + ((mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))).int()
    exponent = torch.where(torch.isinf(ratio), 0xFE, exponent)
    return torch.where(torch.isnan(ratio), 0xFF, exponent).to(torch.uint8)


def power_of_two(exponent):
    """Return ``2 ** (exponent - 127)`` of the bytes of E8M0 scales."""
    return torch.ldexp(torch.ones(exponent.shape), exponent.int() - 127)


def inverse_power_of_two(exponent):
    """Return ``2 ** (127 - exponent)`` of the bytes of E8M0 scales."""
    return torch.ldexp(torch.ones(exponent.shape), 127 - exponent.int())


def fp4_global_scale(amax):
    """Return the scale of a whole NVFP4 tensor, from its amax."""
    scale = quotient(FP8_LARGEST[DType.kFloat8E4M3] * FP4_LARGEST, amax).clamp(max=FLOAT32_LARGEST)
    return torch.where((amax > 0) & (scale > 0), scale, 1.0)


def fp4_block_scale(amax, global_scale):
    """Return the scales of NVFP4 blocks, before they are rounded to FP8, from the amax of blocks."""
    return (amax * (global_scale * (torch.tensor(1.0) / FP4_LARGEST))).clamp(max=FLOAT32_LARGEST)


def scaled_to_fp4(values, block_scale, global_scale):
    """Return the packed FP4 bytes of values; the FP8 scales of blocks are spread over the values' shape."""
    scale = (1.0 / (block_scale * (1.0 / global_scale))).clamp(max=FLOAT32_LARGEST)
    return to_fp4((values * scale).clamp(-FP4_LARGEST, FP4_LARGEST))
