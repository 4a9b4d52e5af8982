"""Formats of 8 and 4 bits: blocks of 32 values that share a scale, a power of two, as in OCP's microscaling (MX) formats.

A scale is stored as its exponent in one byte. Each scale is the smallest that keeps the largest magnitude of its block in
range. OCP's rule is the floor of the logarithm, which cuts off some largest values. Encoding decoded values gives the same
bytes. Values are rounded to the nearest code, ties to even, in float32. The least scale is 2**-127, which adds up to 2**-127 to
the bounds below.

[Note: numbers that are not finite]
A block with an infinity or NaN has the scale 255. Its infinities and NaN are kept, its finite values become zero; OCP has NaN
for all of them. Sums and norms are not finite either way. :func:`~fsharp.resilience.find_nonfinite` names the same leaf.
"""

from collections.abc import Callable, Sequence

import torch

from fsharp.functional.formats.format import Format, Plane
from fsharp.functional.formats.registry import made_by_import, register_format

BLOCK = 32
_BIAS, _NOT_FINITE = 127, 255
_FINITE_SCALE_LIMIT = _NOT_FINITE - 17
"""Below this scale every decoded value is finite in float32, as no code is above 57,344."""
LARGEST_DECODED = torch.finfo(torch.bfloat16).max
"""Largest finite decoded magnitude, which bfloat16 holds as well. Encoding rounds larger magnitudes up to 2**128."""
_INFINITY, _MINUS_INFINITY, _NAN = 1, 2, 3  # codes in a block with such a value; finite values have code 0

_BLOCKS_IN_CPU_CACHE = 1 << 13
"""Number of blocks whose values take a megabyte."""
_BLOCKS_ON_DEVICE = 1 << 18
"""Number of blocks of 8 million values, with which each kernel keeps a device busy. Their encoding takes 0.25 GB."""

ElementwiseFn = Callable[[torch.Tensor], torch.Tensor]
"""A function from a tensor to another one of the same shape."""
StochasticRounding = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function ``(numbers, uniform)`` that rounds each number, by its random number, to the number of the code below or above."""


def _register_block_format(
    name: str,
    limit: float,
    to_codes: ElementwiseFn,
    to_numbers: ElementwiseFn,
    rounding: StochasticRounding,
    *,
    largest: float = 0.0,
    dtype: torch.dtype = torch.uint8,
) -> Format:
    """Return a registered format of blocks.

    ``limit``: the largest magnitude that still rounds to a code. ``largest``: the largest number for which a code stands; by
    default ``limit``. ``to_codes`` turns float32 numbers into codes in uint8, and may overwrite the numbers, whose magnitudes
    are at most the next float32 above ``limit``. ``to_numbers`` is the inverse of ``to_codes``. ``rounding``: see
    :data:`StochasticRounding`. ``dtype``: that of the numbers whose bits are the codes; for uint8 codes are below 16, and a
    byte holds two.
    """
    packed = dtype is torch.uint8
    per_block, largest = BLOCK // 2 if packed else BLOCK, largest or limit

    def encode(values: torch.Tensor, uniform: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
        num_blocks = values.numel() // BLOCK
        codes = values.new_empty(num_blocks * per_block, dtype=torch.uint8)
        scales = values.new_empty(num_blocks, dtype=torch.uint8)
        piece = num_blocks_at_once(values)
        pieces = zip(values.split(piece * BLOCK), codes.split(piece * per_block), scales.split(piece), strict=True)
        for i, (part, its_codes, its_scales) in enumerate(pieces):
            noise = None if uniform is None else uniform[i * piece * BLOCK :][: len(part)].view(-1, BLOCK)
            encode_into(its_codes, its_scales, part.float().view(-1, BLOCK), noise)
        return [codes.view(dtype), scales]

    def encode_into(codes: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor, noise: torch.Tensor | None) -> None:
        most = blocks.abs().amax(1, keepdim=True)
        is_finite = torch.isfinite(most)
        least = torch.where(is_finite, most, 1.0) / (limit if noise is None else largest)
        fraction, exponent = torch.frexp(least)
        exponent = exponent - (fraction == 0.5).int()  # of the least power of two that is not below ``least``
        exponent = torch.where(least == 0, -_BIAS, exponent).clamp(-_BIAS, _BIAS)
        scales.copy_(torch.where(is_finite, exponent + _BIAS, _NOT_FINITE).view(-1))
        all_finite = is_known_true(is_finite.all())
        numbers = (blocks if all_finite else torch.where(is_finite, blocks, 0.0)) * power_of_two(-exponent)
        if noise is not None:
            numbers = rounding(numbers, noise).clamp_(-largest, largest)
        found = to_codes(numbers)
        if not all_finite:
            found = torch.where(is_finite, found, codes_of_nonfinite(blocks))
        codes.copy_(pack_codes(found.view(-1)) if packed else found.view(-1))

    def decode(planes: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, scales = planes[0].view(torch.uint8), planes[1]
        values = codes.new_empty((len(scales), BLOCK), dtype=torch.float32)
        piece = num_blocks_at_once(codes)
        for part in zip(values.split(piece), codes.split(piece * per_block), scales.split(piece), strict=True):
            decode_into(*part)
        return values.view(-1)

    def decode_into(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        codes = (unpack_codes(codes) if packed else codes).view(-1, BLOCK)
        scales = scales.int().view(-1, 1)
        torch.mul(to_numbers(codes), power_of_two(scales - _BIAS), out=values)
        if is_known_true((scales < _FINITE_SCALE_LIMIT).all()):
            return
        values.clamp_(-LARGEST_DECODED, LARGEST_DECODED)  # encoding may have rounded up
        write_nonfinite_(values, codes, scales == _NOT_FINITE)

    planes = (Plane(dtype, per_block), Plane(torch.uint8))
    made_by = made_by_import(name)
    return register_format(Format(name, planes, encode, decode, block=BLOCK, stochastic_encode=encode, made_by=made_by))


def num_blocks_at_once(values: torch.Tensor) -> int:
    """Return the number of blocks to encode or decode at once on the device of ``values``. On a CPU they fit its cache."""
    return _BLOCKS_IN_CPU_CACHE if values.device.type == "cpu" else _BLOCKS_ON_DEVICE


def is_known_true(x: torch.Tensor) -> bool:
    """Return whether a boolean CPU tensor is true. For a tensor on another device return False: reading it would block."""
    return x.device.type == "cpu" and bool(x)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2**exponent in float32, for int32 exponents from -383 to 128: 2**-127 below -127, and infinity for 128.

    From -127 to 127 ``x * power_of_two(exponent)`` has the bits of ``torch.ldexp(x, exponent)``, which takes forty times as
    long on a CPU.
    """
    least = 1 << 22  # the bits of 2**-127, which is subnormal
    return (exponent + _BIAS << 23).clamp(min=least).view(torch.float32)


