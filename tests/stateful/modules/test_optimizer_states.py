"""State dicts of optimizers: of classes that look at shapes, of pairs, before a first step; and what is refused."""

import copy
import operator
from functools import partial

import optree
import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, TreeError
from fsharp.testing import simulate
from tests import modules
from tests.modules import close, descend, train, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, HYBRID, STRATEGIES, assert_same, every
from tests.stateful.modules.test_module_gradients import sharded
from tests.stateful.modules.test_module_optimizers import Lamb
from tests.stateful.modules.test_state_dicts import gathered, load, plain, state_of, without, world

THREE = fs.Mesh({"dp": 3})
WHOLE = {"shard": {"atoms": fs.layouts.LeafAtom()}}
ROWS = {
    "hsdp": (HYBRID, STRATEGIES["hsdp"][1], WHOLE),
    "zero1 on 3": (THREE, fs.zero1("dp"), WHOLE),
    "ddp": (DP, fs.ddp("dp"), {}),
}


def shapes(state):
    return {key: getattr(value, "shape", None) for key, value in state.items()}


@every(2, name=ROWS, cls=(torch.optim.Adafactor, Lamb))
def test_states_of_whole_parameters(name, cls):
    """Row statistics are on all ranks, whoever has the parameter; another mesh and torch itself go on with them."""
    mesh, strategy, options = ROWS[name]

    def save(comm):
        model, optimizer = world(comm, (mesh, strategy), cls=cls, **copy.deepcopy(options))
        train(model, optimizer, modules.batches(comm, 2))
        return copy.deepcopy(state_of(model, optimizer))

    whole = gathered(simulate(mesh, save))
    alone, optimizer = plain("plain", whole, cls, lr=1e-2)
    train(alone, optimizer, modules.batches(None, 1))
    state = whole["optimizer"]["state"]
    for name, p in alone.named_parameters():
        assert shapes(state[name]) == shapes(optimizer.state[p])

    def other(comm):
        model, optimizer = world(comm, (DP, fs.zero3("dp")), cls=cls, seed=1, shard={"atoms": fs.layouts.LeafAtom()})
        load(model, optimizer, whole)
        again = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, modules.batches(comm, 1))
        return again, values(model)

    found = simulate(DP, other)
    assert_same(gathered([again for again, _ in found])["state"], state)
    for _, mine in found:
        close(mine, modules.detached(alone))


TEMPLATES = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, no foreach": (torch.optim.AdamW, {"foreach": False}),
    "AdamW, a tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD, fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "SGD without momentum": (torch.optim.SGD, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Lamb": (Lamb, {}),
}


def about(state):
    return {
        name: {
            key: (type(x), getattr(x, "shape", None), getattr(x, "dtype", None), getattr(x, "run", None))
            for key, x in each.items()
        }
        for name, each in state.items()
    }


