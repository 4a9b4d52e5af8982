"""Gradients of one unit: collected leaf by leaf, sent off, summed, and added where they rest."""

from collections.abc import Callable, Sequence

import torch

from fsharp.functional.errors import ScheduleError, TreeError
from fsharp.functional.layout import UnitLayout
from fsharp.functional.placement import Partial, Place, Replicate, Shard
from fsharp.stateful.runtime.chain import Chain, Pieces, Stage, nbytes_of
from fsharp.stateful.runtime.full import carve, leaf_index
from fsharp.stateful.runtime.rest import Rest
from fsharp.stateful.transport.base import Ticket, Transport

Grads = Sequence[torch.Tensor | None]


class Block:
    """Views of the memory that a unit's gradient is collected in and leaves from.

    Attributes:
        leaves: aliases of the trained leaves in it.
        gaps: padding between them.
        boxes: for each group, the flat buffer that the leaves lie in.
        wires: for each group, the buffer that travels; often the box itself.
        memory: for each group, what its chain works in.
        landings: for each group, where the sum goes before it is added; None leaves it where it is.
    """

    __slots__ = ("boxes", "gaps", "landings", "leaves", "memory", "wires")

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self.gaps: list[torch.Tensor] = []
        self.boxes: list[torch.Tensor] = []
        self.wires: list[torch.Tensor] = []
        self.memory: list[list[torch.Tensor]] = []
        self.landings: list[torch.Tensor | None] = []


