"""The examples, run as a person runs them: in processes, with few steps."""

import importlib
import logging
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.forked_python import run_forked
from tests.virtual_device import accelerator as accelerator, gpu as gpu

pytestmark = pytest.mark.timeout(280)  # some compile
ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def start(*command: str, limit_s: float = 250, imports: str = "") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning:__main__", "HF_HUB_OFFLINE": "1"}
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": limit_s}
    return run_forked(lambda: subprocess.run(command, **options), imports=imports, timeout=limit_s)


def output(*command: str, limit_s: float = 250, imports: str = "") -> str:
    done = start(*command, limit_s=limit_s, imports=imports)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> None:
    """Run an example in this process, which has imported torch."""
    monkeypatch.setattr(sys, "argv", [f"examples/{name}", *options])
    monkeypatch.setattr(logging.root.manager, "disable", logging.root.manager.disable)  # some examples disable logging
    importlib.import_module("examples")  # its neighbours are found
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def numbers(text: str, pattern: str) -> list[tuple[float, ...]]:
    """What the groups of a pattern match, wherever it does."""
    found = [tuple(map(float, match.groups())) for match in re.finditer(pattern, text)]
    assert found, text
    return found


LOSSES = r"step +\d+  loss ([\d.]+)  unsharded ([\d.]+)"


def test_llama_trains_as_the_unsharded_one_and_is_loaded(tmp_path: Path) -> None:
    imports = "import sys, tyro; sys.modules['torchao'] = None; from transformers.models.llama import modeling_llama"
    text = output(*TORCHRUN, "2", "examples/finetune_llama.py", "--steps", "4", "--out", str(tmp_path), imports=imports)
    losses = numbers(text, LOSSES)
    assert losses[-1][0] < losses[0][0] - 0.3
    [(loss, norm)] = numbers(text, r"largest difference between losses: (\S+), between gradient norms: (\S+)")
    assert loss < 2e-5
    assert norm < 2e-4
    [(sharded, loaded, apart)] = numbers(
        text, r"held-out loss: ([\d.]+); after from_pretrained\(\): ([\d.]+); difference: (\S+)"
    )
    assert sharded == pytest.approx(loaded, abs=2e-6)
    assert apart < 2e-6
    assert sharded < losses[0][0] - 0.3  # those are not the initial weights
    assert {path.name for path in (tmp_path / "trained").iterdir()} == {"config.json", "model.safetensors"}


def test_sequences_that_do_not_divide_among_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes, each with a mean of its own over unequal parts: the losses differed from those of the unsharded run."""
    monkeypatch.setenv("WORLD_SIZE", "3")  # as torchrun does
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(SystemExit, match="error: a step has 8 sequences, which do not divide into equal parts for 3 processes"):
        run_here(monkeypatch, "jax_unit.py")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["functional_train_step.py", "zero4"], "error: got 'zero4' on 1 process, expected one of ddp, zero1, zero2, zero3"),
        (["functional_train_step.py", "hfsdp"], "hsdp and hfsdp need an even number of processes"),
        (["dp_sgd.py", "--rate", "0"], "error: got --rate 0.0, --clip 1.0 and --noise 1.0, expected a rate above 0"),
        (["torchdata_stream.py", "--steps", "1"], "error: --steps is 1, expected at least 2: a run is stopped after half"),
        (["accelerate_gpt2.py", "--steps", "3"], "error: --steps is 3, expected an even number: each of two epochs has half"),
        (["survive_a_kill.py", "--root", "{}"], "has 'killed-killed-0' of an earlier run: remove the folder"),
    ],
)
def test_options_without_a_meaning_are_refused_in_one_line(
    command: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killed-killed-0").touch()
    with pytest.raises(SystemExit) as ended:
        run_here(monkeypatch, *(each.format(tmp_path) for each in command))
    assert isinstance(ended.value.code, str)  # which Python prints, and ends with status 1
    assert words in ended.value.code
    assert len(ended.value.code.splitlines()) == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.deep  # tests/resilience/test_elastic.py has ranks that are killed
def test_a_rank_comes_back_and_the_others_stay() -> None:
    text = output(sys.executable, "examples/lose_a_rank.py")
    steps = {int(rank): steps for rank, steps in numbers(text, r"rank (\d): process \d+ has made (\d+) steps")}
    assert steps[2] < 10 <= min(steps[rank] for rank in (0, 1, 3))  # rank 2's last process began in the middle
    assert "equal bits: True" in text


@pytest.mark.deep
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_llama_of_transformer_engine_trains_as_the_unsharded_one(recipe: str) -> None:
    text = output(sys.executable, "examples/te_llama.py", "--steps", "4", "--recipe", recipe)
    losses = numbers(text, LOSSES)
    assert losses[-1][0] < losses[0][0] - 0.3
    [(apart,)] = numbers(text, r"largest difference between losses: (\S+)")
    assert apart < 0.03  # scales of activations are those of each rank's batch
    [(at_rest, plain)] = numbers(text, r"bytes of parameters on a rank: (\d+); of the whole model in bfloat16: (\d+)")
    assert at_rest < (0.6 if recipe == "mxfp8" else 0.35) * plain


@pytest.mark.deep
def test_a_run_is_resumed_on_other_ranks_from_the_same_bits(tmp_path: Path) -> None:
    text = output(sys.executable, "examples/resume_elsewhere.py", "--steps", "4", "--out", str(tmp_path))
    [(equal, total)] = numbers(text, r"(\d+) of (\d+) parameters and moments have the saved bits on 3 ranks under ddp")
    assert equal == total == 3 * 14
    losses = numbers(text, LOSSES)
    assert losses[-1][0] < losses[0][0]
    [(apart,)] = numbers(text, r"largest difference between losses: (\S+)")
    assert apart < 2e-6


@pytest.mark.deep
def test_llama_updated_by_optax_trains_as_in_jax_alone() -> None:
    text = output(sys.executable, "examples/train_with_optax.py", "--steps", "4")
    losses = numbers(text, LOSSES)
    assert losses[-1][0] < losses[0][0] - 0.3
    [(apart,)] = numbers(text, r"largest difference between losses: (\S+)")
    assert apart < 2e-5
    [(params, moments)] = numbers(text.replace(",", ""), r"holds (\d+) bytes of parameters and (\d+) bytes of optax's moments")
    assert moments == 2 * params


@pytest.mark.deep
def test_units_of_flax_train_as_in_jax_alone() -> None:
    text = output(sys.executable, "examples/jax_unit.py", "--steps", "6")
    losses = numbers(text, LOSSES)
    assert losses[-1][0] < losses[0][0] - 0.3
    [(apart,)] = numbers(text, r"largest difference between losses: (\S+)")
    [(modules,)] = numbers(text, r"with the trained weights: (\S+)")
    assert max(apart, modules) < 2e-5


@pytest.mark.deep
def test_mixtral_with_expert_parallelism_trains_as_the_unsharded_one() -> None:
    text = output(sys.executable, "examples/train_mixtral.py", "--steps", "3")
    losses = numbers(text, LOSSES)
    assert losses[-1][0] < losses[0][0] - 0.05
    assert re.search(r"model.layers.0.mlp.experts.own .* ep: VVV", text)
    [(loss, norm)] = numbers(text, r"largest difference between losses: (\S+), between gradient norms: (\S+)")
    assert loss < 1e-5
    assert norm < 1e-3
    [(weights,)] = numbers(text, r"trained weights: (\S+)")
    assert weights < 1e-4


@pytest.mark.deep
def test_llama_with_reentrant_checkpoints_on_four_ranks(tmp_path: Path) -> None:
    text = output(*TORCHRUN, "4", "examples/finetune_llama.py", "--steps", "4", "--reentrant", "--out", str(tmp_path))
    [(loss, norm)] = numbers(text, r"largest difference between losses: (\S+), between gradient norms: (\S+)")
    assert loss < 2e-5
    assert norm < 2e-4


@pytest.mark.parametrize(
    ("nproc", "strategy"),
    [(2, "zero2"), pytest.param(4, "hsdp", marks=pytest.mark.deep), pytest.param(2, "zero3", marks=pytest.mark.deep)],
)
@pytest.mark.deep
def test_gpt2_and_lora_train_as_the_unsharded_ones(nproc: int, strategy: str) -> None:
    options = ["--steps", "4", "--strategy", strategy, "--dtype", "float64"]
    text = output(*TORCHRUN, str(nproc), "examples/lora_gpt2.py", *options)
    full, lora = numbers(text, r"largest difference between losses: (\S+), between gradient norms: (\S+)")
    assert full[0] < 1e-6  # a norm of float32 clips
    assert full[1] < 1e-5
    assert lora[0] < 1e-9  # and here it is too small to
    assert lora[1] < 1e-6
    losses = numbers(text, LOSSES)
    assert losses[3][0] < losses[0][0] - 0.5
    assert losses[4][0] != losses[0][0]
    counts = numbers(text.replace(",", ""), r"(\d+) of (\d+) parameters are trained")
    assert counts == [(834304, 834304), (32768, 867072)]
    kept = numbers(text.replace(",", ""), r"keeps (\d+) bytes of optimizer state and sends (\d+) bytes")
    trained = [count for count, _ in counts]
    assert [state for state, _ in kept] == [n / 2 * 2 * 8 for n in trained]  # two moments of one half
    if strategy != "hsdp":  # one half of the gradients, of float64
        assert [sent for _, sent in kept] == [n / 2 * 8 for n in trained]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("accelerate_gpt2", 0.5),
        ("peft_lora", 0.1),
        ("trl_dpo", 0.02),
        ("fabric_gpt2", 0.5),
        ("lightning_gpt2", 0.5),
        ("torchtitan_llama", 0.5),
    ],
)
def test_other_libraries_train_as_without_fsharp(name: str, least: float, tmp_path: Path) -> None:
    out = [] if name == "torchtitan_llama" else ["--out", str(tmp_path)]
    text = output(sys.executable, f"examples/{name}.py", "--steps", "6", *out)
    losses = numbers(text, r"step +\d+  loss ([\d.]+)  under \w+ ([\d.]+)")
    assert losses[-1][0] < losses[0][0] - least
    [(apart,)] = numbers(text, r"largest difference between losses: (\S+)")
    assert apart < 1e-5
    if name == "lightning_gpt2":
        saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
        assert saved["epoch"] == 2
        assert "state_dict" in torch.load(tmp_path / "ddp.ckpt", weights_only=False)
    assert (tmp_path / "fsharp.huggingface.trainer" / "adapter_model.safetensors").exists() == (name == "peft_lora")


@pytest.mark.parametrize("name", ["accelerate_gpt2", "peft_lora", "trl_dpo", "fabric_gpt2", "lightning_gpt2"])
def test_an_example_of_another_library_is_short(name: str) -> None:
    """What such an example does not teach is in small_models.py and launch_example.py."""
    assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) <= 60


@pytest.mark.deep
def test_a_stream_goes_on_at_the_same_byte(tmp_path: Path) -> None:
    text = output(sys.executable, "examples/torchdata_stream.py", "--steps", "8", "--out", str(tmp_path))
    [(same, total)] = numbers(text, r"(\d+) of (\d+) parameters have the same bits; losses too: True")
    assert same == total == 256 * 256
    [(first, last, step)] = numbers(text, r"loss ([\d.]+) to ([\d.]+); the second run went on with step (\d+)")
    assert last < first - 0.5
    assert step == 4


@pytest.mark.deep
@pytest.mark.parametrize(("nproc", "strategy"), [(2, "zero3"), (4, "hfsdp")])
def test_cnn_has_the_statistics_of_all_ranks(tmp_path: Path, nproc: int, strategy: str) -> None:
    options = ["--steps", "40", "--strategy", strategy, "--dtype", "float64", "--out", str(tmp_path / "cnn.pt")]
    text = output(*TORCHRUN, str(nproc), "examples/train_cnn.py", *options)
    [(loss, values)] = numbers(text, r"largest difference between losses: (\S+), between parameters and statistics: (\S+)")
    assert loss < 1e-12
    assert values < 1e-11
    [(alone, together)] = numbers(text, r"accuracy with BatchNorm statistics of rank 0: ([\d.]+), of all ranks: ([\d.]+)")
    [(loaded,)] = numbers(text, r"accuracy of the unsharded model, loaded from [^:]+: ([\d.]+)")
    assert alone > 0.9
    assert together > 0.9
    assert loaded == together


@pytest.mark.deep
@pytest.mark.parametrize(("nproc", "strategy"), [(2, "zero3"), (4, "hfsdp")])
def test_dp_sgd_trains_as_the_unsharded_loop(nproc: int, strategy: str) -> None:
    options = ["--steps", "4", "--clip", "8", "--strategy", strategy, "--dtype", "float64"]
    text = output(*TORCHRUN, str(nproc), "examples/dp_sgd.py", *options)
    [(apart,)] = numbers(text, r"largest difference between parameters after 4 steps: (\S+)")
    assert apart < 1e-12
    [(clipped,)] = numbers(text, r"(\d+)% of them were clipped")
    assert 5 < clipped < 95  # both kinds of samples are there
    [(accuracy, alone)] = numbers(text, r"accuracy ([\d.]+)  unsharded ([\d.]+)")
    assert accuracy == alone
    assert accuracy > 0.25  # an eighth by chance


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        pytest.param(["--steps", "12"], 1, marks=pytest.mark.deep),
        pytest.param(["--steps", "120", "--nproc", "3", "--seed", "5"], 20, marks=[pytest.mark.deep, pytest.mark.timeout(900)]),
    ],
)
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(options: list[str], kills: int) -> None:
    text = output(sys.executable, "examples/survive_a_kill.py", "--kills", str(kills), *options, limit_s=850)
    attempts = numbers(text, r"attempt (\d+) continues after (\d+) of")
    assert [attempt for attempt, _ in attempts[1:]] == list(range(kills + 1))
    [(same, of, _, killed)] = numbers(text, r"(\d+) of (\d+) tensors have the same bits after (\d+) steps and (\d+) kills")
    assert same == of > 10
    assert killed == kills


@pytest.mark.deep
def test_an_example_that_fails_says_why_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = start(sys.executable, "examples/train_cnn.py", "--steps", "2", "--out", str(tmp_path / "file" / "cnn.pt"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: rank 0 of 2 failed: FileExistsError")
    assert done.stderr.count("Traceback") == 1


def test_tensors_of_the_examples_of_functions_are_on_the_gpu(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A virtual device, too, refuses ops of tensors on different devices."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    step = importlib.import_module("examples.functional_train_step")
    monkeypatch.setattr(step, "range", lambda stop: range(min(stop, 21)), raising=False)  # a fifth of its steps
    step.main()
    losses = numbers(capsys.readouterr().out, r"step +\d+  loss ([\d.]+)")
    assert losses[-1] < losses[0]
    resume = importlib.import_module("examples.resume_elsewhere")
    for again in (False, True):
        resume.main(resume.Options(steps=2, out=tmp_path, resume=again))
    [(equal, total)] = numbers(capsys.readouterr().out, r"(\d+) of (\d+) parameters and moments have the saved bits")
    assert equal == total


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["dp_sgd", "finetune_llama", "lora_gpt2", "torchdata_stream", "train_cnn", "train_mixtral"])
def test_an_example_runs_on_one_gpu(name: str) -> None:
    options = ["--ep", "1"] if name == "train_mixtral" else []
    assert output(*TORCHRUN, "1", f"examples/{name}.py", "--steps", "4", *options)


def test_an_example_runs_by_its_name_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_cnn", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("examples.train_cnn", run_name="__main__")  # as python -m
    assert "Train a CNN" in capsys.readouterr().out


@pytest.mark.deep
def test_nothing_is_started_on_a_bad_option() -> None:
    done = start(sys.executable, "examples/train_cnn.py", "--strategy", "zero4")
    assert (done.returncode, done.stdout) == (2, "")
    assert "zero4" in done.stderr
