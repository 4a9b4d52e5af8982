"""Formats of 8 and 4 bits, in which parameters are stored and tensors travel, and the parts of a format of your own.

- 8 bits, scales by block: mxfp8, mxfp8_e5m2, mxint8; by tensor: float8_e4m3_by_tensor, float8_e5m2_by_tensor, int8_by_tensor;
  by row: float8_e4m3_by_row, float8_e5m2_by_row, int8_by_row. 4 bits: mxfp4, mxint4, nvfp4.
- A format made from another one: stochastic, hadamard.
- For a format of your own: Format with Planes (Plane), LeafCodec with LeafPart; register_format.
"""

from fsharp.functional.formats.by_tensor import (
    float8_e4m3_by_row as float8_e4m3_by_row,
    float8_e4m3_by_tensor as float8_e4m3_by_tensor,
    float8_e5m2_by_row as float8_e5m2_by_row,
    float8_e5m2_by_tensor as float8_e5m2_by_tensor,
    int8_by_row as int8_by_row,
    int8_by_tensor as int8_by_tensor,
)
from fsharp.functional.formats.format import Format as Format, LeafCodec as LeafCodec, LeafPart as LeafPart, Plane as Plane
from fsharp.functional.formats.hadamard import hadamard as hadamard
from fsharp.functional.formats.microscaling import (
    mxfp4 as mxfp4,
    mxfp8 as mxfp8,
    mxfp8_e5m2 as mxfp8_e5m2,
    mxint4 as mxint4,
    mxint8 as mxint8,
)
from fsharp.functional.formats.nvfp4 import nvfp4 as nvfp4
from fsharp.functional.formats.registry import register_format as register_format
from fsharp.functional.formats.stochastic import stochastic as stochastic
