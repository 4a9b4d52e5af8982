"""step_page: the interactive picture of steps, as one HTML file; notebooks show schedules and timelines in this way."""

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsharp.errors import ScheduleError, problem
from fsharp.functional.layout.text import NOTEBOOK_HTML_BY_CLASS, nbytes_text, seconds_text
from fsharp.inspect.drawing import as_timeline, timeline_in_order
from fsharp.inspect.hardware import Hardware
from fsharp.report.values import plain_timeline
from fsharp.stateful.schedule.ops import STREAMS
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.timing.timeline import WAITING, Timeline
from fsharp.type_checks import options_checked, short_repr

MAX_OPS = 2000
"""Ops of a schedule that a notebook draws. A picture of 2,000 ops has about 0.4 MB, which the notebook's file keeps."""
_WHERE = "step_page()"


@options_checked
def step_page(
    steps: Schedule | Timeline | Mapping[str, Schedule | Timeline], *, hardware: Hardware | None = None, title: str = "A step"
) -> str:
    """Return an interactive picture of steps as the text of one HTML file, which needs neither a network nor another file.

    The picture is that of :func:`~fsharp.inspect.report`: a lane for each stream, and the live bytes of the arena. Point at a
    bar to read its op, its unit, the bytes that it sends, its time, and its memory. Several steps are drawn one below another,
    on one axis of time.

    Args:
        steps: a schedule or a timeline; or several: a dict from the title of each to a schedule or a timeline.
        hardware: machine on which to simulate the schedules. Without ``hardware`` the ops of schedules are drawn in order, with
            equal widths. A collective then reaches from its issue to the op that waits for it.
        title: title of the page.

    Raises:
        ScheduleError: ``steps`` is empty or wrong, or ``hardware`` is given without a schedule.
        ScheduleError: ``steps`` has schedules and timelines, and there is no ``hardware``: timelines have times, and schedules
            have none.
    """
    named: Mapping[str, Any] = steps if isinstance(steps, Mapping) else {"": steps}
    for name, each in named.items():
        if not isinstance(name, str) or not isinstance(each, Schedule | Timeline):
            raise ScheduleError(f"{_WHERE}: steps[{name!r}] is {short_repr(each)}, expected a name and a Schedule or Timeline.")
    schedules = [name for name, each in named.items() if isinstance(each, Schedule)]
    if not named:
        raise ScheduleError(f"{_WHERE}: steps is empty, expected at least one Schedule or Timeline.")
    if hardware and not schedules:
        raise ScheduleError(f"{_WHERE}: hardware is for schedules; there are timelines alone, which have their times.")
    has_times = hardware is not None or not schedules
    if not has_times and len(schedules) < len(named):
        facts = [
            ("without times", ", ".join(schedules)),
            ("with times", ", ".join(each for each in named if each not in schedules)),
        ]
        raise ScheduleError(problem(_WHERE, "schedules without hardware have no times to compare.", facts, "Pass hardware=."))
    return _timelines_page({name: as_timeline(each, hardware) for name, each in named.items()}, title, has_times=has_times)


def _timelines_page(timelines: Mapping[str, Timeline], title: str, *, has_times: bool, is_small: bool = False) -> str:
    plain = {name: plain_timeline(each) for name, each in timelines.items()}
    data = {"timelines": plain, "has_times": has_times, "is_small": is_small, "streams": STREAMS, "waiting": WAITING}
    return html_page(title, '<main><section id="step"></section></main>', data)


def html_page(title: str, body: str, data: Mapping[str, Any], *scripts: str) -> str:
    """Return a page: ``page.html`` with a title, a body, the values to draw, ``step.js`` and other scripts.

    ``title`` is plain text, ``body`` is HTML, and ``scripts`` are names of files in this folder. Without ``scripts`` the page
    draws one step. Raises ValueError if ``data`` has infinite numbers or NaN.
    """
    folder = Path(__file__).parent
    values = json.dumps(data, allow_nan=False, separators=(",", ":"))
    code = [(folder / name).read_text("utf-8") for name in ("step.js", *scripts)]
    # To a parser of HTML "<" begins a tag, even in a script.
    parts = {"TITLE": html.escape(title), "BODY": body, "DATA": values.replace("<", "\\u003c")}
    parts["SCRIPT"] = "\n".join(code if scripts else [*code, "drawSections({step: drawStep});"])
    page = (folder / "page.html").read_text("utf-8")
    return re.sub(f"@({'|'.join(parts)})@", lambda found: parts[found[1]], page)


def _schedule_in_notebook(schedule: Schedule) -> str:
    calls = schedule.collective_counts()
    sent = nbytes_text(sum(call.nbytes * count for call, count in calls.items()))
    about = (
        f"{len(schedule.ops)} ops, {calls.total()} collectives, {sent} sent by each rank, arena {nbytes_text(schedule.arena)}"
    )
    return _notebook_html(f"A schedule: {about}", timeline_in_order(schedule), has_times=False)


def _timeline_in_notebook(timeline: Timeline) -> str:
    about = f"{seconds_text(timeline.step_s)} a step, {seconds_text(timeline.exposed_s)} of it waits"
    return _notebook_html(f"A timeline: {about}", timeline, has_times=True)


def _notebook_html(about: str, timeline: Timeline, *, has_times: bool) -> str:
    """Return the line ``about`` and the picture, as HTML.

    With more than :data:`MAX_OPS` ops a hint replaces the picture. ``has_times``: whether the timeline has seconds, and not
    only an order of ops.
    """
    if len(timeline.schedule.ops) > MAX_OPS:
        remedy = "It has too many ops to be drawn here: write <code>fs.inspect.step_page()</code> to a file."
        return f"<p>{html.escape(about)}. {remedy}</p>"
    page = html.escape(_timelines_page({"": timeline}, "A step", has_times=has_times, is_small=True))
    height = 195 + 24 * len({span.stream for span in timeline.spans})
    frame = f'sandbox="allow-scripts" style="width:100%;height:{height}px;border:0" title="A step"'
    return f'<p>{html.escape(about)}.</p><iframe {frame} srcdoc="{page}"></iframe>'


NOTEBOOK_HTML_BY_CLASS.update({Schedule: _schedule_in_notebook, Timeline: _timeline_in_notebook})
