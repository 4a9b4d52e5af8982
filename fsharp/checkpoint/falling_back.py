"""Falling back: if one rank has found damage in a checkpoint, all ranks go back to the checkpoint before."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fsharp.checkpoint.storage import storage_of
from fsharp.errors import AgreementError, CheckpointError, CommError
from fsharp.functional.comm.agree import all_gather_texts
from fsharp.functional.comm.protocol import Comm

_log = logging.getLogger("fsharp")
T = TypeVar("T")


def load_or_collect_damage(load: Callable[[], T], damage: list[Any], comm: Comm) -> tuple[T | None, list[Any]]:
    """Call ``load`` on all ranks. Return its result and no damage; or None, and the damage that ranks have found.

    All ranks call this function, and either all get a result or all get the damage. ``load`` fails on all ranks if it fails on
    one. It appends the damage that this rank finds to ``damage``, as values that JSON can hold. The error of ``load`` is raised
    if no rank has found damage, or if a rank has failed for another reason.

    Cost: that of ``load``, and one exchange if ``load`` fails.
    """
    try:
        return load(), []
    except CommError:
        raise
    except Exception as error:  # any kind of error: all ranks come here, and each has to report its reason
        own = error.__cause__ if isinstance(error, AgreementError) else error  # other ranks report their errors themselves
        said = [json.loads(text) for text in all_gather_texts(json.dumps([own is not None and not damage, damage]), comm)]
        found = [each for _, texts in said for each in texts]
        if not found or any(has_failed_otherwise for has_failed_otherwise, _ in said):
            raise
        return None, found


def set_aside_damaged(damaged: Mapping[str, str], used: str, comm: Comm) -> None:
    """On rank 0 rename damaged checkpoints, given by path with their errors, and log a warning that ``used`` was loaded."""
    for path, text in damaged.items() if comm.rank == 0 else ():
        _log.warning("%s is damaged, %s: %s Used instead: %s.", path, try_set_aside(path), text, used)


def try_set_aside(path: str) -> str:
    """Rename a damaged folder or file. Return text: the new path, or the reason why it could not be renamed."""
    try:
        return f"set aside as {storage_of(path).set_aside(path)}"
    except (CheckpointError, OSError) as error:
        return f"and could not be renamed ({error})"
