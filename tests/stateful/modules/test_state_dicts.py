"""State dicts of sharded modules and their optimizers: every element once, for any other mesh; and what is refused."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, ScheduleError, TreeError
from fsharp.testing import DebugPolicy, simulate
from tests import modules
from tests.modules import Block, close, descend, train, values
from tests.ranks import on_ranks
from tests.scheduling import DP, HYBRID, STRATEGIES, assert_same, every

MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32)
WORLDS = {
    "alone": (fs.Mesh({"dp": 1}), fs.zero3("dp")),
    **{name: STRATEGIES[name] for name in ("ddp", "zero1", "zero2", "zero3", "hsdp")},
    "zero1 on 3": (fs.Mesh({"dp": 3}), fs.zero1("dp")),
    "zero3 on 3": (fs.Mesh({"dp": 3}), fs.zero3("dp")),
}
KINDS = ["plain", "tied", "frozen"]


def world(comm, name, kind="plain", cls=torch.optim.AdamW, seed=0, lr=1e-2, **options):
    mesh, strategy = WORLDS[name] if isinstance(name, str) else name
    assert comm.mesh == mesh
    policy = DebugPolicy(poison=True)
    model = fs.shard_module(
        modules.make(kind, seed), mesh=comm, strategy=strategy, units=[Block], policy=policy, **options.pop("shard", {})
    )
    return model, fs.ShardedOptimizer(model.parameters(), cls, **({"lr": lr} | options))


def assembled(parts):
    """The whole tensor of which ranks have these; they overlap in the same values, and leave nothing out."""
    first = parts[0]
    if not isinstance(first, fs.modules.ShardedTensor):
        assert all(type(each) is type(first) for each in parts)
        assert all(torch.equal(each, first) if isinstance(first, torch.Tensor) else each == first for each in parts)
        return first
    assert [each.rank for each in parts] == list(range(len(parts)))
    whole = torch.empty(first.full_shape, dtype=first.dtype)
    flat, seen = whole.view(-1), torch.zeros(whole.numel(), dtype=torch.bool)
    for each in parts:
        low, high = each.flat_range
        assert first.unit.leaf_range_on_rank(first.leaf, first.place, each.rank) == (low, high)
        assert each.local.numel() == high - low
        assert torch.equal(flat[low:high][seen[low:high]], each.local.view(-1)[seen[low:high]])
        flat[low:high], seen[low:high] = each.local.view(-1), True
    assert seen.all()
    return whole


def gathered(dicts):
    """One dict of whole tensors, of all ranks' dicts."""
    first = dicts[0]
    if isinstance(first, dict):
        assert all(each.keys() == first.keys() for each in dicts)
        return {key: gathered([each[key] for each in dicts]) for key in first}
    if isinstance(first, list):
        return [gathered(list(each)) for each in zip(*dicts, strict=True)]
    return assembled(dicts)


def state_of(model, optimizer):
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def load(model, optimizer, saved):
    assert model.load_state_dict(saved["model"]) == ([], [])
    optimizer.load_state_dict(saved["optimizer"])


def plain(kind, saved, cls=torch.optim.AdamW, **options):
    """The unsharded module, and its torch optimizer, with what was saved."""
    model, saved = modules.make(kind), copy.deepcopy(saved)  # torch goes on in the tensors that it loads
    model.load_state_dict(saved["model"])
    optimizer = cls(model.parameters(), **options)
    names = [name for name, _ in model.named_parameters()]
    state = {names.index(name): each for name, each in saved["optimizer"]["state"].items()}
    [group] = saved["optimizer"]["param_groups"]
    assert group["params"] == names
    optimizer.load_state_dict({"state": state, "param_groups": [{**group, "params": list(range(len(names)))}]})
    return model, optimizer


def trained(model):
    return dict(model.named_full_parameters(trained=True))


