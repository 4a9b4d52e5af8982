"""A slow rank is named, though all steps take as long on all ranks."""

import logging
import sys
import time
from functools import partial

import pytest
import torch

import fsharp as fs
from fsharp.errors import RunError
from fsharp.resilience import StragglerDetector
from fsharp.testing import processes

DP2, DP3 = fs.Mesh({"dp": 2}), fs.Mesh({"dp": 3})


def detector_of(own_s, error_s=0.0):
    """A detector that is told of three ranks' times, without ranks."""
    detector = StragglerDetector(fs.SingleComm(), every=5)
    for i, times in enumerate(own_s):
        detector._update_stragglers(fs.resilience.TimesByRank(5 * (i + 1), times, (error_s,) * len(times)))
    return detector


@pytest.mark.parametrize(
    ("own_s", "expected"),
    [
        ([(1.0, 1.4, 1.0), (1.0, 1.4, 1.0)], {1: 1.4}),
        ([(1.0, 1.4), (1.0, 1.4)], {1: 1.4}),  # of two ranks the mean would be 1.2
        ([(1.0, 1.2, 1.0), (1.0, 1.2, 1.0)], {}),
        ([(1.0, 9.0, 1.0), (1.0, 1.0, 9.0)], {}),  # once is noise
        ([(1.0, 9.0, 1.0), (1.0, 9.0, 1.0), (1.0, 1.0, 1.0)], {}),  # it is over
        ([(9.0, 1.0, 1.0, 9.0), (9.0, 1.0, 1.0, 9.0)], {0: 9.0, 3: 9.0}),
        ([(0.0, 0.0), (0.0, 0.0)], {}),
        ([(1.0,), (5.0,)], {}),
    ],
)
def test_slower_than_the_median_twice_in_succession(own_s, expected):
    assert detector_of(own_s).stragglers == pytest.approx(expected)


def test_what_varies_by_itself_is_no_straggler():
    assert detector_of([(1.0, 1.4, 1.0)] * 2, error_s=0.1).stragglers == pytest.approx({1: 1.4})
    assert detector_of([(1.0, 1.4, 1.0)] * 2, error_s=0.2).stragglers == {}


def test_it_is_said_once_and_again_after_it_was_over(caplog):
    slow, even = (1.0, 2.0), (1.0, 1.0)
    with caplog.at_level(logging.WARNING, "fsharp"):
        detector = detector_of([slow] * 4 + [even] + [slow] * 3)
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 1 is a straggler: up to step {step} a step takes it 2 s of its own, 2.00 times the lower median of ranks"
        for step in (10, 35)
    ]
    assert [times.step for times in detector.times] == list(range(5, 45, 5))


class Clock:
    """A clock for which computing takes no time but what is said, and waiting for collectives as long as for any."""

    def __init__(self, ranks):
        self.ranks, self.compute_s = ranks, 0.0

    def perf_counter(self):
        return self.compute_s + self.ranks.waited_s


def slow_rank_is_named(comm, *, is_exact):
    """Steps whose compute takes 20 ms, and 28 ms on one rank; whether and when it is named, and what ranks exchange for it."""
    counting, clock = fs.collectives.CountingComm(comm), Clock(comm.watch.statuses)
    if is_exact:
        sys.modules[StragglerDetector.__module__].time = clock
    detector, named = StragglerDetector(counting), None
    for step in range(1, 21):
        seconds = 0.028 if comm.rank == 1 else 0.020
        time.sleep(seconds)
        clock.compute_s += seconds
        comm.all_reduce(torch.ones(10), "dp")
        detector.end_step(step)
        if named is None and detector.stragglers:
            named = step
    return named, detector.stragglers, {(call.op, call.nbytes): n for call, n in counting.calls.items()}


@pytest.mark.parametrize(
    "is_exact", [True, pytest.param(False, marks=pytest.mark.deep)], ids=["by a clock of ours", "by that of the machine"]
)
def test_a_rank_1_4_times_as_slow_is_named_within_20_steps(is_exact):
    for named, stragglers, calls in processes(DP3, partial(slow_rank_is_named, is_exact=is_exact)):
        assert named == 20
        assert list(stragglers) == [1]
        assert stragglers[1] == pytest.approx(1.4, rel=1e-6 if is_exact else 0.2)
        assert calls == {("all_gather", 32): 2}  # 16 bytes to each of two ranks, every tenth step


def test_what_the_saver_waits_for_is_not_taken_for_a_wait(tmp_path):
    def rank_fn(comm):
        ranks = comm.watch.statuses
        with fs.checkpoint.Saver(tmp_path, comm) as saver:
            saver.save({"x": torch.ones(3)}, step=1)
            before = ranks.waited_s
            while saver.is_busy:
                time.sleep(0.01)
            return ranks.waited_s - before

    assert processes(DP2, rank_fn) == [0.0, 0.0]


@pytest.mark.parametrize(("options", "match"), [({"every": 0}, "every is 0"), ({"ratio": 1.0}, r"ratio is 1\.0")])
def test_arguments_that_are_refused(options, match):
    with pytest.raises(RunError, match=match):
        StragglerDetector(fs.SingleComm(), **options)