class Small(nn.Module):
    """Uneven, with a scalar and a leaf that is frozen."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.linspace(-1, 1, 15).view(5, 3)), nn.Parameter(torch.ones(()))
        self.c = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return (x @ self.a * self.b + self.c).square().mean()


@pytest.mark.parametrize("name", TEMPLATES)
@on_ranks(lambda name: THREE if name in ("AdamW", "Adafactor", "Lamb") else DP)
def test_a_template_is_what_a_first_step_makes(comm, name):
    """It has the same names, shapes and parts; training is that of an optimizer that nobody has asked, and starts from it."""
    cls, options = TEMPLATES[name]
    atoms = fs.layouts.LeafAtom() if cls in (torch.optim.Adafactor, Lamb) else fs.layouts.ElementAtom()
    runs = []
    for way in ("alone", "asked", "loaded"):
        model = fs.shard_module(Small(), mesh=comm, strategy=fs.zero3("dp"), atoms=atoms)
        optimizer = fs.ShardedOptimizer(model.parameters(), cls, **copy.deepcopy(options))
        before = values(model)
        if way != "alone":
            drawn = torch.random.get_rng_state()
            template = optimizer.state_template()
            assert torch.equal(torch.random.get_rng_state(), drawn)
            assert_same(values(model), before)
            if cls is not torch.optim.Adagrad:  # which makes its state when it is made
                assert optimizer.state_dict()["state"] == {}
            for state in template["state"].values():
                step = state.get("step", 0)
                assert not (step.local if isinstance(step, fs.modules.ShardedTensor) else torch.as_tensor(step)).any()
        if way == "loaded":
            optimizer.load_state_dict(template)
        for _ in range(2):
            descend(model(torch.linspace(0, 1 + comm.rank, 5)), optimizer)
        runs.append(values(model))
    saved = optimizer.state_dict()
    assert about(template["state"]) == about({name: saved["state"].get(name, {}) for name in template["state"]})
    assert saved["state"].keys() <= {"a", "b"} == template["state"].keys()
    assert saved["param_groups"] == template["param_groups"]
    assert_same(runs, [runs[0]] * 3)


@on_ranks(DP)
def test_a_template_of_a_pair_is_its_state(comm):
    model, _ = world(comm, "zero3")
    optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(1e-2))
    assert optimizer.state_template()["state"] is model.train_state.opt


def test_leaves_with_histories_of_their_own_travel():
    """Those without a gradient have no state, in another world either, until one comes. Training goes on as here."""
    data = modules.batches(None, 4, size=6)

    def steps(model, optimizer, comm, part):
        for i, branch in part:
            x, y = (each.chunk(comm.mesh.size)[comm.rank] for each in data[i])
            descend(model(x, y, branch), optimizer)

    def save(comm):
        model, optimizer = sharded(comm, "zero3")
        steps(model, optimizer, comm, [(0, "left"), (1, "left")])
        saved = copy.deepcopy(state_of(model, optimizer))
        steps(model, optimizer, comm, [(2, "right"), (3, "both")])
        return saved, values(model)

    straight = simulate(DP, save)
    whole = gathered([saved for saved, _ in straight])
    state = whole["optimizer"]["state"]
    assert "forks.0.left.weight" in state
    assert not {"unused", "forks.0.right.weight", "block.up.weight"} & state.keys()

    def other(comm):
        model, optimizer = sharded(comm, fs.zero1("dp"))
        load(model, optimizer, whole)
        assert optimizer.state_dict()["state"].keys() == state.keys()
        steps(model, optimizer, comm, [(2, "right"), (3, "both")])
        counts = {name: float(each["step"]) for name, each in optimizer.state_dict()["state"].items()}
        return counts, values(model)

    for mesh, compare in ((DP, assert_same), (THREE, close)):
        for counts, mine in simulate(mesh, other):
            steps_ = [counts.get(name) for name in ("head.weight", "forks.1.left.bias", "forks.1.right.bias", "unused")]
            assert steps_ == [4, 3, 2, None]
            compare(mine, straight[0][1])


@on_ranks(fs.Mesh({"dp": 1}))
def test_many_exchanges_of_the_state_leave_no_trace(comm):
    """Labels of runs do not grow."""
    model, optimizer = world(comm, "alone", cls=torch.optim.SGD)
    for _ in range(50):
        model.train_state = model.train_state
        optimizer._updates._recut_by_labels(optimizer._updates._labels, optimizer._updates._states_by_path())
    assert {label for labels in optimizer._updates._labels for label in labels.values()} == {0}


def change(state, name, **new):
    return {**state, "state": {**state["state"], name: {**state["state"][name], **new}}}


def drop(state, name, key):
    return {**state, "state": {**state["state"], name: without(state["state"][name], key)}}


WRONG = {
    "no groups": (lambda d: {"state": d["state"]}, "expected a dict with 'state' and 'param_groups'"),
    "torch's numbers": (
        lambda d: torch.optim.AdamW([torch.zeros(1)]).state_dict(),
        r"(?s)groups are not those.*got +1 parameters from 0 on.*expected +\d+ parameters from 'embed.weight' on.*by names",
    ),
    "another class": (
        lambda d: {**d, "param_groups": [without(d["param_groups"][0], "betas")]},
        r"(?s)group 0 belongs to another optimizer.*expected +'betas', such as \(0.9, 0.999\)",
    ),
    "an unknown name": (
        lambda d: {**d, "state": {**d["state"], "other": {}}},
        "state of parameter 'other', which this optimizer does not",
    ),
    "a missing state": (lambda d: drop(d, "head.bias", "exp_avg"), r"the state of 'head.bias' has \['exp_avg_sq', 'step'\]"),
    "a shape": (lambda d: change(d, "head.bias", exp_avg=torch.ones(12)), "'exp_avg of head.bias' has another shape"),
    "a dtype": (
        lambda d: change(d, "head.bias", exp_avg=torch.ones(11).half()),
        r"'exp_avg of head.bias' has another dtype(.|\n)*float16",
    ),
    "a number": (lambda d: change(d, "head.bias", step=3), "'step of head.bias' is a int, expected a Tensor"),
    "a counter": (lambda d: change(d, "head.bias", step=torch.ones(2)), r"'step of head.bias' is a Tensor float32\[2\]"),
    "a list": (lambda d: change(d, "head.bias", more=[1]), "'more' of 'head.bias' is a list, expected a tensor, a number"),
}


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@on_ranks(DP)
def test_wrong_state_dicts_of_an_optimizer(comm, ranks):
    model, optimizer = world(comm, "zero3")
    train(model, optimizer, modules.batches(comm, 1))
    before = copy.deepcopy(optimizer.state_dict())
    good = {**before, "param_groups": [{**before["param_groups"][0], "lr": 7.0}]}
    for wrong, match in WRONG.values():
        with pytest.raises((TreeError, AgreementError), match=match):
            optimizer.load_state_dict(wrong(copy.deepcopy(good)) if comm.rank in ranks else good)
        assert optimizer.state_dict()["param_groups"] == before["param_groups"]
        assert_same(about(optimizer.state_dict()["state"]), about(before["state"]))


@on_ranks(DP)
def test_ranks_with_other_options_or_counts(comm):
    model, optimizer = world(comm, "zero3")
    train(model, optimizer, modules.batches(comm, 1))
    state = copy.deepcopy(optimizer.state_dict())
    own = [{**state["param_groups"][0], "lr": 1e-2 * (1 + comm.rank)}]
    with pytest.raises(AgreementError, match=r"group 0 +rank 0: lr=0.01(.|\n)*rank 1: lr=0.02"):
        optimizer.load_state_dict({**state, "param_groups": own})
    with pytest.raises(AgreementError, match=r"head.bias +rank 1: other values than rank 0"):
        optimizer.load_state_dict(change(state, "head.bias", step=torch.tensor(1.0 + comm.rank)))


class Listing(torch.optim.SGD):
    """Keeps a list, which nobody can tell others about."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("history", []).append(1)


