"""draw_sharding: which rank holds what of a unit, as a picture. Needs matplotlib, which the ``train`` extra brings."""

from os import PathLike

from fsharp.annotated import options_checked
from fsharp.errors import LayoutError
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.placement import Partial, Place
from fsharp.functional.layout.unit_layout import UnitLayout

_WIDTH_IN, _ROW_IN, _DPI = 13.0, 0.3, 150
_MAX_RANKS = 64
_MAX_NAMES = 18
_GAP = 0.02
"""Between the buffers of two groups, of the width of all."""
_INK, _PADDING = "#222222", "#dddddd"


@options_checked
def draw_sharding(layout: Layout, path: str | PathLike[str], *, unit: str | None = None) -> None:
    """Draw the flat buffers of a unit, a row for each rank: its parameters, gradients and optimizer state as they rest.

    A colour is a leaf, of which the first 18 are named; grey is padding, and what is empty another rank holds. Gradients
    that rest partial, each rank's own summand of all of it, are pale. From shapes alone: a layout for ranks that do not
    exist can be drawn.

    Args:
        layout: made by :func:`~fsharp.plan`.
        path: the picture; its suffix says the format, such as ``.png`` or ``.svg``.
        unit: name of the unit; None means the one with most parameters.

    Raises:
        LayoutError: no such unit, more than 64 ranks, a unit without parameters, or matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LayoutError("draw_sharding(): matplotlib is missing: pip install 'fsharp[train]', or it alone.") from error
    chosen = max(layout.units, key=_size) if unit is None else layout[unit]
    size = layout.mesh.size
    if size > _MAX_RANKS:
        raise LayoutError(f"draw_sharding(): {size} ranks, expected at most {_MAX_RANKS}. Plan for fewer: pictures are alike.")
    if not _size(chosen):
        raise LayoutError(f"draw_sharding(): unit {chosen.name!r} has no parameters.")
    figure = Figure(figsize=(_WIDTH_IN, 1.7 + _ROW_IN * size), dpi=_DPI, layout="constrained")
    figure.suptitle(f"{chosen.name or '(root)'} on {layout.mesh}", fontsize=11, color=_INK)
    strategy = chosen.strategy
    places = {"parameters": strategy.params, "gradients": strategy.grads, "optimizer state": strategy.optim}
    all_axes = figure.subplots(1, len(places), sharey=True)
    for axes, (title, place) in zip(all_axes, places.items(), strict=True):
        _draw_place(axes, chosen, place, is_trained=title != "parameters")
        axes.set_title(f"{title}: {', '.join(f'{a} {place[a].name.lower()}' for a in place.order)}", fontsize=9, color=_INK)
        axes.set_yticks(range(size), [f"rank {rank}" for rank in range(size)], fontsize=8)
        axes.set_xlim(0, _size(chosen) * (1 + _GAP * (len(chosen.groups) - 1)))
        axes.set_xlabel("elements of the flat buffers", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].invert_yaxis()
    handles, names = (each[:_MAX_NAMES] for each in all_axes[0].get_legend_handles_labels())
    figure.legend(handles, names, loc="outside lower center", ncols=min(6, len(names)), fontsize=8, frameon=False)
    figure.savefig(path)


def _size(unit: UnitLayout) -> int:
    return sum(group.size for group in unit.groups)


def _draw_place(axes, unit: UnitLayout, place: Place, *, is_trained: bool) -> None:  # type: ignore[no-untyped-def]
    """One place of a unit, of groups that are trained alone if only those are there."""
    from matplotlib import colormaps

    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    numbers = {leaf.path: i for i, leaf in enumerate(unit.leaves)}
    alpha = 0.35 if any(place[axis] is Partial for axis in place.order) else 1.0
    named: set[str] = set()
    x = 0.0
    for i, group in enumerate(unit.groups):
        for rank in range(unit.mesh.size):
            if is_trained and not group.trainable:
                continue
            start = x + unit.local_start(i, place, rank)
            axes.barh(rank, unit.local_size(i, place), left=start, height=0.7, color=_PADDING, alpha=alpha)
            for span in unit.spans(i, place, rank):
                path = span.leaf.path or unit.name or "(root)"
                label = None if path in named else path
                named.add(path)
                colour = colours[numbers[span.leaf.path] % len(colours)]
                width = span.stop - span.start
                axes.barh(rank, width, left=start + span.start, height=0.7, color=[colour], alpha=alpha, label=label)
        x += group.size + _GAP * _size(unit)
