"""Checkpoints of torch.distributed.checkpoint, both ways, against DCP itself and FSDP2 in processes."""

import io
import os
import pathlib
import pickle
import shutil
import struct
import sys
import zipfile
from collections import OrderedDict

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fsharp as fs
from fsharp.checkpoint.formats import dcp as ours
from fsharp.checkpoint.formats.exporting import write_folder_atomically
from fsharp.checkpoint.formats.torch_archive import load_archive
from fsharp.errors import CheckpointError, PatternError, TreeError
from fsharp.testing import processes, simulate
from tests.checkpoint.models import nested, planned, whole
from tests.faults.disk import mounted, mounts
from tests.modules import descend

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
MESH = fs.Mesh({"dp": 2})
COMM = fs.SingleComm()


def build():
    """A model whose rows do not divide by two."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def fsdp2(model):
    """The model under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained_by_fsdp2(model):
    """Train a model under FSDP2 for two steps; return the state dicts of model and optimizer."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = fsdp2(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    for _ in range(2):
        descend(model(torch.arange(12.0).view(2, 6) / 12).square().sum(), optimizer)
    state, opt = get_state_dict(model, optimizer)
    return {"model": state, "optim": opt}


OPTIMIZERS = {
    "AdamW": lambda model: ([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}],
                            torch.optim.AdamW, {"betas": (0.7, 0.8)}),
    "SGD": lambda model: (model.parameters(), torch.optim.SGD, {"lr": 0.3, "momentum": 0.5}),
}  # fmt: skip


def trained_by_fsharp(folder, kind):
    """Train on three ranks, save, convert into ``folder``; return the parameters and the state of the optimizer."""

    def train(comm):
        model = fs.shard_module(build(), mesh=comm, strategy=fs.zero3("dp"), units=[nn.Linear])
        groups, which, options = OPTIMIZERS[kind](model)
        optimizer = fs.ShardedOptimizer(groups, which, **options)
        for _ in range(2):
            descend(model(torch.arange(12.0).view(2, 6) / 12).square().sum(), optimizer)
        fs.checkpoint.save(folder / "root", {"model": model, "optim": optimizer}, step=2, comm=model.comm)
        return {name: p.detach().clone() for name, p in model.named_full_parameters()}, optimizer.full_state_dict(rank=None)

    result = simulate(fs.Mesh({"dp": 3}), train)[0]
    fs.checkpoint.to_dcp(fs.checkpoint.latest(folder / "root"), folder / "dcp")
    return result


def loaded_by_torch(folder, kind, model, **options):
    """Load by the program of torch's tutorial; return the parameters and the state of the optimizer."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    groups, which, settings = OPTIMIZERS[kind](model)
    optimizer = which(groups, **settings | {"lr": 1.0, "weight_decay": 0.9})
    state, opt = get_state_dict(model, optimizer)
    tree = {"model": state, "optim": opt}
    dcp.load(tree, checkpoint_id=folder / "dcp", **options)
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def assert_same_state(got, want):
    assert same(got[0], want[0])
    assert got[1]["param_groups"] == want[1]["param_groups"]
    assert got[1]["state"].keys() == want[1]["state"].keys()
    assert all(same(state, want[1]["state"][name]) for name, state in got[1]["state"].items())


