"""Gradients at rest, in the arena: a caller may keep them, for however long, and go where no plan has foreseen."""

import gc
import time
from functools import partial

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import fsharp as fs
from fsharp.errors import ScheduleError
from fsharp.functional.comm.protocol import Comm
from fsharp.stateful.transport.base import Ticket
from fsharp.stateful.transport.blocking import Blocking
from fsharp.stateful.units import unit_state as copies
from fsharp.stateful.units.resting import storage_over as window_on
from fsharp.testing import processes, simulate
from tests.gpt_like import block, embed, head, logits, loss_fn, make_params
from tests.scheduling import (
    DP,
    HYBRID,
    ON_TWO_AXES,
    STRATEGIES,
    Program,
    assert_same,
    every,
    full_params,
    make_state,
    make_tx,
    my_batches,
    run_both,
)

DEEP = [pytest.param(name, marks=pytest.mark.deep) for name in ("zero2", "hfsdp", "mixed", "late")]
each_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "hsdp", *DEEP])


def mesh_of(strategy):
    return HYBRID if strategy in ON_TWO_AXES else DP


def buffers(tree):
    return [buffer for node in fs.units_of(tree) for buffer in node.buffers]


def copied(tree):
    return [buffer.clone() for buffer in buffers(tree)]


def in_arena(scheduler, tensors):
    """How many of them, which are not empty, are in the scheduler's arena."""
    first, last = scheduler.arena.data_ptr(), scheduler.arena.data_ptr() + len(scheduler.arena)
    found = [first <= x.data_ptr() < last for x in tensors if x.numel()]
    assert found
    return sum(found)


class Late(Blocking):
    """What is sent is read, and what arrives is written, when it is waited for and no earlier: the latest that may be."""

    is_async = True

    def gather(self, x, out, axis, *, label=""):
        return Ticket(then=lambda: Blocking.gather(self, x, out, axis, label=label))

    def reduce_scatter(self, x, axis, *, dtype, scratch, out=None, label=""):
        options = {"dtype": dtype, "scratch": scratch, "out": out, "label": label}
        return Ticket(then=lambda: Blocking.reduce_scatter(self, x, axis, **options).wait())

    def all_reduce(self, x, out, axis, *, scratch, label=""):
        held = {}

        def arrive():
            held["sum"] = torch.empty_like(out)
            Blocking.all_reduce(self, x, held["sum"], axis, scratch=scratch, label=label)
            return Ticket(then=lambda: out.copy_(held["sum"]))

        return Ticket(then=arrive)


def late(scheduler):
    scheduler.transport = scheduler.executor.transport = Late(scheduler.comm)
    return scheduler


def run_late(program, strategy, **policy):
    """``program(Program)`` by the blocking path and by a scheduler whose collectives are as late as may be."""

    def scheduled(comm: Comm):
        here = Program(comm, late(fs.Scheduler(comm, poison=True, **policy)))
        return program(here), here.scheduled

    expected = simulate(mesh_of(strategy), lambda comm: program(Program(comm)), timeout=20)
    found = simulate(mesh_of(strategy), scheduled, timeout=20)
    for want, (got, _) in zip(expected, found, strict=True):
        assert_same(got, want)
    return found[0]


# A caller who keeps what a step has handed out


def explicit(state, batch, comm, *, loss=loss_fn, donate=False, between=lambda params, batch, comm: None):
    """A step that returns its gradients, as they rest and as the optimizer has them."""
    value, grads = fs.value_and_grad(loss)(state.params, batch, comm=comm)
    between(state.params, batch, comm)
    reduced = fs.reduce_scatter(grads, comm=comm)
    metrics, averaged = fs.average(value, reduced, comm=comm)
    return fs.update(make_tx(), averaged, state, comm=comm, donate=donate), metrics.loss, grads, reduced


