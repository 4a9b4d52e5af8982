"""Search: simulate candidates in order of their lower bounds, until no other candidate can be faster."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fsharp.errors import ScheduleError
from fsharp.functional.layout.layout import Layout
from fsharp.functional.traffic import traffic_of_units
from fsharp.inspect.hardware import compute_times
from fsharp.planning.choice import Candidate, StepArguments
from fsharp.planning.plan_step import ROOT
from fsharp.planning.space import LayoutOption, refusal_text, updated_share
from fsharp.stateful.schedule.policy import SchedulePolicy

CandidateNames = tuple[str, str, str]
_BAR_WIDTH = 24
_BAR_DELAY_S = 1.0
"""Seconds after which progress shows."""


@dataclass(frozen=True, eq=False)
class Combination:
    """One combination to predict: a layout, a policy and a choice of recomputation."""

    names: CandidateNames
    option: LayoutOption
    policy: SchedulePolicy
    arguments: StepArguments

    @property
    def non_defaults(self) -> tuple[str, ...]:
        """Names of the choices that are not the defaults, such as ``remat``: see :attr:`Candidate.non_defaults`."""
        return self.arguments.non_defaults(self.option.layout, self.policy)

    def lower_bound_candidate(self, step_s: float) -> Candidate:
        """Return a candidate with ``step_s`` as lower bound of the step's seconds. The candidate's memory is without arena."""
        memory, nbytes = self.arguments.memory_and_peak(self.option.layout, self.policy, arena_nbytes=0)
        return Candidate(*self.names, step_s, memory, nbytes, 0, is_unsimulated=True, non_defaults=self.non_defaults)


def search_candidates(
    combinations: Sequence[Combination], budget: float, tolerance: float, *, effort: float, show: bool
) -> list[Candidate]:
    """Return a candidate for each combination, in the order of ``combinations``. Simulate the steps that may be fastest.

    Combinations are simulated in order of a lower bound of their step: the units' time to compute, or the collectives' time to
    send, whichever is longer. Combinations with equal schedules are simulated once. A candidate is not simulated, and has
    ``is_unsimulated=True``, in three cases:

    - Its memory without the arena exceeds ``budget``.
    - Its lower bound is longer than the fastest step so far, by more than ``tolerance``.
    - ``effort`` is used up, and a simulated step fits into ``budget``.

    A candidate is refused if no schedule fits into the ``memory_budget`` of its policy.

    Args:
        combinations: the combinations to predict.
        budget: the most bytes that a rank may use.
        tolerance: fraction of the fastest step's time, such as 0.02.
        effort: number of units of layouts to simulate; each counts once for each microbatch. Infinite simulates all
            combinations whose memory without the arena fits into ``budget``.
        show: whether to show a progress bar.
    """
    found: dict[CandidateNames, Candidate] = {}
    least: dict[tuple[LayoutOption, tuple[str, ...], bool], float] = {}
    waiting: list[tuple[float, int, Combination]] = []
    policies = {name: i for i, name in enumerate(dict.fromkeys(each.names[1] for each in combinations))}
    for each in combinations:
        at_rest = each.lower_bound_candidate(math.inf)
        if at_rest.peak_nbytes > budget:
            found[each.names] = at_rest
            continue
        separate = each.policy.separate_groups
        is_one_group = not (each.arguments.backend == "gloo" if separate is None else separate)
        key = each.option, each.arguments.remat, is_one_group
        if key not in least:
            least[key] = least_seconds(each.option.layout, each.arguments, is_one_group=is_one_group)
        waiting.append((least[key], policies[each.names[1]], each))
    # Bounds that differ by less than 0.1 % count as equal. Among equal ones earlier policies come first, of all layouts.
    waiting.sort(key=lambda row: (round(math.log(row[0] or 1e-12), 3), row[1]))
    best, spent = math.inf, 0
    same: dict[object, Candidate] = {}
    with progress_bar(len(waiting), show=show) as advance:
        for bound_s, _, each in waiting:
            alike = _schedule_key(each)
            is_known = alike in same
            is_enough = spent >= effort and best < math.inf
            if not is_known and math.isfinite(effort) and (bound_s > (1 + tolerance) * best or is_enough):
                found[each.names] = each.lower_bound_candidate(bound_s)
            else:
                if not is_known:
                    same[alike] = _predict_or_refuse(each)
                    spent += len(each.option.layout.units) * each.arguments.microbatches
                layout, policy, remat = each.names
                mine = replace(same[alike], layout=layout, policy=policy, remat=remat, non_defaults=each.non_defaults)
                found[each.names] = mine
                if mine.peak_nbytes <= budget and not mine.refused:
                    best = min(best, mine.step_s)
            advance(f"fastest so far {1e3 * best:.1f} ms" if math.isfinite(best) else "nothing fits yet")
    return [found[each.names] for each in combinations]


def _predict_or_refuse(combination: Combination) -> Candidate:
    """Return the prediction for a combination; a refused candidate if no schedule fits into the policy's memory budget."""
    arguments, layout, policy = combination.arguments, combination.option.layout, combination.policy
    try:
        schedule = arguments.schedule(layout, policy)
    except ScheduleError as error:
        if policy.memory_budget is None:
            raise
        return replace(combination.lower_bound_candidate(math.inf), refused=refusal_text(str(error)))
    return arguments.predict_candidate(schedule, layout, policy, combination.names)


