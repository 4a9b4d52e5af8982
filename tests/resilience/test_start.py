"""Ranks that were started differently raise one error, which names what differs and on which ranks."""

import collections

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, RunError
from fsharp.resilience import agree_at_start
from fsharp.testing import simulate
from tests.ranks import on_ranks

DP3 = fs.Mesh({"dp": 3})


def refused(call):
    """The one text that all ranks raise."""

    def rank_fn(comm):
        with pytest.raises(AgreementError, match=r"agree_at_start\(\)") as caught:
            call(comm)
        return str(caught.value)

    [text] = set(simulate(DP3, rank_fn))
    return text


@pytest.mark.parametrize(
    ("usual", "odd", "expected"),
    [
        ({"lr": 0.1}, {"lr": 0.2}, ["config.lr", "ranks 0, 2: 0.1", "rank 1: 0.2"]),
        ({"m": {"width": 8, "depth": [1, 2]}}, {"m": {"width": 8, "depth": [1, 3]}}, ["config.m.depth", "rank 1: [1, 3]"]),
        ({"path": "a"}, {"path": "b"}, ["config.path", '"a"', '"b"']),
        ({"only": None}, {}, ["config.only", "rank 1: (absent)"]),
        ({"n": 1}, {"n": 1.0}, ["config.n", "rank 1: 1.0"]),
        ({"data": "x" * 300 + "a"}, {"data": "x" * 300 + "b"}, ["ranks 0, 2: ...xxx", 'xa"', 'xb"']),
        ({"a": {}}, {}, ["config.a", "ranks 0, 2: {}"]),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": 5, "a": {"b": 2}}, ["rank 1: 5"]),
    ],
)
def test_a_field_of_the_config_is_named(usual, odd, expected):
    text = refused(lambda comm: agree_at_start({"untouched": 5, **(odd if comm.rank == 1 else usual)}, comm=comm))
    assert all(part in text for part in expected), text
    assert "untouched" not in text
    assert "width" not in text


def test_trees_of_other_shapes_dtypes_and_structures():
    def tree(rank):
        return {"w": torch.ones(3 + (rank == 2)), "n": 1, "b": torch.ones(2, dtype=torch.bfloat16 if rank else torch.float32)}

    text = refused(lambda comm: agree_at_start({}, tree(comm.rank), comm=comm))
    assert "w: float32[4]" in text
    assert "b: float32[2]" in text
    assert "n: int" not in text


@pytest.mark.parametrize(
    ("usual", "odd", "expected"),
    [
        ([1.0, 2.0], (1.0, 2.0), "structure  rank 1: "),
        ({"a": 1.0, "b": None}, {"a": 1.0}, "structure  rank 1: "),
        (
            {"seed": fs.resilience.IndexSampler(9, 3, seed=0)},
            {"seed": fs.resilience.IndexSampler(9, 3, seed=1)},
            "seed.seed: int 1",
        ),
        (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1), "rank 1: b: int 2"),
    ],
)
def test_structures_and_numbers_are_compared(usual, odd, expected):
    assert expected in refused(lambda comm: agree_at_start({}, odd if comm.rank == 1 else usual, comm=comm))


@on_ranks(DP3)
def test_addresses_are_not_compared(comm):
    agree_at_start({}, collections.defaultdict(lambda: 0, a=1), comm=comm)


def test_layouts_are_compared():
    def call(comm):
        layout = fs.plan({"w": torch.ones(6)}, DP3, fs.zero3("dp") if comm.rank else fs.zero2("dp"))
        agree_at_start({}, fs.shard_for({"w": torch.ones(6)}, layout, comm.rank), comm=comm)

    assert "layout: strategy" in refused(call)


def test_code_is_compared_and_a_file_that_one_rank_lacks_is_named(tmp_path):
    files = [tmp_path / "train.py", tmp_path / "gone.py"]
    files[0].write_text("x = 1\n")
    simulate(DP3, lambda comm: agree_at_start({}, comm=comm, files=files[:1]))

    def call(comm):
        files[0].write_text(f"x = {comm.rank == 2}\n")  # ranks take turns until the first collective
        agree_at_start({}, comm=comm, files=files[:1])

    text = refused(call)
    assert f"file {files[0]}" in text
    assert "rank 2: " in text
    with pytest.raises(AgreementError, match=r"failed on rank 1; rank 1 says:\n.*gone\.py"):
        simulate(DP3, lambda comm: agree_at_start({}, comm=comm, files=files[: 1 + (comm.rank == 1)]))
    with pytest.raises(RunError, match=r"files: '.*gone\.py' cannot be read \(No such file or directory\), in the folder"):
        agree_at_start({}, comm=fs.SingleComm(), files=files)


def test_versions_are_compared(monkeypatch):
    versions = iter(["1.0", "1.1", "1.0"])
    monkeypatch.setattr("platform.python_version", lambda: next(versions))
    text = refused(lambda comm: agree_at_start({}, comm=comm))
    assert "python" in text
    assert "rank 1: 1.1" in text


@on_ranks(DP3)
def test_what_agrees_costs_one_digest(comm):
    counting = fs.collectives.CountingComm(comm)
    agree_at_start({"a": 1}, {"x": torch.ones(2)}, comm=counting)
    assert counting.num_calls == 1


def test_a_config_is_what_json_has():
    with pytest.raises(RunError, match=r"config: 'model\.act' is <"):
        agree_at_start({"model": {"act": torch.relu}}, comm=fs.SingleComm())
