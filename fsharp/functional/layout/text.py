"""Units as text: for ranks to compare before they start, and as a table for people."""

import html
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.unit_layout import Group, Leaf, UnitLayout


def unit_texts_by_property(units: Sequence[UnitLayout]) -> dict[str, str]:
    """Return properties of units, such as shapes and atoms, as texts by name of the property, for ranks to compare.

    A text has a line for each leaf or unit. So an error can show the lines that differ between ranks.
    """

    def leaves(show: Callable[[UnitLayout, Leaf], object]) -> str:
        return "\n".join(f"{unit.path_in_tree(leaf)}: {show(unit, leaf)}" for unit in units for leaf in unit.leaves)

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
        "precision": leaves(lambda u, leaf: "/".join(u.groups[leaf.group].dtypes.to_texts(str)) if leaf.group >= 0 else "tied"),
        "containers": groups(lambda u: u.structure),
    }


def unit_table_rows(units: Sequence[UnitLayout]) -> list[tuple[str, ...]]:
    """Return head and rows of a table of units. Consecutive units that differ only in a number in their names share a row."""
    rows: list[tuple[str, ...]] = [("unit", "leaves", "buffers", "elements", "padding", "strategy P/G/O", "params/rank")]
    for name, alike in runs_of_alike_units(units):
        first, groups = alike[0], [group for unit in alike for group in unit.groups]
        local = sum(u.stored_nbytes(i, u.strategy.params) for u in alike for i in u.all_groups)
        used, padding = sum(g.used for g in groups), sum(g.size - g.used for g in groups)
        buffers = ", ".join(map(_group_text, first.groups))
        numbers = f"{used:,}", f"{padding:,}", str(first.strategy), nbytes_text(local)
        rows.append((name, str(len(first.leaves)), buffers, *numbers))
    return rows


def _group_text(group: Group) -> str:
    dtypes = group.dtypes
    updates = "" if dtypes.update is None else f", updates {dtypes.update.name}"
    main = f" (main {dtype_name(dtypes.main)}{updates})" if dtypes.has_main_copy and group.trainable else ""
    label = f" {group.label}" if group.label != "default" else ""
    return f"{dtypes.stored_format.name}{main}{'' if group.trainable else ' frozen'}{label}"


NOTEBOOK_HTML_BY_CLASS: dict[type, Callable[[Any], str]] = {}
"""By class, a function that returns the HTML of an object for notebooks. For classes that cannot import the drawing code."""


def align_columns(rows: Sequence[Sequence[str]], right: Collection[int] = (), lines_above: Collection[int] = ()) -> list[str]:
    """Return lines of text with aligned columns. Columns with an index in ``right`` are aligned to the right.

    Above each row with an index in ``lines_above`` there is one more line, of dashes.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ways = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    lines = ["  ".join(way(cell, w) for way, cell, w in zip(ways, row, widths, strict=True)).rstrip() for row in rows]
    dashes = "-" * max(map(len, lines), default=0)
    return [each for i, line in enumerate(lines) for each in ((dashes, line) if i in lines_above else (line,))]


def table_html(title: str, rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return rows of cells as a table in HTML, for notebooks; the first row is the head.

    >>> table_html("a", [("x",), ("<b>",)])
    '<table><caption>a</caption><tr><th>x</th></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """

    def line(tag: str, row: Sequence[str], right: Collection[int]) -> str:
        style = ' style="text-align:right"'
        return "".join(f"<{tag}{style if i in right else ''}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(row))

    lines = [line("th", rows[0], ()), *(line("td", row, right) for row in rows[1:])]
    return f"<table><caption>{html.escape(title)}</caption>{''.join(f'<tr>{each}</tr>' for each in lines)}</table>"


def runs_of_alike_units(units: Sequence[UnitLayout]) -> Iterator[tuple[str, list[UnitLayout]]]:
    """Yield runs of consecutive units that differ only in a number in their names. A run has a name: ``layers.* x12``."""
    for (pattern, *_), run in groupby(units, lambda u: (re.sub(r"\d+", "*", u.name), u.leaves, u.groups, u.strategy)):
        alike = list(run)
        yield f"{pattern} x{len(alike)}" if len(alike) > 1 else alike[0].name or "(whole tree)", alike


def nbytes_text(count: float) -> str:
    """Return bytes as text: ``1.50 MiB`` for 1,572,864."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """Return a time as text for people.

    >>> seconds_text(0.0015)
    '1.50 ms'
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds / 1e-9:.0f} ns" if seconds else "0 s"
