"""Races between steps, and of trees that are no arguments: closures, arenas that grow, streams of the user, replaced states."""

import optree
import pytest
import torch

import fsharp as fs
from fsharp.testing import DebugPolicy, checking_races
from tests.gpt_like import loss_fn, make_params
from tests.scheduling import STRATEGIES, make_state, my_batches

TX = fs.optim.adamw(1e-2)
each_sharded = pytest.mark.parametrize("name", ["zero1", "zero3", "hfsdp"])


def on_streams(name, **policy):
    """A scheduler whose collectives run on one rank, on virtual streams."""
    axes = {axis: 1 for axis, _ in STRATEGIES[name][1].rules}
    return fs.Scheduler(fs.SingleComm(fs.Mesh(axes)), policy=DebugPolicy(**{"sum_late": False, "trivial_axes": True, **policy}))


def evaluate(params, batch, *, comm):
    with torch.no_grad():
        total, weight = loss_fn(params, batch, comm)
        return total / weight


@each_sharded
def test_a_tree_of_a_closure(name):
    """It is no argument of the step: nobody knows of it before it is used."""
    scheduler = on_streams(name)
    state = make_state(scheduler.comm, name, tx=TX)
    held = [state]
    train = fs.train_step(loss_fn, TX)

    @scheduler
    def step(batch, *, comm):
        held[0], metrics = train(held[0], batch, comm)
        return metrics

    with checking_races(scheduler):
        for batch in my_batches(scheduler.comm, 4):
            step(batch)


@each_sharded
def test_a_tree_that_is_made_inside(name):
    scheduler = on_streams(name)
    state = make_state(scheduler.comm, name, tx=TX)

    @scheduler
    def evaluate_half(params, batch, *, comm):
        return evaluate(optree.tree_map(lambda x: x * 0.5, params), batch, comm=comm)

    with checking_races(scheduler):
        for batch in my_batches(scheduler.comm, 4):
            evaluate_half(state.params, batch)


@each_sharded
def test_an_arena_that_grows(name):
    """A step that needs a larger arena comes right after one that has gathered what its next one begins with."""
    scheduler = on_streams(name)
    small, large = (make_state(scheduler.comm, name, tx=TX, params=make_params(layers=n)) for n in (1, 3))
    steps = [scheduler(fs.train_step(lambda *args: loss_fn(*args), TX)) for _ in range(2)]
    with checking_races(scheduler):
        first, *batches, last = my_batches(scheduler.comm, 5)
        large, _ = steps[1](large, first)
        for batch in batches:
            small, _ = steps[0](small, batch)
        before = len(scheduler.arena.memory)
        steps[1](large, last)
        assert len(scheduler.arena.memory) > before


@each_sharded
def test_updated_parameters_are_looked_at_by_several_streams(name):
    scheduler = on_streams(name)
    state = make_state(scheduler.comm, name, tx=TX)
    step = scheduler(fs.train_step(loss_fn, TX))
    with checking_races(scheduler):
        for batch in my_batches(scheduler.comm, 3):
            state, _ = step(state, batch)
            with scheduler.lanes.on_lane("the user's"):
                [buffer.sum() for node in fs.layouts.units_of(state.params) for buffer in node.buffers]
            [buffer.sum() for node in fs.layouts.units_of(state.params) for buffer in node.buffers]
            scheduler.lanes.join_lanes("the user's")


@each_sharded
@pytest.mark.parametrize("donate", [False, True])
def test_a_state_that_is_replaced_between_steps(name, donate):
    """What the step has gathered ahead was of the old state, whose memory others get."""
    scheduler = on_streams(name)
    state = make_state(scheduler.comm, name, tx=TX)
    step = scheduler(fs.train_step(loss_fn, TX, donate=donate))
    with checking_races(scheduler):
        for batch in my_batches(scheduler.comm, 4):
            state, _ = step(state, batch)
            state = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
            del batch
            noise = [torch.ones(n) for n in range(1, 400, 7)]
            assert noise


@each_sharded
def test_evaluations_between(name):
    scheduler = on_streams(name)
    state = make_state(scheduler.comm, name, tx=TX)
    step, look = scheduler(fs.train_step(loss_fn, TX)), scheduler(evaluate)
    average = state.params
    with checking_races(scheduler):
        for batch in my_batches(scheduler.comm, 4):
            state, _ = step(state, batch)
            average = optree.tree_map(lambda mean, new: mean.lerp(new, 0.5), average, state.params)
            look(state.params, batch)
            look(average, batch)
