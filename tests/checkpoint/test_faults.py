"""What the table of faults (``tests/faults``) has no row for: odd roots, jobs that meet, steps and clocks that go back."""

import ctypes
import errno
import itertools
import json
import os
import struct
import subprocess
from pathlib import Path

import pytest
import torch

import fsharp as fs
from fsharp.checkpoint import saving
from fsharp.checkpoint.catalog import remove_incomplete
from fsharp.checkpoint.manifest import MANIFEST_NAME
from fsharp.checkpoint.saving import header_metadata
from fsharp.checkpoint.shard_file import encode_header, write_file
from fsharp.distributed.worker_threads import Outcome
from fsharp.errors import CheckpointError, CommError
from fsharp.testing import processes, simulate
from tests.faults.damage import rank_files, signed
from tests.faults.disk import mounted, mounts
from tests.faults.hostile import FILE, vouching_for
from tests.faults.kills import DiesAt
from tests.faults.trees import ONE, latest_step, left_behind, save, step_in, tree_of

TWO = fs.Mesh({"dp": 2})


def steps(root):
    return [found.step for found in fs.checkpoint.list_checkpoints(root)]


def test_a_saver_that_goes_back_keeps_what_it_saves(tmp_path):
    with fs.checkpoint.Saver(tmp_path, ONE, keep=1) as saver:
        for step in (30, 10, 20):
            saver.save(tree_of(step, ONE), step=step)
    assert steps(tmp_path) == [20]
    assert latest_step(tmp_path) == 20


def test_a_saver_made_by_another_job_ends_the_save_under_way(tmp_path, monkeypatch):
    """It may have read back all of its files: it must not be told that they are saved."""
    save(tmp_path, 1)

    def act(comm):
        def write_and_meet(*args):
            digest = write_file(*args)
            if comm.rank == 1:
                fs.checkpoint.Saver(tmp_path, ONE).close()
            return digest

        monkeypatch.setattr(saving, "write_file", write_and_meet)
        with pytest.raises(fs.errors.FsharpError, match=r"missing|it was removed"):
            save(tmp_path, 2, comm)

    simulate(TWO, act)
    assert latest_step(tmp_path) == 1
    assert left_behind(tmp_path) == []


def test_a_save_that_is_removed_before_it_is_published_fails(tmp_path, monkeypatch):
    publish = fs.checkpoint.storage.LocalStorage.publish
    removed = []

    def meet(self, staged, folder):
        removed.extend(remove_incomplete(tmp_path))
        publish(self, staged, folder)

    monkeypatch.setattr(fs.checkpoint.storage.LocalStorage, "publish", meet)
    with pytest.raises(CheckpointError, match="it was removed"):
        save(tmp_path, 2)
    assert len(removed) == 1
    assert latest_step(tmp_path) is None


def test_a_save_whose_root_cannot_be_synced_says_on_all_ranks_that_the_checkpoint_is_there(tmp_path, monkeypatch):
    sync = fs.checkpoint.storage._sync_folder

    def fail(folder):
        sync(folder)
        if folder == str(tmp_path) and steps(tmp_path):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fs.checkpoint.storage, "_sync_folder", fail)

    def run(comm):
        text = r"step-0000000001-\w+: the checkpoint is written and can be loaded, but .*synced: Input/output error.*power cut"
        with pytest.raises(fs.errors.FsharpError, match=text):
            save(tmp_path, 1, comm)

    simulate(TWO, run)
    assert latest_step(tmp_path) == 1
    assert left_behind(tmp_path) == []


def test_two_jobs_that_save_under_one_root(tmp_path):
    """Without Savers neither removes what is the other's."""

    def run(comm):
        for step in range(3):
            save(tmp_path, step + 10 * comm.rank)  # each by itself

    processes(TWO, run)
    assert sorted(steps(tmp_path)) == [0, 1, 2, 10, 11, 12]
    for found in fs.checkpoint.list_checkpoints(tmp_path):
        step_in(found)
    assert left_behind(tmp_path) == []


