"""Release gathered parameters that autograd has saved, and gather them again when a backward needs them.

A release keeps the graph of the call, so nothing is computed twice. Each saved view of a gathered buffer is replaced by a
:data:`SavedView`, which holds no memory. Tensors that C++ functions of other libraries keep cannot be replaced: they stay in
memory, with right values.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import optree
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsharp.errors import TreeError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import Sharded, units_of
from fsharp.functional.moves import gather
from fsharp.functional.transforms import unwrap_vmap
from fsharp.tracebacks import api_boundary, call_hiding_frames

SavedView = tuple[int, torch.Size, tuple[int, ...], int]
"""A view of a gathered buffer: the index of the buffer, and size, strides and offset of the view."""


class _SavedBuffers:
    """The buffers of one call, None until a backward gathers them again. Hooks of the call's graph keep this object.

    ``regather``: function that gathers the buffers, and returns them.
    """

    def __init__(self, regather: Callable[[], list[torch.Tensor]]) -> None:
        self.regather = regather
        self.buffers: list[torch.Tensor] | None = None

    def gather_again(self) -> list[torch.Tensor]:
        """Gather the parameters again, keep them in ``buffers``, and return them."""
        self.buffers = self.regather()
        return self.buffers

    @api_boundary
    def unpack(self, view: SavedView) -> torch.Tensor:
        """Return a saved view of parameters; gather the parameters again if no hook has done so."""
        number, size, strides, offset = view
        # None: the backward has not passed an output of the function.
        buffer = (self.gather_again() if self.buffers is None else self.buffers)[number]
        return buffer.as_strided(size, strides, buffer.storage_offset() + offset)


def release_saved(out: Any, sharded: Any, gathered: Any, sequence_nr: int, comm: Comm) -> None:
    """Release the gathered parameters that autograd has saved for the backward of a call. The backward gathers them again.

    ``out``: the result of the call. ``sharded``: the units that a backward gathers. ``gathered``: the full units that the call
    has used; buffers that share memory with ``sharded`` are not released. ``sequence_nr``: autograd's number of the first node
    that the call could make; older nodes of the graph are not changed. Under a vmap over parameters nothing is released.
    """
    nodes = units_of(sharded)
    if any(unwrap_vmap(buffer) is not buffer for node in nodes for buffer in node.buffers):
        return  # vmap over parameters, which cannot be gathered again after vmap
    whole = [unwrap_vmap(buffer) for node in units_of(gathered) for buffer in node.buffers]
    own = {buffer.untyped_storage().data_ptr() for node in nodes for buffer in node.buffers}
    numbers = {buffer.untyped_storage().data_ptr(): i for i, buffer in enumerate(whole)}
    numbers = {place: i for place, i in numbers.items() if place not in own and whole[i].numel()}
    outputs: set[Any] = {unwrap_vmap(x).grad_fn for x in optree.tree_leaves(out) if isinstance(x, torch.Tensor)}
    outputs = {fn for fn in outputs if fn is not None and is_node_since(fn, sequence_nr)}
    if not numbers or not outputs:
        return
    sources = [node.with_buffers([x.detach() for x in node.buffers]) for node in nodes]
    check, last = in_place_change_check(sources), -1

    def regather() -> list[torch.Tensor]:
        check()
        with torch.no_grad():
            return [buffer for node in gather(sources, comm=comm) for buffer in node.buffers]

    saved = _SavedBuffers(regather)
    held_ref = weakref.ref(saved)  # the hooks do not keep the buffers alive

    def gather_again(_: Any) -> None:
        """Gather the parameters again: a hook that runs in a backward, before the node of each output of the call.

        Only the first run of the hook in a backward gathers. All ranks have to take part in the gather. So the hook gathers
        even if this rank has saved nothing.
        """
        nonlocal last
        if last != (task := torch._C._current_graph_task_id()):
            last, held = task, held_ref()
            _ = regather() if held is None else held.gather_again()

    for raw in raw_saved_tensors(outputs, sequence_nr):
        x = raw.data
        number = numbers.get(x.untyped_storage().data_ptr()) if is_plain_strided(x) else None
        if number is None or x.dtype != whole[number].dtype:
            continue
        view = (number, x.size(), x.stride(), int(x.storage_offset() - whole[number].storage_offset()))
        del x
        raw.register_hooks(lambda _, view=view: view, saved.unpack)
    for fn in outputs:
        fn.register_prehook(partial(call_hiding_frames, gather_again))


def in_place_change_check(nodes: Sequence[Sharded]) -> Callable[[], None]:
    """Return a function that raises a TreeError, which names the unit, if parameters were changed in place after this call."""
    versions = [[version_of(x) for x in node.buffers] for node in nodes]

    def check() -> None:
        for node, before in zip(nodes, versions, strict=True):
            if [version_of(x) for x in node.buffers] != before:
                raise TreeError(
                    f"forward(): parameters of unit {node.unit.display_name} were changed in place between its forward and its "
                    "backward. Make new tensors, or update after the backward."
                )

    return check


def raw_saved_tensors(roots: set[Any], sequence_nr: int) -> Iterator[Any]:
    """Yield autograd's SavedTensor of each tensor that a graph node has saved: for ``roots``, and for newer nodes below them.

    Newer nodes are those with a sequence number of at least ``sequence_nr``. A SavedTensor that has hooks already is left out.
    """
    for node in _graph_nodes_since(roots, sequence_nr):
        kind: Any = type(node)
        for name in _raw_saved_attribute_names(kind):
            found = getattr(node, name)
            for raw in found if isinstance(found, tuple | list) else [found]:
                if raw is not None and raw.unpack_hook is None and isinstance(raw.data, torch.Tensor):
                    yield raw


def tensors_kept_on_ctx(roots: set[Any], sequence_nr: int) -> Iterator[torch.Tensor]:
    """Yield the tensors that graph nodes keep as attributes of ``ctx``, unknown to autograd.

    The nodes are ``roots``, and nodes below them with a sequence number of at least ``sequence_nr``.
    """
    for node in _graph_nodes_since(roots, sequence_nr):
        yield from [value for value in getattr(node, "__dict__", {}).values() if isinstance(value, torch.Tensor)]


def _graph_nodes_since(roots: set[Any], sequence_nr: int) -> Iterator[Any]:
    """Yield ``roots``, and the nodes of autograd's graph below them that were made at ``sequence_nr`` or later. Skip leaves."""
    seen, stack = set(roots), list(roots)
    while stack:
        node = stack.pop()
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen and is_node_since(before, sequence_nr):
                seen.add(before)
                stack.append(before)


