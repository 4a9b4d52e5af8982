"""Entries: the tensors and values of a tree by name, in coordinates of the whole tensors.

Under any strategy a rank holds one run of each flattened tensor, which follows from the layout. So each rank knows without
communication which elements each other rank holds and writes.
"""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import optree
import torch

from fsharp.checkpoint.formats.planes import EncodedLeaf, PlaneOfLeaf, planes_of_group
from fsharp.checkpoint.shard_file import SAVABLE_DTYPES
from fsharp.errors import TreeError, problem
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.residuals import PerRank as PerRank
from fsharp.functional.formats.format import tensor_text
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.sharded import Sharded, is_sharded
from fsharp.functional.layout.stored import decoded_buffer, is_encoded
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.functional.state import MadeBy
from fsharp.stateful.modules.parameter import ShardedTensor
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

Value = bool | int | float | str | None
_TOO_LARGE_INT = 10**4300
_MIN_WRITE_NBYTES = 1 << 16
"""Least bytes that a replica writes of a tensor; fewer replicas divide a small tensor."""
_LeafPieces = tuple[tuple[int, ...], Callable[[int], "Piece"], slice]
"""A leaf's whole shape, a function from a rank to the :class:`Piece` on this rank, and the range in this process's buffer."""


class Piece(NamedTuple):
    """Elements ``[first, last)`` of a flattened tensor on a rank: copy number ``replica`` of ``num_replicas`` equal copies."""

    first: int
    last: int
    replica: int = 0
    num_replicas: int = 1


