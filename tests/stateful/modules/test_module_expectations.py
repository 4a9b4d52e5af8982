"""What somebody who comes from torch expects of a wrapped module: it goes on, or it says in his words why not."""

import warnings

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, ScheduleError, TreeError
from tests import modules
from tests.modules import Block, descend, each_strategy, train, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, FLAT, STRATEGIES, assert_same, every

ONE = fs.Mesh({"dp": 1})


def unsharded(model, optimizer):
    with model.unsharded():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def written(model, optimizer):
    with model.unsharded(write=True), torch.no_grad():
        for p in model.parameters():
            p.add_(0.0)


def adopted(model, optimizer):
    model.train_state = model.train_state


def averaged(model, optimizer):
    with optimizer.averaged(), torch.no_grad():
        model(torch.zeros(2, dtype=torch.int64))


@every(4, way=[unsharded, written, adopted, averaged], strategy=FLAT)
@on_ranks(DP)
def test_a_forward_for_a_metric_is_in_nobodys_way(comm, way, strategy):
    """Without torch.no_grad(), in the first step and in one that follows a plan; what it returned may still be there."""

    def make():
        model, _ = wrap(comm, strategy)
        return model, fs.ShardedOptimizer(model.parameters(), fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.5))

    (model, optimizer), (expected, other) = make(), make()
    kept = []
    for x, y in modules.batches(comm, 3):
        kept.append(model(x))
        way(model, optimizer)
        train(model, optimizer, [(x, y)])
        kept.append(model(x, y)["loss"])
        way(model, optimizer)
        train(expected, other, [(x, y)])
    assert_same(values(model), values(expected))


@each_strategy
@on_ranks(DP)
def test_a_backward_that_comes_after_all_is_refused(comm, strategy):
    model, optimizer = wrap(comm, strategy)
    [(x, y)] = modules.batches(comm, 1)
    loss = model(x, y)["loss"]
    with model.unsharded():
        pass
    with pytest.raises(ScheduleError, match=r"for a forward that unsharded\(\) had abandoned.*call the model again"):
        loss.backward()
    train(model, optimizer, [(x, y)])
    expected, other = wrap(comm, strategy)
    train(expected, other, [(x, y)])
    assert_same(values(model), values(expected))


@on_ranks(DP)
def test_a_backward_that_comes_after_all_is_refused_from_within_a_unit(comm):
    """The first that such a backward asks for are parameters that autograd has saved."""
    model, _ = wrap(comm, "zero3")
    kept, [(x, y)] = [], modules.batches(comm, 1)
    handle = model.layers[1].up.register_forward_hook(lambda module, args, out: kept.append(out))
    model(x, y)
    handle.remove()
    with model.unsharded():
        pass
    with pytest.raises(ScheduleError, match=r"for a forward that unsharded\(\) had abandoned.*call the model again"):
        kept.pop().sum().backward()


@on_ranks(DP)
def test_a_late_backward_does_not_begin_that_of_the_next_step(comm):
    (model, optimizer), (expected, other) = (wrap(comm, "zero3") for _ in range(2))
    kept, (first, second) = [], modules.batches(comm, 2)
    for module, mine in ((model, optimizer), (expected, other)):
        handle = module.layers[1].up.register_forward_hook(lambda module, args, out: kept.append(out))
        module(*first)["loss"].backward(retain_graph=True)
        handle.remove()
        mine.step()
        mine.zero_grad()
        loss = module(*second)["loss"]
        if module is model:
            with pytest.raises(ScheduleError, match="call the model again"):
                kept[0].sum().backward()
        descend(loss, mine)
    assert_same(values(model), values(expected))


@on_ranks(ONE)
def test_gradients_are_not_given_up(comm):
    model, optimizer = wrap(comm, "zero3")
    [(x, y)] = modules.batches(comm, 1)
    with pytest.raises(ScheduleError, match="there are no gradients"):
        model.clip_grad_norm_(1.0)
    with model.accumulate():
        model(x, y)["loss"].backward()
    with pytest.raises(ScheduleError, match=r"unsharded\(\): .* have left gradients.*optimizer.step\(\) or zero_grad"):
        unsharded(model, optimizer)
    model(x, y)["loss"].backward()
    with pytest.raises(ScheduleError, match=r"unsharded\(\): .* have left gradients"):
        unsharded(model, optimizer)
    optimizer.zero_grad()
    unsharded(model, optimizer)


def test_complex_parameters_are_refused_by_name():
    class Phases(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x):
            return (self.phase * self.inner(x).sum()).abs().sum()

    with pytest.raises(TreeError, match=r"parameter 'phase' is complex64.*view_as_real.*requires_grad_\(False\)"):
        fs.shard_module(Phases(), mesh=fs.SingleComm())
    net = Phases()
    net.phase.requires_grad_(False)
    model = fs.shard_module(net, mesh=fs.SingleComm())
    model(torch.ones(2)).backward()
    assert model.inner.weight.grad is not None


