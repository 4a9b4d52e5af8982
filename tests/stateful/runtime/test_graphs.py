"""CUDA graphs, as far as they need no GPU: the batches that a captured step takes."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, ScheduleError
from fsharp.functional.comm.protocol import innermost_comm
from fsharp.stateful.runtime.captured_step import CapturedStep, copy_into_held, pairs_to_copy
from fsharp.testing import processes
from tests.scheduling import DP

KEPT = np.zeros(3)
CAPTURED = {"x": torch.zeros(2, 3), "scale": 0.5, "more": (torch.zeros(4, dtype=torch.int64), None, "text", KEPT)}


def test_a_captured_step_takes_new_values_of_all_tensors():
    given = {"x": torch.ones(2, 3), "scale": 0.5, "more": (torch.ones(4, dtype=torch.int64), None, "text", KEPT)}
    pairs = pairs_to_copy(CAPTURED, given)
    assert [(id(a), id(b)) for a, b in pairs] == [
        (id(CAPTURED["more"][0]), id(given["more"][0])),
        (id(CAPTURED["x"]), id(given["x"])),
    ]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scale": 0.7}, r"leaf 'scale' of the batch is 0.7, captured as 0.5.(\n|.)*pass what changes as a tensor"),
        ({"scale": torch.tensor(0.5)}, r"is float32\[\], captured as 0.5"),
        ({"x": 1.0}, r"leaf 'x' of the batch is 1.0, captured as float32\[2, 3\]"),
        ({"x": torch.zeros(3, 3)}, r"is float32\[3, 3\], captured as float32\[2, 3\]"),
        ({"x": torch.zeros(2, 3, dtype=torch.float64)}, r"is float64\[2, 3\], captured as float32"),
        ({"more": (CAPTURED["more"][0], None, "text", np.zeros(3))}, r"leaf 'more.3' of the batch is array"),
        ({"more": (CAPTURED["more"][0], 1, "text", KEPT)}, "has the structure"),
        ({"new": 1}, "has the structure"),
    ],
)
def test_a_captured_step_refuses_what_its_graph_would_not_see(change, match):
    with pytest.raises(ScheduleError, match=match):
        pairs_to_copy(CAPTURED, CAPTURED | change)


def test_new_tensors_that_are_other_held_ones_are_copied_too():
    now, before, new = (torch.full((2,), value) for value in (1.0, 2.0, 3.0))
    assert copy_into_held({"before": now, "now": new}, [before, now]) == {"before": before, "now": now}
    assert (before.tolist(), now.tolist()) == ([1.0, 1.0], [3.0, 3.0])
    held = copy_into_held((torch.full((2,), 4.0), now), [now, before])
    assert (held[0] is now, now.tolist(), before.tolist()) == (True, [4.0, 4.0], [3.0, 3.0])


def test_all_ranks_hear_of_a_batch_that_one_rank_refuses():
    def rank_fn(comm):
        scheduler = fs.Scheduler(comm)
        innermost_comm(scheduler.engine.steps.own).watch.start_failure_monitor(0.05)  # as over NCCL
        captured = CapturedStep.__new__(CapturedStep)  # to capture takes a GPU
        captured._scheduled, captured._batch = SimpleNamespace(scheduler=scheduler), {"x": torch.zeros(2)}
        captured._graph, captured._metrics = SimpleNamespace(replay=lambda: None), None
        captured.state = fs.TrainState(0, None, None, None)
        captured({"x": torch.ones(2)})
        assert captured.state.step == 1
        assert captured._batch["x"].tolist() == [1.0, 1.0]
        if comm.rank == 1:
            with pytest.raises(ScheduleError, match=r"leaf 'x' of the batch is float32\[3\]"):
                captured({"x": torch.ones(3)})
            with pytest.raises(ScheduleError, match="closed by an earlier error"):
                captured({"x": torch.ones(2)})
            return True
        with pytest.raises(AgreementError, match=r"leaf 'x' of the batch is float32\[3\]"):
            _call_for(captured, {"x": torch.ones(2)}, seconds=30)
        return True

    assert processes(DP, rank_fn) == [True, True]


def _call_for(captured, batch, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        captured(batch)
