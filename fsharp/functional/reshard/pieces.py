"""Pieces: which elements go from which buffer of which rank to which buffer of which other one. Integers only.

What a rank holds of a leaf is one run of the flattened leaf, in any place of any layout. So what one rank needs of another
is the intersection of two runs, and both compute it, in the same order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.placement import Place
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.reshard.slots import Slot


@dataclass(frozen=True)
class Ranks:
    """Which rank of the old and of the new mesh a rank of the Comm is.

    Attributes:
        old_mesh: before.
        new_mesh: after.
        old: ranks of the Comm, by rank in the old mesh.
        new: ranks of the Comm, by rank in the new mesh.
    """

    old_mesh: Mesh
    new_mesh: Mesh
    old: tuple[int, ...]
    new: tuple[int, ...]

    def serves(self, source: int, target: int, place: Place) -> bool:
        """Whether ``target``, a rank of the new mesh, takes what rests in ``place`` from ``source``, one of the old mesh.

        Of several ranks with the same values it is the one at the target's own coordinates: so nothing travels that a rank
        has already, and newcomers spread over all copies.
        """
        mesh, rank = self.old_mesh, self.new[target]
        near = self.old.index(rank) if rank in self.old else target % mesh.size
        return all(mesh.coord(axis, source) == mesh.coord(axis, near) for axis in place.replicated) and all(
            mesh.coord(axis, source) == self.new_mesh.coord(axis, target) for axis in place.varying
        )


class Piece(NamedTuple):
    """Consecutive elements of one leaf.

    Attributes:
        node: position of the old unit's node in the slot.
        buffer: position of the buffer in that node.
        start: first element there.
        new_buffer: position of the buffer in the new node.
        to: first element there.
        numel: how many.
        itemsize: bytes of one, as it travels.
    """

    node: int
    buffer: int
    start: int
    new_buffer: int
    to: int
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.numel * self.itemsize


def pieces(slot: Slot, unit: UnitLayout, ranks: Ranks, source: int, target: int) -> Iterator[Piece]:
    """What ``target``, a rank of the new mesh, takes of a new unit from ``source``, a rank of the old mesh."""
    serves: dict[int, bool] = {}
    for position, group in enumerate(slot.groups(unit)):
        itemsize = slot.dtype(unit, group).itemsize
        for span in unit.spans(group, slot.place(unit), target):
            held = slot.held[unit.full_path(span.leaf)]
            node = slot.nodes[held.node]
            if held.node not in serves:
                serves[held.node] = ranks.serves(source, target, node.place)
            if not serves[held.node]:
                continue
            old_group = node.groups[held.buffer]
            start = node.unit.local_start(old_group, node.place, source)
            stop = start + node.unit.local_size(old_group, node.place)
            low, high = max(start, held.leaf.offset + span.first), min(stop, held.leaf.offset + span.last)
            if low < high:
                to = span.start + low - held.leaf.offset - span.first
                yield Piece(held.node, held.buffer, low - start, position, to, high - low, itemsize)


def in_rounds(todo: Iterable[Piece], limit: int) -> list[list[Piece]]:
    """Pieces in order, cut so that those of one round are no more than ``limit`` bytes, which has to hold one element."""
    rounds: list[list[Piece]] = []
    left = 0
    for piece in todo:
        while piece.numel:
            if left < piece.itemsize:
                rounds.append([])
                left = limit
            n = min(piece.numel, left // piece.itemsize)
            rounds[-1].append(piece._replace(numel=n))
            piece = piece._replace(start=piece.start + n, to=piece.to + n, numel=piece.numel - n)
            left -= n * piece.itemsize
    return rounds
