"""ShardedModule: an nn.Module whose parameters, gradients and optimizer state are sharded, in place."""

import os
import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsharp.errors import MeshError, ScheduleError, TreeError
from fsharp.functional.comm.process_group import ProcessGroupComm, connect
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.functionalize import parameter_tree
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.paths import Patterns
from fsharp.functional.layout.placement import Strategy, zero3
from fsharp.functional.layout.plan import plan
from fsharp.functional.layout.precision import Precision, dtype_name
from fsharp.functional.layout.unit_layout import Leaf, UnitLayout
from fsharp.functional.optim.base import Transform
from fsharp.functional.state import TrainState, init_state
from fsharp.stateful.modules.calls import Source
from fsharp.stateful.modules.entries import enter_by, entries_of
from fsharp.stateful.modules.initial.dtensors import local, specs_of
from fsharp.stateful.modules.initial.initial import initial_values
from fsharp.stateful.modules.left import refuse_kept
from fsharp.stateful.modules.parameter import ShardedParameter
from fsharp.stateful.modules.seats import Units, chosen_modules, leafmost
from fsharp.stateful.modules.session import Session
from fsharp.stateful.modules.stale import refuse_stale_optimizers
from fsharp.stateful.runtime.scheduled import Scheduled
from fsharp.stateful.runtime.scheduler import Scheduler
from fsharp.stateful.schedule.policy import Policy

_NOTHING = Transform(lambda params: None, lambda grads, state, params, *, comm: (grads, state), {})


