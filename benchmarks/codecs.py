"""Formats in which parameters and gradients travel, and the strategy of each: the rows of ``make bench-wire``."""

from typing import Any

import torch

import fsharp as fs
from benchmarks.training import Codec


def _of(
    strategy: str, parameters: Any, gradients: Any, updates: fs.formats.Format | None = None, *, feedback: bool = False
) -> Codec:
    """Everything but float32 computes in bfloat16, in which decoded integers of 8 bits are exact."""
    stored = parameters if isinstance(parameters, fs.formats.Format) else None
    compute = torch.float32 if parameters is torch.float32 else torch.bfloat16
    travels: Any = {"stored": stored, "update": updates, "wire": gradients, "feedback": feedback}
    return Codec(strategy, fs.Precision(compute=compute, main=torch.float32, **travels))


BF16, FP8, INT8, INT4 = torch.bfloat16, fs.formats.mxfp8, fs.formats.mxint8, fs.formats.mxint4
CODECS = {
    "float32, zero3": _of("zero3", torch.float32, torch.float32),
    "bfloat16, zero3": _of("zero3", BF16, BF16),
    "mxfp8, gradients bfloat16, zero3": _of("zero3", FP8, BF16),
    "nvfp4, gradients bfloat16, zero3": _of("zero3", fs.formats.nvfp4, BF16),
    "float8_e4m3_by_tensor, gradients bfloat16, zero3": _of("zero3", fs.formats.float8_e4m3_by_tensor, BF16),
    "float8_e5m2_by_tensor, gradients bfloat16, zero3": _of("zero3", fs.formats.float8_e5m2_by_tensor, BF16),
    "int8_by_row, gradients bfloat16, zero3": _of("zero3", fs.formats.int8_by_row, BF16),
    "mxfp8, gradients mxfp8_e5m2, zero3": _of("zero3", FP8, fs.formats.mxfp8_e5m2),
    "mxint8, zero3": _of("zero3", INT8, INT8),
    "mxint8, gradients mxfp4, zero3": _of("zero3", INT8, fs.formats.mxfp4),
    "mxint8, gradients mxint4, zero3": _of("zero3", INT8, INT4),
    "mxint8, gradients mxint4 rotated, zero3": _of("zero3", INT8, fs.formats.hadamard(INT4)),
    "mxint8, gradients mxint4 with feedback, zero3": _of("zero3", INT8, INT4, feedback=True),
    "mxint8, gradients mxint4 stochastic, zero3": _of("zero3", INT8, fs.formats.stochastic(INT4)),
    "mxint4, zero3": _of("zero3", INT4, INT4),
    "bfloat16, zero2": _of("zero2", BF16, BF16),
    "mxint8, zero2": _of("zero2", INT8, INT8),
    "mxint8, gradients mxint4, zero2": _of("zero2", INT8, INT4),
    "updates mxint8, gradients mxint4, zero2": _of("zero2", BF16, INT4, updates=INT8),
    "updates and gradients mxint4, zero2": _of("zero2", BF16, INT4, updates=INT4),
}
EXACT = "float32, zero3"
"""Whose loss is the measure."""
FSDP2 = "FSDP2, bfloat16"
"""Whose bytes and steps are."""