def test_two_savers_of_one_process(tmp_path, monkeypatch):
    saver = fs.checkpoint.Saver(tmp_path, ONE)
    saver.save(tree_of(1, ONE), step=1)
    with pytest.raises(CheckpointError, match=r"another Saver is still writing into .*close\(\) that one"):
        fs.checkpoint.Saver(tmp_path, ONE)
    saver.close()
    fs.checkpoint.Saver(tmp_path, ONE).close()
    assert latest_step(tmp_path) == 1


def test_an_interrupted_wait_leaves_the_memory_of_the_save_alone(tmp_path, monkeypatch):
    saver = fs.checkpoint.Saver(tmp_path, ONE)
    saver.save(tree_of(1, ONE), step=1)
    take = Outcome.take_result
    interrupts = [KeyboardInterrupt()]
    monkeypatch.setattr(
        Outcome, "take_result", lambda self: (_ for _ in ()).throw(interrupts.pop()) if interrupts else take(self)
    )
    with pytest.raises(KeyboardInterrupt):
        saver.wait()
    for step in (2, 3):
        saver.save(tree_of(step, ONE), step=step)
    saver.close()
    assert [step_in(found) for found in fs.checkpoint.list_checkpoints(tmp_path)] == [3, 2, 1]


@pytest.mark.parametrize("act", ["save", "Saver"])
def test_a_root_that_is_a_file(tmp_path, act):
    root = tmp_path / "root"
    root.write_text("")
    with pytest.raises(CheckpointError, match=r"root: is a file, expected a folder"):
        save(root, 1) if act == "save" else fs.checkpoint.Saver(root, ONE)
    assert fs.checkpoint.latest(root) is None
    with pytest.raises(CheckpointError, match=r"root: this is not a safetensors file.* begins with b''"):
        fs.checkpoint.load(root, tree_of(0, ONE), comm=ONE)


@mounts
def test_a_read_only_root(tmp_path):
    with mounted(tmp_path, "size=8m") as root:
        fs.checkpoint.to_dcp(save(root, 1), tmp_path / "dcp")
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        saver, convert = lambda: fs.checkpoint.Saver(root, ONE), lambda: fs.checkpoint.from_dcp(tmp_path / "dcp", root)
        for act in (lambda: save(root, 2), saver, convert):
            with pytest.raises(CheckpointError, match=rf"{root}.*cannot be written: Read-only file system"):
                act()
        assert latest_step(root) == 1


@mounts
def test_what_cannot_be_removed_is_not_said_to_be(tmp_path):
    with mounted(tmp_path, "size=8m") as root:
        for step in (1, 2):
            save(root, step)
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        with pytest.raises(CheckpointError, match="cannot be removed: Read-only file system"):
            fs.checkpoint.prune(root, keep=1)
        assert steps(root) == [2, 1]


@mounts
@pytest.mark.parametrize("blind", [0, 1])
def test_a_rank_that_does_not_see_the_folder(tmp_path, blind):
    root = tmp_path / "root"
    processes(TWO, lambda comm: save(root, 1, comm))

    def run(comm):
        path = next(Path(root).glob("step-*"))  # as another rank may have been told it
        if comm.rank == blind:
            assert ctypes.CDLL(None, use_errno=True).unshare(0x20000) == 0  # CLONE_NEWNS of <sched.h>
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
        with pytest.raises(fs.errors.FsharpError, match="has to be in a file system that all ranks share"):
            save(root, 2, comm)
        with pytest.raises(fs.errors.FsharpError, match="there is no checkpoint here"):
            fs.checkpoint.load(path, tree_of(0, comm), comm=comm)

    processes(TWO, run)
    assert latest_step(root) == 1
    assert left_behind(root) == []


def test_a_relative_root_stays_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    found = save("runs/a/", 1)
    with fs.checkpoint.Saver("runs/a", ONE) as saver:
        monkeypatch.chdir("elsewhere")
        saver.save(tree_of(2, ONE), step=2)
    assert steps(tmp_path / "runs" / "a") == [2, 1]
    assert step_in(found) == 1
    assert os.listdir() == []