@each_strategy
@on_ranks(ONE)
def test_frozen_parameters_that_are_rounded_say_so(comm, strategy):
    net = modules.make("adapted")
    expected = {name: p.detach().clone() for name, p in net.named_parameters()}
    options = {"mesh": comm, "strategy": STRATEGIES[strategy][1], "units": [Block]}
    model = fs.shard_module(net, precision=fs.Precision(compute=torch.bfloat16), **options)
    said = r"frozen parameters such as 'embed\.weight' were float32, and rest rounded in bfloat16.*trained=True"
    with pytest.warns(UserWarning, match=rf"named_full_parameters\(\): \d+ {said}"):
        found = dict(model.named_full_parameters())
    with pytest.warns(UserWarning, match=rf"unsharded\(\): \d+ {said}"), model.unsharded():
        assert model.embed.weight.dtype == torch.bfloat16
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, value in expected.items():
        assert torch.equal(found[name], value if name in trained else value.bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(dict(model.named_full_parameters(trained=True))) == trained
        exact = fs.shard_module(modules.make("adapted"), **options)
        assert_same(dict(exact.named_full_parameters()), {name: expected[name] for name in dict(exact.named_full_parameters())})


@pytest.mark.parametrize("way", ["all", "some", "groups"])
def test_an_optimizer_of_before_refuses_to_step(way):
    net = modules.make()
    params = {
        "all": lambda: net.parameters(),
        "some": lambda: [net.head.bias],
        "groups": lambda: [{"params": [net.head.weight]}, {"params": [net.head.bias], "lr": 1.0}],
    }[way]()
    optimizer, other = torch.optim.SGD(params, lr=0.1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    model = fs.shard_module(net, mesh=fs.SingleComm(), units=[Block])
    model(torch.zeros(2, dtype=torch.int64)).sum().backward()
    with pytest.raises(TreeError, match=r"this SGD was made before shard_module.*fs\.ShardedOptimizer\(model\.parameters"):
        optimizer.step()
    other.step()
    fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).step()


@each_strategy
@on_ranks(DP)
def test_backward_passes_that_cannot_be_say_what_to_do(comm, strategy):
    model, optimizer = wrap(comm, strategy)
    [(x, y)] = modules.batches(comm, 1)
    with pytest.raises(ScheduleError, match=r"create_graph=True.*fn, params = model\.functional\(\)"):
        model(x, y)["loss"].backward(create_graph=True)
    optimizer.zero_grad()
    loss = model(x, y)["loss"]
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises((ScheduleError, RuntimeError), match=r"call backward before optimizer\.step"):
        loss.backward()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(lambda size: fs.Mesh({"dp": size}))
def test_a_gradient_that_all_ranks_give_up(comm, strategy, size):
    """Of a short leaf some ranks hold nothing: that is no difference between them."""
    model = fs.shard_module(torch.nn.Linear(4, 2), mesh=comm, strategy=getattr(fs, strategy)("dp"), sync_from=0)
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    before = values(model)
    for _ in range(4):
        model(torch.ones(2, 4)).square().mean().backward()
        model.bias.grad = None
        assert model.bias.grad is None
        optimizer.step()
        optimizer.zero_grad()
    same = {name for name, value in values(model).items() if torch.equal(value, before[name])}
    assert same == {"bias"}


def test_a_backward_inside_of_a_forward_does_not_end_the_microbatch():
    """Of a root that has parameters of its own beside those of a unit."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.h = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)

        def forward(self, x):
            x = x.detach().requires_grad_()
            y = self.a(x)
            [slope] = torch.autograd.grad(y.tanh().sum(), x, retain_graph=True)
            return self.h(y + slope)

    def steps(model, optimizer, data):
        for _ in data:
            descend(model(torch.ones(2, 3)).sum(), optimizer)

    modules.assert_trains_as_alone("zero3", steps, Net, optimizer=torch.optim.SGD, settings={"lr": 0.1}, units=["a"])


def called_with_others(model):
    torch.func.functional_call(model, {"head.bias": torch.zeros(modules.VOCAB)}, (torch.zeros(2, dtype=torch.int64),))


def given_another(model):
    model.layers[0].up.weight = nn.Parameter(torch.zeros(7, modules.DIM))


def without_one(model):
    model.layers[0].up.bias = None


def tied_afterwards(model):
    model.layers[1].up.weight = model.layers[0].up.weight


def turned_into_a_tensor(model):
    del model.head.weight
    model.head.weight = torch.zeros(modules.VOCAB, modules.DIM)


@pytest.mark.parametrize(
    "change", [called_with_others, given_another, without_one, tied_afterwards, turned_into_a_tensor], ids=lambda f: f.__name__
)
@each_strategy
@on_ranks(DP)
def test_a_parameter_that_was_replaced_is_not_ignored(comm, strategy, change):
    model, _ = wrap(comm, strategy)

    def change_and_call():
        with torch.no_grad():
            change(model)
            model(torch.zeros(2, dtype=torch.int64))

    with pytest.raises(TreeError, match=r"parameter '.*' was removed or replaced .*unsharded\(write=True\)"):
        change_and_call()


class Keeps(nn.Module):
    """Has its parameter in a list as well."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.all = [self.w]

    def forward(self, x):
        return x * self.all[0]


def test_a_parameter_that_is_kept_elsewhere_too_is_refused():
    with pytest.raises(TreeError, match=r"inner\.all holds parameter 'inner\.w' or a view.*ParameterList"):
        fs.shard_module(nn.ModuleDict({"inner": Keeps()}), mesh=ONE)


@each_strategy
@on_ranks(DP)
def test_what_is_sharded_is_not_sharded_again(comm, strategy):
    model, optimizer = wrap(comm, strategy)
    for other in (model, model.head, nn.Sequential(model, nn.Linear(2, 2))):
        with pytest.raises(TreeError, match="belongs to a ShardedModule already"):
            fs.shard_module(other, mesh=comm)
    train(model, optimizer, modules.batches(comm, 1))


def test_zero_gradients_are_not_kept():
    model, optimizer = wrap(fs.SingleComm(ONE), "zero3")
    for zero_grad in (model.zero_grad, optimizer.zero_grad):
        with pytest.raises(ScheduleError, match="set_to_none=False"):
            zero_grad(set_to_none=False)


class Half(nn.Module):
    """Half of a model that has its embedding from outside, as an encoder or a decoder has."""

    def __init__(self, embed):
        super().__init__()
        self.embed, self.linear = embed, nn.Linear(modules.DIM, modules.DIM)

    def forward(self, x):
        return self.linear(self.embed(x))


class Shares(nn.Module):
    """One embedding, of the root and of both halves."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(modules.VOCAB, modules.DIM)
        self.encoder, self.decoder = Half(self.embed), Half(self.embed)

    def forward(self, x, y):
        return (self.embed(x) + self.encoder(x) + self.decoder(y)).square().mean()


@each_strategy
def test_a_module_that_several_units_share(strategy):
    """Its parameter is gathered with the root when a half that has it too is called."""

    def steps(model, optimizer, data):
        for x, y in data:
            descend(model(x, y), optimizer)

    modules.assert_trains_as_alone(strategy, steps, Shares, optimizer=torch.optim.SGD, settings={"lr": 0.5}, units=[Half])


def transposed_in_place(net):
    with torch.no_grad():
        net[0].weight.t_()


def transposed_data(net):
    net[0].weight.data = net[0].weight.data.t()


def replaced_by_a_view(net):
    net[0].weight = nn.Parameter(net[0].weight.detach().t())


@each_strategy
@pytest.mark.parametrize("change", [transposed_in_place, transposed_data, replaced_by_a_view])
@on_ranks(DP)
def test_a_square_weight_transposed_in_unsharded_stays_transposed(comm, strategy, change):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    expected = net[0].weight.detach().t().clone()
    model = fs.shard_module(net, mesh=comm, strategy=STRATEGIES[strategy][1])
    with model.unsharded(write=True):
        change(model)
    torch.testing.assert_close(values(model)["0.weight"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("write", [False, True])
@on_ranks(DP)
def test_a_layer_frozen_in_unsharded_is_frozen_afterwards(comm, write):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"))
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def step():
        before = values(model)
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {name for name, value in values(model).items() if not torch.equal(value, before[name])}

    with model.unsharded(write=write):
        model[0].requires_grad_(False)
    assert step() == {"1.weight", "1.bias"}
    with model.unsharded(write=write):
        assert not model[0].weight.requires_grad
        model[0].requires_grad_(True)
    assert step() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def tie(net):
    net[1].weight = net[0].weight


def tie_memory(net):
    net[1].weight.data = net[0].weight.data


def untie(net):
    net[2].weight = nn.Parameter(net[3].weight.detach().clone())


def remove(net):
    del net[0].weight


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (tie, "shares memory with '0.weight'"),
        (tie_memory, "shares memory with '0.weight'"),
        (untie, "is not tied as before"),
        (remove, r"'0\.weight' is now a NoneType, expected shape \[5, 5\]\. Remove, reshape and parametrize parameters before"),
    ],
)
@on_ranks(DP)
def test_ties_cannot_change_in_unsharded(comm, change, text):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    net[3].weight = net[2].weight
    model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"))
    before = values(model)
    with pytest.raises(TreeError, match=text), model.unsharded(write=True):
        change(model)
    assert_same(values(model), before)


@on_ranks(DP)
def test_a_tie_in_unsharded_on_one_rank_alone_is_heard_by_all(comm):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"))
    change = tie if comm.rank == 1 else nn.Module.modules
    with pytest.raises((TreeError, AgreementError), match=r"shares memory with '0\.weight'"), model.unsharded(write=True):
        change(model)
    values(model)  # all ranks go on
