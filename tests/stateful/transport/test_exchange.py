"""Collectives by sends and receives: every size around the chunks, from and to any memory."""

import pytest
import torch

import fsharp as fs
from fsharp.stateful.transport.base import ProcessGroups
from fsharp.stateful.transport.gloo import _CHUNK, GlooTransport
from fsharp.testing import processes

CHUNK = _CHUNK // 4
PARTS = [0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + CHUNK // 2, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK + 7]


def summed(comm, numel, make):
    """What the sum over ranks is, in order of rank."""
    total = make(0, numel)
    for rank in range(1, comm.mesh.size):
        total = total + make(rank, numel)
    return total


def noise(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("n", [2, 3])
def test_sizes_around_chunks(n):

    def rank_fn(comm):
        exchange, wrong = GlooTransport(comm, ProcessGroups(comm, separate=True)), []
        exchange.make()
        mine = comm.rank
        for part in PARTS:
            for way in ("out", "in place", "all_reduce", "gather"):
                numel = max(part * n - (way == "all_reduce" and part > 1), 0)  # one that the ranks do not divide
                total, x = summed(comm, numel, noise), noise(mine, numel)
                op = "all_reduce" if way == "all_reduce" else "reduce_scatter"
                nbytes = exchange.scratch_nbytes(op, "dp", numel, 4, apart=way != "in place")
                scratch = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
                if way == "gather":
                    got, expected = torch.empty(numel), torch.cat([noise(r, part) for r in range(n)])
                    exchange.gather(noise(mine, part), got, "dp").wait()
                elif way == "all_reduce":
                    got, expected = torch.empty(numel), total
                    exchange.all_reduce(x, got, "dp", scratch=scratch).wait().wait()
                else:
                    out = torch.empty(part) if way == "out" else None
                    work = exchange.reduce_scatter(x, "dp", dtype=torch.float32, scratch=scratch, out=out)
                    got, expected = work.wait(), total.view(n, -1)[mine]
                if not torch.equal(got, expected):
                    wrong.append((part, way))
        return wrong

    assert processes(fs.Mesh({"dp": n}), rank_fn) == [[]] * n


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
def test_gradients_that_one_rank_keeps(strategy):
    """Its next ones rest elsewhere; what ranks send each other, here in parts of more than a chunk, has to be the same."""

    def rank_fn(comm):
        width = 1200
        params = {"layers": [{"w": torch.randn(width, width, generator=torch.Generator().manual_seed(i))} for i in range(4)]}

        def loss(params, batch, comm):
            for layer in params["layers"]:
                batch = fs.forward(lambda p, x: torch.tanh(x @ p["w"] * 0.03), layer, batch, comm=comm)
            return batch.square().mean()

        def step(state, batch, comm):
            sums, resting = fs.value_and_grad(loss)(state.params, batch, comm=comm)
            metrics, grads = fs.average(sums, fs.reduce_scatter(resting, comm=comm), comm=comm)
            return fs.update(fs.optim.sgd(0.1), grads, state, comm=comm), metrics.loss, resting

        layout = fs.plan(params, comm.mesh, getattr(fs, strategy)("dp"), units="layers.*")
        state = fs.init_state(fs.optim.sgd(0.1), fs.shard(params, layout, comm), comm=comm)
        states, scheduled, kept, same = [state, state], fs.Scheduler(comm)(step), [], []
        for i in range(4):
            batch = torch.randn(2, width, generator=torch.Generator().manual_seed(10 * i + comm.rank))
            states[0], expected, _ = step(states[0], batch, comm)
            states[1], got, grads = scheduled(states[1], batch)
            if comm.rank == 0:
                kept.append([node.buffers for node in fs.units_of(grads)])
            del grads
            same.append(torch.equal(got, expected))
        return same

    assert processes(fs.Mesh({"dp": 2}), rank_fn, timeout=90) == [[True] * 4] * 2