def test_names_of_any_script_and_five_thousand_tensors(tmp_path):
    names = ["größe", "权重", "w/../../x", "a\0b", "", "\U0001f600", "manifest.json", *map(str, range(5000))]
    tree = {name: torch.full((i % 3,), i) for i, name in enumerate(names)}
    found = fs.checkpoint.save(tmp_path, tree, step=1, comm=ONE)
    assert set(fs.checkpoint.verify(found.path).tensor_names) == set(names)
    got = fs.checkpoint.load(tmp_path, {name: torch.empty_like(x) for name, x in tree.items()}, comm=ONE)
    assert all(torch.equal(got[name], tree[name]) for name in names)
    assert sorted(os.listdir(found.path)) == [MANIFEST_NAME, FILE]


def test_keys_of_a_config_are_text_when_it_comes_back(tmp_path):
    assert save(tmp_path, 1, config={10: "a", 9: ("b", None)}).config == {"10": "a", "9": ["b", None]}
    with pytest.raises(CheckpointError, match="'1' appears twice"):
        save(tmp_path, 2, config={1: "a", "1": "b"})


def test_a_link_to_a_checkpoint_is_pruned_without_what_it_points_at(tmp_path):
    original = save(tmp_path / "a", 1)
    link = tmp_path / "b" / Path(original.path).name
    link.parent.mkdir()
    link.symlink_to(original.path)
    save(tmp_path / "b", 2)
    assert steps(tmp_path / "b") == [2, 1]
    assert fs.checkpoint.prune(tmp_path / "b", keep=1) == [str(link)]
    assert os.listdir(tmp_path / "b") == [Path(fs.checkpoint.latest(tmp_path / "b").path).name]
    assert step_in(original) == 1


def test_a_prune_that_is_killed_leaves_checkpoints_that_are_complete(tmp_path):
    def prune(comm, at):
        calls = DiesAt(at)
        fs.checkpoint.prune(tmp_path, keep=1)
        return calls.count

    def two_checkpoints():
        for step in (1, 2):
            save(tmp_path, step)

    two_checkpoints()
    [num_calls] = processes(fs.Mesh({"dp": 1}), lambda comm: prune(comm, -1))
    assert num_calls > 3
    for at in range(num_calls):
        two_checkpoints()
        with pytest.raises(CommError, match="failed"):
            processes(fs.Mesh({"dp": 1}), lambda comm, at=at: prune(comm, at))
        assert all(step_in(found) for found in fs.checkpoint.list_checkpoints(tmp_path))
        assert latest_step(tmp_path) == 2
    remove_incomplete(tmp_path)
    assert left_behind(tmp_path) == []


ID = "0123456789abcdef"
WHOLE = encode_header([], header_metadata(ID, 0))


@pytest.mark.parametrize("suffix", ["partial", "removed", "partial.removed"])
@pytest.mark.parametrize("data", [b"", WHOLE[:5], WHOLE[:30], WHOLE])
def test_the_next_saver_removes_what_was_left(tmp_path, suffix, data):
    save(tmp_path, 1)
    left = tmp_path / f".step-0000000009-{ID}.{suffix}"
    left.mkdir()
    (left / FILE).write_bytes(data)
    (left / MANIFEST_NAME).write_bytes(b'{"form')
    (tmp_path / "notes.txt").write_text("not ours")
    fs.checkpoint.Saver(tmp_path, ONE).close()
    assert left_behind(tmp_path) == [str(tmp_path / "notes.txt")]
    assert latest_step(tmp_path) == 1


