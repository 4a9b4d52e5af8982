"""Conversions from and to Orbax checkpoints, each by one process without a process group."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import torch

from fsharp.checkpoint.catalog import Checkpoint, open_checkpoint
from fsharp.checkpoint.entries import TensorEntry, Value
from fsharp.checkpoint.formats.conversion import whole_entry, write_converted
from fsharp.checkpoint.formats.exporting import refuse_planes, stored_name_by_new_name
from fsharp.checkpoint.saving import checked_config
from fsharp.checkpoint.shard_file import SAVABLE_DTYPES, StoredTensor, batches_by_nbytes
from fsharp.errors import CheckpointError, OptionError
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.tree.paths import as_patterns, select_paths
from fsharp.type_checks import options_checked

_READ_NBYTES = 1 << 30  # bytes to read in one call of Orbax, which reads its metadata again in each call
_METADATA_FILE = "_CHECKPOINT_METADATA"
"""A file that Orbax writes into the folder of each checkpoint."""
_MOST_LEVELS = 300
"""Most levels of a tree that is written: Orbax can write 400, and then cannot read them."""
_BOOL_REMEDY = "Orbax describes no tree with a Python bool: load it by ocp.load(), and save jnp.array(x) for each bool x."


class _OrbaxSlice(NamedTuple):
    """The source of a tensor in an Orbax checkpoint: the array ``leaf``, or its slice with index ``layer`` along ``dim``."""

    leaf: str
    dim: int = 0
    layer: int | None = None

    def of(self, array: Any) -> Any:
        """Return the tensor's elements, as an array, from ``array``, the array of the whole leaf."""
        return array if self.layer is None else array.take(self.layer, self.dim)


@options_checked
def from_orbax(
    folder: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    step: int = 0,
    ignore: str | Sequence[str] = (),
    unstack: Mapping[str, int] | None = None,
    config: Any = None,
) -> Checkpoint:
    """Convert an Orbax checkpoint of a pytree to a checkpoint under ``root``, which :func:`fsharp.checkpoint.load` reads.

    Names are the keys, fields and indices of the pytree, joined by dots: ``params.layers.0.w``. Numbers and texts are stored as
    they are, not as tensors. If the checkpoint has several pytrees, as ``Composite`` and ``ocp.save_checkpointables`` make
    them, names begin with the name of the pytree. Other items of a ``Composite``, such as JSON, are left out.

    Args:
        folder: the folder that ``ocp.save`` or ``StandardCheckpointer().save`` has written, or the folder of one step that a
            ``CheckpointManager`` has written.
        root: folder of checkpoints, in which the new checkpoint gets a folder.
        step: number of the step, in the checkpoint's name.
        ignore: patterns of names to leave out; each has to match a name.
        unstack: dict from the path of a subtree whose leaves hold all layers, as ``lax.scan`` takes them, to the dim that
            counts layers. With ``{"params.layers": 0}`` a leaf ``params.layers.w`` of shape ``[8, 4, 3]`` becomes the tensors
            ``params.layers.0.w`` to ``params.layers.7.w`` of shape ``[4, 3]``. So a unit can be a layer.
        config: config of the new checkpoint, a value that JSON can hold.

    Raises:
        CheckpointError: Orbax or torch cannot hold a leaf, or ``unstack`` does not fit.
        OptionError: an argument has a wrong type.
        PatternError: a pattern matches nothing.

    Cost: reads the folder, and writes as :func:`fsharp.checkpoint.save` does. Memory: 1 GiB, or one leaf and a slice of it if
    that is more.
    Source: https://orbax.readthedocs.io
    """
    source, where = os.path.abspath(folder), "from_orbax()"
    config = checked_config(where, step, config)
    trees = _metadata_of_each_pytree(source)
    first_key = 1 if len(trees) == 1 else 0
    paths, structure = jax.tree_util.tree_flatten_with_path(trees)
    leaves = {jax.tree_util.keystr(path[first_key:], simple=True, separator="."): leaf for path, leaf in paths}
    if len(leaves) != len(paths):
        raise CheckpointError(f"{source}: two leaves have the same name, such as the keys 'a.b' and 'b' within 'a'.")
    left = select_paths("from_orbax(ignore=)", as_patterns(ignore), list(leaves))
    arrays = {name: leaf for name, leaf in leaves.items() if name not in left and hasattr(leaf, "shape")}
    _check_dims(where, "unstack", unstack)
    sources = _sources(where, {name: tuple(leaf.shape) for name, leaf in arrays.items()}, unstack or {})
    entries = dict[str, TensorEntry]()
    for name, of in sources.items():
        leaf = arrays[of.leaf]
        shape = tuple(size for dim, size in enumerate(leaf.shape) if of.layer is None or dim != of.dim)
        entries[name] = whole_entry(name, _torch_dtype(source, of.leaf, leaf.dtype), shape)

    def load(names: set[str]) -> dict[str, Any]:
        asked = [ocp.PLACEHOLDER if name not in names else _empty_like(leaf) for name, leaf in leaves.items()]
        found = {item: _load_item_as_numpy(source, item, tree) for item, tree in jax.tree.unflatten(structure, asked).items()}
        return {name: leaf for name, leaf in zip(leaves, jax.tree.leaves(found), strict=True) if name in names}

    def read(tensors: list[StoredTensor]) -> Iterator[torch.Tensor]:
        loaded = dict[str, Any]()
        for group in batches_by_nbytes(tensors, _READ_NBYTES):
            asked = {sources[tensor.name].leaf for tensor in group}
            loaded = {name: loaded[name] for name in asked & loaded.keys()}  # slices of one leaf follow each other
            loaded |= load(asked - loaded.keys())
            yield from (_as_tensor(sources[tensor.name].of(loaded[sources[tensor.name].leaf]), tensor) for tensor in group)

    others = set(leaves) - set(arrays) - set(left)
    values: dict[str, Value] = load(others) if others else {}
    return write_converted(where, root, entries, values, read, step=step, config=config)


