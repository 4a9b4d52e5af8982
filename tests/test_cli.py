"""The command fsharp: what it prints, and its exit status."""

import io
import json
import math
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import optree
import pytest
import torch
from safetensors.torch import save_file

import fsharp as fs
from fsharp.checkpoint.storage import LocalStorage, observe_reads
from fsharp.cli import main
from fsharp.cli.machine import MeasuredMachine, calibrate, read_machine
from fsharp.cli.models import find_model
from fsharp.cli.progress import files_nbytes
from fsharp.errors import CheckpointError
from fsharp.inspect.files import write_file
from fsharp.planning.space import repeated_unit_patterns, units_in_dict_order
from fsharp.planning.tune import POLICIES
from tests.forked_python import run_forked
from tests.gpt_like import make_params


def state(seed):
    return {"params": make_params(seed), "step": seed, "name": "a run"}


@pytest.fixture
def root(tmp_path):
    for step in (1, 2, 3):
        fs.checkpoint.save(tmp_path / "runs", state(step), step=step, comm=fs.SingleComm(), metric=1 / step, config={"lr": 0.1})
    return tmp_path / "runs"


def path_of(root, step):
    return next(each.path for each in fs.checkpoint.list_checkpoints(root) if each.step == step)


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
    fs.checkpoint.save(tmp_path / "run", {"w": torch.ones(2)}, step=1, comm=fs.SingleComm())
    expected = ["no complete checkpoint", f"There are checkpoints in {tmp_path}/run"]
    assert run(capsys, "ckpt", "list", tmp_path)[:2] == (0, expected)
    for command in (["list"], ["prune", "--keep", 1]):
        status, _, err = run(capsys, "ckpt", command[0], tmp_path / "mistyped", *command[1:])
        assert (status, "mistyped' is not a folder" in err) == (2, True)


def test_a_checkpoint_that_is_removed_meanwhile_is_not_listed(root, capsys, monkeypatch):
    found = fs.checkpoint.list_checkpoints(root)
    monkeypatch.setattr("fsharp.cli.checkpoints.list_checkpoints", lambda _: [fs.checkpoint.Checkpoint(f"{root}/gone"), *found])
    status, lines, err = run(capsys, "ckpt", "list", root)
    assert (status, [line.split()[0] for line in lines[1:]], err) == (0, ["3", "2", "1"], "")


def test_a_checkpoint_that_may_not_be_read_hides_no_other(root, capsys, monkeypatch):
    refused, list_names = path_of(root, 3), LocalStorage.list_names

    def list_names_or_refuse(storage, folder):
        if folder == refused:
            raise CheckpointError(f"{folder}: cannot be read: Permission denied.")
        return list_names(storage, folder)

    monkeypatch.setattr(LocalStorage, "list_names", list_names_or_refuse)
    (Path(refused) / "manifest.json").unlink()
    status, lines, _ = run(capsys, "ckpt", "list", root)
    assert (status, [line.split()[0] for line in lines[1:3]]) == (0, ["2", "1"])
    assert lines[3:] == [f"{refused}: cannot be read: Permission denied."]


def test_a_checkpoint_in_place_of_its_folder(root, capsys):
    for command in (["list"], ["prune", "--keep", 1]):
        status, _, err = run(capsys, "ckpt", command[0], path_of(root, 1), *command[1:])
        assert (status, "is a checkpoint. Pass the folder that holds the checkpoints" in err) == (2, True)


def test_an_object_store_is_listed_by_its_url(tmp_path, capsys):
    fs.checkpoint.save(f"local://{tmp_path}", {"x": torch.ones(2)}, comm=fs.SingleComm(), step=4)
    status, lines, _ = run(capsys, "ckpt", "list", f"local://{tmp_path}")
    assert (status, lines[1].split()[0]) == (0, "4")
    (next(tmp_path.iterdir()) / "manifest.json").write_text("{")
    assert "the manifest is damaged" in run(capsys, "ckpt", "list", f"local://{tmp_path}")[1][-1]


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
        f"{x.path} is intact: step {x.step}, {len(x.tensor_names)} tensors, {x.manifest.nbytes:,} bytes"
        for x in map(fs.checkpoint.open_checkpoint, (first, second))
    ]
    [file] = (root / second).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    third = path_of(root, 3)
    os.remove(f"{third}/rank-00000.safetensors")
    status, lines, err = run(capsys, "ckpt", "verify", third, second, first)
    assert (status, lines) == (1, [])
    assert err.startswith("error: ")
    assert re.search(f"{third}.*: missing(.|\n)*{second}.*is damaged(.|\n)*{first} is intact", err), err


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


def test_diff_of_values_that_are_not_finite_missing_or_of_another_type(tmp_path, capsys):
    nan, inf = math.nan, math.inf
    seeds = torch.tensor([2**62, -(2**63), 5])
    first = {"t": torch.tensor([nan, -inf, 1.0]), "same": torch.tensor([nan]), "loss": nan, "gone": 3, "flag": True}
    second = {"t": torch.tensor([nan, -inf, 3.0]), "same": torch.tensor([nan]), "loss": nan, "new": "x", "flag": 1}
    first["seeds"], second["seeds"] = seeds, seeds + torch.tensor([1, 2, 0])
    for i, tree in enumerate((first, second)):
        tree["four bits"] = (torch.arange(12, dtype=torch.uint8) // (i + 1)).view(torch.float4_e2m1fn_x2)
    paths = [fs.checkpoint.save(tmp_path, x, step=1, comm=fs.SingleComm()).path for x in (first, second)]
    assert run(capsys, "ckpt", "diff", *paths)[1] == [
        "~ four bits: 11 of 12 bytes differ, with two numbers in each",
        "~ seeds: the largest difference is 2",
        "~ t: the largest difference is 2",
        "- gone",
        "+ new",
        "~ flag: True -> 1",
    ]
    assert run(capsys, "ckpt", "diff", paths[0], paths[0])[1] == ["no difference"]


def test_control_characters_in_names_are_printed_as_escapes(tmp_path, capsys):
    """A terminal would obey them: a name could hide what a checkpoint has."""
    name = "w\x1b[2J\x9b1A\r\x7f"
    first, second = (
        fs.checkpoint.save(tmp_path, {name: torch.full([2], x)}, step=1, comm=fs.SingleComm()).path for x in (1.0, 2.0)
    )
    for argv in (["show", first], ["diff", first, second], ["show", tmp_path / name]):
        _, out, err = run(capsys, "ckpt", *argv)
        said = "\n".join([*out, *([err] if isinstance(err, str) else err)])
        assert r"w\x1b[2J\x9b1A\r\x7f" in said, said
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said)


