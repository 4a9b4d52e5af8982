"""A layout as a table that a person reads."""

import re
from itertools import groupby

from fsharp.functional.layout import Layout, UnitLayout
from fsharp.functional.precision import dtype_name


def layout_table(layout: Layout) -> str:
    """One row for each kind of unit: runs of units that differ in nothing but a number in their name share a row."""
    rows = [("unit", "leaves", "buffers", "elements", "padding", "strategy P/G/O", "params/rank")]
    for (name, *_), run in groupby(layout.units, key=_kind):
        units = list(run)
        first = units[0]
        buffers = ", ".join(
            dtype_name(g.dtypes.compute)
            + (f" (main {dtype_name(g.dtypes.main)})" if g.dtypes.has_main_copy and g.trainable else "")
            + (" frozen" if not g.trainable else "")
            + (f" {g.label}" if g.label != "default" else "")
            for g in first.groups
        )
        local = sum(
            u.local_size(i, u.strategy.params) * g.dtypes.compute.itemsize for u in units for i, g in enumerate(u.groups)
        )
        rows.append(
            (
                f"{name} x{len(units)}" if len(units) > 1 else first.name or "(whole tree)",
                str(len(first.leaves)),
                buffers,
                f"{sum(g.used for u in units for g in u.groups):,}",
                f"{sum(g.size - g.used for u in units for g in u.groups):,}",
                str(first.strategy),
                nbytes_text(local),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    waste = 100 * layout.num_padding / max(1, layout.num_params + layout.num_padding)
    return "\n".join(
        [
            f"Layout of {layout.num_params:,} parameters on {layout.mesh}",
            lines[0],
            "-" * max(map(len, lines)),
            *lines[1:],
            f"padding {layout.num_padding:,} elements ({waste:.3g} %)",
            "at rest on each rank: "
            + ", ".join(f"{kind} {nbytes_text(layout.nbytes(kind))}" for kind in ("params", "grads", "main"))
            + f", each optimizer buffer {nbytes_text(layout.nbytes('optim'))};"
            + f" unsharded params {nbytes_text(layout.nbytes_unsharded)}",
        ]
    )


def _kind(unit: UnitLayout) -> tuple[object, ...]:
    shapes = tuple((leaf.path, leaf.shape, leaf.dtype, leaf.atom) for leaf in unit.leaves)
    return re.sub(r"\d+", "*", unit.name), shapes, unit.groups, unit.strategy


def nbytes_text(count: float) -> str:
    """``1.50 MiB`` for 1,572,864."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError
