"""Acting on demand: what a run does that no plan has foreseen. Right, slower, and in memory beside the arena.

A use that was not planned gets room of its own. It is let go of after the forward and filled again for the backward, like
a slot: what was resident together in the forward has different rooms, and a backward has no more resident at once than
its forward had. What is used again in a backward, as by activation checkpointing, has rooms that no forward has, and stays
there until its unit's backward is over, which looks at what the second forward has saved.
"""

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from fsharp.functional.errors import ScheduleError
from fsharp.stateful.runtime.boundary import in_backward
from fsharp.stateful.runtime.copies import Copy, LiveUnit, Room, full_nbytes, stamp
from fsharp.stateful.runtime.gradients import Block, Gradient, Grads

if TYPE_CHECKING:
    from fsharp.stateful.runtime.run import Run


class Demand:
    """What one run has made on demand.

    Args:
        run: whose.
    """

    def __init__(self, run: "Run") -> None:
        self.run: Run = weakref.proxy(run)  # which owns this: a cycle would keep memory until the collector comes by
        self.rooms: list[Room] = []
        self.rooms_in_backward: list[Room] = []
        self.kept: dict[str, list[tuple[int, Copy]]] = {}  # by unit, numbers of uses made in a backward, and what they used
        self.blocks: dict[str, Block] = {}  # gradients that are being collected
        self.sent: Gradient | None = None  # whose reduction is under way

    def __del__(self) -> None:
        self.clear()  # rooms and copies know each other; a run outside of a scheduled function has no other end

    # ------------------------------------------------------------ parameters

    @torch.inference_mode(False)
    def copy(self, unit: LiveUnit) -> Copy:
        """A full copy of a unit: one that is there, or a new one."""
        assert unit.node is not None
        seen = stamp(unit.node)
        there = [copy for copy in self._slots() if copy.unit is unit]
        there += [room.copy for room in self._all_rooms() if room.copy is not None and room.copy.unit is unit]
        for copy in there:
            # Those of forwards are in the way of other backwards, before this one is over.
            if copy.holds(seen) and (not in_backward() or copy.room in self.rooms_in_backward):
                copy.wait()
                return copy
        room = self._room(full_nbytes(unit.layout))
        copy = Copy(unit, room.memory[: full_nbytes(unit.layout)], rank=self.run.scheduler.rank, room=room)
        room.copy = copy
        self._fill(copy)
        return copy

    def _room(self, nbytes: int) -> Room:
        rooms = self.rooms_in_backward if in_backward() else self.rooms
        free = [room for room in rooms if len(room.memory) >= nbytes and (room.copy is None or not room.copy.users)]
        if free:
            room = min(free, key=lambda room: len(room.memory))
            if room.copy is not None:
                room.copy.release(poison=self.run.scheduler.policy.poison)
                room.copy = None
            return room
        room = Room(torch.empty(nbytes, dtype=torch.uint8, device=self.run.scheduler.device))
        rooms.append(room)
        return room

    def _all_rooms(self) -> list[Room]:
        return [*self.rooms, *self.rooms_in_backward]

    def _fill(self, copy: Copy) -> None:
        scheduler = self.run.scheduler
        scheduler.order.confirm(self.run)
        with scheduler.lanes.on("gather"):
            copy.gather(scheduler.transport)
        copy.wait()
        scheduler.lanes.join_all()

    def leave(self, copy: Copy, number: int) -> None:
        """The forward of a use is over."""
        if in_backward() and torch.is_grad_enabled():
            copy.users += 1
            self.kept.setdefault(copy.unit.key, []).append((number, copy))
        else:
            self.idle(copy)

    def let_go(self, key: str, number: int, *, bare: bool) -> None:
        """A backward of a unit is over: it has looked at what a use has saved that was made in a backward.

        That use is its own, or the last one, if it was made again for this backward. A backward that leaves out the unit's
        parameters may come once more (``retain_graph``).
        """
        kept = self.kept.get(key, [])
        own = next((i for i, (each, _) in enumerate(kept) if each == number), None)
        if kept and not (bare and own is not None):
            _, copy = kept.pop(-1 if own is None else own)
            copy.users -= 1
            self.idle(copy)

    def idle(self, copy: Copy) -> None:
        """A use is over: nobody may need the copy for now."""
        if not copy.users:
            copy.release(poison=self.run.scheduler.policy.poison)

    def return_to(self, copy: Copy) -> Copy:
        """Have the copy that a forward used there again, or another one with the same values at the same address.

        Raises:
            ScheduleError: somebody else is using that address, or the parameters are not what they were.
        """
        assert copy.unit.node is not None
        seen = stamp(copy.unit.node)
        if copy.holds(seen):
            copy.wait()
            return copy
        twin = copy.room.copy if copy.room is not None else None
        if twin is not None and twin.unit is copy.unit and twin.holds(seen):
            twin.wait()
            return twin
        if copy.where and any(memory.overlaps(copy.where) for memory in self.run.stranded):
            raise ScheduleError(
                f"the backward of unit {copy.unit.key!r} came when the step's gradients had been handed out, which are where "
                "it was in the forward. Call it before value_and_grad(), or pass keep_gradients=True to the Scheduler."
            )
        for other in self._in_the_way(copy):
            if other.users:
                raise ScheduleError(
                    f"the backward of unit {copy.unit.key!r} came while that of {other.unit.key!r} was under way, in whose "
                    "memory it was in the forward: uses have to nest in the backward as they did in the forward."
                )
            other.release(poison=self.run.scheduler.policy.poison)
        if copy.room is not None:
            copy.room.copy = copy
        self._fill(copy)
        return copy

    def _in_the_way(self, copy: Copy) -> list[Copy]:
        if copy.room is not None:
            other = copy.room.copy
            return [other] if other is not None and other is not copy and other.seen is not None else []
        assert copy.where is not None
        where = copy.where
        return [s for s in self._slots() if s is not copy and s.seen is not None and s.where and s.where.overlaps(where)]

    def _slots(self) -> list[Copy]:
        tenant = self.run.scheduler.tenant
        return list(tenant.copies.values()) if tenant is not None else []

    def stale(self) -> None:
        """Parameters are new: no copy has them."""
        for copy in [*self._slots(), *(room.copy for room in self._all_rooms() if room.copy is not None)]:
            copy.release(poison=self.run.scheduler.policy.poison)

    def clear(self) -> None:
        """Let go of all memory."""
        for room in self._all_rooms():
            room.copy = None
        self.rooms.clear()
        self.rooms_in_backward.clear()
        self.kept.clear()
        self.blocks.clear()

    # ------------------------------------------------------------ gradients

    def cast(self, unit: LiveUnit, grads: Grads) -> None:
        """Collect what a use contributes; send it off if nothing more is to come in this microbatch."""
        self.land()
        gradient = unit.gradient
        assert gradient is not None
        block = self.blocks.get(unit.key)
        first = block is None
        if first and (gradient.is_sent or unit.uses > 1):
            block = self.blocks[unit.key] = self._block(unit)
        gradient.cast(grads, block, first=first)
        if unit.pending <= 0:
            self.send(unit)

    def _block(self, unit: LiveUnit) -> Block:
        gradient = unit.gradient
        assert gradient is not None
        several = unit.uses > 1
        nbytes = gradient.outgoing_nbytes(several_uses=several, several_microbatches=True)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.run.scheduler.device)
        return gradient.block(memory, several_uses=several)

    def send(self, unit: LiveUnit) -> None:
        """Reduce what has been collected of a unit's gradient."""
        self.land()
        block = self.blocks.pop(unit.key, None)
        gradient = unit.gradient
        assert gradient is not None
        if block is None:
            return
        scheduler = self.run.scheduler
        if gradient.is_sent:
            scheduler.order.confirm(self.run)
            with scheduler.lanes.on("reduce"):
                gradient.send(block, direct=False)
            if scheduler.transport.innermost.is_async:
                gradient.defer(partial(gradient.land, block))
                self.sent = gradient
                return
        with scheduler.lanes.on("reduce"):
            gradient.land(block)
        scheduler.lanes.join_all()

    def land(self) -> None:
        """Take in what was sent last. It leaves its memory late: when the gradients that autograd had of it are gone."""
        if self.sent is not None:
            self.sent.join()
            self.sent = None

    def adopt(self, blocks: dict[str, Block]) -> None:
        """Go on with gradients that a plan has begun to collect, whose memory may be wanted for something else now."""
        for key, planned in blocks.items():
            unit = self.run.scheduler.units[key]
            block = self.blocks[key] = self._block(unit)
            for box, held in zip(block.boxes, planned.boxes, strict=True):
                box.copy_(held)
            if unit.pending <= 0:
                self.send(unit)

    def flush(self) -> None:
        """The backward pass is over: what has been collected is all there is."""
        for key, kept in self.kept.items():
            while kept:
                self.let_go(key, kept[-1][0], bare=False)
        for key in list(self.blocks):
            self.send(self.run.scheduler.units[key])
        self.land()

    def finish(self, unit: LiveUnit) -> None:
        """The way to the optimizer's place."""
        gradient, scheduler = unit.gradient, self.run.scheduler
        assert gradient is not None
        gradient.join()
        memory = torch.empty(gradient.finishing_nbytes(), dtype=torch.uint8, device=scheduler.device)
        if gradient.is_finished_apart:
            scheduler.order.confirm(self.run)
        with scheduler.lanes.on("reduce"):
            gradient.finish(gradient.finishing_block(memory))
            gradient.land_finish()
        gradient.join()
        scheduler.lanes.join_all()