def test_prune(root, capsys):
    first, second = path_of(root, 1), path_of(root, 2)
    assert run(capsys, "ckpt", "prune", root, "--keep", 3, "--keep-hours", 0.5)[1] == ["nothing to remove"]
    assert run(capsys, "ckpt", "prune", root, "--keep", 1)[1] == [f"removed {first}", f"removed {second}"]
    assert run(capsys, "ckpt", "prune", root, "--keep", 1)[1] == ["nothing to remove"]
    for numbers, what in (
        (["--keep", 0], "keep is 0, expected at least 1"),
        (["--keep", 1, "--best", -1], "best is -1, expected at least 0"),
        (["--keep", 1, "--keep-steps", 0], "keep_steps is 0, expected at least 1"),
        (["--keep", 1, "--keep-hours", 0], "keep_hours is 0.0, expected at least 0.001"),
    ):
        assert run(capsys, "ckpt", "prune", root, *numbers) == (2, [], f"error: ckpt prune: {what}.\n")


def test_folders_and_trees_that_python_cannot_follow_are_one_line(root, capsys, monkeypatch):
    def fail(*_, **__):
        raise RecursionError("maximum recursion depth exceeded")  # as shutil.rmtree of a thousand nested folders

    monkeypatch.setattr("fsharp.cli.checkpoints.prune", fail)
    status, lines, err = run(capsys, "ckpt", "prune", root, "--keep", 1)
    assert (status, lines, err) == (1, [], "error: a tree or a folder nests more levels than Python can follow.\n")


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp", "orbax"])
def test_export_and_convert(kind, root, tmp_path, capsys):
    source, there = path_of(root, 3), tmp_path / "there"
    done = run(capsys, "ckpt", "export", source, there, "--to", kind, "--subtree", "params")
    assert (*done[:2], done[2] if kind != "orbax" else "") == (0, [f"wrote {there}"], "")
    [line] = run(capsys, "ckpt", "convert", there, tmp_path / "back", "--of", kind, "--step", 3)[1]
    found, saved = fs.checkpoint.verify(line.removeprefix("wrote ")), fs.checkpoint.open_checkpoint(source)
    assert found.step == 3
    assert sorted(found.tensor_names) == sorted(name.removeprefix("params.") for name in saved.tensor_names)
    for name in found.tensor_names:
        assert torch.equal(found.tensor(name), saved.tensor(f"params.{name}"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_how_much_was_read_after_a_second(root, tmp_path, capsys, monkeypatch):
    source, other = path_of(root, 1), path_of(root, 2)
    commands = {
        "verify": ["verify", source, other],
        "diff": ["diff", source, other],
        "export": ["export", source, tmp_path / "dcp", "--to", "dcp"],
        "convert": ["convert", tmp_path / "dcp", tmp_path / "back"],
    }
    for delay, number in ((-1.0, 1), (60.0, 0)):
        monkeypatch.setattr("fsharp.cli.progress._DELAY_S", delay)
        for name, argv in commands.items():
            monkeypatch.setattr(sys, "stderr", shown := Terminal())
            assert main(["ckpt", *map(str, argv)]) == 0
            assert len(re.findall(rf"ckpt {name}", shown.getvalue())) >= number
            assert delay < 0 or name not in shown.getvalue()
        shutil.rmtree(tmp_path / "dcp")


def test_the_bytes_to_read_are_those_that_are_read(tmp_path):
    tree, read = {"w": torch.ones(1000, 1000)}, []
    path = fs.checkpoint.save(tmp_path, tree, step=1, comm=fs.SingleComm()).path
    with observe_reads(read.append):
        fs.checkpoint.verify(path)
    assert files_nbytes(path) == sum(file.stat().st_size for file in Path(path).iterdir()) == pytest.approx(sum(read), rel=0.01)
    assert files_nbytes(str(tmp_path / "absent"), f"{path}/manifest.json") == os.path.getsize(f"{path}/manifest.json")


def test_layers_are_stacked_for_orbax_and_unstacked_again(root, tmp_path, capsys):
    source, there = path_of(root, 3), tmp_path / "there"
    saved = fs.checkpoint.open_checkpoint(source)
    run(capsys, "ckpt", "export", source, there, "--to", "orbax", "--subtree", "params", "--stack", "layers", 0)
    [line] = run(capsys, "ckpt", "convert", there, tmp_path / "stacked", "--of", "orbax")[1]
    stacked = fs.checkpoint.open_checkpoint(line.removeprefix("wrote "))
    layers = [name for name in saved.tensor_names if name.startswith("params.layers.")]
    for name in layers:
        i, rest = name.removeprefix("params.layers.").split(".", 1)
        assert torch.equal(stacked.tensor(f"layers.{rest}")[int(i)], saved.tensor(name))
    [line] = run(capsys, "ckpt", "convert", there, tmp_path / "back", "--of", "orbax", "--unstack", "layers", 0)[1]
    back = fs.checkpoint.open_checkpoint(line.removeprefix("wrote "))
    assert len(layers) > 1
    assert all(torch.equal(back.tensor(name.removeprefix("params.")), saved.tensor(name)) for name in layers)
    assert run(capsys, "ckpt", "convert", there, tmp_path / "no", "--unstack", "layers", 0)[0] == 2
    assert run(capsys, "ckpt", "export", source, tmp_path / "no", "--stack", "layers", 0)[0] == 2


def test_export_rounds_to_a_dtype(root, tmp_path, capsys):
    run(capsys, "ckpt", "export", path_of(root, 1), tmp_path / "half", "--dtype", "bfloat16")
    assert fs.checkpoint.open_checkpoint(tmp_path / "half").tensor("params.embed").dtype == torch.bfloat16
    assert run(capsys, "ckpt", "export", path_of(root, 1), tmp_path / "no", "--dtype", "b16")[0] == 2
    assert run(capsys, "ckpt", "export", path_of(root, 1), tmp_path / "no", "--dtype", "bfloat16", "--to", "dcp")[0] == 2


def test_plan_compares_strategies(capsys):
    status, lines, _ = run(capsys, "plan", "llama-3-8b", "--mesh", "outer=2,inner=4")
    assert status == 0
    assert lines[0].startswith("8,030,261,248 parameters on Mesh(outer=2, inner=4), in 35 units of at most")
    assert lines[-1].startswith("sent a step: without fs.Scheduler, which may gather less often")
    rows = {line.split()[0]: line.split() for line in lines[2:-2]}
    assert list(rows) == ["strategy", "ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"]
    assert rows["zero3"][1:3] == [f"{8_030_261_248 * 2 / 8 / 2**30:.2f}", "GiB"]  # bfloat16 over 8 ranks
    assert rows["hsdp"][1:3] == [f"{8_030_261_248 * 2 / 4 / 2**30:.2f}", "GiB"]


def test_plan_shows_the_collectives_of_a_strategy(capsys):
    chosen = ("--mesh", "dp=3", "--strategy", "zero2", "--compute", "float32", "--units", "layers.*")
    status, lines, _ = run(capsys, "plan", "tests.gpt_like:make_params", *chosen)
    layout = fs.plan(make_params(), fs.Mesh({"dp": 3}), fs.zero2("dp"), units="layers.*")
    assert status == 0
    assert lines[: (last := len(str(layout).splitlines()) - 1)] == str(layout).splitlines()[:-1]
    assert lines[last].startswith("strategy P/G/O: parameters, gradients and optimizer state")
    assert sum(line.startswith("at rest") for line in lines) == 1
    sent = {(call.op, call.axis, count) for call, count in fs.inspect.step_traffic(layout).items()}
    rows = [line.split() for line in lines[lines.index("") + 1 :]]
    assert {(row[0], row[1], int(row[4])) for row in rows if row and row[0] in dir(fs.Comm)} == sent


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt-2", {"model_type": "gpt2"}),
        ("gpt-2-xl", {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}),
        ("llama-3-8b", {"intermediate_size": 14336, "num_key_value_heads": 8}),
        (
            "llama-3-70b",
            {
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
            },
        ),
        (
            "llama-3-405b",
            {
                "hidden_size": 16384,
                "intermediate_size": 53248,
                "num_hidden_layers": 126,
                "num_attention_heads": 128,
                "num_key_value_heads": 8,
            },
        ),
        ("mixtral-8x7b", {"model_type": "mixtral"}),
        ("deepseek-v3", {"model_type": "deepseek_v3"}),
    ],
)
def test_named_architectures_have_the_parameters_of_transformers_models(name, config, tmp_path):
    config = {"model_type": "llama", "vocab_size": 128256} | config if name.startswith("llama") else config
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = [sum(tensor.numel() for tensor in unique(find_model("plan", each)[0])) for each in (name, str(tmp_path))]
    assert found[0] == found[1]


def unique(tree):
    return {id(leaf): leaf for leaf in optree.tree_leaves(tree)}.values()


def test_each_repeated_layer_is_a_unit():
    assert repeated_unit_patterns(["model.embed", "model.layers.0.w", "model.layers.1.w", "head.0.w"]) == ["model.layers.*"]
    assert repeated_unit_patterns(["layers.0.experts.0.w", "layers.1.experts.1.w", "tail.7.w", "tail.9.b"]) == [
        "layers.*",
        "tail.*",
    ]


def test_schedule_predicts_what_the_library_predicts(capsys, tmp_path):
    status, lines, _ = run(
        capsys, "schedule", "gpt-2-xl", "--mesh", "dp=16", "--strategy", "zero2", "--ops", "--draw", tmp_path / "a.svg"
    )
    assert status == 0
    tree = find_model("plan", "gpt-2-xl")[0]
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32)
    layout = fs.plan(tree, fs.Mesh({"dp": 16}), fs.zero2("dp"), units="layers.*", precision=precision)
    hardware = fs.inspect.Hardware.preset("H100", layout, tokens=8192)
    planned = fs.schedules.plan_step(layout, order=("embed", "layers.*", "norm"))
    timeline = fs.inspect.predict(planned, replace(hardware, update_s=hardware.update_s / 16))
    found = dict(line.rsplit("  ", 1) for line in lines[2:9])
    assert {key.strip(): value.strip() for key, value in found.items()}["time of a step"] == f"{1e3 * timeline.step_s:.1f} ms"
    assert "\n".join(lines[10:-1]) == fs.inspect.table(planned)
    assert lines[-1] == f"wrote {tmp_path / 'a.svg'}"
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_schedule_of_16384_ranks(capsys):
    """Each rank sends nearly all of 16-bit parameters and gradients: in two or three collectives of each unit."""
    status, lines, err = run(capsys, "schedule", "llama-3-8b", "--mesh", "dp=16384")
    n, found = 8_030_261_248, dict(re.split(r"  +", line) for line in lines[2:])
    assert (status, err) == (0, "")
    assert lines[0] == (
        f"{n:,} parameters on Mesh(dp=16384) of H100, zero3, prefetch 1. Assumed: 33% of the GPU's FLOP/s, 80% of the "
        "bandwidth of its links, 20 us for a collective within a host and 40 us between hosts."
    )
    assert float(found["time of a step"].removesuffix(" ms")) >= 1e3 * 6 * n * TOKENS / PEAK
    number, unit = found["sent by a rank"].split()
    assert unit == "GiB"
    assert 2 * 2 * n <= float(number) * 2**30 * 1.001
    assert float(number) * 2**30 * 0.999 <= 3 * 2 * n
    layout = fs.plan(find_model("plan", "llama-3-8b").tree, fs.Mesh({"dp": 16384}), fs.zero3("dp"), units="layers.*")
    assert 2 * len(layout.units) <= int(found["collectives"]) <= 3 * len(layout.units)


