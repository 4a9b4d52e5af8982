"""table: return a schedule as text for people."""

from collections import Counter

from fsharp.functional.layout.text import align_columns, nbytes_text
from fsharp.stateful.schedule.ops import kinds_where
from fsharp.stateful.schedule.schedule import Schedule, bucket_ranges
from fsharp.type_checks import options_checked

_COLUMN_NAMES = ("#", "event", "op", "unit", "phase", "stream", "memory", "sent", "coded", "after")


@options_checked
def table(schedule: Schedule) -> str:
    """Return a schedule as a table in text, with a row for each op, and totals.

    ``coded`` has the bytes that an op encodes or decodes; the column is left out if all formats are plain. In ``after``, ``'``
    marks ops of the previous step. ``+`` marks an op that shares the collective of the row above.
    """
    facts = schedule.program.facts
    rows, joined = list[tuple[str, ...]]([_COLUMN_NAMES]), {i for run in bucket_ranges(schedule.ops) for i in run[1:]}
    for i, op in enumerate(schedule.ops):
        before = schedule.ops[i - 1] if i else None
        calls = op.spec.collectives(facts[op.unit])
        rows.append(
            (
                str(i),
                "" if before and before.at == op.at else f"{op.at} {schedule.program.events[op.at]}",
                f"+ {op.kind}" if i in joined else op.kind,
                op.unit,
                op.phase,
                op.stream,
                ", ".join(f"{m.start:,} to {m.stop:,}" for m in (op.memory, op.opens) if m),
                nbytes_text(sum(call.nbytes for call in calls)) if calls else "",
                nbytes_text(coded) if (coded := op.spec.coded_nbytes(facts[op.unit])) else "",
                ", ".join(f"{j}'" if j >= i else str(j) for j in op.after),
            )
        )
    if not any(row[8] for row in rows[1:]):
        rows = [(*row[:8], *row[9:]) for row in rows]
    right = {0, 7, 8} if len(rows[0]) == len(_COLUMN_NAMES) else {0, 7}
    number = Counter(op.kind for op in schedule.ops)
    calls_sent = schedule.calls()
    sent = sum(call.nbytes * count for call, count in calls_sent.items())
    return "\n".join(
        [
            *align_columns(rows, right, lines_above={1}),
            f"{len(schedule.ops)} ops: " + ", ".join(f"{number[kind]} {kind}" for kind in kinds_where() if number[kind]),
            f"{calls_sent.total()} collectives, {nbytes_text(sent)} sent by each rank",
            *([f"{nbytes_text(schedule.host_nbytes)} copied from host memory and to it"] if schedule.host_nbytes else []),
            f"arena {nbytes_text(schedule.arena)}, of which at most {nbytes_text(schedule.bound)} are live at once",
        ]
    )
