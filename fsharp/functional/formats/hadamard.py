"""hadamard: a format that rotates values before encoding, so that one large value does not decide its block's scale."""

from collections.abc import Callable, Sequence
from functools import cache

import torch

from fsharp.errors import LayoutError
from fsharp.functional.formats.format import Format, Plane
from fsharp.functional.formats.microscaling import BLOCK, LARGEST_DECODED, is_known_true, mxint4, mxint8, num_blocks_at_once
from fsharp.functional.formats.registry import register_format
from fsharp.type_checks import options_checked


@options_checked
def hadamard(format: Format, size: int = 32) -> Format:
    """Return a format that rotates blocks of ``size`` values by a Hadamard matrix before ``format`` encodes them.

    Decoded numbers are rotated back. Each encoded number is a signed sum of all values of its block. So one large value becomes
    ``size`` numbers of equal size, and small values beside it are no longer rounded to zero. The rotation helps if few values
    are much larger than the rest, as in gradients, and the format has few codes, as ``mxint4`` and ``mxfp4``.

    >>> import fsharp as fs
    >>> wire = fs.formats.hadamard(fs.formats.mxint4)
    >>> wire.name, wire.size(1024) == fs.formats.mxint4.size(1024)
    ('hadamard32_mxint4', True)
    >>> gradient = torch.full((32,), 0.01)
    >>> gradient[5] = 1.0
    >>> [f.load(f.store(gradient, 32), 32, torch.float32)[0].item() for f in (fs.formats.mxint4, wire)]
    [0.0, 0.0078125]

    The encoded numbers are ``H x / size``, which never overflow float32. Decoded values are ``H`` times the decoded numbers. Up
    to the factor ``sqrt(size)``, which scales of blocks absorb, this is an orthonormal rotation.

    Args:
        format: a format of blocks, such as ``fs.formats.mxint4``.
        size: number of values that are rotated together: a power of two. The block of the result is a multiple of ``size``, and
            of the block of ``format``.

    Returns:
        A registered format with as many bytes as ``format``. Equal arguments return one format.

    The error of a value is at most the sum of the errors of the ``size`` encoded numbers of its block. The root mean square
    error of values is ``sqrt(size)`` times the root mean square error of these numbers. An infinity or NaN makes all ``size``
    values of its block infinite or NaN, also values of another leaf in this block.

    ``Precision(stored=...)`` takes the result only if ``format`` is ``mxint8`` or ``mxint4``, and ``size`` is at most 32. Then
    sums of encoded numbers are exact in float32, and encoding decoded values gives the same bytes again. With ``mxint8`` main
    copies have to be in float32 or float64.

    Raises:
        LayoutError: ``format`` encodes whole leaves or is plain, or ``size`` is not a power of two from 2 on.

    Source: QuaRot, https://arxiv.org/abs/2404.00456, and SDP4Bit, https://arxiv.org/abs/2410.15526, for gradients.
    """
    if format.is_plain or format.leaf_codec is not None:
        raise LayoutError(
            f"hadamard(): format is {format!s:.80}, expected a format that encodes blocks, such as fs.formats.mxint4. Plain "
            "dtypes have no scale that a large value would take, and formats of whole leaves cut blocks by themselves."
        )
    if size < 2 or size & (size - 1):
        raise LayoutError(f"hadamard(): size is {size!r}, expected a power of two, at least 2.")
    return _register_hadamard_format(format, format.encode, format.decode, size)


def needs_float32_main(format: Format) -> bool:
    """Return whether ``format`` is a rotated ``mxint8``, whose decoded values may have 12 significant bits.

    Main copies in 16 bits round these values, which are then encoded to other bytes.
    """
    return format.made_by is not None and format.made_by[0] is hadamard and format.made_by[1][0] == mxint8


@cache  # keyed by the functions as well, which equal formats may differ in
def _register_hadamard_format(
    format: Format,
    encode_planes: Callable[..., Sequence[torch.Tensor]],
    decode_planes: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    size: int,
) -> Format:
    times = max(size // (format.block & -format.block), 1)  # size is a power of two: the least common multiple
    planes = tuple([Plane(plane.dtype, plane.per_block * times) for plane in format.planes])

    def encode(values: torch.Tensor, *uniform: torch.Tensor) -> Sequence[torch.Tensor]:
        return encode_planes(_map_rows(values, size, _hadamard_transform), *uniform)

    def rounded(values: torch.Tensor, uniform: torch.Tensor) -> Sequence[torch.Tensor]:
        assert format.stochastic_encode is not None
        return format.stochastic_encode(_map_rows(values, size, _hadamard_transform), uniform)

    def decode(planes: Sequence[torch.Tensor]) -> torch.Tensor:
        return _map_rows(decode_planes(planes), size, _inverse_hadamard_transform)

    about = f"hadamard{size}_{format.name}", planes, encode, decode, format.block * times
    by_noise, made_by = None if format.stochastic_encode is None else rounded, (hadamard, (format, size))
    is_exact = format in (mxint4, mxint8) and times == 1  # floats lose the sign of zero; two scales in a sum lose low bits
    return register_format(
        Format(*about, stochastic_encode=by_noise, seed=format.seed, reencodes_exactly=is_exact, made_by=made_by)
    )


def _map_rows(values: torch.Tensor, size: int, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply ``fn`` to ``values`` as rows of ``size`` values each. Return the results in float32, in the shape of ``values``.

    Each call of ``fn`` gets as many rows as fit a cache.
    """
    out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    piece = max(num_blocks_at_once(values) * BLOCK // size, 1)
    for rows, its_out in zip(values.view(-1, size).split(piece), out.view(-1, size).split(piece), strict=True):
        its_out.copy_(fn(rows))
    return out


def _hadamard_transform(rows: torch.Tensor) -> torch.Tensor:
    """Return the Hadamard transform of each row, divided by the number of values in a row. Rows do not affect each other."""
    columns = rows.t().float() * (1 / rows.shape[1])  # transposed, so that each stage adds long runs
    columns = columns.contiguous()
    other, half = torch.empty_like(columns), 1
    while half < len(columns):
        pairs, sums = (x.view(-1, 2, half, x.shape[1]) for x in (columns, other))
        torch.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        columns, other, half = other, columns, 2 * half
    return columns.t()


def _inverse_hadamard_transform(rows: torch.Tensor) -> torch.Tensor:
    """Return the Hadamard transform of each row, the inverse of the encoder's. Finite sums are clamped, not infinite."""
    size = rows.shape[1]
    found = _hadamard_transform(rows)
    if not is_known_true((found.abs() <= LARGEST_DECODED / size).all()):  # False for NaN
        found = torch.where(found.isfinite(), found.clamp(-LARGEST_DECODED / size, LARGEST_DECODED / size), found)
    return found * size
