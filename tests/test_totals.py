"""What a step needs of all ranks' losses leaves before the backward, and what it divides by is divided by in the optimizer."""

import gc
from datetime import timedelta

import optree
import pytest
import torch

import fsharp as fs
from fsharp.functional.errors import LossError
from fsharp.functional.train import Loss
from fsharp.testing import processes
from tests.gpt_like import loss_fn, make_params
from tests.scheduling import DP, FLAT, HYBRID, make_layout, make_state, my_batches


class Wait(torch.autograd.Function):
    """Has the backward begin when another rank has come to where it says so."""

    @staticmethod
    def forward(ctx, x, wait):
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.wait()
        return grad, None


def test_a_rank_that_is_ahead_does_not_wait_for_the_backward_of_others():
    """Rank 1's backward begins when rank 0 has its totals: if they left after a backward, both would wait for ever."""

    def rank_fn(comm):
        store = torch.distributed.PrefixStore("totals", torch.distributed.distributed_c10d._get_default_store())
        number = [0]

        def wait():
            if comm.rank == 1 and number[0] > 0:
                store.wait([f"{number[0]}"], timedelta(seconds=30))

        def loss(params, batch, comm):
            total, weight = loss_fn(params, batch, comm)
            return Wait.apply(total, wait), weight

        def step(state, batch, comm):
            sums, grads = fs.value_and_grad(loss, averaged=True)(state.params, batch, comm=comm)
            grads = fs.reduce_scatter(grads, comm=comm)
            metrics, grads = fs.average(sums, grads, comm=comm, donate=True)
            if comm.rank == 0:
                store.set(f"{number[0]}", "there")
            return fs.update(fs.adamw(1e-2), grads, state, comm=comm, donate=True), metrics

        state, scheduled, losses = make_state(comm, "ddp", tx=fs.adamw(1e-2)), fs.Scheduler(comm)(step), []
        for batch in my_batches(comm, 3):
            state, metrics = scheduled(state, batch)
            losses.append(metrics.loss.item())
            number[0] += 1
        return losses

    first, second = processes(DP, rank_fn, timeout=90)
    assert first == second
    assert len(set(first)) == 3


def weighted(params, batch, comm):
    """A loss whose weights, 3, 8, 13 and so on by rank, do not add up to powers of two."""
    return loss_fn(params, batch, comm)[0], torch.tensor(3.0 + 5.0 * comm.rank)


def changing(number, what):
    """A step that treats its loss otherwise each second time."""

    def step(state, batch, comm):
        averaged = what not in ("another loss", "another loss on one rank", "changed in place")
        loss, grads = fs.value_and_grad(weighted, averaged=averaged)(state.params, batch, comm=comm)
        grads = fs.reduce_scatter(grads, comm=comm)
        is_odd = number[0] % 2
        if (what == "another loss" or (what == "another loss on one rank" and comm.rank == 1)) and is_odd:
            loss = Loss(loss.sum * 2, loss.weight + 1)
        if what == "changed in place" and is_odd:
            loss.weight.mul_(7)
        if what == "not averaged" and is_odd:
            return state, loss
        metrics, grads = fs.average(loss, grads, comm=comm, donate=True)
        if what == "looked at" and is_odd:
            [node.buffers for node in fs.units_of(grads)]
        seen = [buffer.clone() for node in fs.units_of(grads) for buffer in node.buffers] if what == "kept" else []
        state = fs.update(fs.adamw(1e-2, weight_decay={"**": 0.1, "head.b": 0.0}), grads, state, comm=comm, donate=True)
        after = [buffer.clone() for node in fs.units_of(grads) for buffer in node.buffers]
        assert all(map(torch.equal, seen, after))
        return state, (metrics, after)

    return step


def compared(comm, strategy, what, **options):
    """Whether each of five steps is bit for bit that of the blocking path: parameters, metrics, gradients after the update."""
    tx, number = fs.adamw(1e-2), [0]
    states = [make_state(comm, strategy, tx=tx, params=make_params(layers=2)) for _ in range(2)]
    step = changing(number, what)
    scheduled, same = fs.Scheduler(comm, **options)(step), []
    for batch in my_batches(comm, 5):
        states[0], one = step(states[0], batch, comm)
        states[1], other = scheduled(states[1], batch)
        pairs = list(zip(optree.tree_leaves((states[0], one)), optree.tree_leaves((states[1], other)), strict=True))
        same.append(all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs))
        number[0] += 1
    return same


WHAT = ["another loss", "another loss on one rank", "changed in place", "not averaged", "looked at", "kept", "as always"]