def codes_of_nonfinite(blocks: torch.Tensor) -> torch.Tensor:
    """Return codes of values in blocks with an infinity or NaN: one each for inf, -inf and NaN, and 0 for finite values."""
    special = _INFINITY * (blocks == torch.inf) + _MINUS_INFINITY * (blocks == -torch.inf) + _NAN * blocks.isnan()
    return special.to(torch.uint8)


def write_nonfinite_(values: torch.Tensor, codes: torch.Tensor, is_nonfinite_block: torch.Tensor) -> None:
    """Overwrite the blocks of ``values`` where ``is_nonfinite_block`` is True, by the meaning of ``codes``.

    ``codes``: from :func:`codes_of_nonfinite`.
    """
    values.masked_fill_(is_nonfinite_block, 0.0).masked_fill_(is_nonfinite_block & (codes == _INFINITY), torch.inf)
    values.masked_fill_(is_nonfinite_block & (codes == _MINUS_INFINITY), -torch.inf)
    values.masked_fill_(is_nonfinite_block & (codes == _NAN), torch.nan)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes that hold two codes below 16 each, the first code in the lower half."""
    pairs = codes.view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Return the two codes in each byte of ``packed``, one code in a byte: the inverse of :func:`pack_codes`."""
    pairs = packed.to(torch.int16)
    return ((pairs | pairs << 4) & 0x0F0F).view(torch.uint8)


