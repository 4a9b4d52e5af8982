"""A unit's full parameters at one address, and the leaves that functions get.

[Note: aliases]
Autograd saves the leaves that a function used, and compares their version counters in the backward. Between forward and
backward a slot of the arena is released, and the same values are gathered again, which raises the slot's version counter.
Autograd would refuse a view of the slot. So leaves are views of an alias of the slot's memory, with another version counter.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import optree
import torch
from torch.utils.weak import TensorWeakRef

from fsharp.errors import TreeError
from fsharp.functional.formats.format import EncodedTensorClass, LeafPart, non_view_alias
from fsharp.functional.layout.sharded import build_subtree
from fsharp.functional.layout.stored import decode_stored, scales_in, whole_leaf_parts
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout, padding_in_run
from fsharp.functional.release import inner_tensors

LeavesAndPadding = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Leaves as views of flat buffers, and views of the padding: runs of the buffers that belong to no leaf."""


class LeafTable:
    """The positions of the leaves of a unit's subtree.

    Attributes:
        stored: leaves that this unit stores, in tree order.
        trainable: positions in ``stored`` of the leaves with gradients.
        position_by_path: positions in ``stored``, by path.
    """

    def __init__(self, unit: UnitLayout) -> None:
        self.unit = unit
        self.stored = tuple(leaf for leaf in unit.leaves if leaf.tied_to is None)
        self.trainable = tuple(i for i, leaf in enumerate(self.stored) if unit.groups[leaf.group].trainable)
        self.position_by_path = {leaf.path: i for i, leaf in enumerate(self.stored)}
        self._is_untied = len(self.stored) == len(unit.leaves)

    def build_subtree(self, own: Sequence[torch.Tensor], stored: Mapping[str, "StoredLeaves"]) -> Any:
        """Return the unit's subtree. ``own``: the leaves that the unit stores. ``stored``: stored leaves of all units, by name.

        Raises:
            TreeError: a leaf is tied to a leaf of a unit that is not in the call.
        """
        if self._is_untied:
            return self.unit.structure.unflatten(own)
        by_path = {name: dict(zip(table.position_by_path, tensors, strict=True)) for name, (table, tensors) in stored.items()}
        by_path[self.unit.name] = dict(zip(self.position_by_path, own, strict=True))
        return build_subtree(self.unit, "forward()", by_path)

    def subtree_leaves(self, own: list[torch.Tensor], stored: Mapping[str, "StoredLeaves"]) -> list[torch.Tensor]:
        """Return the leaves of the subtree that :meth:`build_subtree` returns."""
        return own if self._is_untied else optree.tree_leaves(self.build_subtree(own, stored))

    def leaf_views(self, flats: Mapping[int, torch.Tensor], leaves: Sequence[Leaf]) -> list[torch.Tensor]:
        """Return ``leaves`` as views of ``flats``: full flat buffers by group. TreeError if a buffer is not contiguous."""
        for flat in flats.values():
            if not flat.is_contiguous():
                raise TreeError(
                    f"unit {self.unit.display_name}: a buffer has stride {flat.stride(0)}, expected a contiguous buffer. "
                    "Call .contiguous() on it."
                )
        return [flats[leaf.group][leaf.offset : leaf.offset + leaf.numel].view(leaf.shape) for leaf in leaves]

    def trained_leaves(self, flats: Mapping[int, torch.Tensor]) -> LeavesAndPadding:
        """Return views of the trained leaves, and of the padding, in ``flats``: full flat buffers by group."""
        padding = [flat[gap] for group, flat in flats.items() for gap in padding_in_run(self.unit, group, 0, len(flat))]
        return self.leaf_views(flats, [self.stored[i] for i in self.trainable]), padding


StoredLeaves = tuple[LeafTable, Sequence[torch.Tensor]]
"""The leaf table of a unit, and the tensors of its stored leaves."""
leaf_table = cache(LeafTable)
"""Return the leaf table of a unit, which is made once."""
_version_of = attrgetter("_version")


