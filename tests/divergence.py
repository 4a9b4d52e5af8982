"""Ranks that differ, by seed: which program and who does what else when, how it is run, and whether it ended well.

A run ends well if all ranks return the reference's values, or if all that live have an error; and if no rank has had a wrong
value in hand before. The reference is the same program, the difference included, on the blocking path with replicated
parameters: there nothing that ranks send can be taken for something else, as forwards and backwards send nothing.
"""

import random
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch

from fsharp.errors import CommError, FsharpError
from fsharp.testing import processes, simulate
from fsharp.testing.simulated_ranks import Killed
from tests.divergence_programs import FAULTS, KINDS, POLICIES, Planted, Scenario, rank_program
from tests.scheduling import FLAT, ON_TWO_AXES

ANOTHER_VALUE = (
    *("an evaluation more", "an evaluation fewer", "a step more", "a step fewer", "another order", "another loss"),
    *("a unit more", "a unit fewer", "another batch", "other microbatches"),
)
"""What changes values, of all ranks: each of them computes what it says, and gradients are those of the sum."""
REFUSED = (*FAULTS, "another learning rate", "no backward", "no update", "forgotten gradients")
"""What has to be an error on every rank."""
OWN_DOING = REFUSED[len(FAULTS) :]
"""After which the rank's own next loss is another one, before any rank can know."""


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    draw = random.Random(seed)
    kind = draw.choice(list(KINDS))
    strategy = draw.choice(["zero3", "zero3", *FLAT, *FLAT, *ON_TWO_AXES])
    ranks = 4 if strategy in ON_TWO_AXES else draw.choice([2, 2, 2, 3, 3, 4, 5])
    units, steps = draw.choice([2, 3, 3, 4]), draw.choice([3, 3, 3, 4])
    return Scenario(
        seed=seed,
        way=draw.choice(KINDS[kind]),
        strategy=strategy,
        ranks=ranks,
        units=units,
        steps=steps,
        microbatches=draw.choice([1, 1, 2]),
        donate=draw.random() < 0.5,
        evaluates=kind == "an evaluation fewer" or draw.random() < 0.25,
        policy=draw.choice([*POLICIES, *["default"] * 3]),
        kind=kind,
        rank=draw.randrange(ranks),
        step=draw.randrange(steps),
        where=draw.randrange(units),
        in_backward=draw.random() < 0.5,
    )


def replay(s: Scenario, problem: str) -> str:
    """What a failing test prints."""
    return f"{problem}\n{s}\nOnce more: python -m tests.divergence {s.seed}"


class Outcome(NamedTuple):
    """What comes of a rank.

    Attributes:
        log: what it had in hand.
        error: what it raised, if it did.
    """

    log: list[torch.Tensor]
    error: BaseException | None


def run(s: Scenario) -> list[Outcome]:
    """What comes of each rank. At the end each one meets all others, so that none believes to be done when others are not."""
    logs: list[list[torch.Tensor]] = [[] for _ in range(s.mesh.size)]

    def rank_fn(comm: Any) -> None:
        rank_program(s, comm, logs[comm.rank])
        for axis in comm.mesh.names:
            comm.all_gather(torch.zeros(1), axis, label="the end")

    ends = simulate(s.mesh, rank_fn, seed=s.seed, outcomes=True)
    return [Outcome(log, end) for log, end in zip(logs, ends, strict=True)]


def run_in_processes(s: Scenario, *, timeout: float = 60.0) -> list[Outcome]:
    """What comes of each rank as a process. None meets the others at the end."""
    with tempfile.TemporaryDirectory(prefix="fsharp-") as folder:

        def rank_fn(comm: Any) -> None:
            log: list[torch.Tensor] = []
            error: Exception | None = None
            try:
                rank_program(s, comm, log)
            except Exception as raised:
                error = raised
            there = Path(folder, f"outcome-{comm.rank}")
            there.with_suffix(".part").write_bytes(cloudpickle.dumps(Outcome(log, error)))
            there.with_suffix(".part").rename(there)

        hangs = ""
        try:
            processes(s.mesh, rank_fn, timeout=timeout)
        except CommError as error:  # of a rank that was killed, or of ranks that did not end
            hangs = str(error)
        outcomes = []
        for rank in range(s.mesh.size):
            there = Path(folder, f"outcome-{rank}")
            if there.exists():
                outcomes.append(cloudpickle.loads(there.read_bytes()))
            elif rank == s.rank and s.kind in ("dies", "stalls"):
                outcomes.append(Outcome([], Killed(s.kind)))
            else:
                outcomes.append(Outcome([], CommError(f"rank {rank} has not come to an end. {hangs}")))
        return outcomes


def judge(s: Scenario, outcomes: list[Outcome], *, meets: bool = True) -> str | None:
    """What is wrong with how a run ended; None if nothing is.

    Args:
        s: what was run.
        outcomes: of its ranks.
        meets: whether ranks meet at the end. If not, one may have ended well before others have an error.
    """
    expected, is_exact = reference(s)
    for rank, (log, error) in enumerate(outcomes):
        if error is not None and not isinstance(error, Killed | FsharpError | Planted):
            return f"rank {rank} has an error that says nothing to a user: {error!r}"
        if any(text in str(error) for text in ("has not come to an end", "has had the turn", "simulate(): waited")):
            return f"rank {rank} hangs: {error}"
        for i, (got, want) in enumerate(zip(log, expected[rank].log, strict=False)):
            if not same(got, want, is_exact) and not (rank == s.rank and s.kind in OWN_DOING):
                return f"value {i} of rank {rank} is {got.tolist()}, and should be {want.tolist()}; then {error or 'no error'}"
    living = {rank: each.error for rank, each in enumerate(outcomes) if not isinstance(each.error, Killed)}
    failed = [rank for rank, error in living.items() if error is not None]
    if meets and 0 < len(failed) < len(living):
        return f"ranks {failed} have errors, and {sorted(set(living) - set(failed))} none: {living[failed[0]]}"
    if failed and s.kind == "nothing":
        return f"no rank does anything different, and all have errors: {living[0]}"
    if not failed and living and (s.kind in REFUSED or any(each.error is not None for each in expected)):
        return "no rank has an error, and there should be one on each"
    return None


def reference(s: Scenario) -> tuple[list[Outcome], bool]:
    """What comes of the ranks if nothing is mistaken for something else, and whether values are to be those to the bit."""
    # Reductions of microbatches are added in another order where gradients rest sharded, and sums along two axes are nested.
    is_exact = s.strategy in ("ddp", "zero1") or (s.strategy in FLAT and s.microbatches == 1 and s.kind != "other microbatches")
    plain = replace(s, seed=0, way="blocking", strategy="ddp", donate=False, policy="default", where=0, in_backward=False)
    if s.kind not in ANOTHER_VALUE:
        plain = replace(plain, kind="nothing", rank=0, step=0)
    return _reference(plain), is_exact


@lru_cache(maxsize=500)
def _reference(s: Scenario) -> list[Outcome]:
    return run(s)


def same(a: torch.Tensor, b: torch.Tensor, is_exact: bool) -> bool:
    """Whether two tensors have the same values."""
    return a.shape == b.shape and (torch.equal(a, b) if is_exact else torch.allclose(a, b, rtol=1e-4, atol=1e-5))


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for each in map(int, sys.argv[1:]):
        found = scenario(each)
        print(found)
        ended = run(found)
        for number, outcome in enumerate(ended):
            print(f"rank {number}: {len(outcome.log)} values, then {outcome.error or 'no error'}")
        print(judge(found, ended) or "ended well")
