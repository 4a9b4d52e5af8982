"""Checkpoints and exports with the planes of encoded parameters, against safetensors' own reader and plain arithmetic."""

import json
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fsharp as fs
from fsharp.errors import AgreementError, CheckpointError, TreeError
from fsharp.functional.formats.format import as_bytes
from fsharp.functional.formats.te import KIND_BY_QUANTIZER_CLASS
from fsharp.testing import processes, simulate
from tests.ranks import on_ranks
from tests.scheduling import every
from tests.test_leaf_format import BUILT_IN

F = fs.formats
BLOCKS = [F.mxfp8, F.mxfp8_e5m2, F.mxint8, F.mxfp4, F.mxint4]
ROTATED = F.hadamard(F.mxint4)
COMM = fs.SingleComm()


def params(seed=0, odd=False):
    noise = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=noise) * 10 ** torch.randn((), generator=noise)

    layers = [{"w": random(64, 128), "b": random(128), "empty": random(0, 3)} for _ in range(2)]
    if odd:
        layers = [{"w": random(5, 7), "b": random(3), "c": random(2, 3, 11)} for _ in range(2)]
    return {"layers": layers, "head": random(32, 64), "scale": random() if odd else random(64)}


def state_of(comm, form, tree, strategy, compute=torch.float32):
    precision = fs.Precision(compute=compute, main=torch.float32, stored=form)
    layout = fs.plan(tree, comm.mesh, strategy, units="layers.*", precision=precision)
    return layout, fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, layout, comm, place="optim"), comm=comm)


def save(comm, root, form, strategy=None, odd=False):
    """Save planes of parameters. Return the checkpoint, the values that they encode, and the bytes of all buffers."""
    layout, state = state_of(comm, form, params(odd=odd), strategy or fs.zero3("dp"))
    found = fs.checkpoint.save(root, {"params": state.params, "seen": 3}, step=1, comm=comm, planes=True)
    nbytes = sum(unit.stored_nbytes(g, unit.strategy.full) for unit in layout.units for g in unit.all_groups)
    return found, {name: x.clone() for name, x in flat(fs.full_tree(state.params, comm=comm)).items()}, nbytes


def flat(tree):
    layers = {f"layers.{i}.{name}": x for i, each in enumerate(tree["layers"]) for name, x in each.items()}
    return {**layers, "head": tree["head"], "scale": tree["scale"]}


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert torch.equal(as_bytes(found[name]), as_bytes(x)), name


@every(4, form=[*BUILT_IN, *BLOCKS, ROTATED], odd=[False, True], name=["zero3", "ddp", "zero1"])
def test_planes_load_as_the_values_that_they_encode(tmp_path, form, odd, name):
    mesh = fs.Mesh({"dp": 3})
    made = simulate(mesh, lambda comm: save(comm, tmp_path / "root", form, getattr(fs, name)("dp"), odd))
    found, expected, nbytes = made[0]
    fs.checkpoint.verify(found)
    fs.checkpoint.export_safetensors(found, tmp_path / "out", subtree="params", max_file_nbytes=3000)
    exported = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(path)
    if not odd:
        assert sum(x.nbytes for x in exported.values()) <= nbytes
    zeros = params(seed=1, odd=odd)
    for where, subtree in ((found, "params"), (tmp_path / "out", "")):
        got = fs.checkpoint.load(where, zeros, comm=COMM, subtree=subtree)
        same_bits(flat(got), expected)
    back = fs.checkpoint.from_huggingface(tmp_path / "out", tmp_path / "back")
    same_bits(flat(fs.checkpoint.load(back, zeros, comm=COMM)), expected)


@settings(max_examples=15)
@given(data=st.data(), form=st.sampled_from([*BUILT_IN, *BLOCKS]), n=st.integers(1, 4))
def test_any_values_of_any_shapes_load_to_the_bit(tmp_path_factory, data, form, n):
    """With infinities and NaN, and read back in parts: on other ranks, into a layout in a format and into plain tensors."""
    shapes = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4))
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, 1e-40])
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tree = {f"x{i}": torch.randn(shape, generator=noise) for i, shape in enumerate(shapes)}
    for x in tree.values():
        for at in data.draw(st.lists(st.integers(0, 999), max_size=3)) if x.numel() else ():
            x.view(-1)[at % x.numel()] = special[data.draw(st.integers(0, 6))]
    root = tmp_path_factory.mktemp("planes")

    def write(comm):
        layout = fs.plan(tree, comm.mesh, fs.zero3("dp"), precision=fs.Precision(main=torch.float32, stored=form))
        state = fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, layout, comm, place="optim"), comm=comm)
        found = fs.checkpoint.save(root, state.params, step=0, comm=comm, planes=True)
        return found, {name: x.clone() for name, x in fs.full_tree(state.params, comm=comm).items()}

    found, expected = simulate(fs.Mesh({"dp": n}), write)[0]
    same_bits(fs.checkpoint.load(found, tree, comm=COMM), expected)

    def read(comm):
        layout = fs.plan(tree, comm.mesh, fs.zero3("dp"))
        like = fs.shard({name: torch.zeros_like(x) for name, x in tree.items()}, layout, comm)
        return {name: x.clone() for name, x in fs.full_tree(fs.checkpoint.load(found, like, comm=comm), comm=comm).items()}

    for got in simulate(fs.Mesh({"dp": 2}), read):
        same_bits(got, expected)


