"""Move the elements of one state tree from old buffers to new ones, one unit and a bounded number of bytes at a time.

A *piece* is a run of elements that moves from a buffer of one rank to a buffer of another. In any layout a rank holds one run
of each flattened leaf. So the elements that one rank needs from another are the intersection of two runs. Both ranks compute
these intersections, in the same order.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsharp.functional.comm.agree import max_over_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.reshard.state_trees import StateTree


@dataclass(frozen=True)
class MeshChange:
    """The old and the new mesh, and their ranks: rank ``r`` of the new mesh is rank ``new_ranks[r]`` of the Comm."""

    old_mesh: Mesh
    new_mesh: Mesh
    old_ranks: tuple[int, ...]
    new_ranks: tuple[int, ...]

    def is_source_for(self, source: int, target: int, place: MeshPlacement) -> bool:
        """Return whether rank ``target`` of the new mesh may take elements from rank ``source`` of the old mesh.

        ``place``: the place of the elements on the old mesh. Along a replicated axis, ``source`` must have the coordinate that
        the target had on the old mesh. If the target was not there, the coordinate of old rank ``target % number of old ranks``
        counts, so that ranks that join take from different ranks. Along a varying axis, ``source`` must have the coordinate
        that the target has on the new mesh.
        """
        mesh, rank = self.old_mesh, self.new_ranks[target]
        near = self.old_ranks.index(rank) if rank in self.old_ranks else target % mesh.size
        return all(mesh.coord(axis, source) == mesh.coord(axis, near) for axis in place.replicated_axes) and all(
            mesh.coord(axis, source) == self.new_mesh.coord(axis, target) for axis in place.varying_axes
        )


class MovedPiece(NamedTuple):
    """A run of ``numel`` elements of one leaf, which moves from an old buffer to a new one.

    Attributes:
        node: index of the old node in the state tree.
        buffer: index of the old buffer in that node.
        start: index of the run's first element in the old buffer.
        new_buffer: index of the new buffer in the new node.
        new_start: index of the run's first element in the new buffer.
        numel: number of elements.
        itemsize: bytes of an element on the wire.
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
        """Bytes of the piece's elements in a message."""
        return self.numel * self.itemsize


def pieces_between_ranks(
    state_tree: StateTree, unit: UnitLayout, ranks: MeshChange, source: int, target: int
) -> Iterator[MovedPiece]:
    """Yield the pieces of a unit that rank ``target`` takes from rank ``source``. ``unit`` is of the new layout.

    Source and target are ranks of the Comm, and may be the same rank.
    """
    if source not in ranks.old_ranks or target not in ranks.new_ranks:
        return
    source, target = ranks.old_ranks.index(source), ranks.new_ranks.index(target)  # numbers in the old and the new mesh
    serves: dict[int, bool] = {}
    for new_buffer, group in enumerate(state_tree.groups_in(unit)):
        itemsize = state_tree.sent_dtype(unit, group).itemsize
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
    """Return ``pieces`` as rounds of at most ``max_nbytes`` bytes, in order. A piece that does not fit into a round is cut.

    ``max_nbytes`` has to be at least the bytes of one element.
    """
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