@on_ranks(DP)
def test_states_that_cannot_be_told_to_others_are_refused(comm):
    model, optimizer = world(comm, "zero3", cls=Listing)
    train(model, optimizer, modules.batches(comm, 1))
    with pytest.raises(TreeError, match=r"'history' of '.*' is a list, expected a tensor, a number, a string or None"):
        optimizer.state_dict()


@on_ranks(DP)
def test_ranks_that_keep_different_states(comm):
    model, optimizer = world(comm, "ddp")
    train(model, optimizer, modules.batches(comm, 1))
    if comm.rank:
        next(iter(optimizer._updates.inner.state.values()))["step"].add_(1)
    with pytest.raises(AgreementError, match=r"ranks keep different states of(.|\n)*rank 0(.|\n)*rank 1"):
        optimizer.state_dict()


PAIR = fs.optim.adamw(1e-2)
OTHERS = {
    "another transformation": (fs.optim.sgd(1e-2), "zero1", "the state (is of another transformation|has another layout)"),
    "another layout": (PAIR, "zero3", "the state has another layout"),
}


@pytest.mark.parametrize("name", OTHERS)
@on_ranks(DP)
def test_states_of_other_pairs(comm, name):
    tx, strategy, match = OTHERS[name]
    model, _ = world(comm, strategy)
    other = fs.ShardedOptimizer(model.parameters(), tx).state_dict()
    model, _ = world(comm, "zero1")
    optimizer = fs.ShardedOptimizer(model.parameters(), PAIR)
    with pytest.raises(TreeError, match=match):
        optimizer.load_state_dict(other)


def test_the_state_of_a_pair_of_another_rank_is_refused():
    found = {}

    def rank_fn(comm, load=False):
        model, _ = world(comm, "zero1")
        optimizer = fs.ShardedOptimizer(model.parameters(), PAIR)
        train(model, optimizer, modules.batches(comm, 1))
        if not load:
            found[comm.rank] = copy.deepcopy(optimizer.state_dict())
            return
        before = copy.deepcopy(optimizer.state_dict()["state"])
        other = 1 - comm.rank
        with pytest.raises(TreeError, match=rf"state is of rank {other} of Mesh\(dp=2\), and this is rank {comm.rank}"):
            optimizer.load_state_dict(found[other])
        with pytest.raises((TreeError, AgreementError), match=r"state is of rank 1 of Mesh\(dp=2\), and this is rank 0"):
            optimizer.load_state_dict(found[1])  # wrong on rank 0 alone
        assert_same(optree.tree_leaves(optimizer.state_dict()["state"]), optree.tree_leaves(before))
        optimizer.load_state_dict(found[comm.rank])

    simulate(DP, rank_fn)
    simulate(DP, partial(rank_fn, load=True))


