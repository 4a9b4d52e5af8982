"""State dicts that are whole on one rank: gathered there a unit at a time, and spread from there; or refused on all ranks."""

import copy

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, FsharpError, MeshError, ScheduleError, TreeError
from fsharp.testing import simulate
from fsharp.testing.simulated_ranks import ThreadComm
from tests import modules
from tests.functional.test_per_sample import LiveBytes
from tests.modules import Net, batches, train, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, HYBRID, STRATEGIES, assert_same, every

WORLDS = {name: STRATEGIES[name] for name in ("ddp", "zero1", "zero3", "hsdp")}
MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32)


@every(6, name=WORLDS, precision=[fs.Precision(), MIXED], kind=["plain", "tied", "frozen"])
def test_training_goes_on_from_what_one_rank_has(name, precision, kind):
    mesh, strategy = WORLDS[name]

    def rank_fn(comm):
        last = comm.mesh.size - 1
        model, optimizer = wrap(comm, strategy, kind, precision=precision)
        train(model, optimizer, batches(comm, 2))
        found = model.full_state_dict(rank=last), optimizer.full_state_dict(rank=last)
        assert (comm.rank == last) == bool(found[0]) == bool(found[1])
        other, its = wrap(comm, "ddp" if mesh == DP else strategy, kind, precision=precision)
        with torch.no_grad():
            for part in other.parameters():
                part.local.zero_()
        assert other.load_full_state_dict(found[0] or None, rank=last) == ([], [])
        its.load_full_state_dict(found[1] or None, rank=last)
        data = batches(comm, 1)
        train(other, its, data)
        train(model, optimizer, data)
        trained = dict(model.named_full_parameters(trained=True))
        assert_same(dict(other.named_full_parameters(trained=True)), trained)
        return found

    model, optimizer = simulate(mesh, rank_fn)[-1]
    alone = modules.make(kind)
    assert list(model) == list(alone.state_dict())
    assert alone.load_state_dict({n: x.to(alone.state_dict()[n].dtype) for n, x in model.items()}) == ([], [])
    assert model["calls"] == 2
    names = [n for n, p in alone.named_parameters() if p.requires_grad]
    assert sorted(optimizer["state"]) == sorted(names)
    for n in names:
        assert optimizer["state"][n]["exp_avg"].shape == alone.get_parameter(n).shape
        assert optimizer["state"][n]["step"] == 2
    if kind == "tied":
        assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()


def test_hooks_that_rename_and_versions_are_torch_s_own():
    def rank_fn(comm):
        model, _ = wrap(comm, "zero3")
        model.register_state_dict_post_hook(lambda m, state, prefix, _: state.update(top=state.pop("head.weight")))
        model.register_load_state_dict_pre_hook(lambda m, state, *_: state.update({"head.weight": state.pop("top")}))
        expected = values(model)
        found = model.full_state_dict()
        with torch.no_grad():
            model.head.weight.local.zero_()
        assert model.load_full_state_dict(found or None) == ([], [])
        assert_same(values(model), expected)
        return found

    whole, _ = simulate(DP, rank_fn)
    assert torch.equal(whole["top"], modules.make().head.weight)
    assert whole._metadata.keys() == Net().state_dict()._metadata.keys()


def test_no_rank_holds_more_than_one_unit_beside_the_result():
    """32 units on four ranks, each of which has eight units' worth of parameters of its own."""
    mesh, unit, own = fs.Mesh({"dp": 4}), 4 * 64 * 64, 8

    def rank_fn(comm):
        net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4 * own)))
        model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"), units="*", sync_from=0)
        with LiveBytes() as gathering:
            state = model.full_state_dict()
        kept = sum(x.nbytes for x in state.values())
        assert kept == (4 * own * unit if comm.rank == 0 else 0)
        with LiveBytes() as loading:
            model.load_full_state_dict(state or None)
        return (gathering.most - kept) / unit - own, (loading.most - kept) / unit - own

    for gathering, loading in simulate(mesh, rank_fn):
        assert 1 <= gathering <= 2  # a whole unit, and what is sent of it
        assert own < loading <= own + 9  # these parts once more; a tensor, and in a simulated sum of words eight times as much


