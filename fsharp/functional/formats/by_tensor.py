"""Formats of 8 bits with scales by tensor or by row, on which all ranks agree. Scales do not travel: a value is one byte.

A scale is the largest finite magnitude of the tensor or row, divided by the largest number of the dtype. The scale is rounded
up to 16 significant bits, so that its product with any number of the dtype is exact: encoding decoded values gives the same
bytes. The least scale is 2**-126, which adds up to 2**-127 to the bounds below. NaN stays NaN. An infinity becomes NaN in
dtypes that have no infinity: NaN and both infinities take three codes, while float8_e4m3fn has two that are no numbers, and
int8 has one besides -127 to 127.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch

from fsharp.functional.formats.format import AgreeMax, Format, LeafCodec, LeafPart, Plane, Shape
from fsharp.functional.formats.microscaling import (
    BLOCK,
    ElementwiseFn,
    decode_e4m3,
    is_known_true,
    num_blocks_at_once,
)
from fsharp.functional.formats.registry import made_by_import, register_format

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_FINITE_SCALE_LIMIT = 2.0**100
"""Below this scale every decoded value is finite, as no number is above 57,344."""
_NAN_EXPONENT = 0x7F800000
"""Bits that make a float32 that is not zero an infinity or NaN, and keep its sign."""
_PART_ALIGNMENT = 16
"""Each part of a buffer has a multiple of this number of one-byte values, so that no gaps lie between parts."""


def _register_scaled_format(
    name: str,
    scale_shape: Callable[[Shape], Shape],
    dtype: torch.dtype,
    largest: float,
    to_codes: ElementwiseFn,
    to_numbers: ElementwiseFn,
) -> Format:
    """Return a registered format that stores numbers in ``dtype``, with one scale for each leaf or for each row.

    ``scale_shape`` returns the shape of a leaf's scales from the leaf's shape: :func:`_by_tensor` or :func:`_by_row`.
    ``to_codes`` turns scaled float32 numbers into stored numbers; ``largest`` is the largest finite magnitude of the scaled
    numbers. ``to_numbers`` is the inverse of ``to_codes``.
    """

    def num_scales(shape: Shape) -> int:
        return prod(scale_shape(shape))

    def encode(parts: Sequence[LeafPart], agree: AgreeMax) -> None:
        counts = [num_scales(part.shape) for part in parts]
        most = torch.zeros(sum(counts), dtype=torch.float32, device=parts[0].scales.device if parts else None)
        for part, own in zip(parts, most.split(counts), strict=True):
            for which, where in _pieces(part, len(own)):
                finite = _rows(part.values, which, where).abs().nan_to_num_(0.0, 0.0)
                own[which] = torch.maximum(own[which], finite.amax(1))
        agree(most)
        scales = _round_up_16_bit_significand(most / largest)
        for part, scale in zip(parts, scales.split(counts), strict=True):
            part.scales.view(torch.float32).copy_(scale)
            for which, where in _pieces(part, len(scale)):
                part.planes[0][where].copy_(to_codes(_rows(part.values, which, where) / scale[which, None]).view(-1))

    def decode(part: LeafPart) -> torch.Tensor:
        codes, scale = part.planes[0], part.scales.view(torch.float32)
        values = torch.empty(part.last - part.first, dtype=torch.float32, device=codes.device)
        may_overflow = not is_known_true((scale < _FINITE_SCALE_LIMIT).all())
        for which, where in _pieces(part, len(scale)):
            numbers = to_numbers(codes[where])
            torch.mul(numbers.view(which.stop - which.start, -1), scale[which, None], out=_rows(values, which, where))
            if may_overflow:  # scales were rounded up
                values[where].clamp_(-_LARGEST_FLOAT32, _LARGEST_FLOAT32)
                values[where].copy_(torch.where(numbers.isinf(), numbers, values[where]))
        return values

    codec = LeafCodec(
        lambda shape: 4 * num_scales(shape),
        lambda shape: [(num_scales(shape), torch.float32)],
        encode,
        decode,
        scale_tensors=lambda shape: {"_scale": (scale_shape(shape), torch.float32)},
    )
    planes = (Plane(dtype, _PART_ALIGNMENT),)
    return register_format(Format(name, planes, block=_PART_ALIGNMENT, leaf_codec=codec, made_by=made_by_import(name)))


def _pieces(part: LeafPart, num_scales: int) -> Iterator[tuple[slice, slice]]:
    """Divide a part. Yield ``(which, where)``: the slice ``which`` of scales belongs to the slice ``where`` of elements.

    Each of these scales belongs to equally many of these elements: ``where`` is a part of one row, or has whole rows. A piece
    fits a CPU's cache.
    """
    per_scale, most = max(prod(part.shape) // max(num_scales, 1), 1), num_blocks_at_once(part.scales) * BLOCK
    first = part.first
    while first < part.last:
        row, column = divmod(first, per_scale)
        num_rows = 0 if column else min(part.last - first, most) // per_scale
        last = first + num_rows * per_scale if num_rows else min(first + most, (row + 1) * per_scale, part.last)
        yield slice(row, row + max(num_rows, 1)), slice(first - part.first, last - part.first)
        first = last


def _rows(values: torch.Tensor | None, which: slice, where: slice) -> torch.Tensor:
    """Return the elements ``where`` in float32, as a matrix with a row for each scale in ``which``."""
    assert values is not None
    return values[where].float().view(which.stop - which.start, -1)


def _by_tensor(shape: Shape) -> Shape:
    return (1,)


def _by_row(shape: Shape) -> Shape:
    return (shape[0], *(1 for _ in shape[1:])) if len(shape) > 1 else (1,)


def _round_up_16_bit_significand(scales: torch.Tensor) -> torch.Tensor:
    """Return float32 ``scales``, rounded up to 16 significant bits. The least scale is 2**-126."""
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    return (scales.view(torch.int32) + 0xFF & ~0xFF).view(torch.float32)


def _to_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.masked_fill(numbers.isinf(), torch.nan).to(torch.float8_e4m3fn)


def _to_int8(numbers: torch.Tensor) -> torch.Tensor:
    return torch.where(numbers.isfinite(), numbers.round(), -128.0).to(torch.int8)


def _from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    if codes.device.type != "cpu":
        return codes.float()  # one kernel
    numbers = decode_e4m3(codes)
    is_number = numbers.abs() <= 448.0
    if not is_number.all():
        numbers.view(torch.int32).bitwise_or_(torch.where(is_number, 0, _NAN_EXPONENT).int())
    return numbers


def _from_int8(codes: torch.Tensor) -> torch.Tensor:
    return codes.float().masked_fill_(codes == -128, torch.nan)


_E4M3 = torch.float8_e4m3fn, 448.0, _to_e4m3, _from_e4m3
_E5M2 = torch.float8_e5m2, 57344.0, lambda numbers: numbers.to(torch.float8_e5m2), torch.Tensor.float
_INT8 = torch.int8, 127.0, _to_int8, _from_int8

float8_e4m3_by_tensor = _register_scaled_format("float8_e4m3_by_tensor", _by_tensor, *_E4M3)
"""Numbers of torch.float8_e4m3fn with one scale for each tensor: one byte for each value. For parameters.

