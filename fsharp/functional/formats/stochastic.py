"""stochastic: a format that rounds each value up or down at random; on average the decoded value is the value itself.

[Note: random numbers]
Each value has a random number of its own. This number depends on the seed, on the kind of value (gradient or update), and on
the number of the step. It also depends on the path of the leaf, and on the index of the element in the whole leaf. The number
does not depend on mesh, strategy, rank or path of execution. So runs with the same blocks are bitwise equal, as are a resumed
and an uninterrupted run. All ranks and all microbatches of a step round their summands of a gradient by the same random
numbers: each summand is unbiased by itself. A gradient that is encoded again, for the next axis, gets new numbers.

A random number has 16 bits: ``(k + 0.5) / 2**16``. So the expected decoded value differs from the value by at most ``2**-16``
times the distance between the codes below and above.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from fsharp.errors import LayoutError
from fsharp.functional.formats.format import Format, NoiseFn, Plane
from fsharp.functional.formats.microscaling import BLOCK, num_blocks_at_once
from fsharp.functional.formats.registry import made_by_import, register_format
from fsharp.type_checks import options_checked

_NOISE_BITS = 16
_VALUES_AT_ONCE = 1 << 16
"""Number of values whose random numbers are made together on a CPU, to fit a core's cache."""


@options_checked
def stochastic(format: Format | torch.dtype, seed: int = 0) -> Format:
    """Return a format for gradients and updates that rounds stochastically where ``format`` rounds to the nearest code.

    A value between two neighbouring codes becomes the upper or the lower code at random. On average the decoded value equals
    the value. A value that has a code of its own stays as it is. So small gradients are not rounded to zero in every step, and
    no memory for residuals is needed. The error of one value may be twice that of rounding to the nearest code.

    >>> import fsharp as fs
    >>> fs.formats.stochastic(fs.formats.mxint4).name, fs.formats.stochastic(torch.bfloat16, seed=7).name
    ('stochastic_mxint4', 'stochastic7_bfloat16')
    >>> wire = fs.Precision(wire={"outer": fs.formats.stochastic(fs.formats.mxint4), "inner": torch.bfloat16})

    Args:
        format: ``torch.bfloat16``, or a format with a function ``stochastic_encode``. The formats ``mxint8``, ``mxint4``,
            ``mxfp8``, ``mxfp8_e5m2`` and ``mxfp4`` of ``fs.formats`` have this function. So do the formats that
            :func:`~fsharp.formats.hadamard` makes of them.
        seed: runs with equal seeds have equal bits. The seed is part of the format's name, which ranks compare.

    Returns:
        A registered format with the planes of ``format``. Equal arguments return one format.

    The error of a value is less than the distance between the codes below and above the value. This distance is at most a
    fraction of the value, or a fraction of the largest magnitude in the block, whichever is larger:

    ==================  ============  ================================
    ``format``          of the value  of the block's largest magnitude
    ==================  ============  ================================
    ``mxint8``          0             2/127
    ``mxint4``          0             2/7
    ``mxfp8``           1/8           1/114,000
    ``mxfp8_e5m2``      1/4           1/1,800,000,000
    ``mxfp4``           1/2           1/6
    ``torch.bfloat16``  1/128         0
    ==================  ============  ================================

    The expected error is at most ``2**-16`` of this distance.

    ``Precision(wire=...)`` and ``Precision(update=...)`` take such formats, ``stored=`` refuses them. ``fs.train_step`` passes
    the number of the step; a step of your own passes ``step=state.step`` to the function of ``value_and_grad`` and to
    ``reduce_scatter``. A CUDA graph does not know the number, and refuses the format. Under transforms of ``torch.func``
    gradients are summed without a format.

    Cost: some ten integer operations a value. While a buffer is encoded, 4 bytes for each value hold its random number.

    Raises:
        LayoutError: ``format`` has no function ``stochastic_encode``, or has a seed already; or ``seed`` is negative.

    Source: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv 1502.02551.
    """
    if format is torch.bfloat16:
        format = _BFLOAT16
    if not isinstance(format, Format) or format.stochastic_encode is None or format.seed is not None or seed < 0:
        named = format if isinstance(format, torch.dtype) else format.name
        seeded = f", which has seed {format.seed} already" if isinstance(format, Format) and format.seed is not None else ""
        raise LayoutError(
            f"stochastic(): got format {named!s:.80}{seeded} and seed {seed}; expected a format with a function "
            "`stochastic_encode`, such as fs.formats.mxint4, or torch.bfloat16, and a seed of at least 0. Plain float32 does "
            "not round; formats of whole leaves are for parameters at rest, which are rounded to the nearest code."
        )
    return _make_stochastic_format(format, format.stochastic_encode, seed)


