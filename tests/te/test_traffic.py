"""Weights of TransformerEngine in functions; what travels is what is predicted: a byte a value, and no scales."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import fsharp as fs
from tests import te_cpu
from tests.te.training import (
    DELAYED,
    FEW,
    PRECISION,
    RATE,
    RECIPES,
    STEPS,
    WIDTH,
    Case,
    linear,
    loss_of,
    on_ranks,
    shard,
    shared,
    strategies_on,
    te,
    train_sharded,
    train_whole,
)

CASE = Case(lambda: [linear(), linear(), linear()])


def train_functions(comm, recipe, strategy, **policy):
    """Train by functions under a scheduler. Return losses and calls of each step, and the layout."""
    functions = [fs.make_functional(layer) for layer in CASE.model(recipe).layers]
    tree = {"layers": [params for _, params in functions]}
    precision = {"**": PRECISION, "**.weight": replace(PRECISION, stored=fs.te.weight_format(recipe))}
    layout = fs.plan(tree, comm.mesh, strategy, units="layers.*", precision=precision)

    def loss_fn(params, x, comm):
        with te.autocast(enabled=True, recipe=recipe):
            for (fn, _), unit in zip(functions, params["layers"], strict=True):
                x = fs.forward(fn, unit, x, comm=comm)
        return loss_of(x)

    tx, counting, losses, calls = fs.optim.sgd(RATE), fs.collectives.CountingComm(comm), [], []
    state = fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)
    policy = fs.SchedulePolicy(release="forward", bucket_nbytes=0, **policy)
    step = fs.Scheduler(counting, policy=policy)(fs.train_step(loss_fn, tx))
    for number in range(STEPS):
        counting.calls.clear()
        state, metrics = step(state, CASE.batch(number, 0, comm.rank).detach())
        losses.append(float(metrics.loss))
        calls.append(Counter(counting.calls))
    assert step.num_unscheduled_calls == 1
    return losses, calls, layout


def compare_functions(comm, names, kinds):
    found = []
    for name in names:
        architecture, recipe = RECIPES[name]
        with te_cpu.architecture(*architecture):
            strategies = strategies_on(comm.mesh)[kinds]  # with one microbatch it does not matter which sum comes first
            of = {str(groups): groups for _, groups, _ in strategies}
            makers = [partial(train_whole, CASE, recipe, groups, reduces_first=True) for groups in of.values()]
            wholes = dict(zip(of, shared(comm, makers), strict=True))
            for strategy, groups, _ in strategies:
                losses, calls, layout = train_functions(comm, recipe, strategy)
                expected = wholes[str(groups)]
                ranks = range(comm.mesh.size)
                for step, (outputs, _) in enumerate(expected):
                    mean = sum(loss_of(outputs[rank, 0][0]).double() for rank in ranks) / comm.mesh.size
                    if losses[step] != float(mean):
                        found.append(f"{name}, {strategy}, step {step}: loss {losses[step]}, expected {float(mean)}")
                agreement = [fs.collectives.Call("all_gather", "dp", n) for n in (1, 40)]  # ranks compare schedules
                first = calls[0] - Counter(agreement)
                if first != fs.inspect.step_traffic(layout):
                    found.append(f"{name}, {strategy}: {first}, expected {fs.inspect.step_traffic(layout)}")
                reduced = [Counter({call: n for call, n in each.items() if "reduce" in call.op}) for each in calls]
                if not reduced[0] == reduced[1] == reduced[2]:
                    found.append(f"{name}, {strategy}: {reduced}")
    return found


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (FEW[:1], slice(0, None, 2)),
        (FEW[1:], slice(1, None, 2)),
        pytest.param(tuple(RECIPES), slice(None), marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_functions_have_the_bits_of_the_whole_model_and_make_the_predicted_calls(names, kinds):
    assert on_ranks({"dp": 2}, compare_functions, names=names, kinds=kinds) == [[], []]


def count_in_modules(comm):
    """Return, by recipe, the calls of a step that follows its schedule, and those predicted."""
    found, counting = {}, fs.collectives.CountingComm(comm)
    for name, (architecture, recipe) in (RECIPES | DELAYED).items():
        with te_cpu.architecture(*architecture):
            model = shard(CASE, recipe, counting, fs.zero3("dp"), policy=fs.SchedulePolicy(release="forward", bucket_nbytes=0))
            optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
            for step in range(2):
                counting.calls.clear()
                train_sharded(CASE, recipe, counting, None, model=model, optimizer=optimizer, steps=[step])
            found[name] = Counter(counting.calls), fs.inspect.step_traffic(model.layout)
    return found


def test_modules_make_the_predicted_calls_and_agree_once_for_all_units():
    loss, which_have_gradients = (fs.collectives.Call("all_reduce", "dp", n) for n in (16, 6))
    for found in on_ranks({"dp": 2}, count_in_modules):
        assert found.keys() == (RECIPES | DELAYED).keys()
        for name, (calls, predicted) in found.items():
            # One unit of three, each gathered twice, stays from forward to backward. Each plane has a gather of its own.
            of_last_unit = Counter({call: n // 6 for call, n in predicted.items() if call.op == "all_gather"})
            expected = predicted - Counter([loss]) - of_last_unit
            assert calls == expected + Counter([which_have_gradients]), name
            assert sum(n for call, n in expected.items() if call.op == "all_reduce") == (2 if name == "nvfp4" else 1), name


@pytest.mark.parametrize(
    ("name", "nbytes", "planes"),
    [("current", 1.0, 1), ("block", 1.0, 1), ("current on 10.0", 1.0, 1), ("mxfp8", 1.0, 2), ("nvfp4", 0.5, 1)],
)
def test_bytes_of_a_gather_and_of_the_memory_that_it_fills(name, nbytes, planes):
    architecture, recipe = RECIPES[name]
    with te_cpu.architecture(*architecture):
        precision = replace(PRECISION, stored=fs.te.weight_format(recipe))
        tree = {name: {"weight": torch.empty(WIDTH, WIDTH)} for name in "abc"}
        layout = fs.plan(tree, fs.Mesh({"dp": 4}), fs.zero3("dp"), units="*", precision=precision)
        traffic = fs.inspect.step_traffic(layout)
        gathers = {call: count for call, count in traffic.items() if call.op == "all_gather"}
        assert gathers == dict.fromkeys(gathers, 6 * planes)  # of each unit in the forward and in the backward
        assert [call.nbytes for call in gathers] == [3 * WIDTH * WIDTH * nbytes / 4]
        filled, scales = fs.schedules.plan_step(layout).program.facts["a"].gathered, layout["a"].scales_nbytes[0]
        assert (
            filled == WIDTH * WIDTH * nbytes * planes + -(-scales // 128) * 128
        )  # planes arrive in their place, without copies
        agreed = sum(count for call, count in traffic.items() if call.op == "all_reduce") - 1  # and the loss
        assert agreed == (2 if name == "nvfp4" else 1)  # for all units: NVFP4 agrees on tensors and on blocks
