"""Loggers, and what a Run tells them."""

import json
import math
import threading
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fsharp as fs
from fsharp.checkpoint import saver
from fsharp.checkpoint.saving import write_snapshot
from fsharp.errors import FsharpError, OptionError
from fsharp.report.reading import read_log
from fsharp.report.values import plain_layout
from fsharp.testing import processes


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(path):
    return [{name: value for name, value in row.items() if name != "time"} for row in rows(path)]


def test_jsonl_has_a_line_for_each_call(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    logger = fs.resilience.JsonlLogger(path)
    logger.log(3, {"loss": torch.tensor([0.5]), "lr": np.float32(0.25), "flag": True, "nothing": None, "text": "a\nb"})
    logger.log(4, {"norms": {"head": torch.tensor(2, dtype=torch.int64), "all": [1, math.inf, math.nan]}})
    assert without_times(path) == [
        {"step": 3, "loss": 0.5, "lr": 0.25, "flag": True, "nothing": None, "text": "a\nb"},
        {"step": 4, "norms": {"head": 2, "all": [1, "inf", "nan"]}},
    ]
    first, second = (row["time"] for row in rows(path))
    assert first <= second


@pytest.mark.timeout(30)
@pytest.mark.parametrize("strategy", [fs.ddp("outer", "inner"), fs.zero3("outer", "inner"), fs.hsdp("outer", "inner")])
def test_rows_of_a_layout_say_who_holds_what_also_on_very_many_ranks(strategy):
    tree = {str(i): torch.empty(i, 3, device="meta") for i in range(80)} | {"scalar": torch.empty((), device="meta")}
    for sizes in ((2, 3), (1, 100), (128, 128)):
        layout = fs.plan(tree, fs.Mesh({"outer": sizes[0], "inner": sizes[1]}), strategy)
        rows = plain_layout(layout)["rows"]
        for _, path, _, _, share, bits in rows[:: 1 if layout.mesh.size < 200 else 20]:
            where = fs.inspect.sharding(layout)[path]
            held = [last - first for first, last in map(where.elements, range(layout.mesh.size))]
            cells = min(64, len(held))
            runs = [held[i * len(held) // cells : (i + 1) * len(held) // cells] for i in range(cells)]
            assert bits == "".join("01"[any(run)] for run in runs)
            least, most = min(held), max(held)
            between = f"{least:,} elements" if least == most else f"{least:,} to {most:,} elements"
            assert share == (between if where.shard_shape is None else str(list(where.shard_shape)))


def test_a_line_after_a_cut_one_is_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    logger = fs.resilience.JsonlLogger(path)
    logger.log(1, {"loss": 1.0})
    path.write_bytes(path.read_bytes() + b'{"step": 2, "lo')
    logger.log(2, {"loss": 2.0})
    first, cut, last = path.read_text().splitlines()
    assert (json.loads(first)["loss"], cut, json.loads(last)["loss"]) == (1.0, '{"step": 2, "lo', 2.0)


def test_timelines_and_layouts_are_rows(tmp_path):
    layout = fs.plan({"layers": [torch.empty(4, 3), torch.empty(4, 3)]}, fs.Mesh({"dp": 3}), fs.zero3("dp"), units="layers.*")
    schedule = fs.schedules.plan_step(layout)
    timeline = fs.inspect.predict(schedule, fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=1e6))
    fs.resilience.JsonlLogger(tmp_path / "log.jsonl").log(0, {"layout": layout, "predicted": timeline})
    [row] = rows(tmp_path / "log.jsonl")
    assert row["layout"]["rows"] == [["layers.* x2", "", "float32[4, 3]", "", "4 elements", "111"]]
    assert row["layout"]["nbytes"] == {kind: layout.nbytes(kind) for kind in ("params", "main", "grads", "optim")}
    found = row["predicted"]
    assert found["timeline"][:2] == ["op", "kind"]
    assert [span[0] for span in found["spans"]] == [span.op for span in timeline.spans]
    sent = sum(call.nbytes * count for call, count in schedule.collective_counts().items())
    assert sum(span[7] for span in found["spans"]) == sent > 0
    assert max(nbytes for _, nbytes in found["memory"]) == found["peak_nbytes"] == timeline.peak_nbytes


LAYOUT = fs.plan({"w": torch.empty(4)}, fs.Mesh({"dp": 1}), fs.ddp("dp"))


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        torch.ones(1, device="meta"),
        Fraction(10**400),
        object(),
        {"a": b"bytes"},
        b"1.5",
        bytearray(b"1.5"),
        {"a": LAYOUT},
    ],
)
def test_a_value_that_json_cannot_hold_is_named(value, tmp_path):
    with pytest.raises(FsharpError, match=r"log\(\): 'norm(\.a)?' is .*, expected a number, a tensor with one element"):
        fs.resilience.JsonlLogger(tmp_path / "log.jsonl").log(0, {"norm": value})
    assert not (tmp_path / "log.jsonl").exists()


