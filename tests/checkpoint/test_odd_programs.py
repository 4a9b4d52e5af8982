"""What programs have in their trees besides plain tensors, and the contexts in which they save and load."""

import enum
import logging
import math
import re
import sys
from pathlib import Path

import optree
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, CheckpointError, TreeError
from fsharp.testing import simulate
from tests.interop.worlds import grads_at, params as make_params

COMM = fs.SingleComm()


def save(root, tree, **options):
    return fs.checkpoint.save(root, tree, step=0, comm=COMM, **options)


def load(root, like, **options):
    return fs.checkpoint.load(root, like, comm=COMM, **options)


def test_what_torch_conjugates_and_negates_late(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 4j])
    tree = {"conj": z.conj(), "neg": z.conj().imag, "rank": fs.checkpoint.PerRank(z.conj())}
    save(tmp_path, tree)
    for donate in (False, True):
        like = {"conj": torch.zeros_like(z).conj(), "neg": torch.zeros_like(z).conj().imag, "rank": tree["rank"]}
        found = load(tmp_path, like, donate=donate)
        assert torch.equal(found["conj"], torch.tensor([1 - 2j, 3 + 4j]))
        assert torch.equal(found["neg"], torch.tensor([-2.0, 4.0]))
        assert torch.equal(found["rank"].value, z.conj())


def test_memory_that_is_given_twice_is_read_into_once(tmp_path):
    layout = fs.plan({"w": torch.zeros(4)}, COMM.mesh, fs.zero3("dp"))
    first, second = (fs.shard({"w": torch.full((4,), float(value))}, layout, COMM) for value in (1, 2))
    x = torch.arange(4.0)
    save(tmp_path, {"params": first, "ema": second, "a": torch.ones(3), "b": torch.arange(3.0), "c": torch.zeros(3)})
    like = {"params": second, "ema": second, "a": x[:3], "b": x[1:], "c": x[:3]}
    found = load(tmp_path, like, donate=True)
    assert fs.full_tree(found["params"], comm=COMM)["w"].tolist() == [1.0] * 4
    assert fs.full_tree(found["ema"], comm=COMM)["w"].tolist() == [2.0] * 4
    assert [found[name].tolist() for name in "abc"] == [[1.0] * 3, [0.0, 1.0, 2.0], [0.0] * 3]
    assert found["a"].data_ptr() == x.data_ptr()


class Kind(enum.IntEnum):
    WARM = 3


def test_numbers_stand_for_each_other(tmp_path):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.step()
    schedule.step()
    tree = {"optimizer": optimizer, "schedule": schedule, "best": 0.73, "kind": Kind.WARM, "flag": True}
    save(tmp_path, tree)
    again = torch.optim.SGD([weight], lr=1)
    fresh = torch.optim.lr_scheduler.ExponentialLR(again, 0.9)
    found = load(tmp_path, {"optimizer": again, "schedule": fresh, "best": 0, "kind": Kind.WARM, "flag": False})
    assert (found["best"], found["kind"], found["flag"]) == (0.73, 3, True)
    assert fresh.get_last_lr() == schedule.get_last_lr() == [0.9]
    with pytest.raises(fs.errors.TreeError, match=r"'flag' +True in the checkpoint; expected a value like 1"):
        load(tmp_path, tree | {"flag": 1})


def test_milestones_of_a_schedule(tmp_path):
    def made():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5])

    optimizer, schedule = made()
    for _ in range(3):
        optimizer.step()
        schedule.step()
    save(tmp_path, schedule)
    _, again = made()
    load(tmp_path, again)
    assert again.state_dict() == schedule.state_dict()
    assert type(again.milestones) is type(schedule.milestones)


def test_under_another_default_device_and_in_inference_mode(tmp_path):
    tree = {"w": torch.arange(5.0)}
    with fs.checkpoint.Saver(tmp_path, COMM) as saver:
        with torch.inference_mode():
            saver.save(tree, step=0)
        saver.wait()
        with torch.device("meta"):
            saver.save(tree, step=1)
            saver.wait()
            found = load(tmp_path, tree)
            assert torch.equal(fs.checkpoint.latest(tmp_path).tensor("w"), found["w"])
    assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


