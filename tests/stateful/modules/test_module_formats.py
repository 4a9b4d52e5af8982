"""Error feedback and stochastic rounding in modules: the bits of functions, residuals that are saved, and what is refused."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import optree
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import fsharp as fs
from fsharp.errors import ScheduleError, TreeError
from fsharp.formats import hadamard, mxint4, mxint8, stochastic
from fsharp.testing import DebugPolicy, simulate
from tests.modules import descend
from tests.ranks import on_ranks
from tests.scheduling import DP, ON_TWO_AXES, STRATEGIES, assert_same, buffers, every, mesh_of

WIRES = {"outer": stochastic(hadamard(mxint4)), "inner": mxint8}
PRECISIONS = {
    "feedback": {"wire": mxint4, "feedback": True},
    "stochastic": {"wire": stochastic(mxint4, seed=3)},
    "both": {"wire": stochastic(hadamard(mxint4)), "feedback": True},
    "both, between hosts": {"wire": {"outer": stochastic(mxint4), "inner": torch.bfloat16}, "feedback": True},
    "both, in two formats": {"wire": WIRES, "feedback": True},
    "neither, in two formats": {"wire": {"outer": hadamard(mxint4), "inner": mxint8}},
    "stochastic updates": {"wire": mxint8, "feedback": True, "update": stochastic(torch.bfloat16)},
}
CASES = [
    (strategy, name)
    for strategy in STRATEGIES
    for name in PRECISIONS
    if ("," not in name or strategy in ON_TWO_AXES)
    and ("updates" not in name or strategy in ("zero1", "zero2", "hfsdp", "mixed"))
]
FEW = {
    "ddp": "both",
    "zero1": "feedback",
    "zero2": "stochastic updates",
    "zero3": "stochastic",
    "hsdp": "both, between hosts",
    "hfsdp": "both, in two formats",
    "zero3x2": "neither, in two formats",
    "mixed": "both",
    "late": "feedback",
}
"""Each strategy once, and each precision."""
FED_BACK = fs.Precision(**PRECISIONS["feedback"])


class Net(nn.Module):
    """Two linear layers, of 35 and 18 elements, and one that only some calls use."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.other = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, *, by_other=False):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) + (self.other(hidden) if by_other else 0)


def make(comm, strategy, precision, tx=None, **options):
    torch.manual_seed(3)
    model = fs.shard_module(Net(), mesh=comm, strategy=strategy, units=[nn.Linear], precision=precision, **options)
    return model, fs.ShardedOptimizer(
        model.parameters(), tx or fs.optim.adamw(1e-1), **({"lr": 0.1} if isinstance(tx, type) else {})
    )


def inputs(comm, step, half):
    return torch.arange(12.0).view(2, 6).sin() * (step + 1 + comm.rank) / (4 + half)


def train(comm, model, optimizer, first, last):
    """Two microbatches a step."""
    for step in range(first, last):
        with model.accumulate():
            (model(inputs(comm, step, 0), by_other=True).square().mean() / 2).backward()
        descend(model(inputs(comm, step, 1), by_other=True).square().mean() / 2, optimizer)


def has_residuals(model):
    return any(x.count_nonzero() for tensors in model.train_state.residuals.value.values() for x in tensors)


def bits(state):
    return [buffer.clone() for buffer in buffers((state.params, state.main, state.opt))]


@pytest.mark.parametrize(
    "case", [each if each in FEW.items() else pytest.param(each, marks=pytest.mark.deep) for each in CASES]
)
@on_ranks(lambda case: STRATEGIES[case[0]][0])
def test_modules_have_the_bits_of_functions(comm, case):
    how, precision = STRATEGIES[case[0]][1], fs.Precision(main=torch.float32, **PRECISIONS[case[1]])
    model, optimizer = make(comm, how, precision)
    assert all(group.dtypes == precision.resolve(torch.float32) for unit in model.layout.units for group in unit.groups)
    train(comm, model, optimizer, 0, 3)
    other, _ = make(comm, how, precision)
    fn, _ = other.functional()

    def loss_fn(params, x, comm):
        return fn(params, x, by_other=True, comm=comm).square().mean()

    state, step = other.train_state, fs.train_step(loss_fn, fs.optim.adamw(1e-1), microbatches=2)
    for i in range(3):
        state, _ = step(state, torch.cat([inputs(comm, i, half) for half in range(2)]), comm)
    assert_same(bits(model.train_state), bits(state))


