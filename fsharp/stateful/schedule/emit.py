"""Emit the ops of a step along the events of its program. The ops have no addresses yet."""

from collections.abc import Collection, Iterable

from fsharp.stateful.schedule.costs import BucketOfUnit, bucket_and_unit_limits, group_into_buckets
from fsharp.stateful.schedule.emit_gradients import GradientOps, units_reduced_after_microbatches
from fsharp.stateful.schedule.emit_parameters import ParameterOps
from fsharp.stateful.schedule.ops import FINAL_REDUCE, GATHER, REDUCE, UPDATE_GATHER, OpSpec, Phase
from fsharp.stateful.schedule.policy import MAX_FINAL_REDUCTIONS, SchedulePolicy
from fsharp.stateful.schedule.program import Program, num_gradients_by_microbatch, split_by_microbatch
from fsharp.stateful.schedule.schedule import coalescing_key
from fsharp.stateful.schedule.unplaced import OpList, UnplacedOp


class BucketsByCollective:
    """The buckets into which units are joined, for each of four collectives: see the fields."""

    def __init__(self, program: Program, policy: SchedulePolicy) -> None:
        self._policy, self._facts, names = policy, program.facts, [unit.name for unit in program.units]
        used = [event.unit for event in program.events if event.kind in ("forward", "backward")]
        done = _units_in_gradient_order(program)
        self.gathers = self._group_units(GATHER, used, [u.name for u in program.units if u.gathered])
        self.reduces = self._group_units(REDUCE, done, names)
        self.final_reduces = self._group_units(FINAL_REDUCE, done, names)
        self.update_gathers = self._group_units(UPDATE_GATHER, [event.unit for event in program.events if event.unit], names)

    def _group_units(self, spec: OpSpec, order: Iterable[str], units: Iterable[str]) -> BucketOfUnit:
        facts, wanted = self._facts, dict.fromkeys(units)
        order = [unit for unit in dict.fromkeys([*order, *wanted]) if unit in wanted]
        sent = {unit: sum(call.nbytes for call in spec.collectives(facts[unit])) for unit in order}
        calls = max([spec.collectives(facts[unit]) for unit in order], key=len, default=())
        num_messages, given = sum(2 if call.op == "all_reduce" else 1 for call in calls), self._policy.bucket_nbytes
        limits = (given, given) if given is not None else bucket_and_unit_limits(sent.values(), num_messages=num_messages)
        groups = {unit: i for i, group in enumerate(self._policy.together) for unit in group}
        keys = {unit: coalescing_key(spec, facts[unit]) for unit in order}
        return group_into_buckets(order, sent, keys, *limits, groups)


def emit_ops(
    program: Program,
    policy: SchedulePolicy,
    buckets: BucketsByCollective,
    kept_uses: Collection[int] = (),
    *,
    max_final_reductions: int = MAX_FINAL_REDUCTIONS,
    sum_late: bool,
) -> list[UnplacedOp]:
    """Return the ops of a step in the order of issue. Parameters of uses in ``kept_uses`` stay from forward to backward."""
    ops, microbatch = OpList(program), 0
    parameters = ParameterOps(ops, program, policy, buckets.gathers, buckets.update_gathers, kept_uses)
    gradients = GradientOps(ops, buckets.reduces, buckets.final_reduces, max_final_reductions, sum_late=sum_late)
    casts, reduced = num_gradients_by_microbatch(program.events), units_reduced_after_microbatches(program)
    gradients.begin_microbatch(casts[0], reduced.get(0, ()))
    for i, event in enumerate(program.events):
        ops.begin_event(i)
        phase: Phase = "forward" if event.kind.startswith("forward") else "backward"
        if event.kind not in ("backward_end", "microbatch_end", "update"):
            parameters.emit_releases(phase)
            parameters.emit_gathers(phase)
        match event.kind:
            case "forward" | "backward":
                parameters.emit_wait_and_compute(event, phase)
            case "backward_end":
                parameters.emit_releases("backward")  # first, so that the gradient may take the parameters' memory
                gradients.emit_cast_and_reduction(event)
                parameters.emit_gathers("backward")
            case "microbatch_end":
                gradients.end_microbatch()
                parameters.emit_releases("backward")
                parameters.emit_gathers("backward")
                microbatch += 1
                gradients.begin_microbatch(casts[microbatch], reduced.get(microbatch, ()))
            case "reduce":
                gradients.end_all_reductions()
            case "fetch":
                parameters.emit_state_fetch(event.unit)
            case "update":
                parameters.emit_update(event, is_last=i == len(program.events) - 1)
    return ops.ops


def _units_in_gradient_order(program: Program) -> list[str]:
    """Return units in the order in which their gradients are complete, in the first microbatch with a gradient of the unit."""
    result = dict[str, None]()
    for events in split_by_microbatch(program.events):
        last = {event.unit: i for i, event in enumerate(events) if event.has_gradient}
        result |= dict.fromkeys(sorted(last, key=last.__getitem__))
    return list(result)