def loggers_and_their_calls(path):
    """Return a logger of each class, with a function that returns what it has written."""
    calls = []
    wandb = SimpleNamespace(log=lambda data, step: calls.append(data))
    board = SimpleNamespace(add_scalar=lambda *call: calls.append(call), add_text=None)
    board.add_text = board.add_scalar
    return [
        (fs.resilience.JsonlLogger(path), lambda: rows(path) if path.exists() else []),
        (fs.resilience.WandbLogger(wandb), lambda: calls),
        (fs.resilience.TensorBoardLogger(board), lambda: calls),
    ]


def test_two_values_that_would_have_one_name_are_refused_before_anything_is_written(tmp_path):
    for logger, written in loggers_and_their_calls(tmp_path / "log.jsonl"):
        with pytest.raises(FsharpError, match=r"log\(\): two values have the name 'a/b' once joined by '/'"):
            logger.log(0, {"loss": 1.0, "a": {"b": 1}, "a/b": 2, "layout": LAYOUT})
        assert written() == []


def test_a_list_that_holds_itself_is_refused(tmp_path):
    value, deep = [1.0], 2.0
    value += [value, value]
    for _ in range(100):
        deep = [deep]
    for logger, written in loggers_and_their_calls(tmp_path / "log.jsonl"):
        with pytest.raises(
            FsharpError, match=r"log\(\): 'norm\.1\.1.* is nested in more than 100 lists and dicts, or holds itself"
        ):
            logger.log(0, {"norm": value})
        assert written() == []
    loggers_and_their_calls(tmp_path / "log.jsonl")[0][0].log(0, {"norm": deep})
    assert json.loads((tmp_path / "log.jsonl").read_text())["norm"] == deep


@pytest.mark.parametrize("step", [2**53, -(2**53), 10**400, 1.5, "1", True])
def test_a_step_that_readers_with_doubles_would_take_for_another_is_refused(step, tmp_path):
    logger = fs.resilience.JsonlLogger(tmp_path / "log.jsonl")
    with pytest.raises(FsharpError, match=r"log\(\): step is .*, expected a whole number below 2\*\*53"):
        logger.log(step, {"loss": 1.0})
    logger.log(2**53 - 1, {"loss": 1.0})
    assert read_log(tmp_path).series == {"loss": {2**53 - 1: 1.0}}


def test_tensorboard_gets_scalars_and_texts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    layout = fs.plan({"w": torch.empty(4)}, fs.Mesh({"dp": 1}), fs.ddp("dp"))
    with SummaryWriter(tmp_path) as writer:
        logger = fs.resilience.TensorBoardLogger(writer)
        logger.log(7, {"loss": torch.tensor(0.5), "own_s": [1, 2.5], "event": "rank 1 is slow", "layout": layout, "none": None})
        logger.log(8, {"loss": torch.tensor(math.inf)})
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert {tag: [(x.step, x.value) for x in found.Scalars(tag)] for tag in found.Tags()["scalars"]} == {
        "loss": [(7, 0.5), (8, math.inf)],
        "own_s/0": [(7, 1.0)],
        "own_s/1": [(7, 2.5)],
    }
    assert [tag.partition("/")[0] for tag in found.Tags()["tensors"]] == ["event"]


def test_wandb_gets_names_and_values():
    calls = []
    logger = fs.resilience.WandbLogger(SimpleNamespace(log=lambda data, step: calls.append((step, data))))
    layout = fs.plan({"w": torch.empty(4)}, fs.Mesh({"dp": 1}), fs.ddp("dp"))
    logger.log(1, {"loss": torch.tensor(0.5), "own_s": [1, 2], "layout": layout})
    logger.log(2, {"layout": layout})
    logger.log(3, {"loss": math.inf})
    assert calls == [(1, {"loss": 0.5, "own_s/0": 1, "own_s/1": 2}), (3, {"loss": math.inf})]


