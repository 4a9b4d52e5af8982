"""agree_at_start: compare the settings, the code and the tree of all ranks before training."""

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optree
import torch

import fsharp
from fsharp.checkpoint.entries import is_node_saved_as_leaf, leaves_with_both_paths, with_state_dicts
from fsharp.errors import RunError
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import tensor_text
from fsharp.functional.layout.sharded import is_sharded, units_of
from fsharp.functional.layout.text import unit_texts_by_property
from fsharp.functional.tree.paths import join_path
from fsharp.type_checks import options_checked

_ADDRESS_PATTERN = re.compile(r" at 0x[0-9a-f]+")  # of a function in a node, such as a defaultdict's factory


@options_checked
def agree_at_start(config: Mapping[str, Any], tree: Any = None, *, comm: Comm, files: Sequence[str | Path] = ()) -> None:
    """Compare config, tree, layout, mesh, versions and code between ranks, and raise an error on all ranks if they differ.

    Args:
        config: settings that decide the results, such as learning rate, seed and paths, as a value that JSON can hold.
        tree: the tree to train. Structure, shapes, dtypes, layout, numbers and texts are compared, values of tensors are not.
        comm: the ranks.
        files: source files whose bytes are compared.

    Raises:
        AgreementError: a field differs, or some ranks have failed, for example because a file is missing. The message has the
            field, its values and the ranks.
        RunError: on every rank JSON cannot hold the config, or a file cannot be read.

    Cost: one collective of 40 bytes for each axis; more only if something differs.
    """

    def fields() -> dict[str, str]:
        nodes = units_of(tree)
        found = {f"config.{name}": text for name, text in _config_fields(config)}
        layout = unit_texts_by_property([node.unit for node in nodes]) if nodes else {}
        found |= {f"layout: {name}": text for name, text in layout.items()}
        found |= {f"file {path}": _file_digest(path) for path in files}
        structure = _ADDRESS_PATTERN.sub("", str(optree.tree_structure(tree, is_leaf=is_node_saved_as_leaf)))
        found |= {"mesh": str(comm.mesh), "tree": "\n".join(_leaf_lines(tree)), "structure": structure}
        return found | {"fsharp": fsharp.__version__, "torch": torch.__version__, "python": platform.python_version()}

    check_on_all_ranks("agree_at_start()", comm, fields, lambda found: found)


def _file_digest(path: str | Path) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(
            f"files: {str(path)!r} cannot be read ({error.strerror}), in the folder {os.getcwd()!r}. Pass source files that "
            "have to be equal on all ranks, such as files=[__file__]."
        ) from error


def _config_fields(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    if isinstance(config, Mapping) and config:
        for key, value in config.items():
            yield from _config_fields(value, (*path, str(key).replace(".", "\\.")))
        return
    try:
        yield join_path(path), json.dumps(config, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise RunError(f"config: {join_path(path)!r} is {config!r}, expected a number, text, list or dict of JSON.") from error


def _leaf_lines(tree: Any) -> Iterator[str]:
    for path, _, leaf in leaves_with_both_paths(with_state_dicts(tree)):
        if is_sharded(leaf):
            yield f"{join_path(path)}: {leaf.name!r} at {leaf.place}"
        elif isinstance(leaf, torch.Tensor):
            yield f"{join_path(path)}: {tensor_text(leaf)}"
        else:
            value = f" {leaf!r}" if isinstance(leaf, bool | int | float | str) else ""
            yield f"{join_path(path)}: {type(leaf).__name__}{value}"
