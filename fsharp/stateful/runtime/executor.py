"""Executor: run the ops of a step, from a schedule or from ``EagerOps``, with the same code.

The executor uses units, their memory, lanes and the transport; it does not depend on programs and schedulers. For each kind of
op the table :data:`BIND` has a function that binds an op to its tensors once, and returns the op's action.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.errors import FormatError, ScheduleError, problem
from fsharp.functional.comm.agree import agree
from fsharp.functional.comm.protocol import Comm, innermost_comm
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.stateful.runtime.bound_op import Action, BoundOp, bucket_label
from fsharp.stateful.schedule import ops
from fsharp.stateful.schedule.ops import OpSpec
from fsharp.stateful.transport.base import Transport
from fsharp.stateful.transport.streams import Lanes, OpKey
from fsharp.stateful.units.axis_chain import ChainInput, GatherInput, gather_along, reduce_along_chains
from fsharp.stateful.units.gradient_route import Grads
from fsharp.stateful.units.host_copies import HostDeviceCopies
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.unsharded_buffer import UnshardedBuffer, buffers_stamp
from fsharp.stateful.units.update_gather import UpdateGather


class Executor:
    """Runs the ops of one step after another.

    Args:
        comm: the ranks, for the names of trees in labels.
        separate_groups: whether gathers and reductions have process groups of their own.

    Attributes:
        number: number of the step under way, which grows with each step.
        step_name: name of the step under way, for labels of collectives; empty outside of steps.
        microbatch_name: name of the microbatch under way, for labels of collectives.
        incoming: gradients of the use whose backward has just ended.
        update_gathers: by unit, the gather of updated parameters that an op has to begin.
        host_copies: by unit, the copies of state between device and host memory that an op has to begin.
        copied_units: keys of all units of the last :meth:`set_host_copies`; ops remove units from ``host_copies`` alone.
        fetched: keys of the fetch ops that have run in this step.
        reducing: by unit and kind of op, the op that has begun a reduction under way.
    """

    def __init__(self, transport: Transport, lanes: Lanes, comm: Comm, *, separate_groups: bool) -> None:
        self.transport, self.lanes, self.comm = transport, lanes, comm
        self._own, self._separate_groups = innermost_comm(transport.comm), separate_groups
        self.reset_after_rank_restart()

    def reset_after_rank_restart(self) -> None:
        """Reset the executor to the state of a new one, for a new generation of the job (after restarts of ranks)."""
        self.is_connected, self.number = False, 0
        if self.transport.groups is not None:
            self.transport.groups.reset_after_rank_restart()
        self.begin_step("")

    def make_process_groups(self) -> None:
        """Make the process groups before the first collective, unless they exist already. All ranks have to call this."""
        if not self.is_connected:
            restart_replay.record_and_call(self._make_process_groups)

    def _make_process_groups(self) -> None:
        if isinstance(self._own, ProcessGroupComm):
            # Making groups over the job's store does not notice a rank that has ended, and this collective does.
            agree("Scheduler", {"separate_groups": str(self._separate_groups)}, self._own)
            if self._separate_groups and not self._own.is_nccl:
                self._own.use_own_groups()
        if self.transport.groups is not None:
            self.transport.groups.make_groups()
        self.is_connected = True

    def begin_step(self, name: str) -> None:
        """Begin a step with this name in labels. Only the previous step's gathers for this step may be under way."""
        self.number += 1
        self.step_name, self.microbatch_name = name, "microbatch 0"
        self.incoming: Grads | None = None
        self.update_gathers: dict[str, UpdateGather] = {}
        self.host_copies: dict[str, HostDeviceCopies] = {}
        self.copied_units: tuple[str, ...] = ()
        self.fetched: list[OpKey] = []
        self.reducing: dict[tuple[str, OpSpec], BoundOp] = {}

    def set_label_names(self, *, step: str | None = None, microbatch: str | None = None) -> None:
        """Set the names of step and microbatch in labels. None keeps a name; an empty step means that no step is under way."""
        self.step_name = self.step_name if step is None else step
        self.microbatch_name = self.microbatch_name if microbatch is None else microbatch

    def set_backward_gradients(self, grads: Grads | None) -> None:
        """Store the gradients of a use whose backward has ended, for the ops at this event."""
        self.incoming = grads

    def set_host_copies(
        self, host_copies: Mapping[str, HostDeviceCopies], update_gathers: Mapping[str, UpdateGather] = {}
    ) -> None:
        """Give host copies and gathers of updated parameters, by unit, to the later ops that begin them."""
        self.host_copies, self.copied_units, self.update_gathers = dict(host_copies), tuple(host_copies), dict(update_gathers)

    def set_lanes(self, lanes: Lanes) -> None:
        """Run later ops on these lanes. Ops that are bound already keep their lanes."""
        self.lanes = lanes

    def action_of(self, bound: BoundOp) -> Action:
        """Return the action of an op, made by :data:`BIND`: a function without arguments that runs the op."""
        bind = BIND.get(bound.spec)
        action = bind(self, bound) if callable(bind) else None
        if not callable(action):
            rows = [("in BIND", bind), ("which returned", action)]
            remedy = f"Add the kind to {__name__}.BIND: a function of an Executor and a BoundOp that returns what to call."
            raise ScheduleError(problem(f"op {bound.op}", f"ops of kind {bound.op.kind!r} have no action.", rows, remedy))
        if bound.gradients_to_wait_for:
            action = partial(_run_actions, [*(gradient.wait for gradient in bound.gradients_to_wait_for), action])
        encodes = any(each.unit is not None and each.unit.layout.has_any_format for each in bound.bucket_members)
        return partial(self.run_reporting_format_error, action) if encodes else action

    def run_reporting_format_error(self, action: Action) -> None:
        """Run ``action``. If ``action`` raises a FormatError, tell other ranks, and raise the error."""
        try:
            action()
        except FormatError as error:
            self.report_failure(error, "a call outside of any step")
            raise

    def report_failure(self, error: BaseException, where: str) -> None:
        """Tell other ranks that this rank has failed, and where: in the step under way, or if there is none in ``where``."""
        if isinstance(self._own, ProcessGroupComm):
            self._own.watch.report_failure(error, self.step_name or where)

    def total_collective_wait_s(self) -> float:
        """Return the seconds for which the main thread has waited for collectives so far."""
        return self._own.watch.statuses.waited_s if isinstance(self._own, ProcessGroupComm) else 0.0

    def action_on_lane(self, bound: BoundOp, start: Action, *, after_compute: bool = True) -> Action:
        """Return an action that runs ``start`` on the op's lane: after the ops ``bound.after``, and if asked after compute."""
        lanes, stream, key, after = self.lanes, bound.spec.stream, bound.key, bound.after

        def action() -> None:
            with lanes.on_lane(stream, key, after, after_compute=after_compute):
                start()

        return action if lanes.has_streams else start

    def action_after_waits(self, bound: BoundOp, action: Action) -> Action:
        """Return an action that makes compute wait for the ops in ``bound.after``, and then runs ``action``."""
        lanes, after = self.lanes, bound.after

        def wait_and_act() -> None:
            lanes.stream_wait_ops(after)
            action()

        return wait_and_act if after and lanes.has_streams else action

    def label_of_units(self, units: Iterable[UnitState], text: str) -> str:
        """Return the label of a collective of these units, which ranks compare. ``text`` comes from :func:`bucket_label`."""
        if not self.transport.compares_labels:
            return ""
        names = dict.fromkeys([unit.find_tree_label(self.comm) for unit in units])
        return self.with_step_prefix(f"{''.join(names)}{text}")

    def with_step_prefix(self, text: str) -> str:
        """Return ``text`` with the current step and microbatch as a prefix."""
        return f"{self.step_name}, {self.microbatch_name}: {text}" if self.step_name else text

    def end_all_reductions(self) -> None:
        """Wait for all reductions under way, and add their results to the gradients."""
        self.lanes.stream_wait_lanes("gather", "reduce")
        for bound in list(self.reducing.values()):
            _action_to_accumulate(bound)()
            bound.gradient.wait()
        self.reducing.clear()