def move_state_tree(
    state_tree: StateTree,
    old_buffers: list[list[torch.Tensor]],
    layout: Layout,
    ranks: MeshChange,
    comm: Comm,
    *,
    max_nbytes: int,
    donate: bool,
) -> list[Sharded]:
    """Move a state tree to ``layout``. Return its new nodes, in order of the layout's units.

    Ranks outside of the new mesh get nodes without buffers. ``old_buffers``: for each old node, this rank's buffers; none on
    ranks outside of the old mesh. A rank sends at most ``max_nbytes`` bytes to another rank at a time. With ``donate`` a node's
    buffers are removed from ``old_buffers`` once all leaves of the node have moved.
    """
    me, everyone = comm.rank, range(comm.mesh.size)
    device = next((buffer.device for buffers in old_buffers for buffer in buffers), comm.device)

    def rounds(unit: UnitLayout, source: int, target: int) -> list[list[MovedPiece]]:
        if source == target:
            return []
        return cut_into_rounds(pieces_between_ranks(state_tree, unit, ranks, source, target), max_nbytes)

    incoming = [[rounds(unit, rank, me) for rank in everyone] for unit in layout.units]
    # All ranks take part in as many rounds as the rank with the most rounds needs.
    most = torch.tensor([max(map(len, each)) for each in incoming], device=comm.device)
    most = max_over_ranks(most, comm, label=f"reshard {state_tree}")
    left = Counter(position.node for position in state_tree.position_by_path.values())
    nodes = []
    for unit, arriving, num_rounds in zip(layout.units, incoming, most.tolist(), strict=True):
        place, groups = state_tree.place_in(unit), state_tree.groups_in(unit)
        dtypes = [state_tree.sent_dtype(unit, group) for group in groups]
        own = groups if me in ranks.new_ranks else ()
        new = [
            torch.zeros(unit.local_size(group, place), dtype=dtype, device=device)
            for group, dtype in zip(own, dtypes, strict=False)
        ]
        for piece in pieces_between_ranks(state_tree, unit, ranks, me, me):
            _view_in_new_buffers(new, piece).copy_(_view_in_old_buffers(old_buffers, piece))
        leaving = [rounds(unit, me, rank) for rank in everyone]
        for k in range(num_rounds):
            send, receive = ([each[k] if k < len(each) else [] for each in way] for way in (leaving, arriving))
            sizes = [[sum(piece.nbytes for piece in each) for each in way] for way in (send, receive)]
            named = f"reshard {state_tree} {unit.name or '(root)'} {k}"
            # A name for the bytes would keep the bytes of one round alive during the next.
            _unpack_pieces(
                comm.all_to_all(_pack_pieces(send, old_buffers, dtypes, comm.device), *sizes, label=named), receive, new
            )
        if donate:
            leaves = [leaf for group in groups for leaf in unit.leaves_of_group(group)]
            moved = Counter(state_tree.position_by_path[unit.path_in_tree(leaf)].node for leaf in leaves)
            left -= moved
            for node in moved.keys() - left.keys():
                old_buffers[node].clear()
        nodes.append(Sharded(new, unit, place, own, reduction=state_tree.nodes[0].reduction))
    return nodes


def _view_in_old_buffers(old_buffers: list[list[torch.Tensor]], piece: MovedPiece) -> torch.Tensor:
    return old_buffers[piece.node][piece.buffer][piece.start : piece.start + piece.numel]


def _view_in_new_buffers(new_buffers: list[torch.Tensor], piece: MovedPiece) -> torch.Tensor:
    return new_buffers[piece.new_buffer][piece.new_start : piece.new_start + piece.numel]


def _pack_pieces(
    send: Sequence[Sequence[MovedPiece]],
    old_buffers: list[list[torch.Tensor]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> torch.Tensor:
    """Return the bytes of all pieces to send as one buffer, receiver after receiver. Memory: the buffer and one piece.

    ``send``: the pieces for each receiver, in order of rank. ``dtypes``: the dtype in which the pieces of each new buffer
    travel.
    """
    x = torch.empty(sum(piece.nbytes for each in send for piece in each), dtype=torch.uint8, device=device)
    end = 0
    for each in send:
        for piece in each:
            x[end : end + piece.nbytes] = (
                _view_in_old_buffers(old_buffers, piece).to(device, dtypes[piece.new_buffer]).view(torch.uint8)
            )
            end += piece.nbytes
    return x


def _unpack_pieces(x: torch.Tensor, receive: Sequence[Sequence[MovedPiece]], new_buffers: list[torch.Tensor]) -> None:
    end = 0
    for each in receive:
        for piece in each:
            _view_in_new_buffers(new_buffers, piece).view(torch.uint8).copy_(x[end : end + piece.nbytes])
            end += piece.nbytes