def test_tune_lists_every_strategy_under_every_policy(capsys, tmp_path):
    file = tmp_path / "choice.json"
    argv = ["tune", "tests.gpt_like:make_params", "--mesh", "outer=2,inner=4", "--budget", "10", "--units", "layers.*"]
    status, [*lines, written], _ = run(capsys, *argv, "--rows", "0", "--json", file)
    assert (status, written) == (0, f"wrote {file}")
    about, _, *lines, ties = lines
    choice = fs.inspect.Choice.from_json(file.read_text())
    assert about == (
        f"{choice.layout.num_params:,} parameters, 8 ranks of H100, 8,192 tokens of a rank in a microbatch, "
        "at most 10 GB (9.31 GiB) on a rank"
    )
    assert ties.startswith("Steps within 2% of the fastest count as equal")
    assert lines[1].endswith("chosen")
    assert lines[-1] == "activations: estimated from shapes"
    assert len(lines[1:-1]) == 6 * len(POLICIES) * 2
    assert choice.table().splitlines() == lines
    status, short, _ = run(capsys, *argv, "--rows", "3", "--draw", tmp_path / "step.svg")
    shown = [*lines[:4], f"... and {len(lines) - 5} more", lines[-1], ties, f"wrote {tmp_path / 'step.svg'}"]
    assert short == [about, "", *shown]
    assert (tmp_path / "step.svg").stat().st_size > 1000
    status, lines, _ = run(capsys, *argv[:2], "--mesh", "4", "--rows", "0", "--units", "layers.*")
    assert status == 0
    assert any("outer=2,inner=2" in line for line in lines)
    status, _, err = run(capsys, "tune", "tests.gpt_like:make_params", "--budget", "1e-7")
    assert status == 1
    assert "no candidate fits into the budget" in err
    assert "budget       100 B (1e-07 GB)" in err


def test_schedule_and_tune_predict_the_same_seconds(capsys):
    argv = ["tests.gpt_like:make_params", "--mesh", "dp=4", "--tokens", "10", "--gpu", "h200"]
    _, lines, _ = run(capsys, "tune", *argv, "--units", "layers.*", "--rows", "0")
    for strategy in ("ddp", "zero3"):
        tuned = next(line for line in lines if re.match(rf"{strategy} +prefetch 1 +\d", line))
        _, found, _ = run(capsys, "schedule", *argv, "--strategy", strategy)
        assert "of H200" in found[0]
        assert f"{float(re.split('  +', tuned)[2]):.1f} ms" in found[2]


TOKENS, PEAK = 8192, 0.33 * 989e12


def schedule_ms(capsys, *argv):
    status, lines, err = run(capsys, "schedule", *argv)
    assert status == 0, err
    return float(lines[lines.index("") + 1].split()[-2]), lines[1]


def test_only_the_experts_that_a_token_uses_take_time(capsys, tmp_path):
    """Mixtral 8x7B has 12.9 billion active parameters of 46.7: https://arxiv.org/abs/2401.04088."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    for model in ("mixtral-8x7b", tmp_path):
        found, line = schedule_ms(capsys, model, "--mesh", "dp=64")
        assert 1 < found / (1e3 * 6 * 12.9e9 * TOKENS / PEAK) < 1.1
        assert line == "Time is that of the 2 of 8 experts that a token uses."
    _, line = schedule_ms(capsys, "tests.test_cli:of_experts", "--mesh", "dp=2")
    assert line == "All experts count as if each token used them: the time is too long."
    _, lines, _ = run(capsys, "tune", "tests.test_cli:of_experts", "--rows", "1")
    assert lines[1] == f"{line} Activations are those of all experts."


def of_experts():
    return {"experts": torch.ones(8, 4, 4), "head": torch.ones(4, 4)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The file of a calibration of two processes, and the text that was printed."""
    file = tmp_path_factory.mktemp("machine") / "hardware.json"
    return file, run_forked(lambda: calibrate(str(file), mesh="dp=2", steps=2))


def test_calibrate_writes_what_it_prints(measured):
    file, text = measured
    machine = read_machine("test", str(file))
    assert machine.measured_axes == ["dp"]
    assert machine.dtype == "float32"
    assert f"{machine.flops / 1e9:,.1f} GFLOP/s in float32" in text
    links = {("all_gather", "dp"), ("all_to_all", "dp"), ("reduce_scatter", "dp")}
    assert links <= machine.hardware.bandwidth.keys() == machine.hardware.latency.keys()
    assert all(f"{op} along {axis}" in text for op, axis in links)
    assert 0 < machine.hardware.memory_bandwidth < math.inf
    assert f"{machine.hardware.codec_bandwidth / 1e9:,.2f} GB/s of encoded bytes" in text
    assert machine.hardware.computes_on_host
    assert f"measured on Mesh(dp=2); wrote {file}" in text


def test_schedule_and_tune_predict_for_a_measured_machine(measured, capsys):
    file, _ = measured
    machine = read_machine("test", str(file))
    status, lines, _ = run(capsys, "schedule", "gpt-2", "--mesh", "dp=4", "--tokens", "512", "--hardware", file)
    assert status == 0
    assert str(file) in lines[0]
    assert "Assumed" not in lines[0]
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32)
    layout = fs.plan(find_model("plan", "gpt-2")[0], fs.Mesh({"dp": 4}), fs.zero3("dp"), units="layers.*", precision=precision)
    hardware = machine.hardware_for_layout(layout, tokens=512, efficiency=1.0)
    n = sum(group.used for group in layout["layers.0"].groups)
    assert hardware.compute_times["layers.0"] == (2 * n * 512 / machine.flops, 4 * n * 512 / machine.flops)
    assert hardware.update_s == pytest.approx(28 * layout.num_params / machine.hardware.memory_bandwidth)
    planned = fs.schedules.plan_step(layout, order=("embed", "layers.*", "norm"))
    found = dict(line.rsplit("  ", 1) for line in lines[2:])
    step_s = fs.inspect.predict(planned, replace(hardware, update_s=hardware.update_s / 4)).step_s
    assert {key.strip(): value.strip() for key, value in found.items()}["time of a step"] == f"{1e3 * step_s:.1f} ms"
    small = ("tests.gpt_like:make_params", "--units", "layers.*")
    for mesh in ("dp=4", "4"):  # of the meshes for 4 ranks, the one whose axis was measured
        assert run(capsys, "tune", *small, "--mesh", mesh, "--hardware", file)[0] == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gpu", "H100"], "got gpu 'H100' and hardware"),
        (["--mesh", "outer=2,dp=2"], "has the speeds of axis 'dp', expected axis 'outer' of Mesh(outer=2, dp=2) as well"),
    ],
)
def test_a_measured_machine_is_refused(argv, words, measured, capsys):
    status, lines, err = run(
        capsys, "tune", "gpt-2", "--hardware", measured[0], *(argv if "--mesh" in argv else [*argv, "--mesh", "dp=2"])
    )
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert words in err


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"flops": 1e9}',
        '{"flops": 0, "dtype": "float32", "hardware": {}}',
        '{"flops": 1, "dtype": "", "hardware": []}',
    ],
)
def test_a_file_that_calibrate_has_not_written_is_refused(text, tmp_path, capsys):
    (tmp_path / "x.json").write_text(text)
    status, lines, err = run(capsys, "schedule", "gpt-2", "--hardware", tmp_path / "x.json")
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert "expected a file that fsharp calibrate has written" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--mesh", "dp=1"], "expected at least 2 ranks"),
        (["--mesh", "2"], "calibrate: mesh is '2', expected sizes of axes"),
        (["--steps", "0"], "steps is 0, expected at least 1"),
        (["--mesh", "dp=1000000000"], "the number of ranks is 1,000,000,000, expected 2 to 1,024"),
        (["--dtype", "b16"], "dtype is 'b16'"),
    ],
)
def test_calibrate_says_what_it_expected(argv, words, tmp_path, capsys):
    status, lines, err = run(capsys, "calibrate", tmp_path / "hardware.json", *argv)
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert words in err
    assert not (tmp_path / "hardware.json").exists()