def _stochastic_round_to_ints(numbers: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return (numbers + noise).floor_()


def _stochastic_rounding_to_floats(mantissa_bits: int, min_exponent: int) -> StochasticRounding:
    """Return the stochastic rounding to floats of ``mantissa_bits``, whose smallest normal number is ``2**min_exponent``."""

    def rounding(numbers: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        power = numbers.abs().clamp_(min=2.0**min_exponent).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
        spacing = power.mul_(2.0**-mantissa_bits)
        return (numbers / spacing).add_(noise).floor_().mul_(spacing)

    return rounding


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return ``codes.view(torch.float8_e4m3fn).float()``, ten times as fast on a CPU. But codes of NaN become 480 or -480.

    Each code becomes the bits of a float16, whose exponent bias is larger by 8, and the float16 is multiplied by 2**8.
    """
    bits = codes.view(torch.int8).to(torch.int16) << 7 & ~0x4000  # clears the copy of the sign bit
    return bits.view(torch.float16).float().mul_(256)


def encode_e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """Return the codes, below 16, of numbers rounded to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their opposites.

    To round a number, ``2**22`` times the power of two below it is added: the sum has room for the bits of the code alone.
    """
    size = numbers.abs().clamp_(max=6.0)
    power = size.clamp(min=1.0).view(torch.int32).bitwise_and_(0x7F800000)
    shift = power + (22 << 23)
    codes = size.add_(shift.view(torch.float32)).view(torch.int32).sub_(shift)
    codes.add_(power.sub_(_BIAS << 23).bitwise_right_shift_(22))
    sign = torch.bitwise_right_shift(numbers.view(torch.int32), 28, out=shift).bitwise_and_(8)
    return codes.bitwise_or_(sign).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the number for which each 4-bit code stands. ``codes``: one in a byte, so below 16.

    Each code becomes the bits of a float16, whose exponent bias is larger by 14, and the float16 is multiplied by 2**14.
    """
    signed = codes.view(torch.int8) << 4  # the bits of the code are first in the byte
    bits = signed.to(torch.int16) << 5 & ~0x7000
    return bits.view(torch.float16).float().mul_(1 << 14)


mxfp8 = _register_block_format(
    "mxfp8",
    464.0,  # half way from 448, the largest number, to the next one
    lambda numbers: numbers.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8),
    decode_e4m3,
    _stochastic_rounding_to_floats(3, -6),
    largest=448.0,
    dtype=torch.float8_e4m3fn,
)
"""OCP's MXFP8: numbers of torch.float8_e4m3fn with a scale for each block of 32 values: 33 bytes for 32 values.

The error is at most 1/16 of the value or 1/230,000 of the largest magnitude of its block, whichever is larger.
"""

mxfp8_e5m2 = _register_block_format(
    "mxfp8_e5m2",
    61440.0,  # half way from 57,344, the largest number, to the next one
    lambda numbers: numbers.clamp_(-57344.0, 57344.0).to(torch.float8_e5m2).view(torch.uint8),
    lambda codes: (codes.to(torch.int16) << 8).view(torch.float16).float(),
    _stochastic_rounding_to_floats(2, -14),
    largest=57344.0,
    dtype=torch.float8_e5m2,
)
"""OCP's MXFP8 with numbers of torch.float8_e5m2 and a scale for each block of 32 values: 33 bytes for 32 values.

The error is at most 1/8 of the value or 1/4,000,000,000 of the largest magnitude of its block, whichever is larger.
"""

mxfp4 = _register_block_format("mxfp4", 7.0, encode_e2m1, decode_e2m1, _stochastic_rounding_to_floats(1, 0), largest=6.0)
"""OCP's MXFP4: numbers of 4 bits (e2m1) with a scale for each block of 32 values: 17 bytes for 32 values.

The error is at most 1/5 of the value or 1/14 of the largest magnitude of its block, whichever is larger.
"""

mxint8 = _register_block_format(
    "mxint8",
    127.0,
    lambda numbers: numbers.round_().to(torch.int8).view(torch.uint8),
    lambda codes: codes.view(torch.int8).float(),
    _stochastic_round_to_ints,
    dtype=torch.int8,
)
"""OCP's MXINT8: integers from -127 to 127 with a scale for each block of 32 values: 33 bytes for 32 values.

OCP's scales are 64 times as large, as its numbers are 64ths.
The error is at most 1/127 of the largest magnitude of the block.
"""

mxint4 = _register_block_format(
    "mxint4",
    7.0,
    lambda numbers: numbers.round_().to(torch.int8).add_(8).view(torch.uint8),
    lambda codes: codes.float().sub_(8),
    _stochastic_round_to_ints,
)
"""Integers from -7 to 7 with a scale for each block of 32 values: 17 bytes for 32 values. This is not a format of the OCP.

The error is at most 1/7 of the largest magnitude of the block. For gradients, where errors of many ranks average
out, and for updates of parameters, where errors do not accumulate.
"""
