"""Hooks of sharded parameters: post-accumulate hooks as in torch; hooks that autograd would have to call are refused."""

import pytest
import torch

import fsharp as fs
from fsharp.errors import LayoutError, ScheduleError
from fsharp.testing import simulate
from tests import modules
from tests.modules import ADAMW, close, each_strategy, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP


def alone(use, steps=4):
    """The unsharded module after ``use(model, data)``, and what that returns."""
    model = modules.make()
    seen = use(model, torch.optim.AdamW(model.parameters(), **ADAMW), modules.batches(None, steps))
    return seen, modules.detached(model)


def sharded(use, strategy, steps=4):
    """The same of each rank."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        return use(model, optimizer, modules.batches(comm, steps)), values(model)

    return simulate(DP, rank_fn)


def halved(model, optimizer, data):
    """Hooks look at gradients and change them."""
    names, seen = {p: name for name, p in model.named_parameters()}, []

    def halve(p):
        seen.append((names[p], p.grad.norm().item()))
        p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    for x, y in data:
        optimizer.zero_grad()
        model(x, y)["loss"].backward()
        optimizer.step()
    return sorted(seen)


def within_the_backward(model, optimizer, data):
    """An optimizer for each parameter steps as soon as the gradient is there, and drops the gradient."""
    optimizers = {p: torch.optim.AdamW([p], **ADAMW) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, y in data:
        model(x, y)["loss"].backward()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("use", [halved, within_the_backward], ids=lambda use: use.__name__)
@each_strategy
def test_as_in_torch(strategy, use):
    seen, expected = alone(use)
    for found, mine in sharded(use, strategy):
        close(mine, expected)
        assert seen is None or [name for name, _ in found] == [name for name, _ in seen]
        assert seen is None or [norm for _, norm in found] == pytest.approx([norm for _, norm in seen], rel=1e-3)


def test_when_a_hook_is_called():
    """Once a backward that does not accumulate, and only if there is a gradient; by whichever tensor the parameter is then."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3")
        [(x, y)] = modules.batches(comm, 1)
        called = []
        handles = [p.register_post_accumulate_grad_hook(lambda p: called.append(p.path)) for p in model.parameters()]

        def count(act):
            called.clear()
            act()
            return len(called)

        def backward():
            model(x, y)["loss"].backward()

        def accumulated():
            with model.accumulate():
                backward()

        found = [count(backward), count(backward)]
        optimizer.zero_grad()
        found += [count(accumulated), count(backward)]
        assert sorted(called) == sorted(p.path for p in model.parameters())
        optimizer.zero_grad()
        found.append(count(lambda: torch.autograd.grad(model(x, y)["loss"], list(model.parameters()))))
        model.head.requires_grad_(False)
        found.append(count(backward))
        optimizer.zero_grad()
        with model.unsharded(write=True):
            pass
        handles[0].remove()
        found.append(count(backward))
        return found

    total = len(list(modules.make().parameters()))
    assert simulate(DP, rank_fn) == [[total, total, 0, total, 0, total - 2, total - 3]] * 2


def one_optimizer_each(model):
    optimizers = {p.path: fs.ShardedOptimizer([p], torch.optim.SGD, lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p.path].step())
    model(torch.arange(4))[0].sum().backward()


def when_unsharded(model):
    with model.unsharded():
        model.head.weight.register_post_accumulate_grad_hook(print)


def of_a_frozen_one(model):
    model.head.requires_grad_(False)
    model.head.weight.register_post_accumulate_grad_hook(print)


def not_elementwise(model):
    model.head.weight.register_post_accumulate_grad_hook(lambda p: p.grad.sum(0))
    model(torch.arange(4))[0].sum().backward()


REFUSED = {
    "one optimizer each": (
        one_optimizer_each,
        ScheduleError,
        "another optimizer of this module.*one ShardedOptimizer, in groups",
    ),
    "inside of unsharded": (when_unsharded, LayoutError, r"unsharded\(\): a hook was registered on parameter 'head\.weight'"),
    "a frozen one": (of_a_frozen_one, LayoutError, r"'head\.weight' does not require a gradient"),
    "what needs the whole gradient": (not_elementwise, LayoutError, r"gradient of 'head\.weight' is sharded.*unsharded"),
}


@pytest.mark.parametrize("act", REFUSED)
@on_ranks(DP)
def test_refused(comm, act):
    use, kind, match = REFUSED[act]
    model, _ = wrap(comm, "zero3")
    with pytest.raises(kind, match=match):
        use(model)
