"""What ranks compare before they start: a layout as a few named texts."""

from collections.abc import Callable, Sequence

from fsharp.functional.layout.precision import Dtypes, dtype_name
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout


def describe_units(units: Sequence[UnitLayout]) -> dict[str, str]:
    """Field name to text, one line for each leaf or unit, so that a message can show the lines that differ."""

    def leaves(show: Callable[[UnitLayout, Leaf], object]) -> str:
        return "\n".join(f"{unit.full_path(leaf)}: {show(unit, leaf)}" for unit in units for leaf in unit.leaves)

    def groups(show: Callable[[UnitLayout], object]) -> str:
        return "\n".join(f"{unit.name or '(root)'}: {show(unit)}" for unit in units)

    return {
        "mesh": str(units[0].mesh) if units else "",
        "units": "\n".join(unit.name for unit in units),
        "strategy": groups(lambda u: u.strategy),
        "shapes": leaves(lambda _, leaf: list(leaf.shape)),
        "dtypes": leaves(lambda _, leaf: dtype_name(leaf.dtype)),
        "atoms": leaves(lambda _, leaf: leaf.atom),
        "frozen": leaves(lambda u, leaf: leaf.group >= 0 and not u.groups[leaf.group].trainable),
        "labels": leaves(lambda u, leaf: u.groups[leaf.group].label if leaf.group >= 0 else "tied"),
        "ties": leaves(lambda _, leaf: leaf.tied_to),
        "precision": leaves(lambda u, leaf: _four(u.groups[leaf.group].dtypes) if leaf.group >= 0 else "tied"),
        "containers": groups(lambda u: u.spec),
    }


def _four(dtypes: Dtypes) -> str:
    return "/".join(map(dtype_name, (dtypes.compute, dtypes.main, dtypes.wire, dtypes.accumulate)))
