"""report: one HTML file about a run, with charts and a timeline, which needs neither a network nor another file."""

import html
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsharp.errors import OptionError
from fsharp.inspect.files import write_file
from fsharp.report.reading import RunLog, read_log
from fsharp.report.step import html_page
from fsharp.stateful.schedule.ops import STREAMS
from fsharp.stateful.timing.timeline import WAITING
from fsharp.type_checks import options_checked

SECTIONS = ("summary", "values", "step", "compared", "layout", "ranks", "events", "environment")
"""Sections of the page, which ``page.js`` fills."""
MAX_POINTS = 2000
"""Most points of a curve. A longer curve is cut into runs of steps, each with its least and its greatest point."""
MAX_MARKS = 200
"""Most marks of a chart. If there are more, marks at equal distances are kept."""
MAX_EVENTS = 1000
"""Most events in the page's list, which has the newest."""


@options_checked
def report(run_dir: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> str:
    """Write one HTML file about a run, and return its path. The file needs no network and no other file.

    The page has the values and the throughput over steps, which rank holds what, slow ranks, restarts and faults, settings and
    versions. If the run has logged timelines, the page also has a step's timeline and memory, and predictions beside
    measurements.

    Args:
        run_dir: folder of a :class:`~fsharp.resilience.Run`, with its ``log.jsonl``, or the folder above its ``checkpoints``.
        path: path of the file, which ends in .html or .htm; ``report.html`` in ``run_dir`` by default.

    Raises:
        OptionError: the folder has no log, the log has no line with something to show, or ``path`` has another ending.
        OSError: the file cannot be written.
    """
    folder = Path(run_dir)
    log = read_log(folder)
    target = folder / "report.html" if path is None else Path(path)
    if target.suffix not in (".html", ".htm"):  # such as log.jsonl of the run, which would be overwritten
        raise OptionError(f"report(): path is {str(target)!r}, expected a path that ends in .html.")
    write_file(target, log_page(log, title=str(folder)).encode("utf-8", "backslashreplace"))  # a path may be no text
    return str(target)


def log_page(log: RunLog, *, title: str) -> str:
    """Return the page of a run's log as HTML, with ``title`` as heading."""
    sections = "".join(f'<section id="{name}"></section>\n' for name in SECTIONS)
    body = f"<header><h1>{html.escape(title)}</h1></header>\n<main>\n{sections}</main>"
    return html_page(title, body, page_data(log, title), "page.js")


def page_data(log: RunLog, title: str) -> dict[str, Any]:
    """Return what the page of a run draws, as values for JSON: charts, events, timelines, the layout and more.

    ``"marks"`` are vertical lines in all charts: at each event, and at each step from which the run was started again.
    """
    marks = [(step, f"started again at step {step}", False) for step, _, _ in log.starts[1:]]
    marks += [(step, text, True) for step, _, text in log.events]
    own_s, _ = _downsample_min_max(sorted(log.own_s.items()), max)
    return {
        "title": title,
        "series": {name: _chart_data(values) for name, values in _sorted_series(log)},
        "marks": _evenly_spaced_rows(marks, MAX_MARKS),
        "num_marks": len(marks),
        "events": log.events[-MAX_EVENTS:],
        "num_events": len(log.events),
        "starts": log.starts,
        "saved": log.saved,
        "own_s": own_s,
        "timelines": log.timelines,
        "has_times": True,
        "streams": STREAMS,
        "waiting": WAITING,
        "compared": predicted_vs_measured_rows(log.timelines),
        "layout": log.layout,
        "num_unreadable": log.num_unreadable,
        "last": [max(log.times), log.times[max(log.times)]] if log.times else None,
    }


def _sorted_series(log: RunLog) -> list[tuple[str, dict[int, float]]]:
    """Return the names and values of all series of a log, sorted: losses first, then throughputs, then all others."""

    def key(item: tuple[str, Any]) -> tuple[int, str]:
        name = item[0]
        return 0 if "loss" in name else 1 if name.endswith("_per_s") else 2, name

    return sorted(((name, values) for name, values in log.series.items() if values), key=key)


def _chart_data(values: dict[int, float]) -> dict[str, Any]:
    """Return the data of a chart of ``values``, by step: finite points, marks at values that are not finite, the last value."""
    rows = sorted(values.items())
    points, every = _downsample_min_max([row for row in rows if math.isfinite(row[1])], lambda value: value)
    bad = [(step, str(value)) for step, value in rows if not math.isfinite(value)]
    last = rows[-1][1] if math.isfinite(rows[-1][1]) else str(rows[-1][1])
    marks = _evenly_spaced_rows(bad, MAX_MARKS)
    return {"points": points, "every": every, "bad": marks, "num_bad": len(bad), "last": last}


def _downsample_min_max(rows: list[tuple[int, Any]], height: Callable[[Any], float]) -> tuple[list[tuple[int, Any]], int]:
    """Return about ``MAX_POINTS`` of the rows, and a number of rows ``n``.

    From each ``n`` consecutive rows, the row with the least and the row with the greatest ``height`` are kept.
    """
    if len(rows) <= MAX_POINTS:
        return rows, 1
    every = -(-2 * len(rows) // MAX_POINTS)
    kept = {len(rows) - 1}
    for first in range(0, len(rows), every):
        among = range(first, min(first + every, len(rows)))
        kept |= {pick(among, key=lambda i: height(rows[i][1])) for pick in (min, max)}
    return [rows[i] for i in sorted(kept)], every


def _evenly_spaced_rows(rows: list[Any], most: int) -> list[Any]:
    return rows if len(rows) <= most else [rows[i * (len(rows) - 1) // (most - 1)] for i in range(most)]


def predicted_vs_measured_rows(timelines: dict[str, dict[str, Any]]) -> list[list[Any]]:
    """Return rows ``[what, predicted, measured]`` in seconds; no rows if ``timelines`` lacks ``predicted`` or ``measured``."""
    if not {"predicted", "measured"} <= timelines.keys():
        return []
    both = timelines["predicted"], timelines["measured"]
    rows: list[list[Any]] = [["step", *(each["step_s"] for each in both)], ["exposed", *(each["exposed_s"] for each in both)]]
    seconds = [_seconds_by_kind(each) for each in both]
    rows += [[kind, *(each.get(kind, 0.0) for each in seconds)] for kind in dict.fromkeys([*seconds[0], *seconds[1]])]
    return rows


def _seconds_by_kind(timeline: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each kind of op in a timeline. Ops of one bucket, which share a collective, count once."""
    result: dict[str, float] = {}
    for kind, _, start, stop in dict.fromkeys((span[1], span[4], span[5], span[6]) for span in timeline["spans"]):
        if stop > start:
            result[kind] = result.get(kind, 0.0) + stop - start
    return result
