"""How many gathers and reductions overlap compute, from the trace of one training step.

The host marks what it issues for a gather or a reduction: fsharp by the benchmark's marks, FSDP2 by its own. Whatever the
device runs is tied to the moment when the host issued it by a correlation id. So it does not matter on which stream a gather
runs, or whether NCCL makes it a kernel or, at world size 1, a copy.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsharp.inspect.fitting import IntervalUnion
from fsharp.stateful.timing.timeline import Interval, total_length, union_of_intervals

GATHER, REDUCE = "fsharp: gather", "fsharp: reduce"
"""Names of the host's marks."""
GATHERS = (GATHER, "FSDP::pre_forward", "FSDP::pre_backward", "FSDP::all_gather")
"""What names of marks of gathers begin with. At world size 1 FSDP2 copies parameters in its hooks, which have marks."""
REDUCTIONS = (REDUCE, "FSDP::post_backward_reduce")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BACKWARD = "autograd::engine::evaluate_function"


def overlap(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Gathers by phase, ``forward``, ``backward``, and ``after`` it (for the next step); and all ``reductions``.

    Args:
        events: ``traceEvents`` of what ``torch.profiler`` exports, of one step.

    Returns:
        For each: ``num``, those that ran on the device; ``num_overlapping``, those of them that ran while some kernel of the
        compute did; ``us``, time of all; and ``hidden_us``, how much of that was beside compute.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    gathers, reductions = _marks(complete, GATHERS), _marks(complete, REDUCTIONS)
    launched = {
        e["args"]["correlation"]: float(e["ts"])
        for e in complete
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    gathered: dict[int, list[Interval]] = {}
    reduced: dict[int, list[Interval]] = {}
    compute: list[Interval] = []
    for e in complete:
        if e.get("cat") not in _DEVICE:
            continue
        interval = (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        at = launched.get(e.get("args", {}).get("correlation"))
        gather, reduction = (None, None) if at is None else (_within(gathers, at), _within(reductions, at))
        if gather is not None:
            gathered.setdefault(gather, []).append(interval)
        elif reduction is not None:
            reduced.setdefault(reduction, []).append(interval)
        elif e["cat"] == "kernel":
            compute.append(interval)
    busy = IntervalUnion(compute)
    begin, end = _backward(complete)
    rows: dict[str, list[list[Interval]]] = {"forward": [], "backward": [], "after": [], "reductions": list(reduced.values())}
    for mark, intervals in sorted(gathered.items()):
        issued = gathers[mark][0]
        rows["forward" if issued < begin else "backward" if issued < end else "after"].append(intervals)
    return {name: _overlap([union_of_intervals(x) for x in found], busy) for name, found in rows.items()}


def _overlap(found: Sequence[Sequence[Interval]], busy: IntervalUnion) -> dict[str, float]:
    hidden = [sum(busy.length_between(start, stop) for start, stop in each) for each in found]
    nums = {"num": len(found), "num_overlapping": sum(x > 0 for x in hidden)}
    return {**nums, "us": sum(map(total_length, found)), "hidden_us": sum(hidden)}


def _marks(events: Iterable[Mapping[str, Any]], names: tuple[str, ...]) -> list[Interval]:
    """Intervals of the host's marks, without those that lie within another one."""
    # The device's side of a mark, "gpu_user_annotation", has the same name.
    found = [e for e in events if e.get("cat") in ("user_annotation", "cpu_op") and str(e.get("name")).startswith(names)]
    result: list[Interval] = []
    for start, stop in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in found):
        if not result or start >= result[-1][1]:
            result.append((start, stop))
    return result


def _within(marks: Sequence[Interval], at: float) -> int | None:
    i = bisect_right(marks, (at, float("inf"))) - 1
    return i if i >= 0 and at <= marks[i][1] else None


def _backward(events: Iterable[Mapping[str, Any]]) -> Interval:
    found = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if str(e.get("name")).startswith(_BACKWARD)]
    if not found:
        return float("inf"), float("inf")
    return min(start for start, _ in found), max(stop for _, stop in found)
