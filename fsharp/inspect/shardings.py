"""sharding: which rank holds which elements of each leaf, as text and picture, like JAX's NamedSharding. Needs shapes alone."""

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from os import PathLike

import torch

from fsharp.errors import LayoutError, OptionError, problem
from fsharp.functional.formats.format import tensor_text
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.placement import MeshPlacement, P, Partial
from fsharp.functional.layout.sharded import PlaceName, resolve_place
from fsharp.functional.layout.text import align_columns, runs_of_alike_units
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.inspect.drawing import check_picture
from fsharp.inspect.files import write_figure
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked, options_checked_on_failure

_MAX_COLUMNS = 100
_MAX_CELLS = 16
_MAX_ROWS, _MAX_BOXES = 40, 8
"""Rows of the text of a tree, and boxes of the text of a leaf."""
_WIDTH_IN, _ROW_IN, _DPI = 13.0, 0.3, 150
_MAX_RANKS = 64
_MAX_NAMES = 18
_GROUP_GAP = 0.02
"""Gap between the buffers of two groups, as a fraction of the whole width."""
_INK, _PADDING = "#222222", "#dddddd"
_PALE = 0.35
"""Opacity of partial gradients."""


@dataclass(frozen=True, repr=False)
class LeafSharding:
    """Which rank holds which elements of one leaf; ``print`` shows a drawing.

    Attributes:
        path: path of the leaf in the tree.
        unit: the unit that stores the leaf; for a tied leaf the unit of the leaf to which it is tied.
        leaf: the leaf that is stored.
        place: a placement for each mesh axis.
    """

    path: str
    unit: UnitLayout
    leaf: Leaf
    place: MeshPlacement

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout."""
        return self.unit.mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole leaf."""
        return self.leaf.shape

    @property
    def spec(self) -> P | None:
        """``P(axes)`` if each rank holds an equal block of rows, in order; ``P()`` if each rank holds the leaf; else None."""
        if self.leaf.numel == 0 or self._partial_or_varying_words or not self.place.sharded_axes or not self.shape:
            return P() if self.is_fully_replicated else None
        parts, numel, offset = self._num_parts, self.leaf.numel, self.leaf.offset
        # The first part ends after one block, and so does every other one if parts are as long as blocks.
        shift = self._buffer_size - numel // parts
        in_blocks = parts == 1 or (shift == offset and (parts == 2 or offset == 0))
        return P(self.place.sharded_axes) if self.shape[0] % parts == 0 and in_blocks else None

    @property
    def shard_shape(self) -> tuple[int, ...] | None:
        """Shape of one rank's block of rows; None if :attr:`spec` is None."""
        if self.spec is None:
            return None
        return (self.shape[0] // self._num_parts, *self.shape[1:]) if self.spec.axes else self.shape

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each rank holds the whole leaf, with equal values."""
        return self.leaf.numel == 0 or (self._num_parts == 1 and not self._partial_or_varying_words)

    @api_boundary
    def elements(self, rank: int) -> tuple[int, int]:
        """Return ``(start, stop)``: ``rank`` holds ``leaf.flatten()[start:stop]``; ``(0, 0)`` if it holds no element.

        In every layout the elements of a leaf on one rank are a single run of the flattened leaf.

        Raises:
            MeshError: the mesh has no rank with this number.
        """
        return self.unit.leaf_range_on_rank(self.leaf, self.place, rank)

    @property
    def _partial_or_varying_words(self) -> dict[str, str]:
        """The axes along which ranks have different values; for each axis a word for these values, such as "summands"."""
        found = dict.fromkeys(self.place.partial_axes, "summands") | dict.fromkeys(self.place.varying_axes, "own values")
        return {axis: what for axis, what in found.items() if self.mesh.axis_size(axis) > 1}

    @property
    def _num_parts(self) -> int:
        return math.prod(self.mesh.axis_size(axis) for axis in self.place.sharded_axes)

    @property
    def _buffer_size(self) -> int:
        return self.unit.local_size(self.leaf.group, self.place)

    @property
    def _leaf_parts(self) -> range:
        """Indices of the parts of the buffer that contain elements of the leaf. A part is what one rank holds."""
        if self.leaf.numel == 0:
            return range(0)
        return range(self.leaf.offset // self._buffer_size, (self.leaf.offset + self.leaf.numel - 1) // self._buffer_size + 1)

    @property
    def mask_of_holding_ranks(self) -> torch.Tensor:
        """For each rank, whether the rank holds elements of the leaf: bool[ranks]."""
        part = _part_index_by_rank(self.mesh, self.place)
        return (part >= self._leaf_parts.start) & (part < self._leaf_parts.stop)

    def _elements_in_part(self, part: int) -> tuple[int, int]:
        start = part * self._buffer_size - self.leaf.offset
        return max(0, start), min(self.leaf.numel, start + self._buffer_size)

    def _rows_text(self, part: int) -> str:
        first, last = self._elements_in_part(part)
        if not self.shape:
            return "all"
        row = self.leaf.numel // self.shape[0]
        is_rows = first % row == 0 and last % row == 0
        return f"rows {first // row:,}:{last // row:,}" if is_rows else f"elements {first:,}:{last:,}"

    @property
    def shard_size_text(self) -> str:
        """The size of a rank's shard, as text: the shape of a block of rows; else the least and most elements of a rank."""
        if self.shard_shape is not None:
            return str(list(self.shard_shape))
        sizes = [last - first for first, last in map(self._elements_in_part, {*self._leaf_parts[:2], *self._leaf_parts[-1:]})]
        least = min(sizes) if len(self._leaf_parts) == self._num_parts else 0
        return f"{least:,} to {max(sizes):,} elements" if least < max(sizes) else f"{least:,} elements"

    def _notes(self) -> Iterator[str]:
        if self.path != self.unit.path_in_tree(self.leaf):
            yield f"tied to {self.unit.path_in_tree(self.leaf)!r}, where it is stored"
        for axis, what in self._partial_or_varying_words.items():
            yield f"each rank along {axis} has {'a summand' if what == 'summands' else 'values of its own'}"
        if self.leaf.numel == 0:
            yield "it has no elements"
        elif not self.mask_of_holding_ranks.all():
            yield f"nothing of it on {_ranks_text(~self.mask_of_holding_ranks)}"

    def __str__(self) -> str:
        parts = _part_index_by_rank(self.mesh, self.place)
        half, left_out = _MAX_BOXES // 2, len(self._leaf_parts) - _MAX_BOXES
        shown = [*self._leaf_parts[:half], *self._leaf_parts[-half:]] if left_out > 0 else self._leaf_parts
        rows = [(self._rows_text(part), _ranks_text(parts == part)) for part in shown]
        if left_out > 0:
            rows.insert(half, ("⋮", f"{left_out:,} more"))
        lines = [f"{self._title}, spec {self.spec}", f"{self.place} of {self.mesh}"]
        if rows:
            left, width = (max(map(len, column)) for column in zip(*rows, strict=True))
            indent, rule = " " * (left + 1), "─" * (max(width, 18) + 2)
            boxes = [f"{where:>{left}} │{ranks:^{len(rule)}}│" for where, ranks in rows]
            lines += [f"{indent}┌{rule}┐", f"\n{indent}├{rule}┤\n".join(boxes), f"{indent}└{rule}┘"]
        return "\n".join([*lines, *self._notes()])

    def __repr__(self) -> str:
        return f"LeafSharding({self._title}, spec {self.spec}, {self.place} of {self.mesh})"

    @property
    def _title(self) -> str:
        return f"{self.path or '(whole tree)'}: {tensor_text(self.leaf)}"


@dataclass(frozen=True, repr=False)
class TreeSharding:
    """Which rank holds which elements of each leaf: ``[path]`` returns a :class:`LeafSharding`, ``print`` shows a table.

    Attributes:
        layout: layout of the tree.
        place: what is shown: ``"params"``, ``"grads"``, ``"optim"``, ``"full"``, or a :class:`~fsharp.layouts.MeshPlacement`.
    """

    layout: Layout
    place: PlaceName
    leaves: Mapping[str, LeafSharding] = field(init=False, compare=False)
    """Shardings of the leaves by path, in tree order."""

    def __post_init__(self) -> None:
        stored = {(unit.name, leaf.path): (unit, leaf) for unit in self.layout.units for leaf in unit.leaves}
        places = {unit.name: resolve_place(unit, self.place) for unit in self.layout.units}
        leaves = {}
        for (name, path), (unit, leaf) in stored.items():
            owner, value = stored[leaf.tied_to or (name, path)]
            full_path = unit.path_in_tree(leaf)
            leaves[full_path] = LeafSharding(full_path, owner, value, places[owner.name])
        object.__setattr__(self, "leaves", leaves)

    def __getitem__(self, path: str) -> LeafSharding:
        if path not in self.leaves:
            near = difflib.get_close_matches(str(path), self.leaves, n=4, cutoff=0.3) or list(self.leaves)[:4]
            raise LayoutError(problem("sharding()", f"no leaf {path!r}.", [("closest", ", ".join(near))]))
        return self.leaves[path]

    def __str__(self) -> str:
        size = self.layout.mesh.size
        cells = min(size, _MAX_CELLS)
        named = list(self._unit_and_leaf_rows())
        rows = [(f"{'leaf':12}", "shape", "spec", "on a rank", f"ranks 0 to {size - 1:,}" if size > 1 else "rank 0")]
        for name, leaf in named[:_MAX_ROWS]:
            if leaf is None:
                rows.append((name, "", "", "", ""))
            else:
                spec = str(leaf.spec) if leaf.spec is not None else next(iter(leaf._partial_or_varying_words.values()), "None")
                holds = leaf.mask_of_holding_ranks.tensor_split(cells)
                shown = "".join("█" if cell.any() else "·" for cell in holds)
                rows.append((name, tensor_text(leaf.leaf), spec, leaf.shard_size_text, shown))
        room = _MAX_COLUMNS - sum(2 + max(map(len, column)) for column in [*zip(*rows, strict=True)][1:])
        left_out = sum(leaf is not None for _, leaf in named[_MAX_ROWS:])
        per_cell = f"{size // cells:,} or {size // cells + 1:,}" if size % cells else f"{size // cells:,}"
        return "\n".join(
            [
                f"Sharding of {self.place} on {self.layout.mesh}",
                *align_columns([(_truncate_middle(row[0], max(room, 12)), *row[1:]) for row in rows], lines_above={1}),
                *([f"and {left_out:,} rows more; sharding(layout)[path] is one leaf"] if left_out else []),
                f"a cell is {per_cell} rank{'s' * (size > cells)}: █ with some of the leaf, · with nothing of it",
            ]
        )

    def _unit_and_leaf_rows(self) -> Iterator[tuple[str, LeafSharding | None]]:
        """Yield rows of the table: titles of units with several leaves, and leaves. Consecutive equal units are shown once."""
        for title, alike in runs_of_alike_units(self.layout.units):
            unit = alike[0]
            if len(unit.leaves) > 1 or unit.leaves[0].path:
                yield title, None
            for leaf in unit.leaves:
                name = f"  {leaf.path}" if leaf.path else title
                yield name + " (tied)" * (leaf.tied_to is not None), self[unit.path_in_tree(leaf)]

    __repr__ = __str__


@options_checked_on_failure
def sharding(layout: Layout, place: PlaceName = "params") -> TreeSharding:
    """Return which rank holds which elements of each leaf, from the layout alone: neither ranks nor tensors need to exist.

    >>> import torch, fsharp as fs
    >>> shapes = {"embed": torch.empty(8, 4), "layers": [{"w": torch.empty(4, 4), "b": torch.empty(4)} for _ in range(2)]}
    >>> layout = fs.plan(shapes, fs.Mesh({"dp": 4}), fs.P("dp"), units="layers.*")
    >>> where = fs.inspect.sharding(layout)
    >>> where["embed"].spec, where["embed"].shard_shape
    (P('dp'), (2, 4))
    >>> where["layers.0.w"].spec, [where["layers.0.w"].elements(rank) for rank in range(4)]
    (None, [(0, 8), (8, 16), (0, 0), (0, 0)])

    The leaves of a unit share one flat buffer, which ranks cut into equal parts of whole rows. Here a part has 8 elements:
    ranks 0 and 1 hold two rows of ``w`` each, rank 2 holds ``b``, and rank 3 holds padding.

    Args:
        layout: a layout from :func:`~fsharp.plan`.
        place: ``"params"``, ``"grads"``, ``"optim"``, ``"full"``, or a :class:`~fsharp.layouts.MeshPlacement`. Frozen leaves
            are listed as if they had gradients and optimizer state.

    Returns:
        A :class:`TreeSharding`: ``[path]`` returns the :class:`LeafSharding` of a leaf, ``print`` shows a table of at most 100
        columns. The ``spec`` of a leaf is None if ranks hold runs of elements that no ``P(...)`` describes.

    Raises:
        OptionError: ``layout`` is not a Layout.
        LayoutError: the place is unknown. ``[path]`` raises a LayoutError without such a leaf.

    Cost: time grows with the number of leaves; for texts also with the number of ranks.
    """
    return TreeSharding(layout, place)


@lru_cache(maxsize=64)
def _part_index_by_rank(mesh: Mesh, place: MeshPlacement) -> torch.Tensor:
    """Return, as int64[ranks], the index of the part of a buffer that each rank holds."""
    return torch.tensor([mesh.index_along(place.sharded_axes, rank) for rank in range(mesh.size)])


def _ranks_text(chosen: torch.Tensor) -> str:
    """Return the ranks for which ``chosen``, bool[ranks], is True, as text.

    Such a text is ``rank 3``, ``ranks 0 to 2, 5``, or for more than four runs of ranks ``ranks 0, 4, ..., 60 (16 in all)``.
    """
    ranks = chosen.nonzero().flatten().tolist()
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0]:,} to {run[-1]:,}" if len(run) > 2 else ", ".join(f"{rank:,}" for rank in run) for run in runs]
    if len(texts) > 4:
        texts = [*texts[:2], "...", f"{texts[-1]} ({len(ranks):,} in all)"]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def _truncate_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return f"{text[: width // 2]}…{text[len(text) - (width - width // 2 - 1) :]}"