class ShardedModule(nn.Module):
    """A module, trained in parts.

    The module itself is changed in place and returned: it keeps its class, its attributes, methods and hooks, its buffers,
    and the names of its parameters.

    ::

        model = fs.ShardedModule(model, strategy=fs.zero3("dp"), units=[Block])
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    Parameters are this rank's parts (:class:`~fsharp.ShardedParameter`), in the optimizer's dtype and place; inside of the
    forward of the module that they are gathered with they are whole. All ranks call the same in the same order.

    Args:
        module: with the same values on every rank, or on the meta device. Tied and frozen parameters stay so.
        mesh: the ranks: a DeviceMesh with named dims, a :class:`~fsharp.Mesh` that all processes form, or a
            :class:`~fsharp.Comm`; None means all processes, along one axis ``"dp"``. Parameters that are DTensors, as
            ``parallelize_module`` makes them, are sharded on top: over the axes that theirs are not, ``device_mesh["dp"]``.
        strategy: where state rests, or strategies by pattern of paths, the last that matches counting; None means ZeRO-3
            over all axes. ``{"**": zero3("dp", "ep"), "**.experts": zero3("dp").varying("ep")}`` is for a module of which
            each rank along ``"ep"`` has experts of its own.
        units: modules that are gathered by themselves when they are called: classes, patterns of paths (``"layers.*"``),
            predicates on path and module, or several of these. They may nest; what is in none of them is gathered with the
            root. None gathers everything with the root.
        precision: dtypes. Floating-point inputs are cast to ``precision.compute``, if it has one.
        policy: of the scheduler.
        methods: names of other methods than ``forward``, of the root or of chosen modules, that parameters are gathered for:
            entry points such as ``"encode"``. Those that only call modules, as ``generate`` calls the root, need not be named.
            Call them under ``torch.no_grad()``, as forwards, if no backward will come.
        key: seed for what is on the meta device, which submodules make one after another by their own
            ``reset_parameters()``, buffers included: the same values on any mesh.
        initialize: called for each submodule with parameters or buffers of its own on the meta device, instead of its
            ``reset_parameters()``, to fill these; of a model of transformers, ``model._init_weights``.
        sync_from: take this rank's parameters and buffers, to the bit, instead of each rank's own; the others' may be on the
            meta device. None compares parameters, and refuses those that differ.
        plan_options: ``atoms`` and ``labels``, as :func:`~fsharp.plan` takes them; labels by default ``"default"``.

    Raises:
        PatternError: units that match no module, methods that none of these has.
        TreeError: a module without parameters, or with complex ones to be trained; tensors on the meta device that nothing
            initializes.
        MeshError: a mesh without this process, or one that parameters are distributed over already.
        AgreementError: on all ranks, if they differ in module, units, strategy or precision, or in the values of parameters.

    Cost: this rank's parts, and the parameters of one submodule in full while it is made from the meta device.
    One pass over all parameters compares them, by 8 bytes; ``sync_from`` sends them all, and holds one unit in full.
    """

    def __new__(
        cls,
        module: nn.Module,
        *,
        mesh: DeviceMesh | Mesh | Comm | None = None,
        strategy: Strategy | Mapping[str, Strategy] | None = None,
        units: Units | Sequence[Units] | None = None,
        precision: Precision = Precision(),
        policy: Policy | None = None,
        methods: str | Sequence[str] = (),
        key: int = 0,
        initialize: Callable[[nn.Module], None] | None = None,
        sync_from: int | None = None,
        **plan_options: Any,
    ) -> "ShardedModule":
        """Wrap the module in place: what is returned is the module that was passed."""
        if cls is not ShardedModule:
            raise TreeError(f"{cls.__name__}: a sharded module is made by ShardedModule(module, ...), and not copied.")
        _check_module(module)
        refuse_kept(module)
        comm = _comm(mesh)
        specs = specs_of(module, comm)
        whole: Any = parameter_tree("ShardedModule()", module)
        tree = optree.tree_map(local, whole)
        del whole
        before = [weakref.ref(parameter) for parameter in module.parameters()]
        chosen = chosen_modules(module, units) if units is not None else {}
        entries = entries_of(module, chosen, methods)
        trained = {path for path, each in module.named_parameters(remove_duplicate=False) if each.requires_grad}
        frozen: Patterns = lambda path: path not in trained  # noqa: E731
        where, named = strategy or zero3(*comm.mesh.names), leafmost(chosen) or None
        layout = plan(tree, comm.mesh, where, units=named, frozen=frozen, precision=precision, **plan_options)
        start = initial_values(module, tree, layout, comm, key=key, initialize=initialize, sync_from=sync_from)
        state = init_state(_NOTHING, start, comm=comm, donate=True)
        del tree, start
        scheduler = Scheduler(comm, policy=policy)
        session = Session(module, layout, list(chosen), state, scheduler, input_dtype=precision.compute, specs=specs)
        session.show()
        for path in session.calls.owners:
            each = module.get_submodule(path)
            each.__dict__["_fsharp"] = (session, path)
            enter_by(each, entries[path], *([ShardedModule] if not path else []))
        refuse_stale_optimizers(before)
        assert isinstance(module, ShardedModule)
        return module

    def __init__(self, *args: Any, **options: Any) -> None:
        """All is done by then: the module has been made long ago."""

    # ------------------------------------------------------------ training

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this context leave gradients where they rest; the first one outside takes all to the optimizer.

        Gradients add up: divide losses by their number, as everywhere in torch. What is accumulated is not in ``.grad`` yet.
        """
        session = _session(self)
        before, session.is_accumulating = session.is_accumulating, True
        try:
            yield
        finally:
            session.is_accumulating = before

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients such that their 2-norm over all ranks is at most ``max_norm``; the norm before, on every rank.

        Raises:
            ScheduleError: there are no gradients.

        Cost: one small ``all_reduce`` for each axis.
        """
        session = _session(self)
        if session.means.tree is None:
            raise ScheduleError("clip_grad_norm_(): there are no gradients: call it after a backward that does not accumulate.")
        norm = session.means.norm()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        session.means.each(lambda buffer: buffer.mul_(scale))
        session.means.said.append(f"clip {max_norm!r}")
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. A step of the optimizer has done so already.

        Raises:
            ScheduleError: ``set_to_none=False``: there is no zero gradient that would be kept.
        """
        _session(self).discard(set_to_none=set_to_none)

    # ------------------------------------------------------------ crossing over

    def functional(self) -> tuple[Callable[..., Any], Any]:
        """``(fn, params)``: this module as a pure function ``fn(params, *args, comm=..., **kwargs)``, and its parameters.

        ``params`` is the tree of :class:`~fsharp.Sharded` that the module itself has, along the dots of the parameters' names:
        nothing is copied. ``fn`` may be differentiated, scheduled, or transformed by torch.func, and takes any tree of this
        layout. Buffers are constants: what a forward writes to them is discarded. :attr:`train_state` has main copies as well,
        and brings a state back.
        """
        session = _session(self)

        def fn(params: Any, *args: Any, comm: Comm, **kwargs: Any) -> Any:
            with session.calls.reading(Source(params, comm)), _own_buffers(self):
                return self(*args, **kwargs)

        return fn, session.kept.state.params

    @property
    def train_state(self) -> TrainState:
        """What is trained: parameters, main copies, the state of an ``(init, update)`` pair. Set it to come back.

        ``fs.update(tx, grads, model.train_state, ...)`` and ``model.train_state = state`` cross over and back, both without a
        copy: whoever updates a state that the module has with ``donate`` gives it back before the module is called again.

        Raises:
            TreeError: set to a state of another layout, place or dtype.
            ScheduleError: set while a step is under way.
        """
        return _session(self).kept.state

    @train_state.setter
    def train_state(self, state: TrainState) -> None:
        session = _session(self)
        session.adopt(state)

    @property
    def layout(self) -> Layout:
        """Which element of which parameter rests on which rank."""
        return _session(self).layout

    @property
    def comm(self) -> Comm:
        """The Comm of the ranks that it is sharded over."""
        return _session(self).scheduler.comm

    @property
    def step(self) -> Scheduled:
        """The training step, once there was one: ``model.step.schedule``, ``model.step.trace()``."""
        return _session(self).schedule

    # ------------------------------------------------------------ whole parameters

    @contextmanager
    def summon(self, *, write: bool = False) -> Iterator[None]:
        """Parameters are whole in this context, in the optimizer's dtype; frozen ones as they rest. Every rank has to enter it.

        A forward whose backward has not come is given up: it may have been for a metric.

        Args:
            write: keep what is written to them; every rank has to write the same.

        Cost: a gather of everything, and the memory for it.
        """
        session = _session(self)
        if write and session.is_averaged:
            raise ScheduleError("summon(write=True): in averaged(), which ends with what the parameters were before.")
        _warn_of_rounding("summon()", session, {path for path, _ in self.named_parameters(remove_duplicate=False)})
        nodes = [session.kept.whole(unit.name) for unit in session.layout.units]
        trees = [optree.tree_leaves(node.tree(nodes)) for node in nodes]
        shown = [session.calls.dressed(node.name, tree) for node, tree in zip(nodes, trees, strict=True)]
        whole = [[nn.Parameter(leaf.detach(), leaf.is_floating_point()) for leaf in leaves] for leaves in shown]
        with session.seated([node.name for node in nodes], whole):
            yield
            if write:
                with torch.no_grad():
                    for node, leaves in zip(nodes, trees, strict=True):
                        session.calls.take_over(node.name, leaves)
        if write:
            session.write(nodes)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of whole parameters, inside of :meth:`summon` alone: a part is of no use to another mesh."""
        if not _session(self).is_summoned:
            raise ScheduleError("state_dict(): call it in `with model.summon():`, or save what full_parameters() yields.")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of whole parameters, inside of ``summon(write=True)`` alone."""
        if not _session(self).is_summoned:
            raise ScheduleError("load_state_dict(): call it in `with model.summon(write=True):`.")
        return super().load_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TreeError("a ShardedModule cannot be pickled or copied; functional() and full_parameters() give its values.")

    def full_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole parameters, a unit at a time. Every rank has to iterate to the end.

        In the optimizer's dtype. Frozen ones are as they rest, in ``precision.compute``; a warning says if they are rounded.

        Args:
            trained: only those that are trained, such as adapters on a frozen model: nothing else is gathered.

        Memory: one unit. What it yields may be kept.
        """
        session = _session(self)
        names = {name for name, p in self.named_parameters() if p.requires_grad or not trained}
        _warn_of_rounding("full_parameters()", session, names)
        for unit in session.layout.units:
            owned = {leaf: _owner(session.layout, unit, leaf) for leaf in unit.leaves if unit.full_path(leaf) in names}
            buffers = {
                name: session.kept.gathered(name, sorted({leaf.group for each, leaf in owned.values() if each.name == name}))
                for name in dict.fromkeys(each.name for each, _ in owned.values())
            }
            for leaf, (owner, stored) in owned.items():
                buffer, path = buffers[owner.name][stored.group], unit.full_path(leaf)
                value = buffer[stored.offset : stored.offset + stored.numel].view(stored.shape).clone()
                yield path, session.calls.specs[path].whole(value).full_tensor() if path in session.calls.specs else value

    # ------------------------------------------------------------ what a sharded module cannot do

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        session = _session(self)
        for unit in session.layout.units:
            for group in unit.groups:
                probe = torch.empty(0, dtype=group.dtypes.main, device=session.scheduler.device)
                new = fn(probe)
                if (new.dtype, new.device) != (probe.dtype, probe.device):
                    raise TreeError(
                        f"a sharded module cannot be moved or cast: unit {unit.name!r} is {probe.dtype} on {probe.device}, "
                        f"asked for {new.dtype} on {new.device}. Do so before ShardedModule(), or pass precision."
                    )
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self