def _run_actions(actions: Iterable[Action]) -> None:
    for action in actions:
        action()


def _action_to_accumulate(bound: BoundOp) -> Action:
    """Return the action that adds a reduction's result to the gradient. ``bound``: the reduction's first op, or its last op."""
    if bound.spec in (ops.FINAL_REDUCE, ops.FINAL_ACCUMULATE):
        return bound.gradient.end_final_reduction
    assert bound.block is not None
    return partial(bound.gradient.accumulate, bound.block)


def _bind_gather(executor: Executor, bound: BoundOp) -> Action:
    rows = [(each, each.unit, each.unsharded) for each in bound.bucket_members]
    units = [(each, unit, unsharded) for each, unit, unsharded in rows if unit is not None and unsharded is not None]
    coalesced, transport, what = len(units) > 1, executor.transport, bucket_label(bound.bucket_members)
    waits = transport.waits_on_host  # else the gather is queued behind the ops that fill a node's buffers, on the same stream

    def start() -> None:
        if not executor.is_connected:
            executor.make_process_groups()
        gather_inputs: list[GatherInput] = []
        found = [row for row in units if row[1].node is not None]  # a unit without a node is gathered when it is used
        for _, unit, unsharded in found:
            node = unit.node
            assert node is not None
            if waits and node.lazy is not None:
                node.lazy.wait()
            gather_inputs += unsharded.begin_fill(node, executor.number)
        if found:
            text = what if len(found) == len(units) else bucket_label([each for each, _, _ in found])
            label = executor.label_of_units([unit for _, unit, _ in found], text)
            works = gather_along(found[0][2].axes, gather_inputs, transport, label=label, coalesced=coalesced)
            for _, _, unsharded in found:
                unsharded.works.extend(works)

    return executor.action_on_lane(bound, start)


