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

    def add_line(self, line: bytes) -> None:
        """Add a line of the file, or count it as cut."""
        try:
            row = json.loads(line)
            step, time = int(row.pop("step")), float(row.pop("time"))
        except (ValueError, TypeError, KeyError, AttributeError):
            self.num_cut += 1
            return
        if "start" in row:
            self._remove_from(step)
        for name, value in row.items():
            if name == "start":
                self.starts.append((step, time, value))
            elif name == "event":
                self.events.append((step, time, str(value)))
            elif name == "saved":
                self.saved.append(step)
            elif name == "own_s":
                self.own_s[step] = value
            elif isinstance(value, dict) and "timeline" in value:
                self.timelines[name] = value
            elif isinstance(value, dict) and "layout" in value:
                self.layout = value
            else:
                for label, number in _numbers(name, value):
                    self.series.setdefault(label, {})[step] = number
                    self.times[step] = time

    def _remove_from(self, step: int) -> None:
        """Remove values of this step and of later ones, which the run makes again."""
        kept: list[dict[int, Any]] = [*self.series.values(), self.times, self.own_s]
        for values in kept:
            for each in [each for each in values if each >= step]:
                del values[each]
        self.saved[:] = [each for each in self.saved if each <= step]


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
    with path.open("rb") as file:
        for line in file:
            log.add_line(line)
    if not (log.series or log.events or log.starts or log.timelines):
        raise OptionError(f"report: {str(path)!r} has no line that can be read, expected lines of a JsonlLogger.")
    return log


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested values, with names such as ``norms/head``."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(f"{name}/{key}", each)
    elif isinstance(value, int | float):
        yield name, float(value)
