"""Fault tolerance: runs that resume after a kill with the same bits, and errors that name the rank that failed.

::

    with fs.resilience.Run("runs/a", comm=comm, total=1000, save_every=100, config=config) as run:
        state = run.resume(state)  # the newest checkpoint's state, if there is one
        for step in run.steps():
            state, metrics = train_step(state, batch(step), comm)
            run.log({"loss": metrics.loss})
            state = run.end_step(state)

Each of these names also works without a Run:

- Data and random numbers: IndexSampler, PerRankState, seeded, fold_in.
- Faults: find_nonfinite, which returns a NonFinite; Preemption, EXIT_PREEMPTED; StragglerDetector, TimesByRank;
  reported_failures; agree_at_start.
- Loggers: Logger, JsonlLogger, TensorBoardLogger, WandbLogger.
"""

from fsharp.report.logs import (
    JsonlLogger as JsonlLogger,
    Logger as Logger,
    TensorBoardLogger as TensorBoardLogger,
    WandbLogger as WandbLogger,
)
from fsharp.resilience.failures import reported_failures as reported_failures
from fsharp.resilience.finite import NonFinite as NonFinite, find_nonfinite as find_nonfinite
from fsharp.resilience.per_rank_state import PerRankState as PerRankState
from fsharp.resilience.preemption import EXIT_PREEMPTED as EXIT_PREEMPTED, Preemption as Preemption
from fsharp.resilience.randomness import fold_in as fold_in, seeded as seeded
from fsharp.resilience.run import Run as Run
from fsharp.resilience.sampler import IndexSampler as IndexSampler
from fsharp.resilience.start import agree_at_start as agree_at_start
from fsharp.resilience.stragglers import StragglerDetector as StragglerDetector, TimesByRank as TimesByRank
