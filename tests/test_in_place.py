"""Gradients that are collected where the optimizer has them, and summed over ranks there: nothing of them is copied."""

from functools import partial

import optree
import pytest
import torch
import torch.nn.functional as F

import fsharp as fs
from fsharp.functional.errors import LossError, ScheduleError
from fsharp.stateful.schedule.program import Event, is_used_once
from fsharp.testing import processes, simulate
from tests.gpt_like import block, embed, head, loss_fn, make_params
from tests.scheduling import DP, Program, assert_same, full_params, make_state, make_tx, my_batches, run_both, train

ODD = 1
AGAIN = [f"again {strategy}" for strategy in ("ddp", "zero1", "zero3")]


def gradients_of(scheduler):
    return [unit.gradient for unit in scheduler.units.values() if unit.gradient is not None]


def step_of(loss, *, averaged=True, microbatches=1, look=lambda grads, number: None):
    """A step like ``train_step``; ``look`` gets the gradients before they are reduced, and the number of the step."""
    number = [0]

    def step(state, batch, comm):
        number[0] += 1
        found = fs.value_and_grad(partial(loss, number[0]), microbatches=microbatches, averaged=averaged)
        value, grads = found(state.params, batch, comm=comm)
        look(grads, number[0])
        metrics, grads = fs.average(value, fs.reduce_scatter(grads, comm=comm), comm=comm, donate=True)
        return fs.update(make_tx(), grads, state, comm=comm, donate=True), metrics

    return step


def plain(number, params, batch, comm):
    return loss_fn(params, batch, comm)


def trained(run, step, *, strategy="ddp", steps=6):
    state, losses = make_state(run.comm, strategy), []
    call = run.wrap(step)
    for batch in my_batches(run.comm, steps):
        state, metrics = call(state, batch)
        losses.append(metrics.loss)
    return losses, full_params(state, run.comm)


def scored(params, batch, comm, layers):
    """The model with these of its layers, in this order."""
    x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
    for i in layers:
        x = fs.forward(block, params["layers"][i], x, comm=comm)
    losses = F.cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch["y"], reduction="none")
    return (losses * batch["w"]).sum(), batch["w"].sum()


def dynamic(what, number, params, batch, comm):
    """Every third step is not like the others."""
    odd = number % 3 == ODD and number > 1
    if what == "a unit twice" and odd:
        return scored(params, batch, comm, [0, 1, 1, 2])
    if what == "a unit less" and odd:
        return scored(params, batch, comm, [0, 2])
    if what == "another order" and odd:
        return scored(params, batch, comm, [2, 1, 0])
    total, weight = scored(params, batch, comm, [0, 1, 2])
    if what == "a gather in the loss" and odd:
        total = total + sum(leaf.sum() for leaf in optree.tree_leaves(fs.gather(params["layers"][1], comm=comm).tree()))
    return total, weight