@pytest.mark.parametrize("form", [*BUILT_IN, *BLOCKS, ROTATED], ids=lambda form: form.name)
def test_planes_load_into_parameters_in_the_format_without_main_copies(tmp_path, form):
    """Under another strategy, on another number of ranks: the same planes."""
    found, expected, _ = simulate(fs.Mesh({"dp": 2}), lambda comm: save(comm, tmp_path, form))[0]

    def read(comm):
        _, like = state_of(comm, form, params(seed=1), fs.zero2("dp"))
        loaded = fs.checkpoint.load(found, like.params, comm=comm, subtree="params")
        assert all(node.is_encoded for node in fs.layouts.units_of(loaded))
        return {name: x.clone() for name, x in flat(fs.full_tree(loaded, comm=comm)).items()}

    for got in simulate(fs.Mesh({"dp": 3}), read):
        same_bits(got, expected)


TE_READERS = {kind.for_readers.name: kind.for_readers for kind in KIND_BY_QUANTIZER_CLASS.values()}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def by_convention(tensors, name):
    """What a reader who knows the convention makes of a leaf: a code times its scales."""
    codes, scale = tensors[name], tensors[f"{name}_scale"]
    numbers = codes.float()
    if codes.dtype == torch.uint8:
        numbers = E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    factor = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    if scale.dim() == numbers.dim() and scale.shape[-1] > 1:
        factor = factor.repeat_interleave(numbers.shape[-1] // scale.shape[-1], -1)
    return numbers * factor * tensors.get(f"{name}_scale_2", torch.ones(()))


@pytest.mark.parametrize("form", [*BUILT_IN, F.mxfp8, F.mxfp8_e5m2, F.mxint8, F.mxfp4], ids=lambda form: form.name)
def test_a_reader_of_safetensors_can_use_the_planes(tmp_path, form):
    found, expected, _ = simulate(fs.Mesh({"dp": 2}), lambda comm: save(comm, tmp_path / "root", form))[0]
    fs.checkpoint.export_safetensors(found, tmp_path / "out", subtree="params", rename=lambda name: f"model.{name}")
    path = tmp_path / "out" / "model.safetensors"
    tensors, e4m3, codes = load_file(path), torch.float8_e4m3fn, {"w": (64, 128), "b": (128,)}
    for name in ("model.layers.1.w", "model.head", "model.layers.0.b"):
        assert torch.equal(by_convention(tensors, name), expected[name.removeprefix("model.")])
    packed = 2 if form in (F.nvfp4, F.mxfp4) else 1
    for name, shape in codes.items():
        assert tensors[f"model.layers.0.{name}"].shape == (*shape[:-1], shape[-1] // packed)
    about = {
        "float8_e4m3_by_tensor": (e4m3, torch.float32, (1,)), "float8_e5m2_by_tensor": (torch.float8_e5m2, torch.float32, (1,)),
        "float8_e4m3_by_row": (e4m3, torch.float32, (64, 1)), "float8_e5m2_by_row": (torch.float8_e5m2, torch.float32, (64, 1)),
        "int8_by_tensor": (torch.int8, torch.float32, (1,)),
        "int8_by_row": (torch.int8, torch.float32, (64, 1)), "nvfp4": (torch.uint8, e4m3, (64, 8)),
        "mxfp8": (e4m3, torch.uint8, (64, 4)), "mxfp8_e5m2": (torch.float8_e5m2, torch.uint8, (64, 4)),
        "mxint8": (torch.int8, torch.uint8, (64, 4)), "mxfp4": (torch.uint8, torch.uint8, (64, 4)),
    }  # fmt: skip
    w, scale = tensors["model.layers.0.w"], tensors["model.layers.0.w_scale"]
    assert (w.dtype, scale.dtype, tuple(scale.shape)) == about[form.name]
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    described = json.loads(metadata["fsharp.encoded"])
    assert metadata["format"] == "pt"
    assert described.keys() == {f"model.{name}" for name in expected}
    assert described["model.layers.0.w"][:3] == [form.name, [64, 128], 0]


@pytest.mark.parametrize("form", TE_READERS.values(), ids=TE_READERS)
def test_planes_of_transformer_engine_load_in_any_parts(tmp_path, form):
    """Six ranks cut the leaf at odd elements, within a byte of NVFP4. No TransformerEngine is needed to read."""
    noise, shape, packed = torch.Generator().manual_seed(0), (64, 64), form.block
    specs = form.leaf_codec.scale_specs(shape)
    tensors = {"w": torch.randint(0, 0x78, (64, 64 // packed), generator=noise, dtype=torch.uint8).view(form.planes[0].dtype)}
    for name, (size, dtype) in specs.items():
        scale = torch.rand(size, generator=noise) + 0.5
        tensors[f"w{name}"] = (scale * 128).to(dtype) if dtype == torch.uint8 else scale.to(dtype)
    about = {"w": [form.name, shape, 0, ["w"], [f"w{name}" for name in specs]]}
    save_file(tensors, path := tmp_path / "model.safetensors", {"fsharp.encoded": json.dumps(about)})
    expected = by_convention(tensors, "w")
    assert torch.equal(fs.checkpoint.load(path, {"w": torch.zeros(shape)}, comm=COMM)["w"], expected)

    def read(comm):
        like = fs.shard({"w": torch.zeros(shape)}, fs.plan({"w": expected}, comm.mesh, fs.zero3("dp")), comm)
        return fs.full_tree(fs.checkpoint.load(path, like, comm=comm), comm=comm)["w"].clone()

    for found in simulate(fs.Mesh({"dp": 6}), read):
        assert torch.equal(found, expected)


def test_plain_leaves_beside_encoded_ones_are_rounded_and_planes_are_not(tmp_path):
    precision = {"**": fs.Precision(), "w": fs.Precision(stored=F.int8_by_row)}
    tree = {"w": torch.randn(4, 32), "norm": torch.randn(32)}
    layout = fs.plan(tree, COMM.mesh, fs.zero3("dp"), precision=precision)
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, layout, COMM, place="optim"), comm=COMM)
    found = fs.checkpoint.save(tmp_path, state.params, step=0, comm=COMM, planes=True)
    fs.checkpoint.export_safetensors(found, tmp_path / "out", dtype=torch.bfloat16)
    dtypes = {name: x.dtype for name, x in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert dtypes == {"w": torch.int8, "w_scale": torch.float32, "norm": torch.bfloat16}
    half = fs.checkpoint.load(tmp_path / "out", {name: x.bfloat16() for name, x in tree.items()}, comm=COMM)  # no cast=True
    assert torch.equal(half["w"], fs.full_tree(state.params, comm=COMM)["w"].bfloat16())


@pytest.mark.parametrize("subtree", ["", "encoder", "decoder"])
def test_a_tied_leaf_has_its_planes_under_one_name(tmp_path, subtree):
    shared = torch.randn(8, 32)
    tree = {"encoder": {"embed": shared, "a": torch.ones(32)}, "decoder": {"embed": shared, "b": torch.ones(32)}}
    layout = fs.plan(tree, COMM.mesh, fs.zero3("dp"), precision=fs.Precision(stored=F.mxfp8))
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, layout, COMM, place="optim"), comm=COMM)
    found = fs.checkpoint.save(tmp_path, state.params, step=0, comm=COMM, planes=True)
    like, values = (tree, fs.full_tree(state.params, comm=COMM))
    got = fs.checkpoint.load(found, like, comm=COMM)
    assert torch.equal(got["decoder"]["embed"], values["encoder"]["embed"])
    assert torch.equal(got["encoder"]["embed"], values["encoder"]["embed"])
    fs.checkpoint.export_safetensors(found, tmp_path / "out", subtree=subtree)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    [name] = [name for name in tensors if name.endswith("embed")]
    assert torch.equal(by_convention(tensors, name), values["encoder"]["embed"])
    got = fs.checkpoint.load(tmp_path / "out", {name: torch.zeros(8, 32)}, comm=COMM, strict=False)
    assert torch.equal(got[name], values["encoder"]["embed"])


def test_processes_save_and_load_planes(tmp_path):
    root, form = str(tmp_path), F.float8_e4m3_by_tensor

    def run(comm):
        found, expected, _ = save(comm, root, form)
        if comm.rank == 0:
            fs.checkpoint.export_safetensors(found, f"{root}/out", subtree="params")
        fs.checkpoint.save(f"{root}/next", {}, step=0, comm=comm)  # waits for rank 0
        _, like = state_of(comm, form, params(seed=1), fs.zero3("dp"))
        same_bits(flat(fs.full_tree(fs.checkpoint.load(f"{root}/out", like.params, comm=comm), comm=comm)), expected)
        return True

    assert processes(fs.Mesh({"dp": 2}), run) == [True, True]


@on_ranks(fs.Mesh({"dp": 1, "ep": 2}))
def test_units_that_differ_between_ranks_are_refused(comm, tmp_path):
    strategy, tree = fs.zero3("dp").varying("ep"), {"w": torch.full((4, 32), float(comm.rank))}
    layout = fs.plan(tree, comm.mesh, strategy, precision=fs.Precision(stored=F.mxfp8))
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, layout, comm, place="optim"), comm=comm)
    with pytest.raises(TreeError, match=r"(?s)planes=True is not for unit \(root\).*ep.*Save without planes"):
        fs.checkpoint.save(tmp_path, state.params, step=0, comm=comm, planes=True)
    fs.checkpoint.save(tmp_path, state.params, step=0, comm=comm)


