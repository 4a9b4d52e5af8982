"""Programs in turns on one scheduler: each step gathers what it uses once, whichever comes next."""

from collections import Counter

import pytest
import torch

import fsharp as fs
from fsharp.functional.comm.protocol import Call
from fsharp.testing import DebugPolicy, simulate
from tests.gpt_like import block, embed, head, loss_fn
from tests.ranks import on_ranks
from tests.scheduling import DP, make_state, make_tx, my_batches

CALLS = 5
OF_THE_LOSS = Counter({Call("all_reduce", "dp", 16): 1})


def twice(params, batch, comm):
    """The head is used once more."""
    x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
    early = fs.forward(head, params["head"], x, comm=comm)
    for layer in params["layers"]:
        x = fs.forward(block, layer, x, comm=comm)
    return (early + fs.forward(head, params["head"], x, comm=comm)).square().mean()


def either(params, batch, comm):
    return (twice if batch["w"].sum() < 0 else loss_fn)(params, batch, comm)


def with_sign(batch, sign):
    return {**batch, "w": batch["w"].abs() * sign}


def run(comm, way, schedule):
    """Losses and parameters of two programs in turns; with a schedule, what each step has sent, and what it says."""
    counting = fs.collectives.CountingComm(comm)
    runner = fs.Scheduler(counting, policy=DebugPolicy(poison=True)) if schedule else None
    wrap = runner or (lambda fn: lambda state, batch: fn(state, batch, comm=counting))
    own = runner.comm if runner else counting
    first, second = make_state(own, "zero3"), make_state(own, "zero3")
    losses = (either, either) if way == "two programs" else (loss_fn, twice)
    steps = [wrap(fs.train_step(loss, make_tx(), donate=True)) for loss in dict.fromkeys(losses)]
    found, sent, planned = [], [], []
    for i, batch in enumerate(my_batches(comm, 2 * CALLS)):
        turn = i % 2
        step = steps[turn % len(steps)]
        before, schedule = Counter(counting.calls), step.schedule if runner else None
        if turn and way == "two models":
            second, metrics = step(second, batch)
        else:
            first, metrics = step(first, with_sign(batch, -1 if turn and way == "two programs" else 1))
        found.append(metrics.loss)
        if schedule is not None:
            sent.append(counting.calls - before)
            planned.append(schedule.collective_counts() + OF_THE_LOSS)
    found += [
        buffer.clone() for state in (first, second) for node in fs.layouts.units_of(state.params) for buffer in node.buffers
    ]
    return found, sent, planned


@pytest.mark.parametrize("way", ["two models", "two losses", "two programs"])
def test_programs_in_turns_send_nothing_in_vain(way):
    """What two steps in turns send is what their schedules say, and they have the bits of the blocking path."""
    blocking, scheduled = (simulate(DP, lambda comm, is_on=is_on: run(comm, way, is_on)) for is_on in (False, True))
    for (want, *_), (got, sent, planned) in zip(blocking, scheduled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        for k in (2, 4):
            assert sent[-k] + sent[1 - k] == planned[-k] + planned[1 - k]


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero1, fs.zero2, fs.zero3])
@on_ranks(DP)
def test_a_unit_of_nothing_is_in_no_plans_way(comm, strategy):
    tree = {"a": {"w": torch.ones(5, 5)}, "none": {"e": torch.empty(0)}}
    layout = fs.plan(tree, DP, strategy("dp"), units="*")

    def loss(params, x, comm):
        return fs.forward(lambda p, x: (x @ p["w"]).square().mean(), params["a"], x, comm=comm)

    tx = fs.optim.sgd(0.1)
    state = fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)
    step = fs.Scheduler(comm)(fs.train_step(loss, tx))
    kinds = []
    for _ in range(4):
        state, _ = step(state, torch.ones(2, 5))
        kinds.append(step.last_call_status().kind)
    assert kinds == ["recorded", "planned", "planned", "planned"]