@options_checked
def to_orbax(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    subtree: str = "",
    rename: Callable[[str], str] | None = None,
    stack: Mapping[str, int] | None = None,
) -> None:
    """Write tensors of a checkpoint as an Orbax checkpoint, which ``ocp.load`` reads as a pytree of arrays.

    Args:
        checkpoint: a checkpoint or its path.
        folder: path of a new folder.
        subtree: the subtree to write, such as ``"params"`` of a TrainState. Numbers and texts are left out.
        rename: returns Orbax's name for a name below ``subtree``. A dot in a name means a dict within a dict; a dict whose keys
            are 0, 1 and so on becomes a list.
        stack: dict from the path of a list of layers, in names after ``rename``, to the dim along which leaves of the layers
            are stacked. With ``{"layers": 0}`` the leaves ``layers.0.w`` to ``layers.7.w`` become one leaf ``layers.w``, as
            ``lax.scan`` takes it. This is the inverse of ``unstack`` of :func:`from_orbax`.

    Raises:
        CheckpointError: the folder exists or has an unusable path, or the checkpoint is damaged or empty.
        CheckpointError: Orbax or numpy cannot hold a tensor or name, or ``stack`` does not fit.
        CheckpointError: a tensor to write was saved with ``planes=True``.
        OptionError: an argument has a wrong type.

    Cost: reads the tensors, and checks their digests. Memory: all of these tensors, which Orbax takes as one tree. Ranks that
    hold shards as JAX arrays (:func:`fsharp.interop.jax.to_jax`) can instead save their own parts by Orbax.
    Source: https://orbax.readthedocs.io
    """
    _check_dims("to_orbax()", "stack", stack)
    found, target = open_checkpoint(checkpoint), os.path.abspath(folder)
    if os.path.exists(target):
        raise CheckpointError(f"to_orbax(): {target} exists already: choose another folder, or remove it.")
    if special := [character for character in target if character in "*?[\\"]:
        raise CheckpointError(
            f"to_orbax(): {target} has {special[0]!r}. Orbax takes paths for patterns of file names, and would write a "
            "checkpoint without arrays there. Choose another folder."
        )
    tree: dict[str, Any] = {}
    names = stored_name_by_new_name("to_orbax()", found, subtree, rename, aliases=True)
    refuse_planes("to_orbax()", found, names.values())
    names = {name: found.manifest.aliases.get(stored, stored) for name, stored in names.items()}
    if empty := [name for name, stored in names.items() if 0 in found.manifest.tensors[stored].shape]:
        raise CheckpointError(f"to_orbax(): {empty[0]!r} has no elements, which Orbax cannot save. Leave it out by subtree=.")
    if deep := [name for name in names if name.count(".") > _MOST_LEVELS]:
        raise CheckpointError(
            f"to_orbax(): '{deep[0]:.40}... nests {deep[0].count('.'):,} levels, of which Orbax can read {_MOST_LEVELS}. Give "
            "shorter names by rename=."
        )
    for name, stored in names.items():
        array = _as_array(name, found.tensor(stored))
        node, keys = tree, name.split(".")
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"to_orbax(): {name!r} lies within another tensor. Give another name by rename=.")
        if keys[-1] in node:
            raise CheckpointError(f"to_orbax(): {name!r} has other tensors within it. Give another name by rename=.")
        node[keys[-1]] = array
    for path, dim in (stack or {}).items():
        *parents, last = path.split(".")
        parent: Any = tree
        for key in parents:
            parent = parent.get(key) if isinstance(parent, dict) else None
        layers = parent.get(last) if isinstance(parent, dict) else None
        parent[last] = _stack_layers(path, layers, dim)
    is_one_array = list(names) == [""]
    _call_orbax(target, lambda: ocp.save(target, tree[""] if is_one_array else _dicts_as_lists(tree)))


