"""The command fsharp: what it prints, and its exit status."""

import sys

import pytest
import torch

import fsharp as fs
from fsharp.cli import main
from tests.gpt_like import make_params


def state(seed):
    return {"params": make_params(seed), "step": seed, "name": "a run"}


@pytest.fixture
def root(tmp_path):
    for step in (1, 2, 3):
        fs.checkpoint.save(tmp_path / "runs", state(step), step=step, comm=fs.SingleComm(), metric=1 / step, config={"lr": 0.1})
    return tmp_path / "runs"


def path_of(root, step):
    return next(each.path for each in fs.checkpoint.checkpoints(root) if each.step == step)


def run(capsys, *argv):
    """Exit status, and lines of stdout and of stderr."""
    status = main(list(map(str, argv)))
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def test_list(root, capsys):
    status, lines, _ = run(capsys, "ckpt", "list", root)
    assert status == 0
    assert lines[0].split() == ["step", "saved,", "UTC", "ranks", "tensors", "bytes", "metric", "path"]
    assert [line.split()[0] for line in lines[1:]] == ["3", "2", "1"]
    assert lines[1].split()[-2:] == ["0.333333", path_of(root, 3)]
    (root / "step-4-half.partial").mkdir()
    assert len(run(capsys, "ckpt", "list", root)[1]) >= 4


def test_a_folder_without_checkpoints(tmp_path, capsys):
    assert run(capsys, "ckpt", "list", tmp_path)[:2] == (0, ["no complete checkpoint"])


def test_show(root, capsys):
    status, lines, _ = run(capsys, "ckpt", "show", path_of(root, 2))
    assert status == 0
    rows = [line.split(maxsplit=2) for line in lines if line]
    assert ["step", "2"] in [row[:2] for row in rows]
    assert ["params.embed", "float32", str(list(make_params()["embed"].shape))] in rows
    assert ["name", "'a", "run'"] in rows


def test_verify_names_the_damaged_tensor(root, capsys):
    first, second = path_of(root, 1), path_of(root, 2)
    assert run(capsys, "ckpt", "verify", first, second)[1] == [
        f"{fs.checkpoint.open_checkpoint(x)!r} is intact" for x in (first, second)
    ]
    [file] = (root / second).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    status, lines, err = run(capsys, "ckpt", "verify", first, second)
    assert (status, lines) == (1, [])
    assert err.startswith("error: ")
    assert "damaged" in err, err


def test_diff(root, capsys):
    other = state(1)
    other["params"]["head"]["b"][3] += 0.5
    other["params"]["layers"].append({"new": torch.zeros(3)})
    other["params"]["embed"] = other["params"]["embed"].bfloat16()
    del other["params"]["layers"][0]["b"]
    other["step"] = 9
    fs.checkpoint.save(root, other, step=4, comm=fs.SingleComm())
    status, lines, _ = run(capsys, "ckpt", "diff", path_of(root, 1), path_of(root, 4))
    shape = list(other["params"]["embed"].shape)
    assert status == 0
    assert lines == [
        "- params.layers.0.b",
        "+ params.layers.2.new",
        f"~ params.embed: float32{shape} -> bfloat16{shape}",
        "~ params.head.b: the largest difference is 0.5",
        "~ step: 1 -> 9",
    ]
    assert "~ params.head.b" not in "\n".join(run(capsys, "ckpt", "diff", path_of(root, 1), path_of(root, 4), "--no-values")[1])
    assert run(capsys, "ckpt", "diff", path_of(root, 1), path_of(root, 1))[1] == ["no difference"]


def test_prune(root, capsys):
    first, second = path_of(root, 1), path_of(root, 2)
    assert run(capsys, "ckpt", "prune", root, "--keep", 1)[1] == [f"removed {first}", f"removed {second}"]
    assert run(capsys, "ckpt", "prune", root, "--keep", 1)[1] == ["nothing to remove"]
    status, _, err = run(capsys, "ckpt", "prune", root, "--keep", 0)
    assert status == 1
    assert "keep" in err


def test_a_path_that_is_no_checkpoint(tmp_path, capsys):
    status, lines, err = run(capsys, "ckpt", "show", tmp_path / "nothing")
    assert (status, lines) == (1, [])
    assert err.startswith("error: ")
    assert "nothing" in err


def test_doctor(capsys):
    status, lines, _ = run(capsys, "doctor")
    found = dict(line.split(maxsplit=1) for line in lines)
    assert status == 0
    assert found["torch"] == torch.__version__
    assert found["fsharp"] == fs.__version__
    assert "gloo" in found["backends"]


@pytest.mark.parametrize("argv", [[], ["ckpt"], ["ckpt", "lst"], ["ckpt", "prune", "x"], ["doctor", "--fix"]])
def test_a_wrong_command_line_has_status_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert capsys.readouterr().err


def test_without_tyro_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert run(capsys, "doctor") == (1, [], "error: the command needs tyro: pip install 'fsharp[cli]'\n")
