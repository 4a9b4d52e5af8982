"""A progress bar for subcommands that read many bytes."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fsharp.checkpoint.storage import absolute_path, nbytes_of_names, observe_reads, storage_of

_DELAY_S = 1.0
"""Seconds after which a bar appears."""


@contextmanager
def reading_bar(command: str, nbytes: int | None) -> Iterator[None]:
    """Show on stderr how many of ``nbytes`` bytes have been read, if stderr is a terminal and the context lasts a second.

    ``nbytes``: the bytes to read; None if the reads cannot be counted. Then the bar appears at once, and only shows that the
    command is at work.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    began = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(command, total=nbytes, visible=nbytes is None)

        def advance(read_nbytes: int) -> None:
            progress.update(task, advance=read_nbytes, visible=time.monotonic() - began > _DELAY_S)

        with observe_reads(advance):
            yield


def files_nbytes(*paths: str) -> int:
    """Return the number of bytes in the files at ``paths``, or directly in these folders. Unreadable files count as empty."""
    total = 0
    for path in map(absolute_path, paths):
        storage, (parent, _, file) = storage_of(path), path.rpartition("/")
        names = storage.list_names(path)
        total += nbytes_of_names(storage, path, names) if names else nbytes_of_names(storage, parent, [file])
    return total
