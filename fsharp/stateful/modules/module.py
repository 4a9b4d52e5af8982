"""ShardedModule: an nn.Module whose parameters, gradients and optimizer state are sharded, in place."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fsharp.errors import LayoutError, OptionError, ScheduleError, TreeError
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import dtype_name
from fsharp.functional.layout.layout import Layout
from fsharp.functional.state import TrainState
from fsharp.stateful.modules.calls import ParameterSource, checked_current_tensors, replacing_buffers_by_copies
from fsharp.stateful.modules.parameter import ShardedParameter, ShardedTensor
from fsharp.stateful.modules.session import session_of_module
from fsharp.stateful.modules.state_dict import (
    check_no_dtensor_shards,
    gather_whole_tensors,
    load_state_dict_into_parts,
    make_parts_whole_,
    scatter_from_rank,
)
from fsharp.stateful.modules.torch_tools.dtensors import as_dtensors
from fsharp.stateful.runtime.scheduler import ScheduleHandle
from fsharp.torch_compile import disable_compile
from fsharp.tracebacks import api_boundary, api_context


class ShardedModule(nn.Module):
    """A module after :func:`~fsharp.shard_module`: parameters, gradients and optimizer state are sharded over ranks.

    The module stays an instance of its class, and keeps attributes, methods, hooks, buffers and names of parameters. Outside of
    forwards a parameter is this rank's part (:class:`~fsharp.modules.ShardedParameter`). A trained parameter is sharded as its
    optimizer state is, and has the optimizer's dtype. All ranks have to call the same methods in the same order.
    """

    @api_boundary
    def __new__(cls, *args: Any, **options: Any) -> "ShardedModule":
        """Raise an error: only ``fs.shard_module`` makes a ShardedModule, from a module that exists."""
        raise TreeError(f"{cls.__name__}(): only fs.shard_module() makes a sharded module. Slice or copy it before.")

    @api_context
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients in this context without the reduction to the optimizer's shards; like ``no_sync()`` of DDP.

        The first backward outside of the context adds its gradients. Then ``.grad`` has the mean over ranks of these sums. To
        read it earlier is an error. A sum is not divided by the number of backward passes: divide each loss by this number.
        Under strategies that shard gradients, such as ``zero2`` and ``zero3``, a backward in the context still sends gradients.
        """
        with session_of_module(self).step.accumulating():
            yield

    @disable_compile
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``. Return the norm before scaling, on every rank.

        Arguments are those of ``torch.nn.utils.clip_grad_norm_``; ``foreach`` is ignored. torch's function works as well, with
        equal results and more collectives. Cost: one small collective for each axis.

        Raises:
            OptionError: ``max_norm`` is negative or NaN.
            ScheduleError: there are no gradients.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is True. All ranks raise.
        """
        means, norm_type = session_of_module(self).step.means, float(norm_type)
        if not max_norm >= 0:
            raise OptionError(f"clip_grad_norm_(): max_norm is {max_norm!r}, expected a number of at least 0.")
        if means.tree is None:
            raise ScheduleError("clip_grad_norm_(): there are no gradients: call it after a backward that does not accumulate.")
        norm = means.norm(norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_(): the norm of order {norm_type} of the gradients is {float(norm)}, so that gradients cannot "
                "be clipped. Leave out error_if_nonfinite=True to scale gradients all the same."
            )
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        with torch.no_grad():
            for buffer in means.buffers:
                buffer.mul_(scale)
        means.edits.append(f"clip_grad_norm_({max_norm!r}, {norm_type!r})")
        return norm

    @disable_compile
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Release all gradients. A backward of an earlier forward still works. ScheduleError in a backward, or for False."""
        session_of_module(self).step.release_gradients(set_to_none=set_to_none)

    def functional(self) -> tuple[Callable[..., Any], Any]:
        """Return this module as a pure function ``fn(params, *args, comm=..., **kwargs)``, and its parameters ``params``.

        ``params`` is the module's own tree of :class:`~fsharp.Sharded`, without a copy; each dot in a parameter's name is a
        level of the tree. ``fn`` takes any tree of this layout, and can be scheduled, transformed by torch.func, or
        differentiated by :func:`~fsharp.value_and_grad`, not by ``backward()``. Writes to buffers in a forward are discarded. A
        checkpoint within a unit recomputes with the parameters of the same call. A forward of this module must not call ``fn``.
        """
        session = session_of_module(self)

        @api_boundary
        def fn(params: Any, *args: Any, comm: Comm, **kwargs: Any) -> Any:
            if session.is_in_forward:
                raise ScheduleError("model.functional(): the function was called inside of a forward of its own module.")
            source, first = ParameterSource(params, comm), torch._C._autograd._get_sequence_nr()
            if missing := [name or "(root)" for name in session.calls.entries.keys() - source.nodes.keys()]:
                raise TreeError(f"functional(): params lack unit {min(missing)!r}. Pass model.train_state.params or the like.")
            with session.calls.reading_from(source), replacing_buffers_by_copies(self):
                out = self(*args, **kwargs)
            session.calls.record_functional_call(source, first, out)
            return out

        return fn, self.train_state.params

    @property
    @api_boundary
    def train_state(self) -> TrainState:
        """Parameters, main copies, and optimizer state of an ``(init, update)`` pair. Setting this property copies nothing.

        After an update of this state with ``donate=True``, set the new state before the next call of the module. The first
        read after writes to parameters is a collective: all ranks have to read this property, or call :meth:`functional`.

        Raises:
            TreeError: the new state has another layout, place or dtype, or lacks residuals that this module needs.
            ScheduleError: the state is set while a step has gradients, or inside of ``averaged()`` or ``unsharded()``.
        """
        session_of_module(self).step.propagate_main_writes()
        return session_of_module(self).state.train_state

    @train_state.setter
    @disable_compile
    def train_state(self, state: TrainState) -> None:
        session_of_module(self).replace_state(state)

    @property
    def layout(self) -> Layout:
        """The layout: which element of which parameter rests on which rank."""
        return session_of_module(self).layout

    @property
    def comm(self) -> Comm:
        """The Comm of the ranks over which the module is sharded."""
        return session_of_module(self).scheduler.comm

    @property
    def scheduled_step(self) -> ScheduleHandle:
        """The module's training steps: ``model.scheduled_step.schedule``, ``model.scheduled_step.start_trace()``."""
        return session_of_module(self).step.scheduled

    @api_context
    def unsharded(self, *, write: bool = False) -> Iterator[None]:
        """Make all parameters whole tensors in this context, on every rank. All ranks have to enter the context.

        Trained parameters have the optimizer's dtype, frozen ones the dtype in which they rest. With ``write=True`` writes to
        parameters last; all ranks have to write equal values. Without ``write`` only changes of ``requires_grad`` last. A
        forward whose backward has not run yet is abandoned. It is a ScheduleError to enter while a step has gradients, and to
        call the module inside. With ``write`` it is a TreeError to reshape, tie or untie parameters.

        Cost: a gather of all units, and the memory of the whole model; with ``write`` a second gather, of written parameters.
        """
        session = session_of_module(self)
        if session.is_unsharded:
            raise ScheduleError("unsharded(): the call is inside of another unsharded(), where parameters are whole already.")
        if write and session.is_averaged:
            raise ScheduleError("unsharded(write=True): inside of averaged(), whose end would discard the writes.")
        _warn_of_rounded_frozen("unsharded()", session.parameters.values())
        session.step.abandon_forwards("unsharded()")
        session.state.propagate_main_writes()
        full = {p.path: x for p, x in gather_whole_tensors(session.parameters.values(), session.comm_outside_steps())}
        shown = zip(full, as_dtensors(full, full.values(), session.calls.dtensor_specs), strict=True)
        parameters = {path: nn.Parameter(x.detach(), session.parameters[path].requires_grad) for path, x in shown}
        with session.replacing_parameters(parameters):
            yield
            for path, parameter in parameters.items():
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    raise LayoutError(
                        f"unsharded(): a hook was registered on parameter {path!r}, which is another tensor outside. Call "
                        "register_post_accumulate_grad_hook() outside of unsharded()."
                    )
            check = partial(checked_current_tensors, session.calls.entries.values(), full)
            written = check_on_all_ranks("unsharded()", session.comm_outside_steps(), check) if write else {}
        for path, x in (*parameters.items(), *written.items()):
            if isinstance(x, nn.Parameter) and x.requires_grad != session.parameters[path].requires_grad:
                session.parameters[path].requires_grad_(x.requires_grad)
        if write:
            mine = {path: x.detach().reshape(-1)[slice(*session.parameters[path].flat_range)] for path, x in written.items()}
            session.write_and_gather_parameters(mine)
            session.state.record_write()

    @api_boundary
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a dict of this rank's parameter parts, each a :class:`~fsharp.modules.ShardedTensor`, and persistent buffers.

        Names are those of torch. Parts share the module's memory. A part knows which elements it holds, so any mesh can read
        parts that all ranks have saved. A parameter with several names has one part. Inside of :meth:`unsharded` values are
        whole tensors. Parameters that are DTensors, sharded on other axes, are an error.
        """
        if session_of_module(self).is_unsharded:
            return super().state_dict(*args, **kwargs)
        check_no_dtensor_shards("state_dict()", session_of_module(self))
        found, parts = super().state_dict(*args, **kwargs), dict[Any, ShardedTensor]()
        for name, value in found.items():
            if isinstance(value, ShardedTensor):  # of this module, or of another one in the same parent
                found[name] = parts.setdefault((value.owner, value.path), value)
        return found

    @api_boundary
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy values into parameters and buffers; all ranks have to call this method. Return missing and unexpected keys.

        Args:
            state_dict: values by torch's names: this rank's parts, from :meth:`state_dict` under the same layout, or whole
                tensors, of which each rank takes its part. A value has the parameter's present dtype, or the dtype that the
                parameter had before :func:`~fsharp.shard_module`.
            strict: raise an error for names that are missing or unknown.
            assign: as in torch, but only inside of :meth:`unsharded`.

        Raises:
            TreeError: names, shapes, dtypes or layout differ. No parameter or buffer has changed; extra state may have.
            AgreementError: ranks pass different values for elements that they share. All ranks raise.
            ScheduleError: a step has gradients, or the call is inside of ``averaged()``.

        Cost: a pass over elements that several ranks hold, and a gather of updated parameters. Memory: one unit at rest.
        """
        session = session_of_module(self)
        load = partial(super().load_state_dict, state_dict, strict=strict, assign=assign)
        if session.is_unsharded:
            return load()
        if assign:
            raise TreeError(
                "load_state_dict(assign=True): parameters of a ShardedModule rest in memory of its own. Leave out assign, or "
                "load whole parameters in `with model.unsharded(write=True):`."
            )
        return load_state_dict_into_parts(session, self, load)

    @api_boundary
    def full_state_dict(self, *, rank: int | None = 0) -> dict[str, Any]:
        """Return whole parameters and persistent buffers in host memory, by torch's names, on one rank; else an empty dict.

        ::

            state = model.full_state_dict()  # every rank calls it
            if model.comm.rank == 0:
                torch.save(state, "model.pt")

        Dtypes are as in :meth:`state_dict`. With ``rank=None`` all ranks return the dict, each with its own buffers.

        Raises:
            MeshError: there is no such rank.
            TreeError: a parameter has different values on each rank, such as an expert's.
            ScheduleError: the call is inside of :meth:`unsharded`, where :meth:`state_dict` returns whole tensors.
            AgreementError: ranks pass different values of ``rank``. All ranks raise.

        Cost: a gather of all units. Memory: one full unit, and on that rank the whole state dict in host memory.
        """
        where, session = "full_state_dict()", session_of_module(self)
        if session.is_unsharded:
            raise ScheduleError(f"{where}: inside of unsharded(). Call it outside, or take state_dict(), which is whole here.")
        found: dict[str, Any] = super().state_dict()
        return found if make_parts_whole_(where, [found], rank, session.comm_outside_steps()) else {}

    @api_boundary
    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None, *, rank: int = 0, strict: bool = True) -> Any:
        """Copy one rank's whole tensors into the parameters and buffers of all ranks. Return missing and unexpected keys.

        ::

            state = torch.load("model.pt", weights_only=True, mmap=True) if model.comm.rank == 0 else None
            model.load_full_state_dict(state)  # every rank calls it

        Args:
            state_dict: on ``rank``, whole tensors by torch's names, in dtypes that :meth:`load_state_dict` takes; else None.
            rank: rank of :attr:`comm` that passes the state dict.
            strict: raise an error for names that are missing or unknown.

        Raises:
            MeshError: there is no such rank.
            TreeError: another rank passes a state dict too, or ``rank`` passes none; or as in :meth:`load_state_dict`.
            AgreementError: another rank has raised an error.

        Cost: two ``all_reduce`` of each tensor's bytes along each axis. Memory: a copy of this rank's parts, and one tensor.
        """
        where, own, comm = "load_full_state_dict()", self.state_dict(), session_of_module(self).reopened_scheduler()
        like = {(name,): part for name, part in own.items() if isinstance(part, ShardedTensor)}
        return self.load_state_dict(scatter_from_rank(where, state_dict, rank, comm, like), strict)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Raise an error: functions of torch.distributed.checkpoint.state_dict, which call this method, do not work here."""
        raise TreeError(
            "torch.distributed.checkpoint.state_dict: get_state_dict() and similar functions do not know a ShardedModule. "
            "dcp.save() and dcp.load() take {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}. "
            "model.full_state_dict() gives whole tensors on one rank, and model.load_full_state_dict() loads them."
        )

    @api_boundary
    def named_full_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield pairs of a parameter's name and its whole value, unit by unit. All ranks have to iterate to the end.

        Trained parameters have the dtype ``precision.main``. Frozen ones have the dtype ``precision.compute``. If sharding
        has rounded frozen parameters, a warning is issued. ``trained=True`` omits frozen parameters, for example to export
        adapters. The caller may keep the tensors. Memory: one full unit, and the tensors that the caller keeps. A ScheduleError
        inside of :meth:`unsharded`.
        """
        session = session_of_module(self)
        if session.is_unsharded:
            raise ScheduleError("named_full_parameters(): inside of unsharded() named_parameters() yields whole parameters.")
        names = {id(p): name for name, p in self.named_parameters()}
        chosen = [p for p in session.parameters.values() if id(p) in names and (p.is_trained or not trained)]
        _warn_of_rounded_frozen("named_full_parameters()", chosen)
        session.state.propagate_main_writes()
        for part, value in gather_whole_tensors(chosen, session.comm_outside_steps()):
            yield names[id(part)], value.clone() if part.spec is None else part.spec.as_dtensor(value).full_tensor()


def _warn_of_rounded_frozen(where: str, parameters: Iterable[ShardedParameter]) -> None:
    """Warn if frozen parameters rest in a lower dtype than they had, as their exact values are lost."""
    if rounded := [p for p in parameters if not p.is_trained and torch.promote_types(p.leaf.dtype, p.dtype) != p.dtype]:
        first, dtype = rounded[0], dtype_name(rounded[0].dtype)
        warnings.warn(
            f"{where}: {len(rounded)} frozen parameters such as {first.path!r} were {dtype_name(first.leaf.dtype)}, and rest "
            f"rounded in {dtype}, by Precision(compute=torch.{dtype}). Take their values from where they were loaded, and the "
            "others from named_full_parameters(trained=True); or use torch.autocast() instead of a lower dtype.",
            stacklevel=4,
        )
