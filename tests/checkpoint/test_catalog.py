"""Which checkpoint is the newest, what is incomplete, and that others can read the files."""

import importlib.metadata
import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import fsharp as fs
from fsharp.checkpoint import catalog
from fsharp.checkpoint.manifest import MANIFEST_NAME, Manifest
from fsharp.checkpoint.saving import remove_staged
from fsharp.errors import CheckpointError
from fsharp.testing import simulate

COMM = fs.SingleComm()


def save(root, step, value=None):
    return fs.checkpoint.save(root, {"x": torch.full((5000,), float(step if value is None else value))}, step=step, comm=COMM)


def test_the_newest_is_computed_from_manifests(tmp_path):
    assert fs.checkpoint.latest(tmp_path / "nowhere") is None
    for step in (1, 3, 2):
        save(tmp_path, step)
    assert fs.checkpoint.latest(tmp_path).step == 2  # the one saved last
    assert [c.step for c in fs.checkpoint.list_checkpoints(tmp_path)] == [2, 3, 1]
    save(tmp_path, 3, value=33)
    assert fs.checkpoint.latest(tmp_path).tensor("x")[0] == 33


def test_what_is_incomplete_is_left_out_and_said(tmp_path, caplog):
    good = save(tmp_path, 1)
    for step, damage in (
        (2, lambda path: (path / MANIFEST_NAME).unlink()),
        (3, lambda path: (path / MANIFEST_NAME).write_bytes((path / MANIFEST_NAME).read_bytes()[:-9])),
        (4, lambda path: (path / "rank-00000.safetensors").unlink()),
        (5, lambda path: os.truncate(path / "rank-00000.safetensors", 99)),
    ):
        damage(tmp_path / save(tmp_path, step).path)
    os.mkdir(tmp_path / ".step-0000000006-0123456789abcdef.partial")
    with caplog.at_level(logging.WARNING, "fsharp"):
        assert fs.checkpoint.latest(tmp_path).path == good.path
    said = caplog.text
    assert "this checkpoint is incomplete: it has no manifest" in said
    assert "the manifest is damaged" in said
    assert "rank-00000.safetensors: missing" in said
    assert "99 bytes, expected" in said
    assert "step-0000000006-0123456789abcdef is incomplete, using step 1" in said


@pytest.mark.parametrize("act", [fs.checkpoint.latest, fs.checkpoint.list_checkpoints, catalog.has_checkpoints])
def test_a_save_that_takes_the_place_of_all_others_while_they_are_looked_at_is_found(tmp_path, monkeypatch, act):
    """A Saver with keep=1 removes the only checkpoint that a reader has listed, once the next one is complete."""
    save(tmp_path, 1)
    real, num_listed = catalog.names_last_saved_first, 0

    def list_names(root):
        nonlocal num_listed
        names, num_listed = real(root), num_listed + 1
        if num_listed == 1:
            save(tmp_path, 2)
            fs.checkpoint.prune(tmp_path, keep=1)
        return names

    monkeypatch.setattr(catalog, "names_last_saved_first", list_names)
    assert act(str(tmp_path))


