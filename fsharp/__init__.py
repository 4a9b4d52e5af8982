"""fsharp: a JAX-style functional sharding library for PyTorch.

Parameters are explicit pytrees. Every operation on them is a pure function. A strategy says which rank holds which tensors.

Glossary
    rank        a process of the job, and its number; in :func:`~fsharp.testing.simulate` a thread.
    axis        a named dimension of the mesh; a *dim* is a dimension of a tensor.
    mesh        the ranks, arranged in a grid with named axes (:class:`Mesh`).
    at rest     between uses: a tensor rests where a rank holds it while no function uses it.
    placement   how the ranks along one axis hold a tensor: Replicate, Shard, Partial or Varying.
    place       one placement for each axis: where one kind of tensor rests (:class:`~fsharp.layouts.MeshPlacement`).
    strategy    the places of parameters, of gradients and of optimizer state (:class:`Strategy`).
    spec        the mesh axes that cut each dim of a leaf, as JAX's PartitionSpec; write it in place of a strategy (:class:`P`).
    unit        a subtree whose leaves are gathered, used and released together.
    group       leaves of a unit that share a flat buffer: equal dtypes, equal labels, all trained or all frozen.
    atom        elements that stay on one rank together: ``ElementAtom``, ``RowsAtom`` or ``LeafAtom`` of :mod:`fsharp.layouts`.
    layout      which element of which leaf rests on which rank (:class:`Layout`); :func:`plan` makes a layout.
    sharded     the pytree node that takes the place of a unit's subtree, and holds one rank's buffers (:class:`Sharded`).
    full        the place in which functions see parameters: replicated on every axis on which the unit does not vary.
    comm        the object through which a rank calls collectives (:class:`Comm`).
    use         one call of a function on a unit, with the backward of this call.
    program     the order in which a step uses units (:class:`~fsharp.schedules.Program`).
    schedule    when each unit moves, on which stream and in which memory (:class:`~fsharp.schedules.Schedule`).
    arena       the block of memory in which a schedule gives addresses to the buffers of a step.
    slot        the address of a unit's full parameters in the arena; a unit is *resident* while they are there.
    policy      what the compiler of schedules may choose (:class:`SchedulePolicy`).
    main copy   the parameters in the optimizer's dtype (master weights), kept where optimizer state rests.
    state tree  a subtree of a training state with a Sharded for each unit: parameters, main copies, or one moment of Adam.
    format      how values are stored or travel, such as 8-bit codes with scales (:class:`~fsharp.formats.Format`).
    plane       one array of numbers that a format stores, such as all codes, or all scales (:class:`~fsharp.formats.Plane`).
    engine      takes whole calls of functions, and decides when data move and in which memory; a scheduler has one.
    host        a machine with some of the ranks; *host memory* is the memory of its CPUs.
    generation  the job between two restarts of ranks; after a restart all ranks join the next one (``launch(restarts=)``).
    lane        ops that run one after another, beside the ops of other lanes: a stream, or what stands for it on a CPU.
    issue       of an op or collective: the host starts it, or queues it on a stream.
    bucket      neighbouring units whose data move in one collective. Their ops have the same bucket number.
    facts       sizes and collectives of a unit, for the compiler of schedules (:class:`~fsharp.schedules.UnitFacts`).
    piece       in a checkpoint, the elements of a flattened tensor that one rank holds; a *chunk* is the elements in one file.
    trial       a run on small or meta tensors: of a transformation (:func:`init_state` tests it), or of units (:func:`tune`).
"""

import gc as _gc

_collects = _gc.isenabled()
_gc.disable()  # imports make no garbage, and collections that look for it take a fifth of the time
try:
    from fsharp import (
        checkpoint as checkpoint,
        collectives as collectives,
        errors as errors,
        formats as formats,
        init as init,
        inspect as inspect,
        layouts as layouts,
        modules as modules,
        optim as optim,
        resilience as resilience,
        schedules as schedules,
        te as te,
        testing as testing,
    )
    from fsharp.distributed.job import connect as connect, destroy as destroy
    from fsharp.distributed.process_group import ProcessGroupComm as ProcessGroupComm
    from fsharp.functional.comm.protocol import Comm as Comm, SingleComm as SingleComm
    from fsharp.functional.forward import dummy_forward as dummy_forward, forward as forward
    from fsharp.functional.layout.layout import Layout as Layout
    from fsharp.functional.layout.mesh import Mesh as Mesh
    from fsharp.functional.layout.placement import (
        P as P,
        Strategy as Strategy,
        ddp as ddp,
        hfsdp as hfsdp,
        hsdp as hsdp,
        zero1 as zero1,
        zero2 as zero2,
        zero3 as zero3,
    )
    from fsharp.functional.layout.plan import plan as plan
    from fsharp.functional.layout.precision import Precision as Precision
    from fsharp.functional.layout.sharded import Sharded as Sharded, trainable as trainable
    from fsharp.functional.layout.slicing import shard_for as shard_for, unshard as unshard
    from fsharp.functional.loss import Loss as Loss, Metrics as Metrics, average as average
    from fsharp.functional.make_functional import make_functional as make_functional
    from fsharp.functional.materialize import full_tree as full_tree, init_params as init_params, shard as shard
    from fsharp.functional.moves import gather as gather, reduce_scatter as reduce_scatter
    from fsharp.functional.per_sample import per_sample_norms as per_sample_norms
    from fsharp.functional.reshard.reshard import reshard as reshard
    from fsharp.functional.state import TrainState as TrainState, init_state as init_state, update as update
    from fsharp.functional.train import train_step as train_step, value_and_grad as value_and_grad
    from fsharp.planning.tune import tune as tune
    from fsharp.resilience.launching import launch as launch
    from fsharp.stateful.modules.module import ShardedModule as ShardedModule
    from fsharp.stateful.modules.optim.optimizer import ShardedOptimizer as ShardedOptimizer
    from fsharp.stateful.modules.optim.scaler import GradScaler as GradScaler
    from fsharp.stateful.modules.shard import shard_module as shard_module
    from fsharp.stateful.runtime.scheduler import Scheduler as Scheduler
    from fsharp.stateful.schedule.policy import SchedulePolicy as SchedulePolicy
finally:
    if _collects:
        _gc.enable()

__version__ = "0.1.0"

_WITHIN = (
    *("cli", "distributed", "functional", "huggingface", "lightning", "planning", "report", "stateful"),
    *("torch_compile", "tracebacks", "type_checks"),
)


def __dir__() -> list[str]:
    """Return the public names, for ``dir(fsharp)`` and tab completion. Modules of the implementation are left out."""
    return sorted(name for name in globals() if name not in _WITHIN and (name == "__version__" or not name.startswith("_")))
