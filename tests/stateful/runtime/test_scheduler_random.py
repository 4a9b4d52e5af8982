"""Random losses: units in any order, nested, recomputed, without gradient, in several backwards, under any policy."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from tests.gpt_like import block, embed, head
from tests.random_programs import policies
from tests.scheduling import STRATEGIES, full_params, make_state, my_batches, run_both

EXAMPLES = 10 if settings.default.max_examples <= 60 else 300


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


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a checkpoint inside of a reentrant one
@settings(max_examples=EXAMPLES)
@given(st.data())
def test_random_losses(data):
    """To rounding, as sums are taken in another order: compared with whole parameters on every rank."""
    strategy = data.draw(st.sampled_from(sorted(STRATEGIES)))
    orders = data.draw(st.lists(st.lists(parts(), max_size=3), min_size=1, max_size=2))
    steps = data.draw(st.lists(st.integers(0, len(orders) - 1), min_size=3, max_size=4))
    microbatches, donate, policy = data.draw(st.sampled_from([1, 2])), data.draw(st.booleans()), data.draw(policies())
    frozen = data.draw(st.lists(st.sampled_from(["embed", "layers.0", "layers.1.w", "head.b"]), max_size=2, unique=True))
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

    def close(a, b):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    run_both(program, STRATEGIES[strategy][0], compare=close, policy=policy)
