"""What a layout is made of: placements and rules of strategies, atoms that are never cut, units and their groups."""

from fsharp.functional.formats.by_tensor import float8_e4m3_by_tensor as float8_e4m3_by_tensor
from fsharp.functional.formats.by_tensor import float8_e5m2_by_tensor as float8_e5m2_by_tensor
from fsharp.functional.formats.by_tensor import int8_by_row as int8_by_row
from fsharp.functional.formats.format import Format as Format
from fsharp.functional.formats.format import LeafCodec as LeafCodec
from fsharp.functional.formats.format import LeafPart as LeafPart
from fsharp.functional.formats.format import Plane as Plane
from fsharp.functional.formats.format import register_format as register_format
from fsharp.functional.formats.microscaling import mxfp8 as mxfp8
from fsharp.functional.formats.microscaling import mxint4 as mxint4
from fsharp.functional.formats.microscaling import mxint8 as mxint8
from fsharp.functional.layout.packing import Element as Element
from fsharp.functional.layout.packing import Rows as Rows
from fsharp.functional.layout.packing import Whole as Whole
from fsharp.functional.layout.placement import AxisRule as AxisRule
from fsharp.functional.layout.placement import Partial as Partial
from fsharp.functional.layout.placement import Place as Place
from fsharp.functional.layout.placement import Placement as Placement
from fsharp.functional.layout.placement import Replicate as Replicate
from fsharp.functional.layout.placement import Shard as Shard
from fsharp.functional.layout.placement import Vary as Vary
from fsharp.functional.layout.precision import Dtypes as Dtypes
from fsharp.functional.layout.unit_layout import Group as Group
from fsharp.functional.layout.unit_layout import Leaf as Leaf
from fsharp.functional.layout.unit_layout import Span as Span
from fsharp.functional.layout.unit_layout import UnitLayout as UnitLayout
