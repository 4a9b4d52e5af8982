"""UnitGradient: the gradient of one unit in a step, from its backward to the optimizer's shards."""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum, auto

import torch

from fsharp.errors import ScheduleError, TreeError
from fsharp.functional.comm.residuals import ResidualsByAxis
from fsharp.functional.layout.stages import residual_sizes
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.stateful.transport.base import Transport, Work
from fsharp.stateful.units.axis_chain import ChainInput, ReductionChain
from fsharp.stateful.units.gradient_buffers import GradientBuffers
from fsharp.stateful.units.gradient_route import GradientRoute, Grads, OutgoingBlock


class GradientPhase(IntEnum):
    """The phases of a unit's gradient in a step, from no gradient to the reduced gradient in the optimizer's shards."""

    NONE = auto()
    COLLECTING = auto()
    REDUCING = auto()
    RESTING = auto()
    FINISHING = auto()
    FINISHED = auto()


_NEXT_PHASES = {
    GradientPhase.NONE: {GradientPhase.COLLECTING, GradientPhase.RESTING},
    GradientPhase.COLLECTING: {GradientPhase.COLLECTING, GradientPhase.REDUCING, GradientPhase.RESTING},
    GradientPhase.REDUCING: {GradientPhase.RESTING},
    GradientPhase.RESTING: {GradientPhase.COLLECTING, GradientPhase.RESTING, GradientPhase.FINISHING},
    GradientPhase.FINISHING: {GradientPhase.FINISHED},
    GradientPhase.FINISHED: {GradientPhase.FINISHING},
}
"""For each phase, the phases that may follow."""