@contextmanager
def _own_buffers(root: nn.Module) -> Iterator[None]:
    """In this context all buffers are copies."""
    before = [(module, dict(module._buffers)) for module in root.modules() if module._buffers]
    try:
        for module, buffers in before:
            module._buffers.update({name: b if b is None else b.clone() for name, b in buffers.items()})
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


def _session(module: nn.Module) -> Session:
    session: Session = module.__dict__["_fsharp"][0]
    return session


def _check_module(module: nn.Module) -> None:
    for path, parameter in module.named_parameters():
        if isinstance(parameter, ShardedParameter):
            raise TreeError(
                f"ShardedModule(): parameter {path!r} is one of a ShardedModule already. Wrap the whole model once, and name "
                "the modules in it by units=."
            )
    added = [name for name in vars(ShardedModule) if not name.startswith("_") and not hasattr(nn.Module, name)]
    hidden = [name for name in added if hasattr(module, name)]
    for path, parameter in module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise TreeError(
                f"ShardedModule(): parameter {path!r} is {dtype_name(parameter.dtype)}, and only real ones can be trained. "
                "Make it a real one, nn.Parameter(torch.view_as_real(w)), of which the forward takes torch.view_as_complex(); "
                "or freeze it by requires_grad_(False)."
            )
    if hidden:
        raise TreeError(
            f"ShardedModule(): would hide {', '.join(hidden)} of {type(module).__name__}: rename what has this name."
        )