def tensors_of(tree, prefix=""):
    """Whole tensors by dotted name."""
    found = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= tensors_of(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            found[prefix + name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """What two ranks of FSDP2 and fsharp have of each other.

    A folder with ``dcp``, which FSDP2 saved; what that was; what we saved; what FSDP2 loaded of it; by kind of optimizer what
    we have trained; and what FSDP2 loaded of that.
    """
    folder = tmp_path_factory.mktemp("exchanged")
    torch.manual_seed(5)
    kinds = ("model", "exp_avg", "exp_avg_sq")
    given = {kind: {name: torch.randn_like(p) for name, p in build().named_parameters()} for kind in kinds}

    def save(comm):
        trees = {kind: nested(each) for kind, each in given.items()}
        tree = {kind: fs.shard(each, fs.plan(each, comm.mesh, fs.zero3("dp"), units="*"), comm) for kind, each in trees.items()}
        return fs.checkpoint.save(folder / "ours", tree, step=1, comm=comm)

    def rename(name):
        kind, _, rest = name.partition(".")
        return name if kind == "model" else f"optim.state.{rest}.{kind}"

    fs.checkpoint.to_dcp(simulate(fs.Mesh({"dp": 3}), save)[0], folder / "exported", rename=rename)

    def run(comm):
        tree = trained_by_fsdp2(build())
        dcp.save(tree, checkpoint_id=str(folder / "dcp"))
        saved = tensors_of(tree)
        states = tree["optim"]["state"]
        moments = {name: {kind: each[kind] for kind in kinds[1:]} for name, each in states.items()}
        read = {"model": tree["model"], "optim": {"state": moments}}
        dcp.load(read, checkpoint_id=str(folder / "exported"))
        return (saved, tensors_of(read), {kind: loaded_by_torch(folder / kind, kind, fsdp2(build())) for kind in OPTIMIZERS})

    trained = {kind: trained_by_fsharp(folder / kind, kind) for kind in OPTIMIZERS}
    results = processes(MESH, run)
    expected = {rename(f"{kind}.{name}"): value for kind, each in given.items() for name, value in each.items()}
    return folder, results[0][0], expected, [read for _, read, _ in results], trained, [each for *_, each in results]


def test_fsdp2_loads_what_we_saved(exchanged):
    """Written by three ranks under zero3, loaded by two of FSDP2, model and moments."""
    _, _, expected, reads, *_ = exchanged
    for read in reads:
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fsdp2_loads_a_model_and_optimizer_that_fsharp_has_trained(exchanged, kind):
    """The program of torch's tutorial on two ranks: parameters, moments and groups of what three ranks have trained."""
    *_, trained, loaded = exchanged
    for each in loaded:
        assert_same_state(each[kind], trained[kind])


def test_what_fsdp2_saved_is_loaded_to_the_bit(exchanged, tmp_path):
    folder, expected, *_ = exchanged
    found = fs.checkpoint.from_dcp(folder / "dcp", tmp_path, step=2)
    assert fs.checkpoint.verify(found.path).step == 2
    assert set(found.tensor_names) == expected.keys()
    assert all(torch.equal(found.tensor(name), value) for name, value in expected.items())
    assert found.manifest.values["optim.param_groups.0.lr"] == 0.1
    assert found.manifest.values["optim.param_groups.0.betas.1"] == 0.9

    shapes = nested({name: p.detach().to("meta") for name, p in build().named_parameters()})

    def load(comm):
        params = fs.checkpoint.load(found.path, planned(shapes, comm), comm=comm, subtree="model")
        state = fs.init_state(fs.optim.adamw(0.1), params, comm=comm)
        mu = fs.checkpoint.load(
            found, state.opt.mu, comm=comm, subtree="optim.state", rename=lambda name: f"{name}.exp_avg",
            ignore=["**.exp_avg_sq", "**.step"],
        )  # fmt: skip
        return whole(params, comm), whole(mu, comm)

    for params, mu in simulate(fs.Mesh({"dp": 3}), load):
        assert params.keys() == mu.keys() == dict(build().named_parameters()).keys()
        assert all(torch.equal(value, expected[f"model.{name}"]) for name, value in params.items())
        assert all(torch.equal(value, expected[f"optim.state.{name}.exp_avg"]) for name, value in mu.items())
        assert all(value.any() for value in mu.values())


TREE = {
    "w": torch.randn(7, 5),
    "half": torch.randn(6).bfloat16(),
    "scalar": torch.tensor(2.5),
    "count": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "thin": torch.empty(4, 0),
    "flags": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex128),
    "step": 12,
    "lr": 0.25,
    "name": "x",
    "on": True,
}


def empty(tree):
    return {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)() for name, value in tree.items()}


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name] for name, value in a.items()
    )


