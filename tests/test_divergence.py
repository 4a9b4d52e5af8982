"""Ranks that differ, by seed: every run ends with the reference's values, or with an error on every rank that lives."""

from dataclasses import replace

import pytest
import torch

from fsharp.errors import CommError
from tests.divergence import Outcome, judge, reference, replay, run, run_in_processes, scenario
from tests.divergence_programs import KINDS, Planted


def check(s, **options):
    problem = judge(s, run(s), **options)
    assert problem is None, replay(s, problem)


FOUND_ONCE = (898, 2404, 5132)
"""A rank that accumulates where others do not, and whose schedule reduces what is only a part."""


OF_EACH_KIND = {(scenario(seed).kind, scenario(seed).way): seed for seed in reversed(range(300))}.values()
"""The first seed of each kind in each way in which it comes."""


@pytest.mark.parametrize(
    "seed", [*(pytest.param(n, marks=[pytest.mark.deep] * (n not in OF_EACH_KIND)) for n in range(300)), *FOUND_ONCE]
)
def test_divergence(seed):
    check(scenario(seed))


@pytest.mark.deep
@pytest.mark.parametrize("hundred", range(97))
def test_divergence_of_ten_thousand(hundred):
    problems = []
    for seed in range(300 + 100 * hundred, 400 + 100 * hundred):
        s = scenario(seed)
        if problem := judge(s, run(s)):
            problems.append(replay(s, problem))
    assert not problems, "\n\n".join(problems)


def plain(kind, way="scheduled", **fields):
    """A scenario by hand."""
    s = scenario(0)
    fixed = {"strategy": "zero3", "ranks": 2, "units": 2, "steps": 3, "microbatches": 1, "policy": "default", "rank": 1}
    return replace(s, **{**fixed, "kind": kind, "way": way, "step": 1, "where": 0, "in_backward": False, **fields})


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("nothing", "scheduled"),
        ("raises", "module"),
        pytest.param("raises", "scheduled", marks=pytest.mark.deep),
        pytest.param("dies", "scheduled", marks=pytest.mark.deep),
        pytest.param("another batch", "module", marks=pytest.mark.deep),
        pytest.param("a write in place", "scheduled", marks=pytest.mark.deep),
        pytest.param("another learning rate", "scheduled", marks=pytest.mark.deep),
    ],
)
def test_divergence_in_processes(kind, way):
    s = plain(kind, way)
    problem = judge(s, run_in_processes(s), meets=False)
    assert problem is None, replay(s, problem)


# What the harness is worth.


def test_a_seed_replays_exactly():
    for seed in range(5):
        first, second = run(scenario(seed)), run(scenario(seed))
        for a, b in zip(first, second, strict=True):
            assert str(a.error) == str(b.error)
            assert len(a.log) == len(b.log)
            assert all(map(torch.equal, a.log, b.log))


def test_seeds_come_to_every_kind_in_every_way():
    drawn = {(scenario(seed).kind, scenario(seed).way) for seed in range(1000)}
    assert drawn == {(kind, way) for kind, ways in KINDS.items() for way in ways}


def outcomes(s, **changes):
    """Those of the reference, some of them changed, by rank."""
    expected, _ = reference(s)
    return [changes.get(f"rank{r}", each) for r, each in enumerate(expected)]


def test_the_judge_passes_the_references_values_and_errors_of_all():
    s = plain("an equal copy")
    assert judge(s, outcomes(s)) is None
    failed = Outcome([], CommError("ranks differ"))
    assert judge(s, [failed] * 2) is None


def test_the_judge_refuses_what_must_not_be():
    s = plain("an equal copy")
    log, other = (each.log for each in reference(s)[0])
    wrong = [*log[:-1], log[-1] + 1e-6]
    failed = CommError("ranks differ")
    assert "should be" in judge(s, outcomes(s, rank0=Outcome(wrong, None)))
    assert "should be" in judge(s, [Outcome(wrong, failed)] * 2), "a value that was in hand before the error"
    assert "ranks [1] have errors, and [0] none" in judge(s, outcomes(s, rank1=Outcome(other, failed)))
    assert judge(s, outcomes(s, rank1=Outcome(other, failed)), meets=False) is None
    assert "says nothing to a user" in judge(s, [Outcome([], KeyError("x"))] * 2)
    late = CommError("simulate(): rank 1 has not come to an end in 40 s.")
    assert "rank 1 hangs" in judge(s, [Outcome([], failed), Outcome([], late)])
    assert "does anything different" in judge(plain("nothing"), [Outcome([], failed)] * 2)
    assert "there should be one on each" in judge(plain("raises"), [Outcome([], None)] * 2)
    assert judge(plain("raises"), [Outcome([], failed), Outcome([], Planted("rank 1 raises"))]) is None