@pytest.mark.parametrize(
    ("path", "may_write", "words"),
    [
        ("no/hardware.json", True, "no does not"),
        (".", True, "is a folder"),
        ("hardware.json", False, "and that you may write to"),
    ],
)
def test_calibrate_looks_at_the_path_before_it_measures(path, may_write, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: may_write)
    monkeypatch.setattr(fs, "launch", lambda *_: pytest.fail("it measures"))
    status, _, err = run(capsys, "calibrate", tmp_path / path)
    assert status == 2
    assert "expected a path in a folder that exists" in err
    assert words in err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_of_calibrate_alone_writes_and_warns_of_an_unknown_bandwidth(rank, tmp_path, capsys, monkeypatch):
    speeds = {"bandwidth": {("all_gather", "dp"): math.inf}, "latency": {("all_gather", "dp"): 1e-3}}
    hardware = fs.inspect.Hardware(compute_times=(0.0, 0.0), **speeds, memory_bandwidth=2e9)
    monkeypatch.setattr(fs, "launch", lambda *_: [MeasuredMachine(1e9, "float32", hardware)])
    monkeypatch.setenv("RANK", rank)
    status, lines, _ = run(capsys, "calibrate", tmp_path / "hardware.json", "--steps", "20")
    assert (status, (tmp_path / "hardware.json").exists()) == (0, rank == "0")
    if rank == "0":
        assert "warning: the bandwidth of all_gather along dp could not be told from the latency" in lines[-1]
        assert lines[-1].endswith("--steps 100")
    else:
        assert not lines