def _metadata_of_each_pytree(folder: str) -> dict[str, Any]:
    """Return the metadata of each pytree in a checkpoint, by the name under which Orbax loads the pytree."""

    def items() -> Any:
        with suppress(ocp.errors.InvalidLayoutError):  # the pytree has no name, or there is no checkpoint, as Orbax says below
            return ocp.checkpointables_metadata(folder).metadata
        return {}

    if trees := {item: tree for item, tree in _call_orbax(folder, items).items() if tree is not None}:
        return trees
    names = os.listdir(folder) if os.path.isdir(folder) else []
    inside = [name for name in names if os.path.exists(f"{folder}/{name}/{_METADATA_FILE}")]
    if inside and _METADATA_FILE not in names:
        newest = max(inside, key=lambda name: (len(name), name))
        raise CheckpointError(f"{folder}: there is no checkpoint here. Pass one inside of it, such as {folder}/{newest}.")
    tree = _call_orbax(folder, lambda: ocp.metadata(folder).metadata)
    if tree is None:
        raise CheckpointError(f"{folder}: Orbax finds no metadata in this folder; its log has the reason. {_BOOL_REMEDY}")
    return {"AUTO": tree}  # Orbax's default


def _load_item_as_numpy(folder: str, item: str, tree: Any) -> Any:
    if all(leaf is ocp.PLACEHOLDER for leaf in jax.tree.leaves(tree)):
        return tree
    return _call_orbax(folder, lambda: ocp.load(folder, tree, checkpointable_name=item))