WRONG = {
    "a rank that is none": (
        lambda m, o, r: m.full_state_dict(rank=2),
        MeshError,
        r"rank is 2, expected a rank of Mesh\(dp=2\)",
    ),
    "a rank of its own": (lambda m, o, r: m.full_state_dict(rank=r), AgreementError, "rank 0: 0"),
    "another source": (lambda m, o, r: m.load_full_state_dict({}, rank=r), FsharpError, r"rank 0: 0"),
    "two state dicts": (lambda m, o, r: m.load_full_state_dict({"w": 1}), FsharpError, r"rank 1 passes a state dict too"),
    "none": (lambda m, o, r: m.load_full_state_dict(None), FsharpError, r"rank 0 has a NoneType, expected a state dict"),
    "parts": (
        lambda m, o, r: m.load_full_state_dict(None if r else m.state_dict()),
        FsharpError,
        r"'embed\.weight' is a ShardedTensor float32\[11, 6\] on cpu, expected a whole tensor",
    ),
    "objects": (lambda m, o, r: m.load_full_state_dict(None if r else {"x": Net}), FsharpError, "has objects other than"),
    "names": (
        lambda m, o, r: m.load_full_state_dict(None if r else {"other": torch.ones(2)}),
        TreeError,
        r'Missing key.*"embed\.weight".*[\s\S]*Unexpected key.*"other"',
    ),
    "shapes": (
        lambda m, o, r: m.load_full_state_dict(None if r else modules.make().state_dict() | {"head.bias": torch.ones(3)}),
        TreeError,
        r"size mismatch for head\.bias.*\[3\]",
    ),
    "optimizer names": (
        lambda m, o, r: o.load_full_state_dict(None if r else {"state": {}, "param_groups": []}),
        TreeError,
        r"parameter groups are not those of this optimizer",
    ),
}


@on_ranks(DP)
def test_all_ranks_refuse(comm):
    model, optimizer = wrap(comm, "zero3")
    for act, error, match in WRONG.values():
        before = values(model)
        with pytest.raises(error, match=match):
            act(model, optimizer, comm.rank)
        assert_same(values(model), before)
        train(model, optimizer, batches(comm, 1))


@on_ranks(HYBRID)
def test_values_of_ranks_own_are_refused(comm):
    model = fs.shard_module(
        modules.make(), mesh=comm,
        strategy={"**": fs.zero3("outer", "inner"), "head": fs.zero3("outer").varying("inner")},
        units=[modules.Block, "head"],
    )  # fmt: skip
    with pytest.raises(TreeError, match=r"'head\.weight' has different values on ranks along \['inner'\]"):
        model.full_state_dict()


def test_inside_of_unsharded_it_is_refused():
    model = fs.shard_module(modules.make(), mesh=fs.SingleComm())
    with model.unsharded(), pytest.raises(ScheduleError, match=r"full_state_dict\(\): inside of unsharded"):
        model.full_state_dict()