ENDS = {
    "a reader that stops": (["plan", "gpt-2", "--mesh", "dp=2"], "", 1, "", ""),
    "full disk": (["plan", "gpt-2"], "/dev/full", 1, "", "error: [Errno 28] No space left on device\n"),
    "Ctrl-C": (["plan", "interrupting:model"], "out", 130, "", ""),
    "a terminal without the letter": (["ckpt", "show", "ä.safetensors"], "out", 0, "\\xe4       float32  [2]", ""),
}
"""By what ends a command: its arguments, its standard output, its status, and what it prints on both streams."""
COMMANDS = """
import ctypes, json, os, sys
from fsharp.cli import main

reader, writer = os.pipe()
os.close(reader)
sys.stdout.reconfigure(encoding="ascii")
for number, (arguments, stdout) in enumerate(json.loads(sys.argv[1])):
    if (process := os.fork()) == 0:
        os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT) if stdout else writer, 1)
        os.dup2(os.open(f"err-{number}", os.O_WRONLY | os.O_CREAT), 2)
        ctypes.pythonapi.Py_Exit(main(arguments))  # the end of an interpreter
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def ended(folder):
    """The statuses of the commands in ENDS, forked from one process, which end as interpreters do."""
    save_file({"ä": torch.ones(2)}, folder / "ä.safetensors")
    (folder / "interrupting.py").write_text("raise KeyboardInterrupt")
    given = json.dumps(
        [
            (arguments, out and (out if os.path.isabs(out) else f"{out}-{i}"))
            for i, (arguments, out, *_) in enumerate(ENDS.values())
        ]
    )
    command = [sys.executable, "-c", COMMANDS, given]
    options = {"cwd": folder, "capture_output": True, "text": True}
    ran = run_forked(lambda: subprocess.run(command, timeout=200, check=False, **options))
    assert ran.returncode == 0, ran.stderr
    return [int(line) for line in ran.stderr.split()]


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_command_shows_no_traceback(name, ended, folder):
    number, (_, stdout, status, out, err) = list(ENDS).index(name), ENDS[name]
    assert ended[number] == status
    assert (folder / f"err-{number}").read_text() == err
    assert out in ((folder / f"out-{number}").read_text() if stdout == "out" else "")


def test_python_runs_the_package_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fsharp", "plan", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("fsharp", run_name="__main__")  # as python -m
    assert capsys.readouterr().err.startswith("error: plan: there is no model 'nothing'")


def test_a_machine_gives_seconds_of_units():
    layout = fs.plan(make_params(), fs.Mesh({"dp": 2}), fs.zero3("dp"), units="layers.*")
    hardware = fs.inspect.Hardware(compute_times=(0.0, 0.0), bandwidth={("all_gather", "dp"): 1e9}, memory_bandwidth=2e9)
    found = MeasuredMachine(1e9, "float32", hardware).hardware_for_layout(layout, tokens=10, efficiency=0.5)
    n = sum(group.used for group in layout["layers.0"].groups)
    assert found.compute_times["layers.0"] == (2 * n * 10 / 0.5e9, 4 * n * 10 / 0.5e9)


def test_units_are_in_the_order_in_which_the_tree_has_them():
    tree = {"z": torch.ones(1), "layers": [torch.ones(1), torch.ones(1)], "a": torch.ones(1)}
    layout = fs.plan(tree, fs.Mesh({"dp": 1}), fs.ddp("dp"), units="layers.*")
    assert units_in_dict_order(tree, layout) == ["z", "layers.0", "layers.1", "a"]


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["plan", "nothing"], 2, "there is no model 'nothing'"),
        (["plan", "no_such_package:model"], 2, "no_such_package"),
        (["plan", "tests.gpt_like:absent"], 2, "has no 'absent'"),
        (["plan", "tests.test_cli:no_parameters"], 2, "has no parameters"),
        (["tune", "nothing"], 2, "tune: there is no model 'nothing'"),
        (["schedule", "tests.test_cli:needs_an_argument"], 2, "schedule: 'tests.test_cli:needs_an_argument' cannot be made"),
        (["plan", "tests.test_cli:needs_an_argument"], 2, "cannot be made: TypeError"),
        (["plan", "tests.test_cli:exits"], 2, "plan: 'tests.test_cli:exits' cannot be made: SystemExit: 0"),
        (["plan", "tests.test_cli:fails_at_length"], 2, " a, ...\n"),
        (["plan", "tests.test_cli:dotted_key"], 2, "the key 'a.b' in the path"),
        (["tune", "tests.test_cli:with_a_number"], 2, "params['b'] is not a tensor. (got int 3) Keep configuration out of the"),
        (["plan", "gpt-2", "--compute", "float8_e4m3fn"], 2, "Values of 8 bits and less need a scale"),
        (["plan", "gpt-2", "--mesh", "8"], 2, "mesh is '8'"),
        (["plan", "gpt-2", "--mesh", "dp=0"], 2, "outer=2,inner=8: Mesh(): axis 'dp' has size 0, expected an integer"),
        (["plan", "gpt-2", "--mesh", "dp=8,dp=2"], 2, "axis names repeat: ['dp', 'dp']"),
        (["plan", "tests"], 2, "the folder 'tests' has no config.json."),
        (
            ["plan", "gpt-2", "--strategy", "hsdp"],
            2,
            "Mesh(dp=8) has ddp, zero1, zero2, zero3. hsdp needs two axes, such as outer=2,inner=4.",
        ),
        (["plan", "gpt-2", "--strategy", "zero4"], 2, "strategy is 'zero4'; Mesh(dp=8) has ddp, zero1, zero2, zero3.\n"),
        (["plan", "gpt-2", "--compute", "bf16"], 2, "compute is 'bf16'"),
        (["plan", "gpt-2", "--compute", "int8"], 2, "plan: compute is 'int8', expected the name of a floating-point dtype"),
        (
            ["plan", "tests/test_cli.py:no_parameters"],
            2,
            "the file of a module, expected its name: tests.test_cli:no_parameters.",
        ),
        (["plan", "gpt-2", "--units", "blocks.*"], 2, "blocks.*"),
        (["plan", "gpt-2", "--microbatches", "0"], 2, "plan: microbatches is 0, expected at least 1."),
        (["plan", "gpt-2", "--optimizer-buffers", "-1"], 2, "optimizer_buffers is -1, expected at least 0."),
        (["ckpt", "show", "nowhere"], 2, "ckpt show: 'nowhere' is not a checkpoint"),
        (["ckpt", "show", "tests"], 2, "ckpt show: 'tests' is not a checkpoint"),
        (["ckpt", "verify", "nowhere"], 2, "ckpt verify: 'nowhere' is not a checkpoint. Pass the path of one."),
        (["ckpt", "diff", "nowhere", "no"], 2, "ckpt diff: 'nowhere' is not a checkpoint"),
        (["ckpt", "export", "nowhere", "out"], 2, "ckpt export: 'nowhere' is not a checkpoint"),
        (["ckpt", "convert", "nowhere", "out"], 2, "ckpt convert: 'nowhere' is not a folder of torch.distributed.checkpoint"),
        (["ckpt", "convert", "tests", "out"], 2, "torch.distributed.checkpoint, which has a file .metadata."),
        (["ckpt", "convert", "nowhere", "out", "--of", "orbax"], 2, "'nowhere' is not a folder that Orbax has written."),
        (["ckpt", "list", "nowhere"], 2, "ckpt list: 'nowhere' is not a folder"),
        (["ckpt", "prune", "nowhere", "--keep", "1"], 2, "ckpt prune: 'nowhere' is not a folder"),
        (["report", "nowhere"], 2, "nowhere"),
        (["schedule", "gpt-2", "--policy", "prefetch"], 2, "policy is 'prefetch', expected one of 'prefetch 1'"),
        (["schedule", "gpt-2", "--strategy", "hsdp"], 2, "strategy is 'hsdp'"),
        (["schedule", "gpt-2", "--strategy", ""], 2, "strategy is '', expected one of ddp, zero1, zero2, zero3, hsdp, hfsdp."),
        (["schedule", "gpt-2", "--mesh", "8"], 2, "schedule: mesh is '8'"),
        (["tune", "gpt-2", "--gpu", "V100"], 2, "'V100'"),
        (["tune", "gpt-2", "--tokens", "0"], 2, "tune: tokens is 0, expected at least 1.\n"),
        (["tune", "gpt-2", "--json", "no/x.json"], 2, "tune: json is 'no/x.json', expected a path in a folder that exists"),
        (["tune", "gpt-2", "--draw", "no/x.png"], 2, "tune: draw is 'no/x.png', expected a path in a folder that exists"),
        (["schedule", "gpt-2", "--draw", "no/x.png"], 2, "schedule: draw is 'no/x.png', expected a path in a folder"),
        (["tune", "gpt-2", "--rows", "-1"], 2, "rows is -1"),
        (["tune", "gpt-2", "--mesh", "0"], 2, "mesh is 0, expected 1 to 1,000,000."),
        (["tune", "gpt-2", "--mesh", "1000000000"], 2, "mesh is 1,000,000,000"),
        (["tune", "gpt-2", "--budget", "0"], 2, "budget is 0, expected more than 0: the GB that one rank may use."),
        (["tune", "gpt-2", "--budget", "nan"], 2, "budget is nan"),
        (["tune", "gpt-2", "--activations", "inf"], 2, "activations is inf"),
        (["tune", "gpt-2", "--optimizer-buffers", "-1"], 2, "optimizer_buffers is -1"),
        (["tune", "gpt-2", "--microbatches", "1000000000"], 2, "tune: microbatches is 1,000,000,000, expected 1 to 337: "),
        (["schedule", "gpt-2", "--microbatches", "1000000000"], 2, "expected 1 to 3,378: a prediction takes longer with each"),
        (["schedule", "gpt-2", "--microbatches", "0"], 2, "schedule: microbatches is 0, expected 1 to 3,378"),
        (["tune", "gpt-2", "--mesh", "²"], 2, "mesh is '²'"),
        (["schedule", "gpt-2", "--draw", "step.drawing"], 2, "path is 'step.drawing': Format 'drawing' is not supported"),
        (["schedule", "absent", "--draw", "step.drawing"], 2, "path is 'step.drawing': Format 'drawing' is not supported"),
        (["tune", "absent", "--draw", "step.drawing"], 2, "path is 'step.drawing': Format 'drawing' is not supported"),
        (["plan", "tests.test_cli:without_shapes"], 2, "cannot be made: ValueError: Attempted to use an uninitialized"),
        (["ckpt", "verify"], 2, "got no checkpoint"),
        (["ckpt", "convert", "nowhere", "out", "--step", "-1"], 2, "ckpt convert: step is -1, expected 0 to"),
        (["tune", "gpt-2", "--efficiency", "1.5"], 2, "efficiency is 1.5"),
        (["tune", "gpt-2", "--hardware", "absent.json"], 2, "hardware is 'absent.json', expected a file that fsharp calibrate"),
    ],
)
def test_commands_say_what_they_expected(argv, status, words, capsys):
    found, lines, err = run(capsys, *argv)
    assert (found, lines, err.count("\n")) == (status, [], 1)
    assert words in err


def test_arguments_of_checkpoints_that_do_not_fit_have_status_2(root, tmp_path, capsys):
    source = path_of(root, 1)
    for argv, words in (
        (["show", root], f"is not a checkpoint. Pass the path of one, such as {path_of(root, 3)}."),
        (["diff", source, tmp_path / "no"], "no' is not a checkpoint"),
        (["verify", source, root], "is not a checkpoint"),
        (["export", source, root], "is not empty. Pass the path of a new folder."),
        (["export", source, tmp_path / "out", "--subtree", "no"], "subtree is 'no', expected the beginning of names such as"),
    ):
        status, lines, err = run(capsys, "ckpt", *argv)
        assert (status, lines, err.count("\n")) == (2, [], 1)
        assert words in err
    status, _, err = run(capsys, "ckpt", "show", f"{source}/rank-00000.safetensors")
    assert (status, f"this is one of the files of a checkpoint. Pass its folder: {source}." in err) == (1, True)
    os.remove(f"{source}/manifest.json")
    assert run(capsys, "ckpt", "verify", source)[0] == 1, "a checkpoint that is damaged is a result"


class Partly(torch.nn.Module):
    """A frozen and a trained weight."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.trained = torch.nn.Linear(8, 2, bias=False)


