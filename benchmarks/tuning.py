"""How good :func:`fs.tune`'s choice is: every candidate is predicted, and measured.

The hardware is that of ``benchmarks.prediction``: rates of collectives from traces of ONE shape, under zero3 and under ddp, and
the times of compute and update from a step of each shape without communication.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from scipy.stats import spearmanr

import fsharp as fs
from benchmarks import contenders as c
from benchmarks import gpt
from benchmarks.options import Options
from benchmarks.prediction import ALONE, FITTED, contention, scaled
from benchmarks.prediction import shapes as predicted_shapes
from benchmarks.stats import paired, times
from benchmarks.steps import interleaved, over_ranks

STRATEGIES = {"ddp": fs.ddp("dp"), "zero1": fs.zero1("dp"), "zero2": fs.zero2("dp"), "zero3": fs.zero3("dp")}
POLICIES = {
    "prefetch 1": fs.SchedulePolicy(),
    "gathered once": fs.SchedulePolicy(release="backward"),
    "no prefetch": fs.SchedulePolicy(prefetch=0),
}
APART = fs.SchedulePolicy(bucket_nbytes=0)
"""Collectives of different sizes tell the most of latency and bandwidth."""
UNITS = "layers.*"
ORDER = ("embed", UNITS, "head")


def shapes(options: Options) -> dict[str, gpt.Shape]:
    """What a layout is chosen for, with steps short enough to measure a dozen candidates of each."""
    found = predicted_shapes(options)
    half = {"time": max(options.time // 2, 1), "batch": max(options.batch // 2, 1)}
    names = (FITTED, "the benchmark's", "narrow layers")
    return {name: found[name] if name == FITTED else replace(found[name], **half) for name in names}


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``tune``: by shape, measured and predicted seconds of each candidate, the regret and the rank correlation."""
    fitted = _fitted(options, comm, say)
    result = {}
    for name, shape in shapes(options).items():
        candidates = {
            (s, p): c.sharded(f"{s}, {p}", shape, comm, STRATEGIES[s], POLICIES[p]) for s in STRATEGIES for p in POLICIES
        }
        alone = c.sharded(ALONE, shape, fs.SingleComm(), fs.zero3("dp"), fs.SchedulePolicy())
        trace = alone.scheduled.trace()
        everyone = {each.name: each for each in (alone, *candidates.values())}
        rounds, _ = _timed(options, comm, shape, everyone, partial(_say, say, name))
        rounds = over_ranks(rounds)[1]
        own = replace(fitted, compute=trace.compute_times(), update_s=trace.update_time())
        hardware = scaled(own, alone.scheduled.schedule, times(rounds, ALONE).median)
        tree = gpt.tree_of(gpt.build(shape))
        layouts = {s: fs.plan(tree, comm.mesh, strategy, units=UNITS) for s, strategy in STRATEGIES.items()}
        choice = fs.tune(layouts, hardware, budget=1e12, policies=POLICIES, order=ORDER, backend="gloo")
        # What slows a round down slows all of its steps: seconds are those of the step alone, times ratios within rounds.
        base = times(rounds, ALONE).median
        measured = {key: base * paired(rounds, partial(_ratio, each.name)).median for key, each in candidates.items()}
        rows = [
            {"layout": x.layout, "policy": x.policy, "predicted_s": x.step_s, "measured_s": measured[x.layout, x.policy]}
            for x in choice.candidates
        ]
        rows = _of_rank_0(rows)
        result[name] = {
            "rows": rows,
            "regret": rows[0]["measured_s"] / min(row["measured_s"] for row in rows) - 1,
            "rank_correlation": float(
                spearmanr(*([row[key] for row in rows] for key in ("predicted_s", "measured_s"))).statistic
            ),
        }
    return {"shapes": result, "regret": max(x["regret"] for x in result.values())} | {
        "rank_correlation": min(x["rank_correlation"] for x in result.values())
    }


def _fitted(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> fs.inspect.Hardware:
    """Rates of each collective: those of zero3, and of what ddp alone uses."""
    shape = shapes(options)[FITTED]
    found = {s: c.sharded(s, shape, comm, STRATEGIES[s], APART) for s in ("zero3", "ddp")}
    found[ALONE] = c.sharded(ALONE, shape, fs.SingleComm(), fs.zero3("dp"), fs.SchedulePolicy())
    traces = {s: each.scheduled.trace() for s, each in found.items()}
    _timed(options, comm, shape, found, partial(_say, say, "fit"))
    known = {"synchronous_host": True, "contention": contention(options.nproc), "alone": traces[ALONE]}
    fits = {s: fs.inspect.Hardware.fit(traces[s], found[s].scheduled.schedule, **known) for s in ("zero3", "ddp")}
    both = {kind: {**getattr(fits["ddp"], kind), **getattr(fits["zero3"], kind)} for kind in ("bandwidth", "latency")}
    return replace(fits["zero3"], **both)


def _timed(options: Options, comm: fs.Comm, shape: gpt.Shape, found: Any, say: Callable[[str], None]) -> Any:
    return interleaved(
        {name: each.step for name, each in found.items()},
        gpt.batches(shape, comm.rank),
        rounds=options.rounds,
        block=options.steps,
        warmup=options.warmup,
        settle={name: each.settle for name, each in found.items()},
        barrier=dist.barrier,
        say=say,
    )


def _ratio(name: str, row: dict[str, float]) -> float:
    return row[name] / row[ALONE]


def _say(say: Callable[[str], None], name: str, text: str) -> None:
    say(f"{name}, {text}")


def _of_rank_0(rows: Any) -> Any:
    """Rank 0's: every rank has times of compute of its own."""
    box = [rows]
    dist.broadcast_object_list(box)
    return box[0]