class Tied(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        nn.init.constant_(self.embed.weight, value)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


@pytest.mark.parametrize("strategy", [fs.zero3, fs.ddp], ids=["zero3", "ddp"])
def test_a_tied_module_is_saved_once_and_loads_from_one_of_its_names(tmp_path, strategy):
    def rank_fn(comm):
        model = fs.shard_module(Tied(1.0), mesh=comm, strategy=strategy("dp"))
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        model(torch.tensor([0, 1])).sum().backward()
        optimizer.step()
        own = fs.checkpoint.save(tmp_path / "own", {"model": model, "optimizer": optimizer}, step=0, comm=comm)
        names = sorted(own.manifest.tensors), own.manifest.aliases
        other = fs.shard_module(Tied(2.0), mesh=comm, strategy=strategy("dp"))
        fs.checkpoint.load(own, other, comm=comm, subtree="model")
        equal = [torch.equal(x, y) for (_, x), (_, y) in zip(*(m.named_full_parameters() for m in (model, other)), strict=True)]
        fs.checkpoint.load(tmp_path / "theirs", other, comm=comm)
        return names, equal, [(name, x.unique().tolist()) for name, x in other.named_full_parameters()]

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    save_file({"embed.weight": torch.full((5, 3), 7.0)}, theirs / "model.safetensors")
    names, equal, loaded = simulate(fs.Mesh({"dp": 2}), rank_fn)[0]
    assert names == (
        ["model.embed.weight", "optimizer.state.embed.weight.momentum_buffer"],
        {"model.head.weight": "model.embed.weight"},
    )
    assert equal == [True]
    assert loaded == [("embed.weight", [7.0])]


class Broken:
    """An object that one rank cannot save, or not load."""

    def __init__(self, error_at):
        self.error_at = error_at

    def state_dict(self):
        if self.error_at == "save":
            raise ValueError("no state today")
        return {"x": torch.ones(2)}

    def load_state_dict(self, state):
        if self.error_at == "load":
            raise ValueError("does not fit")


def test_an_object_that_fails_on_one_rank_is_an_error_on_all(tmp_path):
    fs.checkpoint.save(tmp_path, Broken(""), step=0, comm=COMM)

    def rank_fn(comm):
        said = []
        for error_at, call in (
            ("save", lambda each: fs.checkpoint.save(tmp_path, each, step=1, comm=comm)),
            ("load", lambda each: fs.checkpoint.load(tmp_path, each, comm=comm)),
        ):
            with pytest.raises(AgreementError, match=f"{error_at}\\(\\): failed on rank 1") as caught:
                call(Broken(error_at if comm.rank else ""))
            said.append(str(caught.value))
        fs.checkpoint.save(tmp_path, Broken(""), step=2, comm=comm)
        return said

    first, second = simulate(fs.Mesh({"dp": 2}), rank_fn)
    assert first == second
    assert fs.checkpoint.latest(tmp_path).step == 2


def test_buffers_that_each_rank_has_for_itself(tmp_path):
    def rank_fn(comm):
        made = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in "ab"]
        for model in made:
            fs.shard_module(model, mesh=comm, strategy=fs.zero3("dp"), sync_from=0)
            model(torch.randn(5, 3, generator=torch.Generator().manual_seed(comm.rank)))
            model.zero_grad()
        first, second = made
        second.load_state_dict({"1.running_mean": torch.zeros(4)}, strict=False)
        with pytest.raises(AgreementError, match=r"ModuleWithPerRankBuffers\(\) allow to differ(.|\n)*running_mean"):
            fs.checkpoint.save(tmp_path, {"model": first}, step=0, comm=comm)
        fs.checkpoint.save(tmp_path, {"model": fs.checkpoint.ModuleWithPerRankBuffers(first)}, step=1, comm=comm)
        fs.checkpoint.load(tmp_path, {"model": fs.checkpoint.ModuleWithPerRankBuffers(second)}, comm=comm)
        found = dict(first.named_buffers()), dict(second.named_buffers())
        return all(torch.equal(found[0][name], found[1][name]) for name in found[0]), found[1]["1.running_mean"]

    (is_same, first), (is_same_too, second) = simulate(fs.Mesh({"dp": 2}), rank_fn)
    assert is_same
    assert is_same_too
    assert not torch.equal(first, second)


def test_a_fraction_is_not_cast_to_an_integer(tmp_path):
    save(tmp_path, {"x": torch.tensor(0.7), "n": torch.tensor(3)})
    with pytest.raises(fs.errors.TreeError, match=r"'x' +float32\[\] in the checkpoint; expected int32"):
        load(tmp_path, {"x": torch.tensor(0, dtype=torch.int32), "n": torch.tensor(0)}, cast=True)
    found = load(tmp_path, {"x": torch.tensor(0.0).bfloat16(), "n": torch.tensor(0.0)}, cast=True)
    assert (found["x"], found["n"].item()) == (torch.tensor(0.7).bfloat16(), 3.0)


