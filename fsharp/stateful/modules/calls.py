"""ModuleCall: call the code of a module and its submodules with units gathered, and full parameters in place of parts."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import optree
import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from fsharp.errors import ScheduleError, TreeError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import units_by_name
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.release import unaliased_clone
from fsharp.functional.tree.paths import innermost_prefix, parents_of_all_prefixes
from fsharp.stateful.modules.parameter import ShardedParameter
from fsharp.stateful.modules.selection import gathered_units_by_module
from fsharp.stateful.modules.te import lending_gradient_memory, scale_indices_of_fused_wgrads
from fsharp.stateful.modules.torch_tools.dtensors import DTensorSpec, as_dtensors, local_tensor
from fsharp.stateful.modules.values.outputs import connect_to_inputs, replace_tensors_in_place, tensors_in, views_of_parameters
from fsharp.stateful.modules.values.side_outputs import SideOutputFinder
from fsharp.torch_compile import call_compiled_like_caller, disable_compile

_PYTREE_LEAF_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


class ParameterEntries:
    """The entries of one unit's parameters in the ``_parameters`` dicts of modules, in the order of the unit's leaves.

    ``present``: by entry, the tensor that was last put there. All units share this dict, as they may share entries.

    Attributes:
        stored: for each leaf, the path under which its values are stored. Tied leaves share a path.
        fused: indices of leaves whose gradient a module writes by itself.
    """

    def __init__(self, module: nn.Module, unit: UnitLayout, present: dict[tuple[int, str], Any]) -> None:
        self._paths, self.stored = list(map(unit.path_in_tree, unit.leaves)), list(map(unit.path_of_tie_owner, unit.leaves))
        self._present = present
        entries: dict[tuple[int, str], tuple[int, dict[str, Any], str]] = {}  # a module may have several paths
        with_flat_weights: dict[int, weakref.ref[nn.Module]] = {}
        self.fused: list[int] = []
        for i, path in enumerate(self._paths):
            parent, _, name = path.rpartition(".")
            owner = module.get_submodule(parent)
            entries.setdefault((id(owner), name), (i, owner._parameters, name))
            if name in scale_indices_of_fused_wgrads(owner):
                self.fused.append(i)
            if hasattr(owner, "_flat_weights_names"):
                with_flat_weights[id(owner)] = weakref.ref(owner)
        self._entries = list(entries.values())
        self._with_flat_weights = list(with_flat_weights.values())  # recurrent modules: they keep a list of their parameters

    def check_not_replaced(self, where: str = "") -> None:
        """Raise a TreeError if the user has replaced or removed a parameter: a forward would ignore this."""
        for i, parameters, name in self._entries:
            if parameters.get(name) is not self._present[id(parameters), name]:
                raise TreeError(
                    f"{where}parameter {self._paths[i]!r} was removed or replaced after shard_module(), which a forward would "
                    "ignore. Write values in `with model.unsharded(write=True):`; replace, tie and parametrize before "
                    "shard_module(); in place of torch.func.functional_call() take `fn, params = model.functional()`."
                )

    def iter_current_tensors(self, full: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield, for each entry, its stored path and its present tensor. TreeError for another shape than in ``full``."""
        for i, parameters, name in self._entries:
            path, mine = self.stored[i], local_tensor(parameters.get(name))
            if not isinstance(mine, torch.Tensor) or mine.shape != full[path].shape:
                got = f"tensor of shape {list(mine.shape)}" if isinstance(mine, torch.Tensor) else type(mine).__name__
                raise TreeError(
                    f"unsharded(): {self._paths[i]!r} is now a {got}, expected shape {list(full[path].shape)}. Remove, reshape "
                    "and parametrize parameters before shard_module()."
                )
            yield path, mine

    def exchange_tensors(self, tensors: Sequence[Any]) -> list[Any]:
        """Put ``tensors``, one for each leaf, into the entries. Return the tensors that were there."""
        before = list(tensors)
        for i, parameters, name in self._entries:
            before[i] = parameters.get(name)
            parameters[name] = self._present[id(parameters), name] = tensors[i]
        for reference in self._with_flat_weights:
            owner: Any = reference()
            owner.__dict__["_flat_weights"] = [getattr(owner, name, None) for name in owner._flat_weights_names]
        return before