def test_a_package_that_is_not_installed_saves(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    saved = fs.checkpoint.save(tmp_path, {"x": torch.ones(3)}, step=1, comm=fs.SingleComm())
    assert saved.manifest.versions["fsharp"] == fs.__version__


def test_files_are_plain_safetensors_and_json(tmp_path):
    def run(comm):
        tree = {"a": torch.arange(300).float().view(30, 10), "n": torch.arange(8)}
        params = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp"), units="*", frozen="n"), comm)
        return fs.checkpoint.save(tmp_path, {"params": params, "step": 5}, step=5, comm=comm, config={"lr": 0.1}).path

    path = tmp_path / simulate(fs.Mesh({"dp": 2}), run)[0]
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    assert manifest["step"] == 5
    assert manifest["config"] == {"lr": 0.1}
    assert manifest["values"] == {"step": 5}
    parts = {}
    for number, file in enumerate(manifest["files"]):
        with safe_open(path / file["name"], "pt") as opened:
            assert opened.metadata()["save_id"] == manifest["save_id"]
            parts |= {(name, number): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    whole = {
        name: torch.cat([parts[name, file].view(-1) for file, _, _ in record["chunks"]]).view(record["shape"])
        for name, record in manifest["tensors"].items()
    }
    assert torch.equal(whole["params.a"], torch.arange(300).float().view(30, 10))
    assert torch.equal(whole["params.n"], torch.arange(8))


def test_a_checkpoint_may_be_moved(tmp_path):
    path = save(tmp_path / "a", 1).path
    shutil.move(path, tmp_path / "elsewhere")
    assert fs.checkpoint.verify(tmp_path / "elsewhere").step == 1
    assert fs.checkpoint.load(tmp_path / "elsewhere", {"x": torch.zeros(5000)}, comm=COMM)["x"][0] == 1


def test_a_checkpoint_is_a_path(tmp_path):
    found = save(tmp_path, 1)
    assert fs.checkpoint.verify(found).step == 1
    fs.checkpoint.export_safetensors(found, tmp_path / "out")
    with pytest.raises(CheckpointError, match=rf"there is no checkpoint here\. Pass one inside of it, such as {found.path}\."):
        fs.checkpoint.verify(tmp_path)
    shutil.rmtree(found)
    assert repr(fs.checkpoint.Checkpoint(found.path)) == f"Checkpoint({found.path!r}, which is not complete any more)"
    for options, wrong in (
        ({"keep": 0}, "keep is 0, expected at least 1"),
        ({"keep": 1, "best": -1}, "best is -1, expected at least 0"),
    ):
        with pytest.raises(CheckpointError, match=rf"prune\(\): {wrong}.*\.$"):
            fs.checkpoint.prune(tmp_path, **options)


def test_an_object_store_has_a_manifest_last(tmp_path):
    import fsspec

    root = "memory://run"
    files = fsspec.filesystem("memory")
    with fs.checkpoint.Saver(root, COMM, keep=2) as saver:
        for step in (1, 2, 3):
            saver.save({"x": torch.full((5000,), float(step))}, step=step)
    found = fs.checkpoint.list_checkpoints(root)
    assert [c.step for c in found] == [3, 2]
    fs.checkpoint.verify(found[0].path)
    assert fs.checkpoint.load(root, {"x": torch.zeros(5000)}, comm=COMM)["x"][0] == 3
    files.rm_file(f"{found[0].path}/{MANIFEST_NAME}")
    assert fs.checkpoint.latest(root).step == 2
    fs.checkpoint.Saver(root, COMM).close()
    assert len(files.ls("/run")) == 1
    with pytest.raises(CheckpointError, match="nosuch"):
        save("nosuch://x", 1)


@pytest.mark.parametrize(("name", "by"), [(".metadata", "from_dcp"), ("_CHECKPOINT_METADATA", "from_orbax")])
def test_the_error_for_a_folder_of_another_library_names_the_function_that_converts_it(tmp_path, name, by):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"no checkpoint here. Its {name} is another library's: convert it by .*{by}"):
        fs.checkpoint.load(tmp_path, {"x": torch.ones(3)}, comm=COMM)


@pytest.mark.parametrize("method", ["_open", "rm"])
def test_a_store_that_does_not_let_a_saver_write_or_remove_is_an_error_before_the_first_save(monkeypatch, method):
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(*_, **__):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(MemoryFileSystem, method, refuse)
    with pytest.raises(CheckpointError, match=r"memory://refusing: cannot be written: Access Denied"):
        fs.checkpoint.Saver("memory://refusing", COMM)


@pytest.mark.parametrize("root", ["memory://kept", "memory://kept[1]", "memory://k*t", "memory://kep?"])
def test_a_removed_checkpoint_leaves_no_file_in_an_object_store(root):
    """fsspec takes paths for patterns. The tensors of each removed checkpoint stayed."""
    import fsspec

    with fs.checkpoint.Saver(root, COMM, keep=1) as saver:
        for step in (1, 2, 3):
            saver.save({"x": torch.ones(3)}, step=step)
    [found] = fs.checkpoint.list_checkpoints(root)
    files = fsspec.filesystem("memory").find(root)
    assert [file.rpartition("/")[0] for file in files] == [found.path.removeprefix("memory:/")] * 2


def test_a_rank_without_tensors_saves_into_a_store_that_answers_an_empty_range_with_the_whole_file(monkeypatch):
    """As S3 does. All saves of such a tree failed."""
    from fsspec.implementations.memory import MemoryFileSystem

    cat_file = MemoryFileSystem.cat_file

    def cat(self, path, start=None, end=None, **options):
        return cat_file(self, path) if start is not None and start == end else cat_file(self, path, start, end)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat)
    found = fs.checkpoint.save("memory://numbers", {"seen": 3}, step=1, comm=COMM)
    assert fs.checkpoint.verify(found).manifest.values == {"seen": 3}
    assert fs.checkpoint.load(found, {"seen": 0}, comm=COMM) == {"seen": 3}