@pytest.mark.parametrize(
    "folder", [f".step-0000000009-{ID}.partial", f".step-0000000009-{ID}.removed", f"step-0000000009-{ID}"]
)
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("notes.txt", b""),
        (FILE, b"a file of another program"),
        (FILE, encode_header([], header_metadata("f" * 16, 0))),
        (MANIFEST_NAME + "/own", b"{}"),
        ("rank-00000.safetensors.bak", WHOLE),
    ],
)
def test_a_saver_leaves_what_no_save_has_made(tmp_path, caplog, folder, name, data):
    save(tmp_path, 1)
    own = tmp_path / folder / name
    own.parent.mkdir(parents=True)
    own.write_bytes(data)
    (tmp_path / folder / "rank-00001.safetensors").write_bytes(WHOLE)
    with caplog.at_level("WARNING", logger="fsharp"):
        fs.checkpoint.Saver(tmp_path, ONE).close()
    assert own.read_bytes() == data
    assert (f"{folder}: left alone" in caplog.text) == (name != MANIFEST_NAME + "/own" or folder.startswith("."))


def test_in_a_file_system_a_checkpoint_without_its_manifest_is_left(tmp_path):
    """As one that is being copied, or that somebody has taken apart: a save leaves none under this name."""
    path = Path(save(tmp_path, 1).path)
    (path / MANIFEST_NAME).unlink()
    fs.checkpoint.Saver(tmp_path, ONE).close()
    assert left_behind(tmp_path) == [str(path)]


def test_names_of_a_save_are_synced_in_the_folders_that_have_them(tmp_path, monkeypatch):
    """A name is there to stay once its folder was synced after it was made: those of the folders above the root as well."""
    synced, made, opened, clock = {}, {}, {}, itertools.count()

    def noted(name, note):
        call = getattr(os, name)

        def act(*args, **options):
            result = call(*args, **options)
            note(result, *args)
            return result

        monkeypatch.setattr(os, name, act)

    noted("mkdir", lambda _, path, *rest: made.update({path: next(clock)}))
    noted("rename", lambda _, source, target: made.update({target: next(clock)}))
    noted("open", lambda file, path, *rest: opened.update({file: path}))
    noted("fsync", lambda _, file: synced.update({opened[file]: next(clock)}))
    found = fs.checkpoint.save(tmp_path / "a" / "b" / "root", {"x": torch.ones(3)}, step=1, comm=ONE)
    monkeypatch.undo()
    expected = [str(tmp_path / name) for name in ("a", "a/b", "a/b/root")] + [found.path]
    assert made.keys() >= set(expected)
    for path in expected:
        assert synced.get(os.path.dirname(path), -1) > made[path], path


def forge(path, body):
    (path / MANIFEST_NAME).write_bytes(signed(body))


def plain(shape, chunks):
    return {"tensors": {"plain": {"dtype": "int64", "shape": shape, "chunks": chunks}}}


def file(name):
    return {"files": [{"name": name, "nbytes": 1, "xxh3_128": "0" * 32}]}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (plain([1 << 40, 1 << 40], []), "is not a shape"),
        (plain([0, 1 << 61, 1 << 61], []), "is not a shape"),
        (plain([1] * 2000, [[0, 0, 1]]), "is not a shape"),
        (plain([1 << 61], [[0, 0, 1 << 61]]), "'plain' would have more bytes in rank-00000.safetensors than that has"),
        (plain([22], [[0, 0, 11], [0, 11, 22]]), "'plain' has two chunks in one file"),
        (plain([11], [[1, 0, 11]]), "there are 1 files"),
        (plain([11], [[0, 0, 5]]), "cover 5 of its 11 elements"),
        (plain([11], [[0, 0, 5], [0, 4, 11]]), "do not tile it"),
        ({"created": float("nan")}, "nan is not a time"),
        ({"created": float("inf")}, "inf is not a time"),
        ({"step": -1}, "-1 is not a count"),
        (file("../x"), "'../x' is not a plain file name"),
        (file("/etc/passwd"), "is not a plain file name"),
        ({"aliases": {"y": "nowhere"}}, "'y' is tied to 'nowhere'"),
        ({"version": 2}, r"version 2, expected 1\. Update fsharp"),
    ],
)
def test_manifests_that_cannot_be(tmp_path, fields, match):
    path = Path(save(tmp_path, 1).path)
    forge(path, json.loads((path / MANIFEST_NAME).read_bytes()) | fields)
    with pytest.raises(CheckpointError, match=match):
        fs.checkpoint.open_checkpoint(path)
    assert fs.checkpoint.latest(tmp_path) is None


