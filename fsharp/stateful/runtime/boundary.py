"""The boundary between autograd and the scheduler: it hands leaves to functions, and takes the leaves' gradients."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import optree
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsharp.errors import ScheduleError
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.release import (
    in_place_write_error,
    is_node_since,
    is_plain_strided,
    raw_saved_tensors,
    tensors_kept_on_ctx,
)
from fsharp.stateful.units.full_unit import FullUnit
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.units.unsharded_buffer import Stamp, UnshardedBuffer, buffers_stamp
from fsharp.tracebacks import call_hiding_frames, hide_frames

ReceiveGradients = Callable[["UnitUse", Sequence[torch.Tensor | None]], None]


class _GradientReceiver(torch.autograd.Function):
    """An autograd function: its outputs are leaves, and its backward hands the leaves' gradients to the scheduler.

    Autograd makes this node before the nodes of the function that uses the leaves, and runs nodes in reverse order. So when
    this node runs, the whole backward of this use of the unit is over, and no backward of earlier uses has begun.
    """

    @staticmethod
    def forward(
        ctx: Any, use: "UnitUse", receive: ReceiveGradients, leaves: list[torch.Tensor], *sinks: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.use, ctx.receive = use, receive
        ctx.set_materialize_grads(False)
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        try:
            if torch.is_grad_enabled():
                raise create_graph_error()
            ctx.receive(ctx.use, ctx.use.add_written_gradients(grads))
        except Exception as error:
            hide_frames(error)
            raise
        return (None,) * len(ctx.needs_input_grad)


make_leaves_differentiable: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _GradientReceiver).apply
"""Return leaves as outputs of one node, whose backward calls ``receive(use, grads)``. A missing gradient is None. This is
``_GradientReceiver.apply`` without the overhead for transforms of torch.func, under which there are no boundaries."""
_RECEIVER_NODE: type = _GradientReceiver._backward_cls


def find_unit_use(leaf: torch.Tensor) -> "UnitUse | None":
    """Return the use that has handed out the differentiable ``leaf``; None for any other tensor."""
    return getattr(leaf.grad_fn, "use", None) if isinstance(leaf.grad_fn, _RECEIVER_NODE) else None


def create_graph_error() -> ScheduleError:
    """Return the error for a double backward, whose saved tensors would be in released memory."""
    return ScheduleError(
        "forward(): create_graph=True needs a graph of the backward, which the scheduler does not keep. "
        "The blocking path keeps it: of a ShardedModule take `fn, params = model.functional()`, and give fs.value_and_grad() a "
        "loss of fn(params, ..., comm=model.comm); in functions pass comm=scheduler.comm to forward() there."
    )


def register_output_prehooks(outputs: Sequence[Any], inputs: Sequence[Any], hook: Callable[[object], None]) -> None:
    """Call ``hook(grads)`` when a backward reaches the node of a tensor in ``outputs`` that is not also in ``inputs``."""
    mine = set(map(id, inputs))
    for out in outputs:
        if isinstance(out, torch.Tensor) and out.grad_fn is not None and id(out) not in mine:
            out.grad_fn.register_prehook(partial(call_hiding_frames, hook))


RebuildView = Callable[[torch.Tensor], torch.Tensor]
"""A function that autograd keeps in place of a saved view of gathered memory. It returns the same view of other memory."""


def _make_view_rebuild(x: torch.Tensor) -> RebuildView:
    dtype, offset, size, stride = x.dtype, int(x.storage_offset()), x.size(), x.stride()
    return lambda memory: torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, size, stride)


def _inner_plain_tensors(x: Any) -> dict[str, torch.Tensor] | None:
    """Return the inner tensors of a wrapper by attribute; None if ``x`` is not a wrapper, or has tensors that are not plain."""
    if not is_traceable_wrapper_subclass(x):
        return None
    inner = {name: getattr(x, name) for name in x.__tensor_flatten__()[0]}
    return inner if all(type(each) is torch.Tensor and is_plain_strided(each) for each in inner.values()) else None


def _make_wrapper_rebuild(x: Any, rebuilds: Mapping[str, RebuildView]) -> RebuildView:
    """Return a function that rebuilds a wrapper subclass of tensors, from the functions that rebuild its inner tensors."""
    kind, about, size, stride = type(x), x.__tensor_flatten__()[1], torch.Size(x.size()), x.stride()
    return lambda memory: kind.__tensor_unflatten__(
        {name: rebuild(memory) for name, rebuild in rebuilds.items()}, about, size, stride
    )


def in_backward() -> bool:
    """Return whether this thread is inside of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