@every(24, there=WORLDS, kind=KINDS, shard=({}, {"precision": MIXED}), here=("zero3", "ddp"))
def test_training_goes_on_across_worlds(here, there, kind, shard):
    """Saved in one world, loaded in another one, saved there, loaded in the first: the bits of an uninterrupted run."""
    mesh, saved = WORLDS[here][0], {}

    def straight(comm):
        model, optimizer = world(comm, here, kind, shard=shard)
        data = modules.batches(comm, 4)
        train(model, optimizer, data[:2])
        saved[comm.rank] = copy.deepcopy(state_of(model, optimizer))
        train(model, optimizer, data[2:])
        return trained(model)

    expected = simulate(mesh, straight)
    whole = gathered([saved[rank] for rank in range(mesh.size)])
    assert list(whole["model"]) == list(modules.make(kind).state_dict())
    [batch] = modules.batches(None, 1, size=6)

    def other(comm):
        model, optimizer = world(comm, there, kind, seed=1, lr=5.0, shard=shard)
        load(model, optimizer, whole)
        state = copy.deepcopy(state_of(model, optimizer))
        train(model, optimizer, [[x.chunk(comm.mesh.size)[comm.rank] for x in batch]])
        return state, trained(model)

    found = simulate(WORLDS[there][0], other)
    again = gathered([state for state, _ in found])
    assert_same(again["model"], whole["model"])
    assert_same(again["optimizer"]["state"], whole["optimizer"]["state"])
    assert again["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]
    if not shard:
        model, optimizer = plain(kind, whole)
        train(model, optimizer, [batch])
        for _, mine in found:
            close(mine, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad})

    def back(comm):
        model, optimizer = world(comm, here, kind, seed=1, lr=5.0, shard=shard)
        train(model, optimizer, modules.batches(comm, 2))  # it has a schedule, and other state, by then
        load(model, optimizer, again)
        train(model, optimizer, modules.batches(comm, 4)[2:])
        return trained(model)

    for mine, want in zip(simulate(mesh, back), expected, strict=True):
        assert_same(mine, want)


@every(4, name=("ddp", "zero1", "zero3", "hsdp"), shard=({}, {"precision": MIXED}))
@on_ranks(lambda name: WORLDS[name][0])
def test_parts_are_loaded_where_they_were_saved(comm, name, shard):
    model, optimizer = world(comm, name, "tied", shard=shard)
    data = modules.batches(comm, 4)
    train(model, optimizer, data[:2])
    saved = copy.deepcopy(state_of(model, optimizer))
    train(model, optimizer, data[2:])
    expected = values(model)
    load(model, optimizer, saved)
    assert not any(x is y for x, y in zip(model.state_dict().values(), saved["model"].values(), strict=True))
    train(model, optimizer, data[2:])
    assert_same(values(model), expected)


def test_parts_are_in_the_memory_of_the_module():
    """In torch's dtypes and names, buffers and empty parts included."""

    def rank_fn(comm):
        model, _ = world(comm, "zero3 on 3", "frozen", shard={"precision": MIXED})
        state = model.state_dict()
        for name, parameter in model.named_parameters():
            assert type(state[name]) is fs.modules.ShardedTensor
            assert state[name].data_ptr() == parameter.data_ptr()
            assert state[name].shape == parameter.shape
            assert state[name].dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
        assert state["calls"].data_ptr() == model.calls.data_ptr()
        return [part.flat_range for name, part in state.items() if name == "layers.0.gain"]

    assert sorted(run for [run] in simulate(fs.Mesh({"dp": 3}), rank_fn)) == [(0, 0), (0, 0), (0, 1)]


@on_ranks(DP)
def test_the_state_dict_of_a_parent_has_the_parts_of_each_of_its_modules(comm):
    parent = nn.Module()
    for name in ("first", "second"):
        setattr(parent, name, fs.shard_module(nn.Sequential(nn.Linear(3, 3)), mesh=comm, sync_from=0))
    state = parent.state_dict()
    for name, module in parent.named_children():
        for path, part in module.state_dict().items():
            assert state[f"{name}.{path}"].local.data_ptr() == part.local.data_ptr()


