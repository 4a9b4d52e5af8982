"""Timelines and layouts as rows of plain values, which JSON can hold and a page can draw."""

from typing import Any

from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.text import runs_of_alike_units
from fsharp.inspect.shardings import LeafSharding, TreeSharding
from fsharp.stateful.timing.timeline import Timeline

_MAX_CELLS = 64

SPAN_FIELDS = ("op", "kind", "unit", "phase", "stream", "start_s", "stop_s", "sent", "start", "nbytes")
"""Fields of a row for a span. ``sent``: bytes of its collectives; ``start`` and ``nbytes``: its memory in the arena."""

TIMELINE_KEYS = frozenset(("timeline", "spans", "step_s", "exposed_s", "overlap", "peak_nbytes", "arena", "memory"))
LAYOUT_KEYS = frozenset(("layout", "ranks", "num_params", "nbytes", "rows"))
"""Fields of a timeline and of a layout as plain values."""


def plain_timeline(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as plain values: rows of spans, the curve of live bytes, seconds of the step, and peak memory."""
    schedule = timeline.schedule
    facts = schedule.program.facts
    spans = []
    for span in timeline.spans:
        op = schedule.ops[span.op]
        sent = sum(call.nbytes for call in op.spec.collectives(facts[op.unit])) if span.kind == op.kind else 0
        memory = (op.memory.start, op.memory.nbytes) if op.memory else (None, 0)
        times = round(span.start_s, 9), round(span.stop_s, 9)
        spans.append([span.op, span.kind, span.unit, span.phase, span.stream, *times, sent, *memory])
    seconds = {"step_s": timeline.step_s, "exposed_s": timeline.exposed_s, "overlap": timeline.overlap}
    curve = [[round(second, 9), nbytes] for second, nbytes in timeline.memory]
    arena = {"peak_nbytes": timeline.peak_nbytes, "arena": schedule.arena, "memory": curve}
    return {"timeline": list(SPAN_FIELDS), "spans": spans, **seconds, **arena}


def plain_layout(layout: Layout) -> dict[str, Any]:
    """Return a layout as plain values: bytes at rest on a rank, and rows about leaves. Units that are alike share rows.

    A row has six fields: the title of the units, such as ``layers.* x12``; the leaf's path, its dtype and shape, and its spec;
    and the part that one rank holds. The last field is a text of 0 and 1: a 1 for each rank that holds elements of the leaf. On
    more than 64 ranks the text has 64 characters: a 1 for each run of ranks of which any holds elements.
    """
    where = TreeSharding(layout, "params")
    rows = []
    for title, alike in runs_of_alike_units(layout.units):
        rows += [[title, *_leaf_row(where[alike[0].path_in_tree(leaf)], leaf.path)] for leaf in alike[0].leaves]
    kinds = {kind: layout.nbytes(kind) for kind in ("params", "main", "grads", "optim")}
    about = {"layout": str(layout.mesh), "ranks": layout.mesh.size, "num_params": layout.num_params}
    return {**about, "nbytes": kinds, "rows": rows}


def _leaf_row(leaf: LeafSharding, path: str) -> list[str]:
    held, ranks = leaf.mask_of_holding_ranks, leaf.mesh.size
    cells = min(ranks, _MAX_CELLS)
    runs = [held[i * ranks // cells : (i + 1) * ranks // cells] for i in range(cells)]
    about = f"{dtype_name(leaf.leaf.dtype)}{list(leaf.shape)}"
    bits = "".join("01"[bool(run.any())] for run in runs)
    return [path, about, "" if leaf.spec is None else str(leaf.spec), leaf.shard_size_text, bits]
