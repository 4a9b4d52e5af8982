"""Parts of a layout: placements, axis rules, atoms, units and groups; functions that map over the units of a tree."""

from fsharp.functional.layout.packing import (
    ElementAtom as ElementAtom,
    LeafAtom as LeafAtom,
    RowsAtom as RowsAtom,
)
from fsharp.functional.layout.placement import (
    AxisRule as AxisRule,
    MeshPlacement as MeshPlacement,
    Partial as Partial,
    Placement as Placement,
    Replicate as Replicate,
    Shard as Shard,
    Varying as Varying,
)
from fsharp.functional.layout.precision import Dtypes as Dtypes
from fsharp.functional.layout.sharded import map_units as map_units, merge as merge, units_of as units_of
from fsharp.functional.layout.unit_layout import Group as Group, Leaf as Leaf, Span as Span, UnitLayout as UnitLayout
