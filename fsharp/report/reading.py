"""Read the log of a run: its values over steps, its events, and the newest timelines and layout."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsharp.errors import OptionError
from fsharp.report.logs import LOG


@dataclass
class RunLog:
    """What the log of a run holds.

    A run that was interrupted makes some steps again, from its newest checkpoint on: the values of the last time count.

    Attributes:
        series: by name, numbers by step.
        times: seconds since 1970 at which a step was recorded, by step.
        events: rows ``(step, time, text)``.
        starts: rows ``(step, time, about)`` for each time that the run was started: settings, versions and machine.
        saved: steps after which a checkpoint was saved.
        own_s: rows ``(step, seconds of each rank)``, without waits for other ranks.
        timelines: the newest timelines, by name.
        layout: the newest layout.
        num_cut: number of lines that could not be read, as a killed process leaves one.
    """

    series: dict[str, dict[int, float]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    events: list[tuple[int, float, str]] = field(default_factory=list)
    starts: list[tuple[int, float, dict[str, Any]]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    own_s: dict[int, list[float]] = field(default_factory=dict)
    timelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    layout: dict[str, Any] | None = None
    num_cut: int = 0


def read_log(folder: Path) -> RunLog:
    """Return the log of the run in a folder, or in its subfolder ``checkpoints``.

    Raises:
        OptionError: there is no log, or it has no line that can be read.
    """
    paths = [each / LOG for each in (folder, folder / "checkpoints")]
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        what = f"report: run_dir is {str(folder)!r}, expected the folder of a run, with a file {LOG}"
        raise OptionError(f"{what}: fs.resilience.Run writes it into the folder of its checkpoints.")
    log = RunLog()
    for row in _rows(path, log):
        _add(log, row)
    if not (log.series or log.events or log.starts or log.timelines):
        raise OptionError(f"report: {str(path)!r} has no line that can be read, expected lines of a JsonlLogger.")
    return log


def _rows(path: Path, log: RunLog) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                row["step"], row["time"] = int(row["step"]), float(row["time"])
            except (ValueError, TypeError, KeyError):
                log.num_cut += 1
            else:
                yield row


def _add(log: RunLog, row: dict[str, Any]) -> None:
    step, time = row.pop("step"), row.pop("time")
    if "start" in row:
        _forget_from(log, step)
    for name, value in row.items():
        if name == "start":
            log.starts.append((step, time, value))
        elif name == "event":
            log.events.append((step, time, str(value)))
        elif name == "saved":
            log.saved.append(step)
        elif name == "own_s":
            log.own_s[step] = value
        elif isinstance(value, dict) and "timeline" in value:
            log.timelines[name] = value
        elif isinstance(value, dict) and "layout" in value:
            log.layout = value
        else:
            for label, number in _numbers(name, value):
                log.series.setdefault(label, {})[step] = number
                log.times[step] = time


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested values, with names such as ``norms/head``."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(f"{name}/{key}", each)
    elif isinstance(value, int | float):
        yield name, float(value)


def _forget_from(log: RunLog, step: int) -> None:
    """Remove values of this step and of later ones, which the run makes again."""
    kept: list[dict[int, Any]] = [*log.series.values(), log.times, log.own_s]
    for values in kept:
        for each in [each for each in values if each >= step]:
            del values[each]
    log.saved[:] = [each for each in log.saved if each <= step]
