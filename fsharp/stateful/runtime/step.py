"""Step: one call of a function under a scheduler, as events: which units are entered and left, forward and backward.

Events go to a source of ops, and what that gives to the executor. When an event comes that a schedule has not foreseen, the
step goes on with ops made up on the spot.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fsharp.errors import ScheduleError
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.release import written_to
from fsharp.stateful.runtime.boundary import differentiable, double_backward, in_backward, pack_saved
from fsharp.stateful.runtime.compiled import Compiled
from fsharp.stateful.runtime.eager import Eager
from fsharp.stateful.runtime.executor import BoundOp, Executor
from fsharp.stateful.runtime.recorder import Recorder
from fsharp.stateful.schedule.program import Event, EventKind
from fsharp.stateful.units.full import FullUnit
from fsharp.stateful.units.gradient import GradientPhase
from fsharp.stateful.units.host import HostCopies
from fsharp.stateful.units.route import Grads
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.unsharded import Stamp, UnshardedBuffer, stamp
from fsharp.stateful.units.update_gather import UpdateGather


class UnitUse:
    """One use of a unit: from entering it in the forward to the end of its backward."""

    __slots__ = (
        "__weakref__",
        "copy",
        "full",
        "is_opaque",
        "is_open",
        "leaves",
        "node",
        "number",
        "parent",
        "seen",
        "unit",
        "versions",
    )

    def __init__(self, unit: UnitState, number: int, parent: "UnitUse | None") -> None:
        self.unit, self.number, self.parent = unit, number, parent
        self.copy: UnshardedBuffer | None = None
        self.leaves: list[torch.Tensor] | None = None
        self.full: FullUnit | None = None
        self.versions: list[int] = []
        self.is_open = False
        self.is_opaque = False  # whether autograd keeps what cannot be looked into
        self.node: Sharded | None = None
        self.seen: Stamp = []

    def is_inside(self, other: "UnitUse") -> bool:
        """Whether this use began inside of the other, or is the other."""
        use: UnitUse | None = self
        while use is not None and use is not other:
            use = use.parent
        return use is not None


class Step:
    """One step of a program.

    Args:
        executor: runs the ops.
        schedule: what to follow; None makes ops up as events come.
        rank: of this process.
        device: where tensors are.
        units: of the scheduler, which adds to them.

    Attributes:
        events: those so far.
        eager: what makes ops up; None while a schedule is followed.
        trained: units that have a gradient in this step.
        updated: units whose parameters this step has updated.
        left_at: what the schedule did not have, in words.
        held: units whose parameters somebody holds beyond their use: a schedule would put something else in their memory.
        recorder: measures it.
        on_backward: called when a backward comes to a use; None: nobody wants to know.
    """

    def __init__(
        self,
        executor: Executor,
        schedule: Compiled | None,
        *,
        rank: int,
        device: torch.device,
        units: dict[str, UnitState],
    ) -> None:
        self.executor, self.schedule, self.units = executor, schedule, units
        self.recorder: Recorder | None = None
        self.events: list[Event] = []
        self.trained: dict[str, None] = {}
        self.updated: dict[str, None] = {}
        self.left_at = ""
        self.held: dict[str, None] = {}
        self.on_backward: Callable[[], None] | None = None
        self._recomputed: dict[str, None] = {}  # units that a checkpoint has used again, with no backward of theirs since
        self.num_microbatches = self._num_uses = 0
        self._forward: list[UnitUse] = []
        self._backward: list[UnitUse] = []
        self._is_in_use = partial(_is_in_use, (self._forward, self._backward))
        self._make_eager = partial(Eager, executor, rank=rank, device=device, is_in_use=self._is_in_use)
        self.eager: Eager | None = self._make_eager() if schedule is None else None
        self._pending: dict[str, int] = {}  # by unit, the uses of this microbatch whose gradient is yet to come
        self._fetched: list[str] = []  # units, for the next update
        self._awaited: set[weakref.ref[UnitUse]] = set()  # uses whose backward may come: autograd's graph keeps those of it
        self.is_over = False

    @property
    def is_planned(self) -> bool:
        """Whether it has followed its schedule so far."""
        return self.eager is None

    @property
    def is_local(self) -> bool:
        """Whether this step has only used units that rest whole, so that no other rank had to take part."""
        kinds = {event.kind for event in self.events} <= {"forward", "forward_end"}
        return kinds and not any(self.units[event.unit].axes for event in self.events)

    @property
    def is_awaited(self) -> bool:
        """Whether a backward of a use may still come: somebody holds the graph, and no backward has used it up."""
        return len(self._awaited) > 0

    @property
    def is_in_forward(self) -> bool:
        """Whether a function that has units is under way, not counting what a checkpoint computes again."""
        return bool(self._forward)

    # ------------------------------------------------------------ events

    def _event(
        self,
        kind: EventKind,
        unit: UnitState | None = None,
        number: int = -1,
        *,
        bare: bool = False,
        copy: UnshardedBuffer | None = None,
        units: Iterable[UnitState] = (),
    ) -> None:
        """Note an event, and have its ops run."""
        at, found = len(self.events), (kind, unit.key if unit is not None else "", number, bare)
        if self.eager is None:
            schedule = self.schedule
            assert schedule is not None
            if at < len(schedule.events) and schedule.events[at] == found:
                self.events.append(schedule.events[at])
                if self.recorder is not None:
                    self.recorder.event(schedule.events[at], schedule.bound[at])
                    return
                for action in schedule.actions[at]:
                    action()
                return
        event = Event(*found)
        self.events.append(event)
        if self.eager is None:
            self.leave(event)
        assert self.eager is not None
        has_pending = unit is not None and self._pending.get(unit.key, 0) > 0
        self._run(self.eager.foresee(at, event, unit, copy, units, has_pending=has_pending))

    def _run(self, bounds: Iterable[BoundOp]) -> None:
        """Run ops that are made up and what follows them, each before the next one is made up."""
        assert self.eager is not None
        for bound in self.eager.with_followers(bounds):
            self.executor.run(bound)
            del bound  # the memory that it has freed is wanted for the next one

    def leave(self, event: Event | None) -> None:
        """Follow the schedule no further: finish what it has begun, and make ops up from here on."""
        assert self.schedule is not None
        self.left_at = str(event) if event is not None else f"what came after {self.events[-1]}" if self.events else "its end"
        self.executor.drain()
        self.schedule.leave(self._is_in_use)
        self.eager = self._make_eager(left=self.schedule)

    def enter(self, node: Sharded, unit: UnitState) -> UnitUse:
        """Begin a use: its unit is there in full when this returns."""
        if self._backward and not in_backward():
            self._retire(None)
        parent = self._forward[-1] if self._forward else self._backward[-1] if self._backward else None
        use = UnitUse(unit, self._num_uses, parent)
        self._num_uses += 1
        self._event("forward", unit, use.number)
        if unit.axes:
            source = self.eager or self.schedule
            assert source is not None
            use.copy = source.slots[unit.key]
            full = use.copy.full
        else:
            if unit.node is not None:
                _ = unit.node.buffers
            full = unit.at_rest()
        assert full is not None
        leaves, use.full, use.versions = full.leaves(), full, full.versions()
        self._forward.append(use)
        assert unit.node is not None
        use.node, use.seen = unit.node, (use.copy.filled_from if use.copy is not None else None) or stamp(unit.node)
        sinks = node.sinks
        if sinks and torch.is_grad_enabled():
            chosen = full.index.trainable
            self._pending[unit.key] = self._pending.get(unit.key, 0) + 1
            self._awaited.add(weakref.ref(use, self._awaited.discard))
            graph = differentiable(partial(self._gradient, use), list(map(leaves.__getitem__, chosen)), sinks)
            for i, leaf in zip(chosen, graph, strict=True):
                leaves[i] = leaf
        use.leaves = leaves
        return use

    def full_in_backward(self, unit: str) -> FullUnit | None:
        """Return the full parameters of a unit whose backward is under way; None if it is not."""
        use = next((use for use in reversed(self._backward) if use.unit.layout.name == unit), None)
        if use is None:
            return None
        return use.copy.full if use.copy is not None else use.unit.at_rest()

    def check_unwritten(self, use: UnitUse) -> None:
        """Refuse a function that has written to a leaf of its unit, which a backward would see, or nobody.

        Raises:
            TreeError: it has.
        """
        if use.full is not None and use.full.versions() != use.versions:
            raise written_to(use.unit.key)
        use.full = None

    def pack(self, out: Any, use: UnitUse, first: int) -> None:
        """Let go of what autograd has saved of a unit's parameters, if they have memory of their own."""
        if use.copy is not None and use.copy.where is None:
            use.is_opaque = not pack_saved(out, use.copy, first, partial(self._filled, use))

    def _filled(self, use: UnitUse) -> UnshardedBuffer:
        if self.is_over:
            raise _too_late(use.unit.key)
        assert use.copy is not None
        if use.copy.filled_from is None:  # the backward did not come through what the function returned
            if self.on_backward is not None:
                self.on_backward()
            self._open(use)
        return use.copy

    def exit(self, use: UnitUse) -> None:
        """End the forward part of a use."""
        while self._backward and self._backward[-1].is_inside(use):  # of a backward that the function has called itself
            self._close(self._backward[-1], None)
        popped = self._forward.pop()
        assert popped is use
        use.leaves = None
        self._event("forward_end", use.unit, use.number, copy=use.copy)
        if use.copy is not None and use.copy.is_held and not use.is_opaque:
            # In a backward a checkpoint has them, which computes again for a backward of the same unit that is to come.
            (self._recomputed if in_backward() else self.held)[use.unit.key] = None

    def come_back(self, uses: Sequence[UnitUse], grads: object = None) -> None:
        """A backward comes to the function that entered these units, with gradients of what it has returned."""
        if self.is_over or torch.is_grad_enabled():
            gathered = [use.unit.key for use in uses if use.copy is not None]
            if gathered and torch.is_grad_enabled():
                raise double_backward()
        if self.is_over:
            if gathered:
                if self.on_backward is not None:
                    self.on_backward()
                raise _too_late(gathered[0])
            return
        if self.on_backward is not None:
            self.on_backward()
        for use in uses:
            self._open(use)

    def _open(self, use: UnitUse) -> None:
        if use.is_open:
            return
        if use.parent is not None and use.parent not in self._forward:
            self._open(use.parent)  # its output may be this one's own, so that a backward comes here first
        if self._backward:
            self._retire(use)
        use.is_open = True
        self._recomputed.pop(use.unit.key, None)
        if use.unit.node is None:
            assert use.node is not None
            use.unit.bind(use.node)
        if use.unit.node is not None and stamp(use.unit.node) != use.seen:
            raise ScheduleError(
                f"the parameters of unit {use.unit.key!r} were changed, or replaced by others, between their use in a forward "
                "and its backward. Call the backward before they are; or, in functions, pass comm=scheduler.comm."
            )
        self._event("backward", use.unit, use.number, copy=use.copy)
        self._backward.append(use)

    def _retire(self, next_use: UnitUse | None) -> None:
        """End the backward of uses that the engine has left behind on its way to ``next_use``."""
        while self._backward and (next_use is None or not next_use.is_inside(self._backward[-1])):
            self._close(self._backward[-1], None)

    def _gradient(self, use: UnitUse, grads: Grads) -> None:
        """The gradients of a use's leaves are there: its backward is over."""
        if self.is_over:
            if self.on_backward is not None:
                self.on_backward()
            raise _too_late(use.unit.key)
        if self.on_backward is not None:
            self.on_backward()
        if not use.is_open:
            self._open(use)
        while self._backward[-1] is not use:
            self._close(self._backward[-1], None)
        self._pending[use.unit.key] = self._pending.get(use.unit.key, 0) - 1
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._awaited.discard(weakref.ref(use, None))
        self._close(use, grads)

    def _close(self, use: UnitUse, grads: Grads | None) -> None:
        self._backward.pop()
        use.is_open = False
        if grads is not None and self.eager is None and self.schedule is not None:
            grads = self.schedule.outside(grads)
        self.executor.receive(grads)
        self._event("backward_end", use.unit, use.number, bare=grads is None, copy=use.copy)
        self.executor.receive(None)

    def _note_recomputed(self) -> None:
        """What a checkpoint has used again was for the backward of another unit, if none of its own has come since."""
        self.held |= self._recomputed
        self._recomputed.clear()

    def begin_backward(self, *, is_last: bool) -> None:
        """A backward pass begins. ``is_last``: no other one adds to its gradients before they are reduced for the optimizer."""
        number = self.num_microbatches
        if self.is_planned and self.schedule is not None and number in self.schedule.last_microbatches and not is_last:
            self.leave(None)  # it would reduce them now
        self.executor.name_microbatch(f"microbatch {number}, the last" if is_last else f"microbatch {number}")

    def end_microbatch(self, direct: Sequence[tuple[UnitState, Grads]]) -> None:
        """The backward pass is over.

        Args:
            direct: gradients that came through ``gather()`` in the loss instead of ``forward()``, flat and at rest.
        """
        self._retire(None)
        self._note_recomputed()
        found = []
        for unit, grads in direct:
            for grad in grads:
                if grad is not None:
                    found.append((unit, grads))
                    break
        if self.is_planned and found:
            self.leave(None)
        self._event("microbatch_end", units=self.units.values())
        for unit, grads in found:
            if unit.gradient is not None:
                unit.gradient.add(grads)
        self.num_microbatches += 1
        self.executor.name_microbatch(f"microbatch {self.num_microbatches}")
        self._pending.clear()

    def restart(self, units: Sequence[UnitState]) -> None:
        """Gradients of these units are about to be new: whatever is under way of the old ones has to end."""
        if self.is_planned and self.executor.reducing:
            reducing = {key for key, _ in self.executor.reducing}
            if any(unit.key in reducing for unit in units):
                self.leave(None)

    def outdate(self) -> None:
        """Parameters were written to: a schedule would use what it has gathered before."""
        if self.is_planned:
            self.leave(None)

    def move(self) -> None:
        """Something is about to be reduced that is not what the schedule reduces: on all ranks, or on none."""
        self._retire(None)
        self._event("move")

    def reduce(self, units: Sequence[UnitState], *, wait: bool) -> None:
        """Gradients are wanted at the optimizer's place; without ``wait`` whoever looks at them joins them."""
        self._retire(None)
        unfinished = [unit for unit in units if _is_unfinished(unit)]
        self._event("reduce", units=unfinished)
        unfinished = [unit for unit in unfinished if _is_unfinished(unit)]
        if self.is_planned and unfinished:
            self.leave(None)
        if self.eager is not None:
            self._run(self.eager.finish(unfinished))
        for unit in units:
            if wait and unit.gradient is not None:
                unit.gradient.join()
        self.executor.lanes.join_all("reduce")

    def fetch(self, moves: Mapping[str, HostCopies]) -> None:
        """State of the optimizer, by unit, is wanted on the device."""
        self._retire(None)
        self.executor.fetch(moves)
        self._fetched = list(moves)
        for key in moves:
            self._event("fetch", self.units[key])
        self.executor.lanes.join(self.executor.fetched[-1:])  # the lane has done those before it

    def update(self, update_gathers: Sequence[UpdateGather], moves: Mapping[str, HostCopies]) -> None:
        """Parameters are new where the optimizer has them, and so is its state, which goes to host memory."""
        self._retire(None)
        for unit in self.units.values():
            if unit.gradient is not None and unit.gradient.is_under_way:
                unit.gradient.join()  # the memory it comes from is wanted for the next step
        self.executor.update({each.unit.key: each for each in update_gathers if each.moves}, moves)
        nbytes = dict.fromkeys(self._fetched, 0) | {key: move.nbytes for key, move in moves.items()}
        for key in nbytes:
            self.units[key].offload(nbytes[key])
        if self.is_planned and self.schedule is not None:
            expected = {facts.name: facts.host for facts in self.schedule.schedule.program.units}
            if any(nbytes[key] != expected.get(key) for key in nbytes):  # the state is another one than that recorded
                self.leave(None)
        units = [update_gather.unit for update_gather in update_gathers]
        self.updated |= dict.fromkeys([unit.key for unit in units])
        self._event("update", units=units)
        if self.executor.spreading or self.executor.moves:  # of units that the schedule does not know of
            if self.is_planned:
                self.leave(None)
            assert self.eager is not None
            self._run(self.eager.update_gather(units))
            self._run(self.eager.offload(units))

    def end(self) -> None:
        """The function has returned: finish what is under way."""
        self._retire(None)
        self._note_recomputed()
        for unit in self.units.values():
            if unit.gradient is not None and unit.gradient.is_under_way:
                unit.gradient.join()
        if self.is_planned:
            assert self.schedule is not None
            if len(self.events) < len(self.schedule.events):
                self.leave(None)
        self.is_over = True


def _is_in_use(uses: Iterable[Iterable[UnitUse]], copy: UnshardedBuffer) -> bool:
    return any(use.copy is copy for each in uses for use in each)


def _is_unfinished(unit: UnitState) -> bool:
    gradient = unit.gradient
    return gradient is not None and gradient.route.is_finished and gradient.phase < GradientPhase.FINISHING


def _too_late(unit: str) -> ScheduleError:
    return ScheduleError(
        f"a backward came to unit {unit!r} after the step that used it was over. Of a ShardedModule call each backward before "
        "optimizer.step() and zero_grad(), and the model again for another one. Of a scheduled function call it inside of that "
        "function, or do not wrap it: pass comm=scheduler."
    )