@each_strategy
@pytest.mark.parametrize(
    ("which", "policy"),
    [
        ("rest", {}),
        ("final", {}),
        ("one buffer", {}),
        ("rest", {"gather_at_start": False}),
        ("rest", {"sum_late": False}),
        ("rest", {"keep_gradients": True}),
    ],
    ids=str,
)
def test_gradients_stay_what_they_are_for_as_long_as_they_are_kept(strategy, policy, which):
    """What was noted of them at the time is the same at the end. After a step that keeps none the arena has them again."""

    def program(run):
        state, step, seen, kept = make_state(run.comm, strategy), run.wrap(explicit), [], []
        for i, batch in enumerate(my_batches(run.comm, 8)):
            state, loss, grads, reduced = step(state, batch)
            mine = {"rest": buffers(grads), "final": buffers(reduced), "one buffer": buffers(grads)[:1]}[which]
            seen.append([loss, *(x.clone() for x in mine)])
            kept.append([loss, *mine] if i not in (0, 3, 5) else seen[-1])
            del grads, reduced, mine
        assert_same(kept, seen)
        return kept, full_params(state, run.comm)

    assert run_both(program, mesh_of(strategy), **policy)[1][0].num_recordings == 1


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hsdp"])
def test_what_leaves_a_step_is_not_in_the_arena(strategy):
    """Gradients are there while the step runs; those that it returns have memory of their own, and the arena stays."""

    def rank_fn(comm):
        scheduler, within = fs.Scheduler(comm, poison=True), []

        def step(state, batch, comm):
            out = explicit(state, batch, comm)
            mine = [x for x in buffers(out[2]) if x.numel()]
            within.append(in_arena(scheduler, mine) / len(mine))
            return out

        state, call, after, arenas = make_state(comm, strategy), scheduler(step), [], set()
        for batch in my_batches(comm, 5):
            state, _, grads, _ = call(state, batch)
            after.append(in_arena(scheduler, buffers(grads)))
            arenas.add(scheduler.arena.data_ptr())
            del grads, _
        return within, after, len(arenas)

    for within, after, num_arenas in simulate(mesh_of(strategy), rank_fn):
        assert within == [0, 1, 1, 1, 1]
        assert after == [0] * 5
        assert num_arenas <= 2  # none before the first schedule


def test_gradients_kept_for_one_step_more():
    def program(run):
        state, step, seen, kept = make_state(run.comm, "zero3"), run.wrap(explicit), [], []
        for batch in my_batches(run.comm, 6):
            state, loss, grads, _ = step(state, batch)
            kept = [*kept[-1:], buffers(grads)]
            seen.append([loss, [[x.clone() for x in each] for each in kept]])
            del grads, _
        return seen, full_params(state, run.comm)

    run_both(program)


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


# Several value_and_grad in one function


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


@every(4, strategy=STRATEGIES, drop=(False, True))
def test_gradients_of_two_losses(strategy, drop):
    """Within a step, where the first of them are in the arena, and kept beyond it."""

    def program(run):
        state, step, kept = make_state(run.comm, strategy), run.wrap(partial(mixing, drop=drop)), []
        for i, batch in enumerate(my_batches(run.comm, 6)):
            state, *rest = step(state, batch)
            kept.append([rest[0], *map(copied if i < 4 else buffers, rest[1:])])
            del rest
        return kept, full_params(state, run.comm)

    run_both(program, mesh_of(strategy))
    run_late(program, strategy)


@each_strategy
@pytest.mark.parametrize("drop", [False, True])
def test_only_the_first_of_two_gradients_is_kept_beyond_the_step(strategy, drop):
    """It is in the arena, and what the unit had last is not."""

    def program(run):
        state, step, kept = make_state(run.comm, strategy), run.wrap(partial(mixing, drop=drop)), []
        for i, batch in enumerate(my_batches(run.comm, 6)):
            state, loss, first, _ = step(state, batch)
            kept.append([loss, buffers(first) if i % 2 else copied(first)])
            del first, _
        return kept, full_params(state, run.comm)

    run_both(program, mesh_of(strategy))


