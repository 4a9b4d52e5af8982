"""The boundary between autograd and the scheduler: it hands leaves to functions, and takes the leaves' gradients."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import optree
import torch

from fsharp.errors import ScheduleError
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.release import is_plain, is_since, kept_tensors, saved_tensors, written_to
from fsharp.stateful.runtime.notes import Note, WrapperNote
from fsharp.stateful.units.full import FullUnit
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.unsharded import Stamp, UnshardedBuffer, stamp
from fsharp.tracebacks import call_hook, hide_frames

Receive = Callable[[Sequence[torch.Tensor | None]], None]


class _Boundary(torch.autograd.Function):
    """An autograd function: its outputs are leaves, and its backward hands the leaves' gradients to the scheduler.

    The engine runs what was made last first, and this was made before anything that the function did: when it is called
    the whole backward of this use is over, and nothing of what came earlier in the forward has begun.
    """

    @staticmethod
    def forward(ctx: Any, receive: Receive, leaves: list[torch.Tensor], *sinks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.receive, ctx.num_sinks = receive, len(sinks)
        ctx.set_materialize_grads(False)
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        try:
            if torch.is_grad_enabled():
                raise double_backward()
            ctx.receive(grads)
        except Exception as error:
            hide_frames(error)
            raise
        return (None,) * (2 + ctx.num_sinks)


_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Boundary).apply
"""As ``_Boundary.apply`` outside of transforms of torch.func, under which there are no boundaries."""


def double_backward() -> ScheduleError:
    """Return the error for a double backward: its saved tensors would point at released memory."""
    return ScheduleError(
        "forward(): a graph of the backward was asked for (create_graph=True), which the scheduler does not keep. "
        "The blocking path can be differentiated again: of a ShardedModule take `fn, params = model.functional()`, and "
        "call fn(params, ..., comm=model.comm); in functions pass comm=scheduler.comm to forward() there."
    )


def differentiable(receive: Receive, leaves: list[torch.Tensor], sinks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return leaves as outputs of one node. Its backward calls ``receive`` with their gradients; None for a missing one."""
    return list(_apply(receive, leaves, *sinks))


def before_backward(outputs: Sequence[Any], inputs: Sequence[Any], call: Callable[[object], None]) -> None:
    """Register ``call``, to run with gradients when a backward reaches a node that made one of ``outputs``."""
    mine = set(map(id, inputs))
    for out in outputs:
        if isinstance(out, torch.Tensor) and out.grad_fn is not None and id(out) not in mine:
            out.grad_fn.register_prehook(partial(call_hook, call))


def pack_saved(out: Any, copy: UnshardedBuffer, first: int, fill: Callable[[], UnshardedBuffer]) -> bool:
    """Replace gathered parameters that autograd has saved by notes, so that autograd holds none of their memory.

    In the backward autograd asks for the noted views. Tensors saved on the way to other results than ``out`` stay. Return False
    if some saved tensor cannot be examined, such as a DTensor. The function began at autograd's sequence number ``first``;
    ``fill`` gathers its parameters again, if they are not there.
    """
    assert copy.memory is not None
    assert copy.full is not None
    place, full = copy.memory.untyped_storage().data_ptr(), copy.full
    leaves = [out] if isinstance(out, torch.Tensor) else optree.tree_leaves(out)
    roots = {x.grad_fn for x in leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None}

    def unpack(note: Note | WrapperNote) -> torch.Tensor:
        memory = fill().memory
        assert memory is not None
        return note.made(memory)

    def unpack_classed(leaf: torch.Tensor) -> torch.Tensor:
        fill()
        return leaf

    is_seen, roots = True, {root for root in roots if is_since(root, first)}
    for x in kept_tensors(roots, first):  # as TransformerEngine keeps weights
        if type(x) is torch.Tensor and is_plain(x) and x.untyped_storage().data_ptr() == place:
            full.lend(x)
    for raw in saved_tensors(roots, first):
        x = raw.data
        if full.has_handed_out(x):  # whose memory is taken from it
            raw.register_hooks(torch.Tensor.detach, partial(call_hook, unpack_classed))
        elif type(x) not in (torch.Tensor, torch.nn.Parameter):
            wrapper = WrapperNote.of(x, place) if full.has_classes else None
            del x
            if wrapper is None:
                is_seen = False
            elif wrapper.is_gathered:
                raw.register_hooks(lambda _, wrapper=wrapper: wrapper, partial(call_hook, unpack))
        elif is_plain(x) and x.untyped_storage().data_ptr() == place:
            note = Note.of(x)
            del x
            raw.register_hooks(lambda _, note=note: note, partial(call_hook, unpack))
    return is_seen


