"""The gradient of one unit: how far it has come in this step on its way to the optimizer's place."""

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum, auto

import torch

from fsharp.errors import ScheduleError, TreeError
from fsharp.functional.comm.residuals import ByAxis
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.stateful.transport.base import Transport, Work
from fsharp.stateful.units.axis_chain import ChainInput
from fsharp.stateful.units.resting import RestingGradient
from fsharp.stateful.units.route import GradientRoute, Grads, OutgoingBlock


class GradientPhase(IntEnum):
    """How far a gradient has come in a step."""

    NONE = auto()
    COLLECTING = auto()
    REDUCING = auto()
    RESTING = auto()
    FINISHING = auto()
    FINISHED = auto()


_MOVES = {
    GradientPhase.NONE: {GradientPhase.COLLECTING, GradientPhase.RESTING},
    GradientPhase.COLLECTING: {GradientPhase.COLLECTING, GradientPhase.REDUCING, GradientPhase.RESTING},
    GradientPhase.REDUCING: {GradientPhase.RESTING},
    GradientPhase.RESTING: {GradientPhase.COLLECTING, GradientPhase.RESTING, GradientPhase.FINISHING},
    GradientPhase.FINISHING: {GradientPhase.FINISHED},
    GradientPhase.FINISHED: {GradientPhase.COLLECTING, GradientPhase.RESTING, GradientPhase.FINISHING},
}
"""From each phase, those that an op may bring a gradient to."""