def partly(which):
    """A loss that uses some of the layers, and whose backward comes to some."""

    def loss(params, batch, comm):
        x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
        for i in which:
            x = fs.forward(block, params["layers"][i], x, comm=comm)
        return F.cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch["y"])

    return loss


@every(4, strategy=STRATEGIES, reduced=(False, True))
def test_a_unit_that_only_the_second_of_two_losses_uses(strategy, reduced):
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

    run_both(program, mesh_of(strategy))
    run_late(program, strategy)


# Between value_and_grad and update


def score(params, batch, comm):
    with torch.no_grad():
        return F.cross_entropy(logits(params, batch["x"], comm), batch["y"])


SCORED = [("ddp", True), ("zero1", False), ("zero2", True), ("zero3", False)]


def step_with_score(state, batch, comm, *, microbatches=1):
    """The old parameters are looked at while the last of the gradients are on their way."""
    loss, grads = fs.value_and_grad(loss_fn, microbatches=microbatches)(state.params, batch, comm=comm)
    first = score(state.params, batch, comm)
    reduced = fs.reduce_scatter(grads, comm=comm)
    second = score(state.params, batch, comm)
    metrics, averaged = fs.average(loss, reduced, comm=comm)
    return fs.update(make_tx(), averaged, state, comm=comm), [metrics.loss, first, second], grads, reduced


def scored(run, strategy, *, keep, microbatches=1):
    state, seen = make_state(run.comm, strategy), []
    step = run.wrap(partial(step_with_score, microbatches=microbatches))
    for batch in my_batches(run.comm, 5):
        state, *rest = step(state, batch)
        seen.append([rest[0], *map(buffers if keep else copied, rest[1:])])
        del rest
    return seen, full_params(state, run.comm)


@every(6, strategy=STRATEGIES, keep=(False, True), microbatches=(1, 2))
def test_a_forward_between_value_and_grad_and_update(strategy, keep, microbatches):
    program = partial(scored, strategy=strategy, keep=keep, microbatches=microbatches)
    assert run_both(program, mesh_of(strategy))[1][0].num_recordings == 1
    for policy in ({}, {"prefetch": 2, "reduce_buffers": 2}):
        run_late(program, strategy, **policy)


# Off the plan


def departing(state, batch, comm):
    """Off the plan in the forward (by ``order``), in the backward (``early``), or right after it (``extra``)."""
    early = batch.get("early")

    def loss(params, batch, comm):
        x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
        for i in batch["order"]:
            y = fs.forward(block, params["layers"][i], x, comm=comm)
            # Without gradient: in the backward this unit is not come back to, nor, for an early one, what is before it.
            x = y.detach() if early == i else y
        return F.cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch["y"])

    value, grads = fs.value_and_grad(loss)(state.params, batch, comm=comm)
    kept = copied(grads) if batch.get("look") else []
    extra = score(state.params, batch, comm) if batch.get("extra") else value.sum
    reduced = fs.reduce_scatter(grads, comm=comm)
    more = score(state.params, batch, comm) if batch.get("later") else value.sum
    metrics, averaged = fs.average(value, reduced, comm=comm)
    return fs.update(make_tx(), averaged, state, comm=comm), [metrics.loss, extra, more, kept], grads, reduced


DEPARTURES = {
    "in the forward": {"order": (0, 2, 1)},
    "other order": {"order": (2, 1, 0)},
    "shorter": {"order": (0, 1)},
    "longer": {"order": (0, 1, 2, 0)},
    "in the backward, early": {"early": 2},
    "in the backward": {"early": 1},
    "in the backward, late": {"early": 0},
    "after value_and_grad": {"extra": True},
    "after value_and_grad, looked at": {"extra": True, "look": True},
    "after reduce_scatter": {"later": True},
    "everywhere": {"early": 1, "extra": True, "later": True},
}
DEPARTED = list(DEPARTURES)[::2]
"""Those that processes are tried with."""