def checked_current_tensors(entries: Iterable[ParameterEntries], full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the present tensors of ``entries``, by path. TreeError if a caller has reshaped, tied or untied parameters."""
    found, path_at = dict[str, torch.Tensor](), dict[int, str]()
    for path, mine in chain.from_iterable(each.iter_current_tensors(full) for each in entries):
        other = path_at.setdefault(mine.data_ptr(), path) if mine.numel() else path
        if other != path or found.setdefault(path, mine).data_ptr() != mine.data_ptr():
            change = f"shares memory with {other!r}" if other != path else "is not tied as before"
            raise TreeError(f"unsharded(): {path!r} {change}. Tie and untie before shard_module(); write values by copy_().")
    return found


@contextmanager
def replacing_buffers_by_copies(root: nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Replace all buffers (``register_buffer``) of a module by copies in this context. Yield pairs of a buffer and its copy."""
    before = [(module, dict(module._buffers)) for module in root.modules() if module._buffers]
    copies = {id(b): (b, b.clone()) for _, buffers in before for b in buffers.values() if b is not None}
    try:
        for module, buffers in before:
            module._buffers.update({name: b if b is None else copies[id(b)][1] for name, b in buffers.items()})
        yield list(copies.values())
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


def check_no_added_parameters(module: nn.Module, path: str) -> None:
    """Raise a TreeError if ``module``, at ``path``, or a submodule gathered with it has an unsharded parameter to train."""
    modules = [module]
    for each in modules:
        for parameter in each._parameters.values():
            if parameter is None or isinstance(parameter, ShardedParameter):
                continue
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad:  # in a call full parameters are plain tensors
                name = next(name for name, found in module.named_parameters(path) if found is parameter)
                raise TreeError(
                    f"parameter {name!r} came into the module after shard_module(), and has no gradient and no optimizer "
                    "state: it would not be trained. Add the parameter before shard_module(); or freeze it by "
                    "requires_grad_(False), and each rank uses its own values."
                )
        for child in each._modules.values():
            if child is not None and "_fsharp_own" not in child.__dict__:  # else the child is gathered by itself
                modules.append(child)


class ParameterSource:
    """Parameters with which modules are called. ``nodes``: a unit's Sharded, by name. ``comm``: the Comm that gathers these."""

    def __init__(self, tree: Any, comm: Comm) -> None:
        self.nodes, self.comm = units_by_name(tree), comm


class GatheredModule(NamedTuple):
    """The root module, or a module that is gathered by itself, with its units and their entries.

    ``ties``: other units, which store tied leaves of this module's units. ``has_inner_modules``: whether inner modules are
    gathered by themselves. ``has_varying_units``: whether a unit varies along an axis. Then a backward also reaches unused
    parameters: a rank without tokens for its expert joins the collectives.
    """

    units: Sequence[str]
    entries: Sequence[ParameterEntries]
    ties: Sequence[str]
    side_outputs: SideOutputFinder
    has_inner_modules: bool
    has_varying_units: bool


class SharedCallState:
    """State that all calls of a module share: parameter entries, DTensor specs, units by module path, source in use."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        chosen: Sequence[str],
        specs: Mapping[str, DTensorSpec],
        paused: Collection[str],
    ) -> None:
        self.dtensor_specs, self.paused = specs, paused
        present: dict[tuple[int, str], Any] = {}
        self.entries = {unit.name: ParameterEntries(module, unit, present) for unit in layout.units}
        by_path = gathered_units_by_module(layout, chosen)
        members: dict[str, list[nn.Module]] = {path: [] for path in by_path}
        for path, each in module.named_modules():
            members[innermost_prefix(path, by_path) or ""].append(each)
        has_inner_modules = set(parents_of_all_prefixes(by_path).values())
        self.units_by_module_path = {
            path: GatheredModule(
                units=names,
                entries=[self.entries[name] for name in names],
                ties=sorted({tied for name in names for tied in layout[name].tie_owner_unit_names} - set(names)),
                side_outputs=SideOutputFinder(members[path]),
                has_inner_modules=path in has_inner_modules,
                has_varying_units=any(layout[name].strategy.full.varying_axes for name in names),
            )
            for path, names in by_path.items()
        }
        self.source: ParameterSource | None = None
        self._functional_calls: list[tuple[range, weakref.ref[ParameterSource]]] = []  # each with autograd's sequence numbers

    @contextmanager
    def reading_from(
        self,
        source: ParameterSource | None,
        entries: Sequence[ParameterEntries] = (),
        parameters: Sequence[Sequence[Any]] = (),
        *,
        module: nn.Module | None = None,
    ) -> Iterator[None]:
        """Let modules read their parameters from ``source``, or from ``parameters``, in this context.

        For each unit ``entries`` says where modules hold its parameters, and ``parameters`` has the tensors to put there, in
        the order of the unit's leaves. The units of ``module`` are gathered already, so methods of ``module`` gather nothing.
        """
        before, self.source = self.source, source
        replaced_tensors = list(map(ParameterEntries.exchange_tensors, entries, parameters))
        if module is not None:
            module.__dict__["_fsharp_computes"] = True
        try:
            yield
        finally:
            if module is not None:
                module.__dict__["_fsharp_computes"] = False
            for of_unit, tensors in zip(reversed(entries), reversed(replaced_tensors), strict=True):
                of_unit.exchange_tensors(tensors)
            self.source = before

    def record_functional_call(self, source: ParameterSource, first_sequence_nr: int, out: Any) -> None:
        """Record a functional call, which has made autograd nodes from ``first_sequence_nr`` on, and returned ``out``.

        The autograd graph of the call keeps ``source`` alive until the backward.
        """
        numbers = range(first_sequence_nr, torch._C._autograd._get_sequence_nr())
        nodes: list[Any] = [x.grad_fn for x in tensors_in(out) if x.grad_fn is not None]
        made = [node for node in nodes if node._sequence_nr() in numbers]
        for node in made:
            node.metadata[id(self)] = source
        alive = [each for each in self._functional_calls if each[1]() is not None]
        self._functional_calls = [*alive, (numbers, weakref.ref(source))] if made else alive

    def source_of_running_node(self) -> ParameterSource | None:
        """Return the parameters of the ``model.functional()`` call that made the running autograd node; None if no call did.

        Modules that ``torch.utils.checkpoint`` calls again use these. ScheduleError if several threads made functional calls.
        """
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        alive = [source for numbers, ref in self._functional_calls if number in numbers and (source := ref()) is not None]
        if len(alive) > 1:  # autograd numbers the nodes of each thread from zero
            raise ScheduleError(
                "a checkpoint computes a module again, which several threads have called by functions of model.functional(). "
                "Call these functions in one thread."
            )
        return alive[0] if alive else None


class ModuleCall:
    """One call of ``fn``, a method of the module at ``path``, with the module's units gathered."""

    def __init__(
        self, calls: SharedCallState, module: nn.Module, path: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> None:
        self.calls, self.module, self.path, self.fn, self.args, self.kwargs = calls, module, path, fn, args, kwargs
        self.gathered = calls.units_by_module_path[path]
        self.out: Any = None  # the result of fn
        self._given_away: list[torch.Tensor] = []
        self._arguments = self.flat = [*args, *kwargs.values()]
        for x in self._arguments:
            if not isinstance(x, torch.Tensor) and type(x) not in _PYTREE_LEAF_TYPES:
                self.flat = torch_pytree.tree_leaves((args, kwargs))
                break

    @disable_compile
    def compute_with_param_trees(self, source: ParameterSource, trees: list[Any], *_: Any) -> list[torch.Tensor]:
        """Call :meth:`compute` for ``fs.forward``, which passes ``trees``: for each unit a tree of its full parameters."""
        return self.compute(source, list(map(optree.tree_leaves, trees)))

    @disable_compile
    def compute(self, source: ParameterSource, full: list[list[torch.Tensor]], *_: Any) -> list[torch.Tensor]:
        """Call ``fn`` with ``full``, leaves by unit, as parameters. Return the tensors in its result, then its side outputs."""
        calls, path, gathered, passed = self.calls, self.path, self.gathered, self._arguments
        before = gathered.side_outputs.stored_tensors_by_id(passed)
        if calls.paused:
            rows = [zip(each.stored, leaves, strict=True) for each, leaves in zip(gathered.entries, full, strict=True)]
            full = [[x.detach() if stored in calls.paused else x for stored, x in row] for row in rows]
        shown: list[list[Any]] = full
        if specs := calls.dtensor_specs:
            shown = [as_dtensors(each.stored, leaves, specs) for each, leaves in zip(gathered.entries, full, strict=True)]
        fused = [(each.stored[i], row[i]) for each, row in zip(gathered.entries, shown, strict=True) for i in each.fused]
        with lending_gradient_memory(fused), calls.reading_from(source, gathered.entries, shown, module=self.module):
            out = call_compiled_like_caller(self.fn, *self.args, **self.kwargs)
        parameters = list(chain.from_iterable(full))
        found = tensors_in(out, path)
        if views := views_of_parameters(parameters, found):  # parameters are released, so their views leave as copies
            out = replace_tensors_in_place(out, views, [unaliased_clone(x) for x in views], path)
            found = tensors_in(out)
        self.out = out
        side = gathered.side_outputs.new_side_outputs(before, passed, parameters, path)
        found += [x for x in side if not any(x is y for y in found)]
        self._given_away = found
        return connect_to_inputs(found, [*self.flat, *parameters]) if gathered.has_varying_units else found

    def result_with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result of ``fn``, with ``tensors`` in place of the tensors that :meth:`compute` returned."""
        if all(map(is_, tensors, self._given_away)):
            return self.out
        self.gathered.side_outputs.replace_stored(self._arguments, self._given_away, tensors, self.path)
        return replace_tensors_in_place(self.out, self._given_away, tensors, self.path)
