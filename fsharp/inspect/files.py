"""Write a file whole, or not at all."""

import io
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to a file. If writing fails, as on a full disk, raise the error; an earlier file at ``path`` stays.

    If several processes write to one path, the file is that of the last one.
    """
    given, target = Path(path), Path(os.path.realpath(path))
    if given.exists() and not given.is_file():  # a pipe or a device, such as /dev/stdout
        given.write_bytes(data)
        return
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")  # a name for each writer
    try:
        partial.write_bytes(data)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def picture_path(path: str | os.PathLike[str]) -> str:
    """Return the path of a picture's file: ``path``, with the suffix ``.png`` if it has none."""
    return os.fspath(path) + ".png" * (not Path(path).suffix)


def write_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure of matplotlib to ``path``, in the format of its suffix. Without a suffix add ``.png``."""
    target, data = picture_path(path), io.BytesIO()
    figure.savefig(data, format=Path(target).suffix[1:].lower())
    write_file(target, data.getvalue())
