"""Links: numbers for each collective and mesh axis, such as bandwidths."""

from collections.abc import Mapping

from fsharp.errors import ScheduleError, problem

Link = tuple[str, str]
"""A collective and the mesh axis that it goes along, such as ``("all_gather", "dp")``."""
PerLink = float | Mapping[str | Link, float]
"""One number; or one for each mesh axis, such as ``{"dp": x}``; or one for a collective along it, such as
``{("reduce_scatter", "dp"): x}``, which takes precedence over the axis. An ``all_reduce`` without a number is a
``reduce_scatter`` and an ``all_gather`` of half of its bytes each, so a fit to ZeRO-3 predicts DDP. An ``all_to_all`` without
a number is a ``reduce_scatter``."""


def scaled_by_link(value: PerLink, rate: float) -> PerLink:
    """Return ``value``, one number or a table, with each number multiplied by ``rate``."""
    return {link: rate * each for link, each in value.items()} if isinstance(value, Mapping) else rate * value


def value_of_link(value: PerLink, link: Link, name: str) -> float:
    """Return the number of a link in ``value``, a table called ``name``; ScheduleError if the link's axis has none."""
    if not isinstance(value, Mapping):
        return value
    if link in value:
        return value[link]
    axis = link[1]
    if axis not in value:
        facts = [("given for", ", ".join(map(str, value)) or "no axis"), ("wanted by", link[0])]
        what, remedy = f"the hardware has no {name} for axis {axis!r}.", f"Add it, or pass one {name} for all axes."
        raise ScheduleError(problem("predict()", what, facts, remedy))
    return value[axis]