@on_ranks(DP)
def test_the_state_of_a_pair_is_copied(comm):
    """It may be loaded twice, and is refused once the optimizer that has given it goes on."""
    model, _ = world(comm, "zero1")
    optimizer = fs.ShardedOptimizer(model.parameters(), PAIR)
    data = modules.batches(comm, 2)
    train(model, optimizer, data[:1])
    state = optimizer.state_dict()
    others = [world(comm, "zero1") for _ in range(2)]
    found = []
    for other, _ in others:
        other.load_state_dict(model.state_dict())
        second = fs.ShardedOptimizer(other.parameters(), PAIR)
        second.load_state_dict(state)
        train(other, second, data[1:])
        found.append(values(other))
    train(model, optimizer, data[1:])
    assert_same(found, [values(model)] * 2)
    with pytest.raises(TreeError, match=r"load_state_dict\(\): unit .* belongs to a donated state"):
        second.load_state_dict(state)


@every(2, strategy=["ddp", "zero1", "zero2", "zero3"], optimizer=[torch.optim.AdamW, torch.optim.SGD])
@on_ranks(DP)
def test_state_by_parameter(comm, strategy, optimizer):
    """``optimizer.state[p]`` as torch's users read it: this rank's part, whose norm is that of the whole state."""
    options = {"lr": 1e-2, "momentum": 0.9} if optimizer is torch.optim.SGD else {"lr": 1e-2, "amsgrad": True}

    model = wrap(comm, strategy)[0]
    own = fs.ShardedOptimizer(model.parameters(), optimizer, **options)
    assert not own.state
    assert dict(own.state[model.head.weight]) == {}
    train(model, own, modules.batches(comm, 3))
    plain = modules.make()
    reference = optimizer(plain.parameters(), **options)
    train(plain, reference, modules.batches(None, 3))
    assert len(own.state) == len(reference.state)
    names = [dict(model.named_parameters())[name] for name, _ in plain.named_parameters()]
    for mine, theirs in zip(names, plain.parameters(), strict=True):
        assert mine in own.state
        for key, value in reference.state[theirs].items():
            if key == "step":
                assert own.state[mine][key] == value
                continue
            assert own.state[mine][key].shape == value.shape
            torch.testing.assert_close(own.state[mine][key].norm(), value.norm(), rtol=1e-3, atol=1e-6)
    p = model.head.weight
    for state, key in (own.state, p), (own.state[p], next(iter(own.state[p]))):
        for change in (
            lambda state=state, key=key: operator.setitem(state, key, {}),
            lambda state=state, key=key: operator.delitem(state, key),
            lambda state=state, key=key: state.pop(key),
            lambda state=state: state.update(step=1),
            state.clear,
        ):
            with pytest.raises(
                TreeError, match=r"state is read-only\. Write to its tensors in place, or replace all by load_st"
            ):
                change()
    with pytest.raises(TreeError, match=r"state cannot be replaced: load_state_dict"):
        own.state = {}
    with pytest.raises(TreeError, match=r"asked for a Parameter \[11, 6\], expected one of model\.parameters"):
        _ = own.state[plain.head.weight]
    with pytest.raises(TreeError, match=r"asked for 'head\.weight', expected one of model\.parameters"):
        _ = own.state["head.weight"]
    model.train_state = model.train_state
    assert p is model.head.weight
    assert p in own.state
    other = wrap(comm, strategy)[0].head.weight
    assert other not in own.state
    with pytest.raises(TreeError, match=r"asked for a \w+ \[11, 6\], expected one of model\.parameters"):
        _ = own.state[other]
    with torch.no_grad():
        for p in own.state:
            for value in own.state[p].values():
                value.zero_()
    saved = own.state_dict()["state"]["head.weight"]
    for key, value in own.state[model.head.weight].items():
        if isinstance(value, fs.modules.ShardedTensor):  # a save needs no second copy of the state
            assert saved[key].local.data_ptr() == value.local.data_ptr()
        else:
            assert saved[key] is not value
    assert all(float(part.norm()) == 0 for part in saved.values() if isinstance(part, fs.modules.ShardedTensor))
    pair = fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(1e-2))
    with pytest.raises(TreeError, match=r"an \(init, update\) pair is a tree.*train_state\.opt"):
        _ = pair.state


@on_ranks(DP)
def test_a_frozen_parameter_has_no_state(comm):
    model = fs.shard_module(Small(), mesh=comm, strategy=fs.zero3("dp"))
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    model(torch.ones(2, 5)).backward()
    optimizer.step()
    assert [p.path for p in optimizer.state] == ["a", "b"]
    assert model.c not in optimizer.state
    assert dict(optimizer.state[model.c]) == {}


