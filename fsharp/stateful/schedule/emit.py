"""Emit the ops of a step along the events of its program. The ops have no addresses yet."""

from collections.abc import Collection, Iterable

from fsharp.stateful.schedule.costs import Bundles, bucket_limit_nbytes, group_into_bundles
from fsharp.stateful.schedule.emit_gradients import GradientOps, microbatches_before_reduce
from fsharp.stateful.schedule.emit_parameters import ParameterOps
from fsharp.stateful.schedule.ops import FINISH, GATHER, REDUCE, SPREAD, OpSpec, Phase
from fsharp.stateful.schedule.policy import FINISHES, SchedulePolicy
from fsharp.stateful.schedule.program import Program, count_gradients
from fsharp.stateful.schedule.schedule import coalescing_key
from fsharp.stateful.schedule.unplaced import OpList, UnplacedOp


class BundlesByKind:
    """The bundles of units, for each kind of collective: gathers, reductions, final reductions, gathers after the update."""

    def __init__(self, program: Program, policy: SchedulePolicy) -> None:
        self._policy, self._facts, names = policy, program.facts, [unit.name for unit in program.units]
        used = [event.unit for event in program.events if event.kind in ("forward", "backward")]
        done = _in_order_of_gradients(program)
        self.gathers = self._bundles(GATHER, used, [u.name for u in program.units if u.gathered])
        self.reduces = self._bundles(REDUCE, done, names)
        self.finishes = self._bundles(FINISH, done, names)
        self.spreads = self._bundles(SPREAD, [event.unit for event in program.events if event.unit], names)

    def _bundles(self, spec: OpSpec, order: Iterable[str], units: Iterable[str]) -> Bundles:
        facts, wanted = self._facts, dict.fromkeys(units)
        order = [unit for unit in dict.fromkeys([*order, *wanted]) if unit in wanted]
        sent = {unit: sum(call.nbytes for call in spec.collectives(facts[unit])) for unit in order}
        most = self._policy.bucket_nbytes
        if most is None:
            most = bucket_limit_nbytes(sent.values())
        groups = {unit: i for i, group in enumerate(self._policy.together) for unit in group}
        return group_into_bundles(order, sent, {unit: coalescing_key(spec, facts[unit]) for unit in order}, most, groups)


def emit_ops(
    program: Program,
    policy: SchedulePolicy,
    buckets: BundlesByKind,
    kept: Collection[int] = (),
    *,
    finishes: int = FINISHES,
    sum_late: bool,
) -> list[UnplacedOp]:
    """Return the ops of a step in the order of issue. Parameters of uses in ``kept`` stay from forward to backward."""
    ops, microbatch = OpList(program), 0
    parameters = ParameterOps(ops, program, policy, buckets.gathers, buckets.spreads, kept)
    gradients = GradientOps(ops, buckets.reduces, buckets.finishes, finishes, sum_late=sum_late)
    casts, last = count_gradients(program.events), microbatches_before_reduce(program.events)
    gradients.begin_microbatch(casts[0], is_last=0 in last)
    for i, event in enumerate(program.events):
        phase: Phase = "forward" if event.kind.startswith("forward") else "backward"
        if event.kind not in ("backward_end", "microbatch_end", "update"):
            parameters.emit_moves(i, phase)
        match event.kind:
            case "forward" | "backward":
                parameters.emit_use(event, phase, i)
            case "backward_end":
                parameters.emit_releases(i, "backward")  # first, so that the gradient may take the parameters' memory
                gradients.emit_cast(event, i)
                parameters.emit_gathers(i, "backward")
            case "microbatch_end":
                gradients.end_microbatch(i)
                parameters.emit_moves(i, "backward")
                microbatch += 1
                gradients.begin_microbatch(casts[microbatch], is_last=microbatch in last)
            case "reduce":
                gradients.end_all_reductions(i)
            case "fetch":
                parameters.emit_fetch(event.unit, i)
            case "update":
                parameters.emit_update(i, is_last=i == len(program.events) - 1)
    return ops.ops


def _in_order_of_gradients(program: Program) -> list[str]:
    """Return units in the order in which their gradients are complete, each in the first microbatch with its gradient."""
    here, result = dict[str, None](), dict[str, None]()
    for event in program.events:
        if event.kind == "microbatch_end":
            result.update(here)
            here = {}
        elif event.has_gradient:
            here.pop(event.unit, None)
            here[event.unit] = None
    return list(result | here)