def _warn_of_rounding(where: str, session: Session, names: Container[str]) -> None:
    """Of frozen parameters there is no copy in another dtype than that in which they are used."""
    rounded = [
        (unit.full_path(leaf), dtype_name(leaf.dtype), dtype_name(unit.groups[leaf.group].dtypes.compute))
        for unit in session.layout.units
        for leaf in unit.leaves
        if leaf.tied_to is None and not unit.groups[leaf.group].trainable and unit.full_path(leaf) in names
        if torch.promote_types(leaf.dtype, unit.groups[leaf.group].dtypes.compute) != unit.groups[leaf.group].dtypes.compute
    ]
    if rounded:
        path, given, kept = rounded[0]
        warnings.warn(
            f"{where}: {len(rounded)} frozen parameters such as {path!r} were {given}, and rest in {kept}, as "
            f"Precision(compute=torch.{kept}) says: here they are rounded. Take them from where they were loaded, "
            "and full_parameters(trained=True) for the others; or use torch.autocast() instead of a lower dtype.",
            stacklevel=4,
        )


def _comm(mesh: DeviceMesh | Mesh | Comm | None) -> Comm:
    if isinstance(mesh, DeviceMesh):
        return ProcessGroupComm(mesh)
    if mesh is None:
        joined = torch.distributed.is_initialized()
        size = torch.distributed.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
        return connect(Mesh({"dp": size}))
    if isinstance(mesh, Mesh):
        return connect(mesh)
    if not isinstance(mesh, Comm):
        raise MeshError(f"ShardedModule(mesh=...): got {type(mesh).__name__}, expected a DeviceMesh, a Mesh or a Comm.")
    return mesh


def _owner(layout: Layout, unit: UnitLayout, leaf: Leaf) -> tuple[UnitLayout, Leaf]:
    """The leaf, and its unit, that stores a leaf."""
    if leaf.tied_to is None:
        return unit, leaf
    name, path = leaf.tied_to
    return layout[name], next(each for each in layout[name].leaves if each.path == path)
