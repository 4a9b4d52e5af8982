"""How many gathers overlap compute, from the trace of one training step. Works on the events of a trace file; no torch.

The host marks what it issues for a gather or a reduction. Whatever the device runs is tied to the moment when the host
issued it by a correlation id. So it does not matter on which stream a gather runs, or whether NCCL makes it a kernel or, at
world size 1, a copy.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

GATHER, REDUCE = "fsharp: gather", "fsharp: reduce"
"""Names of the host's marks."""
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BACKWARD = "autograd::engine::evaluate_function"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Phase:
    """Gathers that were issued in one phase of a step.

    Attributes:
        num_gathers: those that ran on the device.
        num_overlapping: those of them that ran while some kernel of the compute did.
        gather_us: time of all.
        hidden_us: how much of that was beside compute.
    """

    num_gathers: int = 0
    num_overlapping: int = 0
    gather_us: float = 0.0
    hidden_us: float = 0.0


def overlap(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Gathers by phase: ``forward``, ``backward``, and ``after`` it (for the next step).

    Args:
        events: ``traceEvents`` of what ``torch.profiler`` exports, of one step.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    gathers, reductions = _marks(complete, GATHER), _marks(complete, REDUCE)
    launched = {
        e["args"]["correlation"]: float(e["ts"])
        for e in complete
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    parts: dict[int, list[Interval]] = {}
    compute: list[Interval] = []
    for e in complete:
        if e.get("cat") not in _DEVICE:
            continue
        interval = (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        at = launched.get(e.get("args", {}).get("correlation"))
        mark = None if at is None else _within(gathers, at)
        if mark is not None:
            parts.setdefault(mark, []).append(interval)
        elif e["cat"] == "kernel" and (at is None or _within(reductions, at) is None):
            compute.append(interval)
    busy = merged(compute)
    begin, end = _backward(complete)
    rows: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": [], "after": []}
    for mark, intervals in sorted(parts.items()):
        issued = gathers[mark][0]
        phase = "forward" if issued < begin else "backward" if issued < end else "after"
        own = merged(intervals)
        rows[phase].append((length(own), length(common(own, busy))))
    return {
        phase: asdict(
            Phase(len(found), sum(hidden > 0 for _, hidden in found), sum(t for t, _ in found), sum(h for _, h in found))
        )
        for phase, found in rows.items()
    }


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as intervals that do not touch, in order.

    >>> merged([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    result: list[Interval] = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], stop))
        else:
            result.append((start, stop))
    return result


def common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The intersection of two unions as :func:`merged` gives them.

    >>> common([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    [(1, 2), (3, 4), (6, 7)]
    """
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            result.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def length(intervals: Iterable[Interval]) -> float:
    """Total length."""
    return sum(stop - start for start, stop in intervals)


def _marks(events: Iterable[Mapping[str, Any]], name: str) -> list[Interval]:
    # The device's side of a mark, "gpu_user_annotation", has the same name.
    found = [e for e in events if e.get("name") == name and e.get("cat") in ("user_annotation", "cpu_op")]
    return sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in found)


def _within(marks: Sequence[Interval], at: float) -> int | None:
    i = bisect_right(marks, (at, float("inf"))) - 1
    return i if i >= 0 and at <= marks[i][1] else None


def _backward(events: Iterable[Mapping[str, Any]]) -> Interval:
    found = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if str(e.get("name")).startswith(_BACKWARD)]
    if not found:
        return float("inf"), float("inf")
    return min(start for start, _ in found), max(stop for _, stop in found)
