"""shard_module: an nn.Module becomes one whose parameters, gradients and optimizer state are sharded, in place."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import optree
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsharp.errors import MeshError, TreeError
from fsharp.functional.comm.agree import together
from fsharp.functional.comm.process_group import ProcessGroupComm, connect
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.functionalize import parameter_tree
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.paths import Patterns, prefixes
from fsharp.functional.layout.placement import P, Strategy, zero3
from fsharp.functional.layout.plan import plan
from fsharp.functional.layout.precision import Precision, Precisions, check_precisions
from fsharp.functional.optim.base import Transform
from fsharp.functional.state import init_state
from fsharp.stateful.modules.initial.dtensors import local, specs_of
from fsharp.stateful.modules.initial.initial import initial_values
from fsharp.stateful.modules.module import ShardedModule
from fsharp.stateful.modules.own_formats import own_formats
from fsharp.stateful.modules.parameter import ShardedParameter
from fsharp.stateful.modules.selection import Units, chosen_modules, entries_of, grouped, owners
from fsharp.stateful.modules.session import Session, enter_by
from fsharp.stateful.modules.te_scales import keep_scales_as_text
from fsharp.stateful.modules.torch_tools.refusals import check_shardable, watch_wrappers
from fsharp.stateful.modules.values.casts import casts_of
from fsharp.stateful.modules.values.side_outputs import refuse_kept
from fsharp.stateful.runtime.scheduler import Scheduler
from fsharp.stateful.schedule.policy import Policy
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

_NOTHING = Transform(lambda params: None, lambda grads, state, params, *, comm: (grads, state), {})


@options_checked
def shard_module(
    module: nn.Module,
    *,
    mesh: DeviceMesh | Mesh | Comm | None = None,
    strategy: Strategy | P | Mapping[str, Strategy | P] | None = None,
    units: Units | Sequence[Units] | None = None,
    precision: Precisions = Precision(),
    policy: Policy | None = None,
    methods: str | Sequence[str] = (),
    key: int = 0,
    initialize: Callable[[nn.Module], None] | None = None,
    sync_from: int | None = None,
    **plan_options: Any,
) -> ShardedModule:
    """Shard a module in place, and return it.

    ::

        model = fs.shard_module(model, strategy=fs.zero3("dp"), units=[Block])
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    All ranks call the same in the same order. The module is also a :class:`~fsharp.ShardedModule`, with its methods.

    Args:
        module: with the same values on every rank, or on the meta device. Tied and frozen parameters stay so.
        mesh: the ranks: a DeviceMesh with named dims, a :class:`~fsharp.Mesh` that all processes form, or a
            :class:`~fsharp.Comm`; None means all processes, along one axis ``"dp"``. Parameters that are DTensors, as
            ``parallelize_module`` makes them, are sharded on top: over the axes that theirs are not, ``device_mesh["dp"]``.
        strategy: where state rests, or strategies or partition specs by pattern of paths, the last that matches counting; None
            means ZeRO-3 over all axes. ``{"**": zero3("dp", "ep"), "**.experts": zero3("dp").varying("ep")}`` is for a module
            of which each rank along ``"ep"`` has experts of its own.
        units: modules that are gathered by themselves when they are called: classes, patterns of paths (``"layers.*"``),
            predicates on path and module, or several of these. They may nest; all else is gathered with the root. A tuple or
            list in a list is a group, ``[Block, ("norm", "head")]``, of modules that run one after another. In a step that
            follows its schedule they share one gather and one reduction.
        precision: dtypes, of all parameters or by pattern of paths, the last that matches counting. Floating-point inputs of
            the root and of each of ``units`` are cast to the ``compute`` of its precision, and outputs to ``output``, where
            these are given: ``{"**": Precision(torch.bfloat16, torch.float32), "norm": Precision(torch.float32)}``.
        policy: of the scheduler.
        methods: names of other methods than ``forward``, of the root or of chosen modules, that parameters are gathered for:
            entry points such as ``"encode"``. Those that only call modules, as ``generate`` calls the root, need not be named.
            Call them under ``torch.no_grad()``, as forwards, if no backward will come.
        key: seed for parameters and buffers on the meta device, which submodules make by their own ``reset_parameters()``: the
            same values on any mesh.
        initialize: called for each submodule with parameters or buffers of its own on the meta device, instead of its
            ``reset_parameters()``, to fill these; of a model of transformers, ``model._init_weights``.
        sync_from: take this rank's parameters and buffers, to the bit, instead of each rank's own; the others' may be on the
            meta device. None compares parameters, and refuses those that differ.
        plan_options: ``atoms`` and ``labels``, as :func:`~fsharp.plan` takes them; labels by default ``"default"``.

    Returns:
        The module that was passed.

    Raises:
        PatternError: units that match no module, methods that none of these has.
        OptionError: an option of a type that it cannot have, such as a pattern that stands for no Precision.
        LayoutError: a unit of whose parameters none has the precision that its inputs and outputs have.
        TreeError: a module without parameters; parameters of a subclass of nn.Parameter, sparse ones, or complex ones that
            require a gradient; a module of DDP, FSDP or fully_shard(); tensors on the meta device that nothing initializes.
        MeshError: a mesh without this process, or one that parameters are distributed over already.
        AgreementError: on all ranks, if they differ in module, units, strategy or precision, or in the values of parameters.

    Cost: this rank's parts, and the parameters of one submodule in full while it is made from the meta device.
    One pass over all parameters compares them, by 8 bytes; ``sync_from`` sends them all, and holds one unit in full.
    """
    comm = _comm(mesh)

    def planned() -> tuple[Any, ...]:
        check_shardable(module, ShardedParameter)
        added = [name for name in vars(ShardedModule) if not name.startswith("_") and not hasattr(nn.Module, name)]
        if hidden := [name for name in added if hasattr(module, name)]:
            raise TreeError(
                f"shard_module(): would hide {', '.join(hidden)} of {type(module).__name__}: rename what has this name."
            )
        refuse_kept(module)
        check_precisions("shard_module()", precision)
        rules = {"**": precision} if isinstance(precision, Precision) else precision
        dtypes = {pattern: each.of_parameters for pattern, each in rules.items()}
        options = dict(plan_options)
        dtypes, atoms = own_formats(module, dtypes, options.pop("atoms", None), comm)
        options |= {} if atoms is None else {"atoms": atoms}
        specs = specs_of(module, comm)
        whole: Any = parameter_tree("shard_module()", module)
        tree = optree.tree_map(local, whole)
        chosen = chosen_modules(module, units or ())
        groups = grouped(module, units or ())
        entries = entries_of(module, chosen, methods)
        trained = {path for path, each in module.named_parameters(remove_duplicate=False) if each.requires_grad}
        around = set(prefixes(chosen).values())
        frozen: Patterns = lambda path: path not in trained  # noqa: E731
        where, named = strategy or zero3(*comm.mesh.names), [path for path in chosen if path not in around] or None
        layout = plan(tree, comm.mesh, where, units=named, frozen=frozen, precision=dtypes, **options)
        casts = casts_of(rules, chosen, [unit.full_path(leaf) for unit in layout.units for leaf in unit.leaves])
        return tree, layout, specs, chosen, groups, entries, casts

    tree, layout, specs, chosen, groups, entries, casts = together("shard_module()", comm, planned)
    said = {"casts": "\n".join(f"{path or '(root)'}: {cast}" for path, cast in casts.items())}
    start = initial_values(module, tree, layout, comm, key=key, initialize=initialize, sync_from=sync_from, settings=said)
    state = init_state(_NOTHING, start, comm=comm, donate=True)
    del tree, start
    policy = policy or Policy()
    if groups:
        of_module = owners(layout, chosen)
        named_groups = [tuple(name for path in group for name in of_module.get(path, ())) for group in groups]
        policy = replace(policy, together=(*policy.together, *named_groups))
    scheduler = Scheduler(comm, policy=policy)
    session = Session(module, layout, list(chosen), state, scheduler, casts=casts, specs=specs)
    for parameter in module.parameters():
        parameter.__dict__["_fsharp_replaced"] = True
    _watch_optimizers()
    session.show()
    keep_scales_as_text(module)
    for path in session.calls.owners:
        enter_by(module.get_submodule(path), session, path, entries[path], *([ShardedModule] if not path else []))
    watch_wrappers(ShardedParameter)
    assert isinstance(module, ShardedModule)
    return module


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
        raise MeshError(f"shard_module(mesh=...): got {type(mesh).__name__}, expected a DeviceMesh, a Mesh or a Comm.")
    return mesh


@cache
def _watch_optimizers() -> None:
    """Have optimizers of torch refuse to step with parameters from before their module was sharded."""
    register_optimizer_step_pre_hook(_refuse_step)


@api_boundary
def _refuse_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if "_fsharp_replaced" in parameter.__dict__:
                name = type(optimizer).__name__
                raise TreeError(
                    f"step(): this {name} was made before shard_module(), which has put other parameters in the place of those "
                    "that it has: it would train nothing. Make it afterwards: "
                    f"fs.ShardedOptimizer(model.parameters(), {name}, ...)."
                )