@every(16, case=CASES)
@on_ranks(lambda case: STRATEGIES[case[0]][0])
def test_a_run_goes_on_from_a_checkpoint_of_the_train_state(comm, case, tmp_path):
    how, precision = STRATEGIES[case[0]][1], fs.Precision(main=torch.float32, **PRECISIONS[case[1]])
    pairs = [make(comm, how, precision) for _ in range(2)]
    (model, _), (other, _) = pairs
    train(comm, *pairs[0], 0, 2)
    fs.checkpoint.save(tmp_path, model.train_state, step=2, comm=comm)
    other.train_state = fs.checkpoint.load(tmp_path, other.train_state, comm=comm)
    for pair in pairs:
        train(comm, *pair, 2, 4)
    assert_same(bits(other.train_state), bits(model.train_state))
    assert_same(other.train_state.residuals, model.train_state.residuals)


@pytest.mark.parametrize("optimizer", [fs.optim.adamw(1e-1), torch.optim.SGD], ids=["pair", "class"])
@on_ranks(DP)
def test_a_run_goes_on_from_a_checkpoint_of_state_dicts_with_residuals_and_step(comm, optimizer, tmp_path):
    precision = fs.Precision(**PRECISIONS["both"])
    pairs = [make(comm, fs.zero2("dp"), precision, optimizer) for _ in range(2)]
    trees = []
    for model, its_optimizer in pairs:
        train(comm, model, its_optimizer, 0, 2 - len(trees))  # the other one has less behind it
        state = model.train_state
        trees.append({"model": model, "optimizer": its_optimizer, "residuals": state.residuals, "step": state.step})
    fs.checkpoint.save(tmp_path, trees[0], step=2, comm=comm)
    loaded = fs.checkpoint.load(tmp_path, trees[1], comm=comm)
    (model, _), (other, _) = pairs
    other.train_state = other.train_state._replace(residuals=loaded["residuals"], step=loaded["step"])
    for pair in pairs:
        train(comm, *pair, 2, 4)
    assert_same(bits(other.train_state), bits(model.train_state))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_a_state_dict_begins_from_zero_residuals(comm, strategy):
    model, optimizer = make(comm, STRATEGIES[strategy][1], FED_BACK)
    train(comm, model, optimizer, 0, 2)
    assert has_residuals(model)
    model.load_state_dict(model.state_dict())
    assert not has_residuals(model)
    train(comm, model, optimizer, 2, 3)
    assert has_residuals(model)