class Gradient:
    """The gradient of one unit over the microbatches of a step.

    Args:
        unit: the layout.
        transport: runs the collectives.
        device: where buffers are.
        trivial: run collectives along axes of size 1 as well.

    Attributes:
        leaves: those that have a gradient, in tree order.
        found: a bit for each of them, whether a backward of this step has come to it on this rank.
    """

    def __init__(self, unit: UnitLayout, transport: Transport, device: torch.device, *, trivial: bool = False) -> None:
        self.unit, self.device = unit, device
        self.index = leaf_index(unit)
        self.leaves = [self.index.stored[i] for i in self.index.trainable]
        self.found = 0
        self.dtypes = [unit.groups[g].dtypes for g in unit.trainable]
        each_step, once = _stages(unit, trivial=trivial)
        self.chains = [Chain(transport, unit.groups[g].dtypes, unit.groups[g].size, each_step) for g in unit.trainable]
        self.finishes = [
            Chain(transport, unit.groups[g].dtypes, unit.local_size(g, unit.strategy.grads), once, has_target=True)
            for g in unit.trainable
        ]
        self.is_sent = bool(each_step) and any(chain.size for chain in self.chains)  # after each microbatch
        self.is_finished_apart = bool(once)
        self.is_reduced_in_place = (
            device.type == "cpu"
            and not self.is_sent
            and [stage.op for stage in once] == ["all_reduce"]
            and all(not chain.differ and transport.reduces_in_place(once[0].axis, chain.dtypes.wire) for chain in self.finishes)
        )
        self._own = self.rest = self.place()
        self._final = Rest(self._sizes(unit.strategy.optim), device) if once else None
        self.in_place = False  # whether it is collected where the optimizer has it, and rests nowhere: nobody else looks at it
        self.has_new = False  # whether this step has put anything into rest yet
        self.is_finishing = False  # whether all that rests is on its way to the optimizer's place, or there
        self.is_handed_out = False  # whether somebody has it there, and may have changed it
        self._claimed = False
        self._tickets: list[Ticket] = []
        self._tails: list[Ticket] = []
        self._deferred: list[Callable[[], None]] = []

    @property
    def final(self) -> Rest:
        """Where it is for the optimizer."""
        return self.rest if self._final is None else self._final

    def place(self, window: torch.Tensor | None = None) -> Rest:
        """Where it may rest: in bytes of the arena, as many as it takes, or in memory of its own."""
        return Rest(self._sizes(self.unit.strategy.grads), self.device, window)

    def _sizes(self, place: Place) -> Pieces:
        return [(self.unit.local_size(g, place), d.accumulate) for g, d in zip(self.unit.trainable, self.dtypes, strict=True)]

    # ------------------------------------------------------------ memory

    def _pieces(self, i: int, several_uses: bool) -> Pieces:
        """Box, wire, chain, landing of one group."""
        chain, dtypes = self.chains[i], self.dtypes[i]
        if not self.is_sent:
            return [(chain.size, dtypes.accumulate)]
        own_box = chain.differ and several_uses
        box: Pieces = [(chain.size, dtypes.accumulate)] if own_box else []
        landing: Pieces = [(chain.sizes()[-1], dtypes.accumulate)] if chain.differ else []
        return [*box, (chain.size, dtypes.wire), *chain.pieces(), *landing]

    def outgoing_nbytes(self, *, several_uses: bool, several_microbatches: bool) -> int:
        """Bytes of the block of a microbatch; 0 if leaves are added where the gradient rests."""
        if not self.is_sent and not (several_uses and several_microbatches):
            return 0
        return sum(nbytes_of(self._pieces(i, several_uses)) for i in range(len(self.chains)))

    def finishing_nbytes(self) -> int:
        """Bytes of the block for the way to the optimizer's place."""
        return sum(nbytes_of(self._finish_pieces(i)) for i in range(len(self.finishes)))

    def _finish_pieces(self, i: int) -> Pieces:
        chain = self.finishes[i]
        wire: Pieces = [(chain.size if chain.differ else 0, self.dtypes[i].wire)]
        return [*wire, *chain.pieces()] if self.is_finished_apart else []

    def block(self, memory: torch.Tensor, *, several_uses: bool) -> Block:
        """Views of a run of :meth:`outgoing_nbytes` bytes."""
        block = Block()
        pieces = [self._pieces(i, several_uses) for i in range(len(self.chains))]
        tensors = iter(carve(memory, [piece for each in pieces for piece in each]))
        for chain in self.chains:
            box = next(tensors)
            block.boxes.append(box)
            block.wires.append(next(tensors) if self.is_sent and chain.differ and several_uses else box)
            block.memory.append([next(tensors) for _ in chain.pieces()])
            block.landings.append(next(tensors) if self.is_sent and chain.differ else None)
        flats = dict(zip(self.unit.trainable, block.boxes, strict=True))
        block.leaves = self.index.views(flats, self.leaves)
        block.gaps = [gap for g, flat in flats.items() for gap in self.index.gaps(g, flat)]
        return block

    def finishing_block(self, memory: torch.Tensor) -> list[list[torch.Tensor]]:
        """Views of a run of :meth:`finishing_nbytes` bytes: for each group the wire and what its chain works in."""
        pieces = [self._finish_pieces(i) for i in range(len(self.finishes))]
        tensors = iter(carve(memory, [piece for each in pieces for piece in each]))
        return [[next(tensors) for _ in each] for each in pieces]

    # ------------------------------------------------------------ one step

    @property
    def collected(self) -> Rest:
        """Where the summands of this rank are collected."""
        return self.final if self.in_place else self.rest

    def begin(self, place: Rest | None, *, in_place: bool = False) -> None:
        """A new step: whatever rests is of the step before.

        Args:
            place: where the plan has room for it. Whoever holds a gradient beyond its step gets the next one elsewhere.
            in_place: collect it where the optimizer will have it. The reduction leaves nothing of this rank's summands.
        """
        self.join()
        self.in_place = in_place
        self.rest = self._own if place is None or self.rest.is_held or place.is_held else place
        if in_place or self._own.is_held or self.rest is not self._own:
            self._own.forget()
        if self._final is not None and self._final.is_held:
            self._final.forget()
        if self.device.type != "cpu":
            _ = self.rest.tensors, self.final.tensors  # from the pool of the stream that computes
        self.has_new = self._claimed = self.is_finishing = self.is_handed_out = False
        self.found = 0
        self._tickets, self._tails = [], []

    def leave_arena(self) -> None:
        """The arena is wanted for something else: have memory of its own. What somebody else has by now has to stay."""
        if not self.rest.in_arena or (self.rest.is_open and self.rest.is_held):
            return
        if self.rest.is_open:
            torch._foreach_copy_(self._own.tensors, self.rest.tensors)
        self.rest = self._own

    def cast(self, grads: Grads, block: Block | None, *, first: bool) -> None:
        """Put what a use contributes into a block, or where the gradient rests.

        Args:
            grads: one for each trained leaf, None for zero.
            block: where to; None means to the gradient at rest.
            first: the first use to do so in this microbatch.

        Raises:
            TreeError: one is sparse.
        """
        for where, grad in zip(self.leaves, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise TreeError(
                    f"unit {self.unit.name!r}: the gradient of leaf {where.path!r} is {grad.layout}, expected a dense one, as "
                    "flat buffers are. Pass sparse=False to the embedding."
                )
        self._reopen()
        if block is None:
            first = not self.has_new
            leaves, gaps = self.collected.look(self.index, self.unit.trainable)
            self.has_new = self._claimed = True
        else:
            leaves, gaps = block.leaves, block.gaps
        if first and gaps:
            torch._foreach_zero_(gaps)
        present = [grad for grad in grads if grad is not None]
        if len(present) == len(leaves):
            self.found = (1 << len(leaves)) - 1
            if first:
                torch._foreach_copy_(leaves, present)
            else:
                torch._foreach_add_(leaves, present)
            return
        for i, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            self.found |= (grad is not None) << i
            if grad is None:
                if first:
                    leaf.zero_()
            elif first:
                leaf.copy_(grad)
            else:
                leaf.add_(grad)

    def keep_apart(self) -> None:
        """Let it rest apart after all, if nothing has been collected yet."""
        self.in_place = self.in_place and self.has_new

    def _reopen(self) -> None:
        """More is to be added to what may be on its way.

        Raises:
            ScheduleError: this rank's summands are not there any more.
        """
        if self.in_place and self.is_finishing:
            raise ScheduleError(
                f"unit {self.unit.name!r}: its gradient is being summed over ranks where it is, and was wanted once more, or "
                "one more was to be added. Leave out averaged=True in value_and_grad() where steps differ like this."
            )
        self.is_finishing = False

    def send(self, block: Block, *, direct: bool = True) -> None:
        """Begin the reduction of a microbatch.

        Args:
            block: what is reduced.
            direct: the first sum of a step may go where the gradient rests while ``block`` is still in use.
        """
        direct, self._claimed = direct and not self._claimed, self._claimed or direct
        for i, chain in enumerate(self.chains):
            box, wire = block.boxes[i], block.wires[i]
            if wire is not box:
                wire.copy_(box)
            out = self.rest.tensors[i] if direct else block.landings[i]
            self._tickets.append(chain.start(wire, out, iter(block.memory[i])))

    def land(self, block: Block) -> None:
        """The sum is where the gradient rests, or is added to it."""
        if not self.is_sent:
            self._reopen()
            for target, box in zip(self.collected.tensors, block.boxes, strict=True):
                target.add_(box) if self.has_new else target.copy_(box)
        else:
            for target in self.rest.tensors:
                result = self._tickets.pop(0).wait()
                if self.has_new:
                    target.add_(result)
                elif result.data_ptr() != target.data_ptr():
                    target.copy_(result)
        self.has_new = self._claimed = True

    @property
    def is_fed(self) -> bool:
        """Whether this step has given the unit a gradient, though it may still be on its way."""
        return self.has_new or bool(self._deferred)

    @property
    def is_under_way(self) -> bool:
        """Whether :meth:`join` has something to wait for."""
        return bool(self._deferred or self._tails)

    def defer(self, land: Callable[[], None]) -> None:
        """Leave it to :meth:`join` to land what has been sent."""
        self._deferred.append(land)

    def settle(self) -> None:
        """What no use has contributed to is zero."""
        if not self.is_fed:
            if not self.rest.is_open:
                self.leave_arena()  # the plan has its memory from the first use that contributes on
            for buffer in self.collected.tensors:
                buffer.zero_()
            self.has_new = self._claimed = True

    def add(self, grads: Grads) -> None:
        """Add what has come some other way: flat, at rest, None for zero."""
        if all(grad is None for grad in grads):
            return
        self.join()
        self.settle()
        self._reopen()
        self.found = (1 << len(self.leaves)) - 1
        for buffer, grad in zip(self.collected.tensors, grads, strict=True):
            if grad is not None:
                buffer.add_(grad)

    def finish(self, memory: list[list[torch.Tensor]]) -> None:
        """Begin the way to the optimizer's place. The gradient at rest stays as it is, if it rests."""
        self.join()
        self.settle()
        self._reopen()
        if self._final is not None and self._final.is_held and not self.in_place:
            self._final.forget()
        self.is_finishing, self.is_handed_out = True, False
        for chain, source, target, (wire, *rest) in zip(
            self.finishes, self.collected.tensors, self.final.tensors, memory, strict=True
        ):
            x = wire.copy_(source) if chain.differ else source
            self._tickets.append(chain.start(x, target, iter(rest)))

    def land_finish(self) -> None:
        """The block of :meth:`finish` is free from here on; :meth:`join` waits for what is left."""
        for _ in self.finishes:
            tail = self._tickets.pop(0).wait()
            if isinstance(tail, Ticket):
                self._tails.append(tail)

    def go_home(self) -> None:
        """Have nothing in the arena any more: the step is over."""
        self.rest = self._own

    def abandon(self) -> None:
        """Leave all memory to whatever may still write there."""
        self.go_home()
        self._own.forget()
        if self._final is not None:
            self._final.forget()

    def drop(self) -> None:
        """Wait for nothing any more: what was sent may never arrive."""
        self._tickets, self._tails, self._deferred = [], [], []

    def join(self) -> None:
        """Wait until the gradient is where it was sent last."""
        while self._deferred:
            self._deferred.pop(0)()
        for tail in self._tails:
            tail.wait()
        self._tails = []


def _stages(unit: UnitLayout, *, trivial: bool) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """The collectives after each microbatch, and those once a step."""
    strategy = unit.strategy
    full, rest, end = strategy.full.dual, strategy.grads, strategy.optim
    sizes = {a: unit.mesh.axis_size(a) for a in strategy.order if trivial or unit.mesh.axis_size(a) > 1}
    each = [Stage("reduce_scatter", a, n) for a, n in sizes.items() if full[a] is Partial and rest[a] is Shard]
    once = [Stage("reduce_scatter", a, n) for a, n in sizes.items() if rest[a] is Partial and end[a] is Shard]
    once += [Stage("all_reduce", a, n) for a, n in sizes.items() if rest[a] is Partial and end[a] is Replicate]
    return tuple(each), tuple(once)