def test_a_logger_of_another_library_needs_its_methods():
    with pytest.raises(
        FsharpError, match=r"TensorBoardLogger\(\): writer is 'runs', expected an object with a method 'add_scal"
    ):
        fs.resilience.TensorBoardLogger("runs")
    with pytest.raises(FsharpError, match=r"WandbLogger\(\): run is None, expected an object with a method 'log'"):
        fs.resilience.WandbLogger(None)


class Recorder:
    """A logger that keeps its calls."""

    def __init__(self):
        self.calls = []

    def log(self, step, values):
        self.calls.append((step, dict(values)))


def steps_of(root, *, total, comm=None, stop=None, bad=(), **options):
    """Run up to a step; the steps in ``bad`` are not finite."""
    comm = comm or fs.SingleComm()
    options = {"save_every": 2, "background": False, "on_nonfinite": "skip"} | options
    with fs.resilience.Run(root, comm=comm, total=total, **options) as run:
        tree = run.resume({"w": torch.zeros(2), "steps": 0})
        for step in run.steps():
            if step == stop:
                raise KeyError("stopped")
            run.log({"loss": 1 / (1 + step)})
            loss = torch.tensor(math.nan if step in bad else 0.0)
            tree = run.end_step(tree | {"steps": step + 1}, nonfinite=fs.resilience.find_nonfinite(loss, {}, comm=comm))


def test_a_run_writes_what_happens(tmp_path):
    root = tmp_path / "run"
    with pytest.raises(KeyError, match="stopped"):
        steps_of(root, total=5, stop=3, bad=[1], config={"lr": 0.5})
    steps_of(root, total=5, config={"lr": 0.25})
    found = without_times(root / "log.jsonl")
    starts = [row for row in found if "start" in row]
    assert [(row["step"], row["start"]["config"]) for row in starts] == [(0, {"lr": 0.5}), (2, {"lr": 0.25})]
    assert starts[0]["start"]["versions"]["torch"] == torch.__version__
    assert [(row["step"], row["loss"]) for row in found if "loss" in row] == [(i, 1 / (1 + i)) for i in (0, 1, 2, 2, 3, 4)]
    assert [row["saved"] for row in found if "saved" in row] == [2, 2, 4, 5], "a kill could have lost the line of a loaded one"
    events = [(row["step"], row["event"]) for row in found if "event" in row]
    assert [step for step, _ in events] == [1, 3, 2]
    words = ["on_nonfinite is 'skip'", "the run ends with KeyError: 'stopped'", "with another config: lr was 0.5 and is 0.25"]
    assert all(word in text for word, (_, text) in zip(words, events, strict=True))
    assert [row["step"] for row in found if "steps_per_s" in row] == [4], "the first part took less than a second"


def test_a_run_has_the_layout_of_its_tree(tmp_path):
    comm = fs.SingleComm(fs.Mesh({"dp": 1}))
    layout = fs.plan({"w": torch.ones(6)}, comm.mesh, fs.zero3("dp"))
    recorder = Recorder()
    with fs.resilience.Run(tmp_path, comm=comm, total=1, save_every=1, loggers=[recorder]) as run:
        params = run.resume(fs.shard({"w": torch.ones(6)}, layout, comm))
        for _ in run.steps():
            params = run.end_step(params)
    [found] = [values["layout"] for _, values in recorder.calls if "layout" in values]
    assert found.units == layout.units
    assert found.nbytes("params") == 24
    assert not (tmp_path / "log.jsonl").exists(), "other loggers were given"


@pytest.mark.parametrize("name", ["step", "time", "start", "event", "saved", "own_s", "steps_per_s"])
def test_names_of_the_run_itself_are_taken(name, tmp_path):
    with fs.resilience.Run(tmp_path, comm=fs.SingleComm(), total=1, save_every=1) as run:
        tree = run.resume({"w": torch.zeros(2)})
        for _ in run.steps():
            with pytest.raises(FsharpError, match=rf"Run\.log\(\): the name '{name}' is taken"):
                run.log({name: 0.5})
            run.end_step(tree)
    if name in ("step", "time"):
        with pytest.raises(FsharpError, match=rf"log\(\): the name '{name}' is taken"):
            fs.resilience.JsonlLogger(tmp_path / "a").log(0, {name: 0.5})