class HandedOutLeaf:
    """A leaf that callers hold, or an alias of one. A release empties the leaf; a gather of its unit gives it memory again.

    ``cls``: the leaf's tensor class, if it has a class of its own. ``address``: address of the leaf's ``UntypedStorage``.
    """

    __slots__ = ("_address", "_cls", "_inner", "_path", "_tensor")

    def __init__(self, tensor: torch.Tensor, path: str, cls: EncodedTensorClass | None, address: int) -> None:
        self._tensor, self._cls, self._path, self._address = TensorWeakRef(tensor), cls, path, address
        inner = [x for x in inner_tensors(tensor) if x.untyped_storage().data_ptr() == address]
        self._inner = [(TensorWeakRef(x), int(x.storage_offset()), x.shape, x.stride()) for x in inner]

    @property
    def is_alive(self) -> bool:
        """Whether a caller holds the leaf, or an alias with the same inner tensors."""
        return any(ref() is not None for ref, *_ in self._inner)

    @property
    def version(self) -> int:
        """Sum of the version counters of the leaf and its inner tensors; -1 if one of these tensors is no longer held."""
        total = 0
        for ref in (self._tensor, *[ref for ref, *_ in self._inner]):
            if (x := ref()) is None:
                return -1
            total += x._version
        return total

    def is_for_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether this is the HandedOutLeaf of a tensor."""
        return self._tensor() is tensor

    def has_identical_inner_tensors(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` uses the leaf's memory, and only through inner tensors of the leaf."""
        mine = {id(ref()) for ref, *_ in self._inner} - {id(None)}
        here = [x for x in inner_tensors(tensor) if id(x) in mine or x.untyped_storage().data_ptr() == self._address]
        return bool(here) and all(id(x) in mine for x in here)

    @torch.no_grad()
    def take_memory(self) -> None:
        """Make the leaf empty: any function of it raises an error."""
        if self._cls is not None and (tensor := self._tensor()) is not None:
            self._cls.release_derived(tensor)
        for ref, *_ in self._inner:
            if (inner := ref()) is not None:
                inner.set_()
                inner.__class__, inner.path = _ReleasedInnerTensor, self._path

    @torch.no_grad()
    def give_memory(self, storage: torch.UntypedStorage) -> None:
        """Give the leaf memory in ``storage``, at the same offset as before. The memory may be filled later."""
        for ref, *where in self._inner:
            if (inner := ref()) is not None:
                inner.__class__ = torch.Tensor
                inner.set_(storage, *where)

    def recompute_derived_data(self) -> None:
        """Recompute the data that a tensor class derives from its bytes, such as a transpose, after the memory was filled."""
        if self._cls is not None and (tensor := self._tensor()) is not None:
            self._cls.compute_derived(tensor)


class _ReleasedInnerTensor(torch.Tensor):
    """The class of an inner tensor whose memory is released: any function of the tensor raises an error."""

    path: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        path = next((x.__dict__["path"] for x in args if isinstance(x, _ReleasedInnerTensor)), "of a unit")
        raise TreeError(
            f"parameter {path!r} is used while its memory is released, outside of its unit's forward and backward. Return the "
            "parameter from the forward, or keep w.dequantize()."
        )


RELEASED_VERSION = 2**31
"""The version counter of leaves whose memory was released."""


