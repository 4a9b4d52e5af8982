"""Gradients at rest in real processes, where what is on its way arrives when it likes."""

from functools import partial

import pytest

import fsharp as fs
from fsharp.testing import DebugPolicy, processes, simulate
from tests.scheduling import DP, HYBRID, Program, assert_same, buffers, copied, full_params, make_state, my_batches
from tests.stateful.runtime.test_gradient_lifetimes import outlive, without_collections
from tests.stateful.runtime.test_scheduler_departures import DEPARTED, off_the_plan
from tests.stateful.runtime.test_scheduler_rest import SCORED, explicit, scored

# In real processes, where what is on its way arrives when it likes


def one_keeps(run, strategy, keeper):
    """One rank keeps its gradients of all steps but one."""
    state, step, kept, seen = make_state(run.comm, strategy), run.wrap(explicit), [], []
    for i, batch in enumerate(my_batches(run.comm, 5)):
        state, loss, grads, _ = step(state, batch)
        seen.append([loss, *copied(grads)])
        if run.comm.rank == keeper and i != 3:
            kept.append([loss, *buffers(grads)])
        del grads, _
    return seen, kept, full_params(state, run.comm)


PROGRAMS = {("scored", strategy): partial(scored, strategy=strategy, keep=keep) for strategy, keep in SCORED}
PROGRAMS |= {("one keeps", name): partial(one_keeps, strategy=name, keeper=1) for name in ("zero1", "zero3")}
PROGRAMS |= {
    departure: partial(off_the_plan, strategy=strategy, departure=departure, keep=len(departure) % 2 == 0)
    for departure, strategy in DEPARTED.items()
}


def scheduled(comm):
    return Program(comm, fs.Scheduler(comm, policy=DebugPolicy(poison=True)))


@pytest.fixture(scope="module")
def found():
    """What programs come to in two processes, in one start of them, and beside it what they do by the blocking path."""

    def rank_fn(comm):
        results = {name: program(scheduled(comm)) for name, program in PROGRAMS.items()}
        with without_collections():
            return results, outlive(comm, again=True)

    expected = simulate(DP, lambda comm: {name: program(Program(comm)) for name, program in PROGRAMS.items()})
    return [
        {name: (want[name], got[name]) for name in PROGRAMS} | {"outlived": outlived}
        for want, (got, outlived) in zip(expected, processes(DP, rank_fn), strict=True)
    ]


@pytest.mark.parametrize("strategy", [strategy for strategy, _ in SCORED])
def test_a_forward_between_value_and_grad_and_update_in_processes(found, strategy):
    for result in found:
        assert_same(*result["scored", strategy])


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_one_rank_alone_may_keep_gradients(found, strategy):
    for rank, result in enumerate(found):
        assert_same(*result["one keeps", strategy])
        assert len(result["one keeps", strategy][1][1]) == 4 * rank


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
        return [(program(Program(comm)), program(scheduled(comm))) for program in programs]

    for result in processes(HYBRID, rank_fn):
        for want, got in result:
            assert_same(got, want)