@pytest.mark.parametrize("export", ["export_torch", "to_dcp", "to_orbax"])
def test_exports_to_files_that_no_reader_decodes_are_refused(tmp_path, export):
    """Codes and scales were written as tensors like others, which a reader takes for values."""
    saved, _, _ = save(COMM, tmp_path / "run", F.mxfp8)
    write = getattr(fs.checkpoint, export, None) or pytest.importorskip("fsharp.interop.orbax").to_orbax
    with pytest.raises(
        CheckpointError, match=rf"(?s){export}\(\): 'params\.[^']*' was saved with planes=True.*export_safetensors\(\)"
    ):
        write(saved, tmp_path / "out", subtree="params")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("has_planes", [(True, False), (False, True)], ids=str)
def test_ranks_that_do_not_agree_on_planes_get_an_error_and_no_file_is_left(tmp_path, has_planes):
    errors = []

    def main(comm):
        _, state = state_of(comm, F.mxfp8, params(), fs.zero3("dp"))
        with pytest.raises(AgreementError) as info:
            fs.checkpoint.save(tmp_path, state.params, step=1, comm=comm, planes=has_planes[comm.rank])
        errors.append(str(info.value))

    simulate(fs.Mesh({"dp": 2}), main)
    assert len(errors) == 2
    assert all("EncodedLeaf" in each for each in errors), errors
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_as_planes_is_refused(tmp_path):
    plain = {"w": torch.ones(4, 32)}
    layout = fs.plan(plain, COMM.mesh, fs.zero3("dp"))
    sharded = fs.shard(plain, layout, COMM)
    with pytest.raises(TreeError, match=r"(?s)planes=True, and the tree has no encoded parameters.*got +1 tensors, such as w"):
        fs.checkpoint.save(tmp_path, sharded, step=0, comm=COMM, planes=True)
    layout = fs.plan(
        {"w": torch.ones(4, 32), "w_scale": torch.ones(3)}, COMM.mesh, fs.zero3("dp"), precision=fs.Precision(stored=F.mxfp8)
    )
    state = fs.init_state(
        fs.optim.sgd(0.1), fs.shard({"w": torch.ones(4, 32), "w_scale": torch.ones(3)}, layout, COMM, place="optim"), comm=COMM
    )
    with pytest.raises(TreeError, match=r"two leaves of the tree have the name 'w_scale'"):
        fs.checkpoint.save(tmp_path, state.params, step=0, comm=COMM, planes=True)
    assert not fs.checkpoint.list_checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda about: {"w": ["mxfp9", *about["w"][1:]]}, r"'w' has planes of a format that is not there: no format 'mxfp9'"),
        (lambda about: {"w": ["mxfp4", *about["w"][1:]]}, r"(?s)'w' does not have planes of mxfp4.*got.*expected"),
        (lambda about: {"w": ["mxfp8", [4, 64], *about["w"][2:]]}, r"(?s)'w' does not have planes of mxfp8.*got.*expected"),
        (lambda about: {"w": [*about["w"][:2], 40, *about["w"][3:]]}, r"(?s)'w' does not have the planes of its .*skip 40"),
        (lambda about: {"w": [*about["w"][:3], ["w", "w"], []]}, r"'fsharp.encoded' in the metadata is damaged: ValueError"),
        (lambda about: {"w": [*about["w"][:3], ["w", "other"], []]}, r"(?s)'w' does not have planes of mxfp8"),
        (lambda about: 3, r"'fsharp.encoded' in the metadata is damaged"),
    ],
)  # fmt: skip
def test_metadata_of_another_format_or_none_are_refused(tmp_path, edit, match):
    tree = {"w": torch.randn(4, 32)}
    layout = fs.plan(tree, COMM.mesh, fs.zero3("dp"), precision=fs.Precision(stored=F.mxfp8))
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, layout, COMM, place="optim"), comm=COMM)
    found = fs.checkpoint.save(tmp_path / "root", state.params, step=0, comm=COMM, planes=True)
    fs.checkpoint.export_safetensors(found, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["fsharp.encoded"])
    save_file(load_file(path), path, {"fsharp.encoded": json.dumps(edit(about))})
    with pytest.raises(CheckpointError, match=match):
        fs.checkpoint.load(path, tree, comm=COMM)