class FullUnit:
    """The full parameters of a unit at one address, and views of them: the leaves that functions get.

    Args:
        unit: the layout.
        flats: for each group the full buffer that functions use, with the sizes of :func:`full_sizes`.
        gathered: for each group the full buffer as gathered; ``flats`` themselves if all formats are plain.
        planes: for each group with a tensor class, the bytes of each plane, in one piece.
    """

    __slots__ = ("_aliases", "_classed", "_handed_out", "_leaves", "_version", "flats", "gathered", "has_classes", "leaf_table")

    def __init__(
        self,
        unit: UnitLayout,
        flats: Sequence[torch.Tensor],
        gathered: Sequence[torch.Tensor] = (),
        planes: Mapping[int, Sequence[torch.Tensor]] = {},
    ) -> None:
        self.leaf_table, self.flats, self.gathered = leaf_table(unit), tuple(flats), gathered or flats
        classed: dict[int, tuple[EncodedTensorClass, LeafPart]] = {}
        for g, cls in unit.tensor_classes.items():
            pairs = zip(planes[g], unit.groups[g].dtypes.stored_format.planes, strict=True)
            numbers = [x.view(plane.dtype) for x, plane in pairs]
            for path, part in whole_leaf_parts(unit, g, numbers, scales_in(unit, g, self.gathered[g])).items():
                classed[self.leaf_table.position_by_path[path]] = cls, part
        self.has_classes = bool(classed)
        self._classed = dict(sorted(classed.items()))
        plain = {g: non_view_alias(flat) for g, flat in enumerate(flats) if g not in unit.tensor_classes}  # see [Note: aliases]
        self._aliases = tuple(plain.values())  # each with a version counter, which all leaves of the group share
        plain_leaves = [leaf for leaf in self.leaf_table.stored if leaf.group in plain]
        self._leaves = tuple(self.leaf_table.leaf_views(plain, plain_leaves))
        self._handed_out: list[HandedOutLeaf] = []
        self._version = 0

    def decode(self, rank: int) -> None:
        """Decode gathered buffers of formats that are not plain into ``flats``, and call :meth:`give_memory_to_leaves`."""
        unit = self.leaf_table.unit
        for g, flat, data in zip(unit.all_groups, self.flats, self.gathered, strict=True):
            if g not in unit.tensor_classes and data is not flat:
                flat.copy_(decode_stored(unit, g, data, scales_in(unit, g, data), unit.strategy.full, rank, flat.dtype))
        self.give_memory_to_leaves()

    def leaves(self) -> list[torch.Tensor]:
        """Return the stored leaves, as new aliases in each call."""
        found = list(map(torch.Tensor.detach, self._leaves))
        for position in self._classed:
            found.insert(position, self.new_subclass_leaf(position))
        return found

    @property
    def storage(self) -> torch.UntypedStorage:
        """The one ``UntypedStorage`` of all leaves of a unit that was gathered."""
        planes = [part.planes[0] for _, part in self._classed.values()]
        return (planes or self.flats)[0].untyped_storage()

    @torch.inference_mode(False)  # the memory of inference tensors cannot be taken later
    def new_subclass_leaf(self, position: int) -> torch.Tensor:
        """Return a new tensor for the stored leaf number ``position``, in the leaf's own tensor class."""
        cls, part = self._classed[position]
        tensor = cls.make_tensor(part)
        self._handed_out.append(HandedOutLeaf(tensor, part.path, cls, self.storage.data_ptr()))
        return tensor

    def register_alias(self, tensor: torch.Tensor) -> None:
        """Register an alias of a leaf, so that :meth:`take_memory_from_leaves` also makes the alias empty."""
        if any(each.is_for_tensor(tensor) for each in self._handed_out):
            return
        plain = [leaf.path for i, leaf in enumerate(self.leaf_table.stored) if i not in self._classed]
        paths = {leaf.data_ptr(): path for leaf, path in zip(self._leaves, plain, strict=True)}
        path = paths.get(tensor.data_ptr(), self.leaf_table.unit.name)
        self._handed_out.append(HandedOutLeaf(tensor, path, None, self.storage.data_ptr()))

    def is_subclass_leaf(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is, or aliases, a handed-out leaf with a tensor class of its own, such as FP8."""
        return self.has_classes and any(each.has_identical_inner_tensors(tensor) for each in self._handed_out)

    def take_memory_from_leaves(self) -> list[HandedOutLeaf]:
        """Make the handed-out leaves that callers still hold empty, so that memory can be released. Return these leaves."""
        alive, self._handed_out = [each for each in self._handed_out if each.is_alive], []
        for each in alive:
            each.take_memory()
        return alive

    def restore_released_leaves(self, handed_out: list[HandedOutLeaf]) -> None:
        """Give this unit's memory to ``handed_out``: leaves that had the same values in other memory, which was released."""
        self._handed_out = handed_out
        for each in handed_out:
            each.give_memory(self.storage)

    def version_counters(self) -> list[int]:
        """Return version counters that writes to leaves change: one for each plain group, and for each other leaf in use."""
        found = list(map(_version_of, self._aliases))
        return [*found, *(each.version for each in self._handed_out)] if self._classed else found

    def is_written_since(self, versions: list[int]) -> bool:
        """Return whether a leaf was written to since :meth:`version_counters` returned ``versions``."""
        now = self.version_counters()
        return now != versions and any(a != b and -1 not in (a, b) for a, b in zip(now, versions, strict=False))

    def set_version(self, version: int) -> None:
        """Set the version counter of all handed-out leaves. Autograd refuses leaves that it saved at another version.

        Leaves with a tensor class of their own have no version that autograd checks. So these leaves and their aliases lose
        their memory. :meth:`give_memory_to_leaves` gives the memory back to leaves of the same version.
        """
        torch._C._autograd._unsafe_set_version_counter(self._aliases, (version,) * len(self._aliases))
        if not self._classed:
            return
        alive = self.take_memory_from_leaves()
        if version in (RELEASED_VERSION, self._version):
            self._handed_out = alive
        else:
            self._version = version

    def give_memory_to_leaves(self) -> None:
        """Give gathered memory back to leaves of tensor classes, and recompute their derived data, such as transposes."""
        for each in self._handed_out:
            each.give_memory(self.storage)
            each.recompute_derived_data()


FlatSizes = Sequence[tuple[int, torch.dtype]]
"""Flat tensors one after another in a run of memory: the number of elements and the dtype of each."""


def carve_tensors(memory: torch.Tensor, sizes: FlatSizes) -> list[torch.Tensor]:
    """Cut ``memory``, a tensor of bytes, into flat tensors of ``sizes``, one after another on aligned boundaries."""
    result, start = [], 0
    for numel, dtype in sizes:
        piece = memory[start : start + numel * dtype.itemsize]
        result.append(piece.view(dtype) if numel else torch.empty(0, dtype=dtype, device=memory.device))
        start += aligned(numel * dtype.itemsize)
    return result


ALIGNMENT = 128
"""Bytes: the boundary on which buffers in an arena begin."""


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def sizes_nbytes(sizes: FlatSizes) -> int:
    """Return the bytes that :func:`carve_tensors` needs for tensors of ``sizes``."""
    return sum(aligned(numel * dtype.itemsize) for numel, dtype in sizes)


def full_sizes(unit: UnitLayout) -> list[tuple[int, torch.dtype]]:
    """Return ``(number of elements, dtype)`` of each group as functions read it; 0 elements with a tensor class."""
    return [(0 if i in unit.tensor_classes else group.size, group.dtypes.compute) for i, group in enumerate(unit.groups)]


def full_sizes_of_encoded_groups(unit: UnitLayout) -> list[tuple[int, torch.dtype]]:
    """Return ``(number of elements, dtype)`` of each gathered buffer of formats that are not plain.

    A group with a tensor class has a buffer for the scales, and then one for each plane.
    """
    found = list[tuple[int, torch.dtype]]()
    for i, form in enumerate([group.dtypes.format for group in unit.groups]):
        if form is not None and i in unit.tensor_classes:
            sizes = [unit.scales_nbytes[i], *unit.use_gather_input_nbytes(i, unit.strategy.full)]
            found += [(size, torch.uint8) for size in sizes]
        elif form is not None:
            found.append((unit.stored_size(i, unit.strategy.full), form.buffer_dtype))
    return found


def full_nbytes(unit: UnitLayout) -> int:
    """Return the bytes of a unit's full parameters, as gathered and as decoded, each buffer on an aligned boundary."""
    return sizes_nbytes([*full_sizes(unit), *full_sizes_of_encoded_groups(unit)])


def outputs_by_axis(buffer: torch.Tensor, unit: UnitLayout, axes: Sequence[str], rank: int) -> list[torch.Tensor]:
    """Return the part of ``buffer`` that each gather along ``axes`` fills. The last gather fills the whole buffer."""
    outs = [buffer]
    for axis in reversed(axes[1:]):
        part = len(outs[0]) // unit.mesh.axis_size(axis)
        outs.insert(0, outs[0].narrow(0, unit.mesh.coord(axis, rank) * part, part))
    return outs
