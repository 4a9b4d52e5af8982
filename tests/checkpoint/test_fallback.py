"""From a damaged checkpoint all ranks go back to the one before, and what is damaged is set aside with a warning."""

import errno
import logging
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import fsharp as fs
from fsharp.checkpoint import loading
from fsharp.checkpoint.manifest import MANIFEST_NAME
from fsharp.checkpoint.storage import LocalStorage
from fsharp.errors import AgreementError, CheckpointError, FsharpError, TreeError
from fsharp.testing import processes, simulate
from tests.checkpoint.refusing import refusing

TWO = fs.Mesh({"dp": 2})
ONE = fs.SingleComm()


def tree_of(comm, step):
    tree = {"w": torch.arange(6000.0) + step, "b": torch.full((3,), float(step))}
    return {"p": fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm), "n": step}


def saved(root, steps, mesh=TWO):
    """Paths of checkpoints of some steps, in the order in which they were saved."""
    return [
        simulate(mesh, lambda comm, s=step: fs.checkpoint.save(root, tree_of(comm, s), step=s, comm=comm).path)[0]
        for step in steps
    ]


def flip(path, at=-4000):
    """Change a bit among the elements of a rank's file."""
    data = bytearray(Path(path).read_bytes())
    data[at] ^= 1
    Path(path).write_bytes(data)


def loaded(root, **options):
    """What ranks have loaded: a number, and values as they were saved with this number."""

    def act(comm):
        got = fs.checkpoint.load(root, tree_of(comm, 0), comm=comm, **options)
        assert torch.equal(fs.full_tree(got["p"], comm=comm)["w"], torch.arange(6000.0) + got["n"])
        return got["n"]

    [step, other] = simulate(TWO, act)
    assert step == other
    return step


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_sees_sends_all_of_them_back(tmp_path, caplog, rank, donate):
    paths = saved(tmp_path, [1, 2, 3, 4])
    for path in paths[2:]:
        flip(f"{path}/rank-0000{rank}.safetensors")
    with caplog.at_level(logging.WARNING, "fsharp"):
        assert loaded(tmp_path, donate=donate) == 2
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, "one rank says so"
    for text, path in zip(warnings, reversed(paths[2:]), strict=True):
        assert text.startswith(f"{path} is damaged, set aside as {path}.damaged: ")
        assert f"rank-0000{rank}.safetensors, written by rank {rank}: 1 blocks" in text
        assert text.endswith(f"Used instead: {paths[1]}.")
        assert not os.path.exists(path)
        with pytest.raises(CheckpointError, match="are damaged"):
            fs.checkpoint.verify(f"{path}.damaged")  # kept as it was
    assert fs.checkpoint.latest(tmp_path).step == 2
    fs.checkpoint.Saver(tmp_path, ONE, keep=1).close()
    assert os.path.exists(f"{paths[3]}.damaged")


def test_no_value_of_a_damaged_checkpoint_is_kept_for_a_leaf_that_an_older_one_lacks(tmp_path):
    """With donate=True the damaged checkpoint has overwritten the value to keep, which the load returned as the one given."""
    fs.checkpoint.save(tmp_path, {"w": torch.full((9000,), 1.0)}, step=1, comm=ONE)
    tree = {"head": torch.full((3,), 5.0), "w": torch.full((9000,), 2.0)}
    path = simulate(TWO, lambda comm: fs.checkpoint.save(tmp_path, tree, step=2, comm=comm).path)[0]
    rank = int(fs.checkpoint.open_checkpoint(path).manifest.tensors["w"].chunks[0].file)
    flip(f"{path}/rank-0000{rank}.safetensors")

    def act(comm, donate):
        like = {"head": torch.full((3,), 7.0), "w": torch.zeros(9000)}
        got = fs.checkpoint.load(tmp_path, like, comm=comm, strict=False, donate=donate)
        return got["w"][0].item(), got["head"].tolist()

    with pytest.raises(CheckpointError, match=rf"strict=False, donate=True.*rank-0000{rank}.* are damaged(.|\n)*donate=False"):
        simulate(TWO, lambda comm: act(comm, True))
    assert os.path.exists(path)
    assert simulate(TWO, lambda comm: act(comm, False)) == [(1.0, [7.0] * 3)] * 2


def test_what_one_rank_alone_cannot_read_is_an_error_of_all_ranks_and_no_damage(tmp_path):
    """Permission, a stale handle, a disk that fails, and a mount that this host lacks prove nothing against the bytes."""
    root = str(tmp_path)
    paths = saved(root, [1, 2])
    codes = (errno.EACCES, errno.ESTALE, errno.EIO, errno.ENOENT)
    parts = ("step-0000000002", "rank-00001")
    cases = [(rank, code, part) for rank in (0, 1) for code in codes for part in parts if (rank, code) != (0, errno.ENOENT)]

    def run(comm):
        said = []
        for rank, code, part in cases:
            with refusing(code, part) if comm.rank == rank else nullcontext():
                try:
                    said.append(f"loaded {fs.checkpoint.load(root, tree_of(comm, 0), comm=comm)['n']}")
                except (CheckpointError, AgreementError) as error:
                    said.append(str(error))
        return said

    mine, others = processes(TWO, run)
    for (rank, code, part), text, other in zip(cases, mine, others, strict=True):
        assert text == other, "all ranks raise alike"
        assert f"rank {rank} says:" in text
        assert re.search(f"{paths[1]}.*({os.strerror(code)}|there is no checkpoint here|missing)", text), (code, part, text)
    assert sorted(os.listdir(root)) == sorted(map(os.path.basename, paths))


