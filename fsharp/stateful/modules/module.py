"""ShardedModule: an nn.Module whose parameters, gradients and optimizer state are sharded, in place."""

import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from typing import Any

import optree
import torch
from torch import nn

from fsharp.errors import LayoutError, ScheduleError, TreeError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.layout import Layout
from fsharp.functional.state import TrainState
from fsharp.stateful.modules.calls import ParameterSource, own_buffers
from fsharp.stateful.modules.parameter import Part
from fsharp.stateful.modules.session import Session
from fsharp.stateful.modules.state_dict import gather_to_rank, load_parts, refuse_dtensors, scatter_from_rank
from fsharp.stateful.runtime.scheduled import Scheduled
from fsharp.torch_compile import uncompiled
from fsharp.tracebacks import api_boundary, api_context


class ShardedModule(nn.Module):
    """A module, trained in parts: what :func:`~fsharp.shard_module` has made of one.

    It keeps its class, its attributes, methods and hooks, its buffers, and the names of its parameters, and has these methods
    besides. Parameters are this rank's parts (:class:`~fsharp.modules.ShardedParameter`), in the optimizer's dtype and place.
    They are whole inside of the forward of their unit's module. All ranks call the same methods in the same order.
    """

    @api_boundary
    def __new__(cls, *args: Any, **options: Any) -> "ShardedModule":
        """Refuse to make one: it is another class of a module that there is."""
        raise TreeError(f"{cls.__name__}(): a sharded module is made by fs.shard_module(module, ...), and not copied.")

    # ------------------------------------------------------------ training

    @api_context
    def accumulate(self) -> Iterator[None]:
        """Have backward passes in this context leave gradients where they rest. The first one outside takes all on.

        Gradients add up: divide losses by their number, as everywhere in torch. What is accumulated is not in ``.grad`` yet.
        """
        with _session(self).step.accumulating():
            yield

    @uncompiled
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Scale gradients such that their norm over all ranks is at most ``max_norm``. Return the norm before, on every rank.

        Arguments are those of ``torch.nn.utils.clip_grad_norm_``, which does the same, parameter by parameter; ``foreach`` is
        ignored.

        Raises:
            ScheduleError: there are no gradients.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is True; on all ranks.

        Cost: one small collective for each axis.
        """
        session = _session(self)
        if session.step.means.tree is None:
            raise ScheduleError("clip_grad_norm_(): there are no gradients: call it after a backward that does not accumulate.")
        norm_type = float(norm_type)
        norm = session.step.means.norm(norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_(): the norm of order {norm_type} of the gradients is {float(norm)}, so that gradients cannot "
                "be clipped. Leave out error_if_nonfinite=True to scale gradients all the same."
            )
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        session.step.means.each(lambda buffer: buffer.mul_(scale))
        session.step.means.edits.append(f"clip {max_norm!r} {norm_type!r}")
        return norm

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters. A forward whose backward is to come stays. Refuse ``set_to_none=False``."""
        _session(self).step.discard(set_to_none=set_to_none)

    # ------------------------------------------------------------ crossing over

    def functional(self) -> tuple[Callable[..., Any], Any]:
        """Return this module as a pure function ``fn(params, *args, comm=..., **kwargs)``, and its parameters.

        ``params`` is the tree of :class:`~fsharp.Sharded` that the module itself has, along the dots of the parameters' names:
        nothing is copied. ``fn`` may be differentiated, scheduled, or transformed by torch.func, and takes any tree of this
        layout. Buffers are constants: what a forward writes to them is discarded.
        """
        session = _session(self)

        @api_boundary
        def fn(params: Any, *args: Any, comm: Comm, **kwargs: Any) -> Any:
            with session.calls.reading(ParameterSource(params, comm)), own_buffers(self):
                return self(*args, **kwargs)

        return fn, session.kept.state.params

    @property
    @api_boundary
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
    @api_boundary
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
        return _session(self).step.scheduled

    # ------------------------------------------------------------ whole parameters

    @api_context
    def unsharded(self, *, write: bool = False) -> Iterator[None]:
        """Have parameters whole in this context, in the optimizer's dtype; frozen ones as they rest. Every rank enters it.

        A forward without a backward so far, such as one for a metric, is given up: its graph can no longer run backward.
        ``write`` keeps what is written to parameters; every rank has to write the same. Cost: a gather of everything, and its
        memory.
        """
        session = _session(self)
        if write and session.is_averaged:
            raise ScheduleError("unsharded(write=True): in averaged(), which ends with what the parameters were before.")
        _warn_of_rounding("unsharded()", session, {path for path, _ in self.named_parameters(remove_duplicate=False)})
        session.kept.take_writes()
        nodes = [session.kept.whole(unit.name, session.scheduler.comparing) for unit in session.layout.units]
        trees = [optree.tree_leaves(node.tree(nodes)) for node in nodes]
        shown = session.calls.shown([node.name for node in nodes], trees)
        whole = {
            path: nn.Parameter(leaf.detach(), leaf.is_floating_point())
            for unit, leaves in zip(session.layout.units, shown, strict=True)
            for path, leaf in zip(map(unit.stored_path, unit.leaves), leaves, strict=True)
        }
        with session.swapped_in([node.name for node in nodes], session.seated(whole)):
            yield
            _refuse_hooks(whole)
            if write:
                with torch.no_grad():
                    for node, leaves in zip(nodes, trees, strict=True):
                        session.calls.take_over(node.name, leaves)
        if write:
            session.write(nodes)

    @api_boundary
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return by torch's names a :class:`~fsharp.modules.Part` of each parameter in the module's own memory, and buffers.

        A parameter with several names has one Part. Trained ones are in the optimizer's dtype and place, frozen ones as they
        rest. A part says which elements it is, so that another mesh can read what all ranks have saved. Inside of
        :meth:`unsharded` parameters are whole tensors. Parameters that are DTensors sharded on other axes are refused.
        """
        if _session(self).is_unsharded:
            return super().state_dict(*args, **kwargs)
        refuse_dtensors("state_dict()", _session(self))
        found, parts = super().state_dict(*args, **kwargs), dict[str, Part]()
        for name, value in found.items():
            if isinstance(value, Part):
                found[name] = parts.setdefault(value.path, value)
        return found

    @api_boundary
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy values into parameters and buffers; every rank calls it. Return what torch returns.

        Args:
            state_dict: by torch's names, what :meth:`state_dict` gave on this rank of this layout, or whole tensors, of which
                each rank takes its part: in the dtype that the parameter has here, or had before :func:`~fsharp.shard_module`.
            strict: refuse names that are missing, or that are not known.
            assign: inside of :meth:`unsharded` alone, where all is as in torch.

        Raises:
            TreeError: other names, shapes or dtypes, parts of another rank or layout, DTensors. On all ranks, before anything
                but a module's extra state is changed.
            AgreementError: on all ranks, if one has other values of what they have in common.
            ScheduleError: a step is under way, or averages are in place of the parameters.

        Cost: a pass over what several ranks hold, to compare it by 8 bytes, and a gather from where the optimizer has
        parameters to where they rest. Memory: the resting parameters of one unit.
        """
        session = _session(self)
        load = partial(super().load_state_dict, state_dict, strict=strict, assign=assign)
        if session.is_unsharded:
            return load()
        if assign:
            raise TreeError(
                "load_state_dict(assign=True): parameters of a ShardedModule rest in memory of its own. Leave out assign, or "
                "load whole parameters in `with model.unsharded(write=True):`."
            )
        return load_parts(session, self, load)

    @api_boundary
    def full_state_dict(self, *, rank: int | None = 0) -> dict[str, Any]:
        """Return whole parameters and buffers in host memory, by torch's names, on one rank; an empty dict on all others.

        ::

            state = model.full_state_dict()  # every rank calls it
            if model.comm.rank == 0:
                torch.save(state, "model.pt")

        Trained parameters are in the optimizer's dtype, frozen ones in the dtype in which they rest. Buffers are that rank's.
        ``rank`` is one of :attr:`comm`; None means all.

        Raises:
            MeshError: no such rank.
            TreeError: parameters that have different values on each rank, such as experts. On all ranks.
            ScheduleError: inside of :meth:`unsharded`, where :meth:`state_dict` is whole.
            AgreementError: on all ranks, if they pass different values of ``rank``.

        Cost: a gather of all units. Memory: one full unit, and on that rank the whole state dict in host memory.
        """
        where, session = "full_state_dict()", _session(self)
        if session.is_unsharded:
            raise ScheduleError(f"{where}: inside of unsharded(). Call it outside, or take state_dict(), which is whole here.")
        found: dict[str, Any] = super().state_dict()
        return found if gather_to_rank(where, [found], rank, session.scheduler.comparing, specs=session.calls.specs) else {}

    @api_boundary
    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None, *, rank: int = 0, strict: bool = True) -> Any:
        """Copy one rank's whole tensors into the parameters and buffers of all ranks. Return what load_state_dict does.

        ::

            state = torch.load("model.pt", weights_only=True, mmap=True) if model.comm.rank == 0 else None
            model.load_full_state_dict(state)  # every rank calls it

        Args:
            state_dict: on that rank, tensors by torch's names, in the dtypes that :meth:`load_state_dict` takes; None on all
                others.
            rank: rank of :attr:`comm` that has the state dict.
            strict: refuse missing and unknown names.

        Raises:
            MeshError: no such rank.
            TreeError: another rank passes a state dict too, or ``rank`` passes none; and, like ScheduleError, as
                :meth:`load_state_dict`. On all ranks.
            AgreementError: on the other ranks, if a single rank has raised an error.

        Cost: two ``all_reduce`` of each tensor's bytes along each axis. Memory: a copy of this rank's parts, and one tensor.
        """
        where, parts = "load_full_state_dict()", self.state_dict()

        def like(keys: tuple[str, ...]) -> Part | None:
            part = parts.get(keys[0])
            return part if len(keys) == 1 and isinstance(part, Part) else None

        return self.load_state_dict(scatter_from_rank(where, state_dict, rank, _session(self).scheduler, like), strict)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Refuse functions of torch.distributed.checkpoint.state_dict, which call this method of every module."""
        raise TreeError(
            "torch.distributed.checkpoint.state_dict: get_state_dict() and similar functions do not know a ShardedModule. "
            "dcp.save() and dcp.load() take {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}. "
            "model.full_state_dict() gives whole tensors on one rank, and model.load_full_state_dict() loads them."
        )

    @api_boundary
    def full_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names of ``named_parameters()`` and whole parameters, a unit at a time. Every rank iterates to the end.

        Parameters are in the optimizer's dtype. Frozen ones are as they rest, in ``precision.compute``; a warning says if they
        are rounded. With ``trained``, only those that are trained, such as adapters on a frozen model: nothing else is
        gathered. Memory: one unit. What it yields may be kept.
        """
        session = _session(self)
        names = {id(p): name for name, p in self.named_parameters()}
        chosen = ((path, p) for path, p in session.parameters.items() if p.is_trained or not trained)
        present = {path: names[id(p)] for path, p in chosen if id(p) in names}
        _warn_of_rounding("full_parameters()", session, present)
        session.kept.take_writes()
        for unit in session.layout.units:
            shown = [leaf for leaf in unit.leaves if leaf.tied_to is None and unit.full_path(leaf) in present]
            buffers = session.kept.gathered(unit.name, sorted({leaf.group for leaf in shown}), session.scheduler.comparing)
            for leaf in shown:
                path = unit.full_path(leaf)
                value = buffers[leaf.group][leaf.offset : leaf.offset + leaf.numel].view(leaf.shape).clone()
                spec = session.calls.specs.get(path)
                yield present[path], value if spec is None else spec.whole(value).full_tensor()