@every(4, strategy=("zero3", "hsdp"), departure=DEPARTURES, keep=(False, True))
def test_a_step_that_leaves_the_plan(strategy, departure, keep):
    """Once, in the middle of training; what it had handed out before or hands out after that stays as well."""
    leave_the_plan(strategy, departure, keep)


@pytest.mark.deep
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "hfsdp", "mixed"])
@pytest.mark.parametrize("departure", DEPARTURES)
@pytest.mark.parametrize("keep", [False, True])
def test_a_step_that_leaves_the_plan_of_other_strategies(strategy, departure, keep):
    leave_the_plan(strategy, departure, keep)


def leave_the_plan(strategy, departure, keep):
    def program(run):
        state, step, seen = make_state(run.comm, strategy), run.wrap(departing), []
        for i, batch in enumerate(my_batches(run.comm, 6)):
            state, *rest = step(state, {**batch, "order": (0, 1, 2), **(DEPARTURES[departure] if i == 3 else {})})
            seen.append([rest[0], *map(buffers if keep else copied, rest[1:])])
            del rest
        return seen, full_params(state, run.comm)

    assert run_both(program, mesh_of(strategy))[1][0].num_recordings == 3
    run_late(program, strategy, reduce_buffers=3 if keep else 1)


@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "ddp"])
def test_a_departure_with_a_unit_that_nobody_uses(strategy):
    """Its gradient, zero, is on its way to the optimizer all the same."""

    def program(run):
        state, step, seen = make_state(run.comm, strategy), run.wrap(departing), []
        for i, batch in enumerate(my_batches(run.comm, 5)):
            state, *rest = step(state, {**batch, "order": (0, 1), "extra": i == 3})
            seen.append([rest[0], *map(copied, rest[1:])])
            del rest
        return seen, full_params(state, run.comm)

    run_both(program, mesh_of(strategy))
    run_late(program, strategy)
    run_late(program, strategy, reduce_buffers=9)


# A backward after the gradients were handed out


def looking_back(state, batch, comm, *, unit):
    """A unit is used by itself first; its backward comes after value_and_grad, if it comes."""
    x = torch.ones(4, 6, requires_grad=True)
    y = fs.forward(block, state.params["layers"][unit], x, comm=comm)
    loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
    if batch["late"]:
        y.sum().backward()
    metrics, averaged = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
    return fs.update(make_tx(), averaged, state, comm=comm), metrics.loss, x.grad if batch["late"] else 0


def look_back(run, *, unit, late=(2,), strategy="zero3"):
    state, seen = make_state(run.comm, strategy, params=make_params(layers=6)), []
    step = run.wrap(partial(looking_back, unit=unit))
    for i, batch in enumerate(my_batches(run.comm, 4)):
        state, *rest = step(state, {**batch, "late": i in late})
        seen.append(rest)
    return seen, full_params(state, run.comm)


@pytest.mark.parametrize("unit", range(6))
def test_a_backward_that_comes_when_gradients_are_where_its_parameters_were(unit):
    """What callers hold of them has memory of its own by then."""
    run_both(partial(look_back, unit=unit), gather_at_start=False)  # what is carried is beside all gradients


@pytest.mark.parametrize("unit", [0, 2, 5])
@pytest.mark.parametrize("strategy", ["zero3", "zero3x2"])
def test_with_gradients_in_memory_of_their_own_a_late_backward_is_right(unit, strategy):
    program = partial(look_back, unit=unit, strategy=strategy)
    run_both(program, mesh_of(strategy), keep_gradients=True, gather_at_start=False)


@pytest.mark.parametrize("unit", [0, 2, 5])
def test_a_late_backward_that_was_recorded_is_planned(unit):
    """Then the unit's address is nobody else's."""
    assert run_both(partial(look_back, unit=unit, late=range(4)))[1][0].num_recordings == 1


def test_a_late_backward_where_gradients_are_reduced_once_a_step():
    run_both(partial(look_back, unit=2, late=range(4), strategy="hsdp"), HYBRID)