def is_plain_strided(x: torch.Tensor) -> bool:
    """Return whether a tensor is strided, and its memory holds its values as they are.

    The result is False for conjugate and negative views, and for torch's zero tensors, which have no memory.
    """
    return x.layout is torch.strided and not (x._is_zerotensor() or x.is_conj() or x.is_neg())


def inner_tensors(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold a tensor's memory: the inner tensors of a wrapper such as a DTensor, else the tensor."""
    wrapper: Any = x
    if type(x) is torch.Tensor or not is_traceable_wrapper_subclass(wrapper):
        return [x]
    inside = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
    return [
        each for y in inside if isinstance(y, torch.Tensor) for each in inner_tensors(y)
    ]  # a DTensor has a mesh there as well


def unaliased_clone(x: torch.Tensor) -> torch.Tensor:
    """Return a differentiable clone that shares no memory with ``x``.

    If ``x`` is a wrapper such as a DTensor, ``x.clone()`` may keep inner tensors of ``x``. This function clones these tensors
    as well.
    """
    clone: Any = x.clone()
    if is_traceable_wrapper_subclass(clone):
        for name in clone.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(clone, name), torch.Tensor) and inner is getattr(x, name):
                setattr(clone, name, inner.clone())
    return clone  # type: ignore[no-any-return]


@cache
def _raw_saved_attribute_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def is_node_since(node: Any, sequence_nr: int) -> bool:
    """Return whether ``node`` of autograd's graph was made at ``sequence_nr`` or later. For the node of a leaf return False."""
    return sequence_nr <= node._sequence_nr() and not hasattr(node, "variable")  # leaves have a number beyond all others


def in_place_write_error(unit: str) -> TreeError:
    """Return the error for a function that has written to its parameters in place."""
    return TreeError(
        f"forward(): the function has written to a parameter of unit {unit!r} in place. The writes may be lost, as the "
        "function may get a copy. Return new values, or write to a clone. nn.Embedding(max_norm=) writes, too."
    )


def version_of(x: torch.Tensor) -> int:
    """Return the version of a tensor, which counts writes in place; 0 for a tensor without a version counter."""
    return 0 if x.is_inference() else unwrap_vmap(x)._version
