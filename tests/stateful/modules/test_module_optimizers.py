"""Classes of torch.optim that look at more than an element at a time: right where leaves are whole, else refused."""

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import OptionError, TreeError
from fsharp.stateful.modules.optim.probe import UpdateScope, probe_update_scope
from fsharp.testing import DebugPolicy, simulate
from tests import modules
from tests.modules import Block, close, descend, train, values
from tests.ranks import on_ranks
from tests.scheduling import DP, STRATEGIES, assert_same, every


class Lamb(torch.optim.Optimizer):
    """As a user would write it: each parameter's update has a size that is that of the parameter. Biases are not decayed."""

    def __init__(self, params, lr=1e-2, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.01)
                m, v = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.99 ** state["step"])
                update = m / (v.sqrt() + 1e-8) + group["weight_decay"] * p * (p.ndim > 1)
                ratio = torch.where((p.norm() > 0) & (update.norm() > 0), p.norm() / update.norm(), 1.0)
                p.sub_(update * ratio * group["lr"])


class Clipped(torch.optim.SGD):
    """Looks at all gradients together."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.5)
        return super().step(closure)


class Kept(torch.optim.SGD):
    """Elementwise, of a class that nobody knows."""


class Large(torch.optim.SGD):
    """Looks at a norm, of tensors that are larger than those that it is tried with."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel() > 64:
                    p.grad.div_(p.grad.norm())
        return super().step(closure)


class Normed(torch.optim.SGD):
    """Looks at the norm of each parameter's gradient, and at no shape."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad.norm())
        return super().step(closure)


class Half(torch.optim.Optimizer):
    """Two ways in one: groups with ``rows`` are divided by the largest of each row, others are SGD."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "rows": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = p.grad.abs().amax(-1, keepdim=True) + 1e-3 if group["rows"] else 1.0
                    p.sub_(p.grad / scale * group["lr"])


def groups_of(model):
    """Matrices by rows, all else by elements."""
    return [
        {"params": [p for p in model.parameters() if p.ndim == 2], "rows": True},
        {"params": [p for p in model.parameters() if p.ndim != 2], "rows": False},
    ]


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2]


CASES = {
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}, lambda model: model.parameters()),
    "Muon": (torch.optim.Muon, {"lr": 1e-2}, matrices),
    "Lamb": (Lamb, {}, lambda model: model.parameters()),
    "Half": (Half, {}, groups_of),
    "Clipped": (Clipped, {"lr": 0.1, "momentum": 0.9}, lambda model: model.parameters()),
}
WHOLE = {
    "ddp": (DP, fs.ddp("dp"), {}),
    "zero3, whole": (DP, fs.zero3("dp"), {"atoms": fs.layouts.LeafAtom()}),
    "zero1, whole": (DP, fs.zero1("dp"), {"atoms": fs.layouts.LeafAtom()}),
    "hsdp, whole": (*STRATEGIES["hsdp"], {"atoms": fs.layouts.LeafAtom()}),
}


def wrapped(comm, strategy, kind="plain", **options):
    return fs.shard_module(
        modules.make(kind), mesh=comm, strategy=strategy, units=[Block], policy=DebugPolicy(poison=True), **options
    )


def reference(case, steps, kind="plain"):
    cls, options, params = CASES[case]
    model = modules.make(kind)
    optimizer = cls(params(model), **options)
    train(model, optimizer, modules.batches(None, steps))
    return modules.detached(model)


