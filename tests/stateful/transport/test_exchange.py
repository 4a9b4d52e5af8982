"""Collectives by sends and receives: every size around the chunks, from and to any memory."""

from functools import lru_cache

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fsharp as fs
from fsharp.distributed.process_group import TransportGroups
from fsharp.stateful.transport import gloo
from fsharp.stateful.transport.base import Summand
from fsharp.stateful.transport.gloo import GlooTransport
from fsharp.testing import processes
from tests.scheduling import every

CHUNK, WORTH = 4096, 512
"""Elements of a chunk, and of a message worth being sent alone, in these tests."""


def parts_around(chunk):
    return [0, 1, 5, chunk - 1, chunk, chunk + 1, chunk + chunk // 2, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 3 * chunk + 7]


def set_sizes(chunk):
    """In this process of a rank."""
    gloo._CHUNK_NBYTES, gloo._MIN_MESSAGE_NBYTES = 4 * chunk, 4 * WORTH


def summed(comm, numel, make):
    """What the sum over ranks is, in order of rank."""
    total = make(0, numel)
    for rank in range(1, comm.mesh.size):
        total = total + make(rank, numel)
    return total


@lru_cache(maxsize=16)  # of one size from and to each rank, in several ways
def noise(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def over_gloo(comm):
    """A Comm over gloo of one rank as well, for which connect() needs no groups."""
    if comm.mesh.size > 1:
        return comm
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return fs.ProcessGroupComm(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))


@pytest.mark.parametrize(("n", "chunk"), [(1, CHUNK), (2, gloo._CHUNK_NBYTES // 4), (3, CHUNK)])
def test_sizes_around_chunks(n, chunk):

    def rank_fn(comm):
        set_sizes(chunk)
        comm = over_gloo(comm)
        exchange, wrong = GlooTransport(comm, TransportGroups(comm, separate=True)), []
        exchange.groups.make_groups()
        mine = comm.rank
        for part in parts_around(chunk):
            for way in ("out", "in place", "all_reduce", "all_reduce in place", "gather"):
                numel = max(part * n - (way.startswith("all_reduce") and part > 1), 0)  # one that the ranks do not divide
                total, x = summed(comm, numel, noise), noise(mine, numel).clone()
                op = "all_reduce" if way.startswith("all_reduce") else "reduce_scatter"
                nbytes = exchange.scratch_nbytes(op, "dp", numel, 4, sums_into_out=way != "in place")
                scratch = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
                if way == "gather":
                    got, expected = torch.empty(numel), torch.cat([noise(r, part) for r in range(n)])
                    exchange.gather([noise(mine, part)], [got], "dp", "").wait()
                elif op == "all_reduce":
                    got, expected = torch.empty(numel) if way == "all_reduce" else x, total
                    exchange.all_reduce([Summand(x, got, scratch)], "dp", n)[0].wait()
                else:
                    out = torch.empty(part) if way == "out" else None
                    [work] = exchange.reduce_scatter([Summand(x, out, scratch)], "dp", n, torch.float32)
                    got, expected = work.wait(), total.view(n, -1)[mine]
                if not torch.equal(got, expected):
                    wrong.append((part, way))
        return wrong

    assert processes(fs.Mesh({"dp": n}), rank_fn) == [[]] * n


TOGETHER = [[3, 70], [WORTH, WORTH], [WORTH - 2, 1, WORTH], [2 * WORTH, 5, CHUNK + 9], [CHUNK, 2 * CHUNK + 1, 3 * CHUNK + 7, 0]]
"""Sizes of parts: packed, and as messages of their own, of one chunk and of several."""


@every(2, n=[1, 2, 3], wire=[torch.bfloat16, torch.float32])
def test_buffers_that_go_together(n, wire):
    """One label for all of them, and each as if it had gone alone."""

    def rank_fn(comm):
        set_sizes(CHUNK)
        comm = over_gloo(comm)
        mine, wrong, counts = comm.rank, [], []
        counters = [fs.collectives.CountingComm(comm)] * (mine == 0)  # one rank that counts does what the others do
        exchange = GlooTransport(comm, TransportGroups(comm, separate=True), counters)
        exchange.groups.make_groups()

        def make(rank, numel):
            return noise(rank, numel).to(wire, copy=True)

        def summands(numel):
            return summed(comm, numel, lambda rank, size: make(rank, size).float())

        for parts in TOGETHER:
            before = comm.watch.count
            gathered = [make(mine, part) for part in parts], [torch.empty(n * part, dtype=wire) for part in parts]
            exchange.gather(*gathered, "dp", "").wait()
            expected = [torch.cat([make(r, part) for r in range(n)]) for part in parts]
            wrong += [(parts, "gather")] * (not all(map(torch.equal, gathered[1], expected)))
            for way in ("out", "in place", "all_reduce", *["all_reduce in place"] * (wire == torch.float32)):
                xs, sums_into_out = [make(mine, n * part) for part in parts], way != "in place" and wire == torch.float32
                op = "all_reduce" if way.startswith("all_reduce") else "reduce_scatter"
                nbytes = [exchange.scratch_nbytes(op, "dp", len(x), x.itemsize, sums_into_out=sums_into_out) for x in xs]
                scratch = [torch.full((each,), 0xFF, dtype=torch.uint8) for each in nbytes]
                total = [summands(n * part) for part in parts]
                if op == "all_reduce":
                    outs = [torch.empty(n * part) for part in parts] if way == "all_reduce" else xs
                    for work in exchange.all_reduce(list(map(Summand, xs, outs, scratch)), "dp", n):
                        work.wait()
                    wrong += [(parts, way)] * (not all(map(torch.equal, outs, total)))
                    continue
                outs = [torch.empty(part) if way == "out" else None for part in parts]
                works = exchange.reduce_scatter(list(map(Summand, xs, outs, scratch)), "dp", n, torch.float32)
                got = [work.wait() for work in works]
                wrong += [(parts, way)] * (not all(torch.equal(x, y.view(n, -1)[mine]) for x, y in zip(got, total)))
            counts.append(comm.watch.count - before)
        return wrong, counts

    calls = 7 if wire == torch.float32 else 5  # an all_reduce gathers its sums by a call of its own
    assert processes(fs.Mesh({"dp": n}), rank_fn) == [([], [calls] * len(TOGETHER))] * n


@every(3, strategy=["zero3", "zero2", "zero1", "ddp"])
def test_gradients_that_one_rank_keeps(strategy):
    """Its next ones rest elsewhere; what ranks send each other, here in parts of more than a chunk, has to be the same."""

    def rank_fn(comm):
        set_sizes(CHUNK)
        width = 100
        params = {"layers": [{"w": torch.randn(width, width, generator=torch.Generator().manual_seed(i))} for i in range(4)]}

        def loss(params, batch, comm):
            for layer in params["layers"]:
                batch = fs.forward(lambda p, x: torch.tanh(x @ p["w"] * 0.1), layer, batch, comm=comm)
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
                kept.append([node.buffers for node in fs.layouts.units_of(grads)])
            del grads
            same.append(torch.equal(got, expected))
        return same

    assert processes(fs.Mesh({"dp": 2}), rank_fn) == [[True] * 4] * 2