@pytest.mark.parametrize("strategy", FLAT)
def test_the_values_are_those_of_the_blocking_path(strategy):
    result = processes(DP, lambda comm: {what: compared(comm, strategy, what) for what in WHAT}, timeout=120)
    assert result == [dict.fromkeys(WHAT, [True] * 5)] * 2


@pytest.mark.parametrize("strategy", ["hsdp", "mixed", "hfsdp"])
def test_on_two_axes(strategy):
    options = [{"separate_groups": False}, {"poison": True}]
    result = processes(HYBRID, lambda comm: [compared(comm, strategy, "as always", **each) for each in options], timeout=120)
    assert result == [[[True] * 5] * 2] * 4


def test_a_loss_that_was_promised_is_not_to_be_changed():
    """All ranks hear of it, one of them in its next step, though one alone has changed its own; afterwards they go on."""

    def rank_fn(comm):
        number = [0]

        def step(state, batch, comm):
            loss, grads = fs.value_and_grad(weighted, averaged=True)(state.params, batch, comm=comm)
            if number[0] == 1 and comm.rank == 1:
                loss.weight.zero_()
            metrics, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm, donate=True)
            return fs.update(fs.adamw(1e-2), grads, state, comm=comm), metrics

        scheduler = fs.Scheduler(comm)
        scheduled, state = scheduler(step), make_state(comm, "zero3", tx=fs.adamw(1e-2))
        (batch,), before, after, error = my_batches(comm, 1), [], [], ""
        while len(after) < 2:
            try:
                state, metrics = scheduled(state, batch)
                (after if error else before).append(metrics.weight.item())
            except (LossError, fs.AgreementError) as found:
                assert not error
                error = str(found)
            number[0] += 1
        gc.collect()
        return before, error, after, len(scheduler.totals._sent)

    for rank, (before, error, after, left) in enumerate(processes(DP, rank_fn, timeout=90)):
        assert before in ([11.0], [11.0, 11.0][: 2 - rank])
        assert "the loss was changed after value_and_grad(averaged=True)" in error
        assert after == [11.0, 11.0]
        assert left == 0


def test_totals_are_counted_once():
    """In each step one collective of 16 bytes, whether it leaves early or not."""

    def rank_fn(comm):
        counting = fs.CountingComm(comm)
        state = make_state(comm, "zero1", tx=fs.adamw(1e-2))
        step = fs.Scheduler(counting)(fs.train_step(weighted, fs.adamw(1e-2), donate=True))
        found = []
        for batch in my_batches(comm, 3):
            before = counting.calls.copy()
            state, _ = step(state, batch)
            for node in fs.units_of(state.params):
                node.settle()
            found.append({call: count for call, count in (counting.calls - before).items() if call.op == "all_reduce"})
        return [sum(each.values()) for each in found], list(found[1])

    for counts, calls in processes(DP, rank_fn, timeout=90):
        assert counts[1:] == [1, 1]
        assert calls == [fs.Call("all_reduce", "dp", 2 * 8)]


@pytest.mark.parametrize("numel", [64, 100, 4096 + 1, 3 * 64])
@pytest.mark.parametrize("divisor", [3.0, 7.0, 0.1])
def test_division_in_the_kernel_of_adamw(numel, divisor):
    """The same bits as dividing first: vectors and what is left of them, parameters, state and gradients."""
    layout = make_layout(fs.Mesh({"dp": 1}), fs.zero1("dp"), {"w": torch.zeros(numel), "b": torch.zeros(3)}, units=None)
    comm, tx = fs.SingleComm(fs.Mesh({"dp": 1})), fs.adamw(1e-2, weight_decay={"w": 0.1, "b": 0.0})
    generator = torch.Generator().manual_seed(numel)
    params = fs.shard({"w": torch.randn(numel, generator=generator), "b": torch.ones(3)}, layout, comm)
    noise = fs.shard({"w": torch.randn(numel, generator=generator), "b": torch.ones(3)}, layout, comm)
    results = []
    for is_late in (False, True):
        grads = optree.tree_map(torch.clone, noise)
        if is_late:
            for node in fs.units_of(grads):
                node.arriving(lambda: None)
        loss = Loss(torch.tensor(1.0), torch.tensor(divisor, dtype=torch.float64))
        _, mean = fs.average(loss, grads, comm=comm, donate=True)
        assert all(node.is_arriving == is_late for node in fs.units_of(mean))
        new, state = tx.apply(mean, tx.init(params), params, comm=comm, donate=False)
        assert not any(node.is_arriving for node in fs.units_of(mean))
        results.append((new, state, mean))
    leaves = [optree.tree_leaves(result) for result in results]
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*leaves, strict=True))