The error is at most 1/16 of the value, or 1/450,000 of the largest magnitude of the tensor, whichever is larger. An infinity
becomes NaN.
"""

float8_e4m3_by_row = _register_scaled_format("float8_e4m3_by_row", _by_row, *_E4M3)
"""Numbers of torch.float8_e4m3fn with one scale for each row (index of dim 0): one byte for each value. For parameters.

A tensor with fewer than two dims has one scale. The error is at most 1/16 of the value, or 1/450,000 of the largest magnitude
of the row, whichever is larger. An infinity becomes NaN.
"""

float8_e5m2_by_tensor = _register_scaled_format("float8_e5m2_by_tensor", _by_tensor, *_E5M2)
"""Numbers of torch.float8_e5m2 with one scale for each tensor: one byte for each value. For parameters.

Infinities stay infinities.
The error is at most 1/8 of the value, or 1/7,000,000,000 of the largest magnitude of the tensor, whichever is larger.
"""

float8_e5m2_by_row = _register_scaled_format("float8_e5m2_by_row", _by_row, *_E5M2)
"""Numbers of torch.float8_e5m2 with one scale for each row (index of dim 0): one byte for each value. For parameters.

A tensor with fewer than two dims has one scale. Infinities stay infinities.
The error is at most 1/8 of the value, or 1/7,000,000,000 of the largest magnitude of the row, whichever is larger.
"""

int8_by_tensor = _register_scaled_format("int8_by_tensor", _by_tensor, *_INT8)
"""Integers from -127 to 127 with one scale for each tensor: one byte for each value. For parameters.

The error is at most 1/253 of the largest magnitude of the tensor. An infinity becomes NaN.
"""

int8_by_row = _register_scaled_format("int8_by_row", _by_row, *_INT8)
"""Integers from -127 to 127 with one scale for each row (index of dim 0): one byte for each value. For parameters.

A tensor with fewer than two dims has one scale.
The error is at most 1/253 of the largest magnitude of the row. An infinity becomes NaN.
"""