def _session(module: nn.Module) -> Session:
    session: Session = module.__dict__["_fsharp"][0]
    return session


def _refuse_hooks(whole: Mapping[str, nn.Parameter]) -> None:
    """Refuse hooks on the whole parameters of ``unsharded()``, which are gone with it."""
    for path, parameter in whole.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise LayoutError(
                f"unsharded(): a hook was registered on parameter {path!r}, which is another tensor outside. Call "
                "register_post_accumulate_grad_hook() outside of unsharded()."
            )


def _warn_of_rounding(where: str, session: Session, names: Container[str]) -> None:
    """Of frozen parameters there is no copy in another dtype than that in which they are used."""
    rounded = [
        (path, dtype_name(p.leaf.dtype), dtype_name(p.dtype))
        for path, p in session.parameters.items()
        if not p.is_trained and path in names and torch.promote_types(p.leaf.dtype, p.dtype) != p.dtype
    ]
    if rounded:
        path, given, kept = rounded[0]
        warnings.warn(
            f"{where}: {len(rounded)} frozen parameters such as {path!r} were {given}, and rest in {kept}, as "
            f"Precision(compute=torch.{kept}) says: here they are rounded. Take them from where they were loaded, "
            "and full_parameters(trained=True) for the others; or use torch.autocast() instead of a lower dtype.",
            stacklevel=4,
        )
