"""perfetto: a timeline as a file for https://ui.perfetto.dev or ``chrome://tracing``."""

import json
from collections.abc import Iterator
from os import PathLike
from typing import Any

from fsharp.inspect.files import write_file
from fsharp.stateful.schedule.ops import STREAMS
from fsharp.stateful.timing.timeline import Timeline
from fsharp.type_checks import options_checked


@options_checked
def perfetto(timeline: Timeline, path: str | PathLike[str], *, measured: Timeline | None = None) -> None:
    """Write a timeline as a Trace Event JSON file for https://ui.perfetto.dev or ``chrome://tracing``.

    The file has a thread for each stream, an event for each span, and a counter of live bytes.

    Args:
        timeline: the timeline of a step.
        path: path of the file.
        measured: a second timeline, shown as another process.
    """
    events = list(_trace_events(timeline, 1, "predicted" if measured else "step"))
    if measured:
        events += _trace_events(measured, 2, "measured")
    write_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())


def _trace_events(timeline: Timeline, process: int, name: str) -> Iterator[dict[str, Any]]:
    schedule = timeline.schedule
    facts = schedule.program.facts
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    used = {span.stream for span in timeline.spans}
    for thread, stream in ((i, stream) for i, stream in enumerate(STREAMS) if stream in used):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": stream}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}
    for span in timeline.spans:
        op = schedule.ops[span.op]
        event = str(schedule.program.events[op.event_index])
        args: dict[str, Any] = {"op": span.op, "phase": span.phase, "event": event, "after": op.after}
        if op.memory:
            args |= {"first byte": op.memory.start, "bytes": op.memory.nbytes}
        if op.opens:
            args |= {"first byte at rest": op.opens.start, "bytes at rest": op.opens.nbytes}
        if op.spec.cost == "copy":
            args["copied"] = facts[op.unit].host
        if span.kind == op.kind and (calls := op.spec.collectives(facts[op.unit])):
            args["sent"] = sum(call.nbytes for call in calls)
        where = {"cat": span.kind, "pid": process, "tid": STREAMS.index(span.stream)}
        when = {"ts": 1e6 * span.start_s, "dur": 1e6 * span.seconds}
        yield {"ph": "X", "name": f"{span.kind} {span.unit}".rstrip(), **where, **when, "args": args}
    for second, nbytes in [*timeline.memory, (timeline.step_s, timeline.memory[-1][1])]:
        yield {"ph": "C", "name": "arena", "pid": process, "ts": 1e6 * second, "args": {"bytes": nbytes}}