@options_checked
class ModuleWithPerRankBuffers:
    """A wrapper that saves a module whose buffers differ between ranks, such as the statistics of BatchNorm.

    ::

        fs.checkpoint.save(root, {"model": ModuleWithPerRankBuffers(model), "optimizer": optimizer}, step=step, comm=comm)

    Buffers of all ranks are saved (see :class:`PerRank`), so the module loads on the same number of ranks. To load on another
    number, first make the buffers equal, for example by a mean over ranks, and save the module itself. ``module`` is a
    ShardedModule or any other module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, with each buffer (``register_buffer``) in a :class:`PerRank`."""
        found, own = self.module.state_dict(), dict(self.module.named_buffers(remove_duplicate=False))
        return {name: PerRank(value) if name in own else value for name, value in found.items()}

    @api_boundary
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state dict of :meth:`state_dict` into the module."""
        self.module.load_state_dict({name: x.value if isinstance(x, PerRank) else x for name, x in state.items()})


@dataclass(eq=False)
class TensorEntry:
    """A tensor of a tree, and the elements of it that each rank holds.

    Attributes:
        name: keys on the path to the leaf in the saved tree, joined by dots. The name does not depend on units.
        shape: shape of the whole tensor. If ranks along an axis hold different tensors, these are concatenated along dim 0.
        piece_of_rank: function from a rank to the :class:`Piece` that the rank holds.
        local: the elements of this rank, 1-D.
        is_replicated: whether the tensor has to be equal on all ranks, as a tensor outside of Sharded; ranks compare values.
        is_group_scalar: whether the value is one number for all leaves of a buffer, such as a step count.
        is_per_rank: whether each rank has a value of its own, in a :class:`PerRank`. Then dim 0 of ``shape`` counts ranks.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    piece_of_rank: Callable[[int], Piece]
    local: torch.Tensor
    is_replicated: bool = False
    is_group_scalar: bool = False
    is_per_rank: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    def release(self) -> None:
        """Release the memory of this rank's elements."""
        self.local = torch.empty(0, dtype=self.dtype, device="cpu")

    def range_written_by(self, rank: int) -> tuple[int, int]:
        """Return the range ``(first, last)`` of elements, maybe empty, that ``rank`` writes. Replicas divide the writing."""
        piece = self.piece_of_rank(rank)
        size = piece.last - piece.first
        writers = max(1, min(piece.num_replicas, size * self.dtype.itemsize // _MIN_WRITE_NBYTES))
        turn = (piece.replica + zlib.crc32(self.name.encode())) % piece.num_replicas
        if turn >= writers:
            return piece.first, piece.first
        return piece.first + size * turn // writers, piece.first + size * (turn + 1) // writers


@dataclass
class TreeContents:
    """The tensors and values of a tree, by name, as a checkpoint stores them.

    Attributes:
        entries, values: the tensors, and the values other than tensors, by name.
        aliases: for the name of each tied leaf the name of the leaf that stores its value.
        layouts: lines of text that say which rank holds which elements of each unit.
        objects: see :class:`~fsharp.checkpoint.manifest.Manifest`.
        settings: texts as keys, one for each ShardedModule in the tree, with all settings that it was given up to this save,
            for ranks to compare.
        encoded: by name, the encoded leaves, of which ``entries`` has planes and scales in place of values.
    """

    entries: dict[str, TensorEntry]
    values: dict[str, Value]
    aliases: dict[str, str]
    layouts: list[str]
    objects: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, None] = field(default_factory=dict)
    encoded: dict[str, EncodedLeaf] = field(default_factory=dict)

    def texts_to_compare(self) -> dict[str, str]:
        """Return two texts for ranks to compare: ``"tensors"`` with names, dtypes and shapes, and ``"layouts"``."""
        tensors = (f"{entry.name}: {tensor_text(entry)}" for entry in self.entries.values())
        return {"tensors": "\n".join(tensors), "layouts": "\n".join(self.layouts)}

    def release(self) -> None:
        """Release the memory of this rank's elements of all tensors; names, shapes and dtypes stay."""
        for entry in self.entries.values():
            entry.release()


def contents_of(where: str, tree: Any, comm: Comm, *, planes: bool = False) -> TreeContents:
    """Return the :class:`TreeContents` of a tree, of which this rank holds a part.

    ``where`` names the caller in errors. ``planes``: encoded parameters are entries of planes in place of decoded values.
    Raises TreeError for a leaf that cannot be saved, or if two leaves have one name.
    """
    found, parts, held = TreeContents({}, {}, {}, []), dict[int, str](), dict[Any, dict[str, _LeafPieces]]()
    for segments, entries, leaf in leaves_with_both_paths(tree):
        if is_sharded(leaf):
            _add_unit_entries(where, found, segments, entries, leaf, comm, planes=planes)
        elif isinstance(leaf, PerRank):
            for under, _, tensor in leaves_with_both_paths(leaf.value):
                _add_entry(where, found, _per_rank_entry(where, ".".join((*segments, *under)), tensor, comm))
        elif isinstance(leaf, ShardedTensor):
            name = ".".join(segments)
            owner = parts.setdefault(id(leaf), name)  # a parameter with several names is one ShardedTensor
            if owner == name:
                _add_entry(where, found, _sharded_tensor_entry(where, found, name, leaf, comm, held))
            else:
                found.aliases[name] = owner
        elif isinstance(leaf, torch.Tensor):
            _add_entry(where, found, _replicated_entry(where, ".".join(segments), leaf, comm.mesh))
        elif isinstance(leaf, MadeBy | bool | int | float | str):
            _check_new_name(where, found, name := ".".join(segments))
            if isinstance(leaf, int) and abs(leaf) >= _TOO_LARGE_INT:
                what = f"{name!r} is an integer of more than 4,300 digits, which JSON readers refuse: make it a text, hex(x)."
                raise TreeError(f"{where}: {what}")
            found.values[name] = leaf.name if isinstance(leaf, MadeBy) else leaf
        else:
            facts = [("got", f"{type(leaf).__name__} {leaf!r:.60}")]
            remedy = "Trees of Sharded, tensors, PerRank, numbers, strings and None can."
            raise TreeError(problem(where, f"{'.'.join(segments) or 'the tree'!r} cannot be in a checkpoint.", facts, remedy))
    # Optimizer state has no frozen leaves, and so none of their ties.
    for name in [name for name, owner in found.aliases.items() if owner not in found.entries]:
        del found.aliases[name]
    for alias, owner in [*found.aliases.items()] if planes else ():
        each = found.encoded.get(owner)
        found.aliases.update({alias + x[len(owner) :]: x for x in (*each.planes, *each.scales)} if each else {})
    return found


def apply_rename(where: str, name: str, rename: Callable[[str], str] | None) -> str:
    """Return ``rename(name)``; ``name`` if ``rename`` is None. Raises TreeError if the result is not a string."""
    new = name if rename is None else rename(name)
    if not isinstance(new, str):
        raise TreeError(f"{where}: rename returned {new!r:.60} for {name!r}, expected a name.")
    return new


def has_state_dict(leaf: Any) -> bool:
    """Return whether ``leaf`` has ``state_dict()`` and ``load_state_dict()``. Checkpoints save the state dict in its place."""
    return callable(getattr(leaf, "state_dict", None)) and callable(getattr(leaf, "load_state_dict", None))


def with_state_dicts(tree: Any) -> Any:
    """Return ``tree`` with the state dict in place of each object of :func:`has_state_dict`, and dicts in place of Counters."""
    return optree.tree_map(
        lambda leaf: counters_to_dicts(leaf.state_dict()) if has_state_dict(leaf) else leaf, tree, is_leaf=is_node_saved_as_leaf
    )


def leaf_type_texts(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield ``(name, kind)`` for each leaf of a tree, and of state dicts in it. Kinds: ``"a number"``, ``"float32[2]"``, etc.

    An optimizer is one leaf, as its state grows. The kind of optimizers, Sharded trees and leaves of state dicts is ``""``.
    """
    for path, _, leaf in leaves_with_both_paths(tree):
        if not has_state_dict(leaf) or hasattr(leaf, "state_template"):
            yield ".".join(path), _leaf_type_text(leaf)
        else:
            for under, _, _ in leaves_with_both_paths(counters_to_dicts(leaf.state_dict())):
                yield ".".join((*path, *under)), ""


def _leaf_type_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, ShardedTensor):
        return tensor_text(leaf)
    kinds: dict[type | None, str] = {bool: "True or False", float: "a number", str: "a text"}
    return kinds[type_with_ints_as_float(leaf)] if isinstance(leaf, bool | int | float | str) else ""


def type_with_ints_as_float(value: Value) -> type | None:
    """Return the type of ``value``, but float for an int, as a learning rate of 1 may become 0.9; None for None."""
    if isinstance(value, bool | str):
        return bool if isinstance(value, bool) else str
    return None if value is None else float


def counters_to_dicts(state: Any) -> Any:
    """Return ``state`` with a dict in place of each ``collections.Counter``, as in torch's MultiStepLR."""
    return optree.tree_map(lambda x: dict(x) if isinstance(x, Counter) else x, state, is_leaf=is_node_saved_as_leaf)


def load_if_object(owner: Any, state: Any) -> Any:
    """Call ``owner.load_state_dict(state)``, and return ``owner``. If ``has_state_dict(owner)`` is False, return ``state``.

    Where the state dict of ``owner`` has a ``collections.Counter``, the dict in ``state`` is first made a Counter again.
    """
    if not has_state_dict(owner):
        return state
    if not hasattr(owner, "state_template"):  # a Counter has other keys before its first count
        was = owner.state_dict()
        state = optree.tree_map(
            lambda x, new: Counter(new) if isinstance(x, Counter) else new, was, state, is_leaf=is_node_saved_as_leaf
        )
    owner.load_state_dict(state)
    return owner


def tree_to_load_into(tree: Any, has: Callable[[str], bool], shape_of: Callable[[str], tuple[int, ...] | None]) -> Any:
    """Return a tree for the values of a checkpoint: like ``tree``, with state dicts in place of objects.

    Each ShardedTensor is cloned. An object whose state grows in its first step, such as an optimizer, is replaced by its
    ``state_template(has)``. A module's extra state, which is 1-D, gets the shape that it has in the checkpoint.

    ``has(name)`` returns whether the checkpoint has a tensor or value with this dotted name, or below it. ``shape_of(name)``
    returns the shape of a tensor in the checkpoint, or None if there is no such tensor.
    """
    copies = dict[int, tuple[ShardedTensor, torch.Tensor]]()  # with the tensor, which keeps its address from being reused

    def copy_if_part(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor):
            return leaf
        return copies.setdefault(id(leaf), (leaf, leaf.clone()))[1]

    def value_to_fill(segments: tuple[str, ...], leaf: Any) -> Any:
        if not has_state_dict(leaf):
            return copy_if_part(leaf)
        prefix = ".".join((*segments, ""))
        make = getattr(leaf, "state_template", None)
        if make is None:
            state = counters_to_dicts(leaf.state_dict())
            if isinstance(leaf, torch.nn.Module | ModuleWithPerRankBuffers):
                state = {name: _resized_extra_state(name, value, shape_of(prefix + name)) for name, value in state.items()}
            return optree.tree_map(copy_if_part, state, is_leaf=is_node_saved_as_leaf)
        return make(lambda name: has(prefix + name))

    leaves = [value_to_fill(segments, leaf) for segments, _, leaf in leaves_with_both_paths(tree)]
    return optree.tree_unflatten(optree.tree_structure(tree, is_leaf=is_node_saved_as_leaf), leaves)


def _resized_extra_state(name: str, value: Any, shape: tuple[int, ...] | None) -> Any:
    """Return ``value`` of a module's state dict; for extra state, new memory of ``shape``, its shape in the checkpoint."""
    is_extra = name.rpartition(".")[2] == "_extra_state" and isinstance(value, torch.Tensor) and value.dtype is torch.uint8
    return value.new_empty(shape) if is_extra and shape is not None and len(shape) == value.ndim == 1 else value


def is_node_saved_as_leaf(leaf: Any) -> bool:
    """Return whether ``leaf`` is a pytree node that checkpoints save as a leaf: a Sharded, PerRank or MadeBy."""
    return is_sharded(leaf) or isinstance(leaf, PerRank | MadeBy)


def leaves_with_both_paths(
    tree: Any, is_leaf: Callable[[Any], bool] = is_node_saved_as_leaf, *, none_is_leaf: bool = False
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Any]]:
    """Yield ``(path, path as in plan(), leaf)``. The first path has the names of a named tuple's fields, the second numbers."""
    try:
        accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf, none_is_leaf=none_is_leaf)
    except RecursionError as error:
        raise too_deep_error() from error
    for accessor, leaf in zip(accessors, leaves, strict=True):
        named = tuple(str(getattr(each, "field", None) or each.entry) for each in accessor)
        yield named, tuple(str(each.entry) for each in accessor), leaf


