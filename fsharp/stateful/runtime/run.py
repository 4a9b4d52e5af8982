"""Run: one call of a scheduled function. It follows the plan event by event; where there is none it acts on demand."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import torch

from fsharp.functional.errors import ScheduleError
from fsharp.functional.sharded import Sharded
from fsharp.stateful.runtime.boundary import differentiable, in_backward, refuse_graph
from fsharp.stateful.runtime.copies import Copy, LiveUnit, Stamp, stamp
from fsharp.stateful.runtime.demand import Demand
from fsharp.stateful.runtime.gradients import Block, Gradient, Grads
from fsharp.stateful.runtime.plan import Plan
from fsharp.stateful.runtime.rest import Rest
from fsharp.stateful.runtime.spread import Spread
from fsharp.stateful.schedule.program import Event, EventKind
from fsharp.stateful.schedule.schedule import Memory

if TYPE_CHECKING:
    from fsharp.stateful.runtime.scheduled import Scheduled
    from fsharp.stateful.runtime.scheduler import Scheduler


class Use:
    """One use of a unit: from entering it in the forward to the end of its backward."""

    __slots__ = ("copy", "is_open", "leaves", "node", "number", "parent", "seen", "unit")

    def __init__(self, unit: LiveUnit, number: int, parent: "Use | None") -> None:
        self.unit, self.number, self.parent = unit, number, parent
        self.copy: Copy | None = None
        self.leaves: list[torch.Tensor] | None = None
        self.is_open = False
        self.node: Sharded | None = None
        self.seen: Stamp = ()

    def is_inside(self, other: "Use") -> bool:
        """Whether this use began inside of the other, or is the other."""
        use: Use | None = self
        while use is not None and use is not other:
            use = use.parent
        return use is not None


class Run:
    """One step of a program.

    Args:
        scheduler: owns memory, units and transport.
        scheduled: the function that is called; None outside of one, where nothing is recorded.
        plan: what to follow; None records.
    """

    def __init__(self, scheduler: "Scheduler", scheduled: "Scheduled | None", plan: Plan | None) -> None:
        self.scheduler, self.scheduled, self.plan = scheduler, scheduled, plan
        self.is_planned = plan is not None
        self.recorder = scheduled.recorder if scheduled is not None and plan is not None else None
        self.events: list[Event] = []
        self.forward: list[Use] = []
        self.backward: list[Use] = []
        self.num_uses = self.num_microbatches = 0
        self.trained: dict[str, None] = {}  # units that have a gradient in this step
        self.promised: set[str] = set()  # those whose gradients nobody looks at before they are reduced
        self.on_backward: Callable[[], None] = lambda: None  # called when a backward comes to a use
        self.incoming: Grads | None = None
        self.under_way: list[tuple[LiveUnit, Block | None, str]] = []
        self.open_blocks: dict[str, Block] = {}
        self.is_over = False
        self.may_defer = False  # gradients may land when somebody looks at them: this is the last microbatch
        self.spreading: dict[str, Spread] = {}
        self.deferred: list[tuple[Memory, Gradient]] = []  # memory that is free as soon as a gradient is joined
        self.stranded: list[Memory] = []  # gradients in the arena that somebody has, of a plan that is left
        self.live_nbytes = self.peak_nbytes = self.top = 0
        self.demand = Demand(self)

    # ------------------------------------------------------------ events

    def event(self, kind: EventKind, unit: str = "", number: int = -1, *, bare: bool = False) -> bool:
        """Note an event; whether the plan has it here, and its ops are issued."""
        i, event = len(self.events), Event(kind, unit, number, bare)
        if self.scheduled is not None:
            self.events.append(event)
        if not self.is_planned:
            return False
        assert self.plan is not None
        if i >= len(self.plan.expected) or self.plan.expected[i] != event:
            self.depart()
            return False
        if self.recorder is not None:
            self.recorder.event(self, self.plan, i)
            return True
        for action in self.plan.actions[i]:
            action(self)
        return True

    def enter(self, node: Sharded) -> Use:
        """Begin a use: its unit is there in full when this returns."""
        if self.backward and not in_backward():
            self.retire(None)
        unit = self.scheduler.live(node)
        parent = self.forward[-1] if self.forward else self.backward[-1] if self.backward else None
        use = Use(unit, self.num_uses, parent)
        self.num_uses += 1
        planned = self.event("forward", unit.key, use.number)
        if unit.axes:
            use.copy = self._slot(unit) if planned else self.demand.copy(unit)
            use.copy.users += 1
            full = use.copy.full
        else:
            self.settle(unit)
            full = unit.at_rest()
        self.forward.append(use)
        assert unit.node is not None
        use.node, use.seen = unit.node, stamp(unit.node)
        leaves = full.leaves()
        if node.sinks and torch.is_grad_enabled():
            chosen = full.index.trainable
            unit.pending += 1
            unit.uses = max(unit.uses, unit.pending)
            graph = differentiable(partial(self.gradient, use), [leaves[i] for i in chosen], node.sinks)
            for i, leaf in zip(chosen, graph, strict=True):
                leaves[i] = leaf
        use.leaves = leaves
        return use

    def _slot(self, unit: LiveUnit) -> Copy:
        assert self.plan is not None
        return self.plan.copies[unit.key]

    def leave(self, use: Use) -> None:
        """End the forward part of a use."""
        while self.backward and self.backward[-1].is_inside(use):  # of a backward that the function has called itself
            self._close(self.backward[-1], None)
        popped = self.forward.pop()
        assert popped is use
        use.leaves = None
        planned = self._leave_copy(use, "forward_end")
        if not planned and use.copy is not None:
            self.demand.leave(use.copy, use.number)

    def _leave_copy(self, use: Use, kind: EventKind, *, bare: bool = False) -> bool:
        if use.copy is not None:
            use.copy.users -= 1
        return self.event(kind, use.unit.key, use.number, bare=bare)

    def come_back(self, uses: Sequence[Use]) -> None:
        """A backward comes to the function that entered these units."""
        gathered = [use.unit.key for use in uses if use.copy is not None]
        if gathered:
            refuse_graph()
        if self.is_over:
            if gathered:
                raise _too_late(gathered[0])
            return
        self.on_backward()
        for use in uses:
            self._open(use)

    def _open(self, use: Use) -> None:
        if use.is_open:
            return
        if use.parent is not None and use.parent not in self.forward:
            self._open(use.parent)  # its output may be this one's own, so that a backward comes here first
        self.retire(use)
        use.is_open = True
        if use.unit.node is None:
            use.unit.node = use.node
        if use.unit.node is not None and stamp(use.unit.node) != use.seen:
            raise ScheduleError(
                f"the parameters of unit {use.unit.key!r} were changed, or replaced by others, between their use in a forward "
                "and its backward. Call the backward before they are, or pass comm=scheduler.comm."
            )
        planned = self.event("backward", use.unit.key, use.number)
        if use.copy is not None:
            if not planned:
                use.copy = self.demand.return_to(use.copy)
            use.copy.users += 1
        self.backward.append(use)

    def retire(self, next_use: Use | None) -> None:
        """End the backward of uses that the engine has left behind on its way to ``next_use``."""
        while self.backward and (next_use is None or not next_use.is_inside(self.backward[-1])):
            self._close(self.backward[-1], None)

    def gradient(self, use: Use, grads: Grads) -> None:
        """The gradients of a use's leaves are there: its backward is over."""
        if self.is_over:
            raise _too_late(use.unit.key)
        self.on_backward()
        if not use.is_open:
            self._open(use)
        while self.backward[-1] is not use:
            self._close(self.backward[-1], None)
        use.unit.pending -= 1
        self._close(use, grads)

    def _close(self, use: Use, grads: Grads | None) -> None:
        self.backward.pop()
        use.is_open = False
        self.incoming = self.plan.outside(grads) if grads is not None and self.is_planned and self.plan is not None else grads
        planned = self._leave_copy(use, "backward_end", bare=grads is None)
        if not planned:
            if grads is not None:
                self.demand.cast(use.unit, grads)
            self.demand.let_go(use.unit.key, use.number, bare=grads is None)
            if use.copy is not None:
                self.demand.idle(use.copy)
        self.incoming = None

    def end_microbatch(self, direct: Sequence[tuple[LiveUnit, Grads]]) -> None:
        """The backward pass is over.

        Args:
            direct: gradients that came through ``gather()`` in the loss instead of ``forward()``, flat and at rest.
        """
        self.retire(None)
        if self.is_planned and any(grad is not None for _, grads in direct for grad in grads):
            self.depart()
        if not self.event("microbatch_end"):
            self.demand.flush()
        for unit, grads in direct:
            if unit.gradient is not None:
                unit.gradient.add(grads)
                if any(grad is not None for grad in grads):
                    self.promised.discard(unit.key)  # its gradient comes in more ways than one
        self.num_microbatches += 1
        for unit in self.scheduler.units.values():
            unit.pending = 0

    # ------------------------------------------------------------ ops of the plan

    def lane(self, i: int, name: str, *, begins: bool = True) -> AbstractContextManager:
        """Run an op on its lane, after those it waits for."""
        assert self.plan is not None
        return self.scheduler.lanes.on(name, (self.plan.number, i), self.plan.after[i], begins=begins)

    def join(self, i: int) -> None:
        """Compute waits for what an op waits for."""
        assert self.plan is not None
        self.scheduler.lanes.join(self.plan.after[i])

    def do_gather(self, i: int, copy: Copy) -> None:
        """Begin to gather into a slot."""
        self.fill(copy.where)
        if copy.unit.node is None:
            return  # of a tree that has not been seen in this step yet: gathered when it is waited for
        with self.lane(i, "gather"):
            copy.gather(self.scheduler.transport)

    def do_wait(self, i: int, copy: Copy) -> None:
        """What has been gathered is there."""
        assert copy.unit.node is not None
        if copy.seen is None or (copy.is_carried and not copy.holds(stamp(copy.unit.node))):
            copy.wait()
            with self.lane(i, "gather"):
                copy.gather(self.scheduler.transport)
        copy.wait()
        self.join(i)
        if not copy.holds(stamp(copy.unit.node)):
            raise ScheduleError(
                f"the parameters of unit {copy.unit.key!r} were changed in place between being gathered and being used. "
                "Change them between steps and pass gather_at_start=False, or make new ones."
            )

    def do_release(self, i: int, copy: Copy) -> None:
        """A slot is free."""
        self.join(i)
        self.free(copy.where)
        copy.release(poison=self.scheduler.policy.poison)

    def open(self, rest: Rest, memory: Memory | None) -> None:
        """Where a gradient rests is its own from here on."""
        if memory is not None:
            self.fill(memory)
            rest.is_open = True

    def do_cast(
        self, i: int, unit: LiveUnit, block: Block | None, first: bool, memory: Memory | None, opens: Memory | None
    ) -> None:
        """The gradients of a use go where they leave from, or rest."""
        assert unit.gradient is not None
        if opens is not None:
            self.open(unit.gradient.rest, opens)
            self.join(i)
        if first and block is not None:
            self.open_blocks[unit.key] = block
            self.fill(memory)
            self.join(i)
        grads = self.incoming
        if grads is None:
            if not first or (block is None and unit.gradient.has_new):
                return
            grads = [None] * len(unit.gradient.leaves)
        unit.gradient.cast(grads, block, first=first)

    def do_reduce(self, i: int, unit: LiveUnit, block: Block | None, opens: Memory | None) -> None:
        """Begin the reduction of a microbatch."""
        assert unit.gradient is not None
        assert block is not None
        assert self.plan is not None
        self.open_blocks.pop(unit.key, None)
        self.open(unit.gradient.rest, opens)
        with self.lane(i, "reduce"):
            # By the plan alone, as it decides what ranks send: where gradients rest is this rank's own affair if some are held.
            unit.gradient.send(block, direct=opens is not None or unit.key not in self.plan.places)
        self.under_way.append((unit, block, "backward"))

    def do_accumulate(self, i: int, unit: LiveUnit, block: Block | None, memory: Memory | None, opens: Memory | None) -> None:
        """Its result is added to what rests."""
        assert unit.gradient is not None
        assert block is not None
        self.open_blocks.pop(unit.key, None)
        self._landed(unit, "backward")
        gradient = unit.gradient
        self.open(gradient.rest, opens)
        self.free(memory)
        if (
            self.may_defer
            and self.plan is not None
            and self.plan.expected[self.plan.schedule.ops[i].at].kind == "microbatch_end"
        ):
            self.defer(gradient, partial(gradient.land, block), memory)
            return
        with self.lane(i, "reduce", begins=False):
            gradient.land(block)

    def do_finish(self, i: int, unit: LiveUnit, pieces: list[list[torch.Tensor]], memory: Memory | None) -> None:
        """Begin the way to the optimizer's place."""
        assert unit.gradient is not None
        self.fill(memory)
        with self.lane(i, "reduce"):
            unit.gradient.finish(pieces)
        self.under_way.append((unit, None, "finish"))

    def do_land_finish(self, i: int, unit: LiveUnit, memory: Memory | None) -> None:
        """Its memory is free."""
        assert unit.gradient is not None
        self._landed(unit, "finish")
        self.free(memory)
        if self.scheduler.transport.innermost.is_async and self.events[-1].kind == "reduce":
            self.defer(unit.gradient, unit.gradient.land_finish, memory)
            return
        with self.lane(i, "reduce", begins=False):
            unit.gradient.land_finish()

    def defer(self, gradient: Gradient, land: Callable[[], None], memory: Memory | None) -> None:
        """Leave it to whoever looks at a gradient to land it, or to whoever fills the memory that it has left from."""
        gradient.defer(land)
        if memory is not None:
            self.deferred.append((memory, gradient))

    def _landed(self, unit: LiveUnit, kind: str) -> None:
        for i, (each, _, what) in enumerate(self.under_way):
            if each is unit and what == kind:
                del self.under_way[i]
                return

    def do_update(self, i: int) -> None:
        """The caller's optimizer has run."""

    def do_spread(self, i: int, unit: LiveUnit) -> None:
        """Begin to bring updated parameters to where they rest."""
        if unit.key in self.spreading:
            with self.lane(i, "gather"):
                self.spreading.pop(unit.key).start(self.scheduler.transport)

    def do_settle(self, i: int, unit: LiveUnit) -> None:
        """Updated parameters are where they rest."""
        if unit.key not in self.spreading:  # else the wait is for those of the update before, which update() has looked at
            self.settle(unit)

    def settle(self, unit: LiveUnit) -> None:
        """Wait for a unit's updated parameters."""
        if unit.node is not None:
            _ = unit.node.buffers

    def fill(self, memory: Memory | None) -> None:
        """Note that a run of the arena is in use."""
        if memory is not None:
            for other, gradient in self.deferred:
                if other.overlaps(memory):
                    gradient.join()
            self.live_nbytes += memory.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
            self.top = max(self.top, memory.stop)

    def free(self, memory: Memory | None) -> None:
        """Note that it is not."""
        if memory is not None:
            self.live_nbytes -= memory.nbytes

    # ------------------------------------------------------------ leaving the plan

    def depart(self, *, ended: bool = False) -> None:
        """Follow the plan no further: finish what it has begun, and act on demand from here on."""
        assert self.plan is not None
        self.is_planned = False
        self.scheduler.order.depart(self, ended=ended)
        for copy in self.plan.copies.values():
            if copy.tickets:
                copy.wait()
        gradients = [unit.gradient for unit in self.plan.units.values() if unit.gradient is not None]
        for gradient in gradients:
            gradient.join()
            if not gradient.rest.is_open:
                gradient.leave_arena()  # others are where it would have been
        for unit, block, _ in list(self.under_way):
            assert unit.gradient is not None
            gradient = unit.gradient
            if block is not None:
                gradient.land(block)
            else:
                gradient.land_finish()
                gradient.join()
        self.under_way.clear()
        self.scheduler.lanes.join_all()
        for gradient in gradients:
            gradient.leave_arena()
        self.stranded = [memory for name, memory in self.plan.rests.items() if self.plan.places[name].is_held]
        self.demand.adopt(self.open_blocks)
        self.open_blocks = {}

    def restart(self, units: Sequence[LiveUnit]) -> None:
        """Gradients of these units are about to be new: whatever is under way of the old ones has to end, which no plan has."""
        if self.is_planned and any(each is unit for each, _, _ in self.under_way for unit in units):
            self.depart()

    def move(self) -> None:
        """Something is about to be reduced that is not what the schedule reduces: on all ranks, or on none."""
        self.retire(None)
        if not self.event("move") and self.scheduled is not None:
            self.scheduler.order.confirm(self)

    def reduce(self, units: Sequence[LiveUnit], *, wait: bool) -> None:
        """Gradients are wanted at the optimizer's place; without ``wait`` whoever looks at them joins them."""
        self.retire(None)
        self.event("reduce")
        for unit in units:
            gradient = unit.gradient
            if gradient is not None and gradient.is_finished_apart:
                if not gradient.is_finishing or gradient.is_handed_out:
                    self.demand.finish(unit)
                gradient.is_handed_out = True
                if wait:
                    gradient.join()
        self.scheduler.lanes.join_all()

    def update(self, spreads: Sequence[Spread]) -> None:
        """Parameters are new where the optimizer has them."""
        self.retire(None)
        for unit in self.scheduler.units.values():
            if unit.gradient is not None:
                unit.gradient.join()  # the memory it comes from is wanted for the next step
        self.spreading = {spread.unit.key: spread for spread in spreads if spread.axes}
        if not self.event("update"):
            self.demand.stale()
        for spread in list(self.spreading.values()):
            self.scheduler.order.confirm(self)
            with self.scheduler.lanes.on("gather"):
                spread.start(self.scheduler.transport)
            _ = spread.node.buffers
        self.spreading = {}

    def end(self) -> None:
        """The function has returned."""
        self.retire(None)
        for unit in self.scheduler.units.values():
            if unit.gradient is not None:
                unit.gradient.join()
        if self.is_planned:
            assert self.plan is not None
            if len(self.events) < len(self.plan.expected):
                self.depart(ended=True)
            else:
                assert self.top <= self.plan.schedule.arena, f"{self.top} bytes used of {self.plan.schedule.arena} planned"
        self.demand.clear()
        self.is_over = True


def _too_late(unit: str) -> ScheduleError:
    return ScheduleError(
        f"a backward came to unit {unit!r} after the scheduled function that used it had returned. Call the backward inside of "
        "that function, or do not wrap it: pass comm=scheduler."
    )