class UnitGradient:
    """The gradient of one unit in the step that is under way.

    Attributes:
        route: collectives and sizes of buffers, which are equal in every step.
        rest: the buffers in which the gradient rests between microbatches.
        final: the buffers of the sums for the optimizer; None if the sums take the memory of the gradient at rest.
        num_added: number of gradients, of microbatches or of single uses, that were added at rest.
        reached: a bit for each leaf: whether a backward of this step has reached the leaf on this rank.
        block: the memory in which this microbatch's gradient is collected; None if it is added to the gradient at rest.
        is_under_way: whether a reduction is under way, for which :meth:`wait` waits.
    """

    def __init__(self, unit: UnitLayout, transport: Transport, device: torch.device, *, trivial: bool = False) -> None:
        self.route = GradientRoute(unit, transport, device, trivial=trivial)
        self._own = self.rest = self.route.resting_gradient()
        sizes = self.route.gradient_sizes(unit.strategy.optim)
        self._own_final = self.final = GradientBuffers(sizes, device) if self.route.has_final_reduction else None
        self.phase = GradientPhase.NONE
        self._earlier_sums: list[torch.Tensor] = []  # to add to the next sums; kept, as another stream may still read them
        self.num_added = self.reached = 0
        self.block: OutgoingBlock | None = None
        self._arena_rest: GradientBuffers | None = None
        self._is_open = False  # whether the memory in the arena belongs to the gradient from now on in this step
        self._works: list[Work] = []
        self._deferred: Callable[[], None] | None = None
        self.is_under_way = False
        self._residuals: Mapping[int, ResidualsByAxis] = {}
        self._encoded: list[torch.Tensor | None] = []
        self._ignored: set[int] = set()
        self._is_read = False

    def _enter_phase(self, phase: GradientPhase) -> None:
        if self.phase is GradientPhase.FINISHED and phase is not GradientPhase.FINISHING:
            self.resume_accumulation(1)
        assert phase in _NEXT_PHASES[self.phase], (
            f"{self.route.unit.name}: from {self.phase.name} a gradient cannot go to {phase.name}"
        )
        self.phase = phase

    def forbid_arena_memory(self) -> None:
        """Let the next gradient rest outside of the arena until :meth:`allow_arena_memory`."""
        self._is_open = False

    def begin(self, arena_rest: GradientBuffers | None, *, final_sum_in_place: bool) -> None:
        """Wait for reductions of the last step's gradient, and begin this step's gradient.

        ``arena_rest``: the gradient's memory in the arena, in use from :meth:`allow_arena_memory` on. ``final_sum_in_place``:
        whether the final sum may overwrite the gradient at rest, as nobody will read this gradient any more.
        """
        if self.is_under_way:
            self.wait()
        self.copy_out_held_tensors()
        self._own.release()
        self._is_read = not final_sum_in_place
        self.final = None if final_sum_in_place and self.route.can_sum_in_place else self._own_final
        if self._own_final is not None and (self.final is None or self.final.is_held_by_caller):
            self._own_final.release()
        self.rest, self._arena_rest = arena_rest if self._is_open and arena_rest is not None else self._own, arena_rest
        if self.route.device.type != "cpu" and self.final is not None:
            _ = self.final.tensors  # allocated from the memory pool of the compute stream
        self.phase, self.block = GradientPhase.NONE, None
        self.num_added = self.reached = 0
        self._earlier_sums.clear()
        self._works.clear()

    def allow_arena_memory(self) -> None:
        """Let the gradient rest in the arena from now on in this step, where the schedule has memory for it."""
        assert not self.num_added, f"{self.route.unit.name}: a gradient is at rest before its memory is opened"
        if self._arena_rest is not None:
            self.rest, self._is_open = self._arena_rest, True

    def try_move_out_of_arena(self) -> bool:
        """Move the gradient from the arena to memory of its own. Return False if a view that a caller holds prevents this."""
        self._arena_rest, self._is_open = None, False
        if self.rest.in_arena:
            if not self.rest.try_relocate_into(self._own):
                return False
            self.rest = self._own
        return True

    def release_arena_memory(self) -> None:
        """Stop using memory of the arena, which is about to be replaced. Tensors that callers hold are moved out."""
        self.copy_out_held_tensors()
        self.rest, self._arena_rest, self._is_open = self._own, None, False

    def copy_out_held_tensors(self) -> None:
        """Move the tensors that callers hold from the arena to new memory. ScheduleError if a caller holds a view of one."""
        if self.rest.in_arena and self.rest.handed_out and not self.rest.try_copy_out_held_tensors():
            raise ScheduleError(
                f"a view of the gradient of unit {self.route.unit.display_name} is held beyond its step, which reuses the "
                "memory. Hold the gradient itself or a clone, or take policy=SchedulePolicy(keep_gradients=True)."
            )

    def abandon(self, raise_on_read: Callable[[], None]) -> None:
        """Abandon reductions under way after an error; they may still use their memory. Later reads call ``raise_on_read``."""
        self._deferred = raise_on_read if self.is_under_way else None
        self._works, self.block = [], None
        self.rest = self._own

    def ignore_leaves(self, paths: Collection[str]) -> None:
        """Treat later gradients of the leaves at ``paths``, paths in the user's tree, as zero."""
        self._ignored.clear()
        if paths:
            leaves = enumerate(self.route.leaves)
            self._ignored |= {i for i, leaf in leaves if self.route.unit.path_in_tree(leaf) in paths}

    def set_residuals(self, residuals: Mapping[int, ResidualsByAxis]) -> None:
        """Pass residuals, by group and axis, to later reductions, which add them to the gradient and overwrite them."""
        self._residuals = residuals

    def collect_in(self, block: OutgoingBlock) -> None:
        """Collect this microbatch's gradient in ``block`` from now on. Copy the gradients that another block has collected."""
        if self.block is not None:
            for target, source in zip(block.collected, self.block.collected, strict=True):
                target.copy_(source)
        self.block = block

    def add_leaf_gradients(self, grads: Grads, block: OutgoingBlock | None, *, is_first: bool) -> None:
        """Add a use's gradients to ``block``; with ``is_first`` overwrite the block. For None add to the gradient at rest."""
        if self._ignored:
            grads = [None if i in self._ignored else grad for i, grad in enumerate(grads)]
        given = [grad for grad in grads if grad is not None]
        for leaf, grad in zip(self.route.leaves, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise TreeError(
                    f"unit {self.route.unit.display_name}: the gradient of leaf {leaf.path!r} is {grad.layout}, expected a "
                    "dense gradient. Pass sparse=False to the embedding."
                )
        if self.is_under_way:
            self.wait()
        if block is None:
            self._enter_phase(GradientPhase.RESTING)
            is_first = not self.num_added
            leaves, padding = self.rest.trained_leaves(self.route.leaf_table, self.route.unit.trainable_groups)
            self.num_added += 1
        else:
            self._enter_phase(GradientPhase.COLLECTING)
            self.block, leaves, padding = block, block.leaves, block.padding
            if self._arena_rest is None and self.route.device.type != "cpu":
                _ = self.rest.tensors  # allocated from the memory pool of the compute stream
        targets, empty = leaves, padding
        if len(given) < len(leaves):
            rows = list(zip(leaves, grads, strict=True))
            targets = [leaf for leaf, grad in rows if grad is not None]
            empty = [*padding, *(leaf for leaf, grad in rows if grad is None)]
            self.reached |= sum(1 << i for i, grad in enumerate(grads) if grad is not None)
        else:
            self.reached = (1 << len(leaves)) - 1
        if is_first and empty:
            torch._foreach_zero_(empty)
        if not is_first and any(chain.rounds_gradients for chain in self.route.chains):
            given = [grad.to(target.dtype) for grad, target in zip(given, targets, strict=True)]
        if given:
            (torch._foreach_copy_ if is_first else torch._foreach_add_)(targets, given)

    def encode(self, *, is_final: bool) -> None:
        """Encode the gradient for the next reduction: of a microbatch, or with ``is_final`` to the optimizer's shards.

        Encodes groups whose first stage sends a format, and overwrites residuals. ``is_final`` waits for earlier reductions.
        """
        if is_final:
            self.wait()
            self.zero_if_missing()
            chains, buffers = self.route.final_chains, self.rest.tensors
        else:
            assert self.block is not None
            chains, buffers = self.route.chains, self.block.collected
        self._encoded = [chain.encode(x, self._residuals) for chain, x in zip(chains, buffers, strict=True)]

    def _take_encoded(self, chains: Sequence[ReductionChain]) -> list[torch.Tensor | None]:
        found, self._encoded = self._encoded or [None] * len(chains), []
        return found

    def take_reduction_inputs(self, block: OutgoingBlock, *, into_rest: bool) -> list[ChainInput]:
        """Return the inputs of ``reduce_along_chains()`` for the gradient that a microbatch has collected in ``block``.

        With ``into_rest`` the sums go to the gradient at rest, else to memory of the block.
        """
        self._enter_phase(GradientPhase.REDUCING)
        self.block = None
        inputs, encoded = [], self._take_encoded(self.route.chains)
        for i, chain in enumerate(self.route.chains):
            if block.sent[i] is not block.collected[i]:
                block.sent[i].copy_(block.collected[i])
            out = self.rest.tensors[i] if into_rest else block.received[i]
            inputs.append(ChainInput(chain, block.sent[i], out, block.scratch[i], self._residuals, encoded[i]))
        return inputs

    def keep_own_return_others(self, works: list[Work]) -> list[Work]:
        """Keep the first Works in ``works``, one for each group of this gradient. Return all other Works, of other units."""
        count = len(self.route.chains)
        self._works += works[:count]
        return works[count:]

    def wait_and_decode(self) -> None:
        """Wait for the collectives of the reduction under way, which decode and add parts that travelled encoded."""
        for work in self._works:
            work.wait()

    def accumulate(self, block: OutgoingBlock) -> None:
        """Wait for a microbatch's reduction. Add its result to the gradient at rest, unless the reduction has written there."""
        self._enter_phase(GradientPhase.RESTING)
        targets, works, self.block = self.rest.tensors, self._works, None
        for i, target in enumerate(targets):
            result = works.pop(0).wait() if self.route.has_reduction else block.collected[i]
            if self.num_added:
                target.add_(result)
            elif result.data_ptr() != target.data_ptr():
                target.copy_(result)
        self.num_added += 1

    @property
    def has_step_gradient(self) -> bool:
        """Whether a backward of this step has given the unit a gradient, whose reduction may be under way."""
        return self.num_added > 0 or self.phase in (GradientPhase.COLLECTING, GradientPhase.REDUCING)

    def zero_if_missing(self) -> None:
        """Fill the gradient at rest with zeros if no backward has reached the unit. A later backward overwrites the zeros."""
        if self.phase is GradientPhase.NONE:
            self._enter_phase(GradientPhase.RESTING)
            for buffer in self.rest.tensors:
                buffer.zero_()

    def resume_accumulation(self, factor: int) -> None:
        """Let this step add to the gradient again, after its final reduction or after the mean gradients were handed out.

        Sums in the memory of the gradient at rest were divided by ``factor``, and are now multiplied by it. If these sums come
        from a final reduction, or gradients have feedback, the next final reduction sends only later gradients: the sums move
        to new memory, to be added to its result, and the gradient at rest becomes zero.
        """
        self.wait()
        if self.final is None:
            torch._foreach_mul_(self.rest.tensors, factor)
        elif self._is_read and residual_sizes(self.route.unit):
            raise ScheduleError(
                f"unit {self.route.unit.display_name} gets a gradient after the schedule has sent its gradient with feedback: "
                "use the unit in each step in the same way, by fs.forward() alone, or take fs.train_step()."
            )
        if self.route.has_final_reduction and (self.final is None or residual_sizes(self.route.unit)):
            self._earlier_sums = [buffer.clone() for buffer in (self.final or self.rest).tensors]
            torch._foreach_zero_(self.rest.tensors)
        self.phase = min(self.phase, GradientPhase.RESTING)

    def add_flat_gradients(self, grads: Grads) -> None:
        """Add ``grads`` of ``fs.gather()`` to the gradient at rest: for each group a flat buffer of the same size, or None."""
        self.wait()
        self.zero_if_missing()
        self._enter_phase(GradientPhase.RESTING)
        self.num_added += 1
        self.reached = (1 << len(self.route.leaves)) - 1
        for buffer, grad in zip(self.rest.tensors, grads, strict=True):
            if grad is not None:
                buffer.add_(grad)

    def begin_final_reduction(self, blocks: list[list[torch.Tensor]]) -> list[ChainInput]:
        """Prepare the reduction of the gradient at rest to the optimizer's shards. Return inputs of ``reduce_along_chains()``.

        A gradient that no backward has reached becomes zero. ``blocks``: see :meth:`GradientRoute.final_reduction_block`.
        """
        self.wait()
        self.zero_if_missing()
        self._enter_phase(GradientPhase.FINISHING)
        if self.final is not None and self.final.is_held_by_caller:
            self.final.release()
        chains, targets = self.route.final_chains, (self.final or self.rest).tensors
        rows = zip(chains, self.rest.tensors, targets, blocks, self._take_encoded(chains), strict=True)
        return [
            ChainInput(chain, sent.copy_(source) if len(sent) else source, target, scratch, self._residuals, encoded)
            for chain, source, target, (sent, *scratch), encoded in rows
        ]

    def end_final_reduction(self) -> None:
        """Wait for the reductions to the optimizer's shards. Add the sums of the step's earlier final reductions, if any."""
        for _ in self.route.final_chains:
            self._works.pop(0).wait()
        if self._earlier_sums:
            torch._foreach_add_((self.final or self.rest).tensors, self._earlier_sums)
        self._enter_phase(GradientPhase.FINISHED)

    def defer_reduction_end(self, end: Callable[[], None]) -> None:
        """Postpone ``end``, a function that ends a reduction, to the next :meth:`wait`."""
        self.wait()
        self._deferred, self.is_under_way = end, True

    def wait(self) -> None:
        """Block until no reduction of the gradient is under way, so that its results can be read."""
        if self._deferred is not None:
            self._deferred()
            self._deferred = None
        self.is_under_way = False
