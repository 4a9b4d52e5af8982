"""precision= by pattern, casts of inputs and outputs: the bits of a plain module with the same casts written by hand."""

import copy
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, LayoutError, OptionError, PatternError, TreeError
from fsharp.stateful.modules.values.casts import cast_tensors
from fsharp.testing import DebugPolicy, simulate
from tests.modules import descend
from tests.ranks import on_ranks
from tests.scheduling import assert_same, every

LOW, HIGH = torch.bfloat16, torch.float32
MIXED = fs.Precision(LOW, HIGH, accumulate=HIGH)
FULL = fs.Precision(HIGH, output=HIGH)
RULES = {"**": MIXED, "layers.*.norm": fs.Precision(HIGH, output=LOW), "head": FULL}
DIM = 6


@dataclass
class Batch:
    """A batch that pytorch's pytrees do not know."""

    x: torch.Tensor
    more: dict[str, Any]
    y: torch.Tensor


Pair = namedtuple("Pair", "x y")


class Block(nn.Module):
    """A norm in another dtype than the rest."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.seen: Any = None

    def forward(self, pair, *, scale=None):
        self.seen = pair.x.dtype, scale.dtype
        return Pair(pair.x + self.up(self.norm(pair.x)) * scale, pair.y)


class Net(nn.Module):
    """Blocks in a low precision, a head in a high one; ``by_hand`` casts as fsharp is asked to."""

    def __init__(self, by_hand=False):
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.by_hand = by_hand

    def forward(self, batch):
        if self.by_hand:
            batch = Batch(batch.x.to(LOW), {"scale": batch.more["scale"].to(LOW)}, batch.y)
        assert (batch.x.dtype, batch.more["scale"].dtype, batch.y.dtype) == (LOW, LOW, torch.int64)
        h = Pair(self.embed(batch.x), batch.y)
        for layer in self.layers:
            h = layer(h, scale=batch.more["scale"])
        out = self.head(h.x.to(HIGH) if self.by_hand else h.x)
        return F.cross_entropy(out, h.y), {"logits": out}


def make(by_hand=False, frozen=False):
    generator = torch.Generator().manual_seed(0)
    net = Net(by_hand)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    if frozen:
        net.layers[0].norm.requires_grad_(False)
        net.layers[1].up.weight.requires_grad_(False)
        net.head.bias.requires_grad_(False)
    return net


def batches(count):
    """The same on all ranks, so that one model can compute what each of them does."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield Batch(
            torch.randn(4, DIM, generator=generator),
            {"scale": torch.randn(DIM, generator=generator)},
            torch.randint(3, (4,), generator=generator),
        )


class Norm(nn.LayerNorm):
    """In float32 amid bfloat16."""

    def forward(self, x):
        return super().forward(x.to(HIGH)).to(LOW)


def plainly(steps, frozen, ranks):
    """By hand: low copies of the parameters that compute, and their gradients taken to the parameters that are trained."""
    main = make(frozen=frozen)
    model = make(by_hand=True, frozen=frozen)
    for layer in model.layers:
        layer.norm.__class__ = Norm
    for name, module in model.named_modules():
        if name == "embed" or name.endswith("up"):
            module.to(LOW)
    optimizer = torch.optim.AdamW(main.parameters(), lr=1e-2)
    losses = []
    for batch in batches(steps):
        loss, _ = model(batch)
        loss.backward()
        for kept, used in zip(main.parameters(), model.parameters()):
            kept.grad = None if used.grad is None else sum([used.grad.to(HIGH)] * ranks) / ranks
        optimizer.step()
        with torch.no_grad():
            for kept, used in zip(main.parameters(), model.parameters()):
                used.grad = None
                used.copy_(kept)
        losses.append(loss.detach())
    return losses, {name: p.detach() for name, p in main.named_parameters() if p.requires_grad}


def shard(comm, strategy, *, frozen=False, precision=RULES, units=("embed", Block, "layers.*.norm", "layers.*.up", "head")):
    model = fs.shard_module(
        make(frozen=frozen), mesh=comm, strategy=getattr(fs, strategy)("dp"), units=list(units), precision=precision,
        policy=DebugPolicy(poison=True),
    )  # fmt: skip
    return model, fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


@every(3, ranks=[2, 3, 1], strategy=["ddp", "zero1", "zero3"], frozen=[False, True])
def test_the_bits_of_casts_by_hand(ranks, strategy, frozen):
    def rank_fn(comm):
        model, optimizer = shard(comm, strategy, frozen=frozen)
        losses = []
        for batch in batches(4):
            loss, out = model(batch)
            assert out["logits"].dtype == HIGH
            assert batch.x.dtype == HIGH
            descend(loss, optimizer)
            losses.append(loss.detach())
        return losses, dict(model.named_full_parameters(trained=True)), model.scheduled_step.num_unscheduled_calls

    losses, params = plainly(4, frozen, ranks)
    for mine, found, recordings in simulate(fs.Mesh({"dp": ranks}), rank_fn):
        assert_same(mine, losses)
        assert_same(found, params)
        assert recordings == 1


@on_ranks(fs.Mesh({"dp": 1}))
def test_nested_units_that_have_nothing_of_their_own_cast_too(comm):
    rules = {"**": FULL, "layers": MIXED, "layers.*.norm": MIXED, "embed": MIXED}
    model, _ = shard(comm, "zero3", precision={**rules, "head": FULL})
    with torch.no_grad():
        model.layers[0](Pair(torch.ones(2, DIM), 0), scale=torch.ones(DIM))
    assert model.layers[0].seen == (LOW, LOW)


