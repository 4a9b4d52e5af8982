"""Steps of a sharded module as in plain torch, wherever zero_grad() and writes come; what is refused without zero_grad()."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fsharp as fs
from fsharp.errors import ScheduleError
from fsharp.testing import DebugPolicy, processes, simulate
from tests import modules
from tests.modules import ADAMW, close, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, FLAT, STRATEGIES, every


def after(model, optimizer, x, y):
    modules.descend(model(x, y)["loss"], optimizer)


def at_the_start(model, optimizer, x, y):
    optimizer.zero_grad()
    model(x, y)["loss"].backward()
    optimizer.step()


def before_the_backward(model, optimizer, x, y):
    loss = model(x, y)["loss"]
    model.zero_grad()
    loss.backward()
    optimizer.step()


def by_hand(model, optimizer, x, y):
    for p in model.parameters():
        p.grad = None
    model(x, y)["loss"].backward()
    optimizer.step()


def between_two_backwards(model, optimizer, x, y):
    first, second = model(x, y)["loss"], model((x + 1) % modules.VOCAB, y)["loss"]
    first.backward()
    optimizer.zero_grad()
    second.backward()
    optimizer.step()
    optimizer.zero_grad()


def between_two_of_one_graph(model, optimizer, x, y):
    loss = model(x, y)["loss"]
    loss.backward(retain_graph=True)
    model.zero_grad()
    (2 * loss).backward()
    optimizer.step()
    model.zero_grad()


def between_backwards_of_other_units(model, optimizer, x, y):
    model(x, y)["loss"].backward()
    later = model.layers[1](torch.ones(2, modules.DIM)).square().sum()
    optimizer.zero_grad()
    later.backward()
    optimizer.step()
    optimizer.zero_grad()


def two_losses(model, optimizer, x, y):
    first, second = model(x, y)["loss"], model(x, y.flip(0) * 0)["loss"]
    first.backward()
    second.backward()
    optimizer.step()
    optimizer.zero_grad()


def one_graph_twice(model, optimizer, x, y):
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def of_inputs_first(model, optimizer, x, y):
    hidden = torch.linspace(-1, 1, 2 * modules.DIM).view(2, modules.DIM).requires_grad_()
    (slope,) = torch.autograd.grad(model.layers[0](hidden).sum(), hidden)
    assert slope.abs().sum() > 0
    after(model, optimizer, x, y)


def after_a_gradient_by_autograd(model, optimizer, x, y):
    first, second = model(x, y)["loss"], model((x + 1) % modules.VOCAB, y)["loss"]
    torch.autograd.grad(first, list(model.parameters()))
    second.backward()
    optimizer.step()
    torch.autograd.grad(model(x, y)["loss"], list(model.parameters()))
    optimizer.zero_grad()


def left_out(model, optimizer, x, y):
    model(x, y)["loss"].backward()
    optimizer.zero_grad()
    after(model, optimizer, x, y)


@torch.no_grad()
def scaled(module, factor):
    for p in module.parameters():
        p.mul_(factor)


def writes_around_a_backward(model, optimizer, x, y):
    scaled(model, 2)
    loss = model(x, y)["loss"]
    loss.backward()
    scaled(model, 1.5)
    optimizer.step()
    optimizer.zero_grad()


def writes_between_two_backwards(model, optimizer, x, y):
    """In steps that follow a schedule, too: it keeps what a backward has gathered for the next forward."""
    model(x, y)["loss"].backward()
    scaled(model.layers[1], 0.9)
    with torch.no_grad():
        model(x, y)
    after(model, optimizer, x, y)


WAYS = [
    after, at_the_start, before_the_backward, by_hand, between_two_backwards, between_two_of_one_graph,
    between_backwards_of_other_units, two_losses, one_graph_twice, of_inputs_first, after_a_gradient_by_autograd, left_out,
    writes_around_a_backward, writes_between_two_backwards,
]  # fmt: skip


@every(4, way=WAYS, strategy=FLAT)
def test_as_in_torch(strategy, way):
    def steps(model, optimizer, data):
        for x, y in data:
            way(model, optimizer, x, y)

    modules.assert_trains_as_alone(strategy, steps, count=4, units=[modules.Block])


@pytest.mark.parametrize("way", [between_two_backwards, left_out], ids=lambda way: way.__name__)
@on_ranks(DP)
def test_steps_of_one_kind_share_a_schedule(comm, way):
    model, optimizer = wrap(comm, "zero3")
    for x, y in modules.batches(comm, 8):
        way(model, optimizer, x, y)
    assert model.scheduled_step.num_unscheduled_calls <= 4


def step_again(model, optimizer, scaler, x, y):
    optimizer.step()


def step_after_a_forward(model, optimizer, scaler, x, y):
    model(x, y)
    optimizer.step()


def unscale_again(model, optimizer, scaler, x, y):
    scaler.scale(model(x, y)["loss"])
    scaler.unscale_(optimizer)


def backward_again(model, optimizer, scaler, x, y):
    model(x, y)["loss"].backward()


USED_UP = r"optimizer\.step\(\) has used up the gradients.*'embed\.weight'.*Call optimizer\.zero_grad\(\)"


@every(
    4,
    left_out=[False, True],
    again=[step_again, step_after_a_forward, unscale_again, backward_again],
    strategy=["ddp", "zero3"],
)
def test_gradients_are_used_once(strategy, again, left_out):
    """Torch would use them again. After the error and zero_grad() all is as it was."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        scaler = fs.GradScaler("cpu", init_scale=1.0)
        data = modules.batches(comm, 3)
        scaler.scale(model(*data[0])["loss"] * (torch.inf if left_out else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        with pytest.raises(ScheduleError, match=USED_UP):
            again(model, optimizer, scaler, *data[1])
        optimizer.zero_grad()
        optimizer.step()  # nothing
        after(model, optimizer, *data[2])
        return values(model)

    whole = modules.make()
    optimizer = torch.optim.AdamW(whole.parameters(), **ADAMW)
    for x, y in modules.batches(None, 3)[left_out * 2 :: 2]:
        after(whole, optimizer, x, y)
    for mine in simulate(DP, rank_fn):
        close(mine, modules.detached(whole))


def test_one_rank_alone_without_zero_grad_is_heard_of_by_all():
    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3")
        try:
            for x, y in modules.batches(comm, 3):
                model(x, y)["loss"].backward()
                optimizer.step()
                if comm.rank == 0:
                    optimizer.zero_grad()
        except fs.errors.FsharpError as error:
            return str(error)

    for text in processes(DP, rank_fn):
        assert "has used up the gradients of the previous step, such as the gradient of 'embed.weight'" in text


@on_ranks(DP)
def test_zero_grad_inside_of_a_backward_is_refused(comm):
    model, optimizer = wrap(comm, "zero3")
    [(x, y)] = modules.batches(comm, 1)
    model.layers[1].register_full_backward_hook(lambda *args: optimizer.zero_grad())
    with pytest.raises(ScheduleError, match=r"zero_grad\(\): a backward is under way"):
        model(x, y)["loss"].backward()


@every(8, zero_at=[(), (1,), (1, 3), (0, 2, 3, 4, 5), range(6)], strategy=FLAT, foreach=[False, True])
def test_torch_optimizers_of_parts_use_gradients_again(strategy, zero_at, foreach):
    """A step under way sees what an optimizer has written, with its schedule and without, in forwards and evaluations."""
    small = partial(modules.Net, 2)

    def steps(model, data):
        optimizer, seen = torch.optim.AdamW(model.parameters(), foreach=foreach, **ADAMW), []
        for i, (x, y) in enumerate(data):
            model(x, y)["loss"].backward()
            optimizer.step()
            with torch.no_grad():
                seen.append(model(torch.arange(3)))
            if i in zero_at:
                optimizer.zero_grad()
        optimizer.step()
        return seen

    def rank_fn(comm):
        policy = DebugPolicy(poison=True)
        model = fs.shard_module(
            modules.seeded(small), mesh=comm, strategy=STRATEGIES[strategy][1], units=[modules.Block], policy=policy
        )
        return steps(model, modules.batches(comm, 6)), values(model)

    whole = modules.seeded(small)
    expected = steps(whole, modules.batches(None, 6))
    for found in simulate(DP, rank_fn):
        close(found, (expected, modules.detached(whole)))