@options_checked
def draw_sharding(layout: Layout, path: str | PathLike[str], *, unit: str | None = None) -> None:
    """Draw the flat buffers of a unit at rest: parameters, gradients and optimizer state, in a row for each rank.

    A row is as long as the whole buffers; what the rank does not hold is left empty. Each leaf has a colour; the legend names
    the first 18 leaves. Grey is padding. Gradients are pale if they are partial: each rank holds a summand of every element.
    The drawing needs the layout alone, so ranks need not exist.

    Args:
        layout: a layout from :func:`~fsharp.plan`.
        path: path of the picture; the suffix chooses the format, such as ``.png`` or ``.svg``.
        unit: name of the unit; None means the unit with most parameters.

    Raises:
        LayoutError: the layout has no unit of this name.
        OptionError: the layout has no units, the unit has no parameters, or the mesh has more than 64 ranks.
        OptionError: matplotlib is missing, or does not know the suffix of ``path``.
    """
    check_picture("draw_sharding()", path)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter

    size = layout.mesh.size
    if size > _MAX_RANKS:
        raise OptionError(f"draw_sharding(): {size} ranks, expected at most {_MAX_RANKS}. Plan for fewer ranks.")
    if not layout.units:
        raise OptionError("draw_sharding(): the layout has no units.")
    chosen = max(layout.units, key=_padded_numel) if unit is None else layout[unit]
    if not _padded_numel(chosen):
        raise OptionError(f"draw_sharding(): unit {chosen.name!r} has no parameters.")
    figure = Figure(figsize=(_WIDTH_IN, 1.7 + _ROW_IN * size), dpi=_DPI, layout="constrained")
    figure.suptitle(f"{chosen.name or '(root)'} on {layout.mesh}", fontsize=11, color=_INK)
    strategy = chosen.strategy
    places = {"parameters": strategy.params, "gradients": strategy.grads, "optimizer state": strategy.optim}
    all_axes = figure.subplots(1, len(places), sharey=True)
    for axes, (title, place) in zip(all_axes, places.items(), strict=True):
        _draw_place(axes, chosen, place, is_trained=title != "parameters")
        placements = ", ".join(f"{axis} {place[axis].name.lower()}" for axis in place.axis_order)
        axes.set_title(f"{title}: {placements}", fontsize=9, color=_INK)
        axes.set_yticks(range(size), [f"rank {rank}" for rank in range(size)], fontsize=8)
        axes.set_xlim(0, _padded_numel(chosen) * (1 + _GROUP_GAP * (len(chosen.groups) - 1)))
        axes.set_xlabel("elements of the flat buffers", fontsize=8)
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylim(size - 0.5, -0.5)
    handles, names = (each[:_MAX_NAMES] for each in all_axes[0].get_legend_handles_labels())
    if any(group.size > group.used for group in chosen.groups):
        handles, names = [*handles, Patch(color=_PADDING)], [*names, "padding"]
    if any(place[axis] is Partial for place in places.values() for axis in place.axis_order):
        handles, names = [*handles, Patch(color=_INK, alpha=_PALE)], [*names, "pale: a summand on each rank"]
    figure.legend(handles, names, loc="outside lower center", ncols=min(6, len(names)), fontsize=8, frameon=False)
    write_figure(figure, path)


def _padded_numel(unit: UnitLayout) -> int:
    return sum(group.size for group in unit.groups)


def _draw_place(axes, unit: UnitLayout, place: MeshPlacement, *, is_trained: bool) -> None:  # type: ignore[no-untyped-def]
    from matplotlib import colormaps

    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    numbers = {leaf.path: i for i, leaf in enumerate(unit.leaves)}
    alpha = _PALE if any(place[axis] is Partial for axis in place.axis_order) else 1.0
    named: set[str] = set()
    x = 0.0
    for i, group in enumerate(unit.groups):
        for rank in range(unit.mesh.size):
            if is_trained and not group.trainable:
                continue
            start = x + unit.local_start(i, place, rank)
            axes.barh(rank, unit.local_size(i, place), left=start, height=0.7, color=_PADDING, alpha=alpha)
            for span in unit.leaf_spans(i, place, rank):
                path = span.leaf.path or unit.name or "(root)"
                label = None if path in named else path
                named.add(path)
                colour = colours[numbers[span.leaf.path] % len(colours)]
                width = span.stop - span.start
                axes.barh(rank, width, left=start + span.start, height=0.7, color=[colour], alpha=alpha, label=label)
        x += group.size + _GROUP_GAP * _padded_numel(unit)