@on_ranks(DP)
def test_copies_of_parts_are_parts_and_files_have_whole_ones(comm):
    model, optimizer = world(comm, "zero3")
    train(model, optimizer, modules.batches(comm, 1))
    part = model.state_dict()["head.weight"]
    for copied in (part.clone(), part.cpu(), part.to(torch.float64), copy.deepcopy(part)):
        assert (type(copied), copied.flat_range, copied.place) == (fs.modules.ShardedTensor, part.flat_range, part.place)
        assert copied.local.tolist() == part.local.tolist()
    assert copy.deepcopy(part).data_ptr() != part.data_ptr()
    for state in (model.state_dict(), optimizer.state_dict()):
        match = rf"'embed.weight' cannot be pickled: rank {comm.rank} holds elements .* of \[11, 6\].*fs.checkpoint.save"
        with pytest.raises(TreeError, match=match):
            torch.save(state, io.BytesIO())
    whole, optimizer = world(comm, "ddp")
    train(whole, optimizer, modules.batches(comm, 1))
    file = io.BytesIO()
    torch.save(state_of(whole, optimizer), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(each) for each in loaded["model"].values()} == {torch.Tensor}
    assert_same({name: x for name, x in loaded["model"].items() if name != "calls"}, values(whole))
    load(*world(comm, "zero3"), loaded)


@on_ranks(DP)
def test_names_may_be_left_out_where_torch_allows_it(comm):
    """And what is not named stays as it is."""
    model, _ = world(comm, "zero1", shard={"precision": MIXED})
    before, new = values(model), torch.full((11, 6), 0.5)
    result = model.load_state_dict({"head.weight": new, "other": new}, strict=False)
    alone = modules.make()
    assert result == alone.load_state_dict({"head.weight": new, "other": new}, strict=False)
    assert_same(values(model), {**before, "head.weight": new})
    x, _ = modules.batches(comm, 1)[0]
    with torch.no_grad():
        assert model(x).dtype == torch.bfloat16


@on_ranks(DP)
def test_hooks_of_torch_are_asked(comm):
    """Those that rename what is loaded see this rank's dict, and the module's own parameters come back after an error."""

    def rename(module, state_dict, prefix, *_):
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}matrix")

    net = modules.make()
    net.head.register_load_state_dict_pre_hook(rename)
    model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"), units=[Block])
    own = list(model.parameters())
    state = modules.make(seed=1).state_dict()
    state["head.matrix"] = state.pop("head.weight")
    assert model.load_state_dict(state) == ([], [])
    assert torch.equal(values(model)["head.weight"], state["head.matrix"])
    with pytest.raises(TreeError, match=r'Missing key\(s\) in state_dict: "embed.weight"'):
        model.load_state_dict({name: x for name, x in state.items() if name != "embed.weight"})
    assert all(x is y for x, y in zip(model.parameters(), own, strict=True))


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


def bias(value):
    return lambda d, comm: {**d, "head.bias": value}


WRONG = {
    "a name": (lambda d, comm: {**d, "other": d["calls"]}, r'Unexpected key\(s\) in state_dict: "other"'),
    "a missing name": (lambda d, comm: without(d, "head.bias"), r'Missing key\(s\) in state_dict: "head.bias"'),
    "a shape": (bias(torch.ones(12)), r"size mismatch for head.bias.*\[12\].*\[11\]"),
    "a dtype": (bias(torch.ones(11).double()), r"'head.bias' has another dtype(.|\n)*float64\[11\]"),
    "no values": (bias(torch.ones(11, device="meta")), r"'head.bias' is not a plain tensor with values"),
    "a buffer": (lambda d, comm: {**d, "calls": torch.ones(3)}, r"size mismatch for calls"),
    "a number": (bias(3), r'parameter named "head.bias", expected torch.Tensor'),
    "values of one rank": (
        lambda d, comm: {**d, "head.bias": torch.full((11,), float(comm.rank))},
        r"head.bias +rank 1: other values than rank 0",
    ),
    "a whole and a part": (
        lambda d, comm: {**d, "head.bias": torch.ones(11)} if comm.rank else d,
        r"parameters  rank 0: head.bias: part(.|\n)*head.bias: whole",
    ),
}


@every(2, name=WRONG, ranks=((0, 1), (1,)))
@on_ranks(DP)
def test_wrong_state_dicts_of_a_module(comm, name, ranks):
    """All ranks raise, and nothing has changed."""
    change, match = WRONG[name]
    model, _ = world(comm, "zero3")
    good = copy.deepcopy(dict(model.state_dict()))
    good["embed.weight"].local.zero_()
    good["calls"] += 7
    before = values(model)
    with pytest.raises((TreeError, AgreementError), match=match):
        model.load_state_dict(change(good, comm) if comm.rank in ranks or name.startswith(("values", "a whole")) else good)
    assert_same(values(model), before)
    assert model.calls == 0
    model.load_state_dict(good)
    assert not values(model)["embed.weight"].any()