def test_an_older_checkpoint_that_cannot_be_read_stops_no_load_and_no_saver(tmp_path, caplog):
    [first] = saved(tmp_path, [1])
    with fs.checkpoint.Saver(tmp_path, ONE, keep=1) as saver, refusing(errno.EACCES, os.path.basename(first)):
        saver.save(tree_of(ONE, 2), step=2)
        saver.wait()
        assert fs.checkpoint.latest(tmp_path).step == 2
        with caplog.at_level(logging.WARNING, "fsharp"):
            assert [found.step for found in fs.checkpoint.list_checkpoints(tmp_path)] == [2]
    assert "manifest.json: cannot be read: Permission denied" in caplog.text
    assert os.path.exists(first)


def test_the_newest_checkpoint_that_cannot_be_read_is_not_passed_over(tmp_path):
    saved(tmp_path, [1, 2])
    with refusing(errno.ESTALE, "step-0000000002"), pytest.raises(CheckpointError, match=r"step-0000000002.*Stale file handle"):
        fs.checkpoint.latest(tmp_path)


def test_a_checkpoint_that_another_process_removes_once_it_is_open_counts_as_damaged(tmp_path, monkeypatch):
    """Its summary is known, so it was opened without its manifest."""
    _, second = saved(tmp_path, [1, 2])
    fs.checkpoint.latest(tmp_path)
    real = loading.open_checkpoint

    def open_and_remove(path):
        found = real(path)
        if path == second:
            shutil.rmtree(path, ignore_errors=True)
        return found

    monkeypatch.setattr(loading, "open_checkpoint", open_and_remove)
    assert loaded(tmp_path) == 1


def test_if_all_are_damaged_nothing_is_renamed_and_all_are_named(tmp_path):
    paths = saved(tmp_path, [1, 2])
    for path in paths:
        flip(f"{path}/rank-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint can be read.*step-0000000002.*step-0000000001"):
        loaded(tmp_path)
    assert all(os.path.exists(path) for path in paths)


def test_a_checkpoint_that_is_asked_for_by_its_path_is_not_replaced_by_another(tmp_path):
    _, second = saved(tmp_path, [1, 2])
    flip(f"{second}/rank-00001.safetensors")
    with pytest.raises(FsharpError, match=r"rank-00001.*are damaged.*step 1.*is complete"):
        loaded(second)
    assert os.path.exists(second)


def test_another_tree_is_an_error_and_no_damage(tmp_path):
    [path] = saved(tmp_path, [1])
    with pytest.raises(TreeError, match="'q'"):
        simulate(TWO, lambda comm: fs.checkpoint.load(tmp_path, {"q": torch.zeros(3)}, comm=comm))
    assert os.path.exists(path)


def test_a_rank_that_fails_otherwise_while_another_sees_damage_renames_nothing(tmp_path, monkeypatch):
    paths = saved(tmp_path, [1, 2])
    flip(f"{paths[1]}/rank-00000.safetensors")
    read = LocalStorage.read

    def failing(self, path, start, into):
        if path == f"{paths[1]}/rank-00001.safetensors":
            raise MemoryError("no room")
        read(self, path, start, into)

    monkeypatch.setattr(LocalStorage, "read", failing)
    with pytest.raises((FsharpError, MemoryError), match=r"no room|are damaged"):
        loaded(tmp_path)
    assert all(os.path.exists(path) for path in paths)


def test_what_cannot_be_renamed_is_said(tmp_path, caplog, monkeypatch):
    _, second = saved(tmp_path, [1, 2])
    flip(f"{second}/rank-00001.safetensors")

    def refuse(self, path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(LocalStorage, "set_aside_damaged", refuse)
    assert loaded(tmp_path) == 1
    assert "and could not be renamed ([Errno 1] Operation not permitted)" in caplog.text


class TokenExpiredError(Exception):
    """An error of an object store, which is no OSError."""


def test_an_error_of_rank_0_in_the_choice_of_a_checkpoint_is_one_of_all_ranks(tmp_path, monkeypatch):
    saved(tmp_path, [1])

    def refuse(*_):
        raise TokenExpiredError("the token has expired")

    monkeypatch.setattr(loading, "newest_except", refuse)

    def run(comm):
        with pytest.raises(CheckpointError, match="rank 0 says: the token has expired"):
            fs.checkpoint.load(tmp_path, tree_of(comm, 0), comm=comm)

    simulate(TWO, run)


def test_an_error_after_damage_or_in_the_renaming_leaves_no_rank_alone(tmp_path, monkeypatch, caplog):
    _, second = saved(tmp_path, [1, 2])
    flip(f"{second}/rank-00001.safetensors")

    def refuse(*_):
        raise TokenExpiredError("the token has expired")

    monkeypatch.setattr(loading, "open_if_complete", refuse)
    monkeypatch.setattr(LocalStorage, "set_aside_damaged", refuse)
    assert loaded(tmp_path) == 1
    assert "and could not be renamed (the token has expired)" in caplog.text


@pytest.mark.parametrize("name", ["back", "back[1]"])
def test_in_an_object_store_too(name):
    import fsspec

    files = fsspec.filesystem("memory")
    for step in (1, 2):
        fs.checkpoint.save(f"memory://{name}", {"x": torch.full((3000,), float(step))}, step=step, comm=ONE)
    [path] = [each["name"] for each in files.ls(f"/{name}") if "step-0000000002" in each["name"]]
    data = bytearray(files.cat_file(f"{path}/rank-00000.safetensors"))
    data[5000] ^= 1
    files.pipe_file(f"{path}/rank-00000.safetensors", bytes(data))
    assert fs.checkpoint.load(f"memory://{name}", {"x": torch.zeros(3000)}, comm=ONE)["x"][0] == 1
    assert [found.step for found in fs.checkpoint.list_checkpoints(f"memory://{name}")] == [1]
    assert files.exists(f"{path}.damaged/{MANIFEST_NAME}")
