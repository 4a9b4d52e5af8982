"""Gradients of a module that are not simply there: parameters without one, and torch.autograd.grad."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsharp as fs
from fsharp.errors import LayoutError, ScheduleError
from fsharp.testing import DebugPolicy
from tests import modules
from tests.modules import ADAMW, DIM, VOCAB, Block, descend, each_strategy, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, FLAT, STRATEGIES, assert_same, every, mesh_of, turned


class Choosy(nn.Module):
    """Uses some of what it has: never ``spare``, a branch of each block as it is told, a whole block as it is told."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.spare = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 3)

        def forward(self, x, branch):
            if branch == "both":
                return x + self.left(x) + self.right(x)
            return x + getattr(self, branch)(x)

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.unused = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB), nn.Parameter(torch.ones(5))
        self.forks, self.block = nn.ModuleList([self.Fork() for _ in range(2)]), Block()

    def forward(self, x, y, branch="left", with_block=False):
        x = self.embed(x)
        for fork in self.forks:
            x = fork(x, branch)
        x = self.block(x) if with_block else x
        return F.cross_entropy(self.head(x), y)


PLANS = {
    "always the same": [("left", True)] * 5,
    "a block at times": [("left", True), ("left", False), ("left", False), ("left", True), ("left", True)],
    "a block in turns": [("left", True), ("left", False)] * 3,
    "branches in turns": [("both", True), ("left", True)] * 3,
    "other branches": [("left", True), ("right", True), ("right", True), ("both", True), ("left", True)],
}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, ADAMW),
    "fused AdamW": (torch.optim.AdamW, {**ADAMW, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
}


def sharded(comm, strategy, cls=torch.optim.AdamW, **options):
    strategy = STRATEGIES[strategy][1] if isinstance(strategy, str) else strategy
    model, units = modules.seeded(Choosy), [Choosy.Fork, Block]
    model = fs.shard_module(model, mesh=comm, strategy=strategy, units=units, policy=DebugPolicy(poison=True))
    return model, fs.ShardedOptimizer(model.parameters(), cls, **(options or ADAMW))


@every(9, strategy=turned(STRATEGIES, "zero3"), passes=[["both", "left"], ["left", "left", "right"], ["right", "", "right"]])
def test_backwards_one_after_another_add_up(strategy, passes):
    """Each backward but the first adds to gradients that are summed over ranks. Units that it does not reach keep theirs."""

    def steps(model, optimizer, data):
        for x, y in data:
            for branch in passes:
                loss = model(x, y, branch, with_block=True) if branch else model.block(torch.ones(len(x), DIM)).square().mean()
                loss.backward()
                assert model.block.gain.grad is not None
            optimizer.step()
            optimizer.zero_grad()

    options = {"optimizer": torch.optim.SGD, "settings": {"lr": 0.1}, "count": 4}
    modules.assert_trains_as_alone(strategy, steps, Choosy, units=[Choosy.Fork, Block], **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(mesh_of)
def test_an_infinite_gradient_stays_infinite_in_later_backwards(comm, strategy):
    model = modules.seeded(lambda: nn.Linear(3, 4, bias=False))
    nn.init.zeros_(model.weight)
    model = fs.shard_module(model, mesh=comm, strategy=STRATEGIES[strategy][1])
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    for _ in range(2):
        model(torch.tensor([math.inf if comm.rank == 1 else 1.0, 2.0, 3.0])).sum().backward()
    optimizer.step()
    assert torch.equal(values(model)["weight"], torch.tensor([-math.inf, -4.0, -6.0]).expand(4, 3))


@every(2, strategy=STRATEGIES, wire=[torch.bfloat16, fs.formats.mxint8])
@on_ranks(mesh_of)
def test_sums_are_not_rounded_again_by_later_backwards(comm, strategy, wire):
    """The wire holds the gradients of two ranks, 1 and 256, but not their sum. Gradients of later backwards are zero."""
    model = modules.seeded(lambda: nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model.weight)
    precision, last = fs.Precision(wire=wire), comm.mesh.size - 1
    model = fs.shard_module(model, mesh=comm, strategy=STRATEGIES[strategy][1], precision=precision)
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    for x in ({0: 1.0, last: 256.0}.get(comm.rank, 0.0), 0.0, 0.0):
        model(torch.tensor([x])).sum().backward()
    optimizer.step()
    assert values(model)["weight"].item() == -257 / comm.mesh.size


@every(13, optimizer=OPTIMIZERS, plan=PLANS, strategy=("ddp", "zero2", "zero3", "hfsdp"))
def test_parameters_without_a_gradient_are_left_alone(strategy, plan, optimizer):
    """Neither decay nor momentum moves them, and their steps are not counted; as in torch."""
    cls, options = OPTIMIZERS[optimizer]

    def steps(model, optimizer, data):
        for (x, y), (branch, with_block) in zip(data, PLANS[plan], strict=True):
            model(x, y, branch, with_block).backward()
            assert model.unused.grad is None
            assert model.forks[0].spare.weight.grad is None
            assert (model.block.gain.grad is None) == (not with_block)
            assert (model.forks[1].right.bias.grad is None) == (branch == "left")
            optimizer.step()
            optimizer.zero_grad()

    units, count = [Choosy.Fork, Block], len(PLANS[plan])
    modules.assert_trains_as_alone(strategy, steps, Choosy, optimizer=cls, settings=options, count=count, units=units)


@each_strategy
def test_a_gradient_on_one_rank_is_one_on_all(strategy):
    """Ranks use other branches: the mean over ranks is the gradient of both."""

    def steps(model, optimizer, data):
        for x, y in data:
            if isinstance(model, fs.ShardedModule):
                loss = model(x, y, "left" if model.comm.rank == 0 else "right")
            else:
                loss = sum(model(*half) / 2 for half in zip(x.chunk(2), y.chunk(2), ("left", "right"), strict=True))
            loss.backward()
            assert model.forks[0].left.weight.grad is not None
            assert model.forks[0].right.weight.grad is not None
            assert model.forks[0].spare.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()

    modules.assert_trains_as_alone(strategy, steps, Choosy, units=[Choosy.Fork, Block])


def test_accumulated_microbatches_count_together():
    def steps(model, optimizer, data):
        for x, y in data:
            with getattr(model, "accumulate", nullcontext)():
                (model(x, y, "left") / 2).backward()
            (model(x, y, "right") / 2).backward()
            assert model.forks[0].left.weight.grad is not None
            assert model.forks[0].spare.bias.grad is None
            optimizer.step()
            optimizer.zero_grad()

    modules.assert_trains_as_alone("zero3", steps, Choosy, units=[Choosy.Fork, Block])


def mean_gradients(comm, strategy, kind="plain"):
    """By autograd.grad, and by backward."""
    model, optimizer = wrap(comm, strategy, kind)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [model.get_parameter(name) for name in names]
    for x, y in modules.batches(comm, 3):
        found = torch.autograd.grad(model(x, y)["loss"], parameters)
        assert all(p.grad is None for p in parameters)
        kept = {name: grad.local.clone() for name, grad in zip(names, found)}
        model(x, y)["loss"].backward()
        for name, p in zip(names, parameters):
            assert p.grad is not None
            assert torch.equal(p.grad.local, kept[name])
            assert found[names.index(name)].shape == p.shape
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@every(4, strategy=FLAT, kind=[kind for kind in modules.KINDS if "reentrant" not in kind])  # which torch refuses
@on_ranks(DP)
def test_autograd_grad_has_the_bits_of_backward(comm, strategy, kind):
    """And changes nothing of the training around it."""
    model, optimizer = wrap(comm, strategy, kind)
    modules.train(model, optimizer, modules.batches(comm, 3))
    assert_same(mean_gradients(comm, strategy, kind), values(model))


@on_ranks(DP)
def test_autograd_grad_with_respect_to_activations_as_well(comm):
    model, _ = wrap(comm, "zero3")
    x, y = modules.batches(comm, 1)[0]
    scale = torch.ones((), requires_grad=True)
    loss = model(x, y)["loss"] * scale
    by_scale, part = torch.autograd.grad(loss, [scale, model.head.weight])
    assert torch.equal(by_scale, loss.detach())
    if torch.__version__ >= (2, 13):  # before, torch takes no dictionaries
        with_names = torch.autograd.grad(model(x, y)["loss"], {"head": model.head.weight})
        assert torch.equal(with_names["head"].local, part.local)
    assert part.full_shape == torch.Size([VOCAB, DIM])


@on_ranks(DP)
def test_a_pass_that_comes_to_no_parameter_leaves_a_forward_its_backward(comm):
    model, _ = wrap(comm, "zero3")
    [(x, y)] = modules.batches(comm, 1)
    loss, other = model(x, y)["loss"], torch.ones((), requires_grad=True)
    assert torch.autograd.grad(other * 2, [model.head.weight], allow_unused=True) == (None,)
    loss.backward()
    assert model.head.weight.grad is not None


@on_ranks(DP)
def test_a_checkpoint_of_a_functional_module_has_to_be_a_unit(comm):
    model, _ = wrap(comm, "zero3", "checkpointed", units=None)
    [(x, y)] = modules.batches(comm, 1)
    fn, params = model.functional()
    grad = fs.value_and_grad(lambda params, batch, comm: fn(params, *batch, comm=comm)["loss"])
    with pytest.raises(LayoutError, match=r"has to be a unit or inside of one, and of model\.functional\(\) a unit"):
        grad(params, (x, y), comm=comm)
    with torch.no_grad(), pytest.raises(LayoutError) as caught:
        model.head.weight.view(-1)
    assert "checkpoint" not in str(caught.value)


@on_ranks(DP)
def test_parameters_of_two_modules_are_refused(comm):
    a, b = (fs.shard_module(nn.Linear(3, 3), mesh=comm, strategy=fs.ddp("dp"), sync_from=0) for _ in range(2))
    with pytest.raises(ScheduleError, match=r"'weight' is a parameter of another module\. Call it once for each"):
        torch.autograd.grad(b(a(torch.ones(2, 3))).sum(), [a.weight, b.weight])
    with pytest.raises(LayoutError, match=r"Use torch\.autograd\.grad"):
        a(torch.ones(2, 3)).sum().backward(inputs=[a.weight])
    other = fs.shard_module(nn.Linear(3, 3), mesh=comm, sync_from=0)
    x = torch.ones((), requires_grad=True)
    assert torch.autograd.grad(x * 2, [other.weight], allow_unused=True) == (None,)


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
@on_ranks(mesh_of)
def test_what_is_missing_costs_one_small_collective_along_each_axis(comm, strategy):
    counting = fs.collectives.CountingComm(comm)
    model, optimizer = sharded(counting, strategy, torch.optim.SGD, lr=0.1)
    found = []
    for x, y in modules.batches(comm, 4, size=8 // comm.mesh.size):
        counting.calls.clear()
        descend(model(x, y), optimizer)
        small = [call for call in counting.calls.elements() if call.op == "all_reduce" and call.nbytes < 40]
        found.append([sum(call.axis == axis for call in small) for axis in comm.mesh.names])
    assert len(list(model.parameters())) == 23
    assert found[1:] == [[1] * len(comm.mesh.names)] * 3


@on_ranks(DP)
def test_what_autograd_grad_refuses(comm):
    model, optimizer = sharded(comm, "zero3")
    x, y = modules.batches(comm, 1)[0]
    every = list(model.parameters())
    with pytest.raises(ScheduleError, match=r"create_graph.*model.functional\(\)"):
        torch.autograd.grad(model(x, y), every, create_graph=True)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"input 'unused' was not used\. Set allow_unused"):
        torch.autograd.grad(model(x, y), every)
    found = dict(zip(dict(model.named_parameters()), torch.autograd.grad(model(x, y), every, allow_unused=True)))
    assert {name for name, grad in found.items() if grad is None} >= {"unused", "forks.0.spare.weight", "block.gain"}
    filled = torch.autograd.grad(model(x, y), every, materialize_grads=True)
    assert not any(grad.local.any() for grad, name in zip(filled, found) if found[name] is None)
    model(x, y).backward()
    with pytest.raises(ScheduleError, match="this step has gradients of other backward passes"):
        torch.autograd.grad(model(x, y), every, allow_unused=True)


GRADIENTS = {
    "read": lambda model: model.head.weight.grad,
    "set to None": lambda model: setattr(model.head.weight, "grad", None),
    "zero_grad() of a layer": lambda model: model.layers[0].zero_grad(),
    "clip_grad_norm_() of torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
}


@pytest.mark.parametrize("what", GRADIENTS)
@on_ranks(DP)
def test_gradients_that_ranks_have_not_summed_are_not_shown(comm, what):
    """As None they would be left out of norms and of what is set to None; frozen parameters have none."""
    model, _ = modules.wrap(comm, "zero2", "frozen")
    [(x, y)] = modules.batches(comm, 1)
    with model.accumulate():
        model(x, y)["loss"].backward()
    assert model.embed.weight.grad is None
    with pytest.raises(ScheduleError, match=r"grad of parameter '(head|layers\.0)\..*inside of accumulate"):
        GRADIENTS[what](model)
    model.zero_grad()
    assert model.head.weight.grad is None
    model(x, y)["loss"].backward()
    assert model.head.weight.grad.norm() > 0


PASSES = ((0,), (0,), (0, 0), (1, 0, 0), (0, 0, 0), (0, 0), (0,), (1, 0, 0), (0, 0), (0,), (0, 0, 0))
"""Of each step its backward passes; 1: inside of accumulate()."""


@every(2, strategy=("ddp", "zero1", "zero2", "zero3", "hfsdp"), ranks=(2, 3))
@on_ranks(lambda strategy, ranks: fs.Mesh({"dp": ranks}) if strategy in FLAT else STRATEGIES[strategy][0])
def test_any_number_of_backward_passes_add_up(comm, strategy, ranks):
    """More in one step than in the one that was recorded, and fewer: without accumulate() each of them takes its sums back."""
    net = nn.Linear(3, 1, bias=False)
    nn.init.ones_(net.weight)
    model = fs.shard_module(net, mesh=comm, strategy=STRATEGIES[strategy][1], policy=DebugPolicy(poison=True))
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.0)
    found = []
    for i, passes in enumerate(PASSES):
        for accumulate in passes:
            with model.accumulate() if accumulate else nullcontext():
                model(torch.ones(1, 3)).sum().backward()
            if i % 2:
                with torch.no_grad():
                    model(torch.ones(1, 3))
        found.append(model.weight.grad.sum().item())
        optimizer.step()
        optimizer.zero_grad()
    assert found == pytest.approx([3.0 * len(passes) for passes in PASSES])


class TwiceEmpty(nn.Module):
    """Has one parameter without elements at two paths, and another one with the same shape."""

    def __init__(self):
        super().__init__()
        self.linear, self.first, self.second = nn.Linear(3, 3), nn.Module(), nn.Module()
        self.first.none = self.second.none = nn.Parameter(torch.empty(0, 3))
        self.other = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return self.linear(x).sum() + self.second.none.sum()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@on_ranks(DP)
def test_an_empty_parameter_at_two_paths_is_tied(comm, strategy):
    """As in torch, a gradient that comes by one path is there by the other."""
    model = fs.shard_module(TwiceEmpty(), mesh=comm, strategy=STRATEGIES[strategy][1], units=[nn.Linear], sync_from=0)
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 3)).backward()
        assert model.first.none is model.second.none
        assert model.first.none.grad.shape == (0, 3)
        assert model.other.grad is None
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    model.load_state_dict(state)
    assert {"first.none", "second.none", "other"} <= state.keys()