def _call_orbax(folder: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # of any class: Orbax raises its own errors, and those of tensorstore and asyncio
        text = "".join(str(error).splitlines()[:1]).removesuffix(".")
        remedy = f" {_BOOL_REMEDY}" if text == "Unsupported dtype: bool" else ""
        raise CheckpointError(f"{folder}: Orbax says {type(error).__name__}: {text:.300}.{remedy}") from error


def _check_dims(where: str, name: str, dims: Mapping[str, Any] | None) -> None:
    for path, dim in (dims or {}).items():
        if not isinstance(path, str) or type(dim) is not int:
            raise OptionError(f"{where}: {name} has {path!r}: {dim!r}, expected a path as a str, and the number of a dim.")


def _sources(where: str, shapes: Mapping[str, tuple[int, ...]], unstack: Mapping[str, int]) -> dict[str, _OrbaxSlice]:
    """Return, by name, the source of each tensor to write, given the shapes of the leaves, and the subtrees to ``unstack``."""
    found = dict[str, _OrbaxSlice]()
    first_leaf = dict[str, str]()
    for name, shape in shapes.items():
        paths = [path for path in unstack if f"{name}.".startswith(f"{path}.")]
        if not paths:
            found[name] = _OrbaxSlice(name)
            continue
        path, dim = paths[0], unstack[paths[0]]
        first = first_leaf.setdefault(path, name)
        if len(paths) > 1:
            raise CheckpointError(f"{where}: unstack has {paths[0]!r} and {paths[1]!r}, of which both contain {name!r}.")
        if not 0 <= dim < len(shape) or shape[dim] != shapes[first][dim]:
            raise CheckpointError(
                f"{where}: unstack={{{path!r}: {dim}}} asks for the layers of {name!r}, whose shape is {list(shape)}; "
                f"{first!r} has the shape {list(shapes[first])}. All leaves need one number of layers in dim {dim}: name the "
                f"subtrees that have them, each with its dim."
            )
        for i in range(shape[dim]):
            new = f"{path}.{i}{name.removeprefix(path)}"
            if new in shapes:
                raise CheckpointError(f"{where}: layer {i} of {name!r} would have the name {new!r}, which another array has.")
            found[new] = _OrbaxSlice(name, dim, i)
    if absent := [path for path in unstack if path not in first_leaf]:
        raise CheckpointError(f"{where}: unstack names {absent[0]!r}, which has no arrays. Arrays: {list(shapes)[:8]}.")
    return found


def _stack_layers(path: str, layers: Any, dim: int) -> Any:
    count = len(layers) if isinstance(layers, dict) else 0
    if not count or set(layers) != {str(i) for i in range(count)}:
        raise CheckpointError(f"to_orbax(): stack names {path!r}, which is not a list of layers in the checkpoint.")
    parts = [layers[str(i)] for i in range(count)]
    kinds = [jax.tree.map(lambda array: f"{array.dtype} {list(array.shape)}", part) for part in parts]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise CheckpointError(f"to_orbax(): {path!r} cannot be stacked: layer {i} is {kind}, and layer 0 is {kinds[0]}.")
    if not 0 <= dim <= min(array.ndim for array in jax.tree.leaves(parts)):
        raise CheckpointError(f"to_orbax(): stack={{{path!r}: {dim}}} asks for a dim that not all leaves can have: {kinds[0]}.")
    return jax.tree.map(lambda *arrays: np.stack(arrays, dim), *parts)


def _torch_dtype(folder: str, name: str, dtype: Any) -> torch.dtype:
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or found not in SAVABLE_DTYPES:
        raise CheckpointError(f"{folder}: {name!r} is {dtype}, which torch does not have. ignore={name!r} leaves it out.")
    return found


def _empty_like(leaf: Any) -> Any:
    return np.empty(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def _as_tensor(array: Any, tensor: StoredTensor) -> torch.Tensor:
    elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(elements.copy() if not elements.flags.writeable else elements).view(tensor.dtype).view(tensor.shape)


def _as_array(name: str, tensor: torch.Tensor) -> Any:
    try:
        dtype = jax.numpy.dtype(dtype_name(tensor.dtype))
    except TypeError as error:
        raise CheckpointError(f"to_orbax(): {name!r} is {dtype_name(tensor.dtype)}, which numpy has no name for.") from error
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))


def _dicts_as_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    parts = {key: _dicts_as_lists(part) for key, part in tree.items()}
    numbers = [str(i) for i in range(len(parts))]
    return [parts[key] for key in numbers] if set(numbers) == set(parts) else parts
