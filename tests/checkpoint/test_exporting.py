"""Exported folders, against what transformers, safetensors and Orbax make of them."""

import json
import math
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fsharp as fs
from fsharp.checkpoint.entries import PerRank
from fsharp.checkpoint.storage import LocalStorage
from fsharp.errors import CheckpointError
from fsharp.functional.formats.format import as_bytes
from fsharp.testing import simulate
from tests.checkpoint.models import MESH, gpt2, llama, logits, nested, parameters, shapes
from tests.scheduling import every

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
COMM = fs.SingleComm()


def saved(root, model):
    """A checkpoint of a model's parameters, and of more, written by two ranks."""

    def run(comm):
        kept = {}
        tree = shapes(model)
        values = dict(parameters(model))
        layout = fs.plan(tree, comm.mesh, fs.zero3("dp"))
        tied = {name: kept.setdefault(id(value), value.detach()) for name, value in values.items()}
        return fs.checkpoint.save(root, {"params": fs.shard(nested(tied), layout, comm), "seen": 3}, step=1, comm=comm)

    return simulate(MESH, run)[0]


def read(folder):
    """All tensors of all files, by safetensors' own reader."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


@every(2, build=[llama, gpt2], most=[20_000, 5_000_000_000])
def test_from_pretrained_gives_the_logits_of_the_model(tmp_path, build, most):
    model, folder = build(), tmp_path / "out"
    fs.checkpoint.export_safetensors(saved(tmp_path, model), folder, subtree="params", max_file_nbytes=most)
    model.config.save_pretrained(folder)
    back, said = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(said.values())
    assert torch.equal(logits(back.eval()), logits(model))
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (most == 20_000)
    if index.exists():
        files = json.loads(index.read_text())
        found = read(folder)
        assert files["weight_map"].keys() == found.keys()
        assert files["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
        assert all(path.stat().st_size < 22_000 for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("most", [20_000, 5_000_000_000])
def test_torch_and_transformers_read_bin_files_which_are_converted_back(tmp_path, most):
    model, folder = llama(), tmp_path / "out"
    source = saved(tmp_path, model)
    fs.checkpoint.export_torch(source, folder, subtree="params", max_file_nbytes=most)
    found = {}
    for path in folder.glob("*.bin"):
        tensors = torch.load(path, weights_only=True)
        assert path.stat().st_size < most + 10_000
        assert not tensors.keys() & found.keys()
        found |= tensors
    expected = {name.removeprefix("params."): source.tensor(name) for name in source.manifest.tensors}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    index = folder / "pytorch_model.bin.index.json"
    assert index.exists() == (most == 20_000) == (not (folder / "pytorch_model.bin").exists())
    if index.exists():
        assert json.loads(index.read_text())["weight_map"].keys() == found.keys()
    back = fs.checkpoint.from_huggingface(folder, tmp_path / "back", step=4, config={"lr": 0.1})
    assert (back.step, back.config) == (4, {"lr": 0.1})
    fs.checkpoint.verify(back)
    torch.testing.assert_close({name: back.tensor(name) for name in back.tensor_names}, expected, rtol=0, atol=0)
    model.config.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder, use_safetensors=False)
    assert torch.equal(logits(loaded.eval()), logits(model))


def test_dtypes_and_values_that_only_torch_names_travel_in_bin_files(tmp_path):
    tree = {
        "c": torch.randn(3, dtype=torch.complex128), "f8": torch.randn(4).to(torch.float8_e4m3fnuz), "s": torch.tensor(2.0),
        "u": torch.tensor([1, 2, 3], dtype=torch.uint16), "empty": torch.empty(0, 2), "half": torch.randn(4).half(),
    }  # fmt: skip
    found = fs.checkpoint.save(tmp_path / "root", tree, step=0, comm=COMM)
    fs.checkpoint.export_torch(found, tmp_path / "out", rename=lambda name: f"x.{name}")
    tensors = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert {name: (x.dtype, x.shape) for name, x in tensors.items()} == {f"x.{n}": (x.dtype, x.shape) for n, x in tree.items()}
    back = fs.checkpoint.from_huggingface(tmp_path / "out" / "pytorch_model.bin", tmp_path / "back")
    for name, value in tree.items():
        assert as_bytes(tensors[f"x.{name}"]).equal(as_bytes(value))
        assert as_bytes(back.tensor(f"x.{name}")).equal(as_bytes(value))
    torch.save({"w": torch.ones(2), "n": 3}, tmp_path / "mine.pt")
    assert fs.checkpoint.from_huggingface(tmp_path / "mine.pt", tmp_path / "back").manifest.values == {"n": 3}


class Runs:
    def __reduce__(self):
        return print, ("it runs",)


def test_no_code_of_a_bin_file_runs(tmp_path, capsys):
    torch.save({"w": torch.ones(2), "code": Runs()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"asks for \w+\.print"):
        fs.checkpoint.from_huggingface(tmp_path / "pytorch_model.bin", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert capsys.readouterr().out == ""


def test_export_rounds_renames_and_keeps_the_rest(tmp_path):
    tree = {
        "w": torch.randn(5, 3), "half": torch.randn(4).half(), "n": torch.tensor(7), "empty": torch.empty(0, 2),
        "flags": torch.tensor([True, False]), "own": PerRank(torch.arange(3, dtype=torch.uint8)), "name": "x",
    }  # fmt: skip
    found = fs.checkpoint.save(tmp_path, tree, step=0, comm=COMM)
    fs.checkpoint.export_safetensors(
        found.path, tmp_path / "out", dtype=torch.bfloat16, rename=lambda name: {"w": "layer.w"}.get(name, name)
    )
    got = read(tmp_path / "out")
    expected = {
        "layer.w": tree["w"].bfloat16(),
        "half": tree["half"].bfloat16(),
        "n": tree["n"],
        "empty": tree["empty"].bfloat16(),
    }
    expected |= {"flags": tree["flags"], "own": tree["own"].value[None]}
    assert got.keys() == expected.keys()
    assert all((got[name].dtype, got[name].shape) == (value.dtype, value.shape) for name, value in expected.items())
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_load_reads_what_export_wrote(tmp_path):
    tree = {"a": torch.randn(5, 3), "b": torch.randn(70, 1000).bfloat16(), "s": torch.tensor(2.0)}
    found = fs.checkpoint.save(tmp_path, tree, step=0, comm=COMM)
    fs.checkpoint.export_safetensors(found, tmp_path / "out", max_file_nbytes=100)
    got = fs.checkpoint.load(tmp_path / "out", {name: torch.zeros_like(value) for name, value in tree.items()}, comm=COMM)
    assert all(torch.equal(got[name], value) for name, value in tree.items())


def test_orbax_reads_it(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint.experimental.v1")
    import numpy as np

    tree = {"layer": {"w": torch.randn(5, 3)}, "half": torch.randn(4).bfloat16(), "n": torch.tensor(7)}
    found = fs.checkpoint.save(tmp_path, tree, step=0, comm=COMM)
    fs.checkpoint.export_safetensors(found, tmp_path / "out", max_file_nbytes=30)
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        got = ocp.load(tmp_path / "out")
    assert got.keys() == {"layer.w", "half", "n"}
    np.testing.assert_array_equal(got["layer.w"], tree["layer"]["w"].numpy())
    np.testing.assert_array_equal(got["half"].astype("float32"), tree["half"].float().numpy())
    assert got["half"].dtype.name == "bfloat16"
    assert int(got["n"]) == 7


def test_what_is_refused_leaves_nothing(tmp_path):
    tree = {"a": {"w": torch.randn(300, 30), "v": torch.ones(3)}, "c": torch.randn(3, dtype=torch.complex128)}
    found = fs.checkpoint.save(tmp_path / "root", tree, step=0, comm=COMM)
    out = tmp_path / "out"

    def fails(match, where=found, **options):
        with pytest.raises(CheckpointError, match=match):
            fs.checkpoint.export_safetensors(where, out, **options)
        assert [path.name for path in tmp_path.iterdir()] == ["root"]

    fails("'c' is complex128, which .safetensors files cannot hold")
    fails(r"no tensors below 'params'; there are tensors below \['a', 'c'\]", subtree="params")
    fails("'a.v' and 'a.w' would both have the name 'x'", rename=lambda name: "x")
    fails("dtype is int8, expected one of floating point", dtype=torch.int8)
    fails("there is no checkpoint here", where=tmp_path / "none")
    large = fs.checkpoint.save(tmp_path / "root", {"a": torch.tensor([1.0, 1e6])}, step=2, comm=COMM)
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        fails("'a' has values that are too large for float", where=large, dtype=dtype)
    plain = fs.checkpoint.save(tmp_path / "root", {"a": tree["a"]}, step=1, comm=COMM)
    with open(f"{plain.path}/rank-00000.safetensors", "r+b") as file:
        file.seek(2000)
        file.write(b"?")
    fails("1 blocks of 4,096 bytes are damaged", where=plain)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    found = fs.checkpoint.save(tmp_path / "root", {"a": torch.ones(3)}, step=0, comm=COMM)
    out = tmp_path / "out"
    out.mkdir()
    fs.checkpoint.export_safetensors(found, out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"out is not empty: choose another folder"):
        fs.checkpoint.export_safetensors(found, out)
    assert (out / "model.safetensors").read_bytes() == before


def test_an_export_that_was_cut_off_is_no_folder_and_what_is_in_its_place_stays(tmp_path, monkeypatch):
    found = fs.checkpoint.save(tmp_path / "root", {"a": torch.ones(3), "b": torch.ones(3)}, step=0, comm=COMM)
    left = tmp_path / ".out.partial" / "model.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"half of it, or somebody's own")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"has left .*/\.out\.partial, or one is under way: remove that folder"):
        fs.checkpoint.export_safetensors(found, "out")
    assert left.read_bytes() == b"half of it, or somebody's own"
    assert not (tmp_path / "out").exists()
    shutil.rmtree(left.parent)
    fs.checkpoint.export_safetensors(found, "out")
    assert read(tmp_path / "out").keys() == {"a", "b"}


@pytest.mark.parametrize("act", ["tensor", "export_safetensors", "to_dcp", "verify"])
def test_what_is_read_grows_with_the_checkpoint_and_not_with_its_square(tmp_path, monkeypatch, act):
    """A header has all tensors of a file: who reads one for each tensor reads their square."""

    def save(num):
        def run(comm):
            tree = {f"layer{i}": torch.full((64, 64), float(i)) for i in range(num)}
            return fs.checkpoint.save(tmp_path / str(num), fs.shard(tree, plan(tree, comm), comm), step=0, comm=comm).path

        def plan(tree, comm):
            return fs.plan(tree, comm.mesh, fs.zero3("dp"), units="*")

        return simulate(fs.Mesh({"dp": 2}), run)[0]

    def reads(path):
        seen = []
        read = LocalStorage.read

        def counted(self, path, start, into):
            seen.append(len(into) if path.endswith(".safetensors") else 0)
            read(self, path, start, into)

        monkeypatch.setattr(LocalStorage, "read", counted)
        if act == "tensor":
            found = fs.checkpoint.open_checkpoint(path)
            assert all(found.tensor(name)[0, 0] == float(name.removeprefix("layer")) for name in found.tensor_names)
        elif act == "verify":
            fs.checkpoint.verify(path)
        else:
            getattr(fs.checkpoint, act)(path, f"{path}-out")
        monkeypatch.undo()
        return len(seen), sum(seen)

    (few, few_nbytes), (many, many_nbytes) = reads(save(40)), reads(save(160))
    assert many <= 4 * few
    assert many_nbytes <= 4.2 * few_nbytes
    assert many_nbytes < 2 * 160 * 64 * 64 * 4


def test_infinities_and_values_that_a_dtype_holds_are_exported(tmp_path):
    tree = {"a": {"x": torch.tensor([-math.inf, math.nan, 65504.0])}, "b": {"x": torch.tensor([3e38, 1e-9]).bfloat16()}}
    found = fs.checkpoint.save(tmp_path / "root", tree, step=0, comm=COMM)
    for name, dtype in (("a", torch.float16), ("b", torch.float32)):
        fs.checkpoint.export_safetensors(found, tmp_path / name, subtree=name, dtype=dtype)
        value = load_file(tmp_path / name / "model.safetensors")["x"]
        torch.testing.assert_close(value, tree[name]["x"].to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("subtree", "names"), [("encoder", ["a", "embed"]), ("decoder", ["b", "embed"]), ("", None)])
def test_a_subtree_has_its_tied_tensors_wherever_their_owner_is(tmp_path, subtree, names):
    shared = torch.arange(4.0)
    tree = {"encoder": {"embed": shared, "a": torch.zeros(2)}, "decoder": {"embed": shared, "b": torch.zeros(3)}}
    params = fs.shard(tree, fs.plan(tree, COMM.mesh, fs.zero3("dp")), COMM)
    found = fs.checkpoint.save(tmp_path / "root", params, step=1, comm=COMM)
    fs.checkpoint.export_safetensors(found, tmp_path / "out", subtree=subtree)
    exported = load_file(tmp_path / "out/model.safetensors")
    assert sorted(exported) == (names or ["decoder.b", "decoder.embed", "encoder.a"])
    assert torch.equal(exported["embed" if subtree else "decoder.embed"], shared)