# Gradients in memory of their own


@every(4, strategy=STRATEGIES, microbatches=(1, 2))
def test_keep_gradients(strategy, microbatches):
    """The same bits, and nothing of them in the arena."""

    def trained(comm, **policy):
        scheduler = fs.Scheduler(comm, poison=True, **policy)
        state, step = make_state(comm, strategy), scheduler(partial(step_with_score, microbatches=microbatches))
        seen, found = [], []
        for batch in my_batches(comm, 4):
            state, values, *grads = step(state, batch)
            mine = buffers(grads[0])
            found.append(in_arena(scheduler, mine) / sum(x.numel() > 0 for x in mine))
            seen.append([values, *map(copied, grads)])
            del mine, grads
        return (seen, full_params(state, comm)), found, step.schedule

    kept, planned = (simulate(mesh_of(strategy), partial(trained, keep_gradients=keep)) for keep in (True, False))
    for (values, found, schedule), (others, found_there, planned_there) in zip(kept, planned, strict=True):
        assert_same(values, others)
        assert found == [0, 0, 0, 0]
        assert found_there == [0, 0, 0, 0]
        assert {facts.rest for facts in schedule.program.units} == {0}
        assert not any(op.opens for op in schedule.ops)
        assert any(op.opens for op in planned_there.ops)
    run_both(partial(scored, strategy=strategy, keep=True, microbatches=microbatches), mesh_of(strategy), keep_gradients=True)


# Parameters that look like those of before


def blind(monkeypatch):
    """Have all tensors be at one address, and of one version."""
    monkeypatch.setattr(copies, "stamp", lambda node: tuple((1, 0) for _ in node.raw_buffers))
    for module in ("scheduler", "executor", "eager", "step"):
        monkeypatch.setattr(f"fsharp.stateful.runtime.{module}.stamp", copies.stamp)


@pytest.mark.parametrize("strategy", ["zero3", "hfsdp", "zero3x2"])
@pytest.mark.parametrize("policy", [{}, {"prefetch": 2}], ids=str)
def test_what_was_gathered_of_parameters_that_are_gone_is_not_used(strategy, policy, monkeypatch):
    """Others have got their addresses, and versions count from 0: only that the memory was given up tells them apart."""
    blind(monkeypatch)

    def program(run):
        state, step, losses = make_state(run.comm, strategy), run.wrap(fs.train_step(loss_fn, make_tx())), []
        for i, batch in enumerate(my_batches(run.comm, 6)):
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
            del metrics
            if i in (1, 3):
                del state
                state = make_state(run.comm, strategy, params=make_params(i))
        return losses, full_params(state, run.comm)

    run_both(program, mesh_of(strategy), **policy)


def test_nor_where_the_parameters_are_no_argument(monkeypatch):
    blind(monkeypatch)

    def program(run):
        box = {"state": make_state(run.comm, "zero3")}

        def step(batch, comm):
            box["state"], metrics = fs.train_step(loss_fn, make_tx())(box["state"], batch, comm)
            return metrics.loss

        call, losses = run.wrap(step), []
        for i, batch in enumerate(my_batches(run.comm, 5)):
            losses.append(call(batch))
            if i in (1, 3):
                box.clear()
                box["state"] = make_state(run.comm, "zero3", params=make_params(i))
        return losses, full_params(box["state"], run.comm)

    run_both(program)


def test_nor_by_a_function_that_follows_no_plan(monkeypatch):
    blind(monkeypatch)

    def program(run):
        state, step, seen = make_state(run.comm, "zero3"), run.wrap(fs.train_step(loss_fn, make_tx())), []
        for i, batch in enumerate(my_batches(run.comm, 5)):
            state, metrics = step(state, batch)
            del metrics
            if i in (1, 3):
                del state
                state = make_state(run.comm, "zero3", params=make_params(i))
                seen.append(score(state.params, batch, run.engine))
        return seen, full_params(state, run.comm)

    run_both(program)


# Lifetimes


