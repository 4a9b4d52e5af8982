"""Optimizers over sharded trees, as pairs of pure functions ``(init, update)``, and transformations to chain them with.

Names, order of arguments and defaults are those of optax. This module holds transformations that have a fused kernel or need
the mesh, and their building blocks. For any other optax transformation use ``fs.optim.from_optax(optax.x(...))``.

- Optimizers: adam, adamw, lion, muon, sgd.
- To combine and wrap them: chain, masked, multi_transform (also named partition), MultiSteps, apply_if_finite,
  inject_hyperparams, with_ema, with_elementwise_check; Transform, the class of all of these.
- Parts of a chain: add_decayed_weights, clip_by_global_norm, ema, identity, scale, scale_by_adam, scale_by_learning_rate,
  scale_by_schedule, trace.
- Schedules of a learning rate: constant_schedule, cosine_decay_schedule, join_schedules, linear_schedule,
  warmup_cosine_decay_schedule.
- A function: global_norm, of a tree over all ranks.

``help(fs.optim.adamw)`` describes one of them.
"""

from fsharp.functional.optim.base import Transform as Transform, chain as chain
from fsharp.functional.optim.elementwise import adam as adam, adamw as adamw, lion as lion, sgd as sgd
from fsharp.functional.optim.elementwise_check import with_elementwise_check as with_elementwise_check
from fsharp.functional.optim.ema import ema as ema, with_ema as with_ema
from fsharp.functional.optim.inject import inject_hyperparams as inject_hyperparams
from fsharp.functional.optim.muon import muon as muon
from fsharp.functional.optim.norms import clip_by_global_norm as clip_by_global_norm, global_norm as global_norm
from fsharp.functional.optim.partition import (
    masked as masked,
    partition as multi_transform,  # noqa: F401  # optax has both names
    partition as partition,
)
from fsharp.functional.optim.primitives import (
    add_decayed_weights as add_decayed_weights,
    identity as identity,
    scale as scale,
    scale_by_adam as scale_by_adam,
    scale_by_learning_rate as scale_by_learning_rate,
    scale_by_schedule as scale_by_schedule,
    trace as trace,
)
from fsharp.functional.optim.schedules import (
    constant_schedule as constant_schedule,
    cosine_decay_schedule as cosine_decay_schedule,
    join_schedules as join_schedules,
    linear_schedule as linear_schedule,
    warmup_cosine_decay_schedule as warmup_cosine_decay_schedule,
)
from fsharp.functional.optim.wrappers import MultiSteps as MultiSteps, apply_if_finite as apply_if_finite
from fsharp.tracebacks import api_boundary as _api_boundary


@_api_boundary
def from_optax(tx: object) -> Transform:
    """Return an ``optax.GradientTransformation`` as a transformation of shards: see :func:`fsharp.interop.optax.from_optax`.

    Raises:
        ImportError: JAX and optax are not installed.
    """
    from fsharp.interop.optax import from_optax

    return from_optax(tx)
