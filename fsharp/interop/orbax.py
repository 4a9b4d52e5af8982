"""Orbax: its checkpoints read, and written. One process does either, without a process group."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import torch

from fsharp.checkpoint.catalog import Checkpoint, open_checkpoint
from fsharp.checkpoint.entries import Value
from fsharp.checkpoint.formats.conversion import check_options, described, write_converted
from fsharp.checkpoint.formats.exporting import names_below
from fsharp.checkpoint.shard_file import Tensor
from fsharp.errors import CheckpointError
from fsharp.functional.layout.paths import as_patterns, chosen
from fsharp.functional.layout.precision import dtype_name

_READ_NBYTES = 1 << 30
"""Bytes of tensors that are read together: Orbax reads its metadata again for each of its calls."""


def from_orbax(
    folder: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    step: int = 0,
    ignore: str | Sequence[str] = (),
    config: Any = None,
) -> Checkpoint:
    """Write a checkpoint under ``root`` with what an Orbax checkpoint of a pytree has in it; load that.

    Names are the keys, fields and indices of the pytree, joined by dots: ``params.layers.0.w``. Numbers and texts become
    values.

    Args:
        folder: of Orbax: what ``ocp.save`` or ``StandardCheckpointer().save`` was given.
        root: folder of checkpoints, as of :func:`fsharp.checkpoint.save`.
        step: to know the checkpoint by.
        ignore: patterns of names to leave out; each has to match one.
        config: kept in the manifest.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: Orbax cannot read the folder, or a leaf is no array of a dtype that torch has, number or text. Nothing
            is left.
        PatternError: a pattern that matches nothing.

    Cost: reads all of it, writes it as :func:`fsharp.checkpoint.save` does. Memory: 1 GiB, or one tensor if that is larger.
    Source: https://orbax.readthedocs.io
    """
    source, where = os.path.abspath(folder), "from_orbax()"
    config = check_options(where, step, config)
    tree = _asked(source, lambda: ocp.metadata(source).metadata)
    if tree is None:
        raise CheckpointError(f"{source}: Orbax does not say what is in it; its log has the reason.")
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    if len(leaves) != len(paths):
        raise CheckpointError(f"{source}: two leaves have the same name, as a key with a dot and one within another do.")
    left = chosen("from_orbax(ignore=)", as_patterns(ignore), list(leaves))
    entries = {
        name: described(name, _dtype(source, name, leaf.dtype), tuple(leaf.shape))
        for name, leaf in leaves.items()
        if name not in left and hasattr(leaf, "shape")
    }

    def load(names: set[str]) -> dict[str, Any]:
        asked = [ocp.PLACEHOLDER if name not in names else _like(leaf) for name, leaf in leaves.items()]
        found = _asked(source, lambda: ocp.load(source, jax.tree.unflatten(structure, asked)))
        return {name: leaf for name, leaf in zip(leaves, jax.tree.leaves(found), strict=True) if name in names}

    def read(tensors: list[Tensor]) -> Iterator[torch.Tensor]:
        for group in _groups(tensors):
            arrays = load({tensor.name for tensor in group})
            yield from (_as_tensor(arrays.pop(tensor.name), tensor) for tensor in group)

    others = set(leaves) - set(entries) - set(left)
    values: dict[str, Value] = load(others) if others else {}
    return write_converted(where, root, entries, values, read, step=step, config=config)


def to_orbax(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    subtree: str = "",
    rename: Callable[[str], str] | None = None,
) -> None:
    """Write tensors of a checkpoint as an Orbax checkpoint, which ``ocp.load`` reads as a pytree of arrays.

    Args:
        checkpoint: or its path.
        folder: a new one, a path.
        subtree: what to write: ``"params"`` of a TrainState. Numbers and texts are left out.
        rename: the name in Orbax of a name below ``subtree``. A dot in a name stands for a dict within a dict, and for a list
            where all keys are 0, 1 and so on.

    Raises:
        CheckpointError: the folder is there already, there is nothing to write, a tensor has no elements, which Orbax refuses,
            or has a dtype that numpy has no name for, or the checkpoint is damaged.

    Cost: reads what it writes, and compares it with its digests. Memory: all of it, which Orbax takes as one tree. Ranks
    that hold shards as arrays of JAX (:func:`fsharp.interop.jax.to_jax`) can save those by Orbax instead, each its own part.
    Source: https://orbax.readthedocs.io
    """
    found, target = open_checkpoint(checkpoint), os.path.abspath(folder)
    if os.path.exists(target):
        raise CheckpointError(f"to_orbax(): {target} is there already: choose another folder, or remove it.")
    tree: dict[str, Any] = {}
    names = names_below("to_orbax()", found, subtree, rename, aliases=True)
    names = {name: found.manifest.aliases.get(stored, stored) for name, stored in names.items()}
    if empty := [name for name, stored in names.items() if 0 in found.manifest.tensors[stored].shape]:
        raise CheckpointError(
            f"to_orbax(): {empty[0]!r} has no elements, and Orbax saves no such array. Leave it out by subtree=."
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
    _asked(target, lambda: ocp.save(target, _with_lists(tree)))


def _asked(folder: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # of any kind: Orbax has errors of its own, of tensorstore and of asyncio
        lines = str(error).splitlines() or [""]
        raise CheckpointError(f"{folder}: Orbax says {type(error).__name__}: {lines[0]:.300}") from error


def _dtype(folder: str, name: str, dtype: Any) -> torch.dtype:
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{folder}: {name!r} is {dtype}, which torch does not have. ignore={name!r} leaves it out.")
    return found


def _like(leaf: Any) -> Any:
    return np.empty(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def _groups(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(each.nbytes for each in group) + tensor.nbytes > _READ_NBYTES:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _as_tensor(array: Any, tensor: Tensor) -> torch.Tensor:
    elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(elements.copy() if not elements.flags.writeable else elements).view(tensor.dtype).view(tensor.shape)


def _as_array(name: str, tensor: torch.Tensor) -> Any:
    try:
        dtype = jax.numpy.dtype(dtype_name(tensor.dtype))
    except TypeError as error:
        raise CheckpointError(f"to_orbax(): {name!r} is {dtype_name(tensor.dtype)}, which numpy has no name for.") from error
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    parts = {key: _with_lists(part) for key, part in tree.items()}
    numbers = [str(i) for i in range(len(parts))]
    return [parts[key] for key in numbers] if set(numbers) == set(parts) else parts