@pytest.mark.parametrize("values", [None, 0.5, [("loss", 0.5)]])
def test_values_without_names_are_refused(values, tmp_path):
    with pytest.raises(OptionError, match=r"log\(\): values is .*, expected values by name, such as \{'loss': 0\.5\}"):
        fs.resilience.JsonlLogger(tmp_path / "a").log(0, values)


def test_values_after_the_loop_are_of_the_last_step(tmp_path):
    with fs.resilience.Run(tmp_path, comm=fs.SingleComm(), total=2, save_every=1) as run:
        tree = run.resume({"w": torch.zeros(2)})
        with pytest.raises(FsharpError, match=r"Run\.log\(\): values is 3.0, expected a Mapping"):
            run.log(3.0)
        for _ in run.steps():
            tree = run.end_step(tree)
            run.log({"eval": 1.0})
        run.log({"test": 2.0})
    found = [row for row in without_times(tmp_path / "log.jsonl") if "eval" in row or "test" in row]
    assert found == [{"step": 0, "eval": 1.0}, {"step": 1, "eval": 1.0}, {"step": 1, "test": 2.0}]
    steps = [row["step"] for row in rows(tmp_path / "log.jsonl")]
    assert steps == sorted(steps), "wandb takes no earlier step"


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_is_recorded_once_it_is_complete(fails, tmp_path, monkeypatch):
    begun, proceed = threading.Event(), threading.Event()

    def write(*args):
        begun.set()
        assert proceed.wait(60)
        if fails:
            raise OSError("no space left")
        return write_snapshot(*args)

    monkeypatch.setattr(saver, "write_snapshot", write)
    recorder = Recorder()

    def saved():
        return [values["saved"] for _, values in recorder.calls if "saved" in values]

    with (
        pytest.raises(FsharpError, match="no space left") if fails else nullcontext(),
        fs.resilience.Run(tmp_path, comm=fs.SingleComm(), total=2, save_every=1, loggers=[recorder]) as run,
    ):
        tree = run.resume({"w": torch.zeros(2)})
        for step in run.steps():
            if step == 1:
                assert begun.wait(60)
                assert not saved()
                proceed.set()
            tree = run.end_step(tree)
    assert saved() == ([] if fails else [1, 2])


def test_a_failing_logger_does_not_hide_the_error_of_a_run(tmp_path, caplog):
    class Broken:
        def log(self, step, values):
            if "event" in values:
                raise OSError("no space left")

    with pytest.raises(KeyError, match="stopped"):
        steps_of(tmp_path, total=4, stop=2, loggers=[Broken()])
    assert "a logger could not record the end of the run: OSError: no space left" in caplog.text


def test_a_run_refuses_what_is_no_logger(tmp_path):
    with pytest.raises(FsharpError, match=r"Run\(\): a logger is 'a', expected an object with a method log"):
        fs.resilience.Run(tmp_path, comm=fs.SingleComm(), total=1, save_every=1, loggers=["a"])


def test_a_run_logs_in_a_step_alone(tmp_path):
    with (
        fs.resilience.Run(tmp_path, comm=fs.SingleComm(), total=1, save_every=1) as run,
        pytest.raises(FsharpError, match=r"Run\.log\(\): call resume\(tree\) first"),
    ):
        run.log({"loss": 1.0})


class Full:
    """A logger that has no space from step 1 on."""

    def log(self, step, values):
        if step == 1:
            raise OSError("no space left")


def test_rank_0_alone_records_and_its_error_is_that_of_all_ranks(tmp_path):
    def main(comm):
        steps_of(tmp_path / "run", total=12, comm=comm, bad=[1] if comm.rank else [])
        try:
            steps_of(tmp_path / "full", total=4, comm=comm, loggers=[Full()])
        except (OSError, FsharpError) as error:
            return str(error)
        return ""

    errors = processes(fs.Mesh({"dp": 2}), main)
    assert all("no space left" in each for each in errors), errors
    found = without_times(tmp_path / "run" / "log.jsonl")
    assert [row["step"] for row in found if "loss" in row] == list(range(12))
    assert [len(row["own_s"]) for row in found if "own_s" in row] == [2]
    assert ["rank 1" in row["event"] for row in found if "event" in row] == [True]