@pytest.mark.parametrize("precision", [FED_BACK, fs.Precision(wire=hadamard(mxint4))], ids=["feedback", "hadamard"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(DP)
def test_a_parameter_without_a_gradient_stays_and_counts_in_no_norm(comm, strategy, precision):
    """Also where its unit's other leaves have one, and the format mixes them."""
    torch.manual_seed(3)
    model = fs.shard_module(Net(), mesh=comm, strategy=STRATEGIES[strategy][1], precision=precision)  # one unit
    optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.sgd(1e-1))
    train(comm, model, optimizer, 0, 1)
    before = dict(model.named_full_parameters())
    model(inputs(comm, 0, 0)).square().sum().backward()
    assert model.other.weight.grad is None
    present = [p.grad.norm().double() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(model.clip_grad_norm_(1e3).double(), torch.stack(present).norm(), rtol=1e-6, atol=0)
    optimizer.step()
    after = dict(model.named_full_parameters())
    assert {name for name in after if torch.equal(after[name], before[name])} == {"other.weight", "other.bias"}


@on_ranks(DP)
def test_what_would_count_a_loss_twice_is_refused(comm):
    model, optimizer = make(comm, fs.zero1("dp"), FED_BACK)
    x = inputs(comm, 0, 0)
    with pytest.raises(ScheduleError, match=r"torch.autograd.grad.*feedback=True"):
        torch.autograd.grad(model(x).sum(), [model.first.weight])
    optimizer.zero_grad()
    model(x).sum().backward()
    with pytest.raises(ScheduleError, match=r"reduced with feedback.*model.accumulate"):
        model(x).sum().backward()
    optimizer.zero_grad()
    scaler = fs.GradScaler("cpu")
    scaler.scale(model(x).sum()).backward()
    with pytest.raises(ScheduleError, match=r"unscale_\(\): the module has Precision\(feedback=True\)"):
        scaler.unscale_(optimizer)
    optimizer.zero_grad()
    assert not has_residuals(model)  # those of scaled gradients are gone
    with pytest.raises(TreeError, match=r"no residuals. Assign state._replace\(residuals=model.train_state.residuals\)"):
        model.train_state = model.train_state._replace(residuals=None)
    train(comm, model, optimizer, 0, 1)
    fresh, its_optimizer = make(comm, fs.zero1("dp"), FED_BACK)
    train(comm, fresh, its_optimizer, 0, 1)
    assert_same(bits(model.train_state), bits(fresh.train_state))
    assert_same(model.train_state.residuals, fresh.train_state.residuals)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@on_ranks(DP)
def test_the_loss_scaler_of_torch_is_refused_as_well(comm, strategy):
    model, optimizer = make(comm, STRATEGIES[strategy][1], FED_BACK)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(inputs(comm, 0, 0)).sum()).backward()
    with pytest.raises(ScheduleError, match=r"unscale_\(\): the module has Precision\(feedback=True\)"):
        scaler.step(optimizer)
    assert not has_residuals(model)


@every(2, strategy=["ddp", "zero1", "zero2", "zero3", "hfsdp"], is_paused=[False, True])
@on_ranks(mesh_of)
def test_a_unit_without_a_gradient_keeps_its_residuals(comm, strategy, is_paused):
    _, how = STRATEGIES[strategy]

    def of_other(model):
        return [x.clone() for key, each in model.train_state.residuals.value.items() if "other" in key for x in each]

    model, optimizer = make(comm, how, FED_BACK)
    train(comm, model, optimizer, 0, 2)
    kept = of_other(model)
    assert any(x.count_nonzero() for x in kept)
    model.other.requires_grad_(not is_paused)
    for step in range(2, 4):
        model(inputs(comm, step, 0), by_other=is_paused).square().mean().backward()
        assert model.other.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    assert_same(of_other(model), kept)
    model.other.requires_grad_(True)
    train(comm, model, optimizer, 4, 5)
    assert not all(map(torch.equal, of_other(model), kept))


class Chain(nn.Module):
    """Layers of 42 elements, of which a call uses some."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, uses):
        for i in uses.flatten().tolist():
            x = torch.tanh(self.layers[i](x))
        return x.square().mean()


def run_chain(comm, way, strategy, wire, policy, uses):
    """Parameters after steps of microbatches that use these layers, in one of three ways."""
    precision, policy = fs.Precision(main=torch.float32, wire=wire, feedback=True), DebugPolicy(poison=True, **policy)
    torch.manual_seed(3)
    model = fs.shard_module(Chain(), mesh=comm, strategy=strategy, units="layers.*", precision=precision, policy=policy)
    tx = fs.optim.adamw(1e-1)
    optimizer = fs.ShardedOptimizer(model.parameters(), tx)
    batches = [{"x": torch.cat([inputs(comm, i, j) for j in range(len(each))]), "uses": each} for i, each in enumerate(uses)]
    if way == "module":
        for batch in batches:
            count = len(batch["uses"])
            for i, (x, each) in enumerate(zip(batch["x"].chunk(count), batch["uses"], strict=True)):
                with model.accumulate() if i < count - 1 else nullcontext():
                    (model(x, each) / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for _, value in model.named_full_parameters()]
    fn, _ = model.functional()
    step = fs.train_step(lambda p, batch, comm: fn(p, batch["x"], batch["uses"], comm=comm), tx, microbatches=len(uses[0]))
    call = partial(step, comm=comm) if way == "blocking" else fs.Scheduler(comm, policy=policy)(step)
    state = model.train_state
    for batch in batches:
        state, _ = call(state, batch)
    return optree.tree_leaves(fs.full_tree(state.params, comm=comm))


EQUAL = [["ddp", "zero1"], ["zero2", "zero3"], ["hsdp", "hfsdp", "mixed"]]
"""Strategies that encode the same numbers; with one microbatch the first two rows are one."""

WAYS = ("blocking", "scheduled", "module")
USES = st.lists(st.integers(0, 2), min_size=2, max_size=2)


@settings(max_examples=4)
@given(
    uses=st.sampled_from([1, 2]).flatmap(lambda n: st.lists(st.lists(USES, min_size=n, max_size=n), min_size=3, max_size=4)),
    policy=st.sampled_from([{}, {"sum_late": False}, {"bucket_nbytes": 600}]),
    wire=st.sampled_from([mxint4, hadamard(mxint4), stochastic(mxint4)]),
    is_hybrid=st.booleans(),
    order=st.permutations(WAYS),
)
def test_units_that_steps_leave_out_have_the_same_bits_by_every_strategy_and_way(uses, policy, wire, is_hybrid, order):
    """Each strategy in one of the ways, and in the deep run in all."""
    tables = [torch.tensor(each) for each in uses]
    rows = EQUAL[2:] if is_hybrid else EQUAL[:2] if len(uses[0]) > 1 else [EQUAL[0] + EQUAL[1]]
    for row in rows:
        found = []
        for (i, name), (j, way) in product(enumerate(row), enumerate(order)):
            if (i + j) % 3 and settings.default.max_examples <= 60:
                continue
            mesh, how = STRATEGIES[name]
            found.append(simulate(mesh, partial(run_chain, way=way, strategy=how, wire=wire, policy=policy, uses=tables)))
        for each in found[1:]:
            assert_same(each, found[0])