def _bind_wait(executor: Executor, bound: BoundOp) -> Action:
    unit, unsharded = bound.unit, bound.unsharded
    assert unit is not None
    assert unsharded is not None
    lanes, transport = executor.lanes, executor.transport
    after = bound.after if lanes.has_streams else ()

    def gather_now() -> None:
        assert unit.node is not None
        unsharded.wait()
        with lanes.on_lane("gather", bound.key, after):
            if transport.waits_on_host:
                unit.node.wait()
            label = f"{executor.label_of_units([unit], bucket_label([bound]))} of other values than were gathered"
            gather_inputs = unsharded.begin_fill(unit.node, executor.number)
            unsharded.works.extend(gather_along(unsharded.axes, gather_inputs, transport, label=label, coalesced=False))
        lanes.stream_wait_ops([bound.key])

    def action() -> None:
        assert unit.node is not None
        seen = buffers_stamp(unit.node)
        if unsharded.filled_from is None or (unsharded.is_carried and not unsharded.is_filled_from(seen)):
            gather_now()
        if unsharded.works:
            unsharded.wait()
        if after:
            lanes.stream_wait_ops(after)
        if not unsharded.is_filled_from(seen):
            raise ScheduleError(
                f"the parameters of unit {unit.key!r} were changed in place between their gather and their use. Change them "
                "between steps and pass gather_at_start=False, or make new parameters."
            )

    return action


def _bind_method(method: Callable[[UnshardedBuffer], None], executor: Executor, bound: BoundOp) -> Action:
    assert bound.unsharded is not None
    return executor.action_after_waits(bound, partial(method, bound.unsharded))


def _bind_update_gather(executor: Executor, bound: BoundOp) -> Action:
    def start() -> None:
        if not executor.is_connected:
            executor.make_process_groups()
        moving = [each for each in bound.bucket_members if each.op.unit in executor.update_gathers]
        gathers = [executor.update_gathers.pop(each.op.unit) for each in moving]
        gather_inputs = [each for gather in gathers for each in gather.gather_inputs]
        label = executor.label_of_units([gather.unit for gather in gathers], bucket_label(moving))
        works = gather_along(gathers[0].axes, gather_inputs, executor.transport, label=label, coalesced=len(gathers) > 1)
        for gather in gathers:
            gather.works.extend(works)
        differences = [each for gather in gathers for each in gather.differences]
        for gather in gathers if differences and not executor.transport.waits_on_host else ():
            gather.wait()  # adds differences on this lane, before later gathers and reads of parameters
        if executor.lanes.has_streams:
            for source, parts in gather_inputs:
                executor.lanes.record_stream(source)  # the user may drop the state, with sources and targets, at any time
                executor.lanes.record_stream(parts[0])
            for _, params, _ in differences:
                executor.lanes.record_stream(params)

    on_lane = executor.action_on_lane(bound, start)

    def action() -> None:
        if any(each.op.unit in executor.update_gathers for each in bound.bucket_members):
            on_lane()

    return action


def _bind_update_wait(executor: Executor, bound: BoundOp) -> Action:
    unit = bound.unit
    assert unit is not None

    def action() -> None:  # before the step's first use of the unit there may be no node
        if unit.node is not None and unit.key not in executor.update_gathers:  # else the gather of this update has not begun
            unit.node.wait()

    return action


def _bind_gradient_cast(executor: Executor, bound: BoundOp) -> Action:
    gradient, block, first = bound.gradient, bound.block, bound.is_first
    opens, fills = bound.op.opens is not None, first and block is not None

    def action() -> None:
        if opens:
            gradient.allow_arena_memory()
        assert executor.incoming is not None
        gradient.add_leaf_gradients(executor.incoming, block, is_first=first)

    return executor.action_after_waits(bound, action) if opens or fills else action