def too_deep_error() -> TreeError:
    """Return the error for a tree that nests more deeply than optree or Python can follow."""
    return TreeError(
        f"the tree nests too deeply for a checkpoint: expected fewer than {optree.MAX_RECURSION_DEPTH:,} levels, or fewer than "
        "400 in lists of numbers. Keep the links of a chain side by side in one list."
    )


def _add_unit_entries(
    where: str,
    found: TreeContents,
    segments: tuple[str, ...],
    entries: tuple[str, ...],
    node: Sharded,
    comm: Comm,
    *,
    planes: bool,
) -> None:
    unit, own = node.unit, tuple(node.unit.name.split(".")) if node.unit.name else ()
    is_alone = bool(own) and entries[len(entries) - len(own) :] != own  # taken out of its planned tree
    # Names do not depend on units: a name is the keys above the planned tree, and the keys in it.
    above, path = (segments, "") if is_alone else (segments[: len(segments) - len(own)], unit.name)
    if unit.mesh != comm.mesh:
        raise TreeError(f"{where}: unit {unit.display_name} is laid out on {unit.mesh}, and the Comm is on {comm.mesh}.")
    if node.place.partial_axes:
        raise TreeError(f"{where}: unit {unit.display_name} rests partial ({node.place}): reduce_scatter() it first.")
    if node.is_donated:
        raise TreeError(f"{where}: unit {unit.display_name} belongs to a donated state. Use the state that was returned.")

    root = ".".join(part for part in (*above, path) if part)

    def name(below: str) -> str:
        return f"{root}.{below}" if root and below else root or below

    found.layouts.append(f"{name('') or '(root)'}: {_layout_text_to_compare(unit, node.place)}")
    rows, pieces = [*zip(node.groups, node.buffers, strict=True)], _leaves_on_ranks_by_path(unit, node.place, comm.rank)
    for group, buffer in rows if planes else ():
        if is_encoded(unit, group, buffer) and buffer.shape == (unit.stored_size(group, node.place),):
            _add_planes(where, found, name, node, group, pieces, comm)
    rows = [(g, x) for g, x in rows if not (planes and is_encoded(unit, g, x))]
    held = {g: decoded_buffer(unit, g, x, node.place, comm.rank, in_main_dtype=True) for g, x in rows}
    sizes = {group: unit.local_size(group, node.place) for group in held}
    one_number = {group: is_group_scalar(buffer, unit, group, node.place) for group, buffer in held.items()}
    for leaf in unit.leaves:
        if leaf.tied_to is not None:
            found.aliases[name(leaf.path)] = ".".join((*above, unit.path_of_tie_owner(leaf)))
        elif leaf.group in held:
            buffer = held[leaf.group]
            if one_number[leaf.group]:
                entry = replace(_replicated_entry(where, name(leaf.path), buffer.reshape(()), unit.mesh), is_group_scalar=True)
            elif buffer.dim() == 1 and len(buffer) == sizes[leaf.group]:
                shape, piece, own_range = pieces[leaf.path]
                entry = TensorEntry(name(leaf.path), buffer.dtype, shape, piece, buffer.detach()[own_range])
            else:
                raise TreeError(
                    f"{where}: {name(leaf.path)!r} is in a buffer of shape {list(buffer.shape)}, expected one value, or one "
                    f"for each of the {sizes[leaf.group]} elements of unit {unit.display_name} on this rank."
                )
            _add_entry(where, found, entry)