def test_elements_across_blocks_are_refused_in_files_that_have_digests(tmp_path):
    """Nobody who writes with digests puts them so, and whoever reads in blocks would cut one."""
    path = Path(save(tmp_path, 1).path)
    body = json.loads((path / MANIFEST_NAME).read_bytes())
    tensors = [fs.checkpoint.shard_file.StoredTensor(name, torch.uint8, (size,)) for name, size in (("a", 3), ("x", 8))]
    header = encode_header(tensors, {"save_id": body["save_id"]})
    header = header.replace(b'"dtype":"U8","shape":[8]', b'"dtype":"F32","shape":[2]', 1)
    header = struct.pack("<Q", len(header) - 8) + header[8:]
    file = bytearray()
    write_file(file.extend, header, iter([torch.zeros(3, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)]))
    (path / FILE).write_bytes(file)
    body |= {"aliases": {}, "values": {}, "tensors": {"x": {"dtype": "float32", "shape": [2], "chunks": [[0, 0, 2]]}}}
    forge(path, vouching_for(body, bytes(file), len(header)))
    with pytest.raises(CheckpointError, match="'x' begins at byte 3, within an element"):
        fs.checkpoint.verify(path)


def test_a_pipe_put_there_after_the_look_does_not_block(tmp_path, monkeypatch):
    found = save(tmp_path, 1)
    [file] = rank_files(Path(found.path))
    found.tensor("plain")
    size = file.stat().st_size
    file.unlink()
    os.mkfifo(file)
    monkeypatch.setattr(fs.checkpoint.storage.LocalStorage, "nbytes", lambda self, path: size)
    with pytest.raises(CheckpointError, match=f"{FILE}: cannot be read"):
        found.tensor("plain")


def as_safetensors(folder, data):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)


def in_a_manifest(folder, data):
    (folder / MANIFEST_NAME).write_bytes(data)


def in_an_index(folder, data):
    (folder / "model.safetensors.index.json").write_bytes(data)
    as_safetensors(folder, b"{}")


BRACKETS = b'{"a":[' + b"[]," * (6 << 20) + b"0]}"


@pytest.mark.parametrize(
    ("write", "data", "match"),
    [
        (in_a_manifest, BRACKETS, "18,874,377 bytes, expected at most 16,77"),
        (in_an_index, BRACKETS, "18,874,377 bytes, expected at most 16,77"),
        (in_a_manifest, BRACKETS[: 1 << 20], "brackets in 1,048,576 bytes"),
        (in_an_index, BRACKETS[: 1 << 20], "brackets in 1,048,576 bytes"),
        (as_safetensors, BRACKETS, "brackets in 18,874,377 bytes"),
        (in_a_manifest, b"[" * 10_000, "the manifest is damaged: RecursionError"),
    ],
)
def test_files_of_brackets_are_refused_before_they_take_memory(tmp_path, write, data, match, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda text, **_: pytest.fail("parsed") if len(text) > 10_000 else loads(text, **_))
    write(tmp_path, data)
    with pytest.raises(CheckpointError, match=match):
        fs.checkpoint.open_checkpoint(tmp_path)


loads = json.loads


def test_a_config_that_a_manifest_has_no_room_for_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected at most 16,8.*twice the size of the files that it describes"):
        fs.checkpoint.save(tmp_path, tree_of(1, ONE), step=1, comm=ONE, config="x" * (17 << 20))
    assert left_behind(tmp_path) == []
    fs.checkpoint.save(tmp_path, {"x": torch.zeros(1 << 20)}, step=1, comm=ONE, config="x" * (17 << 20))


def test_a_header_that_is_longer_than_its_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 90 << 20) + b"{}")
    with pytest.raises(CheckpointError, match="its header would have 94,371,840 bytes"):
        fs.checkpoint.open_checkpoint(tmp_path)
