"""How long gradients at rest live, and whose memory they are in: windows of the arena, schedulers that are gone."""

import gc
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import fsharp as fs
from fsharp.stateful.units import unsharded_buffer as copies
from fsharp.stateful.units.gradient_buffers import GradientBuffers, view_in_new_storage as window_on
from fsharp.testing import DebugPolicy, simulate
from tests.gpt_like import block, logits, loss_fn, make_params, through
from tests.scheduling import (
    assert_same,
    buffers,
    copied,
    evaluate,
    every,
    full_params,
    make_state,
    make_tx,
    mesh_of,
    my_batches,
    run_both,
    training,
)
from tests.stateful.runtime.test_scheduler_rest import explicit, in_arena


def blind(monkeypatch):
    """Have all tensors be at one address, and of one version."""
    monkeypatch.setattr(copies, "buffers_stamp", lambda node: [(1, 0) for _ in node.raw_buffers])
    for module in ("arena", "executor", "eager_ops", "step"):
        monkeypatch.setattr(f"fsharp.stateful.runtime.{module}.buffers_stamp", copies.buffers_stamp)


def starting_again(strategy, follows_plan=True):
    """A program that gives up its parameters twice, and goes on with others."""

    def program(run):
        state, step, seen = make_state(run.comm, strategy), run.wrap(fs.train_step(loss_fn, make_tx())), []
        for i, batch in enumerate(my_batches(run.comm, 6)):
            state, metrics = step(state, batch)
            seen.append(metrics.loss)
            del metrics
            if i in (1, 3):
                del state
                state = make_state(run.comm, strategy, params=make_params(i))
                if not follows_plan:
                    seen.append(evaluate(state.params, batch, run.engine))
        return seen, full_params(state, run.comm)

    return program


@every(3, strategy=["zero3", "hfsdp", "zero3x2"], policy=[{}, {"prefetch": 2}])
def test_what_was_gathered_of_parameters_that_are_gone_is_not_used(strategy, policy, monkeypatch):
    """Others have got their addresses, and versions count from 0: only that the memory was given up tells them apart."""
    blind(monkeypatch)
    run_both(starting_again(strategy), mesh_of(strategy), **policy)


def test_nor_where_the_parameters_are_no_argument(monkeypatch):
    blind(monkeypatch)

    def program(run):
        box = {"state": make_state(run.comm, "zero3")}

        def step(batch, comm):
            box["state"], metrics = fs.train_step(loss_fn, make_tx())(box["state"], batch, comm)
            return metrics.loss

        call, losses = run.wrap(step), []
        for i, batch in enumerate(my_batches(run.comm, 5)):
            losses.append(call(batch))
            if i in (1, 3):
                box.clear()
                box["state"] = make_state(run.comm, "zero3", params=make_params(i))
        return losses, full_params(box["state"], run.comm)

    run_both(program)


def test_nor_by_a_function_that_follows_no_plan(monkeypatch):
    blind(monkeypatch)
    run_both(starting_again("zero3", follows_plan=False))