def no_parameters():
    return torch.nn.ReLU()


def without_shapes():
    return torch.nn.LazyLinear(2)


def needs_an_argument(size):
    return torch.ones(size)


def exits():
    sys.exit(0)  # as a program whose arguments are parsed at its import


def fails_at_length():
    raise ValueError(f"there are models {', '.join(['a'] * 1000)}")


def dotted_key():
    return {"a.b": torch.ones(2)}


def with_a_number():
    return {"a": torch.ones(2), "b": 3}


def test_plan_keeps_no_state_for_frozen_parameters(capsys):
    status, lines, _ = run(capsys, "plan", "tests.test_cli:Partly", "--mesh", "dp=1", "--strategy", "ddp")
    assert status == 0
    rows = {tuple(line.split()) for line in lines}
    assert {("params", "160", "B"), ("main", "64", "B"), ("grads", "64", "B"), ("optimizer", "128", "B")} <= rows


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"model_type": "llama", "architectures": ["Nope"]}',
        '{"model_type": "llama", "architectures": "Nope"}',
        '{"model_type": "llama", "architectures": ["Nope", "No"]}',
        '{"model_type": "nope"}',
    ],
)
def test_plan_says_what_is_wrong_with_a_configuration(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    status, _, err = run(capsys, "plan", tmp_path)
    assert status == 2
    reason = "has no model_type, which names the architecture" if text in ("[]", "{}") else "cannot be made"
    assert "Nope" in err or reason in err


SMALL = ("tests.gpt_like:make_params", "--units", "layers.*", "--mesh", "dp=2")


@pytest.mark.parametrize(
    "argv",
    [
        ["tune", *SMALL, "--json", "out.json"],
        ["schedule", *SMALL, "--draw", "out.png"],
        ["report", "run", "--out", "out.html"],
        ["calibrate", "out.json"],
    ],
)
def test_a_full_disk_leaves_no_half_written_file(argv, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fs.resilience.JsonlLogger("run/log.jsonl").log(1, {"loss": 0.5})
    hardware = fs.inspect.Hardware(compute_times=(0.0, 0.0), bandwidth={}, latency={}, memory_bandwidth=2e9)
    monkeypatch.setattr(fs, "launch", lambda *_: [MeasuredMachine(1e9, "float32", hardware)])
    old, write = resource.getrlimit(resource.RLIMIT_FSIZE), Path.write_bytes

    def limited(path, data):  # the limit is for this write alone: modules that are imported write bytecode
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))  # python ignores the signal: a write raises an OSError
        try:
            return write(path, data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)

    monkeypatch.setattr(Path, "write_bytes", limited)
    status, lines, err = run(capsys, *argv)
    assert (status, lines, err) == (1, [], "error: [Errno 27] File too large\n")
    assert os.listdir(tmp_path) == ["run"]


def test_a_pipe_is_written_to_and_not_replaced():
    reads, writes = os.pipe()
    write_file(f"/dev/fd/{writes}", b"a choice")  # the path of /dev/stdout also leads to a name that no folder has
    assert os.read(reads, 100) == b"a choice"
    os.close(reads)
    os.close(writes)


def test_a_full_disk_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "choice.json"
    write_file(path, b"1" * 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: os.close(-1))
        with pytest.raises(OSError, match="Bad file descriptor"):
            write_file(path, b"2" * 300)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"1" * 200, ["choice.json"])
    write_file(path, b"2" * 300)
    assert path.read_bytes() == b"2" * 300


def test_a_picture_without_suffix_is_a_png(tmp_path, capsys):
    assert run(capsys, "schedule", *SMALL, "--draw", tmp_path / "step")[1][-1] == f"wrote {tmp_path}/step.png"
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_goes_into_a_folder_that_exists(tmp_path, capsys):
    fs.resilience.JsonlLogger(tmp_path / "log.jsonl").log(1, {"loss": 0.5})
    for out, words in ((tmp_path / "no" / "x.html", "no does not"), (tmp_path, "is a folder")):
        status, _, err = run(capsys, "report", tmp_path, "--out", out)
        assert (status, err.count("\n"), "report: out is" in err, words in err) == (2, 1, True, True)
    assert run(capsys, "report", tmp_path) == (0, [f"wrote {tmp_path}/report.html"], "")


