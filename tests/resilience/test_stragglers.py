"""A slow rank is named, though all steps take as long on all ranks."""

import logging
import time

import pytest
import torch

import fsharp as fs
from fsharp.errors import RunError
from fsharp.resilience import StragglerDetector
from fsharp.testing import processes

DP2, DP3 = fs.Mesh({"dp": 2}), fs.Mesh({"dp": 3})


def detector_of(own_s, every=5, error_s=0.0, **options):
    """A detector that is told of three ranks' times, without ranks."""
    detector = StragglerDetector(fs.SingleComm(), every=every, **options)
    for i, times in enumerate(own_s):
        detector._compare(fs.resilience.StepTimes(every * (i + 1), times, (error_s,) * len(times)))
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
        f"rank 1 is a straggler: up to step {step} a step takes it 2 s of its own, 2.00 times the median of all ranks"
        for step in (10, 35)
    ]
    assert [times.step for times in detector.times] == list(range(5, 45, 5))


def slow_rank_is_named(comm):
    """Steps whose compute takes 20 ms, and 28 ms on one rank; whether and when it is named, and what ranks exchange for it."""
    counting = fs.collectives.CountingComm(comm)
    detector, named, cost_s = StragglerDetector(counting), None, 0.0
    since = time.perf_counter()
    for step in range(1, 21):
        time.sleep(0.028 if comm.rank == 1 else 0.020)
        comm.all_reduce(torch.ones(10), "dp")
        before = time.perf_counter(), detector._ranks.waited_s
        detector.end_step(step)
        cost_s += time.perf_counter() - before[0] - (detector._ranks.waited_s - before[1])
        if named is None and detector.stragglers:
            named = step
    calls = counting.calls
    return (
        named,
        detector.stragglers,
        {(call.op, call.nbytes): n for call, n in calls.items()},
        cost_s,
        time.perf_counter() - since,
    )


def test_a_rank_1_4_times_as_slow_is_named_within_20_steps():
    for named, stragglers, calls, _, _ in processes(DP3, slow_rank_is_named):
        assert named == 20
        assert list(stragglers) == [1]
        assert 1.2 < stragglers[1] < 1.7
        assert calls == {("all_gather", 32): 2}  # 16 bytes to each of two ranks, every tenth step


def test_what_the_saver_waits_for_is_not_taken_for_a_wait(tmp_path):
    def rank_fn(comm):
        ranks = comm.watch.ranks
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
