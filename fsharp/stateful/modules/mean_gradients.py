"""MeanGradients: the mean gradients of a module's parameters, sharded for the optimizer."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fsharp.functional.comm.protocol import Comm, LabelPrefixComm
from fsharp.functional.layout.sharded import units_of
from fsharp.functional.optim.norms import global_norm
from fsharp.stateful.modules.parameter import ShardedParameter, ShardedTensor, iter_leaves_and_parts
from fsharp.stateful.modules.torch_tools.dtensors import DTensorSpec
from fsharp.stateful.units.unit_gradient import UnitGradient
from fsharp.stateful.units.unit_state import UnitState


class MeanGradients:
    """The mean gradients of a module between a backward outside of ``accumulate()`` and the optimizer's step.

    Attributes:
        tree: a tree of :class:`~fsharp.Sharded` in the layout of optimizer state; None while there are no gradients.
        trained, missing: paths of trained parameters, and of those that got no gradient, for which the tree has zeros.
        edits: changes of the gradients since they were set, in order, such as ``"unscale"``.
    """

    def __init__(self, parameters: Mapping[str, ShardedParameter], specs: Mapping[str, DTensorSpec], comm: Comm) -> None:
        self._parameters, self._specs, self._comm = parameters, specs, comm
        self._parts: dict[str, ShardedTensor] = {}
        self._hooks: dict[str, OrderedDict[int, Callable[[Any], Any]]] = {}
        self.release_gradients()

    def release_gradients(self) -> None:
        """Release the gradients. A part that a caller still holds keeps its values, in new memory."""
        parts = [weakref.ref(part) for part in self._parts.values()]
        self.tree: Any = None
        self.missing: set[str] = set()
        self._parts = {}
        self._versions: list[int] = []
        self.edits: list[str] = []
        for reference in parts:
            if (part := reference()) is not None:
                part.move_to_new_memory()

    def set_to_mean_over_ranks(self, sums: Any, missing: set[str]) -> None:
        """Make ``sums`` the means: divide in place by the number of ranks. ``missing``: paths with no gradient on any rank."""
        self.tree, self.missing, self._parts, self.edits = sums, missing, {}, []
        self.trained = frozenset([path for path, each in self._parameters.items() if each.is_trained])
        torch._foreach_div_(self.buffers, self._comm.mesh.size)
        for node in units_of(sums) if missing else ():
            if node.unit.has_any_format:  # a format may not decode zeros of all ranks to zeros
                for path, _, data in iter_leaves_and_parts(node, self._comm.rank):
                    if path in missing:
                        data.zero_()
        self._versions = self._version_counters()

    def add_gradient_ready_hook(self, path: str, hook: Callable[[ShardedParameter], Any]) -> RemovableHandle:
        """Register ``hook(parameter)`` for :meth:`call_hooks`. Return a handle, whose ``remove()`` removes the hook."""
        hooks = self._hooks.setdefault(path, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def call_hooks(self) -> None:
        """Call the hooks of all parameters that have a gradient now; a hook may release gradients."""
        present = self.paths_with_gradient
        for path, parameter in list(self._parameters.items()):
            if path in present:
                for hook in list(self._hooks.get(path, {}).values()):
                    hook(parameter)

    def return_to_sums(self, units: Iterable[UnitState]) -> None:
        """Release the means, and turn the gradients of ``units`` back into sums, to which another backward can add."""
        self.release_gradients()
        for unit in units:
            if unit.gradient is not None:
                unit.gradient.resume_accumulation(self._comm.mesh.size)

    @property
    def are_changed(self) -> bool:
        """Whether the user has written to the gradients since they were set."""
        return self._version_counters() != self._versions

    def _version_counters(self) -> list[int]:
        return [buffer._version for buffer in self.buffers]

    def changes_text(self) -> str:
        """Return text about the user's changes of gradients since they were set, for ranks to compare."""
        # Only writes to buffers that every rank holds in full count: a rank without elements of a cut leaf does not write.
        is_whole = [not (n.place.sharded_axes or n.place.varying_axes) for n in units_of(self.tree) for _ in n.buffers]
        rows = zip(self._version_counters(), self._versions, is_whole, strict=True)
        return f"changes of gradients={self.edits}, writes={[now - before for now, before, whole in rows if whole]}"

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The gradient buffers of all units. Valid only if ``tree`` is not None."""
        return [buffer for node in units_of(self.tree) for buffer in node.buffers]

    def gradient_part(self, path: str) -> ShardedTensor | None:
        """Return this rank's part of the gradient of a parameter; None if the parameter has no gradient."""
        if self.tree is None or path in self.missing:
            return None
        if not self._parts:
            held = (row for node in units_of(self.tree) for row in iter_leaves_and_parts(node, self._comm.rank))
            self._parts = {name: ShardedTensor.from_local(data, self._parameters[name]) for name, _, data in held}
        return self._parts.get(path)

    def release_part(self, path: str) -> None:
        """Zero the gradient that :meth:`gradient_part` gave, and record it as missing. Parts of callers keep their values."""
        reference, data = weakref.ref(self._parts[path]), self._parts[path].local
        varying = self._parts.pop(path).place.varying_axes
        if (held := reference()) is not None:
            held.move_to_new_memory()
        data.zero_()
        self.missing.add(path)
        if not varying:
            self.edits.append(f"without {path}")

    @property
    def paths_with_gradient(self) -> frozenset[str]:
        """Paths of the trained parameters that have a gradient. Valid only if ``tree`` is not None."""
        return self.trained - self.missing

    def norm(self, order: float) -> torch.Tensor:
        """Return the ``order``-norm of all gradients: over all ranks, and over the mesh axes of DTensors."""
        if order == 2 and not self._specs:
            return global_norm(self.tree, comm=LabelPrefixComm(self._comm, "clip_grad_norm_(): "))
        parts = [part for path in self._parameters if (part := self.gradient_part(path)) is not None and part.numel()]
        return torch.nn.utils.get_total_norm(parts, order)


def parameters_without_gradient(units: Sequence[UnitState], comm: Comm, paused: Collection[str]) -> set[str]:
    """Return the paths of trained parameters of ``units`` that have no gradient on any rank, such as paused parameters.

    Ranks agree by an ``all_reduce`` of one byte for each parameter and axis; axes on which a unit varies are left out. A rank
    that lacks a gradient waits on its CPU for the result. A rank with all gradients only begins the ``all_reduce``; over gloo
    this waits too. ``paused``: paths of paused parameters; the label, which ranks compare, has their number and one path.
    """
    missing: set[str] = set()
    label = f"which gradients there are, with {len(paused)} parameters paused, such as {min(paused)!r}" if paused else ""
    gradients: dict[tuple[str, ...], list[UnitGradient]] = {}
    for unit in units:
        if unit.gradient is not None:
            gradients.setdefault(unit.layout.varying_axes, []).append(unit.gradient)
    for varying, alike in gradients.items():
        has = [gradient.reached >> i & 1 for gradient in alike for i in range(len(gradient.route.leaves))]
        flags = torch.ones(len(has), dtype=torch.uint8, device=comm.device)
        if not all(has):
            flags = torch.tensor(has, dtype=torch.uint8, device=comm.device)
        for axis, size in comm.mesh.axes:
            if has and size > 1 and axis not in varying:
                flags = comm.all_reduce(flags, axis, op="max", label=label)
        if not all(has):
            paths = [gradient.route.unit.path_in_tree(leaf) for gradient in alike for leaf in gradient.route.leaves]
            missing |= {path for path, found in zip(paths, flags.tolist(), strict=True) if not found}
    return missing
