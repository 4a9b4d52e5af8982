"""Falling back: all ranks take the same step back from a checkpoint in which one of them has found damage."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from fsharp.checkpoint.storage import storage_of
from fsharp.errors import AgreementError, CheckpointError, CommError
from fsharp.functional.comm.agree import exchange
from fsharp.functional.comm.protocol import Comm

_log = logging.getLogger("fsharp")
T = TypeVar("T")


@contextmanager
def noted(damage: list[Any]) -> Iterator[None]:
    """Append the text of a CheckpointError that is raised within to ``damage``."""
    try:
        yield
    except CheckpointError as error:
        damage.append(str(error))
        raise


def unless_damaged(load: Callable[[], T], damage: list[Any], comm: Comm) -> tuple[T | None, list[Any]]:
    """Return what ``load`` returns, or else what ranks have found damaged: on every rank the same of the two.

    Args:
        load: called by all ranks; fails on all of them if it fails on one.
        damage: list to which ``load`` appends what this rank finds damaged, in what JSON has.
        comm: the ranks.

    Raises:
        Exception: what ``load`` has raised, if no rank has found damage or one has failed for another reason.

    Cost: nothing more than ``load``, unless that fails.
    """
    try:
        return load(), []
    except CommError:
        raise
    except Exception as error:  # of any kind: all ranks are here, and each has to say why
        own = error.__cause__ if isinstance(error, AgreementError) else error  # what other ranks fail with is their own to say
        said = [json.loads(text) for text in exchange(json.dumps([own is not None and not damage, damage]), comm)]
        found = [each for _, texts in said for each in texts]
        if not found or any(has_failed_otherwise for has_failed_otherwise, _ in said):
            raise
        return None, found


def set_aside(damaged: Mapping[str, str], used: str, comm: Comm) -> None:
    """Rename damaged checkpoints, so that no later look finds them, and log a warning for each of them. Rank 0 does this.

    Args:
        damaged: paths of checkpoints, and what is wrong with them.
        used: what was loaded instead, for the warnings.
        comm: the ranks.
    """
    for path, text in damaged.items() if comm.rank == 0 else ():
        _log.warning("%s is damaged, %s: %s Used instead: %s.", path, renamed_away(path), text, used)


def renamed_away(path: str) -> str:
    """Rename a folder or a file, and say as what; or say why it was not renamed."""
    try:
        return f"set aside as {storage_of(path).set_aside(path)}"
    except (CheckpointError, OSError) as error:
        return f"and could not be renamed ({error})"
