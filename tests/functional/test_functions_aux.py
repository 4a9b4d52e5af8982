"""What a loss function returns beside the loss, and what is refused because it could be either."""

import pytest
import torch

import fsharp as fs
from fsharp.testing import simulate
from tests.gpt_like import logits, loss_fn, make_batches, make_params
from tests.ranks import on_ranks

DP = fs.Mesh({"dp": 2})


def with_aux(params, batch, comm):
    return loss_fn(params, batch, comm), {"logits": logits(params, batch["x"], comm), "rank": comm.rank}


def run(strategy, microbatches, scheduled):
    params = make_params()
    layout = fs.plan(params, DP, strategy("dp"), units="layers.*")

    def rank_fn(comm):
        batch = make_batches(1, 8, seed=comm.rank)[0]
        own = fs.shard(params, layout, comm)

        def both(params, batch, comm):
            plain = fs.value_and_grad(loss_fn, microbatches=microbatches)(params, batch, comm=comm)
            return plain, fs.value_and_grad(with_aux, microbatches=microbatches, has_aux=True)(params, batch, comm=comm)

        (loss, grads), ((same_loss, aux), same_grads) = (
            fs.Scheduler(comm)(both)(own, batch) if scheduled else both(own, batch, comm)
        )
        assert torch.equal(loss.sum, same_loss.sum)
        for a, b in zip(fs.layouts.units_of(grads), fs.layouts.units_of(same_grads), strict=True):
            assert all(map(torch.equal, a.buffers, b.buffers))
        with torch.no_grad():
            expected = logits(own, batch["x"], comm)
        return aux, expected

    return simulate(DP, rank_fn)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero3])
def test_aux_comes_back_detached_and_one_for_each_microbatch(strategy, microbatches, scheduled):
    for rank, (aux, expected) in enumerate(run(strategy, microbatches, scheduled)):
        parts = aux if microbatches > 1 else [aux]
        assert len(parts) == microbatches
        assert [part["rank"] for part in parts] == [rank] * microbatches
        assert not any(part["logits"].requires_grad for part in parts)
        torch.testing.assert_close(torch.cat([part["logits"] for part in parts]), expected)


def test_a_step_hands_on_the_aux():
    params = make_params()
    layout = fs.plan(params, DP, fs.zero3("dp"), units="layers.*")

    def rank_fn(comm):
        batch = make_batches(1, 8, seed=comm.rank)[0]
        state = fs.init_state(fs.optim.sgd(0.1), fs.shard(params, layout, comm), comm=comm)
        plain, metrics = fs.train_step(loss_fn, fs.optim.sgd(0.1))(state, batch, comm)
        new, (same, aux) = fs.train_step(with_aux, fs.optim.sgd(0.1), has_aux=True)(state, batch, comm)
        assert torch.equal(metrics.loss, same.loss)
        assert all(map(torch.equal, fs.layouts.units_of(plain.params)[0].buffers, fs.layouts.units_of(new.params)[0].buffers))
        return aux["rank"]

    assert simulate(DP, rank_fn) == [0, 1]


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero1, fs.zero2, fs.zero3])
@pytest.mark.parametrize("scheduled", [False, True])
@on_ranks(DP)
def test_parameters_in_aux_are_those_before_a_donated_update(comm, strategy, scheduled):
    tree = {"a": {"w": torch.arange(6.0), "b": torch.ones(3)}}
    layout = fs.plan(tree, DP, strategy("dp"), units="*")

    def loss(params, x, comm):
        y, b = fs.forward(lambda p, x: ((p["w"] * x).sum() + p["b"].sum(), p["b"]), params["a"], x, comm=comm)
        return y.square(), {"b": b}

    tx = fs.optim.sgd(0.1)
    state = fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)
    step = fs.train_step(loss, tx, has_aux=True, donate=True)
    if scheduled:
        step = fs.Scheduler(comm)(step)
    found = []
    for _ in range(3):
        before = fs.full_tree(state.params, comm=comm)["a"]["b"].clone()
        state, (_, aux) = step(state, torch.ones(6), **({} if scheduled else {"comm": comm}))
        found.append((aux["b"], before))
    for aux, before in found:
        assert torch.equal(aux, before)


@pytest.mark.parametrize("scheduled", [False, True])
def test_microbatches_split_no_teacher_and_a_batch_may_have_no_tensor(scheduled):
    tree = {"w": torch.arange(12.0).view(4, 3)}
    layout, x = fs.plan(tree, DP, fs.zero3("dp")), torch.linspace(-1, 1, 32).view(8, 4)

    def outputs(params, x, comm):
        return fs.forward(lambda p, x: x @ p["w"], params, x, comm=comm)

    def rank_fn(comm):
        student, teacher = fs.shard(tree, layout, comm), fs.shard({"w": tree["w"].cos()}, layout, comm)

        def split(params, batch, comm):
            return (outputs(params, batch["x"], comm) - outputs(batch["teacher"], batch["x"], comm).detach()).square().sum(), 1

        def unsplit(params, batch, comm):
            return split(params, {"x": x[next(numbers) :: 2], "teacher": teacher}, comm)

        def both(state, _, comm):
            batch = {"x": x, "teacher": state[1]}
            loss, _ = fs.value_and_grad(split, microbatches=2)(state[0], batch, comm=comm)
            same, _ = fs.value_and_grad(unsplit, microbatches=2)(state[0], None, comm=comm)
            return loss.sum, same.sum

        numbers, state = iter(range(2)), (student, teacher)
        return fs.Scheduler(comm)(both)(state, None) if scheduled else both(state, None, comm)

    expected = (x @ tree["w"] - x @ tree["w"].cos()).square().sum()
    for got in simulate(DP, rank_fn):
        for value in got:
            torch.testing.assert_close(value, expected, check_dtype=False)
