"""Gradients at rest, in the arena: a caller may keep them, for however long, and go where no plan has foreseen."""

from functools import partial

import optree
import pytest
import torch

import fsharp as fs
from benchmarks.memory import StorageTracker
from fsharp.errors import ScheduleError
from fsharp.stateful.transport.base import Work
from fsharp.stateful.transport.blocking import BlockingTransport
from fsharp.testing import DebugPolicy, simulate
from tests.gpt_like import in_order, loss_fn
from tests.ranks import on_ranks
from tests.scheduling import (
    DP,
    STRATEGIES,
    assert_same,
    buffers,
    copied,
    evaluate,
    every,
    full_params,
    make_state,
    make_tx,
    mesh_of,
    my_batches,
    run_both,
    turned,
)


def in_arena(scheduler, tensors):
    """How many of them, which are not empty, are in the scheduler's arena."""
    first, last = (
        scheduler.engine.steps.arena.memory.data_ptr(),
        scheduler.engine.steps.arena.memory.data_ptr() + len(scheduler.engine.steps.arena.memory),
    )
    found = [first <= x.data_ptr() < last for x in tensors if x.numel()]
    assert found
    return sum(found)


class Late(BlockingTransport):
    """What is sent is read, and what arrives is written, when it is waited for and no earlier: the latest that may be."""

    waits_on_host = True

    def gather_unpacked(self, *args):
        return Work(finish=lambda: BlockingTransport.gather_unpacked(self, *args))

    def reduce_scatter_unpacked(self, *args):
        return [Work(finish=lambda: BlockingTransport.reduce_scatter_unpacked(self, *args)[0].wait())]

    def all_to_all(self, *args):
        return Work(finish=lambda: BlockingTransport.all_to_all(self, *args))

    def all_reduce_unpacked(self, *args):
        return [Work(finish=lambda: BlockingTransport.all_reduce_unpacked(self, *args)[0].wait())]


def late(scheduler):
    """Have collectives be as late as may be."""
    scheduler.engine.steps.executor.transport = Late(scheduler.comm)


ARRIVALS = {"at once": lambda scheduler: None, "late": late}


def explicit(state, batch, comm, *, loss=loss_fn, donate=False, between=lambda params, batch, comm: None):
    """A step that returns its gradients, as they rest and as the optimizer has them."""
    value, grads = fs.value_and_grad(loss)(state.params, batch, comm=comm)
    between(state.params, batch, comm)
    reduced = fs.reduce_scatter(grads, comm=comm)
    metrics, averaged = fs.average(value, reduced, comm=comm)
    return fs.update(make_tx(), averaged, state, comm=comm, donate=donate), metrics.loss, grads, reduced


@every(
    18, strategy=STRATEGIES, policy=[{}, {"gather_at_start": False}, {"sum_late": False}, {"keep_gradients": True}], turn=[1, 2]
)
def test_train_steps_may_overwrite_gradients_at_rest_and_a_step_that_returns_them_may_not(strategy, policy, turn):
    """One scheduler has both, in turns. Under ddp and hsdp sums take the memory of gradients that nobody reads."""

    def program(run):
        state, seen, kept = make_state(run.comm, strategy), [], []
        returning, training = run.wrap(explicit), run.wrap(fs.train_step(loss_fn, make_tx(), microbatches=2))
        for i, batch in enumerate(my_batches(run.comm, 4 + turn)):
            if i // turn % 2:
                state, loss, *grads = returning(state, batch)
                seen.append([loss, *(copied(each) for each in grads)])
                kept.append(grads)
            else:
                state, metrics = training(state, batch)
                seen.append(metrics.loss)
        return seen, [[copied(each) for each in grads] for grads in kept], full_params(state, run.comm)

    run_both(program, mesh_of(strategy), **policy)


