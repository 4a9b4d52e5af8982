"""Gradients at rest in real processes, where what is on its way arrives when it likes."""

from functools import partial

import pytest

import fsharp as fs
from fsharp.testing import DebugPolicy, processes
from tests.scheduling import DP, HYBRID, Program, assert_same, buffers, copied, full_params, make_state, my_batches
from tests.stateful.runtime.test_gradient_lifetimes import outlive
from tests.stateful.runtime.test_scheduler_departures import DEPARTED, off_the_plan
from tests.stateful.runtime.test_scheduler_rest import SCORED, explicit, scored

# In real processes, where what is on its way arrives when it likes


@pytest.fixture(scope="module")
def found():
    """What two processes find out, by either path, in one start of them."""

    def one_keeps(run, strategy, keeper):
        state, step, kept, seen = make_state(run.comm, strategy), run.wrap(explicit), [], []
        for i, batch in enumerate(my_batches(run.comm, 6)):
            state, loss, grads, _ = step(state, batch)
            seen.append([loss, *copied(grads)])
            if run.comm.rank == keeper and i != 3:
                kept.append([loss, *buffers(grads)])
            del grads, _
        return seen, kept, full_params(state, run.comm)

    def both(comm, program):
        return program(Program(comm)), program(Program(comm, fs.Scheduler(comm, policy=DebugPolicy(poison=True))))

    def rank_fn(comm):
        out = {}
        for strategy, keep in SCORED:
            out["scored", strategy] = both(comm, partial(scored, strategy=strategy, keep=keep))
        for strategy in ("zero1", "zero3"):
            out["one keeps", strategy] = both(comm, partial(one_keeps, strategy=strategy, keeper=1))
        for departure, strategy in DEPARTED.items():
            keep = len(departure) % 2 == 0
            out[departure] = both(comm, partial(off_the_plan, strategy=strategy, departure=departure, keep=keep))
        out["outlived"] = outlive(comm, again=True)
        return out

    return processes(DP, rank_fn)


@pytest.mark.parametrize("strategy", [strategy for strategy, _ in SCORED])
def test_a_forward_between_value_and_grad_and_update_in_processes(found, strategy):
    for result in found:
        assert_same(*result["scored", strategy])


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_one_rank_alone_may_keep_gradients(found, strategy):
    for rank, result in enumerate(found):
        assert_same(*result["one keeps", strategy])
        assert len(result["one keeps", strategy][1][1]) == 5 * rank


@pytest.mark.parametrize("departure", DEPARTED)
def test_a_step_that_leaves_the_plan_in_processes(found, departure):
    for result in found:
        assert_same(*result[departure])


def test_gradients_outlive_their_scheduler_in_processes(found):
    assert [result["outlived"] for result in found] == [(True, True)] * 2


@pytest.mark.deep
def test_a_forward_between_value_and_grad_and_update_in_four_processes():
    def rank_fn(comm):
        programs = [partial(scored, strategy=strategy, keep=True) for strategy in ("hsdp", "hfsdp")]
        return [
            (program(Program(comm)), program(Program(comm, fs.Scheduler(comm, policy=DebugPolicy(poison=True)))))
            for program in programs
        ]

    for result in processes(HYBRID, rank_fn):
        for want, got in result:
            assert_same(got, want)
