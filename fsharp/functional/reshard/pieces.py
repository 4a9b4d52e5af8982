"""Pieces: runs of elements that move from a buffer of one rank to a buffer of another. Integers only.

In any layout a rank holds one run of each flattened leaf. So the elements that one rank needs from another are the intersection
of two runs. Both ranks compute these intersections, in the same order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.placement import Place
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.reshard.state_trees import StateTree


@dataclass(frozen=True)
class RankMap:
    """The old and the new mesh, and their ranks: ``old_ranks[r]`` is the Comm's rank that is rank ``r`` of the old mesh."""

    old_mesh: Mesh
    new_mesh: Mesh
    old_ranks: tuple[int, ...]
    new_ranks: tuple[int, ...]

    def is_source_for(self, source: int, target: int, place: Place) -> bool:
        """Return whether ``target``, a rank of the new mesh, takes values in ``place`` from ``source``, a rank of the old mesh.

        If several old ranks have the values, the target takes them from itself if it is one of them. Else its number chooses
        the source, so that new ranks do not all take from one rank.
        """
        mesh, rank = self.old_mesh, self.new_ranks[target]
        near = self.old_ranks.index(rank) if rank in self.old_ranks else target % mesh.size
        return all(mesh.coord(axis, source) == mesh.coord(axis, near) for axis in place.replicated_axes) and all(
            mesh.coord(axis, source) == self.new_mesh.coord(axis, target) for axis in place.varying_axes
        )


class MovedPiece(NamedTuple):
    """A run of ``numel`` elements of one leaf that moves from one buffer to another.

    ``node`` is the index of the old unit's node in the state tree. ``buffer`` and ``start`` are indices of the old buffer in
    this node, and of the first element in the buffer; ``new_buffer`` and ``new_start`` are those in the new node. ``itemsize``
    is the bytes of an element on the wire.
    """

    node: int
    buffer: int
    start: int
    new_buffer: int
    new_start: int
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes that the piece takes in a message."""
        return self.numel * self.itemsize


def pieces_between(state_tree: StateTree, unit: UnitLayout, ranks: RankMap, source: int, target: int) -> Iterator[MovedPiece]:
    """Yield the pieces of a new unit that rank ``target`` of the Comm takes from rank ``source``, or from itself."""
    if source not in ranks.old_ranks or target not in ranks.new_ranks:
        return
    source, target = ranks.old_ranks.index(source), ranks.new_ranks.index(target)  # numbers in the old and the new mesh
    serves: dict[int, bool] = {}
    for new_buffer, group in enumerate(state_tree.groups_in(unit)):
        itemsize = state_tree.dtype_in(unit, group).itemsize
        for span in unit.leaf_spans(group, state_tree.place_in(unit), target):
            old = state_tree.position_by_path[unit.path_in_tree(span.leaf)]
            node = state_tree.nodes[old.node]
            if old.node not in serves:
                serves[old.node] = ranks.is_source_for(source, target, node.place)
            if not serves[old.node]:
                continue
            old_group = node.groups[old.buffer]
            start = node.unit.local_start(old_group, node.place, source)
            stop = start + node.unit.local_size(old_group, node.place)
            low, high = max(start, old.leaf.offset + span.first), min(stop, old.leaf.offset + span.last)
            if low < high:
                new_start = span.start + low - old.leaf.offset - span.first
                yield MovedPiece(old.node, old.buffer, low - start, new_buffer, new_start, high - low, itemsize)


def cut_into_rounds(pieces: Iterable[MovedPiece], max_nbytes: int) -> list[list[MovedPiece]]:
    """Return the pieces as rounds, in order. Pieces are cut so that a round has at most ``max_nbytes`` bytes."""
    rounds: list[list[MovedPiece]] = []
    left_nbytes = 0
    for piece in pieces:
        while piece.numel:
            if left_nbytes < piece.itemsize:
                rounds.append([])
                left_nbytes = max_nbytes
            n = min(piece.numel, left_nbytes // piece.itemsize)
            rounds[-1].append(piece._replace(numel=n))
            piece = piece._replace(start=piece.start + n, new_start=piece.new_start + n, numel=piece.numel - n)
            left_nbytes -= n * piece.itemsize
    return rounds