def _add_planes(
    where: str,
    found: TreeContents,
    name: Callable[[str], str],
    node: Sharded,
    group: int,
    pieces: dict[str, _LeafPieces],
    comm: Comm,
) -> None:
    """Add entries for planes and scales of the leaves of ``group``. ``name``, ``pieces``: a leaf's name and pieces, by path."""
    if node.unit.varying_axes:
        facts = [("axes along which ranks hold different parameters", ", ".join(node.unit.varying_axes))]
        raise TreeError(problem(where, f"planes=True is not for unit {node.unit.display_name}.", facts, "Save without planes."))
    for leaf, made, planes, scales in planes_of_group(name, node, group, comm.rank):
        found.encoded[name(leaf.path)] = made
        found.layouts.append(f"{name(leaf.path)}: {made}")
        for plane_name, plane in zip(made.planes, planes, strict=True):

            def piece(of: int, plane: PlaneOfLeaf = plane, path: str = leaf.path) -> Piece:
                first, last, *replica = pieces[path][1](of)
                return Piece(*plane.range_of(first, last), *replica)

            _add_entry(where, found, TensorEntry(plane_name, plane.numbers.dtype, plane.shape, piece, plane.numbers))
        for scale_name, scale in zip(made.scales, scales, strict=True):
            _add_entry(where, found, _replicated_entry(where, scale_name, scale, node.unit.mesh))


