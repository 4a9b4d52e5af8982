"""Fallback: if a rank finds damage in a checkpoint, all ranks load the checkpoint before it."""

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
    """Return the result of ``load`` and no damage; or, on all ranks, None and the damage that ranks have found.

    All ranks call this function. ``load`` appends the damage that this rank finds to ``damage``, as values that JSON can hold,
    and then fails on all ranks. If no rank has found damage, or a rank has failed for another reason, the error of ``load`` is
    raised. Cost: that of ``load``, and one exchange if ``load`` fails.
    """
    try:
        return load(), []
    except CommError:
        raise
    except Exception as error:  # any kind: all ranks come here, and each reports its reason
        own = error.__cause__ if isinstance(error, AgreementError) else error  # other ranks report their errors themselves
        said = [json.loads(text) for text in all_gather_texts(json.dumps([own is not None and not damage, damage]), comm)]
        found = [each for _, texts in said for each in texts]
        if not found or any(has_failed_otherwise for has_failed_otherwise, _ in said):
            raise
        return None, found


def set_aside_damaged(damaged: Mapping[str, str], used_instead: str, comm: Comm) -> None:
    """On rank 0 rename damaged checkpoints, and log a warning for each. ``damaged`` has the error of each path."""
    for path, text in damaged.items() if comm.rank == 0 else ():
        _log.warning("%s is damaged, %s: %s Used instead: %s.", path, try_set_aside(path), text, used_instead)


def try_set_aside(path: str) -> str:
    """Rename a damaged folder or file; return a text with the new path, or with the reason why it keeps its name."""
    try:
        return f"set aside as {storage_of(path).set_aside(path)}"
    except (CheckpointError, OSError) as error:
        return f"and could not be renamed ({error})"