@pytest.mark.parametrize("chunk", [64 << 20, 40])
def test_there_and_back(tmp_path, monkeypatch, chunk):
    """DCP's own load, into a plain state dict, and ours; of chunks of a few rows as well."""
    monkeypatch.setattr(ours, "_CHUNK_NBYTES", chunk)
    found = fs.checkpoint.save(tmp_path, {"tree": TREE, "more": 1}, step=0, comm=COMM)
    fs.checkpoint.to_dcp(found.path, tmp_path / "dcp", subtree="tree")
    state = empty(TREE)
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert same(state, TREE)
    number = len(dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata["w"].chunks)
    assert number == (1 if chunk > 40 else 4)
    back = fs.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "back", config={"a": 1})
    assert same(fs.checkpoint.load(back, empty(TREE), comm=COMM), TREE)
    assert back.config == {"a": 1}


def test_tied_leaves_have_both_names_in_dcp(tmp_path):
    w = torch.randn(4, 3)
    tree = {"embed": w, "head": w}

    def save(comm):
        layout = fs.plan(tree, comm.mesh, fs.zero3("dp"))
        return fs.checkpoint.save(tmp_path, fs.shard(tree, layout, comm), step=0, comm=comm)

    found = simulate(MESH, save)[0]
    fs.checkpoint.to_dcp(found, tmp_path / "dcp")
    state = {"embed": torch.zeros(4, 3), "head": torch.zeros(4, 3)}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(state["embed"], w)
    assert torch.equal(state["head"], w)
    back = fs.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "back", ignore="head")
    got = simulate(MESH, lambda comm: whole(fs.checkpoint.load(back, planned(tree, comm), comm=comm), comm))[0]
    assert torch.equal(got["embed"], w)
    assert torch.equal(got["head"], w)


def written(folder, tree=None):
    dcp.save(tree or {"w": torch.arange(6.0).view(2, 3)}, checkpoint_id=str(folder), no_dist=True)
    return folder


def changed(folder, change):
    """The metadata of a folder, after a change."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


class Bomb:
    """What is called when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_nothing_in_a_folder_is_run(tmp_path):
    def fails(folder, match):
        with pytest.raises(CheckpointError, match=match):
            fs.checkpoint.from_dcp(folder, tmp_path / "root")
        assert not (tmp_path / "ran").exists()
        assert not (tmp_path / "root").exists() or not list((tmp_path / "root").iterdir())

    folder = written(tmp_path / "a")
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    fails(folder, r"its metadata asks for .*io.open, which is not of DCP")
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    fails(folder, "dict, expected DCP's Metadata")
    (folder / ".metadata").write_bytes(b"\x80\x04garbage")
    fails(folder, "cannot be read: UnpicklingError")
    fails(
        written(tmp_path / "b", {"w": torch.ones(2), "x": Bomb(tmp_path / "ran")}),
        "'x' cannot be read: .*asks for _?io.open, expected tensors",
    )
    (tmp_path / "ran").unlink(missing_ok=True)
    fails(
        written(tmp_path / "c", {"x": torch.device("cpu")}),
        "'x' cannot be read: .*asks for torch.device, .*ignore= leaves it out",
    )
    fails(tmp_path / "none", r"none: no folder, or no checkpoint of torch.distributed.checkpoint, which has a file .metadata")