def gone(storage):
    """Whether memory is given back: at once, or when a thread that has sent from it is over with that."""
    return any(storage.expired() or time.sleep(0.01) for _ in range(200))


def outlive(comm, *, strategy="zero3", again):
    """Gradients, when their scheduler is gone; and whether their memory is there before and after they go too."""
    gc.collect()
    gc.disable()
    try:
        scheduler = fs.Scheduler(comm, poison=True)
        state, step = make_state(comm, strategy), scheduler(explicit)
        for batch in my_batches(comm, 3):
            grads = reduced = _ = None  # else they are held while the next ones are made
            state, _, grads, reduced = step(state, batch)
        kept, held = buffers(grads), copied(grads)
        assert in_arena(scheduler, kept) == 0
        arena = StorageWeakRef(scheduler.arena.untyped_storage())
        if again:  # the next step is elsewhere
            state, _, grads, reduced = step(state, my_batches(comm, 1)[0])
        del scheduler, step, grads, reduced
        [node.buffers for node in fs.units_of(state)]
        before = gone(arena)
        filler = [torch.full((1000,), float("nan")) for _ in range(100)]  # whoever gets the memory writes to it
        assert_same(kept, held)
        del kept, filler, _, state
        return before, gone(arena)
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", ["zero3", "ddp", "hsdp"])
@pytest.mark.parametrize("again", [False, True])
def test_gradients_outlive_their_scheduler(strategy, again):
    """They do not keep the arena."""
    results = simulate(mesh_of(strategy), partial(outlive, strategy=strategy, again=again))
    assert results == [(True, True)] * len(results)


# A gradient that is the parameter


class Itself(torch.autograd.Function):
    """``(w * x).sum(0)``, whose gradient by ``w`` is taken to be ``w``: the very tensor, which is in the arena."""

    @staticmethod
    def forward(ctx, w, x, way):
        ctx.save_for_backward(w)
        ctx.way = way
        return w.sum() * x

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return {"itself": w, "view": w.view_as(w), "detached": w.detach()}[ctx.way], grad, None


@each_strategy
@pytest.mark.parametrize(("way", "microbatches"), [("itself", 1), ("itself", 2), ("view", 1), ("detached", 2)])
def test_a_gradient_that_is_the_parameter(strategy, way, microbatches):
    """Parameters are let go of before their gradients are collected."""

    def odd(p, x):
        return Itself.apply(p["w"], block({**p, "w": p["w"].detach()}, x), way)

    def loss(params, batch, comm):
        x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
        for layer in params["layers"]:
            x = fs.forward(odd, layer, x, comm=comm)
        return F.cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch["y"])

    def program(run):
        state, seen = make_state(run.comm, strategy), []
        step = run.wrap(fs.train_step(loss, make_tx(), microbatches=microbatches))
        for batch in my_batches(run.comm, 4):
            state, metrics = step(state, batch)
            seen.append(metrics.loss)
        return seen, full_params(state, run.comm)

    assert run_both(program, mesh_of(strategy))[1][0].num_recordings == 1


# Windows


def test_a_window_is_the_same_bytes():
    memory = torch.zeros(256, dtype=torch.uint8)
    window = window_on(memory[64:192])
    assert window.data_ptr() == memory.data_ptr() + 64
    assert (len(window), window.dtype, window.storage_offset()) == (128, torch.uint8, 0)
    window[3], memory[70] = 7, 8
    assert (int(memory[67]), int(window[6])) == (7, 8)
    window.view(torch.float32).fill_(1.5)
    assert memory[64:192].view(torch.float32).tolist() == [1.5] * 32
    assert not memory[:64].any()
    assert not memory[192:].any()


def count(x):
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def test_a_window_counts_its_own_holders_only():
    memory = torch.zeros(256, dtype=torch.uint8)
    window = window_on(memory[64:192])
    alone = count(window)
    others = [memory[i:] for i in range(5)] + [window_on(memory[64:192])]
    assert count(window) == alone
    mine = [window[:4], window.view(torch.float32), window.data]
    assert count(window) == alone + len(mine)
    del mine, others
    assert count(window) == alone
    before = count(memory)
    assert count(memory) == before


