"""How good :func:`fs.tune`'s choice is: every candidate is predicted, and measured.

The speeds of collectives and of the codec are those of ``fs.inspect.measure``, as a user would take them. The times of compute,
recomputation and update come from two steps of each case without communication, with and without recomputation.

Candidates are all strategies under all policies; under the first policy also with recomputed activations, and with gradients
that travel in 8 bits.

[Note: noise]
Candidates with equal schedules, such as ``ddp`` under any ``prefetch``, are one candidate. Candidates are measured in turns.
Each time is the median over rounds of its ratio to the step without communication of the same round. Those of rounds 1, 3, ...
are compared with those of rounds 2, 4, ...: ``noise`` is their relative difference, the median over candidates.
``ceiling`` is the rank correlation that exact predictions would have with times as noisy as these: the square root of the
reliability, which comes from the correlation of the two halves by the formula of Spearman and Brown. ``order`` counts pairs of
candidates whose times differ by more than twice the noise: the part of them that the predictions have in the right order.
``order_correlation`` is the correlation over these pairs: right ones minus wrong ones, as a part of all (Kendall's, without
pairs that no measurement tells apart). Equally fast candidates, whose order is chance, lower ``rank_correlation`` alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist

import fsharp as fs
from benchmarks import contenders as c, gpt
from benchmarks.options import Options
from benchmarks.prediction import ALONE, FITTED, scaled, shapes as predicted_shapes
from benchmarks.stats import ratio, times
from benchmarks.steps import in_turns, over_ranks
from fsharp.planning.choice import sort_candidates
from fsharp.planning.tune import TOLERANCE

STRATEGIES = {"ddp": fs.ddp("dp"), "zero1": fs.zero1("dp"), "zero2": fs.zero2("dp"), "zero3": fs.zero3("dp")}
POLICIES = {
    "prefetch 1": fs.SchedulePolicy(),
    "gathered once": fs.SchedulePolicy(release="backward"),
    "gathered twice": fs.SchedulePolicy(release="forward"),
    "no prefetch": fs.SchedulePolicy(prefetch=0),
    "no buckets": fs.SchedulePolicy(bucket_nbytes=0),
}
FIRST = "prefetch 1"
RECOMPUTED = "recomputed"
AGAIN = f"{ALONE}, {RECOMPUTED}"
FORMATS = {"": fs.Precision(), "8-bit gradients": fs.Precision(wire=fs.formats.mxint8)}
UNITS = "layers.*"
ORDER = ("embed", UNITS, "head")
Key = tuple[str, str, str]
"""A layout, a policy, and whether activations are recomputed."""


class Case(NamedTuple):
    """What a layout is chosen for."""

    shape: gpt.Shape
    microbatches: int = 1


def cases(options: Options) -> dict[str, Case]:
    """Return what layouts are chosen for, with steps short enough to measure a dozen candidates."""
    found = predicted_shapes(options)
    fitted, base, narrow = (found[name] for name in (FITTED, "the benchmark's", "narrow layers"))
    half = {"time": max(options.time // 2, 1), "batch": max(options.batch // 2, 1)}
    several = replace(fitted, layers=max(options.layers // 2, 1), batch=4)
    return {
        FITTED: Case(fitted),
        "4 microbatches": Case(several, 4),
        "the benchmark's": Case(replace(base, **half)),
        "narrow layers": Case(replace(narrow, **half)),
    }


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``tune``, of as many processes as there are: by case, seconds of each candidate and how good the choice is."""
    result: dict[str, Any] = {}
    links = fs.inspect.measure(comm, compute_times=(0.0, 0.0), steps=options.calibration_steps)
    for name, case in cases(options).items():
        tree = gpt.tree_of(gpt.build(case.shape))
        layouts = {
            ", ".join(filter(None, (s, form))): fs.plan(tree, comm.mesh, strategy, units=UNITS, precision=precision)
            for (s, strategy), (form, precision) in product(STRATEGIES.items(), FORMATS.items())
        }
        plain = {name: layout for name, layout in layouts.items() if name in STRATEGIES}
        plan = {"order": ORDER, "microbatches": case.microbatches, "backend": "gloo"}
        planned = {(s, p, ""): fs.schedules.plan_step(plain[s], POLICIES[p], **plan) for s, p in product(plain, POLICIES)}
        keys = distinct(planned)
        keys += [(s, FIRST, RECOMPUTED) for s in plain] + [(s, FIRST, "") for s in layouts if s not in plain]
        found = {key: _contender(_text(key), case, comm, *key) for key in keys}
        single = partial(c.sharded, shape=case.shape, comm=fs.SingleComm(), strategy=fs.zero3("dp"))
        alone = single(ALONE, microbatches=case.microbatches)
        again = single(AGAIN, microbatches=case.microbatches, remat=True)
        trace = alone.scheduled.start_trace()
        everyone = {each.name: each for each in (alone, again, *found.values())}
        rounds, _ = in_turns(everyone, case.shape, options, lambda text, n=name: say(f"{n}, {text}"))
        rounds = over_ranks(rounds)[1]
        own = replace(links, compute_times=trace.compute_times(), update_s=trace.update_time())
        hardware = scaled(own, alone.scheduled.schedule, times(rounds, ALONE).median)
        hardware = replace(hardware, compute_times=_with_recomputation(hardware.compute_times, rounds, case.microbatches))
        candidates: dict[Key, fs.inspect.Candidate] = {}
        for chosen, policies, remat in (
            (plain, POLICIES, {"": ()}),
            (layouts, {FIRST: POLICIES[FIRST]}, {"": (), RECOMPUTED: "**"}),
        ):
            choice = fs.tune(
                chosen, hardware, budget=1e12, policies=policies, remat=remat, activations=(0.0, 0.0), effort=math.inf, **plan
            )
            candidates |= {(x.layout, x.policy, x.remat): x for x in choice.candidates}
        best = sort_candidates([candidates[key] for key in keys], 1e12, TOLERANCE)[0]
        predicted = {key: candidates[key].step_s for key in keys}
        mine = judged(predicted, rounds, choice=(best.layout, best.policy, best.remat))
        result[f"{name}, {comm.mesh.size} processes"] = _of_rank_0(mine)
    return summed_up(result)


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the part ``tune`` of several numbers of processes."""
    return summed_up({name: case for part in parts for name, case in part["shapes"].items()})


def summed_up(found: dict[str, Any]) -> dict[str, Any]:
    """Return cases with the worst of their figures. Cases without candidates that differ do not count for the order."""
    worst = {"rank_correlation": min(each["rank_correlation"] for each in found.values())}
    for name in ("order", "order_correlation"):
        worst[name] = min([each[name] for each in found.values() if each["pairs"]], default=1.0)
    return {"shapes": found, "regret": max(each["regret"] for each in found.values()), **worst}


def distinct(schedules: Mapping[Key, fs.schedules.Schedule]) -> list[Key]:
    """Return the keys of the first of equal schedules."""
    first: dict[Any, Key] = {}
    for key, schedule in schedules.items():
        first.setdefault(schedule.ops, key)
    return list(first.values())


def judged(predicted: Mapping[Key, float], rounds: Sequence[Mapping[str, float]], *, choice: Key) -> dict[str, Any]:
    """Return predicted and measured seconds, the choice first and then by prediction, and the figures of [Note: noise]."""
    from scipy.stats import spearmanr  # which takes most of a second, also where nothing is compared

    measured = {key: _seconds(rounds, key) for key in predicted}
    halves = [[_seconds(rounds[i::2], key) for key in predicted] for i in range(2)]
    noise = median(abs(a - b) / (a + b) * 2 for a, b in zip(*halves, strict=True))
    between_halves = max(float(spearmanr(*halves).statistic), 0.0)
    apart = [pair for pair in combinations(predicted, 2) if _differ(*(measured[key] for key in pair), 2 * noise)]
    signs = [(measured[a] - measured[b]) * (predicted[a] - predicted[b]) for a, b in apart]
    right, wrong = sum(x > 0 for x in signs), sum(x < 0 for x in signs)
    rows = [
        {"layout": key[0], "policy": key[1], "remat": key[2], "predicted_s": predicted[key], "measured_s": measured[key]}
        for key in sorted(predicted, key=lambda key: (key != choice, predicted[key]))
    ]
    return {
        "rows": rows,
        "regret": measured[choice] / min(measured.values()) - 1,
        "rank_correlation": float(spearmanr(list(predicted.values()), list(measured.values())).statistic),
        "error": median(abs(predicted[key] / measured[key] - 1) for key in predicted),
        "noise": noise,
        "ceiling": math.sqrt(2 * between_halves / (1 + between_halves)),
        "pairs": len(apart),
        "order": right / len(apart) if apart else 1.0,
        "order_correlation": (right - wrong) / len(apart) if apart else 1.0,
    }


def _differ(a: float, b: float, by: float) -> bool:
    return abs(a - b) > by * min(a, b)


def _seconds(rounds: Sequence[Mapping[str, float]], key: Key) -> float:
    """What slows a round down slows all of its steps: seconds are those of the step alone, times ratios within rounds."""
    return times(rounds, ALONE).median * median(row[_text(key)] / row[ALONE] for row in rounds)


def _text(key: Key) -> str:
    return ", ".join(filter(None, key))


def _contender(name: str, case: Case, comm: fs.Comm, layout: str, policy: str, remat: str) -> c.FsharpContender:
    strategy, _, form = layout.partition(", ")
    options = {"microbatches": case.microbatches, "precision": FORMATS[form], "remat": bool(remat)}
    return c.sharded(name, case.shape, comm, STRATEGIES[strategy], POLICIES[policy], **options)


def _with_recomputation(compute: Any, rounds: Sequence[Mapping[str, float]], microbatches: int) -> dict[str, Any]:
    """Add what recomputation costs without communication, by unit in proportion to its forward."""
    added_s = times(rounds, ALONE).median * (ratio(rounds, AGAIN, ALONE).median - 1) / microbatches
    part = max(added_s, 0.0) / sum(forward_s for forward_s, _ in compute.values())
    return {unit: (forward_s, backward_s, part * forward_s) for unit, (forward_s, backward_s) in compute.items()}


def _of_rank_0(found: Any) -> Any:
    """Rank 0's: every rank has times of compute of its own."""
    box = [found]
    dist.broadcast_object_list(box)
    return box[0]
