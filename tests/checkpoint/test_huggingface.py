"""Folders as transformers writes them, read into shards; against the unsharded model."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import fsharp as fs
from fsharp.errors import AgreementError, CheckpointError, PatternError, TreeError
from fsharp.testing import simulate
from tests.checkpoint.counted import counted_reader
from tests.checkpoint.models import MESH, gpt2, llama, parameters, planned, shapes, whole
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def saved(model, folder, size="20KB"):
    """A folder of several files and an index, or of one file."""
    model.save_pretrained(folder, max_shard_size=size)
    return str(folder)


def loaded(folder, tree, *, mesh=MESH, strategy=None, units=(), **options):
    """What each rank has of a folder, put together again; all ranks the same."""

    def run(comm):
        got = fs.checkpoint.load(folder, planned(tree, comm, strategy, units), comm=comm, **options)
        return whole(got, comm)

    first, *others = simulate(mesh, run)
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())
    return first


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("size", ["20KB", "1GB"])
@pytest.mark.parametrize(
    ("mesh", "strategy"), [(MESH, fs.zero3("dp")), (fs.Mesh({"a": 2, "b": 2}), fs.hfsdp("a", "b"))], ids=["zero3", "hfsdp"]
)
def test_load_gives_the_parameters_of_the_model(tmp_path, build, size, mesh, strategy):
    model = build()
    folder = saved(model, tmp_path, size)
    assert os.path.exists(tmp_path / "model.safetensors.index.json") == (size == "20KB")
    got = loaded(folder, shapes(build(1)), mesh=mesh, strategy=strategy)
    assert got.keys() == parameters(model).keys()
    assert all(torch.equal(got[name], value) for name, value in parameters(model).items())


def test_load_into_a_module_made_on_the_meta_device(tmp_path):
    model = llama()
    folder = saved(model, tmp_path)

    def run(comm):
        with torch.device("meta"):
            empty = llama()
        module = fs.shard_module(
            empty, mesh=comm, strategy=fs.zero3("dp"), units=["model.layers.*"], initialize=empty._init_weights
        )
        state = module.train_state
        module.train_state = state._replace(params=fs.checkpoint.load(folder, state.params, comm=comm))
        return dict(module.named_full_parameters())

    for got in simulate(fs.Mesh({"dp": 2}), run):
        assert got.keys() == parameters(model).keys()
        assert all(torch.equal(got[name], value) for name, value in parameters(model).items())


def test_a_rank_reads_its_part_alone(tmp_path):
    save_file({"w": torch.arange(1 << 18, dtype=torch.float32).view(512, 512)}, tmp_path / "model.safetensors")

    def run(comm):
        from fsharp.checkpoint import reading

        found = fs.checkpoint.open_checkpoint(tmp_path)
        half = 1 << 17
        target = torch.empty(half)
        reader, files = counted_reader(found)
        reader.read([reading.NeededElements("w", comm.rank * half, (comm.rank + 1) * half, target)])
        return target, files.num_read

    for rank, (target, nbytes) in enumerate(simulate(MESH, run)):
        assert torch.equal(target, torch.arange(rank << 17, (rank + 1) << 17, dtype=torch.float32))
        assert 4 << 17 <= nbytes < (4 << 17) + 1000


@pytest.mark.parametrize("name", ["scalar", "empty", "odd", "long"])
def test_load_of_odd_tensors(tmp_path, name):
    """Without an index, at offsets that are no multiples of the elements' size."""
    tensors = {
        "a": torch.tensor([7], dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "odd": torch.arange(7, dtype=torch.bfloat16),
        "long": torch.arange(3 << 19).float(),
    }
    save_file({"a": tensors["a"], name: tensors[name]}, tmp_path / "model.safetensors")
    got = loaded(str(tmp_path), {name: tensors[name].to("meta")}, ignore="a")
    assert torch.equal(got[name], tensors[name])


def test_load_follows_the_links_of_the_cache(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    saved(llama(), tmp_path / "plain")
    for i, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        os.rename(path, blobs / f"blob{i}")
        os.symlink(f"../../blobs/blob{i}", snapshot / path.name)
    os.symlink(snapshot, tmp_path / "link")
    for folder in (snapshot, tmp_path / "link"):
        got = loaded(str(folder), shapes(llama(1)))
        assert all(torch.equal(got[name], value) for name, value in parameters(llama()).items())


def test_rename_and_cast_and_ignore(tmp_path):
    """GPT-2 as it is on the Hub: without the prefix, with masks, and here in another dtype."""
    model = gpt2()
    stored = {name.removeprefix("transformer."): value for name, value in model.transformer.state_dict().items()}
    stored = {name: value.half() for name, value in stored.items()}
    save_file(stored | {"h.0.attn.bias": torch.ones(4, 4), "h.1.attn.bias": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    options = {"rename": lambda name: name.removeprefix("transformer."), "ignore": "h.*.attn.bias"}
    got = loaded(str(tmp_path), shapes(model), cast=True, **options)
    assert all(torch.equal(got[name], value.half().float()) for name, value in parameters(model).items())
    with pytest.raises(TreeError, match=r"float16\[50, 24\] in the checkpoint; expected float32\[50, 24\]"):
        loaded(str(tmp_path), shapes(model), **options)
    with pytest.raises(TreeError, match=r"'h.\*.attn.bias' +in the checkpoint alone \(2 of them\)"):
        loaded(str(tmp_path), shapes(model), cast=True, rename=options["rename"])
    with pytest.raises(TreeError, match=r"'lm_head.weight' +not in the checkpoint; expected float32\[50, 24\]"):
        loaded(str(tmp_path), shapes(model), cast=True)
    with pytest.raises(PatternError, match=r"ignore=.*'h.2.attn.bias' matches nothing"):
        loaded(str(tmp_path), shapes(model), cast=True, rename=options["rename"], ignore=["h.2.attn.bias"])
    with pytest.raises(TreeError, match=r"rename returned None for 'transformer.wte.weight'"):
        loaded(str(tmp_path), shapes(model), cast=True, rename={}.get)


def test_a_tied_leaf_is_found_under_either_name(tmp_path):
    w = torch.arange(6.0).view(2, 3)
    x = w.to("meta")
    tied = {"embed": x, "head": x}
    for name in tied:
        save_file({name: w}, tmp_path / "model.safetensors")
        got = loaded(str(tmp_path), tied)
        assert torch.equal(got["embed"], w)
        assert torch.equal(got["head"], w)
    save_file({"embed": w, "head": w.clone()}, tmp_path / "model.safetensors")
    assert torch.equal(loaded(str(tmp_path), tied)["head"], w)
    save_file({"embed": w, "head": w + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="'embed' and 'head' are tied, and the checkpoint has different values for them"):
        loaded(str(tmp_path), tied)
    assert torch.equal(loaded(str(tmp_path), tied, ignore="embed")["embed"], w + 1)
    save_file({"other": w}, tmp_path / "model.safetensors")
    with pytest.raises(TreeError, match=r"'embed' +not in the checkpoint"):
        loaded(str(tmp_path), tied)


def test_one_tensor_may_be_read_into_several_leaves(tmp_path):
    """Experts made of one dense layer: reads overlap, and start at other elements on each rank."""
    w = torch.arange(3000.0).view(30, 100)
    save_file({"mlp": w}, tmp_path / "model.safetensors")
    tree = {"experts": {str(i): torch.empty(30, 100, device="meta") for i in range(3)}}
    got = loaded(str(tmp_path), tree, mesh=fs.Mesh({"dp": 4}), rename=lambda name: "mlp")
    assert all(torch.equal(value, w) for value in got.values())


@on_ranks(fs.Mesh({"dp": 3}))
def test_tied_leaves_saved_by_us_are_read_into_ones_that_are_not(comm, tmp_path):
    """Two runs of a file that begin alike, the first of them the longer one: coalesced reads with digests."""
    w, pad = torch.arange(30000.0), torch.ones(6000)
    tied = {"x": {"a": w}, "y": {"0": pad, "b": w}}
    layout = fs.plan(tied, comm.mesh, fs.zero3("dp"), units=["x", "y"])
    made = fs.checkpoint.save(tmp_path, fs.shard(tied, layout, comm), step=0, comm=comm)
    like = planned({"x": {"a": w.to("meta")}, "y": {"0": pad.to("meta"), "b": w.clone()}}, comm, units=["x", "y"])
    got = whole(fs.checkpoint.load(made, like, comm=comm), comm)
    assert torch.equal(got["x.a"], w)
    assert torch.equal(got["y.b"], w)


def test_ranks_that_rename_differently_are_refused(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "model.safetensors")
    tree = {"x": torch.empty(3, device="meta")}

    def run(comm):
        other = "ab"[comm.rank]
        fs.checkpoint.load(tmp_path, planned(tree, comm), comm=comm, rename=lambda name: other, ignore="ba"[comm.rank])

    with pytest.raises(AgreementError, match="x from b"):
        simulate(MESH, run)


def damage_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_damaged_folders(tmp_path):
    tree = shapes(llama(1))

    def fails(change, match):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        saved(llama(), folder)
        change(folder)
        with pytest.raises(CheckpointError, match=match):
            loaded(str(folder), tree)

    first = "model-00001-of-00003.safetensors"
    fails(lambda f: os.remove(f / first), f"{first}: missing")
    fails(lambda f: os.truncate(f / first, 5000), "5,000 bytes, expected")
    fails(lambda f: os.truncate(f / first, 4), "not a safetensors file|missing from byte")
    fails(lambda f: (f / first).write_bytes(b"<html>" * 40), r"not a safetensors file, .* it begins with b'<html>")
    fails(lambda f: (f / "model.safetensors.index.json").write_text("{"), "the index is damaged: JSONDecodeError")
    fails(lambda f: damage_index(f, lambda m: m.update({"more": first})), f"'more' is not in {first}, where")
    fails(lambda f: damage_index(f, lambda m: m.update({"more": "../x"})), "'../x' is not a plain file name")
    fails(lambda f: (f / "b.safetensors.index.json").write_text("{}"), "2 indices, expected one: b.safetensors.index.json")

    def without_index(folder):
        os.remove(folder / "model.safetensors.index.json")
        name, value = next(iter(load_file(folder / first).items()))
        save_file({name: value}, folder / "other.safetensors")

    fails(without_index, f"is in other.safetensors and in {first}")

    def twice_empty(folder):
        for path in folder.iterdir():
            path.unlink()
        for name in ("a", "b"):
            save_file({"empty": torch.zeros(0)}, folder / f"{name}.safetensors")

    fails(twice_empty, "'empty' is in b.safetensors and in a.safetensors")


def test_no_folder_of_safetensors(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint here"):
        fs.checkpoint.open_checkpoint(tmp_path / "nothing")
    comm = fs.SingleComm()
    found = fs.checkpoint.save(tmp_path, {"a": torch.ones(3)}, step=0, comm=comm)
    os.remove(f"{found.path}/manifest.json")
    with pytest.raises(CheckpointError, match="this checkpoint is incomplete: it has no manifest"):
        fs.checkpoint.load(found.path, {"a": torch.ones(3)}, comm=comm)


def test_verify_says_that_there_is_nothing_to_compare_with(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no digests to compare with"):
        fs.checkpoint.verify(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_root_with_a_file_of_another_library_is_a_root(tmp_path, name):
    """The file was loaded in place of the newest checkpoint, without a word."""
    comm, write = fs.SingleComm(), torch.save if name.endswith(".bin") else save_file
    write({"a": torch.zeros(3)}, tmp_path / name)
    assert fs.checkpoint.load(tmp_path, {"a": torch.ones(3)}, comm=comm)["a"].tolist() == [0, 0, 0]
    found = [fs.checkpoint.save(tmp_path, {"a": torch.full((3,), float(step))}, step=step, comm=comm) for step in (1, 2)]
    assert fs.checkpoint.load(tmp_path, {"a": torch.zeros(3)}, comm=comm)["a"].tolist() == [2, 2, 2]
    assert fs.checkpoint.load(tmp_path / name, {"a": torch.ones(3)}, comm=comm)["a"].tolist() == [0, 0, 0]
    for act in (fs.checkpoint.open_checkpoint, fs.checkpoint.verify):
        with pytest.raises(CheckpointError, match=f"no checkpoint here. Pass one inside of it, such as {found[1].path}"):
            act(tmp_path)