@pytest.mark.parametrize("option", ["--optimizer-buffers", "--mesh dp=2 --microbatches", "--mesh"])
def test_plan_says_that_a_number_is_too_large_to_compute_with(option, capsys):
    *before, last = option.split()
    status, _, err = run(capsys, "plan", "gpt-2", *before, last, "dp=" * (last == "--mesh") + "1" + "0" * 400)
    assert status == 2
    assert "expected" in err or "a number among the options is too large to compute with" in err


QUANTIZED = ("FP8 of TransformerEngine", "MXFP8 and NVFP4 of TransformerEngine")


def doctors_sections(capsys):
    """The rows that the doctor prints, by section."""
    status, lines, _ = run(capsys, "doctor")
    assert status == 0
    titles = [i for i, line in enumerate(lines) if line and not line.startswith(" ")]
    parts = [lines[i:j] for i, j in zip(titles, [*titles[1:], len(lines)], strict=True)]
    return {title: dict(re.split(r"  +", row.strip(), maxsplit=1) for row in rows if row) for title, *rows in parts}


def test_doctor_on_a_machine_without_gpus(capsys, monkeypatch):
    def version(name):
        if name == "jax":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr("fsharp.cli.diagnosis.version", version)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(device_count=lambda: 0))
    monkeypatch.setattr("fsharp.cli.diagnosis._nccl_version", tuple)
    found = doctors_sections(capsys)
    assert list(found) == ["versions", "hardware", "limits", "what works here"]
    assert (found["versions"]["torch"], found["versions"]["fsharp"]) == (torch.__version__, fs.__version__)
    assert (found["versions"]["optax"], found["versions"]["jax"]) == (metadata.version("optax"), "not installed")
    assert found["hardware"]["GPUs"] == "none"
    assert found["limits"]["open files"] == str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    works = found["what works here"]
    assert works["ranks on CPUs, over gloo"] == "yes"
    assert works["ranks on GPUs, over NCCL"] == works["FP8 of TransformerEngine"] == "no: needs a GPU"
    assert works["optax and JAX"] == "no: needs pip install 'fsharp[jax]'"


@pytest.mark.parametrize(
    ("nccl", "capability", "missing"),
    [
        ((2, 18), (8, 0), {'arena_memory="registered"', 'arena_memory="symmetric"', *QUANTIZED}),
        ((2, 21), (9, 0), {'arena_memory="symmetric"', QUANTIZED[1]}),
        ((2, 28), (10, 0), set()),
        ((), (9, 0), {"ranks on GPUs, over NCCL", 'arena_memory="registered"', 'arena_memory="symmetric"', QUANTIZED[1]}),
    ],
)
def test_doctor_on_a_machine_with_two_gpus(nccl, capability, missing, capsys, monkeypatch):
    cuda = SimpleNamespace(
        device_count=lambda: 2,
        get_device_name=lambda i: "NVIDIA H100",
        get_device_properties=lambda i: SimpleNamespace(total_memory=80 << 30),
        get_device_capability=lambda i: capability,
        can_device_access_peer=lambda i, j: i < j,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: cuda)
    monkeypatch.setattr("fsharp.cli.diagnosis._nccl_version", lambda: nccl)
    found = doctors_sections(capsys)
    text = f"NVIDIA H100, 80.00 GiB, compute capability {capability[0]}.{capability[1]}"
    assert [found["hardware"][f"GPU {i}"] for i in range(2)] == [text] * 2
    assert found["hardware"]["links of GPUs"] == "1 of 2 pairs read each other's memory"
    assert {feature for feature, text in found["what works here"].items() if text != "yes"} == missing


def test_doctor_on_a_machine_whose_gpu_does_not_work(capsys, monkeypatch):
    """The driver counts GPUs without an error, and fails at the first use of one."""

    def get_device_capability(i):
        raise RuntimeError("CUDA error: system not yet initialized\nCompile with TORCH_USE_CUDA_DSA")

    cuda = SimpleNamespace(device_count=lambda: 1, get_device_capability=get_device_capability)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: cuda)
    monkeypatch.setattr("fsharp.cli.diagnosis._nccl_version", tuple)
    found = doctors_sections(capsys)
    assert found["hardware"]["GPU 0"] == "does not work: CUDA error: system not yet initialized"
    assert found["what works here"]["streams, CUDA graphs, pinned memory"] == "no: needs a GPU"


def test_help_names_the_model_and_joins_the_lines_of_docstrings(capsys):
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "usage: fsharp tune [-h] [TUNE OPTIONS] MODEL"
    said = " ".join(re.sub("[│╭╰─╮╯]", "", text).split())
    assert "the path of a Hugging Face config.json or of its folder" in said
    rows = [line.strip("│ ") for line in text.splitlines()]
    assert not any(row.endswith("of two: hosts times") for row in rows)  # the end of a line in the docstring


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "Expected one of {plan, schedule, tune, calibrate, report, doctor, ckpt}"),
        (["ckpt"], "Expected one of {list, show, verify, diff, prune, export, convert}"),
        (["ckpt", "lst"], "lst. Available subcommands: list, show,"),
        (["ckpt", "prune", "x"], "--keep INT number of newest checkpoints to keep."),
        (["ckpt", "export", "a", "b", "--to", "pickle"], "invalid choice 'pickle' for argument '--to'. Expected one of"),
        (["doctor", "--fix"], "Unrecognized options: --fix"),
        (["plan"], "MODEL a named architecture (gpt-2,"),
        (["calibrate"], "FILE path of the JSON file to write, such as hardware.json."),
        (["schedule", "gpt-2", "--tokens", "abc"], "parsing --tokens: invalid literal for int() with base 10: 'abc'. "),
        (["schedule", "gpt-2", "--polcy", "x"], "Perhaps you meant: --policy STR"),
    ],
)
def test_a_wrong_command_line_has_status_2_and_one_line(argv, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert words in err
    assert len(err) < 260


def test_a_terminal_without_frames_gets_no_line_of_dashes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(SystemExit):
        main(["ckpt", "diff", "a"])
    assert capsys.readouterr().err.startswith("error: Missing from fsharp ckpt diff: SECOND the checkpoint")


def test_without_tyro_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert run(capsys, "doctor") == (1, [], "error: the command needs tyro: pip install 'fsharp[cli]'\n")
