"""simulate with a seed: one rank at a time, in an order that the seed decides; and how ranks hear of one that has ended."""

import threading
import time
from collections import Counter

import pytest
import torch

import fsharp as fs
from fsharp.errors import CommError
from fsharp.testing import simulate
from fsharp.testing.simulated_ranks import Killed

DP3, GRID = fs.Mesh({"dp": 3}), fs.Mesh({"o": 2, "i": 2})
ONE = torch.ones(1)
FOR_EVER_S = 3600.0  # longer than a test may take: what waits for it fails


def order_of(seed, mesh=DP3):
    """In which order ranks came to each of their turns."""
    order = []

    def rank_fn(comm):
        for turn in range(4):
            order.append((comm.rank, turn))
            if turn % 2:
                comm.pause()
            else:
                comm.all_reduce(ONE, comm.mesh.names[turn % len(comm.mesh.names)])

    simulate(mesh, rank_fn, seed=seed)
    return tuple(order)


def test_a_seed_gives_the_same_order_each_time_and_seeds_give_many():
    orders = [order_of(seed) for seed in range(20)]
    assert orders == [order_of(seed) for seed in range(20)]
    assert len(set(orders)) >= 15
    assert order_of(3, GRID) == order_of(3, GRID)


def test_one_rank_runs_at_a_time():
    running = Counter()

    def rank_fn(comm):
        seen = []
        for _ in range(20):
            running["now"] += 1
            time.sleep(0.0005)  # gives up the interpreter's lock, not the turn
            seen.append(running["now"])
            running["now"] -= 1
            comm.pause()
        return seen

    assert simulate(DP3, rank_fn, seed=5) == [[1] * 20] * 3


def test_a_seed_does_not_change_values():
    def rank_fn(comm):
        x = torch.tensor([0.1 * comm.rank, 3.0])
        return [comm.all_reduce(x, "o").tolist(), comm.all_gather(x, "i").tolist()]

    expected = simulate(GRID, rank_fn)
    assert [simulate(GRID, rank_fn, seed=seed) for seed in range(5)] == [expected] * 5


def test_each_rank_has_an_error_of_its_own_if_calls_differ():
    errors = simulate(DP3, lambda comm: comm.all_gather(torch.ones(1 + comm.rank), "dp"), outcomes=True)
    notes = [[f"raised by rank {rank} of Mesh(dp=3) in simulate()"] for rank in range(3)]
    assert [error.__notes__ for error in errors] == notes


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_outcomes_are_each_ranks_own(seed):
    def rank_fn(comm):
        comm.all_gather(ONE, "dp", label="first")
        if comm.rank == 1:
            raise ZeroDivisionError("of 1")
        comm.all_gather(ONE, "dp", label="second")

    first, second, third = simulate(DP3, rank_fn, seed=seed, outcomes=True)
    assert isinstance(second, ZeroDivisionError)
    for rank, error in ((0, first), (2, third)):
        assert isinstance(error, CommError)
        assert error.__notes__ == [f"raised by rank {rank} of Mesh(dp=3) in simulate()"]
        assert "rank 1  nothing, it has failed with ZeroDivisionError: of 1, after all_gather" in str(error) or (
            "is gone; all_gather along 'dp' of float32[1] for 'second'" in str(error)  # the other one of these two ranks
        )


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_a_rank_that_died_is_named_with_what_needed_it(seed):
    unwound = []

    def rank_fn(comm):
        comm.all_gather(ONE, "dp", label="step 0")
        try:
            if comm.rank == 2:
                comm.simulate_death()
            comm.all_gather(ONE, "dp", label="step 1")
        finally:
            unwound.append(comm.rank)

    found = simulate(DP3, rank_fn, seed=seed, outcomes=True)
    assert isinstance(found[2], Killed)
    assert str(found[2]) == "simulate(): rank 2 has died"
    assert unwound[-1] == 2, "nothing of a dead rank runs while others do"
    assert any("rank 2 is gone; all_gather along 'dp' of float32[1] for 'step 1', number 1" in str(e) for e in found[:2])
    for error in found[:2]:
        assert isinstance(error, CommError)
        assert "rank 2  nothing, it has died, after all_gather along 'dp' of float32[1] for 'step 0'" in str(error)
    with pytest.raises(CommError, match="rank 2"):
        simulate(DP3, rank_fn, seed=seed)


def test_what_a_dead_rank_calls_while_it_unwinds_reaches_nobody():
    def rank_fn(comm):
        try:
            comm.simulate_death() if comm.rank else None
        finally:
            comm.all_gather(ONE, "dp")

    found = simulate(fs.Mesh({"dp": 2}), rank_fn, outcomes=True)
    assert isinstance(found[0], CommError)
    assert "rank 1 has died, and takes part in nothing more" in str(found[1])


def test_a_death_that_nobody_notices_is_no_success():
    with pytest.raises(CommError, match="rank 1 has died"):
        simulate(DP3, lambda comm: comm.simulate_death() if comm.rank == 1 else None)


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_a_rank_that_stalls_is_found_within_the_limit(seed):
    def rank_fn(comm):
        if comm.rank == 0:
            comm.simulate_stall()
        comm.all_gather(ONE, "dp")

    found = simulate(DP3, rank_fn, seed=seed, timeout=0.5 if seed is None else FOR_EVER_S, outcomes=True)
    assert str(found[0]) == "simulate(): rank 0 has stalled"
    for error in found[1:]:
        assert isinstance(error, CommError)
        assert "rank 0  nothing, it has stalled" in str(error)
    if seed is not None:
        assert "rank 0 did not come" in str(found[1])


@pytest.mark.parametrize("seed", [None, 3])
def test_a_rank_that_computes_for_ever_is_given_up(seed):
    def rank_fn(comm):
        if comm.rank == 0:
            is_over.wait()
        comm.all_gather(ONE, "dp")

    is_over = threading.Event()
    found = simulate(fs.Mesh({"dp": 2}), rank_fn, seed=seed, timeout=0.2, outcomes=True)
    is_over.set()
    assert isinstance(found[0], CommError)
    assert "rank 0 has not come to an end in 0.4 s" in str(found[0])
    assert isinstance(found[1], CommError)


def test_ranks_that_do_not_need_the_one_that_failed_go_on():
    def rank_fn(comm):
        if comm.rank == 0:
            raise ZeroDivisionError("of 0")
        return comm.all_reduce(ONE, "i").item() if comm.rank > 1 else None

    found = simulate(GRID, rank_fn, seed=0, outcomes=True)
    assert isinstance(found[0], ZeroDivisionError)
    assert found[1:] == [None, 2.0, 2.0]


def test_labels_are_compared_before_data_are_exchanged():
    def rank_fn(comm):
        return comm.all_reduce(ONE, "dp", label=f"train_step #{int(comm.rank == 2)}: gather layers.0")

    for error in simulate(DP3, rank_fn, seed=0, outcomes=True):
        assert isinstance(error, CommError)
        assert "rank 1  all_reduce sum along 'dp' of float32[1] for 'train_step #0: gather layers.0'" in str(error)
        assert "rank 2  all_reduce sum along 'dp' of float32[1] for 'train_step #1: gather layers.0'" in str(error)
