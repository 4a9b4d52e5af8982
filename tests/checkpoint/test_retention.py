"""Which checkpoints stay, by number, step, time and metric."""

import os
from pathlib import Path

import pytest
import torch

import fsharp as fs
from fsharp.checkpoint import catalog, retention, storage
from fsharp.checkpoint.manifest import MANIFEST_NAME
from fsharp.errors import CheckpointError

COMM = fs.SingleComm()
HOUR = 3600.0


@pytest.fixture
def clock(monkeypatch):
    now = [1000 * HOUR]
    monkeypatch.setattr(catalog.time, "time", lambda: now[0])
    return now


def save(root, step, **options):
    return fs.checkpoint.save(root, {"x": torch.ones(3)}, step=step, comm=COMM, **options)


def interrupt(*_):
    raise KeyboardInterrupt


def step_of(path):
    return catalog.step_in_folder_name(Path(path).name)


def steps(root):
    return sorted(found.step for found in fs.checkpoint.list_checkpoints(root))


def test_of_each_so_many_steps_the_last_stays(tmp_path):
    for step in range(300, 3901, 300):
        save(tmp_path, step)
    fs.checkpoint.prune(tmp_path, keep=1, keep_steps=1000)
    assert steps(tmp_path) == [900, 1800, 3000, 3900]
    assert fs.checkpoint.prune(tmp_path, keep=1, keep_steps=1000) == []
    save(tmp_path, 600)  # a run that has gone back replaces what it does again
    save(tmp_path, 3950)
    fs.checkpoint.prune(tmp_path, keep=1, keep_steps=1000)
    assert steps(tmp_path) == [600, 1800, 3000, 3950]


def test_of_each_so_many_hours_the_last_stays(tmp_path, clock):
    for step in range(10):
        clock[0] = (1000 + step / 2) * HOUR
        save(tmp_path, step)
    fs.checkpoint.prune(tmp_path, keep=2, keep_hours=2)
    assert steps(tmp_path) == [3, 7, 8, 9]
    with fs.checkpoint.Saver(tmp_path, COMM, keep=1, keep_hours=2) as saver:
        for step in (10, 11, 12):
            clock[0] = (1000 + step / 2) * HOUR
            saver.save({"x": torch.ones(3)}, step=step)
    assert steps(tmp_path) == [3, 7, 8, 9, 11, 12]  # 8 and 9 are not of a Saver
    fs.checkpoint.prune(tmp_path, keep=1, keep_hours=2)
    assert steps(tmp_path) == [3, 7, 11, 12]


def test_a_saver_removes_only_what_a_saver_has_saved_and_says_so(tmp_path, caplog):
    for step in (1, 2):
        save(tmp_path, step)
    with caplog.at_level("INFO", "fsharp"):
        for step in (3, 4, 5, 6):  # a run that is started again each time
            with fs.checkpoint.Saver(tmp_path, COMM, keep=2) as saver:
                saver.save({"x": torch.ones(3)}, step=step)
    assert steps(tmp_path) == [1, 2, 5, 6]
    assert len(caplog.records) == 2
    assert "keep=2" in caplog.text
    assert "step-0000000003-" in caplog.text


def test_what_is_kept_adds_up(tmp_path):
    for step, metric in zip(range(1, 9), (1.0, 5.0, 0.5, float("nan"), 3.0, 2.0, None, 9.0), strict=True):
        save(tmp_path, step, metric=metric)
    fs.checkpoint.prune(tmp_path, keep=1, best=2, keep_steps=4)
    assert steps(tmp_path) == [1, 3, 4, 8]


def test_what_is_incomplete_is_not_the_one_that_stays(tmp_path):
    paths = [save(tmp_path, step).path for step in (1, 2, 3, 4, 5)]
    os.remove(f"{paths[3]}/{MANIFEST_NAME}")
    fs.checkpoint.prune(tmp_path, keep=1, keep_steps=4)
    assert steps(tmp_path) == [3, 5]
    assert os.path.exists(paths[3])
    os.remove(f"{paths[4]}/{MANIFEST_NAME}")
    assert fs.checkpoint.prune(tmp_path, keep=1) == []
    assert steps(tmp_path) == [3]


