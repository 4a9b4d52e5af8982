"""Retention: which checkpoints are kept, and the removal of all others."""

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable
from heapq import nsmallest
from typing import NamedTuple

from fsharp.checkpoint.catalog import (
    iter_complete_newest_first,
    names_last_saved_first,
    open_if_complete,
    remove_incomplete,
    save_time_of,
    step_in_folder_name,
    verify,
)
from fsharp.checkpoint.storage import REMOVED_SUFFIX, absolute_path, storage_of
from fsharp.errors import CheckpointError, log as _log, problem
from fsharp.type_checks import options_checked

_HOUR_S = 3600


@options_checked
def prune(
    root: str | os.PathLike[str], *, keep: int, best: int = 0, keep_steps: int | None = None, keep_hours: float | None = None
) -> list[str]:
    """Remove old checkpoints under ``root``, and folders that interrupted removals have left. Return all removed paths.

    Incomplete checkpoints, and checkpoints to which a link in ``root`` points, are not removed. Before a checkpoint is removed,
    the newest checkpoint is compared with its digests. If this checkpoint is damaged, the next newest of the checkpoints to
    keep is compared, and so on, until one is intact. So at least one intact checkpoint is kept.

    Args:
        root: folder of the checkpoints.
        keep: number of newest checkpoints to keep, at least 1.
        best: number of checkpoints with the lowest ``metric`` to keep as well.
        keep_steps: length of an interval in steps: of each interval the last checkpoint is kept as well. With 1000 the
            intervals are steps 1 to 1000, 1001 to 2000, and so on.
        keep_hours: length of an interval in hours, counted from 1970: of each interval the last checkpoint is kept as well.

    Raises:
        CheckpointError: an argument keeps nothing, such as ``keep=0`` or ``keep_steps=0``; or all checkpoints to keep are
            damaged. Nothing is removed.

    Cost: lists the root, and opens the newest and the removed checkpoints; with ``best`` all of them. If anything is to be
    removed, reads a whole checkpoint.
    """
    retention = Retention(keep, best, keep_steps, keep_hours)
    retention.check_options("prune()")
    folder = absolute_path(root)
    old = retention.old_checkpoints(folder)
    while old and not _is_another_intact(folder, old):  # another process has removed what would stay
        old = retention.old_checkpoints(folder)
    finished = remove_incomplete(folder, REMOVED_SUFFIX)
    remove_checkpoints(old)
    return finished + old


def _is_another_intact(root: str, old: Collection[str]) -> bool:
    """Return whether a checkpoint under ``root`` that is not in ``old`` is intact: read the newest first, until one is intact.

    False if there is no other checkpoint, or if another process has removed one meanwhile. If all other checkpoints are
    damaged, raise a CheckpointError.
    """
    damage = dict[str, str]()
    for found in iter_complete_newest_first(root):
        if found.path not in old:
            try:
                verify(found.path)
            except CheckpointError as error:
                damage[found.path] = str(error)
                continue
            for text in damage.values():
                _log.warning("%s", text)
            return True
    if damage and all(storage_of(path).list_names(path) for path in damage):
        what = "nothing is removed: all checkpoints that would stay are damaged."
        remedy = "Remove the damaged ones by hand, or load, which sets them aside; then prune again."
        raise CheckpointError(problem(f"prune() of {root}", what, [("damaged", each) for each in damage.values()], remedy))
    return False


def _link_targets(root: str) -> set[str]:
    """Return the names in ``root`` to which other names in ``root`` link."""
    storage = storage_of(root)
    targets = ((name, storage.relative_realpath(root, name)) for name in storage.list_names(root))
    return {target for name, target in targets if target != name}


def remove_checkpoints(paths: Iterable[str]) -> None:
    """Remove the checkpoints at ``paths``, without the comparison of :func:`prune`."""
    for path in paths:
        storage_of(path).remove(path)


class Retention(NamedTuple):
    """The options of :func:`prune`: which checkpoints to keep."""

    keep: int
    best: int = 0
    keep_steps: int | None = None
    keep_hours: float | None = None

    def check_options(self, where: str) -> None:
        """Raise a CheckpointError for options that would keep no checkpoint, or make no sense."""
        if self.keep < 1:
            raise CheckpointError(f"{where}: keep is {self.keep}, expected at least 1: the only checkpoint is never removed.")
        if self.best < 0:
            raise CheckpointError(f"{where}: best is {self.best}, expected at least 0.")
        for name in ("keep_steps", "keep_hours"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise CheckpointError(f"{where}: {name} is {value!r}, expected a number above 0, or None.")

    def _intervals_of_folder(self, root: str, name: str) -> set[tuple[str, int]]:
        """Return the intervals, of steps and of hours, to which the checkpoint folder ``name`` belongs."""
        found = set()
        if self.keep_steps is not None:
            found.add(("steps", math.ceil(step_in_folder_name(name) / self.keep_steps)))
        if self.keep_hours is not None:
            created = save_time_of(f"{root}/{name}")
            found.add(("hours", math.floor(created / (self.keep_hours * _HOUR_S)) if math.isfinite(created) else 0))
        return found

    def old_checkpoints(self, root: str, *, only_by_saver: bool = False) -> list[str]:
        """Return the paths of the complete checkpoints under ``root`` that neither options nor links keep, the oldest first.

        ``only_by_saver``: leave out checkpoints that no Saver has written. These count for the options all the same.
        """
        names = names_last_saved_first(root)
        periods = {name: self._intervals_of_folder(root, name) for name in names}
        sizes = Counter(period for found in periods.values() for period in found)
        stay, gone, seen = self._paths_of_best(root, names), list[str](), set[tuple[str, int]]()
        linked = _link_targets(root)
        num_newest = 0
        for name in names:
            path, new = f"{root}/{name}", periods[name] - seen
            if path in stay and num_newest >= self.keep:
                seen |= new
                continue
            if num_newest >= self.keep and new and all(sizes[period] == 1 for period in new):
                continue  # alone in its intervals, so it stays, complete or not
            if (found := open_if_complete(path)) is None:
                continue
            if num_newest < self.keep or new:
                num_newest += 1
                seen |= new
            elif name not in linked and (found.summary.is_by_saver or not only_by_saver):
                gone.append(path)
        return [*reversed(gone)]

    def _paths_of_best(self, root: str, names: list[str]) -> set[str]:
        metrics = dict[str, float]()
        for each in filter(None, (open_if_complete(f"{root}/{name}") for name in names)) if self.best else ():
            if (metric := each.summary.metric) is not None and not math.isnan(metric):
                metrics[each.path] = metric
        return set(nsmallest(self.best, metrics, key=metrics.__getitem__))
