"""shard_module: shard the parameters, gradients and optimizer state of an nn.Module, in place."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsharp.distributed.job import connect
from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.errors import OptionError, TreeError
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.gather_hooks import format_of_hooked_parameter, hooked_parameters
from fsharp.functional.formats.te import formats_of_module
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.packing import Atom, ElementAtom, RowsAtom
from fsharp.functional.layout.placement import P, Strategy, zero3
from fsharp.functional.layout.plan import plan
from fsharp.functional.layout.precision import Precision, Precisions, check_precisions
from fsharp.functional.layout.stored import preserving_amax_histories
from fsharp.functional.layout.text import unit_texts_by_property
from fsharp.functional.make_functional import parameter_tree
from fsharp.functional.optim.base import Transform
from fsharp.functional.state import init_state
from fsharp.functional.tree.paths import Patterns, matches_self_or_ancestor, parents_of_all_prefixes
from fsharp.stateful.modules.initial import initial_parameters, initializer_settings_texts
from fsharp.stateful.modules.module import ShardedModule
from fsharp.stateful.modules.parameter import ShardedParameter
from fsharp.stateful.modules.selection import (
    Units,
    chosen_modules,
    gathered_units_by_module,
    methods_by_module,
    modules_sharing_gather,
)
from fsharp.stateful.modules.session import ModuleSession, install_gathering_subclass
from fsharp.stateful.modules.te import check_te_gradients, register_te_call_checks, use_text_extra_state
from fsharp.stateful.modules.torch_tools.dtensors import dtensor_specs, local_tensor
from fsharp.stateful.modules.torch_tools.refusals import check_shardable, register_wrapper_checks
from fsharp.stateful.modules.values.casts import casts_by_module
from fsharp.stateful.modules.values.side_outputs import check_parameters_replaceable
from fsharp.stateful.runtime.scheduler import Scheduler
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.type_checks import options_checked

_NO_UPDATE = Transform(lambda params: None, lambda grads, state, params, *, comm: (grads, state), {})


@options_checked
def shard_module(
    module: nn.Module,
    *,
    mesh: DeviceMesh | Mesh | Comm | None = None,
    strategy: Strategy | P | Mapping[str, Strategy | P] | None = None,
    units: Units | Sequence[Units] | None = None,
    precision: Precisions = Precision(),
    policy: SchedulePolicy | None = None,
    methods: str | Sequence[str] = (),
    key: int = 0,
    initialize: Callable[[nn.Module], None] | None = None,
    sync_from: int | None = None,
    atoms: Atom | Mapping[str, Atom] | None = None,
    labels: str | Mapping[str, str] | Callable[[str], str] = "default",
) -> ShardedModule:
    """Shard a module's parameters in place, and return the module, which becomes a :class:`~fsharp.ShardedModule`.

    ::

        model = fs.shard_module(model, strategy=fs.zero3("dp"), units=[Block])
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        for batch in data:
            model(**batch).loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    All ranks have to make the same calls of the module, in the same order.

    Args:
        module: the module, with equal values on every rank, or on the meta device. Tied or frozen parameters stay so.
        mesh: the ranks: a DeviceMesh with dim names, a :class:`~fsharp.Mesh` that all processes form, or a
            :class:`~fsharp.Comm`; None means all processes, along one axis ``"dp"``. After tensor parallelism by
            ``parallelize_module`` pass the other axes, such as ``device_mesh["dp"]``: DTensors are sharded over these as well.
        strategy: where state rests: a strategy or a partition spec, or several by pattern of paths, of which the last match
            counts. None means ZeRO-3 over all axes. For experts that differ along an axis ``"ep"``:
            ``{"**": zero3("dp", "ep"), "**.experts": zero3("dp").varying("ep")}``.
        units: modules to gather and release one by one, when they are called: classes, patterns of paths (``"layers.*"``),
            predicates ``(path, module) -> bool``, or a list of these. Units may nest. Parameters outside of all units are
            gathered with the root. A tuple in the list, as in ``[Block, ("norm", "head")]``, is a group of modules that run one
            after another: by schedule they share one gather and one reduction.
        precision: a :class:`~fsharp.Precision`, or several by pattern of paths, of which the last match counts, as in
            ``{"**": Precision(torch.bfloat16, torch.float32), "norm": Precision(torch.float32)}``. Floating-point inputs of the
            root and of units are cast to ``compute``, and outputs to ``output``, if given.
        policy: policy of the schedule.
        methods: names of methods other than ``forward`` that use parameters, such as ``"encode"``, of the root or of units.
            Parameters are gathered for these methods. A method that only calls modules, as ``generate`` does, needs no entry.
            Like forwards, call these methods under ``torch.no_grad()`` if no backward follows.
        key: seed for tensors on the meta device, which ``reset_parameters()`` of modules fills with equal values on any mesh.
        initialize: function that fills the tensors of a submodule on the meta device, in place of its ``reset_parameters()``.
            For a model of transformers pass ``model._init_weights``. The function is called for a submodule first, and then for
            the modules around it, which may change the submodule's values. The function is not called for an outer module that
            was passed with a tensor that is not on the meta device, its own or a submodule's.
        sync_from: rank whose parameters and buffers all ranks take. Other ranks may pass a module on the meta device. None
            means that ranks compare their parameters, and raise an error if they differ.
        atoms: as for :func:`~fsharp.plan`; None means single elements, or the atom that a parameter's tensor class needs.
        labels: as for :func:`~fsharp.plan`.

    Returns:
        The module that was passed.

    Raises:
        PatternError: ``units`` or ``methods`` matches nothing, or a module without parameters.
        OptionError: an option has a wrong type, such as a pattern without a Precision.
        LayoutError: a unit has another precision than each of its parameters.
        TreeError: the module or a parameter cannot be sharded, or nothing initializes a meta tensor.
        MeshError: the mesh lacks this process, or parameters are distributed over it already.
        AgreementError: ranks differ in module, units, strategy, precision or values. All ranks raise.

    Cost: memory of this rank's parts; from the meta device also one whole submodule. Ranks compare parameters in one pass, and
    send 8 bytes. ``sync_from`` sends all parameters, and holds one full unit.
    """
    comm = _comm_of_mesh(mesh)

    def check_and_plan() -> tuple[Any, ...]:
        check_shardable(module, ShardedParameter)
        check_te_gradients(module)
        added = [name for name in vars(ShardedModule) if not name.startswith("_") and not hasattr(nn.Module, name)]
        if hidden := [name for name in added if hasattr(module, name)]:
            raise TreeError(
                f"shard_module(): methods of ShardedModule would hide {', '.join(hidden)} of {type(module).__name__}. Rename "
                "these attributes."
            )
        check_parameters_replaceable(module)
        check_precisions("shard_module()", precision)
        rules = {"**": precision} if isinstance(precision, Precision) else precision
        dtypes = {pattern: each.without_module_options for pattern, each in rules.items()}
        dtypes, cut = _add_tensor_class_formats(module, dtypes, atoms or ElementAtom(), comm)
        specs = dtensor_specs(module, comm)
        whole: Any = parameter_tree("shard_module()", module)
        tree = optree.tree_map(local_tensor, whole)
        chosen = chosen_modules(module, units or ())
        groups = modules_sharing_gather(module, units or ())
        entries = methods_by_module(module, chosen, methods)
        trained = {path for path, each in module.named_parameters(remove_duplicate=False) if each.requires_grad}
        around = set(parents_of_all_prefixes(chosen).values())
        frozen: Patterns = lambda path: path not in trained  # noqa: E731
        where, named = strategy or zero3(*comm.mesh.names), [path for path in chosen if path not in around] or None
        layout = plan(tree, comm.mesh, where, units=named, frozen=frozen, atoms=cut, labels=labels, precision=dtypes)
        casts = casts_by_module(rules, chosen, [unit.path_in_tree(leaf) for unit in layout.units for leaf in unit.leaves])
        settings = initializer_settings_texts(module, comm, key=key, initialize=initialize, sync_from=sync_from)
        settings["casts"] = "\n".join(f"{path or '(root)'}: {cast}" for path, cast in casts.items())
        return tree, layout, specs, chosen, groups, entries, casts, {**unit_texts_by_property(layout.units), **settings}

    found = check_on_all_ranks("shard_module()", comm, check_and_plan, lambda found: found[-1])
    tree, layout, specs, chosen, groups, entries, casts, _ = found
    start = initial_parameters(module, tree, layout, comm, key=key, initialize=initialize, sync_from=sync_from)
    # Amax histories contain the module's own values already.
    with preserving_amax_histories(layout.units) if sync_from is None else nullcontext():
        state = init_state(_NO_UPDATE, start, comm=comm, donate=True)
    del tree, start
    policy = policy or SchedulePolicy()
    if groups:
        of_module = gathered_units_by_module(layout, chosen)
        named_groups = [tuple(name for path in group for name in of_module.get(path, ())) for group in groups]
        policy = replace(policy, together=(*policy.together, *named_groups))
    scheduler = Scheduler(comm, policy=policy)
    session = ModuleSession(module, layout, list(chosen), state, scheduler, casts, specs)
    register_wrapper_checks(ShardedParameter)
    for parameter in module.parameters():
        parameter.__dict__["_fsharp_replaced"] = True
    session.install_sharded_parameters()
    use_text_extra_state(module)
    register_te_call_checks(module)
    for path in session.calls.units_by_module_path:
        mixins = (ShardedModule,) if not path else ()
        install_gathering_subclass(module.get_submodule(path), session, path, entries[path], mixins)
    assert isinstance(module, ShardedModule)
    return module


def _add_tensor_class_formats(
    module: nn.Module, precisions: Mapping[str, Precision], atoms: Any, comm: Comm
) -> tuple[dict[str, Precision], Any]:
    """Return precisions and atoms by pattern, completed for parameters whose tensor class defines its own gather."""
    found = dict(precisions)
    for path, (form, dtype) in formats_of_module(module).items():
        own = _last_match(precisions, path, Precision())
        found[path] = replace(own, compute=own.compute or dtype, main=own.main or torch.float32, stored=own.stored or form)
    if hooked := hooked_parameters(module):
        from torch.distributed.fsdp import MixedPrecisionPolicy

        atoms = dict(atoms) if isinstance(atoms, Mapping) else {"**": atoms}
    for path, parameter in hooked.items():
        own = _last_match(precisions, path, Precision())
        if own.stored is not None:
            raise OptionError(
                f"parameter {path!r} is a {type(parameter).__name__} with FSDP2 hooks, which encode it, and has "
                f"stored={own.stored.name!r}. Leave stored out by another pattern, or make it a plain parameter."
            )
        if comm.mesh.size > 1 and not torch.distributed.is_initialized():
            raise OptionError(
                f"parameter {path!r} has FSDP2 hooks, which reduce over ranks only where torch.distributed is initialized: "
                "expected ranks that are processes."
            )
        compute, main = own.compute or parameter.dtype, own.main or parameter.dtype
        policy = MixedPrecisionPolicy(param_dtype=compute)
        form = format_of_hooked_parameter(parameter, compute, main, comm.device, policy)
        found[path] = replace(own, compute=compute, main=main, stored=form)
        if _last_match(atoms, path, ElementAtom()) == ElementAtom():
            atoms[path] = RowsAtom(1)
    return found, atoms


def _last_match(by_pattern: Mapping[str, Any], path: str, default: Any) -> Any:
    """Return the value of the last pattern that selects a path, or ``default``."""
    return next((each for pattern, each in reversed([*by_pattern.items()]) if matches_self_or_ancestor(pattern, path)), default)


def _comm_of_mesh(mesh: DeviceMesh | Mesh | Comm | None) -> Comm:
    if isinstance(mesh, DeviceMesh):
        return ProcessGroupComm(mesh)
    if mesh is None:
        joined = torch.distributed.is_initialized()
        size = torch.distributed.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
        mesh = Mesh({"dp": size})
    return connect(mesh) if isinstance(mesh, Mesh) else mesh