class UnitUse:
    """One use of a unit: a call of a function on the unit, with the backward of this call.

    Args:
        number: number of uses that have begun before in the step.
        parent: the use inside of which this use begins; None outside of all uses.
        unsharded: the buffer of the unit's gathered parameters; None if the unit is never gathered.
        full: the unit's full parameters, which this use hands to the function as leaves.

    Attributes:
        leaves: the tensors for the function; None once the function has taken them.
        is_opaque: whether autograd has saved tensors that cannot be examined.
    """

    def __init__(
        self, unit: UnitState, number: int, parent: "UnitUse | None", unsharded: UnshardedBuffer | None, full: FullUnit
    ) -> None:
        assert unit.node is not None
        self.unit, self.number, self.parent, self.unsharded = unit, number, parent, unsharded
        self.node: Sharded = unit.node
        self.stamp: Stamp = (unsharded.filled_from if unsharded is not None else None) or buffers_stamp(unit.node)
        self.leaves: list[torch.Tensor] | None = full.leaves()
        self._full: FullUnit | None = full
        self._versions = full.version_counters()
        self._written: dict[int, list[torch.Tensor]] = {}
        self.is_opaque = False

    def is_same_or_inside(self, other: "UnitUse") -> bool:
        """Return whether this use began inside of ``other``, or is ``other``."""
        use: UnitUse | None = self
        while use is not None and use is not other:
            use = use.parent
        return use is not None

    def take_leaves(self) -> list[torch.Tensor]:
        """Return the leaves, and release this object's reference to them. A second call returns an empty list."""
        leaves, self.leaves = self.leaves, None
        return leaves or []

    def make_gradient_allocator(self, leaf: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that allocates memory for a gradient of a leaf, for a module that writes gradients by itself.

        The function keeps the leaf alive, which a module may hold by a weak reference, but not the leaf's gathered memory.
        """
        buffer = self.unsharded
        if buffer is not None and buffer.where is None and buffer.full is not None and type(leaf) is torch.Tensor:
            buffer.full.register_alias(leaf)

        def memory() -> torch.Tensor:
            made = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            self._written.setdefault(leaf.output_nr, []).append(made)
            return made

        return memory

    def add_written_gradients(self, grads: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return ``grads`` plus, leaf by leaf, gradients that modules have written by themselves since the last call."""
        if not self._written:
            return grads
        found, written = list(grads), self._written
        self._written = {}
        for i, each in written.items():
            for grad in each:
                before = found[i]
                found[i] = grad if before is None else before + grad
        return found

    def check_leaves_unwritten(self) -> None:
        """Raise an error if the function has written to a leaf: the write to gathered parameters would be lost."""
        if self._full is not None and self._full.is_written_since(self._versions):
            raise in_place_write_error(self.unit.key)
        self._full = None

    def pack_saved_parameters(self, out: Any, sequence_nr: int, fill_buffer: Callable[[], UnshardedBuffer]) -> None:
        """In place of views of this use's parameters let autograd save functions that rebuild the views in the backward.

        So memory can be released before the backward. Views in the arena stay: a schedule fills the same addresses again. Only
        nodes of the graph of ``out`` from ``sequence_nr`` on are searched. ``fill_buffer`` returns the buffer of the
        parameters, and gathers the parameters again if the buffer was released.
        """
        if self.unsharded is None or self.unsharded.where is not None:
            return
        assert self.unsharded.memory is not None
        assert self.unsharded.full is not None
        place, full = self.unsharded.memory.untyped_storage().data_ptr(), self.unsharded.full
        leaves = [out] if isinstance(out, torch.Tensor) else optree.tree_leaves(out)
        roots = {x.grad_fn for x in leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None}
        roots = {root for root in roots if is_node_since(root, sequence_nr)}

        def is_here(x: torch.Tensor) -> bool:
            return is_plain_strided(x) and x.untyped_storage().data_ptr() == place

        def unpack(rebuild: torch.Tensor | RebuildView) -> torch.Tensor:
            memory = fill_buffer().memory
            assert memory is not None
            return rebuild if isinstance(rebuild, torch.Tensor) else rebuild(memory)

        for x in tensors_kept_on_ctx(roots, sequence_nr):  # TransformerEngine keeps weights there
            if type(x) is torch.Tensor and is_here(x):
                full.register_alias(x)
        for raw in raw_saved_tensors(roots, sequence_nr):
            x = raw.data
            rebuild: RebuildView | None = None
            if full.is_subclass_leaf(x):  # a leaf loses its memory at the release, and gets it back
                raw.register_hooks(torch.Tensor.detach, partial(call_hiding_frames, unpack))
            elif type(x) not in (torch.Tensor, torch.nn.Parameter):
                inner = _inner_plain_tensors(x) if full.has_classes else None
                self.is_opaque |= inner is None
                if inner is not None and any(map(is_here, inner.values())):
                    rebuilds = {name: _make_view_rebuild(y) if is_here(y) else lambda _, y=y: y for name, y in inner.items()}
                    rebuild = _make_wrapper_rebuild(x, rebuilds)
                del inner
            elif is_here(x):
                rebuild = _make_view_rebuild(x)
            del x
            if rebuild is not None:
                raw.register_hooks(lambda _, rebuild=rebuild: rebuild, partial(call_hiding_frames, unpack))


class UsesUnderWay:
    """The uses of a step that have begun and are not over.

    Attributes:
        numbers: yields the number of the next use.
        forward: uses whose function is being called, the innermost last.
        backward: uses whose backward has begun, the innermost last.
        pending: by unit, number of uses in this microbatch whose gradient is still missing.
        awaited: uses whose backward may come, by weak references: autograd's graph keeps these uses alive.
        held: units whose parameters a caller holds after their use. The step gets no schedule: it would reuse the memory.
        held_in_backward: units used in a backward, whose parameters a checkpoint may hold until the unit's own backward.
    """

    def __init__(self) -> None:
        self.numbers = count()
        self.forward: list[UnitUse] = []
        self.backward: list[UnitUse] = []
        self.pending: dict[str, int] = {}
        self.awaited: set[weakref.ref[UnitUse]] = set()
        self.held: dict[str, None] = {}
        self.held_in_backward: dict[str, None] = {}

    def is_buffer_in_use(self, unsharded: UnshardedBuffer) -> bool:
        """Return whether a use that is under way has its parameters in the buffer ``unsharded``."""
        return any(use.unsharded is unsharded for each in (self.forward, self.backward) for use in each)

    def move_held_in_backward_to_held(self) -> None:
        """Move units from ``held_in_backward`` to ``held``: the microbatch ends, and a caller still holds their parameters."""
        self.held |= self.held_in_backward
        self.held_in_backward.clear()