@cache  # keyed by the function as well, which equal formats may differ in
def _make_stochastic_format(format: Format, encode: Callable[..., Any], seed: int) -> Format:
    name = f"stochastic{seed or ''}_{format.name}"
    made_by = stochastic, (format, seed)
    return register_format(Format(name, format.planes, encode, format.decode, format.block, seed=seed, made_by=made_by))


def _round_to_bfloat16(values: torch.Tensor, uniform: torch.Tensor) -> Sequence[torch.Tensor]:
    """Round to bfloat16 stochastically: add ``uniform`` to the low bits of float32, and cut these bits off."""
    largest = torch.finfo(torch.bfloat16).max
    out = torch.empty_like(values, dtype=torch.bfloat16)
    piece = num_blocks_at_once(values) * BLOCK
    for part, noise, its_out in zip(values.split(piece), uniform.split(piece), out.split(piece), strict=True):
        single = part.float()
        bits = single.clamp(-largest, largest).view(torch.int32) + (noise * (1 << _NOISE_BITS)).int()
        found = (bits & -(1 << _NOISE_BITS)).view(torch.float32)
        its_out.copy_(torch.where(single.isfinite(), found, single))
    return [out]


_BFLOAT16 = Format(
    "bfloat16",
    (Plane(torch.bfloat16),),
    lambda values: [values],
    lambda planes: planes[0],
    stochastic_encode=_round_to_bfloat16,
    made_by=made_by_import("_BFLOAT16", __name__),
)
LeafRun = tuple[int, int, str, int]
"""Values ``[start, stop)`` of a buffer: start, stop, path of their leaf, and index of the first value in the leaf."""


def make_noise_fn(kind: str, step: int, encoding_index: int, runs: Iterable[LeafRun]) -> NoiseFn:
    """Return a function that makes the random numbers for a buffer's values. See [Note: random numbers].

    ``kind``: what the values are, such as ``"gradient"``. ``encoding_index`` counts the earlier encodings
    of these values in the step. ``runs`` are the runs of leaves in the buffer; padding gets the number 0.5.
    """
    held = list(runs)

    def noise(seed: int, count: int, device: torch.device) -> torch.Tensor:
        out = torch.full((count,), 0.5, dtype=torch.float32, device=device)
        for start, stop, path, first in held:
            digest = hashlib.sha256(f"{seed}:{kind}:{step}:{encoding_index}:{path}".encode()).digest()
            key = int.from_bytes(digest[:8], "little", signed=True)
            piece = _VALUES_AT_ONCE if device.type == "cpu" else num_blocks_at_once(out) * BLOCK
            for i in range(start, stop, piece):
                _fill_with_noise(out[i : min(i + piece, stop)], key, first + i - start)
        return out

    return noise


def _fill_with_noise(out: torch.Tensor, key: int, first: int) -> None:
    """Fill ``out`` with the random numbers of SplitMix64 (Steele et al., 2014) for ``key``, from number ``first`` on."""
    state = torch.arange(first + 1, first + 1 + len(out), dtype=torch.int64, device=out.device)
    state.mul_(_as_signed_int64(0x9E3779B97F4A7C15)).add_(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state.bitwise_xor_(_logical_shift_right(state, shift)).mul_(_as_signed_int64(factor))
    state.bitwise_xor_(_logical_shift_right(state, 31))
    out.copy_(_logical_shift_right(state, 64 - _NOISE_BITS)).add_(0.5).mul_(2.0**-_NOISE_BITS)


def _logical_shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Return int64 ``x`` shifted right by ``by`` bits, with zeros as new bits also for negative numbers."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _as_signed_int64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