def test_an_error_of_a_store_does_not_hide_that_of_a_save(monkeypatch, caplog):
    from fsspec.implementations.memory import MemoryFileSystem

    def away(self, *args, **options):
        raise RuntimeError("the store is away")

    for name in ("rm", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, away)
    remove_staged("memory://numbers/step-1")
    assert re.search("memory://numbers/.*: could not be removed .the store is away", caplog.text)


def test_a_url_that_pathlib_has_made_a_path_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"pathlib has removed a slash of this URL. Pass it as a text: 'memory://run/a'"):
        fs.checkpoint.save(Path("memory://run/a"), {"seen": 3}, step=1, comm=COMM)
    assert not os.listdir()


def test_a_whole_file_is_compared_with_as_many_bytes_of_digests_as_it_has(tmp_path):
    """Not with the rest of the table at each read, which would be a copy that grows with the square of the size."""
    copied = []

    class Table(bytes):
        def __getitem__(self, which):
            found = super().__getitem__(which)
            copied.append(len(found))
            return found

    found = fs.checkpoint.save(tmp_path, {"x": torch.zeros(1 << 20)}, step=1, comm=COMM)  # 4 MiB, read by pieces of 1 MiB
    found.tensor("x")
    [reader] = found.reader._files.values()
    reader._table = Table(reader._table)
    assert reader.find_damaged_block_starts() == []
    assert sum(copied) == len(reader._table)


def test_an_unknown_tensor(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tensor 'y'; there are \['x'\]"):
        save(tmp_path, 1).tensor("y")


def renamed_to_old(found):
    """A checkpoint with a name as names were before they had times; its manifest stays."""
    new = found.path[: found.path.rindex("-") + 1] + found.manifest.save_id[-16:]
    os.rename(found.path, new)
    return new


def test_the_newest_is_found_without_reading_older_manifests(tmp_path, monkeypatch):
    renamed_to_old(save(tmp_path, 9))
    for step in range(5):
        save(tmp_path, step)
    read = []
    real = Manifest.from_json
    monkeypatch.setattr(Manifest, "from_json", lambda where, data: [read.append(where), real(where, data)][1])
    catalog._summary_cache.clear()
    assert fs.checkpoint.latest(tmp_path).step == 4
    save(tmp_path, 3)
    assert len([where for where in read if "partial" not in where]) == 2  # the newest, and the one whose name has no time
    assert fs.checkpoint.latest(tmp_path).step == 3


def test_old_names_are_in_order_of_their_manifests(tmp_path):
    for step in (5, 7, 2):
        renamed_to_old(save(tmp_path, step))
    assert [found.step for found in fs.checkpoint.list_checkpoints(tmp_path)] == [2, 7, 5]
    save(tmp_path, 1)
    assert [found.step for found in fs.checkpoint.list_checkpoints(tmp_path)] == [1, 2, 7, 5]
    assert all(fs.checkpoint.verify(found) for found in fs.checkpoint.list_checkpoints(tmp_path))


def test_clocks_that_go_back_change_no_order(tmp_path, monkeypatch):
    now = iter((5e9, 1e9, -1.0, 0.0))
    monkeypatch.setattr(catalog.time, "time", lambda: next(now))
    for step in (3, 2, 1, 4):
        found = save(tmp_path, step)
        assert found.manifest.created == catalog.save_time_of(found.path) >= 5e9
    assert [found.step for found in fs.checkpoint.list_checkpoints(tmp_path)] == [4, 1, 2, 3]
