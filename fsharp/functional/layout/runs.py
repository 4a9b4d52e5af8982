"""Runs of elements in a group's buffer: which of them are padding, and which belong to which leaf."""

from collections.abc import Iterator

from fsharp.functional.layout.unit_layout import UnitLayout


def padding_in_run(unit: UnitLayout, group: int, start: int, size: int) -> list[slice]:
    """Return the padding in a run of a group's buffer, as slices of the run.

    Callers set decoded padding to zero: a format that mixes the values of a block, such as
    :func:`~fsharp.formats.hadamard`, decodes zeros of padding as other numbers.
    """
    found, end = [], 0
    for leaf in unit.leaves_of_group(group):
        begin = min(leaf.offset - start, size)
        if begin > end:
            found.append(slice(end, begin))
        end = max(end, leaf.offset + leaf.numel - start)
    return [*found, slice(end, size)] if end < size else found


def leaf_spans_in_run(unit: UnitLayout, group: int, start: int, size: int, rank: int) -> Iterator[tuple[int, int, str, int]]:
    """Yield ``(begin, end, path, first)`` for each leaf in a run of a group's buffer.

    The leaf's elements are ``begin`` to ``end`` of the run. ``first`` is the index of element ``begin`` in the whole leaf. If
    the unit varies along axes, a checkpoint holds the leaves of all ranks one after another, as one tensor. ``first`` is then
    the index in that tensor.
    """
    before = unit.mesh.index_along(unit.varying_axes, rank)
    for leaf, begin, end, first, _ in unit.spans_in_run(group, start, size):
        yield begin, end, unit.path_in_tree(leaf), before * leaf.numel + first
