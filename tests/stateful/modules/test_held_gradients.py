"""Gradients that a caller still holds after their step keep their values. A gradient that nobody holds costs no copy."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsharp.errors import ScheduleError
from fsharp.testing import simulate
from tests.modules import batches, each_strategy, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, assert_same

HELD = "layers.1.up.weight"


class Clones(TorchDispatchMode):
    """Counts copies."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def steps(comm, strategy, look, *, count=4, parts=1):
    """Train, and let ``look(model)`` see each gradient. Return the values, and how many copies each optimizer step makes."""
    model, optimizer = wrap(comm, strategy)
    clones = []
    for x, y in batches(comm, count):
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            model(xs, ys)["loss"].backward()
            look(model)
        with Clones() as counter:
            optimizer.step()
        optimizer.zero_grad()
        clones.append(counter.num)
    return values(model), clones


def nothing(model):
    """Nobody looks at a gradient."""


@each_strategy
@pytest.mark.parametrize("parts", [1, 2])
@on_ranks(DP)
def test_gradients_that_are_held_keep_their_values_in_memory_of_their_own(comm, strategy, parts):
    """In eager steps and by a schedule, whether a later backward adds to them or not. Callers may have weak references."""
    held, references = {}, []

    def look(model):
        for i, p in enumerate(model.parameters()):
            if (len(held) + i) % 3:
                held[p.grad] = p.grad.local.clone()
                references.append(weakref.ref(p.grad))

    found, _ = steps(comm, strategy, look, parts=parts)
    for (part, before), reference in zip(held.items(), references, strict=True):
        assert torch.equal(part.local, before)
        assert part.untyped_storage().nbytes() == before.nbytes
        assert reference() is part
    assert_same(found, steps(comm, strategy, nothing, parts=parts)[0])


@each_strategy
@on_ranks(DP)
def test_a_gradient_is_copied_only_if_somebody_holds_it(comm, strategy):
    held = []

    def hold(model):
        held.append([model.get_parameter(HELD).grad, model.head.weight.grad])

    def pass_by(model):
        for p in model.parameters():
            p.grad.mul_(1.0)
        model.get_parameter(HELD).grad.local.mul_(1.0)

    expected = steps(comm, strategy, nothing)[1]
    assert steps(comm, strategy, pass_by)[1] == expected
    assert steps(comm, strategy, hold)[1] == [each + 2 for each in expected]


@each_strategy
@on_ranks(DP)
def test_a_gradient_that_is_held_while_it_is_set_to_none_keeps_its_values(comm, strategy):
    """The parameter stays as it is. Only a gradient that somebody holds is copied."""
    model, optimizer = wrap(comm, strategy)
    for (x, y), is_held_by_caller in zip(batches(comm, 4), (True, False, True, False), strict=True):
        model(x, y)["loss"].backward()
        part = model.head.weight.grad if is_held_by_caller else None
        before, weight = model.head.weight.grad.local.clone(), values(model)["head.weight"].clone()
        assert before.count_nonzero() == before.numel()
        with Clones() as counter:
            model.head.weight.grad = None
        assert counter.num == is_held_by_caller
        assert model.head.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(values(model)["head.weight"], weight)
        if is_held_by_caller:
            assert torch.equal(part.local, before)


@each_strategy
@on_ranks(DP)
def test_gradients_that_are_held_keep_no_memory_of_the_module(comm, strategy):
    """Each step uses the same memory again, and a part that is released ends."""
    held, references, addresses = [], [], set()

    def look(model):
        addresses.add(model.get_parameter(HELD).grad.data_ptr())
        held[:-1] = []
        held.append(model.get_parameter(HELD).grad)
        references.append(weakref.ref(held[-1]))

    steps(comm, strategy, look, count=12)
    assert len(addresses) <= 3, "in eager steps, in the arena, and in an arena that has grown"
    assert sum(each() is not None for each in references) == 2


@each_strategy
@pytest.mark.parametrize("view", [lambda p: p.grad.local[1:], lambda p: p.grad.detach().local], ids=["rows", "detached"])
def test_views_keep_their_values_or_are_refused(strategy, view):
    """Gradients that rest in the arena end with their step, and a view cannot be moved. Under ``ddp`` the sums rest there."""

    def rank_fn(comm):
        held = []

        def look(model):
            part = model.get_parameter(HELD).grad
            held.append((part, view(model.get_parameter(HELD)), part.local.clone(), view(model.get_parameter(HELD)).clone()))

        steps(comm, strategy, look)
        return [torch.equal(part.local, was) and torch.equal(seen, old) for part, seen, was, old in held]

    if strategy == "zero1":
        assert simulate(DP, rank_fn) == [[True] * 4] * 2
        return
    with pytest.raises(ScheduleError, match=r"a view of the gradient of unit 'layers\.1' is held beyond its step"):
        simulate(DP, rank_fn)


@on_ranks(DP)
def test_gradients_are_moved_in_inference_mode_too(comm):
    model, _ = wrap(comm, "zero3")
    (batch,) = batches(comm, 1)
    model(*batch)["loss"].backward()
    part = model.head.weight.grad
    before = part.local.clone()
    with torch.inference_mode():
        model.zero_grad()
    assert torch.equal(part.local, before)
    assert not part.is_inference()
    part.mul_(2.0)
    assert torch.equal(part.local, before * 2)