@on_ranks(DP)
def test_the_trial_of_a_class_does_not_depend_on_the_default_device(comm):
    model = fs.shard_module(Small(), mesh=comm, strategy=fs.zero3("dp"))
    with torch.device("meta"):
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.9)
    assert optimizer.state_template()["state"]["a"]["momentum_buffer"].device.type == "cpu"


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, fs.optim.adamw(1e-2)], ids=["class", "pair"])
@on_ranks(DP)
def test_groups_of_named_parameters_have_the_names(comm, optimizer):
    """As in torch. State dicts have names in ``"params"`` already, so they load with and without ``"param_names"``."""
    model = wrap(comm, "zero3")[0]
    named, other = (fs.ShardedOptimizer(given, optimizer) for given in (model.named_parameters(), model.parameters()))
    train(model, named, modules.batches(comm, 1))
    assert named.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    saved = named.state_dict()
    assert saved["param_groups"][0].keys() == other.state_dict()["param_groups"][0].keys()
    named.load_state_dict(saved)
    assert "param_names" in named.param_groups[0]


class Counting(torch.optim.Optimizer):
    """Counts steps: in an option (``"k"``), and in an option that the first step makes (``"step"``), as many classes do."""

    def __init__(self, params, lr=1.0, k=0):
        super().__init__(params, {"lr": lr, "k": k})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"], group["step"] = group["k"] + 1, group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * (group["k"] + group["step"]))


@on_ranks(DP)
@pytest.mark.parametrize("resumed_at", [None, 2])
def test_what_a_class_counts_in_its_options_is_kept_and_saved(comm, resumed_at):
    plain_model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(plain_model.weight)
    model = fs.shard_module(copy.deepcopy(plain_model), mesh=comm, strategy=fs.zero3("dp"))
    for each, make in ((plain_model, Counting), (model, partial(fs.ShardedOptimizer, optimizer=Counting))):
        optimizer = make(each.parameters())
        for i in range(4):
            if i == resumed_at:
                state, optimizer = optimizer.state_dict(), make(each.parameters())
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            each(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        assert (optimizer.param_groups[0]["k"], optimizer.param_groups[0]["step"]) == (4, 4)
    with model.unsharded():
        torch.testing.assert_close(model.weight.detach(), plain_model.weight.detach())


def test_a_template_has_the_options_that_a_first_step_adds():
    model = fs.shard_module(nn.Linear(3, 2), mesh=fs.SingleComm())
    optimizer = fs.ShardedOptimizer(model.parameters(), Counting)
    assert optimizer.state_template()["param_groups"][0]["step"] == 0
    assert "step" not in optimizer.state_template(lambda name: False)["param_groups"][0] | optimizer.param_groups[0]
    descend(model(torch.ones(1, 3)).sum(), optimizer)
    assert optimizer.state_template(lambda name: False)["param_groups"][0]["step"] == 1


class CountingInstance(Counting):
    """Counts steps in an attribute, by which it updates."""

    num_steps = 0

    def step(self):
        self.num_steps += 1
        self.param_groups[0]["lr"] = 1 / self.num_steps
        super().step()


class KeepingMoments(Counting):
    """Keeps moments in an attribute, for parameters that it has seen in its first step."""

    def step(self):
        if "step" not in self.param_groups[0]:
            self.moments = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}
        assert self.moments.keys() == {*self.param_groups[0]["params"]}
        super().step()


@pytest.mark.parametrize(("cls", "what"), [(CountingInstance, "made another step"), (KeepingMoments, "raised AttributeError")])
def test_a_class_that_keeps_values_in_attributes_is_refused(cls, what):
    """A checkpoint would not have them: FusedAdam keeps scales of moments in 16 bits so."""
    model = fs.shard_module(nn.Linear(2, 2), mesh=fs.SingleComm())
    with pytest.raises(TreeError, match=rf"a new {cls.__name__} with the state and the param_groups .* {what}, so the class"):
        fs.ShardedOptimizer(model.parameters(), cls)


class CountingInState(Counting):
    def __init__(self, params):
        super().__init__(params)
        self.state["k"] = torch.zeros(1)


def test_a_class_with_state_of_no_parameter_is_refused():
    model = fs.shard_module(nn.Linear(2, 2), mesh=fs.SingleComm())
    with pytest.raises(TreeError, match=r"CountingInState keeps state\['k'\], which belongs to no parameter.*param_groups"):
        fs.ShardedOptimizer(model.parameters(), CountingInState)
