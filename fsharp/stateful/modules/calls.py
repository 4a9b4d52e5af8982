"""ModuleCalls: the code of a module and of the modules in it, called with units gathered and full parameters in their slots."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from fsharp.compiling import compiled_by_caller, uncompiled
from fsharp.errors import TreeError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.forward import forward
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import units_by_name
from fsharp.stateful.modules.initial.dtensors import Spec, dressed, local
from fsharp.stateful.modules.parameter_slots import ParameterSlots, members_of, owners, refuse_added, swapped_in
from fsharp.stateful.modules.values.outputs import reaching, replaced, tensors_in, without_parameters
from fsharp.stateful.modules.values.side_outputs import SideOutputs


class ParameterSource:
    """Where the modules that compute at present get their parameters from.

    Args:
        tree: of parameters at rest.
        comm: the ranks, or a scheduler.

    Attributes:
        nodes: by name of the unit.
        computing: modules whose forward is under way, and whose units are gathered.
    """

    __slots__ = ("comm", "computing", "nodes")

    def __init__(self, tree: Any, comm: Comm) -> None:
        self.nodes, self.comm = units_by_name(tree), comm
        self.computing: list[nn.Module] = []


class GatheredModule(NamedTuple):
    """The root, or a module that is gathered by itself.

    Attributes:
        units: names of the units that are gathered when the module is called.
        ties: names of other units, which store leaves that these units' leaves are tied to.
        side_outputs: where the module may leave tensors that it does not return.
        has_inner: whether modules inside of it are gathered by themselves.
        varies: whether a unit varies along an axis. A rank there may have nothing to compute, as where an expert gets no
            tokens. The rank has a backward all the same, so that other ranks do not wait.
    """

    units: Sequence[str]
    ties: Sequence[str]
    side_outputs: SideOutputs
    has_inner: bool
    varies: bool


class ModuleCalls:
    """Calls of a module's code, with the parameters of its units.

    Args:
        module: the root.
        layout: of its parameters.
        chosen: paths of the modules that are gathered by themselves.
        specs: of the parameters that are DTensors, by path.
        paused: paths of parameters that forwards do not differentiate at present; each forward reads this set.

    Attributes:
        slots: of each unit, by name.
        owners: by path, the root and the chosen modules.
        specs: as they were passed.
        source: where parameters come from in the call that is under way, if one is.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        chosen: Sequence[str],
        specs: Mapping[str, Spec],
        paused: Collection[str] = frozenset(),
    ) -> None:
        self._layout, self.specs, self._paused = layout, specs, paused
        present: dict[tuple[int, str], Any] = {}
        self.slots = {
            unit.name: ParameterSlots(module, [unit.full_path(leaf) for leaf in unit.leaves], present) for unit in layout.units
        }
        by_path = owners(layout, chosen)
        members = members_of(module, list(by_path))
        self.owners = {
            path: GatheredModule(
                units=names,
                ties=sorted({tied for name in names for tied in layout[name].tied_units} - set(names)),
                side_outputs=SideOutputs(members[path].values()),
                has_inner=any(other != path and (not path or other.startswith(f"{path}.")) for other in by_path),
                varies=any(layout[name].strategy.full.varying for name in names),
            )
            for path, names in by_path.items()
        }
        self.source: ParameterSource | None = None

    def enter(
        self,
        source: ParameterSource,
        module: nn.Module,
        path: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """``fn(*args, **kwargs)``, the code of the module at ``path``, with its units gathered from ``source``."""
        owner, given, inner = self.owners[path], _Arguments(args, kwargs), _Inner()
        for name in owner.units:
            self.slots[name].check()
        refuse_added(module, path)

        @uncompiled
        def compute(trees: list[Any], *flat: Any) -> list[Any]:
            a, k = given.filled(flat)
            passed = [*a, *k.values()]
            before = owner.side_outputs.look(passed, path)
            leaves = [optree.tree_leaves(tree) for tree in trees]
            if self._paused:
                leaves = [self._detached(*each) for each in zip(owner.units, leaves, strict=True)]
            shown = [self.dressed(*each) for each in zip(owner.units, leaves, strict=True)]
            with self.reading(source, module), self.swapped_in(owner.units, shown):
                out = compiled_by_caller(fn, *a, **k)
            full = [leaf for each in leaves for leaf in each]
            out = without_parameters(out, full, path)
            found, mine = tensors_in(out, path), owner.side_outputs.since(before, passed, full, path)
            found += [x for x in mine if not any(x is y for y in found)]
            inner.out, inner.found, inner.passed = out, found, passed
            return reaching(found, [*flat, *full]) if owner.varies else found

        nodes = [source.nodes[name] for name in owner.units]
        if not nodes:
            compute([], *given.flat)
            return inner.out
        ties = [source.nodes[name] for name in owner.ties]
        found = forward(compute, nodes, *given.flat, comm=source.comm, ties=ties, release=not owner.has_inner)
        if all(a is b for a, b in zip(found, inner.found, strict=True)):
            return inner.out
        owner.side_outputs.replace(inner.passed, inner.found, found, path)
        return replaced(inner.out, inner.found, found, path)

    @contextmanager
    def reading(self, source: ParameterSource, module: nn.Module | None = None) -> Iterator[None]:
        """Have modules that are called in this context get their parameters from ``source``.

        ``module`` has its parameters already: calls of its own methods run directly.
        """
        before, self.source = self.source, source
        others = before.computing if before is not None and before is not source else []
        for each in others:
            each.__dict__["_fsharp_computes"] = False
        if module is not None:
            source.computing.append(module)
            module.__dict__["_fsharp_computes"] = True
        try:
            yield
        finally:
            self.source = before
            if module is not None:
                module.__dict__["_fsharp_computes"] = False
                source.computing.pop()
            for each in others:
                each.__dict__["_fsharp_computes"] = True

    @contextmanager
    def swapped_in(self, names: Sequence[str], parameters: Sequence[Sequence[Any]]) -> Iterator[None]:
        """In this context the module has these for parameters, in the order of each unit's leaves."""
        with swapped_in([self.slots[name] for name in names], parameters):
            yield

    def dressed(self, name: str, leaves: Sequence[torch.Tensor]) -> Sequence[Any]:
        """A unit's leaves as the module's code has them."""
        if not self.specs:
            return leaves
        return dressed(map(self._layout[name].full_path, self._layout[name].leaves), leaves, self.specs)

    def _detached(self, name: str, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a unit's leaves, with paused ones detached."""
        paths = map(self._layout[name].stored_path, self._layout[name].leaves)
        return [x.detach() if path in self._paused else x for path, x in zip(paths, leaves, strict=True)]

    def take_over(self, name: str, leaves: Sequence[torch.Tensor]) -> None:
        """Copy what sits in the slots of a unit into these leaves, as far as it is something else.

        Raises:
            TreeError: it has another shape.
        """
        unit = self._layout[name]
        for i, sitting in self.slots[name].sitting:
            mine = local(sitting)
            if not isinstance(mine, torch.Tensor) or mine.shape != leaves[i].shape:
                raise TreeError(f"unsharded(): {unit.full_path(unit.leaves[i])!r} was replaced by something of another shape.")
            if mine.data_ptr() != leaves[i].data_ptr():
                leaves[i].copy_(mine)


class _Inner:
    """What a module has returned, the tensors that it gives away, and what it was passed: inside of its units' forward."""

    out: Any
    found: list[torch.Tensor]
    passed: list[Any]


class _Arguments:
    """What a module is called with, and its leaves."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.whole = args, kwargs
        self.flat, self.spec = torch_pytree.tree_flatten(self.whole)

    def filled(self, flat: Sequence[Any]) -> Any:
        """The arguments with these leaves; with the leaves they have, the caller's own lists and dicts."""
        if all(a is b for a, b in zip(flat, self.flat, strict=True)):
            return self.whole
        return torch_pytree.tree_unflatten(list(flat), self.spec)
