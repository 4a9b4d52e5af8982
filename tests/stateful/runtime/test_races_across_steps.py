"""Races between steps, and of trees that are no arguments: closures, arenas that grow, streams of the user, replaced states."""

from functools import partial

import optree
import torch

import fsharp as fs
from fsharp.testing import DebugPolicy, checking_races
from tests.gpt_like import loss_fn, make_params
from tests.scheduling import STRATEGIES, buffers, every, make_state, my_batches

TX = fs.optim.adamw(1e-2)


def on_streams(name, **policy):
    """A scheduler whose collectives run on one rank, on virtual streams."""
    axes = {axis: 1 for axis, _ in STRATEGIES[name][1].rules}
    return fs.Scheduler(fs.SingleComm(fs.Mesh(axes)), policy=DebugPolicy(**{"sum_late": False, "trivial_axes": True, **policy}))


def evaluate(params, batch, *, comm):
    with torch.no_grad():
        total, weight = loss_fn(params, batch, comm)
        return total / weight


def closure(scheduler, state, batches):
    """A tree that is no argument of the step: nobody knows of it before it is used."""
    held, train = [state], fs.train_step(loss_fn, TX)

    @scheduler
    def step(batch, *, comm):
        held[0], metrics = train(held[0], batch, comm)
        return metrics

    for batch in batches:
        step(batch)


def made_inside(scheduler, state, batches):
    @scheduler
    def evaluate_half(params, batch, *, comm):
        return evaluate(optree.tree_map(lambda x: x * 0.5, params), batch, comm=comm)

    for batch in batches:
        evaluate_half(state.params, batch)


def an_arena_that_grows(scheduler, large, batches):
    """A step that needs a larger arena comes right after one that has gathered what its next one begins with."""
    strategy = large.params["head"].unit.strategy
    small = make_state(scheduler.comm, strategy, tx=TX, params=make_params(layers=1))
    steps = [scheduler(fs.train_step(lambda *args: loss_fn(*args), TX)) for _ in range(2)]
    large, _ = steps[1](large, batches[0])
    for batch in batches:
        small, _ = steps[0](small, batch)
    before = len(scheduler.engine.steps.arena.memory)
    steps[1](large, batches[0])
    assert len(scheduler.engine.steps.arena.memory) > before


def looked_at_by_several_streams(scheduler, state, batches):
    step = scheduler(fs.train_step(loss_fn, TX))
    for batch in batches:
        state, _ = step(state, batch)
        with scheduler.engine.steps.executor.lanes.on_lane("the user's"):
            [buffer.sum() for buffer in buffers(state.params)]
        [buffer.sum() for buffer in buffers(state.params)]
        scheduler.engine.steps.executor.lanes.stream_wait_lanes("the user's")


def replaced(scheduler, state, batches, *, donate=False):
    """What the step has gathered ahead was of the old state, whose memory others get."""
    step = scheduler(fs.train_step(loss_fn, TX, donate=donate))
    for batch in batches:
        state, _ = step(state, batch)
        state = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
        noise = [torch.ones(n) for n in range(1, 400, 7)]
        assert noise


def evaluated_between(scheduler, state, batches):
    step, look, average = scheduler(fs.train_step(loss_fn, TX)), scheduler(evaluate), state.params
    for batch in batches:
        state, _ = step(state, batch)
        average = optree.tree_map(lambda mean, new: mean.lerp(new, 0.5), average, state.params)
        look(state.params, batch)
        look(average, batch)


PROGRAMS = {
    "a closure": closure,
    "a tree made inside": made_inside,
    "an arena that grows": an_arena_that_grows,
    "several streams look": looked_at_by_several_streams,
    "a state that is replaced": replaced,
    "a donated one": partial(replaced, donate=True),
    "evaluations between": evaluated_between,
}


@every(2, program=PROGRAMS, name=["zero1", "zero3", "hfsdp"])
def test_there_is_no_race(program, name):
    scheduler = on_streams(name)
    state = make_state(scheduler.comm, name, tx=TX)
    with checking_races(scheduler):
        PROGRAMS[program](scheduler, state, my_batches(scheduler.comm, 4))
