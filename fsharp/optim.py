"""Optimizers over sharded trees, as pairs of pure functions ``(init, update)``, and transformations to chain them with.

Names, order of arguments and defaults are those of optax. This module holds transformations that have a fused kernel or need
the mesh, and their building blocks. For any other transformation of optax use ``fs.optim.from_optax(optax.x(...))``.
"""

from fsharp.functional.optim.base import Transform as Transform
from fsharp.functional.optim.base import chain as chain
from fsharp.functional.optim.elementwise import adam as adam
from fsharp.functional.optim.elementwise import adamw as adamw
from fsharp.functional.optim.elementwise import lion as lion
from fsharp.functional.optim.elementwise import sgd as sgd
from fsharp.functional.optim.elementwise_check import with_elementwise_check as with_elementwise_check
from fsharp.functional.optim.ema import ema as ema
from fsharp.functional.optim.ema import with_ema as with_ema
from fsharp.functional.optim.inject import inject_hyperparams as inject_hyperparams
from fsharp.functional.optim.muon import muon as muon
from fsharp.functional.optim.norms import clip_by_global_norm as clip_by_global_norm
from fsharp.functional.optim.norms import global_norm as global_norm
from fsharp.functional.optim.partition import masked as masked
from fsharp.functional.optim.partition import partition as multi_transform  # noqa: F401  # optax has both names
from fsharp.functional.optim.partition import partition as partition
from fsharp.functional.optim.primitives import add_decayed_weights as add_decayed_weights
from fsharp.functional.optim.primitives import identity as identity
from fsharp.functional.optim.primitives import scale as scale
from fsharp.functional.optim.primitives import scale_by_adam as scale_by_adam
from fsharp.functional.optim.primitives import scale_by_learning_rate as scale_by_learning_rate
from fsharp.functional.optim.primitives import scale_by_schedule as scale_by_schedule
from fsharp.functional.optim.primitives import trace as trace
from fsharp.functional.optim.schedules import constant_schedule as constant_schedule
from fsharp.functional.optim.schedules import cosine_decay_schedule as cosine_decay_schedule
from fsharp.functional.optim.schedules import join_schedules as join_schedules
from fsharp.functional.optim.schedules import linear_schedule as linear_schedule
from fsharp.functional.optim.schedules import warmup_cosine_decay_schedule as warmup_cosine_decay_schedule
from fsharp.functional.optim.wrappers import MultiSteps as MultiSteps
from fsharp.functional.optim.wrappers import apply_if_finite as apply_if_finite
from fsharp.tracebacks import api_boundary as _api_boundary


@_api_boundary
def from_optax(tx: object) -> Transform:
    """Return an ``optax.GradientTransformation`` as a transformation of shards: see :func:`fsharp.interop.optax.from_optax`.

    Raises:
        ImportError: JAX and optax are not installed.
    """
    from fsharp.interop.optax import from_optax

    return from_optax(tx)
