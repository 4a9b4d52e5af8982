"""Emit the ops of a step along the events of its program. The ops have no addresses yet."""

from collections.abc import Collection

from fsharp.stateful.schedule.costs import BucketsByCollective
from fsharp.stateful.schedule.emit_gradients import GradientOps, units_reduced_after_microbatches
from fsharp.stateful.schedule.emit_parameters import ParameterOps
from fsharp.stateful.schedule.ops import Phase
from fsharp.stateful.schedule.policy import MAX_FINAL_REDUCTIONS, SchedulePolicy
from fsharp.stateful.schedule.program import Program, num_gradients_by_microbatch
from fsharp.stateful.schedule.unplaced import OpList, UnplacedOp


def emit_ops(
    program: Program,
    policy: SchedulePolicy,
    buckets: BucketsByCollective,
    kept_uses: Collection[int] = (),
    *,
    max_final_reductions: int = MAX_FINAL_REDUCTIONS,
    sum_late: bool,
) -> list[UnplacedOp]:
    """Return the ops of a step in the order of issue.

    ``kept_uses``: numbers of the uses that keep their parameters until the backward. Others are as in :class:`GradientOps`.
    """
    ops, microbatch = OpList(program), 0
    parameters = ParameterOps(ops, program, policy, buckets, kept_uses)
    gradients = GradientOps(ops, buckets, max_final_reductions, sum_late=sum_late)
    casts, reduced = num_gradients_by_microbatch(program.events), units_reduced_after_microbatches(program)
    gradients.begin_microbatch(casts[0], reduced.get(0, ()))
    for i, event in enumerate(program.events):
        ops.begin_event(i)
        phase: Phase = "forward" if event.kind.startswith("forward") else "backward"
        if event.kind not in ("backward_end", "microbatch_end", "update"):
            parameters.emit_releases_of_event(phase)
            parameters.emit_gathers_of_event(phase)
        match event.kind:
            case "forward" | "backward":
                parameters.emit_wait_and_compute(event, phase)
            case "backward_end":
                parameters.emit_releases_of_event("backward")  # first, so that the gradient may take the parameters' memory
                gradients.emit_cast_and_reduction(event)
                parameters.emit_gathers_of_event("backward")
            case "microbatch_end":
                gradients.end_microbatch()
                parameters.emit_releases_of_event("backward")
                parameters.emit_gathers_of_event("backward")
                microbatch += 1
                gradients.begin_microbatch(casts[microbatch], reduced.get(microbatch, ()))
            case "reduce":
                gradients.end_all_reductions()
            case "fetch":
                parameters.emit_state_fetch(event.unit)
            case "update":
                parameters.emit_update(event, is_last=i == len(program.events) - 1)
    return ops.ops
