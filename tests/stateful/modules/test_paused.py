"""Parameters that are frozen and unfrozen between steps, as PEFT and schedules of layers do: what plain torch gives."""

import gc

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import LayoutError
from fsharp.testing import simulate
from tests import modules
from tests.modules import batches, descend, detached, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, every

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def toggle(on, *several):
    for module in several:
        module.requires_grad_(on)


def layer_every_other_step(model, i):
    toggle(i % 2 == 0, model.layers[1])


def one_parameter(model, i):
    model.head.weight.requires_grad = i % 2 == 1


def prefix(model, i):
    """The first layers are frozen after two steps, and unfrozen again: no backward comes to them."""
    toggle(not 2 <= i < 4, model.embed, model.layers[0])


def all_but_one(model, i):
    toggle(i % 3 != 1, model)
    toggle(True, model.layers[2].norm)


TOGGLES = {
    "a layer every other step": layer_every_other_step,
    "a parameter": one_parameter,
    "a prefix": prefix,
    "all but one": all_but_one,
}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, modules.ADAMW),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
}


def run(model, optimizer, data, change, *, inside=None):
    losses = []
    for i, (x, y) in enumerate(data):
        change(model, i)
        optimizer.zero_grad()
        loss = model(x, y)["loss"]
        if inside is not None:
            loss = loss + inside(model, x, y)
        loss.backward()
        losses.append([name for name, p in model.named_parameters() if p.grad is not None])
        optimizer.step()
    return losses


def compare(strategy, ranks, change, *, optimizer="AdamW", kind="plain", steps=6, inside=None):
    """Values and gradients there are, of fsharp and of plain torch."""
    mesh, (cls, options) = fs.Mesh({"dp": ranks}), OPTIMIZERS[optimizer]

    def rank_fn(comm):
        model, _ = wrap(comm, strategy, kind)
        own = fs.ShardedOptimizer(model.parameters(), cls, **options)
        seen = run(model, own, batches(comm, steps), change, inside=inside)
        return seen, values(model), model.scheduled_step.num_unscheduled_calls

    found = simulate(mesh, rank_fn)
    plain = modules.make(kind)
    joined = zip(*(batches(modules.RankOf(mesh, rank), steps) for rank in range(ranks)), strict=True)
    data = [(torch.cat([x for x, _ in each]), torch.cat([y for _, y in each])) for each in joined]
    expected = run(plain, cls(plain.parameters(), **options), data, change, inside=inside)
    for seen, whole, _ in found:
        assert seen == expected
        torch.testing.assert_close(whole, detached(plain), rtol=1e-3, atol=1e-4)
    return found


@every(16, strategy=STRATEGIES, ranks=(1, 2, 3), change=TOGGLES, optimizer=OPTIMIZERS)
def test_as_plain_torch(strategy, ranks, change, optimizer):
    """Parameters, and which gradients there are, after steps in which parameters are paused and go on."""
    compare(strategy, ranks, TOGGLES[change], optimizer=optimizer)


@every(2, kind=["tied", "checkpointed", "checkpointed, reentrant"], strategy=["zero1", "zero3"])
def test_other_modules(strategy, kind):
    compare(strategy, 2, lambda model, i: toggle(i % 2 == 0, model.head, model.layers[0]), kind=kind)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_reference_without_gradients_within_a_step(strategy):
    """As ``disable_adapter()`` around the forward of a reference, between the policy's forward and its backward."""

    def reference(model, x, y):
        model.requires_grad_(False)
        value = model(x.flip(0), y)["loss"]
        assert not value.requires_grad
        model.requires_grad_(True)
        return value

    compare(strategy, 2, lambda model, i: None, inside=reference, steps=4)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_gradients_pass_through_a_module_that_is_paused(strategy):
    """A GAN's discriminator, while its generator learns."""

    def rounds(model, other, first, second, xs):
        for x in xs:
            model.requires_grad_(False)
            model(other(x)).square().mean().backward()
            assert all(p.grad is None for p in model.parameters())
            second.step()
            second.zero_grad()
            model.requires_grad_(True)
            descend(model(x).square().mean() - model(other(x).detach()).mean(), first)

    def pair():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), nn.Sequential(nn.Linear(3, 3))

    with modules._seeds:
        plain = pair()
    xs = torch.randn(4, 2, 5, 3, generator=torch.Generator().manual_seed(1))

    def rank_fn(comm):
        with modules._seeds:
            made = pair()
        plans = {"mesh": comm, "strategy": getattr(fs, strategy)("dp"), "units": [nn.Linear]}
        model, other = (fs.shard_module(each, **plans) for each in made)
        optimizers = [fs.ShardedOptimizer(each.parameters(), torch.optim.Adam, lr=1e-2) for each in (model, other)]
        rounds(model, other, *optimizers, xs[:, comm.rank])
        return values(model) | {f"other.{name}": value for name, value in values(other).items()}

    found = simulate(DP, rank_fn)
    rounds(*plain, *[torch.optim.Adam(each.parameters(), lr=1e-2) for each in plain], xs.flatten(1, 2))
    expected = detached(plain[0]) | {f"other.{name}": p for name, p in detached(plain[1]).items()}
    for whole in found:
        torch.testing.assert_close(whole, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_between_a_forward_and_its_backward(strategy):
    """As in torch, where a leaf takes no gradient that does not require one when it comes."""

    def late(model, x, y):
        model.layers[1].requires_grad_(False)
        return model(x, y)["loss"]

    compare(strategy, 2, lambda model, i: toggle(True, model), inside=late, steps=3)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@on_ranks(DP)
def test_a_pair_leaves_alone_what_is_paused(comm, strategy):
    """As its class of torch.optim does, momentum and decay included."""
    found = []
    for kind, options in ((torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), (fs.optim.sgd(0.05, momentum=0.9), {})):
        model, _ = wrap(comm, strategy)
        run(model, fs.ShardedOptimizer(model.parameters(), kind, **options), batches(comm, 6), prefix)
        found.append(values(model))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_hundreds_of_alternations():
    """No schedule is made anew, and nothing piles up."""

    def rank_fn(comm):
        model = fs.shard_module(
            nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), mesh=comm, units=[nn.Linear], sync_from=0
        )
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1e-3)
        x = torch.ones(2, 3)
        counts = []
        for i in range(200):
            model[0].requires_grad_(i % 2 == 0)
            descend(model(x).square().mean(), optimizer)
            if i in (50, 199):
                gc.collect()
                counts.append(
                    (
                        model.scheduled_step.num_unscheduled_calls,
                        sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
                    )
                )
        return counts

    [(early, few), (late, many)] = simulate(fs.Mesh({"dp": 1}), rank_fn)[0]
    assert late == early
    assert many <= few + 5


@on_ranks(DP)
def test_refused(comm):
    model, _ = wrap(comm, "zero3", "frozen")
    frozen = model.layers[1].norm.weight
    frozen.requires_grad_(False)
    with pytest.raises(LayoutError, match=r"'layers\.1\.norm\.weight' was frozen when its module was sharded"):
        frozen.requires_grad = True
    assert not frozen.requires_grad
    model.head.requires_grad_(False)
    model.train_state = model.train_state
    assert not model.head.weight.requires_grad
    assert len(dict(model.named_full_parameters(trained=True))) == sum(p.is_trained for p in model.parameters())