@contextmanager
def without_collections():
    """Memory is given back with its last reference, or not at all."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def gone(storage):
    """Whether memory is given back: at once, or when a thread that has sent from it is over with that."""
    return any(storage.expired() or time.sleep(0.01) for _ in range(2000))


def outlive(comm, *, strategy="zero3", again):
    """Gradients, when their scheduler is gone; and whether their memory is there before and after they go too."""
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(poison=True))
    state, step = make_state(comm, strategy), scheduler(explicit)
    for batch in my_batches(comm, 3):
        grads = reduced = _ = None  # else they are held while the next ones are made
        state, _, grads, reduced = step(state, batch)
    kept, held = buffers(grads), copied(grads)
    assert in_arena(scheduler, kept) == 0
    arena = StorageWeakRef(scheduler.engine.steps.arena.memory.untyped_storage())
    if again:  # the next step is elsewhere
        state, _, grads, reduced = step(state, my_batches(comm, 1)[0])
    del scheduler, step, grads, reduced
    [node.buffers for node in fs.layouts.units_of(state)]
    before = gone(arena)
    filler = [torch.full((1000,), float("nan")) for _ in range(100)]  # whoever gets the memory writes to it
    assert_same(kept, held)
    del kept, filler, _, state
    return before, gone(arena)


@every(2, strategy=["zero3", "ddp", "hsdp"], again=[False, True])
def test_gradients_outlive_their_scheduler(strategy, again):
    """They do not keep the arena."""
    with without_collections():
        results = simulate(mesh_of(strategy), partial(outlive, strategy=strategy, again=again))
    assert results == [(True, True)] * len(results)


class Itself(torch.autograd.Function):
    """``(w * x).sum(0)``, whose gradient by ``w`` is taken to be ``w``: the very tensor, which is in the arena."""

    @staticmethod
    def forward(ctx, w, x, way):
        ctx.save_for_backward(w)
        ctx.way = way
        return w.sum() * x

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return {"itself": w, "view": w.view_as(w), "detached": w.detach()}[ctx.way], grad, None


ITSELF = {"alone": ("itself", 1), "in two microbatches": ("itself", 2), "a view": ("view", 1), "detached": ("detached", 2)}


@every(8, strategy=["ddp", "zero1", "zero3", "hsdp", "zero2", "hfsdp", "mixed", "late"], case=ITSELF)
def test_a_gradient_that_is_the_parameter(strategy, case):
    """Parameters are let go of before their gradients are collected."""
    way, microbatches = ITSELF[case]

    def odd(p, x):
        return Itself.apply(p["w"], block({**p, "w": p["w"].detach()}, x), way)

    @through
    def loss(x, layers, batch, comm):
        for layer in layers:
            x = fs.forward(odd, layer, x, comm=comm)
        return x

    program = training(loss, strategy, 3, microbatches=microbatches, donate=False)
    assert run_both(program, mesh_of(strategy))[1][0].num_unscheduled_calls == 1


def test_a_window_is_the_same_bytes():
    memory = torch.zeros(256, dtype=torch.uint8)
    window = window_on(memory[64:192])
    assert window.data_ptr() == memory.data_ptr() + 64
    assert (len(window), window.dtype, window.storage_offset()) == (128, torch.uint8, 0)
    window[3], memory[70] = 7, 8
    assert (int(memory[67]), int(window[6])) == (7, 8)
    window.view(torch.float32).fill_(1.5)
    assert memory[64:192].view(torch.float32).tolist() == [1.5] * 32
    assert not memory[:64].any()
    assert not memory[192:].any()


def count(x):
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def test_a_window_counts_its_own_holders_only():
    memory = torch.zeros(256, dtype=torch.uint8)
    window = window_on(memory[64:192])
    alone = count(window)
    others = [memory[i:] for i in range(5)] + [window_on(memory[64:192])]
    assert count(window) == alone
    mine = [window[:4], window.view(torch.float32), window.data]
    assert count(window) == alone + len(mine)
    del mine, others
    assert count(window) == alone
    before = count(memory)
    assert count(memory) == before


def test_a_window_keeps_the_memory_and_lets_it_go():
    with without_collections():
        memory = torch.zeros(256, dtype=torch.uint8)
        whole = StorageWeakRef(memory.untyped_storage())
        window = window_on(memory[64:192])
        view = window.view(torch.float32)[3:]
        del memory, window
        assert not whole.expired()
        view.fill_(2)
        del view
        assert whole.expired()


@pytest.mark.parametrize("strategy", ["zero3", "ddp", "hsdp"])
def test_empty_gradients_rest_as_well(strategy):
    """Units whose trained leaves have no elements."""
    params = {**make_params(layers=2), "none": {"w": torch.zeros(0, 3)}}

    def loss(params, batch, comm):
        out = logits(params, batch["x"], comm)
        return F.cross_entropy(out, batch["y"]) + fs.forward(lambda p: p["w"].sum(), params["none"], comm=comm)

    def program(run):
        state, seen = make_state(run.comm, strategy, params=params, units=["layers.*", "none"]), []
        step = run.wrap(partial(explicit, loss=loss))
        for batch in my_batches(run.comm, 3):
            state, value, *grads = step(state, batch)
            seen.append([value, *map(buffers, grads)])
        return seen, full_params(state, run.comm)

    run_both(program, mesh_of(strategy))


def test_a_view_keeps_a_gradient_where_it_is_beside_an_empty_buffer_too():
    sizes, cpu = [(4, torch.float32), (0, torch.float32)], torch.device("cpu")
    arena = GradientBuffers(sizes, cpu, torch.zeros(GradientBuffers(sizes, cpu).nbytes, dtype=torch.uint8))
    own = GradientBuffers(sizes, cpu)
    shown = arena.hand_out()
    view = shown[0][:2]
    assert not arena.try_relocate_into(own)
    del view
    assert arena.try_relocate_into(own)
    shown[0].fill_(3)
    assert own.tensors[0].tolist() == [3.0] * 4
    assert own.is_held_by_caller
    assert not arena.is_held_by_caller