@every(
    27,
    strategy=turned(STRATEGIES, "zero3"),
    policy=[{}, {"gather_at_start": False}, {"sum_late": False}, {"keep_gradients": True}],
    which=["rest", "final", "one buffer"],
)
def test_gradients_stay_what_they_are_for_as_long_as_they_are_kept(strategy, policy, which):
    """What was noted of them at the time is the same at the end. After a step that keeps none the arena has them again."""

    def program(run):
        state, step, seen, kept = make_state(run.comm, strategy), run.wrap(explicit), [], []
        for i, batch in enumerate(my_batches(run.comm, 7)):
            state, loss, grads, reduced = step(state, batch)
            mine = {"rest": buffers(grads), "final": buffers(reduced), "one buffer": buffers(grads)[:1]}[which]
            seen.append([loss, *(x.clone() for x in mine)])
            kept.append([loss, *mine] if i not in (0, 3, 5) else seen[-1])
            del grads, reduced, mine
        assert_same(kept, seen)
        return kept, full_params(state, run.comm)

    assert run_both(program, mesh_of(strategy), **policy)[1][0].num_unscheduled_calls == 1


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hsdp"])
@on_ranks(mesh_of)
def test_what_leaves_a_step_is_not_in_the_arena(comm, strategy):
    """Gradients are there while the step runs; those that it returns have memory of their own, and the arena stays."""
    scheduler, within = fs.Scheduler(comm, policy=DebugPolicy(poison=True)), []

    def step(state, batch, comm):
        out = explicit(state, batch, comm)
        mine = [x for x in buffers(out[2]) if x.numel()]
        within.append(in_arena(scheduler, mine) / len(mine))
        return out

    state, call, after, arenas = make_state(comm, strategy), scheduler(step), [], set()
    for batch in my_batches(comm, 3):
        state, _, grads, _ = call(state, batch)
        after.append(in_arena(scheduler, buffers(grads)))
        arenas.add(scheduler.engine.steps.arena.memory.data_ptr())
        del grads, _
    assert within == [0, 1, 1]
    assert after == [0] * 3
    assert len(arenas) <= 2  # none before the first schedule


def test_a_view_of_a_gradient_that_is_held_beyond_its_step_is_refused():
    """The memory that it is in is others' then; a view cannot be moved, as the gradient itself is."""

    def rank_fn(comm, **policy):
        state, kept = make_state(comm, "zero3"), []
        step = fs.Scheduler(comm, **policy)(lambda state, batch, comm: look_at(explicit(state, batch, comm), kept))
        for batch in my_batches(comm, 3):
            state = step(state, batch)
        return kept

    def look_at(out, kept):
        kept.append(buffers(out[2])[1][1:3])
        return out[0]

    with pytest.raises(ScheduleError, match=r"a view of the gradient of unit '.*' is held beyond its step"):
        simulate(DP, rank_fn)
    assert all(len(kept) == 3 for kept in simulate(DP, partial(rank_fn, keep_gradients=True)))


def mixing(state, batch, comm, *, drop=False, second=loss_fn):
    """The first gradients are used after the second were made; perhaps some were made in between that nobody keeps."""
    flipped = {**batch, "x": batch["x"].flip(0)}
    loss, first = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
    if drop:
        fs.value_and_grad(loss_fn)(state.params, {**batch, "x": batch["x"] * 0}, comm=comm)
    _, others = fs.value_and_grad(second)(state.params, flipped, comm=comm)
    mixed = optree.tree_map(lambda a, b: a + 0.1 * b, first, others)
    metrics, averaged = fs.average(loss, fs.reduce_scatter(mixed, comm=comm), comm=comm)
    return fs.update(make_tx(), averaged, state, comm=comm), metrics.loss, first, others


@every(18, strategy=STRATEGIES, drop=(False, True), kept=("both", "the first alone"), arrival=ARRIVALS)
def test_gradients_of_two_losses(strategy, drop, kept, arrival):
    """Within a step, where the first of them are in the arena, and kept beyond it."""

    def program(run):
        state, step, seen = make_state(run.comm, strategy), run.wrap(partial(mixing, drop=drop)), []
        for i, batch in enumerate(my_batches(run.comm, 4)):
            state, loss, *grads = step(state, batch)
            if kept != "both":
                del grads[1:]
            seen.append([loss, *map(buffers if i > 2 or (i % 2 and kept != "both") else copied, grads)])
            del grads
        return seen, full_params(state, run.comm)

    run_both(program, mesh_of(strategy), change=ARRIVALS[arrival])


def partly(which):
    """A loss that uses some of the layers, and whose backward comes to some."""

    return lambda params, batch, comm: in_order(params, {**batch, "order": which}, comm)


@every(18, strategy=turned(STRATEGIES, "zero2"), reduced=(False, True), arrival=ARRIVALS)
def test_a_unit_that_only_the_second_of_two_losses_uses(strategy, reduced, arrival):
    """Its gradient is zero in the first, when nothing says yet where it will rest."""

    def step(state, batch, comm):
        loss, first = fs.value_and_grad(partly((0,)))(state.params, batch, comm=comm)
        here = fs.reduce_scatter(first, comm=comm) if reduced else first
        _, second = fs.value_and_grad(partly((0, 1, 2)))(state.params, batch, comm=comm)
        there = fs.reduce_scatter(second, comm=comm) if reduced else second
        mixed = optree.tree_map(lambda a, b: a + 0.1 * b, here, there)
        mixed = mixed if reduced else fs.reduce_scatter(mixed, comm=comm)
        metrics, averaged = fs.average(loss, mixed, comm=comm)
        return fs.update(make_tx(), averaged, state, comm=comm), metrics.loss, first, here, second, there

    def program(run):
        state, call, seen = make_state(run.comm, strategy), run.wrap(step), []
        for batch in my_batches(run.comm, 4):
            state, loss, *grads = call(state, batch)
            seen.append([loss, *map(copied, grads)])
            del grads
        return seen, full_params(state, run.comm)

    run_both(program, mesh_of(strategy), change=ARRIVALS[arrival])