@pytest.mark.parametrize("grad", [False, True])
@on_ranks(fs.Mesh({"dp": 2}))
def test_outputs_of_the_root_and_inputs_that_stay(comm, grad):
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    precision = fs.Precision(compute=LOW, main=HIGH, output=torch.float64, cast_inputs=False)
    fs.shard_module(model, mesh=comm, strategy=fs.zero3("dp"), precision=precision, sync_from=0)
    with torch.set_grad_enabled(grad):
        out = model(torch.ones(2, DIM, dtype=LOW))
    with pytest.raises(RuntimeError, match=r"(?i)bfloat16"), torch.no_grad():
        model(torch.ones(2, DIM))
    assert out.dtype == torch.float64
    assert seen == [LOW, HIGH]


@on_ranks(fs.Mesh({"dp": 2}))
def test_the_function_of_a_module_casts_as_the_module_does(comm):
    model, _ = shard(comm, "zero3")
    [batch] = batches(1)
    with torch.no_grad():
        expected = model(batch)
        fn, params = model.functional()
        assert_same(fn(params, batch, comm=comm), expected)


@dataclass(frozen=True)
class Frozen:
    """With a field that the constructor does not take."""

    x: torch.Tensor
    made: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "made", self.x * 2)


class Stored(dict):
    """A dictionary of its own."""


X, N = torch.tensor([1.5]), torch.tensor([1])
CONTAINERS = {
    "list": [X, N, "text"],
    "tuple": (X, (X, None)),
    "NamedTuple": Pair(X, N),
    "dict": {"a": X, "b": [X]},
    "OrderedDict": OrderedDict(a=X, b=N),
    "dataclass": Batch(X, {"deep": Frozen(X)}, N),
    "PackedSequence": nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
}


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if hasattr(value, "values") else value if isinstance(value, list | tuple) else vars(value).values()
    return [x for each in inside if not isinstance(each, str | int | None) for x in leaves(each)]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_in_containers_are_cast_in_a_copy(kind):
    value = CONTAINERS[kind]
    before = copy.deepcopy(value)
    found = cast_tensors(value, LOW)
    assert type(found) is type(value)
    assert_same([x.to(LOW) if x.is_floating_point() else x for x in leaves(value)], leaves(found))
    assert_same(leaves(before), leaves(value))
    assert cast_tensors(found, LOW) is found


def test_what_needs_no_cast_is_the_callers_own():
    cache: list[Any] = []
    one = {"x": X, "cache": cache, "dtype": torch.float32, "module": nn.Linear(1, 1)}
    found = cast_tensors(one, LOW)
    assert found["cache"] is cache
    assert found["module"] is one["module"]
    assert found["module"].weight.dtype == HIGH


@pytest.mark.parametrize("value", [{X}, UserDict(a=X), [Stored(a=X)]], ids=["set", "UserDict", "Stored"])
def test_other_containers_with_tensors_to_cast_are_refused(value, request):
    name = request.node.callspec.id
    with pytest.raises(TreeError, match=rf"has to cast tensors to torch.bfloat16 in a {name}. Use pytrees"):
        cast_tensors({"a": value}, LOW)
    assert cast_tensors(value, HIGH) is value


def test_values_that_are_no_precision():
    with pytest.raises(OptionError, match=r"shard_module\(\): precision\['head'\] is torch.float32, expected a Precision"):
        fs.shard_module(make(), mesh=fs.SingleComm(), precision={"head": HIGH})
    with pytest.raises(OptionError, match=r"shard_module\(\): precision is torch.float32, expected a Precision or a Mapping"):
        fs.shard_module(make(), mesh=fs.SingleComm(), precision=HIGH)
    with pytest.raises(OptionError, match=r"cast_inputs is 1, expected True or False"):
        fs.Precision(cast_inputs=1)
    with pytest.raises(LayoutError, match=r"output is torch.int32"):
        fs.Precision(output=torch.int32)


def test_patterns_that_select_nothing_or_leaves_alone():
    with pytest.raises(PatternError, match="'heads' matches nothing"):
        fs.shard_module(make(), mesh=fs.SingleComm(), precision={"heads": FULL})
    with pytest.raises(LayoutError, match="the module 'head' has a precision for its inputs, and none of its parameters has"):
        fs.shard_module(make(), mesh=fs.SingleComm(), units="head", precision={"**": MIXED, "head.*": FULL})


def test_tied_leaves_of_two_precisions():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    with pytest.raises(LayoutError, match="tied leaves disagree on precision"):
        fs.shard_module(net, mesh=fs.SingleComm(), precision={"0": MIXED})


@pytest.mark.parametrize("other", [fs.Precision(output=HIGH), fs.Precision(cast_inputs=False)])
def test_functions_have_no_inputs_and_outputs_to_cast(other):
    with pytest.raises(LayoutError, match=r"the precision of 'w' is Precision\(.*write x.to\(dtype\)"):
        fs.plan({"w": torch.ones(2)}, fs.Mesh({"dp": 1}), fs.zero3("dp"), precision={"w": other})


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({**RULES, "head": fs.Precision(HIGH)}, r"head: CastDtypes\(inputs=torch.float32, outputs=None\)"),
        ({**RULES, "layers.0.up.bias": fs.Precision(HIGH)}, "layers.0.up.bias: float32/float32/float32/float32"),
    ],
)
@on_ranks(fs.Mesh({"dp": 2}))
def test_ranks_that_cast_differently(comm, rules, expected):
    with pytest.raises(AgreementError, match=expected):
        shard(comm, "zero3", precision=rules if comm.rank else RULES)
