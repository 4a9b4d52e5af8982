"""Read the log of a run: its values over steps, its events, and the newest timelines and layout."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsharp.errors import OptionError
from fsharp.functional.tree.paths import named_leaves
from fsharp.report.logs import LOG_FILE, STEP_LIMIT
from fsharp.report.values import LAYOUT_KEYS, SPAN_FIELDS, TIMELINE_KEYS

_NONFINITE_NAMES = ("nan", "inf", "-inf")
_LAST_TIME = 4e12  # the limit of a browser's dates


@dataclass
class RunLog:
    """The values, events and timelines in the log of a run.

    When the run starts again at a step, values of this step and of later ones are removed, and so are later checkpoints: the
    run makes these steps again. Events stay. If a step has several values of one name, the last is kept.

    Attributes:
        series: by name, numbers by step.
        times: seconds since 1970 at which numbers of a step were last recorded, by step.
        events: rows ``(step, time, text)``.
        starts: rows ``(step, time, about)`` for each time that the run was started: settings, versions and machine.
        saved: steps after which a checkpoint was saved.
        own_s: seconds of each rank, without waits for other ranks, by step.
        timelines: the newest timelines, by name.
        layout: the newest layout.
        num_unreadable: number of lines that could not be read. A killed process may leave a line that is cut off.
    """

    series: dict[str, dict[int, float]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    events: list[tuple[int, float, str]] = field(default_factory=list)
    starts: list[tuple[int, float, dict[str, Any]]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    own_s: dict[int, list[float]] = field(default_factory=dict)
    timelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    layout: dict[str, Any] | None = None
    num_unreadable: int = 0

    def add_line(self, line: bytes) -> None:
        """Add a line of the log. A line that cannot be read, such as one that a kill cut off, counts in ``num_unreadable``.

        A line about a start of the run first removes the values from its step on, as the run makes these steps again.
        """
        try:
            row = json.loads(line, parse_int=_finite_or_text, parse_float=_finite_or_text, parse_constant=_finite_or_text)
            step, time = int(row.pop("step")), float(row.pop("time"))
            is_valid = abs(step) < STEP_LIMIT and 0 <= time < _LAST_TIME
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_valid = False
        if not is_valid:
            self.num_unreadable += 1
            return
        if isinstance(row.get("start"), dict):
            self._remove_steps_from(step)
        for name, value in row.items():
            if name == "start" and isinstance(value, dict):
                self.starts.append((step, time, value))
            elif name == "event":
                self.events.append((step, time, str(value)))
            elif name == "saved" and type(value) is int:
                self.saved.append(value)  # recorded by a later step if the save took longer
            elif name == "own_s" and isinstance(value, list) and value and all(isinstance(x, int | float) for x in value):
                self.own_s[step] = value
            elif _is_timeline(value):
                self.timelines[name] = value
            elif isinstance(value, dict) and value.keys() == LAYOUT_KEYS:
                self.layout = value
            else:
                for label, each in named_leaves({name: value}, "/"):
                    if isinstance(each, int | float) or each in _NONFINITE_NAMES:
                        self.series.setdefault(label, {})[step] = float(each)
                        self.times[step] = time

    def _remove_steps_from(self, step: int) -> None:
        """Remove from this object what a run that starts again at ``step`` will record again.

        These are the values of ``step`` and of later steps, and the checkpoints of later steps. The checkpoint of ``step``
        stays, as the run starts from it.
        """
        kept: list[dict[int, Any]] = [*self.series.values(), self.times, self.own_s]
        for values in kept:
            for each in [each for each in values if each >= step]:
                del values[each]
        self.saved[:] = [each for each in self.saved if each <= step]


def read_log(folder: Path) -> RunLog:
    """Return the log of a run: from ``log.jsonl`` in ``folder``, or, if there is none, in its subfolder ``checkpoints``.

    Raises OptionError if there is no such file, or if the file has no line that can be shown.
    """
    paths = [each / LOG_FILE for each in (folder, folder / "checkpoints")]
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        what = f"report(): run_dir is {str(folder)!r}, expected the folder of a run, with a file {LOG_FILE}"
        raise OptionError(f"{what}: fs.resilience.Run writes the file into the folder of its checkpoints.")
    log = RunLog()
    with path.open("rb") as file:
        for line in file:
            log.add_line(line)
    if not (log.series or log.events or log.starts or log.timelines or log.layout or log.own_s):
        what = f"report(): {str(path)!r} has no line that can be read as numbers, an event, a timeline or a layout"
        raise OptionError(f"{what}, expected lines of a JsonlLogger.")
    return log


def _is_timeline(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != TIMELINE_KEYS or value["timeline"] != list(SPAN_FIELDS):
        return False
    first = SPAN_FIELDS.index("start_s")
    try:
        numbers = [value["step_s"], value["exposed_s"], *(x for span in value["spans"] for x in span[first : first + 2])]
        names = [x for span in value["spans"] for x in span[1:first]]
        return all(len(span) == len(SPAN_FIELDS) for span in value["spans"]) and (
            all(isinstance(x, int | float) for x in numbers) and all(isinstance(x, str) for x in names)
        )
    except (TypeError, KeyError):  # the spans are not lists
        return False


def _finite_or_text(text: str) -> float | str:
    """Return the number that a text in JSON means; for NaN and numbers beyond all floats a text, such as ``"-inf"``."""
    number = float(text)
    if not math.isfinite(number):
        return str(number)
    return int(text) if text.lstrip("-").isdigit() else number
