"""NVIDIA's NVFP4: numbers of 4 bits in blocks of 16, with a scale of 8 bits for each block and one in float32 for each tensor.

A value is its number (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6) times the block's scale (e4m3) times the tensor's scale. A block is 16
consecutive elements of a leaf, or fewer at its end; leaves begin at multiples of 16 in their buffers. Ranks agree on the scales
of tensors. For 16 values 9 bytes travel.

NVIDIA's scale of a tensor is its largest magnitude over 6 * 448. Here the scale is a power of two of that size, and scales of
blocks are not subnormal. So encoding decoded values gives the same bytes. Readers of NVFP4 can read these planes.
"""

from collections.abc import Sequence

import torch

from fsharp.functional.formats import microscaling
from fsharp.functional.formats.format import AgreeMax, Format, LeafCodec, LeafPart, Plane
from fsharp.functional.formats.microscaling import (
    LARGEST_DECODED,
    codes_of_nonfinite,
    decode_e2m1,
    encode_e2m1,
    is_known_true,
    num_blocks_at_once,
    pack_codes,
    power_of_two,
    unpack_codes,
    write_nonfinite_,
)
from fsharp.functional.formats.registry import made_by_import, register_format

BLOCK = 16
_LEAST, _MOST = 2.0**-6, 448.0
"""Least and largest scale of a block; the least is the least normal number of torch.float8_e4m3fn."""
_LARGEST_AT_SCALE_ONE = 6 * 464.0
"""The largest magnitude of a tensor whose scale is 1: half way to the next value after the largest scale of a block."""


def _encode(parts: Sequence[LeafPart], agree: AgreeMax) -> None:
    blocks = [_values_in_blocks(part) for part in parts]
    maxima = [
        torch.cat([piece.abs().amax(1, keepdim=True) for piece in each.split(_num_blocks_at_once(each))]) for each in blocks
    ]
    leaf_maxima = [torch.where(each.isfinite(), each, 0.0).amax() if len(each) else each.new_zeros(()) for each in maxima]
    if leaf_maxima:
        agree(largest := torch.stack(leaf_maxima))
        fraction, exponent = torch.frexp((largest / _LARGEST_AT_SCALE_ONE).clamp(min=torch.finfo(torch.float32).tiny))
        tensor_scale = power_of_two(exponent - (fraction == 0.5).int())
    for i, part in enumerate(parts):
        part.scales.view(torch.float32).copy_(tensor_scale[i])
        codes, scales = part.planes
        piece = _num_blocks_at_once(codes)
        rows = zip(blocks[i].split(piece), maxima[i].split(piece), codes.split(piece * 8), scales.split(piece), strict=True)
        for each in rows:
            _encode_into(*each, tensor_scale[i])


def _values_in_blocks(part: LeafPart) -> torch.Tensor:
    """Return the values of a part as a matrix with a block in each row; the last row is padded with zeros."""
    assert part.values is not None
    values, missing = part.values.float(), (part.first - part.last) % BLOCK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _num_blocks_at_once(values: torch.Tensor) -> int:
    return num_blocks_at_once(values) * microscaling.BLOCK // BLOCK


def _encode_into(
    blocks: torch.Tensor, maxima: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor
) -> None:
    is_finite = maxima.isfinite()
    block_scales = (torch.where(is_finite, maxima, 0.0) / tensor_scale / 6).clamp_(_LEAST, _MOST).to(torch.float8_e4m3fn)
    found = encode_e2m1(blocks / (block_scales.float() * tensor_scale))
    if not is_known_true(is_finite.all()):
        found = torch.where(is_finite, found, codes_of_nonfinite(blocks))
        block_scales = torch.where(is_finite, block_scales.float(), torch.nan).to(torch.float8_e4m3fn)
    codes.copy_(pack_codes(found.view(-1)))
    scales.copy_(block_scales.view(-1))


def _decode(part: LeafPart) -> torch.Tensor:
    codes, scales = part.planes
    values = torch.empty((len(scales), BLOCK), dtype=torch.float32, device=codes.device)
    piece = _num_blocks_at_once(codes)
    tensor_scale = part.scales.view(torch.float32)
    for each in zip(values.split(piece), codes.split(piece * 8), scales.split(piece), strict=True):
        _decode_into(*each, tensor_scale)
    return values.view(-1)[: part.last - part.first]


def _decode_into(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor) -> None:
    codes, block_scales = unpack_codes(codes).view(-1, BLOCK), scales.float().view(-1, 1) * tensor_scale
    torch.mul(decode_e2m1(codes), block_scales, out=values)
    if is_known_true((block_scales < LARGEST_DECODED / 6).all()):  # False for NaN
        return
    values.clamp_(-LARGEST_DECODED, LARGEST_DECODED)  # encoding may have rounded up
    write_nonfinite_(values, codes, block_scales.isnan())


_CODEC = LeafCodec(
    lambda shape: 4,
    lambda shape: [(1, torch.float32)],
    _encode,
    _decode,
    scale_tensors=lambda shape: {"_scale_2": ((), torch.float32)},
)
nvfp4 = register_format(
    Format(
        "nvfp4",
        (Plane(torch.uint8, BLOCK // 2), Plane(torch.float8_e4m3fn)),
        block=BLOCK,
        leaf_codec=_CODEC,
        made_by=made_by_import("nvfp4"),
    )
)
"""NVIDIA's NVFP4: numbers of 4 bits with a scale for each block of 16 values and for each tensor. For parameters.

It takes 9 bytes for 16 values; scales of tensors do not travel. The error is at most the largest of: 1/5 of the value,
1/22 of the largest magnitude of its block, 1/356,000 of the largest magnitude of the tensor. A block with an infinity or
NaN has NaN as its scale: infinities and NaN are kept, finite values become zero. For gradients use
:data:`~fsharp.formats.mxfp4`.
"""
