"""Optimizers over sharded trees, as pairs of pure functions ``(init, update)``, and what they are chained with."""

from fsharp.functional.optim.base import Transform as Transform
from fsharp.functional.optim.base import chain as chain
from fsharp.functional.optim.base import masked as masked
from fsharp.functional.optim.base import partition as partition
from fsharp.functional.optim.elementwise import adamw as adamw
from fsharp.functional.optim.elementwise import lion as lion
from fsharp.functional.optim.elementwise import sgd as sgd
from fsharp.functional.optim.ema import with_ema as with_ema
from fsharp.functional.optim.muon import muon as muon
from fsharp.functional.optim.norms import clip_by_global_norm as clip_by_global_norm
from fsharp.functional.optim.norms import global_norm as global_norm
from fsharp.functional.optim.norms import skip_nonfinite as skip_nonfinite
from fsharp.functional.optim.schedules import warmup_cosine as warmup_cosine
from fsharp.functional.optim.schedules import warmup_linear as warmup_linear