@pytest.mark.parametrize(
    ("stored", "wanted", "fits"),
    [
        (torch.int64, torch.uint8, False),
        (torch.int64, torch.int32, False),
        (torch.uint8, torch.int8, False),
        (torch.int8, torch.uint8, False),
        (torch.uint8, torch.uint16, True),
        (torch.uint8, torch.int16, True),
        (torch.bool, torch.uint8, True),
        (torch.uint8, torch.bool, False),
        (torch.int64, torch.float32, True),
        (torch.float32, torch.float8_e4m3fn, False),
        (torch.float8_e4m3fn, torch.float32, True),
    ],
)
def test_values_are_cast_to_a_dtype_that_holds_all_values_of_their_own(tmp_path, stored, wanted, fits):
    save(tmp_path, {"x": torch.tensor([1, 0]).to(stored)})
    like = {"x": torch.zeros(2, dtype=wanted)}
    if fits:
        assert torch.equal(load(tmp_path, like, cast=True)["x"], torch.tensor([1, 0]).to(wanted))
    else:
        with pytest.raises(fs.errors.TreeError, match="in the checkpoint; expected"):
            load(tmp_path, like, cast=True)


@pytest.mark.parametrize(
    ("large", "stored", "wanted"),
    [
        (70_000.0, torch.float32, torch.float16),
        (-70_000, torch.int64, torch.float16),
        (3.4e38, torch.float32, torch.bfloat16),
        (1e300, torch.float64, torch.float32),
        (1e300j, torch.complex128, torch.complex64),
    ],
)
@pytest.mark.parametrize("donate", [False, True])
def test_a_finite_value_is_not_cast_to_an_infinite_one(tmp_path, large, stored, wanted, donate):
    """One rank alone reads the large value. Infinite values stay infinite."""
    infinite = [float("inf"), float("nan"), -float("inf")] if stored.is_floating_point else [1, 2, 3]
    mesh, values = fs.Mesh({"dp": 2}), torch.tensor([*infinite, 5, 6, large], dtype=stored).view(6, 1)

    def rank_fn(comm):
        def sharded(rows):
            return fs.shard({"x": rows}, fs.plan({"x": rows}, mesh, fs.zero3("dp")), comm)

        def loaded(count):
            like = sharded(torch.zeros(count, 1, dtype=wanted))
            return fs.checkpoint.load(tmp_path / str(count), like, comm=comm, cast=True, donate=donate)

        for count in (5, 6):
            fs.checkpoint.save(tmp_path / str(count), sharded(values[:count]), step=1, comm=comm)
        whole = fs.full_tree(loaded(5), comm=comm)["x"]
        assert torch.equal(whole.nan_to_num(7), values[:5].to(wanted).nan_to_num(7))
        with pytest.raises((fs.errors.TreeError, fs.errors.AgreementError)) as caught:
            loaded(6)
        return f"{caught.value}"

    for text in simulate(mesh, rank_fn):
        assert re.search(rf"'x' has .* as {stored}, which is infinite as {wanted}", text)


def test_a_tensor_without_values_is_named(tmp_path):
    layout = fs.plan({"v": torch.zeros(4)}, COMM.mesh, fs.zero3("dp"))
    node = fs.shard({"v": torch.zeros(4)}, layout, COMM)
    trees = (
        {"a": torch.ones(1), "w": torch.empty(3, device="meta")},
        {"w": fs.layouts.map_units(lambda unit: unit.replace([x.to("meta") for x in unit.buffers]), node)},
    )
    for tree in trees:
        with pytest.raises(TreeError, match=r"save\(\): 'w[.v]*' is on the meta device, without values.*init_params"):
            save(tmp_path, tree)
    assert not list(tmp_path.iterdir())


def test_names_that_the_format_has_taken(tmp_path):
    found = save(tmp_path / "a", {"p": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"export_safetensors\(\): the name '__metadata__' is reserved"):
        fs.checkpoint.export_safetensors(found, tmp_path / "out", rename=lambda name: "__metadata__")
    fs.checkpoint.to_dcp(found, tmp_path / "dcp", rename=lambda name: "__metadata__")
    with pytest.raises(CheckpointError, match=r"from_dcp\(\): the name '__metadata__' is reserved"):
        fs.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "b")
    fs.checkpoint.to_dcp(found, tmp_path / "half", rename=lambda name: "a\udc80")
    with pytest.raises(CheckpointError, match=r"from_dcp\(\): 'a\\udc80' has half of a surrogate pair"):
        fs.checkpoint.from_dcp(tmp_path / "half", tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"export_safetensors\(\): 'a\\udc80' has half of a surrogate pair"):
        fs.checkpoint.export_safetensors(found, tmp_path / "out", rename=lambda name: "a\udc80")
    with pytest.raises(CheckpointError, match=r"from_dcp\(\): JSON cannot hold the config"):
        fs.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "b", config=object())