SCORED = [("ddp", True), ("zero1", False), ("zero2", True), ("zero3", False)]


def step_with_score(state, batch, comm, *, microbatches=1):
    """The old parameters are looked at while the last of the gradients are on their way."""
    loss, grads = fs.value_and_grad(loss_fn, microbatches=microbatches)(state.params, batch, comm=comm)
    first = evaluate(state.params, batch, comm)
    reduced = fs.reduce_scatter(grads, comm=comm)
    second = evaluate(state.params, batch, comm)
    metrics, averaged = fs.average(loss, reduced, comm=comm)
    return fs.update(make_tx(), averaged, state, comm=comm), [metrics.loss, first, second], grads, reduced


def scored(run, strategy, *, keep, microbatches=1):
    state, seen = make_state(run.comm, strategy), []
    step = run.wrap(partial(step_with_score, microbatches=microbatches))
    for batch in my_batches(run.comm, 3):
        state, *rest = step(state, batch)
        seen.append([rest[0], *map(buffers if keep else copied, rest[1:])])
        del rest
    return seen, full_params(state, run.comm)


@every(
    48,
    strategy=turned(STRATEGIES, "hfsdp"),
    keep=(False, True),
    microbatches=(1, 2),
    policy=({}, {"prefetch": 2}),
    arrival=turned(ARRIVALS, "late"),
)
def test_a_forward_between_value_and_grad_and_update(strategy, keep, microbatches, policy, arrival):
    program = partial(scored, strategy=strategy, keep=keep, microbatches=microbatches)
    assert run_both(program, mesh_of(strategy), change=ARRIVALS[arrival], **policy)[1][0].num_unscheduled_calls == 1


@every(9, strategy=STRATEGIES, microbatches=(1, 2))
def test_keep_gradients(strategy, microbatches):
    """The same bits, and nothing of them in the arena."""

    def trained(comm, **policy):
        scheduler = fs.Scheduler(comm, policy=DebugPolicy(poison=True, **policy))
        state, step = make_state(comm, strategy), scheduler(partial(step_with_score, microbatches=microbatches))
        seen, found = [], []
        for batch in my_batches(comm, 3):
            state, values, *grads = step(state, batch)
            mine = buffers(grads[0])
            found.append(in_arena(scheduler, mine) / sum(x.numel() > 0 for x in mine))
            seen.append([values, *map(copied, grads)])
            del mine, grads
        return (seen, full_params(state, comm)), found, step.schedule

    kept, planned = (simulate(mesh_of(strategy), partial(trained, keep_gradients=keep)) for keep in (True, False))
    for (values, found, schedule), (others, found_there, planned_there) in zip(kept, planned, strict=True):
        assert_same(values, others)
        assert found == [0, 0, 0]
        assert found_there == [0, 0, 0]
        assert {facts.rest for facts in schedule.program.units} == {0}
        assert not any(op.opens for op in schedule.ops)
        assert any(op.opens for op in planned_there.ops)


@pytest.mark.parametrize("strategy", [fs.zero1, fs.zero3])
def test_gradients_of_their_own_take_no_memory_while_activations_do(strategy):
    """A step whose activations are larger than its gradients: the arena is there all the time, other memory comes and goes."""
    params = {"layers": [0.01 * torch.ones(64, 64) for _ in range(6)]}
    comm = fs.SingleComm(fs.Mesh({"dp": 1}))
    layout = fs.plan(params, comm.mesh, strategy("dp"), units="layers.*")

    def loss_fn(params, x, comm):
        for weight in params["layers"]:
            x = fs.forward(lambda w, x: torch.tanh(x @ w), weight, x, comm=comm)
        return x.square().mean()

    def peak_nbytes(keep):
        state = fs.init_state(make_tx(), fs.shard(params, layout, comm, place="optim"), comm=comm, donate=True)
        scheduler = fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True, keep_gradients=keep))
        step = scheduler(fs.train_step(loss_fn, make_tx(), donate=True))
        with StorageTracker() as tracker:
            for _ in range(3):
                tracker.peak_nbytes = 0
                state, _ = step(state, torch.ones(1024, 64))
        assert step.last_call_status().kind == "planned"
        return tracker.peak_nbytes

    assert peak_nbytes(False) - peak_nbytes(True) >= 0.6 * layout.nbytes("grads")
