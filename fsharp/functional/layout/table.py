"""Units as a table that a person reads."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from fsharp.functional.layout.precision import dtype_name
from fsharp.functional.layout.unit_layout import UnitLayout


def units_table(units: Sequence[UnitLayout]) -> list[str]:
    """A head and one row for each kind of unit: runs of units that differ in nothing but a number in their name share a row."""
    rows = [("unit", "leaves", "buffers", "elements", "padding", "strategy P/G/O", "params/rank")]
    for name, alike in alike_units(units):
        first = alike[0]
        buffers = ", ".join(
            dtype_name(g.dtypes.compute)
            + (f" (main {dtype_name(g.dtypes.main)})" if g.dtypes.has_main_copy and g.trainable else "")
            + (" frozen" if not g.trainable else "")
            + (f" {g.label}" if g.label != "default" else "")
            for g in first.groups
        )
        local = sum(
            u.local_size(i, u.strategy.params) * g.dtypes.compute.itemsize for u in alike for i, g in enumerate(u.groups)
        )
        rows.append(
            (
                name,
                str(len(first.leaves)),
                buffers,
                f"{sum(g.used for u in alike for g in u.groups):,}",
                f"{sum(g.size - g.used for u in alike for g in u.groups):,}",
                str(first.strategy),
                nbytes_text(local),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def alike_units(units: Sequence[UnitLayout]) -> Iterator[tuple[str, list[UnitLayout]]]:
    """Runs of units that differ in nothing but a number in their name, and what a person calls each: ``layers.* x12``."""
    for (pattern, *_), run in groupby(units, key=_kind):
        alike = list(run)
        yield f"{pattern} x{len(alike)}" if len(alike) > 1 else alike[0].name or "(whole tree)", alike


def _kind(unit: UnitLayout) -> tuple[object, ...]:
    return re.sub(r"\d+", "*", unit.name), unit.leaves, unit.groups, unit.strategy


def nbytes_text(count: float) -> str:
    """``1.50 MiB`` for 1,572,864."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError
