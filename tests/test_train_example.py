"""The training example, run as a person runs it."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fsharp as fs
from examples.gpt.data import windows
from fsharp.report.reading import read_log
from tests.forked_python import run_forked

ROOT = Path(__file__).parents[1]
IMPORTS = "import matplotlib.pyplot, rich.progress, tyro"
TINY = ["--steps", "60", "--dim", "32", "--layers", "2", "--heads", "2", "--context", "32", "--batch", "4"]
TINY += ["--eval-bytes", "2048", "--sample-bytes", "8", "--exact-clip"]
KEYS = {
    "val_bits_per_byte", "bigram_bits_per_byte", "tokens_per_s", "bytes_at_rest", "bytes_unsharded", "strategy",
    "world_size", "steps", "num_params", "train_seconds",
}  # fmt: skip


def cli(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.gpt", *options]
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 250}
    return run_forked(lambda: subprocess.run(command, **options), imports=IMPORTS)


def train(out: Path, *options: str) -> dict[str, object]:
    done = cli(*TINY, "--out", str(out), *options)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # no control characters where there is no terminal
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) >= KEYS
    return result


def test_the_targets_of_one_window_share_no_memory_with_its_inputs():
    """An evaluation marks the targets of windows that do not count."""
    found = windows(torch.arange(9, dtype=torch.uint8), torch.tensor([2]), 4)
    found["targets"][:] = -100
    assert found["inputs"].tolist() == [[2, 3, 4, 5]]


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return train(tmp_path_factory.mktemp("zero3"))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What came of a run that Ctrl-C has ended, which sends SIGINT to the launcher and the workers, and that went on."""
    out = tmp_path_factory.mktemp("resumed")
    steps = [*TINY, "--save-every", "1000", "--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "examples.gpt", *steps]

    def interrupt() -> int:
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step "):
                    os.killpg(process.pid, signal.SIGINT)
                    break
            process.communicate(timeout=250)
        return process.returncode

    assert run_forked(interrupt, imports=IMPORTS)
    saved = fs.checkpoint.latest(out / "zero3-2" / "checkpoints")
    assert saved is not None
    assert 0 < saved.step < 60
    done = cli(*steps)
    assert f"continues after {saved.step} steps" in done.stdout
    assert "\x1b" not in done.stdout  # no control characters where there is no terminal
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
def test_a_run_that_is_interrupted_goes_on_reports_and_writes(resumed: dict[str, object]) -> None:
    assert set(resumed) >= KEYS
    assert (resumed["strategy"], resumed["world_size"], resumed["steps"]) == ("zero3", 2, 60)
    assert resumed["bytes_at_rest"] == resumed["bytes_at_rest_predicted"]
    assert resumed["bytes_at_rest"] <= resumed["bytes_unsharded"] * 0.51
    folder = Path(str(resumed["folder"]))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [*(("train", step) for step in range(1, 61)), ("eval", 60)]
    assert set(rows[0]) >= {"loss", "bits_per_byte", "tokens_per_s", "lr", "grad_norm", "elapsed"}
    assert rows[-1]["bits_per_byte"] == resumed["val_bits_per_byte"]
    log = read_log(folder)
    assert list(log.series["loss"]) == list(range(60))
    assert [step for step, _, _ in log.starts][-1] > 0, "it was interrupted"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_a_run_that_is_interrupted_has_the_bits_of_one_that_is_not(
    zero3: dict[str, object], resumed: dict[str, object]
) -> None:
    assert resumed["val_bits_per_byte"] == zero3["val_bits_per_byte"]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("strategy", "nproc"),
    [("ddp", 2), ("zero1", 2), ("zero2", 2), ("hsdp", 4), ("hfsdp", 4), ("hfsdp", 2), ("zero3", 1), ("ddp", 1)],
)
def test_every_strategy_learns_the_same(zero3: dict[str, object], tmp_path: Path, strategy: str, nproc: int) -> None:
    result = train(tmp_path, "--strategy", strategy, "--nproc", str(nproc))
    assert result["world_size"] == nproc
    assert result["bytes_at_rest"] == result["bytes_at_rest_predicted"]
    if nproc == 2:
        assert result["val_bits_per_byte"] == zero3["val_bits_per_byte"]
        assert result["bytes_at_rest"] > zero3["bytes_at_rest"]
    else:  # the same batch, but sums of other parts
        assert result["val_bits_per_byte"] == pytest.approx(zero3["val_bits_per_byte"], abs=1e-4)


