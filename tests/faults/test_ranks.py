"""Ranks of one host that are killed, that stop, or that leave before the others: the others hear of it in time, and end."""

import random
import re
import signal
import time

import pytest

from tests.faults.hosts import Job
from tests.faults.programs import leave, train
from tests.forked_python import forked

LIMIT_S = 6.0
NEVER_S = 3600.0  # a limit that no test reaches
MANY = 100_000  # steps: until something happens


@forked
def hit(tmp_path, sign, *, seed, way, limit_s):
    """Send a signal to one of three ranks at a random moment; which one, and how the others ended."""
    draw = random.Random(seed)
    victim = draw.randrange(3)
    with Job(tmp_path / "job", 3, train, limit_s=limit_s, way=way, steps=MANY) as job:
        job.wait_for_step(3)
        time.sleep(draw.random() * 0.2)
        job.send(victim, sign)
        return victim, job.ends([rank for rank in range(3) if rank != victim], within_s=60)


def assert_named(victim, ends, way):
    """With the rank that is gone, the collective, and the step where labels have one."""
    for end in ends:
        assert end.error in ("CommError", "AgreementError")
        assert re.search(rf"with rank {victim} in |which rank {victim} of the job hosts .* has ended", end.text), end.text
        assert re.search("gather|reduce|share|the loss of update", end.text), end.text
        if way != "blocking":
            assert re.search(r"step #\d+ after \d+ updates", end.text), end.text


@pytest.mark.parametrize(
    ("seed", "way"),
    [
        (0, "scheduled"),
        *(pytest.param(seed, "blocking" if seed % 3 else "module", marks=pytest.mark.deep) for seed in range(1, 10)),
        *(pytest.param(seed, "scheduled", marks=pytest.mark.deep) for seed in range(10, 21)),
    ],
)
def test_a_rank_that_is_killed_is_named_long_before_the_limit(seed, way, tmp_path):
    victim, ends = hit(tmp_path, signal.SIGKILL, seed=seed, way=way, limit_s=NEVER_S)
    assert_named(victim, ends, way)


@pytest.mark.deep
@pytest.mark.parametrize("way", ["scheduled", "blocking", "module"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_rank_that_stops_is_named_within_the_limit(seed, way, tmp_path):
    victim, ends = hit(tmp_path, signal.SIGSTOP, seed=seed, way=way, limit_s=LIMIT_S)
    for end in ends:
        named = (
            rf"(with|for) rank {victim} in |rank {victim} did not come|which rank {victim} of the job hosts .* does not answer"
        )
        assert re.search(named, end.text), end.text


@pytest.mark.parametrize(
    ("way", "leaves", "fails"),
    [
        ("scheduled", 0, False),
        ("blocking", 1, True),
        pytest.param("blocking", 0, False, marks=pytest.mark.deep),
        pytest.param("scheduled", 2, True, marks=pytest.mark.deep),
        pytest.param("module", 0, False, marks=pytest.mark.deep),
        pytest.param("module", 1, True, marks=pytest.mark.deep),
    ],
)
@forked
def test_a_rank_that_leaves_before_the_others_is_named(way, leaves, fails, tmp_path):
    with Job(tmp_path / "job", 3, leave, limit_s=NEVER_S, way=way, steps=MANY, leaves=leaves, fails=fails) as job:
        job.wait_for_step(3)
        job.fault()
        ends = job.ends(within_s=60)
    assert (ends[leaves].error, ends[leaves].exitcode) == ("ZeroDivisionError" if fails else "", 0)
    for rank in {0, 1, 2} - {leaves}:
        assert f"rank {leaves} has left the job, and others go on" in ends[rank].text
        assert f"rank {leaves}        its last collective was " in ends[rank].text
        assert ("no more data" in ends[rank].text) == fails
        if way != "blocking":
            assert re.search(r"its last collective was .*step #[23] after [23] updates", ends[rank].text), ends[rank].text
    assert max(end.ended_s for end in ends) < 25, "nobody waits for the 30 s that ranks have to leave without an error"
