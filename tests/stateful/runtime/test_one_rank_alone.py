"""One rank evaluates, and others do not: where parameters rest whole nothing has to be gathered, and nobody has to wait."""

from functools import partial

import optree
import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import FsharpError
from fsharp.testing import processes, simulate
from tests.modules import descend
from tests.ranks import on_ranks
from tests.scheduling import every

MESH = fs.Mesh({"dp": 2})
STRATEGIES = {"ddp": fs.ddp, "zero1": fs.zero1, "zero2": fs.zero2}
X = torch.arange(32.0).view(8, 4) / 32
STEPS = 4


def train_module(comm, strategy, evaluates):
    """Losses of a rank's own evaluations, and the parameters at the end."""
    torch.manual_seed(0)
    model = fs.shard_module(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), mesh=comm, strategy=strategy, units=[nn.Linear]
    )
    optimizer, losses = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1), []
    for i in range(STEPS + 1):
        for _ in range(evaluates(i)):
            with torch.no_grad():
                losses.append(model(X).square().mean().item())
        if i < STEPS:
            descend(model(X[comm.rank :: 2]).square().mean(), optimizer)
    return losses, [x for _, x in model.named_full_parameters()]


def apply(params, x, comm):
    for layer in params["layers"]:
        x = fs.forward(lambda p, x: torch.tanh(x @ p["w"] + p["b"]), layer, x, comm=comm)
    return x


def loss_fn(params, batch, comm):
    return apply(params, batch, comm).square().mean()


def train_functions(comm, strategy, evaluates, way):
    tree = {"layers": [{"w": torch.eye(4) / 2, "b": torch.ones(4)} for _ in range(2)]}
    layout, tx = fs.plan(tree, comm.mesh, strategy, units="layers.*"), fs.optim.adamw(0.1)
    state, losses = fs.init_state(tx, fs.shard(tree, layout, comm), comm=comm), []
    ranks = comm if way == "blocking" else fs.Scheduler(comm)
    step = fs.train_step(loss_fn, tx)
    call = ranks(step) if ranks is not comm else lambda state, batch: step(state, batch, comm)
    evaluate = ranks(loss_fn) if way == "scheduled" else lambda params, x: loss_fn(params, x, ranks)
    for i in range(STEPS + 1):
        for _ in range(evaluates(i)):
            losses.append(evaluate(state.params, X).item())
        if i < STEPS:
            state, _ = call(state, X[comm.rank :: 2])
    return losses, optree.tree_leaves(fs.full_tree(state.params, comm=comm))


WAYS = {"module": train_module}
WAYS |= {way: partial(train_functions, way=way) for way in ("blocking", "scheduled", "called with the scheduler")}


@every(3, way=WAYS, strategy=STRATEGIES)
def test_one_rank_evaluates_whenever_it_likes(way, strategy):
    run, strategy = WAYS[way], STRATEGIES[strategy]("dp")
    together = simulate(MESH, lambda comm: run(comm, strategy, lambda i: 1))
    for when, times, rank in (({0}, 1, 0), ({1, STEPS}, 1, 1), (set(range(STEPS + 1)), 2, 0)):

        def run_alone(comm, when=when, times=times, rank=rank):
            return run(comm, strategy, lambda i: times * (i in when and comm.rank == rank))

        alone = simulate(MESH, run_alone)
        assert alone[1 - rank][0] == []
        assert alone[rank][0] == [together[rank][0][i] for i in sorted(when) for _ in range(times)]
        for got, want in zip(alone, together, strict=True):
            assert all(map(torch.equal, got[1], want[1]))


def test_one_process_evaluates_before_the_others_have_done_anything_and_when_they_have_left():
    def only_evaluate(comm):
        torch.manual_seed(0)
        model = fs.shard_module(nn.Linear(4, 2), mesh=comm, strategy=fs.ddp("dp"))
        if comm.rank == 1:
            fs.destroy()
            return None
        with torch.no_grad():
            return [model(X).sum().item() for _ in range(3)]

    first, second = processes(MESH, only_evaluate)
    assert second is None
    assert len(set(first)) == 1
    alone = processes(MESH, lambda comm: train_module(comm, fs.zero1("dp"), lambda i: comm.rank == 0))
    together = simulate(MESH, lambda comm: train_module(comm, fs.zero1("dp"), lambda i: 1))
    assert alone[0][0] == together[0][0]


@pytest.mark.parametrize("last", ["b", "another"])
def test_what_ranks_compare_does_not_depend_on_evaluations_of_one_rank(last):
    tree = {"w": torch.ones(4, 4), "b": torch.ones(4)}

    def run(comm):
        scheduler, tx = fs.Scheduler(comm), fs.optim.sgd(0.1)
        layout = fs.plan({"layers": [tree]}, comm.mesh, fs.ddp("dp"), units="layers.*")
        state = fs.init_state(tx, fs.shard({"layers": [tree]}, layout, comm), comm=comm)
        step, evaluate = scheduler(fs.train_step(loss_fn, tx)), scheduler(loss_fn)
        for i in range(3):
            scheduler.engine.steps.add_settings(f"a of step {i}")
            if comm.rank == 0:
                evaluate(state.params, X)
            scheduler.engine.steps.add_settings(last if comm.rank == 0 and i == 1 else "b")
            state, _ = step(state, X)

    if last == "b":
        simulate(MESH, run)
        return
    with pytest.raises(FsharpError, match="of history"):
        simulate(MESH, run)


@on_ranks(MESH)
def test_one_rank_that_evaluates_what_is_sharded_is_named_at_once(comm):
    with pytest.raises(FsharpError, match="evaluation #0"):
        train_module(comm, fs.zero3("dp"), lambda i: comm.rank == 0 and i == 1)
