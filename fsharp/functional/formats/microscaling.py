"""Formats of 8 and 4 bits: blocks of 32 values that share a scale, a power of two, as in OCP's microscaling (MX) formats.

A scale is stored as its exponent in one byte. Each scale is the smallest that keeps the largest magnitude of its block in
range; OCP's rule is the floor of the logarithm, which cuts off some largest values. Encoding decoded values gives the same
bytes. Values are rounded to the nearest code, ties to even, in float32. The least scale is 2**-127, which adds up to 2**-127 to
the bounds below.

[Note: numbers that are not finite]
A block with an infinity or NaN has the scale 255. Its infinities and NaN are kept, its finite values become zero; OCP has NaN
for all of them. Sums and norms are not finite either way. :func:`~fsharp.resilience.find_nonfinite` names the same leaf.
"""

from collections.abc import Callable, Sequence

import torch

from fsharp.functional.formats.format import Format, Plane, register_format

BLOCK = 32
_BIAS, _NOT_FINITE = 127, 255
_LARGEST = torch.finfo(torch.float32).max
_INFINITY, _MINUS_INFINITY, _NAN = 1, 2, 3  # codes in a block that is not finite, where any other value is 0

Codes = Callable[[torch.Tensor], torch.Tensor]
"""A function of a tensor to another one of the same shape."""


def _blocks_of_32(name: str, limit: float, to_codes: Codes, to_numbers: Codes, *, packed: bool = False) -> Format:
    """Return a registered format.

    Args:
        name: of the format.
        limit: the largest magnitude that rounds to a code.
        to_codes: of numbers of at most this magnitude, in float32, the codes in uint8.
        to_numbers: the inverse.
        packed: whether codes are below 16, of which two are stored in a byte.
    """

    def encode(values: torch.Tensor) -> Sequence[torch.Tensor]:
        blocks = values.float().view(-1, BLOCK)
        most = blocks.abs().amax(1, keepdim=True)
        is_finite = torch.isfinite(most)
        least = torch.where(is_finite, most, 1.0) / limit
        fraction, exponent = torch.frexp(least)
        exponent = exponent - (fraction == 0.5).int()  # of the least power of two that is not below it
        exponent = torch.where(least == 0, -_BIAS, exponent).clamp(-_BIAS, _BIAS)
        numbers = torch.ldexp(torch.where(is_finite, blocks, 0.0), -exponent).clamp(-limit, limit)
        special = _INFINITY * (blocks == torch.inf) + _MINUS_INFINITY * (blocks == -torch.inf) + _NAN * blocks.isnan()
        codes = torch.where(is_finite, to_codes(numbers), special.to(torch.uint8)).view(-1)
        scales = torch.where(is_finite, exponent + _BIAS, _NOT_FINITE).to(torch.uint8).view(-1)
        return [codes[0::2] | codes[1::2] << 4 if packed else codes, scales]

    def decode(planes: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, scales = planes
        codes = (torch.stack([codes & 15, codes >> 4], 1) if packed else codes).view(-1, BLOCK)
        scales = scales.int().view(-1, 1)
        values = torch.ldexp(to_numbers(codes), scales - _BIAS).clamp_(-_LARGEST, _LARGEST)  # may have been rounded up
        special = torch.zeros_like(values).masked_fill_(codes == _INFINITY, torch.inf)
        special.masked_fill_(codes == _MINUS_INFINITY, -torch.inf).masked_fill_(codes == _NAN, torch.nan)
        return torch.where(scales == _NOT_FINITE, special, values).view(-1)

    planes = (Plane(torch.uint8, BLOCK // 2 if packed else BLOCK), Plane(torch.uint8))
    return register_format(Format(name, planes, encode, decode, block=BLOCK))


mxfp8 = _blocks_of_32(
    "mxfp8",
    464.0,  # half way to what would come after 448, the largest
    lambda numbers: numbers.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8),
    lambda codes: codes.view(torch.float8_e4m3fn).float(),
)
"""OCP's MXFP8: numbers of torch.float8_e4m3fn in blocks of 32 with a scale, 33 bytes for 32 values.

The error is at most 1/16 of the value or 1/230,000 of the largest magnitude of its block, whichever is larger.
"""

mxint8 = _blocks_of_32(
    "mxint8",
    127.0,
    lambda numbers: numbers.round().to(torch.int8).view(torch.uint8),
    lambda codes: codes.view(torch.int8).float(),
)
"""Integers from -127 to 127 in blocks of 32 with a scale, 33 bytes for 32 values: OCP's MXINT8, whose scales are 64 times ours.

The error is at most 1/127 of the largest magnitude of the block.
"""

mxint4 = _blocks_of_32(
    "mxint4",
    7.0,
    lambda numbers: numbers.round().add_(8).to(torch.uint8),
    lambda codes: codes.float() - 8,
    packed=True,
)
"""Integers from -7 to 7 in blocks of 32 with a scale, 17 bytes for 32 values; not of the OCP.

The error is at most 1/7 of the largest magnitude of the block: for gradients, where the errors of many ranks average out.
"""
