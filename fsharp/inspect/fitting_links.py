"""Fitting links: compute latency and bandwidth of each collective and axis from a trace."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from fsharp.errors import ScheduleError, problem
from fsharp.inspect.links import Link
from fsharp.stateful.schedule.ops import Stream
from fsharp.stateful.schedule.schedule import Schedule, op_positions_by_bucket, sent_nbytes_by_op_and_axis
from fsharp.stateful.timing.timeline import Interval, kinds_with_collectives
from fsharp.stateful.timing.trace import TraceRow

_MAX_FIT_ROUNDS = 8


class CollectiveTimestamps(NamedTuple):
    """The times at which a collective was issued, began as the first in its stream's queue, and ended."""

    issued_s: float
    start_s: float
    stop_s: float


def collective_timestamps(schedule: Schedule, rows: Iterable[TraceRow]) -> dict[int, list[CollectiveTimestamps]]:
    """Return the times of each collective in each step, by the collective's first op."""
    first = {i: run[0] for run in op_positions_by_bucket(schedule.ops) for i in run}
    began: dict[tuple[int, int], Interval] = {}
    kinds_that_send = kinds_with_collectives()
    for index, kind, _, _, _, start, stop, step in rows:
        if kind in kinds_that_send:
            known = began.get((first[index], step), (start, stop))
            began[first[index], step] = min(known[0], start), max(known[1], stop)
    result: dict[int, list[CollectiveTimestamps]] = {}
    free: dict[Stream, float] = {}
    for (op, _), (issued, stop) in sorted(began.items(), key=lambda item: (item[1], item[0])):
        queue = "gather" if schedule.policy.separate_groups is False else schedule.ops[op].stream
        start = max(issued, free.get(queue, issued))
        free[queue] = stop = max(start, stop)
        result.setdefault(op, []).append(CollectiveTimestamps(issued, start, stop))
    return result


class _FitPoint(NamedTuple):
    """One point of the fit: the collectives that send equally many bytes over each link.

    Attributes:
        sent: bytes that each of the collectives sends, by link.
        cast: bytes that each of the collectives casts while it adds summands.
        latencies: 1 if ``seconds`` contain the latency; 0 if the latency had passed in the queue.
        seconds: median seconds of the collectives.
        weight: number of the collectives.
    """

    sent: dict[Link, int]
    cast: int
    latencies: int
    seconds: float
    weight: int


def _fit_points(
    schedule: Schedule, taken: Mapping[int, Sequence[tuple[float, float]]], latency: Mapping[Link, float] | None
) -> list[_FitPoint]:
    """Return the points of the fit.

    Collectives share a point if they send equally many bytes over each link, cast equally many bytes, and use steps of one
    kind. ``taken``: dict from a collective's first op to pairs ``(seconds in the queue, seconds after the queue)``, one for
    each step. ``latency``: seconds by link; None if they are not known yet, which counts as 0.

    The latency of a collective begins at its issue, even if the collective then waits in the queue. So there are two kinds of
    steps. For each collective only the steps of the more frequent kind are used:

    - The collective queued for longer than its latency. Its seconds are those after the queue, and contain no latency.
    - The collective did not queue for longer than its latency. Its seconds are those since its issue, and contain the latency.
    """
    facts, ops = schedule.program.facts, schedule.ops
    alike: dict[tuple[tuple[tuple[Link, int], ...], int, int], list[float]] = {}
    for run in op_positions_by_bucket(ops):
        sent = sent_nbytes_by_op_and_axis(call for i in run for call in ops[i].spec.collectives(facts[ops[i].unit]))
        if not sent or run[0] not in taken:
            continue
        mine = taken[run[0]]
        limit = 1e-9 if latency is None else sum(latency[link] for link in sent) * (1 + 1e-6)
        has_latency = int(2 * sum(queued <= limit for queued, _ in mine) >= len(mine))
        seconds = median(after + queued * has_latency for queued, after in mine if (queued <= limit) == has_latency)
        cast = sum(ops[i].spec.nbytes_cast_in_sums(facts[ops[i].unit]) for i in run)
        alike.setdefault((tuple(sorted(sent.items())), cast, has_latency), []).append(seconds)
    rows = alike.items()
    return [_FitPoint(dict(sent), cast, latencies, median(each), len(each)) for (sent, cast, latencies), each in rows]


_Links = dict[Link, tuple[float, float]]
"""Latency and bandwidth of each link."""