def _sharded_tensor_entry(
    where: str, found: TreeContents, name: str, part: ShardedTensor, comm: Comm, known: dict[Any, dict[str, _LeafPieces]]
) -> TensorEntry:
    """Return the entry of ``part``, a ShardedTensor in a state dict. ``known`` caches :func:`_leaves_on_ranks_by_path`."""
    unit, leaf, place = part.unit, part.leaf, part.place
    if unit.mesh != comm.mesh or part.rank != comm.rank:
        raise TreeError(
            f"{where}: {name!r} is a part that rank {part.rank} of {unit.mesh} holds, and this is rank {comm.rank} of "
            f"{comm.mesh}. Pass the Comm of the module: comm=model.comm."
        )
    if (held := known.get((id(unit), place))) is None:
        held = known[id(unit), place] = _leaves_on_ranks_by_path(unit, place, comm.rank)
        found.layouts.append(f"unit {unit.display_name}: {_layout_text_to_compare(unit, place)}")
    shape, piece, _ = held[leaf.path]
    found.layouts.append(f"{name}: in unit {unit.display_name}, {place}")
    if (owner := part.owner()) is not None:
        found.settings[owner.settings_text_to_compare()] = None
    return TensorEntry(name, part.dtype, shape, piece, part.local.view(-1))


