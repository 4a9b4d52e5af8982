"""Files of ``torch.save``, and folders of Hugging Face's pytorch_model.bin, read into shards."""

import copy
import json
import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fsharp as fs
from fsharp.checkpoint.reading import NeededElements
from fsharp.errors import CheckpointError, TreeError
from tests.checkpoint.counted import counted_reader
from tests.checkpoint.models import llama, parameters, shapes
from tests.checkpoint.test_huggingface import loaded

COMM = fs.SingleComm()
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def of_llama():
    """Parameters of a model, in two parts, as ``state_dict()`` has them."""
    state = dict(llama().named_parameters())
    names = sorted(state)
    half = len(names) // 2
    return [{name: state[name] for name in part} for part in (names[:half], names[half:])]


@pytest.mark.parametrize("has_index", [True, False])
def test_load_of_a_folder_of_pytorch_model_bin(tmp_path, has_index):
    files = {f"pytorch_model-0000{i}-of-00002.bin": part for i, part in enumerate(of_llama(), 1)}
    for file, part in files.items():
        torch.save(part, tmp_path / file)
    torch.save({"lr": 1.0}, tmp_path / "training_args.bin")
    if has_index:
        index = {"weight_map": {name: file for file, part in files.items() for name in part}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    got = loaded(str(tmp_path), shapes(llama(1)))
    assert all(torch.equal(got[name], value) for name, value in parameters(llama()).items())
    assert fs.checkpoint.open_checkpoint(tmp_path).step == 0


def test_safetensors_are_taken_where_there_are_both(tmp_path):
    torch.save({"w": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert fs.checkpoint.load(tmp_path, {"w": torch.empty(3)}, comm=COMM)["w"].tolist() == [1, 1, 1]
    assert fs.checkpoint.load(tmp_path / "pytorch_model.bin", {"w": torch.empty(3)}, comm=COMM)["w"].tolist() == [0, 0, 0]
    assert fs.checkpoint.load(tmp_path / "model.safetensors", {"w": torch.empty(3)}, comm=COMM)["w"].tolist() == [1, 1, 1]


def test_load_of_a_program_own_file(tmp_path):
    """A module with tied parameters and buffers, an optimizer and numbers; a part of a larger storage; all dtypes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[2].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    odd = {
        "half": torch.arange(7, dtype=torch.bfloat16),
        "part": torch.arange(100.0)[10:20].view(2, 5),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "bool": torch.tensor([True, False]),
    }
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "odd": odd, "epoch": 3, "name": "a", "no": None}
    torch.save(saved, tmp_path / "a.pt")
    os.symlink("a.pt", tmp_path / "link")
    for path in (tmp_path / "a.pt", tmp_path / "link", f"file://{tmp_path}/a.pt"):
        into = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
        into[3].weight = into[2].weight
        fs.checkpoint.load(path, into, comm=COMM, subtree="model")
        assert all(torch.equal(x, model.state_dict()[name]) for name, x in into.state_dict().items())
        got = fs.checkpoint.load(path, {key: torch.empty_like(x) for key, x in odd.items()}, comm=COMM, subtree="odd")
        assert all(torch.equal(got[key], x) for key, x in odd.items())
    found = fs.checkpoint.open_checkpoint(tmp_path / "a.pt")
    assert found.manifest.values["epoch"] == 3
    assert found.manifest.values["optimizer.param_groups.0.betas.1"] == 0.999
    assert torch.equal(found.tensor("optimizer.state.0.exp_avg"), optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_rank_reads_its_part_of_an_archive_alone(tmp_path):
    torch.save({"w": torch.arange(1 << 18, dtype=torch.float32)}, tmp_path / "a.pt")
    found, target = fs.checkpoint.open_checkpoint(tmp_path / "a.pt"), torch.empty(1000)
    reader, files = counted_reader(found)
    reader.read([NeededElements("w", 5000, 6000, target)])
    assert torch.equal(target, torch.arange(5000.0, 6000.0))
    assert 4000 <= files.num_read < 20000


def with_records(path, change):
    """Write a file of ``torch.save`` whose list of records is changed by ``change``, which gets an open archive."""
    torch.save({"a": torch.ones(2, 3), "big": torch.ones(1000)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        change(archive)
        archive._didModify = True


def repeat_largest_record(archive):
    largest = max(archive.filelist, key=lambda record: record.file_size)
    for i in range(3):
        archive.filelist.append(again := copy.copy(largest))
        again.filename = f"again{i}"


def say_other_byte_order(archive):
    (old,) = [record for record in archive.filelist if record.filename.endswith("/byteorder")]
    archive.filelist.remove(old)
    del archive.NameToInfo[old.filename]
    archive.writestr(old.filename, "big")


class Anything:
    """Something that a pickle would have to import."""


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (
            lambda path: path.write_bytes(b"\x93NUMPY" + b"0" * 99),
            r"a\.pt: this is not a safetensors file, .* b'.x93NUMPY0+'\. Expected",
        ),
        (lambda path: path.write_bytes(b""), r"a\.pt: this is not .* none of torch\.save: it begins with b''"),
        (lambda path: torch.save({}, path, _use_new_zipfile_serialization=False), r"torch before 1\.6 .* weights_only=True"),
        (
            lambda path: torch.save({"m": Anything()}, path),
            r"asks for tests\.\S+\.Anything, expected tensors.*model\.state_dict",
        ),
        (
            lambda path: torch.save({"m": {"b": {1}}}, path),
            r"asks for __builtin__\.set.* Save tensors, numbers and texts alone",
        ),
        (lambda path: torch.save({"a": torch.ones(2, 3).t()}, path), r"'a' has strides \(1, 3\), .* x\.contiguous\(\)"),
        (lambda path: torch.save({"a": {"b": 1}, "a.b": 2}, path), r"two keys are both 'a\.b'"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + pickle.dumps(1)), "a.pt: cannot be read: BadZipFile"),
        (
            lambda path: torch.save({"m": b"x"}, path, pickle_protocol=4),
            r"'m' is bytes\. Save tensors, numbers and texts alone",
        ),
        (lambda path: torch.save({"m": "x" * (3 << 20)}, path), r"its pickle of 3,\d+,\d+ bytes is larger than all that it"),
        (lambda path: with_records(path, repeat_largest_record), "its records overlap"),
        (lambda path: with_records(path, say_other_byte_order), "its elements have the other byte order"),
    ],
)
def test_what_a_file_has_to_be(tmp_path, write, match):
    write(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=match):
        fs.checkpoint.load(tmp_path / "a.pt", {"a": torch.ones(2, 3)}, comm=COMM)


def test_a_file_of_another_tree(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(TreeError, match=r"'a' +float32\[2\] in the checkpoint; expected float32\[3\]"):
        fs.checkpoint.load(tmp_path / "a.pt", {"a": torch.ones(3)}, comm=COMM)