class GradientBuffer:
    """The gradient of one unit in the step that is under way.

    Attributes:
        route: what is the same in every step.
        rest: where it rests between microbatches.
        num_added: gradients of microbatches that have been added where it rests.
        found: a bit for each leaf, whether a backward of this step has come to it on this rank.
        block: what is collected in this microbatch, if that is not added at once where it rests.
        is_under_way: whether :meth:`join` has something to wait for.
    """

    def __init__(self, unit: UnitLayout, transport: Transport, device: torch.device, *, trivial: bool = False) -> None:
        self.route = GradientRoute(unit, transport, device, trivial=trivial)
        self._own = self.rest = self.route.resting()
        self.final = RestingGradient(self.route.sizes(unit.strategy.optim), device) if self.route.is_finished else None
        self.phase = GradientPhase.NONE
        self.num_added = self.found = 0
        self.block: OutgoingBlock | None = None
        self._place: RestingGradient | None = None
        self._is_open = False  # whether this step has come to where the place is the gradient's own
        self._works: list[Work] = []
        self._tails: list[Work] = []
        self._deferred: Callable[[], None] | None = None
        self.is_under_way = False
        self._residuals: Mapping[int, ByAxis] = {}
        self._ignored: set[int] = set()

    def _move(self, phase: GradientPhase) -> None:
        assert phase in _MOVES[self.phase], (
            f"{self.route.unit.name}: from {self.phase.name} a gradient cannot go to {phase.name}"
        )
        self.phase = phase

    def begin_step(self) -> None:
        """A new step: the place in the arena is not the gradient's yet."""
        self._is_open = False

    def renew(self, place: RestingGradient | None) -> None:
        """A new gradient: whatever rests is of the one before. The schedule has room for it at ``place``, once it is opened."""
        if self.is_under_way:
            self.join()
        if self.rest.shown:
            self.copy_out()
        if place is not None or self._own.is_held:  # what a step without a schedule has rested in is given back
            self._own.release()
        if self.final is not None and self.final.is_held:
            self.final.release()
        self.rest, self._place = place if self._is_open and place is not None else self._own, place
        if self.route.device.type != "cpu" and self.final is not None:
            _ = self.final.tensors  # from the pool of the stream that computes
        self.phase, self.block = GradientPhase.NONE, None
        self.num_added = self.found = 0
        self._works.clear()
        self._tails.clear()

    def open(self) -> None:
        """From here on it rests where the schedule has room for it."""
        assert not self.num_added, f"{self.route.unit.name}: a gradient is at rest before its memory is opened"
        if self._place is not None:
            self.rest, self._is_open = self._place, True

    def leave_arena(self) -> bool:
        """The arena is wanted for something else: have memory of its own. False if somebody has a view, which has to stay."""
        self._place, self._is_open = None, False
        if self.rest.in_arena:
            if not self.rest.move_to(self._own):
                return False
            self.rest = self._own
        return True

    def go_home(self) -> None:
        """Have nothing in the arena any more: the step is over."""
        self.copy_out()
        self.rest, self._place, self._is_open = self._own, None, False

    def copy_out(self) -> None:
        """Give what callers hold of the arena memory of its own."""
        if not self.rest.in_arena or not self.rest.shown:
            return
        if not self.rest.is_held:
            self.rest.shown.clear()
        elif not self.rest.copy_out():
            gc.collect()
            if self.rest.is_held:
                raise ScheduleError(
                    f"a view of the gradient of unit {self.route.unit.shown} is held beyond its step, and the memory it is in "
                    "is not. Hold the gradient itself or a clone, or pass keep_gradients=True to the Scheduler."
                )

    def abandon(self, refuse: Callable[[], None]) -> None:
        """Wait for nothing any more, and leave memory to whatever may still write there: the scheduler is closed."""
        self._deferred = refuse if self.is_under_way else None
        self._works, self._tails, self.block = [], [], None
        self.rest = self._own

    def ignore(self, paths: Collection[str]) -> None:
        """Count later contributions to the leaves at these paths in the user's tree as zero."""
        self._ignored.clear()
        if paths:
            leaves = enumerate(self.route.leaves)
            self._ignored |= {i for i, leaf in leaves if self.route.unit.full_path(leaf) in paths}

    def feed_back(self, residuals: Mapping[int, ByAxis]) -> None:
        """Have reductions add to gradients what formats have lost of earlier ones, by group and axis, and overwrite that."""
        self._residuals = residuals

    def collect_in(self, block: OutgoingBlock) -> None:
        """Go on with what was collected so far in another block."""
        if self.block is not None:
            for target, source in zip(block.collected, self.block.collected, strict=True):
                target.copy_(source)
        self.block = block

    def cast(self, grads: Grads, block: OutgoingBlock | None, *, first: bool) -> None:
        """Put what a use contributes into a block, or where the gradient rests. ``first``: of this microbatch, to the block."""
        if self._ignored:
            grads = [None if i in self._ignored else grad for i, grad in enumerate(grads)]
        is_complete = True
        for grad in grads:
            if grad is None:
                is_complete = False
            elif grad.layout is not torch.strided:
                raise self._sparse(grads)
        if self.is_under_way:
            self.join()
        if block is None:
            self._move(GradientPhase.RESTING)
            first = not self.num_added
            leaves, gaps = self.rest.leaves(self.route.index, self.route.unit.trainable)
            self.num_added += 1
        else:
            self._move(GradientPhase.COLLECTING)
            self.block, leaves, gaps = block, block.leaves, block.gaps
        if first and gaps:
            torch._foreach_zero_(gaps)
        if is_complete:
            self.found = (1 << len(leaves)) - 1
            if first:
                torch._foreach_copy_(leaves, grads)  # type: ignore[arg-type]  # none of them is None
            else:
                torch._foreach_add_(leaves, grads)  # type: ignore[arg-type]  # likewise
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

    def _sparse(self, grads: Grads) -> TreeError:
        rows = zip(self.route.leaves, grads, strict=True)
        where, kind = next((leaf, x.layout) for leaf, x in rows if x is not None and x.layout is not torch.strided)
        return TreeError(
            f"unit {self.route.unit.shown}: the gradient of leaf {where.path!r} is {kind}, expected a dense one, as flat "
            "buffers are. Pass sparse=False to the embedding."
        )

    def reduce(self, block: OutgoingBlock, *, direct: bool) -> list[ChainInput]:
        """Begin the reduction of a microbatch's gradient in ``block``; return a chain's input and output for each group.

        With ``direct`` the sums go to where the gradient rests, else into memory of the block.
        """
        self._move(GradientPhase.REDUCING)
        self.block = None
        legs = []
        for i, chain in enumerate(self.route.chains):
            if block.sent[i] is not block.collected[i]:
                block.sent[i].copy_(block.collected[i])
            out = self.rest.tensors[i] if direct else block.received[i]
            legs.append(ChainInput(chain, block.sent[i], out, block.scratch[i], self._residuals.get(chain.group, {})))
        return legs

    def send(self, works: Sequence[Work]) -> None:
        """What :meth:`reduce` or :meth:`finish` has told of is on its way."""
        self._works += works

    def accumulate(self, block: OutgoingBlock) -> None:
        """The sum is where the gradient rests, or is added to it."""
        self._move(GradientPhase.RESTING)
        targets, works, self.block = self.rest.tensors, self._works, None
        for i, target in enumerate(targets):
            result = works.pop(0).wait() if self.route.is_reduced else block.collected[i]
            if self.num_added:
                target.add_(result)
            elif result.data_ptr() != target.data_ptr():
                target.copy_(result)
        self.num_added += 1

    @property
    def is_fed(self) -> bool:
        """Whether this step has given the unit a gradient, though it may still be on its way."""
        return self.num_added > 0 or self.phase in (GradientPhase.COLLECTING, GradientPhase.REDUCING)

    def settle(self) -> None:
        """Fill the gradient at rest with zeros if no backward pass has come to the unit yet. A later one overwrites them."""
        if self.phase is GradientPhase.NONE:
            self._move(GradientPhase.RESTING)
            for buffer in self.rest.tensors:
                buffer.zero_()

    def reopen(self, factor: int) -> None:
        """Make ready for another backward pass of the same step, after the mean gradients were handed out.

        The gradient at the optimizer's place is out of date from here on: the next reduction makes it anew, of all that
        rests. A gradient that rests at the optimizer's place is multiplied by ``factor``, by which the mean was divided.
        """
        self.join()
        if self.final is None:
            torch._foreach_mul_(self.rest.tensors, factor)
        elif self.phase is GradientPhase.FINISHED:
            self._move(GradientPhase.RESTING)

    def add(self, grads: Grads) -> None:
        """Add what has come some other way: flat, at rest, None for zero."""
        self.join()
        self.settle()
        self._move(GradientPhase.RESTING)
        self.num_added += 1
        self.found = (1 << len(self.route.leaves)) - 1
        for buffer, grad in zip(self.rest.tensors, grads, strict=True):
            if grad is not None:
                buffer.add_(grad)

    def finish(self, pieces: list[list[torch.Tensor]]) -> list[ChainInput]:
        """What is about to go to the optimizer's place. The gradient at rest stays as it is."""
        self.join()
        self.settle()
        self._move(GradientPhase.FINISHING)
        assert self.final is not None
        if self.final.is_held:
            self.final.release()
        rows = zip(self.route.finishes, self.rest.tensors, self.final.tensors, pieces, strict=True)
        return [
            ChainInput(
                chain, sent.copy_(source) if len(sent) else source, target, scratch, self._residuals.get(chain.group, {})
            )
            for chain, source, target, (sent, *scratch) in rows
        ]

    def end_finish(self) -> None:
        """What :meth:`finish` works in is free from here on; :meth:`join` waits for what is left."""
        for _ in self.route.finishes:
            tail = self._works.pop(0).wait()
            if isinstance(tail, Work):
                self._tails.append(tail)
                self.is_under_way = True
        self._move(GradientPhase.FINISHED)

    def defer(self, end: Callable[[], None]) -> None:
        """Leave the end of a reduction to whoever looks at the gradient next."""
        self.join()
        self._deferred, self.is_under_way = end, True

    def join(self) -> None:
        """Wait until the gradient is where it was sent last."""
        if self._deferred is not None:
            self._deferred()
            self._deferred = None
        for tail in self._tails:
            tail.wait()
        self._tails.clear()
        self.is_under_way = False