def test_parts_of_another_rank_or_layout_are_refused():
    saved = {}

    def save(comm):
        for name in ("zero1", "zero3"):
            model, optimizer = world(comm, name)
            train(model, optimizer, modules.batches(comm, 1))
            saved[name, comm.rank] = state_of(model, optimizer)

    def fetch(comm):
        model, optimizer = world(comm, "zero1")
        train(model, optimizer, modules.batches(comm, 1))
        before = copy.deepcopy(state_of(model, optimizer))
        for name, rank in (("zero1", 1 - comm.rank), ("zero1", 1), ("zero3", comm.rank)):
            wrong = saved[name, rank]
            with pytest.raises(
                (TreeError, AgreementError), match=r"'embed.weight' is a part of another rank or layout(.|\n)*as rank"
            ):
                model.load_state_dict(wrong["model"])
            with pytest.raises(
                (TreeError, AgreementError), match=r"'exp_avg of .*' is a part of another rank or layout(.|\n)*as rank"
            ):
                optimizer.load_state_dict(wrong["optimizer"])
        assert_same(values_in(state_of(model, optimizer)), values_in(before))
        load(model, optimizer, saved["zero1", comm.rank])

    simulate(DP, save)
    simulate(DP, fetch)


def values_in(state):
    return [
        x.local if isinstance(x, fs.modules.ShardedTensor) else x
        for x in torch.utils._pytree.tree_leaves(state)
        if isinstance(x, torch.Tensor)
    ]


def test_parts_of_another_rank_are_right_where_it_is_a_replica():
    saved = {}

    def rank_fn(comm):
        model, optimizer = world(comm, "hsdp")
        train(model, optimizer, modules.batches(comm, 1, size=2))
        saved[comm.rank] = copy.deepcopy(state_of(model, optimizer))
        train(model, optimizer, modules.batches(comm, 1, size=2))  # so all ranks have saved
        assert not all(map(torch.equal, values_in(state_of(model, optimizer)), values_in(saved[comm.rank])))
        load(model, optimizer, saved[(comm.rank + 2) % 4])
        assert_same(values_in(state_of(model, optimizer)), values_in(saved[comm.rank]))

    simulate(HYBRID, rank_fn)


@on_ranks(DP)
def test_replicas_that_differ_are_refused(comm):
    """Of parts that several ranks have, and of whole tensors, where each would take a part of something else."""
    for name, shown in (("ddp", "part"), ("zero3", "whole")):
        model, optimizer = world(comm, name)
        train(model, optimizer, modules.batches(comm, 1))
        state = copy.deepcopy(state_of(model, optimizer))
        weights = state["model"] if shown == "part" else {**values(model), "calls": model.calls}
        moments = state["optimizer"]["state"]["head.weight"]
        if shown == "whole":
            moments["exp_avg"] = torch.zeros(11, 6)
        if comm.rank:
            for each in (weights["head.weight"], moments["exp_avg"]):
                (each.local if isinstance(each, fs.modules.ShardedTensor) else each)[0, 0] = 7.0
        with pytest.raises(AgreementError, match=r"head.weight +rank 1: other values than rank 0"):
            model.load_state_dict(weights)
        with pytest.raises(AgreementError, match=r"head.weight.* +rank 1: other values than rank 0"):
            optimizer.load_state_dict(state["optimizer"])


@on_ranks(DP)
def test_names_of_one_tensor_with_different_values(comm):
    model, _ = world(comm, "zero3", "tied")
    state = modules.make("tied").state_dict()
    with pytest.raises(TreeError, match=r"'embed.weight' is tied, and its names have different values"):
        model.load_state_dict({**state, "head.weight": state["embed.weight"] + 1})
    assert model.load_state_dict(without(state, "head.weight"), strict=False).missing_keys == ["head.weight"]