def nested(levels, leaf, *, lists=False):
    for _ in range(levels):
        leaf = [leaf] if lists else {"a": leaf}
    return leaf


DEEP_FOR_JSON = nested(700, 3, lists=True)  # not for optree, and from Python 3.13 on not for JSON either
TOO_DEEP = [nested(1200, torch.ones(2)), nested(1200, 3, lists=True), *[DEEP_FOR_JSON] * (sys.version_info < (3, 13))]


@pytest.mark.parametrize("deep", TOO_DEEP, ids=["dicts", "lists", "lists that optree can follow"][: len(TOO_DEEP)])
def test_a_tree_that_nests_too_deeply_is_refused_on_all_ranks(tmp_path, deep):
    with pytest.raises(TreeError, match=r"nests too deeply.*expected fewer than 1,000 levels"):
        save(tmp_path, deep)

    def one_alone(comm):
        with pytest.raises(
            (TreeError, AgreementError), match=r"(?s)rank 1.*nests too deeply.*expected fewer than 1,000 levels"
        ):
            fs.checkpoint.save(tmp_path, deep if comm.rank else torch.ones(2), step=0, comm=comm)

    simulate(fs.Mesh({"dp": 2}), one_alone)
    save(tmp_path, torch.ones(2))
    with pytest.raises(TreeError, match="nests too deeply" if deep is not DEEP_FOR_JSON else "differences"):
        load(tmp_path, deep)
    assert len(fs.checkpoint.list_checkpoints(tmp_path)) == len(list(tmp_path.iterdir())) == 1


def test_a_tree_that_is_one_list_of_numbers_or_nests_deeply(tmp_path):
    for tree, like in (
        ([1, 2.5], [0, 0.0]),
        ((1, [True]), (0, [False])),
        (nested(390, 3, lists=True), nested(390, 0, lists=True)),
    ):
        save(tmp_path, tree)
        assert load(tmp_path, like) == tree
    save(tmp_path, nested(990, torch.ones(2)))
    assert optree.tree_leaves(load(tmp_path, nested(990, torch.zeros(2))))[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("of", ["shards", "tensors", "one rank"])
def test_a_name_that_utf8_cannot_hold_is_refused_before_anything_is_written(tmp_path, of):
    def run(comm):
        tree = {"layer": {"x" if of == "one rank" and comm.rank == 0 else "a\udc80": torch.ones(4)}}
        given = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm) if of == "shards" else tree
        expected = r"'layer\.a\\udc80' has half of a surrogate pair.*rename the key"
        with pytest.raises((CheckpointError, AgreementError), match=expected):
            fs.checkpoint.save(tmp_path, given, step=0, comm=comm)

    simulate(fs.Mesh({"dp": 2}), run)
    assert list(tmp_path.iterdir()) == []


def test_a_save_to_an_object_store_does_not_warn_of_itself(caplog):
    with caplog.at_level(logging.WARNING, "fsharp"):
        for _ in range(2):
            save("memory://quiet", {"x": torch.ones(2)})
    assert caplog.records == []


def torchopt_state(comm, layout, tx):
    return fs.init_state(tx, fs.shard(make_params(), layout, comm, place="optim"), comm=comm)


def trained(comm, layout, tx, state, steps):
    for step in steps:
        state = fs.update(tx, fs.shard(grads_at(step), layout, comm, place="optim"), state, comm=comm)
    return state


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_states_of_torchopt_go_on_elsewhere(tmp_path, name):
    import torchopt

    make = {"adam": lambda: torchopt.adam(1e-2), "sgd": lambda: torchopt.sgd(0.1, momentum=0.9)}[name]
    units = ["embed", "layers.*"]

    def before(comm):
        layout = fs.plan(make_params(), comm.mesh, fs.zero3("dp"), units=units)
        state = trained(comm, layout, make(), torchopt_state(comm, layout, make()), range(4))
        fs.checkpoint.save(tmp_path, state, step=4, comm=comm)
        return fs.full_tree(trained(comm, layout, make(), state, range(4, 8)).params, comm=comm)

    def after(comm):
        layout = fs.plan(make_params(), comm.mesh, fs.ddp("dp"), atoms=fs.layouts.RowsAtom())
        state = fs.checkpoint.load(tmp_path, torchopt_state(comm, layout, make()), comm=comm)
        return fs.full_tree(trained(comm, layout, make(), state, range(4, 8)).params, comm=comm)

    expected = simulate(fs.Mesh({"dp": 3}), before)[0]
    for found in simulate(fs.Mesh({"dp": 2}), after):
        torch.testing.assert_close(optree.tree_leaves(found), optree.tree_leaves(expected), rtol=1e-6, atol=1e-7)


