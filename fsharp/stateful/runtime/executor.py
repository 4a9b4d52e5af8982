"""Executor: runs ops, whoever has planned them. The only code of a step that moves parameters and gradients.

It knows units, their memory, lanes and the transport; neither programs nor schedulers. A kind of op is one function in the
table :data:`RUN`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from fsharp.errors import ScheduleError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.tree_names import label_of
from fsharp.stateful.runtime.connection import Connection
from fsharp.stateful.schedule import ops
from fsharp.stateful.schedule.ops import OpSpec
from fsharp.stateful.schedule.schedule import Memory, Op
from fsharp.stateful.transport.base import Transport
from fsharp.stateful.transport.streams import Key, Lanes
from fsharp.stateful.units.axis_chain import ChainInput, Move, gather_along, reduce_along
from fsharp.stateful.units.gradient import GradientBuffer
from fsharp.stateful.units.host import HostCopies
from fsharp.stateful.units.route import Grads, OutgoingBlock
from fsharp.stateful.units.unit_state import UnitState, UnshardedBuffer, stamp
from fsharp.stateful.units.update_gather import UpdateGather


class BoundOp:
    """An op together with what it works on.

    Attributes:
        op: as a schedule has it.
        spec: what there is to know of such ops.
        key: names it on lanes.
        after: keys of the ops on other lanes that it waits for; of the first op of a bucket those of all.
        others: of the first op of a bucket: the others, which are run with it.
        unit: that it is about.
        gradient: the unit's, which an op about gradients has.
        params: where the unit's full parameters are.
        block: what a gradient is collected in, and leaves from.
        pieces: what the way to the optimizer's place works in.
        is_first: of a cast: the first of its unit in its microbatch.
        is_reduced_to_rest: of a reduce: the sum may go where the gradient rests.
        may_wait: of an accumulate: nothing of the schedule follows it at once, so a host without streams does it late.
    """

    __slots__ = (
        "after",
        "block",
        "gradient",
        "is_first",
        "is_reduced_to_rest",
        "key",
        "label",
        "may_wait",
        "op",
        "others",
        "params",
        "pieces",
        "spec",
        "unit",
    )

    def __init__(self, op: Op, key: Key, after: Sequence[Key], unit: UnitState | None) -> None:
        self.op, self.spec, self.key, self.after = op, op.spec, key, tuple(after)
        self.label = f"{op.kind} {op.unit} ({op.phase})"
        self.others: tuple[BoundOp, ...] = ()
        self.unit: UnitState = unit  # type: ignore[assignment]  # ops without a unit do nothing with it
        self.gradient: GradientBuffer = unit.gradient if unit is not None else None  # type: ignore[assignment]  # likewise
        self.params: UnshardedBuffer | None = None
        self.block: OutgoingBlock | None = None
        self.pieces: list[list[torch.Tensor]] = []
        self.is_first = self.is_reduced_to_rest = self.may_wait = False

    @property
    def members(self) -> "tuple[BoundOp, ...]":
        """The ops of its bucket, itself first; itself alone if it is in none."""
        return self, *self.others


class Executor:
    """Runs the ops of one step after another.

    Args:
        transport: runs collectives.
        lanes: the streams beside compute.
        comm: the ranks, for the names of trees in labels.
        connection: process groups, made before the first collective.
        poison: fill memory with NaN when it is released.

    Attributes:
        step: name of the step that is under way, in the labels of its collectives; empty outside of one.
        microbatch: which of it is under way, in the labels too.
        incoming: the gradients of the use whose backward is over.
        update_gathers: by unit, updated parameters on their way to where they rest.
        moves: by unit, state on its way from host memory, or to it.
        fetched: the ops that state has come by.
        host_nbytes: bytes that were copied from host memory and to it in this step.
        reducing: gradients whose reduction has begun and whose result has not been taken, with the ops that began it.
        top: the highest byte of the arena that this step has used, plus one.
    """

    def __init__(self, transport: Transport, lanes: Lanes, comm: Comm, connection: Connection, *, poison: bool) -> None:
        self.transport, self.lanes, self.comm, self.connection, self.poison = transport, lanes, comm, connection, poison
        self.begin("")

    def begin(self, step: str) -> None:
        """A step begins: nothing of the one before is under way."""
        self.step, self.microbatch = step, "microbatch 0"
        self.incoming: Grads | None = None
        self.update_gathers: dict[str, UpdateGather] = {}
        self.moves: dict[str, HostCopies] = {}
        self.fetched: list[Key] = []
        self.host_nbytes = 0
        self.reducing: dict[tuple[str, bool], BoundOp] = {}
        self.live_nbytes = self.peak_nbytes = self.top = 0
        self._deferred: list[tuple[Memory, GradientBuffer]] = []

    def run(self, bounds: Iterable[BoundOp]) -> None:
        """Do what these ops say, one after the other."""
        for bound in bounds:
            RUN[bound.spec](self, bound)

    def label(self, bounds: Sequence[BoundOp]) -> str:
        """What ranks compare before they take part in a collective of these ops."""
        names = dict.fromkeys(label_of(each.unit.node, self.comm) for each in bounds if each.unit.node is not None)
        first, last = bounds[0].op, bounds[-1].op
        what = f"{first.kind} {first.unit}..{last.unit}, {len(bounds)} units ({first.phase})"
        return self.named("".join(names) + (bounds[0].label if len(bounds) == 1 else what))

    def named(self, what: str) -> str:
        """Something that happens now, and in which step it does."""
        return f"{self.step}, {self.microbatch}: {what}" if self.step else what

    def lane(self, bound: BoundOp, *, begins: bool = True) -> AbstractContextManager:
        """Run an op on its lane, after those it waits for."""
        return self.lanes.on(bound.spec.stream, bound.key, bound.after, begins=begins)

    def occupy(self, memory: Memory | None) -> None:
        """A part of the arena is in use from here on."""
        if memory is not None:
            for other, gradient in self._deferred:
                if other.overlaps(memory):
                    gradient.join()
            self.live_nbytes += memory.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
            self.top = max(self.top, memory.start + memory.nbytes)

    def vacate(self, memory: Memory | None) -> None:
        """It is not any more."""
        if memory is not None:
            self.live_nbytes -= memory.nbytes

    def open(self, bound: BoundOp) -> None:
        """Where a gradient rests is its own from here on."""
        if bound.op.opens is not None:
            self.occupy(bound.op.opens)
            bound.gradient.open()

    def end_late(self, bound: BoundOp, end: Callable[[], None]) -> None:
        """Have the end of a reduction wait until somebody looks at the gradient, or fills the memory that it has left from."""
        bound.gradient.defer(end)
        if bound.op.memory is not None:
            self._deferred.append((bound.op.memory, bound.gradient))

    def drain(self) -> None:
        """Finish all reductions that have begun."""
        self.lanes.join_all("gather", "reduce")
        for bound in list(self.reducing.values()):
            if bound.op.phase == "finish":
                bound.gradient.end_finish()
            else:
                assert bound.block is not None
                bound.gradient.accumulate(bound.block)
            bound.gradient.join()
        self.reducing.clear()


def _spread(executor: Executor, bound: BoundOp) -> None:
    executor.connection.make()
    update_gathers = [(each, executor.update_gathers.pop(each.op.unit, None)) for each in bound.members]
    moving = [(each, update_gather, update_gather.moves) for each, update_gather in update_gathers if update_gather is not None]
    if moving:
        with executor.lane(bound):
            _start_gathers(executor, moving)
            for source, parts in (move for _, _, moves in moving for move in moves):
                executor.lanes.keep(source)  # of a state that its user may drop at any time, as what is filled
                executor.lanes.keep(parts[0])


def _gather(executor: Executor, bound: BoundOp) -> None:
    executor.connection.make()
    for each in bound.members:
        executor.occupy(each.op.memory)
    # Of a tree that is yet to be seen in this step: gathered when it is waited for.
    known = [(each, each.params, each.unit.node) for each in bound.members if each.unit.node is not None]
    if known:
        with executor.lane(bound):
            filled = []
            for each, params, node in known:
                assert params is not None
                filled.append((each, params, params.fill(node, executor.transport)))
            _start_gathers(executor, filled)


def _start_gathers(executor: Executor, found: Sequence[tuple[BoundOp, UpdateGather | UnshardedBuffer, Sequence[Move]]]) -> None:
    """Begin to gather what each unit has to move: of one unit each by itself, of several all in the same collectives."""
    label = executor.label([bound for bound, _, _ in found])
    moves = [move for _, _, each in found for move in each]
    works = gather_along(found[0][1].axes, moves, executor.transport, label=label, as_one=len(found) > 1)
    for _, target, _ in found:
        target.works += works


def _settle(executor: Executor, bound: BoundOp) -> None:
    assert bound.unit.node is not None
    if bound.op.unit not in executor.update_gathers:  # else what is waited for is of the update before, which update() has seen
        _ = bound.unit.node.buffers


def _wait(executor: Executor, bound: BoundOp) -> None:
    node, params = bound.unit.node, bound.params
    assert node is not None
    assert params is not None
    if not params.is_filled or (params.is_carried and not params.holds(stamp(node))):
        params.wait()
        with executor.lanes.on("gather", bound.key, bound.after):
            params.gather(node, executor.transport, f"{executor.label([bound])} of other values than were gathered")
        executor.lanes.join([bound.key])
    params.wait()
    executor.lanes.join(bound.after)
    if not params.holds(stamp(node)):
        raise ScheduleError(
            f"the parameters of unit {bound.op.unit!r} were changed in place between being gathered and being used. "
            "Change them between steps and pass gather_at_start=False, or make new ones."
        )


def _release(executor: Executor, bound: BoundOp) -> None:
    assert bound.params is not None
    executor.lanes.join(bound.after)
    executor.vacate(bound.op.memory)
    bound.params.release(poison=executor.poison)


def _cast(executor: Executor, bound: BoundOp) -> None:
    if bound.op.opens is not None:
        executor.open(bound)
        executor.lanes.join(bound.after)
    if bound.is_first and bound.block is not None:
        executor.occupy(bound.op.memory)
        executor.lanes.join(bound.after)
    assert executor.incoming is not None
    bound.gradient.cast(executor.incoming, bound.block, first=bound.is_first)


def _reduce(executor: Executor, bound: BoundOp) -> None:
    executor.connection.make()
    members = bound.members
    is_finish = bound.op.phase == "finish"
    for each in members:
        executor.reducing[each.op.unit, is_finish] = each
        if is_finish:
            executor.occupy(each.op.memory)
        else:
            executor.open(each)
    with executor.lane(bound):
        found = [each.gradient.finish(each.pieces) if is_finish else _reduction(each) for each in members]
        legs = [leg for each in found for leg in each]
        works = iter(reduce_along(legs, executor.transport, label=executor.label(members), as_one=len(members) > 1))
        for each, mine in zip(members, found, strict=True):
            each.gradient.send([next(works) for _ in mine])


def _reduction(bound: BoundOp) -> list[ChainInput]:
    assert bound.block is not None
    return bound.gradient.reduce(bound.block, direct=bound.is_reduced_to_rest)


def _accumulate(executor: Executor, bound: BoundOp) -> None:
    gradient = bound.gradient
    executor.reducing.pop((bound.op.unit, bound.op.phase == "finish"), None)
    executor.open(bound)
    executor.vacate(bound.op.memory)
    if bound.op.phase == "finish":
        end = gradient.end_finish
    else:
        assert bound.block is not None
        end = partial(gradient.accumulate, bound.block)
    if bound.may_wait and executor.transport.innermost.is_async:
        executor.end_late(bound, end)
        return
    reads_compute = bound.op.phase == "backward" and not gradient.route.is_reduced
    with executor.lane(bound, begins=reads_compute):
        end()


def _copy(executor: Executor, bound: BoundOp) -> None:
    move = executor.moves.pop(bound.op.unit, None)
    if move is None or not move.copies:
        return
    with executor.lane(bound):
        executor.host_nbytes += move.run(executor.lanes, bound.key)
    if bound.spec is ops.FETCH:
        executor.fetched.append(bound.key)


def _nothing(executor: Executor, bound: BoundOp) -> None:
    """The caller's own code."""


RUN: dict[OpSpec, Callable[[Executor, BoundOp], None]] = {
    ops.GATHER: _gather,
    ops.SPREAD: _spread,
    ops.WAIT: _wait,
    ops.SETTLE: _settle,
    ops.COMPUTE: _nothing,
    ops.RELEASE: _release,
    ops.CAST: _cast,
    ops.REDUCE: _reduce,
    ops.FINISH: _reduce,
    ops.ACCUMULATE: _accumulate,
    ops.LAND: _accumulate,
    ops.FETCH: _copy,
    ops.UPDATE: _nothing,
    ops.OFFLOAD: _copy,
}