@pytest.mark.parametrize("what", ["nothing", "a unit twice", "a unit less", "another order", "a gather in the loss"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_steps_that_leave_the_plan(what, microbatches):
    """Whatever comes in a step that had been planned otherwise, it comes to the same bits."""
    step = partial(step_of, partial(dynamic, what), microbatches=microbatches)
    run_both(lambda run: trained(run, step(), steps=8))


def test_gradients_have_one_buffer_of_each_unit():
    def rank_fn(comm):
        found = {}
        for averaged in (True, False):
            scheduler = fs.Scheduler(comm, poison=True)
            run = Program(comm, scheduler)
            trained(run, step_of(plain, averaged=averaged))
            gradients = gradients_of(scheduler)
            assert all(gradient.in_place is averaged for gradient in gradients)
            assert all(gradient.rest._memory is None for gradient in gradients) is averaged
            found[averaged] = run.scheduled[0].schedule.arena, sum(gradient.final.nbytes for gradient in gradients)
        return found

    for found in simulate(DP, rank_fn, timeout=20):
        assert found[True][0] == 0
        assert found[False] == (found[True][1], found[True][1])


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_only_what_is_all_reduced_stays_in_its_place(strategy):
    def rank_fn(comm):
        scheduler = fs.Scheduler(comm, poison=True)
        trained(Program(comm, scheduler), step_of(plain), strategy=strategy)
        return [gradient.in_place for gradient in gradients_of(scheduler)]

    assert not any(any(found) for found in simulate(DP, rank_fn, timeout=20))


def test_with_several_microbatches_they_rest():
    def rank_fn(comm):
        scheduler = fs.Scheduler(comm, poison=True)
        run = Program(comm, scheduler)
        trained(run, step_of(plain, microbatches=2))
        return [gradient.in_place for gradient in gradients_of(scheduler)], run.scheduled[0].schedule.arena

    for found, arena in simulate(DP, rank_fn, timeout=20):
        assert not any(found)
        assert arena > 0


def looks(grads, number):
    if number > 2:
        _ = [buffer.sum() for node in fs.units_of(grads) for buffer in node.buffers]


def test_looking_at_promised_gradients_is_refused():
    def rank_fn(comm):
        with pytest.raises(LossError, match=r"this rank's part of the gradient of unit '.*' was looked at"):
            trained(Program(comm, fs.Scheduler(comm)), step_of(plain, look=looks))

    simulate(DP, rank_fn, timeout=20)
    run_both(lambda run: trained(run, step_of(plain, averaged=False, look=looks)))


def reduced(times):
    """A step that reduces its gradients as many times as the next number says."""

    def step(state, batch, comm):
        _, grads = fs.value_and_grad(loss_fn, averaged=True)(state.params, batch, comm=comm)
        found = [fs.reduce_scatter(grads, comm=comm) for _ in range(next(times))]
        return [x.clone() for tree in found for node in fs.units_of(tree) for x in node.buffers]

    return step


def test_reducing_promised_gradients_twice_is_refused():
    def rank_fn(comm):
        state, scheduler = make_state(comm, "ddp"), fs.Scheduler(comm)
        call, batches = scheduler(reduced(iter([1, 2]))), my_batches(comm, 3)
        call(state, batches[0])
        with pytest.raises(ScheduleError, match=r"unit '.*': its gradient is being summed .* Leave out averaged=True"):
            call(state, batches[1])

    simulate(DP, rank_fn, timeout=20)


def test_a_step_that_always_reduces_them_twice():
    def program(run):
        state, call = make_state(run.comm, "ddp"), run.wrap(reduced(iter([2] * 4)))
        return [call(state, batch) for batch in my_batches(run.comm, 4)]

    run_both(program)


def test_gradients_that_are_reduced_by_parts():
    def step(state, batch, comm):
        loss, grads = fs.value_and_grad(loss_fn, averaged=True)(state.params, batch, comm=comm)
        grads = {name: fs.reduce_scatter(part, comm=comm) for name, part in grads.items()}
        metrics, grads = fs.average(loss, grads, comm=comm, donate=True)
        return fs.update(make_tx(), grads, state, comm=comm, donate=True), metrics

    run_both(lambda run: trained(run, step))


def taking_again(averaged, *, keep):
    """A step that every third time takes gradients again, of another batch, when the reductions of the first have begun."""
    number = [0]

    def step(state, batch, comm):
        number[0] += 1
        loss, grads = fs.value_and_grad(loss_fn, averaged=averaged)(state.params, batch, comm=comm)
        if number[0] % 3 == 0:
            kept = grads if keep else None
            grads = None
            half = optree.tree_map(lambda x: x[: len(x) // 2], batch)
            loss, grads = fs.value_and_grad(loss_fn, averaged=averaged)(state.params, half, comm=comm)
            del kept
        metrics, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm, donate=True)
        return fs.update(make_tx(), grads, state, comm=comm, donate=True), metrics

    return step


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_gradients_that_are_taken_again(strategy, averaged, keep):
    run_both(lambda run: trained(run, taking_again(averaged, keep=keep), strategy=strategy, steps=8))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_two_trees_with_the_same_names(strategy):
    def loss(params, batch, comm):
        first, weight = scored(params[0], batch, comm, [0, 1, 2])
        second, _ = scored(params[1], batch, comm, [2, 1, 0])
        return first + 0.5 * second, weight

    def step(states, batch, comm):
        trees = tuple(state.params for state in states)
        value, grads = fs.value_and_grad(loss, averaged=True)(trees, batch, comm=comm)
        metrics, grads = fs.average(value, fs.reduce_scatter(grads, comm=comm), comm=comm, donate=True)
        new = [fs.update(make_tx(), g, state, comm=comm, donate=True) for g, state in zip(grads, states, strict=True)]
        return new, metrics

    def program(run):
        states = [make_state(run.comm, strategy, params=make_params(seed, layers=3)) for seed in (0, 1)]
        call, losses = run.wrap(step), []
        for batch in my_batches(run.comm, 5):
            states, metrics = call(states, batch)
            losses.append(metrics.loss)
        return losses, [full_params(state, run.comm) for state in states]

    run_both(program)


def test_one_gradient_more_than_planned_is_refused_once_the_first_has_left():
    def rank_fn(comm):
        scheduler = fs.Scheduler(comm)
        trained(Program(comm, scheduler), step_of(plain), steps=2)
        gradient = gradients_of(scheduler)[0]
        gradient.begin(None, in_place=True)
        ones = [torch.ones(leaf.shape) for leaf in gradient.leaves]
        for _ in range(2):  # as long as nothing has left they are added
            gradient.cast(ones, None, first=True)
        assert all(torch.equal(leaf, 2 * one) for leaf, one in zip(gradient.final.leaves, ones, strict=True))
        gradient.finish([[torch.empty(0), torch.empty(0, dtype=torch.uint8)] for _ in gradient.finishes])
        gradient.land_finish()
        for add in (lambda: gradient.cast(ones, None, first=True), lambda: gradient.add(gradient.final.tensors)):
            with pytest.raises(ScheduleError, match="one more was to be added"):
                add()
        assert all(torch.equal(leaf, 4 * one) for leaf, one in zip(gradient.final.leaves, ones, strict=True))

    simulate(DP, rank_fn, timeout=20)


def test_what_counts_as_used_once():
    one = [Event("forward", "a", 0), Event("forward_end", "a", 0), Event("backward", "a", 0), Event("backward_end", "a", 0)]
    end = [Event("microbatch_end"), Event("reduce"), Event("update")]
    assert not is_used_once([*one, end[0], Event("move"), *end[1:]], "a")  # something else is reduced
    assert not is_used_once([*one, *end[:2], *end[1:]], "a")  # reduced twice
    assert is_used_once([*one, *end], "a")
    assert not is_used_once([*one, *end], "b")
    assert not is_used_once([*one, *end[:1], *end], "a")  # two microbatches
    assert not is_used_once([*one[:2], *one, *end], "a")  # one more use, without a backward
    assert not is_used_once([*one, *one[2:], *end], "a")  # two backwards


IN_PROCESSES = [{}, {"separate_groups": False}]


@pytest.fixture(scope="module")
def found():
    """Steps by two gloo processes, blocking and scheduled."""

    def rank_fn(comm):
        out = {}
        for what in ("nothing", "a unit twice", "a gather in the loss"):
            runs = Program(comm), Program(comm, fs.Scheduler(comm, poison=True))
            out[what] = [trained(run, step_of(partial(dynamic, what))) for run in runs]
        for strategy in ("ddp", "zero1", "zero3"):
            runs = Program(comm), Program(comm, fs.Scheduler(comm, poison=True))
            out[f"again {strategy}"] = [trained(run, taking_again(True, keep=False), strategy=strategy) for run in runs]
        for policy in IN_PROCESSES:
            out[str(policy)] = [train(comm, "ddp", each)[:2] for each in (None, policy)]
        return out

    return processes(DP, rank_fn, timeout=100)


@pytest.mark.parametrize("what", ["nothing", "a unit twice", "a gather in the loss", *map(str, IN_PROCESSES), *AGAIN])
def test_in_processes(found, what):
    for result in found:
        assert_same(*result[what])