def _schedule_key(combination: Combination) -> object:
    """Return a key that combinations with equal schedules share. Without gathers ``prefetch`` and ``release`` do not count."""
    policy = combination.policy
    is_gathered = any(unit.strategy.params.sharded_axes for unit in combination.option.layout.units)
    if not is_gathered and not policy.offload:
        policy = replace(policy, prefetch=1, release="room")
    return combination.option, policy, combination.arguments.remat


def least_seconds(layout: Layout, arguments: StepArguments, *, is_one_group: bool) -> float:
    """Return a lower bound of the seconds of a step: the time of units and update, or the time to send, if longer.

    ``is_one_group``: whether gathers and reductions share process groups, and so run one after another.
    """
    hardware = arguments.hardware
    times = compute_times(hardware, [unit.name or ROOT for unit in layout.units if unit.groups or unit.tie_owner_unit_names])
    computed = 0.0
    todo = [(use, False) for use in arguments.uses]
    while todo:
        use, inside = todo.pop()
        again = inside or any((name or ROOT) in arguments.remat for name in use.units)
        todo += [(each, again) for each in use.inner]
        for name in use.units:
            forward_s, backward_s, recompute_s = times[name or ROOT]
            is_trained = use.has_backward and bool(layout[name].trainable_groups)
            computed += forward_s + (backward_s + recompute_s * again) * is_trained
    computed = arguments.microbatches * computed + updated_share(layout) * hardware.update_s
    sent: dict[bool, float] = {}
    # Parameters may stay from one microbatch to the next.
    gathered_once = traffic_of_units(layout, microbatches=1, release=False)
    for call, number in traffic_of_units(layout, microbatches=arguments.microbatches, release=False).items():
        if call.op == "all_gather":
            number = gathered_once[call]
        is_gather = call.op == "all_gather" and not is_one_group
        seconds = hardware.collective_s([call]) - hardware.latency_s([(call.op, call.axis)])  # a bucket has one latency
        sent[is_gather] = sent.get(is_gather, 0.0) + number * seconds
    return max([computed, *sent.values()]) * (1 - 1e-6)


@contextmanager
def progress_bar(total: int, *, show: bool) -> Iterator[Callable[[str], None]]:
    """Yield ``advance(text)``, a function that counts one more of ``total`` as done.

    With ``show``, and after a second, the function draws a progress bar and the text on stderr.
    """
    began, shown, done = time.monotonic(), 0.0, 0

    def advance(text: str) -> None:
        nonlocal shown, done
        done += 1
        now = time.monotonic()
        if show and now - began > _BAR_DELAY_S and now - shown > 0.1:
            shown = now
            bar = ("#" * (_BAR_WIDTH * done // total)).ljust(_BAR_WIDTH, ".")
            print(f"\rtune: [{bar}] {done} of {total}, {now - began:.0f} s, {text}\033[K", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