def is_group_scalar(buffer: torch.Tensor, unit: UnitLayout, group: int, place: MeshPlacement) -> bool:
    """Return whether ``buffer``, optimizer state of a group at ``place``, is one number for the group, such as a step count.

    If the group has one element on a rank, ``buffer`` may also be the state of this element. In this case ``buffer`` counts as
    one number for the group if it has no dims. So it does if its dtype, such as int64, is neither a floating-point dtype nor a
    dtype of the group.
    """
    if buffer.numel() != 1 or unit.local_size(group, place) != 1:
        return buffer.numel() == 1
    dtypes = unit.groups[group].dtypes
    return buffer.dim() == 0 or not (buffer.is_floating_point() or buffer.dtype in (dtypes.compute, dtypes.main))


@lru_cache(maxsize=1 << 14)
def _layout_text_to_compare(unit: UnitLayout, place: MeshPlacement) -> str:
    """Return a text that says which rank holds which elements of a unit at ``place``, for ranks to compare."""
    parts = [f"{group.num_parts} x {group.capacity}" for group in unit.groups]
    return f"{place}; {parts}, leaves at {[leaf.offset for leaf in unit.leaves]}"


@lru_cache(maxsize=1 << 14)
def _leaves_on_ranks_by_path(unit: UnitLayout, place: MeshPlacement, rank: int) -> dict[str, _LeafPieces]:
    """Return, by path, a :class:`_LeafPieces` for each leaf that a unit stores; tied leaves have none."""
    mesh = unit.mesh
    varying = [axis for axis in mesh.names if axis in place.varying_axes]
    copies = [axis for axis in mesh.names if axis not in place.sharded_axes and axis not in varying]
    num_kinds, num_copies = (math.prod(map(mesh.axis_size, axes)) for axes in (varying, copies))

    def pieces_of(leaf: Leaf) -> _LeafPieces:
        def piece(of: int) -> Piece:
            base, (first, last) = mesh.index_along(varying, of) * leaf.numel, unit.leaf_range_on_rank(leaf, place, of)
            return Piece(base + first, base + last, mesh.index_along(copies, of), num_copies)

        mine, (first, last) = piece(rank), unit.leaf_range_on_rank(leaf, place, rank)
        begin = first + leaf.offset - unit.local_start(leaf.group, place, rank) if first < last else 0
        shape = leaf.shape if not varying else (num_kinds * (leaf.shape[0] if leaf.shape else 1), *leaf.shape[1:])
        own_range = slice(begin, begin + last - first)
        return tuple(shape), lambda of: mine if of == rank else piece(of), own_range

    return {leaf.path: pieces_of(leaf) for leaf in unit.leaves if leaf.tied_to is None}


def _replicated_entry(where: str, name: str, tensor: torch.Tensor, mesh: Mesh) -> TensorEntry:
    n, local = tensor.numel(), _flatten_plain_tensor(where, name, tensor)
    shape = tuple(tensor.shape)
    return TensorEntry(name, tensor.dtype, shape, lambda rank: Piece(0, n, rank, mesh.size), local, is_replicated=True)


def _per_rank_entry(where: str, name: str, tensor: Any, comm: Comm) -> TensorEntry:
    if not isinstance(tensor, torch.Tensor):
        raise TreeError(f"{where}: {name!r} is {type(tensor).__name__} {tensor!r:.60}: PerRank is for tensors.")
    n, local = tensor.numel(), _flatten_plain_tensor(where, name, tensor)
    shape = (comm.mesh.size, *tensor.shape)
    return TensorEntry(name, tensor.dtype, shape, lambda rank: Piece(rank * n, (rank + 1) * n), local, is_per_rank=True)


def _flatten_plain_tensor(where: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = "nested tensor" if tensor.is_nested else type(tensor).__name__
        raise TreeError(f"{where}: {name!r} is a {kind} of layout {tensor.layout}, expected a dense tensor.")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _add_entry(where: str, found: TreeContents, entry: TensorEntry) -> None:
    _check_new_name(where, found, entry.name)
    if entry.dtype not in SAVABLE_DTYPES:
        raise TreeError(f"{where}: {entry.name!r} has dtype {entry.dtype}, which cannot be in a checkpoint.")
    found.entries[entry.name] = entry


def _check_new_name(where: str, found: TreeContents, name: str) -> None:
    if name in found.entries or name in found.values:
        raise TreeError(f"{where}: two leaves of the tree have the name {name!r}: rename a key.")