@on_ranks(DP)
def test_a_pair_is_refused_with_the_line_to_write_instead(comm):
    model, _ = wrap(comm, "zero3")
    optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(0.1))
    line = r"whole tree on all ranks, fs\.full_tree\(optimizer\.state_dict\(\)\['state'\], comm=model\.comm\)"
    said = r"(?s)full_state_dict\(\): the state of an \(init, update\) pair .*fs\.checkpoint\.save\(\) and load by .*"
    with pytest.raises(TreeError, match=said + line):
        optimizer.full_state_dict()
    with pytest.raises(TreeError, match=r"load_full_state_dict\(\): .*load by fs\.checkpoint\.load\(\)"):
        optimizer.load_full_state_dict(None)
    train(model, optimizer, batches(comm, 1))
    mu = fs.full_tree(optimizer.state_dict()["state"], comm=model.comm).mu
    assert mu["embed"]["weight"].shape == modules.make().embed.weight.shape


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@on_ranks(DP)
def test_after_an_error_a_module_can_be_read_and_loaded_at_once(comm, strategy):
    """Its scheduler, which the error has closed, is opened again, whichever call comes first."""
    model, optimizer = wrap(comm, strategy)
    train(model, optimizer, batches(comm, 2))
    saved = copy.deepcopy((model.full_state_dict(rank=None), optimizer.full_state_dict(rank=None), optimizer.state_dict()))
    calls = (
        lambda: dict(model.named_full_parameters()),
        model.full_state_dict,
        optimizer.state_dict,
        optimizer.full_state_dict,
        lambda: optimizer.load_state_dict(saved[2]),
        lambda: model.load_full_state_dict(saved[0] if comm.rank == 0 else None),
        lambda: optimizer.load_full_state_dict(saved[1] if comm.rank == 0 else None),
        lambda: fs.ShardedOptimizer(model.parameters(), fs.optim.sgd(0.1)),
    )
    for call in calls:
        with pytest.raises(IndexError, match="out of range"):
            model(torch.tensor([99]))
        call()
    assert all(torch.equal(found, saved[0][name]) for name, found in values(model).items())


@pytest.mark.parametrize("name", ["zero1", "zero2", "hfsdp"])
def test_after_an_error_in_the_gather_of_updated_parameters_a_checkpoint_is_loaded(name, tmp_path, monkeypatch):
    mesh, strategy = STRATEGIES[name]
    gather, failed = ThreadComm.all_gather, set()

    def failing(comm, x, axis, *, label=""):
        if "(update)" in label and comm.rank not in failed:
            failed.add(comm.rank)
            raise RuntimeError("planted")
        return gather(comm, x, axis, label=label)

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        data, tree = batches(comm, 4), {"model": model, "optimizer": optimizer}
        train(model, optimizer, data[:2])
        fs.checkpoint.save(tmp_path, tree, step=2, comm=comm)
        expected = train(model, optimizer, data[2:])
        fs.checkpoint.load(tmp_path, tree, comm=comm)
        monkeypatch.setattr(ThreadComm, "all_gather", failing)
        with pytest.raises(RuntimeError, match="planted"):
            train(model, optimizer, data[2:])
        optimizer.zero_grad()
        fs.checkpoint.load(tmp_path, tree, comm=comm)
        assert train(model, optimizer, data[2:]) == expected

    simulate(mesh, rank_fn)
    assert len(failed) == mesh.size


class MomentumInItsDtype(torch.optim.Optimizer):
    def __init__(self, params, dtype=torch.float32):
        super().__init__(params, {"dtype": dtype})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("m", torch.zeros_like(p, dtype=group["dtype"]))
                    p.sub_(kept.add_(p.grad.to(kept.dtype)).to(p.dtype))


@on_ranks(DP)
def test_groups_keep_the_state_of_one_unit_in_dtypes_of_their_own(comm):
    model = fs.shard_module(nn.Linear(4, 4), mesh=comm, sync_from=0)
    groups = [{"params": [model.bias]}, {"params": [model.weight], "dtype": torch.bfloat16}]
    optimizer = fs.ShardedOptimizer(groups, MomentumInItsDtype)
    model(torch.ones(3, 4) / 3).square().sum().backward()
    optimizer.step()
    state, full = (each["state"] for each in (optimizer.state_dict(), optimizer.full_state_dict(rank=None)))
    for path, dtype in (("bias", torch.float32), ("weight", torch.bfloat16)):
        part, whole = state[path]["m"], full[path]["m"]
        assert (part.dtype, whole.dtype) == (dtype, dtype)
        assert torch.equal(whole.flatten()[slice(*part.flat_range)], part.local.flatten())
