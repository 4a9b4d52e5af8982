"""FlatSlice: a range of a flat buffer that an optimizer of torch.optim updates as one parameter."""

import copy
from collections.abc import Hashable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import torch

from fsharp.functional.comm.equal_values import exact_text
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.sharded import Sharded, units_of
from fsharp.stateful.modules.parameter import ShardedTensor


class FlatSlice(NamedTuple):
    """A range of this rank's flat buffer, from ``start`` to ``stop``, that a torch optimizer updates as one parameter.

    ``leaves``: for each leaf in the range its path, first element and end, counted from ``start``. ``shape``: the shape of the
    only leaf, for an optimizer that updates whole leaves; else None.
    """

    unit: str
    group: int
    start: int
    stop: int
    leaves: tuple[tuple[str, int, int], ...]
    shape: tuple[int, ...] | None = None

    def view_in(self, nodes: Mapping[str, Sharded]) -> torch.Tensor:
        """Return the slice as a view of its buffer in ``nodes``, a mapping from unit names to nodes."""
        node = nodes[self.unit]
        buffer: torch.Tensor = node.buffers[node.groups.index(self.group)]
        found = buffer.detach()[self.start : self.stop]
        return found if self.shape is None else found.view(self.shape)


def cut_by_labels(tree: Any, labels: Mapping[str, Hashable], *, rank: int, by_leaf: bool) -> Iterator[FlatSlice]:
    """Cut the flat buffers of ``rank`` into slices, one for each run of neighbouring leaves with equal labels. Yield them.

    ``labels``: by path of a leaf; a leaf without a label is in no slice. With ``by_leaf`` each leaf gets a slice of its own, in
    the leaf's shape. Then no leaf may be cut between ranks.
    """
    for node in units_of(tree):
        for group in node.groups:
            spans = [(node.unit.path_in_tree(s.leaf), s) for s in node.unit.leaf_spans(group, node.place, rank)]
            for (label, _), each in groupby(spans, lambda row: (labels.get(row[0]), row[0] if by_leaf else "")):
                run = list(each)
                start, stop = run[0][1].start, run[-1][1].stop
                leaves = tuple((path, s.start - start, s.stop - start) for path, s in run)
                if label is not None:
                    yield FlatSlice(node.name, group, start, stop, leaves, run[0][1].leaf.shape if by_leaf else None)


def state_of_leaf(state: Mapping[str, Any], of: torch.Tensor, first: int, last: int, like: ShardedTensor) -> dict[str, Any]:
    """Return one leaf's state from the state of a slice. The leaf is ``of.flatten()[first:last]``, with ``of`` the slice.

    State with a value for each element becomes a ShardedTensor, cut like the parameter ``like``, in the same memory.
    """

    def cut(value: Any) -> Any:
        is_elementwise = isinstance(value, torch.Tensor) and value.shape == of.shape
        return ShardedTensor.from_local(value.detach().reshape(-1)[first:last], like) if is_elementwise else value

    return {key: cut(value) for key, value in state.items()}


def join_state(flat_slice: FlatSlice, states: Mapping[str, Mapping[str, Any]], like: torch.Tensor) -> dict[str, Any]:
    """Return the optimizer state of a slice, in new memory, from ``states`` of its leaves. ``like``: the slice's parameter."""
    parts = [states.get(path, {}) for path, _, _ in flat_slice.leaves]
    joined: dict[str, Any] = {}
    for key, value in parts[0].items():
        if not isinstance(value, ShardedTensor):
            joined[key] = copy.deepcopy(value)
            continue
        joined[key] = torch.zeros(like.shape, dtype=value.dtype, device=like.device)
        for part, (_, first, last) in zip(parts, flat_slice.leaves, strict=True):
            joined[key].view(-1)[first:last] = part[key].local.view(-1)
    return joined


def state_join_key(state: Mapping[str, Any]) -> Hashable:
    """Return a key of a leaf's state. :func:`join_state` can join the states of leaves that have equal keys."""
    rows = sorted(state.items())
    return tuple((key, dtype_name(x.dtype) if isinstance(x, ShardedTensor) else exact_text(x)) for key, x in rows)
