"""Move the elements of one state tree from old buffers to new ones, one unit and a bounded number of bytes at a time."""

from collections import Counter
from collections.abc import Sequence

import torch

from fsharp.functional.comm.agree import max_over_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.reshard.pieces import MovedPiece, RankMap, cut_into_rounds, pieces_between
from fsharp.functional.reshard.state_trees import StateTree


def move_state_tree(
    state_tree: StateTree,
    old_buffers: list[list[torch.Tensor]],
    layout: Layout,
    ranks: RankMap,
    comm: Comm,
    *,
    max_nbytes: int,
    donate: bool,
) -> list[Sharded]:
    """Return a state tree's nodes in a new layout, in order of the layout's units; without buffers outside of the new mesh.

    ``old_buffers`` has this rank's old buffers for each node; outside of the old mesh its lists are empty. A rank sends at most
    ``max_nbytes`` bytes to another rank at a time. With ``donate`` buffers are removed from ``old_buffers`` once all of their
    leaves have moved.
    """
    me, everyone = comm.rank, range(comm.mesh.size)
    device = next((buffer.device for buffers in old_buffers for buffer in buffers), comm.device)

    def rounds(unit: UnitLayout, source: int, target: int) -> list[list[MovedPiece]]:
        if source == target:
            return []
        return cut_into_rounds(pieces_between(state_tree, unit, ranks, source, target), max_nbytes)

    incoming = [[rounds(unit, rank, me) for rank in everyone] for unit in layout.units]
    # All ranks take part in as many rounds as the rank with the most rounds needs.
    most = torch.tensor([max(map(len, each)) for each in incoming], device=comm.device)
    most = max_over_ranks(most, comm, label=f"reshard {state_tree}")
    left = Counter(position.node for position in state_tree.position_by_path.values())
    nodes = []
    for unit, arriving, num_rounds in zip(layout.units, incoming, most.tolist(), strict=True):
        place, groups = state_tree.place_in(unit), state_tree.groups_in(unit)
        dtypes = [state_tree.dtype_in(unit, group) for group in groups]
        own = groups if me in ranks.new_ranks else ()
        new = [
            torch.zeros(unit.local_size(group, place), dtype=dtype, device=device)
            for group, dtype in zip(own, dtypes, strict=False)
        ]
        for piece in pieces_between(state_tree, unit, ranks, me, me):
            _new_elements(new, piece).copy_(_old_elements(old_buffers, piece))
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
            moved = Counter(
                state_tree.position_by_path[unit.path_in_tree(leaf)].node
                for group in groups
                for leaf in unit.leaves_of_group(group)
            )
            left -= moved
            for node in moved.keys() - left.keys():
                old_buffers[node].clear()
        nodes.append(Sharded(new, unit, place, own, reduction=state_tree.nodes[0].reduction))
    return nodes


def _old_elements(old_buffers: list[list[torch.Tensor]], piece: MovedPiece) -> torch.Tensor:
    return old_buffers[piece.node][piece.buffer][piece.start : piece.start + piece.numel]


def _new_elements(new_buffers: list[torch.Tensor], piece: MovedPiece) -> torch.Tensor:
    return new_buffers[piece.new_buffer][piece.new_start : piece.new_start + piece.numel]


def _pack_pieces(
    send: Sequence[Sequence[MovedPiece]],
    old_buffers: list[list[torch.Tensor]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> torch.Tensor:
    """Return the pieces for all ranks as one buffer of bytes, in order of rank. Memory: the buffer and one piece."""
    x = torch.empty(sum(piece.nbytes for each in send for piece in each), dtype=torch.uint8, device=device)
    end = 0
    for each in send:
        for piece in each:
            x[end : end + piece.nbytes] = (
                _old_elements(old_buffers, piece).to(device, dtypes[piece.new_buffer]).view(torch.uint8)
            )
            end += piece.nbytes
    return x


def _unpack_pieces(x: torch.Tensor, receive: Sequence[Sequence[MovedPiece]], new_buffers: list[torch.Tensor]) -> None:
    end = 0
    for each in receive:
        for piece in each:
            _new_elements(new_buffers, piece).view(torch.uint8).copy_(x[end : end + piece.nbytes])
            end += piece.nbytes