def fit_links_and_casts(schedule: Schedule, taken: Mapping[int, Sequence[tuple[float, float]]]) -> tuple[_Links, float]:
    """Return ``(latency, bandwidth)`` of each link, and the bandwidth of casts, by fits that are repeated until stable.

    After 8 repetitions the last fit counts. Raises ScheduleError if the trace does not tell latency and bandwidth apart.
    """
    found = _solve_links_and_casts(_fit_points(schedule, taken, None))
    for _ in range(_MAX_FIT_ROUNDS):
        again = _solve_links_and_casts(
            _fit_points(schedule, taken, {link: latency for link, (latency, _) in found[0].items()}), fallback=found
        )
        if again == found:
            break
        found = again
    return found


def _solve_links_and_casts(points: Sequence[_FitPoint], fallback: tuple[_Links, float] | None = None) -> tuple[_Links, float]:
    links = sorted({link for point in points for link in point.sent})
    has_casts = any(point.cast for point in points)
    for names in ({link: link for link in links}, {link: (link[0], "") for link in links}):  # else one number for all axes
        for with_casts in (True, False) if has_casts else (False,):  # else casts are a part of the bandwidths
            found = _fit_links_and_casts(points, names, with_casts=with_casts)
            if found is not None:
                return {link: found[0][names[link]] for link in links}, found[1]
    if fallback is not None:
        return fallback
    sizes = {link: sorted({point.sent[link] for point in points if link in point.sent}) for link in links}
    rows = [(" ".join(link), ", ".join(f"{nbytes:,}" for nbytes in each) + " bytes") for link, each in sizes.items()]
    what = "latency and bandwidth cannot be told apart, as all collectives of a kind send equally many bytes."
    remedy = "Trace a step whose units differ in size, or write Hardware(latency=..., bandwidth=...) yourself."
    raise ScheduleError(problem("Hardware.fit()", what, rows, remedy))


def _fit_links_and_casts(
    points: Sequence[_FitPoint], names: Mapping[Link, Link], *, with_casts: bool
) -> tuple[_Links, float] | None:
    """Return the latency and bandwidth that fit best for each link in ``names.values()``, and the bandwidth of casts.

    ``names``: for each link, the link whose numbers it shares. Without ``with_casts`` casts take no time. None if the points do
    not determine the numbers.
    """
    found = sorted(set(names.values()))
    if not found:
        return {}, math.inf
    rows, target = [], []
    usual_s = sum(point.weight * point.seconds for point in points) / sum(point.weight for point in points)
    for point in points:  # errors are relative to the collective's seconds, and at least to the mean of all collectives
        weight = math.sqrt(point.weight) / max(point.seconds, usual_s, 1e-9)
        row = [weight * point.cast] * with_casts
        for name in found:
            mine = [nbytes for link, nbytes in point.sent.items() if names[link] == name]
            row += [weight * len(mine) * point.latencies, weight * sum(mine)]
        rows.append(row)
        target.append(weight * point.seconds)
    matrix = torch.tensor(rows, dtype=torch.float64)
    scale = matrix.norm(dim=0)
    if not scale.all():
        return None
    matrix /= scale
    if torch.linalg.matrix_rank(matrix, rtol=1e-6) < matrix.shape[1]:
        return None
    solution = (nonnegative_least_squares(matrix, torch.tensor(target, dtype=torch.float64)) / scale).tolist()
    cast_s, *by_link = solution if with_casts else (0.0, *solution)
    pairs = zip(found, by_link[::2], by_link[1::2], strict=True)
    return {name: (latency, bytes_per_second(slope)) for name, latency, slope in pairs}, bytes_per_second(cast_s)


def bytes_per_second(byte_s: float) -> float:
    """Return ``1 / byte_s``; infinite if ``byte_s``, the seconds for one byte, is 0 or less."""
    return 1 / byte_s if byte_s > 0 else math.inf


def nonnegative_least_squares(matrix: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return ``x >= 0`` with ``matrix @ x`` near ``target``, by least squares.

    As long as the solution has negative elements, the smallest is set to 0, and the other elements are solved again.
    """
    kept = torch.ones(matrix.shape[1], dtype=torch.bool)
    result = torch.zeros(matrix.shape[1], dtype=torch.float64)
    while kept.any():
        solution = torch.linalg.lstsq(matrix[:, kept], target[:, None]).solution[:, 0]
        if bool((solution >= 0).all()):
            result[kept] = solution
            break
        kept[kept.nonzero()[solution.argmin(), 0]] = False
    return result
