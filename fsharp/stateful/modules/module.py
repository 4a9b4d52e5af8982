"""ShardedModule: an nn.Module whose parameters, gradients and optimizer state are sharded, in place."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fsharp.errors import LayoutError, ScheduleError, TreeError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.layout import Layout
from fsharp.functional.state import TrainState
from fsharp.stateful.modules.calls import ParameterSource, own_buffers
from fsharp.stateful.modules.initial.dtensors import dressed
from fsharp.stateful.modules.parameter import Part, ShardedParameter
from fsharp.stateful.modules.session import Session
from fsharp.stateful.modules.state_dict import gather_to_rank, load_parts, refuse_dtensors, scatter_from_rank, whole_tensors
from fsharp.stateful.runtime.scheduled import Scheduled
from fsharp.torch_compile import uncompiled
from fsharp.tracebacks import api_boundary, api_context


class ShardedModule(nn.Module):
    """A module, trained in parts: what :func:`~fsharp.shard_module` has made of one.

    The module keeps its class, attributes, methods, hooks, buffers, and names of parameters. Outside of forwards parameters are
    this rank's parts (:class:`~fsharp.modules.ShardedParameter`), in the optimizer's dtype and place. All ranks call the same
    methods in the same order.
    """

    @api_boundary
    def __new__(cls, *args: Any, **options: Any) -> "ShardedModule":
        """Refuse to make a module: ``fs.shard_module`` changes one that is there."""
        raise TreeError(f"{cls.__name__}(): a sharded module is made by fs.shard_module(module, ...), and not copied.")

    # ------------------------------------------------------------ training

    @api_context
    def accumulate(self) -> Iterator[None]:
        """Have backward passes in this context leave gradients where they rest. The first backward outside sums all over ranks.

        Gradients add up: divide losses by their number, as everywhere in torch. What is accumulated is not in ``.grad`` yet.
        """
        step = _session(self).step
        before, step.is_accumulating = step.is_accumulating, True
        try:
            yield
        finally:
            step.is_accumulating = before

    @uncompiled
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Scale gradients such that their norm over all ranks is at most ``max_norm``. Return the norm before, on every rank.

        Arguments are those of ``torch.nn.utils.clip_grad_norm_``, which does the same, parameter by parameter; ``foreach`` is
        ignored. Cost: one small collective for each axis.

        Raises:
            ScheduleError: there are no gradients.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is True; on all ranks.
        """
        means, norm_type = _session(self).step.means, float(norm_type)
        if means.tree is None:
            raise ScheduleError("clip_grad_norm_(): there are no gradients: call it after a backward that does not accumulate.")
        norm = means.norm(norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_(): the norm of order {norm_type} of the gradients is {float(norm)}, so that gradients cannot "
                "be clipped. Leave out error_if_nonfinite=True to scale gradients all the same."
            )
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        means.each(lambda buffer: buffer.mul_(scale))
        means.edits.append(f"clip {max_norm!r} {norm_type!r}")
        return norm

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters. A forward whose backward is to come stays. Refuse ``set_to_none=False``."""
        _session(self).step.discard(set_to_none=set_to_none)

    # ------------------------------------------------------------ crossing over

    def functional(self) -> tuple[Callable[..., Any], Any]:
        """Return this module as a pure function ``fn(params, *args, comm=..., **kwargs)``, and its parameters.

        ``params`` is the module's own tree of :class:`~fsharp.Sharded`, nested by the dots in the parameters' names: nothing is
        copied. ``fn`` takes any tree of this layout, and may be differentiated, scheduled, or transformed by torch.func. What a
        forward writes to buffers is discarded. ``fn`` is refused inside of a forward of this module.
        """
        session = _session(self)

        @api_boundary
        def fn(params: Any, *args: Any, comm: Comm, **kwargs: Any) -> Any:
            if session.calls.source is not None:
                raise ScheduleError("model.functional(): the function was called inside of a forward of its own module.")
            with session.calls.reading(ParameterSource.of(params, comm)), own_buffers(self):
                return self(*args, **kwargs)

        return fn, session.kept.state.params

    @property
    @api_boundary
    def train_state(self) -> TrainState:
        """Parameters, main copies, and the state of an ``(init, update)`` pair. It can be set, without a copy.

        Whoever updates this state with ``donate=True`` sets the new one before the module is called again.

        Raises:
            TreeError: set to a state of another layout, place or dtype.
            ScheduleError: set while a step is under way.
        """
        return _session(self).kept.state

    @train_state.setter
    @api_boundary
    def train_state(self, state: TrainState) -> None:
        _session(self).adopt(state)

    @property
    def layout(self) -> Layout:
        """Which element of which parameter rests on which rank."""
        return _session(self).layout

    @property
    def comm(self) -> Comm:
        """The Comm of the ranks that the module is sharded over."""
        return _session(self).scheduler.comm

    @property
    def step(self) -> Scheduled:
        """The training step: ``model.step.schedule``, ``model.step.trace()``."""
        return _session(self).step.scheduled

    # ------------------------------------------------------------ whole parameters

    @api_context
    def unsharded(self, *, write: bool = False) -> Iterator[None]:
        """Have parameters whole in this context, in the optimizer's dtype; frozen ones as they rest. Every rank enters it.

        Forwards without a backward so far are discarded: their graphs can no longer run backward. ``write`` keeps what is
        written to parameters; every rank has to write the same. Cost: a gather of everything, and its memory; with ``write`` a
        gather from the optimizer's place to the parameters' as well.
        """
        session = _session(self)
        if write and session.is_averaged:
            raise ScheduleError("unsharded(write=True): in averaged(), which ends with what the parameters were before.")
        _warn_of_rounding("unsharded()", session.parameters.values())
        session.step.abandon_forwards("unsharded()")
        session.kept.take_writes()
        parts = whole_tensors(session.parameters.values(), session.scheduler.comparing)
        full = {part.path: value for part, value in parts}
        shown = zip(full, dressed(full, full.values(), session.calls.specs), strict=True)
        parameters = {path: nn.Parameter(x.detach(), x.is_floating_point()) for path, x in shown}
        session.is_unsharded = True
        try:
            with session.swapped_in(parameters):
                yield
                _refuse_hooks(parameters)
                written = session.calls.written(full) if write else {}
        finally:
            session.is_unsharded = False
        if write:
            session.write({path: x.reshape(-1)[slice(*session.parameters[path].run)] for path, x in written.items()})
            session.kept.is_written = True

    @api_boundary
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return by torch's names a :class:`~fsharp.modules.Part` of each parameter in the module's own memory, and buffers.

        A part says which elements it is, so that another mesh can read what all ranks have saved. A parameter with several
        names has one Part. Inside of :meth:`unsharded` parameters are whole tensors. Refused are parameters that are DTensors
        sharded on other axes.
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

        Cost: a pass over what several ranks hold, and a gather from the optimizer's place to the parameters'. Memory: the
        resting parameters of one unit.
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

        Dtypes are those of :meth:`state_dict`. Buffers are that rank's. ``rank`` is one of :attr:`comm`; None means all.

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
        return found if gather_to_rank(where, [found], rank, session.scheduler.comparing) else {}

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
            TreeError: another rank passes a state dict too, or ``rank`` passes none. All else as :meth:`load_state_dict`.
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
        are rounded. With ``trained``, only those that are trained are gathered, such as adapters on a frozen model. Tensors may
        be kept. Memory: one unit.
        """
        session = _session(self)
        names = {id(p): name for name, p in self.named_parameters()}
        chosen = [p for p in session.parameters.values() if id(p) in names and (p.is_trained or not trained)]
        _warn_of_rounding("full_parameters()", chosen)
        session.kept.take_writes()
        for part, value in whole_tensors(chosen, session.scheduler.comparing):
            yield names[id(part)], value.clone() if part.spec is None else part.spec.whole(value).full_tensor()


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


def _warn_of_rounding(where: str, parameters: Iterable[ShardedParameter]) -> None:
    """Warn of frozen parameters that rest in a lower dtype than they had: there is no other copy of them."""
    kept = [p for p in parameters if not p.is_trained]
    if rounded := [p for p in kept if torch.promote_types(p.leaf.dtype, p.dtype) != p.dtype]:
        first, dtype = rounded[0], dtype_name(rounded[0].dtype)
        warnings.warn(
            f"{where}: {len(rounded)} frozen parameters such as {first.path!r} were {dtype_name(first.leaf.dtype)}, and rest "
            f"in {dtype}, as Precision(compute=torch.{dtype}) says: here they are rounded. Take them from where they were "
            "loaded, and full_parameters(trained=True) for the others; or use torch.autocast() instead of a lower dtype.",
            stacklevel=4,
        )