@pytest.mark.deep
@pytest.mark.parametrize("options", [["--microbatches", "2"], ["--release"], ["--dtype", "bfloat16"], ["--temperature", "0"]])
def test_options_that_change_no_more_than_rounding(zero3: dict[str, object], tmp_path: Path, options: list[str]) -> None:
    result = train(tmp_path, *options)
    assert result["val_bits_per_byte"] == pytest.approx(zero3["val_bits_per_byte"], abs=2e-2)
    assert result["bytes_at_rest"] == result["bytes_at_rest_predicted"]


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_a_run_of_given_time_stops_on_all_ranks_and_another_goes_on_with_it(tmp_path: Path) -> None:
    timed = [*TINY[2:], "--seconds", "2", "--out", str(tmp_path)]
    done = cli(*timed, "--name", "first")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["steps"] >= 10
    assert json.loads((tmp_path / "first" / "summary.json").read_text()) == result

    done = cli(*timed, "--name", "first", "--resume", str(tmp_path / "nowhere"))
    assert done.returncode
    assert "has no checkpoint to continue from" in done.stderr
    assert fs.checkpoint.latest(tmp_path / "first" / "checkpoints").step == result["steps"]

    done = cli(*timed, "--name", "second", "--resume", str(tmp_path / "first"), "--strategy", "zero1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] > result["steps"]


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_a_run_goes_on_under_another_strategy_and_with_other_ranks(tmp_path: Path) -> None:
    train(tmp_path, "--name", "first", "--save-every", "2")
    shutil.rmtree(sorted((tmp_path / "first" / "checkpoints").iterdir())[-1])  # that of the last step
    results = [
        train(tmp_path / name, "--strategy", name, "--nproc", nproc, "--resume", str(tmp_path / "first"))
        for name, nproc in (("zero3", "2"), ("zero1", "2"), ("hfsdp", "4"))
    ]
    bits = [result["val_bits_per_byte"] for result in results]
    assert bits[0] == bits[1] == pytest.approx(bits[2], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--strategy hsdp --nproc 3 --batch 6", "--strategy hsdp needs an even --nproc (outer=2 x inner=nproc/2), got 3."),
        ("--dim 30 --heads 4", "--dim 30 does not divide into --heads 4"),
        ("--batch 6 --nproc 4", "--batch 6 does not divide by --nproc 4"),
        ("--steps 0", "--steps is 0, expected more than 0."),
        ("--strategy zero4", "'zero2', 'zero3'"),
    ],
)
def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str], options: str, message: str) -> None:
    from examples.gpt.options import parse

    with pytest.raises(SystemExit, match="2"):
        parse(options.split())
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from examples.gpt.options import parse

    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        parse(["--out", str(tmp_path / "file")])
    assert "zero3-2 cannot be made: Not a directory." in capsys.readouterr().err


def test_launcher_starts_nothing_on_a_bad_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt", "--strategy", "hfsdp", "--nproc", "3", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("examples.gpt", run_name="__main__")  # as python -m
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --strategy hfsdp needs an even --nproc")
    assert not (tmp_path / "out").exists()


@pytest.mark.deep
def test_failing_worker_fails_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "zero3-2" / "metrics.jsonl").mkdir(parents=True)
    done = cli(*TINY, "--out", str(tmp_path))  # only rank 0 writes, the other one waits for it
    assert done.returncode == 1
    assert "error: rank 0 of 2 failed: IsADirectoryError" in done.stderr