def in_backward() -> bool:
    """Return whether this thread is inside of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


class UnitUse:
    """One use of a unit.

    Args:
        number: number of uses that have begun before in the step.
        parent: the use inside of which this one begins; None if there is none.
        copy: the buffer of the unit's full parameters; None if the unit rests in full.

    Attributes:
        leaves: the tensors for the function; None once the function has taken them.
        is_opaque: whether autograd has saved tensors that cannot be examined.
    """

    def __init__(
        self, unit: UnitState, number: int, parent: "UnitUse | None", copy: UnshardedBuffer | None, full: FullUnit
    ) -> None:
        assert unit.node is not None
        self.unit, self.number, self.parent, self.copy = unit, number, parent, copy
        self.node: Sharded = unit.node
        self.seen: Stamp = (copy.filled_from if copy is not None else None) or stamp(unit.node)
        self.leaves: list[torch.Tensor] | None = full.leaves()
        self._full: FullUnit | None = full
        self._versions = full.versions()
        self.is_opaque = False

    def is_inside(self, other: "UnitUse") -> bool:
        """Return whether this use began inside of ``other``, or is ``other``."""
        use: UnitUse | None = self
        while use is not None and use is not other:
            use = use.parent
        return use is not None

    def take_leaves(self) -> list[torch.Tensor]:
        """Return the leaves, and drop this object's reference to them."""
        leaves, self.leaves = self.leaves, None
        return leaves or []

    def check_unwritten(self) -> None:
        """Raise an error if the function has written to a leaf, as writes to gathered parameters would be lost."""
        if self._full is not None and self._full.is_written_since(self._versions):
            raise written_to(self.unit.key)
        self._full = None

    def pack(self, out: Any, first: int, fill: Callable[[], UnshardedBuffer]) -> None:
        """Release the parameters from autograd, if they have memory of their own; see :func:`pack_saved`."""
        if self.copy is not None and self.copy.where is None:
            self.is_opaque = not pack_saved(out, self.copy, first, fill)


class UsesUnderWay:
    """The uses of a step that have begun and are not over.

    Attributes:
        numbers: yields the number of the next use.
        forward: uses whose function is being called, the innermost last.
        backward: uses whose backward has begun, the innermost last.
        pending: by unit, number of uses in this microbatch whose gradient is still missing.
        awaited: uses whose backward may come; autograd's graph keeps them alive.
        held: units whose parameters a caller holds beyond their use. A schedule would reuse their memory, so it is not
            compiled.
        recomputed: units that a checkpoint has used again and a caller holds, without a backward since then.
    """

    def __init__(self) -> None:
        self.numbers = count()
        self.forward: list[UnitUse] = []
        self.backward: list[UnitUse] = []
        self.pending: dict[str, int] = {}
        self.awaited: set[weakref.ref[UnitUse]] = set()
        self.held: dict[str, None] = {}
        self.recomputed: dict[str, None] = {}

    def are_in(self, copy: UnshardedBuffer) -> bool:
        """Return whether a use that is under way has its parameters in this buffer."""
        return any(use.copy is copy for each in (self.forward, self.backward) for use in each)

    def end_recomputation(self) -> None:
        """Count units that a checkpoint has used again, without a backward since then, as held."""
        self.held |= self.recomputed
        self.recomputed.clear()