def test_damaged_folders(tmp_path):
    def fails(change, match, error=CheckpointError, **options):
        folder = written(tmp_path / "dcp")
        change(folder)
        with pytest.raises(error, match=match):
            fs.checkpoint.from_dcp(folder, tmp_path / "root", **options)
        shutil.rmtree(folder)
        assert not (tmp_path / "root").exists() or not list((tmp_path / "root").iterdir())

    def chunks(metadata):
        return metadata.state_dict_metadata["w"].chunks

    def info(metadata):
        return next(iter(metadata.storage_data.values()))

    def smaller(metadata):
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([1, 3])

    def longer(metadata):
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([3, 3])

    def resized(metadata, rows):
        metadata.state_dict_metadata["w"].size = (rows,)

    def other(metadata):
        metadata.state_dict_metadata["w"].properties.dtype = torch.float64

    fails(lambda f: (f / "__0_0.distcp").unlink(), "names missing or impossible files: .*__0_0.distcp")
    fails(lambda f: (f / "__0_0.distcp").write_bytes(b"x" * 900), "'w' cannot be read")
    fails(lambda f: changed(f, lambda m: vars(m).pop("state_dict_metadata")), "Metadata, expected DCP's Metadata")
    fails(lambda f: changed(f, lambda m: chunks(m).clear()), "chunks of 'w' leave 6 of its elements out")
    fails(lambda f: changed(f, lambda m: chunks(m).append(chunks(m)[0])), r"chunks of 'w' do not tile it: \(2, 3\) at \(0, 0\)")
    fails(lambda f: changed(f, longer), r"chunks of 'w' do not tile it: \(3, 3\) at \(0, 0\) of \(2, 3\)")
    fails(lambda f: changed(f, smaller), r"a chunk of 'w' is float32\[2, 3\], expected float32\[1, 3\]")
    fails(lambda f: changed(f, other), r"a chunk of 'w' is float32\[2, 3\], expected float64\[2, 3\]")
    fails(lambda f: changed(f, lambda m: m.storage_data.clear()), "tensors of 24 bytes, and their files have 0")
    fails(lambda f: changed(f, lambda m: setattr(info(m), "relative_path", "../x")), "'../x' is not a plain file name")
    fails(lambda f: changed(f, lambda m: setattr(info(m), "transform_descriptors", ["zstd"])), "with .*zstd.*, expected no")
    fails(lambda f: changed(f, lambda m: resized(m, 1 << 34)), "tensors of 68,719,476,736 bytes, and their files have 1,")
    fails(lambda f: changed(f, lambda m: resized(m, "many")), "'w' is not a tensor: ValueError 'many' is not a count")
    fails(lambda f: changed(f, lambda m: setattr(chunks(m)[0], "offsets", None)), "'w' has an impossible chunk: 'NoneType'")
    fails(lambda f: (f / ".metadata").write_bytes(b"\x80\x04" + b"]" * (3 << 20)), "3,145,730 bytes, expected at most 1,")
    fails(lambda f: None, "step is -1, expected a whole number from 0", step=-1)
    fails(lambda f: None, "'v' matches nothing", error=PatternError, ignore="v")