def _bind_encode(executor: Executor, bound: BoundOp) -> Action:
    return executor.action_on_lane(bound, partial(bound.gradient.encode, is_final=bound.spec is ops.FINAL_ENCODE))


def _bind_reduce(executor: Executor, bound: BoundOp) -> Action:
    transport, members = executor.transport, [(each, each.gradient, each.block) for each in bound.bucket_members]
    coalesced, is_final = len(members) > 1, bound.spec is ops.FINAL_REDUCE
    units, what = [each.unit for each in bound.bucket_members if each.unit is not None], bucket_label(bound.bucket_members)

    def start() -> None:
        if not executor.is_connected:
            executor.make_process_groups()
        inputs: list[ChainInput] = []
        for each, gradient, block in members:
            executor.reducing[each.op.unit, each.spec] = each
            if is_final:
                inputs += gradient.begin_final_reduction(each.final_reduction_block)
            else:
                assert block is not None
                if each.op.opens is not None:
                    gradient.allow_arena_memory()
                inputs += gradient.take_reduction_inputs(block, into_rest=each.op.opens is not None)
        works = reduce_along_chains(inputs, transport, label=executor.label_of_units(units, what), coalesced=coalesced)
        for _, gradient, _ in members:
            works = gradient.keep_own_return_others(works)

    return executor.action_on_lane(bound, start)


def _bind_decode_sum(executor: Executor, bound: BoundOp) -> Action:
    if bound.may_run_late and executor.transport.waits_on_host:
        return do_nothing  # the reader of the sum decodes it
    return executor.action_on_lane(bound, bound.gradient.wait_and_decode, after_compute=False)


def _bind_accumulate(executor: Executor, bound: BoundOp) -> Action:
    gradient, end, is_final = bound.gradient, _action_to_accumulate(bound), bound.spec is ops.FINAL_ACCUMULATE
    reduction, opens = (bound.op.unit, ops.FINAL_REDUCE if is_final else ops.REDUCE), bound.op.opens is not None
    waits_late = bound.may_run_late and executor.transport.waits_on_host
    end_on_lane = executor.action_on_lane(bound, end, after_compute=not is_final and not gradient.route.has_reduction)

    def action() -> None:
        executor.reducing.pop(reduction, None)
        if opens:
            gradient.allow_arena_memory()
        if waits_late:
            gradient.defer_reduction_end(end)
        else:
            end_on_lane()

    return action


def _bind_state_copy(executor: Executor, bound: BoundOp) -> Action:
    unit = bound.op.unit
    on_lane = executor.action_on_lane(bound, lambda: executor.host_copies.pop(unit).run_copies(executor.lanes, bound.key))

    def action() -> None:
        copies = executor.host_copies.get(unit)
        if copies is None or not copies.copies:
            executor.host_copies.pop(unit, None)
            return
        on_lane()
        if bound.spec is ops.FETCH:
            executor.fetched.append(bound.key)

    return action


def do_nothing() -> None:
    """Do nothing, as the action of ops whose work is the caller's own code."""


BIND: dict[OpSpec, Callable[[Executor, BoundOp], Action]] = {
    ops.GATHER: _bind_gather,
    ops.UPDATE_GATHER: _bind_update_gather,
    ops.WAIT: _bind_wait,
    ops.UPDATE_WAIT: _bind_update_wait,
    ops.COMPUTE: lambda executor, bound: do_nothing,
    ops.DECODE: partial(_bind_method, UnshardedBuffer.decode),
    ops.RELEASE: partial(_bind_method, UnshardedBuffer.release),
    ops.CAST: _bind_gradient_cast,
    ops.ENCODE: _bind_encode,
    ops.FINAL_ENCODE: _bind_encode,
    ops.REDUCE: _bind_reduce,
    ops.FINAL_REDUCE: _bind_reduce,
    ops.DECODE_SUM: _bind_decode_sum,
    ops.FINAL_DECODE_SUM: _bind_decode_sum,
    ops.ACCUMULATE: _bind_accumulate,
    ops.FINAL_ACCUMULATE: _bind_accumulate,
    ops.FETCH: _bind_state_copy,
    ops.UPDATE: lambda executor, bound: do_nothing,
    ops.OFFLOAD: _bind_state_copy,
}
"""For each kind of op, the function that returns the op's action."""