@every(2, where=WHOLE, case=CASES)
def test_whole_leaves_in_their_shape(case, where):
    cls, options, params = CASES[case]
    mesh, strategy, extra = WHOLE[where]
    if case == "Clipped" and where != "ddp":
        where = "refused"

    def rank_fn(comm):
        model = wrapped(comm, strategy, **extra)
        if where == "refused":
            with pytest.raises(TreeError, match=r"Clipped looks at several parameters at once.* other ranks hold parts"):
                fs.ShardedOptimizer(params(model), cls, **options)
            return None
        optimizer = fs.ShardedOptimizer(params(model), cls, **options)
        train(model, optimizer, modules.batches(comm, 4, size=8 // comm.mesh.size))
        return values(model)

    expected = reference(case, 4)
    for mine in simulate(mesh, rank_fn):
        if where != "refused":
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)


@every(3, case=CASES, strategy=["zero1", "zero3", "hsdp"])
def test_refused_where_leaves_are_cut(case, strategy):
    cls, options, params = CASES[case]
    mesh, strategy = STRATEGIES[strategy]

    def rank_fn(comm):
        model = wrapped(comm, strategy)
        with pytest.raises(TreeError, match=rf"{cls.__name__} looks at .*fs\.ddp.*fs\.optim\.muon") as raised:
            fs.ShardedOptimizer(params(model), cls, **options)
        return str(raised.value)

    found = simulate(mesh, rank_fn)
    assert len(set(found)) == 1
    assert "'embed.weight'" in found[0]


@on_ranks(DP)
def test_a_learning_rate_of_zero_hides_nothing(comm):
    model = wrapped(comm, fs.zero3("dp"))
    with pytest.raises(TreeError, match="Lamb looks at"):
        fs.ShardedOptimizer(model.parameters(), Lamb, lr=0.0)


@pytest.mark.parametrize(
    ("cls", "scope"),
    [
        (Kept, UpdateScope.ELEMENT),
        (Normed, UpdateScope.PARAMETER),
        (Lamb, UpdateScope.PARAMETER),
        (torch.optim.Adafactor, UpdateScope.PARAMETER),
        (Clipped, UpdateScope.EVERYTHING),
    ],
)
def test_what_an_update_looks_at_is_found_by_trials(cls, scope):
    assert probe_update_scope(cls, {}, {"lr": 0.1}, torch.device("cpu")) is scope


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_elementwise_ones_have_flat_buffers(comm, strategy):
    """A class that nobody has heard of too, where leaves are cut: one tensor for each buffer, and the same bits."""
    found = []
    for cls in (Kept, torch.optim.SGD):
        model = wrapped(comm, STRATEGIES[strategy][1])
        optimizer = fs.ShardedOptimizer(model.parameters(), cls, lr=0.1, momentum=0.9)
        if (cls, strategy) == (Kept, "ddp"):
            shapes = sorted(p.shape for p in optimizer._updates.inner.param_groups[0]["params"])
            assert shapes == sorted(p.leaf.shape for p in model.parameters())
        else:
            assert [p.ndim for p in optimizer._updates.inner.param_groups[0]["params"]] == [1] * len(model.layout.units)
        train(model, optimizer, modules.batches(comm, 3))
        found.append(values(model))
    assert_same(*found)


def test_what_a_class_does_at_other_sizes_alone_is_right_where_leaves_are_whole():
    settings = {"lr": 0.1, "momentum": 0.9}
    modules.assert_trains_as_alone("ddp", train, optimizer=Large, settings=settings, count=3, units=[Block])


def test_a_trial_at_the_size_of_the_parameters():
    def rank_fn(comm):
        found = []
        for check_steps in (0, 2):
            model = wrapped(comm, fs.zero3("dp"))
            options = {"lr": 0.1, "momentum": 0.9, "check_steps": check_steps}
            train(model, fs.ShardedOptimizer(model.parameters(), Kept, **options), modules.batches(comm, 3))
            found.append(values(model))
        assert_same(*found)
        model = wrapped(comm, fs.zero3("dp"))
        with pytest.raises(TreeError, match=r"Large looks at whole parameters or their shapes, and ranks hold parts") as raised:
            fs.ShardedOptimizer(model.parameters(), Large, lr=0.1, check_steps=1)
        return str(raised.value)

    assert len(set(simulate(DP, rank_fn))) == 1


def test_steps_of_a_trial_are_for_a_class_alone():
    model = wrapped(fs.SingleComm(), fs.ddp("dp"))
    message = r"check_steps is 2, for a class of torch.optim alone.*fs.optim.with_elementwise_check\(pair, steps=2\)"
    with pytest.raises(OptionError, match=message):
        fs.ShardedOptimizer(model.parameters(), fs.optim.sgd(0.1), check_steps=2)
    fs.ShardedOptimizer(model.parameters(), fs.optim.sgd(0.1))  # nothing had changed


def test_the_way_of_each_group_is_its_own():
    """Groups of one class, of which one is elementwise: it may be sharded."""

    def groups(model):
        by_rows, named = {"head.weight", "embed.weight"}, list(model.named_parameters())
        return [{"params": [p for n, p in named if (n in by_rows) is rows], "rows": rows} for rows in (True, False)]

    def rank_fn(comm):
        model = wrapped(comm, {"**": fs.zero3("dp"), "head": fs.ddp("dp"), "embed": fs.ddp("dp")})
        optimizer = fs.ShardedOptimizer(groups(model), Half)
        assert [p.ndim for p in optimizer._updates.inner.param_groups[0]["params"]] == [2, 2]
        train(model, optimizer, modules.batches(comm, 3))
        return values(model)

    model = modules.make()
    train(model, Half(groups(model)), modules.batches(None, 3))
    for mine in simulate(DP, rank_fn):
        close(mine, modules.detached(model))


def test_what_cannot_be_tried_is_refused():
    model = wrapped(fs.SingleComm(), fs.ddp("dp"))
    with pytest.raises(TreeError, match="LBFGS computes the loss several times in a step"):
        fs.ShardedOptimizer(model.parameters(), torch.optim.LBFGS)
    with pytest.raises(TreeError, match=r"SparseAdam was tried .* raised RuntimeError: SparseAdam does not support dense"):
        fs.ShardedOptimizer(model.parameters(), torch.optim.SparseAdam)


def test_trying_draws_nothing():
    torch.manual_seed(3)
    expected = torch.rand(2)
    model = wrapped(fs.SingleComm(), fs.ddp("dp"))
    torch.manual_seed(3)
    fs.ShardedOptimizer(model.parameters(), type("Another", (Lamb,), {}))
    assert torch.equal(torch.rand(2), expected)


def test_leaves_without_a_gradient_are_left_alone():
    """In their shape as flat."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, which):
            return getattr(self, which)(x).square().sum()

    def steps(model, optimizer, data):
        for which in "aabab":
            descend(model(torch.linspace(0, 1, 12).view(3, 4), which), optimizer)

    modules.assert_trains_as_alone("ddp", steps, Two, optimizer=Lamb, settings={})


def test_options_in_the_group_of_a_pair_are_refused():
    """The pair does not read them: a learning rate that was set there changed nothing."""
    model = fs.shard_module(modules.make(), mesh=fs.SingleComm())
    optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(0.1))
    with pytest.raises(TreeError, match=r"param_groups\[0\]\['lr'\]: an \(init, update\) pair has no options there"):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(TreeError, match=r"param_groups\[0\]\['lr'\].* Pass a schedule, such as fs\.optim\.adamw\("):
        optimizer.step()


@pytest.mark.parametrize("change", ["parameter added", "parameter removed", "parameter replaced", "group added"])
def test_changed_groups_are_refused(change):
    """A parameter that was put into a group stayed as it was."""
    model = fs.shard_module(modules.make(), mesh=fs.SingleComm())
    *others, last = model.parameters()
    optimizer = fs.ShardedOptimizer(others, torch.optim.SGD, lr=0.1)
    optimizer.step()
    if change == "group added":
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [last]})
    elif change == "parameter added":
        optimizer.param_groups[0]["params"].append(last)
    elif change == "parameter replaced":
        optimizer.param_groups[0]["params"][0] = last
    else:
        optimizer.param_groups[0]["params"].pop()
    with pytest.raises(TreeError, match=r"param_groups cannot change: pass all groups to ShardedOptimizer"):
        optimizer.step()
