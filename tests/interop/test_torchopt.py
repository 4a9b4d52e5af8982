"""Optimizers of TorchOpt on shards, against TorchOpt on the unsharded tree."""

import pytest
import torch
import torchopt

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.testing import simulate
from tests.interop.worlds import STEPS, WORLDS, begin, difference, grads_at, params, sharded
from tests.scheduling import every

transform, schedule = torchopt.transform, torchopt.schedule


def falling(rate):
    return schedule.linear_schedule(rate, rate / 10, transition_steps=STEPS, transition_begin=3)


OPTIMIZERS = {
    "adadelta": lambda: torchopt.adadelta(1.0),
    "adagrad": lambda: torchopt.adagrad(1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "adam": lambda: torchopt.adam(1e-2),
    "adam, decayed": lambda: torchopt.adam(1e-2, weight_decay=0.1, eps_root=1e-8),
    "adam, maximized": lambda: torchopt.adam(1e-2, maximize=True),
    "adam, accelerated": lambda: torchopt.adam(1e-2, use_accelerated_op=True),
    "adam, moments with gradients": lambda: torchopt.adam(1e-2, moment_requires_grad=True),
    "adamax": lambda: torchopt.adamax(1e-2),
    "adamw": lambda: torchopt.adamw(1e-2, weight_decay=0.1),
    "radam": lambda: torchopt.radam(1e-2),
    "rmsprop": lambda: torchopt.rmsprop(1e-2),
    "rmsprop, centered": lambda: torchopt.rmsprop(1e-2, centered=True, momentum=0.9, nesterov=True),
    "sgd": lambda: torchopt.sgd(0.1, weight_decay=0.1),
    "sgd, momentum": lambda: torchopt.sgd(0.1, momentum=0.9, weight_decay=0.1, maximize=True),
    "sgd, nesterov": lambda: torchopt.sgd(0.1, momentum=0.9, nesterov=True),
    "linear_schedule": lambda: torchopt.adamw(falling(1e-2), weight_decay=0.1),
    "polynomial_schedule": lambda: torchopt.sgd(schedule.polynomial_schedule(0.1, 0.01, 2.0, STEPS), momentum=0.9),
    "exponential_decay": lambda: torchopt.adam(schedule.exponential_decay(1e-2, 0.9, transition_begin=2, transition_steps=3)),
    "chain": lambda: torchopt.chain(transform.trace(0.9), transform.scale_by_rms(), transform.scale(-1e-2)),
    "chain_flat": lambda: torchopt.combine.chain_flat(transform.scale_by_adam(), transform.scale(-1e-2)),
    "method chain": lambda: transform.scale_by_stddev().chain(transform.scale_by_schedule(lambda count: -1e-2 / (1 + count))),
    "nan_to_num": lambda: torchopt.chain(torchopt.nan_to_num(0.0, 1.0, -1.0), torchopt.sgd(0.1)),
    "add_decayed_weights": lambda: torchopt.chain(transform.add_decayed_weights(0.1), torchopt.sgd(0.1)),
    "scale_by_rss": lambda: torchopt.chain(transform.scale_by_rss(), transform.scale(-0.1)),
    "identity": lambda: torchopt.base.identity(),
}


def unsharded(tx):
    mine = params()
    state = tx.init(mine)
    for step in range(STEPS):
        with torch.no_grad():
            updates, state = tx.update(grads_at(step), state, params=mine, inplace=False)
            mine = torchopt.apply_updates(mine, updates, inplace=False)
    return mine


@every(11, name=OPTIMIZERS, world=WORLDS)
def test_the_same_as_unsharded(name, world):
    mesh, strategy = WORLDS[world]
    expected = unsharded(OPTIMIZERS[name]())
    for found, _ in simulate(mesh, lambda comm: sharded(comm, strategy, OPTIMIZERS[name]())):
        assert difference(found, expected) == 0


CLIPS = {
    "clip_grad_norm": lambda: torchopt.chain(torchopt.clip_grad_norm(1.0), torchopt.adam(1e-2)),
    "of the largest": lambda: torchopt.chain(torchopt.clip_grad_norm(1.0, float("inf")), torchopt.adam(1e-2)),
    "that never clips here": lambda: torchopt.clip_grad_norm(1e5),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clips_are_refused_where_ranks_have_parts(name):
    def refused(comm):
        with pytest.raises(TreeError, match=r"torchopt\..*ranks have parts(.|\n)*embed\.w(.|\n)*clip_by_global_norm") as caught:
            begin(comm, fs.zero3("dp"), CLIPS[name]())
        return str(caught.value)

    assert len(set(simulate(fs.Mesh({"dp": 3}), refused))) == 1


@pytest.mark.parametrize("world", ["one rank", "ddp on 2"])
def test_clips_are_right_where_nothing_is_cut(world):
    mesh, strategy = WORLDS[world]
    make = CLIPS["clip_grad_norm"]
    assert difference(simulate(mesh, lambda comm: sharded(comm, strategy, make()))[0][0], unsharded(make())) < 1e-5


def test_our_clip_before_it_is_the_same():
    def ours(comm):
        return sharded(comm, fs.zero3("dp"), fs.optim.chain(fs.optim.clip_by_global_norm(1.0), torchopt.adam(1e-2)))

    found, _ = simulate(fs.Mesh({"dp": 3}), ours)[0]
    assert difference(found, unsharded(CLIPS["clip_grad_norm"]())) < 1e-5


WRONG = {
    "sgd that remembers its first call": (lambda: torchopt.sgd(0.1, momentum=0.9, dampening=0.1), r"run again, it made other"),
    "register_hook": (lambda: torchopt.register_hook(torch.neg), r"raised(.|\n)*doesn't require gradient"),
    "FuncOptimizer": (lambda: torchopt.FuncOptimizer(torchopt.adam(1e-2)), r"expected an \(init, update\) pair"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_optimizer_of_shards_is_refused(name):
    make, text = WRONG[name]
    with pytest.raises(TreeError, match=text):
        begin(fs.SingleComm(fs.Mesh({"dp": 1})), fs.zero3("dp"), make())