def test_what_stays_is_not_opened_again(tmp_path, monkeypatch):
    for step in range(10, 200, 10):
        save(tmp_path, step)
    fs.checkpoint.prune(tmp_path, keep=1, keep_steps=10)
    opened = []
    real = catalog._open_complete
    monkeypatch.setattr(catalog, "_open_complete", lambda path: [opened.append(path), real(path)][1])
    assert fs.checkpoint.prune(tmp_path, keep=2, keep_steps=10) == []
    assert len(opened) == 2


def flip_a_bit(checkpoint):
    file = Path(checkpoint.path) / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def test_a_prune_leaves_one_that_is_intact_or_removes_nothing(tmp_path, caplog):
    """Sizes are right, and a bit is not: it shows only when the bytes are read."""
    for step in (1, 2, 3):
        newest = save(tmp_path, step)
    flip_a_bit(newest)
    with pytest.raises(
        CheckpointError, match=r"all checkpoints that would stay are damaged(.|\n)*step 2.*is complete(.|\n)*by hand"
    ):
        fs.checkpoint.prune(tmp_path, keep=1)
    assert steps(tmp_path) == [1, 2, 3]
    assert [step_of(path) for path in fs.checkpoint.prune(tmp_path, keep=2)] == [1]
    assert "blocks of 4,096 bytes are damaged" in caplog.text
    assert steps(tmp_path) == [2, 3]
    assert fs.checkpoint.load(tmp_path, {"x": torch.zeros(3)}, comm=COMM)["x"].tolist() == [1, 1, 1]


def test_a_prune_looks_again_if_what_would_stay_is_removed_meanwhile(tmp_path, monkeypatch):
    """Without a second look nothing would be left."""
    for step in (1, 2):
        save(tmp_path, step)
    real = retention.verify

    def verify(path):
        storage.storage_of(path).remove(path)  # as another process does
        return real(path)

    monkeypatch.setattr(retention, "verify", verify)
    assert fs.checkpoint.prune(tmp_path, keep=1) == []
    assert steps(tmp_path) == [1]


def test_a_checkpoint_to_which_a_link_points_stays(tmp_path):
    """The link may be named ``best``, or as the newest checkpoint: without what it points to nothing would be left."""
    paths = [save(tmp_path, step).path for step in (1, 2, 3)]
    (tmp_path / "best").symlink_to(Path(paths[1]).name)
    newest = tmp_path / catalog.folder_name(9, catalog.new_save_id(str(tmp_path)))
    newest.symlink_to(paths[0])
    assert fs.checkpoint.prune(tmp_path, keep=1) == [paths[2]]
    assert steps(tmp_path) == [1, 1, 2]
    (tmp_path / "best").unlink()
    assert fs.checkpoint.prune(tmp_path, keep=1) == [paths[1]]
    assert steps(tmp_path) == [1, 1]


def test_what_an_interrupted_removal_has_left_is_removed_by_the_next_prune(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(storage.shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fs.checkpoint.prune(tmp_path, keep=1)
    (tmp_path / ".step-0000000009-0123456789abcdef.removed").mkdir()
    (tmp_path / ".step-0000000009-0123456789abcdef.removed/notes.txt").touch()
    [left] = [path for path in tmp_path.iterdir() if path.name.startswith(".step-0000000001-")]
    assert fs.checkpoint.prune(tmp_path, keep=1) == [str(left)]
    assert sorted(each.name[:17] for each in tmp_path.iterdir()) == [".step-0000000009-", "step-0000000002-4"]


@pytest.mark.parametrize("options", [{"keep_steps": 0}, {"keep_hours": -1.0}, {"keep_hours": float("nan")}])
def test_what_keeps_nothing_is_refused(tmp_path, options):
    [(name, value)] = options.items()
    for act in (
        lambda: fs.checkpoint.prune(tmp_path, keep=1, **options),
        lambda: fs.checkpoint.Saver(tmp_path, COMM, **options),
    ):
        with pytest.raises(CheckpointError, match=rf"{name} is {value!r}, expected a number above 0"):
            act()


def test_a_run_keeps_by_steps(tmp_path):
    with fs.resilience.Run(tmp_path, comm=COMM, total=9, save_every=1, keep=1, keep_steps=4) as run:
        tree = run.resume({"x": torch.zeros(2)})
        for _ in run.steps():
            tree = run.end_step(tree)
    assert steps(tmp_path) == [4, 8, 9]