def test_states_of_torchopt_are_resharded_or_refused():
    import torchopt

    mesh = fs.Mesh({"o": 2, "i": 2})

    def rank_fn(comm):
        old, new = (fs.plan(make_params(), mesh, fs.hsdp(*axes)) for axes in (("o", "i"), ("i", "o")))
        tx = torchopt.sgd(0.1, momentum=0.9)
        state = trained(comm, old, tx, torchopt_state(comm, old, tx), range(3))
        there = trained(comm, new, tx, fs.reshard(state, new, comm=comm), range(3, 6))
        here = trained(comm, old, tx, state, range(3, 6))
        counted = torchopt_state(comm, old, torchopt.adam(1e-2))
        with pytest.raises(fs.errors.TreeError, match="a buffer has not one number for each element"):
            fs.reshard(counted, new, comm=comm)
        return [fs.full_tree(each.params, comm=comm) for each in (there, here)]

    for there, here in simulate(mesh, rank_fn):
        assert all(map(torch.equal, optree.tree_leaves(there), optree.tree_leaves(here)))


class Stubborn:
    """An object that loads no state dict."""

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        raise ValueError("never")


def test_a_donated_tree_stays_donated_if_an_object_in_it_cannot_load(tmp_path):
    """Its buffers have the values of the checkpoint, and the object has those of before."""
    layout = fs.plan({"v": torch.zeros(4)}, COMM.mesh, fs.zero3("dp"))
    save(tmp_path, {"object": Stubborn(), "w": fs.shard({"v": torch.ones(4)}, layout, COMM)})
    like = fs.shard({"v": torch.zeros(4)}, layout, COMM)
    with pytest.raises(Exception, match="never"):
        load(tmp_path, {"object": Stubborn(), "w": like}, donate=True)
    with pytest.raises(fs.errors.TreeError, match="donated"):
        fs.gather(like, comm=COMM)


def test_a_tree_whose_load_failed_is_donated_if_its_values_are_lost(tmp_path):
    layout = fs.plan({"v": torch.zeros(4000)}, COMM.mesh, fs.zero3("dp"))
    path = save(tmp_path, {"w": fs.shard({"v": torch.ones(4000)}, layout, COMM)}).path
    like = fs.shard({"v": torch.full((4000,), 2.0)}, layout, COMM)
    with pytest.raises(TreeError, match="'other'"):
        load(tmp_path, {"w": like, "other": torch.zeros(1)}, donate=True)
    assert torch.equal(fs.full_tree(like, comm=COMM)["v"], torch.full((4000,), 2.0)), "nothing was read yet"
    [file] = Path(path).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-4000] ^= 1
    file.write_bytes(data)
    for where in (path, tmp_path):
        like = fs.shard({"v": torch.full((4000,), 2.0)}, layout, COMM)
        with pytest.raises(CheckpointError, match="damaged"):
            load(where, {"w": like}, donate=True)
        with pytest.raises(TreeError, match="donated"):
            fs.gather(like, comm=COMM)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3, 4)])
def test_tensors_of_float4_are_loaded(tmp_path, shape):
    values = torch.arange(12, dtype=torch.uint8)[: math.prod(shape)].view(shape)
    save(tmp_path, {"t": values.view(torch.float4_e2m1fn_x2)})
    like = torch.zeros(shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for tree in ({"t": like}, {"t": like.to("meta")}):
        assert torch.equal(load(tmp_path, tree)["t"].view(torch.uint8), values)


def test_values_that_a_manifest_cannot_hold_are_named(tmp_path):
    save(tmp_path, {"n": 10**4300 - 1})
    assert load(tmp_path, {"n": 0})["n"] == 10**4300 - 1
    with pytest.raises(TreeError, match=r"'n\.0' is an integer of more than 4,300 digits"):
        save(tmp_path, {"n": [-(10**4300)]})
    with pytest.raises(CheckpointError, match=r"would have 100,0\d\d brackets in [0-9,]+ bytes, more than a sixth"):
        save(tmp_path, {"lists": [[] for _ in range(100_000)]})
    assert len(fs.checkpoint.list_checkpoints(tmp_path)) == 1
