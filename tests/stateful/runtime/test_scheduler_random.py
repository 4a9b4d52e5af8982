"""Random losses: units in any order, nested, recomputed, without gradient, in several backwards, under any policy."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.testing import DebugPolicy
from tests.gpt_like import block, embed, head
from tests.random_programs import policies
from tests.scheduling import STRATEGIES, assert_close, every, full_params, make_state, my_batches, run_both

EXAMPLES = 7 if settings.default.max_examples <= 60 else 300


@dataclass(frozen=True)
class Part:
    """A part of a loss: what is done with a layer, or with the parts inside of it."""

    way: str
    layer: int = 0
    inside: tuple["Part", ...] = ()


def parts(depth=2):
    layers = st.integers(0, 2)
    plain = st.builds(Part, st.sampled_from(["use", "use", "use", "no gradient", "input gradient"]), layers)
    if not depth:
        return plain
    inside = st.lists(parts(depth - 1), min_size=1, max_size=3).map(tuple)
    return st.one_of(plain, plain, st.builds(Part, st.sampled_from(["nest", "checkpoint", "reentrant"]), layers, inside))


def run_part(part, layers, x, comm, is_reference):
    """``x`` after a part. The reference leaves out what does not change a value: recomputation, and work for nothing."""
    layer = layers[part.layer]

    def inside(x, layers):
        for each in part.inside:
            x = run_part(each, layers, x, comm, is_reference)
        return x

    if part.way == "no gradient":
        with torch.no_grad():
            _ = None if is_reference else fs.forward(block, layer, x, comm=comm)
        return x
    if part.way == "input gradient":
        y = fs.forward(block, layer, x, comm=comm)
        if not is_reference and torch.is_grad_enabled():
            torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y
    if part.way in ("checkpoint", "reentrant") and not is_reference:
        return checkpoint(inside, x, layers, use_reentrant=part.way == "reentrant")
    if part.way == "nest":
        return fs.forward(lambda p, x, layers: block(p, inside(x, layers)), layer, x, layers, comm=comm)
    return fs.forward(block, layer, x, comm=comm) if part.way == "use" else inside(x, layers)


def run(orders, steps, strategy, *, microbatches=1, donate=True, policy=None, frozen=(), compare=assert_close):
    """Train by the losses in ``orders``, one for each number in ``steps``. Compare with whole parameters on every rank."""
    tx = fs.optim.sgd(0.05)

    def program(run):
        is_reference = run.scheduler is None

        def loss(params, batch, comm):
            x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
            if not x.requires_grad:
                x.requires_grad_()  # so that there is an input gradient behind a frozen embedding
            for part in orders[batch["order"]]:
                x = run_part(part, params["layers"], x, comm, is_reference)
            return F.cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch["y"])

        place = fs.ddp(*run.comm.mesh.names) if is_reference else strategy
        state, losses = make_state(run.comm, place, tx=tx, frozen=frozen), []
        step = run.wrap(fs.train_step(loss, tx, microbatches=microbatches, donate=donate))
        for order, batch in zip(steps, my_batches(run.comm, len(steps))):
            state, metrics = step(state, {**batch, "order": order})
            losses.append(metrics.loss)
        return losses, full_params(state, run.comm)

    run_both(program, STRATEGIES[strategy][0], compare=compare, policy=policy)


# Of a checkpoint inside of a reentrant one.
ignored = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@ignored
@settings(max_examples=EXAMPLES)
@given(st.data())
def test_random_losses(data):
    """To rounding, as sums are taken in another order."""
    strategy = data.draw(st.sampled_from(sorted(STRATEGIES)))
    orders = data.draw(st.lists(st.lists(parts(), max_size=3), min_size=1, max_size=2))
    steps = data.draw(st.lists(st.integers(0, len(orders) - 1), min_size=3, max_size=4))
    frozen = st.lists(st.sampled_from(["embed", "layers.0", "layers.1.w", "head.b"]), max_size=2, unique=True)
    run(
        orders,
        steps,
        strategy,
        microbatches=data.draw(st.sampled_from([1, 2])),
        donate=data.draw(st.booleans()),
        policy=data.draw(policies()),
        frozen=data.draw(frozen),
        compare=partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5),
    )


USE = [Part("use", i) for i in range(3)]
BACK = Part("input gradient", 0)  # a backward within the forward
FOUND = {
    "twice": Part("checkpoint", 0, (USE[0], USE[0])),
    "twice, reentrant": Part("reentrant", 0, (USE[0], USE[0])),
    "around another": Part("checkpoint", 0, (USE[0], USE[1], USE[0])),
    "around another, reentrant": Part("reentrant", 0, (USE[0], USE[1], USE[0])),
    "ahead without gradient": Part("checkpoint", 0, (Part("no gradient", 2), USE[1], USE[2])),
    "ahead for an input alone": Part("checkpoint", 0, (Part("input gradient", 1), USE[2])),
    "a backward in a unit": Part("nest", 1, (BACK,)),
    "a backward in two": Part("nest", 2, (Part("nest", 1, (BACK,)),)),
    "a backward in three": Part("nest", 0, (Part("nest", 2, (Part("nest", 1, (BACK,)),)),)),
    "inside itself": Part("nest", 1, (Part("nest", 0, (USE[1],)), USE[1])),
}
"""Losses that were wrong once: recomputation in memory that was given up, backwards of units whose forward is under way."""


@ignored
@every(6, strategy=["zero3", "hfsdp", "zero2"], name=FOUND, microbatches=[1, 2])
def test_losses_that_were_found_once(name, strategy, microbatches):
    run([[USE[0], FOUND[name]]], [0] * 3, strategy, microbatches=microbatches)


def test_units_of_a_bucket_that_are_used_within_another_unit_count_as_one():
    """The unit in use is not the first of its bucket."""
    policy = DebugPolicy(prefetch=0, release="forward", bucket_nbytes=512)
    run([[Part("nest", 0, (USE[1], USE[2]))]], [0] * 3, "hfsdp", policy=policy)
