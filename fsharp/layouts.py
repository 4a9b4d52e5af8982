"""Parts of a layout: placements, axis rules, atoms, units and groups; functions that map over the units of a tree."""

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
from fsharp.functional.layout.sharded import map_units as map_units
from fsharp.functional.layout.sharded import merge as merge
from fsharp.functional.layout.sharded import units_of as units_of
from fsharp.functional.layout.unit_layout import Group as Group
from fsharp.functional.layout.unit_layout import Leaf as Leaf
from fsharp.functional.layout.unit_layout import Span as Span
from fsharp.functional.layout.unit_layout import UnitLayout as UnitLayout