def test_a_window_keeps_the_memory_and_lets_it_go():
    gc.collect()
    gc.disable()
    try:
        memory = torch.zeros(256, dtype=torch.uint8)
        whole = StorageWeakRef(memory.untyped_storage())
        window = window_on(memory[64:192])
        view = window.view(torch.float32)[3:]
        del memory, window
        assert not whole.expired()
        view.fill_(2)
        del view
        assert whole.expired()
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", ["zero3", "ddp", "hsdp"])
def test_empty_gradients_rest_as_well(strategy):
    """Units whose trained leaves have no elements."""
    params = {**make_params(layers=2), "none": {"w": torch.zeros(0, 3)}}

    def loss(params, batch, comm):
        out = logits(params, batch["x"], comm)
        return F.cross_entropy(out, batch["y"]) + fs.forward(lambda p: p["w"].sum(), params["none"], comm=comm)

    def program(run):
        state, seen = make_state(run.comm, strategy, params=params, units=["layers.*", "none"]), []
        step = run.wrap(partial(explicit, loss=loss))
        for batch in my_batches(run.comm, 3):
            state, value, *grads = step(state, batch)
            seen.append([value, *map(buffers, grads)])
        return seen, full_params(state, run.comm)

    run_both(program, mesh_of(strategy))


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
        policy = {"poison": True}
        return program(Program(comm)), program(Program(comm, fs.Scheduler(comm, **policy)))

    def off_the_plan(run, strategy, departure, keep):
        state, step, seen = make_state(run.comm, strategy), run.wrap(departing), []
        for i, batch in enumerate(my_batches(run.comm, 5)):
            state, *rest = step(state, {**batch, "order": (0, 1, 2), **(DEPARTURES[departure] if i == 3 else {})})
            seen.append([rest[0], *map(buffers if keep else copied, rest[1:])])
            del rest
        return seen, full_params(state, run.comm)

    def rank_fn(comm):
        out = {}
        for strategy, keep in SCORED:
            out["scored", strategy] = both(comm, partial(scored, strategy=strategy, keep=keep))
        for strategy in ("zero1", "zero3"):
            out["one keeps", strategy] = both(comm, partial(one_keeps, strategy=strategy, keeper=1))
            for departure in DEPARTED:
                out[departure, strategy] = both(
                    comm, partial(off_the_plan, strategy=strategy, departure=departure, keep=len(departure) % 2 == 0)
                )
        out["outlived"] = outlive(comm, again=True)
        return out

    return processes(DP, rank_fn, timeout=100)


@pytest.mark.parametrize("strategy", [strategy for strategy, _ in SCORED])
def test_a_forward_between_value_and_grad_and_update_in_processes(found, strategy):
    for result in found:
        assert_same(*result["scored", strategy])


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_one_rank_alone_may_keep_gradients(found, strategy):
    for rank, result in enumerate(found):
        assert_same(*result["one keeps", strategy])
        assert len(result["one keeps", strategy][1][1]) == 5 * rank


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("departure", DEPARTED)
def test_a_step_that_leaves_the_plan_in_processes(found, departure, strategy):
    for result in found:
        assert_same(*result[departure, strategy])


def test_gradients_outlive_their_scheduler_in_processes(found):
    assert [result["outlived"] for result in found] == [(True, True)] * 2


@pytest.mark.deep
def test_a_forward_between_value_and_grad_and_update_in_four_processes():
    def rank_fn(comm):
        programs = [partial(scored, strategy=strategy, keep=True) for strategy in ("hsdp", "hfsdp")]
        return [(program(Program(comm)), program(Program(comm, fs.Scheduler(comm, poison=True)))) for program in programs]

    for result in processes(HYBRID, rank_fn, timeout=100):
        for want, got in result:
            assert_same(got, want)
