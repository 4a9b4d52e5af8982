"""UnitLayout: which element of which leaf of a unit rests on which rank. Static, hashable, integers only.

A unit's leaves are sorted into groups that agree in dtypes, in being trained and in label. A group is one flat buffer
of ``num_parts * capacity`` elements; a place keeps some consecutive parts of it on each rank:

    leaves        |--- w ---|-b-|------- v -------|..|      .. padding
    parts         |   0   |   1   |   2   |   3      |      optimizer state, sharded over outer and inner
    place params  |   inner 0     |   inner 1        |      parameters, sharded over inner
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import OptionError
from fsharp.functional.formats.format import EncodedTensorClass, Format, LeafCodec, align_nbytes, first_few
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.packing import Atom
from fsharp.functional.layout.placement import MeshPlacement, Replicate, Shard, Strategy
from fsharp.functional.layout.precision import Dtypes


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the user's tree.

    Attributes:
        path: key path of the leaf within its unit; ``""`` if the unit is a single leaf.
        shape: sizes of the dims.
        dtype: dtype of the leaf in the user's tree.
        atom: the run of elements that no rank boundary cuts.
        group: index of the group whose buffer stores the leaf; -1 for a leaf that is tied to another one.
        offset: index of the leaf's first element in the buffer.
        tied_to: ``(unit, path)`` of the leaf that stores the values of a tied leaf; None for a leaf with its own storage.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    atom: Atom
    group: int
    offset: int
    tied_to: tuple[str, str] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """Leaves of a unit that share one flat buffer.

    Attributes:
        dtypes: dtypes of parameters, main copies and gradients.
        trainable: whether the leaves have gradients and optimizer state.
        label: label by which :func:`~fsharp.optim.partition` selects an optimizer.
        num_parts: number of equal parts of the buffer; in the optimizer's place each rank holds one part.
        capacity: number of elements in one part.
        used: number of elements that belong to leaves; the rest of the buffer is padding.
    """

    dtypes: Dtypes
    trainable: bool
    label: str
    num_parts: int
    capacity: int
    used: int

    @property
    def size(self) -> int:
        """Number of elements in the whole buffer, with padding."""
        return self.num_parts * self.capacity


class Span(NamedTuple):
    """The elements of a leaf in one rank's buffer, or in a run: ``buffer[start:stop]`` holds ``leaf.flatten()[first:last]``."""

    leaf: Leaf
    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class UnitLayout:
    """The layout of one unit.

    Attributes:
        name: path of the unit in the user's tree.
        mesh: the mesh.
        strategy: where parameters, gradients and optimizer state of the unit rest.
        leaves: leaves of the unit, in tree order.
        groups: groups of leaves, each with one flat buffer.
        structure: tree structure of the unit's subtree.
    """

    name: str
    mesh: Mesh
    strategy: Strategy
    leaves: tuple[Leaf, ...]
    groups: tuple[Group, ...]
    structure: optree.PyTreeSpec

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.mesh, self.strategy, self.leaves, self.groups, self.structure))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of strings differ between processes, so cached values are not pickled.
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def display_name(self) -> str:
        """The name of the unit for an error; ``(root)`` if the whole tree is one unit."""
        return repr(self.name) if self.name else "(root)"

    @cached_property
    def trainable_groups(self) -> tuple[int, ...]:
        """Indices of the groups that have gradients."""
        return tuple(i for i, group in enumerate(self.groups) if group.trainable)

    @cached_property
    def groups_with_main_copy(self) -> tuple[int, ...]:
        """Indices of the trainable groups that have a main copy: parameters in the dtype of the optimizer."""
        return tuple(i for i in self.trainable_groups if self.groups[i].dtypes.has_main_copy)

    @cached_property
    def resting_gradient_sizes(self) -> tuple[int, ...]:
        """Number of elements of each trainable group's gradient that one rank holds between microbatches."""
        return tuple(self.local_size(i, self.strategy.grads) for i in self.trainable_groups)

    @cached_property
    def has_stored_formats(self) -> bool:
        """Whether some group stores parameters in a format."""
        return any(group.dtypes.format is not None for group in self.groups)

    @cached_property
    def has_any_format(self) -> bool:
        """Whether parameters, gradients or updates of some group are encoded."""
        wires = [wire for each in self.groups for wire in (each.dtypes.wire, *dict(each.dtypes.wires).values())]
        sends_differences = any(each.dtypes.update is not None for each in self.groups)
        return self.has_stored_formats or sends_differences or not all(wire.is_plain for wire in wires)

    @cached_property
    def has_leaf_codecs(self) -> bool:
        """Whether parameters of some group are stored in a format that encodes whole leaves."""
        return any(group.dtypes.stored_format.leaf_codec is not None for group in self.groups)

    @cached_property
    def varying_axes(self) -> tuple[str, ...]:
        """Axes along which every rank holds different parameters."""
        return self.strategy.full.varying_axes

    @cached_property
    def num_variants(self) -> int:
        """Number of different copies of the unit's parameters: ranks along ``varying_axes``."""
        return math.prod(self.mesh.axis_size(axis) for axis in self.varying_axes)

    @cached_property
    def all_groups(self) -> tuple[int, ...]:
        """Indices of all groups, trained or frozen."""
        return tuple(range(len(self.groups)))

    @cached_property
    def tie_owner_unit_names(self) -> frozenset[str]:
        """Names of the other units that store tied leaves of this unit."""
        return frozenset(leaf.tied_to[0] for leaf in self.leaves if leaf.tied_to is not None) - {self.name}

    def local_size(self, group: int, place: MeshPlacement) -> int:
        """Return the number of elements of a group that one rank holds in ``place``."""
        return self.groups[group].size // math.prod(self.mesh.axis_size(axis) for axis in place.sharded_axes)

    def stored_size(self, group: int, place: MeshPlacement) -> int:
        """Return the length of the buffer in which one rank stores a group's parameters in ``place``."""
        return self.gather_input_size(group, place) + self.scales_nbytes[group]

    def gather_input_size(self, group: int, place: MeshPlacement) -> int:
        """Return the number of elements of a stored buffer without the scales of whole leaves, which a gather does not send."""
        size, capacity = self.local_size(group, place), self.groups[group].capacity
        return size // capacity * self.groups[group].dtypes.stored_format.size(capacity) if capacity else 0

    def gather_input_nbytes(self, group: int, place: MeshPlacement) -> int:
        """Return the bytes of a rank's input to a gather of a group's parameters from ``place``."""
        return self.gather_input_size(group, place) * self.groups[group].dtypes.stored_format.buffer_dtype.itemsize

    def use_gather_input_nbytes(self, group: int, place: MeshPlacement) -> list[int]:
        """Return the bytes of a rank's input to each gather that brings a group from ``place`` to a function.

        For a tensor class each plane of the format is gathered by itself, and arrives in one piece. Else there is one gather.
        """
        if group not in self.tensor_classes:
            return [self.gather_input_nbytes(group, place)]
        return self.groups[group].dtypes.stored_format.plane_nbytes(self.local_size(group, place))

    def stored_nbytes(self, group: int, place: MeshPlacement) -> int:
        """Return the bytes of the buffer in which one rank holds a group's parameters in ``place``."""
        return self.stored_size(group, place) * self.groups[group].dtypes.stored_format.buffer_dtype.itemsize

    def gather_axes(self, source: MeshPlacement, target: MeshPlacement, *, trivial: bool = False) -> tuple[str, ...]:
        """Return the axes along which a move from ``source`` to ``target`` gathers, in the order of the gathers: finest first.

        ``trivial``: whether collectives run along axes of one rank too.
        """
        axes = [axis for axis in reversed(source.axis_order) if source[axis] is Shard and target[axis] is Replicate]
        return tuple([axis for axis in axes if trivial or self.mesh.axis_size(axis) > 1])

    @cached_property
    def update_gather_axes(self) -> tuple[str, ...]:
        """Axes along which updated parameters are gathered, in the order of the gathers."""
        return self.gather_axes(self.strategy.optim, self.strategy.params, trivial=True)

    def update_format(self, group: int) -> Format | None:
        """Return the format in which a group's updates travel; None if parameters travel themselves, or nothing travels."""
        travels = any(self.mesh.axis_size(axis) > 1 for axis in self.update_gather_axes)
        return self.groups[group].dtypes.update if travels else None

    def update_gather_input_nbytes(self, group: int) -> int:
        """Return the bytes of a rank's input to the gather after an update: its part of a group, or an encoded difference."""
        form = self.update_format(group)
        if form is None:
            return self.gather_input_nbytes(group, self.strategy.optim)
        return form.size(self.groups[group].capacity) * form.buffer_dtype.itemsize

    @cached_property
    def scales_nbytes(self) -> tuple[int, ...]:
        """Bytes of the scales of whole leaves at the end of each group's buffer; 0 for a group without such scales."""

        def nbytes(codec: LeafCodec | None, leaf: Leaf) -> int:
            if codec is None:
                return 0
            try:
                return align_nbytes(codec.scales_nbytes(leaf.shape))
            except OptionError as error:
                raise OptionError(f"leaf {self.path_in_tree(leaf)!r}: {error}") from error

        codecs = [group.dtypes.stored_format.leaf_codec for group in self.groups]
        rows = zip(codecs, self._leaves_by_group, strict=True)
        return tuple(sum(nbytes(codec, leaf) for leaf in leaves) for codec, leaves in rows)

    @cached_property
    def tensor_classes(self) -> Mapping[int, EncodedTensorClass]:
        """The tensor class that functions get, by group, for groups whose class is not torch.Tensor."""
        codecs = {i: group.dtypes.stored_format.leaf_codec for i, group in enumerate(self.groups)}
        return {i: codec.tensor_class for i, codec in codecs.items() if codec is not None and codec.tensor_class is not None}

    def error_facts(self, group: int, axis: str = "") -> list[tuple[str, object]]:
        """Return facts for the errors of encoding and decoding a group: unit, leaves, and what is encoded.

        With ``axis`` gradients are encoded, which travel along the axis; else parameters.
        """
        leaves = first_few([self.path_in_tree(leaf) for leaf in self.leaves_of_group(group)])
        over = ("parameters", f"over axes {first_few(self.strategy.optim.axis_order)}")
        along = ("gradients", f"along axis {axis!r}") if axis else over
        return [("unit", self.display_name), ("leaves", leaves), along]

    def local_start(self, group: int, place: MeshPlacement, rank: int) -> int:
        """Return the index of the first element of the group's buffer that ``rank`` holds in ``place``."""
        return self.mesh.index_along(place.sharded_axes, rank) * self.local_size(group, place)

    def leaf_spans(self, group: int, place: MeshPlacement, rank: int) -> Iterator[Span]:
        """Yield a :class:`Span` for each leaf of a group of which ``rank`` holds a part in ``place``, in buffer order."""
        return self.spans_in_run(group, self.local_start(group, place, rank), self.local_size(group, place))

    def spans_in_run(self, group: int, start: int, size: int) -> Iterator[Span]:
        """Yield a :class:`Span` for each leaf in the run ``[start, start + size)`` of a group's buffer, in buffer order.

        ``start`` and ``stop`` of a Span are counted from the first element of the run. Padding has no Span.
        """
        for leaf in self.leaves_of_group(group):
            low, high = max(start, leaf.offset), min(start + size, leaf.offset + leaf.numel)
            if low < high:
                yield Span(leaf, low - start, high - start, low - leaf.offset, high - leaf.offset)

    def leaf_range_on_rank(self, leaf: Leaf, place: MeshPlacement, rank: int) -> tuple[int, int]:
        """Return the elements ``[first, last)`` of a flattened leaf that ``rank`` holds in ``place``; ``(0, 0)`` if none."""
        start = self.local_start(leaf.group, place, rank) - leaf.offset
        first, last = max(start, 0), min(start + self.local_size(leaf.group, place), leaf.numel)
        return (first, last) if first < last else (0, 0)

    def are_replicas(self, place: MeshPlacement, rank: int, other: int) -> bool:
        """Return whether two ranks hold the same elements in ``place``."""
        return all(
            self.mesh.coord(axis, rank) == self.mesh.coord(axis, other) for axis in place.sharded_axes + place.varying_axes
        )

    def leaves_of_group(self, group: int) -> tuple[Leaf, ...]:
        """Return the leaves in a group's buffer, in order of offset; leaves without elements come first."""
        return self._leaves_by_group[group]

    @cached_property
    def _leaves_by_group(self) -> tuple[tuple[Leaf, ...], ...]:
        by_offset = sorted(self.leaves, key=lambda leaf: (leaf.offset, leaf.numel))
        return tuple(tuple(leaf for leaf in by_offset if leaf.group == i) for i in self.all_groups)

    def path_of_tie_owner(self, leaf: Leaf) -> str:
        """Return the path in the user's tree of ``leaf``, or of the leaf to which ``leaf`` is tied."""
        return self.path_in_tree(leaf) if leaf.tied_to is None else ".".join(part for part in leaf.tied_to if part)

    def path_in_tree(self, leaf: Leaf) -> str:
        """Return the path of a leaf of this unit in the user's tree."""
        return f"{self.name}.{leaf.path}" if self.name and leaf.path else self.name or leaf.path


def padding_in_run(unit: UnitLayout, group: int, start: int, size: int) -> list[slice]:
    """Return the padding in a run of a group's buffer, as slices of the run.

    Callers set decoded padding to zero: a format that mixes the values of a block decodes its zeros as other numbers.
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
    the unit varies along axes, ``first`` is the index in the leaves of all ranks, one after another.
    """
    before = unit.mesh.index_along(unit.varying_axes, rank)
    for leaf, begin, end, first, _ in unit.spans_in_run(group, start, size):
        yield begin, end, unit.path_in_tree(leaf), before * leaf.numel + first
