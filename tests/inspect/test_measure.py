"""measure: the same numbers on every rank, for every link of the mesh, that predict a step."""

import math
import threading

import pytest
import torch

import fsharp as fs
from fsharp.inspect import measuring
from fsharp.testing import processes, simulate
from tests.ranks import on_ranks


@pytest.mark.parametrize("axes", [{"dp": 2}, {"outer": 2, "inner": 1}])
def test_ranks_measure_the_same_numbers_for_all_collectives_of_zero3(axes):
    def run(comm):
        return fs.inspect.measure(comm, compute_times={"**": (0.5, 1.0)}, update_s=0.25, steps=5)

    mesh = fs.Mesh(axes)
    first, second = processes(mesh, run)
    assert first == second
    axis = next(name for name, size in mesh.axes if size > 1)
    assert set(first.bandwidth) == set(first.latency) == {(op, axis) for op in ("all_gather", "all_to_all", "reduce_scatter")}
    assert all(rate > 0 for rate in first.bandwidth.values())
    assert 0 < first.codec_bandwidth < math.inf
    assert first.computes_on_host
    assert first.issue_s > 0
    shapes = {"layers": [torch.empty(64, 64) for _ in range(3)]}
    layouts = {name: fs.plan(shapes, mesh, getattr(fs, name)(*axes), units="layers.*") for name in ("ddp", "zero3")}
    choice = fs.tune(layouts, first, budget=1e9, backend="gloo")
    assert all(each.step_s > 4.5 for each in choice.candidates)  # three units and the update


def test_one_rank_has_no_links():
    (found,) = simulate(fs.Mesh({"dp": 1}), lambda comm: fs.inspect.measure(comm, compute_times=(0.5, 1.0), steps=1))
    assert found.compute_times == (0.5, 1.0)


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("compute_times", [(0.5, 1.0), (0.5, 2.0)], "rank 1: 0.5, 2.0"),
        ("compute_times", [{"a": (0.5, 1.0), "**": (1, 2)}, {"a": (0.5, 1.0), "**": (1, 3)}], r"rank 1: \*\*: 1.0, 3.0"),
        ("update_s", [0.0, 0.25], "rank 1: 0.25"),
        ("contention", [None, 0.25], "rank 0: None"),
        ("steps", [1, 2], "rank 1: 2.0"),
    ],
)
@on_ranks(fs.Mesh({"dp": 2}))
def test_ranks_with_different_arguments_are_refused(comm, name, values, shown):
    with pytest.raises(fs.errors.AgreementError, match=rf"{name} .*{shown}"):
        fs.inspect.measure(comm, **{"compute_times": (0.5, 1.0), "steps": 1, name: values[comm.rank]})


@on_ranks(fs.Mesh({"dp": 2}))
def test_a_bad_argument_on_one_rank_is_an_error_on_all(comm):
    with pytest.raises(fs.errors.FsharpError, match=r"update_s is -1\.0, expected at least 0"):
        fs.inspect.measure(comm, compute_times=(0.5, 1.0), steps=1, update_s=-1.0 if comm.rank else 0.0)


def test_no_steps_are_refused():
    with pytest.raises(fs.errors.ScheduleError, match="steps is 0, expected at least 1"):
        fs.inspect.measure(fs.SingleComm(), compute_times=(0.5, 1.0), steps=0)


def test_speeds_that_one_rank_alone_cannot_find_are_an_error_on_all(monkeypatch):
    fit = fs.inspect.Hardware.fit

    def fails_on_rank_1(*args, **options):
        if threading.current_thread().name == "rank 1":
            raise fs.errors.ScheduleError("latency and bandwidth cannot be told apart")
        return fit(*args, **options)

    monkeypatch.setattr(measuring.Hardware, "fit", fails_on_rank_1)

    def run(comm):
        with pytest.raises(fs.errors.AgreementError, match="cannot be told apart"):
            fs.inspect.measure(comm, compute_times=(0.5, 1.0), steps=1)

    simulate(fs.Mesh({"dp": 2}), run)


def test_a_bad_number_of_ranks_of_this_host_is_an_error_on_all(monkeypatch):
    def run(comm):
        fs.inspect.measure(comm, compute_times=(0.5, 1.0), steps=1)

    monkeypatch.setattr(measuring.os, "environ", {"LOCAL_WORLD_SIZE": "two"})
    found = simulate(fs.Mesh({"dp": 2}), run, outcomes=True)
    assert all("LOCAL_WORLD_SIZE='two', expected a number of processes" in str(error) for error in found)
