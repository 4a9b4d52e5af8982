"""Evaluation: average() of what a loss function returns, without gradients, between the steps of a training."""

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, LossError
from fsharp.testing import processes, simulate
from tests.ranks import on_ranks

MESH = fs.Mesh({"dp": 2})
STRATEGIES = [fs.ddp("dp"), fs.zero1("dp"), fs.zero3("dp")]
TREE = {"layers": [torch.eye(8) * (1 + i / 8) for i in range(3)]}
TX = fs.optim.adamw(1e-2)


def loss_fn(params, x, comm):
    count = len(x)
    for layer in params["layers"]:
        x = fs.forward(lambda w, x: torch.tanh(x @ w), layer, x, comm=comm)
    return x.square().sum(), count


def mean_loss(params, x, comm):
    total, count = loss_fn(params, x, comm)
    return total / count


def batch_of(rank, step=0):
    """Ranks have batches of different sizes."""
    return torch.randn(1 + 3 * rank, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def new_state(comm, strategy):
    layout = fs.plan(TREE, comm.mesh, strategy, units="layers.*")
    return fs.init_state(TX, fs.shard(TREE, layout, comm), comm=comm)


@torch.no_grad()
def evaluate(params, x, comm):
    return fs.average(loss_fn(params, x, comm), comm=comm)[0]


def whole_loss(trees, batches):
    """The sum and the weight over all batches, of whole parameters, without fsharp."""
    rows = []
    for x in batches:
        for w in trees["layers"]:
            x = torch.tanh(x @ w)
        rows.append(x.square().sum(1))
    rows = torch.cat(rows).double()
    return rows.sum(), len(rows)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@on_ranks(MESH)
def test_the_mean_over_ranks_is_weighted(comm, strategy):
    state, batches = new_state(comm, strategy), [batch_of(rank) for rank in range(comm.mesh.size)]
    found, (total, weight) = evaluate(state.params, batches[comm.rank], comm), whole_loss(TREE, batches)
    torch.testing.assert_close(found.loss, total / weight, rtol=1e-6, atol=0)
    assert (found.loss.dtype, found.weight) == (torch.float64, weight)
    losses = [total / weight for total, weight in (whole_loss(TREE, [x]) for x in batches)]
    metrics, nothing = fs.average(mean_loss(state.params, batches[comm.rank], comm), comm=comm)  # with its gradient
    torch.testing.assert_close(metrics.loss, sum(losses) / len(losses), rtol=1e-6, atol=0)
    assert (metrics.weight, nothing, metrics.loss.requires_grad) == (comm.mesh.size, (), False)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("way", ["the Comm", "the scheduler", "a scheduled function", "one rank alone"])
def test_an_evaluation_between_steps_changes_neither_bits_nor_the_schedule(strategy, way):
    def train(comm, way):
        scheduler = fs.Scheduler(comm)
        state, step, found = new_state(comm, strategy), scheduler(fs.train_step(loss_fn, TX)), []
        scheduled = scheduler(evaluate)
        for i in range(4):
            state, _ = step(state, batch_of(comm.rank, i))
            assert step.last_call_status().kind == ("planned" if i else "recorded")
            schedule = step.schedule if i == 0 else schedule  # noqa: F821
            assert step.schedule is schedule
            x = batch_of(comm.rank, 10 + i)
            if way == "the Comm":
                found.append(evaluate(state.params, x, comm).loss)
            elif way == "the scheduler":
                found.append(evaluate(state.params, x, scheduler).loss)
            elif way == "a scheduled function":
                found.append(scheduled(state.params, x).loss)
            elif way == "one rank alone":
                whole = fs.gather(state.params, comm=comm)
                if comm.rank == 1:
                    with torch.no_grad():
                        found.append(fs.Loss(*loss_fn(whole, x, comm)).sum)
        return fs.full_tree(state.params, comm=comm), found

    alone, evaluated = (simulate(MESH, lambda comm, way=each: train(comm, way)) for each in ("", way))
    for (expected, _), (params, _) in zip(alone, evaluated, strict=True):
        assert all(map(torch.equal, params["layers"], expected["layers"]))
    (_, first), (trained, second) = evaluated
    if way == "one rank alone":
        assert not first
        torch.testing.assert_close(second[-1].double(), whole_loss(trained, [batch_of(1, 13)])[0], rtol=1e-6, atol=0)
    else:
        total, weight = whole_loss(trained, [batch_of(rank, 13) for rank in range(2)])
        assert first == second
        torch.testing.assert_close(first[-1], total / weight, rtol=1e-6, atol=0)


def test_in_processes_and_an_error_of_one_rank_that_all_hear():
    def rank_fn(comm):
        state, scheduled = new_state(comm, fs.zero3("dp")), fs.Scheduler(comm)(evaluate)
        found = [evaluate(state.params, batch_of(comm.rank), comm), scheduled(state.params, batch_of(comm.rank))]
        with pytest.raises((RuntimeError, AgreementError)) as raised:  # the batch of rank 1 has a wrong shape
            scheduled(state.params, torch.ones(2, 8 - comm.rank))
        return [(float(each.loss), float(each.weight)) for each in found], str(raised.value)

    (first, heard), (second, raised) = processes(MESH, rank_fn)
    total, weight = whole_loss(TREE, [batch_of(rank) for rank in range(2)])
    assert first[0] == first[1] == second[0] == second[1]
    assert first[0] == pytest.approx((float(total) / weight, weight), rel=1e-6)
    assert "rank 1 of 2 failed in evaluate" in heard
    assert "cannot be multiplied (2x7 and 8x8)" in heard
    assert "cannot be multiplied (2x7 and 8x8)" in raised


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("1", "the loss is str, expected"),
        (torch.ones(2), "the loss is torch.float32\\[2\\], expected"),
        ((torch.ones(()), -1), "the weight of the loss is -1"),
        ((torch.ones(()), torch.ones(())), "a weight, or a metric\\?"),
    ],
)
def test_what_is_no_loss_is_refused(loss, message):
    with pytest.raises(LossError, match=rf"^average\(\): .*{message}"):
        fs.average(loss, comm=fs.SingleComm())