class Sparse(nn.Module):
    """A dense map, and one of which each rank along an axis has its own."""

    def __init__(self, own):
        super().__init__()
        self.dense, self.experts = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        nn.init.constant_(self.dense.weight, 0.5)
        nn.init.constant_(self.experts.weight, float(own))

    def forward(self, x):
        return self.experts(self.dense(x)).sum()


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_parameters_of_which_ranks_have_their_own(name):
    """Whole values are this rank's own, parts are refused along that axis, and one rank's file would not have all of it."""
    mesh, saved = fs.Mesh({"dp": 2, "ep": 2}), {}
    kind = getattr(fs, name)
    strategy = {"**": kind("dp", "ep"), "experts": kind("dp").varying("ep")}

    def rank_fn(comm):
        own = comm.mesh.coord("ep", comm.rank)
        model = fs.shard_module(Sparse(own), mesh=comm, strategy=strategy, units="experts")
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        descend(model(torch.ones(2, 3)), optimizer)
        saved[comm.rank] = copy.deepcopy(state_of(model, optimizer))
        comm.all_reduce(torch.zeros(1), "dp")
        comm.all_reduce(torch.zeros(1), "ep")
        whole = {"dense.weight": torch.ones(3, 3), "experts.weight": torch.full((3, 3), 5.0 + own)}
        assert model.load_state_dict(whole) == ([], [])
        assert_same(values(model), whole)
        load(model, optimizer, saved[comm.rank])
        other = saved[comm.rank ^ 1]  # across ep
        with pytest.raises(TreeError, match=r"(?s)'(dense|experts).weight' is a part of another rank.*as rank"):
            model.load_state_dict({**saved[comm.rank]["model"], "experts.weight": other["model"]["experts.weight"]})
        with pytest.raises(TreeError, match=r"'experts.weight' cannot be pickled"):
            pickle.dumps(saved[comm.rank]["model"]["experts.weight"])

    simulate(mesh, rank_fn)


@on_ranks(DP)
def test_at_the_wrong_time(comm):
    model, _ = world(comm, "zero3")
    optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.5))
    state = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(TreeError, match=r"load_state_dict\(assign=True\): parameters of a ShardedModule rest in memory"):
        model.load_state_dict(state, assign=True)
    with optimizer.averaged(), pytest.raises(ScheduleError, match=r"load_state_dict\(\): inside of averaged"):
        model.load_state_dict(state)
    [(x, y)] = modules.batches(comm, 1)
    model(x, y)["loss"].backward()
    with pytest.raises(ScheduleError, match=r"load_state_dict\(\): a step is under way"):
        model.load_state_dict(state)
    optimizer.zero_grad()
    model.load_state_dict(state)


class Queue(nn.Module):
    """Puts tensors of a state dict in place of its own, as a module may whose buffers have any length."""

    def __init__(self, length, assigned=("queue",)):
        super().__init__()
        self.inner, self.assigned = nn.Linear(4, 4), assigned
        self.register_buffer("queue", torch.arange(float(length)))
        self.register_buffer("count", torch.tensor(length))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name in self.assigned:
            setattr(self, name, state_dict[prefix + name].clone())
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize("length", [3, 5])
def test_buffers_that_a_module_assigns_are_loaded(length):
    def rank_fn(comm):
        net = nn.Sequential(Queue(3), Queue(2))
        model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"), units=["*"], sync_from=0)
        assert model.load_state_dict(saved) == ([], [])
        return dict(model.named_buffers()), values(model)

    saved = nn.Sequential(Queue(length), Queue(length + 1)).state_dict()
    for buffers, parameters in simulate(DP, rank_fn):
        assert_same(buffers | parameters, dict(saved))


@on_ranks(DP)
def test_a_parameter_that_a_module_replaces_in_a_load_is_refused(comm):
    class Resized(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.table = nn.Parameter(torch.ones(rows, 2))

        def _load_from_state_dict(self, state_dict, prefix, *args):
            self.table = nn.Parameter(torch.zeros_like(state_dict[prefix + "table"]))
            super()._load_from_state_dict(state_dict, prefix, *args)

    model = fs.shard_module(Resized(3), mesh=comm, strategy=fs.zero3("dp"))
    with pytest.raises(TreeError, match=r"load_state_dict\(\): parameter 'table' was removed or replaced"):
        model.load_state_dict(Resized(3).state_dict())
    assert_same(values(model), {"table": torch.ones(3, 2)})