def archived(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


VALUES = [
    torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    torch.zeros(3, dtype=torch.float8_e4m3fn),
    torch.tensor([1, 60_000], dtype=torch.uint16),
    torch.tensor(3.0),
    torch.empty(0, 3),
    nn.Parameter(torch.ones(2)),
    torch.arange(10.0)[2:4],
    torch.zeros(1).expand(5),
    {"a": (1, True, None, "x", [2.5]), "b": OrderedDict(c=torch.ones(2))},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}")
def test_archives_are_read_as_torch_reads_them(value):
    data = archived(value)
    got, want = load_archive(data), torch.load(io.BytesIO(data), weights_only=True)
    assert optree.tree_structure(got) == optree.tree_structure(want)
    for x, y in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        assert (x.dtype == y.dtype and torch.equal(x.float(), y.float())) if isinstance(y, torch.Tensor) else x == y


def rewritten(data, change=None, compress=zipfile.ZIP_STORED):
    """An archive whose pickle is changed, or whose records are compressed."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(result, "w", compress) as new:
        for name in old.namelist():
            body = old.read(name)
            new.writestr(name, change(body) if change and name.endswith("data.pkl") else body)
    return result.getvalue()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (lambda: pickle.dumps(bytearray(5)), "File is not a zip file"),
        (lambda: archived(bytearray(5)), r"it asks for .*builtin.*\.bytearray"),
        (lambda: rewritten(archived(torch.zeros(1 << 16)), compress=zipfile.ZIP_DEFLATED), "are compressed"),
        # 70,001 elements where there are 7, as a shape and in the storage's own count.
        (
            lambda: rewritten(archived(torch.zeros(7)), lambda body: body.replace(b"K\x07", b"J\x71\x11\x01\x00")),
            "longer than its",
        ),
        (lambda: archived(torch.zeros(2, dtype=torch.complex64).conj()), "a tensor with {'conj': True}"),
        (lambda: archived(torch.zeros(2, 2).to_sparse()), r"it asks for torch\._utils\._rebuild_sparse_tensor"),
    ],
)
def test_archives_that_declare_more_than_they_hold(data, match):
    with pytest.raises((ValueError, zipfile.BadZipFile), match=match):
        load_archive(data())


def test_a_pickle_that_repeats_lists_is_refused(tmp_path):
    """A kilobyte would become thousands of values, or of empty lists; with each list around them, twice as many."""
    values, empty = [1, 2], []
    for _ in range(14):
        values, empty = [values, values], [empty, empty]
    for name, tree in {"values": values, "empty": empty}.items():
        folder = written(tmp_path / name, {"w": torch.ones(2), "v": tree})
        with pytest.raises(CheckpointError, match=r"'v' cannot be read: .*more than [0-9,]+ items.*ignore= leaves it out"):
            fs.checkpoint.from_dcp(folder, tmp_path / "root")
        assert not (tmp_path / "root").exists() or not list((tmp_path / "root").iterdir())
        assert fs.checkpoint.from_dcp(folder, tmp_path / f"{name} left", ignore="v").tensor_names == ["w"]
        torch.save({"w": torch.ones(2), "v": tree}, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=r"a.pt: cannot be read: .*more than [0-9,]+ items"):
            fs.checkpoint.load(tmp_path / "a.pt", {"w": torch.zeros(2)}, strict=False, comm=COMM)
    betas = (0.9, 0.95, None)
    groups = {"param_groups": [{"lr": 0.1, "betas": betas} for _ in range(1000)] + [betas] * 1000}
    assert load_archive(archived(groups)) == groups


def test_flipped_bits_of_tensors_and_values_are_seen(tmp_path):
    tree = {"w": torch.arange(3000.0), "n": 12345, "text": "abcdefgh"}
    [file] = [path for path in written(tmp_path / "dcp", tree).iterdir() if path.suffix == ".distcp"]
    data = file.read_bytes()
    for name, needle in (
        ("w", struct.pack("<2f", 1700.0, 1701.0)),
        ("n", struct.pack("<cH", b"M", 12345)),
        ("text", b"abcdefgh"),
    ):
        at = data.index(needle) + len(needle) - 1
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match=f"'{name}' cannot be read: .*checksum"):
            fs.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "root")
        assert not (tmp_path / "root").exists() or not list((tmp_path / "root").iterdir())
    file.write_bytes(data)
    assert fs.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "root").manifest.values == {"n": 12345, "text": "abcdefgh"}


def test_what_torch_wrote_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(5.0)}, tmp_path / "a.pt")
        written(tmp_path / "dcp", {"w": torch.arange(5.0), "n": 3})
    finally:
        torch.serialization.set_crc32_options(True)
    assert fs.checkpoint.load(tmp_path / "a.pt", {"w": torch.zeros(5)}, comm=COMM)["w"].tolist() == [0, 1, 2, 3, 4]
    found = fs.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "root")
    assert found.tensor("w").tolist() == [0, 1, 2, 3, 4]
    assert found.manifest.values == {"n": 3}


def test_paths_that_another_version_of_python_has_pickled_are_read(tmp_path, monkeypatch):
    written(tmp_path / "dcp", {"w": torch.arange(5.0)})
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for name in ("pathlib", "pathlib._local"):  # of Python 3.12 and 3.14, and of 3.13
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, pathlib)
            patch.setattr(pathlib.PosixPath, "__module__", name)
            file.write_bytes(pickle.dumps(metadata))
        assert name.encode() + b"\x94\x8c\tPosixPath" in file.read_bytes()
        fs.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / name)
        assert fs.checkpoint.load(tmp_path / name, {"w": torch.zeros(5)}, comm=COMM)["w"].tolist() == [0, 1, 2, 3, 4]


def test_what_to_dcp_refuses(tmp_path):
    found = fs.checkpoint.save(tmp_path / "root", {"a": torch.ones(3), "b": 1}, step=0, comm=COMM)

    def fails(match, folder=tmp_path / "out", error=CheckpointError, **options):
        with pytest.raises(error, match=match):
            fs.checkpoint.to_dcp(found, folder, **options)
        assert [path.name for path in tmp_path.iterdir()] == ["root"]

    fails("memory://x is a URL, expected a path", folder="memory://x")
    fails("a tensor and a value would both have the name 'x'", rename=lambda name: "x")
    fails("no tensors below 'c'", subtree="c")
    fails("rename returned None for 'a'", error=TreeError, rename={}.get)
    shutil.rmtree(tmp_path / "root")
    tree = {"w": torch.ones(3), "a": {"x": 1}, "b": {"x": 2}, "c": {"y": [3, None]}, "d": {"z": [4]}}
    found = fs.checkpoint.save(tmp_path / "root", tree, step=0, comm=COMM)
    fails("'a.x' and 'b.x' would both have the name 'x'", rename=lambda name: name.rpartition(".")[2])
    fails("'c.y' and 'd.z' would both have the name 'y'", rename=lambda name: "y" if name in ("c.y", "d.z") else name)


def test_conversions_do_not_use_the_default_device(tmp_path):
    found = fs.checkpoint.save(tmp_path / "root", {"w": torch.arange(3.0)}, step=0, comm=COMM)
    with torch.device("meta"):
        fs.checkpoint.to_dcp(found, tmp_path / "dcp")
        assert fs.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "ours").tensor("w").tolist() == [0.0, 1.0, 2.0]


def test_two_values_of_one_name_in_dcp(tmp_path):
    tree = {"w": torch.ones(3), "a": [1, 2], "a.0": 5}
    with pytest.raises(CheckpointError, match=r"two values would both have the name 'a\.0'"):
        fs.checkpoint.from_dcp(written(tmp_path / "dcp", tree), tmp_path / "root")
    found = fs.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "root", ignore="a.0")
    assert found.manifest.values == {"a.0": 1, "a.1": 2}
    with pytest.raises(CheckpointError, match=r"from_dcp\(\): a tensor and a value would both have the name 'a\.0'"):
        fs.checkpoint.from_dcp(written(tmp_path / "other", tree | {"a.0": torch.ones(1)}), tmp_path / "root")


def test_dicts_in_tuples_of_dcp_are_written_as_they_were(tmp_path):
    tree = {"w": torch.ones(3), "a": (1, {"k": (2,), "n": None})}
    found = fs.checkpoint.from_dcp(written(tmp_path / "dcp", tree), tmp_path / "root")
    assert found.manifest.values == {"a.0": 1, "a.1.k.0": 2}
    fs.checkpoint.to_dcp(found, tmp_path / "again")
    into = {"w": torch.zeros(3), "a": ()}
    dcp.load(into, checkpoint_id=tmp_path / "again", no_dist=True)
    assert into["a"] == tree["a"]


def test_lists_tuples_and_none_go_through(tmp_path):
    """What torch's own functions have saved, they load again after both conversions."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(steps):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * steps, betas=(0.1 * steps, 0.9))
        for _ in range(steps):
            descend(model(torch.ones(2, 3)).sum(), optimizer)
        return model, optimizer

    def states(model, optimizer):
        state, opt = get_state_dict(model, optimizer)
        return {"model": state, "optim": opt, "more": {"a": [1, (2.5, None, ["x"])], "b": None, "c": (), "d": True}}

    pair, other = trained(2), trained(1)
    dcp.save(states(*pair), checkpoint_id=tmp_path / "one", no_dist=True)
    found = fs.checkpoint.from_dcp(tmp_path / "one", tmp_path / "root")
    fs.checkpoint.to_dcp(found, tmp_path / "two")
    into = states(*other)
    into["more"] = {"a": None, "b": 1, "c": 1, "d": 1}
    dcp.load(into, checkpoint_id=tmp_path / "two", no_dist=True)
    assert into["more"] == {"a": [1, (2.5, None, ["x"])], "b": None, "c": (), "d": True}
    set_state_dict(*other, model_state_dict=into["model"], optim_state_dict=into["optim"])
    got, want = other[1].state_dict(), pair[1].state_dict()
    assert got["param_groups"] == want["param_groups"]
    assert all(torch.equal(x, want["state"][i][key]) for i, each in got["state"].items() for key, x in each.items())
    assert fs.checkpoint.open_checkpoint(found).manifest.objects["more.b"] is None
    fs.checkpoint.to_dcp(found, tmp_path / "part", subtree="optim")


def test_lists_tuples_and_none_of_a_tree_that_fsharp_saves(tmp_path):
    """As DCP saves them: a list or tuple of values is one object; DCP looks into lists with dicts or tensors."""
    tree = {"a": [1, (2.5, None, ["x"])], "b": None, "c": (), "d": [{"e": (1, 2)}, {"e": None}], "w": [torch.ones(2), None, 3]}
    found = fs.checkpoint.save(tmp_path / "root", tree, step=0, comm=COMM)
    fs.checkpoint.to_dcp(found, tmp_path / "ours")
    dcp.save(tree, checkpoint_id=tmp_path / "theirs", no_dist=True)
    keys = [dcp.FileSystemReader(tmp_path / who).read_metadata().state_dict_metadata.keys() for who in ("ours", "theirs")]
    assert keys[0] == keys[1]
    into = {"a": 0, "b": 0, "c": 0, "d": [{"e": 0}, {"e": 0}], "w": [torch.zeros(2), 0, 0]}
    dcp.load(into, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert torch.equal(into["w"].pop(0), tree["w"].pop(0))
    assert into == tree

    def save(comm):
        fs.checkpoint.save(tmp_path / "more", {"x": torch.ones(1), "y": (None,) if comm.rank else None}, step=0, comm=comm)

    with pytest.raises(fs.errors.AgreementError, match=r"y: \{\"tuple\": \[null\]\}"):
        simulate(MESH, save)


@mounts
def test_a_full_disk_is_named_and_no_file_is_left(tmp_path):
    """torch.save then raises an error of its own, about positions in its archive."""
    found = fs.checkpoint.save(tmp_path / "a", {"x": torch.ones(200_000)}, step=1, comm=fs.SingleComm())
    with mounted(tmp_path, "size=400k") as small:
        with pytest.raises(CheckpointError, match=r"to_dcp\(\): .*/out cannot be written: No space left on device"):
            fs.checkpoint.to_dcp(found, small / "out")
        assert os.listdir(small) == []


def test_an_export_inside_of_a_handler_of_an_os_error_has_its_own_error(tmp_path):
    def export():
        with write_folder_atomically("to_dcp()", tmp_path / "out"):
            raise TreeError("of the export")

    try:
        raise OSError("of something else")
    except OSError:
        with pytest.raises(TreeError, match="of the export"):
            export()
